"""One consumer of a running App: it takes messages, calls the function, and says how it went.

    take ──▶ call (in a slot) ──▶ returned: ack · raised: retry · Retry, Reject: as they say
                 ▲     └─ the next message that is at hand goes into the same slot, at once
                 └─ with a task and a context of its own, whatever was in the slot before

    stop     nothing new is taken; what runs may end, and its answer becomes durable; then it leaves
    too late the time to stop is over: what still runs is cancelled, and its message given back

Whatever a function raises is a failed attempt, a cancellation of its own task included. Only two
things are not: the end of the run, which cancels all calls, and a ctrl-C that Python itself raised.
A function's error never ends a consumer. An answer for a lease that was lost (`LeaseLost`) harms
nobody: the message belongs to another member by now. It is worth a warning, because work was done
twice. What fails and comes again is said seldom; a dead letter is always said, with its cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import Context, copy_context

from onward.client.client import Client
from onward.client.consumer import Consumer
from onward.client.credit import AHEAD_S
from onward.client.delivery import Delivery
from onward.client.outcome import Reject, Retry, cause_of
from onward.client.seldom import Seldom
from onward.client.slots import Slots
from onward.client.threads import RaisedInThread, Threads
from onward.client.work import Deliveries, Middleware, Work, caller, chain
from onward.durations import format_duration
from onward.errors import LeaseLost, OnwardError

logger = logging.getLogger("onward.app")

Settled = Callable[[Work, Delivery, str, str], None]
"""Is told of each delivery `acked`, `retried`, `rejected` or `lost`, and the cause."""


class _OutOfTime(Exception):
    """What still runs when the time to stop is over is cancelled with its group of tasks."""


class WorkRun:
    """One function at work."""

    _calls: asyncio.TaskGroup
    _loop: asyncio.AbstractEventLoop
    _task: asyncio.Task[object]
    """The task of `run`: while it is cancelled, so are all calls."""
    _context: Context
    """What every call sees: that of the run, with all that its start has set."""

    def __init__(
        self, work: Work, *, client: Client, middleware: Sequence[Middleware], stop_ms: int,
        on_settled: Settled | None, on_joined: Callable[[], None], apply: bool = False,
    ) -> None:  # fmt: skip
        self.work = work
        self.slots = Slots(running_max=work.concurrency)
        self._client = client
        self._stop_ms = stop_ms
        self._on_settled = on_settled
        self._on_joined = on_joined
        self._apply = apply
        self._threads = None
        if not work.is_async:
            self._threads = Threads(work.concurrency, name=f"onward-{work.name}")
        self._unconverted: dict[str, str] = {}
        self._call = chain(middleware, caller(work, self._threads, self._note_unconverted))
        self._seldom = Seldom(logger)
        self._is_stopping = False
        self._is_out_of_time = False
        self._stop_at = 0.0
        self._limit: asyncio.Timeout | None = None
        self._consumer: Consumer | None = None
        self._collected: Deliveries = []
        """What was taken for the next call; its last messages go back when others are idle."""
        self._is_collected = False
        self._is_timing = False
        """A call is being timed: one at a time tells enough."""
        self._changed = asyncio.Event()
        self._ended: OnwardError | None = None

    async def run(self) -> None:
        """Join, work until told to stop, leave; raise what ended the membership."""
        consumer = self.work.consume(self._client, apply=self._apply)
        self._context = copy_context()
        # A factory may begin tasks at once: each call would stand on the stack of the one before.
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._may_go_on = self._loop.get_task_factory() is None
        try:
            async with AsyncExitStack() as membership:
                if await self._join(membership, consumer):
                    await self._work(consumer)
        finally:
            self._seldom.flush()
            if self._threads is not None:
                self._threads.close()

    def stop(self) -> None:
        """Take nothing new; what runs has its time to end."""
        if self._is_stopping:
            return
        now = asyncio.get_running_loop().time()
        self._is_stopping = True
        self._stop_at = now + self._stop_ms / 1000
        self.slots.close()
        self._changed.set()
        if self._consumer is not None:
            self._consumer.stop()
        if self._limit is not None and (self._consumer is None or not self._consumer.is_joined):
            # Nobody answers, so nothing is taken that would be lost: do not wait for it.
            self._limit.reschedule(now)

    async def _join(self, membership: AsyncExitStack, consumer: Consumer) -> bool:
        """Join the group; False when told to stop before that was done."""
        consumer.pace(self._room, ahead_max=self.work.ahead_max, unstarted=self._collected)
        async with self._until_stopped():
            await membership.enter_async_context(consumer)
            self._consumer = consumer
            logger.info(
                "%r consumes %s as member %r of group %r",
                self.work.name, ", ".join(self.work.topics), consumer.member, self.work.group,
            )  # fmt: skip
            self._on_joined()
        return not self._is_stopping

    def _room(self) -> int:
        """Return how many messages could be worked on now beside those that are here."""
        free = self.work.concurrency - self.slots.running
        return max(0, free * (self.work.batch or 1) - len(self._collected))

    @asynccontextmanager
    async def _until_stopped(self) -> AsyncIterator[None]:
        """Leave what is inside when told to stop while there is no connection."""
        now = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(now if self._is_stopping else None) as limit:
                self._limit = limit
                yield
        except TimeoutError:
            if not limit.expired():
                raise
        finally:
            self._limit = None

    # --- taking ------------------------------------------------------------------------------

    async def _work(self, consumer: Consumer) -> None:
        try:
            async with asyncio.TaskGroup() as self._calls:
                try:
                    if self.work.batch is None:
                        await self._take_each(aiter(consumer))
                    else:
                        collecting = self._calls.create_task(self._collect(consumer.unstarted()))
                        await self._take_lists(consumer, self.work.batch)
                        await collecting
                        await self._end_collected(consumer)
                except OnwardError as error:
                    self._ended = error
                self.stop()
                await self._drain()
        except* _OutOfTime:
            pass  # which has cancelled what still ran
        if self._ended is not None:
            raise self._ended

    async def _take_each(self, deliveries: AsyncIterator[Delivery]) -> None:
        async with self._until_stopped():
            if not await self.slots.free():
                return
            async for delivery in deliveries:
                self._begin([delivery])
                if not self.slots.is_free and not await self.slots.free():
                    return

    async def _take_lists(self, consumer: Consumer, most: int) -> None:
        """Call with all that has arrived meanwhile, up to `most`."""
        while await self.slots.free() and await self._has_collected():
            await consumer.returned()
            if self._is_stopping:
                return
            taken = self._collected[:most]
            del self._collected[:most]
            self._changed.set()
            if kept := consumer.start(taken):
                self._begin(kept)

    async def _end_collected(self, consumer: Consumer) -> None:
        """Give back what was not called for; at most once nobody else gets it: call with it."""
        self.stop()
        if not consumer.at_most_once:
            if consumer.is_joined:  # else they go back with the membership
                await asyncio.gather(*(self._release(one) for one in self._collected))
            return
        most = self.work.batch or 1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._stop_at):
                for start in range(0, len(self._collected), most):
                    await self.slots.idle()
                    self._begin(self._collected[start : start + most])

    async def _has_collected(self) -> bool:
        """Wait until something has arrived; False when nothing will any more."""
        while not self._collected and not self._is_collected:
            self._changed.set()  # a recall has perhaps emptied a list that was full
            self._changed.clear()
            await self._changed.wait()
        return bool(self._collected) and not self._is_stopping

    async def _collect(self, deliveries: AsyncIterator[Delivery]) -> None:
        """Gather what arrives, as much as one call takes, while functions run."""
        try:
            async with self._until_stopped():
                async for delivery in deliveries:
                    self._collected.append(delivery)
                    self._changed.set()
                    while len(self._collected) >= (self.work.batch or 1) and not self._is_stopping:
                        self._changed.clear()
                        await self._changed.wait()
        except OnwardError as error:
            self._ended = error
        finally:
            self._is_collected = True
            self._changed.set()

    async def _release(self, delivery: Delivery) -> None:
        with contextlib.suppress(OnwardError):
            await delivery.release()

    def _begin(self, deliveries: Deliveries) -> None:
        self.slots.begin()
        self._calls.create_task(self._perform(deliveries))

    async def _drain(self) -> None:
        """Let what runs end; when its time is over, `_OutOfTime` ends all of it."""
        try:
            async with asyncio.timeout_at(self._stop_at):
                await self.slots.idle()
        except TimeoutError:
            logger.warning(
                "%r of group %r: %d calls did not end in time, their messages are given back",
                self.work.name, self.work.group, self.slots.running,
            )  # fmt: skip
            self._is_out_of_time = True
            raise _OutOfTime from None

    # --- calling -----------------------------------------------------------------------------

    async def _perform(self, deliveries: Deliveries) -> None:
        """Call the function in its slot, then answer outside of it."""
        has_ended = is_answered_later = False
        error: BaseException | None = None
        timed_at = self._begin_timing()
        try:
            try:
                await self._call(deliveries[0] if self.work.batch is None else deliveries)
            except BaseException as raised:  # noqa: BLE001  # which of them are ours is said there
                error = self._failure(deliveries, raised)
            has_ended = True
            if timed_at is not None:
                self._end_timing(timed_at, len(deliveries))
            if error is None and self.work.batch is None:
                is_answered_later = self._ack_soon(deliveries[0])
            self._go_on()
            if is_answered_later:
                return
            if self._is_ending:
                await self._settle_all(deliveries, error)
                return
            # In a task that the function has never seen: it may have cancelled its own, or may
            # still do so, and that must not keep the answer from being sent.
            answer = self._answer_later(deliveries, error)
            self._calls.create_task(answer, context=self._context.copy())
            is_answered_later = True
        finally:
            if not has_ended:
                self._is_timing = self._is_timing and timed_at is None
                self.slots.ran()
            if not is_answered_later:
                self.slots.answered()

    def _begin_timing(self) -> float | None:
        """Return when a call begins, if no other one is being timed."""
        if self._is_timing:
            return None
        self._is_timing = True
        return self._loop.time()

    def _end_timing(self, began_at: float, count: int) -> None:
        self._is_timing = False
        call_s = self._loop.time() - began_at
        if self._consumer is not None:
            # What takes long is never fetched ahead, however many calls there are at a time.
            is_slow = call_s >= AHEAD_S
            self._consumer.note_work(call_s if is_slow else call_s / count / self.work.concurrency)

    async def _answer_later(self, deliveries: Deliveries, error: BaseException | None) -> None:
        try:
            await self._settle_all(deliveries, error)
        finally:
            self.slots.answered()

    @property
    def _is_ending(self) -> bool:
        """Whether the run cancels its calls: their time to stop is over, or it was cancelled."""
        return self._is_out_of_time or self._task.cancelling() > 0

    def _go_on(self) -> None:
        """Give the slot to a message that is at hand; else it is free.

        At once and not by who takes messages: he would come to it turns of the loop later.
        """
        following = None
        is_allowed = self._may_go_on and self.work.batch is None and not self._is_ending
        if is_allowed and self.slots.may_go_on:
            assert self._consumer is not None, "it has joined: something was delivered"
            following = self._consumer.take_for_task()
        if following is None:
            self.slots.ran()
            if self._consumer is not None:
                self._consumer.more_room()
        else:
            self.slots.went_on()
            # In a context of its own: it must see nothing of the call that was here before.
            context = self._context.copy()
            self._calls.create_task(self._perform([following]), context=context)

    def _ack_soon(self, delivery: Delivery) -> bool:
        """Ack one message without a task that waits for it; False: it needs a closer look."""
        batch = delivery.batch
        if batch is None:
            return False
        return batch.ack_one_soon(delivery, self._acked)

    def _acked(self, deliveries: Deliveries, error: OnwardError | None) -> None:
        self.slots.answered(len(deliveries))
        if error is None and logger.isEnabledFor(logging.DEBUG):
            self._say_did(deliveries, "acked")
        if error is not None:
            first = next((one for one in deliveries if one.is_lost), deliveries[0])
            self._say_unanswered(first.id, error)
        if self._on_settled is not None:
            for delivery in deliveries:
                did = "lost" if error is not None and delivery.is_lost else "acked"
                self._on_settled(self.work, delivery, did, "")

    def _say_unanswered(self, first: str, error: BaseException) -> None:
        name = self.work.name
        if isinstance(error, LeaseLost):
            self._seldom.warn(
                "lost",
                f"{first} was done by {name!r}, but its lease had been lost by then, so the "
                f"message may be delivered again: {error}",
            )
        else:
            self._seldom.warn(
                "unanswered",
                f"{name!r}: the answer to {first} is not confirmed, it may come again: {error}",
            )

    def _failure(self, deliveries: Deliveries, error: BaseException) -> BaseException:
        """Return what a function raised as its outcome; raise what is not about its message."""
        if isinstance(error, Retry | Reject):
            return error
        if isinstance(error, asyncio.CancelledError) and self._is_ending:
            raise error
        if _is_from_outside(error, self._loop):
            raise error
        if isinstance(error, RaisedInThread):
            error = error.error
        # Whatever it is: it is a retry.
        first = deliveries[0]
        text = f"{self.work.name!r} failed with {first.id}, {self._prospect(first.attempt)}"
        self._seldom.warn("failed", text, error=error)
        return error

    def _prospect(self, attempt: int) -> str:
        """Return which attempt has failed, and when the next one is: `attempt 2 of 4, again in 2s`.

        By the policy that the group had when this member joined.
        """
        policy = None if self._consumer is None else self._consumer.retry_policy
        if policy is None:
            return f"attempt {attempt}"
        if attempt >= policy.limit:
            return f"attempt {attempt} of {policy.limit}, the last one"
        delay_ms = policy.delay_after(attempt, spread=0)
        about = "about " if policy.kind == "exponential" else ""
        return f"attempt {attempt} of {policy.limit}, again in {about}{format_duration(delay_ms)}"

    def _note_unconverted(self, delivery: Delivery, cause: str) -> None:
        self._unconverted[delivery.id] = cause

    # --- answering ---------------------------------------------------------------------------

    async def _settle_all(self, deliveries: Deliveries, error: BaseException | None) -> None:
        """Answer for all that the function has not settled itself: neighbours with one answer."""
        unsettled = [delivery for delivery in deliveries if not _is_settled(delivery)]
        answers: list[tuple[Deliveries, BaseException | None]] = []
        if self._unconverted:
            causes = [self._unconverted.pop(delivery.id, None) for delivery in unsettled]
            pairs = list(zip(unsettled, causes, strict=True))
            answers = [
                ([delivery], Reject(cause)) for delivery, cause in pairs if cause is not None
            ]
            unsettled = [delivery for delivery, cause in pairs if cause is None]
        answers += [(part, error) for part in neighbours(unsettled)]
        if len(answers) == 1:
            await self._settle(*answers[0])
        else:
            await asyncio.gather(*(self._settle(part, said) for part, said in answers))

    async def _settle(self, part: Deliveries, error: BaseException | None) -> None:
        """Give one answer for messages that stand side by side in one delivery."""
        cause = "" if error is None else cause_of(error)
        try:
            did = await _answer(part, error, cause)
        except OnwardError as unanswered:
            did = "lost"
            self._say_unanswered(part[0].id, unanswered)
        else:
            dead = self._dead(part, error)
            if logger.isEnabledFor(logging.DEBUG):
                self._say_did(part, did, dead=dead)
            self._say_dead(dead, cause)
        if self._on_settled is not None:
            for delivery in part:
                self._on_settled(self.work, delivery, did, cause)

    def _say_did(self, deliveries: Deliveries, did: str, *, dead: Sequence[Delivery] = ()) -> None:
        offsets = {delivery.offset for delivery in dead}
        for delivery in deliveries:
            outcome = "became a dead letter" if delivery.offset in offsets else did
            logger.debug(
                "%r: %s %s, attempt %d", self.work.name, delivery.id, outcome, delivery.attempt
            )

    def _dead(self, part: Deliveries, error: BaseException | None) -> Deliveries:
        """Return the messages that are dead letters now: rejected, or failed too often."""
        consumer = self._consumer
        if error is None or consumer is None or consumer.mode == "broadcast":
            return []
        if isinstance(error, Reject):
            return part
        if isinstance(error, Retry) and not error.count:
            return []
        limit = consumer.retry_limit or sys.maxsize
        return [delivery for delivery in part if delivery.attempt >= limit]

    def _say_dead(self, dead: Deliveries, cause: str) -> None:
        for some in neighbours(dead):
            more = f" to {some[-1].offset}" if len(some) > 1 else ""
            logger.warning(
                "dead letter of group %r: %s%s, attempt %d of %r: %s",
                self.work.group, some[0].id, more, some[-1].attempt, self.work.name, cause,
            )  # fmt: skip


def neighbours(deliveries: Deliveries) -> list[Deliveries]:
    """Cut a list where offsets, or what they were delivered with, or what is lost do not go on."""
    parts: list[Deliveries] = []
    for delivery in deliveries:
        last = parts[-1][-1] if parts else None
        if last is not None and _goes_on(last, delivery):
            parts[-1].append(delivery)
        else:
            parts.append([delivery])
    return parts


def _goes_on(last: Delivery, delivery: Delivery) -> bool:
    return (
        last.batch is delivery.batch
        and last.offset + 1 == delivery.offset
        and last.is_lost == delivery.is_lost
    )


def _is_from_outside(error: BaseException, loop: asyncio.AbstractEventLoop) -> bool:
    """Return True if Python raised the error in the function, which is not about its message.

    A ctrl-C is one only where it raises at all: not where signals are handled, as by `App.run`.
    A coroutine that is thrown away with its closed loop gets a GeneratorExit.
    """
    if isinstance(error, KeyboardInterrupt):
        is_main = threading.current_thread() is threading.main_thread()
        return is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return isinstance(error, GeneratorExit) and not loop.is_running()


def _is_settled(delivery: Delivery) -> bool:
    """Tell whether the function itself has acked, retried or rejected this message."""
    batch = delivery.batch
    return batch is not None and not delivery.is_lost and delivery.offset not in batch.held


async def _answer(part: Deliveries, error: BaseException | None, cause: str) -> str:
    batch, start, end = part[0].batch, part[0].offset, part[-1].offset + 1
    assert batch is not None
    if error is None:
        await batch.ack_range(start, end)
        return "acked"
    if isinstance(error, Reject):
        await batch.settle_range("reject", start, end, cause=cause)
        return "rejected"
    if isinstance(error, Retry):
        await batch.retry_range(
            start, end, after_ms=error.after_ms, at=error.at_ms, count=error.count, cause=cause
        )
    else:
        await batch.retry_range(start, end, cause=cause)
    return "retried"
