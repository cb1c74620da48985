"""When a message is to fire, from all the ways to say it. No clock is looked at here.

    delay   "45m"  timedelta(minutes=45)  2_700_000 (milliseconds)      from now on
    at      a datetime with a zone  "2027-01-01T09:00Z"  1798794000000   a moment; past: at once

Text without a zone is UTC, as everywhere; a datetime without one is refused, because it means
another moment on each machine. Parts of a millisecond are rounded up: nothing is ever early. How
far ahead is too far is the broker's to say; here only what is no moment at all is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from onward.durations import parse_duration_ms
from onward.errors import InvalidRequest

Delay = str | int | timedelta
At = str | int | datetime
Delays = Delay | Sequence[Delay]
Times = At | Sequence[At]
Ahead = str | int | datetime | timedelta

MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS
_STEPS_MS = (
    *(1_000, 10_000, MINUTE_MS, 5 * MINUTE_MS, 15 * MINUTE_MS),
    *(HOUR_MS, 6 * HOUR_MS, DAY_MS, 7 * DAY_MS, 30 * DAY_MS, 365 * DAY_MS),
)
BARS_WANTED = 48

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
_MOMENT_MS_MIN = -62_135_596_800_000  # the years that a calendar can name: 1 to 9999
_MOMENT_MS_MAX = 253_402_300_799_999
_DELAY_MS_MAX = 1_000 * 365 * DAY_MS


When = tuple[Delay | None, At | None, str | None, bool]
"""What `publish` was told about the time: delay, at, unique, replace."""
NOW: When = (None, None, None, False)


class Due(NamedTuple):
    """When a message is to fire, and under which business key it waits."""

    at_ms: int
    unique: str | None = None
    replace: bool = False


def due_of(
    delay: Delay | None, at: At | None, unique: str | None, *, replace: bool, now_ms: int
) -> Due:
    """Return when one message is to fire; a business key is for those that wait.

    >>> due_of("1m", None, "order-7", replace=False, now_ms=5)
    Due(at_ms=60005, unique='order-7', replace=False)
    """
    if delay is None and at is None:
        raise InvalidRequest("unique and replace are for messages that wait: say delay or at")
    check_unique(unique)
    check_replace(replace, has_unique=unique is not None)
    return Due(due_ms(delay, at, now_ms=now_ms), unique, replace)


def due_ms(delay: Delay | None, at: At | None, *, now_ms: int) -> int:
    """Return the moment that a delay or a time means.

    >>> due_ms("1m", None, now_ms=5), due_ms(None, "1970-01-01T00:01Z", now_ms=5)
    (60005, 60000)
    """
    if (delay is None) == (at is None):
        raise InvalidRequest("say when: either delay or at")
    return moment_ms(at) if delay is None else now_ms + delay_ms(delay)


def due_each(delay: Delays | None, at: Times | None, *, count: int, now_ms: int) -> list[int]:
    """Return a moment for each message, from one for all or one for each.

    >>> due_each(["1s", "2s"], None, count=2, now_ms=0), due_each(None, 7, count=2, now_ms=0)
    ([1000, 2000], [7, 7])
    """
    if (delay is None) == (at is None):
        raise InvalidRequest("say when: either delay or at")
    if delay is None:
        return _each("at", at, count, moment_ms, low=_MOMENT_MS_MIN, high=_MOMENT_MS_MAX)
    delays = _each("delay", delay, count, delay_ms, low=0, high=_DELAY_MS_MAX)
    return [now_ms + one for one in delays]


def delay_ms(delay: object) -> int:
    """Return a delay in milliseconds.

    >>> delay_ms("45m"), delay_ms(timedelta(microseconds=1)), delay_ms(0)
    (2700000, 1, 0)
    """
    if isinstance(delay, timedelta):
        whole, rest = divmod(delay, _MILLISECOND)
        if not 0 <= whole < _DELAY_MS_MAX:
            raise InvalidRequest(f"a delay is 0 to 1000 years, not {delay}")
        return whole + bool(rest)
    if isinstance(delay, bool) or not isinstance(delay, str | int):
        raise InvalidRequest(
            f"a delay is text such as '45m', a timedelta or whole milliseconds, not {delay!r}"
        )
    return parse_duration_ms(delay)


def moment_ms(at: object) -> int:
    """Return a moment in milliseconds since 1970.

    >>> moment_ms("1970-01-02"), moment_ms(datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)), moment_ms(7)
    (86400000, 1000, 7)
    """
    if isinstance(at, str):
        return _read_moment(at)
    if isinstance(at, datetime):
        if at.utcoffset() is None:
            raise InvalidRequest(f"{at} has no time zone: say which, as datetime(..., tzinfo=UTC)")
        whole, rest = divmod(at - _EPOCH, _MILLISECOND)
        return whole + bool(rest)
    if isinstance(at, bool) or not isinstance(at, int):
        raise InvalidRequest(
            "a time is a datetime, text such as '2027-01-01T09:00Z' or whole milliseconds "
            f"since 1970, not {at!r}"
        )
    if not _MOMENT_MS_MIN <= at <= _MOMENT_MS_MAX:
        raise InvalidRequest(f"{at} is no time in milliseconds since 1970: no year has it")
    return at


def ahead_ms(value: Ahead, *, now_ms: int) -> int:
    """Return a moment, or how far from now one is.

    >>> ahead_ms("10m", now_ms=5), ahead_ms(7, now_ms=5), ahead_ms("now", now_ms=5)
    (600005, 7, 5)
    """
    if isinstance(value, timedelta) or (isinstance(value, str) and _is_duration(value)):
        return now_ms + delay_ms(value)
    return now_ms if value == "now" else moment_ms(value)


def step_for(span_ms: int) -> int:
    """Return the step that cuts a span of time into a number of bars that a person can read.

    >>> step_for(HOUR_MS) == 5 * MINUTE_MS, step_for(DAY_MS) == HOUR_MS
    (True, True)
    """
    return next((step for step in _STEPS_MS if span_ms <= BARS_WANTED * step), _STEPS_MS[-1])


def check_unique(unique: object) -> None:
    """Refuse what is no business key; its length and its characters are the broker's to judge."""
    if unique is not None and not isinstance(unique, str):
        raise InvalidRequest(f"unique is text, not {type(unique).__name__}")


