"""Between the columns of a batch and those of Arrow, in both directions.

A batch has lengths and joined bytes, Arrow has offsets and joined bytes: so lengths are added up
and the bytes stay as they are. The columns of all batches of a stretch are joined first, so that
small batches cost a join, and nothing here loops over messages; only distinct headers are looked
at one by one.

    ReadBatch ... ──record_batches──▶ RecordBatch          the source, the archive
    RecordBatch ──encode_messages──▶ EncodedPiece ...      the sink

What is absent in a batch is null in Arrow. Times are milliseconds here, microseconds there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from struct import pack
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from onward.client.reader import ReadBatch
from onward.errors import InvalidRequest, ProtocolError
from onward.message.batch import join_columns
from onward.message.columns import ABSENT, NO_INSTANT, Column
from onward.message.headers import decode_headers, encode_headers
from onward.message.names import check_topic_name

SCHEDULE_TOPIC = "@schedule"
PIECE_BYTES_MAX = 1 << 20
FIRED = 1 << 63
"""The producer of what the schedule fired: no client's id is that large."""

_ABSENT = pack("<I", ABSENT)
_NO_INSTANT = pack("<q", NO_INSTANT)
_TEXTS = {"key": Column.KEYS, "tag": Column.TAGS, "trace_id": Column.TRACE_IDS,
          "tenant": Column.TENANTS}  # fmt: skip


# --- from batches to Arrow -------------------------------------------------------------------


def record_batches(
    stretches: Iterator[list[ReadBatch]], schema: pa.Schema, *, first: int, end: int
) -> Iterator[pa.RecordBatch]:
    """Give the messages from `first` to before `end` as record batches of that schema."""
    for stretch in stretches:
        rows = record_batch(stretch, schema)
        begin = stretch[0].first_offset
        last = stretch[-1]
        skip = max(0, first - begin)
        keep = rows.num_rows - skip - max(0, last.first_offset + last.count - end)
        if keep > 0:
            yield rows.slice(skip, keep) if keep < rows.num_rows else rows


def record_batch(stretch: Sequence[ReadBatch], schema: pa.Schema) -> pa.RecordBatch:
    """Return all messages of some batches of one topic as one record batch."""
    count = sum(batch.columns.count for batch in stretch)
    arrays = [_MAKERS[field.name](stretch, count).cast(field.type, safe=False) for field in schema]
    whole = pa.RecordBatch.from_arrays(arrays, schema=schema)
    # The first batch is whole; its reader may begin in the middle of it.
    skipped = stretch[0].columns.count - stretch[0].count
    return whole.slice(skipped) if skipped else whole


def _topics(stretch: Sequence[ReadBatch], count: int) -> pa.Array:
    return pa.repeat(pa.scalar(stretch[0].topic, pa.string()), count)


def _offsets(stretch: Sequence[ReadBatch], count: int) -> pa.Array:
    runs: list[tuple[int, int]] = []
    for batch in stretch:
        last = batch.first_offset + batch.count
        first = last - batch.columns.count
        if runs and runs[-1][1] == first:
            runs[-1] = runs[-1][0], last
        else:
            runs.append((first, last))
    arrays = [pa.arange(first, last) for first, last in runs]
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)


def _event_ids(stretch: Sequence[ReadBatch], count: int) -> pa.Array:
    return constants([(batch.event_id, batch.columns.count) for batch in stretch])


def _published(stretch: Sequence[ReadBatch], count: int) -> pa.Array:
    return moments(constants([(b.published_at_ms, b.columns.count) for b in stretch]))


def _producers(stretch: Sequence[ReadBatch], count: int) -> pa.Array:
    ids = [(batch.columns.header.producer_id, batch.columns.count) for batch in stretch]
    if not any(number >= FIRED for number, _ in ids):
        return constants(ids)
    known = constants([(-1 if number >= FIRED else number, rows) for number, rows in ids])
    return pc.if_else(pc.equal(known, -1), pa.scalar(None, pa.int64()), known)


