"""How a REQUEST is answered: with a JSON object.

At once, when what it changed is durable, or when what it asks for has been read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING

from onward.errors import OnwardError, Overloaded, Unavailable
from onward.protocol.frames import Kind
from onward.protocol.payloads import encode_json

if TYPE_CHECKING:
    from onward.broker.session import Session

logger = logging.getLogger("onward.requests")

Done = Callable[[OnwardError | None], None]
"""Called once: with None when it is durable, else with why it is not."""
Operation = Callable[["Session", int, bytes | bytearray], None]
"""Takes one REQUEST: session, request id, payload; raises when it cannot be done."""


def reply(session: Session, request_id: int, fields: Mapping[str, object]) -> None:
    """Answer a request."""
    session.send(Kind.REPLY, request_id, encode_json(fields))


def reply_when_done(
    session: Session, request_id: int, fields: Callable[[], Mapping[str, object]]
) -> Done:
    """Return what answers a request when it is done; `fields` is called then, not before."""

    def done(error: OnwardError | None) -> None:
        if error is None:
            reply(session, request_id, fields())
        else:
            session.refuse(request_id, error)

    return done


def when_all(count: int, done: Done) -> Done:
    """Return what is called `count` times, and then tells `done` the first error, or None.

    >>> one = when_all(2, print)
    >>> one(None); one(None)
    None
    """
    errors: list[OnwardError | None] = []

    def one(error: OnwardError | None) -> None:
        errors.append(error)
        if len(errors) == count:
            done(next((error for error in errors if error is not None), None))

    return one


def and_then(step: Callable[[], None], done: Done) -> Done:
    """Return what takes the next step when one is durable; `done` hears of what fails.

    >>> and_then(lambda: print("next"), print)(None)
    next
    """

    def go_on(error: OnwardError | None) -> None:
        if error is not None:
            done(error)
            return
        try:
            step()
        except OnwardError as refused:
            done(refused)

    return go_on


class ReadReplies:
    """Answers that must be read from the log first: a bounded number at a time, none unseen."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._tasks: set[asyncio.Task[Mapping[str, object]]] = set()

    def check_room(self) -> None:
        """Raise `Overloaded` when too many are under way; to be called before `begin`."""
        if len(self._tasks) >= self._limit:
            raise Overloaded(f"{self._limit} such requests are under way", retry_after_ms=100)

    def begin(
        self, session: Session, request_id: int, fields: Coroutine[None, None, Mapping[str, object]]
    ) -> None:
        """Answer a request with what `fields` returns, or with what it raises."""
        task = asyncio.get_running_loop().create_task(fields)
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, session, request_id))

    def _ended(
        self, session: Session, request_id: int, task: asyncio.Task[Mapping[str, object]]
    ) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            reply(session, request_id, task.result())
        elif isinstance(error, OnwardError):
            session.refuse(request_id, error)
        else:
            if not isinstance(error, OSError):
                logger.error("finding out what a request asks for failed", exc_info=error)
            session.refuse(request_id, Unavailable(f"this cannot be found out now: {error}"))
