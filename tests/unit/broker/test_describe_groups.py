"""What there is to know of a group: it is told as it is, and cheaply."""

from typing import Any

import pytest

from onward.broker import describe
from onward.broker.operations import groups as group_operations
from onward.log.log import Log
from onward.testing.clock import START_MS, ManualClock

from .asking import Consumer, Operator
from .speaking import open_broker


async def share_of(operator: Operator, group: str = "g") -> dict[str, Any]:
    (share,) = (await operator.ask("group.describe", group=group))["topics"]
    assert isinstance(share, dict)
    return share


async def test_every_message_of_a_backlog_is_ready_or_waits_or_is_leased() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 20)
    consumer = await Consumer.of(broker, "g", credit=10)
    await consumer.got(10)
    await consumer.ack_offsets(0, 1, 5)
    await consumer.settle("retry", 2, 3, after_ms=60_000)
    await consumer.settle("reject", 4, cause="no")
    assert await share_of(operator) == {
        "topic": "orders", "cursor": 2, "end": 20, "backlog": 16, "oldest_at_ms": START_MS,
        "ready": 10, "waiting": 2, "next_due_ms": START_MS + 60_000, "leased": 4, "dead": 1,
        "reserved": 0, "expiring": 0, "expires_at_ms": 0, "dropped": 0,
    }  # fmt: skip
    await broker.stop()


async def test_the_age_of_a_backlog_is_that_of_its_oldest_message() -> None:
    clock = ManualClock()
    broker = await open_broker(clock=clock)
    operator = await Operator.of(broker)
    for _ in range(3):
        await operator.publish("orders", 2)
        clock.advance(1_000)
    await operator.ask("group.create", group="g", topics=["orders"])
    ages = []
    for first in (0, 2, 4):
        ages.append((await share_of(operator))["oldest_at_ms"] - START_MS)
        await operator.ask("group.skip", group="g", topic="orders", ranges=[[first, first + 2]])
    assert ages == [0, 1_000, 2_000]
    assert (await share_of(operator))["oldest_at_ms"] == 0
    await broker.stop()


async def test_describing_a_group_reads_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 5)
    await operator.ask("group.create", group="g", topics=["orders"])

    def read(*_: object, **__: object) -> None:
        raise AssertionError("a description needs no message")

    monkeypatch.setattr(Log, "read", read)
    assert (await share_of(operator))["oldest_at_ms"] == START_MS
    await broker.stop()


async def test_a_member_is_described_with_what_it_did() -> None:
    clock = ManualClock()
    broker = await open_broker(clock=clock)
    operator = await Operator.of(broker)
    await operator.publish("orders", 10)
    consumer = await Consumer.of(broker, "g", member="ann", credit=12)
    await consumer.got(10)
    await consumer.ack_offsets(0, 1, 2, 3)
    await consumer.settle("retry", 4, after_ms=60_000)
    clock.advance(2_000)
    group = await operator.ask("group.describe", group="g")
    (member,) = group["members"]
    assert group["member_count"] == 1
    assert member == {
        "member": "ann", "client": "test", "host": "", "pid": 0, "function": "",
        "state": "active", "credit": 2,
        "leased": 5, "delivered": 10, "acked": 4, "retried": 1, "expired": 0, "since_ms": START_MS,
        "rate": 2.0,
    }  # fmt: skip
    await broker.stop()


async def test_a_list_of_groups_names_few_members_of_each_and_says_how_many_there_are() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    for number in range(102):
        await Consumer.of(broker, "g", member=f"m{number}")
    (listed,) = (await operator.ask("group.list"))["groups"]
    assert (len(listed["members"]), listed["member_count"]) == (100, 102)
    described = await operator.ask("group.describe", group="g")
    assert len(described["members"]) == 102
    await broker.stop()


async def test_a_group_whose_topic_has_ended_is_described_without_it() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 5)
    await operator.ask("group.create", group="g", topics=["orders", "refunds"])
    await operator.ask("topic.delete", topic="orders")
    group = await operator.ask("group.describe", group="g")
    assert [topic["topic"] for topic in group["topics"]] == ["refunds"]
    assert group["backlog"] == 0
    await broker.stop()


async def in_broadcast(operator: Operator, *offsets: int, topic: str = "orders") -> None:
    """Let members of the broadcast `all` be at these offsets of a topic: m0, m1 and so on."""
    for number, offset in enumerate(offsets):
        await operator.ask(
            "position.set", group="all", member=f"m{number}", topic=topic, offset=offset
        )


