"""Copying batches from one topic to another, inside the broker: `topic.copy`.

    asked ──▶ read the stretch ──▶ publish its batches ──▶ answered: all of them are durable
      │               └────────────────────┴─────────────▶ refused, once nothing of it is under way
      └─────▶ overloaded: so many are under way already

Who wants batches in another topic need not carry them there: it says which, and under which
numbers. Each becomes a PUBLISH of who asked, by all the rules of the write path: so a copy that is
asked for again is stored once. Columns are moved as they are; a batch only gets its new numbers.

Copies of one producer are published in the order in which they were asked for. What one of them
leaves undone for now must come again before others of that producer, as with publishes
(`Session.held_sequences`). A copy whose session closes goes no further.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Annotated, NamedTuple, cast

import msgspec

from onward.broker.group_ranges import Offset, outside
from onward.broker.inside import Inside
from onward.broker.producers import SEQUENCE_MAX
from onward.broker.publish import HELD_MAX, RETRY_AFTER_MS
from onward.broker.replies import Operation, reply
from onward.errors import (
    Corruption,
    Forbidden,
    InvalidRequest,
    OffsetOutOfRange,
    OnwardError,
    Overloaded,
    ProtocolError,
    TopicEnded,
    Unavailable,
)
from onward.log.disk import Buffer
from onward.log.log import Log, Span
from onward.log.segment import Segment
from onward.message.batch import BatchHeader, batches_of, restamp
from onward.message.entry import Entry, entry_heads
from onward.message.names import check_topic_name
from onward.protocol.frames import HEADER
from onward.protocol.payloads import Durability, decode_fields, publish_head

if TYPE_CHECKING:
    from onward.broker.broker import Broker
    from onward.broker.catalogue import Topic
    from onward.broker.publish import Publishing
    from onward.broker.session import Session

logger = logging.getLogger("onward.copy")

COPIES_MAX = 4
"""So many are under way in the whole broker: each holds what it has read in memory."""
BATCHES_MAX = 16
BYTES_MAX = 8 << 20
"""A copy takes as many batches as fit, and at least one."""
READ_BYTES_MAX = 1 << 20
"""After a stretch of this size others have their turn of the loop."""
PRODUCER_ID_MAX = 2**64 - 1


class TopicCopy(msgspec.Struct, frozen=True):
    """`topic.copy`: batches that follow each other, to another topic under sequences that do."""

    source: str
    offset: Offset
    batches: Annotated[int, msgspec.Meta(ge=1, le=BATCHES_MAX)]
    target: str
    producer_id: Annotated[int, msgspec.Meta(ge=1)]
    sequence: Annotated[int, msgspec.Meta(ge=0, le=SEQUENCE_MAX)]
    durability: Annotated[int, msgspec.Meta(ge=0, le=255)] = Durability.DEFAULT


class Copied(NamedTuple):
    """What is answered: how far it came."""

    next: int
    batches: int
    messages: int
    bytes: int


class TopicCopies:
    """All copies that are under way."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._under_way: dict[asyncio.Task[None], tuple[Session, int]] = {}
        """Of each copy who asked, and its producer id."""
        self._turns: dict[int, asyncio.Lock] = {}
        """Of each producer that copies: whose turn it is to publish. First come, first served."""
        self.operations: dict[str, Operation] = {"topic.copy": self._ask}

    def _ask(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        wanted = decode_fields(payload, TopicCopy)
        if wanted.producer_id > PRODUCER_ID_MAX:
            raise InvalidRequest(f"producer id {wanted.producer_id} is too large")
        check_topic_name(wanted.target, system=True)
        topic = self._broker.catalogue.find_readable(wanted.source)
        if not topic.first_offset <= wanted.offset < topic.next_offset:
            raise outside(topic, wanted.offset)
        if len(self._under_way) >= COPIES_MAX:
            _hold(session, wanted)
            raise Overloaded(
                f"{COPIES_MAX} copies are under way already", retry_after_ms=RETRY_AFTER_MS
            )
        self._turns.setdefault(wanted.producer_id, asyncio.Lock())
        copy = self._copy(session, request_id, wanted, topic)
        task = asyncio.get_running_loop().create_task(copy)
        self._under_way[task] = session, wanted.producer_id
        task.add_done_callback(partial(self._ended, session, request_id))

    def forget(self, session: Session) -> None:
        """Go no further with what a closed session asked for; what is published stays."""
        for task, (asker, _) in self._under_way.items():
            if asker is session:
                task.cancel()

    async def drain(self) -> None:
        """Return when everything that is under way now is answered."""
        if self._under_way:
            await asyncio.wait(list(self._under_way))

    async def stop(self) -> None:
        """Go no further with anything."""
        for task in self._under_way:
            task.cancel()
        await self.drain()

    # --- one copy ----------------------------------------------------------------------------

    async def _copy(
        self, session: Session, request_id: int, wanted: TopicCopy, topic: Topic
    ) -> None:
        copier = Copier(session)
        try:
            async with self._turns[wanted.producer_id]:
                copied = await self._hand_over(copier, wanted, topic)
                if copied.batches < wanted.batches or copier.error is not None:
                    # Before others of its producer have their turn: they would overtake it.
                    _hold(session, wanted)
            # Not in its turn: the next of this producer is read while this is on its way.
            await copier.answered()
        except Overloaded:
            _hold(session, wanted)
            raise
        reply(session, request_id, copied._asdict())

    async def _hand_over(self, copier: Copier, wanted: TopicCopy, topic: Topic) -> Copied:
        """Read the stretch, then publish its batches until one is refused."""
        stretch = Stretch(topic, wanted)
        while not stretch.is_whole:
            await self._read_next(stretch)
            await asyncio.sleep(0)
        head = publish_head(0, wanted.target, durability=wanted.durability, batch_bytes=0)
        for number, (batch, header) in enumerate(stretch.batches):
            packed = self._stamped(wanted, number, batch, header)
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
        self, wanted: TopicCopy, number: int, batch: memoryview, header: BatchHeader
    ) -> bytes:
        """Return a batch under its new numbers; it keeps its time when it has one."""
        time_ms = None if header.time_ms else self._broker.clock.now_ms()
        try:
            return restamp(
                batch, producer_id=wanted.producer_id, sequence=wanted.sequence + number,
                time_ms=time_ms,
            )  # fmt: skip
        except ProtocolError as error:
            raise _damaged(wanted.source, error) from None

    def _ended(self, session: Session, request_id: int, task: asyncio.Task[None]) -> None:
        _, producer_id = self._under_way.pop(task)
        if all(other != producer_id for _, other in self._under_way.values()):
            del self._turns[producer_id]
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, OnwardError):
            logger.error("copying batches failed", exc_info=error)
            error = Unavailable(f"copying batches failed: {error}")
        session.refuse(request_id, error)


