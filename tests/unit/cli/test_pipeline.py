"""`onward pipeline` where no Spark is needed: pages of help, wrong usage, no broker, runs."""

import json
import logging
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from onward import connect_sync
from onward.cli.pipeline import _print_runs, command
from onward.cli.pipeline_frame import check_named, record_of
from onward.cli.pipeline_stop import ANEW, LINE, Stop
from onward.cli.pipeline_writes import _format_of, _without_password, stopped_line
from onward.errors import UnknownTopic
from onward.pipeline import sessions
from onward.pipeline.lake import open_lake
from onward.pipeline.lake_state import Gap
from onward.pipeline.place import Place
from onward.pipeline.quiet import heard, listening
from onward.pipeline.runs import TOPIC, JobRun, encode, running

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
    assert (cells[1:3], cells[5:7]) == ([b"archive", b"done"], [b"s", b"1,000"])
    assert cells[8:] == [b"7", b"2", b"-"]
    line = json.loads(onward("pipeline", "runs", "--job", "archive", "--json").stdout)
    assert (line["rows"], line["result"], line["about"]) == (
        1_000, {"files": 2}, {"topics": ["orders"]},
    )  # fmt: skip


def test_a_run_that_died_one_that_was_stopped_and_one_that_proved_nothing_are_told_apart(
    onward: Onward, address: str
):
    silent = JobRun(run="silent", job="replay", state="running", started_at_ms=1, at_ms=2)
    with connect_sync(address) as mq:
        mq.create_topic(TOPIC, exist_ok=True)
        mq.publish(TOPIC, encode(silent))
    with pytest.raises(KeyboardInterrupt), running(Place(address), job="replay"):
        raise KeyboardInterrupt
    stopped, lost = onward("pipeline", "runs", "--job", "replay").stdout.splitlines()[1:]
    assert (stopped.split()[2], lost.split()[2]) == (b"stopped", b"lost")
    lines = onward("pipeline", "runs", "--job", "replay", "--json").stdout.splitlines()
    assert [json.loads(line)["state"] for line in lines] == ["stopped", "lost"]
    with running(Place(address), job="reconcile") as run:
        run.result(is_settled=False)
    assert b"  not settled  " in onward("pipeline", "runs", "--job", "reconcile").stdout


def test_numbers_of_runs_stand_to_the_right_with_separators(capsys: pytest.CaptureFixture[str]):
    more = dict.fromkeys(("run", "job", "state", "started", "took", "error"), "-")
    _print_runs(
        [
            {**more, "rows": 1_234_567, "rows/s": 9, "lag": None, "files": 1_000},
            {**more, "rows": 7, "rows/s": 12_345, "lag": 0, "files": None},
        ]
    )
    assert [line[32:] for line in capsys.readouterr().out.splitlines()] == [
        "     ROWS  ROWS/S  LAG  FILES  ERROR",
        "1,234,567       9    -  1,000  -",
        "        7  12,345    0      -  -",
    ]
    _print_runs([])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sql", "drop table messages"], b"a query only asks"),
        (["sql", "select 1", "--lake", "nowhere"], b"there is no lake at "),
        (["pipeline", "read", "nothere"], b"topic 'nothere' does not exist"),
        (["pipeline", "stats", "not*"], b"topic 'not*' does not exist"),
        (["pipeline", "archive", "nothere", "--lake", "lake"], b"topic 'nothere' does not exist"),
        (["pipeline", "archive", "--lake", "stdin"], b"is not a folder"),
        (["pipeline", "compact", "--lake", "nowhere"], b"there is no lake at "),
        (["pipeline", "replay", "nothere", "--to-topic", "a"], b"topic 'nothere' does not exist"),
        (["pipeline", "trace", "--id", "bla"], b"'bla' is no id of a message"),
    ],
)
def test_a_mistake_is_told_before_spark_starts(
    onward: Onward, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: bytes
):
    monkeypatch.setattr(sessions, "session", None)  # Whoever calls it fails.
    done = onward(*arguments)
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1), done.stderr
    assert words in done.stderr


def test_a_topic_that_only_the_lake_has_is_no_mistake(address: str, tmp_path: Path):
    lake = str(tmp_path / "lake")
    open_lake(lake, create=True).commit(gaps=[Gap("old", 0, 5)])
    check_named(Place(address), "read", {"topics": ["old", "@schedule"], "lake": lake})
    with pytest.raises(UnknownTopic):
        check_named(Place(address), "read", {"topics": ["old"]})


def test_the_page_of_help_has_whole_sentences(onward: Onward):
    assert b"..." not in onward("pipeline", "--help").stdout.partition(b"Commands:")[2]


def test_a_signal_leaves_a_job_with_one_line(capsys: pytest.CaptureFixture[str]):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    for number in (signal.SIGINT, signal.SIGTERM):
        with pytest.raises(click.exceptions.Exit) as leaving, Stop().in_one_line():
            signal.raise_signal(number)
        assert leaving.value.exit_code == 130
        assert capsys.readouterr().err == "stopped; run it again to go on\n"
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert logging.root.isEnabledFor(logging.CRITICAL)


@pytest.mark.parametrize(
    ("run_id", "dry_run", "said"),
    [("fix-17", False, LINE), (None, True, LINE), (None, False, ANEW)],
)
def test_only_a_run_that_can_go_on_is_said_to(
    run_id: str | None, dry_run: bool, said: str, capsys: pytest.CaptureFixture[str]
):
    line = stopped_line(run_id, dry_run=dry_run)
    with pytest.raises(click.exceptions.Exit), Stop(line).in_one_line():
        signal.raise_signal(signal.SIGINT)
    assert capsys.readouterr().err == f"{said}\n"


def test_a_job_that_follows_is_asked_first_and_left_by_the_second_signal():
    stop = Stop()
    asked: list[bool] = []

    def follow() -> None:
        stop.listen(is_gentle=True)
        for _ in range(2):
            asked.append(stop())
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(click.exceptions.Exit), stop.in_one_line():
        follow()
    assert asked == [False, True]


def test_what_fails_without_a_signal_is_as_it_was():
    with pytest.raises(ValueError, match="no"), Stop().in_one_line():
        raise ValueError("no")


def test_the_last_lines_of_a_pipe_are_kept():
    with listening() as pipe:
        done = subprocess.run(
            [sys.executable, "-c", "import sys\nfor n in range(300): print(n, file=sys.stderr)"],
            stderr=pipe, timeout=60,
        )  # fmt: skip
    deadline_s = time.monotonic() + 60
    while heard()[-1:] != ["299"] and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert done.returncode == 0
    assert heard() == [str(number) for number in range(100, 300)]


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
