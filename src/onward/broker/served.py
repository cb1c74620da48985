"""Waiting until nothing more is ready for a member: `member.served`.

    asked ──▶ the group is served ──▶ looks into the log and reads from the disk end ──▶ answered

Frames keep their order, so the reply stands behind every message that was ready: a member that
gave credit, asked and got nothing knows that there was nothing. A group that delivers at most once
sends a message when it is durably finished; the reply waits for that, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onward.broker.crew import Crew, Member
from onward.broker.futures import Done
from onward.errors import Overloaded

if TYPE_CHECKING:
    from onward.broker.consume import Consuming

SERVED_WAITS_MAX = 1_000
"""How many such requests of one group may wait for their reply."""


class Served:
    """Calls back when all that is ready for a member has been sent."""

    def __init__(self, consuming: Consuming) -> None:
        self._consuming = consuming

    def wait(self, member: Member, done: Done) -> None:
        """Call `done` when the group has been served and nothing is ready for the member."""
        waits = member.crew.served_waits
        if len(waits) >= SERVED_WAITS_MAX:
            name = member.crew.group.record.name
            raise Overloaded(f"group {name!r} has {SERVED_WAITS_MAX} such questions under way")
        waits.append((member, done))
        self._consuming.serve_soon(member.crew)

    def answer(self, crew: Crew) -> None:
        """Call back those who wait, unless a look or a read that is under way brings more.

        The end of either serves the group again.
        """
        if crew.reads or any(source.is_looking for source in crew.sources.values()):
            return
        waits, crew.served_waits = crew.served_waits, []
        for _, done in waits:
            if crew.group.record.at_most_once:
                self._consuming.outcomes.when_durable(done)
            else:
                done(None)

    def forget(self, member: Member) -> None:
        """Call back a member that leaves: it gets nothing more."""
        crew = member.crew
        waits, crew.served_waits = crew.served_waits, []
        for waiting in waits:
            if waiting[0] is member:
                waiting[1](None)
            else:
                crew.served_waits.append(waiting)
