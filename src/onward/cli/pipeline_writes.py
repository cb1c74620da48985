"""`onward pipeline replay | schedule | redrive`: the jobs that write to the broker.

Each counts with `--dry-run` what it would do. What a run writes is written once, however often the
run is repeated under its `--run-id`; `redrive` asks, as `onward dead redrive` does.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onward.cli.group import dry_run_option, yes_option
from onward.cli.options import json_option
from onward.cli.output import counted, print_json, print_line, print_rows
from onward.cli.params import PAIR, confirm
from onward.cli.pipeline_frame import (
    Start,
    lake_option,
    record_of,
    spark_options,
    window_options,
)
from onward.cli.pipeline_stop import AGAIN, ANEW, LINE

if TYPE_CHECKING:
    from onward.pipeline.jobs.redrive import Redriven

FORMATS = ("parquet", "csv", "json", "orc", "jdbc")

_run_id_option = click.option(
    "--run-id", metavar="TEXT",
    help="Name of this run: repeated under the same name it stores nothing again.",
)  # fmt: skip


@click.command()
@click.argument("topic")
@click.option("--to-topic", metavar="TOPIC", help="Publish them to this topic.")
@click.option("--to-group", metavar="GROUP", help="Deliver them again to this group.")
@click.option(
    "--where", metavar="SQL",
    help="Only messages for which this is true: key = 'a' and offset < 100.",
)  # fmt: skip
@click.option("--rate", type=float, metavar="N", help="At most so many messages per second.")
@_run_id_option
@window_options
@lake_option
@dry_run_option
@json_option
@spark_options
def replay(
    *,
    spark: Start,
    topic: str,
    to_topic: str | None,
    to_group: str | None,
    where: str | None,
    rate: float | None,
    run_id: str | None,
    since: datetime | None,
    until: datetime | None,
    lake: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Publish messages of the past once more to a topic, or deliver them once more to one group.

    Example:  onward pipeline replay orders --since 2h --where "tag = 'eu'" --to-topic again
    """
    if (to_topic is None) == (to_group is None):
        raise click.UsageError(
            "say where to: --to-topic or --to-group", click.get_current_context()
        )
    stopped = stopped_line(run_id, dry_run=dry_run) if to_topic else LINE if dry_run else AGAIN
    with spark.job(
        "replay", stopped=stopped, topic=topic, to_topic=to_topic, to_group=to_group
    ) as work:
        from onward.pipeline.jobs.replay import replay

        done = replay(
            work.session, place=work.place, topic=topic, lake=lake, since=since, until=until,
            where=where, to_topic=to_topic, to_group=to_group, rate=rate, run_id=run_id,
            dry_run=dry_run, run=work.run,
        )  # fmt: skip
    if as_json:
        print_json(record_of(done) | {"dry_run": dry_run})
        return
    if done.is_repeat:
        print_line(_done_already(done.run_id))
        return
    said = "would be replayed" if dry_run else "replayed"
    to = f"topic {to_topic!r}" if to_topic else f"group {to_group!r}"
    print_line(f"{counted(done.rows, 'message')} {said} to {to}")
    if done.gone:
        print_line(f"{counted(done.gone, 'message')} are no longer in the log of {topic!r}")


def stopped_line(run_id: str | None, *, dry_run: bool) -> str:
    """Return what to say of a run that was stopped: only one with a name can go on.

    >>> stopped_line("fix-17", dry_run=False)
    'stopped; run it again to go on'
    """
    return ANEW if run_id is None and not dry_run else LINE


def _done_already(run_id: str) -> str:
    return f"run {run_id!r} was done already: nothing was stored again"


