"""Notes on what a command created by the way: a misspelt name must not go unnoticed.

A topic or group that a command only uses is created if there is none. The command says so on
stderr when it is done, or refuses with `--no-create` before anything is created.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import click

import onward
from onward.errors import UnknownGroup, UnknownTopic

_Command = TypeVar("_Command", bound=Callable[..., object])


def no_create_option(decorated: _Command) -> _Command:
    """Add the option of a command that creates by the way what it needs."""
    return click.option("--no-create", is_flag=True, help="Fail if what it uses does not exist.")(
        decorated
    )


def missing_topics(mq: onward.SyncClient, names: Iterable[str]) -> list[str]:
    """Return the topics that do not exist; those of the system always do."""
    missing = []
    for name in names:
        try:
            if not name.startswith("@"):
                mq.topic(name)
        except UnknownTopic:
            missing.append(name)
    return missing


async def missing_topics_async(mq: onward.Client, names: Iterable[str]) -> list[str]:
    """Return the topics that do not exist; those of the system always do."""
    missing = []
    for name in names:
        try:
            if not name.startswith("@"):
                await mq.topic(name)
        except UnknownTopic:
            missing.append(name)
    return missing


def refuse_missing(topics: Iterable[str], groups: Iterable[str] = ()) -> None:
    """Raise the error for the first topic or group that does not exist."""
    for name in topics:
        raise UnknownTopic(f"topic {name!r} does not exist")
    for name in groups:
        raise UnknownGroup(f"group {name!r} does not exist")


def note_created(topics: Iterable[str], groups: Iterable[str] = ()) -> None:
    """Print on stderr what was created by the way."""
    for kind, names in (("topic", topics), ("group", groups)):
        for name in names:
            click.echo(f"created {kind} {name!r}", err=True)
