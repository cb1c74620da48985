"""What a publisher gets back: where its messages are, and how safe they are."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

DurabilityName = Literal["memory", "interval", "disk", "quorum"]
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


class BatchReceipt(msgspec.Struct, frozen=True):
    """Where the messages of one batch are: `first_offset` and the `count - 1` after it.

    >>> receipt = BatchReceipt("orders", 7, 3, 12, "disk")
    >>> [f"{receipt.topic}/{receipt.first_offset + n}" for n in range(receipt.count)]
    ['orders/7', 'orders/8', 'orders/9']
    """

    topic: str
    first_offset: int
    count: int
    event_id: int
    durability: str
