"""A follower in a world that fails: entries travel over the lossy network, and are stored.

    leader    EntrySender   ◀── the index to begin with, 8 bytes ──   EntryReceiver   follower
                            ── entries, back to back, in pieces ──▶   ──▶ Publishing.follow

The smallest thing that replicates: no frames, no flow control, no heartbeat. A connection that is
lost is made again by the `Copier`, from the end of the follower's log. What the follower has
acknowledged is noted: it must never be lost again.
"""

from __future__ import annotations

import asyncio
from random import Random
from typing import cast

from onward.broker.broker import Broker
from onward.errors import Corruption, OffsetOutOfRange, OnwardError
from onward.log.stream import EntryStream
from onward.message.entry import read_header
from onward.testing.loop import running_loop
from onward.testing.network import LossyNetwork
from onward.testing.node import SimulatedNode

ENTRIES = "entries"
"""The address at which the leader sends its entries."""
IN_FLIGHT_MAX = 3
_INDEX_BYTES = 8


class EntrySender(asyncio.Protocol):
    """The leader's end of one connection."""

    def __init__(self, broker: Broker, random: Random) -> None:
        self._broker = broker
        self._random = random
        self._received = b""
        self._stream: EntryStream | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the index."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Begin when the index is there."""
        self._received += data
        if len(self._received) == _INDEX_BYTES:
            index = int.from_bytes(self._received, "little")
            self._stream = EntryStream(self._broker.log, index)
            self._send()

    def _send(self) -> None:
        """Send what can be read now, and look again soon."""
        assert self._transport is not None
        assert self._stream is not None
        if self._transport.is_closing() or self._broker.failure is not None:
            return
        try:
            entries = self._stream.read(bytes_max=self._random.choice((1, 2_000, 50_000)))
        except (OSError, OffsetOutOfRange):
            # The disk is dead, or retention was faster: then the follower has no more than it has.
            self._transport.abort()
            return
        self._transport.write(entries or b"")
        pause_s = self._random.randint(1, 20 if self._stream.has_more else 100) / 1000
        asyncio.get_running_loop().call_later(pause_s, self._send)


class EntryReceiver(asyncio.Protocol):
    """The follower's end of one connection."""

    def __init__(self, broker: Broker, copier: Copier, random: Random) -> None:
        self.is_lost = False
        self._broker = broker
        self._copier = copier
        self._random = random
        self._received = bytearray()
        self._in_flight = 0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask for what follows the end of the log."""
        self._transport = cast(asyncio.Transport, transport)
        index = self._broker.log.staged_index
        self._transport.write(index.to_bytes(_INDEX_BYTES, "little"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Let the copier connect again."""
        self.is_lost = True

    def data_received(self, data: bytes) -> None:
        """Store the entries that are complete."""
        self._received += data
        self._store()

    def _store(self) -> None:
        while self._in_flight < IN_FLIGHT_MAX and not self.is_lost:
            length = self._whole_bytes(self._random.choice((1, 3, 100)))
            if not length or self._broker.failure is not None:
                return
            entries = bytes(self._received[:length])
            del self._received[:length]
            try:
                self._broker.publishing.follow(entries, sync=True, done=self._stored)
            except Corruption as error:
                self._copier.violations.append(f"F1: the follower refuses an entry: {error}")
                self.give_up()
            except OnwardError:
                self.give_up()
            else:
                self._in_flight += 1

    def _whole_bytes(self, count_max: int) -> int:
        """Return the length of at most so many whole entries at the beginning."""
        length = 0
        for _ in range(count_max):
            head = read_header(self._received, length, position=0)
            if head is None or head.end > len(self._received):
                break
            length = head.end
        return length

    def _stored(self, error: Exception | None) -> None:
        self._in_flight -= 1
        if error is not None:
            self.give_up()
            return
        self._copier.acknowledged_index = self._broker.log.next_index - 1
        self._store()

    def give_up(self) -> None:
        """End the connection."""
        self.is_lost = True
        if self._transport is not None:
            self._transport.abort()


class Copier:
    """Keeps a follower connected to its leader."""

    def __init__(self, node: SimulatedNode, network: LossyNetwork, random: Random) -> None:
        self.acknowledged_index = 0
        """The index of the last entry that the follower has called durable."""
        self.violations: list[str] = []
        self._node = node
        self._network = network
        self._random = random
        self._receiver: EntryReceiver | None = None
        self._is_stopped = False

    async def run(self) -> None:
        """Connect again and again until stopped."""
        while not self._is_stopped:
            broker = await self._node.running()
            if await self._is_settled(broker) and not self._is_stopped:
                await self._copy(broker)
            await asyncio.sleep(self._random.choice((1, 20, 500, 3_000)) / 1000)

    async def stop(self) -> Broker:
        """Copy nothing more; return the follower when it has stored what it got."""
        self._is_stopped = True
        if self._receiver is not None:
            self._receiver.give_up()
        while True:
            broker = await self._node.running()
            if await self._is_settled(broker):
                return broker

    async def _copy(self, broker: Broker) -> None:
        def receiver() -> EntryReceiver:
            return EntryReceiver(broker, self, Random(self._random.getrandbits(64)))

        try:
            _, self._receiver = await self._network.connect(
                ENTRIES, receiver, source=self._node.name
            )
        except OSError:
            return
        life_end = running_loop().time() + self._random.choice((1, 10, 100))
        while not self._receiver.is_lost and self._node.broker is broker:
            if running_loop().time() > life_end:
                break
            await asyncio.sleep(0.02)
        self._receiver.give_up()

    async def _is_settled(self, broker: Broker) -> bool:
        """Wait until nothing is on its way to the disk; return False if the follower died."""
        while self._node.broker is broker:
            if broker.log.staged_index == broker.log.next_index:
                return True
            await asyncio.sleep(0.01)
        return False
