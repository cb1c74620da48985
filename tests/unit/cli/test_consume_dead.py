"""`onward consume` and `onward dead` against a real broker, as a user types them."""

import asyncio
import json
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

import onward as library

from .conftest import PROGRAM, bare_environ

Onward = Callable[..., subprocess.CompletedProcess[bytes]]


def records(done: subprocess.CompletedProcess[bytes]) -> list[dict[str, object]]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def bodies(done: subprocess.CompletedProcess[bytes]) -> list[object]:
    return [record["body"] for record in records(done)]


def backlog(onward: Onward, group: str) -> object:
    (record,) = records(onward("group", "show", group, "--json"))
    return record["backlog"]


@pytest.fixture
def reject(address: str) -> Callable[..., None]:
    """Let the first messages of a topic die in a group."""

    async def work(topic: str, group: str, causes: tuple[str, ...]) -> None:
        async with (
            library.connect(address) as mq,
            mq.consume(topic, group=group, member="ann") as consumer,
        ):
            left = list(causes)
            while left:
                for delivery in await consumer.fetch(len(left), wait="30s"):
                    await delivery.reject(left.pop(0))

    def die(topic: str, *causes: str, group: str) -> None:
        asyncio.run(work(topic, group, causes))

    return die


# --- consume -----------------------------------------------------------------------------------


def test_what_is_consumed_is_acked_and_does_not_come_again(onward: Onward):
    onward("publish", "eaten", "0", "1", "2", "--key", "k")
    first = onward("consume", "eaten", "--group", "eating", "--count", "2", "--json")
    (one, _) = records(first)
    assert (one["id"], one["key"], one["group"], one["attempt"]) == ("eaten/0", "k", "eating", 1)
    assert bodies(first) == ["0", "1"]
    assert bodies(onward("consume", "eaten", "--group", "eating", "--count", "1", "--json")) == [
        "2"
    ]
    assert backlog(onward, "eating") == 0


def test_what_is_only_looked_at_is_given_back_uncounted(onward: Onward):
    onward("publish", "seen", "0", "1")
    for _ in range(3):
        shown = records(
            onward("consume", "seen", "--group", "seeing", "--no-ack", "--count", "2", "--json")
        )
        assert [(one["body"], one["attempt"]) for one in shown] == [("0", 1), ("1", 1)]
    assert backlog(onward, "seeing") == 2


def test_what_consuming_creates_is_said_or_refused(onward: Onward):
    onward("publish", "spelt", "0")
    refused = onward("consume", "spelt", "--group", "typo", "--no-create", "--wait", "10ms")
    assert refused.returncode != 0
    assert b"group 'typo' does not exist" in refused.stderr
    refused = onward("consume", "splet", "--group", "typo", "--no-create", "--wait", "10ms")
    assert b"topic 'splet' does not exist" in refused.stderr
    both = onward("consume", "splet", "--group", "typo", "--wait", "10ms")
    assert (both.returncode, both.stderr) == (0, b"created topic 'splet'\ncreated group 'typo'\n")
    again = onward("consume", "splet", "--group", "typo", "--no-create", "--wait", "10ms")
    assert (again.returncode, again.stderr) == (0, b"")


def test_dead_letters_of_all_groups_are_listed_with_their_bodies(
    onward: Onward, reject: Callable[..., None]
):
    onward("publish", "sick", "one\x1b[2J", "two")
    reject("sick", "why not", "no", group="doctors")
    reject("sick", "never", group="nurses")
    shown = onward("dead", "list", "--bodies", "--topic", "sick").stdout.decode()
    assert " ".join(shown.split()[:7]) == "GROUP ID DIED ATTEMPTS MEMBER CAUSE BODY"
    rows = [line.split() for line in shown.splitlines()[1:]]
    assert [(row[0], row[1]) for row in rows] == [
        ("doctors", "sick/0"), ("doctors", "sick/1"), ("nurses", "sick/0"),
    ]  # fmt: skip
    assert "\x1b" not in shown
    every = records(onward("dead", "list", "--bodies", "--topic", "sick", "--json"))
    assert [(one["group"], one["body"]) for one in every][1] == ("doctors", "two")
    assert "body" not in records(onward("dead", "list", "doctors", "--json"))[0]


def test_several_topics_are_consumed_by_one_group(onward: Onward):
    onward("publish", "left", "l")
    onward("publish", "right", "r")
    done = onward("consume", "left", "right", "--group", "both", "--count", "2", "--json")
    assert sorted(map(str, bodies(done))) == ["l", "r"]


def test_a_group_begins_and_filters_as_it_is_told(onward: Onward):
    onward("publish", "tagged", "0", "--tag", "a")
    onward("publish", "tagged", "1", "--tag", "b")
    onward("publish", "tagged", "2", "--tag", "a")
    options = ("--group", "tagging", "--start", "1", "--tag", "a", "--count", "1")
    assert bodies(onward("consume", "tagged", *options, "--json")) == ["2"]


def test_consuming_ends_when_nothing_comes_for_a_while(onward: Onward):
    onward("topics", "create", "quiet")
    done = onward("consume", "quiet", "--group", "waiting", "--wait", "50ms")
    assert (done.returncode, done.stdout) == (0, b"")


