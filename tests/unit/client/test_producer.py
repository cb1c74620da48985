"""The producer: together when that helps, once whatever happens, in order always."""

import asyncio

import pytest

from onward.client import producer as module
from onward.errors import (
    InvalidRequest,
    MessageTooLarge,
    NotConnected,
    OutcomeUnknown,
    Overloaded,
)

from .calling import calling, settings_with, turns


async def bodies(client: object, topic: str = "orders") -> list[bytes]:
    return [message.body async for message in client.read(topic)]  # type: ignore[attr-defined]


async def test_publishes_of_one_moment_travel_together() -> None:
    async with calling() as (client, _, _):
        receipts = await asyncio.gather(*[client.publish("orders", str(n)) for n in range(100)])
        assert [receipt.offset for receipt in receipts] == list(range(100))
        assert len({receipt.event_id for receipt in receipts}) == 1


async def test_each_message_keeps_what_it_was_published_with() -> None:
    async with calling() as (client, _, _):
        await asyncio.gather(
            client.publish("orders", b"a"),
            client.publish("orders", b"b", key="k", headers={"h": b"v"}, tag=["x", "y"]),
            client.publish("orders", b"c", trace_id="t", priority=9, tenant="acme"),
        )
        plain, second, third = [message async for message in client.read("orders")]
        assert (plain.key, plain.headers, plain.tag) == (None, None, None)
        assert (second.key, second.headers, second.tag) == ("k", {"h": b"v"}, "x,y")
        assert (third.trace_id, third.priority, third.tenant) == ("t", 9, "acme")


async def test_what_has_no_answer_when_the_connection_is_lost_is_stored_once() -> None:
    async with calling() as (client, cable, commit):
        await client.publish("orders", b"0")
        commit.is_holding = True
        futures = [client.publish_soon("orders", b"1")]
        await turns()
        futures.append(client.publish_soon("orders", b"2"))
        await turns()
        cable.cut()
        futures.append(client.publish_soon("orders", b"3"))
        await turns()
        commit.release()
        receipts = await asyncio.gather(*futures)
        assert [receipt.offset for receipt in receipts] == [1, 2, 3]
        assert await bodies(client) == [b"0", b"1", b"2", b"3"]


async def test_what_is_published_without_a_connection_waits_for_one() -> None:
    async with calling() as (client, cable, _):
        cable.pull()
        await turns()
        future = client.publish_soon("orders", b"late")
        await asyncio.sleep(0.02)
        assert not future.done()
        cable.plug()
        assert (await future).offset == 0


async def test_never_sent_is_not_connected_and_sent_without_answer_is_unknown() -> None:
    async with calling(timeout_s=0.3) as (client, cable, commit):
        await client.publish("orders", b"0")
        commit.is_holding = True
        sent = client.publish_soon("orders", b"sent")
        await turns()
        cable.pull()
        await turns()
        never = client.publish_soon("orders", b"never")
        many = asyncio.ensure_future(client.publish_many("orders", [b"never"]))
        results = await asyncio.gather(sent, never, many, return_exceptions=True)
        assert [type(one) for one in results] == [OutcomeUnknown, NotConnected, NotConnected]


async def test_a_deadline_of_one_publish_is_kept() -> None:
    async with calling() as (client, _, commit):
        await client.publish("orders", b"0")
        commit.is_holding = True
        with pytest.raises(OutcomeUnknown):
            await client.publish("orders", b"slow", timeout="10ms")
        commit.release()
        await turns()
        assert (await client.publish("orders", b"next")).offset == 2


async def test_closing_tells_the_truth_about_what_was_sent() -> None:
    async with calling() as (client, _, commit):
        await client.publish("orders", b"0")
        commit.is_holding = True
        sent = client.publish_soon("orders", b"1")
        await turns()
        await client.close(drain=False)
        with pytest.raises(OutcomeUnknown):
            await sent


async def test_an_overloaded_broker_gets_everything_later_and_in_order() -> None:
    settings = settings_with(server={"inflight_bytes_max": 65_536})
    async with calling(settings=settings) as (client, _, commit):
        await client.publish("orders", b"start")
        commit.is_holding = True
        futures = [client.publish_soon("orders", b"%03d" % number * 300) for number in range(300)]
        for number in range(300, 330):
            futures.append(client.publish_soon("orders", b"%03d" % number * 300))
            await turns(3)
        await turns()
        commit.release()
        for number in range(330, 340):
            futures.append(client.publish_soon("orders", b"%03d" % number * 300))
            await asyncio.sleep(0.01)
        receipts = await asyncio.gather(*futures)
        assert [receipt.offset for receipt in receipts] == list(range(1, 341))
        found = [body[:3] for body in await bodies(client)]
        assert found[1:] == [b"%03d" % number for number in range(340)]


