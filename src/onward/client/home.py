"""Where a client may be used: in the event loop and in the process that opened it.

A forked child has a copy of the client, and with it the descriptor of the parent's socket: whatever
it sends, the broker takes for the parent's. A second event loop, in the same thread or another one,
would wait for futures that only the first one sets, after the request was sent. Both are refused
before anything is sent.

Each frame is checked, so the check makes no system call: a fork is counted when it happens, and a
loop that runs in the thread of the connection is the running loop of that thread.
"""

from __future__ import annotations

import asyncio
import os
from threading import get_ident

from onward.errors import InvalidRequest, NotConnected

_forks = 0
"""How many forks lie between this process and the first one that loaded this module."""


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)

FORKED = "this client was opened before a fork: open one in each process"


class Home:
    """The event loop and the process that a connection belongs to: those of who makes it."""

    __slots__ = ("_forks", "_loop", "_thread")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = get_ident()
        self._forks = _forks

    @property
    def is_forked(self) -> bool:
        """Return True in a child of the process."""
        return _forks != self._forks

    def check(self, *, may_be_idle: bool = False) -> None:
        """Raise unless the caller runs in the event loop and the process of the connection.

        With `may_be_idle` no loop may be running: nothing is sent before one is.
        """
        if _forks == self._forks and get_ident() == self._thread and self._loop.is_running():
            return
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if self.is_forked:
            raise NotConnected(FORKED)
        if running is not None or not may_be_idle:
            raise InvalidRequest(
                "this client was opened in another event loop: open one in each loop, or use "
                "connect_sync, which any thread may use"
            )
