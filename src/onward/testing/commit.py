"""A storage thread without a thread: commits that take virtual time.

    submit ──▶ write, at a random time ──▶ sync, later ──▶ done, later still

The power can go at any of these moments, and the next commit fills meanwhile, as with the real
storage thread. A commit whose machine is dead does nothing and says nothing.
"""

from __future__ import annotations

import asyncio

from onward.broker.commit import Done
from onward.log.log import DiskFailed, Log, Write


class SimulatedCommit:
    """A `Commit` for `VirtualLoop`; its time comes from the loop's chance."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._loop = asyncio.get_running_loop()
        self.is_dead = False

    def submit(self, write: Write, *, sync: bool, done: Done) -> None:
        """Write after a while; `done` is called on the loop, in the order of the commits."""

        def written(future: asyncio.Future[None]) -> None:
            if sync and future.exception() is None:
                synced = self._loop.run_in_executor(None, self.sync, write)
                synced.add_done_callback(settle)
            else:
                settle(future)

        def settle(future: asyncio.Future[None]) -> None:
            error = future.exception()
            if not self.is_dead:
                assert error is None or isinstance(error, Exception)
                done(error)

        self._loop.run_in_executor(None, self.write, write).add_done_callback(written)

    def close(self) -> None:
        """Nothing is left to do when the broker has drained."""

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
        except OSError as error:
            raise DiskFailed(f"{write.segment.path}: {error}") from error
