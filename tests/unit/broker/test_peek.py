"""A peek tells what a group would hand out next, in that order, and changes nothing."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from onward.broker import lookahead, peek
from onward.broker.broker import Broker
from onward.errors import Overloaded
from onward.protocol.deliveries import more_frame
from onward.protocol.operations import OPERATIONS, operation
from onward.protocol.operations.group_moves import PeekGroup

from .asking import Consumer, Operator, until
from .speaking import open_broker

PRIORITIES = [0, 3, 0, 9, 3, 0]


async def opened(**columns: Any) -> tuple[Broker, Operator]:
    """Return a broker with six messages of `orders`, and somebody who asks it."""
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 6, **columns)
    return broker, operator


async def create(operator: Operator, **wish: Any) -> None:
    await operator.ask("group.create", group="g", topics=["orders"], wish=wish)


async def peeked(operator: Operator, limit: int = 100) -> list[int]:
    reply = await operator.ask("group.peek", group="g", topic="orders", limit=limit)
    offsets = [offset for start, end in reply["ranges"] for offset in range(start, end)]
    assert reply["count"] == len(offsets)
    return offsets


# --- filters -------------------------------------------------------------------------------------


async def test_what_the_filter_drops_is_not_shown() -> None:
    broker, operator = await opened(tags=["eu", "us", "eu,paid", None, "us", "eu"])
    await create(operator, filter={"tags_any": ["eu"]})
    assert await peeked(operator) == [0, 2, 5]
    assert await peeked(operator, limit=2) == [0, 2]
    await operator.ask("group.skip", group="g", topic="orders", ranges=[[0, 1]])
    assert await peeked(operator, limit=2) == [2, 5]
    await broker.stop()


async def test_headers_that_the_filter_asks_for_are_looked_at() -> None:
    shops = [{"shop": "eu"}, {"shop": "us"}, None, {"shop": "eu"}, None, None]
    broker, operator = await opened(headers=shops)
    await create(operator, filter={"headers": {"shop": "eu"}})
    assert await peeked(operator) == [0, 3]
    await broker.stop()


async def test_a_filter_that_drops_much_is_looked_through_only_so_far(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker, operator = await opened(tags=["us", "us", "eu", "us", "us", "eu"])
    await create(operator, filter={"tags_any": ["eu"]})
    monkeypatch.setattr(lookahead, "OFFSETS_MAX", 2)
    assert await peeked(operator) == [2, 5], "in as many looks as it takes"
    monkeypatch.setattr(peek, "LOOKS_MAX", 2)
    assert await peeked(operator) == [2]
    monkeypatch.setattr(peek, "HELD_MAX", 2)
    assert await peeked(operator) == []
    await broker.stop()


# --- priorities ----------------------------------------------------------------------------------


async def test_a_higher_priority_is_shown_first() -> None:
    broker, operator = await opened(priorities=PRIORITIES)
    await create(operator, priorities=True)
    assert await peeked(operator) == [3, 1, 4, 0, 2, 5]
    assert await peeked(operator, limit=2) == [3, 1]
    await broker.stop()


async def test_a_peek_shows_the_order_in_which_a_member_then_gets_them() -> None:
    broker, operator = await opened(priorities=PRIORITIES, tags=["a", "b", "a", "a", "a", "a"])
    await create(operator, priorities=True, filter={"tags_any": ["a"]})
    shown = await peeked(operator)
    assert shown == [3, 4, 0, 2, 5]
    consumer = await Consumer.of(broker, "g", credit=0)
    for number in range(1, 6):
        consumer.speaker.transport.write(more_frame(consumer.id, 1))
        await consumer.got(number)
        assert await peeked(operator) == shown[number:], "what a member holds is not shown"
    assert consumer.offsets == shown
    await broker.stop()


async def test_a_failed_message_takes_turns_with_fresh_ones_of_its_priority() -> None:
    broker, operator = await opened()
    consumer = await Consumer.of(broker, "g", credit=2, wish={"priorities": True})
    await consumer.got(2)
    await consumer.settle("retry", 0, 1, after_ms=0)
    await until(lambda: broker.consuming.groups.by_name["g"].shares["orders"].attempts)
    await consumer.leave()
    assert await peeked(operator) == [0, 2, 1, 3, 4, 5]
    await broker.stop()


# --- keys and tenants ----------------------------------------------------------------------------


async def test_tenants_take_turns_in_a_peek() -> None:
    broker, operator = await opened(tenants=["x", "x", "x", "x", "y", "y"])
    await create(operator, tenants={"x": 1.0})
    assert await peeked(operator) == [0, 4, 1, 5, 2, 3]
    await broker.stop()


async def test_a_key_that_waits_for_a_retry_is_not_shown_in_an_ordered_group() -> None:
    broker, operator = await opened(keys=["a", "b", "a", "b", "a", None])
    consumer = await Consumer.of(broker, "g", wish={"mode": "ordered"})
    await consumer.got(3)
    await consumer.settle("retry", 0, after_ms=60_000)
    assert await peeked(operator) == [3], "what a member holds is not shown either"
    await consumer.leave()
    assert await peeked(operator) == [1, 3, 5]
    await broker.stop()


async def test_limits_of_keys_do_not_hide_what_they_hold_back() -> None:
    broker, operator = await opened(keys=["a"] * 6)
    await create(operator, key_rate=1, key_concurrency=1)
    assert await peeked(operator) == [0, 1, 2, 3, 4, 5]
    await broker.stop()


# --- what it costs -------------------------------------------------------------------------------


@pytest.mark.parametrize("wish", [{"priorities": True}, {"filter": {"tags_any": ["a"]}}])
async def test_a_peek_takes_nothing_and_counts_nothing(wish: dict[str, Any]) -> None:
    broker, operator = await opened(tags=["a", "b"] * 3)
    await create(operator, **wish)
    before = await operator.ask("group.describe", group="g")
    await peeked(operator)
    assert await operator.ask("group.describe", group="g") == before
    await broker.stop()


async def test_too_many_peeks_at_once_are_told_to_come_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = replace(OPERATIONS["group.peek"], running_max=2)
    monkeypatch.setitem(operation._BY_REQUEST, PeekGroup, row)
    broker, operator = await opened()
    await create(operator, priorities=True)
    asked = [operator.say("group.peek", group="g", topic="orders") for _ in range(3)]
    assert await operator.answer(asked[0])
    assert await operator.answer(asked[1])
    assert await refused(lambda: operator.answer(asked[2])) == "overloaded"
    assert await peeked(operator), "and then there is room again"
    await broker.stop()


async def refused(ask: Callable[[], Any]) -> str:
    with pytest.raises(Overloaded) as caught:
        await ask()
    return caught.value.code
