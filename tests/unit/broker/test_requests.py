"""Topics for people and programs: each answer is durable, each mistake has its code."""

import asyncio
from random import Random
from typing import Any

import pytest

from onward.broker.broker import Broker
from onward.errors import DiskFull
from onward.protocol.frames import Kind
from onward.testing.clock import START_MS, ManualClock
from onward.testing.disk import FaultyDisk

from .speaking import HeldCommit, Speaker, open_broker, settings_with, turns


async def described(speaker: Speaker, topic: str = "orders") -> dict[str, Any]:
    reply = await speaker.request("topic.describe", topic=topic)
    assert isinstance(reply, dict)
    return reply


async def test_a_topic_is_as_it_was_created() -> None:
    broker = await open_broker()
    speaker = await Speaker.to(broker)
    await speaker.request(
        "topic.create", topic="orders", rule="write-only", message_bytes_max=500,
        lifetime_ms=60_000, retention_ms=1_000, retention_bytes=7_000,
    )  # fmt: skip
    topic = await described(speaker)
    assert topic["rule"] == "write-only"
    assert topic["message_bytes_max"] == 500
    assert topic["expires_at_ms"] == START_MS + 60_000
    assert (topic["retention_ms"], topic["retention_bytes"]) == (1_000, 7_000)
    assert (topic["first_offset"], topic["next_offset"], topic["messages"]) == (0, 0, 0)
    await broker.stop()


async def test_a_topic_that_exists_is_not_created_again_unless_that_is_fine() -> None:
    broker = await open_broker()
    speaker = await Speaker.to(broker)
    first = await speaker.request("topic.create", topic="orders")
    assert await speaker.request("topic.create", topic="orders") == "already_exists"
    assert await speaker.request("topic.create", topic="orders", exist_ok=True) == first
    await broker.stop()


@pytest.mark.parametrize(
    ("op", "fields", "code"),
    [
        ("topic.create", {"topic": "a b"}, "invalid_name"),
        ("topic.create", {"topic": ".."}, "invalid_name"),
        ("topic.create", {"topic": "@system"}, "invalid_name"),
        ("topic.create", {"topic": "orders", "lifetime_ms": 9_999}, "invalid_request"),
        ("topic.create", {"topic": "orders", "expires_at_ms": 5}, "invalid_request"),
        ("topic.create", {"topic": "orders", "lifetime_ms": 0}, "invalid_request"),
        (
            "topic.create",
            {"topic": "orders", "lifetime_ms": 60_000, "expires_at_ms": 0},
            "invalid_request",
        ),
        ("topic.create", {"topic": "orders", "rule": "open"}, "invalid_request"),
        ("topic.create", {"topic": "orders", "message_bytes_max": 2**31 - 1}, "invalid_request"),
        ("topic.create", {"topic": 7}, "invalid_request"),
        ("topic.describe", {"topic": "orders"}, "unknown_topic"),
        ("topic.delete", {"topic": "orders"}, "unknown_topic"),
        ("topic.change", {"topic": "orders"}, "unknown_topic"),
        ("topic.list", {"limit": 0}, "invalid_request"),
        ("topic.paint", {}, "invalid_request"),
    ],
)
async def test_each_mistake_has_its_code(op: str, fields: dict[str, Any], code: str) -> None:
    broker = await open_broker()
    speaker = await Speaker.to(broker)
    assert await speaker.request(op, **fields) == code
    assert not speaker.is_lost
    await broker.stop()


async def test_a_change_changes_what_it_names_and_leaves_the_rest() -> None:
    broker = await open_broker()
    speaker = await Speaker.to(broker)
    await speaker.request("topic.create", topic="orders", lifetime_ms=60_000, retention_ms=5)
    await speaker.request("topic.change", topic="orders", rule="closed")
    topic = await described(speaker)
    assert (topic["rule"], topic["retention_ms"]) == ("closed", 5)
    assert topic["expires_at_ms"] == START_MS + 60_000
    assert await speaker.request("topic.change", topic="orders", lifetime_ms=0) == "invalid_request"
    both = {"lifetime_ms": 60_000, "expires_at_ms": START_MS + 90_000}
    assert await speaker.request("topic.change", topic="orders", **both) == "invalid_request"
    assert (await described(speaker))["expires_at_ms"] == START_MS + 60_000
    await speaker.request("topic.change", topic="orders", expires_at_ms=0)
    assert (await described(speaker))["expires_at_ms"] == 0
    await broker.stop()


async def test_two_changes_at_the_same_time_are_both_made() -> None:
    broker = await open_broker()
    speaker, other = await Speaker.to(broker), await Speaker.to(broker)
    await speaker.request("topic.create", topic="orders")
    first = speaker.request("topic.change", topic="orders", rule="closed")
    second = other.request("topic.change", topic="orders", retention_ms=77)
    await asyncio.gather(first, second)
    topic = await described(speaker)
    assert (topic["rule"], topic["retention_ms"]) == ("closed", 77)
    await broker.stop()