def test_a_line_for_people_does_nothing_to_a_terminal(onward: Onward):
    onward("publish", "hostile", "--whole", given=b"\x1b[31mred")
    done = onward("consume", "hostile", "--group", "calm", "--count", "1")
    assert done.stdout.startswith(b"hostile/0  ")
    assert done.stdout.endswith(b"\\x1b[31mred\n")


def test_settings_that_differ_from_the_groups_are_refused(onward: Onward):
    onward("publish", "strict", "0")
    onward("group", "create", "strictly", "strict", "--lease", "2m")
    done = onward("consume", "strict", "--group", "strictly", "--lease", "1m", "--count", "1")
    assert done.returncode == 7
    assert b"has lease 2m, not 1m: run `onward group change strictly --lease 1m`" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("consume", "x"),
        ("consume", "--group", "g"),
        ("consume", "x", "--group", "g", "--no-ack"),
        ("consume", "x", "--group", "g", "--count", "0"),
        ("consume", "x", "--group", "g", "--retry", "often"),
        ("dead", "redrive", "g", "orders/7", "--topic", "orders"),
        ("dead", "purge", "g", "orders"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_read_is_wrong_usage(onward: Onward, arguments: tuple[str, ...]):
    done = onward(*arguments)
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1), done.stderr


def test_an_interrupted_consumer_leaves_its_group(onward: Onward, address: str):
    onward("publish", "followed", "0")
    process = subprocess.Popen(
        [*PROGRAM, "consume", "followed", "--group", "following", "--address", address, "--json"],
        stdout=subprocess.PIPE, env=bare_environ() | {"PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["body"] == "0"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    deadline_s = time.monotonic() + 30
    while records(onward("group", "show", "following", "--json"))[0]["members"]:
        assert time.monotonic() < deadline_s, "the member is still there"


# --- dead letters ------------------------------------------------------------------------------


def test_dead_letters_are_listed_with_who_gave_up_and_why(
    onward: Onward, reject: Callable[..., None]
):
    onward("publish", "dying", "zero", "one")
    reject("dying", "no such\x1b[31m order", "too late", group="grave")
    heading, first, second = onward("dead", "list", "grave").stdout.decode().splitlines()
    assert heading.split() == ["ID", "DIED", "ATTEMPTS", "MEMBER", "CAUSE"]
    assert first.split()[0] == "dying/0"
    assert first.endswith("ann     no such\\x1b[31m order")
    assert second.endswith("too late")
    (found,) = records(onward("dead", "list", "grave", "--text", "late", "--json"))
    assert (found["id"], found["attempts"], found["group"]) == ("dying/1", 1, "grave")
    assert b"1 of 2" in onward("dead", "list", "grave", "--limit", "1").stdout


def test_exported_dead_letters_can_be_published_elsewhere(
    onward: Onward, reject: Callable[..., None]
):
    onward("publish", "exported", "zero", "one", "--key", "k")
    reject("exported", "x", "y", group="exporting")
    exported = onward("dead", "export", "exporting")
    assert [(one["body"], one["cause"]) for one in records(exported)] == [
        ("zero", "x"),
        ("one", "y"),
    ]
    onward("publish", "imported", "--json-lines", given=exported.stdout)
    found = records(onward("read", "imported", "--json"))
    assert [(one["body"], one["key"]) for one in found] == [("zero", "k"), ("one", "k")]


def test_a_redrive_counts_first_asks_and_delivers_again(
    onward: Onward, reject: Callable[..., None]
):
    onward("publish", "driven", "zero", "one", "two")
    reject("driven", "a", "b", "b", group="driving")
    counted = onward("dead", "redrive", "driving", "--text", "b", "--dry-run")
    assert counted.stdout == b"2 dead letters would be redriven\n"
    refused = onward("dead", "redrive", "driving")
    assert refused.returncode == 2
    assert b"redrive 3 dead letters" in refused.stderr
    assert onward("dead", "redrive", "driving", "driven/2", "--yes").returncode == 0
    (again,) = records(onward("consume", "driven", "--group", "driving", "--count", "1", "--json"))
    assert (again["body"], again["attempt"]) == ("two", 1)
    assert len(records(onward("dead", "list", "driving", "--json"))) == 2


def test_purged_dead_letters_are_gone(onward: Onward, reject: Callable[..., None]):
    onward("publish", "purged", "zero", "one")
    reject("purged", "a", "b", group="purging")
    (done,) = records(onward("dead", "purge", "purging", "purged/0-1", "--yes", "--json"))
    assert done == {"group": "purging", "count": 2, "dry_run": False}
    assert records(onward("dead", "list", "purging", "--json")) == []


def test_a_dead_letter_is_explained(onward: Onward, reject: Callable[..., None]):
    onward("publish", "told", "zero")
    reject("told", "no such order", group="telling")
    text = onward("explain", "told/0").stdout.decode()
    assert "  group telling: dead: no such order" in text
    assert "dead by ann after 1 attempt: no such order" in text


def test_bodies_are_consumed_as_they_are(onward: Onward) -> None:
    onward("publish", "lines", "one", "two")
    options = ("--group", "bodies", "--count", "1", "--format")
    assert onward("consume", "lines", *options, "body").stdout == b"one\n"
    assert onward("consume", "lines", *options, "raw").stdout == b"two"
