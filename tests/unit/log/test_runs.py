"""Runs of an open segment: small ones are merged, and a crash in between changes nothing."""

from random import Random

import pytest

from onward.log import segment as module
from onward.log.index import NewRows
from onward.log.log import LogLimits
from onward.log.segment import Segment
from onward.testing.disk import FaultyDisk

from .writing import FOLDER, Writer

LIMITS = LogLimits(segment_bytes_max=1 << 20, preallocate_bytes=0, disk_reserve_bytes=0)


def run_names(disk: FaultyDisk) -> list[str]:
    return [name for name in disk.list_folder(FOLDER) if ".run-" in name]


def test_checkpoints_of_few_rows_share_one_run() -> None:
    disk = FaultyDisk(Random(1))
    writer = Writer(disk, limits=LIMITS)
    for _ in range(20):
        writer.append(1, 2)
        writer.checkpoint()
        writer.log.remove_runs(
            writer.log.tail, kept=[run.name for run in writer.log.tail.plan_runs()]
        )
    assert len(run_names(disk)) == 1
    assert len(writer.log.tail.runs) == 1
    writer.close()
    again = Writer(disk, limits=LIMITS)
    assert again.folded == []
    assert again.read(1) == writer.read(1)


def test_runs_that_are_large_together_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MERGED_ROWS_MAX", 10)
    disk = FaultyDisk(Random(1))
    writer = Writer(disk, limits=LIMITS)
    for _ in range(20):
        writer.append(1, 2)
        writer.checkpoint()
    counts = [run.count for run in writer.log.tail.runs]
    assert sum(counts) == 40
    assert all(count <= 10 for count in counts)
    assert len(counts) <= 5
    writer.close()
    assert Writer(disk, limits=LIMITS).read(2) == writer.read(2)


def test_a_run_never_gets_a_name_that_a_checkpoint_knows() -> None:
    segment = Segment(FaultyDisk(Random(1)), FOLDER, first_index=1)
    segment.use_run_numbers_after(["1.idx.run-0003", "1.idx.run-0011"])
    segment.runs = [NewRows(1)]
    assert [run.name[-8:] for run in segment.plan_runs()] == ["run-0012"]
    assert [run.name[-8:] for run in segment.plan_runs()] == ["run-0013"]


def test_a_merge_that_no_checkpoint_names_is_forgotten() -> None:
    """The process dies after the merged run was written and before its checkpoint was."""
    disk = FaultyDisk(Random(1))
    writer = Writer(disk, limits=LIMITS)
    for _ in range(3):
        writer.append(1, 2)
        writer.checkpoint()
    writer.append(1, 2)
    tail = writer.log.tail
    tail.freeze_rows()
    writer.log.write_runs(tail, tail.plan_runs())
    writer.close()
    again = Writer(disk, limits=LIMITS)
    assert again.folded == [7, 8]
    for _ in range(2):
        again.append(1)
        again.checkpoint()
    again.close()
    assert Writer(disk, limits=LIMITS).read(1) == again.read(1)


def test_the_runs_of_the_checkpoint_before_are_not_needed() -> None:
    disk = FaultyDisk(Random(1))
    writer = Writer(disk, limits=LIMITS)
    for _ in range(3):
        writer.append(1, 2)
        writer.checkpoint()
    writer.log.remove_runs(writer.log.tail, kept=[])
    assert run_names(disk) == []
    writer.close()
    again = Writer(disk, limits=LIMITS)
    assert again.read(1) == writer.read(1)
