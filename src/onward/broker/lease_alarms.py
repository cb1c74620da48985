"""One timer for each group that has members: the next lease that runs out, the next retry due.

A timer that rings much too late shows that this process stood still: nobody was silent meanwhile,
so the leases of the group begin again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from onward.broker.crew import Crew
from onward.clock import Clock

LATE_S_MIN: Final = 1.0
WAIT_MS_MAX: Final = 60_000


class LeaseAlarms:
    """Sets the timers of groups, and calls `ring` when one is due."""

    def __init__(self, clock: Clock, *, ring: Callable[[Crew], None]) -> None:
        self._clock = clock
        self._ring = ring
        self._loop = asyncio.get_running_loop()

    def set(self, crew: Crew) -> None:
        """Call `ring` when the next lease of a group runs out or its next retry is due."""
        wait_ms = self._wait_ms(crew)
        if wait_ms is None:
            return
        at_ms = self._clock.monotonic_ms() + wait_ms
        if crew.alarm is not None:
            if crew.alarm_at_ms <= at_ms:
                return
            crew.alarm.cancel()
        crew.alarm_at_ms = at_ms
        crew.alarm = self._loop.call_later(wait_ms / 1000, self._rang, crew)

    def _wait_ms(self, crew: Crew) -> int | None:
        waits: list[int] = []
        if (expiry_ms := crew.leases.next_expiry_ms()) is not None:
            waits.append(expiry_ms - self._clock.monotonic_ms())
        now_ms = self._clock.now_ms()
        for source in crew.sources.values():
            if source.share.retries and (due_ms := source.share.next_due_ms()) is not None:
                waits.append(due_ms - now_ms)
            if (wait_ms := source.wait_ms()) is not None:
                waits.append(wait_ms)
        # Clocks that disagree by a millisecond must not make this turn round and round.
        return max(1, min(min(waits), WAIT_MS_MAX)) if waits else None

    def _rang(self, crew: Crew) -> None:
        late_s = 0.0 if crew.alarm is None else self._loop.time() - crew.alarm.when()
        crew.alarm = None
        if late_s > LATE_S_MIN:
            self._renew_all(crew)
        self._ring(crew)

    def _renew_all(self, crew: Crew) -> None:
        now_ms, lease_ms = self._clock.monotonic_ms(), crew.group.record.lease_ms
        for lease in crew.leases:
            crew.leases.renew(lease.id, member=lease.member, now_ms=now_ms, lease_ms=lease_ms)
