"""Replicas as real processes that need a snapshot: it is fetched, checked, and takes the place."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest

import onward
from onward.log.check import Check
from onward.log.disk import OsDisk
from onward.protocol.operations.replicas import Promote, ReplicationStatus, ShowReplication

from .conftest import MakeBroker
from .running import BrokerProcess, strace, until

SMALL = {
    "log_segment_bytes_max": 256 << 10,
    "log_retention_bytes": 1 << 20,
    "log_checkpoint_bytes": 256 << 10,
    "log_preallocate_bytes": 0,
}


def make_replica(
    make_broker: MakeBroker, source: BrokerProcess, **settings: object
) -> BrokerProcess:
    return make_broker(
        replica_of=source.address, replica_name="copy-1", **{**SMALL, **settings}
    )  # fmt: skip


async def publish(broker: BrokerProcess, topic: str, *, megabytes: int, seed: int = 7) -> None:
    random = Random(seed)
    async with broker.connect() as mq:
        for _ in range(megabytes * 10):
            await mq.publish_many(topic, [random.randbytes(1_000) for _ in range(100)])


async def drop_old_segments(broker: BrokerProcess) -> None:
    """Publish more than the log keeps, and wait until its beginning is gone."""
    await publish(broker, "old", megabytes=3)
    async with broker.connect() as mq:
        await mq.delete_topic("old")  # retention looks at once
    first = "00000000000000000001.log"
    await until(lambda: not (broker.folder / first).exists(), within_s=30)


async def replication(broker: BrokerProcess) -> ReplicationStatus:
    """Return role, lag and state of a node."""
    async with broker.connect() as mq:
        return await mq._call(ShowReplication())


async def until_level(source: BrokerProcess, replica: BrokerProcess, within_s: float = 30) -> None:
    async def is_level() -> bool:
        try:
            there, here = await replication(source), await replication(replica)
        except onward.OnwardError:
            return False
        return here.event_id == there.event_id and here.lag_events == 0

    await until(is_level, within_s=within_s)


def assert_undamaged(folder: Path) -> None:
    check = Check(OsDisk(), str(folder))
    check.run()
    assert not check.is_damaged, check.problems or check.damages


async def bodies(broker: BrokerProcess, topic: str) -> list[tuple[int, bytes]]:
    async with broker.connect() as mq:
        return [(message.offset, message.body) async for message in mq.read(topic)]


@asynccontextmanager
async def reader_of(broker: BrokerProcess, topic: str) -> AsyncIterator[list[int]]:
    """Read a topic in the background; yield the offsets that have arrived."""
    offsets: list[int] = []

    async def read() -> None:
        async with broker.connect() as mq:
            async for message in mq.read(topic, follow=True):
                offsets.append(message.offset)  # noqa: PERF401  (looked at meanwhile)

    task = asyncio.get_running_loop().create_task(read())
    yield offsets
    task.cancel()
    await asyncio.wait([task])


async def test_an_empty_replica_gets_what_its_source_still_has(make_broker: MakeBroker) -> None:
    source = make_broker(**SMALL)
    await source.start()
    await drop_old_segments(source)
    async with source.connect() as mq:
        await mq.publish_many("orders", [f"order {n}" for n in range(1_000)])
        await mq.publish("orders", "later", delay="1h")
    replica = make_replica(make_broker, source)
    await replica.start()
    await until_level(source, replica)
    assert "the log was replaced by a snapshot" in replica.output
    assert await bodies(replica, "orders") == await bodies(source, "orders")
    async with replica.connect(timeout="2s") as mq:
        await mq.publish("orders", "to the source, which the replica names")
    await until_level(source, replica)
    node = (await replication(replica)).node
    assert await replica.stop() == 0
    assert await source.stop() == 0
    assert_undamaged(replica.folder)
    assert_undamaged(source.folder)
    await source.start()
    await replica.start()
    await until_level(source, replica)
    assert (await replication(replica)).node == node


async def test_readers_of_a_replica_that_fell_behind_go_on_after_the_snapshot(
    make_broker: MakeBroker,
) -> None:
    source = make_broker(**SMALL)
    replica = make_replica(make_broker, source)
    await source.start()
    await replica.start()
    async with source.connect() as mq:
        await mq.publish_many("orders", ["first"] * 10)
    await until_level(source, replica)
    async with reader_of(replica, "orders") as offsets:
        await until(lambda: len(offsets) == 10)
        port = replica.port
        await replica.kill()
        await drop_old_segments(source)
        async with source.connect() as mq:
            await mq.publish_many("orders", ["second"] * 10)
        await replica.start()
        pid = replica.pid
        await until_level(source, replica)
        await until(lambda: bool(offsets) and offsets[-1] == 19, within_s=20)
    assert (replica.pid, replica.port) == (pid, port)
    assert "the log was replaced by a snapshot" in replica.output
    assert await replica.stop() == 0
    assert_undamaged(replica.folder)


@pytest.mark.slow
async def test_kill_9_at_any_moment_of_a_snapshot_loses_nothing(make_broker: MakeBroker) -> None:
    source = make_broker(**SMALL)
    await source.start()
    await drop_old_segments(source)
    await publish(source, "orders", megabytes=1)
    replica = make_replica(make_broker, source)
    random = Random(7)
    for number in range(14):
        replica.launch()
        await asyncio.sleep(random.uniform(0.3, 1.1))
        if number % 5 == 4:
            await source.kill()
            await source.start()
        if replica.is_running:
            await replica.kill()
        else:
            code = await replica.ended()
            pytest.fail(f"the replica ended with {code}:\n{replica.output[-2000:]}")
    await replica.start()
    await until_level(source, replica, within_s=60)
    assert await bodies(replica, "orders") == await bodies(source, "orders")
    assert await replica.stop() == 0
    assert_undamaged(replica.folder)
    assert not (replica.folder / "replacing").exists()
    assert list((replica.folder / "incoming").iterdir()) == []


async def test_a_named_replica_keeps_the_log_of_its_source_and_needs_no_snapshot(
    make_broker: MakeBroker,
) -> None:
    source = make_broker(**SMALL, log_retention_replicas="copy-1")
    replica = make_replica(make_broker, source)
    await source.start()
    await replica.start()
    async with source.connect() as mq:
        await mq.publish("orders", "first")
    await until_level(source, replica)
    await replica.kill()
    await publish(source, "old", megabytes=3)
    await source.restart()
    async with source.connect() as mq:
        await mq.delete_topic("old")
    await asyncio.sleep(1.5)
    assert (source.folder / "00000000000000000001.log").exists()
    await replica.start()
    await until_level(source, replica)
    assert "snapshot" not in replica.output
    async with source.connect() as mq:
        await mq.create_topic("passing")
        await mq.delete_topic("passing")
    await until(lambda: not (source.folder / "00000000000000000001.log").exists(), within_s=20)


async def test_a_promoted_replica_that_starts_again_still_leads(make_broker: MakeBroker) -> None:
    source = make_broker(**SMALL)
    replica = make_replica(make_broker, source)
    await source.start()
    await replica.start()
    async with source.connect() as mq:
        await mq.publish("orders", "of the source")
    await until_level(source, replica)
    async with replica.connect() as mq:
        promoted = await mq._call(Promote())
        assert promoted.source_stepped_down
        await mq.publish("orders", "of the new leader")
    await replica.restart()
    async with replica.connect() as mq:
        await mq.publish("orders", "after the restart")
    assert [offset for offset, _ in await bodies(replica, "orders")] == [0, 1, 2]
    assert replica.output.count("remove replica.of from its settings") == 1
    assert not (replica.folder / "following").exists()


@pytest.mark.slow
async def test_kill_9_at_each_rename_and_removal_of_a_replacement_is_mended(
    make_broker: MakeBroker,
) -> None:
    """The thread of the loop renames and removes files only while a log is replaced."""
    source = make_broker(**SMALL)
    await source.start()
    await drop_old_segments(source)
    await publish(source, "orders", megabytes=1)
    expected, interrupted = await bodies(source, "orders"), 0
    for number in (1, 2, 3, 5, 8, 11, 14):
        replica = make_replica(make_broker, source)
        replica.launch(wrapper=strace("rename,unlink", f"signal=SIGKILL:when={number}"))
        await replica.ended(within_s=60)
        interrupted += (replica.folder / "replacing").exists()
        await replica.start()
        await until_level(source, replica, within_s=60)
        assert await bodies(replica, "orders") == expected
        assert await replica.stop() == 0
        assert_undamaged(replica.folder)
        assert not (replica.folder / "replacing").exists()
    assert interrupted >= 2
