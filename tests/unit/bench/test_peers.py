import tempfile
from pathlib import Path

import pytest

from onward.bench import BENCHES, peers
from onward.bench.peers import PeerMissing, program, program_version, started
from onward.errors import Unavailable


def test_every_benchmark_has_a_module_that_runs_it():
    from importlib import import_module

    for name in BENCHES:
        assert callable(import_module(f"onward.bench.{name.replace('-', '_')}").run)


def test_a_program_that_is_not_installed_is_said_with_how_to_get_it():
    with pytest.raises(PeerMissing, match="make setup-bench"):
        program("no-such-server-anywhere")


def test_redis_py_is_measured_as_pip_installs_it_and_with_hiredis_only_beside():
    pytest.importorskip("redis")
    assert "RESP" in peers.redis_parser(peers.REDIS_PY).__name__
    figures = {peers.REDIS_PY: 10.0, peers.REDIS_PY_HIREDIS: 40.0}
    assert peers.beside(figures, onward=20.0) == {
        peers.REDIS_PY_HIREDIS: {"figure": 40.0, "ratio": 0.5}
    }
    assert figures == {peers.REDIS_PY: 10.0}
    assert peers.beside(figures, onward=20.0) == {}


def test_a_parser_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    for client in (peers.REDIS_PY, peers.REDIS_PY_HIREDIS):
        with pytest.raises(PeerMissing, match="make setup-bench"):
            peers.redis_parser(client)


def test_a_missing_server_leaves_no_folder_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(peers.COMMANDS, "gone", lambda *_: ([program("no-such-server")], ""))
    with pytest.raises(PeerMissing), started("gone", folder=tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_a_server_that_dies_is_quoted_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    dying = ["sh", "-c", "echo first; echo out of luck; exit 3"]
    monkeypatch.setitem(peers.COMMANDS, "dying", lambda *_: (dying, ""))
    with (
        pytest.raises(Unavailable, match="ended with 3, and said last: out of luck"),
        started("dying", folder=tmp_path),
    ):
        pass


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["onward", "redis", "nats", "beanstalkd"])
def test_a_server_starts_on_an_empty_folder_and_leaves_nothing_behind(name: str, tmp_path: Path):
    try:
        with started(name, folder=tmp_path) as server:
            assert server.resident_mb() > 1
            assert server.child.poll() is None
    except PeerMissing as missing:
        pytest.skip(str(missing))
    assert server.child.poll() is not None
    assert not list(tmp_path.iterdir())


def test_a_folder_that_postgresql_cannot_use_is_said_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    failing = tmp_path / "initdb"
    failing.write_text("#!/bin/sh\necho first; echo permission denied >&2; exit 1\n")
    failing.chmod(0o755)
    monkeypatch.setattr(peers, "program", lambda name: str(failing))
    monkeypatch.setattr(peers, "_as_postgres", lambda place: [])
    with (
        pytest.raises(PeerMissing, match="initdb said: permission denied .*--folder"),
        started("postgresql", folder=tmp_path),
    ):
        pass


@pytest.mark.e2e
def test_postgresql_starts_in_a_folder_that_its_user_can_reach():
    with tempfile.TemporaryDirectory(prefix="onward-bench-test-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        try:
            with started("postgresql", folder=folder) as server:
                assert server.child.poll() is None
        except PeerMissing as missing:
            pytest.skip(str(missing))
        assert server.child.poll() is not None
        assert not list(folder.iterdir())


@pytest.mark.needs_redis
def test_a_server_gets_its_folder_by_its_whole_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with started("onward", folder=Path()) as server:
        assert server.folder.is_absolute()
        assert server.folder.parent == tmp_path


def test_the_version_of_a_program_is_a_number():
    try:
        assert program_version("redis-server")[0].isdigit()
    except PeerMissing as missing:
        pytest.skip(str(missing))
