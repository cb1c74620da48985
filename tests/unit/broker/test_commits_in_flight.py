"""The write path with three commits in flight: in order, refused together, nothing seen early."""

import asyncio
import errno
from random import Random

import pytest

from onward.broker.broker import Broker
from onward.errors import Overloaded, Unavailable
from onward.log.disk import Disk
from onward.log.memory_disk import MemoryDisk
from onward.log.stream import EntryStream
from onward.protocol.payloads import Durability, Published
from onward.settings import Settings
from onward.testing.clock import ManualClock
from onward.testing.disk import FaultyDisk
from onward.testing.fold import compare_to_fold

from .speaking import HeldCommit, Speaker, open_broker, settings_with, turns

QUORUM = 3


class ThreeInFlight(HeldCommit):
    """Holds up to three writes, and may promise more than the disk of this node."""

    in_flight_max = 3
    promised = 0
    """Entries up to this index are promised to be stored by a quorum."""

    def durability_of(self, index: int) -> int:
        return QUORUM if index <= self.promised else super().durability_of(index)

    def refuse(self, error: Exception) -> None:
        """Refuse the first write and all behind it, without writing any."""
        refused, self.held = self.held, []
        for _, _, done in refused:
            done(error)


def held(broker: Broker) -> ThreeInFlight:
    commit = broker._commit
    assert isinstance(commit, ThreeInFlight)
    return commit


async def open_node(disk: Disk | None = None, *, clock: ManualClock | None = None) -> Broker:
    broker = await open_broker(disk, clock=clock, commit=ThreeInFlight)
    await release_all(broker)
    return broker


async def release(broker: Broker, count: int = 1) -> None:
    for _ in range(count):
        held(broker).release()
        await turns()


async def release_all(broker: Broker) -> None:
    await turns()
    while held(broker).held:
        await release(broker)


async def say_each(
    speaker: Speaker, *bodies: bytes, topic: str = "orders", producer_id: int = 0
) -> list[int]:
    """Publish bodies, each of which begins a commit if one can begin."""
    ids = []
    for sequence, body in enumerate(bodies):
        ids.append(speaker.say_publish(topic, [body], producer_id=producer_id, sequence=sequence))
        await turns()
    return ids


async def opened(disk: Disk | None = None) -> tuple[Broker, Speaker]:
    """Return a broker that has the topic `orders` with one message, and a connection to it."""
    broker = await open_node(disk)
    speaker = await Speaker.to(broker)
    await say_each(speaker, b"first")
    await release_all(broker)
    return broker, speaker


async def test_three_commits_are_in_flight_and_the_fourth_collects_what_comes() -> None:
    broker, speaker = await opened()
    ids = await say_each(speaker, b"a", b"b", b"c", b"d", b"e", b"f")
    assert len(held(broker).held) == 3
    await release(broker)
    assert len(held(broker).held) == 3
    await release_all(broker)
    answers = [speaker.answer(id_) for id_ in ids]
    assert [one.base_offset for one in answers if isinstance(one, Published)] == [1, 2, 3, 4, 5, 6]
    assert [one.event_id for one in answers if isinstance(one, Published)] == [3, 4, 5, 6, 6, 6]
    assert await speaker.read("orders") == [b"first", b"a", b"b", b"c", b"d", b"e", b"f"]
    await broker.stop()


async def test_receipts_come_in_order_and_readers_see_nothing_before_its_commit_is_done() -> None:
    broker, speaker = await opened()
    following = speaker.say_read("orders", follow=True)
    ids = await say_each(speaker, b"a", b"b", b"c")
    for done in range(3):
        assert [bool(speaker.of(id_)) for id_ in ids] == [n < done for n in range(3)]
        expected = [b"first", b"a", b"b"][: done + 1]
        assert await speaker.read("orders") == expected
        assert speaker.bodies(following) == expected
        assert broker.catalogue.find("orders").next_offset == done + 1
        await release(broker)
    assert speaker.bodies(following) == [b"first", b"a", b"b", b"c"]
    await broker.stop()


