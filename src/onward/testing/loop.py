"""An event loop in virtual time: hours pass in milliseconds, and the same way again from one seed.

When nothing is ready the loop does not wait: it moves its clock to the next timer. When there is
no timer either, nothing can ever happen again, and it raises `Deadlock` instead of hanging.

Rules:
- One thread. `run_in_executor` runs its function on the loop, after a random time, each executor
  in the order of its calls; `call_soon_threadsafe` is refused from any other thread.
- No sockets, signals or subprocesses: `LossyNetwork` is the only way out.
- All chance comes from `loop.random`. What must be avoided by the code under test, or the same seed
  gives another run: iterating over a set of objects (ordered by address) or of str and bytes
  (ordered by PYTHONHASHSEED; a dict keeps its order and is fine), sorting by id(), the module
  `random`, uuid4, os.urandom, and any real clock. Ready callbacks stay first in, first out, as in
  asyncio: disorder comes from delays.
- Errors that nobody caught (in a callback, in a forgotten task) fail the run when it ends.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from random import Random
from typing import Any, TypeVar, TypeVarTuple, Unpack

from onward.testing.clock import START_MS

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# A run in which time has stood still for so many turns will not move any more.
TURNS_WITHOUT_TIME_MAX = 1_000_000
EXECUTOR_MS_MAX = 5


class Deadlock(Exception):
    """Nothing can ever happen again: nothing is ready and no timer is set."""


def run(
    coroutine: Coroutine[Any, Any, T], *, seed: int, executor_ms_max: int = EXECUTOR_MS_MAX
) -> T:
    """Run `coroutine` to its end in virtual time, and return its result.

    >>> async def main() -> float:
    ...     await asyncio.sleep(3600)
    ...     return running_loop().time()
    >>> run(main(), seed=7)
    3600.0
    """
    loop = VirtualLoop(Random(seed), executor_ms_max=executor_ms_max)
    try:
        return _run_on(loop, coroutine)
    finally:
        loop.close()


def running_loop() -> VirtualLoop:
    """Return the virtual loop that runs now: `running_loop().random` is the run's chance."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop), "this code runs outside of onward.testing.loop.run"
    return loop


