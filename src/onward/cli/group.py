"""`onward group`: one group; show, create, change, pause, resume, delete, move, look.

What is changed is durable when the command returns. Before what cannot be undone it counts what
would happen and asks; `--dry-run` only counts, `--yes` does not ask.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

import click
import msgspec

import onward
from onward.cli.created import missing_topics, no_create_option, note_created, refuse_missing
from onward.cli.groups import age, position_row, retention_columns, state_of
from onward.cli.options import json_option
from onward.cli.output import counted, print_json, print_line, print_rows
from onward.cli.params import START, WHICH, Connect, client_options, confirm
from onward.cli.read import as_line, as_record
from onward.cli.wishes import as_wish, wish_options
from onward.clock import SystemClock
from onward.delivery.retry import LADDER_MS, RetryPolicy
from onward.durations import format_duration, format_instant
from onward.errors import InvalidRequest
from onward.protocol.operations.groups import (
    GroupCounts,
    GroupDescription,
    MemberDescription,
    ShareDescription,
)

Which = tuple[str, range]

_TOPICS = ["topic", "cursor", "end", "backlog", "oldest", "ready", "waiting", "leased", "dead"]
_MEMBERS = [
    "member", "function", "state", "client", "host", "pid", "leased", "credit", "acked", "retried",
    "expired", "rate",
]  # fmt: skip
_POSITIONS = ["member", "state", "topic", "offset", "end", "backlog", "oldest"]
_UNKNOWN = "unknown: only the member knows; it keeps its position in a file, or has no name"

_STEPS_SHOWN = 20

yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask.")
dry_run_option = click.option("--dry-run", is_flag=True, help="Only count what would happen.")


@click.group()
def command() -> None:
    """Show, create, change, pause, move and delete one group.

    Example:  onward group show billing
    """


# --- what it is ---------------------------------------------------------------------------------


@command.command()
@click.argument("group")
@json_option
@client_options
def show(*, connect: Connect, group: str, as_json: bool) -> None:
    """Show one group: its settings, how far it is with each topic, and its members.

    Of a broadcast: how far each member is, the one that is farthest behind first.

    Example:  onward group show billing
    """
    with connect() as mq:
        found = mq.group(group)
        counts = None if found.mode == "broadcast" else mq.group_counts(group)
        _print_group(found, counts=counts, as_json=as_json)


@command.command()
@click.argument("group")
@click.argument("topics", nargs=-1, required=True, metavar="TOPIC...")
@click.option(
    "--start", type=START, metavar="START",
    help="earliest, latest, an offset, 10m (ago) or 2026-11-16T10:00Z. [default: earliest]",
)  # fmt: skip
@wish_options
@no_create_option
@json_option
@client_options
def create(
    *,
    connect: Connect,
    group: str,
    topics: tuple[str, ...],
    start: str | int | datetime | None,
    no_create: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Create a group. Consuming does it too; this says how it is to be.

    Example:  onward group create billing orders --mode ordered --retry fixed:10s:5
    """
    wish = as_wish(given)
    with connect(create=not no_create) as mq:
        missing = missing_topics(mq, topics)
        if no_create:
            refuse_missing(missing)
        created = mq.create_group(group, topics, start=start, **wish)
    note_created(missing)
    _print_group(created, as_json=as_json)


@command.command()
@click.argument("group")
@wish_options
@click.option(
    "--add-topic", "topics", multiple=True, metavar="TOPIC", help="Consume this topic as well."
)
@click.option(
    "--remove-topic", "removed", multiple=True, metavar="TOPIC",
    help="Consume this topic no more, and forget the group's position, retries and dead letters.",
)  # fmt: skip
@json_option
@client_options
def change(
    *, connect: Connect, group: str, topics: tuple[str, ...], removed: tuple[str, ...],
    as_json: bool, **given: Any,
) -> None:  # fmt: skip
    """Change what is given of a group, and leave the rest.

    Example:  onward group change billing --lease 2m --retry 10s,1m,5m
    """
    wish = as_wish(given)
    if not topics and not removed and all(value is None for value in wish.values()):
        raise click.UsageError("nothing to change", click.get_current_context())
    with connect() as mq:
        changed = mq.change_group(group, add_topics=topics, remove_topics=removed, **wish)
        _print_group(changed, as_json=as_json)


