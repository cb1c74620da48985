"""What a publisher gets back: where its messages are, and how safe they are."""

from __future__ import annotations

from typing import NamedTuple

DURABILITIES = ("memory", "interval", "disk", "quorum")


class Receipt(NamedTuple):
    """Where one message is.

    >>> Receipt("orders", 7, 12, "disk").id
    'orders/7'
    """

    topic: str
    offset: int
    event_id: int
    durability: str

    @property
    def id(self) -> str:
        """Return the message's id for people."""
        return f"{self.topic}/{self.offset}"


class BatchReceipt(NamedTuple):
    """Where the messages of one batch are: `first_offset` and the ones after it."""

    topic: str
    first_offset: int
    size: int
    event_id: int
    durability: str

    @property
    def count(self) -> int:  # type: ignore[override]
        """Return how many messages the batch has."""
        return self.size
