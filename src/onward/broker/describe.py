"""What there is to know of a group, for people and programs.

Nothing is changed here, and no message is read: times come from the index. What is described is
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

if TYPE_CHECKING:
    from onward.broker.broker import Broker
    from onward.broker.catalogue import Topic
    from onward.broker.crew import Member

MEMBERS_MAX = 10_000
AGES_MAX = 1_000
"""Of so many places in topics it is told how old they are: others wait while that is looked up."""
SETTINGS = (
    "mode", "start", "at_most_once", "lease_ms", "filter", "priorities", "tenants", "key_rate",
    "key_concurrency", "expires_idle_ms", "paused", "offline", "created_at_ms",
)  # fmt: skip
"""What of its record a group is described with as it is."""


def describe_group(
    broker: Broker, group: Group, *, members_max: int = MEMBERS_MAX
) -> dict[str, object]:
    """Return what there is to know of a group; of its members and positions `members_max`."""
    consuming, record = broker.consuming, group.record
    consuming.wake_idle(group)
    leases = consuming.leases_of(record.name)
    members = consuming.members_of(record.name)
    topics = [
        _describe_share(broker, share, leased=leases.count_in(name))
        for name, share in sorted(group.shares.items())
    ]
    listed = standings(broker, group) if record.mode == "broadcast" else []
    return {
        "group": record.name,
        **{name: getattr(record, name) for name in SETTINGS},
        "retry": asdict(record.retry),
        "topics": topics,
        "members": [_describe_member(broker, one, leases) for one in members[:members_max]],
        "member_count": len(members),
        "backlog": backlog_of(listed)
        + sum(share.backlog(_end_of(broker, share)) for share in group.shares.values()),
        "dead": sum(share.dead_count for share in group.shares.values()),
        "expired_leases": consuming.expired_of(record.name),
        "positions": _describe_positions(
            broker, listed[:members_max], connected={one.name for one in members}
        ),
        "held_by": broker.group_holds.holder_of(record.name),
    }


def _describe_share(broker: Broker, share: Share, *, leased: int) -> dict[str, object]:
    end = _end_of(broker, share)
    backlog, waiting = share.backlog(end), share.waiting_count
    expiring, expires_at_ms = broker.undelivered.expiring(share)
    return {
        "topic": share.topic,
        "cursor": share.cursor,
        "end": end,
        "backlog": backlog,
        "oldest_at_ms": _oldest_at_ms(broker, share) if backlog else 0,
        "ready": max(0, backlog - waiting - leased - share.reserved.count),
        "waiting": waiting,
        "next_due_ms": share.next_due_ms() or 0,
        "leased": leased,
        "reserved": share.reserved.count,
        "dead": share.dead_count,
        "expiring": expiring,
        "expires_at_ms": expires_at_ms,
        "dropped": share.dropped,
    }


def _describe_positions(
    broker: Broker, listed: list[Standing], *, connected: set[str]
) -> list[dict[str, object]]:
    # Members that stop together are at the same place: one look into the index does for them.
    behind = {(one.topic.number, one.offset): one for one in listed if one.backlog}
    oldest = {
        place: _published_at_ms(broker, one.topic, one.offset or 0)
        for place, one in islice(behind.items(), AGES_MAX)
    }
    return [
        {
            "member": one.member,
            "topic": one.topic.name,
            "offset": one.offset,
            "end": one.topic.next_offset,
            "backlog": None if one.offset is None else one.backlog,
            "oldest_at_ms": oldest.get((one.topic.number, one.offset), 0),
            "connected": one.member in connected,
        }
        for one in listed
    ]


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


def _describe_member(broker: Broker, member: Member, leases: Leases) -> dict[str, object]:
    hello = member.session.hello
    held_ms = max(1, broker.clock.now_ms() - member.joined_at_ms)
    return {
        "member": member.name,
        "client": hello.client if hello is not None else "",
        "host": hello.host if hello is not None else "",
        "pid": hello.pid if hello is not None else 0,
        "function": member.function,
        "state": member.state,
        "credit": member.credit,
        "leased": sum(lease.ranges.count for lease in leases.of_member(member.name)),
        "delivered": member.delivered,
        "acked": member.acked,
        "retried": member.retried,
        "expired": member.expired,
        "since_ms": member.joined_at_ms,
        "rate": round(member.acked * 1000 / held_ms, 3),
    }
