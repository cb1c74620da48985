"""Where the next messages of a group come from: the share itself, or a look ahead into the log.

    plain     share ─ take ─▶ granted
    filtered  share ─ take ─▶ looked at ─▶ wanted ─▶ granted
    choosy    share ─ take ─▶ looked at ─▶ lanes (per key, tenant, priority) ─▶ granted

Only groups that filter or choose pay for looking at messages. What was looked at is bounded; what
is not granted goes back to the share when the last member leaves. What failed and comes again takes
turns with what is fresh, in looking and in granting; what a look or a delivery did not come to
stays in its place. An ordered group looks at what waits for a
retry before anything else: later messages of those keys must stay behind it. One that limits how
many of a key are out looks at what is out already, when its rules have changed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from onward.delivery.lanes import HELD_MAX, Lanes
from onward.delivery.ranges import Range, Ranges, count_of, merged, offsets_of, ranges_of
from onward.delivery.trace import Trace

if TYPE_CHECKING:
    from onward.broker.catalogue import Topic
    from onward.broker.lookahead import LookAhead, Looked
    from onward.clock import Clock
    from onward.delivery.record import GroupRecord
    from onward.delivery.share import Share

logger = logging.getLogger("onward.consume")

LOOK_MAX = 4_096
WANTED_MIN = 8_192
"""With so many at hand a group does not look further."""
CHOSEN_MAX = 64
"""A grant of a choosy group is small: what is better may come next."""

RESERVED_LOOKED_MAX = 8_192
"""An ordered group with more messages that may be re-claimed grants nothing else until then."""
TENANT_HELD_MAX = 8_192
"""So many of one tenant are held at once; what it has beyond is put aside, and others are seen."""
ASIDE_MAX = 10_000_000

FINISHED = frozenset(("acked", "dead", "skipped", "filtered"))
PARKED = frozenset(("retried", "expired", "lost", "released"))


class Source(Protocol):
    """What can be granted of one topic to one group."""

    share: Share

    @property
    def is_looking(self) -> bool:
        """Tell whether a look into the log is under way: more may come of it."""
        ...

    def available(self) -> int:
        """Return how many offsets `take` could give."""
        ...

    def take(self, limit: int) -> list[Range]:
        """Take at most `limit` offsets."""
        ...

    def give_back(self, ranges: list[Range]) -> None:
        """Let ranges that were taken be taken again."""
        ...

    def put_back(self, ranges: list[Range]) -> None:
        """Take back what did not fit into a delivery: it comes next, before what is after it."""
        ...

    def applied(self, row: Trace) -> None:
        """Follow what a durable row did to the share."""
        ...

    def wait_ms(self) -> int | None:
        """Return how long it is until a limit lets something through that waits now."""
        ...

    def first_of_key(self, offset: int) -> int | None:
        """Return which message of its key comes first, perhaps itself; None: it is not in view."""
        ...

    def close(self) -> None:
        """Give everything that is not granted back to the share."""
        ...


class PlainSource:
    """Everything, as it comes."""

    def __init__(self, share: Share, topic: Topic, *, is_exclusive: bool) -> None:
        self.share = share
        self._topic = topic
        self._is_exclusive = is_exclusive
        self._back = Ranges()
        """What did not fit into the delivery that it was taken for."""
        self.is_looking = False

    def available(self) -> int:
        """Return how many offsets `take` could give."""
        if self._is_exclusive and self.share.reserved:
            return 0  # nothing overtakes what the member that was active may re-claim
        if self._is_exclusive and self.share.alone:
            return self._in_order().count
        fresh = self._topic.next_offset - self.share.head
        known = self._back.count + self.share.ready.count
        return known + (0 if self.share.is_full else max(0, fresh))

    def take(self, limit: int) -> list[Range]:
        """Take at most `limit` offsets."""
        if self._is_exclusive and self.share.alone:
            first = self._in_order().take(limit)
            for start, end in first:
                self.share.ready.remove(start, end)
            return first
        if self._back:
            return self._back.take(limit)
        # Whoever takes over goes on where the one before was: nothing overtakes what comes again.
        is_late = self._is_exclusive and bool(self.share.ready)
        return self.share.take(
            limit, end_offset=self._topic.next_offset, fresh=not is_late and not self.share.is_full
        )

    def _in_order(self) -> Ranges:
        """Return what may be taken while a suspect is unfinished: nothing beyond it."""
        return Ranges(self.share.ready.overlap(0, min(self.share.alone) + 1))

    def give_back(self, ranges: list[Range]) -> None:
        """Let ranges that were taken be taken again."""
        self.share.give_back(ranges)

    def put_back(self, ranges: list[Range]) -> None:
        """Let what did not fit come next; in an exclusive group all that comes again does."""
        if self._is_exclusive:
            self.share.give_back(ranges)
        else:
            self._back.update(_unfinished(self.share, ranges))

    def applied(self, row: Trace) -> None:
        """Follow what a durable row did to the share."""
        if row.did == "reset":
            self._back.clear()
        elif self._back:
            for start, end in row.ranges:
                self._back.remove(start, end)

    def wait_ms(self) -> int | None:
        """Nothing waits here."""
        return None

    def first_of_key(self, offset: int) -> int | None:
        """Nothing waits for its key here."""
        return offset

    def close(self) -> None:
        """Give everything that is not granted back to the share."""
        self.share.give_back(list(self._back))
        self._back.clear()


class ChosenSource:
    """What the group's filter wants, in the order that its lanes choose."""

    def __init__(
        self, share: Share, topic: Topic, *, record: GroupRecord, look_ahead: LookAhead,
        wake: Callable[[], None], settle: Callable[[list[Trace]], None], clock: Clock,
        leased: Callable[[], list[Range]],
    ) -> None:  # fmt: skip
        self.share = share
        self._topic = topic
        self._record = record
        self._look_ahead = look_ahead
        self._wake = wake
        self._settle = settle
        self._now_ms = clock.now_ms
        self._monotonic_ms = clock.monotonic_ms
        self._lanes = Lanes(record, buckets=share.buckets) if record.is_choosy else None
        self._wanted = Ranges()
        self._wanted_again = Ranges()
        self._is_their_turn = True
        """Of an odd number the larger half is for what failed; then it is for what is fresh."""
        self._leased = leased
        knows_keys = record.mode == "ordered" or bool(record.key_concurrency)
        self._parked: list[Range] | None = None if knows_keys else []
        """What must be known before anything else is looked at; None: that is to be found out."""
        self._looking: asyncio.Task[None] | None = None
        self._looked: list[Range] = []
        """What was taken from the share for the look that is under way."""
        self._looked_again = Ranges()
        """What of it had failed before."""
        self._left: list[Range] = []
        """What the last look did not come to; it stays what it was, fresh or failed."""
        self._is_closed = False
        self._has_warned = False
        self._aside: dict[str | None, Ranges] = {}
        """By tenant: what was looked at and is not held, because the tenant has enough in line."""

    def available(self) -> int:
        """Return how many offsets `take` could give; look further when these are few."""
        if self._lanes is not None:
            self._lanes.wake(self._monotonic_ms())
        # Fair is only who sees all of them: behind a flood there may be others.
        is_picky = self._record.priorities or self._record.tenants is not None
        if is_picky or self._at_hand < WANTED_MIN:
            self._look_further()
        return self._at_hand

    @property
    def is_looking(self) -> bool:
        """Tell whether a look into the log is under way: more may come of it."""
        return self._looking is not None

    @property
    def _at_hand(self) -> int:
        if self._lanes is not None:
            return self._lanes.ready_count
        return self._wanted.count + self._wanted_again.count

    def take(self, limit: int) -> list[Range]:
        """Take at most `limit` offsets: those that come first by the group's rules."""
        if self._lanes is None:
            return self._take_wanted(limit)
        chosen = self._lanes.take(min(limit, CHOSEN_MAX), now_ms=self._monotonic_ms())
        if self._record.priorities:
            # A delivery is read in the order of offsets: what must come after it comes with the
            # next one.
            readable = self._lanes.in_order_of_offsets(chosen)
            self._lanes.again(chosen[readable:])
            del chosen[readable:]
        return ranges_of(chosen)

    def _take_wanted(self, limit: int) -> list[Range]:
        """Take from both, half of what failed while there is both."""
        again = min(self._wanted_again.count, (limit + self._is_their_turn) // 2)
        if self._wanted_again:
            self._is_their_turn ^= limit % 2 == 1
        fresh = self._wanted.take(limit - again)
        return merged([*fresh, *self._wanted_again.take(limit - count_of(fresh))])

    def give_back(self, ranges: list[Range]) -> None:
        """Let ranges that were taken be taken again."""
        if self._lanes is None:
            not_held = [part for one in ranges for part in self._wanted.gaps(*one)]
            not_held = [part for one in not_held for part in self._wanted_again.gaps(*one)]
            self.share.give_back(not_held)
            return
        known = self._lanes.held_in(ranges)
        self._lanes.again(known)
        rest = Ranges(ranges)
        for offset in known:
            rest.remove(offset, offset + 1)
        self.share.give_back(list(rest))

    def put_back(self, ranges: list[Range]) -> None:
        """Let what did not fit come next: it was looked at, and is wanted."""
        if self._lanes is None:
            self._wanted.update(_unfinished(self.share, ranges))
        else:
            self.give_back(ranges)

    def applied(self, row: Trace) -> None:
        """Follow what a durable row did to the share."""
        for ranges in self._aside.values():
            for start, end in row.ranges:
                ranges.remove(start, end)
        if row.did == "reset":
            self._forget()
        elif self._lanes is None:
            if row.did in FINISHED or row.did in PARKED:
                for start, end in row.ranges:
                    self._wanted.remove(start, end)
                    self._wanted_again.remove(start, end)
        elif row.did in FINISHED:
            self._lanes.finish(self._lanes.held_in(row.ranges))
        elif row.did in PARKED:
            held = self._lanes.held_in(row.ranges)
            self._lanes.park(held)
            is_behind = self._record.mode == "ordered" and len(held) < count_of(row.ranges)
            if is_behind and self._parked is not None:
                # Somebody else had them: later messages of their keys must stay behind them. While
                # it is not known what else waits, they are found out with the rest.
                unknown = Ranges(row.ranges)
                for offset in held:
                    unknown.remove(offset, offset + 1)
                self._parked = [*self._parked, *unknown]

    def wait_ms(self) -> int | None:
        """Return how long a key's limit holds something back; None when nothing waits for one."""
        if self._lanes is None:
            return None
        now_ms = self._monotonic_ms()
        ready_ms = self._lanes.next_ready_ms(now_ms)
        return None if ready_ms is None else ready_ms - now_ms

    def first_of_key(self, offset: int) -> int | None:
        """Return which message of its key comes first, perhaps itself; None: it is not in view."""
        return offset if self._lanes is None else self._lanes.first_of_key(offset)

    def close(self) -> None:
        """Give everything that is not granted back to the share."""
        self._is_closed = True
        self._end_look()
        for ranges in self._aside.values():
            self.share.give_back(list(ranges))
        self._aside.clear()
        self.share.give_back([*self._left, *self._wanted, *self._wanted_again])
        self._left = []
        if self._lanes is not None:
            self.share.give_back(ranges_of(self._lanes.drop_all()))
        self._wanted.clear()
        self._wanted_again.clear()

    def _forget(self) -> None:
        """The share begins anew: what was looked at before means nothing."""
        self._wanted.clear()
        self._wanted_again.clear()
        self._aside.clear()
        self._left = []
        self._parked = []
        if self._lanes is not None:
            self._lanes.drop_all()
        # These are no longer taken: they come by themselves.
        self._looked = []
        self._end_look()

    def _end_look(self) -> None:
        """End the look under way; what was taken for it goes back, whether it had begun or not."""
        looking, self._looking = self._looking, None
        looked, self._looked = self._looked, []
        if looking is not None:
            looking.cancel()
        self.share.give_back(looked)

    def _look_further(self) -> None:
        if self._looking is None and not self._is_closed and (ranges := self._next_ranges()):
            is_parked = bool(self._parked)
            self._looked = [] if is_parked else ranges
            self._looking = asyncio.get_running_loop().create_task(self._look(ranges, is_parked))
            self._looking.add_done_callback(self._looked_at)

    def _next_ranges(self) -> list[Range]:
        """Return what to look at next, and take it from the share."""
        if self._waits_for_claims():
            return []
        if self._parked is None:
            is_ordered = self._record.mode == "ordered"
            # What is delivered alone may wait elsewhere by now.
            behind = self.share.retries.keys() | self.share.alone.keys()
            waiting = ranges_of(behind) if is_ordered else []
            self._parked = merged([*waiting, *self._leased(), *self.share.reserved])
        if self._parked:
            return self._parked
        left, self._left = _unfinished(self.share, self._left), []
        if left:
            return left
        if self._lanes is not None and (aside := self._next_aside()):
            return aside
        # What is known needs no room; of the rest only as much is taken as there is room for.
        self._warn_when_blind()
        room = LOOK_MAX if self._lanes is None else min(LOOK_MAX, HELD_MAX - self._lanes.count)
        end_offset = self._topic.next_offset
        unknown = Ranges(self._again(self.share.take(LOOK_MAX, end_offset=end_offset, fresh=False)))
        is_ordered = self._record.mode == "ordered"
        again = unknown.take(room if is_ordered else -(-room // 2))
        self.share.give_back(list(unknown))
        self._looked_again = Ranges(again)
        if is_ordered and (again or self.share.ready):
            # What is to be delivered again comes before later messages of its key.
            return again
        return merged([*again, *self._next_fresh(room - count_of(again))])

    def _waits_for_claims(self) -> bool:
        """Return True while nothing may be granted but what members re-claim after a restart.

        Reserved messages hold their keys like those that wait for a retry. If there are too many
        to look at, any key may have one.
        """
        reserved = self.share.reserved
        if not reserved:
            return False
        if self._record.mode == "exclusive":
            return True
        return self._parked is None and reserved.count > RESERVED_LOOKED_MAX

    def _warn_when_blind(self) -> None:
        """Say it once when there is no room to look further, and nothing in view may be taken."""
        if self._lanes is None or self._lanes.ready_count:
            return
        if self._lanes.room:
            self._has_warned = False
        elif not self._has_warned:
            self._has_warned = True
            logger.warning(
                "group %r sees %d messages of topic %r that all wait, for their keys or a retry: "
                "others are not looked at until one of them goes on",
                self._record.name, self._lanes.count, self._topic.name,
            )  # fmt: skip

    def _next_fresh(self, room: int) -> list[Range]:
        """Take what nobody has looked at; nothing while too much of it has failed or lies aside."""
        is_full = sum(ranges.count for ranges in self._aside.values()) >= ASIDE_MAX
        if is_full or self.share.is_full or room <= 0:
            return []
        return self.share.take_fresh(room, end_offset=self._topic.next_offset)

    def _next_aside(self) -> list[Range]:
        """Return what was put aside of a tenant that has little in line now."""
        assert self._lanes is not None
        for tenant, ranges in list(self._aside.items()):
            if not ranges:
                del self._aside[tenant]
            elif self._lanes.count_of(tenant) < TENANT_HELD_MAX // 2:
                return ranges.take(TENANT_HELD_MAX // 2)
        return []

    def _again(self, ranges: list[Range]) -> list[Range]:
        """Let known ones be taken again at once; return the others."""
        if self._lanes is None:
            return ranges
        unknown = []
        for offset in offsets_of(ranges):
            if self._lanes.knows(offset):
                self._lanes.again([offset])
            else:
                unknown.append(offset)
        return ranges_of(unknown)

    async def _look(self, ranges: list[Range], is_parked: bool) -> None:
        looked = await self._look_ahead.look(self._topic, ranges, self._record)
        self._looked = []
        if is_parked:
            # Others may have been added meanwhile, behind these.
            self._parked = [*looked.next_ranges, *(self._parked or ())[len(ranges) :]]
        elif self._record.mode == "ordered":
            # Something that failed may be before it by then: both are put in order by the share.
            self.share.give_back(looked.next_ranges)
        else:
            self._left = looked.next_ranges
        self._take_in(looked, is_parked=is_parked)

    def _take_in(self, looked: Looked, *, is_parked: bool) -> None:
        if not is_parked:
            self._settle(self._rows(looked))
        if self._lanes is None:
            for start, end in looked.ranges:
                # What was finished meanwhile, by an operator, is not wanted any more.
                for part in self.share.unfinished(start, end):
                    self._wanted_again.update(self._looked_again.overlap(*part))
                    self._wanted.update(self._looked_again.gaps(*part))
            return
        offsets = looked.offsets
        if looked.tenants is not None and not is_parked:
            self._put_aside(looked)
            offsets = looked.offsets
        self._lanes.add(
            offsets, keys=looked.keys, tenants=looked.tenants, priorities=looked.priorities,
            failed=self._looked_again,
        )  # fmt: skip
        if is_parked and self._record.mode == "ordered":
            # What has become due meanwhile is taken from the share next, and goes on from there.
            self._lanes.park(offsets)
        elif is_parked:
            self._lanes.take_over(offsets)
        states = map(self.share.state_of, offsets)
        ended = [
            one
            for one, state in zip(offsets, states, strict=True)
            if state in ("finished", "dead") or (state == "waiting" and not is_parked)
        ]
        self._lanes.finish(ended)

    def _put_aside(self, looked: Looked) -> None:
        """Leave only so many of each tenant among what was looked at as it may have in line."""
        assert self._lanes is not None
        assert looked.tenants is not None
        room = {
            tenant: TENANT_HELD_MAX - self._lanes.count_of(tenant) for tenant in set(looked.tenants)
        }
        kept = []
        for row, (offset, tenant) in enumerate(zip(looked.offsets, looked.tenants, strict=True)):
            if room[tenant] > 0:
                room[tenant] -= 1
                kept.append(row)
            else:
                self._aside.setdefault(tenant, Ranges()).add(offset, offset + 1)
        if len(kept) < len(looked.offsets):
            looked.keep(kept)

    def _rows(self, looked: Looked) -> list[Trace]:
        now_ms, name = self._now_ms(), self._record.name
        rows = []
        if looked.unwanted:
            rows.append(
                Trace(
                    did="filtered", at_ms=now_ms, group=name, topic=self._topic.name,
                    ranges=tuple(looked.unwanted),
                )
            )  # fmt: skip
        if looked.gone:
            rows.append(gone_row(name, self._topic.name, looked.gone, now_ms=now_ms))
        return rows

    def _looked_at(self, task: asyncio.Task[None]) -> None:
        if self._looking is not task:
            return
        self._end_look()
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            logger.error("looking ahead in topic %r failed", self._topic.name, exc_info=error)
            asyncio.get_running_loop().call_later(1, self._wake)
        else:
            self._wake()


def _unfinished(share: Share, ranges: list[Range]) -> list[Range]:
    return [part for start, end in ranges for part in share.unfinished(start, end)]


GONE = "it was retained away before it was consumed"


def gone_row(
    group: str, topic: str, ranges: list[Range], *, now_ms: int, cause: str = GONE
) -> Trace:
    """Return the row that says that messages are not stored any more."""
    return Trace(
        did="skipped", at_ms=now_ms, group=group, topic=topic, ranges=tuple(ranges),
        cause=cause,
    )  # fmt: skip
