"""`onward pipeline read | stats | reconcile | trace`: the jobs that only look.

They look at the live log and, with --lake, at the past behind it. Results go to stdout as rows, and
with --out or --report to files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onward.cli import ExitCode
from onward.cli.options import json_option
from onward.cli.output import counted, print_json, print_line, print_rows
from onward.cli.params import DURATION
from onward.cli.pipeline_frame import (
    Start,
    lake_option,
    record_of,
    spark_options,
    window_options,
)

if TYPE_CHECKING:
    from onward.pipeline.jobs.reconcile import Reconciled

_SHOWN = ("topic", "offset", "published_at", "key", "tag", "body")
_ROWS_SHOWN = 20
_TRACE_SHOWN_MAX = 1_000

_groups_option = click.option(
    "--group", "groups", multiple=True, metavar="GROUP",
    help="Only this group; may be given often. [default: all]",
)  # fmt: skip


@click.command()
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC...")
@click.option(
    "--column", "columns", multiple=True, metavar="NAME",
    help="Only this column; may be given often. [default: the usual ones, with --out all]",
)  # fmt: skip
@click.option("--where", metavar="SQL", help="Only messages for which this is true.")
@click.option(
    "--limit", type=click.IntRange(1), metavar="N",
    help="How many at most. [default: 20, with --out all]",
)  # fmt: skip
@click.option("--out", metavar="FOLDER", help="Write them there, in place of printing them.")
@click.option(
    "--format", "form", type=click.Choice(("parquet", "json", "orc")), default="parquet",
    metavar="FORMAT", help="With --out: parquet, json or orc. [default: parquet]",
)  # fmt: skip
@window_options
@lake_option
@json_option
@spark_options
def read(
    *,
    spark: Start,
    topics: tuple[str, ...],
    columns: tuple[str, ...],
    where: str | None,
    limit: int | None,
    out: str | None,
    form: str,
    since: datetime | None,
    until: datetime | None,
    lake: str | None,
    as_json: bool,
) -> None:
    """Read topics as one table over lake and live log: print some rows, or write them all.

    Example:  onward pipeline read orders --since 1d --where "key = 'a'" --lake ./lake
    """
    with spark.job("read", topics=list(topics), lake=lake) as work:
        from onward.pipeline.jobs.read import read_out, read_rows

        choice: dict[str, Any] = {
            "place": work.place, "topics": topics, "lake": lake, "start": since, "end": until,
            "where": where, "run": work.run,
        }  # fmt: skip
        if out is None:
            shown = columns or _SHOWN
            rows = read_rows(work.session, columns=shown, limit=limit or _ROWS_SHOWN, **choice)
        else:
            written = read_out(
                work.session, out=str(Path(out).absolute()), format=form, limit=limit,
                columns=columns or None, **choice,
            )  # fmt: skip
    if out is None:
        print_rows(map(record_of, rows), columns=shown, as_json=as_json)
    else:
        _tell_written(written, "message", out, as_json=as_json)


@click.command()
@click.argument("topics", nargs=-1, metavar="[TOPIC...]")
@window_options
@lake_option
@json_option
@spark_options
def stats(
    *,
    spark: Start,
    topics: tuple[str, ...],
    since: datetime | None,
    until: datetime | None,
    lake: str | None,
    as_json: bool,
) -> None:
    """Show rates, bytes, times from publish to ack, retries and dead letters, minute by minute.

    Example:  onward pipeline stats orders --since 1h
    """
    with spark.job("stats", topics=list(topics), lake=lake) as work:
        from onward.pipeline.jobs.stats import stats

        done = stats(
            work.session, place=work.place, topics=topics, lake=lake, since=since, until=until,
            run=work.run,
        )  # fmt: skip
    rows = [record_of(row) for row in done.rows]
    _print_rows(rows if as_json else map(_to_the_minute, rows), as_json=as_json)


def _to_the_minute(row: dict[str, object]) -> dict[str, object]:
    """Return a row of a table whose minute is written as one: `2026-11-16T10:00Z`."""
    return row | {"minute": f"{str(row['minute'])[:16]}Z"}


@click.command()
@click.argument("topics", nargs=-1, metavar="[TOPIC...]")
@_groups_option
@click.option(
    "--slow", "slow_ms", type=DURATION, default="1m", metavar="DURATION",
    help="From publish to ack, longer is slow. [default: 1m]",
)  # fmt: skip
@click.option("--report", metavar="FILE", help="Write a page of HTML with charts there.")
@window_options
@lake_option
@json_option
@spark_options
def reconcile(
    *,
    spark: Start,
    topics: tuple[str, ...],
    groups: tuple[str, ...],
    slow_ms: int,
    report: str | None,
    since: datetime | None,
    until: datetime | None,
    lake: str | None,
    as_json: bool,
) -> None:
    """Prove that every message was settled by every group, or say what is not: then exit 6.

    Example:  onward pipeline reconcile orders --since 1h --report report.html
    """
    with spark.job("reconcile", topics=list(topics), groups=list(groups), lake=lake) as work:
        from onward.pipeline.jobs.reconcile import reconcile

        done = reconcile(
            work.session, place=work.place, topics=topics, groups=groups, since=since, until=until,
            lake=lake, slow=timedelta(milliseconds=slow_ms), report=report, run=work.run,
        )  # fmt: skip
    names = (
        "is_settled", "published", "due", "settled", "undelivered", "missing", "retrying", "dead",
        "slow", "repeated", "unchecked",
    )  # fmt: skip
    counts = {name: getattr(done, name) for name in names}
    notes = [] if done.report is None else list(done.report.notes)
    if as_json:
        print_json(counts | {"groups": [record_of(line) for line in done.lines], "notes": notes})
    else:
        _print_rows(done.lines, as_json=False)
        listed = ", ".join(f"{counts[name]:,} {name}" for name in names[1:])
        print_line(f"{_verdict(done)}: {listed}")
        for note in notes:
            print_line(f"note: {note}")
    if not done.is_settled:
        raise click.exceptions.Exit(ExitCode.UNSETTLED)


def _verdict(done: Reconciled) -> str:
    if done.is_settled:
        return "all is settled"
    return "not all is settled" if done.settled < done.due else "not proven, not all was checked"


@click.command()
@click.argument("topics", nargs=-1, metavar="[TOPIC...]")
@_groups_option
@click.option("--id", "ids", multiple=True, metavar="ID", help="Only this message, as orders/7.")
@click.option("--out", metavar="FOLDER", help="Write them there, in place of printing them.")
@window_options
@lake_option
@json_option
@spark_options
def trace(
    *,
    spark: Start,
    topics: tuple[str, ...],
    groups: tuple[str, ...],
    ids: tuple[str, ...],
    out: str | None,
    since: datetime | None,
    until: datetime | None,
    lake: str | None,
    as_json: bool,
) -> None:
    """Show the lives of messages: every step, in every group, with times.

    For one message `onward explain` answers faster: it asks the broker and starts no Spark.

    Example:  onward pipeline trace --id orders/7
    """
    with spark.job("trace", topics=list(topics), groups=list(groups), lake=lake) as work:
        from onward.pipeline.jobs.trace import trace

        done = trace(
            work.session, place=work.place, topics=topics, groups=groups, since=since, until=until,
            lake=lake, ids=ids, out=None if out is None else str(Path(out).absolute()),
            run=work.run,
        )  # fmt: skip
        rows = [] if out is not None else done.frame.limit(_TRACE_SHOWN_MAX).collect()
    if out is None:
        _print_rows([row.asDict() for row in rows], as_json=as_json)
        if done.rows > len(rows):
            click.echo(f"{len(rows):,} of {done.rows:,} steps; --out writes them all", err=True)
    else:
        _tell_written(done.rows, "step", out, as_json=as_json)


def _tell_written(count: int, noun: str, out: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"rows": count, "out": out})
    else:
        print_line(f"{counted(count, noun)} written to {out}")


def _print_rows(rows: Iterable[object], *, as_json: bool) -> None:
    records = [_flat(record_of(row)) for row in rows]
    columns: Sequence[str] = list(records[0]) if records else []
    if records:
        print_rows(records, columns=columns, as_json=as_json)
    elif not as_json:
        print_line("nothing was found")


def _flat(record: dict[str, object]) -> dict[str, object]:
    """Return a record with the fields of what is in it beside its own: a table has one level."""
    flat: dict[str, object] = {}
    for name, value in record.items():
        flat |= value if isinstance(value, dict) else {name: value}
    return flat


QUESTIONS = (read, stats, reconcile, trace)
