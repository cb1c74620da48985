"""Says what is wrong with how retention dropped messages that groups had not finished.

    R1  the first offset of a topic, once reported, never goes back
    R2  a message that a group wanted and did not finish is dead, or a row of the trace says that
        it was dropped: none vanishes
    R3  a message that has failed or is dead outlives retention: it is not dropped, and a dead
        letter is listed with its message (whose body is checked like any other that was read)
    R4  a message that was reported as dropped is never delivered afterwards

The rows of the trace are known from an `Auditor`, each with the time at which it could be read. A
log that is bounded as a whole loses its trace, and gives up what it carries: then only R1 holds.
Groups that an operator has moved, and forks, are left out: what they begin with is not known.
"""

from __future__ import annotations

from collections.abc import Iterator

from onward.delivery.trace import Trace
from onward.message.message import Message
from onward.testing.group_history import NEVER_US, GroupPlan
from onward.testing.history import History, kind_of

Drains = dict[str, list[Message]]
Place = tuple[str, int]

_FAILED = ("retried", "expired", "lost")
_FINISHED = ("acked", "filtered")


def check_retention(history: History, drains: Drains) -> Iterator[str]:
    """Yield all violations, as sentences."""
    yield from _first_offsets_only_grow(history)
    if history.has_whole_trace:
        for plan in history.groups.plans.values():
            acts = history.groups.acts_on(plan.name)
            if not plan.source and all(act.kind in ("pause", "offline", "fork") for act in acts):
                yield from _GroupDrops(history, plan).violations(drains)


def _first_offsets_only_grow(history: History) -> Iterator[str]:
    highest: dict[str, int] = {}
    for topic, first_offset in history.first_offsets:
        known = highest.setdefault(topic, first_offset)
        if first_offset < known and kind_of(topic) != "brief":
            yield f"R1: {topic!r} began at offset {known}, and later at {first_offset}"
        highest[topic] = max(known, first_offset)


class _GroupDrops:
    """What retention dropped of one group, as its rows of the trace tell."""

    def __init__(self, history: History, plan: GroupPlan) -> None:
        self._history = history
        self._plan = plan
        self._starts: dict[str, int] = {}
        """Where the group has begun with each topic."""
        self._finished: set[Place] = set()
        self._failed: set[Place] = set()
        self._dropped_us: dict[Place, int] = {}
        """When a row could be read that says so."""

    def violations(self, drains: Drains) -> Iterator[str]:
        """Yield all that is wrong."""
        for row, seen_us in self._history.trace:
            if row.group == self._plan.name and kind_of(row.topic) == "trimmed":
                yield from self._fold(row, seen_us)
        yield from self._the_dead_have_their_messages()
        yield from self._dropped_is_the_end()
        if self._plan.name in self._history.groups.dead:
            yield from self._nothing_vanishes(drains)

    def _fold(self, row: Trace, seen_us: int) -> Iterator[str]:
        if row.did == "started":
            self._starts[row.topic] = row.offset
        for place in _places(row):
            if row.did in _FAILED:
                self._failed.add(place)
            elif row.did in _FINISHED:
                self._finished.add(place)
            elif row.did == "skipped":
                self._dropped_us[place] = seen_us
                if place in self._failed and place not in self._finished:
                    yield f"R3: {place} has failed and was dropped by retention: {row.cause}"

    def _the_dead_have_their_messages(self) -> Iterator[str]:
        for place, buried in self._history.groups.dead.get(self._plan.name, {}).items():
            if buried.message is None and kind_of(place[0]) in ("kept", "trimmed"):
                yield f"R3: {place} is a dead letter without its message"

    def _dropped_is_the_end(self) -> Iterator[str]:
        for event in self._history.groups.wire:
            if event.kind != "delivered" or event.seat.group != self._plan.name:
                continue
            for start, end, _ in event.grants:
                for offset in range(start, end):
                    dropped_us = self._dropped_us.get((event.topic, offset), NEVER_US)
                    if dropped_us < event.at_us:
                        yield f"R4: {event.topic}/{offset} was dropped, and delivered afterwards"

    def _nothing_vanishes(self, drains: Drains) -> Iterator[str]:
        dead = self._history.groups.dead[self._plan.name]
        for topic, start in self._starts.items():
            for message in self._published(topic, drains):
                place = topic, message.offset
                is_known = place in dead or place in self._finished or place in self._dropped_us
                if message.offset >= start and self._plan.wants(message) and not is_known:
                    yield f"R2: {message.id} was never finished, and no row says that it is gone"

    def _published(self, topic: str, drains: Drains) -> Iterator[Message]:
        """Yield the messages that were confirmed, and those of the drain."""
        for attempt in self._history.attempts.values():
            if attempt.topic == topic and attempt.outcome == "acked":
                yield Message(topic, attempt.offset, attempt.body, tag=attempt.tag)
        yield from drains.get(topic, [])


def _places(row: Trace) -> Iterator[Place]:
    return ((row.topic, offset) for start, end in row.ranges for offset in range(start, end))
