"""Members of a broadcast: each gets everything, and each knows how far it is."""

import asyncio
import json
import logging
from pathlib import Path

import pytest

from onward import Client, Conflict, Corruption, Delivery, InvalidRequest
from onward.client.consumer import Consumer
from onward.client.position import PositionFile
from onward.errors import Overloaded, TopicEnded

from .calling import calling, turns
from .consuming import PATIENCE_S, collect, fetch, until


def broadcast(client: Client, **options: object) -> Consumer:
    return client.consume("ticks", group="prices", mode="broadcast", **options)  # type: ignore[arg-type]


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def offsets_in(path: Path) -> dict[str, int]:
    stored = PositionFile(path, group="prices").load()
    return {topic: position.offset for topic, position in stored.items()}


async def texts(consumer: Consumer, n: int) -> list[str]:
    return [one.text for one in await fetch(consumer, n)]


async def test_every_member_of_a_broadcast_gets_every_message_from_its_join_on() -> None:
    async with calling() as (client, _, _):
        await client.publish("ticks", "before")
        async with broadcast(client) as first:
            await client.publish("ticks", "1")
            async with broadcast(client) as second:
                await client.publish_many("ticks", ["2", "3"])
                assert await texts(first, 3) == ["1", "2", "3"]
                assert await texts(second, 2) == ["2", "3"]
                assert (first.mode, second.mode) == ("broadcast", "broadcast")


async def test_a_broadcast_can_begin_at_the_earliest_message() -> None:
    async with calling() as (client, _, _):
        await client.publish_many("ticks", ["1", "2"])
        async with broadcast(client, start="earliest") as consumer:
            assert await texts(consumer, 2) == ["1", "2"]


async def test_a_broadcast_goes_on_after_a_lost_connection_without_gap_or_repeat() -> None:
    async with calling() as (client, cable, _):
        found: list[str] = []
        consumer = broadcast(client)
        await consumer.join()
        for number in range(10):
            await client.publish("ticks", str(number))
            found += await texts(consumer, 1)
            cable.cut()
            await turns()
        assert found == [str(number) for number in range(10)]
        await consumer.aclose()


async def test_a_named_member_goes_on_where_it_was() -> None:
    async with calling() as (client, _, _):
        async with broadcast(client, member="screen-1") as consumer:
            await client.publish_many("ticks", [str(number) for number in range(10)])
            found = await fetch(consumer, 10)
            for one in (*found[:4], found[7]):
                await one.ack()
        async with broadcast(client, member="screen-1") as consumer:
            assert await texts(consumer, 6) == ["4", "5", "6", "7", "8", "9"]
        async with broadcast(client, member="screen-2") as consumer:
            await client.publish("ticks", "10")
            assert await texts(consumer, 1) == ["10"]


async def test_a_position_in_a_file_survives_the_member(tmp_path: Path) -> None:
    path = tmp_path / "position.json"
    async with calling() as (client, _, _):
        async with broadcast(client, position=str(path)) as consumer:
            await client.publish_many("ticks", [str(number) for number in range(5)])
            for one in await fetch(consumer, 3):
                await one.ack()
        number = (await client.topic("ticks")).number
        stored = {"group": "prices", "positions": {"ticks": 3}, "numbers": {"ticks": number}}
        assert json.loads(path.read_bytes()) == stored
        async with broadcast(client, position=path) as consumer:
            assert await texts(consumer, 2) == ["3", "4"]
        assert names_in(tmp_path) == ["position.json"]


async def test_a_position_is_stored_while_the_member_is_at_work(tmp_path: Path) -> None:
    path = tmp_path / "position.json"
    async with calling() as (client, _, _), broadcast(client, position=path) as consumer:
        await client.publish_many("ticks", ["a", "b"])
        for one in await fetch(consumer, 2):
            await one.ack()
        await until(lambda: path.exists() and offsets_in(path) == {"ticks": 2})


