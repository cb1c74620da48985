"""What time it is, as integers in milliseconds.

Two clocks, because they answer two questions:

    now_ms()         the date on the wall: stored with messages, may jump when it is set
    monotonic_ms()   how long something took: for deadlines, never goes back

Shells ask a Clock and hand the answer to pure code as `now_ms`; pure code never looks at a clock
itself. Tests and the simulator bring a clock that stands still until it is moved.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """Anything that can be asked for the time."""

    def now_ms(self) -> int:
        """Return the wall clock: milliseconds since 1970, UTC."""
        ...

    def monotonic_ms(self) -> int:
        """Return milliseconds since some moment in the past that stays the same."""
        ...


class SystemClock:
    """The clocks of the machine.

    >>> SystemClock().now_ms() > 1_600_000_000_000
    True
    """

    def now_ms(self) -> int:
        """Return the machine's wall clock."""
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        """Return the machine's monotonic clock."""
        return time.monotonic_ns() // 1_000_000
