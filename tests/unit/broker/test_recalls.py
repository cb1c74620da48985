"""Messages that wait unstarted at a busy member are asked back for one that is idle."""

from __future__ import annotations

from typing import Any

import pytest

from onward.broker.broker import Broker
from onward.broker.recalls import WAITED_MS_MIN
from onward.delivery.retry import death_pause_ms
from onward.protocol.deliveries import decode_joined, decode_recall, started_frame
from onward.protocol.frames import Kind
from onward.testing.clock import ManualClock

from .asking import Consumer, Operator, until
from .speaking import open_broker, turns


async def member_of(broker: Broker, member: str, **fields: Any) -> Consumer:
    """Return a member that reports what it starts, and can be asked for the rest."""
    return await Consumer.of(broker, "g", member=member, starts=True, recalls=True, **fields)


def recalls(consumer: Consumer) -> list[int]:
    """Return how many messages a member was asked for, each time."""
    frames = consumer.speaker.of(consumer.id)
    return [decode_recall(payload) for kind, payload in frames if kind == Kind.RECALL]


async def start(consumer: Consumer, *offsets: int) -> None:
    rows = [
        (delivery, one, one + 1)
        for one in offsets
        for delivery, first, end in consumer.rows
        if first <= one < end
    ]
    consumer.speaker.transport.write(started_frame(consumer.id, rows))
    await turns()


async def look(broker: Broker, clock: ManualClock, ms: int = WAITED_MS_MIN) -> None:
    """Let the broker look at its groups after a while."""
    clock.advance(ms)
    for crew in broker.consuming.crews.values():
        broker.consuming._recalls.look(crew)
    await turns()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def broker(clock: ManualClock) -> Broker:
    broker = await open_broker(clock=clock)
    await (await Operator.of(broker)).publish("orders", 6)
    return broker


async def test_what_waits_at_a_busy_member_goes_to_one_that_is_idle(
    broker: Broker, clock: ManualClock
) -> None:
    busy = await member_of(broker, "busy", credit=6)
    await busy.got(6)
    await start(busy, 0)
    idle = await member_of(broker, "idle")
    clock.advance(WAITED_MS_MIN)
    # By its own timer: nobody else tells the broker to look.
    await until(lambda: recalls(busy))
    assert recalls(busy) == [3], "an equal part of the five that wait stays"
    assert await busy.settle("release", 3, 4, 5) == []
    assert await idle.got(3) == [3, 4, 5]
    await start(idle, 3)
    await look(broker, clock)
    assert (recalls(busy), recalls(idle)) == ([3], []), "nobody is idle"
    await broker.stop()


async def test_a_member_is_told_whether_it_can_be_asked(broker: Broker) -> None:
    ann = await member_of(broker, "ann")
    bob = await Consumer.of(broker, "g", member="bob", recalls=True)
    (_, joined), *_ = ann.speaker.of(ann.id)
    assert decode_joined(joined).recalls
    (_, joined), *_ = bob.speaker.of(bob.id)
    assert not decode_joined(joined).recalls, "nobody knows what it has started"
    await broker.stop()


async def test_who_does_not_understand_a_recall_gets_none(
    broker: Broker, clock: ManualClock
) -> None:
    older = await Consumer.of(broker, "g", member="older", starts=True)
    await older.got(6)
    await member_of(broker, "idle")
    await look(broker, clock)
    assert recalls(older) == []
    await broker.stop()


async def test_what_has_just_come_is_not_asked_back(broker: Broker, clock: ManualClock) -> None:
    busy = await member_of(broker, "busy")
    await busy.got(6)
    await member_of(broker, "idle")
    await look(broker, clock, WAITED_MS_MIN - 1)
    assert recalls(busy) == []
    await look(broker, clock, 1)
    assert recalls(busy) == [3]
    await broker.stop()


async def test_no_more_is_asked_back_than_idle_members_have_credit_for(
    broker: Broker, clock: ManualClock
) -> None:
    busy = await member_of(broker, "busy", credit=6)
    await busy.got(6)
    await member_of(broker, "idle", credit=1)
    await member_of(broker, "another", credit=1)
    await look(broker, clock)
    assert recalls(busy) == [2]
    await broker.stop()


async def test_a_member_is_not_asked_again_before_it_was_heard(
    broker: Broker, clock: ManualClock
) -> None:
    busy = await member_of(broker, "busy", credit=6)
    await busy.got(6)
    await member_of(broker, "idle", credit=1)
    for _ in range(3):
        await look(broker, clock)
    assert recalls(busy) == [1]
    await start(busy, 0)
    await look(broker, clock)
    assert recalls(busy) == [1, 1]
    await broker.stop()


