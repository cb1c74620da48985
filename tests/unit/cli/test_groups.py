"""`onward groups` and `onward group` against a real broker."""

import json
import subprocess
from collections.abc import Callable
from itertools import takewhile
from typing import Any

import pytest

from onward import connect_sync

Onward = Callable[..., subprocess.CompletedProcess[bytes]]


def records(done: subprocess.CompletedProcess[bytes]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def record(done: subprocess.CompletedProcess[bytes]) -> dict[str, Any]:
    (found,) = records(done)
    return found


def text(done: subprocess.CompletedProcess[bytes]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


def test_a_group_is_created_as_it_was_asked_for(onward: Onward):
    onward("publish", "made", "0", "1", "2")
    group = record(
        onward(
            "group", "create", "made-by", "made", "--mode", "ordered", "--start", "1", "--retry",
            "fixed:10s:5", "--lease", "2m", "--tag", "a", "--tag", "b", "--all-tag", "c",
            "--header", "x=y=z", "--priorities", "--tenant", "acme=2.5", "--key-rate", "3",
            "--key-concurrency", "1", "--json",
        )
    )  # fmt: skip
    assert (group["mode"], group["backlog"], group["lease_ms"]) == ("ordered", 2, 120_000)
    assert group["filter"] == {"tags_any": ["a", "b"], "tags_all": ["c"], "headers": {"x": "y=z"}}
    assert (group["tenants"], group["key_rate"], group["priorities"]) == ({"acme": 2.5}, 3, True)
    shown = record(onward("group", "show", "made-by", "--json"))
    assert shown.pop("counts")["ready"] == 2
    assert shown == group


def test_groups_are_listed_for_people_and_for_machines(onward: Onward):
    onward("publish", "listed", "0", "1")
    onward("group", "create", "list-b", "listed")
    onward("group", "create", "list-a", "listed", "--start", "latest")
    heading, first, second = text(onward("groups", "--topic", "listed")).splitlines()
    assert heading.split()[:3] == ["GROUP", "MODE", "STATE"]
    assert first.split()[:6] == ["list-a", "shared", "idle", "listed", "0", "0"]
    assert second.split()[:6] == ["list-b", "shared", "idle", "listed", "0", "2"]
    listed = records(onward("groups", "--topic", "listed", "--json"))
    assert [one["backlog"] for one in listed] == [0, 2]


def test_a_group_can_be_shown_to_people(onward: Onward):
    onward("publish", "shown", "0", "1")
    onward("group", "create", "shown-to", "shown", "--tenant", "acme=2", "--at-most-once")
    shown = text(onward("group", "show", "shown-to"))
    assert "none, 1 attempt at most" in shown
    assert "idle" in shown
    assert "acme=2" in shown
    assert shown.splitlines()[-1].split()[:4] == ["shown", "0", "2", "2"]


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("ladder", "ladder, 17 attempts at most"),
        ("10s,1m,5m", "own steps 10s 1m 5m, 4 attempts at most"),
        ("fixed:10s:5", "fixed, 10s between attempts, 5 attempts at most"),
        ("exponential:1s..1h:8", "exponential, 1s to 1h between attempts, 8 attempts at most"),
    ],
)
def test_people_are_told_how_a_group_tries_again(onward: Onward, policy: str, words: str):
    onward("publish", "tried", "0")
    group = f"trying-{policy[:3]}"
    shown = text(onward("group", "create", group, "tried", "--retry", policy))
    (line,) = [line for line in shown.splitlines() if line.startswith("retry ")]
    assert line.split(maxsplit=1)[1] == words


def rows_below(shown: str, *heading: str) -> list[list[str]]:
    """Return the rows of the table with this heading, and what stands below it."""
    lines = iter(shown.splitlines())
    while tuple(next(lines).split()) != heading:
        pass
    return [line.split() for line in takewhile(bool, lines)]


POSITIONS = ("MEMBER", "STATE", "TOPIC", "OFFSET", "END", "BACKLOG", "OLDEST")


