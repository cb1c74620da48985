"""What can be set, what it is by default, and what it means.

These structs are the only list of settings: their fields are the names, their defaults the
defaults, their descriptions the documentation (docs/reference/config.md is checked against them).
The name says the unit: `_ms` is a time in milliseconds, `bytes` a size. Reading them from a file,
the environment and flags is the work of config.py. Secrets are not in any repr.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Durability = Literal["memory", "interval", "disk", "quorum"]

_SIZE_BYTES_MAX = (
    2**31 - 1
)  # sizes travel as u32 in frames and batches; half leaves room for headers


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where the broker listens, and what one connection may cost."""

    host: Annotated[
        str, Meta(description="Address to listen on; any other than loopback needs `auth.tokens`.")
    ] = "127.0.0.1"
    port: Annotated[
        int, Meta(ge=0, le=65535, description="TCP port to listen on; 0 takes any free one.")
    ] = 7700
    unix_socket: Annotated[
        str, Meta(description="Path of a Unix socket to listen on as well; empty for none.")
    ] = ""
    advertise: Annotated[
        str,
        Meta(
            description="Address under which clients reach this node (`host:7700`), where it "
            "differs from `server.host` and `server.port`."
        ),
    ] = ""
    connections_max: Annotated[
        int, Meta(ge=1, description="Connections that may be open at the same time.")
    ] = 10_000
    connection_bytes_max: Annotated[
        int,
        Meta(
            ge=65_536,
            description="Unanswered bytes of one connection before it is no longer read.",
        ),
    ] = 8 << 20
    inflight_bytes_max: Annotated[
        int,
        Meta(
            ge=65_536,
            description="Unanswered bytes of all connections before publishes get `overloaded`.",
        ),
    ] = 64 << 20
    heartbeat_ms: Annotated[
        int,
        Meta(
            ge=100,
            description="Pause after which a client that has nothing to say sends a sign of life; "
            "the broker drops one that is silent for three such pauses.",
        ),
    ] = 5_000
    hello_ms: Annotated[
        int, Meta(ge=1, description="Time a new connection has to introduce itself.")
    ] = 5_000
    frame_ms: Annotated[
        int, Meta(ge=1, description="Time a peer has to send the rest of a frame it began.")
    ] = 30_000
    stop_ms: Annotated[
        int, Meta(ge=0, description="Time a stopping broker gives to what is under way.")
    ] = 10_000
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="The least important events that `onward serve` writes to stderr."),
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"],
        Meta(description="How events are written: `text` for people, `json` for collectors."),
    ] = "text"


class LogSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where messages stay, how safe they are, and for how long."""

    folder: Annotated[
        str, Meta(min_length=1, description="Folder of the log; one broker at a time uses it.")
    ] = "./onward-data"
    segment_bytes_max: Annotated[
        int, Meta(ge=65_536, le=2 << 30, description="Size at which a new segment is begun.")
    ] = 1 << 30
    durability: Annotated[
        Durability,
        Meta(
            description="What an ack promises when the publisher does not say: `memory`, "
            "`interval`, `disk` or `quorum`."
        ),
    ] = "disk"
    interval_ms: Annotated[
        int, Meta(ge=1, description="Time between two syncs with durability `interval`.")
    ] = 1_000
    retention_ms: Annotated[
        int, Meta(ge=0, description="Age at which a whole segment is deleted; 0 for never.")
    ] = 7 * 86_400_000
    retention_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="Size of the log at which its oldest segment is deleted; 0 for no limit.",
        ),
    ] = 0
    carry_bytes_max: Annotated[
        int,
        Meta(
            ge=0,
            description="Bytes of retries and dead letters of one topic that outlive its "
            "retention; beyond it the oldest are given up, and the log says so.",
        ),
    ] = 64 << 20
    dead_retention_ms: Annotated[
        int, Meta(ge=0, description="Age at which a dead letter is purged; 0 for never.")
    ] = 0
    disk_reserve_bytes: Annotated[
        int,
        Meta(ge=0, description="Free bytes on the disk below which publishes get `disk_full`."),
    ] = 64 << 20
    retention_replicas: Annotated[
        tuple[str, ...],
        Meta(
            description="Names of replicas that retention waits for, so that they need no "
            "snapshot; see `log.replica_wait_bytes_max`."
        ),
    ] = ()
    replica_wait_bytes_max: Annotated[
        int,
        Meta(
            ge=0,
            description="Bytes of log that are kept for a replica at most; beyond it the log is "
            "deleted as always, and says so. 0 for no limit.",
        ),
    ] = 16 << 30
    checkpoint_bytes: Annotated[
        int, Meta(ge=65_536, description="Bytes of log after which a checkpoint is written.")
    ] = 256 << 20
    checkpoint_rows: Annotated[
        int,
        Meta(ge=1, description="Index rows kept in memory before they are written as a run."),
    ] = 65_536
    preallocate_bytes: Annotated[
        int,
        Meta(ge=0, description="Disk space a segment takes ahead of its writing; 0 for none."),
    ] = 64 << 20


class TopicSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What topics may be and hold."""

    auto_create: Annotated[
        bool,
        Meta(description="Whether publishing to an unknown topic, or following it, creates it."),
    ] = True
    count_max: Annotated[int, Meta(ge=1, description="Topics that may exist.")] = 1_000_000
    message_bytes_max: Annotated[
        int,
        Meta(ge=1, le=_SIZE_BYTES_MAX, description="Size of the largest message that is taken."),
    ] = 4 << 20
    batch_bytes_max: Annotated[
        int,
        Meta(ge=1024, le=_SIZE_BYTES_MAX, description="Size of the largest batch that is taken."),
    ] = 16 << 20


class ScheduleSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What may wait for its time, and how a clock that jumps is taken."""

    ahead_ms_max: Annotated[
        int,
        Meta(ge=1_000, description="How far ahead a message may be scheduled; farther is refused."),
    ] = 3_653 * 86_400_000
    jump_hold_ms: Annotated[
        int,
        Meta(
            ge=0,
            description="Time after which a clock that jumped forward is believed at the latest.",
        ),
    ] = 3_600_000


class GroupSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for all groups."""

    reclaim_ms: Annotated[
        int,
        Meta(
            ge=0,
            le=600_000,
            description="Time after a start of the broker in which members may re-claim the "
            "messages that they hold; what nobody re-claims is delivered after it. 0 for none: "
            "everything is delivered again at once.",
        ),
    ] = 5_000


class ReplicaSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Which node this one copies, if it is a replica."""

    of: Annotated[
        str,
        Meta(
            description="Address of the node to copy (`host:7700`): this node is a read-only "
            "replica of it. Empty for none."
        ),
    ] = ""
    name: Annotated[
        str,
        Meta(
            max_length=128,
            description="Name of this replica at its source; empty for the name of the host.",
        ),
    ] = ""
    token: Annotated[
        str,
        Meta(
            description="Secret for the source, whose owner must have the permission `admin`; "
            "from the environment or a file, not from a flag."
        ),
    ] = ""
    lag_warn_ms: Annotated[
        int, Meta(ge=0, description="Lag at which the replica warns in its log; 0 for never.")
    ] = 10_000

    def __repr__(self) -> str:
        return f"ReplicaSettings(of={self.of!r}, name={self.name!r})"  # no secret in a log


class Token(msgspec.Struct, frozen=True):
    """Who may connect, and the secret that proves it; the secret is not shown anywhere."""

    name: str
    secret: str

    def __repr__(self) -> str:
        return f"Token('{self}')"

    def __str__(self) -> str:
        return f"{self.name}:***"

    def __rich_repr__(self) -> list[tuple[str, str]]:
        return [("name", self.name), ("secret", "***")]


class AuthSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Who may connect."""

    tokens: Annotated[
        tuple[Token, ...],
        Meta(
            description="Who may connect, each as `name:secret`; empty for everyone, on loopback."
        ),
    ] = ()


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of a broker; `sources` says of each name where its value came from.

    >>> Settings().log.segment_bytes_max
    1073741824
    """

    server: ServerSettings = ServerSettings()
    log: LogSettings = LogSettings()
    topics: TopicSettings = TopicSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    groups: GroupSettings = GroupSettings()
    replica: ReplicaSettings = ReplicaSettings()
    auth: AuthSettings = AuthSettings()
    sources: dict[str, str] = msgspec.field(default_factory=dict)
