"""What waits unstarted at a busy member goes to one that is idle, and counts as no attempt."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator

import pytest

from onward import App, Delivery
from onward.broker.recalls import WAITED_MS_MIN
from onward.client.consumer import Consumer
from onward.protocol.deliveries import recall_frame

from .calling import Cable, calling, turns
from .consuming import PATIENCE_S, fetch, until


async def ask_back(cable: Cable, count: int) -> None:
    """Let the broker ask all members for messages."""
    for member in cable.broker.consuming.members_of("g"):
        member.session.write(recall_frame(member.consumer_id, count))
    await turns()


def leased(cable: Cable) -> int:
    return cable.broker.consuming.leases_of("g").count


async def next_of(deliveries: AsyncIterator[Delivery]) -> Delivery:
    async with asyncio.timeout(PATIENCE_S):
        return await anext(deliveries)


async def test_a_member_that_comes_later_gets_its_part_of_what_waits() -> None:
    async with calling() as (client, _, _):
        await client.publish_many("orders", [b"x"] * 6)
        busy = aiter(client.consume("orders", group="g", credit=8))
        working_on = await next_of(busy)
        async with client.consume("orders", group="g") as idle:
            got = await fetch(idle, 3)
            assert [(one.offset, one.attempt) for one in got] == [(3, 1), (4, 1), (5, 1)]
            await asyncio.gather(*[one.ack() for one in (working_on, *got)])
            assert [(await next_of(busy)).offset for _ in range(2)] == [1, 2]
        await busy.aclose()


async def test_batches_that_nobody_has_opened_are_shared() -> None:
    async with calling() as (client, cable, _):
        await client.publish_many("orders", [b"x"] * 10)
        busy = client.consume("orders", group="g").batches()
        first = await asyncio.wait_for(anext(busy), PATIENCE_S)
        assert first.count == 10
        await client.publish_many("orders", [b"x"] * 3)
        await client.publish_many("orders", [b"x"] * 4)
        await until(lambda: leased(cable) == 17)
        async with client.consume("orders", group="g") as idle:
            got = await fetch(idle, 4)
            assert [one.offset for one in got] == [13, 14, 15, 16]
            waiting = await asyncio.wait_for(anext(busy), PATIENCE_S)
            assert waiting.offsets == [10, 11, 12]
        await busy.aclose()


async def test_part_of_a_batch_that_nobody_has_opened_is_given_back() -> None:
    async with calling() as (client, cable, _):
        await client.publish_many("orders", [b"x"] * 2)
        async with client.consume("orders", group="g") as consumer:
            batches = consumer.batches()
            await asyncio.wait_for(anext(batches), PATIENCE_S)
            await client.publish_many("orders", [b"%d" % number for number in range(2, 10)])
            await until(lambda: consumer._membership.waiting_count == 8)
            await ask_back(cable, 5)
            assert (leased(cable), consumer._membership.credit.waiting) == (5, 3)
            batch = await asyncio.wait_for(anext(batches), PATIENCE_S)
            assert (batch.count, batch.bodies) == (3, [b"2", b"3", b"4"])
            await batch.ack()
            again = await asyncio.wait_for(anext(batches), PATIENCE_S)
            assert again.offsets == [5, 6, 7, 8, 9], "nobody else was there"
            await batches.aclose()


async def test_what_a_member_has_taken_or_reported_is_not_given_back() -> None:
    async with calling() as (client, cable, _):
        await client.publish_many("orders", [b"x"] * 500)
        consumer = client.consume("orders", group="g", credit=500)
        got = []
        async for delivery in consumer:
            got.append(delivery)
            if len(got) > 50 and consumer._membership.starts.ahead:
                break_at = len(got) + consumer._membership.starts.ahead
                await ask_back(cable, 1_000)
                assert leased(cable) == break_at, "taken, or reported as started"
                return
        pytest.fail("nothing was ever reported ahead")


async def test_a_member_that_waits_for_messages_still_gets_them_after_a_recall() -> None:
    async with calling() as (client, cable, _), client.consume("orders", group="g") as consumer:
        waiting = asyncio.ensure_future(next_of(aiter(consumer)))
        await until(lambda: any(m.credit for m in cable.broker.consuming.members_of("g")))
        await ask_back(cable, 100)
        await client.publish("orders", b"x")
        assert (await waiting).body == b"x"


async def test_a_handler_that_turns_slow_keeps_no_backlog_from_others() -> None:
    count = 400
    async with calling() as (client, _, _):
        await client.publish_many("orders", [b"x"] * count)
        iterating = aiter(client.consume("orders", group="g"))
        for _ in range(200):
            (await next_of(iterating)).ack_soon()
        others: set[int] = set()
        async with client.consume("orders", group="g") as idle:
            async with asyncio.timeout(PATIENCE_S):
                while len(others) < 100:
                    got = await idle.fetch(50, wait="1s")
                    others |= {one.offset for one in got}
                    await asyncio.gather(*[one.ack() for one in got])
        assert min(others) >= 200
        await iterating.aclose()


async def test_an_app_gives_back_what_waits_for_its_next_call() -> None:
    app = App()
    gate = asyncio.Event()
    called: list[int] = []

    @app.consumer("orders", group="g", batch=2, credit=100)
    async def take(orders: list[Delivery]) -> None:
        called.extend([one.offset for one in orders])
        await gate.wait()

    async with calling() as (client, cable, _), app.running(client) as run:
        await client.publish_many("orders", [b"x"] * 6)
        running = asyncio.ensure_future(run.run())
        await until(lambda: bool(called) and leased(cable) == 6)
        await turns(100)
        await ask_back(cable, 100)
        assert leased(cable) == len(called), "what runs, and nothing else"
        gate.set()
        await until(lambda: sorted(called) == list(range(6)))
        run.stop()
        await running


async def test_a_recall_keeps_the_order_of_each_key() -> None:
    count, keys = 60, 5
    seen: dict[str, list[int]] = defaultdict(list)
    running: set[str] = set()
    workers: set[str] = set()

    async def work(consumer: Consumer, pause_s: float) -> None:
        async for delivery in consumer:
            key = delivery.key
            assert key is not None
            assert key not in running, "two of a key at a time"
            assert delivery.attempt == 1
            running.add(key)
            seen[key].append(delivery.offset)
            workers.add(consumer.member)
            await asyncio.sleep(pause_s)
            running.remove(key)
            await delivery.ack()

    async with calling() as (client, _, _):
        for number in range(count):
            await client.publish("orders", b"x", key=f"k{number % keys}")
        consumers = [
            client.consume("orders", group="g", mode="ordered", member=name, credit=20)
            for name in ("ann", "bob", "eve")
        ]
        tasks = []
        for consumer, pause_s in zip(consumers, (0.3, 0.01, 0.02), strict=True):
            tasks.append(asyncio.ensure_future(work(consumer, pause_s)))
            await asyncio.sleep(2 * WAITED_MS_MIN / 1000)
        await until(lambda: sum(map(len, seen.values())) == count or any(t.done() for t in tasks))
        for consumer in consumers:
            consumer.stop()
        await asyncio.gather(*tasks)
    assert len(workers) == 3
    for name, offsets in seen.items():
        assert offsets == sorted(offsets), name