async def test_a_change_after_a_restart_builds_on_what_was_changed_before() -> None:
    disk = FaultyDisk(Random(1))
    broker = await open_broker(disk)
    speaker = await Speaker.to(broker)
    await speaker.request("topic.create", topic="orders")
    await speaker.request("topic.change", topic="orders", rule="closed")
    broker.fail(RuntimeError("killed by the test"))
    disk.crash(unsynced="lost")
    broker = await open_broker(disk)
    speaker = await Speaker.to(broker)
    await speaker.request("topic.change", topic="orders", retention_ms=77)
    topic = await described(speaker)
    assert (topic["rule"], topic["retention_ms"]) == ("closed", 77)
    await broker.stop()


async def test_nothing_is_answered_before_it_is_durable() -> None:
    broker = await open_broker(commit=HeldCommit)
    speaker = await Speaker.to(broker)
    request_id = speaker.new_id()
    speaker.say(Kind.REQUEST, request_id, b'{"op":"topic.create","topic":"orders"}')
    await turns()
    assert speaker.of(request_id) == []
    release(broker)
    await turns()
    assert [kind for kind, _ in speaker.of(request_id)] == [Kind.REPLY]
    await broker.stop()


@pytest.mark.parametrize("error", [None, DiskFull("the disk is full")], ids=["stored", "refused"])
async def test_a_second_creation_that_may_find_the_topic_waits_for_the_first(
    error: DiskFull | None,
) -> None:
    broker = await open_broker(commit=HeldCommit)
    first, second = await Speaker.to(broker), await Speaker.to(broker)
    first.say(Kind.REQUEST, 5, b'{"op":"topic.create","topic":"orders"}')
    await turns()
    second.say(Kind.REQUEST, 6, b'{"op":"topic.create","topic":"orders","exist_ok":true}')
    await turns()
    assert second.of(6) == []
    if error is None:
        release(broker)
    else:
        commit = broker._commit
        assert isinstance(commit, HeldCommit)
        commit.held.pop()[2](error)
    await turns()
    assert [kind for kind, _ in second.of(6)] == [Kind.REPLY if error is None else Kind.ERROR]
    assert second.of(6) == first.of(5)
    await broker.stop()


async def test_a_creation_that_finds_a_topic_of_a_publish_waits_for_it() -> None:
    broker = await open_broker(commit=HeldCommit)
    speaker = await Speaker.to(broker)
    speaker.say_publish("orders")
    await turns()
    speaker.say(Kind.REQUEST, 6, b'{"op":"topic.create","topic":"orders","exist_ok":true}')
    await turns()
    assert speaker.of(6) == []
    release(broker)
    await turns()
    assert [kind for kind, _ in speaker.of(6)] == [Kind.REPLY]
    await broker.stop()


def release(broker: Broker) -> None:
    commit = broker._commit
    assert isinstance(commit, HeldCommit)
    commit.release()


async def test_a_name_can_be_used_again_and_begins_at_offset_zero() -> None:
    broker = await open_broker()
    speaker = await Speaker.to(broker)
    await speaker.publish("orders", [b"old"])
    first = await described(speaker)
    await speaker.request("topic.delete", topic="orders")
    await speaker.publish("orders", [b"new"])
    again = await described(speaker)
    assert again["number"] > first["number"]
    assert await speaker.read("orders") == [b"new"]
    await broker.stop()


async def test_topics_are_listed_in_pages_in_the_order_of_their_names() -> None:
    broker = await open_broker()
    speaker = await Speaker.to(broker)
    for name in ("b2", "a", "b1", "c", "b3"):
        await speaker.request("topic.create", topic=name)
    names: list[str] = []
    after = ""
    for _ in range(3):
        page = await speaker.request("topic.list", prefix="b", after=after, limit=2)
        assert isinstance(page, dict)
        names += [topic["topic"] for topic in page["topics"]]
        after = page["next"]
        if not after:
            break
    assert names == ["b1", "b2", "b3"]
    await broker.stop()


async def test_a_page_has_a_limited_number_of_topics_whatever_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("onward.broker.operations.topics.LIST_PAGE_MAX", 2)
    broker = await open_broker()
    speaker = await Speaker.to(broker)
    for name in ("c", "a", "b"):
        await speaker.request("topic.create", topic=name)
    page = await speaker.request("topic.list", limit=10_000)
    assert isinstance(page, dict)
    assert ([topic["topic"] for topic in page["topics"]], page["next"]) == (["a", "b"], "b")
    await broker.stop()


async def test_a_list_follows_what_is_created_and_ended() -> None:
    broker = await open_broker()
    speaker = await Speaker.to(broker)
    for name in ("b1", "b3"):
        await speaker.request("topic.create", topic=name)
    assert broker.catalogue.names == ["b1", "b3"]
    await speaker.request("topic.create", topic="b2")
    await speaker.request("topic.delete", topic="b1")
    await speaker.request("topic.create", topic="a")
    assert broker.catalogue.names == sorted(broker.catalogue.by_name) == ["a", "b2", "b3"]
    await broker.stop()


