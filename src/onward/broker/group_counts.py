"""How much a group has to do, in one answer from one moment: `group.counts`.

    scheduled ──fires──▶ ready ──▶ leased ──▶ finished, or dead
                           ▲          └──▶ retrying ──┐
                           └──────────────────────────┘

A message goes from left to right, so what is scheduled is counted first, and the rest in the same
turn of the loop: no message is in none of the counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from onward.broker.group_moves import find_sharing
from onward.broker.replies import Operation, ReadReplies
from onward.broker.schedule_scan import ScheduleScan
from onward.delivery.group import Group
from onward.protocol.payloads import decode_fields

if TYPE_CHECKING:
    from onward.broker.broker import Broker
    from onward.broker.session import Session

COUNTS_MAX: Final = 20


class GroupCounted(msgspec.Struct, frozen=True):
    """`group.counts`: of which group."""

    group: str


class GroupCounts:
    """Answers how much groups have to do."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._scan = ScheduleScan(broker.scheduling)
        self._replies = ReadReplies(limit=COUNTS_MAX)
        self.operations: dict[str, Operation] = {"group.counts": self._counts}

    def _counts(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        name = decode_fields(payload, GroupCounted).group
        find_sharing(self._broker, name)
        self._replies.check_room()
        self._replies.begin(session, request_id, self._count(name))

    async def _count(self, name: str) -> dict[str, object]:
        topics = frozenset(find_sharing(self._broker, name).record.topics)
        scheduled, is_exact = await self._scan.count(topics)
        # Nothing is awaited from here on: the counts are of one moment.
        group = find_sharing(self._broker, name)
        self._broker.consuming.wake_idle(group)
        leased = self._leased(group)
        retrying = sum(share.waiting_count for share in group.shares.values())
        return {
            "group": name,
            "ready": max(0, self._backlog(group) - leased - retrying),
            "leased": leased,
            "retrying": retrying,
            "scheduled": scheduled,
            "dead": sum(share.dead_count for share in group.shares.values()),
            "is_exact": is_exact and topics == frozenset(group.record.topics),
        }

    def _leased(self, group: Group) -> int:
        leases = self._broker.consuming.leases_of(group.record.name)
        # What is reserved after a restart may be in the hands of a member that comes back.
        return sum(leases.count_in(name) + one.reserved.count for name, one in group.shares.items())

    def _backlog(self, group: Group) -> int:
        """Return how many messages are unfinished, also of topics it has not begun with."""
        backlog = 0
        for name in group.record.topics:
            topic = self._broker.catalogue.by_name.get(name)
            share = group.shares.get(name)
            if topic is not None and share is not None:
                backlog += share.backlog(topic.next_offset)
            elif topic is not None:
                start = self._broker.consuming.start_of(group.record, topic)
                backlog += topic.next_offset - start
        return backlog
