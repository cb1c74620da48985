"""Retention: only what nobody wants goes, and what stays can be read as before."""

import contextlib
from random import Random

import pytest

from onward.errors import Corruption
from onward.log.index import TopicSummary
from onward.log.retention import Keep, expired, judge, old_bytes, rewrite
from onward.log.segment import Segment
from onward.testing.disk import Faults, FaultyDisk

from .writing import FOLDER, LogLimits, Writer

LIMITS = LogLimits(segment_bytes_max=20_000, preallocate_bytes=0, disk_reserve_bytes=0)


def is_one(summary: TopicSummary) -> bool:
    return summary.topic == 1


def written(disk: FaultyDisk, *, topics: tuple[int, ...] = (1, 1, 2), commits: int = 60) -> Writer:
    writer = Writer(disk, limits=LIMITS)
    for _ in range(commits):
        writer.append(*topics, size=200)
    writer.roll()
    writer.seal()
    writer.checkpoint()
    return writer


def replace(writer: Writer, segment: Segment) -> Segment:
    new = rewrite(writer.log, segment, is_dead=is_one)
    writer.log.replace(segment, new)
    return new


def test_only_the_oldest_segments_are_dropped_and_only_when_all_in_them_is_dead() -> None:
    writer = written(FaultyDisk(Random(1)))
    sealed = writer.log.segments[:-1]
    end = sealed[1].sealed.summary_of(2).end_offset  # type: ignore[union-attr]
    verdict = judge(
        sealed, is_dead=lambda s: s.topic == 1 or s.end_offset <= end, bytes_max=0, total_bytes=0
    )
    assert verdict.drop == sealed[:2]


def test_a_log_that_is_too_big_loses_its_oldest_segments_and_no_more() -> None:
    writer = written(FaultyDisk(Random(1)))
    sealed = writer.log.segments[:-1]
    limit = writer.log.bytes - sealed[0].bytes
    verdict = judge(sealed, is_dead=lambda s: False, bytes_max=limit, total_bytes=writer.log.bytes)
    assert verdict.drop == sealed[:1]


def test_a_small_stretch_of_dead_entries_is_not_worth_a_rewrite() -> None:
    writer = written(FaultyDisk(Random(1)))
    verdict = judge(writer.log.segments[:-1], is_dead=is_one, bytes_max=0, total_bytes=0)
    assert verdict.rewrite == []


def test_a_rewritten_segment_holds_what_is_alive_and_nothing_else() -> None:
    writer = written(FaultyDisk(Random(1)))
    before = writer.read(2)
    for segment in writer.log.segments[:-1]:
        new = replace(writer, segment)
        assert new.bytes < segment.bytes
        assert new.next_index == segment.next_index
        assert new.new.count == 0
    assert writer.read(2) == before
    assert writer.read(1) == []


@pytest.mark.parametrize("seed", range(10))
def test_a_rewritten_segment_survives_a_power_cut_and_folds_to_the_same_state(seed: int) -> None:
    disk = FaultyDisk(Random(seed))
    writer = written(disk)
    before = writer.read(2)
    for segment in writer.log.segments[:-1]:
        replace(writer, segment)
    disk.crash()
    again = Writer(disk, limits=LIMITS)
    assert again.read(2) == before
    assert again.next == writer.next
    again.append(1, 2)
    assert again.read(2)[-1] == (before[-1][0] + 1, 1)


def test_a_gap_may_be_part_of_a_later_gap() -> None:
    disk = FaultyDisk(Random(1))
    writer = written(disk, topics=(1, 3, 2))
    before = writer.read(2)
    first = replace(writer, writer.log.segments[0])
    second = rewrite(writer.log, first, is_dead=lambda s: s.topic in (1, 3))
    writer.log.replace(first, second)
    assert second.bytes < first.bytes
    assert writer.read(2) == before
    disk.remove(second.index_path)
    disk.kill()
    assert Writer(disk, limits=LIMITS).read(2) == before


@pytest.mark.parametrize("seed", range(40))
def test_a_power_cut_at_any_moment_of_a_rewrite_loses_nothing_alive(seed: int) -> None:
    disk = FaultyDisk(Random(seed))
    writer = written(disk)
    before = writer.read(2)
    disk.cut_power_after(seed * 2, then=lambda: None)
    try:
        for segment in writer.log.segments[:-1]:
            replace(writer, segment)
    except OSError:
        pass
    disk.crash()
    again = Writer(disk, limits=LIMITS)
    assert again.read(2) == before
    assert not [name for name in disk.list_folder(FOLDER) if name.endswith(".tmp")]


