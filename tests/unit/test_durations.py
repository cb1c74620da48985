"""Durations, sizes and instants: what people write is what they get."""

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.durations import (
    duration_ms,
    either_ms,
    format_duration,
    format_instant,
    format_size,
    parse_duration_ms,
    parse_instant_ms,
    parse_ms,
    parse_size_bytes,
)
from onward.errors import InvalidRequest

NOON_MS = 1_794_823_200_000  # 2026-11-16T10:00:00Z


@pytest.mark.parametrize(
    ("text", "duration_ms"),
    [
        ("500ms", 500),
        ("45s", 45_000),
        ("10m", 600_000),
        ("1h30m", 5_400_000),
        ("7d", 604_800_000),
        ("2w", 1_209_600_000),
        ("1d12h30m15s250ms", 131_415_250),
        ("0s", 0),
        ("0", 0),
    ],
)
def test_a_duration_is_read_as_people_write_it(text: str, duration_ms: int):
    assert parse_duration_ms(text) == duration_ms


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "ten", "10 m", "30m1h", "1h1h", "1.5h", "-5s", "5y", "m", "٣s"),
        *("9" * 5000, "9" * 15 + "s"),
    ],
)
def test_what_is_no_duration_is_refused_with_the_forms_that_are(text: str):
    with pytest.raises(InvalidRequest, match="1h30m"):
        parse_duration_ms(text)


@pytest.mark.parametrize(
    ("value", "readings"),
    [
        (60, 'delay="60s" or delay_ms=60'),
        ("60", 'delay="60s" or delay_ms=60'),
        (60.0, 'delay="60s" or delay_ms=60'),
        (1.5, 'delay="1s500ms" or delay_ms=2'),
        (10**12, f'delay="{10**12}s" or delay_ms={10**12}'),
    ],
)
def test_a_bare_number_is_refused_with_both_readings(value: Any, readings: str):
    with pytest.raises(InvalidRequest) as refused:
        either_ms("delay", value, None)
    assert str(refused.value) == f"delay={value!r} does not say its unit: write {readings}"
    with pytest.raises(InvalidRequest, match='write delay="[0-9sm]+" or delay="[0-9]+ms"'):
        duration_ms(value, "delay")


def test_a_bare_number_in_a_text_is_refused_with_both_readings():
    with pytest.raises(InvalidRequest, match="'60' does not say its unit: write 60s or 60ms"):
        parse_duration_ms("60")


def test_a_name_that_says_the_unit_takes_bare_numbers():
    assert [parse_ms(value) for value in ("500", 500, "500ms", 0)] == [500, 500, 500, 0]
    for wrong in (-1, True, 10**15, "-1", "9" * 16):
        with pytest.raises(InvalidRequest):
            parse_ms(wrong)


@pytest.mark.parametrize(
    "value", [-1, -0.5, True, False, float("nan"), float("inf"), 10**30, b"1h", [], {}, object()]
)
def test_what_is_no_duration_at_all_is_refused_by_its_name(value: Any):
    with pytest.raises(InvalidRequest, match="^wait is text such as '500ms'"):
        either_ms("wait", value, None)


def test_zero_needs_no_unit_and_a_timedelta_is_rounded_up():
    assert [either_ms("wait", zero, None) for zero in (0, "0", "0s", timedelta(0))] == [0] * 4
    assert either_ms("wait", timedelta(seconds=2), None) == 2_000
    assert either_ms("wait", timedelta(microseconds=1_001), None) == 2
    for wrong in (timedelta(microseconds=-1), timedelta.max, timedelta.min):
        with pytest.raises(InvalidRequest, match="wait is 0 to 1000 years"):
            either_ms("wait", wrong, None)


def test_a_duration_is_given_once():
    assert either_ms("wait", None, None, default="1s") == 1_000
    assert either_ms("wait", None, 0, default="1s") == 0
    assert either_ms("wait", 0, None, default="1s") == 0
    for value in ("1s", 0):
        with pytest.raises(InvalidRequest, match="give either wait or wait_ms"):
            either_ms("wait", value, 1_000)  # type: ignore[call-overload]  # a str or 0


@pytest.mark.parametrize("value_ms", [-1, 1.5, "5", True, 10**15, timedelta(1)])
def test_a_number_of_milliseconds_is_whole_and_not_negative(value_ms: Any):
    with pytest.raises(InvalidRequest, match="wait_ms is a whole number of milliseconds"):
        either_ms("wait", None, value_ms)


@given(st.integers(0, 30_000_000_000_000))
def test_a_written_duration_reads_back_as_the_same_number(duration_ms: int):
    assert parse_duration_ms(format_duration(duration_ms)) == duration_ms


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("64MiB", 64 << 20),
        ("1GiB", 1 << 30),
        ("2tib", 2 << 40),
        ("16 KiB", 16 << 10),
        ("10MB", 10_000_000),
        ("1kB", 1_000),
        ("512B", 512),
        ("4096", 4096),
        (4096, 4096),
    ],
)
def test_a_size_is_read_as_people_write_it(text: str | int, size_bytes: int):
    assert parse_size_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "big", "64M", "1.5GiB", "-1", "9" * 18 + "TiB", -1, True])
def test_what_is_no_size_is_refused_with_the_forms_that_are(text: str | int):
    with pytest.raises(InvalidRequest, match="GiB"):
        parse_size_bytes(text)


@given(st.integers(0, 2**63 - 1))
def test_a_written_size_reads_back_as_the_same_number(size_bytes: int):
    # Up to 18 digits: what is larger is written in a unit or not at all.
    if size_bytes < 10**18:
        assert parse_size_bytes(format_size(size_bytes)) == size_bytes


@pytest.mark.parametrize(
    ("text", "instant_ms"),
    [
        ("2026-11-16T10:00:00Z", NOON_MS),
        ("2026-11-16T11:00:00+01:00", NOON_MS),
        ("2026-11-16T10:00:00", NOON_MS),
        ("2026-11-16 10:00", NOON_MS),
        ("2026-11-16T10:00:00.250Z", NOON_MS + 250),
        ("2026-11-16", NOON_MS - 36_000_000),
        ("10m", NOON_MS - 600_000),
        ("now", NOON_MS),
        ("1794823200000", NOON_MS),
        ("100w", NOON_MS - 100 * 604_800_000),
        ("1960-01-01", 0),
    ],
)
def test_an_instant_is_read_as_people_write_it(text: str, instant_ms: int):
    assert parse_instant_ms(text, now_ms=NOON_MS) == instant_ms


@pytest.mark.parametrize(
    "text", ["", "yesterday", "2026-13-01", "10:00", "-10m", "0001-01-01T00:00:00+"]
)
def test_what_is_no_instant_is_refused_with_the_forms_that_are(text: str):
    with pytest.raises(InvalidRequest, match="ago"):
        parse_instant_ms(text, now_ms=NOON_MS)


@given(st.integers(0, 253_402_300_799_999))
def test_a_written_instant_reads_back_as_the_same_number(instant_ms: int):
    assert parse_instant_ms(format_instant(instant_ms), now_ms=0) == instant_ms


def test_an_instant_after_the_year_9999_is_written_as_a_number():
    assert format_instant(2**62) == str(2**62)
