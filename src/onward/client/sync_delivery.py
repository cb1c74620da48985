"""What consuming in a thread gives: the same deliveries and batches, whose verbs block.

    a thread ── verb ──▶ the client's own thread, where the delivery lives ──▶ its answer

What a delivery knows changes in the client's thread, whenever something arrives: so what is asked
of it is asked there, and any thread may ask.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine
from datetime import datetime
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from onward.client.delivery import Delivery
from onward.durations import Duration
from onward.errors import InvalidRequest, NotConnected
from onward.message.message import Message

if TYPE_CHECKING:
    from onward.client.delivery_batch import DeliveryBatch

T = TypeVar("T")

_fields_of = attrgetter(*Message.__struct_fields__)


class Calls(NamedTuple):
    """How a thread has something done by the client's thread."""

    run: Callable[[Coroutine[Any, Any, Any]], Any]
    """Wait for it, and return what it returns."""
    submit: Callable[[Coroutine[Any, Any, Any]], concurrent.futures.Future[Any]]
    """Do not wait."""

    def look(self, at: Callable[[], T]) -> T:
        """Return something that may be changing; after the client nothing changes any more.

        >>> def closed(work):
        ...     work.close()
        ...     raise NotConnected("the client is closed")
        >>> Calls(closed, closed).look(lambda: 7)
        7
        """

        async def look() -> T:
            return at()

        try:
            found: T = self.run(look())
        except (NotConnected, InvalidRequest):
            # Nothing changes any more, or this is the client's thread: it does not wait for itself.
            return at()
        return found


class SyncDelivery(Message, frozen=True, gc=True, eq=False):
    """A message that was delivered to this thread. Nothing is acked by itself.

    >>> from onward import connect_sync
    >>> with connect_sync("memory:") as mq:
    ...     receipt = mq.publish("orders", "hello")
    ...     for delivery in mq.consume("orders", group="billing"):
    ...         delivery.ack()
    ...         print(delivery.text, delivery.attempt)
    ...         break
    hello 1
    """

    attempt: int = 1
    delivery: Delivery | None = None
    calls: Calls | None = None
    deliveries: int = 1

    @classmethod
    def of(cls, delivery: Delivery, calls: Calls) -> SyncDelivery:
        """Return a delivery for threads."""
        make: Callable[..., SyncDelivery] = cls
        return make(*_fields_of(delivery), delivery.attempt, delivery, calls, delivery.deliveries)

    @property
    def is_redelivered(self) -> bool:
        """Return True if a program was given this message before, in this group."""
        return self.deliveries > 1

    @property
    def batch(self) -> SyncDeliveryBatch:
        """What this message was delivered with."""
        batch = self._delivery.batch
        assert batch is not None, "a delivery is made by its batch"
        return SyncDeliveryBatch(batch, self._calls)

    @property
    def group(self) -> str:
        """The group that this message was delivered to."""
        return self._delivery.group

    @property
    def member(self) -> str:
        """The member of the group that this message was delivered to."""
        return self._delivery.member

    @property
    def lease(self) -> int:
        """The number of the lease that this message is held by."""
        return self._delivery.lease

    @property
    def is_lost(self) -> bool:
        """Tell whether the lease is known to be lost: no verb would have an effect."""
        return self._calls.look(lambda: self._delivery.is_lost)

    @property
    def is_settled(self) -> bool:
        """Tell whether an outcome was given, by a verb of this message or of its batch."""
        return self._calls.look(lambda: self._delivery.is_settled)

    def ack(self) -> None:
        """Say that this message is done, and return when that is durable."""
        self._calls.run(self._delivery.ack())

    def ack_soon(self) -> concurrent.futures.Future[None]:
        """Ack without waiting; the future tells when it is durable, or the error.

        Acks that are given one after another travel together.

        >>> from onward import connect_sync
        >>> with connect_sync("memory:") as mq:
        ...     receipt = mq.publish_many("orders", ["a", "b"])
        ...     deliveries = mq.fetch("orders", group="billing", n=2)
        ...     futures = [delivery.ack_soon() for delivery in deliveries]
        ...     [future.result() for future in futures], mq.group("billing").backlog
        ([None, None], 0)
        """
        return self._calls.submit(_waited_for(self._delivery.ack_soon))

    def retry(
        self,
        *,
        after: Duration | None = None,
        after_ms: int | None = None,
        at: datetime | int | None = None,
        count: bool = True,
        cause: str = "",
    ) -> None:
        """Ask for this message again: after a while, at a time, or as the group's policy says."""
        self._calls.run(
            self._delivery.retry(after=after, after_ms=after_ms, at=at, count=count, cause=cause)
        )

    def retry_soon(
        self,
        *,
        after: Duration | None = None,
        after_ms: int | None = None,
        at: datetime | int | None = None,
        count: bool = True,
        cause: str = "",
    ) -> concurrent.futures.Future[None]:
        """Retry without waiting; the future tells when it is durable, or the error."""
        retry_soon = partial(
            self._delivery.retry_soon,
            after=after,
            after_ms=after_ms,
            at=at,
            count=count,
            cause=cause,
        )
        return self._calls.submit(_waited_for(retry_soon))

    def reject_soon(self, cause: str = "") -> concurrent.futures.Future[None]:
        """Reject without waiting; the future tells when it is durable, or the error."""
        return self._calls.submit(_waited_for(partial(self._delivery.reject_soon, cause)))

    def release_soon(self) -> concurrent.futures.Future[None]:
        """Release without waiting; the future tells when it is durable, or the error."""
        return self._calls.submit(_waited_for(self._delivery.release_soon))

    def reject(self, cause: str = "") -> None:
        """Say that this message can never succeed: it becomes a dead letter of the group."""
        self._calls.run(self._delivery.reject(cause))

    def renew(self) -> None:
        """Keep the lease for its whole time from now on; a consumer does so by itself."""
        self._calls.run(self._delivery.renew())

    def release(self) -> None:
        """Give this message back at once; the attempt does not count."""
        self._calls.run(self._delivery.release())

    def __repr__(self) -> str:
        return f"SyncDelivery({self.id!r}, attempt={self.attempt}, body={self.body[:40]!r})"

    @property
    def _delivery(self) -> Delivery:
        assert self.delivery is not None, "a delivery is made by its consumer"
        return self.delivery

    @property
    def _calls(self) -> Calls:
        assert self.calls is not None, "a delivery is made by its consumer"
        return self.calls


