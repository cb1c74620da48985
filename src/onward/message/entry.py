"""One entry: the log's record of one change.

    0      4        8       12         16      24     32       40            48
    | OENT | length | crc   | previous | index | term | time   | base offset | synced index ...
    56      60      64     66        68           72
    | topic | count | kind | version | body bytes | body ... zero padding to 8 |

Little-endian. `length` is the whole entry with its padding. `crc` is crc32c over everything after
itself; `previous` is the crc of the entry before, so entries form a chain. `index` is dense over
the node: the event id. `synced index` is the highest index that was known to be on the disk when
this entry was written: a valid entry proves that everything up to it had been durable, which is
how recovery tells a torn tail from corruption.

This module only knows bytes. It never decodes a body.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

from crc32c import crc32c

from onward.errors import Corruption

MAGIC = b"OENT"
VERSION = 1
HEADER = Struct("<4sIIIQQqQQIIHHI")
HEADER_BYTES = HEADER.size
CRC_START = 12
# Below this a copy of a body is cheaper than a buffer of its own.
COPIED_BYTES_MAX = 2_048
# The header in two parts: up to the crc, and what the crc is over.
_FRONT = Struct("<4sII")
_CHECKED = Struct("<IQQqQQIIHHI")
CARRIED_TOPIC = 1 << 31
"""Added to the topic number of a CARRIED entry: its rows are none of the topic's own."""
_ZEROS = bytes(8)
_GAP_BODY = Struct("<QI4x")

Buffer = bytes | bytearray | memoryview


class Kind(IntEnum):
    """What an entry says."""

    MESSAGES = 1
    TOPIC_CREATED = 2
    TOPIC_DELETED = 3
    TOPIC_CHANGED = 4
    GAP = 5
    """Entries that are gone on purpose; the body tells up to which index, and that entry's crc."""
    GROUP_CHANGED = 6
    """A group was created, changed or deleted; the body is its record, as it is from here on."""
    RECURRING_CHANGED = 7
    RETAINED = 8
    """Retention moved the first offsets of topics; the body lists them."""
    LINEAGE = 10
    """A node was promoted, or stepped down; the body says which history begins or ends here."""
    CARRIED = 9
    """Messages that outlive retention, because groups need them; the body is whole entries."""


class Draft(NamedTuple):
    """An entry before the log gives it an index."""

    kind: Kind
    time_ms: int
    topic: int
    base_offset: int
    count: int  # type: ignore[assignment]
    parts: Sequence[Buffer]


class Entry(NamedTuple):
    """An entry's header, read."""

    position: int
    length: int
    crc: int
    previous_crc: int
    index: int  # type: ignore[assignment]
    term: int
    time_ms: int
    base_offset: int
    synced_index: int
    topic: int
    count: int  # type: ignore[assignment]
    kind: int
    body_bytes: int

    @property
    def end(self) -> int:
        """Return the position after this entry."""
        return self.position + self.length

    @property
    def body_position(self) -> int:
        """Return where the body begins."""
        return self.position + HEADER_BYTES


def encode_entry(
    draft: Draft, *, index: int, term: int, previous_crc: int, synced_index: int
) -> tuple[list[Buffer], int, int]:
    """Return the buffers of an entry, its length and its crc.

    >>> draft = Draft(Kind.TOPIC_DELETED, 0, 1, 0, 0, [b"{}"])
    >>> buffers, length, crc = encode_entry(
    ...     draft, index=1, term=0, previous_crc=0, synced_index=0)
    >>> length == sum(map(len, buffers)) == 80
    True
    """
    buffers, [entry] = encode_entries(
        [draft], position=0, index=index, term=term, previous_crc=previous_crc,
        synced_index=synced_index,
    )  # fmt: skip
    return buffers, entry.length, entry.crc


