"""Work aside: a child does what `perform` does here, and whatever becomes of it does no harm."""

import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from onward.errors import Corruption, Unavailable
from onward.log.disk import Disk, OsDisk
from onward.log.memory_disk import MemoryDisk
from onward.message.entry import Draft, Kind, encode_entries
from onward.schedule.aside import Aside, BuildPlan, MergePlan, perform
from onward.schedule.marks import Marks
from onward.schedule.record import Record
from onward.schedule.run import Run

from .scheduled import TIME_MS, batches_of, content, in_order, plain, put

TOPIC = 3
OTHER = 4
DEADLINE_S = 60


def write_segment(disk: Disk, path: str, messages: list[Record]) -> tuple[BuildPlan, list[Record]]:
    """Write a segment in which `@schedule` stands among another topic; return how to read it."""
    batches, records = batches_of(messages)
    drafts = []
    for number, time_ms, batch in batches:
        count = min(7, len(messages) - number)
        drafts.append(Draft(Kind.MESSAGES, time_ms, TOPIC, number, count, [batch]))
        drafts.append(Draft(Kind.MESSAGES, time_ms, OTHER, number, count, [batch]))
    buffers, entries = encode_entries(
        drafts, position=0, index=1, term=0, previous_crc=0, synced_index=0
    )
    put(disk, path, b"".join(buffers))
    pieces = tuple((0, entry.position, entry.length) for entry in entries if entry.topic == TOPIC)
    return BuildPlan("run", TOPIC, (path,), pieces), records


def in_folder(plan: BuildPlan, folder: Path) -> BuildPlan:
    return BuildPlan(
        f"{folder}/run", plan.topic, tuple(f"{folder}/{one}" for one in plan.files), plan.pieces
    )


def written(folder: Path, messages: list[Record]) -> tuple[BuildPlan, list[Record]]:
    """Write a segment to a real folder."""
    disk = MemoryDisk()
    plan, records = write_segment(disk, "segment", messages)
    (folder / "segment").write_bytes(content(disk, "segment"))
    return in_folder(plan, folder), records


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_build_reads_the_entries_that_its_plan_names():
    disk = MemoryDisk()
    plan, records = write_segment(disk, "segment", plain(*range(90, 0, -1)))
    summary = perform(plan, disk)
    assert (summary.start, summary.end, summary.rows) == (0, 90, 90)
    assert list(Run.open(disk, "run").records(0, 99)) == in_order(records)


def test_entries_of_other_topics_in_a_piece_are_passed_over():
    disk = MemoryDisk()
    _, records = write_segment(disk, "segment", plain(*range(90, 0, -1)))
    whole = (0, 0, len(content(disk, "segment")))
    perform(BuildPlan("run", TOPIC, ("segment",), (whole,)), disk)
    assert list(Run.open(disk, "run").records(0, 99)) == in_order(records)


def test_batches_of_an_entry_that_belong_to_another_build_are_passed_over():
    disk = MemoryDisk()
    batches, records = batches_of(plain(*range(90, 69, -1)))
    packed = [batch for _, _, batch in batches]
    draft = Draft(Kind.MESSAGES, TIME_MS, TOPIC, 0, len(records), packed)
    buffers, (entry,) = encode_entries(
        [draft], position=0, index=1, term=0, previous_crc=0, synced_index=0
    )
    put(disk, "segment", b"".join(buffers))
    pieces = ((0, entry.position, entry.length),)
    for name, start, end in (("first", 0, 7), ("others", 7, 21)):
        plan = BuildPlan(name, TOPIC, ("segment",), pieces, start=start, end=end)
        summary = perform(plan, disk)
        run = Run.open(disk, name)
        assert (summary.start, summary.end) == (run.number_start, run.number_end) == (start, end)
        assert sorted(run.records(0, 99).numbers) == list(range(start, end))


