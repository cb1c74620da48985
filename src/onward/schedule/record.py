"""Records: scheduled messages as columns, in memory, on their way from the log to their topics.

A record is one row of all columns. Values stay the bytes that the producer packed: nothing is
decoded that only passes through. Everything works on whole columns (`map`, slices, `join`); a
loop over messages would be most of the cost of a burst.

    batch of `@schedule`  --records_of-->  Records  --run files and back-->  Records
    Records of one topic  --encode_fired-->  an ordinary batch, with due_at_ms and schedule ids

`at_ms` is when a record fires: its due time, but not before its entry was written. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from onward.errors import ProtocolError
from onward.message.batch import Batch, join_columns
from onward.message.columns import (
    NO_INSTANT,
    Column,
    lengths_of,
    pack_bodies,
    pack_optional,
    unpack_optional,
    unpack_texts,
)
from onward.message.headers import decode_headers

OPTIONAL: Final = (
    Column.KEYS,
    Column.HEADERS,
    Column.TAGS,
    Column.TRACE_IDS,
    Column.TENANTS,
    Column.UNIQUES,
)
"""The variable columns that a record may have, besides its body."""

_FIXED_BYTES: Final = 40

Values = list[bytes | None]
Packed = list[tuple[int, tuple[bytes, ...]]]


class Record(NamedTuple):
    """One scheduled message, for people: everything decoded."""

    number: int
    at_ms: int
    due_at_ms: int
    topic: str
    body: bytes
    key: str | None = None
    headers: dict[str, str | bytes] | None = None
    tag: str | None = None
    trace_id: str | None = None
    priority: int = 0
    tenant: str | None = None
    unique: str | None = None


class Records:
    """Columns of scheduled messages; a column that no record has is not there.

    >>> records = Records([7], [50], [50], ["orders"], [b"hello"])
    >>> records.record(0).topic
    'orders'
    """

    __slots__ = ("at_ms", "bodies", "due_at_ms", "numbers", "optional", "priorities", "topics")

    def __init__(
        self,
        numbers: list[int],
        at_ms: list[int],
        due_at_ms: list[int],
        topics: list[str],
        bodies: list[bytes],
        optional: dict[int, Values] | None = None,
        priorities: list[int] | None = None,
    ) -> None:
        self.numbers = numbers
        self.at_ms = at_ms
        self.due_at_ms = due_at_ms
        self.topics = topics
        self.bodies = bodies
        self.optional: dict[int, Values] = {} if optional is None else optional
        self.priorities = priorities

    @classmethod
    def empty(cls) -> Records:
        """Return records of which there are none yet."""
        return cls([], [], [], [], [])

    @property
    def count(self) -> int:
        """How many records these are."""
        return len(self.numbers)

    def select(self, rows: Sequence[int]) -> Records:
        """Return the chosen rows, in the order in which they are named."""
        return Records(
            list(map(self.numbers.__getitem__, rows)),
            list(map(self.at_ms.__getitem__, rows)),
            list(map(self.due_at_ms.__getitem__, rows)),
            list(map(self.topics.__getitem__, rows)),
            list(map(self.bodies.__getitem__, rows)),
            {kind: list(map(one.__getitem__, rows)) for kind, one in self.optional.items()},
            None if self.priorities is None else list(map(self.priorities.__getitem__, rows)),
        )

    def slice(self, start: int, stop: int) -> Records:
        """Return the rows from `start` to before `stop`."""
        return Records(
            self.numbers[start:stop],
            self.at_ms[start:stop],
            self.due_at_ms[start:stop],
            self.topics[start:stop],
            self.bodies[start:stop],
            {kind: values[start:stop] for kind, values in self.optional.items()},
            None if self.priorities is None else self.priorities[start:stop],
        )

    def extend(self, other: Records) -> None:
        """Add the rows of `other` behind these."""
        for kind in other.optional.keys() - self.optional.keys():
            self.optional[kind] = [None] * self.count
        for kind, values in self.optional.items():
            values += other.optional.get(kind) or [None] * other.count
        if other.priorities is not None and self.priorities is None:
            self.priorities = [0] * self.count
        if self.priorities is not None:
            self.priorities += other.priorities or [0] * other.count
        self.numbers += other.numbers
        self.at_ms += other.at_ms
        self.due_at_ms += other.due_at_ms
        self.topics += other.topics
        self.bodies += other.bodies

    def sizes(self) -> list[int]:
        """Return about how many bytes each record takes on the disk."""
        sizes = [size + _FIXED_BYTES for size in map(len, self.bodies)]
        for values in self.optional.values():
            sizes = [
                size if value is None else size + len(value)
                for size, value in zip(sizes, values, strict=True)
            ]
        return sizes

    def in_order(self) -> Records:
        """Return the same records sorted by (at_ms, number)."""
        keys = list(zip(self.at_ms, self.numbers, strict=True))
        return self.select(sorted(range(self.count), key=keys.__getitem__))

    def by_topic(self) -> dict[str, Records]:
        """Return the records of each topic, in the order they have here.

        >>> records = Records([1, 2, 3], [5, 6, 7], [5, 6, 7], ["a", "b", "a"], [b"", b"", b""])
        >>> {topic: some.numbers for topic, some in records.by_topic().items()}
        {'a': [1, 3], 'b': [2]}
        """
        if len(set(self.topics)) == 1:
            return {self.topics[0]: self}
        rows: dict[str, list[int]] = {}
        for row, topic in enumerate(self.topics):
            rows.setdefault(topic, []).append(row)
        return {topic: self.select(some) for topic, some in rows.items()}

    def record(self, row: int) -> Record:
        """Return one row, decoded."""
        packed = self._value(Column.HEADERS, row)
        return Record(
            self.numbers[row],
            self.at_ms[row],
            self.due_at_ms[row],
            self.topics[row],
            self.bodies[row],
            self._text(Column.KEYS, row),
            None if packed is None else decode_headers(packed),
            self._text(Column.TAGS, row),
            self._text(Column.TRACE_IDS, row),
            0 if self.priorities is None else self.priorities[row],
            self._text(Column.TENANTS, row),
            self._text(Column.UNIQUES, row),
        )

    def __iter__(self) -> Iterator[Record]:
        return map(self.record, range(self.count))

    def _value(self, kind: int, row: int) -> bytes | None:
        values = self.optional.get(kind)
        return None if values is None else values[row]

    def _text(self, kind: int, row: int) -> str | None:
        value = self._value(kind, row)
        return None if value is None else value.decode("utf-8", "surrogateescape")


def records_of(batch: Batch, *, first_number: int, time_ms: int) -> Records:
    """Return the records of a batch of `@schedule` whose entry was written at `time_ms`.

    A row that names no topic is left out: there is nowhere to fire it to. What does not add up
    in the batch is a `ProtocolError`.
    """
    count = batch.count
    topics = topics_of(batch)
    due = due_of(batch) or [time_ms] * count
    # An absent due time is the lowest instant there is, so it fires at once as a past one does.
    at_ms = [one if one > time_ms else time_ms for one in due]
    if NO_INSTANT in due:
        due = [time_ms if one == NO_INSTANT else one for one in due]
    optional = {
        int(kind): unpack_optional(column, count=count)
        for kind in OPTIONAL
        if (column := batch.column(kind)) is not None
    }
    named = [row for row, topic in enumerate(topics) if topic is not None]
    records = Records(
        list(range(first_number, first_number + count)),
        at_ms,
        due,
        topics,  # type: ignore[arg-type]  # the rows without one are taken out below
        batch.bodies,
        optional,
        batch.priorities,
    )
    return records if len(named) == count else records.select(named)


def encode_fired(
    records: Records, *, time_ms: int, producer_id: int = 0, sequence: int = 0
) -> bytes:
    """Return the batch in which records of one topic fire: ordinary messages.

    >>> from onward.message.batch import decode_batch
    >>> records = Records([7], [50], [50], ["orders"], [b"hello"])
    >>> batch = decode_batch(encode_fired(records, time_ms=60), raw_bytes_max=1000)
    >>> (batch.bodies, batch.due_at_ms)
    ([b'hello'], [50])
    """
    packed = pack_columns(records, without=Column.UNIQUES)
    return join_columns(packed, 0, records.count, producer_id, sequence, time_ms)


def pack_columns(records: Records, *, without: int = 0) -> Packed:
    """Return the columns that batches and pages share, in ascending order, bodies last."""
    packed: Packed = [
        (kind, (pack_values(values),))
        for kind, values in records.optional.items()
        if kind != without and values.count(None) != len(values)
    ]
    packed.append((Column.DUE_AT_MS, (array("q", records.due_at_ms).tobytes(),)))
    packed.append((Column.SCHEDULE_IDS, (array("q", records.numbers).tobytes(),)))
    if records.priorities is not None and any(records.priorities):
        packed.append((Column.PRIORITIES, (bytes(records.priorities),)))
    packed.sort()
    packed.append((Column.BODIES, pack_bodies(records.bodies)))
    return packed


def pack_values(values: Values) -> bytes:
    """Pack a variable column; one in which nothing is absent is packed without a loop."""
    if None in values:
        return pack_optional(values)
    return b"".join(pack_bodies(values))  # type: ignore[arg-type]  # no None is among them


def topics_of(batch: Batch) -> list[str | None]:
    """Return the target topic of each message of a scheduled batch."""
    column = batch.column(Column.TOPICS)
    if column is None:
        raise ProtocolError("a scheduled batch does not say to which topics it goes")
    count = batch.count
    size = lengths_of(column, count=count)[0]
    # Most batches go to one topic: then one text serves all of them, here and in every copy.
    if column == size.to_bytes(4, "little") * count + bytes(column[4 * count :][:size]) * count:
        return [unpack_texts(column, count=count)[0]] * count
    return unpack_texts(column, count=count)


def due_of(batch: Batch) -> list[int] | None:
    """Return the due time of each message of a scheduled batch; None when it has none."""
    column = batch.column(Column.DUE_AT_MS)
    if column is None:
        return None
    if len(column) != 8 * batch.count:
        raise ProtocolError(f"{len(column)} bytes are not the due times of {batch.count} messages")
    return column.cast("q").tolist()
