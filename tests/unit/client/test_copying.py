"""Copies that a client asks for: once each, in the order of the calls, through whatever happens."""

import asyncio
from typing import Any

import pytest

from onward.broker import topic_copies
from onward.broker.producers import WINDOW
from onward.client.client import Client
from onward.client.copying import CopyLines
from onward.client.sync import connect_sync
from onward.errors import (
    Conflict,
    InvalidName,
    InvalidRequest,
    NotConnected,
    OffsetOutOfRange,
    OutcomeUnknown,
    Overloaded,
    UnknownTopic,
)
from onward.message.batch import encode_batch
from onward.protocol.operations.pipeline import CopiedBatches

from .calling import calling, settings_with, turns


async def stage(client: Client, count: int, body: bytes = b"") -> list[bytes]:
    """Publish batches of one message each; return the bodies."""
    bodies = [b"%d" % number + body for number in range(count)]
    for one in bodies:
        await client.publish("staged", one)
    return bodies


async def bodies_of(client: Client, topic: str = "orders") -> list[bytes]:
    return [message.body async for message in client.read(topic)]


def copies(client: Client, count: int, *, size: int = 2) -> "list[asyncio.Task[CopiedBatches]]":
    """Ask for all that is staged, by requests of `size` batches."""
    return [
        asyncio.ensure_future(
            client.copy_batches(
                "staged", "orders", offset=first, batches=min(size, count - first), producer_id=9,
                sequence=first,
            )
        )
        for first in range(0, count, size)
    ]  # fmt: skip


async def test_batches_are_copied_once_however_often_it_is_asked() -> None:
    async with calling() as (client, _, _):
        bodies = await stage(client, 5)
        for _ in range(2):
            copied = await client.copy_batches(
                "staged", "orders", offset=1, batches=3, producer_id=9, sequence=1
            )
            assert (copied.next_offset, copied.batches, copied.messages) == (4, 3, 3)
        assert await bodies_of(client) == bodies[1:4]
        assert client._copies is not None
        assert client._copies._by_id == {}


async def test_calls_under_one_id_keep_their_order() -> None:
    async with calling() as (client, _, _):
        bodies = await stage(client, 8)
        await asyncio.gather(*copies(client, 8))
        assert await bodies_of(client) == bodies


async def test_calls_keep_their_order_when_the_broker_has_no_room_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(topic_copies, "COPIES_MAX", 1)
    async with calling() as (client, _, _):
        bodies = await stage(client, 12)
        await asyncio.gather(*copies(client, 12))
        assert await bodies_of(client) == bodies


async def test_calls_keep_their_order_when_too_many_bytes_are_under_way() -> None:
    settings = settings_with(server={"inflight_bytes_max": 65_536})
    async with calling(settings=settings) as (client, _, commit):
        bodies = await stage(client, 8, bytes(30_000))
        commit.is_holding = True
        under_way = copies(client, 8)
        await turns(200)
        commit.release()
        await asyncio.gather(*under_way)
        assert await bodies_of(client) == bodies


async def test_what_is_too_large_for_one_request_is_copied_by_several_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(topic_copies, "BYTES_MAX", 25_000)
    async with calling() as (client, _, _):
        bodies = await stage(client, 10, bytes(10_000))
        copied = await asyncio.gather(*copies(client, 10, size=5))
        assert [(one.next_offset, one.batches, one.messages) for one in copied] == [
            (5, 5, 5), (10, 5, 5),
        ]  # fmt: skip
        assert all(one.bytes > 50_000 for one in copied)
        assert await bodies_of(client) == bodies


async def test_a_copy_is_asked_for_again_when_the_connection_is_lost_and_stored_once() -> None:
    async with calling() as (client, cable, commit):
        bodies = await stage(client, 6)
        commit.is_holding = True
        under_way = copies(client, 6)
        await turns(100)
        cable.cut()
        await turns(100)
        assert not any(one.done() for one in under_way)
        commit.release()
        await asyncio.gather(*under_way)
        assert await bodies_of(client) == bodies
        assert cable.dialled == 2


async def test_a_copy_waits_for_a_broker() -> None:
    async with calling() as (client, cable, _):
        bodies = await stage(client, 4)
        cable.pull()
        await turns()
        under_way = copies(client, 4)
        await turns()
        cable.plug()
        await asyncio.gather(*under_way)
        assert await bodies_of(client) == bodies


