"""The read path: from any place, in order, as fast as the reader takes it, and no faster."""

import asyncio
from random import Random

import pytest

from onward.broker.catalogue import Topic, TopicRecord
from onward.broker.group_ranges import outside
from onward.log.retention import rewrite
from onward.protocol.frames import Kind
from onward.protocol.payloads import Start, decode_end
from onward.testing.clock import START_MS, ManualClock
from onward.testing.disk import Faults, FaultyDisk

from .speaking import Speaker, open_broker, settings_with, turns


async def test_a_read_from_every_offset_gives_the_rest() -> None:
    broker = await open_broker()
    speaker = await Speaker.to(broker)
    bodies = [b"%d" % number for number in range(12)]
    for start in range(0, 12, 3):
        await speaker.publish("orders", bodies[start : start + 3])
    for offset in range(13):
        # The entry that holds the offset is sent whole: the client cuts.
        assert await speaker.read("orders", offset) == bodies[offset - offset % 3 :]
    await broker.stop()


async def test_a_read_starts_at_a_time_or_after_an_event_id() -> None:
    clock = ManualClock()
    broker = await open_broker(clock=clock)
    speaker = await Speaker.to(broker)
    for number in range(4):
        await speaker.publish("orders", [b"%d" % number])
        clock.advance(1_000)
    assert await speaker.read("orders", Start(time_ms=0)) == [b"0", b"1", b"2", b"3"]
    assert await speaker.read("orders", Start(time_ms=START_MS + 1_001)) == [b"2", b"3"]
    assert await speaker.read("orders", Start(time_ms=START_MS + 9_000)) == []
    assert await speaker.read("orders", Start(event_id=0)) == [b"0", b"1", b"2", b"3"]
    assert await speaker.read("orders", Start(event_id=3)) == [b"2", b"3"]
    assert await speaker.read("orders", Start(event_id=5)) == []
    await broker.stop()


async def test_the_clock_may_be_set_back_and_reads_by_time_still_work() -> None:
    clock = ManualClock()
    broker = await open_broker(clock=clock)
    speaker = await Speaker.to(broker)
    await speaker.publish("orders", [b"0"])
    clock.jump(-3_600_000)
    await speaker.publish("orders", [b"1"])
    clock.jump(3_600_001)
    await speaker.publish("orders", [b"2"])
    assert await speaker.read("orders", Start(time_ms=START_MS)) == [b"0", b"1", b"2"]
    assert await speaker.read("orders", Start(time_ms=START_MS + 1)) == [b"2"]
    await broker.stop()


def test_an_offset_outside_is_told_what_the_topic_holds() -> None:
    record = TopicRecord(number=1, name="orders")
    held = Topic(record, first_offset=3, next_offset=1_001)
    assert str(outside(held, 2)).endswith("topic 'orders', which holds 3 to 1000")
    empty = Topic(record, first_offset=7, next_offset=7)
    assert str(outside(empty, 9)) == "offset 9 is outside of topic 'orders', which is empty"


@pytest.mark.parametrize("offset", [4, 1_000, 2**63 - 1])
async def test_an_offset_outside_of_the_topic_is_refused(offset: int) -> None:
    broker = await open_broker()
    speaker = await Speaker.to(broker)
    await speaker.publish("orders", [b"a", b"b", b"c"])
    request_id = speaker.say_read("orders", offset)
    await turns()
    assert speaker.end(request_id) == "offset_out_of_range"
    await broker.stop()


async def test_what_cannot_be_read_is_refused() -> None:
    broker = await open_broker()
    speaker = await Speaker.to(broker)
    await speaker.request("topic.create", topic="secret", rule="write-only")
    unknown, forbidden = speaker.say_read("orders"), speaker.say_read("secret")
    await turns()
    assert (speaker.end(unknown), speaker.end(forbidden)) == ("unknown_topic", "forbidden")
    await broker.stop()


async def test_a_follower_gets_what_is_published_later_and_nothing_before() -> None:
    broker = await open_broker()
    speaker, other = await Speaker.to(broker), await Speaker.to(broker)
    await speaker.publish("orders", [b"before"])
    latest = speaker.say_read("orders", "latest", follow=True)
    all_ = other.say_read("orders", follow=True)
    await turns()
    for number in range(3):
        await speaker.publish("orders", [b"%d" % number])
    assert speaker.bodies(latest) == [b"0", b"1", b"2"]
    assert other.bodies(all_) == [b"before", b"0", b"1", b"2"]
    assert speaker.end(latest) is None
    await broker.stop()


