"""Groups for people and programs: each answer is durable, each mistake has its code."""

import asyncio
from random import Random
from typing import Any

import msgspec
import pytest

from onward.broker.group_ranges import ROW_RANGES_MAX, rows_of
from onward.errors import AlreadyExists, DiskFull, UnknownGroup
from onward.protocol.deliveries import more_frame
from onward.protocol.frames import Kind
from onward.testing.clock import START_MS, ManualClock
from onward.testing.disk import FaultyDisk

from .asking import Consumer, Operator, until
from .speaking import HeldCommit, open_broker, turns

# --- what a group is ---------------------------------------------------------------------------


async def test_a_group_is_as_it_was_created() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 3)
    wish = {"mode": "ordered", "lease_ms": 5_000, "retry": {"kind": "fixed", "attempts_max": 5}}
    created = await operator.ask("group.create", group="billing", topics=["orders"], wish=wish)
    assert created == await operator.ask("group.describe", group="billing")
    assert (created["mode"], created["lease_ms"]) == ("ordered", 5_000)
    assert (created["retry"]["kind"], created["retry"]["attempts_max"]) == ("fixed", 5)
    assert (created["backlog"], created["created_at_ms"]) == (3, START_MS)
    await broker.stop()


async def test_a_group_that_is_created_begins_with_its_topics_at_its_start() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 7)
    wish = {"start": "latest"}
    group = await operator.ask(
        "group.create", group="billing", topics=["orders", "refunds", "orders"], wish=wish
    )
    cursors = {topic["topic"]: topic["cursor"] for topic in group["topics"]}
    assert cursors == {"orders": 7, "refunds": 0}
    await broker.stop()


async def test_a_topic_that_nobody_used_comes_to_be_with_the_group_that_names_it() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.ask("group.create", group="billing", topics=["orders"])
    assert (await operator.ask("topic.describe", topic="orders"))["messages"] == 0
    await operator.ask("group.change", group="billing", topics_add=["refunds"])
    assert (await operator.ask("topic.describe", topic="refunds"))["messages"] == 0
    await broker.stop()


async def test_of_two_creations_at_the_same_time_one_is_told_that_the_group_exists() -> None:
    broker = await open_broker()
    first, second = await Operator.of(broker), await Operator.of(broker)
    ids = [one.say("group.create", group="g", topics=["orders"]) for one in (first, second)]
    answers = await asyncio.gather(
        first.answer(ids[0]), second.answer(ids[1]), return_exceptions=True
    )
    assert [type(one) for one in answers] in ([dict, AlreadyExists], [AlreadyExists, dict])
    await broker.stop()


async def test_requests_that_follow_each_other_without_waiting_build_on_each_other() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 3)
    ids = [
        operator.say("group.create", group="g", topics=["orders"]),
        operator.say("group.change", group="g", wish={"lease_ms": 5_000}),
        operator.say("group.pause", group="g"),
        operator.say("group.describe", group="g"),
    ]
    *_, group = [await operator.answer(request_id) for request_id in ids]
    assert (group["lease_ms"], group["paused"], group["backlog"]) == (5_000, True, 3)
    await broker.stop()


async def test_a_change_changes_what_it_names_and_leaves_the_rest() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    wish = {"lease_ms": 5_000, "key_rate": 2.5}
    await operator.ask("group.create", group="billing", topics=["orders"], wish=wish)
    await operator.ask("group.pause", group="billing")
    changed = await operator.ask("group.change", group="billing", wish={"lease_ms": 7_000})
    assert (changed["lease_ms"], changed["key_rate"], changed["paused"]) == (7_000, 2.5, True)
    await broker.stop()


async def test_changes_of_a_group_at_the_same_time_are_all_made() -> None:
    broker = await open_broker(commit=HeldCommit)
    operator = await Operator.of(broker)
    creation = operator.say("group.create", group="g", topics=["orders"])
    await released(broker, lambda: operator.speaker.of(creation))
    ids = [
        operator.say("group.pause", group="g"),
        operator.say("group.member", group="g", member="ann", offline=True),
        operator.say("group.change", group="g", wish={"lease_ms": 9_000}),
        operator.say("group.member", group="g", member="bob", offline=True),
    ]
    await turns()
    assert not any(operator.speaker.of(one) for one in ids), "nothing is answered before the disk"
    await released(broker, lambda: all(operator.speaker.of(one) for one in ids))
    group = await operator.ask("group.describe", group="g")
    assert (group["paused"], group["offline"], group["lease_ms"]) == (True, ["ann", "bob"], 9_000)
    await broker.stop()


