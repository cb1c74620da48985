"""Handlers of the operations that move a group: reset, skip, purge, advance, replay, fork, peek.

    finished ──replay──▶ unfinished ──skip──▶ finished          reset: all of a topic at once
                              ├──purge──▶ finished, all that nobody holds and no retry waits for
                              └──advance──▶ acked, all below an offset: by a pipeline

A move is a row of the trace like every outcome: durable before the reply, and told by `explain`.
Ranges are clipped to the topic; a range that is wholly outside of it is a mistake. A dry run only
counts. Replay chooses among what is finished, so it never touches what a member holds; a dead
letter is not replayed but redriven. A lease that a reset or a skip takes from a member is void: its
acks are refused. A move that cannot be written moves nothing, but messages that it has taken from
members by then are delivered again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from onward.broker.choosing import GONE
from onward.broker.futures import Done, all_of, future_of
from onward.broker.group_ranges import clipped, finished, outside, rows_of, unfinished
from onward.broker.operations.dispatch import answers
from onward.broker.peek import Peek
from onward.broker.requester import Requester
from onward.delivery.group import Group
from onward.delivery.lease import Lease
from onward.delivery.ranges import Range, Ranges, count_of, merged, without
from onward.delivery.share import Share
from onward.delivery.trace import Trace
from onward.errors import Conflict, InvalidRequest, OnwardError, Overloaded, TopicEnded
from onward.message.names import check_group_name, check_member_name
from onward.message.relative import resolve_ms
from onward.protocol.operations.group_moves import (
    AdvanceGroup,
    ForkGroup,
    MessageCount,
    PeekedRanges,
    PeekGroup,
    PurgeReady,
    ReplayMessages,
    ResetCount,
    ResetGroup,
    ResetTopic,
    SetPosition,
    SkipMessages,
    StoredPosition,
)
from onward.protocol.operations.groups import GroupName

if TYPE_CHECKING:
    from onward.broker.broker import Broker
    from onward.broker.catalogue import Topic

ADVANCES_MAX = 100
PURGED = "purged by an operator"


class GroupMoveOperations:
    """Moves groups, and shows what they would deliver next."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._consuming = broker.consuming
        self._advances: dict[tuple[str, str], _Advances] = {}
        """Requests that advance a group in a topic and are not done."""

    @answers(ResetGroup)
    async def reset(self, request: ResetGroup) -> ResetCount:
        """Let a group begin again at a place, in one topic or all of them."""
        group = find_sharing(self._broker, request.group)
        topics = self._topics(group, request.topic)
        places = [
            ResetTopic(topic.name, offset, backlog=topic.next_offset - offset)
            for topic in topics
            for offset in [self._broker.delivering.start_offset(topic, request.to)]
        ]
        rows = [self._row("reset", group, place.topic, offset=place.offset) for place in places]
        await begin_shares(self._broker, group)
        if not request.dry_run:
            await future_of(partial(self._write_reset, group, rows))
        return ResetCount(sum(place.backlog for place in places), places)

    def _write_reset(self, group: Group, rows: list[Trace], done: Done) -> None:
        """Void all leases, now and when the reset is durable: no old ack may finish a message."""
        name = group.record.name
        held = [self._void(group, row.topic, None) for row in rows]
        # What is granted meanwhile would be acked after the reset.
        self._consuming.hold(name)

        # This must happen in the same turn of the loop as the fold: afterwards members get leases.
        def settle(error: OnwardError | None) -> None:
            for row, ranges in zip(rows, held, strict=True):
                if error is None:
                    self._consuming.cancel_leases(name, row.topic)
                else:
                    self._give_back(group, row.topic, ranges)
            done(error)

        if rows:
            self._consuming.record(rows, settle)
        else:
            done(None)

    @answers(SkipMessages)
    async def skip(self, request: SkipMessages) -> MessageCount:
        """Finish ranges of messages without delivering them."""
        group = find_sharing(self._broker, request.group)
        topic = find_topic(self._broker, group, request.topic)
        carried = self._broker.log.carried.count_of(topic.number)
        ranges = clipped(topic, request.ranges, first_offset=0 if carried else None)
        await begin_shares(self._broker, group)
        chosen = unfinished(begun(group, topic.name), ranges)
        if not request.dry_run:
            # If the rows cannot be written, the messages that they name are delivered again.
            self._void(group, topic.name, Ranges(chosen))
            self._consuming.hold(group.record.name)
            await self._record(
                self._rows("skipped", group, topic.name, chosen, cause="by an operator")
            )
        return MessageCount(count_of(chosen))

    @answers(PurgeReady)
    async def purge(self, request: PurgeReady) -> MessageCount:
        """Finish all messages of a group that are ready, in one topic or all of them."""
        group = find_sharing(self._broker, request.group)
        topics = self._topics(group, request.topic)
        self._consuming.wake_idle(group)
        await begin_shares(self._broker, group)
        ready = {
            topic.name: self._consuming.untaken(group, begun(group, topic.name), topic)
            for topic in topics
        }
        rows = [
            row
            for name, ranges in ready.items()
            for row in self._rows("skipped", group, name, ranges, cause=PURGED)
        ]
        if rows and not request.dry_run:
            # Nobody may be given what is about to be finished.
            self._consuming.hold(group.record.name)
            await self._record(rows)
        return MessageCount(sum(map(count_of, ready.values())))

    @answers(AdvanceGroup)
    async def advance(self, request: AdvanceGroup, requester: Requester) -> MessageCount:
        """Ack all unfinished messages below an offset; those that are not stored are skipped."""
        check_member_name(request.member)
        group = find_sharing(self._broker, request.group)
        topic = find_topic(self._broker, group, request.topic)
        self._broker.group_holds.check_free(request.group, but_for=requester, member=request.member)
        if request.to > topic.next_offset:
            raise outside(topic, request.to)
        self._consuming.idle_groups.touch(request.group)
        async with self._turn(request.group, request.topic):
            await begin_shares(self._broker, group)
            return await self._advance(group, topic, request)

    async def _advance(self, group: Group, topic: Topic, request: AdvanceGroup) -> MessageCount:
        share = begun(group, topic.name)
        gone = self._broker.log.carried.missing(
            topic.number, share.unfinished(0, min(request.to, topic.first_offset))
        )
        chosen = without(share.unfinished(0, request.to), Ranges(gone))
        rows = self._rows("acked", group, topic.name, chosen, member=request.member)
        rows += self._rows("skipped", group, topic.name, gone, cause=GONE)
        if rows:
            self._void(group, topic.name, Ranges(merged([*gone, *chosen])))
            self._consuming.hold(group.record.name)
            await self._record(rows)
        return MessageCount(count_of(chosen))

    @asynccontextmanager
    async def _turn(self, group: str, topic: str) -> AsyncIterator[None]:
        """Wait for earlier requests: none may count what the one before is just finishing."""
        advances = self._advances.setdefault((group, topic), _Advances())
        if advances.count >= ADVANCES_MAX:
            raise Overloaded(f"group {group!r} is moved too often", retry_after_ms=100)
        advances.count += 1
        try:
            async with advances.lock:
                yield
        finally:
            advances.count -= 1
            if not advances.count:
                del self._advances[group, topic]

    @answers(ReplayMessages)
    async def replay(self, request: ReplayMessages) -> MessageCount:
        """Deliver finished messages again, by ranges or by a window of time."""
        group = find_sharing(self._broker, request.group)
        topic = find_topic(self._broker, group, request.topic)
        ranges = clipped(topic, self._window(topic, request))
        await begin_shares(self._broker, group)
        chosen = finished(begun(group, topic.name), ranges)
        if not request.dry_run:
            await self._record(self._rows("replayed", group, topic.name, chosen))
        return MessageCount(count_of(chosen))

    @answers(ForkGroup)
    async def fork(self, request: ForkGroup) -> GroupName:
        """Create a group with the settings and the progress of another one."""
        records = self._consuming.records
        record = records.find(request.group)
        check_group_name(request.to)
        records.check_new(request.to)
        now_ms = self._broker.clock.now_ms()
        copy = replace(record, name=request.to, created_at_ms=now_ms, offline=())
        row = Trace(did="forked", at_ms=now_ms, group=copy.name, source=record.name)
        # Both with one commit: there is never a copy without the progress of what it copies.
        changed = future_of(partial(records.change, copy))
        recorded = future_of(partial(self._consuming.record, [row]))
        await all_of([changed, recorded])
        return GroupName(copy.name)

    @answers(PeekGroup)
    async def peek(self, request: PeekGroup) -> PeekedRanges:
        """Return what would be delivered next; look into the log if the group chooses."""
        group = find_sharing(self._broker, request.group)
        topic = find_topic(self._broker, group, request.topic)
        share = group.shares.get(topic.name)
        if share is None:
            return PeekedRanges()
        self._consuming.wake_idle(group)
        peek = Peek(
            share, topic, group.record, limit=request.limit,
            leased=lambda: self._consuming.leases_of(request.group).ranges_in(topic.name),
        )  # fmt: skip
        if peek.is_plain:
            ranges = peek.oldest()
        else:
            look_ahead = self._consuming.look_ahead
            async with look_ahead.answers:
                ranges = await peek.chosen(look_ahead)
        return PeekedRanges(ranges, count_of(ranges))

    @answers(SetPosition)
    async def set_position(self, request: SetPosition) -> StoredPosition:
        """Store the position of a member of a broadcast and return when it is durable."""
        check_member_name(request.member)
        group = self._consuming.find(request.group)
        topic = find_topic(self._broker, group, request.topic)
        if group.record.mode != "broadcast":
            raise InvalidRequest(f"group {request.group!r} is not broadcast: it has one position")
        if request.number not in (0, topic.number):
            raise TopicEnded(f"topic {topic.name!r} has ended since it was read from last")
        if request.offset > topic.next_offset:
            raise outside(topic, request.offset)
        row = self._row(
            "moved", group, topic.name, offset=request.offset, member=request.member,
            number=topic.number,
        )  # fmt: skip
        await self._record([row])
        return StoredPosition(request.offset)

    # --- rows and leases ---------------------------------------------------------------------

    async def _record(self, rows: list[Trace]) -> None:
        """Make rows of the trace durable."""
        if rows:
            await future_of(partial(self._consuming.record, rows))

    def _row(
        self, did: str, group: Group, topic: str, *, offset: int = -1, member: str = "",
        number: int = 0,
    ) -> Trace:  # fmt: skip
        return Trace(
            did=did, at_ms=self._broker.clock.now_ms(), group=group.record.name, topic=topic,
            offset=offset, member=member, number=number,
        )  # fmt: skip

    def _rows(
        self, did: str, group: Group, topic: str, ranges: list[Range], *, cause: str = "",
        member: str = "",
    ) -> list[Trace]:  # fmt: skip
        return rows_of(
            did, group.record.name, topic, ranges, cause=cause, member=member,
            at_ms=self._broker.clock.now_ms(),
        )  # fmt: skip

    def _void(self, group: Group, topic: str, ranges: Ranges | None) -> list[Range]:
        """Void the leases on ranges of a topic, or on all of it; return what members held."""
        leases = self._consuming.leases_of(group.record.name)
        held = [
            (lease, start, end)
            for lease in self._leases_in(group, topic)
            for leased in lease.ranges
            for start, end in ([leased] if ranges is None else ranges.overlap(*leased))
        ]
        for lease, start, end in held:
            leases.settle(lease.id, start, end, member=lease.member)
        return [(start, end) for _, start, end in held]

    def _leases_in(self, group: Group, topic: str) -> list[Lease]:
        name = group.record.name
        leases = self._consuming.leases_of(name)
        return [
            lease
            for member in self._consuming.members_of(name)
            for lease in leases.of_member(member.name)
            if lease.topic == topic
        ]

    def _give_back(self, group: Group, topic: str, ranges: list[Range]) -> None:
        """Deliver messages again whose leases were voided for a move that was not written."""
        crew = self._consuming.crews.get(group.record.name)
        source = None if crew is None else crew.sources.get(topic)
        if crew is not None and source is not None:
            source.give_back(ranges)
            self._consuming.serve_soon(crew)
        elif topic in group.shares:
            group.shares[topic].give_back(ranges)

    def _window(self, topic: Topic, request: ReplayMessages) -> list[Range]:
        """Return the ranges of a replay, which are given by offsets or by times."""
        by_time = request.from_ms is not None or request.to_ms is not None
        if by_time == (request.ranges is not None):
            raise InvalidRequest("a replay has either ranges, or from_ms and to_ms")
        if request.ranges is not None:
            return request.ranges
        now_ms = self._broker.clock.now_ms()
        from_ms = resolve_ms(request.from_ms or 0, now_ms=now_ms)
        to_ms = None if request.to_ms is None else resolve_ms(request.to_ms, now_ms=now_ms)
        if to_ms is not None and from_ms >= to_ms:
            raise InvalidRequest(f"no time is from {from_ms} to {to_ms}")
        start = self._offset_at(topic, from_ms)
        end = topic.next_offset if to_ms is None else self._offset_at(topic, to_ms)
        return [(start, end)] if start < end else []

    def _offset_at(self, topic: Topic, time_ms: int) -> int:
        offset = self._broker.log.offset_from_time(topic.number, time_ms)
        return topic.next_offset if offset is None else max(offset, topic.first_offset)

    def _topics(self, group: Group, name: str) -> list[Topic]:
        """Return the named topic of a group, or all of its topics that exist."""
        by_name = self._broker.catalogue.by_name
        names = [name] if name else [topic for topic in group.record.topics if topic in by_name]
        return [find_topic(self._broker, group, name) for name in names]


