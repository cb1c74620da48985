"""What a program can ask of groups, dead letters and messages, against a real broker in memory."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, Literal

import pytest

from onward.client import group_calls
from onward.client.client import Client
from onward.client.explanation import GroupLife
from onward.client.finding import OpenReader, collect
from onward.client.groups import DeadLetterDescription
from onward.delivery.filter import Filter
from onward.delivery.ranges import Range
from onward.delivery.trace import Trace
from onward.errors import (
    AlreadyExists,
    InvalidName,
    InvalidRequest,
    OffsetOutOfRange,
    OnwardError,
    UnknownGroup,
    UnknownTopic,
)
from onward.message.message import Message
from onward.protocol.operations.messages import Publisher

from .calling import Cable, calling
from .consuming import until

Pair = tuple[Client, Cable]


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    """A client, and a topic `orders` with ten messages, which the group `billing` consumes."""
    async with calling() as (client, cable, _):
        bodies = [f"order {n}" for n in range(10)]
        await client.publish_many("orders", bodies, keys=[str(n % 3) for n in range(10)])
        await client.create_group("billing", "orders")
        yield client, cable


async def happened(cable: Cable, did: str, *ranges: tuple[int, int], **fields: object) -> None:
    """Let the broker write a row of the trace, as it does for members."""
    done: asyncio.Future[OnwardError | None] = asyncio.get_running_loop().create_future()
    given: dict[str, object] = {
        "did": did, "at_ms": cable.broker.clock.now_ms(), "group": "billing", "topic": "orders",
        "ranges": ranges,
    }  # fmt: skip
    row = Trace(**(given | fields))  # type: ignore[arg-type]
    cable.broker.consuming.record([row], done.set_result)
    assert await asyncio.wait_for(done, 30) is None


async def letters(found: AsyncIterator[DeadLetterDescription]) -> list[DeadLetterDescription]:
    return [letter async for letter in found]


# --- groups ------------------------------------------------------------------------------------


async def test_a_group_is_created_as_it_was_asked_for(pair: Pair):
    client, _ = pair
    group = await client.create_group(
        "vip", "orders", mode="ordered", start=4, retry="fixed:10s:5", lease="2m", tags="vip,eu",
        headers={"shop": "eu"}, priorities=True, tenants={"acme": 2.5}, key_rate=7,
        key_concurrency=1,
    )  # fmt: skip
    assert (group.mode, group.lease_ms, group.retry.limit) == ("ordered", 120_000, 5)
    assert (group.filter.tags_any, group.filter.headers) == (("vip", "eu"), {"shop": "eu"})
    assert (group.priorities, group.tenants, group.key_rate) == (True, {"acme": 2.5}, 7)
    assert (group.topics[0].cursor, group.backlog) == (4, 6)
    assert group == await client.group("vip")


async def test_groups_are_listed_by_name_and_by_topic(pair: Pair):
    client, _ = pair
    await client.create_topic("refunds")
    await client.create_group("audit", ["refunds", "orders"])
    await client.create_group("cash", "refunds")
    assert [one.group for one in await client.groups()] == ["audit", "billing", "cash"]
    assert [one.group for one in await client.groups(topic="orders")] == ["audit", "billing"]


async def test_more_groups_than_a_page_are_all_listed(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    client, _ = pair
    monkeypatch.setattr("onward.client.group_calls._PAGE", 2)
    for number in range(4):
        await client.create_group(f"group-{number}", "orders")
    assert len(await client.groups()) == 5


async def test_a_change_leaves_the_rest(pair: Pair):
    client, _ = pair
    await client.create_topic("refunds")
    await client.change_group("billing", lease="1m", tags="vip")
    group = await client.change_group("billing", retry="none", add_topics="refunds")
    assert (group.lease_ms, group.filter.tags_any, group.retry.limit) == (60_000, ("vip",), 1)
    assert [share.topic for share in group.topics] == ["orders", "refunds"]


async def test_a_change_of_tags_leaves_the_headers_of_a_filter_and_the_other_way_round(pair: Pair):
    client, _ = pair
    await client.change_group("billing", tags="a", all_tags="b", headers={"kind": "paid"})
    by_tag = (await client.change_group("billing", tags=["c"])).filter
    assert by_tag == Filter(("c",), ("b",), {"kind": "paid"})
    by_header = (await client.change_group("billing", headers={"kind": "due"})).filter
    assert by_header == Filter(("c",), ("b",), {"kind": "due"})
    everything = await client.change_group("billing", tags=(), all_tags=(), headers={})
    assert everything.filter == Filter()


async def test_a_deleted_group_is_unknown(pair: Pair):
    client, _ = pair
    await client.delete_group("billing")
    with pytest.raises(UnknownGroup):
        await client.group("billing")
    assert await client.groups() == []


async def test_a_group_stands_still_while_it_is_paused(pair: Pair):
    client, _ = pair
    await client.pause_group("billing")
    assert (await client.group("billing")).paused
    await client.resume_group("billing")
    assert not (await client.group("billing")).paused


async def test_a_member_is_taken_out_and_let_in_again(pair: Pair):
    client, _ = pair
    await client.set_member("billing", "ann", offline=True)
    assert (await client.group("billing")).offline == ("ann",)
    await client.set_member("billing", "ann", offline=False)
    assert (await client.group("billing")).offline == ()


async def test_what_cannot_be_is_refused_with_a_clear_error(pair: Pair):
    client, _ = pair
    with pytest.raises(AlreadyExists):
        await client.create_group("billing", "orders")
    with pytest.raises(InvalidName):
        await client.create_group("no name", "orders")
    with pytest.raises(InvalidRequest, match="policy|retry"):
        await client.create_group("other", "orders", retry="sometimes")
    with pytest.raises(InvalidRequest, match="a lease is 1s to 1d"):
        await client.change_group("billing", lease="1ms")
    with pytest.raises(UnknownGroup):
        await client.reset_group("nobody", to="earliest")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"key_rate": math.nan}, "key_rate is 0 to 1e.09, not nan"),
        ({"key_rate": math.inf}, "key_rate is 0 to 1e.09, not inf"),
        ({"tenants": {"acme": math.nan}}, "weight of tenant 'acme' is above 0 .*, not nan"),
    ],
)
async def test_what_is_no_number_is_not_taken_for_nothing(
    pair: Pair, asked: dict[str, Any], said: str
):
    client, _ = pair
    with pytest.raises(InvalidRequest, match=said):
        await client.create_group("limited", "orders", **asked)
    with pytest.raises(InvalidRequest, match=said):
        await client.change_group("billing", **asked)
    assert [one.group for one in await client.groups()] == ["billing"]


async def test_a_filter_by_bytes_is_refused_wherever_it_is_given(pair: Pair):
    client, _ = pair
    signed: Any = {"sig": b"x"}
    with pytest.raises(InvalidRequest, match="headers as text: 'sig' has bytes"):
        await client.create_group("signed", "orders", headers=signed)
    with pytest.raises(InvalidRequest, match="headers as text: 'sig' has bytes"):
        await client.change_group("billing", headers=signed)
    with pytest.raises(InvalidRequest, match="headers as text: 'sig' has bytes"):
        client.consume("orders", group="signed", headers=signed)
    assert [one.group for one in await client.groups()] == ["billing"]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda mq: mq.fetch("orders", group=5), "a group name is text, not int"),
        (lambda mq: mq.fetch("orders", group=["g"]), "a group name is text, not list"),
        (lambda mq: mq.fetch(5, group="g"), "topics is a text or several, not 5"),
        (lambda mq: mq.peek("billing", "orders", n="x"), "a peek is for 1 to 10000 .* not 'x'"),
        (lambda mq: mq.peek("billing", "orders", n=True), "a peek is for 1 to 10000 .* not True"),
        (lambda mq: mq.redrive("billing", text=5), "searched for a text, not 5"),
        (lambda mq: mq.purge("billing", where=5), "'where' is a function .* not 5"),
        (lambda mq: mq.create_group("g", "orders", tags=5), "tags is a text or several, not 5"),
        (lambda mq: mq.create_group("g", 5), "topics is a text or several, not 5"),
    ],
)
async def test_a_value_of_a_wrong_kind_is_an_invalid_request(
    pair: Pair, call: Callable[[Any], Awaitable[object]], said: str
):
    with pytest.raises(InvalidRequest, match=said):
        await call(pair[0])


# --- moving around -----------------------------------------------------------------------------


async def test_a_reset_counts_what_it_leaves_to_deliver(pair: Pair):
    client, cable = pair
    await happened(cable, "acked", (0, 10))
    assert await client.reset_group("billing", to=4, dry_run=True) == 6
    assert (await client.group("billing")).backlog == 0
    assert await client.reset_group("billing", to=4) == 6
    assert (await client.group("billing")).topics[0].cursor == 4
    assert await client.reset_group("billing", to="latest", topic="orders") == 0
    assert await client.reset_group("billing", to="1h") == 10


async def test_skipped_messages_are_finished(pair: Pair):
    client, _ = pair
    assert await client.skip("billing", "orders/3", dry_run=True) == 1
    assert await client.skip("billing", "orders/3") == 1
    assert await client.skip("billing", "orders", [0, 1, 3]) == 2
    assert (await client.group("billing")).backlog == 7
    with pytest.raises(OffsetOutOfRange):
        await client.skip("billing", "orders", 99)


async def test_finished_messages_are_replayed_by_offset_id_or_time(pair: Pair):
    client, cable = pair
    await happened(cable, "acked", (0, 10))
    assert await client.replay("billing", "orders", range(3), dry_run=True) == 3
    assert await client.replay("billing", "orders/7") == 1
    assert await client.replay("billing", "orders", [7, 8]) == 1
    assert await client.replay("billing", "orders", start="1h", dry_run=True) == 8
    assert await client.replay("billing", "orders", start="2h", end="1h", dry_run=True) == 0
    assert (await client.group("billing")).backlog == 2


@pytest.mark.parametrize(
    "asked", [{"start": 3}, {"end": "1h"}, {"start": "1h", "offsets": 3}, {"start": "latest"}]
)
async def test_a_replay_of_a_window_needs_times(pair: Pair, asked: dict[str, object]):
    client, _ = pair
    with pytest.raises(InvalidRequest):
        await client.replay("billing", "orders", **asked)  # type: ignore[arg-type]


async def test_more_ranges_than_a_request_may_have_go_in_parts(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    client, _ = pair
    monkeypatch.setattr("onward.client.groups.RANGES_MAX", 2)
    assert await client.skip("billing", "orders", range(0, 10, 2)) == 5


async def test_a_fork_stands_where_its_source_stood(pair: Pair):
    client, cable = pair
    await happened(cable, "acked", (0, 7))
    fork = await client.fork_group("billing", "trial")
    assert (fork.backlog, fork.topics[0].cursor, fork.paused) == (3, 7, False)
    await client.skip("trial", "orders/7")
    assert (await client.group("billing")).backlog == 3


async def test_a_peek_shows_messages_in_the_order_in_which_they_would_come(pair: Pair):
    client, _ = pair
    await client.publish("orders", "urgent", priority=9)
    await client.create_group("urgent", "orders", priorities=True)
    shown = [message.offset for message in await client.peek("urgent", "orders", n=3)]
    assert shown == [10, 0, 1]


async def test_a_peek_that_chooses_every_other_message_reads_them_as_few_ranges(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    client, _ = pair
    fetched: list[list[Range]] = []

    def collect_and_note(
        reader: OpenReader, topic: str, ranges: list[Range], *, first_offset: int
    ) -> AsyncGenerator[Message]:
        fetched.append(ranges)
        return collect(reader, topic, ranges, first_offset=first_offset)

    monkeypatch.setattr(group_calls, "collect", collect_and_note)
    for number in range(200):
        await client.publish("turns", str(number), priority=number % 2)
    await client.create_group("choosy", "turns", priorities=True)
    shown = await client.peek("choosy", "turns", n=200)
    in_order = [*range(1, 200, 2), *range(0, 200, 2)]
    assert [one.offset for one in shown] == in_order
    assert [one.body for one in shown] == [b"%d" % number for number in in_order]
    some = await client.peek("choosy", "turns", n=130)
    assert [one.offset for one in some] == in_order[:130]
    assert [len(ranges) for ranges in fetched] == [1, 71]


async def test_a_peek_shows_what_comes_next_and_changes_nothing(pair: Pair):
    client, cable = pair
    await happened(cable, "acked", (0, 2), (3, 5))
    shown = [message.offset for message in await client.peek("billing", "orders", n=3)]
    assert shown == [2, 5, 6]
    assert shown == [one.offset for one in await client.peek("billing", "orders", n=3)]
    with pytest.raises(InvalidRequest):
        await client.peek("billing", "orders", n=0)


# --- dead letters ------------------------------------------------------------------------------


async def test_dead_letters_are_listed_with_why_and_with_their_message(pair: Pair):
    client, cable = pair
    await happened(cable, "dead", (2, 4), cause="no such order", attempt=3, member="ann")
    first, second = await letters(client.dead_letters("billing"))
    assert (first.id, second.id) == ("orders/2", "orders/3")
    assert (first.cause, first.attempts, first.member) == ("no such order", 3, "ann")
    assert first.message is None
    first, _ = await letters(client.dead_letters("billing", messages=True))
    assert isinstance(first.message, Message)
    assert first.message.body == b"order 2"


@pytest.mark.parametrize("rule", ["closed", "write-only"])
async def test_letters_of_a_topic_that_may_not_be_read_are_listed_without_messages(
    pair: Pair, rule: Literal["closed", "write-only"], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):  # fmt: skip
    client, cable = pair
    monkeypatch.setattr("onward.client.dead_calls._PAGE_WITH_MESSAGES", 2)
    await client.publish_many("parcels", ["a", "b", "c"])
    await client.change_group("billing", add_topics="parcels")
    await happened(cable, "dead", (2, 4), cause="no such order")
    await happened(cable, "dead", (0, 3), cause="no such street", topic="parcels")
    await client.change_topic("parcels", rule=rule)
    found = await letters(client.dead_letters("billing", messages=True))
    assert [(one.id, one.message and one.message.text) for one in found] == [
        ("orders/2", "order 2"), ("orders/3", "order 3"), ("parcels/0", None),
        ("parcels/1", None), ("parcels/2", None),
    ]  # fmt: skip
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    why = f"topic 'parcels' is {rule}: it cannot be read"
    assert warnings == [f"dead letters are listed without their messages: {why}"]
    by_cause = await letters(client.dead_letters("billing", text="street"))
    assert [one.id for one in by_cause] == ["parcels/0", "parcels/1", "parcels/2"]


async def test_more_dead_letters_than_a_page_are_all_listed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    client, cable = pair
    monkeypatch.setattr("onward.client.dead_calls._PAGE", 2)
    monkeypatch.setattr("onward.client.dead_calls._PAGE_WITH_MESSAGES", 3)
    await happened(cable, "dead", (1, 8), cause="x")
    assert [one.offset for one in await letters(client.dead_letters("billing"))] == [*range(1, 8)]
    found = await letters(client.dead_letters("billing", messages=True))
    assert [one.message.offset for one in found if one.message] == [*range(1, 8)]


async def test_dead_letters_are_found_by_text_and_by_predicate(pair: Pair):
    client, cable = pair
    await happened(cable, "dead", (0, 2), cause="time-out", attempt=5)
    await happened(cable, "dead", (5, 7), cause="no such order", attempt=1)
    by_cause = await letters(client.dead_letters("billing", text="such"))
    by_body = await letters(client.dead_letters("billing", text="order 1"))
    picked = await letters(
        client.dead_letters(
            "billing", where=lambda one, message: one.attempts == 5 and message.key == "0"
        )
    )
    assert [one.offset for one in by_cause] == [5, 6]
    assert [one.offset for one in by_body] == [1]
    assert [one.offset for one in picked] == [0]


async def test_chosen_dead_letters_are_redriven_to_their_group(pair: Pair):
    client, cable = pair
    await happened(cable, "acked", (0, 10))
    await happened(cable, "replayed", (0, 5))
    await happened(cable, "dead", (0, 5), cause="x")
    assert await client.redrive("billing", dry_run=True) == 5
    assert await client.redrive("billing", topic="orders", offsets=[0, 9]) == 1
    assert await client.redrive("billing", text="order 3") == 1
    assert await client.redrive("billing", where=lambda one, _: one.offset == 4) == 1
    group = await client.group("billing")
    assert (group.dead, group.backlog) == (2, 3)
    assert await client.redrive("billing") == 2
    assert (await client.group("billing")).dead == 0


async def test_purged_dead_letters_are_gone_and_their_messages_stay(pair: Pair):
    client, cable = pair
    await happened(cable, "dead", (0, 3), cause="x")
    assert await client.purge("billing", topic="orders", offsets=0) == 1
    assert await client.purge("billing", text="order 1", dry_run=True) == 1
    assert await client.purge("billing") == 2
    assert await letters(client.dead_letters("billing")) == []
    assert (await client.get("orders", 0)).body == b"order 0"


async def test_offsets_of_dead_letters_need_a_topic(pair: Pair):
    client, _ = pair
    with pytest.raises(InvalidRequest, match="topic"):
        await client.redrive("billing", offsets=[1])


# --- asking ------------------------------------------------------------------------------------


async def test_messages_are_found_by_all_that_is_asked_for():
    async with calling() as (client, _, _commit):
        await client.publish_many(
            "orders", ["red", "green", "red"], keys=["a", "a", "b"], trace_ids=["t", None, "u"],
            headers=[{"shop": "eu"}, None, {"shop": b"eu", "till": "7"}],
        )  # fmt: skip
        await client.publish("orders", "red")
        asked: list[tuple[dict[str, object], list[int]]] = [
            ({}, [0, 1, 2, 3]),
            ({"key": "a"}, [0, 1]),
            ({"key": "a", "text": "red"}, [0]),
            ({"trace_id": "u"}, [2]),
            ({"headers": {"shop": "eu"}}, [0, 2]),
            ({"headers": {"shop": "eu", "till": b"7"}}, [2]),
            ({"text": b"green"}, [1]),
            ({"text": "blue"}, []),
            ({"limit": 2}, [0, 1]),
            ({"start": 1, "text": "red"}, [2, 3]),
            ({"start": 1, "end": 3}, [1, 2]),
            ({"start": "1h"}, [0, 1, 2, 3]),
            ({"end": "1h"}, []),
        ]
        for criteria, wanted in asked:
            found = await client.find("orders", **criteria)  # type: ignore[arg-type]
            assert [message.offset for message in found] == wanted, criteria


async def test_one_message_is_found_by_its_id(pair: Pair):
    client, _ = pair
    (message,) = await client.find("orders/3")
    assert message.body == b"order 3"
    with pytest.raises(OffsetOutOfRange):
        await client.find("orders/99")


@pytest.mark.parametrize("limit", [0, -1, 1_000_000, True])
async def test_a_search_without_bounds_is_refused(pair: Pair, limit: int):
    client, _ = pair
    with pytest.raises(InvalidRequest):
        await client.find("orders", limit=limit)


async def test_an_explanation_tells_who_published_and_how_it_went(pair: Pair):
    client, cable = pair
    await client.create_group("audit", "orders")
    await happened(
        cable, "retried", (0, 9), member="ann", attempt=1, cause="no luck",
        due_at_ms=cable.broker.clock.now_ms() + 3_600_000,
    )  # fmt: skip
    await happened(cable, "acked", (0, 10), group="audit", member="bob", took_ms=(12,))
    life = await client.explain("orders/3")
    assert life.message == await client.get("orders", 3)
    assert life.is_complete
    assert [one.group for one in life.groups] == ["audit", "billing"]
    audit, billing = life.groups
    assert (audit.state, audit.events[-1].did, audit.events[-1].took_ms) == (
        "finished",
        "acked",
        12,
    )
    assert audit.sentence() == "acked by bob after 12 ms"
    assert (billing.state, billing.attempt) == ("waiting", 2)
    assert billing.sentence(now_ms=life.asked_at_ms).startswith("retry 1 due in ")
    fresh = (await client.explain("orders/9")).group("billing")
    assert fresh is not None
    assert fresh.state == "fresh"


async def test_an_explanation_tells_that_an_attempt_does_not_count(pair: Pair):
    client, _ = pair
    async with client.consume("orders", group="billing", member="ann") as consumer:
        (delivery,) = await consumer.fetch()
        await delivery.retry(after="1h", count=False, cause="the bank is closed")
    life = (await client.explain(delivery.id)).group("billing")
    assert life is not None
    said = life.events[-1].sentence()
    assert said == "attempt 1 by ann does not count, again in 1h: the bank is closed"


async def test_an_explanation_names_the_program_that_published(pair: Pair):
    client, _ = pair
    life = await client.explain("orders/0")
    assert life.published_by is not None
    assert isinstance(life.published_by, Publisher)
    assert (life.published_by.client, life.producer_id) == ("test", 7)


async def test_a_dead_letter_is_explained_with_its_cause_until_it_is_redriven(pair: Pair):
    client, cable = pair
    await happened(cable, "dead", (4, 5), cause="no such order", attempt=2, member="ann")
    life = (await client.explain("orders/4")).group("billing")
    assert life is not None
    assert (life.state, life.cause, life.attempt) == ("dead", "no such order", 2)
    await client.redrive("billing")
    life = (await client.explain("orders/4")).group("billing")
    assert life is not None
    assert life.state in ("ready", "fresh")
    assert [event.did for event in life.events if event.did != "started"] == ["dead", "redriven"]


async def test_an_id_that_never_was_gets_a_clear_error(pair: Pair):
    client, _ = pair
    with pytest.raises(OffsetOutOfRange, match="next offset of topic 'orders' is 10"):
        await client.explain("orders/10")
    with pytest.raises(UnknownTopic):
        await client.explain("nothing/0")
    with pytest.raises(InvalidRequest):
        await client.explain("orders")


async def test_what_only_asks_is_asked_again_when_the_connection_is_lost(pair: Pair):
    client, cable = pair
    cable.cut()
    assert (await client.group("billing")).backlog == 10


async def test_a_message_that_retention_took_is_still_explained(pair: Pair):
    client, cable = pair
    await happened(cable, "dead", (2, 3), cause="no such order", attempt=2)
    await happened(cable, "acked", (0, 2), member="ann")
    cable.broker.catalogue.by_name["orders"].first_offset = 5
    life = await client.explain("orders/1")
    assert life.message is None
    assert life.is_complete
    billing = life.group("billing")
    assert billing is not None
    assert billing.events[-1].sentence() == "acked by ann"
    assert "retention took it away" in life.lines()[1]
    (letter,) = await letters(client.dead_letters("billing", messages=True))
    assert letter.message is None
    assert await letters(client.dead_letters("billing", text="order 2")) == []


async def test_an_explanation_says_that_a_paused_group_holds_a_message_back(pair: Pair):
    client, _ = pair
    await client.pause_group("billing")
    life = (await client.explain("orders/3")).group("billing")
    assert life is not None
    assert life.sentence() == "not delivered yet: waits because the group is paused"
    assert life.paused


async def test_an_explanation_names_the_message_of_its_key_that_another_waits_for(pair: Pair):
    client, _ = pair
    await client.create_group("row", "orders", mode="ordered")
    async with client.consume("orders", group="row", member="ann") as consumer:
        for delivery in await consumer.fetch(3):
            await delivery.retry(after="1h")
        life = (await client.explain("orders/7")).group("row")
    assert life is not None
    assert (life.state, life.behind) == ("behind", "orders/1")
    assert life.sentence() == "waits behind orders/1 of its key"


async def test_what_retention_took_before_it_was_consumed_is_not_said_to_come(pair: Pair):
    client, cable = pair
    cable.broker.catalogue.by_name["orders"].first_offset = 5
    life = await client.explain("orders/3")
    assert life.lines()[1:3] == [
        "  published, no longer stored: retention took it away, or a repair gave it up",
        "  group billing: it was gone before it was consumed",
    ]


async def test_a_topic_that_is_created_anew_is_not_told_what_became_of_an_older_one(pair: Pair):
    client, cable = pair
    await happened(cable, "acked", (0, 2), member="ann")
    await client.delete_topic("orders")
    deleted_at_ms = cable.broker.clock.now_ms()
    await until(lambda: cable.broker.clock.now_ms() > deleted_at_ms)
    await client.publish_many("orders", ["new"] * 10)
    assert (await client.explain("orders/1")).group("billing") == GroupLife(
        group="billing", state="fresh", attempt=0
    )
    cable.broker.catalogue.by_name["orders"].first_offset = 5
    assert (await client.explain("orders/1")).group("billing") == GroupLife(
        group="billing", state="missed", attempt=0
    )


async def test_a_trace_that_begins_too_late_is_said_to_be_incomplete(pair: Pair):
    client, cable = pair
    await happened(cable, "acked", (0, 2), member="ann")
    await happened(cable, "acked", (2, 4), member="ann")
    trace = cable.broker.catalogue.by_name["@trace"]
    trace.first_offset = trace.next_offset - 1
    assert not (await client.explain("orders/0")).is_complete
    await client.publish("orders", "later")
    assert (await client.explain("orders/10")).is_complete