@command.command()
@click.argument("group")
@yes_option
@json_option
@client_options
def delete(*, connect: Connect, group: str, yes: bool, as_json: bool) -> None:
    """Delete a group: its members are told, its position and its dead letters are gone.

    Example:  onward group delete trial --yes
    """
    with connect() as mq:
        found = mq.group(group)
        words = f"{counted(found.member_count, 'member')}, {counted(found.dead, 'dead letter')}"
        confirm(f"delete group {group!r} with {words}?", yes=yes)
        mq.delete_group(group)
    if as_json:
        print_json({"group": group, "members": found.member_count, "dead": found.dead})
    else:
        print_line(f"deleted {group} with {words}")


# --- stop and go --------------------------------------------------------------------------------


@command.command()
@click.argument("group")
@json_option
@client_options
def pause(*, connect: Connect, group: str, as_json: bool) -> None:
    """Deliver nothing more to a group, until it is resumed.

    Example:  onward group pause billing
    """
    with connect() as mq:
        mq.pause_group(group)
    _tell(f"paused {group}", {"group": group, "paused": True}, as_json=as_json)


@command.command()
@click.argument("group")
@json_option
@client_options
def resume(*, connect: Connect, group: str, as_json: bool) -> None:
    """Deliver again to a group that was paused.

    Example:  onward group resume billing
    """
    with connect() as mq:
        mq.resume_group(group)
    _tell(f"resumed {group}", {"group": group, "paused": False}, as_json=as_json)


@command.command()
@click.argument("group")
@click.argument("member")
@click.option("--offline/--online", required=True, help="Take it out, or let it in again.")
@click.option("--force", is_flag=True, help="Also a name that no member has: before it joins.")
@json_option
@client_options
def member(
    *, connect: Connect, group: str, member: str, offline: bool, force: bool, as_json: bool
) -> None:
    """Take one member out of a group, or let it in again.

    Example:  onward group member billing ann --offline
    """
    with connect() as mq:
        if not force:
            _check_member(mq.group(group), member)
        mq.set_member(group, member, offline=offline)
    record = {"group": group, "member": member, "offline": offline}
    _tell(f"{member} of {group} is {'off' if offline else 'on'}line", record, as_json=as_json)


# --- moving around ------------------------------------------------------------------------------


