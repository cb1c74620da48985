"""A lake is a folder: its commits have one order, whoever makes them, and nothing else counts."""

import errno
import json
import threading
from pathlib import Path

import pytest

from onward.errors import (
    Conflict,
    Corruption,
    DiskFull,
    Forbidden,
    InvalidRequest,
    Unavailable,
)
from onward.pipeline.lake import SNAPSHOTS_KEPT, lake_folder, open_lake, said_plainly
from onward.pipeline.lake_state import Gap, LakeFile


def file(first: int, end: int) -> LakeFile:
    path = f"topic=orders/date=2026-11-16/{first:020}-{end:020}.parquet"
    return LakeFile(path=path, topic="orders", first=first, end=end, bytes=9)


def test_what_one_commits_the_next_one_finds(tmp_path: Path):
    lake = open_lake(tmp_path / "new" / "lake", create=True)
    lake.commit(add=[file(0, 10)])
    lake.commit(add=[file(10, 20)], origins={"orders": "1@5"})
    state = open_lake(tmp_path / "new" / "lake").state()
    assert (state.number, state.end_of("orders")) == (2, 20)
    assert state.origins == {"orders": "1@5"}
    assert state.files["orders"] == (file(0, 10), file(10, 20))


def test_one_who_opened_before_sees_what_others_commit_after(tmp_path: Path):
    early = open_lake(tmp_path, create=True)
    assert early.state().number == 0
    open_lake(tmp_path).commit(add=[file(0, 10)])
    assert early.state().end_of("orders") == 10


def test_of_two_who_archive_the_same_only_one_succeeds(tmp_path: Path):
    one, other = open_lake(tmp_path, create=True), open_lake(tmp_path)
    assert other.state().number == 0
    one.commit(add=[file(0, 10)])
    with pytest.raises(Conflict, match="has offset 0 of topic 'orders' already"):
        other.commit(add=[file(0, 20)])
    other.commit(add=[file(10, 20)])
    assert one.state().end_of("orders") == 20


def test_commits_of_many_at_once_are_all_there_in_one_order(tmp_path: Path):
    open_lake(tmp_path, create=True)
    failures: list[BaseException] = []

    def commit_some(topic: str) -> None:
        lake = open_lake(tmp_path)
        try:
            for first in range(20):
                lake.commit(gaps=[Gap(topic, first, first + 1)])
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=commit_some, args=(f"t{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    state = open_lake(tmp_path).state()
    assert state.number == 80
    assert [state.end_of(f"t{n}") for n in range(4)] == [20] * 4


def test_a_snapshot_saves_reading_the_commits_before_it(tmp_path: Path):
    lake = open_lake(tmp_path, create=True)
    for first in range(450):
        lake.commit(gaps=[Gap("orders", first, first + 1)])
    snapshots = sorted((tmp_path / "_onward" / "snapshots").iterdir())
    assert [int(path.stem) for path in snapshots] == [200, 300, 400]
    assert len(snapshots) == SNAPSHOTS_KEPT
    for path in (tmp_path / "_onward" / "commits").iterdir():
        if int(path.stem) <= 400:
            path.write_text("not read any more")
    assert open_lake(tmp_path).state() == lake.state()


def test_a_commit_leaves_nothing_beside_it(tmp_path: Path):
    open_lake(tmp_path, create=True).commit(gaps=[Gap("orders", 0, 1)])
    assert [path.name for path in (tmp_path / "_onward" / "commits").iterdir()] == [
        "000000000001.json"
    ]


def test_a_folder_with_other_files_is_not_taken_for_a_lake(tmp_path: Path):
    (tmp_path / "holiday.jpg").write_text("x")
    for create in (True, False):
        with pytest.raises(InvalidRequest, match="is not an onward lake and is not empty"):
            open_lake(tmp_path, create=create)
    assert [path.name for path in tmp_path.iterdir()] == ["holiday.jpg"]


def test_a_lake_that_does_not_exist_is_made_only_when_asked_for(tmp_path: Path):
    with pytest.raises(InvalidRequest, match="there is no lake at"):
        open_lake(tmp_path / "none")
    with pytest.raises(InvalidRequest, match="there is no lake in it yet"):
        open_lake(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidRequest, match="is not a folder"):
        open_lake(tmp_path / "file", create=True)


def test_a_lake_of_a_newer_format_is_left_alone(tmp_path: Path):
    open_lake(tmp_path, create=True)
    (tmp_path / "_onward" / "lake.json").write_text('{"format": 2, "made_by": "onward 9"}')
    with pytest.raises(InvalidRequest, match="has format 2, made by 'onward 9'"):
        open_lake(tmp_path, create=True)


def test_a_path_that_is_no_folder_is_refused():
    with pytest.raises(InvalidRequest, match="'s3://bucket/lake' is not a folder"):
        open_lake("s3://bucket/lake", create=True)
    with pytest.raises(InvalidRequest, match="none is named"):
        open_lake("")
    assert lake_folder("lake").is_absolute()


def test_a_damaged_commit_is_named(tmp_path: Path):
    lake = open_lake(tmp_path, create=True)
    lake.commit(add=[file(0, 10)])
    path = tmp_path / "_onward" / "commits" / "000000000001.json"
    text = path.read_text()
    path.write_text(text[:20])
    with pytest.raises(Corruption, match="000000000001.json' of the lake cannot be read"):
        open_lake(tmp_path).state()
    path.write_text(json.dumps(json.loads(text) | {"number": 3}))
    with pytest.raises(Corruption, match="000000000001.json' does not fit"):
        open_lake(tmp_path).state()


def test_what_the_system_refuses_is_said_in_one_sentence(tmp_path: Path):
    with pytest.raises(Forbidden, match="no permission for '/lake/x'"), said_plainly(tmp_path):
        raise PermissionError(errno.EACCES, "Permission denied", "/lake/x")
    with pytest.raises(DiskFull, match="no space left for the lake"), said_plainly(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(Unavailable, match="cannot be used: .*Stale"), said_plainly(tmp_path):
        raise OSError(errno.ESTALE, "Stale file handle")
