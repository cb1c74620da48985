"""Operations on groups: create, change, delete, describe, list, pause, members.

    GroupDescription ─┬─ topics:    ShareDescription     how far the group is with each of them
                      ├─ members:   MemberDescription    who is there now, and how much they do
                      └─ positions: PositionDescription  how far each member of a broadcast is
    GroupCounts                                          how much is left to do, at one moment

A description is a snapshot: ask again for a newer one. What moves a group is in `group_moves`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from onward.delivery.filter import Filter
from onward.delivery.record import TOPICS_MAX, GroupWish, StartAt
from onward.delivery.retry import RetryPolicy
from onward.protocol.operations.operation import (
    Done,
    Request,
    manage_group,
    operation,
    read_group,
    read_topic,
)
from onward.protocol.operations.topics import LIST_LIMIT_MAX, LIST_PAGE_MAX
from onward.protocol.payloads import Number

HOLDER_CHARACTERS_MAX = 200

TopicNames = Annotated[tuple[str, ...], msgspec.Meta(max_length=TOPICS_MAX)]

# --- replies --------------------------------------------------------------------------------------


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
        """Return True if the broker knows where the member is."""
        return self.offset is not None


class RetryDescription(RetryPolicy, frozen=True, omit_defaults=False):
    """A retry policy that is sent with all of its fields, also those that have their default.

    >>> msgspec.json.encode(RetryDescription(kind="none"))[:30]
    b'{"kind":"none","steps_ms":[100'
    """


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
        """Return True if no message is unfinished."""
        return not self.backlog

    @property
    def oldest_at_ms(self) -> int:
        """When the oldest unfinished message of all its topics was published; 0 when there is none.

        >>> GroupDescription(group="billing").oldest_at_ms
        0
        """
        shares = [share.oldest_at_ms for share in self.topics]
        members = [position.oldest_at_ms for position in self.positions]
        return min(filter(None, shares + members), default=0)

    @property
    def expiring(self) -> int:
        """How many messages of all its topics retention may drop soon, undelivered.

        >>> GroupDescription(group="billing").expiring
        0
        """
        return sum(share.expiring for share in self.topics)

    @property
    def dropped(self) -> int:
        """How many messages retention dropped before they were done, since the broker started.

        >>> GroupDescription(group="billing").dropped
        0
        """
        return sum(share.dropped for share in self.topics)


class GroupPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of groups; it may have fewer than `limit`."""

    groups: list[GroupDescription] = []
    next: str = ""
    """Ask for the next page with this as `after`; empty: this is the last page."""
    count: int = 0
    """How many groups there are in all."""


class GroupCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How much a group has to do, counted at one moment.

    >>> counts = GroupCounts(scheduled=1)
    >>> counts.is_empty
    False
    """

    group: str = ""
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


class GroupName(msgspec.Struct, frozen=True):
    """The name of a group that was created, deleted or held."""

    group: str


# --- requests -------------------------------------------------------------------------------------


@operation(
    needs=(manage_group("group"), read_topic("topics")),
    changes=True,
    example={"group": "billing", "topics": ["orders"], "wish": {"mode": "ordered"}},
)
class CreateGroup(Request[GroupDescription], frozen=True, tag="group.create"):
    """Create a group.

    Consuming creates one by itself; this sets its settings.
    """

    group: str
    topics: TopicNames
    """Topics that the group consumes; one that nobody used is created, as by a publish."""
    wish: GroupWish | None = None
    """Settings of the group; those that are left out have their defaults."""
    exist_ok: bool = False
    """A group that exists with all of these topics and settings is no error."""


@operation(
    needs=(manage_group("group"), read_topic("topics_add")),
    changes=True,
    example={"group": "billing", "wish": {"lease_ms": 60_000}, "topics_add": ["refunds"]},
)
class ChangeGroup(Request[GroupDescription], frozen=True, tag="group.change"):
    """Change the given settings of a group, leave the others; add and remove topics."""

    group: str
    wish: GroupWish | None = None
    topics_add: TopicNames = ()
    topics_remove: TopicNames = ()
    """The group forgets its progress, retries and dead letters of these; one topic must be left."""


@operation(needs=manage_group("group"), changes=True, example={"group": "billing"})
class DeleteGroup(Request[GroupName], frozen=True, tag="group.delete"):
    """Delete a group: its members are told; its progress and its dead letters are gone."""

    group: str


@operation(needs=read_group("group"), example={"group": "billing"})
class DescribeGroup(Request[GroupDescription], frozen=True, tag="group.describe"):
    """Return the settings, progress and members of a group."""

    group: str


@operation(needs=read_group(), example={"topic": "orders", "limit": 100})
class ListGroups(Request[GroupPage], frozen=True, tag="group.list"):
    """Return a page of groups in the order of their names."""

    after: str = ""
    """Only names after this one."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=LIST_LIMIT_MAX)] = LIST_PAGE_MAX
    topic: str = ""
    """Only groups that consume this topic."""


@operation(needs=read_group("group"), running_max=20, example={"group": "billing"})
class CountGroup(Request[GroupCounts], frozen=True, tag="group.counts"):
    """Count what is ready, leased, retrying, scheduled and dead in a group at one moment."""

    group: str


@operation(needs=manage_group("group"), changes=True, example={"group": "billing"})
class PauseGroup(Request[GroupDescription], frozen=True, tag="group.pause"):
    """Deliver nothing more to a group until it is resumed; what is leased may be finished."""

    group: str


@operation(needs=manage_group("group"), changes=True, example={"group": "billing"})
class ResumeGroup(Request[GroupDescription], frozen=True, tag="group.resume"):
    """Deliver again to a group that was paused."""

    group: str


@operation(
    needs=manage_group("group"),
    changes=True,
    example={"group": "billing", "member": "ann", "offline": True},
)
class SetMember(Request[GroupDescription], frozen=True, tag="group.member"):
    """Take one member of a group offline, or allow it to join again."""

    group: str
    member: str
    offline: bool
    """True: its membership ends, and it cannot join."""


# A hold is kept in memory only, so it needs no disk that can be written.
@operation(needs=read_group("group"), example={"group": "totals", "holder": "the nightly totals"})
class HoldGroup(Request[GroupName], frozen=True, tag="group.hold"):
    """Reserve a group for this connection: nobody joins it and nobody else holds or advances it."""

    group: str
    holder: Annotated[str, msgspec.Meta(min_length=1, max_length=HOLDER_CHARACTERS_MAX)]
    """Who holds the group, for people."""
    id: Number = 0
    """Names the client, whatever connection it has; 0: only the connection counts."""
    member: Annotated[str, msgspec.Meta(max_length=HOLDER_CHARACTERS_MAX)] = ""
    """Other connections may advance the group under this name."""


# It needs no permission: the CONSUME of its consumer was permitted on the same connection. It is
# not repeated: the number of a consumer means nothing on the next connection.
@operation(needs=(), is_repeatable=False, running_max=20_000, example={"consumer": 7})
class AwaitServed(Request[Done], frozen=True, tag="member.served"):
    """Reply once every message that is ready for a consumer of this connection has been sent.

    The consumer must have credit for these messages.
    """

    consumer: int
