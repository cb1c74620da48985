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
from onward.broker.producers import UNDER_WAY, WINDOW, Producers
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
from onward.log.disk import Buffer
from onward.log.log import Log, Write
from onward.message.batch import BatchHeader, check_batch, largest_body_bytes
from onward.message.entry import Draft, Entry, Kind
from onward.message.names import check_topic_name
from onward.protocol.frames import Kind as FrameKind
from onward.protocol.payloads import RECEIPT, Durability, decode_publish, published_frame
from onward.settings import Settings

if TYPE_CHECKING:
    from onward.broker.session import Session

# Readers take entries as a whole: larger ones would make them wait, smaller ones cost more each.
ENTRY_BYTES_MAX: Final = 512 << 10
RETRY_AFTER_MS: Final = 100
CROWD_WAIT_S: Final = 0.002
CROWD_MIN: Final = 32
CROWD_PART: Final = 0.5
CROWD_BYTES_MAX: Final = 256 << 10
ROUTES_MAX: Final = 4_096
# Below this a copy of the batch is cheaper than a view of its frame.
COPIED_BYTES_MAX: Final = 2_048
_DISK: Final = int(Durability.DISK)
_PUBLISHED: Final = int(FrameKind.PUBLISHED)


Publish = tuple["Session", int, Buffer, int, int, int, int]
"""A batch on its way: session, request id, batch, count, producer id, sequence, durability asked.

A plain tuple: one is made for each frame, and it is the cheapest thing that holds seven values.
"""


class Change:
    """A change of a topic on its way to the disk."""

    __slots__ = ("body", "done", "kind")

    def __init__(
        self,
        kind: Kind,
        body: TopicRecord | TopicEnding,
        *,
        done: Callable[[OnwardError | None], None],
    ) -> None:
        self.kind = kind
        self.body = msgspec.json.encode(body)
        self.done = done


