"""Several writes at once: performed and finished in order, refused together, cut durably."""

import contextlib
import errno
from random import Random

import pytest

from onward.errors import DiskFull
from onward.log.log import DiskFailed, Log, Write
from onward.log.memory_disk import MemoryDisk
from onward.testing.disk import Faults, FaultyDisk

from .writing import FOLDER, Writer

SEEDS = pytest.mark.parametrize("seed", range(20))


def staged(writer: Writer, *commits: tuple[int, ...], size: int = 100) -> list[Write]:
    """Stage one write for each of `commits`, which has one entry for each of its topics."""
    return [
        writer.log.stage([writer.draft(topic, size=size) for topic in topics]) for topics in commits
    ]


def perform(writer: Writer, writes: list[Write], *, sync: bool = True) -> None:
    for write in writes:
        writer.log.perform(write, sync=sync)


def finish(writer: Writer, writes: list[Write]) -> None:
    for write in writes:
        writer.log.finish(write)


def reopened(disk: FaultyDisk) -> Writer:
    disk.crash()
    return Writer(disk)


# --- in order ------------------------------------------------------------------------------------


def test_writes_stand_one_after_another_across_segments() -> None:
    writer = Writer(MemoryDisk())
    writes = staged(writer, *[(1, 2, 3)] * 12)
    assert sum(write.rolled for write in writes) > 1
    perform(writer, writes)
    assert writer.log.next_index == 1
    assert writer.log.staged_index == 37
    assert len(writer.log.segments) == 1
    for number, write in enumerate(writes, 1):
        writer.log.finish(write)
        assert writer.log.next_index == 1 + 3 * number
        assert writer.log.synced_index == 3 * number
    assert [writer.read(topic) for topic in (1, 2, 3)] == [[(n, 1) for n in range(12)]] * 3
    writer.close()
    assert Writer(writer.disk).folded == list(range(1, 37))


def test_what_is_staged_behind_an_empty_new_segment_stands_in_it() -> None:
    writer = Writer(MemoryDisk())
    writer.append(1)
    roll = writer.log.stage_roll()
    writes = [roll, *staged(writer, (1,), (2,))]
    assert [write.segment for write in writes] == [roll.segment] * 3
    perform(writer, writes)
    finish(writer, writes)
    assert [segment.first_index for segment in writer.log.segments] == [1, 2]
    writer.close()
    again = Writer(writer.disk)
    assert again.folded == [1, 2, 3]
    assert again.read(1) == [(0, 1), (1, 1)]


def test_a_write_without_entries_begins_no_segment() -> None:
    writer = Writer(MemoryDisk())
    large, empty, small = (
        writer.log.stage([writer.draft(1, size=5_000)]),
        writer.log.stage([]),
        writer.log.stage([writer.draft(2)]),
    )
    assert [write.rolled for write in (large, empty, small)] == [False, False, True]
    perform(writer, [large, empty, small])
    finish(writer, [large, empty, small])
    writer.close()
    assert Writer(writer.disk).folded == [1, 2]


def test_entries_vouch_only_for_what_is_finished_and_synced() -> None:
    writer = Writer(MemoryDisk())
    writer.append(1)
    writes = staged(writer, (1,), (1,))
    perform(writer, writes)
    assert [write.entries[0].synced_index for write in writes] == [1, 1]
    finish(writer, writes)
    assert writer.log.stage([writer.draft(1)]).entries[0].synced_index == 3


def test_writes_are_performed_in_the_order_in_which_they_were_staged() -> None:
    writer = Writer(MemoryDisk())
    first, second = staged(writer, (1,), (1,))
    writer.log.perform(second, sync=True)
    with pytest.raises(RuntimeError, match="in the order"):
        writer.log.perform(first, sync=True)


def test_only_what_was_written_is_finished_and_in_order() -> None:
    writer = Writer(MemoryDisk())
    first, second = staged(writer, (1,), (1,))
    with pytest.raises(AssertionError, match="written"):
        writer.log.finish(first)
    perform(writer, [first, second])
    with pytest.raises(AssertionError, match="order"):
        writer.log.finish(second)


