"""`onward log`: what people see of a log, sound and damaged."""

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

import onward
from onward.cli import ExitCode, run
from onward.log.disk import OsDisk
from onward.settings import LogSettings, Settings

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A log with two topics, closed without a checkpoint, as a killed broker leaves it."""
    path = tmp_path / "log"
    # No space taken ahead: there would be more zeros to read than entries.
    settings = Settings(log=LogSettings(folder=str(path), preallocate_bytes=0))
    with onward.connect_sync(f"file:{path}", settings=settings) as mq:
        for number in range(10):
            mq.publish("orders", f"order {number}", key=str(number))
            mq.publish("other", f"\x1b[31m{number}")
    for derived in [*path.glob("checkpoint-*"), *path.glob("*.run-*")]:
        derived.unlink()
    return path


def small(folder: Path) -> Settings:
    log = LogSettings(folder=str(folder), preallocate_bytes=0, segment_bytes_max=65_536)
    return Settings(log=log)


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """A log of one segment, as a broker leaves it that was stopped in order."""
    path = tmp_path / "stopped"
    with onward.connect_sync(f"file:{path}", settings=small(path)) as mq:
        mq.publish_many("orders", [f"order {number}" for number in range(10)])
    return path


def damage(folder: Path, position: int) -> None:
    (segment,) = folder.glob("*.log")
    with segment.open("r+b") as file:
        file.seek(position)
        file.write(b"\xff\xff")


def position_of(folder: Path, index: int, capsys: Captured) -> int:
    assert run(["log", "dump", str(folder), "--json"]) == ExitCode.OK
    entries = map(json.loads, capsys.readouterr().out.splitlines())
    return next(int(entry["position"]) for entry in entries if entry["index"] == index)


def mount_read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the operating system answer as for a file system that is mounted read-only."""
    really_open = os.open

    def open_(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
            raise OSError(errno.EROFS, "Read-only file system", path)
        return really_open(path, flags, mode)

    monkeypatch.setattr("onward.log.disk.os.open", open_)


@pytest.mark.parametrize("has_lock_file", [True, False])
@pytest.mark.parametrize("command", ["check", "dump"])
def test_a_log_on_a_read_only_file_system_is_read(
    command: str, has_lock_file: bool, stopped: Path, capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if not has_lock_file:
        (stopped / "lock").unlink()
    mount_read_only(monkeypatch)
    assert run(["log", command, str(stopped)]) == ExitCode.OK
    assert ("has no lock file" in capsys.readouterr().err) is not has_lock_file
    assert run(["log", command, str(stopped), "--running"]) == ExitCode.OK
    assert run(["log", "repair", str(stopped), "--yes"]) == ExitCode.FAILED


def test_a_broker_that_writes_through_another_mount_is_noticed(
    stopped: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlock = OsDisk().lock(str(stopped / "lock"))
    mount_read_only(monkeypatch)
    assert run(["log", "check", str(stopped)]) == ExitCode.UNAVAILABLE
    assert "is in use by a broker" in capsys.readouterr().err
    unlock()
    assert run(["log", "check", str(stopped)]) == ExitCode.OK


def test_a_sound_log_passes(folder: Path, capsys: Captured):
    assert run(["log", "check", str(folder)]) == ExitCode.OK
    heading, segment = capsys.readouterr().out.splitlines()
    assert heading.split()[0] == "SEGMENT"
    assert segment.split()[1:3] == ["24", "21"]
    assert segment.split()[-1] == "ok"


def test_a_damaged_log_exits_with_5_and_says_what_is_lost(folder: Path, capsys: Captured):
    damage(folder, position_of(folder, 7, capsys) + 80)
    assert run(["log", "check", str(folder)]) == ExitCode.CORRUPTION
    out = capsys.readouterr().out
    assert "lost: entry 7" in out
    assert "topic orders: offsets 1 to 1" in out
    assert run(["log", "check", str(folder), "--json"]) == ExitCode.CORRUPTION
    *segments, whole = map(json.loads, capsys.readouterr().out.splitlines())
    assert whole["damaged"] is True
    assert [segment["state"] for segment in segments] == ["damaged"]


def test_a_dump_shows_entries_and_bodies_safely(folder: Path, capsys: Captured):
    assert run(["log", "dump", str(folder)]) == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 24
    assert "topic created" in lines[0]
    assert run(["log", "dump", str(folder), "--topic", "other", "--bodies"]) == ExitCode.OK
    out = capsys.readouterr().out
    assert "\\x1b[31m7" in out
    assert "\x1b" not in out
    assert "orders" not in out


def test_a_dump_begins_where_it_is_told(folder: Path, capsys: Captured):
    assert run(["log", "dump", str(folder), "--from-index", "22", "--json"]) == ExitCode.OK
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [entry["index"] for entry in entries] == [22, 23, 24]


def test_a_dump_of_a_topic_that_is_not_there_is_an_error(folder: Path, capsys: Captured):
    for topic in ("nosuch", "99"):
        assert run(["log", "dump", str(folder), "--topic", topic]) == ExitCode.FAILED
        assert f"no topic '{topic}'" in capsys.readouterr().err
    assert run(["log", "dump", str(folder), "--topic", "1"]) == ExitCode.OK


def test_a_dump_of_a_damaged_log_goes_on_behind_the_damage(folder: Path, capsys: Captured):
    damage(folder, position_of(folder, 7, capsys) + 80)
    assert run(["log", "dump", str(folder)]) == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 24
    assert "are damaged" in lines[6]


def test_nothing_is_repaired_without_a_yes(folder: Path, capsys: Captured):
    damage(folder, position_of(folder, 7, capsys) + 80)
    assert run(["log", "repair", str(folder)]) == ExitCode.USAGE
    assert run(["log", "repair", str(folder), "--yes"]) == ExitCode.CORRUPTION
    assert "--accept-loss" in capsys.readouterr().out
    assert run(["log", "check", str(folder)]) == ExitCode.CORRUPTION


def test_after_a_repair_the_check_passes_and_the_rest_can_be_read(folder: Path, capsys: Captured):
    damage(folder, position_of(folder, 7, capsys) + 80)
    assert run(["log", "repair", str(folder), "--yes", "--accept-loss"]) == ExitCode.OK
    out = capsys.readouterr().out
    assert "saved as" in out
    assert "the log is sound" in out
    assert run(["log", "check", str(folder)]) == ExitCode.OK
    with onward.connect_sync(f"file:{folder}") as mq:
        assert [m.offset for m in mq.read("orders")] == [0, *range(2, 10)]
        assert [m.offset for m in mq.read("other")] == list(range(10))
        assert mq.publish("orders", "new").offset == 10


def test_a_torn_tail_is_cut_without_being_asked_about_loss(folder: Path, capsys: Captured):
    position = position_of(folder, 22, capsys)
    (segment,) = folder.glob("*.log")
    with segment.open("r+b") as file:
        file.truncate(position + 100)
    assert run(["log", "check", str(folder)]) == ExitCode.OK
    assert "never confirmed" in capsys.readouterr().out
    assert run(["log", "repair", str(folder), "--yes"]) == ExitCode.OK
    assert segment.with_name(f"{segment.name}.broken-{position}").stat().st_size == 100
    assert run(["log", "check", str(folder)]) == ExitCode.OK


def test_a_sound_log_needs_no_repair(folder: Path, capsys: Captured):
    assert run(["log", "repair", str(folder)]) == ExitCode.OK
    assert capsys.readouterr().out == "nothing to repair\n"


def test_a_missing_segment_is_damage_and_never_nothing_to_repair(folder: Path, capsys: Captured):
    (folder / "00000000000000000099.idx").touch()
    assert run(["log", "check", str(folder)]) == ExitCode.CORRUPTION
    assert "00000000000000000099.log is missing" in capsys.readouterr().out
    assert run(["log", "repair", str(folder), "--yes"]) == ExitCode.CORRUPTION
    said = capsys.readouterr().out
    assert "nothing to repair" not in said
    assert "offsets and event ids are given again" in said
    assert (folder / "00000000000000000099.idx").exists()


def test_a_missing_newest_segment_is_given_up_when_what_that_costs_is_accepted(
    stopped: Path, capsys: Captured
):
    (stopped / "00000000000000000001.log").unlink()
    before = sorted(stopped.iterdir())
    assert run(["log", "check", str(stopped)]) == ExitCode.CORRUPTION
    said = capsys.readouterr().out
    assert "missing, but the newest checkpoint knows what it held" in said
    assert "topic orders: offsets 0 to 9" in said
    assert run(["log", "repair", str(stopped), "--yes"]) == ExitCode.CORRUPTION
    assert "00000000000000000001.log was the newest segment" in capsys.readouterr().out
    assert sorted(stopped.iterdir()) == before
    assert run(["log", "repair", str(stopped), "--accept-loss"]) == ExitCode.USAGE
    assert sorted(stopped.iterdir()) == before
    assert run(["log", "repair", str(stopped), "--accept-loss", "--yes"]) == ExitCode.OK
    assert "given up: 00000000000000000001.log, which is missing" in capsys.readouterr().out
    assert run(["log", "check", str(stopped)]) == ExitCode.OK
    with onward.connect_sync(f"file:{stopped}") as mq:
        assert mq.publish("orders", "new").offset == 10
        assert [(m.offset, m.text) for m in mq.read("orders")] == [(10, "new")]


def test_a_first_segment_of_no_bytes_is_damage(folder: Path, capsys: Captured):
    with onward.connect_sync(f"file:{folder}", settings=small(folder)) as mq:
        mq.publish_many("orders", ["x" * 100] * 1000)
        mq.publish("orders", "last")
    first, *rest = sorted(folder.glob("*.log"))
    assert rest
    first.write_bytes(b"")
    assert run(["log", "check", str(folder)]) == ExitCode.CORRUPTION
    assert "topic orders: offsets 0 to 9" in capsys.readouterr().out


def test_a_folder_in_use_is_checked_only_when_that_is_wanted(folder: Path, capsys: Captured):
    with onward.connect_sync(f"file:{folder}"):
        assert run(["log", "check", str(folder)]) == ExitCode.UNAVAILABLE
        assert run(["log", "check", str(folder), "--running"]) == ExitCode.OK
        assert run(["log", "dump", str(folder), "--running"]) == ExitCode.OK


def test_a_folder_without_a_log_is_said_and_left_alone(tmp_path: Path, capsys: Captured):
    assert run(["log", "check", str(tmp_path)]) == ExitCode.FAILED
    assert "there is no log in" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def carried(tmp_path: Path) -> Path:
    """A log whose retention has carried two dead letters over, of which nothing else is left."""
    path = tmp_path / "carried"
    log = LogSettings(folder=str(path), preallocate_bytes=0, retention_ms=1_000)
    with onward.connect_sync(f"file:{path}", settings=Settings(log=log)) as mq:
        mq.create_topic("kept", retention="1h")
        mq.publish("kept", "zero")
        mq.publish_many("orders", ["bad" * 9_000, "worse" * 9_000])
        with mq.consume("orders", group="work") as consumer:
            for delivery in consumer.fetch(2, wait="10s"):
                delivery.reject("no such order")
        deadline_s = time.monotonic() + 60
        while mq.topic("orders").carried < 2:
            assert time.monotonic() < deadline_s
            # A topic that ends makes the broker look for space at once.
            mq.create_topic("brief")
            mq.delete_topic("brief")
            time.sleep(0.2)
    return path


def carried_entry(folder: Path, capsys: Captured) -> dict[str, Any]:
    assert run(["log", "dump", str(folder), "--json", "--bodies"]) == ExitCode.OK
    entries = map(json.loads, capsys.readouterr().out.splitlines())
    found: dict[str, Any] = next(entry for entry in entries if entry["kind"] == "carried")
    return found


def test_a_dump_shows_what_outlives_retention(carried: Path, capsys: Captured):
    entry = carried_entry(carried, capsys)
    assert (entry["name"], entry["count"]) == ("orders", 2)
    assert [(one["offset"], one["body"][:5]) for one in entry["messages"]] == [
        (0, "badba"),
        (1, "worse"),
    ]
    assert run(["log", "dump", str(carried), "--topic", "orders"]) == ExitCode.OK
    assert "orders: 2 messages from 0 on" in capsys.readouterr().out


def test_a_repair_gives_up_damaged_messages_that_outlived_retention_and_nothing_else(
    carried: Path, capsys: Captured, caplog: pytest.LogCaptureFixture
):
    entry = carried_entry(carried, capsys)
    *_, segment = (one for one in sorted(carried.glob("*.log")) if int(one.stem) <= entry["index"])
    with segment.open("r+b") as file:
        file.seek(entry["position"] + 5_000)
        file.write(b"\xff" * 9)
    assert run(["log", "check", str(carried)]) == ExitCode.CORRUPTION
    assert run(["log", "repair", str(carried), "--yes", "--accept-loss"]) == ExitCode.OK
    said = capsys.readouterr().out
    assert "the log is sound" in said
    assert run(["log", "check", str(carried)]) == ExitCode.OK
    capsys.readouterr()
    address = ["--address", f"file:{carried}"]
    assert run(["dead", "redrive", "work", "--yes", *address]) == ExitCode.OK
    counted, gone = capsys.readouterr().out.splitlines()
    assert counted == "0 dead letters redriven"
    assert gone.startswith("2 cannot be redriven: the message is gone from the log (`onward dead")
    with onward.connect_sync(f"file:{carried}") as mq:
        assert [message.body for message in mq.read("kept")] == [b"zero"]
        assert mq.group("work").dead == 2
        with caplog.at_level("WARNING", "onward.client"):
            assert mq.redrive("work") == 0
        assert "group 'work': 2 dead letters cannot be redriven" in caplog.text
        assert mq.purge("work") == 2
