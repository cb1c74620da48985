"""Simulated work: pauses that all take the same time, and take it truly.

The timers of an event loop count whole milliseconds: a sleep of 1 ms on uvloop takes 1.8 ms on
average, and 64 handlers that sleep so do at most 35,000 jobs a second, whatever hands them out.
Here one timer of the kernel wakes all pauses that are over; none is short, and none is longer by
more than `TICK_NS` and what the loop is late.
"""

import asyncio
import ctypes
import os
import time
from collections import deque
from types import TracebackType
from typing import Self

TICK_NS = 200_000
"""Pauses that end within so much of each other end together: fewer wake-ups, for everybody."""

_ABSOLUTE = 1


class Pauses:
    """Pauses of one length, on the loop that is running.

    >>> async def work() -> None:
    ...     async with Pauses(0.001) as pauses:
    ...         await pauses.one()
    >>> asyncio.run(work())
    """

    def __init__(self, seconds: float) -> None:
        self._length_ns = round(seconds * 1e9)
        self._ends: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._when = (ctypes.c_long * 4)()

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._timer = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._timer < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._loop.add_reader(self._timer, self._end_some)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        where: TracebackType | None,
    ) -> None:  # fmt: skip
        self._loop.remove_reader(self._timer)
        os.close(self._timer)
        for _, end in self._ends:
            end.cancel()

    def one(self) -> asyncio.Future[None]:
        """Return what is done when the time of one pause, from now on, is over."""
        end = self._loop.create_future()
        due_ns = time.monotonic_ns() + self._length_ns
        self._ends.append((due_ns, end))
        if len(self._ends) == 1:
            self._wake_at(due_ns)
        return end

    def _end_some(self) -> None:
        os.read(self._timer, 8)
        ends, now_ns = self._ends, time.monotonic_ns()
        while ends and ends[0][0] <= now_ns:
            _, end = ends.popleft()
            if not end.done():
                end.set_result(None)
        if ends:
            self._wake_at(max(ends[0][0], now_ns + TICK_NS))

    def _wake_at(self, due_ns: int) -> None:
        self._when[2], self._when[3] = divmod(due_ns, 1_000_000_000)
        if self._libc.timerfd_settime(self._timer, _ABSOLUTE, self._when, None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")
