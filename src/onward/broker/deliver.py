"""THE READ PATH: from the log to a reader.

    open ──▶ pumping ──▶ waiting for new messages ──▶ pumping ...
                 │  └──▶ waiting for credit, for the socket, for the disk, for room ──▶ pumping
                 └─────▶ ended: cancelled, its end or the topic's was reached, or the topic ended

A reader gets raw entries, with their checksums verified and nothing decoded, half a mebibyte at
a time, as long as it has credit and its socket takes them: the log is the buffer, not the memory
of the broker. What lies in the page cache is read at once; what needs the disk is read in a
thread, so one reader of old messages delays nobody.

What sockets have not taken has a limit in all, too: above it readings queue for room, and go on in
turn. Whose socket takes nothing is not heard either, and is dropped as silent: its room is free.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from msgspec import UnsetType

from onward.broker.catalogue import Catalogue, Topic
from onward.broker.group_ranges import outside
from onward.broker.write_gate import WriteGate
from onward.clock import Clock
from onward.errors import (
    Corruption,
    Forbidden,
    InvalidRequest,
    OffsetOutOfRange,
    OnwardError,
    Overloaded,
    TopicEnded,
    Unavailable,
)
from onward.log.disk import Buffer
from onward.log.log import Log
from onward.log.segment import Segment
from onward.log.span import Span
from onward.message.relative import resolve_ms
from onward.protocol.frames import Kind
from onward.protocol.payloads import End, Read, Start, encode_json

if TYPE_CHECKING:
    from onward.broker.session import Session

logger = logging.getLogger("onward.deliver")

READ_BYTES_MAX = 512 << 10
# When sockets hold half of this in all, each reader gets shorter stretches; at the whole, none.
UNSENT_BYTES_MAX = 64 << 20
CROWDED_READ_BYTES_MAX = 16 << 10
CROWD_CHECK_S = 0.25
READS_PER_SESSION_MAX = 1_000
DAMAGED_PLACES_MAX = 1_000
ENDLESS = 2**63
"""Where a READ ends that nobody gave an end: no offset is so large."""

InThread = Callable[[Callable[[], Buffer | None]], Awaitable[Buffer | None]]


class Reading:
    """One READ that is open."""

    __slots__ = ("credit_bytes", "end_offset", "follow", "hint", "is_busy", "is_careful", "kept",
                 "next_offset", "request_id", "session", "topic")  # fmt: skip

    def __init__(
        self, session: Session, request_id: int, topic: Topic, *, next_offset: int,
        end_offset: int, credit_bytes: int, follow: bool,
    ) -> None:  # fmt: skip
        self.session = session
        self.request_id = request_id
        self.topic = topic
        self.next_offset = next_offset
        self.end_offset = end_offset
        self.credit_bytes = credit_bytes
        self.follow = follow
        self.kept = False
        """Whether it is sent what is carried for groups, below the first offset of the topic."""
        self.hint: Segment | None = None
        self.is_busy = False
        """A step is planned or under way: nothing else may start one."""
        self.is_careful = False
        """Something damaged is near: entry by entry, so that what stands before it is sent."""


class Delivering:
    """All open READs of a broker."""

    def __init__(
        self, *, log: Log, catalogue: Catalogue, gate: WriteGate, in_thread: InThread, clock: Clock,
        create_on_use: Callable[[str, Callable[[OnwardError | None], None]], Topic],
    ) -> None:  # fmt: skip
        self._create_on_use = create_on_use
        self._log = log
        self._catalogue = catalogue
        self._gate = gate
        self._in_thread = in_thread
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._open: dict[Session, dict[int, Reading]] = {}
        self._unsent: dict[Session, int] = {}
        self._unsent_bytes = 0
        self._from_disk_bytes = 0
        """How much is being read from the disk now: it will be unsent next."""
        self._queued: dict[Reading, None] = {}
        """Those that wait for room, the first to come first."""
        self._admission: asyncio.Handle | None = None
        self._crowd_check: asyncio.TimerHandle | None = None
        self._from_disk: set[asyncio.Task[None]] = set()
        self._damaged: dict[tuple[int, int], None] = {}
        """Places that were found damaged and are in the broker's log, the oldest first."""
        self.delivered_bytes = 0

    # --- what sessions ask for ---------------------------------------------------------------

    def open(self, session: Session, request_id: int, read: Read) -> None:
        """Begin a READ."""
        readings = self._open.setdefault(session, {})
        if request_id in readings:
            raise InvalidRequest(f"request id {request_id} is already reading")
        if len(readings) >= READS_PER_SESSION_MAX:
            raise Overloaded(f"a connection reads at most {READS_PER_SESSION_MAX} topics at once")
        topic = self._find(session, request_id, read)
        reading = Reading(
            session, request_id, topic, next_offset=self._first_of(topic, read),
            end_offset=ENDLESS if isinstance(read.end, UnsetType) else read.end,
            credit_bytes=read.credit_bytes, follow=read.follow,
        )  # fmt: skip
        reading.kept = read.kept is True
        topic.uses += 1
        readings[request_id] = reading
        self._step_soon(reading)

    def _find(self, session: Session, request_id: int, read: Read) -> Topic:
        """Return the topic; a leader creates one that is waited for, as by a publish."""
        if not isinstance(read.number, UnsetType):
            return self._find_again(read.topic, read.number)
        creates = read.follow and self._gate.is_leading
        if not creates or read.topic in self._catalogue.by_name:
            return self._catalogue.find_readable(read.topic)

        def done(error: OnwardError | None) -> None:
            reading = self._open.get(session, {}).get(request_id)
            if error is not None and reading is not None:
                self._end(reading, error.code, str(error))

        return self._create_on_use(read.topic, done)

    def _find_again(self, name: str, number: int) -> Topic:
        """Return the topic that was read before: offsets of another one mean other messages."""
        topic = self._catalogue.by_name.get(name)
        if topic is None or topic.number != number:
            raise TopicEnded(f"topic {name!r} has ended since it was read from last")
        return self._catalogue.find_readable(name)

    def credit(self, session: Session, request_id: int, credit_bytes: int) -> None:
        """Let a READ send more; for one that has just ended this means nothing."""
        reading = self._open.get(session, {}).get(request_id)
        if reading is not None:
            reading.credit_bytes += credit_bytes
            self._step_soon(reading)

    def cancel(self, session: Session, request_id: int) -> None:
        """End a READ because its client wants no more."""
        reading = self._open.get(session, {}).get(request_id)
        if reading is not None:
            self._end(reading, "cancelled", "cancelled by the client")

    def resume(self, session: Session) -> None:
        """The socket of this session takes bytes again."""
        self.note_unsent(session, session.unsent_bytes)
        for reading in self._open.get(session, {}).values():
            self._step_soon(reading)

    def forget(self, session: Session) -> None:
        """Drop everything a closed session was reading."""
        self.note_unsent(session, 0)
        for reading in self._open.pop(session, {}).values():
            self._stop_waiting(reading)

    # --- what the broker tells ---------------------------------------------------------------

    def wake(self, topic: Topic) -> None:
        """New messages are there."""
        waiting, topic.waiting = topic.waiting, None
        for reading in waiting or ():
            self._step(reading)

    def end_topic(self, topic: Topic, reason: str) -> None:
        """Tell the readers of a topic that it is no more."""
        self._end_all(topic, TopicEnded(f"topic {topic.name!r} was {reason}"))

    def end_readers(self, topic: Topic) -> None:
        """Tell the readers of a topic that its rule forbids them to go on."""
        self._end_all(topic, Forbidden(f"topic {topic.name!r} is {topic.record.rule} now"))

    def _end_all(self, topic: Topic, error: OnwardError) -> None:
        topic.waiting = None
        for readings in list(self._open.values()):
            for reading in [one for one in readings.values() if one.topic is topic]:
                self._end(reading, error.code, str(error))

    def is_read(self, topic: Topic) -> bool:
        """Return True while a READ of this topic is open."""
        return any(
            reading.topic is topic for one in self._open.values() for reading in one.values()
        )

    def readers_of(self, topic: Topic) -> int:
        """Return how many READs of this topic wait for new messages."""
        return len(topic.waiting or ())

    def lead(self) -> None:
        """End the sessions that read on behind the end of a topic: what they read is lost.

        A new history begins here, and WELCOME says after which event.
        """
        for session, readings in list(self._open.items()):
            if any(one.next_offset > one.topic.next_offset for one in readings.values()):
                session.goodbye(Unavailable("another history begins here"))

    def _first_of(self, topic: Topic, read: Read) -> int:
        start = read.start
        if isinstance(start, Start) and start.offset is not None:
            # A reader that goes on here may have read more from the leader of this node.
            is_continued = not isinstance(read.number, UnsetType) and not self._gate.is_leading
            if is_continued and start.offset > topic.next_offset:
                return start.offset
        if read.kept is True and isinstance(start, Start) and start.offset is not None:
            return self._checked(topic, start.offset, first_offset=0)
        return self.start_offset(topic, start)

    def start_offset(self, topic: Topic, start: str | Start) -> int:
        """Return the offset that a READ begins with."""
        if start == "earliest":
            return topic.first_offset
        if start == "latest":
            return topic.next_offset
        assert isinstance(start, Start)
        if start.offset is not None:
            return self._checked(topic, start.offset)
        if start.time_ms is not None:
            time_ms = resolve_ms(start.time_ms, now_ms=self._clock.now_ms())
            found = self._log.offset_from_time(topic.number, time_ms)
        else:
            found = self._log.offset_after_index(topic.number, start.event_id or 0)
        return topic.next_offset if found is None else max(found, topic.first_offset)

    def _checked(self, topic: Topic, offset: int, *, first_offset: int | None = None) -> int:
        first_offset = topic.first_offset if first_offset is None else first_offset
        if not first_offset <= offset <= topic.next_offset:
            raise outside(topic, offset)
        return offset

    # --- pump --------------------------------------------------------------------------------

    def _step_soon(self, reading: Reading) -> None:
        """Take the next step in the loop's next turn: big readers share the loop with others."""
        if not reading.is_busy:
            reading.is_busy = True
            self._loop.call_soon(self._planned_step, reading)

    def _planned_step(self, reading: Reading) -> None:
        reading.is_busy = False
        self._step(reading)

    def _step(self, reading: Reading) -> None:
        """Send the next stretch, if there is one, the reader can take it, and there is room."""
        if not self._can_step(reading):
            return
        if reading.next_offset >= reading.end_offset:
            self._end(reading, "end", f"offset {reading.end_offset} is reached")
        elif reading.next_offset >= reading.topic.next_offset:
            self._at_end(reading)
        elif reading.credit_bytes > 0:
            if self._queued or not self.has_room:
                self._wait_for_room(reading)
            else:
                self._send_next(reading)

    def _can_step(self, reading: Reading) -> bool:
        return not reading.is_busy and self._is_open(reading) and reading.session.writable

    def _at_end(self, reading: Reading) -> None:
        if not reading.follow:
            self._end(reading, "end", "the end of the topic is reached")
        elif reading.topic.waiting is None:
            reading.topic.waiting = {reading: None}
        else:
            reading.topic.waiting[reading] = None

    def _send_next(self, reading: Reading) -> None:
        span = None
        try:
            span = self._plan(reading)
            if span is None or span.first_offset >= reading.end_offset:
                # Nothing is stored between here and the end: it was retained away or removed.
                reading.next_offset = min(reading.topic.next_offset, reading.end_offset)
                self._step_soon(reading)
                return
            entries = self._log.read(span, wait=False)
        except (OSError, OnwardError) as error:
            self._fail(reading, error, span)
            return
        if entries is None:
            self._read_from_disk(reading, span)
        else:
            self._send(reading, span, entries)

    def _plan(self, reading: Reading) -> Span | None:
        if reading.kept and reading.next_offset < reading.topic.first_offset:
            span = self._plan_carried(reading)
            if span is not None:
                return span
            reading.next_offset = reading.topic.first_offset
        if reading.next_offset < reading.topic.first_offset:
            raise OffsetOutOfRange(
                f"messages {reading.next_offset} to {reading.topic.first_offset - 1} of topic "
                f"{reading.topic.name!r} were retained away before they were read"
            )
        return self._log.plan(
            reading.topic.number, reading.next_offset, hint=reading.hint,
            end_offset=reading.end_offset,
            bytes_max=0 if reading.is_careful else self._bytes_max(reading),
        )  # fmt: skip

    def _plan_carried(self, reading: Reading) -> Span | None:
        end = min(reading.end_offset, reading.topic.first_offset)
        return self._log.plan_carried(
            reading.topic.number, reading.next_offset, end_offset=end,
            bytes_max=0 if reading.is_careful else self._bytes_max(reading),
        )  # fmt: skip

    def _bytes_max(self, reading: Reading) -> int:
        is_crowded = self._unsent_bytes >= UNSENT_BYTES_MAX // 2
        limit = CROWDED_READ_BYTES_MAX if is_crowded else READ_BYTES_MAX
        return min(limit, max(reading.credit_bytes, 0))

    def _send(self, reading: Reading, span: Span, entries: Buffer) -> None:
        if span.first_offset >= reading.topic.first_offset:
            reading.hint = span.segment
        reading.next_offset = span.end_offset
        reading.credit_bytes -= len(entries)
        self.delivered_bytes += len(entries)
        unsent_bytes = reading.session.send_entries(reading.request_id, entries)
        self.note_unsent(reading.session, unsent_bytes)
        self._step_soon(reading)

    def note_unsent(self, session: Session, unsent_bytes: int) -> None:
        """Keep count of what sockets have not taken: it is what readers cost in memory."""
        self._unsent_bytes += unsent_bytes - self._unsent.pop(session, 0)
        if unsent_bytes:
            self._unsent[session] = unsent_bytes
        self._admit_soon()

    def _read_from_disk(self, reading: Reading, span: Span) -> None:
        reading.is_busy = True
        self._from_disk_bytes += span.length
        task = self._loop.create_task(self._finish_from_disk(reading, span))
        self._from_disk.add(task)
        task.add_done_callback(partial(self._ended_from_disk, reading, span))

    def _ended_from_disk(self, reading: Reading, span: Span, task: asyncio.Task[None]) -> None:
        self._from_disk.discard(task)
        self._from_disk_bytes -= span.length
        self._admit_soon()
        if task.cancelled() or (error := task.exception()) is None:
            return
        logger.error("reading topic %r failed", reading.topic.name, exc_info=error)
        reading.is_busy = False
        if self._is_open(reading):
            failure = Unavailable(f"topic {reading.topic.name!r} cannot be read now: {error}")
            self._end(reading, failure.code, str(failure))

    async def _finish_from_disk(self, reading: Reading, span: Span) -> None:
        try:
            entries = await self._in_thread(lambda: self._log.read(span, wait=True))
        except (OSError, OnwardError) as error:
            reading.is_busy = False
            if self._is_open(reading):
                self._fail(reading, error, span)
            return
        reading.is_busy = False
        if self._is_open(reading) and entries is not None:
            self._send(reading, span, entries)

    # --- room --------------------------------------------------------------------------------

    @property
    def unsent_bytes(self) -> int:
        """Return what sockets have not taken, and what is being read from the disk for them."""
        return self._unsent_bytes + self._from_disk_bytes

    @property
    def has_room(self) -> bool:
        """Tell whether sockets and the disk hold less than they may in all."""
        return self._unsent_bytes + self._from_disk_bytes < UNSENT_BYTES_MAX

    def _wait_for_room(self, reading: Reading) -> None:
        self._queued[reading] = None
        if self._crowd_check is None:
            self._check_crowd()

    def _check_crowd(self) -> None:
        self._crowd_check = None
        if self._queued:
            self._crowd_check = self._loop.call_later(CROWD_CHECK_S, self._check_crowd)
            self.look_at_sockets()

    def look_at_sockets(self) -> None:
        """Ask the sockets again: one that never was full does not tell when it is empty."""
        for session in list(self._unsent):
            self.note_unsent(session, session.unsent_bytes)

    def _admit_soon(self) -> None:
        if self._queued and self._admission is None and self.has_room:
            self._admission = self._loop.call_soon(self._admit)

    def _admit(self) -> None:
        """Let one go on that waited for room, then others have their turn of the loop."""
        self._admission = None
        while self._queued and self.has_room:
            reading = next(iter(self._queued))
            del self._queued[reading]
            end = min(reading.topic.next_offset, reading.end_offset)
            if self._can_step(reading) and reading.next_offset < end:
                self._send_next(reading)
                break
        self._admit_soon()

    # --- end ---------------------------------------------------------------------------------

    def _is_open(self, reading: Reading) -> bool:
        return self._open.get(reading.session, {}).get(reading.request_id) is reading

    def _fail(self, reading: Reading, error: OSError | OnwardError, span: Span | None) -> None:
        if span is not None and span.segment not in self._log.segments:
            # Retention took the segment away meanwhile: look again where to go on.
            self._step_soon(reading)
            return
        if span is not None and len(span.rows) > 1:
            reading.is_careful = True
            self._step_soon(reading)
            return
        if isinstance(error, OSError):
            error = Corruption(f"topic {reading.topic.name!r} cannot be read: {error}")
        if isinstance(error, Corruption):
            self.note_damage(reading.topic, reading.next_offset, str(error))
        self._end(reading, error.code, str(error))

    def note_damage(self, topic: Topic, offset: int, text: str) -> None:
        """Say it once for each place: who reads it again and again must not fill the log."""
        place = (topic.number, offset)
        if place in self._damaged:
            return
        if len(self._damaged) >= DAMAGED_PLACES_MAX:
            del self._damaged[next(iter(self._damaged))]
        self._damaged[place] = None
        logger.error(
            "topic %r is damaged, messages from offset %d on cannot be read: %s",
            topic.name, offset, text,
        )  # fmt: skip

    def _end(self, reading: Reading, code: str, message: str) -> None:
        self._stop_waiting(reading)
        self._open.get(reading.session, {}).pop(reading.request_id, None)
        end = End(code, message, reading.next_offset)
        reading.session.send(Kind.END, reading.request_id, encode_json(end))

    def _stop_waiting(self, reading: Reading) -> None:
        self._queued.pop(reading, None)
        if reading.topic.waiting is not None:
            reading.topic.waiting.pop(reading, None)
