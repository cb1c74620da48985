"""A segment: one file, whose failures stay failures."""

from random import Random

import pytest

from onward.log.memory_disk import MemoryDisk
from onward.log.segment import Segment, segment_name
from onward.testing.disk import Faults, FaultyDisk


def made(disk: MemoryDisk) -> Segment:
    disk.make_folder("log")
    segment = Segment(disk, "log", first_index=1)
    segment.create(prepared_path=None)
    return segment


def test_names_of_segments_sort_like_their_first_indexes() -> None:
    names = [segment_name(10**power) for power in range(19)]
    assert names == sorted(names)


def test_a_short_write_is_finished() -> None:
    segment = made(FaultyDisk(Random(1), faults=Faults(short_write=0.9)))
    segment.write(0, [b"a" * 500, b"b" * 500], 1_000)
    assert segment.file.read(0, 1_000) == b"a" * 500 + b"b" * 500


def test_a_write_that_fails_leaves_the_file_as_it_was() -> None:
    disk = FaultyDisk(Random(1))
    segment = made(disk)
    segment.write(0, [b"kept"], 4)
    disk.fail("write")
    with pytest.raises(OSError):
        segment.write(4, [b"gone"], 4)
    assert segment.file.size() == 4


def test_a_full_disk_in_the_middle_of_a_write_leaves_nothing_of_it() -> None:
    disk = FaultyDisk(Random(1), capacity_bytes=8_192)
    segment = made(disk)
    segment.write(0, [b"k" * 4_000], 4_000)
    with pytest.raises(OSError):
        segment.write(4_000, [bytes([7]) * 10_000], 10_000)
    assert segment.file.size() == 4_000


def test_after_a_failed_sync_every_later_one_fails_though_the_kernel_forgot() -> None:
    disk = FaultyDisk(Random(1))
    segment = made(disk)
    disk.fail("sync")
    with pytest.raises(OSError):
        segment.sync()
    segment.file.sync()
    with pytest.raises(OSError, match="earlier sync"):
        segment.sync()


def test_space_taken_ahead_is_used_before_more_is_taken() -> None:
    segment = made(MemoryDisk())
    segment.reserve(10, step=1_000)
    assert segment.file.size() == 1_000
    assert not segment.needs_reserve(1_000)
    assert segment.needs_reserve(1_001)
    segment.cut(10)
    assert segment.needs_reserve(11)


def test_a_segment_that_was_closed_opens_again_by_itself() -> None:
    segment = made(MemoryDisk())
    segment.write(0, [b"kept"], 4)
    segment.close()
    assert segment.file.read(0, 4) == b"kept"
