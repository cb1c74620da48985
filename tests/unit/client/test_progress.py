"""Members that share a connection report together what they have finished and what they start."""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec
import pytest

from onward import App, Delivery
from onward.broker.session import Session
from onward.client import link as links
from onward.client import progress
from onward.client.consumer import Consumer
from onward.delivery.ranges import Range
from onward.errors import LeaseLost
from onward.protocol.deliveries import STARTS
from onward.protocol.frames import Kind

from .calling import Cable, calling, turns
from .consuming import PATIENCE_S, until

MEMBERS = ("ann", "bob", "eve")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Count the frames of each kind that the broker takes."""
    found: Counter[int] = Counter()
    take = Session._take

    def counting(self: Session, kind: int, request_id: int, payload: bytes | bytearray) -> None:
        found[kind] += 1
        take(self, kind, request_id, payload)

    monkeypatch.setattr(Session, "_take", counting)
    return found


def started(cable: Cable, group: str = "g") -> list[Range]:
    """Return what the broker believes to be started and not settled."""
    return [part for lease in cable.broker.consuming.leases_of(group) for part in lease.started]


async def test_acks_and_starts_of_one_iteration_are_one_frame(counted: Counter[int]) -> None:
    gate, end = asyncio.Event(), asyncio.Event()
    first: list[int] = []
    second: list[int] = []

    async with calling() as (client, cable, _), asyncio.TaskGroup() as tasks:

        async def member(name: str) -> None:
            async with client.consume("orders", group="g", member=name, credit=2) as consumer:
                deliveries = aiter(consumer)
                delivery = await anext(deliveries)
                first.append(delivery.offset)
                await gate.wait()
                delivery.ack_soon()
                delivery = await anext(deliveries)
                second.append(delivery.offset)
                await end.wait()
                await delivery.ack()

        await client.publish_many("orders", [b"x"] * 6)
        for name in MEMBERS:
            tasks.create_task(member(name))
        await until(lambda: len(first) == len(MEMBERS))
        await turns(100)
        counted.clear()
        gate.set()
        await until(lambda: len(second) == len(MEMBERS))
        await turns(100)
        assert counted[Kind.PROGRESS] == 1
        assert counted[Kind.ACK] == counted[Kind.STARTED] == 0
        assert sorted(started(cable)) == [(one, one + 1) for one in sorted(second)]
        end.set()


async def test_a_broker_that_does_not_know_it_gets_acks_and_starts(
    monkeypatch: pytest.MonkeyPatch, counted: Counter[int]
) -> None:
    welcome = links.Link.welcome.fget
    assert welcome is not None
    older = property(lambda link: msgspec.structs.replace(welcome(link), revision=1))
    monkeypatch.setattr(links.Link, "welcome", older)
    async with calling() as (client, _, _):
        await client.publish_many("orders", [b"x"] * 2)
        members = [
            aiter(client.consume("orders", group="g", member=name, credit=1))
            for name in MEMBERS[:2]
        ]
        deliveries = [await asyncio.wait_for(anext(one), PATIENCE_S) for one in members]
        await asyncio.gather(*(one.ack() for one in deliveries))
        assert counted[Kind.PROGRESS] == 0
        assert counted[Kind.ACK] == counted[Kind.STARTED] == 2
        for one in members:
            await one.aclose()


async def test_only_the_member_whose_lease_was_lost_is_told_so() -> None:
    async with calling() as (client, cable, _):
        await client.publish_many("orders", [b"x"] * 2)
        members = [
            aiter(client.consume("orders", group="g", member=name, credit=1))
            for name in MEMBERS[:2]
        ]
        ann, bob = [await asyncio.wait_for(anext(one), PATIENCE_S) for one in members]
        leases = cable.broker.consuming.leases_of("g")
        lease = leases.holder_of("orders", ann.offset)
        assert lease is not None
        leases.settle(lease.id, ann.offset, ann.offset + 1, member=lease.member)
        results = await asyncio.gather(ann.ack(), bob.ack(), return_exceptions=True)
        assert isinstance(results[0], LeaseLost)
        assert results[1] is None
        assert ann.is_lost
        assert not bob.is_lost
        for one in members:
            await one.aclose()


async def test_the_same_lease_number_in_two_groups_is_told_apart() -> None:
    async with calling() as (client, cable, _):
        await client.publish_many("orders", [b"x"])
        members = [aiter(client.consume("orders", group=g, credit=1)) for g in ("a", "b")]
        first, second = [await asyncio.wait_for(anext(one), PATIENCE_S) for one in members]
        assert first.batch is not None
        assert second.batch is not None
        # The numbers of one group reach those of the next after a million deliveries.
        (lease,) = cable.broker.consuming.leases_of("b")
        leases = cable.broker.consuming.leases_of("b")
        leases._drop([lease])
        lease.id = second.batch.lease = first.batch.lease
        leases.restore(lease)
        held = cable.broker.consuming.leases_of("a")
        (gone,) = held
        held.settle(gone.id, 0, 1, member=gone.member)
        results = await asyncio.gather(first.ack(), second.ack(), return_exceptions=True)
        assert isinstance(results[0], LeaseLost)
        assert results[1] is None
        for one in members:
            await one.aclose()


async def test_very_many_rows_become_several_frames(
    monkeypatch: pytest.MonkeyPatch, counted: Counter[int]
) -> None:
    monkeypatch.setattr(progress, "ROWS_MAX", 3)
    async with calling() as (client, _, _):
        await client.publish_many("orders", [b"x"] * 20)
        async with (
            client.consume("orders", group="g", member="ann", credit=10) as ann,
            client.consume("orders", group="g", member="bob", credit=10) as bob,
        ):
            deliveries = [*await _take(ann, 10), *await _take(bob, 10)]
            await turns(50)
            counted.clear()
            # Every other one: neighbours would be one row.
            await asyncio.gather(*(one.ack() for one in deliveries[::2]))
            await asyncio.gather(*(one.ack() for one in deliveries[1::2]))
            assert counted[Kind.PROGRESS] == 4
        assert (await client.group("g")).backlog == 0


async def test_calls_of_an_app_are_reported_before_they_begin() -> None:
    app = App()
    unreported: list[int] = []
    seen: list[int] = []

    async def take(delivery: Delivery) -> None:
        seen.append(delivery.offset)
        batch, rows = delivery.batch, client_link(delivery).progress._rows
        assert batch is not None
        is_reported = any(start <= delivery.offset < end for start, end, _ in batch.starts)
        is_waiting = any(
            kind == STARTS and lease == batch.lease and start <= delivery.offset < end
            for _, kind, lease, start, end in rows
        )
        if is_waiting or not is_reported:
            unreported.append(delivery.offset)
        await asyncio.sleep(0.001)

    app.consumer("orders", group="g", concurrency=5)(take)
    app.consumer("orders", group="h", concurrency=5)(take)
    async with calling() as (client, _, _), app.running(client) as run:
        await client.publish_many("orders", [b"x"] * 200)
        task = asyncio.ensure_future(run.run())
        await until(lambda: len(seen) == 400)
        run.stop()
        await task
    assert not unreported


async def _take(consumer: Consumer, count: int) -> list[Delivery]:
    taken: list[Delivery] = []
    while len(taken) < count:
        taken += await asyncio.wait_for(consumer.take(count - len(taken)), PATIENCE_S)
    return taken


def client_link(delivery: Delivery) -> links.Link:
    """Return the connection that a message came over."""
    assert delivery.batch is not None
    found: links.Link = delivery.batch._settles._link  # type: ignore[attr-defined]
    return found
