"""What passed between the broker and the members of groups, recorded at the broker's end.

    joined      the REPLY to a CONSUME; `grants` are the ranges that the member re-claimed
    delivered   a DELIVERY: ranges of one topic, each with the number of its attempt
    started     a STARTED or PROGRESS: the member reports that it starts ranges of a delivery
    ack, retry, reject, release, renew      rows of an ACK, PROGRESS or SETTLE
    left        a CANCEL: the member leaves, and gives back what it holds
    ended       an END: the broker ends the membership
    lost        the connection is gone, and with it the member

Frames are recorded in the order in which the broker handles them, so a replay of the events gives
exactly what each member held at each moment, except for leases that ran out. Groups that deliver
at most once have no leases: their deliveries are not recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from onward.broker.session import Session
from onward.protocol.deliveries import (
    STARTS,
    decode_ack,
    decode_consume,
    decode_delivery,
    decode_joined,
    decode_progress,
    decode_settle,
    decode_started,
)
from onward.protocol.frames import HEADER, HEADER_BYTES, Kind

if TYPE_CHECKING:
    from onward.broker.broker import Broker

EventKind = Literal[
    "joined", "delivered", "started", "ack", "retry", "reject", "release", "renew", "left",
    "ended", "lost",
]  # fmt: skip
Grant = tuple[int, int, int]
"""[start, end) and an attempt; 0 where the frame names none."""


@dataclass(frozen=True, eq=False, slots=True)
class Seat:
    """One membership on one connection."""

    group: str
    life: int
    """Counts the starts of the broker: seats of an earlier life are gone."""


@dataclass(frozen=True, slots=True)
class WireEvent:
    """One frame, or one row of a frame, of one member; or the end of its connection."""

    kind: EventKind
    seat: Seat
    at_us: int
    lease: int = 0
    topic: str = ""
    grants: tuple[Grant, ...] = ()
    """No grants of an outcome: all that is left of the delivery."""
    counts: bool = True


class RecordedSession(Session):
    """A session of the broker that records the frames of members."""

    def __init__(
        self, broker: Broker, events: list[WireEvent], *, life: int, now_us: Callable[[], int]
    ) -> None:
        super().__init__(broker)
        self._events = events
        self._life = life
        self._now_us = now_us
        self._asked: dict[int, Seat] = {}
        self._seats: dict[int, Seat] = {}

    def connection_lost(self, exc: Exception | None) -> None:
        """Record the loss of all members, unless the broker ends its connections itself."""
        is_lost = not self._broker.gate.is_stopping
        for consumer in list(self._seats):
            self._leave(consumer, "lost" if is_lost else "left")
        super().connection_lost(exc)

    def send(self, kind: int, request_id: int, payload: bytes = b"") -> None:
        """Record answers to CONSUME frames and the ends of memberships."""
        if kind == Kind.REPLY and request_id in self._asked:
            self._joined(request_id, payload)
        elif kind == Kind.END:
            self._leave(request_id, "ended")
        super().send(kind, request_id, payload)

    def send_parts(self, parts: list[bytes | bytearray | memoryview]) -> int:
        """Record deliveries."""
        _, kind, _, _, consumer = HEADER.unpack_from(parts[0])
        if kind == Kind.DELIVERY:
            delivered = decode_delivery(bytes(parts[0][HEADER_BYTES:]))
            if delivered.delivery:
                attempts = tuple(
                    (start, end, attempt) for start, end, attempt, _ in delivered.grants
                )
                self._record(
                    "delivered", consumer, delivered.delivery, attempts, topic=delivered.topic
                )
        return super().send_parts(parts)

    def _take(self, kind: int, request_id: int, payload: bytes | bytearray) -> None:
        match kind:
            case Kind.CONSUME:
                self._asked[request_id] = Seat(decode_consume(payload).group, self._life)
            case Kind.CANCEL:
                self._leave(request_id, "left")
            case Kind.STARTED:
                for lease, start, end in decode_started(payload):
                    self._record("started", request_id, lease, ((start, end, 0),))
            case Kind.ACK:
                consumer, rows = decode_ack(payload)
                for lease, start, end in rows:
                    self._record("ack", consumer, lease, ((start, end, 0),))
            case Kind.PROGRESS:
                for consumer, step, lease, start, end in decode_progress(payload):
                    did: EventKind = "started" if step == STARTS else "ack"
                    self._record(did, consumer, lease, ((start, end, 0),))
            case Kind.SETTLE:
                self._settle(payload)
        super()._take(kind, request_id, payload)

    def _settle(self, payload: bytes | bytearray) -> None:
        settle = decode_settle(payload)
        for row in settle.rows:
            grants = tuple((start, end, 0) for start, end in row.ranges)
            self._record(row.do, settle.consumer, row.delivery, grants, counts=row.count)

    def _joined(self, consumer: int, payload: bytes) -> None:
        self._seats[consumer] = self._asked.pop(consumer)
        self._record("joined", consumer)
        for lease, start, end in decode_joined(payload).claimed:
            self._record("joined", consumer, lease, ((start, end, 0),))

    def _leave(self, consumer: int, kind: EventKind) -> None:
        self._record(kind, consumer)
        self._seats.pop(consumer, None)

    def _record(
        self, kind: EventKind, consumer: int, lease: int = 0, grants: tuple[Grant, ...] = (),
        *, topic: str = "", counts: bool = True,
    ) -> None:  # fmt: skip
        seat = self._seats.get(consumer)
        if seat is not None and self._broker.failure is None:
            event = WireEvent(kind, seat, self._now_us(), lease, topic, grants, counts)
            self._events.append(event)
