"""Which message of its key comes before another one, in the ordered groups of a topic.

    in the group's lanes  ──▶ they know it
    not there             ──▶ its key is looked for in the log, among what is unfinished before it

Lanes know what members were given or will be given next. Without members there are none, and they
hold only so many messages. A look into the log is bounded as well, and for all groups together:
what lies beyond is not known, and that is told.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING

from onward.broker.lookahead import LOOKS_MAX
from onward.delivery.lanes import HELD_MAX
from onward.delivery.ranges import Ranges, count_of

if TYPE_CHECKING:
    from onward.broker.broker import Broker
    from onward.broker.catalogue import Topic
    from onward.delivery.group import Group
    from onward.delivery.record import GroupRecord
    from onward.delivery.share import Share


async def find_ahead(broker: Broker, topic: Topic, offset: int) -> dict[str, int | None]:
    """Return by group which message must be finished first; None: too many are before it to tell.

    Groups in which nothing comes before it are left out.
    """
    search = _Search(broker, topic, offset)
    ahead: dict[str, int | None] = {}
    for group in broker.consuming.groups.of_topic(topic.name):
        share = group.shares.get(topic.name)
        if group.record.mode != "ordered" or share is None:
            continue
        if share.state_of(offset) in ("finished", "dead"):
            continue
        first = _known_first(broker, group, topic, offset)
        if first is None:
            first = await search.first_in(share, group.record)
        if first != offset:
            ahead[group.record.name] = first
    return ahead


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
        self._looks_left = LOOKS_MAX

    async def first_in(self, share: Share, record: GroupRecord) -> int | None:
        """Return the first unfinished message of the key, perhaps itself; None: not found out."""
        offset = self._offset
        before = share.unfinished(max(share.cursor, self._topic.first_offset), offset)
        key = await self._key_in(record) if before else None
        if key is None:
            return offset
        asked = Ranges(before).take(HELD_MAX)
        left = count_of(asked)
        looks = self._look_ahead.look_through(self._topic, asked, record, limit=self._looks_left)
        async with self._look_ahead.answers, aclosing(looks):
            async for looked in looks:
                self._looks_left -= 1
                if looked.keys and key in looked.keys:
                    return looked.offsets[looked.keys.index(key)]
                left = count_of(looked.next_ranges)
        return offset if not left and count_of(asked) == count_of(before) else None

    async def _key_in(self, record: GroupRecord) -> str | None:
        """Return the key of the message; None too when the group's filter drops it."""
        here = [(self._offset, self._offset + 1)]
        looked = await self._look_ahead.look(self._topic, here, record)
        return looked.keys[0] if looked.keys else None
