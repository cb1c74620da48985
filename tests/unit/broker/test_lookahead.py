"""Looking ahead: every message that is asked for is wanted, unwanted, gone or left for later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onward.broker import lookahead
from onward.broker.catalogue import Topic, TopicRecord
from onward.broker.lookahead import BYTES_MAX, OFFSETS_MAX, LookAhead, Looked
from onward.delivery.filter import Filter
from onward.delivery.ranges import Range, offsets_of, ranges_of
from onward.delivery.record import GroupRecord
from onward.log.disk import Buffer
from onward.log.log import Log, LogLimits
from onward.log.recovery import open_log
from onward.message.batch import encode_batch
from onward.message.entry import Draft, Kind
from onward.testing.disk import Faults, FaultyDisk

LIMITS = LogLimits(segment_bytes_max=100_000, preallocate_bytes=0, disk_reserve_bytes=0)
SETTINGS = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
ORDERED = GroupRecord("g", mode="ordered")


class Shelf:
    """A real log with one topic, and the messages that were put there."""

    def __init__(self, *, limits: LogLimits = LIMITS) -> None:
        self.disk = FaultyDisk(Random(1))
        self.opened = open_log(self.disk, "log", limits=limits, load=lambda state: _ignore)
        self.log: Log = self.opened.log
        self.topic = Topic(TopicRecord(number=1, name="orders"))
        self.waits = 0

    def put(self, *batches: bytes, count: int, topic: int = 1) -> None:
        """Write one entry."""
        offset = self.topic.next_offset if topic == 1 else 0
        write = self.log.stage([Draft(Kind.MESSAGES, 0, topic, offset, count, batches)])
        self.log.perform(write, sync=True)
        self.log.finish(write)
        if topic == 1:
            self.topic.next_offset += count

    def put_plain(self, count: int, *, body: bytes = b"hello", **columns: Any) -> None:
        self.put(encode_batch([body] * count, **columns), count=count)

    async def look(self, ranges: Sequence[Range], record: GroupRecord) -> Looked:
        return await LookAhead(self.log, self.in_thread).look(self.topic, ranges, record)

    async def in_thread(self, work: Callable[[], Buffer | None]) -> Buffer | None:
        self.waits += 1
        return work()


def _ignore(entry: object, body: memoryview) -> None:
    pass


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    shelf = Shelf()
    yield shelf
    shelf.log.close()
    shelf.opened.unlock()


# --- what is found -----------------------------------------------------------------------------


async def test_keys_tenants_and_priorities_come_beside_their_offsets(shelf: Shelf) -> None:
    shelf.put_plain(3, keys=["a", None, "b"], tenants=["x", "y", None], priorities=[1, 2, 3])
    shelf.put_plain(2)
    record = GroupRecord("g", mode="ordered", tenants={}, priorities=True)
    looked = await shelf.look([(0, 5)], record)
    assert looked.ranges == [(0, 5)]
    assert looked.offsets == [0, 1, 2, 3, 4]
    assert looked.keys == ["a", None, "b", None, None]
    assert looked.tenants == ["x", "y", None, None, None]
    assert looked.priorities == [1, 2, 3, 0, 0]
    assert looked.unwanted == looked.gone == looked.next_ranges == []


async def test_only_what_the_group_asks_for_is_unpacked(shelf: Shelf) -> None:
    shelf.put_plain(2, keys=["a", "b"], tags=["x", "y"], priorities=[1, 2])
    looked = await shelf.look([(0, 2)], GroupRecord("g", filter=Filter(tags_any=("x",))))
    assert (looked.ranges, looked.unwanted) == ([(0, 1)], [(1, 2)])
    assert looked.keys is looked.tenants is looked.priorities is None
    assert looked.offsets == []
    looked = await shelf.look([(0, 2)], GroupRecord("g", key_rate=1))
    assert (looked.keys, looked.priorities) == (["a", "b"], None)


async def test_only_the_ranges_that_are_asked_for_are_looked_at(shelf: Shelf) -> None:
    for start in range(0, 40, 4):
        shelf.put_plain(4, keys=[str(start + number) for number in range(4)])
    asked = [(2, 3), (6, 9), (30, 31), (39, 40)]
    looked = await shelf.look(asked, ORDERED)
    assert looked.ranges == asked
    assert looked.keys == [str(offset) for offset in looked.offsets]
    assert looked.offsets == list(offsets_of(asked))


async def test_what_the_filter_does_not_want_is_told_apart(shelf: Shelf) -> None:
    headers = [{"kind": "paid"}, None, {"kind": b"paid"}, {"kind": "open"}]
    tags = ["eu", "eu,us", "asia", None]
    shelf.put_plain(4, headers=headers, tags=tags, keys=list("abcd"))
    by_header = GroupRecord("g", filter=Filter(headers={"kind": "paid"}), mode="ordered")
    looked = await shelf.look([(0, 4)], by_header)
    assert (looked.ranges, looked.unwanted) == ([(0, 1), (2, 3)], [(1, 2), (3, 4)])
    assert (looked.offsets, looked.keys) == ([0, 2], ["a", "c"])
    by_tag = GroupRecord("g", filter=Filter(tags_all=("eu", "us")))
    looked = await shelf.look([(0, 4)], by_tag)
    assert (looked.ranges, looked.unwanted) == ([(1, 2)], [(0, 1), (2, 4)])


async def test_what_is_not_stored_is_gone(shelf: Shelf) -> None:
    shelf.put_plain(3)
    shelf.topic.next_offset += 4  # as if an entry between two others was retained away
    shelf.put_plain(3)
    shelf.topic.first_offset = 1
    looked = await shelf.look([(0, 8), (9, 20)], ORDERED)
    assert looked.gone == [(0, 1), (3, 7), (10, 20)]
    assert looked.ranges == [(1, 3), (7, 8), (9, 10)]
    assert looked.next_ranges == []


async def test_an_empty_topic_has_nothing_and_nothing_asked_finds_nothing(shelf: Shelf) -> None:
    looked = await shelf.look([(0, 3)], ORDERED)
    assert (looked.ranges, looked.gone) == ([], [(0, 3)])
    looked = await shelf.look([], ORDERED)
    assert looked.ranges == looked.gone == looked.next_ranges == []


async def test_other_topics_between_are_not_looked_at(shelf: Shelf) -> None:
    for number in range(5):
        shelf.put(encode_batch([b"other"], keys=["other"]), count=1, topic=2)
        shelf.put_plain(1, keys=[str(number)])
    looked = await shelf.look([(0, 5)], ORDERED)
    assert looked.keys == ["0", "1", "2", "3", "4"]


# --- bounds ------------------------------------------------------------------------------------


async def look_at_all(shelf: Shelf, ranges: list[Range], record: GroupRecord) -> list[Looked]:
    """Look again and again until nothing is left."""
    looks: list[Looked] = []
    while ranges:
        looks.append(await shelf.look(ranges, record))
        left = list(offsets_of(looks[-1].next_ranges))
        assert len(left) < sum(end - start for start, end in ranges), "a look always goes on"
        ranges = looks[-1].next_ranges
    return looks


async def test_a_look_at_too_many_messages_leaves_the_rest_for_later(shelf: Shelf) -> None:
    shelf.put_plain(3 * OFFSETS_MAX)
    asked = [(0, 10), (20, 3 * OFFSETS_MAX)]
    looks = await look_at_all(shelf, asked, ORDERED)
    assert [len(looked.offsets) for looked in looks] == [OFFSETS_MAX, OFFSETS_MAX, OFFSETS_MAX - 10]
    assert looks[0].next_ranges == [(OFFSETS_MAX + 10, 3 * OFFSETS_MAX)]
    assert [one for looked in looks for one in looked.offsets] == list(offsets_of(asked))


async def test_a_look_at_too_many_bytes_leaves_the_rest_for_later() -> None:
    shelf = Shelf(limits=LogLimits(1 << 30, preallocate_bytes=0, disk_reserve_bytes=0))
    for _ in range(40):
        shelf.put_plain(1, body=bytes(100_000))
    looks = await look_at_all(shelf, [(0, 40)], ORDERED)
    assert max(len(looked.offsets) for looked in looks) <= BYTES_MAX // 100_000 + 1
    assert [one for looked in looks for one in looked.offsets] == list(range(40))


async def test_what_unpacks_to_too_much_leaves_the_rest_for_later(shelf: Shelf) -> None:
    large = encode_batch([bytes(9 << 20)], keys=["a"], compression="zstd")
    shelf.put(*[large] * 6, count=6)
    looks = await look_at_all(shelf, [(0, 6)], ORDERED)
    assert [looked.keys for looked in looks] == [["a", "a"]] * 3


async def test_an_entry_larger_than_a_look_is_looked_at_all_the_same() -> None:
    shelf = Shelf(limits=LogLimits(1 << 30, preallocate_bytes=0, disk_reserve_bytes=0))
    shelf.put_plain(2, body=bytes(BYTES_MAX), keys=["a", "b"])
    looked = await shelf.look([(1, 2)], ORDERED)
    assert (looked.keys, looked.next_ranges) == (["b"], [])


# --- trouble -----------------------------------------------------------------------------------


async def test_a_batch_that_cannot_be_decoded_is_wanted_and_stops_nobody(shelf: Shelf) -> None:
    good = encode_batch([b"hello"], keys=["a"], tags=["eu"])
    # A column of keys whose lengths say more than there is.
    bad = bytearray(encode_batch([b"hello"], keys=["b" * 8], tags=["eu"]))
    at = bad.index(b"b" * 8) - 4
    bad[at : at + 4] = (1_000).to_bytes(4, "little")
    shelf.put(good, bytes(bad), good, count=3)
    record = GroupRecord("g", mode="ordered", filter=Filter(tags_any=("eu",)))
    looked = await shelf.look([(0, 3)], record)
    assert looked.ranges == [(0, 3)]
    assert looked.keys == ["a", None, "a"]


async def test_what_follows_bytes_that_are_no_batch_is_wanted_up_to_the_next_entry(
    shelf: Shelf,
) -> None:
    good = encode_batch([b"hello"], keys=["a"])
    shelf.put(good, bytes(64), count=5)
    shelf.put(good, count=3)  # fewer messages than the entry says
    shelf.put(good, count=1)
    looked = await shelf.look([(0, 9)], GroupRecord("g", mode="ordered"))
    assert looked.ranges == [(0, 9)]
    assert looked.keys == ["a", None, None, None, None, "a", None, None, "a"]


async def test_a_damaged_entry_is_wanted_unseen_and_those_around_it_are_seen(
    shelf: Shelf,
) -> None:
    for number in range(6):
        shelf.put_plain(2, keys=[str(number)] * 2)
    span = shelf.log.plan(1, 4, bytes_max=0)
    assert span is not None
    shelf.disk.flip_bit(span.segment.path, span.position + 100)
    looked = await shelf.look([(0, 12)], ORDERED)
    assert looked.offsets == list(range(12))
    assert looked.keys == ["0", "0", "1", "1", None, None, "3", "3", "4", "4", "5", "5"]


async def test_a_disk_that_cannot_be_read_leaves_everything_wanted_unseen(shelf: Shelf) -> None:
    for number in range(3):
        shelf.put_plain(2, keys=[str(number)] * 2)
    shelf.disk.faults = Faults(read_error=1.0)
    looked = await shelf.look([(1, 6)], ORDERED)
    assert (looked.ranges, looked.keys) == ([(1, 6)], [None] * 5)


async def test_what_is_not_at_hand_is_read_in_the_thread(shelf: Shelf) -> None:
    shelf.put_plain(2, keys=["a", "b"])
    await shelf.look([(0, 2)], ORDERED)
    assert shelf.waits == 0
    shelf.disk.faults = Faults(uncached_read=1.0)
    looked = await shelf.look([(0, 2)], ORDERED)
    assert (looked.keys, shelf.waits) == (["a", "b"], 1)


async def test_a_segment_that_is_retained_while_it_is_read_is_gone(shelf: Shelf) -> None:
    shelf.put_plain(2, keys=["a", "b"])
    write = shelf.log.stage_roll()
    shelf.log.perform(write, sync=False)
    shelf.log.finish(write)
    shelf.put_plain(2, keys=["c", "d"])
    first = shelf.log.segments[0]

    async def in_thread(work: Callable[[], Buffer | None]) -> Buffer | None:
        if first in shelf.log.segments:
            shelf.log.drop([first])
            first.close()
            shelf.disk.remove(first.path)
        return work()

    shelf.disk.faults = Faults(uncached_read=1.0)
    looked = await LookAhead(shelf.log, in_thread).look(shelf.topic, [(0, 4)], ORDERED)
    assert looked.gone == [(0, 2)]
    assert looked.keys == ["c", "d"]


# --- anything ----------------------------------------------------------------------------------

TAGS = [None, "eu", "us", "eu,us"]
batches = st.lists(st.tuples(st.sampled_from(TAGS), st.sampled_from([None, "a", "b"])),
                   min_size=1, max_size=6)  # fmt: skip
entries = st.lists(batches, min_size=1, max_size=4)


@settings(SETTINGS, max_examples=80)
@given(
    written=st.lists(entries, max_size=8), asked=st.sets(st.integers(0, 60)), seed=st.integers(0),
    limit=st.sampled_from([1, 3, 20, OFFSETS_MAX]),
)  # fmt: skip
async def test_whatever_is_asked_is_answered_once_and_rightly(
    written: list[list[list[tuple[str | None, str | None]]]], asked: set[int], seed: int, limit: int
) -> None:
    shelf, random = Shelf(), Random(seed)
    stored: dict[int, tuple[str | None, str | None]] = {}
    for entry in written:
        rows = [row for batch in entry for row in batch]
        if random.random() < 0.2:
            shelf.topic.next_offset += len(rows)
            continue
        stored |= dict(enumerate(rows, start=shelf.topic.next_offset))
        packed = [
            encode_batch(
                [b"x"] * len(batch),
                tags=[tag for tag, _ in batch],
                keys=[key for _, key in batch],
                compression=random.choice([None, "zstd"]),
            )
            for batch in entry
        ]
        shelf.put(*packed, count=len(rows))
    record = GroupRecord("g", mode="ordered", filter=Filter(tags_any=("eu",)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookahead, "OFFSETS_MAX", limit)
        looks = await look_at_all(shelf, ranges_of(asked), record)
    wanted = [o for o in sorted(asked) if "eu" in ((stored.get(o) or (None,))[0] or "")]
    assert [o for one in looks for o in one.offsets] == wanted
    assert [o for one in looks for o in offsets_of(one.ranges)] == wanted
    assert [key for one in looks for key in one.keys or ()] == [stored[o][1] for o in wanted]
    gone = sorted(asked - stored.keys())
    assert [o for one in looks for o in offsets_of(one.gone)] == gone
    unwanted = sorted(asked - set(wanted) - set(gone))
    assert [o for one in looks for o in offsets_of(one.unwanted)] == unwanted
