"""`onward serve` as a process: what it says, how it ends, and that it loads only what it needs."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import onward
from onward.cli import run

Serving = Callable[..., Any]  # of Served, in conftest.py


def test_it_says_what_it_is_and_where(serving: Serving):
    served = serving()
    address = served.wait_ready()
    assert served.stop() == 0
    lines = served.said.splitlines()
    moment = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d"
    assert all(re.match(moment + r" info     \S", line) for line in lines)
    said = "\n".join(lines)
    for part in (
        f"onward {onward.__version__} starts", f"folder {served.folder}", "durability disk",
        f"pid {served.process.pid}", f"listening on {address}", "settings from no file",
        "stopped",
    ):  # fmt: skip
        assert part in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_it_stops_in_order_when_it_is_told_to(serving: Serving, number: int):
    served = serving()
    served.wait_ready()
    served.process.send_signal(number)
    assert served.process.wait(20) == 0


def test_a_folder_in_use_is_unavailable(serving: Serving):
    serving().wait_ready()
    second = serving()
    assert second.process.wait(20) == 3
    assert "in use by another broker (unavailable)" in second.said


def test_an_address_in_use_is_unavailable(serving: Serving):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        served = serving("--server.port", str(taken.getsockname()[1]))
        assert served.process.wait(20) == 3
    assert "is in use by another program" in served.said


def test_a_damaged_log_is_not_served(serving: Serving):
    served = serving()
    address = served.wait_ready()
    with onward.connect_sync(address) as mq:
        for number in range(3):
            mq.publish("orders", str(number) * 100)
    # Killed: without a checkpoint the log is read again from its first entry.
    served.process.kill()
    served.process.wait(20)
    (segment,) = served.folder.glob("*.log")
    with segment.open("r+b") as file:
        file.seek(150)
        file.write(b"\xff\xff")
    again = serving()
    assert again.process.wait(20) == 5
    assert again.said.splitlines()[-1].endswith("(corruption)")
    assert f"onward log check {served.folder}" in again.said


def test_wrong_settings_are_wrong_usage(serving: Serving):
    served = serving("--server.host", "0.0.0.0")
    assert served.process.wait(20) == 2
    assert "auth.tokens" in served.said


def test_a_file_in_the_place_of_the_unix_socket_is_left_alone(serving: Serving, tmp_path: Path):
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    served = serving("--server.unix-socket", str(path))
    assert served.process.wait(20) == 2
    assert f"server.unix_socket {str(path)!r} exists and is no socket" in served.said
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "value"),
    [("server.unix_socket", "/tmp/" + "x" * 200), ("server.unix_socket", "/no/such/onward.sock")],
)
def test_a_place_where_nobody_can_listen_is_named(serving: Serving, name: str, value: str):
    served = serving(f"--{name.replace('_', '-')}", value)
    assert served.process.wait(20) == 2
    assert f"{name} {value!r}: cannot listen there" in served.said
    assert "unexpected" not in served.said


def test_a_host_that_is_none_is_named(serving: Serving):
    served = serving("--server.host", "999.1.1.1", "--auth.tokens", "admin:0123456789abcdef")
    assert served.process.wait(20) == 2
    assert "server.host '999.1.1.1'" in served.said


def test_it_loads_neither_rich_nor_other_commands():
    program = (
        "import sys\nimport onward.cli.serve\n"
        "heavy = ('rich', 'onward.cli.read', 'onward.cli.log', 'onward.bench', 'onward.testing')\n"
        "sys.exit(' '.join(name for name in heavy if name in sys.modules) or 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_events_are_json_for_collectors(serving: Serving):
    served = serving("--server.log-format", "json")
    served.wait_ready()
    assert served.stop() == 0
    events = [json.loads(line) for line in served.said.splitlines()]
    assert {event["level"] for event in events} == {"info"}
    assert set(events[0]) == {"at", "level", "logger", "text"}


def test_the_level_of_events_is_a_setting(serving: Serving, tmp_path: Path):
    path = tmp_path / "socket"
    served = serving("--server.log-level", "warning", "--server.unix-socket", str(path))
    while not path.exists():
        time.sleep(0.02)
    assert served.stop() == 0
    assert served.said == ""


def test_a_log_folder_that_is_a_file_is_named(serving: Serving, tmp_path: Path):
    (tmp_path / "small.toml").touch()
    served = serving("--log.folder", str(tmp_path / "small.toml"))
    assert served.process.wait(20) == 2
    assert "small.toml' is a file, not a folder" in served.said


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--log.durability", "turbo", "'turbo': expected one of memory, interval, disk, quorum"),
        ("--log.segment-bytes-max", "1TiB", "'1TiB': at most 2GiB"),
        ("--topics.batch-bytes-max", "2GiB", "'2GiB': at most 2147483647 bytes"),
        ("--server.heartbeat-ms", "1ms", "'1ms': at least 100ms"),
        ("--server.port", "70000", "'70000': at most 65535 (see"),
    ],
)
def test_a_wrong_setting_is_told_what_it_may_be(
    option: str, value: str, expected: str, capsys: pytest.CaptureFixture[str]
):
    assert run(["serve", "--config", "/dev/null", option, value]) == 2
    assert expected in capsys.readouterr().err
