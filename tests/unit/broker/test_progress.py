"""PROGRESS: what several members of one connection have finished, and what they start."""

from __future__ import annotations

import msgspec

from onward.broker.broker import Broker
from onward.protocol.deliveries import (
    FINISHED,
    STARTS,
    Step,
    decode_settled_steps,
    progress_frame,
)
from onward.protocol.frames import Kind

from .asking import Consumer, Operator, until
from .speaking import Speaker, open_broker, turns


async def members_of(broker: Broker, *names: str, credit: int) -> list[Consumer]:
    """Return members of group g that share one connection."""
    speaker = await Speaker.to(broker)
    members = [Consumer(speaker, speaker.new_id()) for _ in names]
    for member, name in zip(members, names, strict=True):
        asked = {"group": "g", "topics": ["orders"], "member": name, "credit": credit}
        payload = msgspec.json.encode(asked | {"starts": True})
        speaker.say(Kind.CONSUME, member.id, payload)
        await member.got(credit)
    return members


def steps_of(member: Consumer, kind: int, *offsets: int) -> list[Step]:
    return [
        (member.id, kind, delivery, offset, offset + 1)
        for offset in offsets
        for delivery, start, end in member.rows
        if start <= offset < end
    ]


async def report(speaker: Speaker, steps: list[Step]) -> list[Step]:
    """Send a PROGRESS; return what was refused."""
    request_id = speaker.new_id()
    speaker.transport.write(progress_frame(request_id, steps))
    await until(lambda: speaker.of(request_id))
    ((kind, payload),) = speaker.of(request_id)
    assert kind == Kind.SETTLED
    return decode_settled_steps(payload)


async def test_members_finish_and_start_in_one_frame() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 4)
    ann, bob = await members_of(broker, "ann", "bob", credit=2)
    finished = steps_of(ann, FINISHED, ann.offsets[0]) + steps_of(bob, FINISHED, bob.offsets[0])
    starts = steps_of(ann, STARTS, ann.offsets[1])
    assert await report(ann.speaker, starts + finished) == []
    leases = broker.consuming.leases_of("g")
    assert leases.count == 2
    assert [part for lease in leases for part in lease.started] == [
        (ann.offsets[1], ann.offsets[1] + 1)
    ]
    assert [lease.member for lease in leases if lease.unstarted] == ["bob"]
    await broker.stop()


async def test_what_a_member_does_not_hold_is_refused_and_the_rest_is_done() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 4)
    ann, bob = await members_of(broker, "ann", "bob", credit=2)
    own = steps_of(ann, FINISHED, ann.offsets[0])
    of_bob = [(ann.id, *step[1:]) for step in steps_of(bob, FINISHED, *bob.offsets)]
    of_nobody: list[Step] = [(77, FINISHED, 1, 0, 1)]
    refused = await report(ann.speaker, own + of_bob + of_nobody)
    assert sorted(refused) == sorted(of_bob + of_nobody)
    assert broker.consuming.leases_of("g").count == 3
    await broker.stop()


async def test_starts_alone_have_no_answer_and_count_only_for_their_own_member() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 2)
    ann, bob = await members_of(broker, "ann", "bob", credit=1)
    of_bob = [(ann.id, *step[1:]) for step in steps_of(bob, STARTS, *bob.offsets)]
    unknown: list[Step] = [(77, STARTS, 1, 0, 1), (ann.id, STARTS, 99, 0, 1)]
    ann.speaker.transport.write(progress_frame(0, of_bob + unknown))
    await turns()
    assert [kind for kind, _ in ann.speaker.of(0)] == [Kind.WELCOME]
    assert [part for lease in broker.consuming.leases_of("g") for part in lease.started] == []
    await broker.stop()


async def test_a_progress_that_makes_no_sense_ends_the_connection() -> None:
    broker = await open_broker()
    speaker = await Speaker.to(broker)
    speaker.say(Kind.PROGRESS, 9, b"nonsense")
    await turns()
    assert [kind for kind, _ in speaker.of(0)] == [Kind.WELCOME, Kind.ERROR]
    await broker.stop()
