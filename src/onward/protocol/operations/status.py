"""Operations on the node itself."""

from __future__ import annotations

import msgspec

from onward.protocol.operations.operation import Request, operation, read_topic
from onward.protocol.operations.replicas import Role


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a node in numbers."""

    node: str
    role: Role = "leader"
    lineage: str = "0"
    """The history of its log: the epoch, and the id that a promotion gave it."""
    lag_events: int = 0
    """Of a replica: how many events it is behind its source."""
    lag_ms: int = 0
    """Of a replica: how far it is behind its source in time."""
    version: str = ""
    python: str = ""
    started_at_ms: int = 0
    folder: str = ""
    durability: str = ""
    """The durability of publishes that ask for none."""
    topics: int = 0
    producers: int = 0
    connections: int = 0
    next_event_id: int = 0
    durable_event_id: int = 0
    """Every event up to this one is synced on this node's disk."""
    log_bytes: int = 0
    segments: int = 0
    disk_free_bytes: int = 0
    disk_is_full: bool = False
    inflight_bytes: int = 0
    published: int = 0
    commits: int = 0
    delivered_bytes: int = 0
    groups: int = 0
    members: int = 0
    delivered: int = 0
    expiring: int = 0
    """Messages that no member was given yet and that retention may drop soon."""
    dropped: int = 0
    """Messages that retention dropped before they were done, since the node started."""
    scheduled: int = 0
    """Scheduled messages that will fire."""
    due_now: int = 0
    """Scheduled messages that are due and have not fired."""
    next_due_at_ms: int = 0
    fired: int = 0
    late_ms: int = 0
    late_ms_max: int = 0
    schedule_runs: int = 0
    schedule_ahead_ms_max: int = 0
    checkpoints: int = 0


@operation(needs=read_topic(), example={})
class ShowStatus(Request[NodeStatus], frozen=True, tag="status"):
    """Return the state of the node in numbers: log, disk, connections, counts."""
