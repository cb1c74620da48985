"""Members of groups in tests: take so many, wait for something."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from onward import Delivery
from onward.broker.crew import Member
from onward.client.consumer import Consumer

from .calling import Cable

PATIENCE_S = 60


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  # anything may be waited for
            await asyncio.sleep(0.001)


def members(cable: Cable, group: str = "g") -> list[Member]:
    return cable.broker.consuming.members_of(group)


async def collect(consumer: Consumer, count: int) -> list[Delivery]:
    """Take and ack so many."""
    found: list[Delivery] = []
    async with asyncio.timeout(PATIENCE_S):
        async for delivery in consumer:
            found.append(delivery)
            await delivery.ack()
            if len(found) == count:
                break
    return found


async def fetch(consumer: Consumer, n: int) -> list[Delivery]:
    """Fetch exactly so many."""
    found: list[Delivery] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(found) < n:
            found += await consumer.fetch(n - len(found), wait="10s")
    return found
