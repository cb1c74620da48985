"""Copies of batches from topic to topic, inside the broker: `topic.copy`.

    asked ──▶ read the stretch ──▶ publish its batches ──▶ answered: all of them are durable
      │               └────────────────────┴─────────────▶ refused, once nothing of it is under way
      └─────▶ overloaded: so many are under way already

A client that wants batches in another topic need not carry them there: it names them, and their new
numbers. Each becomes a PUBLISH of that client, by all the rules of the write path: so a copy that
is repeated is stored once. Columns are moved as they are; a batch only gets its new numbers.

Copies of one producer are published in the order of their requests. After a copy that was refused
for now, later sequences of its producer are refused as well until it is repeated, as with publishes
(`Requester.held_sequences`). A copy whose requester is closed publishes nothing more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from onward.broker.group_ranges import outside
from onward.broker.inside import Inside
from onward.broker.publish import HELD_MAX, RETRY_AFTER_MS
from onward.broker.requester import Requester
from onward.errors import (
    Corruption,
    Forbidden,
    InvalidRequest,
    NotConnected,
    OffsetOutOfRange,
    OnwardError,
    Overloaded,
    ProtocolError,
    TopicEnded,
)
from onward.log.disk import Buffer
from onward.log.log import Log
from onward.log.segment import Segment
from onward.log.span import Span
from onward.message.batch import BatchHeader, batches_of, restamp
from onward.message.entry import Entry, entry_heads
from onward.message.names import check_topic_name
from onward.protocol.frames import HEADER
from onward.protocol.operations.pipeline import CopiedBatches, CopyBatches
from onward.protocol.payloads import publish_head

if TYPE_CHECKING:
    from onward.broker.broker import Broker
    from onward.broker.catalogue import Topic
    from onward.broker.publish import Publishing

COPIES_MAX = 4
"""So many are under way in the whole broker: each holds what it has read in memory."""
BYTES_MAX = 8 << 20
"""A copy has as many batches as fit, and at least one."""
READ_BYTES_MAX = 1 << 20
"""After a stretch of this size the event loop runs other tasks."""
PRODUCER_ID_MAX = 2**64 - 1


class TopicCopies:
    """Copies batches, a few requests at a time."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._producer_ids: list[int] = []
        """The producer id of each copy that is under way."""
        self._turns: dict[int, asyncio.Lock] = {}
        """By producer id: held by the copy that publishes. First come, first served."""

    async def copy(self, request: CopyBatches, requester: Requester) -> CopiedBatches:
        """Copy batches and return how many, once all of them are durable."""
        topic = self._check(request)
        if len(self._producer_ids) >= COPIES_MAX:
            _hold(requester, request)
            raise Overloaded(
                f"{COPIES_MAX} copies are under way already", retry_after_ms=RETRY_AFTER_MS
            )
        copier = Copier(requester)
        with self._turn_of(request.producer_id) as turn:
            try:
                async with turn:
                    copied = await self._publish(copier, request, topic)
                    if copied.batches < request.batches or copier.error is not None:
                        # Before the next copy of this producer, which would overtake it.
                        _hold(requester, request)
                # Without its turn: the next copy of this producer is read meanwhile.
                await copier.answered()
            except Overloaded:
                _hold(requester, request)
                raise
        return copied

    def _check(self, request: CopyBatches) -> Topic:
        """Return the topic to copy from; raise if the request cannot be fulfilled."""
        if request.producer_id > PRODUCER_ID_MAX:
            raise InvalidRequest(f"producer id {request.producer_id} is too large")
        check_topic_name(request.target, system=True)
        topic = self._broker.catalogue.find_readable(request.source)
        if not topic.first_offset <= request.offset < topic.next_offset:
            raise outside(topic, request.offset)
        return topic

    @contextmanager
    def _turn_of(self, producer_id: int) -> Iterator[asyncio.Lock]:
        """Count a copy as under way, and give the lock of its producer."""
        self._producer_ids.append(producer_id)
        try:
            yield self._turns.setdefault(producer_id, asyncio.Lock())
        finally:
            self._producer_ids.remove(producer_id)
            if producer_id not in self._producer_ids:
                del self._turns[producer_id]

    async def _publish(self, copier: Copier, request: CopyBatches, topic: Topic) -> CopiedBatches:
        """Read the stretch, then publish its batches until one is refused."""
        stretch = Stretch(topic, request)
        while not stretch.is_whole:
            copier.check_open()
            await self._read_next(stretch)
            await asyncio.sleep(0)
        head = publish_head(0, request.target, durability=request.durability, batch_bytes=0)
        for number, (batch, header) in enumerate(stretch.batches):
            copier.check_open()
            packed = self._stamped(request, number, batch, header)
            copier.publish(self._broker.publishing, head[HEADER.size :] + packed)
            await asyncio.sleep(0)
            if copier.error is not None:
                break
        return stretch.copied

    async def _read_next(self, stretch: Stretch) -> None:
        """Read on: at once from the page cache, or in a thread from the disk."""
        log = self._broker.log
        if self._broker.catalogue.by_number.get(stretch.topic.number) is not stretch.topic:
            raise TopicEnded(f"topic {stretch.topic.name!r} has ended")
        span = stretch.plan(log)
        try:
            entries = log.read(span, wait=False)
            if entries is None:
                entries = await self._broker.in_thread(partial(log.read, span, wait=True))
        except (OSError, Corruption) as error:
            if span.segment in log.segments:
                stretch.note_damage(span, error)
            else:
                # Retention took the segment away meanwhile: look again where to go on.
                stretch.hint = None
            return
        assert entries is not None, "a read that may wait returns something, or raises"
        stretch.take(entries)

    def _stamped(
        self, request: CopyBatches, number: int, batch: memoryview, header: BatchHeader
    ) -> bytes:
        """Return a batch under its new numbers; it keeps its time when it has one."""
        time_ms = None if header.time_ms else self._broker.clock.now_ms()
        try:
            return restamp(
                batch, producer_id=request.producer_id, sequence=request.sequence + number,
                time_ms=time_ms,
            )  # fmt: skip
        except ProtocolError as error:
            raise _damaged(request.source, error) from None


