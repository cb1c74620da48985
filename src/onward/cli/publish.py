r"""`onward publish`: messages from arguments, from a file, or from a pipe.

    BODY ...            one message each, in one batch
    --file F, or stdin  one message per line, the bytes as they are without the "\n"
    --whole             all of it as one message
    --json-lines        one message per line, as `onward read --format json` writes it

Lines are published as they come: whatever has arrived goes out in batches of at most --batch, so
`tail -f log | onward publish lines` works, and a file of any size needs little memory.
"""

from __future__ import annotations

import base64
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, Literal, NamedTuple, TypedDict

import click
import msgspec

import onward
from onward.cli.options import json_option
from onward.cli.output import print_json, print_line, print_rows, progress
from onward.cli.params import DURATION, Connect, client_options
from onward.cli.schedule import MOMENT
from onward.client.bodies import encode_body
from onward.client.sync_schedule import SyncScheduledBatchReceipt
from onward.errors import InvalidRequest, MessageTooLarge
from onward.protocol.operations.schedule import SCHEDULE_TOPIC

READ_BYTES = 1 << 20
LINE_BYTES_MAX = 64 << 20
SHOWN_MAX = 10
_COLUMNS = ["id", "event_id", "durability"]

Durability = Literal["memory", "interval", "disk", "quorum"]


class Line(msgspec.Struct):
    """One line of --json-lines; what else stands in it (offset, time) is not published."""

    body: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    body_base64: str | None = None
    key: str | None = None
    headers: dict[str, str] | None = None
    headers_base64: dict[str, str] | None = None
    tag: str | None = None
    trace_id: str | None = None
    priority: int | None = None
    tenant: str | None = None


class Columns(NamedTuple):
    """What is published in one batch."""

    bodies: Sequence[bytes]
    keys: list[str | None] | None
    headers: list[dict[str, str | bytes] | None] | None
    tags: list[str | None] | None
    trace_ids: list[str | None] | None
    priorities: list[int | None] | None = None
    tenants: list[str | None] | None = None


@click.command()
@click.argument("topic")
@click.argument("bodies", metavar="[BODY]...", nargs=-1)
@click.option("--key", metavar="TEXT", help="Key of the messages.")
@click.option("--tag", "tags", multiple=True, metavar="TEXT", help="Tag; may be given often.")
@click.option(
    "--header", "headers", multiple=True, metavar="NAME=VALUE", help="Header; may be given often."
)
@click.option("--trace-id", metavar="TEXT", help="Trace id of the messages.")
@click.option(
    "--priority", type=click.IntRange(0, 255), metavar="N", help="Priority; 255 is most urgent."
)
@click.option("--tenant", metavar="TEXT", help="Tenant of the messages.")
@click.option(
    "--delay", "delay_ms", type=DURATION, metavar="DURATION", help="Let them wait so long: 45m."
)
@click.option("--at", type=MOMENT, metavar="TIME", help="Let them wait until 2027-01-01T09:00Z.")
@click.option("--unique", metavar="KEY", help="Business key of one message that waits.")
@click.option("--replace", is_flag=True, help="Take the place of what waits under --unique.")
@click.option("--file", metavar="FILE", help="Read messages from a file; - is stdin.")
@click.option("--whole", is_flag=True, help="Publish all of the input as one message.")
@click.option("--json-lines", is_flag=True, help="Each line is a message written as JSON.")
@click.option(
    "--durability",
    type=click.Choice(["memory", "interval", "disk", "quorum"]),
    help="What the receipt promises. [default: as the broker's settings say]",
)
@click.option(
    "--batch", "batch_max", type=click.IntRange(1, 100_000), default=1_000, metavar="N",
    help="Messages of the input in one batch. [default: 1000]",
)  # fmt: skip
@json_option
@client_options
def command(
    *,
    connect: Connect,
    topic: str,
    bodies: tuple[str, ...],
    key: str | None,
    tags: tuple[str, ...],
    headers: tuple[str, ...],
    trace_id: str | None,
    priority: int | None,
    tenant: str | None,
    delay_ms: int | None,
    at: int | None,
    unique: str | None,
    replace: bool,
    file: str | None,
    whole: bool,
    json_lines: bool,
    durability: Durability | None,
    batch_max: int,
    as_json: bool,
) -> None:
    """Publish messages: one per argument, or one per line of a file or a pipe.

    Example:  onward publish orders '{"id": 7}' --key 7
    """
    if bodies and (file or whole or json_lines):
        raise click.UsageError("bodies are given: --file, --whole and --json-lines do not fit")
    if unique is not None and len(bodies) != 1 and not whole:
        raise click.UsageError("--unique is the key of one message: give one BODY, or --whole")
    later = _later(delay_ms, at, unique, replace=replace)
    same = Line(
        key=key, headers=_headers(headers), tag=",".join(tags) or None, trace_id=trace_id,
        priority=priority, tenant=tenant,
    )  # fmt: skip
    sending = _Sending(topic, durability=durability, as_json=as_json, later=later)
    if bodies:
        given = [os.fsencode(body) for body in bodies]
        with connect(create=True) as mq:
            sending.send(mq, _columns(given, same))
            sending.show_each()
        return
    with _input(file) as stream, connect(create=True) as mq, progress("publishing") as advance:
        lines_before = 0
        for batch in _batches(stream, batch_max=batch_max, whole=whole):
            lines, wrong = _read_lines(batch, lines_before) if json_lines else ([], None)
            columns = _from_json(lines, same) if json_lines else _columns(batch, same)
            if columns.bodies:
                sending.send(mq, columns)
                sending.tell_batch()
            if wrong is not None:
                sending.tell_count()
                raise wrong
            lines_before += len(batch)
            advance(len(batch))
    sending.show_all()


