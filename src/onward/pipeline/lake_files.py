"""The Parquet files of a lake: written aside and renamed, read by offset.

    record batches ──write_files──▶ <first>-<end>-<mark>.parquet ...    one day per file
    <first>-<end>-<mark>.parquet ... ──read_files──▶ record batches     exactly the range

A file holds all columns of its messages, the topic too, so any reader gets the same schema; the
folders `topic=` and `date=` are for people and for engines that prune by them. Offsets are dense,
so the place of a message in its file is its offset less the first: nothing is searched. A name is
never used twice: whoever does the same work again, or at the same time, never touches a file that
a commit may have named.
Memory is one row group, whatever the size of a file. This runs in tasks, on any machine.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from onward.errors import Corruption, InvalidRequest, OffsetOutOfRange, Unavailable
from onward.pipeline.columns import record_batches
from onward.pipeline.lake import Lake, aside_of, open_lake, said_plainly, sync_folder
from onward.pipeline.lake_state import LakeFile
from onward.pipeline.place import Place, read_range
from onward.pipeline.planning import Stretch
from onward.pipeline.schema import arrow_schema, message_schema

GROUP_ROWS = 131_072
GROUP_BYTES = 64 << 20
FILE_BYTES_MAX = 1 << 30
"""Bytes before compression at which the next file is begun."""
READ_ROWS = 32_768

_START = datetime(1970, 1, 1, tzinfo=UTC)
_REPEATING = ["topic", "tag", "tenant", "priority", "producer"]
_RISING = dict.fromkeys(
    ("offset", "event_id", "published_at", "schedule_id"), "DELTA_BINARY_PACKED"
)


def archive_stretch(place: Place, lake: str, stretch: Stretch) -> list[LakeFile]:
    """Read a stretch of a topic from the broker and write it to files of the lake; a task."""
    folder = seen_from_here(lake)
    schema = arrow_schema(message_schema())
    batches = record_batches(
        read_range(place, stretch.topic, stretch.first, stretch.end), schema,
        first=stretch.first, end=stretch.end,
    )  # fmt: skip
    return write_files(folder, stretch, batches)


def merge_files(lake: str, files: Sequence[LakeFile]) -> list[LakeFile]:
    """Write neighbouring files of one day once more, as one; a task."""
    folder = seen_from_here(lake)
    schema = arrow_schema(message_schema())
    batches = (batch for file in files for batch in read_file(folder / file.path, schema))
    whole = Stretch(files[0].topic, files[0].first, files[-1].end)
    return write_files(folder, whole, batches, bytes_max=None)


def seen_from_here(lake: str) -> Path:
    """Return the folder of a lake; raise when this machine does not see it."""
    try:
        return open_lake(lake).folder
    except InvalidRequest as error:
        raise InvalidRequest(
            f"machine {socket.gethostname()!r} does not see the lake {lake!r}: on a cluster its "
            f"folder must be shared by all machines ({error})"
        ) from None


def check_there(lake: Lake, files: Sequence[LakeFile]) -> None:
    """Raise unless the files that tasks wrote are here as well, whole: only then they may count."""
    for file in files:
        path = lake.path(file)
        if not path.is_file() or path.stat().st_size != file.bytes:
            raise Unavailable(
                f"a task wrote {file.path!r} and it is not in {str(lake.folder)!r} here: "
                "on a cluster the lake's folder must be shared by all machines"
            )


# --- writing ---------------------------------------------------------------------------------


def write_files(
    folder: Path, stretch: Stretch, batches: Iterator[pa.RecordBatch], *,
    bytes_max: int | None = FILE_BYTES_MAX,
) -> list[LakeFile]:  # fmt: skip
    """Write all messages of a stretch to files, in order, and return them.

    A day has its own file, and one of `bytes_max` (before compression) is followed by another.
    Nothing of it counts before a commit names it. What does not have exactly these offsets raises.
    """
    written: list[LakeFile] = []
    writing: _FileWriter | None = None
    at = stretch.first
    try:
        with said_plainly(folder):
            for day, piece in (cut for batch in batches for cut in days_of(batch)):
                _check_next(stretch, piece, at)
                if writing is not None and not writing.has_room(day, bytes_max):
                    written.append(writing.finish())
                    writing = None
                if writing is None:
                    writing = _FileWriter(folder, stretch.topic, day, first=at)
                writing.take(piece)
                at += piece.num_rows
            if writing is not None:
                written.append(writing.finish())
                writing = None
    finally:
        if writing is not None:
            writing.drop()
    if at != stretch.end:
        raise OffsetOutOfRange(
            f"topic {stretch.topic!r} was to be read to offset {stretch.end} and ended at {at}"
        )
    return written


def days_of(batch: pa.RecordBatch) -> Iterator[tuple[date, pa.RecordBatch]]:
    """Cut a record batch where the day (UTC) of its `published_at` changes.

    >>> when = pa.array([0, 1, 86_400_000_000], pa.timestamp("us", "UTC"))
    >>> rows = pa.RecordBatch.from_arrays([when], names=["published_at"])
    >>> [(str(day), piece.num_rows) for day, piece in days_of(rows)]
    [('1970-01-01', 2), ('1970-01-02', 1)]
    """
    if not batch.num_rows:
        return
    days = batch.column("published_at").cast(pa.timestamp("us", "UTC")).cast(pa.date32())
    runs = pc.run_end_encode(days.cast(pa.int32()))
    ends = runs.run_ends.to_pylist()
    for number, (begin, end) in zip(runs.values.to_pylist(), pairwise([0, *ends]), strict=True):
        yield (_START + timedelta(days=number)).date(), batch.slice(begin, end - begin)


def _check_next(stretch: Stretch, piece: pa.RecordBatch, at: int) -> None:
    """Raise unless a piece has exactly the offsets that must come next."""
    offsets = piece.column("offset")
    first, last = offsets[0].as_py(), offsets[-1].as_py()
    if first != at or last - first + 1 != piece.num_rows or last >= stretch.end:
        raise Corruption(
            f"offset {at} of topic {stretch.topic!r} was to come next, not {first} to {last}"
        )


class _FileWriter:
    """One file that is being written: aside, until it is finished."""

    def __init__(self, folder: Path, topic: str, day: date, *, first: int) -> None:
        self._day = day
        self._folder = folder
        self._below = f"topic={topic}/date={day.isoformat()}"
        self._topic = topic
        self._first = self._end = first
        self._schema = arrow_schema(message_schema())
        (folder / self._below).mkdir(parents=True, exist_ok=True)
        self._aside = aside_of(folder / self._below / "writing.parquet")
        self._writer = pq.ParquetWriter(
            str(self._aside), self._schema, compression="zstd", use_dictionary=_REPEATING,
            column_encoding=_RISING, write_statistics=True, write_page_checksum=True,
        )  # fmt: skip
        self._pending: list[pa.RecordBatch] = []
        self._rows = self._bytes = self._bytes_before = 0
        self._earliest, self._latest = datetime.max.replace(tzinfo=UTC), _START

    def has_room(self, day: date, bytes_max: int | None) -> bool:
        """Tell whether messages of that day go into this file."""
        is_full = bytes_max is not None and self._bytes_before + self._bytes >= bytes_max
        return day == self._day and not is_full

    def take(self, batch: pa.RecordBatch) -> None:
        """Write messages; they reach the file a row group at a time."""
        earliest, latest = pc.min_max(batch.column("published_at")).values()
        self._earliest = min(self._earliest, earliest.as_py())
        self._latest = max(self._latest, latest.as_py())
        self._end += batch.num_rows
        while batch.num_rows:
            piece = batch.slice(0, GROUP_ROWS - self._rows)
            self._pending.append(piece)
            self._rows += piece.num_rows
            self._bytes += piece.nbytes
            if self._rows >= GROUP_ROWS or self._bytes >= GROUP_BYTES:
                self._write_group()
            batch = batch.slice(piece.num_rows)

    def finish(self) -> LakeFile:
        """Make the file durable under its name, and return it."""
        self._write_group()
        self._writer.close()
        mark = secrets.token_hex(4)
        path = f"{self._below}/{self._first:020}-{self._end:020}-{mark}.parquet"
        size = self._aside.stat().st_size
        sync_file(self._aside)
        self._aside.replace(self._folder / path)
        for folder in (self._below, f"topic={self._topic}", "."):
            sync_folder(self._folder / folder)
        return LakeFile(
            path=path, topic=self._topic, first=self._first, end=self._end, bytes=size,
            first_published_at_ms=_as_ms(self._earliest),
            last_published_at_ms=_as_ms(self._latest),
        )  # fmt: skip

    def drop(self) -> None:
        """Leave nothing of it, whatever went wrong."""
        with suppress(OSError, pa.ArrowException):
            self._writer.close()
        self._aside.unlink(missing_ok=True)

    def _write_group(self) -> None:
        if self._pending:
            table = pa.Table.from_batches(self._pending, self._schema)
            self._writer.write_table(table, row_group_size=GROUP_ROWS)
            self._bytes_before += self._bytes
            self._pending, self._rows, self._bytes = [], 0, 0


def sync_file(path: Path) -> None:
    """Make the content of a file durable."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _as_ms(moment: datetime) -> int:
    return (moment - _START) // timedelta(milliseconds=1)


