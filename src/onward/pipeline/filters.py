"""What Spark's filters say of topics, offsets and times: the less is read, the better.

    topic = 'orders'   topic in (...)            which topics       exact: Spark need not look again
    offset >= 7, < 9, = 8, in (...)              which offsets      exact, but for `in`
    published_at > '...'                         which times        Spark looks again
    everything else                              Spark's own work

All of them hold at once, so each makes the rest smaller; what contradicts itself leaves nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import UTC, datetime
from typing import NamedTuple

from pyspark.sql.datasource import (
    DataSourceReader,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

NEVER_NULL = frozenset({"topic", "offset", "event_id", "body", "published_at", "priority"})
OFFSET_MAX = 2**63 - 1


class Narrowing(NamedTuple):
    """What can match at all: topics (None is all), offsets and times in milliseconds, half-open.

    >>> Narrowing().first
    0
    """

    topics: frozenset[str] | None = None
    first: int = 0
    end: int = OFFSET_MAX
    from_ms: int | None = None
    to_ms: int | None = None

    @property
    def has_times(self) -> bool:
        """Tell whether a time is among what is asked for."""
        return self.from_ms is not None or self.to_ms is not None


def narrow(
    filters: Iterable[Filter], *, foreign: Collection[str] = ()
) -> tuple[Narrowing, list[Filter]]:
    """Return what can match, and the filters that Spark still has to apply.

    Columns that are `foreign` come from bodies: one that is named `offset` says nothing of places.

    >>> found, rest = narrow([GreaterThan(("offset",), 6), EqualTo(("key",), "a")])
    >>> found.first, len(rest)
    (7, 1)
    """
    found = Narrowing()
    rest: list[Filter] = []
    for one in filters:
        if _column(one) in foreign:
            rest.append(one)
            continue
        if isinstance(one, IsNotNull):
            if not (len(one.attribute) == 1 and one.attribute[0] in NEVER_NULL):
                rest.append(one)
            continue
        narrower = _apply(found, one)
        found = narrower or found
        if narrower is None or not _is_exact(one):
            rest.append(one)
    return found, rest


def _is_exact(one: Filter) -> bool:
    return _column(one) == "topic" or (_column(one) == "offset" and not isinstance(one, In))


def _column(one: Filter) -> str | None:
    attribute: tuple[str, ...] = getattr(one, "attribute", ())
    return attribute[0] if len(attribute) == 1 else None


def _apply(found: Narrowing, one: Filter) -> Narrowing | None:
    """Return the narrower one, or None when a filter says nothing that helps."""
    column, value = _column(one), getattr(one, "value", None)
    if column == "topic":
        return _by_topic(found, one, value)
    if column == "offset":
        return _by_offset(found, one, value)
    if column == "published_at" and isinstance(value, datetime):
        return _by_time(found, one, value)
    return None


def _by_topic(found: Narrowing, one: Filter, value: object) -> Narrowing | None:
    if isinstance(one, EqualTo | EqualNullSafe) and isinstance(value, str):
        names = frozenset({value})
    elif isinstance(one, In):
        names = frozenset(name for name in one.value if isinstance(name, str))
    else:
        return None
    return found._replace(topics=names if found.topics is None else found.topics & names)


def _by_offset(found: Narrowing, one: Filter, value: object) -> Narrowing | None:
    if isinstance(one, In):
        offsets = [offset for offset in one.value if type(offset) is int]
        first, end = (min(offsets), max(offsets) + 1) if offsets else (0, 0)
    elif type(value) is not int:
        return None
    elif isinstance(one, EqualTo | EqualNullSafe):
        first, end = value, value + 1
    elif isinstance(one, GreaterThan | GreaterThanOrEqual):
        first, end = value + isinstance(one, GreaterThan), OFFSET_MAX
    elif isinstance(one, LessThan | LessThanOrEqual):
        first, end = 0, value + isinstance(one, LessThanOrEqual)
    else:
        return None
    return found._replace(first=max(found.first, first), end=min(found.end, end))


def _by_time(found: Narrowing, one: Filter, value: datetime) -> Narrowing | None:
    """A little more than asked for is right: Spark looks again."""
    moment = value if value.tzinfo else value.replace(tzinfo=UTC)
    below_ms = int(moment.timestamp() * 1000) - 1
    above_ms = below_ms + 3
    from_ms, to_ms = found.from_ms, found.to_ms
    if isinstance(one, EqualTo | EqualNullSafe | GreaterThan | GreaterThanOrEqual):
        from_ms = max(below_ms, from_ms or 0)
    if isinstance(one, EqualTo | EqualNullSafe | LessThan | LessThanOrEqual):
        to_ms = above_ms if to_ms is None else min(above_ms, to_ms)
    return found._replace(from_ms=from_ms, to_ms=to_ms)


class AdaptivePush:
    """A `pushFilters` that works with Spark's push-down on, and does no harm when it is off.

    Spark refuses a reader that has its own `pushFilters` while `filterPushdown` is off, which is
    its default. It looks at `__func__` to tell: so this one shows that of Spark's own.
    """

    __func__ = staticmethod(DataSourceReader.pushFilters)

    def __init__(self, *, foreign: Collection[str] = ()) -> None:
        self.narrowing = Narrowing()
        self._foreign = foreign

    def __call__(self, filters: list[Filter]) -> list[Filter]:
        """Take what helps; return what Spark still has to apply."""
        self.narrowing, rest = narrow(filters, foreign=self._foreign)
        return rest
