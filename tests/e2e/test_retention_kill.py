"""Retries and dead letters outlive retention and kill -9, with their messages."""

import asyncio

import onward

from .conftest import MakeBroker
from .running import until

BODIES = [f"job {number}" for number in range(6)]


async def left_behind(mq: onward.Client) -> None:
    """Let a group reject job 0 and retry job 1; the rest is its backlog."""
    await mq.publish_many("jobs", BODIES)
    taken = 0
    async for delivery in mq.consume("jobs", group="work", credit=2):
        if delivery.offset == 0:
            await delivery.reject("no such job")
        elif delivery.offset == 1:
            await delivery.retry(after="15s")
        taken += 1
        if taken == 2:
            break


async def test_retries_and_dead_letters_outlive_retention_and_a_kill(
    make_broker: MakeBroker,
) -> None:
    broker = make_broker(log_retention_ms=1_000)
    await broker.start()
    async with broker.connect() as mq:
        await left_behind(mq)

        async def is_dropped() -> bool:
            return (await mq.topic("jobs")).first_offset == len(BODIES)

        await until(is_dropped, within_s=60)
        for _ in range(2):
            await broker.restart()
            assert (await mq.topic("jobs")).first_offset == len(BODIES)
            assert [message async for message in mq.read("jobs")] == []
            [letter] = [one async for one in mq.dead_letters("work", messages=True)]
            assert letter.message is not None
            assert letter.message.body == b"job 0"
        assert (await mq.explain("jobs/0")).message is not None
        assert await mq.redrive("work") == 1
        found: dict[int, bytes] = {}
        async with asyncio.timeout(60):
            async for delivery in mq.consume("jobs", group="work"):
                found[delivery.offset] = delivery.body
                await delivery.ack()
                if {0, 1} <= found.keys():
                    break
        # What the member had only fetched ahead was kept as well.
        assert found == {offset: BODIES[offset].encode() for offset in found}
        assert (await mq.group("work")).dead == 0
    assert "were dropped by retention before they were delivered" in broker.output
