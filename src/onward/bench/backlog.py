"""backlog: 20 M messages behind, drained by 50 members that join and leave at random.

A steady group of 50 members drains the same topic of the same broker in the same way, and stands
as the peer: the ratio is what the coming and going leaves of the speed. Again and again a
member (chosen from a seed) leaves in the middle of what it has, which goes to the others, and
comes back a moment later. The broker's memory is sampled all the time: `slope_mb_per_minute` is
its trend while a group drains, `highest_mb` what it had at most.
"""

import asyncio
import random
import time
from dataclasses import dataclass, field
from functools import partial

import uvloop

import onward
from onward.bench.memory import slope_per_minute
from onward.bench.peers import Server, started
from onward.bench.read import fill
from onward.bench.report import Options, Report, rounded, typical

COUNT = 20_000_000
MEMBERS = 50
CONNECTIONS = 5
ROUNDS = 1
SEED = 1
LEAVE_EACH_S = 0.02
AWAY_S_MAX = 0.2
SAMPLE_S = 0.25


@dataclass(kw_only=True)
class Drain:
    """How one group drains the topic."""

    expected: int
    acked: int = 0
    left: int = 0
    samples: list[tuple[float, float]] = field(default_factory=list)
    per_second: float = 0.0
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self, count: int, acked: "asyncio.Future[None]") -> None:
        """Take note that so many acks are durable, unless they were refused."""
        if not acked.cancelled() and acked.exception() is None:
            self.acked += count
        if self.acked >= self.expected:
            self.done.set()

    def details(self) -> dict[str, object]:
        """Return what goes into the report."""
        return {
            "per_second": rounded(self.per_second),
            "times_left": self.left,
            "highest_mb": rounded(max(megabytes for _, megabytes in self.samples)),
            "slope_mb_per_minute": rounded(slope_per_minute(self.samples)),
        }


def run(options: Options) -> Report:
    """Measure how fast a changing group drains a backlog."""
    count = options.count or COUNT
    seen: dict[str, list[Drain]] = {"steady": [], "changing": []}
    with started("onward", folder=options.folder, keep=options.keep) as server:
        options.say(f"publishing {count:,} messages")
        fill(server, count)
        filled_mb = server.resident_mb()
        for number in range(options.repeat or ROUNDS):
            for name, drains in seen.items():
                is_changing = name == "changing"
                drain = uvloop.run(_drain(server, f"{name}-{number}", is_changing=is_changing))
                drains.append(drain)
                options.say(f"{name}: {drain.details()}")
    return Report(
        name="backlog",
        unit="messages/s",
        onward=typical([one.per_second for one in seen["changing"]]),
        peers={"steady group": typical([one.per_second for one in seen["steady"]])},
        durability="disk",
        details={
            "messages": count,
            "members": MEMBERS,
            "filled_mb": rounded(filled_mb),
            **{name: [one.details() for one in drains] for name, drains in seen.items()},
        },
    )


async def _drain(server: Server, group: str, *, is_changing: bool) -> Drain:
    clients = [onward.connect(f"127.0.0.1:{server.port}") for _ in range(CONNECTIONS)]
    for client in clients:
        await client.open()
    drain = Drain(expected=(await clients[0].topic("bench")).next_offset)
    members = [_Member(clients[number % CONNECTIONS], group, drain) for number in range(MEMBERS)]
    try:
        started_at = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(member.run()) for member in members]
            running.append(tasks.create_task(_sample(server, drain)))
            if is_changing:
                running.append(tasks.create_task(_disturb(members)))
            await drain.done.wait()
            drain.per_second = drain.expected / (time.perf_counter() - started_at)
            for task in running:
                task.cancel()
        drain.left = sum(member.left for member in members)
        unfinished = (await clients[0].group(group)).backlog
        assert not unfinished, f"{unfinished} messages are not acked"
    finally:
        for client in clients:
            await client.close()
    return drain


class _Member:
    """One member: it drains, leaves when it is told to, and comes back."""

    def __init__(self, mq: onward.Client, group: str, drain: Drain) -> None:
        self._mq = mq
        self._group = group
        self._drain = drain
        self.away_s: float | None = None
        self.left = 0

    async def run(self) -> None:
        while True:
            await self._take()
            self.left += 1
            away_s, self.away_s = self.away_s, None
            await asyncio.sleep(away_s or 0.0)

    async def _take(self) -> None:
        async with self._mq.consume("bench", group=self._group) as consumer:
            before: asyncio.Future[None] | None = None
            async for batch in consumer.batches():
                if self.away_s is not None:
                    return  # what it has in hand is given back
                acked = batch.ack_soon()
                acked.add_done_callback(partial(self._drain.note, len(batch.bodies)))
                if before is not None:
                    await before
                before = acked


async def _disturb(members: list[_Member]) -> None:
    """Let a random member leave, again and again."""
    chosen = random.Random(SEED)  # a seed, so that every run is alike
    while True:
        await asyncio.sleep(chosen.expovariate(1 / LEAVE_EACH_S))
        chosen.choice(members).away_s = chosen.uniform(0, AWAY_S_MAX)


async def _sample(server: Server, drain: Drain) -> None:
    started_at = time.monotonic()
    while True:
        drain.samples.append((time.monotonic() - started_at, server.resident_mb()))
        await asyncio.sleep(SAMPLE_S)
