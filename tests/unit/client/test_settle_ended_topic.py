"""Outcomes under way when their topic is deleted: they are told so, not that something is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from onward import Delivery
from onward.errors import TopicEnded

from .calling import calling, turns
from .consuming import PATIENCE_S, fetch

VERBS: dict[str, Callable[[Delivery], asyncio.Future[None]]] = {
    "ack": lambda delivery: asyncio.ensure_future(delivery.ack()),
    "retry": lambda delivery: asyncio.ensure_future(delivery.retry()),
    "reject": lambda delivery: asyncio.ensure_future(delivery.reject("no good")),
    "renew": lambda delivery: asyncio.ensure_future(delivery.renew()),
    "release": lambda delivery: asyncio.ensure_future(delivery.release()),
}


@pytest.mark.parametrize("verb", VERBS)
async def test_an_outcome_on_its_way_when_its_topic_is_deleted_is_told_so(verb: str) -> None:
    async with calling() as (client, _, commit):
        await client.publish("orders", "a")
        consumer = client.consume("orders", group="g")
        (delivery,) = await fetch(consumer, 1)
        commit.is_holding = True
        deleting = asyncio.create_task(client.delete_topic("orders"))
        await turns(20)
        # The news of the deletion and the outcome pass each other on the way.
        commit.release()
        settling = VERBS[verb](delivery)
        with pytest.raises(TopicEnded, match="topic 'orders' was deleted"):
            await asyncio.wait_for(settling, PATIENCE_S)
        await deleting
