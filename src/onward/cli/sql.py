"""`onward sql`: ask about messages, and what became of them, in SQL.

The query runs on Spark, over the live log and, with --lake, the past behind it. It only asks.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal

import click

from onward.cli.options import json_option
from onward.cli.output import is_terminal, print_rows, printable
from onward.cli.pipeline_frame import Start, lake_option, record_of, spark_options

LIMIT_MAX = 1_000_000


@click.command()
@click.argument("query")
@lake_option
@click.option(
    "--limit", type=click.IntRange(1, LIMIT_MAX), default=1_000, metavar="N",
    help="How many rows at most. [default: 1000]",
)  # fmt: skip
@json_option
@click.option("--csv", "as_csv", is_flag=True, help="Print comma separated values, with a heading.")
@spark_options
def command(
    *, spark: Start, query: str, lake: str | None, limit: int, as_json: bool, as_csv: bool
) -> None:
    """Ask in SQL about messages and what became of them.

    Views: messages, settled, retrying, dead, scheduled, groups, topics.

    Example:  onward sql "select topic, count(*) from messages group by 1"
    """
    if as_json and as_csv:
        raise click.UsageError("rows are printed as --json or as --csv, not as both")

    def check() -> None:
        from onward.pipeline.queries import checked

        checked(query)

    with spark.job("sql", check=check, query=query[:1_000], lake=lake) as work:
        from onward.pipeline.queries import sql

        frame = sql(work.session, query, place=work.place, lake=lake)
        columns = distinct(frame.columns)
        found = frame.limit(limit + 1).collect()
        work.run.progress(rows=min(len(found), limit))
    records = [named(columns, row) for row in found[:limit]]
    if as_csv:
        _print_csv(records, columns)
    else:
        print_rows(records, columns=columns, as_json=as_json)
    if len(found) > limit:
        click.echo(f"only the first {limit:,} rows are shown: --limit gives more", err=True)


def distinct(names: Sequence[str]) -> list[str]:
    """Return names of columns, none of them twice.

    >>> distinct(["topic", "count", "topic"])
    ['topic', 'count', 'topic_2']
    """
    found: list[str] = []
    for name in names:
        again, count = name, 1
        while again in found:
            count += 1
            again = f"{name}_{count}"
        found.append(again)
    return found


def named(columns: Sequence[str], row: Iterable[object]) -> dict[str, object]:
    """Return a row by the names of its columns, in values that text and JSON can say.

    >>> named(["count", "day"], (Decimal("7"), date(2026, 11, 16)))
    {'count': 7, 'day': '2026-11-16'}
    """
    values = {name: _value(one) for name, one in zip(columns, row, strict=True)}
    return record_of(values)


def _value(value: object) -> object:
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, date) and not isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _value(one) for name, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "asDict"):
        return {name: _value(one) for name, one in value.asDict().items()}
    if isinstance(value, list | tuple):
        return [_value(one) for one in value]
    return value


def _print_csv(records: Iterable[Mapping[str, object]], columns: Sequence[str]) -> None:
    # A file gets values as they are; a person's terminal is not to be played with.
    shown = printable if is_terminal() else str
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(shown(name) for name in columns)
    for record in records:
        cells = [record[name] for name in columns]
        writer.writerow("" if cell is None else shown(str(cell)) for cell in cells)
