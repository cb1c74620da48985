"""The command that a refused member is told: it is exact, and the command line takes it."""

from __future__ import annotations

import shlex

import pytest

from onward.cli.group import change
from onward.cli.wishes import as_wish
from onward.client.groups import make_wish
from onward.delivery.change_command import change_command
from onward.delivery.filter import FilterWish
from onward.delivery.record import GroupRecord, GroupWish
from onward.delivery.retry import RetryPolicy, format_policy, parse_policy


@pytest.mark.parametrize(
    "text",
    [
        "ladder",
        "ladder:5",
        "none",
        "fixed:10s",
        "fixed:1m30s:5",
        "exponential:1s..1h:8",
        "1s,2s,3s",
    ],
)
def test_a_policy_is_written_as_it_was_read(text: str) -> None:
    assert format_policy(parse_policy(text)) == text


def test_a_policy_without_a_short_form_is_written_as_json() -> None:
    assert format_policy(RetryPolicy(kind="exponential", jitter=0.5)).startswith('{"kind":')


@pytest.mark.parametrize(
    ("wish", "options"),
    [
        (GroupWish(retry=parse_policy("1s,2s,3s,4s")), "--retry 1s,2s,3s,4s"),
        (GroupWish(mode="exclusive", lease_ms=90_000), "--mode exclusive --lease 1m30s"),
        (GroupWish(expires_idle_ms=90_000), "--expires-idle 1m30s"),
        (GroupWish(at_most_once=False, priorities=True), "--priorities"),
        (GroupWish(priorities=False, key_rate=0.5, key_concurrency=2),
         "--key-rate 0.5 --key-concurrency 2"),
        (GroupWish(filter=FilterWish(("eu", "us"), ("paid",), {"a": "b c"})),
         "--tag eu --tag us --all-tag paid --header 'a=b c'"),
        (GroupWish(tenants={"ann": 2.0}), "--tenant ann=2"),
    ],
)  # fmt: skip
def test_the_command_resolves_the_conflict(wish: GroupWish, options: str) -> None:
    record = GroupRecord("mailer", topics=("mails",))
    command = change_command(wish, record)
    assert command == f"onward group change mailer {options}"
    with change.make_context("change", shlex.split(command)[3:]) as ctx:
        given = {name: ctx.params[name] for name in ctx.params if name in WISHED}
        applied = make_wish(**as_wish(given)).changed(record)
    assert wish.differs(applied) == ""


WISHED = (
    "mode", "retry", "at_most_once", "lease_ms", "tags", "all_tags", "headers", "priorities",
    "tenants", "key_rate", "key_concurrency", "expires_idle_ms",
)  # fmt: skip


def test_what_the_command_line_cannot_say_is_a_call() -> None:
    record = GroupRecord("g", filter=FilterWish(("a",)).onto(GroupRecord("g").filter))
    assert change_command(GroupWish(filter=FilterWish(())), record) == (
        "Client.change_group('g', tags=())"
    )
    wish = GroupWish(retry=RetryPolicy(kind="fixed", factor=3))
    assert change_command(wish, record).startswith("Client.change_group('g', retry=RetryPolicy(")


def test_a_broadcast_cannot_become_anything_else() -> None:
    assert change_command(GroupWish(mode="broadcast"), GroupRecord("g")) == "onward group delete g"


def test_at_most_once_has_its_own_words() -> None:
    record = GroupRecord("g", retry=parse_policy("none"))
    assert change_command(GroupWish(at_most_once=True), record) == (
        "onward group change g --at-most-once"
    )
