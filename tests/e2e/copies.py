"""A source and its replicas as processes, and what must be true of their logs."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Self

import onward
from onward.cli import run
from onward.message.entry import read_header
from onward.types import ReplicationStatus

from .conftest import MakeBroker
from .running import BrokerProcess, until


def make_replica(
    make_broker: MakeBroker, source: BrokerProcess | str, name: str = "copy-1", **settings: object
) -> BrokerProcess:
    """Make a replica that is not started yet."""
    of = source if isinstance(source, str) else source.address
    return make_broker(replica_of=of, replica_name=name, **settings)


async def replication(broker: BrokerProcess) -> ReplicationStatus:
    async with broker.connect(timeout="5s") as mq:
        return await mq.replication()


async def caught_up(
    source: BrokerProcess, replica: BrokerProcess, *, within_s: float = 30.0
) -> ReplicationStatus:
    """Wait until a replica follows and has all that its source has; return its status."""
    async with asyncio.timeout(within_s):
        while True:
            theirs, ours = await replication(source), await replication(replica)
            if ours.state == "following" and ours.event_id == theirs.event_id:
                return ours
            await asyncio.sleep(0.05)


def entries_in(folder: Path) -> list[tuple[int, int]]:
    """Return (event id, checksum) of every entry in a log, in their order."""
    entries: list[tuple[int, int]] = []
    for path in sorted(folder.glob("*.log")):
        content, at = path.read_bytes(), 0
        while len(content) - at > 0:
            entry = read_header(content, at, position=at)
            if entry is None:
                break
            entries.append((entry.index, entry.crc))
            at += entry.length
    return entries


async def check_same_logs(*brokers: BrokerProcess) -> None:
    """Stop nodes; raise unless their logs are sound and have the same entries."""
    for broker in brokers:
        assert await broker.stop() == 0, broker.output[-2000:]
        assert run(["log", "check", str(broker.folder)]) == 0
    first, *others = [entries_in(broker.folder) for broker in brokers]
    assert [index for index, _ in first] == list(range(1, len(first) + 1))
    for other in others:
        assert other == first


async def event_ids(mq: onward.Client, topic: str = "orders") -> dict[int, int]:
    """Return the event id of every offset of a topic."""
    return {message.offset: message.event_id async for message in mq.read(topic)}


async def reads_the_same(one: BrokerProcess, other: BrokerProcess) -> None:
    async with one.connect() as left, other.connect() as right:
        assert await event_ids(left) == await event_ids(right)


class Proxy:
    """A way to a broker that can be cut: connections are torn, or nothing passes any more."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writers: set[asyncio.StreamWriter] = set()
        self._passes = asyncio.Event()
        self._passes.set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self._passes.set()
        self.tear()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def tear(self) -> None:
        """Reset all connections; new ones are taken."""
        for writer in self._writers:
            writer.transport.abort()

    def silence(self) -> None:
        """Let nothing pass, as a firewall that drops packets."""
        self._passes.clear()

    def resume(self) -> None:
        self._passes.set()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, back}
        await asyncio.gather(self._pump(reader, back), self._pump(there, writer))
        self._writers -= {writer, back}

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while part := await reader.read(1 << 16):
                await self._passes.wait()
                writer.write(part)
                await writer.drain()
        writer.transport.abort()


async def said(broker: BrokerProcess, text: str, *, within_s: float = 15.0) -> None:
    await until(lambda: text in broker.output, within_s=within_s)
