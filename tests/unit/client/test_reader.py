"""The reader: each message once, in order, whatever happens to the connection."""

import asyncio
from contextlib import suppress

import pytest

from onward.client.client import Client
from onward.client.reader import ReadBatch
from onward.errors import (
    Conflict,
    InvalidRequest,
    NotConnected,
    OffsetOutOfRange,
    ProtocolError,
    TopicEnded,
    UnknownTopic,
)
from onward.message.batch import Batch, check_batch, encode_batch
from onward.protocol.payloads import Start

from .calling import Cable, calling, turns


async def collect(client: Client, count: int, **options: object) -> list[int]:
    found: list[int] = []
    async with asyncio.timeout(5):
        async for message in client.read("orders", follow=True, **options):  # type: ignore[arg-type]
            found.append(message.offset)
            if len(found) == count:
                break
    return found


async def test_a_message_knows_where_it_came_from() -> None:
    async with calling() as (client, _, _):
        receipt = await client.publish("orders", {"id": 7}, key="k")
        (message,) = [message async for message in client.read("orders")]
        assert (message.topic, message.offset, message.event_id) == ("orders", 0, receipt.event_id)
        assert (message.id, message.json()) == (receipt.id, {"id": 7})
        assert message.published_at_ms > 0


async def test_a_read_from_inside_a_batch_begins_at_its_offset() -> None:
    async with calling() as (client, _, _):
        await client.publish_many("orders", [b"%d" % number for number in range(10)])
        for offset in range(11):
            found = [message.offset async for message in client.read("orders", start=offset)]
            assert found == list(range(offset, 10))


async def test_batches_are_as_they_were_published() -> None:
    async with calling() as (client, _, _):
        await client.publish_many("orders", [b"a", b"b"])
        await client.publish_many("orders", [b"c"])
        batches = [batch async for batch in client.read("orders", start=1).batches()]
        assert [(batch.first_offset, batch.count) for batch in batches] == [(1, 1), (2, 1)]
        assert [batch.bodies for batch in batches] == [[b"b"], [b"c"]]
        assert [message.body for message in batches[0].messages()] == [b"b"]
        assert batches[0].columns.bodies == [b"a", b"b"]


async def test_a_follower_goes_on_where_it_was_when_the_connection_was_lost() -> None:
    async with calling() as (client, cable, _):
        await client.publish("orders", b"first")
        reading = asyncio.ensure_future(collect(client, 20))
        for _ in range(19):
            await asyncio.sleep(0.001)
            cable.cut()
            await client.publish("orders", b"next")
        assert await reading == list(range(20))


async def test_a_follower_from_latest_misses_nothing_when_the_connection_is_lost_at_once() -> None:
    async with calling() as (client, cable, _):
        await client.publish("orders", b"before")
        reading = asyncio.ensure_future(collect(client, 2, start="latest"))
        await turns()
        other = Client(
            [], token=None, name="other", timeout_s=5, durability=255, dials=[cable.dial]
        )
        cable.pull()
        await turns()
        cable.plug()
        await other.open()
        await other.publish("orders", b"meanwhile")
        await other.publish("orders", b"meanwhile")
        assert await reading == [1, 2]
        await other.close()


async def test_a_read_ends_at_the_end_and_a_following_one_when_the_topic_ends() -> None:
    async with calling() as (client, _, _):
        await client.publish("orders", b"a")
        assert len([message async for message in client.read("orders")]) == 1
        reading = asyncio.ensure_future(collect(client, 5))
        await turns()
        await client.delete_topic("orders")
        with pytest.raises(Conflict, match="was deleted"):
            await reading


@pytest.mark.parametrize("is_there_again", [True, False])
async def test_a_follower_never_goes_on_in_another_topic_of_the_same_name(
    is_there_again: bool,
) -> None:
    async with calling() as (client, cable, _):
        await client.publish_many("orders", [b"a", b"b"])
        reader = aiter(client.read("orders", follow=True))
        assert [(await anext(reader)).body for _ in range(2)] == [b"a", b"b"]
        await end_while_cut_off(cable, new=[b"c", b"d", b"e"] if is_there_again else [])
        with pytest.raises(TopicEnded, match="'orders' has ended"):
            await asyncio.wait_for(anext(reader), 5)
        assert await client.has_topic("orders") == is_there_again


async def test_a_follower_from_latest_that_saw_nothing_yet_stays_with_its_topic() -> None:
    async with calling() as (client, cable, _):
        await client.publish("orders", b"a")
        reading = asyncio.ensure_future(collect(client, 1, start="latest"))
        await turns()
        await end_while_cut_off(cable, new=[b"b", b"c"])
        with pytest.raises(TopicEnded):
            await reading


async def test_a_follower_of_a_topic_that_is_not_there_creates_it() -> None:
    async with calling() as (client, cable, _):
        reading = asyncio.ensure_future(collect(client, 1))
        await turns()
        cable.cut()
        await client.publish("orders", b"a")
        assert await reading == [0]


