"""At most once: what is delivered is finished, so nothing is delivered that nobody takes."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from onward import App, Client, Delivery
from onward.client.consumer import Consumer
from onward.errors import LeaseLost

from .calling import Cable, calling
from .consuming import PATIENCE_S, fetch, members, until


def sparing(client: Client, *topics: str, credit: int | None = None) -> Consumer:
    return client.consume(topics or "orders", group="g", at_most_once=True, credit=credit)


def credit_of(cable: Cable) -> int:
    (member,) = members(cable)
    return member.credit


async def left(client: Client) -> int:
    """Return how many messages of the group are not finished."""
    return (await client.group("g")).backlog


async def publish(client: Client, count: int) -> None:
    await client.publish_many("orders", [b"%d" % number for number in range(count)])


@asynccontextmanager
async def another(cable: Cable) -> AsyncIterator[Client]:
    """Give a client with a connection of its own."""
    client = Client([], token=None, name="other", timeout_s=5, durability=255, dials=[cable.dial])
    await client.open()
    try:
        yield client
    finally:
        await client.close()


@contextmanager
def deaf(client: Client) -> Iterator[None]:
    """Let nothing arrive at a client that is sent to it: it is on its way."""
    link = client._keeper().link
    assert link is not None
    transport = link._transport
    assert transport is not None
    transport.pause_reading()
    try:
        yield
    finally:
        transport.resume_reading()


async def take_all(consumer: Consumer, taking: str) -> list[int]:
    """Return what comes until the end."""
    if taking == "fetch":
        return [one.offset for one in await consumer.fetch(1, wait="60s")]
    if taking == "batches":
        return [offset async for batch in consumer.batches() for offset in batch.offsets]
    return [delivery.offset async for delivery in consumer]


async def test_who_leaves_the_loop_loses_nothing() -> None:
    async with calling() as (client, cable, _):
        await publish(client, 100)
        found: list[int] = []
        for count in (1, 2, 97):
            taken = 0
            async with asyncio.timeout(PATIENCE_S):
                async for delivery in (consumer := sparing(client, credit=50)):
                    found.append(delivery.offset)
                    assert credit_of(cable) == 0, "nothing is asked for while nobody waits"
                    taken += 1
                    if taken == count:
                        break
            await consumer.aclose()
            assert await left(client) == 100 - len(found)
        assert found == list(range(100))


async def test_a_batch_that_was_filled_leaves_nothing_behind() -> None:
    async with calling() as (client, cable, _):
        await publish(client, 100)
        counts: list[int] = []
        async with asyncio.timeout(PATIENCE_S):
            async for batch in (consumer := sparing(client, credit=20)).batches():
                counts.append(batch.count)
                assert credit_of(cable) == 0
                assert await left(client) == 100 - sum(counts)
                if len(counts) == 6:
                    break
        await consumer.aclose()
        assert counts == [1, 2, 4, 8, 16, 20]
        async with sparing(client) as consumer:
            assert len(await fetch(consumer, 49)) == 49


async def test_a_batch_that_was_not_filled_makes_the_next_one_small() -> None:
    async with calling() as (client, cable, _):
        await publish(client, 6)
        batches = (consumer := sparing(client)).batches()
        async with asyncio.timeout(PATIENCE_S):
            assert [(await anext(batches)).count for _ in range(3)] == [1, 2, 3]
            waiting = asyncio.ensure_future(anext(batches))
            await until(lambda: credit_of(cable) == 1)
            await publish(client, 1)
            assert (await waiting).count == 1
        await batches.aclose()
        await consumer.aclose()


async def test_a_fetch_asks_for_exactly_what_it_returns_at_most() -> None:
    async with calling() as (client, cable, _):
        await publish(client, 100)
        async with sparing(client) as consumer:
            assert credit_of(cable) == 0
            assert len(await fetch(consumer, 7)) == 7
            assert credit_of(cable) == 0
            assert await left(client) == 93
            taken = await asyncio.gather(*[fetch(consumer, n) for n in (3, 5, 10)])
            assert sorted(one.offset for part in taken for one in part) == list(range(7, 25))
        assert await left(client) == 75


async def test_a_fetch_that_got_less_or_nothing_takes_the_rest_of_its_credit_back() -> None:
    async with calling() as (client, cable, _):
        await publish(client, 2)
        async with sparing(client) as consumer:
            assert len(await fetch(consumer, 2)) == 2
            assert await consumer.fetch(10, wait="1ms") == []
            await until(lambda: credit_of(cable) == 0)
            await publish(client, 3)
            assert await left(client) == 3
            assert len(await fetch(consumer, 3)) == 3


async def test_nothing_is_taken_before_somebody_asks_and_not_by_joining_again() -> None:
    async with calling() as (client, cable, _), sparing(client, credit=50) as consumer:
        waiting = asyncio.ensure_future(consumer.take())
        await until(lambda: credit_of(cable) == 1)
        (before,) = members(cable)
        cable.cut()
        await until(lambda: [one.credit for one in members(cable) if one is not before] == [1])
        await publish(client, 10)
        assert [one.offset for one in await waiting] == [0]
        cable.cut()
        await until(lambda: not consumer.is_joined)
        await consumer.join()
        assert credit_of(cable) == 0
        assert await left(client) == 9


@pytest.mark.parametrize("how", ["stop", "aclose"])
@pytest.mark.parametrize("taking", ["one by one", "batches", "fetch"])
async def test_what_is_on_its_way_at_the_end_is_handed_out(
    how: str, taking: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with calling() as (client, cable, _), another(cable) as other:
        consumer = sparing(other)
        found = asyncio.ensure_future(take_all(consumer, taking))
        await until(lambda: bool(members(cable)) and credit_of(cable) == 1)
        with deaf(other):
            await publish(client, 1)
            (member,) = members(cable)
            await until(lambda: member.delivered == 1)
            if how == "stop":
                consumer.stop()
                leaving = asyncio.ensure_future(asyncio.sleep(0))
            else:
                leaving = asyncio.ensure_future(consumer.aclose())
            await until(lambda: not members(cable))
        assert await asyncio.wait_for(found, PATIENCE_S) == [0]
        await leaving
        await consumer.aclose()
        assert not caplog.records


async def test_what_came_when_nobody_waited_is_kept_over_a_lost_connection_and_said_at_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with calling() as (client, cable, commit), sparing(client) as consumer:
        await publish(client, 2)
        commit.is_holding = True
        waiting = asyncio.ensure_future(consumer.fetch(2, wait="60s"))
        (member,) = members(cable)
        leases = cable.broker.consuming.leases_of("g")
        await until(lambda: bool(commit._held) and not leases.count and not member.credit)
        waiting.cancel()
        await asyncio.wait([waiting])
        commit.release()
        await until(lambda: consumer._membership.has_received)
        cable.pull()
        await until(lambda: not consumer.is_joined)
        (one,) = await consumer.fetch(1)
        assert (one.offset, one.is_lost) == (0, False)
        with pytest.raises(LeaseLost, match="at most once"):
            await one.retry()
        with caplog.at_level(logging.WARNING, "onward.consumer"):
            await consumer.aclose()
            await consumer.aclose()
        assert caplog.text.count("1 messages came when nobody waited") == 1


async def test_a_group_that_is_changed_under_its_members_is_followed() -> None:
    async with calling() as (client, cable, _):
        await publish(client, 1)
        deliveries = aiter(consumer := client.consume("orders", group="g", retry="none"))
        await (await anext(deliveries)).ack()
        assert credit_of(cable) > 0
        await client.change_group("g", at_most_once=True)
        await client.publish("orders", b"at most once")
        second = await anext(deliveries)
        await second.ack()
        assert consumer.at_most_once
        await until(lambda: credit_of(cable) == 0)
        await publish(client, 10)
        assert await left(client) == 10
        await client.change_group("g", at_most_once=False)
        third = await anext(deliveries)
        await third.ack()
        assert not consumer.at_most_once
        await until(lambda: credit_of(cable) > 0)
        await consumer.aclose()


async def test_an_app_that_stops_calls_with_what_it_has_collected() -> None:
    app, got, may_end = App(), [], asyncio.Event()

    @app.consumer("orders", group="g", at_most_once=True, batch=10)
    async def count(deliveries: list[Delivery]) -> None:
        got.append([one.offset for one in deliveries])
        await may_end.wait()

    async with calling() as (client, _, _), app.running(client) as run:
        await publish(client, 100)
        running = asyncio.ensure_future(run.run())
        async with asyncio.timeout(PATIENCE_S):
            while not got or await left(client) > 90 - len(got[0]):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            run.stop()
            may_end.set()
            await running
        assert [len(one) for one in got[1:]] == [10]
        assert [offset for part in got for offset in part] == list(range(len(got[0]) + 10))