class Later(TypedDict, total=False):
    """When messages are to fire, as `publish_many` takes it."""

    delay_ms: int
    at: int
    uniques: list[str | None]
    replace: bool


def _later(
    delay_ms: int | None, at: int | None, unique: str | None, *, replace: bool
) -> Later | None:
    """Return what the options say of the time; None when they say nothing."""
    if delay_ms is not None and at is not None:
        raise click.UsageError("--delay and --at exclude each other")
    if replace and unique is None:
        raise click.UsageError("--replace takes the place of what waits under --unique: give it")
    later = Later()
    if delay_ms is not None:
        later["delay_ms"] = delay_ms
    elif at is not None:
        later["at"] = at
    elif unique is not None:
        raise click.UsageError("--unique is for messages that wait: give --delay or --at")
    if unique is not None:
        later |= Later(uniques=[unique], replace=replace)
    return later or None


class _Sending:
    """Publishes batches, and remembers enough to say what was published."""

    def __init__(
        self, topic: str, *, durability: Durability | None, as_json: bool, later: Later | None
    ) -> None:
        self._topic = topic
        self._later = later
        self._durability = durability
        self._as_json = as_json
        self._started_s = time.monotonic()
        self._count = 0
        self._first: list[dict[str, object]] = []
        self._last: onward.BatchReceipt | None = None
        self._is_unheard = False

    def send(self, mq: onward.SyncClient, columns: Columns) -> None:
        """Publish one batch; say how far it got when that fails."""
        try:
            given: Any = {**columns._asdict(), **(self._later or {})}
            receipt = _stored(mq.publish_many(self._topic, durability=self._durability, **given))
        except (onward.OnwardError, KeyboardInterrupt):
            self.tell_count()
            raise
        self._count += receipt.count
        self._last = receipt
        room = SHOWN_MAX - len(self._first)
        self._first += [_row(receipt, n) for n in range(min(receipt.count, max(0, room)))]

    def tell_count(self) -> None:
        """Say how many were published before it went wrong."""
        if self._count:
            click.echo(f"{self._count} messages were published before", err=True)

    def tell_batch(self) -> None:
        """Print the receipt of the last batch for machines, as soon as it is there.

        Who reads the receipts may stop (`| head`): the messages are published all the same.
        """
        receipt = self._last
        if receipt is None or not self._as_json or self._is_unheard:
            return
        try:
            print_json(
                {
                    "topic": receipt.topic,
                    "first_offset": receipt.first_offset,
                    "count": receipt.count,
                    "event_id": receipt.event_id,
                    "durability": receipt.durability,
                }
            )
            sys.stdout.flush()
        except BrokenPipeError:
            self._is_unheard = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def show_each(self) -> None:
        """Print the receipt of every message of the last batch."""
        assert self._last is not None
        rows = [_row(self._last, number) for number in range(self._last.count)]
        names = ["id", "topic", "offset", "event_id", "durability"] if self._as_json else _COLUMNS
        print_rows(rows, columns=names, as_json=self._as_json)

    def show_all(self) -> None:
        """Print receipts when they are few, else one line about all of them."""
        if self._as_json:
            return
        if self._last is None:
            print_line("nothing to publish: the input is empty")
        elif self._count <= SHOWN_MAX:
            print_rows(self._first, columns=_COLUMNS)
        else:
            took_s = max(time.monotonic() - self._started_s, 0.001)
            last = self._last.first_offset + self._last.count - 1
            print_line(
                f"published {self._count:,} messages, {self._first[0]['id']} to "
                f"{self._last.topic}/{last}, durability {self._last.durability}, in {took_s:.1f} s "
                f"({self._count / took_s:,.0f}/s)"
            )


