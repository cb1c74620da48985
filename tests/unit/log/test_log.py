"""The log: what is written is found again, what failed is forgotten, damage is never served."""

import errno
from random import Random

import pytest

from onward.errors import Corruption, DiskFull, Overloaded
from onward.log import log as log_module
from onward.log.log import DiskFailed, LogLimits
from onward.log.memory_disk import MemoryDisk
from onward.testing.disk import Faults, FaultyDisk

from .writing import FOLDER, LIMITS, Writer


def test_indexes_are_dense_and_each_entry_names_the_one_before() -> None:
    writer = Writer(MemoryDisk())
    entries = [*writer.append(1, 2, 1), *writer.append(2)]
    assert [entry.index for entry in entries] == [1, 2, 3, 4]
    assert [entry.previous_crc for entry in entries] == [0, *(entry.crc for entry in entries[:-1])]


def test_an_entry_says_what_was_durable_when_it_was_written() -> None:
    writer = Writer(MemoryDisk())
    writer.append(1, 1)
    writer.append(1, sync=False)
    (third,) = writer.append(1)
    assert third.synced_index == 2


@pytest.mark.parametrize("sealed", [False, True])
def test_every_topic_is_read_in_order_across_segments(*, sealed: bool) -> None:
    writer = Writer(MemoryDisk())
    for number in range(60):
        writer.append(1 + number % 3, 4, count=1 + number % 2)
    if sealed:
        writer.seal()
    assert len(writer.log.segments) > 3
    for topic in (1, 2, 3, 4):
        spans = writer.read(topic)
        starts = [sum(count for _, count in spans[:number]) for number in range(len(spans))]
        assert [base for base, _ in spans] == starts
        assert sum(count for _, count in spans) == writer.next[topic]


def test_a_read_may_begin_at_every_offset() -> None:
    writer = Writer(MemoryDisk())
    for _ in range(20):
        writer.append(1, 2, count=3)
    writer.seal()
    for offset in range(60):
        assert writer.read(1, offset)[0] == (offset - offset % 3, 3)
    assert writer.read(1, 60) == []


def test_reading_goes_on_in_a_segment_that_was_sealed_meanwhile() -> None:
    writer = Writer(MemoryDisk())
    writer.append(1)
    span = writer.log.plan(1, 0, bytes_max=1)
    assert span is not None
    for _ in range(30):
        writer.append(1)
    writer.seal()
    following = writer.log.plan(1, 1, bytes_max=1, hint=span.segment)
    assert following is not None
    assert following.rows[0].base_offset == 1


def test_a_hint_to_a_segment_that_is_gone_costs_nothing() -> None:
    writer = Writer(MemoryDisk())
    for _ in range(40):
        writer.append(1)
    writer.seal()
    first = writer.log.segments[0]
    end = first.sealed.summary_of(1).end_offset  # type: ignore[union-attr]
    writer.log.drop([first])
    writer.log.remove_files([first])
    span = writer.log.plan(1, end, bytes_max=1, hint=first)
    assert span is not None
    assert span.rows[0].base_offset == end


def test_neighbours_share_a_read_and_foreign_entries_between_them_are_left_out() -> None:
    writer = Writer(MemoryDisk(), limits=LogLimits(preallocate_bytes=0))
    writer.append(1, 2, 1)
    span = writer.log.plan(1, 0, bytes_max=10_000)
    assert span is not None
    entries = writer.log.read(span, wait=False)
    assert len(span.rows) == 2
    assert len(entries or b"") == sum(row.length for row in span.rows) < span.length


def test_a_span_never_exceeds_what_was_asked_for_except_by_one_entry() -> None:
    writer = Writer(MemoryDisk(), limits=LogLimits(preallocate_bytes=0))
    writer.append(*[1] * 20)
    small = writer.log.plan(1, 0, bytes_max=1)
    large = writer.log.plan(1, 0, bytes_max=1_000)
    assert small is not None
    assert large is not None
    assert len(small.rows) == 1
    assert large.length <= 1_000


def test_a_time_or_an_event_id_is_found_wherever_it_lies() -> None:
    writer = Writer(MemoryDisk())
    for number in range(40):
        writer.append(1, 2, time_ms=1_000 + 10 * number)
    writer.seal()
    log = writer.log
    assert log.offset_from_time(1, 0) == 0
    assert log.offset_from_time(1, 1_001) == 1
    assert log.offset_from_time(1, 1_390) == 39
    assert log.offset_from_time(1, 1_391) is None
    found = [log.offset_after_index(1, index) for index in (0, 1, 2, 3, 78, 79)]
    assert found == [0, 1, 1, 2, 39, None]
    assert log.offset_after_index(2, 80) is None


def test_time_does_not_go_back_when_a_segment_begins_empty() -> None:
    disk = MemoryDisk()
    writer = Writer(disk)
    writer.append(1, time_ms=5_000)
    writer.roll()
    assert writer.log.tail.last_time_ms == 5_000
    writer.close()
    assert Writer(disk).log.tail.last_time_ms == 5_000


def test_damage_is_never_served() -> None:
    disk = FaultyDisk(Random(1))
    writer = Writer(disk)
    writer.append(1, 1)
    disk.flip_bit(writer.log.tail.path, 300)
    span = writer.log.plan(1, 0, bytes_max=10_000)
    assert span is not None
    with pytest.raises(Corruption, match="entry 2 at byte"):
        writer.log.read(span, wait=True)


