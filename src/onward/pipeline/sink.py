"""The sink: `df.write` and `df.writeStream` with the format `onward`, exactly once.

    columns   body (required), topic (or the option `topic` for all rows), key, headers, tag,
              trace_id, due_at, priority, tenant, unique
    options   topic, writeId, durability, arrow, servers, token, timeout

What is wrong with schema and options is said on the driver, before anything is written. Tasks stage
what they write and the driver publishes it when all of them are done: `ledger` says why, and how a
stream that is killed at any point neither loses nor repeats a row. A batch write that is repeated
with the same `writeId` stores nothing again. The order of the rows is kept within a partition, and
partitions come one after another. What has a `unique` key takes the place of what waits under it.
`arrow=false` writes row by row: it is there to be compared with.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    DataSourceStreamWriter,
    DataSourceWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import Row, StructType

from onward.client.receipt import DURABILITIES, DurabilityName
from onward.clock import SystemClock
from onward.durations import format_duration
from onward.errors import InvalidRequest
from onward.message.batch import decode_batch, join_columns
from onward.message.columns import ABSENT, Column, pack_numbers
from onward.message.names import check_topic_name
from onward.message.texts import UNIQUE_CHARACTERS_MAX
from onward.pipeline import ledger, staging
from onward.pipeline.brief import brief
from onward.pipeline.place import Place, open_client, place_of
from onward.pipeline.schema import arrow_schema, unknown_column
from onward.settings import ScheduleSettings

if TYPE_CHECKING:
    import pyarrow as pa

    from onward.pipeline.columns import EncodedPiece

_TEXT = ("string",)
_WHOLE = ("int", "tinyint", "smallint", "bigint")
SINK_COLUMNS: dict[str, tuple[str, ...]] = {
    "body": ("binary", "string"),
    "topic": _TEXT,
    "key": _TEXT,
    "headers": ("map<string,binary>", "map<string,string>"),
    "tag": _TEXT,
    "trace_id": _TEXT,
    "due_at": ("timestamp",),
    "priority": _WHOLE,
    "tenant": _TEXT,
    "unique": _TEXT,
}
"""The columns that may be written, and the types that each may have."""

OPTION_NAMES = ("servers", "token", "timeout", "topic", "writeId", "durability", "arrow")
_OF_SPARK = ("path", "checkpointlocation", "queryname")
_OF_KAFKA = {"kafka.bootstrap.servers": "servers", "includeheaders": ""}
"""Options of Kafka's connector: headers are written whenever there is a column of them."""
_ROWS_MAX = 10_000
AHEAD_MS_MAX = ScheduleSettings().ahead_ms_max
"""How far ahead a row may be due without asking: as far as a broker takes it that was not told."""
REPLACE_WAITING = -1
"""In the column `replaces`: take the place of whatever waits under the same key."""


@dataclass(frozen=True)
class SinkOptions:
    """How to write."""

    place: Place
    topic: str | None = None
    write_id: str | None = None
    durability: DurabilityName | None = None
    is_arrow: bool = True


def sink_options(options: Mapping[str, str]) -> SinkOptions:
    """Return what options mean, or raise what is wrong with them.

    >>> sink_options({"topic": "orders", "writeId": "load-7"}).write_id
    'load-7'
    >>> sink_options({"write_id": "load-7"})
    Traceback (most recent call last):
    onward.errors.InvalidRequest: there is no option 'write_id'; did you mean 'writeId'?
    """
    for name in options:
        _check_option(name)
    given = {
        _OF_KAFKA.get(name.lower(), name.lower()): str(value).strip()
        for name, value in options.items()
    }
    # `.save("orders")` arrives as the option `path`.
    topic = given.get("topic") or given.get("path") or None
    if topic is not None:
        check_topic_name(topic)
    durability = given.get("durability", "").lower() or None
    if durability is not None and durability not in DURABILITIES:
        raise InvalidRequest(
            f"option 'durability' is one of {', '.join(DURABILITIES)}, not {durability[:80]!r}"
        )
    arrow = given.get("arrow", "").lower() or "true"
    if arrow not in ("true", "false"):
        raise InvalidRequest(f"option 'arrow' is true or false, not {arrow[:80]!r}")
    return SinkOptions(
        place=place_of(given),
        topic=topic,
        write_id=given.get("writeid") or None,
        durability=cast("DurabilityName | None", durability),
        is_arrow=arrow == "true",
    )


def _check_option(name: str) -> None:
    known = {one.lower(): one for one in OPTION_NAMES}
    if name.lower() in {*known, *_OF_SPARK, *_OF_KAFKA}:
        return
    close = get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    hint = (
        f"did you mean {known[close[0]]!r}?" if close else f"there are: {', '.join(OPTION_NAMES)}"
    )
    raise InvalidRequest(f"there is no option {name!r}; {hint}")


