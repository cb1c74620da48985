"""kill -9 while messages are scheduled and while they fire; other clocks after a restart.

How long anything takes is not looked at: only what the topic holds in the end, and that nothing is
there before its time.
"""

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import onward
from onward.errors import OnwardError

from .conftest import MakeBroker
from .running import until

PATIENCE_S = 180.0
BATCH = 1_000
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


def now_ms() -> int:
    return time.time_ns() // 1_000_000


async def stored(mq: onward.Client, topic: str = "orders") -> list[onward.Message]:
    """Return all that a topic holds; nothing when nobody has fired to it yet."""
    try:
        return [message async for message in mq.read(topic)]
    except onward.errors.UnknownTopic:
        return []


async def until_stored(mq: onward.Client, count: int, topic: str = "orders") -> None:
    async def is_there() -> bool:
        found = await mq.topics()
        return any(one.topic == topic and one.next_offset >= count for one in found)

    await until(is_there, within_s=PATIENCE_S)


async def drained(mq: onward.Client) -> list[onward.Message]:
    """Wait until everything has fired; return what the topic holds.

    What was taken to be fired waits no longer, and may not be stored yet: so one more is scheduled,
    which fires after all of them.
    """

    async def is_empty() -> bool:
        return (await mq.status())["scheduled"] == 0

    await until(is_empty, within_s=PATIENCE_S)
    last = await mq.publish("orders", "last", delay=0)
    messages: list[onward.Message] = []

    async def is_there() -> bool:
        messages[:] = await stored(mq)
        return bool(messages) and messages[-1].schedule_id == last.schedule_id

    await until(is_there, within_s=PATIENCE_S)
    return messages[:-1]


def check_fired(messages: list[onward.Message], expected: set[str]) -> None:
    """Raise unless each is there once, none is early, and those of one time are in their order."""
    times = Counter(message.text for message in messages)
    assert [text for text, count in times.items() if count > 1] == []
    assert expected - times.keys() == set()
    for message in messages:
        assert message.due_at_ms is not None
        assert message.published_at_ms >= message.due_at_ms
        assert now_ms() >= message.due_at_ms
    assert len({message.schedule_id for message in messages}) == len(messages)


@dataclass
class Load:
    """Somebody who schedules without a pause."""

    acked: dict[str, int] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    is_over: bool = False

    async def run(self, mq: onward.Client, name: str, chance: random.Random) -> None:
        number = 0
        while not self.is_over:
            texts = [f"{name}:{number + n}" for n in range(200)]
            number += len(texts)
            at = [now_ms() + chance.choice((-1_000, 0, 50, 500, 2_000)) for _ in texts]
            try:
                receipt = await mq.publish_many("orders", texts, at=at)
            except OnwardError:
                self.unknown.update(texts)
            else:
                self.acked.update(zip(texts, receipt.ids, strict=True))


