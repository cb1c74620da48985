"""Building runs: from batches as they came to a file that is there whole, or not at all."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.log.memory_disk import MemoryDisk
from onward.message.batch import encode_batch
from onward.schedule.build import build_run
from onward.schedule.gone import Gone
from onward.schedule.marks import Marks
from onward.schedule.run import Run
from onward.testing.disk import FaultyDisk

from .scheduled import MESSAGES, TIME_MS, batches_of, built, content, in_order, plain, unhurried


def test_a_past_time_fires_at_the_time_of_its_entry_and_keeps_its_due_time():
    run, _ = built(MemoryDisk(), "run", plain(TIME_MS - 500, TIME_MS + 500))
    records = run.records(0, 2)
    assert records.at_ms == [TIME_MS, TIME_MS + 500]
    assert records.due_at_ms == [TIME_MS - 500, TIME_MS + 500]


def test_a_message_without_a_time_fires_at_once():
    disk = MemoryDisk()
    batches = [
        (0, TIME_MS, encode_batch([b"a", b"b"], due_at_ms=[None, 9 * TIME_MS], topics=["t"] * 2)),
        (2, TIME_MS, encode_batch([b"c"], topics=["t"])),
    ]
    build_run(disk, "run", batches, gone=Gone())
    records = Run.open(disk, "run").records(0, 9)
    assert records.bodies == [b"a", b"c", b"b"]
    assert records.due_at_ms == [TIME_MS, TIME_MS, 9 * TIME_MS]


def test_what_cannot_be_decoded_is_left_out_and_counted():
    disk = MemoryDisk()
    good, records = batches_of(plain(5, 6, 7))
    damaged = bytearray(good[0][2])
    damaged[-1] ^= 1
    batches = [
        *good,
        (10, TIME_MS, bytes(damaged)),
        (20, TIME_MS, encode_batch([b"no topics at all"] * 2)),
        (30, TIME_MS, encode_batch([b"", b"one topic"], topics=[None, "t"])),
        (40, TIME_MS, b"no batch at all"),
    ]
    summary = build_run(disk, "run", batches, gone=Gone())
    assert (summary.rows, summary.left_out) == (4, 6)
    assert (summary.start, summary.end) == (0, 40)
    found = list(Run.open(disk, "run").records(0, 9))
    assert [one for one in found if one.number < 10] == in_order(records)
    assert [one.number for one in found if one.number >= 10] == [31]


@unhurried
@given(MESSAGES, st.sets(st.integers(0, 40)), st.integers(TIME_MS, TIME_MS + 12))
def test_what_is_gone_is_not_taken_over(messages, cancelled, cursor_ms):
    disk = MemoryDisk()
    batches, records = batches_of(messages)
    marks = Marks()
    marks.add_many(cancelled)
    gone = Gone({"orders": (cursor_ms, 20)}, marks)
    summary = build_run(disk, "run", batches, gone=gone)
    kept = [
        one
        for one in in_order(records)
        if one.number not in cancelled
        and (one.topic != "orders" or (one.at_ms, one.number) > (cursor_ms, 20))
    ]
    assert (summary.rows, summary.gone) == (len(kept), len(records) - len(kept))
    if kept:
        run = Run.open(disk, "run")
        assert list(run.records(0, len(records))) == kept
        assert [one.number for one in records if run.place_of(one.number)] == sorted(
            one.number for one in kept
        )


def test_a_run_of_nothing_is_no_file():
    disk = MemoryDisk()
    batches, _ = batches_of(plain(5, 6), first_number=70)
    summary = build_run(disk, "run", batches, gone=Gone({"orders": (2**62, 0)}))
    assert (summary.paths, summary.rows, summary.gone) == ((), 0, 2)
    assert (summary.start, summary.end) == (70, 72)
    assert disk.list_folder(".") == []


@unhurried
@given(MESSAGES.filter(bool), st.integers(1, 20), st.integers(200, 2_000))
def test_a_long_stretch_becomes_several_runs_that_share_its_numbers(messages, rows_max, bytes_max):
    disk = MemoryDisk()
    batches, records = batches_of(messages, size=3)
    summary = build_run(
        disk, "run", batches, gone=Gone(), stretch_rows_max=rows_max, stretch_bytes_max=bytes_max
    )
    assert summary.rows == len(records)
    assert sorted(disk.list_folder(".")) == sorted(summary.paths)
    runs = [Run.open(disk, path) for path in summary.paths]
    found = [record for run in runs for record in run.records(0, 99)]
    assert sorted(found, key=lambda one: (one.at_ms, one.number)) == in_order(records)
    ends = [run.number_end for run in runs]
    assert [run.number_start for run in runs] == [summary.start, *ends[:-1]]
    assert ends[-1] == summary.end
    for run in runs:
        run.verify()


def test_a_build_is_the_same_file_every_time():
    disk = MemoryDisk()
    batches, _ = batches_of(plain(*range(50, 0, -1)))
    build_run(disk, "one", batches, gone=Gone())
    build_run(disk, "other", batches, gone=Gone())
    assert content(disk, "one") == content(disk, "other")


def test_batches_that_go_back_are_refused():
    batches, _ = batches_of(plain(*range(20)))
    with pytest.raises(ValueError, match="comes behind number"):
        build_run(MemoryDisk(), "run", batches[::-1], gone=Gone())


@pytest.mark.parametrize("operation", ["write", "sync"])
def test_a_build_that_fails_leaves_nothing_behind(operation):
    disk = FaultyDisk(Random(7))
    batches, _ = batches_of(plain(*range(100)))
    for after in range(40):
        disk.fail(operation, after=after)
        try:
            build_run(disk, "run", batches, gone=Gone(), stretch_rows_max=30)
        except OSError:
            assert disk.list_folder(".") == []
        else:
            break
    assert sorted(disk.list_folder(".")) == ["run", "run.1", "run.2", "run.3"]
    for path in disk.list_folder("."):
        Run.open(disk, path).verify()


def test_a_run_survives_a_power_cut_right_after_it_was_built():
    disk = FaultyDisk(Random(7))
    batches, records = batches_of(plain(*range(100)))
    build_run(disk, "run", batches, gone=Gone())
    disk.crash(unsynced="lost")
    assert list(Run.open(disk, "run").records(0, 200)) == in_order(records)


def test_a_power_cut_at_any_moment_leaves_a_whole_run_or_none():
    batches, records = batches_of(plain(*range(100)))
    operations = 0
    outcomes = set()
    while True:
        disk = FaultyDisk(Random(operations))
        disk.cut_power_after(operations, then=lambda: None)
        try:
            build_run(disk, "run", batches, gone=Gone())
            is_done = True
        except OSError:
            is_done = False
        disk.crash()
        is_there = "run" in disk.list_folder(".")
        outcomes.add((is_done, is_there))
        if is_there:
            assert list(Run.open(disk, "run").records(0, 200)) == in_order(records)
        if is_done:
            break
        operations += 1
    assert is_there
    assert (False, False) in outcomes