async def test_publishes_that_overload_made_fail_hold_nobody_up() -> None:
    settings = settings_with(server={"inflight_bytes_max": 65_536})
    async with calling(settings=settings, timeout_s=0.4) as (client, _, commit):
        await client.publish("orders", b"start")
        commit.is_holding = True
        under_way = [client.publish_soon("orders", bytes(70_000))]
        await turns()
        refused = [client.publish_soon("orders", b"x") for _ in range(3)]
        results = await asyncio.gather(*under_way, *refused, return_exceptions=True)
        assert isinstance(results[0], OutcomeUnknown)
        assert all(isinstance(one, NotConnected | Overloaded) for one in results[1:])
        commit.release()
        assert (await client.publish("orders", b"after")).offset == 2


async def test_one_message_that_is_too_large_fails_alone() -> None:
    settings = settings_with(topics={"message_bytes_max": 5_000})
    async with calling(settings=settings) as (client, _, _):
        results = await asyncio.gather(
            client.publish("orders", b"a"),
            client.publish("orders", bytes(6_000), key="big"),
            client.publish("orders", b"c", key="k"),
            return_exceptions=True,
        )
        assert isinstance(results[1], MessageTooLarge)
        assert await bodies(client) == [b"a", b"c"]
        assert [message.key async for message in client.read("orders")] == [None, "k"]


async def test_small_messages_do_not_suffer_from_a_batch_that_became_too_large() -> None:
    limit = 1 << 21
    settings = settings_with(topics={"batch_bytes_max": limit, "message_bytes_max": limit})
    async with calling(settings=settings) as (client, _, _):
        small = [client.publish_soon("orders", bytes(900)) for _ in range(1_000)]
        big = client.publish_soon("orders", bytes(limit - 2_000))
        receipts = await asyncio.gather(*small, big)
        assert sorted(receipt.offset for receipt in receipts) == list(range(1_001))


async def test_more_than_may_wait_is_refused_and_does_not_grow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "WAITING_BYTES_MAX", 100_000)
    async with calling() as (client, _, commit):
        await client.publish("orders", b"start")
        commit.is_holding = True
        many = asyncio.ensure_future(client.publish_many("orders", [bytes(60_000)] * 2))
        await turns()
        with pytest.raises(Overloaded):
            client.publish_soon("orders", b"x")
        waiting = asyncio.ensure_future(client.publish("orders", b"patient"))
        await turns()
        assert not waiting.done()
        commit.release()
        assert (await many).count == 2
        assert (await waiting).offset == 3


async def test_what_was_refused_until_its_deadline_says_what_it_was_refused_with() -> None:
    settings = settings_with(server={"inflight_bytes_max": 65_536})
    async with calling(settings=settings) as (client, _, commit):
        await client.publish("orders", b"start")
        commit.is_holding = True
        first = client.publish_soon("orders", bytes(70_000))
        await turns()
        refused = [client.publish("bills", bytes(30_000), timeout="50ms") for _ in range(2)]
        refused.append(client.publish_many("orders", [bytes(30_000)], timeout="50ms"))
        outcomes = asyncio.gather(*refused, return_exceptions=True)
        await turns()
        behind = client.publish("others", b"it is behind what was refused", timeout="50ms")
        with pytest.raises(Overloaded):
            await behind
        assert [type(outcome) for outcome in await outcomes] == [Overloaded] * 3
        commit.release()
        assert (await first).offset == 1
        assert (await client.publish("orders", b"goes on")).offset == 2
        assert not await client.has_topic("bills")


async def test_a_refusal_says_nothing_of_what_was_sent_over_a_connection_that_is_lost() -> None:
    settings = settings_with(server={"inflight_bytes_max": 65_536})
    async with calling(settings=settings) as (client, cable, commit):
        await client.publish("orders", b"start")
        commit.is_holding = True
        first = client.publish_soon("orders", bytes(70_000))
        await turns()
        sent = client._producer()._sent
        doubtful = asyncio.ensure_future(client.publish("bills", bytes(30_000), timeout="200ms"))
        while not any(one.is_sent and one.batch.topic == "bills" for one in sent.values()):
            await turns(1)
        cable.cut()
        with pytest.raises(OutcomeUnknown):
            await doubtful
        commit.release()
        assert (await first).offset == 1


async def test_headers_are_taken_as_they_are_when_they_are_given() -> None:
    headers = {"n": ""}
    async with calling() as (client, _, _):
        futures = []
        for number in range(3):
            headers["n"] = str(number)
            futures.append(client.publish_soon("orders", b"x", headers=headers))
        await asyncio.gather(*futures)
        found = [message.headers async for message in client.read("orders")]
        assert found == [{"n": "0"}, {"n": "1"}, {"n": "2"}]


async def test_publish_many_is_one_batch_after_what_was_published_before() -> None:
    async with calling() as (client, _, _):
        first = client.publish_soon("orders", b"first")
        many = await client.publish_many("orders", ["a", "b"], keys=["x", None], compression="zstd")
        assert (await first).offset == 0
        assert (many.first_offset, many.count, many.durability) == (1, 2, "disk")
        assert [message.key async for message in client.read("orders", start=1)] == ["x", None]