@command.command()
@click.argument("group")
@click.option(
    "--to", type=START, required=True, metavar="START",
    help="earliest, latest, an offset, 10m (ago) or 2026-11-16T10:00Z.",
)  # fmt: skip
@click.option("--topic", metavar="TOPIC", help="Only this topic; all of them otherwise.")
@dry_run_option
@yes_option
@json_option
@client_options
def reset(
    *,
    connect: Connect,
    group: str,
    to: str | int | datetime,
    topic: str | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Begin again somewhere else: everything from there on is delivered, what is before is not.

    Example:  onward group reset billing --to 2h --topic orders
    """
    with connect() as mq:
        count = mq.reset_group(group, to=to, topic=topic, dry_run=True)
        if not dry_run:
            words = counted(count, "message")
            confirm(f"reset group {group!r}, which leaves {words} to deliver?", yes=yes)
            count = mq.reset_group(group, to=to, topic=topic)
    said = "would be" if dry_run else "will be"
    _tell(f"{counted(count, 'message')} {said} delivered to {group}",
          {"group": group, "count": count, "dry_run": dry_run}, as_json=as_json)  # fmt: skip


@command.command()
@click.argument("group")
@click.argument("ids", nargs=-1, required=True, type=WHICH, metavar="ID...")
@dry_run_option
@json_option
@client_options
def skip(
    *, connect: Connect, group: str, ids: tuple[Which, ...], dry_run: bool, as_json: bool
) -> None:
    """Count messages as finished without delivering them: topic/7, or topic/7-12 for several.

    Example:  onward group skip billing orders/7 orders/9-12
    """
    with connect() as mq:
        count = 0
        for topic, offsets in ids:
            count += mq.skip(group, topic, offsets, dry_run=dry_run)
    said = "would skip" if dry_run else "skipped"
    _tell(f"{said} {counted(count, 'message')}",
          {"group": group, "count": count, "dry_run": dry_run}, as_json=as_json)  # fmt: skip


@command.command()
@click.argument("group")
@click.option("--topic", metavar="TOPIC", help="Only this topic; all of them otherwise.")
@click.option("--scheduled", is_flag=True, help="Cancel the scheduled messages of them as well.")
@dry_run_option
@yes_option
@json_option
@client_options
def purge(
    *,
    connect: Connect,
    group: str,
    topic: str | None,
    scheduled: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Finish all that is ready without delivering it; what is leased or retrying stays.

    Example:  onward group purge billing --topic orders --scheduled
    """
    with connect() as mq:
        count = mq.purge_ready(group, topic, scheduled=scheduled, dry_run=True)
        if not dry_run:
            what = "ready and scheduled" if scheduled else "ready"
            words = counted(count, "message")
            confirm(f"purge {words} of group {group!r}, all that is {what}?", yes=yes)
            count = mq.purge_ready(group, topic, scheduled=scheduled)
    said = "would purge" if dry_run else "purged"
    _tell(f"{said} {counted(count, 'message')}",
          {"group": group, "count": count, "dry_run": dry_run}, as_json=as_json)  # fmt: skip


@command.command()
@click.argument("group")
@click.argument("ids", nargs=-1, type=WHICH, metavar="[ID...]")
@click.option("--topic", metavar="TOPIC", help="With --from: which topic.")
@click.option("--from", "start", type=START, metavar="TIME", help="2h (ago) or 2026-11-16T10:00Z.")
@click.option("--until", "end", type=START, metavar="TIME", help="The end of it. [default: now]")
@dry_run_option
@json_option
@client_options
def replay(
    *,
    connect: Connect,
    group: str,
    ids: tuple[Which, ...],
    topic: str | None,
    start: str | int | datetime | None,
    end: str | int | datetime | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Deliver finished messages once more to this group: by id, or what was published in a window.

    Example:  onward group replay billing --topic orders --from 2h --until 1h
    """
    if bool(ids) == bool(start) or bool(topic) != bool(start) or (end and not start):
        raise click.UsageError(
            "say which: IDs, or --topic with --from and --until", click.get_current_context()
        )
    with connect() as mq:
        if topic:
            count = mq.replay(group, topic, start=start, end=end, dry_run=dry_run)
        else:
            count = 0
            for name, offsets in ids:
                count += mq.replay(group, name, offsets, dry_run=dry_run)
    said = "would be delivered" if dry_run else "will be delivered"
    _tell(f"{counted(count, 'message')} {said} again to {group}",
          {"group": group, "count": count, "dry_run": dry_run}, as_json=as_json)  # fmt: skip


@command.command()
@click.argument("group")
@click.argument("to")
@json_option
@client_options
def fork(*, connect: Connect, group: str, to: str, as_json: bool) -> None:
    """Make a copy of a group that is where it is now, for a trial.

    Example:  onward group fork billing trial
    """
    with connect() as mq:
        _print_group(mq.fork_group(group, to), as_json=as_json)


@command.command()
@click.argument("group")
@click.argument("topic")
@click.option(
    "--count", type=click.IntRange(1, 10_000), default=10, metavar="N",
    help="How many at most. [default: 10]",
)  # fmt: skip
@json_option
@client_options
def peek(*, connect: Connect, group: str, topic: str, count: int, as_json: bool) -> None:
    """Show the messages that would be delivered next, without delivering them.

    Example:  onward group peek billing orders --count 3
    """
    with connect() as mq:
        for message in mq.peek(group, topic, n=count):
            print_message(message, as_json=as_json)


def _check_member(group: GroupDescription, name: str) -> None:
    """Raise if no member has this name: none that is there, is away or was taken out."""
    known = {*group.offline, *(one.member for one in group.members)}
    known.update(one.member for one in group.positions)
    # Of very many members not all are described.
    if name not in known and group.member_count <= len(group.members):
        raise InvalidRequest(
            f"group {group.group!r} has no member {name!r} (--force: the name is meant, "
            "whoever joins with it)"
        )


# --- printing -----------------------------------------------------------------------------------


def print_message(message: onward.Message, *, as_json: bool) -> None:
    """Print a message as `onward read` does."""
    if as_json:
        print_json(as_record(message))
    else:
        print_line(as_line(message))


def _tell(text: str, record: dict[str, object], *, as_json: bool) -> None:
    if as_json:
        print_json(record)
    else:
        print_line(text)


def _print_group(
    group: GroupDescription, *, as_json: bool, counts: GroupCounts | None = None
) -> None:
    if as_json:
        record: dict[str, object] = msgspec.to_builtins(group)
        print_json(record if counts is None else record | {"counts": counts})
        return
    now_ms = SystemClock().now_ms()
    words = _words(group) | ({} if counts is None else _count_words(counts))
    rows = [{"name": name, "value": value} for name, value in words.items()]
    print_rows(rows, columns=["name", "value"])
    if group.topics:
        print_line("")
        shares = [_share_row(one, now_ms=now_ms) for one in group.topics]
        print_rows(shares, columns=_TOPICS + retention_columns(shares))
        for text in _retention_lines(group):
            print_line(text)
    if group.members:
        print_line("")
        print_rows(map(_member_row, group.members), columns=_MEMBERS)
    if group.positions:
        print_line("")
        positions = [position_row(one, now_ms=now_ms) for one in group.positions]
        print_rows(positions, columns=_POSITIONS)
        if not all(one.is_known for one in group.positions):
            print_line(_UNKNOWN)


def _words(group: GroupDescription) -> dict[str, str]:
    """Return the settings of a group, as a person would write them; defaults are left out."""
    words = {
        "group": group.group,
        "mode": group.mode,
        "state": state_of(group),
        "created": format_instant(group.created_at_ms),
        "lease": format_duration(group.lease_ms),
        "retry": _retry(group.retry),
        "backlog": f"{group.backlog:,}",
        "dead letters": f"{group.dead:,}",
        "leases that ran out": f"{group.expired_leases:,}",
    }
    optional = {
        "at most once": "yes" if group.at_most_once else "",
        "tags, any of": ", ".join(group.filter.tags_any),
        "tags, all of": ", ".join(group.filter.tags_all),
        "headers": ", ".join(f"{name}={text}" for name, text in group.filter.headers.items()),
        "priorities": "yes" if group.priorities else "",
        "tenants": _tenants(group.tenants),
        "rate per key": f"{group.key_rate:g} per second" if group.key_rate else "",
        "at a time per key": str(group.key_concurrency or ""),
        "expires when idle for": format_duration(group.expires_idle_ms or 0)
        if group.expires_idle_ms
        else "",
        "members offline": ", ".join(group.offline),
    }
    return words | {name: text for name, text in optional.items() if text}


def _count_words(counts: GroupCounts) -> dict[str, str]:
    names = ("ready", "leased", "retrying", "scheduled")
    words = {name: f"{getattr(counts, name):,}" for name in names}
    if not counts.is_exact:
        words["scheduled"] += " (about)"
    return words


def _retry(policy: RetryPolicy) -> str:
    words: str = policy.kind
    if policy.kind == "ladder" and policy.steps_ms != LADDER_MS:
        words = "own steps " + " ".join(map(format_duration, policy.steps_ms[:_STEPS_SHOWN]))
        words += " ..." if len(policy.steps_ms) > _STEPS_SHOWN else ""
    elif policy.kind == "fixed":
        words = f"fixed, {format_duration(policy.delay_ms)} between attempts"
    elif policy.kind == "exponential":
        first, last = format_duration(policy.delay_ms), format_duration(policy.delay_ms_max)
        words = f"exponential, {first} to {last} between attempts"
    return f"{words}, {counted(policy.limit, 'attempt')} at most"


def _tenants(weights: dict[str, float] | None) -> str:
    if weights is None:
        return ""
    named = ", ".join(f"{name}={weight:g}" for name, weight in weights.items())
    return named or "all alike"


def _share_row(share: ShareDescription, *, now_ms: int) -> dict[str, object]:
    return {
        "topic": share.topic, "cursor": share.cursor, "end": share.end, "backlog": share.backlog,
        "oldest": age(share.oldest_at_ms, now_ms=now_ms), "ready": share.ready,
        "waiting": share.waiting, "leased": share.leased, "dead": share.dead,
        "expiring": share.expiring, "dropped": share.dropped,
    }  # fmt: skip


def _retention_lines(group: GroupDescription) -> Iterator[str]:
    """Yield a sentence for each topic of which retention may drop something undelivered."""
    for share in group.topics:
        if share.expiring:
            at = f"from {format_instant(share.expires_at_ms)} on" if share.expires_at_ms else "soon"
            yield (
                f"retention may drop {counted(share.expiring, 'message')} of {share.topic} {at}, "
                "before they were delivered: raise the retention or set keep_unfinished"
            )


def _member_row(one: MemberDescription) -> dict[str, object]:
    return {
        "member": one.member, "function": one.function, "state": one.state, "client": one.client,
        "host": one.host, "pid": str(one.pid or ""),
        "leased": one.leased, "credit": one.credit, "acked": one.acked, "retried": one.retried,
        "expired": one.expired, "rate": one.rate,
    }  # fmt: skip
