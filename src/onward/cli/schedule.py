"""`onward schedule`: what waits for its time; list, show, cancel, move, and the calendar.

A message is named by its schedule id, `@schedule/17` or `17`, or by its business key. Times are
moments (`2027-01-01T09:00Z`; without a zone: UTC) or how far from now (`2h`). Answers are exact:
`cancelled` never fires, `fired` is in its topic. Without a command it lists.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import islice

import click
import msgspec

from onward.cli.options import json_option
from onward.cli.output import body_field, counted, print_json, print_line, print_rows
from onward.cli.params import DURATION, Connect, client_options
from onward.client.schedule_times import DAY_MS, MINUTE_MS, ahead_ms, moment_ms
from onward.client.scheduled import schedule_id
from onward.durations import format_duration, format_instant
from onward.errors import Conflict, InvalidRequest
from onward.message.relative import Relative
from onward.protocol.operations.schedule import (
    SCHEDULE_TOPIC,
    CalendarDescription,
    CancelResult,
    MoveResult,
    ScheduledDescription,
)

_COLUMNS = ["id", "fires", "topic", "key", "unique", "bytes"]
_RESULTS = ["id", "state", "message", "unique"]
_BARS_MAX = 60
_BAR_WIDTH = 40


class _Told(click.ParamType):  # type: ignore[type-arg]  # not generic in older releases
    """A value that a function reads, which says what is wrong with it."""

    def __init__(self, name: str, read: Callable[[str], int | str]) -> None:
        self.name = name
        self._read = read

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> object:
        """Read a text; what is read already stays."""
        if not isinstance(value, str):
            return value
        try:
            return self._read(value)
        except InvalidRequest as error:
            self.fail(str(error), param, ctx)


def _ahead(text: str) -> int | str:
    """Return a moment; how far from now it is stays as it is, for the broker to resolve."""
    moment = ahead_ms(text)
    return text if isinstance(moment, Relative) else moment


MOMENT = _Told("time", moment_ms)
"""A moment, past or future."""
AHEAD = _Told("time", _ahead)
"""A moment, or how far from now."""
SCHEDULE_ID = _Told("id", schedule_id)

_unique_option = click.option(
    "--unique", metavar="KEY", help="The business key under which it waits, instead of ID."
)


class _ListByDefault(click.Group):
    """A group whose `list` may be left out: `onward schedule --topic orders`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put `list` in when no command is named."""
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args.insert(0, "list")
        return super().parse_args(ctx, args)


@click.group(cls=_ListByDefault)
def command() -> None:
    """List, show, cancel and move what waits for its time, and show the calendar.

    Example:  onward schedule calendar --until 2d
    """


@command.command("list")
@click.option("--topic", metavar="TOPIC", help="Only what fires there.")
@click.option("--key", metavar="TEXT", help="Only messages with this key.")
@click.option("--from", "start", type=AHEAD, metavar="TIME", help="Only what fires from then on.")
@click.option("--until", "end", type=AHEAD, metavar="TIME", help="Only what fires before then.")
@click.option(
    "--limit", type=click.IntRange(1), default=100, metavar="N",
    help="How many at most. [default: 100]",
)  # fmt: skip
@json_option
@client_options
def list_waiting(
    *,
    connect: Connect,
    topic: str | None,
    key: str | None,
    start: int | None,
    end: int | None,
    limit: int,
    as_json: bool,
) -> None:
    """List what waits, in the order in which it fires.

    Example:  onward schedule list --topic reminders --until 1h
    """
    with connect() as mq:
        # Nothing may keep the iterator: it ends while its client is open.
        found = list(
            islice(mq.list_scheduled(topic=topic, key=key, start=start, end=end), limit + 1)
        )
    shown = found[:limit]
    if as_json:
        for one in shown:
            print_json(_record(one))
        return
    print_rows(map(_row, shown), columns=_COLUMNS)
    if len(found) > limit:
        print_line(f"the first {limit:,}: --limit shows more")


@command.command()
@click.argument("number", metavar="[ID]", type=SCHEDULE_ID, required=False)
@_unique_option
@json_option
@client_options
def show(*, connect: Connect, number: int | None, unique: str | None, as_json: bool) -> None:
    """Show one scheduled message, and what became of it.

    Example:  onward schedule show @schedule/17
    """
    _check_one(number, unique)
    with connect() as mq:
        found = mq.scheduled(number, unique=unique)
    if found.state == "not_found":
        raise InvalidRequest(_missing(number, unique))
    if as_json:
        print_json(_record(found))
        return
    rows = [{"name": name, "value": value} for name, value in _words(found).items()]
    print_rows(rows, columns=["name", "value"])


@command.command()
@click.argument("numbers", metavar="[ID...]", type=SCHEDULE_ID, nargs=-1)
@click.option(
    "--unique", "uniques", multiple=True, metavar="KEY",
    help="What waits under this business key; may be given often.",
)  # fmt: skip
@click.option("--cause", default="", metavar="TEXT", help="Why, for those who ask later.")
@json_option
@client_options
def cancel(
    *,
    connect: Connect,
    numbers: tuple[int, ...],
    uniques: tuple[str, ...],
    cause: str,
    as_json: bool,
) -> None:
    """Let messages never fire; the answer says for each whether that was in time.

    When none of them was, it ends with 1.

    Example:  onward schedule cancel --unique order-7
    """
    if not numbers and not uniques:
        raise click.UsageError("name an ID or --unique", click.get_current_context())
    results: list[CancelResult] = []
    with connect() as mq:
        if numbers:
            results += mq.cancel_scheduled(numbers, cause=cause)
        if uniques:
            results += mq.cancel_scheduled(unique=uniques, cause=cause)
    if as_json:
        for result in results:
            print_json(_result_record(result))
    else:
        rows = [
            {
                "id": _name(result.id), "state": result.state, "message": result.message_id,
                "unique": result.unique,
            }
            for result in results
        ]  # fmt: skip
        print_rows(rows, columns=_RESULTS)
    if not any(result.state == "cancelled" for result in results):
        click.get_current_context().exit(1)


@command.command()
@click.argument("number", metavar="[ID]", type=SCHEDULE_ID, required=False)
@_unique_option
@click.option("--at", type=MOMENT, metavar="TIME", help="Let it fire then: 2027-01-01T09:00Z.")
@click.option(
    "--delay", "delay_ms", type=DURATION, metavar="DURATION", help="Let it fire so long from now."
)
@json_option
@client_options
def move(
    *,
    connect: Connect,
    number: int | None,
    unique: str | None,
    at: int | None,
    delay_ms: int | None,
    as_json: bool,
) -> None:
    """Let a message fire at another time; it gets a new id.

    Example:  onward schedule move @schedule/17 --delay 2h
    """
    _check_one(number, unique)
    if (at is None) == (delay_ms is None):
        raise click.UsageError("say when: --at or --delay", click.get_current_context())
    with connect() as mq:
        result = mq.reschedule(number, unique=unique, at=at, delay_ms=delay_ms)
    if result.state == "not_found":
        raise InvalidRequest(_missing(number, unique))
    if not result.is_moved:
        place = "" if result.offset is None else f" ({result.topic}/{result.offset})"
        raise Conflict(f"{_name(result.id)} cannot be moved: it is {result.state}{place}")
    if as_json:
        print_json(_result_record(result))
    else:
        print_line(f"{_name(result.id)} fires at {format_instant(result.at_ms)} in {result.topic}")


@command.command()
@click.option("--from", "start", type=AHEAD, metavar="TIME", help="Begin then. [default: now]")
@click.option("--until", "end", type=AHEAD, metavar="TIME", help="End then. [default: a day later]")
@click.option(
    "--step",
    "step_ms",
    type=DURATION,
    metavar="DURATION",
    help="Time of one bar. [default: as it fits]",
)
@click.option("--topic", metavar="TOPIC", help="Only what fires there.")
@json_option
@client_options
def calendar(
    *,
    connect: Connect,
    start: int | None,
    end: int | None,
    step_ms: int | None,
    topic: str | None,
    as_json: bool,
) -> None:
    """Show how many messages fire when, and in which topics. Times are UTC.

    Example:  onward schedule calendar --until 7d --step 1h
    """
    with connect() as mq:
        found = mq.calendar(start=start, end=end, step_ms=step_ms, topic=topic)
    if as_json:
        for bar in found.bars:
            print_json({"at_ms": bar.at_ms, "step_ms": found.step_ms, "count": bar.count})
        return
    _print_calendar(found)


# --- printing -----------------------------------------------------------------------------------


def _print_calendar(found: CalendarDescription) -> None:
    bars = found.all_bars()
    if len(bars) > _BARS_MAX:
        # Too many for a screen: those that are empty can be left out.
        bars = found.bars
    most = max((bar.count for bar in bars), default=0)
    block = "█" if (sys.stdout.encoding or "").lower().startswith("utf") else "#"
    width = len(f"{most:,}")
    for bar in bars:
        length = -(-bar.count * _BAR_WIDTH // most) if most else 0
        line = f"{_moment(bar.at_ms, found.step_ms)}  {bar.count:>{width},}  {block * length}"
        print_line(line.rstrip())
    about = "" if found.is_exact else "about "
    print_line(
        f"{about}{counted(found.count, 'message')}, a bar is {format_duration(found.step_ms)}"
    )
    if found.topics:
        print_line("")
        rows = [{"topic": name, "messages": count} for name, count in found.topics.items()]
        print_rows(rows, columns=["topic", "messages"])


def _moment(at_ms: int, step_ms: int) -> str:
    """Return where a bar begins, as finely as its step needs."""
    form = "%Y-%m-%d" if step_ms % DAY_MS == 0 else "%Y-%m-%d %H:%M"
    if step_ms % MINUTE_MS:
        form = "%Y-%m-%d %H:%M:%S"
    try:
        return datetime.fromtimestamp(at_ms // 1_000, tz=UTC).strftime(form)
    except (OverflowError, ValueError, OSError):
        return str(at_ms)


def _check_one(number: int | None, unique: str | None) -> None:
    if (number is None) == (unique is None):
        raise click.UsageError("name an ID, or --unique", click.get_current_context())


def _missing(number: int | None, unique: str | None) -> str:
    if number is None:
        return f"nothing waits under the unique key {unique!r}"
    return f"there is no scheduled message {_name(number)}"


def _name(number: int) -> str | None:
    return None if number < 0 else f"{SCHEDULE_TOPIC}/{number}"


def _row(one: ScheduledDescription) -> dict[str, object]:
    return {
        "id": one.name, "fires": format_instant(one.at_ms), "topic": one.topic, "key": one.key,
        "unique": one.unique, "bytes": one.body_bytes,
    }  # fmt: skip


def _record(one: ScheduledDescription) -> dict[str, object]:
    # All fields by their names on the wire, where those with their default are left out.
    fields = {
        field.encode_name: getattr(one, field.name)
        for field in msgspec.structs.fields(one)
        if field.name not in ("id", "body")
    }
    fields["priority"] = one.priority or None
    record: dict[str, object] = {"id": one.name, "schedule_id": one.id}
    record |= {name: value for name, value in fields.items() if value is not None}
    # The first part of a long body may end in the middle of a character.
    return record | (body_field(one.body) if one.body else {})


def _words(one: ScheduledDescription) -> dict[str, object]:
    """Return what there is to know of a message, as a person would write it."""
    words: dict[str, object] = {"id": one.name, "state": one.state}
    optional: dict[str, object] = {
        "topic": one.topic,
        "message": None if one.offset is None else f"{one.topic}/{one.offset}",
        "fires": format_instant(one.at_ms) if one.at_ms else None,
        "key": one.key,
        "unique": one.unique,
        "tag": one.tag,
        "trace id": one.trace_id,
        "tenant": one.tenant,
        "priority": one.priority or None,
        "bytes": one.body_bytes if one.state == "waiting" else None,
        "body": one.body or None,
    }
    return words | {name: value for name, value in optional.items() if value not in (None, "")}


def _result_record(result: CancelResult | MoveResult) -> dict[str, object]:
    return {**msgspec.structs.asdict(result), "id": _name(result.id), "schedule_id": result.id}
