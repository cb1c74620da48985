"""Publishing: messages that are published together travel together, and a repeat is safe.

    publish() ──▶ open batch (per topic) ──▶ sealed, with a sequence ──▶ sent ──▶ answered
                     one flush per turn of the loop        └── connection lost: sent again

Every batch carries the producer's id and a sequence, so the broker stores it once however often
it is sent. At most as many sequences are unanswered as the broker remembers; while that many are
under way, batches fill. What an overloaded broker refused is sent again, before anything new and
after all that was sent has an answer: so the order is kept. Who finds no room waits in line. A
publish fails with `OutcomeUnknown` only when it may have been stored: it was sent, and there was no
answer in time. What was not sent in time is taken back: `NotConnected`, or the error that the
broker refused it with until then. What a node refused because it does not lead waits for the
leader, which the keeper looks for, and is sent there with the same sequences.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, cast

from onward.client.link import Link
from onward.client.optional_columns import Optional
from onward.client.receipt import DURABILITIES, BatchReceipt, Receipt
from onward.client.scheduled import ScheduledReceipt
from onward.clock import Clock
from onward.errors import (
    InvalidRequest,
    MessageTooLarge,
    NotConnected,
    NotLeader,
    OnwardError,
    OutcomeUnknown,
    Overloaded,
    Stopping,
)
from onward.message.batch import encode_batch
from onward.message.names import check_topic_name
from onward.protocol.frames import Kind
from onward.protocol.operations.schedule import SCHEDULE_TOPIC
from onward.protocol.payloads import (
    Published,
    decode_counted_from,
    decode_error,
    decode_published,
    publish_head,
)

if TYPE_CHECKING:
    from onward.client.keeper import Keeper
    from onward.client.schedule_calls import ScheduleCalls

BATCH_MESSAGES_MAX = 4_096
BATCH_BYTES_MAX = 1 << 20
WAITING_BYTES_MAX = 64 << 20
CHECK_EVERY_S = 0.25
MESSAGE_COST_BYTES = 64


class OpenBatch:
    """Single publishes to one topic that will travel together."""

    __slots__ = (
        "bodies", "bytes", "calls", "deadline", "durability", "futures", "is_sealed", "optional",
        "topic",
    )  # fmt: skip

    def __init__(self, topic: str, durability: int, deadline: float) -> None:
        self.topic = topic
        self.durability = durability
        self.deadline = deadline
        self.bodies: list[bytes] = []
        self.futures: list[asyncio.Future[Receipt]] = []
        self.optional: Optional | None = None
        self.bytes = 0
        self.is_sealed = False
        self.calls: ScheduleCalls | None = None
        """In a batch of the schedule: what its receipts cancel and move with."""

    def settle(
        self, offset: int, event_id: int, durability: str, counted_from_ms: int | None
    ) -> None:
        """Give each message its receipt."""
        if self.calls is not None:
            self._settle_scheduled(self.calls, offset, event_id, durability, counted_from_ms)
            return
        topic, new_tuple = self.topic, tuple.__new__
        for future in self.futures:
            if not future.done():
                # Without the constructor, which costs twice as much: there is one per message.
                future.set_result(new_tuple(Receipt, (topic, offset, event_id, durability)))
            offset += 1

    def _settle_scheduled(
        self, calls: ScheduleCalls, number: int, event_id: int, durability: str,
        counted_from_ms: int | None,
    ) -> None:  # fmt: skip
        assert self.optional is not None, "a scheduled message says when and where to"
        optional = self.optional
        times = zip_longest(optional.due_at_ms or (), optional.delays_ms or ())
        for future, topic, (at_ms, delay_ms) in zip(
            self.futures, optional.topics or (), times, strict=True
        ):
            if not future.done():
                if delay_ms is not None and counted_from_ms is not None:
                    at_ms = counted_from_ms + delay_ms  # as the broker resolved it
                receipt = ScheduledReceipt(
                    str(topic), number, due_at_ms=at_ms or 0, event_id=event_id,
                    durability=durability, calls=calls,
                )  # fmt: skip
                # Who scheduled it knows that this is no plain receipt.
                future.set_result(cast(Receipt, receipt))
            number += 1

    @property
    def first_delay(self) -> tuple[int, int] | None:
        """Which message is the first with a delay, and its delay; None when none has one."""
        delays_ms = (self.optional and self.optional.delays_ms) or ()
        found = ((row, delay_ms) for row, delay_ms in enumerate(delays_ms) if delay_ms is not None)
        return next(found, None)

    def split(self) -> list[OpenBatch]:
        """Return a batch per message: one of them is refused, the others are not to suffer."""
        columns = {} if self.optional is None else self.optional.columns(len(self.bodies))
        singles = []
        for number, body in enumerate(self.bodies):
            single = OpenBatch(self.topic, self.durability, self.deadline)
            single.bodies, single.futures = [body], [self.futures[number]]
            single.calls = self.calls
            single.bytes = len(body) + MESSAGE_COST_BYTES
            if columns:
                single.optional = Optional()
                for name, column in columns.items():
                    single.optional.set(name, 0, column[number])
            singles.append(single)
        return singles

    def remove(self, future: asyncio.Future[Receipt]) -> int:
        """Take one message out; return how many bytes fewer wait."""
        number = self.futures.index(future)
        del self.futures[number]
        size = len(self.bodies.pop(number)) + MESSAGE_COST_BYTES
        if self.optional is not None:
            self.optional.remove(number)
        self.bytes -= size
        return size

    @property
    def is_done(self) -> bool:
        """Tell whether nobody waits for any of them any more."""
        return all(future.done() for future in self.futures)

    def fail(self, error: OnwardError) -> None:
        """Tell each publisher."""
        for future in self.futures:
            if not future.done():
                future.set_exception(error)


class WholeBatch:
    """What `publish_many` sends: one atomic batch with one receipt."""

    __slots__ = ("bytes", "deadline", "durability", "encoded", "future", "size", "topic")

    def __init__(
        self, topic: str, durability: int, deadline: float, *, size: int, bytes_: int,
        encoded: Callable[[int, int], bytes], future: asyncio.Future[BatchReceipt],
    ) -> None:  # fmt: skip
        self.topic = topic
        self.durability = durability
        self.deadline = deadline
        self.size = size
        self.bytes = bytes_
        self.encoded = encoded
        self.future = future

    def settle(
        self, offset: int, event_id: int, durability: str, counted_from_ms: int | None
    ) -> None:
        """Give the receipt."""
        if not self.future.done():
            self.future.set_result(
                BatchReceipt(self.topic, offset, self.size, event_id, durability)
            )

    def fail(self, error: OnwardError) -> None:
        """Tell the publisher."""
        if not self.future.done():
            self.future.set_exception(error)


class Sent:
    """A sealed batch: its bytes never change again, so that a repeat is the same."""

    __slots__ = ("batch", "counted_from_ms", "encoded", "is_sent", "sequence", "was_unanswered")

    def __init__(self, batch: OpenBatch | WholeBatch, sequence: int, encoded: bytes) -> None:
        self.batch = batch
        self.sequence = sequence
        self.encoded = encoded
        self.counted_from_ms: int | None = None
        """When the broker accepted it last, by its clock; only told of what has delays."""
        self.is_sent = False
        """It was sent over this link, and has no answer yet."""
        self.was_unanswered = False
        """It was sent over a link that was lost before the answer: it may still lie there."""

    @property
    def may_be_stored(self) -> bool:
        """Tell whether nobody can say that it is not: a refusal speaks for its own link only."""
        return self.is_sent or self.was_unanswered


class Producer:
    """Publishes for one client."""

    def __init__(
        self, *, producer_id: int, timeout_s: float, clock: Clock,
        keeper: Keeper,
    ) -> None:  # fmt: skip
        self._keeper = keeper
        self._loop = asyncio.get_running_loop()
        self._producer_id = producer_id
        self._clock = clock
        self._timeout_s = timeout_s
        self._link: Link | None = None
        self._open: dict[str, OpenBatch] = {}
        """The batch of each topic that is being filled."""
        self._waiting: deque[OpenBatch | WholeBatch] = deque()
        self._sent: dict[int, Sent] = {}
        self._next_sequence = 1
        self._flush_is_due = False
        self._refusal: OnwardError | None = None
        """Why the broker takes nothing now; None when it does."""
        self._not_before = 0.0
        self._check: asyncio.TimerHandle | None = None
        self._line: deque[asyncio.Event] = deque()
        """Those who wait for room, in the order in which they came."""
        self._settled = asyncio.Event()
        self._repeats: set[asyncio.Task[None]] = set()
        """Those who ask when the delays of a batch count from that was stored before."""
        self.waiting_bytes = 0
        self.is_closed = False

    # --- taking ------------------------------------------------------------------------------

    def publish(
        self, topic: str, body: bytes, *, durability: int, optional: dict[str, object] | None
    ) -> asyncio.Future[Receipt]:
        """Add one message to the open batch of its topic."""
        batch = self._open.get(topic)
        if batch is None or batch.durability != durability:
            self._seal_open(topic)
            batch = self._open[topic] = self._new_batch(topic, durability)
        if optional:
            self._set_optional(batch, optional)
        future: asyncio.Future[Receipt] = self._loop.create_future()
        batch.bodies.append(body)
        batch.futures.append(future)
        size = len(body) + MESSAGE_COST_BYTES
        batch.bytes += size
        self.waiting_bytes += size
        if len(batch.bodies) >= BATCH_MESSAGES_MAX or batch.bytes >= BATCH_BYTES_MAX:
            self._seal_open(topic)
        if not self._flush_is_due:
            self._flush_soon()
        return future

    def schedule(
        self, body: bytes, *, durability: int, optional: dict[str, object], calls: ScheduleCalls,
    ) -> asyncio.Future[ScheduledReceipt]:  # fmt: skip
        """Add one message to the open batch of the schedule.

        Under a business key it travels alone: the broker may refuse it, and then only it.
        """
        is_alone = "uniques" in optional
        if is_alone:
            self._seal_open(SCHEDULE_TOPIC)
        future = self.publish(SCHEDULE_TOPIC, body, durability=durability, optional=optional)
        batch = self._open.get(SCHEDULE_TOPIC) or self._waiting[-1]
        assert isinstance(batch, OpenBatch)
        batch.calls = calls
        if is_alone:
            self._seal_open(SCHEDULE_TOPIC)
        return cast("asyncio.Future[ScheduledReceipt]", future)

    def publish_many(
        self, topic: str, bodies: list[bytes], *, durability: int,
        columns: dict[str, Sequence[object]], compression: str | None, deadline: float | None,
    ) -> asyncio.Future[BatchReceipt]:  # fmt: skip
        """Send all of them as one batch."""
        time_ms = self._clock.now_ms()

        def encoded(producer_id: int, sequence: int) -> bytes:
            return encode_batch(
                bodies, producer_id=producer_id, sequence=sequence, time_ms=time_ms,
                compression=compression, **columns,  # type: ignore[arg-type]
            )  # fmt: skip

        future: asyncio.Future[BatchReceipt] = self._loop.create_future()
        deadline = deadline if deadline is not None else self._loop.time() + self._timeout_s
        self._add(
            WholeBatch(
                topic, durability, deadline, size=len(bodies), encoded=encoded, future=future,
                bytes_=sum(map(len, bodies)) + len(bodies) * MESSAGE_COST_BYTES,
            )
        )  # fmt: skip
        return future

    def _add(self, batch: WholeBatch) -> None:
        self._seal_open(batch.topic)
        self._waiting.append(batch)
        self.waiting_bytes += batch.bytes
        self._flush_soon()

    @property
    def has_space(self) -> bool:
        """Tell whether there is room for more, and nobody waits for it."""
        return not self._line and self.waiting_bytes <= WAITING_BYTES_MAX

    async def space(self, *, deadline: float) -> None:
        """Return when there is room for more; who came first goes first."""
        if self.has_space:
            return
        try:
            async with asyncio.timeout_at(deadline):
                await self._stand_in_line()
        except TimeoutError:
            reason = "too many publishes waited for the broker all the time"
            raise self._not_taken(reason) from None
        if self.is_closed:
            raise NotConnected("the client is closed")

    async def _stand_in_line(self) -> None:
        """Keep a place until it is the first one and there is room.

        All are woken together, so that they share batches; who finds no room keeps its place.
        """
        place = asyncio.Event()
        self._line.append(place)
        try:
            while self._line[0] is not place or self.waiting_bytes > WAITING_BYTES_MAX:
                place.clear()
                await place.wait()
        finally:
            self._line.remove(place)
            if self._line:
                self._line[0].set()

    def check_space(self) -> None:
        """Raise `Overloaded` when there is no room for more."""
        if not self.has_space:
            raise Overloaded("too many publishes wait for the broker", retry_after_ms=100)

    async def answer(
        self, future: asyncio.Future[Receipt], topic: str, *, deadline: float
    ) -> Receipt:
        """Return the answer to what `publish` took just now, or take it back at its deadline."""
        batch = self._open.get(topic) or self._waiting[-1]
        assert isinstance(batch, OpenBatch)
        try:
            async with asyncio.timeout_at(deadline):
                return await future
        except TimeoutError:
            if not future.cancelled():
                return future.result()
        if not batch.is_sealed:
            self._withdraw(batch, future)
        elif not self._give_up(batch):
            raise OutcomeUnknown(f"no answer in time for a publish to {topic!r}")
        raise self._too_late(topic)

    def _give_up(self, batch: OpenBatch) -> bool:
        """Forget a batch that was refused, if nobody waits for it any more; tell whether it is."""
        for sent in self._sent.values():
            if sent.batch is batch and not sent.may_be_stored and batch.is_done:
                self._forget(sent)
                batch.is_sealed = False  # it was not stored, and will not be
                return True
        return False

    def _withdraw(self, batch: OpenBatch, future: asyncio.Future[Receipt]) -> None:
        """Forget a message that was not sent, and its batch when it was the last one in it."""
        is_open = self._open.get(batch.topic) is batch
        if not is_open and batch not in self._waiting:
            return
        self._free(batch.remove(future))
        if not batch.bodies and is_open:
            del self._open[batch.topic]
        elif not batch.bodies:
            self._waiting.remove(batch)

    # --- the link ----------------------------------------------------------------------------

    def use(self, link: Link | None) -> None:
        """Go on with a new link: first again what has no answer, in its order."""
        self._link = link
        if link is not None and link.is_open:
            self._refusal, self._not_before = None, 0.0
            for sent in list(self._sent.values()):
                sent.was_unanswered = sent.may_be_stored
                self._send(link, sent)
            self._flush_soon()

    def close(self, error: OnwardError) -> None:
        """Fail everything that is still waiting."""
        self.is_closed = True
        for task in self._repeats:
            task.cancel()
        if self._check is not None:
            self._check.cancel()
        for sent in list(self._sent.values()):
            unknown = OutcomeUnknown(
                f"closed before a publish to {sent.batch.topic!r} was answered"
            )
            self._fail(sent, unknown if sent.may_be_stored else error)
        for batch in (*self._waiting, *self._open.values()):
            self._release(batch)
            batch.fail(error)
        self._waiting.clear()
        self._open.clear()

    @property
    def is_idle(self) -> bool:
        """Tell whether everything is answered."""
        return not (self._sent or self._waiting or self._open or self._repeats)

    async def drain(self) -> None:
        """Return when everything that was published has its answer or its deadline."""
        while not self.is_idle:
            self._settled.clear()
            await self._settled.wait()

    # --- sending -----------------------------------------------------------------------------

    def _flush_soon(self) -> None:
        """Flush when the tasks that are ready now have published: they share batches."""
        if not self._flush_is_due:
            self._flush_is_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_is_due = False
        if self._check is None and not self.is_idle:
            self._check = self._loop.call_later(CHECK_EVERY_S, self._check_deadlines)
        link = self._link
        if link is None or not link.is_open or self._refusal is not None:
            return
        window = link.welcome.publishes_max
        while (self._waiting or self._open) and link.writable.is_set():
            if self._is_full(window):
                return
            if not self._waiting:
                self._waiting.append(self._open.pop(next(iter(self._open))))
            self._seal(link, self._waiting.popleft())

    def _is_full(self, window: int) -> bool:
        """Tell whether as many sequences are unanswered as the broker remembers."""
        return bool(self._sent) and self._next_sequence - next(iter(self._sent)) >= window

    def _seal(self, link: Link, batch: OpenBatch | WholeBatch) -> None:
        """Give a batch its sequence and send it."""
        sequence = self._next_sequence
        if isinstance(batch, OpenBatch):
            batch.is_sealed = True
        try:
            encoded = self._encode(batch, sequence)
            if len(encoded) > link.welcome.batch_bytes_max:
                raise MessageTooLarge(
                    f"a batch of {len(encoded)} bytes is too large: the broker takes "
                    f"{link.welcome.batch_bytes_max}"
                )
        except OnwardError as error:
            self._fail_unsent(batch, error)
            return
        self._next_sequence = sequence + 1
        sent = self._sent[sequence] = Sent(batch, sequence, encoded)
        self._send(link, sent)

    def _fail_unsent(self, batch: OpenBatch | WholeBatch, error: OnwardError) -> None:
        """Fail a batch that cannot be sent; of several messages only those that are the reason."""
        if isinstance(batch, OpenBatch) and len(batch.bodies) > 1:
            self._waiting.extendleft(reversed(batch.split()))
        else:
            self._release(batch)
            batch.fail(error)

    def _encode(self, batch: OpenBatch | WholeBatch, sequence: int) -> bytes:
        if isinstance(batch, WholeBatch):
            return batch.encoded(self._producer_id, sequence)
        optional = batch.optional
        columns = {} if optional is None else optional.columns(len(batch.bodies))
        return encode_batch(
            batch.bodies, producer_id=self._producer_id, sequence=sequence,
            time_ms=self._clock.now_ms(), **columns,  # type: ignore[arg-type]
        )  # fmt: skip

    def _send(self, link: Link, sent: Sent) -> None:
        request_id = link.expect(
            lambda kind, payload: self._answered(link, request_id, sent, kind, payload)
        )
        batch = sent.batch
        head = publish_head(
            request_id, batch.topic, durability=batch.durability, batch_bytes=len(sent.encoded)
        )
        sent.is_sent = True
        link.write(head, sent.encoded)

    def _answered(
        self, link: Link, request_id: int, sent: Sent, kind: int, payload: bytes | bytearray
    ) -> None:
        if kind == Kind.COUNTED_FROM:
            sent.counted_from_ms = decode_counted_from(payload)
            return
        link.forget(request_id)
        if sent.sequence not in self._sent:
            return
        if kind == Kind.PUBLISHED:
            self._forget(sent)
            self._settle(sent, decode_published(payload))
        else:
            self._refused(link, sent, decode_error(payload))
        if self._refusal is not None:
            self._again()
        elif not self._flush_is_due and (self._waiting or self._open):
            self._flush_soon()

    def _settle(self, sent: Sent, published: Published) -> None:
        batch, counted_from_ms = sent.batch, sent.counted_from_ms
        offset, event_id, durability, is_repeat = published
        reached = DURABILITIES[durability & 3]
        if is_repeat and isinstance(batch, OpenBatch) and batch.first_delay is not None:
            # It counts from when it came first, which is not when it came this time.
            task = self._loop.create_task(self._settle_repeat(batch, offset, event_id, reached))
            self._repeats.add(task)
            task.add_done_callback(self._repeat_settled)
        else:
            batch.settle(offset, event_id, reached, counted_from_ms)

    async def _settle_repeat(
        self, batch: OpenBatch, offset: int, event_id: int, reached: str
    ) -> None:
        """Ask when the delays of a batch that was stored before count from."""
        assert batch.first_delay is not None
        assert batch.calls is not None, "only the schedule has delays"
        row, delay_ms = batch.first_delay
        counted_from_ms = None
        try:
            found = await batch.calls.scheduled(offset + row)
            if found.at_ms:
                counted_from_ms = found.at_ms - delay_ms
        except OnwardError:
            pass  # it is stored all the same: only its receipt does not say when it is due
        finally:
            batch.settle(offset, event_id, reached, counted_from_ms)

    def _repeat_settled(self, task: asyncio.Task[None]) -> None:
        self._repeats.discard(task)
        self._settled.set()

    def _refused(self, link: Link, sent: Sent, error: OnwardError) -> None:
        """Try again later what the broker could not take now; fail the rest."""
        is_late = self._loop.time() >= sent.batch.deadline
        if isinstance(error, NotLeader) and not is_late:
            if link is not self._link:
                return  # it was sent again over a new link
            sent.is_sent = False
            self._refusal, self._not_before = error, math.inf
            self._keeper.need_leader(link, error)
            return
        if isinstance(error, Overloaded | Stopping) and not is_late:
            pause_s = max(getattr(error, "retry_after_ms", 0), 20) / 1000
            self._not_before = self._loop.time() + pause_s
            sent.is_sent = False
            self._refusal = error
            self._loop.call_later(pause_s, self._again)
            return
        batch = sent.batch
        # Scheduled messages share a batch whatever their topics and times are.
        is_of_one = isinstance(error, MessageTooLarge) or (
            batch.topic == SCHEDULE_TOPIC and isinstance(error, InvalidRequest)
        )
        if is_of_one and isinstance(batch, OpenBatch) and len(batch.bodies) > 1:
            self._forget(sent)
            self._waiting.extendleft(reversed(batch.split()))
            self.waiting_bytes += batch.bytes
            return
        self._fail(sent, error)

    def _again(self) -> None:
        """Send again what was refused, in its order, once all that was sent has an answer."""
        link = self._link
        if self._refusal is None or link is None or not link.is_open:
            return
        # Timers may fire a little early.
        is_early = self._loop.time() < self._not_before - 0.001
        if is_early or any(sent.is_sent for sent in self._sent.values()):
            return
        self._refusal = None
        for sent in self._sent.values():
            self._send(link, sent)
        self._flush_soon()

    # --- settling ----------------------------------------------------------------------------

    def _check_deadlines(self) -> None:
        """Fail what waited too long; say whether it may have been stored."""
        self._check = None
        now = self._loop.time()
        for sent in [one for one in self._sent.values() if one.batch.deadline <= now]:
            topic = sent.batch.topic
            if sent.may_be_stored:
                self._fail(sent, OutcomeUnknown(f"no answer in time for a publish to {topic!r}"))
            else:
                self._fail(sent, self._too_late(topic))
        self._waiting = deque([one for one in self._waiting if not self._expire(one, now)])
        for topic in [topic for topic, one in self._open.items() if self._expire(one, now)]:
            del self._open[topic]
        self._again()
        if not self.is_idle:
            # Also for a link that took nothing for a while, and does again.
            self._flush_soon()
            self._check = self._loop.call_later(CHECK_EVERY_S, self._check_deadlines)

    def _expire(self, batch: OpenBatch | WholeBatch, now: float) -> bool:
        if batch.deadline > now:
            return False
        self._release(batch)
        batch.fail(self._too_late(batch.topic))
        return True

    def _too_late(self, topic: str) -> OnwardError:
        """Return why a publish that is not stored was not taken in time."""
        return self._not_taken(f"a publish to {topic!r} found no broker in time")

    def _not_taken(self, reason: str) -> OnwardError:
        """Return what the broker refuses everything with; when it does not, there was none."""
        is_connected = self._link is not None and self._link.is_open
        if is_connected and self._refusal is not None:
            return self._refusal
        unreachable = self._keeper.unreachable
        return NotConnected(reason if unreachable is None else f"{reason}: {unreachable}")

    def _fail(self, sent: Sent, error: OnwardError) -> None:
        self._forget(sent)
        sent.batch.fail(error)

    def _forget(self, sent: Sent) -> None:
        del self._sent[sent.sequence]
        self._release(sent.batch)

    def _release(self, batch: OpenBatch | WholeBatch) -> None:
        self._free(batch.bytes)

    def _free(self, size: int) -> None:
        self.waiting_bytes -= size
        self._settled.set()
        if self._line and self.waiting_bytes <= WAITING_BYTES_MAX:
            for place in self._line:
                place.set()

    def _new_batch(self, topic: str, durability: int) -> OpenBatch:
        check_topic_name(topic, system=topic == SCHEDULE_TOPIC)
        return OpenBatch(topic, durability, self._loop.time() + self._timeout_s)

    def _seal_open(self, topic: str) -> None:
        """Keep the order: what was published before goes before."""
        batch = self._open.pop(topic, None)
        if batch is not None:
            self._waiting.append(batch)

    def _set_optional(self, batch: OpenBatch, optional: dict[str, object]) -> None:
        if batch.optional is None:
            batch.optional = Optional()
        for name, value in optional.items():
            batch.optional.set(name, len(batch.bodies), value)