def test_short_writes_do_not_damage_a_rewritten_segment() -> None:
    disk = FaultyDisk(Random(3))
    writer = written(disk)
    before = writer.read(2)
    disk.faults = Faults(short_write=0.5)
    for segment in writer.log.segments[:-1]:
        replace(writer, segment)
    assert writer.read(2) == before


def test_a_disk_that_is_full_keeps_the_segment_and_gives_the_space_of_the_copy_back() -> None:
    disk = FaultyDisk(Random(1))
    writer = written(disk)
    before = writer.read(2)
    disk.capacity_bytes = 1
    disk.fail("write", after=20, error=28)
    with pytest.raises(OSError):
        rewrite(writer.log, writer.log.segments[0], is_dead=is_one)
    assert not [name for name in disk.list_folder(FOLDER) if name.endswith(".tmp")]
    assert writer.read(2) == before


def test_a_damaged_segment_is_kept_as_it_is() -> None:
    disk = FaultyDisk(Random(1))
    writer = written(disk)
    segment = writer.log.segments[0]
    disk.flip_bit(segment.path, segment.bytes // 2)
    content = disk.open(segment.path).map()
    with pytest.raises(Corruption, match="kept as it is"):
        rewrite(writer.log, segment, is_dead=is_one)
    assert disk.open(segment.path).map() == content


def test_a_reader_in_the_middle_of_a_segment_does_not_notice_its_rewrite() -> None:
    disk = FaultyDisk(Random(1))
    writer = written(disk)
    segment = writer.log.segments[0]
    span = writer.log.plan(2, 5, bytes_max=1)
    assert span is not None
    replace(writer, segment)
    assert writer.log.read(span, wait=True)
    following = writer.log.plan(2, 6, bytes_max=1, hint=span.segment)
    assert following is not None
    assert following.rows[0].base_offset == 6
    assert writer.log.read(following, wait=True)


@pytest.mark.parametrize("seed", range(20))
def test_a_power_cut_while_segments_are_dropped_loses_nothing_else(seed: int) -> None:
    disk = FaultyDisk(Random(seed))
    writer = written(disk)
    segments = writer.log.segments[:2]
    kept = segments[-1].sealed.summary_of(2).end_offset  # type: ignore[union-attr]
    writer.log.drop(segments)
    disk.cut_power_after(seed % 3, then=lambda: None)
    with contextlib.suppress(OSError):
        writer.log.remove_files(segments)
    disk.crash()
    again = Writer(disk, limits=LIMITS)
    assert again.next == writer.next
    assert again.read(2, kept) == writer_tail(again, kept)


def writer_tail(writer: Writer, offset: int) -> list[tuple[int, int]]:
    return [(number, 1) for number in range(offset, writer.next[2])]


def test_what_is_too_old_moves_the_first_offset_and_segments_that_are_new_are_not_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writer = written(FaultyDisk(Random(1)))
    sealed = writer.log.segments[:-1]
    last_ms = sealed[-1].last_time_ms
    end = sealed[-1].sealed.summary_of(1).end_offset  # type: ignore[union-attr]
    keeps = {1: Keep(1_000, 0, 0), 2: Keep(0, 0, 0)}
    assert expired(sealed, keeps, unfinished={}, now_ms=last_ms + 1_001) == {1: end}
    assert expired(sealed, {1: Keep(1_000, 0, end)}, unfinished={}, now_ms=last_ms + 1_001) == {}
    looked: list[Segment] = []
    monkeypatch.setattr(Segment, "summaries", lambda segment: looked.append(segment) or iter(()))
    assert expired(sealed, {1: Keep(10**15, 0, 0)}, unfinished={}, now_ms=last_ms) == {}
    assert len(looked) <= 1
    assert expired(sealed, {1: Keep(0, 0, 0)}, unfinished={}, now_ms=last_ms) == {}
    assert len(looked) <= 1
    assert expired(sealed, {1: Keep(0, 1, 0)}, unfinished={}, now_ms=last_ms) == {}
    assert len(looked) >= len(sealed)


def test_old_bytes_are_counted_by_what_each_topic_keeps() -> None:
    writer = Writer(FaultyDisk(Random(1)))
    writer.append(1, 1, 2, size=200)
    tail = writer.log.tail
    row = next(tail.rows_of(1)).row(0)
    later_ms = tail.last_time_ms + 1_001
    keeps = {1: Keep(1_000, 0, 0), 2: Keep(0, 0, 0)}
    assert old_bytes(tail.new, keeps, now_ms=later_ms) == 2 * row.length
    writer.checkpoint()
    writer.append(1, size=200)
    assert sum(old_bytes(source, keeps, now_ms=later_ms) for source in tail.sources()) in (
        2 * row.length, 3 * row.length,
    )  # fmt: skip
    assert old_bytes(tail.new, keeps, now_ms=row.time_ms + 1_000) == 0
