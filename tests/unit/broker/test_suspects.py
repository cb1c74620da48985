"""What a member had started when it died counts as an attempt, and comes again alone."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import msgspec
import pytest

from onward.broker.broker import Broker
from onward.broker.suspects import DRAIN_MS_MAX, TOGETHER_MAX
from onward.delivery.retry import death_pause_ms
from onward.log.memory_disk import MemoryDisk
from onward.protocol.deliveries import decode_delivery, decode_joined, started_frame
from onward.protocol.frames import Kind, frame
from onward.protocol.payloads import Hello
from onward.testing.clock import ManualClock

from .asking import Consumer, Operator, until
from .speaking import Speaker, open_broker, turns

LADDER = {"kind": "ladder", "steps_ms": [10_000, 60_000]}
"""Three deliveries."""


def attempts(consumer: Consumer) -> list[tuple[int, int]]:
    found = []
    for kind, payload in consumer.speaker.of(consumer.id):
        if kind == Kind.DELIVERY:
            for start, end, attempt, _ in decode_delivery(payload).grants:
                found += [(offset, attempt) for offset in range(start, end)]
    return found


async def member_of(broker: Broker, member: str, **fields: Any) -> Consumer:
    """Return a member that reports what it starts."""
    fields = {"wish": {"retry": LADDER}, "starts": True} | fields
    return await Consumer.of(broker, "g", member=member, **fields)


async def start(consumer: Consumer, *offsets: int) -> None:
    rows = [
        (delivery, one, one + 1)
        for one in offsets
        for delivery, first, end in consumer.rows
        if first <= one < end
    ]
    consumer.speaker.transport.write(started_frame(consumer.id, rows))
    await turns()


async def die(consumer: Consumer) -> None:
    consumer.speaker.transport.abort()
    await turns()


async def pass_time(broker: Broker, clock: ManualClock, ms: int) -> None:
    clock.advance(ms)
    broker.consuming.tick()
    for crew in broker.consuming.crews.values():
        broker.consuming.serve_soon(crew)
    await turns()


async def test_only_what_a_member_had_started_loses_an_attempt_when_it_dies() -> None:
    clock = ManualClock()
    broker = await open_broker(clock=clock)
    operator = await Operator.of(broker)
    await operator.publish("orders", 10)
    ann = await member_of(broker, "ann")
    await ann.got(10)
    await start(ann, 3)
    await die(ann)
    bob = await member_of(broker, "bob")
    assert await bob.got(9) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert {attempt for _, attempt in attempts(bob)} == {1}, "they were only fetched ahead"
    await broker.stop()


async def test_a_start_counts_though_a_write_to_the_killed_member_fails_before_it_is_read() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 2)
    loop = asyncio.get_running_loop()
    near, far = socket.socketpair()
    _, session = await loop.connect_accepted_socket(broker.session, near)
    far_transport, speaker = await loop.create_unix_connection(Speaker, sock=far)
    far_transport.write(speaker.connection.hello(Hello(1, client="ann")))
    ann = Consumer(speaker, speaker.new_id())
    wish = {"group": "g", "topics": ["orders"], "credit": 2, "wish": {"retry": LADDER}}
    payload = msgspec.json.encode(wish | {"starts": True})
    far_transport.write(frame(Kind.CONSUME, ann.id, payload))
    await until(lambda: ann.offsets == [0, 1])
    lease, first, _ = ann.rows[0]
    far.send(started_frame(ann.id, [(lease, first, first + 1)]))
    far.shutdown(socket.SHUT_RDWR)
    session.send(Kind.PONG, 0)
    await until(lambda: session not in broker.sessions)
    far_transport.abort()
    bob = await member_of(broker, "bob")
    assert await bob.got(1) == [1], "message 0 comes again after a pause"
    await broker.stop()


async def test_what_died_with_its_member_comes_again_alone_after_a_pause() -> None:
    clock = ManualClock()
    broker = await open_broker(clock=clock)
    operator = await Operator.of(broker)
    await operator.publish("orders", 4)
    ann = await member_of(broker, "ann")
    await ann.got(4)
    await start(ann, 0)
    await die(ann)
    bob = await member_of(broker, "bob")
    assert await bob.got(3) == [1, 2, 3]
    await pass_time(broker, clock, death_pause_ms(1) - 1)
    await bob.ack_offsets(1, 2)
    await turns()
    assert bob.offsets == [1, 2, 3], "the pause is not over"
    await pass_time(broker, clock, 1)
    assert bob.offsets == [1, 2, 3], "bob holds another message"
    await operator.publish("orders", 2)
    await turns()
    assert bob.offsets == [1, 2, 3], "bob gets nothing until it holds nothing"
    await bob.ack_offsets(3)
    await bob.got(4)
    assert attempts(bob)[3:] == [(0, 2)]
    await turns()
    assert len(bob.offsets) == 4, "bob gets nothing else until 0 is settled"
    await bob.ack_offsets(0)
    assert await bob.got(6) == [1, 2, 3, 0, 4, 5]
    await broker.stop()


async def test_a_member_that_is_idle_gets_it_while_others_go_on() -> None:
    clock = ManualClock()
    broker = await open_broker(clock=clock)
    operator = await Operator.of(broker)
    await operator.publish("orders", 2)
    ann = await member_of(broker, "ann")
    await ann.got(2)
    await start(ann, 0)
    await die(ann)
    busy = await member_of(broker, "busy")
    await busy.got(1)
    idle = await member_of(broker, "idle")
    await pass_time(broker, clock, death_pause_ms(1))
    assert await idle.got(1) == [0]
    await operator.publish("orders", 3)
    assert await busy.got(4) == [1, 2, 3, 4]
    assert idle.offsets == [0]
    await broker.stop()


@pytest.mark.parametrize("mode", ["shared", "ordered", "exclusive"])
@pytest.mark.parametrize("restarts", [False, True])
async def test_what_kills_its_process_is_dead_after_exactly_its_attempts(
    mode: str, restarts: bool
) -> None:
    clock = ManualClock()
    disk = MemoryDisk()
    broker = await open_broker(disk, clock=clock)
    operator = await Operator.of(broker)
    await operator.publish("orders", 5, keys=[f"k{number}" for number in range(5)])
    wish = {"retry": LADDER, "mode": mode}
    seen: list[tuple[int, int]] = []
    for attempt in (1, 2, 3):
        member = await member_of(broker, f"m{attempt}", wish=wish)
        if attempt > 1:
            await turns()
            seen += attempts(member)
            if member.rows:
                await member.ack()
            await pass_time(broker, clock, death_pause_ms(attempt - 1))
        await until(lambda: (0, attempt) in attempts(member))  # noqa: B023
        if attempt > 1:
            await turns()
            assert attempts(member)[-1] == (0, attempt), "nothing comes beside it"
        await start(member, 0)
        await die(member)
        if restarts:
            await broker.stop()
            broker = await open_broker(disk, clock=clock)
            operator = await Operator.of(broker)
    (dead,) = (await operator.ask("dead.list", group="g"))["dead"]
    assert (dead["offset"], dead["attempts"]) == (0, 3)
    assert dead["cause"] == "member 'm3' died with it alone, attempt 3 of 3"
    last = await member_of(broker, "last", wish=wish)
    await last.got(4 - len(seen))
    assert sorted([*seen, *attempts(last)]) == [(1, 1), (2, 1), (3, 1), (4, 1)]
    if mode == "exclusive":
        assert not seen, "nothing overtakes it"
    await broker.stop()


async def test_an_exclusive_group_goes_on_with_one_suspect_after_the_other() -> None:
    clock = ManualClock()
    broker = await open_broker(clock=clock)
    operator = await Operator.of(broker)
    await operator.publish("orders", 4)
    wish = {"retry": LADDER, "mode": "exclusive"}
    ann = await member_of(broker, "ann", wish=wish)
    bob = await member_of(broker, "bob", wish=wish)
    await ann.got(4)
    await start(ann, 0, 1, 2)
    await die(ann)
    await pass_time(broker, clock, death_pause_ms(1))
    for offset in range(4):
        assert await bob.got(offset + 1) == list(range(offset + 1))
        await turns()
        assert len(bob.offsets) == offset + 1
        await bob.ack_offsets(offset)
    await broker.stop()


async def test_suspects_do_not_wait_for_topics_that_their_member_does_not_consume() -> None:
    clock = ManualClock()
    broker = await open_broker(clock=clock)
    operator = await Operator.of(broker)
    await operator.publish("orders", 3)
    await operator.publish("invoices", 3)
    ann = await member_of(broker, "ann", topics=["orders", "invoices"], credit=0)
    bob = await member_of(broker, "bob", topics=["orders"])
    await bob.got(3)
    await start(bob, 0, 1, 2)
    await die(bob)
    await die(ann)
    cid = await member_of(broker, "cid", topics=["orders"])
    await pass_time(broker, clock, death_pause_ms(1))
    for offset in range(3):
        assert await cid.got(offset + 1) == list(range(offset + 1)), "one after the other"
        await cid.ack_offsets(offset)
    await broker.stop()


async def test_a_death_in_company_does_not_use_up_the_last_attempt() -> None:
    clock = ManualClock()
    broker = await open_broker(clock=clock)
    operator = await Operator.of(broker)
    await operator.publish("orders", 2)
    wish = {"retry": {"kind": "none"}}
    ann = await member_of(broker, "ann", wish=wish)
    await ann.got(2)
    await start(ann, 0, 1)
    await die(ann)
    bob = await member_of(broker, "bob", wish=wish)
    await pass_time(broker, clock, death_pause_ms(1))
    await bob.got(1)
    assert attempts(bob) == [(0, 1)], "0 or 1 was guilty, and this is its only attempt"
    await bob.ack_offsets(0)
    await bob.got(2)
    assert attempts(bob) == [(0, 1), (1, 1)]
    await start(bob, 1)
    await die(bob)
    (dead,) = (await operator.ask("dead.list", group="g"))["dead"]
    assert (dead["offset"], dead["attempts"]) == (1, 1)
    await broker.stop()


async def test_of_very_many_that_died_together_parts_come_together_first() -> None:
    clock = ManualClock()
    broker = await open_broker(clock=clock)
    operator = await Operator.of(broker)
    count = TOGETHER_MAX * 10
    await operator.publish("orders", count)
    ann = await member_of(broker, "ann")
    await ann.got(count)
    await start(ann, *range(count))
    await die(ann)
    bob = await member_of(broker, "bob")
    await pass_time(broker, clock, death_pause_ms(1))
    assert await bob.got(count // 16) == list(range(count // 16))
    await turns()
    assert len(bob.offsets) == count // 16
    await start(bob, *bob.offsets)
    await die(bob)
    cid = await member_of(broker, "cid")
    await pass_time(broker, clock, 0)
    assert await cid.got(count // 16) == list(range(count // 16, count // 8))
    await pass_time(broker, clock, death_pause_ms(2))
    while 0 not in cid.offsets:
        got = len(cid.offsets)
        await cid.ack(cid.rows[-1:])
        await cid.got(got + 1)
    assert attempts(cid)[-1] == (0, 3), "of few each comes alone"
    await broker.stop()


async def test_a_suspect_that_fails_without_killing_comes_again_with_the_others() -> None:
    clock = ManualClock()
    broker = await open_broker(clock=clock)
    operator = await Operator.of(broker)
    await operator.publish("orders", 1)
    ann = await member_of(broker, "ann")
    await ann.got(1)
    await start(ann, 0)
    await die(ann)
    bob = await member_of(broker, "bob")
    await pass_time(broker, clock, death_pause_ms(1))
    await bob.got(1)
    await bob.settle("retry", 0, after_ms=0)
    await operator.publish("orders", 2)
    await bob.got(4)
    assert sorted(attempts(bob)) == [(0, 2), (0, 3), (1, 1), (2, 1)]
    await broker.stop()


async def test_a_member_that_does_not_settle_is_not_kept_waiting_for_a_suspect_for_ever() -> None:
    clock = ManualClock()
    broker = await open_broker(clock=clock)
    operator = await Operator.of(broker)
    await operator.publish("orders", 2)
    ann = await member_of(broker, "ann")
    await ann.got(2)
    await start(ann, 0)
    await die(ann)
    wish = {"retry": LADDER}
    bob = await member_of(broker, "bob", wish=wish)
    await bob.got(1)
    await pass_time(broker, clock, death_pause_ms(1))
    await operator.publish("orders", 1)
    await turns()
    assert bob.offsets == [1]
    await bob.settle("renew", 1)
    await pass_time(broker, clock, DRAIN_MS_MAX - 1_000)
    await bob.settle("renew", 1)
    await pass_time(broker, clock, 1_000)
    assert await bob.got(2) == [1, 2]
    await broker.stop()


async def test_what_a_silent_member_had_not_started_costs_no_attempt() -> None:
    clock = ManualClock()
    broker = await open_broker(clock=clock)
    operator = await Operator.of(broker)
    await operator.publish("orders", 3)
    ann = await member_of(broker, "ann")
    await ann.got(3)
    await start(ann, 1)
    bob = await member_of(broker, "bob")
    await pass_time(broker, clock, 30_001)
    await until(lambda: len(attempts(ann)) + len(attempts(bob)) == 6)
    assert sorted([*attempts(ann)[3:], *attempts(bob)]) == [(0, 1), (1, 2), (2, 1)]
    await broker.stop()


async def test_a_member_that_never_reports_loses_an_attempt_of_all_it_held() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 3)
    ann = await member_of(broker, "ann", starts=False)
    await ann.got(3)
    await die(ann)
    bob = await member_of(broker, "bob")
    await bob.got(3)
    assert attempts(bob) == [(0, 2), (1, 2), (2, 2)], "at once, and together"
    await broker.stop()


async def test_the_answer_to_a_join_says_whether_starts_are_counted() -> None:
    broker = await open_broker()
    said = []
    for starts in (True, False):
        member = await member_of(broker, f"m{starts}", starts=starts)
        said.append(decode_joined(member.speaker.of(member.id)[0][1]).starts)
    assert said == [True, False]
    await broker.stop()
