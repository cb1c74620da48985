"""A member of a broadcast: it reads every message itself, and nobody else knows how far it is.

    READ of each topic ──▶ filter ──▶ handed out ──▶ ack: the position moves when all before it are
         ▲                                 └─ retry: once more, after a pause, from memory
         └── connection lost: read on behind what has arrived

There are no leases: what arrived stays good when the connection is lost. `open` is what has arrived
and is not done; the position of a topic is where that begins. Positions are stored at first, at
most once a second, and at the end: who has not got anything yet also goes on where it was.

A topic that ended while the connection was lost, and whose name another one has, is not read on: in
the new one we begin where a new member would.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from onward.client.delivery import Delivery
from onward.client.delivery_batch import DeliveryBatch, Told, Verb, done, failed
from onward.client.link import Link
from onward.client.position import Place
from onward.delivery.filter import Filter
from onward.delivery.position import Position
from onward.delivery.ranges import Range, Ranges, merged, ranges_of
from onward.delivery.retry import RetryPolicy
from onward.errors import (
    OffsetOutOfRange,
    OnwardError,
    Overloaded,
    ProtocolError,
    Stopping,
    TopicEnded,
    UnknownTopic,
    from_wire,
)
from onward.message.entry import entry_heads
from onward.protocol.deliveries import Joined
from onward.protocol.frames import Kind
from onward.protocol.operations import Request, decode_reply, encode_request
from onward.protocol.operations.topics import DescribeTopic
from onward.protocol.payloads import (
    Read,
    Start,
    credit_frame,
    decode_end,
    decode_error,
    encode_json,
)

logger = logging.getLogger("onward.consumer")

CREDIT_BYTES = 16 << 20
CREDIT_BYTES_MIN = 64 << 10
STORE_S = 1.0
STORE_S_MAX = 5.0
RETRIES_MAX = 10_000


class Settings(msgspec.Struct):
    """What a group says of its messages, as far as its members have to do it."""

    filter: Filter = Filter()
    retry: RetryPolicy = RetryPolicy()


class Stream:
    """How far one topic is."""

    __slots__ = ("is_certain", "next_offset", "number", "open", "request_id", "topic")

    def __init__(self, topic: str, *, number: int, next_offset: int, is_certain: bool) -> None:
        self.topic = topic
        self.number = number
        self.open = Ranges()
        self.next_offset = next_offset
        self.is_certain = is_certain
        """The position is known to be of this topic, not of an earlier one of its name."""
        self.request_id = 0

    @property
    def position(self) -> Position:
        """The offset below which everything is done."""
        offset = self.next_offset if self.open.first is None else self.open.first
        return Position(offset, self.number)


class Following:
    """Reads the topics of a broadcast for one member."""

    def __init__(
        self, *, group: str, member: str,
        place: Place | None, positions: Mapping[str, Position], now_ms: Callable[[], int],
        push: Callable[[DeliveryBatch], None], finish: Callable[[OnwardError], None],
    ) -> None:  # fmt: skip
        self._loop = asyncio.get_running_loop()
        self._filter = Filter()
        self._policy = RetryPolicy()
        self._place = place
        self._kept = dict(positions)
        """Where we were in topics that are not read now: they stay where they were stored."""
        self._now_ms = now_ms
        self._push = push
        self._finish = finish
        self._link: Link | None = None
        self._credit_bytes = CREDIT_BYTES
        self._streams: dict[str, Stream] = {}
        self._timers: set[asyncio.TimerHandle] = set()
        self._acking: list[tuple[DeliveryBatch, list[Delivery], Told]] = []
        """What was acked one by one in this turn of the loop."""
        self._storing: asyncio.Future[None] | None = None
        self._store_timer: asyncio.TimerHandle | None = None
        self._stored: dict[str, Position] = {}
        self._is_closed = False
        self.is_pausing = False
        """What is given back stays away: nobody takes it any more."""
        self.group = group
        self.member = member
        self.is_lost = False

    @property
    def positions(self) -> dict[str, Position]:
        """How far each topic is, also those that are not read now."""
        read = {stream.topic: stream.position for stream in self._streams.values()}
        return self._kept | read

    def begin(self, link: Link, joined: Joined) -> None:
        """Read on over a new connection; `joined` says where to begin with what is new to us."""
        self._link = link
        self._credit_bytes = max(CREDIT_BYTES_MIN, CREDIT_BYTES // max(1, len(joined.topics)))
        for topic in joined.topics:
            number = joined.numbers.get(topic, 0)
            stream = self._streams.get(topic)
            if stream is None or not stream.position.is_of(number):
                kept = self._kept.get(topic)
                offset = self._start_of(topic, number, joined.positions.get(topic, 0))
                self._streams[topic] = Stream(
                    topic, number=number, next_offset=offset,
                    is_certain=kept is not None and kept.number == number > 0,
                )  # fmt: skip
        self.follow(joined)
        for stream in self._streams.values():
            self._read(stream)
        if self._store_timer is None:
            self._store()

    def follow(self, joined: Joined) -> None:
        """Take over what the group wants of its messages, for all that arrives from now on.

        Not only at first: a member may have joined without knowing it, and it may be changed.
        """
        settings = msgspec.convert({"filter": joined.filter, "retry": joined.retry}, Settings)
        self._filter, self._policy = settings.filter, settings.retry

    def _start_of(self, topic: str, number: int, offset: int) -> int:
        """Return where we begin with a topic: where we were in it, else at `offset`."""
        stream, kept = self._streams.get(topic), self._kept.pop(topic, None)
        was = kept if stream is None else stream.position
        if was is None:
            return offset
        if was.is_of(number):
            return was.offset
        logger.warning(
            "topic has ended, and another has its name: topic=%s group=%s member=%s was_at=%d "
            "begins_at=%d", topic, self.group, self.member, was.offset, offset,
        )  # fmt: skip
        return offset

    async def close(self) -> None:
        """Store how far we are, and stop reading."""
        if self._is_closed:
            return
        self._ack_gathered()
        self._is_closed = True
        for timer in (*self._timers, self._store_timer):
            if timer is not None:
                timer.cancel()
        self._timers.clear()
        if self._link is not None and self._link.is_open:
            for stream in self._streams.values():
                self._link.forget(stream.request_id)
                self._link.send(Kind.CANCEL, stream.request_id)
        for _ in range(2):  # one may be under way already, with older positions
            if self._storing is not None:
                await asyncio.wait([self._storing], timeout=STORE_S_MAX)
            self._store()
        if self._storing is not None:
            await asyncio.wait([self._storing], timeout=STORE_S_MAX)

    # --- reading -----------------------------------------------------------------------------

    def _ask(self, request: Request[Any], answer: Callable[[int, bytes | bytearray], None]) -> None:
        """Ask the broker; an answer over a connection that we no longer use is none."""
        link = self._link
        assert link is not None

        def take(kind: int, payload: bytes | bytearray) -> None:
            link.forget(request_id)
            if link is self._link and not self._is_closed:
                answer(kind, payload)

        request_id = link.expect(take)
        link.send(Kind.REQUEST, request_id, encode_request(request))

    def _read(self, stream: Stream) -> None:
        link = self._link
        if link is None or not link.is_open or self._is_closed or not self._is_read(stream):
            return
        stream.request_id = link.expect(partial(self._take, stream, link))
        read = Read(
            stream.topic, Start(offset=stream.next_offset), self._credit_bytes, follow=True,
            number=stream.number or msgspec.UNSET,
        )  # fmt: skip
        link.send(Kind.READ, stream.request_id, encode_json(read))

    def _read_again(self, stream: Stream, link: Link | None) -> None:
        if link is self._link:  # over a new connection it is read already
            self._read(stream)

    def _is_read(self, stream: Stream) -> bool:
        """Tell whether it has not been replaced by one of another topic of its name."""
        return self._streams.get(stream.topic) is stream

    def _find_place(self, stream: Stream) -> None:
        """Our place is no more in the topic: ask what it holds, and read on there."""
        request = DescribeTopic(topic=stream.topic)

        def described(kind: int, payload: bytes | bytearray) -> None:
            if kind != Kind.REPLY:
                self._ended(stream, decode_error(payload))
                return
            topic = decode_reply(payload, request)
            first, end = topic.first_offset, topic.next_offset
            # A topic that ends before our place is not the one that it was, or it has lost its
            # end: a replica was promoted that did not have it.
            is_another = stream.next_offset > end and not stream.is_certain
            stream.next_offset = first if is_another else min(end, max(first, stream.next_offset))
            self._read(stream)

        self._ask(request, described)

    def _take(self, stream: Stream, link: Link, kind: int, payload: bytes | bytearray) -> None:
        if kind == Kind.ENTRIES:
            self._arrived(stream, link, payload)
            return
        link.forget(stream.request_id)
        if kind == Kind.END:
            end = decode_end(payload)
            self._ended(stream, from_wire({"code": end.code, "message": end.message}))
        else:
            self._ended(stream, decode_error(payload))

    def _ended(self, stream: Stream, error: OnwardError) -> None:
        """A topic cannot be read: for now, from there, or any more."""
        if self._is_closed or not self._is_read(stream):
            return
        if isinstance(error, Overloaded | Stopping):
            pause_s = max(getattr(error, "retry_after_ms", 0), 50) / 1000
            self._later(pause_s, partial(self._read_again, stream, self._link))
        elif isinstance(error, OffsetOutOfRange):
            self._find_place(stream)
        else:
            self._leave(stream, error)

    def _leave(self, stream: Stream, error: OnwardError) -> None:
        """Read a topic no more on this connection; on the next we go on where we were."""
        del self._streams[stream.topic]
        if not isinstance(error, TopicEnded | UnknownTopic):
            self._kept[stream.topic] = stream.position
        if not self._streams:
            self._finish(error)
            return
        logger.warning(
            "topic is read no more: topic=%s group=%s member=%s error=%s",
            stream.topic, self.group, self.member, error,
        )  # fmt: skip

    def _arrived(self, stream: Stream, link: Link, entries: bytes | bytearray) -> None:
        ranges = merged(
            (max(stream.next_offset, entry.base_offset), entry.base_offset + entry.count)
            for entry in entry_heads(entries)
        )
        give = partial(self._give, stream, link, len(entries))
        if ranges:
            stream.next_offset, stream.is_certain = ranges[-1][1], True
        batch = DeliveryBatch(
            self, entries, topic=stream.topic, number=stream.number, lease=0, on_taken=give,
            grants=[(start, end, 1, 1) for start, end in ranges],
        )  # fmt: skip
        stream.open.update(ranges)
        if self._filter:
            self._push_wanted(stream, batch, give)
        elif ranges:
            self._push(batch)
        else:
            give()

    def _push_wanted(self, stream: Stream, batch: DeliveryBatch, give: Callable[[], None]) -> None:
        try:
            wanted = batch.wanted_by(self._filter)
        except ProtocolError:
            wanted = list(batch.held)  # it is rejected when it is opened as a message
        kept = Ranges(wanted)
        for start, end in list(batch.held):
            for gap_start, gap_end in kept.gaps(start, end):
                stream.open.remove(gap_start, gap_end)
        if wanted:
            self._push(batch.again(wanted, attempt=1, deliveries=1, on_taken=give))
        else:
            give()
        self._store_soon()

    def _give(self, stream: Stream, link: Link, size: int) -> None:
        if link.is_open and link is self._link and not self._is_closed:
            link.write(credit_frame(stream.request_id, size))

    # --- outcomes ----------------------------------------------------------------------------

    def ack(self, batch: DeliveryBatch, ranges: Sequence[Range]) -> asyncio.Future[None]:
        """Move the position behind these ranges, when nothing before them is open."""
        stream = self._streams.get(batch.topic)
        # What came from a topic that has ended says nothing of the one that has its name now.
        if stream is not None and stream.number == batch.number:
            for start, end in ranges:
                stream.open.remove(start, end)
            self._store_soon()
        return done()

    def ack_together(self, batch: DeliveryBatch, told: Told) -> list[Delivery]:
        """Return a list for messages of a batch: what is in it when the turn ends is done."""
        if not self._acking:
            self._loop.call_soon(self._ack_gathered)
        deliveries: list[Delivery] = []
        self._acking.append((batch, deliveries, told))
        return deliveries

    def _ack_gathered(self) -> None:
        acking, self._acking = self._acking, []
        for batch, deliveries, told in acking:
            batch.acking = None
            self.ack(batch, ranges_of([delivery.offset for delivery in deliveries]))
            told(deliveries, None)

    def settle(
        self, batch: DeliveryBatch, ranges: Sequence[Range], *, do: Verb,
        after_ms: int | None = None, at_ms: int | None = None, count: bool = True, cause: str = "",
    ) -> asyncio.Future[None]:  # fmt: skip
        """Deliver again from memory, or give up."""
        if do == "renew" or self._is_closed or not ranges:
            return done()
        _, _, attempt, deliveries = batch.grants[0]
        if do == "retry" and count and attempt >= self._policy.limit:
            do, cause = "reject", cause or "out of attempts"
        if do == "reject":
            logger.warning(
                "message was rejected: topic=%s offset=%d group=%s member=%s attempt=%d cause=%s",
                batch.topic, ranges[0][0], self.group, self.member, attempt, cause,
            )  # fmt: skip
            return self.ack(batch, ranges)
        if do == "release":
            if not self.is_pausing:
                self._push(batch.again(ranges, attempt=attempt, deliveries=deliveries + 1))
            return done()
        if len(self._timers) >= RETRIES_MAX:
            batch.held.update(list(ranges))
            return failed(Overloaded(f"{RETRIES_MAX} retries wait in group {self.group!r} already"))
        if at_ms is not None:
            after_ms = max(0, at_ms - self._now_ms())
        elif after_ms is None:
            after_ms = self._policy.delay_after(attempt, spread=0.5)
        again = batch.again(ranges, attempt=attempt + count, deliveries=deliveries + 1)
        self._later(after_ms / 1000, partial(self._push, again))
        return done()

    def _later(self, pause_s: float, act: Callable[[], None]) -> None:
        def now() -> None:
            self._timers.discard(timer)
            act()

        timer = self._loop.call_later(pause_s, now)
        self._timers.add(timer)

    # --- storing -----------------------------------------------------------------------------

    def _store_soon(self) -> None:
        if self._place is not None and self._store_timer is None and not self._is_closed:
            self._store_timer = self._loop.call_later(STORE_S, self._store)

    def _store(self) -> None:
        self._store_timer = None
        positions, link = self.positions, self._link
        if self._place is None or link is None or positions == self._stored:
            return
        if self._storing is not None:
            self._store_soon()
            return
        self._stored = positions
        self._storing = self._place.save(positions, link)
        self._storing.add_done_callback(self._was_stored)

    def _was_stored(self, storing: asyncio.Future[None]) -> None:
        self._storing = None
        error = None if storing.cancelled() else storing.exception()
        if error is not None:
            self._stored = {}
            self._store_soon()
            logger.warning("position was not stored: group=%s error=%s", self.group, error)
