"""Topics: their lives, their rules, their number."""

import asyncio

import pytest

import onward
from onward.errors import (
    AlreadyExists,
    Forbidden,
    MessageTooLarge,
    TopicEnded,
    UnknownTopic,
)

from .conftest import MakeBroker
from .folders import until_the_folder_is_smaller, used_bytes
from .history import Follower, read_all
from .running import BrokerProcess, until

MEGABYTE = [b"x" * 1_000] * 1_000
TOPICS = 100_000


async def is_gone(mq: onward.Client, topic: str) -> bool:
    return not await mq.has_topic(topic)


async def fill(mq: onward.Client, topic: str, *, megabytes: int) -> None:
    for _ in range(megabytes):
        await mq.publish_many(topic, MEGABYTE)


async def test_at_the_end_of_its_lifetime_readers_are_told_and_the_space_comes_back(
    make_broker: MakeBroker,
) -> None:
    async def while_running(broker: BrokerProcess) -> None:
        async with broker.connect() as mq:
            follower = Follower(mq, "short")
            with pytest.raises(TopicEnded, match="expired"):
                await asyncio.wait_for(follower.run(), 20)
            assert len(follower.seen) == 6_000
            assert not await mq.has_topic("short")
            ended = [one for one in await mq.topics(ended=True) if one.topic == "short"]
            assert [one.state for one in ended] == ["expired"]

    async def while_down(broker: BrokerProcess) -> None:
        await broker.kill()
        await asyncio.sleep(10.5)
        await broker.start()
        async with broker.connect() as mq:
            await until(lambda: is_gone(mq, "short"))

    async def check(broker: BrokerProcess) -> None:
        await broker.start()
        async with broker.connect() as mq:
            await mq.publish("long", "kept")
            await mq.create_topic("short")
            await fill(mq, "short", megabytes=6)
            # Only now: however slow the machine is, all of it is there before the end.
            await mq.change_topic("short", lifetime="10s")
        before = used_bytes(broker.folder)
        assert before > 5 << 20
        await (while_running(broker) if broker is running else while_down(broker))
        await until_the_folder_is_smaller(broker.folder, before - (4 << 20))
        async with broker.connect() as mq:
            assert await read_all(mq, "long") == {0: "kept"}
            assert (await mq.publish("short", "new")).offset == 0
            assert await read_all(mq, "short") == {0: "new"}
        await broker.restart()
        async with broker.connect() as mq:
            assert await read_all(mq, "long") == {0: "kept"}
            assert await read_all(mq, "short") == {0: "new"}

    running, down = make_broker(log_preallocate_bytes=1 << 16), make_broker()
    await asyncio.gather(check(running), check(down))


async def test_the_space_of_a_deleted_topic_comes_back_even_when_the_broker_is_killed_at_once(
    make_broker: MakeBroker,
) -> None:
    broker = make_broker(log_preallocate_bytes=1 << 16)
    await broker.start()
    async with broker.connect() as mq:
        await mq.publish("long", "kept")
        await fill(mq, "short", megabytes=4)
        before = used_bytes(broker.folder)
        await mq.delete_topic("short")
        await broker.restart()
        await until_the_folder_is_smaller(broker.folder, before - (3 << 20))
        assert await read_all(mq, "long") == {0: "kept"}


async def test_a_deleted_topic_tells_its_readers_and_its_name_begins_at_0_again(
    make_broker: MakeBroker,
) -> None:
    broker = make_broker()
    await broker.start()
    async with broker.connect() as mq:
        for turn in range(3):
            assert (await mq.publish("orders", f"turn {turn}")).offset == 0
            reader = mq.read("orders", follow=True)
            messages = aiter(reader)
            assert (await anext(messages)).text == f"turn {turn}"
            await mq.delete_topic("orders")
            with pytest.raises(TopicEnded, match="deleted"):
                await anext(messages)
            with pytest.raises(UnknownTopic):
                await read_all(mq)
            await broker.restart()
        numbers = [one.number for one in await mq.topics(ended=True)]
        assert len(set(numbers)) == 3