async def test_two_busy_members_do_not_send_a_message_to_and_fro(
    broker: Broker, clock: ManualClock
) -> None:
    ann = await member_of(broker, "ann")
    await ann.got(6)
    await start(ann, *range(5))
    bob = await member_of(broker, "bob")
    await look(broker, clock)
    assert recalls(ann) == [1]
    ann.speaker.say(Kind.MORE, ann.id, (-(2**31 - 1)).to_bytes(4, "little", signed=True))
    await ann.settle("release", 5)
    await bob.got(1)
    ann.speaker.say(Kind.MORE, ann.id, (100).to_bytes(4, "little", signed=True))
    await look(broker, clock)
    assert recalls(bob) == [], "ann has started nothing since, and would let it wait, too"
    await ann.ack_offsets(0)
    await look(broker, clock)
    assert recalls(bob) == [1]
    await broker.stop()


async def test_a_member_that_reports_nothing_is_idle_only_when_it_holds_nothing(
    broker: Broker, clock: ManualClock
) -> None:
    operator = await Operator.of(broker)
    busy = await member_of(broker, "busy", credit=6)
    await busy.got(6)
    older = await Consumer.of(broker, "g", member="older")
    await operator.publish("orders", 1)
    await older.got(1)
    await look(broker, clock)
    assert recalls(busy) == []
    await older.ack()
    await look(broker, clock)
    assert recalls(busy) == [3]
    await broker.stop()


async def test_only_topics_that_idle_members_consume_are_asked_back(
    broker: Broker, clock: ManualClock
) -> None:
    busy = await Consumer.of(
        broker, "g", "orders", "refunds", member="busy", starts=True, recalls=True
    )
    await busy.got(6)
    await Consumer.of(broker, "g", "refunds", member="idle", starts=True, recalls=True)
    await look(broker, clock)
    assert recalls(busy) == []
    await broker.stop()


@pytest.mark.parametrize("wish", [{"mode": "exclusive"}, {"key_rate": 5.0}])
async def test_some_groups_never_ask_anything_back(
    broker: Broker, clock: ManualClock, wish: dict[str, Any]
) -> None:
    busy = await member_of(broker, "busy", wish=wish)
    await busy.got(6)
    await member_of(broker, "idle", wish=wish)
    crew = broker.consuming.crews["g"]
    clock.advance(WAITED_MS_MIN)
    broker.consuming._serve(crew)
    assert crew.recall is None, "exclusive: in order; rates: a second delivery would count"
    await broker.stop()


async def test_a_paused_group_asks_nothing_back(broker: Broker, clock: ManualClock) -> None:
    operator = await Operator.of(broker)
    busy = await member_of(broker, "busy")
    await busy.got(6)
    await member_of(broker, "idle")
    await operator.ask("group.pause", group="g")
    await look(broker, clock)
    assert recalls(busy) == []
    await broker.stop()


async def test_a_member_that_has_a_suspect_keeps_it(broker: Broker, clock: ManualClock) -> None:
    dying = await member_of(broker, "dying")
    await dying.got(6)
    await start(dying, 0)
    dying.speaker.transport.abort()
    await turns()
    ann = await member_of(broker, "ann")
    await ann.got(5)
    await ann.ack()
    clock.advance(death_pause_ms(1))
    broker.consuming.serve_soon(broker.consuming.crews["g"])
    assert (await ann.got(6))[-1] == 0
    await member_of(broker, "idle")
    await look(broker, clock)
    assert recalls(ann) == []
    await broker.stop()


async def test_nothing_is_planned_for_one_member_or_where_nobody_waits(broker: Broker) -> None:
    alone = await member_of(broker, "alone")
    await alone.got(6)
    crew = broker.consuming.crews["g"]
    assert crew.recall is None
    full = await member_of(broker, "full", credit=0)
    alone.speaker.say(Kind.MORE, alone.id, (-(2**31 - 1)).to_bytes(4, "little", signed=True))
    await turns()
    broker.consuming._recalls.cancel(crew)
    broker.consuming._serve(crew)
    assert crew.recall is None, "nobody has credit"
    await full.leave()
    await broker.stop()


async def test_a_message_of_an_ordered_key_that_comes_back_is_still_the_first_of_its_key(
    clock: ManualClock,
) -> None:
    broker = await open_broker(clock=clock)
    operator = await Operator.of(broker)
    await operator.publish("orders", 6, keys=["a", "b", "c"] * 2)
    wish = {"mode": "ordered"}
    busy = await member_of(broker, "busy", wish=wish, credit=3)
    assert await busy.got(3) == [0, 1, 2]
    await start(busy, 0)
    idle = await member_of(broker, "idle", wish=wish)
    await turns()
    assert idle.offsets == []
    await look(broker, clock)
    assert recalls(busy) == [1]
    await busy.settle("release", 2)
    assert await idle.got(1) == [2], "5 has the same key, and stays behind it"
    await turns()
    assert idle.offsets == [2]
    await idle.ack_offsets(2)
    assert await idle.got(2) == [2, 5]
    await broker.stop()