def test_a_damaged_entry_stops_a_build():
    disk = MemoryDisk()
    plan, _ = write_segment(disk, "segment", plain(*range(20)))
    packed = bytearray(content(disk, "segment"))
    packed[plan.pieces[1][1] + 100] ^= 1
    put(disk, "segment", bytes(packed))
    with pytest.raises(Corruption, match=f"no valid entry at {plan.pieces[1][1]} of segment"):
        perform(plan, disk)
    assert disk.list_folder(".") == ["segment"]


def test_a_plan_says_what_is_gone():
    disk = MemoryDisk()
    due = range(TIME_MS + 1_000, TIME_MS + 1_020)
    plan, records = write_segment(disk, "segment", plain(*due))
    marks = Marks()
    marks.add_many([10, 15])
    cursors = {"orders": (due[4], 4)}
    plan = BuildPlan("run", TOPIC, plan.files, plan.pieces, cursors, marks.save())
    assert perform(plan, disk).gone == 7
    kept = [one for one in records if one.number > 4 and one.number not in (10, 15)]
    assert list(Run.open(disk, "run").records(0, 99)) == kept
    marks.add_range(0, 15)
    merged = perform(MergePlan("merged", ("run",), {}, marks.save()), disk)
    assert (merged.rows, merged.gone) == (4, 9)


def test_a_child_writes_the_same_file(tmp_path):
    plan, _ = written(tmp_path, plain(*range(90, 0, -1)))
    here = perform(plan, OsDisk())
    expected = (tmp_path / "run").read_bytes()
    (tmp_path / "run").unlink()
    child = Aside(plan)
    assert child.wait() == here
    assert child.poll() == here
    assert (tmp_path / "run").read_bytes() == expected
    assert names_in(tmp_path) == ["run", "segment"]


def test_a_child_merges_runs(tmp_path):
    plan, records = written(tmp_path, plain(*range(90, 0, -1)))
    perform(plan, OsDisk())
    merge = Aside(MergePlan(f"{tmp_path}/merged", (plan.path,), {"orders": (2, 3)}))
    # What a loop does: it waits for the child to be readable.
    assert select.select([merge], [], [], DEADLINE_S)[0]
    summary = merge.poll()
    assert summary is not None
    assert summary.paths == (f"{tmp_path}/merged",)
    run = Run.open(OsDisk(), f"{tmp_path}/merged")
    assert list(run.records(0, 99)) == in_order(records)
    run.close()


def test_the_error_of_a_child_is_raised_here(tmp_path):
    with pytest.raises(Unavailable, match="No such file"):
        Aside(MergePlan(f"{tmp_path}/merged", (f"{tmp_path}/missing",))).wait()
    (tmp_path / "damaged").write_bytes(b"no run")
    with pytest.raises(Corruption, match="too short for a run"):
        Aside(MergePlan(f"{tmp_path}/merged", (f"{tmp_path}/damaged",))).wait()
    assert names_in(tmp_path) == ["damaged"]


def test_a_child_that_is_killed_leaves_no_half_file_under_its_name(tmp_path):
    plan, records = written(tmp_path, plain(*range(3_000, 0, -1), body=bytes(200)))
    run = tmp_path / "run"
    child = Aside(plan)
    deadline = time.monotonic() + DEADLINE_S
    while not (tmp_path / "run.tmp").exists() and not run.exists():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    child.kill()
    if run.exists():  # It was faster than we were: then all of it is there.
        opened = Run.open(OsDisk(), str(run))
        assert list(opened.records(0, 5_000)) == in_order(records)
        opened.close()
    else:
        with pytest.raises(Unavailable, match="aside ended with -9"):
            child.wait()
    # The next one does not mind what this one left.
    assert Aside(plan).wait().rows == 3_000
    assert names_in(tmp_path) == ["run", "segment"]


def test_a_child_ends_with_its_broker():
    alive, lifeline = os.pipe()
    command = [sys.executable, "-m", "onward.schedule.aside", str(alive)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(alive,)) as child:
        os.close(alive)
        # It waits for its plan, which never comes: only the other pipe can end it.
        assert child.poll() is None
        os.close(lifeline)
        assert child.wait(DEADLINE_S) == 1
