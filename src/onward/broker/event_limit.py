"""A limit on log lines of one kind: a flood of bad connections must not become a flood of lines.

    the first EVENTS_MAX of a window    one line each
    the others                          counted
    the end of the window               one line with their number, if there were any

No event is lost without a word, and the log grows by a bounded number of lines per window.
"""

import logging

EVENTS_MAX = 20
WINDOW_MS = 10_000


class EventLimit:
    """Writes events to a logger, at most EVENTS_MAX lines per window.

    >>> events = EventLimit(logging.getLogger("onward.test"), "sessions ended")
    >>> events.write("session ended: %s", "no HELLO came in time", now_ms=0)
    """

    def __init__(self, logger: logging.Logger, name: str) -> None:
        self._logger = logger
        self._name = name
        self._began_at_ms = 0
        self._count = 0

    def write(self, text: str, *values: object, now_ms: int) -> None:
        """Write one event, or count it if the window has had enough."""
        self.tick(now_ms=now_ms)
        if not self._count:
            self._began_at_ms = now_ms
        self._count += 1
        if self._count <= EVENTS_MAX:
            self._logger.info(text, *values)

    def tick(self, *, now_ms: int) -> None:
        """End the window when it is over, and report how many events had no line."""
        if now_ms - self._began_at_ms < WINDOW_MS:
            return
        if self._count > EVENTS_MAX:
            self._logger.warning(
                "%s: %d more within %d s, not listed",
                self._name, self._count - EVENTS_MAX, WINDOW_MS // 1_000,
            )  # fmt: skip
        self._count = 0
