"""`deliveries` counts every hand-over to a program, `attempt` only those that failed before."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import onward
from onward import Delivery

from .calling import calling
from .consuming import fetch, until


def counts(deliveries: list[Delivery]) -> list[tuple[int, int, bool]]:
    return [(one.attempt, one.deliveries, one.is_redelivered) for one in deliveries]


@pytest.mark.parametrize("mode", ["shared", "ordered", "exclusive", "broadcast"])
async def test_a_released_message_is_redelivered_in_the_same_attempt(mode: str) -> None:
    async with calling() as (client, _, _):
        await client.publish("orders", b"a", key="k")
        async with client.consume("orders", group="g", mode=mode, start="earliest") as consumer:
            for number in (1, 2, 3):
                found = await fetch(consumer, 1)
                assert counts(found) == [(1, number, number > 1)]
                await found[0].release()
            found = await fetch(consumer, 1)
            await found[0].retry(after_ms=1)
            assert counts(await fetch(consumer, 1)) == [(2, 5, True)]


async def test_an_uncounted_retry_is_a_delivery_and_no_attempt() -> None:
    async with calling() as (client, _, _):
        await client.publish("orders", b"a")
        async with client.consume("orders", group="g") as consumer:
            (delivery,) = await fetch(consumer, 1)
            await delivery.retry(after_ms=1, count=False)
            assert counts(await fetch(consumer, 1)) == [(1, 2, True)]


async def test_a_message_that_was_only_fetched_ahead_was_not_delivered_to_a_program() -> None:
    async with calling() as (client, _, _):
        await client.publish_many("orders", [b"a", b"b", b"c"])
        iterating = aiter(client.consume("orders", group="g", credit=3))
        await anext(iterating)
        await iterating.aclose()
        async with client.consume("orders", group="g") as consumer:
            found = await fetch(consumer, 3)
            assert counts(found) == [(1, 2, True), (1, 1, False), (1, 1, False)]


async def test_an_acked_redriven_or_replayed_message_begins_anew() -> None:
    async with calling() as (client, _, _):
        await client.publish("orders", b"a")
        async with client.consume("orders", group="g") as consumer:
            (delivery,) = await fetch(consumer, 1)
            await delivery.release()
            (delivery,) = await fetch(consumer, 1)
            await delivery.reject("wrong")
            assert await client.redrive("g") == 1
            (delivery,) = await fetch(consumer, 1)
            assert counts([delivery]) == [(1, 1, False)]


async def test_releases_are_counted_over_a_restart_of_the_broker(tmp_path: Path) -> None:
    address = f"file:{tmp_path / 'data'}"
    for number in (1, 2, 3):
        async with onward.connect(address) as mq:
            if number == 1:
                await mq.publish("orders", "a")
            async with mq.consume("orders", group="g") as consumer:
                found = await fetch(consumer, 1)
                assert counts(found) == [(1, number, number > 1)]
                await found[0].release()


async def test_a_thread_sees_the_same_counts(tmp_path: Path) -> None:
    def work() -> list[tuple[int, int, bool]]:
        with onward.connect_sync("memory:") as mq:
            mq.publish("orders", "a")
            with mq.consume("orders", group="g") as consumer:
                seen = []
                for delivery in consumer:
                    seen.append((delivery.attempt, delivery.deliveries, delivery.is_redelivered))
                    if len(seen) == 2:
                        delivery.ack()
                        return seen
                    delivery.release()
            raise AssertionError

    assert await asyncio.to_thread(work) == [(1, 1, False), (1, 2, True)]


async def test_explain_names_who_released_a_message() -> None:
    async with calling() as (client, _, _):
        await client.publish("orders", b"a")
        async with client.consume("orders", group="g", member="ann") as consumer:
            (delivery,) = await fetch(consumer, 1)
            await delivery.release()
            (delivery,) = await fetch(consumer, 1)
            await delivery.ack()
        explanation = await client.explain("orders/0")
        text = "\n".join(explanation.lines())
        assert "released by ann, which counts as no attempt" in text


async def test_explain_tells_work_from_waiting_at_the_member() -> None:
    async with calling() as (client, cable, _):
        await client.publish_many("orders", [b"a", b"b"])
        iterating = aiter(client.consume("orders", group="g", credit=2))
        first = await anext(iterating)
        await asyncio.sleep(0.15)
        await first.ack()
        second = await anext(iterating)
        await second.ack()
        await until(lambda: not list(cable.broker.consuming.leases_of("g")))
        await iterating.aclose()
        events = (await client.explain("orders/1")).group("g").events
        acked = next(event for event in events if event.did == "acked")
        assert acked.took_ms is not None
        assert acked.worked_ms is not None
        assert acked.took_ms >= 150 > acked.worked_ms + 100
        assert "in the buffer of its member" in acked.sentence()
