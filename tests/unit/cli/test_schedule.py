"""`onward schedule`, `onward recurring` and `onward publish --delay`, as a user types them."""

import json
import re
import subprocess
import time
from collections.abc import Callable
from itertools import count

import pytest

Onward = Callable[..., subprocess.CompletedProcess[bytes]]

PATIENCE_S = 60
_numbers = count()


@pytest.fixture
def topic() -> str:
    """A topic of its own for each test: they share a broker."""
    return f"reminders-{next(_numbers)}"


def records(done: subprocess.CompletedProcess[bytes]) -> list[dict[str, object]]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def scheduled(onward: Onward, *arguments: str) -> str:
    (record,) = records(onward("publish", *arguments, "--json"))
    return str(record["id"])


def until_fired(onward: Onward, number: str) -> dict[str, object]:
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        (record,) = records(onward("schedule", "show", number, "--json"))
        if record["state"] == "fired":
            return record
        time.sleep(0.01)
    raise AssertionError(f"{number} did not fire")


def test_a_message_is_scheduled_shown_moved_and_cancelled(onward: Onward, topic: str):
    number = scheduled(onward, topic, "pay", "--delay", "1h", "--key", "7")
    assert number.startswith("@schedule/")
    (shown,) = records(onward("schedule", "show", number, "--json"))
    assert (shown["state"], shown["topic"], shown["key"]) == ("waiting", topic, "7")
    assert (shown["body"], shown["bytes"]) == ("pay", 3)
    (moved,) = records(onward("schedule", "move", number, "--at", "2030-01-01T00:00Z", "--json"))
    assert (moved["state"], moved["at_ms"]) == ("moved", 1_893_456_000_000)
    new = str(moved["id"])
    done = onward("schedule", "cancel", new, number, "@schedule/999999999")
    assert done.returncode == 0
    lines = [line.split() for line in done.stdout.decode().splitlines()]
    assert lines[0] == ["ID", "STATE", "MESSAGE", "UNIQUE"]
    assert [line[:2] for line in lines[1:]] == [
        [new, "cancelled"], [number, "replaced"], ["@schedule/999999999", "not_found"],
    ]  # fmt: skip


def test_what_is_shown_to_people_names_what_they_need(onward: Onward, topic: str):
    number = scheduled(
        onward, topic, "pay\x1b", "--at", "2030-01-01T00:00Z", "--unique", f"{topic}-7"
    )
    shown = onward("schedule", "show", "--unique", f"{topic}-7").stdout.decode()
    for word in (number, "waiting", topic, "2030-01-01T00:00:00.000Z", f"{topic}-7", "pay\\x1b"):
        assert word in shown
    listed = onward("schedule", "--topic", topic).stdout.decode().splitlines()
    assert listed[0].split() == ["ID", "FIRES", "TOPIC", "KEY", "UNIQUE", "BYTES"]
    assert listed[1].split() == [
        number, "2030-01-01T00:00:00.000Z", topic, "-", f"{topic}-7", "4",
    ]  # fmt: skip
    moved = onward("schedule", "move", number, "--at", "2031-01-01").stdout.decode()
    assert moved.endswith(f" fires at 2031-01-01T00:00:00.000Z in {topic}\n")


def test_a_business_key_waits_once_unless_it_is_replaced(onward: Onward, topic: str):
    options = ("--delay", "1h", "--unique", f"{topic}-7")
    scheduled(onward, topic, "one", *options)
    refused = onward("publish", topic, "two", *options)
    assert (refused.returncode, b"already_exists" in refused.stderr) == (1, True)
    scheduled(onward, topic, "three", *options, "--replace")
    (shown,) = records(onward("schedule", "show", "--unique", f"{topic}-7", "--json"))
    assert shown["body"] == "three"
    (cancelled,) = records(onward("schedule", "cancel", "--unique", f"{topic}-7", "--json"))
    assert (cancelled["state"], cancelled["unique"]) == ("cancelled", f"{topic}-7")


