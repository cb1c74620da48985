"""Groups of pipelines: moved forward by offsets, and kept to one client at a time."""

from random import Random

import pytest

from onward.broker.broker import Broker
from onward.delivery.trace import Trace, decode_row
from onward.errors import Conflict, DiskFull
from onward.testing.disk import FaultyDisk

from .asking import Consumer, Operator, until
from .speaking import HeldCommit, open_broker, turns


async def rows(operator: Operator, did: str) -> list[Trace]:
    """Return the rows of the trace that say this."""
    found = [decode_row(body) for body in await operator.speaker.read("@trace")]
    return [row for row in found if row.did == did]


async def cursor(operator: Operator, group: str = "totals") -> int:
    described = await operator.ask("group.describe", group=group)
    (share,) = described["topics"]
    place: int = share["cursor"]
    return place


async def with_group(broker: Broker, mode: str = "shared", count: int = 10) -> Operator:
    operator = await Operator.of(broker)
    await operator.publish("orders", count)
    await operator.ask("group.create", group="totals", topics=["orders"], wish={"mode": mode})
    return operator


# --- advance -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["shared", "exclusive", "ordered"])
async def test_a_group_that_is_advanced_has_acked_all_below_the_offset(mode: str) -> None:
    broker = await open_broker()
    operator = await with_group(broker, mode)
    advance = {"group": "totals", "topic": "orders", "member": "spark totals"}
    assert await operator.ask("group.advance", to=4, **advance) == {"count": 4}
    assert await cursor(operator) == 4
    assert await operator.ask("group.advance", to=10, **advance) == {"count": 6}
    acked = await rows(operator, "acked")
    assert [(row.member, row.ranges) for row in acked] == [
        ("spark totals", ((0, 4),)), ("spark totals", ((4, 10),)),
    ]  # fmt: skip
    member = await Consumer.of(broker, "totals")
    await operator.publish("orders", 1)
    assert await member.got(1) == [10]
    await broker.stop()


async def test_a_group_is_never_moved_back_and_a_repeat_changes_nothing() -> None:
    broker = await open_broker()
    operator = await with_group(broker)
    advance = {"group": "totals", "topic": "orders", "member": "spark"}
    await operator.ask("group.advance", to=7, **advance)
    for to in (7, 3, 0):
        assert await operator.ask("group.advance", to=to, **advance) == {"count": 0}
    assert await cursor(operator) == 7
    assert len(await rows(operator, "acked")) == 1
    await broker.stop()


async def test_advances_at_the_same_time_ack_each_message_once() -> None:
    commits: list[HeldCommit] = []

    def held(log: object) -> HeldCommit:
        commits.append(HeldCommit(log))  # type: ignore[arg-type]
        return commits[0]

    broker = await open_broker(commit=held)
    operator = await Operator.of(broker)

    async def flow() -> None:
        while commits[0].held:
            commits[0].release()
            await turns()

    published = operator.speaker.say_publish("orders", [b"x"] * 10)
    created = operator.say("group.create", group="totals", topics=["orders"])
    await turns()
    await flow()
    assert operator.speaker.of(published)
    assert operator.speaker.of(created)
    asked = [
        operator.say("group.advance", group="totals", topic="orders", to=to, member="spark")
        for to in (3, 8, 8, 5)
    ]
    await turns()
    await flow()
    assert [(await operator.answer(one))["count"] for one in asked] == [3, 5, 0, 0]
    assert broker.consuming.find("totals").shares["orders"].cursor == 8
    await broker.stop()


async def test_what_members_hold_below_the_offset_is_void() -> None:
    broker = await open_broker()
    operator = await with_group(broker)
    member = await Consumer.of(broker, "totals")
    assert await member.got(10) == list(range(10))
    advance = {"group": "totals", "topic": "orders", "member": "spark"}
    assert await operator.ask("group.advance", to=6, **advance) == {"count": 6}
    refused = await member.ack()
    assert [(start, end) for _, start, end in refused] == [(0, 6)]
    assert await cursor(operator) == 10
    await broker.stop()


