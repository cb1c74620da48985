"""What the next commit will carry: collected while one is under way, then split into entries.

A commit writes in this order: topics that are created, messages, rows of the trace, and changes and
endings of topics, which come after the messages that were accepted before them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

import msgspec

from onward.broker.catalogue import Topic, TopicEnding, TopicRecord, TopicsRetained
from onward.broker.state import LineageRecord
from onward.delivery.record import GroupRecord
from onward.errors import OnwardError
from onward.message.entry import Kind
from onward.schedule.recurring import Recurring

if TYPE_CHECKING:
    from onward.broker.publish import Publish

# Readers take entries as a whole: larger ones would make them wait, smaller ones cost more each.
ENTRY_BYTES_MAX: Final = 512 << 10

Staged = tuple[Topic, list["Publish"]]
"""Publishes that become one entry."""


class Change:
    """A change of topics, a group or a recurring schedule on its way to the disk.

    The body of messages that are carried over is bytes, and has a topic, a base offset and a count.
    """

    __slots__ = ("base_offset", "body", "count", "done", "kind", "topic")

    def __init__(
        self,
        kind: Kind,
        body: TopicRecord
        | TopicEnding
        | TopicsRetained
        | GroupRecord
        | Recurring
        | LineageRecord
        | bytes,
        *,
        done: Callable[[OnwardError | None], None],
        topic: int = 0,
        base_offset: int = 0,
        count: int = 0,
    ) -> None:
        self.kind = kind
        self.body = body if isinstance(body, bytes) else msgspec.json.encode(body)
        self.done = done
        self.topic = topic
        self.base_offset = base_offset
        self.count = count


Rows = tuple[Callable[[], list[bytes]], Callable[[OnwardError | None], None], bool]
"""Rows of the trace: what gives them when the commit begins, who is told how it ended, and whether
they belong to messages: then they are written with them, or not at all."""


class Collected:
    """What the next commit will carry."""

    __slots__ = (
        "bytes", "count", "created", "later", "publishes", "rows", "rows_entries", "staged", "sync",
        "time_ms", "trace_created",
    )  # fmt: skip

    def __init__(self) -> None:
        self.created: list[Change] = []
        self.publishes: dict[Topic, list[Publish]] = {}
        self.staged: list[Staged] = []
        """The same, as they were split into entries, in the order of these."""
        self.trace_created: Change | None = None
        self.rows: list[Rows] = []
        """Rows of the trace: after the messages that came before them."""
        self.rows_entries = 0
        self.later: list[Change] = []
        """Changes and endings of topics: after the messages that came before them."""
        self.bytes = 0
        self.count = 0
        self.sync = False
        self.time_ms = 0
        """The time of its entries, once it has begun."""

    def __bool__(self) -> bool:
        return bool(self.publishes or self.created or self.rows or self.later)

    def split(self) -> list[Staged]:
        """Split what each topic got into what becomes one entry each, and remember it."""
        staged = self.staged
        if self.bytes <= ENTRY_BYTES_MAX:
            staged += self.publishes.items()
            return staged
        for topic, publishes in self.publishes.items():
            if len(publishes) == 1 or sum([len(one[2]) for one in publishes]) <= ENTRY_BYTES_MAX:
                staged.append((topic, publishes))
                continue
            size = ENTRY_BYTES_MAX
            for publish in publishes:
                if size + len(publish[2]) > ENTRY_BYTES_MAX:
                    staged.append((topic, []))
                    size = 0
                staged[-1][1].append(publish)
                size += len(publish[2])
        return staged


def in_batches(bodies: list[bytes]) -> Iterator[list[bytes]]:
    """Split rows so that each part becomes an entry of the usual size."""
    some: list[bytes] = []
    size = 0
    for body in bodies:
        if some and size + len(body) > ENTRY_BYTES_MAX:
            yield some
            some, size = [], 0
        some.append(body)
        size += len(body)
    if some:
        yield some
