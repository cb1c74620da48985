"""Operations on messages: publish, read, consume; and the state of one message.

PUBLISH, READ and CONSUME are frames of their own, because they are many or answered by a stream.
Their payloads are declared in `payloads` and `deliveries`; here they get rows in the table.
"""

from __future__ import annotations

import msgspec

from onward.protocol.deliveries import Consume, Joined
from onward.protocol.frames import Kind
from onward.protocol.operations.group_moves import Offset
from onward.protocol.operations.operation import (
    Request,
    frame_operation,
    operation,
    read_group,
    read_topic,
    write_topic,
)
from onward.protocol.payloads import End, Publish, Published, Read

frame_operation(
    "publish",
    Kind.PUBLISH,
    reply=Published,
    needs=write_topic("topic"),
    changes=True,
    is_repeatable=True,
    example={"durability": 2, "topic": "orders", "batch_at": 10},
)(Publish)

frame_operation(
    "read",
    Kind.READ,
    reply=End,
    needs=read_topic("topic"),
    is_repeatable=True,
    example={"topic": "orders", "from": "earliest", "credit_bytes": 65_536},
)(Read)

frame_operation(
    "consume",
    Kind.CONSUME,
    reply=Joined,
    needs=(read_group("group"), read_topic("topics")),
    changes=True,
    is_repeatable=True,
    example={"group": "billing", "topics": ["orders"], "credit": 100},
)(Consume)


class Publisher(msgspec.Struct, frozen=True):
    """The program that published a message.

    >>> str(Publisher("billing", "web-1", 4711))
    'billing on web-1, pid 4711'
    """

    client: str = ""
    host: str = ""
    pid: int = 0

    def __str__(self) -> str:
        place = f" on {self.host}" if self.host else ""
        return f"{self.client or 'a client'}{place}" + (f", pid {self.pid}" if self.pid else "")


class MessageInGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state of a message in one group; fields that do not apply to the state are None."""

    group: str
    state: str
    """`fresh`, `ready`, `behind`, `leased`, `taken`, `reserved`, `waiting`, `dead`, `finished`,
    `missed` or `broadcast`."""
    attempt: int
    member: str | None = None
    """Who holds it, or had it when it died."""
    lease_ms_left: int | None = None
    due_at_ms: int | None = None
    """When its retry is due."""
    cause: str | None = None
    """Why it is dead."""
    died_at_ms: int | None = None
    paused: bool = False
    """It is to be delivered, and the group is paused."""
    behind: int | None = None
    """The offset of the message of its key that must be finished first, in an ordered group."""
    beyond: bool = False
    """It was too much to find out whether it waits behind another message of its key."""
    expiring: bool = False
    """It was not delivered yet, and retention may drop it soon."""
    expires_at_ms: int | None = None
    """From when on it may; 0: when the log or the topic is too large."""
    passed: int | None = None
    """Of a broadcast: so many of the stored `positions` are past it."""
    positions: int | None = None


class MessageDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Who published a message, whether it is stored, and its state in each group of its topic."""

    topic: str
    offset: int
    stored: bool = False
    """False: retention removed it from the topic, or a repair gave it up."""
    carried: bool = False
    """Retention removed it from the topic, and it is kept for groups."""
    producer_id: int = 0
    published_by: Publisher | None = None
    """None when it is not known."""
    groups: list[MessageInGroup] = []


@operation(needs=read_topic("topic"), example={"topic": "orders", "offset": 7})
class DescribeMessage(Request[MessageDescription], frozen=True, tag="message.state"):
    """Return who published a message, whether it is stored, and its state in each group."""

    topic: str
    offset: Offset