@SEEDS
def test_a_sync_of_the_last_write_makes_all_before_it_durable(seed: int) -> None:
    disk = FaultyDisk(Random(seed))
    writer = Writer(disk)
    *before, last = staged(writer, *[(1, 2)] * 12)
    perform(writer, before, sync=False)
    writer.log.perform(last, sync=True)
    disk.crash(unsynced="lost")
    assert Writer(disk).folded == list(range(1, 25))


# --- refused -------------------------------------------------------------------------------------


def fill_disk_for(writer: Writer, disk: FaultyDisk, write: Write) -> DiskFull:
    """Perform a write that meets a full disk in its middle."""
    disk.faults = Faults(short_write=1.0)
    disk.fail("write", after=1, error=errno.ENOSPC)
    try:
        with pytest.raises(DiskFull) as refused:
            writer.log.perform(write, sync=True)
    finally:
        disk.faults = Faults()
    return refused.value


@pytest.mark.parametrize("full_at", range(1, 8))
def test_what_stands_behind_a_refused_write_is_refused_with_the_same_error(full_at: int) -> None:
    disk = FaultyDisk(Random(full_at))
    writer = Writer(disk)
    writes = staged(writer, *[(topic,) for topic in range(1, 9)], size=700)
    perform(writer, writes[:full_at])
    error = fill_disk_for(writer, disk, writes[full_at])
    for write in writes[full_at + 1 :]:
        with pytest.raises(DiskFull) as behind:
            writer.log.perform(write, sync=True)
        assert behind.value is error
        assert not write.is_written
    files = [name for name in disk.list_folder(FOLDER) if name.endswith(".log")]
    assert len(files) == 1 + sum(write.rolled for write in writes[:full_at])
    writer.log.unstage()
    finish(writer, writes[:full_at])
    assert writer.log.staged_index == writer.log.next_index == full_at + 1
    writer.append(1)
    again = reopened(disk)
    assert again.folded == list(range(1, full_at + 2))
    assert again.next.keys() == {1, *range(1, full_at + 1)}


def test_an_empty_new_segment_that_is_refused_leaves_the_tail_as_it_was() -> None:
    disk = FaultyDisk(Random(1))
    writer = Writer(disk)
    writer.append(1)
    roll = writer.log.stage_roll()
    (behind,) = staged(writer, (2,))
    disk.fail("sync_folder", error=errno.ENOSPC)
    for write in (roll, behind):
        with pytest.raises(DiskFull):
            writer.log.perform(write, sync=True)
    writer.log.unstage()
    del writer.next[2]
    writer.append(1)
    assert len(writer.log.segments) == 1
    assert reopened(disk).next == writer.next


REFUSED = 9


def write_and_refuse(writer: Writer, disk: FaultyDisk, *, full_at: int) -> tuple[int, list[Write]]:
    """Perform five writes of which one meets a full disk, then one more.

    Returns the index up to which entries were durable, and the refused writes, when the power goes.
    """
    durable, refused = 0, list[Write]()
    writes = staged(writer, *[(1 if n < full_at else REFUSED,) * 2 for n in range(5)], size=400)
    try:
        for number, write in enumerate(writes):
            if number == full_at:
                disk.fail("write", error=errno.ENOSPC)
            try:
                writer.log.perform(write, sync=True)
                durable = write.entries[-1].index
            except DiskFull:
                refused.append(write)
        writer.log.unstage()
        finish(writer, writes[:full_at])
        durable = writer.append(1, 1, 1)[-1].index
    except (DiskFailed, OSError):
        pass
    return durable, refused


@pytest.mark.parametrize("full_at", range(5))
def test_a_power_cut_at_any_point_leaves_a_prefix_and_nothing_that_was_refused(
    full_at: int,
) -> None:
    cuts = [0]
    for operations in range(60):
        disk = FaultyDisk(Random(100 * full_at + operations))
        writer = Writer(disk)
        disk.cut_power_after(operations, then=lambda: cuts.append(1))
        durable, refused = write_and_refuse(writer, disk, full_at=full_at)
        again = reopened(disk)
        assert again.folded == list(range(1, len(again.folded) + 1))
        assert len(again.folded) >= durable
        if refused:
            assert REFUSED not in again.next
        again.append(1)
        assert reopened(disk).folded[-1] == len(again.folded) + 1
    assert 4 < sum(cuts) < 60, "every point was met, and one run without a cut"


