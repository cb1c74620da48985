"""`onward topics`: the topics of a broker; list, create, show, change, delete.

Without a command it lists. What is changed is durable when the command returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, get_args

import click
import msgspec

import onward
from onward.cli.options import json_option
from onward.cli.output import print_json, print_line, print_rows
from onward.cli.params import DURATION, INSTANT, SIZE, Connect, client_options, confirm
from onward.durations import format_duration, format_instant, format_size
from onward.protocol.operations.topics import Rule

_Command = TypeVar("_Command", bound=Callable[..., object])

_RULES = click.Choice(get_args(Rule))
_COLUMNS = ["topic", "state", "messages", "first", "next", "rule", "expires"]


class _ListByDefault(click.Group):
    """A group whose `list` may be left out: `onward topics --all`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put `list` in when no command is named."""
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args.insert(0, "list")
        return super().parse_args(ctx, args)


@click.group(cls=_ListByDefault)
def command() -> None:
    """List, create, show, change and delete topics.

    Example:  onward topics create orders --retention 7d
    """


def _topic_options(decorated: _Command) -> _Command:
    """Add what can be set of a topic."""
    options = [
        click.option(
            "--lifetime", "lifetime_ms", type=DURATION, metavar="DURATION",
            help="Delete the topic after this time; at least 10s.",
        ),
        click.option(
            "--expires-at", type=INSTANT, metavar="TIME",
            help="Delete the topic at this time: 2026-11-16T10:00Z, or never.",
        ),
        click.option(
            "--expires-idle", "expires_idle_ms", type=DURATION, metavar="DURATION",
            help="Delete the topic when nobody used it for so long; 0 for never.",
        ),
        click.option("--rule", type=_RULES, help="What may be done with it."),
        click.option(
            "--retention", "retention_ms", type=DURATION, metavar="DURATION",
            help="How long messages are kept; 0 as the broker's settings say.",
        ),
        click.option(
            "--retention-bytes", type=SIZE, metavar="SIZE",
            help="How much of the topic is kept; 0 for no limit.",
        ),
        click.option(
            "--retention-group", metavar="GROUP",
            help="Keep what this group has not finished; an empty text for none.",
        ),
        click.option(
            "--keep-unfinished/--drop-unfinished", default=None,
            help="Keep what any group has not finished, or let retention drop it.",
        ),
        click.option(
            "--message-bytes-max", type=SIZE, metavar="SIZE",
            help="Size of its largest message; 0 as the broker's settings say.",
        ),
    ]  # fmt: skip
    for option in reversed(options):
        decorated = option(decorated)
    return decorated


@command.command("list")
@click.option("--all", "ended", is_flag=True, help="Show topics that have ended as well.")
@click.option("--prefix", default="", metavar="TEXT", help="Only names that begin with this.")
@json_option
@client_options
def list_topics(*, connect: Connect, ended: bool, prefix: str, as_json: bool) -> None:
    """List the topics.

    Example:  onward topics list --prefix orders
    """
    with connect() as mq:
        topics = mq.topics(prefix=prefix, ended=ended)
    if as_json:
        for topic in topics:
            print_json(topic)
    else:
        print_rows(map(_row, topics), columns=_COLUMNS)


@command.command()
@click.argument("name")
@_topic_options
@click.option("--exist-ok", is_flag=True, help="Succeed when it exists already.")
@json_option
@client_options
def create(
    *,
    connect: Connect,
    name: str,
    exist_ok: bool,
    lifetime_ms: int | None,
    expires_at: int | None,
    rule: Rule | None,
    retention_ms: int | None,
    retention_bytes: int | None,
    retention_group: str | None,
    keep_unfinished: bool | None,
    expires_idle_ms: int | None,
    message_bytes_max: int | None,
    as_json: bool,
) -> None:
    """Create a topic. Publishing does it too; this says how it is to be.

    Example:  onward topics create otp --lifetime 1h --message-bytes-max 4KiB
    """
    with connect(create=True) as mq:
        topic = mq.create_topic(
            name, lifetime_ms=lifetime_ms, expires_at=expires_at, rule=rule or "read-write",
            message_bytes_max=message_bytes_max or 0, retention_ms=retention_ms,
            retention_bytes=retention_bytes or 0, retention_group=retention_group or "",
            keep_unfinished=bool(keep_unfinished), exist_ok=exist_ok,
            expires_idle_ms=expires_idle_ms,
        )  # fmt: skip
    _print_topic(topic, as_json=as_json)


@command.command()
@click.argument("name")
@json_option
@client_options
def show(*, connect: Connect, name: str, as_json: bool) -> None:
    """Show one topic: its offsets, its rule, its limits, its readers.

    Example:  onward topics show orders
    """
    with connect() as mq:
        _print_topic(mq.topic(name), as_json=as_json)


@command.command()
@click.argument("name")
@_topic_options
@json_option
@client_options
def change(
    *,
    connect: Connect,
    name: str,
    lifetime_ms: int | None,
    expires_at: int | None,
    rule: Rule | None,
    retention_ms: int | None,
    retention_bytes: int | None,
    retention_group: str | None,
    keep_unfinished: bool | None,
    expires_idle_ms: int | None,
    message_bytes_max: int | None,
    as_json: bool,
) -> None:
    """Change what is given of a topic, and leave the rest.

    Example:  onward topics change orders --rule read-only
    """
    given = (lifetime_ms, expires_at, rule, retention_ms, retention_bytes, message_bytes_max)
    if all(value is None for value in (*given, retention_group, keep_unfinished, expires_idle_ms)):
        raise click.UsageError("nothing to change", click.get_current_context())
    with connect() as mq:
        topic = mq.change_topic(
            name, lifetime_ms=lifetime_ms, expires_at=expires_at, rule=rule,
            retention_ms=retention_ms, retention_bytes=retention_bytes,
            retention_group=retention_group, message_bytes_max=message_bytes_max,
            keep_unfinished=keep_unfinished, expires_idle_ms=expires_idle_ms,
        )  # fmt: skip
    _print_topic(topic, as_json=as_json)


@command.command()
@click.argument("name")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@json_option
@client_options
def delete(*, connect: Connect, name: str, yes: bool, as_json: bool) -> None:
    """Delete a topic with all its messages; its readers are told, its name is free again.

    Example:  onward topics delete otp --yes
    """
    with connect() as mq:
        topic = mq.topic(name)
        confirm(f"delete topic {name!r} with {topic.messages:,} messages?", yes=yes)
        mq.delete_topic(name)
    if as_json:
        print_json({"topic": name, "messages": topic.messages})
    else:
        print_line(f"deleted {name} with {topic.messages:,} messages")


def _print_topic(topic: onward.TopicDescription, *, as_json: bool) -> None:
    if as_json:
        print_json(topic)
        return
    rows = [{"name": name, "value": value} for name, value in _words(topic).items()]
    print_rows(rows, columns=["name", "value"])


def _row(topic: onward.TopicDescription) -> dict[str, object]:
    return {
        **msgspec.structs.asdict(topic),
        "first": topic.first_offset,
        "next": topic.next_offset,
        "expires": _moment(topic.expires_at_ms),
    }


def _words(topic: onward.TopicDescription) -> dict[str, str | None]:
    """Return what there is to know of a topic, as a person would write it."""
    return {
        "topic": topic.topic,
        "state": topic.state,
        "rule": topic.rule,
        "messages": f"{topic.messages:,}",
        "offsets": f"{topic.first_offset} to {topic.next_offset - 1}" if topic.messages else "none",
        "created": _moment(topic.created_at_ms),
        "expires": _moment(topic.expires_at_ms) or "never",
        "expires when idle for": format_duration(topic.expires_idle_ms)
        if topic.expires_idle_ms
        else "never",
        "retention": _duration(topic.retention_ms),
        "retention bytes": _size(topic.retention_bytes, "no limit"),
        "retention group": topic.retention_group or "none",
        "keep unfinished": "yes" if topic.keep_unfinished else "no",
        "carried over": f"{topic.carried:,}",
        "message bytes max": _size(topic.message_bytes_max, "as the settings say"),
        "readers": str(topic.readers),
    }


def _moment(instant_ms: int) -> str | None:
    return format_instant(instant_ms) if instant_ms else None


def _duration(duration_ms: int) -> str:
    return format_duration(duration_ms) if duration_ms else "as the settings say"


def _size(size_bytes: int, none: str) -> str:
    return format_size(size_bytes) if size_bytes else none
