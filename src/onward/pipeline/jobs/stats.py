"""stats: what happened, minute by minute: rates, bytes, times from publish to ack, failures.

    onward pipeline stats orders --since 1h

    row of a topic    messages and bytes that were published in that minute
    row of a group    acks, retries, expired leases, lost members and dead letters of that minute,
                      and the time from the publish to the ack (of half, 95 % and 99 % of them)

Counts come from ranges of the trace, never message by message. The times are of messages that were
published in the window. Of a topic that was created anew only its last life counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name that everybody knows it by

from onward.clock import SystemClock
from onward.errors import InvalidRequest
from onward.pipeline import runs, views
from onward.pipeline.lake_read import read
from onward.pipeline.place import Place, open_client
from onward.pipeline.window import Moment, Window, choose_topics, window_of

MINUTE_MS = 60_000
ROWS_MAX = 100_000


class StatsRow(NamedTuple):
    """One minute of a topic, or of a group of it; what does not apply is None."""

    minute: datetime
    topic: str
    group: str | None = None
    messages: int | None = None
    bytes: int | None = None
    acked: int | None = None
    p50_ms: int | None = None
    p95_ms: int | None = None
    p99_ms: int | None = None
    retried: int | None = None
    expired: int | None = None
    lost: int | None = None
    dead: int | None = None


class Stats(NamedTuple):
    """All rows, in the order of time, topic and group; a topic's own row is the first of its."""

    rows: list[StatsRow]
    messages: int
    bytes: int
    acked: int
    retried: int
    dead: int


def stats(
    spark: SparkSession,
    *,
    place: Place,
    topics: Sequence[str] = (),
    since: Moment | None = None,
    until: Moment | None = None,
    lake: str | None = None,
    run: runs.Run | None = None,
) -> Stats:
    """Count what happened to topics in a window, minute by minute.

    >>> from onward.pipeline.sessions import session                       # doctest: +SKIP
    >>> stats(session(), place=place_of(), since="1h").messages           # doctest: +SKIP
    120000
    """
    window = window_of(since, until, now_ms=SystemClock().now_ms())
    with runs.using(run, place, job="stats", topics=list(topics)) as told:
        with open_client(place, name="spark-stats") as mq:
            born_at_ms = {one.topic: one.created_at_ms for one in mq.topics()}
            names = choose_topics(born_at_ms, topics)
        messages = _messages(spark, place, names, window, lake, named=topics)
        with views.kept_trace(
            spark, place, topics=names, window=window, lake=lake, with_copies=False
        ) as trace:
            alive = views.since_birth(trace, {name: born_at_ms[name] for name in names})
            within = alive.where(_is_within("at_ms", window))
            rows = [*_collect(published(messages)), *_collect(settled(messages, within))]
        found = _stats(sorted(rows, key=lambda row: (row.minute, row.topic, row.group or "")))
        told.progress(rows=found.messages)
        told.result(**{n: v for n, v in found._asdict().items() if n != "rows"})
        return found


def published(messages: DataFrame) -> DataFrame:
    """Return messages and bytes by minute, of messages (topic, offset, published_ms, bytes)."""
    return messages.groupBy(_minute("published_ms"), "topic").agg(
        F.count("*").alias("messages"), F.sum("bytes").alias("bytes")
    )


def settled(messages: DataFrame, rows: DataFrame) -> DataFrame:
    """Return what groups did by minute: counts from ranges, times by looking at each ack."""
    ranged = views.ranges(rows)
    size = F.expr("end - first")
    keys = ["minute_ms", "topic", "group"]
    counted = ranged.groupBy(_minute("at_ms"), "topic", "group").agg(
        *(
            F.sum(F.when(F.col("did") == did, size).otherwise(0)).alias(did)
            for did in ("acked", "retried", "expired", "lost", "dead")
        )
    )
    acks = views.steps(rows.where("did = 'acked'")).select("topic", "group", "offset", "at_ms")
    timed = acks.join(messages.select("topic", "offset", "published_ms"), ["topic", "offset"])
    took = F.greatest(F.expr("at_ms - published_ms"), F.lit(0)).alias("took_ms")
    timed = timed.select(_minute("at_ms"), "topic", "group", took)
    part = "approx_percentile(took_ms, array(0.5, 0.95, 0.99), 10000)"
    spread = timed.groupBy(*keys).agg(F.expr(part).alias("took"))
    return counted.join(spread, keys, "left").select(
        *keys, "acked", "retried", "expired", "lost", "dead",
        *(F.expr(f"took[{at}]").alias(name) for at, name in enumerate(_PARTS)),
    )  # fmt: skip


_PARTS = ("p50_ms", "p95_ms", "p99_ms")


def _minute(column: str) -> Column:
    return F.expr(f"{column} DIV {MINUTE_MS} * {MINUTE_MS}").alias("minute_ms")


def _messages(
    spark: SparkSession, place: Place, topics: Sequence[str], window: Window, lake: str | None,
    *, named: Sequence[str],
) -> DataFrame:  # fmt: skip
    if not topics:
        return spark.createDataFrame(
            [], "topic STRING, offset BIGINT, published_ms BIGINT, bytes BIGINT"
        )
    found = read(
        spark, place=place, topics=topics, lake=lake, start=window.since, end=window.until,
        columns=["topic", "offset", "published_at", "body"], named=named,
    )  # fmt: skip
    timed = found.select(
        "topic", "offset", F.unix_millis("published_at").alias("published_ms"),
        F.octet_length("body").cast("bigint").alias("bytes"),
    )  # fmt: skip
    return timed.where(_is_within("published_ms", window))


def _is_within(column: str, window: Window) -> Column:
    before = F.col(column) < window.until_ms
    return before if window.since_ms is None else before & (F.col(column) >= window.since_ms)


def _collect(frame: DataFrame) -> list[StatsRow]:
    rows = frame.limit(ROWS_MAX + 1).collect()
    if len(rows) > ROWS_MAX:
        raise InvalidRequest(
            f"more than {ROWS_MAX:,} rows: ask for a shorter window or less topics"
        )
    return [StatsRow(**_fields(row)) for row in rows]


def _fields(row: Row) -> dict[str, Any]:
    fields = row.asDict()
    minute_ms = fields.pop("minute_ms")
    return {"minute": datetime.fromtimestamp(minute_ms // 1_000, tz=UTC), **fields}


def _stats(rows: list[StatsRow]) -> Stats:
    sums = {
        name: sum(getattr(row, name) or 0 for row in rows)
        for name in Stats._fields
        if name != "rows"
    }
    return Stats(rows, **sums)
