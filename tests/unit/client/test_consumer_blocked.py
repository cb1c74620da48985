"""A loop that was blocked renews nothing: what waited for it meanwhile is no longer its own.

The clock of the client is moved, that of the broker is not: so it still knows what was leased, and
it is seen that it was given back.
"""

import asyncio
import time

from onward import Client, Delivery
from onward.client.consumer import Consumer
from onward.client.work import make_work
from onward.client.work_run import WorkRun
from onward.testing.clock import ManualClock

from .calling import calling, turns
from .consuming import PATIENCE_S, until

LEASE_MS = 60_000


def consume(client: Client, **options: bool) -> Consumer:
    return client.consume("orders", group="g", lease_ms=LEASE_MS, **options)


async def test_what_waits_when_its_lease_is_over_is_given_back_and_not_handed_out() -> None:
    clock = ManualClock()
    async with calling(clock=clock) as (client, cable, _):
        await client.publish_many("orders", [b"a", b"b", b"c"])
        async with consume(client) as consumer:
            (first,) = await consumer.take(1)
            clock.advance(LEASE_MS - 1)
            second = consumer.take_now()
            assert second is not None
            clock.advance(1)
            assert consumer.take_now() is None
            (third,) = await asyncio.wait_for(consumer.take(3), PATIENCE_S)
            assert (third.offset, third.attempt) == (2, 1)
            assert third.lease > second.lease
            await asyncio.gather(first.ack(), second.ack(), third.ack())
        assert (await client.group("g")).backlog == 0
        assert cable.broker.consuming.expired_of("g") == 0


async def test_whole_batches_that_wait_too_long_are_given_back() -> None:
    clock = ManualClock()
    async with calling(clock=clock) as (client, _, _):
        consumer = consume(client)
        batches = consumer.batches()
        await client.publish("orders", b"a")
        async with asyncio.timeout(PATIENCE_S):
            first = await anext(batches)
            await client.publish("orders", b"b")
            await until(lambda: consumer._membership.has_received)
            (late,) = consumer._membership._received
            clock.advance(LEASE_MS)
            second = await anext(batches)
        assert (second.offsets, late.granted) == ([1], 1)
        assert second.lease > late.lease
        await asyncio.gather(first.ack(), second.ack())
        await batches.aclose()


async def test_a_renewal_that_was_confirmed_counts_from_when_it_was_asked_for() -> None:
    clock = ManualClock()
    async with calling(clock=clock) as (client, _, _):
        await client.publish_many("orders", [b"a", b"b", b"c"])
        async with consume(client) as consumer:
            (first,) = await consumer.take(1)
            assert first.batch is not None
            clock.advance(LEASE_MS // 2)
            consumer._membership._renew()  # as its timer does
            clock.advance(LEASE_MS // 4)
            before = first.batch.expires_at_ms
            await until(lambda: first.batch is not None and first.batch.expires_at_ms > before)
            clock.advance(LEASE_MS * 3 // 4 - 1)
            assert consumer.take_now() is not None
            clock.advance(1)
            assert consumer.take_now() is None


async def test_what_is_delivered_at_most_once_can_wait_for_ever() -> None:
    clock = ManualClock()
    async with calling(clock=clock) as (client, _, _):
        await client.publish_many("orders", [b"a", b"b", b"c"])
        async with consume(client, at_most_once=True) as consumer:
            found = await consumer.take(3)
            consumer._membership.rest.extend(found)
            clock.advance(100 * LEASE_MS)
            assert consumer.take_now() is not None
            assert len(await consumer.take(3)) == 2


async def test_a_list_of_an_app_does_not_begin_with_what_was_collected_long_ago() -> None:
    clock = ManualClock()
    async with calling(clock=clock) as (client, _, _):
        begun: list[list[int]] = []
        free = asyncio.Event()

        async def function(deliveries: list[Delivery]) -> None:
            begun.append([delivery.lease for delivery in deliveries])
            await free.wait()

        run = WorkRun(
            make_work(
                function, "orders", group="g", concurrency=1, batch=2,
                options={"lease_ms": LEASE_MS},
            ),
            client=client, middleware=(), stop_ms=1_000, on_joined=lambda: None, on_settled=None,
        )  # fmt: skip
        running = asyncio.ensure_future(run.run())
        await client.publish("orders", b"a")
        await until(lambda: len(begun) == 1)
        await client.publish("orders", b"b")
        await until(lambda: len(run._collected) == 1)
        lease = run._collected[0].lease
        clock.advance(LEASE_MS)
        free.set()
        await until(lambda: len(begun) == 2)
        assert begun[1] > [lease]
        run.stop()
        await asyncio.wait_for(running, PATIENCE_S)


async def test_what_lay_in_the_socket_of_a_blocked_loop_is_as_old_as_that() -> None:
    async with calling() as (client, _, _):
        await client.publish("orders", b"a")
        async with client.consume("orders", group="g", lease="1s") as consumer:
            (first,) = await consumer.take(1)
            membership = consumer._membership
            time.sleep(0.8)  # noqa: ASYNC251  # it is what this is about
            asleep_ms = client._clock.monotonic_ms() - membership._sent_at_ms()
            assert 800 <= asleep_ms < 800 + 1_000 / 3 + 100
            await until(lambda: membership._sent_at_ms() > client._clock.monotonic_ms() - 100)
            await first.ack()


async def test_a_loop_that_was_blocked_goes_on_with_what_comes_then() -> None:
    async with (
        calling() as (client, _, _),
        client.consume("orders", group="g", lease="1s") as consumer,
    ):
        taking = asyncio.ensure_future(consumer.take(1))
        await turns()
        time.sleep(1.2)  # noqa: ASYNC251  # it is what this is about
        await client.publish("orders", b"a")
        (first,) = await asyncio.wait_for(taking, PATIENCE_S)
        await first.ack()
        assert first.attempt == 1
