"""A disk that is full, and retention: what waits is not lost."""

from __future__ import annotations

from random import Random

import pytest

from onward.errors import DiskFull
from onward.testing.clock import ManualClock
from onward.testing.disk import FaultyDisk

from .asking import until
from .speaking import open_broker, settings_with, turns
from .waiting import DAY_MS, HOUR_MS, Schedule, small_parts


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again at once what a full disk refused."""
    monkeypatch.setattr("onward.broker.scheduling.FAILED_PAUSE_S", 0.001)


async def test_what_a_full_disk_refused_fires_once_when_there_is_space_again() -> None:
    disk = FaultyDisk(Random(1))
    broker = await open_broker(disk)
    schedule = await Schedule.of(broker)
    topics = [f"topic-{number % 3}" for number in range(30)]
    await schedule.add(*[100] * 30, topic=topics, bodies=[b"x" * 500] * 30)
    capacity = disk.capacity_bytes
    disk.capacity_bytes -= disk.free_bytes("log")
    schedule.clock.advance(100)
    broker.scheduling.wake()
    await until(lambda: broker.gate.disk_is_full)
    await turns(100)
    assert all(schedule.numbers(f"topic-{number}") == [] for number in range(3))
    disk.capacity_bytes = capacity
    broker.gate.disk_is_full = False
    await schedule.settled()
    for number in range(3):
        assert schedule.numbers(f"topic-{number}") == list(range(number, 30, 3))
    await broker.stop()


async def test_a_full_disk_refuses_what_is_scheduled_and_takes_it_later() -> None:
    disk = FaultyDisk(Random(1))
    broker = await open_broker(disk)
    schedule = await Schedule.of(broker)
    await schedule.add(100)
    capacity = disk.capacity_bytes
    disk.capacity_bytes -= disk.free_bytes("log")
    large = [b"x" * 5_000]
    assert await schedule.refused(HOUR_MS, bodies=large) == "disk_full"
    assert await schedule.refused(HOUR_MS, bodies=large, uniques=["k"]) == "disk_full"
    disk.capacity_bytes = capacity
    broker.gate.disk_is_full = False
    assert await schedule.add(HOUR_MS, bodies=large, uniques=["k"]) == 1
    await schedule.passes(HOUR_MS)
    assert schedule.numbers() == [0, 1]
    await broker.stop()


async def test_a_move_that_a_full_disk_refused_changes_nothing() -> None:
    disk = FaultyDisk(Random(1))
    broker = await open_broker(disk)
    schedule = await Schedule.of(broker)
    await schedule.add(1_000, bodies=[b"x" * 5_000])
    capacity = disk.capacity_bytes
    disk.capacity_bytes -= disk.free_bytes("log")
    with pytest.raises(DiskFull):
        await schedule.move(0, HOUR_MS)
    disk.capacity_bytes = capacity
    broker.gate.disk_is_full = False
    await schedule.passes(1_000)
    assert schedule.numbers() == [0]
    await broker.stop()


async def test_a_build_that_fails_is_tried_again_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_parts(monkeypatch)
    disk = FaultyDisk(Random(1))
    broker = await open_broker(disk, settings=settings_with(log={"segment_bytes_max": 1 << 20}))
    schedule = await Schedule.of(broker)
    await schedule.add(HOUR_MS, topic="first")
    disk.fail("sync_folder")
    for _ in range(5):
        await schedule.add(HOUR_MS, HOUR_MS)
        await schedule.settled()
    assert not disk._to_fail, "it has failed once"
    assert broker.status()["schedule_runs"]
    await schedule.passes(HOUR_MS)
    assert schedule.numbers() == list(range(1, 11))
    await broker.stop()


@pytest.mark.parametrize("limit", [{"retention_ms": 60_000}, {"retention_bytes": 20_000}])
@pytest.mark.parametrize("tail", [4, 1_000], ids=["runs", "tail"])
async def test_retention_never_touches_what_waits(
    monkeypatch: pytest.MonkeyPatch, limit: dict[str, int], tail: int
) -> None:
    small_parts(monkeypatch, tail=tail)
    settings = settings_with(log={"segment_bytes_max": 4_096, **limit})
    disk, clock = FaultyDisk(Random(1)), ManualClock()
    broker = await open_broker(disk, clock=clock, settings=settings)
    schedule = await Schedule.of(broker)
    for number in range(12):
        await schedule.add(DAY_MS + number, bodies=[b"waits-%d" % number])
        for _ in range(3):
            await schedule.speaker.publish("noise", [b"x" * 1_500])
        await schedule.passes(10_000)
        broker.housekeeping.retain_soon()
        await broker.housekeeping.tick()
        await broker.housekeeping.tidy()
    assert broker.catalogue.by_name["noise"].first_offset > 0, "retention was at work"
    broker.fail(RuntimeError("the power was cut"))
    disk.crash(unsynced="lost")
    broker = await open_broker(disk, clock=clock, settings=settings)
    schedule = await Schedule.of(broker)
    await schedule.passes(2 * DAY_MS)
    assert [one.body for one in schedule.fired()] == [b"waits-%d" % number for number in range(12)]
    await broker.stop()


async def test_the_log_gives_back_the_space_of_what_waits_in_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_parts(monkeypatch)
    disk, clock = FaultyDisk(Random(1)), ManualClock()
    settings = settings_with(log={"segment_bytes_max": 8_192})
    broker = await open_broker(disk, clock=clock, settings=settings)
    schedule = await Schedule.of(broker)
    for _ in range(40):
        await schedule.add(DAY_MS, DAY_MS, bodies=[b"x" * 1_000] * 2)
        await schedule.settled()
        broker.housekeeping.retain_soon()
        await broker.housekeeping.tick()
        await broker.housekeeping.tidy()
    assert broker.catalogue.by_name["@schedule"].first_offset > 60
    assert broker.log.bytes < 40_000
    await schedule.passes(DAY_MS)
    assert schedule.numbers() == list(range(80))
    await broker.stop()


@pytest.mark.parametrize("limit", [{"retention_ms": 60_000}, {"retention_bytes": 40_000}])
async def test_one_message_that_waits_in_the_oldest_segment_holds_retention_up_for_seconds(
    limit: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    disk, clock = FaultyDisk(Random(1)), ManualClock()
    broker = await open_broker(disk, clock=clock, settings=settings_with(log=limit))
    schedule = await Schedule.of(broker)
    await schedule.passes(60_000)
    await schedule.add(DAY_MS, bodies=[b"waits"])
    # The first run is built and named here: what comes later has to wait for no such chance.
    for _ in range(12):
        await schedule.speaker.publish("noise", [b"x" * 10_000])
    await schedule.passes(61_000)
    await schedule.add(DAY_MS, bodies=[b"waits"])
    for _ in range(12):
        await schedule.speaker.publish("noise", [b"x" * 10_000])
    clock.advance(limit.get("retention_ms", 0))
    oldest = broker.log.segments[0]
    passed_ms = 0
    while oldest in broker.log.segments or broker.log.bytes > 80_000:
        await broker.housekeeping.tick()
        await broker.housekeeping.tidy()
        await schedule.passes(1_000)
        passed_ms += 1_000
        assert passed_ms <= 10_000
    assert "retention waits for scheduled messages" in caplog.text
    await schedule.passes(2 * DAY_MS)
    assert [one.body for one in schedule.fired()] == [b"waits"] * 2
    await broker.stop()
