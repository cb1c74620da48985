"""One message as a member of a group gets it: the message, which attempt it is, and the verbs.

    delivered ──▶ ack       done: never again in this group
              ├─▶ retry     again after a while, or at a time; counted unless said otherwise
              ├─▶ reject    never again: a dead letter of the group, with the cause
              ├─▶ release   given back at once, not counted as an attempt
              └─▶ (nothing) when its lease ends, or its member dies, it comes again

A verb returns when its effect is durable. `LeaseLost` means that the message is no longer this
member's: somebody else has it, or will get it, and nothing was changed. So does any other error of
the broker's (`DiskFull`): whoever gave the outcome is told why, and the message comes again. Only
`InvalidRequest` changes nothing at all: say it better.
"""

from __future__ import annotations

import asyncio
from datetime import datetime

from onward.durations import Duration
from onward.message.message import Message


class Delivery(Message, frozen=True, gc=True, eq=False):
    """A message that was delivered to a member of a group. Nothing is acked by itself.

    >>> from onward import connect
    >>> async def main() -> tuple[int, bytes]:
    ...     async with connect("memory:") as mq:
    ...         await mq.publish("orders", "hello")
    ...         async for delivery in mq.consume("orders", group="billing"):
    ...             await delivery.ack()
    ...             return delivery.attempt, delivery.body
    >>> asyncio.run(main())
    (1, b'hello')
    """

    attempt: int = 1
    """Which attempt at this message in its group this is, from 1 on."""
    batch: delivery_batch.DeliveryBatch | None = None
    """What this message was delivered with."""
    deliveries: int = 1
    """Which delivery of this message to its group this is, from 1 on: attempts, and deliveries that
    did not count as one because the program released the message or retried it uncounted."""

    @property
    def is_redelivered(self) -> bool:
        """Return True if a program was given this message before, in this group."""
        return self.deliveries > 1

    @property
    def group(self) -> str:
        """The group that this message was delivered to."""
        return self._batch.group

    @property
    def member(self) -> str:
        """The member of the group that this message was delivered to."""
        return self._batch.member

    @property
    def lease(self) -> int:
        """The number of the lease that this message is held by."""
        return self._batch.lease

    @property
    def is_lost(self) -> bool:
        """Tell whether the lease is known to be lost: no verb would have an effect."""
        return self.batch is not None and self.batch.has_lost(self.offset)

    @property
    def is_settled(self) -> bool:
        """Tell whether an outcome was given, by a verb of this message or of its batch."""
        return self.offset not in self._batch.held

    async def ack(self) -> None:
        """Say that this message is done, and return when that is durable.

        All acks of one turn of the event loop travel together.
        """
        await self._batch.ack_range(self.offset, self.offset + 1)

    def ack_soon(self) -> asyncio.Future[None]:
        """Ack without waiting; the future tells when it is durable, or the error."""
        return self._batch.ack_range_soon(self.offset, self.offset + 1)

    async def retry(
        self,
        *,
        after: Duration | None = None,
        after_ms: int | None = None,
        at: datetime | int | None = None,
        count: bool = True,
        cause: str = "",
    ) -> None:
        """Ask for this message again: after a while, at a time, or as the group's policy says.

        With `count=False` the attempt does not count.
        """
        await self._batch.retry_range(
            self.offset,
            self.offset + 1,
            after=after,
            after_ms=after_ms,
            at=at,
            count=count,
            cause=cause,
        )

    def retry_soon(
        self,
        *,
        after: Duration | None = None,
        after_ms: int | None = None,
        at: datetime | int | None = None,
        count: bool = True,
        cause: str = "",
    ) -> asyncio.Future[None]:
        """Retry without waiting; the future tells when it is durable, or the error."""
        return self._batch.retry_one_soon(
            self.offset, after=after, after_ms=after_ms, at=at, count=count, cause=cause
        )

    async def reject(self, cause: str = "") -> None:
        """Say that this message can never be handled: it becomes a dead letter of the group."""
        await self._batch.settle_range("reject", self.offset, self.offset + 1, cause=cause)

    def reject_soon(self, cause: str = "") -> asyncio.Future[None]:
        """Reject without waiting; the future tells when it is durable, or the error."""
        return self._batch.settle_soon("reject", (self.offset, self.offset + 1), cause=cause)

    async def renew(self) -> None:
        """Keep the lease for its whole time from now on; a consumer does so by itself."""
        await self._batch.renew_for(self.offset)

    async def release(self) -> None:
        """Give this message back at once; the attempt does not count."""
        await self._batch.settle_range("release", self.offset, self.offset + 1)

    def release_soon(self) -> asyncio.Future[None]:
        """Release without waiting; the future tells when it is durable, or the error."""
        return self._batch.settle_soon("release", (self.offset, self.offset + 1))

    def __repr__(self) -> str:
        return f"Delivery({self.id!r}, attempt={self.attempt}, body={self.body[:40]!r})"

    @property
    def _batch(self) -> delivery_batch.DeliveryBatch:
        assert self.batch is not None, "a delivery is made by its batch"
        return self.batch


# The annotations above name it, and `help(Delivery)` reads them. At the end, because the module
# makes deliveries: each of the two modules may be imported first.
from onward.client import delivery_batch  # noqa: E402
