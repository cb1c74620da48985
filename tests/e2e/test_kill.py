"""kill -9, again and again, while programs publish and read."""

import asyncio
import random

import pytest

from .conftest import MakeBroker
from .history import Follower, History, read_all
from .running import until

KILLS = 9
CHECKPOINT_ROWS = 300
"""So few that checkpoints, runs and rolls are under way when the kill comes."""


async def test_nothing_acked_is_lost_and_nothing_is_stored_twice_when_the_broker_is_killed(
    make_broker: MakeBroker,
) -> None:
    broker = make_broker(
        log_segment_bytes_max=1 << 20,
        log_checkpoint_rows=CHECKPOINT_ROWS,
        log_checkpoint_bytes=1 << 18,
    )
    moments = random.Random(7)
    history = History()
    await broker.start()
    async with broker.connect() as one, broker.connect() as two, broker.connect() as three:
        await one.create_topic("orders")
        followers = [Follower(two), Follower(three)]
        async with asyncio.TaskGroup() as group:
            reading = [group.create_task(follower.run()) for follower in followers]
            publishing = [
                group.create_task(history.publish_singles(one, "a")),
                group.create_task(history.publish_singles(two, "b", in_flight=1)),
                group.create_task(history.publish_batches(two, "c")),
                group.create_task(history.publish_batches(three, "d", size=500)),
            ]
            for _ in range(KILLS):
                await asyncio.sleep(moments.uniform(0.05, 0.7))
                await broker.restart()
            await until(lambda: len(history.acked) > 1_000, within_s=60)
            history.is_over = True
            await asyncio.wait(publishing)
            stored = await read_all(one)
            for follower in followers:
                await follower.caught_up(len(stored))
            for task in reading:
                task.cancel()
    history.check(stored)
    for follower in followers:
        follower.check(stored)
    assert not history.errors, "a repeat is safe, so nobody had to hear of the kills"
    await broker.stop()


@pytest.mark.parametrize("durability", ["memory", "interval"])
async def test_kill_9_loses_nothing_acked_even_without_a_sync(
    make_broker: MakeBroker, durability: str
) -> None:
    broker = make_broker(log_durability=durability)
    history = History()
    await broker.start()
    async with broker.connect() as mq:
        publishing = asyncio.ensure_future(history.publish_singles(mq, "a"))
        for _ in range(2):
            enough = len(history.acked) + 100
            await until(lambda: len(history.acked) >= enough, within_s=60)  # noqa: B023
            await broker.restart()
        history.is_over = True
        await publishing
        history.check(await read_all(mq))


async def test_the_state_of_a_killed_broker_is_the_fold_of_its_log(
    make_broker: MakeBroker,
) -> None:
    broker = make_broker(log_segment_bytes_max=1 << 18, log_checkpoint_rows=20)
    await broker.start()
    async with broker.connect() as mq:
        for turn in range(4):
            names = [f"topic-{turn}-{n}" for n in range(150)]
            waiting = [mq.publish_soon(name, name) for name in names]
            await asyncio.sleep(0.02 * turn)
            await broker.restart()
            await asyncio.gather(*waiting)
            await mq.delete_topic(names[0])
        with_checkpoint = await mq.topics(ended=True)
        await broker.kill()
        for path in broker.folder.iterdir():
            if path.suffix != ".log" and path.name != "lock":
                path.unlink()
        await broker.start()
        assert await mq.topics(ended=True) == with_checkpoint
        for topic in with_checkpoint:
            if topic.state == "active":
                assert await read_all(mq, topic.topic) == {0: topic.topic}