async def test_what_waits_for_a_retry_is_finished_and_dead_letters_stay_dead() -> None:
    broker = await open_broker()
    operator = await with_group(broker)
    member = await Consumer.of(broker, "totals")
    await member.got(10)
    await member.settle("retry", 1, after_ms=600_000)
    await member.settle("reject", 2, cause="bad")
    await operator.ask("group.advance", group="totals", topic="orders", to=10, member="spark")
    described = await operator.ask("group.describe", group="totals")
    assert (described["backlog"], described["dead"]) == (0, 1)
    assert described["topics"][0]["waiting"] == 0
    await broker.stop()


async def test_what_is_stored_no_more_is_skipped_and_not_acked() -> None:
    broker = await open_broker()
    operator = await with_group(broker)
    broker.catalogue.find("orders").first_offset = 4
    advance = {"group": "totals", "topic": "orders", "member": "spark"}
    assert await operator.ask("group.advance", to=6, **advance) == {"count": 2}
    assert await cursor(operator) == 6
    assert [row.ranges for row in await rows(operator, "skipped")] == [((0, 4),)]
    trace = broker.catalogue.find("@trace")
    assert trace.first_offset == 0
    assert [row.ranges for row in await rows(operator, "acked")] == [((4, 6),)]
    await broker.stop()


async def test_an_advance_survives_a_crash() -> None:
    disk = FaultyDisk(Random(1))
    broker = await open_broker(disk)
    operator = await with_group(broker)
    await operator.ask("group.advance", group="totals", topic="orders", to=6, member="spark")
    broker.fail(RuntimeError("the power was cut"))
    disk.crash(unsynced="lost")
    broker = await open_broker(disk)
    assert await cursor(await Operator.of(broker)) == 6
    await broker.stop()


async def test_an_advance_that_cannot_be_written_changes_nothing() -> None:
    broker = await open_broker()
    operator = await with_group(broker)
    broker.gate.is_stopping = True
    advance = {"group": "totals", "topic": "orders", "member": "spark"}
    assert await operator.code("group.advance", to=6, **advance) == "stopping"
    broker.gate.is_stopping = False
    assert await cursor(operator) == 0
    assert await operator.ask("group.advance", to=6, **advance) == {"count": 6}
    await broker.stop()


async def test_an_advance_that_the_disk_refuses_changes_nothing() -> None:
    broker = await open_broker(commit=HeldCommit)
    commit = broker._commit
    assert isinstance(commit, HeldCommit)
    operator = await Operator.of(broker)
    for op in ("publish", "create"):
        if op == "publish":
            operator.speaker.say_publish("orders", [b"x"] * 10)
        else:
            operator.say("group.create", group="totals", topics=["orders"])
        await turns()
        while commit.held:
            commit.release()
            await turns()
    asked = operator.say("group.advance", group="totals", topic="orders", to=6, member="spark")
    await turns()
    ((_, _, done),) = commit.held
    commit.held.clear()
    done(DiskFull("the disk is full"))
    await turns()
    with pytest.raises(DiskFull):
        await operator.answer(asked)
    assert broker.consuming.find("totals").shares["orders"].cursor == 0
    await broker.stop()


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"to": 11}, "offset_out_of_range"),
        ({"group": "others"}, "unknown_group"),
        ({"topic": "bills"}, "unknown_topic"),
        ({"topic": "refunds"}, "invalid_request"),
        ({"group": "all"}, "invalid_request"),
        ({"member": ""}, "invalid_name"),
        ({"to": -1}, "invalid_request"),
    ],
)
async def test_an_advance_that_makes_no_sense_is_refused(
    fields: dict[str, object], code: str
) -> None:
    broker = await open_broker()
    operator = await with_group(broker)
    await operator.publish("refunds", 1)
    wish = {"mode": "broadcast"}
    await operator.ask("group.create", group="all", topics=["orders"], wish=wish)
    advance = {"group": "totals", "topic": "orders", "to": 3, "member": "spark"}
    assert await operator.code("group.advance", **advance | fields) == code
    assert await cursor(operator) == 0
    await broker.stop()


# --- hold --------------------------------------------------------------------------------------


async def test_a_group_is_held_by_one_connection() -> None:
    broker = await open_broker()
    first, second = await with_group(broker), await Operator.of(broker)
    assert await first.ask("group.hold", group="totals", holder="query one") == {"group": "totals"}
    await first.ask("group.hold", group="totals", holder="query one")
    described = await second.ask("group.describe", group="totals")
    assert described["held_by"] == "query one"
    said = "group 'totals' is used by query one"
    with pytest.raises(Conflict, match=said):
        await second.ask("group.hold", group="totals", holder="query two")
    advance = {"group": "totals", "topic": "orders", "to": 3, "member": "spark"}
    with pytest.raises(Conflict, match=said):
        await second.ask("group.advance", **advance)
    assert await first.ask("group.advance", **advance) == {"count": 3}
    await broker.stop()


