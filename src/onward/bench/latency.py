"""latency: how long a message takes from publish to handler, at 5,000 messages/s.

The load is open: each millisecond five messages are due, whatever happened to those before, and
the time of each runs from the moment it was due. It is on disk before it is delivered, and every
message is acked. Publisher and handler are one program. The figure is the 99th percentile; less is
better. Peers: redis-py (XADD, XREADGROUP, XACK, in pipelines, `appendfsync always`) and nats-py
(JetStream, a push subscription).
"""

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from struct import Struct
from typing import Any, Protocol

import uvloop

import onward
from onward.bench.clients import GROUP, STREAM, Pipelined, nats_client, redis_client
from onward.bench.peers import REDIS_PY, REDIS_PY_HIREDIS, Server, beside
from onward.bench.report import Options, Report, percentiles_ms, typical
from onward.bench.rounds import alternate

PER_SECOND = 5_000
TICK_S = 0.001
SECONDS = 10.0
WARM_UP_S = 1.0
ROUNDS = 3
LATE_S_MAX = 60.0
UNANSWERED_MAX = 50_000
UNACKED_MAX = 20_000
BODY = bytes(192)
DUE_AT: Struct = Struct("<Q")

Percentiles = dict[str, float]
Publish = Callable[[bytes], Coroutine[Any, Any, object]]


class System(Protocol):
    """One system under the same load."""

    async def publish(self, body: bytes) -> object:
        """Publish one message and wait until it is confirmed."""

    async def consume(self, take: Callable[[bytes], bool]) -> None:
        """Hand each body to `take` and ack it; end when `take` returns False."""


Opened = Callable[[Server], AbstractAsyncContextManager[System]]


def run(options: Options) -> Report:
    """Measure the 99th percentile from publish to handler, in ms."""
    systems: dict[str, Opened] = {
        "onward": _onward,
        REDIS_PY: partial(_redis, client=REDIS_PY),
        REDIS_PY_HIREDIS: partial(_redis, client=REDIS_PY_HIREDIS),
        "nats-py": _nats,
    }
    seconds = options.seconds or SECONDS
    clients = {name: partial(_measure, opened, seconds) for name, opened in systems.items()}
    compared = alternate(
        clients, options, rounds=ROUNDS, say=lambda one: f"p50 {one['p50']} ms, p99 {one['p99']} ms"
    )
    figures = compared.figures(lambda rounds: typical([one["p99"] for one in rounds]))
    ours = figures.pop("onward")
    not_in_ratio = beside(figures, onward=ours, less_is_better=True)
    return Report(
        name="latency",
        unit="ms (p99)",
        less_is_better=True,
        onward=ours,
        peers=figures,
        missing=compared.missing,
        durability="disk",
        details={
            name: {"settings": one.settings, "rounds": one.rounds}
            for name, one in compared.seen.items()
            if one.rounds
        }
        | {
            "p50_ms": compared.figures(lambda rounds: typical([one["p50"] for one in rounds])),
            "beside": not_in_ratio,
            "messages_per_second": PER_SECOND,
            "servers": compared.versions(),
        },
    )


def _measure(opened: Opened, seconds: float, server: Server) -> Percentiles:
    return percentiles_ms(uvloop.run(_latencies_ns(opened, server, seconds)))


async def _latencies_ns(opened: Opened, server: Server, seconds: float) -> Sequence[int]:
    latencies = array("Q")
    expected = int((WARM_UP_S + seconds) * PER_SECOND)

    def take(body: bytes) -> bool:
        latencies.append(time.perf_counter_ns() - DUE_AT.unpack_from(body)[0])
        return len(latencies) < expected

    async with (
        opened(server) as system,
        asyncio.timeout(WARM_UP_S + seconds + LATE_S_MAX),
        asyncio.TaskGroup() as group,
    ):
        group.create_task(system.consume(take))
        await publish_on_time(system.publish, expected)
    return latencies[int(WARM_UP_S * PER_SECOND) :]


