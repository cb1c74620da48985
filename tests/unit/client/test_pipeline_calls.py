"""What pipelines ask for: each call may be repeated, and a lost connection changes nothing."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from onward.client.client import Client
from onward.client.sync import connect_sync
from onward.errors import Conflict, InvalidRequest, Overloaded, UnknownTopic
from onward.message.batch import encode_batch
from onward.protocol.operations.pipeline import TopicEnd

from .calling import Cable, calling, turns


@asynccontextmanager
async def another(cable: Cable) -> AsyncIterator[Client]:
    client = Client([], token=None, name="other", timeout_s=60, durability=255, dials=[cable.dial])
    async with client:
        yield client


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


# --- topic_ends --------------------------------------------------------------------------------


async def test_the_ends_of_topics_come_with_the_first_news() -> None:
    async with calling(timeout_s=60) as (client, cable, _):
        await client.publish_many("orders", [b"a", b"b"])
        await client.create_topic("bills")
        known = {"orders": 2, "bills": 0}
        waiting = asyncio.ensure_future(client.topic_ends(known, wait="1m"))
        await until(lambda: bool(cable.broker.catalogue.find("bills").watches))
        await client.publish("bills", b"c")
        assert await waiting == {"orders": TopicEnd(0, 2), "bills": TopicEnd(0, 1)}
        assert await client.topic_ends(known) == await waiting
        assert await client.topic_ends({"orders": -1}, wait="1m") == {"orders": TopicEnd(0, 2)}


async def test_a_wait_may_be_longer_than_the_deadline_of_calls() -> None:
    async with calling(timeout_s=60) as (client, cable, _), another(cable) as other:
        await client.create_topic("orders")
        client._timeout_s = 0.001
        loop = asyncio.get_running_loop()
        waiting = asyncio.ensure_future(client.topic_ends({"orders": 0}, wait="1m"))
        await until(lambda: bool(cable.broker.catalogue.find("orders").watches))
        is_over = loop.time() + 0.01
        await until(lambda: loop.time() > is_over)
        await other.publish("orders", b"a")
        assert await waiting == {"orders": TopicEnd(0, 1)}
        client._timeout_s = 60


async def test_a_wait_goes_on_over_a_new_connection() -> None:
    async with calling(timeout_s=60) as (client, cable, _):
        await client.create_topic("orders")
        topic = cable.broker.catalogue.find("orders")
        waiting = asyncio.ensure_future(client.topic_ends({"orders": 0}, wait="1m"))
        await until(lambda: bool(topic.watches))
        (first,) = topic.watches or ()
        cable.cut()
        await until(lambda: bool(topic.watches) and first not in (topic.watches or ()))
        await client.publish("orders", b"a")
        assert await waiting == {"orders": TopicEnd(0, 1)}


async def test_a_topic_that_is_not_there_is_said() -> None:
    async with calling() as (client, _, _):
        with pytest.raises(UnknownTopic, match="topic 'orders' does not exist"):
            await client.topic_ends({"orders": 0}, wait="1m")


async def test_a_wait_that_is_too_long_or_for_too_much_is_refused() -> None:
    async with calling() as (client, _, _):
        for wait in ("61s", -1, "-1s"):
            with pytest.raises(InvalidRequest, match="minute|duration|text"):
                await client.topic_ends({}, wait=wait)
        with pytest.raises(InvalidRequest, match="1000 topics are the most"):
            await client.topic_ends({f"topic-{number}": 0 for number in range(1_001)})


# --- advance and hold --------------------------------------------------------------------------


async def test_a_group_is_advanced_and_a_repeat_changes_nothing() -> None:
    async with calling() as (client, _, _):
        await client.publish_many("orders", [b"x"] * 5)
        await client.create_group("totals", "orders")
        counts = [
            await client.advance_group("totals", "orders", to=to, member="spark")
            for to in (3, 3, 1, 5)
        ]
        assert counts == [3, 0, 0, 2]
        (share,) = (await client.group("totals")).topics
        assert share.cursor == 5


async def test_who_consumes_from_a_group_that_is_held_is_told_and_does_not_wait() -> None:
    async with calling(timeout_s=60) as (client, cable, _), another(cable) as other:
        await client.publish("orders", b"x")
        await client.create_group("totals", "orders")
        await client.hold_group("totals", holder="the totals")
        for one in (client, other):
            with pytest.raises(Conflict, match="group 'totals' is used by the totals"):
                async for _ in one.consume("orders", group="totals"):
                    pass
            with pytest.raises(Conflict, match="group 'totals' is used by the totals"):
                await one.fetch("orders", group="totals", wait="1s")
        assert (await other.group("totals")).held_by == "the totals"


async def test_a_group_that_is_held_already_does_not_count_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("onward.broker.group_holds.HOLDS_PER_SESSION_MAX", 1)
    async with calling(timeout_s=60) as (client, _, _):
        await client.create_topic("orders")
        for group in ("totals", "others"):
            await client.create_group(group, "orders")
        for _ in range(2):
            await client.hold_group("totals", holder="one")
        with pytest.raises(Overloaded, match="holds at most 1 groups"):
            await client.hold_group("others", holder="one")


async def test_a_client_that_lost_its_connection_holds_its_groups_again() -> None:
    async with calling(timeout_s=60) as (client, cable, _), another(cable) as other:
        await client.publish("orders", b"x")
        await client.create_group("totals", "orders")
        await client.hold_group("totals", holder="one")
        cable.pull()
        await until(lambda: not cable.broker.group_holds.holder_of("totals"))
        cable.plug()
        assert await client.advance_group("totals", "orders", to=1, member="spark") == 1
        assert cable.broker.group_holds.holder_of("totals") == "one"
        with pytest.raises(Conflict, match="used by one"):
            await other.hold_group("totals", holder="two")


async def test_a_client_whose_group_somebody_else_took_meanwhile_is_told() -> None:
    async with calling(timeout_s=60) as (client, cable, _), another(cable) as other:
        await client.publish("orders", b"x")
        await client.create_group("totals", "orders")
        await client.hold_group("totals", holder="one")
        nodes, listed = client._keeper()._nodes, client._keeper()._nodes.listed
        nodes.listed = []
        cable.cut()
        await until(lambda: not cable.broker.group_holds.holder_of("totals"))
        await other.hold_group("totals", holder="two")
        nodes.listed = listed
        with pytest.raises(Conflict, match="group 'totals' is used by two"):
            await client.advance_group("totals", "orders", to=1, member="spark")
        assert not client._holds


async def test_a_group_is_free_when_its_client_closes() -> None:
    async with calling(timeout_s=60) as (client, cable, _):
        await client.create_topic("orders")
        await client.create_group("totals", "orders")
        async with another(cable) as other:
            await other.hold_group("totals", holder="two")
        await until(lambda: not cable.broker.group_holds.holder_of("totals"))
        await client.hold_group("totals", holder="one")
        assert cable.broker.group_holds.holder_of("totals") == "one"
        assert cable.broker.group_holds.holder_of("totals") == "one"
        await turns()


# --- topics of pipelines -----------------------------------------------------------------------


async def test_the_topics_of_pipelines_are_used_as_others_and_not_listed() -> None:
    async with calling() as (client, _, _):
        longest = "@sink." + "x" * 123
        for topic in ("@pipeline", "@sink.load-7", longest):
            await client.create_topic(topic)
            await client.publish(topic, b"a")
            await client.publish(topic, b"b")
            assert (await client.topic(topic)).messages == 2
        await client.create_topic("@sink.other", lifetime="1d")
        await client.change_topic("@sink.other", lifetime="2d")
        assert await client.topics() == []
        listed = [one.topic for one in await client.topics(prefix="@sink.")]
        assert listed == ["@sink.load-7", "@sink.other", longest]
        for topic in listed:
            await client.delete_topic(topic)
        assert not await client.has_topic("@sink.load-7")


# --- threads -----------------------------------------------------------------------------------


def test_threads_have_the_same_calls() -> None:
    with connect_sync("memory:") as mq:
        packed = encode_batch([b"a", b"b", b"c"])
        receipt = mq.publish_encoded("orders", packed, producer_id=9, sequence=1)
        assert mq.publish_encoded("orders", packed, producer_id=9, sequence=1) == receipt
        assert mq.topic_ends({"orders": -1}) == {"orders": TopicEnd(0, 3)}
        assert [message.offset for message in mq.read("orders", start=1, end=2)] == [1]
        mq.create_group("totals", "orders")
        mq.hold_group("totals", holder="the totals")
        assert mq.advance_group("totals", "orders", to=2, member="spark") == 2
        mq.change_topic("orders", retention_group="totals")
        assert mq.topic("orders").retention_group == "totals"
        mq.create_topic("bills", retention_group="lake")
        assert mq.topic("bills").retention_group == "lake"
