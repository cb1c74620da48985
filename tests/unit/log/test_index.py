"""Rows: offsets, times and event ids are found, in memory and in files, as by an obvious search."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.log.disk import OsDisk
from onward.log.index import ROW_BYTES, NewRows, RowsFile, write_rows
from onward.log.memory_disk import MemoryDisk
from onward.message.entry import Entry

GOLDEN = Path(__file__).parents[2] / "golden" / "log-index.bin"
Shape = list[tuple[int, int, int, int]]
"""(topic, messages, offsets skipped before it, milliseconds after the entry before)"""

SHAPES = st.lists(
    st.tuples(
        st.integers(0, 4), st.integers(1, 5), st.sampled_from([0, 0, 0, 3]), st.integers(0, 2)
    ),
    max_size=40,
)


def entries_of(shape: Shape, *, first_index: int = 10) -> list[Entry]:
    entries: list[Entry] = []
    next_offset: dict[int, int] = {}
    position = time_ms = 0
    for number, (topic, count, skipped, later_ms) in enumerate(shape):
        base = next_offset.get(topic, 0) + skipped
        next_offset[topic] = base + count
        time_ms += later_ms
        length = 80 + 8 * count
        index = first_index + number
        entries.append(
            Entry(position, length, 0, 0, index, 0, time_ms, base, 0, topic, count, 1, 0)
        )
        position += length
    return entries


def rows_of(entries: list[Entry]) -> NewRows:
    rows = NewRows(10)
    rows.add_all(entries)
    return rows


def file_of(entries: list[Entry], *, pieces: int = 1) -> RowsFile:
    disk = MemoryDisk()
    size = -(-len(entries) // pieces) or 1
    sources = [rows_of(entries[at : at + size]) for at in range(0, len(entries), size)]
    write_rows(disk, "x.idx", first_index=10, sources=sources)
    return RowsFile.open(disk, "x.idx")


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.integers(1, 4))
def test_search_finds_what_an_obvious_search_finds(shape: Shape, pieces: int) -> None:
    entries = entries_of(shape)
    for source in (rows_of(entries), file_of(entries, pieces=pieces)):
        for topic in range(6):
            mine = [entry for entry in entries if entry.topic == topic]
            found = source.rows_of(topic)
            assert len(found) == bool(mine)
            if not found:
                continue
            rows = found[0]
            assert rows.count == len(mine)
            for offset in range(mine[-1].base_offset + mine[-1].count + 2):
                after = [n for n, e in enumerate(mine) if e.base_offset + e.count > offset]
                assert rows.first_after_offset(offset) == (after[0] if after else len(mine))
            for time_ms in range(mine[-1].time_ms + 2):
                after = [n for n, e in enumerate(mine) if e.time_ms >= time_ms]
                assert rows.first_from_time(time_ms) == (after[0] if after else len(mine))
            for delta in range(-2, len(entries) + 1):
                after = [n for n, e in enumerate(mine) if e.index - 10 > delta]
                assert rows.first_after_index(delta) == (after[0] if after else len(mine))


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.integers(1, 5))
def test_rows_merged_from_many_runs_are_those_of_one(shape: Shape, pieces: int) -> None:
    entries = entries_of(shape)
    merged, one = file_of(entries, pieces=pieces), file_of(entries)
    assert list(merged.pieces()) == list(one.pieces())
    assert list(merged.summaries()) == list(one.summaries()) == list(rows_of(entries).summaries())


@settings(max_examples=40, deadline=None)
@given(SHAPES)
def test_a_summary_says_what_a_segment_holds_of_a_topic(shape: Shape) -> None:
    entries = entries_of(shape)
    for summary in file_of(entries).summaries():
        mine = [entry for entry in entries if entry.topic == summary.topic]
        assert summary.rows == len(mine)
        assert summary.bytes == sum(entry.length for entry in mine)
        assert summary.end_offset == mine[-1].base_offset + mine[-1].count
        assert summary.last_time_ms == mine[-1].time_ms


def test_a_file_of_rows_written_once_is_read_for_ever() -> None:
    shape = [(1, 2, 0, 5), (0, 1, 0, 0), (3, 1, 7, 1), (1, 4, 0, 9)]
    disk = MemoryDisk()
    write_rows(disk, "x.idx", first_index=10, sources=[rows_of(entries_of(shape))])
    assert disk.open("x.idx").map() == GOLDEN.read_bytes()


def test_a_file_of_rows_with_any_flipped_byte_is_refused() -> None:
    good = GOLDEN.read_bytes()
    for place in range(len(good)):
        bad = bytearray(good)
        bad[place] ^= 0x10
        if 8 <= place < 16 or 28 <= place < 32:
            continue  # first index and padding: known from the name, and never used
        with pytest.raises(ValueError, match="is not a valid file of rows"):
            RowsFile(memoryview(bad), path="x.idx")


def test_a_file_of_rows_that_was_cut_is_refused() -> None:
    disk = MemoryDisk()
    good = GOLDEN.read_bytes()
    for size in range(0, len(good), 4):
        file = disk.open("x.idx", create=True)
        file.truncate(0)
        file.write(0, [good[:size]])
        with pytest.raises(ValueError):
            RowsFile.open(disk, "x.idx")


def test_a_large_file_of_rows_does_not_stay_in_memory_once_verified_or_merged(
    tmp_path: Path,
) -> None:
    disk, topics = OsDisk(), 50
    rows = rows_of(entries_of([(number % topics, 1, 0, 0) for number in range(100_000)]))
    path, merged = str(tmp_path / "1.idx.0"), str(tmp_path / "1.idx")
    write_rows(disk, path, first_index=10, sources=[rows])
    run = RowsFile.open(disk, path)
    assert resident_bytes(path) < 512 << 10
    write_rows(disk, merged, first_index=10, sources=[run])
    assert resident_bytes(path) < 2 << 20
    assert Path(merged).read_bytes() == Path(path).read_bytes()
    run.release()
    assert run.rows_of(7)[0].row(0).topic == 7, "what was given back is read again"


def resident_bytes(path: str) -> int:
    """Return how much of a mapped file is resident in this process."""
    maps = Path("/proc/self/smaps").read_text(encoding="utf-8").split(path + "\n")
    assert len(maps) == 2, "mapped once"
    (line,) = [one for one in maps[1].splitlines()[:10] if one.startswith("Rss:")]
    return int(line.split()[1]) * 1024


def test_new_rows_cost_one_packed_row_each() -> None:
    rows = rows_of(entries_of([(1, 1, 0, 0)] * 1_000))
    assert rows.count == 1_000
    assert [len(piece) for _, piece in rows.pieces()] == [1_000 * ROW_BYTES]
