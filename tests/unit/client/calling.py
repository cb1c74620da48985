"""A client and a broker in one loop, with a cable between them that a test can pull."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any

from onward.broker.broker import Broker
from onward.broker.commit import Commit, Done
from onward.client.client import Client
from onward.client.link import Link
from onward.client.pipe import PipeTransport, connect_pipe
from onward.clock import Clock
from onward.errors import OnwardError
from onward.log.log import Log, Write
from onward.log.memory_disk import MemoryDisk
from onward.protocol.payloads import Durability
from onward.settings import LogSettings, ServerSettings, Settings, TopicSettings


class SlowCommit(Commit):
    """A `Commit` that waits while it is told to, and fails when it is told to."""

    def __init__(self, log: Log) -> None:
        super().__init__(log)
        self._held: list[Callable[[], None]] = []
        self.is_holding = False
        self.refusal: OnwardError | None = None
        """What the next commit ends with, instead of being done."""

    def append(self, write: Write, *, sync: bool, done: Done) -> None:
        def perform() -> None:
            refusal, self.refusal = self.refusal, None
            if refusal is None:
                self._log.perform(write, sync=sync)
            self._loop.call_soon(done, refusal)

        if self.is_holding:
            self._held.append(perform)
        else:
            perform()

    def release(self) -> None:
        self.is_holding = False
        for perform in self._held:
            perform()
        self._held.clear()

    def close(self) -> None:
        self.release()


class Cable:
    """Connects links to a broker, until it is pulled."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.is_plugged = True
        self.dialled = 0
        self._transports: list[PipeTransport] = []

    async def dial(self, make: Callable[[], Link]) -> Link:
        self.dialled += 1
        if not self.is_plugged:
            raise ConnectionRefusedError("nobody is there")
        link = make()
        transport, _ = connect_pipe(link, self.broker.session(), asyncio.get_running_loop())
        self._transports.append(transport)
        return link

    def pull(self) -> None:
        """Lose all connections, and refuse new ones until `plug`."""
        self.is_plugged = False
        self.cut()

    def cut(self) -> None:
        """Lose all connections."""
        for transport in self._transports:
            transport.abort()
        self._transports.clear()

    def plug(self) -> None:
        self.is_plugged = True

    def freeze(self) -> None:
        """Let the broker hear nothing more, as one whose process was stopped."""
        for session in self.broker.sessions:
            assert session._transport is not None
            session._transport.pause_reading()


def settings_with(
    *, server: dict[str, Any] | None = None, topics: dict[str, Any] | None = None
) -> Settings:
    log = LogSettings(folder="log", preallocate_bytes=0, disk_reserve_bytes=0)
    return Settings(
        log=log, server=ServerSettings(**(server or {})), topics=TopicSettings(**(topics or {}))
    )


@asynccontextmanager
async def calling(
    *, settings: Settings | None = None, timeout_s: float = 60.0, clock: Clock | None = None
) -> AsyncIterator[tuple[Client, Cable, SlowCommit]]:
    broker = await Broker.open(settings or settings_with(), disk=MemoryDisk(), commit=SlowCommit)
    cable = Cable(broker)
    commit = broker._commit
    assert isinstance(commit, SlowCommit)
    client = Client(
        [], token=None, name="test", timeout_s=timeout_s, durability=Durability.DEFAULT,
        dials=[cable.dial], producer_id=7, jitter=Random(1), clock=clock,
    )  # fmt: skip
    await client.open()
    try:
        yield client, cable, commit
    finally:
        await client.close(drain=False)
        commit.release()
        await broker.stop()


async def turns(count: int = 30) -> None:
    for _ in range(count):
        await asyncio.sleep(0)
