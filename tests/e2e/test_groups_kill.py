"""kill -9 of members and of the broker: what a group knows afterwards."""

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import onward
from onward.protocol.operations.groups import GroupDescription

from .conftest import MakeBroker
from .members import PATIENCE_S, MemberProcess, check_nothing_after_its_ack
from .running import BrokerProcess, until
from .taking import events_of, life_of, publish, take

MakeMember = Callable[..., MemberProcess]


@pytest.fixture
def make_member(tmp_path: Path) -> Iterator[MakeMember]:
    """Start members as processes; what still runs at the end of a test is ended."""
    made: list[MemberProcess] = []

    def make(broker: BrokerProcess, **options: str) -> MemberProcess:
        made.append(MemberProcess(broker, folder=tmp_path, **options))  # type: ignore[arg-type]
        made[-1].start()
        return made[-1]

    yield make
    for member in made:
        member.end()


async def test_an_ack_that_was_confirmed_survives_the_death_of_the_broker(
    make_broker: MakeBroker,
) -> None:
    broker = make_broker(log_checkpoint_rows=20)
    await broker.start()
    open_offsets = set(range(200))
    for turn in range(4):
        async with broker.connect(timeout="60s") as mq:
            if not turn:
                await publish(mq, *map(str, range(200)))
            consumer = mq.consume("orders", group="billing")
            deliveries = await take(consumer, len(open_offsets))
            assert {one.offset for one in deliveries} == open_offsets
            assert {one.attempt for one in deliveries} == {1}, "a broker's death counts for nobody"
            confirmed = [one for one in deliveries if one.offset % 5 == turn]
            await asyncio.gather(*[one.ack() for one in confirmed])
            await broker.kill()
            open_offsets -= {one.offset for one in confirmed}
            await broker.start()
            assert (await mq.group("billing")).backlog == len(open_offsets)
            told = await life_of(mq, f"orders/{turn}", "billing")
            # Members of earlier turns released it when they left.
            ends = [event for event in events_of(told) if event[0] != "released"]
            assert (told.state, ends) == ("finished", [("acked", consumer.member)])
    assert open_offsets == set(range(4, 200, 5))


async def test_retries_and_dead_letters_survive_the_death_of_the_broker(
    make_broker: MakeBroker,
) -> None:
    broker = make_broker()
    await broker.start()
    async with broker.connect(timeout="60s") as mq:
        await publish(mq, "0", "1", "2")
        async with mq.consume(
            "orders", group="billing", member="ann", retry="fixed:0s:3"
        ) as consumer:
            a, b, c = await take(consumer, 3)
            await asyncio.gather(
                a.retry(cause="busy"), b.reject("wrong"), c.retry(after="1h", cause="closed")
            )
            await broker.kill()
    await broker.start()
    async with broker.connect(timeout="60s") as mq:
        group = await mq.group("billing")
        assert (group.backlog, group.dead, group.topics[0].waiting) == (2, 1, 1)
        (dead,) = [one async for one in mq.dead_letters("billing")]
        assert (dead.offset, dead.cause, dead.attempts, dead.member) == (1, "wrong", 1, "ann")
        async with mq.consume("orders", group="billing", member="bob") as consumer:
            (again,) = await take(consumer, 1)
            assert (again.offset, again.attempt) == (0, 2)
            await again.ack()
        lives = [await life_of(mq, f"orders/{offset}", "billing") for offset in range(3)]
        assert [(life.state, events_of(life)) for life in lives] == [
            ("finished", [("retried", "ann"), ("acked", "bob")]),
            ("dead", [("dead", "ann")]),
            ("waiting", [("retried", "ann")]),
        ]
        assert [life.events[-1].cause for life in lives] == ["", "wrong", "closed"]


async def test_groups_are_the_same_when_every_checkpoint_is_deleted(
    make_broker: MakeBroker,
) -> None:
    # Nothing is reserved after a start: how long that lasts would differ between the two looks.
    broker = make_broker(log_segment_bytes_max=1 << 18, log_checkpoint_rows=20, groups_reclaim_ms=0)
    await broker.start()
    async with broker.connect(timeout="60s") as mq:
        await make_many_groups(mq)
        await broker.restart()
        with_checkpoint = await state_of_groups(mq)
        await broker.kill()
        for path in broker.folder.iterdir():
            if path.suffix != ".log" and path.name != "lock":
                path.unlink()
        await broker.start()
        assert await state_of_groups(mq) == with_checkpoint
        groups = {group.group: group for group in with_checkpoint[0]}
        assert set(groups) == {"billing", "audit", "trial", "screens", "late"}
        assert groups["billing"].dead == 3
        assert groups["late"].backlog == 300
        assert [(one.member, one.topic, one.offset) for one in groups["screens"].positions] == [
            ("hall", "orders", 2)
        ]
        assert groups["audit"].paused


