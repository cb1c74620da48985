"""From a REQUEST frame to its REPLY: one path for all operations.

    look up ─▶ decode ─▶ permitted? ─▶ leader and disk? ─▶ room? ─▶ handler ─▶ REPLY or ERROR

A handler is a coroutine that takes the decoded request and returns the reply that the table of
operations declares. It begins at once, within the frame: what it does before its first `await`
takes effect before the next frame of the connection is looked at. Only a handler that waits becomes
a task; the number of these is bounded in all, for each requester, and for each operation. Before
its first `await` a handler is in no task: `asyncio.timeout` and task groups may only follow it.

When a connection is lost, operations that change nothing are cancelled; the others come to their
end, for what they began must not be left half done.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Iterable
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from onward.broker.permissions import Policy
from onward.broker.requester import Requester
from onward.errors import OnwardError, Overloaded, Unavailable
from onward.protocol.frames import Kind, frame
from onward.protocol.operations import Operation, Request, decode_request, operation_of

logger = logging.getLogger("onward.operations")

RUNNING_MAX = 20_000
RUNNING_PER_REQUESTER_MAX = 1_000
RETRY_AFTER_MS = 100

Reply = TypeVar("Reply", bound=msgspec.Struct)
P = ParamSpec("P")
Handling = Coroutine[Any, Any, msgspec.Struct]
Handler = Callable[[Any, Requester], Handling]


def answers(
    request: type[Request[Reply]],
) -> Callable[
    [Callable[Concatenate[Any, P], Coroutine[Any, Any, Reply]]],
    Callable[Concatenate[Any, P], Coroutine[Any, Any, Reply]],
]:
    """Mark a method as the handler of an operation: `(request)`, or `(request, requester)`."""

    def mark(
        method: Callable[Concatenate[Any, P], Coroutine[Any, Any, Reply]],
    ) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, Reply]]:
        method.answers = request  # type: ignore[attr-defined]
        return method

    return mark


class Dispatcher:
    """Answers the requests of one node."""

    def __init__(
        self,
        parts: Iterable[object],
        *,
        policy: Policy,
        check_writable: Callable[..., None],
    ) -> None:
        self._handlers = {name: handler for part in parts for name, handler in _handlers_of(part)}
        self._policy = policy
        self._check_writable = check_writable
        self._running: dict[asyncio.Task[msgspec.Struct], tuple[Requester, Operation]] = {}
        self._by_operation: Counter[str] = Counter()
        self._by_requester: dict[Requester, set[asyncio.Task[msgspec.Struct]]] = {}

    @property
    def names(self) -> frozenset[str]:
        """Return the names of the operations that have a handler."""
        return frozenset(self._handlers)

    # --- one request -------------------------------------------------------------------------

    def receive(self, requester: Requester, request_id: int, payload: bytes | bytearray) -> None:
        """Answer one REQUEST frame, now or when its handler has ended; raise if it is refused."""
        request = decode_request(payload)
        operation = operation_of(request)
        self._check(requester, operation, request)
        handling = self._handlers[operation.name](request, requester)
        try:
            awaited = handling.send(None)
        except StopIteration as ended:
            _reply(requester, request_id, ended.value)
        except OnwardError:
            raise
        except Exception as error:
            raise _unexpected(operation, error) from error
        else:
            task = asyncio.get_running_loop().create_task(_Rest(handling, awaited))
            self._add(task, requester, operation)
            task.add_done_callback(partial(self._ended, request_id))

    async def call(self, requester: Requester, request: Request[Reply]) -> Reply:
        """Run one operation for a requester inside this process and return its reply.

        >>> # reply = await broker.operations.call(broker.inside, DescribeTopic(topic="orders"))
        """
        operation = operation_of(request)
        self._check(requester, operation, request)
        # The decorator `answers` has checked the type of the reply.
        return await self._handlers[operation.name](request, requester)  # type: ignore[return-value]

    def _check(self, requester: Requester, operation: Operation, request: Request[Any]) -> None:
        self._policy.check(requester.principal, operation, request)
        if operation.changes and not operation.any_role:
            self._check_writable(even_when_full=operation.while_full)
        if self._by_operation[operation.name] >= operation.running_max:
            said = f"{operation.running_max} requests {operation.name!r} are under way"
            raise Overloaded(said, retry_after_ms=RETRY_AFTER_MS)
        of_requester = len(self._by_requester.get(requester, ()))
        if of_requester >= RUNNING_PER_REQUESTER_MAX or len(self._running) >= RUNNING_MAX:
            raise Overloaded("too many requests are under way", retry_after_ms=RETRY_AFTER_MS)

    # --- those that wait ---------------------------------------------------------------------

    def _add(
        self, task: asyncio.Task[msgspec.Struct], requester: Requester, operation: Operation
    ) -> None:
        self._running[task] = requester, operation
        self._by_operation[operation.name] += 1
        self._by_requester.setdefault(requester, set()).add(task)

    def _ended(self, request_id: int, task: asyncio.Task[msgspec.Struct]) -> None:
        requester, operation = self._running.pop(task)
        self._by_operation[operation.name] -= 1
        self._by_requester[requester].remove(task)
        if not self._by_requester[requester]:
            del self._by_requester[requester]
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            _reply(requester, request_id, task.result())
        elif isinstance(error, OnwardError):
            requester.refuse(request_id, error)
        else:
            requester.refuse(request_id, _unexpected(operation, error))

    def forget(self, requester: Requester) -> None:
        """Cancel what a lost connection only asked for."""
        for task in self._by_requester.get(requester, ()):
            _, operation = self._running[task]
            if not operation.changes:
                task.cancel()

    async def drain(self) -> None:
        """Return when every operation that changes something is answered."""
        while changing := [task for task, (_, row) in self._running.items() if row.changes]:
            await asyncio.wait(changing)

    def stop(self) -> None:
        """Cancel everything that is still running."""
        for task in self._running:
            task.cancel()


def _handlers_of(part: object) -> Iterable[tuple[str, Handler]]:
    for name in dir(type(part)):
        method = getattr(type(part), name)
        if (request := getattr(method, "answers", None)) is not None:
            bound = getattr(part, name)
            yield str(request.__struct_config__.tag), _with_requester(bound)


def _with_requester(method: Callable[..., Coroutine[Any, Any, msgspec.Struct]]) -> Handler:
    if len(inspect.signature(method).parameters) == 2:
        return method
    return lambda request, requester: method(request)


class _Rest(Coroutine[Any, None, msgspec.Struct]):
    """The rest of a handler that has begun and yielded its first awaitable, for a task to run.

    It is a coroutine by itself: one that awaited the handler would not have begun when its task is
    cancelled before the first step, and the handler would not get the cancellation.
    """

    def __init__(self, handling: Handling, awaited: Any) -> None:
        self._handling = handling
        self._awaited = awaited
        self._is_awaited = False

    def send(self, value: None) -> Any:
        """Hand the first awaitable to the task; later continue the handler."""
        if self._is_awaited:
            return self._handling.send(value)
        self._is_awaited = True
        return self._awaited

    def throw(self, *error: Any) -> Any:
        """Raise an exception in the handler, where it waits."""
        if not self._is_awaited and asyncio.isfuture(self._awaited):
            self._awaited.cancel()
        self._is_awaited = True
        return self._handling.throw(*error)

    def close(self) -> None:
        """End the handler."""
        self._handling.close()

    def __await__(self) -> Generator[Any, None, msgspec.Struct]:
        raise NotImplementedError("a task runs it")


def _reply(requester: Requester, request_id: int, reply: msgspec.Struct) -> None:
    requester.write(frame(Kind.REPLY, request_id, msgspec.json.encode(reply)))


def _unexpected(operation: Operation, error: BaseException) -> Unavailable:
    if not isinstance(error, OSError):
        logger.error("operation %r failed", operation.name, exc_info=error)
    return Unavailable(f"{operation.name} failed: {error}")
