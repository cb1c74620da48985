"""How one message stands, and who published it: what is told is true now."""

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from onward.broker import key_order, lookahead
from onward.broker.catalogue import Topic
from onward.broker.lookahead import LookAhead, Looked
from onward.delivery.ranges import Range
from onward.delivery.record import GroupRecord
from onward.log.log import Log
from onward.testing.clock import START_MS, ManualClock
from onward.testing.disk import FaultyDisk

from .asking import Consumer, Operator, until
from .speaking import open_broker


async def state_in(operator: Operator, offset: int, group: str = "g") -> dict[str, Any]:
    reply = await operator.ask("message.state", topic="orders", offset=offset)
    (state,) = [one for one in reply["groups"] if one["group"] == group]
    assert isinstance(state, dict)
    return state


async def test_the_state_of_a_message_is_told_for_each_group() -> None:
    clock = ManualClock()
    broker = await open_broker(clock=clock)
    operator = await Operator.of(broker)
    await operator.publish("orders", 6)
    await operator.ask("group.create", group="idle", topics=["orders"])
    await operator.ask("group.create", group="all", topics=["orders"], wish={"mode": "broadcast"})
    consumer = await Consumer.of(broker, "g", member="ann", credit=5)
    await consumer.got(5)
    await consumer.ack_offsets(0)
    await consumer.settle("reject", 1, cause="no such order")
    await consumer.settle("retry", 2, after_ms=60_000, cause="busy")
    clock.advance(10_000)
    assert await state_in(operator, 0) == {"group": "g", "state": "finished", "attempt": 1}
    assert await state_in(operator, 1) == {
        "group": "g", "state": "dead", "attempt": 1, "cause": "no such order", "member": "ann",
        "died_at_ms": START_MS,
    }  # fmt: skip
    assert await state_in(operator, 2) == {
        "group": "g", "state": "waiting", "attempt": 2, "due_at_ms": START_MS + 60_000,
    }  # fmt: skip
    assert await state_in(operator, 3) == {
        "group": "g", "state": "leased", "attempt": 1, "member": "ann", "lease_ms_left": 20_000,
    }  # fmt: skip
    assert await state_in(operator, 5) == {"group": "g", "state": "fresh", "attempt": 1}
    assert (await state_in(operator, 0, "idle"))["state"] == "fresh"
    assert (await state_in(operator, 0, "all"))["state"] == "broadcast"
    await consumer.leave()
    assert (await state_in(operator, 3))["state"] == "ready"
    await broker.stop()


async def test_what_a_choosy_group_has_looked_at_is_ready_until_a_member_has_it() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 5)
    consumer = await Consumer.of(broker, "g", credit=2, wish={"priorities": True})
    assert sorted(await consumer.got(2)) == [0, 1]
    states = [(await state_in(operator, offset))["state"] for offset in range(4)]
    assert states == ["leased", "leased", "ready", "ready"]
    await broker.stop()


async def test_a_message_tells_who_published_it_also_after_a_restart() -> None:
    disk = FaultyDisk(Random(1))
    broker = await open_broker(disk)
    operator = await Operator.of(broker)
    await operator.publish("orders", 3, producer_id=77, sequence=1)
    await operator.publish("orders", 3)
    await until(lambda: broker.publishers.find(77))
    await check_publisher(operator)
    broker.fail(RuntimeError("killed by the test"))
    disk.crash(unsynced="lost")
    broker = await open_broker(disk)
    await check_publisher(await Operator.of(broker))
    await broker.stop()


async def check_publisher(operator: Operator) -> None:
    known = await operator.ask("message.state", topic="orders", offset=2)
    assert (known["stored"], known["producer_id"]) == (True, 77)
    assert known["published_by"] == {"client": "test", "host": "", "pid": 0}
    unknown = await operator.ask("message.state", topic="orders", offset=3)
    assert (unknown["stored"], unknown["producer_id"]) == (True, 0)
    assert unknown["published_by"] is None


async def test_a_message_that_lies_deep_in_an_entry_is_found() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    ids = [
        operator.speaker.say_publish("orders", [b"x"] * 3, producer_id=number, sequence=1)
        for number in (1, 2, 3)
    ]
    await until(lambda: all(operator.speaker.of(one) for one in ids))
    replies = [await operator.ask("message.state", topic="orders", offset=n) for n in range(9)]
    assert [reply["producer_id"] for reply in replies] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    await broker.stop()


