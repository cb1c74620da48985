"""The nodes that a client knows, and the one history that they must have.

    listed addresses ─┬─ all at the same time ─▶ WELCOME ─┬─▶ the newest history: leaders first
    learned addresses ┘                                   └─▶ an older or a foreign one: refused

All addresses are tried together, so that one that does not answer delays nobody for long, and that
a node which was a leader once is not taken for the leader because it stands first. A node that does
not lead may name the leader: that address is learned, and tried when a write needs it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from onward.client.address import Address, parse_addresses
from onward.client.link import Link
from onward.errors import (
    Conflict,
    InvalidRequest,
    NotConnected,
    OnwardError,
    OutcomeUnknown,
    ProtocolError,
)
from onward.protocol.payloads import Lineage

logger = logging.getLogger("onward.client")

CONNECT_S = 5.0
OTHERS_S = 0.5
"""How long the other nodes are waited for when one has answered."""
LEARNED_MAX = 8
_CANCELLED = "the search for a node was cancelled"

Dial = Callable[[Callable[[], Link]], Awaitable[Link]]
"""Opens a transport for a new link; raises OSError when nobody is there."""

Probe = Callable[[int], Awaitable[bool]]
"""Tells whether the address with this number expects TLS."""


class NobodyListens(NotConnected):
    """There is no process at an address."""


class Node(NamedTuple):
    """One address of a node."""

    address: str
    """For people; empty where it is not known."""
    dial: Dial
    number: int = -1
    """Its number among the listed addresses."""


class Contact(NamedTuple):
    """A node that has answered."""

    node: Node
    link: Link

    @property
    def leads(self) -> bool:
        """Return True if the node takes writes."""
        return self.link.welcome.is_leader


class Nodes:
    """Connects to the nodes of one history."""

    def __init__(
        self, dials: Sequence[Dial], *, name: str, token: str | None, addresses: Sequence[str],
        probe: Probe | None, learns: bool, checks_history: bool,
    ) -> None:  # fmt: skip
        places = [*addresses, *([""] * len(dials))]
        self.listed = [
            Node(place, dial, number)
            for number, (place, dial) in enumerate(zip(places, dials, strict=False))
        ]
        self._learned: dict[str, Node] = {}
        self._name = name
        self._token = token
        self._probe = probe
        self._learns = learns
        self._checks_history = checks_history
        self._logged: set[str] = set()
        self.lineage: Lineage | None = None
        """The newest history that was seen."""
        self.errors: list[OnwardError] = []
        """Why nodes could not be used at the last try."""

    @property
    def places(self) -> str:
        """Return the addresses that are tried, for people."""
        known = [node.address for node in (*self.listed, *self._learned.values()) if node.address]
        return f" at {', '.join(known)}" if known else ""

    def learn(self, leader: str | None, *, told_by: Node | None) -> None:
        """Remember the address of a leader that a node has named; text of any other kind is none.

        A loopback address means the machine of the node: elsewhere it would be another broker.
        """
        if not self._learns or not leader:
            return
        try:
            addresses = parse_addresses(leader)
        except InvalidRequest:
            return
        known = {node.address for node in self.listed}
        is_near = told_by is None or _is_loopback(told_by.address)
        for address in addresses:
            place = str(address)
            if address.scheme != "tcp" or place in known:
                continue
            if is_near or not _is_loopback(place):
                self._learned.setdefault(place, Node(place, socket_dial(address)))
        while len(self._learned) > LEARNED_MAX:
            del self._learned[next(iter(self._learned))]

    async def connect(self, *, also_learned: bool = False) -> list[Contact]:
        """Connect to the nodes; return those that answer with the newest history, leaders first."""
        self.errors = []
        contacts = await self._connect(self.listed)
        try:
            if also_learned and not any(contact.leads for contact in contacts):
                for contact in contacts:
                    self.learn(contact.link.welcome.leader, told_by=contact.node)
                contacts += await self._connect(list(self._learned.values()))
            contacts.sort(key=lambda contact: not contact.leads)
            newest = await self._of_newest_history(contacts) if self._checks_history else contacts
        except BaseException:
            # The caller never sees these links, so nobody else can close them.
            for contact in contacts:
                contact.link.abort(OutcomeUnknown(_CANCELLED))
            raise
        self._probe = None if newest else self._probe
        return newest

    # --- connecting --------------------------------------------------------------------------

    async def _connect(self, nodes: Sequence[Node]) -> list[Contact]:
        """Connect to all of these at the same time; those that are late are left out."""
        attempts: list[asyncio.Task[Link | OnwardError]] = []
        try:
            async with asyncio.TaskGroup() as group:
                attempts += [group.create_task(self._attempt(node)) for node in nodes]
                for late in await _answered(attempts):
                    late.cancel()
        except BaseException:
            for attempt in attempts:
                if _has_answered(attempt):
                    _close(attempt.result(), OutcomeUnknown(_CANCELLED))
            raise
        contacts = []
        for node, attempt in zip(nodes, attempts, strict=True):
            answer = NotConnected("no answer") if attempt.cancelled() else attempt.result()
            if isinstance(answer, Link):
                contacts.append(Contact(node, answer))
            else:
                self._note(answer)
        return contacts

    async def _attempt(self, node: Node) -> Link | OnwardError:
        try:
            return await self._dial(node)
        except Conflict as error:
            return Conflict(f"{node.address or 'a broker'} is not used: {error}")
        except OnwardError as error:
            return error
        except (ConnectionRefusedError, FileNotFoundError) as error:
            return NobodyListens(str(error))
        except (OSError, TimeoutError, UnicodeError) as error:
            return NotConnected(str(error) or type(error).__name__)

    async def _dial(self, node: Node) -> Link:
        place = f"at {node.address}" if node.address else "there"
        link: Link | None = None
        try:
            async with asyncio.timeout(CONNECT_S):
                link = await node.dial(
                    lambda: Link(
                        name=self._name, token=self._token, place=place, lineage=self.lineage
                    )
                )
                try:
                    await asyncio.shield(link.ready)
                except NotConnected:
                    await self._check_silent(link, node, place)
                    raise
        except BaseException:
            # Outside of the timeout, which may expire in the same iteration as WELCOME arrives.
            if link is not None:
                link.abort(OutcomeUnknown("the handshake did not finish"))
            raise
        return link

    async def _check_silent(self, link: Link, node: Node, place: str) -> None:
        """Raise when what closed the connection without a word is a TLS server; ask only once."""
        probe = self._probe
        if probe is not None and node.number >= 0 and not link.was_answered:
            self._probe = None
            if await probe(node.number):
                raise ProtocolError(f"what listens {place} is not an Onward broker: it speaks TLS")

    # --- histories ---------------------------------------------------------------------------

    async def _of_newest_history(self, contacts: list[Contact]) -> list[Contact]:
        """Return the contacts that have the newest history; refuse the others."""
        seen = [contact.link.welcome.lineage for contact in contacts]
        if self.lineage is not None:
            seen.insert(0, self.lineage)
        newest = self.lineage = max(seen, key=lambda lineage: lineage.epoch, default=None)
        same = []
        for contact in contacts:
            lineage = contact.link.welcome.lineage
            if lineage == newest:
                same.append(contact)
                continue
            assert newest is not None
            error = _refusal(contact, newest)
            self._note(error)
            contact.link.abort(error)
            if contact.leads and lineage.epoch < newest.epoch:
                # Connect once more: the HELLO tells this node that another one leads.
                _close(await self._attempt(contact.node), error)
        return same

    def _note(self, error: OnwardError) -> None:
        """Keep why a node cannot be used; a history that was refused is said in the log, once."""
        self.errors.append(error)
        if isinstance(error, Conflict) and str(error) not in self._logged:
            self._logged.add(str(error))
            logger.error("%s", error)


async def _answered(
    attempts: list[asyncio.Task[Link | OnwardError]],
) -> set[asyncio.Task[Link | OnwardError]]:
    """Wait for all; when one has succeeded the others have a moment. Return those that are late."""
    pending, patience_s = set(attempts), None
    while pending:
        done, pending = await asyncio.wait(
            pending, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            break
        if any(_has_answered(attempt) for attempt in done):
            patience_s = OTHERS_S
    return pending


def _has_answered(attempt: asyncio.Task[Link | OnwardError]) -> bool:
    is_whole = not attempt.cancelled() and attempt.exception() is None
    return is_whole and isinstance(attempt.result(), Link)


def _close(answer: Link | OnwardError, error: OnwardError) -> None:
    if isinstance(answer, Link):
        answer.abort(error)


def _refusal(contact: Contact, newest: Lineage) -> Conflict:
    place = contact.node.address or "a broker"
    lineage = contact.link.welcome.lineage
    if lineage.epoch < newest.epoch:
        why = "another node was promoted"
    else:
        why = "they have nothing to do with each other; restart the client if this one is meant"
    return Conflict(
        f"{place} is not used: it has history {lineage}, the client has seen {newest}: {why}"
    )


def _is_loopback(address: str) -> bool:
    from onward.config import is_loopback  # seldom needed, and it reads settings files

    return address.startswith("unix:") or is_loopback(address.rpartition(":")[0])


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
