"""What a question is about: times, topics, groups."""

from datetime import UTC, datetime, timedelta

import pytest

from onward.errors import InvalidRequest, UnknownGroup, UnknownTopic
from onward.pipeline.window import Window, choose_groups, choose_topics, window_of

HOUR_MS = 3_600_000


@pytest.mark.parametrize(
    "since", ["1h", HOUR_MS, timedelta(hours=1), datetime(1970, 1, 1, 1, tzinfo=UTC)]
)
def test_a_moment_can_be_said_in_every_usual_way(since: object):
    assert window_of(since, None, now_ms=2 * HOUR_MS) == Window(HOUR_MS, 2 * HOUR_MS)


def test_without_moments_a_window_reaches_from_the_beginning_to_now():
    window = window_of(None, None, now_ms=5)
    assert window == Window(None, 5)
    assert window.since is None
    assert window.until == datetime(1970, 1, 1, 0, 0, 0, 5_000, tzinfo=UTC)


def test_an_empty_window_is_refused():
    with pytest.raises(InvalidRequest, match="the window is empty"):
        window_of("1h", "2h", now_ms=9 * HOUR_MS)


@pytest.mark.parametrize("since", [True, 1.5, ["1h"]])
def test_what_is_no_moment_is_refused(since: object):
    with pytest.raises(InvalidRequest, match="a time is"):
        window_of(since, None, now_ms=1)


def test_topics_are_chosen_by_name_and_by_pattern():
    names = ["orders.eu", "orders", "refunds"]
    assert choose_topics(names, []) == ["orders", "orders.eu", "refunds"]
    assert choose_topics(names, ["orders*"]) == ["orders", "orders.eu"]
    assert choose_topics(names, ["refunds", "orders"]) == ["orders", "refunds"]


def test_a_topic_or_group_that_does_not_exist_is_named():
    with pytest.raises(UnknownTopic, match="topic 'nope' does not exist"):
        choose_topics(["orders"], ["nope"])
    with pytest.raises(UnknownGroup, match="group 'nope' does not exist"):
        choose_groups(["billing"], ["nope"])


def test_a_moment_between_two_milliseconds_is_the_later_one():
    """Since and until alike: nothing before it is at or after it."""
    half = datetime(2026, 11, 16, 10, 0, 0, 500, tzinfo=UTC)
    late = datetime(2026, 11, 16, 10, 0, 0, 1_500, tzinfo=UTC)
    found = window_of(half, late, now_ms=0)
    assert (found.since_ms % 1_000, found.until_ms % 1_000) == (1, 2)  # type: ignore[operator]


@pytest.mark.parametrize("moment", [10**15, "999999999999999", -1])
def test_a_moment_that_no_calendar_has_is_refused(moment: int | str):
    with pytest.raises(InvalidRequest, match="between the years 1970 and 9999"):
        window_of(moment, 2 * 10**15, now_ms=0)
