"""Operations on copies of a node: follow, status, promote, step down, snapshots."""

from __future__ import annotations

from struct import Struct
from typing import Annotated, Final, Literal

import msgspec

from onward.errors import ProtocolError
from onward.protocol.frames import Kind
from onward.protocol.operations.operation import (
    ADMIN,
    Request,
    frame_operation,
    operation,
    read_topic,
)
from onward.protocol.payloads import Lineage, Number

NAME_CHARACTERS_MAX: Final = 128
FILE_BYTES_MAX: Final = 1 << 20

_FOLLOWED: Final = Struct("<Q")
_SOURCE: Final = Struct("<QqI")
_FILE: Final = Struct("<I4x")

Role = Literal["leader", "replica", "retired"]
ReplicaName = Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_CHARACTERS_MAX)]


class SourceState(msgspec.Struct, frozen=True):
    """How far a source is: sent beside events, and once a second."""

    durable_event_id: Number
    time_ms: int
    """The time of its newest entry."""
    epoch: Number
    leader: str = ""
    """The address of the node that takes writes; empty: the source itself, or it is not known."""


@frame_operation(
    "replica.follow",
    Kind.FOLLOW,
    reply=SourceState,
    needs=ADMIN,
    is_repeatable=True,
    example={"name": "copy-1", "node": "5e0f3c", "next_event_id": 1, "credit_bytes": 16_777_216},
)
class Follow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Send all entries of the log from an event id on, and go on with new ones."""

    name: ReplicaName
    """Names the replica for people and for retention; no two replicas have one name."""
    node: str
    """The node that follows: over a new connection it takes the place of its old one."""
    next_event_id: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    last_crc: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)] = 0
    """The checksum of the entry before, which proves that both have one history."""
    lineage: Lineage = Lineage()
    credit_bytes: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] = 16 << 20


class ReplicaDescription(msgspec.Struct, frozen=True, kw_only=True):
    """One replica, as its source describes it."""

    name: str
    node: str = ""
    connected: bool = False
    durable_event_id: int = 0
    """Every event up to this one is on the replica's disk."""
    lag_events: int = 0
    lag_ms: int = 0
    """How old the oldest event is that the replica lacks; 0 when it lacks none."""
    is_awaited: bool = False
    """Retention waits for it."""


class ReplicationStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The role of a node, its lag behind its source, and its own replicas."""

    node: str
    role: Role = "leader"
    lineage: Lineage = Lineage()
    source: str = ""
    """Of a replica: the address that it follows."""
    state: str = ""
    """Of a replica: `following`, `connecting`, `fetching`, or why it follows no longer."""
    event_id: int = 0
    """The last event that this node has."""
    source_event_id: int = 0
    """The last durable event of the source, as far as is known."""
    lag_events: int = 0
    lag_ms: int = 0
    heard_ms_ago: int = 0
    """How long ago the source was heard from."""
    replicas: list[ReplicaDescription] = []


@operation(needs=read_topic(), example={})
class ShowReplication(Request[ReplicationStatus], frozen=True, tag="replica.status"):
    """Return the role of the node, its lag and its replicas."""


class Promoted(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that is a leader now."""

    node: str
    lineage: Lineage
    event_id: int
    """The last event of the old history; the new one begins behind it."""
    source_stepped_down: bool = False
    """True: the source has confirmed that it takes no writes, so nothing it accepted is missing."""


@operation(
    needs=ADMIN, changes=True, any_role=True, is_repeatable=False, running_max=1,
    example={"force": False},
)  # fmt: skip
class Promote(Request[Promoted], frozen=True, tag="replica.promote"):
    """Make a replica the leader of a new history, after its source has stepped down."""

    force: bool = False
    """Promote even though the source answers and does not step down."""


class SteppedDown(msgspec.Struct, frozen=True, kw_only=True):
    """A leader that takes no writes any more."""

    event_id: int
    """The last event of its history."""


@operation(
    needs=ADMIN, changes=True, any_role=True, is_repeatable=True, example={"successor": "5e0f3c"},
)  # fmt: skip
class StepDown(Request[SteppedDown], frozen=True, tag="replica.step_down"):
    """Stop taking writes for ever, durably: another node continues this history."""

    successor: str = ""
    """The node that continues, for people."""


class SnapshotFile(msgspec.Struct, frozen=True):
    """One file of a snapshot."""

    name: str
    bytes: int


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Files that are a whole log together; they can be fetched while the snapshot is open."""

    id: int
    event_id: int
    """The last event that the snapshot holds."""
    lineage: Lineage
    files: list[SnapshotFile]


@operation(needs=ADMIN, example={}, running_max=2)
class OpenSnapshot(Request[Snapshot], frozen=True, tag="replica.snapshot"):
    """Write a checkpoint and return the files of the log; they stay readable on this connection."""


@frame_operation(
    "replica.fetch",
    Kind.FETCH,
    reply=SnapshotFile,
    needs=ADMIN,
    is_repeatable=True,
    example={"snapshot": 1, "file": 0, "position": 0, "bytes": 1_048_576},
)
class Fetch(msgspec.Struct, frozen=True, kw_only=True):
    """Return a part of a file of a snapshot, with its checksum."""

    snapshot: Number
    file: Number
    """The number of the file in the list of the snapshot."""
    position: Number
    bytes: Annotated[int, msgspec.Meta(ge=1, le=FILE_BYTES_MAX)]


# --- packed payloads ------------------------------------------------------------------------------


def encode_followed(event_id: int) -> bytes:
    """Return the payload of FOLLOWED: every event up to this one is durable at the replica."""
    return _FOLLOWED.pack(event_id)


def decode_followed(payload: bytes | bytearray) -> int:
    """Return the event id of a FOLLOWED.

    >>> decode_followed(encode_followed(7))
    7
    """
    if len(payload) != _FOLLOWED.size:
        raise ProtocolError(f"a FOLLOWED has {_FOLLOWED.size} bytes, not {len(payload)}")
    return int(_FOLLOWED.unpack(payload)[0])


def encode_source(state: SourceState) -> bytes:
    """Return the payload of SOURCE."""
    front = _SOURCE.pack(state.durable_event_id, state.time_ms, state.epoch)
    return front + state.leader.encode()


def decode_source(payload: bytes | bytearray) -> SourceState:
    """Return how far a source is.

    >>> decode_source(encode_source(SourceState(7, 1_000, 0)))
    SourceState(durable_event_id=7, time_ms=1000, epoch=0, leader='')
    """
    if len(payload) < _SOURCE.size:
        raise ProtocolError(f"a SOURCE has at least {_SOURCE.size} bytes, not {len(payload)}")
    durable_event_id, time_ms, epoch = _SOURCE.unpack_from(payload)
    leader = payload[_SOURCE.size :].decode(errors="replace")
    return SourceState(durable_event_id, time_ms, epoch, leader)


def file_head(crc: int) -> bytes:
    """Return what stands before the bytes of a file in the payload of FILE: their crc32c."""
    return _FILE.pack(crc)


def split_file(payload: bytes | bytearray) -> tuple[int, memoryview]:
    """Return the checksum and the bytes of a FILE.

    >>> crc, part = split_file(file_head(7) + b"abc")
    >>> crc, bytes(part)
    (7, b'abc')
    """
    if len(payload) < _FILE.size:
        raise ProtocolError("a FILE is too short")
    return int(_FILE.unpack_from(payload)[0]), memoryview(payload)[_FILE.size :]
