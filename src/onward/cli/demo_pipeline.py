"""The last part of `onward demo`: Spark reads what the demo has published, and asks about it.

    archive ──▶ the lake ──▶ read over lake and log ──▶ reconcile, with a report ──▶ SQL

Without PySpark this part is left out, and the demo says so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from onward.cli.output import print_line

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from onward.pipeline.place import Place

Check = Callable[[bool, str], None]

QUERY = "select topic, count(*) as messages from messages group by topic order by topic"


def show_pipeline(address: str, folder: Path, *, check: Check) -> None:
    """Archive, read, reconcile and ask; every step is checked."""
    if find_spec("pyspark") is None:
        print_line("  - left out, for PySpark is missing: pip install 'onward[spark]'")
        return
    from onward.pipeline.place import Place
    from onward.pipeline.quiet import kept_quiet
    from onward.pipeline.sessions import session

    place = Place(address)
    started_s = time.perf_counter()
    # What Spark's Java says while it starts and ends is of no use to who watches.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    with kept_quiet():
        spark = session(place=place, name="onward-demo")
    try:
        took_s = time.perf_counter() - started_s
        check(True, f"started Spark {spark.version} on all cores of this machine in {took_s:.1f} s")
        _archive_and_read(spark, place, str(folder / "lake"), check)
        _reconcile(spark, place, folder / "report.html", check)
        _ask(spark, place, str(folder / "lake"), check)
    finally:
        spark.stop()


def _archive_and_read(spark: SparkSession, place: Place, lake: str, check: Check) -> None:
    from onward.pipeline.jobs.archive import archive
    from onward.pipeline.lake_read import read
    from onward.pipeline.place import open_client

    with open_client(place, name="demo") as mq:
        before = mq.topic("readings").messages
        done = archive(spark, place=place, lake=lake, topics=["readings", "invoices"])
        invoices = mq.topic("invoices").messages
        check(
            done.rows == before + invoices,
            f"archived readings and invoices: {done.rows:,} messages in {done.files} Parquet files",
        )
        mq.publish("readings", b"after the archive")
        frame = read(spark, place=place, lake=lake, topics=["readings"])
        count, last = frame.selectExpr("count(distinct offset)", "max(offset)").first() or (0, 0)
        check(
            (count, last) == (before + 1, before),
            f"read lake and live log as one table: {count:,} offsets, no gap and no repeat",
        )


def _reconcile(spark: SparkSession, place: Place, report: Path, check: Check) -> None:
    from onward.pipeline.jobs.reconcile import reconcile

    found = reconcile(spark, place=place, topics=["invoices"], report=str(report))
    check(
        found.is_settled and report.stat().st_size > 1_000,
        f"reconciled invoices: {found.published} published, all of them settled by "
        f"{len(found.lines)} groups, {found.missing} missing, {found.repeated} repeated; "
        f"its report is one HTML page",
    )


def _ask(spark: SparkSession, place: Place, lake: str, check: Check) -> None:
    from onward.pipeline.queries import sql

    rows = sql(spark, QUERY, place=place, lake=lake).collect()
    check(bool(rows), f'onward sql "{QUERY}":')
    for row in rows:
        print_line(f"      {row.topic:<12} {row.messages:>8,}")
