"""One message: who published it, whether it is stored, and how it stands in each group.

    the header of its batch  ──▶ who published it; there is none when it is not stored any more
    share and leases         ──▶ fresh, ready, leased, taken, reserved, waiting, dead,
                                 finished
    the order of its key     ──▶ behind: in an ordered group another one of its key comes first
    not stored any more      ──▶ missed: what was not finished by then is never delivered

What is told is what is true now; what happened before, the trace tells. Nothing is changed here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from onward.broker.broadcast import offsets_in
from onward.broker.group_ranges import Offset
from onward.broker.key_order import find_ahead
from onward.broker.replies import Operation, ReadReplies
from onward.delivery.group import Group
from onward.errors import OffsetOutOfRange, OnwardError
from onward.log.disk import Buffer
from onward.message.batch import BatchHeader, batches_of
from onward.message.entry import entry_heads
from onward.protocol.payloads import decode_fields

if TYPE_CHECKING:
    from onward.broker.broker import Broker
    from onward.broker.catalogue import Topic
    from onward.broker.session import Session
    from onward.delivery.share import Share

ASKED_MAX: Final = 1_000
_UNDELIVERED: Final = frozenset(("fresh", "ready", "reserved", "waiting"))
"""A member is still to get it: now, when something else is done, or never."""

Ahead = dict[str, int | None]
"""By ordered group: which message of its key comes before this one, or itself; see `find_ahead`."""


class MessageState(msgspec.Struct, frozen=True):
    """`message.state`: which message."""

    topic: str
    offset: Offset


class MessageStates:
    """Answers the REQUEST frames about one message."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._replies = ReadReplies(limit=ASKED_MAX)
        self.operations: dict[str, Operation] = {"message.state": self._message_state}

    def _message_state(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        wanted = decode_fields(payload, MessageState)
        topic = self._broker.catalogue.find(wanted.topic)
        if wanted.offset >= topic.next_offset:
            raise OffsetOutOfRange(
                f"topic {topic.name!r} has no message {wanted.offset}: the next is "
                f"{topic.next_offset}"
            )
        self._replies.check_room()
        self._replies.begin(session, request_id, self._find(topic, wanted.offset))

    async def _find(self, topic: Topic, offset: int) -> dict[str, object]:
        """Read what must be read, from the disk if need be; then tell how it is at one moment."""
        header = await self._header_of(topic, offset)
        ahead = {} if header is None else await find_ahead(self._broker, topic, offset)
        producer_id = header.producer_id if header is not None else 0
        publisher = self._broker.publishers.find(producer_id)
        is_stored = header is not None
        return {
            "topic": topic.name,
            "offset": offset,
            "stored": is_stored and offset >= topic.first_offset,
            "carried": is_stored and offset < topic.first_offset,
            "producer_id": producer_id,
            "published_by": None if publisher is None else publisher._asdict(),
            "groups": _in_groups(self._broker, topic, offset, ahead, is_stored=is_stored),
        }

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
) -> list[dict[str, object]]:
    """Return how a message stands in each group of its topic, in the order of their names."""
    told = []
    for group in sorted(
        broker.consuming.groups.of_topic(topic.name), key=lambda one: one.record.name
    ):
        broker.consuming.wake_idle(group)
        if group.record.mode == "broadcast":
            state = _in_broadcast(group, topic, offset)
        else:
            state = _in_share(broker, group, topic.name, offset)
            if not is_stored:
                _miss(state)
            elif state["state"] in _UNDELIVERED:
                state |= _expiry(broker, group, topic, offset)
                _hold_back(state, group, topic.name, ahead)
        told.append({"group": group.record.name, **state})
    return told


def _in_broadcast(group: Group, topic: Topic, offset: int) -> dict[str, object]:
    """Return how many of the members that store where they are have left a message behind."""
    positions = list(offsets_in(group, topic))
    passed = sum(position > offset for position in positions)
    return {"state": "broadcast", "attempt": 0, "passed": passed, "positions": len(positions)}


def _in_share(broker: Broker, group: Group, topic: str, offset: int) -> dict[str, object]:
    share = group.shares.get(topic)
    if share is None:
        return {"state": "fresh", "attempt": 0}
    state = share.state_of(offset)
    said: dict[str, object] = {"state": state, "attempt": share.attempt_of(offset)}
    if state == "dead":
        letter = share.dead[offset]
        said |= {"attempt": letter.attempts, "cause": letter.cause, "member": letter.member,
                 "died_at_ms": letter.died_at_ms}  # fmt: skip
    elif state == "waiting":
        said["due_at_ms"] = share.retries[offset]
    elif offset in share.reserved:
        said["state"] = "reserved"
    elif state == "taken":
        said |= _lease_of(broker, group, topic, offset)
    return said


def _lease_of(broker: Broker, group: Group, topic: str, offset: int) -> dict[str, object]:
    record = group.record
    lease = broker.consuming.leases_of(record.name).holder_of(topic, offset)
    if lease is None:
        # Groups that choose look ahead: what they hold for that is taken, and no member has it.
        # So does what waits for a member that can have it alone.
        is_held = record.is_choosy or record.filter or offset in group.shares[topic].alone
        return {"state": "ready"} if is_held else {}
    left_ms = max(0, lease.expires_at_ms - broker.clock.monotonic_ms())
    return {"state": "leased", "member": lease.member, "lease_ms_left": left_ms}


def _expiry(broker: Broker, group: Group, topic: Topic, offset: int) -> dict[str, object]:
    """Return when retention may drop a message that nobody was given, if that is soon."""
    share = group.shares.get(topic.name)
    if share is None or offset < share.head or not broker.undelivered.is_expiring(topic, offset):
        return {}
    return {"expiring": True, "expires_at_ms": broker.undelivered.expires_at_ms(topic, offset)}


def _miss(state: dict[str, object]) -> None:
    """Say that a message is gone that was not finished; who has it already, has it."""
    if state["state"] in _UNDELIVERED or state["state"] == "leased":
        state["state"] = "missed"
        state.pop("due_at_ms", None)


def _hold_back(state: dict[str, object], group: Group, topic: str, ahead: Ahead) -> None:
    """Say what keeps a message from being delivered."""
    name, share = group.record.name, group.shares.get(topic)
    if group.record.paused:
        state["paused"] = True
    if share is None or name not in ahead:
        return
    first = ahead[name]
    if first is None:
        state["beyond"] = True
    elif _is_unfinished(share, first):
        state["behind"] = first
        if state["state"] != "waiting":
            state["state"] = "behind"


def _is_unfinished(share: Share, offset: int) -> bool:
    """Tell whether a message still holds others back: it may have ended while it was looked for."""
    return share.state_of(offset) not in ("finished", "dead")
