"""Promises of consuming in groups."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from onward import Client, Conflict, Delivery, connect
from onward.client.consumer import Consumer
from onward.errors import AlreadyExists, LeaseLost, UnknownGroup

from .engines import BOTH, KEPT, Engine

PATIENCE_S = 60


async def take(consumer: Consumer, count: int) -> list[Delivery]:
    """Take exactly so many messages."""
    found: list[Delivery] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(found) < count:
            found += await consumer.fetch(count - len(found), wait="30s")
    return found


async def finish(client: Client, count: int, *, group: str, topics: str = "orders") -> list[str]:
    """Take and ack so many messages as a new member; return their texts."""
    found: list[str] = []
    async with asyncio.timeout(PATIENCE_S):
        async for delivery in client.consume(topics, group=group):
            found.append(delivery.text)
            await delivery.ack()
            if len(found) == count:
                break
    return found


async def publish(client: Client, count: int) -> list[str]:
    texts = [str(number) for number in range(count)]
    await client.publish_many("orders", texts)
    return texts


@BOTH
async def test_any_number_of_members_share_a_topic_and_each_message_goes_to_one(
    engine: Engine,
) -> None:
    async with engine.connect() as mq:
        seen: Counter[int] = Counter()
        everything = asyncio.Event()

        async def work(member: Consumer) -> None:
            async for delivery in member:
                seen[delivery.offset] += 1
                await delivery.ack()
                if len(seen) == 500:
                    everything.set()

        members = [mq.consume("orders", group="billing") for _ in range(8)]
        working = asyncio.gather(*[work(member) for member in members])
        await publish(mq, 500)
        await asyncio.wait_for(everything.wait(), PATIENCE_S)
        for member in members:
            member.stop()
        await asyncio.wait_for(working, PATIENCE_S)
        assert set(seen) == set(range(500))
        assert set(seen.values()) == {1}
        assert (await mq.group("billing")).backlog == 0


@BOTH
async def test_a_topic_has_any_number_of_groups_that_know_nothing_of_each_other(
    engine: Engine,
) -> None:
    async with engine.connect() as mq:
        texts = await publish(mq, 20)
        for group in ("billing", "audit", "search"):
            assert await finish(mq, 20, group=group) == texts


@KEPT
async def test_what_was_acked_never_comes_again_not_even_after_a_restart(engine: Engine) -> None:
    async with engine.connect() as mq:
        await publish(mq, 10)
        async with mq.consume("orders", group="billing") as consumer:
            found = await take(consumer, 10)
            await asyncio.gather(*[found[n].ack() for n in (0, 1, 2, 5, 9)])
    async with engine.connect() as mq, mq.consume("orders", group="billing") as consumer:
        again = await take(consumer, 5)
        assert [one.offset for one in again] == [3, 4, 6, 7, 8]
        assert await consumer.fetch(1, wait="1ms") == []


@KEPT
async def test_attempts_retries_and_dead_letters_survive_a_restart(engine: Engine) -> None:
    async with engine.connect() as mq:
        await publish(mq, 3)
        async with mq.consume("orders", group="billing", retry="fixed:0s:3") as consumer:
            a, b, c = await take(consumer, 3)
            await asyncio.gather(a.retry(cause="busy"), b.reject("wrong"), c.retry(after="1h"))
    async with engine.connect() as mq, mq.consume("orders", group="billing") as consumer:
        (again,) = await take(consumer, 1)
        assert (again.offset, again.attempt) == (0, 2)
        await again.ack()
        group = await mq.group("billing")
        assert (group.backlog, group.dead, group.topics[0].waiting) == (1, 1, 1)
        (dead,) = [one async for one in mq.dead_letters("billing")]
        assert (dead.offset, dead.cause, dead.attempts) == (1, "wrong", 1)


@BOTH
async def test_a_message_that_always_fails_is_a_dead_letter_after_exactly_its_attempts(
    engine: Engine,
) -> None:
    async with engine.connect() as mq:
        await publish(mq, 2)
        attempts: list[int] = []
        async with mq.consume("orders", group="billing", retry="fixed:0s:4") as consumer:
            while len(attempts) < 4:
                for one in await take(consumer, 1):
                    if one.offset:
                        await one.ack()
                    else:
                        attempts.append(one.attempt)
                        await one.retry(cause=f"failed {one.attempt}")
            assert await consumer.fetch(1, wait="1ms") == []
        assert attempts == [1, 2, 3, 4]
        (dead,) = [one async for one in mq.dead_letters("billing")]
        assert (dead.offset, dead.attempts, dead.cause) == (0, 4, "failed 4")


@BOTH
async def test_what_a_member_leaves_behind_comes_to_others_at_once_and_counts_as_nothing(
    engine: Engine,
) -> None:
    async with engine.connect() as mq:
        await publish(mq, 5)
        async with mq.consume("orders", group="billing") as first:
            held = await take(first, 5)
            await held[0].ack()
        async with mq.consume("orders", group="billing") as second:
            again = await take(second, 4)
            assert [(one.offset, one.attempt) for one in again] == [(n, 1) for n in range(1, 5)]
        with pytest.raises(LeaseLost):
            await held[1].ack()


@BOTH
@pytest.mark.parametrize("taking", ["deliveries", "batches", "fetch"])
async def test_at_most_once_a_member_that_leaves_loses_nothing(engine: Engine, taking: str) -> None:
    async with engine.connect() as mq:
        texts = await publish(mq, 100)
        found: list[str] = []
        async with (
            asyncio.timeout(PATIENCE_S),
            mq.consume("orders", group="billing", at_most_once=True) as leaving,
        ):
            if taking == "fetch":
                found += [one.text for one in await leaving.fetch(5, wait="30s")]
            elif taking == "batches":
                async for batch in leaving.batches():
                    found += [body.decode() for body in batch.bodies]
                    if len(found) > 5:
                        break
            else:
                async for delivery in leaving:
                    found.append(delivery.text)
                    break
        async with mq.consume("orders", group="billing") as other:
            found += [one.text for one in await take(other, 100 - len(found))]
        assert sorted(found, key=int) == texts


@BOTH
async def test_the_answer_of_someone_who_no_longer_holds_a_message_changes_nothing(
    engine: Engine,
) -> None:
    async with engine.connect() as mq:
        await publish(mq, 1)
        async with mq.consume("orders", group="billing", member="ann") as first:
            (old,) = await take(first, 1)
            # The name is taken over: what it held is not its own any more.
            async with mq.consume("orders", group="billing", member="ann") as second:
                (new,) = await take(second, 1)
                assert new.attempt == 2
                for verb in (old.ack, old.retry, old.reject):
                    with pytest.raises(LeaseLost):
                        await verb()
                await new.ack()
        assert (await mq.group("billing")).dead == 0


@BOTH
async def test_a_group_begins_where_its_first_member_says(engine: Engine) -> None:
    async with engine.connect() as mq:
        await publish(mq, 10)
        starts = {"earliest": 0, "latest": 10, 7: 7, "10m": 0}
        for number, (start, first) in enumerate(starts.items()):
            async with mq.consume("orders", group=f"g{number}", start=start):
                (share,) = (await mq.group(f"g{number}")).topics
                assert share.cursor == first


@BOTH
async def test_only_one_member_of_an_exclusive_group_works_and_the_next_takes_over(
    engine: Engine,
) -> None:
    async with engine.connect() as mq:
        await publish(mq, 4)
        first = mq.consume("orders", group="billing", mode="exclusive")
        held = await take(first, 2)
        async with mq.consume("orders", group="billing") as second:
            assert await second.fetch(4, wait="1ms") == []
            with pytest.raises(AlreadyExists):
                await mq.consume("orders", group="billing", refuse=True).join()
            await held[0].ack()
            await first.aclose()
            assert [one.offset for one in await take(second, 3)] == [1, 2, 3]


@BOTH
async def test_an_ordered_group_has_one_message_of_a_key_in_flight(engine: Engine) -> None:
    async with engine.connect() as mq:
        keys = ["a", "b", "a", "b", "a"]
        await mq.publish_many("orders", ["0", "1", "2", "3", "4"], keys=keys)
        async with mq.consume("orders", group="billing", mode="ordered") as consumer:
            found = await take(consumer, 2)
            assert sorted(one.offset for one in found) == [0, 1]
            assert await consumer.fetch(5, wait="1ms") == []
            for offset in (0, 2, 4):
                (one,) = [one for one in found if one.offset == offset]
                found.remove(one)
                await one.ack()
                if offset < 4:
                    found += await take(consumer, 1)


@BOTH
async def test_a_group_gets_only_what_its_filter_wants(engine: Engine) -> None:
    async with engine.connect() as mq:
        await mq.publish_many("orders", ["0", "1", "2", "3"], tags=["eu,vip", "eu", "us,vip", None])
        async with mq.consume("orders", group="any", tags=["eu", "us"]) as consumer:
            assert [one.text for one in await take(consumer, 3)] == ["0", "1", "2"]
        async with mq.consume("orders", group="all", all_tags=["eu", "vip"]) as consumer:
            assert [one.text for one in await take(consumer, 1)] == ["0"]
            assert await consumer.fetch(1, wait="1ms") == []


@BOTH
async def test_every_member_of_a_broadcast_gets_everything(engine: Engine) -> None:
    async with engine.connect() as mq:
        members = [mq.consume("ticks", group="prices", mode="broadcast") for _ in range(3)]
        for member in members:
            await member.join()
        await mq.publish_many("ticks", ["1", "2"])
        for member in members:
            assert [one.text for one in await take(member, 2)] == ["1", "2"]


@KEPT
async def test_a_member_of_a_broadcast_goes_on_where_it_was_after_a_restart(
    engine: Engine, tmp_path: Path
) -> None:
    kept = ({"member": "screen"}, {"position": str(tmp_path / "position.json")})
    async with engine.connect() as mq:
        for number, options in enumerate(kept):
            group = f"prices{number}"
            async with mq.consume("ticks", group=group, mode="broadcast", **options) as consumer:
                await mq.publish_many("ticks", ["1", "2", "3"])
                first, *_ = await take(consumer, 3)
                await first.ack()
    async with engine.connect() as mq:
        for number, options in enumerate(kept):
            async with mq.consume("ticks", group=f"prices{number}", **options) as consumer:
                assert [one.text for one in await take(consumer, 2)] == ["2", "3"]


@BOTH
async def test_a_paused_group_gets_nothing_until_it_is_resumed(engine: Engine) -> None:
    async with engine.connect() as mq, mq.consume("orders", group="billing") as consumer:
        await mq.pause_group("billing")
        await publish(mq, 2)
        assert await consumer.fetch(2, wait="10ms") == []
        await mq.resume_group("billing")
        assert len(await take(consumer, 2)) == 2


@BOTH
async def test_a_member_is_told_when_its_group_is_no_more(engine: Engine) -> None:
    async with engine.connect() as mq:
        consumer = mq.consume("orders", group="billing")
        await consumer.join()
        taking = asyncio.ensure_future(consumer.take())
        await mq.delete_group("billing")
        with pytest.raises(UnknownGroup):
            await asyncio.wait_for(taking, PATIENCE_S)


@BOTH
async def test_a_group_is_what_it_was_made_whoever_joins(engine: Engine) -> None:
    async with engine.connect() as mq, mq.consume("orders", group="billing", lease="60s"):
        with pytest.raises(Conflict, match="lease 1m, not 10s"):
            await mq.consume("orders", group="billing", lease="10s").join()
        async with mq.consume("orders", group="billing") as second:
            assert second.lease_ms == 60_000


async def test_members_of_two_clients_share_a_group() -> None:
    async with connect("memory:shared") as one, connect("memory:shared") as other:
        await publish(one, 10)
        async with one.consume("orders", group="billing") as first:
            held = await take(first, 4)
            async with other.consume("orders", group="billing") as second:
                rest = await take(second, 6)
                assert {m.offset for m in held} | {m.offset for m in rest} == set(range(10))
