"""Rows of which only the entry matters: topic, offset, event id, time. No message is read for them.

The broker tells its index row by row, one row for all messages of an entry. So counting the
messages of a day, or drawing when they came, costs next to nothing, however large they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from onward.errors import OffsetOutOfRange
from onward.pipeline.columns import constants, moments
from onward.pipeline.place import Place, open_client
from onward.protocol.operations.pipeline import TopicEntry

HEAD_COLUMNS = frozenset({"topic", "offset", "event_id", "published_at"})
ROWS_MAX = 1 << 17

Part = tuple[int, TopicEntry]


def is_enough(schema: pa.Schema) -> bool:
    """Tell whether all columns of a schema are known without reading messages.

    >>> is_enough(pa.schema([("offset", pa.int64())])), is_enough(pa.schema([("key", pa.string())]))
    (True, False)
    """
    return bool(schema.names) and set(schema.names) <= HEAD_COLUMNS


def read_heads(
    place: Place, topic: str, first: int, end: int, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Give the rows of the messages from `first` to before `end`."""
    with open_client(place) as mq:
        while first < end:
            page = mq.topic_entries(topic, start=first, end=end)
            _check_dense(topic, page, first)
            for some in _portions(page, first, end):
                yield head_batch(topic, some, schema)
            first = min(page[-1].end_offset, end)


def _check_dense(topic: str, page: Sequence[TopicEntry], first: int) -> None:
    for entry in page:
        if entry.base_offset > first:
            break
        first = entry.end_offset
    else:
        if page:
            return
    raise OffsetOutOfRange(f"topic {topic!r} has no message {first}")


def _portions(page: Sequence[TopicEntry], first: int, end: int) -> Iterator[list[Part]]:
    """Cut entries to the range and gather them: pairs of how many rows, and of which entry."""
    some: list[Part] = []
    rows = 0
    for entry in page:
        begin, stop = max(entry.base_offset, first), min(entry.end_offset, end)
        while begin < stop:
            count = min(stop - begin, ROWS_MAX - rows)
            some.append((count, entry._replace(base_offset=begin)))
            begin += count
            rows += count
            if rows >= ROWS_MAX:
                yield some
                some, rows = [], 0
    if some:
        yield some


def head_batch(topic: str, some: Sequence[Part], schema: pa.Schema) -> pa.RecordBatch:
    """Return rows of neighbouring entries of one topic."""
    total = sum(count for count, _ in some)
    first = some[0][1].base_offset
    arrays = []
    for field in schema:
        if field.name == "topic":
            array = pa.repeat(pa.scalar(topic, pa.string()), total)
        elif field.name == "offset":
            array = pa.arange(first, first + total)
        elif field.name == "event_id":
            array = constants([(entry.event_id, count) for count, entry in some])
        else:
            array = moments(constants([(entry.published_at_ms, count) for count, entry in some]))
        arrays.append(array.cast(field.type, safe=False))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
