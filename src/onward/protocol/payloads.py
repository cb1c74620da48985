"""What is inside a frame: JSON for what is rare, packed bytes for what is many.

    PUBLISH    durability u8, topic_bytes u8, zero u16, topic name, batch
    PUBLISHED  base offset u64, event id u64, durability u8 (bit 7: stored before, this is a repeat)
    COUNTED_FROM  time_ms i64: from when on the delays of a PUBLISH count; before its PUBLISHED
    CREDIT     bytes u32
    the others JSON; ENTRIES is raw entries; PING, PONG, BYE and CANCEL have no payload

What is not JSON is a `ProtocolError`: the peer is broken. JSON of a wrong shape is an
`InvalidRequest` when a client sent it (it gets the answer and the connection goes on) and a
`ProtocolError` when a broker did. Fields that are not known are ignored, so that either side may
be newer.
"""

import re
from collections.abc import Mapping
from enum import IntEnum
from struct import Struct
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar

import msgspec

from onward.errors import (
    InvalidName,
    InvalidRequest,
    OnwardError,
    ProtocolError,
    from_wire,
    to_wire,
)
from onward.message.relative import Relative
from onward.protocol.frames import Kind, frame

Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Instant = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Bytes = bytes | bytearray

T = TypeVar("T")

_OUT_OF_RANGE: Final = re.compile(r"Expected `int` ([<>]=) (-?\d+) - at `\$(?:\.\w+)*\.(\w+)`")
_unpack_publish = Struct("<BBH").unpack_from
_new_tuple = tuple.__new__
_PUBLISH_FRAME: Final = Struct("<IBBHIBBH")
_PUBLISHED: Final = Struct("<QQB")
RECEIPT: Final = Struct("<QIQQB")
"""A whole PUBLISHED frame: its front, request id, base offset, event id, durability."""
RECEIPT_FRONT: Final = 25 | 74 << 32
"""How long a PUBLISHED is, and its kind."""
_CREDIT: Final = Struct("<I")
_TIME: Final = Struct("<q")
_CREDIT_FRAME: Final = Struct("<IBBHII")
_REPEAT: Final = 0x80


class Durability(IntEnum):
    """What must have happened before PUBLISHED is sent; DEFAULT leaves it to the broker."""

    MEMORY = 0
    INTERVAL = 1
    DISK = 2
    QUORUM = 3
    DEFAULT = 255


class Lineage(msgspec.Struct, frozen=True):
    """Which history a log holds: a new one begins with each promotion.

    A history with a higher epoch continues one with a lower epoch, perhaps without its end. Two
    histories of the same epoch are the same, or have nothing to do with each other.
    """

    epoch: Number = 0
    id: str = ""
    since: Number = 0
    """The last event of the history that this one continues."""

    def __str__(self) -> str:
        return f"{self.epoch}-{self.id}" if self.id else str(self.epoch)