async def test_no_more_is_sent_than_there_is_credit_for() -> None:
    broker = await open_broker(settings=settings_with(log={"segment_bytes_max": 1 << 20}))
    speaker = await Speaker.to(broker)
    for _ in range(8):
        await speaker.publish("orders", [bytes(200_000)])
    request_id = speaker.say_read("orders", credit=1)
    await turns(100)
    # One entry, as the least there is, then nothing until there is credit again.
    assert len(speaker.bodies(request_id)) == 1
    speaker.say_credit(request_id, 100_000)
    await turns(100)
    assert len(speaker.bodies(request_id)) == 1
    speaker.say_credit(request_id, 2_000_000)
    await turns(100)
    assert len(speaker.bodies(request_id)) == 8
    assert speaker.end(request_id) == "end"
    await broker.stop()


async def test_a_reader_that_does_not_read_is_sent_nothing_more_until_it_does() -> None:
    broker = await open_broker(settings=settings_with(log={"segment_bytes_max": 1 << 20}))
    writer, slow = await Speaker.to(broker), await Speaker.to(broker)
    for _ in range(40):
        await writer.publish("orders", [bytes(100_000)])
    slow.transport.pause_reading()
    request_id = slow.say_read("orders", credit=1 << 30)
    await turns(300)
    assert broker.delivering.delivered_bytes < 2_000_000
    slow.transport.resume_reading()
    await turns(600)
    assert len(slow.bodies(request_id)) == 40
    await broker.stop()


async def test_a_cancelled_read_ends_and_its_id_is_free_again() -> None:
    broker = await open_broker()
    speaker = await Speaker.to(broker)
    await speaker.publish("orders")
    request_id = speaker.say_read("orders", follow=True)
    await turns()
    speaker.say(Kind.CANCEL, request_id)
    await turns()
    assert speaker.end(request_id) == "cancelled"
    topic = broker.catalogue.find("orders")
    assert broker.delivering.readers_of(topic) == 0
    speaker.say(Kind.CANCEL, request_id)
    speaker.say_credit(request_id, 5)
    await turns()
    assert not speaker.is_lost
    await broker.stop()


async def test_an_end_says_where_to_go_on() -> None:
    broker = await open_broker()
    speaker = await Speaker.to(broker)
    await speaker.publish("orders", [b"a", b"b"])
    request_id = speaker.say_read("orders")
    await turns()
    ends = [payload for kind, payload in speaker.of(request_id) if kind == Kind.END]
    assert [decode_end(payload).next_offset for payload in ends] == [2]
    await broker.stop()


async def test_readers_are_told_when_their_topic_ends() -> None:
    broker = await open_broker()
    speaker = await Speaker.to(broker)
    await speaker.publish("orders")
    readings = [speaker.say_read("orders", follow=True) for _ in range(3)]
    await turns()
    await speaker.request("topic.delete", topic="orders")
    assert [speaker.end(id_) for id_ in readings] == ["topic_ended"] * 3
    await broker.stop()


async def test_a_closed_connection_leaves_no_reader_behind() -> None:
    broker = await open_broker()
    speaker, other = await Speaker.to(broker), await Speaker.to(broker)
    await other.publish("orders")
    speaker.say_read("orders", follow=True)
    await turns()
    speaker.transport.abort()
    await turns()
    assert broker.delivering.readers_of(broker.catalogue.find("orders")) == 0
    assert len(broker.sessions) == 1
    await broker.stop()


async def test_what_is_not_at_hand_is_read_from_the_disk_in_the_same_order() -> None:
    disk = FaultyDisk(Random(2), faults=Faults(uncached_read=0.5))
    broker = await open_broker(disk)
    speaker = await Speaker.to(broker)
    bodies = [b"%d" % number for number in range(50)]
    for body in bodies:
        await speaker.publish("orders", [body * 2_000])
    request_id = speaker.say_read("orders", credit=1 << 30)
    await turns(500)
    assert speaker.bodies(request_id) == [body * 2_000 for body in bodies]
    await broker.stop()


