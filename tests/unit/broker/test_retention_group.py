"""What a topic's retention group has not finished stays, however old and large it is."""

from random import Random
from typing import Any

import pytest

from onward.broker.broker import Broker
from onward.broker.catalogue import Catalogue, TopicRecord
from onward.testing.clock import ManualClock
from onward.testing.disk import FaultyDisk

from .asking import Operator
from .speaking import open_broker, settings_with, turns

HOUR_MS = 3_600_000


async def keep_house(broker: Broker) -> None:
    for _ in range(3):
        broker.housekeeping.retain_soon()
        await broker.housekeeping.tick()
        await broker.housekeeping.tidy()
        await turns()


async def filled(operator: Operator, topic: str, count: int = 30) -> None:
    for _ in range(count):
        await operator.speaker.publish(topic, [bytes(10_000)])


class Kept:
    """A broker that keeps messages for an hour, and a topic that waits for a group."""

    def __init__(self, broker: Broker, clock: ManualClock, operator: Operator) -> None:
        self.broker, self.clock, self.operator = broker, clock, operator

    @classmethod
    async def of(cls, *, group: str = "archive", **log: Any) -> "Kept":
        clock = ManualClock()
        settings = settings_with(log={"retention_ms": HOUR_MS} | log)
        broker = await open_broker(FaultyDisk(Random(1)), clock=clock, settings=settings)
        operator = await Operator.of(broker)
        await operator.ask("topic.create", topic="orders", retention_group=group)
        return cls(broker, clock, operator)

    async def later(self) -> None:
        """Let more time pass than messages are kept."""
        self.clock.advance(2 * HOUR_MS)
        for session in self.broker.sessions:
            session.last_heard_ms = session.last_frame_ms = self.clock.monotonic_ms()
        await keep_house(self.broker)

    @property
    def first_offset(self) -> int:
        return self.broker.catalogue.find("orders").first_offset

    async def advance(self, to: int) -> None:
        await self.operator.ask(
            "group.advance", group="archive", topic="orders", to=to, member="archive"
        )


async def test_what_the_group_has_not_finished_stays_whatever_its_age() -> None:
    kept = await Kept.of()
    await kept.operator.ask("group.create", group="archive", topics=["orders"])
    await filled(kept.operator, "orders")
    await filled(kept.operator, "others")
    await kept.later()
    assert kept.first_offset == 0
    assert kept.broker.catalogue.find("others").first_offset > 0
    await kept.advance(13)
    await kept.later()
    assert 0 < kept.first_offset <= 13
    assert len(await kept.operator.speaker.read("orders", 13)) == 17
    await kept.advance(30)
    await kept.later()
    assert kept.first_offset == 30
    await kept.broker.stop()


async def test_all_stays_while_the_group_does_not_exist() -> None:
    kept = await Kept.of()
    await filled(kept.operator, "orders")
    await kept.later()
    assert kept.first_offset == 0
    await kept.operator.ask("group.create", group="archive", topics=["orders"])
    await kept.later()
    assert kept.first_offset == 0
    await kept.broker.stop()


async def test_a_limit_of_the_whole_log_does_not_take_what_the_group_has_not_finished() -> None:
    kept = await Kept.of(retention_bytes=100_000)
    await kept.operator.ask("group.create", group="archive", topics=["orders"])
    await filled(kept.operator, "orders")
    await keep_house(kept.broker)
    assert kept.first_offset == 0
    assert len(await kept.operator.speaker.read("orders")) == 30
    await kept.advance(30)
    await keep_house(kept.broker)
    assert kept.first_offset > 13
    assert kept.broker.log.bytes < 200_000
    await kept.broker.stop()


async def test_a_topic_that_waits_for_no_group_any_more_is_kept_as_others_are() -> None:
    kept = await Kept.of()
    await filled(kept.operator, "orders")
    described = await kept.operator.ask("topic.change", topic="orders", retention_group="")
    assert described["retention_group"] == ""
    await kept.later()
    assert kept.first_offset == 30
    await kept.broker.stop()


async def test_of_a_broadcast_group_the_slowest_member_counts() -> None:
    kept = await Kept.of()
    wish = {"mode": "broadcast"}
    await kept.operator.ask("group.create", group="archive", topics=["orders"], wish=wish)
    await filled(kept.operator, "orders")
    for member, offset in (("ann", 30), ("bob", 13)):
        await kept.operator.ask(
            "position.set", group="archive", member=member, topic="orders", offset=offset
        )
    await kept.later()
    assert 0 < kept.first_offset <= 13
    await kept.broker.stop()


async def test_an_ended_topic_waits_for_nobody() -> None:
    kept = await Kept.of()
    await filled(kept.operator, "orders")
    await kept.operator.ask("topic.delete", topic="orders")
    await keep_house(kept.broker)
    assert kept.broker.log.bytes < 100_000
    await kept.broker.stop()


async def test_the_group_of_a_topic_survives_a_crash_and_a_checkpoint() -> None:
    for checkpoints in (False, True):
        disk = FaultyDisk(Random(1))
        broker = await open_broker(disk)
        operator = await Operator.of(broker)
        await operator.ask("topic.create", topic="orders", retention_group="archive")
        await operator.ask("topic.create", topic="bills")
        await operator.ask("topic.change", topic="bills", retention_group="lake")
        if checkpoints:
            await broker.housekeeping.checkpoint()
        broker.fail(RuntimeError("the power was cut"))
        disk.crash(unsynced="lost")
        broker = await open_broker(disk)
        groups = {
            name: one.record.retention_group for name, one in broker.catalogue.by_name.items()
        }
        assert groups == {"orders": "archive", "bills": "lake"}
        await broker.stop()


def test_a_checkpoint_of_before_there_were_such_groups_is_read() -> None:
    catalogue = Catalogue()
    catalogue.add(TopicRecord(number=1, name="orders")).is_durable = True
    saved = catalogue.save()
    assert b"retention_group" not in saved
    assert Catalogue.load(saved).find("orders").record.retention_group == ""


@pytest.mark.parametrize("op", ["topic.create", "topic.change"])
async def test_a_group_has_a_name_that_groups_may_have(op: str) -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.ask("topic.create", topic="bills")
    topic = "orders" if op == "topic.create" else "bills"
    assert await operator.code(op, topic=topic, retention_group="a b") == "invalid_name"
    await broker.stop()
