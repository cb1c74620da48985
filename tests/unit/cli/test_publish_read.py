"""`onward publish` and `onward read` against a real broker, as a user types them."""

import json
import os
import re
import select
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import onward as client

from .conftest import PROGRAM

Onward = Callable[..., subprocess.CompletedProcess[bytes]]


def lines(done: subprocess.CompletedProcess[bytes]) -> list[bytes]:
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def records(done: subprocess.CompletedProcess[bytes]) -> list[dict[str, object]]:
    return [json.loads(line) for line in lines(done)]


def test_what_is_published_is_read_back_with_all_that_was_said_about_it(onward: Onward):
    receipts = records(
        onward(
            "publish", "all", "one", "two", "--key", "k", "--tag", "a", "--tag", "b",
            "--header", "x=y=z", "--trace-id", "t", "--durability", "disk", "--json",
        )
    )  # fmt: skip
    assert [receipt["id"] for receipt in receipts] == ["all/0", "all/1"]
    assert {receipt["durability"] for receipt in receipts} == {"disk"}
    first, second = records(onward("read", "all", "--format", "json"))
    assert (first["body"], second["body"]) == ("one", "two")
    assert (first["key"], first["tag"], first["trace_id"]) == ("k", "a,b", "t")
    assert first["headers"] == {"x": "y=z"}


def test_receipts_are_a_table_for_people(onward: Onward):
    heading, receipt = lines(onward("publish", "table", "hello"))
    assert heading.split() == [b"ID", b"EVENT_ID", b"DURABILITY"]
    assert receipt.split()[0] == b"table/0"


def test_a_pipe_of_lines_becomes_messages_byte_by_byte(onward: Onward):
    given = b"plain\n\n\xff\x00 binary\r\nno newline at the end"
    onward("publish", "bytes", given=given)
    assert onward("read", "bytes", "--format", "body").stdout == given + b"\n"
    assert onward("read", "bytes", "--format", "raw").stdout == given.replace(b"\n", b"")


def test_a_large_file_is_published_in_batches(onward: Onward, tmp_path: Path):
    given = b"".join(b"line %d\n" % number for number in range(25_000))
    (tmp_path / "lines").write_bytes(given)
    (said,) = lines(onward("publish", "large", "--file", "lines"))
    assert re.match(rb"published 25,000 messages, large/0 to large/24999, durability disk", said)
    assert onward("read", "large", "--format", "body").stdout == given
    batches = records(onward("publish", "large", "--file", "lines", "--json", "--batch", "5000"))
    assert sum(int(str(batch["count"])) for batch in batches) == 25_000
    assert max(int(str(batch["count"])) for batch in batches) <= 5_000


def test_a_whole_file_can_be_one_message(onward: Onward):
    onward("publish", "whole", "--whole", given=b"a\nb\n")
    assert records(onward("read", "whole", "--json"))[0]["body"] == "a\nb\n"


def test_what_read_writes_as_json_publish_reads(onward: Onward):
    onward("publish", "from", "text", '{"id": 7}', "--key", "k", "--header", "a=b")
    onward("publish", "from", "--whole", given=b"\xff\xfe")
    written = onward("read", "from", "--json").stdout
    onward("publish", "to", "--json-lines", given=written)
    place = {"id", "topic", "offset", "event_id", "published_at_ms"}
    before, after = (
        [{k: v for k, v in record.items() if k not in place} for record in records(onward(*read))]
        for read in (("read", "from", "--json"), ("read", "to", "--json"))
    )
    assert before == after
    assert before[2] == {"body_base64": "//4="}


def test_json_lines_may_hold_values_that_are_no_text(onward: Onward):
    onward("publish", "values", "--json-lines", "--key", "same", given=b'{"body": {"id": 7}}\n')
    (record,) = records(onward("read", "values", "--json"))
    assert (record["body"], record["key"]) == ('{"id": 7}', "same")


@pytest.mark.parametrize("line", [b"no json", b'{"key": "a"}', b'{"body_base64": "?"}', b"[]"])
def test_a_line_that_is_no_message_is_named(onward: Onward, line: bytes):
    done = onward("publish", "wrong", "--json-lines", given=line)
    assert done.returncode == 1
    assert done.stderr.count(b"\n") == 1


def test_an_empty_input_is_said(onward: Onward):
    assert b"nothing to publish" in onward("publish", "empty").stdout


def test_escape_codes_are_shown_and_not_executed(onward: Onward):
    onward("publish", "escapes", "--whole", given=b"\x1b[31mred\x07\n")
    (line,) = lines(onward("read", "escapes"))
    assert line.endswith(b"\\x1b[31mred\\x07\\n")
    assert b"\x1b" not in onward("read", "escapes", "--json").stdout


