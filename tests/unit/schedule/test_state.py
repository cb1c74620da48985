"""What is durable of the schedule: a fold, the same from a checkpoint and from the log."""

from __future__ import annotations

from random import Random

import pytest

from onward.errors import Corruption
from onward.schedule.order import BEFORE_ALL
from onward.schedule.recurring import Recurring
from onward.schedule.state import ScheduleState

DAILY = Recurring(name="daily", topic="t", body=b"", every_ms=86_400_000)


def test_a_step_that_is_not_known_to_be_whole_counts_for_its_own_topics_only() -> None:
    state = ScheduleState()
    state.fired("orders", step=1, at_ms=100, number=4, count=1)
    assert state.last == BEFORE_ALL
    assert state.has_fired("orders", 100, 4)
    assert not state.has_fired("orders", 100, 5)
    assert not state.has_fired("others", 50, 1)


def test_a_later_step_says_that_the_one_before_was_whole() -> None:
    state = ScheduleState()
    state.fired("orders", step=1, at_ms=100, number=4, count=1)
    state.fired("others", step=1, at_ms=90, number=2, count=1)
    state.fired("orders", step=2, at_ms=150, number=9, count=1)
    assert state.last == (100, 4)
    assert state.has_fired("never-fired-to", 100, 4)
    assert state.cursors == {"orders": (150, 9)}


def test_a_step_that_ended_moves_everything_up_to_it() -> None:
    state = ScheduleState()
    state.fired("orders", step=1, at_ms=100, number=4, count=1)
    state.finish_step((120, 7))
    assert (state.last, state.cursors) == ((120, 7), {})
    state.finish_step((110, 9))
    assert state.last == (120, 7)


def test_a_batch_that_is_folded_twice_changes_nothing() -> None:
    state = ScheduleState()
    state.schedule(count=10)
    for _ in range(2):
        state.fired("orders", step=3, at_ms=100, number=4, count=1)
        state.cancel([(5, 8)])
        state.replace([9])
    assert [state.is_gone(number) for number in range(4, 11)] == [
        False, True, True, True, False, True, False,
    ]  # fmt: skip
    assert state.cursor_of("orders") == (100, 4)
    assert state.waiting == 5


@pytest.mark.parametrize("seed", range(20))
def test_what_is_saved_and_loaded_at_any_moment_goes_on_as_if_it_was_not(seed: int) -> None:
    random = Random(seed)
    one, other = ScheduleState(), ScheduleState()
    for step in range(1, 40):
        moment = (step * 10, random.randrange(100))
        for topic in random.sample("abc", random.randint(1, 3)):
            for state in (one, other):
                state.fired(topic, step=step, at_ms=moment[0], number=moment[1], count=1)
        cancelled, replaced = random.randrange(200_000), random.randrange(200_000)
        for state in (one, other):
            state.cancel([(cancelled, cancelled + 3)])
            state.replace([replaced])
            state.last_runs["daily"] = step
            state.built_end, state.runs, state.serial = step, [f"schedule-{step}.run"], step
        one.change_recurring(DAILY)
        other.change_recurring(DAILY)
        if random.random() < 0.3:
            other = ScheduleState.load(other.save())
    assert one.save() == other.save()
    assert ScheduleState.load(one.save()).recurring == {"daily": DAILY}


def test_a_recurring_schedule_that_was_deleted_leaves_nothing() -> None:
    state = ScheduleState()
    state.change_recurring(DAILY)
    state.last_runs["daily"] = 5
    state.change_recurring(Recurring(name="daily", topic="t", body=b"", every_ms=5, deleted=True))
    assert (state.recurring, state.last_runs) == ({}, {})


@pytest.mark.parametrize("saved", [b"\xff", b"x" * 40, ScheduleState().save()[:-1]])
def test_a_saved_state_that_is_damaged_is_refused(saved: bytes) -> None:
    with pytest.raises(Corruption, match="the saved schedule cannot be read"):
        ScheduleState.load(saved)
