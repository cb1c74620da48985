"""What a program can ask of all that a group has to do, scheduled messages included.

    ready ──purge_ready──▶ finished          scheduled ──purge_ready(scheduled=True)──▶ cancelled
    group_counts: how many are ready, leased, retrying and scheduled

Both schedule and groups are asked here, so these calls stand beside the calls of each.
"""

from __future__ import annotations

from onward.client.group_calls import GroupCalls
from onward.client.life_calls import RECURRING
from onward.client.schedule_calls import ScheduleCalls
from onward.protocol.operations.group_moves import PurgeReady
from onward.protocol.operations.groups import CountGroup, GroupCounts

_CANCELLED_AT_ONCE = 1_000
PURGED = "purged by an operator"


class BacklogCalls(GroupCalls, ScheduleCalls):
    """The calls of a client that are about groups and their scheduled messages."""

    async def purge_ready(
        self,
        group: str,
        topic: str | None = None,
        *,
        scheduled: bool = False,
        dry_run: bool = False,
    ) -> int:
        """Finish all that is ready without delivering it, in one topic or all; return how many.

        What a member holds and what waits for a retry stays. With `scheduled` the scheduled
        messages of these topics are cancelled as well, for every group; recurring schedules stay.

        >>> import asyncio, onward
        >>> async def main() -> list[int]:
        ...     async with onward.connect("memory:") as mq:
        ...         await mq.publish_many("orders", [b"a", b"b", b"c"])
        ...         await mq.publish("orders", b"d", delay="1h")
        ...         await mq.create_group("billing", "orders")
        ...         return [await mq.purge_ready("billing"),
        ...                 await mq.purge_ready("billing", scheduled=True)]
        >>> asyncio.run(main())
        [3, 1]
        """
        count = 0
        if scheduled:
            # Asked first, so that a group or topic that does not exist cancels nothing.
            await self._call(PurgeReady(group=group, topic=topic or "", dry_run=True))
            topics = [topic] if topic else [one.topic for one in (await self.group(group)).topics]
            # Before what is ready: what fires meanwhile is ready then.
            for name in topics:
                count += await self._purge_scheduled(name, dry_run=dry_run)
        reply = await self._call(PurgeReady(group=group, topic=topic or "", dry_run=dry_run))
        return count + reply.count

    async def group_counts(self, group: str) -> GroupCounts:
        """Return what is ready, leased, retrying and scheduled for a group, from one moment.

        >>> import asyncio, onward
        >>> async def main() -> tuple[int, int, bool]:
        ...     async with onward.connect("memory:") as mq:
        ...         await mq.publish_many("orders", [b"a", b"b"])
        ...         await mq.publish("orders", b"c", delay="1h")
        ...         await mq.create_group("billing", "orders")
        ...         counts = await mq.group_counts("billing")
        ...         return counts.ready, counts.scheduled, counts.is_empty
        >>> asyncio.run(main())
        (2, 1, False)
        """
        return await self._call(CountGroup(group=group))

    async def _purge_scheduled(self, topic: str, *, dry_run: bool) -> int:
        count = 0
        page: list[int] = []
        async for one in self.list_scheduled(topic=topic):
            if not (one.unique or "").startswith(RECURRING):
                page.append(one.id)
            if len(page) >= _CANCELLED_AT_ONCE:
                count += await self._count_cancelled(page, dry_run=dry_run)
                page = []
        return count + await self._count_cancelled(page, dry_run=dry_run)

    async def _count_cancelled(self, ids: list[int], *, dry_run: bool) -> int:
        if dry_run or not ids:
            return len(ids)
        results = await self.cancel_scheduled(ids, cause=PURGED)
        return sum(result.state == "cancelled" for result in results)
