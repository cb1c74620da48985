"""`onward groups`: the groups of a broker, one line each. `onward group` is about one of them."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from onward.cli.options import json_option
from onward.cli.output import print_json, print_rows
from onward.cli.params import Connect, client_options
from onward.client.explanation import span
from onward.client.groups import GroupDescription
from onward.clock import SystemClock

COLUMNS = [
    "group", "mode", "state", "topics", "members", "backlog", "oldest", "leased", "waiting", "dead",
]  # fmt: skip


@click.command()
@click.option("--topic", metavar="TOPIC", help="Only groups that consume this topic.")
@json_option
@client_options
def command(*, connect: Connect, topic: str | None, as_json: bool) -> None:
    """List the groups: how far they are, who is there, what waits and what is dead.

    Example:  onward groups --topic orders
    """
    with connect() as mq:
        groups = mq.groups(topic=topic)
    if as_json:
        for group in groups:
            print_json(as_record(group))
        return
    now_ms = SystemClock().now_ms()
    print_rows([as_row(group, now_ms=now_ms) for group in groups], columns=COLUMNS)


def as_record(group: GroupDescription) -> dict[str, Any]:
    """Return a group as what its line of JSON says.

    >>> as_record(GroupDescription(group="billing"))["mode"]
    'shared'
    """
    record: dict[str, Any] = msgspec.to_builtins(group)
    return record


def as_row(group: GroupDescription, *, now_ms: int) -> dict[str, object]:
    """Return a group as the row of a table for people.

    >>> as_row(GroupDescription(group="billing", paused=True), now_ms=0)["state"]
    'paused'
    """
    topics = ",".join(share.topic for share in group.topics)
    return {
        "group": group.group,
        "mode": group.mode,
        "state": state_of(group),
        "topics": topics if len(topics) <= 40 else f"{topics[:39]}…",
        "members": group.member_count,
        "backlog": group.backlog,
        "oldest": age(group.oldest_at_ms, now_ms=now_ms),
        "leased": sum(share.leased for share in group.topics),
        "waiting": sum(share.waiting for share in group.topics),
        "dead": group.dead,
    }


def state_of(group: GroupDescription) -> str:
    """Return the one word for what a group does: paused, active (it has members) or idle.

    >>> state_of(GroupDescription(group="billing", member_count=2))
    'active'
    """
    if group.paused:
        return "paused"
    return "active" if group.member_count else "idle"


def age(at_ms: int, *, now_ms: int) -> str | None:
    """Return how long ago something was; None for never.

    >>> age(1_000, now_ms=10_000)
    '9 s'
    """
    return span(max(0, now_ms - at_ms)) if at_ms else None
