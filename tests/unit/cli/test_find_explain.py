"""`onward find` and `onward explain` against a real broker."""

import json
import subprocess
from collections.abc import Callable

import pytest

Onward = Callable[..., subprocess.CompletedProcess[bytes]]


def ids(done: subprocess.CompletedProcess[bytes]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["id"] for line in done.stdout.splitlines()]


def test_messages_are_found_by_what_is_known_of_them(onward: Onward):
    onward("publish", "sought", "red", "--key", "a", "--trace-id", "t", "--header", "shop=eu")
    onward("publish", "sought", "green", "red and green", "--key", "b")
    asked = {
        (): [0, 1, 2],
        ("--key", "b"): [1, 2],
        ("--trace-id", "t"): [0],
        ("--header", "shop=eu"): [0],
        ("--text", "red"): [0, 2],
        ("--text", "red", "--key", "b"): [2],
        ("--from", "1", "--until", "2"): [1],
        ("--limit", "1"): [0],
        ("--until", "1h"): [],
    }
    for options, offsets in asked.items():
        found = ids(onward("find", "sought", "--json", *options))
        assert found == [f"sought/{offset}" for offset in offsets], options
    assert ids(onward("find", "sought/1", "--json")) == ["sought/1"]


def test_what_is_found_does_nothing_to_a_terminal(onward: Onward):
    onward("publish", "hostile", "--whole", given=b"\x1b[31mred")
    assert b"\x1b" not in onward("find", "hostile").stdout


def test_a_message_without_groups_is_explained(onward: Onward):
    onward("publish", "lonely", "hello")
    lines = onward("explain", "lonely/0").stdout.decode().splitlines()
    assert lines[0] == "lonely/0"
    assert lines[1].startswith("  published by onward-cli on ")
    assert ", 5 bytes, on disk, node " in lines[2]
    assert lines[3] == "  no group consumes it"


def test_an_explanation_has_every_group(onward: Onward):
    onward("publish", "explained", "hello")
    onward("group", "create", "one", "explained")
    onward("group", "create", "two", "explained")
    onward("group", "skip", "two", "explained/0")
    told = json.loads(onward("explain", "explained/0", "--json").stdout)
    assert [(life["group"], life["state"]) for life in told["groups"]] == [
        ("one", "fresh"),
        ("two", "finished"),
    ]
    assert told["groups"][1]["events"][-1]["did"] == "skipped"
    assert told["message"]["body"] == "hello"
    assert told["published_by"]["client"] == "onward-cli"
    text = onward("explain", "explained/0").stdout.decode()
    assert "  group one: not delivered yet" in text
    assert "  group two: skipped: by an operator" in text


@pytest.mark.parametrize(
    ("message_id", "code"),
    [
        ("nothing/0", b"(unknown_topic)"),
        ("explained/99", b"(offset_out_of_range)"),
        ("explained", b"(invalid_request)"),
    ],
)
def test_an_unknown_id_is_one_line_and_exit_1(onward: Onward, message_id: str, code: bytes):
    onward("publish", "explained", "hello")
    done = onward("explain", message_id)
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)
    assert code in done.stderr
