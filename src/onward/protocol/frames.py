r"""A frame: one unit on the wire, the same in both directions. All integers little-endian.

    0   length      u32   bytes after this field: 8 + payload
    4   kind        u8
    5   flags       u8    0
    6   zero        u16   0
    8   request_id  u32   chosen by the client; answers carry it; 0 = belongs to no request
    12  payload

A client opens with the 8-byte preface `ONWARD1\n`, then both sides send frames only. A frame is at
most 64 KiB until WELCOME, then at most what WELCOME says. Kinds below 64 come from the client,
the others from the broker; numbers are never used again for something else.
"""

from enum import IntEnum
from struct import Struct
from typing import Final

PREFACE: Final = b"ONWARD1\n"
PROTOCOL_VERSION: Final = 1
REVISION: Final = 3
"""What a broker knows beyond the first of this version: 1 relative times, 2 PROGRESS, 3 FOLLOW."""

HEADER_BYTES: Final = 12
HELLO_FRAME_BYTES_MAX: Final = 64 * 1024
FRAME_BYTES_MAX: Final = 17 * 1024 * 1024

HEADER: Final = Struct("<IBBHI")


class Kind(IntEnum):
    """What a frame is. Below 64: client to broker."""

    HELLO = 1
    PING = 2
    BYE = 3
    PUBLISH = 10
    READ = 11
    CREDIT = 12
    CANCEL = 13
    REQUEST = 20
    CONSUME = 30
    ACK = 31
    SETTLE = 32
    MORE = 33
    STARTED = 34
    PROGRESS = 35
    FOLLOW = 40
    FOLLOWED = 41
    FETCH = 42

    WELCOME = 64
    PONG = 65
    GOODBYE = 66
    PUBLISHED = 74
    ENTRIES = 75
    END = 76
    COUNTED_FROM = 77
    REPLY = 84
    ERROR = 85
    DELIVERY = 94
    SETTLED = 95
    RECALL = 96
    EVENTS = 100
    SOURCE = 101
    FILE = 102


def frame(kind: int, request_id: int, payload: bytes | bytearray = b"") -> bytes:
    """Return a whole frame.

    >>> frame(Kind.PING, 7).hex(" ", 4)
    '08000000 02000000 07000000'
    """
    return HEADER.pack(8 + len(payload), kind, 0, 0, request_id) + payload


def frame_head(kind: int, request_id: int, payload_bytes: int) -> bytes:
    """Return only the header of a frame, for payloads that are written from where they lie.

    >>> frame_head(Kind.ENTRIES, 7, 4096).hex(" ", 4)
    '08100000 4b000000 07000000'
    """
    return HEADER.pack(8 + payload_bytes, kind, 0, 0, request_id)


def kind_name(kind: int) -> str:
    """Return the name of a kind for people.

    >>> kind_name(10), kind_name(99)
    ('PUBLISH', 'frame kind 99')
    """
    try:
        return Kind(kind).name
    except ValueError:
        return f"frame kind {kind}"
