"""A network in memory that delays, tears, loses and divides, the same way again from one seed.

    client transport ─▶ wire: bytes on their way ─▶ server transport       one wire per direction,
                     ◀─ wire: bytes on their way ◀─                        random delay, in order

What may happen to a connection:

    cut          both ends learn it, at different times; bytes on their way are lost, in mid-frame
    half-open    one end learns it, the other one never does
    kill         a machine died: its end gets nothing any more, the others see a reset
    partition    bytes wait until it is healed; whoever connects meanwhile gets a TimeoutError
    mute         bytes in one direction wait until it is healed

Rules:
- Bytes arrive in order and in random pieces; what has not been read counts as the writer's buffer.
- A closed end that still gets bytes answers with a reset, which overtakes what it sent before.
- Machines have names: a listening address is one, and `connect(..., source=...)` names the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import TypeVar

from onward.client.pipe import PipeTransport

P = TypeVar("P", bound=asyncio.BaseProtocol)
ProtocolFactory = Callable[[], asyncio.BaseProtocol]

CONNECT_MS_MAX = 5_000


class LossyNetwork:
    """All machines and what is between them.

    >>> from onward.testing.loop import run, running_loop
    >>> async def main() -> bytes:
    ...     loop = running_loop()
    ...     network = LossyNetwork(loop, loop.random)
    ...     reader = asyncio.StreamReader()
    ...     network.listen("broker", lambda: asyncio.StreamReaderProtocol(reader))
    ...     transport, _ = await network.connect("broker", asyncio.Protocol)
    ...     transport.write(b"onward")
    ...     transport.close()
    ...     return await reader.read()
    >>> run(main(), seed=7)
    b'onward'
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        random: Random,
        *,
        delay_ms_max: int = 20,
        cut_chance: float = 0.0,
    ) -> None:
        self.delay_ms_max = delay_ms_max
        # How likely it is that a connection is cut when bytes of it arrive.
        self.cut_chance = cut_chance
        self._loop = loop
        self._random = random
        self._listeners: dict[str, ProtocolFactory] = {}
        self._partitions: set[frozenset[str]] = set()
        self._mutes: set[tuple[str, str]] = set()
        # A dict for its order: a set would be in another one in each run.
        self._open: dict[LossyTransport, None] = {}
        # Told of each end that is over, the name of its machine first; a death tells nobody.
        self.on_end: Callable[[str, str], None] = lambda name, peer_name: None
        self._waiting: dict[LossyTransport, None] = {}

    def listen(self, address: str, protocol_factory: ProtocolFactory) -> None:
        """Accept connections at `address`, until `refuse`."""
        self._listeners[address] = protocol_factory

    def refuse(self, address: str) -> None:
        """Refuse new connections to `address`; those that are open stay."""
        self._listeners.pop(address, None)

    async def connect(
        self, address: str, protocol_factory: Callable[[], P], *, source: str = "client"
    ) -> tuple[LossyTransport, P]:
        """Connect to who listens at `address`, or raise as a socket would."""
        await self._reach(source, address)
        if address not in self._listeners:
            raise ConnectionRefusedError(f"nobody listens at '{address}'")
        client = self._accept(source, address)
        try:
            await asyncio.sleep(self.delay_s())
        except BaseException:
            client.abort()
            raise
        if client.is_closing():
            raise ConnectionResetError(f"'{address}' closed the connection at once")
        protocol = protocol_factory()
        client.set_protocol(protocol)
        protocol.connection_made(client)
        client.resume_reading()
        return client, protocol

    def connections(self, name: str | None = None) -> list[LossyTransport]:
        """Return the open ends, the oldest first: all, or those of the machine `name`."""
        return [end for end in self._open if name in (None, end.name)]

    def cut(self, end: LossyTransport) -> None:
        """Cut a connection: both ends learn it soon, what was on its way is lost."""
        for one in end.both():
            one.lose_wire()
            self._loop.call_later(self.delay_s(), one.lose, ConnectionResetError("cut"))

    def half_open(self, end: LossyTransport) -> None:
        """Lose a connection without `end` ever learning it; the other end learns it soon."""
        for one in end.both():
            one.lose_wire()
            if one is not end:
                self._loop.call_later(self.delay_s(), one.lose, ConnectionResetError("cut"))

    def kill(self, name: str) -> None:
        """Let a machine's program die: it gets nothing any more, the others see a reset."""
        self.refuse(name)
        for end in self.connections(name):
            self.half_open(end)
            end.die()

    def partition(self, one: str, other: str) -> None:
        """Let nothing pass between two machines until `heal`. Nothing is lost by that alone."""
        self._partitions.add(frozenset((one, other)))

    def mute(self, sender: str, receiver: str) -> None:
        """Let nothing pass from one machine to another until `heal`; the other way is free."""
        self._mutes.add((sender, receiver))

    def heal(self) -> None:
        """End all partitions: what waited goes on."""
        self._partitions.clear()
        self._mutes.clear()
        waiting, self._waiting = self._waiting, {}
        for end in waiting:
            end.go_on()

    def holds(self, end: LossyTransport) -> bool:
        """Say whether what `end` sends cannot pass now; if so, it goes on when all is healed."""
        is_muted = (end.name, end.peer_name) in self._mutes
        if not is_muted and not self._is_divided(end.name, end.peer_name):
            return False
        self._waiting[end] = None
        return True

    def delay_s(self) -> float:
        """Return how long the next thing takes to travel."""
        return self._random.randint(0, self.delay_ms_max * 1000) / 1_000_000

    def piece_bytes(self, length: int) -> int:
        """Return how many of `length` bytes arrive together: often all, sometimes one."""
        return self._random.choice((length, length, self._random.randint(1, length), 1))

    def cuts(self) -> bool:
        """Decide whether a connection is cut now."""
        return self.cut_chance > 0 and self._random.random() < self.cut_chance

    def forget(self, end: LossyTransport) -> None:
        """Take the news that an end is over."""
        if end in self._open:
            del self._open[end]
            self.on_end(end.name, end.peer_name)

    def _accept(self, source: str, address: str) -> LossyTransport:
        """Connect the server's end; the client's stays silent until the client knows of it."""
        protocol = self._listeners[address]()
        server = LossyTransport(self, self._loop, protocol, name=address, peer_name=source)
        nobody = asyncio.Protocol()
        client = LossyTransport(self, self._loop, nobody, name=source, peer_name=address)
        client.pause_reading()
        client.join_lossy(server)
        server.join_lossy(client)
        self._open |= {client: None, server: None}
        protocol.connection_made(server)
        return client

    def _is_divided(self, one: str, other: str) -> bool:
        return frozenset((one, other)) in self._partitions

    async def _reach(self, source: str, address: str) -> None:
        tries = 10
        for _ in range(tries):
            await asyncio.sleep(self.delay_s())
            if not self._is_divided(source, address):
                return
            await asyncio.sleep(CONNECT_MS_MAX / tries / 1000)
        raise TimeoutError(f"'{address}' did not answer '{source}'")


