"""`onward pipeline`: the data pipeline on Spark; one command per job.

    keep     archive, compact                     this file
    ask      read, stats, reconcile, trace        pipeline_questions.py
    write    replay, schedule, redrive            pipeline_writes.py
    own      run, runs                            this file

Each is a function in `onward.pipeline.jobs` with the same options, for programs. Spark is imported
when a job begins, not for a page of help.
"""

from __future__ import annotations

import logging
import shutil
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import click

from onward.cli.options import json_option
from onward.cli.output import counted, is_terminal, print_json, print_line, print_rows
from onward.cli.params import DURATION, SIZE, Connect, client_options
from onward.cli.pipeline_frame import Start, needed_lake_option, record_of, spark_options
from onward.cli.pipeline_questions import QUESTIONS
from onward.cli.pipeline_writes import WRITES
from onward.clock import SystemClock
from onward.durations import format_instant

if TYPE_CHECKING:
    from onward.pipeline.runs import JobRun

_RUNS = [
    "run", "job", "state", "started", "took", "rows", "rows/s", "lag", "files", "error",
]  # fmt: skip


_NUMBERS = ("rows", "rows/s", "lag", "files")
_ERROR_LEAST = 12


class _Jobs(click.Group):
    """A group whose page of help has whole sentences."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the first sentence of every command."""
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        lines = [(name, one.get_short_help_str(limit=1_000)) for name, one in found if one]
        with formatter.section("Commands"):
            formatter.write_dl(lines)


@click.group(cls=_Jobs)
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
    "--gather", "gather_ms", type=DURATION, default="10s", metavar="DURATION",
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
    gather_ms: int,
    rows_per_file: int,
    rows_max: int | None,
    as_json: bool,
) -> None:
    """Copy messages to a lake of Parquet files, each exactly once. Topics are names or patterns.

    Example:  onward pipeline archive orders 'billing.*' --lake ./lake
    """
    with (
        _told_at_the_end(is_so=not follow),
        spark.job(
            "archive", is_asked_to_end=follow, topics=list(topics), lake=lake, group=group
        ) as work,
    ):
        from onward.pipeline.jobs.archive import archive

        done = archive(
            work.session, place=work.place, lake=lake, topics=topics, group=group, follow=follow,
            gather=timedelta(milliseconds=gather_ms), rows_per_file=rows_per_file,
            rows_max=rows_max, run=work.run, stop=work.stop if follow else None,
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
    # Who follows has read it when it was found.
    for gap in () if follow else done.gaps:
        print_line(f"{gap.topic} has a gap: offsets {gap.first} to {gap.end - 1} were gone already")
    for topic in () if follow else done.left_out:
        print_line(f"{topic} is left out: it is not the topic that the lake holds under this name")
    words = f"{counted(done.files, 'file')}, {counted(done.bytes, 'byte')}"
    print_line(f"archived {counted(done.rows, 'message')} in {words}")


@contextmanager
def _told_at_the_end(*, is_so: bool) -> Iterator[None]:
    """Keep the archive from logging what its result says a moment later."""

    def is_other(record: logging.LogRecord) -> bool:
        return record.module != "archive"

    log = logging.getLogger("onward.pipeline")
    if is_so:
        log.addFilter(is_other)
    try:
        yield
    finally:
        log.removeFilter(is_other)


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
    """Put small files of a lake together. No broker is needed: one at --address hears of the run.

    Example:  onward pipeline compact --lake ./lake
    """
    with spark.job("compact", needs_broker=False, topics=list(topics), lake=lake) as work:
        from onward.pipeline.jobs.compact import compact

        done = compact(
            work.session, lake=lake, topics=topics, bytes_min=bytes_min, run=work.run
        )  # fmt: skip
    if as_json:
        print_json(record_of(done))
        return
    before, after = counted(done.files_before, "file"), counted(done.files_after, "file")
    if done.merged:
        print_line(f"compacted {before} into {after}, {counted(done.rows, 'message')}")
    else:
        print_line(f"nothing to compact: {before}")
    if done.deleted:
        print_line(f"deleted {counted(done.deleted, 'file')} that nothing names any more")


# --- programs of one's own ------------------------------------------------------------------------


@command.command(context_settings={"allow_interspersed_args": False})
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENT...]")
@spark_options
def run(*, spark: Start, file: str, arguments: tuple[str, ...]) -> None:
    """Run a Python file that finds `spark` and `place` ready.

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
    """List the last runs of jobs. How far they are, how fast, what went wrong.

    Example:  onward pipeline runs --job archive
    """
    from onward.pipeline.runs import last_runs

    with connect() as mq:
        found = last_runs(mq, job=job, limit=limit)
    now_ms = SystemClock().now_ms()
    if as_json:
        for one in found:
            print_json(_run_record(one, now_ms=now_ms))
    else:
        _print_runs([_run_row(one, now_ms=now_ms) for one in found])


def _run_record(run: JobRun, *, now_ms: int) -> dict[str, object]:
    names = ("run", "job", "state", "started_at_ms", "at_ms", "rows", "rows_per_s", "lag")
    more = ("files", "error", "about", "result")
    record = {name: getattr(run, name) for name in (*names, *more)}
    return record | {"state": "lost"} if run.is_lost(now_ms=now_ms) else record


def _run_row(run: JobRun, *, now_ms: int) -> dict[str, object]:
    return {
        "run": run.run, "job": run.job, "state": _state(run, now_ms=now_ms),
        "started": format_instant(run.started_at_ms), "took": took(run.took_ms),
        "rows": run.rows, "rows/s": round(run.rows_per_s), "lag": run.lag, "files": run.files,
        "error": run.error or None,
    }  # fmt: skip


def _state(run: JobRun, *, now_ms: int) -> str:
    if run.is_lost(now_ms=now_ms):
        return "lost"
    is_unsettled = run.state == "done" and run.result.get("is_settled") is False
    return "not settled" if is_unsettled else run.state


def took(took_ms: int) -> str:
    """Return how long something took, for people.

    >>> took(4_612), took(125_000), took(7_500_000)
    ('4.6 s', '2 min 5 s', '2 h 5 min')
    """
    if took_ms < 59_950:
        return f"{took_ms / 1000:.1f} s"
    minutes, seconds = divmod(round(took_ms / 1000), 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def _print_runs(rows: Sequence[dict[str, object]]) -> None:
    """Print a table whose numbers have separators, where there is room: a cut number is wrong."""
    shown = [row | {name: _separated(row[name]) for name in _NUMBERS} for row in rows]
    sizes = {name: max(len(name), *(len(str(row[name])) for row in shown), 0) for name in _RUNS}
    wide = sum(sizes.values()) - sizes["error"] + 2 * len(_RUNS) + _ERROR_LEAST
    if is_terminal() and wide > shutil.get_terminal_size().columns:
        print_rows(rows, columns=_RUNS)
        return
    # Numbers stand to the right, one under the other, and so do their headings.
    columns = [name.rjust(sizes[name]) if name in _NUMBERS else name for name in _RUNS]
    pairs = list(zip(columns, _RUNS, strict=True))
    aligned = (
        {column: _aligned(row[name], sizes[name], name) for column, name in pairs} for row in shown
    )
    print_rows(aligned, columns=columns)


def _separated(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else "-"


def _aligned(value: object, size: int, name: str) -> object:
    return str(value).rjust(size) if name in _NUMBERS else value


for _one in (*QUESTIONS, *WRITES):
    command.add_command(_one)
