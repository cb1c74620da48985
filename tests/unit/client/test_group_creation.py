"""A group is visible when it is complete, whoever creates it, and how many at once."""

import asyncio
import contextlib
from pathlib import Path

import pytest

import onward
from onward.errors import AlreadyExists, Conflict, Forbidden, InvalidRequest, UnknownGroup


async def test_the_loser_of_a_race_sees_the_complete_group(tmp_path: Path) -> None:
    async with onward.connect(f"file:{tmp_path}") as mq:

        async def create(name: str) -> list[str]:
            with contextlib.suppress(AlreadyExists):
                await mq.create_group(name, ["orders", "bills"])
            return [share.topic for share in (await mq.group(name)).topics]

        for number in range(30):
            seen = await asyncio.gather(*[create(f"group-{number}") for _ in range(3)])
            assert seen == [["bills", "orders"]] * 3


async def test_a_group_is_complete_for_those_who_look_while_a_member_joins(tmp_path: Path) -> None:
    async with onward.connect(f"file:{tmp_path}") as mq:
        for number in range(20):
            name = f"group-{number}"
            async with mq.consume(["orders", "bills"], group=name) as consumer:
                joining = asyncio.ensure_future(consumer.join())
                seen = []
                while not joining.done():
                    seen += [one for one in await mq.groups() if one.group == name]
                    try:
                        seen.append(await mq.group(name))
                    except UnknownGroup:
                        continue
                await joining
            assert all(len(group.topics) == 2 for group in seen)


async def test_an_existing_group_is_fine_if_it_is_as_wanted() -> None:
    async with onward.connect("memory:") as mq:
        made = await mq.create_group("billing", "orders", lease="1m", exist_ok=True)
        again = await mq.create_group("billing", "orders", lease="1m", exist_ok=True)
        assert again == made
        with pytest.raises(AlreadyExists, match="different.*lease 1m, not 2m"):
            await mq.create_group("billing", "orders", lease="2m", exist_ok=True)
        with pytest.raises(AlreadyExists, match="does not consume 'bills'"):
            await mq.create_group("billing", ["orders", "bills"], exist_ok=True)
        with pytest.raises(AlreadyExists):
            await mq.create_group("billing", "orders")


async def test_a_creation_that_fails_hides_nothing() -> None:
    async with onward.connect("memory:") as mq:
        await mq.create_topic("shut", rule="write-only")
        for _ in range(2):
            with pytest.raises(Forbidden):
                await mq.create_group("billing", "shut")
        with pytest.raises(UnknownGroup):
            await mq.group("billing")
        await mq.create_group("billing", "orders")


async def test_a_group_that_expires_is_created_changed_and_consumed_as_one() -> None:
    async with onward.connect("memory:") as client:
        group = await client.create_group("control", "orders", expires_idle="1m")
        assert group.expires_idle_ms == 60_000
        async with client.consume("orders", group="own", expires_idle_ms=5_000):
            assert (await client.group("own")).expires_idle_ms == 5_000
        with pytest.raises(Conflict, match="has expires_idle 1m, not 2m"):
            async with client.consume("orders", group="control", expires_idle="2m"):
                pass
        assert (await client.change_group("control", expires_idle=0)).expires_idle_ms == 0
        with pytest.raises(InvalidRequest, match="expires_idle is 1s to 366d"):
            await client.create_group("hasty", "orders", expires_idle="10ms")
