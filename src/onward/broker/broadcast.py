"""Broadcast groups: each member reads by itself, and the broker knows of it what it was told.

    joined ──▶ where it begins: its stored position, or where the group's settings say; what it has
               to do itself: the filter and the retries, again whenever they are changed
    position.set ──▶ a `moved` row, folded into `Group.positions`

    standings ──▶ where each member is and how far behind: those that are away too, and those that
                  are here and keep it to themselves

A position counts only in the topic that it was stored for: one that ended, and whose name another
topic has now, takes it along.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from msgspec.structs import asdict, replace

from onward.delivery.group import Group
from onward.delivery.record import GroupRecord
from onward.protocol.deliveries import Joined

if TYPE_CHECKING:
    from onward.broker.broker import Broker
    from onward.broker.catalogue import Topic

STANDINGS_MAX: Final = 10_000
"""So many positions are looked at to describe a group: those first that moved longest ago."""


class Standing(NamedTuple):
    """Where a member of a broadcast is in one topic."""

    member: str
    topic: Topic
    offset: int | None
    """None: only the member knows, for it keeps its position in a file, or not at all."""

    @property
    def backlog(self) -> int:
        """How many messages are there that it has not done; 0 when that is not known."""
        if self.offset is None:
            return 0
        return max(0, self.topic.next_offset - max(self.offset, self.topic.first_offset))


def offset_of(group: Group, member: str, topic: Topic) -> int | None:
    """Return where a member is in a topic, as far as the broker knows."""
    position = group.positions.get(member, {}).get(topic.name)
    return position.offset if position is not None and position.is_of(topic.number) else None


def offsets_in(group: Group, topic: Topic) -> Iterator[int]:
    """Return where the members of a broadcast are in a topic."""
    for place in group.positions.values():
        position = place.get(topic.name)
        if position is not None and position.is_of(topic.number):
            yield position.offset


def standings(broker: Broker, group: Group) -> list[Standing]:
    """Return where the members of a broadcast are: the one that is farthest behind first."""
    found = chain(_known(broker, group), _unknown(broker, group))
    listed = list(islice(found, STANDINGS_MAX))
    listed.sort(key=lambda one: (one.offset is None, -one.backlog, one.member, one.topic.name))
    return listed


def looked_at(broker: Broker, group: Group) -> int:
    """Return how many positions `standings` looks at, at most."""
    if group.record.mode != "broadcast":
        return 0
    members = len(group.positions) + len(broker.consuming.members_of(group.record.name))
    return min(members * len(group.record.topics), STANDINGS_MAX)


def backlog_of(listed: list[Standing]) -> int:
    """Return how many messages the member has left that is farthest behind, in all its topics."""
    left: Counter[str] = Counter()
    for one in listed:
        left[one.member] += one.backlog
    return max(left.values(), default=0)


def _known(broker: Broker, group: Group) -> Iterator[Standing]:
    by_name = broker.catalogue.by_name
    for member, place in group.positions.items():
        for name, position in place.items():
            topic = by_name.get(name)
            if topic is not None and position.is_of(topic.number):
                yield Standing(member, topic, position.offset)


def _unknown(broker: Broker, group: Group) -> Iterator[Standing]:
    by_name = broker.catalogue.by_name
    for member in broker.consuming.members_of(group.record.name):
        for name in member.topics:
            topic = by_name.get(name)
            if topic is not None and offset_of(group, member.name, topic) is None:
                yield Standing(member.name, topic, None)


def tasks(record: GroupRecord) -> tuple[object, ...]:
    """Return the settings that members of a broadcast follow by themselves."""
    return record.filter, record.retry


def with_tasks(joined: Joined, record: GroupRecord) -> Joined:
    """Add the settings that a member of a broadcast follows by itself to what it is told."""
    return replace(joined, filter=msgspec.to_builtins(record.filter), retry=asdict(record.retry))


def with_places(broker: Broker, group: Group, joined: Joined) -> Joined:
    """Add where a member begins with each topic to what it is told."""
    positions: dict[str, int] = {}
    numbers: dict[str, int] = {}
    for name in joined.topics:
        topic = broker.catalogue.find(name)
        offset = offset_of(group, joined.member, topic)
        if offset is None:
            offset = broker.consuming.start_of(group.record, topic)
        positions[name], numbers[name] = offset, topic.number
    return replace(joined, positions=positions, numbers=numbers)
