"""Questions of a member to which the answer is only that everything before it has arrived.

Frames keep their order: when the answer is here, so is whatever the broker sent before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from onward.client.link import Link
from onward.client.seat import Seat
from onward.errors import InvalidRequest, OnwardError
from onward.protocol.frames import Kind
from onward.protocol.operations import encode_request
from onward.protocol.operations.groups import AwaitServed
from onward.protocol.payloads import decode_error

CATCH_UP_S_MAX = 0.25


async def catch_up(link: Link) -> None:
    """Wait until what the broker has sent by now is here; not for long, if it is far or busy."""
    answered = asyncio.Event()
    request_id = link.expect(lambda kind, payload: answered.set())
    link.send(Kind.PING, request_id)
    try:
        async with asyncio.timeout(CATCH_UP_S_MAX) as limit:
            await answered.wait()
    except TimeoutError:
        if not limit.expired():
            raise
    finally:
        link.forget(request_id)


class ServedQuestion:
    """Asks the broker to answer when it has sent all that is ready for this member."""

    def __init__(self, seat: Seat, on_answer: Callable[[], None]) -> None:
        self._on_answer = on_answer
        self._link = seat.link
        self.is_answered = False
        self._error: OnwardError | None = None
        self._request_id = seat.link.expect(self._take)
        request = AwaitServed(consumer=seat.id)
        seat.link.send(Kind.REQUEST, self._request_id, encode_request(request))

    def _take(self, kind: int, payload: bytes | bytearray) -> None:
        self._error = decode_error(payload) if kind == Kind.ERROR else None
        self.is_answered = True
        self._on_answer()

    async def check(self) -> None:
        """Raise the error that was the answer; a broker that is too old to know is asked simpler.

        When it has refused the question it has read the credit; behind one more round trip it has
        used it, unless it must read from its disk.
        """
        if isinstance(self._error, InvalidRequest):
            await catch_up(self._link)
        elif self._error is not None:
            raise self._error

    def close(self) -> None:
        """Expect no answer any more."""
        self._link.forget(self._request_id)
