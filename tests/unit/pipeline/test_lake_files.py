"""Files of a lake have exactly the messages that their names say, and are read by offset."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from onward.errors import Conflict, Corruption, InvalidRequest, OffsetOutOfRange
from onward.pipeline import lake_files
from onward.pipeline.lake import open_lake
from onward.pipeline.lake_files import merge_files, read_files, seen_from_here, write_files
from onward.pipeline.lake_state import Gap
from onward.pipeline.planning import Stretch
from onward.pipeline.schema import arrow_schema, message_schema

NOON = datetime(2026, 11, 16, 12, tzinfo=UTC)
SCHEMA = arrow_schema(message_schema())


def rows(first: int, end: int, *, at: datetime | Sequence[datetime] = NOON) -> pa.RecordBatch:
    times = [at] * (end - first) if isinstance(at, datetime) else list(at)
    made = [
        {
            "topic": "orders", "offset": offset, "event_id": 1000 + offset, "key": f"k{offset}",
            "body": b"\x00\xff" + str(offset).encode(), "published_at": time,
            "headers": {"h": b"\xfe"} if offset % 2 else None, "priority": offset % 3,
            "producer": 7, "tag": None,
        }
        for offset, time in zip(range(first, end), times, strict=True)
    ]  # fmt: skip
    return pa.RecordBatch.from_pylist(
        [row | {"headers": list((row["headers"] or {}).items()) or None} for row in made],
        schema=SCHEMA,
    )


def pieces(first: int, end: int, size: int = 7) -> Iterator[pa.RecordBatch]:
    for start in range(first, end, size):
        yield rows(start, min(end, start + size))


def read(lake: object, first: int, end: int, schema: pa.Schema = SCHEMA) -> pa.Table:
    found = list(read_files(lake, "orders", first, end, schema))  # type: ignore[arg-type]
    return pa.Table.from_batches(found, schema)


def test_what_is_written_is_read_again_to_the_last_bit(tmp_path: Path):
    lake = open_lake(tmp_path, create=True)
    files = write_files(tmp_path, Stretch("orders", 0, 100), pieces(0, 100))
    lake.commit(add=files)
    assert [(one.first, one.end) for one in files] == [(0, 100)]
    assert files[0].path.startswith(f"topic=orders/date=2026-11-16/{0:020}-{100:020}-")
    assert files[0].bytes == (tmp_path / files[0].path).stat().st_size
    assert files[0].first_published_at_ms == files[0].last_published_at_ms == 1794830400000
    assert read(tmp_path, 0, 100).equals(pa.Table.from_batches([rows(0, 100)]))


def test_any_range_is_read_exactly_whatever_the_row_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lake_files, "GROUP_ROWS", 10)
    monkeypatch.setattr(lake_files, "READ_ROWS", 4)
    lake = open_lake(tmp_path, create=True)
    lake.commit(add=write_files(tmp_path, Stretch("orders", 0, 33), pieces(0, 33)))
    lake.commit(add=write_files(tmp_path, Stretch("orders", 33, 60), pieces(33, 60)))
    first_file = next(iter(lake.state().files["orders"]))
    assert pq.read_metadata(lake.path(first_file)).num_row_groups == 4
    only_offsets = arrow_schema(message_schema(["offset"]))
    for first in range(0, 60, 3):
        for end in range(first, 61, 5):
            found = read(lake, first, end, only_offsets)
            assert found.column("offset").to_pylist() == list(range(first, end))


def test_columns_are_read_in_the_order_that_is_asked_for(tmp_path: Path):
    lake = open_lake(tmp_path, create=True)
    lake.commit(add=write_files(tmp_path, Stretch("orders", 0, 5), pieces(0, 5)))
    wanted = arrow_schema(message_schema(["body", "headers", "offset"]))
    found = read(lake, 1, 3, wanted)
    assert found.schema.equals(wanted)
    assert found.column("body").to_pylist() == [b"\x00\xff1", b"\x00\xff2"]
    assert found.column("headers").to_pylist() == [[("h", b"\xfe")], None]


def test_a_file_ends_where_the_day_ends(tmp_path: Path):
    open_lake(tmp_path, create=True)
    night = datetime(2026, 11, 16, 23, 59, 59, 999_000, tzinfo=UTC)
    times = [night + timedelta(milliseconds=n // 2) for n in range(6)]
    files = write_files(tmp_path, Stretch("orders", 10, 16), iter([rows(10, 16, at=times)]))
    assert [(one.folder, one.first, one.end) for one in files] == [
        ("topic=orders/date=2026-11-16", 10, 12),
        ("topic=orders/date=2026-11-17", 12, 16),
    ]
    assert files[1].last_published_at_ms - files[1].first_published_at_ms == 1


def test_a_clock_that_went_back_makes_one_more_file(tmp_path: Path):
    lake = open_lake(tmp_path, create=True)
    day = timedelta(days=1)
    times = [NOON, NOON + day, NOON, NOON]
    files = write_files(tmp_path, Stretch("orders", 0, 4), iter([rows(0, 4, at=times)]))
    assert [(one.first, one.end) for one in files] == [(0, 1), (1, 2), (2, 4)]
    lake.commit(add=files)
    assert read(lake, 0, 4).column("offset").to_pylist() == [0, 1, 2, 3]


def test_a_file_that_is_large_enough_is_followed_by_another(tmp_path: Path):
    open_lake(tmp_path, create=True)
    files = write_files(tmp_path, Stretch("orders", 0, 30), pieces(0, 30, 10), bytes_max=1)
    assert [(one.first, one.end) for one in files] == [(0, 10), (10, 20), (20, 30)]


def test_messages_that_do_not_come_one_after_the_other_are_refused(tmp_path: Path):
    open_lake(tmp_path, create=True)
    with pytest.raises(Corruption, match="offset 5 of topic 'orders' was to come next, not 6 to 9"):
        write_files(tmp_path, Stretch("orders", 0, 10), iter([rows(0, 5), rows(6, 10)]))
    with pytest.raises(OffsetOutOfRange, match="to be read to offset 10 and ended at 5"):
        write_files(tmp_path, Stretch("orders", 0, 10), iter([rows(0, 5)]))
    assert not list(tmp_path.glob("topic=*/*/.*")), "what failed leaves nothing aside"


def test_files_become_one_without_a_change_of_their_messages(tmp_path: Path):
    lake = open_lake(tmp_path, create=True)
    small = []
    for first in (0, 10, 20):
        part = Stretch("orders", first, first + 10)
        small += write_files(tmp_path, part, pieces(first, first + 10))
    lake.commit(add=small)
    before = read(lake, 0, 30)
    merged = merge_files(str(tmp_path), small)
    lake.commit(add=merged, remove=[one.path for one in small])
    assert [(one.first, one.end) for one in lake.state().files["orders"]] == [(0, 30)]
    assert read(lake, 0, 30).equals(before)
    assert not list(tmp_path.glob("topic=*/*/.*"))


def test_who_does_the_same_work_again_leaves_what_is_committed_alone(tmp_path: Path):
    lake = open_lake(tmp_path, create=True)
    mine = write_files(tmp_path, Stretch("orders", 0, 10), pieces(0, 10))
    lake.commit(add=mine)
    before = read(lake, 0, 10)
    # Another archive, of another broker perhaps, that was slower and does not know it yet.
    another = pa.RecordBatch.from_arrays(
        [pa.array([b"x"] * 10) if name == "body" else rows(0, 10).column(name)
         for name in SCHEMA.names], schema=SCHEMA,
    )  # fmt: skip
    theirs = write_files(tmp_path, Stretch("orders", 0, 10), iter([another]))
    with pytest.raises(Conflict, match="has offset 0 of topic 'orders' already"):
        lake.commit(add=theirs)
    assert read(lake, 0, 10).equals(before)


def test_what_the_lake_does_not_have_is_named(tmp_path: Path):
    lake = open_lake(tmp_path, create=True)
    files = write_files(tmp_path, Stretch("orders", 50, 60), pieces(50, 60))
    lake.commit(add=files, gaps=[Gap("orders", 0, 50)])
    with pytest.raises(OffsetOutOfRange, match="has no offsets 40 to 49 of topic 'orders'"):
        read(lake, 40, 55)
    with pytest.raises(OffsetOutOfRange, match="to before offset 60, not to before 61"):
        read(lake, 50, 61)
    with pytest.raises(OffsetOutOfRange, match="topic 'refunds' to before offset 0"):
        list(read_files(lake, "refunds", 0, 1, SCHEMA))


def test_a_file_that_is_damaged_or_gone_is_named(tmp_path: Path):
    lake = open_lake(tmp_path, create=True)
    files = write_files(tmp_path, Stretch("orders", 0, 100), pieces(0, 100))
    lake.commit(add=files)
    path = lake.path(files[0])
    whole = path.read_bytes()
    # A body in the first page: its checksum tells.
    path.write_bytes(whole[:200] + bytes([whole[200] ^ 0xFF]) + whole[201:])
    with pytest.raises(Corruption, match=f"{path.name}' of the lake cannot be read"):
        read(lake, 0, 100)
    path.write_bytes(whole[:-30])
    with pytest.raises(Corruption, match=f"{path.name}' of the lake cannot be read"):
        read(lake, 0, 100)
    path.unlink()
    with pytest.raises(Corruption, match=f"{path.name}' of the lake is not there"):
        read(lake, 0, 100)


def test_a_machine_that_does_not_see_the_lake_says_so(tmp_path: Path):
    with pytest.raises(InvalidRequest, match="does not see the lake .* shared by all machines"):
        seen_from_here(str(tmp_path / "elsewhere"))
