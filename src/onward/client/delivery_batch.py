"""What one delivery brought: messages of one topic as columns, and the verbs for all of them.

    received ──open()──▶ handed out ──▶ held: settled range by range, or lost with its lease

The bytes are decoded when the batch is handed out, not before. Messages whose bytes cannot be
decoded would fail for every member and for ever: they are rejected, with that as the cause. `held`
is what still has to be settled, `lost` what an outcome was refused for: no verb can say anything of
that any more, it comes again. Who settles (a lease of the broker, or the member's own position)
is behind `Settles`.
"""

from __future__ import annotations

import asyncio
import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import chain, compress, repeat
from typing import Literal, Protocol, TypedDict

from onward.client.delivery import Delivery
from onward.client.pieces import Buffer, Piece, pieces_of
from onward.client.topics import instant_ms
from onward.delivery.filter import Filter
from onward.delivery.ranges import Range, Ranges, ranges_of
from onward.delivery.trace import short_cause
from onward.durations import Duration, either_ms
from onward.errors import Corruption, InvalidRequest, LeaseLost, OnwardError, ProtocolError
from onward.message.entry import entry_heads
from onward.message.texts import check_text
from onward.protocol.deliveries import Grant

logger = logging.getLogger("onward.consumer")

NOT_LEASED = 0
"""The lease of what needs none: it was finished before it was sent, or is read by its member."""

Verb = Literal["retry", "reject", "renew", "release"]


class Times(TypedDict):
    """When a retry is due; neither: as the policy says."""

    after_ms: int | None
    at_ms: int | None


Told = Callable[[list["Delivery"], OnwardError | None], None]
"""Is called once for messages that were acked together: with None when that is durable, or with the
error; what of them was lost then is known to their batch."""


class Settles(Protocol):
    """Who makes outcomes durable. What it is given is no longer in `held` of its batch."""

    group: str
    member: str
    is_lost: bool

    def ack(self, batch: DeliveryBatch, ranges: Sequence[Range]) -> asyncio.Future[None]:
        """Say that these ranges are done."""

    def ack_together(self, batch: DeliveryBatch, told: Told) -> list[Delivery]:
        """Return a list for messages of a batch, and say soon that all that is in it is done.

        From then on it is no longer `acking` of its batch.
        """

    def settle(
        self, batch: DeliveryBatch, ranges: Sequence[Range], *, do: Verb,
        after_ms: int | None = None, at_ms: int | None = None, count: bool = True, cause: str = "",
    ) -> asyncio.Future[None]:  # fmt: skip
        """Say what else shall happen with these ranges."""


