"""A run: scheduled messages in an immutable file, sorted by (at_ms, number), bodies included.

    open ─ the page index and the fences are in memory (about 50 bytes for each 64 KiB of messages)
    head, take_until, seek      a part of the order (`order.py`): which rows fire next
    records                     the messages of rows, a few reads for many
    place_of, find              one number: a read of a block, and of a page for the message itself
    find_unique                 one business key: the same, by its hash, and compared as text

A row's place in the run is its position, from 0. What is cancelled stays in the file until a merge
leaves it out. Nothing here is trusted before its checksum was right: damage is `Corruption`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from crc32c import crc32c

from onward.errors import Corruption, ProtocolError
from onward.log.disk import Disk, File
from onward.schedule.blocks import NUMBERS, UNIQUES, Blocks, hashes_of
from onward.schedule.counts import Counts
from onward.schedule.layout import HEADER_BYTES, Header, Key, Place, Section, unpack_header
from onward.schedule.marks import NUMBER_MAX
from onward.schedule.order import Rows
from onward.schedule.pages import Page, read_page
from onward.schedule.record import Record, Records

# A page that holds one large message is not kept: the next row is in another one anyway.
_CACHED_BYTES_MAX: Final = 256 * 1024
_PAGE_INDEX_BYTES: Final = 28


class Waiting(NamedTuple):
    """Where a number is in time, and for which topic."""

    number: int
    at_ms: int
    topic: str


class Run:
    """One run file, open for reading. Used by one thread at a time."""

    def __init__(self, file: File, header: Header, *, path: str) -> None:
        self.path = path
        self.header = header
        self.rows_total = header.rows
        self.number_start = header.start
        self.number_end = header.end
        self._file = file
        self._load_page_index()
        self.topics = self._load_topics()
        self._numbers = self._blocks(NUMBERS, Section.NUMBERS, header.rows)
        self._uniques = self._blocks(UNIQUES, Section.UNIQUES, header.uniques)
        self._cached: tuple[int, Page] | None = None
        self._position = 0
        self._head: Key | None = self.first if self.rows_total else None

    @classmethod
    def open(cls, disk: Disk, path: str) -> Run:
        """Open and verify what every use begins with; raise `Corruption` when it is damaged.

        >>> from onward.log.memory_disk import MemoryDisk
        >>> Run.open(MemoryDisk(), "missing")
        Traceback (most recent call last):
        FileNotFoundError: [Errno 2] No such file or directory: 'missing'
        """
        file = disk.open(path)
        try:
            header = unpack_header(file.read(0, HEADER_BYTES), path=path)
            if file.size() != header.file_bytes:
                raise Corruption(
                    f"{path} has {file.size()} bytes, but says that it has {header.file_bytes}"
                )
            return cls(file, header, path=path)
        except BaseException:
            file.close()
            raise

    @property
    def first(self) -> Key:
        """The row that fires first."""
        return self.header.first

    @property
    def last(self) -> Key:
        """The row that fires last."""
        return self.header.last

    @property
    def count(self) -> int:
        """How many rows wait: from where `seek` and `take_until` stand."""
        return self.rows_total - self._position

    def head(self) -> Key | None:
        """Return the row that fires next; None when none waits."""
        return self._head

    def seek(self, after: Key) -> None:
        """Go to the first row after this one, forward or back: from there on all rows wait."""
        self._go_to(self.first_after(*after))

    def take_until(self, now_ms: int, limit: int) -> Rows:
        """Return the next rows that fire at or before `now_ms`, in order; they wait no longer."""
        taken = Rows()
        while self._head is not None and self._head[0] <= now_ms and len(taken) < limit:
            rows = self.rows(self._position, limit - len(taken))
            rows = rows[: rows.count_due(now_ms)]
            taken.extend(rows)
            self._go_to(self._position + len(rows))
        return taken

    def is_in_memory(self, now_ms: int) -> bool:
        """Return True if the rows up to `now_ms` are in the page that was read last."""
        if self._head is None or self._head[0] > now_ms:
            return True
        page = self.page_at(self._position)
        if self._cached is None or self._cached[0] != page:
            return False
        return page + 1 == self.page_count or self._first_at_ms[page + 1] > now_ms

    def count_due(self, now_ms: int) -> int:
        """Return how many rows wait that fire at or before `now_ms`."""
        cached = self._cached
        try:
            return max(0, self.first_after(now_ms, NUMBER_MAX) - self._position)
        finally:
            # The next rows are taken from the page that was read last, not from this one.
            self._cached = cached

    def rows(self, position: int, limit: int) -> Rows:
        """Return rows from a position on: at most `limit`, and at most those of one page."""
        if position >= self.rows_total or limit <= 0:
            return Rows()
        number, slot = self._place(position)
        page = self._page(number)
        return Rows(page.at_ms[slot : slot + limit], page.numbers[slot : slot + limit])

    def first_after(self, at_ms: int, number: int) -> int:
        """Return the position of the first row after (at_ms, number)."""
        page = self._page_of(at_ms, number)
        if page < 0:
            return 0
        keys = self._page(page)
        return self._first_rows[page] + _count_to(keys.at_ms, keys.numbers, at_ms, number)

    def records(self, position: int, limit: int) -> Records:
        """Return the messages of `limit` rows from a position on, as columns."""
        end = min(position + limit, self.rows_total)
        records = Records.empty()
        while position < end:
            number, slot = self._place(position)
            page = self.page_records(number)
            stop = min(page.count, slot + end - position)
            records.extend(page if stop - slot == page.count else page.slice(slot, stop))
            position += stop - slot
        return records

    def records_of(self, rows: Rows) -> Records:
        """Return the messages of rows that were taken from this run, without gaps."""
        if not len(rows):
            return Records.empty()
        at_ms, number = rows.first
        records = self.records(self.first_after(at_ms, number) - 1, len(rows))
        if (records.at_ms[-1], records.numbers[-1]) != rows.last:
            raise ValueError(f"these are not {len(rows)} rows of {self.path} without gaps")
        return records

    def place_of(self, number: int) -> Waiting | None:
        """Return when a number fires and where to; None when it is not in this run."""
        for _, at_ms, topic in self._numbers.find(number):
            return Waiting(number, at_ms, self.topics[topic])
        return None

    def find(self, number: int) -> Record | None:
        """Return the message with this number; None when it is not in this run."""
        place = self.place_of(number)
        if place is None:
            return None
        records = self.records(self.first_after(place.at_ms, number) - 1, 1)
        if records.numbers != [number]:
            raise Corruption(f"{self.path} has no record {number}, but its index says so")
        return records.record(0)

    def find_unique(self, unique: str) -> Iterator[Waiting]:
        """Walk over the numbers that were published with this business key, the newest first."""
        text = unique.encode("utf-8", "surrogateescape")
        for _, number, at_ms, topic in self._uniques.find(*hashes_of([text])):
            record = self.find(number)
            # Another text may have the same hash.
            if record is not None and record.unique == unique:
                yield Waiting(number, at_ms, self.topics[topic])

    def counts(self) -> Counts:
        """Return how many rows fall into each step of time, by the number of the topic."""
        return Counts.unpack(self._checked(Section.COUNTS), step_ms=self.header.step_ms)

    def verify(self) -> None:
        """Read everything once; raise `Corruption` when something is not as it was written."""
        self.counts()
        for blocks in (self._numbers, self._uniques):
            for _ in blocks.walk():
                pass
        for page in range(self.page_count):
            self.page_records(page)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()
        self._cached = None

    # What a merge asks.

    @property
    def page_count(self) -> int:
        """How many pages there are."""
        return len(self._first_rows) - 1

    def page_at(self, position: int) -> int:
        """Return the number of the page that holds a position."""
        return bisect_right(self._first_rows, position) - 1

    def page_rows(self, page: int) -> int:
        """Return how many rows a page has."""
        return self._first_rows[page + 1] - self._first_rows[page]

    def page_key(self, page: int) -> Key:
        """Return the first row of a page; the page is not read for it."""
        return self._first_at_ms[page], self._first_numbers[page]

    def page_records(self, page: int) -> Records:
        """Return all messages of a page."""
        try:
            return self._page(page).records(self.topics)
        except ProtocolError as error:
            raise Corruption(f"page {page} of {self.path} is damaged: {error}") from error

    def number_rows(self) -> Iterator[list[tuple[int, int, str]]]:
        """Walk over (number, at_ms, topic) in the order of numbers, block by block."""
        for numbers, at_ms, topics in self._numbers.walk():
            yield list(zip(numbers, at_ms, map(self.topics.__getitem__, topics), strict=True))

    def unique_rows(self) -> Iterator[list[tuple[int, int, int, str]]]:
        """Walk over (hash, number, at_ms, topic) in the order of hashes, block by block."""
        for hashes, numbers, at_ms, topics in self._uniques.walk():
            yield list(
                zip(hashes, numbers, at_ms, map(self.topics.__getitem__, topics), strict=True)
            )

    def _load_page_index(self) -> None:
        index = memoryview(self._checked(Section.PAGE_INDEX))
        pages = self.header.sections[Section.PAGES]
        count = len(index) // _PAGE_INDEX_BYTES
        self._first_at_ms = array("q", index[: 8 * count].tobytes())
        self._first_numbers = array("Q", index[8 * count : 16 * count].tobytes())
        self._positions = array("Q", index[16 * count : 24 * count].tobytes())
        self._first_rows = array("I", index[24 * count : 28 * count].tobytes())
        self._positions.append(pages.position + pages.length)
        self._first_rows.append(self.header.rows)

    def _load_topics(self) -> list[str]:
        section = memoryview(self._checked(Section.TOPICS))
        count = int.from_bytes(section[:4], "little")
        lengths = section[4 : 4 + 4 * count].cast("I").tolist()
        names: list[str] = []
        at = 4 + 4 * count
        for length in lengths:
            names.append(section[at : at + length].tobytes().decode("utf-8", "surrogateescape"))
            at += length
        return names

    def _blocks(self, codes: str, section: Section, rows: int) -> Blocks:
        place = self.header.sections[section]
        fences = Section.NUMBER_FENCES if section == Section.NUMBERS else Section.UNIQUE_FENCES

        def read(start: int, length: int) -> bytes:
            return self._file.read(place.position + start, min(length, place.length - start))

        return Blocks(codes, self._checked(fences), rows=rows, read=read, path=self.path)

    def _checked(self, section: Section) -> bytes:
        place: Place = self.header.sections[section]
        packed = self._file.read(place.position, place.length)
        if len(packed) != place.length or crc32c(packed) != place.crc:
            raise Corruption(f"the {section.name.lower()} of {self.path} are damaged")
        return packed

    def _go_to(self, position: int) -> None:
        self._position = position
        self._head = None
        if position < self.rows_total:
            page, slot = self._place(position)
            # At the beginning of a page the index knows: a run that only waits reads nothing.
            self._head = self.page_key(page) if not slot else self.rows(position, 1).first

    def _place(self, position: int) -> tuple[int, int]:
        page = self.page_at(position)
        return page, position - self._first_rows[page]

    def _page_of(self, at_ms: int, number: int) -> int:
        """Return the last page that begins at or before (at_ms, number), or -1."""
        return _count_to(self._first_at_ms, self._first_numbers, at_ms, number) - 1

    def _page(self, number: int) -> Page:
        if self._cached is not None and self._cached[0] == number:
            return self._cached[1]
        position = self._positions[number]
        length = self._positions[number + 1] - position
        page = read_page(
            self._file.read(position, length),
            first_row=self._first_rows[number],
            count=self.page_rows(number),
            path=self.path,
        )
        if length <= _CACHED_BYTES_MAX:
            self._cached = number, page
        return page


def _count_to(at_column: Sequence[int], numbers: Sequence[int], at_ms: int, number: int) -> int:
    """Return how many rows of two sorted columns are not after (at_ms, number)."""
    low = bisect_left(at_column, at_ms)
    high = bisect_right(at_column, at_ms, lo=low)
    return bisect_right(numbers, number, lo=low, hi=high)