async def test_a_member_of_a_broadcast_is_described_with_how_far_behind_it_is() -> None:
    clock = ManualClock()
    broker = await open_broker(clock=clock)
    operator = await Operator.of(broker)
    for _ in range(3):
        await operator.publish("orders", 2)
        clock.advance(1_000)
    await operator.publish("refunds", 4)
    wish = {"mode": "broadcast"}
    await operator.ask("group.create", group="all", topics=["orders", "refunds"], wish=wish)
    await in_broadcast(operator, 6, 3)
    await in_broadcast(operator, 1, 4, topic="refunds")
    await Consumer.of(broker, "all", "orders", member="m1")
    await Consumer.of(broker, "all", "orders", member="new")
    group = await operator.ask("group.describe", group="all")
    first, second, *_, last = group["positions"]
    assert first == {
        "member": "m0", "topic": "refunds", "offset": 1, "end": 4, "backlog": 3,
        "oldest_at_ms": START_MS + 3_000, "connected": False,
    }  # fmt: skip
    assert second == {
        "member": "m1", "topic": "orders", "offset": 3, "end": 6, "backlog": 3,
        "oldest_at_ms": START_MS + 1_000, "connected": True,
    }  # fmt: skip
    assert last == {
        "member": "new", "topic": "orders", "offset": None, "end": 6, "backlog": None,
        "oldest_at_ms": 0, "connected": True,
    }  # fmt: skip
    assert [one["backlog"] for one in group["positions"]] == [3, 3, 0, 0, None]
    assert (group["backlog"], group["member_count"]) == (3, 2)
    await broker.stop()


async def test_the_age_is_told_of_the_members_that_are_farthest_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(describe, "AGES_MAX", 2)
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 9)
    await operator.ask("group.create", group="all", topics=["orders"], wish={"mode": "broadcast"})
    await in_broadcast(operator, 7, 3, 1, 1)
    positions = (await operator.ask("group.describe", group="all"))["positions"]
    assert [one["offset"] for one in positions] == [1, 1, 3, 7]
    assert [one["oldest_at_ms"] for one in positions] == [START_MS, START_MS, START_MS, 0]
    await broker.stop()


async def test_what_retention_took_away_is_in_nobodys_backlog() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 9)
    await operator.ask("group.create", group="all", topics=["orders"], wish={"mode": "broadcast"})
    await in_broadcast(operator, 2)
    broker.catalogue.by_name["orders"].first_offset = 5
    (position,) = (await operator.ask("group.describe", group="all"))["positions"]
    assert (position["offset"], position["backlog"]) == (2, 4)
    await broker.stop()


async def test_positions_in_a_topic_that_ended_are_not_told() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 9)
    await operator.ask("group.create", group="all", topics=["orders"], wish={"mode": "broadcast"})
    ending = operator.say("topic.delete", topic="orders")
    await in_broadcast(operator, 2)
    await operator.answer(ending)
    assert (await operator.ask("group.describe", group="all"))["positions"] == []
    await operator.publish("orders", 3)
    assert (await operator.ask("group.describe", group="all"))["positions"] == []
    await broker.stop()


async def test_a_list_of_groups_tells_the_members_that_are_farthest_behind() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 200)
    await operator.ask("group.create", group="all", topics=["orders"], wish={"mode": "broadcast"})
    await in_broadcast(operator, *range(150, 0, -1))
    (listed,) = (await operator.ask("group.list"))["groups"]
    assert [one["offset"] for one in listed["positions"]] == list(range(1, 101))
    assert listed["backlog"] == 199
    described = await operator.ask("group.describe", group="all")
    assert len(described["positions"]) == 150
    await broker.stop()


async def test_a_page_of_groups_ends_when_their_positions_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_operations, "PAGE_SHARES_MAX", 25)
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 9)
    wish = {"mode": "broadcast"}
    for name in ("all", "other"):
        await operator.ask("group.create", group=name, topics=["orders"], wish=wish)
    await in_broadcast(operator, *[1] * 20)
    assert (await operator.ask("group.list"))["next"] == ""
    await in_broadcast(operator, *[1] * 30)
    assert (await operator.ask("group.list"))["next"] == "all"
    await broker.stop()


# --- messages ----------------------------------------------------------------------------------
