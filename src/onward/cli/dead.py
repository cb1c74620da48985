"""`onward dead`: the dead letters of a group; list (also of all), deliver again, export, purge.

`redrive` and `purge` count first and ask; `--dry-run` only counts, `--yes` does not ask. Without
IDs, --topic and --text they mean all dead letters of the group.
"""

from __future__ import annotations

import logging
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import click
import msgspec

import onward
from onward.cli.group import Which, dry_run_option, yes_option
from onward.cli.options import json_option
from onward.cli.output import counted, print_json, print_line, print_rows, printable
from onward.cli.params import WHICH, Connect, client_options, confirm
from onward.cli.read import as_record
from onward.client.groups import DeadLetterDescription
from onward.durations import format_instant

_Command = TypeVar("_Command")

_COLUMNS = ["id", "died", "attempts", "member", "cause"]
_CAUSE_WIDTH = 100


@click.group()
def command() -> None:
    """List, redrive, export and purge the dead letters of a group.

    Example:  onward dead list billing
    """


def _choice(decorated: _Command) -> _Command:
    """Add what says which dead letters are meant."""
    for option in (
        click.option("--text", metavar="TEXT", help="Only those with this in cause or body."),
        click.option("--topic", metavar="TOPIC", help="Only those of this topic."),
    ):
        decorated = option(decorated)  # type: ignore[type-var]
    return decorated


@command.command("list")
@click.argument("group", required=False)
@_choice
@click.option("--bodies", is_flag=True, help="Show the bodies of the messages as well.")
@click.option(
    "--limit", type=click.IntRange(1), default=100, metavar="N",
    help="How many at most. [default: 100]",
)  # fmt: skip
@json_option
@client_options
def list_dead(
    *,
    connect: Connect,
    group: str | None,
    topic: str | None,
    text: str | None,
    bodies: bool,
    limit: int,
    as_json: bool,
) -> None:
    """List the dead letters of a group, or of all: what, when, after how many attempts, why.

    Example:  onward dead list billing --text "no such order"
    """
    with connect() as mq:
        groups = [mq.group(group)] if group else [one for one in mq.groups() if one.dead]
        letters: list[tuple[str, DeadLetterDescription]] = []
        for one in groups:
            page = islice(
                mq.dead_letters(one.group, topic=topic, text=text, messages=bodies),
                limit - len(letters),
            )
            letters += [(one.group, letter) for letter in page]
            # It ends before the client closes.
            del page
    count = sum(one.dead for one in groups)
    if as_json:
        for name, letter in letters:
            print_json(_record(letter, name))
        return
    columns = [*([] if group else ["group"]), *_COLUMNS, *(["body"] if bodies else [])]
    print_rows([_row(letter, name) for name, letter in letters], columns=columns)
    if len(letters) == limit < count:
        print_line(f"{len(letters):,} of {count:,}")


@command.command()
@click.argument("group")
@_choice
@client_options
def export(*, connect: Connect, group: str, topic: str | None, text: str | None) -> None:
    """Print dead letters with their messages, one line of JSON each.

    Example:  onward dead export billing > dead.jsonl
    """
    with connect() as mq:
        for letter in mq.dead_letters(group, topic=topic, text=text, messages=True):
            print_json(_record(letter, group))


@command.command()
@click.argument("group")
@click.argument("ids", nargs=-1, type=WHICH, metavar="[ID...]")
@_choice
@dry_run_option
@yes_option
@json_option
@client_options
def redrive(*, connect: Connect, **options: Any) -> None:
    """Deliver dead letters again, to this group only; their attempts begin from 1.

    Example:  onward dead redrive billing --text "no such order" --yes
    """
    _settle(connect, "redrive", "redriven", **options)


@command.command()
@click.argument("group")
@click.argument("ids", nargs=-1, type=WHICH, metavar="[ID...]")
@_choice
@dry_run_option
@yes_option
@json_option
@client_options
def purge(*, connect: Connect, **options: Any) -> None:
    """Forget dead letters; their messages stay in the topic.

    Example:  onward dead purge billing orders/7
    """
    _settle(connect, "purge", "purged", **options)


def _settle(
    connect: Connect, verb: str, done: str, *, group: str, ids: tuple[Which, ...],
    topic: str | None, text: str | None, dry_run: bool, yes: bool, as_json: bool,
) -> None:  # fmt: skip
    """Count, ask, and do it."""
    if ids and topic:
        raise click.UsageError(
            "IDs name their topic: --topic does not fit", click.get_current_context()
        )
    # What is gone is printed below, once.
    client_logger = logging.getLogger("onward.client")
    click.get_current_context().call_on_close(partial(client_logger.setLevel, client_logger.level))
    client_logger.setLevel(logging.ERROR)
    with connect() as mq:
        # A purge means them all, a redrive those whose message is still there.
        asked = _count(mq, "purge", group, ids, topic, text, dry_run=True)
        count = _count(mq, verb, group, ids, topic, text, dry_run=True)
        if not dry_run and count:
            confirm(f"{verb} {counted(count, 'dead letter')} of group {group!r}?", yes=yes)
            count = _count(mq, verb, group, ids, topic, text, dry_run=False)
        gone = asked - count
    if as_json:
        said_gone = {"gone": gone} if gone else {}
        print_json({"group": group, "count": count, **said_gone, "dry_run": dry_run})
    else:
        said = "would be " if dry_run else ""
        print_line(f"{counted(count, 'dead letter')} {said}{done}")
        if gone:
            print_line(
                f"{gone} cannot be redriven: the message is gone from the log "
                f"(`onward dead purge {group}` forgets it)"
            )


def _count(
    mq: onward.SyncClient, verb: str, group: str, ids: tuple[Which, ...], topic: str | None,
    text: str | None, *, dry_run: bool,
) -> int:  # fmt: skip
    settle = mq.redrive if verb == "redrive" else mq.purge
    if not ids:
        return settle(group, topic=topic, text=text, dry_run=dry_run)
    count = 0
    for name, offsets in ids:
        count += settle(group, topic=name, offsets=offsets, text=text, dry_run=dry_run)
    return count


def _record(letter: DeadLetterDescription, group: str) -> dict[str, object]:
    """Return a line of JSON; with its message `onward publish --json-lines` reads it too."""
    fields: dict[str, object] = msgspec.structs.asdict(letter)
    del fields["message"]
    place = {"id": letter.id, "topic": letter.topic, "offset": letter.offset}
    message = place if letter.message is None else as_record(letter.message)
    return message | {"group": group} | fields


def _row(letter: DeadLetterDescription, group: str) -> dict[str, object]:
    cause, message = letter.cause, letter.message
    return {
        "group": group, "body": "(not readable)" if message is None else printable(message.body),
        "id": letter.id, "died": format_instant(letter.died_at_ms), "attempts": letter.attempts,
        "member": letter.member,
        "cause": cause if len(cause) <= _CAUSE_WIDTH else f"{cause[: _CAUSE_WIDTH - 1]}…",
    }  # fmt: skip
