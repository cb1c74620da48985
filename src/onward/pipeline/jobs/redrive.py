"""`redrive`: dead letters that a predicate picks are delivered once more, to their group only.

    redrive(spark, place=place, group="billing", where="cause like 'timeout%' and attempts > 3")

The predicate is SQL over the columns of COLUMNS (and `body_text`): the message, which is null when
retention has taken it away, and how it died. All dead letters are looked at before the first is
moved, some thousands at a time, so their number is limited by no memory. `dry_run` only looks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from onward.client.groups import DeadLetterDescription
from onward.client.sync import SyncClient
from onward.pipeline import runs
from onward.pipeline.expressions import matching
from onward.pipeline.offsets import Range, merged, parts_of, ranges_of
from onward.pipeline.place import Place, open_client

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

COLUMNS = pa.schema(
    {
        "topic": pa.string(), "offset": pa.int64(), "key": pa.string(), "tag": pa.string(),
        "body": pa.binary(), "headers": pa.map_(pa.string(), pa.binary()), "cause": pa.string(),
        "attempts": pa.int32(), "member": pa.string(), "died_at": pa.timestamp("us", "UTC"),
    }
)  # fmt: skip
EXAMPLES_MAX = 10

_LOOK_ROWS = 10_000
_LOOK_BYTES = 32 << 20
_PART_ROWS = 100_000


class Example(NamedTuple):
    """A dead letter that matched, for people."""

    id: str
    key: str | None
    attempts: int
    cause: str


class Redriven(NamedTuple):
    """What a redrive did, or with `dry_run` would do."""

    matched: int
    redriven: int
    examples: tuple[Example, ...] = ()


def redrive(
    spark: SparkSession,
    *,
    place: Place,
    group: str,
    topic: str | None = None,
    where: str,
    dry_run: bool = False,
    run: runs.Run | None = None,
) -> Redriven:
    """Deliver the dead letters of a group again that match; without `topic` those of all topics."""
    with (
        runs.using(run, place, job="redrive", group=group, topic=topic) as run,
        open_client(place, name="redrive") as mq,
    ):
        matching(_frame(spark, []), where)  # what is wrong with it is said first
        count = mq.group(group).dead
        found = _Found()
        for letters in _pages(mq.dead_letters(group, topic=topic, messages=True)):
            found.add(matching(_frame(spark, letters), where))
            found.looked_at += len(letters)
            run.progress(rows=found.looked_at, lag=max(0, count - found.looked_at))
        redriven = 0 if dry_run else _redrive(mq, group, found.ranges)
        done = Redriven(found.count, redriven, tuple(found.examples))
        run.result(matched=done.matched, redriven=done.redriven, dry_run=dry_run)
        return done


class _Found:
    """What has matched so far."""

    def __init__(self) -> None:
        self.count = 0
        self.looked_at = 0
        self.ranges: dict[str, list[Range]] = {}
        self.examples: list[Example] = []

    def add(self, matched: DataFrame) -> None:
        rows = matched.select("topic", "offset", "key", "attempts", "cause").collect()
        self.count += len(rows)
        self.examples += map(_example, rows[: EXAMPLES_MAX - len(self.examples)])
        offsets: dict[str, list[int]] = {}
        for row in rows:
            offsets.setdefault(row["topic"], []).append(row["offset"])
        for topic, listed in offsets.items():
            self.ranges[topic] = merged(self.ranges.get(topic, []) + ranges_of(listed))


def _example(row: Row) -> Example:
    return Example(f"{row['topic']}/{row['offset']}", row["key"], row["attempts"], row["cause"])


def _pages(letters: Iterator[DeadLetterDescription]) -> Iterator[list[DeadLetterDescription]]:
    """Give dead letters in pages of some thousand, fewer when their bodies are large."""
    page: list[DeadLetterDescription] = []
    size = 0
    for letter in letters:
        page.append(letter)
        size += 0 if letter.message is None else len(letter.message.body)
        if len(page) == _LOOK_ROWS or size >= _LOOK_BYTES:
            yield page
            page, size = [], 0
    if page:
        yield page


def _frame(spark: SparkSession, letters: list[DeadLetterDescription]) -> DataFrame:
    rows = [_row(letter) for letter in letters]
    columns = zip(*rows, strict=True) if rows else ([] for _ in COLUMNS)
    arrays = [pa.array(list(one), field.type) for one, field in zip(columns, COLUMNS, strict=True)]
    return spark.createDataFrame(pa.Table.from_arrays(arrays, schema=COLUMNS))


def _row(letter: DeadLetterDescription) -> tuple[object, ...]:
    message = letter.message
    key, tag, body, headers = (
        (None, None, None, None)
        if message is None
        else (message.key, message.tag, message.body, _headers(message.headers))
    )
    died_at_us = letter.died_at_ms * 1_000
    return (
        letter.topic, letter.offset, key, tag, body, headers, letter.cause, letter.attempts,
        letter.member, died_at_us,
    )  # fmt: skip


def _headers(headers: dict[str, str | bytes] | None) -> list[tuple[str, bytes]] | None:
    if headers is None:
        return None
    return [
        (name, value.encode(errors="surrogateescape") if isinstance(value, str) else value)
        for name, value in headers.items()
    ]


def _redrive(mq: SyncClient, group: str, ranges: dict[str, list[Range]]) -> int:
    count = 0
    for topic, listed in ranges.items():
        for part in parts_of(listed, rows_max=_PART_ROWS):
            offsets = [offset for first, end in part for offset in range(first, end)]
            count += mq.redrive(group, topic=topic, offsets=offsets)
    return count