class Hello(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who wants to speak, and which version."""

    version: Number
    client: str = ""
    host: str = ""
    pid: Number = 0
    token: str | None = None
    lineage: Lineage | None = None
    """The newest history that the client has seen; a broker with an older one must not serve it."""

    def __repr__(self) -> str:
        token = "None" if self.token is None else "'***'"  # a token never gets into a log
        return (
            f"Hello(version={self.version}, client={self.client!r}, host={self.host!r}, "
            f"pid={self.pid}, token={token})"
        )


class Welcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who answers, and the limits that hold from now on."""

    version: Number
    node: str
    heartbeat_ms: Number
    frame_bytes_max: Number
    batch_bytes_max: Number
    message_bytes_max: Number
    publishes_max: Number
    revision: Number = 0
    """What this broker knows beyond the first of this version: see the reference."""
    lineage: Lineage = Lineage()
    """Which history this broker has."""
    is_leader: bool = True
    """False: it takes no writes."""
    leader: str | None = None
    """The address of the node that takes writes, as far as this one knows it."""


class Goodbye(msgspec.Struct, frozen=True):
    """Why the broker closes the connection."""

    code: str
    message: str


class Start(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Where a READ starts: at an offset, at a time, or after an event id; exactly one of them."""

    offset: Number | None = None
    time_ms: Instant | Relative | None = None
    event_id: Number | None = None

    def __post_init__(self) -> None:
        if (self.offset, self.time_ms, self.event_id).count(None) != 2:
            raise ValueError("'from' has exactly one of offset, time_ms and event_id")


class Read(msgspec.Struct, frozen=True, rename={"start": "from", "end": "to"}):
    """Which entries of a topic to send, and how many bytes of them at first."""

    topic: str
    start: Literal["earliest", "latest"] | Start
    credit_bytes: Number
    follow: bool = False
    end: Number | msgspec.UnsetType = msgspec.UNSET
    """The offset that it ends before; left out, it goes to the end of the topic."""
    number: Number | msgspec.UnsetType = msgspec.UNSET
    """The topic that is read on: another one of that name is not it. Nothing is created then."""
    kept: bool | msgspec.UnsetType = msgspec.UNSET
    """Whether messages are sent, too, that only groups still have: from before the topic begins."""


class End(msgspec.Struct, frozen=True):
    """Why a READ is over, and at which offset a later one would go on."""

    code: str
    message: str
    next_offset: Number


class Publish(NamedTuple):
    """The front of a PUBLISH; the batch lies in the payload from `batch_at` to its end."""

    durability: int
    topic: str
    batch_at: int


class Published(NamedTuple):
    """Where the messages of a PUBLISH were stored, and how safely."""

    base_offset: int
    event_id: int
    durability: int
    repeat: bool


def publish_head(request_id: int, topic: str, *, durability: int, batch_bytes: int) -> bytes:
    """Return a PUBLISH frame up to where its batch begins; the batch is written after it.

    >>> publish_head(7, "t", durability=Durability.DEFAULT, batch_bytes=72).hex(" ", 4)
    '55 0000000a 00000007 000000ff 01000074'
    """
    name = topic.encode()
    length = 12 + len(name) + batch_bytes
    head = _PUBLISH_FRAME.pack(length, 10, 0, 0, request_id, durability, len(name), 0)
    return head + name


def decode_publish(payload: Bytes) -> Publish:
    """Return the front of a PUBLISH.

    >>> decode_publish(publish_head(7, "t", durability=2, batch_bytes=0)[12:])
    Publish(durability=2, topic='t', batch_at=5)
    """
    if len(payload) < 4:
        raise ProtocolError(f"a PUBLISH of {len(payload)} bytes is too short")
    durability, topic_bytes, zero = _unpack_publish(payload)
    batch_at = 4 + topic_bytes
    if zero or batch_at > len(payload):
        raise ProtocolError("the front of a PUBLISH does not fit its payload")
    try:
        topic = str(payload[4:batch_at], "utf-8")
    except UnicodeDecodeError:
        raise InvalidName(f"topic name {bytes(payload[4:batch_at])[:40]!r} is not text") from None
    # Half the cost of calling the class, and this runs for every publish.
    return _new_tuple(Publish, (durability, topic, batch_at))


def published_frame(
    request_id: int, base_offset: int, event_id: int, durability: int, *, repeat: bool = False
) -> bytes:
    """Return a whole PUBLISHED frame.

    >>> decode_published(published_frame(7, 100, 12, Durability.DISK)[12:])
    Published(base_offset=100, event_id=12, durability=2, repeat=False)
    """
    if repeat:
        durability |= _REPEAT
    return RECEIPT.pack(RECEIPT_FRONT, request_id, base_offset, event_id, durability)


def decode_published(payload: Bytes) -> Published:
    """Return what a PUBLISHED says."""
    if len(payload) != _PUBLISHED.size:
        raise ProtocolError(f"a PUBLISHED has {_PUBLISHED.size} bytes, not {len(payload)}")
    base_offset, event_id, durability = _PUBLISHED.unpack(payload)
    repeat = durability >= _REPEAT
    return _new_tuple(Published, (base_offset, event_id, durability & ~_REPEAT, repeat))


def counted_from_frame(request_id: int, time_ms: int) -> bytes:
    """Return a whole COUNTED_FROM frame for the PUBLISH with this request id.

    >>> decode_counted_from(counted_from_frame(7, 1_794_823_200_000)[12:])
    1794823200000
    """
    return frame(Kind.COUNTED_FROM, request_id, _TIME.pack(time_ms))


def decode_counted_from(payload: Bytes) -> int:
    """Return from when on the delays of a PUBLISH count."""
    if len(payload) != _TIME.size:
        raise ProtocolError(f"a COUNTED_FROM has {_TIME.size} bytes, not {len(payload)}")
    return int(_TIME.unpack(payload)[0])


def credit_frame(request_id: int, credit_bytes: int) -> bytes:
    """Return a whole CREDIT frame for the READ with this request id.

    >>> decode_credit(credit_frame(7, 65536)[12:])
    65536
    """
    return _CREDIT_FRAME.pack(12, Kind.CREDIT, 0, 0, request_id, credit_bytes)


def decode_credit(payload: Bytes) -> int:
    """Return how many bytes a CREDIT gives."""
    if len(payload) != _CREDIT.size:
        raise ProtocolError(f"a CREDIT has {_CREDIT.size} bytes, not {len(payload)}")
    (credit_bytes,) = _CREDIT.unpack(payload)
    return int(credit_bytes)


def encode_json(value: msgspec.Struct | Mapping[str, object]) -> bytes:
    """Return the payload of a frame that carries JSON.

    >>> encode_json(Read("orders", Start(offset=7), 65536))
    b'{"topic":"orders","from":{"offset":7},"credit_bytes":65536,"follow":false}'
    """
    return msgspec.json.encode(value)


def decode_hello(payload: Bytes) -> Hello:
    """Return what a HELLO says."""
    return decode_json(payload, Hello, "HELLO", ProtocolError)


def decode_welcome(payload: Bytes) -> Welcome:
    """Return what a WELCOME says."""
    return decode_json(payload, Welcome, "WELCOME", ProtocolError)


def decode_goodbye(payload: Bytes) -> Goodbye:
    """Return what a GOODBYE says."""
    return decode_json(payload, Goodbye, "GOODBYE", ProtocolError)


def decode_read(payload: Bytes) -> Read:
    """Return what a READ asks for.

    >>> decode_read(b'{"topic": "orders", "from": "earliest", "credit_bytes": 65536}').start
    'earliest'
    """
    return decode_json(payload, Read, "READ", InvalidRequest)


def decode_end(payload: Bytes) -> End:
    """Return what an END says."""
    return decode_json(payload, End, "END", ProtocolError)


def encode_error(error: OnwardError) -> bytes:
    """Return the payload of an ERROR."""
    return msgspec.json.encode(to_wire(error))


def decode_error(payload: Bytes) -> OnwardError:
    """Return the error that an ERROR carries, ready to be raised.

    >>> decode_error(encode_error(InvalidName("topic name ''"))).code
    'invalid_name'
    """
    return from_wire(decode_json(payload, dict[str, Any], "ERROR", ProtocolError))


def describe_mismatch(what: str, error: msgspec.ValidationError) -> str:
    """Return a sentence about a payload of the wrong shape; a number out of range names its limit.

    >>> describe_mismatch("REQUEST", msgspec.ValidationError("Expected `int` <= 7 - at `$.count`"))
    "'count' is at most 7"
    """
    limit = _OUT_OF_RANGE.fullmatch(str(error))
    if limit is None:
        return f"the {what} is not understood: {error}"
    return f"{limit[3]!r} is at {'most' if limit[1] == '<=' else 'least'} {int(limit[2]):,}"


def decode_json(payload: Bytes, shape: type[T], what: str, wrong_shape: type[OnwardError]) -> T:
    """Return a payload of JSON in its shape, or raise `wrong_shape`; `what` is said to people.

    >>> decode_json(b'{"code": "stopping", "message": ""}', Goodbye, "GOODBYE", ProtocolError)
    Goodbye(code='stopping', message='')
    """
    try:
        return msgspec.json.decode(payload, type=shape)
    except msgspec.ValidationError as error:
        raise wrong_shape(describe_mismatch(what, error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"the payload of {what} is not JSON: {error}") from None
    except RecursionError:
        raise ProtocolError(f"the payload of {what} is nested too deeply") from None
