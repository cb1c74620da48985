"""`replay`: messages of the past once more, into a topic or to one group.

    replay(spark, place=place, topic="orders", lake="/lake", since="2026-11-01T00:00Z",
           where="tag = 'eu'", to_topic="orders-again", run_id="fix-17")

    messages of lake and log ──▶ where ──┬─▶ to_topic: new messages, by the sink
                                         └─▶ to_group: delivered again, where they are

To a topic: key, headers, tag, trace id, priority and tenant are kept, the order of offsets as well,
and a header says where each one comes from. What a run is to do is decided once, and written down
under its `run_id` (the range of offsets, cut into pieces when there is a `rate`): a run that is
repeated does what is missing of it, and stores nothing twice (`plans`).

To a group: only what is still in the log can be delivered again; what only the lake has is counted
as `gone`. Messages that the group has not finished are delivered anyway, and not counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import Observation
from pyspark.sql import functions as sql

from onward.errors import InvalidRequest
from onward.message.names import check_group_name, check_topic_name
from onward.pipeline import runs
from onward.pipeline.append import append
from onward.pipeline.expressions import matching
from onward.pipeline.lake_read import Bound, read
from onward.pipeline.offsets import Range, parts_of, ranges_of_frame
from onward.pipeline.place import Place, open_client
from onward.pipeline.plans import Book, Piece, Plan, check_run_id

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

FROM_HEADER = "onward-replayed-from"
KEPT = ("key", "body", "tag", "trace_id", "priority", "tenant")

PIECE_S = 5
"""With a rate, rows are written in pieces that are worth so many seconds."""
_BUCKETS_MAX = 10_000
_GROUP_PART_ROWS_MAX = 100_000


class Replayed(NamedTuple):
    """What a replay did, or with `dry_run` would do."""

    rows: int
    gone: int = 0
    """Rows for a group that are no longer in the log."""
    run_id: str = ""
    is_repeat: bool = False
    """The run was done already: nothing was stored again."""


def replay(
    spark: SparkSession,
    *,
    place: Place,
    topic: str,
    lake: str | None = None,
    since: Bound = None,
    until: Bound = None,
    where: str | None = None,
    to_topic: str | None = None,
    to_group: str | None = None,
    rate: float | None = None,
    run_id: str | None = None,
    dry_run: bool = False,
    run: runs.Run | None = None,
) -> Replayed:
    """Publish messages once more to `to_topic`, or deliver them once more to `to_group`."""
    check_topic_name(topic)
    _check(to_topic=to_topic, to_group=to_group, rate=rate, run_id=run_id)
    to = {"to_topic": to_topic, "to_group": to_group}
    with runs.using(run, place, job="replay", topic=topic, **to) as run:
        source = _Source(spark, place, topic, lake, since, until, where)
        source.check()
        if to_group is not None:
            done = _to_group(source, to_group, rate=rate, dry_run=dry_run, run=run)
        elif dry_run:
            done = Replayed(source.frame().count(), run_id=run_id or "")
        else:
            assert to_topic is not None
            done = _to_topic(source, to_topic, run_id=run_id, rate=rate, run=run)
        run.result(**done._asdict(), dry_run=dry_run)
        return done


class _Source(NamedTuple):
    """What is replayed: messages of a topic, from lake and log."""

    spark: SparkSession
    place: Place
    topic: str
    lake: str | None
    since: Bound
    until: Bound
    where: str | None

    def frame(self, columns: Sequence[str] | None = None) -> DataFrame:
        """Return the messages that are meant; without a predicate only the given columns."""
        found = read(
            self.spark, place=self.place, topics=[self.topic], lake=self.lake, start=self.since,
            end=self.until, columns=None if self.where else columns,
        )  # fmt: skip
        return matching(found, self.where)

    def piece(self, first: int, end: int) -> DataFrame:
        """Return those of one range of offsets."""
        found = read(
            self.spark, place=self.place, topics=[self.topic], lake=self.lake,
            start={self.topic: first}, end={self.topic: end},
        )  # fmt: skip
        return matching(found, self.where)

    def check(self) -> None:
        """Raise what is wrong with the topic or the predicate, before anything is written."""
        self.frame(["offset"])


def _check(
    *, to_topic: str | None, to_group: str | None, rate: float | None, run_id: str | None
) -> None:
    if (to_topic is None) == (to_group is None):
        raise InvalidRequest("a replay goes to a topic or to a group: say to_topic or to_group")
    if to_topic is not None:
        check_topic_name(to_topic)
    if to_group is not None:
        check_group_name(to_group)
        if run_id is not None:
            raise InvalidRequest("run_id is for a replay to a topic: a group gets it each time")
    if rate is not None and not 0 < rate < 1e9:
        raise InvalidRequest(f"a rate is more than 0 messages per second, not {rate:g}")
    check_run_id(run_id)


# --- to a topic -----------------------------------------------------------------------------------


def _to_topic(
    source: _Source, to_topic: str, *, run_id: str | None, rate: float | None, run: runs.Run
) -> Replayed:
    pace = _Pace(rate)
    if run_id is None:
        pieces = _pieces(source, rate=rate)
        for piece in pieces:
            pace.wait()
            pace.rows += _write(source, to_topic, piece)
            run.progress(rows=pace.rows, lag=pieces[-1][1] - piece[1])
        return Replayed(pace.rows)
    with open_client(source.place, name="replay") as mq:
        book = Book(mq, run_id)
        wanted = Plan(topic=source.topic, to_topic=to_topic, where=source.where)
        plan = book.decide(wanted, lambda: _pieces(source, rate=rate))
        before = book.written()
        for piece in plan.pieces:
            if piece not in before:
                pace.wait()
            # Another try may be at work as well.
            if piece not in book.written():
                rows = _write(source, to_topic, piece, write_id=book.write_id(piece))
                book.note(piece, rows=rows)
                pace.rows += rows
            run.progress(rows=pace.rows, lag=plan.pieces[-1][1] - piece[1])
        rows = sum(book.written().values())
    is_repeat = bool(plan.pieces) and before.keys() >= set(plan.pieces)
    return Replayed(rows, run_id=run_id, is_repeat=is_repeat)


def _pieces(source: _Source, *, rate: float | None) -> list[Piece]:
    """Return the range of offsets that is meant, in pieces of so many rows as the rate allows."""
    offsets = source.frame(["offset"]).select("offset")
    ends = offsets.agg(sql.min("offset"), sql.max("offset")).first()
    assert ends is not None
    if ends[0] is None:
        return []
    first, end = int(ends[0]), int(ends[1]) + 1
    if rate is None:
        return [(first, end)]
    width = max(1, -(-(end - first) // _BUCKETS_MAX))
    bucket = sql.floor((sql.col("offset") - first) / width).cast("bigint")
    counts = offsets.groupBy(bucket.alias("bucket")).count().collect()
    sizes = {int(row["bucket"]): int(row["count"]) for row in counts}
    return pieces_of(sizes, first=first, end=end, width=width, rows_max=rate * PIECE_S)


def pieces_of(
    sizes: dict[int, int], *, first: int, end: int, width: int, rows_max: float
) -> list[Piece]:
    """Cut a range of offsets into pieces of at most so many rows, where buckets allow.

    >>> pieces_of({0: 3, 1: 3, 5: 4}, first=100, end=160, width=10, rows_max=6)
    [(100, 150), (150, 160)]
    """
    pieces, begin, rows = [], first, 0
    for bucket, count in sorted(sizes.items()):
        edge = first + bucket * width
        if rows and rows + count > rows_max:
            pieces.append((begin, edge))
            begin, rows = edge, 0
        rows += count
    return [*pieces, (begin, end)]


def _write(source: _Source, to_topic: str, piece: Piece, *, write_id: str | None = None) -> int:
    """Write one piece; return how many rows it has, whether or not they were there already."""
    counted = Observation()
    frame = source.piece(*piece).orderBy("offset").select(*KEPT, _headers().alias("headers"))
    written = frame.observe(counted, sql.count(sql.lit(1)).alias("rows"))
    append(written, source.place, topic=to_topic, write_id=write_id)
    return int(counted.get["rows"])


def _headers() -> Column:
    """Return a message's headers and where it comes from; of a chain of replays the last counts."""
    name = sql.lit(FROM_HEADER)
    place = sql.concat_ws("/", sql.col("topic"), sql.col("offset").cast("string"))
    here = sql.create_map(name, sql.encode(place, "UTF-8"))
    others = sql.map_filter(sql.col("headers"), lambda key, _: key != name)
    return sql.coalesce(sql.map_concat(others, here), here)


