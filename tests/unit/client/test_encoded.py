"""Encoded batches under numbers of the caller: stored once, in order, whatever happens."""

import asyncio

import pytest

from onward.broker.producers import WINDOW
from onward.client import encoded as module
from onward.client.client import Client
from onward.errors import (
    AlreadyExists,
    Conflict,
    InvalidName,
    InvalidRequest,
    MessageTooLarge,
    NotConnected,
    OutcomeUnknown,
    Overloaded,
)
from onward.message.batch import encode_batch

from .calling import calling, settings_with, turns

PACKED = encode_batch([b"a", b"b"], keys=["k", None])


async def bodies(client: Client, topic: str = "orders") -> list[bytes]:
    return [message.body async for message in client.read(topic)]


def one(number: int) -> bytes:
    return encode_batch([b"%d" % number])


async def test_a_batch_arrives_as_it_was_encoded() -> None:
    async with calling() as (client, _, _):
        receipt = await client.publish_encoded("orders", PACKED, producer_id=9, sequence=1)
        assert (receipt.topic, receipt.first_offset, receipt.count) == ("orders", 0, 2)
        (batch,) = [batch async for batch in client.read("orders").batches()]
        assert (batch.bodies, batch.columns.keys) == ([b"a", b"b"], ["k", None])
        header = batch.columns.header
        assert (header.producer_id, header.sequence) == (9, 1)
        assert header.time_ms > 0


async def test_the_time_of_a_batch_that_has_one_stays() -> None:
    async with calling() as (client, _, _):
        packed = encode_batch([b"a"], time_ms=1_000)
        await client.publish_encoded("orders", packed, producer_id=9, sequence=1)
        (batch,) = [batch async for batch in client.read("orders").batches()]
        assert batch.columns.header.time_ms == 1_000


async def test_a_repeat_gets_the_receipt_of_the_first_time_also_from_another_client() -> None:
    async with calling() as (client, cable, _):
        first = await client.publish_encoded("orders", PACKED, producer_id=9, sequence=1)
        await client.publish_encoded("orders", PACKED, producer_id=9, sequence=2)
        assert await client.publish_encoded("orders", PACKED, producer_id=9, sequence=1) == first
        other = Client(
            [], token=None, name="other", timeout_s=60, durability=255, dials=[cable.dial]
        )
        async with other:
            again = await other.publish_encoded("orders", PACKED, producer_id=9, sequence=1)
        assert again == first
        assert len(await bodies(client)) == 4


async def test_a_sequence_that_is_too_old_is_a_conflict() -> None:
    async with calling() as (client, _, _):
        for sequence in range(WINDOW + 1):
            await client.publish_encoded("orders", PACKED, producer_id=9, sequence=sequence)
        with pytest.raises(Conflict, match="older than the last 32"):
            await client.publish_encoded("orders", PACKED, producer_id=9, sequence=0)


async def test_calls_keep_their_order_and_the_window_is_never_exceeded() -> None:
    async with calling() as (client, _, commit):
        await client.publish("orders", b"first")
        commit.is_holding = True
        calls = [
            asyncio.ensure_future(
                client.publish_encoded("orders", one(number), producer_id=9, sequence=number)
            )
            for number in range(100)
        ]
        await turns()
        assert client._encoded is not None
        assert len(client._encoded.of(9)._sent) == WINDOW
        commit.release()
        receipts = await asyncio.gather(*calls)
        assert [receipt.first_offset for receipt in receipts] == list(range(1, 101))
        assert await bodies(client) == [b"first", *[b"%d" % number for number in range(100)]]


async def test_producer_ids_do_not_wait_for_each_other() -> None:
    async with calling() as (client, _, commit):
        await client.publish("orders", b"first")
        commit.is_holding = True
        calls = [
            asyncio.ensure_future(
                client.publish_encoded("orders", PACKED, producer_id=9, sequence=number)
            )
            for number in range(WINDOW + 8)
        ]
        other = asyncio.ensure_future(
            client.publish_encoded("orders", PACKED, producer_id=10, sequence=5_000)
        )
        await turns()
        assert client._encoded is not None
        assert list(client._encoded.of(10)._sent) == [5_000]
        commit.release()
        await asyncio.gather(other, *calls)


