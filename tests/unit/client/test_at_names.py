"""Names with an at sign, everywhere where a name is used."""

from pathlib import Path

import pytest

import onward
from onward.errors import InvalidName

TOPIC, GROUP = "celery@host.pidbox", "worker@host-1"


async def test_a_topic_and_a_group_with_an_at_sign_are_like_any_other(tmp_path: Path) -> None:
    async with onward.connect(f"file:{tmp_path}/log") as mq:
        await mq.create_topic(TOPIC, lifetime="1h")
        receipt = await mq.publish(TOPIC, "x", key="a")
        assert receipt.id == f"{TOPIC}/0"
        await mq.publish(TOPIC, "later", delay="1h")
        (delivery,) = await mq.fetch(TOPIC, group=GROUP)
        await delivery.reject("no")
        assert [one.id async for one in mq.dead_letters(GROUP)] == [f"{TOPIC}/0"]
        assert (await mq.explain(receipt.id)).group(GROUP).state == "dead"
        assert await mq.redrive(GROUP) == 1
        assert [one.topic for one in await mq.find(receipt.id.rpartition("/")[0])] == [TOPIC]
    async with onward.connect(f"file:{tmp_path}/log") as mq:
        assert [one.topic for one in await mq.topics()] == [TOPIC]
        assert [one.topic async for one in mq.list_scheduled()] == [TOPIC]
        assert (await mq.group(GROUP)).backlog == 1


@pytest.mark.parametrize("name", ["@orders", "@", "@@"])
async def test_an_at_sign_is_never_the_first_character(name: str) -> None:
    async with onward.connect("memory:") as mq:
        with pytest.raises(InvalidName):
            await mq.create_topic(name)
        with pytest.raises(InvalidName):
            await mq.create_group(name, "orders")
