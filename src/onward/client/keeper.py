"""Finds a broker, comes back to it when the connection is lost, and moves on to the leader.

    connecting ──▶ connected ──▶ lost ──▶ connecting (pauses grow to two seconds) ... ──▶ closed
                       └──▶ this node does not lead: another one is looked for, and switched to

A loss and the return from it are said in the log (`onward.client`), once each, however many tries
there are between. Whoever needs a link waits for it here. Those who had something open are told of
each new link, and restore it themselves: producers send again what has no answer, readers go on
where they were.

With several addresses the one that leads is used; while none does, a follower, which serves reads,
and a leader is looked for beside it. With one address its node is used, whether it leads or not:
only a write that was refused makes the client look for the leader, also at the address that the
follower names (`nodes`).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from contextlib import suppress

from onward.client.home import Home
from onward.client.link import Link
from onward.client.nodes import Contact, Dial, NobodyListens, Node, Nodes, Probe
from onward.errors import (
    Conflict,
    NotConnected,
    NotLeader,
    OnwardError,
    ProtocolError,
    Unauthenticated,
)

logger = logging.getLogger("onward.client")

PAUSE_S_FIRST = 0.05
PAUSE_S_MAX = 2.0
UNHURRIED_S_MAX = 10.0
"""The longest pause of the search for a leader while no write waits for it."""


class BrokerEnded(NotConnected):
    """The broker inside this process has failed: it does not come back."""


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
        follows_leader: bool = True,
        learns: bool = False,
    ) -> None:
        """Keep a link to one of the nodes that `dials` reach.

        Without `follows_leader` the first node that answers is used, whatever its history is. With
        `learns` the leader that a follower names is tried too.
        """
        self._nodes = Nodes(
            dials, name=name, token=token, addresses=addresses, probe=probe, learns=learns,
            checks_history=follows_leader,
        )  # fmt: skip
        self._follows_leader = follows_leader
        self._jitter = jitter or random.Random()
        self._home = Home()
        self._fails_fast = False
        self._listeners: list[Callable[[Link | None], None]] = []
        self._final_listeners: list[Callable[[OnwardError], None]] = []
        self._changed = asyncio.Event()
        self._wake = asyncio.Event()
        """The link is lost, or a leader is needed."""
        self._task: asyncio.Task[None] | None = None
        self._last_error: OnwardError = NotConnected("not connected yet")
        self._node: Node | None = None
        self._was_lost = False
        self._leads = False
        self._needs_leader = False
        """A write was refused: the leader is looked for at all addresses that are known."""
        self._refusal: NotLeader | None = None
        self.final: OnwardError | None = None
        """Why no further connection is tried."""
        self.link: Link | None = None

    def listen(self, listener: Callable[[Link | None], None]) -> None:
        """Call `listener` with each new link, and with None when it is lost.

        It is called with the same link again when its node has become the leader.
        """
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
            raise self._not_reached() from None
        return self.link

    @property
    def unreachable(self) -> NotConnected | None:
        """Return why there is no link; None while there is one."""
        is_open = self.link is not None and self.link.is_open
        return None if is_open else self._not_reached()

    def _not_reached(self) -> NotConnected:
        return NotConnected(f"no broker could be reached{self._nodes.places}: {self._last_error}")

    # --- the leader --------------------------------------------------------------------------

    async def leader(self, *, timeout_s: float | None) -> Link:
        """Return an open link to the leader, looking for it if need be.

        Raises `NotLeader` when only nodes that do not lead were found in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    link = await self.connected(timeout_s=None)
                    if self._leads or not self._follows_leader:
                        return link
                    self._look_for_leader()
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise self.refusal or self._not_reached() from None

    def need_leader(self, link: Link, error: NotLeader) -> None:
        """Look for the leader: the node behind `link` has refused what only a leader does."""
        if link is self.link:
            self._nodes.learn(error.leader, told_by=self._node)
            self._refusal = error
            if self._leads:
                self._leads = False
                self._wake.set()
            self._look_for_leader()

    @property
    def has_leader(self) -> bool:
        """Return True while there is a link to a node that leads."""
        return self._leads and self.link is not None and self.link.is_open

    @property
    def refusal(self) -> NotLeader | None:
        """Return why nothing can be written; None while there is a leader, or no link at all."""
        if self._leads or self.link is None or not self.link.is_open:
            return None
        if self._refusal is None:
            leader = self.link.welcome.leader
            self._refusal = NotLeader("this node is a read-only copy", leader=leader)
        return self._refusal

    def _look_for_leader(self) -> None:
        if not self._needs_leader:
            self._needs_leader = True
            self._wake.set()

    @property
    def _is_searching(self) -> bool:
        """Return True while a leader is looked for beside a link to a follower."""
        has_others = self._needs_leader or len(self._nodes.listed) > 1
        return self._follows_leader and not self._leads and has_others

    # --- connecting --------------------------------------------------------------------------

    async def close(self) -> None:
        """Close for good."""
        self.final = self.final or NotConnected("the client is closed")
        if self._task is not None:
            # First of all: a search that ends meanwhile would connect to another node.
            self._task.cancel()
            await asyncio.wait([self._task])
        link, self.link = self.link, None
        if link is not None:
            await link.close()
        self._changed.set()

    async def _run(self) -> None:
        pause_s = PAUSE_S_FIRST
        while self.final is None:
            await self._look()
            if self.link is None or self._is_searching:
                await self._rest(pause_s * self._jitter.uniform(0.5, 1.0))
                is_urgent = self.link is None or self._needs_leader
                pause_s = min(pause_s * 2, PAUSE_S_MAX if is_urgent else UNHURRIED_S_MAX)
            else:
                pause_s = PAUSE_S_FIRST
                await self._rest(None)
            if self._check_lost():
                pause_s = PAUSE_S_FIRST

    async def _rest(self, pause_s: float | None) -> None:
        """Wait for the end of a pause; until the link is lost or a leader is needed at most."""
        self._wake.clear()
        if self.final is None and (self.link is None or not self.link.lost.done()):
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()

    def _check_lost(self) -> bool:
        """Tell everybody when the link is lost; return True if it is."""
        if self.link is None or not self.link.lost.done():
            return False
        self._last_error = self.link.lost.result()
        if self.final is None:
            logger.warning("connection lost%s: %s", self._place, self._last_error)
            self._tell(None)
        return True

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

    async def _look(self) -> None:
        """Connect to the best node that answers, unless that is the one behind the link."""
        contacts = await self._nodes.connect(also_learned=self._needs_leader)
        self._check_lost()
        unused = [contact.link for contact in contacts]
        if self.link is not None and self._is_outdated(self.link, contacts):
            unused.append(self.link)
            self._tell(None)
        chosen = self._choose(contacts)
        if chosen is not None:
            if self.link is not None:
                unused.append(self.link)
            unused.remove(chosen.link)
            self._use(chosen)
        for link in unused:
            link.abort(NotConnected("another node is used"))
        if self.link is None:
            self._note_failure()

    def _choose(self, contacts: Sequence[Contact]) -> Contact | None:
        """Return the contact to use instead of the link; None when there is no better one."""
        best = contacts[0] if contacts else None
        if best is None or self.link is None or not self.link.is_open:
            return best
        if any(contact.leads for contact in self._same_node(self.link, contacts)):
            self._leads = True
            self._tell(self.link)
        return best if best.leads and not self._leads else None

    def _same_node(self, link: Link, contacts: Sequence[Contact]) -> list[Contact]:
        node = link.welcome.node
        return [contact for contact in contacts if contact.link.welcome.node == node]

    def _is_outdated(self, link: Link, contacts: Sequence[Contact]) -> bool:
        """Return True if the node behind a link has an older history than another one."""
        newest = self._nodes.lineage
        is_older = newest is not None and link.welcome.lineage.epoch < newest.epoch
        return is_older and not self._same_node(link, contacts)

    def _use(self, contact: Contact) -> None:
        is_move = self.link is not None
        self._node, self._leads, self._refusal = contact.node, contact.leads, None
        self._fails_fast = False
        contact.link.lost.add_done_callback(lambda _: self._wake.set())
        if is_move:
            logger.info("connected to the leader%s", self._place)
        elif self._was_lost:
            logger.info("connected again%s", self._place)
        self._was_lost = True
        self._tell(contact.link)

    @property
    def address(self) -> str:
        """Return the address of the node that was used last; empty where it is not known."""
        return "" if self._node is None else self._node.address

    @property
    def _place(self) -> str:
        return f" ({self.address})" if self.address else ""

    def _note_failure(self) -> None:
        """Take note of why no node could be used; some reasons are final."""
        errors = self._nodes.errors
        final = next((error for error in errors if isinstance(error, FINAL)), None)
        if errors:
            # Who is there and must not be used says more than who is not there.
            refused = [error for error in errors if isinstance(error, Conflict)]
            self._last_error = (refused or errors)[-1]
        if final is not None:
            self.final = final
            for listener in self._final_listeners:
                listener(final)
        elif self._fails_fast and all(isinstance(error, NobodyListens) for error in errors):
            self.final = self._not_reached()
        self._changed.set()
