"""The power goes at every point of accept, build, merge, checkpoint, fire and cancel.

One life is lived again and again; each time the power goes one disk operation later. Whatever was
answered before holds afterwards, and everything fires once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from random import Random

import pytest

from onward.broker.broker import Broker
from onward.broker.schedule_scan import ScheduleScan
from onward.errors import OnwardError
from onward.testing.clock import ManualClock
from onward.testing.disk import FaultyDisk, Unsynced

from .asking import until
from .speaking import open_broker, settings_with
from .waiting import HOUR_MS, Fired, Schedule, small_parts

TOPICS = ("orders", "others")
SETTINGS = settings_with(log={"segment_bytes_max": 8_192, "checkpoint_rows": 20})


class Died(Exception):
    """The power went."""


@dataclass
class Told:
    """What was asked, and what the answers said."""

    asked: int = 0
    accepted: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Schedule id -> topic and due time of what was acknowledged."""
    cancelled: set[int] = field(default_factory=set)
    perhaps: set[int] = field(default_factory=set)
    """What was to be cancelled or moved when the power went."""
    replaced: set[int] = field(default_factory=set)
    fired: set[int] = field(default_factory=set)

    def check(self, found: dict[str, list[Fired]]) -> None:
        """Raise unless the topics hold what the answers say."""
        times = Counter(one.number for some in found.values() for one in some)
        assert [number for number, count in times.items() if count > 1] == [], "fired twice"
        gone = self.cancelled | self.replaced
        assert not gone & times.keys(), "fired although it was cancelled or replaced"
        lost = self.accepted.keys() - times.keys() - gone - self.perhaps
        assert not lost, f"lost: {sorted(lost)}"
        assert self.fired <= times.keys()
        for topic, some in found.items():
            for one in some:
                assert one.time_ms >= one.due_at_ms, "early"
                assert self.accepted.get(one.number, (topic, one.due_at_ms)) == (
                    topic, one.due_at_ms,
                )  # fmt: skip
                assert [one.offset for one in some] == list(range(len(some)))


class Life:
    """A broker that lives until the power goes, or until its script is over."""

    def __init__(
        self, broker: Broker, schedule: Schedule, told: Told, power: asyncio.Event
    ) -> None:
        self.broker = broker
        self._power_went = power
        self.schedule = schedule
        self.told = told

    async def _or_died(self, work: asyncio.Future[object]) -> object:
        await until(lambda: work.done() or self._power_went.is_set())
        if self._power_went.is_set():
            work.cancel()
            await asyncio.wait([work])
            raise Died
        return work.result()

    async def add(self, *delays_ms: int, **columns: object) -> int:
        topics = [TOPICS[number % 2] for number in range(len(delays_ms))]
        self.told.asked += len(delays_ms)
        now_ms = self.schedule.clock.now_ms()
        work = self.schedule.add(*delays_ms, topic=topics, **columns)
        first = await self._or_died(asyncio.ensure_future(work))
        assert isinstance(first, int)
        for row, delay_ms in enumerate(delays_ms):
            self.told.accepted[first + row] = topics[row], now_ms + delay_ms
        return first

    async def replace(self, delay_ms: int, key: str, before: int | None) -> int:
        """Publish under a key; `before` is what waits under it."""
        known = set() if before is None else {before}
        self.told.perhaps |= known
        number = await self.add(delay_ms, uniques=[key], replaces=[-1])
        self.told.replaced |= known
        return number

    async def cancel(self, *numbers: int) -> None:
        self.told.perhaps.update(numbers)
        work = asyncio.ensure_future(self.schedule.cancel(*numbers))
        states = await self._or_died(work)
        assert isinstance(states, list)
        for number, state in zip(numbers, states, strict=True):
            known = {"cancelled": self.told.cancelled, "fired": self.told.fired}
            known.get(state, set()).add(number)
            if state == "fired":
                self.told.perhaps.discard(number)

    async def move(self, number: int, delay_ms: int) -> None:
        self.told.perhaps.add(number)
        topic, _ = self.told.accepted[number]
        at_ms = self.schedule.clock.now_ms() + delay_ms
        work = asyncio.ensure_future(self.schedule.move(number, delay_ms))
        result = await self._or_died(work)
        assert isinstance(result, dict)
        if result["state"] == "moved":
            self.told.replaced.add(number)
            self.told.accepted[result["id"]] = topic, at_ms

    async def settled(self) -> None:
        await self._or_died(asyncio.ensure_future(self.schedule.settled()))

    async def passes(self, ms: int) -> None:
        self.schedule.clock.advance(ms)
        await self.settled()

    async def script(self) -> None:
        """Do a bit of everything."""
        first = await self.add(10, 500, HOUR_MS, 20, 600)
        await self.settled()
        key = await self.replace(700, "k", None)
        await self.add(15, 2 * HOUR_MS, HOUR_MS)
        await self.passes(18)
        await self.cancel(first, first + 1)
        key = await self.replace(800, "k", key)
        await self.move(first + 2, 900)
        await self.settled()
        await self.add(5, 5, 5, 5, 5, 5)
        await self.passes(650)
        await self.add(HOUR_MS, HOUR_MS, HOUR_MS, HOUR_MS)
        await self.settled()
        await self.cancel(key)
        await self.passes(300)
        assert self.broker.scheduling.state.serial > 6, "runs are built and merged meanwhile"


async def live(disk: FaultyDisk, clock: ManualClock, told: Told, *, operations: int) -> bool:
    """Live until the script is over (True) or the power went."""
    power = asyncio.Event()
    disk.cut_power_after(operations, then=power.set)
    try:
        broker = await open_broker(disk, clock=clock, settings=SETTINGS)
    except (OSError, OnwardError):
        return False
    life = Life(broker, await Schedule.of(broker), told, power)
    try:
        await life.script()
    except Died:
        return False
    finally:
        broker.fail(RuntimeError("the power went"))
    return True


async def finish(disk: FaultyDisk, clock: ManualClock) -> dict[str, list[Fired]]:
    """Start again, let everything fire, and return what the topics hold."""
    broker = await open_broker(disk, clock=clock, settings=SETTINGS)
    assert broker.scheduling.waiting_count == ScheduleScan(broker.scheduling).recount()
    schedule = await Schedule.of(broker)
    await schedule.passes(5 * HOUR_MS)
    assert broker.scheduling.waiting_count == 0
    found = {topic: schedule.fired(topic) for topic in TOPICS}
    await broker.stop()
    broker = await open_broker(disk, clock=clock, settings=SETTINGS)
    schedule = await Schedule.of(broker)
    await schedule.passes(HOUR_MS)
    assert {topic: schedule.fired(topic) for topic in TOPICS} == found
    await broker.stop()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("unsynced", "step"), [("random", 1), ("lost", 4), ("kept", 4)])
async def test_wherever_the_power_goes_nothing_fires_twice_and_nothing_is_lost(
    monkeypatch: pytest.MonkeyPatch, unsynced: Unsynced, step: int
) -> None:
    small_parts(monkeypatch)
    operations, is_over = 0, False
    while not is_over:
        disk, clock, told = FaultyDisk(Random(operations)), ManualClock(), Told()
        is_over = await live(disk, clock, told, operations=operations)
        disk.crash(unsynced=unsynced)
        try:
            told.check(await finish(disk, clock))
        except AssertionError as error:
            raise AssertionError(f"after {operations} operations: {error}") from error
        operations += step
    assert told.accepted
    assert operations > 100