def test_an_operator_sees_where_the_members_of_a_broadcast_are(onward: Onward, address: str):
    onward("publish", "aired", "0", "1", "2")
    joining = ("--group", "screens", "--mode", "broadcast", "--start", "earliest")
    onward("consume", "aired", *joining, "--member", "north", "--count", "1")
    with connect_sync(address) as mq, mq.consume("aired", group="screens"):
        shown = text(onward("group", "show", "screens"))
        (north, unknown, note) = rows_below(shown, *POSITIONS)
        assert north[:6] == ["north", "away", "aired", "1", "3", "2"]
        assert unknown[1:] == ["connected", "aired", "unknown", "3", "-", "-"]
        assert " ".join(note).startswith("unknown: only the member knows")
        (row,) = text(onward("groups", "--topic", "aired")).splitlines()[1:]
        assert row.split()[:6] == ["screens", "broadcast", "active", "aired", "1", "2"]
        (listed,) = records(onward("groups", "--topic", "aired", "--json"))
        assert [(one["member"], one["offset"]) for one in listed["positions"]] == [
            ("north", 1), (unknown[0], None),
        ]  # fmt: skip
    (north,) = rows_below(text(onward("group", "show", "screens")), *POSITIONS)
    assert north[:2] == ["north", "away"]


def test_a_change_leaves_the_rest(onward: Onward):
    onward("publish", "changed", "0")
    onward("group", "create", "changing", "changed", "--lease", "2m")
    group = record(onward("group", "change", "changing", "--retry", "10s,1m", "--json"))
    assert group["lease_ms"] == 120_000
    onward("group", "change", "changing", "--header", "lang=en")
    group = record(onward("group", "change", "changing", "--tag", "sport", "--json"))
    assert group["filter"] == {"tags_any": ["sport"], "headers": {"lang": "en"}}
    assert onward("group", "change", "changing").returncode == 2


def test_a_limit_that_is_no_number_is_refused(onward: Onward):
    onward("publish", "limited", "0")
    onward("group", "create", "limiting", "limited")
    result = onward("group", "change", "limiting", "--key-rate", "nan")
    assert result.returncode == 1
    assert b"--key-rate is 0 to 1e+09, not nan" in result.stderr


def test_a_group_is_paused_and_resumed(onward: Onward):
    onward("publish", "stopped", "0")
    onward("group", "create", "stopping", "stopped")
    assert text(onward("group", "pause", "stopping")) == "paused stopping\n"
    assert record(onward("group", "show", "stopping", "--json"))["paused"] is True
    assert record(onward("group", "resume", "stopping", "--json"))["paused"] is False


def test_a_group_can_expire_when_it_is_idle(onward: Onward):
    onward("publish", "controlled", "0")
    made = record(onward("group", "create", "ctl", "controlled", "--expires-idle", "1h", "--json"))
    assert made["expires_idle_ms"] == 3_600_000
    assert "expires when idle for  1h" in text(onward("group", "show", "ctl"))
    changed = onward("group", "change", "ctl", "--expires-idle", "0", "--json")
    assert record(changed)["expires_idle_ms"] == 0


def test_a_topic_that_a_group_is_created_with_is_said_or_refused(onward: Onward):
    refused = onward("group", "create", "careful", "misspelt", "--no-create")
    assert refused.returncode != 0
    assert b"topic 'misspelt' does not exist" in refused.stderr
    assert onward("topics", "show", "misspelt").returncode != 0
    assert onward("group", "show", "careful").returncode != 0
    assert onward("group", "create", "careless", "misspelt").stderr == b"created topic 'misspelt'\n"
    again = onward("group", "create", "careful", "misspelt", "--no-create")
    assert (again.returncode, again.stderr) == (0, b"")


def test_a_member_is_taken_out_and_let_in_again(onward: Onward):
    onward("publish", "membered", "0")
    onward("group", "create", "members", "membered")
    unknown = onward("group", "member", "members", "ann", "--offline")
    assert unknown.returncode != 0
    assert b"group 'members' has no member 'ann'" in unknown.stderr
    onward("group", "member", "members", "ann", "--offline", "--force")
    assert record(onward("group", "show", "members", "--json"))["offline"] == ["ann"]
    assert text(onward("group", "member", "members", "ann", "--online")).endswith("online\n")
    assert onward("group", "member", "members", "ann").returncode == 2


def test_a_reset_counts_first_and_does_nothing_without_a_yes(onward: Onward):
    onward("publish", "again", "0", "1", "2")
    onward("group", "create", "resetting", "again", "--start", "latest")
    counted = record(onward("group", "reset", "resetting", "--to", "1", "--dry-run", "--json"))
    assert counted == {"group": "resetting", "count": 2, "dry_run": True}
    refused = onward("group", "reset", "resetting", "--to", "earliest")
    assert refused.returncode == 2
    assert b"3 messages to deliver?" in refused.stderr
    done = onward("group", "reset", "resetting", "--to", "1", "--topic", "again", "--yes")
    assert text(done) == "2 messages will be delivered to resetting\n"


