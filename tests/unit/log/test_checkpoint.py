"""Checkpoints: durable when written, refused when damaged, never all lost at once."""

from random import Random

import pytest

from onward.log.checkpoint import (
    Checkpoint,
    checkpoint_names,
    read_checkpoint,
    read_checkpoints,
    write_checkpoint,
)
from onward.testing.disk import FaultyDisk

FOLDER = "log"


def disk_with_folder(seed: int = 1) -> FaultyDisk:
    disk = FaultyDisk(Random(seed))
    disk.make_folder(FOLDER)
    return disk


def checkpoint(last_index: int) -> Checkpoint:
    return Checkpoint(last_index, 7, 1_000, 0, 1, 800, ["run-0000"], b"state of %d" % last_index)


def test_a_checkpoint_reads_back_as_it_was_written() -> None:
    disk = disk_with_folder()
    write_checkpoint(disk, FOLDER, checkpoint(5))
    assert read_checkpoints(disk, FOLDER) == [checkpoint(5)]


def test_the_last_two_are_kept_newest_first() -> None:
    disk = disk_with_folder()
    for last_index in (5, 90, 1_000):
        write_checkpoint(disk, FOLDER, checkpoint(last_index))
    assert [one.last_index for one in read_checkpoints(disk, FOLDER)] == [1_000, 90]


def test_a_written_checkpoint_survives_a_power_cut() -> None:
    disk = disk_with_folder()
    write_checkpoint(disk, FOLDER, checkpoint(5))
    disk.crash(unsynced="lost")
    assert read_checkpoints(disk, FOLDER) == [checkpoint(5)]


@pytest.mark.parametrize("seed", range(30))
def test_a_power_cut_while_writing_one_leaves_the_one_before(seed: int) -> None:
    disk = disk_with_folder(seed)
    write_checkpoint(disk, FOLDER, checkpoint(5))
    disk.fail("sync_folder" if seed % 2 else "sync")
    with pytest.raises(OSError):
        write_checkpoint(disk, FOLDER, checkpoint(9))
    disk.crash()
    found = read_checkpoints(disk, FOLDER)
    assert found[-1] == checkpoint(5)
    assert len(found) == 1 or found[0] == checkpoint(9)


def test_every_flipped_byte_of_a_checkpoint_is_found() -> None:
    disk = disk_with_folder()
    write_checkpoint(disk, FOLDER, checkpoint(5))
    path = f"{FOLDER}/{checkpoint_names(disk, FOLDER)[0]}"
    for place in range(disk.open(path).size()):
        disk.flip_bit(path, place, place % 8)
        assert read_checkpoint(disk, path) is None
        disk.flip_bit(path, place, place % 8)
    assert read_checkpoint(disk, path) == checkpoint(5)


def test_every_truncation_of_a_checkpoint_is_refused() -> None:
    disk = disk_with_folder()
    write_checkpoint(disk, FOLDER, checkpoint(5))
    path = f"{FOLDER}/{checkpoint_names(disk, FOLDER)[0]}"
    for size in range(disk.open(path).size() - 1, -1, -1):
        disk.cut(path, size)
        assert read_checkpoint(disk, path) is None


def test_what_was_being_written_is_no_checkpoint() -> None:
    disk = disk_with_folder()
    disk.open(f"{FOLDER}/checkpoint-00000000000000000007.tmp", create=True)
    assert checkpoint_names(disk, FOLDER) == []
