"""Consuming topics as a member of a group: the program's end of it.

    async for delivery in consumer             one message at a time, each with its verbs
    async for batch in consumer.batches()      columns: a million messages a second
    await consumer.fetch(100, wait="1s")       whoever asks for messages when it has time for them

Nothing is acked by itself. It joins its group with the first of these calls (or `async with`), and
leaves it when the loop is left, or by `aclose`: what it holds then goes back at once, and counts as
no attempt. So settle what you have taken before you leave. When the connection is lost it joins
again at once, if it holds anything: a broker that was restarted lets it re-claim what it holds. In
any other case that is not its own any more (`LeaseLost`).

In a group that delivers at most once what comes is finished, and nothing could go back: only as
much is asked for as the program waits for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from types import TracebackType
from typing import Self

import msgspec

from onward.client.credit import BATCHES, BATCHES_SPARING, CREDIT_MAX
from onward.client.delivery import Delivery
from onward.client.delivery_batch import DeliveryBatch
from onward.client.following import Following
from onward.client.keeper import Keeper
from onward.client.link import Link
from onward.client.membership import Membership
from onward.client.position import Place, PositionFile, PositionOnBroker
from onward.clock import Clock
from onward.delivery.position import Position
from onward.delivery.retry import RetryPolicy
from onward.durations import Duration, either_ms
from onward.errors import InvalidRequest, NotConnected
from onward.protocol.deliveries import Consume, Joined

logger = logging.getLogger("onward.consumer")

PROMPT_S = 0.1
"""A fetch that waits no longer than this first gets a definite answer of the broker."""
LATE_S = 0.2
"""So long what came too late for one fetch waits for the next one."""


class Closed(Exception):  # nobody's fault: it ends loops
    """The consumer was closed or stopped."""


class Consumer:
    """A member of a group. Made by `Client.consume`.

    >>> from onward import connect
    >>> async def main() -> list[str]:
    ...     async with connect("memory:") as mq:
    ...         await mq.publish_many("orders", ["a", "b"])
    ...         async with mq.consume("orders", group="billing") as consumer:
    ...             deliveries = await consumer.fetch(10, wait="1s")
    ...             await asyncio.gather(*[delivery.ack() for delivery in deliveries])
    ...             return [delivery.text for delivery in deliveries]
    >>> asyncio.run(main())
    ['a', 'b']
    """

    def __init__(
        self, keeper: Keeper, consume: Consume, *, timeout_s: float,
        clock: Clock, credit: int | None = None, position: str | None = None,
        is_named: bool = False,
    ) -> None:  # fmt: skip
        self._keeper = keeper
        self._consume = consume
        self._timeout_s = timeout_s
        self._now_ms = clock.now_ms
        self._credit = _checked_credit(credit)
        self._position = None if position is None else PositionFile(position, group=consume.group)
        self._is_named = is_named
        self._membership = Membership(
            keeper, consume, timeout_s=timeout_s, monotonic_ms=clock.monotonic_ms,
            on_joined=self._on_joined, on_changed=self._on_changed, on_waiting=self._on_waiting,
            check_open=self._check_open,
        )  # fmt: skip
        self._following: Following | None = None
        self._kept: dict[str, Position] | None = None
        self._last: Joined | None = None
        self._is_stopped = False
        self._is_closed = False
        self._waiting = asyncio.Lock()
        self._fetching = 0
        self._is_resting = False
        """Between two fetches: nobody waits for what comes."""
        self._late: asyncio.TimerHandle | None = None
        self._tell_ready: Callable[[], object] | None = None

    @property
    def group(self) -> str:
        """The group's name."""
        return self._consume.group

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics that were named, else those of the group now; of a broadcast when it joined.

        Without named topics they are empty before the first join.
        """
        return self._consume.topics or (() if self._last is None else self._last.topics)

    @property
    def member(self) -> str:
        """The name by which the group knows this consumer."""
        return self._consume.member

    @property
    def mode(self) -> str:
        """The group's mode; empty before the first join."""
        return "" if self._last is None else self._last.mode

    @property
    def lease_ms(self) -> int:
        """For how long a message is leased; 0 before the first join."""
        return 0 if self._last is None else self._last.lease_ms

    @property
    def retry_limit(self) -> int:
        """How often a message is delivered at most, as said at the last join; 0 before."""
        return 0 if self._last is None else self._last.retry_limit

    @property
    def retry_policy(self) -> RetryPolicy | None:
        """How the group retries, as said at the last join; None before, or if that is not known."""
        if self._last is None or not self._last.retry:
            return None
        return msgspec.convert(self._last.retry, RetryPolicy)

    def name_function(self, function: str) -> None:
        """Say which function the messages are for: operators see it; before the first join."""
        self._membership.name_function(function)

    @property
    def at_most_once(self) -> bool:
        """Tell whether what comes is finished already; False before the first join."""
        return self._membership.credit.is_sparing

    @property
    def is_standby(self) -> bool:
        """Tell whether another member of an exclusive group was active when this one joined."""
        return self._last is not None and self._last.state == "standby"

    @property
    def is_joined(self) -> bool:
        """Tell whether the broker counts this member in, as far as is known here."""
        return self._membership.is_joined

    # --- taking ------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[Delivery]:
        """Give each message. Leaving the loop leaves the group."""
        return self._deliveries(starts=True)

    def unstarted(self) -> AsyncIterator[Delivery]:
        """Give each message, like iterating, to a program that lets it wait; see `start`."""
        return self._deliveries(starts=False)

    def start(self, deliveries: list[Delivery]) -> list[Delivery]:
        """Report that messages which `unstarted` gave are started now; return those still held.

        Those whose lease may be over are given back.
        """
        kept = self._membership.still_ours(deliveries)
        self._membership.starts.deliveries(kept)
        self._membership.starts.send_now()
        return kept

    def pace(self, room: Callable[[], int], *, ahead_max: int, unstarted: list[Delivery]) -> None:
        """Fetch for a program that works on several messages at once and has `room` for so many.

        Such a program says how long it works, with `note_work`, and when it has more room. The last
        of the messages that it keeps in the list `unstarted` may be removed, and given back.
        """
        self._membership.unstarted = unstarted
        self._membership.room = room
        self._membership.ahead_first = 0
        self._membership.credit.ahead_max = ahead_max

    def note_work(self, work_s: float) -> None:
        """Take note of how long a message takes; as many are fetched ahead as take half a second.

        Of several at a time: the time of each, divided by how many.
        """
        before_s = self._membership.credit.work_s
        self._membership.credit.work_s = work_s if before_s is None else (before_s + work_s) / 2

    def more_room(self) -> None:
        """Fetch what there is room for now."""
        self._membership.more_room()

    async def _deliveries(self, *, starts: bool) -> AsyncGenerator[Delivery]:
        self._check_usable()
        self._want_single()
        try:
            while True:
                while (delivery := self._take_now(starts=starts)) is not None:
                    if self._membership.starts.is_unsent:
                        self._membership.starts.is_unsent = False
                        await asyncio.sleep(0)
                    yield delivery
                await self._wait(1)
        except Closed:
            return
        finally:
            await self._leave()

    async def batches(self) -> AsyncGenerator[DeliveryBatch]:
        """Give messages as they were delivered: many at once, as columns.

        In a group that delivers at most once they are small, and grow while there is a backlog.

        >>> from onward import connect
        >>> async def main() -> int:
        ...     async with connect("memory:") as mq:
        ...         await mq.publish_many("orders", [b"a", b"b"])
        ...         async for batch in mq.consume("orders", group="billing").batches():
        ...             await batch.ack()
        ...             return batch.count
        >>> asyncio.run(main())
        2
        """
        self._check_usable()
        self._want(self._credit or BATCHES, is_fixed=True)
        n = 1
        try:
            while True:
                async with self._waiting:
                    batch = await self._next_batch(n)
                self._membership.took(batch.count)
                self._membership.starts.batch(batch)
                await self._sent()
                # What fills all that was asked for leaves nothing on its way to be lost.
                is_filled = batch.granted >= n
                n = min(2 * n, self._credit or BATCHES_SPARING) if is_filled else 1
                yield batch
        except Closed:
            return
        finally:
            await self._leave()

    async def take(self, n: int = 1) -> list[Delivery]:
        """Return up to `n` messages, as soon as there is one; none only after `stop`.

        Like iterating, for a program that does several things at once: messages keep coming
        between the calls, as far as there is credit, and only `aclose` leaves the group.
        """
        _check_count(n)
        self._check_usable()
        if self._membership.credit.is_fixed and not self._membership.credit.wanted:
            self._want_single()
        try:
            while not (found := self._take_waiting(n)):
                await self._wait(n)
        except Closed:
            return []
        self._membership.give_more()
        return await self._started(found)

    def take_now(self) -> Delivery | None:
        """Return a message that is at hand; None when there is none at this moment.

        It does not wait or join: it goes with `take` and with iterating, which do.

        >>> from onward import connect
        >>> async def main() -> list[bytes]:
        ...     async with connect("memory:") as mq:
        ...         await mq.publish_many("orders", [b"a", b"b"])
        ...         async with mq.consume("orders", group="billing") as consumer:
        ...             found = await consumer.take()
        ...             while (delivery := consumer.take_now()) is not None:
        ...                 found.append(delivery)
        ...             return [delivery.body for delivery in found]
        >>> asyncio.run(main())
        [b'a', b'b']
        """
        delivery = self._take_now(starts=True)
        self._membership.starts.send_now()
        return delivery

    def take_for_task(self) -> Delivery | None:
        """Return a message that is at hand, for a task that the caller creates now; else None.

        Its start is reported in the next iteration of the loop, before that task begins.
        """
        delivery = self._take_now(starts=False)
        if delivery is not None:
            self._membership.starts.soon(delivery)
        return delivery

    def _take_now(self, *, starts: bool) -> Delivery | None:
        membership, rest = self._membership, self._membership.rest
        # The clock is asked for each message: what blocks is what runs between two of them.
        is_open = not (self._is_stopped or self._is_closed)
        while membership.has_rest() or (is_open and membership.open_next()):
            if rest:  # of what was opened nothing may be readable
                delivery = membership.next_of_rest(starts=starts)
                if not delivery.is_lost:
                    return delivery
        return None

    async def _started(self, found: list[Delivery]) -> list[Delivery]:
        """Return messages when the report that they are started has left this process."""
        try:
            await self._sent()
        except asyncio.CancelledError:
            self._membership.untake(found)
            raise
        return found

    async def _sent(self) -> None:
        """Let the loop send what was written, if it has not done so at once."""
        if self._membership.starts.is_unsent:
            self._membership.starts.is_unsent = False
            await asyncio.sleep(0)

    async def returned(self) -> None:
        """Wait until it is known, after a lost connection, whether what was taken is still ours."""
        await self._membership.returned()

    def on_ready(self, callback: Callable[[], object]) -> None:
        """Let messages come, and call `callback` when some are at hand: `take_now` returns them.

        For a program with an event loop of another kind, which joins once and then only looks when
        it is told to. The callback is called in the client's own loop and must return at once; it
        may be called more often than needed, and also when the consumer ends.

        >>> from onward import connect
        >>> async def main() -> bytes:
        ...     async with connect("memory:") as mq:
        ...         ready = asyncio.Event()
        ...         async with mq.consume("orders", group="billing") as consumer:
        ...             consumer.on_ready(ready.set)
        ...             await mq.publish("orders", "hello")
        ...             await ready.wait()
        ...             return consumer.take_now().body
        >>> asyncio.run(main())
        b'hello'
        """
        self._check_usable()
        self._tell_ready = callback
        self._want_single()
        if self._membership.has_waiting or self._membership.rest:
            self._is_ready()

    def _is_ready(self) -> None:
        if self._tell_ready is not None:
            try:
                self._tell_ready()
            except Exception:
                logger.exception("on_ready of a member of group %r raised", self.group)

    async def fetch(
        self, n: int = 1, *, wait: Duration | None = None, wait_ms: int | None = None
    ) -> list[Delivery]:
        """Return up to `n` messages: as soon as there is one, none when none came in time.

        It waits for a second unless told otherwise. With the first come those that were sent with
        it. Between the calls nothing is asked for: what comes too late for one call waits a moment
        for the next one, then it is given back.

        With `wait=0` it asks the broker once: an empty list then says that nothing was ready. So
        it is with any wait up to 100 ms. `NotConnected` when there was no answer within the
        client's timeout.

        >>> from onward import connect
        >>> async def main() -> list[Delivery]:
        ...     async with connect("memory:") as mq:
        ...         async with mq.consume("orders", group="billing") as consumer:
        ...             return await consumer.fetch(10, wait="10ms")
        >>> asyncio.run(main())
        []
        """
        _check_count(n)
        wait_s = either_ms("wait", wait, wait_ms, default="1s") / 1000
        self._check_usable()
        self._stop_resting()
        self._fetching += n
        try:
            if not (found := self._take_waiting(n)):
                await self._join()
                found = self._take_waiting(n) or await self._fetch(n, wait_s)
            return await self._started(found)
        except Closed:
            return []
        finally:
            self._fetching -= n
            if self._fetching:
                self._ask_for_fetches()
            else:
                self._rest_until_next_fetch()

    async def _fetch(self, n: int, wait_s: float) -> list[Delivery]:
        if wait_s <= PROMPT_S and self._following is None:
            found = await self._fetch_ready(n)
            if found or not wait_s:
                return found
        try:
            async with asyncio.timeout(wait_s):
                while not (found := await self._gather(n)):
                    self._ask_for_fetches()
                    await self._wait(n)
                return found
        except TimeoutError:
            return self._take_waiting(n)

    async def _fetch_ready(self, n: int) -> list[Delivery]:
        """Return messages that are ready; none only when the broker has answered so."""
        try:
            async with asyncio.timeout(self._timeout_s):
                is_sure = False
                while not is_sure:
                    await self._join()
                    self._ask_for_fetches()
                    is_sure = await self._membership.served(n)
        except TimeoutError:
            raise NotConnected(
                f"the broker did not say in time whether group {self.group!r} has messages"
            ) from None
        return await self._gather(n)

    async def _gather(self, n: int) -> list[Delivery]:
        """Return up to `n` messages of those that have arrived, or are on their way with them.

        What was granted for this fetch may come as many deliveries, most of all where the group
        chooses. All of it is leased to this member: nobody else would have it meanwhile.
        """
        if 0 < self._membership.waiting_count < n and self._fetching == n:
            self._membership.take_back()
            await self._membership.catch_up()
        return self._take_waiting(n)

    def _ask_for_fetches(self) -> None:
        """Give credit for as many messages as all fetches that wait want."""
        credit = self._membership.credit
        credit.wanted = self._fetching
        credit.is_fixed = True
        self._membership.give(self._fetching - credit.out)

    def _take_waiting(self, n: int) -> list[Delivery]:
        """Return up to `n` messages of those that have arrived."""
        membership, rest = self._membership, self._membership.rest
        if not self.at_most_once:
            self._check_open()
        if membership.is_away:
            return []
        while len(rest) < n and membership.open_next():
            pass
        found: list[Delivery] = []
        while rest and len(found) < n:
            taken = [rest.popleft() for _ in range(min(n - len(found), len(rest)))]
            membership.credit.took(len(taken))
            found += membership.still_ours(taken)
        membership.starts.ahead = 0
        membership.starts.deliveries(found)
        return found

    def _rest_until_next_fetch(self) -> None:
        """Let nothing more come; what still comes waits for the next fetch, but not for long."""
        self._membership.credit.wanted = 0
        self._membership.take_back()
        self._is_resting = self._following is None and not self._is_closed
        if self._membership.has_waiting:
            self._on_waiting()

    def _on_waiting(self) -> None:
        self._is_ready()
        if self._is_resting and self._late is None:
            loop = asyncio.get_running_loop()
            self._late = loop.call_later(LATE_S, self._give_back)

    def _give_back(self) -> None:
        """Nobody fetches any more: let others have what came too late."""
        self._late = None
        self._membership.release_waiting()

    def _stop_resting(self) -> None:
        self._is_resting = False
        if self._late is not None:
            self._late.cancel()
            self._late = None

    # --- joining and leaving -----------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Join the group, or raise why that is not possible."""
        await self.join()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the group."""
        await self.aclose()

    async def join(self) -> None:
        """Join the group now; taking messages does it by itself."""
        self._check_usable()
        try:
            await self._join()
        except Closed:
            raise InvalidRequest("this consumer was stopped: make a new one") from None

    async def _join(self) -> None:
        self._check_open()
        if self._kept is None:
            self._kept = {}
            if self._position is not None:
                self._kept = await asyncio.to_thread(self._position.load)
        if self._membership.end is not None:
            raise self._membership.end
        await self._membership.join()

    def stop(self) -> None:
        """Take nothing more: loops end, and what waits is given back.

        In a group that delivers at most once what waits is handed out first.
        What was taken stays leased until `aclose`, so that it can be finished and settled.
        """
        if not self._is_stopped:
            self._is_stopped = True
            self._is_ready()
            if self._following is not None:
                self._following.is_pausing = True
            self._membership.stop()

    async def aclose(self) -> None:
        """Leave the group for good: what was settled is answered, what is held is given back."""
        self._is_closed = True
        self._is_ready()
        self._stop_resting()
        self._membership.wake()
        await self._leave_now()
        if self.at_most_once:
            async with self._waiting:  # whoever waits gets what was on its way
                self._say_untaken()

    async def _leave(self) -> None:
        """Leave because a loop was left; after `stop` what was taken may still be settled."""
        if not self._is_stopped:
            await self._leave_now()

    async def _leave_now(self) -> None:
        self._membership.credit.wanted = 0
        self._kept = None
        following, self._following = self._following, None
        try:
            if following is not None:
                await following.close()
        finally:
            await self._membership.leave()

    def _say_untaken(self) -> None:
        """Nobody else gets what is finished: say so when nobody here has taken it."""
        if count := self._membership.forget_waiting():
            logger.warning(
                "group %r delivers at most once: %d messages came when nobody waited for them any "
                "more; they are finished", self.group, count,
            )  # fmt: skip

    # --- inside ------------------------------------------------------------------------------

    async def _wait(self, n: int) -> None:
        """Wait until there are messages to be taken one by one, up to `n` of them at first.

        Whoever waits does so alone: what is asked for is then exactly what is missing.
        """
        async with self._waiting:
            if self._membership.is_away:
                await self._join()
            if not self._membership.rest:
                self._membership.lay_out(await self._next_batch(n))

    async def _next_batch(self, n: int) -> DeliveryBatch:
        """Return the next batch, or end the loop."""
        if not self._membership.is_joined and not self._membership.has_received:
            await self._join()
        try:
            return await self._membership.next_batch(n)
        except Closed:
            if self.at_most_once and (batch := await self._last_batch()) is not None:
                return batch
            raise

    async def _last_batch(self) -> DeliveryBatch | None:
        """Leave, and return what was on its way: it is finished, so nobody else would get it."""
        await self._membership.leave()
        return self._membership.take_batch()

    def _check_usable(self) -> None:
        self._keeper.check_here()
        if self._is_closed:
            raise InvalidRequest("this consumer is closed: make a new one")

    def _check_open(self) -> None:
        if self._is_closed or self._is_stopped:
            raise Closed

    def _want_single(self) -> None:
        wanted = self._membership.ahead_first if self._credit is None else self._credit
        self._want(wanted, is_fixed=self._credit is not None)

    def _want(self, credit: int, *, is_fixed: bool) -> None:
        self._stop_resting()
        self._membership.credit.wanted = credit
        self._membership.credit.is_fixed = is_fixed
        self._membership.give_more()

    def _on_joined(self, link: Link, joined: Joined) -> None:
        self._last = joined
        if joined.mode == "broadcast":
            self._membership.credit.is_off = True
            if self._following is None:
                self._following = self._new_following(joined)
            self._following.begin(link, joined)

    def _on_changed(self, joined: Joined) -> None:
        """Follow a group that was changed under its members."""
        self._last = joined
        if self._following is not None:
            self._following.follow(joined)

    def _new_following(self, joined: Joined) -> Following:
        place: Place | None = self._position
        if place is None and self._is_named:
            place = PositionOnBroker(group=self.group, member=joined.member)
        return Following(
            group=self.group, member=joined.member, place=place, positions=self._kept or {},
            now_ms=self._now_ms, push=self._membership.push, finish=self._membership.finish,
        )  # fmt: skip


def _checked_credit(credit: int | None) -> int | None:
    if credit is not None and (type(credit) is not int or not 1 <= credit <= CREDIT_MAX):
        raise InvalidRequest(f"credit is 1 to {CREDIT_MAX} messages, not {credit!r}")
    return credit


def _check_count(n: int) -> None:
    if type(n) is not int or not 1 <= n <= CREDIT_MAX:
        raise InvalidRequest(f"1 to {CREDIT_MAX} messages can be taken at once, not {n!r}")