async def test_a_topic_that_is_created_in_flight_is_published_to_by_the_commits_behind() -> None:
    broker = await open_node()
    speaker = await Speaker.to(broker)
    ids = await say_each(speaker, b"a", b"b", b"c", topic="new")
    assert len(held(broker).held) == 3
    await release_all(broker)
    answers = [speaker.answer(id_) for id_ in ids]
    assert [one.base_offset for one in answers if isinstance(one, Published)] == [0, 1, 2]
    await broker.stop()


async def test_a_repeat_waits_for_the_commit_that_has_its_first() -> None:
    broker, speaker = await opened()
    first, second = await say_each(speaker, b"x", b"y", producer_id=7)
    repeats = [
        speaker.say_publish("orders", [b"x"], producer_id=7, sequence=sequence)
        for sequence in (1, 0)
    ]
    await turns()
    assert len(held(broker).held) == 2, "repeats begin no commit"
    await release(broker)
    receipt = speaker.answer(first)
    assert isinstance(receipt, Published)
    assert speaker.answer(repeats[1]) == receipt._replace(repeat=True)
    assert speaker.of(repeats[0]) == []
    await release(broker)
    receipt = speaker.answer(second)
    assert isinstance(receipt, Published)
    assert speaker.answer(repeats[0]) == receipt._replace(repeat=True)
    assert len(await speaker.read("orders")) == 3
    await broker.stop()


# --- refused -------------------------------------------------------------------------------------


async def test_a_full_disk_refuses_the_commits_behind_and_later_publishes_succeed() -> None:
    disk = FaultyDisk(Random(1))
    broker, speaker = await opened(disk)
    ids = await say_each(speaker, b"A", b"B", b"C", producer_id=7)
    meanwhile = speaker.say_publish("orders", [b"d"], producer_id=7, sequence=3)
    await turns()
    await release(broker)
    disk.fail("write", error=errno.ENOSPC)
    await release(broker)
    assert speaker.answer(ids[1]) == "disk_full"
    assert speaker.of(ids[2]) == []
    assert len(held(broker).held) == 2, "those behind are refused in their turn"
    broker.gate.disk_is_full = False
    early = speaker.say_publish("orders", [b"b"], producer_id=7, sequence=1)
    await turns()
    assert len(held(broker).held) == 2, "nothing begins until all were refused"
    await release(broker, 2)
    answers = [speaker.answer(id_) for id_ in (*ids[1:], meanwhile, early)]
    assert answers == ["disk_full"] * 4
    assert broker.publishing.inflight_bytes == 0
    broker.gate.disk_is_full = False
    again = [
        speaker.say_publish("orders", [body], producer_id=7, sequence=sequence)
        for sequence, body in enumerate((b"b", b"c", b"d"), 1)
    ]
    await release_all(broker)
    answers = [speaker.answer(id_) for id_ in (ids[0], *again)]
    assert [one.base_offset for one in answers if isinstance(one, Published)] == [1, 2, 3, 4]
    assert await speaker.read("orders") == [b"first", b"A", b"b", b"c", b"d"]
    assert compare_to_fold(broker.state, disk, "log") == []
    await broker.stop()


async def test_what_the_commit_itself_refuses_leaves_nothing_behind() -> None:
    broker, speaker = await opened()
    ids = await say_each(speaker, b"a", b"b", topic="new")
    held(broker).refuse(Unavailable("nobody agrees"))
    await turns()
    assert [speaker.answer(id_) for id_ in ids] == ["unavailable"] * 2
    assert set(broker.catalogue.by_name) == {"orders"}
    assert broker.log.staged_index == broker.log.next_index
    (again,) = await say_each(speaker, b"c", topic="new")
    await release_all(broker)
    answer = speaker.answer(again)
    assert isinstance(answer, Published)
    assert (answer.base_offset, answer.event_id) == (0, broker.log.next_index - 1)
    await broker.stop()


