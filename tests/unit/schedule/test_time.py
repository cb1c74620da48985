"""The time that the schedule goes by: never ahead of what has really passed."""

from __future__ import annotations

from random import Random

import pytest

from onward.schedule.time import SteadyTime

HOUR_MS = 3_600_000
START_MS = 1_767_225_600_000


def steady(hold_ms_max: int = HOUR_MS) -> SteadyTime:
    return SteadyTime(wall_ms=START_MS, steady_ms=0, hold_ms_max=hold_ms_max)


def test_a_clock_that_runs_as_it_should_is_followed_to_the_millisecond() -> None:
    time = steady()
    for passed_ms in range(0, 100_000, 7):
        assert time.now_ms(START_MS + passed_ms, passed_ms) == START_MS + passed_ms
        assert time.jump_ms(START_MS + passed_ms, passed_ms) == 0


def test_a_clock_that_is_slewed_is_followed_without_a_word() -> None:
    time, wall_ms = steady(), START_MS
    for passed_ms in range(1_000, 1_000_000, 1_000):
        wall_ms += 1_010
        assert time.jump_ms(wall_ms, passed_ms) == 0
        assert time.now_ms(wall_ms, passed_ms) == wall_ms


def test_a_clock_that_goes_back_is_believed_at_once() -> None:
    time = steady()
    assert time.now_ms(START_MS - HOUR_MS, 10) == START_MS - HOUR_MS
    assert time.now_ms(START_MS - HOUR_MS + 500, 510) == START_MS - HOUR_MS + 500


@pytest.mark.parametrize("jump_ms", [5_000, HOUR_MS])
def test_a_jump_forward_is_believed_when_as_much_time_has_passed(jump_ms: int) -> None:
    time = steady()
    assert time.now_ms(START_MS + jump_ms, 0) == START_MS
    before_ms = jump_ms - 1
    assert time.now_ms(START_MS + jump_ms + before_ms, before_ms) == START_MS + before_ms
    assert time.now_ms(START_MS + 2 * jump_ms, jump_ms) == START_MS + 2 * jump_ms


def test_a_jump_of_years_is_believed_after_the_longest_hold() -> None:
    time, years_ms = steady(), 400 * 24 * HOUR_MS
    assert time.now_ms(START_MS + years_ms, 0) == START_MS
    assert time.now_ms(START_MS + years_ms + HOUR_MS - 1, HOUR_MS - 1) == START_MS + HOUR_MS - 1
    assert time.now_ms(START_MS + years_ms + HOUR_MS, HOUR_MS) == START_MS + years_ms + HOUR_MS


def test_a_second_jump_begins_a_hold_of_its_own() -> None:
    time = steady()
    time.now_ms(START_MS + 10_000, 0)
    assert time.now_ms(START_MS + 40_000, 9_000) == START_MS + 9_000
    assert time.now_ms(START_MS + 42_000, 11_000) == START_MS + 11_000


def test_each_jump_is_said_once_and_its_end_too() -> None:
    time = steady()
    assert time.jump_ms(START_MS + 60_000, 0) == 60_000
    assert time.jump_ms(START_MS + 60_500, 500) == 0
    assert time.jump_ms(START_MS + 1_000, 1_000) == 0
    assert time.jump_ms(START_MS - 60_000, 1_000) == -61_000


@pytest.mark.parametrize("seed", range(50))
def test_whatever_the_clock_does_the_time_is_never_ahead_of_it(seed: int) -> None:
    random = Random(seed)
    time, wall_ms, passed_ms = steady(), START_MS, 0
    for _ in range(300):
        step_ms = random.randrange(2_000)
        passed_ms += step_ms
        wall_ms += step_ms
        if random.random() < 0.1:
            wall_ms += random.choice((-HOUR_MS, -5_000, 5_000, HOUR_MS, 400 * 24 * HOUR_MS))
        assert time.now_ms(wall_ms, passed_ms) <= wall_ms


@pytest.mark.parametrize("seed", range(50))
def test_a_clock_that_is_put_right_within_the_hold_never_made_the_time_run_ahead(
    seed: int,
) -> None:
    random = Random(seed)
    time, passed_ms = steady(), 0
    for _ in range(100):
        wrong_ms = random.choice((60_000, HOUR_MS, 400 * 24 * HOUR_MS))
        for _ in range(10):
            passed_ms += random.randrange(1, 2_000)
            assert time.now_ms(START_MS + passed_ms + wrong_ms, passed_ms) <= START_MS + passed_ms
        passed_ms += 1
        assert time.now_ms(START_MS + passed_ms, passed_ms) == START_MS + passed_ms


def test_a_clock_that_went_back_and_is_put_right_is_believed_after_a_hold_at_the_latest() -> None:
    time = steady()
    time.now_ms(START_MS - HOUR_MS, 0)
    assert time.now_ms(START_MS + 1_000, 1_000) <= START_MS + 1_000
    assert time.now_ms(START_MS + HOUR_MS + 1_000, HOUR_MS + 1_000) == START_MS + HOUR_MS + 1_000
