"""`onward pipeline`: the data pipeline on Spark; one command per job.

    keep     archive, compact                     this file
    ask      read, stats, reconcile, trace        pipeline_questions.py
    write    replay, schedule, redrive            pipeline_writes.py
    own      run, runs                            this file

Each is a function in `onward.pipeline.jobs` with the same options, for programs. Spark is imported
when a job begins, not for a page of help.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import click

from onward.cli.options import json_option
from onward.cli.output import counted, print_json, print_line, print_rows
from onward.cli.params import DURATION, SIZE, Connect, client_options
from onward.cli.pipeline_frame import Start, needed_lake_option, record_of, spark_options
from onward.cli.pipeline_questions import QUESTIONS
from onward.cli.pipeline_writes import WRITES
from onward.durations import format_duration, format_instant

if TYPE_CHECKING:
    from onward.pipeline.runs import JobRun

_RUNS = [
    "run", "job", "state", "started", "took", "rows", "rows/s", "lag", "files", "error",
]  # fmt: skip


@click.group()
def command() -> None:
    """Archive, ask, replay and load messages with Spark.

    Example:  onward pipeline archive --lake ./lake
    """


@command.command()
@click.argument("topics", nargs=-1, metavar="[TOPIC...]")
@needed_lake_option
@click.option(
    "--group", default="archive", metavar="GROUP",
    help="The group whose lag shows how far the lake is. [default: archive]",
)  # fmt: skip
@click.option("--follow", is_flag=True, help="Go on with what comes, until ctrl-C.")
@click.option(
    "--gather", type=DURATION, default="10s", metavar="DURATION",
    help="With --follow: how long messages may wait for others. [default: 10s]",
)  # fmt: skip
@click.option(
    "--rows-per-file", type=click.IntRange(1), default=1_000_000, metavar="N",
    help="How many messages a file holds at most. [default: 1000000]",
)  # fmt: skip
@click.option("--rows-max", type=click.IntRange(1), metavar="N", help="End after so many messages.")
@json_option
@spark_options
def archive(
    *,
    spark: Start,
    topics: tuple[str, ...],
    lake: str,
    group: str,
    follow: bool,
    gather: int,
    rows_per_file: int,
    rows_max: int | None,
    as_json: bool,
) -> None:
    """Copy messages to a lake of Parquet files, each exactly once. Topics are names or patterns.

    Example:  onward pipeline archive orders 'billing.*' --lake ./lake
    """
    with spark.job("archive", topics=list(topics), lake=lake, group=group) as work:
        from onward.pipeline.jobs.archive import archive

        done = archive(
            work.session, place=work.place, lake=lake, topics=topics, group=group, follow=follow,
            gather=gather, rows_per_file=rows_per_file, rows_max=rows_max, run=work.run,
        )  # fmt: skip
    if as_json:
        print_json(record_of(done))
        return
    rows = [
        {"topic": topic, "first": first, "end": end}
        for topic, (first, end) in sorted(done.topics.items())
    ]
    if rows:
        print_rows(rows, columns=["topic", "first", "end"])
    for gap in done.gaps:
        print_line(f"{gap.topic} has a gap: offsets {gap.first} to {gap.end - 1} were gone already")
    for topic in done.left_out:
        print_line(f"{topic} is left out: it is not the topic that the lake holds under this name")
    words = f"{counted(done.files, 'file')}, {counted(done.bytes, 'byte')}"
    print_line(f"archived {counted(done.rows, 'message')} in {words}")


@command.command()
@click.argument("topics", nargs=-1, metavar="[TOPIC...]")
@needed_lake_option
@click.option(
    "--bytes-min", type=SIZE, default="64MiB", metavar="SIZE",
    help="Files smaller than this are put together. [default: 64MiB]",
)  # fmt: skip
@json_option
@spark_options
def compact(
    *, spark: Start, topics: tuple[str, ...], lake: str, bytes_min: int, as_json: bool
) -> None:
    """Put small files of a lake together. No broker is needed.

    Example:  onward pipeline compact --lake ./lake
    """
    with spark.job("compact", needs_broker=False, topics=list(topics), lake=lake) as work:
        from onward.pipeline.jobs.compact import compact

        done = compact(
            work.session, lake=lake, topics=topics, bytes_min=bytes_min, run=work.run
        )  # fmt: skip
    if as_json:
        print_json(record_of(done))
    else:
        before, after = counted(done.files_before, "file"), counted(done.files_after, "file")
        print_line(f"compacted {before} into {after}, {counted(done.rows, 'message')}")


# --- programs of one's own ------------------------------------------------------------------------


@command.command(context_settings={"allow_interspersed_args": False})
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENT...]")
@spark_options
def run(*, spark: Start, file: str, arguments: tuple[str, ...]) -> None:
    """Run a Python file that finds `spark` and `place` ready, with its arguments.

    Example:  onward pipeline run count.py orders
    """
    has_begun = False
    try:
        with spark.job("run", is_own=False, file=file) as work:
            from onward.pipeline.jobs.run import run_file

            has_begun = True
            run_file(
                work.session, place=work.place, file=file, arguments=arguments, run=work.run
            )  # fmt: skip
    except Exception as error:
        if not has_begun:
            raise
        sys.stdout.flush()
        shown = error.with_traceback(_from_file(error.__traceback__, file))
        traceback.print_exception(shown, chain=True)
        raise click.exceptions.Exit(1) from None


def _from_file(trace: TracebackType | None, file: str) -> TracebackType | None:
    """Return the part of a traceback that begins in the user's file: the rest is not theirs."""
    while trace is not None and Path(trace.tb_frame.f_code.co_filename) != Path(file):
        trace = trace.tb_next
    return trace


@command.command()
@click.option("--job", metavar="JOB", help="Only runs of this job, as archive.")
@click.option(
    "--limit", type=click.IntRange(1, 1_000), default=20, metavar="N",
    help="How many at most. [default: 20]",
)  # fmt: skip
@json_option
@client_options
def runs(*, connect: Connect, job: str | None, limit: int, as_json: bool) -> None:
    """List the last runs of jobs: what they did, how fast, how far they are, what went wrong.

    Example:  onward pipeline runs --job archive
    """
    from onward.pipeline.runs import last_runs

    with connect() as mq:
        found = last_runs(mq, job=job, limit=limit)
    if as_json:
        for one in found:
            print_json(_run_record(one))
    else:
        print_rows(map(_run_row, found), columns=_RUNS)


def _run_record(run: JobRun) -> dict[str, object]:
    names = ("run", "job", "state", "started_at_ms", "at_ms", "rows", "rows_per_s", "lag")
    more = ("files", "error", "about", "result")
    return {name: getattr(run, name) for name in (*names, *more)}


def _run_row(run: JobRun) -> dict[str, object]:
    return {
        "run": run.run, "job": run.job, "state": run.state,
        "started": format_instant(run.started_at_ms), "took": format_duration(run.took_ms),
        "rows": run.rows, "rows/s": round(run.rows_per_s), "lag": run.lag, "files": run.files,
        "error": run.error or None,
    }  # fmt: skip


for _one in (*QUESTIONS, *WRITES):
    command.add_command(_one)
