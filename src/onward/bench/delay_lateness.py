"""delay-lateness: 10,000 messages are due in each second, for a minute: how late are they?

Ten are due in each millisecond. All are scheduled before; then each is looked at when it is in the
hands of a consumer, which acks it: the lateness is the time since the moment it was due. The figure
is the 99th percentile; less is better; `early` must be 0. Peers, in the same minutes, with a sixth
of the seconds: a Redis sorted set that is asked every millisecond (ZRANGEBYSCORE, then ZREM), and
beanstalkd (greenstalk, four connections), whose delays are whole seconds: what is due within a
second waits for its end, and `own_p99_ms` is the lateness after the moment that it was told. Both
peers sync now and then, as they do by default: they have less to do than Onward, which has each
message on the disk before it is delivered. With `--busy`, the processors or the disk are in use by
other programs all the time, for every server alike.
"""

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from struct import Struct
from typing import Any, Protocol

import uvloop

import onward
from onward.bench.busy import busy
from onward.bench.clients import GROUP, redis_client
from onward.bench.peers import (
    REDIS_PY,
    REDIS_PY_HIREDIS,
    PeerMissing,
    Server,
    beside,
    program_version,
    started,
)
from onward.bench.report import Options, Report, percentiles_ms, rounded
from onward.bench.rounds import server_of
from onward.errors import Unavailable

PER_SECOND = 10_000
SECONDS = 60.0
PEER_SHARE = 6
LATE_S_MAX = 120.0
TOPIC = "bench"
MESSAGES = 1_000
IN_FLIGHT = 8
POLL_S = 0.001
POLLED_MESSAGES = 1_000
BEANSTALKD_CONNECTIONS = 4
MOMENTS = Struct("<qqq")
"""In each body: when it is due, what its server was told, both in ms, and its number."""
PADDING = bytes(200 - MOMENTS.size)

Take = Callable[[Sequence[bytes]], bool]


@dataclass(kw_only=True)
class Lateness:
    """What a consumer saw."""

    expected: int
    late_ns: "array[int]" = field(default_factory=lambda: array("q"))
    own_late_ns: "array[int]" = field(default_factory=lambda: array("q"))
    early: int = 0
    server_mb: float = 0.0

    def take(self, bodies: Sequence[bytes]) -> bool:
        """Look at what is in the consumer's hands now; tell whether more is expected."""
        return self.note(bodies, now_ns=time.time_ns())

    def note(self, bodies: Sequence[bytes], *, now_ns: int) -> bool:
        """Note how late these are."""
        for body in bodies:
            due_at_ms, told_ms, _ = MOMENTS.unpack_from(body)
            late_ns = now_ns - due_at_ms * 1_000_000
            self.early += late_ns < 0
            self.late_ns.append(late_ns)
            self.own_late_ns.append(now_ns - told_ms * 1_000_000)
        return len(self.late_ns) < self.expected

    def details(self) -> dict[str, float]:
        """Return what goes into the report."""
        found = percentiles_ms(self.late_ns)
        own = percentiles_ms(self.own_late_ns)
        return found | {
            "own_p99_ms": own["p99"],
            "early": self.early,
            "messages": len(self.late_ns),
            "server_mb": rounded(self.server_mb),
        }


class System(Protocol):
    """One system under the same load."""

    async def schedule(self, due_at_ms: Sequence[int]) -> None:
        """Schedule a message for each of these moments."""

    async def consume(self, take: Take) -> None:
        """Hand all bodies to `take`, and ack them; end when `take` returns False."""


