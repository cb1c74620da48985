"""trace: the life lines of messages: one row for each message, group and step, in order.

    onward pipeline trace orders --since 10m --out /data/lines
    onward pipeline trace --id orders/7 --id orders/9

    step   group     did         at                        after_ms
    0                published   2026-11-16 10:00:00.000
    1      billing   retried     2026-11-16 10:00:00.120        120
    2      billing   acked       2026-11-16 10:00:10.310     10,310

`out` is a folder that does not exist yet: Parquet, or lines of JSON when its name ends in `.jsonl`.
A copy of a group has the steps of its source up to the copy.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - the name that everybody knows it by

from onward.client.finding import parse_id
from onward.clock import SystemClock
from onward.errors import AlreadyExists, InvalidRequest
from onward.pipeline import runs, views
from onward.pipeline.lake_read import read
from onward.pipeline.place import Place, open_client
from onward.pipeline.window import Moment, choose_groups, choose_topics, window_of

if TYPE_CHECKING:
    from onward.pipeline.window import Window as Stretch

IDS_MAX = 10_000
COLUMNS = (
    "id", "topic", "offset", "group", "step", "did", "at", "after_ms", "member", "attempt",
    "due_at", "took_ms", "cause", "key", "trace_id",
)  # fmt: skip


class Traced(NamedTuple):
    """The life lines: how many rows, and the rows themselves."""

    rows: int
    frame: DataFrame


def trace(
    spark: SparkSession,
    *,
    place: Place,
    topics: Sequence[str] = (),
    groups: Sequence[str] = (),
    since: Moment | None = None,
    until: Moment | None = None,
    lake: str | None = None,
    ids: Sequence[str] = (),
    out: str | None = None,
    run: runs.Run | None = None,
) -> Traced:
    """Return the life lines of the messages that were published in a window, or of some by id.

    >>> from onward.pipeline.sessions import session                       # doctest: +SKIP
    >>> trace(session(), place=place_of(), ids=["orders/7"]).rows         # doctest: +SKIP
    3
    """
    window = window_of(since, until, now_ms=SystemClock().now_ms())
    wanted = wanted_offsets(ids)
    if out is not None and os.path.lexists(out):
        raise AlreadyExists(f"{out!r} exists already: life lines are written to a new folder")
    with runs.using(run, place, job="trace", topics=list(topics)) as told:
        with open_client(place, name="spark-lines") as mq:
            described = mq.topics()
            known = {one.topic: one.created_at_ms for one in described}
            names = choose_topics(known, [*topics, *wanted])
            if groups:
                groups = choose_groups((one.group for one in mq.groups()), groups)
        messages = _messages(
            spark, place, names, window, lake, wanted, named=[*topics, *wanted],
            ends={one.topic: one.next_offset for one in described},
        )  # fmt: skip
        with views.kept_trace(spark, place, topics=names, window=window, lake=lake) as kept:
            rows = kept.where(F.col("group").isin(*groups)) if groups else kept
            rows = views.since_birth(rows, {name: known[name] for name in names})
            traced = _written(life_lines(messages, rows, bounds=_bounds(wanted)), out)
        told.progress(rows=traced.rows)
        told.result(rows=traced.rows, out=out)
        return traced


def _written(frame: DataFrame, out: str | None) -> Traced:
    if out is not None:
        kind = "json" if out.endswith(".jsonl") else "parquet"
        frame.write.format(kind).save(out)
        # What was written is what is counted, and what the caller gets.
        frame = frame.sparkSession.read.schema(frame.schema).format(kind).load(out)
    return Traced(frame.count(), frame)


def life_lines(
    messages: DataFrame, rows: DataFrame, *, bounds: views.Bounds | None = None
) -> DataFrame:
    """Return the steps of messages (topic, offset, published_at, key, trace_id), in order."""
    born = messages.select(
        "*", F.lit(None).cast("string").alias("group"), F.lit(-1).cast("bigint").alias("seq"),
        F.lit("published").alias("did"), F.unix_millis("published_at").alias("at_ms"),
        *(F.lit(None).cast(kind).alias(name) for name, kind in _SAID.items()),
    )  # fmt: skip
    told = views.steps(rows, bounds=bounds).join(messages, ["topic", "offset"])
    both = born.unionByName(told.select(*born.columns))
    line = Window.partitionBy("topic", "offset").orderBy("seq", "group")
    return both.select(
        F.concat_ws("/", "topic", "offset").alias("id"), "*",
        (F.row_number().over(line) - 1).alias("step"),
        F.timestamp_millis("at_ms").alias("at"),
        F.when(F.expr("due_at_ms > 0"), F.timestamp_millis("due_at_ms")).alias("due_at"),
        F.expr("if(did = 'published', NULL, at_ms - unix_millis(published_at))").alias("after_ms"),
    ).select(*COLUMNS).orderBy("topic", "offset", "step")  # fmt: skip


_SAID = {"member": "string", "attempt": "int", "due_at_ms": "bigint", "took_ms": "bigint",
         "cause": "string"}  # fmt: skip


def wanted_offsets(ids: Sequence[str]) -> dict[str, list[int]]:
    """Return topic to offsets of messages that are named by their ids.

    >>> wanted_offsets(["orders/7", "orders/9"])
    {'orders': [7, 9]}
    """
    if len(ids) > IDS_MAX:
        raise InvalidRequest(f"{len(ids):,} ids are too many: at most {IDS_MAX:,}, or a window")
    found: dict[str, list[int]] = {}
    for one in ids:
        topic, offset = parse_id(one)
        found.setdefault(topic, []).append(offset)
    return found


def _bounds(wanted: dict[str, list[int]]) -> views.Bounds | None:
    if not wanted:
        return None
    return {topic: (min(offsets), max(offsets) + 1) for topic, offsets in wanted.items()}


def _messages(
    spark: SparkSession, place: Place, topics: Sequence[str], window: Stretch, lake: str | None,
    wanted: dict[str, list[int]], *, named: Sequence[str], ends: Mapping[str, int],
) -> DataFrame:  # fmt: skip
    columns = ["topic", "offset", "published_at", "key", "trace_id"]
    if not topics:
        return spark.createDataFrame(
            [], "topic STRING, offset BIGINT, published_at TIMESTAMP, key STRING, trace_id STRING"
        )
    if not wanted:
        return read(
            spark, place=place, topics=topics, lake=lake, start=window.since, end=window.until,
            columns=columns, named=named,
        )  # fmt: skip
    # The bounds are what is read; the list is what is wanted.
    found = read(
        spark, place=place, topics=list(wanted), lake=lake, columns=columns, named=named,
        start={topic: min(*offsets, ends[topic]) for topic, offsets in wanted.items()},
        end={topic: min(max(offsets) + 1, ends[topic]) for topic, offsets in wanted.items()},
        on_gap="skip",
    )  # fmt: skip
    chosen = F.lit(False)
    for topic, offsets in wanted.items():
        chosen |= (F.col("topic") == topic) & F.col("offset").isin(*offsets)
    found = found.where(chosen & (F.col("published_at") < F.lit(window.until)))
    return found if window.since is None else found.where(F.col("published_at") >= window.since)
