"""`onward recurring`: messages that come again and again; list, show, set, pause, resume, delete.

Without a command it lists. What is changed is durable when the command returns.
"""

from __future__ import annotations

from typing import Literal

import click
import msgspec

from onward.cli.options import json_option
from onward.cli.output import body_field, print_json, print_line, print_rows
from onward.cli.params import DURATION, PAIR, Connect, client_options, confirm
from onward.cli.schedule import MOMENT
from onward.durations import format_duration, format_instant
from onward.errors import InvalidRequest
from onward.protocol.operations.schedule import RecurringDescription

_COLUMNS = ["name", "topic", "when", "next", "catch_up"]


class _ListByDefault(click.Group):
    """A group whose `list` may be left out."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put `list` in when no command is named."""
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args.insert(0, "list")
        return super().parse_args(ctx, args)


@click.group(cls=_ListByDefault)
def command() -> None:
    """List, show, set, pause, resume and delete messages that come again.

    Example:  onward recurring set report reports '{}' --cron "0 9 * * MON-FRI" --zone Europe/Berlin
    """


@command.command("list")
@json_option
@client_options
def list_recurring(*, connect: Connect, as_json: bool) -> None:
    """List what comes again, and when it comes next.

    Example:  onward recurring list
    """
    with connect() as mq:
        found = mq.recurring()
    if as_json:
        for one in found:
            print_json(_record(one))
    else:
        print_rows(map(_row, found), columns=_COLUMNS)


@command.command()
@click.argument("name")
@json_option
@client_options
def show(*, connect: Connect, name: str, as_json: bool) -> None:
    """Show one recurring schedule: when it comes, and the message with its body.

    Example:  onward recurring show report
    """
    with connect() as mq:
        found = next((one for one in mq.recurring() if one.name == name), None)
    if found is None:
        raise InvalidRequest(f"there is no recurring schedule {name!r}")
    if as_json:
        print_json(_record(found))
    else:
        rows = [{"name": word, "value": value} for word, value in _words(found).items()]
        print_rows(rows, columns=["name", "value"])


@command.command("set")
@click.argument("name")
@click.argument("topic")
@click.argument("body")
@click.option("--cron", metavar="FIELDS", help='When: "0 9 * * MON-FRI", @daily, @hourly ...')
@click.option("--zone", default="UTC", metavar="ZONE", help="Time zone of --cron. [default: UTC]")
@click.option(
    "--every", "every_ms", type=DURATION, metavar="DURATION", help="So often, instead of --cron."
)
@click.option(
    "--catch-up", type=click.Choice(["one", "none"]), default="one",
    help="Of runs missed while no broker ran: make up for the latest, or none. [default: one]",
)  # fmt: skip
@click.option("--start", type=MOMENT, metavar="TIME", help="No run before then.")
@click.option("--paused", is_flag=True, help="Have no runs until it is resumed.")
@click.option("--key", metavar="TEXT", help="Key of the messages.")
@click.option("--tag", "tags", multiple=True, metavar="TEXT", help="Tag; may be given often.")
@click.option(
    "--header", "headers", type=PAIR, multiple=True, metavar="NAME=VALUE",
    help="Header; may be given often.",
)  # fmt: skip
@json_option
@client_options
def set_recurring(
    *,
    connect: Connect,
    name: str,
    topic: str,
    body: str,
    cron: str | None,
    zone: str,
    every_ms: int | None,
    catch_up: Literal["one", "none"],
    start: int | None,
    paused: bool,
    key: str | None,
    tags: tuple[str, ...],
    headers: tuple[tuple[str, str], ...],
    as_json: bool,
) -> None:
    """Publish BODY to TOPIC again and again; a NAME that exists is replaced.

    Example:  onward recurring set tick ticks '{}' --every 10m
    """
    if (cron is None) == (every_ms is None):
        raise click.UsageError("say when: --cron or --every", click.get_current_context())
    with connect(create=True) as mq:
        found = mq.set_recurring(
            name, topic, body, cron=cron, zone=zone, every_ms=every_ms, catch_up=catch_up,
            start=start, paused=paused, key=key, tag=tags or None, headers=dict(headers) or None,
        )  # fmt: skip
    _tell(found, as_json=as_json)


@command.command()
@click.argument("name")
@json_option
@client_options
def pause(*, connect: Connect, name: str, as_json: bool) -> None:
    """Have no runs of NAME until it is resumed.

    Example:  onward recurring pause report
    """
    with connect() as mq:
        found = mq.pause_recurring(name)
    _tell(found, as_json=as_json)


@command.command()
@click.argument("name")
@json_option
@client_options
def resume(*, connect: Connect, name: str, as_json: bool) -> None:
    """Have runs of NAME again.

    Example:  onward recurring resume report
    """
    with connect() as mq:
        found = mq.resume_recurring(name)
    _tell(found, as_json=as_json)


@command.command()
@click.argument("name")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@json_option
@client_options
def delete(*, connect: Connect, name: str, yes: bool, as_json: bool) -> None:
    """Have no runs of NAME any more, and forget it; what was published stays.

    Example:  onward recurring delete report --yes
    """
    with connect() as mq:
        confirm(f"delete recurring schedule {name!r}?", yes=yes)
        mq.delete_recurring(name)
    if as_json:
        print_json({"name": name, "deleted": True})
    else:
        print_line(f"deleted {name}")


def _tell(one: RecurringDescription, *, as_json: bool) -> None:
    if as_json:
        print_json(_record(one))
    elif one.paused:
        print_line(f"{one.name} is paused")
    else:
        print_line(f"{one.name} comes next at {format_instant(one.next_at_ms)} in {one.topic}")


def _words(one: RecurringDescription) -> dict[str, str]:
    """Return all of a recurring schedule in words; what it does not have is left out."""
    headers = ", ".join(f"{name}={text}" for name, text in (one.headers or {}).items())
    words = {
        "name": one.name,
        "topic": one.topic,
        "when": _when(one),
        "next": "paused" if one.paused else format_instant(one.next_at_ms),
        "catch up": one.catch_up,
        "not before": format_instant(one.start_ms) if one.start_ms else "",
        "key": one.key or "",
        "tags": one.tag or "",
        "headers": headers,
        "trace id": one.trace_id or "",
        "priority": str(one.priority or ""),
        "tenant": one.tenant or "",
        "body": one.body.decode(errors="backslashreplace"),
    }
    return {name: text for name, text in words.items() if text or name == "body"}


def _row(one: RecurringDescription) -> dict[str, object]:
    return {
        "name": one.name, "topic": one.topic, "when": _when(one), "catch_up": one.catch_up,
        "next": "paused" if one.paused else format_instant(one.next_at_ms),
    }  # fmt: skip


def _when(one: RecurringDescription) -> str:
    return f"{one.cron} ({one.zone})" if one.cron else f"every {format_duration(one.every_ms)}"


def _record(one: RecurringDescription) -> dict[str, object]:
    record: dict[str, object] = msgspec.structs.asdict(one) | body_field(one.body)
    if "body_base64" in record:
        del record["body"]
    return record