def test_what_is_due_fires_and_says_where_it_is(onward: Onward, topic: str):
    number = scheduled(onward, topic, "now", "--at", "2020-01-01")
    fired = until_fired(onward, number)
    assert (fired["topic"], fired["offset"]) == (topic, 0)
    late = onward("schedule", "cancel", number, "--json")
    cancelled = json.loads(late.stdout)
    assert (cancelled["state"], cancelled["offset"], late.returncode) == ("fired", 0, 1)
    nothing = onward("schedule", "cancel", "@schedule/999999999")
    assert (b"not_found" in nothing.stdout, nothing.returncode) == (True, 1)
    refused = onward("schedule", "move", number, "--delay", "1h")
    assert refused.returncode == 1
    assert f"cannot be moved: it is fired ({topic}/0) (conflict)" in refused.stderr.decode()


def test_lines_of_a_pipe_are_scheduled_together(onward: Onward, topic: str):
    done = onward("publish", topic, "--delay", "1h", given=b"a\nb\nc\n")
    assert done.stdout.decode().count("@schedule/") == 3
    listed = records(onward("schedule", "list", "--topic", topic, "--json"))
    assert [one["bytes"] for one in listed] == [1, 1, 1]
    whole = onward(
        "publish", topic, "--delay", "2h", "--whole", "--unique", f"{topic}-w", given=b"a\nb\n"
    )
    assert whole.returncode == 0
    assert len(records(onward("schedule", "list", "--topic", topic, "--json"))) == 4
    some = onward("schedule", "list", "--topic", topic, "--limit", "2").stdout.decode()
    assert some.splitlines()[-1] == "the first 2: --limit shows more"


def test_a_list_is_by_topic_key_and_time(onward: Onward, topic: str):
    scheduled(onward, topic, "a", "--at", "2030-01-01", "--key", "x")
    scheduled(onward, topic, "b", "--at", "2030-01-02", "--key", "y")
    listed = ("schedule", "list", "--topic", topic, "--json")
    assert [one["key"] for one in records(onward(*listed))] == ["x", "y"]
    assert [one["key"] for one in records(onward(*listed, "--key", "y"))] == ["y"]
    assert [one["key"] for one in records(onward(*listed, "--from", "2030-01-02"))] == ["y"]
    assert [one["key"] for one in records(onward(*listed, "--until", "2030-01-02"))] == ["x"]
    assert records(onward(*listed, "--until", "1h")) == []


def test_the_calendar_is_a_histogram(onward: Onward, topic: str):
    for moment in ("2030-01-01T00:10Z", "2030-01-01T00:20Z", "2030-01-01T02:00Z"):
        scheduled(onward, topic, "x", "--at", moment)
    asked = (
        "schedule", "calendar", "--topic", topic, "--from", "2030-01-01", "--until",
        "2030-01-01T03:00Z", "--step", "1h",
    )  # fmt: skip
    bars = records(onward(*asked, "--json"))
    assert [(bar["at_ms"], bar["count"]) for bar in bars] == [
        (1_893_456_000_000, 2), (1_893_463_200_000, 1),
    ]  # fmt: skip
    lines = onward(*asked).stdout.decode().splitlines()
    assert [line.split()[:3] for line in lines[:3]] == [
        ["2030-01-01", "00:00", "2"], ["2030-01-01", "01:00", "0"], ["2030-01-01", "02:00", "1"],
    ]  # fmt: skip
    first, _, third = (line.split()[3:] for line in lines[:3])
    assert len(first[0]) == 2 * len(third[0])
    assert lines[3] == "3 messages, a bar is 1h"
    assert lines[-1].split() == [topic, "3"]


def test_a_long_calendar_leaves_out_what_is_empty(onward: Onward, topic: str):
    scheduled(onward, topic, "x", "--at", "2030-06-01")
    lines = onward(
        "schedule", "calendar", "--topic", topic, "--from", "2030-01-01", "--until", "2031-01-01",
        "--step", "1d",
    ).stdout.decode().splitlines()  # fmt: skip
    assert lines[0].split()[:2] == ["2030-06-01", "1"]
    assert lines[1] == "1 message, a bar is 1d"
    nothing = onward("schedule", "calendar", "--topic", "nobody", "--until", "1h")
    assert nothing.stdout.decode().splitlines()[-1] == "0 messages, a bar is 5m"