async def released(broker: Any, condition: Any) -> None:
    """Perform commits until something holds."""

    def holds() -> bool:
        if not condition() and broker._commit.held:
            broker._commit.release()
        return bool(condition())

    await until(holds)


async def refused(broker: Any, condition: Any) -> None:
    """Refuse commits, whoever's they are, until something holds."""

    def holds() -> bool:
        if not condition() and broker._commit.held:
            broker._commit.held.pop(0)[2](DiskFull("the disk is full"))
        return bool(condition())

    await until(holds)


async def test_a_group_survives_the_death_of_its_broker_as_it_was_answered() -> None:
    disk = FaultyDisk(Random(1))
    broker = await open_broker(disk)
    operator = await Operator.of(broker)
    await operator.publish("orders", 10)
    await operator.ask("group.create", group="billing", topics=["orders"])
    await operator.ask("group.skip", group="billing", topic="orders", ranges=[[2, 4]])
    before = await operator.ask("group.pause", group="billing")
    broker.fail(RuntimeError("killed by the test"))
    disk.crash(unsynced="lost")
    broker = await open_broker(disk)
    operator = await Operator.of(broker)
    after = await operator.ask("group.describe", group="billing")
    assert after == before
    assert (after["backlog"], after["paused"]) == (8, True)
    await broker.stop()


async def test_a_deleted_group_is_unknown_and_its_members_are_told() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders")
    consumer = await Consumer.of(broker, "billing")
    assert await operator.ask("group.delete", group="billing") == {"group": "billing"}
    await until(lambda: consumer.end)
    assert consumer.end == UnknownGroup.code
    assert await operator.code("group.describe", group="billing") == UnknownGroup.code
    await broker.stop()


async def test_a_paused_group_gets_nothing_until_it_is_resumed() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.ask("group.create", group="billing", topics=["orders"])
    await operator.ask("group.pause", group="billing")
    consumer = await Consumer.of(broker, "billing")
    await operator.publish("orders", 3)
    await turns()
    assert consumer.offsets == []
    await operator.ask("group.resume", group="billing")
    assert await consumer.got(3) == [0, 1, 2]
    await broker.stop()


async def test_a_member_that_is_offline_is_ended_and_cannot_join_until_it_may_again() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 3)
    consumer = await Consumer.of(broker, "billing", member="ann")
    await consumer.got(3)
    await operator.ask("group.member", group="billing", member="ann", offline=True)
    await until(lambda: consumer.end)
    other = await Consumer.of(broker, "billing", member="bob")
    assert await other.got(3) == [0, 1, 2], "what it held comes to others"
    refused = await Consumer.of(broker, "billing", member="ann")
    assert [kind for kind, _ in refused.speaker.of(refused.id)] == [Kind.ERROR]
    await operator.ask("group.member", group="billing", member="ann", offline=False)
    again = await Consumer.of(broker, "billing", member="ann")
    assert [kind for kind, _ in again.speaker.of(again.id)] == [Kind.REPLY]
    await broker.stop()


async def test_the_mode_of_a_group_does_not_change_under_its_members() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    consumer = await Consumer.of(broker, "billing")
    change: dict[str, Any] = {"group": "billing", "wish": {"mode": "exclusive"}}
    assert await operator.code("group.change", **change) == "conflict"
    await consumer.leave()
    assert (await operator.ask("group.change", **change))["mode"] == "exclusive"
    await broker.stop()


async def test_groups_are_listed_in_pages_in_the_order_of_their_names() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    for name in ("d", "b", "a", "c"):
        topics = ["orders"] if name in "ab" else ["refunds"]
        await operator.ask("group.create", group=name, topics=topics)
    first = await operator.ask("group.list", limit=3)
    assert [one["group"] for one in first["groups"]] == ["a", "b", "c"]
    assert (first["next"], first["count"]) == ("c", 4)
    rest = await operator.ask("group.list", limit=3, after=first["next"])
    assert ([one["group"] for one in rest["groups"]], rest["next"]) == (["d"], "")
    of_topic = await operator.ask("group.list", topic="orders")
    assert [one["group"] for one in of_topic["groups"]] == ["a", "b"]
    await broker.stop()