async def test_rules_say_who_may_read_and_write_also_after_a_restart(
    make_broker: MakeBroker,
) -> None:
    broker = make_broker()
    await broker.start()
    async with broker.connect() as mq:
        await mq.publish("orders", "0")
        for rule in ("read-only", "write-only", "closed", "read-write"):
            await mq.change_topic("orders", rule=rule)
            await broker.restart()
            if rule in ("read-only", "closed"):
                with pytest.raises(Forbidden, match=rule):
                    await mq.publish("orders", "1")
            if rule in ("write-only", "closed"):
                with pytest.raises(Forbidden, match=rule):
                    await read_all(mq)
        assert await read_all(mq) == {0: "0"}
        with pytest.raises(AlreadyExists):
            await mq.create_topic("orders")
        assert (await mq.create_topic("orders", exist_ok=True)).next_offset == 1


async def test_without_auto_create_only_created_topics_can_be_published_to(
    make_broker: MakeBroker,
) -> None:
    broker = make_broker(topics_auto_create="false")
    await broker.start()
    async with broker.connect() as mq:
        with pytest.raises(UnknownTopic, match="auto_create"):
            await mq.publish("orders", "0")
        await mq.create_topic("orders")
        assert (await mq.publish("orders", "0")).offset == 0


async def test_too_large_a_message_is_refused_and_its_neighbours_are_not(
    make_broker: MakeBroker,
) -> None:
    broker = make_broker(topics_message_bytes_max=1 << 20)
    await broker.start()
    async with broker.connect() as mq:
        await mq.create_topic("small", message_bytes_max=100)
        await mq.publish("small", b"x" * 100)
        waiting = [mq.publish_soon("small", b"x" * size) for size in (50, 101, 60, 5_000, 70)]
        results = await asyncio.gather(*waiting, return_exceptions=True)
        refused = [isinstance(result, MessageTooLarge) for result in results]
        assert refused == [False, True, False, True, False]
        with pytest.raises(MessageTooLarge):
            await mq.publish_many("small", [b"x", b"x" * 101])
        with pytest.raises(MessageTooLarge):
            await mq.publish_many("small", [b"x" * 101], compression="zstd")
        assert (await mq.publish("large", b"x" * (1 << 20))).offset == 0
        with pytest.raises(MessageTooLarge):
            await mq.publish("large", b"x" * ((1 << 20) + 1))
        with pytest.raises(MessageTooLarge):
            await mq.publish_many("large", [b"x" * (2 << 20)], compression="zstd")
        with pytest.raises(MessageTooLarge):
            await mq.publish("large", b"x" * (40 << 20))
        assert [len(body) for body in (await read_all(mq, "small")).values()] == [100, 50, 60, 70]


async def test_a_hundred_thousand_topics_are_created_by_publishing_and_survive_a_restart(
    make_broker: MakeBroker,
) -> None:
    broker = make_broker()
    await broker.start()
    each = TOPICS // 4

    async def publish(first: int) -> None:
        async with broker.connect(timeout="60s") as mq:
            names = [f"topic-{number}" for number in range(first, first + each)]
            receipts = await asyncio.gather(*[mq.publish_soon(name, name) for name in names])
            assert {receipt.offset for receipt in receipts} == {0}

    await asyncio.gather(*[publish(first) for first in range(0, TOPICS, each)])
    async with broker.connect() as mq:
        assert (await mq.status())["topics"] == TOPICS
        files = len(list(broker.folder.iterdir()))
        assert files < 20, "no file per topic"
        await broker.restart()
        assert (await mq.status())["topics"] == TOPICS
        for number in (0, 1, 4_711, TOPICS - 1):
            name = f"topic-{number}"
            assert await read_all(mq, name) == {0: name}
            assert (await mq.publish(name, "second")).offset == 1
        assert len(await mq.topics(prefix="topic-999")) == 111
    assert await broker.stop() == 0