# --- cut -----------------------------------------------------------------------------------------


def cut_and_go_on(disk: FaultyDisk, log: Log, *, after: int) -> Writer:
    """Cut, lose the power, and return what a start finds; it can be written again."""
    log.cut(after=after)
    assert log.staged_index == after + 1
    again = reopened(disk)
    assert again.folded == list(range(1, after + 1))
    again.append(5)
    assert reopened(disk).folded == list(range(1, after + 2))
    return again


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("after", range(3, 22))
def test_what_was_cut_is_gone_after_a_power_cut(after: int, seed: int) -> None:
    """Whole writes, parts of a write and segments that they began."""
    disk = FaultyDisk(Random(seed))
    writer = Writer(disk)
    writer.append(1, 1, 1)
    writes = staged(writer, *[(1, 2, 3)] * 6)
    assert sum(write.rolled for write in writes) > 1
    perform(writer, writes)
    cut_and_go_on(disk, writer.log, after=after)


def test_what_was_cut_is_written_again_with_other_entries() -> None:
    writer = Writer(MemoryDisk())
    writer.append(1, 1)
    first, second = staged(writer, (1, 1), (1, 1))
    perform(writer, [first, second])
    writer.log.cut(after=3)
    writer.next[1] = 3
    (third,) = staged(writer, (2, 2))
    writer.log.perform(third, sync=True)
    finish(writer, [first, third])
    assert writer.read(1) == [(0, 1), (1, 1), (2, 1)]
    assert writer.read(2) == [(0, 1), (1, 1)]
    writer.close()
    assert Writer(writer.disk).next == {1: 3, 2: 2}


def test_a_finished_entry_is_never_cut() -> None:
    writer = Writer(MemoryDisk())
    writer.append(1, 1)
    write = staged(writer, (1,))
    perform(writer, write)
    with pytest.raises(AssertionError, match="never cut"):
        writer.log.cut(after=1)
    finish(writer, write)
    with pytest.raises(AssertionError, match="never cut"):
        writer.log.cut(after=2)
    assert writer.read(1) == [(0, 1), (1, 1), (2, 1)]


def test_a_write_that_was_not_performed_is_dropped_by_a_cut() -> None:
    disk = FaultyDisk(Random(1))
    writer = Writer(disk)
    writer.append(1)
    first, *_ = staged(writer, *[(2, 2)] * 9)
    writer.log.perform(first, sync=True)
    cut_and_go_on(disk, writer.log, after=3)


def test_a_cut_above_the_end_changes_nothing() -> None:
    writer = Writer(MemoryDisk())
    writes = staged(writer, (1,), (1,))
    perform(writer, writes)
    writer.log.cut(after=2)
    writer.log.cut(after=99)
    finish(writer, writes)
    assert writer.read(1) == [(0, 1), (1, 1)]


@pytest.mark.parametrize("operations", range(14))
def test_a_power_cut_within_a_cut_leaves_a_prefix(operations: int) -> None:
    for seed in range(5):
        disk = FaultyDisk(Random(seed))
        writer = Writer(disk)
        writer.append(1)
        perform(writer, staged(writer, *[(1, 2, 3)] * 6))
        disk.cut_power_after(operations, then=lambda: None)
        with contextlib.suppress(DiskFailed):
            writer.log.cut(after=2)
        again = reopened(disk)
        assert again.folded == list(range(1, len(again.folded) + 1))
        assert len(again.folded) >= 2


def test_a_cut_that_the_disk_refuses_ends_the_node() -> None:
    disk = FaultyDisk(Random(1))
    writer = Writer(disk)
    perform(writer, staged(writer, (1,)))
    disk.fail("truncate")
    with pytest.raises(DiskFailed):
        writer.log.cut(after=0)
