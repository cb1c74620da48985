"""What a client knows of a topic, and the words it uses to ask for one."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Literal

from onward.durations import (
    Duration,
    duration_ms,
    either_ms,
    parse_ago_ms,
    parse_date_ms,
)
from onward.errors import InvalidRequest
from onward.message.message import Message
from onward.message.relative import Relative
from onward.protocol.payloads import Start

Instant = str | int | datetime
ReadFrom = str | int | datetime | timedelta


def timeout_seconds(option: str, value: Duration | None, value_ms: int | None) -> float | None:
    """Return a timeout in seconds, None when none is given; within 0 nothing could be answered.

    >>> timeout_seconds("timeout", "500ms", None)
    0.5
    """
    timeout_ms = either_ms(option, value, value_ms)
    if timeout_ms == 0:
        raise InvalidRequest(f"{option} is more than 0, for example '5s'")
    return None if timeout_ms is None else timeout_ms / 1000


def instant_ms(value: datetime | int) -> int:
    """Return an instant in milliseconds since 1970; a naive datetime is local time.

    >>> from datetime import UTC
    >>> instant_ms(datetime(2026, 1, 1, tzinfo=UTC))
    1767225600000
    """
    if isinstance(value, datetime):
        try:
            return round(value.timestamp() * 1000)
        except (ValueError, OverflowError, OSError):
            raise InvalidRequest(f"{value} is too far away to be a time") from None
    return value


def after_start(
    topic: str, after: Message | None, start: ReadFrom, after_event_id: int | None
) -> ReadFrom:
    """Return the offset behind the message that a read goes on after, or `start` without one.

    >>> after_start("orders", Message("orders", 7, b""), "earliest", None)
    8
    """
    if after is None:
        return start
    if not isinstance(after, Message):
        raise InvalidRequest(f"after is a message that was read, not {type(after).__name__}")
    if start != "earliest" or after_event_id is not None:
        raise InvalidRequest("a read begins at 'start', 'after' or 'after_event_id': give one")
    if after.topic != topic:
        raise InvalidRequest(f"after is a message of topic {after.topic!r}, not of {topic!r}")
    return after.offset + 1


def read_start(
    start: str | int | datetime | timedelta, after_event_id: int | None = None
) -> Literal["earliest", "latest"] | Start:
    """Return where a read begins, from all the ways to say it.

    >>> read_start("earliest")
    'earliest'
    >>> read_start("10m").time_ms
    Relative(in_ms=-600000)
    >>> read_start(7).offset
    7
    >>> read_start("1970-01-01T00:01:00Z").time_ms
    60000
    """
    if after_event_id is not None:
        if start != "earliest":
            raise InvalidRequest("a read begins at 'start' or after 'after_event_id', not both")
        return Start(event_id=after_event_id)
    if isinstance(start, bool) or not isinstance(start, str | int | datetime | timedelta):
        raise InvalidRequest(
            "a start is 'earliest', 'latest', an offset, a time, or how long ago ('10m')"
        )
    if isinstance(start, int):
        if start < 0:
            raise InvalidRequest(f"offset {start} is negative")
        return Start(offset=start)
    if start == "earliest":
        return "earliest"
    if start == "latest":
        return "latest"
    return Start(time_ms=past_ms(start, "start"))


def past_ms(value: str | datetime | timedelta, name: str) -> int | Relative:
    """Return a time; how long ago it is stays relative, for the broker to resolve.

    >>> past_ms("10m", "start"), past_ms("1970-01-02", "start")
    (Relative(in_ms=-600000), 86400000)
    """
    if isinstance(value, datetime):
        return instant_ms(value)
    ago_ms = duration_ms(value, name) if isinstance(value, timedelta) else parse_ago_ms(value)
    if ago_ms is not None:
        return Relative(-ago_ms)
    assert isinstance(value, str)
    return parse_date_ms(value)


def check_end(end: int | None) -> None:
    """Raise `InvalidRequest` when a read cannot end there.

    >>> check_end(-1)
    Traceback (most recent call last):
    onward.errors.InvalidRequest: a read ends before an offset, not -1
    """
    if end is not None and (type(end) is not int or end < 0):
        raise InvalidRequest(f"a read ends before an offset, not {end!r}")
