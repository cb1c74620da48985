"""A client whose clock is wrong gets what it asked for: relative times are the broker's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from onward.client.client import Client
from onward.clock import SystemClock
from onward.errors import InvalidRequest
from onward.message.batch import decode_batch, encode_batch
from onward.message.relative import Relative

from .calling import Cable, SlowCommit, calling, turns

HOUR_MS = 3_600_000
WRONG = pytest.mark.parametrize("wrong_ms", [-2 * HOUR_MS, 2 * HOUR_MS])
NEAR_MS = 60_000
"""How far from the exact time counts as right: far below the error of the clock."""


class WrongClock(SystemClock):
    """A clock that is early or late."""

    def __init__(self, wrong_ms: int) -> None:
        self._wrong_ms = wrong_ms

    def now_ms(self) -> int:
        return super().now_ms() + self._wrong_ms


@asynccontextmanager
async def wrong_client(wrong_ms: int) -> AsyncIterator[tuple[Client, Cable, SlowCommit]]:
    async with calling(clock=WrongClock(wrong_ms)) as given:
        yield given


def in_ms(at_ms: int) -> Any:
    """Return how far a time is from now, to compare with another one."""
    return pytest.approx(at_ms - SystemClock().now_ms(), abs=NEAR_MS)


@WRONG
async def test_a_delay_counts_by_the_brokers_clock(wrong_ms: int) -> None:
    async with wrong_client(wrong_ms) as (client, _, _):
        receipt = await client.publish("orders", "x", delay="1h")
        assert in_ms(receipt.due_at_ms) == HOUR_MS
        found = await receipt.status()
        assert (found.state, found.at_ms) == ("waiting", receipt.due_at_ms)
        many = await client.publish_many("orders", ["a", "b"], delay=["2h", timedelta(hours=3)])
        times = [(await client.scheduled(number)).at_ms for number in many.ids]
        assert [
            in_ms(at_ms) == hours * HOUR_MS for hours, at_ms in zip((2, 3), times, strict=True)
        ] == [True] * 2
        assert [one.id async for one in client.list_scheduled()] == [0, 1, 2]


@WRONG
async def test_a_message_is_moved_by_the_brokers_clock(wrong_ms: int) -> None:
    async with wrong_client(wrong_ms) as (client, _, _):
        receipt = await client.publish("orders", "x", delay="5h", unique="order-7")
        moved = await receipt.reschedule(delay="1h")
        assert (moved.state, in_ms(receipt.due_at_ms)) == ("moved", HOUR_MS)
        replaced = await client.publish(
            "orders", "y", delay_ms=HOUR_MS, unique="order-7", replace=True
        )
        assert in_ms(replaced.due_at_ms) == HOUR_MS
        assert (await client.scheduled(unique="order-7")).at_ms == replaced.due_at_ms


@WRONG
async def test_what_waits_is_listed_by_the_brokers_clock(wrong_ms: int) -> None:
    async with wrong_client(wrong_ms) as (client, _, _):
        for hours in (1, 3, 5):
            await client.publish("orders", str(hours), delay=f"{hours}h")
        assert [one.id async for one in client.list_scheduled(end="2h")] == [0]
        assert [one.id async for one in client.list_scheduled(start="2h", end="4h")] == [1]
        assert [one.id async for one in client.list_scheduled(start="now")] == [0, 1, 2]


@WRONG
async def test_how_long_ago_is_by_the_brokers_clock(wrong_ms: int) -> None:
    async with wrong_client(wrong_ms) as (client, _, _):
        await client.publish_many("orders", ["a", "b"])
        for start in ("1h", timedelta(hours=1)):
            assert len([one async for one in client.read("orders", start=start)]) == 2
        await client.create_group("g", "orders", start="latest")
        assert await client.reset_group("g", to="1h") == 2
        await client.create_group("h", "orders", start="1h")
        group = await client.group("h")
        assert group.backlog == 2
        assert not isinstance(group.start, str)
        assert in_ms(group.start.time_ms) == -HOUR_MS  # type: ignore[arg-type]
        await client.skip("g", "orders", range(2))
        assert await client.replay("g", "orders", start="1h") == 2
        deliveries = await client.fetch("orders", group="h", n=2, wait="10s")
        assert [one.text for one in deliveries] == ["a", "b"]


async def test_messages_with_a_delay_and_with_a_time_share_a_batch() -> None:
    async with wrong_client(2 * HOUR_MS) as (client, _, _):
        at_ms = SystemClock().now_ms() + 7 * HOUR_MS
        futures = [
            client.publish_soon("orders", "a", delay="1h"),
            client.publish_soon("orders", "b", at=at_ms),
            client.publish_soon("others", "c", delay="3h", key="k"),
        ]
        receipts = [await future for future in futures]
        assert len({receipt.event_id for receipt in receipts}) == 1
        assert in_ms(receipts[0].due_at_ms) == HOUR_MS
        assert receipts[1].due_at_ms == at_ms
        assert in_ms(receipts[2].due_at_ms) == 3 * HOUR_MS
        for receipt in receipts:
            assert (await receipt.status()).at_ms == receipt.due_at_ms


@pytest.mark.parametrize("when", ["under way", "stored"])
async def test_a_repeat_keeps_the_first_due_time_and_its_receipt_says_it(when: str) -> None:
    async with wrong_client(-2 * HOUR_MS) as (client, cable, commit):
        await client.create_topic("orders")
        await client.publish("orders", "first", delay="9h")
        commit.is_holding = True
        future = client.publish_soon("orders", "x", delay="1h", key="k")
        await turns()
        if when == "stored":
            cable.pull()
            commit.release()
            await turns()
            cable.plug()
        else:
            cable.cut()
            while cable.dialled < 2:
                await turns()
            await turns()
            commit.release()
        receipt = await future
        found = [one async for one in client.list_scheduled(topic="orders")]
        assert (found[0].id, found[0].at_ms) == (1, receipt.due_at_ms)
        assert len(found) == 2
        assert in_ms(receipt.due_at_ms) == HOUR_MS


async def test_a_compressed_batch_with_delays_is_stored_with_its_due_times() -> None:
    async with wrong_client(2 * HOUR_MS) as (client, _, _):
        bodies = ["x" * 1_000] * 20
        await client.publish_many("orders", bodies, delay="1h", compression="zstd")
        [stored] = [one async for one in client.read("@schedule").batches()]
        assert stored.columns.due_at_ms is not None
        assert stored.columns.delays_ms is None
        assert stored.columns.header.flags
        assert in_ms(stored.columns.due_at_ms[0]) == HOUR_MS  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "columns",
    [
        {"delays_ms": [1, None]}, {"delays_ms": [1, 2], "due_at_ms": [None, 5]},
        {"delays_ms": [1, -1]}, {"delays_ms": [1, 2**62]}, {"due_at_ms": [1, None]},
    ],
)  # fmt: skip
async def test_each_scheduled_message_has_either_a_time_or_a_delay(columns: Any) -> None:
    async with calling() as (client, _, _):
        packed = encode_batch([b"a", b"b"], topics=["orders"] * 2, **columns)
        with pytest.raises(InvalidRequest):
            await client.publish_encoded("@schedule", packed, producer_id=9, sequence=1)
        assert [one async for one in client.list_scheduled()] == []


async def test_an_older_client_sends_times_and_gets_no_new_frame() -> None:
    async with calling() as (client, _, _):
        at_ms = SystemClock().now_ms() + HOUR_MS
        packed = encode_batch([b"a"], topics=["orders"], due_at_ms=[at_ms])
        await client.publish_encoded("@schedule", packed, producer_id=9, sequence=1)
        [stored] = [one async for one in client.read("@schedule").batches()]
        assert stored.columns.due_at_ms == [at_ms]


async def test_an_older_broker_is_told_apart_and_nothing_is_sent() -> None:
    async with calling() as (client, _, _):
        await client.publish("orders", "x")
        link = client._keeper().link
        assert link is not None
        older = msgspec.structs.replace(link.welcome, revision=0)
        link._connection.welcome = older
        for call in (
            lambda: client.publish("orders", "x", delay="1h"),
            lambda: client.publish_many("orders", ["x"], delay="1h"),
            lambda: client.reschedule(0, delay="1h"),
            lambda: client.reset_group("g", to="1h"),
        ):
            with pytest.raises(InvalidRequest, match="older than this client"):
                await call()
        with pytest.raises(InvalidRequest, match="older than this client"):
            client.read("orders", start="1h")
        with pytest.raises(InvalidRequest, match="older than this client"):
            await anext(client.list_scheduled(end="1h"))
        at = SystemClock().now_ms() + HOUR_MS
        assert (await client.publish("orders", "x", at=at)).schedule_id == 0
        assert len([one async for one in client.read("orders", start=0)]) == 1


def test_an_older_broker_would_refuse_what_is_relative() -> None:
    packed = encode_batch([b"a"], topics=["orders"], delays_ms=[5])
    assert decode_batch(packed, raw_bytes_max=1_000).due_at_ms is None
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(Relative(5)), type=int)
