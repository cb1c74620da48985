"""Retries and dead letters outlive retention, restarts and the segments they were carried into."""

from random import Random
from typing import Any

import pytest

from onward.broker.broker import Broker
from onward.log.check import Check
from onward.message.batch import batches_of, decode_batch
from onward.message.entry import entry_heads
from onward.protocol.deliveries import decode_delivery
from onward.protocol.frames import Kind
from onward.settings import GroupSettings
from onward.testing.clock import ManualClock
from onward.testing.disk import FaultyDisk

from .asking import Consumer, Operator, until
from .speaking import open_broker, settings_with, turns

HOUR_MS = 3_600_000
SIZE = 10_000


def body(number: int) -> bytes:
    return b"%d " % number + bytes(SIZE)


class World:
    """A broker that keeps messages for an hour, and a group that has left some unfinished."""

    def __init__(self, broker: Broker, disk: FaultyDisk, clock: ManualClock) -> None:
        self.broker, self.disk, self.clock = broker, disk, clock

    @classmethod
    async def of(cls, **log: Any) -> "World":
        disk, clock = FaultyDisk(Random(1)), ManualClock()
        world = cls(await cls._open(disk, clock, log), disk, clock)
        world.log = log
        return world

    log: dict[str, Any]

    @staticmethod
    async def _open(disk: FaultyDisk, clock: ManualClock, log: dict[str, Any]) -> Broker:
        settings = settings_with(log={"retention_ms": HOUR_MS} | log)
        return await open_broker(disk, clock=clock, settings=settings)

    async def crash(self) -> None:
        self.broker.fail(RuntimeError("the power was cut"))
        self.disk.crash(unsynced="lost")
        self.broker = await self._open(self.disk, self.clock, self.log)

    async def publish(self, count: int, topic: str = "orders", batch: int = 1) -> None:
        operator = await Operator.of(self.broker)
        for number in range(0, count, batch):
            bodies = [body(number + one) for one in range(batch)]
            await operator.speaker.publish(topic, bodies)

    async def passes(self, hours: float) -> None:
        self.clock.advance(int(hours * HOUR_MS))
        for session in self.broker.sessions:
            session.last_heard_ms = session.last_frame_ms = self.clock.monotonic_ms()
        await self.keep_house()

    async def keep_house(self) -> None:
        for _ in range(4):
            self.broker.housekeeping.retain_soon()
            await self.broker.housekeeping.tick()
            await self.broker.housekeeping.tidy()
            await turns()

    async def ask(self, op: str, **fields: Any) -> Any:
        return await (await Operator.of(self.broker)).ask(op, **fields)

    @property
    def first_offset(self) -> int:
        return self.broker.catalogue.find("orders").first_offset

    async def group(self, name: str = "work") -> Any:
        return await self.ask("group.describe", group=name)

    def check(self) -> None:
        check = Check(self.disk, "log")
        check.run()
        assert not check.is_damaged, (check.problems, check.damages)


def bodies(consumer: Consumer) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for kind, payload in consumer.speaker.of(consumer.id):
        if kind != Kind.DELIVERY:
            continue
        entries = bytes(payload[decode_delivery(payload).entries_at :])
        for entry in entry_heads(entries):
            offset, at = entry.base_offset, entry.body_position
            for start, _ in batches_of(entries, at, at + entry.body_bytes):
                for one in decode_batch(entries, start, raw_bytes_max=1 << 30).bodies:
                    found[offset] = bytes(one)
                    offset += 1
    return found


async def unfinished(world: World, *, batch: int = 1, **wish: Any) -> Consumer:
    """0 acked, 1 waits for a retry in 30 h, 2 dead, 3 released, 4 on is the backlog."""
    await world.ask("topic.create", topic="orders")
    await world.ask("group.create", group="work", topics=["orders"], wish=wish)
    await world.publish(20, batch=batch)
    consumer = await Consumer.of(world.broker, "work", credit=4)
    assert await consumer.got(4) == [0, 1, 2, 3]
    await consumer.ack_offsets(0)
    await consumer.settle("retry", 1, after_ms=30 * HOUR_MS)
    await consumer.settle("reject", 2, cause="bad")
    await consumer.settle("release", 3)
    await consumer.leave()
    return consumer


