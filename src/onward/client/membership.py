"""Being a member of a group: joined over one connection, and again over the next.

    away ──join──▶ joined ──▶ over: left, or ended by the broker (deleted, offline, topic ended)
      ▲              │
      └─ connection ─┘   what was received is void, unless the broker was restarted: then a member
           lost          that comes back in time re-claims it

Deliveries wait here until they are asked for. While anything is held or waits, its leases are
renewed at each third of their time; a batch that the program has dropped without settling it is
not: its lease runs out. A broker that is overloaded or stops is asked again after a pause.

A loop that was blocked, or a process that was stopped, renews nothing, and others get what it had.
So what waits here is handed out only before its lease may be over; after that it is given back.
How long a lease lasts is counted from when its delivery arrived, or from when a renewal was asked
for that was confirmed. What lay in the socket meanwhile is older than its arrival: it counts from
when the loop was last seen awake, until an answer shows that all of it was read.

Credit is given when the broker has said what group this is, not with the question. Where it
delivers at most once nothing comes that nobody waits for, and what came is ours for ever: it is
handed out, even after `stop` or over a later connection.
"""

from __future__ import annotations

import asyncio
import logging
import math
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from onward.client.claims import by_lease, claims_of
from onward.client.credit import AHEAD_FIRST, Credit
from onward.client.delivery import Delivery
from onward.client.delivery_batch import NOT_LEASED, DeliveryBatch
from onward.client.keeper import Keeper
from onward.client.link import Link
from onward.client.round_trips import ServedQuestion, catch_up
from onward.client.seat import Seat
from onward.client.settling import Settling
from onward.client.starts import Starts
from onward.client.unstarted import batch_of, release_all, release_last, still_ours
from onward.delivery.ranges import Ranges
from onward.errors import NotConnected, NotLeader, OnwardError, Overloaded, Stopping, from_wire
from onward.protocol.deliveries import (
    FUNCTION_CHARACTERS_MAX,
    Claim,
    Consume,
    Joined,
    decode_delivery,
    decode_joined,
    decode_recall,
    more_frame,
)
from onward.protocol.frames import Kind
from onward.protocol.payloads import decode_end, decode_error, encode_json

logger = logging.getLogger("onward.consumer")

PAUSE_S_MIN = 0.05
LEAVE_S_MAX = 5.0
PASSING = (Overloaded, Stopping, NotLeader)
"""Errors after which joining again is worth a try."""


