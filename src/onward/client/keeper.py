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

from onward.client.address import Address
from onward.client.home import Home
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


class BrokerEnded(NotConnected):
    """The broker inside this process has failed: it does not come back."""


Probe = Callable[[int], Awaitable[bool]]
"""Tells whether the address with this number expects TLS."""

FINAL = (Unauthenticated, ProtocolError, BrokerEnded)
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
        probe: Probe | None = None,
        jitter: random.Random | None = None,
    ) -> None:
        self._dials = list(dials)
        self._addresses = list(addresses)
        """Where each of `dials` leads to, for people; fewer where that is not known."""
        self._place = ""
        self._name = name
        self._token = token
        self._probe = probe
        self._jitter = jitter or random.Random()
        self._home = Home()
        self._fails_fast = False
        self._listeners: list[Callable[[Link | None], None]] = []
        self._final_listeners: list[Callable[[OnwardError], None]] = []
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._last_error: OnwardError = NotConnected("not connected yet")
        self.final: OnwardError | None = None
        """Why no further connection is tried."""
        self.link: Link | None = None

    def listen(self, listener: Callable[[Link | None], None]) -> None:
        """Call `listener` with each new link, and with None when it is lost."""
        self._listeners.append(listener)

    def listen_final(self, listener: Callable[[OnwardError], None]) -> None:
        """Call `listener` with the error after which no further connection is tried."""
        self._final_listeners.append(listener)

    def check_here(self, *, may_be_idle: bool = False) -> None:
        """Raise when the caller is in another event loop or process than the connection."""
        self._home.check(may_be_idle=may_be_idle)

    @property
    def is_forked(self) -> bool:
        """Return True in a child of the process that connected."""
        return self._home.is_forked

    async def open(self, *, timeout_s: float | None, fail_fast: bool = False) -> None:
        """Connect for the first time, or raise why that is not possible.

        With `fail_fast` it is not tried again when nobody listens at any of the addresses. Without
        a timeout it returns at once, and connects while others wait in `connected`.
        """
        self._fails_fast = fail_fast
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(self._ended)
        if timeout_s is None:
            return
        try:
            await self.connected(timeout_s=timeout_s)
        except BaseException:
            await self.close()
            raise

    async def connected(self, *, timeout_s: float | None) -> Link:
        """Return the open link, waiting for one if need be."""
        self.check_here()
        try:
            async with asyncio.timeout(timeout_s):
                # A link may be lost already though nobody was told yet.
                while self.link is None or not self.link.is_open:
                    if self.final is not None:
                        raise self.final
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise self._unreachable() from None
        return self.link

    def _unreachable(self) -> NotConnected:
        at = f" at {', '.join(self._addresses)}" if self._addresses else ""
        return NotConnected(f"no broker could be reached{at}: {self._last_error}")

    async def close(self) -> None:
        """Close for good."""
        self.final = self.final or NotConnected("the client is closed")
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
        while self.final is None:
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
            if self.final is None:
                was_lost = True
                logger.warning("connection lost%s: %s", self._place, self._last_error)
                self._tell(None)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Tell those who wait when nobody looks for a broker any more: it would be for ever."""
        error = None if task.cancelled() else task.exception()
        if self.final is None:
            self.final = NotConnected(f"the client failed: {error!r}")
            self.final.__cause__ = error
        self._changed.set()

    def _tell(self, link: Link | None) -> None:
        self.link = link
        self._changed.set()
        for listener in self._listeners:
            listener(link)

    async def _connect_any(self) -> Link | None:
        refused = 0
        for number, dial in enumerate(self._dials):
            try:
                link = await self._connect(dial, number)
            except FINAL as error:
                self.final = error
                self._changed.set()
                for listener in self._final_listeners:
                    listener(error)
                return None
            except OnwardError as error:
                self._last_error = error
            except (OSError, TimeoutError, UnicodeError) as error:
                refused += isinstance(error, ConnectionRefusedError | FileNotFoundError)
                self._last_error = NotConnected(str(error) or type(error).__name__)
            else:
                known = self._addresses[number : number + 1]
                self._place = f" ({known[0]})" if known else ""
                self._fails_fast, self._probe = False, None
                return link
        if self._fails_fast and refused == len(self._dials):
            self.final = self._unreachable()
            self._changed.set()
        return None

    async def _connect(self, dial: Dial, number: int) -> Link:
        known = self._addresses[number : number + 1]
        place = f"at {known[0]}" if known else "there"
        async with asyncio.timeout(5):
            link = await dial(lambda: Link(name=self._name, token=self._token, place=place))
            try:
                await asyncio.shield(link.ready)
            except NotConnected:
                await self._check_silent(link, number, place)
                raise
            except BaseException:
                link.abort(OutcomeUnknown("the handshake did not finish"))
                raise
        return link

    async def _check_silent(self, link: Link, number: int, place: str) -> None:
        """Raise when what closed the connection without a word is a TLS server; ask only once."""
        probe, self._probe = self._probe, None
        if probe is not None and not link.was_answered and await probe(number):
            raise ProtocolError(f"what listens {place} is not an Onward broker: it speaks TLS")


def socket_dial(address: Address) -> Dial:
    """Return what opens a connection to an address over TCP or a Unix socket."""

    async def dial(make: Callable[[], Link]) -> Link:
        loop = asyncio.get_running_loop()
        if address.scheme == "unix":
            _, link = await loop.create_unix_connection(make, address.place)
        else:
            _, link = await loop.create_connection(make, address.place, address.port)
        return link

    return dial
