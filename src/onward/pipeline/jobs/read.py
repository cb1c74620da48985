"""`read`: topics as one table over lake and live log; some rows to look at, or all as files.

    read_rows(spark, place=place, topics=["orders"], where="key = 'a'", limit=20)
    read_out(spark, place=place, topics=["orders"], lake="/lake", out="/tmp/orders", format="json")

What is behind both is `onward.pipeline.lake_read.read`, which gives the DataFrame itself.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pyspark.errors import AnalysisException
from pyspark.sql import Observation
from pyspark.sql import functions as sql

from onward.errors import AlreadyExists, InvalidRequest
from onward.pipeline import runs
from onward.pipeline.expressions import first_sentence, matching, quietly
from onward.pipeline.lake_read import Bound, read
from onward.pipeline.place import Place
from onward.pipeline.schema import message_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FORMATS = ("parquet", "json", "orc")


def read_rows(
    spark: SparkSession,
    *,
    place: Place,
    topics: Sequence[str],
    lake: str | None = None,
    start: Bound = None,
    end: Bound = None,
    where: str | None = None,
    columns: Sequence[str] | None = None,
    limit: int = 20,
    run: runs.Run | None = None,
) -> list[dict[str, Any]]:
    """Return the first messages that match, in the order of topic and offset."""
    with runs.using(run, place, job="read", topics=list(topics)) as run:
        frame = _frame(spark, place, topics, lake, start, end, where)
        first = frame.orderBy("topic", "offset").limit(limit)
        rows = first.select(*message_schema(columns).names).collect()
        run.progress(rows=len(rows))
        run.result(rows=len(rows))
        return [row.asDict() for row in rows]


def read_out(
    spark: SparkSession,
    *,
    place: Place,
    topics: Sequence[str],
    lake: str | None = None,
    start: Bound = None,
    end: Bound = None,
    where: str | None = None,
    columns: Sequence[str] | None = None,
    limit: int | None = None,
    out: str,
    format: str = "parquet",  # noqa: A002 - the word that Spark has for it
    run: runs.Run | None = None,
) -> int:
    """Write the messages that match to a folder that does not exist yet; return how many."""
    if format not in FORMATS:
        raise InvalidRequest(f"{format!r} is no format to write: {', '.join(FORMATS)}")
    if os.path.lexists(out):
        raise AlreadyExists(f"{out!r} exists already: messages are written to a new folder")
    with runs.using(run, place, job="read", topics=list(topics), out=out) as run:
        frame = _frame(spark, place, topics, lake, start, end, where)
        chosen = frame if limit is None else frame.limit(limit)
        counted = Observation()
        shown = chosen.select(*message_schema(columns).names)
        written = shown.observe(counted, sql.count(sql.lit(1)).alias("rows"))
        try:
            with quietly():
                written.write.format(format).mode("error").save(out)
        except AnalysisException as error:
            raise InvalidRequest(f"{out!r} cannot be written: {first_sentence(error)}") from None
        rows = int(counted.get["rows"])
        run.progress(rows=rows, lag=0)
        run.result(rows=rows, out=out)
        return rows


def _frame(
    spark: SparkSession, place: Place, topics: Sequence[str], lake: str | None, start: Bound,
    end: Bound, where: str | None,
) -> DataFrame:  # fmt: skip
    found = read(spark, place=place, topics=topics, lake=lake, start=start, end=end)
    return matching(found, where)
