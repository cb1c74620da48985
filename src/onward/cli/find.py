"""`onward find`: messages of a topic by key, trace id, header, text and time."""

from __future__ import annotations

from datetime import datetime

import click

from onward.cli.group import print_message
from onward.cli.params import PAIR, START, Connect, client_options
from onward.client.finding import FIND_MAX


@click.command()
@click.argument("topic")
@click.option("--key", metavar="TEXT", help="Only messages with this key.")
@click.option("--trace-id", metavar="TEXT", help="Only messages with this trace id.")
@click.option(
    "--header", "headers", type=PAIR, multiple=True, metavar="NAME=VALUE",
    help="Only messages with this header; may be given often.",
)  # fmt: skip
@click.option("--text", metavar="TEXT", help="Only messages with this in their body.")
@click.option(
    "--from", "start", type=START, default="earliest", metavar="START",
    help="earliest, an offset, 10m (ago) or 2026-11-16T10:00Z. [default: earliest]",
)  # fmt: skip
@click.option("--until", "end", type=START, metavar="END", help="Before this offset or time.")
@click.option(
    "--limit", type=click.IntRange(1, FIND_MAX), default=100, metavar="N",
    help="How many at most. [default: 100]",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON per message.")
@client_options
def command(
    *,
    connect: Connect,
    topic: str,
    key: str | None,
    trace_id: str | None,
    headers: tuple[tuple[str, str], ...],
    text: str | None,
    start: str | int | datetime,
    end: str | int | datetime | None,
    limit: int,
    as_json: bool,
) -> None:
    """Find messages of a topic by key, trace id, header, text and time, or one by its id.

    Example:  onward find orders --key 7 --from 2h
    """
    # An argument may hold bytes that are not UTF-8: they are searched for as bytes.
    sought = None if text is None else text.encode(errors="surrogateescape")
    with connect() as mq:
        found = mq.find(
            topic, key=key, trace_id=trace_id, headers=dict(headers), text=sought, start=start,
            end=end, limit=limit,
        )  # fmt: skip
    for message in found:
        print_message(message, as_json=as_json)
