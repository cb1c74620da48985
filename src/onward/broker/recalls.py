"""Recalls: messages that wait at a busy member are asked back for one that is idle.

    served, and a member in line gets nothing ──0.1 s──▶ look ──▶ RECALL to members where
                                                 ▲        │         messages wait
                                                 └────────┘ while messages wait

A member fetches ahead, and nobody knows how long its next message takes. Which of its messages it
gives back is its own decision: a message that it has just started is not released, so none is
worked on twice. Each holder is asked for what it has beyond an equal part.

A member is asked once, and again after a sign of life: requests do not pile up at one that is
blocked. A member at which messages waited is not idle before it starts or settles something, else
two busy members would send one message to and fro.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from onward.delivery.ranges import count_of
from onward.protocol.deliveries import recall_frame

if TYPE_CHECKING:
    from onward.broker.consume import Consuming
    from onward.broker.crew import Crew, Member
    from onward.clock import Clock

WAITED_MS_MIN = 100
"""So long a message waits at a member before it is asked back."""
MEMBERS_PER_MS = 10
"""A group with very many members is looked at less often: a look visits all of them."""
LEASES_LOOKED_AT_MAX = 2_000
"""In one look; the members that come after these leases are asked in a later one."""


class Recalls:
    """Asks the busy members of groups for what they have not started."""

    def __init__(self, consuming: Consuming, clock: Clock) -> None:
        self._consuming = consuming
        self._clock = clock
        self._loop = asyncio.get_running_loop()

    def plan(self, crew: Crew) -> None:
        """Look at a group in a moment, if a member waits in line while others hold messages."""
        record = crew.group.record
        # A rate counts deliveries: a message that came back would use up its key's rate twice.
        if crew.is_exclusive or record.key_rate or not crew.leases.count or not crew.has_waiting:
            return
        wait_ms = max(WAITED_MS_MIN, len(crew.members) // MEMBERS_PER_MS)
        crew.recall = self._loop.call_later(wait_ms / 1000, self.look, crew)

    def cancel(self, crew: Crew) -> None:
        """Look at a group no more."""
        if crew.recall is not None:
            crew.recall.cancel()
            crew.recall = None

    def look(self, crew: Crew) -> None:
        """Recall messages that wait at members, if others are idle."""
        self.cancel(crew)
        if not self._consuming.is_granting(crew):
            return
        holders = [member for member in crew.members.values() if _has_unstarted(crew, member)]
        if not holders:
            return
        if idle := [member for member in crew.waiting() if _is_idle(crew, member)]:
            self._recall(crew, idle, holders)
        self.plan(crew)

    def _recall(self, crew: Crew, idle: list[Member], holders: Iterable[Member]) -> None:
        """Ask holders for what is beyond an equal part, and no more than the idle may get."""
        topics = frozenset[str]().union(*(member.topics for member in idle))
        counts = self._unstarted(crew, holders, topics)
        part = sum(counts.values()) // (len(counts) + len(idle))
        credit = sum(crew.credit_of(member) for member in idle)
        for member, count in counts.items():
            wanted = min(count - part, credit)
            if wanted > 0:
                credit -= wanted
                member.is_recalled = member.is_stuck = True
                member.session.write(recall_frame(member.consumer_id, wanted))

    def _unstarted(
        self, crew: Crew, holders: Iterable[Member], topics: frozenset[str]
    ) -> dict[Member, int]:
        """Return how many messages have waited at each holder that can be asked for them."""
        leased_before_ms = self._clock.monotonic_ms() - WAITED_MS_MIN
        found: dict[Member, int] = {}
        looked_at = 0
        for member in holders:
            if not member.recalls or member.is_recalled or member in crew.apart:
                continue
            count = 0
            for lease in crew.leases.newest_of(member.name):
                unstarted = lease.unstarted
                looked_at += 1
                # Members start what they hold in its order: what is older was started, too.
                if not unstarted or looked_at > LEASES_LOOKED_AT_MAX:
                    break
                if lease.leased_at_ms <= leased_before_ms and lease.topic in topics:
                    count += count_of(unstarted)
            if count:
                found[member] = count
        return found


def _has_unstarted(crew: Crew, member: Member) -> bool:
    newest = next(crew.leases.newest_of(member.name), None)
    return newest is not None and bool(newest.unstarted)


def _is_idle(crew: Crew, member: Member) -> bool:
    """Tell whether a member that is in line would start at once what it gets."""
    if not member.starts:
        return not crew.leases.held_by(member.name)
    return not member.is_stuck and not _has_unstarted(crew, member)
