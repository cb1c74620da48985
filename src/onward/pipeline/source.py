"""The batch source: `spark.read.format("onward")`.

    options ──▶ topics, offsets ──▶ stretches ──▶ partitions ──▶ rows
                (on the driver, when the query is planned)   (tasks: topic_reads.py)

What a reader plans depends on the options of its `load()` only. There is no `pushFilters` here:
Spark shares the partitions that one scan plans with all scans of a frame, so a filter of one
would decide what the others read (docs/adr/0009).
The end is fixed when a frame is first used: what is published later is for the next `load()`.
Ranges are half-open, so the next read begins where this one ended. A batch read with a group begins
at its cursor and does not move it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, InputPartition

from onward.errors import InvalidRequest
from onward.pipeline.bounds import offsets_of, topics_now
from onward.pipeline.brief import brief
from onward.pipeline.options import Bound, SourceOptions, spark_options
from onward.pipeline.place import Place, open_client
from onward.pipeline.planning import ROWS_MIN, Stretch, split
from onward.pipeline.topic_reads import (
    check_schema,
    loss,
    lost_before,
    read_stretches,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from onward.client.sync import SyncClient


def read_topic(
    spark: SparkSession,
    topic: str | Sequence[str] = "",
    *,
    place: Place | None = None,
    columns: Sequence[str] | None = None,
    **options: object,
) -> DataFrame:
    """Return a topic, or several, as a DataFrame.

    The options are those of the source, written `starting_offsets={"orders": 12}`,
    `min_partitions=8`, `topic_pattern="orders.*"`. Name the `columns` you need: others are then
    not even made, and what is not asked for costs nothing.
    """
    given = source_spellings(topic, place, columns, options)
    return spark.read.format("onward").options(**given).load()


def source_spellings(
    topic: str | Sequence[str], place: Place | None, columns: Sequence[str] | None,
    options: Mapping[str, object],
) -> dict[str, str]:  # fmt: skip
    """Return the arguments of `read_topic` and `read_stream` as options of Spark.

    >>> source_spellings(["a", "b"], Place("x:7700"), ["offset"], {"min_partitions": 2})
    {'topic': 'a,b', 'servers': 'x:7700', 'timeout': '30s', 'columns': 'offset', 'minPartitions': '2'}
    """  # noqa: E501
    named: dict[str, object] = {"topic": topic or None}
    if place is not None:
        named |= {"servers": place.servers, "token": place.token, "timeout": place.timeout}
    return spark_options({**named, "columns": columns, **options})


class BatchReader(DataSourceReader):
    """Reads topics from where to where as they are when the query is planned."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        check_schema(schema, options)
        self._options = options
        self._schema = schema

    @brief
    def partitions(self) -> list[InputPartition]:
        """Return the work of each task."""
        with open_client(self._options.place) as mq:
            stretches = plan(mq, self._options)
        return partitions_of(self._options, stretches)

    @brief
    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Give the rows of one task. Spark makes one without a value when there is no work."""
        batches = read_stretches(self._options, self._schema, partition.value or ())
        return batches if self._options.is_arrow else _one_by_one(batches)


def _one_by_one(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[object, ...]]:
    """Give rows as tuples: what it would cost without Arrow."""
    for batch in batches:
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def plan(mq: SyncClient, options: SourceOptions) -> list[Stretch]:
    """Return what is to be read, topic by topic; raise when some of it is lost and must not be."""
    ends = topics_now(mq, options)
    start = options.start or Bound(word="group" if options.group else "earliest")
    firsts = offsets_of(mq, start, ends, group=options.group, missing="earliest")
    stops = offsets_of(
        mq, options.end or Bound(word="latest"), ends, group=options.group, missing="latest"
    )
    stretches = []
    for topic, end in ends.items():
        if firsts[topic] > stops[topic]:
            _check_order(options, topic, firsts[topic], stops[topic])
            continue
        stretch = Stretch(topic, firsts[topic], stops[topic])
        stretches += known_losses(options, stretch, end.first_offset)
    return stretches


def known_losses(options: SourceOptions, stretch: Stretch, first_offset: int) -> list[Stretch]:
    """Return a stretch as far as it is to be read: without what is lost and may be skipped."""
    lost = lost_before(stretch, first_offset)
    if lost is not None and options.on_loss == "fail":
        raise loss(lost)
    if lost is not None and options.on_loss == "skip":
        stretch = stretch._replace(first=lost.end)
    return [stretch] if stretch.first < stretch.end else []


def partitions_of(options: SourceOptions, stretches: Sequence[Stretch]) -> list[InputPartition]:
    """Return stretches as partitions, about as large as each other."""
    parts, rows_min = options.partitions_min or 2 * (os.cpu_count() or 1), ROWS_MIN
    if options.partitions_min is not None:
        rows_min = 1
    if options.rows_per_partition is not None:
        total = sum(stretch.rows for stretch in stretches)
        parts = max(parts, -(-total // options.rows_per_partition))
        rows_min = min(rows_min, options.rows_per_partition)
    return [InputPartition(part) for part in split(stretches, parts=parts, rows_min=rows_min)]


def _check_order(options: SourceOptions, topic: str, first: int, stop: int) -> None:
    """Offsets that people gave must be in order; a time after the end is merely nothing to read."""
    given: list[Any] = [bound for bound in (options.start, options.end) if bound is not None]
    if any(topic in bound.offsets for bound in given):
        raise InvalidRequest(
            f"topic {topic!r} would be read from offset {first} to {stop}: the start is behind "
            f"the end"
        )