class DeliveryBatch:
    """Messages of one topic that were delivered together.

    >>> from onward import connect
    >>> async def main() -> list[bytes]:
    ...     async with connect("memory:") as mq:
    ...         await mq.publish_many("orders", [b"a", b"b", b"c"])
    ...         async for batch in mq.consume("orders", group="billing").batches():
    ...             await batch.ack()
    ...             return batch.bodies
    >>> asyncio.run(main())
    [b'a', b'b', b'c']
    """

    __slots__ = (
        "__weakref__", "_entries", "_on_taken", "_pieces", "_settles", "_was_refused", "acking",
        "arrived_at_ms", "count", "expires_at_ms", "granted", "grants", "held", "lease", "lease_ms",
        "lost", "number", "starts", "topic",
    )  # fmt: skip

    def __init__(
        self, settles: Settles, entries: Buffer, *, topic: str, grants: list[Grant], lease: int,
        lease_ms: int = 0, expires_at_ms: float = math.inf,
        on_taken: Callable[[], None] | None = None, number: int = 0, arrived_at_ms: int = 0,
    ) -> None:  # fmt: skip
        self._settles = settles
        self._entries = entries
        self._on_taken = on_taken
        self._pieces: list[Piece] | None = None
        self._was_refused = False
        self.acking: list[Delivery] | None = None
        """What was acked in this turn of the loop with `ack_one_soon`."""
        self.topic = topic
        self.number = number
        """Of the topic, where its name is not enough; 0: not known."""
        self.grants = grants
        self.lease = lease
        self.lease_ms = lease_ms
        self.expires_at_ms = expires_at_ms
        """When the lease may be over, by the client's monotonic clock; what has none has no end."""
        self.arrived_at_ms = arrived_at_ms
        """By the client's monotonic clock, as in `starts`; for a claim after a restart."""
        self.starts: list[tuple[int, int, int]] = []
        """What was reported as started: (start, end, when)."""
        self.held = Ranges([(start, end) for start, end, _, _ in grants])
        self.lost = Ranges()
        self.granted = self.count = self.held.count

    @property
    def group(self) -> str:
        """The group that this was delivered to."""
        return self._settles.group

    @property
    def member(self) -> str:
        """The member of the group that this was delivered to."""
        return self._settles.member

    @property
    def entries_bytes(self) -> int:
        """How much memory the messages take as they travelled."""
        return len(self._entries)

    @property
    def is_lost(self) -> bool:
        """Tell whether the lease is known to be lost: no verb would have an effect."""
        return self._was_refused or (self.lease != NOT_LEASED and self._settles.is_lost)

    # --- what is inside ----------------------------------------------------------------------

    @property
    def bodies(self) -> list[bytes]:
        """The body of each message."""
        pieces = self._opened
        if len(pieces) == 1:
            return pieces[0].cut(pieces[0].batch.bodies)
        return list(chain.from_iterable([piece.cut(piece.batch.bodies) for piece in pieces]))

    @property
    def keys(self) -> list[str | None]:
        """The key of each message."""
        found: list[str | None] = []
        for piece in self._opened:
            keys = piece.batch.keys
            found += repeat(None, piece.end - piece.start) if keys is None else piece.cut(keys)
        return found

    @property
    def offsets(self) -> list[int]:
        """The offset of each message."""
        return list(chain.from_iterable(range(one.start, one.end) for one in self._opened))

    def messages(self) -> list[Delivery]:
        """Return each message as an object with verbs of its own."""
        found: list[Delivery] = []
        for piece in list(self._opened):
            try:
                found += self._deliveries_of(piece)
            except (ProtocolError, Corruption) as error:
                self._reject_unreadable(piece.start, piece.end, error)
                self._opened.remove(piece)
        return found

    def taken(self) -> None:
        """Take note that this batch waits no longer."""
        if self._on_taken is not None:
            on_taken, self._on_taken = self._on_taken, None
            on_taken()

    def open(self) -> None:
        """Decode the bodies; `count` is then how many there are."""
        if self._pieces is not None:
            return
        pieces: list[Piece] = []
        self._pieces = pieces
        in_order = sorted(self.grants)
        for start, end, found in pieces_of(self._entries, in_order):
            if isinstance(found, Piece):
                pieces.append(found)
            else:
                self._reject_unreadable(start, end, found)
        if in_order != self.grants:
            # A group that chooses hands out in the order of its choice, not in that of the log.
            place = {start: number for number, (start, *_) in enumerate(self.grants)}
            starts = sorted(place)
            pieces.sort(key=lambda piece: (place[_at_or_before(starts, piece.start)], piece.start))
        self.count = sum(piece.end - piece.start for piece in pieces)
        self._entries = b""

    def wanted_by(self, wish: Filter) -> list[Range]:
        """Return the messages that a filter lets through."""
        wanted: list[int] = []
        for piece in self._opened:
            tags, headers = piece.batch.tags, piece.batch.headers
            tags = None if tags is None else piece.cut(tags)
            headers = None if headers is None else piece.cut(headers)
            yes = wish.matches(tags, headers, count=piece.end - piece.start)
            wanted += compress(range(piece.start, piece.end), yes)
        return ranges_of(wanted)

    def again(
        self, ranges: Sequence[Range], *, attempt: int, deliveries: int,
        on_taken: Callable[[], None] | None = None,
    ) -> DeliveryBatch:  # fmt: skip
        """Return a batch of these messages alone, for another attempt."""
        batch = DeliveryBatch(
            self._settles, b"", topic=self.topic, lease=self.lease, on_taken=on_taken,
            grants=[(start, end, attempt, deliveries) for start, end in ranges], number=self.number,
        )  # fmt: skip
        batch._pieces = [
            piece._replace(start=low, end=high, attempt=attempt, deliveries=deliveries)
            for piece in self._opened
            for start, end in ranges
            if (low := max(start, piece.start)) < (high := min(end, piece.end))
        ]
        return batch

    # --- the verbs ---------------------------------------------------------------------------

    async def ack(self) -> None:
        """Say that all that is left of this batch is done, and return when that is durable."""
        await self._settles.ack(self, self._claim_all())

    def ack_soon(self) -> asyncio.Future[None]:
        """Ack without waiting; the future tells when it is durable, or the error."""
        return self._ack_soon(None)

    async def retry(
        self,
        *,
        after: Duration | None = None,
        after_ms: int | None = None,
        at: datetime | int | None = None,
        count: bool = True,
        cause: str = "",
    ) -> None:
        """Ask again for all that is left of this batch; see `Delivery.retry`."""
        times = _times(after, after_ms, at)
        cause = _checked(cause)
        await self._settles.settle(
            self, self._claim_all(), do="retry", **times, count=count, cause=cause
        )

    async def reject(self, cause: str = "") -> None:
        """Make dead letters of all that is left of this batch."""
        cause = _checked(cause)
        await self._settles.settle(self, self._claim_all(), do="reject", cause=cause)

    async def release(self) -> None:
        """Give back all that is left of this batch; the attempt does not count."""
        await self._settles.settle(self, self._claim_all(), do="release")

    def retry_soon(
        self,
        *,
        after: Duration | None = None,
        after_ms: int | None = None,
        at: datetime | int | None = None,
        count: bool = True,
        cause: str = "",
    ) -> asyncio.Future[None]:
        """Retry without waiting; the future tells when it is durable, or the error."""
        times = _times(after, after_ms, at)
        return self.settle_soon("retry", None, **times, count=count, cause=cause)

    def reject_soon(self, cause: str = "") -> asyncio.Future[None]:
        """Reject without waiting; the future tells when it is durable, or the error."""
        return self.settle_soon("reject", None, cause=cause)

    def release_soon(self) -> asyncio.Future[None]:
        """Release without waiting; the future tells when it is durable, or the error."""
        return self.settle_soon("release", None)

    def settle_soon(
        self, do: Literal["retry", "reject", "release"], part: Range | None, *,
        after_ms: int | None = None, at_ms: int | None = None, count: bool = True, cause: str = "",
    ) -> asyncio.Future[None]:  # fmt: skip
        """Settle offsets from start to before end, or all that is left, without waiting."""
        cause = _checked(cause)
        try:
            ranges = self._claim_all() if part is None else self._claim(*part)
        except LeaseLost as error:
            return failed(error)
        return self._settles.settle(
            self, ranges, do=do, after_ms=after_ms, at_ms=at_ms, count=count, cause=cause
        )

    def retry_one_soon(
        self, offset: int, *, after: Duration | None, after_ms: int | None,
        at: datetime | int | None, count: bool, cause: str,
    ) -> asyncio.Future[None]:  # fmt: skip
        """Ask again for one message, without waiting."""
        times = _times(after, after_ms, at)
        part = (offset, offset + 1)
        return self.settle_soon("retry", part, **times, count=count, cause=cause)

    def give_back_soon(self) -> None:
        """Give back whatever is held, without waiting."""
        self.release_ranges_soon(list(self.held))

    def release_ranges_soon(self, ranges: Sequence[Range]) -> None:
        """Give back what is held of these ranges, without waiting."""
        held = [part for start, end in ranges for part in self.held.overlap(start, end)]
        if held and not self.is_lost:
            for start, end in held:
                self.held.remove(start, end)
            self._settles.settle(self, held, do="release")

    def release_last_soon(self, count: int) -> None:
        """Give back the last `count` messages of a batch that was not opened, and keep others."""
        assert self._pieces is None, "what was opened is given back message by message"
        assert count < self.granted, "a batch without messages has no place to wait"
        self.granted -= count
        self.count -= count
        released: list[Range] = []
        while count:
            start, end, attempt, deliveries = self.grants.pop()
            kept_end = max(start, end - count)
            if start < kept_end:
                self.grants.append((start, kept_end, attempt, deliveries))
            released.append((kept_end, end))
            count -= end - kept_end
        self.release_ranges_soon(released)

    async def renew(self) -> None:
        """Keep the lease for its whole time from now on; a consumer does so by itself."""
        self._check_held()
        await self._settles.settle(self, list(self.held), do="renew")

    async def renew_for(self, offset: int) -> None:
        """Renew for the sake of one message."""
        if self.has_lost(offset):
            raise self._lost(offset)
        await self.renew()

    def renew_soon(self) -> asyncio.Future[None]:
        """Renew without waiting; a lease that is refused is lost."""
        if self.held.first is None or self.held.end is None:
            return done()
        return self._settles.settle(self, [(self.held.first, self.held.end)], do="renew")

    def renewed(self, asked_at_ms: int) -> None:
        """Take note that a renewal was confirmed: it was granted after it was asked for."""
        self.expires_at_ms = max(self.expires_at_ms, asked_at_ms + self.lease_ms)

    async def ack_range(self, start: int, end: int) -> None:
        """Say that the offsets from `start` to before `end` are done."""
        await self._settles.ack(self, self._claim(start, end))

    def ack_range_soon(self, start: int, end: int) -> asyncio.Future[None]:
        """Ack without waiting; the future tells when it is durable, or the error."""
        return self._ack_soon((start, end))

    def ack_one_soon(self, delivery: Delivery, told: Told) -> bool:
        """Ack one of many that are acked one by one; False: it is not held, nothing is done.

        Those of one turn of the loop go together: there is one call for all of them.
        """
        offset = delivery.offset
        if self.has_lost(offset) or not self.held.discard(offset):
            return False
        if self.acking is None:
            self.acking = self._settles.ack_together(self, told)
        self.acking.append(delivery)
        return True

    async def retry_range(
        self, start: int, end: int, *, after: Duration | None = None, after_ms: int | None = None,
        at: datetime | int | None = None, count: bool = True, cause: str = "",
    ) -> None:  # fmt: skip
        """Ask again for the offsets from `start` to before `end`."""
        times = _times(after, after_ms, at)
        cause = _checked(cause)
        await self._settles.settle(
            self, self._claim(start, end), do="retry", **times, count=count, cause=cause
        )

    async def settle_range(
        self, do: Literal["reject", "release"], start: int, end: int, *, cause: str = ""
    ) -> None:
        """Reject or release the offsets from `start` to before `end`."""
        cause = _checked(cause)
        await self._settles.settle(self, self._claim(start, end), do=do, cause=cause)

    def topic_number(self) -> int:
        """Return the number of the topic, as its entries say; 0 when none can be read."""
        pieces = self._pieces
        if pieces is None:
            return next((entry.topic for entry in entry_heads(self._entries)), 0)
        return pieces[0].entry.topic if pieces else 0

    def keep_only(self, claimed: Ranges, *, since_ms: int) -> None:
        """Lose what was held and was not re-claimed over a new connection; the rest is renewed."""
        self.renewed(since_ms)
        lost = [part for start, end in self.held for part in claimed.gaps(start, end)]
        for start, end in lost:
            self.held.remove(start, end)
        self.lose_ranges(lost)
        if not claimed:
            self.lose()

    def lose(self) -> None:
        """Take note that the broker knows this lease no more."""
        self._was_refused = True

    def lose_ranges(self, ranges: Sequence[Range]) -> None:
        """Take note that these ranges are no longer ours, whatever was said of them."""
        self.lost.update(list(ranges))

    def has_lost(self, offset: int) -> bool:
        """Tell whether this message is known to be no longer ours."""
        # Without the calls that say the same: this is asked twice for each message.
        if self._was_refused or (self._settles.is_lost and self.lease != NOT_LEASED):
            return True
        return bool(self.lost.starts) and offset in self.lost

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        return f"DeliveryBatch(topic={self.topic!r}, count={self.count}, lease={self.lease})"

    # --- inside ------------------------------------------------------------------------------

    @property
    def _opened(self) -> list[Piece]:
        self.open()
        assert self._pieces is not None
        return self._pieces

    def _ack_soon(self, part: Range | None) -> asyncio.Future[None]:
        try:
            ranges = self._claim_all() if part is None else self._claim(*part)
        except LeaseLost as error:
            return failed(error)
        return self._settles.ack(self, ranges)

    def _claim_all(self) -> list[Range]:
        """Return what is left, which is then on its way; nothing when all was settled before."""
        self._check_held()
        ranges = list(self.held)
        self.held.clear()
        return ranges

    def _claim(self, start: int, end: int) -> list[Range]:
        if self.is_lost:
            raise self._lost()
        if end - start == 1:  # the usual case, and there may be very many
            ranges = [(start, end)] if start in self.held else []
        else:
            ranges = self.held.overlap(start, end)
        if not ranges:
            if self.lost.overlap(start, end):
                raise self._lost(start)
            raise LeaseLost(f"message {self.topic}/{start} was settled already")
        self.held.remove(start, end)
        return ranges

    def _check_held(self) -> None:
        """Raise when nothing is left of which anything could be said, and some of it was lost."""
        if self.is_lost:
            raise self._lost()
        if self.lost.first is not None and not self.held:
            raise self._lost(self.lost.first)

    def _lost(self, start: int | None = None) -> LeaseLost:
        start = self.grants[0][0] if start is None else start
        return LeaseLost(
            f"lease {self.lease} of group {self.group!r} on {self.topic}/{start} was lost"
        )

    def _reject_unreadable(self, start: int, end: int, error: OnwardError) -> None:
        logger.error(
            "messages could not be decoded and were rejected: topic=%s start=%d end=%d group=%s "
            "error=%s", self.topic, start, end, self.group, error,
        )  # fmt: skip
        self.count -= end - start
        ranges = self.held.overlap(start, end)
        if ranges and not self.is_lost:
            self.held.remove(start, end)
            cause = short_cause(f"the bytes of the message cannot be decoded: {error}")
            self._settles.settle(self, ranges, do="reject", cause=cause)

    def _deliveries_of(self, piece: Piece) -> list[Delivery]:
        batch, entry = piece.batch, piece.entry
        optional = (
            batch.keys, batch.headers, batch.tags, batch.trace_ids, batch.due_at_ms,
            batch.priorities, batch.tenants, batch.schedule_ids,
        ) if batch.header.columns > 1 else (None,) * 8  # fmt: skip
        absent = (None, None, None, None, None, 0, None, None)
        columns = [
            repeat(value) if column is None else piece.cut(column)
            for column, value in zip(optional, absent, strict=True)
        ]
        return list(
            map(
                Delivery,
                repeat(self.topic),
                range(piece.start, piece.end),
                piece.cut(batch.bodies),
                repeat(entry.time_ms),
                repeat(entry.index),
                *columns,
                repeat(piece.attempt),
                repeat(self),
                repeat(piece.deliveries),
            )
        )