Opened = Callable[[Server], AbstractAsyncContextManager[System]]


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A system, how long it is measured, and how fast it can be filled at least."""

    opened: Opened
    seconds: float
    filled_per_second: int
    options: dict[str, str] = field(default_factory=dict)
    settings: str = ""


def run(options: Options) -> Report:
    """Measure the 99th percentile of the lateness, in ms."""
    with busy(options.busy, folder=options.folder):
        return _run(options)


def _run(options: Options) -> Report:
    found: dict[str, Lateness] = {}
    settings: dict[str, str] = {}
    missing: dict[str, str] = {}
    for name, one in _contenders(options.seconds or SECONDS).items():
        try:
            with started(
                server_of(name), folder=options.folder, keep=options.keep, options=one.options
            ) as server:
                found[name] = uvloop.run(measure(one, server))
                settings[name] = one.settings or server.settings
        except PeerMissing as error:
            missing[name] = str(error)
            options.say(f"missing: {error}")
            continue
        options.say(f"{name}: {found[name].details()}")
    figures = {name: one.details()["p99"] for name, one in found.items()}
    ours = figures.pop("onward")
    not_in_ratio = beside(figures, onward=ours, less_is_better=True)
    return Report(
        name="delay-lateness",
        unit="ms (p99)",
        less_is_better=True,
        onward=ours,
        peers=figures,
        missing=missing,
        durability="disk",
        details={name: {"settings": settings[name], **one.details()} for name, one in found.items()}
        | {
            "beside": not_in_ratio,
            "due_per_second": PER_SECOND,
            "busy": options.busy,
            "servers": {
                name: program_version(name)
                for name in ("redis-server", "beanstalkd")
                if any(name.startswith(server_of(peer)) for peer in found)
            },
        },
    )


def _contenders(seconds: float) -> dict[str, Contender]:
    redis = partial(
        Contender, seconds=seconds / PEER_SHARE, filled_per_second=10_000,
        options={"appendfsync": "everysec"}, settings="appendonly yes, appendfsync everysec",
    )  # fmt: skip
    return {
        "onward": Contender(opened=_onward, seconds=seconds, filled_per_second=40_000),
        REDIS_PY: redis(opened=partial(_redis, client=REDIS_PY)),
        REDIS_PY_HIREDIS: redis(opened=partial(_redis, client=REDIS_PY_HIREDIS)),
        "beanstalkd": Contender(
            opened=_beanstalkd, seconds=seconds / PEER_SHARE, filled_per_second=3_000,
            options={"sync_ms": "50"},
        ),
    }  # fmt: skip


async def measure(contender: Contender, server: Server) -> Lateness:
    """Schedule everything, and take it as it comes due."""
    count = max(1, int(contender.seconds * PER_SECOND))
    start_ms = starts_at_ms(count, per_second=contender.filled_per_second)
    moments = [start_ms + number * 1000 // PER_SECOND for number in range(count)]
    lateness = Lateness(expected=count)
    async with contender.opened(server) as system:
        await system.schedule(moments)
        check_in_time(server, start_ms)
        async with asyncio.timeout(start_ms / 1000 - time.time() + contender.seconds + LATE_S_MAX):
            await system.consume(lateness.take)
        assert len(lateness.late_ns) == count, f"{len(lateness.late_ns)} of {count} came"
        lateness.server_mb = server.highest_mb()
    return lateness


def starts_at_ms(count: int, *, per_second: int) -> int:
    """Return the whole second before which so many can be scheduled, at least so fast."""
    return (int(time.time() + 3 + count / per_second) + 1) * 1000


def check_in_time(server: Server, start_ms: int) -> None:
    """Say so when scheduling took longer than there was time."""
    late_s = time.time() - start_ms / 1000
    if late_s > 0:
        raise Unavailable(
            f"{server.name} was still being filled {late_s:.1f} s after the first message was due: "
            "ask for less with --seconds or --count"
        )


# --- onward ----------------------------------------------------------------------------------


async def schedule_all(mq: onward.Client, due_at_ms: Sequence[int]) -> None:
    """Schedule a message for each moment, in batches, several at a time; ids are in order."""
    starts = iter(range(0, len(due_at_ms), MESSAGES))

    async def carry() -> None:
        for start in starts:
            some = due_at_ms[start : start + MESSAGES]
            bodies = [
                MOMENTS.pack(at_ms, at_ms, number) + PADDING
                for number, at_ms in enumerate(some, start)
            ]
            await mq.publish_many(TOPIC, bodies, at=list(some), durability="disk")

    async with asyncio.TaskGroup() as group:
        for _ in range(IN_FLIGHT):
            group.create_task(carry())


class _OnwardSystem:
    def __init__(self, mq: onward.Client) -> None:
        self._mq = mq

    async def schedule(self, due_at_ms: Sequence[int]) -> None:
        await schedule_all(self._mq, due_at_ms)

    async def consume(self, take: Take) -> None:
        async with self._mq.consume(TOPIC, group=GROUP) as consumer:
            async for batch in consumer.batches():
                is_more = take(batch.bodies)
                acked = batch.ack_soon()
                if not is_more:
                    await acked
                    return


@asynccontextmanager
async def _onward(server: Server) -> AsyncIterator[System]:
    async with onward.connect(f"127.0.0.1:{server.port}") as mq:
        await mq.create_topic(TOPIC)
        yield _OnwardSystem(mq)


# --- Redis -----------------------------------------------------------------------------------


class _RedisSystem:
    def __init__(self, redis: Any) -> None:
        self._redis = redis

    async def schedule(self, due_at_ms: Sequence[int]) -> None:
        for start in range(0, len(due_at_ms), MESSAGES):
            some = due_at_ms[start : start + MESSAGES]
            members = {
                MOMENTS.pack(at_ms, at_ms, number) + PADDING: at_ms
                for number, at_ms in enumerate(some, start)
            }
            await self._redis.zadd(TOPIC, members)

    async def consume(self, take: Take) -> None:
        is_more = True
        while is_more:
            now_ms = time.time_ns() // 1_000_000
            found = await self._redis.zrangebyscore(
                TOPIC, "-inf", now_ms, start=0, num=POLLED_MESSAGES
            )
            if not found:
                await asyncio.sleep(POLL_S)
                continue
            removed = await self._redis.zrem(TOPIC, *found)  # whoever removes it has it
            assert removed == len(found), "there is one poller only"
            is_more = take(found)


@asynccontextmanager
async def _redis(server: Server, *, client: str) -> AsyncIterator[System]:
    async with redis_client(server, client) as redis:
        yield _RedisSystem(redis)


# --- beanstalkd ------------------------------------------------------------------------------


class _BeanstalkdSystem:
    def __init__(self, connections: list[Any]) -> None:
        self._connections = connections

    async def schedule(self, due_at_ms: Sequence[int]) -> None:
        def put(connection: Any, first: int) -> None:
            for number in range(first, len(due_at_ms), len(self._connections)):
                at_ms, now_ms = due_at_ms[number], time.time_ns() // 1_000_000
                delay_s = max(0, -(-(at_ms - now_ms) // 1000))
                body = MOMENTS.pack(at_ms, now_ms + delay_s * 1000, number) + PADDING
                connection.put(body, delay=delay_s)

        await self._in_threads(put)

    async def consume(self, take: Take) -> None:
        is_over = False

        def reserve(connection: Any, first: int) -> None:
            nonlocal is_over
            from greenstalk import TimedOutError

            while not is_over:
                try:
                    job = connection.reserve(timeout=1)
                except TimedOutError:
                    continue
                if not take([job.body]):
                    is_over = True
                connection.delete(job)

        await self._in_threads(reserve)

    async def _in_threads(self, work: Callable[[Any, int], None]) -> None:
        async with asyncio.TaskGroup() as group:
            for first, connection in enumerate(self._connections):
                group.create_task(asyncio.to_thread(work, connection, first))


@asynccontextmanager
async def _beanstalkd(server: Server) -> AsyncIterator[System]:
    try:
        from greenstalk import Client
    except ImportError:
        raise PeerMissing("greenstalk is not installed (make setup-bench)") from None
    address = ("127.0.0.1", server.port)
    connections = [Client(address, encoding=None) for _ in range(BEANSTALKD_CONNECTIONS)]
    try:
        yield _BeanstalkdSystem(connections)
    finally:
        for connection in connections:
            connection.close()
