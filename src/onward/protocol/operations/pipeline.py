"""Operations of pipelines: wait for topics, list entries, copy batches between topics."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec

from onward.protocol.operations.operation import Request, operation, read_topic, write_topic
from onward.protocol.payloads import Durability

WAIT_MS_MAX = 60_000
WAIT_TOPICS_MAX = 1_000
ENTRIES_PAGE_MAX = 2_000
"""A page never has more entries: one reply must not delay others."""
COPY_BATCHES_MAX = 16

Offset = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
KnownEnd = Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)]


class TopicEnd(NamedTuple):
    """Where a topic begins and ends: the first offset it holds, and the one it gives next.

    >>> TopicEnd(3, 10).next_offset
    10
    """

    first_offset: int
    next_offset: int


class TopicEnds(msgspec.Struct, frozen=True):
    """Where topics begin and end, by their names."""

    topics: dict[str, TopicEnd]


class TopicEntry(NamedTuple):
    """Messages that are stored together: their offsets, their event id, time and size.

    >>> TopicEntry(100, 50, event_id=7, published_at_ms=0, bytes=12_000).end_offset
    150
    """

    base_offset: int
    messages: int
    event_id: int
    published_at_ms: int
    bytes: int

    @property
    def end_offset(self) -> int:
        """The offset after the last message."""
        return self.base_offset + self.messages


class EntryPage(msgspec.Struct, frozen=True):
    """A page of the entries of a topic."""

    entries: list[TopicEntry]


class CopiedBatches(msgspec.Struct, frozen=True):
    """What was copied from one topic to another, and the offset after it in the first.

    >>> CopiedBatches(next_offset=500, batches=2, messages=200, bytes=9_000).messages
    200
    """

    next_offset: int = msgspec.field(name="next")
    batches: int
    messages: int
    bytes: int


@operation(
    needs=read_topic("ends"),
    # Half of all that may run: those that wait must leave room for those that work.
    running_max=10_000,
    example={"ends": {"orders": 100}, "wait_ms": 30_000},
)
class WaitForTopics(Request[TopicEnds], frozen=True, tag="topic.wait"):
    """Return where topics begin and end, as soon as one of them has more than is known."""

    ends: Annotated[dict[str, KnownEnd], msgspec.Meta(max_length=WAIT_TOPICS_MAX)]
    """The next offset of each topic as far as it is known; -1: unknown, so do not wait."""
    wait_ms: Annotated[int, msgspec.Meta(ge=0, le=WAIT_MS_MAX)] = 0
    """Reply after this time even if no topic has more."""


@operation(needs=read_topic("topic"), example={"topic": "orders", "start": 0, "end": 1_000})
class ListEntries(Request[EntryPage], frozen=True, tag="topic.entries"):
    """Return the entries that hold the offsets from `start` to before `end`, without messages."""

    topic: str
    start: Offset
    end: Offset
    limit: Annotated[int, msgspec.Meta(ge=1, le=ENTRIES_PAGE_MAX)] = ENTRIES_PAGE_MAX


@operation(
    needs=(read_topic("source"), write_topic("target")),
    changes=True,
    # The write path refuses it when the disk is full, and then keeps the order of its producer.
    while_full=True,
    is_repeatable=True,
    example={
        "source": "drafts",
        "offset": 100,
        "batches": 2,
        "target": "orders",
        "producer_id": 7,
        "sequence": 1,
    },
)
class CopyBatches(Request[CopiedBatches], frozen=True, tag="topic.copy"):
    """Publish consecutive batches of one topic to another, each unchanged and stored once."""

    source: str
    offset: Offset
    """The first offset of the first batch."""
    batches: Annotated[int, msgspec.Meta(ge=1, le=COPY_BATCHES_MAX)]
    target: str
    producer_id: Annotated[int, msgspec.Meta(ge=1)]
    sequence: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    """The sequence of the first batch in the target; each other has the next one."""
    durability: Annotated[int, msgspec.Meta(ge=0, le=255)] = Durability.DEFAULT