async def test_retries_and_dead_letters_outlive_retention_and_a_crash() -> None:
    world = await World.of()
    await unfinished(world)
    await world.passes(2)
    assert world.first_offset == 20
    assert (await world.group())["dead"] == 1
    await world.crash()
    assert world.first_offset == 20
    assert (await world.ask("dead.redrive", group="work", all=True))["count"] == 1
    consumer = await Consumer.of(world.broker, "work")
    assert sorted(await consumer.got(2)) == [2, 3]
    assert bodies(consumer) == {2: body(2), 3: body(3)}
    await consumer.ack_offsets(2, 3)
    await world.passes(30)
    again = await Consumer.of(world.broker, "work", member="bob")
    assert bodies(consumer) | bodies(again) == {1: body(1), 2: body(2), 3: body(3)}
    await world.broker.stop()
    world.check()


@pytest.mark.parametrize("batch", [5, 20])
async def test_only_the_messages_that_are_needed_are_carried(batch: int) -> None:
    world = await World.of()
    await unfinished(world, batch=batch)
    await world.passes(2)
    carried = world.broker.log.carried.by_topic[world.broker.catalogue.find("orders").number]
    assert [(row.base_offset, row.end_offset) for row in carried] == [(1, 3), (3, 4)]
    assert carried.bytes < 3 * (SIZE + 300)
    await world.broker.stop()


async def test_what_is_carried_outlives_the_segment_that_it_was_carried_into() -> None:
    world = await World.of()
    await unfinished(world)
    for _ in range(5):
        await world.passes(2)
        await world.publish(10, topic="noise")
    assert world.broker.log.segments[0].first_index > 30
    await world.crash()
    consumer = await Consumer.of(world.broker, "work")
    await consumer.got(1)
    assert bodies(consumer) == {3: body(3)}
    await world.broker.stop()
    world.check()


@pytest.mark.parametrize(
    "wish", [{"mode": "ordered"}, {"priorities": True}, {"key_rate": 1e6}, {"tenants": {}}]
)
async def test_groups_that_choose_get_what_was_carried(wish: dict[str, Any]) -> None:
    world = await World.of()
    await unfinished(world, **wish)
    await world.passes(2)
    await world.publish(2)
    consumer = await Consumer.of(world.broker, "work")
    # They have looked ahead at the whole backlog, so that is carried as well.
    assert sorted(await consumer.got(19)) == list(range(3, 22))
    assert bodies(consumer)[3] == body(3)
    await world.broker.stop()


async def test_a_backlog_that_is_dropped_is_said_and_not_counted_any_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = await World.of()
    await unfinished(world)
    await world.passes(2)
    # Segment by segment, as they go.
    for count in (14, 2):
        said = f"group 'work': {count} messages of topic 'orders' were dropped by retention"
        assert said in caplog.text
    found = (await world.group())["topics"][0]
    assert (found["backlog"], found["waiting"], found["ready"]) == (2, 1, 1)
    await world.broker.stop()


