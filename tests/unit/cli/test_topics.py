"""`onward topics` and `onward status` against a real broker."""

import json
import subprocess
from collections.abc import Callable

import msgspec
import pytest

from onward.protocol.operations.status import NodeStatus
from onward.protocol.operations.topics import TopicDescription

Onward = Callable[..., subprocess.CompletedProcess[bytes]]


def record(done: subprocess.CompletedProcess[bytes]) -> dict[str, object]:
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_a_line_of_json_has_every_field_of_the_reply_and_no_other(onward: Onward):
    topic = record(onward("topics", "create", "whole", "--json"))
    assert msgspec.to_builtins(msgspec.convert(topic, TopicDescription)) == topic
    status = record(onward("status", "--json"))
    assert msgspec.to_builtins(msgspec.convert(status, NodeStatus)) == status


def test_a_topic_can_expire_when_it_is_idle(onward: Onward):
    made = onward("topics", "create", "fleeting", "--expires-idle", "1h", "--json")
    assert json.loads(made.stdout)["expires_idle_ms"] == 3_600_000
    changed = onward("topics", "change", "fleeting", "--expires-idle", "0", "--json")
    assert json.loads(changed.stdout)["expires_idle_ms"] == 0


def test_a_topic_is_created_as_it_was_asked_for(onward: Onward):
    topic = record(
        onward(
            "topics", "create", "made", "--lifetime", "1h", "--rule", "write-only", "--retention",
            "7d", "--retention-bytes", "1GiB", "--message-bytes-max", "4KiB",
            "--retention-group", "archive", "--json",
        )
    )  # fmt: skip
    assert topic["rule"] == "write-only"
    assert topic["retention_ms"] == 7 * 86_400_000
    assert topic["retention_bytes"] == 1 << 30
    assert topic["retention_group"] == "archive"
    assert topic["message_bytes_max"] == 4096
    assert int(str(topic["expires_at_ms"])) - int(str(topic["created_at_ms"])) == 3_600_000
    assert record(onward("topics", "show", "made", "--json")) == topic


def test_creating_twice_is_an_error_unless_it_is_said_to_be_none(onward: Onward):
    assert onward("topics", "create", "twice").returncode == 0
    done = onward("topics", "create", "twice")
    assert done.returncode == 1
    assert b"(already_exists)" in done.stderr
    assert onward("topics", "create", "twice", "--exist-ok").returncode == 0


def test_a_change_leaves_the_rest(onward: Onward):
    onward("topics", "create", "changed", "--lifetime", "1h", "--message-bytes-max", "4KiB")
    topic = record(onward("topics", "change", "changed", "--rule", "closed", "--json"))
    assert (topic["rule"], topic["message_bytes_max"]) == ("closed", 4096)
    assert topic["expires_at_ms"]
    never = record(onward("topics", "change", "changed", "--expires-at", "never", "--json"))
    assert never["expires_at_ms"] == 0


def test_the_group_that_a_topic_waits_for_is_shown_and_changed(onward: Onward):
    onward("topics", "create", "waits", "--retention-group", "archive")
    shown = onward("topics", "show", "waits").stdout.splitlines()
    assert [line.split() for line in shown if b"group" in line] == [
        [b"retention", b"group", b"archive"]
    ]
    topic = record(onward("topics", "change", "waits", "--retention-group", "", "--json"))
    assert topic["retention_group"] == ""
    done = onward("topics", "change", "waits", "--retention-group", "a b")
    assert (done.returncode, b"(invalid_name)" in done.stderr) == (1, True)


def test_topics_lists_without_being_told(onward: Onward):
    onward("publish", "list-b", "x")
    onward("publish", "list-a", "x", "y")
    heading, first, second = onward("topics", "--prefix", "list-").stdout.splitlines()
    assert heading.split()[:3] == [b"TOPIC", b"STATE", b"MESSAGES"]
    assert first.split()[:3] == [b"list-a", b"active", b"2"]
    assert second.split()[:3] == [b"list-b", b"active", b"1"]
    assert onward("topics", "list", "--prefix", "list-").stdout.splitlines()[1] == first


def test_a_deleted_topic_is_only_in_the_list_of_all(onward: Onward):
    onward("publish", "gone", "x")
    assert onward("topics", "delete", "gone", "--yes").stdout == b"deleted gone with 1 messages\n"
    assert onward("topics", "--prefix", "gone", "--json").stdout == b""
    assert record(onward("topics", "--all", "--prefix", "gone", "--json"))["state"] == "deleted"


def test_nothing_is_deleted_without_a_yes(onward: Onward):
    onward("publish", "kept", "x")
    done = onward("topics", "delete", "kept")
    assert done.returncode == 2
    assert b"--yes" in done.stderr
    assert onward("topics", "show", "kept").returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("topics", "change", "x"),
        ("topics", "create", "x", "--lifetime", "soon"),
        ("topics", "create", "x", "--retention-bytes", "much"),
        ("topics", "create", "x", "--rule", "open"),
        ("topics", "remove", "x"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_read_is_wrong_usage(onward: Onward, arguments: tuple[str, ...]):
    done = onward(*arguments)
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1)


def test_a_topic_can_be_shown_to_people(onward: Onward):
    onward("topics", "create", "shown")
    assert offsets(onward) == "none"
    onward("publish", "shown", "x", "y", "z")
    assert offsets(onward) == "0 to 2"


def test_status_has_the_numbers_of_the_broker(onward: Onward):
    status = record(onward("status", "--json"))
    assert status["durability"] == "disk"
    assert int(str(status["next_event_id"])) >= 1
    assert b"log bytes" in onward("status").stdout


def test_a_time_that_is_not_there_is_a_dash(onward: Onward):
    assert record(onward("status", "--json"))["next_due_at_ms"] == 0
    shown = onward("status").stdout.decode()
    (line,) = [line for line in shown.splitlines() if line.startswith("next due at")]
    assert line.split() == ["next", "due", "at", "-"]


def offsets(onward: Onward) -> str:
    lines = onward("topics", "show", "shown").stdout.decode().splitlines()
    (line,) = [line for line in lines if line.startswith("offsets")]
    return line.removeprefix("offsets").strip()
