"""What is inside the frames of a group's member: joining, credit, deliveries and their outcome.

    CONSUME   JSON `Consume`; its request id is the consumer's id; REPLY is JSON `Joined`, in a
              broadcast once more whenever its filter or its retry policy was changed, and to
              members that named no topics whenever the group has other ones
    MORE      credit i32: deliveries to allow more, or fewer when negative
    ACK       consumer u32, zero u32, rows of (delivery u64, start u64, end u64)
    SETTLE    JSON `Settle`: whatever is not a plain ack
    STARTED   rows as in ACK, without the consumer: what the member starts now; there is no answer
    PROGRESS  rows of (consumer u32, kind u32, delivery u64, start u64, end u64): what members of
              this connection have finished (kind 0) and start now (kind 1)
    DELIVERY  delivery u64, lease_ms u64, ranges u32, topic_bytes u16, zero u16, topic name and
              zeros up to a multiple of 8, ranges of (start u64, end u64, attempt u32,
              uncounted u32), raw entries: messages of them that are in no range were not delivered.
              `uncounted` is how many earlier deliveries are none of the attempts
    SETTLED   rows as in ACK, or in PROGRESS: those that were refused, because the lease was lost
    RECALL    count u32: how many messages that were not started the member should release

Ranges are half-open, `[start, end)` of offsets, and never empty. What is packed and does not fit
together is a `ProtocolError`; JSON of a wrong shape is an `InvalidRequest` of who consumes. Names,
and what a wish says, are checked by who knows groups.
"""

from collections.abc import Sequence
from itertools import chain
from struct import Struct, pack
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec

from onward.errors import InvalidRequest, ProtocolError
from onward.protocol.frames import HEADER, Kind
from onward.protocol.payloads import Bytes, Instant, Number, decode_json

ROWS_MAX: Final = 100_000
"""Rows of an ACK or SETTLED, ranges of a DELIVERY, rows and ranges of a SETTLE."""
TOPICS_MAX: Final = 1_000
CLAIMS_MAX: Final = 10_000
CLAIMED_STARTS_MAX: Final = 10_000
"""Of all claims of a CONSUME together."""
CREDIT_MAX: Final = 2**31 - 1

Row = tuple[int, int, int]
"""A part of a delivery: its number, and where the part starts and ends."""
Step = tuple[int, int, int, int, int]
"""A row of a PROGRESS: its consumer, `FINISHED` or `STARTS`, and a part of a delivery."""
FINISHED: Final = 0
STARTS: Final = 1
PROGRESS_SINCE_REVISION: Final = 2
Grant = tuple[int, int, int, int]
"""A delivered range: its start and end, the number of its attempt and of its delivery."""

_OFFSET_MAX: Final = 2**63 - 1
_HEAD_BYTES: Final = 8  # what a frame's length counts beside the payload
_ROW: Final = Struct("<QQQ")
_STEP: Final = Struct("<IIQQQ")
_ONE_ACK: Final = Struct("<IBBHIIIQQQ")
_ACK_FRONT: Final = Struct("<II")
_MORE: Final = Struct("<i")
_MORE_FRAME: Final = Struct("<IBBHIi")
_RECALL: Final = Struct("<I")
_RECALL_FRAME: Final = Struct("<IBBHII")
_DELIVERY: Final = Struct("<QQIHH")
_GRANT: Final = Struct("<QQII")
_ONE_DELIVERY: Final = Struct("<IBBHIQQIHH")

Texts = Annotated[tuple[str, ...], msgspec.Meta(max_length=TOPICS_MAX)]
Spans = Annotated[tuple[tuple[Number, Number], ...], msgspec.Meta(max_length=ROWS_MAX)]


FUNCTION_CHARACTERS_MAX = 200


class Claim(msgspec.Struct, frozen=True, omit_defaults=True):
    """A delivery of an earlier connection that the member still holds; `number` is the topic's."""

    delivery: Number
    topic: str
    number: Number
    ranges: Annotated[
        tuple[tuple[Number, Number, Number], ...], msgspec.Meta(min_length=1, max_length=ROWS_MAX)
    ]
    held_ms: Number = 0
    """For how long the member has had the delivery. An age: its clock is not the broker's."""
    starts: Annotated[
        tuple[tuple[Number, Number, Number], ...], msgspec.Meta(max_length=CLAIMED_STARTS_MAX)
    ] = ()
    """Ranges that the member has started, each with how long ago."""

    def __post_init__(self) -> None:
        if any(start >= end for start, end, _ in (*self.ranges, *self.starts)):
            raise ValueError("a range ends after its start")


