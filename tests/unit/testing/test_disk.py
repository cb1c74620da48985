import errno
from random import Random

import pytest

from onward.log.disk import FolderLocked
from onward.testing.disk import SECTOR_BYTES, Faults, FaultyDisk, FaultyFile, Unsynced


def disk_with_file(seed: int = 1) -> tuple[FaultyDisk, FaultyFile]:
    disk = FaultyDisk(Random(seed))
    file = disk.open("a", create=True)
    disk.sync_folder(".")
    return disk, file


def test_synced_bytes_survive_a_power_cut() -> None:
    for seed in range(50):
        disk, file = disk_with_file(seed)
        file.write(0, [b"s" * 5_000])
        file.sync()
        file.write(5_000, [b"u" * 5_000])
        disk.crash()
        assert disk.open("a").read(0, 5_000) == b"s" * 5_000


def test_unsynced_bytes_are_kept_or_lost_or_torn_by_sectors() -> None:
    sectors = set()
    sizes = set()
    for seed in range(50):
        disk, file = disk_with_file(seed)
        file.write(0, [b"o" * 3 * SECTOR_BYTES])
        file.sync()
        file.write(0, [b"N" * 5 * SECTOR_BYTES])
        disk.crash()
        left = disk.open("a").map()
        sizes.add(len(left) // SECTOR_BYTES)
        for start in range(0, 3 * SECTOR_BYTES, SECTOR_BYTES):
            sector = left[start : start + SECTOR_BYTES]
            new = sector.count(b"N")
            assert sector == b"N" * new + b"o" * (SECTOR_BYTES - new)
            sectors.add("kept" if new == SECTOR_BYTES else "torn" if new else "lost")
    assert sectors == {"kept", "lost", "torn"}
    assert {3, 5} <= sizes


@pytest.mark.parametrize(("unsynced", "left"), [("lost", b"old"), ("kept", b"newer")])
def test_a_test_may_say_what_becomes_of_unsynced_bytes(unsynced: Unsynced, left: bytes) -> None:
    disk, file = disk_with_file()
    file.write(0, [b"old"])
    file.sync()
    file.write(0, [b"newer"])
    disk.crash(unsynced=unsynced)
    assert disk.open("a").map() == left


def test_an_unsynced_cut_may_be_undone_by_a_power_cut() -> None:
    disk, file = disk_with_file()
    file.write(0, [b"x" * 100])
    file.sync()
    file.truncate(1)
    assert file.size() == 1
    disk.crash(unsynced="lost")
    assert disk.open("a").size() == 100


def test_the_same_seed_leaves_the_same_bytes() -> None:
    def left(seed: int) -> bytes:
        disk, file = disk_with_file(seed)
        file.write(0, [bytes(range(256)) * 40])
        disk.crash()
        return disk.open("a").map()

    assert left(3) == left(3)
    assert len({left(seed) for seed in range(20)}) > 10


def test_a_synced_file_without_a_synced_name_is_gone() -> None:
    disk = FaultyDisk(Random(1))
    file = disk.open("new", create=True)
    file.write(0, [b"x"])
    file.sync()
    disk.crash(unsynced="lost")
    assert disk.list_folder(".") == []


def test_unsynced_renames_and_removals_are_undone() -> None:
    disk = FaultyDisk(Random(1))
    for name in ("a", "b", "c"):
        file = disk.open(name, create=True)
        file.write(0, [name.encode()])
        file.sync()
    disk.sync_folder(".")
    disk.rename("a", "b")
    disk.remove("c")
    disk.crash(unsynced="lost")
    assert disk.list_folder(".") == ["a", "b", "c"]
    assert [disk.open(name).map() for name in "abc"] == [b"a", b"b", b"c"]


def test_synced_renames_and_removals_stay() -> None:
    disk = FaultyDisk(Random(1))
    disk.make_folder("x")
    for path in ("x/a", "x/b", "other"):
        disk.open(path, create=True)
    disk.rename("x/a", "x/c")
    disk.remove("x/b")
    disk.sync_folder("x")
    disk.crash(unsynced="lost")
    assert disk.list_folder("x") == ["c"]
    assert disk.list_folder(".") == ["x"]


def test_unsynced_changes_of_names_survive_in_their_order() -> None:
    found = set()
    for seed in range(50):
        disk = FaultyDisk(Random(seed))
        for name in ("a", "b", "c"):
            disk.open(name, create=True)
        disk.crash()
        found.add(tuple(disk.list_folder(".")))
    assert found == {(), ("a",), ("a", "b"), ("a", "b", "c")}


def test_a_file_that_was_removed_without_a_sync_comes_back_and_takes_space() -> None:
    disk = FaultyDisk(Random(1), capacity_bytes=8 * 4096)
    file = disk.open("a", create=True)
    file.write(0, [b"x" * 4 * 4096])
    file.sync()
    disk.sync_folder(".")
    disk.remove("a")
    assert disk.free_bytes(".") == 8 * 4096
    disk.crash(unsynced="lost")
    assert disk.open("a").map() == b"x" * 4 * 4096
    assert disk.free_bytes(".") == 4 * 4096


def test_a_power_cut_ends_open_files_and_locks() -> None:
    disk, file = disk_with_file()
    unlock_before = disk.lock("lock")
    disk.crash()
    with pytest.raises(OSError, match="power was cut"):
        file.read(0, 1)
    disk.lock("lock")
    unlock_before()
    with pytest.raises(FolderLocked):
        disk.lock("lock")


def test_after_a_failed_sync_the_bytes_are_seen_but_never_stored() -> None:
    disk, file = disk_with_file()
    file.write(0, [b"safe"])
    file.sync()
    file.write(4, [b"gone"])
    disk.fail("sync")
    with pytest.raises(OSError):
        file.sync()
    file.sync()
    assert file.read(0, 8) == b"safegone"
    disk.crash(unsynced="kept")
    assert disk.open("a").map() == b"safe"


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_the_chosen_write_fails_once_and_writes_nothing(error: int) -> None:
    disk, file = disk_with_file()
    disk.fail("write", after=1, error=error)
    file.write(0, [b"1"])
    with pytest.raises(OSError) as caught:
        file.write(1, [b"2"])
    assert caught.value.errno == error
    assert file.map() == b"1"
    assert file.write(1, [b"3"]) == 1


def test_faults_happen_as_often_as_they_are_likely() -> None:
    disk, file = disk_with_file()
    file.write(0, [b"x"])
    disk.faults = Faults(read_error=1.0)
    with pytest.raises(OSError):
        file.read(0, 1)
    disk.faults = Faults(sync_error=1.0)
    with pytest.raises(OSError):
        file.sync()
    with pytest.raises(OSError):
        disk.sync_folder(".")
    disk.faults = Faults(uncached_read=1.0)
    assert file.read_now(0, 1) is None
    disk.faults = Faults()
    assert file.read_now(0, 1) == b"x"


def test_a_short_write_says_how_much_was_written() -> None:
    disk, file = disk_with_file()
    disk.faults = Faults(short_write=1.0)
    written = file.write(0, [b"0123456789" * 10])
    assert 0 < written < 100
    assert file.size() == written


def test_a_full_disk_has_space_again_when_it_is_enlarged() -> None:
    disk = FaultyDisk(Random(1), capacity_bytes=8192)
    file = disk.open("a", create=True)
    assert file.write(0, [b"x" * 10_000]) == 8192
    with pytest.raises(OSError) as caught:
        file.write(8192, [b"x"])
    assert caught.value.errno == errno.ENOSPC
    disk.capacity_bytes = 100_000
    assert file.write(8192, [b"x"]) == 1


def test_damage_on_purpose_is_seen_at_once_and_after_a_power_cut() -> None:
    disk, file = disk_with_file()
    file.write(0, [b"AAAA"])
    file.sync()
    disk.flip_bit("a", 2, bit=1)
    assert file.map() == b"AACA"
    disk.cut("a", 3)
    disk.crash(unsynced="lost")
    assert disk.open("a").map() == b"AAC"
