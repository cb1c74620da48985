from pathlib import Path

import pytest

from onward.bench import peers
from onward.bench.peers import PeerMissing, Server, program
from onward.bench.report import Options
from onward.bench.rounds import alternate, server_of


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> None:
    listen = (
        "import socket, sys, time; s = socket.create_server(('127.0.0.1', int(sys.argv[1])))\n"
        "while True: s.accept()"
    )
    python = program("python3")
    for name in ("onward", "redis"):
        monkeypatch.setitem(
            peers.COMMANDS, name, lambda port, *_: ([python, "-c", listen, str(port)], "as it is")
        )
    monkeypatch.setitem(peers.COMMANDS, "nats", lambda *_: ([program("no-such-server")], ""))


def test_a_client_belongs_to_the_server_that_its_name_begins_with():
    names = ("onward", "redis-py", "redis-py+hiredis", "nats-py", "postgresql+claims")
    assert [server_of(name) for name in names] == ["onward", "redis", "redis", "nats", "postgresql"]


@pytest.mark.e2e
def test_rounds_alternate_and_each_begins_with_an_empty_folder(servers: None, tmp_path: Path):
    seen: list[tuple[str, Path]] = []

    def measure(server: Server) -> float:
        seen.append((server.name, server.folder))
        return float(len(seen))

    compared = alternate(
        {"onward": measure, "redis-py": measure},
        Options(folder=tmp_path, repeat=2), rounds=5, say=str,
    )  # fmt: skip
    assert [name for name, _ in seen] == ["onward", "redis", "onward", "redis"]
    assert len({folder for _, folder in seen}) == 4
    assert compared.figures(max) == {"onward": 3.0, "redis-py": 4.0}
    assert compared.seen["redis-py"].settings == "as it is"
    assert not list(tmp_path.iterdir())


@pytest.mark.e2e
def test_a_missing_peer_is_said_once_and_the_others_are_measured(servers: None, tmp_path: Path):
    said: list[str] = []
    options = Options(folder=tmp_path, repeat=3, say=said.append)
    compared = alternate(
        {"nats-py": lambda server: 1.0, "onward": lambda server: 2.0},
        options, rounds=1, say=str,
    )  # fmt: skip
    assert list(compared.missing) == ["nats-py"]
    assert compared.figures(sum) == {"onward": 6.0}
    assert len([line for line in said if line.startswith("missing: ")]) == 1


def test_a_client_library_that_is_missing_counts_as_a_missing_peer(servers: None, tmp_path: Path):
    def without_library(server: Server) -> float:
        raise PeerMissing("redis-py is not installed (make setup-bench)")

    compared = alternate({"redis-py": without_library}, Options(folder=tmp_path), rounds=1, say=str)
    assert compared.missing == {"redis-py": "redis-py is not installed (make setup-bench)"}
