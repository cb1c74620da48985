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
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final

from onward.broker.catalogue import Topic, TopicRecord
from onward.broker.changes import Changes
from onward.broker.collected import Change, Collected, Staged, in_batches
from onward.broker.commit import Commit, Done
from onward.broker.permissions import Policy
from onward.broker.producers import UNDER_WAY, WINDOW, WINDOW_HEAD
from onward.broker.requester import Requester
from onward.broker.routes import Routes
from onward.broker.state import State
from onward.broker.write_gate import WriteGate
from onward.clock import Clock
from onward.delivery.trace import Trace, encode_rows
from onward.errors import (
    DiskFull,
    Forbidden,
    InvalidRequest,
    MessageTooLarge,
    OnwardError,
    Overloaded,
    ProtocolError,
    TopicEnded,
    UnknownTopic,
)
from onward.log.disk import Buffer
from onward.log.log import Log, Write
from onward.message.batch import BatchHeader, check_batch, encode_batch, largest_body_bytes
from onward.message.entry import Draft, Entry, Kind
from onward.message.names import SINK_PREFIX, TRACE_TOPIC, check_topic_name
from onward.protocol.payloads import (
    RECEIPT,
    RECEIPT_FRONT,
    Durability,
    counted_from_frame,
    published_frame,
)
from onward.schedule.state import FIRED, SCHEDULE_TOPIC
from onward.settings import Settings

if TYPE_CHECKING:
    from onward.broker.inside import Inside, Receipt
    from onward.broker.scheduling import Scheduling

RETRY_AFTER_MS: Final = 100
CROWD_WAIT_S: Final = 0.002
CROWD_MIN: Final = 32
CROWD_PART: Final = 0.7
CROWD_BYTES_MAX: Final = 256 << 10
# Below this a copy of the batch is cheaper than a view of its frame.
COPIED_BYTES_MAX: Final = 2_048
# So many producers of one connection keep their order while they are refused.
HELD_MAX: Final = 64
_DISK: Final = int(Durability.DISK)


Publish = tuple[Requester, int, Buffer, int, int, int, int]
"""A batch on its way: requester, request id, batch, count, producer id, sequence, durability asked.

A plain tuple: one is made for each frame, and it is the cheapest thing that holds seven values.
"""


