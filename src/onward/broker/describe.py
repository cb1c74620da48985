"""Descriptions of groups, for people and programs.

Nothing is changed here, and no message is read: times come from the index. A description is
bounded: a group may have 10,000 members, 1,000 topics, and 10,000 positions of a broadcast.

    backlog = ready + waiting (for a retry) + leased (or on the way to or from a member)
            + reserved (for a member that may re-claim it after a restart of the broker)

In a broadcast each member has a backlog of its own; that of the group is the largest of them.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from msgspec.structs import asdict

from onward.broker.broadcast import Standing, backlog_of, standings
from onward.delivery.group import Group
from onward.delivery.lease import Leases
from onward.delivery.share import Share
from onward.protocol.operations.groups import (
    GroupCounts,
    GroupDescription,
    MemberDescription,
    PositionDescription,
    RetryDescription,
    ShareDescription,
)

if TYPE_CHECKING:
    from onward.broker.broker import Broker
    from onward.broker.catalogue import Topic
    from onward.broker.crew import Member

MEMBERS_MAX = 10_000
AGES_MAX = 1_000
"""The age of so many positions is looked up: others wait meanwhile."""


def describe_group(
    broker: Broker, group: Group, *, members_max: int = MEMBERS_MAX
) -> GroupDescription:
    """Return the description of a group, with at most `members_max` members and positions."""
    consuming, record = broker.consuming, group.record
    consuming.wake_idle(group)
    leases = consuming.leases_of(record.name)
    members = consuming.members_of(record.name)
    listed = standings(broker, group) if record.mode == "broadcast" else []
    shares = group.shares.values()
    return GroupDescription(
        group=record.name,
        mode=record.mode,
        paused=record.paused,
        backlog=backlog_of(listed) + sum(share.backlog(_end_of(broker, share)) for share in shares),
        dead=sum(share.dead_count for share in shares),
        expired_leases=consuming.expired_of(record.name),
        topics=tuple(
            _describe_share(broker, share, leased=leases.count_in(name))
            for name, share in sorted(group.shares.items())
        ),
        members=tuple(_describe_member(broker, member, leases) for member in members[:members_max]),
        member_count=len(members),
        positions=_describe_positions(
            broker, listed[:members_max], connected={member.name for member in members}
        ),
        start=record.start,
        retry=RetryDescription(**asdict(record.retry)),
        at_most_once=record.at_most_once,
        lease_ms=record.lease_ms,
        filter=record.filter,
        priorities=record.priorities,
        tenants=record.tenants,
        key_rate=record.key_rate,
        key_concurrency=record.key_concurrency,
        expires_idle_ms=record.expires_idle_ms,
        offline=record.offline,
        created_at_ms=record.created_at_ms,
        held_by=broker.group_holds.holder_of(record.name),
    )


def count_group(broker: Broker, group: Group, *, scheduled: int, is_exact: bool) -> GroupCounts:
    """Return how much a group has to do at this moment; `scheduled` was counted just before."""
    broker.consuming.wake_idle(group)
    leased = _leased_count(broker, group)
    retrying = sum(share.waiting_count for share in group.shares.values())
    return GroupCounts(
        group=group.record.name,
        ready=max(0, _unfinished_count(broker, group) - leased - retrying),
        leased=leased,
        retrying=retrying,
        scheduled=scheduled,
        dead=sum(share.dead_count for share in group.shares.values()),
        is_exact=is_exact,
    )


def _leased_count(broker: Broker, group: Group) -> int:
    leases = broker.consuming.leases_of(group.record.name)
    # What is reserved after a restart may be in the hands of a member that comes back.
    return sum(leases.count_in(name) + share.reserved.count for name, share in group.shares.items())


def _unfinished_count(broker: Broker, group: Group) -> int:
    """Return how many messages are unfinished, also of topics that the group has not begun with."""
    count = 0
    for name in group.record.topics:
        topic = broker.catalogue.by_name.get(name)
        share = group.shares.get(name)
        if topic is not None and share is not None:
            count += share.backlog(topic.next_offset)
        elif topic is not None:
            count += topic.next_offset - broker.consuming.start_of(group.record, topic)
    return count


def _describe_share(broker: Broker, share: Share, *, leased: int) -> ShareDescription:
    end = _end_of(broker, share)
    backlog, waiting = share.backlog(end), share.waiting_count
    expiring, expires_at_ms = broker.undelivered.expiring(share)
    return ShareDescription(
        topic=share.topic,
        cursor=share.cursor,
        end=end,
        backlog=backlog,
        oldest_at_ms=_oldest_at_ms(broker, share) if backlog else 0,
        ready=max(0, backlog - waiting - leased - share.reserved.count),
        waiting=waiting,
        next_due_ms=share.next_due_ms() or 0,
        leased=leased,
        reserved=share.reserved.count,
        dead=share.dead_count,
        expiring=expiring,
        expires_at_ms=expires_at_ms,
        dropped=share.dropped,
    )


def _describe_positions(
    broker: Broker, listed: list[Standing], *, connected: set[str]
) -> tuple[PositionDescription, ...]:
    # Members that stop together are at the same place: one look into the index does for them.
    behind = {(one.topic.number, one.offset): one for one in listed if one.backlog}
    oldest = {
        place: _published_at_ms(broker, one.topic, one.offset or 0)
        for place, one in islice(behind.items(), AGES_MAX)
    }
    return tuple(
        PositionDescription(
            member=one.member,
            topic=one.topic.name,
            offset=one.offset,
            end=one.topic.next_offset,
            backlog=None if one.offset is None else one.backlog,
            oldest_at_ms=oldest.get((one.topic.number, one.offset), 0),
            connected=one.member in connected,
        )
        for one in listed
    )


def _end_of(broker: Broker, share: Share) -> int:
    topic = broker.catalogue.by_name.get(share.topic)
    return share.cursor if topic is None else topic.next_offset


def _oldest_at_ms(broker: Broker, share: Share) -> int:
    """Return when the oldest unfinished message was published."""
    topic = broker.catalogue.by_name.get(share.topic)
    return 0 if topic is None else _published_at_ms(broker, topic, share.cursor)


def _published_at_ms(broker: Broker, topic: Topic, offset: int) -> int:
    """Return when the first message from `offset` on was published; from the index alone."""
    span = broker.log.plan(topic.number, max(offset, topic.first_offset), bytes_max=0)
    return 0 if span is None else span.rows[0].time_ms


def _describe_member(broker: Broker, member: Member, leases: Leases) -> MemberDescription:
    hello = member.session.hello
    held_ms = max(1, broker.clock.now_ms() - member.joined_at_ms)
    return MemberDescription(
        member=member.name,
        client=hello.client if hello is not None else "",
        host=hello.host if hello is not None else "",
        pid=hello.pid if hello is not None else 0,
        function=member.function,
        state=member.state,
        credit=member.credit,
        leased=sum(lease.ranges.count for lease in leases.of_member(member.name)),
        delivered=member.delivered,
        acked=member.acked,
        retried=member.retried,
        expired=member.expired,
        since_ms=member.joined_at_ms,
        rate=round(member.acked * 1000 / held_ms, 3),
    )
