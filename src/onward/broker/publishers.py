"""Who published: which client, on which host, in which program, has a producer id.

A fold of the `published_by` rows of `@trace`. A producer says nothing about itself in its batches,
only an id; whoever brings the first batch of an id is noted, once, and that row is what `explain`
tells later. At most `PUBLISHERS_MAX` are known; those noted longest ago are forgotten first.

`note` runs ahead of the disk, so that one row is written for many publishes. The publisher is
known, and saved in checkpoints, once `apply` is called with the row, because that is durable;
`forget` lets it be noted again when the row could not be written.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from onward.delivery.trace import Trace
from onward.protocol.payloads import Hello

PUBLISHERS_MAX = 16_384
TEXT_CHARS_MAX = 256


class Publisher(NamedTuple):
    """Who has a producer id."""

    client: str
    host: str
    pid: int


class Publishers:
    """All publishers that are known, by producer id."""

    __slots__ = ("_noted", "by_id")

    def __init__(self) -> None:
        self.by_id: dict[int, Publisher] = {}
        """In the order of their rows: the oldest is the first."""
        self._noted: dict[int, Publisher] = {}
        """Those whose row is on its way to the disk."""

    def __len__(self) -> int:
        return len(self.by_id)

    def find(self, producer_id: int) -> Publisher | None:
        """Return who has this id, if that is still known."""
        return self.by_id.get(producer_id)

    def note(self, hello: Hello, producer_id: int, *, now_ms: int) -> Trace | None:
        """Return the row that says who has this id; None when that is known, or nobody's."""
        if not producer_id:
            return None
        publisher = Publisher(hello.client[:TEXT_CHARS_MAX], hello.host[:TEXT_CHARS_MAX], hello.pid)
        if (self._noted.get(producer_id) or self.by_id.get(producer_id)) == publisher:
            return None
        self._noted[producer_id] = publisher
        return Trace(
            did="published_by", at_ms=now_ms, producer_id=producer_id, client=publisher.client,
            host=publisher.host, pid=publisher.pid,
        )  # fmt: skip

    def forget(self, producer_id: int) -> None:
        """Take back `note`: its row was not written, so the next publish gives it again."""
        self._noted.pop(producer_id, None)

    def apply(self, row: Trace) -> None:
        """Fold one row; those of groups mean nothing here."""
        if row.did == "published_by" and row.producer_id:
            publisher = Publisher(row.client, row.host, row.pid)
            if self._noted.get(row.producer_id) == publisher:
                del self._noted[row.producer_id]
            self._keep(row.producer_id, publisher)

    def save(self) -> bytes:
        """Return all of it as bytes, for a checkpoint."""
        return msgspec.msgpack.encode(list(self.by_id.items()))

    @classmethod
    def load(cls, saved: bytes) -> Publishers:
        """Return what `save` saved; empty bytes give none.

        >>> len(Publishers.load(b""))
        0
        """
        publishers = cls()
        if saved:
            rows = msgspec.msgpack.decode(saved, type=list[tuple[int, Publisher]])
            publishers.by_id.update(rows[-PUBLISHERS_MAX:])
        return publishers

    def _keep(self, producer_id: int, publisher: Publisher) -> None:
        self.by_id.pop(producer_id, None)
        self.by_id[producer_id] = publisher
        if len(self.by_id) > PUBLISHERS_MAX:
            del self.by_id[next(iter(self.by_id))]
