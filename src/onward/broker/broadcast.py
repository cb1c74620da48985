"""Broadcast groups: each member reads by itself, and the broker knows of it what it was told.

    joined ──▶ where it begins: its stored position, or where the group's settings say; what it has
               to do itself: the filter and the retries, again whenever they are changed
    position.set ──▶ a `moved` row, folded into `Group.positions`

A position counts only in the topic that it was stored for: one that ended, and whose name another
topic has now, takes it along.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import asdict, replace

from onward.delivery.group import Group
from onward.delivery.record import GroupRecord
from onward.protocol.deliveries import Joined

if TYPE_CHECKING:
    from onward.broker.broker import Broker
    from onward.broker.catalogue import Topic


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