def check_columns(schema: StructType, *, topic: str | None) -> None:
    """Raise `InvalidRequest` when rows of this schema cannot be written; the sentence says why.

    >>> check_columns(StructType().add("body", "double"), topic="orders")
    Traceback (most recent call last):
    onward.errors.InvalidRequest: column 'body' is double; it must be binary or string
    """
    names = schema.fieldNames()
    for name in names:
        if name not in SINK_COLUMNS:
            raise InvalidRequest(f"cannot write: {unknown_column(name, tuple(SINK_COLUMNS))}")
        if names.count(name) > 1:
            raise InvalidRequest(f"there are {names.count(name)} columns {name!r}")
        type_, wanted = schema[name].dataType.simpleString(), SINK_COLUMNS[name]
        # A text with a collation is a text all the same.
        if type_.partition(" collate ")[0] not in wanted:
            raise InvalidRequest(f"column {name!r} is {type_}; it must be {' or '.join(wanted)}")
    if "body" not in names:
        raise InvalidRequest("there is no column 'body': what is the message?")
    if "topic" not in names and topic is None:
        raise InvalidRequest("there is neither a column 'topic' nor the option 'topic'")
    if "unique" in names and "due_at" not in names:
        raise InvalidRequest("column 'unique' names what waits for its time: it needs 'due_at'")


def batch_writer(
    options: Mapping[str, str], schema: StructType, overwrite: bool
) -> DataSourceWriter:
    """Return what writes a DataFrame; called on the driver, before any task."""
    wanted = _checked(options, schema, overwrite)
    identity = wanted.write_id or secrets.token_hex(16)
    sink = BatchSink(wanted, ledger.query_name("write", identity))
    return sink if wanted.is_arrow else RowSink(sink, schema)


def stream_writer(
    options: Mapping[str, str], schema: StructType, overwrite: bool
) -> DataSourceStreamWriter:
    """Return what writes a stream; called on the driver, before any task."""
    wanted = _checked(options, schema, overwrite=False)
    if wanted.write_id is not None:
        raise InvalidRequest("option 'writeId' is for df.write: a stream has its checkpoint")
    if overwrite:
        raise InvalidRequest("a topic is never overwritten: use outputMode('append') or 'update'")
    if not wanted.is_arrow:
        raise InvalidRequest("option 'arrow' is for df.write: a stream is written in columns")
    return StreamSink(wanted)


def _checked(options: Mapping[str, str], schema: StructType, overwrite: bool) -> SinkOptions:
    if overwrite:
        raise InvalidRequest("a topic is never overwritten: write with mode('append')")
    wanted = sink_options(options)
    check_columns(schema, topic=wanted.topic)
    return wanted


# --- tasks -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """What a task tells the driver: for which query it staged what."""

    query: str
    share: staging.Share


def _write(
    options: SinkOptions, query: str, batches: Iterator[pa.RecordBatch], *, partition: int
) -> Written:
    share = staging.stage(
        options.place, query, _encoded(batches, options.topic, options.place), partition=partition
    )
    return Written(query, share)


def _encoded(
    batches: Iterator[pa.RecordBatch], topic: str | None, place: Place
) -> Iterator[list[EncodedPiece]]:  # fmt: skip
    from onward.pipeline.columns import encode_messages

    for batch in batches:
        _check_nulls(batch, topic)
        _check_times(batch, place)
        for rows in _each_key_once(batch):
            yield [_replacing(piece) for piece in encode_messages(rows, topic=topic)]


def _check_nulls(rows: pa.RecordBatch, topic: str | None) -> None:
    """Refuse rows without a body or a topic; other tasks and batches may have more of them."""
    for name in ("body",) if topic else ("body", "topic"):
        count = rows.column(name).null_count if name in rows.schema.names else 0
        if count:
            counted = f"{count} row{'s' if count > 1 else ''}"
            raise InvalidRequest(f"column {name!r} is null in at least {counted}")


def _check_times(rows: pa.RecordBatch, place: Place) -> None:
    """Refuse what the schedule would: when the batch is decided it is too late to change a row."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if "due_at" not in rows.schema.names:
        return
    latest = pc.max(rows.column("due_at").cast(pa.timestamp("ms", "UTC"), safe=False)).value
    if latest is None or latest <= SystemClock().now_ms() + AHEAD_MS_MAX:
        return
    # This broker may have been told to take more.
    with open_client(place) as mq:
        most_ms = int(mq.status()["schedule_ahead_ms_max"])
    if latest > SystemClock().now_ms() + most_ms:
        raise InvalidRequest(
            f"column 'due_at' has a time more than {format_duration(most_ms)} ahead: "
            f"so far ahead nothing is scheduled"
        )


def _each_key_once(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Cut rows where a unique key comes again: the broker takes a key once in a batch."""
    if "unique" not in rows.schema.names:
        yield rows
        return
    seen: set[str] = set()
    begin = 0
    for number, unique in enumerate(rows.column("unique").to_pylist()):
        if unique is None:
            continue
        if not 1 <= len(unique) <= UNIQUE_CHARACTERS_MAX or unique.startswith("@"):
            raise InvalidRequest(
                f"column 'unique' has {unique[:40]!r}: a key has 1 to {UNIQUE_CHARACTERS_MAX} "
                f"characters and does not begin with '@'"
            )
        if unique in seen:
            yield rows.slice(begin, number - begin)
            begin = number
            seen.clear()
        seen.add(unique)
    yield rows.slice(begin)