class Publishing(Changes):
    """Takes publishes and changes of topics, and makes them durable."""

    def __init__(
        self, *, log: Log, state: State, commit: Commit, gate: WriteGate, settings: Settings,
        clock: Clock, wake: Callable[[Topic], None], fail: Callable[[Exception], None],
        policy: Policy,
    ) -> None:  # fmt: skip
        self._log = log
        self._state = state
        self._catalogue = state.catalogue
        self._producers = state.producers
        self._publishers = state.publishers
        self._commit_seam = commit
        self.gate = gate
        self._settings = settings
        self._clock = clock
        self._wake = wake
        self._fail = fail
        self._loop = asyncio.get_running_loop()
        self.message_bytes_max = settings.topics.message_bytes_max
        self.connection_bytes_max = settings.server.connection_bytes_max
        self._inflight_bytes_max = settings.server.inflight_bytes_max
        default = Durability[settings.log.durability.upper()]
        self.routes = Routes(state.catalogue, default=default, policy=policy)
        self._crowd = 0
        """How many publishes waited for the last commit or for the next when it ended."""
        self._collected = Collected()
        self._in_flight: deque[Collected] = deque()
        """What was handed to the commit and is not done, in order."""
        self._is_failing = False
        """A commit was refused: those behind it will be, too, and the next one waits for that."""
        self._is_due = False
        self._wait: asyncio.TimerHandle | None = None
        self._waiters: dict[tuple[int, int], list[tuple[Requester, int]]] = {}
        """Who sent a batch again while it was under way, by producer id and sequence."""
        self._creating: dict[Topic, list[Callable[[OnwardError | None], None]]] = {}
        """Who waits until a topic is durable, or is told that it will not be."""
        self._idle = asyncio.Event()
        self._idle.set()
        self.inflight_bytes = 0
        self.on_committed: Callable[[], None] | None = None
        """Called after each commit, for those who follow the log as a whole."""
        self.published_count = 0
        self.commit_count = 0
        self.time_ms_min = 0
        """No entry from now on has an earlier time: what was due until then has been taken."""
        self.scheduling: Scheduling | None = None

    # --- accept ------------------------------------------------------------------------------

    def publish(self, requester: Requester, request_id: int, payload: bytes | bytearray) -> None:
        """Handle one PUBLISH frame. The receipt is sent once the batch is durable."""
        try:
            topic, durability, start = self.routes.find(requester.principal, payload)
            header = check_batch(payload, start)
            producer_id, sequence = header.producer_id, header.sequence
            if producer_id == FIRED:
                raise InvalidRequest(f"producer id {FIRED} is that of the broker itself")
            if producer_id:
                stored = self._producers.find(producer_id, sequence)
                if stored is not None:
                    self._repeat(requester, request_id, producer_id, sequence, stored)
                    return
            if not self.gate.is_open:
                self.gate.check()
            limit = topic.message_bytes_max or self.message_bytes_max
            if header.raw_bytes > limit or header.length != len(payload) - start:
                self._check_size(topic, payload, start, header)
            if self.inflight_bytes > self._inflight_bytes_max or requester.held_sequences:
                self._check_load(requester, producer_id, sequence)
            batch = (
                payload[start:] if len(payload) < COPIED_BYTES_MAX else memoryview(payload)[start:]
            )
            if topic.name == SCHEDULE_TOPIC:
                assert self.scheduling is not None, "who publishes is connected to a whole broker"
                scheduled = self.scheduling.intake.check(batch, requester.principal)
                batch = scheduled.batch
            elif not topic.number:
                topic = self.create_on_use(topic.name, lambda error: None)
                self.routes.keep(requester.principal, payload, (topic, durability, start))
        except OnwardError as error:
            requester.refuse(request_id, error)
            return
        if producer_id:
            # Only now: what is refused must leave no trace, and push no real producer out.
            if producer_id not in self._producers.windows:
                self._note_publisher(requester, producer_id)
            self._producers.begin(producer_id, sequence)
        requester.unanswered_bytes += len(batch)
        publish = requester, request_id, batch, header.count, producer_id, sequence, durability
        if topic.name == SCHEDULE_TOPIC:
            assert self.scheduling is not None
            if scheduled.counted_from_ms is not None:
                requester.write(counted_from_frame(request_id, scheduled.counted_from_ms))
            self.scheduling.intake.take(publish, scheduled)
        else:
            self.accept(topic, publish, durability)
        if requester.unanswered_bytes > self.connection_bytes_max:
            requester.keep_reading()

    def accept(self, topic: Topic, publish: Publish, durability: int) -> None:
        """Take a publish that was checked and begun into the next commit."""
        self.collect(topic, [publish], len(publish[2]), durability)
        self.commit_when_due()

    def reject(self, publish: Publish, error: OnwardError) -> None:
        """Answer a publish that was begun and cannot be stored."""
        requester, request_id, batch, _, producer_id, sequence, _ = publish
        self._producers.give_up(producer_id, sequence)
        if self.scheduling is not None:
            self.scheduling.intake.forget(batch)
        requester.unanswered_bytes -= len(batch)
        requester.keep_reading()
        requester.refuse(request_id, error)
        for waiter, waiter_id in self._waiters.pop((producer_id, sequence), ()):
            waiter.repeats_waiting -= 1
            waiter.refuse(waiter_id, error)

    def publish_inside(
        self, inside: Inside, topic: Topic, batch: bytes, *, count: int, done: Receipt
    ) -> None:
        """Publish a batch of the broker itself; it is written with the next commit."""
        publish = (inside, inside.expect(done), batch, count, 0, 0, _DISK)
        inside.unanswered_bytes += len(batch)
        self.collect(topic, [publish], len(batch), _DISK)
        self._commit_soon()

    @property
    def scheduled_under_way_ms(self) -> int | None:
        """Return the time of the oldest scheduled messages that are on their way to the disk."""
        topic = self._catalogue.by_name.get(SCHEDULE_TOPIC)
        times = (one.time_ms for one in self._in_flight if topic in one.publishes)
        return next(times, None)

    def _note_publisher(self, requester: Requester, producer_id: int) -> None:
        """Let the trace say who a new producer is, with the commit of its first batch."""
        if requester.hello is None:
            return
        row = self._publishers.note(requester.hello, producer_id, now_ms=self._clock.now_ms())
        if row is not None:
            bodies = encode_rows([row])
            done = partial(self._noted, row)
            self._collected.rows.append((lambda: bodies, done, True))

    def _noted(self, row: Trace, error: OnwardError | None) -> None:
        if error is None:
            self._publishers.apply(row)
        else:
            self._publishers.forget(row.producer_id)

    def create_on_use(
        self, name: str, done: Callable[[OnwardError | None], None], *,
        even_beyond_count: bool = False,
    ) -> Topic:  # fmt: skip
        """Return the new topic for a name that nobody used, or say why it cannot be written.

        `even_beyond_count`: what was accepted when there was room for its topic is not held up.
        """
        self.gate.check()
        topic = self._catalogue.by_name.get(name)
        if topic is not None and topic.ending:
            raise TopicEnded(f"topic {topic.name!r} is ending")
        if topic is not None:
            raise Forbidden(f"topic {topic.name!r} is {topic.record.rule}: it cannot be written")
        check_topic_name(name)
        if name.startswith(SINK_PREFIX):
            # One that ended in the middle of a write must not begin again at 0 with its rest.
            raise UnknownTopic(f"topic {name!r} does not exist: it is created before it is used")
        if not self._settings.topics.auto_create:
            raise UnknownTopic(f"topic {name!r} does not exist, and topics.auto_create is off")
        record = self.new_record(name, is_limited=not even_beyond_count)
        return self.create_topic(record, done=done)

    def body_bytes_max(self, topic_name: str) -> int:
        """Return the size of the largest body that a topic takes, which need not exist yet."""
        topic = self._catalogue.by_name.get(topic_name)
        own_limit = 0 if topic is None or topic.ending else topic.message_bytes_max
        return own_limit or self.message_bytes_max

    def check_body(self, topic_name: str, size: int) -> None:
        """Raise when a body is too large for a topic."""
        limit = self.body_bytes_max(topic_name)
        if size > limit:
            raise MessageTooLarge(
                f"a message of {size} bytes is too large: topic {topic_name!r} takes {limit}"
            )

    def _check_size(
        self, topic: Topic, payload: bytes | bytearray, start: int, header: BatchHeader
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
        # What is scheduled is held to the limits of its targets, when it is looked at closely.
        if topic.name != SCHEDULE_TOPIC and (header.count == 1 or not header.flags):
            self.check_body(topic.name, largest_body_bytes(payload, start, header))

    def _repeat(
        self, requester: Requester, request_id: int, producer_id: int, sequence: int,
        stored: tuple[int, int],
    ) -> None:  # fmt: skip
        """Answer, or let wait, a batch that came before."""
        offset, event_id = stored
        if offset == UNDER_WAY:
            if requester.repeats_waiting >= WINDOW:
                raise Overloaded("too many repeats are waiting", retry_after_ms=RETRY_AFTER_MS)
            requester.repeats_waiting += 1
            self._waiters.setdefault((producer_id, sequence), []).append((requester, request_id))
            return
        reached = self._commit_seam.durability_of(event_id)
        requester.write(published_frame(request_id, offset, event_id, reached, repeat=True))

    def _check_load(self, requester: Requester, producer_id: int, sequence: int) -> None:
        """Refuse what is too much now, and what its producer sent after it, to keep the order.

        A client sends again only after all it sent has an answer. So a sequence that was refused
        before begins a new round, even when the first of them is never sent again.
        """
        held = requester.held_sequences
        if sequence <= held.get(producer_id, -1):
            del held[producer_id]
        if producer_id in held or self.inflight_bytes > self._inflight_bytes_max:
            if len(held) >= HELD_MAX:
                held.clear()
            if producer_id:
                held[producer_id] = sequence
            requester.note_plain()
            raise Overloaded("too many bytes are under way", retry_after_ms=RETRY_AFTER_MS)

    # --- collect -----------------------------------------------------------------------------

    @property
    def room_bytes(self) -> int:
        """Return how many bytes that are well-formed would surely be taken now; or less than 0."""
        if not self.gate.is_open:
            return -1
        return self._inflight_bytes_max - self.inflight_bytes

    def collect(self, topic: Topic, publishes: list[Publish], size: int, durability: int) -> None:
        """Take accepted publishes to one topic into the next commit.

        `size` is that of their batches, `durability` the highest that any of them asks for.
        """
        collected = self._collected
        waiting = collected.publishes.setdefault(topic, publishes)
        if waiting is not publishes:
            waiting += publishes
        collected.bytes += size
        collected.count += len(publishes)
        collected.sync = collected.sync or durability == _DISK
        self.inflight_bytes += size

    def commit_when_due(self) -> None:
        """Begin a commit for what was collected, unless one is under way or about to begin."""
        if self._is_saturated or not self._collected:
            return
        if not self._is_due:
            self._commit_soon()
        elif self._wait is not None and self._collected.count >= self._crowd * CROWD_PART:
            self._commit_now()

    # --- commit ------------------------------------------------------------------------------

    @property
    def _is_saturated(self) -> bool:
        """Return True if no further commit may begin now."""
        return self._is_failing or len(self._in_flight) >= self._commit_seam.in_flight_max

    def _commit_soon(self) -> None:
        """Commit when the sockets that are ready now have been read: they share one write."""
        self._idle.clear()
        if not self._is_due and not self._is_saturated:
            self._is_due = True
            self._loop.call_soon(self._commit)

    def _commit(self) -> None:
        """Begin a commit, or wait a moment for those who will publish again at once."""
        if self._wait is not None:
            return  # somebody waits already, and one timer is all that is ever looked after
        self._is_due = False
        if self._is_saturated or not self._collected:
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
        a moment, which ends when most of them are back, it waits; the others arrive while these
        are on the disk. A few publishers, and large batches, never wait.
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
        if self._is_saturated or not self._collected:
            return  # what was collected goes when one of those under way has ended, or was refused
        collected, self._collected = self._collected, Collected()
        self._in_flight.append(collected)
        write = self._log.stage(self._drafts(collected))
        self.commit_count += 1
        self._commit_seam.append(
            write, sync=collected.sync, done=lambda error: self._done(collected, write, error)
        )

    def _drafts(self, collected: Collected) -> list[Draft]:
        under_way_ms = max([one.time_ms for one in self._in_flight])
        last_ms = max(self._log.tail.last_time_ms, under_way_ms)
        now_ms = max(self._clock.now_ms(), last_ms, self.time_ms_min)
        collected.time_ms = now_ms
        drafts = [Draft(c.kind, now_ms, 0, 0, 0, [c.body]) for c in collected.created]
        kind, new_tuple = Kind.MESSAGES, tuple.__new__
        for topic, publishes in collected.split():
            if len(publishes) == 1:
                count, parts = publishes[0][3], [publishes[0][2]]
            else:
                count = sum([publish[3] for publish in publishes])
                parts = [publish[2] for publish in publishes]
            base = topic.staged_offset
            # Without the constructor, which costs twice as much: there may be one per message.
            drafts.append(new_tuple(Draft, (kind, now_ms, topic.number, base, count, parts)))
            topic.staged_offset = base + count
        if collected.rows:
            drafts += self._trace_drafts(collected, now_ms)
        drafts += [
            Draft(c.kind, now_ms, c.topic, c.base_offset, c.count, [c.body])
            for c in collected.later
        ]
        return drafts

    def _trace_drafts(self, collected: Collected, now_ms: int) -> list[Draft]:
        """Return the entries of the trace; the first rows ever create its topic before them."""
        bodies = [body for rows, _, _ in collected.rows for body in rows()]
        drafts: list[Draft] = []
        topic = self._catalogue.by_name.get(TRACE_TOPIC)
        if topic is None and not bodies:
            return drafts
        if topic is None:
            record = TopicRecord(
                number=self._catalogue.next_number, name=TRACE_TOPIC, created_at_ms=now_ms
            )
            topic = self._catalogue.add(record)
            change = Change(Kind.TOPIC_CREATED, record, done=self._trace_was_created)
            collected.trace_created = change
            drafts.append(Draft(change.kind, now_ms, 0, 0, 0, [change.body]))
        self._log.system_topics.add(topic.number)
        for some in in_batches(bodies):
            batch = encode_batch(some, time_ms=now_ms)
            base = topic.staged_offset
            drafts.append(Draft(Kind.MESSAGES, now_ms, topic.number, base, len(some), [batch]))
            topic.staged_offset = base + len(some)
            collected.rows_entries += 1
        return drafts

    def _trace_was_created(self, error: OnwardError | None) -> None:
        topic = self._catalogue.by_name.get(TRACE_TOPIC)
        if error is not None and topic is not None:
            self._catalogue.remove(topic.number)

    # --- answer ------------------------------------------------------------------------------

    def _done(self, collected: Collected, write: Write, error: Exception | None) -> None:
        """Settle a commit, and begin the next with all that came meanwhile."""
        assert self._in_flight[0] is collected, "commits end in their order"
        self._in_flight.popleft()
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
        elif not self._in_flight:
            self._idle.set()

    def _succeed(self, collected: Collected, write: Write) -> None:
        self._log.finish(write)
        entries = iter(write.entries)
        for change in collected.created:
            self._apply(change, next(entries))
        messages = list(islice(entries, len(collected.staged)))
        self._answer(collected.staged, messages)
        if self.scheduling is not None:
            self.scheduling.stored(collected.staged, messages)
        if collected.rows:
            self._succeed_rows(collected, entries)
        for change in collected.later:
            self._apply(change, next(entries))
        for topic in collected.publishes:
            if topic.waiting or topic.crews or topic.watches:
                self._wake(topic)
        if self.on_committed is not None:
            self.on_committed()

    def _succeed_rows(self, collected: Collected, entries: Iterator[Entry]) -> None:
        if collected.trace_created is not None:
            self._apply(collected.trace_created, next(entries))
        topic = self._catalogue.by_name.get(TRACE_TOPIC)
        if topic is not None:
            for entry in islice(entries, collected.rows_entries):
                topic.next_offset = entry.base_offset + entry.count
        for _, done, _ in collected.rows:
            done(None)
        if topic is not None and (topic.waiting or topic.crews or topic.watches):
            self._wake(topic)

    def _apply(self, change: Change, entry: Entry) -> None:
        if change.kind != Kind.TOPIC_CREATED:
            # A new topic has no route to an older one of its name: that went when it ended.
            self.routes.forget()
        self._state.apply(entry, change.body)
        change.done(None)

    def _answer(self, staged: list[Staged], entries: list[Entry]) -> None:
        """Make the messages of a commit visible, and send their receipts.

        This inlines what `State.apply` does with plain messages (topics and producers), in one loop
        over all entries on purpose: a commit to many topics has one for each message, and a call
        for each, as `Producers.record` is, would be half of the cost.
        """
        if not staged:
            return
        if self._waiters:
            self._answer_waiters(staged, entries)
        windows, receipt = self._producers.windows, RECEIPT.pack
        last = staged[0][1][0][0]
        receipts = b""
        # All entries of a commit are equally safe; what is not synced is as safe as it asked for.
        durability = self._commit_seam.durability_of(entries[-1].index)
        for (topic, publishes), entry in zip(staged, entries, strict=True):
            offset, index = entry.base_offset, entry.index
            for requester, request_id, batch, count, producer_id, sequence, asked in publishes:
                window = windows.get(producer_id)
                slot = WINDOW_HEAD + sequence % WINDOW * 3
                if window is not None and window[slot] == sequence + 1:
                    window[slot + 1] = offset
                    window[slot + 2] = index
                elif producer_id:
                    self._producers.record(producer_id, sequence, offset, index)
                if requester is not last:
                    last.write(receipts)
                    last, receipts = requester, b""
                # Those of one connection stand together mostly, and go out with one write.
                reached = durability or asked
                receipts += receipt(RECEIPT_FRONT, request_id, offset, index, reached)
                requester.unanswered_bytes -= len(batch)
                if requester.is_paused:
                    requester.keep_reading()
                offset += count
            topic.next_offset = offset
        last.write(receipts)
        self._producers.last_event_id = entries[-1].index
        self.published_count += sum([entry.count for entry in entries])

    def _answer_waiters(self, staged: list[Staged], entries: list[Entry]) -> None:
        """Answer those who sent a batch again while it was under way."""
        for (_, publishes), entry in zip(staged, entries, strict=True):
            offset, index = entry.base_offset, entry.index
            reached = self._commit_seam.durability_of(index)
            for _, _, _, count, producer_id, sequence, _ in publishes:
                for requester, request_id in self._waiters.pop((producer_id, sequence), ()):
                    requester.repeats_waiting -= 1
                    requester.write(
                        published_frame(request_id, offset, index, reached, repeat=True)
                    )
                offset += count

    def _refuse(self, collected: Collected, error: OnwardError) -> None:
        """Nothing was written: put the offsets back and say so to everyone who waits.

        Also to those who came meanwhile: they may rely on a topic that was not created.
        """
        self.gate.disk_is_full = self.gate.disk_is_full or isinstance(error, DiskFull)
        self._end_refusal()
        later, self._collected = self._collected, Collected()
        self._refuse_collected(collected, error)
        self._refuse_collected(later, error)
        self.inflight_bytes -= later.bytes
        # Rows may use what is kept for them, once no message shares their commit.
        may_fit = isinstance(error, DiskFull)
        self._refuse_rows(collected, error, again=may_fit and bool(collected.publishes))
        self._refuse_rows(later, error, again=may_fit)

    def _end_refusal(self) -> None:
        """Let the log continue after what it holds, once all commits in flight were refused."""
        self._is_failing = bool(self._in_flight)
        if not self._is_failing:
            self._log.unstage()

    def _refuse_collected(self, collected: Collected, error: OnwardError) -> None:
        for topic, publishes in collected.publishes.items():
            topic.staged_offset = topic.next_offset
            for publish in publishes:
                self.reject(publish, error)
        self.routes.forget()
        if collected.trace_created is not None:
            collected.trace_created.done(error)
        elif collected.rows_entries and TRACE_TOPIC in self._catalogue.by_name:
            # It is not there when the commit that creates it was refused before this one.
            trace = self._catalogue.by_name[TRACE_TOPIC]
            trace.staged_offset = trace.next_offset
        for change in (*collected.created, *collected.later):
            change.done(error)

    def _refuse_rows(self, collected: Collected, error: OnwardError, *, again: bool) -> None:
        """Give rows up, or try them again."""
        for rows, done, belongs_to_messages in collected.rows:
            if again and not belongs_to_messages:
                self.record(rows, done=done)
            else:
                done(error)

    def follow(self, entries: Buffer, *, sync: bool, done: Done) -> None:
        """Store entries that another node has committed, unchanged, and apply them when written.

        Raises `Corruption` when they do not continue this log, and `Overloaded` while entries that
        were handed over before are being refused.
        """
        assert not self.gate.is_leading, "a leader stores its own entries only"
        if self._is_failing:
            raise Overloaded("entries before these are refused", retry_after_ms=RETRY_AFTER_MS)
        write = self._log.follow(entries)
        collected = Collected()
        self._in_flight.append(collected)
        self._idle.clear()

        def settle(error: Exception | None) -> None:
            assert self._in_flight[0] is collected, "commits end in their order"
            self._in_flight.popleft()
            if error is None:
                self._log.finish(write)
                self._apply_followed(entries, write)
            elif not isinstance(error, OnwardError):
                self._fail(error)
                return
            else:
                self._end_refusal()
            if not self._in_flight:
                self._idle.set()
            done(error)

        self._commit_seam.append(write, sync=sync, done=settle)

    def _apply_followed(self, entries: Buffer, write: Write) -> None:
        view = memoryview(entries)
        for entry in write.entries:
            start = entry.body_position - write.position
            self._state.apply(entry, view[start : start + entry.body_bytes])
        if self.on_committed is not None:
            self.on_committed()

    def roll(self, *, done: Done) -> bool:
        """Begin a new segment if no commit is under way; return True if it was begun."""
        if self._in_flight or self._collected:
            return False
        collected = Collected()
        self._in_flight.append(collected)
        self._idle.clear()
        write = self._log.stage_roll()

        def settle(error: Exception | None) -> None:
            self._done(collected, write, error)
            done(error)

        self._commit_seam.append(write, sync=False, done=settle)
        return True

    async def drain(self) -> None:
        """Return when everything that was accepted is answered."""
        await self._idle.wait()

    def close(self) -> None:
        """Write nothing more: what members say from now on is refused."""
        self.gate.is_closed = True
