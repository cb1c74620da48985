"""What is too old or too much goes, whole segments at a time, and readers are told the truth."""

import asyncio

import pytest

import onward
from onward.errors import OffsetOutOfRange

from .conftest import MakeBroker
from .folders import segments_of, until_the_folder_is_smaller

BATCH = [b"x" * 1_000] * 64


async def fill(mq: onward.Client, topic: str, *, batches: int) -> None:
    for _ in range(batches):
        await mq.publish_many(topic, BATCH)


async def until_first_offset_moves(mq: onward.Client, topic: str) -> onward.TopicDescription:
    async with asyncio.timeout(20):
        while True:
            found = await mq.topic(topic)
            if found.first_offset:
                return found
            await asyncio.sleep(0.1)


async def test_retention_by_bytes_and_by_age_drops_segments_and_keeps_the_rest(
    make_broker: MakeBroker,
) -> None:
    small = {"log_segment_bytes_max": 1 << 18, "log_preallocate_bytes": 1 << 16}
    by_bytes = make_broker(**small, log_retention_bytes=1 << 20)
    by_age = make_broker(**small, log_retention_ms=2_000)
    of_topic = make_broker(**small)
    quiet = make_broker()
    brokers = (by_bytes, by_age, of_topic, quiet)
    await asyncio.gather(*[broker.start() for broker in brokers])
    clients = [broker.connect() for broker in brokers]
    for mq in clients:
        await mq.open()
    try:
        for mq, broker in zip(clients[:3], brokers[:3], strict=True):
            await mq.create_topic("kept")
            await mq.create_topic("orders", retention_bytes=(1 << 20) * (broker is of_topic))
            await fill(mq, "orders", batches=60)
            assert len(segments_of(broker.folder)) > 5
        # Only this topic asks for an age, and nobody writes to the log any more.
        await clients[3].create_topic("orders", retention="2s")
        await fill(clients[3], "orders", batches=2)
        found = await asyncio.gather(*[until_first_offset_moves(mq, "orders") for mq in clients])
        for mq, broker, topic in zip(clients, brokers, found, strict=True):
            await _check(mq, topic)
            if broker is not quiet:
                await until_the_folder_is_smaller(broker.folder, 2_500_000)
            await broker.restart()
            after = await mq.topic("orders")
            assert after.first_offset >= topic.first_offset
            assert after.next_offset == topic.next_offset + 1
            await _check(mq, after)
    finally:
        for mq in clients:
            await mq.close(drain=False)


async def _check(mq: onward.Client, topic: onward.TopicDescription) -> None:
    with pytest.raises(OffsetOutOfRange, match=f"to {topic.next_offset - 1}$|is empty$"):
        await anext(aiter(mq.read("orders", start=0)))
    offsets = [message.offset async for message in mq.read("orders")]
    # Retention goes on meanwhile: what is read is the end of what there was, and all that is left.
    there = list(range(topic.first_offset, topic.next_offset))
    assert offsets == there[len(there) - len(offsets) :]
    assert len(offsets) >= (await mq.topic("orders")).messages
    assert (await mq.publish("orders", "next")).offset >= topic.next_offset
