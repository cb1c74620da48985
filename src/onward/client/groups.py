"""What a client knows of a group, and the words it uses to ask for one.

    GroupDescription ─┬─ topics:    ShareDescription     how far the group is with each of them
                      ├─ members:   MemberDescription    who is there now, and how much they do
                      └─ positions: PositionDescription  how far each member of a broadcast is
    DeadLetterDescription                                one message that the group gave up on

They are what the broker replied, and never change; ask again for newer ones. A field that a later
broker adds is ignored here, one that an older broker lacks has its default.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal, TypeVar, cast, get_args

import msgspec

from onward.client.topics import read_start
from onward.delivery.filter import Filter, FilterWish
from onward.delivery.ranges import Range, ranges_of
from onward.delivery.record import GroupWish, Mode, StartAt
from onward.delivery.retry import POLICY_FORMS, RetryPolicy, parse_policy
from onward.durations import Duration, either_ms
from onward.errors import InvalidRequest
from onward.message.message import Message
from onward.message.texts import check_text, check_texts
from onward.protocol.payloads import Start

T = TypeVar("T")

Offsets = int | range | Iterable[int]
"""One offset, a range of them, or any number of them."""
GroupStart = str | int | datetime | timedelta
"""`earliest`, `latest`, an offset, a time, or how long ago."""


class ShareDescription(msgspec.Struct, frozen=True, kw_only=True):
    """How far a group is with one topic.

    >>> ShareDescription(topic="orders", cursor=7, end=10, backlog=3).backlog
    3
    """

    topic: str
    cursor: int = 0
    """Everything below is finished."""
    end: int = 0
    """The topic's next offset."""
    backlog: int = 0
    """Messages that are not finished."""
    oldest_at_ms: int = 0
    """When the oldest of them was published; 0 when there is none."""
    ready: int = 0
    waiting: int = 0
    """Retries that are not due yet."""
    next_due_ms: int = 0
    """When the first of them is due; 0 when none waits."""
    leased: int = 0
    reserved: int = 0
    """Kept for members that may re-claim them: the broker has just been restarted."""
    dead: int = 0
    expiring: int = 0
    """Messages that nobody was given yet and that retention may drop soon."""
    expires_at_ms: int = 0
    """From when on it may drop the oldest of them; 0 when there is none, or the size decides."""
    dropped: int = 0
    """Messages that retention dropped before they were done, since the broker started."""


class MemberDescription(msgspec.Struct, frozen=True, kw_only=True):
    """One member of a group.

    >>> MemberDescription(member="ann", state="active", leased=3).state
    'active'
    """

    member: str
    client: str = ""
    host: str = ""
    pid: int = 0
    function: str = ""
    """Which function of an App it works for; empty where there is none."""
    state: str = ""
    """`active` or `standby`."""
    credit: int = 0
    leased: int = 0
    delivered: int = 0
    acked: int = 0
    retried: int = 0
    expired: int = 0
    """Deliveries whose lease ran out: it took them and did not answer in time."""
    since_ms: int = 0
    rate: float = 0.0
    """Messages acked per second, since it joined."""


class PositionDescription(msgspec.Struct, frozen=True, kw_only=True):
    """How far one member of a broadcast is with one topic; it may be away.

    >>> PositionDescription(member="north", topic="prices", offset=7, end=10, backlog=3).is_known
    True
    """

    member: str
    topic: str
    offset: int | None = None
    """Everything below is done; None when only the member knows: it keeps that in a file, or has
    no name."""
    end: int = 0
    """The topic's next offset."""
    backlog: int | None = None
    """Messages that it has not done, before the filter; None when that is not known."""
    oldest_at_ms: int = 0
    """When the oldest of them was published; 0 when there is none, or that is not known: it is
    told of the 1,000 places that are farthest behind."""
    connected: bool = False
    """Whether the member is there now."""

    @property
    def is_known(self) -> bool:
        """Tell whether the broker knows where the member is."""
        return self.offset is not None


class GroupDescription(msgspec.Struct, frozen=True, kw_only=True):
    """One group, as its broker describes it.

    >>> group = GroupDescription(group="billing", mode="shared", backlog=7)
    >>> group.is_idle
    False
    """

    group: str
    mode: str = "shared"
    paused: bool = False
    backlog: int = 0
    """Messages that are not finished; in a broadcast, of the member that is farthest behind."""
    dead: int = 0
    expired_leases: int = 0
    """Leases that ran out since the broker started."""
    topics: tuple[ShareDescription, ...] = ()
    members: tuple[MemberDescription, ...] = ()
    """At most 10,000 of them, in a list of groups at most 100; `member_count` says how many."""
    member_count: int = 0
    positions: tuple[PositionDescription, ...] = ()
    """Of a broadcast: how far each member is, the one that is farthest behind first; those whose
    place only they know come last. At most 10,000, in a list of groups at most 100."""
    start: Literal["earliest", "latest"] | StartAt = "earliest"
    retry: RetryPolicy = RetryPolicy()
    at_most_once: bool = False
    lease_ms: int = 0
    filter: Filter = Filter()
    priorities: bool = False
    tenants: dict[str, float] | None = None
    key_rate: float = 0
    key_concurrency: int = 0
    expires_idle_ms: int = 0
    """After so long without a member the group is deleted; 0: never."""
    offline: tuple[str, ...] = ()
    """Members that an operator took out."""
    created_at_ms: int = 0
    held_by: str = ""
    """Who keeps it to itself (`hold_group`)."""

    @property
    def is_idle(self) -> bool:
        """Tell whether everything there is, is finished."""
        return not self.backlog

    @property
    def oldest_at_ms(self) -> int:
        """When the oldest unfinished message of all its topics was published; 0 when there is none.

        >>> GroupDescription(group="billing").oldest_at_ms
        0
        """
        shares = [one.oldest_at_ms for one in self.topics]
        members = [one.oldest_at_ms for one in self.positions]
        return min(filter(None, shares + members), default=0)

    @property
    def expiring(self) -> int:
        """How many messages of all its topics retention may drop soon, undelivered.

        >>> GroupDescription(group="billing").expiring
        0
        """
        return sum(one.expiring for one in self.topics)

    @property
    def dropped(self) -> int:
        """How many messages retention dropped before they were done, since the broker started.

        >>> GroupDescription(group="billing").dropped
        0
        """
        return sum(one.dropped for one in self.topics)


class GroupCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How much a group has to do, counted at one moment.

    >>> counts = GroupCounts(scheduled=1)
    >>> counts.is_empty
    False
    """

    ready: int = 0
    """Messages that are not finished, that no member holds, and that wait for no retry."""
    leased: int = 0
    retrying: int = 0
    """Messages that wait for their next attempt."""
    scheduled: int = 0
    """Messages that will fire into the topics of the group."""
    dead: int = 0
    is_exact: bool = True
    """False: `scheduled` changed while it was counted, or is more than 500,000 rows."""

    @property
    def is_empty(self) -> bool:
        """Return True if nothing is left to do, now or later; dead letters are not counted."""
        return self.is_exact and not (self.ready or self.leased or self.retrying or self.scheduled)


class DeadLetterDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A message that its group gave up on, and why.

    >>> DeadLetterDescription(topic="orders", offset=7, cause="no such order").id
    'orders/7'
    """

    topic: str
    offset: int
    cause: str = ""
    attempts: int = 0
    member: str = ""
    died_at_ms: int = 0
    message: Message | None = None
    """The message itself, where it was asked for and is still there."""

    @property
    def id(self) -> str:
        """The name of the message for people: `topic/offset`."""
        return f"{self.topic}/{self.offset}"


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