async def test_a_page_of_groups_with_many_topics_is_short() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    topics = [f"t{number}" for number in range(600)]
    for name in ("a", "b", "c"):
        await operator.ask("group.create", group=name, topics=topics)
    first = await operator.ask("group.list")
    assert ([one["group"] for one in first["groups"]], first["next"]) == (["a"], "a")
    await broker.stop()


@pytest.mark.parametrize(
    ("op", "fields", "code"),
    [
        ("group.create", {"group": "a b", "topics": ["orders"]}, "invalid_name"),
        ("group.create", {"group": "g", "topics": []}, "invalid_request"),
        ("group.create", {"group": "g", "topics": ["a b"]}, "invalid_name"),
        ("group.create", {"group": "g", "topics": ["t"] * 1_001}, "invalid_request"),
        ("group.create", {"group": "g", "topics": ["orders"], "wish": {"lease_ms": 5}},
         "invalid_request"),
        ("group.create", {"group": "g", "topics": ["orders"], "wish": {"mode": "odd"}},
         "invalid_request"),
        ("group.create", {"group": "billing", "topics": ["orders"]}, "already_exists"),
        ("group.change", {"group": "nobody"}, "unknown_group"),
        ("group.change", {"group": "billing", "wish": {"key_rate": -1}}, "invalid_request"),
        ("group.change", {"group": "billing", "wish": {"mode": "broadcast"}}, "invalid_request"),
        ("group.delete", {"group": "nobody"}, "unknown_group"),
        ("group.describe", {"group": "nobody"}, "unknown_group"),
        ("group.pause", {"group": "nobody"}, "unknown_group"),
        ("group.pause", {"group": "all"}, "invalid_request"),
        ("group.resume", {"group": "nobody"}, "unknown_group"),
        ("group.resume", {"group": "all"}, "invalid_request"),
        ("group.list", {"limit": 0}, "invalid_request"),
        ("group.list", {"topic": "nothing"}, "unknown_topic"),
        ("group.member", {"group": "billing", "member": "", "offline": True}, "invalid_name"),
        ("group.member", {"group": "billing", "member": "a\nb", "offline": True}, "invalid_name"),
        ("group.member", {"group": "billing", "member": "ann"}, "invalid_request"),
        ("group.reset", {"group": "nobody", "to": "earliest"}, "unknown_group"),
        ("group.reset", {"group": "billing", "to": "yesterday"}, "invalid_request"),
        ("group.reset", {"group": "billing", "to": {"offset": 11}}, "offset_out_of_range"),
        ("group.reset", {"group": "billing", "to": {"offset": 1, "time_ms": 1}}, "invalid_request"),
        ("group.reset", {"group": "billing", "to": "latest", "topic": "nothing"}, "unknown_topic"),
        ("group.reset", {"group": "billing", "to": "latest", "topic": "other"}, "invalid_request"),
        ("group.reset", {"group": "all", "to": "latest"}, "invalid_request"),
        ("group.skip", {"group": "billing", "topic": "orders", "ranges": [[4, 4]]},
         "invalid_request"),
        ("group.skip", {"group": "billing", "topic": "orders", "ranges": [[10, 12]]},
         "offset_out_of_range"),
        ("group.skip", {"group": "billing", "topic": "orders", "ranges": [[0, 1]] * 10_001},
         "invalid_request"),
        ("group.skip", {"group": "billing", "topic": "orders", "ranges": [[-1, 1]]},
         "invalid_request"),
        ("group.replay", {"group": "billing", "topic": "orders"}, "invalid_request"),
        ("group.replay", {"group": "billing", "topic": "orders", "ranges": [[0, 1]], "to_ms": 5},
         "invalid_request"),
        ("group.replay", {"group": "billing", "topic": "orders", "from_ms": 5, "to_ms": 5},
         "invalid_request"),
        ("group.fork", {"group": "nobody", "to": "copy"}, "unknown_group"),
        ("group.fork", {"group": "billing", "to": "all"}, "already_exists"),
        ("group.fork", {"group": "billing", "to": "../x"}, "invalid_name"),
        ("group.peek", {"group": "billing", "topic": "orders", "limit": 10_001}, "invalid_request"),
        ("group.peek", {"group": "all", "topic": "orders"}, "invalid_request"),
        ("dead.list", {"group": "nobody"}, "unknown_group"),
        ("dead.list", {"group": "billing", "after": ["orders"]}, "invalid_request"),
        ("dead.redrive", {"group": "billing"}, "invalid_request"),
        ("dead.redrive", {"group": "billing", "ranges": [[0, 1]]}, "invalid_request"),
        ("dead.purge", {"group": "billing", "topic": "orders", "ranges": [], "all": True},
         "invalid_request"),
        ("position.set", {"group": "billing", "member": "ann", "topic": "orders", "offset": 1},
         "invalid_request"),
        ("position.set", {"group": "all", "member": "ann", "topic": "orders", "offset": 11},
         "offset_out_of_range"),
        ("message.state", {"topic": "nothing", "offset": 0}, "unknown_topic"),
        ("message.state", {"topic": "orders", "offset": 10}, "offset_out_of_range"),
        ("message.state", {"topic": "orders", "offset": -1}, "invalid_request"),
    ],
)  # fmt: skip
async def test_each_mistake_has_its_code(op: str, fields: dict[str, Any], code: str) -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 10)
    await operator.publish("other", 1)
    await operator.ask("group.create", group="billing", topics=["orders"])
    await operator.ask("group.create", group="all", topics=["orders"], wish={"mode": "broadcast"})
    assert await operator.code(op, **fields) == code
    assert not operator.speaker.is_lost
    await broker.stop()


