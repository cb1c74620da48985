"""A batch: messages that travel and are stored together, as columns. All integers little-endian.

     0  magic       "OBAT"
     4  length      u32   the whole batch, a multiple of 8
     8  crc32c      u32   over bytes 12 .. length
    12  version     u8    1
    13  flags       u8    bits 0-1: compression (0 none, 1 zstd, 2 lz4); the others are 0
    14  columns     u16
    16  count       u32   messages, at least 1
    20  raw_bytes   u32   the column block before compression, a multiple of 8
    24  producer_id u64
    32  sequence    u64
    40  time_ms     i64   the producer's clock
    48  directory   columns x (kind u16, zero u16, length u32), kinds ascending, bodies (255) last
     .  block       each column at a multiple of 8, zero padded; perhaps compressed as a whole
     .  padding     zeros to a multiple of 8

A batch is encoded once, by the producer, and decoded once, by the consumer. What lies between
(socket, broker, disk, replicas) only calls `check_batch` and moves the bytes unchanged. Decoders
trust nothing: whatever is wrong with the bytes is a `ProtocolError`, found before memory is taken.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise, repeat
from struct import Struct
from typing import Any, Final, NamedTuple

from crc32c import crc32c

from onward.errors import InvalidRequest, MessageTooLarge, ProtocolError
from onward.message import columns as column_of
from onward.message.columns import Column
from onward.message.compression import compression_code, deflate, inflate
from onward.message.message import Message

MAGIC: Final = b"OBAT"
VERSION: Final = 1
HEADER_BYTES: Final = 48
BATCH_BYTES_MIN: Final = 64  # the header, one row of the directory, one length padded to 8
RAW_BYTES_MAX: Final = 64 * 1024 * 1024

# Far above any frame limit, far below where u32 fields would overflow.
_BLOCK_BYTES_MAX: Final = 2**31

# Every batch has a column, so the header is read together with the first row of the directory.
_HEADER: Final = Struct("<4sIIBBHIIQQqHHI")
_unpack_header = _HEADER.unpack_from
_new_tuple = tuple.__new__
_BEFORE_REST: Final = Struct("<4sII")
_AFTER_CRC: Final = Struct("<BBHIIQQq")
_DIRECTORY: Final = Struct("<HHI")
# A row with the zeros behind its kind as one number: the kind itself, if they are zeros.
_rows_of = Struct("<II").iter_unpack
_PADDED: Final = range(8)
_PADDING: Final = tuple(bytes(-size % 8) for size in range(8))

Buffer = bytes | bytearray | memoryview


class BatchHeader(NamedTuple):
    """What the first 48 bytes of a batch say; `read_header` has checked them and the directory."""

    length: int
    crc: int
    flags: int
    columns: int
    count: int  # type: ignore[assignment]  # a tuple has a method of this name; nobody misses it
    raw_bytes: int
    producer_id: int
    sequence: int
    time_ms: int


def encode_batch(
    bodies: Sequence[bytes],
    *,
    keys: Sequence[str | None] | None = None,
    headers: Sequence[Mapping[str, str | bytes] | None] | None = None,
    tags: Sequence[str | None] | None = None,
    trace_ids: Sequence[str | None] | None = None,
    due_at_ms: Sequence[int | None] | None = None,
    priorities: Sequence[int | None] | None = None,
    tenants: Sequence[str | None] | None = None,
    topics: Sequence[str | None] | None = None,
    uniques: Sequence[str | None] | None = None,
    replaces: Sequence[int | None] | None = None,
    schedule_ids: Sequence[int | None] | None = None,
    delays_ms: Sequence[int | None] | None = None,
    producer_id: int = 0,
    sequence: int = 0,
    time_ms: int = 0,
    compression: str | None = None,
) -> bytes:
    """Return the bytes of a batch; a column that is None, or all None, is left out.

    >>> batch = encode_batch([b"hello", b"world"], keys=["a", None])
    >>> decode_batch(batch, raw_bytes_max=1000).keys
    ['a', None]
    """
    count = len(bodies)
    if not count:
        raise InvalidRequest("a batch has at least one message")
    optional: tuple[tuple[int, Sequence[Any] | None, Callable[[Any], bytes]], ...] = (
        (1, keys, column_of.pack_texts),
        (2, headers, column_of.pack_headers),
        (3, tags, column_of.pack_texts),
        (4, trace_ids, column_of.pack_texts),
        (5, due_at_ms, column_of.pack_instants),
        (6, priorities, column_of.pack_priorities),
        (7, tenants, column_of.pack_texts),
        (8, topics, column_of.pack_texts),
        (9, uniques, column_of.pack_texts),
        (10, replaces, column_of.pack_numbers),
        (11, schedule_ids, column_of.pack_numbers),
        (12, delays_ms, column_of.pack_instants),
    )
    packed: list[tuple[int, tuple[bytes, ...]]] = [
        (kind, (pack(values),))
        for kind, values, pack in optional
        if values is not None and _is_given(values, kind, count)
    ]
    packed.append((255, column_of.pack_bodies(bodies)))
    return join_columns(
        packed, compression_code(compression), count, producer_id, sequence, time_ms
    )


def join_columns(
    packed: list[tuple[int, tuple[bytes, ...]]],
    compression: int,
    count: int,
    producer_id: int,
    sequence: int,
    time_ms: int,
) -> bytes:
    """Return the bytes of a batch whose columns (kind, parts) are packed already, bodies last.

    >>> join_columns([(255, (bytes(4), b""))], 0, 1, 0, 0, 0) == encode_batch([b""])
    True
    """
    directory: list[bytes] = []
    parts: list[bytes] = []
    raw_bytes = 0
    for kind, column in packed:
        size = sum(map(len, column))
        if size > _BLOCK_BYTES_MAX - raw_bytes:
            raise MessageTooLarge(f"a batch holds at most {_BLOCK_BYTES_MAX} bytes")
        directory.append(_DIRECTORY.pack(kind, 0, size))
        parts += (*column, _PADDING[size % 8])
        raw_bytes += (size + 7) & ~7
    if compression:
        block = deflate(b"".join(parts), code=compression)
        parts = [block, _PADDING[len(block) % 8]]
    head = _AFTER_CRC.pack(
        VERSION, compression, len(packed), count, raw_bytes, producer_id, sequence, time_ms
    )
    parts = [head, *directory, *parts]
    # The parts are joined once, at the end: the checksum goes over them one by one.
    crc = 0
    for part in parts:
        crc = crc32c(part, crc)
    return b"".join((_BEFORE_REST.pack(MAGIC, 12 + sum(map(len, parts)), crc), *parts))


def with_due_times(batch: "Batch", due_at_ms: Sequence[int]) -> bytes:
    """Return a batch that says when its messages are due, instead of after which delays.

    >>> batch = decode_batch(encode_batch([b"hello"], delays_ms=[500]), raw_bytes_max=1000)
    >>> with_due_times(batch, [7]) == encode_batch([b"hello"], due_at_ms=[7])
    True
    """
    left_out = (Column.DUE_AT_MS, Column.DELAYS_MS)
    packed = [
        (kind, (bytes(batch.column(kind) or b""),)) for kind in batch.kinds if kind not in left_out
    ]
    packed.append((Column.DUE_AT_MS, (column_of.pack_instants(due_at_ms),)))
    header = batch.header
    return join_columns(
        sorted(packed), header.flags, header.count, header.producer_id, header.sequence,
        header.time_ms,
    )  # fmt: skip


def restamp(batch: Buffer, *, producer_id: int, sequence: int, time_ms: int | None = None) -> bytes:
    """Return a batch under another producer id and sequence; without `time_ms` its time stays.

    >>> batch = restamp(encode_batch([b"hello"]), producer_id=7, sequence=1)
    >>> batch == encode_batch([b"hello"], producer_id=7, sequence=1)
    True
    """
    header = check_batch(batch)
    if header.length != len(batch):
        raise ProtocolError(f"{len(batch) - header.length} bytes follow after a batch")
    head = _AFTER_CRC.pack(
        VERSION, header.flags, header.columns, header.count, header.raw_bytes, producer_id,
        sequence, header.time_ms if time_ms is None else time_ms,
    )  # fmt: skip
    rest = memoryview(batch)[HEADER_BYTES:]
    crc = crc32c(rest, crc32c(head))
    return b"".join((_BEFORE_REST.pack(MAGIC, header.length, crc), head, rest))


def check_batch(buffer: Buffer, start: int = 0, *, end: int | None = None) -> BatchHeader:
    """Return the header of the batch at `start` when the whole batch is sound, checksum included.

    The broker calls this once for each batch that it receives; it never looks further inside.

    >>> check_batch(encode_batch([b"hello", b"world"])).count
    2
    """
    header = read_header(buffer, start, len(buffer) if end is None else end)
    stop = start + header[0]
    # Copying a few bytes is cheaper than making two views of them.
    rest = buffer[start + 12 : stop] if header[0] < 2048 else memoryview(buffer)[start + 12 : stop]
    crc = crc32c(rest)
    if crc != header[1]:
        raise ProtocolError(f"checksum of a batch is {crc:#010x}, but it says {header[1]:#010x}")
    return header


def read_header(buffer: Buffer, start: int, end: int) -> BatchHeader:
    """Return the header at `start` when header and directory are sound, whatever the checksum.

    >>> read_header(encode_batch([b"hello"]), 0, 72).count
    1
    """
    room = end - start
    if room < BATCH_BYTES_MIN:
        raise ProtocolError(f"a batch has at least {BATCH_BYTES_MIN} bytes, here are {room}")
    # fmt: off
    (magic, length, crc, version, flags, columns, count, raw_bytes, producer_id, sequence, time_ms,
     kind, zero, size) = _unpack_header(buffer, start)
    # fmt: on
    if (
        magic != b"OBAT"
        or version != 1
        or length > room
        or flags > 2
        or not count
        or (length | raw_bytes) & 7
        or (48 + 8 * columns + raw_bytes != length and not flags)
    ):
        raise _header_fault(buffer, start, room)
    if columns != 1:
        if 48 + 8 * columns > length:
            raise _header_fault(buffer, start, room)
        if not directory_fits(buffer, start + 48, columns, count, raw_bytes):
            raise _directory_fault(buffer, start, columns)
    elif kind != 255 or zero or size < 4 * count or raw_bytes - size not in _PADDED:
        raise ProtocolError("the directory of a batch does not fit its columns")
    # Half the cost of calling the class, and this runs for every batch.
    return _new_tuple(
        BatchHeader, (length, crc, flags, columns, count, raw_bytes, producer_id, sequence, time_ms)
    )


def directory_fits(buffer: Buffer, at: int, columns: int, count: int, raw_bytes: int) -> bool:
    """Return True if the directory at `at` is in order, and its columns fill the block exactly.

    >>> batch = encode_batch([b"hello"], keys=["a"])
    >>> directory_fits(batch, HEADER_BYTES, columns=2, count=1, raw_bytes=len(batch) - 64)
    True
    """
    before = filled = size = 0
    for kind, size in _rows_of(buffer[at : at + 8 * columns]):
        if kind <= before:
            return False
        before = kind
        filled += (size + 7) & ~7
    return before == 255 and filled == raw_bytes and size >= 4 * count


def batches_of(buffer: Buffer, start: int, end: int) -> Iterator[tuple[int, BatchHeader]]:
    """Walk over batches that lie back to back, without verifying their checksums.

    >>> two = encode_batch([b"a"]) + encode_batch([b"b", b"c"])
    >>> [header.count for _, header in batches_of(two, 0, len(two))]
    [1, 2]
    """
    while start < end:
        header = read_header(buffer, start, end)
        yield start, header
        start += header.length


def column_place(buffer: Buffer, start: int, header: BatchHeader, kind: int) -> slice | None:
    """Return where a column of an uncompressed batch is, from `start` on; None: it has none.

    Only the header and the directory need to be in `buffer`.

    >>> batch = encode_batch([b"a"], schedule_ids=[7])
    >>> place = column_place(batch, 0, check_batch(batch), Column.SCHEDULE_IDS)
    >>> int.from_bytes(batch[place], "little")
    7
    """
    place = _places(buffer, start, header.columns).get(kind)
    front = HEADER_BYTES + 8 * header.columns
    if place is None or header.flags:
        return None
    return slice(front + place.start, front + place.stop)


def largest_body_bytes(
    buffer: Buffer, start: int, header: BatchHeader, *, raw_bytes_max: int = RAW_BYTES_MAX
) -> int:
    """Return the size of the largest body, without making the bodies.

    Only a compressed batch of several messages must be inflated for it. `header.raw_bytes` is never
    less than the largest body: where that is small enough already, this need not be called.

    >>> batch = encode_batch([b"hello", b"hi"])
    >>> largest_body_bytes(batch, 0, check_batch(batch))
    5
    """
    if header.count == 1:
        _, _, size = _DIRECTORY.unpack_from(buffer, start + HEADER_BYTES + 8 * (header.columns - 1))
        return int(size) - 4
    batch = _open(buffer, start, header, raw_bytes_max)
    return max(batch.body_lengths.tolist())


def decode_batch(
    buffer: Buffer, start: int = 0, *, raw_bytes_max: int, verify: bool = True
) -> "Batch":
    """Return a view of the batch at `start`; its columns are unpacked when they are asked for.

    `raw_bytes_max` bounds what a compressed batch may inflate to. `verify=False` is for bytes whose
    checksum was verified with the entry around them.

    >>> decode_batch(encode_batch([b"hello", b"world"]), raw_bytes_max=1000).bodies
    [b'hello', b'world']
    """
    header = check_batch(buffer, start) if verify else read_header(buffer, start, len(buffer))
    return _open(buffer, start, header, raw_bytes_max)


class Batch:
    """A batch that was opened. Each column is unpacked at its first use and then kept.

    A column that the batch does not have is None; a value that is absent in a column is None.
    The views (`column`, `lengths`, `body_lengths`, `body_bytes`) lie in the opened buffer.
    """

    def __init__(self, header: BatchHeader, block: memoryview, places: dict[int, slice]) -> None:
        self.header = header
        self.count = header.count
        self._block = block
        self._places = places
        self._bodies: list[bytes] | None = None

    @property
    def bodies(self) -> list[bytes]:
        """The body of each message."""
        # Not a cached_property: its lock costs more than a small batch.
        if self._bodies is None:
            self._bodies = column_of.unpack_bodies(self._block[self._places[255]], count=self.count)
        return self._bodies

    @cached_property
    def keys(self) -> list[str | None] | None:
        """The key of each message."""
        return self._texts(Column.KEYS)

    @cached_property
    def headers(self) -> list[dict[str, str | bytes] | None] | None:
        """The headers of each message."""
        column = self.column(Column.HEADERS)
        return None if column is None else column_of.unpack_headers(column, count=self.count)

    @cached_property
    def tags(self) -> list[str | None] | None:
        """The tags of each message, joined with commas."""
        return self._texts(Column.TAGS)

    @cached_property
    def trace_ids(self) -> list[str | None] | None:
        """The trace id of each message."""
        return self._texts(Column.TRACE_IDS)

    @cached_property
    def due_at_ms(self) -> list[int | None] | None:
        """When each message is due."""
        column = self.column(Column.DUE_AT_MS)
        return None if column is None else column_of.unpack_instants(column, count=self.count)

    @cached_property
    def priorities(self) -> list[int] | None:
        """The priority of each message."""
        column = self.column(Column.PRIORITIES)
        return None if column is None else column_of.unpack_priorities(column, count=self.count)

    @cached_property
    def tenants(self) -> list[str | None] | None:
        """The tenant of each message."""
        return self._texts(Column.TENANTS)

    @cached_property
    def topics(self) -> list[str | None] | None:
        """The topic that each scheduled message is for."""
        return self._texts(Column.TOPICS)

    @cached_property
    def uniques(self) -> list[str | None] | None:
        """The business key of each scheduled message."""
        return self._texts(Column.UNIQUES)

    @cached_property
    def replaces(self) -> list[int | None] | None:
        """The schedule id that each scheduled message takes the place of; -1: of none."""
        return self._numbers(Column.REPLACES)

    @cached_property
    def schedule_ids(self) -> list[int | None] | None:
        """The schedule id that each message had while it waited."""
        return self._numbers(Column.SCHEDULE_IDS)

    @cached_property
    def delays_ms(self) -> list[int | None] | None:
        """After how long each scheduled message is due; only until a broker has accepted it."""
        return self._numbers(Column.DELAYS_MS)

    @property
    def kinds(self) -> tuple[int, ...]:
        """The kinds of the columns that are there, in their order."""
        return tuple(self._places)

    def column(self, kind: int) -> memoryview | None:
        """The bytes of a column as they lie in the batch, also of a kind that we do not know."""
        place = self._places.get(kind)
        return None if place is None else self._block[place]

    def lengths(self, kind: int) -> memoryview | None:
        """The lengths of a variable column, in place, as u32; 0xFFFFFFFF is an absent value."""
        column = self.column(kind)
        return None if column is None else column_of.lengths_of(column, count=self.count)

    @cached_property
    def body_lengths(self) -> memoryview:
        """The length of each body, in place, as u32; they add up to the size of `body_bytes`."""
        column = self._block[self._places[255]]
        lengths = column_of.lengths_of(column, count=self.count)
        if sum(lengths.tolist()) != len(column) - 4 * self.count:
            raise ProtocolError("the lengths of the bodies do not add up to their bytes")
        return lengths

    @property
    def body_bytes(self) -> memoryview:
        """All bodies back to back, in place."""
        return self._block[self._places[255]][4 * self.count :]

    def _texts(self, kind: int) -> list[str | None] | None:
        column = self.column(kind)
        return None if column is None else column_of.unpack_texts(column, count=self.count)

    def _numbers(self, kind: int) -> list[int | None] | None:
        column = self.column(kind)
        return None if column is None else column_of.unpack_numbers(column, count=self.count)


def messages_of(
    batch: Batch, *, topic: str, base_offset: int, published_at_ms: int, event_id: int
) -> list[Message]:
    """Return the messages of a batch whose first one has `base_offset`.

    >>> batch = decode_batch(encode_batch([b"a", b"b"]), raw_bytes_max=1000)
    >>> [m.id for m in messages_of(batch, topic="t", base_offset=5, published_at_ms=0, event_id=1)]
    ['t/5', 't/6']
    """
    always = (
        repeat(topic),
        range(base_offset, base_offset + batch.count),
        batch.bodies,
        repeat(published_at_ms),
        repeat(event_id),
    )
    if batch.header.columns == 1:
        return list(map(Message, *always))
    return list(
        map(
            Message,
            *always,
            batch.keys or repeat(None),
            batch.headers or repeat(None),
            batch.tags or repeat(None),
            batch.trace_ids or repeat(None),
            batch.due_at_ms or repeat(None),
            batch.priorities or repeat(0),
            batch.tenants or repeat(None),
            batch.schedule_ids or repeat(None),
        )
    )


def _is_given(values: Sequence[object], kind: int, count: int) -> bool:
    if len(values) != count:
        name = Column(kind).name.lower()
        raise InvalidRequest(f"{name} has {len(values)} values for {count} messages")
    return any(value is not None for value in values)


def _places(buffer: Buffer, start: int, columns: int) -> dict[int, slice]:
    """Return the place of each column in the raw block, by kind; the directory was checked."""
    at, directory = 0, start + HEADER_BYTES
    places: dict[int, slice] = {}
    for kind, size in _rows_of(buffer[directory : directory + 8 * columns]):
        places[kind] = slice(at, at + size)
        at += (size + 7) & ~7
    return places


def _open(buffer: Buffer, start: int, header: BatchHeader, raw_bytes_max: int) -> Batch:
    length, _, flags, columns, _, raw_bytes, *_ = header
    places = _places(buffer, start, columns)
    block = memoryview(buffer)[start + HEADER_BYTES + 8 * columns : start + length]
    if flags:
        if raw_bytes > raw_bytes_max:
            raise ProtocolError(
                f"a batch that inflates to {raw_bytes} bytes is over the limit of {raw_bytes_max}"
            )
        block = memoryview(inflate(block, code=flags, raw_bytes=raw_bytes))
    return Batch(header, block, places)


def _header_fault(buffer: Buffer, start: int, room: int) -> ProtocolError:
    """Say which rule the header breaks; only called when one is broken."""
    magic, length, _, version, flags, columns, count, raw_bytes, *_ = _unpack_header(buffer, start)
    if magic != MAGIC:
        return ProtocolError(f"a batch begins with {MAGIC!r}, not {magic!r}")
    if version != VERSION:
        return ProtocolError(f"batch version {version} is not known here, only {VERSION}")
    if flags > 2:
        return ProtocolError(f"batch flags {flags:#04x} are not known here")
    if not count:
        return ProtocolError("a batch has at least one message, this one has none")
    if length > room:
        return ProtocolError(f"a batch of {length} bytes is cut off after {room}")
    if (length | raw_bytes) & 7:
        return ProtocolError(
            f"the lengths {length} and {raw_bytes} of a batch are not multiples of 8"
        )
    return ProtocolError(
        f"a batch of {length} bytes does not fit {columns} columns of {raw_bytes} bytes"
    )


def _directory_fault(buffer: Buffer, start: int, columns: int) -> ProtocolError:
    """Return the error for a directory that does not fit; only called when it does not."""
    at = start + HEADER_BYTES
    kinds = [kind for kind, _ in _rows_of(buffer[at : at + 8 * columns])]
    if any(kind <= before for before, kind in pairwise([0, *kinds])):
        return ProtocolError("the directory of a batch is not in ascending order of kinds")
    return ProtocolError("the directory of a batch does not fit its columns")