# --- reading ---------------------------------------------------------------------------------


def read_files(
    lake: Lake | str | Path, topic: str, first: int, end: int, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Give the messages from `first` to before `end` from the lake, all of them or an error."""
    opened = lake if isinstance(lake, Lake) else open_lake(lake)
    state = opened.state()
    for gap in state.gaps_between(topic, first, end):
        raise OffsetOutOfRange(
            f"the lake {str(opened.folder)!r} has no offsets {max(first, gap.first)} to "
            f"{min(end, gap.end) - 1} of topic {topic!r}: retention took them before the archive"
        )
    if end > state.end_of(topic):
        raise OffsetOutOfRange(
            f"the lake {str(opened.folder)!r} has topic {topic!r} to before offset "
            f"{state.end_of(topic)}, not to before {end}"
        )
    for file in state.files_between(topic, first, end):
        low, high = max(first, file.first) - file.first, min(end, file.end) - file.first
        yield from read_file(opened.path(file), schema, first=low, end=high)


def read_file(
    path: Path, schema: pa.Schema, *, first: int = 0, end: int | None = None
) -> Iterator[pa.RecordBatch]:
    """Give the rows from `first` to before `end` of one file."""
    with _file_named(path), pq.ParquetFile(path, page_checksum_verification=True) as file:
        at = 0
        for group in range(file.metadata.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            low, high = max(first - at, 0), rows if end is None else min(rows, end - at)
            if low < high:
                yield from _group_rows(file, group, schema, low, high)
            at += rows


def _group_rows(
    file: pq.ParquetFile, group: int, schema: pa.Schema, low: int, high: int
) -> Iterator[pa.RecordBatch]:
    """Give some rows of one row group: larger pieces would need more memory than one group."""
    at = 0
    for batch in file.iter_batches(READ_ROWS, row_groups=[group], columns=schema.names):
        begin, end = max(low - at, 0), min(high - at, batch.num_rows)
        at += batch.num_rows
        if begin < end:
            piece = batch.slice(begin, end - begin)
            arrays = [piece.column(field.name).cast(field.type) for field in schema]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)


@contextmanager
def _file_named(path: Path) -> Iterator[None]:
    """Say which file it is that cannot be read."""
    try:
        yield
    except FileNotFoundError:
        raise Corruption(
            f"file {str(path)!r} of the lake is not there: it was deleted, "
            "or this machine does not see the lake"
        ) from None
    except PermissionError:
        raise
    except (pa.ArrowException, OSError, KeyError) as error:
        raise Corruption(f"file {str(path)!r} of the lake cannot be read: {error}") from error
