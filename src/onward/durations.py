"""Durations, sizes and instants, as people write them.

    duration   "45s"  "10m"  "1h30m"  "7d"  "500ms"  a timedelta  0       -> milliseconds
    size       "64MiB"  "1GiB"  "10MB" (10 million)  4096 (bytes)         -> bytes
    instant    "2026-11-16T10:00:00Z"  "10m" (ago)  "now"  1794823200000  -> ms since 1970

Each is read by a `parse_` function and written by a `format_` function whose text reads back as
the same number. An instant without a zone is UTC, so that it means the same on every machine.
What cannot be read raises InvalidRequest with the forms that can. No clock is looked at here.

A bare number other than 0 is no duration: half of the world reads it as seconds, the other half as
milliseconds. A call that takes a duration `wait` has a twin `wait_ms`, whose name says the unit;
`either_ms` reads the two.
"""

import re
from datetime import UTC, datetime, timedelta
from typing import Literal, overload

from onward.errors import InvalidRequest

Duration = str | timedelta | Literal[0]
"""Text with units, a timedelta, or 0. Never a bare number: it would not say its unit."""

_UNIT_MS = {"w": 604_800_000, "d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}
# From large to small and each at most once: "1h30m" is a duration, "30m1h" a mistake.
_DURATION = re.compile("".join(rf"(?:(\d{{1,15}}){unit})?" for unit in _UNIT_MS), re.ASCII)
DURATION_MS_MAX = 1_000 * 365 * _UNIT_MS["d"]

_UNIT_BYTES = {"b": 1} | {
    f"{prefix}{suffix}": step**power
    for suffix, step in (("ib", 1024), ("b", 1000))
    for power, prefix in enumerate("kmgt", start=1)
}
_SIZE = re.compile(r"(\d{1,18})\s*([a-z]*)", re.ASCII | re.IGNORECASE)
_SIZE_BYTES_MAX = 2**63 - 1

_NUMBER = re.compile(r"\d{1,15}", re.ASCII)
_DIGITS_SHOWN = 20
_MILLISECOND = timedelta(milliseconds=1)


def parse_duration_ms(text: str) -> int:
    """Read the text of a duration.

    >>> parse_duration_ms("1h30m"), parse_duration_ms("0")
    (5400000, 0)
    >>> parse_duration_ms("60")
    Traceback (most recent call last):
    onward.errors.InvalidRequest: '60' does not say its unit: write 60s or 60ms
    """
    if _NUMBER.fullmatch(text) and int(text):
        raise InvalidRequest(f"{text!r} does not say its unit: write {text}s or {text}ms")
    duration_ms = _read_duration(text)
    if duration_ms is None or duration_ms > DURATION_MS_MAX:
        raise InvalidRequest(f"{text[:40]!r} is not a duration: write 500ms, 45s, 10m, 1h30m or 7d")
    return duration_ms


def parse_ms(text: str | int) -> int:
    """Read a value whose name ends in `_ms`: there a number without a unit is milliseconds.

    >>> parse_ms("1h30m"), parse_ms("500"), parse_ms(500)
    (5400000, 500, 500)
    """
    if isinstance(text, int):
        return whole_ms(text, "a time")
    return int(text) if _NUMBER.fullmatch(text) else parse_duration_ms(text)


def duration_ms(value: Duration, name: str = "duration") -> int:
    """Return a duration in milliseconds; parts of a millisecond are rounded up.

    `name` is how the caller's parameter is called, for the error.

    >>> duration_ms("10m"), duration_ms(timedelta(seconds=2)), duration_ms(0)
    (600000, 2000, 0)
    """
    return _duration_ms(value, name, '{name}="{number}ms"')


@overload
def either_ms(
    name: str, value: Duration | None, value_ms: int | None, *, default: Duration
) -> int: ...
@overload
def either_ms(name: str, value: Duration | None, value_ms: int | None) -> int | None: ...


def either_ms(
    name: str, value: Duration | None, value_ms: int | None, *, default: Duration | None = None
) -> int | None:
    """Return the duration given as `value` or as its twin `value_ms`; else the default.

    >>> either_ms("wait", "1m", None), either_ms("wait", None, 250), either_ms("wait", None, None)
    (60000, 250, None)
    >>> either_ms("delay", 60, None)
    Traceback (most recent call last):
    onward.errors.InvalidRequest: delay=60 does not say its unit: write delay="60s" or delay_ms=60
    """
    if value_ms is None:
        given = default if value is None else value
        return None if given is None else _duration_ms(given, name, "{name}_ms={number}")
    if value is not None:
        raise InvalidRequest(f"{name} is given twice: give either {name} or {name}_ms")
    return whole_ms(value_ms, f"{name}_ms")


def whole_ms(value: object, name: str) -> int:
    """Return a whole number of milliseconds, checked.

    >>> whole_ms(250, "wait_ms")
    250
    """
    if type(value) is not int or not 0 <= value <= DURATION_MS_MAX:
        raise InvalidRequest(
            f"{name} is a whole number of milliseconds from 0 to 1000 years, not {value!r}"
        )
    return value


def format_duration(duration_ms: int) -> str:
    """Write a duration so that it reads back as the same number.

    >>> format_duration(5_400_000), format_duration(1_500), format_duration(0)
    ('1h30m', '1s500ms', '0s')
    """
    parts, rest_ms = [], duration_ms
    for unit, unit_ms in _UNIT_MS.items():
        # Weeks are read but not written: people say 14d.
        if unit != "w" and rest_ms >= unit_ms:
            parts.append(f"{rest_ms // unit_ms}{unit}")
            rest_ms %= unit_ms
    return "".join(parts) or "0s"


def parse_size_bytes(text: str | int) -> int:
    """Read a size.

    >>> parse_size_bytes("64MiB"), parse_size_bytes("1kB"), parse_size_bytes(4096)
    (67108864, 1000, 4096)
    """
    size_bytes = _read_size(text)
    if size_bytes is None or not 0 <= size_bytes <= _SIZE_BYTES_MAX:
        raise InvalidRequest(f"{text!r} is not a size: write 64KiB, 16MiB, 1GiB, 10MB or bytes")
    return size_bytes


def format_size(size_bytes: int) -> str:
    """Write a size exactly, in the largest unit that divides it.

    >>> format_size(67_108_864), format_size(1_000), format_size(0)
    ('64MiB', '1000', '0')
    """
    for unit, power in (("TiB", 4), ("GiB", 3), ("MiB", 2), ("KiB", 1)):
        count, rest = divmod(size_bytes, 1024**power)
        if count and not rest:
            return f"{count}{unit}"
    return str(size_bytes)


def parse_instant_ms(text: str, *, now_ms: int) -> int:
    """Read an instant; a duration is that long ago.

    >>> parse_instant_ms("1970-01-02T00:00:00Z", now_ms=0), parse_instant_ms("10m", now_ms=600_000)
    (86400000, 0)
    """
    if _NUMBER.fullmatch(text):
        return int(text)
    ago_ms = parse_ago_ms(text)
    instant_ms = _read_date(text) if ago_ms is None else now_ms - ago_ms
    if instant_ms is None:
        raise InvalidRequest(
            f"{text!r} is not a time: write 2026-11-16T10:00:00Z, 10m (ago), now "
            "or milliseconds since 1970"
        )
    return max(0, instant_ms)


def parse_date_ms(text: str) -> int:
    """Read an instant where a number is an offset: digits alone are refused.

    >>> parse_date_ms("1970-01-02T00:00:00Z")
    86400000
    """
    if text.isdecimal():
        number = int(text[:_DIGITS_SHOWN])
        raise InvalidRequest(
            f"{text[:_DIGITS_SHOWN]!r} is neither an offset nor a time: an offset is the number "
            f"{number}, a time is an instant ('2026-11-16T10:00:00Z') or has a unit ('{number}s' "
            "is that long ago)"
        )
    instant_ms = _read_date(text)
    if instant_ms is None:
        raise InvalidRequest(
            f"{text[:40]!r} is not a time: write 2026-11-16T10:00:00Z, 10m (ago) or now"
        )
    return max(0, instant_ms)


def parse_ago_ms(text: str) -> int | None:
    """Return how long ago an instant is, when its text says that; None when it says when.

    >>> parse_ago_ms("10m"), parse_ago_ms("now"), parse_ago_ms("1970-01-02"), parse_ago_ms("7")
    (600000, 0, None, None)
    """
    if _NUMBER.fullmatch(text):
        return None
    return 0 if text == "now" else _read_duration(text)


def format_instant(instant_ms: int) -> str:
    """Write an instant in UTC.

    >>> format_instant(86_400_123)
    '1970-01-02T00:00:00.123Z'
    """
    try:
        date = datetime.fromtimestamp(instant_ms // 1_000, tz=UTC)
    except (OverflowError, ValueError, OSError):
        # Later than the year 9999: still a number that reads back.
        return str(instant_ms)
    return f"{date:%Y-%m-%dT%H:%M:%S}.{instant_ms % 1_000:03}Z"


def _duration_ms(value: object, name: str, in_ms: str) -> int:
    """Return a duration in milliseconds; `in_ms` says how to write one, for the error."""
    if isinstance(value, str):
        if not _NUMBER.fullmatch(value) or not int(value):
            return parse_duration_ms(value)
        raise _no_unit(value, int(value), name, in_ms)
    if isinstance(value, timedelta):
        whole, rest = divmod(value, _MILLISECOND)
        if not 0 <= whole < DURATION_MS_MAX:
            raise InvalidRequest(f"{name} is 0 to 1000 years, not {value}")
        return whole + bool(rest)
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not value:
            return 0
        if 0 < value <= DURATION_MS_MAX:
            raise _no_unit(value, value, name, in_ms)
    raise InvalidRequest(f"{name} is text such as '500ms' or '45s', or a timedelta, not {value!r}")


def _no_unit(value: object, number: float, name: str, in_ms: str) -> InvalidRequest:
    seconds = format_duration(round(number * 1_000)) if number % 1 else f"{int(number)}s"
    readings = f'{name}="{seconds}" or {in_ms.format(name=name, number=max(1, round(number)))}'
    return InvalidRequest(f"{name}={value!r} does not say its unit: write {readings}")


def _read_duration(text: str) -> int | None:
    if _NUMBER.fullmatch(text):
        return int(text)
    match = _DURATION.fullmatch(text)
    if match is None or not text:
        return None
    counts = zip(match.groups(), _UNIT_MS.values(), strict=True)
    return sum(int(count) * unit_ms for count, unit_ms in counts if count)


def _read_size(text: str | int) -> int | None:
    if isinstance(text, int):
        return None if isinstance(text, bool) else text
    match = _SIZE.fullmatch(text)
    if match is None:
        return None
    unit_bytes = _UNIT_BYTES.get(match[2].lower() or "b")
    return None if unit_bytes is None else int(match[1]) * unit_bytes


def _read_date(text: str) -> int | None:
    try:
        date = datetime.fromisoformat(text)
    except ValueError:
        return None
    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)
    elapsed = date - datetime(1970, 1, 1, tzinfo=UTC)
    return elapsed.days * _UNIT_MS["d"] + elapsed.seconds * 1_000 + elapsed.microseconds // 1_000
