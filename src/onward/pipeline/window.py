"""What a question is about: a stretch of time, some topics, some groups.

    since   the first moment that counts; None is the beginning
    until   the first moment that does not count any more; None is now

Moments are said as everywhere: a datetime, an ISO text, how long ago ("1h"), or milliseconds since
1970. Topics are names or patterns (`orders.*`); none at all are all of them. A name that does not
exist is an error, a pattern that fits nothing is one too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from typing import NamedTuple

from onward.durations import duration_ms, parse_instant_ms
from onward.errors import InvalidRequest, UnknownGroup, UnknownTopic

Moment = str | int | datetime | timedelta

_START = datetime(1970, 1, 1, tzinfo=UTC)
_FAR_MS = 253_402_300_800_000
"""The year 10000: times from there on have no name."""


class Window(NamedTuple):
    """A stretch of time, half-open."""

    since_ms: int | None
    until_ms: int

    @property
    def since(self) -> datetime | None:
        """The first moment, or None for the beginning."""
        return None if self.since_ms is None else _moment(self.since_ms)

    @property
    def until(self) -> datetime:
        """The first moment that does not count."""
        return _moment(self.until_ms)


def window_of(since: Moment | None, until: Moment | None, *, now_ms: int) -> Window:
    """Return the stretch of time that two moments name.

    >>> window_of("10m", None, now_ms=3_600_000)
    Window(since_ms=3000000, until_ms=3600000)
    """
    since_ms = None if since is None else _moment_ms(since, now_ms=now_ms)
    until_ms = now_ms if until is None else _moment_ms(until, now_ms=now_ms)
    if until_ms > _FAR_MS or not 0 <= (since_ms or 0) < _FAR_MS:
        raise InvalidRequest("a window lies between the years 1970 and 9999")
    if since_ms is not None and since_ms >= until_ms:
        raise InvalidRequest("the window is empty: 'since' must lie before 'until'")
    return Window(since_ms, until_ms)


def choose_topics(names: Iterable[str], wanted: Sequence[str]) -> list[str]:
    """Return those topics that are wanted, by name or by pattern, in order.

    >>> choose_topics(["orders", "orders.eu", "refunds"], ["orders*"])
    ['orders', 'orders.eu']
    """
    return _choose(names, wanted, lambda one: UnknownTopic(f"topic {one!r} does not exist"))


def choose_groups(names: Iterable[str], wanted: Sequence[str]) -> list[str]:
    """Return those groups that are wanted, by name or by pattern, in order.

    >>> choose_groups(["audit", "billing"], [])
    ['audit', 'billing']
    """
    return _choose(names, wanted, lambda one: UnknownGroup(f"group {one!r} does not exist"))


def is_pattern(name: str) -> bool:
    """Tell whether a name stands for many.

    >>> is_pattern("orders"), is_pattern("orders.*")
    (False, True)
    """
    return any(mark in name for mark in "*?[")


def _choose(names: Iterable[str], wanted: Sequence[str], unknown: object) -> list[str]:
    assert callable(unknown)
    known = sorted(names)
    if not wanted:
        return known
    chosen: set[str] = set()
    for one in wanted:
        fitting = {name for name in known if name == one or fnmatchcase(name, one)}
        if not fitting:
            raise unknown(one)
        chosen |= fitting
    return sorted(chosen)


def first_ms(moment: datetime) -> int:
    """Return the first whole millisecond that is not before a moment; a naive one is local time.

    Messages have milliseconds: what is at or after a moment is at or after this one.

    >>> first_ms(datetime(1970, 1, 1, 0, 0, 0, 500, tzinfo=UTC))
    1
    """
    return -((_START - moment.astimezone(UTC)) // timedelta(milliseconds=1))


def _moment_ms(moment: Moment, *, now_ms: int) -> int:
    if isinstance(moment, bool) or not isinstance(moment, str | int | datetime | timedelta):
        raise InvalidRequest(f"a time is a datetime, a text or milliseconds, not {moment!r:.40}")
    if isinstance(moment, timedelta):
        return now_ms - duration_ms(moment)
    if isinstance(moment, str):
        return parse_instant_ms(moment, now_ms=now_ms)
    return first_ms(moment) if isinstance(moment, datetime) else moment


def _moment(at_ms: int) -> datetime:
    # Not fromtimestamp(at_ms / 1000): a float would lose microseconds in far years.
    return _START + timedelta(milliseconds=at_ms)
