"""Notices a function that blocks the event loop, and says which one and for how long.

While the loop is blocked nothing else runs in this process: no other message, no renewal of a
lease, no heartbeat. So a warning comes from a thread of its own, while it lasts:

    the loop beats ──▶ the thread looks: the last beat is older than the threshold ──▶ a warning
                                          ... twice as old, four times as old ──▶ one more each

The function is found on the stack of the loop's thread. One that waits (`await`) is never blamed.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable, Mapping
from types import CodeType, FrameType

from onward.clock import Clock, SystemClock

logger = logging.getLogger("onward.app")

THRESHOLD_MS = 5_000


class Blockage:
    """When to warn: facts and the time go in, warnings come out.

    >>> blockage = Blockage(threshold_ms=5_000, now_ms=0)
    >>> [blockage.is_news(now_ms) for now_ms in (4_999, 5_000, 6_000, 10_000)]
    [False, True, False, True]
    """

    def __init__(self, *, threshold_ms: int, now_ms: int) -> None:
        self._threshold_ms = threshold_ms
        self._beat_at_ms = now_ms
        self._warn_after_ms = threshold_ms

    def beat(self, now_ms: int) -> None:
        """The loop runs."""
        self._beat_at_ms = now_ms
        self._warn_after_ms = self._threshold_ms

    def blocked_ms(self, now_ms: int) -> int:
        """Return for how long the loop has not run."""
        return now_ms - self._beat_at_ms

    def is_news(self, now_ms: int) -> bool:
        """Tell whether a warning is due; the next one is due when it has lasted twice as long."""
        blocked_ms = self.blocked_ms(now_ms)
        if blocked_ms < self._warn_after_ms:
            return False
        self._warn_after_ms = 2 * blocked_ms
        return True


class LoopWatch:
    """Watches the loop it is started on, until it is stopped."""

    def __init__(
        self,
        names: Mapping[CodeType, str],
        *,
        threshold_ms: int = THRESHOLD_MS,
        clock: Clock | None = None,
    ) -> None:
        self._names = names
        self._clock = clock or SystemClock()
        self._every_s = threshold_ms / 5_000
        self._blockage = Blockage(threshold_ms=threshold_ms, now_ms=self._clock.monotonic_ms())
        self._is_over = threading.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to watch the loop that runs now."""
        watched = threading.get_ident()
        self._beat()
        self._thread = threading.Thread(
            target=self._watch, args=[watched], name="onward-loop-watch", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Watch no longer."""
        self._is_over.set()
        if self._timer is not None:
            self._timer.cancel()
        if self._thread is not None:
            self._thread.join()

    def look(self, frame: FrameType | None) -> str | None:
        """Return what is to be said about a loop whose thread is in `frame`; None: nothing."""
        now_ms = self._clock.monotonic_ms()
        if not self._blockage.is_news(now_ms):
            return None
        blocked_s = self._blockage.blocked_ms(now_ms) / 1000
        return f"{culprit(frame, self._names)} has blocked the event loop for {blocked_s:.1f} s"

    def _beat(self) -> None:
        self._blockage.beat(self._clock.monotonic_ms())
        self._timer = asyncio.get_running_loop().call_later(self._every_s, self._beat)

    def _watch(self, watched: int) -> None:
        while not self._is_over.wait(self._every_s):
            said = self.look(sys._current_frames().get(watched))  # noqa: SLF001
            if said is not None:
                logger.warning(
                    "%s: no lease is renewed meanwhile; make it a plain function, which runs "
                    "in a thread, or await what it waits for",
                    said,
                )


def culprit(frame: FrameType | None, names: Mapping[CodeType, str]) -> str:
    """Name the function of ours that is on a stack, and the line where it is now.

    >>> culprit(sys._getframe(), {sys._getframe().f_code: "charge"})
    "'charge' (line 1 of <doctest onward.client.blocked.culprit[0]>)"
    """
    place = "" if frame is None else f"line {frame.f_lineno} of {frame.f_code.co_filename}"
    while frame is not None:
        if (name := names.get(frame.f_code)) is not None:
            return f"{name!r} (line {frame.f_lineno} of {frame.f_code.co_filename})"
        frame = frame.f_back
    return f"something ({place})" if place else "something"


def code_of(function: Callable[..., object]) -> CodeType | None:
    """Return the code by which a function is found on a stack; None when it has none.

    >>> code_of(culprit) is culprit.__code__
    True
    """
    while hasattr(function, "__wrapped__") or hasattr(function, "func"):
        function = getattr(function, "__wrapped__", None) or function.func  # type: ignore[attr-defined]
    code = getattr(function, "__code__", None)
    if code is None:
        code = getattr(type(function).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None
