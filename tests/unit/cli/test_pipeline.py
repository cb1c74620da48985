"""`onward pipeline` where no Spark is needed: pages of help, wrong usage, no broker, runs."""

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from onward.cli.pipeline import command
from onward.cli.pipeline_frame import record_of
from onward.cli.pipeline_writes import _format_of, _without_password
from onward.pipeline.place import Place
from onward.pipeline.runs import running

from .conftest import PROGRAM, bare_environ

Onward = Callable[..., subprocess.CompletedProcess[bytes]]

JOBS = [
    "archive",
    "compact",
    "read",
    "stats",
    "reconcile",
    "trace",
    "replay",
    "schedule",
    "redrive",
]


def test_every_job_is_there_and_its_help_shows_an_example(onward: Onward):
    assert sorted(command.commands) == sorted([*JOBS, "run", "runs"])
    for name in command.commands:
        done = onward("pipeline", name, "--help")
        assert done.returncode == 0
        assert f"Example:  onward pipeline {name}".encode() in done.stdout


def test_a_page_of_help_imports_no_spark():
    program = (
        "import sys\nfrom onward.cli import run\n"
        "for page in (['--help'], ['pipeline', '--help'], ['pipeline', 'archive', '--help']):\n"
        "    assert run(page) == 0\n"
        "assert not {'pyspark', 'pyarrow', 'py4j'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_without_pyspark_one_line_says_what_to_install(tmp_path: Path, address: str):
    # A module that is None in sys.modules cannot be imported: as if it were not installed.
    program = (
        "import sys\nsys.modules.update(pyspark=None, pyarrow=None)\nfrom onward.cli import main\n"
        f"main(['pipeline', 'archive', '--lake', 'lake', '--address', {address!r}])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=60, cwd=tmp_path,
        env=bare_environ(),
    )  # fmt: skip
    assert done.returncode == 3
    assert b"pip install 'onward[spark]' (not_installed)" in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_a_broker_that_is_not_there_is_noticed_before_spark_starts(tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # Bound and not listening: whoever connects is refused.
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        done = subprocess.run(
            [*PROGRAM, "pipeline", "stats", "--address", where], capture_output=True, timeout=60,
            cwd=tmp_path, env=bare_environ(),
        )  # fmt: skip
    assert done.returncode == 3
    assert done.stderr.startswith(b"error: no broker answers at ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["archive"], b"--lake"),
        (["replay", "orders"], b"--to-topic or --to-group"),
        (["replay", "orders", "--to-topic", "a", "--to-group", "b"], b"--to-topic or --to-group"),
        (["replay", "orders", "--to-topic", "a", "--since", "soon"], b"is not a time"),
        (["schedule", "due", "--at", "at", "--body", "b"], b"say --format"),
        (["schedule", "due.xls", "--at", "at", "--body", "b"], b"say --format"),
        (["schedule", "due.csv", "--body", "b"], b"--at"),
        (["stats", "--conf", "spark.x"], b"NAME=VALUE"),
        (["stats", "--address", "file:/tmp/x"], b"start one with 'onward serve'"),
        (["stats", "--address", "host:99999999"], b"host:99999999"),
        (["run", "missing.py"], b"missing.py"),
        (["redrive", "billing"], b"--where"),
    ],
)
def test_wrong_usage_is_noticed_before_anything_starts(
    onward: Onward, arguments: list[str], words: bytes
):
    done = onward("pipeline", *arguments)
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1), done.stderr
    assert words in done.stderr


def test_runs_are_listed_with_what_they_did(onward: Onward, address: str):
    assert onward("pipeline", "runs", "--json").stdout == b""
    with running(Place(address), job="archive", topics=["orders"]) as run:
        run.progress(rows=1_000, lag=7, files=2)
        run.result(files=2)
    with pytest.raises(ValueError, match="red"), running(Place(address), job="stats"):
        raise ValueError("\x1b[31mred")
    heading, failed, done = onward("pipeline", "runs").stdout.splitlines()
    assert heading.split() == b"RUN JOB STATE STARTED TOOK ROWS ROWS/S LAG FILES ERROR".split()
    assert failed.split()[1:3] == [b"stats", b"failed"]
    assert b"\\x1b[31mred" in failed
    cells = done.split()
    assert (cells[1:3], cells[5], cells[7:]) == ([b"archive", b"done"], b"1000", [b"7", b"2", b"-"])
    line = json.loads(onward("pipeline", "runs", "--job", "archive", "--json").stdout)
    assert (line["rows"], line["result"], line["about"]) == (
        1_000, {"files": 2}, {"topics": ["orders"]},
    )  # fmt: skip


def test_the_name_of_a_source_says_its_format():
    names = ["a.parquet", "/in/a.csv", "a.json", "a.jsonl", "a.NDJSON", "b.orc/"]
    formats = ["parquet", "csv", "json", "json", "json", "orc"]
    assert list(map(_format_of, names)) == formats
    assert _format_of("jdbc:postgresql://db/shop") == "jdbc"


def test_the_password_of_a_database_is_not_shown():
    shown = _without_password("jdbc:postgresql://db/shop?user=a&password=b")
    assert shown == "jdbc:postgresql://db/shop"
    assert _without_password("/in/what?.csv") == "/in/what?.csv"


def test_what_a_job_returns_becomes_a_line_of_json():
    class Inner(NamedTuple):
        body: bytes

    class Result(NamedTuple):
        rows: int
        at: datetime
        inner: tuple[Inner, ...]
        topics: dict[str, tuple[int, int]]

    record = record_of(
        Result(7, datetime(2026, 1, 2, 3, tzinfo=UTC), (Inner(b"\xff"),), {"orders": (0, 7)})
    )
    assert record == {
        "rows": 7, "at": "2026-01-02T03:00:00.000Z", "inner": [{"body": "\\xff"}],
        "topics": {"orders": [0, 7]},
    }  # fmt: skip
    assert json.dumps(record)


def test_the_commands_take_the_same_options_of_spark():
    for name in (*JOBS, "run"):
        found = {one for option in command.commands[name].params for one in option.opts}
        wanted = {"--master", "--memory", "--conf", "--address", "--token", "--timeout"}
        assert wanted <= found, name
        assert isinstance(command.commands[name], click.Command)
