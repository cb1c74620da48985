"""THE WRITE PATH: from a PUBLISH frame to its receipt.

    accept    is it well-formed, may it be written, is it new?      per frame, no loop over messages
    collect   all that arrives while a commit is under way          one list per topic
    commit    one entry per topic, one write, one sync              in the storage thread
    answer    offsets become visible, receipts go out, readers wake

A batch is never decoded here: its header and checksum are looked at, then it is moved as it is.
A repeat (same producer, same sequence) is answered with where the first one went; if that one is
still under way, both wait for the same commit. Nothing is answered before its durability is
reached. When the disk is full, nothing was done, and the answer says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from onward.broker.catalogue import Catalogue, Topic, TopicEnding, TopicRecord
from onward.broker.commit import Commit, Done
from onward.broker.producers import Producers
from onward.clock import Clock
from onward.errors import (
    DiskFull,
    Forbidden,
    InvalidRequest,
    MessageTooLarge,
    OnwardError,
    Overloaded,
    ProtocolError,
    Stopping,
    TopicEnded,
    UnknownTopic,
)
from onward.message.entry import Draft, Kind
from onward.log.log import Log, Write
from onward.message.batch import check_batch, largest_body_bytes
from onward.message.names import check_topic_name
from onward.protocol.payloads import Durability, decode_publish
from onward.settings import Settings

if TYPE_CHECKING:
    from onward.broker.session import Session

# Readers take entries as a whole: larger ones would make them wait, smaller ones cost more each.
ENTRY_BYTES_MAX: Final = 512 << 10
RETRY_AFTER_MS: Final = 100
_SEQUENCE_MAX: Final = 1 << 62


class Publish:
    """A batch on its way to the disk."""

    __slots__ = ("batch", "count", "producer_id", "request_id", "sequence", "session", "waiters")

    def __init__(
        self, session: Session, request_id: int, batch: memoryview, count: int,
        producer_id: int, sequence: int,
    ) -> None:  # fmt: skip
        self.session = session
        self.request_id = request_id
        self.batch = batch
        self.count = count
        self.producer_id = producer_id
        self.sequence = sequence
        self.waiters: list[tuple[Session, int]] | None = None
        """Others who sent the same batch again while it was under way."""


class Change:
    """A change of a topic on its way to the disk."""

    __slots__ = ("body", "done", "kind", "undo")

    def __init__(
        self, kind: Kind, body: TopicRecord | TopicEnding, *, done: Callable[[OnwardError | None], None]
    ) -> None:
        self.kind = kind
        self.body = msgspec.json.encode(body)
        self.done = done


class Collected:
    """What the next commit will carry."""

    __slots__ = ("bytes", "created", "later", "publishes", "sync")

    def __init__(self) -> None:
        self.created: list[Change] = []
        self.publishes: dict[Topic, list[Publish]] = {}
        self.later: list[Change] = []
        """Changes and endings of topics: after the messages that came before them."""
        self.bytes = 0
        self.sync = False

    def __bool__(self) -> bool:
        return bool(self.publishes or self.created or self.later)


class Publishing:
    """Takes publishes and changes of topics, and makes them durable."""

    def __init__(
        self, *, log: Log, catalogue: Catalogue, producers: Producers, commit: Commit,
        settings: Settings, clock: Clock, wake: Callable[[Topic], None],
        fail: Callable[[Exception], None],
    ) -> None:  # fmt: skip
        self._log = log
        self._catalogue = catalogue
        self._producers = producers
        self._commit_seam = commit
        self._settings = settings
        self._clock = clock
        self._wake = wake
        self._fail = fail
        self._loop = asyncio.get_running_loop()
        self._inflight_bytes_max = settings.server.inflight_bytes_max
        self._default = Durability[settings.log.durability.upper()]
        self._collected = Collected()
        self._under_way: Collected | None = None
        self._is_due = False
        self._unanswered: dict[tuple[int, int], Publish] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self.inflight_bytes = 0
        self.disk_is_full = False
        self.is_stopping = False
        self.published_count = 0
        self.commit_count = 0

    # --- accept ------------------------------------------------------------------------------

    def publish(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        """Take one PUBLISH frame; its answer goes to the session when it is durable."""
        try:
            self._accept(session, request_id, payload)
        except OnwardError as error:
            session.refuse(request_id, error)

    def _accept(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        durability, name, start = decode_publish(payload)
        durability = self._durability(durability)
        header = check_batch(payload, start)
        if header.length != len(payload) - start:
            raise ProtocolError("a PUBLISH frame holds exactly one batch")
        topic = self._catalogue.by_name.get(name)
        if topic is None or not topic.writable or topic.ending:
            topic = self._create_on_use(name, topic)
        limit = topic.message_bytes_max or self._settings.topics.message_bytes_max
        if header.length > limit:
            self._check_size(topic, payload, start, limit)
        if self.is_stopping or self.disk_is_full:
            raise self._unavailable()
        if header.producer_id and self._is_repeat(session, request_id, header[6], header[7]):
            return
        if self.inflight_bytes > self._inflight_bytes_max or session.held_sequence:
            self._check_load(session, header.sequence)
        publish = Publish(
            session, request_id, memoryview(payload)[start:], header.count, header[6], header[7]
        )
        if header.producer_id:
            self._unanswered[header[6], header[7]] = publish
        self._collect(topic, publish, header.length, durability)

    def _durability(self, asked: int) -> int:
        if asked <= Durability.DISK:
            return asked
        if asked == Durability.DEFAULT:
            return self._default
        if asked == Durability.QUORUM:
            raise InvalidRequest("durability 'quorum' needs a cluster; this node stands alone")
        raise InvalidRequest(f"durability {asked} does not exist")

    def _create_on_use(self, name: str, topic: Topic | None) -> Topic:
        """Return the new topic for a name that nobody used, or say why it cannot be written."""
        if topic is not None and topic.ending:
            raise TopicEnded(f"topic {topic.name!r} is ending")
        if topic is not None:
            raise Forbidden(f"topic {topic.name!r} is {topic.record.rule}: it cannot be written")
        check_topic_name(name)
        if not self._settings.topics.auto_create:
            raise UnknownTopic(f"topic {name!r} does not exist, and topics.auto_create is off")
        if self.is_stopping or self.disk_is_full:
            raise self._unavailable()
        return self.create_topic(self.new_record(name), done=lambda error: None)

    def _check_size(
        self, topic: Topic, payload: bytes | bytearray, start: int, limit: int
    ) -> None:
        header = check_batch(payload, start)
        batch_limit = self._settings.topics.batch_bytes_max
        if header.length > batch_limit or header.raw_bytes > batch_limit:
            raise MessageTooLarge(f"a batch has at most {batch_limit} bytes")
        largest = largest_body_bytes(payload, start, header)
        if largest > limit:
            raise MessageTooLarge(
                f"a message of {largest} bytes is too large: topic {topic.name!r} takes {limit}"
            )

    def _is_repeat(
        self, session: Session, request_id: int, producer_id: int, sequence: int
    ) -> bool:
        """Answer, or let wait, a batch that came before."""
        if sequence > _SEQUENCE_MAX:
            raise InvalidRequest(f"sequence {sequence} is too large")
        stored = self._producers.find(producer_id, sequence)
        if stored is not None:
            session.published(
                request_id, stored.offset, stored.event_id, Durability.DISK, repeat=True
            )
            session.flush()
            return True
        under_way = self._unanswered.get((producer_id, sequence))
        if under_way is None:
            return False
        if under_way.waiters is None:
            under_way.waiters = []
        under_way.waiters.append((session, request_id))
        return True

    def _check_load(self, session: Session, sequence: int) -> None:
        """Refuse what is too much now, and what comes after it, so that the order is kept."""
        if session.held_sequence and sequence <= session.held_sequence:
            session.held_sequence = 0
        if session.held_sequence or self.inflight_bytes > self._inflight_bytes_max:
            session.held_sequence = session.held_sequence or sequence
            raise Overloaded("too many bytes are under way", retry_after_ms=RETRY_AFTER_MS)

    def _unavailable(self) -> OnwardError:
        if self.is_stopping:
            return Stopping("the broker is stopping")
        return DiskFull("the disk is nearly full: nothing is stored until there is space again")

    # --- collect -----------------------------------------------------------------------------

    def _collect(self, topic: Topic, publish: Publish, size: int, durability: int) -> None:
        collected = self._collected
        publishes = collected.publishes.get(topic)
        if publishes is None:
            collected.publishes[topic] = [publish]
        else:
            publishes.append(publish)
        collected.bytes += size
        self.inflight_bytes += size
        publish.session.unanswered(size)
        if durability == Durability.DISK:
            collected.sync = True
        if not self._is_due:
            self._commit_soon()

    def new_record(self, name: str) -> TopicRecord:
        """Return the record of a topic that is about to be created."""
        limit = self._settings.topics.count_max
        if len(self._catalogue) >= limit:
            raise Overloaded(f"there are {limit} topics already (topics.count_max)")
        return TopicRecord(
            number=self._catalogue.next_number, name=name, created_at_ms=self._clock.now_ms()
        )

    def create_topic(
        self, record: TopicRecord, *, done: Callable[[OnwardError | None], None]
    ) -> Topic:
        """Create a topic; it can be published to at once, `done` comes when it is durable."""
        topic = self._catalogue.add(record)

        def settle(error: OnwardError | None) -> None:
            if error is not None:
                self._catalogue.remove(record.number)
            done(error)

        self._collected.created.append(Change(Kind.TOPIC_CREATED, record, done=settle))
        self._collected.sync = True
        self._commit_soon()
        return topic

    def change_topic(
        self, record: TopicRecord, *, done: Callable[[OnwardError | None], None]
    ) -> None:
        """Change a topic's rules."""
        self._collected.later.append(Change(Kind.TOPIC_CHANGED, record, done=done))
        self._collected.sync = True
        self._commit_soon()

    def end_topic(self, topic: Topic, ending: TopicEnding, *, done: Callable[[OnwardError | None], None]) -> None:
        """End a topic: from now on nothing more is written to it."""
        topic.ending = True

        def settle(error: OnwardError | None) -> None:
            topic.ending = error is None
            done(error)

        self._collected.later.append(Change(Kind.TOPIC_DELETED, ending, done=settle))
        self._collected.sync = True
        self._commit_soon()

    # --- commit ------------------------------------------------------------------------------

    def _commit_soon(self) -> None:
        """Commit when the sockets that are ready now have been read: they share one write."""
        self._idle.clear()
        if not self._is_due and self._under_way is None:
            self._is_due = True
            self._loop.call_soon(self._commit)

    def _commit(self) -> None:
        self._is_due = False
        if self._under_way is not None or not self._collected:
            return
        collected, self._collected = self._collected, Collected()
        self._under_way = collected
        write = self._log.stage(self._drafts(collected))
        self.commit_count += 1
        self._commit_seam.submit(
            write, sync=collected.sync, done=lambda error: self._done(collected, write, error)
        )

    def _drafts(self, collected: Collected) -> list[Draft]:
        now_ms = max(self._clock.now_ms(), self._log.tail.last_time_ms)
        drafts = [Draft(c.kind, now_ms, 0, 0, 0, [c.body]) for c in collected.created]
        for topic, publishes in collected.publishes.items():
            for group in _grouped(publishes):
                count = sum([publish.count for publish in group])
                parts = [publish.batch for publish in group]
                base = topic.staged_offset
                drafts.append(Draft(Kind.MESSAGES, now_ms, topic.number, base, count, parts))
                topic.staged_offset = base + count
        drafts += [Draft(c.kind, now_ms, 0, 0, 0, [c.body]) for c in collected.later]
        return drafts

    # --- answer ------------------------------------------------------------------------------

    def _done(self, collected: Collected, write: Write, error: Exception | None) -> None:
        """Settle a commit, and begin the next with all that came meanwhile."""
        self._under_way = None
        if error is None:
            self._succeed(collected, write)
        elif isinstance(error, OnwardError):
            self._refuse(collected, write, error)
        else:
            self._fail(error)
            return
        self.inflight_bytes -= collected.bytes
        if self._collected:
            self._commit()
        else:
            self._idle.set()

    def _succeed(self, collected: Collected, write: Write) -> None:
        self._log.finish(write)
        if collected.sync and write.entries:
            self._log.synced_index = write.entries[-1].index
        entries = iter(write.entries)
        for change in collected.created:
            self._apply(change, next(entries))
        reached = Durability.DISK if collected.sync else Durability.MEMORY
        for topic, publishes in collected.publishes.items():
            for group in _grouped(publishes):
                entry = next(entries)
                self._answer(group, entry.base_offset, entry.index, reached)
            topic.next_offset = entry.base_offset + entry.count
        for change in collected.later:
            self._apply(change, next(entries))
        for topic in collected.publishes:
            if topic.waiting:
                self._wake(topic)

    def _apply(self, change: Change, entry: object) -> None:
        self._catalogue.apply(entry, change.body)  # type: ignore[arg-type]
        change.done(None)

    def _answer(self, publishes: list[Publish], offset: int, index: int, reached: int) -> None:
        """Send the receipts of one entry: each connection gets one write, however many it has."""
        record, unanswered = self._producers.record, self._unanswered
        dirty: list[Session] = []
        for publish in publishes:
            session, count = publish.session, publish.count
            if publish.producer_id:
                key = publish.producer_id, publish.sequence
                record(*key, offset=offset, event_id=index)
                del unanswered[key]
            if not session.has_output:
                dirty.append(session)
            session.published(publish.request_id, offset, index, reached)
            session.answered(len(publish.batch))
            if publish.waiters:
                self._answer_waiters(publish, offset, index, reached)
            offset += count
            self.published_count += count
        for session in dirty:
            session.flush()

    def _answer_waiters(self, publish: Publish, offset: int, index: int, reached: int) -> None:
        for session, request_id in publish.waiters or ():
            session.published(request_id, offset, index, reached, repeat=True)
            session.flush()

    def _refuse(self, collected: Collected, write: Write, error: OnwardError) -> None:
        """Nothing was written: put the offsets back and say so to everyone who waits.

        Also to those who came meanwhile: they may rely on a topic that was not created.
        """
        self._log.abandon(write)
        self.disk_is_full = self.disk_is_full or isinstance(error, DiskFull)
        self._refuse_collected(collected, error)
        later, self._collected = self._collected, Collected()
        self._refuse_collected(later, error)
        self.inflight_bytes -= later.bytes

    def _refuse_collected(self, collected: Collected, error: OnwardError) -> None:
        for topic, publishes in collected.publishes.items():
            topic.staged_offset = topic.next_offset
            for publish in publishes:
                self._unanswered.pop((publish.producer_id, publish.sequence), None)
                publish.session.answered(len(publish.batch))
                publish.session.refuse(publish.request_id, error)
                for session, request_id in publish.waiters or ():
                    session.refuse(request_id, error)
        for change in (*collected.created, *collected.later):
            change.done(error)

    def roll(self, *, done: Done) -> bool:
        """Begin a new segment when no commit is under way; tell whether it was begun."""
        if self._under_way is not None or self._collected:
            return False
        self._under_way = collected = Collected()
        self._idle.clear()
        write = self._log.stage_roll()

        def settle(error: Exception | None) -> None:
            self._done(collected, write, error)
            done(error)

        self._commit_seam.submit(write, sync=False, done=settle)
        return True

    async def drain(self) -> None:
        """Return when everything that was accepted is answered."""
        await self._idle.wait()


def _grouped(publishes: list[Publish]) -> list[list[Publish]]:
    """Split what one topic got into groups that each become one entry."""
    if len(publishes) == 1 or sum([len(p.batch) for p in publishes]) <= ENTRY_BYTES_MAX:
        return [publishes]
    groups: list[list[Publish]] = []
    size = ENTRY_BYTES_MAX
    for publish in publishes:
        if size + len(publish.batch) > ENTRY_BYTES_MAX:
            groups.append([])
            size = 0
        groups[-1].append(publish)
        size += len(publish.batch)
    return groups
