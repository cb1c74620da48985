"""A stream reads entries of all topics as they are stored, and says when one is gone."""

from random import Random

import pytest

from onward.errors import Corruption, OffsetOutOfRange
from onward.log.log import LogLimits
from onward.log.memory_disk import MemoryDisk
from onward.log.retention import rewrite
from onward.log.stream import EntryStream
from onward.message.entry import entry_heads
from onward.testing.disk import Faults, FaultyDisk

from .writing import Writer

LARGE = LogLimits(preallocate_bytes=0, disk_reserve_bytes=0)


def written(*, limits: LogLimits | None = None, commits: int = 30) -> Writer:
    writer = Writer(MemoryDisk()) if limits is None else Writer(MemoryDisk(), limits=limits)
    for number in range(commits):
        writer.append(*range(1, 2 + number % 3), size=40 + 60 * (number % 5))
    return writer


def stored(writer: Writer) -> bytes:
    """Return the bytes of all segments."""
    return b"".join(bytes(one.file.read(0, one.bytes)) for one in writer.log.segments)


def indexes(entries: object) -> list[int]:
    return [entry.index for entry in entry_heads(entries)]  # type: ignore[arg-type]


def read_all(stream: EntryStream, *, bytes_max: int) -> bytes:
    parts: list[bytes] = []
    while stream.has_more:
        entries = stream.read(bytes_max=bytes_max)
        assert entries
        assert len(entries) <= bytes_max or len(indexes(entries)) == 1
        parts.append(bytes(entries))
    assert stream.read(bytes_max=bytes_max) == b""
    return b"".join(parts)


@pytest.mark.parametrize("bytes_max", [1, 71, 72, 300, 5_000, 1 << 20])
@pytest.mark.parametrize("is_sealed", [False, True])
def test_all_entries_are_read_as_they_are_stored(bytes_max: int, is_sealed: bool) -> None:
    writer = written()
    if is_sealed:
        writer.seal()
    assert len(writer.log.segments) > 3
    assert read_all(EntryStream(writer.log, 1), bytes_max=bytes_max) == stored(writer)


@pytest.mark.parametrize("limits", [None, LARGE])
def test_a_stream_may_begin_at_every_entry(limits: LogLimits | None) -> None:
    writer = written(limits=limits)
    last = writer.log.next_index - 1
    for index in range(1, last + 1):
        stream = EntryStream(writer.log, index)
        assert indexes(read_all(stream, bytes_max=1_000)) == list(range(index, last + 1))


def test_one_entry_at_a_time_is_read_with_the_smallest_limit() -> None:
    writer = written()
    stream = EntryStream(writer.log, 1)
    for index in range(1, writer.log.next_index):
        assert stream.next_index == index
        assert indexes(stream.read(bytes_max=1)) == [index]


def test_a_stream_at_the_end_continues_when_there_is_more() -> None:
    writer = written()
    end = writer.log.next_index
    stream = EntryStream(writer.log, end)
    assert not stream.has_more
    assert stream.read(bytes_max=1_000) == b""
    for number in range(30):
        writer.append(1)
        assert stream.has_more
        assert indexes(stream.read(bytes_max=1_000)) == [end + number]
    writer.roll()
    assert not stream.has_more
    writer.append(2)
    assert indexes(stream.read(bytes_max=1_000)) == [end + 30]


def test_only_what_is_finished_and_synced_is_read() -> None:
    writer = Writer(MemoryDisk(), limits=LARGE)
    writer.append(1, 1)
    writer.append(1, 1, sync=False)
    staged = writer.log.stage([writer.draft(1)])
    writer.log.perform(staged, sync=True)
    stream = EntryStream(writer.log, 1)
    assert indexes(stream.read(bytes_max=10_000)) == [1, 2]
    assert not stream.has_more
    writer.log.synced_index = 3
    assert indexes(stream.read(bytes_max=10_000)) == [3]
    writer.log.synced_index = 99
    assert indexes(stream.read(bytes_max=10_000)) == [4]
    assert not stream.has_more
    writer.log.finish(staged)
    assert indexes(stream.read(bytes_max=10_000)) == [5]


def test_an_entry_that_is_larger_than_what_is_searched_at_once_is_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("onward.log.stream.SEARCH_BYTES", 256)
    writer = Writer(MemoryDisk(), limits=LARGE)
    for size in (10, 5_000, 100, 900, 30, 160):
        writer.append(1, size=size)
    for index in range(1, 7):
        assert indexes(EntryStream(writer.log, index).read(bytes_max=1)) == [index]


# --- gone ----------------------------------------------------------------------------------------