async def test_a_burst_that_is_killed_again_and_again_is_in_the_topic_once(
    make_broker: MakeBroker,
) -> None:
    broker = make_broker()
    await broker.start()
    count = 70 * BATCH  # more than wait in memory: most are in a run
    async with broker.connect(timeout="120s") as mq:
        due_at_ms = now_ms() + 5_000
        for first in range(0, count, BATCH):
            texts = [str(first + n) for n in range(BATCH)]
            await mq.publish_many("orders", texts, at=due_at_ms)
        for part in range(1, 5):
            await until_stored(mq, count * part // 6)
            await broker.restart()
        await until_stored(mq, count)
        messages = await stored(mq)
        check_fired(messages, {str(number) for number in range(count)})
        assert len(messages) == count
    await broker.stop()


async def test_what_was_acknowledged_while_the_broker_was_killed_fires_once_and_not_early(
    make_broker: MakeBroker,
) -> None:
    broker = make_broker(log_segment_bytes_max=1 << 20, log_checkpoint_rows=200)
    chance = random.Random(7)
    load = Load()
    await broker.start()
    async with broker.connect(timeout="120s") as one, broker.connect(timeout="120s") as two:
        tasks = [
            asyncio.ensure_future(load.run(one, "a", random.Random(1))),
            asyncio.ensure_future(load.run(two, "b", random.Random(2))),
        ]
        for _ in range(5):
            enough = len(load.acked) + chance.randint(200, 4_000)
            await until(lambda: len(load.acked) >= enough, within_s=PATIENCE_S)  # noqa: B023
            await broker.restart()
        load.is_over = True
        await asyncio.gather(*tasks)
        messages = await drained(one)
        check_fired(messages, set(load.acked))
        assert all(load.acked.get(m.text, m.schedule_id) == m.schedule_id for m in messages)
        assert {m.text for m in messages} <= load.acked.keys() | load.unknown
    await broker.stop()


async def test_cancels_are_exact_while_messages_fire_and_the_broker_is_killed(
    make_broker: MakeBroker,
) -> None:
    broker = make_broker()
    await broker.start()
    cancelled: set[int] = set()
    fired: set[int] = set()
    unknown: set[int] = set()
    async with broker.connect(timeout="120s") as mq:
        begin_ms = now_ms() + 1_000
        texts = [str(number) for number in range(6_000)]
        receipt = await mq.publish_many(
            "orders", texts, at=[begin_ms + n // 3 for n in range(6_000)]
        )
        for first in range(0, 6_000, 100):
            if first % 2_000 == 1_000:
                await broker.restart()
            ids = [receipt.ids[first + n] for n in range(0, 100, 2)]
            try:
                results = await mq.cancel_scheduled(ids)
            except OnwardError:
                unknown.update(ids)
                continue
            cancelled.update(one.id for one in results if one.state == "cancelled")
            fired.update(one.id for one in results if one.state == "fired")
        messages = await drained(mq)
        there = {message.schedule_id for message in messages}
        check_fired(messages, set())
        assert cancelled & there == set()
        assert fired <= there
        assert set(receipt.ids) - there == cancelled | (unknown - there)
    await broker.stop()


async def test_a_broker_with_many_that_wait_starts_again_and_knows_all_of_them(
    make_broker: MakeBroker,
) -> None:
    broker = make_broker()
    await broker.start()
    count = 140 * BATCH
    async with broker.connect(timeout="120s") as mq:
        far_ms = now_ms() + 300 * DAY_MS
        for first in range(0, count, BATCH):
            at = [far_ms + (first + n) * 7_919 % DAY_MS for n in range(BATCH)]
            await mq.publish_many("orders", [b"x" * 100] * BATCH, at=at)
        for restart in (broker.restart, broker.restart, broker.stop):
            await restart()
            if not broker.is_running:
                await broker.start()
            assert (await mq.status())["scheduled"] == count
        near = await mq.publish("orders", "near", delay="10ms", unique="k")
        await until_stored(mq, 1)
        (message,) = await stored(mq)
        assert (message.text, message.schedule_id) == ("near", near.schedule_id)
        results = await mq.cancel_scheduled([0, count // 2, count - 1, near, count + 9])
        assert [one.state for one in results] == [
            "cancelled", "cancelled", "cancelled", "fired", "not_found",
        ]  # fmt: skip
    await broker.stop()


# --- other clocks --------------------------------------------------------------------------------


# Not by its command, which stays between us and the broker.
FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)


@pytest.mark.skipif(FAKETIME is None, reason="needs the Debian package faketime")
async def test_at_each_start_exactly_what_is_due_by_the_clock_of_that_start_fires(
    make_broker: MakeBroker,
) -> None:
    # Retention would be right to drop what is a year old by such a clock.
    broker = make_broker(log_retention_ms=0)
    await broker.start()
    begun_ms = now_ms()
    delays = {"minutes": HOUR_MS // 2, "days": 300 * DAY_MS, "years": 500 * DAY_MS}
    async with broker.connect(timeout="120s") as mq:
        for text, delay_ms in delays.items():
            await mq.publish("orders", text, at=begun_ms + delay_ms)
    await broker.stop()
    for clock, expected in (
        ("-1h", []), ("+1h", ["minutes"]), ("-1h", ["minutes"]), ("+400d", ["minutes", "days"]),
        ("+0d", ["minutes", "days"]),
    ):  # fmt: skip
        faked = [f"LD_PRELOAD={FAKETIME}", f"FAKETIME={clock}", "FAKETIME_DONT_FAKE_MONOTONIC=1"]
        await broker.start(wrapper=["env", *faked])
        async with broker.connect(timeout="120s") as mq:
            await until_stored(mq, len(expected)) if expected else None
            messages = await stored(mq)
            assert [message.text for message in messages] == expected
            waiting = [one.id async for one in mq.list_scheduled()]
            assert waiting == list(range(len(expected), len(delays)))
            for message in messages:
                assert message.published_at_ms >= (message.due_at_ms or 0)
        await broker.stop()
