"""The consume path: who gets what, until when, and what becomes of what nobody settles."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from onward.broker.broker import Broker
from onward.broker.commit import Done
from onward.broker.settle import DEATHS_MAX
from onward.errors import DiskFull, OnwardError
from onward.log.log import Write
from onward.log.memory_disk import MemoryDisk
from onward.protocol.deliveries import Joined, decode_delivery, decode_joined, more_frame
from onward.protocol.frames import Kind
from onward.protocol.payloads import decode_error
from onward.testing.clock import ManualClock

from .asking import Consumer, Operator, until
from .speaking import HeldCommit, open_broker, turns


def held(broker: Broker) -> HeldCommit:
    commit = broker._commit
    assert isinstance(commit, HeldCommit)
    return commit


async def released(broker: Broker, condition: Any) -> None:
    """Let commits through until something holds."""

    def look() -> object:
        if held(broker).held:
            held(broker).release()
        return condition()

    await until(look)


def attempts(consumer: Consumer) -> list[tuple[int, int]]:
    """Return (offset, attempt) of all that was delivered, in order of arrival."""
    found = []
    for kind, payload in consumer.speaker.of(consumer.id):
        if kind == Kind.DELIVERY:
            for start, end, attempt, _ in decode_delivery(payload).grants:
                found += [(offset, attempt) for offset in range(start, end)]
    return found


def joined(consumer: Consumer) -> Joined:
    kind, payload = consumer.speaker.of(consumer.id)[0]
    assert kind == Kind.REPLY
    return decode_joined(payload)


def error_of(consumer: Consumer) -> OnwardError:
    kind, payload = consumer.speaker.of(consumer.id)[0]
    assert kind == Kind.ERROR
    return decode_error(payload)


async def give(consumer: Consumer, credit: int) -> None:
    consumer.speaker.transport.write(more_frame(consumer.id, credit))
    await turns()


async def pass_time(broker: Broker, clock: ManualClock, ms: int) -> None:
    clock.advance(ms)
    broker.consuming.tick()
    await turns()


async def test_an_ack_is_answered_only_when_it_is_durable() -> None:
    broker = await open_broker(commit=HeldCommit)
    operator = await Operator.of(broker)
    published = operator.speaker.say_publish("orders", [b"a", b"b"])
    await released(broker, lambda: operator.speaker.of(published))
    joining = asyncio.ensure_future(Consumer.of(broker, "g"))
    await released(broker, joining.done)
    consumer = joining.result()
    await consumer.got(2)
    acking = asyncio.ensure_future(consumer.ack())
    await until(lambda: held(broker).held)
    await turns()
    assert not acking.done()
    held(broker).release()
    await until(acking.done)
    assert acking.result() == []
    await broker.stop()


async def test_an_ack_that_cannot_be_written_is_refused_and_its_messages_come_again() -> None:
    broker = await open_broker(commit=HeldCommit)
    operator = await Operator.of(broker)
    published = operator.speaker.say_publish("orders", [b"a", b"b"])
    await released(broker, lambda: operator.speaker.of(published))
    joining = asyncio.ensure_future(Consumer.of(broker, "g"))
    await released(broker, joining.done)
    consumer = joining.result()
    await consumer.got(2)
    acking = asyncio.ensure_future(consumer.ack())
    await until(lambda: held(broker).held)
    held(broker).held.pop()[2](DiskFull("the disk is full"))
    with pytest.raises(DiskFull):
        await acking
    assert attempts(consumer) == [(0, 1), (1, 1)]
    await give(consumer, 10)
    await consumer.got(4)
    assert attempts(consumer) == [(0, 1), (1, 1), (0, 1), (1, 1)]
    await broker.stop()


async def test_acks_that_arrive_together_are_one_entry_of_the_log() -> None:
    broker = await open_broker(commit=HeldCommit)
    operator = await Operator.of(broker)
    published = operator.speaker.say_publish("orders", [b"x"] * 100)
    await released(broker, lambda: operator.speaker.of(published))
    joining = asyncio.ensure_future(Consumer.of(broker, "g"))
    await released(broker, joining.done)
    consumer = joining.result()
    await consumer.got(100)
    first = asyncio.ensure_future(consumer.ack_offsets(0))
    await until(lambda: held(broker).held)
    others = [asyncio.ensure_future(consumer.ack_offsets(one)) for one in range(1, 100)]
    await turns()
    before = broker.log.next_index
    await released(broker, lambda: first.done() and all(one.done() for one in others))
    assert broker.log.next_index - before <= 2
    assert broker.consuming.find("g").shares["orders"].cursor == 100
    await broker.stop()


async def test_a_lease_that_runs_out_counts_as_an_attempt_and_its_ack_is_refused() -> None:
    clock = ManualClock()
    broker = await open_broker(clock=clock)
    operator = await Operator.of(broker)
    await operator.publish("orders", 3)
    consumer = await Consumer.of(broker, "g", credit=3)
    await consumer.got(3)
    old = consumer.rows
    await pass_time(broker, clock, 30_001)
    await give(consumer, 3)
    await consumer.got(6)
    assert attempts(consumer)[3:] == [(0, 2), (1, 2), (2, 2)]
    assert await consumer.ack(old) == old
    assert await consumer.ack(consumer.rows[len(old) :]) == []
    assert (await operator.ask("group.describe", group="g"))["expired_leases"] == 1
    await broker.stop()


async def test_a_renewed_lease_does_not_run_out() -> None:
    clock = ManualClock()
    broker = await open_broker(clock=clock)
    operator = await Operator.of(broker)
    await operator.publish("orders", 3)
    consumer = await Consumer.of(broker, "g", credit=100)
    await consumer.got(3)
    for _ in range(4):
        await pass_time(broker, clock, 20_000)
        assert await consumer.settle("renew", 0) == []
    assert len(consumer.offsets) == 3
    assert await consumer.ack() == []
    await broker.stop()


async def test_a_member_that_dies_gives_back_at_once_what_it_had() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 10)
    dying = await Consumer.of(broker, "g", member="dying")
    await dying.got(10)
    await dying.ack_offsets(0, 5)
    other = await Consumer.of(broker, "g", member="other")
    dying.speaker.transport.abort()
    await other.got(8)
    assert attempts(other) == [(one, 2) for one in (1, 2, 3, 4, 6, 7, 8, 9)]
    await broker.stop()


async def test_a_member_that_leaves_gives_back_without_counting() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 10)
    leaving = await Consumer.of(broker, "g", member="leaving")
    await leaving.got(10)
    await leaving.leave()
    other = await Consumer.of(broker, "g", member="other")
    await other.got(10)
    assert attempts(other) == [(one, 1) for one in range(10)]
    await broker.stop()


async def test_what_kills_its_members_becomes_a_dead_letter_after_some_deaths() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 1)
    for number in range(DEATHS_MAX):
        member = await Consumer.of(
            broker, "g", member=f"m{number}", wish={"retry": {"kind": "none"}}
        )
        await member.got(1)
        assert attempts(member) == [(0, number + 1)]
        member.speaker.transport.abort()
        await turns()
    dead = await operator.ask("dead.list", group="g")
    assert [(one["offset"], one["attempts"]) for one in dead["dead"]] == [(0, DEATHS_MAX)]
    assert "died with it" in dead["dead"][0]["cause"]
    await broker.stop()


async def test_a_lease_that_runs_out_last_is_not_said_to_have_run_out_before() -> None:
    clock = ManualClock()
    broker = await open_broker(clock=clock)
    operator = await Operator.of(broker)
    await operator.publish("orders", 1)
    policy = {"kind": "fixed", "delay_ms": 0, "attempts_max": DEATHS_MAX}
    consumer = await Consumer.of(broker, "g", member="ann", wish={"retry": policy})
    for number in range(1, DEATHS_MAX):
        await consumer.got(number)
        await consumer.settle("retry", 0, cause="busy")
    await consumer.got(DEATHS_MAX)
    await pass_time(broker, clock, 30_001)
    (dead,) = (await operator.ask("dead.list", group="g"))["dead"]
    assert dead["cause"] == f"its lease ran out with 'ann', attempt {DEATHS_MAX}"
    await broker.stop()


async def test_a_retry_comes_when_it_is_due_and_not_before() -> None:
    clock = ManualClock()
    broker = await open_broker(clock=clock)
    operator = await Operator.of(broker)
    await operator.publish("orders", 2)
    consumer = await Consumer.of(broker, "g", credit=100)
    await consumer.got(2)
    assert await consumer.settle("retry", 0, after_ms=5_000, cause="busy") == []
    await pass_time(broker, clock, 4_999)
    assert len(consumer.offsets) == 2
    await pass_time(broker, clock, 1)
    assert attempts(consumer) == [(0, 1), (1, 1), (0, 2)]
    await broker.stop()


async def test_a_retry_that_does_not_count_is_the_same_attempt_again() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 1)
    consumer = await Consumer.of(broker, "g", wish={"retry": {"kind": "none"}})
    for number in range(1, 4):
        await consumer.got(number)
        await consumer.settle("retry", 0, after_ms=0, count=False)
    await consumer.got(4)
    assert attempts(consumer) == [(0, 1)] * 4
    await broker.stop()


async def test_fresh_messages_do_not_wait_behind_retries() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 100)
    consumer = await Consumer.of(broker, "g", credit=50)
    await consumer.got(50)
    await consumer.settle("retry", *range(50), after_ms=0)
    await give(consumer, 10)
    await consumer.got(60)
    again = [offset for offset in consumer.offsets[50:] if offset < 50]
    assert len(again) == 5
    await broker.stop()


async def test_a_hundred_members_on_a_thousand_messages_all_get_work() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("other", 1)
    members = [await Consumer.of(broker, "g", member=f"m{n}", credit=1_000) for n in range(100)]
    await operator.publish("orders", 1_000)
    await until(lambda: sum(len(one.offsets) for one in members) == 1_000)
    assert min(len(one.offsets) for one in members) >= 3
    await broker.stop()


async def test_who_takes_over_an_exclusive_group_goes_on_in_order() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 20)
    wish = {"mode": "exclusive"}
    first = await Consumer.of(broker, "g", member="first", credit=10, wish=wish)
    second = await Consumer.of(broker, "g", member="second", credit=100, wish=wish)
    assert (joined(first).state, joined(second).state) == ("active", "standby")
    await first.got(10)
    await first.ack_offsets(0, 1)
    assert second.offsets == []
    first.speaker.transport.abort()
    assert await second.got(18) == list(range(2, 20))
    refused = await Consumer.of(broker, "g", member="third", refuse=True)
    assert error_of(refused).code == "already_exists"
    await broker.stop()


async def test_an_ordered_group_has_one_message_of_a_key_out_at_a_time() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 6, keys=["a", "a", "b", "b", "a", None])
    wish = {"mode": "ordered"}
    consumer = await Consumer.of(broker, "g", wish=wish)
    assert sorted(await consumer.got(3)) == [0, 2, 5]
    await consumer.ack_offsets(0)
    assert (await consumer.got(4))[3:] == [1]
    await consumer.settle("retry", 2, after_ms=60_000, cause="bad")
    await consumer.ack_offsets(1)
    assert (await consumer.got(5))[4:] == [4]
    await turns()
    assert 3 not in consumer.offsets
    await broker.stop()


ORDERED = {"mode": "ordered"}


async def with_a_parked_key(broker: Broker) -> Consumer:
    """Let 0 wait for its retry, 1 behind it with the same key, and a member hold 2."""
    operator = await Operator.of(broker)
    await operator.publish("orders", 3, keys=["a", "a", "b"])
    member = await Consumer.of(broker, "g", wish=ORDERED)
    await member.got(2)
    await member.settle("retry", 0, after_ms=60_000)
    return member


async def test_an_ordered_key_stays_parked_when_its_group_comes_back() -> None:
    clock = ManualClock()
    broker = await open_broker(clock=clock)
    first = await with_a_parked_key(broker)
    await first.leave()
    second = await Consumer.of(broker, "g", member="bob", wish=ORDERED)
    assert await second.got(1) == [2]
    await turns()
    assert second.offsets == [2]
    await second.ack()
    await pass_time(broker, clock, 60_000)
    assert await second.got(2) == [2, 0]
    await second.ack_offsets(0)
    assert await second.got(3) == [2, 0, 1]
    await broker.stop()


class Gate(HeldCommit):
    """Writes at once, unless it is held."""

    is_held = False

    def append(self, write: Write, *, sync: bool, done: Done) -> None:
        super().append(write, sync=sync, done=done)
        if not self.is_held:
            asyncio.get_running_loop().call_soon(self.release)


async def test_an_ordered_key_stays_parked_when_others_are_lost_while_its_group_comes_back() -> (
    None
):
    broker = await open_broker(commit=Gate, clock=ManualClock())
    gate = broker._commit
    assert isinstance(gate, Gate)
    first = await with_a_parked_key(broker)
    gate.is_held = True
    first.speaker.transport.abort()
    await turns()
    second = await Consumer.of(broker, "g", member="bob", wish=ORDERED, credit=0)
    assert len(gate.held) == 1, "that 2 was lost is not durable yet"
    gate.is_held = False
    gate.release()
    await turns()
    second.speaker.transport.write(more_frame(second.id, 10))
    assert await second.got(1) == [2]
    await second.ack()
    await turns()
    assert second.offsets == [2]
    await broker.stop()


async def test_higher_priorities_come_first() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 6, priorities=[0, 5, 0, 9, 5, 9])
    consumer = await Consumer.of(broker, "g", wish={"priorities": True}, credit=6)
    assert await consumer.got(6) == [3, 5, 1, 4, 0, 2]
    await broker.stop()


async def test_a_filter_delivers_only_what_it_names_and_finishes_the_rest() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 6, tags=["a", "b", "a,c", None, "c", "a"])
    consumer = await Consumer.of(broker, "g", wish={"filter": {"tags_any": ["a"]}})
    assert await consumer.got(3) == [0, 2, 5]
    await consumer.ack()
    share = broker.consuming.find("g").shares["orders"]
    await until(lambda: share.cursor == 6)
    await broker.stop()


async def test_at_most_once_is_finished_before_it_is_delivered() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 5)
    consumer = await Consumer.of(broker, "g", wish={"at_most_once": True})
    await consumer.got(5)
    assert broker.consuming.find("g").shares["orders"].cursor == 5
    consumer.speaker.transport.abort()
    other = await Consumer.of(broker, "g", member="bob")
    await turns()
    assert other.offsets == []
    await broker.stop()


async def test_what_retention_took_is_skipped_and_the_trace_says_so() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 10)
    await operator.publish("orders", 10)
    first = await Consumer.of(broker, "g", credit=0)
    await first.leave()
    broker.catalogue.find("orders").first_offset = 10
    consumer = await Consumer.of(broker, "g")
    assert await consumer.got(10) == list(range(10, 20))
    share = broker.consuming.find("g").shares["orders"]
    await until(lambda: share.cursor == 10)
    rows = await operator.speaker.read("@trace")
    assert any(b'"skipped"' in row and b"retained away" in row for row in rows)
    await broker.stop()


async def test_a_damaged_entry_becomes_dead_letters_and_holds_nobody_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = MemoryDisk()
    broker = await open_broker(disk)
    operator = await Operator.of(broker)
    for number in range(3):
        await operator.publish("orders", 2, keys=[f"key-{number}"] * 2)
    span = broker.log.plan(broker.catalogue.find("orders").number, 2, bytes_max=0)
    assert span is not None
    file = span.segment.file
    position = span.position + span.length - 12
    broken = bytes(byte ^ 255 for byte in file.read(position, 4))
    file.write(position, [broken])
    consumer = await Consumer.of(broker, "g")
    assert await consumer.got(4) == [0, 1, 4, 5]
    dead = (await operator.ask("dead.list", group="g"))["dead"]
    assert [one["offset"] for one in dead] == [2, 3]
    assert "damaged" in dead[0]["cause"]
    assert caplog.text.count("is damaged, messages from offset") == 1
    await broker.stop()


async def test_a_second_member_of_a_name_takes_the_place_of_the_first() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 5)
    first = await Consumer.of(broker, "g", member="ann")
    await first.got(5)
    second = await Consumer.of(broker, "g", member="ann")
    assert await second.got(5) == list(range(5))
    assert first.end == "conflict"
    assert len(await first.ack()) == 1
    await broker.stop()


async def test_a_member_of_the_group_asks_for_settings_that_it_does_not_have() -> None:
    broker = await open_broker()
    await Consumer.of(broker, "g", member="ann", wish={"mode": "ordered"})
    other = await Consumer.of(broker, "g", member="bob", wish={"mode": "shared"})
    assert error_of(other).code == "conflict"
    assert "mode" in str(error_of(other))
    await broker.stop()


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"group": ""}, "invalid_name"),
        ({"topics": []}, "unknown_group"),
        ({"topics": ["a", "a"]}, "invalid_request"),
        ({"topics": ["no/name"]}, "invalid_name"),
        ({"member": "\x1b[31m"}, "invalid_name"),
        ({"wish": {"lease_ms": 1}}, "invalid_request"),
        ({"wish": {"mode": "none"}}, "invalid_request"),
        ({"wish": {"retry": {"kind": "fixed", "delay_ms": -1}}}, "invalid_request"),
        ({"wish": {"filter": {"tags_any": ["x"] * 101}}}, "invalid_request"),
        ({"topics": ["@trace"]}, "invalid_name"),
        ({"create": False}, "unknown_group"),
    ],
)
async def test_a_consumer_that_makes_no_sense_is_told_why(
    fields: dict[str, Any], code: str
) -> None:
    broker = await open_broker()
    asked = {"group": "g", **fields}
    group = asked.pop("group")
    consumer = await Consumer.of(broker, group, **asked)
    assert error_of(consumer).code == code
    assert broker.consuming.groups.by_name == {}
    await broker.stop()


async def test_groups_are_the_same_after_a_restart() -> None:
    disk = MemoryDisk()
    broker = await open_broker(disk)
    operator = await Operator.of(broker)
    await operator.publish("orders", 20)
    consumer = await Consumer.of(broker, "g")
    await consumer.got(20)
    await consumer.ack_offsets(0, 1, 2, 7)
    await consumer.settle("retry", 3, after_ms=60_000)
    await consumer.settle("reject", 4, cause="bad")
    before = broker.consuming.groups.save()
    await broker.stop()
    # Once from its checkpoint, once from the log alone.
    for name in [*disk.list_folder("log"), ""]:
        again = await open_broker(disk)
        assert again.consuming.groups.save() == before
        await again.stop()
        if name.startswith("checkpoint"):
            disk.remove(f"log/{name}")


async def test_when_a_topic_ends_its_members_are_told_and_its_place_is_forgotten() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 5)
    consumer = await Consumer.of(broker, "g")
    await consumer.got(5)
    await operator.ask("topic.delete", topic="orders")
    await until(lambda: consumer.end)
    assert consumer.end == "topic_ended"
    await operator.publish("orders", 3)
    again = await Consumer.of(broker, "g")
    assert await again.got(3) == [0, 1, 2]
    await broker.stop()
