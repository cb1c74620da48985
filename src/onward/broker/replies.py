"""How a REQUEST is answered: with a JSON object, at once or when what it changed is durable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from onward.errors import OnwardError
from onward.protocol.frames import Kind
from onward.protocol.payloads import encode_json

if TYPE_CHECKING:
    from onward.broker.session import Session

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
