"""Who holds which messages, and for how long.

    grant ──▶ held ──settle (all of it)──▶ gone
               │ renew: longer             expire, drop_member, drop_topic: the caller says why

Leases are only in memory: after a restart of the broker members re-claim theirs, under the ids that
they had, or the messages are ready again. A lease that has ended is unknown, so an answer for it
settles nothing, and neither does an answer of anybody but its member. Times are the caller's and
need only grow. Settled leases stay in the heap until their time: skipping them is cheaper than
searching for them on every ack.

A member may report what it starts. Then only that counts as an attempt when the member dies or
falls silent. Whatever a member holds that never reports counts. A member that re-claims a lease
says how old it is, and how long ago it started messages: that dates them, but reports nothing.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from sys import maxsize
from typing import Final

from onward.delivery.ranges import Range, Ranges
from onward.delivery.share import Grant, Share

AGE_MS_MAX: Final = 86_400_000
"""A member is believed that it has held a delivery for so long at most."""
_STALE_MAX: Final = 1_000


class Lease:
    """What one delivery handed to one member: `ranges` is what it has not settled yet."""

    __slots__ = (
        "_dated", "_started", "_starts", "expires_at_ms", "grants", "id", "leased_at_ms",
        "member", "ranges", "reports", "topic",
    )  # fmt: skip

    def __init__(
        self,
        lease_id: int,
        member: str,
        topic: str,
        grants: Sequence[Grant],
        *,
        now_ms: int,
        lease_ms: int,
        reports: bool = False,
    ) -> None:
        self.id = lease_id
        self.member = member
        self.topic = topic
        self.grants = grants
        self.ranges = Ranges((start, end) for start, end, _, _ in grants)
        self.leased_at_ms = now_ms
        self.expires_at_ms = now_ms + lease_ms
        self.reports = reports
        """Its member reports what it starts."""
        self._started: Ranges | None = Ranges() if reports else None
        """What was reported, settled or not; None: all of it counts as started."""
        self._starts: list[tuple[int, int]] = []
        """The first offset of each report and when it came, sorted."""
        self._dated: Ranges | None = None
        """Of a re-claimed lease: what was started before the claim. Later reports repeat it."""

    @property
    def started(self) -> list[Range]:
        """Return what was started and is not settled."""
        if self._started is None:
            return list(self.ranges)
        return [part for one in self._started for part in self.ranges.overlap(*one)]

    @property
    def unstarted(self) -> list[Range]:
        """Return what was only delivered, as far as its member has reported."""
        if self._started is None:
            return []
        return [part for one in self.ranges for part in self._started.gaps(*one)]

    def split_started(self, ranges: Sequence[Range]) -> tuple[list[Range], list[Range]]:
        """Return the started and the unstarted parts of ranges, settled or not."""
        if self._started is None:
            return list(ranges), []
        started = [part for one in ranges for part in self._started.overlap(*one)]
        return started, [part for one in ranges for part in self._started.gaps(*one)]

    def started_at_ms(self, offset: int) -> int:
        """Return when the member reported that it starts a message; else when it was leased.

        >>> lease = Lease(1, "ann", "t", [(0, 9, 1, 1)], now_ms=5, lease_ms=100, reports=True)
        >>> lease.start(0, 4, now_ms=7)
        >>> lease.started_at_ms(3), lease.started_at_ms(0)
        (7, 7)
        """
        place = bisect_right(self._starts, (offset, maxsize)) - 1
        return self._starts[place][1] if place >= 0 else self.leased_at_ms

    def date_back(self, *, held_ms: int, starts: Iterable[tuple[int, int, int]]) -> None:
        """Set when a re-claimed lease began, and its messages were started: (start, end, ms ago).

        >>> lease = Lease(1, "ann", "t", [(0, 9, 1, 1)], now_ms=50, lease_ms=100, reports=True)
        >>> lease.date_back(held_ms=40, starts=[(0, 4, 30)])
        >>> lease.start(0, 5, now_ms=51)
        >>> lease.leased_at_ms, lease.started_at_ms(3), lease.started_at_ms(4)
        (10, 20, 51)
        """
        now_ms, held_ms = self.leased_at_ms, min(held_ms, AGE_MS_MAX)
        self.leased_at_ms = now_ms - held_ms
        dated = [(start, end, now_ms - min(ms, held_ms)) for start, end, ms in starts]
        self._dated = Ranges((start, end) for start, end, _ in dated)
        self._starts = sorted((start, at_ms) for start, _, at_ms in dated)

    def start(self, start: int, end: int, *, now_ms: int) -> None:
        """Note that the member starts the offsets from `start` to before `end`."""
        if self._started is None:
            return
        if self._dated is None:
            insort(self._starts, (start, now_ms))
        else:
            for offset, _ in self._dated.gaps(start, end):
                insort(self._starts, (offset, now_ms))
        first, last = self.ranges.first, self.ranges.end
        if first is None or last is None or (start <= first and last <= end):
            self._started = None  # the usual case: one report for the whole delivery
        else:
            self._started.add(start, end)

    def __repr__(self) -> str:
        return f"<Lease {self.id} of {self.topic} {list(self.ranges)} to {self.member}>"


class Leases:
    """All leases of one group.

    >>> leases = Leases()
    >>> share = Share("orders", start=0)
    >>> lease = leases.grant("ann", share, share.grants([(0, 9)]), now_ms=0, lease_ms=100)
    >>> leases.settle(lease.id, 0, 5, member="bob"), leases.settle(lease.id, 0, 5, member="ann")
    ([], [(0, 5)])
    >>> leases.count, leases.next_expiry_ms(), leases.expire(100)
    (4, 100, [<Lease 1 of orders [(5, 9)] to ann>])
    """

    __slots__ = ("_by_id", "_by_member", "_by_topic", "_heap", "_next_id", "count")

    def __init__(self, *, first_id: int = 1) -> None:
        self.count = 0
        """How many messages are leased."""
        self._next_id = first_id
        self._by_id: dict[int, Lease] = {}
        self._by_member: dict[str, dict[int, Lease]] = {}
        self._by_topic: dict[str, int] = {}
        self._heap: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._by_id.values())

    def grant(
        self, member: str, share: Share, grants: Sequence[Grant], *, now_ms: int, lease_ms: int,
        reports: bool = False,
    ) -> Lease:  # fmt: skip
        """Return a new lease; ids are dense, but for those that were re-claimed."""
        while self._next_id in self._by_id:
            self._next_id += 1
        lease = Lease(
            self._next_id, member, share.topic, grants, now_ms=now_ms, lease_ms=lease_ms,
            reports=reports,
        )  # fmt: skip
        self._next_id += 1
        return self._add(lease)

    def restore(self, lease: Lease) -> Lease:
        """Add a lease of an earlier life of the broker, under its old id, which must be free."""
        assert lease.id not in self._by_id, "two leases with one id"
        return self._add(lease)

    def _add(self, lease: Lease) -> Lease:
        self._by_id[lease.id] = lease
        self._by_member.setdefault(lease.member, {})[lease.id] = lease
        self._count(lease.topic, lease.ranges.count)
        if len(self._heap) > 2 * len(self._by_id) + _STALE_MAX:
            self._heap = [(one.expires_at_ms, one.id) for one in self._by_id.values()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (lease.expires_at_ms, lease.id))
        return lease

    def find(self, lease_id: int) -> Lease | None:
        """Return a lease that has not ended."""
        return self._by_id.get(lease_id)

    def settle(self, lease_id: int, start: int, end: int, *, member: str) -> list[Range]:
        """Remove and return what of [start, end) this member really held by this lease."""
        lease = self._by_id.get(lease_id)
        if lease is None or lease.member != member:
            return []
        before = lease.ranges.count
        if end - start == 1:  # the usual case of members that work on one after the other
            parts = [(start, end)] if lease.ranges.discard(start) else []
        else:
            parts = lease.ranges.overlap(start, end)
            lease.ranges.remove(start, end)
        if parts:
            self._count(lease.topic, lease.ranges.count - before)
            if not lease.ranges.starts:
                self._drop([lease])
        return parts

    def renew(self, lease_id: int, *, member: str, now_ms: int, lease_ms: int) -> bool:
        """Make a lease last from now on again; False when this member has it no longer."""
        lease = self._by_id.get(lease_id)
        if lease is None or lease.member != member:
            return False
        earlier = now_ms + lease_ms < lease.expires_at_ms
        lease.expires_at_ms = now_ms + lease_ms
        # A later end is found when the earlier one comes up.
        if earlier:
            heapq.heappush(self._heap, (lease.expires_at_ms, lease_id))
        return True

    def expire(self, now_ms: int) -> list[Lease]:
        """Remove and return the leases that ran out, oldest first."""
        ended: list[Lease] = []
        while (expiry_ms := self.next_expiry_ms()) is not None and expiry_ms <= now_ms:
            lease = self._by_id[heapq.heappop(self._heap)[1]]
            self._drop([lease])
            ended.append(lease)
        return ended

    def next_expiry_ms(self) -> int | None:
        """Return when the next lease runs out, or None when there is none."""
        heap = self._heap
        while heap:
            expires_at_ms, lease_id = heap[0]
            lease = self._by_id.get(lease_id)
            if lease is None or lease.expires_at_ms < expires_at_ms:
                heapq.heappop(heap)
            elif lease.expires_at_ms > expires_at_ms:
                heapq.heapreplace(heap, (lease.expires_at_ms, lease_id))
            else:
                return expires_at_ms
        return None

    def drop_member(self, member: str) -> list[Lease]:
        """Remove and return everything a member holds, oldest first."""
        return self._drop(self.of_member(member))

    def drop_topic(self, topic: str) -> list[Lease]:
        """Remove and return every lease in a topic, oldest first."""
        return self._drop([lease for lease in self._by_id.values() if lease.topic == topic])

    def of_member(self, member: str) -> list[Lease]:
        """Return everything a member holds, oldest first."""
        return list(self._by_member.get(member, {}).values())

    def newest_of(self, member: str) -> Iterator[Lease]:
        """Yield what a member holds, newest first."""
        return reversed(self._by_member.get(member, {}).values())

    def held_by(self, member: str) -> int:
        """Return how many leases a member has."""
        return len(self._by_member.get(member, ()))

    def holder_of(self, topic: str, offset: int) -> Lease | None:
        """Return the lease that a message is in; looks at all of them."""
        for lease in self._by_id.values():
            if lease.topic == topic and offset in lease.ranges:
                return lease
        return None

    def ranges_in(self, topic: str) -> list[Range]:
        """Return everything of a topic that is leased, in no order."""
        return [
            one for lease in self._by_id.values() if lease.topic == topic for one in lease.ranges
        ]

    def count_in(self, topic: str) -> int:
        """Return how many messages of a topic are leased."""
        return self._by_topic.get(topic, 0)

    def _count(self, topic: str, change: int) -> None:
        self.count += change
        count = self._by_topic.get(topic, 0) + change
        if count:
            self._by_topic[topic] = count
        else:
            self._by_topic.pop(topic, None)

    def _drop(self, leases: Iterable[Lease]) -> list[Lease]:
        dropped = list(leases)
        for lease in dropped:
            del self._by_id[lease.id]
            held = self._by_member[lease.member]
            del held[lease.id]
            if not held:
                del self._by_member[lease.member]
            self._count(lease.topic, -lease.ranges.count)
        return dropped
