"""Recurring schedules in a broker: one run at a time, none twice, whatever happens between."""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from onward.testing.clock import ManualClock
from onward.testing.disk import FaultyDisk

from .asking import until
from .speaking import open_broker
from .waiting import DAY_MS, HOUR_MS, Schedule, small_parts

BODY = base64.b64encode(b"tick").decode()


async def opened(**options: Any) -> Schedule:
    return await Schedule.of(await open_broker(**options))


async def ticking(schedule: Schedule, name: str = "tick", **fields: Any) -> None:
    """Set a recurring schedule, and wait until its first run waits."""
    await schedule.ask("recurring.set", name=name, topic="ticks", body=BODY, **fields)
    await until(lambda: schedule.broker.scheduling.waiting_count)
    await schedule.settled()


def dues(schedule: Schedule) -> list[int]:
    return [one.due_at_ms for one in schedule.fired("ticks")]


def instant(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1_000)


async def test_runs_come_one_after_another_each_once() -> None:
    schedule = await opened()
    begin_ms = schedule.clock.now_ms()
    await ticking(schedule, every_ms=60_000)
    for _ in range(10):
        await schedule.passes(60_000)
    found = dues(schedule)
    assert len(found) == 10
    assert [after - before for before, after in pairwise(found)] == [60_000] * 9
    assert 0 < found[0] - begin_ms <= 60_000
    assert schedule.broker.scheduling.waiting_count == 1
    await schedule.broker.stop()


async def test_runs_that_were_missed_are_one_catch_up_or_none_as_configured() -> None:
    disk, clock = FaultyDisk(Random(1)), ManualClock()
    schedule = await opened(disk=disk, clock=clock)
    await ticking(schedule, "one", every_ms=60_000, catch_up="one")
    await schedule.ask(
        "recurring.set", name="none", topic="others", body=BODY, every_ms=60_000, catch_up="none"
    )
    await until(lambda: schedule.broker.scheduling.waiting_count == 2)
    await schedule.broker.stop()
    clock.advance(DAY_MS + 1_000)
    schedule = await opened(disk=disk, clock=clock)
    await schedule.settled()
    assert len(schedule.fired("ticks")) == 1
    assert len(schedule.fired("others")) == 0
    await until(lambda: schedule.broker.scheduling.waiting_count == 2)
    await schedule.passes(60_000)
    assert len(schedule.fired("ticks")) == 2
    assert len(schedule.fired("others")) == 1
    await schedule.broker.stop()


@pytest.mark.parametrize("operations", range(0, 60, 2))
async def test_a_crash_at_any_point_neither_loses_nor_doubles_a_run(
    monkeypatch: pytest.MonkeyPatch, operations: int
) -> None:
    small_parts(monkeypatch, tail=2)
    disk, clock = FaultyDisk(Random(operations)), ManualClock()
    schedule = await opened(disk=disk, clock=clock)
    await ticking(schedule, every_ms=60_000)
    await schedule.passes(60_000)
    power: list[bool] = []
    disk.cut_power_after(operations, then=lambda: power.append(True))
    for _ in range(4):
        clock.advance(60_000)
        schedule.broker.scheduling.wake()
        before = schedule.broker.scheduling.fired_count
        await until(lambda: power or schedule.broker.scheduling.fired_count > before)  # noqa: B023
    schedule.broker.fail(RuntimeError("the power was cut"))
    disk.crash()
    schedule = await opened(disk=disk, clock=clock)
    await until(lambda: schedule.broker.scheduling.waiting_count)
    await schedule.settled()
    for _ in range(3):
        await schedule.passes(60_000)
    found = dues(schedule)
    assert len(found) == len(set(found))
    assert found[-3:] == [found[-1] - 120_000, found[-1] - 60_000, found[-1]]
    assert schedule.broker.scheduling.waiting_count == 1
    await schedule.broker.stop()


async def test_what_is_changed_while_it_fires_still_has_one_run_that_waits() -> None:
    schedule = await opened()
    await ticking(schedule, every_ms=60_000)
    for turn in range(20):
        # The change is asked for in the very moment in which a run is due.
        schedule.clock.advance(60_000)
        schedule.broker.scheduling.wake()
        await schedule.ask(
            "recurring.set", name="tick", topic="ticks", body=BODY, every_ms=60_000 + turn
        )
        await schedule.settled()
        await until(lambda: schedule.broker.scheduling.waiting_count)
        await schedule.settled()
        waiting = (await schedule.ask("schedule.list"))["scheduled"]
        assert len(waiting) == 1
    found = dues(schedule)
    assert len(found) == len(set(found))
    await schedule.broker.stop()


async def test_paused_and_deleted_ones_do_not_run_and_a_resumed_one_does() -> None:
    schedule = await opened()
    await ticking(schedule, every_ms=60_000)
    await schedule.ask("recurring.pause", name="tick")
    await schedule.passes(HOUR_MS)
    assert dues(schedule) == []
    await schedule.ask("recurring.resume", name="tick")
    await until(lambda: schedule.broker.scheduling.waiting_count)
    await schedule.passes(60_000)
    assert len(dues(schedule)) == 1
    await schedule.ask("recurring.delete", name="tick")
    await schedule.passes(HOUR_MS)
    assert len(dues(schedule)) == 1
    assert (await schedule.ask("recurring.list"))["recurring"] == []
    await schedule.broker.stop()


@pytest.mark.parametrize(
    ("begin", "expected"),
    [
        # Europe/Berlin: 02:30 does not exist on 29 March 2026, and comes twice on 25 October.
        (
            "2026-03-27T12:00:00+00:00",
            ["2026-03-28T01:30", "2026-03-29T01:00", "2026-03-30T00:30", "2026-03-31T00:30"],
        ),
        (
            "2026-10-23T12:00:00+00:00",
            ["2026-10-24T00:30", "2026-10-25T00:30", "2026-10-26T01:30", "2026-10-27T01:30"],
        ),
    ],
    ids=["spring", "autumn"],
)
async def test_a_daily_run_comes_once_a_day_also_when_the_clocks_change(
    begin: str, expected: list[str]
) -> None:
    schedule = await opened(clock=ManualClock(now_ms=instant(begin)))
    await ticking(schedule, cron="30 2 * * *", zone="Europe/Berlin")
    for _ in range(8 * 12):
        await schedule.passes(HOUR_MS)
    found = dues(schedule)
    moments = [datetime.fromtimestamp(one / 1_000, tz=UTC) for one in found]
    assert [moment.strftime("%Y-%m-%dT%H:%M") for moment in moments] == expected
    assert all(one.time_ms >= one.due_at_ms for one in schedule.fired("ticks"))
    await schedule.broker.stop()