async def test_sequences_may_come_in_any_order_within_the_window() -> None:
    async with calling() as (client, _, _):
        order = [5, 3, 4, 30, 0, 7]
        receipts = await asyncio.gather(
            *[
                client.publish_encoded("orders", one(number), producer_id=9, sequence=number)
                for number in order
            ]
        )
        assert [receipt.first_offset for receipt in receipts] == list(range(6))
        assert await bodies(client) == [b"%d" % number for number in order]


async def test_one_sequence_twice_at_the_same_time_is_stored_once() -> None:
    async with calling() as (client, _, _):
        receipts = await asyncio.gather(
            *[client.publish_encoded("orders", PACKED, producer_id=9, sequence=1) for _ in range(5)]
        )
        assert {receipt.first_offset for receipt in receipts} == {0}
        assert len(await bodies(client)) == 2


async def test_what_has_no_answer_when_the_connection_is_lost_is_sent_again_and_stored_once() -> (
    None
):
    async with calling(timeout_s=60) as (client, cable, commit):
        await client.publish_encoded("orders", one(0), producer_id=9, sequence=0)
        commit.is_holding = True
        calls = [
            asyncio.ensure_future(
                client.publish_encoded("orders", one(number), producer_id=9, sequence=number)
            )
            for number in range(1, 40)
        ]
        await turns()
        cable.cut()
        await turns()
        commit.release()
        receipts = await asyncio.gather(*calls)
        assert [receipt.first_offset for receipt in receipts] == list(range(1, 40))
        assert await bodies(client) == [b"%d" % number for number in range(40)]


async def test_an_overloaded_broker_gets_everything_later_and_each_id_in_its_order() -> None:
    settings = settings_with(server={"inflight_bytes_max": 2_000})
    async with calling(settings=settings, timeout_s=60) as (client, _, _):
        calls = [
            client.publish_encoded(
                "orders", encode_batch([b"%d/%d" % (producer_id, number), bytes(500)]),
                producer_id=producer_id, sequence=number * (producer_id - 8),
            )
            for number in range(20)
            for producer_id in (9, 10)
        ]  # fmt: skip
        plain = [client.publish("orders", b"0/%d" % number) for number in range(20)]
        await asyncio.gather(*calls, *plain)
        stored = [body for body in await bodies(client) if b"/" in body]
        for producer in (b"0/", b"9/", b"10/"):
            own = [body for body in stored if body.startswith(producer)]
            assert own == [producer + b"%d" % number for number in range(20)]


async def test_sent_without_an_answer_is_unknown_and_never_sent_is_not_connected() -> None:
    async with calling(timeout_s=60) as (client, cable, commit):
        await client.publish("orders", b"first")
        commit.is_holding = True
        with pytest.raises(OutcomeUnknown, match="'orders'"):
            await client.publish_encoded(
                "orders", PACKED, producer_id=9, sequence=1, timeout="10ms"
            )
        cable.pull()
        await turns()
        with pytest.raises(NotConnected, match="found no broker in time"):
            await client.publish_encoded(
                "orders", PACKED, producer_id=10, sequence=1, timeout="10ms"
            )


async def test_who_still_waits_is_told_when_the_client_closes() -> None:
    async with calling() as (client, _, commit):
        await client.publish("orders", b"first")
        commit.is_holding = True
        call = asyncio.ensure_future(
            client.publish_encoded("orders", PACKED, producer_id=9, sequence=1)
        )
        await turns()
        await client.close(drain=False)
        with pytest.raises(OutcomeUnknown, match="closed before"):
            await call


async def test_closing_waits_for_what_was_published() -> None:
    async with calling(timeout_s=60) as (client, _, commit):
        await client.publish("orders", b"first")
        commit.is_holding = True
        call = asyncio.ensure_future(
            client.publish_encoded("orders", PACKED, producer_id=9, sequence=1)
        )
        await turns()
        closing = asyncio.ensure_future(client.close())
        await turns()
        assert not closing.done()
        commit.release()
        await closing
        assert (await call).first_offset == 1


