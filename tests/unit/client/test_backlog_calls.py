"""What a program can ask of all that a group has to do, against a real broker in memory."""

from __future__ import annotations

import pytest

from onward.errors import UnknownGroup

from .calling import calling


async def test_a_purge_cancels_what_is_scheduled_only_when_it_is_asked_to() -> None:
    async with calling() as (client, _, _):
        await client.publish_many("orders", [str(n) for n in range(4)])
        await client.publish_many("orders", [str(n) for n in range(2_500)], delay="1h")
        await client.publish("other", "not of this group", delay="1h")
        await client.create_group("billing", "orders")
        assert await client.purge_ready("billing", scheduled=True, dry_run=True) == 2_504
        assert await client.purge_ready("billing") == 4
        assert await client.purge_ready("billing", "orders", scheduled=True) == 2_500
        assert [one.topic async for one in client.list_scheduled()] == ["other"]


async def test_a_purge_leaves_recurring_schedules_alone() -> None:
    async with calling() as (client, _, _):
        await client.create_group("billing", "orders")
        await client.set_recurring("nightly", "orders", b"x", every="1h")
        assert await client.purge_ready("billing", scheduled=True) == 0
        assert [one.topic async for one in client.list_scheduled()] == ["orders"]


async def test_a_purge_of_a_group_that_does_not_exist_cancels_nothing() -> None:
    async with calling() as (client, _, _):
        await client.publish("orders", "x", delay="1h")
        with pytest.raises(UnknownGroup):
            await client.purge_ready("nobody", "orders", scheduled=True)
        assert len([one async for one in client.list_scheduled()]) == 1


async def test_a_group_is_empty_when_nothing_is_left_now_or_later() -> None:
    async with calling() as (client, _, _):
        await client.create_group("billing", "orders")
        assert (await client.group_counts("billing")).is_empty
        receipt = await client.publish("orders", "x", delay="1h")
        counts = await client.group_counts("billing")
        assert (counts.scheduled, counts.is_exact, counts.is_empty) == (1, True, False)
        await receipt.cancel()
        assert (await client.group_counts("billing")).is_empty
        await client.publish("orders", "y")
        assert (await client.group_counts("billing")).ready == 1