async def test_who_speaks_for_the_holders_member_advances_a_held_group() -> None:
    broker = await open_broker()
    first, second = await with_group(broker), await Operator.of(broker)
    await first.ask("group.hold", group="totals", holder="query one", member="spark")
    advance = {"group": "totals", "topic": "orders", "to": 2}
    assert await second.ask("group.advance", **advance, member="spark") == {"count": 2}
    with pytest.raises(Conflict, match="group 'totals' is used by query one"):
        await second.ask("group.advance", **advance, member="another")
    with pytest.raises(Conflict, match="group 'totals' is used by query one"):
        await second.ask("group.hold", group="totals", holder="query two", member="spark")
    await broker.stop()


async def test_a_hold_ends_with_its_connection() -> None:
    broker = await open_broker()
    first, second = await with_group(broker), await Operator.of(broker)
    await first.ask("group.hold", group="totals", holder="query one")
    first.speaker.transport.abort()
    await until(lambda: not broker.group_holds.holder_of("totals"))
    await second.ask("group.hold", group="totals", holder="query two")
    assert broker.group_holds.holder_of("totals") == "query two"
    await broker.stop()


async def test_nobody_joins_a_group_that_is_held_and_who_joined_is_not_pushed_out() -> None:
    broker = await open_broker()
    operator = await with_group(broker)
    await operator.ask("group.hold", group="totals", holder="query one")
    refused = await Consumer.of(broker, "totals")
    assert refused.speaker.end(refused.id) == "conflict"
    await operator.ask("group.create", group="others", topics=["orders"])
    member = await Consumer.of(broker, "others")
    with pytest.raises(Conflict, match="group 'others' has members, such as 'ann'"):
        await operator.ask("group.hold", group="others", holder="query one")
    await member.leave()
    await operator.ask("group.hold", group="others", holder="query one")
    await broker.stop()


async def test_a_client_that_is_back_before_its_old_connection_ended_takes_its_hold_over() -> None:
    broker = await open_broker()
    old, new = await with_group(broker), await Operator.of(broker)
    await old.ask("group.hold", group="totals", holder="query one", id=17)
    other = await Operator.of(broker)
    for one in (0, 18):
        assert await other.code("group.hold", group="totals", holder="two", id=one) == "conflict"
    await new.ask("group.hold", group="totals", holder="query one", id=17)
    advance = {"group": "totals", "topic": "orders", "to": 3, "member": "spark"}
    assert await old.code("group.advance", **advance) == "conflict"
    old.speaker.transport.abort()
    await turns()
    assert await new.ask("group.advance", **advance) == {"count": 3}
    assert await other.code("group.hold", group="totals", holder="two", id=18) == "conflict"
    await broker.stop()


async def test_a_group_that_is_deleted_is_held_by_nobody() -> None:
    broker = await open_broker()
    operator = await with_group(broker)
    await operator.ask("group.hold", group="totals", holder="query one")
    await operator.ask("group.delete", group="totals")
    await operator.ask("group.create", group="totals", topics=["orders"])
    other = await Operator.of(broker)
    await other.ask("group.hold", group="totals", holder="query two")
    assert broker.group_holds.holder_of("totals") == "query two"
    await broker.stop()


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"group": "others"}, "unknown_group"), ({"group": "all"}, "invalid_request"),
        ({"holder": ""}, "invalid_request"), ({"holder": "a\nb"}, "invalid_request"),
        ({"holder": "x" * 201}, "invalid_request"),
    ],
)  # fmt: skip
async def test_a_hold_that_makes_no_sense_is_refused(fields: dict[str, object], code: str) -> None:
    broker = await open_broker()
    operator = await with_group(broker)
    wish = {"mode": "broadcast"}
    await operator.ask("group.create", group="all", topics=["orders"], wish=wish)
    hold = {"group": "totals", "holder": "query one"}
    assert await operator.code("group.hold", **hold | fields) == code
    await broker.stop()
