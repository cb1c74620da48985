"""Operations that move a group: reset, skip, purge, advance, replay, fork, peek, positions.

    finished ──replay──▶ unfinished ──skip──▶ finished          reset: all of a topic at once
                              ├──purge──▶ finished: all messages that are ready
                              └──advance──▶ acked: all below an offset, by a pipeline

Ranges are half-open, `[start, end)`, and clipped to what the topic holds. A dry run counts only.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from onward.message.relative import Relative
from onward.protocol.operations.groups import GroupName
from onward.protocol.operations.operation import Request, manage_group, operation, read_group
from onward.protocol.operations.topics import Time
from onward.protocol.payloads import Start

PEEK_MAX = 10_000
RANGES_MAX = 10_000

Offset = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
OffsetRanges = Annotated[list[tuple[Offset, Offset]], msgspec.Meta(max_length=RANGES_MAX)]

# --- replies --------------------------------------------------------------------------------------


class MessageCount(msgspec.Struct, frozen=True):
    """How many messages were moved, or would be if this was a dry run."""

    count: int


class ResetTopic(msgspec.Struct, frozen=True):
    """Where a group begins again in one topic."""

    topic: str
    offset: int
    backlog: int
    """How many messages that makes."""


class ResetCount(MessageCount, frozen=True):
    """How many messages are unfinished after a reset, in all and by topic."""

    topics: list[ResetTopic] = []


class PeekedRanges(msgspec.Struct, frozen=True):
    """The offsets that would be delivered next, in that order."""

    ranges: list[tuple[int, int]] = []
    count: int = 0


class StoredPosition(msgspec.Struct, frozen=True):
    """The position that was stored."""

    offset: int


# --- requests -------------------------------------------------------------------------------------


@operation(
    needs=manage_group("group"), changes=True, example={"group": "billing", "to": "earliest"}
)
class ResetGroup(Request[ResetCount], frozen=True, tag="group.reset"):
    """Let a group begin again at a place; leases of the topic are void."""

    group: str
    to: Literal["earliest", "latest"] | Start
    topic: str = ""
    """Empty: all topics of the group."""
    dry_run: bool = False


@operation(
    needs=manage_group("group"),
    changes=True,
    example={"group": "billing", "topic": "orders", "ranges": [[7, 10]]},
)
class SkipMessages(Request[MessageCount], frozen=True, tag="group.skip"):
    """Finish messages without delivering them; members that hold some lose their leases."""

    group: str
    topic: str
    ranges: OffsetRanges
    dry_run: bool = False


@operation(needs=manage_group("group"), changes=True, example={"group": "billing", "dry_run": True})
class PurgeReady(Request[MessageCount], frozen=True, tag="group.purge"):
    """Finish all messages that are ready: held by no member, and waiting for no retry."""

    group: str
    topic: str = ""
    """Empty: all topics of the group."""
    dry_run: bool = False


@operation(
    needs=read_group("group"),
    changes=True,
    is_repeatable=True,
    running_max=10_000,
    example={"group": "totals", "topic": "orders", "to": 100, "member": "spark"},
)
class AdvanceGroup(Request[MessageCount], frozen=True, tag="group.advance"):
    """Finish all messages below an offset, as acked by a member; a group never moves back."""

    group: str
    topic: str
    to: Offset
    member: str


@operation(
    needs=manage_group("group"),
    changes=True,
    example={"group": "billing", "topic": "orders", "ranges": [[0, 10]]},
)
class ReplayMessages(Request[MessageCount], frozen=True, tag="group.replay"):
    """Deliver finished messages once more, by ranges or by the time when they were published."""

    group: str
    topic: str
    ranges: OffsetRanges | None = None
    from_ms: Time | Relative | None = None
    to_ms: Time | Relative | None = None
    dry_run: bool = False


@operation(
    needs=(read_group("group"), manage_group("to")),
    changes=True,
    example={"group": "billing", "to": "trial"},
)
class ForkGroup(Request[GroupName], frozen=True, tag="group.fork"):
    """Create a group with the settings, progress, retries and dead letters of another one."""

    group: str
    to: str
    """The name of the new group."""


@operation(
    needs=read_group("group"),
    running_max=100,
    example={"group": "billing", "topic": "orders", "limit": 10},
)
class PeekGroup(Request[PeekedRanges], frozen=True, tag="group.peek"):
    """Return the offsets that would be delivered next, without delivering them."""

    group: str
    topic: str
    limit: Annotated[int, msgspec.Meta(ge=1, le=PEEK_MAX)] = 10


@operation(
    needs=read_group("group"),
    changes=True,
    running_max=20_000,
    example={"group": "prices", "member": "north", "topic": "ticks", "offset": 71},
)
class SetPosition(Request[StoredPosition], frozen=True, tag="position.set"):
    """Store the offset below which a member of a broadcast has done everything."""

    group: str
    member: str
    topic: str
    offset: Offset
    number: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)] = 0
    """The number of the topic that the offset belongs to; 0: the topic that has the name now."""
