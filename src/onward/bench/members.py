"""members: 300 handlers of 5 ms in three programs, beside the same handlers without a broker.

    app         three Apps with concurrency=100: the figure
    ack_soon    300 members of a group, each with one message at a time, acked without waiting
    await_ack   the same, each waiting until its ack is durable

The peer is what the same handlers do alone, in the same three programs: the ratio is what a broker
leaves of it. Each kind has its own group on the same messages. `details` has the processor time for
each message, of the broker and of the three programs together.
"""

import asyncio
import multiprocessing
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import median

import uvloop

import onward
from onward.bench.peers import Server, started
from onward.bench.report import Options, Report, rounded

PROGRAMS = 3
MEMBERS = 100
WORK_S = 0.005
SECONDS = 4.0
ROUNDS = 3
WARM_UP_S = 2.0
TOPIC = "bench"
BODY = bytes(200)
PUBLISHED_AT_ONCE = 1_000
KINDS = ("alone", "app", "ack_soon", "await_ack")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the programs of one round did."""

    per_second: float
    client_us: float
    broker_us: float = 0.0


class Load:
    """The handlers of one program, counted while the round lasts."""

    def __init__(self, *, start_s: float, seconds: float) -> None:
        self.count = 0
        self._start_s = start_s
        self._end_s = start_s + seconds
        self.over = asyncio.Event()

    async def work(self) -> None:
        """Do the work of one message."""
        await asyncio.sleep(WORK_S)
        self.count += self._start_s <= time.time() < self._end_s

    async def last(self) -> float:
        """Wait for the end of the round; return the processor time that it took."""
        await asyncio.sleep(self._start_s - time.time())
        before_s = time.process_time()
        await asyncio.sleep(self._end_s - time.time())
        self.over.set()
        return time.process_time() - before_s


def run(options: Options) -> Report:
    """Measure messages per second of three Apps."""
    seconds = options.seconds or SECONDS
    count = options.count or int(PROGRAMS * MEMBERS / WORK_S * (seconds + WARM_UP_S))
    outcomes: dict[str, list[Outcome]] = {kind: [] for kind in KINDS}
    with started("onward", folder=options.folder, keep=options.keep) as server:
        uvloop.run(_publish(server, count))
        for number in range(options.repeat or ROUNDS):
            for kind in KINDS:
                outcomes[kind].append(_round(server, kind, f"{kind}-{number}", seconds))
                options.say(f"{kind}: {outcomes[kind][-1]}")
    rates = {kind: median(one.per_second for one in some) for kind, some in outcomes.items()}
    return Report(
        name="members",
        unit="messages/s",
        onward=rates["app"],
        peers={"handlers alone": rates["alone"]},
        durability="disk",
        details={
            kind: {
                "per_second": rounded(rates[kind]),
                "share_of_alone": round(rates[kind] / rates["alone"], 3),
                "client_us": round(median(one.client_us for one in some), 1),
                "broker_us": round(median(one.broker_us for one in some), 1),
            }
            for kind, some in outcomes.items()
        },
    )


async def _publish(server: Server, count: int) -> None:
    async with onward.connect(f"127.0.0.1:{server.port}") as mq:
        for _ in range(0, count, PUBLISHED_AT_ONCE):
            await mq.publish_many(TOPIC, [BODY] * PUBLISHED_AT_ONCE)


def _round(server: Server, kind: str, group: str, seconds: float) -> Outcome:
    """Run the three programs at the same time."""
    start_s = time.time() + WARM_UP_S
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PROGRAMS, mp_context=context) as programs:
        running = [
            programs.submit(_program, kind, server.port, group, start_s, seconds)
            for _ in range(PROGRAMS)
        ]
        time.sleep(max(0.0, start_s - time.time()))
        before_s = server.cpu_seconds()
        time.sleep(seconds)
        broker_s = server.cpu_seconds() - before_s
        counts, client_s = zip(*[one.result() for one in running], strict=True)
    handled = max(1, sum(counts))
    return Outcome(
        per_second=sum(counts) / seconds,
        client_us=sum(client_s) / handled * 1e6,
        broker_us=broker_s / handled * 1e6 if kind != "alone" else 0.0,
    )


def _program(kind: str, port: int, group: str, start_s: float, seconds: float) -> tuple[int, float]:
    """Be one program: return how many messages it handled, and its processor time."""

    async def main() -> tuple[int, float]:
        load = Load(start_s=start_s, seconds=seconds)
        async with asyncio.TaskGroup() as tasks:
            handling = tasks.create_task(_HANDLING[kind](load, f"127.0.0.1:{port}", group))
            cpu_s = await load.last()
            if kind != "app":
                handling.cancel()
        return load.count, cpu_s

    return uvloop.run(main())


async def _alone(load: Load, address: str, group: str) -> None:
    async def handle() -> None:
        while True:
            await load.work()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(MEMBERS):
            tasks.create_task(handle())


async def _app(load: Load, address: str, group: str) -> None:
    app = onward.App(address)

    @app.consumer(TOPIC, group=group, start="earliest", concurrency=MEMBERS)
    async def handle(body: bytes) -> None:
        await load.work()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(app.run(signals=False))
        await load.over.wait()
        app.stop()


async def _ack_soon(load: Load, address: str, group: str) -> None:
    async def handle(delivery: onward.Delivery) -> None:
        await load.work()
        delivery.ack_soon()

    await _members(address, group, handle)


async def _await_ack(load: Load, address: str, group: str) -> None:
    async def handle(delivery: onward.Delivery) -> None:
        await load.work()
        await delivery.ack()

    await _members(address, group, handle)


async def _members(
    address: str, group: str, handle: Callable[[onward.Delivery], Awaitable[None]]
) -> None:
    async def consume(mq: onward.Client) -> None:
        async for delivery in mq.consume(TOPIC, group=group, start="earliest"):
            await handle(delivery)

    async with onward.connect(address) as mq, asyncio.TaskGroup() as tasks:
        for _ in range(MEMBERS):
            tasks.create_task(consume(mq))


_HANDLING = {"alone": _alone, "app": _app, "ack_soon": _ack_soon, "await_ack": _await_ack}
