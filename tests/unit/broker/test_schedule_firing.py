"""Firing: in order, never early, once; whatever the clock does."""

from __future__ import annotations

import asyncio

import pytest

from onward.log.memory_disk import MemoryDisk
from onward.testing.clock import ManualClock

from .speaking import open_broker, settings_with, turns
from .waiting import DAY_MS, HOUR_MS, Schedule, small_parts


async def test_a_message_becomes_visible_at_its_time_and_not_before() -> None:
    broker = await open_broker()
    schedule = await Schedule.of(broker)
    assert await schedule.add(1_000) == 0
    await schedule.passes(999)
    assert schedule.numbers() == []
    await schedule.passes(1)
    (fired,) = schedule.fired()
    assert (fired.number, fired.body) == (0, b"1000")
    assert fired.due_at_ms <= fired.time_ms == schedule.clock.now_ms()
    await broker.stop()


async def test_what_is_due_fires_in_the_order_of_time_then_id_whatever_the_order_it_came_in() -> (
    None
):
    broker = await open_broker()
    schedule = await Schedule.of(broker)
    await schedule.add(500, 100, 500, 300, 100)
    await schedule.add(100, 500)
    await schedule.passes(1_000)
    assert schedule.numbers() == [1, 4, 5, 3, 0, 2, 6]
    await broker.stop()


async def test_a_time_in_the_past_fires_at_once_and_keeps_its_due_time() -> None:
    broker = await open_broker()
    schedule = await Schedule.of(broker)
    await schedule.add(-DAY_MS, 0)
    await schedule.settled()
    assert schedule.numbers() == [0, 1]
    assert schedule.fired()[0].due_at_ms == schedule.clock.now_ms() - DAY_MS
    await broker.stop()


async def test_a_fired_message_has_all_that_was_published_with_it() -> None:
    broker = await open_broker()
    schedule = await Schedule.of(broker)
    await schedule.add(
        5, bodies=[b"x"], keys=["k"], headers=[{"h": "v"}], tags=["t"], trace_ids=["i"],
        priorities=[7], tenants=["n"], uniques=["u"],
    )  # fmt: skip
    await schedule.passes(5)
    reading = schedule.speaker.say_read("orders")
    await turns(100)
    assert schedule.speaker.bodies(reading) == [b"x"]
    topic = broker.catalogue.by_name["orders"]
    span = broker.log.plan(topic.number, 0, bytes_max=1 << 20)
    assert span is not None
    raw = bytes(broker.log.read(span, wait=True) or b"")
    assert raw.count(b"OBAT") == 1
    from onward.message.batch import decode_batch

    batch = decode_batch(raw, raw.index(b"OBAT"), raw_bytes_max=1 << 20)
    assert (batch.keys, batch.tags, batch.trace_ids) == (["k"], ["t"], ["i"])
    assert (batch.headers, batch.priorities, batch.tenants) == ([{"h": "v"}], [7], ["n"])
    assert batch.schedule_ids == [0]
    await broker.stop()


async def test_messages_of_many_topics_fire_each_into_its_own() -> None:
    broker = await open_broker()
    schedule = await Schedule.of(broker)
    topics = [f"topic-{number % 7}" for number in range(70)]
    await schedule.add(*range(70), topic=topics)
    await schedule.passes(70)
    for number in range(7):
        assert schedule.numbers(f"topic-{number}") == list(range(number, 70, 7))
    await broker.stop()


async def test_the_status_counts_what_is_being_fired_until_it_is_stored() -> None:
    broker = await open_broker(settings=settings_with(log={"segment_bytes_max": 1 << 22}))
    schedule = await Schedule.of(broker)
    await schedule.add(*[1_000] * 3_000)
    seen: list[int] = []

    async def watch() -> None:
        while True:
            stored = broker.catalogue.by_name["orders"].next_offset if seen_topic() else 0
            seen.append(stored + int(str(broker.status()["scheduled"])))
            await asyncio.sleep(0)

    def seen_topic() -> bool:
        return "orders" in broker.catalogue.by_name

    watching = asyncio.create_task(watch())
    await schedule.passes(1_000)
    watching.cancel()
    assert broker.status()["scheduled"] == 0
    assert min(seen) >= 3_000  # nothing is in between: neither waiting nor stored
    await broker.stop()


