"""Being a member of a group inside a test: take exactly so much, and ask what became of it."""

import asyncio

import onward
from onward.client.consumer import Consumer
from onward.client.explanation import GroupLife

from .members import PATIENCE_S


async def take(consumer: Consumer, count: int) -> list[onward.Delivery]:
    """Take exactly so many messages."""
    found: list[onward.Delivery] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(found) < count:
            found += await consumer.fetch(count - len(found), wait="30s")
    return found


async def finish(
    mq: onward.Client, count: int, *, group: str, member: str | None = None, topic: str = "orders"
) -> list[tuple[str, int]]:
    """Take and ack so many messages as a member; return texts and attempts, in their order."""
    async with mq.consume(topic, group=group, member=member) as consumer:
        deliveries = await take(consumer, count)
        await asyncio.gather(*[one.ack() for one in deliveries])
    return sorted((one.text, one.attempt) for one in deliveries)


async def publish(mq: onward.Client, *bodies: str, topic: str = "orders") -> None:
    await mq.publish_many(topic, list(bodies))


async def life_of(mq: onward.Client, message_id: str, group: str) -> GroupLife:
    """Return what `explain` tells of a message in one group."""
    life = (await mq.explain(message_id)).group(group)
    assert life is not None, f"nothing is told of {message_id} in group {group}"
    return life


def events_of(life: GroupLife) -> list[tuple[str, str]]:
    """Return what was done to the message, and by whom."""
    return [(event.did, event.member) for event in life.events if event.did != "started"]
