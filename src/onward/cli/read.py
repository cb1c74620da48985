"""`onward read`: messages of a topic, for people and for other programs.

    text   offset, time, key, body on one line; what could act on a terminal is made visible
    json   one object per line; a body that is not UTF-8 as `body_base64`
    body   one body per line; made visible on a terminal, the very bytes in a pipe
    raw    the very bytes of the bodies, with nothing between them; never on a terminal

Output is flushed after every batch, so a pipe sees messages when they come.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TypeVar

import click

from onward.cli.output import body_field, is_terminal, print_json, printable
from onward.cli.params import START, Connect, client_options
from onward.client.reader import ReadBatch
from onward.durations import format_instant
from onward.message.message import Message

_KEY_WIDTH = 12


_Command = TypeVar("_Command", bound=Callable[..., object])


def format_options(command: _Command) -> _Command:
    """Add --format and --json, which choose how messages are written, to a command."""
    command = click.option("--json", "as_json", is_flag=True, help="The same as --format json.")(
        command
    )
    return click.option(
        "--format", "form", type=click.Choice(["text", "json", "body", "raw"]), default="text",
        help="How a message is written. [default: text]",
    )(command)  # fmt: skip


def chosen_format(form: str, *, as_json: bool) -> str:
    """Return the format that the options choose; raw bytes are refused on a terminal."""
    form = "json" if as_json else form
    if form == "raw" and sys.stdout.isatty():
        raise click.UsageError(
            "raw bytes could act on this terminal: send them into a file or a pipe, or use "
            "--format body",
            click.get_current_context(),
        )
    return form


@click.command()
@click.argument("topic")
@click.option(
    "--from", "start", type=START, default="earliest", metavar="START",
    help="earliest, latest, an offset, 10m (ago) or 2026-11-16T10:00Z. [default: earliest]",
)  # fmt: skip
@click.option(
    "--after-event", type=click.IntRange(0), metavar="N",
    help="Begin after this event id, instead of --from.",
)  # fmt: skip
@click.option("--count", type=click.IntRange(1), metavar="N", help="End after N messages.")
@click.option("--follow", "-f", is_flag=True, help="Wait for new messages at the end.")
@format_options
@client_options
def command(
    *,
    connect: Connect,
    topic: str,
    start: str | int | datetime,
    after_event: int | None,
    count: int | None,
    follow: bool,
    form: str,
    as_json: bool,
) -> None:
    """Read the messages of a topic, and follow it live.

    Example:  onward read orders --from 10m --follow
    """
    write = _WRITERS[chosen_format(form, as_json=as_json)]
    left = count
    with connect() as mq:
        reader = mq.read(topic, start=start, after_event_id=after_event, follow=follow)
        for batch in reader.batches():
            wanted = batch.count if left is None else min(left, batch.count)
            write(batch, wanted)
            sys.stdout.flush()
            if left is not None:
                left -= wanted
                if not left:
                    return


def as_record(message: Message) -> dict[str, object]:
    """Return a message as what its line of JSON says.

    >>> as_record(Message("orders", 7, b"hello", published_at_ms=0, key="a"))["body"]
    'hello'
    """
    record: dict[str, object] = {
        "id": message.id,
        "topic": message.topic,
        "offset": message.offset,
        "event_id": message.event_id,
        "published_at_ms": message.published_at_ms,
    }
    optional = {
        "key": message.key,
        **_headers(message),
        "tag": message.tag,
        "trace_id": message.trace_id,
        "due_at_ms": message.due_at_ms,
        "priority": message.priority or None,
        "tenant": message.tenant,
    }
    record |= {name: value for name, value in optional.items() if value is not None}
    return record | body_field(message.body)


def _headers(message: Message) -> dict[str, dict[str, str] | None]:
    """Return the headers as JSON can say them: text as it is, bytes as base64 beside it."""
    given = message.headers
    if given is None:
        return {}
    texts = {name: value for name, value in given.items() if isinstance(value, str)}
    binary = {
        name: base64.b64encode(value).decode()
        for name, value in given.items()
        if not isinstance(value, str)
    }
    return {"headers": texts if texts or not binary else None, "headers_base64": binary or None}


def as_line(message: Message) -> str:
    r"""Return a message as a line for people.

    >>> as_line(Message("orders", 7, b"\x1b[31mred", published_at_ms=0))
    '     7  1970-01-01T00:00:00.000Z  -             \\x1b[31mred'
    """
    key = "-" if message.key is None else printable(message.key)
    moment = format_instant(message.published_at_ms)
    return f"{message.offset:>6}  {moment}  {key:<{_KEY_WIDTH}}  {printable(message.body)}"


def _write_text(batch: ReadBatch, wanted: int) -> None:
    lines = map(as_line, batch.messages()[:wanted])
    sys.stdout.write("\n".join(lines) + "\n")


def _write_json(batch: ReadBatch, wanted: int) -> None:
    for message in batch.messages()[:wanted]:
        print_json(as_record(message))


def write_bodies(bodies: Sequence[bytes], form: str) -> None:
    """Write bodies as they are: one per line (`body`) or joined (`raw`)."""
    if form == "raw":
        sys.stdout.buffer.write(b"".join(bodies))
    elif is_terminal():
        sys.stdout.write("".join(f"{printable(body)}\n" for body in bodies))
    else:
        sys.stdout.buffer.write(b"".join(body + b"\n" for body in bodies))


_WRITERS: dict[str, Callable[[ReadBatch, int], None]] = {
    "text": _write_text,
    "json": _write_json,
    "body": lambda batch, wanted: write_bodies(batch.bodies[:wanted], "body"),
    "raw": lambda batch, wanted: write_bodies(batch.bodies[:wanted], "raw"),
}
