"""The client for threads: the same calls, blocking.

    any thread ──▶ Sync client ──▶ its own thread with an event loop ──▶ Client

It is a real facade over the asynchronous client, with a thread and a loop of its own, so it can be
used from any number of threads at once, also from inside a program that has a loop. Calls of
different threads share batches like those of different tasks. A process that was forked has no such
thread: it opens a client of its own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import sys
import threading
from collections.abc import (
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from datetime import datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, cast, overload

from onward.client import scheduled as when_of
from onward.client.bodies import encode_body
from onward.client.client import Client, connect
from onward.client.home import FORKED
from onward.client.options import ConsumeOptions
from onward.client.reader import Reader
from onward.client.receipt import BatchReceipt, DurabilityName, Receipt
from onward.client.sync_calls import (
    SyncGroupCalls,
    SyncPipelineCalls,
    SyncReplicaCalls,
    SyncScheduleCalls,
    SyncTopicCalls,
)
from onward.client.sync_consumer import SyncConsumer
from onward.client.sync_delivery import Calls, SyncDelivery
from onward.client.sync_reader import SyncReader
from onward.client.sync_schedule import (
    SyncScheduledBatchReceipt,
    SyncScheduledReceipt,
    for_threads,
)
from onward.durations import Duration
from onward.errors import InvalidRequest, NotConnected
from onward.message.message import Message
from onward.settings import Settings

if TYPE_CHECKING:
    from onward.client.consumer import Consumer

T = TypeVar("T")


def connect_sync(
    address: str = "localhost:7700",
    *,
    token: str | None = None,
    name: str | None = None,
    timeout: Duration | None = None,
    timeout_ms: int | None = None,
    connect_timeout: Duration | None = None,
    connect_timeout_ms: int | None = None,
    fail_fast: bool = False,
    wait_for_broker: bool = True,
    durability: DurabilityName | None = None,
    settings: Settings | None = None,
    create: bool = True,
) -> SyncClient:
    """Return a blocking client to use with `with`; the arguments are those of `connect`.

    >>> with connect_sync("memory:") as mq:
    ...     receipt = mq.publish("orders", {"id": 7})
    ...     [message.json() for message in mq.read("orders")]
    [{'id': 7}]
    """

    def make() -> Client:
        return connect(
            address, token=token, name=name, timeout=timeout, timeout_ms=timeout_ms,
            connect_timeout=connect_timeout, connect_timeout_ms=connect_timeout_ms,
            fail_fast=fail_fast, wait_for_broker=wait_for_broker, durability=durability,
            settings=settings, create=create,
        )  # fmt: skip

    make()  # what is wrong with the arguments is said here
    return SyncClient(make)


class SyncClient(
    SyncTopicCalls, SyncGroupCalls, SyncScheduleCalls, SyncPipelineCalls, SyncReplicaCalls
):
    """A blocking client. Made by `connect_sync`.

    >>> with connect_sync("memory:") as mq:
    ...     futures = [mq.publish_soon("orders", str(number)) for number in range(3)]
    ...     [future.result().offset for future in futures]
    [0, 1, 2]
    """

    def __init__(
        self, make: Callable[[], Client], *, client: Client | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:  # fmt: skip
        """Be a facade of the client that `make` makes, or of one that somebody keeps open."""
        self._make = make
        # A signal handler may stop a consumer while its thread is in here.
        self._lock = threading.RLock()
        self._opening = threading.RLock()
        self._loop = loop
        self._thread: threading.Thread | None = None
        self._client = client
        self._process = os.getpid()

    def __enter__(self) -> Self:
        """Connect, or raise why that is not possible."""
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait for what was published, then close."""
        self.close(drain=error is None)

    def has_leader(self) -> bool:
        """Return True while the client is connected to a node that takes writes."""
        return self._client is not None and self._client.has_leader()

    def open(self) -> None:
        """Connect; `with` does it by itself. An open client stays as it is.

        In a forked child this opens a connection of its own.
        """
        if self._is_forked:
            self.close()
        with self._opening:
            if self._client is None:
                self._connect()

    def _connect(self) -> None:
        _refuse_gevent()
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="onward-client", daemon=True
        )
        self._thread.start()
        client = self._make()
        try:
            self._run(client.open())
        except BaseException:
            self._end_thread()
            raise
        self._client = client

    def close(self, *, drain: bool = True) -> None:
        """Close; with `drain` only after what was published has its answer or its deadline."""
        if self._is_forked:
            # Thread, loop and connection are those of the parent, which goes on with them.
            self._client = self._loop = self._thread = None
            self._lock, self._opening = threading.RLock(), threading.RLock()
        elif self._client is not None and self._thread is not None:
            try:
                self._run(self._client.close(drain=drain))
            finally:
                self._client = None
                self._end_thread()

    # --- publish -----------------------------------------------------------------------------

    @overload
    def publish(self, topic: str, body: object, **options: Unpack[when_of.NowOne]) -> Receipt: ...
    @overload
    def publish(
        self, topic: str, body: object, **options: Unpack[when_of.LaterOne]
    ) -> SyncScheduledReceipt: ...

    def publish(self, topic: str, body: object, **options: Any) -> Receipt | SyncScheduledReceipt:
        """Publish one message and return when it is as safe as asked for.

        The options are those of `Client.publish`; with `delay` or `at` it waits for its time.
        """
        receipt = self._run(self._open().publish(topic, body, **options))
        return cast("Receipt | SyncScheduledReceipt", for_threads(receipt, self._run))

    @overload
    def publish_soon(
        self, topic: str, body: object, **options: Unpack[when_of.NowSoon]
    ) -> concurrent.futures.Future[Receipt]: ...
    @overload
    def publish_soon(
        self, topic: str, body: object, **options: Unpack[when_of.LaterSoon]
    ) -> concurrent.futures.Future[SyncScheduledReceipt]: ...

    def publish_soon(
        self, topic: str, body: object, **options: Any
    ) -> concurrent.futures.Future[Any]:
        """Publish one message without waiting; the future gives the receipt or the error.

        Calls of one thread keep their order. The error is `Overloaded` when too many wait already.
        """
        client = self._open()
        # Taken as they are now: the caller may change them before the loop has its turn.
        try:
            body = encode_body(body)
        except InvalidRequest as error:
            return _failed(error)
        if isinstance(options.get("headers"), Mapping):
            options["headers"] = dict(options["headers"])

        async def publish() -> Any:
            return for_threads(await client.publish_soon(topic, body, **options), self._run)

        return self._submit(publish())

    @overload
    def publish_many(
        self, topic: str, bodies: Iterable[object], **options: Unpack[when_of.NowMany]
    ) -> BatchReceipt: ...
    @overload
    def publish_many(
        self, topic: str, bodies: Iterable[object], **options: Unpack[when_of.LaterMany]
    ) -> SyncScheduledBatchReceipt: ...

    def publish_many(
        self, topic: str, bodies: Iterable[object], **options: Any
    ) -> BatchReceipt | SyncScheduledBatchReceipt:
        """Publish many messages as one batch: all of them are stored, or none.

        The options are those of `Client.publish_many`.
        """
        receipt = self._run(self._open().publish_many(topic, bodies, **options))
        return cast("BatchReceipt | SyncScheduledBatchReceipt", for_threads(receipt, self._run))

    # --- read --------------------------------------------------------------------------------

    def read(
        self,
        topic: str,
        *,
        start: str | int | datetime | timedelta = "earliest",
        end: int | None = None,
        after: Message | None = None,
        after_event_id: int | None = None,
        follow: bool = False,
    ) -> SyncReader:
        """Return a reader of a topic, for `for`."""

        async def make() -> Reader:
            return self._open().read(
                topic,
                start=start,
                end=end,
                after=after,
                after_event_id=after_event_id,
                follow=follow,
            )

        return SyncReader(self._run(make()), self._run)

    # --- consume -----------------------------------------------------------------------------

    def consume(
        self,
        topics: str | Sequence[str] | None = None,
        *,
        group: str,
        **options: Unpack[ConsumeOptions],
    ) -> SyncConsumer:
        """Join a group, for `for`; the options are those of `Client.consume`."""

        async def make() -> Consumer:
            return self._open().consume(topics, group=group, **options)

        return SyncConsumer(self._run(make()), self._calls)

    def fetch(
        self,
        topics: str | Sequence[str],
        *,
        group: str,
        n: int = 1,
        wait: Duration | None = None,
        wait_ms: int | None = None,
    ) -> list[SyncDelivery]:
        """Take up to `n` messages; wait a while for the first. The membership is kept for more."""
        fetching = self._open().fetch(topics, group=group, n=n, wait=wait, wait_ms=wait_ms)
        found = self._run(fetching)
        return [SyncDelivery.of(delivery, self._calls) for delivery in found]

    # --- inside ------------------------------------------------------------------------------

    def _open(self) -> Client:
        if self._client is None:
            raise NotConnected("this client is not open: use 'with connect_sync(...) as mq'")
        return self._client

    @property
    def _calls(self) -> Calls:
        return Calls(self._run, self._submit)

    @property
    def _is_forked(self) -> bool:
        return os.getpid() != self._process

    def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Hand work to the loop. Once it is ending it takes none: nobody would ever answer."""
        if self._is_forked:
            work.close()
            raise NotConnected(FORKED)
        with self._lock:
            if self._loop is None:
                work.close()
                raise NotConnected("the client is closed")
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop is not None and _running_loop() is self._loop:
            work.close()
            raise InvalidRequest("this call would wait for itself: in a coroutine await app.mq")
        future = self._submit(work)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise NotConnected("the client was closed meanwhile") from None
        except BaseException:
            future.cancel()
            raise

    def _end_thread(self) -> None:
        """End the loop; threads that still wait in a call are told."""
        with self._lock:
            loop, self._loop = self._loop, None
        assert loop is not None
        assert self._thread is not None
        asyncio.run_coroutine_threadsafe(_cancel_others(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join()
        loop.close()


def _refuse_gevent() -> None:
    """Raise where threads are greenlets: the client's loop would run in the thread that waits."""
    monkey: Any = sys.modules.get("gevent.monkey")
    if monkey is not None and monkey.is_module_patched("threading"):
        raise InvalidRequest(
            "gevent has replaced 'threading': connect_sync needs real threads; open it in a "
            "process that is not patched, or patch without threads and select"
        )


def _failed(error: Exception) -> concurrent.futures.Future[Any]:
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    future.set_exception(error)
    return future


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


async def _cancel_others() -> None:
    """Cancel whatever still runs on this loop, and wait until it has ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
