"""Scheduling, as programs do it, against a real broker in memory. Nothing here waits for a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from onward.client import schedule_calls as module
from onward.client.client import Client
from onward.client.scheduled import ScheduledReceipt
from onward.client.sync import connect_sync
from onward.errors import (
    AlreadyExists,
    Forbidden,
    InvalidName,
    InvalidRequest,
    NotConnected,
    OutcomeUnknown,
)

from .calling import Cable, SlowCommit, calling
from .consuming import PATIENCE_S, until

Trio = tuple[Client, Cable, SlowCommit]


@pytest.fixture
async def trio() -> AsyncIterator[Trio]:
    async with calling(timeout_s=PATIENCE_S) as given:
        yield given


async def until_fired(client: Client, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await client.status())["fired"] < count:  # noqa: ASYNC110  # the broker tells
            await asyncio.sleep(0.005)


async def bodies(client: Client, topic: str = "orders") -> list[bytes]:
    return [message.body async for message in client.read(topic)]


# --- publishing --------------------------------------------------------------------------------


async def test_a_scheduled_publish_says_when_where_and_under_which_id(trio: Trio):
    client, _, _ = trio
    at = datetime(2030, 1, 1, tzinfo=UTC)
    receipt = await client.publish("orders", "x", at=at, key="7", tag=["a", "b"], priority=3)
    assert (receipt.topic, receipt.schedule_id, receipt.id) == ("orders", 0, "@schedule/0")
    assert (receipt.due_at_ms, receipt.durability) == (at.timestamp() * 1000, "disk")
    found = await receipt.status()
    assert (found.state, found.topic, found.body, found.body_bytes) == (
        "waiting",
        "orders",
        b"x",
        1,
    )
    assert (found.key, found.tag, found.priority, found.due_at_ms) == (
        "7", "a,b", 3, receipt.due_at_ms,
    )  # fmt: skip


async def test_scheduled_publishes_of_one_moment_travel_together_whatever_their_topics(trio: Trio):
    client, _, _ = trio
    receipts = await asyncio.gather(
        *[client.publish(f"orders-{n % 3}", str(n), delay_ms=3_600_000 + n) for n in range(100)]
    )
    assert [receipt.schedule_id for receipt in receipts] == list(range(100))
    assert len({receipt.event_id for receipt in receipts}) == 1
    assert [receipt.topic for receipt in receipts] == [f"orders-{n % 3}" for n in range(100)]


async def test_plain_and_scheduled_publishes_do_not_mix(trio: Trio):
    client, _, _ = trio
    now, later, soon = await asyncio.gather(
        client.publish("orders", "now"),
        client.publish("orders", "later", delay="1h"),
        client.publish_soon("orders", "soon", delay="2h"),
    )
    assert (now.id, {later.id, soon.id}) == ("orders/0", {"@schedule/0", "@schedule/1"})
    assert isinstance(soon, ScheduledReceipt)
    assert await bodies(client) == [b"now"]


async def test_one_refused_message_does_not_harm_those_that_share_its_batch(trio: Trio):
    client, _, _ = trio
    await client.create_topic("closed", rule="closed")
    given = await asyncio.gather(
        client.publish("orders", "a", delay="1h"),
        client.publish("orders", "b", delay="4000d"),
        client.publish("closed", "c", delay="1h"),
        client.publish("orders", "d", delay="1h"),
        return_exceptions=True,
    )
    assert [type(one) for one in given] == [
        ScheduledReceipt, InvalidRequest, Forbidden, ScheduledReceipt,
    ]  # fmt: skip
    assert len([one async for one in client.list_scheduled()]) == 2


async def test_one_business_key_that_waits_does_not_harm_others(trio: Trio):
    client, _, _ = trio
    await client.publish("orders", "a", delay="1h", unique="order-7")
    given = await asyncio.gather(
        client.publish("orders", "b", delay="1h", unique="order-7"),
        client.publish("orders", "c", delay="1h", unique="order-8"),
        client.publish("orders", "d", delay="1h"),
        return_exceptions=True,
    )
    assert [type(one) for one in given] == [AlreadyExists, ScheduledReceipt, ScheduledReceipt]


async def test_the_last_of_many_that_replace_each_other_is_the_one_that_waits(trio: Trio):
    client, _, _ = trio
    futures = [
        client.publish_soon("orders", str(n), delay="1h", unique="order-7", replace=True)
        for n in range(20)
    ]
    receipts = await asyncio.gather(*futures)
    waiting = [one async for one in client.list_scheduled()]
    assert [one.id for one in waiting] == [receipts[-1].schedule_id]
    assert (await client.scheduled(unique="order-7")).body == b"19"
    assert {(await one.status()).state for one in receipts[:-1]} == {"replaced"}


@pytest.mark.parametrize("options", [{"delay": 0}, {"at": 0}, {"at": "1999-01-01"}, {"at": -5}])
async def test_what_is_due_already_fires_at_once(trio: Trio, options: dict[str, Any]):
    client, _, _ = trio
    receipt = await client.publish("orders", "x", **options)
    await until_fired(client, 1)
    (message,) = [message async for message in client.read("orders")]
    assert (message.body, message.schedule_id) == (b"x", 0)
    assert message.due_at_ms == receipt.due_at_ms


@pytest.mark.parametrize(
    "options",
    [
        {"unique": "a"}, {"replace": True}, {"delay": "1h", "replace": True}, {"delay": -1},
        {"delay": float("nan")}, {"at": float("nan")}, {"at": True}, {"delay": "1h", "at": 7},
        {"at": datetime(2030, 1, 1)}, {"at": 10**40}, {"delay": timedelta.max},  # noqa: DTZ001
        {"at": "9999-12-31T23:59:59Z"}, {"delay": "1h", "unique": 7},
        {"delay": "1h", "unique": ""}, {"delay": "1h", "unique": "x" * 513},
        {"delay": "1h", "unique": "@mine"},
    ],
)  # fmt: skip
async def test_a_wrong_time_or_key_is_refused_and_nothing_is_stored(
    trio: Trio, options: dict[str, Any]
):
    client, _, _ = trio
    with pytest.raises(InvalidRequest):
        await client.publish("orders", "x", **options)
    if "unique" not in options:
        with pytest.raises(InvalidRequest):
            await client.publish_many("orders", ["x"], **options)
    assert (await client.status())["scheduled"] == 0


async def test_the_topic_of_the_schedule_is_not_for_users(trio: Trio):
    client, _, _ = trio
    with pytest.raises(InvalidName):
        await client.publish("@schedule", "x")
    # Also while a batch of the schedule is open.
    waiting = client.publish_soon("orders", "x", delay="1h")
    with pytest.raises(InvalidName):
        client.publish_soon("@schedule", "x")
    with pytest.raises(InvalidName):
        await client.publish("@schedule", "x", delay="1h")
    with pytest.raises(InvalidName):
        await client.publish_many("@schedule", ["x"], delay="1h")
    assert (await waiting).schedule_id == 0


async def test_many_are_scheduled_as_one_batch_with_a_time_and_a_key_each(trio: Trio):
    client, _, _ = trio
    receipt = await client.publish_many(
        "orders", ["a", "b", "c"], delay=["3h", "1h", "2h"], uniques=["a", None, "c"],
        keys=["1", "2", None],
    )  # fmt: skip
    assert (list(receipt.ids), receipt.count, receipt.topic) == ([0, 1, 2], 3, "orders")
    found = [one async for one in client.list_scheduled()]
    assert [(one.id, one.key, one.unique) for one in found] == [
        (1, "2", None), (2, None, "c"), (0, "1", "a"),
    ]  # fmt: skip
    with pytest.raises(AlreadyExists):
        await client.publish_many("orders", ["d", "e"], delay="1h", uniques=["d", "a"])
    replaced = await client.publish_many(
        "orders", ["d", "e"], delay="1h", uniques=["d", "a"], replace=True
    )
    assert (await client.scheduled(unique="a")).id == replaced.first_id + 1
    assert (await client.scheduled(0)).state == "replaced"


async def test_uniques_without_a_time_are_refused(trio: Trio):
    client, _, _ = trio
    with pytest.raises(InvalidRequest, match="say delay or at"):
        await client.publish_many("orders", ["a"], uniques=["a"])
    with pytest.raises(InvalidRequest, match="2 values for 1"):
        await client.publish_many("orders", ["a"], uniques=["a", "b"], delay="1h")
    with pytest.raises(InvalidRequest, match="say unique"):
        await client.publish_many("orders", ["a"], replace=True, delay="1h")


@pytest.mark.parametrize("unique", [None, "order-7"])
async def test_a_scheduled_publish_whose_answer_was_lost_waits_once(trio: Trio, unique: str | None):
    client, cable, commit = trio
    await client.publish("orders", "first", delay="1h")
    commit.is_holding = True
    future = client.publish_soon("orders", "x", delay="1h", unique=unique)
    await until(lambda: bool(commit._held))
    dialled = cable.dialled
    cable.cut()
    await until(lambda: cable.dialled > dialled)
    commit.release()
    receipt = await asyncio.wait_for(future, PATIENCE_S)
    assert receipt.schedule_id == 1
    assert [one.id async for one in client.list_scheduled()] == [0, 1]


async def test_a_scheduled_publish_that_was_not_sent_in_time_is_taken_back(trio: Trio):
    client, cable, _ = trio
    cable.pull()
    for unique in (None, "order-7"):
        with pytest.raises(NotConnected):
            await client.publish("orders", "x", delay="1h", unique=unique, timeout="50ms")
    cable.plug()
    assert (await client.publish("orders", "y", delay="1h")).schedule_id == 0


# --- cancel, move, look ------------------------------------------------------------------------


async def test_a_cancelled_message_is_cancelled_however_often_it_is_asked(trio: Trio):
    client, _, _ = trio
    receipt = await client.publish("orders", "x", delay="1h")
    first = await receipt.cancel(cause="paid")
    assert (first.id, first.state, first.topic) == (0, "cancelled", "orders")
    assert (await receipt.cancel()).state == "cancelled"
    assert (await receipt.status()).state == "cancelled"
    assert (await receipt.reschedule(delay="1h")).state == "cancelled"
    assert receipt.schedule_id == 0


async def test_what_has_fired_is_told_with_the_message_that_it_is(trio: Trio):
    client, _, _ = trio
    await client.publish("orders", "before")
    receipt = await client.publish("orders", "x", at=0)
    await until_fired(client, 1)
    result = await receipt.cancel()
    assert (result.state, result.message_id) == ("fired", "orders/1")
    moved = await receipt.reschedule(delay="1h")
    assert (moved.state, moved.is_moved, moved.offset) == ("fired", False, 1)
    status = await receipt.status()
    assert (status.state, status.topic, status.offset) == ("fired", "orders", 1)


async def test_a_moved_message_has_a_new_id_and_its_receipt_knows_it(trio: Trio):
    client, _, _ = trio
    receipt = await client.publish("orders", "x", delay="1h", unique="order-7", key="7")
    at_ms = receipt.due_at_ms + 1
    result = await receipt.reschedule(at=at_ms)
    assert (result.state, result.id, result.at_ms) == ("moved", 1, at_ms)
    assert (receipt.id, receipt.due_at_ms) == ("@schedule/1", at_ms)
    assert (await client.scheduled(0)).state == "replaced"
    found = await client.scheduled(unique="order-7")
    assert (found.id, found.key, found.body, found.at_ms) == (1, "7", b"x", at_ms)
    assert (await client.reschedule(unique="order-7", at=0)).is_moved
    await until_fired(client, 1)
    assert await bodies(client) == [b"x"]


async def test_ids_are_numbers_texts_or_receipts_and_each_is_answered_once(trio: Trio):
    client, _, _ = trio
    receipt = await client.publish("orders", "x", delay="1h")
    await client.publish_many("orders", ["y", "z"], delay="1h")
    results = await client.cancel_scheduled([2, "@schedule/1", receipt, "2", 99])
    assert [(one.id, one.state) for one in results] == [
        (2, "cancelled"), (1, "cancelled"), (0, "cancelled"), (99, "not_found"),
    ]  # fmt: skip
    assert await client.cancel_scheduled([]) == []


async def test_business_keys_are_answered_in_their_order(trio: Trio):
    client, _, _ = trio
    await client.publish("orders", "x", delay="1h", unique="a")
    results = await client.cancel_scheduled(unique=["b", "a"])
    assert [(one.unique, one.id, one.state) for one in results] == [
        ("b", -1, "not_found"), ("a", 0, "cancelled"),
    ]  # fmt: skip


async def test_many_are_cancelled_in_pages(trio: Trio, monkeypatch: pytest.MonkeyPatch):
    client, _, _ = trio
    monkeypatch.setattr(module, "CANCELLED_MAX", 7)
    monkeypatch.setattr(module, "_UNIQUES_MAX", 3)
    receipt = await client.publish_many("orders", map(str, range(20)), delay="1h")
    results = await receipt.cancel()
    assert [(one.id, one.state) for one in results] == [(n, "cancelled") for n in range(20)]
    keys = [str(n) for n in range(8)]
    await client.publish_many("orders", keys, delay="1h", uniques=keys)
    results = await client.cancel_scheduled(unique=keys)
    assert [(one.unique, one.state) for one in results] == [(key, "cancelled") for key in keys]


@pytest.mark.parametrize(
    "call",
    [
        lambda mq: mq.cancel_scheduled(),
        lambda mq: mq.cancel_scheduled(1, unique="a"),
        lambda mq: mq.cancel_scheduled("orders/7"),
        lambda mq: mq.cancel_scheduled([True]),
        lambda mq: mq.cancel_scheduled(unique=[7]),
        lambda mq: mq.reschedule(1),
        lambda mq: mq.reschedule(delay="1h"),
        lambda mq: mq.reschedule(1, delay="1h", at=7),
        lambda mq: mq.reschedule(1, delay="4000d"),
        lambda mq: mq.reschedule(1, delay=float("nan")),
        lambda mq: mq.scheduled(),
        lambda mq: mq.scheduled(1, unique="a"),
        lambda mq: mq.scheduled(-1),
        lambda mq: mq.calendar(start="2h", end="1h"),
        lambda mq: mq.calendar(step="1ms"),
        lambda mq: mq.calendar(end="100d", step="1s"),
        lambda mq: mq.set_recurring("r", "orders", ""),
        lambda mq: mq.set_recurring("r", "orders", "", cron="* * * * *", every="1h"),
        lambda mq: mq.set_recurring("r", "orders", "", cron="99 * * * *"),
        lambda mq: mq.set_recurring("r", "orders", "", cron="* * * * *", zone="Mars/Dome"),
        lambda mq: mq.set_recurring("r", "orders", "", every="1ms"),
        lambda mq: mq.set_recurring("r", "@schedule", "", every="1h"),
        lambda mq: mq.set_recurring("r r", "orders", "", every="1h"),
        lambda mq: mq.set_recurring("r", "orders", "", every="1h", headers={"a": b"b"}),
        lambda mq: mq.pause_recurring("nobody"),
        lambda mq: mq.delete_recurring("nobody"),
    ],
)
async def test_wrong_requests_are_refused_in_clear_words(trio: Trio, call: Callable[..., Any]):
    client, _, _ = trio
    with pytest.raises(InvalidRequest) as raised:
        await call(client)
    assert len(str(raised.value)) > 10


async def test_what_only_asks_is_asked_again_when_the_connection_is_lost(trio: Trio):
    client, cable, commit = trio
    receipt = await client.publish("orders", "x", delay="1h")
    cable.cut()
    assert (await receipt.status()).state == "waiting"
    cable.cut()
    assert [one.id async for one in client.list_scheduled()] == [0]
    commit.is_holding = True
    cancelling = asyncio.ensure_future(receipt.cancel())
    await until(lambda: bool(commit._held))
    cable.cut()
    with pytest.raises(OutcomeUnknown):
        await cancelling
    commit.release()
    assert (await receipt.cancel()).state == "cancelled"


# --- lists and the calendar --------------------------------------------------------------------


async def test_what_waits_is_listed_by_topic_key_and_time_in_pages(
    trio: Trio, monkeypatch: pytest.MonkeyPatch
):
    client, _, _ = trio
    monkeypatch.setattr(module, "LIST_PAGE_MAX", 3)
    base_ms = client._clock.now_ms() + 86_400_000
    at = [base_ms + n * 1_000 for n in reversed(range(10))]
    await client.publish_many("orders", map(str, range(10)), at=at, keys=["a", "b"] * 5)
    await client.publish("refunds", "x", at=base_ms)

    async def listed(**options: Any) -> list[int]:
        return [one.id async for one in client.list_scheduled(**options)]

    assert await listed(topic="orders") == list(reversed(range(10)))
    assert await listed(topic="refunds") == [10]
    assert await listed(topic="orders", key="b") == [9, 7, 5, 3, 1]
    assert await listed(topic="orders", start=base_ms + 3_000, end=base_ms + 5_000) == [6, 5]
    assert await listed(end="1h") == []
    assert len(await listed(end=timedelta(days=2))) == 11
    await client.cancel_scheduled([9, 8])
    assert await listed(topic="orders", key="b") == [7, 5, 3, 1]


async def test_the_calendar_counts_what_fires_by_step_and_topic(trio: Trio):
    client, _, _ = trio
    start_ms = client._clock.now_ms() + 86_400_000
    start_ms -= start_ms % 3_600_000
    minutes = [0, 0, 1, 61, 61, 61]
    at = [start_ms + minute * 60_000 for minute in minutes]
    await client.publish_many("orders", minutes, at=at)
    await client.publish("refunds", "x", at=start_ms + 60_000)
    found = await client.calendar(start=start_ms, end=start_ms + 7_200_000, step="1h")
    assert [(bar.at_ms - start_ms, bar.count) for bar in found.bars] == [(0, 4), (3_600_000, 3)]
    assert (found.topics, found.count, found.is_exact) == ({"orders": 6, "refunds": 1}, 7, True)
    fine = await client.calendar(start=start_ms, end=start_ms + 120_000, step="1m", topic="orders")
    assert [bar.count for bar in fine.all_bars()] == [2, 1]
    empty = await client.calendar(end="1h")
    assert (empty.count, empty.bars, empty.step_ms) == (0, [], 300_000)
    assert empty.start_ms % empty.step_ms == 0


# --- recurring ---------------------------------------------------------------------------------


async def test_a_recurring_schedule_is_kept_as_it_was_set(trio: Trio):
    client, _, _ = trio
    one = await client.set_recurring(
        "report", "reports", {"kind": "daily"}, cron="0 9 * * MON-FRI", zone="Europe/Berlin",
        catch_up="none", key="k", headers={"a": "b"}, tag=["x", "y"], priority=9, tenant="acme",
        trace_id="t", start=datetime(2020, 1, 1, tzinfo=UTC),
    )  # fmt: skip
    assert (one.body, one.cron, one.zone, one.catch_up) == (
        b'{"kind":"daily"}', "0 9 * * MON-FRI", "Europe/Berlin", "none",
    )  # fmt: skip
    assert (one.key, one.headers, one.tag, one.priority) == ("k", {"a": "b"}, "x,y", 9)
    assert (one.tenant, one.trace_id, one.start_ms) == ("acme", "t", 1_577_836_800_000)
    assert one.next_at_ms > 0
    assert await client.recurring() == [one]


async def test_a_recurring_schedule_is_paused_resumed_replaced_and_deleted(trio: Trio):
    client, _, _ = trio
    await client.set_recurring("tick", "ticks", b"\xff", every="1h")
    paused = await client.pause_recurring("tick")
    assert (paused.paused, paused.next_at_ms, paused.body) == (True, 0, b"\xff")
    assert not (await client.resume_recurring("tick")).paused
    await client.set_recurring("tick", "tocks", "", every="2h")
    await client.set_recurring("another", "ticks", "", every="1h", paused=True)
    found = await client.recurring()
    assert [(one.name, one.topic, one.paused) for one in found] == [
        ("another", "ticks", True), ("tick", "tocks", False),
    ]  # fmt: skip
    await client.delete_recurring("tick")
    assert [one.name for one in await client.recurring()] == ["another"]


# --- in threads --------------------------------------------------------------------------------


def test_threads_schedule_cancel_move_and_look_without_awaiting():
    with connect_sync("memory:", timeout=f"{PATIENCE_S}s") as mq:
        receipt = mq.publish("orders", "x", delay="1h", unique="a")
        assert (receipt.topic, receipt.id, receipt.durability) == ("orders", "@schedule/0", "disk")
        assert receipt.status().body == b"x"
        assert receipt.reschedule(delay="2h").is_moved
        assert (receipt.schedule_id, receipt.status().state) == (1, "waiting")
        soon = mq.publish_soon("orders", "y", delay="1h").result(PATIENCE_S)
        assert soon.cancel().state == "cancelled"
        many = mq.publish_many("orders", ["a", "b"], delay=["1h", "3h"])
        assert (many.topic, list(many.ids), many.count) == ("orders", [3, 4], 2)
        assert [one.id for one in mq.list_scheduled(topic="orders")] == [3, 1, 4]
        assert mq.calendar(end="4h").count == 3
        assert [one.state for one in many.cancel()] == ["cancelled", "cancelled"]
        assert mq.cancel_scheduled(receipt)[0].state == "cancelled"
        assert repr(receipt).startswith("SyncScheduledReceipt('@schedule/1'")
        assert mq.publish("orders", "now").id == "orders/0"
        mq.set_recurring("tick", "ticks", "", every="1h")
        assert mq.pause_recurring("tick").paused
        assert mq.recurring()[0].name == "tick"
        with pytest.raises(InvalidRequest):
            mq.publish("orders", "x", delay=-1)
        with pytest.raises(InvalidRequest, match="catch_up is one or none, not 'all'"):
            mq.set_recurring("tick", "ticks", "", every="1h", catch_up="all")  # type: ignore[arg-type]


# --- explaining --------------------------------------------------------------------------------


async def test_a_fired_message_is_explained_with_who_scheduled_it_and_for_when(trio: Trio):
    client, _, _ = trio
    await client.publish("orders", "now")
    receipt = await client.publish("orders", "x", delay="1ms")
    await until_fired(client, 1)
    origin = (await client.explain("orders/1")).scheduled
    assert origin is not None
    entry = await client.get("@schedule", receipt.schedule_id)
    assert origin.scheduled_by is not None
    assert (origin.schedule_id, origin.due_at_ms) == (receipt.schedule_id, receipt.due_at_ms)
    assert (origin.scheduled_by.client, origin.scheduled_at_ms) == ("test", entry.published_at_ms)
    assert (await client.explain("orders/0")).scheduled is None


async def test_a_fired_message_is_explained_when_the_log_has_left_its_entry_behind(trio: Trio):
    client, cable, _ = trio
    receipt = await client.publish("orders", "x", delay="1ms")
    await until_fired(client, 1)
    cable.broker.catalogue.by_name["@schedule"].first_offset = 1
    life = await client.explain("orders/0")
    assert life.scheduled is not None
    assert (life.scheduled.schedule_id, life.scheduled.due_at_ms) == (0, receipt.due_at_ms)
    assert life.lines()[1].endswith("; who scheduled it is no longer stored")
    assert (await client.explain("@schedule/0")).lines()[-1] == "  fired as orders/0"


async def test_an_id_of_the_schedule_is_explained_by_what_became_of_it(trio: Trio):
    client, _, _ = trio
    await client.publish("orders", "fires", at=0)
    await until_fired(client, 1)
    await client.publish_many("orders", ["waits", "cancelled", "moved"], delay="1h")
    await client.cancel_scheduled(2)
    await client.reschedule(3, delay="2h")
    told = [(await client.explain(f"@schedule/{number}")).lines() for number in range(5)]
    assert [lines[-1].split()[0] for lines in told] == [
        "fired", "waits", "cancelled:", "replaced:", "waits",
    ]  # fmt: skip
    assert told[0][1].startswith("  scheduled by test")
    assert told[0][-1] == "  fired as orders/0"
