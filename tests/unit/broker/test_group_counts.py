"""How much a group has to do: one answer from one moment, in which no message is missed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from onward.broker import schedule_scan
from onward.broker.schedule_scan import ScheduleScan

from .asking import Consumer, Operator
from .speaking import open_broker
from .waiting import HOUR_MS, Schedule

NAMES = ("ready", "leased", "retrying", "scheduled", "dead", "is_exact")


async def counts_of(operator: Operator, group: str = "g") -> list[Any]:
    counts = await operator.ask("group.counts", group=group)
    return [counts[name] for name in NAMES]


async def test_what_is_ready_leased_retrying_scheduled_and_dead_is_told_at_once() -> None:
    broker = await open_broker()
    operator, schedule = await Operator.of(broker), await Schedule.of(broker)
    await operator.publish("orders", 20)
    consumer = await Consumer.of(broker, "g", credit=10)
    await consumer.got(10)
    await consumer.ack_offsets(0, 1, 5)
    await consumer.settle("retry", 2, 3, after_ms=60_000)
    await consumer.settle("reject", 4, cause="no")
    await schedule.add(HOUR_MS, HOUR_MS, 2 * HOUR_MS)
    await schedule.add(HOUR_MS, topic="of-another-group")
    assert await counts_of(operator) == [10, 4, 2, 3, 1, True]
    await broker.stop()


async def test_what_was_cancelled_replaced_moved_or_has_fired_is_not_scheduled() -> None:
    broker = await open_broker()
    operator, schedule = await Operator.of(broker), await Schedule.of(broker)
    await operator.ask("group.create", group="g", topics=["orders"])
    first = await schedule.add(1_000, HOUR_MS, HOUR_MS)
    assert await counts_of(operator) == [0, 0, 0, 3, 0, True]
    await schedule.cancel(first + 1)
    await schedule.move(first + 2, 2 * HOUR_MS)
    assert await counts_of(operator) == [0, 0, 0, 2, 0, True]
    await schedule.passes(1_000)
    assert await counts_of(operator) == [1, 0, 0, 1, 0, True]
    await broker.stop()


async def test_a_count_of_many_begins_again_when_the_schedule_changes_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A program acks a message and leaves another one in the schedule, behind the count's back."""
    monkeypatch.setattr(schedule_scan, "SCAN_STEP", 16)
    broker = await open_broker()
    operator, schedule = await Operator.of(broker), await Schedule.of(broker)
    await operator.publish("orders", 1)
    consumer = await Consumer.of(broker, "g")
    await consumer.got(1)
    await schedule.add(*range(HOUR_MS, HOUR_MS + 100), topic="other")
    turn, page = 0, ScheduleScan.page

    async def hand_over(self: ScheduleScan, *where: Any) -> Any:
        nonlocal turn
        records = await page(self, *where)
        turn += 1
        if turn == 2:
            await asyncio.sleep(0)  # a handler runs in a task only after its first wait
            # Before all that was gone through by now: a count that went on would miss both.
            await schedule.add(HOUR_MS // 2)
            await consumer.ack()
        return records

    monkeypatch.setattr(ScheduleScan, "page", hand_over)
    assert await counts_of(operator) == [0, 0, 0, 1, 0, True]
    assert turn > 3
    await broker.stop()


async def test_a_count_during_which_the_schedule_never_rests_is_not_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schedule_scan, "SCAN_STEP", 16)
    broker = await open_broker()
    operator, schedule = await Operator.of(broker), await Schedule.of(broker)
    await operator.ask("group.create", group="g", topics=["orders"])
    await schedule.add(*range(HOUR_MS, HOUR_MS + 100))
    page = ScheduleScan.page

    async def disturbed(self: ScheduleScan, *where: Any) -> Any:
        await asyncio.sleep(0)  # a handler runs in a task only after its first wait
        await schedule.add(HOUR_MS // 2)
        return await page(self, *where)

    monkeypatch.setattr(ScheduleScan, "page", disturbed)
    *_, scheduled, _, is_exact = await counts_of(operator)
    assert scheduled >= 100
    assert not is_exact
    await broker.stop()


async def test_more_rows_than_are_gone_through_are_not_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schedule_scan, "SCAN_STEP", 16)
    monkeypatch.setattr(schedule_scan, "SCANNED_MAX", 50)
    broker = await open_broker()
    operator, schedule = await Operator.of(broker), await Schedule.of(broker)
    await operator.ask("group.create", group="g", topics=["orders"])
    await schedule.add(*range(HOUR_MS, HOUR_MS + 200))
    *_, scheduled, _, is_exact = await counts_of(operator)
    assert 50 <= scheduled < 200
    assert not is_exact
    await broker.stop()


async def test_what_arrives_while_the_order_is_in_use_is_scheduled_too() -> None:
    broker = await open_broker()
    schedule = await Schedule.of(broker)
    async with broker.scheduling.lock:
        await schedule.add(HOUR_MS, HOUR_MS)
        await schedule.add(HOUR_MS, topic="other")
        assert broker.scheduling.arrived_count({"orders"}) == 2
    assert (await ScheduleScan(broker.scheduling).count({"orders"})) == (2, True)
    await broker.stop()


async def test_a_broadcast_is_not_counted_and_a_topic_that_came_anew_is() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 3)
    wish = {"mode": "broadcast"}
    await operator.ask("group.create", group="all", topics=["orders"], wish=wish)
    assert await operator.code("group.counts", group="all") == "invalid_request"
    assert await operator.code("group.counts", group="nobody") == "unknown_group"
    await operator.ask("group.create", group="g", topics=["orders"])
    await operator.ask("topic.delete", topic="orders")
    await operator.publish("orders", 5)
    assert await counts_of(operator) == [5, 0, 0, 0, 0, True]
    await broker.stop()
