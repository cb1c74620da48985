"""The time that the schedule goes by: the wall clock, as far as time has really passed.

    wall clock goes back          what is scheduled waits until it comes again: nothing is early
    wall clock jumps forward      not believed until as much time has passed as it jumped, or
                                  `hold_ms_max`, whichever is less; then it is the time

Small differences (a clock that is being slewed) are followed at once. Pure: both clocks are given.
"""

from __future__ import annotations

from typing import Final

JUMP_MS_MIN: Final = 1_000


class SteadyTime:
    """Compares the wall clock with time that passes.

    >>> time = SteadyTime(wall_ms=1_000_000, steady_ms=0, hold_ms_max=3_600_000)
    >>> time.now_ms(1_000_500, 500)
    1000500
    >>> time.jump_ms(1_000_500 + 60_000, 500), time.now_ms(1_000_500 + 60_000, 500)
    (60000, 1000500)
    >>> time.now_ms(1_000_500 + 120_000, 60_500)
    1120500
    """

    __slots__ = ("_ahead_ms", "_hold_until_ms", "_offset_ms", "_said_ms", "hold_ms_max")

    def __init__(self, *, wall_ms: int, steady_ms: int, hold_ms_max: int) -> None:
        self.hold_ms_max = hold_ms_max
        self._offset_ms = wall_ms - steady_ms
        """What makes wall time of steady time."""
        self._hold_until_ms: int | None = None
        self._ahead_ms = 0
        self._said_ms = 0

    def now_ms(self, wall_ms: int, steady_ms: int) -> int:
        """Return up to when messages are due."""
        expected_ms = steady_ms + self._offset_ms
        ahead_ms = wall_ms - expected_ms
        if ahead_ms <= JUMP_MS_MIN:
            # It went back, or runs as it should.
            self._hold_until_ms = None
            if abs(ahead_ms) <= JUMP_MS_MIN:
                self._offset_ms += ahead_ms
            return min(wall_ms, expected_ms + max(ahead_ms, 0))
        if self._hold_until_ms is None or ahead_ms > self._ahead_ms + JUMP_MS_MIN:
            self._hold_until_ms = steady_ms + min(ahead_ms, self.hold_ms_max)
            self._ahead_ms = ahead_ms
        if steady_ms >= self._hold_until_ms:
            self._offset_ms, self._hold_until_ms = wall_ms - steady_ms, None
            return wall_ms
        return expected_ms

    def jump_ms(self, wall_ms: int, steady_ms: int) -> int:
        """Return by how much the wall clock has jumped since this was last asked; 0: it did not."""
        off_ms = wall_ms - steady_ms - self._offset_ms
        if abs(off_ms) <= JUMP_MS_MIN:
            self._said_ms = 0
            return 0
        if abs(off_ms - self._said_ms) <= JUMP_MS_MIN:
            return 0
        self._said_ms = off_ms
        return off_ms
