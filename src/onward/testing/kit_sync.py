"""A kit for tests without `async`: a thread has the loop, the test has calls that block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from datetime import datetime
from typing import Any, TypeVar

from onward.client.groups import DeadLetterDescription
from onward.client.sync import SyncClient
from onward.durations import Duration

T = TypeVar("T")


class SyncKit:
    """A kit for tests without `async`: the same calls, blocking."""

    def __init__(
        self, given: kits.Kit, mq: SyncClient, call: Callable[[Coroutine[Any, Any, Any]], Any]
    ) -> None:
        self.mq = mq
        """The client of the App, blocking."""
        self.clock = given.clock
        self._kit = given
        self._call = call

    def deliver(self, topic: str, body: object, **options: Any) -> kits.Outcome:
        """Publish a message and return how it went, when every group has answered once."""
        outcome: kits.Outcome = self._call(self._kit.deliver(topic, body, **options))
        return outcome

    def outcome(self, message_id: str) -> kits.Outcome:
        """Return how it went with a message lately."""
        outcome: kits.Outcome = self._call(self._kit.outcome(message_id))
        return outcome

    def now(self) -> datetime:
        """Return what time it is here: 2026-01-01T00:00:00Z and what `advance` has added."""
        return self._kit.now()

    def advance(self, duration: Duration) -> None:
        """Let time pass. Retries and scheduled messages happen on the way, each at its time."""
        self._call(self._kit.advance(duration))

    def idle(self) -> None:
        """Wait until there is nothing to do before time moves."""
        self._call(self._kit.idle())

    def dead(
        self, topic: str | None = None, *, group: str | None = None
    ) -> list[DeadLetterDescription]:
        """Return the dead letters of a group, or of all, with their messages."""
        letters: list[DeadLetterDescription] = self._call(self._kit.dead(topic, group=group))
        return letters


class LoopThread:
    """A thread whose loop holds a kit open: it is entered and left by one and the same task."""

    def __init__(self, held: kits.kit) -> None:
        self._held = held
        self._opened: Future[tuple[kits.Kit, asyncio.AbstractEventLoop]] = Future()
        self._ended: Future[None] = Future()
        self._is_over: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="onward-kit", daemon=True)

    def open(self) -> SyncKit:
        """Return the kit when it is open, or raise why it is not."""
        self._thread.start()
        opened, self._loop = self._opened.result()
        mq = SyncClient(lambda: opened.mq, client=opened.mq, loop=self._loop)
        return SyncKit(opened, mq, self.call)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something on the loop and wait for it; raises what ended the loop before."""
        answer: Future[T] = Future()

        def begin() -> None:
            try:
                self._calls.create_task(_answer(work, answer))
            except RuntimeError as error:
                work.close()
                answer.set_exception(error)

        assert self._loop is not None
        if self._ended.done():
            work.close()
            self._ended.result()
        self._loop.call_soon_threadsafe(begin)
        return answer.result()

    def close(self) -> None:
        """Leave the kit; raises what went wrong meanwhile."""
        assert self._loop is not None
        assert self._is_over is not None
        if not self._ended.done():
            self._loop.call_soon_threadsafe(self._is_over.set)
        self._thread.join()
        self._ended.result()

    def _run(self) -> None:
        try:
            asyncio.run(self._hold())
        except BaseException as error:  # noqa: BLE001  # the test's thread raises it
            (self._ended if self._opened.done() else self._opened).set_exception(error)
        else:
            self._ended.set_result(None)

    async def _hold(self) -> None:
        self._is_over = asyncio.Event()
        async with self._held as opened, asyncio.TaskGroup() as self._calls:
            self._opened.set_result((opened, asyncio.get_running_loop()))
            await self._is_over.wait()


async def _answer(work: Coroutine[Any, Any, T], answer: Future[T]) -> None:
    try:
        answer.set_result(await work)
    except BaseException as error:
        answer.set_exception(error)
        if not isinstance(error, Exception):
            raise


# The annotations above name it, and `help` reads them. At the end, because the module itself makes
# kits for threads.
import onward.testing.kit as kits  # noqa: E402
