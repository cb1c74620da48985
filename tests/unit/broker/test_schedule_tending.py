"""Tails become runs: nothing is lost or doubled on the way, and who schedules too fast waits."""

from __future__ import annotations

import pytest

from onward.broker import schedule_files

from .speaking import open_broker
from .waiting import HOUR_MS, Schedule, small_parts


@pytest.mark.parametrize("tails", [1, 3])
async def test_batches_of_one_entry_in_different_tails_fire_once(
    monkeypatch: pytest.MonkeyPatch, tails: int
) -> None:
    small_parts(monkeypatch, tail=4)
    monkeypatch.setattr(schedule_files, "TAILS_PER_BUILD", tails)
    schedule = await Schedule.of(await open_broker())
    # They come in one turn of the loop, so they share entries; no tail holds all of them.
    requests = [schedule.say([HOUR_MS + number] * 3) for number in range(20)]
    for request in requests:
        await schedule.receipt(request)
    await schedule.settled()
    assert schedule.broker.scheduling.waiting_count == 60
    assert schedule.broker.scheduling.files.runs
    await schedule.passes(2 * HOUR_MS)
    assert schedule.numbers() == list(range(60))
    await schedule.broker.stop()


async def test_who_schedules_faster_than_runs_are_built_waits_and_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_parts(monkeypatch, tail=4)
    monkeypatch.setattr(schedule_files, "TAILS_MAX", 2)
    monkeypatch.setattr(schedule_files, "TAILS_PER_BUILD", 1)
    schedule = await Schedule.of(await open_broker())
    files = schedule.broker.scheduling.files
    numbers: list[int] = []
    for _ in range(10):
        requests = [schedule.say([HOUR_MS] * 3) for _ in range(4)]
        numbers += [await schedule.receipt(request) for request in requests]
    assert numbers == list(range(0, 120, 3))
    await schedule.settled()
    assert not files.is_behind
    await schedule.passes(2 * HOUR_MS)
    assert schedule.numbers() == list(range(120))
    await schedule.broker.stop()
