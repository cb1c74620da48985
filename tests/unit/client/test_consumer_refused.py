"""Outcomes that the broker answered with an error: whose they are then, and who is told."""

import asyncio

import pytest

from onward import Client, Delivery
from onward.client.consumer import Consumer
from onward.client.work import make_work
from onward.client.work_run import WorkRun
from onward.errors import (
    DiskFull,
    InvalidRequest,
    LeaseLost,
    MessageTooLarge,
    OnwardError,
    OutcomeUnknown,
)

from .calling import SlowCommit, calling
from .consuming import PATIENCE_S, fetch, until


async def taken(client: Client, consumer: Consumer, count: int) -> list[Delivery]:
    await client.publish_many("orders", [b"%d" % number for number in range(count)])
    return await fetch(consumer, count)


async def again(consumer: Consumer, count: int) -> list[int]:
    """Return the offsets that come again."""
    return sorted(one.offset for one in await fetch(consumer, count))


@pytest.mark.parametrize(
    "refusal", [DiskFull("the disk is full"), MessageTooLarge("a row is"), InvalidRequest("no")]
)
async def test_an_ack_that_is_answered_with_an_error_is_lost_and_comes_again(
    refusal: OnwardError,
) -> None:
    async with (
        calling() as (client, _, commit),
        client.consume("orders", group="g") as consumer,
    ):
        a, b, c = await taken(client, consumer, 3)
        credit = (consumer._membership.credit.out, consumer._membership.credit.waiting)
        commit.refusal = refusal
        results = await asyncio.gather(a.ack(), b.ack(), return_exceptions=True)
        assert [type(one) for one in results] == [type(refusal)] * 2
        assert [one.is_lost for one in (a, b, c)] == [True, True, False]
        for verb in (a.ack, a.retry, a.reject, a.renew, a.release):
            with pytest.raises(LeaseLost, match="orders/0 was lost"):
                await verb()
        with pytest.raises(LeaseLost):
            await b.ack_soon()
        after = (consumer._membership.credit.out, consumer._membership.credit.waiting)
        assert after == credit
        await c.renew()
        await c.ack()
        assert await again(consumer, 2) == [0, 1]


@pytest.mark.parametrize("verb", ["retry", "reject"])
async def test_any_outcome_that_is_answered_with_an_error_is_lost(verb: str) -> None:
    async with (
        calling() as (client, _, commit),
        client.consume("orders", group="g") as consumer,
    ):
        (one,) = await taken(client, consumer, 1)
        commit.refusal = DiskFull("the disk is full")
        with pytest.raises(DiskFull):
            await getattr(one, verb)()
        with pytest.raises(LeaseLost):
            await one.ack()
        (second,) = await fetch(consumer, 1)
        assert (second.offset, second.attempt) == (0, 1)
        await second.ack()


async def test_a_batch_that_was_lost_says_so_and_one_that_was_lost_in_part_settles_the_rest() -> (
    None
):
    async with calling() as (client, _, commit):
        await client.publish_many("orders", [b"a", b"b", b"c"])
        batches = client.consume("orders", group="g").batches()
        async with asyncio.timeout(PATIENCE_S):
            batch = await anext(batches)
            await refuse_one(commit, batch.messages()[1])
            await batch.renew()
            await batch.ack()
            for verb in (batch.ack, batch.retry, batch.reject, batch.renew, batch.release):
                with pytest.raises(LeaseLost, match="orders/1 was lost"):
                    await verb()
            batch = await anext(batches)
            assert batch.offsets == [1]
            commit.refusal = DiskFull("the disk is full")
            with pytest.raises(DiskFull):
                await batch.ack()
            with pytest.raises(LeaseLost):
                await batch.ack()
            await (await anext(batches)).ack()
        await batches.aclose()
        assert (await client.group("g")).backlog == 0


async def refuse_one(commit: SlowCommit, delivery: Delivery) -> None:
    commit.refusal = DiskFull("the disk is full")
    with pytest.raises(DiskFull):
        await delivery.ack()


