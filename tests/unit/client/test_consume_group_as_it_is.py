"""A member that names no topics gets those of its group, whatever they become."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from onward import connect_sync
from onward.errors import InvalidRequest, LeaseLost, UnknownGroup

from .calling import calling
from .consuming import PATIENCE_S, fetch, members, until


@pytest.mark.parametrize("options", [{}, {"mode": "ordered"}, {"mode": "exclusive"}])
async def test_a_member_without_topics_follows_its_group(options: dict[str, Any]) -> None:
    async with calling() as (client, _, _):
        await client.create_group("g", ["orders", "refunds"], **options)
        async with client.consume(group="g") as consumer:
            assert set(consumer.topics) == {"orders", "refunds"}
            await client.publish("refunds", "a", key="k")
            (delivery,) = await fetch(consumer, 1)
            await delivery.ack()
            await client.change_group("g", add_topics="returns")
            await client.publish("returns", "b", key="k")
            (delivery,) = await fetch(consumer, 1)
            assert (delivery.topic, delivery.text) == ("returns", "b")


@pytest.mark.parametrize("mode", ["shared", "ordered", "exclusive"])
async def test_the_topics_of_a_member_without_topics_are_those_of_its_group(mode: Any) -> None:
    async with calling() as (client, cable, _):
        await client.create_group("g", "orders", mode=mode)
        async with client.consume(group="g") as consumer, client.consume(group="g") as second:
            await client.change_group("g", add_topics=["refunds", "returns"])
            await until(lambda: consumer.topics == ("orders", "refunds", "returns"))
            await until(lambda: second.topics == consumer.topics)
            await client.change_group("g", remove_topics="refunds")
            await until(lambda: consumer.topics == ("orders", "returns"))
            await client.delete_topic("orders")
            await until(lambda: consumer.topics == ("returns",))
            await client.publish("orders", "again")
            cable.broker.consuming.tick()
            await until(lambda: consumer.topics == ("orders", "returns"))
            (delivery,) = await fetch(consumer, 1)
            assert delivery.text == "again"


async def test_the_topics_of_a_member_that_names_them_stay_as_named() -> None:
    async with calling() as (client, _, _), client.consume("orders", group="g") as consumer:
        await client.change_group("g", add_topics="returns")
        assert (await client.group("g")).members
        assert consumer.topics == ("orders",)


async def test_what_another_member_brings_comes_to_those_without_topics() -> None:
    async with calling() as (client, cable, _):
        await client.create_group("g", "orders")
        async with client.consume(group="g") as consumer, client.consume("more", group="g"):
            await until(lambda: len(members(cable)) == 2)
            await client.publish("more", "a")
            (delivery,) = await fetch(consumer, 1)
            assert delivery.topic == "more"


async def test_a_member_that_names_its_topics_gets_no_others() -> None:
    async with calling() as (client, _, _), client.consume("orders", group="g") as consumer:
        await client.change_group("g", add_topics="returns")
        await client.publish("returns", "b")
        assert await consumer.fetch(wait=0) == []


async def test_credit_that_was_given_before_a_topic_came_counts_for_it() -> None:
    async with calling() as (client, cable, _):
        await client.create_group("g", "orders")
        async with client.consume(group="g", credit=1) as consumer:
            taking = asyncio.create_task(consumer.take())
            await until(lambda: members(cable)[0].credit == 1)
            await client.change_group("g", add_topics="later")
            await client.publish("later", "a")
            (delivery,) = await asyncio.wait_for(taking, PATIENCE_S)
            assert delivery.topic == "later"


async def test_without_topics_a_group_must_exist() -> None:
    async with calling() as (client, _, _):
        with pytest.raises(UnknownGroup, match="'nobody' does not exist"):
            await client.consume(group="nobody").join()


async def test_a_topic_of_the_group_that_was_deleted_keeps_nobody_out() -> None:
    async with calling() as (client, _, _):
        await client.create_group("g", ["orders", "gone"])
        await client.delete_topic("gone")
        await client.publish("orders", "a")
        async with client.consume(group="g") as consumer:
            assert consumer.topics == ("orders",)
            (delivery,) = await consumer.fetch(wait=0)
            assert delivery.text == "a"


async def test_a_broadcast_is_joined_as_it_is() -> None:
    async with calling() as (client, _, _):
        await client.create_group("g", ["a", "b"], mode="broadcast", start="earliest")
        await client.publish("b", "hello")
        async with client.consume(group="g") as consumer:
            (delivery,) = await fetch(consumer, 1)
            assert delivery.text == "hello"


def test_a_thread_can_leave_out_topics() -> None:
    with connect_sync("memory:") as mq:
        mq.create_group("g", "orders")
        mq.publish("orders", "a")
        with mq.consume(group="g") as consumer:
            assert [one.text for one in consumer.fetch(wait=0)] == ["a"]
            mq.change_group("g", add_topics="refunds")
            assert consumer.topics == ("orders", "refunds")


@pytest.mark.parametrize("options", [{}, {"mode": "ordered"}, {"tags": ["eu"]}])
async def test_a_topic_that_is_removed_comes_no_more(options: dict[str, Any]) -> None:
    async with calling() as (client, _, _):
        await client.create_group("g", ["orders", "refunds"], **options)
        async with client.consume(group="g") as consumer:
            for text in ("a", "b"):
                await client.publish("refunds", text, tag="eu", key="k")
            (held,) = await fetch(consumer, 1)
            changed = await client.change_group("g", remove_topics="refunds")
            assert [share.topic for share in changed.topics] == ["orders"]
            with pytest.raises(LeaseLost):
                await held.ack()
            await client.publish("orders", "c", tag="eu", key="k")
            (delivery,) = await fetch(consumer, 1)
            assert delivery.text == "c"
            await delivery.ack()
            assert await consumer.fetch(wait=0) == []


def test_a_removed_topic_stays_removed_and_begins_anew_when_it_is_added(tmp_path: Path) -> None:
    with connect_sync(f"file:{tmp_path}") as mq:
        mq.create_group("g", ["orders", "refunds"])
        mq.publish("refunds", "a")
        with mq.consume(group="g") as consumer:
            consumer.fetch(wait=0)[0].reject("no good")
        mq.change_group("g", remove_topics="refunds")
    with connect_sync(f"file:{tmp_path}") as mq:
        assert [share.topic for share in mq.group("g").topics] == ["orders"]
        assert mq.group("g").dead == 0
        mq.change_group("g", add_topics="refunds")
        with mq.consume(group="g") as consumer:
            mq.publish("refunds", "b")
            assert "b" in [one.text for one in consumer.fetch(10, wait="10s")]


@pytest.mark.parametrize(("topics", "match"), [("more", "not its topic"), ("orders", "at least")])
async def test_what_cannot_be_removed_is_refused(topics: str, match: str) -> None:
    async with calling() as (client, _, _):
        await client.create_group("g", "orders")
        with pytest.raises(InvalidRequest, match=match):
            await client.change_group("g", remove_topics=topics)
