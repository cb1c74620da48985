"""All groups of a node: a fold of the log.

    GROUP_CHANGED entry ──▶ change(record)     created, changed, paused ..., deleted
    row of `@trace`     ──▶ apply(row)         how ranges ended; unknown groups are ignored
    topic ended         ──▶ drop_topic(topic)  its shares go; the records keep naming it

The running broker and recovery call these with the same facts in the same order. `save` is what a
checkpoint keeps; after `load` (or a fold) `restart` makes everything ready that is unfinished.
"""

from __future__ import annotations

from typing import Final

import msgspec

from onward.delivery.position import Position
from onward.delivery.record import GroupRecord
from onward.delivery.share import SavedShare, Share
from onward.delivery.trace import Trace
from onward.errors import Corruption

POSITIONS_MAX: Final = 10_000
"""Members of a broadcast group whose position is kept; the one that moved longest ago goes."""


class _SavedGroup(msgspec.Struct, frozen=True, array_like=True):
    record: GroupRecord
    shares: list[SavedShare]
    positions: dict[str, dict[str, int]]
    numbers: dict[str, dict[str, int]] = {}
    """Of the topics that positions are in; absent where it is not known."""


class Group:
    """One group: its settings, its share of each topic, the positions of its members."""

    __slots__ = ("positions", "record", "shares")

    def __init__(self, record: GroupRecord) -> None:
        self.record = record
        self.shares: dict[str, Share] = {}
        self.positions: dict[str, dict[str, Position]] = {}
        """Of a broadcast: member to topic to where it is."""

    def apply(self, row: Trace) -> None:
        """Fold one row of this group; rows of topics it has not started with are ignored."""
        if row.did == "started":
            if row.topic not in self.shares:
                self.shares[row.topic] = Share(row.topic, start=max(0, row.offset))
        elif row.did == "moved":
            self._move(row.member, row.topic, Position(row.offset, row.number))
        elif share := self.shares.get(row.topic):
            share.apply(row)

    def copy_from(self, source: Group) -> None:
        """Become a copy of another group: the same shares and positions, nothing taken."""
        self.shares = {topic: share.copy() for topic, share in source.shares.items()}
        self.positions = {member: dict(place) for member, place in source.positions.items()}

    def drop_topic(self, topic: str) -> None:
        """Forget everything about a topic."""
        self.shares.pop(topic, None)
        for member in [one for one, place in self.positions.items() if topic in place]:
            place = self.positions[member]
            del place[topic]
            if not place:
                del self.positions[member]

    def _move(self, member: str, topic: str, position: Position) -> None:
        # Put at the end again: the first one is then the one that moved longest ago.
        place = self.positions.pop(member, {})
        place[topic] = position
        self.positions[member] = place
        while len(self.positions) > POSITIONS_MAX:
            del self.positions[next(iter(self.positions))]


class Groups:
    """All groups, by name.

    >>> groups = Groups()
    >>> groups.change(GroupRecord("billing", topics=("orders",)))
    >>> groups.apply(Trace(did="started", at_ms=0, group="billing", topic="orders", offset=7))
    >>> groups.by_name["billing"].shares["orders"].cursor
    7
    """

    __slots__ = ("_by_topic", "by_name")

    def __init__(self) -> None:
        self.by_name: dict[str, Group] = {}
        self._by_topic: dict[str, dict[str, Group]] = {}

    def change(self, record: GroupRecord) -> None:
        """Create, change or delete a group, as its record says."""
        group = self.by_name.get(record.name)
        if record.deleted:
            if group is not None:
                self._unlink(group)
                del self.by_name[record.name]
            return
        if group is None:
            group = self.by_name[record.name] = Group(record)
        else:
            self._unlink(group)
            for topic in set(group.record.topics).difference(record.topics):
                group.drop_topic(topic)
            group.record = record
        self._link(group)

    def apply(self, row: Trace) -> None:
        """Fold one row."""
        group = self.by_name.get(row.group)
        if group is None:
            return
        if row.did == "forked":
            source = self.by_name.get(row.source)
            if source is not None and source is not group:
                self._unlink(group)
                group.copy_from(source)
                self._link(group)
            return
        group.apply(row)
        if row.did == "started":
            self._link(group)

    def drop_topic(self, topic: str) -> None:
        """Forget a topic that ended."""
        # Positions of a broadcast may exist for topics that nothing else links.
        for group in self.by_name.values():
            group.drop_topic(topic)
        linked = self._by_topic.pop(topic, {})
        for group in linked.values():
            self._link(group)

    def of_topic(self, topic: str) -> list[Group]:
        """Return the groups that name a topic or have a share of it."""
        return list(self._by_topic.get(topic, {}).values())

    def restart(self) -> None:
        """Make ready whatever is unfinished: nothing is taken."""
        for group in self.by_name.values():
            for share in group.shares.values():
                share.restart()

    def save(self) -> bytes:
        """Return what a checkpoint keeps."""
        return _ENCODER.encode([_saved(group) for group in self.by_name.values()])

    def load(self, saved: bytes) -> None:
        """Become what was saved; bytes that were not raise `Corruption`."""
        try:
            rows = _DECODER.decode(saved)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise Corruption(f"the saved groups cannot be read: {error}") from None
        self.by_name, self._by_topic = {}, {}
        for row in rows:
            group = self.by_name[row.record.name] = Group(row.record)
            group.shares = {share.topic: Share.load(share) for share in row.shares}
            group.positions = _positions(row)
            self._link(group)

    def _link(self, group: Group) -> None:
        for topic in (*group.record.topics, *group.shares):
            self._by_topic.setdefault(topic, {})[group.record.name] = group

    def _unlink(self, group: Group) -> None:
        for topic in {*group.record.topics, *group.shares}:
            linked = self._by_topic.get(topic, {})
            linked.pop(group.record.name, None)
            if not linked:
                self._by_topic.pop(topic, None)


def _saved(group: Group) -> _SavedGroup:
    shares = [share.save() for share in group.shares.values()]
    offsets: dict[str, dict[str, int]] = {}
    numbers: dict[str, dict[str, int]] = {}
    for member, place in group.positions.items():
        offsets[member] = {topic: position.offset for topic, position in place.items()}
        known = {topic: position.number for topic, position in place.items() if position.number}
        if known:
            numbers[member] = known
    return _SavedGroup(group.record, shares, offsets, numbers)


def _positions(saved: _SavedGroup) -> dict[str, dict[str, Position]]:
    found: dict[str, dict[str, Position]] = {}
    for member, place in saved.positions.items():
        numbers = saved.numbers.get(member, {})
        found[member] = {
            topic: Position(offset, numbers.get(topic, 0)) for topic, offset in place.items()
        }
    return found


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(list[_SavedGroup])
