"""A real broker for the pages: `onward serve`, on a free port, with an empty folder."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .examples import Shell

START_S_MAX = 30.0
SERVE = "from onward.cli import main; main()"


class Served:
    """One broker process."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._lines = folder / "serve.txt"
        given = ["serve", "--server.port", "0", "--log.folder", str(folder / "onward-data")]
        given += options
        kept = {name: value for name, value in os.environ.items() if "ONWARD" not in name}
        with self._lines.open("wb") as lines:
            self._process = subprocess.Popen(
                [sys.executable, "-c", SERVE, *given], stderr=lines, cwd=folder, env=kept
            )

    def wait_ready(self) -> str:
        """Return the address, once it is there."""
        deadline_s = time.monotonic() + START_S_MAX
        while time.monotonic() < deadline_s and self._process.poll() is None:
            if found := re.search(r"listening on \S+:(\d+)", self._lines.read_text()):
                return f"localhost:{found[1]}"
            time.sleep(0.02)
        raise AssertionError(f"the broker did not start: {self._lines.read_text()}")

    def stop(self) -> int:
        """SIGTERM; return the exit code."""
        self._process.terminate()
        return self._process.wait(START_S_MAX)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    broker = Served(tmp_path)
    yield broker
    assert broker.stop() == 0


@pytest.fixture
def address(served: Served) -> str:
    return served.wait_ready()


@pytest.fixture
def shell(tmp_path: Path, address: str) -> Shell:
    return Shell(tmp_path, address=address)
