"""Steps that overlap: what is due while a commit is written joins the next one, in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

import onward
from onward.broker.broker import Broker
from onward.broker.commit import Commit, Done
from onward.broker.scheduling import STEP_PAUSE_S
from onward.errors import DiskFull
from onward.log.log import Write
from onward.message.batch import batches_of
from onward.message.entry import entry_heads
from onward.schedule.state import FIRED, ScheduleState

from .asking import until
from .speaking import open_broker
from .waiting import HOUR_MS, Schedule


class HeldCommit:
    """A disk that takes its time: each write is done when it is released, or refused."""

    in_flight_max = 1

    def __init__(self, commit: Commit) -> None:
        self._commit = commit
        self.durability_of = commit.durability_of
        self.is_held = False
        self.held: list[tuple[Callable[[], None], Done]] = []

    def append(self, write: Write, *, sync: bool, done: Done) -> None:
        def perform() -> None:
            self._commit.append(write, sync=sync, done=done)

        if self.is_held:
            self.held.append((perform, done))
        else:
            perform()

    def release(self, *, refuse: Exception | None = None) -> None:
        """Write what is held, or say that there is no space for it; hold nothing more."""
        self.is_held = False
        held, self.held = self.held, []
        for perform, done in held:
            if refuse is None:
                perform()
            else:
                done(refuse)

    def close(self) -> None:
        self._commit.close()


async def overlapping(topics: list[str]) -> tuple[Broker, Schedule, HeldCommit]:
    """Return a broker with one step being written, and two more takes for the next commit."""
    broker = await open_broker()
    schedule = await Schedule.of(broker)
    commit = HeldCommit(broker.publishing._commit_seam)
    broker.publishing._commit_seam = commit
    for delay_ms in (100, 200, 300):
        await schedule.add(*[delay_ms] * len(topics), topic=topics)
    await schedule.add(HOUR_MS)
    start = broker.publishing.inflight_bytes
    commit.is_held = True
    for _ in range(3):
        schedule.clock.advance(100)
        broker.scheduling.wake()
        before = broker.publishing.inflight_bytes
        await until(lambda before=before: broker.publishing.inflight_bytes > before)
    assert len(commit.held) == 1
    assert broker.publishing.inflight_bytes > start
    return broker, schedule, commit


def steps(broker: Broker, topic_name: str) -> list[int]:
    """Return the step number of each fired batch of a topic, read from its log."""
    topic = broker.catalogue.by_name[topic_name]
    span = broker.log.plan(topic.number, 0, bytes_max=1 << 20)
    assert span is not None
    entries = broker.log.read(span, wait=True) or b""
    return [
        header.sequence
        for entry in entry_heads(entries)
        for _, header in batches_of(
            entries, entry.body_position, entry.body_position + entry.body_bytes
        )
        if header.producer_id == FIRED
    ]


async def test_what_is_due_while_a_commit_is_written_joins_the_next_and_keeps_its_order() -> None:
    broker, schedule, commit = await overlapping(["orders", "others"])
    count = broker.publishing.commit_count
    commit.release()
    await schedule.settled()
    assert schedule.numbers() == [0, 2, 4]
    assert schedule.numbers("others") == [1, 3, 5]
    assert all(one.time_ms >= one.due_at_ms for one in schedule.fired())
    assert broker.publishing.commit_count == count + 1
    await broker.stop()


async def test_takes_that_share_a_commit_share_a_step_which_the_commit_before_has_not() -> None:
    broker, schedule, commit = await overlapping(["orders", "others"])
    commit.release()
    await schedule.settled()
    first, second, third = steps(broker, "orders")
    assert first < second == third
    assert steps(broker, "others") == [first, second, third]
    await broker.stop()


async def test_a_torn_commit_of_two_takes_leaves_the_other_topic_to_fire() -> None:
    state = ScheduleState()
    # Both takes of one topic are in the log; the power went before those of the other.
    state.fired("orders", step=1, at_ms=100, number=0, count=1)
    state.fired("orders", step=1, at_ms=200, number=2, count=1)
    assert state.has_fired("orders", 200, 2)
    assert not state.has_fired("others", 100, 1)
    assert not state.has_fired("others", 200, 3)


async def test_steps_behind_one_that_was_refused_wait_again_and_fire_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("onward.broker.scheduling.FAILED_PAUSE_S", 0.001)
    broker, schedule, commit = await overlapping(["orders", "others"])
    assert broker.status()["scheduled"] == 7
    commit.release(refuse=DiskFull("no space"))
    broker.gate.disk_is_full = False
    await schedule.settled()
    assert schedule.numbers() == [0, 2, 4]
    assert schedule.numbers("others") == [1, 3, 5]
    assert broker.status()["scheduled"] == 1
    await broker.stop()


async def test_a_decision_has_its_turn_while_steps_overlap() -> None:
    broker, schedule, commit = await overlapping(["orders"])
    cancelling = asyncio.create_task(schedule.cancel(3))
    await until(lambda: broker.scheduling.lock.is_wanted)
    late = broker.publishing.inflight_bytes
    await asyncio.sleep(0.05)
    assert broker.publishing.inflight_bytes == late  # nothing more is taken before it
    commit.release()
    assert await cancelling == ["cancelled"]
    await schedule.settled()
    assert schedule.numbers() == [0, 1, 2]
    await broker.stop()


async def test_messages_that_are_due_in_each_millisecond_fire_in_steps_of_several() -> None:
    async with onward.connect("memory:") as mq:
        start_ms = time.time_ns() // 1_000_000 + 300
        await mq.publish_many("orders", [b"x"] * 400, at=[start_ms + at for at in range(400)])
        entries = set()
        async for message in mq.read("orders", follow=True):
            assert message.due_at_ms is not None
            entries.add(message.event_id)
            if message.offset == 399:
                break
        assert len(entries) <= 150


async def test_a_single_message_does_not_wait_for_others() -> None:
    broker = await open_broker()
    schedule = await Schedule.of(broker)
    await schedule.add(100)
    assert broker.scheduling._pause_s() == 0.0
    schedule.clock.advance(100)
    broker.scheduling.wake()
    await until(lambda: broker.scheduling.fired_count == 1)
    assert 0.0 <= broker.scheduling._pause_s() <= STEP_PAUSE_S
    await broker.stop()
