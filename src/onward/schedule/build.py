"""Building runs: batches of `@schedule`, as they came, become files sorted by time.

A stretch of up to 65,536 messages or 24 MiB is sorted in memory and becomes a run. What is longer
becomes several runs, `path`, `path.1`, `path.2` ..., one for each stretch: memory stays the same,
and each message is written once. All numbers, also of what has fired since, are remembered in one
file of `ids_folder` (`ids.py`). Merging them is left to who has time for it. The cost is per
column, not per message: decode, sort the rows' places once, gather, join.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from onward.errors import ProtocolError
from onward.log.disk import Buffer, Disk
from onward.message.batch import RAW_BYTES_MAX, decode_batch, read_header
from onward.message.columns import Column
from onward.schedule.blocks import hashes_of
from onward.schedule.gone import Gone
from onward.schedule.ids import IdsWriter
from onward.schedule.record import Records, records_of
from onward.schedule.writer import RunSummary, RunWriter

STRETCH_ROWS_MAX: Final = 65_536
STRETCH_BYTES_MAX: Final = 24 * 1024 * 1024

ScheduledBatch = tuple[int, int, Buffer]
"""(number of its first message, time of its entry, the bytes of the batch)."""


def build_run(
    disk: Disk,
    path: str,
    batches: Iterable[ScheduledBatch],
    *,
    gone: Gone,
    ids_folder: str = "",
    stretch_rows_max: int = STRETCH_ROWS_MAX,
    stretch_bytes_max: int = STRETCH_BYTES_MAX,
) -> RunSummary:
    """Write the messages of `batches`, in the order of their numbers, to runs at `path`.

    >>> from onward.log.memory_disk import MemoryDisk
    >>> from onward.message.batch import encode_batch
    >>> from onward.schedule.run import Run
    >>> disk = MemoryDisk()
    >>> batch = encode_batch([b"later", b"soon"], due_at_ms=[90, 50], topics=["a", "a"])
    >>> build_run(disk, "run", [(7, 10, batch)], gone=Gone()).rows
    2
    >>> Run.open(disk, "run").records(0, 2).bodies
    [b'soon', b'later']
    """
    ids = IdsWriter(disk, ids_folder) if ids_folder else None
    build = _Build(disk, path, gone, ids, rows_max=stretch_rows_max, bytes_max=stretch_bytes_max)
    try:
        for first_number, time_ms, batch in batches:
            build.add(first_number, time_ms, batch)
        return build.finish()
    except BaseException:
        build.abandon()
        raise


class _Build:
    """One build under way: a stretch in memory, and those before it in runs."""

    def __init__(
        self, disk: Disk, path: str, gone: Gone, ids: IdsWriter | None, *, rows_max: int,
        bytes_max: int,
    ) -> None:  # fmt: skip
        self._disk = disk
        self._path = path
        self._gone = gone
        self._rows_max = rows_max
        self._bytes_max = bytes_max
        self._stretch = Records.empty()
        self._stretch_bytes = 0
        self._paths: list[str] = []
        self._rows = 0
        self._bytes = 0
        self._start = 0
        self._stretch_start = 0
        self._end = 0
        self._gone_count = 0
        self._left_out = 0
        self._ids = ids

    def add(self, first_number: int, time_ms: int, packed: Buffer) -> None:
        """Take the rows of one batch that are not gone."""
        if not self._end:
            self._start = self._stretch_start = self._end = first_number
        if first_number < self._end:
            raise ValueError(f"batch {first_number} comes behind number {self._end}")
        count, size, records = _decoded(packed, first_number=first_number, time_ms=time_ms)
        self._left_out += count - records.count
        if self._ids is not None:
            self._ids.add(records.numbers, records.at_ms, records.topics)
        kept = self._gone.kept(records.numbers, records.at_ms, records.topics)
        if kept is not None:
            self._gone_count += records.count - len(kept)
            records = records.select(kept)
        rows = self._stretch.count + records.count
        if rows > self._rows_max or self._stretch_bytes + size > self._bytes_max:
            self._write_stretch()
            self._stretch_start = first_number
        self._end = first_number + count
        self._stretch.extend(records)
        self._stretch_bytes += size

    def finish(self) -> RunSummary:
        """Write what is left, and say what it has become."""
        self._write_stretch()
        return RunSummary(
            self._start, self._end, tuple(self._paths), self._rows, self._bytes, self._gone_count,
            self._left_out, "" if self._ids is None else self._ids.finish(end=self._end),
        )  # fmt: skip

    def abandon(self) -> None:
        """Remove what was written."""
        if self._ids is not None:
            self._ids.abandon()
        for path in self._paths:
            self._disk.remove(path)

    def _write_stretch(self) -> None:
        """Write the stretch to a run of its own."""
        if self._stretch.count:
            path = f"{self._path}.{len(self._paths)}" if self._paths else self._path
            self._rows += self._stretch.count
            self._bytes += self._write(path)
            self._paths.append(path)

    def _write(self, path: str) -> int:
        records, self._stretch, self._stretch_bytes = self._stretch, Records.empty(), 0
        writer = RunWriter(self._disk, path)
        try:
            writer.add(_sorted(records))
            writer.add_numbers(records.numbers, records.at_ms, records.topics)
            if (uniques := _unique_columns(records)) is not None:
                writer.add_uniques(*uniques)
            return writer.finish(start=self._stretch_start, end=self._end)
        finally:
            writer.abandon()


def _decoded(packed: Buffer, *, first_number: int, time_ms: int) -> tuple[int, int, Records]:
    """Return how many messages a batch has, how large it is unpacked, and its records.

    A batch that cannot be decoded is refused when it comes. Should one be here all the same, then
    it has no records, and it stops nobody else.
    """
    try:
        batch = decode_batch(packed, raw_bytes_max=RAW_BYTES_MAX)
        records = records_of(batch, first_number=first_number, time_ms=time_ms)
    except ProtocolError:
        return _count_of(packed), 0, Records.empty()
    return batch.count, batch.header.raw_bytes, records


def _count_of(packed: Buffer) -> int:
    """Return how many messages a damaged batch says that it has."""
    try:
        return read_header(packed, 0, len(packed)).count
    except ProtocolError:
        return 0


def _sorted(records: Records) -> Records:
    """Sort by time; they are in the order of their numbers, and sorting is stable."""
    return records.select(sorted(range(records.count), key=records.at_ms.__getitem__))


def _unique_columns(
    records: Records,
) -> tuple[list[int], list[int], list[int], list[str]] | None:
    """Return hashes, numbers, times and topics of the records with a business key, sorted."""
    uniques = records.optional.get(Column.UNIQUES)
    if uniques is None:
        return None
    rows = [row for row, unique in enumerate(uniques) if unique is not None]
    hashes = hashes_of(unique for unique in uniques if unique is not None)
    # Numbers ascend already, and sorting is stable.
    order = sorted(range(len(rows)), key=hashes.__getitem__)
    rows = [rows[place] for place in order]
    return (
        [hashes[place] for place in order],
        [records.numbers[row] for row in rows],
        [records.at_ms[row] for row in rows],
        [records.topics[row] for row in rows],
    )
