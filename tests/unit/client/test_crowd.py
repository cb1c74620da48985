"""A crowd of publishers, and what comes with it: one commit at a time, whoever asks for it."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from onward import Client
from onward.broker import publish as publish_module
from onward.broker.broker import Broker
from onward.broker.commit import Commit, Done
from onward.log.log import Log, Write
from onward.log.memory_disk import MemoryDisk
from onward.protocol.payloads import Durability

from .calling import Cable, settings_with


class Stepwise(Commit):
    """A `Commit` that performs one write when it is told to, and never two at a time."""

    def __init__(self, log: Log) -> None:
        super().__init__(log)
        self.submitted: list[tuple[Write, bool, Done]] = []
        self.is_stepping = False
        self.most = 0

    def append(self, write: Write, *, sync: bool, done: Done) -> None:
        self.submitted.append((write, sync, done))
        self.most = max(self.most, len(self.submitted))
        if not self.is_stepping:
            self._loop.call_soon(self.step)

    def step(self) -> None:
        write, sync, done = self.submitted.pop(0)
        self._log.perform(write, sync=sync)
        done(None)

    def close(self) -> None:
        """Nothing is left: the test steps through all of it."""


async def turns(count: int = 60) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("ending", ["topic", "group"])
async def test_what_is_settled_in_a_commit_of_a_crowd_never_makes_two_commits_at_once(
    ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish_module, "CROWD_WAIT_S", 0.1)
    broker = await Broker.open(settings_with(), disk=MemoryDisk(), commit=Stepwise)
    commit, cable = broker._commit, Cable(broker)
    assert isinstance(commit, Stepwise)
    clients = [
        Client(
            [], token=None, name=f"c{number}", timeout_s=20, durability=Durability.DISK,
            dials=[cable.dial], producer_id=100 + number, jitter=Random(number),
        )
        for number in range(60)
    ]  # fmt: skip
    for client in clients:
        await client.open()
        await client.publish("jobs", "known")
    operator = clients[0]
    await operator.publish_many("other", ["a", "b", "c"])
    consumer = operator.consume(["other"], group="g", mode="exclusive")
    assert len(await consumer.take(3)) == 3
    await turns()

    def publish(some: list[Client], body: str) -> list[asyncio.Future[object]]:
        return [asyncio.ensure_future(client.publish("jobs", body)) for client in some]

    commit.is_stepping = True
    calls = publish(clients[1:2], "first")
    await turns()
    calls += publish(clients[2:42], "crowd")
    await turns()
    # What this settles asks for a commit while the one of the crowd is being answered.
    end = operator.delete_topic("other") if ending == "topic" else operator.delete_group("g")
    ended = asyncio.ensure_future(end)
    await turns()
    commit.step()
    await turns()
    calls += publish(clients[42:50], "meanwhile")
    await turns()
    commit.step()
    await turns(2)
    calls += publish(clients[2:42], "again")
    await turns(20)
    calls += publish(clients[52:56], "late")
    await turns(20)
    await asyncio.sleep(0.3)  # longer than any crowd is waited for
    assert commit.most == 1
    commit.is_stepping = False
    while commit.submitted:
        commit.step()
        await turns()
    await asyncio.wait_for(asyncio.gather(ended, *calls), 20)
    bodies = [message.text async for message in operator.read("jobs", start="earliest")]
    counts = {text: bodies.count(text) for text in set(bodies)}
    assert counts == {"known": 60, "first": 1, "crowd": 40, "meanwhile": 8, "again": 40, "late": 4}
    for client in clients:
        await client.close()
    await broker.stop()
