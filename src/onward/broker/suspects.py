"""Suspects: messages with which a member died. They are delivered alone, so that the guilty shows.

    taken from its source ──▶ set apart ──▶ a member holds nothing ──▶ delivered to it
                                 └─ everybody is busy: one member gets nothing until it is idle

A member that has a suspect gets nothing else of its group until the suspect is settled. So when the
process dies again, it dies with that message only, and no other message loses an attempt. At most
half of the members are kept apart, and each of them takes turns with other work: a process that was
killed with many innocent messages does not stop its group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onward.broker.handover import DELIVERY_BYTES_MAX
from onward.delivery.ranges import Range, Ranges, count_of, offsets_of, ranges_of

if TYPE_CHECKING:
    from onward.broker.consume import Consuming
    from onward.broker.crew import Crew, Member
    from onward.broker.handing import Handing
    from onward.clock import Clock
    from onward.delivery.share import Share

DRAIN_MS_MAX = 30_000
"""A member that settles nothing for so long goes on as before, and another one is asked."""
TOGETHER_MAX = 64
"""Of so many messages that died with one member each comes alone; of more, parts come together."""


def alone_after(company: int) -> int:
    """Return how many of `company` messages that died with one member may come together.

    A program that takes ten thousand messages at once would need long to take them one by one:
    parts of them come together first.

    >>> alone_after(1), alone_after(64), alone_after(10_000), alone_after(625)
    (1, 1, 625, 39)
    """
    return 1 if company <= TOGETHER_MAX else company // 16


class Suspects:
    """Delivers the suspects of groups."""

    def __init__(self, consuming: Consuming, handing: Handing, clock: Clock) -> None:
        self._consuming = consuming
        self._handing = handing
        self._clock = clock

    def set_apart(self, crew: Crew, share: Share, ranges: list[Range]) -> list[Range]:
        """Keep the suspects among ranges that were taken; return the others."""
        others, alone = share.split_alone(ranges)
        if alone:
            crew.suspects.setdefault(share.topic, Ranges()).update(alone)
        return others

    def give_back(self, crew: Crew, topic: str) -> None:
        """Let the suspects of a topic be taken again: its source is about to be closed."""
        waiting = crew.suspects.pop(topic, None)
        if waiting and (source := crew.sources.get(topic)) is not None:
            source.give_back(list(waiting))

    def grant(self, crew: Crew) -> None:
        """Deliver suspects to members that hold nothing; keep one member free for the next."""
        active = sum(member.state == "active" for member in crew.members.values())
        for topic in list(crew.suspects):
            while len(crew.apart) < max(1, active // 2):
                ranges = self._next(crew, topic)
                if not ranges:
                    break
                member = self._idle(crew, topic)
                if member is None:
                    self._drain(crew, topic)
                    break
                self._deliver(crew, member, topic, ranges)

    def tick(self, crew: Crew) -> None:
        """Let members go on that were kept apart for too long, or hold nothing any more."""
        now_ms = self._clock.monotonic_ms()
        for member, until_ms in list(crew.apart.items()):
            if until_ms is not None and until_ms <= now_ms:
                del crew.apart[member]
                member.was_apart = True
            self._consuming.go_on(member)

    def _next(self, crew: Crew, topic: str) -> list[Range]:
        """Return what is delivered next; what was finished meanwhile is forgotten."""
        waiting = crew.suspects.get(topic)
        if waiting is None:
            return []
        alone = crew.sources[topic].share.alone
        found: list[int] = []
        together = len(alone)
        for offset in offsets_of(list(waiting)):
            if offset not in alone:
                waiting.remove(offset, offset + 1)
                continue
            together = min(together, alone[offset])
            if len(found) >= together:
                break
            found.append(offset)
        if not waiting:
            del crew.suspects[topic]
        return ranges_of(found)

    def _idle(self, crew: Crew, topic: str) -> Member | None:
        """Return a member that holds nothing and may get a suspect now."""
        available: set[str] | None = None
        for member in crew.members.values():
            if not self._may_get(crew, member, topic) or crew.leases.held_by(member.name):
                continue
            if member.was_apart:
                if available is None:
                    sources = crew.sources.items()
                    available = {name for name, source in sources if source.available() > 0}
                # Messages of topics that it does not consume are no other work for it.
                if available & member.topics:
                    continue
            return member
        return None

    def _may_get(self, crew: Crew, member: Member, topic: str) -> bool:
        return (
            member.state == "active"
            and not member.is_waiting
            and topic in member.topics
            and crew.credit_of(member) > 0
        )

    def _deliver(self, crew: Crew, member: Member, topic: str, ranges: list[Range]) -> None:
        waiting = crew.suspects[topic]
        for start, end in ranges:
            waiting.remove(start, end)
        if not waiting:
            del crew.suspects[topic]
        crew.used(member, count_of(ranges))
        crew.set_apart(member, until_ms=None)
        self._handing.deliver(
            crew, member, crew.sources[topic], crew.topics[topic], ranges,
            bytes_max=DELIVERY_BYTES_MAX,
        )  # fmt: skip

    def _drain(self, crew: Crew, topic: str) -> None:
        """Give nothing more to one member until it holds nothing."""
        busy = [
            member
            for member in crew.members.values()
            if self._may_get(crew, member, topic) and not member.was_apart
        ]
        if busy:
            member = min(busy, key=lambda one: crew.leases.held_by(one.name))
            crew.set_apart(member, until_ms=self._clock.monotonic_ms() + DRAIN_MS_MAX)
