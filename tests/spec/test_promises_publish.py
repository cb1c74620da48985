"""Promises of publishing."""

import asyncio

import pytest

from onward import InvalidRequest
from onward.errors import MessageTooLarge

from .engines import BOTH, KEPT, Engine


@BOTH
async def test_offsets_are_dense_from_zero_in_each_topic(engine: Engine) -> None:
    async with engine.connect() as mq:
        for topic in ("a", "b"):
            many = await mq.publish_many(topic, [b"x"] * 5)
            one = await mq.publish(topic, b"y")
            assert (many.first_offset, many.count, one.offset) == (0, 5, 5)
            assert [message.offset async for message in mq.read(topic)] == list(range(6))


@BOTH
async def test_a_receipt_names_topic_offset_event_id_and_durability(engine: Engine) -> None:
    async with engine.connect() as mq:
        receipt = await mq.publish("orders", b"x")
        assert (receipt.topic, receipt.offset, receipt.id) == ("orders", 0, "orders/0")
        assert receipt.event_id > 0
        assert receipt.durability == "disk"
        assert (await mq.publish("orders", b"x", durability="memory")).durability == "memory"


@BOTH
async def test_messages_of_one_publisher_are_stored_in_the_order_they_were_published(
    engine: Engine,
) -> None:
    async with engine.connect() as mq:
        futures = [mq.publish_soon("orders", str(number)) for number in range(10_000)]
        await asyncio.gather(*futures)
        found = [int(message.text) async for message in mq.read("orders")]
        assert found == list(range(10_000))


@BOTH
async def test_a_batch_is_stored_whole_or_not_at_all(engine: Engine) -> None:
    async with engine.connect() as mq:
        with pytest.raises(MessageTooLarge):
            await mq.publish_many("orders", [b"small", bytes(5 << 20)])
        assert not await mq.has_topic("orders")
        batch = await mq.publish_many("orders", [b"a", b"b"], tags=["x", None], compression="lz4")
        assert batch.count == 2
        assert [m.tag async for m in mq.read("orders")] == ["x", None]


@BOTH
async def test_bodies_come_back_byte_by_byte(engine: Engine) -> None:
    every = bytes(range(256)) * 10
    async with engine.connect() as mq:
        for body in (b"", every, "grüße", {"a": [1, None]}, 7):
            await mq.publish("orders", body)
        found = [message.body async for message in mq.read("orders")]
        assert found == [b"", every, "grüße".encode(), b'{"a":[1,null]}', b"7"]


@BOTH
async def test_quorum_is_refused_until_there_is_a_cluster(engine: Engine) -> None:
    async with engine.connect() as mq:
        with pytest.raises(InvalidRequest, match="needs a cluster"):
            await mq.publish("orders", b"x", durability="quorum")


@KEPT
async def test_what_was_published_and_not_awaited_is_stored_when_the_client_closes(
    engine: Engine,
) -> None:
    async with engine.connect() as mq:
        for number in range(1_000):
            mq.publish_soon("orders", str(number))
    async with engine.connect() as mq:
        assert (await mq.topic("orders")).next_offset == 1_000


@BOTH
async def test_publishers_of_many_topics_do_not_disturb_each_other(engine: Engine) -> None:
    async with engine.connect() as mq:

        async def publisher(topic: str) -> list[int]:
            return [(await mq.publish(topic, b"x")).offset for _ in range(50)]

        offsets = await asyncio.gather(*[publisher(f"topic-{number}") for number in range(20)])
        assert offsets == [list(range(50))] * 20