async def test_damage_ends_the_read_before_it_and_is_never_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = FaultyDisk(Random(1))
    broker = await open_broker(disk)
    speaker = await Speaker.to(broker)
    for number in range(3):
        await speaker.publish("orders", [b"%d" % number * 600_000])
    second = broker.log.plan(1, 1, bytes_max=1)
    assert second is not None
    disk.flip_bit(second.segment.path, second.position + 5_000)
    request_id = speaker.say_read("orders", credit=1 << 30)
    await turns(200)
    assert [len(body) for body in speaker.bodies(request_id)] == [600_000]
    assert speaker.end(request_id) == "corruption"
    again = speaker.say_read("orders", 1, credit=1 << 30)
    await turns(200)
    assert speaker.end(again) == "corruption"
    (said,) = [one for one in caplog.records if one.levelname == "ERROR"]
    assert "topic 'orders' is damaged, messages from offset 1 on" in said.getMessage()
    assert f"at byte {second.position} of {second.segment.path}" in said.getMessage()
    await broker.stop()


async def test_a_reader_of_what_was_retained_away_is_told_what_it_missed() -> None:
    broker = await open_broker()
    speaker = await Speaker.to(broker)
    await speaker.publish("orders", [b"a", b"b"])
    request_id = speaker.say_read("orders", credit=0)
    await turns()
    broker.catalogue.find("orders").first_offset = 1
    speaker.say_credit(request_id, 1_000)
    await turns()
    assert speaker.end(request_id) == "offset_out_of_range"
    await broker.stop()


async def test_a_segment_that_goes_while_it_is_read_is_no_corruption() -> None:
    disk = FaultyDisk(Random(1), faults=Faults(uncached_read=1.0))
    broker = await open_broker(disk)
    speaker = await Speaker.to(broker)
    for _ in range(30):
        await speaker.publish("orders", [bytes(10_000)])
    await broker.housekeeping.tidy()
    gone = broker.log.segments[0]
    topic = broker.catalogue.find("orders")
    assert gone.sealed is not None
    summary = gone.sealed.summary_of(topic.number)
    assert summary is not None

    release = asyncio.Event()

    async def later(work):  # type: ignore[no-untyped-def]
        await release.wait()
        return work()

    broker.delivering._in_thread = later
    request_id = speaker.say_read("orders", credit=1 << 30)
    await turns()
    topic.first_offset = summary.end_offset
    broker.log.drop([gone])
    broker.log.remove_files([gone])
    gone.close()
    release.set()
    await turns(100)
    assert speaker.end(request_id) == "offset_out_of_range"
    assert len(await speaker.read("orders", summary.end_offset)) == 30 - summary.end_offset
    await broker.stop()


async def test_a_reader_goes_on_across_a_rewrite() -> None:
    broker = await open_broker()
    speaker = await Speaker.to(broker)
    for number in range(40):
        await speaker.publish("dead", [bytes(3_000)])
        await speaker.publish("orders", [b"%d" % number])
    await broker.housekeeping.tidy()
    request_id = speaker.say_read("orders", credit=1)
    await turns()
    for segment in broker.log.segments[:-1]:
        new = rewrite(broker.log, segment, is_dead=lambda summary: summary.topic == 1)
        broker.log.replace(segment, new)
    speaker.say_credit(request_id, 1 << 20)
    await turns(200)
    assert speaker.bodies(request_id) == [b"%d" % number for number in range(40)]
    await broker.stop()


async def test_all_readers_that_do_not_read_hold_a_limited_number_of_bytes_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("onward.broker.deliver.UNSENT_BYTES_MAX", 250_000)
    broker = await open_broker(settings=settings_with(log={"segment_bytes_max": 1 << 20}))
    writer = await Speaker.to(broker)
    for _ in range(3):
        await writer.publish("orders", [bytes(100_000)])
    slow = [await Speaker.to(broker) for _ in range(6)]
    for speaker in slow:
        speaker.transport.pause_reading()
    readings = [speaker.say_read("orders", credit=1 << 30) for speaker in slow]
    await turns(200)
    assert sum(session.unsent_bytes for session in broker.sessions) < 250_000 + 101_000
    # They go on in turn, each as soon as another gives room.
    slow[0].transport.resume_reading()
    await turns(200)
    assert len(slow[0].bodies(readings[0])) == 3
    assert sum(session.unsent_bytes for session in broker.sessions) < 250_000 + 101_000
    for speaker in slow:
        speaker.transport.resume_reading()
    await turns(600)
    assert [len(s.bodies(id_)) for s, id_ in zip(slow, readings, strict=True)] == [3] * 6
    await broker.stop()


