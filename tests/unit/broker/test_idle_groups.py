"""Groups that end by themselves: when nobody used them for so long, and never before."""

from __future__ import annotations

import asyncio
import logging
from random import Random
from typing import Any

import pytest

from onward.broker import idle_groups
from onward.broker.broker import Broker
from onward.broker.housekeeping import LATE_MS_MIN
from onward.testing.clock import ManualClock
from onward.testing.disk import FaultyDisk

from .asking import Consumer, Operator, until
from .speaking import open_broker, turns

MINUTE_MS = 60_000


async def passes(broker: Broker, ms: int, *, late_ms: int = 0) -> None:
    """Let time pass, and the broker look at its house."""
    assert isinstance(broker.clock, ManualClock)
    broker.clock.advance(ms)
    for session in broker.sessions:
        session.last_heard_ms = session.last_frame_ms = broker.clock.monotonic_ms()
    await broker.housekeeping.tick(late_ms)
    await turns(50)


async def expiring(broker: Broker, **wish: Any) -> Operator:
    """Return an operator, and a group `g` that expires after a minute."""
    await broker.housekeeping.tick()
    operator = await Operator.of(broker)
    wish = {"expires_idle_ms": MINUTE_MS} | wish
    await operator.ask("group.create", group="g", topics=["orders"], wish=wish)
    return operator


async def exists(operator: Operator) -> bool:
    return await operator.code("group.describe", group="g") != "unknown_group"


async def test_a_group_without_a_member_is_deleted_after_its_time_and_not_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "onward.consume")
    broker = await open_broker()
    operator = await expiring(broker)
    await operator.ask("group.create", group="other", topics=["orders"])
    await passes(broker, MINUTE_MS - 1)
    assert await exists(operator)
    await passes(broker, 1)
    await until(lambda: "g" not in broker.consuming.groups.by_name)
    assert "group expired: 'g' had no member for 1m" in caplog.text
    assert await operator.code("group.describe", group="other") == ""
    await broker.stop()


async def test_idle_time_begins_when_the_last_member_has_left() -> None:
    broker = await open_broker()
    operator = await expiring(broker)
    await passes(broker, MINUTE_MS - 1)
    consumer = await Consumer.of(broker, "g")
    for _ in range(3):
        await passes(broker, MINUTE_MS)
    assert await exists(operator)
    await passes(broker, MINUTE_MS // 2)
    await consumer.leave()
    await passes(broker, MINUTE_MS - 1)
    assert await exists(operator)
    await passes(broker, 1)
    assert not await exists(operator)
    await broker.stop()


async def test_a_member_that_came_and_left_between_two_looks_keeps_its_group() -> None:
    broker = await open_broker()
    operator = await expiring(broker)
    await passes(broker, MINUTE_MS - 1)
    await (await Consumer.of(broker, "g")).leave()
    await passes(broker, MINUTE_MS - 1)
    assert await exists(operator)
    await passes(broker, 1)
    assert not await exists(operator)
    await broker.stop()


async def test_idle_time_begins_anew_at_every_start() -> None:
    disk, clock = FaultyDisk(Random(1)), ManualClock()
    broker = await open_broker(disk, clock=clock)
    await expiring(broker)
    await passes(broker, MINUTE_MS - 1)
    broker.fail(RuntimeError("killed by the test"))
    disk.crash(unsynced="lost")
    clock.advance(10 * MINUTE_MS)
    broker = await open_broker(disk, clock=clock)
    operator = await Operator.of(broker)
    await broker.housekeeping.tick()
    await passes(broker, MINUTE_MS - 1)
    assert (await operator.ask("group.describe", group="g"))["expires_idle_ms"] == MINUTE_MS
    await passes(broker, 1)
    assert not await exists(operator)
    await broker.stop()


async def test_time_in_which_the_broker_stood_still_does_not_count() -> None:
    broker = await open_broker()
    operator = await expiring(broker)
    await passes(broker, 10 * MINUTE_MS, late_ms=10 * MINUTE_MS)
    assert await exists(operator)
    await passes(broker, MINUTE_MS - LATE_MS_MIN)
    assert await exists(operator)
    await passes(broker, LATE_MS_MIN)
    assert not await exists(operator)
    await broker.stop()


async def test_a_change_lets_a_group_stay_expire_sooner_or_begin_again() -> None:
    broker = await open_broker()
    operator = await expiring(broker)
    await operator.ask("group.change", group="g", wish={"expires_idle_ms": 0})
    await passes(broker, 100 * MINUTE_MS)
    assert await exists(operator)
    await operator.ask("group.change", group="g", wish={"expires_idle_ms": 100 * MINUTE_MS})
    await operator.ask("group.change", group="g", wish={"expires_idle_ms": 2_000})
    await passes(broker, 1_999)
    await operator.ask("group.pause", group="g")
    await passes(broker, 1_999)
    assert await exists(operator)
    await passes(broker, 1)
    assert not await exists(operator)
    for wrong in (999, -1, 400 * 86_400_000):
        wish = {"expires_idle_ms": wrong}
        asked = operator.code("group.create", group="h", topics=["orders"], wish=wish)
        assert await asked == "invalid_request"
    await broker.stop()


async def test_a_group_that_is_held_or_advanced_is_in_use() -> None:
    broker = await open_broker()
    operator = await expiring(broker)
    holder = await Operator.of(broker)
    await operator.publish("orders", 3)
    await holder.ask("group.hold", group="g", holder="a pipeline")
    await passes(broker, 2 * MINUTE_MS)
    assert await exists(operator)
    holder.speaker.transport.close()
    await turns(50)
    await passes(broker, MINUTE_MS - 1)
    await operator.ask("group.advance", group="g", topic="orders", to=2, member="spark")
    await passes(broker, MINUTE_MS - 1)
    assert await exists(operator)
    await passes(broker, 1)
    assert not await exists(operator)
    await broker.stop()


async def test_a_group_that_cannot_be_deleted_now_is_deleted_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker = await open_broker()
    operator = await expiring(broker)
    monkeypatch.setattr(broker.gate, "is_stopping", True)
    await passes(broker, MINUTE_MS)
    assert await exists(operator)
    monkeypatch.undo()
    await passes(broker, idle_groups.AGAIN_MS)
    assert not await exists(operator)
    await broker.stop()


async def test_many_changes_of_a_group_leave_few_entries_behind() -> None:
    broker = await open_broker()
    await expiring(broker)
    idle = broker.consuming.idle_groups
    record = broker.consuming.groups.by_name["g"].record
    for _ in range(5_000):
        idle.note(record)
    assert len(idle._due) <= idle_groups.STALE_MAX + 3
    await asyncio.wait_for(broker.stop(), 60)
