"""A broker that is restarted: its members re-claim what they hold, and nobody else gets it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import pytest
from msgspec.structs import replace

from onward import Client, Delivery
from onward.broker.broker import Broker
from onward.client.work import make_work
from onward.client.work_run import WorkRun
from onward.clock import Clock
from onward.errors import LeaseLost, OutcomeUnknown
from onward.protocol.deliveries import Claim, Consume
from onward.protocol.payloads import Durability
from onward.settings import GroupSettings
from onward.testing.clock import ManualClock
from onward.testing.disk import FaultyDisk

from .calling import Cable, SlowCommit, settings_with
from .consuming import PATIENCE_S, fetch, until

WINDOW_MS = 600_000
"""No test waits for its end: `World.end_window` ends it."""


class World:
    """One disk, one broker after another on it, and clients that find the one that runs."""

    def __init__(self, window_ms: int) -> None:
        self.settings = replace(settings_with(), groups=GroupSettings(reclaim_ms=window_ms))
        self.disk = FaultyDisk(Random(1))
        self.clients: list[Client] = []
        self.cables: list[Cable] = []
        self.broker: Broker

    async def start(self) -> None:
        self.broker = await Broker.open(self.settings, disk=self.disk, commit=SlowCommit)
        for cable in self.cables:
            cable.broker = self.broker
            cable.plug()

    @property
    def commit(self) -> SlowCommit:
        commit = self.broker._commit
        assert isinstance(commit, SlowCommit)
        return commit

    async def client(self, *, timeout_s: float = 60.0, clock: Clock | None = None) -> Client:
        cable = Cable(self.broker)
        client = Client(
            [], token=None, name="test", timeout_s=timeout_s, durability=Durability.DEFAULT,
            dials=[cable.dial], producer_id=7 + len(self.clients), jitter=Random(1), clock=clock,
        )  # fmt: skip
        self.clients.append(client)
        self.cables.append(cable)
        await client.open()
        return client

    async def die(self) -> None:
        """Kill the broker: nothing that it still does is seen by anybody."""
        for cable in self.cables:
            cable.pull()
        self.broker.fail(RuntimeError("killed by the test"))
        self.disk.kill()
        await asyncio.sleep(0)

    async def restart(self, *, clean: bool = False) -> None:
        if clean:
            for cable in self.cables:
                cable.is_plugged = False
            await self.broker.stop()
        else:
            await self.die()
        await self.start()

    def end_window(self) -> None:
        self.broker.consuming.reclaims.end()

    def members(self) -> int:
        return len(self.broker.consuming.members_of("g"))

    def number(self, topic: str) -> int:
        return self.broker.catalogue.by_name[topic].number

    def leased(self) -> int:
        return self.broker.consuming.leases_of("g").count


@asynccontextmanager
async def world(window_ms: int = WINDOW_MS) -> AsyncIterator[World]:
    made = World(window_ms)
    await made.start()
    try:
        yield made
    finally:
        for client in made.clients:
            await client.close(drain=False)
        made.commit.release()
        await made.broker.stop()


async def publish(client: Client, *bodies: str, key: str | None = None) -> None:
    for body in bodies:
        await client.publish("orders", body, key=key)


def offsets(deliveries: list[Delivery]) -> list[int]:
    return [one.offset for one in deliveries]


@pytest.mark.parametrize("clean", [True, False])
async def test_a_message_that_is_held_over_a_restart_is_acked_and_comes_to_nobody_else(
    clean: bool,
) -> None:
    async with world() as made:
        first, second = await made.client(), await made.client()
        await publish(first, "a", "b")
        async with (
            first.consume("orders", group="g") as holding,
            second.consume("orders", group="g") as other,
        ):
            (held,) = await fetch(holding, 1)
            await made.restart(clean=clean)
            await until(lambda: made.members() == 1 and made.leased() == 1)
            assert not held.is_lost
            await publish(second, "c")
            assert offsets(await fetch(other, 1)) == [2], "what is new is not held up"
            assert await other.fetch(2, wait="50ms") == [], "the rest waits for the window"
            await held.ack()
            made.end_window()
            (rest,) = await fetch(other, 1)
            assert (rest.offset, rest.attempt) == (1, 1)
            with pytest.raises(LeaseLost):
                await held.ack()


async def test_a_message_is_claimed_though_nobody_asks_for_more() -> None:
    """A program that is busy does not call its consumer: the membership comes back by itself."""
    async with world() as made:
        client = await made.client()
        await publish(client, "a")
        deliveries = aiter(client.consume("orders", group="g"))
        held = await anext(deliveries)
        for _ in range(3):
            await made.restart()
            await until(lambda: made.leased() == 1)
        await held.retry(after="1h")
        (share,) = (await client.group("g")).topics
        assert (share.waiting, share.reserved) == (1, 0)
        await deliveries.aclose()  # type: ignore[attr-defined]


@pytest.mark.parametrize("was_written", [True, False])
async def test_an_ack_without_an_answer_is_sent_again_and_confirmed(was_written: bool) -> None:
    async with world() as made:
        client = await made.client()
        await publish(client, "a", "b")
        async with client.consume("orders", group="g") as consumer:
            held, _ = await fetch(consumer, 2)
            made.commit.is_holding = True
            ack = asyncio.ensure_future(held.ack())
            await until(lambda: bool(made.commit._held))
            for cable in made.cables:
                cable.pull()
            if was_written:
                made.commit.release()
            await made.restart()
            async with asyncio.timeout(PATIENCE_S):
                await ack
            assert (await client.group("g")).backlog == 1


async def test_outcomes_that_are_given_while_the_broker_is_away_reach_it() -> None:
    async with world() as made:
        client = await made.client()
        await publish(client, "a", "b", "c", "d")
        async with client.consume("orders", group="g") as consumer:
            a, b, c, d = await fetch(consumer, 4)
            await made.die()
            outcomes = asyncio.gather(
                a.ack(), b.retry(after="1h"), c.reject("wrong"), d.renew(), return_exceptions=True
            )
            await asyncio.sleep(0.05)
            assert not outcomes.done()
            await made.start()
            assert await outcomes == [None] * 4
            group = await client.group("g")
            (share,) = group.topics
            assert (share.backlog, share.waiting, share.leased, group.dead) == (2, 1, 1, 1)


async def test_an_outcome_waits_for_a_broker_only_as_long_as_the_client_waits_for_anything() -> (
    None
):
    async with world() as made:
        client = await made.client(timeout_s=0.2)
        await publish(client, "a", "b")
        async with client.consume("orders", group="g") as consumer:
            a, b = await fetch(consumer, 2)
            made.commit.is_holding = True
            sent = asyncio.ensure_future(a.ack())
            await until(lambda: bool(made.commit._held))
            await made.die()
            with pytest.raises(OutcomeUnknown):
                await sent
            with pytest.raises(LeaseLost, match="lost with the connection"):
                await b.ack()
            await made.start()


async def test_who_comes_back_after_the_window_has_lost_what_it_held() -> None:
    async with world() as made:
        client = await made.client()
        await publish(client, "a")
        async with client.consume("orders", group="g") as consumer:
            (held,) = await fetch(consumer, 1)
            await made.die()
            await made.start()
            made.end_window()
            with pytest.raises(LeaseLost):
                await held.ack()
            (again,) = await fetch(consumer, 1)
            assert (again.offset, again.attempt) == (0, 1)
            await again.ack()


async def test_a_connection_that_is_lost_without_a_restart_ends_its_leases_at_once() -> None:
    async with world() as made:
        first, second = await made.client(), await made.client()
        await publish(first, "a")
        async with (
            first.consume("orders", group="g") as holding,
            second.consume("orders", group="g") as other,
        ):
            (held,) = await fetch(holding, 1)
            made.cables[0].cut()
            (again,) = await fetch(other, 1)
            assert (again.offset, again.attempt) == (0, 2)
            with pytest.raises(LeaseLost):
                await held.ack()
            await again.ack()


async def test_what_was_fetched_ahead_is_handed_out_after_the_restart_and_not_before() -> None:
    async with world() as made:
        client = await made.client()
        await publish(client, "a", "b", "c")
        async with client.consume("orders", group="g") as consumer:
            (first,) = await consumer.take(1)
            await made.die()
            await until(lambda: consumer._membership.is_away)
            assert consumer.take_now() is None
            taking = asyncio.ensure_future(consumer.take(5))
            await made.start()
            rest = await taking
            assert offsets([first, *rest]) == [0, 1, 2]
            await asyncio.gather(*[one.ack() for one in (first, *rest)])
            assert (await client.group("g")).backlog == 0


async def test_a_group_without_anything_unfinished_is_not_held_up() -> None:
    async with world() as made:
        client = await made.client()
        await publish(client, "a")
        async with client.consume("orders", group="g") as consumer:
            (done,) = await fetch(consumer, 1)
            await done.ack()
            await made.restart()
            assert made.broker.consuming.reclaims._timer is None
            await publish(client, "b")
            assert offsets(await fetch(consumer, 1)) == [1]


async def test_a_group_that_delivers_at_most_once_is_not_held_up() -> None:
    async with world() as made:
        client = await made.client()
        await publish(client, "a", "b")
        async with client.consume("orders", group="g", at_most_once=True) as consumer:
            assert offsets(await fetch(consumer, 1)) == [0]
            await made.restart()
            assert offsets(await fetch(consumer, 1)) == [1]


async def test_without_a_window_everything_is_ready_at_once() -> None:
    async with world(window_ms=0) as made:
        client = await made.client()
        await publish(client, "a")
        async with client.consume("orders", group="g") as consumer:
            (held,) = await fetch(consumer, 1)
            await made.restart()
            (again,) = await fetch(consumer, 1)
            assert again.offset == 0
            with pytest.raises(LeaseLost):
                await held.ack()


async def test_the_window_ends_by_itself() -> None:
    async with world(window_ms=100) as made:
        client = await made.client()
        await publish(client, "a")
        async with client.consume("orders", group="g") as consumer:
            await fetch(consumer, 1)
        await made.restart()
        async with client.consume("orders", group="g") as consumer:
            assert offsets(await fetch(consumer, 1)) == [0]


@pytest.mark.parametrize("is_acked_before", [True, False])
async def test_the_time_of_work_over_a_restart_counts_from_its_start(is_acked_before: bool) -> None:
    async with world() as made:
        clock = ManualClock()
        client = await made.client(clock=clock)
        await publish(client, "a", "b", "c")
        deliveries = aiter(client.consume("orders", group="g", credit=3))
        at_once = await anext(deliveries)
        await until(lambda: made.leased() == 3)
        clock.advance(4_000)
        _ = await anext(deliveries)
        later = await anext(deliveries)
        clock.advance(5_000)
        await made.die()
        acks = [asyncio.ensure_future(one.ack()) for one in (at_once, later) if is_acked_before]
        await made.start()
        await until(lambda: made.members() == 1)
        acks += [asyncio.ensure_future(one.ack()) for one in (at_once, later) if not acks]
        await asyncio.gather(*acks)
        (life,) = (await client.explain("orders/0")).groups
        assert (life.events[-1].took_ms or 0) >= 9_000
        (life,) = (await client.explain("orders/2")).groups
        acked = life.events[-1]
        assert 9_000 <= (acked.took_ms or 0) < 60_000
        assert 5_000 <= (acked.worked_ms or 0) <= (acked.took_ms or 0) - 4_000


async def test_people_can_see_what_is_kept_for_members_that_may_come_back() -> None:
    async with world() as made:
        client = await made.client()
        await client.create_group("g", "orders")
        await publish(client, "a")
        await made.restart()
        (share,) = (await client.group("g")).topics
        assert (share.ready, share.reserved) == (0, 1)
        (told,) = (await client.explain("orders/0")).groups
        assert told.state == "reserved"
        assert "kept for the member that may have had it" in told.sentence()


async def test_no_message_of_a_key_overtakes_one_that_may_be_claimed() -> None:
    async with world() as made:
        first, second = await made.client(), await made.client()
        await publish(first, "a", key="x")
        await publish(first, "b", key="y")
        async with (
            first.consume("orders", group="g", mode="ordered") as holding,
            second.consume("orders", group="g", mode="ordered") as other,
        ):
            held = await fetch(holding, 2)
            made.cables[0].pull()
            await made.die()
            made.cables[1].plug()
            made.broker = await Broker.open(made.settings, disk=made.disk, commit=SlowCommit)
            made.cables[1].broker = made.broker
            await publish(second, "c", key="x")
            await publish(second, "d", key="z")
            assert offsets(await fetch(other, 1)) == [3], "a key that nobody can hold goes on"
            assert await other.fetch(1, wait="50ms") == []
            made.cables[0].broker = made.broker
            made.cables[0].plug()
            await held[0].ack()
            assert offsets(await fetch(other, 1)) == [2]
            await held[1].ack()


async def test_the_member_that_was_active_is_active_again() -> None:
    async with world() as made:
        first, second = await made.client(), await made.client()
        await publish(first, "a", "b")
        async with (
            first.consume("orders", group="g", mode="exclusive") as active,
            second.consume("orders", group="g", mode="exclusive") as standby,
        ):
            (held,) = await fetch(active, 1)
            await made.die()
            made.broker = await Broker.open(made.settings, disk=made.disk, commit=SlowCommit)
            made.cables[1].broker = made.broker
            made.cables[1].plug()
            waiting = asyncio.ensure_future(standby.fetch(5, wait="60s"))
            await until(lambda: made.members() == 1)
            await publish(second, "c")
            made.cables[0].broker = made.broker
            made.cables[0].plug()
            await until(lambda: made.members() == 2)
            assert offsets(await fetch(active, 2)) == [1, 2], "nobody else can have had the rest"
            assert not waiting.done()
            await held.ack()
            waiting.cancel()


async def test_a_paused_group_settles_what_its_members_hold() -> None:
    async with world() as made:
        client = await made.client()
        await publish(client, "a", "b")
        async with client.consume("orders", group="g") as consumer:
            (held,) = await fetch(consumer, 1)
            await client.pause_group("g")
            await made.restart()
            await held.ack()
            assert (await client.group("g")).backlog == 1


async def test_a_retry_that_was_due_may_be_held_and_one_that_was_not_comes_at_its_time() -> None:
    async with world() as made:
        client = await made.client()
        await publish(client, "a", "b")
        async with client.consume("orders", group="g", retry="fixed:1s:9") as consumer:
            a, b = await fetch(consumer, 2)
            await asyncio.gather(a.retry(after="1ms"), b.retry(after="300ms"))
            (held,) = await fetch(consumer, 1)
            assert (held.offset, held.attempt) == (0, 2)
            await made.restart()
            await held.ack()
            (other,) = await fetch(consumer, 1)
            assert (other.offset, other.attempt) == (1, 2)
            await other.ack()


async def test_a_claim_that_is_older_than_the_last_attempt_is_refused() -> None:
    async with world() as made:
        first, second = await made.client(), await made.client()
        await publish(first, "a")
        async with first.consume("orders", group="g") as stale:
            (old,) = await fetch(stale, 1)
            made.cables[0].pull()  # it hears of nothing that follows
            async with second.consume("orders", group="g") as other:
                (newer,) = await fetch(other, 1)
                assert newer.attempt == 2
                await made.die()
                made.broker = await Broker.open(made.settings, disk=made.disk, commit=SlowCommit)
                made.cables[0].broker = made.broker
                made.cables[0].plug()
                with pytest.raises(LeaseLost):
                    await old.ack()
                made.cables[1].broker = made.broker
                made.cables[1].plug()
                await newer.ack()


async def test_a_claim_on_a_topic_that_was_created_anew_is_refused() -> None:
    async with world() as made:
        first, second = await made.client(), await made.client()
        await publish(first, "a")
        async with first.consume("orders", group="g") as stale:
            (old,) = await fetch(stale, 1)
            made.cables[0].pull()
            await until(lambda: not made.members())
            await second.delete_topic("orders")
            await publish(second, "another")
            async with second.consume("orders", group="g") as other:
                (new,) = await fetch(other, 1)
                await made.restart()
                with pytest.raises(LeaseLost):
                    await old.ack()
                await new.ack()


async def test_a_claim_of_another_log_is_refused() -> None:
    async with world() as made:
        client = await made.client()
        await publish(client, "a")
        async with client.consume("orders", group="g") as consumer:
            (held,) = await fetch(consumer, 1)
            consumer._membership._node = "another"
            await made.restart()
            with pytest.raises(LeaseLost):
                await held.ack()
        leaving = consumer._membership._leaving
        assert leaving is not None
        assert leaving.left is not None
        assert leaving.left.done(), "it did not wait in vain for the end of its membership"


async def test_two_members_cannot_claim_the_same_message() -> None:
    async with world() as made:
        first, second = await made.client(), await made.client()
        await publish(first, "a")
        async with (
            first.consume("orders", group="g") as holding,
            second.consume("orders", group="g") as other,
        ):
            (held,) = await fetch(holding, 1)
            await made.restart()
            await other.join()
            await until(lambda: made.leased() == 1 and made.members() == 2)
            (stranger,) = [
                one for one in made.broker.consuming.members_of("g") if one.name == other.member
            ]
            for lease in (held.lease, 12):
                claim = Claim(lease, "orders", made.number("orders"), ((0, 1, 1),))
                consume = Consume("g", node=made.broker.node, claims=(claim,))
                assert made.broker.consuming.reclaims.claim(stranger, consume) == ([], [])
            await held.ack()


async def test_the_work_of_an_app_goes_on_over_a_restart() -> None:
    """One call for each message, and each is acked, though the broker was away meanwhile."""
    called: list[int] = []
    settled: list[tuple[int, str]] = []
    go_on = asyncio.Event()

    async def work(delivery: Delivery) -> None:
        called.append(delivery.offset)
        await go_on.wait()

    async with world() as made:
        client = await made.client()
        await publish(client, "a", "b", "c")
        run = WorkRun(
            make_work(work, "orders", group="g", concurrency=2, batch=None, options={}),
            client=client, middleware=(),
            stop_ms=5_000, on_joined=lambda: None,
            on_settled=lambda _, delivery, did, __: settled.append((delivery.offset, did)),
        )  # fmt: skip
        running = asyncio.ensure_future(run.run())
        await until(lambda: len(called) == 2)
        await made.die()
        go_on.set()
        await asyncio.sleep(0.02)
        await made.start()
        await until(lambda: len(settled) >= 2)  # the third may have been fetched ahead
        made.end_window()
        await until(lambda: len(settled) == 3)
        run.stop()
        await running
    assert sorted(called) == [0, 1, 2]
    assert sorted(settled) == [(0, "acked"), (1, "acked"), (2, "acked")]


async def test_a_consumer_that_is_closed_while_the_broker_is_away_waits_for_nothing() -> None:
    async with world() as made:
        client = await made.client()
        await publish(client, "a")
        consumer = client.consume("orders", group="g")
        (held,) = await fetch(consumer, 1)
        await made.die()
        ack = asyncio.ensure_future(held.ack())
        await asyncio.sleep(0)
        async with asyncio.timeout(5):
            await consumer.aclose()
        with pytest.raises(LeaseLost):
            await ack
        await made.start()
