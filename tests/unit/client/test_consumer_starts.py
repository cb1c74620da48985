"""What a member reports as started: what the program has in its hands, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from onward import App, Delivery
from onward.client import starts
from onward.delivery.ranges import Range
from onward.protocol.deliveries import Row, started_frame

from .calling import Cable, calling, turns
from .consuming import PATIENCE_S, fetch, until


def started(cable: Cable) -> list[Range]:
    """Return what the broker believes to be started and not settled."""
    return [part for lease in cable.broker.consuming.leases_of("g") for part in lease.started]


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[Row]]:
    """Return the rows of all reports that are sent."""
    sent: list[Sequence[Row]] = []

    def frame(consumer: int, rows: Sequence[Row]) -> bytes:
        sent.append(rows)
        return started_frame(consumer, rows)

    monkeypatch.setattr(starts, "started_frame", frame)
    return sent


async def test_a_message_is_started_when_the_loop_over_a_consumer_has_it() -> None:
    async with calling() as (client, cable, _):
        await client.publish_many("orders", [b"a", b"b", b"c"])
        iterating = aiter(client.consume("orders", group="g", credit=100))
        await anext(iterating)
        await turns()
        assert started(cable) == [(0, 1)]
        await asyncio.sleep(0.01)
        await anext(iterating)
        await turns()
        assert started(cable) == [(0, 2)]
        await iterating.aclose()


async def test_what_is_fetched_or_given_as_a_batch_is_started() -> None:
    async with calling() as (client, cable, _):
        await client.publish_many("orders", [b"a", b"b", b"c"])
        async with client.consume("orders", group="g") as consumer:
            await fetch(consumer, 2)
            await turns()
            assert started(cable) == [(0, 2)]
        async with client.consume("orders", group="g") as consumer:
            batches = consumer.batches()
            batch = await asyncio.wait_for(anext(batches), PATIENCE_S)
            await turns()
            assert (batch.count, started(cable)) == (3, [(0, 3)])
            await batches.aclose()


async def test_quick_messages_share_a_report(reports: list[Sequence[Row]]) -> None:
    count = 20_000
    async with calling() as (client, _, _):
        await client.publish_many("orders", [b"x"] * count)
        async for delivery in client.consume("orders", group="g", credit=count):
            delivery.ack_soon()
            if delivery.offset == count - 1:
                break
    assert sum(end - start for rows in reports for _, start, end in rows) == count
    assert len(reports) < count / 10


async def test_a_slow_message_has_a_report_of_its_own(reports: list[Sequence[Row]]) -> None:
    async with calling() as (client, _, _):
        await client.publish_many("orders", [b"x"] * 5)
        async for delivery in client.consume("orders", group="g", credit=100):
            assert [row[1:] for row in reports[-1]] == [(delivery.offset, delivery.offset + 1)]
            await asyncio.sleep(0.01)
            await delivery.ack()
            if delivery.offset == 4:
                break
    assert len(reports) == 5


async def test_an_app_reports_a_list_when_it_is_called_with_it() -> None:
    app = App()
    gate = asyncio.Event()
    calls: list[int] = []

    @app.consumer("orders", group="g", batch=2, credit=100)
    async def take(orders: list[Delivery]) -> None:
        calls.append(len(orders))
        await gate.wait()

    async with calling() as (client, cable, _), app.running(client) as run:
        await client.publish_many("orders", [b"x"] * 6)
        running = asyncio.ensure_future(run.run())
        await until(lambda: bool(calls))
        await turns(100)
        assert sum(end - start for start, end in started(cable)) == calls[0]
        assert cable.broker.consuming.leases_of("g").count == 6
        gate.set()
        await until(lambda: sum(calls) == 6)
        run.stop()
        await running


async def test_a_message_for_a_task_uses_up_the_report_about_it_and_no_other_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(starts, "_QUICK_S", 3_600)
    async with calling() as (client, cable, _):
        await client.publish_many("orders", [b"x"] * 3)
        consumer = client.consume("orders", group="g", credit=100)
        iterating = aiter(consumer)
        assert [(await anext(iterating)).offset for _ in range(2)] == [0, 1]
        await turns()
        assert started(cable) == [(0, 3)], "message 2 is reported ahead"
        following = consumer.take_for_task()
        assert following is not None
        assert following.offset == 2
        await client.publish("orders", b"y")
        assert (await anext(iterating)).offset == 3
        await turns()
        assert [end for _, end in started(cable)][-1] == 4
        await iterating.aclose()
