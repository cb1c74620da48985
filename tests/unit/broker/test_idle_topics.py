"""Topics that end by themselves: when nobody used them for so long, and nothing in them is left."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from onward.broker.broker import Broker
from onward.broker.idle_topics import LOOKS_PER_TIME
from onward.testing.clock import ManualClock
from onward.testing.disk import FaultyDisk

from .asking import Consumer, Operator, until
from .speaking import open_broker, turns
from .waiting import HOUR_MS, Schedule

MINUTE_MS = 60_000
STEP_MS = MINUTE_MS // LOOKS_PER_TIME


async def passes(broker: Broker, ms: int) -> None:
    """Let time pass step by step, and the broker look at its house after each."""
    assert isinstance(broker.clock, ManualClock)
    while ms > 0:
        step_ms = min(ms, STEP_MS)
        ms -= step_ms
        broker.clock.advance(step_ms)
        for session in broker.sessions:
            session.last_heard_ms = session.last_frame_ms = broker.clock.monotonic_ms()
        await broker.housekeeping.tick()
        await broker.housekeeping.tidy()
        await turns(20)


async def expiring(broker: Broker, **fields: Any) -> Operator:
    """Return an operator, and a topic `orders` that expires after a minute."""
    await broker.housekeeping.tick()
    operator = await Operator.of(broker)
    fields = {"expires_idle_ms": MINUTE_MS} | fields
    await operator.ask("topic.create", topic="orders", **fields)
    return operator


def exists(broker: Broker) -> bool:
    return "orders" in broker.catalogue.by_name


async def ends(broker: Broker) -> None:
    """See that it ends now, at its time or up to an eighth later, and not before."""
    await passes(broker, MINUTE_MS - STEP_MS)
    assert exists(broker)
    await passes(broker, 2 * STEP_MS)
    await until(lambda: not exists(broker))


async def test_a_topic_that_nobody_uses_ends_after_its_time_and_others_stay() -> None:
    broker = await open_broker()
    operator = await expiring(broker)
    await operator.ask("topic.create", topic="other")
    await ends(broker)
    ended = (await operator.ask("topic.list", all=True))["ended"]
    assert [(one["topic"], one["state"]) for one in ended] == [("orders", "expired")]
    await passes(broker, 10 * MINUTE_MS)
    assert "other" in broker.catalogue.by_name
    await broker.stop()


async def test_publishing_reading_waiting_and_consuming_begin_idle_time_again() -> None:
    broker = await open_broker()
    operator = await expiring(broker)
    nearly_ms = MINUTE_MS - STEP_MS
    await passes(broker, nearly_ms)
    await operator.publish("orders", 3)
    await passes(broker, nearly_ms)
    operator.speaker.say_read("orders")
    await turns(50)
    await passes(broker, nearly_ms)
    await operator.ask("topic.wait", ends={"orders": 0}, wait_ms=0)
    await passes(broker, nearly_ms)
    consumer = await Consumer.of(broker, "g")
    await consumer.got(3)
    await consumer.ack()
    await consumer.leave()
    await ends(broker)
    await broker.stop()


@pytest.mark.parametrize("outcome", ["unread", "retry", "reject"])
async def test_a_topic_in_which_a_group_has_something_left_is_not_idle(outcome: str) -> None:
    broker = await open_broker()
    operator = await expiring(broker)
    await operator.publish("orders", 1)
    await operator.ask("group.create", group="g", topics=["orders"])
    if outcome != "unread":
        consumer = await Consumer.of(broker, "g")
        await consumer.got(1)
        await consumer.settle(outcome, 0, **({"after_ms": HOUR_MS} if outcome == "retry" else {}))
        await consumer.leave()
    await passes(broker, 3 * MINUTE_MS)
    assert exists(broker)
    await operator.ask("group.delete", group="g")
    await ends(broker)
    await broker.stop()


async def test_a_topic_with_scheduled_messages_is_not_idle() -> None:
    broker = await open_broker()
    await expiring(broker)
    schedule = await Schedule.of(broker)
    number = await schedule.add(HOUR_MS)
    await schedule.add(HOUR_MS, topic="other")
    await passes(broker, 3 * MINUTE_MS)
    assert exists(broker)
    await schedule.cancel(number)
    await passes(broker, 2 * MINUTE_MS + 2 * STEP_MS)
    await until(lambda: not exists(broker))
    await broker.stop()


async def test_messages_that_a_group_to_come_is_to_have_are_not_idle() -> None:
    broker = await open_broker()
    operator = await expiring(broker, retention_group="lake")
    await operator.publish("orders", 1)
    await passes(broker, 3 * MINUTE_MS)
    assert exists(broker)
    await broker.stop()


async def test_idle_time_begins_anew_at_every_start_and_a_change_may_end_it() -> None:
    disk, clock = FaultyDisk(Random(1)), ManualClock()
    broker = await open_broker(disk, clock=clock)
    await expiring(broker)
    await passes(broker, MINUTE_MS - STEP_MS)
    broker.fail(RuntimeError("killed by the test"))
    disk.crash(unsynced="lost")
    clock.advance(10 * MINUTE_MS)
    broker = await open_broker(disk, clock=clock)
    operator = await Operator.of(broker)
    await broker.housekeeping.tick()
    await passes(broker, MINUTE_MS - STEP_MS)
    shown = await operator.ask("topic.describe", topic="orders")
    assert shown["expires_idle_ms"] == MINUTE_MS
    await operator.ask("topic.change", topic="orders", expires_idle_ms=0)
    await passes(broker, 3 * MINUTE_MS)
    assert exists(broker)
    await operator.ask("topic.change", topic="orders", expires_idle_ms=MINUTE_MS)
    await ends(broker)
    for wrong in (999, 400 * 86_400_000):
        asked = operator.code("topic.create", topic="hasty", expires_idle_ms=wrong)
        assert await asked == "invalid_request"
    await broker.stop()