async def test_only_so_many_producer_ids_have_something_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PRODUCERS_MAX", 3)
    async with calling(timeout_s=60) as (client, _, commit):
        for producer_id in range(1, 10):
            await client.publish_encoded("orders", PACKED, producer_id=producer_id, sequence=1)
        commit.is_holding = True
        calls = [
            asyncio.ensure_future(
                client.publish_encoded("orders", PACKED, producer_id=producer_id, sequence=2)
            )
            for producer_id in range(1, 4)
        ]
        await turns()
        with pytest.raises(Overloaded, match="3 producer ids have something under way"):
            await client.publish_encoded("orders", PACKED, producer_id=4, sequence=2)
        commit.release()
        await asyncio.gather(*calls)
        await client.publish_encoded("orders", PACKED, producer_id=4, sequence=2)


async def test_a_scheduled_batch_waits_for_its_time_and_is_scheduled_once() -> None:
    async with calling() as (client, _, _):
        packed = encode_batch(
            [b"a", b"b"], topics=["orders", "bills"], due_at_ms=[4_000_000_000_000, 1]
        )
        with pytest.raises(InvalidRequest, match="ahead"):
            await client.publish_encoded("@schedule", packed, producer_id=9, sequence=1)
        packed = encode_batch([b"a", b"b"], topics=["orders", "bills"], due_at_ms=[1, 2])
        first = await client.publish_encoded("@schedule", packed, producer_id=9, sequence=1)
        assert await client.publish_encoded("@schedule", packed, producer_id=9, sequence=1) == first
        for topic, body in (("orders", b"a"), ("bills", b"b")):
            async for message in client.read(topic, follow=True, end=1):
                assert (message.body, message.due_at_ms in (1, 2)) == (body, True)
        assert (await client.topic("@schedule")).next_offset == 2


async def test_a_scheduled_batch_whose_unique_key_waits_already_is_refused_for_good() -> None:
    async with calling() as (client, _, _):
        await client.publish("orders", b"a", delay="1h", unique="order-7")
        due_at_ms = client._clock.now_ms() + 3_600_000
        packed = encode_batch([b"b"], topics=["orders"], due_at_ms=[due_at_ms], uniques=["order-7"])
        with pytest.raises(AlreadyExists):
            await client.publish_encoded("@schedule", packed, producer_id=9, sequence=1)


@pytest.mark.parametrize("topic", ["@trace", "@sink.", "a b"])
async def test_a_topic_of_the_system_is_refused(topic: str) -> None:
    async with calling() as (client, _, _):
        with pytest.raises(InvalidName):
            await client.publish_encoded(topic, PACKED, producer_id=9, sequence=1)


@pytest.mark.parametrize(
    "packed", [b"", b"hello", PACKED[:-8], PACKED + PACKED, PACKED[:-1] + b"x", 7]
)
async def test_what_is_no_batch_is_refused(packed: object) -> None:
    async with calling() as (client, _, _):
        with pytest.raises(InvalidRequest, match="encoded batch"):
            await client.publish_encoded("orders", packed, producer_id=9, sequence=1)  # type: ignore[arg-type]


async def test_a_batch_that_the_broker_would_not_take_is_refused_and_holds_nobody_up() -> None:
    async with calling(settings=settings_with(topics={"batch_bytes_max": 10_000})) as (
        client,
        _,
        _,
    ):
        with pytest.raises(MessageTooLarge):
            await client.publish_encoded(
                "orders", encode_batch([bytes(20_000)]), producer_id=9, sequence=1
            )
        receipt = await client.publish_encoded("orders", PACKED, producer_id=9, sequence=1)
        assert receipt.first_offset == 0


@pytest.mark.parametrize(
    ("producer_id", "sequence"),
    [(0, 1), (-1, 1), (2**64, 1), (True, 1), (9, -1), (9, 2**62 + 1), (9, 1.5), (1 << 63, 1)],
)
async def test_numbers_that_no_batch_can_have_are_refused(producer_id: int, sequence: int) -> None:
    async with calling() as (client, _, _):
        with pytest.raises(InvalidRequest):
            await client.publish_encoded(
                "orders", PACKED, producer_id=producer_id, sequence=sequence
            )