async def test_a_crowded_moment_fires_in_several_steps_and_keeps_its_order() -> None:
    broker = await open_broker(settings=settings_with(log={"segment_bytes_max": 1 << 22}))
    schedule = await Schedule.of(broker)
    for _ in range(10):
        await schedule.add(*[1_000] * 500, bodies=[b"x" * 300] * 500)
    await schedule.passes(1_000)
    assert schedule.numbers() == list(range(5_000))
    assert broker.publishing.commit_count < 200
    await broker.stop()


async def test_the_status_says_how_many_are_due_until_the_last_of_them_has_fired() -> None:
    broker = await open_broker(settings=settings_with(log={"segment_bytes_max": 1 << 22}))
    schedule = await Schedule.of(broker)
    await schedule.add(*[1_000] * 3_000, *[90_000] * 10, bodies=[b"x" * 300] * 3_010)
    seen: list[object] = []

    async def watch() -> None:
        while True:
            seen.append(broker.status()["due_now"])
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    await schedule.passes(1_000)
    watching.cancel()
    assert max(seen) == 3_000
    assert broker.status()["due_now"] == 0
    assert broker.status()["scheduled"] == 10
    await broker.stop()


# --- parts: the tail, runs, merged runs ----------------------------------------------------------


async def test_what_waits_in_runs_and_in_the_tail_fires_in_one_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_parts(monkeypatch)
    broker = await open_broker()
    schedule = await Schedule.of(broker)
    delays = [(number * 7919) % 1_000 for number in range(60)]
    for start in range(0, 60, 3):
        await schedule.add(*delays[start : start + 3])
        await schedule.settled()
    assert broker.status()["schedule_runs"]
    await schedule.passes(1_000)
    assert schedule.numbers() == sorted(range(60), key=lambda number: (delays[number], number))
    await broker.stop()


async def test_what_has_fired_gives_its_files_back(monkeypatch: pytest.MonkeyPatch) -> None:
    small_parts(monkeypatch)
    disk = MemoryDisk()
    broker = await open_broker(disk)
    schedule = await Schedule.of(broker)
    for _ in range(10):
        await schedule.add(100, 200, 300, 400, 500)
        await schedule.settled()
    assert [one for one in disk.list_folder("log") if one.startswith("schedule-")]
    await schedule.passes(1_000)
    await schedule.settled()
    assert len(schedule.numbers()) == 50
    assert not [one for one in disk.list_folder("log") if one.startswith("schedule-")]
    await broker.stop()


@pytest.mark.parametrize("stops", [True, False], ids=["stop", "kill"])
async def test_what_waits_is_there_after_a_restart_with_and_without_runs(
    monkeypatch: pytest.MonkeyPatch, stops: bool
) -> None:
    small_parts(monkeypatch)
    disk, clock = MemoryDisk(), ManualClock()
    expected: list[tuple[int, int]] = []
    for life in range(4):
        broker = await open_broker(disk, clock=clock)
        schedule = await Schedule.of(broker)
        for delay_ms in (HOUR_MS, 10 * life, 2 * HOUR_MS - life):
            number = await schedule.add(delay_ms)
            expected.append((clock.now_ms() + delay_ms, number))
            await schedule.settled()
        if stops:
            await broker.stop()
        else:
            broker.fail(RuntimeError("killed"))
            disk._locks.clear()
    broker = await open_broker(disk, clock=clock)
    schedule = await Schedule.of(broker)
    await schedule.passes(3 * HOUR_MS)
    assert sorted(schedule.numbers()) == list(range(12))
    late = [one.number for one in schedule.fired() if one.due_at_ms >= expected[0][0]]
    assert late == [number for at_ms, number in sorted(expected) if at_ms >= expected[0][0]]
    await broker.stop()


