"""`onward status`: how a broker is, in numbers."""

from __future__ import annotations

import click

from onward.cli.options import json_option
from onward.cli.output import print_json, print_rows
from onward.cli.params import Connect, client_options
from onward.durations import format_duration, format_instant


@click.command()
@json_option
@client_options
def command(*, connect: Connect, as_json: bool) -> None:
    """Show how a broker is: its log, its disk, its connections, its counts.

    Example:  onward status --json
    """
    with connect() as mq:
        status = mq.status()
    if as_json:
        print_json(status)
        return
    rows = [{"name": _title(name), "value": _word(name, value)} for name, value in status.items()]
    print_rows(rows, columns=["name", "value"])


def _title(name: str) -> str:
    """Return a name for people: the unit is in the value.

    >>> _title("started_at_ms"), _title("schedule_ahead_ms_max"), _title("log_bytes")
    ('started at', 'schedule ahead max', 'log bytes')
    """
    return " ".join(part for part in name.split("_") if part != "ms")


def _word(name: str, value: object) -> object:
    """Return a number as a person would write it."""
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if name.endswith("_at_ms"):
        return format_instant(value) if value else "-"
    if "ms" in name.split("_"):
        return format_duration(value)
    if name.endswith("bytes"):
        return rounded_size(value)
    return f"{value:,}"


def rounded_size(size_bytes: int) -> str:
    """Return a size with one digit after the point.

    >>> rounded_size(1_610_612_736)
    '1.5 GiB'
    """
    size = float(size_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size_bytes} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
