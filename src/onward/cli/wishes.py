"""Options that say how a group is to be; `consume`, `group create` and `group change` share them.

`wish_options` adds them to a command, `as_wish` turns what was given into the arguments of the
client's calls. What is not given is None: the group keeps it, or a new one gets the default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypedDict, TypeVar

import click

from onward.cli.params import DURATION, PAIR
from onward.delivery.record import Mode
from onward.delivery.retry import RetryPolicy, parse_policy
from onward.errors import InvalidRequest

_Command = TypeVar("_Command", bound=Callable[..., object])

MODES = click.Choice(["shared", "exclusive", "ordered", "broadcast"])


class Wish(TypedDict):
    """The arguments of `consume`, `create_group` and `change_group` that say how a group is."""

    mode: Mode | None
    retry: RetryPolicy | None
    at_most_once: bool | None
    lease_ms: int | None
    tags: Sequence[str] | None
    all_tags: Sequence[str] | None
    headers: dict[str, str] | None
    priorities: bool | None
    tenants: dict[str, float] | None
    key_rate: float | None
    key_concurrency: int | None
    expires_idle_ms: int | None


def wish_options(decorated: _Command) -> _Command:
    """Add what can be set of a group."""
    options = [
        click.option("--mode", type=MODES, help="How its members share the messages."),
        click.option(
            "--retry", metavar="POLICY",
            help="ladder, none, fixed:10s, fixed:10s:5 (attempts), exponential:1s..1h or "
            "10s,1m,5m.",
        ),
        click.option(
            "--at-most-once/--at-least-once", default=None,
            help="Finished when it is handed out, instead of when it is acked.",
        ),
        click.option(
            "--lease", "lease_ms", type=DURATION, metavar="DURATION",
            help="How long a member may hold a message without a word.",
        ),
        click.option("--tag", "tags", multiple=True, metavar="TEXT",
                     help="Only messages with this tag, or another one given."),
        click.option("--all-tag", "all_tags", multiple=True, metavar="TEXT",
                     help="Only messages with this tag, and all others given so."),
        click.option("--header", "headers", type=PAIR, multiple=True, metavar="NAME=VALUE",
                     help="Only messages with this header; may be given often."),
        click.option("--priorities/--no-priorities", default=None,
                     help="Deliver messages of high priority first."),
        click.option("--tenant", "tenants", type=PAIR, multiple=True, metavar="NAME=WEIGHT",
                     help="Share fairly between tenants; this one has this weight."),
        click.option("--key-rate", type=click.FloatRange(0), metavar="N",
                     help="Deliveries of one key per second; 0 for no limit."),
        click.option("--key-concurrency", type=click.IntRange(0), metavar="N",
                     help="Deliveries of one key at a time; 0 for no limit."),
        click.option("--expires-idle", "expires_idle_ms", type=DURATION, metavar="DURATION",
                     help="Delete it when it had no member for so long; 0 for never."),
    ]  # fmt: skip
    for option in reversed(options):
        decorated = option(decorated)
    return decorated


def as_wish(given: dict[str, Any]) -> Wish:
    """Return what `wish_options` were given, as the client's calls take it."""
    try:
        retry = None if given["retry"] is None else parse_policy(given["retry"]).check()
    except InvalidRequest as error:
        raise click.UsageError(f"--retry: {error}", click.get_current_context()) from None
    return Wish(
        mode=given["mode"], retry=retry, at_most_once=given["at_most_once"],
        lease_ms=given["lease_ms"], tags=given["tags"] or None, all_tags=given["all_tags"] or None,
        headers=dict(given["headers"]) or None, priorities=given["priorities"],
        tenants={name: _weight(text) for name, text in given["tenants"]} or None,
        key_rate=given["key_rate"], key_concurrency=given["key_concurrency"],
        expires_idle_ms=given["expires_idle_ms"],
    )  # fmt: skip


def _weight(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise click.UsageError(
            f"--tenant: {text!r} is no weight", click.get_current_context()
        ) from None
