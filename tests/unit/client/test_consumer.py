"""The consumer: what it takes, what it says of it, and what it leaves behind."""

import asyncio
import gc
import logging
from typing import Any

import pytest

from onward import Client
from onward.client.consumer import Consumer
from onward.client.delivery_batch import DeliveryBatch
from onward.client.link import Link
from onward.delivery.retry import RetryPolicy
from onward.errors import (
    AlreadyExists,
    Conflict,
    InvalidName,
    InvalidRequest,
    LeaseLost,
    NotConnected,
    OutcomeUnknown,
    TopicEnded,
    UnknownGroup,
)
from onward.message import columns
from onward.message.batch import encode_batch
from onward.protocol.frames import Kind
from onward.protocol.payloads import publish_head

from .calling import Cable, calling, turns
from .consuming import PATIENCE_S, collect, fetch, members, until


def sent_kinds(client: Client, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list to which the kind of each frame is added that the client sends."""
    link = client._keeper().link
    assert isinstance(link, Link)
    kinds: list[int] = []
    write = link.write

    def note(*parts: bytes) -> None:
        kinds.append(parts[0][4])
        write(*parts)

    monkeypatch.setattr(link, "write", note)
    return kinds


# --- taking ----------------------------------------------------------------------------------


async def test_a_delivery_is_a_message_that_knows_its_group_member_and_attempt() -> None:
    async with calling() as (client, _, _):
        await client.publish("orders", {"id": 7}, key="k", tag="eu", headers={"a": "b"})
        consumer = client.consume("orders", group="g", member="ann")
        (one,) = await collect(consumer, 1)
        assert (one.id, one.json(), one.key, one.tags) == ("orders/0", {"id": 7}, "k", ("eu",))
        assert (one.group, one.member, one.attempt, one.headers) == ("g", "ann", 1, {"a": "b"})
        assert one.published_at_ms > 0
        assert one.lease > 0
        assert repr(one) == "Delivery('orders/0', attempt=1, body=b'{\"id\":7}')"


async def test_every_message_comes_once_and_in_order_however_it_was_published() -> None:
    async with calling() as (client, _, _):
        for number in range(20):
            await client.publish("orders", str(number))
        await client.publish_many("orders", [str(number) for number in range(20, 1_000)])
        found = await collect(client.consume("orders", group="g"), 1_000)
        assert [int(one.text) for one in found] == [one.offset for one in found]
        assert [one.offset for one in found] == list(range(1_000))


async def test_batches_are_columns_and_are_acked_as_a_whole() -> None:
    async with calling() as (client, _, _):
        await client.publish_many("orders", [b"a", b"b", b"c"], keys=["x", None, "y"])
        await client.publish("orders", b"d")
        count = 0
        async with asyncio.timeout(PATIENCE_S):
            async for batch in client.consume("orders", group="g").batches():
                assert batch.topic == "orders"
                assert len(batch) == batch.count == len(batch.bodies) == len(batch.keys)
                assert batch.bodies == [b"a", b"b", b"c", b"d"][batch.offsets[0] :][: batch.count]
                assert batch.keys == ["x", None, "y", None][batch.offsets[0] :][: batch.count]
                assert [one.body for one in batch.messages()] == batch.bodies
                await batch.ack()
                count += batch.count
                if count == 4:
                    break
        assert await client.consume("orders", group="g").fetch(9, wait="1ms") == []
        assert (await client.group("g")).backlog == 0


async def test_several_topics_are_consumed_by_one_member() -> None:
    async with calling() as (client, _, _):
        await client.publish_many("a", [b"1", b"2"])
        await client.publish_many("b", [b"3"])
        found = await collect(client.consume(["a", "b"], group="g"), 3)
        assert sorted(one.id for one in found) == ["a/0", "a/1", "b/0"]


async def test_nothing_is_acked_by_itself() -> None:
    async with calling() as (client, _, _):
        await client.publish_many("orders", [b"a", b"b"])
        async with asyncio.timeout(PATIENCE_S):
            async for delivery in client.consume("orders", group="g"):
                if delivery.offset == 1:
                    break
        again = await collect(client.consume("orders", group="g"), 2)
        assert [(one.offset, one.attempt) for one in again] == [(0, 1), (1, 1)]


async def test_what_is_larger_than_the_buffer_comes_bit_by_bit() -> None:
    async with calling() as (client, cable, _):
        for _ in range(60):
            await client.publish("orders", bytes(1_000_000))
        batches = client.consume("orders", group="g").batches()
        first = await anext(batches)
        await turns(500)
        held = cable.broker.consuming.leases_of("g").of_member(first.member)
        assert sum(lease.ranges.count for lease in held) < 40
        await first.ack()
        count = first.count
        async with asyncio.timeout(PATIENCE_S):
            async for batch in batches:
                await batch.ack()
                count += batch.count
                if count == 60:
                    break
        await batches.aclose()


async def test_take_waits_until_there_is_something_and_keeps_messages_coming() -> None:
    async with calling() as (client, _, _):
        async with client.consume("orders", group="g", credit=10) as consumer:
            taking = asyncio.ensure_future(consumer.take(5))
            await turns()
            assert not taking.done()
            await client.publish_many("orders", [str(number) for number in range(30)])
            found = await asyncio.wait_for(taking, PATIENCE_S)
            while len(found) < 30:
                more = await asyncio.wait_for(consumer.take(5), PATIENCE_S)
                assert 1 <= len(more) <= 5
                found += more
            assert [one.offset for one in found] == list(range(30))
            await asyncio.gather(*[one.ack() for one in found])
        assert (await client.group("g")).backlog == 0


# --- fetch -----------------------------------------------------------------------------------


def consuming(client: Client, **options: Any) -> Consumer:
    return client.consume("orders", group="g", **options)


async def give_late_credit(client: Client, cable: Cable) -> None:
    """Do as if the credit that was taken back had been used on its way."""
    await client.status()  # behind everything that was sent before
    assert members(cable)[0].credit == 0
    members(cable)[0].crew.give(members(cable)[0], 10)


async def test_a_fetch_gives_what_is_there_and_nothing_when_nothing_comes() -> None:
    async with calling() as (client, _, _), client.consume("orders", group="g") as consumer:
        assert await consumer.fetch(10, wait="1ms") == []
        await client.publish_many("orders", [b"a", b"b", b"c"])
        found = await fetch(consumer, 2)
        found += await fetch(consumer, 1)
        assert [one.body for one in found] == [b"a", b"b", b"c"]


async def test_a_fetch_that_waits_gets_what_is_published_meanwhile() -> None:
    async with calling() as (client, _, _):
        fetching = asyncio.ensure_future(client.fetch("orders", group="g", n=10, wait="60s"))
        await turns(100)
        await client.publish("orders", b"a")
        (one,) = await asyncio.wait_for(fetching, PATIENCE_S)
        assert one.body == b"a"


async def test_between_fetches_no_credit_is_left_with_the_broker() -> None:
    async with calling() as (client, cable, _), client.consume("orders", group="g") as consumer:
        assert await consumer.fetch(10, wait="1ms") == []
        await client.status()  # behind everything that was sent before
        assert members(cable)[0].credit == 0
        await client.publish_many("orders", [b"a", b"b"])
        async with client.consume("orders", group="g") as other:
            assert len(await fetch(other, 2)) == 2


async def test_what_comes_too_late_for_a_fetch_waits_for_the_next_one() -> None:
    async with calling() as (client, cable, _), client.consume("orders", group="g") as consumer:
        assert await consumer.fetch(10, wait="1ms") == []
        await give_late_credit(client, cable)
        await client.publish_many("orders", [b"a", b"b"])
        await until(lambda: len(consumer._membership._received) == 1)
        assert [one.body for one in await consumer.fetch(10, wait=0)] == [b"a", b"b"]


async def test_what_nobody_fetches_goes_back_to_the_group_long_before_its_lease_ends() -> None:
    async with calling() as (client, cable, _), consuming(client, lease="1h") as consumer:
        assert await consumer.fetch(10, wait="1ms") == []
        await give_late_credit(client, cable)
        await client.publish_many("orders", [b"a", b"b"])
        await until(lambda: len(consumer._membership._received) == 1)
        async with client.consume("orders", group="g") as other:
            found = await fetch(other, 2)
            assert {(one.body, one.attempt) for one in found} == {(b"a", 1), (b"b", 1)}


@pytest.mark.parametrize(
    ("rule", "at_most_once"),
    [({"mode": "ordered"}, False), ({"priorities": True}, False), ({"priorities": True}, True)],
)
async def test_a_fetch_gets_all_that_was_granted_for_it_in_however_many_deliveries(
    rule: dict[str, Any], at_most_once: bool
) -> None:
    async with (
        calling() as (client, cable, _),
        consuming(client, lease="1h", at_most_once=at_most_once, **rule) as ann,
        client.consume("orders", group="g") as bob,
    ):
        keys = [str(number) for number in range(500)]
        await client.publish_many("orders", [bytes(2_000)] * 500, keys=keys)
        found = await ann.fetch(300, wait="60s")
        assert not ann._membership.has_waiting
        if not at_most_once:
            assert len({one.lease for one in found}) > 1
            assert cable.broker.consuming.leases_of("g").count == len(found)
        found += await fetch(bob, 500 - len(found))
        assert sorted(one.offset for one in found) == list(range(500))
        assert {one.attempt for one in found} == {1}


async def test_a_fetch_does_not_wait_long_for_a_broker_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with calling() as (client, _, _), client.consume("orders", group="g") as consumer:
        send = Link.send

        def lose_pings(link: Link, kind: int, request_id: int, payload: bytes = b"") -> None:
            if kind != Kind.PING:
                send(link, kind, request_id, payload)

        monkeypatch.setattr(Link, "send", lose_pings)
        await client.publish("orders", b"a")
        async with asyncio.timeout(30):
            assert len(await consumer.fetch(10, wait="60s")) == 1


async def test_fetches_at_the_same_time_share_what_comes() -> None:
    async with calling() as (client, _, _):
        fetches = [
            asyncio.ensure_future(client.fetch("orders", group="g", n=2, wait="60s"))
            for _ in range(5)
        ]
        await turns(100)
        for number in range(10):
            await client.publish("orders", str(number))
            await turns()
        found = [one for part in await asyncio.gather(*fetches) for one in part]
        assert len({one.offset for one in found}) == len(found) >= 5


async def test_the_client_stays_one_member_from_fetch_to_fetch() -> None:
    async with calling() as (client, cable, _):
        await client.publish_many("orders", [b"a", b"b", b"c"])
        for _ in range(3):
            (one,) = await client.fetch("orders", group="g", wait="60s")
            await one.ack()
        assert len(members(cable)) == 1


# --- settling --------------------------------------------------------------------------------


async def test_acks_of_one_turn_travel_in_one_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    async with calling() as (client, _, _):
        await client.publish_many("orders", [b"x"] * 100)
        async with client.consume("orders", group="g") as consumer:
            found = await fetch(consumer, 100)
            kinds = sent_kinds(client, monkeypatch)
            await asyncio.gather(*[one.ack() for one in found])
            assert kinds.count(Kind.ACK) == 1


async def test_an_ack_returns_when_it_is_durable_and_not_before() -> None:
    async with calling() as (client, _, commit):
        await client.publish("orders", b"a")
        async with client.consume("orders", group="g") as consumer:
            (one,) = await fetch(consumer, 1)
            commit.is_holding = True
            acking = asyncio.ensure_future(one.ack())
            await turns(200)
            assert not acking.done()
            commit.release()
            await asyncio.wait_for(acking, PATIENCE_S)
        assert (await client.group("g")).backlog == 0


async def test_a_message_is_settled_once() -> None:
    async with calling() as (client, _, _):
        await client.publish("orders", b"a")
        async with client.consume("orders", group="g") as consumer:
            (one,) = await fetch(consumer, 1)
            assert not one.is_settled
            await one.ack()
            assert one.is_settled
            for verb in (one.ack, one.retry, one.reject, one.release):
                with pytest.raises(LeaseLost, match="settled already"):
                    await verb()
            with pytest.raises(LeaseLost):
                await one.ack_soon()


async def test_a_batch_settles_what_its_messages_have_left() -> None:
    async with calling() as (client, _, _):
        await client.publish_many("orders", [b"a", b"b", b"c", b"d"])
        async with client.consume("orders", group="g", retry="fixed:0s") as consumer:
            a, b, c, _ = await fetch(consumer, 4)
            assert isinstance(a.batch, DeliveryBatch)
            await asyncio.gather(a.ack(), c.ack())
            await a.batch.retry(cause="later")
            assert b.is_settled
            await a.batch.ack()
            again = await fetch(consumer, 2)
            assert [(one.offset, one.attempt) for one in again] == [(1, 2), (3, 2)]


async def test_a_retry_comes_when_it_was_asked_for_and_counts_unless_told_not_to() -> None:
    async with calling() as (client, _, _):
        await client.publish("orders", b"a")
        async with client.consume("orders", group="g") as consumer:
            (one,) = await fetch(consumer, 1)
            await one.retry(after=0, cause="not yet")
            (one,) = await fetch(consumer, 1)
            assert one.attempt == 2
            await one.retry(at=1, count=False)
            (one,) = await fetch(consumer, 1)
            assert one.attempt == 2
            await one.release()
            (one,) = await fetch(consumer, 1)
            assert one.attempt == 2
            await one.retry(after="1h")
            assert await consumer.fetch(1, wait="1ms") == []
            (share,) = (await client.group("g")).topics
            assert share.waiting == 1


async def test_what_is_rejected_or_out_of_attempts_is_a_dead_letter_with_its_cause() -> None:
    async with calling() as (client, _, _):
        await client.publish_many("orders", [b"a", b"b"])
        policy = RetryPolicy(kind="fixed", delay_ms=0, attempts_max=2)
        async with client.consume("orders", group="g", retry=policy) as consumer:
            a, b = await fetch(consumer, 2)
            await asyncio.gather(a.reject("no such customer"), b.retry(cause="try"))
            (b,) = await fetch(consumer, 1)
            await b.retry(cause="tried twice")
        dead = [one async for one in client.dead_letters("g")]
        assert [(one.offset, one.cause, one.attempts) for one in dead] == [
            (0, "no such customer", 1),
            (1, "tried twice", 2),
        ]


async def test_an_outcome_that_is_refused_harms_none_of_its_neighbours() -> None:
    async with calling() as (client, _, _):
        await client.publish_many("orders", [b"a", b"b", b"c"])
        async with client.consume("orders", group="g", retry="fixed:0s") as consumer:
            a, b, c = await fetch(consumer, 3)
            results = await asyncio.gather(
                a.retry(), b.retry(after="11w"), c.retry(after=f"{50 * 366}d"),
                return_exceptions=True,
            )  # fmt: skip
            assert (results[0], results[1]) == (None, None)
            assert isinstance(results[2], InvalidRequest)
            assert not c.is_settled
            await c.ack()


async def test_a_verb_says_what_is_wrong_with_its_arguments() -> None:
    async with calling() as (client, _, _):
        await client.publish("orders", b"a")
        async with client.consume("orders", group="g") as consumer:
            (one,) = await fetch(consumer, 1)
            with pytest.raises(InvalidRequest, match="not both"):
                await one.retry(after="1s", at=5)
            with pytest.raises(InvalidRequest, match="duration"):
                await one.retry(after="soon")
            with pytest.raises(InvalidRequest, match="a cause is text"):
                await one.reject(7)  # type: ignore[arg-type]
            await one.reject("x" * 100_000)
        (dead,) = [dead async for dead in client.dead_letters("g")]
        assert len(dead.cause) == 1_000


async def test_a_group_that_delivers_at_most_once_needs_no_acks_and_has_no_retries() -> None:
    async with calling() as (client, _, _):
        await client.publish_many("orders", [b"a", b"b"])
        async with client.consume("orders", group="g", at_most_once=True) as consumer:
            a, b = await fetch(consumer, 2)
            await a.ack()
            with pytest.raises(LeaseLost, match="at most once"):
                await b.retry()
        async with client.consume("orders", group="g") as consumer:
            assert await consumer.fetch(2, wait="1ms") == []
            assert (await client.group("g")).backlog == 0


async def test_a_message_that_cannot_be_decoded_becomes_a_dead_letter_and_stops_nobody() -> None:
    async with calling() as (client, _, _):
        await client.publish("orders", b"before")
        link = client._keeper().link
        assert link is not None
        batch = bytearray(encode_batch([b"x" * 100] * 3, compression="zstd"))
        batch[56:80] = bytes(24)
        _write_checksum(batch)
        answered = asyncio.get_running_loop().create_future()
        request_id = link.expect(lambda kind, _: answered.set_result(kind))
        link.write(publish_head(request_id, "orders", durability=255, batch_bytes=len(batch)))
        link.write(bytes(batch))
        assert await answered == Kind.PUBLISHED
        await client.publish("orders", b"after")
        found = await collect(client.consume("orders", group="g"), 2)
        assert [(one.offset, one.body) for one in found] == [(0, b"before"), (4, b"after")]
        dead = [one async for one in client.dead_letters("g")]
        assert [one.offset for one in dead] == [1, 2, 3]
        assert "cannot be decoded" in dead[0].cause


async def test_many_messages_that_cannot_be_decoded_use_up_no_credit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed_rightly = columns.pack_headers

    def packed_wrongly(headers: Any) -> bytes:
        packed = packed_rightly(headers)
        return bytes(len(packed) - 8) + b"\xff" * 8

    with monkeypatch.context() as patched:
        patched.setattr(columns, "pack_headers", packed_wrongly)
        bad = encode_batch([b"x"], headers=[{"name": "a value of some length"}])
    async with calling() as (client, _, _):
        for sequence in range(1, 101):
            await client.publish_encoded("orders", bad, producer_id=9, sequence=sequence)
        await client.publish("orders", b"good")
        for group, verb in (("g", "iterate"), ("h", "take")):
            async with client.consume("orders", group=group) as consumer:
                if verb == "iterate":
                    (found,) = await collect(consumer, 1)
                else:
                    (found,) = await asyncio.wait_for(consumer.take(), PATIENCE_S)
            assert found.body == b"good"


def _write_checksum(batch: bytearray) -> None:
    from crc32c import crc32c

    batch[8:12] = crc32c(memoryview(batch)[12:]).to_bytes(4, "little")


# --- leases ----------------------------------------------------------------------------------


async def test_leases_are_renewed_while_messages_are_held_or_wait() -> None:
    async with calling() as (client, cable, _):
        await client.publish_many("orders", [b"a", b"b"])
        consumer = client.consume("orders", group="g", lease="60s")
        iterating = aiter(consumer)
        first = await anext(iterating)
        lease = cable.broker.consuming.leases_of("g").find(first.lease)
        assert lease is not None
        before = lease.expires_at_ms
        assert consumer._membership._renewal is not None

        def renewed() -> bool:
            consumer._membership._renew()  # as its timer does
            return lease.expires_at_ms > before

        await until(renewed)
        assert consumer._membership._renewal is not None
        await first.renew()
        await iterating.aclose()


async def test_a_lease_that_is_refused_at_its_renewal_is_known_to_be_lost() -> None:
    async with calling() as (client, cable, _):
        await client.publish_many("orders", [b"a", b"b"])
        async with client.consume("orders", group="g") as consumer:
            a, b = await fetch(consumer, 2)
            cable.broker.consuming.cancel_leases("g", "orders")
            consumer._membership._renew()
            await until(lambda: a.is_lost)
            assert b.is_lost
            with pytest.raises(LeaseLost):
                await a.ack()


async def test_an_ack_for_a_lease_that_is_no_more_is_refused() -> None:
    async with calling() as (client, cable, _):
        await client.publish_many("orders", [b"a", b"b"])
        async with client.consume("orders", group="g") as consumer:
            a, b = await fetch(consumer, 2)
            cable.broker.consuming.cancel_leases("g", "orders")
            with pytest.raises(LeaseLost, match="orders/0 in group 'g'"):
                await a.ack()
            with pytest.raises(LeaseLost):
                await b.retry()


async def test_what_is_dropped_without_an_outcome_is_said_in_the_log_and_not_renewed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with calling() as (client, _, _):
        await client.publish_many("orders", [b"a", b"b", b"c"])
        async with client.consume("orders", group="g") as consumer:
            found = await fetch(consumer, 3)
            await found[0].ack()
            with caplog.at_level(logging.WARNING, "onward.consumer"):
                del found
                gc.collect()
            assert "2 messages were taken and neither acked" in caplog.text
            assert not consumer._membership._leases


# --- the connection --------------------------------------------------------------------------


async def test_after_a_lost_connection_the_same_member_goes_on() -> None:
    async with calling() as (client, cable, _):
        await client.publish_many("orders", [str(number) for number in range(100)])
        consumer = client.consume("orders", group="g", member="ann", credit=10)
        acked: set[int] = set()
        async with asyncio.timeout(PATIENCE_S):
            async for delivery in consumer:
                if delivery.offset in (20, 50, 70) and delivery.attempt == 1:
                    cable.cut()
                    with pytest.raises((LeaseLost, OutcomeUnknown)):
                        await delivery.ack()
                    assert delivery.is_lost
                    continue
                await delivery.ack()
                acked.add(delivery.offset)
                if len(acked) == 100:
                    assert [one.name for one in members(cable)] == ["ann"]
                    break


async def test_an_ack_whose_answer_was_lost_has_an_unknown_outcome() -> None:
    async with calling() as (client, cable, commit):
        await client.publish("orders", b"a")
        async with client.consume("orders", group="g") as consumer:
            (one,) = await fetch(consumer, 1)
            commit.is_holding = True
            acking = asyncio.ensure_future(one.ack())
            await turns(100)
            cable.cut()
            with pytest.raises(OutcomeUnknown, match="orders/0 in group 'g'"):
                await asyncio.wait_for(acking, PATIENCE_S)
            with pytest.raises(LeaseLost):
                await one.ack()
            commit.release()


async def test_what_was_received_over_a_lost_connection_comes_again_and_only_again() -> None:
    async with calling() as (client, cable, _):
        await client.publish_many("orders", [b"a", b"b", b"c"])
        consumer = client.consume("orders", group="g")
        iterating = aiter(consumer)
        first = await anext(iterating)
        assert len(consumer._membership.rest) == 2
        cable.cut()
        await turns()
        again = []
        for _ in range(3):
            again.append(await asyncio.wait_for(anext(iterating), PATIENCE_S))
            await again[-1].ack()
        # The first was in the program's hands; the others had only been fetched.
        assert sorted((one.offset, one.attempt) for one in again) == [(0, 2), (1, 1), (2, 1)]
        assert first.is_lost
        await iterating.aclose()


async def test_a_consumer_that_was_in_once_waits_for_its_broker_without_a_deadline() -> None:
    async with calling() as (client, cable, _), client.consume("orders", group="g") as consumer:
        consumer._membership._timeout_s = 0.001
        cable.pull()
        taking = asyncio.ensure_future(consumer.take())
        dialled = cable.dialled
        await until(lambda: cable.dialled > dialled + 1)
        assert not taking.done()
        cable.plug()
        await until(lambda: bool(members(cable)))
        await client.publish("orders", b"a", timeout="60s")
        (one,) = await asyncio.wait_for(taking, PATIENCE_S)
        assert one.body == b"a"


async def test_the_first_join_has_a_deadline() -> None:
    async with calling() as (client, cable, _):
        cable.pull()
        await turns()
        consumer = client.consume("orders", group="g")
        consumer._membership._timeout_s = 0.01
        with pytest.raises(NotConnected):
            await consumer.join()


# --- leaving ---------------------------------------------------------------------------------


async def test_who_leaves_the_loop_gives_back_what_it_holds_uncounted_and_at_once() -> None:
    async with calling() as (client, cable, _):
        await client.publish_many("orders", [b"a", b"b", b"c"])
        async with client.consume("orders", group="g", member="bob") as bob:
            async with asyncio.timeout(PATIENCE_S):
                async for _ in client.consume("orders", group="g", member="ann"):
                    break
            found = await fetch(bob, 3)
            assert [(one.offset, one.attempt) for one in found] == [(0, 1), (1, 1), (2, 1)]
            assert [one.name for one in members(cable)] == ["bob"]


async def test_an_error_in_the_loop_leaves_the_group_as_well() -> None:
    async with calling() as (client, cable, _):
        await client.publish("orders", b"a")

        async def fail() -> None:
            async for _ in client.consume("orders", group="g"):
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        gc.collect()
        await until(lambda: not members(cable))


async def test_acks_that_are_under_way_are_answered_before_a_member_leaves() -> None:
    async with calling() as (client, _, commit):
        await client.publish_many("orders", [b"a", b"b"])
        consumer = client.consume("orders", group="g")
        found = await fetch(consumer, 2)
        commit.is_holding = True
        acking = [one.ack_soon() for one in found]
        leaving = asyncio.ensure_future(consumer.aclose())
        await turns(100)
        assert not leaving.done()
        commit.release()
        await asyncio.wait_for(leaving, PATIENCE_S)
        assert [one.exception() for one in acking] == [None, None]
        assert (await client.group("g")).backlog == 0


async def test_take_now_opens_what_has_arrived_since_until_it_is_told_to_stop() -> None:
    async with calling() as (client, _, _), client.consume("orders", group="g") as consumer:
        await client.publish("orders", "0")
        found = await consumer.take()
        assert consumer.take_now() is None
        for number in (1, 2):
            await client.publish("orders", str(number))
        await until(lambda: consumer._membership.waiting_count == 2)
        while (delivery := consumer.take_now()) is not None:
            found.append(delivery)
        assert [delivery.offset for delivery in found] == [0, 1, 2]
        await client.publish("orders", "3")
        await until(lambda: consumer._membership.waiting_count == 1)
        consumer.stop()
        assert consumer.take_now() is None
        await asyncio.gather(*(delivery.ack() for delivery in found))


async def test_a_consumer_that_stops_takes_nothing_more_but_can_finish_what_it_has() -> None:
    async with calling() as (client, cable, _):
        await client.publish_many("orders", [b"%d" % number for number in range(10)])
        consumer = client.consume("orders", group="g", member="ann")
        taken = []
        async with asyncio.timeout(PATIENCE_S):
            async for delivery in consumer:
                taken.append(delivery)
                if len(taken) == 3:
                    consumer.stop()
        assert len(taken) == 3
        async with client.consume("orders", group="g", member="bob") as bob:
            found = await fetch(bob, 7)
            assert sorted(one.offset for one in found) == list(range(3, 10))
            assert {one.attempt for one in found} == {1}
            await asyncio.gather(*[one.ack() for one in [*taken, *found]])
        assert await consumer.take() == []
        with pytest.raises(InvalidRequest, match="stopped"):
            await consumer.join()
        assert [one.name for one in members(cable)] == ["ann"]
        await consumer.aclose()
        assert members(cable) == []
        assert (await client.group("g")).backlog == 0


async def test_what_still_comes_after_a_stop_goes_back_at_once() -> None:
    async with (
        calling() as (client, cable, _),
        client.consume("orders", group="g", member="ann", credit=10) as ann,
    ):
        taking = asyncio.ensure_future(ann.take())
        await client.status()
        ann.stop()
        await give_late_credit(client, cable)
        await client.publish("orders", b"a")
        async with client.consume("orders", group="g", member="bob") as bob:
            (one,) = await fetch(bob, 1)
            assert (one.member, one.attempt) == ("bob", 1)
        assert await taking == []


async def test_what_is_wanted_while_joining_is_asked_for() -> None:
    async with calling() as (client, _, commit):
        await client.publish("orders", b"a")
        commit.is_holding = True
        consumer = client.consume("orders", group="g")
        joining = asyncio.ensure_future(consumer.join())
        await turns(100)
        assert not joining.done()
        taking = asyncio.ensure_future(consumer.take())
        await turns(100)
        commit.release()
        (one,) = await asyncio.wait_for(taking, PATIENCE_S)
        assert one.body == b"a"
        await joining
        await consumer.aclose()


async def test_a_consumer_stops_also_while_its_broker_is_away() -> None:
    async with calling() as (client, cable, _):
        consumer = client.consume("orders", group="g")
        await consumer.join()
        taking = asyncio.ensure_future(consumer.take())
        await turns()
        cable.pull()
        await turns(100)
        assert not taking.done()
        consumer.stop()
        assert await asyncio.wait_for(taking, PATIENCE_S) == []
        await consumer.aclose()


async def test_a_client_that_closes_leaves_its_groups() -> None:
    async with calling() as (client, cable, _):
        await client.publish_many("orders", [b"a", b"b"])
        other = Client(
            [], token=None, name="other", timeout_s=5, durability=255, dials=[cable.dial]
        )
        await other.open()
        held = await other.fetch("orders", group="g", n=2, wait="60s")
        iterating = asyncio.ensure_future(_drain(other.consume("bills", group="g2")))
        await until(lambda: len(members(cable, "g2")) == 1)
        await other.close()
        await asyncio.wait_for(iterating, PATIENCE_S)
        found = await fetch(client.consume("orders", group="g"), 2)
        assert len(held) == 2
        assert [one.attempt for one in found] == [1, 1]


async def _drain(consumer: Consumer) -> None:
    async for delivery in consumer:
        await delivery.ack()


async def test_a_closed_consumer_says_so() -> None:
    async with calling() as (client, _, _):
        consumer = client.consume("orders", group="g")
        await consumer.aclose()
        with pytest.raises(InvalidRequest, match="closed"):
            await consumer.fetch()
        with pytest.raises(InvalidRequest, match="closed"):
            await consumer.take()
        with pytest.raises(InvalidRequest, match="closed"):
            await anext(aiter(consumer))


async def test_a_consumer_can_be_iterated_again_after_its_loop_was_left() -> None:
    async with calling() as (client, _, _):
        await client.publish_many("orders", [b"a", b"b"])
        consumer = client.consume("orders", group="g")
        assert [one.offset for one in await collect(consumer, 1)] == [0]
        assert [one.offset for one in await collect(consumer, 1)] == [1]


# --- when the broker ends it -----------------------------------------------------------------


async def test_a_member_is_told_why_its_membership_ended() -> None:
    async with calling() as (client, cable, _):
        await client.create_topic("orders")

        async def ended(group: str) -> asyncio.Task[None]:
            task = asyncio.ensure_future(_drain(client.consume("orders", group=group, member="m")))
            await until(lambda: len(members(cable, group)) == 1)
            return task

        deleted, offline = await ended("deleted"), await ended("offline")
        twin, topic = await ended("twin"), await ended("topic")
        await client.delete_group("deleted")
        await client.set_member("offline", "m", offline=True)
        async with client.consume("orders", group="twin", member="m"):
            with pytest.raises(Conflict, match="another member joined as 'm'"):
                await asyncio.wait_for(twin, PATIENCE_S)
        await client.delete_topic("orders")
        with pytest.raises(UnknownGroup, match="'deleted' was deleted"):
            await asyncio.wait_for(deleted, PATIENCE_S)
        with pytest.raises(Conflict, match="offline"):
            await asyncio.wait_for(offline, PATIENCE_S)
        with pytest.raises(TopicEnded):
            await asyncio.wait_for(topic, PATIENCE_S)


async def test_a_fetch_of_a_group_that_was_deleted_begins_anew() -> None:
    async with calling() as (client, cable, _):
        await client.publish("orders", b"a")
        (one,) = await client.fetch("orders", group="g", wait="60s")
        await one.ack()
        await client.delete_group("g")
        await until(lambda: not members(cable))
        with pytest.raises(UnknownGroup):
            await client.fetch("orders", group="g", wait="60s")
        (one,) = await client.fetch("orders", group="g", wait="60s")
        assert one.attempt == 1


async def test_a_second_member_of_an_exclusive_group_stands_by_or_is_refused() -> None:
    async with calling() as (client, _, _):
        await client.publish("orders", b"a")
        async with client.consume("orders", group="g", mode="exclusive") as first:
            assert not first.is_standby
            with pytest.raises(AlreadyExists):
                await client.consume("orders", group="g", refuse=True).join()
            async with client.consume("orders", group="g") as second:
                assert (second.is_standby, second.mode) == (True, "exclusive")
                assert await second.fetch(1, wait="1ms") == []
                await first.aclose()
                assert len(await fetch(second, 1)) == 1


async def test_a_member_that_wants_another_group_than_there_is_gets_a_conflict() -> None:
    async with calling() as (client, _, _):
        await client.create_topic("orders")
        await client.create_group("g", "orders", lease="60s")
        with pytest.raises(Conflict, match="has lease 1m, not 30s"):
            await client.consume("orders", group="g", lease="30s").join()
        async with client.consume("orders", group="g") as consumer:
            assert consumer.lease_ms == 60_000


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"group": ""}, InvalidName, "group name"),
        ({"topics": []}, InvalidRequest, "at least one topic"),
        ({"topics": ["a", "a"]}, InvalidRequest, "twice"),
        ({"topics": "a b"}, InvalidName, "a b"),
        ({"credit": 0}, InvalidRequest, "credit"),
        ({"credit": True}, InvalidRequest, "credit"),
        ({"lease": "1ms"}, InvalidRequest, "a lease is 1s to 1d"),
        ({"lease": "soon"}, InvalidRequest, "soon"),
        ({"retry": "often"}, InvalidRequest, "retry policy"),
        ({"retry": RetryPolicy(delay_ms=-1)}, InvalidRequest, "delay_ms"),
        ({"mode": "shard"}, InvalidRequest, "shard"),
        ({"member": ""}, InvalidRequest, "member"),
        ({"tags": ["x"] * 101}, InvalidRequest, "at most 100 tags"),
        ({"tenants": {"a": 0}}, InvalidRequest, "weight"),
        ({"key_rate": -1}, InvalidRequest, "key_rate"),
        ({"start": -1}, InvalidRequest, "negative"),
        ({"at_most_once": True, "retry": "ladder"}, InvalidRequest, "exclude each other"),
        ({"mode": "shared", "position": "x"}, InvalidRequest, "broadcast"),
    ],
)
async def test_nonsense_is_refused_before_anything_is_sent(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    async with calling() as (client, cable, _):
        with pytest.raises(error, match=text):
            client.consume(**{"topics": "orders", "group": "g", **options})
        assert members(cable) == []


@pytest.mark.parametrize("n", [0, -1, 10**9, True, 1.5])
async def test_a_fetch_says_how_many_it_may_take(n: Any) -> None:
    async with calling() as (client, _, _):
        with pytest.raises(InvalidRequest, match="messages can be taken"):
            await client.fetch("orders", group="g", n=n)


@pytest.mark.parametrize(
    "options",
    [{}, {"tags": "news"}, {"priorities": True}, {"tenants": {"a": 1}}, {"key_rate": 10_000}],
)
async def test_a_long_backlog_of_large_messages_comes_in_its_order(options: dict[str, Any]) -> None:
    """Longer than what one look into the log reads."""
    async with calling() as (client, _, _):
        for _ in range(12):
            await client.publish_many("orders", [b"x" * 1_000] * 300, tags=["news"] * 300)
        async with client.consume("orders", group="g", **options) as consumer:
            found = await fetch(consumer, 3_600)
        assert [one.offset for one in found] == list(range(3_600))