class _Advances:
    """Requests that advance one group in one topic, one after another."""

    __slots__ = ("count", "lock")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.count = 0


# --- groups and their topics --------------------------------------------------------------------


def find_sharing(broker: Broker, name: str) -> Group:
    """Return the group if its members share the work: only then does it have one position."""
    group = broker.consuming.find(name)
    if group.record.mode == "broadcast":
        raise InvalidRequest(f"group {name!r} is broadcast: each member has its own position")
    return group


def find_topic(broker: Broker, group: Group, name: str) -> Topic:
    """Return a topic that the group consumes."""
    topic = broker.catalogue.find(name)
    if name not in group.record.topics:
        raise InvalidRequest(f"group {group.record.name!r} does not consume topic {name!r}")
    return topic


async def begin_shares(broker: Broker, group: Group) -> None:
    """Let a group begin with those of its topics that it has not begun with."""
    if group.record.mode == "broadcast":
        return
    missing = [
        name
        for name in group.record.topics
        if name not in group.shares and name in broker.catalogue.by_name
    ]
    await all_of(
        [future_of(partial(broker.consuming.begin_share, group, name)) for name in missing]
    )


def begun(group: Group, topic: str) -> Share:
    """Return the share of a topic; raise if the group has ended while a request waited."""
    share = group.shares.get(topic)
    if share is None:
        raise Conflict(f"group {group.record.name!r} has no place in topic {topic!r} any more")
    return share