class LossyTransport(PipeTransport):
    """One end of a connection over a `LossyNetwork`, and the wire that leads away from it."""

    def __init__(
        self,
        network: LossyNetwork,
        loop: asyncio.AbstractEventLoop,
        protocol: asyncio.BaseProtocol,
        *,
        name: str,
        peer_name: str,
    ) -> None:
        super().__init__(loop, protocol, name=name, peer_name=peer_name)
        self.name = name
        self.peer_name = peer_name
        self._network = network
        self._other = self
        self._wire = bytearray()
        # What follows the last byte: whether, and with which error.
        self._last: tuple[Exception | None] | None = None
        self._travelling = False
        self._wire_lost = False

    def join_lossy(self, other: LossyTransport) -> None:
        """Say which transport is the other end."""
        self.join(other)
        self._other = other

    def both(self) -> tuple[LossyTransport, LossyTransport]:
        """Return this end and the other one."""
        return self, self._other

    def lose_wire(self) -> None:
        """Lose what is on its way from here, and all that will be sent."""
        self._wire_lost = True
        self._wire.clear()
        self._last = None

    def lose(self, error: Exception) -> None:
        """Let the protocol learn that the connection is lost."""
        self._lose(error)

    def die(self) -> None:
        """Never call the protocol again: its machine is dead."""
        self._lost = self._closing = True
        self._inbox.clear()
        self._network.forget(self)

    def go_on(self) -> None:
        """Carry what waits, unless something is in the way."""
        if (self._wire or self._last) and not self._travelling:
            self._travelling = True
            self._loop.call_later(self._network.delay_s(), self._carry)

    def _send(self, sent: bytes) -> None:
        if not self._wire_lost:
            self._wire += sent
            self.go_on()

    def _send_end(self, error: Exception | None) -> None:
        if self._wire_lost:
            return
        if error is not None:
            # A reset overtakes the bytes before it.
            self._wire.clear()
        self._last = (error,)
        self.go_on()

    def _carry(self) -> None:
        """Let the next piece arrive, or the end when all pieces have."""
        self._travelling = False
        if self._wire_lost or self._network.holds(self):
            return
        if self._network.cuts():
            self._network.cut(self)
        elif self._wire:
            self._arrive_piece(self._network.piece_bytes(len(self._wire)))
        elif self._last:
            (error,), self._last = self._last, None
            self._other.arrive_end(error)
        self.go_on()

    def _arrive_piece(self, length: int) -> None:
        piece = bytes(self._wire[:length])
        del self._wire[:length]
        self._other.arrive(piece)

    def _lose(self, error: Exception | None) -> None:
        self._network.forget(self)
        super()._lose(error)