# --- clocks --------------------------------------------------------------------------------------

JUMPS = pytest.mark.parametrize("jump_ms", [HOUR_MS, -HOUR_MS, 400 * DAY_MS])


@JUMPS
async def test_a_clock_that_jumps_fires_nothing_before_as_much_time_has_passed(
    jump_ms: int,
) -> None:
    broker = await open_broker()
    schedule = await Schedule.of(broker)
    await schedule.add(10_000)
    schedule.clock.jump(jump_ms)
    for _ in range(9):
        await schedule.passes(1_000)
        assert schedule.numbers() == []
    await schedule.passes(1_000 + max(0, -jump_ms))
    assert schedule.numbers() == [0]
    await broker.stop()


async def test_a_jump_that_stays_is_believed_after_the_hold_and_not_before() -> None:
    broker = await open_broker()
    schedule = await Schedule.of(broker)
    await schedule.add(300 * DAY_MS)
    schedule.clock.jump(400 * DAY_MS)
    await schedule.settled()
    for _ in range(59):
        await schedule.passes(60_000)
    assert schedule.numbers() == []
    await schedule.passes(120_000)
    assert schedule.numbers() == [0]
    await broker.stop()


async def test_a_jump_that_is_taken_back_fires_nothing_early() -> None:
    broker = await open_broker()
    schedule = await Schedule.of(broker)
    await schedule.add(HOUR_MS)
    for _ in range(5):
        schedule.clock.jump(400 * DAY_MS)
        await schedule.passes(60_000)
        schedule.clock.jump(-400 * DAY_MS)
        await schedule.passes(60_000)
        assert schedule.numbers() == []
    await schedule.passes(50 * 60_000)
    assert schedule.numbers() == [0]
    await broker.stop()