def _at_or_before(starts: list[int], offset: int) -> int:
    return starts[bisect_right(starts, offset) - 1]


def _times(after: Duration | None, after_ms: int | None, at: datetime | int | None) -> Times:
    after_ms = either_ms("after", after, after_ms)
    if after_ms is not None and at is not None:
        raise InvalidRequest("a retry comes 'after' a while or 'at' a time, not both")
    return {
        "after_ms": after_ms,
        "at_ms": None if at is None else instant_ms(at),
    }


def _checked(cause: str) -> str:
    if not isinstance(cause, str):
        raise InvalidRequest(f"a cause is text, not {type(cause).__name__}")
    return short_cause(check_text("cause", cause, characters_max=len(cause)))


def done() -> asyncio.Future[None]:
    """Return a future for what needs no waiting."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.set_result(None)
    return future


def failed(error: OnwardError) -> asyncio.Future[None]:
    """Return a future for what cannot be done."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    fail(future, error)
    return future


def fail(future: asyncio.Future[None], error: OnwardError) -> None:
    """Let whoever waits have the error; when nobody does that is no news: the message comes again.

    >>> async def main() -> None:
    ...     try:
    ...         await failed(LeaseLost("too late"))
    ...     except LeaseLost as error:
    ...         print(error)
    >>> asyncio.run(main())
    too late
    """
    future.set_exception(error)
    future.exception()
