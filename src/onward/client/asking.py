"""What the calls of a client stand on, so that they can live in several files.

`Client` has all of it; `GroupCalls` and the others only say here what they use. Nothing of this is
for users.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

from onward.client.keeper import Keeper
from onward.client.link import Link
from onward.client.reader import CREDIT_BYTES, Reader
from onward.clock import Clock
from onward.durations import Duration
from onward.errors import InvalidRequest
from onward.message.message import Message
from onward.message.relative import SINCE_REVISION, Relative
from onward.protocol.operations import Request
from onward.protocol.operations.topics import TopicDescription
from onward.protocol.payloads import Start

Reply = TypeVar("Reply")


class Asking(ABC):
    """A client that can ask, read and tell the time."""

    _clock: Clock
    _timeout_s: float

    @abstractmethod
    async def _call(self, request: Request[Reply], *, wait_s: float = 0) -> Reply:
        """Return the reply to a request; repeat a repeatable one when the connection is lost."""

    @abstractmethod
    async def _call_once(self, link: Link, request: Request[Reply]) -> Reply | None:
        """Return the reply, or None when the connection was lost before it came."""

    @abstractmethod
    async def _ask(self, link: Link, encoded: bytes) -> bytes | bytearray | None:
        """Return the payload of the reply, or None when the connection was lost before it came."""

    @abstractmethod
    def _keeper(self) -> Keeper:
        """Return what keeps the connection."""

    @abstractmethod
    def _asked(self, durability: str | None) -> int:
        """Return the durability that is meant: the client's own when none is given."""

    @abstractmethod
    def _deadline(self, timeout: Duration | None, timeout_ms: int | None) -> float:
        """Return when a call that begins now has taken too long, by the clock of the loop."""

    @abstractmethod
    async def get(self, topic: str, offset: int) -> Message:
        """Return one message by its offset."""

    @abstractmethod
    async def topic(self, topic: str) -> TopicDescription:
        """Return what there is to know of one topic."""

    def _check_relative(self, *given: object) -> None:
        """Raise when a time is relative, and the broker is too old to resolve it."""
        link = self._keeper().link
        if link is None or link.welcome.revision >= SINCE_REVISION:
            return
        if any(isinstance(getattr(one, "time_ms", one), Relative) for one in given):
            raise InvalidRequest(
                f"broker {link.welcome.node!r} is older than this client and cannot resolve a "
                "time that is relative to its clock: update the broker, or give the time itself"
            )

    def _reader(self, topic: str, start: Start | str, credit_bytes: int = CREDIT_BYTES) -> Reader:
        """Return a reader to the end of a topic."""
        return Reader(
            self._keeper(), topic, follow=False, timeout_s=self._timeout_s,
            start=start,  # type: ignore[arg-type]  # "earliest" or "latest"
            credit_bytes=credit_bytes,
        )  # fmt: skip

    def _reader_at(self, topic: str, offset: int, credit_bytes: int) -> Reader:
        """Return a reader of what groups have: also of what outlives retention for them."""
        return Reader(
            self._keeper(), topic, follow=False, timeout_s=self._timeout_s, kept=True,
            start=Start(offset=offset), credit_bytes=credit_bytes,
        )  # fmt: skip

    async def _first_kept(self, topic: str) -> int:
        """Return the offset from which on messages of a topic may be there for its groups."""
        described = await self.topic(topic)
        return 0 if described.carried else described.first_offset