async def test_ended_topics_are_listed_when_asked_for() -> None:
    broker = await open_broker()
    speaker = await Speaker.to(broker)
    await speaker.request("topic.create", topic="orders")
    await speaker.request("topic.delete", topic="orders")
    page = await speaker.request("topic.list", all=True)
    assert isinstance(page, dict)
    assert [(topic["topic"], topic["state"]) for topic in page["ended"]] == [("orders", "deleted")]
    await broker.stop()


async def test_there_are_never_more_topics_than_allowed() -> None:
    broker = await open_broker(settings=settings_with(topics={"count_max": 2}))
    speaker = await Speaker.to(broker)
    for name in ("a", "b"):
        await speaker.request("topic.create", topic=name)
    assert await speaker.request("topic.create", topic="c") == "overloaded"
    assert await speaker.publish("d") == "overloaded"
    await broker.stop()


async def test_topics_of_pipelines_have_the_limit_too_and_take_no_room_from_others() -> None:
    broker = await open_broker(settings=settings_with(topics={"count_max": 3}))
    speaker = await Speaker.to(broker)
    for name in ("@sink.a", "@sink.b", "@pipeline"):
        assert await speaker.request("topic.create", topic=name) != "overloaded"
    assert await speaker.request("topic.create", topic="@sink.c") == "overloaded"
    assert await speaker.publish("@sink.d") == "unknown_topic"
    for name in ("a", "b", "c"):
        assert await speaker.request("topic.create", topic=name) != "overloaded"
    assert await speaker.request("topic.create", topic="d") == "overloaded"
    await broker.stop()


async def test_topics_of_pipelines_are_created_changed_and_deleted_by_clients() -> None:
    broker = await open_broker()
    speaker = await Speaker.to(broker)
    sequence = 0
    for name in ("@pipeline", "@sink.load-7", "@sink." + "x" * 123):
        if name != "@pipeline":
            assert await speaker.publish(name, producer_id=7, sequence=99) == "unknown_topic"
            await speaker.request("topic.create", topic=name)
        for _ in range(3):
            # The first goes the long way, the next ones go the short one.
            sequence += 1
            published = await speaker.publish(name, producer_id=7, sequence=sequence)
            assert not isinstance(published, str)
        assert await speaker.request("topic.change", topic=name, rule="read-only") != "forbidden"
        assert await speaker.request("topic.delete", topic=name) == {"topic": name}
    for name in ("@sink.", "@sink", "@other"):
        assert await speaker.publish(name) == "invalid_name"
        assert await speaker.request("topic.create", topic=name) == "invalid_name"
    await broker.stop()


async def test_a_topic_of_the_sink_takes_pieces_larger_than_a_message_may_be() -> None:
    small = {"message_bytes_max": 1_000, "batch_bytes_max": 1 << 20}
    broker = await open_broker(settings=settings_with(topics=small))
    speaker = await Speaker.to(broker)
    await speaker.request("topic.create", topic="@sink.load-7")
    await speaker.request("topic.create", topic="@sink.small", message_bytes_max=500)
    assert not isinstance(await speaker.publish("@sink.load-7", [bytes(100_000)]), str)
    assert await speaker.publish("@sink.small", [bytes(600)]) == "message_too_large"
    assert await speaker.publish("orders", [bytes(1_200)]) == "message_too_large"
    await broker.stop()


async def test_a_full_disk_refuses_new_topics_and_still_ends_old_ones() -> None:
    broker = await open_broker()
    speaker = await Speaker.to(broker)
    await speaker.publish("orders")
    broker.gate.disk_is_full = True
    assert await speaker.request("topic.create", topic="bills") == "disk_full"
    assert await speaker.request("topic.delete", topic="orders") == {"topic": "orders"}
    await broker.stop()


async def test_a_creation_that_failed_is_in_no_checkpoint() -> None:
    disk = FaultyDisk(Random(1))
    broker = await open_broker(disk, commit=HeldCommit, clock=ManualClock())
    speaker = await Speaker.to(broker)
    request_id = speaker.say_publish("orders", [bytes([1]) * 50_000])
    await turns()
    await broker.housekeeping.checkpoint()
    used = disk.capacity_bytes - disk.free_bytes("log")
    disk.capacity_bytes = used + 4_096
    release(broker)
    await turns()
    assert speaker.answer(request_id) == "disk_full"
    disk.capacity_bytes = 1 << 30
    broker.fail(RuntimeError("killed by the test"))
    disk.crash(unsynced="lost")
    again = await open_broker(disk)
    assert len(again.catalogue) == 0
    await again.stop()


async def test_status_tells_how_the_broker_is() -> None:
    broker = await open_broker()
    speaker = await Speaker.to(broker)
    await speaker.publish("orders", [b"a", b"b"])
    status = await speaker.request("status")
    assert isinstance(status, dict)
    assert (status["topics"], status["published"], status["connections"]) == (1, 2, 1)
    assert (status["next_event_id"], status["durable_event_id"]) == (3, 2)
    await broker.stop()
