"""Consuming in a thread: the same deliveries and the same verbs, blocking.

    for delivery in mq.consume("orders", group="billing"):
        delivery.ack()

Leases are renewed by the client's own thread, however long this one takes with a message. Leaving
the loop leaves the group: what was not settled is given back to the others at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from datetime import datetime
from operator import attrgetter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from onward.client.delivery import Delivery
from onward.client.topics import Duration
from onward.errors import NotConnected
from onward.message.message import Message

if TYPE_CHECKING:
    from onward.client.consumer import Consumer
    from onward.client.delivery_batch import DeliveryBatch

Run = Callable[[Coroutine[Any, Any, Any]], Any]
T = TypeVar("T")

_fields_of = attrgetter(*Message.__struct_fields__)


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
    run: Run | None = None

    @classmethod
    def of(cls, delivery: Delivery, run: Run) -> SyncDelivery:
        """Return a delivery for threads."""
        make: Callable[..., SyncDelivery] = cls
        return make(*_fields_of(delivery), delivery.attempt, delivery, run)

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
        return self._delivery.is_lost

    def ack(self) -> None:
        """Say that this message is done, and return when that is durable."""
        self._do(self._delivery.ack())

    def retry(
        self,
        *,
        after: Duration | None = None,
        at: datetime | int | None = None,
        count: bool = True,
        cause: str = "",
    ) -> None:
        """Ask for this message again: after a while, at a time, or as the group's policy says."""
        self._do(self._delivery.retry(after=after, at=at, count=count, cause=cause))

    def reject(self, cause: str = "") -> None:
        """Say that this message can never succeed: it becomes a dead letter of the group."""
        self._do(self._delivery.reject(cause))

    def renew(self) -> None:
        """Keep the lease for its whole time from now on; a consumer does so by itself."""
        self._do(self._delivery.renew())

    def release(self) -> None:
        """Give this message back at once; the attempt does not count."""
        self._do(self._delivery.release())

    def __repr__(self) -> str:
        return f"SyncDelivery({self.id!r}, attempt={self.attempt}, body={self.body[:40]!r})"

    @property
    def _delivery(self) -> Delivery:
        assert self.delivery is not None, "a delivery is made by its consumer"
        return self.delivery

    def _do(self, verb: Coroutine[Any, Any, None]) -> None:
        assert self.run is not None
        self.run(verb)


class SyncDeliveryBatch:
    """Messages of one topic that were delivered together, and the verbs for all of them."""

    def __init__(self, batch: DeliveryBatch, run: Run) -> None:
        self._batch = batch
        self._run = run

    @property
    def topic(self) -> str:
        """The topic that all of them are from."""
        return self._batch.topic

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
        return [SyncDelivery.of(one, self._run) for one in self._batch.messages()]

    def ack(self) -> None:
        """Say that all that is left of this batch is done, and return when that is durable."""
        self._run(self._batch.ack())

    def retry(
        self,
        *,
        after: Duration | None = None,
        at: datetime | int | None = None,
        count: bool = True,
        cause: str = "",
    ) -> None:
        """Ask again for all that is left of this batch."""
        self._run(self._batch.retry(after=after, at=at, count=count, cause=cause))

    def reject(self, cause: str = "") -> None:
        """Make dead letters of all that is left of this batch."""
        self._run(self._batch.reject(cause))

    def renew(self) -> None:
        """Keep the lease for its whole time from now on; a consumer does so by itself."""
        self._run(self._batch.renew())

    def release(self) -> None:
        """Give back all that is left of this batch; the attempt does not count."""
        self._run(self._batch.release())

    def __len__(self) -> int:
        return self.count


class SyncConsumer:
    """A member of a group in a thread. Use it with `for`, its `batches()`, or `fetch`."""

    def __init__(self, consumer: Consumer, run: Run) -> None:
        self._consumer = consumer
        self._run = run

    def __enter__(self) -> Self:
        """Join the group, or raise why that is not possible."""
        self._run(self._consumer.__aenter__())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the group; what was not settled is given back."""
        self.close()

    def close(self) -> None:
        """Leave the group; what was not settled is given back."""
        with contextlib.suppress(NotConnected):
            self._run(self._consumer.aclose())

    def __iter__(self) -> Iterator[SyncDelivery]:
        """Give each message. Leaving the loop leaves the group."""
        for delivery in self._each(aiter(self._consumer)):
            yield SyncDelivery.of(delivery, self._run)

    def batches(self) -> Iterator[SyncDeliveryBatch]:
        """Give messages as they were delivered: many at once, as columns."""
        for batch in self._each(self._consumer.batches()):
            yield SyncDeliveryBatch(batch, self._run)

    def fetch(self, n: int = 1, *, wait: Duration = "1s") -> list[SyncDelivery]:
        """Return up to `n` messages: as soon as there is one, none when none came in time."""
        found = self._run(self._consumer.fetch(n, wait=wait))
        return [SyncDelivery.of(delivery, self._run) for delivery in found]

    def _each(self, given: AsyncIterator[T]) -> Iterator[T]:
        try:
            while (one := self._run(_next(given))) is not None:
                yield one
        finally:
            with contextlib.suppress(NotConnected):
                self._run(_close(given))


async def _next(given: AsyncIterator[T]) -> T | None:
    return await anext(given, None)


async def _close(given: AsyncIterator[Any]) -> None:
    # What a consumer gives are generators: closing one leaves the group.
    if isinstance(given, AsyncGenerator):
        await given.aclose()