async def test_a_copy_that_has_no_answer_in_time_says_what_is_known() -> None:
    async with calling() as (client, _, commit):
        await stage(client, 1)
        commit.is_holding = True
        client._timeout_s = 0.05
        with pytest.raises(OutcomeUnknown, match="no answer in time for a copy to 'orders'"):
            await copies(client, 1)[0]


async def test_a_copy_that_finds_no_broker_says_so() -> None:
    async with calling() as (client, cable, _):
        cable.pull()
        await turns()
        client._timeout_s = 0.05
        with pytest.raises(NotConnected):
            await copies(client, 1)[0]


async def test_a_copy_that_is_refused_for_now_remembers_why_and_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(topic_copies, "COPIES_MAX", 0)
    async with calling() as (client, _, _):
        bodies = await stage(client, 1)
        (copying,) = copies(client, 1)
        await turns()
        assert client._copies is not None
        (place,) = client._copies._by_id[9].places
        async with asyncio.timeout(60):
            while not isinstance(place.late, Overloaded):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert not place.is_asked
        monkeypatch.setattr(topic_copies, "COPIES_MAX", 1)
        await copying
        assert await bodies_of(client) == bodies


async def test_one_that_fails_holds_up_nobody_behind_it() -> None:
    async with calling() as (client, _, _):
        bodies = await stage(client, 3)
        wrong = asyncio.ensure_future(
            client.copy_batches("gone", "orders", offset=0, batches=1, producer_id=9, sequence=0)
        )
        await asyncio.gather(*copies(client, 3))
        with pytest.raises(UnknownTopic, match="topic 'gone' does not exist"):
            await wrong
        assert await bodies_of(client) == bodies


async def test_who_gives_up_waiting_leaves_the_line() -> None:
    async with calling() as (client, cable, _):
        bodies = await stage(client, 4)
        cable.pull()
        await turns()
        first, second = copies(client, 4)
        await turns()
        first.cancel()
        await turns()
        cable.plug()
        await second
        assert await bodies_of(client) == bodies[2:]


async def test_a_client_that_closes_fails_what_it_copies() -> None:
    async with calling() as (client, _, commit):
        await stage(client, 4)
        commit.is_holding = True
        under_way = copies(client, 4)
        await turns()
        await client.close(drain=False)
        for one in under_way:
            with pytest.raises(NotConnected):
                await one


async def test_errors_of_the_broker_are_raised_as_they_are() -> None:
    async with calling() as (client, _, _):
        await stage(client, 3)
        with pytest.raises(OffsetOutOfRange, match="has 3 batches from offset 0 on, not 4"):
            await copies(client, 4, size=4)[0]
        packed = encode_batch([b"x"])
        await client.publish_encoded("orders", packed, producer_id=9, sequence=WINDOW)
        with pytest.raises(Conflict, match="older than the last 32"):
            await copies(client, 1)[0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"batches": 0}, {"batches": 17}, {"batches": True}, {"batches": 1.0}, {"producer_id": 0},
        {"sequence": -1}, {"offset": -1},
    ],
)  # fmt: skip
async def test_nonsense_is_refused(wrong: dict[str, Any]) -> None:
    async with calling() as (client, _, _):
        await stage(client, 1)
        asked: dict[str, Any] = {"offset": 0, "batches": 1, "producer_id": 9, "sequence": 1}
        with pytest.raises(InvalidRequest):
            await client.copy_batches("staged", "orders", **asked | wrong)
        for topics in (("a b", "orders"), ("staged", "a b"), ("staged", "@trace")):
            with pytest.raises(InvalidName):
                await client.copy_batches(*topics, **asked)


async def test_a_place_waits_until_all_before_it_have_asked() -> None:
    lines = CopyLines()
    with lines.place(9) as first, lines.place(9) as second, lines.place(10) as other:
        assert (first.is_next, second.is_next, other.is_next) == (True, False, True)
        waiting = asyncio.ensure_future(second.turn())
        await turns()
        assert not waiting.done()
        first.ask()
        await waiting
        first.is_asked = False
        assert not second.is_next
    assert lines._by_id == {}


def test_threads_can_copy_as_well() -> None:
    with connect_sync("memory:") as mq:
        mq.publish_many("staged", [b"a", b"b"])
        copied = mq.copy_batches(
            "staged", "orders", offset=0, batches=1, producer_id=9, sequence=1, durability="memory"
        )
        assert copied.messages == 2
        assert [message.body for message in mq.read("orders")] == [b"a", b"b"]