async def test_rows_of_the_trace_are_refused_with_the_commit_that_creates_their_topic() -> None:
    broker = await open_node()
    answers: list[object] = []
    for number in range(3):
        broker.publishing.record(lambda: [b"{}"], done=answers.append)
        await turns()
        assert len(held(broker).held) == number + 1
    held(broker).refuse(Unavailable("nobody agrees"))
    await turns()
    assert [type(one) for one in answers] == [Unavailable] * 3
    assert not broker.catalogue.by_name
    await broker.stop()


async def test_rows_that_meet_a_full_disk_with_messages_are_written_again() -> None:
    disk = FaultyDisk(Random(1))
    broker, speaker = await opened(disk)
    answers: list[object] = []
    await say_each(speaker, b"a", b"b", b"c")
    refused = await say_each(speaker, b"d")
    broker.publishing.record(lambda: [b"{}"], done=answers.append)
    await release(broker, 3)
    refused += await say_each(speaker, b"e")
    assert [len(write.entries) for write, _, _ in held(broker).held] == [3, 1]
    disk.fail("write", error=errno.ENOSPC)
    await release(broker, 2)
    assert [speaker.answer(id_) for id_ in refused] == ["disk_full"] * 2
    assert answers == []
    await release_all(broker)
    assert answers == [None]
    assert await speaker.read("orders") == [b"first", b"a", b"b", b"c"]
    await broker.stop()


async def test_a_crowd_that_was_refused_while_it_was_waited_for_begins_no_commit() -> None:
    broker, speaker = await opened()
    await say_each(speaker, b"a")
    broker.publishing._crowd = 1_000
    (waits,) = await say_each(speaker, b"b")
    assert len(held(broker).held) == 1
    assert broker.publishing._wait is not None
    held(broker).refuse(Unavailable("nobody agrees"))
    await turns()
    assert speaker.answer(waits) == "unavailable"
    await asyncio.sleep(0.01)
    assert held(broker).held == []
    await asyncio.wait_for(broker.publishing.drain(), 1)
    await broker.stop()


# --- time, durability, drain and roll ------------------------------------------------------------


async def test_time_does_not_go_back_between_commits_in_flight() -> None:
    clock = ManualClock()
    broker = await open_node(clock=clock)
    speaker = await Speaker.to(broker)
    for jump_ms in (0, 5_000, -4_000):
        clock.jump(jump_ms)
        await say_each(speaker, b"x")
    times = [entry.time_ms for write, _, _ in held(broker).held for entry in write.entries]
    assert len(times) == 4
    assert times == sorted(times)
    await release_all(broker)
    await broker.stop()


async def test_a_receipt_promises_what_the_commit_says_when_it_is_done() -> None:
    broker, speaker = await opened()
    ids = await say_each(speaker, b"a", b"b")
    memory = speaker.say_publish("orders", [b"c"], durability=Durability.MEMORY)
    await turns()
    held(broker).promised = 3
    await release_all(broker)
    answers = [speaker.answer(id_) for id_ in (*ids, memory)]
    assert [one.durability for one in answers if isinstance(one, Published)] == [
        QUORUM,
        Durability.DISK,
        Durability.MEMORY,
    ]
    await broker.stop()


async def test_draining_waits_for_all_commits_in_flight_and_for_what_was_collected() -> None:
    broker, speaker = await opened()
    ids = await say_each(speaker, b"a", b"b", b"c", b"d")
    drained = asyncio.ensure_future(broker.publishing.drain())
    for _ in range(4):
        await turns()
        assert not drained.done()
        await release(broker)
    await drained
    assert all(isinstance(speaker.answer(id_), Published) for id_ in ids)
    await broker.stop()


