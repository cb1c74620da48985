"""What a task does: read stretches of topics as record batches, all of each or an error.

    stretch ──▶ broker ──┬─ all of it
                         └─ OffsetOutOfRange: retention was quicker
                              ├─ fail   an error that names the lost range
                              ├─ skip   go on with what is left
                              └─ lake   the lost range from the lake, then the rest from the broker

Offsets are dense, so rows are counted: a stretch that ends early without a reason is an error too.
Runs in Spark's workers, with a connection of its own for each stretch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from onward.errors import InvalidRequest, OffsetOutOfRange
from onward.pipeline.bodies import BodyColumns
from onward.pipeline.bounds import ends_of
from onward.pipeline.columns import record_batches
from onward.pipeline.heads import is_enough, read_heads
from onward.pipeline.options import SourceOptions
from onward.pipeline.place import open_client, read_range
from onward.pipeline.planning import Stretch
from onward.pipeline.schema import MESSAGE_COLUMNS, arrow_schema, unknown_column

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

LAKE_ADVICE = "set onDataLoss=skip to go on without them, or onDataLoss=lake with a lake"


def check_schema(schema: StructType, options: SourceOptions) -> None:
    """Refuse a schema whose columns messages do not have, or have in another type."""
    names = schema.fieldNames()
    messages = schema.fields[: len(schema) - _body_width(schema, options)]
    for column in messages:
        known = MESSAGE_COLUMNS.get(column.name)
        if known is None:
            raise InvalidRequest(f"{unknown_column(column.name)} fields of bodies: bodySchema")
        if known != column.dataType:
            raise InvalidRequest(
                f"column {column.name!r} is {known.simpleString()}, "
                f"not {column.dataType.simpleString()}"
            )
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequest(
                f"column {name!r} of bodySchema has the name of a column of messages: "
                f"choose others with the option 'columns'"
            )


def read_stretches(
    options: SourceOptions, schema: StructType, stretches: Sequence[Stretch]
) -> Iterator[pa.RecordBatch]:
    """Give all messages of some stretches as record batches of that schema."""
    wanted = arrow_schema(schema)
    width = _body_width(schema, options)
    if not width:
        for stretch in stretches:
            yield from read_stretch(options, stretch, wanted)
        return
    bodies = BodyColumns(wanted, width=width, bad=options.bad_bodies)
    for stretch in stretches:
        offset = stretch.first
        for rows in read_stretch(options, stretch, bodies.read_schema):
            yield bodies.parse(rows, topic=stretch.topic, first_offset=offset)
            offset += rows.num_rows


def read_stretch(
    options: SourceOptions, stretch: Stretch, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Give the messages of one stretch; what the broker has no more is treated as asked for."""
    topic, first, end = stretch
    while first < end:
        try:
            for rows in _rows(options, Stretch(topic, first, end), schema):
                first += rows.num_rows
                yield rows
        except OffsetOutOfRange:
            lost = lost_part(options, Stretch(topic, first, end))
            if lost is None:
                raise
            yield from read_lost(options, lost, schema)
            first = lost.end
        else:
            if first < end:
                raise OffsetOutOfRange(
                    f"topic {topic!r} ended at {first}, before offset {end} that was planned"
                )


def _rows(options: SourceOptions, stretch: Stretch, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Give rows from messages, or, where their entries say it all, without reading any."""
    topic, first, end = stretch
    if is_enough(schema):
        return read_heads(options.place, topic, first, end, schema)
    found = read_range(options.place, topic, first, end)
    return record_batches(found, schema, first=first, end=end)


def lost_part(options: SourceOptions, stretch: Stretch) -> Stretch | None:
    """Return what of a stretch is not on the broker any more."""
    with open_client(options.place) as mq:
        first_offset = ends_of(mq, [stretch.topic])[stretch.topic].first_offset
    return lost_before(stretch, first_offset)


def lost_before(stretch: Stretch, first_offset: int) -> Stretch | None:
    """Return what of a stretch lies before a topic's first offset.

    >>> lost_before(Stretch("orders", 3, 10), 5)
    Stretch(topic='orders', first=3, end=5)
    """
    end = min(first_offset, stretch.end)
    return Stretch(stretch.topic, stretch.first, end) if stretch.first < end else None


def loss(lost: Stretch) -> OffsetOutOfRange:
    """Return the error that says what is lost.

    >>> str(loss(Stretch("orders", 3, 5)))[:58]
    "messages 3 to 4 of topic 'orders' are gone: retention has "
    """
    return OffsetOutOfRange(
        f"messages {lost.first} to {lost.end - 1} of topic {lost.topic!r} are gone: retention has "
        f"removed them; {LAKE_ADVICE}"
    )


def read_lost(
    options: SourceOptions, lost: Stretch, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:  # fmt: skip
    """Give what is lost from the lake, or nothing, or raise: as the options say."""
    if options.on_loss == "fail":
        raise loss(lost)
    if options.on_loss == "skip":
        return
    assert options.lake is not None, "options without a lake cannot ask for it"
    from onward.pipeline.lake_files import read_files

    first = lost.first
    for rows in read_files(options.lake, lost.topic, lost.first, lost.end, schema):
        first += rows.num_rows
        yield rows
    if first != lost.end:
        raise loss(Stretch(lost.topic, first, lost.end))


def _body_width(schema: StructType, options: SourceOptions) -> int:
    """Return how many columns at the end of a schema come from bodies."""
    if options.body_schema is None:
        return 0
    return len(schema) - len(options.columns or MESSAGE_COLUMNS)
