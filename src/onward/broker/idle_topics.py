"""Topics that end by themselves: those that nobody has used for `expires_idle_ms`.

    used (published to, read, waited for, consumed; something is unread, dead or scheduled)
      └──▶ idle ── expires_idle_ms ──▶ ended, like a topic whose lifetime is over

Nothing is done for each message: a topic is looked at now and then, and one that differs from the
look before was used meanwhile. So it ends at its time or up to an eighth later, never before. Time
is that which the broker has served, as for groups.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

from onward.broker.broadcast import offsets_in
from onward.broker.idle_groups import STALE_MAX
from onward.broker.schedule_scan import ScheduleScan
from onward.delivery.group import Group
from onward.errors import OnwardError

if TYPE_CHECKING:
    from onward.broker.broker import Broker
    from onward.broker.catalogue import Topic

LOOKS_PER_TIME: Final = 8
LOOKED_MAX: Final = 1_000
"""So many topics are looked at in one round."""
COUNTED_MAX: Final = 16
"""Of so many the schedule is gone through one by one in a round."""

Seen = tuple[int, int]


class IdleTopics:
    """Ends topics that were idle for too long."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._scan = ScheduleScan(broker.scheduling)
        self._seen: dict[int, tuple[Seen, int]] = {}
        """By number: what the topic was like at the last look, and when it was used last."""
        self._due: list[tuple[int, int]] = []
        self._valid: dict[int, int] = {}
        self._has_begun = False

    @property
    def _now_ms(self) -> int:
        return self._broker.consuming.idle_groups.served_ms

    def note(self, topic: Topic) -> None:
        """Follow a topic that was created or changed."""
        if topic.record.expires_idle_ms:
            self._seen[topic.number] = _seen(topic), self._now_ms
            self._look_after(topic)
        else:
            self._forget(topic.number)

    async def tidy(self) -> None:
        """End the topics whose time has come."""
        if not self._has_begun:
            self._has_begun = True
            for topic in self._broker.catalogue.by_number.values():
                self.note(topic)
        idle = [topic for topic in self._take_due() if self._is_idle(topic)]
        if not idle:
            return
        # Mostly nothing is scheduled for any of them: then one count does for all.
        count, is_exact = await self._scan.count({topic.name for topic in idle})
        if count or not is_exact:
            idle = [topic for topic in idle[:COUNTED_MAX] if not await self._is_scheduled(topic)]
        for topic in idle:
            # Others had their turn meanwhile.
            if not topic.ending and self._is_idle(topic):
                self._end(topic)

    def _take_due(self) -> list[Topic]:
        """Return the topics to look at now; each is looked at again, unless it ends."""
        found: list[Topic] = []
        while self._due and self._due[0][0] <= self._now_ms and len(found) < LOOKED_MAX:
            due_ms, number = heapq.heappop(self._due)
            if self._valid.get(number) != due_ms:
                continue
            topic = self._broker.catalogue.by_number.get(number)
            if topic is None:
                self._forget(number)
            else:
                found.append(topic)
                self._look_after(topic)
        return found

    def _is_idle(self, topic: Topic) -> bool:
        """Return True if a topic was not used for its time; take note of it if it was."""
        if topic.number not in self._seen:
            # It was changed meanwhile, and does not expire any more.
            return False
        before, used_at_ms = self._seen[topic.number]
        if _seen(topic) != before or self._is_used(topic):
            self._seen[topic.number] = _seen(topic), self._now_ms
            return False
        return self._now_ms - used_at_ms >= topic.record.expires_idle_ms

    def _is_used(self, topic: Topic) -> bool:
        groups = self._broker.consuming.groups
        awaited = topic.record.retention_group
        return bool(
            topic.crews
            or topic.watches
            or topic.staged_offset != topic.next_offset
            or self._broker.delivering.is_read(topic)
            or (awaited and awaited not in groups.by_name and topic.next_offset)
            or any(self._is_unread(group, topic) for group in groups.of_topic(topic.name))
        )

    def _is_unread(self, group: Group, topic: Topic) -> bool:
        """Return True if a group has something to do in a topic, or dead letters of it."""
        if group.record.mode == "broadcast":
            return any(offset < topic.next_offset for offset in offsets_in(group, topic))
        share = group.shares.get(topic.name)
        if share is None:
            return self._broker.consuming.start_of(group.record, topic) < topic.next_offset
        return bool(share.backlog(topic.next_offset) or share.dead_count)

    async def _is_scheduled(self, topic: Topic) -> bool:
        count, is_exact = await self._scan.count({topic.name})
        if (count or not is_exact) and topic.number in self._seen:
            self._seen[topic.number] = _seen(topic), self._now_ms
            return True
        return False

    def _look_after(self, topic: Topic) -> None:
        wait_ms = max(1, topic.record.expires_idle_ms // LOOKS_PER_TIME)
        self._valid[topic.number] = self._now_ms + wait_ms
        heapq.heappush(self._due, (self._valid[topic.number], topic.number))
        if len(self._due) > 2 * len(self._valid) + STALE_MAX:
            self._due = sorted((due_ms, number) for number, due_ms in self._valid.items())

    def _forget(self, number: int) -> None:
        self._seen.pop(number, None)
        self._valid.pop(number, None)

    def _end(self, topic: Topic) -> None:
        def done(error: OnwardError | None) -> None:
            if error is None:
                self._forget(topic.number)

        self._broker.end_topic(topic, "expired", done=done)


def _seen(topic: Topic) -> Seen:
    return topic.uses, topic.next_offset
