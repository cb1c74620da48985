"""`onward bench`: measure Onward beside its neighbours, on this machine, in the same minutes.

The last line of `--json` is the outcome of the (last) benchmark; what happens meanwhile goes to
stderr. Nothing of a benchmark is imported before it is asked for.
"""

import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onward.bench import BENCHES
from onward.cli.output import print_json, print_line, print_rows
from onward.durations import parse_size_bytes

if TYPE_CHECKING:
    from onward.bench.report import Options, Report


@click.command()
@click.argument("name", metavar="NAME")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as one line of JSON.")
@click.option("--seconds", type=click.FloatRange(min=0.1), help="How long each round measures.")
@click.option("--count", type=click.IntRange(min=1), help="Messages (or topics) to work with.")
@click.option(
    "--bytes", "log_bytes", metavar="SIZE", help="Size of the log for recovery, replica-lag."
)
@click.option("--repeat", type=click.IntRange(min=1), help="Rounds; the figure is their median.")
@click.option(
    "--busy",
    type=click.Choice(["cpu", "disk"]),
    help="Keep all cores or the disk busy meanwhile (delay-lateness only).",
)
@click.option("--folder", metavar="FOLDER", help="Where all servers put their files.")
@click.option("--keep", is_flag=True, help="Leave the files of the servers there.")
def command(
    *,
    name: str,
    as_json: bool,
    seconds: float | None,
    count: int | None,
    log_bytes: str | None,
    repeat: int | None,
    busy: str | None,
    folder: str | None,
    keep: bool,
) -> None:
    """Run the benchmark NAME; `list` names them all, `all` runs them all.

    Example:  onward bench publish-sync --json
    """
    if name == "list":
        rows = [{"name": bench, "measures": text} for bench, text in BENCHES.items()]
        print_rows(rows, columns=["name", "measures"], as_json=as_json)
        return
    if busy is not None and name != "delay-lateness":
        raise click.UsageError("--busy is an option of delay-lateness only")
    from onward.bench.report import Options

    options = Options(
        # On the disk that is worked on: a temporary folder may be in memory, where a sync is free.
        folder=Path(folder or os.environ.get("TMPDIR") or "."),
        seconds=seconds,
        count=count,
        repeat=repeat,
        busy=busy,
        log_bytes=None if log_bytes is None else parse_size_bytes(log_bytes),
        keep=keep,
        say=lambda text: click.echo(text, err=True),
    )
    for bench in _chosen(name):
        _print(_run(bench, options), as_json=as_json)


def _chosen(name: str) -> list[str]:
    if name == "all":
        return list(BENCHES)
    if name not in BENCHES:
        raise click.UsageError(f"there is no benchmark {name!r}: see 'onward bench list'")
    return [name]


def _run(name: str, options: "Options") -> "Report":
    click.echo(f"{name}: {BENCHES[name]}", err=True)
    report: Report = import_module(f"onward.bench.{name.replace('-', '_')}").run(options)
    return report


def _print(report: "Report", *, as_json: bool) -> None:
    if as_json:
        print_json(report.record())
        return
    rows: list[dict[str, object]] = [{"server": "onward", report.unit: report.figure}]
    rows += [{"server": name, report.unit: figure} for name, figure in report.figures.items()]
    print_rows(rows, columns=["server", report.unit])
    for reason in report.missing.values():
        print_line(f"missing: {reason}")
    if report.ratio is not None:
        print_line(f"ratio: {report.ratio} ({report.ratio_is}; durability {report.durability})")
