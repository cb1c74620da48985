"""A fetch that does not wait gets a definite answer: a message that is ready is returned."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

import pytest

from onward import connect_sync
from onward.errors import InvalidRequest, NotConnected

from .calling import calling
from .consuming import members, until

WAITS: list[Any] = [0, "0s", "1ms", "100ms"]


@pytest.mark.parametrize("wait", WAITS)
async def test_the_first_fetch_that_does_not_wait_returns_what_is_ready(wait: Any) -> None:
    async with calling() as (client, _, _):
        await client.publish_many("orders", ["a", "b", "c"])
        consumer = client.consume("orders", group="g")
        found = [one.text for one in await consumer.fetch(2, wait=wait)]
        found += [one.text for one in await consumer.fetch(2, wait=wait)]
        assert found == ["a", "b", "c"]
        assert await consumer.fetch(2, wait=wait) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "ordered"},
        {"mode": "exclusive"},
        {"priorities": True},
        {"tags": ["eu"]},
        {"at_most_once": True},
    ],
)
async def test_it_holds_for_every_kind_of_group_that_shares_work(settings: dict[str, Any]) -> None:
    async with calling() as (client, _, _):
        for n in range(20):
            await client.publish("orders", str(n), tag="eu", key=str(n))
        consumer = client.consume("orders", group="g", **settings)
        found = []
        for _ in range(20):
            (delivery,) = await consumer.fetch(wait=0)
            found.append(delivery.text)
            await delivery.ack()
        assert sorted(found, key=int) == [str(n) for n in range(20)]
        assert await consumer.fetch(wait=0) == []


async def test_each_message_that_was_confirmed_is_there_at_once() -> None:
    async with calling() as (client, _, _):
        consumer = client.consume("orders", group="g")
        for n in range(100):
            assert await consumer.fetch(wait=0) == []
            await client.publish("orders", str(n))
            (delivery,) = await consumer.fetch(10, wait=0)
            assert delivery.text == str(n)
            await delivery.ack()


async def test_it_takes_its_credit_back() -> None:
    async with calling() as (client, cable, _):
        consumer = client.consume("orders", group="g")
        assert await consumer.fetch(10, wait=0) == []
        await until(lambda: members(cable)[0].credit == 0)
        await client.publish("orders", "for another")
        async with client.consume("orders", group="g") as other:
            (delivery,) = await other.fetch(wait=0)
            assert delivery.text == "for another"


async def test_a_connection_that_is_lost_meanwhile_is_no_answer() -> None:
    async with calling() as (client, cable, _):
        await client.publish("orders", "a")
        consumer = client.consume("orders", group="g")
        await consumer.join()
        cable.pull()
        fetching = asyncio.create_task(consumer.fetch(wait=0))
        await asyncio.sleep(0.05)
        assert not fetching.done()
        cable.plug()
        assert [one.text for one in await fetching] == ["a"]


async def test_without_an_answer_it_says_so() -> None:
    async with calling(timeout_s=0.2) as (client, cable, _):
        consumer = client.consume("orders", group="g")
        await consumer.join()
        cable.pull()
        with pytest.raises(NotConnected, match="did not say in time whether group 'g'"):
            await consumer.fetch(wait=0)
        cable.plug()


async def test_a_broker_that_does_not_know_the_question_is_asked_simpler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refuse(request: object, requester: object) -> NoReturn:
        raise InvalidRequest("there is no such operation")

    async with calling() as (client, cable, _):
        monkeypatch.setitem(cable.broker.operations._handlers, "member.served", refuse)
        await client.publish("orders", "a")
        consumer = client.consume("orders", group="g")
        assert [one.text for one in await consumer.fetch(wait=0)] == ["a"]
        assert await consumer.fetch(wait=0) == []


def test_a_thread_gets_the_same_answer() -> None:
    with connect_sync("memory:") as mq:
        mq.publish("orders", "a")
        assert [one.text for one in mq.fetch("orders", group="g", wait=0)] == ["a"]
        assert mq.fetch("orders", group="g", wait=0) == []
        mq.publish("orders", "b")
        assert [one.text for one in mq.fetch("orders", group="g", wait=0)] == ["b"]