class Consume(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who wants to be a member of which group, and how many deliveries it may get at first."""

    group: str
    topics: Texts = ()
    member: str = ""
    credit: Annotated[int, msgspec.Meta(ge=0, le=CREDIT_MAX)] = 0
    wish: dict[str, Any] | None = None  # settings of the group, as `delivery` knows them
    refuse: bool = False
    create: bool = True
    function: Annotated[str, msgspec.Meta(max_length=FUNCTION_CHARACTERS_MAX)] = ""  # for people
    if_differs: Literal["refuse", "apply", "keep"] = "refuse"
    """What to do when the group has other settings than `wish`: refuse the member, give the group
    these settings, or join it as it is."""
    starts: bool = False  # this member reports what it starts
    node: str = ""  # whose deliveries are re-claimed
    claims: Annotated[tuple[Claim, ...], msgspec.Meta(max_length=CLAIMS_MAX)] = ()
    recalls: bool = False  # this member understands RECALL


class Joined(msgspec.Struct, frozen=True):
    """What a new member is told: its name, and how its group works."""

    member: str
    mode: str
    lease_ms: Number
    topics: tuple[str, ...]
    state: Literal["active", "standby"] = "active"
    at_most_once: bool = False
    retry_limit: Number = 0
    positions: dict[str, Number] = {}
    numbers: dict[str, Number] = {}
    filter: dict[str, Any] = {}  # of a broadcast, as `delivery` knows them
    retry: dict[str, Any] = {}
    starts: bool = False  # STARTED is understood here
    claimed: tuple[Row, ...] = ()
    finished: tuple[Row, ...] = ()
    recalls: bool = False  # RECALL may be sent to this member


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """What shall happen with ranges of one delivery; no ranges: with all that is left of it."""

    do: Literal["retry", "reject", "renew", "release"]
    delivery: Number
    ranges: Spans = ()
    after_ms: Number | None = None
    at_ms: Instant | None = None
    count: bool = True
    cause: str = ""

    def __post_init__(self) -> None:
        if any(start >= end for start, end in self.ranges):
            raise ValueError("a range ends after its start")


class Settle(msgspec.Struct, frozen=True):
    """The outcomes of deliveries that one consumer of this connection got."""

    consumer: Number
    rows: Annotated[tuple[Outcome, ...], msgspec.Meta(max_length=ROWS_MAX)]


class Ack(NamedTuple):
    """What a consumer of this connection has finished."""

    consumer: int
    rows: list[Row]


class Delivered(NamedTuple):
    """The front of a DELIVERY; entries lie in the payload from `entries_at` to its end."""

    delivery: int
    lease_ms: int
    topic: str
    grants: list[Grant]
    entries_at: int


def ack_frame(request_id: int, consumer: int, rows: Sequence[Row]) -> bytes:
    """Return a whole ACK frame.

    >>> decode_ack(ack_frame(7, 3, [(1, 100, 200), (2, 200, 201)])[12:])
    Ack(consumer=3, rows=[(1, 100, 200), (2, 200, 201)])
    """
    if len(rows) == 1:
        return _ONE_ACK.pack(40, Kind.ACK, 0, 0, request_id, consumer, 0, *rows[0])
    assert len(rows) <= ROWS_MAX, "more than fits into a frame: split it"
    length = _HEAD_BYTES + _ACK_FRONT.size + _ROW.size * len(rows)
    flat = chain.from_iterable(rows)
    head = (length, Kind.ACK, 0, 0, request_id, consumer, 0)
    return pack(f"<IBBHIII{3 * len(rows)}Q", *head, *flat)


def decode_ack(payload: Bytes) -> Ack:
    """Return what an ACK says.

    >>> decode_ack(ack_frame(7, 3, [])[12:])
    Ack(consumer=3, rows=[])
    """
    if len(payload) < _ACK_FRONT.size:
        raise ProtocolError(f"an ACK of {len(payload)} bytes is too short")
    consumer, zero = _ACK_FRONT.unpack_from(payload)
    if zero:
        raise ProtocolError(f"the reserved bytes of an ACK are {zero:#x}, not 0")
    return Ack(consumer, _rows("ACK", memoryview(payload)[_ACK_FRONT.size :]))


def started_frame(consumer: int, rows: Sequence[Row]) -> bytes:
    """Return a whole STARTED frame; its request id is the consumer.

    >>> decode_started(started_frame(3, [(1, 100, 200)])[12:])
    [(1, 100, 200)]
    """
    assert len(rows) <= ROWS_MAX, "more than fits into a frame: split it"
    head = (_HEAD_BYTES + _ROW.size * len(rows), Kind.STARTED, 0, 0, consumer)
    return pack(f"<IBBHI{3 * len(rows)}Q", *head, *chain.from_iterable(rows))


def decode_started(payload: Bytes) -> list[Row]:
    """Return what a STARTED reports."""
    return _rows("STARTED", memoryview(payload))


def progress_frame(request_id: int, steps: Sequence[Step]) -> bytes:
    """Return a whole PROGRESS frame; without anything finished there is no answer.

    >>> decode_progress(progress_frame(7, [(3, FINISHED, 1, 100, 200)])[12:])
    [(3, 0, 1, 100, 200)]
    """
    return _steps_frame(Kind.PROGRESS, request_id, steps)


def settled_steps_frame(request_id: int, refused: Sequence[Step]) -> bytes:
    """Return a whole SETTLED frame that answers a PROGRESS, with what was refused.

    >>> decode_settled_steps(settled_steps_frame(7, [(3, FINISHED, 1, 100, 200)])[12:])
    [(3, 0, 1, 100, 200)]
    """
    return _steps_frame(Kind.SETTLED, request_id, refused)


def _steps_frame(kind: int, request_id: int, steps: Sequence[Step]) -> bytes:
    assert len(steps) <= ROWS_MAX, "more than fits into a frame: split it"
    head = (_HEAD_BYTES + _STEP.size * len(steps), kind, 0, 0, request_id)
    return HEADER.pack(*head) + b"".join([_STEP.pack(*step) for step in steps])


def decode_progress(payload: Bytes) -> list[Step]:
    """Return the rows of a PROGRESS."""
    return _steps("PROGRESS", payload)


def decode_settled_steps(payload: Bytes) -> list[Step]:
    """Return what of a PROGRESS was refused."""
    return _steps("SETTLED", payload)


def _steps(what: str, payload: Bytes) -> list[Step]:
    _check_rows(what, len(payload), _STEP.size)
    steps: list[Step] = list(_STEP.iter_unpack(payload))
    for _, kind, _, start, end in steps:
        if kind > STARTS or not start < end <= _OFFSET_MAX:
            raise ProtocolError(f"a row of the {what} is of no known kind, or has an empty range")
    return steps


def settled_frame(request_id: int, refused: Sequence[Row] = ()) -> bytes:
    """Return a whole SETTLED frame, with what was refused.

    >>> decode_settled(settled_frame(7, [(1, 100, 200)])[12:])
    [(1, 100, 200)]
    >>> settled_frame(7).hex(" ", 4)
    '08000000 5f000000 07000000'
    """
    assert len(refused) <= ROWS_MAX, "more than fits into a frame: split it"
    head = (_HEAD_BYTES + _ROW.size * len(refused), Kind.SETTLED, 0, 0, request_id)
    return pack(f"<IBBHI{3 * len(refused)}Q", *head, *chain.from_iterable(refused))


def decode_settled(payload: Bytes) -> list[Row]:
    """Return what was refused; nothing is the usual case."""
    return _rows("SETTLED", memoryview(payload)) if payload else []


def more_frame(request_id: int, credit: int) -> bytes:
    """Return a whole MORE frame for the consumer with this request id.

    >>> decode_more(more_frame(7, -5)[12:])
    -5
    """
    return _MORE_FRAME.pack(12, Kind.MORE, 0, 0, request_id, credit)


def decode_more(payload: Bytes) -> int:
    """Return by how many deliveries a MORE changes the credit."""
    if len(payload) != _MORE.size:
        raise ProtocolError(f"a MORE has {_MORE.size} bytes, not {len(payload)}")
    (credit,) = _MORE.unpack(payload)
    return int(credit)


def recall_frame(consumer: int, count: int) -> bytes:
    """Return a whole RECALL frame; its request id is the consumer.

    >>> decode_recall(recall_frame(7, 5)[12:])
    5
    """
    return _RECALL_FRAME.pack(12, Kind.RECALL, 0, 0, consumer, count)


def decode_recall(payload: Bytes) -> int:
    """Return how many messages a RECALL asks for."""
    if len(payload) != _RECALL.size:
        raise ProtocolError(f"a RECALL has {_RECALL.size} bytes, not {len(payload)}")
    (count,) = _RECALL.unpack(payload)
    return int(count)


def delivery_head(
    request_id: int,
    topic: str,
    grants: Sequence[Grant],
    *,
    delivery: int,
    lease_ms: int,
    entries_bytes: int,
) -> bytes:
    """Return a DELIVERY frame up to where its entries begin; those are written after it.

    >>> head = delivery_head(3, "t", [(0, 9, 1, 3)], delivery=5, lease_ms=30_000, entries_bytes=0)
    >>> decode_delivery(head[12:])
    Delivered(delivery=5, lease_ms=30000, topic='t', grants=[(0, 9, 1, 3)], entries_at=56)
    """
    assert len(grants) <= ROWS_MAX, "more than fits into a frame: split it"
    name = topic.encode()
    padded = name + bytes(-len(name) % 8)
    front = _DELIVERY.size + len(padded) + _GRANT.size * len(grants)
    head = (_HEAD_BYTES + front + entries_bytes, Kind.DELIVERY, 0, 0, request_id)
    packed = _ONE_DELIVERY.pack(*head, delivery, lease_ms, len(grants), len(name), 0) + padded
    return packed + b"".join(
        [
            _GRANT.pack(start, end, attempt, deliveries - attempt)
            for start, end, attempt, deliveries in grants
        ]
    )


def decode_delivery(payload: Bytes) -> Delivered:
    """Return the front of a DELIVERY."""
    if len(payload) < _DELIVERY.size:
        raise ProtocolError(f"a DELIVERY of {len(payload)} bytes is too short")
    delivery, lease_ms, count, topic_bytes, zero = _DELIVERY.unpack_from(payload)
    grants_at = _DELIVERY.size + topic_bytes + -topic_bytes % 8
    entries_at = grants_at + _GRANT.size * count
    if zero or count > ROWS_MAX or entries_at > len(payload):
        raise ProtocolError("the front of a DELIVERY does not fit its payload")
    name = payload[_DELIVERY.size : _DELIVERY.size + topic_bytes]
    try:
        topic = str(name, "utf-8")
    except UnicodeDecodeError:
        raise ProtocolError(f"topic name {bytes(name)[:40]!r} is not text") from None
    packed = _GRANT.iter_unpack(memoryview(payload)[grants_at:entries_at])
    grants = [
        (start, end, attempt, attempt + uncounted) for start, end, attempt, uncounted in packed
    ]
    if not all(start < end <= _OFFSET_MAX for start, end, _, _ in grants):
        raise ProtocolError("a range of a DELIVERY ends before it starts")
    return Delivered(delivery, lease_ms, topic, grants, entries_at)


def decode_consume(payload: Bytes) -> Consume:
    """Return what a CONSUME asks for.

    >>> decode_consume(b'{"group": "billing", "topics": ["orders"], "credit": 100}').topics
    ('orders',)
    """
    consume = decode_json(payload, Consume, "CONSUME", InvalidRequest)
    count = sum(len(claim.ranges) for claim in consume.claims)
    if count > ROWS_MAX:
        raise InvalidRequest(f"a CONSUME re-claims at most {ROWS_MAX} ranges, not {count}")
    starts = sum(len(claim.starts) for claim in consume.claims)
    if starts > CLAIMED_STARTS_MAX:
        raise InvalidRequest(
            f"a CONSUME says of at most {CLAIMED_STARTS_MAX} ranges when they were started, "
            f"not of {starts}"
        )
    return consume


def decode_joined(payload: Bytes) -> Joined:
    """Return what the REPLY to a CONSUME says."""
    return decode_json(payload, Joined, "REPLY to a CONSUME", ProtocolError)


def decode_settle(payload: Bytes) -> Settle:
    """Return what a SETTLE asks for.

    >>> decode_settle(b'{"consumer": 3, "rows": [{"do": "renew", "delivery": 1}]}').rows[0].do
    'renew'
    """
    settle = decode_json(payload, Settle, "SETTLE", InvalidRequest)
    count = sum(len(row.ranges) for row in settle.rows)
    if count > ROWS_MAX:
        raise InvalidRequest(f"a SETTLE has at most {ROWS_MAX} ranges, not {count}")
    return settle


def _rows(what: str, packed: memoryview) -> list[Row]:
    _check_rows(what, len(packed), _ROW.size)
    rows: list[Row] = list(_ROW.iter_unpack(packed))
    for _, start, end in rows:
        if not start < end <= _OFFSET_MAX:
            raise ProtocolError(f"a range of the {what} ends before it starts")
    return rows


def _check_rows(what: str, payload_bytes: int, row_bytes: int) -> None:
    count, rest = divmod(payload_bytes, row_bytes)
    if rest:
        raise ProtocolError(f"the rows of the {what} do not fit its payload")
    if count > ROWS_MAX:
        raise ProtocolError(f"the {what} has {count} rows; the limit is {ROWS_MAX}")
