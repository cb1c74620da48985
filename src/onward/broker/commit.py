"""The seam where a write becomes durable. Nothing else knows how.

`LocalCommit` writes and syncs in one storage thread, so the loop never waits for the disk and the
next commit fills meanwhile. `InlineCommit` does it on the spot: for a log in memory. A cluster will
be the third: its `done` comes when a majority has it.

`done(error)` is called on the loop's thread, once, in the order of the commits.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from onward.log.log import Log, Write

Done = Callable[[Exception | None], None]
_Task = tuple[Write, bool, Done]


class Commit(Protocol):
    """Makes writes durable, one after another."""

    def submit(self, write: Write, *, sync: bool, done: Done) -> None: ...
    def close(self) -> None: ...


class LocalCommit:
    """One thread that writes and syncs."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="onward-storage", daemon=True)
        self._thread.start()

    def submit(self, write: Write, *, sync: bool, done: Done) -> None:
        """Hand a write to the storage thread."""
        self._tasks.put((write, sync, done))

    def close(self) -> None:
        """Finish what was submitted and end the thread."""
        self._tasks.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            write, sync, done = task
            error = _perform(self._log, write, sync=sync)
            self._loop.call_soon_threadsafe(done, error)


class InlineCommit:
    """Writes at once, without a thread."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._loop = asyncio.get_running_loop()

    def submit(self, write: Write, *, sync: bool, done: Done) -> None:
        """Write now; say so in the loop's next turn."""
        error = _perform(self._log, write, sync=sync)
        self._loop.call_soon(done, error)

    def close(self) -> None:
        """Nothing is ever left to do."""


def _perform(log: Log, write: Write, *, sync: bool) -> Exception | None:
    try:
        log.perform(write, sync=sync)
    except Exception as error:  # noqa: BLE001  (handed on: whoever waits decides)
        return error
    return None
