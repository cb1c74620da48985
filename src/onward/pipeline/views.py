"""What became of messages, told by the topic '@trace', as DataFrames.

    trace_frame   the rows of '@trace', one each: what was done to which ranges
    kept_trace    those of some topics, kept for a job that asks them several times
    lives         the same, where a group that is a copy has the rows of its source before the copy
    steps         one row for each message, group and step
    outcomes      one row for each message and group: where all its steps have led to

    state       from                                      to
    settled     acked, filtered, skipped, purged          retrying, by replayed or reset
    retrying    retried, expired, lost, and again open    settled, dead
    dead        dead                                      retrying by redriven, settled by purged
    before      messages older than the group's start     retrying, by replayed

What a row does to a message is what `delivery/share.py` says: a late word about a message that is
finished changes nothing. Ranges stay ranges until messages are asked for, and then only those
within `bounds`. Of a topic or a group that began anew only the last life counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name that everybody knows it by

from onward.errors import InvalidRequest
from onward.pipeline.lake_read import read
from onward.pipeline.place import Place, open_client
from onward.pipeline.window import Window

TRACE_TOPIC: Final = "@trace"
ROW: Final = (
    "did STRING, at_ms BIGINT, `group` STRING, topic STRING, ranges ARRAY<ARRAY<BIGINT>>,"
    " member STRING, attempt INT, due_at_ms BIGINT, cause STRING, took_ms ARRAY<BIGINT>,"
    " offset BIGINT, source STRING"
)
"""A row of '@trace'; fields that are left out are null."""
RANGED: Final = (
    "acked", "filtered", "retried", "expired", "lost", "dead", "skipped", "redriven", "purged",
    "replayed",
)  # fmt: skip
MARGIN: Final = timedelta(minutes=1)
"""So much earlier than a window the trace is read: clocks are set back now and then."""
FORKS_MAX: Final = 1_000
KEPT: Final = StorageLevel.MEMORY_AND_DISK

Bounds = Mapping[str, tuple[int, int]]
"""Topic to [first, end) of the offsets that matter."""

# A range of many millions is cut into pages first: an array of all its offsets needs memory.
_PAGE = 4_096


def trace_frame(
    spark: SparkSession, place: Place, *, window: Window | None = None, lake: str | None = None
) -> DataFrame:
    """Return the rows of '@trace', from a window's beginning on; `seq` is their order."""
    with open_client(place, name="spark-trace") as mq:
        exists = mq.has_topic(TRACE_TOPIC)
    if not exists:
        return trace_rows(spark.createDataFrame([], "offset BIGINT, body BINARY"))
    since = None if window is None else window.since
    bodies = read(
        spark, place=place, topics=[TRACE_TOPIC], lake=lake, columns=["offset", "body"],
        start=None if since is None else since - MARGIN, on_gap="skip",
    )  # fmt: skip
    return trace_rows(bodies)


@contextmanager
def kept_trace(
    spark: SparkSession, place: Place, *, topics: Sequence[str], window: Window, lake: str | None,
    with_copies: bool = True,
) -> Iterator[DataFrame]:  # fmt: skip
    """Give the lives of groups with some topics, kept while the block runs: jobs ask them often.

    Without `with_copies` each row is there once, for the group that did it.
    """
    found = trace_frame(spark, place, window=window, lake=lake)
    rows = found.where(F.col("topic").isin(*topics) | (F.col("did") == "forked")).persist(KEPT)
    try:
        yield lives(rows) if with_copies else rows
    finally:
        rows.unpersist()


def trace_rows(bodies: DataFrame) -> DataFrame:
    """Return the rows that messages of '@trace' (offset, body) hold; what is no row is left out."""
    parsed = bodies.select(
        F.col("offset").alias("seq"), F.from_json(F.col("body").cast("string"), ROW).alias("row")
    )
    return parsed.where("row.did IS NOT NULL").select("seq", "row.*")


def since_birth(rows: DataFrame, born_at_ms: Mapping[str, int]) -> DataFrame:
    """Return the rows of topics as they are now: one that was created again had another life."""
    known = rows.sparkSession.createDataFrame(
        list(born_at_ms.items()), "topic STRING, born_at_ms BIGINT"
    )
    alive = rows.join(F.broadcast(known), "topic").where("at_ms >= born_at_ms")
    return alive.select(*rows.columns)


