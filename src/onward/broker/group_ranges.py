"""The ranges that an operator names, and what of them a group has finished, or not.

Nothing here acts, and nothing loops over messages, except over the few that failed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import msgspec

from onward.delivery.ranges import (
    Range,
    Ranges,
    count_of,
    merged,
    offsets_of,
    ranges_of,
    without,
)
from onward.delivery.share import Share
from onward.delivery.trace import Trace
from onward.errors import InvalidRequest, OffsetOutOfRange

if TYPE_CHECKING:
    from onward.broker.catalogue import Topic

ROW_RANGES_MAX = 1_000
"""A row of the trace has at most so many ranges; a move that has more is several rows."""

Offset = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


def clipped(
    topic: Topic, ranges: Iterable[Range], *, first_offset: int | None = None
) -> list[Range]:
    """Return the part of the ranges that the topic holds, merged.

    With `first_offset` also from before it begins: what was carried over for groups.
    """
    first = topic.first_offset if first_offset is None else first_offset
    found = []
    for start, end in ranges:
        if start >= end:
            raise InvalidRequest(f"the range from {start} to {end} is empty")
        if end <= first or start >= topic.next_offset:
            raise outside(topic, start)
        found.append((max(start, first), min(end, topic.next_offset)))
    return merged(found)


def unfinished(share: Share, ranges: Iterable[Range]) -> list[Range]:
    """Return the part of the ranges that the group has not finished."""
    return [part for start, end in ranges for part in share.unfinished(start, end)]


def finished(share: Share, ranges: Iterable[Range]) -> list[Range]:
    """Return the part of the ranges that the group has finished, without its dead letters."""
    parts = [part for start, end in ranges for part in share.open.gaps(start, min(end, share.mark))]
    # By whichever is shorter: the ranges, or what is dead.
    if count_of(parts) < share.dead_count:
        dead = [offset for offset in offsets_of(parts) if offset in share.dead]
    else:
        dead = list(share.dead)
    return without(parts, Ranges(ranges_of(dead)))


def rows_of(
    did: str, group: str, topic: str, ranges: list[Range], *, at_ms: int, cause: str = "",
    member: str = "",
) -> list[Trace]:  # fmt: skip
    """Return the rows that say what was done with ranges, none too long."""
    return [
        Trace(
            did=did, at_ms=at_ms, group=group, topic=topic, cause=cause, member=member,
            ranges=tuple(ranges[first : first + ROW_RANGES_MAX]),
        )
        for first in range(0, len(ranges), ROW_RANGES_MAX)
    ]  # fmt: skip


def outside(topic: Topic, offset: int) -> OffsetOutOfRange:
    """Return the error for an offset that a topic does not hold."""
    first, end = topic.first_offset, topic.next_offset
    kept = f"holds {first} to {end - 1}" if first < end else "is empty"
    return OffsetOutOfRange(f"offset {offset} is outside of topic {topic.name!r}, which {kept}")