async def make_many_groups(mq: onward.Client) -> None:
    """Leave groups behind that have something of everything."""
    for _ in range(30):
        await mq.publish_many("orders", [str(number) for number in range(10)])
    async with mq.consume("orders", group="billing", retry="fixed:1h:5") as consumer:
        deliveries = await take(consumer, 200)
        for number, delivery in enumerate(deliveries):
            if number in (10, 20, 30):
                await delivery.reject(f"wrong {number}")
            elif number in (40, 50):
                await delivery.retry(cause="busy")
            elif number % 3:
                await delivery.ack()
    await mq.fork_group("billing", "trial")
    assert await mq.redrive("trial", topic="orders", offsets=[20]) == 1
    await mq.create_group("audit", "orders", start=100, tags="vip", lease="1m")
    await mq.pause_group("audit")
    await mq.skip("audit", "orders", range(100, 150))
    await mq.create_group("late", "orders", start="latest")
    await mq.reset_group("late", to="earliest")
    async with mq.consume(
        "orders", group="screens", mode="broadcast", member="hall", start="earliest"
    ) as hall:
        first, second = await take(hall, 2)
        await asyncio.gather(first.ack(), second.ack())
    await mq.create_group("gone", "orders")
    await mq.delete_group("gone")


async def state_of_groups(
    mq: onward.Client,
) -> tuple[list[GroupDescription], list[list[object]]]:
    groups = await mq.groups()
    with_dead = [group.group for group in groups if group.mode != "broadcast"]
    dead = [[one async for one in mq.dead_letters(name)] for name in with_dead]
    return groups, [list(letters) for letters in dead]


async def test_a_stand_by_takes_over_when_the_active_member_is_killed(
    make_broker: MakeBroker, make_member: MakeMember
) -> None:
    broker = make_broker()
    await broker.start()
    async with broker.connect(name="shop", timeout="60s") as mq:
        await publish(mq, "0", "1", "2", "3", "4")
        await mq.create_group("billing", "orders", mode="exclusive")
        active = make_member(broker, group="billing", topic="orders", member="ann", way="hold")
        await until(lambda: active.got_count() == 5, within_s=PATIENCE_S)
        standby = make_member(broker, group="billing", topic="orders", member="bob", way="each")
        await standby.until_joined()
        assert (active.states(), standby.states()) == (["active"], ["standby"])
        with pytest.raises(onward.Conflict, match="'ann' is active"):
            await mq.consume("orders", group="billing", refuse=True).join()
        told = await life_of(mq, "orders/0", "billing")
        assert (told.state, told.member, told.attempt) == ("leased", "ann", 1)
        assert standby.got() == [], "only one is active"
        active.kill()
        await publish(mq, "0", "1", "2")
        await standby.until_done(8)
        assert {(one.offset, one.attempt) for one in standby.got()} == {
            *[(offset, 2) for offset in range(5)], *[(offset, 1) for offset in range(5, 8)],
        }  # fmt: skip
        assert [one.member for one in (await mq.group("billing")).members] == ["bob"]
        life = await mq.explain("orders/0")
        assert life.published_by is not None
        assert (life.published_by.client, life.published_by.pid) == ("shop", os.getpid())
        assert life.published_by.host == socket.gethostname()
        told = await life_of(mq, "orders/0", "billing")
        assert (told.state, events_of(told)) == ("finished", [("lost", "ann"), ("acked", "bob")])


async def test_what_a_killed_member_had_started_comes_to_the_others_one_by_one(
    make_broker: MakeBroker, make_member: MakeMember
) -> None:
    broker = make_broker()
    await broker.start()
    async with broker.connect(timeout="60s") as mq:
        await publish(mq, *map(str, range(10)))
        # The lease is far longer than this test waits: it cannot be what gives them back.
        await mq.create_group("billing", "orders", lease="12h")
        dying = make_member(broker, group="billing", topic="orders", member="ann", way="hold")
        await until(lambda: dying.got_count() == 10, within_s=PATIENCE_S)
        dying.kill()
        async with mq.consume("orders", group="billing") as consumer:
            again = []
            for _ in range(10):
                again += await take(consumer, 1)
                assert await consumer.fetch(9, wait="1ms") == [], "it comes alone"
                await again[-1].ack()
            assert {(one.offset, one.attempt) for one in again} == {(n, 2) for n in range(10)}
        group = await mq.group("billing")
        assert (group.backlog, group.expired_leases) == (0, 0)


async def test_what_a_member_holds_that_hangs_comes_to_others_when_its_lease_ran_out(
    make_broker: MakeBroker, make_member: MakeMember
) -> None:
    broker = make_broker()
    await broker.start()
    async with broker.connect(timeout="60s") as mq:
        await publish(mq, "0", "1", "2")
        await mq.create_group("billing", "orders", lease="2s")
        hanging = make_member(broker, group="billing", topic="orders", member="ann", way="hold")
        await until(lambda: hanging.got_count() >= 3, within_s=PATIENCE_S)
        hanging.pause()
        other = make_member(broker, group="billing", topic="orders", member="bob", way="each")
        await other.until_done(3)
        assert (await mq.group("billing")).backlog == 0
        check_nothing_after_its_ack(other)
        for offset in range(3):
            told = events_of(await life_of(mq, f"orders/{offset}", "billing"))
            # More than once when it was the turn of the one that hangs again.
            assert {did for did, _ in told[:-1]} <= {"expired", "lost"}
            assert told[0] == ("expired", "ann")
            assert told[-1] == ("acked", "bob")