@JUMPS
async def test_what_fires_after_a_restart_at_another_time_is_due_by_that_time(
    jump_ms: int,
) -> None:
    disk, clock = MemoryDisk(), ManualClock()
    broker = await open_broker(disk, clock=clock)
    schedule = await Schedule.of(broker)
    await schedule.add(1_000, HOUR_MS // 2, 100 * DAY_MS, 401 * DAY_MS)
    begun_ms = clock.now_ms()
    await broker.stop()
    clock.jump(jump_ms)
    broker = await open_broker(disk, clock=clock)
    schedule = await Schedule.of(broker)
    await schedule.settled()
    due = [delay for delay in (1_000, HOUR_MS // 2, 100 * DAY_MS) if delay <= jump_ms]
    assert [one.due_at_ms - begun_ms for one in schedule.fired()] == due
    assert all(one.time_ms >= one.due_at_ms for one in schedule.fired())
    await schedule.passes(410 * DAY_MS)
    assert schedule.numbers() == [0, 1, 2, 3]
    await broker.stop()


async def test_a_start_with_the_clock_behind_the_log_warns_that_delays_wait(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk, clock = MemoryDisk(), ManualClock()
    broker = await open_broker(disk, clock=clock)
    await (await Schedule.of(broker)).add(1_000)
    newest_ms = clock.now_ms()
    await broker.stop()
    broker = await open_broker(disk, clock=clock)
    await broker.stop()
    assert "behind" not in caplog.text
    clock.jump(-400 * DAY_MS)
    broker = await open_broker(disk, clock=clock)
    assert (
        "the clock is 400d behind the newest entry of the log (2026-01-01T00:00:00" in caplog.text
    )
    assert "fires when the clock has reached that time" in caplog.text
    # It says what happens: a delay of a second waits until then.
    schedule = await Schedule.of(broker)
    await schedule.add(1_000, topic="soon")
    await schedule.passes(400 * DAY_MS - 1)
    assert schedule.numbers("soon") == []
    await schedule.passes(1)
    assert [one.time_ms for one in schedule.fired("soon")] == [newest_ms]
    await broker.stop()


@pytest.mark.parametrize(
    ("jump_ms", "expected"),
    [
        (2 * HOUR_MS, "jumped forward by 2h: messages fire by the time that really passes"),
        (-2 * HOUR_MS, "went back by 2h: waiting messages fire when the clock reaches their time"),
    ],
    ids=["forward", "back"],
)
async def test_the_warning_of_a_jump_says_what_happens_then(
    jump_ms: int, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    broker = await open_broker()
    schedule = await Schedule.of(broker)
    await schedule.add(DAY_MS)
    schedule.clock.jump(jump_ms)
    await schedule.settled()
    (line,) = [one.getMessage() for one in caplog.records if "the clock" in one.getMessage()]
    assert line.startswith("the clock " + expected)
    await broker.stop()


async def test_fresh_messages_flow_while_much_that_is_late_catches_up() -> None:
    disk, clock = MemoryDisk(), ManualClock()
    broker = await open_broker(disk, clock=clock)
    schedule = await Schedule.of(broker)
    for _ in range(20):
        await schedule.add(*range(1, 501))
    await broker.stop()
    clock.advance(DAY_MS)
    broker = await open_broker(disk, clock=clock)
    schedule = await Schedule.of(broker)
    await schedule.speaker.publish("orders", [b"fresh"])
    bodies = [one.body for one in schedule.fired()]
    assert b"fresh" in bodies
    await schedule.settled()
    assert len(schedule.numbers()) == 10_001
    await broker.stop()


# --- targets -------------------------------------------------------------------------------------


async def test_a_topic_that_was_deleted_before_its_time_begins_again() -> None:
    broker = await open_broker()
    schedule = await Schedule.of(broker)
    await schedule.add(1_000)
    await schedule.ask("topic.delete", topic="orders")
    assert "orders" not in broker.catalogue.by_name
    await schedule.passes(1_000)
    assert schedule.numbers() == [0]
    await broker.stop()


async def test_without_auto_create_what_has_no_topic_any_more_is_cancelled_and_said() -> None:
    broker = await open_broker(settings=settings_with(topics={"auto_create": False}))
    schedule = await Schedule.of(broker)
    for topic in ("orders", "others"):
        await schedule.ask("topic.create", topic=topic)
    await schedule.add(1_000, 1_000, 2_000, topic=["orders", "others", "others"])
    await schedule.ask("topic.delete", topic="orders")
    await schedule.passes(3_000)
    assert schedule.numbers("others") == [1, 2]
    assert "orders" not in broker.catalogue.by_name
    assert (await schedule.show(0))["state"] == "cancelled"
    assert await schedule.cancel(0, 1) == ["cancelled", "fired"]
    await broker.stop()


async def test_a_topic_that_does_not_exist_is_refused_at_once_without_auto_create() -> None:
    broker = await open_broker(settings=settings_with(topics={"auto_create": False}))
    schedule = await Schedule.of(broker)
    assert await schedule.refused(1_000) == "unknown_topic"
    assert broker.status()["scheduled"] == 0
    await broker.stop()


@pytest.mark.parametrize("rule", ["closed", "read-only"])
async def test_a_topic_that_cannot_be_written_is_refused_but_what_was_accepted_before_fires(
    rule: str,
) -> None:
    broker = await open_broker()
    schedule = await Schedule.of(broker)
    await schedule.add(1_000)
    await schedule.ask("topic.change", topic="orders", rule=rule)
    assert await schedule.refused(1_000) == "forbidden"
    await schedule.passes(1_000)
    assert [one.number for one in schedule.fired()] == [0]
    await broker.stop()
