"""Recurring schedules in a broker: one run at a time, none twice, whatever happens between."""

from __future__ import annotations

import asyncio
import base64
from datetime import UTC, datetime
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from onward.broker import recurring_runs
from onward.broker.schedule_files import ScheduleFiles
from onward.errors import Unavailable
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


@pytest.mark.parametrize("has_fired_before", [False, True])
async def test_the_latest_of_the_missed_runs_is_the_one_that_is_made_up_for(
    *, has_fired_before: bool
) -> None:
    disk, clock = FaultyDisk(Random(1)), ManualClock()
    schedule = await opened(disk=disk, clock=clock)
    await ticking(schedule, every_ms=60_000)
    if has_fired_before:
        await schedule.passes(60_000)
    fired = len(dues(schedule))
    await schedule.broker.stop()
    clock.advance(DAY_MS + 1_000)
    latest_ms = clock.now_ms() // 60_000 * 60_000
    for _ in range(2):
        # A second start finds the same: the run that was made up for has fired.
        schedule = await opened(disk=disk, clock=clock)
        await schedule.settled()
        assert dues(schedule)[fired:] == [latest_ms]
        assert schedule.broker.scheduling.waiting_count == 1
        await schedule.broker.stop()


async def test_a_crash_between_a_run_and_the_next_still_makes_up_for_the_latest() -> None:
    disk, clock = FaultyDisk(Random(1)), ManualClock()
    schedule = await opened(disk=disk, clock=clock)
    await ticking(schedule, every_ms=60_000)
    # The run fires, and the power is cut before the next one is stored.
    recurring = schedule.broker.scheduling.intake.deciding.recurring
    setattr(recurring, "fired", lambda uniques: None)  # noqa: B010
    await schedule.passes(60_000)
    assert len(dues(schedule)) == 1
    schedule.broker.fail(RuntimeError("the power was cut"))
    disk.crash()
    clock.advance(DAY_MS)
    schedule = await opened(disk=disk, clock=clock)
    await schedule.settled()
    assert dues(schedule)[1:] == [clock.now_ms() // 60_000 * 60_000]
    await schedule.broker.stop()


async def test_a_change_answers_with_the_next_run_of_the_changed_schedule() -> None:
    disk, clock = FaultyDisk(Random(1)), ManualClock()
    schedule = await opened(disk=disk, clock=clock)
    begin_ms = clock.now_ms()
    fields = {"name": "tick", "topic": "ticks", "body": BODY}
    first = await schedule.ask("recurring.set", **fields, every_ms=3_000, start_ms=begin_ms)
    assert first["next_at_ms"] == begin_ms + 3_000
    told = await schedule.ask("recurring.set", **fields, every_ms=HOUR_MS, start_ms=begin_ms)
    assert told["next_at_ms"] == begin_ms + HOUR_MS
    (listed,) = (await schedule.ask("recurring.list"))["recurring"]
    assert listed["next_at_ms"] == begin_ms + HOUR_MS
    # What was answered is durable: a crash right after it brings nothing of the old one back.
    schedule.broker.fail(RuntimeError("the power was cut"))
    disk.crash()
    schedule = await opened(disk=disk, clock=clock)
    await schedule.passes(60_000)
    assert dues(schedule) == []
    (waiting,) = (await schedule.ask("schedule.list"))["scheduled"]
    assert waiting["due_at_ms"] == begin_ms + HOUR_MS
    await schedule.broker.stop()


async def test_what_is_listed_while_a_change_is_under_way_is_the_changed_schedule() -> None:
    schedule = await opened()
    begin_ms = schedule.clock.now_ms()
    await ticking(schedule, every_ms=3_000, start_ms=begin_ms)
    scheduling = schedule.broker.scheduling
    async with scheduling.lock:  # so the run that waits cannot be cancelled yet
        changing = asyncio.create_task(
            schedule.ask(
                "recurring.set", name="tick", topic="ticks", body=BODY, every_ms=HOUR_MS,
                start_ms=begin_ms,
            )
        )  # fmt: skip
        await until(lambda: scheduling.state.recurring["tick"].every_ms == HOUR_MS)
        other = await Schedule.of(schedule.broker)
        (listed,) = (await other.ask("recurring.list"))["recurring"]
        assert listed["next_at_ms"] == begin_ms + HOUR_MS
        assert not changing.done()
    assert (await changing)["next_at_ms"] == begin_ms + HOUR_MS
    await schedule.broker.stop()


@pytest.mark.parametrize("error", [OSError("no answer"), Unavailable("no answer"), KeyError("bug")])
@pytest.mark.parametrize("has_fired", [False, True])
async def test_a_look_up_that_fails_at_a_start_is_repeated_until_the_next_run_is_planned(
    monkeypatch: pytest.MonkeyPatch, *, error: Exception, has_fired: bool
) -> None:
    disk, clock = FaultyDisk(Random(1)), ManualClock()
    schedule = await opened(disk=disk, clock=clock)
    await ticking(schedule, every_ms=60_000)
    if has_fired:
        recurring = schedule.broker.scheduling.intake.deciding.recurring
        setattr(recurring, "fired", lambda uniques: None)  # noqa: B010
        await schedule.passes(60_000)
    await schedule.broker.stop()
    look_up, failures = ScheduleFiles.look_up, [error, error]

    async def fail_at_first(self: ScheduleFiles, *names: Any) -> Any:
        if failures:
            raise failures.pop()
        return await look_up(self, *names)

    monkeypatch.setattr(ScheduleFiles, "look_up", fail_at_first)
    monkeypatch.setattr(recurring_runs, "AGAIN_S", 0.001)
    schedule = await opened(disk=disk, clock=clock)
    await until(lambda: not failures)
    await until(lambda: schedule.broker.scheduling.waiting_count)
    await schedule.settled()
    for _ in range(3):
        await schedule.passes(60_000)
    assert len(dues(schedule)) == 3 + has_fired
    await schedule.broker.stop()


async def test_a_broker_that_stops_looks_for_no_runs_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk, clock = FaultyDisk(Random(1)), ManualClock()
    schedule = await opened(disk=disk, clock=clock)
    await ticking(schedule, every_ms=60_000)
    await schedule.broker.stop()
    tries = 0

    async def fail(self: ScheduleFiles, *names: Any) -> Any:
        nonlocal tries
        tries += 1
        raise OSError("no answer")

    monkeypatch.setattr(ScheduleFiles, "look_up", fail)
    monkeypatch.setattr(recurring_runs, "AGAIN_S", 0.001)
    schedule = await opened(disk=disk, clock=clock)
    await until(lambda: tries > 2)
    await schedule.broker.stop()
    tries = 0
    await asyncio.sleep(0.01)
    assert tries <= 1


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
        schedule.advance(60_000)
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
