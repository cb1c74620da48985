"""Promises of the schedule."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from onward import Client, InvalidRequest, Message
from onward.errors import AlreadyExists
from onward.protocol.operations.schedule import ScheduledDescription
from onward.settings import ScheduleSettings, Settings

from .engines import BOTH, KEPT, SMALL, Engine

PATIENCE_S = 60


async def messages(client: Client, count: int, topic: str = "orders") -> list[Message]:
    """Return the first messages of a topic, once they are there."""
    found: list[Message] = []
    async with asyncio.timeout(PATIENCE_S):
        async for message in client.read(topic, follow=True):
            found.append(message)
            if len(found) == count:
                break
    return found


async def waiting(found: AsyncIterator[ScheduledDescription]) -> list[int]:
    return [one.id async for one in found]


@BOTH
async def test_a_message_fires_into_its_topic_at_its_time_and_never_early(engine: Engine) -> None:
    async with engine.connect() as mq:
        await mq.create_topic("orders")
        receipts = [
            await mq.publish("orders", str(n), delay_ms=n * 100, key=str(n)) for n in range(5)
        ]
        found = await messages(mq, 5)
        assert [message.text for message in found] == list("01234")
        assert [message.schedule_id for message in found] == [one.schedule_id for one in receipts]
        assert [message.due_at_ms for message in found] == [one.due_at_ms for one in receipts]
        assert all(message.published_at_ms >= (message.due_at_ms or 0) for message in found)
        assert [message.key for message in found] == list("01234")


@BOTH
async def test_past_times_fire_at_once_in_the_order_of_time_and_id(engine: Engine) -> None:
    async with engine.connect() as mq:
        await mq.create_topic("orders")
        await mq.publish_many("orders", ["a", "b", "c"], at=[3, 1, 2])
        assert {message.text for message in await messages(mq, 3)} == {"a", "b", "c"}


@BOTH
async def test_cancelled_is_never_delivered_and_the_rest_is(engine: Engine) -> None:
    async with engine.connect() as mq:
        await mq.create_topic("orders")
        keep = await mq.publish_many("orders", map(str, range(10)), delay="1h")
        drop = await mq.publish_many("orders", map(str, range(10, 20)), delay="1h")
        assert {one.state for one in await drop.cancel()} == {"cancelled"}
        for number in keep.ids:
            assert (await mq.reschedule(number, at=0)).is_moved
        await messages(mq, 10)
        marker = await mq.publish("orders", "end")
        assert marker.offset == 10
        assert await waiting(mq.list_scheduled()) == []


@BOTH
async def test_an_answer_names_the_message_that_a_fired_one_has_become(engine: Engine) -> None:
    async with engine.connect() as mq:
        await mq.publish("orders", "before")
        receipt = await mq.publish("orders", "x", at=0)
        await messages(mq, 2)
        result = await receipt.cancel()
        assert (result.state, result.message_id) == ("fired", "orders/1")
        assert (await mq.get("orders", 1)).schedule_id == receipt.schedule_id


@BOTH
async def test_under_a_business_key_one_message_waits_and_the_latest_replaces_it(
    engine: Engine,
) -> None:
    async with engine.connect() as mq:
        await mq.create_topic("orders")
        first = await mq.publish("orders", "first", delay="1h", unique="order-7")
        with pytest.raises(AlreadyExists):
            await mq.publish("orders", "second", delay="1h", unique="order-7")
        third = await mq.publish("orders", "third", delay="1h", unique="order-7", replace=True)
        assert (await first.status()).state == "replaced"
        assert (await first.cancel()).state == "replaced"
        assert (await third.reschedule(at=0)).is_moved
        assert [message.text for message in await messages(mq, 1)] == ["third"]
        again = await mq.publish("orders", "fourth", delay="1h", unique="order-7")
        assert (await again.status()).state == "waiting"


@BOTH
async def test_too_far_ahead_is_refused_and_never_shortened(engine: Engine) -> None:
    settings = Settings(log=SMALL, schedule=ScheduleSettings(ahead_ms_max=86_400_000))
    async with engine.connect(settings) as mq:
        await mq.publish("orders", "x", delay="23h")
        with pytest.raises(InvalidRequest, match="1d ahead"):
            await mq.publish("orders", "x", delay="25h")
        with pytest.raises(InvalidRequest, match="1d ahead"):
            await mq.publish_many("orders", ["x", "y"], delay=["1h", "25h"])
        with pytest.raises(InvalidRequest, match="ahead"):
            await mq.reschedule(0, delay="25h")
        assert await waiting(mq.list_scheduled()) == [0]


@KEPT
async def test_what_waits_and_what_was_cancelled_survives_a_restart(engine: Engine) -> None:
    async with engine.connect() as mq:
        kept = await mq.publish_many(
            "orders", map(str, range(100)), delay="1h", uniques=[str(n) for n in range(100)]
        )
        await mq.cancel_scheduled([7, 8])
        assert (await mq.reschedule(9, delay="2h")).id == 100
        await mq.set_recurring("tick", "ticks", "t", every="1h")
    async with engine.connect() as mq:
        listed = await waiting(mq.list_scheduled(topic="orders"))
        assert listed == [n for n in kept.ids if n not in (7, 8, 9)] + [100]
        assert [(await mq.scheduled(n)).state for n in (7, 9, 100)] == [
            "cancelled", "replaced", "waiting",
        ]  # fmt: skip
        with pytest.raises(AlreadyExists):
            await mq.publish("orders", "x", delay="1h", unique="11")
        assert [one.name for one in await mq.recurring()] == ["tick"]
        assert (await mq.reschedule(unique="11", at=0)).is_moved
        assert [message.text for message in await messages(mq, 1)] == ["11"]


@KEPT
async def test_what_became_due_while_no_broker_ran_fires_once_after_it(engine: Engine) -> None:
    async with engine.connect() as mq:
        await mq.create_topic("orders")
        receipt = await mq.publish_many("orders", map(str, range(50)), delay="1s")
    async with engine.connect() as mq:
        found = await messages(mq, 50)
        assert sorted(message.schedule_id or 0 for message in found) == list(receipt.ids)
        assert (await mq.publish("orders", "end")).offset == 50