def test_no_place_of_the_log_is_written_twice() -> None:
    writer = Writer(MemoryDisk())
    writer.append(1)
    first, second = (writer.log.stage([writer.draft(topic)]) for topic in (1, 2))
    writer.log.perform(first, sync=True)
    with pytest.raises(RuntimeError, match="written twice"):
        writer.log.perform(first, sync=True)
    writer.log.perform(second, sync=True)
    writer.log.finish(first)
    writer.log.finish(second)
    assert writer.read(1) == [(0, 1), (1, 1)]
    assert writer.read(2) == [(0, 1)]


def test_a_failed_sync_ends_the_node_and_is_never_tried_again() -> None:
    disk = FaultyDisk(Random(1))
    writer = Writer(disk)
    write = writer.log.stage([writer.draft(1)])
    disk.fail("sync")
    with pytest.raises(DiskFailed):
        writer.log.perform(write, sync=True)
    with pytest.raises(DiskFailed, match="earlier sync"):
        writer.log.perform(writer.log.stage([writer.draft(1)]), sync=True)


def test_a_full_disk_leaves_the_log_as_it_was() -> None:
    disk = FaultyDisk(Random(1), capacity_bytes=16 * 4_096)
    writer = Writer(disk, limits=LogLimits(preallocate_bytes=0, disk_reserve_bytes=0))
    writer.append(1)
    before = writer.log.tail.bytes, writer.log.next_index, writer.log.last_crc
    with pytest.raises(DiskFull):
        writer.log.perform(writer.log.stage([writer.draft(2, size=100_000)]), sync=True)
    writer.log.unstage()
    assert (writer.log.tail.bytes, writer.log.next_index, writer.log.last_crc) == before
    assert writer.log.tail.file.size() == before[0]
    writer.append(1)
    assert writer.read(1) == [(0, 1), (1, 1)]


@pytest.mark.parametrize("seed", range(20))
def test_a_roll_that_met_a_full_disk_leaves_no_file_that_contradicts_the_log(seed: int) -> None:
    disk = FaultyDisk(Random(seed))
    writer = Writer(disk)
    for _ in range(8):
        writer.append(1)
    write = writer.log.stage([writer.draft(2, size=30_000)])
    assert write.rolled
    disk.faults = Faults(short_write=1.0)
    disk.fail("write", after=1, error=errno.ENOSPC)
    with pytest.raises(DiskFull):
        writer.log.perform(write, sync=True)
    writer.log.unstage()
    disk.faults = Faults()
    del writer.next[2]
    # The old tail goes on with the indexes that the file was meant for.
    writer.append(1)
    disk.crash()
    again = Writer(disk)
    assert again.folded == list(range(1, 10))
    assert again.next == writer.next


def test_space_kept_for_checkpoints_is_not_taken_ahead() -> None:
    disk = FaultyDisk(Random(1), capacity_bytes=100 * 4_096)
    limits = LogLimits(preallocate_bytes=64 * 4_096, disk_reserve_bytes=50 * 4_096)
    writer = Writer(disk, limits=limits)
    writer.append(1)
    writer.log.prepare_next()
    assert disk.free_bytes(FOLDER) >= 90 * 4_096
    assert writer.log.tail.file.size() == writer.log.tail.bytes


def test_a_segment_prepared_ahead_becomes_the_next_one() -> None:
    disk = MemoryDisk()
    writer = Writer(disk, limits=LogLimits(segment_bytes_max=2_000, preallocate_bytes=4_096))
    writer.log.prepare_next()
    assert "next.log" in disk.list_folder(FOLDER)
    for _ in range(20):
        writer.append(1)
    assert len(writer.log.segments) == 2
    assert "next.log" not in disk.list_folder(FOLDER)
    writer.close()
    assert Writer(disk, limits=LIMITS).read(1) == [(number, 1) for number in range(20)]


def test_sealing_removes_all_runs_also_those_of_a_life_before() -> None:
    disk = MemoryDisk()
    writer = Writer(disk)
    writer.append(1)
    writer.checkpoint()
    disk.open(f"{FOLDER}/00000000000000000001.idx.run-0007", create=True)
    writer.roll()
    writer.seal()
    assert [name for name in disk.list_folder(FOLDER) if "run-" in name] == []
    assert writer.read(1) == [(0, 1)]


def test_short_writes_lose_nothing_anywhere() -> None:
    disk = FaultyDisk(Random(5), faults=Faults(short_write=0.7))
    writer = Writer(disk)
    for _ in range(30):
        writer.append(1, 2)
        writer.checkpoint()
    writer.seal()
    disk.crash(unsynced="lost")
    assert Writer(disk).read(2) == [(number, 1) for number in range(30)]


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE])
@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_roll_that_may_open_no_file_is_taken_back_and_can_be_tried_again(
    error: int, is_prepared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "DESCRIPTOR_WAIT_S", 0.0)
    disk = FaultyDisk(Random(1))
    writer = Writer(disk)
    for _ in range(8):
        writer.append(1)
    if is_prepared:
        writer.log.prepare_next()
    write = writer.log.stage([writer.draft(2, size=30_000)])
    assert write.rolled
    # Creating the segment, and then also taking it back.
    disk.fail("sync_folder", error=error)
    disk.fail("sync_folder", error=error)
    with pytest.raises(Overloaded):
        writer.log.perform(write, sync=True)
    writer.log.unstage()
    del writer.next[2]
    writer.append(1)
    writer.append(2, size=30_000)
    disk.crash()
    again = Writer(disk)
    assert again.folded == list(range(1, 11))
    assert again.next == writer.next
