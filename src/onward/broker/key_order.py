"""Which message of its key comes before another one, in the ordered groups of a topic.

    in the group's lanes  ──▶ they know it
    not there             ──▶ its key is looked for in the log, among what is unfinished before it

Lanes know what members were given or will be given next. Without members there are none, and they
hold only so many messages. A look into the log is bounded as well, and for all groups together:
what lies beyond is not known, and that is told. What was seen for one group is known for all that
have the same filter, and those that are nearest to the message come first: so groups that have
much before it take nothing from those that have little.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from onward.broker.lookahead import LOOKS_MAX, Looked
from onward.delivery.lanes import HELD_MAX
from onward.delivery.ranges import Range, Ranges, count_of, ranges_of, without
from onward.delivery.record import GroupRecord

if TYPE_CHECKING:
    from onward.broker.broker import Broker
    from onward.broker.catalogue import Topic
    from onward.delivery.group import Group
    from onward.delivery.share import Share

_UNFILTERED: Final = GroupRecord("any", mode="ordered")


async def find_ahead(broker: Broker, topic: Topic, offset: int) -> dict[str, int | None]:
    """Return by group which message must be finished first; None: not found out.

    Groups in which nothing comes before it are left out.
    """
    search = _Search(broker, topic, offset)
    ahead: dict[str, int | None] = {}
    for group, share in _ordered(broker, topic):
        if share.state_of(offset) in ("finished", "dead"):
            continue
        first = _known_first(broker, group, topic, offset)
        if first is None:
            first = await search.first_in(share, group.record)
        if first != offset:
            ahead[group.record.name] = first
    return ahead


def _ordered(broker: Broker, topic: Topic) -> list[tuple[Group, Share]]:
    """Return the ordered groups of a topic, those that are farthest with it first."""
    groups = [
        (group, group.shares[topic.name])
        for group in broker.consuming.groups.of_topic(topic.name)
        if group.record.mode == "ordered" and topic.name in group.shares
    ]
    return sorted(groups, key=lambda one: one[1].cursor, reverse=True)


def _known_first(broker: Broker, group: Group, topic: Topic, offset: int) -> int | None:
    crew = broker.consuming.crews.get(group.record.name)
    source = None if crew is None else crew.sources.get(topic.name)
    return None if source is None else source.first_of_key(offset)


class _Search:
    """Looks for the key of one message among those before it; with one allowance for all groups."""

    def __init__(self, broker: Broker, topic: Topic, offset: int) -> None:
        self._look_ahead = broker.consuming.look_ahead
        self._topic = topic
        self._offset = offset
        self._here = [(offset, offset + 1)]
        self._keys: list[str | None] | None = None
        """The key of the message, once it was read; nothing when it is gone."""
        self._seen: dict[bytes, _Seen] = {}
        """By filter."""
        self._looks_left = LOOKS_MAX

    async def first_in(self, share: Share, record: GroupRecord) -> int | None:
        """Return the first unfinished message of the key, perhaps itself; None: not found out."""
        # Many groups may be told from what was seen: others have their turn of the loop.
        await asyncio.sleep(0)
        offset = self._offset
        before = share.unfinished(share.cursor, offset)
        if not before or await self._key() is None:
            return offset
        seen = self._seen.setdefault(msgspec.msgpack.encode(record.filter), _Seen())
        if record.filter:
            if not await self._look_at(self._here, seen, record):
                return None
            if offset not in seen.same_key:
                return offset
        asked = Ranges(before).take(HELD_MAX)
        if not await self._look_at(asked, seen, record):
            return None
        first = seen.first_in(asked)
        if first is None and count_of(asked) == count_of(before):
            return offset
        return first

    async def _key(self) -> str | None:
        """Return the key of the message; read once, whatever filters there are."""
        if self._keys is None:
            looked = await self._look(self._here, _UNFILTERED)
            self._keys = looked.keys or []
        return self._keys[0] if self._keys else None

    async def _look_at(self, asked: Sequence[Range], seen: _Seen, record: GroupRecord) -> bool:
        """See `asked`, up to the first of the key; tell whether the allowance was enough."""
        while unseen := seen.unseen(asked):
            if not self._looks_left:
                return False
            self._looks_left -= 1
            seen.add(unseen, await self._look(unseen, record), await self._key())
        return True

    async def _look(self, ranges: Sequence[Range], record: GroupRecord) -> Looked:
        async with self._look_ahead.answers:
            return await self._look_ahead.look(self._topic, ranges, record)


class _Seen:
    """What was looked at through one filter, and which messages of the key it lets through."""

    def __init__(self) -> None:
        self.ranges = Ranges()
        self.same_key = Ranges()

    def first_in(self, asked: Sequence[Range]) -> int | None:
        """Return the first message of the key that was seen among `asked`."""
        hits = (hit for start, end in asked for hit, _ in self.same_key.walk(start, end))
        return next(hits, None)

    def unseen(self, asked: Sequence[Range]) -> list[Range]:
        """Return what of `asked` must be seen to know the first; what is behind one need not."""
        first = self.first_in(asked)
        if first is not None:
            asked = [(start, min(end, first)) for start, end in asked if start < first]
        return without(asked, self.ranges)

    def add(self, asked: list[Range], looked: Looked, key: str | None) -> None:
        """Note what a look found that was asked for these ranges."""
        assert looked.keys is not None, "an ordered group asks for keys"
        self.ranges.update(without(asked, Ranges(looked.next_ranges)))
        columns = zip(looked.offsets, looked.keys, strict=True)
        self.same_key.update(ranges_of(offset for offset, one in columns if one == key))
