"""Nodes inside this process, with small segments: sources, and replicas that follow them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

import msgspec

from onward.broker.broker import Broker
from onward.client.client import Client
from onward.client.link import Link
from onward.client.pipe import connect_pipe
from onward.cluster.replica import Replica
from onward.log.memory_disk import MemoryDisk
from onward.log.stream import EntryStream
from onward.settings import GroupSettings, LogSettings, ReplicaSettings, Settings
from onward.testing.clock import ManualClock

SETTINGS = Settings(
    log=LogSettings(
        folder="log",
        preallocate_bytes=0,
        disk_reserve_bytes=0,
        segment_bytes_max=64 << 10,
        retention_ms=5_000,
    ),
    groups=GroupSettings(reclaim_ms=0),
)


async def until(condition: Callable[[], bool], *, within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def with_log(**log: object) -> Settings:
    return msgspec.structs.replace(SETTINGS, log=msgspec.structs.replace(SETTINGS.log, **log))


async def open_node(
    *, settings: Settings = SETTINGS, disk: MemoryDisk | None = None,
    clock: ManualClock | None = None, follows: str | None = None,
) -> Broker:  # fmt: skip
    return await Broker.open(
        settings, disk=disk or MemoryDisk(), clock=clock or ManualClock(), follows=follows
    )


def client_of(broker: Broker) -> Client:
    async def dial(make: Callable[[], Link]) -> Link:
        link = make()
        connect_pipe(link, broker.session(), asyncio.get_running_loop())
        return link

    return Client([], token=None, name="test", timeout_s=5, durability=255, dials=[dial])


async def link_to(broker: Broker) -> Link:
    link = Link(name="replica", token=None)
    connect_pipe(link, broker.session(), asyncio.get_running_loop())
    await link.ready
    return link


async def copy(leader: Broker, follower: Broker) -> None:
    """Apply what the follower lacks, as a replica does."""
    stream = EntryStream(leader.log, follower.log.next_index)
    while stream.has_more:
        entries = stream.read(bytes_max=1 << 20)
        assert entries
        done = asyncio.get_running_loop().create_future()
        follower.publishing.follow(bytes(entries), sync=True, done=done.set_result)
        assert await done is None


async def keep_house(broker: Broker, rounds: int = 3) -> None:
    for _ in range(rounds):
        broker.housekeeping.retain_soon()
        await broker.housekeeping.tick()
        await broker.housekeeping.tidy()
        await asyncio.sleep(0)


async def fill(broker: Broker, topic: str = "orders", *, batches: int = 20) -> None:
    """Publish so much that several segments are full; what cannot be compressed."""
    random = Random(7)
    async with client_of(broker) as mq:
        for _ in range(batches):
            await mq.publish_many(topic, [random.randbytes(100) for _ in range(100)])


async def drop_first_segments(broker: Broker) -> None:
    """Publish, and let all of it be too old to be kept: the log does not begin at event 1."""
    await fill(broker, "old")
    await expire(broker)
    assert broker.log.segments[0].first_index > 1


async def expire(broker: Broker) -> None:
    """Let retention take all that is stored now."""
    assert isinstance(broker.clock, ManualClock)
    broker.clock.advance(broker.settings.log.retention_ms + 1_000)
    await keep_house(broker, rounds=5)


class Served:
    """A source that listens on a port, and replicas of it."""

    def __init__(self, broker: Broker, server: asyncio.Server) -> None:
        self.broker = broker
        self._server = server
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self.final: list[Exception] = []
        self.snapshots = 0

    @classmethod
    async def open(cls, broker: Broker) -> Served:
        loop = asyncio.get_running_loop()
        return cls(broker, await loop.create_server(broker.session, "127.0.0.1", 0))

    async def replica(
        self, *, name: str = "copy-1", disk: MemoryDisk | None = None, settings: Settings = SETTINGS
    ) -> Broker:
        """Return a broker that follows this source; `broker.replica` is what does it."""
        replica = ReplicaSettings(of=self.address, name=name)
        settings = msgspec.structs.replace(settings, replica=replica)
        broker = await open_node(settings=settings, disk=disk, follows=self.address)
        control = Replica(broker, on_final=self.final.append, on_snapshot=self._note_snapshot)
        broker.replica = control
        await control.open()
        return broker

    def _note_snapshot(self) -> None:
        self.snapshots += 1

    async def stop(self) -> None:
        self._server.close()
        await self.broker.stop()
