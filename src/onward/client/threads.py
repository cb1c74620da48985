"""Threads for functions that block: as many as there are slots, started when they are needed.

Unlike those of `concurrent.futures` they are daemons: a function that never ends keeps nobody from
leaving once the time to stop is over. Each call sees the context variables of its caller.
"""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from onward.client.outcome import cause_of

T = TypeVar("T")

_Call = Callable[[], None]


class RaisedInThread(RuntimeError):
    """Carries `error`, which a future cannot hold, or which would end the event loop.

    >>> RaisedInThread(SystemExit(3))
    RaisedInThread('SystemExit: 3')
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(cause_of(error))
        self.error = error


class Threads:
    """At most `count` threads.

    >>> async def main() -> bool:
    ...     threads = Threads(2, name="example")
    ...     inside = await threads.run(threading.get_ident)
    ...     threads.close()
    ...     return inside != threading.get_ident()
    >>> asyncio.run(main())
    True
    """

    def __init__(self, count: int, *, name: str) -> None:
        self._count = count
        self._name = name
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._started = 0
        self._busy = 0

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call `function` in a thread and return what it returns.

        Whoever is cancelled meanwhile does not wait; the function goes on to its end.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        context = contextvars.copy_context()

        def call() -> None:
            try:
                result = context.run(function, *arguments)
            except BaseException as error:  # noqa: BLE001  # whatever it is, the caller gets it
                _tell(loop, future, None, error)
            else:
                _tell(loop, future, result, None)

        self._busy += 1
        future.add_done_callback(self._ended)
        if self._busy > self._started and self._started < self._count:
            self._start()
        self._calls.put(call)
        return await future

    def close(self) -> None:
        """Let every thread end after what it does now; wait for none of them."""
        for _ in range(self._started):
            self._calls.put(None)
        self._started = 0

    def _start(self) -> None:
        self._started += 1
        name = f"{self._name}-{self._started}"
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def _ended(self, _: object) -> None:
        self._busy -= 1


def _tell(
    loop: asyncio.AbstractEventLoop,
    future: asyncio.Future[T],
    result: T | None,
    error: BaseException | None,
) -> None:
    """Hand the end of a call to its loop, unless the loop has gone without waiting for it."""

    def settle() -> None:
        if future.done():
            return
        if isinstance(error, StopIteration | StopAsyncIteration | KeyboardInterrupt | SystemExit):
            # A future refuses the first two; the others would end the loop from a thread.
            future.set_exception(RaisedInThread(error))
        elif error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    try:
        loop.call_soon_threadsafe(settle)
    except RuntimeError:
        return