class Collected:
    """What the next commit will carry."""

    __slots__ = ("bytes", "count", "created", "groups", "later", "publishes", "sync")

    def __init__(self) -> None:
        self.created: list[Change] = []
        self.publishes: dict[Topic, list[Publish]] = {}
        self.groups: dict[Topic, list[list[Publish]]] = {}
        """The publishes of each topic, as they were split into entries."""
        self.later: list[Change] = []
        """Changes and endings of topics: after the messages that came before them."""
        self.bytes = 0
        self.count = 0
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
        self.routes: dict[bytes, tuple[Topic, int, int]] = {}
        self._producers = producers
        self._commit_seam = commit
        self._settings = settings
        self._clock = clock
        self._wake = wake
        self._fail = fail
        self._loop = asyncio.get_running_loop()
        self.message_bytes_max = settings.topics.message_bytes_max
        self.connection_bytes_max = settings.server.connection_bytes_max
        self._inflight_bytes_max = settings.server.inflight_bytes_max
        self._default = Durability[settings.log.durability.upper()]
        self._crowd = 0
        """How many publishes waited for the last commit or for the next when it ended."""
        self._collected = Collected()
        self._under_way: Collected | None = None
        self._is_due = False
        self._wait: asyncio.TimerHandle | None = None
        self._waiters: dict[tuple[int, int], list[tuple[Session, int]]] = {}
        """Who sent a batch again while it was under way, by producer id and sequence."""
        self._creating: dict[Topic, list[Callable[[OnwardError | None], None]]] = {}
        """Who waits until a topic is durable, or is told that it will not be."""
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
            topic, durability, start = self._route(payload)
            header = check_batch(payload, start)
            producer_id, sequence = header.producer_id, header.sequence
            if producer_id:
                stored = self._producers.find(producer_id, sequence)
                if stored is not None:
                    self._repeat(session, request_id, producer_id, sequence, stored)
                    return
            if self.is_stopping or self.disk_is_full:
                raise self._unavailable()
            limit = topic.message_bytes_max or self.message_bytes_max
            if header.raw_bytes > limit or header.length != len(payload) - start:
                self._check_size(topic, payload, start, header, limit)
            if self.inflight_bytes > self._inflight_bytes_max or session.held_sequence:
                self._check_load(session, sequence)
            if not topic.number:
                topic = self.create_on_use(topic.name, lambda error: None)
        except OnwardError as error:
            session.refuse(request_id, error)
            return
        if producer_id:
            # Only now: what is refused must leave no trace, and push no real producer out.
            self._producers.begin(producer_id, sequence)
        batch = payload[start:] if len(payload) < COPIED_BYTES_MAX else memoryview(payload)[start:]
        publish = session, request_id, batch, header.count, producer_id, sequence, durability
        self.collect(topic, [publish], header.length, durability)
        session.unanswered_bytes += header.length
        if session.unanswered_bytes > self.connection_bytes_max:
            session.keep_reading()
        self.commit_when_due()

    def _route(self, payload: bytes | bytearray) -> tuple[Topic, int, int]:
        """Return the topic, the durability, and where the batch begins.

        The front of the frame is the same for each publish to a topic, so what was found out about
        it is kept, until any topic changes. A topic that cannot be written now has number 0.
        """
        front = payload[: 4 + payload[1]] if len(payload) > 4 else b""
        route = self.routes.get(front if type(front) is bytes else bytes(front))
        if route is None:
            asked, name, start = decode_publish(payload)
            durability = self._durability(asked)
            topic = self._catalogue.by_name.get(name)
            if topic is None or not topic.is_open:
                # Nothing is created or refused before it is known that this is no repeat.
                return Topic(TopicRecord(number=0, name=name)), durability, start
            if len(self.routes) >= ROUTES_MAX:
                self.routes.clear()
            route = self.routes[bytes(front)] = (topic, durability, start)
        return route

    def _durability(self, asked: int) -> int:
        if asked <= Durability.DISK:
            return asked
        if asked == Durability.DEFAULT:
            return self._default
        if asked == Durability.QUORUM:
            raise InvalidRequest("durability 'quorum' needs a cluster; this node stands alone")
        raise InvalidRequest(f"durability {asked} does not exist")

    def create_on_use(self, name: str, done: Callable[[OnwardError | None], None]) -> Topic:
        """Return the new topic for a name that nobody used, or say why it cannot be written."""
        if self.is_stopping or self.disk_is_full:
            raise self._unavailable()
        topic = self._catalogue.by_name.get(name)
        if topic is not None and topic.ending:
            raise TopicEnded(f"topic {topic.name!r} is ending")
        if topic is not None:
            raise Forbidden(f"topic {topic.name!r} is {topic.record.rule}: it cannot be written")
        check_topic_name(name)
        if not self._settings.topics.auto_create:
            raise UnknownTopic(f"topic {name!r} does not exist, and topics.auto_create is off")
        return self.create_topic(self.new_record(name), done=done)

    def _check_size(
        self, topic: Topic, payload: bytes | bytearray, start: int, header: BatchHeader, limit: int
    ) -> None:
        """Look closer at what may be too large.

        A compressed batch is never inflated here, whoever sends it could make that dear: when it
        has several messages, the limit of each is kept by who produces them.
        """
        if header.length != len(payload) - start:
            raise ProtocolError("a PUBLISH frame holds exactly one batch")
        batch_limit = self._settings.topics.batch_bytes_max
        if header.length > batch_limit or header.raw_bytes > batch_limit:
            raise MessageTooLarge(f"a batch has at most {batch_limit} bytes")
        if header.count > 1 and header.flags:
            return
        largest = largest_body_bytes(payload, start, header)
        if largest > limit:
            raise MessageTooLarge(
                f"a message of {largest} bytes is too large: topic {topic.name!r} takes {limit}"
            )

    def _repeat(
        self, session: Session, request_id: int, producer_id: int, sequence: int,
        stored: tuple[int, int],
    ) -> None:  # fmt: skip
        """Answer, or let wait, a batch that came before."""
        offset, event_id = stored
        if offset == UNDER_WAY:
            if session.repeats_waiting >= WINDOW:
                raise Overloaded("too many repeats are waiting", retry_after_ms=RETRY_AFTER_MS)
            session.repeats_waiting += 1
            self._waiters.setdefault((producer_id, sequence), []).append((session, request_id))
            return
        reached = _DISK if event_id <= self._log.synced_index else int(Durability.MEMORY)
        session.write(published_frame(request_id, offset, event_id, reached, repeat=True))

    def _check_load(self, session: Session, sequence: int) -> None:
        """Refuse what is too much now, and what was sent after it, so that the order is kept.

        A client sends again only after all it sent has an answer. So a sequence that was refused
        before begins a new round, even when the first of them is never sent again.
        """
        if sequence <= session.held_sequence:
            session.held_sequence = 0
        if session.held_sequence or self.inflight_bytes > self._inflight_bytes_max:
            session.held_sequence = sequence
            session.note_plain()
            raise Overloaded("too many bytes are under way", retry_after_ms=RETRY_AFTER_MS)

    def _unavailable(self) -> OnwardError:
        if self.is_stopping:
            return Stopping("the broker is stopping")
        return DiskFull("the disk is nearly full: nothing is stored until there is space again")

    # --- collect -----------------------------------------------------------------------------

    @property
    def room_bytes(self) -> int:
        """Return how many bytes that are well-formed would surely be taken now; or less than 0."""
        if self.is_stopping or self.disk_is_full:
            return -1
        return self._inflight_bytes_max - self.inflight_bytes

    def collect(self, topic: Topic, publishes: list[Publish], size: int, durability: int) -> None:
        """Take accepted publishes to one topic into the next commit.

        `size` is that of their batches, `durability` the highest that any of them asks for.
        """
        collected = self._collected
        waiting = collected.publishes.get(topic)
        if waiting is None:
            collected.publishes[topic] = publishes
        else:
            waiting += publishes
        collected.bytes += size
        collected.count += len(publishes)
        collected.sync = collected.sync or durability == _DISK
        self.inflight_bytes += size

    def commit_when_due(self) -> None:
        """Begin a commit for what was collected, unless one is under way or about to begin."""
        if self._under_way is not None or not self._collected:
            return
        if not self._is_due:
            self._commit_soon()
        elif self._wait is not None and self._collected.count >= self._crowd * CROWD_PART:
            self._commit_now()

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
        self._creating[topic] = [done]

        def settle(error: OnwardError | None) -> None:
            if error is not None:
                self._catalogue.remove(record.number)
            for tell in self._creating.pop(topic):
                tell(error)

        self._collected.created.append(Change(Kind.TOPIC_CREATED, record, done=settle))
        self._collected.sync = True
        self._commit_soon()
        return topic

    def when_created(self, topic: Topic, done: Callable[[OnwardError | None], None]) -> None:
        """Call `done` when a topic that is there is durable: now, or with who created it."""
        if topic in self._creating:
            self._creating[topic].append(done)
        else:
            done(None)

    def change_topic(
        self, record: TopicRecord, *, done: Callable[[OnwardError | None], None]
    ) -> None:
        """Change a topic's rules."""
        topic = self._catalogue.by_number[record.number]
        topic.staged_record = record

        def settle(error: OnwardError | None) -> None:
            if error is not None:
                topic.staged_record = topic.record
            done(error)

        self._collected.later.append(Change(Kind.TOPIC_CHANGED, record, done=settle))
        self._collected.sync = True
        self._commit_soon()

    def end_topic(
        self, topic: Topic, ending: TopicEnding, *, done: Callable[[OnwardError | None], None]
    ) -> None:
        """End a topic: from now on nothing more is written to it."""
        topic.end(ending=True)
        self.routes.clear()

        def settle(error: OnwardError | None) -> None:
            topic.end(ending=error is None)
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
        """Begin a commit, or wait a moment for those who will publish again at once."""
        self._is_due = False
        if self._under_way is not None or not self._collected:
            return
        if self._expects_more(self._collected):
            self._is_due = True
            self._wait = self._loop.call_later(CROWD_WAIT_S, self._commit_now)
        else:
            self._commit_now()

    def _expects_more(self, collected: Collected) -> bool:
        """Tell whether a crowd is on its way back.

        Publishers that wait for their answer return right after it. A commit that begins with the
        first of them costs the disk and the processor many small commits in place of few. So for
        a moment, which ends when half of them are back, it waits; the other half arrives while
        these are on the disk. A few publishers, and large batches, never wait.
        """
        return (
            self._crowd >= CROWD_MIN
            and collected.sync
            and collected.count < self._crowd * CROWD_PART
            and collected.bytes < CROWD_BYTES_MAX
        )

    def _commit_now(self) -> None:
        self._is_due = False
        if self._wait is not None:
            self._wait.cancel()
            self._wait = None
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
            groups = collected.groups[topic] = _grouped(publishes)
            for group in groups:
                count = sum([publish[3] for publish in group])
                parts = [publish[2] for publish in group]
                base = topic.staged_offset
                drafts.append(Draft(Kind.MESSAGES, now_ms, topic.number, base, count, parts))
                topic.staged_offset = base + count
        drafts += [Draft(c.kind, now_ms, 0, 0, 0, [c.body]) for c in collected.later]
        return drafts

    # --- answer ------------------------------------------------------------------------------

    def _done(self, collected: Collected, write: Write, error: Exception | None) -> None:
        """Settle a commit, and begin the next with all that came meanwhile."""
        self._under_way = None
        self._crowd = collected.count + self._collected.count
        if error is None:
            self._succeed(collected, write)
        elif isinstance(error, OnwardError):
            self._refuse(collected, error)
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
        for topic, groups in collected.groups.items():
            for group in groups:
                entry = next(entries)
                self._answer(group, entry.base_offset, entry.index, is_synced=collected.sync)
                self.published_count += entry.count
            topic.next_offset = entry.base_offset + entry.count
        for change in collected.later:
            self._apply(change, next(entries))
        for topic in collected.publishes:
            if topic.waiting:
                self._wake(topic)

    def _apply(self, change: Change, entry: Entry) -> None:
        self.routes.clear()
        self._catalogue.apply(entry, change.body)
        change.done(None)

    def _answer(
        self, publishes: list[Publish], offset: int, index: int, *, is_synced: bool
    ) -> None:
        """Send the receipts of one entry."""
        self._producers.record_all(publishes, offset, index)
        if self._waiters:
            self._answer_waiters(publishes, offset, index)
        reached, receipt = _DISK, RECEIPT.pack
        last = publishes[0][0]
        receipts = b""
        for session, request_id, batch, count, _, _, asked in publishes:
            if not is_synced:
                reached = asked
            if session is not last:
                last.write(receipts)
                last, receipts = session, b""
            # Those of one connection stand together mostly, and go out with one write.
            receipts += receipt(25, _PUBLISHED, 0, 0, request_id, offset, index, reached)
            session.unanswered_bytes -= len(batch)
            if session.is_paused:
                session.keep_reading()
            offset += count
        last.write(receipts)

    def _answer_waiters(self, publishes: list[Publish], offset: int, index: int) -> None:
        """Answer those who sent a batch again while it was under way."""
        reached = _DISK if index <= self._log.synced_index else int(Durability.MEMORY)
        for _, _, _, count, producer_id, sequence, _ in publishes:
            for session, request_id in self._waiters.pop((producer_id, sequence), ()):
                session.repeats_waiting -= 1
                session.write(published_frame(request_id, offset, index, reached, repeat=True))
            offset += count

    def _refuse(self, collected: Collected, error: OnwardError) -> None:
        """Nothing was written: put the offsets back and say so to everyone who waits.

        Also to those who came meanwhile: they may rely on a topic that was not created.
        """
        self.disk_is_full = self.disk_is_full or isinstance(error, DiskFull)
        self._refuse_collected(collected, error)
        later, self._collected = self._collected, Collected()
        self._refuse_collected(later, error)
        self.inflight_bytes -= later.bytes

    def _refuse_collected(self, collected: Collected, error: OnwardError) -> None:
        for topic, publishes in collected.publishes.items():
            topic.staged_offset = topic.next_offset
            for session, request_id, batch, _, producer_id, sequence, _ in publishes:
                self._producers.give_up(producer_id, sequence)
                session.unanswered_bytes -= len(batch)
                session.keep_reading()
                session.refuse(request_id, error)
                for waiter, waiter_id in self._waiters.pop((producer_id, sequence), ()):
                    waiter.repeats_waiting -= 1
                    waiter.refuse(waiter_id, error)
        self.routes.clear()
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
    if len(publishes) == 1 or sum([len(publish[2]) for publish in publishes]) <= ENTRY_BYTES_MAX:
        return [publishes]
    groups: list[list[Publish]] = []
    size = ENTRY_BYTES_MAX
    for publish in publishes:
        if size + len(publish[2]) > ENTRY_BYTES_MAX:
            groups.append([])
            size = 0
        groups[-1].append(publish)
        size += len(publish[2])
    return groups
