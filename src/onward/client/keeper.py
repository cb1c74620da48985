"""Finds a broker, and comes back to it when the connection is lost.

    connecting ──▶ connected ──▶ lost ──▶ connecting (pauses grow to two seconds) ... ──▶ closed

A loss and the return from it are said in the log (`onward.client`), once each, however many tries
there are between. Whoever needs a link waits for it here. Those who had something open are told of
each new link, and restore it themselves: producers send again what has no answer, readers go on
where they were.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence

from onward.client.link import Link
from onward.errors import (
    NotConnected,
    OnwardError,
    OutcomeUnknown,
    ProtocolError,
    Unauthenticated,
)

logger = logging.getLogger("onward.client")

PAUSE_S_FIRST = 0.05
PAUSE_S_MAX = 2.0

Dial = Callable[[Callable[[], Link]], Awaitable[Link]]
"""Opens a transport for a new link; raises OSError when nobody is there."""

FINAL = (Unauthenticated, ProtocolError)
"""Errors of a handshake that a second try would meet again."""


class Keeper:
    """Keeps one link open."""

    def __init__(
        self,
        dials: Sequence[Dial],
        *,
        name: str,
        token: str | None,
        addresses: Sequence[str] = (),
        jitter: random.Random | None = None,
    ) -> None:
        self._dials = list(dials)
        self._addresses = list(addresses)
        """Where each of `dials` leads to, for people; fewer where that is not known."""
        self._place = ""
        self._name = name
        self._token = token
        self._jitter = jitter or random.Random()
        self._listeners: list[Callable[[Link | None], None]] = []
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._last_error: OnwardError = NotConnected("not connected yet")
        self._final: OnwardError | None = None
        self.link: Link | None = None

    def listen(self, listener: Callable[[Link | None], None]) -> None:
        """Call `listener` with each new link, and with None when it is lost."""
        self._listeners.append(listener)

    async def open(self, *, timeout_s: float) -> None:
        """Connect for the first time, or raise why that is not possible."""
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(self._ended)
        try:
            await self.connected(timeout_s=timeout_s)
        except BaseException:
            await self.close()
            raise

    async def connected(self, *, timeout_s: float | None) -> Link:
        """Return the open link, waiting for one if need be."""
        try:
            async with asyncio.timeout(timeout_s):
                # A link may be lost already though nobody was told yet.
                while self.link is None or not self.link.is_open:
                    if self._final is not None:
                        raise self._final
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            at = f" at {', '.join(self._addresses)}" if self._addresses else ""
            raise NotConnected(f"no broker could be reached{at}: {self._last_error}") from None
        return self.link

    async def close(self) -> None:
        """Close for good."""
        self._final = self._final or NotConnected("the client is closed")
        link, self.link = self.link, None
        if link is not None:
            await link.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._changed.set()

    async def _run(self) -> None:
        pause_s = PAUSE_S_FIRST
        was_lost = False
        while self._final is None:
            link = await self._connect_any()
            if link is None:
                await asyncio.sleep(pause_s * self._jitter.uniform(0.5, 1.0))
                pause_s = min(pause_s * 2, PAUSE_S_MAX)
                continue
            pause_s = PAUSE_S_FIRST
            if was_lost:
                logger.info("connected again%s", self._place)
            self._tell(link)
            self._last_error = await asyncio.shield(link.lost)
            if self._final is None:
                was_lost = True
                logger.warning("connection lost%s: %s", self._place, self._last_error)
                self._tell(None)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Tell those who wait when nobody looks for a broker any more: it would be for ever."""
        error = None if task.cancelled() else task.exception()
        if self._final is None:
            self._final = NotConnected(f"the client failed: {error!r}")
            self._final.__cause__ = error
        self._changed.set()

    def _tell(self, link: Link | None) -> None:
        self.link = link
        self._changed.set()
        for listener in self._listeners:
            listener(link)

    async def _connect_any(self) -> Link | None:
        for number, dial in enumerate(self._dials):
            try:
                link = await self._connect(dial)
            except FINAL as error:
                self._final = error
                self._changed.set()
                return None
            except OnwardError as error:
                self._last_error = error
            except (OSError, TimeoutError, UnicodeError) as error:
                self._last_error = NotConnected(str(error) or type(error).__name__)
            else:
                known = self._addresses[number : number + 1]
                self._place = f" ({known[0]})" if known else ""
                return link
        return None

    async def _connect(self, dial: Dial) -> Link:
        async with asyncio.timeout(5):
            link = await dial(lambda: Link(name=self._name, token=self._token))
            try:
                await asyncio.shield(link.ready)
            except BaseException:
                link.abort(OutcomeUnknown("the handshake did not finish"))
                raise
        return link