def test_a_recurring_message_is_set_listed_paused_and_deleted(onward: Onward, topic: str):
    name = f"{topic}-daily"
    told = onward(
        "recurring", "set", name, topic, "x", "--cron", "0 9 * * *", "--zone", "Europe/Berlin",
        "--header", "a=b", "--tag", "t", "--catch-up", "none",
    ).stdout.decode()  # fmt: skip
    assert told.startswith(f"{name} comes next at ")
    assert told.endswith(f" in {topic}\n")
    found = [one for one in records(onward("recurring", "--json")) if one["name"] == name]
    assert [(one["cron"], one["zone"], one["catch_up"]) for one in found] == [
        ("0 9 * * *", "Europe/Berlin", "none")
    ]
    assert (found[0]["headers"], found[0]["tag"], found[0]["body"]) == ({"a": "b"}, "t", "x")
    assert onward("recurring", "pause", name).stdout.decode() == f"{name} is paused\n"
    rows = onward("recurring", "list").stdout.decode().splitlines()
    assert any(row.startswith(name) and "paused" in row for row in rows)
    (resumed,) = records(onward("recurring", "resume", name, "--json"))
    assert resumed["paused"] is False
    assert onward("recurring", "delete", name).returncode == 2
    assert onward("recurring", "delete", name, "--yes").stdout.decode() == f"deleted {name}\n"
    assert onward("recurring", "pause", name).returncode == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("publish", "t", "x", "--delay", "-1"),
        ("publish", "t", "x", "--delay", "1h", "--at", "2030-01-01"),
        ("publish", "t", "x", "--at", "10m"),
        ("publish", "t", "x", "--unique", "a"),
        ("publish", "t", "x", "--delay", "1h", "--replace"),
        ("publish", "t", "x", "y", "--delay", "1h", "--unique", "a"),
        ("publish", "t", "--delay", "1h", "--unique", "a"),
        ("schedule", "show"),
        ("schedule", "show", "orders/7"),
        ("schedule", "show", "7", "--unique", "a"),
        ("schedule", "cancel"),
        ("schedule", "cancel", "x"),
        ("schedule", "move", "7"),
        ("schedule", "move", "7", "--delay", "1h", "--at", "2030-01-01"),
        ("schedule", "list", "--until", "whenever"),
        ("schedule", "nonsense"),
        ("recurring", "set", "a", "t", "x"),
        ("recurring", "set", "a", "t", "x", "--cron", "* * * * *", "--every", "1h"),
    ],
)
def test_wrong_usage_is_told_before_anything_is_done(onward: Onward, arguments: tuple[str, ...]):
    done = onward(*arguments)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"error: ")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("schedule", "show", "999999999"), "there is no scheduled message @schedule/999999999"),
        (("schedule", "show", "--unique", "no"), "nothing waits under the unique key 'no'"),
        (("schedule", "move", "--unique", "no", "--delay", "1h"), "nothing waits under"),
        (("publish", "t", "x", "--delay", "4000d"), "schedule.ahead_ms_max"),
        (("recurring", "set", "a", "t", "x", "--cron", "99 * * * *"), "bad minute"),
        (("schedule", "calendar", "--until", "2020-01-01"), "ends after it begins"),
    ],
)
def test_what_the_broker_refuses_is_one_clear_line(
    onward: Onward, arguments: tuple[str, ...], text: str
):
    done = onward(*arguments)
    assert (done.returncode, done.stdout) == (1, b"")
    assert text in done.stderr.decode()


def test_a_recurring_schedule_is_shown_with_its_body(onward: Onward, topic: str):
    name = f"show-{topic}"
    onward(
        "recurring", "set", name, topic, '{"id": 7}', "--every", "10m", "--tag", "a", "--key", "k"
    )
    shown = onward("recurring", "show", name).stdout.decode()
    for row in (
        r"topic +" + topic,
        r"when +every 10m",
        r"key +k",
        r"tags +a",
        r'body +\{"id": 7\}',
    ):
        assert re.search(f"(?m)^{row}$", shown), row
    (record,) = records(onward("recurring", "show", name, "--json"))
    assert (record["name"], record["body"]) == (name, '{"id": 7}')
    missing = onward("recurring", "show", "nobody")
    assert missing.returncode == 1
    assert b"there is no recurring schedule 'nobody'" in missing.stderr
    onward("recurring", "delete", name, "--yes")
