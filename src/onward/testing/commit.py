"""A storage thread without a thread: commits that take virtual time.

    append ──▶ write, at a random time ──▶ sync, later ──▶ done, later still

The power can go at any of these moments, and the next commit fills meanwhile, as with the real
storage thread. A commit whose machine is dead does nothing and says nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque

from onward.broker.commit import Commit, Done
from onward.log.log import DiskFailed, Log, Write


class _Appended:
    """One write on its way."""

    def __init__(self, done: Done) -> None:
        self.done = done
        self.is_done = False
        self.error: Exception | None = None


class SimulatedCommit(Commit):
    """A commit for `VirtualLoop`; its time comes from the loop's chance."""

    def __init__(self, log: Log) -> None:
        super().__init__(log)
        self.is_dead = False
        self._in_flight: deque[_Appended] = deque()

    def append(self, write: Write, *, sync: bool, done: Done) -> None:
        """Write after a while; `done` is called on the loop, in the order of the commits."""
        appended = _Appended(done)
        self._in_flight.append(appended)

        def written(future: asyncio.Future[None]) -> None:
            if sync and future.exception() is None:
                synced = self._loop.run_in_executor(None, self.sync, write)
                synced.add_done_callback(settle)
            else:
                settle(future)

        def settle(future: asyncio.Future[None]) -> None:
            error = future.exception()
            assert error is None or isinstance(error, Exception)
            appended.is_done, appended.error = True, error
            self._settle()

        self._loop.run_in_executor(None, self.write, write).add_done_callback(written)

    def _settle(self) -> None:
        """Report what is done, as far as all in front of it is."""
        while self._in_flight and self._in_flight[0].is_done and not self.is_dead:
            appended = self._in_flight.popleft()
            appended.done(appended.error)

    def write(self, write: Write) -> None:
        """Write without a sync."""
        if not self.is_dead:
            self._log.perform(write, sync=False)

    def sync(self, write: Write) -> None:
        """Sync what was written."""
        if self.is_dead:
            return
        try:
            write.segment.sync()
            write.is_synced = True
        except OSError as error:
            raise DiskFailed(f"{write.segment.path}: {error}") from error


class OverlappingCommit(SimulatedCommit):
    """A commit with several writes in flight, as in a cluster."""

    in_flight_max = 3
