"""`onward groups`: the groups of a broker, one line each. `onward group` is about one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import click

from onward.cli.options import json_option
from onward.cli.output import print_json, print_rows
from onward.cli.params import Connect, client_options
from onward.client.explanation import span
from onward.clock import SystemClock
from onward.protocol.operations.groups import GroupDescription, PositionDescription

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
            print_json(group)
        return
    now_ms = SystemClock().now_ms()
    rows = [as_row(group, now_ms=now_ms) for group in groups]
    print_rows(rows, columns=COLUMNS + retention_columns(rows))


def as_row(group: GroupDescription, *, now_ms: int) -> dict[str, object]:
    """Return a group as the row of a table for people.

    >>> as_row(GroupDescription(group="billing", paused=True), now_ms=0)["state"]
    'paused'
    """
    # A broadcast has no place in a topic of its own: its members have.
    named = [share.topic for share in group.topics] or {one.topic for one in group.positions}
    topics = ",".join(sorted(named))
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
        "expiring": group.expiring,
        "dropped": group.dropped,
    }


def retention_columns(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the columns about what retention takes: those in which a row has something.

    >>> retention_columns([{"expiring": 0, "dropped": 3}])
    ['dropped']
    """
    return [name for name in ("expiring", "dropped") if any(row[name] for row in rows)]


def position_row(one: PositionDescription, *, now_ms: int) -> dict[str, object]:
    """Return where a member of a broadcast is as the row of a table for people.

    >>> position_row(PositionDescription(member="north", topic="prices"), now_ms=0)["offset"]
    'unknown'
    """
    return {
        "member": one.member,
        "state": "connected" if one.connected else "away",
        "topic": one.topic,
        "offset": one.offset if one.is_known else "unknown",
        "end": one.end,
        "backlog": one.backlog,
        "oldest": age(one.oldest_at_ms, now_ms=now_ms),
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
