"""What a program can ask of groups: list, describe, create, change, move, look.

    position   reset_group, skip, replay, fork_group      settings   create_group, change_group
    look       groups, group, peek                        stop / go  pause_group, resume_group,
                                                                     set_member, delete_group

What changes something returns when it is durable. `dry_run=True` counts what would happen and does
nothing. A message can be named by its id, `skip("billing", "orders/7")`, or by topic and offsets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from onward.client.dead_calls import DeadCalls
from onward.client.finding import Moment, collect, parse_id, read_end
from onward.client.groups import (
    GroupStart,
    Offsets,
    as_names,
    as_ranges,
    in_parts,
    make_wish,
)
from onward.client.life_calls import LifeCalls
from onward.client.topics import read_start
from onward.delivery.ranges import Range, merged, offsets_of
from onward.delivery.record import Mode
from onward.delivery.retry import RetryPolicy
from onward.durations import Duration
from onward.errors import InvalidRequest
from onward.message.message import Message
from onward.message.relative import Relative
from onward.protocol.operations.group_moves import (
    PEEK_MAX,
    ForkGroup,
    PeekGroup,
    ReplayMessages,
    ResetGroup,
    SkipMessages,
)
from onward.protocol.operations.groups import (
    ChangeGroup,
    CreateGroup,
    DeleteGroup,
    DescribeGroup,
    GroupDescription,
    ListGroups,
    PauseGroup,
    ResumeGroup,
    SetMember,
)
from onward.protocol.payloads import Start

_PAGE = 500


class GroupCalls(DeadCalls, LifeCalls):
    """The calls of a client that are about groups."""

    async def groups(self, *, topic: str | None = None) -> list[GroupDescription]:
        """Return all groups in the order of their names; with `topic` only those that consume it.

        >>> import asyncio, onward
        >>> async def main() -> list[str]:
        ...     async with onward.connect("memory:") as mq:
        ...         await mq.create_topic("orders")
        ...         await mq.create_group("billing", "orders")
        ...         await mq.create_group("audit", "orders")
        ...         return [one.group for one in await mq.groups(topic="orders")]
        >>> asyncio.run(main())
        ['audit', 'billing']
        """
        groups: list[GroupDescription] = []
        after = ""
        while True:
            page = await self._call(ListGroups(after=after, limit=_PAGE, topic=topic or ""))
            groups += page.groups
            after = page.next
            if not after:
                return groups

    async def group(self, group: str) -> GroupDescription:
        """Return what there is to know of one group; `UnknownGroup` when there is none.

        >>> import asyncio, onward
        >>> async def main() -> int:
        ...     async with onward.connect("memory:") as mq:
        ...         await mq.publish_many("orders", [b"a", b"b"])
        ...         await mq.create_group("billing", "orders")
        ...         return (await mq.group("billing")).backlog
        >>> asyncio.run(main())
        2
        """
        return await self._call(DescribeGroup(group=group))

    async def create_group(
        self,
        group: str,
        topics: str | Sequence[str],
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
        exist_ok: bool = False,
    ) -> GroupDescription:
        """Create a group. Consuming creates one by itself; this sets how it is to be.

        With `expires_idle` it is deleted when it has had no member for so long.
        With `exist_ok` a group that exists with these topics and settings is returned;
        `AlreadyExists` if it is different.

        >>> import asyncio, onward
        >>> async def main() -> str:
        ...     async with onward.connect("memory:") as mq:
        ...         await mq.create_topic("orders")
        ...         group = await mq.create_group("billing", "orders", mode="ordered", lease="1m")
        ...         return f"{group.mode}, {group.lease_ms} ms"
        >>> asyncio.run(main())
        'ordered, 60000 ms'
        """
        wish = make_wish(
            mode=mode, start=start, retry=retry,
            at_most_once=at_most_once, lease=lease, lease_ms=lease_ms, tags=tags,
            all_tags=all_tags, headers=headers, priorities=priorities, tenants=tenants,
            key_rate=key_rate, key_concurrency=key_concurrency,
            expires_idle=expires_idle, expires_idle_ms=expires_idle_ms,
        )  # fmt: skip
        return await self._call(
            CreateGroup(group=group, topics=tuple(as_names(topics)), wish=wish, exist_ok=exist_ok)
        )

    async def change_group(
        self,
        group: str,
        *,
        mode: Mode | None = None,
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
        add_topics: str | Sequence[str] = (),
        remove_topics: str | Sequence[str] = (),
    ) -> GroupDescription:
        """Change what is given, leave the rest. Members that are there go on with the new settings.

        What `remove_topics` names is consumed no more: how far the group was, its retries and its
        dead letters of these topics are forgotten, and leases on their messages are lost.

        Members of a broadcast read by themselves: they are told a new filter or a new retry policy,
        and it holds for all that is published from then on.

        >>> import asyncio, onward
        >>> async def main() -> int:
        ...     async with onward.connect("memory:") as mq:
        ...         await mq.create_topic("orders")
        ...         await mq.create_group("billing", "orders")
        ...         await mq.change_group("billing", retry="fixed:10s:5")
        ...         return (await mq.group("billing")).retry.limit
        >>> asyncio.run(main())
        5
        """
        wish = make_wish(
            mode=mode, retry=retry, at_most_once=at_most_once,
            lease=lease, lease_ms=lease_ms, tags=tags, all_tags=all_tags, headers=headers,
            priorities=priorities, tenants=tenants, key_rate=key_rate,
            key_concurrency=key_concurrency,
            expires_idle=expires_idle, expires_idle_ms=expires_idle_ms,
        )  # fmt: skip
        return await self._call(
            ChangeGroup(
                group=group,
                wish=wish,
                topics_add=tuple(as_names(add_topics)) if add_topics else (),
                topics_remove=tuple(as_names(remove_topics)) if remove_topics else (),
            )
        )

    async def delete_group(self, group: str) -> None:
        """Delete a group: its members are told, its position and its dead letters are gone.

        >>> import asyncio, onward
        >>> async def main() -> int:
        ...     async with onward.connect("memory:") as mq:
        ...         await mq.create_topic("orders")
        ...         await mq.create_group("billing", "orders")
        ...         await mq.delete_group("billing")
        ...         return len(await mq.groups())
        >>> asyncio.run(main())
        0
        """
        await self._call(DeleteGroup(group=group))

    # --- stop and go -------------------------------------------------------------------------

    async def pause_group(self, group: str) -> None:
        """Deliver nothing more to this group until it is resumed; what is leased may be finished.

        A broadcast cannot be paused (`InvalidRequest`): its members read by themselves.

        >>> import asyncio, onward
        >>> async def main() -> bool:
        ...     async with onward.connect("memory:") as mq:
        ...         await mq.create_topic("orders")
        ...         await mq.create_group("billing", "orders")
        ...         await mq.pause_group("billing")
        ...         return (await mq.group("billing")).paused
        >>> asyncio.run(main())
        True
        """
        await self._call(PauseGroup(group=group))

    async def resume_group(self, group: str) -> None:
        """Deliver again to a group that was paused.

        >>> import asyncio, onward
        >>> async def main() -> bool:
        ...     async with onward.connect("memory:") as mq:
        ...         await mq.create_topic("orders")
        ...         await mq.create_group("billing", "orders")
        ...         await mq.pause_group("billing")
        ...         await mq.resume_group("billing")
        ...         return (await mq.group("billing")).paused
        >>> asyncio.run(main())
        False
        """
        await self._call(ResumeGroup(group=group))

    async def set_member(self, group: str, member: str, *, offline: bool) -> None:
        """Take one member out of a group, or let it in again. What it holds is given to others.

        >>> import asyncio, onward
        >>> async def main() -> tuple[str, ...]:
        ...     async with onward.connect("memory:") as mq:
        ...         await mq.create_topic("orders")
        ...         await mq.create_group("billing", "orders")
        ...         await mq.set_member("billing", "ann", offline=True)
        ...         return (await mq.group("billing")).offline
        >>> asyncio.run(main())
        ('ann',)
        """
        await self._call(SetMember(group=group, member=member, offline=offline))

    # --- moving around -----------------------------------------------------------------------

    async def reset_group(
        self, group: str, *, to: GroupStart, topic: str | None = None, dry_run: bool = False
    ) -> int:
        """Begin again at `to`, in one topic or all of them; return how many messages that makes.

        `to` is `"earliest"`, `"latest"`, an offset (of one topic), a time, or how long ago
        (`"10m"`). Attempts, retries and dead letters from there on are forgotten; what is leased
        is void.

        >>> import asyncio, onward
        >>> async def main() -> list[int]:
        ...     async with onward.connect("memory:") as mq:
        ...         await mq.publish_many("orders", [b"a", b"b", b"c"])
        ...         await mq.create_group("billing", "orders", start="latest")
        ...         count = await mq.reset_group("billing", to=1)
        ...         return [count, (await mq.group("billing")).backlog]
        >>> asyncio.run(main())
        [2, 2]
        """
        where = read_start(to)
        self._check_relative(where)
        reply = await self._call(
            ResetGroup(group=group, to=where, topic=topic or "", dry_run=dry_run)
        )
        return reply.count

    async def skip(
        self, group: str, topic: str, offsets: Offsets | None = None, *, dry_run: bool = False
    ) -> int:
        """Count messages as finished without delivering them; return how many were not already.

        >>> import asyncio, onward
        >>> async def main() -> list[int]:
        ...     async with onward.connect("memory:") as mq:
        ...         await mq.publish_many("orders", [b"a", b"b", b"c"])
        ...         await mq.create_group("billing", "orders")
        ...         return [await mq.skip("billing", "orders/0"),
        ...                 await mq.skip("billing", "orders", range(0, 2))]
        >>> asyncio.run(main())
        [1, 1]
        """
        topic, ranges = _place(topic, offsets)
        requests = [
            SkipMessages(group=group, topic=topic, ranges=part, dry_run=dry_run)
            for part in in_parts(ranges)
        ]
        return sum([(await self._call(request)).count for request in requests])

    async def replay(
        self,
        group: str,
        topic: str,
        offsets: Offsets | None = None,
        *,
        start: Moment | None = None,
        end: Moment | None = None,
        dry_run: bool = False,
    ) -> int:
        """Deliver finished messages once more to this group; return how many.

        Say which by id (`"orders/7"`), by offsets, or by `start` and `end` (times, or how long
        ago: `start="1h", end="10m"`; `end` is now when it is left out).

        >>> import asyncio, onward
        >>> async def main() -> int:
        ...     async with onward.connect("memory:") as mq:
        ...         await mq.publish_many("orders", [b"a", b"b", b"c"])
        ...         await mq.create_group("billing", "orders", start="latest")
        ...         return await mq.replay("billing", "orders", [0, 2], dry_run=True)
        >>> asyncio.run(main())
        2
        """
        if start is None and end is None:
            topic, ranges = _place(topic, offsets)
            requests = [
                ReplayMessages(group=group, topic=topic, ranges=part, dry_run=dry_run)
                for part in in_parts(ranges)
            ]
            return sum([(await self._call(request)).count for request in requests])
        if offsets is not None or start is None:
            raise InvalidRequest("a replay is told offsets, or from 'start' to 'end'")
        from_ms, to_ms = self._window(start, end)
        request = ReplayMessages(
            group=group, topic=topic, from_ms=from_ms, to_ms=to_ms, dry_run=dry_run
        )
        return (await self._call(request)).count

    async def fork_group(self, group: str, to: str) -> GroupDescription:
        """Make a group `to` that is where `group` is now, for a trial; return it.

        >>> import asyncio, onward
        >>> async def main() -> int:
        ...     async with onward.connect("memory:") as mq:
        ...         await mq.publish_many("orders", [b"a", b"b", b"c"])
        ...         await mq.create_group("billing", "orders", start=2)
        ...         return (await mq.fork_group("billing", "trial")).backlog
        >>> asyncio.run(main())
        1
        """
        await self._call(ForkGroup(group=group, to=to))
        return await self.group(to)

    async def peek(self, group: str, topic: str, *, n: int = 10) -> list[Message]:
        """Return the messages that would be delivered next, without delivering them.

        What the group's filter drops is left out, and a group that chooses gives them in the order
        of its choice; both as far as the broker looks ahead: 65,536 messages that wait.

        >>> import asyncio, onward
        >>> async def main() -> list[bytes]:
        ...     async with onward.connect("memory:") as mq:
        ...         await mq.publish_many("orders", [b"a", b"b", b"c"])
        ...         await mq.create_group("billing", "orders", start=1)
        ...         return [message.body for message in await mq.peek("billing", "orders", n=1)]
        >>> asyncio.run(main())
        [b'b']
        """
        if type(n) is not int or not 1 <= n <= PEEK_MAX:
            raise InvalidRequest(f"a peek is for 1 to {PEEK_MAX} messages, not {n!r:.40}")
        ranges = (await self._call(PeekGroup(group=group, topic=topic, limit=n))).ranges
        first_offset = await self._first_kept(topic)
        # In the order of a choice nearly every message is a range of its own.
        found = collect(self._reader_at, topic, merged(ranges), first_offset=first_offset)
        messages = {message.offset: message async for message in found}
        return [messages[one] for one in offsets_of(ranges) if one in messages][:n]

    # --- inside ------------------------------------------------------------------------------

    def _window(
        self, start: Moment, end: Moment | None
    ) -> tuple[int | Relative, int | Relative | None]:
        """Return from when to when the messages of a replay were published."""
        begins = start if isinstance(start, str | datetime | timedelta) else None
        first, last = None if begins is None else read_start(begins), read_end(end)
        if not isinstance(first, Start) or first.time_ms is None or last.offset is not None:
            raise InvalidRequest("'start' and 'end' of a replay are times, or how long ago")
        self._check_relative(first, last)
        return first.time_ms, last.time_ms


def _place(topic: str, offsets: Offsets | None) -> tuple[str, list[Range]]:
    """Return topic and ranges, from an id or from both."""
    if offsets is None:
        topic, offset = parse_id(topic)
        return topic, [(offset, offset + 1)]
    return topic, as_ranges(offsets)