# --- to a group -----------------------------------------------------------------------------------


def _to_group(
    source: _Source, group: str, *, rate: float | None, dry_run: bool, run: runs.Run
) -> Replayed:
    with open_client(source.place, name="replay") as mq:
        mq.group(group)  # raises when there is none
        found = ranges_of_frame(source.frame(["offset"]).select("offset"))
        first_offset = mq.topic(source.topic).first_offset
        there = [(max(first, first_offset), end) for first, end in found if end > first_offset]
        gone = _size(found) - _size(there)
        pace = _Pace(rate)
        rows_max = min(_GROUP_PART_ROWS_MAX, int(rate * PIECE_S) or 1) if rate else None
        left = _size(there)
        for part in parts_of(there, rows_max=rows_max or _GROUP_PART_ROWS_MAX):
            if not dry_run:
                pace.wait()
            offsets = _offsets(part)
            pace.rows += mq.replay(group, source.topic, offsets, dry_run=dry_run)
            left -= _size(part)
            run.progress(rows=pace.rows, lag=left)
    return Replayed(pace.rows, gone=gone)


def _offsets(part: Sequence[Range]) -> range | list[int]:
    if len(part) == 1:
        return range(*part[0])
    return [offset for first, end in part for offset in range(first, end)]


def _size(ranges: Iterable[Range]) -> int:
    return sum(end - first for first, end in ranges)


class _Pace:
    """Holds a job back so that it does no more than so many rows per second."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._began_s = time.monotonic()
        self.rows = 0

    def wait(self) -> None:
        """Wait until all rows so far are paid for."""
        if self._rate is not None:
            time.sleep(max(0.0, self._began_s + self.rows / self._rate - time.monotonic()))
