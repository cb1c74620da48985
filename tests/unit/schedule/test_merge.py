"""Merging runs: everything that is not gone, in order, in one file or in several."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.errors import Corruption, InvalidRequest
from onward.log.memory_disk import MemoryDisk
from onward.schedule.gone import Gone
from onward.schedule.layout import PAGE_BYTES
from onward.schedule.merge import merge_runs
from onward.schedule.run import Run

from .scheduled import MESSAGES, TIME_MS, TOPICS, built, content, in_order, plain, put, unhurried

SEVERAL = st.lists(MESSAGES.filter(bool), min_size=1, max_size=5)
CURSORS = st.dictionaries(
    st.sampled_from(TOPICS), st.tuples(st.integers(TIME_MS, TIME_MS + 20), st.integers(0, 100))
)


def built_all(disk, several):
    runs, records, number, time_ms = [], [], 0, TIME_MS
    for messages in several:
        run, some = built(
            disk, f"run-{number}", messages, first_number=number, time_ms=time_ms
        )  # fmt: skip
        runs.append(run)
        records += some
        number += len(messages)
        time_ms += 3
    return runs, in_order(records)


def all_of(disk, summary):
    return [one for path in summary.paths for one in Run.open(disk, path).records(0, 10**6)]


@unhurried
@given(SEVERAL, CURSORS, st.sets(st.integers(0, 150), max_size=60), st.integers(4, 200))
def test_a_merge_is_all_rows_sorted_without_those_that_are_gone(
    several, cursors, cancelled, rows_max
):
    disk = MemoryDisk()
    runs, records = built_all(disk, several)
    gone = Gone(cursors, cancelled)
    kept = [one for one in records if not gone.has(one.number, one.at_ms, one.topic)]
    summary = merge_runs(disk, "merged", runs, gone=gone, rows_max=rows_max)
    assert all_of(disk, summary) == kept
    assert (summary.rows, summary.gone) == (len(kept), len(records) - len(kept))
    assert (summary.start, summary.end) == (0, len(records))
    assert len(summary.paths) == -(-len(kept) // rows_max)
    merged = [Run.open(disk, path) for path in summary.paths]
    for run in merged:
        run.verify()
        assert (run.number_start, run.number_end) == (0, len(records))
    there = {one.number for one in kept}
    for record in records:
        found = [one for run in merged if (one := run.find(record.number)) is not None]
        assert found == ([record] if record.number in there else [])
    for unique in ("order-7", "order-8", ""):
        numbers = [one.number for run in merged for one in run.find_unique(unique)]
        assert sorted(numbers) == sorted(one.number for one in kept if one.unique == unique)


@unhurried
@given(SEVERAL, st.integers(4, 50))
def test_runs_that_were_split_are_merged_again(several, rows_max):
    disk = MemoryDisk()
    runs, records = built_all(disk, several)
    split = merge_runs(disk, "split", runs, gone=Gone(), rows_max=rows_max)
    parts = [Run.open(disk, path) for path in split.paths[:64]]
    rows = sum(part.rows_total for part in parts)
    # The order in which runs are given does not matter, nor that all have the same numbers.
    merged = merge_runs(disk, "merged", parts[::-1], gone=Gone())
    assert all_of(disk, merged) == records[:rows]


def test_a_merge_of_many_pages_is_in_order():
    disk = MemoryDisk()
    several = [
        plain(*((7 * place * (one + 3)) % 9_001 for place in range(600)), body=bytes(500))
        for one in range(8)
    ]
    runs = [
        built(disk, f"run-{one}", messages, first_number=600 * one, time_ms=0)[0]
        for one, messages in enumerate(several)
    ]
    assert all(run.page_count > 3 for run in runs)
    summary = merge_runs(disk, "merged", runs, gone=Gone({"orders": (4_000, 10**6)}))
    merged = Run.open(disk, "merged")
    keys = merged.records(0, 10_000)
    found = list(zip(keys.at_ms, keys.numbers, strict=True))
    everything = [(one.at_ms, one.number) for run in runs for one in run.records(0, 600)]
    assert found == sorted(key for key in everything if key[0] > 4_000)
    assert summary.rows == merged.rows_total == len(found)
    merged.verify()


def test_large_messages_are_merged_one_at_a_time():
    disk = MemoryDisk()
    sizes = [2 * PAGE_BYTES, 10, 3 * PAGE_BYTES, 0]
    several = [
        [
            one._replace(body=bytes([run + 1]) * size)
            for one, size in zip(messages, sizes, strict=True)
        ]
        for run, messages in enumerate([plain(1, 5, 9, 13), plain(2, 5, 8, 9), plain(3, 4, 9, 10)])
    ]
    runs, records = built_all(disk, several)
    gone = Gone({}, {0, 6})
    merged = merge_runs(disk, "merged", runs, gone=gone)
    assert all_of(disk, merged) == [one for one in records if one.number not in (0, 6)]


def test_a_merge_in_which_everything_is_gone_is_no_file():
    disk = MemoryDisk()
    runs, _ = built_all(disk, [plain(1, 2), plain(3)])
    summary = merge_runs(disk, "merged", runs, gone=Gone({"orders": (2**62, 0)}))
    assert (summary.paths, summary.gone) == ((), 3)
    assert "merged" not in disk.list_folder(".")


def test_a_merge_has_a_limit_of_runs():
    run, _ = built(MemoryDisk(), "run", plain(1))
    for runs in ([], [run] * 65):
        with pytest.raises(InvalidRequest, match="1 to 64 runs"):
            merge_runs(MemoryDisk(), "merged", runs, gone=Gone())


def test_a_merge_of_a_damaged_run_leaves_nothing_behind():
    disk = MemoryDisk()
    runs, _ = built_all(disk, [plain(*range(100)), plain(*range(100))])
    for run in runs:
        run.close()
    packed = bytearray(content(disk, "run-100"))
    packed[2_000] ^= 1
    put(disk, "run-100", bytes(packed))
    damaged = [Run.open(disk, path) for path in ("run-0", "run-100")]
    with pytest.raises(Corruption):
        merge_runs(disk, "merged", damaged, gone=Gone())
    assert disk.list_folder(".") == ["run-0", "run-100"]
