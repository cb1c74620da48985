"""Consuming in a thread: the same calls as a consumer's, blocking.

    for delivery in mq.consume("orders", group="billing"):
        delivery.ack()

Leases are renewed by the client's own thread, however long this one takes with a message. Leaving
the loop leaves the group: what was not settled is given back to the others at once. One thread
takes; any other may `stop` it.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from onward.client.sync_delivery import Calls, SyncDelivery, SyncDeliveryBatch
from onward.durations import Duration
from onward.errors import NotConnected

if TYPE_CHECKING:
    from onward.client.consumer import Consumer
    from onward.client.delivery import Delivery

T = TypeVar("T")


class SyncConsumer:
    """A member of a group in a thread. Use it with `for`, its `batches()`, or `fetch`.

    >>> from onward import connect_sync
    >>> with connect_sync("memory:") as mq, mq.consume("orders", group="billing") as consumer:
    ...     receipt = mq.publish_many("orders", ["a", "b"])
    ...     deliveries = consumer.fetch(10, wait="1s")
    ...     consumer.mode, [delivery.text for delivery in deliveries]
    ('shared', ['a', 'b'])
    """

    def __init__(self, consumer: Consumer, calls: Calls) -> None:
        self._consumer = consumer
        self._calls = calls

    @property
    def group(self) -> str:
        """The group's name."""
        return self._consumer.group

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics that were named, else those of the group now."""
        return self._consumer.topics

    @property
    def member(self) -> str:
        """The name by which the group knows this consumer."""
        return self._consumer.member

    @property
    def mode(self) -> str:
        """The group's mode; empty before the first join."""
        return self._consumer.mode

    @property
    def lease_ms(self) -> int:
        """For how long a message is leased; 0 before the first join."""
        return self._consumer.lease_ms

    @property
    def retry_limit(self) -> int:
        """How often a message is delivered at most, as said at the last join; 0 before."""
        return self._consumer.retry_limit

    @property
    def at_most_once(self) -> bool:
        """Tell whether what comes is finished already; False before the first join."""
        return self._consumer.at_most_once

    @property
    def is_standby(self) -> bool:
        """Tell whether another member of an exclusive group was active when this one joined."""
        return self._consumer.is_standby

    @property
    def is_joined(self) -> bool:
        """Tell whether the broker counts this member in, as far as is known here."""
        return self._calls.look(lambda: self._consumer.is_joined)

    # --- joining and leaving -----------------------------------------------------------------

    def __enter__(self) -> Self:
        """Join the group, or raise why that is not possible."""
        self._calls.run(self._consumer.__aenter__())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the group; what was not settled is given back."""
        self.close()

    def join(self) -> None:
        """Join the group now; taking messages does it by itself.

        >>> from onward import connect_sync
        >>> with connect_sync("memory:") as mq:
        ...     first, second = [
        ...         mq.consume("reports", group="printer", mode="exclusive") for _ in range(2)
        ...     ]
        ...     first.join()
        ...     second.join()
        ...     first.is_standby, second.is_standby
        (False, True)
        """
        self._calls.run(self._consumer.join())

    def stop(self) -> None:
        """Take nothing more: loops end, and what waits is given back.

        It does not wait, so any thread may call it, and a signal handler too. In a group that
        delivers at most once what waits is handed out first. What was taken stays leased until
        `close`, so that it can be finished and settled.

        >>> from onward import connect_sync
        >>> with connect_sync("memory:") as mq, mq.consume("orders", group="billing") as consumer:
        ...     receipt = mq.publish_many("orders", ["a", "b"])
        ...     for delivery in consumer:
        ...         consumer.stop()
        ...         delivery.ack()
        ...     mq.group("billing").backlog
        1
        """

        async def stop() -> None:
            self._consumer.stop()

        with contextlib.suppress(NotConnected):
            self._calls.submit(stop())

    def close(self) -> None:
        """Leave the group; what was not settled is given back."""
        with contextlib.suppress(NotConnected):
            self._calls.run(self._consumer.aclose())

    # --- taking ------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[SyncDelivery]:
        """Give each message. Leaving the loop leaves the group."""
        for delivery in self._each(aiter(self._consumer)):
            yield SyncDelivery.of(delivery, self._calls)

    def batches(self) -> Iterator[SyncDeliveryBatch]:
        """Give messages as they were delivered: many at once, as columns."""
        for batch in self._each(self._consumer.batches()):
            yield SyncDeliveryBatch(batch, self._calls)

    def take(self, n: int = 1) -> list[SyncDelivery]:
        """Return up to `n` messages, as soon as there is one; none only after `stop`.

        Messages keep coming between the calls, as far as there is credit, and only `close` leaves
        the group.

        >>> from onward import connect_sync
        >>> with connect_sync("memory:") as mq, mq.consume("orders", group="billing") as consumer:
        ...     receipt = mq.publish_many("orders", ["a", "b"])
        ...     [delivery.text for delivery in consumer.take(10)]
        ['a', 'b']
        """
        return self._for_threads(self._calls.run(self._consumer.take(n)))

    def take_now(self) -> SyncDelivery | None:
        """Return a message that is at hand; None when there is none at this moment.

        It does not wait or join: it goes with `take` and with iterating, which do.

        >>> from onward import connect_sync
        >>> with connect_sync("memory:") as mq, mq.consume("orders", group="billing") as consumer:
        ...     consumer.take_now() is None
        True
        """

        async def take_now() -> Delivery | None:
            return self._consumer.take_now()

        delivery = self._calls.run(take_now())
        return None if delivery is None else SyncDelivery.of(delivery, self._calls)

    def on_ready(self, callback: Callable[[], object]) -> None:
        """Let messages come, and call `callback` when some are at hand: `take_now` returns them.

        For a program with an event loop of its own kind: the callback is called in the client's
        thread, must return at once, and wakes that loop: it writes to a pipe, or calls its
        `call_soon_threadsafe`. It may be called more often than needed, and when the consumer ends.

        >>> import threading
        >>> from onward import connect_sync
        >>> with connect_sync("memory:") as mq, mq.consume("orders", group="billing") as consumer:
        ...     ready = threading.Event()
        ...     consumer.on_ready(ready.set)
        ...     receipt = mq.publish("orders", "hello")
        ...     ready.wait(10), consumer.take_now().text
        (True, 'hello')
        """

        async def register() -> None:
            self._consumer.on_ready(callback)

        self._calls.run(register())

    def fetch(
        self, n: int = 1, *, wait: Duration | None = None, wait_ms: int | None = None
    ) -> list[SyncDelivery]:
        """Return up to `n` messages: as soon as there is one, none when none came in time."""
        fetching = self._consumer.fetch(n, wait=wait, wait_ms=wait_ms)
        return self._for_threads(self._calls.run(fetching))

    # --- inside ------------------------------------------------------------------------------

    def _for_threads(self, deliveries: list[Delivery]) -> list[SyncDelivery]:
        return [SyncDelivery.of(delivery, self._calls) for delivery in deliveries]

    def _each(self, given: AsyncIterator[T]) -> Iterator[T]:
        try:
            while (one := self._calls.run(_next(given))) is not None:
                yield one
        finally:
            with contextlib.suppress(NotConnected):
                self._calls.run(_close(given))


async def _next(given: AsyncIterator[T]) -> T | None:
    return await anext(given, None)


async def _close(given: AsyncIterator[Any]) -> None:
    # What a consumer gives are generators: closing one leaves the group.
    if isinstance(given, AsyncGenerator):
        await given.aclose()
