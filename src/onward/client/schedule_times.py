"""When a message is to fire, from all the ways to say it. No clock is looked at here: a
delay is sent as such, and counts from when the broker accepts it.

    delay      "45m"  timedelta(minutes=45)                                 from now on
    delay_ms   2_700_000                                                    the same
    at         a datetime with a zone  "2027-01-01T09:00Z"  1798794000000   a moment; past: at once

Text without a zone is UTC, as everywhere; a datetime without one is refused, because it means
another moment on each machine. Parts of a millisecond are rounded up: nothing is ever early. How
far ahead is too far is the broker's to say; here only what is no moment at all is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

from onward.durations import (
    DURATION_MS_MAX,
    Duration,
    duration_ms,
    either_ms,
    parse_duration_ms,
    whole_ms,
)
from onward.errors import InvalidRequest
from onward.message.relative import Relative
from onward.message.texts import UNIQUE_CHARACTERS_MAX, check_text

At = str | int | datetime
Delays = Duration | Sequence[Duration]
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


When = tuple[Duration | None, int | None, At | None, str | None, bool]
"""What `publish` was told about the time: delay, delay_ms, at, unique, replace."""
NOW: When = (None, None, None, None, False)


class Due(NamedTuple):
    """When a message is to fire, and under which business key it waits."""

    at_ms: int | Relative
    unique: str | None = None
    replace: bool = False


def due_of(when: When) -> Due:
    """Return when one message is to fire; a business key is for those that wait.

    >>> due_of(("1m", None, None, "order-7", False))
    Due(at_ms=Relative(in_ms=60000), unique='order-7', replace=False)
    """
    delay, delay_ms, at, unique, replace = when
    if delay is None and delay_ms is None and at is None:
        raise InvalidRequest("unique and replace are for messages that wait: say delay or at")
    check_unique(unique)
    check_replace(replace, has_unique=unique is not None)
    return Due(due_ms(delay, delay_ms, at), unique, replace)


def due_ms(delay: Duration | None, delay_ms: int | None, at: At | None) -> int | Relative:
    """Return the moment that is meant; a delay is for the broker to resolve.

    >>> due_ms("1m", None, None), due_ms(None, None, "1970-01-01T00:01Z")
    (Relative(in_ms=60000), 60000)
    """
    wait_ms = either_ms("delay", delay, delay_ms)
    if (wait_ms is None) == (at is None):
        raise InvalidRequest("say when: either delay or at")
    return moment_ms(at) if wait_ms is None else Relative(wait_ms)


def due_each(
    delay: Delays | None, delay_ms: int | Sequence[int] | None, at: Times | None, *, count: int
) -> tuple[str, list[int]]:
    """Return which column says when each message is due, from one time for all or one for each.

    >>> due_each(["1s", "2s"], None, None, count=2)
    ('delays_ms', [1000, 2000])
    >>> due_each(None, None, 7, count=2)
    ('due_at_ms', [7, 7])
    """
    if delay is not None and delay_ms is not None:
        raise InvalidRequest("delay is given twice: give either delay or delay_ms")
    if (delay is None and delay_ms is None) == (at is None):
        raise InvalidRequest("say when: either delay or at")
    if at is not None:
        moments_ms = _each("at", at, count, moment_ms, low=_MOMENT_MS_MIN, high=_MOMENT_MS_MAX)
        return "due_at_ms", moments_ms
    if delay_ms is not None:
        read = partial(whole_ms, name="delay_ms")
        waits_ms = _each("delay_ms", delay_ms, count, read, high=DURATION_MS_MAX)
    else:
        waits_ms = _each("delay", delay, count, lambda one: either_ms("delay", one, None))
    return "delays_ms", waits_ms


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


def ahead_ms(value: Ahead) -> int | Relative:
    """Return a moment, or how far from now one is.

    >>> ahead_ms("10m"), ahead_ms(7), ahead_ms("now")
    (Relative(in_ms=600000), 7, Relative(in_ms=0))
    """
    if isinstance(value, timedelta) or (isinstance(value, str) and _is_duration(value)):
        return Relative(duration_ms(value))
    return Relative(0) if value == "now" else moment_ms(value)


def step_for(span_ms: int) -> int:
    """Return the step that cuts a span of time into a number of bars that a person can read.

    >>> step_for(HOUR_MS) == 5 * MINUTE_MS, step_for(DAY_MS) == HOUR_MS
    (True, True)
    """
    return next((step for step in _STEPS_MS if span_ms <= BARS_WANTED * step), _STEPS_MS[-1])


def check_unique(unique: object) -> None:
    """Raise `InvalidRequest` for a business key that is no text, or that is too long."""
    if unique is not None:
        check_text("unique", unique, characters_max=UNIQUE_CHARACTERS_MAX)


def check_replace(replace: object, *, has_unique: bool) -> None:
    """Refuse to replace what has no business key."""
    if not isinstance(replace, bool):
        raise InvalidRequest(f"replace is True or False, not {replace!r}")
    if replace and not has_unique:
        raise InvalidRequest("replace takes the place of what waits under a key: say unique")


def _each(
    name: str, given: Any, count: int, read: Callable[[Any], Any], *, low: int = 0, high: int = 0
) -> list[int]:
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
