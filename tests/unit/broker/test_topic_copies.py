"""Copies inside the broker: each batch once and as it is, whatever is refused or asked again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from random import Random
from typing import Any

import pytest

from onward.broker import topic_copies
from onward.broker.broker import Broker
from onward.broker.commit import InlineCommit
from onward.broker.producers import WINDOW
from onward.broker.topic_copies import TopicCopies
from onward.errors import (
    Conflict,
    Corruption,
    DiskFull,
    Forbidden,
    InvalidName,
    InvalidRequest,
    MessageTooLarge,
    OffsetOutOfRange,
    Overloaded,
    Stopping,
    TopicEnded,
    UnknownTopic,
)
from onward.log.memory_disk import MemoryDisk
from onward.message.batch import HEADER_BYTES, BatchHeader, batches_of
from onward.message.entry import entry_heads
from onward.protocol.frames import Kind
from onward.testing.clock import ManualClock
from onward.testing.disk import Faults, FaultyDisk, Unsynced

from .asking import Operator, until
from .speaking import HeldCommit, SlowDisk, open_broker, settings_with, turns
from .waiting import HOUR_MS

PRODUCER = 9


def copies_of(broker: Broker) -> TopicCopies:
    """Return the part of a broker that copies."""
    handler: Any = broker.operations._handlers["topic.copy"]
    copies = handler.__self__._copies
    assert isinstance(copies, TopicCopies)
    return copies


@asynccontextmanager
async def opened(disk: MemoryDisk | None = None, **options: Any) -> AsyncIterator[Broker]:
    broker = await open_broker(disk, **options)
    try:
        yield broker
    finally:
        await broker.stop()
        copies = copies_of(broker)
        assert copies._producer_ids == []
        assert copies._turns == {}


@asynccontextmanager
async def opened_with_a_slow_disk() -> AsyncIterator[tuple[Broker, SlowDisk]]:
    """Nothing is in the page cache: each read waits for the disk."""
    # What housekeeping has to do is no partial call.
    slow = SlowDisk(holds=lambda work: isinstance(work, partial))
    disk = FaultyDisk(Random(1), faults=Faults(uncached_read=1.0))
    async with opened(disk, executor=slow, commit=InlineCommit) as broker:
        yield broker, slow
        slow.release()


def held(broker: Broker) -> HeldCommit:
    commit = broker._commit
    assert isinstance(commit, HeldCommit)
    return commit


async def stage(operator: Operator, *counts: int, topic: str = "staged", body: bytes = b"") -> None:
    """Publish batches of so many messages, one after another: "0.0", "0.1", "1.0" ..."""
    for number, count in enumerate(counts):
        bodies = [b"%d.%d" % (number, row) + body for row in range(count)]
        request_id = operator.speaker.say_publish(topic, bodies)
        await until(lambda id_=request_id: operator.speaker.of(id_))


def asked(**changes: Any) -> dict[str, Any]:
    fields = {"source": "staged", "offset": 0, "batches": 1, "target": "orders"}
    return {"producer_id": PRODUCER, "sequence": 1, **fields, **changes}


async def copy(operator: Operator, **changes: Any) -> Any:
    return await operator.ask("topic.copy", **asked(**changes))


def say_copy(operator: Operator, **changes: Any) -> int:
    return operator.say("topic.copy", **asked(**changes))


def stored(broker: Broker, topic_name: str = "orders") -> list[tuple[BatchHeader, bytes]]:
    """Return the batches of a topic, as its log has them."""
    topic = broker.catalogue.by_name.get(topic_name)
    found: list[tuple[BatchHeader, bytes]] = []
    offset = 0 if topic is None else topic.first_offset
    while topic is not None:
        span = broker.log.plan(topic.number, offset, bytes_max=1 << 20)
        if span is None:
            break
        entries = broker.log.read(span, wait=True) or b""
        for entry in entry_heads(entries):
            start = entry.body_position
            for at, header in batches_of(entries, start, start + entry.body_bytes):
                found.append((header, bytes(entries[at : at + header.length])))
        offset = span.end_offset
    return found


def sequences(broker: Broker, topic: str = "orders") -> list[int]:
    return [header.sequence for header, _ in stored(broker, topic)]


# --- what is copied --------------------------------------------------------------------------


async def test_batches_arrive_in_order_under_their_new_numbers_and_with_the_same_columns() -> None:
    async with opened() as broker:
        operator = await Operator.of(broker)
        await stage(operator, 3, 1, 2, 5)
        before = stored(broker, "staged")
        reply = await copy(operator, offset=3, batches=2, sequence=40)
        size = sum(header.length for header, _ in before[1:3])
        assert reply == {"next": 6, "batches": 2, "messages": 3, "bytes": size}
        after = stored(broker)
        assert [(one.producer_id, one.sequence) for one, _ in after] == [(9, 40), (9, 41)]
        assert [one.time_ms for one, _ in after] == [broker.clock.now_ms()] * 2
        assert [packed[HEADER_BYTES:] for _, packed in after] == [
            packed[HEADER_BYTES:] for _, packed in before[1:3]
        ]
        assert await operator.speaker.read("orders") == [b"1.0", b"2.0", b"2.1"]
        assert stored(broker, "staged") == before


async def test_a_batch_that_has_a_time_keeps_it() -> None:
    async with opened() as broker:
        operator = await Operator.of(broker)
        await operator.publish("staged", 1, time_ms=1_000)
        await copy(operator)
        assert [one.time_ms for one, _ in stored(broker)] == [1_000]


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
async def test_a_compressed_batch_stays_as_it_is_compressed(compression: str) -> None:
    async with opened() as broker:
        operator = await Operator.of(broker)
        keys = [f"k{number % 3}" for number in range(500)]
        await operator.publish("staged", 500, compression=compression, keys=keys)
        await copy(operator)
        [(before, packed)], [(after, again)] = stored(broker, "staged"), stored(broker)
        assert before.flags == after.flags != 0
        assert packed[HEADER_BYTES:] == again[HEADER_BYTES:]
        assert await operator.speaker.read("orders") == [b"%d" % n for n in range(500)]


async def test_an_entry_of_several_batches_is_copied_by_batches() -> None:
    async with opened() as broker:
        operator = await Operator.of(broker)
        await operator.ask("topic.create", topic="staged")
        ids = [operator.speaker.say_publish("staged", [b"%d" % n] * 2) for n in range(6)]
        await until(lambda: operator.speaker.of(ids[-1]))
        entries = (await operator.ask("topic.entries", topic="staged", start=0, end=12))["entries"]
        assert [entry[1] for entry in entries] == [12]
        reply = await copy(operator, offset=4, batches=3)
        assert (reply["next"], reply["batches"], reply["messages"]) == (10, 3, 6)
        assert await operator.speaker.read("orders") == [b"2", b"2", b"3", b"3", b"4", b"4"]


async def test_a_stretch_may_cross_entries_and_segments() -> None:
    async with opened() as broker:
        operator = await Operator.of(broker)
        for _ in range(16):
            await stage(operator, 2, body=bytes(10_000))
            await operator.publish("between", 3)
        assert len(broker.log.segments) > 3
        reply = await copy(operator, batches=16)
        assert (reply["next"], reply["batches"]) == (32, 16)
        assert sequences(broker) == list(range(1, 17))


async def test_what_is_not_in_the_page_cache_is_read_while_others_are_served() -> None:
    async with opened_with_a_slow_disk() as (broker, slow):
        operator, other = await Operator.of(broker), await Operator.of(broker)
        await stage(operator, 1, 1)
        slow.is_held = True
        request_id = say_copy(operator, batches=2)
        await until(lambda: slow.waiting)
        await other.publish("bills", 1)
        assert not operator.speaker.of(request_id)
        slow.release()
        assert (await operator.answer(request_id))["batches"] == 2


async def test_what_is_scheduled_is_copied_to_the_schedule() -> None:
    async with opened() as broker:
        operator = await Operator.of(broker)
        due = broker.clock.now_ms() + HOUR_MS
        for number in range(2):
            await operator.publish(
                "staged", 2, topics=["orders"] * 2, due_at_ms=[due] * 2,
                uniques=[f"a{number}", f"b{number}"], replaces=[-1, -1],
            )  # fmt: skip
        for _ in range(2):
            reply = await copy(operator, target="@schedule", batches=2)
            assert (reply["batches"], reply["messages"]) == (2, 4)
        assert (await operator.ask("status"))["scheduled"] == 4
        shown = await operator.ask("schedule.show", unique="b1")
        assert (shown["state"], shown["topic"], shown["at_ms"]) == ("waiting", "orders", due)


async def test_a_copy_to_the_schedule_is_held_to_the_limit_of_its_target() -> None:
    async with opened() as broker:
        operator = await Operator.of(broker)
        await operator.ask("topic.create", topic="small", message_bytes_max=1)
        due = broker.clock.now_ms() + HOUR_MS
        # The body of the eleventh has two characters.
        topics = ["orders"] * 10 + ["small"]
        await operator.publish("staged", 11, topics=topics, due_at_ms=[due] * 11)
        with pytest.raises(MessageTooLarge, match="topic 'small' takes 1"):
            await copy(operator, target="@schedule")
        assert (await operator.ask("status"))["scheduled"] == 0


async def test_who_asked_for_a_copy_is_who_published_it() -> None:
    async with opened() as broker:
        operator = await Operator.of(broker)
        await stage(operator, 1)
        await copy(operator)
        state = await operator.ask("message.state", topic="orders", offset=0)
        assert (state["producer_id"], state["published_by"]["client"]) == (PRODUCER, "test")


# --- once ------------------------------------------------------------------------------------


async def test_a_copy_that_is_asked_for_again_is_stored_once() -> None:
    async with opened() as broker:
        operator, other = await Operator.of(broker), await Operator.of(broker)
        await stage(operator, 1, 2, 3)
        replies = [await copy(one, batches=3) for one in (operator, operator, other)]
        assert replies[0] == replies[1] == replies[2]
        assert sequences(broker) == [1, 2, 3]


async def test_what_was_published_before_counts_as_copied() -> None:
    async with opened() as broker:
        operator = await Operator.of(broker)
        await stage(operator, *[1] * 8)
        await copy(operator, batches=2)
        await operator.publish("orders", 1, producer_id=PRODUCER, sequence=5)
        assert (await copy(operator, batches=8))["batches"] == 8
        assert sequences(broker) == [1, 2, 5, 3, 4, 6, 7, 8]


async def test_a_repeat_that_comes_while_the_first_is_under_way_waits_for_it() -> None:
    async with opened(commit=HeldCommit) as broker:
        operator, other = await Operator.of(broker), await Operator.of(broker)
        operator.speaker.say_publish("staged", [b"a"])
        await turns()
        held(broker).release()
        await turns()
        ids = [say_copy(one) for one in (operator, other)]
        await turns()
        assert not operator.speaker.of(ids[0])
        assert not other.speaker.of(ids[1])
        held(broker).release()
        assert await operator.answer(ids[0]) == await other.answer(ids[1])
        assert sequences(broker) == [1]


async def test_a_sequence_that_is_older_than_what_is_remembered_is_a_conflict() -> None:
    async with opened() as broker:
        operator = await Operator.of(broker)
        await stage(operator, 1, 1, 1)
        await operator.publish("orders", 1, producer_id=PRODUCER, sequence=1 + WINDOW)
        with pytest.raises(Conflict, match="older than the last 32"):
            await copy(operator, batches=3)
        assert sequences(broker) == [1 + WINDOW]
        await copy(operator, offset=1, batches=2, sequence=2)
        assert sequences(broker) == [1 + WINDOW, 2, 3]


@pytest.mark.parametrize("unsynced", ["lost", "kept"])
async def test_a_copy_that_a_crash_interrupts_is_stored_once_when_it_is_asked_for_again(
    unsynced: Unsynced,
) -> None:
    settings, clock, copied_count = settings_with(), ManualClock(), 0
    for operations in range(40):
        disk = FaultyDisk(Random(operations))
        broker = await open_broker(disk, settings=settings, clock=clock)
        operator = await Operator.of(broker)
        await stage(operator, *[1] * 6, body=bytes(30_000))
        disk.cut_power_after(operations, then=lambda: None)
        request_id = say_copy(operator, batches=6)
        await until(lambda o=operator, id_=request_id: o.speaker.is_lost or o.speaker.of(id_))
        is_copied = Kind.REPLY in dict(operator.speaker.of(request_id))
        broker.fail(RuntimeError("the power went"))
        await broker.stop()
        disk.crash(unsynced=unsynced)
        copied_count += is_copied
        async with opened(disk, settings=settings, clock=clock) as again:
            if is_copied:
                assert sequences(again) == list(range(1, 7))
            operator = await Operator.of(again)
            assert (await copy(operator, batches=6))["next"] == 6
            assert sequences(again) == list(range(1, 7))
    # The power went before it, in it and after it.
    assert 0 < copied_count < 40


async def test_a_restart_between_two_requests_changes_nothing() -> None:
    disk = MemoryDisk()
    async with opened(disk) as broker:
        operator = await Operator.of(broker)
        await stage(operator, *[1] * 6)
        await copy(operator, batches=4)
    async with opened(disk) as broker:
        await copy(await Operator.of(broker), batches=6)
        assert sequences(broker) == list(range(1, 7))


# --- the order -------------------------------------------------------------------------------


async def test_copies_of_one_producer_keep_their_order_however_long_one_is_read() -> None:
    async with opened_with_a_slow_disk() as (broker, slow):
        operator = await Operator.of(broker)
        await stage(operator, *[1] * 4)
        slow.is_held = True
        first = say_copy(operator, batches=2)
        await until(lambda: slow.waiting)
        second = say_copy(operator, offset=2, batches=2, sequence=3)
        other = say_copy(operator, producer_id=10)
        await until(lambda: slow.waiting == 2)
        slow.release()
        for request_id in (first, second, other):
            await operator.answer(request_id)
        of_first = [one.sequence for one, _ in stored(broker) if one.producer_id == PRODUCER]
        assert of_first == [1, 2, 3, 4]
        assert len(stored(broker)) == 5


async def test_an_overloaded_broker_lets_no_copy_overtake_the_one_that_it_refused() -> None:
    settings = settings_with(server={"inflight_bytes_max": 65_536})
    async with opened(settings=settings, commit=HeldCommit) as broker:
        operator = await Operator.of(broker)
        commit = held(broker)
        for number in range(4):
            operator.speaker.say_publish("staged", [b"%d" % number + bytes(40_000)])
            await turns()
            commit.release()
            await turns()
        # Two are taken, then there are too many bytes under way.
        first = say_copy(operator, batches=3)
        await turns()
        second = say_copy(operator, offset=3, sequence=4)
        await until(lambda: operator.speaker.of(second))
        with pytest.raises(Overloaded) as refused:
            await operator.answer(second)
        assert refused.value.retry_after_ms == 100
        # Nothing is answered while some of it is under way.
        assert not operator.speaker.of(first)
        while commit.held:
            commit.release()
            await turns()
        with pytest.raises(Overloaded):
            await operator.answer(first)
        assert sequences(broker) == [1, 2]
        again = [say_copy(operator, batches=3), say_copy(operator, offset=3, sequence=4)]
        async with asyncio.timeout(60):
            while not all(map(operator.speaker.of, again)):
                while commit.held:
                    commit.release()
                await turns()
        assert [(await operator.answer(one))["next"] for one in again] == [3, 4]
        assert sequences(broker) == [1, 2, 3, 4]


async def test_so_many_copies_are_under_way_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_copies, "COPIES_MAX", 2)
    async with opened(commit=HeldCommit) as broker:
        operator = await Operator.of(broker)
        for number in range(5):
            operator.speaker.say_publish("staged", [b"%d" % number])
        await turns()
        held(broker).release()
        await turns()
        taken = [say_copy(operator, producer_id=number, sequence=1) for number in (11, 12)]
        await turns()
        with pytest.raises(Overloaded, match="2 copies are under way already") as refused:
            await copy(operator)
        assert refused.value.retry_after_ms > 0
        while held(broker).held:
            held(broker).release()
            await turns()
        for request_id in taken:
            await operator.answer(request_id)
        # There is room now, but what its producer was refused comes first.
        assert await operator.code("topic.copy", **asked(offset=1, sequence=2)) == "overloaded"
        again = [say_copy(operator), say_copy(operator, offset=1, sequence=2)]
        await turns()
        while held(broker).held:
            held(broker).release()
            await turns()
        for request_id in again:
            await operator.answer(request_id)
        assert [one.sequence for one, _ in stored(broker) if one.producer_id == 9] == [1, 2]


async def test_what_does_not_fit_is_left_and_comes_before_anything_else_of_its_producer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(topic_copies, "BYTES_MAX", 25_000)
    async with opened() as broker:
        operator = await Operator.of(broker)
        await stage(operator, *[1] * 5, body=bytes(10_000))
        ids = [say_copy(operator, batches=4), say_copy(operator, offset=4, sequence=5)]
        reply = await operator.answer(ids[0])
        assert (reply["next"], reply["batches"], reply["messages"]) == (2, 2, 2)
        with pytest.raises(Overloaded):
            await operator.answer(ids[1])
        rest = [
            say_copy(operator, offset=2, batches=2, sequence=3),
            say_copy(operator, offset=4, sequence=5),
        ]
        assert [(await operator.answer(one))["next"] for one in rest] == [4, 5]
        assert sequences(broker) == [1, 2, 3, 4, 5]


async def test_a_batch_that_is_larger_than_the_limit_is_copied_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(topic_copies, "BYTES_MAX", 5_000)
    async with opened() as broker:
        operator = await Operator.of(broker)
        await stage(operator, 1, 1, body=bytes(10_000))
        assert (await copy(operator, batches=2))["batches"] == 1


# --- what is refused -------------------------------------------------------------------------


async def test_offsets_that_are_no_batches_are_refused_and_nothing_is_copied() -> None:
    async with opened() as broker:
        operator = await Operator.of(broker)
        await stage(operator, 3, 2)
        for offset in (1, 2, 4):
            with pytest.raises(InvalidRequest, match=f"offset {offset} .* is not the first of a"):
                await copy(operator, offset=offset)
        for offset in (5, 6):
            with pytest.raises(OffsetOutOfRange, match=f"offset {offset} is outside"):
                await copy(operator, offset=offset)
        with pytest.raises(OffsetOutOfRange, match="has 2 batches from offset 0 on, not 3"):
            await copy(operator, batches=3)
        broker.catalogue.find("staged").first_offset = 3
        with pytest.raises(OffsetOutOfRange, match="which holds 3 to 4"):
            await copy(operator)
        assert stored(broker) == []


async def test_topics_that_are_not_there_or_closed_are_refused() -> None:
    settings = settings_with(topics={"auto_create": False})
    async with opened(settings=settings) as broker:
        operator = await Operator.of(broker)
        with pytest.raises(UnknownTopic, match="topic 'staged' does not exist"):
            await copy(operator)
        await operator.ask("topic.create", topic="staged")
        with pytest.raises(OffsetOutOfRange, match="which is empty"):
            await copy(operator)
        await stage(operator, 1)
        with pytest.raises(UnknownTopic, match="topic 'orders' does not exist, and topics.auto"):
            await copy(operator)
        await operator.ask("topic.create", topic="orders", rule="read-only")
        with pytest.raises(Forbidden, match="topic 'orders' is read-only"):
            await copy(operator)
        await operator.ask("topic.change", topic="staged", rule="write-only")
        with pytest.raises(Forbidden, match="topic 'staged' is write-only"):
            await copy(operator)


async def test_a_source_that_ends_while_it_is_read_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened_with_a_slow_disk() as (broker, slow):
        monkeypatch.setattr(topic_copies, "READ_BYTES_MAX", 0)
        operator = await Operator.of(broker)
        await stage(operator, 1, 1)
        slow.is_held = True
        request_id = say_copy(operator, batches=2)
        await until(lambda: slow.waiting)
        await operator.ask("topic.delete", topic="staged")
        slow.release()
        with pytest.raises(TopicEnded, match="topic 'staged' has ended"):
            await operator.answer(request_id)
        assert stored(broker) == []


async def test_a_source_that_is_closed_while_it_is_read_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with opened_with_a_slow_disk() as (broker, slow):
        monkeypatch.setattr(topic_copies, "READ_BYTES_MAX", 0)
        operator = await Operator.of(broker)
        await stage(operator, 1, 1)
        slow.is_held = True
        request_id = say_copy(operator, batches=2)
        await until(lambda: slow.waiting)
        await operator.ask("topic.change", topic="staged", rule="closed")
        slow.release()
        with pytest.raises(Forbidden, match="topic 'staged' is closed now"):
            await operator.answer(request_id)


async def test_damage_is_said_and_never_copied() -> None:
    disk = FaultyDisk(Random(7))
    async with opened(disk) as broker:
        operator = await Operator.of(broker)
        await stage(operator, 1, 1, 1, 1, body=bytes(5_000))
        topic = broker.catalogue.find("staged")
        span = broker.log.plan(topic.number, 2, bytes_max=0)
        assert span is not None
        disk.flip_bit(span.segment.path, span.position + 2_000)
        with pytest.raises(Corruption, match="is damaged"):
            await copy(operator, batches=3)
        assert stored(broker) == []
        await copy(operator, batches=2)
        await copy(operator, offset=3, sequence=4)
        assert sequences(broker) == [1, 2, 4]


async def test_nothing_overtakes_a_copy_that_its_target_refused() -> None:
    async with opened() as broker:
        operator = await Operator.of(broker)
        await stage(operator, 1, 1)
        await operator.ask("topic.create", topic="closed", rule="read-only")
        first, second = await asyncio.gather(
            copy(operator, target="closed", sequence=1),
            copy(operator, offset=1, sequence=2),
            return_exceptions=True,
        )
        assert (type(first), type(second)) == (Forbidden, Overloaded)
        assert stored(broker) == []
        await operator.ask("topic.change", topic="closed", rule="read-write")
        await copy(operator, target="closed", sequence=1)
        await copy(operator, offset=1, sequence=2)
        assert len(stored(broker)) == 1


async def test_what_the_target_does_not_take_is_refused_by_its_rules() -> None:
    async with opened() as broker:
        operator = await Operator.of(broker)
        await stage(operator, 1, 1, body=bytes(200))
        await operator.ask("topic.create", topic="orders", message_bytes_max=100)
        with pytest.raises(MessageTooLarge, match="topic 'orders' takes 100"):
            await copy(operator, batches=2)
        with pytest.raises(InvalidName, match="belongs to the system"):
            await copy(operator, target="@trace")
        with pytest.raises(InvalidRequest, match="is not understood"):
            await copy(operator, target="@schedule")
        with pytest.raises(InvalidRequest, match="needs a cluster"):
            await copy(operator, durability=3)
        assert stored(broker) == []
        with pytest.raises(UnknownTopic, match="created before it is used"):
            await copy(operator, target="@sink.other", batches=2, durability=0)
        await operator.ask("topic.create", topic="@sink.other")
        await copy(operator, target="@sink.other", batches=2, durability=0)
        assert sequences(broker, "@sink.other") == [1, 2]


@pytest.mark.parametrize(
    "wrong",
    [
        {"batches": 0}, {"batches": 17}, {"offset": -1}, {"producer_id": 0}, {"sequence": -1},
        {"producer_id": 1 << 64}, {"producer_id": 1 << 63}, {"sequence": (1 << 62) + 1},
        {"sequence": 1 << 62, "batches": 2}, {"durability": 7}, {"durability": "disk"},
        {"source": 7}, {"target": None},
    ],
)  # fmt: skip
async def test_nonsense_is_refused(wrong: dict[str, Any]) -> None:
    async with opened() as broker:
        operator = await Operator.of(broker)
        await stage(operator, 1, 1)
        assert await operator.code("topic.copy", **asked(**wrong)) == "invalid_request"


@pytest.mark.parametrize("target", ["", "a b", "x" * 300, "ä" * 200])
async def test_a_target_that_no_topic_can_be_called_is_refused(target: str) -> None:
    async with opened() as broker:
        operator = await Operator.of(broker)
        await stage(operator, 1)
        assert await operator.code("topic.copy", **asked(target=target)) == "invalid_name"


async def test_a_full_disk_refuses_a_copy_and_takes_it_when_there_is_space() -> None:
    disk = MemoryDisk()
    async with opened(disk) as broker:
        operator = await Operator.of(broker)
        await stage(operator, *[1] * 4, body=bytes(10_000))
        capacity = disk.capacity_bytes
        disk.capacity_bytes = capacity - disk.free_bytes("log") + 15_000
        with pytest.raises(DiskFull):
            await copy(operator, batches=4)
        disk.capacity_bytes = capacity
        broker.gate.disk_is_full = False
        await copy(operator, batches=4)
        assert sequences(broker) == [1, 2, 3, 4]


# --- who goes --------------------------------------------------------------------------------


async def test_a_session_that_closes_while_its_copy_is_read_leaves_nothing_behind() -> None:
    async with opened_with_a_slow_disk() as (broker, slow):
        operator, other = await Operator.of(broker), await Operator.of(broker)
        await stage(operator, 1, 1)
        slow.is_held = True
        say_copy(other, batches=2)
        say_copy(other, batches=2)
        await until(lambda: slow.waiting)
        other.speaker.transport.abort()
        await turns()
        slow.release()
        await until(lambda: not copies_of(broker)._producer_ids)
        assert stored(broker) == []
        await copy(operator, batches=2)
        assert sequences(broker) == [1, 2]


async def test_a_session_that_closes_while_its_copy_is_stored_loses_nothing() -> None:
    async with opened(commit=HeldCommit) as broker:
        operator, other = await Operator.of(broker), await Operator.of(broker)
        operator.speaker.say_publish("staged", [b"a"])
        await turns()
        held(broker).release()
        await turns()
        say_copy(other)
        await turns()
        other.speaker.transport.abort()
        await turns()
        request_id = say_copy(operator)
        await turns()
        held(broker).release()
        await turns()
        assert (await operator.answer(request_id))["batches"] == 1
        assert sequences(broker) == [1]
        assert broker.publishing.inflight_bytes == 0


async def test_a_broker_that_stops_answers_what_it_copied_and_refuses_the_rest() -> None:
    broker = await open_broker(commit=HeldCommit)
    operator = await Operator.of(broker)
    for number in range(3):
        operator.speaker.say_publish("staged", [b"%d" % number])
    await turns()
    held(broker).release()
    await turns()
    first = say_copy(operator, batches=2)
    await turns()
    stopping = asyncio.ensure_future(broker.stop())
    await turns()
    late = say_copy(operator, offset=2, sequence=3)
    await until(lambda: operator.speaker.of(late))
    with pytest.raises(Stopping):
        await operator.answer(late)
    while held(broker).held:
        held(broker).release()
        await turns()
    assert (await operator.answer(first))["batches"] == 2
    await stopping
    assert copies_of(broker)._producer_ids == []
