"""What a topic is made of, without its messages: `topic.entries`.

Each entry of a topic has a row in the index: where its offsets begin, how many there are, its event
id, its time, its bytes. So who only wants to know how many messages came when reads no message. An
answer has a page of rows; the next one begins where it ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from onward.broker.group_ranges import Offset, outside
from onward.broker.replies import Operation, reply
from onward.protocol.payloads import decode_fields

if TYPE_CHECKING:
    from onward.broker.broker import Broker
    from onward.broker.session import Session

PAGE_MAX = 2_000
"""A page never has more: one answer must not hold others up."""


class TopicEntriesOf(msgspec.Struct, frozen=True):
    """`topic.entries`: those that hold the offsets from `start` to before `end`, a page of them."""

    topic: str
    start: Offset
    end: Offset
    limit: Annotated[int, msgspec.Meta(ge=1, le=PAGE_MAX)] = PAGE_MAX


class TopicEntries:
    """Answers what entries a topic has."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.operations: dict[str, Operation] = {"topic.entries": self._entries}

    def _entries(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        wanted = decode_fields(payload, TopicEntriesOf)
        topic = self._broker.catalogue.find_readable(wanted.topic)
        if not topic.first_offset <= wanted.start <= topic.next_offset:
            raise outside(topic, wanted.start)
        found = self._broker.log.entries(
            topic.number, wanted.start, end_offset=min(wanted.end, topic.next_offset),
            limit=wanted.limit,
        )  # fmt: skip
        reply(session, request_id, {"entries": found})