async def end_while_cut_off(cable: Cable, *, new: list[bytes]) -> None:
    """End the topic while nobody is connected, and publish to a new one of its name."""
    dials = [Cable(cable.broker).dial]
    other = Client([], token=None, name="other", timeout_s=5, durability=255, dials=dials)
    cable.pull()
    await turns()
    await other.open()
    await other.delete_topic("orders")
    if new:
        await other.publish_many("orders", new)
    await other.close()
    cable.plug()


async def test_a_reader_that_stops_early_leaves_nothing_open() -> None:
    async with calling() as (client, cable, _):
        await client.publish_many("orders", [b"a", b"b"])
        assert await collect(client, 1) == [0]
        await turns()
        topic = cable.broker.catalogue.find("orders")
        assert cable.broker.delivering.readers_of(topic) == 0
        assert len(cable.broker.delivering._open) <= 1


async def test_more_than_the_credit_arrives_bit_by_bit() -> None:
    async with calling() as (client, cable, _):
        for _ in range(30):
            await client.publish("orders", bytes(500_000))
        reader = client.read("orders").batches()
        first = await anext(reader)
        await turns(200)
        assert first.count == 1
        assert cable.broker.delivering.delivered_bytes < 8_000_000
        rest = [batch.count async for batch in reader]
        assert sum(rest) == 29


async def test_a_message_is_got_by_its_offset() -> None:
    async with calling() as (client, _, _):
        await client.publish_many("orders", [b"a", b"b", b"c"])
        assert [(await client.get("orders", n)).body for n in range(3)] == [b"a", b"b", b"c"]
        for offset in (3, 4, 10**9):
            with pytest.raises(OffsetOutOfRange):
                await client.get("orders", offset)
        with pytest.raises(UnknownTopic):
            await client.get("bills", 0)


async def test_a_deadline_that_passes_is_an_error_of_ours() -> None:
    async with calling(timeout_s=0.2) as (client, cable, _commit):
        await client.publish("orders", b"a")
        cable.pull()
        await turns()
        with pytest.raises(NotConnected):
            await client.get("orders", 0)
        with pytest.raises(NotConnected):
            await client.create_topic("bills")
        with pytest.raises(NotConnected):
            await client.topics()
        with pytest.raises(NotConnected):
            [message async for message in client.read("orders")]


async def test_a_read_of_a_broker_that_is_silent_ends_at_the_deadline_and_a_follower_waits() -> (
    None
):
    async with calling(timeout_s=0.2) as (client, cable, _):
        await client.publish("orders", b"a")
        cable.freeze()
        with pytest.raises(NotConnected, match="no answer in time for a read of topic 'orders'"):
            [message async for message in client.read("orders")]
        with pytest.raises(NotConnected):
            await client.find("orders", text="a")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.4):
                [message async for message in client.read("orders", follow=True)]


async def test_a_read_waits_for_a_broker_that_lives_and_has_no_room_for_it_yet() -> None:
    async with calling(timeout_s=0.2) as (client, cable, _):
        await client.publish("orders", b"a")
        delivering = cable.broker.delivering
        delivering._unsent_bytes += 64 << 20  # the sockets of other readers are full
        reading = asyncio.ensure_future(client.get("orders", 0))
        read = asyncio.ensure_future(anext(aiter(client.read("orders"))))
        await asyncio.sleep(0.5)
        assert not read.done()
        with pytest.raises(NotConnected):
            await reading
        delivering._unsent_bytes -= 64 << 20
        delivering._admit_soon()
        assert (await asyncio.wait_for(read, 60)).body == b"a"


async def test_what_only_asks_is_asked_again_when_the_connection_was_lost() -> None:
    async with calling() as (client, cable, _):
        await client.publish("orders", b"a")
        asking = [asyncio.ensure_future(client.topic("orders")) for _ in range(3)]
        await asyncio.sleep(0)
        cable.cut()
        assert [(await one).next_offset for one in asking] == [1, 1, 1]


@pytest.mark.parametrize("topic", ["", "a b", "..", "x" * 129])
async def test_a_name_that_cannot_be_is_refused_before_anything_is_sent(topic: str) -> None:
    async with calling() as (client, _, _):
        with pytest.raises(InvalidRequest):
            client.read(topic)
        with pytest.raises(InvalidRequest):
            await client.publish(topic, b"x")


def test_a_start_names_exactly_one_place() -> None:
    with pytest.raises(ValueError, match="exactly one"):
        Start(offset=1, time_ms=2)


async def test_a_client_that_is_not_open_says_so() -> None:
    client = Client([], token=None, name="test", timeout_s=1, durability=255)
    with pytest.raises(NotConnected, match="async with"):
        client.read("orders")
    with pytest.raises(NotConnected, match="async with"):
        await client.publish("orders", b"x")


async def test_a_follower_that_was_open_once_waits_for_its_broker_without_a_deadline() -> None:
    async with calling(timeout_s=0.1) as (client, cable, _):
        await client.publish("orders", b"a")
        reading = asyncio.ensure_future(collect(client, 2))
        await turns()
        cable.pull()
        await asyncio.sleep(0.3)
        assert not reading.done()
        cable.plug()
        await client._keeper().connected(timeout_s=5)
        await client.publish("orders", b"b")
        assert await reading == [0, 1]


