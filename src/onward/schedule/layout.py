"""The drawing of a run file: a header, then eight sections back to back. Little-endian.

    0      4         8     12     16       24      32       40         48       56
    | ORUN | version | crc | zero | rows | uniques | start | end | first at | first number
    64        72            80        88           96
    | last at | last number | step ms | file bytes | sections x (kind, crc, position, length) |

    pages            records, sorted by (at_ms, number); each page is a batch with its own checksum
    numbers          blocks of rows sorted by number: where each record is in time
    uniques          blocks of rows sorted by the hash of the business key
    page index       first (at_ms, number), position and first row of each page
    number fences    first key and checksum of each block of numbers
    unique fences    the same for the uniques
    topics           the names that records point into
    counts           how many records fall into each step of time, by topic

The header's checksum is over all of it behind the field. The sections that every use begins with
(page index, fences, topics) have theirs in the table and are verified when a run is opened; pages
and blocks are verified when they are read. `start` and `end` are the stretch of numbers that the
run stands for: numbers of it that are not here were gone when it was written.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import Final, NamedTuple

from crc32c import crc32c

from onward.errors import Corruption
from onward.log.disk import Buffer

MAGIC: Final = b"ORUN"
VERSION: Final = 1
PAGE_BYTES: Final = 64 * 1024
"""What a page aims at; a record that is larger has a page of its own."""
BLOCK_ROWS: Final = 1_024
ROWS_MAX: Final = 5 * 1024 * 1024
"""A run that is merged from others ends about here, and a next one begins."""

# Columns that only the pages of a run have.
AT_MS: Final = 240
TOPIC_NUMBERS: Final = 241

_HEADER: Final = Struct("<4sIIIQQQQqQqQqQ")
_SECTION: Final = Struct("<IIQQ")
_CRC_END: Final = 12

Key = tuple[int, int]
"""(at_ms, number): the order in which records fire."""


class Section(IntEnum):
    """The parts of a run file, in the order in which they stand."""

    PAGES = 1
    NUMBERS = 2
    UNIQUES = 3
    PAGE_INDEX = 4
    NUMBER_FENCES = 5
    UNIQUE_FENCES = 6
    TOPICS = 7
    COUNTS = 8


HEADER_BYTES: Final = _HEADER.size + len(Section) * _SECTION.size


class Place(NamedTuple):
    """Where a section stands; `crc` is 0 for those whose parts have checksums of their own."""

    crc: int
    position: int
    length: int


class Header(NamedTuple):
    """What the first bytes of a run file say."""

    rows: int
    uniques: int
    start: int
    end: int
    first: Key
    last: Key
    step_ms: int
    file_bytes: int
    sections: dict[Section, Place]


def pack_header(header: Header) -> bytes:
    """Return the bytes of a header.

    >>> places = {one: Place(0, HEADER_BYTES, 0) for one in Section}
    >>> header = Header(0, 0, 5, 9, (1, 5), (2, 8), 1000, HEADER_BYTES, places)
    >>> unpack_header(pack_header(header), path="a") == header
    True
    """
    rest = _HEADER.pack(
        MAGIC, VERSION, 0, 0, header.rows, header.uniques, header.start, header.end,
        *header.first, *header.last, header.step_ms, header.file_bytes,
    )[_CRC_END:]  # fmt: skip
    table = [
        _SECTION.pack(kind, place.crc, place.position, place.length)
        for kind, place in sorted(header.sections.items())
    ]
    rest = b"".join([rest, *table])
    return _HEADER.pack(MAGIC, VERSION, crc32c(rest), *(0,) * 11)[:_CRC_END] + rest


def unpack_header(buffer: Buffer, *, path: str) -> Header:
    """Return the header at the beginning of `buffer`, or say that it is none: `Corruption`."""
    if len(buffer) < HEADER_BYTES:
        raise Corruption(f"{path} is too short for a run: {len(buffer)} bytes")
    (magic, version, crc, zero, rows, uniques, start, end, first_at, first_number, last_at,
     last_number, step_ms, file_bytes) = _HEADER.unpack_from(buffer)  # fmt: skip
    if magic != MAGIC or version != VERSION or zero:
        raise Corruption(f"{path} does not begin like a run of version {VERSION}")
    if crc32c(memoryview(buffer)[_CRC_END:HEADER_BYTES]) != crc:
        raise Corruption(f"the header of {path} has a wrong checksum")
    table = memoryview(buffer)[_HEADER.size : HEADER_BYTES]
    sections = {
        Section(kind): Place(section_crc, position, length)
        for kind, section_crc, position, length in _SECTION.iter_unpack(table)
    }
    return Header(
        rows, uniques, start, end, (first_at, first_number), (last_at, last_number), step_ms,
        file_bytes, sections,
    )  # fmt: skip
