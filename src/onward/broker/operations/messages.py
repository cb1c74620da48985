"""Handler of `message.state`: who published a message, whether it is stored, its state in groups.

    the header of its batch  ──▶ who published it; there is none when it is not stored any more
    share and leases         ──▶ fresh, ready, leased, taken, reserved, waiting, dead,
                                 finished
    the order of its key     ──▶ behind: in an ordered group another one of its key comes first
    not stored any more      ──▶ missed: what was not finished by then is never delivered

The reply is the state at one moment; the trace has the history. Nothing is changed here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from onward.broker.broadcast import offsets_in
from onward.broker.key_order import find_ahead
from onward.broker.operations.dispatch import answers
from onward.delivery.group import Group
from onward.errors import OffsetOutOfRange, OnwardError
from onward.log.disk import Buffer
from onward.message.batch import BatchHeader, batches_of
from onward.message.entry import entry_heads
from onward.protocol.operations.messages import (
    DescribeMessage,
    MessageDescription,
    MessageInGroup,
    Publisher,
)

if TYPE_CHECKING:
    from onward.broker.broker import Broker
    from onward.broker.catalogue import Topic
    from onward.delivery.share import Share

_UNDELIVERED: Final = frozenset(("fresh", "ready", "reserved", "waiting"))
"""A member is still to get it: now, when something else is done, or never."""

Ahead = dict[str, int | None]
"""By ordered group: which message of its key comes before this one, or itself; see `find_ahead`."""


class MessageOperations:
    """Describes single messages."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    @answers(DescribeMessage)
    async def describe(self, request: DescribeMessage) -> MessageDescription:
        """Read the batch header and the keys before the message; then return its present state."""
        topic, offset = self._broker.catalogue.find(request.topic), request.offset
        if offset >= topic.next_offset:
            raise OffsetOutOfRange(
                f"topic {topic.name!r} has no message {offset}: the next is {topic.next_offset}"
            )
        header = await self._header_of(topic, offset)
        ahead = {} if header is None else await find_ahead(self._broker, topic, offset)
        producer_id = header.producer_id if header is not None else 0
        publisher = self._broker.publishers.find(producer_id)
        is_stored = header is not None
        return MessageDescription(
            topic=topic.name,
            offset=offset,
            stored=is_stored and offset >= topic.first_offset,
            carried=is_stored and offset < topic.first_offset,
            producer_id=producer_id,
            published_by=None if publisher is None else Publisher(*publisher),
            groups=_in_groups(self._broker, topic, offset, ahead, is_stored=is_stored),
        )

    async def _header_of(self, topic: Topic, offset: int) -> BatchHeader | None:
        """Return the header of the batch that has this message; None when it is not stored."""
        log = self._broker.log
        if offset < topic.first_offset:
            span = log.plan_carried(topic.number, offset, end_offset=offset + 1, bytes_max=0)
        else:
            span = log.plan(topic.number, offset, bytes_max=0)
        if span is None or span.rows[0].base_offset > offset:
            return None
        try:
            entries = log.read(span, wait=False)
            if entries is None:
                entries = await self._broker.in_thread(lambda: log.read(span, wait=True))
        except (OSError, OnwardError):
            if span.segment not in log.segments:
                # Retention took it away meanwhile.
                return None
            raise
        assert entries is not None
        return _header_in(entries, offset)


def _header_in(entries: Buffer, offset: int) -> BatchHeader | None:
    for entry in entry_heads(entries):
        base_offset, start = entry.base_offset, entry.body_position
        for _, header in batches_of(entries, start, start + entry.body_bytes):
            if base_offset <= offset < base_offset + header.count:
                return header
            base_offset += header.count
    return None


# --- in groups -----------------------------------------------------------------------------------


def _in_groups(
    broker: Broker, topic: Topic, offset: int, ahead: Ahead, *, is_stored: bool
) -> list[MessageInGroup]:
    """Return the state of a message in each group of its topic, in the order of their names."""
    groups = broker.consuming.groups.of_topic(topic.name)
    return [
        _in_group(broker, group, topic, offset, ahead, is_stored=is_stored)
        for group in sorted(groups, key=lambda group: group.record.name)
    ]


