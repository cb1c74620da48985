"""The arguments of calls about groups: how programs write them, and what is sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, TypeVar, cast, get_args

from onward.client.topics import read_start
from onward.delivery.filter import FilterWish
from onward.delivery.ranges import Range, ranges_of
from onward.delivery.record import GroupWish, Mode, StartAt
from onward.delivery.retry import POLICY_FORMS, RetryPolicy, parse_policy
from onward.durations import Duration, either_ms
from onward.errors import InvalidRequest
from onward.message.message import Message
from onward.message.texts import check_text, check_texts
from onward.protocol.operations.dead_letters import ListedDeadLetter
from onward.protocol.operations.group_moves import RANGES_MAX
from onward.protocol.payloads import Start

T = TypeVar("T")

Offsets = int | range | Iterable[int]
"""One offset, a range of them, or any number of them."""
GroupStart = str | int | datetime | timedelta
"""`earliest`, `latest`, an offset, a time, or how long ago."""


class DeadLetterDescription(ListedDeadLetter, frozen=True, kw_only=True):
    """A message that its group gave up on, and why.

    >>> DeadLetterDescription(topic="orders", offset=7, cause="no such order").id
    'orders/7'
    """

    message: Message | None = None
    """The message itself, where it was asked for and is still there."""


def as_ranges(offsets: Offsets) -> list[Range]:
    """Return offsets as ranges, in order.

    >>> as_ranges([7, 3, 4, 3]), as_ranges(5), as_ranges(range(100))
    ([(3, 5), (7, 8)], [(5, 6)], [(0, 100)])
    """
    if isinstance(offsets, int) and not isinstance(offsets, bool):
        offsets = range(offsets, offsets + 1)
    if isinstance(offsets, range) and offsets.step == 1:
        ranges = [(offsets.start, offsets.stop)] if offsets else []
    else:
        ranges = ranges_of(_checked(offsets))
    if not ranges:
        raise InvalidRequest("no offsets are given")
    if ranges[0][0] < 0:
        raise InvalidRequest(f"offset {ranges[0][0]} is negative")
    return ranges


def _checked(offsets: Offsets) -> list[int]:
    listed = list(offsets) if isinstance(offsets, Iterable) else [offsets]
    for one in listed:
        if type(one) is not int:
            raise InvalidRequest(f"an offset is a number, not {one!r}")
    return listed


def in_parts(ranges: list[Range]) -> list[list[Range]]:
    """Return ranges in parts that fit into one request each.

    >>> [len(part) for part in in_parts([(7, 8)] * 25_000)]
    [10000, 10000, 5000]
    """
    return [ranges[at : at + RANGES_MAX] for at in range(0, len(ranges), RANGES_MAX)]


def as_names(topics: str | Sequence[str]) -> list[str]:
    """Return one or several names as a list.

    >>> as_names("orders"), as_names(["orders", "refunds"])
    (['orders'], ['orders', 'refunds'])
    """
    names = [topics] if isinstance(topics, str) else _texts("topics", topics)
    if not names:
        raise InvalidRequest("a group needs at least one topic")
    return names


def start_of(start: GroupStart) -> str | StartAt:
    """Return where a group begins, from all the ways to say it.

    >>> start_of("10m").time_ms
    Relative(in_ms=-600000)
    """
    found = read_start(start)
    if isinstance(found, Start):
        return StartAt(offset=found.offset, time_ms=found.time_ms)
    return found


def make_wish(
    *,
    mode: Mode | None = None,
    start: GroupStart | None = None,
    retry: RetryPolicy | str | None = None,
    at_most_once: bool | None = None,
    lease: Duration | None = None,
    lease_ms: int | None = None,
    tags: str | Sequence[str] | None = None,
    all_tags: str | Sequence[str] | None = None,
    headers: Mapping[str, str] | None = None,
    priorities: bool | None = None,
    tenants: Mapping[str, float] | None = None,
    key_rate: float | None = None,
    key_concurrency: int | None = None,
    expires_idle: Duration | None = None,
    expires_idle_ms: int | None = None,
) -> GroupWish:
    """Return what is asked of a group, checked; what is None is left as it is.

    It is checked before it travels: what JSON cannot say, as NaN, would not arrive at all.

    >>> make_wish(lease="1m", tags="vip").lease_ms
    60000
    """
    if mode is not None and mode not in get_args(Mode):
        raise InvalidRequest(
            f"mode is shared, exclusive, ordered or broadcast, not {str(mode)[:40]!r}"
        )
    if isinstance(retry, str):
        retry = parse_policy(retry)
    elif retry is not None and not isinstance(retry, RetryPolicy):
        raise InvalidRequest(f"retry is a RetryPolicy or a text, not {retry!r:.40}: {POLICY_FORMS}")
    chosen = FilterWish(
        tags_any=None if tags is None else _tags("tags", tags),
        tags_all=None if all_tags is None else _tags("all_tags", all_tags),
        headers=None if headers is None else _headers(headers),
    )
    return GroupWish(
        mode=mode,
        start=None if start is None else cast(Any, start_of(start)),
        retry=retry,
        at_most_once=at_most_once,
        lease_ms=either_ms("lease", lease, lease_ms),
        filter=None if chosen == FilterWish() else chosen,
        priorities=priorities,
        tenants=None if tenants is None else _by_name("tenants", tenants, "weights"),
        key_rate=key_rate,
        key_concurrency=key_concurrency,
        expires_idle_ms=either_ms("expires_idle", expires_idle, expires_idle_ms),
    ).check()


def _tags(option: str, tags: str | Sequence[str]) -> tuple[str, ...]:
    listed = tags.split(",") if isinstance(tags, str) else _texts(option, tags)
    check_texts(option, listed)
    return tuple(listed)


def _texts(option: str, given: Sequence[str]) -> list[str]:
    """Return texts as a list; anything else has no place in it."""
    if not isinstance(given, Iterable):
        raise InvalidRequest(f"{option} is a text or several, not {given!r:.40}")
    listed = list(given)
    for one in listed:
        if not isinstance(one, str):
            raise InvalidRequest(f"{option} is a text or several: {one!r:.40} is none")
    return listed


def _headers(headers: Mapping[str, str]) -> dict[str, str]:
    named = _by_name("headers", headers, "texts")
    for name, value in named.items():
        for one in (name, value):
            if not isinstance(one, str):
                # A message's header may be bytes: the text that they are in UTF-8 finds it.
                raise InvalidRequest(
                    f"a filter compares headers as text: {name!r:.40} has {type(one).__name__}"
                )
            check_text("headers", one)
    return named


def _by_name(option: str, given: Mapping[str, T], what: str) -> dict[str, T]:
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"{option} is a dict of {what} by name, not {given!r:.40}")
    names: list[object] = list(given)
    check_texts(option, [name for name in names if isinstance(name, str)])
    return dict(given)