def with_gaps(topics: tuple[int, ...]) -> Writer:
    """Return a log whose segments were written again without topic 1."""
    writer = Writer(FaultyDisk(Random(1)))
    for _ in range(12):
        writer.append(*topics, size=200)
    writer.roll()
    writer.seal()
    writer.checkpoint()
    for segment in writer.log.segments[:-1]:
        new = rewrite(writer.log, segment, is_dead=lambda summary: summary.topic == 1)
        writer.log.replace(segment, new)
    return writer


@pytest.mark.parametrize("topics", [(1, 1, 2), (2, 1, 1), (2, 1, 2), (1,)])
def test_a_stream_that_meets_a_gap_says_that_the_entry_is_gone(topics: tuple[int, ...]) -> None:
    writer = with_gaps(topics)
    for index in range(1, writer.log.next_index):
        stream, is_gone = EntryStream(writer.log, index), topics[(index - 1) % len(topics)] == 1
        if is_gone:
            with pytest.raises(OffsetOutOfRange, match=f"event {index} is no longer stored"):
                stream.read(bytes_max=10_000)
            assert stream.next_index == index
        else:
            assert indexes(stream.read(bytes_max=10_000))[0] == index


def test_what_stands_before_a_gap_is_read_before_it_is_reported() -> None:
    writer = with_gaps((2, 2, 1))
    stream = EntryStream(writer.log, 1)
    assert indexes(stream.read(bytes_max=10_000)) == [1, 2]
    for _ in range(2):
        with pytest.raises(OffsetOutOfRange, match="event 3 "):
            stream.read(bytes_max=10_000)


def test_a_stream_continues_in_a_segment_that_was_written_again() -> None:
    writer = Writer(FaultyDisk(Random(1)))
    for topic in (1, 2, 2, 1, 2, 2):
        writer.append(topic)
    stream = EntryStream(writer.log, 2)
    assert indexes(stream.read(bytes_max=1)) == [2]
    writer.roll()
    writer.seal()
    writer.checkpoint()
    segment = writer.log.segments[0]
    new = rewrite(writer.log, segment, is_dead=lambda summary: summary.topic == 1)
    writer.log.replace(segment, new)
    assert indexes(stream.read(bytes_max=1_000)) == [3]
    with pytest.raises(OffsetOutOfRange, match="event 4 "):
        stream.read(bytes_max=1_000)


def test_entries_of_dropped_segments_are_gone_also_for_a_stream_that_stood_there() -> None:
    writer = written()
    writer.seal()
    standing, behind = EntryStream(writer.log, 1), EntryStream(writer.log, 1)
    assert standing.read(bytes_max=1)
    dropped = writer.log.segments[:2]
    first = writer.log.segments[2].first_index
    writer.log.drop(dropped)
    writer.log.remove_files(dropped)
    for stream in (
        standing,
        behind,
        EntryStream(writer.log, first - 1),
        EntryStream(writer.log, 0),
    ):
        with pytest.raises(OffsetOutOfRange, match="no longer stored"):
            stream.read(bytes_max=1_000)
    rest = read_all(EntryStream(writer.log, first), bytes_max=1_000)
    assert indexes(rest) == list(range(first, writer.log.next_index))


def test_damage_is_corruption_and_what_stands_before_it_is_read() -> None:
    disk = FaultyDisk(Random(1))
    writer = Writer(disk, limits=LARGE)
    entries = writer.append(1, 1, 1)
    disk.flip_bit(writer.log.tail.path, entries[1].position)
    stream = EntryStream(writer.log, 1)
    assert indexes(stream.read(bytes_max=10_000)) == [1]
    for _ in range(2):
        with pytest.raises(Corruption, match="no entry 2 at byte"):
            stream.read(bytes_max=10_000)
    with pytest.raises(Corruption, match="no entry 3 at byte"):
        EntryStream(writer.log, 3).read(bytes_max=10_000)


# --- without waiting -----------------------------------------------------------------------------


def test_without_waiting_nothing_is_searched_and_nothing_is_lost() -> None:
    disk = FaultyDisk(Random(3), faults=Faults(uncached_read=0.5))
    writer = Writer(disk)
    for number in range(30):
        writer.append(1, 2, size=40 + 60 * (number % 5))
    stream, waits, parts = EntryStream(writer.log, 2), 0, list[bytes]()
    assert stream.read(bytes_max=300, wait=False) is None, "it has to be searched for"
    while stream.has_more:
        before = stream.next_index
        entries = stream.read(bytes_max=300, wait=False)
        if entries is None:
            assert stream.next_index == before
            waits += 1
            entries = stream.read(bytes_max=300)
        parts.append(bytes(entries or b""))
    assert waits > 5
    assert indexes(b"".join(parts)) == list(range(2, writer.log.next_index))


def test_a_segment_that_is_read_from_its_beginning_needs_no_search() -> None:
    writer = written()
    stream, count = EntryStream(writer.log, 1), 0
    while stream.has_more:
        assert stream.read(bytes_max=1_000, wait=False)
        count += 1
    assert count > len(writer.log.segments)