def constants(runs: Sequence[tuple[int, int]]) -> pa.Array:
    """Return numbers that come many times one after another: pairs of number and how often.

    >>> constants([(7, 2), (8, 1)]).to_pylist()
    [7, 7, 8]
    """
    numbers = b"".join([pack("<q", number) * count for number, count in runs])
    return pa.Array.from_buffers(pa.int64(), len(numbers) // 8, [None, pa.py_buffer(numbers)])


def moments(milliseconds: pa.Array) -> pa.Array:
    """Return times as Spark has them.

    >>> str(moments(pa.array([1])).type)
    'timestamp[us, tz=UTC]'
    """
    return pc.multiply(milliseconds, 1000).cast(pa.timestamp("us", "UTC"))


def _bodies(stretch: Sequence[ReadBatch], count: int) -> pa.Array:
    return _variable(stretch, Column.BODIES, pa.binary())


def _texts(kind: Column) -> Callable[[Sequence[ReadBatch], int], pa.Array]:
    def make(stretch: Sequence[ReadBatch], count: int) -> pa.Array:
        if not _has(stretch, kind):
            return pa.nulls(count, pa.string())
        return _variable(stretch, kind, pa.string())

    return make


def _has(stretch: Sequence[ReadBatch], kind: Column) -> bool:
    return any(kind in batch.columns.kinds for batch in stretch)


def _variable(stretch: Sequence[ReadBatch], kind: Column, type_: pa.DataType) -> pa.Array:
    """Return a variable column of all batches: lengths become offsets, bytes are joined."""
    lengths: list[bytes | memoryview] = []
    values: list[memoryview] = []
    rows, ends = [0], [0]
    for batch in stretch:
        count = batch.columns.count
        column = batch.columns.column(kind)
        if column is None:
            lengths.append(_ABSENT * count)
            ends.append(ends[-1])
        else:
            if 4 * count > len(column):
                raise _unreadable(batch)
            lengths.append(column[: 4 * count])
            values.append(column[4 * count :])
            ends.append(ends[-1] + len(column) - 4 * count)
        rows.append(rows[-1] + count)
    sizes = pa.Array.from_buffers(pa.uint32(), rows[-1], [None, pa.py_buffer(b"".join(lengths))])
    sizes, validity = (sizes, None) if kind == Column.BODIES else _without_absent(sizes)
    sums = pc.cumulative_sum(sizes.cast(pa.int64()))
    places = pa.concat_arrays([pa.array([0], pa.int64()), sums])
    found = places.take(pa.array(rows, pa.int64())).to_pylist()
    if found != ends:
        wrong = next(n for n, at in enumerate(found) if at != ends[n])
        raise _unreadable(stretch[wrong - 1])
    joined = values[0] if len(values) == 1 else b"".join(values)
    offsets = places.cast(pa.int32()).buffers()[1]
    return pa.Array.from_buffers(type_, rows[-1], [validity, offsets, pa.py_buffer(joined)])


def _without_absent(sizes: pa.Array) -> tuple[pa.Array, pa.Buffer | None]:
    """Return the lengths with 0 for what is absent, and the bits that say what is there."""
    if pc.max(sizes).as_py() != ABSENT:
        return sizes, None
    present = pc.not_equal(sizes, ABSENT)
    return pc.if_else(present, sizes, pa.scalar(0, pa.uint32())), present.buffers()[1]


def _unreadable(batch: ReadBatch) -> ProtocolError:
    return ProtocolError(
        f"the batch at offset {batch.first_offset} of topic {batch.topic!r} cannot be read: its "
        f"lengths do not add up to its bytes"
    )


def _headers(stretch: Sequence[ReadBatch], count: int) -> pa.Array:
    type_ = pa.map_(pa.string(), pa.binary())
    if not _has(stretch, Column.HEADERS):
        return pa.nulls(count, type_)
    coded = _variable(stretch, Column.HEADERS, pa.binary()).dictionary_encode()
    pairs = [
        [(_as_bytes(name), _as_bytes(value)) for name, value in decode_headers(one).items()]
        for one in coded.dictionary.to_pylist()
    ]
    found = pa.array(pairs, pa.map_(pa.binary(), pa.binary()))
    # Names are as they were published, like keys: what is no UTF-8 makes nothing unreadable.
    names = found.keys.view(pa.string())
    return pa.MapArray.from_arrays(found.offsets, names, found.items, type_).take(coded.indices)


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value


def _dues(stretch: Sequence[ReadBatch], count: int) -> pa.Array:
    if not _has(stretch, Column.DUE_AT_MS):
        return pa.nulls(count, pa.timestamp("us", "UTC"))
    return moments(_numbers(stretch, Column.DUE_AT_MS))


def _schedule_ids(stretch: Sequence[ReadBatch], count: int) -> pa.Array:
    if not _has(stretch, Column.SCHEDULE_IDS):
        return pa.nulls(count, pa.int64())
    return _numbers(stretch, Column.SCHEDULE_IDS)


def _numbers(stretch: Sequence[ReadBatch], kind: Column) -> pa.Array:
    joined = _fixed(stretch, kind, 8, _NO_INSTANT)
    numbers = pa.Array.from_buffers(pa.int64(), len(joined) // 8, [None, pa.py_buffer(joined)])
    absent = pc.equal(numbers, NO_INSTANT)
    return pc.if_else(absent, pa.scalar(None, pa.int64()), numbers)


def _priorities(stretch: Sequence[ReadBatch], count: int) -> pa.Array:
    if not _has(stretch, Column.PRIORITIES):
        return pa.repeat(pa.scalar(0, pa.int32()), count)
    joined = _fixed(stretch, Column.PRIORITIES, 1, b"\0")
    return pa.Array.from_buffers(pa.uint8(), len(joined), [None, pa.py_buffer(joined)])


def _fixed(stretch: Sequence[ReadBatch], kind: Column, width: int, absent: bytes) -> bytes:
    parts: list[bytes | memoryview] = []
    for batch in stretch:
        column = batch.columns.column(kind)
        if column is not None and len(column) != width * batch.columns.count:
            raise _unreadable(batch)
        parts.append(absent * batch.columns.count if column is None else column)
    return b"".join(parts)


_MAKERS: dict[str, Callable[[Sequence[ReadBatch], int], pa.Array]] = {
    "topic": _topics,
    "offset": _offsets,
    "event_id": _event_ids,
    "body": _bodies,
    "headers": _headers,
    "published_at": _published,
    "due_at": _dues,
    "producer": _producers,
    "priority": _priorities,
    "schedule_id": _schedule_ids,
    **{name: _texts(kind) for name, kind in _TEXTS.items()},
}


# --- from Arrow to batches -------------------------------------------------------------------


class EncodedPiece(NamedTuple):
    """Messages for one topic, encoded as a batch that has no producer yet."""

    topic: str
    count: int  # type: ignore[assignment]  # of messages, not of equal fields in a tuple
    packed: bytes


def encode_messages(
    rows: pa.RecordBatch, *, topic: str | None = None, bytes_max: int = PIECE_BYTES_MAX
) -> list[EncodedPiece]:
    """Return the rows as encoded batches: one or a few for each topic, in the order of the rows.

    Rows without a `topic` go to `topic`; rows with a `due_at` go to the schedule.

    >>> rows = pa.RecordBatch.from_pydict({"body": [b"a", b"b"], "topic": ["x", "y"]})
    >>> [(piece.topic, piece.count) for piece in encode_messages(rows)]
    [('x', 1), ('y', 1)]
    """
    if not rows.num_rows:
        return []
    columns = {name: rows.column(name) for name in rows.schema.names}
    bodies = columns["body"]
    if bodies.null_count:
        raise InvalidRequest(f"column 'body' is null in {bodies.null_count} rows")
    targets = _targets(columns.pop("topic", None), topic, rows.num_rows)
    pieces: list[EncodedPiece] = []
    for name in pc.unique(targets).to_pylist():
        check_topic_name(name)
        mine = _only(columns, pc.equal(targets, name))
        due = mine.pop("due_at", None)
        if due is None or due.null_count == len(due):
            pieces += _pieces(name, mine, bytes_max)
            continue
        waits = pc.is_valid(due)
        if due.null_count:
            pieces += _pieces(name, _only(mine, pc.invert(waits)), bytes_max)
        waiting = _only({**mine, "due_at": due}, waits)
        waiting["topic"] = pa.repeat(pa.scalar(name, pa.string()), len(waiting["body"]))
        pieces += _pieces(SCHEDULE_TOPIC, waiting, bytes_max)
    return pieces


def _targets(given: pa.Array | None, topic: str | None, count: int) -> pa.Array:
    if given is None or given.null_count == count:
        if topic is None:
            raise InvalidRequest("column 'topic' is null; give every row a topic, or all by option")
        return pa.repeat(pa.scalar(topic, pa.string()), count)
    if given.null_count:
        if topic is None:
            raise InvalidRequest(f"column 'topic' is null in {given.null_count} rows")
        return pc.fill_null(given, topic)
    return given


def _only(columns: dict[str, pa.Array], chosen: pa.Array) -> dict[str, pa.Array]:
    if pc.all(chosen).as_py():
        return dict(columns)
    return {name: column.filter(chosen) for name, column in columns.items()}


def _pieces(topic: str, columns: dict[str, pa.Array], bytes_max: int) -> list[EncodedPiece]:
    """Cut the rows in halves until each piece is small enough."""
    count = len(columns["body"])
    if count > 1 and sum(column.nbytes for column in columns.values()) > bytes_max:
        half = count // 2
        front = {name: column.slice(0, half) for name, column in columns.items()}
        back = {name: column.slice(half) for name, column in columns.items()}
        return _pieces(topic, front, bytes_max) + _pieces(topic, back, bytes_max)
    packed = [(kind, parts) for kind, parts in _packed(topic, columns) if parts]
    return [EncodedPiece(topic, count, join_columns(packed, 0, count, 0, 0, 0))]


def _packed(topic: str, columns: dict[str, pa.Array]) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Give the columns in the order in which they lie in a batch; absent ones have no parts."""
    yield Column.KEYS, _pack_texts(columns.get("key"))
    yield Column.HEADERS, _pack_headers(columns.get("headers"))
    yield Column.TAGS, _pack_texts(columns.get("tag"))
    yield Column.TRACE_IDS, _pack_texts(columns.get("trace_id"))
    yield Column.DUE_AT_MS, _pack_dues(columns.get("due_at"))
    yield Column.PRIORITIES, _pack_priorities(columns.get("priority"))
    yield Column.TENANTS, _pack_texts(columns.get("tenant"))
    if topic == SCHEDULE_TOPIC:
        yield Column.TOPICS, _pack_texts(columns["topic"])
        yield Column.UNIQUES, _pack_texts(columns.get("unique"))
    yield Column.BODIES, _pack_variable(columns["body"])


def _pack_texts(texts: pa.Array | None) -> tuple[Any, ...]:
    return () if texts is None or texts.null_count == len(texts) else _pack_variable(texts)


def _pack_variable(values: pa.Array) -> tuple[Any, ...]:
    """Return lengths and joined bytes; both lie in the array already, but for nulls."""
    if values.type != pa.binary():
        values = values.cast(pa.binary())
    sizes = pc.binary_length(values).cast(pa.uint32())
    lengths = pc.fill_null(sizes, ABSENT) if sizes.null_count else sizes
    if values.null_count:
        values = values.drop_null()
    _, offsets, joined = values.buffers()
    if joined is None or not len(values):
        return _bytes_of(lengths), b""
    places = pa.Array.from_buffers(pa.int32(), values.offset + len(values) + 1, [None, offsets])
    begin, end = places[values.offset].as_py(), places[values.offset + len(values)].as_py()
    return _bytes_of(lengths), memoryview(joined)[begin:end]


def _bytes_of(numbers: pa.Array) -> memoryview:
    width = numbers.type.bit_width // 8
    start = numbers.offset * width
    return memoryview(numbers.buffers()[1])[start : start + width * len(numbers)]


def _pack_headers(headers: pa.Array | None) -> tuple[Any, ...]:
    if headers is None or headers.null_count == len(headers):
        return ()
    packed = [
        None if one is None else encode_headers({k: _value(v) for k, v in one if v is not None})
        for one in headers.to_pylist()
    ]
    return _pack_variable(pa.array(packed, pa.binary()))


def _value(value: str | bytes) -> str | bytes:
    """Return text as text: what a source gave as bytes was text in most messages."""
    try:
        return value if isinstance(value, str) else value.decode()
    except UnicodeDecodeError:
        return value


def _pack_dues(dues: pa.Array | None) -> tuple[Any, ...]:
    if dues is None:
        return ()
    # Up to the next millisecond: never early.
    micro = dues.cast(pa.timestamp("us", "UTC")).cast(pa.int64())
    return (_bytes_of(pc.divide(pc.add(micro, 999), 1000)),)


def _pack_priorities(priorities: pa.Array | None) -> tuple[Any, ...]:
    if priorities is None or priorities.null_count == len(priorities):
        return ()
    try:
        return (_bytes_of(pc.fill_null(priorities, 0).cast(pa.uint8())),)
    except pa.ArrowInvalid:
        raise InvalidRequest("column 'priority' has numbers outside of 0 to 255") from None