def ends_before(rows: DataFrame, at_ms: int) -> dict[str, int]:
    """Return for each topic an offset below which all is older than a moment: groups had it then.

    A message is published before anything is done to it, and after those of smaller offsets.
    """
    ended = ranges(rows.where(F.col("at_ms") < at_ms)).groupBy("topic").agg(F.max("end"))
    return {topic: int(end) for topic, end in ended.collect()}


def lives(rows: DataFrame) -> DataFrame:
    """Return rows in which a copy of a group has also what its source did before the copy."""
    found = rows.where("did = 'forked'").select("seq", "group", "source").orderBy("seq")
    forks = [(one[0], one[1], one[2]) for one in found.limit(FORKS_MAX + 1).collect()]
    if not forks:
        return rows
    if len(forks) > FORKS_MAX:
        raise InvalidRequest(f"more than {FORKS_MAX:,} groups were copied: ask for a later window")
    spark = rows.sparkSession
    copied = spark.createDataFrame(
        list({group: seq for seq, group, _ in forks}.items()), "`group` STRING, copied BIGINT"
    )
    own = rows.join(F.broadcast(copied), "group", "left").where("copied IS NULL OR seq > copied")
    old = spark.createDataFrame(
        inherited(forks), "`group` STRING, heir STRING, low BIGINT, high BIGINT"
    )
    taken = rows.join(F.broadcast(old), "group").where("seq > low AND seq < high")
    columns = [name for name in rows.columns if name != "group"]
    return own.select("group", *columns).unionByName(
        taken.select(F.col("heir").alias("group"), *columns)
    )


def inherited(forks: list[tuple[int, str, str]]) -> list[tuple[str, str, int, int]]:
    """Return (source, heir, after, before): which rows of which group count for a copy.

    A copy of a copy has the rows of both, each up to the moment it was left.

    >>> inherited([(5, "b", "a"), (9, "c", "b")])
    [('a', 'b', -1, 5), ('b', 'c', 5, 9), ('a', 'c', -1, 5)]
    """
    lines: dict[str, list[tuple[str, int, int]]] = {}
    for seq, heir, source in sorted(forks):
        older = lines.get(source, [])
        begins = max((high for _, _, high in older), default=-1)
        # What the heir's name meant before is another group's life.
        lines[heir] = [(source, begins, seq), *older]
    return [(one[0], heir, one[1], one[2]) for heir, line in lines.items() for one in line]


def marks(rows: DataFrame) -> DataFrame:
    """Return for each topic and group where it began last, and all its resets after that."""
    told = rows.where("did IN ('started', 'reset')").groupBy("topic", "group")
    found = told.agg(
        F.expr("max(seq) FILTER (WHERE did = 'started')").alias("started_seq"),
        F.expr("max_by(offset, seq) FILTER (WHERE did = 'started')").alias("start"),
        F.expr(
            "array_sort(collect_list(struct(seq, offset, at_ms)) FILTER (WHERE did = 'reset'))"
        ).alias("resets"),
    )
    alive = "filter(resets, r -> started_seq IS NULL OR r.seq > started_seq)"
    return found.withColumn("resets", F.expr(alive))


def steps(rows: DataFrame, *, bounds: Bounds | None = None) -> DataFrame:
    """Return one row for each message, group and step, with what was said of it."""
    return _by_message(ranges(rows, bounds=bounds))


def ranges(rows: DataFrame, *, bounds: Bounds | None = None) -> DataFrame:
    """Return one row for each range of each row: [first, end), cut to what matters."""
    ranged = (
        rows.where(F.col("did").isin(*RANGED))
        .select("*", F.posexplode("ranges").alias("place", "part"))
        .select(
            "seq", "did", "at_ms", "group", "topic", "member", "attempt", "due_at_ms", "cause",
            F.expr("get(took_ms, place)").alias("took_ms"),
            F.expr("part[0]").alias("first"), F.expr("part[1]").alias("end"),
        )
    )  # fmt: skip
    if bounds is not None:
        limits = rows.sparkSession.createDataFrame(
            [(topic, low, high) for topic, (low, high) in bounds.items()],
            "topic STRING, low BIGINT, high BIGINT",
        )
        ranged = (
            ranged.join(F.broadcast(limits), "topic")
            .withColumn("first", F.greatest("first", "low"))
            .withColumn("end", F.least("end", "high"))
            .drop("low", "high")
        )
    return ranged.where("first < end")