async def test_a_batch_that_cannot_be_read_is_named_and_so_is_the_way_round_it() -> None:
    async with calling() as (client, _, _):
        await client.publish_many("orders", [b"good"] * 2)
        wrong = await client.publish_many("orders", [b"wrong"] * 3)
        await client.publish("orders", b"after")
        reader = client.read("orders")
        take = reader._take

        def damage(kind: int, payload: bytes | bytearray) -> None:
            take(kind, bytes(payload).replace(b"wrong", b"wrung"))

        reader._take = damage  # type: ignore[method-assign]
        batches = reader.batches()
        assert (await anext(batches)).bodies == [b"good"] * 2
        with pytest.raises(ProtocolError, match="checksum") as raised:
            await anext(batches)
        assert f"offset 2 of topic 'orders' (event id {wrong.event_id})" in str(raised.value)
        assert str(raised.value).endswith("read on with start=5")
        assert [message.body async for message in client.read("orders", start=5)] == [b"after"]


def test_a_column_that_cannot_be_read_is_named_with_its_batch() -> None:
    header = check_batch(encode_batch([b"a", b"b"]))
    block = memoryview(b"\x09\x00\x00\x00\x01\x00\x00\x00ab")
    batch = ReadBatch(
        Batch(header, block, {255: slice(0, 10)}), topic="orders", first_offset=5, event_id=9,
        published_at_ms=0, skip=1,
    )  # fmt: skip
    for read in (batch.messages, lambda: batch.bodies):
        with pytest.raises(ProtocolError, match="offset 5 of topic 'orders'.* start=7"):
            read()


async def test_topics_that_ended_stand_behind_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onward.client.topic_calls.LIST_LIMIT_MAX", 2)
    async with calling() as (client, _, _):
        for name in "fedcba":
            await client.create_topic(name)
        await client.delete_topic("e")
        await client.delete_topic("b")
        assert [one.topic for one in await client.topics(ended=True)] == list("acdfbe")


# --- reads that end at an offset ---------------------------------------------------------------


async def test_a_read_ends_before_its_end_wherever_batches_begin() -> None:
    async with calling() as (client, _, _):
        for size in (3, 1, 4):
            await client.publish_many("orders", [b"x"] * size)
        for start in range(9):
            for end in range(10):
                reader = client.read("orders", start=start, end=end)
                found = [message.offset async for message in reader]
                assert found == list(range(start, min(end, 8)))


async def test_the_last_batch_of_a_read_may_reach_over_its_end_and_none_begins_there() -> None:
    async with calling() as (client, _, commit):
        await client.publish("orders", b"0")
        commit.is_holding = True
        publishes = [
            asyncio.ensure_future(client.publish_many("orders", [b"x"] * 3)) for _ in range(3)
        ]
        await turns()
        commit.release()
        await asyncio.gather(*publishes)
        # The batches of one commit are one entry: they arrive together.
        batches = [batch async for batch in client.read("orders", start=1, end=5).batches()]
        assert [(batch.first_offset, batch.count) for batch in batches] == [(1, 3), (4, 3)]
        batches = [batch async for batch in client.read("orders", start=1, end=4).batches()]
        assert [(batch.first_offset, batch.count) for batch in batches] == [(1, 3)]


async def test_a_read_that_follows_ends_when_its_end_is_published() -> None:
    async with calling() as (client, cable, _):
        await client.publish_many("orders", [b"0", b"1"])
        found: list[int] = []
        async with asyncio.timeout(60):
            async for message in client.read("orders", end=4, follow=True):
                found.append(message.offset)
                if message.offset == 1:
                    cable.cut()
                    await client.publish_many("orders", [b"2", b"3", b"4"])
        assert found == [0, 1, 2, 3]


@pytest.mark.parametrize("end", [-1, "5", 1.5, True])
async def test_a_read_ends_at_an_offset_and_nowhere_else(end: object) -> None:
    async with calling() as (client, _, _):
        with pytest.raises(InvalidRequest, match="a read ends before an offset"):
            client.read("orders", end=end)  # type: ignore[arg-type]


async def test_a_follower_waits_for_its_broker_longer_than_any_timeout_but_not_to_begin() -> None:
    async with calling(timeout_s=0.05) as (client, cable, _):
        await client.publish("orders", b"a")
        reader = aiter(client.read("orders", follow=True))
        assert (await anext(reader)).offset == 0
        cable.pull()
        await turns()
        following = asyncio.ensure_future(anext(reader))
        with pytest.raises(NotConnected):
            await collect(client, 1)
        await asyncio.sleep(0.2)
        assert not following.done()
        cable.plug()
        for _ in range(100):
            with suppress(NotConnected):
                await client.publish("orders", b"b")
                break
        assert (await asyncio.wait_for(following, 5)).offset == 1
