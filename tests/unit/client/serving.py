"""Brokers in this process that listen on real sockets: leaders, replicas, promoted ones."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import onward
from onward.broker.broker import Broker
from onward.client.client import Client
from onward.cluster.replica import Replica
from onward.log.memory_disk import MemoryDisk
from onward.protocol.operations.replicas import Promote, Promoted
from onward.settings import (
    GroupSettings,
    LogSettings,
    ReplicaSettings,
    ServerSettings,
    Settings,
)

LOG = LogSettings(folder="log", preallocate_bytes=0, disk_reserve_bytes=0)


def free_port() -> int:
    """Return a port below those that the system gives to outgoing connections."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


async def until(condition: Callable[[], bool], *, within_s: float = 15.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110  # brokers tell nobody
            await asyncio.sleep(0.01)


class Served:
    """One broker on one port; it can be killed and started again on what its disk holds."""

    def __init__(self, *, of: str = "", advertise: str = "", name: str = "copy") -> None:
        self.port = free_port()
        self.disk = MemoryDisk()
        self.of = of
        self._settings = Settings(
            log=LOG,
            groups=GroupSettings(reclaim_ms=0),
            server=ServerSettings(advertise=advertise, port=self.port),
            replica=ReplicaSettings(of=of, name=name),
        )
        self._server: asyncio.Server | None = None
        self.broker: Broker

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self, *, of: str | None = None) -> None:
        follows = self.of if of is None else of
        self.broker = await Broker.open(self._settings, disk=self.disk, follows=follows or None)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self.broker.session, "127.0.0.1", self.port)
        if follows:
            replica = Replica(self.broker, on_final=lambda error: None, on_snapshot=lambda: None)
            self.broker.replica = replica
            await replica.open()

    def connect(self, **options: object) -> Client:
        return onward.connect(self.address, **options)  # type: ignore[arg-type]

    async def kill(self) -> None:
        """End everything at once; what the disk has stays."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        if self.broker.replica is not None:
            await self.broker.replica.close()
        self.broker.fail(RuntimeError("killed by the test"))
        await self.broker.stop()

    async def promote(self, *, force: bool = False) -> Promoted:
        async with self.connect() as mq:
            return await mq._call(Promote(force=force))

    async def caught_up(self, source: Served) -> None:
        await until(lambda: self.broker.log.next_index == source.broker.log.next_index)


@asynccontextmanager
async def serving(*nodes: Served) -> AsyncIterator[None]:
    try:
        for node in nodes:
            await node.start()
        yield
    finally:
        for node in reversed(nodes):
            await node.kill()


@asynccontextmanager
async def source_and_copy(**options: str) -> AsyncIterator[tuple[Served, Served]]:
    source = Served(**options)  # type: ignore[arg-type]
    copy = Served(of=source.address)
    async with serving(source, copy):
        yield source, copy