def test_a_line_for_people_has_offset_time_key_and_body(onward: Onward):
    onward("publish", "people", "hello", "--key", "k")
    (line,) = lines(onward("read", "people"))
    assert re.fullmatch(rb" +0  \d{4}-\d\d-\d\dT[\d:.]+Z  k +hello", line)


@pytest.mark.parametrize(
    ("options", "bodies"),
    [
        (["--from", "earliest"], [b"0", b"1", b"2", b"3"]),
        (["--from", "2"], [b"2", b"3"]),
        (["--from", "latest"], []),
        (["--from", "10m"], [b"0", b"1", b"2", b"3"]),
        (["--from", "now"], []),
        (["--from", "1990-01-01T00:00Z"], [b"0", b"1", b"2", b"3"]),
        (["--count", "1"], [b"0"]),
        (["--from", "1", "--count", "2"], [b"1", b"2"]),
        (["--after-event", "0", "--count", "3"], [b"0", b"1", b"2"]),
    ],
    ids=str,
)
def test_reading_begins_and_ends_where_it_is_told(
    onward: Onward, options: list[str], bodies: list[bytes]
):
    topic = "starts" + re.sub(r"[^\w]", "", "".join(options))
    onward("publish", topic, "0", "1")
    onward("publish", topic, "2", "3")
    assert lines(onward("read", topic, "--format", "body", *options)) == bodies


def test_reading_after_an_event_leaves_out_that_event(onward: Onward):
    (first,) = records(onward("publish", "events", "0", "--json"))
    onward("publish", "events", "1")
    after = onward("read", "events", "--format", "body", "--after-event", str(first["event_id"]))
    assert lines(after) == [b"1"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("read", "x", "--from", "yesterday"),
        ("read", "x", "--count", "0"),
        ("publish", "x", "body", "--file", "f"),
        ("publish", "x", "body", "--header", "no-value"),
        ("publish", "x", "body", "--durability", "forever"),
        ("publish",),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_one_line_and_exit_2(onward: Onward, arguments: tuple[str, ...]):
    done = onward(*arguments)
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1), done.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("read", "no-such-topic"), b"unknown_topic"),
        (("publish", "not a name", "body"), b"invalid_name"),
        (("publish", "x", "--file", "no-such-file"), b"no such file"),
    ],
    ids=["unknown topic", "wrong name", "no file"],
)
def test_a_refused_request_is_one_line_and_exit_1(
    onward: Onward, arguments: tuple[str, ...], code: bytes
):
    done = onward(*arguments)
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)
    assert code in done.stderr


def test_without_a_broker_the_answer_is_unavailable(onward: Onward):
    done = onward("publish", "x", "y", "--address", "127.0.0.1:1", "--timeout", "200ms")
    assert done.returncode == 3
    assert b"(not_connected)" in done.stderr


def test_a_reader_who_has_seen_enough_is_no_failure(onward: Onward, address: str):
    onward("publish", "long", given=b"line\n" * 50_000)
    program = f"{sys.executable} -c 'from onward.cli import main; main()' read long"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {program} --address {address} | head -1"],
        capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.count(b"\n") == 1