# --- moving ------------------------------------------------------------------------------------


async def test_a_reset_delivers_again_from_its_offset_on() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 10)
    consumer = await Consumer.of(broker, "billing")
    await consumer.got(10)
    await consumer.ack()
    reply = await operator.ask("group.reset", group="billing", to={"offset": 6}, topic="orders")
    assert reply["count"] == 4
    assert reply["topics"] == [{"topic": "orders", "offset": 6, "backlog": 4}]
    assert (await consumer.got(14))[10:] == [6, 7, 8, 9]
    await broker.stop()


async def test_a_reset_voids_what_members_hold() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 4)
    consumer = await Consumer.of(broker, "billing", credit=4)
    await consumer.got(4)
    old = consumer.rows
    await operator.ask("group.reset", group="billing", to="earliest")
    assert await consumer.ack(old) == old, "an ack of before means nothing"
    assert (await operator.ask("group.describe", group="billing"))["backlog"] == 4
    await broker.stop()


async def test_an_ack_that_comes_while_a_reset_is_on_its_way_does_not_outlive_it() -> None:
    broker = await open_broker(commit=HeldCommit)
    operator = await Operator.of(broker)
    published = operator.speaker.say_publish("orders", [b"a", b"b"])
    await released(broker, lambda: operator.speaker.of(published))
    joining = asyncio.ensure_future(Consumer.of(broker, "billing", credit=2))
    await released(broker, joining.done)
    consumer = joining.result()
    await consumer.got(2)
    reset = operator.say("group.reset", group="billing", to="earliest")
    await turns()
    assert await consumer.ack() == consumer.rows
    await released(broker, lambda: operator.speaker.of(reset))
    assert (await operator.ask("group.describe", group="billing"))["backlog"] == 2
    await broker.stop()


async def test_a_reset_by_time_begins_with_the_first_message_of_that_time() -> None:
    clock = ManualClock()
    broker = await open_broker(clock=clock)
    operator = await Operator.of(broker)
    for _ in range(3):
        await operator.publish("orders", 2)
        clock.advance(1_000)
    await operator.ask("group.create", group="g", topics=["orders"], wish={"start": "latest"})
    reply = await operator.ask("group.reset", group="g", to={"time_ms": START_MS + 1_000})
    assert reply["topics"][0]["offset"] == 2
    await broker.stop()


async def test_a_reset_of_a_group_moves_all_of_its_topics() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 3)
    await operator.publish("refunds", 2)
    await operator.ask("group.create", group="g", topics=["orders", "refunds"])
    assert (await operator.ask("group.reset", group="g", to="latest"))["count"] == 0
    assert (await operator.ask("group.describe", group="g"))["backlog"] == 0
    assert (await operator.ask("group.reset", group="g", to="earliest"))["count"] == 5
    assert (await operator.ask("group.describe", group="g"))["backlog"] == 5
    await broker.stop()


