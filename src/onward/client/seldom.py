"""Says the same thing seldom: once a second at most, and then how often it was left out.

    the first ──▶ said at once ──▶ others within a second: counted ──▶ said together, with the last

What was left out is said when the second is over, also when nothing follows; `flush` says it now.
For what may happen to every message when a neighbour is down: a log is for people on call, and a
line per message would hide what they look for.
"""

from __future__ import annotations

import asyncio
import logging

from onward.client.user_error import logged_error
from onward.clock import Clock, SystemClock

EVERY_MS = 1_000


class Seldom:
    """A logger for warnings that come in swarms."""

    def __init__(
        self, logger: logging.Logger, *, every_ms: int = EVERY_MS, clock: Clock | None = None
    ) -> None:
        self._logger = logger
        self._every_ms = every_ms
        self._clock = clock or SystemClock()
        self._said_at_ms: dict[str, int] = {}
        self._left_out: dict[str, tuple[int, str]] = {}
        """How many, and the last of them."""
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def warn(self, topic: str, text: str, *, error: BaseException | None = None) -> None:
        """Say `text`, unless something on the same `topic` was said a moment ago.

        The traceback of `error` begins with the user's function.
        """
        now_ms = self._clock.monotonic_ms()
        said_at_ms = self._said_at_ms.get(topic)
        if said_at_ms is not None and now_ms - said_at_ms < self._every_ms:
            self._leave_out(topic, text, wait_ms=said_at_ms + self._every_ms - now_ms)
            return
        left_out = self._begin(topic)
        more = f" (and {left_out[0]} more like this before)" if left_out else ""
        exc_info = None if error is None else logged_error(error)
        self._logger.warning("%s%s", text, more, exc_info=exc_info)

    def flush(self) -> None:
        """Say what was left out until now."""
        for topic in list(self._left_out):
            self._say_left_out(topic)

    def _leave_out(self, topic: str, text: str, *, wait_ms: int) -> None:
        count, _ = self._left_out.get(topic, (0, ""))
        self._left_out[topic] = count + 1, text
        if topic in self._timers:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            # Nobody waits here: the next warning or `flush` says it.
            return
        self._timers[topic] = loop.call_later(wait_ms / 1000, self._say_left_out, topic)

    def _say_left_out(self, topic: str) -> None:
        left_out = self._begin(topic)
        if left_out is not None:
            count, text = left_out
            self._logger.warning("%d more like this, the last one: %s", count, text)

    def _begin(self, topic: str) -> tuple[int, str] | None:
        """Begin another second; return what was left out in the one before."""
        self._said_at_ms[topic] = self._clock.monotonic_ms()
        timer = self._timers.pop(topic, None)
        if timer is not None:
            timer.cancel()
        return self._left_out.pop(topic, None)