def _stored(receipt: onward.BatchReceipt | SyncScheduledBatchReceipt) -> onward.BatchReceipt:
    """Return where messages are; those that wait are in the schedule."""
    if isinstance(receipt, onward.BatchReceipt):
        return receipt
    return onward.BatchReceipt(
        SCHEDULE_TOPIC, receipt.first_id, receipt.count, receipt.event_id, receipt.durability
    )


def _row(receipt: onward.BatchReceipt, number: int) -> dict[str, object]:
    offset = receipt.first_offset + number
    return {
        "id": f"{receipt.topic}/{offset}",
        "topic": receipt.topic,
        "offset": offset,
        "event_id": receipt.event_id,
        "durability": receipt.durability,
    }


def _headers(given: Sequence[str]) -> dict[str, str] | None:
    named: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise click.UsageError(f"--header {text!r}: write it as NAME=VALUE")
        named[name] = value
    return named or None


def _columns(bodies: Sequence[bytes], same: Line) -> Columns:
    """Return the bodies with the key, headers and other fields that the options name."""
    values = (same.key, same.headers, same.tag, same.trace_id, same.priority, same.tenant)
    columns = [None if value is None else [value] * len(bodies) for value in values]
    return Columns(bodies, *columns)  # type: ignore[arg-type]  # each column has its own type


def _read_lines(
    lines: Sequence[bytes], lines_before: int
) -> tuple[list[tuple[Line, bytes]], InvalidRequest | None]:
    """Return the messages up to the first wrong line, and what is wrong with that one."""
    good: list[tuple[Line, bytes]] = []
    for number, text in enumerate(lines, lines_before + 1):
        try:
            line = _read_line(text)
            _all_headers(line)
            good.append((line, _body(line)))
        except InvalidRequest as error:
            return good, InvalidRequest(f"line {number}: {error}")
    return good, None


def _from_json(lines: Sequence[tuple[Line, bytes]], same: Line) -> Columns:
    """Return the messages as columns; what a line does not say is taken from the options."""
    read = [line for line, _ in lines]
    return Columns(
        [body for _, body in lines],
        [line.key if line.key is not None else same.key for line in read],
        [_all_headers(line) or _all_headers(same) for line in read],
        [line.tag if line.tag is not None else same.tag for line in read],
        [line.trace_id if line.trace_id is not None else same.trace_id for line in read],
        [line.priority if line.priority is not None else same.priority for line in read],
        [line.tenant if line.tenant is not None else same.tenant for line in read],
    )


def _read_line(line: bytes) -> Line:
    try:
        return msgspec.json.decode(line, type=Line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        shown = line[:60].decode(errors="backslashreplace")
        raise InvalidRequest(f"{shown!r} is not a message as JSON: {error}") from None


def _all_headers(line: Line) -> dict[str, str | bytes] | None:
    """Return the headers that are text and those that are bytes."""
    binary = {
        name: _from_base64(text, f"headers_base64 {name!r}")
        for name, text in (line.headers_base64 or {}).items()
    }
    return {**(line.headers or {}), **binary} or None


def _from_base64(text: str, what: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise InvalidRequest(f"{what} is not base64: {error}") from None


def _body(line: Line) -> bytes:
    if line.body_base64 is not None:
        return _from_base64(line.body_base64, "body_base64")
    if isinstance(line.body, msgspec.UnsetType):
        raise InvalidRequest("a line has neither body nor body_base64")
    value = msgspec.json.decode(line.body)
    # Text is a body as it is; any other JSON value is published as JSON.
    return encode_body(value) if isinstance(value, str) else bytes(line.body)


def _input(file: str | None) -> BinaryIO:
    if file not in (None, "-"):
        return open(str(file), "rb")
    if sys.stdin.isatty():
        click.echo("one message per line; ctrl-D ends, ctrl-C stops", err=True)
    return os.fdopen(os.dup(sys.stdin.fileno()), "rb")


def _batches(stream: BinaryIO, *, batch_max: int, whole: bool) -> Iterator[list[bytes]]:
    if whole:
        yield [_read_whole(stream)]
        return
    for lines in _lines(stream):
        for start in range(0, len(lines), batch_max):
            yield lines[start : start + batch_max]


def _read_whole(stream: BinaryIO) -> bytes:
    body = stream.read(LINE_BYTES_MAX + 1)
    if len(body) > LINE_BYTES_MAX:
        raise MessageTooLarge(f"the input has more than {LINE_BYTES_MAX} bytes")
    return body


def _lines(stream: BinaryIO) -> Iterator[list[bytes]]:
    """Yield the lines that have arrived, as soon as there is one."""
    begun = b""
    while unit := stream.read1(READ_BYTES):  # type: ignore[attr-defined]
        *lines, begun = (begun + unit).split(b"\n")
        if lines:
            yield lines
        if len(begun) > LINE_BYTES_MAX:
            raise MessageTooLarge(f"a line has more than {LINE_BYTES_MAX} bytes")
    if begun:
        yield [begun]
