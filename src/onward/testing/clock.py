"""A clock that moves only when a test says so.

`advance` is time passing: both clocks move. `jump` is somebody setting the wall clock, forwards or
backwards: only `now_ms` moves, as on a real machine; `monotonic_ms` never goes back.
"""

from __future__ import annotations

# A fixed instant (2026-01-01T00:00:00Z), so that a failed test reads the same each time.
START_MS = 1_767_225_600_000


class ManualClock:
    """A `Clock` for tests.

    >>> clock = ManualClock(now_ms=1_000)
    >>> clock.advance(50)
    >>> clock.jump(-500)
    >>> clock.now_ms(), clock.monotonic_ms()
    (550, 50)
    """

    def __init__(self, *, now_ms: int = START_MS) -> None:
        self._wall_ms = now_ms
        self._monotonic_ms = 0

    def now_ms(self) -> int:
        """Return the wall clock's time in milliseconds since 1970."""
        return self._wall_ms

    def monotonic_ms(self) -> int:
        """Return the milliseconds that have passed since this clock began."""
        return self._monotonic_ms

    def advance(self, ms: int) -> None:
        """Let `ms` milliseconds pass."""
        if ms < 0:
            raise ValueError(f"time does not pass backwards: {ms} ms")
        self._wall_ms += ms
        self._monotonic_ms += ms

    def jump(self, ms: int) -> None:
        """Set the wall clock `ms` milliseconds forwards or (negative) backwards."""
        self._wall_ms += ms