class VirtualLoop(asyncio.BaseEventLoop):
    """A loop whose time is a number; see the rules of this module."""

    def __init__(self, random: Random, *, executor_ms_max: int = EXECUTOR_MS_MAX) -> None:
        super().__init__()
        self.random = random
        self.now_us = 0
        # The first of these fails the run.
        self.errors: list[BaseException] = []
        self._executor_us_max = executor_ms_max * 1000
        self._executor_free_at_us: dict[object, int] = {}
        self._thread = threading.get_ident()
        # These two are what asyncio's loop asks of its subclasses: a selector, and the resolution
        # within which a timer is due.
        self._selector = _TimeSelector(self)
        self._clock_resolution = 1e-6
        self.set_task_factory(_NumberedTasks())
        self.set_exception_handler(_keep_error)

    def time(self) -> float:
        """Return the virtual seconds since this loop began."""
        return self.now_us / 1_000_000

    def call_soon_threadsafe(
        self,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.Handle:
        """Call soon; only from the loop's own thread, because another one has no seed."""
        if threading.get_ident() != self._thread:
            raise RuntimeError("a virtual loop has one thread: use run_in_executor")
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(
        self, executor: object, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Run `func` on this thread, at a random time soon; its result comes later still."""
        future: asyncio.Future[T] = self.create_future()
        start_us = max(self.now_us, self._executor_free_at_us.get(executor, 0))
        work_us = start_us + self.random.randint(0, self._executor_us_max)
        done_us = work_us + self.random.randint(0, self._executor_us_max)
        self._executor_free_at_us[executor] = done_us

        def work() -> None:
            if not future.cancelled():
                self.call_at(done_us / 1_000_000, _settle(future, func, args))

        self.call_at(work_us / 1_000_000, work)
        return future

    # asyncio's loop calls the following two; there are no events and there is nobody to wake.
    def _process_events(self, event_list: list[object]) -> None:
        assert not event_list

    def _write_to_self(self) -> None:
        pass


class VirtualClock:
    """A `Clock` that follows a virtual loop; its wall clock can be set wrong with `jump`.

    >>> async def main() -> tuple[int, int]:
    ...     clock = VirtualClock(running_loop(), start_ms=1_000)
    ...     await asyncio.sleep(0.25)
    ...     clock.jump(-1_000)
    ...     return clock.now_ms(), clock.monotonic_ms()
    >>> run(main(), seed=7)
    (250, 250)
    """

    def __init__(self, loop: VirtualLoop, *, start_ms: int = START_MS) -> None:
        self._loop = loop
        self._start_ms = start_ms

    def now_ms(self) -> int:
        """Return the wall clock's time in milliseconds since 1970."""
        return self._start_ms + self.monotonic_ms()

    def monotonic_ms(self) -> int:
        """Return the virtual milliseconds since the loop began."""
        return self._loop.now_us // 1000

    def jump(self, ms: int) -> None:
        """Set the wall clock `ms` milliseconds forwards or (negative) backwards."""
        self._start_ms += ms


class _TimeSelector:
    """What the loop asks for events: there are none, but time passes."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._turns_without_time = 0

    def select(self, timeout: float | None) -> list[object]:
        if timeout is None:
            raise Deadlock(f"nothing can ever happen again; waiting: {_waiting(self._loop)}")
        # Rounded first: 0.57 s are 570,000 us, not the 570,001 that float arithmetic may give.
        passed_us = math.ceil(round(timeout * 1_000_000, 3))
        self._turns_without_time = 0 if passed_us else self._turns_without_time + 1
        if self._turns_without_time > TURNS_WITHOUT_TIME_MAX:
            self._turns_without_time = 0  # the tasks that are left must be able to end
            raise Deadlock(f"time stands still; running or waiting: {_waiting(self._loop)}")
        self._loop.now_us += passed_us
        return []


class _NumberedTasks:
    """Names tasks per loop: asyncio counts them per process, and runs would differ in it."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def __call__(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, T] | Generator[Any, None, T],
        /,
        *,
        name: str | None = None,
        **options: Any,
    ) -> asyncio.Task[T]:
        number = next(self._numbers)
        name = name or f"task-{number}"
        return _NumberedTask(coroutine, number, loop=loop, name=name, **options)


class _NumberedTask(asyncio.Task[T]):
    """A task whose hash is its number: a task group cancels its set of tasks in one order."""

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, T] | Generator[Any, None, T],
        number: int,
        **options: Any,
    ) -> None:
        self._number = number
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self._number


def _run_on(loop: VirtualLoop, coroutine: Coroutine[Any, Any, T]) -> T:
    try:
        result = loop.run_until_complete(coroutine)
    finally:
        _cancel_all(loop)
        loop.run_until_complete(loop.shutdown_asyncgens())
    if loop.errors:
        raise loop.errors[0]
    return result


def _cancel_all(loop: VirtualLoop) -> None:
    left = sorted(asyncio.all_tasks(loop), key=_task_order)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))


def _settle(
    future: asyncio.Future[T], func: Callable[[Unpack[Ts]], T], args: tuple[*Ts]
) -> Callable[[], None]:
    """Do the work now, and return what tells the future about it."""
    try:
        result = func(*args)
    except Exception as error:  # noqa: BLE001 - whoever awaits the future gets it
        failure = error
        return lambda: None if future.done() else future.set_exception(failure)
    return lambda: None if future.done() else future.set_result(result)


def _keep_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    assert isinstance(loop, VirtualLoop)
    loop.errors.append(context.get("exception") or RuntimeError(context["message"]))


def _waiting(loop: VirtualLoop) -> str:
    tasks = sorted(asyncio.all_tasks(loop), key=_task_order)
    return ", ".join(f"{task.get_name()} ({_name(task)})" for task in tasks) or "no task"


def _name(task: asyncio.Task[Any]) -> str:
    return getattr(task.get_coro(), "__qualname__", "?")


def _task_order(task: asyncio.Task[Any]) -> tuple[int, str]:
    return len(task.get_name()), task.get_name()