def test_a_follower_sees_each_message_when_it_comes_and_ends_quietly(onward: Onward, address: str):
    onward("publish", "live", "first")
    program = [sys.executable, "-c", "from onward.cli import main; main()", "read", "live"]
    with subprocess.Popen(
        [*program, "--follow", "--format", "body", "--address", address],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as follower:  # fmt: skip
        assert follower.stdout
        assert follower.stderr
        assert next_line(follower) == b"first\n"
        onward("publish", "live", "second")
        assert next_line(follower) == b"second\n"
        follower.send_signal(2)
        assert follower.wait(20) == 130
        assert follower.stderr.read() == b""


def test_lines_are_published_when_they_come(onward: Onward, address: str):
    program = [sys.executable, "-c", "from onward.cli import main; main()", "publish", "slow"]
    with subprocess.Popen(
        [*program, "--json", "--address", address], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as publisher:
        assert publisher.stdin
        publisher.stdin.write(b"now\n")
        publisher.stdin.flush()
        # Each batch is told when it is stored: no need to wait for the end of the input.
        assert json.loads(next_line(publisher))["count"] == 1
        publisher.stdin.write(b"later\n")
        publisher.stdin.close()
        assert publisher.wait(20) == 0
    assert lines(onward("read", "slow", "--format", "body")) == [b"now", b"later"]


def next_line(process: "subprocess.Popen[bytes]") -> bytes:
    assert process.stdout
    ready, _, _ = select.select([process.stdout], [], [], 20)
    assert ready, "nothing came"
    line = b""
    while not line.endswith(b"\n"):
        line += os.read(process.stdout.fileno(), 1)
    return line


def test_a_start_that_is_none_is_told_what_there_is(onward: Onward):
    done = onward("read", "orders", "--from", "foo")
    assert done.returncode == 2
    for word in (b"earliest", b"latest", b"an offset", b"a time", b"how long ago"):
        assert word in done.stderr
    done = onward("read", "orders", "--from", "9999-12-31T23:59:59-23:59")
    assert done.returncode == 2
    assert b"too far away" in done.stderr


@pytest.mark.parametrize(("arguments", "closed"), [("f x", ">&-"), ("f", "<&-"), ("f x", "2>&-")])
def test_a_stream_that_the_shell_has_closed_is_no_bug(address: str, arguments: str, closed: str):
    program = [sys.executable, "-c", "from onward.cli import main; main()"]
    command = shlex.join([*program, "publish", "--address", address])
    done = subprocess.run(
        ["sh", "-c", f"{command} {arguments} {closed}"], capture_output=True, timeout=30,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")


def test_headers_of_bytes_are_copied_as_bytes(onward: Onward, address: str):
    headers = {"text": "é", "binary": b"\xff\x00", "plain": b"text too"}
    with client.connect_sync(address) as mq:
        mq.publish("marked", "x", headers=headers)
        mq.publish("marked", "y", headers={"binary": b"\xfe"})
        printed = onward("read", "marked", "--json")
        assert b"\\ud" not in printed.stdout
        assert onward("publish", "copied", "--json-lines", given=printed.stdout).returncode == 0
        copied = [message.headers for message in mq.read("copied")]
    assert copied == [headers, {"binary": b"\xfe"}]


def test_headers_that_are_no_base64_are_refused(onward: Onward):
    line = b'{"body": "x", "headers_base64": {"a": "???"}}'
    done = onward("publish", "marked", "--json-lines", given=line)
    assert done.returncode == 1
    assert b"line 1: headers_base64 'a' is not base64" in done.stderr


@pytest.mark.slow
def test_raw_bytes_are_refused_on_a_terminal_and_nowhere_else(address: str, tmp_path: Path):
    program = [sys.executable, "-c", "from onward.cli import main; main()"]
    publish = [*program, "publish", "raw", "--address", address, "\x1b]0;title\x07"]
    read = [*program, "read", "raw", "--format", "raw", "--address", address]
    subprocess.run(publish, check=True, capture_output=True, cwd=tmp_path)
    ours, terminal = os.openpty()
    try:
        shown = subprocess.run(
            read, stdout=terminal, stderr=subprocess.PIPE, check=False, cwd=tmp_path
        )
        assert shown.returncode == 2
        assert b"raw bytes could act on this terminal" in shown.stderr
        assert not select.select([ours], [], [], 0)[0], "something was written to the terminal"
    finally:
        os.close(ours)
        os.close(terminal)
    piped = subprocess.run(read, capture_output=True, check=True, cwd=tmp_path)
    assert piped.stdout == b"\x1b]0;title\x07"


def test_priority_and_tenant_are_published_and_read_back(onward: Onward) -> None:
    done = onward("publish", "ranked", "x", "--priority", "9", "--tenant", "acme")
    assert done.returncode == 0, done.stderr
    record = json.loads(onward("read", "ranked", "--json").stdout)
    assert (record["priority"], record["tenant"]) == (9, "acme")
    line = json.dumps({"body": "y"}).encode()
    onward("publish", "ranked", "--json-lines", "--priority", "3", given=line)
    assert json.loads(onward("read", "ranked", "--from", "1", "--json").stdout)["priority"] == 3


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("read", "o", "--from", "9" * 23), b"there is no offset 99999999999999999999999"),
        (
            ("topics", "create", "o", "--message-bytes-max", "99GiB"),
            b"error: --message-bytes-max is at most 16776192 bytes (topics.batch_bytes_max, 16MiB",
        ),
        (("topics", "create", "o", "--lifetime", "1s"), b"a topic lives at least 10s"),
        (("read", "o", "--count", "abc"), b"'abc' is not a number"),
        (("explain", "@schedule/0"), b"no message was ever scheduled as '@schedule/0'"),
    ],
)
def test_a_number_that_is_out_of_range_is_told_its_limit(
    onward: Onward, arguments: tuple[str, ...], text: bytes
) -> None:
    done = onward(*arguments)
    assert done.returncode != 0
    assert text in done.stderr
    assert b"not understood" not in done.stderr


def test_completion_is_offered_to_the_shell() -> None:
    environ = {**os.environ, "_ONWARD_COMPLETE": "bash_source"}
    script = subprocess.run(PROGRAM, env=environ, capture_output=True, check=True).stdout
    assert b"complete -o nosort" in script
    environ |= {"_ONWARD_COMPLETE": "bash_complete", "COMP_WORDS": "onward pub", "COMP_CWORD": "1"}
    words = subprocess.run(PROGRAM, env=environ, capture_output=True, check=True).stdout
    assert words == b"plain,publish\n"
