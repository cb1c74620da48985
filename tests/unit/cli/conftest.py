"""A real broker for the commands: one process for all tests of a module, on a free port."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from onward.cli import run

PROGRAM = [sys.executable, "-c", "from onward.cli import main; main()"]

Onward = Callable[..., subprocess.CompletedProcess[bytes]]


def bare_environ() -> dict[str, str]:
    """Return the environment without any variable of ours."""
    return {name: value for name, value in os.environ.items() if not name.startswith("ONWARD_")}


class Served:
    """`onward serve` as a process, and what it said on stderr."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder / "served"
        self._lines = folder / "serve.lines"
        given = [
            "--config",
            os.devnull,
            "--server.port",
            "0",
            "--log.folder",
            str(self.folder),
            *options,
        ]
        with self._lines.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*PROGRAM, "serve", *given],
                stderr=stderr, stdout=subprocess.DEVNULL, env=bare_environ(), cwd=folder,
            )  # fmt: skip

    @property
    def said(self) -> str:
        return self._lines.read_text()

    def wait_ready(self) -> str:
        """Return the address, once it is there."""
        deadline_s = time.monotonic() + 30
        while time.monotonic() < deadline_s and self.process.poll() is None:
            if found := re.search(r"listening on (\S+:\d+)", self.said):
                return found[1]
            time.sleep(0.02)
        raise AssertionError(f"the broker did not start: {self.said}")

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(30)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    served = Served(tmp_path_factory.mktemp("broker"))
    yield served.wait_ready()
    assert served.stop() == 0


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Start brokers that a test may kill."""
    started: list[Served] = []

    def start(*options: str) -> Served:
        started.append(Served(tmp_path, *options))
        return started[-1]

    yield start
    for served in started:
        served.process.kill()
        served.process.wait()


@pytest.fixture
def onward(
    address: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> Onward:
    """Run a command against the broker: in this process, which saves the start of another."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("ONWARD_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ONWARD_ADDRESS", address)

    def call(*arguments: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        (tmp_path / "stdin").write_bytes(given)
        with (tmp_path / "stdin").open() as stdin, monkeypatch.context() as patched:
            patched.setattr("sys.stdin", stdin)
            code = run(arguments)
        out, err = capfdbinary.readouterr()
        return subprocess.CompletedProcess(arguments, code, out, err)

    return call