class Membership:
    """One member of one group."""

    def __init__(
        self, keeper: Keeper, consume: Consume, *, timeout_s: float,
        monotonic_ms: Callable[[], int], on_joined: Callable[[Link, Joined], None],
        on_changed: Callable[[Joined], None],
        on_waiting: Callable[[], None], check_open: Callable[[], None],
    ) -> None:  # fmt: skip
        self._keeper = keeper
        self._consume = consume
        self._timeout_s = timeout_s
        self._monotonic_ms = monotonic_ms
        self._on_joined = on_joined
        self._on_changed = on_changed
        self._on_waiting = on_waiting
        self._check_open = check_open
        self._patience: asyncio.Timeout | None = None
        self._joining = asyncio.Lock()
        self._changed = asyncio.Event()
        self._seat: Seat | None = None
        self._paused: Settling | None = None
        """Outcomes and leases of the last connection, to be re-claimed over the next one."""
        self._returning: asyncio.Task[None] | None = None
        self._may_return = True
        self._node = ""
        """Whose log the leases are of."""
        self._asked_at_ms = 0
        self._leaving: Seat | None = None
        self._was_joined = False
        self._pause_s = 0.0
        self._refusal: OnwardError | None = None
        self._received: deque[DeliveryBatch] = deque()
        self._leases: dict[int, tuple[weakref.ref[DeliveryBatch], Ranges]] = {}
        self._renewal: asyncio.TimerHandle | None = None
        self._awake_at = 0.0
        """When the renewal was planned, by the loop's clock."""
        self._asleep_from_ms = math.inf
        """Since when what arrives now may have been on its way; no limit: it has just come."""
        self._has_warned = False
        self._is_stopping = False
        self.ahead_first = AHEAD_FIRST
        self.room: Callable[[], int] | None = None
        """How many messages the program could begin with now; None: as many as it waits for."""
        self._waited_for = 0
        self.unstarted: list[Delivery] = []
        """What the program has taken without starting it."""
        self.credit = Credit()
        self.starts = Starts(monotonic_ms)
        self.rest: deque[Delivery] = deque()
        """What is left of a batch of which the program takes one message after the other."""
        self.end: OnwardError | None = None

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        # A consumer may be made before its loop runs; asking for that is a system call in 3.11.
        return asyncio.get_running_loop() if self._seat is None else self._seat.link.loop

    @property
    def is_joined(self) -> bool:
        """Tell whether the broker counts us in, as far as we know."""
        return self._seat is not None and self._seat.is_taken

    @property
    def is_away(self) -> bool:
        """Tell whether it is not known yet whether what was received is still ours."""
        return self._paused is not None

    @property
    def has_received(self) -> bool:
        """Tell whether a batch waits that nobody has begun to take."""
        return bool(self._received)

    @property
    def has_waiting(self) -> bool:
        """Tell whether something was received and not taken yet."""
        return bool(self._received or self.rest)

    @property
    def waiting_count(self) -> int:
        """Return how many messages were received and not taken yet."""
        return len(self.rest) + sum(batch.granted for batch in self._received)

    @property
    def joined(self) -> Joined | None:
        """What the broker said when we joined; None while we are away."""
        return None if self._seat is None else self._seat.joined

    def name_function(self, function: str) -> None:
        """Say which function the messages are for, with the next join."""
        short = function[:FUNCTION_CHARACTERS_MAX]
        self._consume = msgspec.structs.replace(self._consume, function=short)

    # --- joining -----------------------------------------------------------------------------

    async def join(self) -> None:
        """Join, or join again; only the first time there is a deadline."""
        while self.is_away:
            self._check_open()
            self._changed.clear()
            await self._changed.wait()
        async with self._joining:
            self._check_open()
            if self.is_joined:
                return
            patience_s = None if self._was_joined else self._timeout_s
            try:
                async with asyncio.timeout(patience_s) as self._patience:
                    while not await self._try_join(patience_s):
                        pass
            except TimeoutError:
                self._check_open()
                raise (
                    self._refusal
                    or self._keeper.refusal
                    or NotConnected(f"group {self._consume.group!r} could not be joined in time")
                ) from None
            finally:
                self._patience = None

    async def _try_join(self, patience_s: float | None) -> bool:
        """Ask once; tell whether it worked: if not it is worth another try."""
        pause_s, self._pause_s = self._pause_s, 0.0
        await asyncio.sleep(pause_s)
        link = await self._keeper.leader(timeout_s=patience_s)
        self.credit.restart()
        seat = self._seat = Seat(link, self._take)
        try:
            self._asked_at_ms = self._monotonic_ms()
            claims = self._claims()
            consume = msgspec.structs.replace(
                self._consume, credit=0, starts=True, recalls=True, claims=claims,
                node=self._node if claims else "",
            )  # fmt: skip
            if self._was_joined:
                # Somebody has changed the group since: members that are there go on with that.
                consume = msgspec.structs.replace(consume, if_differs="keep")
            link.send(Kind.CONSUME, seat.id, encode_json(consume))
            waited: list[asyncio.Future[Any]] = [seat.answer, link.lost]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not seat.answer.done():
                return False
            seat.answer.result()
        except PASSING as error:
            self._refusal = error
            return False
        except OnwardError:
            raise
        except BaseException:
            if seat.left is None:  # else `leave` waits for its end
                seat.cancel()
                seat.forget()  # nobody waits for the end of what has not begun
            raise
        link.lost.add_done_callback(self._lost)
        return True

    def _seated(self, seat: Seat, joined: Joined) -> None:
        """Make room for what may come right behind the answer."""
        paused, self._paused = self._paused, None
        seat.settling = paused or Settling(
            seat.link, seat.id, group=self._consume.group, member=joined.member,
            timeout_s=self._timeout_s, monotonic_ms=self._monotonic_ms,
        )  # fmt: skip
        seat.joined = joined
        self.starts.begin(seat if joined.starts else None)
        self._node = seat.link.welcome.node
        if paused is not None:
            self._reclaimed(seat, paused, joined)
        self.credit.is_sparing = joined.at_most_once and joined.mode != "broadcast"
        self._was_joined = True
        self._on_joined(seat.link, joined)
        if joined.mode != "broadcast":
            # Also while nothing is leased: by this timer it is seen when the loop was blocked.
            self._plan_renewal()
        self.give_more()
        if not seat.answer.done():
            seat.answer.set_result(joined)
        self._changed.set()

    # --- coming back -------------------------------------------------------------------------

    async def returned(self) -> None:
        """Wait until it is known what of the messages is still ours; not after `stop`."""
        while self.is_away and not self._is_stopping:
            self._changed.clear()
            await self._changed.wait()

    def _claims(self) -> tuple[Claim, ...]:
        if self._paused is None:
            return ()
        return claims_of(self._watched(), self._paused, now_ms=self._asked_at_ms)

    def _watched(self) -> list[DeliveryBatch]:
        found = (reference() for reference, _ in self._leases.values())
        return [batch for batch in found if batch is not None and not batch.is_lost]

    def _pause(self, seat: Seat, settling: Settling) -> None:
        """Keep what is held, and join again at once, whether the program asks for more or not.

        A broker that was restarted lets us re-claim it for a short time.
        """
        settling.pause()
        self._paused = settling
        self._unseat(seat)
        self._returning = self._loop.create_task(self._return())

    async def _return(self) -> None:
        try:
            async with self._joining:
                while not await self._try_join(None):
                    pass
        except OnwardError:
            pass  # whoever asks for more joins again, and is told why that is not possible
        finally:
            self._give_up_claims()

    def _reclaimed(self, seat: Seat, settling: Settling, joined: Joined) -> None:
        """Go on with what the broker let us re-claim; lose the rest."""
        claimed = by_lease(joined.claimed)
        for batch in self._watched():
            batch.keep_only(claimed.get(batch.lease, Ranges()), since_ms=self._asked_at_ms)
        settling.resume(seat.link, seat.id, claimed=claimed, finished=by_lease(joined.finished))
        self._forget_lost()
        waiting = [*self.rest, *self.unstarted]
        self.starts.again(self._watched(), received=self._received, rest=waiting)
        self.credit.waiting = self.waiting_count
        self.credit.waiting_bytes = sum(batch.entries_bytes for batch in self._received)
        if self.has_waiting:
            self._on_waiting()

    def _give_up_claims(self) -> None:
        """Take note that nothing will be re-claimed."""
        paused, self._paused = self._paused, None
        if paused is not None:
            paused.lose()
            self._forget_lost()
        self._changed.set()

    # --- receiving ---------------------------------------------------------------------------

    async def next_batch(self, n: int) -> DeliveryBatch:
        """Return the next batch, joining first if need be; raise why there is none any more.

        At most once, `n` messages are asked for while this waits; only one may wait at a time.
        """
        if not self.credit.is_sparing:
            self._check_open()
        try:
            while (batch := self.take_batch()) is None:
                self._check_open()
                if self.end is not None:
                    raise self.end
                if self.is_joined:
                    self._ask(n)
                    self._waited_for = n
                    self.more_room()
                    self._changed.clear()
                    await self._changed.wait()
                    self.credit.resumed(now=self._loop.time())
                else:
                    await self.join()
            return batch
        finally:
            self._waited_for = 0
            self._ask(0)

    def take_batch(self) -> DeliveryBatch | None:
        """Return what came first of what waits; None when nothing waits."""
        while self._received and not self.is_away:
            batch = self._received.popleft()
            self.credit.opened(batch.entries_bytes)
            batch.taken()
            if batch.expires_at_ms <= self._monotonic_ms():
                batch.give_back_soon()
            elif not batch.is_lost:
                batch.open()
                if batch.count:
                    self.took(batch.granted - batch.count)
                    return batch
            self.took(batch.granted)
        return None

    def open_next(self) -> bool:
        """Open what came first of what waits, for who takes one by one; False: nothing waits."""
        batch = self.take_batch()
        if batch is None:
            return False
        self.lay_out(batch)
        return True

    def lay_out(self, batch: DeliveryBatch) -> None:
        """Let the messages of a batch be taken one by one; what cannot be read waits no more."""
        count = batch.count
        self.rest.extend(batch.messages())
        self.took(count - batch.count)

    async def catch_up(self) -> None:
        """Wait until what the broker has sent by now is here; not for long."""
        if self._seat is not None and self._seat.is_taken:
            await catch_up(self._seat.link)

    async def served(self, n: int) -> bool:
        """Wait until messages are here, or the broker has sent all that is ready.

        Return False when the connection was lost before. At most once, `n` messages are asked for.
        """
        if self._seat is None or not self._seat.is_taken:
            return False
        self._ask(n)
        question = ServedQuestion(self._seat, self._changed.set)
        try:
            while self.is_joined and not (question.is_answered or self.has_waiting):
                self._check_open()
                self._changed.clear()
                await self._changed.wait()
            await question.check()
            return question.is_answered or self.has_waiting
        finally:
            question.close()
            self._ask(0)

    def next_of_rest(self, *, starts: bool) -> Delivery:
        """Return the next message that waits; with `starts` it is reported first."""
        if starts and not self.starts.ahead:
            self.starts.next_of(self.rest, now=self._loop.time())
        if self.starts.ahead:
            self.starts.ahead -= 1
        delivery = self.rest.popleft()
        self.took(1)
        return delivery

    def untake(self, deliveries: list[Delivery]) -> None:
        """Let messages wait again that were taken and not handed out."""
        self.starts.ahead = 0
        self.rest.extendleft(reversed(deliveries))
        self.credit.waiting += len(deliveries)

    def has_rest(self) -> bool:
        """Tell whether a message can be taken; first give back what has waited for too long."""
        rest = self.rest
        if self.is_away:
            return False
        if rest and batch_of(rest[0]).expires_at_ms <= self._monotonic_ms():
            waiting = list(rest)
            self.starts.ahead = 0
            rest.clear()
            rest.extend(self.still_ours(waiting))
            self.took(len(waiting) - len(rest))
        return bool(rest)

    def still_ours(self, deliveries: list[Delivery]) -> list[Delivery]:
        """Return those that can be handed out; give back those whose lease may be over."""
        return still_ours(deliveries, now_ms=self._monotonic_ms())

    def push(self, batch: DeliveryBatch) -> None:
        """Let a batch wait to be taken."""
        self._received.append(batch)
        self._changed.set()
        self._on_waiting()

    def wake(self) -> None:
        """Let everybody who waits look whether we are still open."""
        self._changed.set()
        if self._patience is not None and not self._patience.expired():
            self._patience.reschedule(self._loop.time())

    def finish(self, error: OnwardError) -> None:
        """End it: this is what everybody is told who asks for more."""
        self.end = self.end or error
        self._changed.set()

    def took(self, count: int) -> None:
        """Take note of messages that were handed to the program, and give credit for others."""
        credit = self.credit
        credit.took(count)
        if credit.out + credit.waiting <= credit.wanted // 2:
            self.give_more()

    def give_more(self) -> None:
        """Give credit, when it is time to."""
        if self.is_joined and not self._is_stopping:
            self._send_more(self.credit.more(now=self._loop.time()))

    def more_room(self) -> None:
        """Give credit for what a program that waits has room for."""
        if self._waited_for and self.is_joined and not self._is_stopping:
            room = self._waited_for if self.room is None else self.room()
            self._send_more(self.credit.more(now=self._loop.time(), room=room))

    def give(self, count: int) -> None:
        """Give so much credit, for somebody who waits for just that."""
        if self.is_joined and not self.credit.is_sparing:
            self._send_more(self.credit.give(count))

    def _ask(self, n: int) -> None:
        """Let exactly so many come, where nothing is asked for ahead."""
        if self.credit.is_sparing:
            self._send_more(self.credit.ask(n))

    def stop(self) -> None:
        """Let nothing more come, and give back what waits; what was taken stays ours."""
        self._is_stopping = True
        self.credit.wanted = 0
        self.take_back()
        self.release_waiting()
        self.wake()

    def take_back(self) -> None:
        """Take back the credit that is not used, unless somebody waits for just that."""
        if not self.credit.is_sparing:
            self._send_more(self.credit.take_back())

    def release_waiting(self) -> None:
        """Give back whatever was received and not taken yet; what is finished stays."""
        if self.credit.is_sparing:
            return
        release_all(self._received, self.rest, self.credit)
        self.starts.ahead = 0

    def recall(self, count: int) -> None:
        """Give back up to `count` messages that were not started, the last ones first.

        The program is busy, so nothing more is asked for before it goes on.
        """
        if self.credit.is_sparing:
            return
        unreported = len(self.rest) - self.starts.ahead
        if release_last(count, self._received, self.rest, self.unstarted, unreported, self.credit):
            self.take_back()

    def forget_waiting(self) -> int:
        """Drop whatever was received and not taken; return how many messages that were."""
        count = self.waiting_count
        self.starts.ahead = 0
        self.rest.clear()
        self._received.clear()
        return count

    def _send_more(self, credit: int) -> None:
        if credit and self._seat is not None and self._seat.is_taken:
            self._seat.link.write_soon(more_frame(self._seat.id, credit))

    def _take(self, seat: Seat, kind: int, payload: bytes | bytearray) -> None:
        """Take a frame from the broker."""
        if kind == Kind.DELIVERY:
            self._delivered(seat, payload)
        elif kind == Kind.RECALL:
            self.recall(decode_recall(payload))
        elif kind == Kind.REPLY:
            joined = decode_joined(payload)
            if seat.joined is None:
                self._seated(seat, joined)
            else:
                seat.joined = joined
                self._on_changed(joined)
        elif kind == Kind.END:
            end = decode_end(payload)
            self._ended(seat, from_wire({"code": end.code, "message": end.message}))
        else:
            self._ended(seat, decode_error(payload))

    def _delivered(self, seat: Seat, payload: bytes | bytearray) -> None:
        assert seat.settling is not None, "a delivery comes after the answer"
        delivered = decode_delivery(payload)
        is_finished = delivered.delivery == NOT_LEASED
        if is_finished != self.credit.is_sparing:
            self._spare(is_finished)
        batch = DeliveryBatch(
            seat.settling, memoryview(payload)[delivered.entries_at :], topic=delivered.topic,
            grants=delivered.grants, lease=delivered.delivery, lease_ms=delivered.lease_ms,
            expires_at_ms=math.inf if is_finished else self._sent_at_ms() + delivered.lease_ms,
            arrived_at_ms=self._monotonic_ms(),
        )  # fmt: skip
        if not is_finished:
            self._watch(batch)
        self._send_more(self.credit.arrived(batch.granted, size=batch.entries_bytes))
        self.push(batch)
        if self._is_stopping:
            self.release_waiting()

    def _spare(self, is_sparing: bool) -> None:
        """Follow a group that was changed under its members."""
        self.take_back()
        self.credit.is_sparing = is_sparing
        self.give_more()

    # --- the end -----------------------------------------------------------------------------

    def _ended(self, seat: Seat, error: OnwardError) -> None:
        """The broker has ended the membership, or does not let us in."""
        seat.forget()
        self._drop(seat, error)
        if isinstance(error, PASSING):
            self._pause_s = max(getattr(error, "retry_after_ms", 0) / 1000, PAUSE_S_MIN)
        if isinstance(error, NotLeader):
            self._keeper.need_leader(seat.link, error)
        if not seat.answer.done():
            seat.answer.set_exception(error)
        elif not isinstance(error, PASSING):
            self.end = self.end or error
        self._changed.set()

    def _lost(self, lost: asyncio.Future[OnwardError]) -> None:
        seat = self._seat
        if seat is None or seat.link.lost is not lost:
            return
        settling = seat.settling if self._may_return else None
        if settling is not None and (
            settling.unanswered() or any(batch.held for batch in self._watched())
        ):
            self._pause(seat, settling)
        else:
            self._drop(seat)
        self._changed.set()

    def _drop(self, seat: Seat, end: OnwardError | None = None) -> None:
        """Forget what this connection brought: it will come again, to us or to others."""
        if seat.settling is not None:
            seat.settling.lose(end)
            self._forget_lost()
        self._unseat(seat)

    def _unseat(self, seat: Seat) -> None:
        self.starts.begin(None)
        self._asleep_from_ms = math.inf
        if self._renewal is not None:
            self._renewal.cancel()
            self._renewal = None
        if self._seat is seat:
            self._seat = None

    def _forget_lost(self) -> None:
        """Forget what is not ours any more, and was not handed out."""
        self._leases = {
            lease: watched
            for lease, watched in self._leases.items()
            if (batch := watched[0]()) is not None and not batch.is_lost
        }
        self._received = deque(batch for batch in self._received if not batch.is_lost)
        self.starts.ahead = 0
        kept = [delivery for delivery in self.rest if not delivery.is_lost]
        self.rest.clear()
        self.rest.extend(kept)

    async def leave(self) -> None:
        """Leave: what was said is answered first, what is still held is given back."""
        if self._returning is not None:
            self._returning.cancel()
        self._give_up_claims()
        seat = self._seat
        if seat is not None and seat.is_taken and seat.settling is not None:
            self._may_return = False
            try:
                await self._say_goodbye(seat, seat.settling)
            finally:
                self._may_return = True
        if self._leaving is not None:
            assert self._leaving.left is not None
            waited: list[asyncio.Future[Any]] = [self._leaving.left, self._leaving.link.lost]
            await asyncio.wait(waited, timeout=LEAVE_S_MAX, return_when=asyncio.FIRST_COMPLETED)

    async def _say_goodbye(self, seat: Seat, settling: Settling) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await settling.quiet_or(seat.link.lost)
        except TimeoutError:
            logger.warning("group %r: some outcomes had no answer in time", self._consume.group)
        finally:
            seat.cancel()
            self._leaving = seat
            self._drop(seat)

    # --- leases ------------------------------------------------------------------------------

    def _watch(self, batch: DeliveryBatch) -> None:
        """Renew this lease as long as the program has the batch, or it waits here."""
        lease = batch.lease
        reference = weakref.ref(batch, lambda _: self._forgotten(lease))
        self._leases[lease] = (reference, batch.held)
        self._plan_renewal()

    def _plan_renewal(self) -> None:
        if self._renewal is None and self.joined is not None:
            self._awake_at = self._loop.time()
            self._renewal = self._loop.call_later(self.joined.lease_ms / 3000, self._renew)

    def _sent_at_ms(self) -> float:
        """Return since when what arrives now may have been on its way."""
        self._notice_sleep()
        return min(self._monotonic_ms(), self._asleep_from_ms)

    def _notice_sleep(self) -> None:
        """See by a timer that is long overdue that the loop did not run."""
        if self._renewal is None or self._asleep_from_ms != math.inf:
            return
        now, due_at = self._loop.time(), self._renewal.when()
        if now - due_at > due_at - self._awake_at:
            self._asleep_from_ms = self._monotonic_ms() - (now - self._awake_at) * 1000

    def _renew(self) -> None:
        self._notice_sleep()
        self._renewal = None
        seat = self._seat
        if seat is None or not seat.is_taken or seat.settling is None:
            return
        seat.settling.give_up_before(self._loop.time() - self._timeout_s)
        renewing = None
        for lease, (reference, held) in list(self._leases.items()):
            batch = reference()
            if batch is None or batch.is_lost or not held:
                del self._leases[lease]
            else:
                renewing = batch.renew_soon()
        if renewing is None:
            self._asleep_from_ms = math.inf
        else:
            renewing.add_done_callback(self._caught_up)
        self._plan_renewal()

    def _caught_up(self, _: asyncio.Future[None]) -> None:
        """An answer came: whatever was sent before it was read."""
        self._asleep_from_ms = math.inf

    def _forgotten(self, lease: int) -> None:
        """The program has dropped a batch: say so once if something of it was not settled."""
        _, held = self._leases.pop(lease, (None, None))
        if held and not self._has_warned and self.joined is not None:
            self._has_warned = True
            logger.warning(
                "group %r: %d messages were taken and neither acked, retried nor rejected; they "
                "come again when their lease ends", self._consume.group, held.count,
            )  # fmt: skip
