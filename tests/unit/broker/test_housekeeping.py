"""Housekeeping: in time, one file at a time, and never at the cost of a message."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from onward.broker import housekeeping
from onward.broker.broker import Broker
from onward.log.log import DiskFailed
from onward.protocol.payloads import Durability, Published
from onward.settings import LogSettings, Settings
from onward.testing.clock import ManualClock
from onward.testing.disk import FaultyDisk

from .asking import until
from .speaking import Speaker, open_broker, settings_with, turns


async def crashed(disk: FaultyDisk, broker: Broker, **options: Any) -> Broker:
    """Cut the power, and start again."""
    broker.fail(RuntimeError("the power was cut"))
    disk.crash(unsynced="lost")
    return await open_broker(disk, **options)


async def keep_house(broker: Broker, rounds: int = 3) -> None:
    for _ in range(rounds):
        broker.housekeeping.retain_soon()
        await broker.housekeeping.tick()
        await broker.housekeeping.tidy()
        await turns()


def names(disk: FaultyDisk, part: str) -> list[str]:
    return [name for name in disk.list_folder("log") if part in name]


async def test_a_topic_ends_when_its_lifetime_is_over_also_after_a_restart() -> None:
    disk, clock = FaultyDisk(Random(1)), ManualClock()
    broker = await open_broker(disk, clock=clock)
    speaker = await Speaker.to(broker)
    await speaker.request("topic.create", topic="short", lifetime_ms=10_000)
    await speaker.request("topic.create", topic="long", lifetime_ms=60_000)
    reading = speaker.say_read("short", follow=True)
    clock.advance(10_000)
    await broker.housekeeping.tick()
    await turns()
    assert speaker.end(reading) == "topic_ended"
    assert list(broker.catalogue.by_name) == ["long"]
    broker = await crashed(disk, broker, clock=clock)
    assert list(broker.catalogue.by_name) == ["long"]
    clock.advance(50_000)
    await broker.housekeeping.tick()
    await turns()
    assert len(broker.catalogue) == 0
    assert [(e.name, e.reason) for e in broker.catalogue.ended] == [
        ("short", "expired"), ("long", "expired"),
    ]  # fmt: skip
    await broker.stop()


async def test_an_end_that_a_full_disk_refused_is_tried_again() -> None:
    disk, clock = FaultyDisk(Random(1)), ManualClock()
    broker = await open_broker(disk, clock=clock)
    speaker = await Speaker.to(broker)
    await speaker.request("topic.create", topic="short", lifetime_ms=10_000)
    while broker.log.tail.bytes % 4_096 < 4_000:
        await speaker.publish("other", [b"x"])
    capacity = disk.capacity_bytes
    disk.capacity_bytes = disk.capacity_bytes - disk.free_bytes("log")
    clock.advance(10_000)
    await broker.housekeeping.tick()
    await turns()
    assert "short" in broker.catalogue.by_name
    assert not broker.catalogue.by_name["short"].ending
    disk.capacity_bytes = capacity
    await broker.housekeeping.tick()
    await turns()
    assert "short" not in broker.catalogue.by_name
    await broker.stop()


async def test_interval_durability_is_on_the_disk_within_its_interval() -> None:
    disk, clock = FaultyDisk(Random(1)), ManualClock()
    broker = await open_broker(disk, clock=clock)
    speaker = await Speaker.to(broker)
    await speaker.publish("orders", [b"first"])
    await broker.housekeeping.sync()
    await speaker.publish("orders", [b"second"], durability=Durability.INTERVAL)
    await broker.housekeeping.sync()
    assert broker.log.synced_index == 3
    broker = await crashed(disk, broker)
    assert broker.catalogue.find("orders").next_offset == 2
    await broker.stop()


async def test_a_full_segment_is_sealed_and_a_checkpoint_follows() -> None:
    disk = FaultyDisk(Random(1))
    broker = await open_broker(disk)
    speaker = await Speaker.to(broker)
    for _ in range(20):
        await speaker.publish("orders", [bytes(10_000)])
    await broker.housekeeping.tidy()
    assert len(names(disk, ".idx")) == len(broker.log.segments) - 1 + len(names(disk, ".run-"))
    broker = await crashed(disk, broker)
    assert broker.catalogue.find("orders").next_offset == 20
    assert all(segment.sealed for segment in broker.log.segments[:-1])
    speaker = await Speaker.to(broker)
    assert len(await speaker.read("orders")) == 20
    await broker.stop()


async def test_a_start_after_a_checkpoint_folds_to_the_state_of_a_running_broker() -> None:
    disk = FaultyDisk(Random(1))
    broker = await open_broker(disk, settings=settings_with(log={"checkpoint_rows": 5}))
    speaker = await Speaker.to(broker)
    for number in range(60):
        name = f"topic-{number % 7}"
        await speaker.publish(name, [bytes(3_000)], producer_id=1 + number % 3, sequence=number)
        if number % 10 == 9:
            await speaker.request("topic.delete", topic=name)
        if number % 4 == 0:
            await broker.housekeeping.tidy()
    saved = broker.state.save()
    again = await crashed(disk, broker)
    assert again.state.save() == saved
    assert again.log.next_index == broker.log.next_index
    await again.stop()


async def test_messages_older_than_their_retention_go_and_newer_ones_stay() -> None:
    disk, clock = FaultyDisk(Random(1)), ManualClock()
    settings = settings_with(log={"retention_ms": 60_000})
    broker = await open_broker(disk, clock=clock, settings=settings)
    speaker = await Speaker.to(broker)
    for _ in range(15):
        await speaker.publish("orders", [bytes(10_000)])
    clock.advance(60_001)
    await speaker.publish("orders", [b"new"])
    await keep_house(broker)
    topic = broker.catalogue.find("orders")
    assert 0 < topic.first_offset <= 15
    assert len(broker.log.segments) <= 2
    speaker = await Speaker.to(broker)
    assert (await speaker.read("orders"))[-1] == b"new"
    broker = await crashed(disk, broker, clock=clock, settings=settings)
    assert broker.catalogue.find("orders").next_offset == 16
    assert broker.catalogue.find("orders").first_offset == topic.first_offset
    await broker.stop()


async def test_nothing_goes_that_one_topic_still_wants() -> None:
    disk, clock = FaultyDisk(Random(1)), ManualClock()
    broker = await open_broker(disk, clock=clock, settings=settings_with(log={"retention_ms": 0}))
    speaker = await Speaker.to(broker)
    await speaker.request("topic.create", topic="short", retention_ms=1_000)
    for _ in range(10):
        await speaker.publish("short", [bytes(10_000)])
        await speaker.publish("kept", [b"kept"])
    clock.advance(10_000)
    await speaker.publish("kept", [b"kept"])
    await keep_house(broker)
    assert await speaker.read("kept") == [b"kept"] * 11
    assert broker.catalogue.find("kept").first_offset == 0
    assert broker.catalogue.find("short").first_offset > 0
    await broker.stop()


async def test_a_first_offset_that_was_told_holds_after_a_crash_before_any_checkpoint() -> None:
    disk, clock = FaultyDisk(Random(1)), ManualClock()
    settings = settings_with(log={"retention_ms": 0})
    broker = await open_broker(disk, clock=clock, settings=settings)
    speaker = await Speaker.to(broker)
    await speaker.request("topic.create", topic="short", retention_ms=1_000)
    for _ in range(10):
        await speaker.publish("short", [b"short"])
        await speaker.publish("kept", [bytes(10_000)])
    await keep_house(broker)
    clock.advance(10_000)
    checkpoints = broker.housekeeping.checkpoint_count
    await keep_house(broker)
    first = broker.catalogue.find("short").first_offset
    assert first > 0
    assert broker.housekeeping.checkpoint_count == checkpoints, "else it proves nothing"
    again = await crashed(disk, broker, clock=clock, settings=settings)
    assert again.catalogue.find("short").first_offset == first
    await again.stop()


@pytest.mark.parametrize("limit", [1, 50_000, 100_000])
async def test_retention_by_bytes_always_leaves_as_much_as_the_topic_asks_for(limit: int) -> None:
    broker = await open_broker()
    speaker = await Speaker.to(broker)
    await speaker.request("topic.create", topic="orders", retention_bytes=limit)
    for _ in range(25):
        await speaker.publish("orders", [bytes(10_000)])
    await keep_house(broker)
    topic = broker.catalogue.find("orders")
    left = await speaker.read("orders", topic.first_offset)
    assert topic.first_offset > 0
    assert sum(map(len, left)) >= limit
    await broker.stop()


async def test_a_log_that_is_too_big_gives_its_oldest_messages_up() -> None:
    disk = FaultyDisk(Random(1))
    settings = settings_with(log={"retention_bytes": 150_000})
    broker = await open_broker(disk, settings=settings)
    speaker = await Speaker.to(broker)
    for _ in range(40):
        await speaker.publish("orders", [bytes(10_000)])
    await keep_house(broker)
    assert broker.log.bytes <= 150_000
    first = broker.catalogue.find("orders").first_offset
    assert len(await speaker.read("orders")) == 40 - first
    again = await crashed(disk, broker, settings=settings)
    assert again.catalogue.find("orders").first_offset == first
    await again.stop()


async def test_the_space_of_an_ended_topic_comes_back() -> None:
    disk = FaultyDisk(Random(1))
    settings = settings_with(log={"segment_bytes_max": 4 << 20})
    broker = await open_broker(disk, settings=settings)
    speaker = await Speaker.to(broker)
    await speaker.publish("kept", [b"first"])
    for _ in range(10):
        await speaker.publish("big", [bytes(500_000)])
    await speaker.publish("kept", [b"last"])
    before = broker.log.bytes
    await speaker.request("topic.delete", topic="big")
    await keep_house(broker, 4)
    assert broker.log.bytes < before // 10
    assert await speaker.read("kept") == [b"first", b"last"]
    saved = broker.state.save()
    again = await crashed(disk, broker, settings=settings)
    assert again.state.save() == saved
    speaker = await Speaker.to(again)
    assert await speaker.read("kept") == [b"first", b"last"]
    await again.stop()


async def test_a_nearly_full_disk_refuses_publishes_and_takes_them_again_by_itself() -> None:
    disk, clock = FaultyDisk(Random(1)), ManualClock()
    settings = settings_with(log={"disk_reserve_bytes": 1 << 20})
    broker = await open_broker(disk, clock=clock, settings=settings)
    speaker = await Speaker.to(broker)
    await speaker.publish("orders")
    capacity = disk.capacity_bytes
    disk.capacity_bytes = disk.capacity_bytes - disk.free_bytes("log") + 1_000
    clock.advance(1_000)
    await broker.housekeeping.tick()
    assert await speaker.publish("orders") == "disk_full"
    assert len(await speaker.read("orders")) == 1
    disk.capacity_bytes = capacity
    clock.advance(1_000)
    await broker.housekeeping.tick()
    assert isinstance(await speaker.publish("orders"), Published)
    await broker.stop()


async def test_a_checkpoint_that_a_full_disk_refused_loses_nothing() -> None:
    disk = FaultyDisk(Random(1))
    broker = await open_broker(disk)
    speaker = await Speaker.to(broker)
    await speaker.publish("orders", [b"a"])
    disk.fail("write", error=28)
    with pytest.raises(OSError):
        await broker.housekeeping.checkpoint()
    await speaker.publish("orders", [b"b"])
    assert await speaker.read("orders") == [b"a", b"b"]
    await broker.housekeeping.checkpoint()
    broker = await crashed(disk, broker)
    speaker = await Speaker.to(broker)
    assert await speaker.read("orders") == [b"a", b"b"]
    await broker.stop()


async def test_a_sync_that_fails_beside_a_commit_is_fatal() -> None:
    disk, clock = FaultyDisk(Random(1)), ManualClock()
    failed = asyncio.Event()
    broker = await open_broker(disk, clock=clock, on_failure=lambda error: failed.set())
    speaker = await Speaker.to(broker)
    await speaker.publish("orders", durability=Durability.MEMORY)
    await speaker.publish("orders", durability=Durability.MEMORY)
    disk.fail("sync")
    clock.advance(2_000)
    await asyncio.wait_for(failed.wait(), 5)
    await turns()
    assert speaker.is_lost
    await broker.stop()


async def test_no_checkpoint_vouches_for_pages_that_a_failed_sync_lost() -> None:
    disk = FaultyDisk(Random(1))
    broker = await open_broker(disk)
    speaker = await Speaker.to(broker)
    await speaker.publish("orders")
    await speaker.publish("orders", durability=Durability.MEMORY)
    disk.fail("sync")
    speaker.say_publish("orders")
    await turns()
    assert broker.failure is not None
    with pytest.raises(Exception, match="earlier sync"):
        await broker.housekeeping.checkpoint()
    again = await crashed(disk, broker)
    assert again.catalogue.find("orders").next_offset == 1
    await again.stop()


async def test_a_stop_waits_for_the_work_under_way_and_writes_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "TICK_S", 0.001)
    log = LogSettings(
        folder=str(tmp_path), preallocate_bytes=0, disk_reserve_bytes=0, checkpoint_rows=1
    )
    broker = await Broker.open(Settings(log=log))
    # A new node writes a checkpoint and looks for expired segments at once. Only work that the
    # message causes is gated: the gate holds up the thread that stores the message, too.
    await until(
        lambda: bool(broker.housekeeping.checkpoint_count and broker.housekeeping._retained_at_ms)
    )
    gate, begun, is_begun = threading.Event(), 0, asyncio.Event()
    in_thread = broker.in_thread

    async def gated(work: Callable[[], object]) -> object:
        nonlocal begun
        begun += 1
        is_begun.set()

        def pass_gate() -> object:
            gate.wait(5)
            return work()

        return await in_thread(pass_gate)

    broker.housekeeping._in_thread = gated
    speaker = await Speaker.to(broker)
    speaker.say_publish("orders")
    await asyncio.wait_for(is_begun.wait(), 5)
    stopping = asyncio.ensure_future(broker.stop())
    await asyncio.sleep(0.02)
    assert (begun, stopping.done()) == (1, False)
    gate.set()
    await stopping
    again = await Broker.open(Settings(log=log))
    assert again.catalogue.find("orders").next_offset == 1
    await again.stop()


async def test_the_bytes_of_a_topic_in_the_open_segment_are_counted_wherever_its_rows_are() -> None:
    broker = await open_broker()
    speaker = await Speaker.to(broker)
    for round_ in range(3):
        await speaker.publish("orders", [bytes(100 * round_)])
        await speaker.publish("bills")
        if round_ < 2:
            await broker.housekeeping.checkpoint()
    number = broker.catalogue.find("orders").number
    rows = [rows.row(n) for rows in broker.log.tail.rows_of(number) for n in range(rows.count)]
    assert len(rows) == 3
    await speaker.request("topic.delete", topic="orders")
    assert broker.dead_bytes == sum(row.length for row in rows)
    await broker.stop()


async def test_a_sync_that_takes_long_holds_up_no_tick() -> None:
    clock = ManualClock()
    broker = await open_broker(clock=clock)
    speaker = await Speaker.to(broker)
    gate = asyncio.Event()

    async def gated(work: Callable[[], object]) -> object:
        await gate.wait()
        return work()

    broker.housekeeping._in_sync_thread = gated
    await speaker.publish("orders")
    await speaker.publish("orders", durability=Durability.MEMORY)
    syncing = asyncio.ensure_future(broker.housekeeping.sync())
    await turns()
    clock.advance(1_000)
    await broker.housekeeping.tick()
    assert broker.now_monotonic_ms == clock.monotonic_ms()
    assert not syncing.done()
    gate.set()
    await syncing
    assert broker.log.synced_index == broker.log.next_index - 1
    await broker.stop()


async def test_an_interval_shorter_than_a_tick_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping, "TICK_S", 60.0)
    broker = await open_broker(settings=settings_with(log={"interval_ms": 50}))
    speaker = await Speaker.to(broker)
    await speaker.publish("orders")
    is_synced = asyncio.Event()

    async def noted(work: Callable[[], object]) -> object:
        is_synced.set()
        return work()

    broker.housekeeping._in_sync_thread = noted
    await speaker.publish("orders", durability=Durability.INTERVAL)
    async with asyncio.timeout(5):
        await is_synced.wait()
    await turns()
    assert broker.log.synced_index == broker.log.next_index - 1
    await broker.stop()


async def test_nobody_is_dropped_for_the_time_in_which_the_broker_did_not_listen() -> None:
    clock = ManualClock()
    broker = await open_broker(clock=clock)
    greeted, silent = await Speaker.to(broker), await Speaker.to(broker, greet=False)
    clock.advance(60_000)
    await broker.housekeeping.tick(60_000)
    await turns()
    assert not greeted.is_lost
    assert not silent.is_lost
    clock.advance(60_000)
    await broker.housekeeping.tick()
    await turns()
    assert greeted.is_lost
    assert silent.is_lost
    await broker.stop()


async def test_who_does_not_even_take_its_goodbye_is_told_once_and_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = ManualClock()
    broker = await open_broker(clock=clock)
    await Speaker.to(broker, greet=False)
    (session,) = broker.sessions
    told: list[str] = []
    monkeypatch.setattr(session, "end", lambda error: told.append("end"))
    monkeypatch.setattr(session, "abort", lambda: told.append("abort"))
    clock.advance(10_000)
    await broker.housekeeping.tick()
    await broker.housekeeping.tick()
    assert told == ["end", "abort"]
    monkeypatch.undo()
    await broker.stop()


async def test_a_seal_that_fails_holds_up_no_checkpoint_and_is_tried_ever_more_seldom(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    broker = await open_broker(clock=clock)
    broker.housekeeping.stop()
    speaker = await Speaker.to(broker)
    for _ in range(10):
        await speaker.publish("orders", [bytes(10_000)])
    tries: list[int] = []

    def seal(segment: object) -> None:
        tries.append(clock.monotonic_ms())
        raise OSError(5, "no")

    monkeypatch.setattr(type(broker.log), "seal", lambda log, segment: seal(segment))
    count = broker.housekeeping.checkpoint_count
    for _ in range(16):
        await broker.housekeeping.tidy()
        clock.advance(250)
    assert broker.housekeeping.checkpoint_count > count
    assert tries == [0, 250, 750, 1_750, 3_750]
    monkeypatch.undo()
    clock.advance(10_000)
    with caplog.at_level("INFO", "onward.housekeeping"):
        await broker.housekeeping.tidy()
    assert broker.log.unsealed() is None
    assert caplog.text.count("sealing segments") == 2
    assert "sealing segments works again" in caplog.text
    await broker.stop()


async def test_one_topic_that_keeps_little_does_not_cut_the_log_into_crumbs() -> None:
    clock = ManualClock()
    broker = await open_broker(clock=clock, settings=settings_with(log={"retention_ms": 0}))
    speaker = await Speaker.to(broker)
    await speaker.request("topic.create", topic="short", retention_ms=1_000)
    await speaker.publish("kept", [bytes(10_000)])
    for _ in range(5):
        await speaker.publish("short", [bytes(100)])
        clock.advance(14_000)
        await keep_house(broker)
    assert len(broker.log.segments) == 1
    await speaker.publish("short", [bytes(12_000)])
    await broker.housekeeping.checkpoint()
    clock.advance(14_000)
    await keep_house(broker)
    assert broker.catalogue.find("short").first_offset == 6
    assert len(await speaker.read("kept")) == 1
    await broker.stop()


async def test_only_a_disk_that_failed_is_called_so(caplog: pytest.LogCaptureFixture) -> None:
    for error, said in ((DiskFailed("no"), "the disk failed"), (KeyError("oops"), "this is a bug")):
        caplog.clear()
        broker = await open_broker()
        broker.fail(error)
        assert said in caplog.text
        assert ("KeyError" in caplog.text) == isinstance(error, KeyError)
        await broker.stop()


async def test_two_rounds_of_retention_at_once_drop_each_segment_once(tmp_path: Path) -> None:
    log = LogSettings(
        folder=str(tmp_path), preallocate_bytes=0, disk_reserve_bytes=0, segment_bytes_max=65_536,
        retention_bytes=70_000,
    )  # fmt: skip
    broker = await Broker.open(Settings(log=log))
    speaker = await Speaker.to(broker)
    for count in range(1, 9):
        speaker.say_publish("orders", [bytes(40_000)])
        await until(lambda: "orders" in broker.catalogue.by_name)
        await until(lambda: broker.catalogue.find("orders").next_offset == count)  # noqa: B023
    await broker.housekeeping._seal()
    broker.housekeeping.retain_soon()
    await asyncio.gather(*[broker.housekeeping._retain() for _ in range(3)])
    assert broker.failure is None
    assert broker.catalogue.find("orders").first_offset > 0
    await broker.stop()
