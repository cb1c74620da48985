"""Writing a run file: aside, from the first page to the last section, and then under its name.

    add(records) ...            in the order of (at_ms, number)
    add_numbers(columns) ...    in the order of numbers
    add_uniques(columns) ...    in the order of (hash, number)
    finish()                    header, sync, rename, sync of the folder

A file under its name is complete and durable: until then it is `path.tmp`, which means nothing and
is removed at the next start. Memory is bounded by a page, a block, the page index (28 bytes for
each 64 KiB) and the table of counts.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import PurePosixPath
from typing import Final

import msgspec
from crc32c import crc32c

from onward.log.disk import Buffer, Disk, File, write_all
from onward.schedule.blocks import NUMBERS, UNIQUES, BlockWriter
from onward.schedule.counts import Counts
from onward.schedule.layout import (
    HEADER_BYTES,
    PAGE_BYTES,
    Header,
    Key,
    Place,
    Section,
    pack_header,
)
from onward.schedule.pages import encode_page
from onward.schedule.record import Records

_UNIT_BYTES: Final = 1 << 20


class RunSummary(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a build or a merge did. Without a row that is kept there is no file."""

    start: int
    end: int
    """The stretch of numbers that it stands for."""
    paths: tuple[str, ...] = ()
    """The files, ascending in time; more than one when it became large."""
    rows: int = 0
    bytes: int = 0
    gone: int = 0
    """Rows that were not taken over, because they had fired or were cancelled."""
    left_out: int = 0
    """Rows of batches that cannot be decoded, and rows without a topic."""
    ids: str = ""
    """The name of the file that remembers all numbers of a build, also those that are gone."""


class RunWriter:
    """One run file that is being written."""

    def __init__(self, disk: Disk, path: str) -> None:
        self.path = path
        self.rows = 0
        self.last: Key = (0, 0)
        self._disk = disk
        self._temporary = f"{path}.tmp"
        disk.remove(self._temporary)
        self._file: File | None = disk.open(self._temporary, create=True)
        self._pending = Records.empty()
        self._first: Key = (0, 0)
        self._topics: dict[str, int] = {}
        self._counts = Counts()
        self._numbers = BlockWriter(NUMBERS)
        self._uniques = BlockWriter(UNIQUES)
        self._index = (array("q"), array("Q"), array("Q"), array("I"))
        self._sections: dict[Section, Place] = {}
        self._section_start = HEADER_BYTES
        self._position = HEADER_BYTES
        self._unit: list[Buffer] = []
        self._unit_bytes = 0

    def add(self, records: Records) -> None:
        """Take records that come after those taken before, in the order of (at_ms, number)."""
        self._pending.extend(records)
        self._write_pages(is_last=False)

    def add_numbers(
        self, numbers: Sequence[int], at_ms: Sequence[int], topics: Sequence[str]
    ) -> None:
        """Take columns of the same records in the order of their numbers."""
        self._end_pages()
        self._write_all(self._numbers.add([numbers, at_ms, self._numbers_of(topics)]))

    def add_uniques(
        self,
        hashes: Sequence[int],
        numbers: Sequence[int],
        at_ms: Sequence[int],
        topics: Sequence[str],
    ) -> None:
        """Take columns of the records with a business key, in the order of (hash, number)."""
        self._end_numbers()
        self._write_all(self._uniques.add([hashes, numbers, at_ms, self._numbers_of(topics)]))

    def finish(self, *, start: int, end: int) -> int:
        """Make the file complete and durable under its name; return its size in bytes."""
        self._end_numbers()
        self._write_all([self._uniques.finish()])
        self._end(Section.UNIQUES)
        # Without pages it is the table of numbers alone (`ids.py`).
        assert self.rows in (0, self._numbers.rows), "every record is found by its number"
        for section, packed in self._small_sections():
            self._write_all([packed])
            self._end(section, crc=crc32c(packed))
        self._flush()
        header = Header(
            self._numbers.rows, self._uniques.rows, start, end, self._first, self.last,
            self._counts.step_ms, self._position, self._sections,
        )  # fmt: skip
        file = self._opened
        write_all(file, 0, pack_header(header))
        file.sync()
        self._close()
        self._disk.rename(self._temporary, self.path)
        self._disk.sync_folder(str(PurePosixPath(self.path).parent))
        return self._position

    def abandon(self) -> None:
        """Remove what was written; after `finish` this does nothing."""
        if self._file is not None:
            self._close()
            self._disk.remove(self._temporary)

    def _write_pages(self, *, is_last: bool) -> None:
        """Cut what is pending into pages; the rows of one that is not full wait for the next."""
        records = self._pending
        ends = [0, *accumulate(records.sizes())]
        start, count = 0, records.count
        while start < count:
            stop = max(bisect_right(ends, ends[start] + PAGE_BYTES) - 1, start + 1)
            if stop == count and not is_last:
                break
            self._write_page(records.slice(start, stop))
            start = stop
        self._pending = records.slice(start, count)

    def _write_page(self, records: Records) -> None:
        topics = self._numbers_of(records.topics)
        page = encode_page(records, topics=topics, first_row=self.rows)
        first = records.at_ms[0], records.numbers[0]
        row = (*first, self._position, self.rows)
        for column, value in zip(self._index, row, strict=True):
            column.append(value)
        if not self.rows:
            self._first = first
        self.last = records.at_ms[-1], records.numbers[-1]
        self._counts.add(records.at_ms, topics)
        self.rows += records.count
        self._write_all([page])

    def _numbers_of(self, topics: Sequence[str]) -> list[int]:
        """Return the number of each topic in this run; one that is new gets the next."""
        known = self._topics
        try:
            return list(map(known.__getitem__, topics))
        except KeyError:
            for topic in dict.fromkeys(topics):
                known.setdefault(topic, len(known))
            return list(map(known.__getitem__, topics))

    def _small_sections(self) -> list[tuple[Section, bytes]]:
        index = b"".join(column.tobytes() for column in self._index)
        names = [name.encode("utf-8", "surrogateescape") for name in self._topics]
        topics = array("I", [len(names), *map(len, names)]).tobytes() + b"".join(names)
        packed = (
            (Section.PAGE_INDEX, index),
            (Section.NUMBER_FENCES, self._numbers.fences()),
            (Section.UNIQUE_FENCES, self._uniques.fences()),
            (Section.TOPICS, topics),
            (Section.COUNTS, self._counts.pack()),
        )
        return [(section, one + bytes(-len(one) % 8)) for section, one in packed]

    def _end_pages(self) -> None:
        if Section.PAGES not in self._sections:
            self._write_pages(is_last=True)
            self._end(Section.PAGES)

    def _end_numbers(self) -> None:
        self._end_pages()
        if Section.NUMBERS not in self._sections:
            self._write_all([self._numbers.finish()])
            self._end(Section.NUMBERS)

    def _end(self, section: Section, *, crc: int = 0) -> None:
        length = self._position - self._section_start
        self._sections[section] = Place(crc, self._section_start, length)
        self._section_start = self._position

    def _write_all(self, parts: Iterable[bytes]) -> None:
        for part in parts:
            self._unit.append(part)
            self._unit_bytes += len(part)
            self._position += len(part)
            if self._unit_bytes >= _UNIT_BYTES:
                self._flush()

    def _flush(self) -> None:
        unit = b"".join(self._unit)
        write_all(self._opened, self._position - len(unit), unit)
        self._unit, self._unit_bytes = [], 0

    @property
    def _opened(self) -> File:
        assert self._file is not None, "the file is finished"
        return self._file

    def _close(self) -> None:
        self._opened.close()
        self._file = None
