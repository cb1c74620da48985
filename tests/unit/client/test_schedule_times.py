"""When a message is to fire: all the ways to say it, and what is refused."""

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from onward.client.schedule_times import (
    DAY_MS,
    HOUR_MS,
    MINUTE_MS,
    ahead_ms,
    due_each,
    due_ms,
    due_of,
    moment_ms,
    step_for,
)
from onward.client.scheduled import schedule_id
from onward.errors import InvalidRequest
from onward.message.relative import Relative


@pytest.mark.parametrize(
    ("delay", "milliseconds"),
    [
        ("45m", 45 * MINUTE_MS), ("0", 0), (0, 0),
        (timedelta(hours=2), 2 * HOUR_MS), (timedelta(0), 0), (timedelta(microseconds=1), 1),
        (timedelta(microseconds=1_001), 2), ("3650d", 3_650 * DAY_MS),
    ],
)  # fmt: skip
def test_a_delay_counts_from_now_and_is_never_shortened(delay: Any, milliseconds: int):
    assert due_ms(delay, None, None) == Relative(milliseconds)


@pytest.mark.parametrize(
    "delay",
    [
        -1, "-1s", timedelta(microseconds=-1_001), timedelta.max, timedelta.min, True, False, 1.5,
        float("nan"), float("inf"), "soon", "", 10**30, 2**63, b"1h", [], {}, object(),
    ],
)  # fmt: skip
def test_what_is_no_delay_is_refused_in_clear_words(delay: Any):
    with pytest.raises(InvalidRequest, match=r"delay|duration"):
        due_ms(delay, None, None)


@pytest.mark.parametrize(
    ("at", "milliseconds"),
    [
        (0, 0), (-5, -5), ("7", 7), ("1970-01-01T00:00:01Z", 1_000), ("1970-01-02", DAY_MS),
        ("1970-01-01T02:00+01:00", HOUR_MS), (datetime(1970, 1, 1, 0, 1, tzinfo=UTC), MINUTE_MS),
        (datetime(1970, 1, 1, 2, tzinfo=timezone(timedelta(hours=1))), HOUR_MS),
        (datetime(1970, 1, 1, 0, 0, 0, 1, tzinfo=UTC), 1),
        (datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC), 0),
        ("9999-12-31T23:59:59Z", 253_402_300_799_000),
    ],
)  # fmt: skip
def test_a_moment_is_a_datetime_text_or_milliseconds_and_never_early(at: Any, milliseconds: int):
    assert moment_ms(at) == milliseconds
    assert due_ms(None, None, at) == milliseconds


@pytest.mark.parametrize(
    "at",
    [
        datetime(2027, 1, 1), True, False, 1.5, float("nan"), 10**30, -(10**30), 2**63, "soon",  # noqa: DTZ001
        "", "10m", "2027-13-01", "9" * 5_000, b"2027-01-01", timedelta(1), [], object(),
    ],
)  # fmt: skip
def test_what_is_no_moment_is_refused_in_clear_words(at: Any):
    with pytest.raises(InvalidRequest, match=r"time"):
        due_ms(None, None, at)


def test_a_duration_given_as_a_moment_is_told_to_be_a_delay():
    with pytest.raises(InvalidRequest, match="say delay='10m'"):
        moment_ms("10m")


@pytest.mark.parametrize(("delay", "at"), [(None, None), ("1h", 7), (0, 0)])
def test_a_time_is_a_delay_or_a_moment_and_not_both(delay: Any, at: Any):
    with pytest.raises(InvalidRequest, match="either delay or at"):
        due_ms(delay, None, at)
    with pytest.raises(InvalidRequest, match="either delay or at"):
        due_each(delay, None, at, count=1)


def test_many_messages_have_one_time_or_one_each():
    assert due_each("1s", None, None, count=3) == ("delays_ms", [1_000] * 3)
    each = due_each(["1s", timedelta(seconds=2), 0], None, None, count=3)
    assert each == ("delays_ms", [1_000, 2_000, 0])
    assert due_each(None, 1_000, None, count=3) == ("delays_ms", [1_000] * 3)
    assert due_each(None, [1, 2, 3], None, count=3) == ("delays_ms", [1, 2, 3])
    assert due_each(None, None, range(3), count=3) == ("due_at_ms", [0, 1, 2])
    moments = due_each(None, None, [7, "1970-01-01T00:00:01Z"], count=2)
    assert moments == ("due_at_ms", [7, 1_000])


@pytest.mark.parametrize(
    ("delay", "at"),
    [
        (["1s"], None), ([], None), (None, [1, 2, 3]), ([1, -1], None), ([1, True], None),
        (None, [1, 2**70]), (None, [1, float("nan")]), (None, [1, None]), (None, object()),
    ],
)  # fmt: skip
def test_times_that_do_not_fit_the_messages_are_refused(delay: Any, at: Any):
    with pytest.raises(InvalidRequest):
        due_each(delay, None, at, count=2)


@pytest.mark.parametrize("delays", [60, ["1s", 60], [60.0, "1s"], "60", ["1s", "60"]])
def test_a_bare_number_is_no_delay_of_any_message(delays: Any):
    with pytest.raises(InvalidRequest, match='write delay="60s" or delay_ms=60'):
        due_each(delays, None, None, count=2)


@pytest.mark.parametrize("delays_ms", [[1, -1], [1, True], [1, 1.5], "1s", [1], ["1", "2"], -1])
def test_delays_in_milliseconds_are_whole_numbers(delays_ms: Any):
    with pytest.raises(InvalidRequest, match="delay_ms"):
        due_each(None, delays_ms, None, count=2)


def test_delays_are_given_once():
    with pytest.raises(InvalidRequest, match="give either delay or delay_ms"):
        due_each("1s", 1_000, None, count=2)
    with pytest.raises(InvalidRequest, match="give either delay or delay_ms"):
        due_ms("1s", 1_000, None)


@pytest.mark.parametrize(
    ("unique", "replace", "text"),
    [(7, False, "unique is text"), (None, True, "say unique"), ("a", 1, "True or False")],
)
def test_a_business_key_is_text_and_only_it_is_replaced(unique: Any, replace: Any, text: str):
    with pytest.raises(InvalidRequest, match=text):
        due_of(("1h", None, None, unique, replace))


def test_a_business_key_without_a_time_is_refused():
    with pytest.raises(InvalidRequest, match="say delay or at"):
        due_of((None, None, None, "order-7", False))


def test_looking_ahead_takes_a_moment_or_how_far_from_now():
    assert ahead_ms("2h") == Relative(2 * HOUR_MS)
    assert ahead_ms(timedelta(hours=2)) == Relative(2 * HOUR_MS)
    assert ahead_ms("now") == Relative(0)
    assert ahead_ms(7) == ahead_ms("7") == 7
    with pytest.raises(InvalidRequest):
        ahead_ms("whenever")


@pytest.mark.parametrize("span_ms", [1, MINUTE_MS, HOUR_MS, DAY_MS, 30 * DAY_MS, 3_650 * DAY_MS])
def test_a_calendar_has_as_many_bars_as_a_person_can_read(span_ms: int):
    assert 1 <= -(-span_ms // step_for(span_ms)) <= 48


@pytest.mark.parametrize(
    "given",
    [-1, True, 1.5, None, "", "x", "@schedule/", "orders/7", "@schedule/-1", 10**18, "9" * 19],
)
def test_what_is_no_schedule_id_is_refused(given: Any):
    with pytest.raises(InvalidRequest, match="schedule id"):
        schedule_id(given)