async def publish_on_time(publish: Publish, count: int) -> None:
    """Publish each message when it is due, and say in its body when that was."""
    tick_ns = int(TICK_S * 1e9)
    each = round(PER_SECOND * TICK_S)
    due_at_ns = time.perf_counter_ns()
    unanswered: set[asyncio.Task[object]] = set()
    async with asyncio.TaskGroup() as group:
        for number in range(0, count, each):
            due_at_ns += tick_ns
            while (now_ns := time.perf_counter_ns()) < due_at_ns:  # noqa: ASYNC110  # a clock
                await asyncio.sleep((due_at_ns - now_ns) / 1e9)
            for _ in range(min(each, count - number)):
                task = group.create_task(publish(DUE_AT.pack(due_at_ns) + BODY))
                unanswered.add(task)
                task.add_done_callback(unanswered.discard)
            if len(unanswered) > UNANSWERED_MAX:
                await asyncio.wait(unanswered, return_when=asyncio.FIRST_COMPLETED)
            # Being late must not keep the others of this loop from their turn.
            await asyncio.sleep(0)


class _OnwardSystem:
    def __init__(self, mq: onward.Client) -> None:
        self._mq = mq

    async def publish(self, body: bytes) -> object:
        return await self._mq.publish(STREAM, body, durability="disk")

    async def consume(self, take: Callable[[bytes], bool]) -> None:
        async with self._mq.consume(STREAM, group=GROUP) as consumer:
            async for delivery in consumer:
                is_more = take(delivery.body)
                acked = delivery.ack_soon()
                if not is_more:
                    await acked
                    return


@asynccontextmanager
async def _onward(server: Server) -> AsyncIterator[System]:
    async with onward.connect(f"127.0.0.1:{server.port}") as mq:
        await mq.create_topic(STREAM)
        yield _OnwardSystem(mq)


class _RedisSystem:
    def __init__(self, redis: Any, *, publishing: Pipelined, acking: Pipelined) -> None:
        self._redis = redis
        self._publishing = publishing
        self._acking = acking

    async def publish(self, body: bytes) -> object:
        return await self._publishing.call("XADD", STREAM, "*", "b", body)

    async def consume(self, take: Callable[[bytes], bool]) -> None:
        is_more = True
        while is_more:
            found = await self._redis.xreadgroup(
                GROUP, "one", {STREAM: ">"}, count=1_000, block=1_000
            )
            for entry_id, fields in found[0][1] if found else ():
                is_more = take(fields[b"b"])
                acked = self._acking.call("XACK", STREAM, GROUP, entry_id)
        await acked


@asynccontextmanager
async def _redis(server: Server, *, client: str) -> AsyncIterator[System]:
    async with redis_client(server, client) as redis, asyncio.TaskGroup() as group:
        await redis.xgroup_create(STREAM, GROUP, id="0", mkstream=True)
        # Two connections: a publish never waits for acks to be carried.
        publishing, acking = Pipelined(redis), Pipelined(redis)
        carrying = [group.create_task(line.run()) for line in (publishing, acking)]
        yield _RedisSystem(redis, publishing=publishing, acking=acking)
        for task in carrying:
            task.cancel()


class _NatsSystem:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def publish(self, body: bytes) -> object:
        answer: object = await self._stream.publish(STREAM, body, timeout=LATE_S_MAX)
        return answer

    async def consume(self, take: Callable[[bytes], bool]) -> None:
        from nats.js.api import ConsumerConfig

        config = ConsumerConfig(max_ack_pending=UNACKED_MAX)
        group = await self._stream.subscribe(STREAM, durable=GROUP, manual_ack=True, config=config)
        async for message in group.messages:
            is_more = take(message.data)
            await message.ack()
            if not is_more:
                return


@asynccontextmanager
async def _nats(server: Server) -> AsyncIterator[System]:
    async with nats_client(server) as stream:
        yield _NatsSystem(stream)
