"""Promises of what pipelines stand on: ranges, ends, groups that are advanced, numbered batches."""

import pytest

from onward import Conflict
from onward.errors import InvalidName, UnknownTopic
from onward.message.batch import encode_batch

from .engines import BOTH, KEPT, Engine


@BOTH
async def test_a_range_of_offsets_is_read_whole_and_nothing_else(engine: Engine) -> None:
    async with engine.connect() as mq:
        for size in (1, 5, 2):
            await mq.publish_many("orders", [b"x"] * size)
        for start in range(9):
            for end in range(start, 9):
                found = [
                    message.offset async for message in mq.read("orders", start=start, end=end)
                ]
                assert found == list(range(start, end))


@KEPT
async def test_a_numbered_batch_is_stored_once_also_when_the_broker_was_restarted(
    engine: Engine,
) -> None:
    packed = encode_batch([b"a", b"b"])
    receipts = []
    for life in range(3):
        async with engine.connect() as mq:
            for sequence in range(40):
                if life and sequence < 8:
                    with pytest.raises(Conflict, match="older than the last 32"):
                        await mq.publish_encoded("orders", packed, producer_id=9, sequence=sequence)
                    continue
                receipt = await mq.publish_encoded(
                    "orders", packed, producer_id=9, sequence=sequence
                )
                receipts.append((sequence, receipt.first_offset))
            assert (await mq.topic("orders")).messages == 80
    assert set(receipts) == {(sequence, 2 * sequence) for sequence in range(40)}


@KEPT
async def test_batches_are_copied_once_also_when_the_broker_was_restarted(engine: Engine) -> None:
    for life in range(3):
        async with engine.connect() as mq:
            if not life:
                for number in range(12):
                    await mq.publish_many("staged", [b"%d" % number] * 3)
            for first in (0, 6):
                copied = await mq.copy_batches(
                    "staged", "orders", offset=3 * first, batches=6, producer_id=9, sequence=first
                )
                assert (copied.next_offset, copied.messages) == (3 * first + 18, 18)
            found = [message.body async for message in mq.read("orders")]
            assert found == [b"%d" % number for number in range(12) for _ in range(3)]


@KEPT
async def test_a_group_that_was_advanced_stands_there_after_a_restart(engine: Engine) -> None:
    async with engine.connect() as mq:
        await mq.publish_many("orders", [b"x"] * 5)
        await mq.create_group("totals", "orders")
        assert await mq.advance_group("totals", "orders", to=3, member="spark") == 3
        await mq.hold_group("totals", holder="the totals")
    async with engine.connect() as mq:
        group = await mq.group("totals")
        assert (group.topics[0].cursor, group.backlog, group.held_by) == (3, 2, "")
        assert await mq.advance_group("totals", "orders", to=3, member="spark") == 0
        found = await mq.fetch("orders", group="totals", n=5)
        assert [delivery.offset for delivery in found] == [3, 4]


@BOTH
async def test_an_explanation_says_who_advanced_a_group(engine: Engine) -> None:
    async with engine.connect() as mq:
        await mq.publish_many("orders", [b"x"] * 5)
        await mq.create_group("totals", "orders")
        await mq.advance_group("totals", "orders", to=3, member="spark totals")
        explained = await mq.explain("orders/1")
        (event,) = [one for one in explained.group("totals").events if one.did == "acked"]
        assert (event.member, event.sentence()) == ("spark totals", "acked by spark totals")


@BOTH
async def test_pipelines_have_topics_of_their_own_and_the_system_keeps_its(engine: Engine) -> None:
    async with engine.connect() as mq:
        await mq.publish("@pipeline", {"job": "archive"})
        with pytest.raises(UnknownTopic, match="created before it is used"):
            await mq.publish("@sink.load-7", b"a")
        await mq.create_topic("@sink.load-7")
        await mq.publish_many("@sink.load-7", [b"a", b"b"])
        for name in ("@trace", "@schedule", "@sink", "@other"):
            with pytest.raises(InvalidName):
                await mq.publish(name, b"x")
            with pytest.raises(InvalidName):
                await mq.create_topic(name)
        await mq.delete_topic("@sink.load-7")
        assert await mq.topics() == []