@click.command()
@click.argument("source")
@click.option(
    "--format", "form", type=click.Choice(FORMATS), metavar="FORMAT",
    help="parquet, csv, json, orc or jdbc. [default: by the name of the source]",
)  # fmt: skip
@click.option("--topic", metavar="TOPIC", help="Where they go. [default: the column topic]")
@click.option("--at", required=True, metavar="SQL", help="When each is due: a column, or SQL.")
@click.option("--body", required=True, metavar="SQL", help="The body of each: a column, or SQL.")
@click.option("--key", metavar="SQL", help="The key of each: a column, or SQL.")
@click.option("--unique", metavar="SQL", help="The business key of each: a column, or SQL.")
@click.option(
    "--option", "options", type=PAIR, multiple=True, metavar="NAME=VALUE",
    help="An option of Spark's reader, as delimiter=; or dbtable=reminders; may be given often.",
)  # fmt: skip
@click.option("--jar", "jars", multiple=True, metavar="FILE", help="The driver of a database.")
@_run_id_option
@dry_run_option
@json_option
@spark_options
def schedule(
    *,
    spark: Start,
    source: str,
    form: str | None,
    topic: str | None,
    at: str,
    body: str,
    key: str | None,
    unique: str | None,
    options: tuple[tuple[str, str], ...],
    jars: tuple[str, ...],
    run_id: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Load messages that wait for their time, from files or a database.

    Example:  onward pipeline schedule due.parquet --topic reminders --at due --body text
    """
    form = form or _format_of(source)
    if jars:
        # The driver of a database is looked for where Java itself looks, tasks get the jars.
        paths = ":".join(jars)
        spark = spark.with_config(spark_jars=",".join(jars), spark_driver_extraClassPath=paths)
    stopped = stopped_line(run_id, dry_run=dry_run)
    with spark.job(
        "schedule", stopped=stopped, topic=topic, source=_without_password(source)
    ) as work:
        from onward.pipeline.jobs.schedule import schedule

        done = schedule(
            work.session, place=work.place, source=source, format=form, topic=topic, at=at,
            body=body, key=key, unique=unique, options=dict(options), run_id=run_id,
            dry_run=dry_run, run=work.run,
        )  # fmt: skip
    record = record_of(done)
    if as_json:
        print_json(record | {"dry_run": dry_run})
        return
    if done.is_repeat:
        print_line(_done_already(done.run_id))
        return
    said = "would be scheduled" if dry_run else "scheduled"
    when = f", from {record['first_due']} to {record['last_due']}" if done.rows else ""
    print_line(f"{counted(done.rows, 'message')} {said}{when}")
    if done.overdue:
        print_line(f"{counted(done.overdue, 'message')} of them past their time: they come at once")


def _format_of(source: str) -> str:
    """Return the format that a source's name speaks of."""
    if source.startswith("jdbc:"):
        return "jdbc"
    suffix = Path(source.rstrip("/")).suffix.removeprefix(".").lower()
    found = {"jsonl": "json", "ndjson": "json"}.get(suffix, suffix)
    if found not in FORMATS:
        raise click.UsageError(
            f"say --format: the name of {source!r} does not", click.get_current_context()
        )
    return found


def _without_password(source: str) -> str:
    """Return a source as it may be shown: what follows the ? of a database can be a secret."""
    return source.partition("?")[0] if source.startswith("jdbc:") else source


@click.command()
@click.argument("group")
@click.option("--topic", metavar="TOPIC", help="Only dead letters of this topic.")
@click.option(
    "--where", required=True, metavar="SQL",
    help="SQL over topic, offset, key, tag, body, headers, cause, attempts, member, died_at.",
)  # fmt: skip
@dry_run_option
@yes_option
@json_option
@spark_options
def redrive(
    *,
    spark: Start,
    group: str,
    topic: str | None,
    where: str,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Deliver the dead letters of a group again that a predicate of SQL picks.

    Example:  onward pipeline redrive billing --where "cause like 'timeout%'" --dry-run
    """
    is_asking = not (dry_run or yes)
    done = _redrive(spark, group, topic, where, dry_run=dry_run or is_asking)
    if is_asking and done.matched:
        confirm(f"redrive {counted(done.matched, 'dead letter')} of group {group!r}?", yes=yes)
        done = _redrive(spark, group, topic, where, dry_run=False)
    if as_json:
        print_json(record_of(done) | {"group": group, "dry_run": dry_run})
        return
    if dry_run and done.examples:
        rows = [one._asdict() for one in done.examples]
        print_rows(rows, columns=["id", "key", "attempts", "cause"])
    count = done.matched if dry_run else done.redriven
    print_line(f"{counted(count, 'dead letter')} {'would be ' if dry_run else ''}redriven")


def _redrive(spark: Start, group: str, topic: str | None, where: str, *, dry_run: bool) -> Redriven:
    with spark.job("redrive", group=group, topic=topic) as work:
        from onward.pipeline.jobs.redrive import redrive

        return redrive(
            work.session, place=work.place, group=group, topic=topic, where=where,
            dry_run=dry_run, run=work.run,
        )  # fmt: skip


WRITES = (replay, schedule, redrive)