def check_replace(replace: object, *, has_unique: bool) -> None:
    """Refuse to replace what has no business key."""
    if not isinstance(replace, bool):
        raise InvalidRequest(f"replace is True or False, not {replace!r}")
    if replace and not has_unique:
        raise InvalidRequest("replace takes the place of what waits under a key: say unique")


def _each(name: str, given: Any, count: int, read: Any, *, low: int, high: int) -> list[int]:
    if isinstance(given, str | int | float | datetime | timedelta):
        return [read(given)] * count
    if not isinstance(given, Iterable):
        return [read(given)]
    values = list(given)
    if len(values) != count:
        raise InvalidRequest(f"{name} has {len(values)} values for {count} bodies")
    # Many whole numbers are looked at together: a batch may have a hundred thousand.
    if set(map(type, values)) == {int} and low <= min(values) and max(values) <= high:
        return values
    return [read(value) for value in values]


def _read_moment(text: str) -> int:
    if text.isascii() and text.isdecimal():
        return moment_ms(int(text[:30]))
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        hint = f": say delay={text!r}" if _is_duration(text) else ""
        raise InvalidRequest(f"{text!r} is not a time such as 2027-01-01T09:00Z{hint}") from None
    return moment_ms(moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC))


def _is_duration(text: str) -> bool:
    if text.isdecimal():
        return False
    try:
        parse_duration_ms(text)
    except InvalidRequest:
        return False
    return True