async def test_a_position_whose_answer_was_lost_is_stored_again() -> None:
    async with calling() as (client, cable, commit):
        consumer = broadcast(client, member="a")
        await consumer.join()
        await client.publish_many("ticks", ["1", "2"])
        one, two = await fetch(consumer, 2)
        await one.ack()
        following = consumer._following
        assert following is not None
        await until(lambda: following._storing is None)
        commit.is_holding = True
        following._store()
        await turns()
        assert following._storing is not None
        cable.cut()
        await until(lambda: following._storing is None)
        commit.release()
        await two.ack()
        await client._keeper().connected(timeout_s=PATIENCE_S)
        taking = asyncio.ensure_future(consumer.take())
        await until(lambda: consumer.is_joined)
        await consumer.aclose()
        assert await taking == []
        (position,) = (await client.group("prices")).positions
        assert (position.member, position.topic, position.offset) == ("a", "ticks", 2)


async def test_a_named_member_that_died_before_its_first_ack_misses_nothing() -> None:
    async with calling() as (client, cable, _):
        consumer = broadcast(client, member="north")
        await consumer.join()
        await until(lambda: "north" in cable.broker.consuming.find("prices").positions)
        cable.cut()
        await client.publish("ticks", "while it was dead")
        async with broadcast(client, member="north") as again:
            assert await texts(again, 1) == ["while it was dead"]
        await consumer.aclose()


async def test_where_members_of_a_broadcast_are_can_be_asked_also_of_those_that_are_away(
    tmp_path: Path,
) -> None:
    async with calling() as (client, cable, _):
        await client.publish("ticks", "before all")
        async with broadcast(client, member="north") as north:
            await client.publish_many("ticks", ["1", "2"])
            for one in await fetch(north, 2):
                await one.ack()
        path = tmp_path / "position.json"
        await client.publish_many("ticks", ["3", "4", "5"])
        async with (
            broadcast(client, member="south"),
            broadcast(client, member="with-file", position=path),
            broadcast(client) as nameless,
        ):
            await until(lambda: "south" in cable.broker.consuming.find("prices").positions)
            group = await client.group("prices")
            told = [
                (one.member, one.offset, one.end, one.backlog, one.connected)
                for one in group.positions
            ]
            assert told == [
                ("north", 3, 6, 3, False),
                ("south", 6, 6, 0, True),
                *sorted([
                    (nameless.member, None, 6, None, True),
                    ("with-file", None, 6, None, True),
                ]),
            ]  # fmt: skip
            assert [one.is_known for one in group.positions] == [True, True, False, False]
            assert {one.topic for one in group.positions} == {"ticks"}
            assert group.backlog == 3, "of the member that is farthest behind"
            assert group.oldest_at_ms == group.positions[0].oldest_at_ms > 0
            assert [one.oldest_at_ms for one in group.positions[1:]] == [0, 0, 0]
            assert await client.groups() == [group]


async def renewed_topic(client: Client, bodies: list[str]) -> None:
    """Let the topic end, and another get its name."""
    await client.delete_topic("ticks")
    await client.publish_many("ticks", bodies)


@pytest.mark.parametrize(("start", "first"), [("latest", "new"), ("earliest", "0")])
async def test_in_a_topic_that_got_the_name_of_its_own_a_member_begins_like_a_new_one(
    tmp_path: Path, start: str, first: str
) -> None:
    for options in ({"member": "north"}, {"position": tmp_path / f"{start}.json"}):
        async with calling() as (client, _, _):
            await client.publish_many("ticks", ["a", "b", "c"])
            async with broadcast(client, start=start, **options):
                pass
            async with broadcast(client, **options) as consumer:
                await client.publish("ticks", "d")
                for one in await fetch(consumer, 1 if start == "latest" else 4):
                    await one.ack()
            await renewed_topic(client, [str(number) for number in range(9)])
            async with broadcast(client, **options) as consumer:
                await client.publish("ticks", "new")
                assert (await texts(consumer, 1))[0] == first