def _by_message(ranged: DataFrame) -> DataFrame:
    pages = ranged.withColumn(
        "page", F.expr(f"explode(sequence(first DIV {_PAGE}, (end - 1) DIV {_PAGE}))")
    )
    begin, stop = f"greatest(first, page * {_PAGE})", f"least(end, (page + 1) * {_PAGE})"
    return pages.withColumn("offset", F.expr(f"explode(sequence({begin}, {stop} - 1))")).drop(
        "page", "first", "end"
    )


def outcomes(rows: DataFrame, *, bounds: Bounds | None = None) -> DataFrame:
    """Return one row for each message and group of which anything is told: its last outcome.

    Columns: topic, group, offset, state, did, at_ms, member, attempt, due_at_ms, cause, took_ms,
    failures (how often it came back) and repeats (acks of what was acked already).
    """
    known = F.broadcast(marks(rows))
    told = steps(rows, bounds=bounds).join(known, ["topic", "group"], "left")
    gathered = (
        told.where("started_seq IS NULL OR seq > started_seq")
        .groupBy("topic", "group", "offset")
        .agg(
            F.array_sort(F.collect_list(F.struct(*_STEP))).alias("told"),
            F.first("start").alias("start"),
            F.first("resets").alias("resets"),
        )
    )
    folded = gathered.select("topic", "group", "offset", F.expr(_FOLD).alias("last"))
    return folded.select("topic", "group", "offset", "last.*").where("state <> 'none'")


_STEP = ("seq", "did", "at_ms", "member", "attempt", "due_at_ms", "cause", "took_ms")
_TAKEN = ("did", "at_ms", "member", "attempt", "due_at_ms", "cause", "took_ms")


def _becomes(state: str, *, failures: str = "s.failures") -> str:
    told = ", ".join(f"'{name}', e.{name}" for name in _TAKEN)
    return f"named_struct('state', '{state}', {told}, 'failures', {failures}, 'repeats', s.repeats)"


def _again() -> str:
    kept = ", ".join(f"'{name}', s.{name}" for name in ("state", *_TAKEN, "failures"))
    return f"named_struct({kept}, 'repeats', s.repeats + 1)"


_NOTHING = """named_struct(
    'state', if(offset < start, 'before', 'none'), 'did', CAST(NULL AS STRING),
    'at_ms', CAST(NULL AS BIGINT), 'member', CAST(NULL AS STRING), 'attempt', CAST(NULL AS INT),
    'due_at_ms', CAST(NULL AS BIGINT), 'cause', CAST(NULL AS STRING),
    'took_ms', CAST(NULL AS BIGINT), 'failures', 0, 'repeats', 0)"""

# A reset has no ranges: what it does to a message depends on which side of it the message lies.
_RESETS = """transform(coalesce(resets, array()), r -> named_struct(
    'seq', r.seq, 'did', if(offset < r.offset, 'passed', 'reset'), 'at_ms', r.at_ms,
    'member', CAST(NULL AS STRING), 'attempt', CAST(NULL AS INT),
    'due_at_ms', CAST(NULL AS BIGINT), 'cause', CAST(NULL AS STRING),
    'took_ms', CAST(NULL AS BIGINT)))"""

_IS_OPEN = "s.state IN ('none', 'retrying')"

_FOLD = f"""aggregate(array_sort(concat(told, {_RESETS})), {_NOTHING}, (s, e) -> CASE
    WHEN e.did = 'acked' AND s.state = 'settled' AND s.did = 'acked' THEN {_again()}
    WHEN e.did IN ('acked', 'filtered', 'skipped') AND s.state IN ('none', 'retrying', 'before')
        THEN {_becomes("settled")}
    WHEN e.did IN ('retried', 'expired', 'lost') AND {_IS_OPEN}
        THEN {_becomes("retrying", failures="s.failures + 1")}
    WHEN e.did = 'dead' AND {_IS_OPEN} THEN {_becomes("dead", failures="s.failures + 1")}
    WHEN e.did = 'redriven' AND s.state = 'dead' THEN {_becomes("retrying")}
    WHEN e.did = 'purged' AND s.state = 'dead' THEN {_becomes("settled")}
    WHEN e.did = 'replayed' AND s.state IN ('settled', 'dead', 'before')
        THEN {_becomes("retrying")}
    WHEN e.did = 'reset' AND s.state <> 'none' THEN {_becomes("retrying")}
    WHEN e.did = 'passed' AND {_IS_OPEN} THEN {_becomes("settled")}
    ELSE s END)"""
