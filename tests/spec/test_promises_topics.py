"""Promises of topics."""

import pytest

from onward import InvalidRequest
from onward.errors import AlreadyExists, Forbidden, InvalidName, MessageTooLarge, UnknownTopic
from onward.settings import Settings, TopicSettings

from .engines import BOTH, KEPT, SMALL, Engine


@BOTH
async def test_publishing_creates_a_topic_unless_that_is_off(engine: Engine) -> None:
    async with engine.connect() as mq:
        await mq.publish("orders", b"x")
        assert (await mq.topic("orders")).messages == 1
    async with engine.connect(Settings(log=SMALL, topics=TopicSettings(auto_create=False))) as mq:
        with pytest.raises(UnknownTopic, match="auto_create is off"):
            await mq.publish("bills", b"x")


@BOTH
@pytest.mark.parametrize(
    ("rule", "may_write", "may_read"),
    [
        ("read-write", True, True), ("write-only", True, False),
        ("read-only", False, True), ("closed", False, False),
    ],
)  # fmt: skip
async def test_the_rule_of_a_topic_is_kept(
    engine: Engine, rule: str, *, may_write: bool, may_read: bool
) -> None:
    async with engine.connect() as mq:
        await mq.publish("orders", b"x")
        await mq.change_topic("orders", rule=rule)  # type: ignore[arg-type]
        works = ((may_write, mq.publish("orders", b"y")), (may_read, mq.get("orders", 0)))
        for allowed, work in works:
            if allowed:
                await work
            else:
                with pytest.raises(Forbidden, match=rule):
                    await work


@KEPT
async def test_topics_are_after_a_restart_as_they_were(engine: Engine) -> None:
    async with engine.connect() as mq:
        await mq.create_topic("orders", lifetime="1h", message_bytes_max=500, retention="2d")
        await mq.change_topic("orders", rule="write-only")
        await mq.publish("orders", b"x")
        await mq.publish("gone", b"x")
        await mq.delete_topic("gone")
        before = await mq.topics(ended=True)
    async with engine.connect() as mq:
        assert await mq.topics(ended=True) == before


@BOTH
async def test_a_name_is_free_again_after_the_end_and_nothing_old_is_seen(engine: Engine) -> None:
    async with engine.connect() as mq:
        for number in range(3):
            assert (await mq.publish("orders", str(number))).offset == 0
            assert [message.text async for message in mq.read("orders")] == [str(number)]
            await mq.delete_topic("orders")
            assert not await mq.has_topic("orders")
        assert [topic.state for topic in await mq.topics(ended=True)] == ["deleted"] * 3


@BOTH
async def test_limits_of_a_topic_are_its_own(engine: Engine) -> None:
    async with engine.connect() as mq:
        await mq.create_topic("small", message_bytes_max=100)
        await mq.create_topic("large", message_bytes_max=6 << 20)
        with pytest.raises(MessageTooLarge):
            await mq.publish("small", bytes(101))
        await mq.publish("large", bytes(5 << 20))
        with pytest.raises(MessageTooLarge):
            await mq.publish("usual", bytes(5 << 20))


@BOTH
async def test_each_mistake_has_its_error(engine: Engine) -> None:
    async with engine.connect() as mq:
        await mq.create_topic("orders")
        with pytest.raises(AlreadyExists):
            await mq.create_topic("orders")
        assert (await mq.create_topic("orders", exist_ok=True)).state == "active"
        with pytest.raises(InvalidName):
            await mq.create_topic("no/slash")
        with pytest.raises(InvalidRequest, match="lives at least"):
            await mq.create_topic("bills", lifetime="9s")
        with pytest.raises(InvalidRequest, match="without a lifetime it lives for ever"):
            await mq.create_topic("bills", lifetime=0)
        with pytest.raises(InvalidRequest, match="not both"):
            await mq.create_topic("bills", lifetime="1h", expires_at=2**42)
        for work in (mq.topic("bills"), mq.delete_topic("bills"), mq.change_topic("bills")):
            with pytest.raises(UnknownTopic):
                await work


@BOTH
async def test_topics_are_listed_by_name_and_prefix(engine: Engine) -> None:
    async with engine.connect() as mq:
        for name in ("b.2", "a.1", "b.1"):
            await mq.create_topic(name)
        assert [topic.topic for topic in await mq.topics()] == ["a.1", "b.1", "b.2"]
        assert [topic.topic for topic in await mq.topics(prefix="b.")] == ["b.1", "b.2"]
