"""One group's part of one topic: what is finished, what waits, what comes next.

                 take                    acked, filtered, skipped
    fresh ──────────────────▶ taken ──────────────────────────────▶ finished
                              │ ▲ │ retried, expired, lost             ▲  │ replayed
             give_back, lost  ▼ │ ▼                                    │  ▼
                            ready ◀──── wake ──── waiting             dead ──redriven──▶ ready

Durable is what `apply` folds from rows: `mark`, `open`, `retries`, `attempts`, `uncounted`,
`alone` and `dead`.
Unfinished is `open` and everything from `mark` on. Volatile are `head`, `ready` and `reserved`:
below `head` each offset is exactly one of finished, waiting, ready and taken, and taken is what is
none of the others: nothing needs to be written to hand a message out. After a restart of the broker
what may be in a member's hands is taken too, and `reserved`. Ranges stay ranges: only offsets that
failed, wait or are dead cost memory of their own, and only they are ever looped over.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Final, Literal, TypeVar

import msgspec

from onward.delivery.range_counts import Counted, RangeCounts, ranges_of_offsets
from onward.delivery.ranges import Range, Ranges, count_of, offsets_of, ranges_of
from onward.delivery.trace import Trace

RETRIES_MAX: Final = 100_000
DEAD_MAX: Final = 1_000_000

State = Literal["finished", "waiting", "dead", "ready", "taken", "fresh"]
Grant = tuple[int, int, int, int]
"""[start, end), the number of its attempt and the number of its delivery, both from 1 on. They
differ after deliveries that did not count as an attempt, such as a release."""

# So many forgotten entries may lie in the heap before it is built anew.
_STALE_MAX: Final = 1_000
_T = TypeVar("_T")


class DeadLetter(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A message that will not be delivered again by itself, and why."""

    offset: int
    cause: str
    attempts: int
    member: str
    died_at_ms: int


class SavedShare(msgspec.Struct, frozen=True, array_like=True):
    """The durable part of a share, as a checkpoint keeps it."""

    topic: str
    mark: int
    open: list[Range]
    retries: dict[int, int]
    attempts: dict[int, int]
    dead: list[DeadLetter]
    alone: dict[int, int] = {}
    uncounted: dict[int, int] = {}
    """By offset, in checkpoints of older versions."""
    uncounted_ranges: list[Counted] = []