class Copier(Inside):
    """Stands in the write path for the session that asked: publishes in its name, in its order."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.hello = session.hello
        self.held_sequences = session.held_sequences
        self.note_plain = session.note_plain
        self.error: OnwardError | None = None
        """Why the first that was refused was."""
        self._settled = asyncio.Event()

    def publish(self, publishing: Publishing, payload: bytes) -> None:
        """Publish what stands in a PUBLISH."""
        # It has all that the write path uses of a session; nothing else of one is ever asked for.
        publishing.publish(cast("Session", self), self.expect(self._settle), payload)

    async def answered(self) -> None:
        """Return when everything is stored; raise what was refused when nothing is under way."""
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

    def __init__(self, topic: Topic, wanted: TopicCopy) -> None:
        self.topic = topic
        self.hint: Segment | None = None
        self.batches: list[tuple[memoryview, BatchHeader]] = []
        self._wanted = wanted
        self._next_offset = wanted.offset
        self._bytes = 0
        self._is_full = False
        self._is_careful = False
        """Something damaged is near: entry by entry, for it may not be wanted."""

    @property
    def is_whole(self) -> bool:
        """Tell whether all that is wanted is there, or all that fits."""
        return self._is_full or len(self.batches) == self._wanted.batches

    @property
    def copied(self) -> Copied:
        """Return what there is to say of it."""
        messages = self._next_offset - self._wanted.offset
        return Copied(self._next_offset, len(self.batches), messages, self._bytes)

    def plan(self, log: Log) -> Span:
        """Return what to read next; raise when nothing is stored there."""
        topic, offset = self.topic, self._next_offset
        if not topic.readable:
            raise Forbidden(f"topic {topic.name!r} is {topic.record.rule} now")
        if self.batches and offset >= topic.next_offset:
            raise OffsetOutOfRange(
                f"topic {topic.name!r} has {len(self.batches)} batches from offset "
                f"{self._wanted.offset} on, not {self._wanted.batches}"
            )
        span = log.plan(
            topic.number, offset, hint=self.hint,
            bytes_max=0 if self._is_careful else READ_BYTES_MAX,
        )  # fmt: skip
        if offset < topic.first_offset or span is None or span.first_offset > offset:
            raise OffsetOutOfRange(f"message {offset} of topic {topic.name!r} is no longer stored")
        self.hint = span.segment
        # An entry has a batch at least: of more entries than batches nothing would be wanted.
        rows = span.rows[: self._wanted.batches - len(self.batches)]
        length = rows[-1].position + rows[-1].length - span.position
        return Span(span.segment, span.position, length, rows)

    def take(self, entries: Buffer) -> None:
        """Take what is wanted of the entries that come next."""
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
        """Go on entry by entry, or raise when it is the one that is wanted."""
        if len(span.rows) > 1:
            self._is_careful = True
        elif isinstance(error, Corruption):
            raise error
        else:
            raise Corruption(f"topic {self.topic.name!r} cannot be read: {error}") from None


def _hold(session: Session, wanted: TopicCopy) -> None:
    """Let nothing else of its producer be published before something of this came again."""
    held = session.held_sequences
    if len(held) >= HELD_MAX:
        held.clear()
    last = wanted.sequence + wanted.batches - 1
    held[wanted.producer_id] = max(last, held.get(wanted.producer_id, 0))
    session.note_plain()


def _damaged(topic: str, error: object) -> Corruption:
    return Corruption(f"a batch of topic {topic!r} is damaged: {error}")