def encode_entries(
    drafts: Iterable[Draft], *, position: int, index: int, term: int, previous_crc: int,
    synced_index: int,
) -> tuple[list[Buffer], list[Entry]]:  # fmt: skip
    """Return the buffers of entries that stand back to back from `position` on, and their headers.

    Small bodies are copied together, so that a commit to many topics is one buffer; a large one is
    not copied: it stays a buffer of its own. One loop without calls of our own, and tuples made
    without their constructors: a commit to many topics has an entry for each message, and this is
    most of what it costs.
    """
    buffers: list[Buffer] = []
    joined: list[Buffer] = []
    entries: list[Entry] = []
    pack_front, pack_checked, new_tuple = _FRONT.pack, _CHECKED.pack, tuple.__new__
    crc = previous_crc
    for kind, time_ms, topic, base_offset, count, parts in drafts:
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        body_bytes = len(body)
        padding = -body_bytes & 7
        length = HEADER_BYTES + body_bytes + padding
        previous_crc = crc
        checked = pack_checked(
            previous_crc, index, term, time_ms, base_offset, synced_index, topic, count, kind,
            VERSION, body_bytes,
        )  # fmt: skip
        if body_bytes < COPIED_BYTES_MAX:
            checked += body
            if padding:
                checked += _ZEROS[:padding]
            crc = crc32c(checked)
            joined.append(pack_front(MAGIC, length, crc))
            joined.append(checked)
        else:
            zeros = _ZEROS[:padding]
            crc = crc32c(zeros, crc32c(body, crc32c(checked)))
            joined += pack_front(MAGIC, length, crc), checked
            buffers += b"".join(joined), body
            joined = [zeros]
        entries.append(
            new_tuple(
                Entry,
                (
                    position, length, crc, previous_crc, index, term, time_ms, base_offset,
                    synced_index, topic, count, kind, body_bytes,
                ),
            )
        )  # fmt: skip
        index += 1
        position += length
    if rest := b"".join(joined):
        buffers.append(rest)
    return buffers, entries


def read_entry(buffer: Buffer, start: int, *, position: int) -> Entry | None:
    """Return the valid entry at `start` of `buffer`, or None when there is none.

    `position` is where `buffer` begins in its segment.
    """
    entry = read_header(buffer, start, position=position)
    if entry is None or start + entry.length > len(buffer):
        return None
    view = memoryview(buffer)[start + CRC_START : start + entry.length]
    return entry if crc32c(view) == entry.crc else None


def read_header(buffer: Buffer, start: int, *, position: int) -> Entry | None:
    """Return the header at `start` if it looks like one; the crc is not checked."""
    if start + HEADER_BYTES > len(buffer):
        return None
    (magic, length, crc, previous, index, term, time_ms, base, synced, topic, count, kind, version,
     body_bytes) = HEADER.unpack_from(buffer, start)  # fmt: skip
    if (
        magic != MAGIC
        or version != VERSION
        or length != HEADER_BYTES + body_bytes + -body_bytes % 8
    ):
        return None
    return Entry(
        position + start, length, crc, previous, index, term, time_ms, base, synced, topic, count,
        kind, body_bytes,
    )  # fmt: skip


def entry_heads(entries: Buffer) -> Iterator[Entry]:
    """Walk over the headers of entries that stand back to back; bodies are not looked at.

    >>> list(entry_heads(b""))
    []
    """
    start, end = 0, len(entries)
    while start < end:
        entry = read_header(entries, start, position=0)
        if entry is None or entry.end > end:
            raise Corruption(f"no valid entry at byte {start} of {end} received")
        yield entry
        start = entry.end


def encode_gap(*, last_index: int, last_crc: int) -> bytes:
    """Return the body of a gap: what the next entry's chain refers to."""
    return _GAP_BODY.pack(last_index, last_crc)


def decode_gap(body: Buffer) -> tuple[int, int]:
    """Return (last index, its crc) of a gap.

    >>> decode_gap(encode_gap(last_index=9, last_crc=7))
    (9, 7)
    """
    if len(body) < _GAP_BODY.size:
        raise Corruption("the body of a gap entry is too short")
    last_index, last_crc = _GAP_BODY.unpack_from(body)
    return last_index, last_crc
