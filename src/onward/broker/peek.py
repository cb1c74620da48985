"""Peek: what a group would hand out next, told without taking it.

    plain      what waits, the oldest first
    filtered   the same without what its filter drops
    choosy     in the order in which lanes choose: by key, tenant and priority

What waits is unfinished, held by no member and waits for no retry. A peek into a group that filters
or chooses looks into the log like a member's grant would, into lanes of its own: it is a rehearsal
with one member that takes one message at a time and is done with each. What it cannot know of the
group's life is left out: rates and limits of keys, and whose turn it is among tenants by what they
had before. An ordered key that waits for a retry waits here too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from itertools import chain
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from onward.broker.lookahead import LOOKS_MAX
from onward.delivery.lanes import HELD_MAX, Lanes
from onward.delivery.ranges import Range, Ranges, merged, ranges_of, without

if TYPE_CHECKING:
    from onward.broker.catalogue import Topic
    from onward.broker.lookahead import LookAhead
    from onward.delivery.record import GroupRecord
    from onward.delivery.share import Share

STEPS_MAX: Final = 1_000
"""After so many steps of a rehearsal others have their turn of the loop."""


class Peek:
    """One peek into one topic of a group."""

    def __init__(
        self, share: Share, topic: Topic, record: GroupRecord, *,
        leased: Callable[[], list[Range]], limit: int,
    ) -> None:  # fmt: skip
        # Limits of keys make messages later, they do not choose among them.
        self._record = replace(record, key_rate=0, key_concurrency=0)
        self._share = share
        self._topic = topic
        self._leased = leased
        self._limit = limit

    @property
    def is_plain(self) -> bool:
        """Tell whether it needs no look into the log."""
        return not self._record.is_choosy and not self._record.filter

    def oldest(self) -> list[Range]:
        """Return what comes next in a group that takes everything as it comes."""
        return self._waiting().take(self._limit)

    async def chosen(self, look_ahead: LookAhead) -> list[Range]:
        """Return what comes next in a group that filters or chooses, in the order of its choice."""
        if self._record.is_choosy:
            return await self._rehearsed(look_ahead)
        return await self._filtered(look_ahead)

    def _waiting(self, *, parked: bool = False) -> Ranges:
        share, topic = self._share, self._topic
        retries = [] if parked else ranges_of(share.retries)
        away = Ranges(merged(chain(self._leased(), retries)))
        return Ranges(without(share.unfinished(share.cursor, topic.next_offset), away))

    async def _filtered(self, look_ahead: LookAhead) -> list[Range]:
        wanted = Ranges()
        asked = self._waiting().take(HELD_MAX)
        looks = look_ahead.look_through(self._topic, asked, self._record, limit=LOOKS_MAX)
        async with aclosing(looks):
            async for looked in looks:
                wanted.update(looked.ranges)
                if wanted.count >= self._limit:
                    break
        return wanted.take(self._limit)

    async def _rehearsed(self, look_ahead: LookAhead) -> list[Range]:
        share, is_ordered = self._share, self._record.mode == "ordered"
        lanes = Lanes(self._record)
        asked = self._waiting(parked=is_ordered).take(HELD_MAX)
        looks = look_ahead.look_through(self._topic, asked, self._record, limit=LOOKS_MAX)
        async for looked in looks:
            lanes.add(
                looked.offsets, keys=looked.keys, tenants=looked.tenants,
                priorities=looked.priorities, failed=share.attempts,
            )  # fmt: skip
            if is_ordered:
                lanes.park([one for one in looked.offsets if one in share.retries])
        return _runs_of(await _in_turn(lanes, self._limit))


async def _in_turn(lanes: Lanes, limit: int) -> list[int]:
    chosen: list[int] = []
    while len(chosen) < limit and (one := lanes.take(1, now_ms=0)):
        lanes.finish(one)
        chosen += one
        if len(chosen) % STEPS_MAX == 0:
            await asyncio.sleep(0)
    return chosen


def _runs_of(offsets: list[int]) -> list[Range]:
    """Return offsets as ranges in their order; those that follow each other are one.

    >>> _runs_of([7, 0, 1, 2])
    [(7, 8), (0, 3)]
    """
    runs: list[Range] = []
    for offset in offsets:
        if runs and runs[-1][1] == offset:
            runs[-1] = (runs[-1][0], offset + 1)
        else:
            runs.append((offset, offset + 1))
    return runs
