"""Handlers of the operations on groups.

    group.create ──▶ group.change, group.pause / resume, group.member ──▶ group.delete

An operation that changes a group replies when the change is durable. A list replies in pages, and
no page takes so long that others wait for it.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING

from msgspec.structs import replace

from onward.broker.broadcast import looked_at
from onward.broker.describe import count_group, describe_group
from onward.broker.futures import all_of, future_of
from onward.broker.operations.dispatch import answers
from onward.broker.operations.group_moves import begin_shares, find_sharing
from onward.broker.requester import Requester
from onward.broker.schedule_scan import ScheduleScan
from onward.delivery.group import Group
from onward.delivery.record import GroupRecord, GroupWish
from onward.errors import AlreadyExists, Conflict, InvalidRequest, Overloaded
from onward.message.names import check_member_name
from onward.protocol.operations.groups import (
    AwaitServed,
    ChangeGroup,
    CountGroup,
    CreateGroup,
    DeleteGroup,
    DescribeGroup,
    GroupCounts,
    GroupDescription,
    GroupName,
    GroupPage,
    HoldGroup,
    ListGroups,
    PauseGroup,
    ResumeGroup,
    SetMember,
)
from onward.protocol.operations.operation import Done
from onward.protocol.operations.topics import LIST_PAGE_MAX

if TYPE_CHECKING:
    from onward.broker.broker import Broker

GROUPS_MAX = 100_000
PAGE_SHARES_MAX = 1_000
"""A page ends before it has more topics of groups than this: each costs a look into the index."""
POSITIONS_PER_LOOK = 10
"""So many positions of a broadcast are counted while one look is made."""
LISTED_MEMBERS_MAX = 100


class GroupOperations:
    """Creates, changes, deletes, describes, lists, counts, pauses and holds groups."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._consuming = broker.consuming
        self._records = broker.consuming.records
        self._scan = ScheduleScan(broker.scheduling)

    # --- settings ----------------------------------------------------------------------------

    @answers(CreateGroup)
    async def create(self, request: CreateGroup) -> GroupDescription:
        """Create a group and return when it has begun with all of its topics, durably."""
        # Two programs may create it at once: the second continues when the first is done.
        await self._formed(request.group)
        if request.exist_ok and self._exists_as_requested(request):
            await begin_shares(self._broker, self._consuming.find(request.group))
            return self._description(request.group)
        self._records.check_new(request.group)
        if not request.topics:
            raise InvalidRequest(f"group {request.group!r} needs at least one topic")
        if len(self._consuming.groups.by_name) >= GROUPS_MAX:
            raise Overloaded(f"there are {GROUPS_MAX} groups already")
        topics = tuple(dict.fromkeys(request.topics))
        wish = request.wish or GroupWish()
        record = wish.new_record(request.group, topics, self._broker.clock.now_ms())
        formed = self._records.form(record.name)
        try:
            await self._ensure_topics(topics)
            await self._commit(record)
        finally:
            formed(None)
        return self._description(record.name)

    def _exists_as_requested(self, request: CreateGroup) -> bool:
        """Return True if the group exists with these topics and settings; raise if it differs."""
        record = self._records.latest(request.group)
        if record is None or record.deleted:
            return False
        differs = (request.wish or GroupWish()).differs(record)
        missing = sorted(set(request.topics) - set(record.topics))
        if differs or missing:
            reason = differs or f"it does not consume {missing[0]!r}"
            raise AlreadyExists(
                f"group {request.group!r} exists already, and is different: {reason}"
            )
        return True

    @answers(ChangeGroup)
    async def change(self, request: ChangeGroup) -> GroupDescription:
        """Change the settings and topics of a group and return when that is durable."""
        # Checked before topics are created, and again because others may change the group then.
        self._changed(request, self._records.find(request.group))
        await self._ensure_topics(request.topics_add)
        await self._commit(self._changed(request, self._records.find(request.group)))
        return self._description(request.group)

    def _changed(self, request: ChangeGroup, old: GroupRecord) -> GroupRecord:
        """Return the checked record of a group after a change."""
        record = (request.wish or GroupWish()).changed(old)
        if record.mode != old.mode and self._consuming.members_of(old.name):
            raise Conflict(f"group {old.name!r} has members: its mode changes when it has none")
        topics = dict.fromkeys((*old.topics, *request.topics_add))
        for name in request.topics_remove:
            if name not in old.topics or name in request.topics_add:
                raise InvalidRequest(f"group {old.name!r} cannot remove {name!r}: not its topic")
            topics.pop(name, None)
        if not topics:
            raise InvalidRequest(f"group {old.name!r} needs at least one topic: delete the group")
        return replace(record, topics=tuple(topics)).check()

    @answers(DeleteGroup)
    async def delete(self, request: DeleteGroup) -> GroupName:
        """Delete a group and return when that is durable."""
        record = replace(self._records.find(request.group), deleted=True)
        await future_of(partial(self._records.change, record))
        return GroupName(record.name)

    @answers(PauseGroup)
    async def pause(self, request: PauseGroup) -> GroupDescription:
        """Pause a group and return when that is durable."""
        return await self._set_paused(request.group, paused=True)

    @answers(ResumeGroup)
    async def resume(self, request: ResumeGroup) -> GroupDescription:
        """Resume a group and return when that is durable."""
        return await self._set_paused(request.group, paused=False)

    async def _set_paused(self, name: str, *, paused: bool) -> GroupDescription:
        record = self._records.find(name)
        if record.mode == "broadcast":
            raise InvalidRequest(
                f"group {record.name!r} is broadcast and cannot be paused or resumed: its members "
                "read by themselves; stop them, or take them offline one by one"
            )
        await self._commit(replace(record, paused=paused))
        return self._description(name)

    @answers(SetMember)
    async def set_member(self, request: SetMember) -> GroupDescription:
        """Take a member offline or allow it again, and return when that is durable."""
        check_member_name(request.member)
        record = self._records.find(request.group)
        offline = {*record.offline} - {request.member}
        if request.offline:
            offline.add(request.member)
        await self._commit(replace(record, offline=tuple(sorted(offline))).check())
        return self._description(request.group)

    async def _ensure_topics(self, names: tuple[str, ...]) -> None:
        """Return when all topics exist durably and may be read; create those that nobody used."""
        by_name, publishing = self._broker.catalogue.by_name, self._broker.publishing
        existing = [self._broker.catalogue.find_readable(name) for name in names if name in by_name]
        missing = [name for name in names if name not in by_name]
        await all_of(
            [future_of(partial(publishing.create_on_use, name)) for name in missing]
            + [future_of(partial(publishing.when_created, topic)) for topic in existing]
        )

    async def _commit(self, record: GroupRecord) -> None:
        """Make a record durable, and begin with the topics that are new to the group."""
        await future_of(partial(self._records.change, record))
        await begin_shares(self._broker, self._consuming.find(record.name))

    def _description(self, name: str) -> GroupDescription:
        # The group may have been deleted since.
        group = self._consuming.groups.by_name.get(name)
        if group is None:
            return GroupDescription(group=name)
        return describe_group(self._broker, group)

    # --- descriptions ------------------------------------------------------------------------

    @answers(DescribeGroup)
    async def describe(self, request: DescribeGroup) -> GroupDescription:
        """Return the settings, progress and members of a group."""
        await self._formed(request.group)
        return describe_group(self._broker, self._consuming.find(request.group))

    async def _formed(self, name: str) -> None:
        """Return when nobody is creating this group."""
        while self._records.is_forming(name):
            await future_of(partial(self._records.when_formed, name))

    @answers(ListGroups)
    async def list_groups(self, request: ListGroups) -> GroupPage:
        """Return a page of groups in the order of their names."""
        groups = self._consuming.groups
        if request.topic:
            self._broker.catalogue.find(request.topic)
            names = sorted(group.record.name for group in groups.of_topic(request.topic))
        else:
            names = sorted(groups.by_name)
        names = [name for name in names if not self._records.is_forming(name)]
        rest = names[bisect_right(names, request.after) :]
        limit = min(request.limit, LIST_PAGE_MAX)
        page = self._affordable([groups.by_name[name] for name in rest[:limit]])
        has_more = len(rest) > len(page)
        return GroupPage(
            groups=[
                describe_group(self._broker, group, members_max=LISTED_MEMBERS_MAX)
                for group in page
            ],
            next=page[-1].record.name if has_more else "",
            count=len(names),
        )

    def _affordable(self, groups: list[Group]) -> list[Group]:
        """Return the first groups that do not cost too much together; at least one."""
        costs = accumulate(self._cost_of(group) for group in groups)
        fitting = sum(1 for cost in takewhile(lambda cost: cost <= PAGE_SHARES_MAX, costs))
        return groups[: max(fitting, 1)]

    def _cost_of(self, group: Group) -> int:
        """Return how many looks into the index a group in a list is worth."""
        positions = looked_at(self._broker, group)
        looks = min(positions, LISTED_MEMBERS_MAX)
        return len(group.shares) + looks + positions // POSITIONS_PER_LOOK

    @answers(CountGroup)
    async def count(self, request: CountGroup) -> GroupCounts:
        """Count what a group has to do: scheduled messages first, the rest in one moment.

            scheduled ──fires──▶ ready ──▶ leased ──▶ finished, or dead
                                   ▲          └──▶ retrying ──┐
                                   └──────────────────────────┘

        A message goes from left to right, so in this order no message is in none of the counts.
        """
        topics = frozenset(find_sharing(self._broker, request.group).record.topics)
        scheduled, is_exact = await self._scan.count(topics)
        # Nothing is awaited from here on: the counts are of one moment.
        group = find_sharing(self._broker, request.group)
        is_exact = is_exact and topics == frozenset(group.record.topics)
        return count_group(self._broker, group, scheduled=scheduled, is_exact=is_exact)

    # --- connections -------------------------------------------------------------------------

    @answers(HoldGroup)
    async def hold(self, request: HoldGroup, requester: Requester) -> GroupName:
        """Reserve a group for a connection."""
        if not request.holder.isprintable():
            raise InvalidRequest("who holds a group is said in printable characters")
        self._broker.gate.check_leading()
        find_sharing(self._broker, request.group)
        self._broker.group_holds.hold(request, requester)
        return GroupName(request.group)

    @answers(AwaitServed)
    async def served(self, request: AwaitServed, requester: Requester) -> Done:
        """Return when every message that is ready for a member has been sent."""
        member = self._consuming.members_on(requester).get(request.consumer)
        # A membership that has just ended gets nothing more.
        if member is not None:
            await future_of(partial(self._consuming.served.wait, member))
        return Done()