async def test_draining_ends_when_all_were_refused() -> None:
    broker, speaker = await opened()
    await say_each(speaker, b"a", b"b")
    drained = asyncio.ensure_future(broker.publishing.drain())
    await turns()
    held(broker).refuse(Unavailable("nobody agrees"))
    await asyncio.wait_for(drained, 1)
    await broker.stop()


async def test_a_segment_begins_only_between_commits_and_others_may_follow_it_at_once() -> None:
    disk = MemoryDisk()
    broker, speaker = await opened(disk)
    rolled: list[object] = []
    await say_each(speaker, b"a", b"b")
    assert not broker.publishing.roll(done=rolled.append)
    await release(broker)
    assert not broker.publishing.roll(done=rolled.append)
    await release(broker)
    assert broker.publishing.roll(done=rolled.append)
    assert not broker.publishing.roll(done=rolled.append)
    ids = await say_each(speaker, b"c", b"d")
    assert len(held(broker).held) == 3
    assert rolled == []
    await release_all(broker)
    assert rolled == [None]
    assert all(isinstance(speaker.answer(id_), Published) for id_ in ids)
    assert len(broker.log.segments) == 2
    assert await speaker.read("orders") == [b"first", b"a", b"b", b"c", b"d"]
    await broker.stop()
    again = await open_broker(disk)
    assert await (await Speaker.to(again)).read("orders") == [b"first", b"a", b"b", b"c", b"d"]
    await again.stop()


# --- a follower ----------------------------------------------------------------------------------


def small_segments() -> Settings:
    return settings_with(log={"segment_bytes_max": 600})


async def leader_with_messages() -> Broker:
    leader = await open_broker(settings=small_segments())
    speaker = await Speaker.to(leader)
    for number in range(10):
        await speaker.publish("orders", [b"%d" % number * 50], producer_id=7, sequence=number)
    return leader


async def test_a_follower_stores_several_commits_at_once_and_applies_each_when_it_is_done() -> None:
    leader = await leader_with_messages()
    follower = await open_broker(settings=small_segments(), commit=ThreeInFlight, follows="")
    stream, answers = EntryStream(leader.log, 1), list[object]()
    while stream.has_more:
        entries = bytes(stream.read(bytes_max=1) or b"")
        follower.publishing.follow(entries, sync=True, done=answers.append)
    assert len(held(follower).held) == leader.log.next_index - 1
    for index in range(1, leader.log.next_index):
        assert follower.log.next_index == index
        assert follower.state.entry_count == len(answers) == index - 1
        await release(follower)
    assert answers == [None] * (leader.log.next_index - 1)
    assert follower.log.last_crc == leader.log.last_crc
    await leader.stop()
    await follower.stop()


async def test_a_follower_with_a_full_disk_refuses_all_in_flight_and_can_go_on() -> None:
    leader, disk = await leader_with_messages(), FaultyDisk(Random(1))
    follower = await open_broker(disk, settings=small_segments(), commit=ThreeInFlight, follows="")
    stream, answers = EntryStream(leader.log, 1), list[object]()
    for _ in range(4):
        entries = bytes(stream.read(bytes_max=1) or b"")
        follower.publishing.follow(entries, sync=True, done=answers.append)
    await release(follower)
    disk.fail("write", error=errno.ENOSPC)
    await release(follower)
    again = bytes(EntryStream(leader.log, 2).read(bytes_max=1 << 20) or b"")
    with pytest.raises(Overloaded):
        follower.publishing.follow(again, sync=True, done=answers.append)
    await release_all(follower)
    assert [one is None for one in answers] == [True, False, False, False]
    while follower.log.next_index < leader.log.next_index:
        stream = EntryStream(leader.log, follower.log.next_index)
        entries = bytes(stream.read(bytes_max=1 << 20) or b"")
        follower.publishing.follow(entries, sync=True, done=answers.append)
        await release_all(follower)
    assert follower.log.last_crc == leader.log.last_crc
    assert compare_to_fold(follower.state, disk, "log") == []
    await leader.stop()
    await follower.stop()