async def test_what_was_lost_is_not_renewed_any_more() -> None:
    async with (
        calling() as (client, cable, commit),
        client.consume("orders", group="g", lease="60s") as consumer,
    ):
        (one,) = await taken(client, consumer, 1)
        await refuse_one(commit, one)
        consumer._membership._renew()  # as its timer does
        assert one.lease not in consumer._membership._leases
        assert cable.broker.consuming.leases_of("g").find(one.lease) is None
        assert await again(consumer, 1) == [0]


async def test_a_refused_ack_of_a_whole_batch_is_not_acked_by_saying_it_again() -> None:
    async with calling() as (client, cable, _):
        await client.publish_many("orders", [b"a", b"b"])
        batches = client.consume("orders", group="g").batches()
        async with asyncio.timeout(PATIENCE_S):
            batch = await anext(batches)
        cable.broker.consuming.cancel_leases("g", "orders")
        for _ in range(2):
            with pytest.raises(LeaseLost):
                await batch.ack()
        await batches.aclose()


async def test_what_was_wrong_with_an_outcome_can_be_said_better() -> None:
    async with calling() as (client, _, _):
        async with client.consume("orders", group="g") as consumer:
            (one,) = await taken(client, consumer, 1)
            with pytest.raises(InvalidRequest):
                await one.retry(after=f"{50 * 366}d")
            assert not one.is_lost
            await one.ack()
        await until(lambda: not consumer.is_joined)
        assert (await client.group("g")).backlog == 0


# --- acks that are told of together ------------------------------------------------------------


async def test_acks_of_one_turn_are_told_of_with_one_call() -> None:
    async with (
        calling() as (client, cable, _),
        client.consume("orders", group="g") as consumer,
    ):
        deliveries = await taken(client, consumer, 3)
        batch = deliveries[0].batch
        assert batch is not None
        told: list[tuple[list[Delivery], OnwardError | None]] = []
        for one in deliveries[:2]:
            assert batch.ack_one_soon(one, lambda *said: told.append(said))
        assert not batch.ack_one_soon(deliveries[0], lambda *said: told.append(said))
        await until(lambda: bool(told))
        assert told == [(deliveries[:2], None)]
        # A later turn makes a call of its own.
        cable.broker.consuming.cancel_leases("g", "orders")
        assert batch.ack_one_soon(deliveries[2], lambda *said: told.append(said))
        await until(lambda: len(told) == 2)
        assert told[1][0] == [deliveries[2]]
        assert isinstance(told[1][1], LeaseLost)
        assert deliveries[2].is_lost


async def test_an_app_names_only_what_was_lost_when_acks_are_refused_in_part() -> None:
    async with calling() as (client, _, _), client.consume("orders", group="g") as consumer:
        deliveries = await taken(client, consumer, 2)
        batch = deliveries[0].batch
        assert batch is not None
        run = WorkRun(
            make_work(print, "orders", group="g", concurrency=2, batch=None, options={}),
            client=client, middleware=(), stop_ms=1_000, on_joined=lambda: None,
            on_settled=lambda _, one, did, cause: settled.append((one.offset, did, cause)),
        )  # fmt: skip
        settled: list[tuple[int, str, str]] = []
        batch.lose_ranges([(1, 2)])
        run._acked(deliveries, LeaseLost("too late"))
        assert settled == [(0, "acked", ""), (1, "lost", "")]


@pytest.mark.parametrize(("turns", "told_as"), [(0, LeaseLost), (2, OutcomeUnknown)])
async def test_what_was_acked_is_said_also_when_the_connection_goes_at_once(
    turns: int, told_as: type[OnwardError]
) -> None:
    """What was not sent yet is lost for sure; of what was sent nobody knows."""
    async with (
        calling() as (client, cable, _),
        client.consume("orders", group="g") as consumer,
    ):
        (one,) = await taken(client, consumer, 1)
        told: list[tuple[list[Delivery], OnwardError | None]] = []
        assert one.batch is not None
        assert one.batch.ack_one_soon(one, lambda *said: told.append(said))
        for _ in range(turns):
            await asyncio.sleep(0)
        cable.cut()
        await until(lambda: bool(told))
        assert [(said[0], type(said[1])) for said in told] == [([one], told_as)]
        assert one.is_lost
