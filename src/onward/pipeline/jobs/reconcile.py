"""reconcile: the proof that every published message was settled by every group, or what is missing.

    onward pipeline reconcile orders --since 1h --report report.html

Each message that was published in the window is held against each group that consumes its topic:

    settled    acked, filtered or skipped: the group is done with it
    dead       the group gave up on it
    retrying   it failed, or was replayed, and comes again
    undelivered  it waits, or a member has it right now: no outcome, and the group is not past it
    missing    the group is past it, and no outcome is known: it is lost
    before     it is older than the group's start: not its business, and not counted

`slow` and `repeated` (acked again without a replay) are counted beside that; what an archive or a
stream of Spark acked is never slow, for it works in batches. A broadcast has no
acks: it is named, not checked. Where the trace no longer reaches back to the window, what lies
below a group's cursor counts as settled, unless it is one of its dead letters, and the report says
so. What retention took and no lake has is `unchecked`, unless a later message or the trace shows
that it is older than the window: nothing is proven while there is any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pyspark.sql import DataFrame, Row, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - the name that everybody knows it by

import onward
from onward.client.sync import SyncClient
from onward.clock import SystemClock
from onward.durations import Duration, duration_ms, format_duration
from onward.errors import InvalidRequest
from onward.pipeline import runs, views
from onward.pipeline.html import render
from onward.pipeline.lake_read import is_cut as is_read_cut
from onward.pipeline.lake_read import read
from onward.pipeline.place import Place, open_client
from onward.pipeline.progress import MEMBER as SPARK
from onward.pipeline.report import (
    LISTED_MAX,
    Bar,
    Found,
    Gone,
    GroupLine,
    Report,
    Verdicts,
    add_all,
)
from onward.pipeline.unchecked import find_gone, say_gone
from onward.pipeline.window import Moment, choose_groups, choose_topics, window_of
from onward.pipeline.window import Window as Stretch
from onward.protocol.operations.groups import GroupDescription

SLOW = "1m"
ARCHIVE = "archive"
"""How the names of members begin that are archives."""
BARS_MAX = 120
PAIRS_MAX = 100_000
BURIED_MAX = 1_000_000
_BAR_STEPS_MS = (
    1_000, 10_000, 60_000, 300_000, 900_000, 3_600_000, 21_600_000, 86_400_000, 604_800_000,
    2_592_000_000,
)  # fmt: skip
_KINDS = {
    "filtered": "filtered", "skipped": "skipped", "passed": "skipped", "purged": "skipped",
}  # fmt: skip


class Reconciled(NamedTuple):
    """What a reconciliation found; all but `published` is counted once per group."""

    is_settled: bool
    published: int
    """Messages in the window."""
    due: int
    """Messages times the groups that had to do with them."""
    settled: int
    missing: int
    retrying: int
    dead: int
    slow: int
    repeated: int
    unchecked: int
    """Messages that may be of the window and are gone; of a topic, not once per group."""
    undelivered: int = 0
    lines: tuple[GroupLine, ...] = ()
    report: Report | None = None


class Pair(NamedTuple):
    """A group that consumes a topic."""

    topic: str
    group: str
    cursor: int
    dead: int = 0
    """How many dead letters it has."""


class Buried(NamedTuple):
    """A dead letter, as the broker itself knows it."""

    topic: str
    group: str
    offset: int
    buried_cause: str


def reconcile(
    spark: SparkSession,
    *,
    place: Place,
    topics: Sequence[str] = (),
    groups: Sequence[str] = (),
    since: Moment | None = None,
    until: Moment | None = None,
    lake: str | None = None,
    slow: Duration = SLOW,
    report: str | None = None,
    run: runs.Run | None = None,
) -> Reconciled:
    """Hold what was published in a window against what groups did with it.

    `report` is the path of an HTML page to write.

    >>> from onward.pipeline.sessions import session                       # doctest: +SKIP
    >>> reconcile(session(), place=place_of(), since="1h").is_settled     # doctest: +SKIP
    True
    """
    now_ms = SystemClock().now_ms()
    window = window_of(since, until, now_ms=now_ms)
    slow_ms = duration_ms(slow, "slow")
    with runs.using(run, place, job="reconcile", topics=list(topics)) as told:
        with open_client(place, name="spark-reconcile") as mq:
            born_at_ms = {one.topic: one.created_at_ms for one in mq.topics()}
            names = choose_topics(born_at_ms, topics)
            pairs, notes = find_pairs(mq, names, groups)
            node = str(mq.status().get("node", ""))
        with _kept(_messages(spark, place, names, window, lake, named=topics)) as messages:
            # After the read is planned: what is gone by then is all that it can miss.
            gone = find_gone(place, names, window, lake)
            ends = _ends(messages)
            published = sum(one.rows for one in ends)
            told.progress(rows=published)
            with views.kept_trace(spark, place, topics=names, window=window, lake=lake) as rows:
                is_cut = is_read_cut(
                    place, views.TRACE_TOPIC, lake=lake, since_ms=window.since_ms
                )  # fmt: skip
                bounds = {one.topic: (one.low, one.high) for one in ends}
                if gone:
                    older = _older(spark, place, gone, window, lake, born_at_ms)
                    gone = concerned(gone, pairs, starts=_starts(rows), seen=bounds, older=older)
                buried = _buried(place, pairs, bounds) if is_cut else []
                judged = judge(
                    messages, rows, pairs, bounds=bounds, trust_cursor=is_cut, buried=buried
                )  # fmt: skip
                with _kept(judged) as kept:
                    found = _summarise(kept, ends, slow_ms=slow_ms)
        if is_cut:
            notes.append(_CUT)
        notes += say_gone(gone)
        page = found._replace(
            servers=place.servers, since_ms=window.since_ms, until_ms=window.until_ms,
            made_at_ms=now_ms, published=published, gone=tuple(gone),
            notes=tuple(notes), node=node, version=onward.__version__,
            options=_said(topics, groups, since, until, lake, slow_ms),
        )  # fmt: skip
        result = _result(page)
        if report is not None:
            _write(report, page)
        told.result(**{name: value for name, value in result._asdict().items()
                       if isinstance(value, int)})  # fmt: skip
        return result


_CUT = (
    "the trace no longer reaches back to the window: what lies below a group's cursor counts as "
    "settled"
)


@contextmanager
def _kept(frame: DataFrame) -> Iterator[DataFrame]:
    """Keep a frame while the block runs: it is asked several times."""
    kept = frame.persist(views.KEPT)
    try:
        yield kept
    finally:
        kept.unpersist()


def find_pairs(
    mq: SyncClient, topics: Sequence[str], groups: Sequence[str]
) -> tuple[list[Pair], list[str]]:
    """Return which groups consume which of the topics, and what is to be said about the rest."""
    known = {one.group: one for one in mq.groups()}
    wanted = choose_groups(known, groups)
    pairs = [pair for name in wanted for pair in _pairs_of(known[name], set(topics))]
    if len(pairs) > PAIRS_MAX:
        raise InvalidRequest(f"{len(pairs):,} pairs of topic and group are too many: choose some")
    notes = [
        f"group {name!r} is a broadcast: each member has its own position, so it is not checked"
        for name in wanted
        if known[name].mode == "broadcast"
    ]
    alone = sorted(set(topics) - {pair.topic for pair in pairs})
    if alone:
        some = ", ".join(alone[:5]) + (f" and {len(alone) - 5} more" if len(alone) > 5 else "")
        notes.append(f"no group is checked for: {some}")
    return pairs, notes


def _pairs_of(group: GroupDescription, topics: set[str]) -> list[Pair]:
    if group.mode == "broadcast":
        return []
    shares = [share for share in group.topics if share.topic in topics]
    return [Pair(share.topic, group.group, share.cursor, share.dead) for share in shares]


def _buried(place: Place, pairs: Sequence[Pair], bounds: views.Bounds) -> list[Buried]:
    """Return the dead letters that groups have now: of these the trace may tell no more."""
    found: list[Buried] = []
    with open_client(place, name="spark-reconcile") as mq:
        for pair in pairs:
            low, high = bounds.get(pair.topic, (0, 0))
            if not pair.dead or low >= high:
                continue
            for letter in mq.dead_letters(pair.group, topic=pair.topic):
                if low <= letter.offset < high:
                    found.append(Buried(pair.topic, pair.group, letter.offset, letter.cause))
                if len(found) > BURIED_MAX:
                    raise InvalidRequest(
                        f"more than {BURIED_MAX:,} dead letters are too many: choose some groups"
                    )
    return found


# --- what nobody can look at any more ------------------------------------------------------------


def concerned(
    gone: Sequence[Gone],
    pairs: Sequence[Pair],
    *,
    starts: Mapping[tuple[str, str], int],
    seen: views.Bounds,
    older: Mapping[str, int] | None = None,
) -> list[Gone]:
    """Return what is gone as far as a group had to do with it, and it was not read just before.

    `starts` has the groups whose start is known; `seen` has what was read of each topic; `older`
    has the offsets below which a topic's messages are from before the window.

    >>> concerned([Gone("t", 0, 9)], [Pair("t", "g", 0)], starts={("t", "g"): 4}, seen={})
    [Gone(topic='t', first=4, end=9)]
    """
    older = older or {}
    begins: dict[str, int] = {}
    for pair in pairs:
        start = starts.get((pair.topic, pair.group), 0)
        begins[pair.topic] = min(start, begins.get(pair.topic, start))
    cut = []
    for topic, first, end in gone:
        low = seen.get(topic, (end, end))[0]
        # Retention may go on while messages are read: what was seen is not unchecked.
        begin = max(first, begins.get(topic, end), older.get(topic, 0))
        cut.append(Gone(topic, begin, low if first <= low < end else end))
    return [one for one in cut if one.first < one.end]


def _older(
    spark: SparkSession, place: Place, gone: Sequence[Gone], window: Stretch, lake: str | None,
    born_at_ms: Mapping[str, int],
) -> dict[str, int]:  # fmt: skip
    """Return the offsets below which the trace proves messages to be older than the window."""
    if window.since_ms is None:
        return {}
    born = {one.topic: born_at_ms[one.topic] for one in gone}
    told = views.since_birth(views.trace_frame(spark, place, lake=lake), born)
    # Of a clock that was set back a message may have a later time than what was done to it.
    return views.ends_before(told, window.since_ms - duration_ms(views.MARGIN))


def _starts(rows: DataFrame) -> dict[tuple[str, str], int]:
    known = views.marks(rows).where("start IS NOT NULL").select("topic", "group", "start")
    return {(row["topic"], row["group"]): row["start"] for row in known.collect()}


# --- what Spark computes -------------------------------------------------------------------------


class _End(NamedTuple):
    topic: str
    low: int
    high: int
    rows: int
    first_ms: int
    last_ms: int


def _messages(
    spark: SparkSession, place: Place, topics: Sequence[str], window: Stretch, lake: str | None,
    *, named: Sequence[str],
) -> DataFrame:  # fmt: skip
    columns = ["topic", "offset", "published_at"]
    if not topics:
        return spark.createDataFrame([], "topic STRING, offset BIGINT, published_ms BIGINT")
    found = read(
        spark, place=place, topics=topics, lake=lake, start=window.since, end=window.until,
        columns=columns, named=named,
        # A gap in the lake is counted as unchecked; without one, what goes meanwhile is an error.
        on_gap="fail" if lake is None else "skip",
    )  # fmt: skip
    timed = found.select("topic", "offset", F.unix_millis("published_at").alias("published_ms"))
    # The log is asked by stretches: the edges are exact only here.
    timed = timed.where(F.col("published_ms") < window.until_ms)
    if window.since_ms is not None:
        timed = timed.where(F.col("published_ms") >= window.since_ms)
    return timed


def _ends(messages: DataFrame) -> list[_End]:
    found = messages.groupBy("topic").agg(
        F.min("offset"), F.max("offset") + 1, F.count("*"), F.min("published_ms"),
        F.max("published_ms"),
    )  # fmt: skip
    return sorted(_End(*row) for row in found.collect())


def judge(
    messages: DataFrame,
    rows: DataFrame,
    pairs: Sequence[Pair],
    *,
    bounds: views.Bounds,
    trust_cursor: bool = False,
    buried: Sequence[Buried] = (),
) -> DataFrame:
    """Return one row for each message and group that has to do with it, with its verdict.

    Columns: topic, group, offset, published_ms, verdict (a field of Verdicts, or settled), did,
    at_ms, member, cause, failures, repeats, and took_ms from the publish to the ack.
    """
    spark = messages.sparkSession
    known = spark.createDataFrame(
        [pair[:3] for pair in pairs], "topic STRING, `group` STRING, cursor BIGINT"
    )
    keys = ["topic", "group"]
    due = messages.join(F.broadcast(known), "topic").join(
        F.broadcast(views.marks(rows)), keys, "left"
    )
    told = due.join(views.outcomes(rows, bounds=bounds), [*keys, "offset"], "left")
    verdict = F.when(F.col("state").isNotNull(), F.col("state"))
    if buried:
        letters = spark.createDataFrame(
            list(buried), "topic STRING, `group` STRING, offset BIGINT, buried_cause STRING"
        )
        told = told.join(letters, [*keys, "offset"], "left")
        told = told.withColumn("cause", F.coalesce("cause", "buried_cause"))
        verdict = verdict.when(F.col("buried_cause").isNotNull(), "dead")
    # Of what nothing is told only the start of the group and its last reset decide.
    passed = F.expr("offset < try_element_at(resets, -1).offset")
    verdict = verdict.when(
        F.expr("offset < start") & F.coalesce(passed, F.lit(True)), "before"
    ).when(passed, "settled")
    if trust_cursor:
        verdict = verdict.when(F.expr("offset < cursor"), "settled")
    # The cursors were asked for before the trace was read: below them it tells of everything.
    verdict = verdict.when(F.expr("offset >= cursor"), "undelivered").otherwise("missing")
    judged = told.withColumn("verdict", verdict).where("verdict <> 'before'")
    took = F.when(F.expr("did = 'acked'"), F.greatest(F.expr("at_ms - published_ms"), F.lit(0)))
    untold = F.when(F.expr("verdict = 'settled'"), F.when(passed, "skipped").otherwise("acked"))
    return judged.select(
        "topic", "group", "offset", "published_ms", "verdict", "at_ms", "member", "cause",
        F.coalesce("did", untold).alias("did"),
        F.coalesce("failures", F.lit(0)).alias("failures"),
        F.coalesce("repeats", F.lit(0)).alias("repeats"),
        took.alias("took_ms"),
    )  # fmt: skip


def _summarise(judged: DataFrame, ends: Sequence[_End], *, slow_ms: int) -> Report:
    bar_ms = bar_of(ends)
    barred = judged.withColumn("bar", F.expr(f"published_ms DIV {bar_ms} * {bar_ms}"))
    sets = [["topic", "group", "verdict", "did"], ["bar", "verdict", "did"]]
    counted = barred.groupingSets(sets, "topic", "group", "bar", "verdict", "did")
    counts = counted.agg(F.count("*").alias("n")).collect()
    timed = judged.groupBy("topic", "group").agg(
        F.expr("approx_percentile(took_ms, array(0.5, 0.95, 0.99), 10000)").alias("took"),
        F.sum(F.expr(f"CAST({_slow(slow_ms)} AS INT)")).alias("slow"),
        F.sum(F.expr("CAST(repeats > 0 AS INT)")).alias("repeated"),
    )
    lists, ranges = _lists(judged), _ranges(judged, slow_ms=slow_ms)
    return Report(
        servers="", since_ms=None, until_ms=0, made_at_ms=0, published=0, slow_ms=slow_ms,
        lines=_lines(counts, timed.collect()), bars=_bars(counts), bar_ms=bar_ms,
        undelivered=ranges["undelivered"], missing=ranges["missing"],
        retrying=lists["retrying"], dead=lists["dead"], slow=ranges["slow"],
        repeated=lists["repeated"],
    )  # fmt: skip


def bar_of(ends: Iterable[_End]) -> int:
    """Return how long a step of the chart is, so that there are not too many."""
    listed = list(ends)
    if not listed:
        return 60_000
    span_ms = max(end.last_ms for end in listed) - min(end.first_ms for end in listed)
    fitting = (step for step in _BAR_STEPS_MS if span_ms // step < BARS_MAX)
    return next(fitting, span_ms // BARS_MAX + 1)


def _bars(counts: Iterable[Row]) -> tuple[Bar, ...]:
    found: dict[int, Verdicts] = {}
    for row in counts:
        if (at_ms := row["bar"]) is not None:
            found[at_ms] = add_all((found.get(at_ms, Verdicts()), _verdicts(row)))
    return tuple(Bar(at_ms, found[at_ms]) for at_ms in sorted(found))


def _verdicts(row: Row) -> Verdicts:
    kind = row["verdict"]
    if kind == "settled":
        kind = _KINDS.get(row["did"], "acked")
    return Verdicts(**{kind: row["n"]})


def _lines(counts: Iterable[Row], timed: Iterable[Row]) -> tuple[GroupLine, ...]:
    found: dict[tuple[str, str], Verdicts] = {}
    for row in counts:
        if row["bar"] is None:
            pair = row["topic"], row["group"]
            found[pair] = add_all((found.get(pair, Verdicts()), _verdicts(row)))
    lines = []
    for row in timed:
        p50, p95, p99 = row["took"] or (None, None, None)
        lines.append(
            GroupLine(
                row["topic"], row["group"], found[row["topic"], row["group"]],
                repeated=row["repeated"] or 0, slow=row["slow"] or 0, p50_ms=p50, p95_ms=p95,
                p99_ms=p99,
            )
        )  # fmt: skip
    return tuple(sorted(lines, key=lambda line: (line.topic, line.group)))


def _lists(judged: DataFrame) -> dict[str, tuple[Found, ...]]:
    """Return the first messages of each list, all with one look at the rows."""
    wanted = {
        "dead": "verdict = 'dead'", "retrying": "verdict = 'retrying'", "repeated": "repeats > 0",
    }  # fmt: skip
    lists = F.array(*(F.when(F.expr(where), name) for name, where in wanted.items()))
    order = Window.partitionBy("list").orderBy("topic", "offset", "group")
    listed = (
        judged.withColumn("list", F.explode(F.array_compact(lists)))
        .withColumn("place", F.row_number().over(order))
        .where(F.col("place") <= LISTED_MAX)
    )
    rows = sorted(listed.collect(), key=lambda row: int(row["place"]))
    return {name: tuple(_found(row) for row in rows if row["list"] == name) for name in wanted}


def _slow(slow_ms: int) -> str:
    """Return the condition of an ack that came late; batch readers are late by their nature."""
    batch = f"coalesce(member = '{SPARK}' OR member LIKE '{ARCHIVE} %', false)"
    return f"took_ms > {slow_ms} AND NOT {batch}"


def _ranges(judged: DataFrame, *, slow_ms: int) -> dict[str, tuple[Found, ...]]:
    """Return the first ranges of messages that lack an outcome, or were slow: many are adjacent.

    The time and the member of a range are those of its slowest message.
    """
    kinds = ("undelivered", "missing", "slow")
    # Only what was acked has a time, so no message is in two lists.
    listed = judged.withColumn(
        "list", F.when(F.expr(_slow(slow_ms)), "slow").otherwise(F.col("verdict"))
    ).where(F.col("list").isin(*kinds))
    place = Window.partitionBy("list", "topic", "group").orderBy("offset")
    apart = listed.withColumn("apart", F.col("offset") - F.row_number().over(place))
    ranges = apart.groupBy("list", "topic", "group", "apart").agg(
        F.min("offset").alias("first"), F.max("offset").alias("last"),
        F.min("published_ms").alias("published_ms"), F.max("took_ms").alias("took_ms"),
        F.max_by("member", "took_ms").alias("member"),
    )  # fmt: skip
    order = Window.partitionBy("list").orderBy("topic", "first", "group")
    first = ranges.withColumn("place", F.row_number().over(order)).where(
        F.col("place") <= LISTED_MAX
    )
    found: dict[str, list[Found]] = {kind: [] for kind in kinds}
    for row in sorted(first.collect(), key=lambda row: int(row["place"])):
        found[row["list"]].append(
            Found(
                row["topic"], row["first"], row["group"], row["published_ms"], last=row["last"],
                member=row["member"] or "", took_ms=row["took_ms"],
            )
        )  # fmt: skip
    return {kind: tuple(listed) for kind, listed in found.items()}


def _said(
    topics: Sequence[str], groups: Sequence[str], since: Moment | None, until: Moment | None,
    lake: str | None, slow_ms: int,
) -> str:  # fmt: skip
    """Return what was asked for, in the words of the command line."""
    words = [*topics, *(f"--group {name}" for name in groups)]
    given = {"since": since, "until": until, "lake": lake}
    words += [f"--{name} {value}" for name, value in given.items() if value is not None]
    return " ".join([*words, f"--slow {format_duration(slow_ms)}"])


def _found(row: Row) -> Found:
    return Found(
        row["topic"], row["offset"], row["group"], row["published_ms"],
        what="" if row["verdict"] == row["did"] else row["did"] or "",
        member=row["member"] or "", cause=row["cause"] or "", took_ms=row["took_ms"],
    )  # fmt: skip


# --- what comes of it ----------------------------------------------------------------------------


def _result(page: Report) -> Reconciled:
    total = page.verdicts
    return Reconciled(
        is_settled=page.is_settled, published=page.published, due=total.total,
        settled=total.settled, missing=total.missing, retrying=total.retrying, dead=total.dead,
        slow=page.slow_total, repeated=page.repeated_total, unchecked=page.unchecked,
        undelivered=total.undelivered,
        lines=tuple(page.lines), report=page,
    )  # fmt: skip


def _write(path: str, page: Report) -> None:
    try:
        Path(path).write_text(render(page), encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(
            f"the report cannot be written to {path!r}: {error.strerror}"
        ) from None
