"""Operations on topics: create, change, delete, describe, list."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from onward.protocol.operations.operation import Request, manage_topic, operation, read_topic

Rule = Literal["read-write", "write-only", "read-only", "closed"]
Size = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Time = Annotated[int, msgspec.Meta(ge=0, le=2**53)]

LIST_LIMIT_MAX = 10_000
LIST_PAGE_MAX = 1_000
"""A page never has more topics, whatever limit is asked for: one reply must not delay others."""


class TopicDescription(msgspec.Struct, frozen=True, kw_only=True):
    """One topic, as its broker describes it.

    >>> topic = TopicDescription(topic="orders", number=1, state="active", next_offset=7)
    >>> topic.next_offset - topic.first_offset
    7
    """

    topic: str
    number: int
    state: str
    """`active`, `ending`, or how it ended: `deleted`, `expired`."""
    rule: str = ""
    first_offset: int = 0
    next_offset: int = 0
    messages: int = 0
    created_at_ms: int = 0
    expires_at_ms: int = 0
    ended_at_ms: int = 0
    message_bytes_max: int = 0
    retention_ms: int = 0
    retention_bytes: int = 0
    retention_group: str = ""
    """What this group has not finished is kept."""
    keep_unfinished: bool = False
    """What any group has not finished is kept."""
    expires_idle_ms: int = 0
    """After so long without use the topic ends; 0: never."""
    carried: int = 0
    """Messages before `first_offset` that outlive retention: retries and dead letters."""
    readers: int = 0


class TopicPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of topics."""

    topics: list[TopicDescription] = []
    next: str = ""
    """Ask for the next page with this as `after`; empty: this is the last page."""
    count: int = 0
    """How many topics there are in all."""
    ended: list[TopicDescription] = []
    """With `all`, on the first page: topics that have ended, the latest last."""


class TopicDeleted(msgspec.Struct, frozen=True):
    """The name of a topic that was deleted."""

    topic: str


@operation(
    needs=manage_topic("topic"),
    changes=True,
    while_full=False,
    example={"topic": "orders", "lifetime_ms": 3_600_000, "exist_ok": True},
)
class CreateTopic(Request[TopicDescription], frozen=True, tag="topic.create"):
    """Create a topic with the given settings; publishing creates one with the defaults."""

    topic: str
    exist_ok: bool = False
    """A topic that exists is no error: it is described as it is."""
    expires_at_ms: Time | None = None
    """When the topic ends, in milliseconds since 1970; 0: never."""
    lifetime_ms: Time | None = None
    """How long the topic lives from now on, at least 10,000; not together with `expires_at_ms`."""
    rule: Rule = "read-write"
    message_bytes_max: Size = 0
    """The size of the largest body; 0: as the broker's settings say."""
    retention_ms: Time = 0
    """How long messages are kept; 0: as the broker's settings say."""
    retention_bytes: Time = 0
    """How many bytes of messages are kept; 0: any number."""
    retention_group: str = ""
    """What this group has not finished is kept, however old and large."""
    keep_unfinished: bool = False
    """What any group has not finished is kept, however old and large."""
    expires_idle_ms: Time = 0
    """The topic ends when nobody has used it for so long; 0: never."""


@operation(
    needs=manage_topic("topic"), changes=True, example={"topic": "orders", "rule": "read-only"}
)
class ChangeTopic(Request[TopicDescription], frozen=True, tag="topic.change"):
    """Change the given settings of a topic; leave the others as they are."""

    topic: str
    expires_at_ms: Time | None = None
    lifetime_ms: Time | None = None
    rule: Rule | None = None
    message_bytes_max: Size | None = None
    retention_ms: Time | None = None
    retention_bytes: Time | None = None
    retention_group: str | None = None
    keep_unfinished: bool | None = None
    expires_idle_ms: Time | None = None


@operation(needs=manage_topic("topic"), changes=True, example={"topic": "orders"})
class DeleteTopic(Request[TopicDeleted], frozen=True, tag="topic.delete"):
    """End a topic: its readers and members are told, its name is free, its space comes back."""

    topic: str


@operation(needs=read_topic("topic"), example={"topic": "orders"})
class DescribeTopic(Request[TopicDescription], frozen=True, tag="topic.describe"):
    """Return the settings and the offsets of a topic."""

    topic: str


@operation(needs=read_topic(), example={"prefix": "orders.", "limit": 100})
class ListTopics(Request[TopicPage], frozen=True, tag="topic.list"):
    """Return a page of topics in the order of their names; system topics by their prefix only."""

    after: str = ""
    """Only names after this one."""
    prefix: str = ""
    limit: Annotated[int, msgspec.Meta(ge=1, le=LIST_LIMIT_MAX)] = LIST_PAGE_MAX
    all: bool = False
    """Return the topics that have ended, too."""
