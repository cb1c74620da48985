"""The memory disk keeps the promises of the real one: most tests run on both."""

import errno
import tempfile
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.log.disk import Disk, FolderLocked, OsDisk
from onward.log.memory_disk import MemoryDisk
from onward.testing.disk import FaultyDisk


@pytest.fixture(params=["os", "memory", "faulty"])
def place(request: pytest.FixtureRequest) -> Iterator[tuple[Disk, str]]:
    if request.param == "os":
        with tempfile.TemporaryDirectory() as folder:
            yield OsDisk(), folder
        return
    disk = MemoryDisk() if request.param == "memory" else FaultyDisk(Random(1))
    disk.make_folder("/x/y")
    yield disk, "/x/y"


def test_what_was_written_is_read(place: tuple[Disk, str]) -> None:
    disk, folder = place
    file = disk.open(f"{folder}/a", create=True)
    assert file.write(0, [b"one", bytearray(b"two"), memoryview(b"three")]) == 11
    assert file.write(3, [b"TWO"]) == 3
    file.sync()
    assert file.size() == 11
    assert file.read(0, 100) == b"oneTWOthree"
    assert file.read(6, 2) == b"th"
    assert file.read(11, 5) == b""
    assert bytes(file.map()) == b"oneTWOthree"
    file.close()


def test_a_hole_and_a_reserved_part_read_as_zeros(place: tuple[Disk, str]) -> None:
    disk, folder = place
    file = disk.open(f"{folder}/a", create=True)
    file.write(70_000, [b"end"])
    assert file.read(69_998, 10) == b"\0\0end"
    file.reserve(200_000)
    assert file.size() == 200_000
    file.reserve(10)
    assert file.size() == 200_000
    assert file.read(150_000, 3) == b"\0\0\0"
    file.close()


def test_a_file_that_was_cut_grows_again_with_zeros(place: tuple[Disk, str]) -> None:
    disk, folder = place
    file = disk.open(f"{folder}/a", create=True)
    file.write(0, [b"x" * 100_000])
    file.truncate(5)
    file.truncate(100_000)
    assert file.read(0, 100_000) == b"xxxxx" + bytes(99_995)
    file.close()


def test_reading_now_gives_all_or_nothing(place: tuple[Disk, str]) -> None:
    disk, folder = place
    file = disk.open(f"{folder}/a", create=True)
    file.write(0, [b"0123"])
    assert file.read_now(1, 3) in (b"123", None)
    assert file.read_now(1, 4) is None
    file.close()


def test_names_follow_creation_rename_and_removal(place: tuple[Disk, str]) -> None:
    disk, folder = place
    for name in ("b", "a"):
        disk.open(f"{folder}/{name}", create=True).close()
    disk.make_folder(f"{folder}/deep/er")
    assert disk.list_folder(folder) == ["a", "b", "deep"]
    disk.rename(f"{folder}/a", f"{folder}/c")
    disk.remove(f"{folder}/b")
    disk.remove(f"{folder}/b")
    disk.sync_folder(folder)
    assert disk.list_folder(folder) == ["c", "deep"]
    assert disk.list_folder(f"{folder}/deep") == ["er"]


def test_a_rename_replaces_what_had_the_name(place: tuple[Disk, str]) -> None:
    disk, folder = place
    for name, content in (("new", b"NEW"), ("old", b"OLD")):
        file = disk.open(f"{folder}/{name}", create=True)
        file.write(0, [content])
        file.close()
    disk.rename(f"{folder}/new", f"{folder}/old")
    file = disk.open(f"{folder}/old")
    assert file.read(0, 9) == b"NEW"
    file.close()


def test_an_open_file_stays_readable_after_its_removal(place: tuple[Disk, str]) -> None:
    disk, folder = place
    file = disk.open(f"{folder}/a", create=True)
    file.write(0, [b"here"])
    disk.remove(f"{folder}/a")
    assert file.read(0, 4) == b"here"
    file.close()


def test_what_is_missing_is_said(place: tuple[Disk, str]) -> None:
    disk, folder = place
    with pytest.raises(FileNotFoundError):
        disk.open(f"{folder}/none")
    with pytest.raises(FileNotFoundError):
        disk.open(f"{folder}/no/folder", create=True)
    with pytest.raises(FileNotFoundError):
        disk.rename(f"{folder}/none", f"{folder}/a")
    with pytest.raises(FileNotFoundError):
        disk.list_folder(f"{folder}/none")


def test_a_closed_file_cannot_be_used(place: tuple[Disk, str]) -> None:
    disk, folder = place
    file = disk.open(f"{folder}/a", create=True)
    file.close()
    file.close()
    with pytest.raises(OSError) as caught:
        file.read(0, 1)
    assert caught.value.errno == errno.EBADF


def test_a_lock_is_held_by_one_until_it_is_given_back(place: tuple[Disk, str]) -> None:
    disk, folder = place
    unlock = disk.lock(f"{folder}/lock")
    with pytest.raises(FolderLocked):
        disk.lock(f"{folder}/lock")
    unlock()
    disk.lock(f"{folder}/lock")()


def test_a_full_disk_writes_what_fits_and_then_says_so() -> None:
    disk = MemoryDisk(capacity_bytes=100, chunk_bytes=10)
    file = disk.open("a", create=True)
    assert file.write(0, [b"x" * 95]) == 95
    assert file.write(95, [b"y" * 10]) == 5
    with pytest.raises(OSError) as caught:
        file.write(100, [b"z"])
    assert caught.value.errno == errno.ENOSPC
    assert disk.free_bytes(".") == 0
    disk.capacity_bytes = 200
    assert file.write(100, [b"z"]) == 1


def test_removing_and_cutting_give_space_back() -> None:
    disk = MemoryDisk(capacity_bytes=100, chunk_bytes=10)
    for name in ("a", "b"):
        disk.open(name, create=True).write(0, [b"x" * 50])
    assert disk.free_bytes(".") == 0
    disk.remove("a")
    assert disk.free_bytes(".") == 50
    disk.open("b").truncate(11)
    assert disk.free_bytes(".") == 80
    disk.open("c", create=True).reserve(80)
    assert disk.free_bytes(".") == 0
    disk.rename("c", "b")
    assert disk.free_bytes(".") == 20


def test_reserved_space_cannot_be_taken_by_others() -> None:
    disk = MemoryDisk(capacity_bytes=100, chunk_bytes=10)
    reserved = disk.open("a", create=True)
    reserved.reserve(60)
    assert disk.open("b", create=True).write(0, [b"x" * 100]) == 40
    assert reserved.write(0, [b"x" * 100]) == 60


writes = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 60), st.binary(max_size=40)),
        st.tuples(st.just("truncate"), st.integers(0, 90), st.just(b"")),
    ),
    max_size=20,
)


@given(writes)
def test_any_writes_give_the_same_bytes_as_one_growing_array(
    steps: list[tuple[str, int, bytes]],
) -> None:
    file = MemoryDisk(chunk_bytes=16).open("a", create=True)
    expected = bytearray()
    for step, position, written in steps:
        if step == "truncate":
            file.truncate(position)
            expected = expected[:position].ljust(position, b"\0")
        elif written:
            file.write(position, [written])
            expected = expected.ljust(position, b"\0")
            expected[position : position + len(written)] = written
        assert file.map() == expected
