"""A membership on one connection: what has to be told apart from the next one.

    asked ──REPLY──▶ taken ──▶ over: END, the connection was lost, or CANCEL was sent
      └──ERROR──▶ refused

After CANCEL only the END counts: the broker may have sent more before it knew, and gives it to
others. But what was delivered without a lease is finished: nobody else gets it, so it counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from onward.client.delivery_batch import NOT_LEASED
from onward.client.link import Link
from onward.client.settling import Settling
from onward.protocol.deliveries import Joined, decode_delivery
from onward.protocol.frames import Kind
from onward.protocol.payloads import Bytes


class Seat:
    """A membership on one connection: what has to be told apart from the next one."""

    __slots__ = ("_is_forgotten", "_on_frame", "answer", "id", "joined", "left", "link", "settling")

    def __init__(self, link: Link, on_frame: Callable[[Seat, int, Bytes], None]) -> None:
        loop = asyncio.get_running_loop()
        self._on_frame = on_frame
        self._is_forgotten = False
        self.link = link
        self.id = link.expect(self.take)
        link.member_count += 1
        self.answer: asyncio.Future[Joined] = loop.create_future()
        self.answer.add_done_callback(_look_at)
        self.joined: Joined | None = None
        self.settling: Settling | None = None
        self.left: asyncio.Future[None] | None = None

    @property
    def is_taken(self) -> bool:
        """Tell whether the broker counts us in, as far as we know."""
        return self.joined is not None and self.left is None and self.link.is_open

    def take(self, kind: int, payload: Bytes) -> None:
        """Take a frame of this membership; after we have said that we leave few of them count."""
        if self.left is None or (kind == Kind.DELIVERY and _is_finished(payload)):
            self._on_frame(self, kind, payload)
        elif kind in (Kind.END, Kind.ERROR):
            self.forget()
            if not self.left.done():
                self.left.set_result(None)

    def forget(self) -> None:
        """Expect nothing more from the broker for this membership."""
        if not self._is_forgotten:
            self._is_forgotten = True
            self.link.member_count -= 1
            self.link.forget(self.id)

    def cancel(self) -> None:
        """Tell the broker that we leave; `left` ends when it has taken note."""
        self.left = asyncio.get_running_loop().create_future()
        if self.link.is_open:
            self.link.send(Kind.CANCEL, self.id)
        else:
            self.left.set_result(None)


def _is_finished(payload: Bytes) -> bool:
    """Tell whether a DELIVERY brings what is finished already: at most once."""
    return decode_delivery(payload).delivery == NOT_LEASED


def _look_at(answer: asyncio.Future[Joined]) -> None:
    """Whoever waited for it may have given up."""
    if not answer.cancelled():
        answer.exception()
