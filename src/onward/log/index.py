"""Where an offset is: rows sorted by topic, in memory while they are new, in files after that.

A row says where one entry of one topic lies:

    0       4       8             16     24            28         32       36     40
    | topic | count | base offset | time | index delta | position | length | zero |

`index delta` counts from the first index of the segment. A file of rows (a run of an open
segment, or the index of a sealed one: the same format) is

    0      4         8             16       20     24    28     32
    | OIDX | version | first index | topics | rows | crc | indexes | directory | rows |

with one directory record per topic, sorted by its number:

    0       4      8           16      24           32          40
    | topic | rows | first row | bytes | end offset | last time |

`indexes` is how many indexes the sealed segment covers (0 in a run): where the next one must begin.
`crc` is crc32c of everything after the header. These files are derived: a lost or damaged one is
built again from its segment. Rows of one topic are always in the order of their offsets, so
everything is found by binary search, and no work is done per message.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from struct import Struct
from typing import NamedTuple, TypeVar

from crc32c import crc32c

from onward.log.disk import Disk, write_all
from onward.message.entry import Entry

ROW = Struct("<IIQqIIII")
ROW_BYTES = ROW.size
HEADER = Struct("<4sIQIIII")
DIRECTORY = Struct("<IIQQQq")
MAGIC = b"OIDX"
VERSION = 1

_OFFSET = (Struct("<Q"), 8)
_TIME = (Struct("<q"), 16)
_DELTA = (Struct("<I"), 24)
_TOPIC = Struct("<I")
_UNIT_BYTES = 1 << 20

_Part = TypeVar("_Part")


Piece = bytearray | memoryview
"""Packed rows of one topic."""


class Row(NamedTuple):
    """One row, read."""

    topic: int
    count: int  # type: ignore[assignment]
    base_offset: int
    time_ms: int
    index_delta: int
    position: int
    length: int
    zero: int = 0

    @property
    def end_offset(self) -> int:
        """Return the offset after the last message of the entry."""
        return self.base_offset + self.count


class TopicRows(NamedTuple):
    """The rows of one topic in one buffer, in the order of their offsets."""

    buffer: bytes | bytearray | memoryview
    start: int
    count: int  # type: ignore[assignment]

    def row(self, number: int) -> Row:
        """Return row `number`, from 0."""
        return Row._make(ROW.unpack_from(self.buffer, self.start + number * ROW_BYTES))

    def first_after_offset(self, offset: int) -> int:
        """Return the number of the first row that holds `offset` or something later."""
        number = self._bisect(_OFFSET, offset + 1)
        if number and self.row(number - 1).end_offset > offset:
            return number - 1
        return number

    def first_from_time(self, time_ms: int) -> int:
        """Return the number of the first row published at or after `time_ms`."""
        return self._bisect(_TIME, time_ms)

    def first_after_index(self, index_delta: int) -> int:
        """Return the number of the first row whose index is greater."""
        return self._bisect(_DELTA, index_delta + 1)

    def _bisect(self, field: tuple[Struct, int], value: int) -> int:
        """Return the number of the first row whose field is at least `value`."""
        struct, place = field
        unpack, buffer, start = struct.unpack_from, self.buffer, self.start + place
        low, high = 0, self.count
        while low < high:
            middle = (low + high) >> 1
            if unpack(buffer, start + middle * ROW_BYTES)[0] < value:
                low = middle + 1
            else:
                high = middle
        return low


class TopicSummary(NamedTuple):
    """What one file of rows knows of one topic."""

    topic: int
    rows: int
    first_row: int
    bytes: int
    end_offset: int
    last_time_ms: int


class NewRows:
    """The newest rows of an open segment, in memory: packed bytes per topic."""

    def __init__(self, first_index: int) -> None:
        self.first_index = first_index
        self.count = 0
        self._rows: dict[int, bytearray] = {}

    def add_all(self, entries: Sequence[Entry]) -> None:
        """Remember where `entries` lie."""
        by_topic, first_index, pack = self._rows, self.first_index, ROW.pack
        # Unpacked, and not entry by entry through names: a commit to many topics has many of them.
        for position, length, _, _, index, _, time_ms, base, _, topic, count, _, _ in entries:
            row = pack(topic, count, base, time_ms, index - first_index, position, length, 0)
            rows = by_topic.get(topic)
            if rows is None:
                by_topic[topic] = bytearray(row)
            else:
                rows += row
        self.count += len(entries)

    def rows_of(self, topic: int) -> list[TopicRows]:
        """Return the rows of `topic`: a list of one, or of none."""
        rows = self._rows.get(topic)
        return [] if rows is None else [TopicRows(rows, 0, len(rows) // ROW_BYTES)]

    def pieces(self) -> Iterator[tuple[int, Piece]]:
        """Walk over (topic, packed rows) in the order of topics."""
        by_topic = self._rows
        return ((topic, by_topic[topic]) for topic in sorted(by_topic))

    def packed(self) -> tuple[bytes, bytes]:
        """Return the directory and the rows, as they stand in a file.

        One walk over all rows, not topic by topic: a checkpoint does this while the loop has to
        share the interpreter with it, and when topics are many, most have one row.
        """
        rows = b"".join(map(self._rows.__getitem__, sorted(self._rows)))
        records: list[bytes] = []
        pack, topic, first_row, size, end_offset, last_time_ms = DIRECTORY.pack, -1, 0, 0, 0, 0
        for number, (row_topic, count, base, time_ms, _, _, length, _) in enumerate(
            ROW.iter_unpack(rows)
        ):
            if row_topic != topic:
                if number:
                    records.append(
                        pack(topic, number - first_row, first_row, size, end_offset, last_time_ms)
                    )
                topic, first_row, size = row_topic, number, 0
            size += length
            end_offset, last_time_ms = base + count, time_ms
        if rows:
            count = len(rows) // ROW_BYTES - first_row
            records.append(pack(topic, count, first_row, size, end_offset, last_time_ms))
        return b"".join(records), rows

    def summaries(self) -> Iterator[TopicSummary]:
        """Walk over what is known of each topic, in the order of topics. Looks at every row."""
        return map(TopicSummary._make, DIRECTORY.iter_unpack(self.packed()[0]))


class RowsFile:
    """A file of rows, mapped into memory. See the module's drawing."""

    def __init__(self, buffer: bytes | memoryview, *, path: str) -> None:
        self.path = path
        self._buffer = buffer
        mapped = memoryview(buffer).obj
        self._map = mapped if isinstance(mapped, mmap.mmap) else None
        (magic, version, self.first_index, self._topics, self.count, crc, self.index_count) = (
            HEADER.unpack_from(buffer)
        )
        self._rows_start = HEADER.size + self._topics * DIRECTORY.size
        if (
            magic != MAGIC
            or version != VERSION
            or len(buffer) != self._rows_start + self.count * ROW_BYTES
            or self._crc() != crc
        ):
            raise ValueError(f"{path} is not a valid file of rows")

    @classmethod
    def open(cls, disk: Disk, path: str) -> RowsFile:
        """Open and verify; raise ValueError or OSError when it cannot be used."""
        file = disk.open(path)
        try:
            buffer = file.map()
        finally:
            file.close()
        if len(buffer) < HEADER.size:
            raise ValueError(f"{path} is too short")
        return cls(memoryview(buffer), path=path)

    def rows_of(self, topic: int) -> list[TopicRows]:
        """Return the rows of `topic`: a list of one, or of none."""
        summary = self.summary_of(topic)
        if summary is None:
            return []
        start = self._rows_start + summary.first_row * ROW_BYTES
        return [TopicRows(self._buffer, start, summary.rows)]

    def summary_of(self, topic: int) -> TopicSummary | None:
        """Return the directory's record of `topic`."""
        low, high = 0, self._topics
        while low < high:
            middle = (low + high) >> 1
            if self._topic_at(middle) < topic:
                low = middle + 1
            else:
                high = middle
        if low < self._topics and self._topic_at(low) == topic:
            return self._summary_at(low)
        return None

    def summaries(self) -> Iterator[TopicSummary]:
        """Walk over the directory, in the order of topics."""
        return map(self._summary_at, range(self._topics))

    def pieces(self) -> Iterator[tuple[int, Piece]]:
        """Walk over (topic, packed rows) in the order of topics."""
        rows = memoryview(self._buffer)[self._rows_start :]
        for summary in self.summaries():
            start = summary.first_row * ROW_BYTES
            yield summary.topic, rows[start : start + summary.rows * ROW_BYTES]

    def close(self) -> None:
        """Unmap the file and close its descriptor, which the mapping keeps."""
        if self._map is not None and isinstance(self._buffer, memoryview):
            self._buffer.release()
            # Whoever still looks at a part of it keeps it: the last one to go unmaps it.
            with suppress(BufferError):
                self._map.close()

    def release(self) -> None:
        """Give the pages that were looked at back: they stay in the page cache, not with us."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)

    def _crc(self) -> int:
        """Return the checksum; a large file is not all in memory meanwhile, nor after."""
        crc, view = 0, memoryview(self._buffer)
        for start in range(HEADER.size, len(view), _UNIT_BYTES):
            crc = crc32c(view[start : start + _UNIT_BYTES], crc)
            self.release()
        return crc

    def _topic_at(self, number: int) -> int:
        topic: int = _TOPIC.unpack_from(self._buffer, HEADER.size + number * DIRECTORY.size)[0]
        return topic

    def _summary_at(self, number: int) -> TopicSummary:
        return TopicSummary._make(
            DIRECTORY.unpack_from(self._buffer, HEADER.size + number * DIRECTORY.size)
        )


Rows = NewRows | RowsFile


def write_rows(
    disk: Disk, path: str, *, first_index: int, sources: Sequence[Rows], index_count: int = 0
) -> None:
    """Merge `sources`, oldest first, into one file at `path`, durable when this returns.

    It copies whole pieces, so its cost is per topic and source; only rows that are new, and in
    memory, are looked at one by one. Of mapped files about a unit is resident at a time.
    """
    temporary = f"{path}.tmp"
    disk.remove(temporary)
    if len(sources) == 1 and isinstance(sources[0], NewRows):
        rows = sources[0].count
        directory, packed = sources[0].packed()
        units = iter([directory + packed])
    else:
        directory, rows = _merged_directory(sources)
        units = _units(directory, sources)
    file = disk.open(temporary, create=True)
    try:
        position = HEADER.size
        crc = 0
        for unit in units:
            write_all(file, position, unit)
            position += len(unit)
            crc = crc32c(unit, crc)
        topics = len(directory) // DIRECTORY.size
        write_all(file, 0, HEADER.pack(MAGIC, VERSION, first_index, topics, rows, crc, index_count))
        file.sync()
    finally:
        file.close()
    disk.rename(temporary, path)


def _merged_directory(sources: Sequence[Rows]) -> tuple[bytes, int]:
    directory = bytearray()
    first_row = 0
    walks = [((one.topic, one) for one in source.summaries()) for source in sources]
    for topic, parts in _merged(walks):
        rows, size, last = sum(p.rows for p in parts), sum(p.bytes for p in parts), parts[-1]
        directory += DIRECTORY.pack(
            topic, rows, first_row, size, last.end_offset, last.last_time_ms
        )  # fmt: skip
        first_row += rows
    return bytes(directory), first_row


def _units(directory: bytes, sources: Sequence[Rows]) -> Iterator[bytes]:
    """Yield the directory, then the rows in units of about a mebibyte."""
    unit = bytearray(directory)
    for _, pieces in _merged([source.pieces() for source in sources]):
        for piece in pieces:
            unit += piece
        if len(unit) >= _UNIT_BYTES:
            yield bytes(unit)
            unit.clear()
            _release(sources)
    yield bytes(unit)


def _release(sources: Sequence[Rows]) -> None:
    for source in sources:
        if isinstance(source, RowsFile):
            source.release()


def _merged(
    walks: Sequence[Iterator[tuple[int, _Part]]],
) -> Iterator[tuple[int, list[_Part]]]:
    """Walk over (topic, its parts oldest first) in the order of topics."""
    heads = [next(walk, None) for walk in walks]
    while any(head is not None for head in heads):
        topic = min(head[0] for head in heads if head is not None)
        parts: list[_Part] = []
        for number, head in enumerate(heads):
            if head is not None and head[0] == topic:
                parts.append(head[1])
                heads[number] = next(walks[number], None)
        yield topic, parts