def _replacing(piece: EncodedPiece) -> EncodedPiece:
    """Let what has a unique key take the place of what waits under it.

    A refusal would come when the batch is decided already, and would hold the stream up for good.
    """
    batch = decode_batch(piece.packed, raw_bytes_max=len(piece.packed), verify=False)
    lengths = batch.lengths(Column.UNIQUES)
    if lengths is None:
        return piece
    replaces = pack_numbers([None if one == ABSENT else REPLACE_WAITING for one in lengths])
    columns: list[tuple[int, tuple[Any, ...]]] = [
        (kind, (batch.column(kind),)) for kind in batch.kinds
    ]
    columns.insert(len(columns) - 1, (Column.REPLACES, (replaces,)))
    return piece._replace(packed=join_columns(columns, 0, batch.count, 0, 0, 0))


def _in_columns(rows: Iterator[Row], schema: StructType) -> Iterator[pa.RecordBatch]:
    """Turn rows, one by one, into columns."""
    import pyarrow as pa

    wanted = arrow_schema(schema)
    while some := list(islice(rows, _ROWS_MAX)):
        columns: list[list[Any]] = [[] for _ in wanted]
        for row in some:
            for column, value in zip(columns, row, strict=True):
                column.append(value)
        arrays = [
            pa.array(column, field.type) for column, field in zip(columns, wanted, strict=True)
        ]
        yield pa.RecordBatch.from_arrays(arrays, schema=wanted)


def _task() -> TaskContext:
    task = TaskContext.get()
    assert task is not None, "rows are written by tasks"
    return task


def _shares(messages: Sequence[WriterCommitMessage | None]) -> dict[str, list[staging.Share]]:
    """Return what tasks have written, by query; tasks that failed have no message."""
    shares: dict[str, list[staging.Share]] = {}
    for message in messages:
        if isinstance(message, Written):
            shares.setdefault(message.query, []).append(message.share)
    return shares


# --- what Spark calls ------------------------------------------------------------------------


class BatchSink(DataSourceArrowWriter):
    """Writes a DataFrame."""

    def __init__(self, options: SinkOptions, query: str) -> None:
        self._options = options
        self._query = query

    @brief
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Stage the rows of one task."""
        return _write(self._options, self._query, iterator, partition=_task().partitionId())

    @brief
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Publish what all tasks have staged."""
        shares = _shares(messages).get(self._query, [])
        is_once = self._options.write_id is None
        if is_once and not any(share.pieces for share in shares):
            return
        ledger.commit(
            self._options.place, self._query, shares, batch=0,
            durability=self._options.durability, is_once=is_once,
        )  # fmt: skip

    @brief
    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Forget what was staged for nothing."""
        for query, shares in _shares(messages).items():
            ledger.abort(self._options.place, query, shares)


class RowSink(DataSourceWriter):
    """Writes a DataFrame row by row."""

    def __init__(self, sink: BatchSink, schema: StructType) -> None:
        self._sink = sink
        self._schema = schema

    @brief
    def write(self, iterator: Iterator[Row]) -> Written:
        """Stage the rows of one task."""
        return self._sink.write(_in_columns(iterator, self._schema))

    @brief
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Publish what all tasks have staged."""
        self._sink.commit(messages)

    @brief
    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Forget what was staged for nothing."""
        self._sink.abort(messages)


class StreamSink(DataSourceStreamArrowWriter):
    """Writes a stream, one batch after another."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    @brief
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Stage the rows of one task."""
        query_id = _task().getLocalProperty("sql.streaming.queryId")
        assert query_id is not None, "a stream has an id"
        query = ledger.query_name("query", query_id)
        return _write(self._options, query, iterator, partition=_task().partitionId())

    @brief
    def commit(self, messages: list[WriterCommitMessage | None], batch_id: int) -> None:
        """Publish what all tasks have staged; a batch that was published before is not again."""
        for query, shares in _shares(messages).items():
            ledger.commit(
                self._options.place, query, shares, batch=batch_id,
                durability=self._options.durability,
            )  # fmt: skip

    @brief
    def abort(self, messages: list[WriterCommitMessage | None], batch_id: int) -> None:
        """Forget what was staged for nothing."""
        for query, shares in _shares(messages).items():
            ledger.abort(self._options.place, query, shares)
