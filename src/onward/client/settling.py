"""Outcomes on their way: collected for one turn of the loop, sent together, answered together.

    ack() ack() retry() ──turn ends──▶ ACK, SETTLE ──SETTLED──▶ all done, or LeaseLost for some
              ▲                             │
              └── claimed: sent again ── connection lost ──▶ not claimed: OutcomeUnknown, LeaseLost

Acks for which nobody waits, those of an App, leave a turn later, with what is published by then.
Adjacent offsets of a delivery become one row. When the connection is lost, outcomes wait until the
member has joined again: a broker that was restarted lets it re-claim its leases, and then they are
sent, again if need be; in any other case the leases are over. Whoever waits for an outcome does so
for the client's timeout at most.
When an error is the answer (the disk is full) the broker has taken the messages back, and delivers
them again: whoever settled them is told the error, and they are lost. Only `InvalidRequest` comes
before anything is done: what a SETTLE said that was wrong is held as before. An ACK says nothing
that could be wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import chain

from msgspec.structs import replace

from onward.client.delivery import Delivery
from onward.client.delivery_batch import (
    NOT_LEASED,
    DeliveryBatch,
    Told,
    Verb,
    done,
    fail,
    failed,
)
from onward.client.link import Link
from onward.client.progress import Refused, Sent
from onward.delivery.ranges import Range, Ranges, merged, ranges_of
from onward.errors import (
    InvalidRequest,
    LeaseLost,
    OnwardError,
    OutcomeUnknown,
    Stopping,
    TopicEnded,
)
from onward.protocol.deliveries import ROWS_MAX, Outcome, Row, Settle, ack_frame
from onward.protocol.frames import Kind
from onward.protocol.payloads import encode_json

OUTCOMES_MAX = 2_000
"""Rows of a SETTLE: with the longest causes it is still far below the limit of a frame."""


class Waiting:
    """One outcome that somebody waits for."""

    __slots__ = ("batch", "future", "is_sent", "ranges", "row")

    def __init__(
        self, batch: DeliveryBatch, ranges: Sequence[Range], row: Outcome | None,
        future: asyncio.Future[None],
    ) -> None:  # fmt: skip
        self.batch = batch
        self.ranges = ranges
        self.row = row
        self.future = future
        self.is_sent = False
        """It was sent on a connection that is lost: perhaps it is done."""

    def narrow(self, ranges: list[Range]) -> None:
        """Leave out what needs no outcome any more."""
        self.ranges = ranges
        self.row = None if self.row is None else replace(self.row, ranges=tuple(ranges))

    def part(self, ranges: list[Range]) -> Waiting:
        """Return an outcome for a part of the ranges, for which nobody waits."""
        future: asyncio.Future[None] = self.future.get_loop().create_future()
        future.add_done_callback(_look_at)
        row = None if self.row is None else replace(self.row, ranges=tuple(ranges))
        return Waiting(self.batch, ranges, row, future)

    @property
    def is_renewal(self) -> bool:
        """Tell whether the lease goes on: nothing is settled by it."""
        return self.row is not None and self.row.do == "renew"

    def succeed(self) -> None:
        """Tell that it is durable."""
        if not self.future.done():
            self.future.set_result(None)

    def lose(self, error: OnwardError) -> None:
        """Tell why not; what it was about is not ours any more."""
        if not self.is_renewal:
            self.batch.lose_ranges(self.ranges)
        self.fail(error)

    def hold_again(self, error: OnwardError) -> None:
        """Tell why not; what it was about is as it was."""
        if not self.is_renewal:
            self.batch.held.update(list(self.ranges))
        self.fail(error)

    def fail(self, error: OnwardError) -> None:
        """Tell why not."""
        if not self.future.done():
            fail(self.future, error)


class Renewal(Waiting):
    """A lease that shall go on; how long it lasts is counted from when that was asked for."""

    __slots__ = ("asked_at_ms",)

    def __init__(
        self, batch: DeliveryBatch, ranges: Sequence[Range], row: Outcome,
        future: asyncio.Future[None], *, asked_at_ms: int,
    ) -> None:  # fmt: skip
        super().__init__(batch, ranges, row, future)
        self.asked_at_ms = asked_at_ms

    def succeed(self) -> None:
        """Tell that the lease goes on."""
        self.batch.renewed(self.asked_at_ms)
        super().succeed()


class Together(Waiting):
    """Acks until the next turn of the loop ends, of which somebody is told with one call."""

    __slots__ = ("_told", "deliveries")

    def __init__(self, batch: DeliveryBatch, told: Told) -> None:
        self.batch = batch
        self.ranges = ()
        self.row = None
        self.is_sent = False
        self.deliveries: list[Delivery] = []
        self._told = told

    def part(self, ranges: list[Range]) -> Together:
        """Remove the deliveries in these ranges, and return them as acks of their own."""
        inside = Ranges(ranges)
        part = Together(self.batch, self._told)
        part.deliveries = [one for one in self.deliveries if one.offset in inside]
        part.ranges = ranges
        self.deliveries = [one for one in self.deliveries if one.offset not in inside]
        return part

    def close(self) -> None:
        """Let nothing more in: it is about to be sent."""
        self.batch.acking = None
        self.ranges = ranges_of([delivery.offset for delivery in self.deliveries])

    def succeed(self) -> None:
        """Tell that it is durable."""
        if self.deliveries:
            self._told(self.deliveries, None)

    def fail(self, error: OnwardError) -> None:
        """Tell why not."""
        if self.deliveries:
            self._told(self.deliveries, error)


class Settling:
    """What one member says of what it was given: on one connection, or on the next as well."""

    def __init__(
        self, link: Link, consumer_id: int, *, group: str, member: str, timeout_s: float,
        monotonic_ms: Callable[[], int],
    ) -> None:  # fmt: skip
        self._link = link
        self._timeout_s = timeout_s
        self._is_away = False
        self._monotonic_ms = monotonic_ms
        self._loop = asyncio.get_running_loop()
        self._consumer_id = consumer_id
        self._acks: list[Waiting] = []
        self._acks_rows = 0
        self._together: list[Together] = []
        self._outcomes: list[Waiting] = []
        self._outcomes_ranges = 0
        self._sent: dict[Sent, list[Waiting]] = {}
        """Outcomes that were sent and have no answer, by their frame."""
        self._is_due = False
        self._quiet = asyncio.Event()
        self._quiet.set()
        self.group = group
        self.member = member
        self.is_lost = False
        self._end: TopicEnded | None = None
        """Its last topic was deleted: then no outcome means anything any more."""

    @property
    def is_quiet(self) -> bool:
        """Tell whether everything is answered."""
        return self._quiet.is_set()

    async def quiet_or(self, lost: asyncio.Future[OnwardError]) -> None:
        """Wait until everything is answered, or the connection is lost."""
        lost.add_done_callback(self._end_waits)
        try:
            await self._quiet.wait()
        finally:
            lost.remove_done_callback(self._end_waits)

    def _end_waits(self, lost: asyncio.Future[OnwardError]) -> None:
        self._quiet.set()

    def ack(self, batch: DeliveryBatch, ranges: Sequence[Range]) -> asyncio.Future[None]:
        """Say that these ranges are done."""
        if batch.lease == NOT_LEASED or not ranges:
            return done()
        self._check_here(batch, ranges)
        waiting = Waiting(batch, ranges, None, self._loop.create_future())
        self._add_ack(waiting)
        return waiting.future

    def ack_together(self, batch: DeliveryBatch, told: Told) -> list[Delivery]:
        """Return a list for messages of a batch: what is in it when the next turn ends is done.

        A turn later than other outcomes, for which somebody waits: what the program publishes when
        a message is done is sent then too, and the broker writes both with one commit.
        """
        together = Together(batch, told)
        self._together.append(together)
        if not self._is_due:
            self._is_due = True
            self._quiet.clear()
            self._loop.call_soon(self._loop.call_soon, self._flush_turn)
        return together.deliveries

    def _add_ack(self, waiting: Waiting) -> None:
        if self._acks_rows + len(waiting.ranges) > ROWS_MAX:
            self._flush()
        self._acks.append(waiting)
        self._acks_rows += len(waiting.ranges)
        if not self._is_due:
            self._flush_soon()
        self._limit(waiting)

    def settle(
        self, batch: DeliveryBatch, ranges: Sequence[Range], *, do: Verb,
        after_ms: int | None = None, at_ms: int | None = None, count: bool = True, cause: str = "",
    ) -> asyncio.Future[None]:  # fmt: skip
        """Say what else shall happen with these ranges."""
        if batch.lease == NOT_LEASED:
            return done() if do in ("renew", "release") else failed(self._finished(batch))
        if not ranges:
            return done()
        if do != "renew":
            self._check_here(batch, ranges)
        row = Outcome(
            do, batch.lease, () if do == "renew" else tuple(ranges), after_ms, at_ms, count, cause
        )
        future: asyncio.Future[None] = self._loop.create_future()
        if do == "renew":
            asked_at_ms = self._monotonic_ms()
            waiting: Waiting = Renewal(batch, ranges, row, future, asked_at_ms=asked_at_ms)
        else:
            waiting = Waiting(batch, ranges, row, future)
        self._add_outcome(waiting)
        return future

    def _check_here(self, batch: DeliveryBatch, ranges: Sequence[Range]) -> None:
        """Refuse outcomes from another event loop or process; the messages stay held."""
        try:
            self._link.check_here()
        except OnwardError:
            batch.held.update(list(ranges))
            raise

    def _add_outcome(self, waiting: Waiting) -> None:
        ranges_count = self._outcomes_ranges + len(waiting.ranges)
        if len(self._outcomes) >= OUTCOMES_MAX or ranges_count > ROWS_MAX:
            self._flush()
        self._outcomes.append(waiting)
        self._outcomes_ranges += len(waiting.ranges)
        self._flush_soon()
        self._limit(waiting)

    def _limit(self, waiting: Waiting) -> None:
        """Let an outcome that is given while there is no connection wait for a while only."""
        if self._is_away:
            self._loop.call_later(self._timeout_s, self._give_up, [waiting])

    def lose(self, end: OnwardError | None = None) -> None:
        """Take note that the connection is over, or the membership on it, with the error `end`."""
        self.is_lost = True
        self._is_away = False
        self._end = end if isinstance(end, TopicEnded) else None
        for sent in list(self._sent):
            outcomes = self._forget(sent)
            if self._end is None:
                self._fail_unknown(outcomes, "the connection was lost")
            else:
                _lose_all(outcomes, self._end)
        self._flush()

    # --- from one connection to the next -----------------------------------------------------

    def pause(self) -> None:
        """Keep all outcomes that have no answer: the connection is lost, the leases may not be."""
        self._is_away = True
        unanswered = [waiting for sent in list(self._sent) for waiting in self._forget(sent)]
        for waiting in unanswered:
            waiting.is_sent = True
        self._acks[:0] = [one for one in unanswered if one.row is None]
        self._outcomes[:0] = [one for one in unanswered if one.row is not None]
        self._loop.call_later(self._timeout_s, self._give_up, self.unanswered())

    def unanswered(self) -> list[Waiting]:
        """Return the outcomes that wait for the next connection, renewals among them."""
        self._close_together()
        return [*self._acks, *self._outcomes]

    def resume(
        self,
        link: Link,
        consumer_id: int,
        *,
        claimed: dict[int, Ranges],
        finished: dict[int, Ranges],
    ) -> None:
        """Send the outcomes of what was re-claimed over a new connection; end the others."""
        self._link, self._consumer_id = link, consumer_id
        unanswered = self.unanswered()
        self._acks, self._acks_rows = [], 0
        self._outcomes, self._outcomes_ranges = [], 0
        self._is_away = False
        nothing = Ranges()
        for waiting in unanswered:
            lease = waiting.batch.lease
            self._resume_one(waiting, claimed.get(lease, nothing), finished.get(lease, nothing))
        self._flush()

    def _resume_one(self, waiting: Waiting, claimed: Ranges, finished: Ranges) -> None:
        if waiting.is_renewal:
            # The claim has renewed the lease.
            if claimed:
                waiting.succeed()
            else:
                waiting.fail(self._refused(waiting))
            return
        again, rest = _overlap(waiting.ranges, claimed), _without(waiting.ranges, claimed)
        if waiting.row is None and waiting.is_sent:
            # The broker had this ack before the connection was lost.
            rest = _without(rest, finished)
        if rest:
            if again:
                self._add_again(waiting.part(again))
            waiting.ranges = rest
            waiting.lose(self._not_claimed(waiting))
        elif again:
            waiting.narrow(again)
            self._add_again(waiting)
        else:
            waiting.succeed()

    def _add_again(self, waiting: Waiting) -> None:
        if waiting.row is None:
            self._add_ack(waiting)
        else:
            self._add_outcome(waiting)

    def _give_up(self, waiting: list[Waiting]) -> None:
        """Let nobody wait for a connection any longer; an App waits for its own acks itself."""
        if not self._is_away:
            return
        overdue = {id(one) for one in waiting if not isinstance(one, Together)}
        given_up = [one for one in self.unanswered() if id(one) in overdue]
        self._acks = [one for one in self._acks if id(one) not in overdue]
        self._outcomes = [one for one in self._outcomes if id(one) not in overdue]
        for one in given_up:
            one.lose(self._not_claimed(one))
        self._note_quiet()

    def _not_claimed(self, waiting: Waiting) -> OnwardError:
        if self._end is not None:
            return self._end
        if waiting.is_sent:
            return OutcomeUnknown(
                f"the connection was lost before {self._name(waiting)} was settled"
            )
        return LeaseLost(
            f"the lease of {self._name(waiting)} was lost with the connection to the broker"
        )

    def give_up_before(self, instant: float) -> None:
        """Wait no longer for answers to what was sent before an instant of the loop's clock."""
        for sent in list(self._sent):
            if sent.sent_at < instant:
                self._fail_unknown(self._forget(sent), "no answer came in time")

    # --- sending -----------------------------------------------------------------------------

    def _flush_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._quiet.clear()
            self._link.before_flush(self._flush_turn)

    def _flush_turn(self) -> None:
        self._is_due = False
        self._close_together()
        self._flush()

    def _close_together(self) -> None:
        together, self._together = self._together, []
        for one in together:
            one.close()
            if one.batch.lease == NOT_LEASED:
                one.succeed()
            else:
                self._add_ack(one)

    def _flush(self) -> None:
        if not self.is_lost and (self._is_away or not self._link.is_open):
            return  # they are sent when the connection is there again, or end with the leases
        acks, self._acks, self._acks_rows = self._acks, [], 0
        outcomes, self._outcomes, self._outcomes_ranges = self._outcomes, [], 0
        if self.is_lost:
            for waiting in chain(acks, outcomes):
                waiting.lose(self._not_claimed(waiting))
        else:
            if acks:
                self._send_acks(acks)
            if outcomes:
                self._send_outcomes(outcomes)
        self._note_quiet()

    def _send_acks(self, acks: list[Waiting]) -> None:
        rows, progress = _rows(acks), self._link.progress
        if progress.is_shared:
            sent = progress.finished(self, self._consumer_id, rows)
            if sent in self._sent:
                self._sent[sent] += acks
            else:
                self._sent[sent] = acks
        else:
            sent = self._expect(acks)
            self._link.write_soon(ack_frame(sent.request_id, self._consumer_id, rows))

    def _send_outcomes(self, outcomes: list[Waiting]) -> None:
        sent = self._expect(outcomes)
        rows = tuple(waiting.row for waiting in outcomes if waiting.row is not None)
        self._link.send(Kind.SETTLE, sent.request_id, encode_json(Settle(self._consumer_id, rows)))

    def _expect(self, waiting: list[Waiting]) -> Sent:
        sent = Sent(self._link)
        sent.add(self, self._consumer_id)
        self._sent[sent] = waiting
        return sent

    # --- answers -----------------------------------------------------------------------------

    def settled(self, sent: Sent, refused: Refused) -> None:
        """Take the answer to one frame: all of it was done, except what was refused."""
        outcomes = self._sent.pop(sent)
        if refused:
            self._refuse(outcomes, refused)
        else:
            for waiting in outcomes:
                waiting.succeed()
        self._note_quiet()

    def failed(self, sent: Sent, error: OnwardError) -> None:
        """Take an error as the answer to one frame."""
        self._fail(self._sent.pop(sent), error)
        self._note_quiet()

    def _fail(self, outcomes: list[Waiting], error: OnwardError) -> None:
        """Nothing of a frame was done; its leases are over unless it was not even looked at."""
        if isinstance(error, Stopping) and not self.is_lost:
            # Its broker ends, and the connection with it: that is when they are sent again.
            for waiting in outcomes:
                waiting.is_sent = True
                (self._acks if waiting.row is None else self._outcomes).append(waiting)
            return
        # By its code: what is a kind of it (too large) was found out when it was to be written.
        if error.code != InvalidRequest.code or any(one.row is None for one in outcomes):
            for waiting in outcomes:
                waiting.lose(error)
        elif len(outcomes) > 1 and self._link.is_open and not self.is_lost:
            # One of them is wrong, and it shares a frame with others: ask for each alone.
            for waiting in outcomes:
                self._send_outcomes([waiting])
        else:
            for waiting in outcomes:
                waiting.hold_again(error)

    def _refuse(self, outcomes: list[Waiting], refused: Refused) -> None:
        for waiting in outcomes:
            ranges = refused.get(waiting.batch.lease)
            if ranges is None:
                waiting.succeed()
            elif waiting.is_renewal:
                waiting.batch.lose()
                waiting.fail(self._refused(waiting))
            elif refused_here := [
                part for start, end in waiting.ranges for part in ranges.overlap(start, end)
            ]:
                waiting.batch.lose_ranges(refused_here)
                waiting.fail(self._refused(waiting))
            else:
                waiting.succeed()

    def _forget(self, sent: Sent) -> list[Waiting]:
        """Expect no answer to a frame any more; return the outcomes in it."""
        sent.forget(self)
        return self._sent.pop(sent)

    def _fail_unknown(self, outcomes: list[Waiting], why: str) -> None:
        for waiting in outcomes:
            waiting.lose(OutcomeUnknown(f"{why} before {self._name(waiting)} was settled"))
        self._note_quiet()

    def _note_quiet(self) -> None:
        if not (self._sent or self._acks or self._together or self._outcomes):
            self._quiet.set()

    def _refused(self, waiting: Waiting) -> LeaseLost:
        return LeaseLost(f"the lease of {self._name(waiting)} ran out, or was given to another")

    def _finished(self, batch: DeliveryBatch) -> LeaseLost:
        return LeaseLost(
            f"group {self.group!r} delivers at most once: what it got of {batch.topic!r} was "
            "finished before it was delivered"
        )

    def _name(self, waiting: Waiting) -> str:
        return f"{waiting.batch.topic}/{waiting.ranges[0][0]} in group {self.group!r}"


def _lose_all(outcomes: list[Waiting], error: OnwardError) -> None:
    for waiting in outcomes:
        waiting.lose(error)


def _rows(acks: list[Waiting]) -> list[Row]:
    """Return one row for each run of offsets of each delivery."""
    if len(acks) == 1:
        lease = acks[0].batch.lease
        return [(lease, start, end) for start, end in acks[0].ranges]
    by_lease: dict[int, list[Range]] = {}
    for waiting in acks:
        by_lease.setdefault(waiting.batch.lease, []).extend(waiting.ranges)
    return [
        (lease, start, end) for lease, ranges in by_lease.items() for start, end in merged(ranges)
    ]


def _overlap(ranges: Sequence[Range], other: Ranges) -> list[Range]:
    return [part for start, end in ranges for part in other.overlap(start, end)]


def _without(ranges: Sequence[Range], other: Ranges) -> list[Range]:
    return [part for start, end in ranges for part in other.gaps(start, end)]


def _look_at(future: asyncio.Future[None]) -> None:
    """Nobody waits for it: its error is no news."""
    if not future.cancelled():
        future.exception()
