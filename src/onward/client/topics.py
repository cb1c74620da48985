"""What a client knows of a topic, and the words it uses to ask for one."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import NamedTuple

import msgspec

from onward.durations import parse_duration_ms, parse_instant_ms
from onward.errors import InvalidRequest
from onward.protocol.payloads import Start

Duration = str | int | timedelta
Instant = str | int | datetime


class TopicDescription(msgspec.Struct, frozen=True, kw_only=True):
    """One topic, as its broker describes it.

    >>> topic = TopicDescription(topic="orders", number=1, state="active", next_offset=7)
    >>> topic.next_offset - topic.first_offset
    7
    """

    topic: str
    number: int
    state: str
    """`active`, `ending`, or how it ended: `deleted`, `expired`."""
    rule: str = ""
    first_offset: int = 0
    next_offset: int = 0
    messages: int = 0
    created_at_ms: int = 0
    expires_at_ms: int = 0
    ended_at_ms: int = 0
    message_bytes_max: int = 0
    retention_ms: int = 0
    retention_bytes: int = 0
    retention_group: str = ""
    """What this group has not finished is kept."""
    readers: int = 0


class TopicEnd(NamedTuple):
    """Where a topic begins and ends: the first offset it holds, and the one it gives next.

    >>> TopicEnd(3, 10).next_offset
    10
    """

    first_offset: int
    next_offset: int


class TopicEntry(NamedTuple):
    """Messages that are stored together: their offsets, their event id, time and size.

    >>> TopicEntry(100, 50, event_id=7, published_at_ms=0, bytes=12_000).end_offset
    150
    """

    base_offset: int
    messages: int
    event_id: int
    published_at_ms: int
    bytes: int

    @property
    def end_offset(self) -> int:
        """The offset after the last message."""
        return self.base_offset + self.messages


def duration_ms(value: Duration) -> int:
    """Return a duration in milliseconds; a number is milliseconds already.

    >>> duration_ms("10m"), duration_ms(timedelta(seconds=2)), duration_ms(5)
    (600000, 2000, 5)
    """
    if isinstance(value, timedelta):
        return round(value.total_seconds() * 1000)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InvalidRequest(
            f"a duration is text such as '500ms', a timedelta or whole milliseconds, not {value!r}"
        )
    return parse_duration_ms(value)


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


def read_start(
    start: str | int | datetime | timedelta, after_event_id: int | None, *, now_ms: int
) -> Start | str:
    """Return where a read begins, from all the ways to say it.

    >>> read_start("earliest", None, now_ms=0)
    'earliest'
    >>> read_start("10m", None, now_ms=700_000).time_ms
    100000
    >>> read_start(7, None, now_ms=0).offset
    7
    >>> read_start("1970-01-01T00:01:00Z", None, now_ms=0).time_ms
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
    if isinstance(start, datetime):
        return Start(time_ms=instant_ms(start))
    if isinstance(start, timedelta):
        return Start(time_ms=now_ms - duration_ms(start))
    return (
        start
        if start in ("earliest", "latest")
        else Start(time_ms=parse_instant_ms(start, now_ms=now_ms))
    )


def check_end(end: int | None) -> None:
    """Raise `InvalidRequest` when a read cannot end there.

    >>> check_end(-1)
    Traceback (most recent call last):
    onward.errors.InvalidRequest: a read ends before an offset, not -1
    """
    if end is not None and (type(end) is not int or end < 0):
        raise InvalidRequest(f"a read ends before an offset, not {end!r}")
