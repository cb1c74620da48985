"""An App: functions that are called with messages, and everything around them.

    @app.consumer("orders", group="billing")
    async def charge(order: Order) -> None: ...    return: ack · raise: retry · Reject: never again

An App is a list of functions and how to call them; it holds no connection until it runs, and can
run any number of times, one after another. `app_run` is one run. Signals end it gracefully:

    SIGTERM, SIGINT   take nothing new, let functions end, make their acks durable, leave
    the second one    leave at once: what was not acked is given back to the group
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar, Unpack

from onward.client.app_run import STOP, AppRun
from onward.client.client import Client, connect
from onward.client.declared import Declared, RecurringOptions, declared, set_declared
from onward.client.options import ConsumeOptions
from onward.client.receipt import Receipt
from onward.client.scheduled import ScheduledReceipt
from onward.client.signals import on_signals
from onward.client.sync import SyncClient
from onward.client.work import Middleware, Work, make_work
from onward.client.work_run import Settled
from onward.durations import Duration, either_ms, format_duration
from onward.errors import InvalidRequest, NotConnected
from onward.loops import loop_factory
from onward.settings import Settings

F = TypeVar("F", bound=Callable[..., object])
M = TypeVar("M", bound=Middleware)
Hook = Callable[[], Awaitable[None] | None]
H = TypeVar("H", bound=Hook)

logger = logging.getLogger("onward.app")

EXIT_INTERRUPTED = 130
WAITING_S = 1.0
"""After so long without a broker it is worth a line."""
_NOT_RUNNING = (
    "this app does not run in this process: publish from elsewhere with a client of its own, "
    "'async with onward.connect(...)' or 'with onward.connect_sync(...)'"
)


class App:
    """Functions that consume.

    >>> app = App("memory:")
    >>> @app.consumer("orders", group="billing")
    ... async def charge(order: dict[str, int]) -> None:
    ...     print("charging", order["id"])
    ...     app.stop()
    >>> @app.on_start
    ... async def place_an_order() -> None:
    ...     await app.publish("orders", {"id": 7})
    >>> asyncio.run(app.run())
    charging 7
    """

    def __init__(
        self,
        address: str = "localhost:7700",
        *,
        settings: Settings | None = None,
        name: str | None = None,
        token: str | None = None,
        stop: Duration | None = None,
        stop_ms: int | None = None,
        apply: bool = False,
    ) -> None:
        self.address = address
        self.apply = apply
        """Whether groups get the settings of the functions, where they have other ones."""
        self.works: list[Work] = []
        self._settings = settings
        self._name = name
        self._token = token
        self._stop_ms = either_ms("stop", stop, stop_ms, default=STOP)
        self._middleware: list[Middleware] = []
        self._declared: list[Declared] = []
        self._on_start: list[Hook] = []
        self._on_stop: list[Hook] = []
        self._client: Client | None = None
        self._sync: SyncClient | None = None
        self._run: AppRun | None = None
        self._opening: asyncio.Timeout | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # --- what it is made of ------------------------------------------------------------------

    def consumer(
        self,
        topics: str | Sequence[str],
        *,
        group: str,
        concurrency: int = 1,
        ordered: bool = False,
        batch: int | None = None,
        **options: Unpack[ConsumeOptions],
    ) -> Callable[[F], F]:
        """Have a function called with each message of some topics, as a member of a group.

        The first parameter gets the body as its annotation says (bytes, str, a dict, a dataclass,
        a msgspec or pydantic class); one annotated `Message` or `Delivery` gets the message. With
        `batch` it gets lists of up to so many. At most `concurrency` calls run at once; a plain
        `def` runs in a thread. `ordered` keeps the order of each key, whatever the concurrency.
        The other options are those of `Client.consume`.

        >>> app = App("memory:")
        >>> @app.consumer("orders", group="billing", concurrency=8, retry="fixed:10s:5")
        ... def charge(body: bytes) -> None: ...
        >>> app.works[0].name, app.works[0].concurrency
        ('charge', 8)
        """
        if ordered:
            if options.get("mode") not in (None, "ordered"):
                raise InvalidRequest(f"ordered=True, but the mode is {options.get('mode')!r}")
            options["mode"] = "ordered"

        def register(function: F) -> F:
            work = make_work(
                function, topics, group=group, concurrency=concurrency, batch=batch,
                options=options,
            )  # fmt: skip
            self._check_new(work)
            self.works.append(work)
            return function

        return register

    def recurring(
        self,
        name: str,
        topic: str | None = None,
        body: object = "",
        **options: Unpack[RecurringOptions],
    ) -> Callable[[F], F]:
        """Declare a message that is published again and again, by `cron` or `every` so often.

        Above a consumer it is published to the topic of that function; with a topic it needs no
        function: `app.recurring("tick", "ticks", every="10m")`. The schedule is set when the App
        starts, if there is none or another one; one that an operator has paused stays paused. The
        options are those of `Client.set_recurring`.

        >>> app = App("memory:")
        >>> @app.recurring("report", cron="0 9 * * MON-FRI", zone="Europe/Berlin")
        ... @app.consumer("reports", group="reporter")
        ... async def report(body: str) -> None: ...
        """
        if topic is not None:
            self._declare(declared(name, topic, body, options, works=self.works))

        def register(function: F) -> F:
            if topic is None:
                self._declare(
                    declared(name, topic, body, options, works=self.works, function=function)
                )
            return function

        return register

    def _declare(self, declaration: Declared) -> None:
        if any(one.name == declaration.name for one in self._declared):
            raise InvalidRequest(f"recurring {declaration.name!r} is declared twice")
        self._declared.append(declaration)

    def middleware(self, function: M) -> M:
        """Put a function around every call: `async def timed(delivery, call_next)`.

        It gets the delivery (a list of them for a batch function), awaits `call_next(delivery)`
        and returns or raises; what it raises decides as if the function had. The first that is
        given is the outermost.

        >>> app = App("memory:")
        >>> @app.middleware
        ... async def note(delivery, call_next):
        ...     print("attempt", delivery.attempt)
        ...     return await call_next(delivery)
        """
        if not inspect.iscoroutinefunction(function) and not inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004
        ):
            raise InvalidRequest("a middleware is 'async def name(delivery, call_next)'")
        self._middleware.append(function)
        return function

    def on_start(self, function: H) -> H:
        """Have a function called when the App is connected, before it consumes.

        >>> app = App("memory:")
        >>> @app.on_start
        ... async def open_database() -> None: ...
        """
        self._on_start.append(function)
        return function

    def on_stop(self, function: H) -> H:
        """Have a function called when all functions have ended, before the App disconnects.

        >>> app = App("memory:")
        >>> @app.on_stop
        ... async def close_database() -> None: ...
        """
        self._on_stop.append(function)
        return function

    # --- while it runs -----------------------------------------------------------------------

    @property
    def mq(self) -> Client:
        """The client of this App, while it runs."""
        if self._client is None:
            raise NotConnected(_NOT_RUNNING)
        return self._client

    @property
    def sync(self) -> SyncClient:
        """The same client for functions that run in threads: its calls block."""
        if self._sync is None:
            raise NotConnected(_NOT_RUNNING)
        return self._sync

    async def publish(self, topic: str, body: object, **options: Any) -> Receipt | ScheduledReceipt:
        """Publish with the client of this App: `app.mq.publish`."""
        receipt: Receipt | ScheduledReceipt = await self.mq.publish(topic, body, **options)
        return receipt

    def stop(self) -> None:
        """Stop gracefully; from any thread, also from inside a function."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop)

    def _stop_on_signal(self) -> None:
        """Stop as `stop` does, and say what is waited for: somebody may sit at a terminal."""
        if self._run is not None and (count := self._run.running_count):
            calls = "1 call" if count == 1 else f"{count} calls"
            most = format_duration(self._stop_ms)
            logger.info(
                "stopping: waits for %s, at most %s; press again to leave at once", calls, most
            )
        else:
            logger.info("stopping")
        self._stop()

    def _stop(self) -> None:
        if self._run is not None:
            self._run.stop()
        elif self._opening is not None and not self._opening.expired():
            self._opening.reschedule(asyncio.get_running_loop().time())

    # --- running -----------------------------------------------------------------------------

    async def run(self, *, address: str | None = None, signals: bool = True) -> None:
        """Connect and consume until `stop()` or a signal; raises what makes that impossible."""
        client = connect(
            address or self.address, token=self._token, name=self._name, settings=self._settings
        )
        task = asyncio.current_task()
        assert task is not None
        self._check_ready()
        self._loop = asyncio.get_running_loop()
        with on_signals(self._stop_on_signal, task.cancel) if signals else contextlib.nullcontext():
            if not await self._connect(client, address or self.address):
                return
            try:
                async with self.running(client) as run:
                    await run.run()
            finally:
                await client.close(drain=not task.cancelling())

    def main(self, *, address: str | None = None) -> None:
        """Run as a program: until a signal. Leaves with exit code 130 when there was a second."""
        try:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                runner.run(self.run(address=address))
        except (asyncio.CancelledError, KeyboardInterrupt):
            sys.exit(EXIT_INTERRUPTED)

    @asynccontextmanager
    async def running(
        self, client: Client, *, on_settled: Settled | None = None
    ) -> AsyncIterator[AppRun]:
        """Give a run on an open client, between `on_start` and `on_stop`: for tests."""
        self._check_ready()
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._sync = SyncClient(lambda: client, client=client, loop=self._loop)
        try:
            self._run = AppRun(
                self.works, client=client, middleware=self._middleware, stop_ms=self._stop_ms,
                on_settled=on_settled, apply=self.apply,
            )  # fmt: skip
            await set_declared(client, self._declared, works=self.works)
            await _call_all(self._on_start)
            try:
                yield self._run
            finally:
                await _call_all(reversed(self._on_stop))
        finally:
            self._client = self._sync = self._run = self._loop = None

    async def _connect(self, client: Client, address: str) -> bool:
        """Connect; False when told to stop meanwhile."""
        waiting = asyncio.get_running_loop().call_later(
            WAITING_S, logger.warning, "no broker at %s yet, trying again", address
        )
        try:
            async with asyncio.timeout(None) as opening:
                self._opening = opening
                await client.open()
        except TimeoutError:
            if not opening.expired():
                raise
            return False
        finally:
            waiting.cancel()
            self._opening = None
        return True

    def _check_ready(self) -> None:
        if self._client is not None or self._opening is not None:
            raise InvalidRequest("this app runs already")
        if not self.works:
            raise InvalidRequest("this app has no consumer: decorate one with @app.consumer(...)")

    def _check_new(self, work: Work) -> None:
        for other in self.works:
            if other.group != work.group:
                continue
            if both := set(other.topics) & set(work.topics):
                raise InvalidRequest(
                    f"{other.name!r} and {work.name!r} both consume {sorted(both)[0]!r} in group "
                    f"{work.group!r}: each message would go to one of them; use two groups"
                )
            if name := other.differs(work):
                raise InvalidRequest(
                    f"{other.name!r} and {work.name!r} are of group {work.group!r} and give it "
                    f"different settings: {name!r}; use two groups, or say it once"
                )


async def _call_all(hooks: Iterator[Hook] | Sequence[Hook]) -> None:
    for hook in hooks:
        result = hook()
        if isinstance(result, Awaitable):
            await result
