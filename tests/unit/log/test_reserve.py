"""Space that is taken before a write: then a full disk is met before the write, or not at all."""

import errno
from random import Random

import pytest

from onward.errors import DiskFull, Overloaded
from onward.log import log as log_module
from onward.log.log import DiskFailed, LogLimits, Write
from onward.testing.disk import PAGE_BYTES, FaultyDisk

from .writing import FOLDER, Writer

LIMITS = LogLimits(segment_bytes_max=3 * PAGE_BYTES, preallocate_bytes=0, disk_reserve_bytes=0)
AHEAD = LogLimits(
    segment_bytes_max=3 * PAGE_BYTES, preallocate_bytes=2 * PAGE_BYTES, disk_reserve_bytes=0
)


def opened(*, seed: int = 1, limits: LogLimits = LIMITS, pages: int = 1_000) -> Writer:
    return Writer(FaultyDisk(Random(seed), capacity_bytes=pages * PAGE_BYTES), limits=limits)


def staged(writer: Writer, *topics: int, size: int = 3_000) -> list[Write]:
    return [writer.log.stage([writer.draft(topic, size=size)]) for topic in topics]


def leave_nothing(writer: Writer) -> None:
    """Let others fill the disk."""
    disk = writer.disk
    assert isinstance(disk, FaultyDisk)
    disk.capacity_bytes -= disk.free_bytes(FOLDER)


def reopened(writer: Writer, *, limits: LogLimits = LIMITS) -> Writer:
    assert isinstance(writer.disk, FaultyDisk)
    writer.disk.crash()
    return Writer(writer.disk, limits=limits)


@pytest.mark.parametrize("limits", [LIMITS, AHEAD])
def test_what_was_reserved_is_written_on_a_disk_that_is_full_by_then(limits: LogLimits) -> None:
    writer = opened(limits=limits)
    writes = staged(writer, 1, 2, 3, 4, 5, 6, 7)
    assert sum(write.rolled for write in writes) == 2
    for write in writes:
        writer.log.reserve(write)
    leave_nothing(writer)
    for write in writes:
        writer.log.perform(write, sync=True)
    for write in writes:
        writer.log.finish(write)
    with pytest.raises(DiskFull):
        writer.append(1, size=30_000)
    assert reopened(writer, limits=limits).folded == list(range(1, 8))


def test_a_write_that_was_not_reserved_takes_its_space_when_it_is_performed() -> None:
    writer = opened()
    first, second = staged(writer, 1, 2)
    writer.log.perform(first, sync=True)
    assert writer.log.tail.file.size() == first.length
    leave_nothing(writer)
    with pytest.raises(DiskFull):
        writer.log.perform(second, sync=True)


def test_a_reservation_that_fails_refuses_what_is_behind_it_and_nothing_before() -> None:
    writer = opened()
    first, second = staged(writer, 1, 2)
    writer.log.reserve(first)
    writer.log.reserve(second)
    leave_nothing(writer)
    third, fourth = staged(writer, 3, 4)
    with pytest.raises(DiskFull) as refused:
        writer.log.reserve(third)
    for step in (writer.log.reserve, lambda write: writer.log.perform(write, sync=True)):
        with pytest.raises(DiskFull) as behind:
            step(fourth)
        assert behind.value is refused.value
    writer.log.perform(first, sync=True)
    writer.log.unstage()
    assert writer.log.staged_index == 3
    writer.log.perform(second, sync=True)
    writer.log.finish(first)
    writer.log.finish(second)
    again = reopened(writer)
    assert again.next == {1: 1, 2: 1}


def test_the_reserve_of_the_disk_is_not_taken_by_messages() -> None:
    limits = LogLimits(preallocate_bytes=0, disk_reserve_bytes=10 * PAGE_BYTES)
    writer = opened(limits=limits, pages=12)
    (write,) = staged(writer, 1, size=3 * PAGE_BYTES)
    with pytest.raises(DiskFull, match="nearly full"):
        writer.log.reserve(write)
    writer.log.unstage()
    del writer.next[1]
    writer.log.system_topics.add(2)
    (write,) = staged(writer, 2, size=3 * PAGE_BYTES)
    writer.log.reserve(write)
    writer.log.perform(write, sync=True)


@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_new_segment_that_may_open_no_file_is_refused_before_the_write(
    is_prepared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "DESCRIPTOR_WAIT_S", 0.0)
    writer = opened(limits=AHEAD)
    for _ in range(3):
        writer.append(1, size=3_500)
    if is_prepared:
        writer.log.prepare_next()
    (write,) = staged(writer, 2)
    assert write.rolled
    writer.disk.fail("sync_folder", error=errno.EMFILE)  # type: ignore[attr-defined]
    with pytest.raises(Overloaded):
        writer.log.reserve(write)
    writer.log.unstage()
    del writer.next[2]
    assert [name for name in writer.disk.list_folder(FOLDER) if name.endswith(".log")] == [
        writer.log.tail.path.rsplit("/", 1)[-1]
    ]
    writer.append(1, size=100)
    assert reopened(writer, limits=AHEAD).next == writer.next


def test_a_new_segment_that_was_reserved_goes_when_a_write_before_it_is_refused() -> None:
    writer = opened()
    writes = staged(writer, 1, 2, 3, 4, 5)
    assert [write.rolled for write in writes] == [False, False, False, True, False]
    for write in writes:
        writer.log.reserve(write)
    writer.disk.fail("write", after=1, error=errno.ENOSPC)  # type: ignore[attr-defined]
    writer.log.perform(writes[0], sync=True)
    for write in writes[1:]:
        with pytest.raises(DiskFull):
            writer.log.perform(write, sync=True)
    writer.log.unstage()
    writer.log.finish(writes[0])
    assert len([name for name in writer.disk.list_folder(FOLDER) if name.endswith(".log")]) == 1
    again = reopened(writer)
    assert again.next == {1: 1}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("after", range(6))
def test_what_was_reserved_and_is_not_performed_is_cut(after: int, seed: int) -> None:
    writer = opened(seed=seed)
    writes = staged(writer, 1, 2, 3, 4, 5)
    for write in writes:
        writer.log.reserve(write)
    for write in writes[:2]:
        writer.log.perform(write, sync=True)
    writer.log.cut(after=after)
    if after < 5:
        assert writer.disk.free_bytes(FOLDER) >= (1_000 - 3 * 2) * PAGE_BYTES
    again = reopened(writer)
    assert again.folded == list(range(1, min(after, 2) + 1))
    again.append(7)
    assert reopened(again).folded[-1] == len(again.folded) + 1


@pytest.mark.parametrize("operations", range(30))
def test_a_power_cut_while_reserving_leaves_a_prefix(operations: int) -> None:
    for seed in range(5):
        writer = opened(seed=seed, limits=AHEAD if seed % 2 else LIMITS)
        disk = writer.disk
        assert isinstance(disk, FaultyDisk)
        writer.append(1, size=3_000)
        writes = staged(writer, 1, 2, 3, 4, 5)
        disk.cut_power_after(operations, then=lambda: None)
        durable = 1
        try:
            for write in writes:
                writer.log.reserve(write)
            for write in writes:
                writer.log.perform(write, sync=True)
                durable += 1
        except DiskFailed:
            pass
        again = reopened(writer)
        assert again.folded == list(range(1, len(again.folded) + 1))
        assert len(again.folded) >= durable