class Share:
    """The state of one group in one topic.

    >>> share = Share("orders", start=0)
    >>> share.take(10, end_offset=1_000)
    [(0, 10)]
    >>> row = Trace(did="acked", at_ms=0, ranges=((0, 4),))
    >>> share.apply(row)
    >>> share.cursor, share.backlog(1_000), share.state_of(7)
    (4, 996, 'taken')
    """

    __slots__ = (
        "_heap", "_is_their_turn", "alone", "attempts", "buckets", "dead", "dropped", "head",
        "mark", "open", "ready", "reserved", "retries", "topic", "uncounted",
    )  # fmt: skip

    def __init__(self, topic: str, *, start: int) -> None:
        self.topic = topic
        # Durable: a fold of rows.
        self.mark = start
        self.open = Ranges()
        self.retries: dict[int, int] = {}
        self.attempts: dict[int, int] = {}
        self.uncounted = RangeCounts()
        """Deliveries that did not count as an attempt; in at most RETRIES_MAX ranges."""
        self.alone: dict[int, int] = {}
        """Messages with which a member died: with how many others of them each may be delivered."""
        self.dead: dict[int, DeadLetter] = {}
        # Volatile: what this broker has handed out since it runs.
        self.head = start
        self.ready = Ranges()
        self.reserved = Ranges()
        """What members of an earlier life of the broker may hold, and re-claim for a while."""
        self.buckets: dict[str, int] = {}
        """What keys have used of their rates: limits hold also when the last member has left."""
        self.dropped = 0
        """Messages that retention dropped before this group was done with them."""
        self._heap: list[tuple[int, int, int]] = []
        self._is_their_turn = True

    # What it is.

    @property
    def cursor(self) -> int:
        """The offset below which everything is finished."""
        return self.open.starts[0] if self.open.starts else self.mark

    @property
    def dead_count(self) -> int:
        """How many dead letters there are."""
        return len(self.dead)

    @property
    def waiting_count(self) -> int:
        """How many messages wait for their next attempt."""
        return len(self.retries)

    @property
    def is_full(self) -> bool:
        """Tell whether too many have failed to take fresh ones: memory has a limit."""
        return (
            len(self.retries) >= RETRIES_MAX
            or len(self.attempts) >= RETRIES_MAX
            or len(self.dead) >= DEAD_MAX
        )

    def backlog(self, end_offset: int) -> int:
        """Return how many messages of a topic that ends there are unfinished."""
        return self.open.count + max(0, end_offset - self.mark)

    def unfinished(self, start: int, end: int) -> list[Range]:
        """Return what of [start, end) is unfinished."""
        parts = self.open.overlap(start, min(end, self.mark)) if self.open.starts else []
        if end > self.mark:
            _append(parts, (max(start, self.mark), end))
        return parts

    def untaken(self, end_offset: int) -> list[Range]:
        """Return what is ready or fresh in a topic that ends there, in order.

        >>> share = Share("orders", start=0)
        >>> taken = share.take(4, end_offset=10)
        >>> share.give_back([(1, 2)])
        >>> share.untaken(10)
        [(1, 2), (4, 10)]
        """
        fresh = self._not_waiting(self.unfinished(self.head, end_offset))
        return [*self.ready, *fresh]

    def state_of(self, offset: int) -> State:
        """Return what became of a message so far."""
        if offset in self.dead:
            return "dead"
        if offset < self.mark and offset not in self.open:
            return "finished"
        if offset in self.retries:
            return "waiting"
        if offset >= self.head:
            return "fresh"
        return "ready" if offset in self.ready else "taken"

    def attempt_of(self, offset: int) -> int:
        """Return the number that the next attempt has, or the one under way."""
        return 1 + self.attempts.get(offset, 0)

    def grants(self, ranges: Sequence[Range]) -> list[Grant]:
        """Return ranges split by attempt and by the number of the delivery.

        >>> share = Share("orders", start=0)
        >>> share.apply(Trace(did="lost", at_ms=0, ranges=((2, 3),), attempt=1))
        >>> share.apply(Trace(did="released", at_ms=0, ranges=((2, 4),)))
        >>> share.grants([(0, 5)])
        [(0, 2, 1, 1), (2, 3, 2, 3), (3, 4, 1, 2), (4, 5, 1, 1)]
        """
        if not self.attempts and not self.uncounted:
            return [(start, end, 1, 1) for start, end in ranges]
        grants: list[Grant] = []
        for start, end in ranges:
            for low, high, uncounted in self.uncounted.spans(start, end):
                self._append_grants(grants, low, high, uncounted)
        return grants

    def _append_grants(self, grants: list[Grant], start: int, end: int, uncounted: int) -> None:
        """Append a range that was delivered uncounted equally often, split by attempt."""
        # A loop over the messages that failed, which are few.
        for offset in sorted(_keys_in(self.attempts, start, end)):
            if start < offset:
                _append_grant(grants, (start, offset, 1, 1 + uncounted))
            attempt = self.attempt_of(offset)
            _append_grant(grants, (offset, offset + 1, attempt, attempt + uncounted))
            start = offset + 1
        if start < end:
            _append_grant(grants, (start, end, 1, 1 + uncounted))

    def split_alone(self, ranges: Sequence[Range]) -> tuple[list[Range], list[Range]]:
        """Return the ranges without and with those offsets that are delivered alone.

        >>> share = Share("orders", start=0)
        >>> share.apply(Trace(did="lost", at_ms=0, ranges=((2, 3),), attempt=1, alone=1))
        >>> share.split_alone([(0, 4)])
        ([(0, 2), (3, 4)], [(2, 3)])
        """
        alone = Ranges(
            (offset, offset + 1)
            for start, end in ranges
            for offset in sorted(_keys_in(self.alone, start, end))
        )
        return [part for one in ranges for part in alone.gaps(*one)], list(alone)

    # What comes next.

    def wake(self, now_ms: int) -> int:
        """Make ready what is due; return how many."""
        heap = self._heap
        due: list[int] = []
        while heap and heap[0][0] <= now_ms:
            due_at_ms, start, end = heapq.heappop(heap)
            for offset in range(start, end):
                if self.retries.get(offset) == due_at_ms:
                    del self.retries[offset]
                    due.append(offset)
        self._make_ready(ranges_of(due))
        return len(due)

    def next_due_ms(self) -> int | None:
        """Return when the next retry is due, or None when none waits."""
        heap = self._heap
        while heap:
            due_at_ms, start, end = heap[0]
            if any(self.retries.get(one) == due_at_ms for one in range(start, end)):
                return due_at_ms
            heapq.heappop(heap)
        return None

    def take(self, limit: int, *, end_offset: int, fresh: bool = True) -> list[Range]:
        """Return at most `limit` offsets to hand out, in order; they are taken now.

        While there are both, at most half comes from what is ready again, so that retries never
        delay fresh messages; of an odd limit the larger half goes in turn to each.
        """
        if not fresh or self.is_full:
            return self.ready.take(limit)
        again = 0
        if self.ready.starts:
            again = min(self.ready.count, (limit + self._is_their_turn) // 2)
            self._is_their_turn ^= limit % 2 == 1
        first = self.take_fresh(limit - again, end_offset=end_offset)
        if not self.ready.starts:
            return first
        parts = self.ready.take(limit - count_of(first))
        for part in first:
            _append(parts, part)
        return parts

    def take_fresh(self, limit: int, *, end_offset: int) -> list[Range]:
        """Return at most `limit` offsets that nobody took yet; they are taken now."""
        if limit <= 0:
            return []
        parts: list[Range] = []
        if self.head < self.mark:
            limit = self._take_open(limit, min(end_offset, self.mark), parts)
        if limit > 0 and self.mark <= self.head < end_offset:
            start, self.head = self.head, min(self.head + limit, end_offset)
            _append(parts, (start, self.head))
        return parts

    def give_back(self, ranges: Iterable[Range]) -> None:
        """Make ready what was taken and is neither finished nor waiting: nothing is counted."""
        parts = [part for start, end in ranges for part in self.unfinished(start, end)]
        self._make_ready(self._not_waiting(parts))

    def forget_below(self, first_offset: int) -> list[Range]:
        """Take and return what nobody took yet below an offset where the topic begins now.

        The caller writes a `skipped` row for it (or gives it back when that fails). What was taken
        once is not named: it is carried over, or its delivery finds that it is gone.
        """
        lost = self.fresh_below(first_offset)
        self.head = max(self.head, first_offset)
        return lost

    def fresh_below(self, offset: int) -> list[Range]:
        """Return what nobody took yet below an offset.

        >>> Share("orders", start=3).fresh_below(7)
        [(3, 7)]
        """
        if self.head >= offset:
            return []
        return self._not_waiting(self.unfinished(self.head, offset))

    def failed_below(self, offset: int) -> list[Range]:
        """Return what waits, has failed or is dead below an offset."""
        found = chain(self.retries, self.attempts, self.dead)
        return ranges_of(one for one in found if one < offset)

    def taken_below(self, offset: int) -> list[Range]:
        """Return what is unfinished below an offset and was taken once, or can be taken again."""
        return self.unfinished(self.cursor, min(offset, self.head))

    def needs(self, start: int, end: int) -> bool:
        """Tell whether anything of [start, end) is unfinished or dead."""
        return bool(self.unfinished(start, end)) or bool(_keys_in(self.dead, start, end))

    def restart(self) -> None:
        """Rebuild what is volatile: nothing is taken, everything unfinished can be."""
        self.head = self.mark
        self.ready = Ranges(self._not_waiting(list(self.open)))
        self._rebuild_heap()

    # What members may re-claim after a restart of the broker.

    def reserve(self, end_offset: int, *, now_ms: int) -> None:
        """Reserve whatever may have been leased below an offset, the topic's end at the restart.

        Grants are not written, so that is everything unfinished, and the retries that were due by
        now. A reserved offset is neither ready nor fresh: nobody gets it until `end_reservation`.

        >>> share = Share("orders", start=0)
        >>> share.reserve(10, now_ms=0)
        >>> share.claim(2, 4, attempt=1), share.take(10, end_offset=12)
        ([(2, 4)], [(10, 12)])
        >>> share.end_reservation()
        >>> share.take(10, end_offset=12)
        [(0, 2), (4, 10)]
        """
        self.head = max(self.head, end_offset)
        self.wake(now_ms)
        self.reserved = Ranges(self._not_waiting(self.unfinished(0, end_offset)))
        self.ready.clear()

    def claim(self, start: int, end: int, *, attempt: int) -> list[Range]:
        """Remove and return what of [start, end) is reserved and has this attempt under way."""
        grants = self.grants(self.reserved.overlap(start, end))
        parts = [(first, last) for first, last, number, _ in grants if number == attempt]
        for first, last in parts:
            self.reserved.remove(first, last)
        return parts

    def end_reservation(self) -> None:
        """Make ready what nobody has re-claimed; at the end of the topic it is fresh again.

        >>> share = Share("orders", start=0)
        >>> share.reserve(10, now_ms=0)
        >>> share.end_reservation()
        >>> share.state_of(7), share.fresh_below(10)
        ('fresh', [(0, 10)])
        """
        unclaimed, self.reserved = self.reserved, Ranges()
        *_, (start, end) = unclaimed or [(self.head, self.head)]
        if end == self.head:
            # Else retention would take a backlog that nobody was given for messages that failed.
            self.head = min(self.head, max(start, self.mark))
        self.give_back(unclaimed)

    def finished(self, start: int, end: int) -> list[Range]:
        """Return what of [start, end) is finished and not a dead letter."""
        unfinished = Ranges(self.unfinished(start, end))
        for offset in _keys_in(self.dead, start, end):
            unfinished.add(offset, offset + 1)
        return unfinished.gaps(start, end)

    # What rows say.

    def apply(self, row: Trace) -> None:
        """Fold one row; what a later version did is ignored."""
        match row.did:
            case "acked" | "filtered" | "skipped":
                for start, end in row.ranges:
                    self._finish(start, end)
            case "retried" | "expired" | "lost":
                for start, end in row.ranges:
                    self._fail(start, end, row)
                if not row.counted:
                    self._count_uncounted(row.ranges)
            case "released":
                self._count_uncounted(row.ranges)
                self.give_back(row.ranges)
            case "dead":
                for start, end in row.ranges:
                    self._bury(start, end, row)
            case "redriven":
                self._open_again(ranges_of(self._unbury(row.ranges)))
            case "purged":
                self._unbury(row.ranges)
            case "replayed":
                self._replay(row.ranges)
            case "reset":
                self._reset(row.offset)
            case _:
                pass

    def _finish(self, start: int, end: int) -> None:
        if start >= end:
            return
        if start < self.mark:
            self.open.remove(start, min(end, self.mark))
        if end > self.mark:
            # The hole between is unfinished: it is told from what is finished now.
            self.open.add(self.mark, start)
            self.mark = end
        if self.ready.starts:
            self.ready.remove(start, end)
        if self.reserved.starts:
            self.reserved.remove(start, end)
        _pop_keys(self.attempts, start, end)
        _pop_keys(self.retries, start, end)
        _pop_keys(self.alone, start, end)
        self.uncounted.remove(start, end)

    def _count_uncounted(self, ranges: Sequence[Range]) -> None:
        for one in ranges:
            for start, end in self.unfinished(*one):
                if len(self.uncounted) < RETRIES_MAX:
                    self.uncounted.add(start, end)

    def _fail(self, start: int, end: int, row: Trace) -> None:
        if start < end and end > self.mark:
            self.open.add(self.mark, end)
            self.mark = end
        waits = row.due_at_ms > row.at_ms
        for part_start, part_end in self.open.overlap(start, end):
            offsets = range(part_start, part_end)
            if row.attempt > 0:
                self.attempts.update(dict.fromkeys(offsets, row.attempt))
            else:
                _pop_keys(self.attempts, part_start, part_end)
            if row.alone > 0:
                self.alone.update(dict.fromkeys(offsets, row.alone))
            else:
                _pop_keys(self.alone, part_start, part_end)
            if waits:
                self.retries.update(dict.fromkeys(offsets, row.due_at_ms))
                self.ready.remove(part_start, part_end)
                heapq.heappush(self._heap, (row.due_at_ms, part_start, part_end))
            else:
                _pop_keys(self.retries, part_start, part_end)
                self._make_ready([(part_start, part_end)])
        if len(self._heap) > 2 * len(self.retries) + _STALE_MAX:
            self._rebuild_heap()

    def _bury(self, start: int, end: int, row: Trace) -> None:
        parts = self.unfinished(start, end)
        for offset in offsets_of(parts):
            self.dead[offset] = DeadLetter(offset, row.cause, row.attempt, row.member, row.at_ms)
        for part in parts:
            self._finish(*part)

    def _unbury(self, ranges: Iterable[Range]) -> list[int]:
        found = [offset for start, end in ranges for offset in _keys_in(self.dead, start, end)]
        # Ranges may overlap: each letter goes once.
        return [offset for offset in found if self.dead.pop(offset, None) is not None]

    def _replay(self, ranges: Sequence[Range]) -> None:
        self._unbury(ranges)
        for start, end in ranges:
            self._open_again(self.open.gaps(start, min(end, self.mark)))

    def _open_again(self, parts: list[Range]) -> None:
        self.open.update(parts)
        self._make_ready(parts)

    def _reset(self, offset: int) -> None:
        self._unbury([(offset, max(self.dead, default=offset) + 1)])
        self.mark = self.head = max(0, offset)
        self.open.clear()
        self.ready.clear()
        self.reserved.clear()
        self.retries.clear()
        self.attempts.clear()
        self.alone.clear()
        self.uncounted.clear()
        self._heap.clear()

    # Saving.

    def save(self) -> SavedShare:
        """Return the durable part."""
        return SavedShare(
            self.topic, self.mark, list(self.open), dict(self.retries), dict(self.attempts),
            list(self.dead.values()), dict(self.alone), uncounted_ranges=list(self.uncounted),
        )  # fmt: skip

    @classmethod
    def load(cls, saved: SavedShare) -> Share:
        """Return the share that was saved; nothing of it is taken."""
        share = cls(saved.topic, start=saved.mark)
        share.open = Ranges(saved.open)
        share.retries = dict(saved.retries)
        share.attempts = dict(saved.attempts)
        share.alone = dict(saved.alone)
        rows = saved.uncounted_ranges or ranges_of_offsets(saved.uncounted)
        share.uncounted = RangeCounts(rows)
        share.dead = {letter.offset: letter for letter in saved.dead}
        share.restart()
        return share

    def copy(self) -> Share:
        """Return a share with the same durable part; nothing of it is taken."""
        return Share.load(self.save())

    # What both sides need.

    def _take_open(self, limit: int, end: int, parts: list[Range]) -> int:
        """Take from [head, mark), where something is finished already; return what is left."""
        for part in self.open.walk(self.head, end):
            for start, stop in self._not_waiting([part]):
                stop = min(stop, start + limit)
                _append(parts, (start, stop))
                limit -= stop - start
                self.head = stop
                if limit <= 0:
                    return 0
        self.head = max(self.head, end)
        return limit

    def _make_ready(self, parts: list[Range]) -> None:
        # From `head` on nothing was taken: it comes by itself.
        head = self.head
        self.ready.update([(start, min(end, head)) for start, end in parts if start < head])

    def _not_waiting(self, parts: list[Range]) -> list[Range]:
        if not self.retries:
            return parts
        kept: list[Range] = []
        for start, end in parts:
            for offset in sorted(_keys_in(self.retries, start, end)):
                _append(kept, (start, offset))
                start = offset + 1
            _append(kept, (start, end))
        return kept

    def _rebuild_heap(self) -> None:
        self._heap = [(due_at_ms, one, one + 1) for one, due_at_ms in self.retries.items()]
        heapq.heapify(self._heap)


def _append(parts: list[Range], part: Range) -> None:
    """Put a range at the end of sorted ones; one that touches the last is merged with it."""
    start, end = part
    if start >= end:
        return
    if parts and parts[-1][1] == start:
        parts[-1] = (parts[-1][0], end)
    else:
        parts.append(part)


def _append_grant(grants: list[Grant], grant: Grant) -> None:
    start, end, attempt, deliveries = grant
    if grants and grants[-1][1:] == (start, attempt, deliveries):
        grants[-1] = (grants[-1][0], end, attempt, deliveries)
    else:
        grants.append(grant)


def _keys_in(mapping: dict[int, _T], start: int, end: int) -> list[int]:
    """Return the keys in [start, end): by whichever is shorter, the range or the mapping."""
    if not mapping:
        return []
    if end - start <= len(mapping):
        return [offset for offset in range(start, end) if offset in mapping]
    return [offset for offset in mapping if start <= offset < end]


def _pop_keys(mapping: dict[int, int], start: int, end: int) -> list[int]:
    found = _keys_in(mapping, start, end)
    for offset in found:
        del mapping[offset]
    return found
