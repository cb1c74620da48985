"""The seam where a write becomes durable. Nothing else knows how, or what that is worth.

    append(write, sync, done)   done(error) is called on the loop's thread once the entries are
                                committed, or will never be; in the order of the writes. After an
                                error, all writes that were appended by then end with one
    durability_of(index)        what a receipt for an entry may promise now

`LocalCommit` writes and syncs in one storage thread, so the loop never waits for the disk and the
next commit fills meanwhile. `InlineCommit` does it on the spot: for a log in memory. In a cluster
`done` comes when a majority has the entries. As many writes as `in_flight_max` may be appended
before the first is done.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from queue import SimpleQueue

from onward.log.log import Log, Write
from onward.protocol.payloads import Durability

Done = Callable[[Exception | None], None]
_Task = tuple[Write, bool, Done]


class Commit(ABC):
    """Makes writes durable, one after another."""

    in_flight_max = 1
    """How many writes may be under way. More than one helps only where a commit takes a round
    trip: on one disk, what waits for the write before it is better written together."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._loop = asyncio.get_running_loop()

    @abstractmethod
    def append(self, write: Write, *, sync: bool, done: Done) -> None:
        """Write entries; call `done` when they are committed, as safely as `sync` asks for."""

    def durability_of(self, index: int) -> int:
        """Return what is promised for the entry with this index: synced here, or in memory."""
        is_synced = index <= self._log.synced_index
        return int(Durability.DISK if is_synced else Durability.MEMORY)

    def close(self) -> None:  # noqa: B027  (most commits have nothing to finish)
        """Finish what was appended."""

    def _perform(self, write: Write, *, sync: bool) -> Exception | None:
        try:
            self._log.perform(write, sync=sync)
        except Exception as error:  # noqa: BLE001  (handed on: whoever waits decides)
            return error
        return None


class LocalCommit(Commit):
    """One thread that writes and syncs."""

    def __init__(self, log: Log) -> None:
        super().__init__(log)
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="onward-storage", daemon=True)
        self._thread.start()

    def append(self, write: Write, *, sync: bool, done: Done) -> None:
        """Hand a write to the storage thread."""
        self._tasks.put((write, sync, done))

    def close(self) -> None:
        """Finish what was appended and end the thread."""
        self._tasks.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            write, sync, done = task
            error = self._perform(write, sync=sync)
            self._loop.call_soon_threadsafe(done, error)


class InlineCommit(Commit):
    """Writes at once, without a thread."""

    def append(self, write: Write, *, sync: bool, done: Done) -> None:
        """Write now; call `done` in the loop's next iteration."""
        error = self._perform(write, sync=sync)
        self._loop.call_soon(done, error)