@pytest.mark.parametrize(
    "options",
    [
        {"key": 7}, {"key": "x" * 40_000}, {"headers": {"a": 1}}, {"headers": {1: "a"}},
        {"priority": 256}, {"priority": -1}, {"tenant": b"x"}, {"durability": "paper"},
    ],
)  # fmt: skip
async def test_a_wrong_option_fails_its_own_publish_only(options: dict[str, object]) -> None:
    async with calling() as (client, _, _):
        good = client.publish_soon("orders", b"good")
        with pytest.raises(InvalidRequest):
            await client.publish("orders", b"bad", **options)  # type: ignore[arg-type]
        assert (await good).offset == 0


async def test_text_that_cannot_be_written_fails_its_own_publish_only() -> None:
    async with calling() as (client, _, _):
        good = client.publish_soon("orders", b"good")
        with pytest.raises(InvalidRequest, match="key is not valid Unicode"):
            client.publish_soon("orders", b"bad", key="\ud800")
        await asyncio.gather(good, client.publish_soon("orders", b"also good"))
        assert await bodies(client) == [b"good", b"also good"]


async def test_columns_of_publish_many_are_as_long_as_its_bodies() -> None:
    async with calling() as (client, _, _):
        with pytest.raises(InvalidRequest, match="keys has 1 values for 2"):
            await client.publish_many("orders", [b"a", b"b"], keys=["x"])
        with pytest.raises(InvalidRequest, match="at least one"):
            await client.publish_many("orders", [])


async def test_who_waits_for_room_is_told_when_the_client_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "WAITING_BYTES_MAX", 1_000)
    async with calling() as (client, cable, _):
        cable.pull()
        await turns()
        first = client.publish_soon("orders", bytes(2_000))
        waiting = asyncio.ensure_future(client.publish("orders", b"no room"))
        await turns()
        await client.close(drain=False)
        with pytest.raises(NotConnected):
            await waiting
        with pytest.raises(NotConnected):
            await first


async def test_closing_returns_with_the_last_answer() -> None:
    async with calling() as (client, _, commit):
        commit.is_holding = True
        future = client.publish_soon("orders", b"last")
        closing = asyncio.ensure_future(client.close())
        await turns()
        assert not closing.done()
        commit.release()
        await closing
        assert future.result().offset == 0


async def test_who_waits_for_room_goes_in_the_order_of_coming(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "WAITING_BYTES_MAX", 1_000)
    async with calling() as (client, _, commit):
        await client.publish("orders", b"start")
        commit.is_holding = True
        publishes = [asyncio.ensure_future(client.publish("orders", bytes(2_000)))]
        for number in range(40):
            publishes.append(
                asyncio.ensure_future(client.publish("orders", b"%02d" % number * 200))
            )
            await turns(1)
        publishes.pop(20).cancel()
        commit.release()
        with pytest.raises(Overloaded):
            client.publish_soon("orders", b"past the line")
        for _ in range(60):
            publishes.append(asyncio.ensure_future(client.publish("orders", b"late")))
            await turns(1)
        receipts = await asyncio.gather(*publishes)
        assert [receipt.offset for receipt in receipts] == list(range(1, 101))


async def test_a_publish_that_was_not_sent_in_time_is_taken_back() -> None:
    async with calling() as (client, cable, _):
        cable.pull()
        await turns()
        first = client.publish_soon("orders", b"first", key="1")
        with pytest.raises(NotConnected):
            await client.publish("bills", b"alone", timeout="10ms")
        taken_back = asyncio.ensure_future(
            client.publish("orders", b"too late", tag="x", key="2", timeout="10ms")
        )
        await turns()
        third = client.publish_soon("orders", b"third", key="3")
        with pytest.raises(NotConnected):
            await taken_back
        cable.plug()
        assert [(await first).offset, (await third).offset] == [0, 1]
        found = [
            (message.body, message.key, message.tag) async for message in client.read("orders")
        ]
        assert found == [(b"first", "1", None), (b"third", "3", None)]
        assert not await client.has_topic("bills")
        assert client._producer().waiting_bytes == 0


async def test_what_is_taken_back_from_a_full_batch_is_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "BATCH_MESSAGES_MAX", 1)
    async with calling() as (client, cable, _):
        cable.pull()
        await turns()
        with pytest.raises(NotConnected):
            await client.publish("orders", b"full", timeout="10ms")
        cable.plug()
        assert (await client.publish("orders", b"next")).offset == 0


async def test_waiting_for_room_has_the_deadline_of_the_publish(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "WAITING_BYTES_MAX", 1_000)
    async with calling(timeout_s=2) as (client, _, commit):
        await client.publish("orders", b"start")
        commit.is_holding = True
        first = client.publish_soon("orders", bytes(2_000))
        with pytest.raises(NotConnected):
            await client.publish("orders", b"no room", timeout="10ms")
        with pytest.raises(NotConnected):
            await client.publish_many("orders", [b"no room"], timeout="10ms")
        commit.release()
        assert (await first).offset == 1
        assert (await client.publish("orders", b"next")).offset == 2