async def test_a_dry_run_counts_and_changes_nothing() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 10)
    consumer = await Consumer.of(broker, "g")
    await consumer.got(10)
    await consumer.ack_offsets(0, 1, 2)
    await consumer.settle("reject", 3, cause="no")
    before = await operator.ask("group.describe", group="g")
    where = {"group": "g", "topic": "orders", "dry_run": True}
    asked: list[tuple[str, dict[str, Any], int]] = [
        ("group.reset", {"to": "earliest"}, 10),
        ("group.skip", {"ranges": [[0, 6]]}, 2),
        ("group.replay", {"ranges": [[0, 6]]}, 3),
        ("dead.redrive", {"all": True}, 1),
        ("dead.purge", {"ranges": [[0, 9]]}, 1),
    ]
    for op, fields, count in asked:
        assert (await operator.ask(op, **where, **fields))["count"] == count
    assert await operator.ask("group.describe", group="g") == before
    await broker.stop()


async def test_what_is_skipped_is_finished_and_taken_from_who_holds_it() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 10)
    consumer = await Consumer.of(broker, "g", credit=6)
    await consumer.got(6)
    delivery = consumer.rows[0][0]
    reply = await operator.ask("group.skip", group="g", topic="orders", ranges=[[4, 8]])
    assert reply["count"] == 4
    assert await consumer.ack([(delivery, 0, 6)]) == [(delivery, 4, 6)]
    share = (await operator.ask("group.describe", group="g"))["topics"][0]
    assert (share["cursor"], share["backlog"], share["leased"]) == (8, 2, 0)
    await broker.stop()


@pytest.mark.parametrize("wish", [{}, {"mode": "ordered"}, {"filter": {"tags_any": ["x"]}}])
async def test_a_purge_finishes_what_is_ready_and_leaves_what_is_leased_or_retrying(
    wish: dict[str, Any],
) -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 10, keys=list("abcdefghij"), tags=["x"] * 10)
    consumer = await Consumer.of(broker, "g", credit=4, wish=wish)
    await consumer.got(4)
    await consumer.settle("retry", 0, after_ms=60_000)
    for dry_run in (True, False):
        reply = await operator.ask("group.purge", group="g", dry_run=dry_run)
        assert reply == {"count": 6}
    share = (await operator.ask("group.describe", group="g"))["topics"][0]
    counts = [share[name] for name in ("ready", "waiting", "leased", "backlog")]
    assert counts == [0, 1, 3, 4]
    await consumer.ack_offsets(1, 2, 3)
    await operator.publish("orders", 2, keys=list("kl"), tags=["x"] * 2)
    consumer.speaker.transport.write(more_frame(consumer.id, 100))
    assert (await consumer.got(6))[4:] == [10, 11]
    assert (await operator.ask("group.purge", group="g", topic="orders"))["count"] == 0
    await broker.stop()


async def test_a_purge_does_not_touch_what_is_just_being_settled() -> None:
    broker = await open_broker(commit=HeldCommit)
    operator = await Operator.of(broker)
    published = operator.speaker.say_publish("orders", [b"x"] * 6)
    await released(broker, lambda: operator.speaker.of(published))
    joining = asyncio.ensure_future(Consumer.of(broker, "g", credit=4))
    await released(broker, joining.done)
    consumer = joining.result()
    await consumer.got(4)
    retried = asyncio.ensure_future(consumer.settle("retry", 0, after_ms=60_000))
    acked = asyncio.ensure_future(consumer.ack_offsets(1))
    await turns()
    purged = operator.say("group.purge", group="g")
    await released(broker, lambda: operator.speaker.of(purged) and retried.done() and acked.done())
    assert (await operator.answer(purged))["count"] == 2
    share = (await operator.ask("group.describe", group="g"))["topics"][0]
    assert [share[name] for name in ("ready", "waiting", "leased")] == [0, 1, 2]
    stopping = asyncio.ensure_future(broker.stop())
    await released(broker, stopping.done)


async def test_a_purge_is_of_one_topic_or_all_and_survives_the_death_of_its_broker() -> None:
    disk = FaultyDisk(Random(1))
    broker = await open_broker(disk)
    operator = await Operator.of(broker)
    for topic in ("a", "b", "c"):
        await operator.publish(topic, 5)
    await operator.ask("group.create", group="g", topics=["a", "b", "c"])
    assert (await operator.ask("group.purge", group="g", topic="a"))["count"] == 5
    assert (await operator.ask("group.describe", group="g"))["backlog"] == 10
    assert (await operator.ask("group.purge", group="g"))["count"] == 10
    broker.fail(RuntimeError("killed by the test"))
    disk.crash(unsynced="lost")
    broker = await open_broker(disk)
    operator = await Operator.of(broker)
    assert (await operator.ask("group.describe", group="g"))["backlog"] == 0
    assert await operator.code("group.purge", group="g", topic="nowhere") == "unknown_topic"
    assert await operator.code("group.purge", group="nobody") == "unknown_group"
    await broker.stop()