async def test_a_backlog_is_reported_before_retention_drops_it_and_after(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = await World.of()
    await unfinished(world)
    await world.passes(0.89)
    share = (await world.group())["topics"][0]
    assert (share["expiring"], share["expires_at_ms"], share["dropped"]) == (0, 0, 0)
    assert "may be dropped" not in caplog.text
    await world.passes(0.02)
    share = (await world.group())["topics"][0]
    goes_at_ms = world.clock.now_ms() + HOUR_MS - round(0.91 * HOUR_MS)
    assert (share["expiring"], share["dropped"]) == (16, 0)
    assert goes_at_ms - 1_000 <= share["expires_at_ms"] <= goes_at_ms
    said = "group 'work': 16 messages of topic 'orders' may be dropped by retention within 6m"
    assert caplog.text.count(said) == 1, caplog.text
    assert (await world.ask("status"))["expiring"] == 16
    state = (await world.ask("message.state", topic="orders", offset=4))["groups"][0]
    assert (state["state"], state["expiring"]) == ("fresh", True)
    assert state["expires_at_ms"] == share["expires_at_ms"]
    # A retry and a dead letter are carried over: nothing is said of them.
    for offset in (1, 2, 3):
        state = (await world.ask("message.state", topic="orders", offset=offset))["groups"][0]
        assert "expiring" not in state
    await world.passes(2)
    share = (await world.group())["topics"][0]
    assert (share["expiring"], share["expires_at_ms"], share["dropped"]) == (0, 0, 16)
    status = await world.ask("status")
    assert (status["expiring"], status["dropped"]) == (0, 16)
    await world.broker.stop()


async def test_what_is_delivered_in_time_is_not_reported_any_more() -> None:
    world = await World.of()
    await unfinished(world)
    await world.passes(0.95)
    assert (await world.group())["topics"][0]["expiring"] == 16
    consumer = await Consumer.of(world.broker, "work", credit=11)
    await consumer.got(11)
    share = (await world.group())["topics"][0]
    assert share["expiring"] == share["end"] - 4 - 10
    await world.broker.stop()


@pytest.mark.parametrize("which", ["topic", "log"])
async def test_a_backlog_near_the_limit_of_its_size_is_reported(
    which: str, caplog: pytest.LogCaptureFixture
) -> None:
    # Segments of 64 KiB hold 6 messages each: nine tenths are passed before the limit is.
    limit = 30 * SIZE
    world = await World.of(retention_ms=0, retention_bytes=limit if which == "log" else 0)
    sized = {"retention_bytes": limit} if which == "topic" else {}
    await world.ask("topic.create", topic="orders", **sized)
    await world.ask("group.create", group="work", topics=["orders"])
    while True:
        await world.publish(1)
        await world.keep_house()
        share = (await world.group())["topics"][0]
        if share["expiring"] or world.first_offset:
            break
    assert 20 < share["end"] < 50
    assert (share["dropped"], world.first_offset, share["expires_at_ms"]) == (0, 0, 0)
    assert f"{share['expiring']} messages of topic 'orders' may be dropped by retention soon" in (
        caplog.text
    )
    await world.publish(20)
    await world.keep_house()
    share = (await world.group())["topics"][0]
    assert share["dropped"] == world.first_offset > 0
    await world.broker.stop()


async def test_what_a_topic_keeps_for_its_groups_is_not_reported() -> None:
    world = await World.of()
    await world.ask("topic.create", topic="orders", keep_unfinished=True)
    await world.ask("group.create", group="work", topics=["orders"])
    await world.publish(20)
    for hours in (0.95, 2):
        await world.passes(hours)
        assert (await world.group())["topics"][0]["expiring"] == 0
    await world.broker.stop()


async def test_readers_of_the_topic_do_not_see_what_is_carried() -> None:
    world = await World.of()
    await unfinished(world)
    await world.passes(2)
    operator = await Operator.of(world.broker)
    assert await operator.speaker.read("orders") == []
    described = await world.ask("topic.describe", topic="orders")
    assert (described["messages"], described["first_offset"]) == (0, 20)
    await world.broker.stop()


async def test_the_space_of_what_nobody_needs_any_more_comes_back() -> None:
    world = await World.of()
    await unfinished(world)
    await world.passes(2)
    await world.ask("group.delete", group="work")
    for _ in range(3):
        await world.publish(10, topic="noise")
        await world.passes(2)
    assert not world.broker.log.carried.by_topic
    await world.broker.stop()


async def test_deleting_a_topic_deletes_what_was_carried_of_it() -> None:
    world = await World.of()
    await unfinished(world)
    await world.passes(2)
    assert world.broker.log.carried.by_topic
    await world.ask("topic.delete", topic="orders")
    assert not world.broker.log.carried.by_topic
    await world.crash()
    assert not world.broker.log.carried.by_topic
    await world.broker.stop()


async def test_beyond_the_bound_the_oldest_are_given_up_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = await World.of(carry_bytes_max=5 * SIZE)
    await world.ask("group.create", group="work", topics=["orders"])
    for round_ in range(3):
        await world.publish(4)
        consumer = await Consumer.of(world.broker, "work", credit=4)
        await consumer.settle("reject", *(await consumer.got(4)), cause="bad")
        await consumer.leave()
        await world.passes(2)
        if not round_:
            assert "of 50000 (log.carry_bytes_max)" in caplog.text
            assert "given up by retention" not in caplog.text
    assert "dead letters of topic 'orders' were given up by retention" in caplog.text
    listed = await world.ask("dead.list", group="work")
    assert [letter["offset"] for letter in listed["dead"]] == [8, 9, 10, 11]
    assert (await world.ask("dead.redrive", group="work", all=True))["count"] == 4
    consumer = await Consumer.of(world.broker, "work")
    await consumer.got(4)
    assert sorted(bodies(consumer)) == [8, 9, 10, 11]
    await world.broker.stop()


async def test_dead_letters_are_purged_at_their_age() -> None:
    world = await World.of(dead_retention_ms=5 * HOUR_MS)
    await unfinished(world)
    await world.passes(4)
    assert (await world.group())["dead"] == 1
    await world.passes(2)
    assert (await world.group())["dead"] == 0
    await world.broker.stop()


async def test_a_message_that_a_member_holds_is_carried_and_comes_again() -> None:
    world = await World.of(retention_ms=1_000)
    await world.ask("group.create", group="work", topics=["orders"])
    await world.publish(20)
    consumer = await Consumer.of(world.broker, "work", credit=2)
    assert await consumer.got(2) == [0, 1]
    await world.passes(2_000 / HOUR_MS)
    assert world.first_offset == 20
    await consumer.settle("retry", 0, after_ms=1_000)
    await consumer.ack_offsets(1)
    consumer.speaker.transport.abort()
    await turns()
    await world.passes(2_000 / HOUR_MS)
    again = await Consumer.of(world.broker, "work", member="bob")
    await until(lambda: again.offsets)
    assert bodies(again) == {0: body(0)}
    await world.broker.stop()


async def test_a_topic_can_keep_whatever_any_group_has_not_finished() -> None:
    world = await World.of()
    await world.ask("topic.create", topic="orders", keep_unfinished=True)
    for name in ("work", "slow"):
        await world.ask("group.create", group=name, topics=["orders"])
    await world.publish(30)
    await world.passes(2)
    assert world.first_offset == 0
    consumer = await Consumer.of(world.broker, "work")
    await consumer.got(30)
    await consumer.ack()
    await world.passes(2)
    assert world.first_offset == 0
    consumer = await Consumer.of(world.broker, "slow", credit=13)
    await consumer.got(13)
    await consumer.ack()
    await consumer.leave()
    await world.passes(2)
    assert 0 < world.first_offset <= 13
    assert (await world.group("slow"))["backlog"] == 17
    await world.ask("topic.change", topic="orders", keep_unfinished=False)
    await world.passes(2)
    assert world.first_offset == 30
    assert (await world.group("slow"))["backlog"] == 0
    await world.broker.stop()


async def test_a_redrive_says_what_is_gone() -> None:
    world = await World.of()
    await unfinished(world)
    await world.passes(2)
    world.broker.log.carried.by_topic.clear()  # as in a log of an older version
    reply = await world.ask("dead.redrive", group="work", all=True, dry_run=True)
    assert reply == {"count": 0, "gone": 1}
    reply = await world.ask("dead.purge", group="work", all=True)
    assert reply == {"count": 1, "gone": 0}
    await world.broker.stop()


async def test_what_is_carried_can_be_skipped_and_told_of() -> None:
    world = await World.of()
    await unfinished(world)
    await world.passes(2)
    state = await world.ask("message.state", topic="orders", offset=1)
    assert (state["stored"], state["carried"], state["groups"][0]["state"]) == (
        False, True, "waiting",
    )  # fmt: skip
    gone = await world.ask("message.state", topic="orders", offset=0)
    assert (gone["stored"], gone["carried"]) == (False, False)
    reply = await world.ask("group.skip", group="work", topic="orders", ranges=[[1, 2]])
    assert reply["count"] == 1
    assert (await world.group())["backlog"] == 1
    await world.broker.stop()


async def test_a_backlog_that_nobody_was_given_is_still_that_after_a_restart() -> None:
    world = await World.of()
    await unfinished(world)
    await world.broker.stop()
    # Members may re-claim what they held for a while: all that is unfinished is reserved for that.
    groups = GroupSettings(reclaim_ms=1_000)
    settings = settings_with(log={"retention_ms": HOUR_MS}, groups=groups)
    world.broker = await open_broker(world.disk, clock=world.clock, settings=settings)
    share = (await world.group())["topics"][0]
    assert (share["reserved"], share["expiring"]) == (17, 0)
    await world.passes(0.95)
    # The one that was given back was never settled: the log does not know of it.
    share = (await world.group())["topics"][0]
    assert (share["reserved"], share["expiring"]) == (0, 17)
    await world.passes(2)
    share = (await world.group())["topics"][0]
    assert (share["backlog"], share["dropped"]) == (1, 17)
    await world.broker.stop()
