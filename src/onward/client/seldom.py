"""Says the same thing seldom: once a second at most, and then how often it was left out.

For what may happen to every message when a neighbour is down: a log is for people on call, and a
line per message would hide what they look for.
"""

from __future__ import annotations

import logging
from collections import defaultdict

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
        self._left_out: defaultdict[str, int] = defaultdict(int)

    def warn(self, topic: str, text: str, *, error: BaseException | None = None) -> None:
        """Say `text`, unless something on the same `topic` was said a moment ago."""
        now_ms = self._clock.monotonic_ms()
        said_at_ms = self._said_at_ms.get(topic)
        if said_at_ms is not None and now_ms - said_at_ms < self._every_ms:
            self._left_out[topic] += 1
            return
        self._said_at_ms[topic] = now_ms
        left_out = self._left_out.pop(topic, 0)
        more = f" (and {left_out} more like this before)" if left_out else ""
        self._logger.warning("%s%s", text, more, exc_info=error)