async def test_a_message_that_was_retained_away_is_not_stored() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 6, producer_id=77, sequence=1)
    broker.catalogue.find("orders").first_offset = 4
    gone = await operator.ask("message.state", topic="orders", offset=3)
    assert (gone["stored"], gone["producer_id"], gone["published_by"]) == (False, 0, None)
    await broker.stop()


async def test_a_message_that_needs_the_disk_is_looked_at_without_holding_others_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 3, producer_id=77, sequence=1)
    waited = only_from_disk(monkeypatch)
    reply = await operator.ask("message.state", topic="orders", offset=1)
    assert reply["producer_id"] == 77
    assert waited == [False, True]
    await broker.stop()


async def test_a_disk_that_cannot_be_read_now_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 3)

    def fail(*_: object, **__: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(Log, "read", fail)
    assert await operator.code("message.state", topic="orders", offset=1) == "unavailable"
    monkeypatch.undo()
    await broker.stop()


def only_from_disk(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Let nothing lie in the page cache; return where each read notes whether it may wait."""
    waited: list[bool] = []
    read = Log.read

    def note(log: Log, span: Any, *, wait: bool) -> Any:
        waited.append(wait)
        return read(log, span, wait=True) if wait else None

    monkeypatch.setattr(Log, "read", note)
    return waited


# --- what holds it back --------------------------------------------------------------------------


async def test_what_is_to_be_delivered_in_a_paused_group_is_said_to_be_held_back_by_that() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 4)
    consumer = await Consumer.of(broker, "g", credit=3)
    await consumer.got(3)
    await consumer.ack_offsets(0)
    await consumer.settle("retry", 1, after_ms=60_000)
    await operator.ask("group.pause", group="g")
    told = [await state_in(operator, offset) for offset in range(4)]
    assert [one["state"] for one in told] == ["finished", "waiting", "leased", "fresh"]
    assert [one.get("paused") for one in told] == [None, True, None, True]
    await consumer.leave()
    ready = await state_in(operator, 2)
    assert (ready["state"], ready["paused"]) == ("ready", True)
    await operator.ask("group.resume", group="g")
    assert "paused" not in await state_in(operator, 2)
    await broker.stop()


async def test_in_an_ordered_group_a_message_waits_behind_one_of_its_key_that_is_leased() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 6, keys=["a", "a", "b", "b", "a", None])
    consumer = await Consumer.of(broker, "g", wish={"mode": "ordered"})
    assert sorted(await consumer.got(3)) == [0, 2, 5]
    assert await behind(operator, range(6)) == [None, 0, None, 2, 0, None]
    await consumer.ack_offsets(0)
    await consumer.got(4)
    assert await behind(operator, range(1, 5)) == [None, None, 2, 1]
    assert (await state_in(operator, 4))["state"] == "behind"
    await broker.stop()


async def test_in_an_ordered_group_a_message_waits_behind_one_of_its_key_that_is_parked() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 4, keys=["a", "b", "a", "b"])
    consumer = await Consumer.of(broker, "g", wish={"mode": "ordered"})
    await consumer.got(2)
    await consumer.settle("retry", 0, after_ms=60_000)
    parked, later = await state_in(operator, 0), await state_in(operator, 2)
    assert (parked["state"], later["state"], later["behind"]) == ("waiting", "behind", 0)
    await consumer.leave()
    assert await behind(operator, range(4)) == [None, None, 0, 1], "also when nobody is there"
    await broker.stop()


async def test_what_waits_for_a_retry_says_as_well_that_an_earlier_one_of_its_key_waits() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 2, keys=["a", "a"])
    consumer = await Consumer.of(broker, "g", credit=2)
    await consumer.got(2)
    await consumer.settle("retry", 0, 1, after_ms=60_000)
    await consumer.leave()
    await operator.ask("group.change", group="g", wish={"mode": "ordered"})
    told = await state_in(operator, 1)
    assert (told["state"], told["behind"]) == ("waiting", 0)
    await broker.stop()


async def test_a_message_does_not_wait_behind_one_that_the_filter_drops() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 3, keys=["a", "a", "a"], tags=["eu", "us", "us"])
    wish = {"mode": "ordered", "filter": {"tags_any": ["us"]}}
    await operator.ask("group.create", group="g", topics=["orders"], wish=wish)
    assert await behind(operator, range(3)) == [None, None, 1]
    await broker.stop()


async def test_a_key_that_waits_for_its_rate_lets_its_messages_wait_behind_the_first() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 4, keys=["a"] * 4)
    consumer = await Consumer.of(broker, "g", wish={"mode": "ordered", "key_rate": 1})
    await consumer.got(1)
    await consumer.ack_offsets(0)
    await until(lambda: broker.consuming.crews["g"].sources["orders"].wait_ms())
    assert await behind(operator, range(1, 4)) == [None, 1, 1]
    await broker.stop()


async def test_what_has_too_many_before_it_is_said_to_be_beyond(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 6, keys=["a", "b", "c", "d", "a", "c"])
    await operator.ask("group.create", group="g", topics=["orders"], wish={"mode": "ordered"})
    monkeypatch.setattr(key_order, "HELD_MAX", 2)
    told = [await state_in(operator, offset) for offset in range(6)]
    assert [one.get("behind") for one in told] == [None, None, None, None, 0, None]
    assert [one.get("beyond") for one in told] == [None, None, None, True, None, True]
    monkeypatch.setattr(key_order, "HELD_MAX", 100)
    monkeypatch.setattr(key_order, "LOOKS_MAX", 1)
    monkeypatch.setattr(lookahead, "OFFSETS_MAX", 1)
    assert (await state_in(operator, 5))["beyond"], "one look did not reach that far"
    await broker.stop()


async def test_many_ordered_groups_are_told_from_what_was_seen_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    tags = ["eu", "us", "us", "eu", "us"]
    await operator.publish("orders", 5, keys=["a", "b", "a", "c", "a"], tags=tags)
    ordered: dict[str, Any] = {"mode": "ordered"}
    eu, us = ({"filter": {"tags_any": [tag]}} for tag in ("eu", "us"))
    for number in range(100):
        for name, wish in (("all", ordered), ("eu", ordered | eu), ("us", ordered | us)):
            await operator.ask(
                "group.create", group=f"{name}{number}", topics=["orders"], wish=wish
            )
    looks = count_looks(monkeypatch)
    reply = await operator.ask("message.state", topic="orders", offset=4)
    told = {(one["group"].rstrip("0123456789"), one.get("behind")) for one in reply["groups"]}
    assert told == {("all", 0), ("us", 2), ("eu", None)}
    assert not any("beyond" in one for one in reply["groups"])
    assert len(reply["groups"]) == 300
    assert len(looks) == 5, "the key, the rest, and for two filters: it, and what is before it"
    await broker.stop()


async def test_looks_are_counted_for_all_groups_together(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 2, keys=["a", "a"], tags=["eu,us", "eu,us"])
    for number in range(9):
        wish = {"mode": "ordered", "filter": {"tags_any": ["eu", f"other{number}"]}}
        await operator.ask("group.create", group=f"g{number}", topics=["orders"], wish=wish)
    monkeypatch.setattr(key_order, "LOOKS_MAX", 6)
    looks = count_looks(monkeypatch)
    reply = await operator.ask("message.state", topic="orders", offset=1)
    told = [(one.get("behind"), one.get("beyond")) for one in reply["groups"]]
    assert sorted(told, key=str) == [(0, None)] * 3 + [(None, True)] * 6
    assert len(looks) == 1 + 6, "one for the key"
    await broker.stop()


async def test_a_group_that_is_far_behind_takes_no_looks_from_one_that_is_near(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 10, keys=[*"abcdefgh", "x", "y"])
    for name, start in (("far", 0), ("near", 8)):
        await operator.ask("group.create", group=name, topics=["orders"], wish={"mode": "ordered"})
        await operator.ask("group.reset", group=name, topic="orders", to={"offset": start})
    monkeypatch.setattr(key_order, "LOOKS_MAX", 3)
    monkeypatch.setattr(lookahead, "OFFSETS_MAX", 1)
    assert (await state_in(operator, 9, "far"))["beyond"]
    assert "beyond" not in await state_in(operator, 9, "near")
    await broker.stop()


def count_looks(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[Range]]:
    """Return a list of what is looked at from now on."""
    asked: list[Sequence[Range]] = []
    look = LookAhead.look

    async def look_and_note(
        self: LookAhead, topic: Topic, ranges: Sequence[Range], record: GroupRecord
    ) -> Looked:
        asked.append(ranges)
        return await look(self, topic, ranges, record)

    monkeypatch.setattr(LookAhead, "look", look_and_note)
    return asked


async def behind(operator: Operator, offsets: range) -> list[int | None]:
    return [(await state_in(operator, offset)).get("behind") for offset in offsets]


# --- what is gone --------------------------------------------------------------------------------


async def test_a_message_that_is_gone_waits_for_nobody_and_is_ready_for_nobody() -> None:
    clock = ManualClock()
    broker = await open_broker(clock=clock)
    operator = await Operator.of(broker)
    await operator.publish("orders", 6, keys=["a"] * 6)
    await operator.ask("group.create", group="idle", topics=["orders"])
    await operator.ask("group.create", group="row", topics=["orders"], wish={"mode": "ordered"})
    await operator.ask("group.pause", group="idle")
    consumer = await Consumer.of(broker, "g", credit=4)
    await consumer.got(4)
    await consumer.ack_offsets(0)
    await consumer.settle("reject", 1, cause="no")
    await consumer.settle("retry", 2, after_ms=60_000)
    broker.catalogue.find("orders").first_offset = 5
    told = [(await state_in(operator, offset))["state"] for offset in range(5)]
    assert told == ["finished", "dead", "missed", "missed", "missed"]
    assert await state_in(operator, 2) == {"group": "g", "state": "missed", "attempt": 2}
    assert await state_in(operator, 3) == {
        "group": "g", "state": "missed", "attempt": 1, "member": "ann", "lease_ms_left": 30_000,
    }, "who has it already, has it"  # fmt: skip
    assert await state_in(operator, 4, "idle") == {
        "group": "idle", "state": "missed", "attempt": 1,
    }  # fmt: skip
    assert await state_in(operator, 4, "row") == {"group": "row", "state": "missed", "attempt": 1}
    assert (await state_in(operator, 5, "row"))["state"] == "fresh"
    await broker.stop()


# --- broadcasts ----------------------------------------------------------------------------------


async def test_of_a_broadcast_it_is_told_how_many_positions_are_past_a_message_now() -> None:
    broker = await open_broker()
    operator = await Operator.of(broker)
    await operator.publish("orders", 6)
    await operator.ask("group.create", group="g", topics=["orders"], wish={"mode": "broadcast"})
    assert await passed(operator, 3) == (0, 0)
    for member, offset in (("ann", 3), ("bob", 4), ("cid", 6)):
        await move(operator, member, offset)
    assert await passed(operator, 3) == (2, 3)
    await move(operator, "bob", 0)
    assert await passed(operator, 3) == (1, 3)
    await broker.stop()


async def move(operator: Operator, member: str, offset: int) -> None:
    await operator.ask("position.set", group="g", member=member, topic="orders", offset=offset)


async def passed(operator: Operator, offset: int) -> tuple[int, int]:
    told = await state_in(operator, offset)
    assert told["state"] == "broadcast"
    return told["passed"], told["positions"]


async def test_a_retry_that_is_due_is_ready_also_while_the_group_has_no_member() -> None:
    clock = ManualClock()
    broker = await open_broker(clock=clock)
    operator = await Operator.of(broker)
    await operator.publish("orders", 2)
    consumer = await Consumer.of(broker, "g", member="ann", credit=2)
    await consumer.got(2)
    await consumer.settle("retry", 0, after_ms=60_000, cause="busy")
    await consumer.leave()
    peeked = await operator.ask("group.peek", group="g", topic="orders", limit=10)
    assert peeked["ranges"] == [[1, 2]]
    assert (await state_in(operator, 0))["state"] == "waiting"
    clock.advance(60_000)
    peeked = await operator.ask("group.peek", group="g", topic="orders", limit=10)
    assert peeked["ranges"] == [[0, 2]]
    assert (await state_in(operator, 0))["state"] == "ready"
    (share,) = (await operator.ask("group.describe", group="g"))["topics"]
    assert (share["waiting"], share["ready"]) == (0, 2)
    await broker.stop()
