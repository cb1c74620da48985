import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onward.errors import InvalidRequest
from onward.schedule.calendar import (
    BARS_MAX,
    DAY_MS,
    HOUR_MS,
    MINUTE_MS,
    OTHERS,
    Bar,
    Calendar,
)
from onward.schedule.order import Rows

SETTINGS = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
NOW_MS = 1_800_000_000_000 - 1_800_000_000_000 % DAY_MS
YEAR_MS = 365 * DAY_MS

firings = st.lists(
    st.tuples(st.integers(0, 3 * DAY_MS).map(lambda at: NOW_MS + at), st.integers(0, 3)),
    max_size=60,
)


def rows_at(at_ms: list[int]) -> Rows:
    return Rows(at_ms, range(len(at_ms)))


def random_times(count: int, *, within_ms: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [NOW_MS + rng.randrange(within_ms) for _ in range(count)]


def total(bars: list[Bar]) -> int:
    return sum(bar.messages for bar in bars)


@SETTINGS
@given(firings, st.sampled_from([MINUTE_MS, 15 * MINUTE_MS, HOUR_MS, DAY_MS]), st.data())
def test_bars_count_what_fires_in_them(
    many: list[tuple[int, int]], step_ms: int, data: st.DataObject
) -> None:
    calendar = Calendar()
    calendar.add(rows_at([at for at, _ in many]), [topic for _, topic in many])
    topic = data.draw(st.none() | st.integers(0, 3))
    bars = calendar.histogram(NOW_MS, NOW_MS + 3 * DAY_MS + 1, step_ms=step_ms, topic=topic)
    expected = Counter(at - at % step_ms for at, one in many if topic in (None, one))
    assert {bar.start_ms: bar.messages for bar in bars if bar.messages} == expected
    assert [bar.start_ms for bar in bars] == list(range(NOW_MS, NOW_MS + 3 * DAY_MS + 1, step_ms))
    assert calendar.count == len(many)


@SETTINGS
@given(firings, firings)
def test_what_is_removed_counts_no_longer(
    many: list[tuple[int, int]], gone: list[tuple[int, int]]
) -> None:
    calendar, other = Calendar(), Calendar()
    for at_ms, topic in many + gone:
        calendar.add(rows_at([at_ms]), topic)
    calendar.remove(rows_at([at for at, _ in gone]), [topic for _, topic in gone])
    other.add(rows_at([at for at, _ in many]), [topic for _, topic in many])
    span = (NOW_MS, NOW_MS + 4 * DAY_MS)
    assert calendar.histogram(*span, step_ms=MINUTE_MS) == other.histogram(*span, step_ms=MINUTE_MS)
    assert calendar.by_topic(*span) == other.by_topic(*span)
    assert calendar.count == other.count


def test_a_row_that_was_never_counted_is_not_missed() -> None:
    calendar = Calendar()
    calendar.add(rows_at([NOW_MS, NOW_MS]), 1)
    calendar.remove(rows_at([NOW_MS] * 3), 1)
    calendar.remove(rows_at([NOW_MS]), 2)
    assert calendar.count == 0
    assert calendar.by_topic(NOW_MS, NOW_MS + DAY_MS) == {}


def test_topics_are_listed_from_the_most_to_the_fewest() -> None:
    calendar = Calendar()
    calendar.add(rows_at([NOW_MS + HOUR_MS] * 5), [1, 2, 2, 3, 3])
    calendar.add(rows_at([NOW_MS + 2 * HOUR_MS]), 3)
    assert list(calendar.by_topic(NOW_MS, NOW_MS + DAY_MS).items()) == [(3, 3), (2, 2), (1, 1)]
    assert calendar.by_topic(NOW_MS, NOW_MS + 2 * HOUR_MS) == {1: 1, 2: 2, 3: 2}


def test_counts_of_hours_count_where_their_hour_begins() -> None:
    calendar = Calendar()
    calendar.add_counts([(NOW_MS + HOUR_MS, 1, 10), (NOW_MS + HOUR_MS, 2, 5)])
    bars = calendar.histogram(NOW_MS, NOW_MS + 3 * HOUR_MS, step_ms=HOUR_MS)
    assert [bar.messages for bar in bars] == [0, 15, 0]


def test_many_rows_over_years_stay_within_the_limit_and_near_ones_stay_fine() -> None:
    calendar = Calendar(cells_max=4000, topics_max=10)
    for seed in range(10):
        times = random_times(3000, within_ms=10 * YEAR_MS, seed=seed)
        calendar.add(rows_at(times), [at % 3 for at in times])
        assert calendar._cells_total <= 4000
    assert calendar.count == 30_000
    bars = calendar.histogram(NOW_MS, NOW_MS + 10 * YEAR_MS, step_ms=DAY_MS)
    assert total(bars) + calendar.later() == 30_000
    near = [NOW_MS + minute * MINUTE_MS for minute in (0, 1, 5)]
    fresh = Calendar(cells_max=4000, topics_max=10)
    fresh.add(rows_at(near), 1)
    fresh.add(rows_at(random_times(20_000, within_ms=YEAR_MS)), 2)
    bars = fresh.histogram(NOW_MS, NOW_MS + 6 * MINUTE_MS, step_ms=MINUTE_MS, topic=1)
    assert [bar.messages for bar in bars] == [1, 1, 0, 0, 0, 1]


def test_what_was_made_coarser_is_still_found_when_it_is_removed() -> None:
    calendar = Calendar(cells_max=400, topics_max=10)
    times = random_times(5000, within_ms=2 * YEAR_MS)
    for start in range(0, 5000, 100):
        calendar.add(rows_at(times[start : start + 100]), 1)
    calendar.remove(rows_at(times[:4000]), 1)
    assert calendar.count == 1000
    calendar.remove(rows_at(times), 1)
    assert calendar.count == 0
    assert calendar._cells_total == 0


def test_a_time_beyond_all_times_is_later() -> None:
    calendar = Calendar()
    calendar.add(rows_at([2**63 - 1, NOW_MS]), [1, 2])
    assert (calendar.later(), calendar.later(1), calendar.later(2), calendar.later(9)) == (
        1,
        1,
        0,
        0,
    )
    assert calendar.by_topic(NOW_MS, 2**63) == {2: 1}


def test_a_coarse_cell_that_has_begun_is_seen_in_the_first_bar() -> None:
    calendar = Calendar(cells_max=8, topics_max=1)
    calendar.add(rows_at(random_times(500, within_ms=10 * DAY_MS)), 1)
    noon = NOW_MS + DAY_MS // 2
    seen = total(calendar.histogram(noon, NOW_MS + 11 * DAY_MS, step_ms=HOUR_MS))
    assert seen + calendar.later() == 500


def test_topics_beyond_the_limit_are_counted_together() -> None:
    calendar = Calendar(cells_max=40, topics_max=3)
    calendar.add(rows_at([NOW_MS] * 6), [1, 2, 3, 4, 5, 1])
    assert calendar.by_topic(NOW_MS, NOW_MS + DAY_MS) == {1: 2, OTHERS: 2, 2: 1, 3: 1}
    calendar.remove(rows_at([NOW_MS]), 5)
    assert calendar.by_topic(NOW_MS, NOW_MS + DAY_MS)[OTHERS] == 1


def test_many_topics_at_the_same_time_stay_within_the_limit() -> None:
    calendar = Calendar(cells_max=40, topics_max=10)
    for minute in range(100):
        calendar.add(rows_at([NOW_MS + minute * MINUTE_MS] * 20), range(20))
        assert calendar._cells_total <= 40
    assert calendar.count == 2000


@pytest.mark.parametrize("step_ms", [0, -MINUTE_MS, 1000, MINUTE_MS + 1])
def test_a_bar_that_is_not_whole_minutes_is_refused(step_ms: int) -> None:
    with pytest.raises(InvalidRequest, match="whole minutes"):
        Calendar().histogram(0, DAY_MS, step_ms=step_ms)


@pytest.mark.parametrize("end_ms", [-DAY_MS, (BARS_MAX + 1) * MINUTE_MS, 2**63])
def test_too_many_bars_and_a_span_that_ends_before_it_begins_are_refused(end_ms: int) -> None:
    with pytest.raises(InvalidRequest, match="the calendar shows 0 to 10000 bars"):
        Calendar().histogram(0, end_ms, step_ms=MINUTE_MS)
    assert Calendar().histogram(0, 0, step_ms=MINUTE_MS) == []