async def test_readers_that_read_go_on_when_those_that_do_not_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("onward.broker.deliver.UNSENT_BYTES_MAX", 100_000)
    clock = ManualClock()
    broker = await open_broker(clock=clock)
    dead, alive = await Speaker.to(broker), await Speaker.to(broker)
    await alive.publish("orders", [bytes(100_000)])
    dead.transport.pause_reading()
    dead.say_read("orders")
    await turns()
    request_id = alive.say_read("orders")
    for _ in range(4):
        await turns()
        assert alive.bodies(request_id) == []
        clock.advance(5_000)
        await broker.housekeeping.tick()
        alive.say(Kind.PING)
    await turns(100)
    assert dead.is_lost
    assert alive.bodies(request_id) == [bytes(100_000)]
    await broker.stop()


async def test_room_is_found_again_when_a_socket_that_was_never_full_is_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("onward.broker.deliver.UNSENT_BYTES_MAX", 20_000)
    broker = await open_broker()
    first, second = await Speaker.to(broker), await Speaker.to(broker)
    await first.publish("orders", [bytes(30_000)])
    first.transport.pause_reading()
    first.say_read("orders")
    await turns()
    request_id = second.say_read("orders")
    await turns()
    assert second.bodies(request_id) == []
    first.transport.resume_reading()
    await turns()
    broker.delivering._check_crowd()
    await turns()
    assert second.bodies(request_id) == [bytes(30_000)]
    await broker.stop()


async def test_a_failure_nobody_thought_of_ends_the_read_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broker = await open_broker(FaultyDisk(Random(1), faults=Faults(uncached_read=1.0)))
    speaker = await Speaker.to(broker)
    await speaker.publish("orders")

    async def fail(work):  # type: ignore[no-untyped-def]
        raise RuntimeError("no thread")

    in_thread, broker.delivering._in_thread = broker.delivering._in_thread, fail
    request_id = speaker.say_read("orders")
    await turns()
    assert speaker.end(request_id) == "unavailable"
    assert "no thread" in caplog.text
    broker.delivering._in_thread = in_thread
    assert await speaker.read("orders") == [b"body"]
    await broker.stop()


# --- reads that end at an offset ---------------------------------------------------------------


async def test_a_read_with_an_end_sends_nothing_that_begins_there_or_after() -> None:
    broker = await open_broker()
    speaker = await Speaker.to(broker)
    bodies = [b"%d" % number for number in range(12)]
    for start in range(0, 12, 3):
        await speaker.publish("orders", bodies[start : start + 3])
    for first in range(13):
        for end in range(14):
            reading = speaker.say_read("orders", first, end=end)
            await turns(100)
            assert speaker.end(reading) == "end"
            # Entries are sent whole: the client cuts.
            sent = bodies[first - first % 3 : -(-end // 3) * 3] if first < end else []
            assert speaker.bodies(reading) == sent
    await broker.stop()


async def test_a_read_that_follows_waits_until_its_end_is_reached() -> None:
    broker = await open_broker()
    speaker = await Speaker.to(broker)
    reading = speaker.say_read("orders", "earliest", follow=True, end=3)
    await turns()
    await speaker.publish("orders", [b"0", b"1"])
    assert (speaker.bodies(reading), speaker.end(reading)) == ([b"0", b"1"], None)
    await speaker.publish("orders", [b"2"])
    await turns()
    await speaker.publish("orders", [b"3"])
    assert (speaker.bodies(reading), speaker.end(reading)) == ([b"0", b"1", b"2"], "end")
    await broker.stop()


async def test_a_read_waits_for_credit_also_before_its_end() -> None:
    broker = await open_broker()
    speaker = await Speaker.to(broker)
    for number in range(4):
        await speaker.publish("orders", [b"%d" % number])
    reading = speaker.say_read("orders", 0, credit=1, end=2)
    await turns()
    assert (speaker.bodies(reading), speaker.end(reading)) == ([b"0"], None)
    speaker.say_credit(reading, 1 << 16)
    await turns()
    assert (speaker.bodies(reading), speaker.end(reading)) == ([b"0", b"1"], "end")
    await broker.stop()


async def test_where_a_read_with_an_end_would_go_on_is_said() -> None:
    broker = await open_broker()
    speaker = await Speaker.to(broker)
    await speaker.publish("orders", [b"0", b"1", b"2"])
    reading = speaker.say_read("orders", 0, end=2)
    await turns()
    ended = [decode_end(payload) for kind, payload in speaker.of(reading) if kind == Kind.END]
    assert [(one.next_offset, one.message) for one in ended] == [(3, "offset 2 is reached")]
    await broker.stop()