async def test_a_replay_delivers_what_is_finished_and_leaves_the_rest_alone() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 6)
    consumer = await Consumer.of(broker, "g", credit=100)
    await consumer.got(6)
    await consumer.ack_offsets(0, 1, 2)
    await consumer.settle("reject", 3, cause="no")
    reply = await operator.ask("group.replay", group="g", topic="orders", ranges=[[1, 99]])
    assert reply["count"] == 2
    assert (await consumer.got(8))[6:] == [1, 2]
    assert await consumer.ack_offsets(4, 5) == [], "what it held, it still holds"
    assert (await operator.ask("group.describe", group="g"))["dead"] == 1
    await broker.stop()


async def test_a_replay_of_a_window_takes_what_was_published_in_it() -> None:
    clock = ManualClock()
    broker = await open_broker(clock=clock)
    operator = await Operator.of(broker)
    for _ in range(4):
        await operator.publish("orders", 2)
        clock.advance(1_000)
    await operator.ask("group.create", group="g", topics=["orders"], wish={"start": "latest"})
    window = {"from_ms": START_MS + 1_000, "to_ms": START_MS + 3_000}
    assert (await operator.ask("group.replay", group="g", topic="orders", **window))["count"] == 4
    peeked = await operator.ask("group.peek", group="g", topic="orders", limit=100)
    assert peeked == {"ranges": [[2, 6]], "count": 4}
    later = await operator.ask("group.replay", group="g", topic="orders", from_ms=START_MS + 9_000)
    assert later["count"] == 0
    await broker.stop()


async def test_a_fork_stands_where_its_source_stood_and_goes_its_own_way() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 6)
    consumer = await Consumer.of(broker, "g", credit=6)
    await consumer.got(6)
    await consumer.ack_offsets(0, 1, 4)
    await consumer.settle("reject", 5, cause="no")
    assert await operator.ask("group.fork", group="g", to="trial") == {"group": "trial"}
    fork = await operator.ask("group.describe", group="trial")
    assert (fork["backlog"], fork["dead"], fork["paused"], fork["members"]) == (2, 1, False, [])
    other = await Consumer.of(broker, "trial")
    assert await other.got(2) == [2, 3]
    await other.ack()
    assert (await operator.ask("group.describe", group="g"))["backlog"] == 2
    await broker.stop()


async def test_a_fork_of_a_paused_group_is_paused() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.ask("group.create", group="g", topics=["orders"])
    await operator.ask("group.pause", group="g")
    await operator.ask("group.fork", group="g", to="trial")
    assert (await operator.ask("group.describe", group="trial"))["paused"]
    await broker.stop()


async def test_a_peek_tells_what_comes_next_and_takes_nothing() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 10)
    consumer = await Consumer.of(broker, "g", credit=4)
    await consumer.got(4)
    await consumer.settle("retry", 1, after_ms=60_000)
    await consumer.leave()
    await operator.ask("group.skip", group="g", topic="orders", ranges=[[6, 8]])
    for _ in range(2):
        peeked = await operator.ask("group.peek", group="g", topic="orders", limit=6)
        assert peeked == {"ranges": [[0, 1], [2, 6], [8, 9]], "count": 6}
    await broker.stop()


async def test_a_peek_into_a_choosy_group_tells_what_nobody_holds() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 5, keys=["a", "a", "b", "b", "a"])
    consumer = await Consumer.of(broker, "g", wish={"mode": "ordered"})
    assert sorted(await consumer.got(2)) == [0, 2]
    peeked = await operator.ask("group.peek", group="g", topic="orders")
    assert peeked == {"ranges": [[1, 2], [3, 5]], "count": 3}
    await broker.stop()


