"""Promises of reading."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from onward import Conflict
from onward.errors import Forbidden, OffsetOutOfRange, UnknownTopic

from .engines import BOTH, KEPT, Engine


@BOTH
async def test_a_read_begins_at_any_offset_time_or_event_id(engine: Engine) -> None:
    async with engine.connect() as mq:
        receipts = [await mq.publish("orders", str(number)) for number in range(5)]

        async def read(**options: object) -> list[str]:
            return [m.text async for m in mq.read("orders", **options)]  # type: ignore[arg-type]

        everything = ["0", "1", "2", "3", "4"]
        assert await read() == await read(start="earliest") == await read(start=0) == everything
        assert await read(start="latest") == await read(start=5) == []
        assert await read(start=3) == ["3", "4"]
        assert await read(start="10m") == await read(start=timedelta(minutes=10)) == everything
        assert await read(start=datetime.now(UTC) + timedelta(hours=1)) == []
        assert await read(after_event_id=receipts[2].event_id) == ["3", "4"]


@BOTH
async def test_readers_change_nothing_and_know_nothing_of_each_other(engine: Engine) -> None:
    async with engine.connect() as mq:
        await mq.publish_many("orders", [str(number) for number in range(500)])

        async def read() -> int:
            return len([message async for message in mq.read("orders")])

        assert await asyncio.gather(*[read() for _ in range(10)]) == [500] * 10


@BOTH
async def test_a_follower_sees_each_new_message_once_and_in_order(engine: Engine) -> None:
    async with engine.connect() as mq:
        await mq.publish("orders", "0")

        async def follow() -> list[int]:
            found: list[int] = []
            async for message in mq.read("orders", follow=True):
                found.append(int(message.text))
                if len(found) == 300:
                    break
            return found

        followers = [asyncio.ensure_future(follow()) for _ in range(3)]
        for number in range(1, 300):
            await mq.publish("orders", str(number))
        assert await asyncio.wait_for(asyncio.gather(*followers), 10) == [list(range(300))] * 3


@KEPT
async def test_reading_goes_over_segments_and_restarts(engine: Engine) -> None:
    for start in (0, 40):
        async with engine.connect() as mq:
            for number in range(start, start + 40):
                await mq.publish("orders", str(number).encode() * 2_000)
                await mq.publish("noise", bytes(1_000))
    async with engine.connect() as mq:
        for start in range(0, 80, 7):
            found = [message.offset async for message in mq.read("orders", start=start)]
            assert found == list(range(start, 80))


@BOTH
async def test_what_cannot_be_read_says_why(engine: Engine) -> None:
    async with engine.connect() as mq:
        with pytest.raises(UnknownTopic, match="'orders' does not exist"):
            [message async for message in mq.read("orders")]
        await mq.create_topic("orders", rule="write-only")
        with pytest.raises(Forbidden, match="write-only"):
            [message async for message in mq.read("orders")]
        await mq.create_topic("empty")
        with pytest.raises(OffsetOutOfRange):
            [message async for message in mq.read("empty", start=1)]


@BOTH
async def test_a_follower_is_told_when_its_topic_ends(engine: Engine) -> None:
    async with engine.connect() as mq:
        await mq.publish("orders", b"x")

        async def follow() -> None:
            async for _ in mq.read("orders", follow=True):
                pass

        following = asyncio.ensure_future(follow())
        await asyncio.sleep(0.02)
        await mq.delete_topic("orders")
        with pytest.raises(Conflict, match="was deleted"):
            await asyncio.wait_for(following, 5)
