"""Re-claiming: what members held when the broker ended stays theirs, if they come back in time.

    start ──▶ reserved ──claim──▶ leased again, under the old number
                 └─ the window is over (`groups.reclaim_ms`), or nobody else can come ──▶ ready

Grants are not written, so after a start everything unfinished may be in a member's hands. For the
length of the window it is reserved: only what members re-claim and what is published from now on is
delivered. A claim is checked against what the log says. It must be of this node's log and of the
topic with that number, and the offsets must be unfinished, not leased, not waiting for a retry, and
have the attempt under way that the member names: a lease that was lost, expired or settled in an
earlier life is refused. A lease keeps its age, as the member tells it: so the trace says how long
the work took, not how long ago the broker was started. Groups that deliver at most once hold
nothing, so nothing is reserved.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from onward.delivery.lease import Lease
from onward.delivery.ranges import Range, count_of

if TYPE_CHECKING:
    from onward.broker.catalogue import Catalogue
    from onward.broker.crew import Member
    from onward.clock import Clock
    from onward.delivery.group import Group, Groups
    from onward.delivery.share import Grant
    from onward.protocol.deliveries import Claim, Consume, Row

logger = logging.getLogger("onward.consume")

LATE_S_MIN = 1.0
"""A window that ends so late shows that the broker stood still: nobody could come back."""


class Claimed(NamedTuple):
    """What of the claims of a member is its own again, and what is finished."""

    claimed: list[Row]
    finished: list[Row]


class Reclaims:
    """The window after a start of the broker in which members re-claim what they hold."""

    def __init__(
        self, groups: Groups, *, catalogue: Catalogue, node: str, clock: Clock, window_ms: int,
        serve: Callable[[Group], None],
    ) -> None:  # fmt: skip
        self._groups = groups
        self._catalogue = catalogue
        self._node = node
        self._clock = clock
        self._window_ms = window_ms
        self._serve = serve
        self._open: set[str] = set()
        """Names of the groups with a reservation."""
        self._ends_at_ms = clock.monotonic_ms() + window_ms
        self._timer: asyncio.TimerHandle | None = None
        if window_ms:
            self._reserve()

    def _reserve(self) -> None:
        """Reserve all that may be in the hands of a member."""
        now_ms = self._clock.now_ms()
        for group in self._groups.by_name.values():
            if group.record.at_most_once:
                continue
            for share in group.shares.values():
                if (topic := self._catalogue.by_name.get(share.topic)) is not None:
                    share.reserve(topic.next_offset, now_ms=now_ms)
            if any(share.reserved for share in group.shares.values()):
                self._open.add(group.record.name)
        if self._open:
            self._set_timer()

    def _set_timer(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._window_ms / 1000, self._ring, loop)

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self._timer is not None
        if loop.time() - self._timer.when() > LATE_S_MIN:
            self._ends_at_ms = self._clock.monotonic_ms() + self._window_ms
            self._set_timer()
        else:
            self.end()

    def tick(self) -> None:
        """End the window if its time is over, though no timer said so."""
        if self._open and self._clock.monotonic_ms() >= self._ends_at_ms + 1000 * LATE_S_MIN:
            self.end()

    def end(self) -> None:
        """End the window of all groups."""
        for name in sorted(self._open):
            self.end_of(name)

    def end_of(self, name: str) -> None:
        """Make ready what nobody of a group has re-claimed."""
        self._open.discard(name)
        if not self._open:
            self.stop()
        if (group := self._groups.by_name.get(name)) is None:
            return
        count = sum(share.reserved.count for share in group.shares.values())
        for share in group.shares.values():
            share.end_reservation()
        if count:
            logger.info("group %r: %d messages that nobody re-claimed are ready", name, count)
        self._serve(group)

    def stop(self) -> None:
        """Wait for the end of the window no more."""
        if self._timer is not None:
            self._timer.cancel()

    # --- claims ------------------------------------------------------------------------------

    def claim(self, member: Member, consume: Consume) -> Claimed:
        """Lease to a member again what it holds; return that, and what of its claims is finished.

        Only one member of an exclusive group holds anything: that one is active again, and nobody
        else can come.
        """
        crew = member.crew
        claimed = Claimed([], [])
        if consume.node != self._node or crew.group.record.at_most_once:
            return claimed
        for claim in consume.claims:
            self._claim_one(member, claim, claimed)
        if claimed.claimed:
            logger.info(
                "member %r of group %r re-claimed %d messages",
                member.name, crew.group.record.name,
                count_of([(start, end) for _, start, end in claimed.claimed]),
            )  # fmt: skip
            if crew.is_exclusive:
                crew.activate(member)
                self.end_of(crew.group.record.name)
        return claimed

    def _claim_one(self, member: Member, claim: Claim, claimed: Claimed) -> None:
        crew = member.crew
        topic, source = crew.topics.get(claim.topic), crew.sources.get(claim.topic)
        if topic is None or source is None or topic.number != claim.number:
            return
        share = source.share
        grants: list[Grant] = []
        is_free = crew.leases.find(claim.delivery) is None
        for start, end, attempt in claim.ranges:
            claimed.finished.extend(_rows(claim, share.finished(start, end)))
            if is_free and claim.topic in member.topics:
                parts = share.claim(start, end, attempt=attempt)
                grants += share.grants(parts)
                claimed.claimed.extend(_rows(claim, parts))
        if grants:
            lease = Lease(
                claim.delivery, member.name, claim.topic, grants,
                now_ms=self._clock.monotonic_ms(), lease_ms=crew.group.record.lease_ms,
                reports=member.starts,
            )  # fmt: skip
            lease.date_back(held_ms=claim.held_ms, starts=claim.starts)
            crew.leases.restore(lease)
            if share.split_alone([(start, end) for start, end, _, _ in grants])[1]:
                crew.set_apart(member, until_ms=None)


def _rows(claim: Claim, ranges: list[Range]) -> list[Row]:
    return [(claim.delivery, start, end) for start, end in ranges]
