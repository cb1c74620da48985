"""The live part of one group: its members, what they hold, and who comes next.

    joined ──▶ active ──▶ gone          exclusive: joined ──▶ standby ──▶ active ──▶ gone

A crew exists while its group has members. Everything here is forgotten with the broker; what must
survive is in the `Share`s of the group. A member gets only topics that it named, or all of the
group if it named none. Members wait in one line for each set of topics: mostly there is one line.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Literal

from onward.broker.futures import Done
from onward.delivery.lease import Leases
from onward.delivery.ranges import Ranges
from onward.delivery.turns import Turns

if TYPE_CHECKING:
    from onward.broker.catalogue import Topic
    from onward.broker.choosing import Source
    from onward.broker.session import Session
    from onward.delivery.group import Group

Topics = frozenset[str]
DELIVERY_BYTES = 640 << 10
"""A little more than a delivery has: what is too much goes back."""


class Member:
    """One consumer of a group, on one connection."""

    __slots__ = (
        "acked", "consumer_id", "crew", "delivered", "expired", "follows", "function",
        "is_recalled", "is_stuck", "is_waiting", "joined_at_ms", "name", "recalls", "retried",
        "session", "starts", "state", "topics", "was_apart",
    )  # fmt: skip

    def __init__(
        self, name: str, session: Session, consumer_id: int, *, crew: Crew, topics: Topics,
        joined_at_ms: int, starts: bool = False, recalls: bool = False, function: str = "",
        follows: bool = False,
    ) -> None:  # fmt: skip
        self.name = name
        self.session = session
        self.consumer_id = consumer_id
        self.crew = crew
        self.topics = topics
        self.follows = follows
        """It named no topics: it gets those of its group, whatever they become."""
        self.state: Literal["active", "standby"] = "active"
        self.joined_at_ms = joined_at_ms
        self.starts = starts
        """It reports what it starts."""
        self.recalls = recalls
        """It understands RECALL."""
        self.is_recalled = False
        """It was sent a RECALL, and no outcome or start came from it since."""
        self.is_stuck = False
        """Messages waited there, and it has neither started nor settled any since."""
        self.function = function
        """Which function of its program it works for, as the member says; for people."""
        self.is_waiting = False
        """Its socket is full, it holds too much, or it is kept apart: it stands in no line."""
        self.was_apart = False
        """It has had a suspect: next it gets something else, if there is any."""
        self.delivered = self.acked = self.retried = self.expired = 0

    @property
    def credit(self) -> int:
        """Return how many deliveries it may still get."""
        return self.crew.credit_of(self)

    def start(self, delivery: int, start: int, end: int, *, now_ms: int) -> None:
        """Take note that it starts a part of a delivery; of one that is not its own: nothing."""
        self.is_recalled = self.is_stuck = False
        lease = self.crew.leases.find(delivery)
        if lease is not None and lease.member == self.name:
            lease.start(start, end, now_ms=now_ms)


class Crew:
    """A group that has members."""

    def __init__(self, group: Group, *, first_lease: int) -> None:
        self.group = group
        self.members: dict[str, Member] = {}
        self.leases = Leases(first_id=first_lease)
        self.sources: dict[str, Source] = {}
        self.topics: dict[str, Topic] = {}
        self._lines: dict[Topics, Turns[Member]] = {}
        self._credits: dict[Member, int] = {}
        """What members may get that stand in no line: stand-bys, and those whose socket is full."""
        self.turn: deque[str] = deque()
        """The topics, the one whose turn it is first."""
        self._message_bytes: dict[str, int] = {}
        self.suspects: dict[str, Ranges] = {}
        """By topic: what is delivered alone, and waits for a member that holds nothing."""
        self.apart: dict[Member, int | None] = {}
        """Members that get nothing until they hold nothing; until when, if it is not for long."""
        self.served_waits: list[tuple[Member, Done]] = []
        """Members to be told when all that is ready for them is sent."""
        self.reads = 0
        """How many deliveries are being read from the disk."""
        self.alarm: asyncio.TimerHandle | None = None
        self.alarm_at_ms = 0
        self.is_serving = False
        self.recall: asyncio.TimerHandle | None = None
        """Looks whether messages that wait at busy members are to be recalled for idle ones."""

    @property
    def is_exclusive(self) -> bool:
        """Tell whether only one member is active at a time."""
        return self.group.record.mode == "exclusive"

    @property
    def active(self) -> Member | None:
        """Return the first active member."""
        return next((one for one in self.members.values() if one.state == "active"), None)

    def fitting(self, topic: str) -> int:
        """Return about how many messages of a topic fit into a delivery."""
        return max(1, DELIVERY_BYTES // self._message_bytes.get(topic, 1))

    def note_size(self, topic: str, size: int, count: int) -> None:
        """Remember how large the messages of a topic are now."""
        self._message_bytes[topic] = max(1, size // max(1, count))

    def join(self, member: Member, *, credit: int) -> None:
        """Take a member in; in an exclusive group it stands by when one is active."""
        if self.is_exclusive and self.active is not None:
            member.state = "standby"
        self.members[member.name] = member
        self._credits[member] = credit
        self._enter(member)

    def leave(self, member: Member) -> Member | None:
        """Let a member go; return the stand-by that takes its place, if there is one."""
        self.members.pop(member.name, None)
        self.apart.pop(member, None)
        self._step_out(member)
        self._credits.pop(member, None)
        if not self.is_exclusive or self.active is not None or not self.members:
            return None
        successor = next(iter(self.members.values()))
        successor.state = "active"
        self._enter(successor)
        return successor

    def activate(self, member: Member) -> None:
        """Make this member the active one of an exclusive group; who was active stands by."""
        if (active := self.active) is member:
            return
        if active is not None:
            self._step_out(active)
            active.is_waiting = False
            active.state = "standby"
        member.state = "active"
        self._enter(member)

    def follow(self, topics: Topics) -> bool:
        """Let members that named no topics get the group's; return True if any changed."""
        behind = [one for one in self.members.values() if one.follows and one.topics != topics]
        for member in behind:
            self._step_out(member)
            member.topics = topics
            if not member.is_waiting:
                self._enter(member)
        return bool(behind)

    def give(self, member: Member, credit: int) -> None:
        """Change how many deliveries a member may still get."""
        if member in self._credits:
            self._credits[member] = max(0, self._credits[member] + credit)
        elif (line := self._lines.get(member.topics)) is not None:
            line.give(member, credit)

    def credit_of(self, member: Member) -> int:
        """Return how many deliveries a member may still get."""
        if member in self._credits:
            return self._credits[member]
        line = self._lines.get(member.topics)
        return 0 if line is None else line.credit_of(member)

    def pause(self, member: Member) -> None:
        """Give nothing to a member whose socket takes nothing."""
        if not member.is_waiting and member.state == "active":
            self._step_out(member)
            member.is_waiting = True

    def set_apart(self, member: Member, *, until_ms: int | None) -> None:
        """Give nothing more to a member until it holds nothing."""
        self.apart[member] = until_ms
        member.was_apart = until_ms is None
        self.pause(member)

    def go_on(self, member: Member) -> None:
        """Let a member whose socket takes bytes again back into its line."""
        self.apart.pop(member, None)
        if member.is_waiting:
            member.is_waiting = False
            self._enter(member)

    def next_grant(self, topic: str, ready: int) -> tuple[Member, int] | None:
        """Return who is next to get something of a topic, and how many at most.

        Those who named other topics besides stand in other lines; the lines take turns.
        """
        if len(self._lines) == 1:
            topics, line = next(iter(self._lines.items()))
            return line.next_grant(ready) if topic in topics else None
        lines = [(topics, line) for topics, line in self._lines.items() if topic in topics]
        waiting = sum(line.waiting_count for _, line in lines)
        for topics, line in lines:
            grant = line.next_grant(ready, beside=waiting - line.waiting_count)
            if grant is not None:
                self._lines[topics] = self._lines.pop(topics)
                return grant
        return None

    @property
    def has_waiting(self) -> bool:
        """Tell whether a member with credit stands in line."""
        return any(line.waiting_count for line in self._lines.values())

    def waiting(self) -> Iterator[Member]:
        """Yield the members with credit, of each line the one that comes next first."""
        return chain.from_iterable(line.waiting() for line in self._lines.values())

    def used(self, member: Member, count: int) -> None:
        """Note that a member got so many."""
        self._lines[member.topics].used(member, count)

    def _enter(self, member: Member) -> None:
        if member.state == "active" and member in self._credits:
            line = self._lines.setdefault(member.topics, Turns())
            line.add(member)
            line.give(member, self._credits.pop(member))

    def _step_out(self, member: Member) -> None:
        line = self._lines.get(member.topics)
        if line is None or member in self._credits:
            return
        self._credits[member] = line.credit_of(member)
        line.remove(member)
        if not len(line):
            del self._lines[member.topics]
