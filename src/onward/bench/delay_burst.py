"""delay-burst: 500,000 messages are due in the same millisecond.

All are scheduled before. The figure is the time from that moment until the last of them is in the
hands of a consumer (one member of a group, which takes batches and acks them); s, less is better.
No peer. `early` must be 0. `lateness_ms` is that of the messages, `server_mb` what the broker had
at most.
"""

import asyncio
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import uvloop

import onward
from onward.bench.clients import GROUP
from onward.bench.delay_lateness import (
    LATE_S_MAX,
    TOPIC,
    check_in_time,
    schedule_all,
    starts_at_ms,
)
from onward.bench.peers import Server, started
from onward.bench.report import Options, Report, percentiles_ms, rounded

COUNT = 500_000
FILLED_PER_SECOND = 40_000
ROUNDS = 3


@dataclass(kw_only=True)
class Burst:
    """What the consumer saw, batch by batch."""

    due_at_ms: int
    expected: int
    early: int = 0
    taken: "array[int]" = field(default_factory=lambda: array("q"))
    taken_at_ns: "array[int]" = field(default_factory=lambda: array("q"))
    server_mb: float = 0.0
    count: int = 0

    def take(self, bodies: Sequence[bytes], *, now_ns: int) -> bool:
        """Note what is in the consumer's hands now; tell whether more is expected."""
        if now_ns < self.due_at_ms * 1_000_000:
            self.early += len(bodies)
        self.taken.append(len(bodies))
        self.taken_at_ns.append(now_ns - self.due_at_ms * 1_000_000)
        self.count += len(bodies)
        return self.count < self.expected

    @property
    def seconds(self) -> float:
        """From the moment when all were due to the last of them."""
        return self.taken_at_ns[-1] / 1e9

    def details(self) -> dict[str, object]:
        """Return what goes into the report."""
        late_ns = array("q")
        for count, at_ns in zip(self.taken, self.taken_at_ns, strict=True):
            late_ns.extend([at_ns] * count)
        return {
            "seconds": rounded(self.seconds),
            "messages": self.count,
            "early": self.early,
            "lateness_ms": percentiles_ms(late_ns),
            "server_mb": rounded(self.server_mb),
        }


def run(options: Options) -> Report:
    """Measure how long a crowded moment takes, in s."""
    count = options.count or COUNT
    bursts: list[Burst] = []
    for _ in range(options.repeat or ROUNDS):
        with started("onward", folder=options.folder, keep=options.keep) as server:
            bursts.append(uvloop.run(_burst(server, count)))
        options.say(f"burst: {bursts[-1].details()}")
    middle = sorted(bursts, key=lambda one: one.seconds)[(len(bursts) - 1) // 2]
    return Report(
        name="delay-burst",
        unit="s",
        less_is_better=True,
        onward=middle.seconds,
        durability="disk",
        details={
            **middle.details(),
            "early": sum(one.early for one in bursts),
            "rounds_s": [rounded(one.seconds) for one in bursts],
        },
    )


async def _burst(server: Server, count: int) -> Burst:
    due_at_ms = starts_at_ms(count, per_second=FILLED_PER_SECOND)
    burst = Burst(due_at_ms=due_at_ms, expected=count)
    async with onward.connect(f"127.0.0.1:{server.port}") as mq:
        await mq.create_topic(TOPIC)
        await schedule_all(mq, [due_at_ms] * count)
        check_in_time(server, due_at_ms)
        async with asyncio.timeout(due_at_ms / 1000 - time.time() + LATE_S_MAX):
            await _consume(mq, burst)
        stored = (await mq.topic(TOPIC)).next_offset
        assert burst.count == stored == count, f"{burst.count} of {count} came, {stored} fired"
        burst.server_mb = server.highest_mb()
    return burst


async def _consume(mq: onward.Client, burst: Burst) -> None:
    async with mq.consume(TOPIC, group=GROUP) as consumer:
        async for batch in consumer.batches():
            is_more = burst.take(batch.bodies, now_ns=time.time_ns())
            acked = batch.ack_soon()
            if not is_more:
                await acked
                return
