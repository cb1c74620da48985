"""`onward sql`: ask about messages, and what became of them, in SQL.

    onward sql QUERY           one answer
    onward sql                 a prompt on a terminal; else queries from stdin, one after another

The queries run on Spark, over the live log and, with --lake, the past behind it. They only ask. A
prompt keeps its Spark, so only the first answer waits for the start; each query sees the log as it
is then. A query ends with a semicolon or, at the prompt, with an empty line; one that is wrong is
told, and the next one follows.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import NamedTuple

import click

from onward.cli.options import json_option
from onward.cli.output import is_terminal, print_rows, printable
from onward.cli.pipeline_frame import (
    Start,
    Work,
    in_one_line,
    lake_option,
    record_of,
    spark_options,
    window_options,
)
from onward.errors import OnwardError

LIMIT_MAX = 1_000_000
PROMPT = "onward> "
MORE = "   ...> "
LEAVE = ("exit", "quit", "\\q")


class Wish(NamedTuple):
    """What is asked of each query, and how its rows are printed."""

    lake: str | None
    limit: int
    since: datetime | None
    until: datetime | None
    as_json: bool
    as_csv: bool


@click.command()
@click.argument("query", required=False)
@lake_option
@window_options
@click.option(
    "--limit", type=click.IntRange(1, LIMIT_MAX), default=1_000, metavar="N",
    help="How many rows at most. [default: 1000]",
)  # fmt: skip
@json_option
@click.option("--csv", "as_csv", is_flag=True, help="Print comma separated values, with a heading.")
@spark_options
def command(*, spark: Start, query: str | None, **wishes: object) -> None:
    """Ask in SQL about messages and what became of them; without QUERY at a prompt.

    Views: messages, settled, retrying, dead, scheduled, groups, topics.

    Example:  onward sql "select topic, count(*) from messages group by 1" --since 1h
    """
    wish = Wish(**wishes)  # type: ignore[arg-type]  # click has made them
    if wish.as_json and wish.as_csv:
        raise click.UsageError("rows are printed as --json or as --csv, not as both")
    if query is None:
        _converse(spark, wish)
    else:
        _ask_once(spark, query, wish)


def _ask_once(spark: Start, query: str, wish: Wish) -> None:
    def check() -> None:
        from onward.pipeline.queries import checked

        checked(query)

    with spark.job("sql", check=check, query=query[:1_000], lake=wish.lake) as work:
        columns, found = _rows(work, query, wish)
    _print(columns, found, wish)


def _converse(spark: Start, wish: Wish) -> None:
    """Answer one query after another, in one session of Spark."""
    from onward.cli import report

    is_person = is_terminal(sys.stdin)
    if is_person:
        click.echo("starting Spark; a query ends with ; or an empty line, ctrl-D leaves", err=True)
    failed = 0
    with spark.job("sql", has_bar=False, query="a prompt", lake=wish.lake) as work:
        for query in queries_in(_typed_lines() if is_person else sys.stdin, is_person=is_person):
            try:
                with in_one_line():
                    columns, found = _rows(work, query, wish)
                _print(columns, found, wish)
                sys.stdout.flush()
            except OnwardError as error:
                failed = failed or report(error)
    if failed and not is_person:
        raise click.exceptions.Exit(failed)


def _typed_lines() -> Iterator[str]:
    """Give what a person types, line by line, with editing and history where Python has it."""
    with suppress(ImportError):
        import readline  # noqa: F401 - input() uses it once it is imported
    prompt = PROMPT
    while True:
        try:
            line = input(prompt)
        except EOFError:
            click.echo()
            return
        prompt = PROMPT if not line.strip() or line.rstrip().endswith(";") else MORE
        yield line


def queries_in(lines: Iterable[str], *, is_person: bool = False) -> Iterator[str]:
    r"""Give the queries in lines of text; they end with a semicolon, the last one with the text.

    >>> list(queries_in(["select 1; select", " ';' ", "from topics"]))
    ['select 1', "select\n ';'\nfrom topics"]
    """
    from onward.pipeline.queries import end_of_statement

    left = ""
    for line in lines:
        is_end = is_person and not line.strip()
        if is_person and not left and line.strip().rstrip(";") in LEAVE:
            return
        left = f"{left}\n{line.rstrip()}" if left else line.rstrip()
        while (end := end_of_statement(left)) is not None:
            query, left = left[:end].strip(), left[end + 1 :].strip()
            if query:
                yield query
        if is_end and left.strip():
            yield left.strip()
            left = ""
    if left.strip():
        yield left.strip()


def _rows(work: Work, query: str, wish: Wish) -> tuple[list[str], Sequence[Sequence[object]]]:
    from onward.pipeline.queries import sql

    frame = sql(
        work.session, query, place=work.place, lake=wish.lake, since=wish.since, until=wish.until
    )
    found = frame.limit(wish.limit + 1).collect()
    work.run.progress(rows=min(len(found), wish.limit))
    return distinct(frame.columns), found


def _print(columns: Sequence[str], found: Sequence[Sequence[object]], wish: Wish) -> None:
    records = [named(columns, row) for row in found[: wish.limit]]
    if wish.as_csv:
        _print_csv(records, columns)
    else:
        print_rows(records, columns=columns, as_json=wish.as_json)
    if len(found) > wish.limit:
        click.echo(f"only the first {wish.limit:,} rows are shown: --limit gives more", err=True)


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
