"""A disk without space: publishes are refused clearly, everything else goes on."""

import asyncio
from pathlib import Path

import pytest

import onward
from onward.errors import DiskFull

from .conftest import MakeBroker, MakeVolume
from .history import History, read_all
from .running import until

FILLER = "x" * 2_000


async def publish_until_full(mq: onward.Client, history: History, publisher: str) -> None:
    publishing = asyncio.ensure_future(
        history.publish_batches(mq, publisher, size=20, filler=FILLER)
    )
    await until(lambda: bool(history.errors), within_s=30)
    history.is_over = True
    await publishing


async def publish_often(mq: onward.Client, body: str) -> None:
    for _ in range(200):
        await mq.publish("orders", body)


async def publish_when_there_is_space(mq: onward.Client, topic: str, body: str) -> int:
    async with asyncio.timeout(15):
        while True:
            try:
                return (await mq.publish(topic, body)).offset
            except DiskFull:
                await asyncio.sleep(0.05)


async def test_a_full_disk_refuses_publishes_and_resumes_when_a_topic_is_deleted(
    mount_volume: MakeVolume, make_broker: MakeBroker
) -> None:
    volume = mount_volume(megabytes=32)
    broker = make_broker(
        volume.mount_point / "log",
        log_segment_bytes_max=4 << 20,
        log_preallocate_bytes=1 << 20,
        log_disk_reserve_bytes=4 << 20,
    )
    await broker.start()
    history = History()
    async with broker.connect() as mq:
        await mq.publish("small", "first")
        await publish_until_full(mq, history, "a")
        assert set(history.errors) == {"disk_full"}
        stored = await read_all(mq)
        history.check(stored)
        with pytest.raises(DiskFull, match="full"):
            await mq.publish("small", "too much")
        with pytest.raises(DiskFull):
            await mq.create_topic("another")
        await mq.delete_topic("orders")
        assert await publish_when_there_is_space(mq, "small", "second") == 1
        assert await read_all(mq, "small") == {0: "first", 1: "second"}
    await broker.restart()
    async with broker.connect() as mq:
        assert await read_all(mq, "small") == {0: "first", 1: "second"}
        assert not await mq.has_topic("orders")


async def test_nothing_acked_is_lost_when_others_fill_the_disk_to_the_last_byte(
    mount_volume: MakeVolume, make_broker: MakeBroker
) -> None:
    volume = mount_volume(megabytes=32)
    broker = make_broker(
        volume.mount_point / "log",
        log_segment_bytes_max=1 << 20,
        log_preallocate_bytes=1 << 16,
        log_checkpoint_rows=50,
    )
    await broker.start()
    history = History()
    async with broker.connect() as mq:
        await mq.create_topic("orders")
        publishing = asyncio.ensure_future(history.publish_batches(mq, "a", size=20, filler=FILLER))
        await asyncio.sleep(0.3)
        for _ in range(2):
            ballast = volume.mount_point / "ballast"
            _fill(ballast)
            history.errors.clear()
            await until(lambda: history.errors["disk_full"] > 0)
            acked = len(history.acked)
            assert len(await read_all(mq)) >= acked
            assert broker.is_running
            ballast.unlink()
            wanted = acked + 200
            await until(lambda: len(history.acked) >= wanted)  # noqa: B023
        history.is_over = True
        await publishing
        assert set(history.errors) <= {"disk_full"}
        history.check(await read_all(mq))
        await broker.restart()
        history.check(await read_all(mq))


async def test_a_broker_starts_on_a_full_disk_and_serves_what_it_has(
    mount_volume: MakeVolume, make_broker: MakeBroker
) -> None:
    volume = mount_volume(megabytes=32)
    broker = make_broker(volume.mount_point / "log", log_preallocate_bytes=1 << 16)
    await broker.start()
    async with broker.connect() as mq:
        await mq.publish("orders", "first")
    await broker.kill()
    ballast = volume.mount_point / "ballast"
    _fill(ballast)
    await broker.start()
    async with broker.connect() as mq:
        assert await read_all(mq) == {0: "first"}
        with pytest.raises(DiskFull):
            await publish_often(mq, FILLER)
        ballast.unlink()
        await publish_when_there_is_space(mq, "orders", "last")
    assert await broker.stop() == 0


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
