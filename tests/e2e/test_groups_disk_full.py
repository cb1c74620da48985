"""A disk without space for more messages: groups go on with those that there are."""

import asyncio

import pytest

from onward.errors import DiskFull

from .conftest import MakeBroker, MakeVolume
from .history import History, read_all
from .taking import events_of, life_of, take
from .test_disk_full import publish_until_full


async def test_acks_retries_and_rejects_go_on_while_publishes_are_refused(
    mount_volume: MakeVolume, make_broker: MakeBroker
) -> None:
    volume = mount_volume(megabytes=32)
    broker = make_broker(
        volume.mount_point / "log",
        log_segment_bytes_max=4 << 20,
        log_preallocate_bytes=1 << 20,
        log_disk_reserve_bytes=8 << 20,
    )
    await broker.start()
    history = History()
    async with broker.connect(timeout="60s") as mq:
        await mq.create_topic("orders")
        await mq.create_group("billing", "orders")
        await publish_until_full(mq, history, "a")
        # Publishes need 8 MiB free, acks 4 MiB. About 6 MiB stay: what the broker tidies up or
        # writes meanwhile (a prepared segment, a checkpoint) reaches neither limit.
        (volume.mount_point / "ballast").write_bytes(bytes(2 << 20))
        stored = len(await read_all(mq))
        async with mq.consume("orders", group="billing", member="ann") as consumer:
            first, second, *others = await take(consumer, stored)
            await first.reject("wrong")
            await second.retry(after="1h", cause="busy")
            await asyncio.gather(*[one.ack() for one in others])
            with pytest.raises(DiskFull):
                await mq.publish("orders", "too much")
        group = await mq.group("billing")
        assert (group.backlog, group.dead) == (1, 1)
    await broker.restart()
    async with broker.connect(timeout="60s") as mq:
        group = await mq.group("billing")
        assert (group.backlog, group.dead, group.topics[0].waiting) == (1, 1, 1)
        lives = [await life_of(mq, f"orders/{offset}", "billing") for offset in range(3)]
        assert [events_of(life) for life in lives] == [
            [("dead", "ann")], [("retried", "ann")], [("acked", "ann")],
        ]  # fmt: skip
