"""Going on exactly behind a message, wherever in its batch it is."""

import pytest

import onward
from onward.errors import InvalidRequest


async def test_a_read_goes_on_in_the_middle_of_a_batch() -> None:
    async with onward.connect("memory:") as mq:
        await mq.publish_many("orders", ["a", "b", "c"])
        await mq.publish("orders", "d")
        for number in range(4):
            seen = []
            async for message in mq.read("orders"):
                seen.append(message.text)
                if message.offset == number:
                    break
            seen += [later.text async for later in mq.read("orders", after=message)]
            assert seen == ["a", "b", "c", "d"]


async def test_an_event_id_stands_for_its_whole_batch() -> None:
    async with onward.connect("memory:") as mq:
        first = await mq.publish_many("orders", ["a", "b", "c"])
        await mq.publish("orders", "d")
        reader = mq.read("orders", after_event_id=first.event_id)
        assert [message.text async for message in reader] == ["d"]


def test_a_thread_goes_on_behind_a_delivery() -> None:
    with onward.connect_sync("memory:") as mq:
        mq.publish_many("orders", ["a", "b", "c"])
        (delivery,) = mq.fetch("orders", group="billing")
        assert [later.text for later in mq.read("orders", after=delivery)] == ["b", "c"]


async def test_what_is_no_message_of_the_topic_is_refused() -> None:
    async with onward.connect("memory:") as mq:
        await mq.publish("orders", "a")
        message = await mq.get("orders", 0)
        with pytest.raises(InvalidRequest, match="of topic 'orders', not of 'bills'"):
            mq.read("bills", after=message)
        with pytest.raises(InvalidRequest, match="give one"):
            mq.read("orders", after=message, start=3)
        with pytest.raises(InvalidRequest, match="after is a message"):
            mq.read("orders", after="orders/0")  # type: ignore[arg-type]