def _in_group(
    broker: Broker, group: Group, topic: Topic, offset: int, ahead: Ahead, *, is_stored: bool
) -> MessageInGroup:
    broker.consuming.wake_idle(group)
    if group.record.mode == "broadcast":
        return _in_broadcast(group, topic, offset)
    state = _in_share(broker, group, topic.name, offset)
    if not is_stored:
        return _missed(state)
    if state.state in _UNDELIVERED:
        state = _with_expiry(state, broker, group, topic, offset)
        return _held_back(state, group, topic.name, ahead)
    return state


def _in_broadcast(group: Group, topic: Topic, offset: int) -> MessageInGroup:
    """Return how many of the stored positions of members are past a message."""
    positions = list(offsets_in(group, topic))
    passed = sum(position > offset for position in positions)
    return MessageInGroup(
        group=group.record.name, state="broadcast", attempt=0, passed=passed,
        positions=len(positions),
    )  # fmt: skip


def _in_share(broker: Broker, group: Group, topic: str, offset: int) -> MessageInGroup:
    share = group.shares.get(topic)
    if share is None:
        return MessageInGroup(group=group.record.name, state="fresh", attempt=0)
    state = MessageInGroup(
        group=group.record.name, state=share.state_of(offset), attempt=share.attempt_of(offset)
    )
    if state.state == "dead":
        letter = share.dead[offset]
        return replace(
            state, attempt=letter.attempts, cause=letter.cause, member=letter.member,
            died_at_ms=letter.died_at_ms,
        )  # fmt: skip
    if state.state == "waiting":
        return replace(state, due_at_ms=share.retries[offset])
    if offset in share.reserved:
        return replace(state, state="reserved")
    if state.state == "taken":
        return _taken(state, broker, group, topic, offset)
    return state


def _taken(
    state: MessageInGroup, broker: Broker, group: Group, topic: str, offset: int
) -> MessageInGroup:
    """Return the state of a message that was taken from its share: who holds it?"""
    record = group.record
    lease = broker.consuming.leases_of(record.name).holder_of(topic, offset)
    if lease is not None:
        left_ms = max(0, lease.expires_at_ms - broker.clock.monotonic_ms())
        return replace(state, state="leased", member=lease.member, lease_ms_left=left_ms)
    # Groups that choose look ahead: what they hold for that is taken, and no member has it. So is
    # what waits for a member that can have it alone.
    is_held = record.is_choosy or record.filter or offset in group.shares[topic].alone
    return replace(state, state="ready") if is_held else state


def _with_expiry(
    state: MessageInGroup, broker: Broker, group: Group, topic: Topic, offset: int
) -> MessageInGroup:
    """Add when retention may drop a message that nobody was given, if that is soon."""
    share, undelivered = group.shares.get(topic.name), broker.undelivered
    if share is None or offset < share.head or not undelivered.is_expiring(topic, offset):
        return state
    return replace(state, expiring=True, expires_at_ms=undelivered.expires_at_ms(topic, offset))


def _missed(state: MessageInGroup) -> MessageInGroup:
    """Return the state of a message that is not stored; a member that has it already, has it."""
    if state.state in _UNDELIVERED or state.state == "leased":
        return replace(state, state="missed", due_at_ms=None)
    return state


def _held_back(state: MessageInGroup, group: Group, topic: str, ahead: Ahead) -> MessageInGroup:
    """Add what keeps a message from being delivered."""
    name, share = group.record.name, group.shares.get(topic)
    state = replace(state, paused=group.record.paused)
    if share is None or name not in ahead:
        return state
    first = ahead[name]
    if first is None:
        return replace(state, beyond=True)
    if not _is_unfinished(share, first):
        return state
    is_waiting = state.state == "waiting"
    return replace(state, behind=first, state="waiting" if is_waiting else "behind")


def _is_unfinished(share: Share, offset: int) -> bool:
    """Tell whether a message still holds others back: it may have ended while it was looked for."""
    return share.state_of(offset) not in ("finished", "dead")