async def test_a_lost_connection_does_not_lead_into_the_middle_of_another_topic(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with calling() as (client, cable, _):
        consumer = broadcast(client, member="north")
        await consumer.join()
        await client.publish_many("ticks", ["a", "b"])
        old_one, old_two = await fetch(consumer, 2)
        await old_one.ack()
        cable.cut()
        await turns()
        await renewed_topic(client, [str(number) for number in range(9)])
        taking = asyncio.ensure_future(consumer.take())
        await until(lambda: consumer.is_joined)
        await client.publish("ticks", "new")
        (new,) = await asyncio.wait_for(taking, PATIENCE_S)
        assert (new.text, new.offset) == ("new", 9)
        await old_two.ack()
        following = consumer._following
        assert following is not None
        assert following.positions["ticks"].offset == 9, "of the old topic: it moves nothing here"
        await new.ack()
        await consumer.aclose()
        assert "another has its name: topic=ticks group=prices member=north was_at=1" in caplog.text


async def test_a_position_file_of_an_older_version_is_taken_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "position.json"
    path.write_text('{"group": "prices", "positions": {"ticks": 2}}')
    async with calling() as (client, _, _):
        await client.publish_many("ticks", ["a", "b", "c"])
        async with broadcast(client, position=path) as consumer:
            assert await texts(consumer, 1) == ["c"]


async def test_a_position_that_a_topic_does_not_have_leads_back_into_it(tmp_path: Path) -> None:
    path = tmp_path / "position.json"
    path.write_text('{"group": "prices", "positions": {"ticks": 1000}}')
    async with calling() as (client, _, _):
        await client.publish_many("ticks", ["a", "b"])
        async with broadcast(client, position=path) as consumer:
            assert await texts(consumer, 2) == ["a", "b"]


async def test_a_position_file_that_is_not_ours_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "position.json"
    async with calling() as (client, _, _):
        path.write_text('{"group": "other", "positions": {}}')
        with pytest.raises(Conflict, match="belongs to group 'other'"):
            await broadcast(client, position=path).join()
        for garbage in ("", "{", '{"group": "prices", "positions": []}', "\udcff"):
            path.write_text(garbage, errors="surrogateescape")
            with pytest.raises(Corruption, match="remove it to begin anew"):
                await broadcast(client, position=path).join()
        with pytest.raises(InvalidRequest, match="cannot be read"):
            await broadcast(client, position=tmp_path).join()


async def test_a_retry_in_a_broadcast_comes_again_to_this_member_alone() -> None:
    async with calling() as (client, _, _):
        async with broadcast(client, member="a") as first, broadcast(client, member="b") as second:
            await client.publish_many("ticks", ["1", "2"])
            one, two = await fetch(first, 2)
            await one.retry(after=0)
            await two.ack()
            (again,) = await fetch(first, 1)
            assert (again.text, again.attempt) == ("1", 2)
            await again.release()
            (again,) = await fetch(first, 1)
            assert (again.text, again.attempt) == ("1", 2)
            await again.renew()
            assert await texts(second, 2) == ["1", "2"]
            assert await second.fetch(1, wait="1ms") == []
        async with broadcast(client, member="a") as first:
            assert await texts(first, 2) == ["1", "2"], "nothing before it was done"


async def test_a_reject_in_a_broadcast_is_said_in_the_log_and_the_member_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with calling() as (client, _, _):
        with caplog.at_level(logging.WARNING, "onward.consumer"):
            async with broadcast(client, member="a", retry="fixed:0s:2") as consumer:
                await client.publish_many("ticks", ["1", "2"])
                one, two = await fetch(consumer, 2)
                await one.reject("not a price")
                await two.retry()
                (two,) = await fetch(consumer, 1)
                await two.retry(cause="tried twice")
        assert "cause=not a price" in caplog.text
        assert "attempt=2 cause=tried twice" in caplog.text
        async with broadcast(client, member="a") as consumer:
            await client.publish("ticks", "3")
            assert await texts(consumer, 1) == ["3"]


async def test_a_broadcast_is_filtered_by_tags_and_headers() -> None:
    async with calling() as (client, _, _):
        async with broadcast(client, member="a", tags=["eu", "us"]) as consumer:
            await client.publish_many("ticks", ["1", "2", "3"], tags=["eu", None, "asia"])
            await client.publish_many("ticks", ["4", "5"])
            await client.publish("ticks", "6", tag=["us", "x"])
            found = await fetch(consumer, 2)
            assert [one.text for one in found] == ["1", "6"]
            assert [one.tag for one in found] == ["eu", "us,x"]
            await asyncio.gather(*[one.ack() for one in found])
        async with broadcast(client, member="a", tags=["eu", "us"]) as consumer:
            await client.publish("ticks", "7", tag="eu")
            assert await texts(consumer, 1) == ["7"]


async def test_a_member_that_says_nothing_of_the_filter_joins_the_broadcast_as_it_is() -> None:
    async with calling() as (client, _, _):
        await client.create_topic("ticks")
        await client.create_group("prices", "ticks", mode="broadcast", tags="eu")
        async with client.consume("ticks", group="prices") as consumer:
            await client.publish_many("ticks", ["1", "2", "3"], tags=["us", "eu", None])
            assert await texts(consumer, 1) == ["2"]


async def test_a_broadcast_cannot_be_paused_and_its_members_can_be_taken_out() -> None:
    async with calling() as (client, _, _):
        consumer = broadcast(client, member="north")
        await consumer.join()
        with pytest.raises(InvalidRequest, match="members read by themselves; stop them, or take"):
            await client.pause_group("prices")
        with pytest.raises(InvalidRequest, match="cannot be paused or resumed"):
            await client.resume_group("prices")
        assert not (await client.group("prices")).paused
        await client.set_member("prices", "north", offline=True)
        with pytest.raises(Conflict, match="taken offline"):
            await consumer.fetch(1, wait="10s")


async def test_members_of_a_broadcast_follow_a_filter_that_is_changed() -> None:
    async with (
        calling() as (client, _, _),
        broadcast(client, member="north") as north,
        broadcast(client) as nameless,
    ):
        await client.publish("ticks", "before", tag="a")
        for consumer in (north, nameless):
            assert await texts(consumer, 1) == ["before"]
        await client.change_group("prices", tags="b")
        await client.publish_many("ticks", ["left out", "wanted"], tags=["a", "b"])
        for consumer in (north, nameless):
            assert await texts(consumer, 1) == ["wanted"]
        await client.change_group("prices", tags=[])
        await client.publish_many("ticks", ["a again", "b again"], tags=["a", "b"])
        for consumer in (north, nameless):
            assert await texts(consumer, 2) == ["a again", "b again"]
        assert north.member == "north"


async def test_members_of_a_broadcast_follow_a_retry_policy_that_is_changed() -> None:
    async with calling() as (client, _, _), broadcast(client) as consumer:
        assert consumer.retry_limit == 17
        await client.change_group("prices", retry="fixed:0s:2")
        await client.publish("ticks", "1")
        for attempt in (1, 2):
            (one,) = await fetch(consumer, 1)
            assert one.attempt == attempt
            await one.retry()
        await client.publish("ticks", "2")
        assert await texts(consumer, 1) == ["2"], "the first is out of attempts"
        assert consumer.retry_limit == 2


async def test_a_member_of_a_broadcast_that_was_away_takes_a_new_filter_over() -> None:
    async with calling() as (client, cable, _), broadcast(client, member="north") as consumer:
        cable.cut()
        await turns()
        await client.change_group("prices", tags="b")
        cable.cut()
        await turns()
        await client.publish_many("ticks", ["after", "wanted"], tags=["a", "b"])
        assert await texts(consumer, 1) == ["wanted"]


async def test_a_broadcast_gives_batches_and_single_messages() -> None:
    async with calling() as (client, _, _):
        await client.publish_many("ticks", ["1", "2", "3"])
        found: list[bytes] = []
        async with asyncio.timeout(PATIENCE_S):
            async for batch in broadcast(client, start="earliest").batches():
                found += batch.bodies
                await batch.ack()
                if len(found) == 3:
                    break
        assert found == [b"1", b"2", b"3"]
        assert [one.offset for one in await collect(broadcast(client, member="x"), 3)] == [0, 1, 2]


async def test_more_than_the_buffer_of_a_broadcast_comes_bit_by_bit() -> None:
    async with calling() as (client, cable, _):
        for _ in range(40):
            await client.publish("ticks", bytes(1_000_000))
        consumer = broadcast(client, start="earliest")
        found: list[Delivery] = await fetch(consumer, 1)
        await turns(300)
        assert cable.broker.delivering.delivered_bytes < 24_000_000
        while len(found) < 40:
            found += await fetch(consumer, 1)
        assert [one.offset for one in found] == list(range(40))
        await consumer.aclose()


async def test_a_broadcast_of_several_topics_ends_with_the_last_of_them() -> None:
    async with calling() as (client, _, _):
        for topic in ("a", "b"):
            await client.create_topic(topic)
        consumer = client.consume(["a", "b"], group="g", mode="broadcast")
        await consumer.join()
        await client.publish("a", "1")
        await client.publish("b", "2")
        assert sorted(await texts(consumer, 2)) == ["1", "2"]
        await client.delete_topic("a")
        await client.publish("b", "3")
        assert await texts(consumer, 1) == ["3"]
        taking = asyncio.ensure_future(consumer.take())
        await client.delete_topic("b")
        with pytest.raises(TopicEnded):
            await asyncio.wait_for(taking, PATIENCE_S)
        await consumer.aclose()


async def test_a_broadcast_that_was_stopped_or_closed_hands_out_nothing_more() -> None:
    for verb in ("stop", "aclose"):
        async with calling() as (client, _, _):
            consumer = client.consume("orders", group=verb, mode="broadcast")
            await consumer.join()
            seen: list[int] = []
            deliveries = aiter(consumer)
            await client.publish("orders", "x")
            seen.append((await anext(deliveries)).offset)
            for _ in range(5):
                await client.publish("orders", "x")
            await asyncio.sleep(0.01)
            if verb == "stop":
                consumer.stop()
            else:
                await consumer.aclose()
            async with asyncio.timeout(PATIENCE_S):
                seen += [one.offset async for one in deliveries]
            assert seen == [0]
            await consumer.aclose()


async def test_a_broadcast_that_stops_can_still_finish_what_it_has() -> None:
    async with calling() as (client, _, _):
        consumer = broadcast(client, member="a")
        await consumer.join()
        await client.publish_many("ticks", ["1", "2", "3"])
        found = []
        async with asyncio.timeout(PATIENCE_S):
            async for one in consumer:
                found.append(one)
                consumer.stop()
        assert [one.text for one in found] == ["1"]
        await found[0].ack()
        await consumer.aclose()
        async with broadcast(client, member="a") as consumer:
            assert await texts(consumer, 2) == ["2", "3"]


async def test_a_topic_that_cannot_be_read_for_a_while_is_read_on_where_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "place.json"
    async with calling() as (client, cable, _):
        for topic in ("ticks", "news"):
            await client.publish(topic, "before")
        consumer = client.consume(
            ["ticks", "news"], group="prices", mode="broadcast", position=str(path)
        )
        await consumer.join()
        await client.publish("news", "1")
        (first,) = await fetch(consumer, 1)
        await first.ack()
        await client.change_topic("news", rule="write-only")
        await until(lambda: "topic is read no more: topic=news" in caplog.text)
        await client.publish("news", "2")
        await client.change_topic("news", rule="read-write")
        cable.cut()
        await client.publish("news", "3")
        assert await texts(consumer, 2) == ["2", "3"]
        await consumer.aclose()
    assert offsets_in(path) == {"ticks": 1, "news": 2}  # the last two were not acked


async def test_a_position_file_keeps_what_is_not_read_this_time(tmp_path: Path) -> None:
    path = tmp_path / "place.json"

    def member(client: Client, *topics: str) -> Consumer:
        return client.consume(topics, group="prices", mode="broadcast", position=str(path))

    async with calling() as (client, _, _):
        for topic in ("ticks", "news"):
            await client.publish(topic, "before")
        async with member(client, "ticks", "news"):
            await turns()
        async with member(client, "ticks"):
            await turns()
        assert offsets_in(path) == {"ticks": 1, "news": 1}
        await client.publish("news", "while it was away")
        async with member(client, "ticks", "news") as consumer:
            assert await texts(consumer, 1) == ["while it was away"]


async def test_what_was_to_be_read_again_of_a_topic_that_ended_harms_nobody() -> None:
    async with calling() as (client, cable, _):
        await client.publish("ticks", "old")
        async with broadcast(client, member="m") as consumer:
            following = consumer._following
            assert following is not None
            assert following._link is not None
            stream = following._streams["ticks"]
            following._link.forget(stream.request_id)
            following._ended(stream, Overloaded("busy", retry_after_ms=300))
            cable.cut()
            await turns()
            await client.delete_topic("ticks")
            await client.publish("ticks", "before")
            taking = asyncio.ensure_future(texts(consumer, 1))
            await until(lambda: following._streams["ticks"] is not stream)
            await until(lambda: not following._timers)
            await turns()
            await client.publish("ticks", "new")
            assert await taking == ["new"]