def test_a_group_is_shown_with_what_is_ready_and_scheduled(onward: Onward):
    onward("publish", "awaited", "a", "b")
    onward("publish", "awaited", "later", "--delay", "1h")
    onward("group", "create", "waiters", "awaited")
    shown = text(onward("group", "show", "waiters"))
    rows = dict(line.split(maxsplit=1) for line in shown.splitlines() if len(line.split()) == 2)
    assert (rows["ready"], rows["leased"], rows["retrying"], rows["scheduled"]) == tuple("2001")
    counts = record(onward("group", "show", "waiters", "--json"))["counts"]
    assert (counts["scheduled"], counts["is_exact"]) == (1, True)


def test_what_is_ready_and_scheduled_is_purged_after_a_question(onward: Onward):
    onward("publish", "flooded", "a", "b", "c")
    onward("publish", "flooded", "later", "--delay", "1h")
    onward("group", "create", "sink", "flooded")
    purge = ("group", "purge", "sink", "--topic", "flooded")
    assert text(onward(*purge, "--dry-run")) == "would purge 3 messages\n"
    refused = onward(*purge)
    assert refused.returncode == 2
    assert b"purge 3 messages of group 'sink'" in refused.stderr
    assert text(onward(*purge, "--yes")) == "purged 3 messages\n"
    assert text(onward(*purge, "--scheduled", "--yes")) == "purged 1 message\n"
    assert text(onward("schedule", "list", "--topic", "flooded", "--json")) == ""


def test_messages_are_skipped_and_replayed_by_their_ids(onward: Onward):
    onward("publish", "moved", *map(str, range(10)))
    onward("group", "create", "moving", "moved")
    skip = ("group", "skip", "moving", "moved/0-3", "moved/7")
    assert text(onward(*skip, "--dry-run")) == "would skip 5 messages\n"
    assert text(onward(*skip)) == "skipped 5 messages\n"
    assert record(onward("group", "replay", "moving", "moved/1-2", "--json"))["count"] == 2
    by_time = ("--topic", "moved", "--from", "1h", "--dry-run", "--json")
    assert record(onward("group", "replay", "moving", *by_time))["count"] == 3
    assert record(onward("group", "show", "moving", "--json"))["backlog"] == 7


def test_a_peek_shows_what_comes_next(onward: Onward):
    onward("publish", "peeked", "zero", "\x1b[31mone", "two")
    onward("group", "create", "peeking", "peeked")
    onward("group", "skip", "peeking", "peeked/0")
    shown = text(onward("group", "peek", "peeking", "peeked", "--count", "1"))
    assert shown.endswith("\\x1b[31mone\n")
    assert [one["body"] for one in records(onward("group", "peek", "peeking", "peeked", "--json"))][
        1:
    ] == ["two"]


def test_a_fork_stands_where_its_source_stands(onward: Onward):
    onward("publish", "forked", "0", "1", "2")
    onward("group", "create", "forking", "forked", "--start", "2")
    assert record(onward("group", "fork", "forking", "trial", "--json"))["backlog"] == 1


def test_nothing_is_deleted_without_a_yes(onward: Onward):
    onward("publish", "kept", "0")
    onward("group", "create", "keeping", "kept")
    assert onward("group", "delete", "keeping").returncode == 2
    done = onward("group", "delete", "keeping", "--yes")
    assert text(done) == "deleted keeping with 0 members, 0 dead letters\n"
    gone = onward("group", "show", "keeping")
    assert gone.returncode == 1
    assert b"(unknown_group)" in gone.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("group", "create", "g"),
        ("group", "create", "g", "t", "--retry", "sometimes"),
        ("group", "create", "g", "t", "--tenant", "acme"),
        ("group", "create", "g", "t", "--tenant", "acme=heavy"),
        ("group", "create", "g", "t", "--header", "=x"),
        ("group", "create", "g", "t", "--mode", "odd"),
        ("group", "reset", "g"),
        ("group", "reset", "g", "--to", "yesterday"),
        ("group", "skip", "g", "orders"),
        ("group", "skip", "g", "orders/9-7"),
        ("group", "replay", "g"),
        ("group", "replay", "g", "orders/1", "--from", "1h"),
        ("group", "replay", "g", "--from", "1h"),
        ("group", "peek", "g", "t", "--count", "0"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_read_is_wrong_usage(onward: Onward, arguments: tuple[str, ...]):
    done = onward(*arguments)
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1), done.stderr