async def test_a_member_that_joins_a_fork_while_it_is_made_gets_what_the_fork_has_left() -> None:
    broker = await open_broker(commit=HeldCommit)
    operator = await Operator.of(broker)
    ids = [operator.speaker.say_publish("orders", [b"x"] * 6)]
    await released(broker, lambda: operator.speaker.of(ids[0]))
    ids.append(operator.say("group.create", group="g", topics=["orders"]))
    await released(broker, lambda: operator.speaker.of(ids[1]))
    ids.append(operator.say("group.skip", group="g", topic="orders", ranges=[[0, 4]]))
    await released(broker, lambda: operator.speaker.of(ids[2]))
    ids.append(operator.say("group.fork", group="g", to="trial"))
    await released(broker, lambda: "trial" in broker.consuming.groups.by_name)
    joining = asyncio.ensure_future(Consumer.of(broker, "trial"))
    await released(broker, lambda: joining.done() and operator.speaker.of(ids[3]))
    consumer = joining.result()
    assert await consumer.got(2) == [4, 5]
    await turns()
    assert consumer.offsets == [4, 5]
    await broker.stop()


async def test_a_move_with_many_ranges_is_several_rows() -> None:
    ranges = [(number * 2, number * 2 + 1) for number in range(ROW_RANGES_MAX + 1)]
    rows = rows_of("skipped", "g", "orders", ranges, at_ms=0)
    assert [len(row.ranges) for row in rows] == [ROW_RANGES_MAX, 1]
    assert [one for row in rows for one in row.ranges] == ranges


async def test_a_position_of_a_broadcast_group_is_kept_for_its_member() -> None:
    disk = FaultyDisk(Random(1))
    broker = await open_broker(disk)
    operator = await Operator.of(broker)
    await operator.publish("orders", 9)
    await operator.ask("group.create", group="all", topics=["orders"], wish={"mode": "broadcast"})
    place: dict[str, Any] = {"group": "all", "topic": "orders"}
    await operator.ask("position.set", member="ann", offset=4, **place)
    await operator.ask("position.set", member="bob", offset=9, **place)
    await operator.ask("position.set", member="ann", offset=2, **place)
    broker.fail(RuntimeError("killed by the test"))
    disk.crash(unsynced="lost")
    broker = await open_broker(disk)
    group = await (await Operator.of(broker)).ask("group.describe", group="all")
    assert [(one["member"], one["offset"]) for one in group["positions"]] == [
        ("ann", 2),
        ("bob", 9),
    ]
    await broker.stop()


async def joined(broker: Any, group: str, member: str) -> Any:
    """Join as a member, leave, and return what the broker said."""
    consumer = await Consumer.of(broker, group, member=member)
    (_, payload) = consumer.speaker.of(consumer.id)[0]
    await consumer.leave()
    return msgspec.json.decode(payload)


async def test_a_position_belongs_to_the_topic_that_it_was_stored_for() -> None:
    disk = FaultyDisk(Random(1))
    broker = await open_broker(disk)
    operator = await Operator.of(broker)
    await operator.publish("orders", 9)
    await operator.ask("group.create", group="all", topics=["orders"], wish={"mode": "broadcast"})
    old = (await operator.ask("topic.describe", topic="orders"))["number"]
    place: dict[str, Any] = {"group": "all", "topic": "orders", "member": "ann"}
    # The broker takes it while the topic is about to end: its row comes behind the end.
    ending = operator.say("topic.delete", topic="orders")
    moving = operator.say("position.set", offset=4, number=old, **place)
    await operator.answer(ending)
    await operator.answer(moving)
    await operator.publish("orders", 6)
    welcome = await joined(broker, "all", "ann")
    assert welcome["positions"] == {"orders": 6}
    assert welcome["numbers"]["orders"] != old
    assert await operator.code("position.set", offset=4, number=old, **place) == "topic_ended"
    await operator.ask("position.set", offset=5, number=welcome["numbers"]["orders"], **place)
    broker.fail(RuntimeError("killed by the test"))
    disk.crash(unsynced="lost")
    broker = await open_broker(disk)
    assert (await joined(broker, "all", "ann"))["positions"] == {"orders": 5}
    await broker.stop()


# --- dead letters ------------------------------------------------------------------------------


async def with_dead(broker: Any, operator: Operator) -> Consumer:
    """Return a member of `g` for which 2, 3 and 5 of orders and 1 of refunds are dead."""
    await operator.publish("orders", 6)
    consumer = await Consumer.of(broker, "g", member="ann")
    await consumer.got(6)
    await consumer.settle("reject", 2, 3, 5, cause="no such order")
    await consumer.ack_offsets(0, 1, 4)
    await operator.publish("refunds", 2)
    other = await Consumer.of(broker, "g", "refunds", member="bob")
    await other.got(2)
    await other.settle("reject", 1, cause="too late")
    await other.ack_offsets(0)
    await other.leave()
    return consumer