class Copier(Inside):
    """Publishes in the name of a requester, in its order, and receives the receipts."""

    def __init__(self, requester: Requester) -> None:
        super().__init__()
        self.hello = requester.hello
        self.held_sequences = requester.held_sequences
        self.principal = requester.principal
        self._requester = requester
        self.error: OnwardError | None = None
        """Why the first batch that was refused was."""
        self._settled = asyncio.Event()

    def check_open(self) -> None:
        """Raise when the requester is closed: it asks again if it still wants the copy."""
        if self._requester.is_closed:
            raise NotConnected("the connection that asked for this copy is closed")

    def publish(self, publishing: Publishing, payload: bytes) -> None:
        """Publish the payload of a PUBLISH frame."""
        publishing.publish(self, self.expect(self._settle), payload)

    def note_plain(self) -> None:
        """Decide anew whether publishes of the connection may take the fast path."""
        self._requester.note_plain()

    async def answered(self) -> None:
        """Wait until nothing is under way; raise the first error."""
        while self._waiting:
            self._settled.clear()
            await self._settled.wait()
        if self.error is not None:
            raise self.error

    def _settle(self, offset: int, error: OnwardError | None) -> None:
        self.error = self.error or error
        self._settled.set()


class Stretch:
    """Batches that follow each other in a topic, as far as they were read."""

    def __init__(self, topic: Topic, request: CopyBatches) -> None:
        self.topic = topic
        self.hint: Segment | None = None
        self.batches: list[tuple[memoryview, BatchHeader]] = []
        self._request = request
        self._next_offset = request.offset
        self._bytes = 0
        self._is_full = False
        self._is_careful = False
        """Read entry by entry: something near is damaged, perhaps behind the requested batches."""

    @property
    def is_whole(self) -> bool:
        """True when all requested batches were read, or as many as fit."""
        return self._is_full or len(self.batches) == self._request.batches

    @property
    def copied(self) -> CopiedBatches:
        """Return how far it was read."""
        messages = self._next_offset - self._request.offset
        return CopiedBatches(self._next_offset, len(self.batches), messages, self._bytes)

    def plan(self, log: Log) -> Span:
        """Return what to read next; raise when nothing is stored there."""
        topic, offset = self.topic, self._next_offset
        if not topic.readable:
            raise Forbidden(f"topic {topic.name!r} is {topic.record.rule} now")
        if self.batches and offset >= topic.next_offset:
            raise OffsetOutOfRange(
                f"topic {topic.name!r} has {len(self.batches)} batches from offset "
                f"{self._request.offset} on, not {self._request.batches}"
            )
        span = log.plan(
            topic.number, offset, hint=self.hint,
            bytes_max=0 if self._is_careful else READ_BYTES_MAX,
        )  # fmt: skip
        if offset < topic.first_offset or span is None or span.first_offset > offset:
            raise OffsetOutOfRange(f"message {offset} of topic {topic.name!r} is no longer stored")
        self.hint = span.segment
        # An entry has a batch at least: more entries than batches are never needed.
        rows = span.rows[: self._request.batches - len(self.batches)]
        length = rows[-1].position + rows[-1].length - span.position
        return Span(span.segment, span.position, length, rows)

    def take(self, entries: Buffer) -> None:
        """Add the requested batches of the entries that come next."""
        before = self._next_offset
        try:
            for entry in entry_heads(entries):
                if self.is_whole or entry.base_offset > self._next_offset:
                    break
                self._take_from(entries, entry)
        except ProtocolError as error:
            raise _damaged(self.topic.name, error) from None
        if self._next_offset == before and not self.is_whole:
            raise _damaged(self.topic.name, "it has fewer messages than its entry says")

    def _take_from(self, entries: Buffer, entry: Entry) -> None:
        offset, start = entry.base_offset, entry.body_position
        for at, header in batches_of(entries, start, start + entry.body_bytes):
            end = offset + header.count
            if offset < self._next_offset < end:
                raise InvalidRequest(
                    f"offset {self._next_offset} of topic {self.topic.name!r} is not the first of "
                    f"a batch, which has {offset} to {end - 1}"
                )
            if offset == self._next_offset:
                self._add(memoryview(entries)[at : at + header.length], header)
            if self.is_whole:
                return
            offset = end

    def _add(self, batch: memoryview, header: BatchHeader) -> None:
        if self.batches and self._bytes + header.length > BYTES_MAX:
            self._is_full = True
            return
        self.batches.append((batch, header))
        self._bytes += header.length
        self._next_offset += header.count

    def note_damage(self, span: Span, error: OSError | Corruption) -> None:
        """Continue entry by entry, or raise when the next entry is the damaged one."""
        if len(span.rows) > 1:
            self._is_careful = True
        elif isinstance(error, Corruption):
            raise error
        else:
            raise Corruption(f"topic {self.topic.name!r} cannot be read: {error}") from None


def _hold(requester: Requester, request: CopyBatches) -> None:
    """Refuse later sequences of the producer until a part of this copy is repeated."""
    held = requester.held_sequences
    if len(held) >= HELD_MAX:
        held.clear()
    last = request.sequence + request.batches - 1
    held[request.producer_id] = max(last, held.get(request.producer_id, 0))
    requester.note_plain()


def _damaged(topic: str, error: object) -> Corruption:
    return Corruption(f"a batch of topic {topic!r} is damaged: {error}")
