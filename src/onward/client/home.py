"""Where a client may be used: in the event loop and in the process that opened it.

A forked child has a copy of the client, and with it the descriptor of the parent's socket: whatever
it sends, the broker takes for the parent's. A second event loop, in the same thread or another one,
would wait for futures that only the first one sets, after the request was sent. Both are refused
before anything is sent.
"""

from __future__ import annotations

import asyncio
import os

from onward.errors import InvalidRequest, NotConnected

FORKED = "this client was opened before a fork: open one in each process"


class Home:
    """The event loop and the process that a connection belongs to: those of who makes it."""

    __slots__ = ("_loop", "_process")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._process = os.getpid()

    @property
    def is_forked(self) -> bool:
        """Return True in a child of the process."""
        return os.getpid() != self._process

    def check(self, *, may_be_idle: bool = False) -> None:
        """Raise unless the caller runs in the event loop and the process of the connection.

        With `may_be_idle` no loop may be running: nothing is sent before one is.
        """
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self._loop:
            return
        if self.is_forked:
            raise NotConnected(FORKED)
        if running is not None or not may_be_idle:
            raise InvalidRequest(
                "this client was opened in another event loop: open one in each loop, or use "
                "connect_sync, which any thread may use"
            )