class SyncDeliveryBatch:
    """Messages of one topic that were delivered together, and the verbs for all of them.

    >>> from onward import connect_sync
    >>> with connect_sync("memory:") as mq:
    ...     receipt = mq.publish_many("orders", ["a", "b", "c"])
    ...     for batch in mq.consume("orders", group="billing").batches():
    ...         print(batch.bodies, batch.ack_soon().result())
    ...         break
    [b'a', b'b', b'c'] None
    """

    def __init__(self, batch: DeliveryBatch, calls: Calls) -> None:
        self._batch = batch
        self._calls = calls

    @property
    def topic(self) -> str:
        """The topic that all of them are from."""
        return self._batch.topic

    @property
    def group(self) -> str:
        """The group that this was delivered to."""
        return self._batch.group

    @property
    def member(self) -> str:
        """The member of the group that this was delivered to."""
        return self._batch.member

    @property
    def lease(self) -> int:
        """The number of the lease that all of them are held by."""
        return self._batch.lease

    @property
    def is_lost(self) -> bool:
        """Tell whether the lease is known to be lost: no verb would have an effect."""
        return self._calls.look(lambda: self._batch.is_lost)

    @property
    def count(self) -> int:
        """How many messages there are."""
        return self._batch.count

    @property
    def bodies(self) -> list[bytes]:
        """The body of each message."""
        return self._batch.bodies

    @property
    def keys(self) -> list[str | None]:
        """The key of each message."""
        return self._batch.keys

    @property
    def offsets(self) -> list[int]:
        """The offset of each message."""
        return self._batch.offsets

    def messages(self) -> list[SyncDelivery]:
        """Return each message as an object with verbs of its own."""
        # There, not here: what cannot be decoded is rejected on the way.
        found = self._calls.look(self._batch.messages)
        return [SyncDelivery.of(one, self._calls) for one in found]

    def ack(self) -> None:
        """Say that all that is left of this batch is done, and return when that is durable."""
        self._calls.run(self._batch.ack())

    def ack_soon(self) -> concurrent.futures.Future[None]:
        """Ack without waiting; the future tells when it is durable, or the error."""
        return self._calls.submit(_waited_for(self._batch.ack_soon))

    def retry(
        self,
        *,
        after: Duration | None = None,
        after_ms: int | None = None,
        at: datetime | int | None = None,
        count: bool = True,
        cause: str = "",
    ) -> None:
        """Ask again for all that is left of this batch."""
        self._calls.run(
            self._batch.retry(after=after, after_ms=after_ms, at=at, count=count, cause=cause)
        )

    def retry_soon(
        self,
        *,
        after: Duration | None = None,
        after_ms: int | None = None,
        at: datetime | int | None = None,
        count: bool = True,
        cause: str = "",
    ) -> concurrent.futures.Future[None]:
        """Retry without waiting; the future tells when it is durable, or the error."""
        retry_soon = partial(
            self._batch.retry_soon, after=after, after_ms=after_ms, at=at, count=count, cause=cause
        )
        return self._calls.submit(_waited_for(retry_soon))

    def reject_soon(self, cause: str = "") -> concurrent.futures.Future[None]:
        """Reject without waiting; the future tells when it is durable, or the error."""
        return self._calls.submit(_waited_for(partial(self._batch.reject_soon, cause)))

    def release_soon(self) -> concurrent.futures.Future[None]:
        """Release without waiting; the future tells when it is durable, or the error."""
        return self._calls.submit(_waited_for(self._batch.release_soon))

    def reject(self, cause: str = "") -> None:
        """Make dead letters of all that is left of this batch."""
        self._calls.run(self._batch.reject(cause))

    def renew(self) -> None:
        """Keep the lease for its whole time from now on; a consumer does so by itself."""
        self._calls.run(self._batch.renew())

    def release(self) -> None:
        """Give back all that is left of this batch; the attempt does not count."""
        self._calls.run(self._batch.release())

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        return f"Sync{self._batch!r}"


async def _waited_for(begin: Callable[[], asyncio.Future[None]]) -> None:
    await begin()