async def test_dead_letters_are_listed_in_pages_with_their_causes() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await with_dead(broker, operator)
    first = await operator.ask("dead.list", group="g", limit=2)
    assert [(one["topic"], one["offset"]) for one in first["dead"]] == [
        ("orders", 2),
        ("orders", 3),
    ]
    assert (first["next"], first["count"]) == (["orders", 3], 4)
    assert first["dead"][0] == {
        "topic": "orders", "offset": 2, "cause": "no such order", "attempts": 1, "member": "ann",
        "died_at_ms": START_MS,
    }  # fmt: skip
    rest = await operator.ask("dead.list", group="g", limit=2, after=first["next"])
    assert [(one["topic"], one["offset"]) for one in rest["dead"]] == [
        ("orders", 5), ("refunds", 1),
    ]  # fmt: skip
    assert rest["next"] is None
    one_topic = await operator.ask("dead.list", group="g", topic="refunds")
    assert [one["offset"] for one in one_topic["dead"]] == [1]
    await broker.stop()


async def test_chosen_dead_letters_are_redriven_to_their_group_alone() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    consumer = await with_dead(broker, operator)
    other = await Consumer.of(broker, "h", member="zoe")
    await other.got(6)
    where: dict[str, Any] = {"group": "g", "topic": "orders", "ranges": [[0, 4]]}
    assert (await operator.ask("dead.redrive", **where))["count"] == 2
    assert (await consumer.got(8))[6:] == [2, 3]
    assert (await operator.ask("dead.redrive", **where))["count"] == 0, "they are dead no more"
    assert (await operator.ask("group.describe", group="g"))["dead"] == 2
    assert len(other.offsets) == 6
    await broker.stop()


async def test_all_dead_letters_of_a_group_are_purged_or_those_of_one_topic() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await with_dead(broker, operator)
    purged = await operator.ask("dead.purge", group="g", topic="orders", all=True)
    assert purged["count"] == 3
    assert (await operator.ask("dead.purge", group="g", all=True))["count"] == 1
    group = await operator.ask("group.describe", group="g")
    assert (group["dead"], group["backlog"]) == (0, 0)
    await broker.stop()


async def test_dead_letters_whose_messages_are_gone_are_purged_but_not_redriven() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await with_dead(broker, operator)
    broker.catalogue.find("orders").first_offset = 4
    assert (await operator.ask("dead.redrive", group="g", topic="orders", all=True))["count"] == 1
    assert (await operator.ask("dead.purge", group="g", topic="orders", all=True))["count"] == 2
    await broker.stop()


# --- when the disk refuses ---------------------------------------------------------------------


@pytest.mark.parametrize("wish", [{}, {"mode": "ordered"}, {"filter": {"tags_any": ["x"]}}])
@pytest.mark.parametrize(
    ("op", "fields"),
    [
        ("group.reset", {"to": "earliest"}),
        ("group.skip", {"ranges": [[1, 8]]}),
        ("group.purge", {}),
    ],
)
async def test_a_move_that_cannot_be_written_changes_nothing(
    op: str, fields: dict[str, Any], wish: dict[str, Any]
) -> None:
    broker = await open_broker(commit=HeldCommit)
    operator = await Operator.of(broker)
    columns = {"keys": list("abcdefghij"), "tags": ["x"] * 10}
    bodies = [b"body"] * 10
    published = operator.speaker.say_publish("orders", bodies, **columns)
    await released(broker, lambda: operator.speaker.of(published))
    joining = asyncio.ensure_future(Consumer.of(broker, "g", credit=4, wish=wish))
    await released(broker, joining.done)
    consumer = joining.result()
    await consumer.got(4)
    asked = operator.say(op, group="g", topic="orders", **fields)
    answer = asyncio.ensure_future(operator.answer(asked))
    await refused(broker, answer.done)
    with pytest.raises(DiskFull):
        answer.result()
    share = (await operator.ask("group.describe", group="g"))["topics"][0]
    assert (share["cursor"], share["backlog"]) == (0, 10)
    consumer.speaker.transport.write(more_frame(consumer.id, 100))
    held = {"group.reset": 0, "group.skip": 1, "group.purge": 4}[op]
    await consumer.got(14 - held)
    await turns()
    again = sorted(consumer.offsets[4:])
    assert again == [offset for offset in range(10) if offset not in range(held)]
    stopping = asyncio.ensure_future(broker.stop())
    await released(broker, stopping.done)
