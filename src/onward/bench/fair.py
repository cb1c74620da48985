"""fair: how long ten tenants wait while another one floods a thousand times as much as each.

Ten tenants publish 10 messages a second each. The handlers of their group (16 of them, 2 ms each)
could do far more, but not what the flood brings: 10,000 a second, so its backlog grows and grows.
The group takes tenants in turn (`tenants={}`). The figure is the 99th percentile of the ten
tenants' wait, from publish to handler, with the flood; the peer is the same without it. Less is
better, and the ratio is wait without / wait with: above 1/3 it grew by less than 3 times. `growth`
in the details is its inverse. The flood's backlog must stay below what a group looks ahead (65,536
messages), or the wait says more about that limit than about turns.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from struct import Struct

import uvloop

import onward
from onward.bench.peers import started
from onward.bench.report import Options, Report, percentiles_ms, rounded, typical

TENANTS = 10
PER_SECOND_EACH = 10
FLOOD = 1_000
HANDLERS = 16
WORK_S = 0.002
SECONDS = 10.0
WARM_UP_S = 2.0
LATE_S_MAX = 120.0
ROUNDS = 3
FLOOD_TICK_S = 0.02
SENT_AT: Struct = Struct("<Q")
BODY = bytes(192)


@dataclass
class Waits:
    """What the handlers saw."""

    of_others_ns: list[int] = field(default_factory=list)
    others_published: int = 0
    others_handled: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    flood_count: int = 0
    flood_published: int = 0

    async def all_handled(self) -> None:
        """Wait for the slowest: leaving out who waits longest would flatter the figure."""
        async with asyncio.timeout(LATE_S_MAX):
            while self.others_handled < self.others_published:
                self.changed.clear()
                await self.changed.wait()

    def details(self) -> dict[str, object]:
        """Return what goes into the report."""
        return {
            "wait_ms": percentiles_ms(self.of_others_ns),
            "messages": len(self.of_others_ns),
            "flood_handled": self.flood_count,
            "flood_published": self.flood_published,
        }


def run(options: Options) -> Report:
    """Measure how long tenants wait beside a flood."""
    seconds = options.seconds or SECONDS
    seen: dict[str, list[Waits]] = {"without flood": [], "with flood": []}
    for _ in range(options.repeat or ROUNDS):
        for name, rounds in seen.items():
            with started("onward", folder=options.folder, keep=options.keep) as server:
                address = f"127.0.0.1:{server.port}"
                is_flooded = name == "with flood"
                rounds.append(uvloop.run(_measure(address, seconds, is_flooded=is_flooded)))
            options.say(f"{name}: {rounds[-1].details()}")
    flooded, calm = p99_ms(seen["with flood"]), p99_ms(seen["without flood"])
    return Report(
        name="fair",
        unit="ms (p99)",
        less_is_better=True,
        onward=flooded,
        peers={"without the flood": calm},
        durability="disk",
        details={
            "growth": rounded(flooded / calm),
            "tenants": TENANTS,
            "per_second_each": PER_SECOND_EACH,
            "flood": FLOOD,
            **{name: [one.details() for one in rounds] for name, rounds in seen.items()},
        },
    )


def p99_ms(rounds: Sequence[Waits]) -> float:
    """Return the typical 99th percentile of the others' wait."""
    return typical([percentiles_ms(one.of_others_ns)["p99"] for one in rounds])


async def _measure(address: str, seconds: float, *, is_flooded: bool) -> Waits:
    waits = Waits()
    # The flood has its own connection: what it waits for must not hold up the others' publishes.
    async with onward.connect(address) as mq, onward.connect(address) as flooding:
        app = _app(address, waits, count_from_ns=time.perf_counter_ns() + int(WARM_UP_S * 1e9))
        stop_at = time.monotonic() + WARM_UP_S + seconds
        async with asyncio.TaskGroup() as group:
            running = group.create_task(app.run(signals=False))
            publishing = [
                group.create_task(_publish(mq, waits, number, stop_at)) for number in range(TENANTS)
            ]
            if is_flooded:
                publishing.append(group.create_task(_flood(flooding, waits, stop_at)))
            await asyncio.wait(publishing)
            await waits.all_handled()
            app.stop()
            await running
    return waits


def _app(address: str, waits: Waits, *, count_from_ns: int) -> onward.App:
    app = onward.App(address)

    @app.consumer("bench", group="bench", concurrency=HANDLERS, credit=HANDLERS // 2, tenants={})
    async def handle(message: onward.Message) -> None:
        now_ns = time.perf_counter_ns()
        if message.tenant == "flood":
            waits.flood_count += 1
        else:
            waits.others_handled += 1
            waits.changed.set()
            sent_at_ns = SENT_AT.unpack_from(message.body)[0]
            if sent_at_ns >= count_from_ns:
                waits.of_others_ns.append(now_ns - sent_at_ns)
        await asyncio.sleep(WORK_S)

    return app


async def _publish(mq: onward.Client, waits: Waits, number: int, stop_at: float) -> None:
    """Publish at fixed times; the tenants take turns within a period."""
    period_s = 1 / PER_SECOND_EACH
    due_at = time.monotonic() + period_s * number / TENANTS
    while due_at < stop_at:
        await asyncio.sleep(max(0.0, due_at - time.monotonic()))
        waits.others_published += 1
        body = SENT_AT.pack(time.perf_counter_ns()) + BODY
        await mq.publish("bench", body, tenant=f"tenant-{number}")
        due_at += period_s


async def _flood(mq: onward.Client, waits: Waits, stop_at: float) -> None:
    count = round(FLOOD * PER_SECOND_EACH * FLOOD_TICK_S)
    bodies, tenants = [SENT_AT.pack(0) + BODY] * count, ["flood"] * count
    due_at = time.monotonic()
    while due_at < stop_at:
        await asyncio.sleep(max(0.0, due_at - time.monotonic()))
        await mq.publish_many("bench", bodies, tenants=tenants)
        waits.flood_published += count
        due_at += FLOOD_TICK_S
