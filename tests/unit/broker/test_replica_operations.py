"""Promotion and stepping down, as a node handles them; with real nodes in tests/e2e."""

from __future__ import annotations

import asyncio

import pytest

from onward.broker.broker import Broker
from onward.errors import NotLeader, Overloaded
from onward.log.memory_disk import MemoryDisk
from onward.protocol.operations.replicas import ReplicationStatus, StepDown
from onward.settings import LogSettings, ReplicaSettings, Settings

from .test_dispatch import Client

SOURCE = "broker-1:7700"


class SourceThatSteppedDown:
    """What follows a source that steps down when it is told to."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.steps_down = asyncio.Event()
        self.is_closed = False

    def describe(self) -> ReplicationStatus:
        return ReplicationStatus(node=self._broker.node, role="replica", source=SOURCE)

    async def prepare_promotion(self, *, force: bool) -> bool:
        async with asyncio.timeout(30):
            await self.steps_down.wait()
        await self.close()
        return True

    async def close(self) -> None:
        self.is_closed = True


async def open_replica() -> tuple[Broker, SourceThatSteppedDown]:
    settings = Settings(log=LogSettings(folder="log"), replica=ReplicaSettings(of=SOURCE))
    broker = await Broker.open(settings, disk=MemoryDisk(), follows=SOURCE)
    source = SourceThatSteppedDown(broker)
    broker.replica = source
    return broker, source


async def test_a_promotion_comes_to_its_end_when_its_client_is_lost() -> None:
    broker, source = await open_replica()
    client = Client()
    broker.operations.receive(client, 1, b'{"op": "replica.promote"}')
    broker.operations.forget(client)
    with pytest.raises(Overloaded):
        broker.operations.receive(Client(), 1, b'{"op": "replica.promote"}')
    source.steps_down.set()
    await broker.operations.drain()
    assert broker.gate.is_leading
    assert broker.describe_replication().role == "leader"
    await broker.stop()


async def test_a_replica_does_not_step_down_for_its_source() -> None:
    broker, _ = await open_replica()
    with pytest.raises(NotLeader, match=SOURCE):
        await broker.operations.call(Client(), StepDown())
    await broker.stop()
