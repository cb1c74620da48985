"""What a program can ask of a group as one of its members: `consume`, `fetch`.

Both give a `Consumer` its place in a group; what it does there is said in `client.consumer`. A
consumer that is still open when the client closes leaves its group then.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import cached_property

import msgspec

from onward.client.asking import Asking
from onward.client.consumer import Consumer
from onward.client.delivery import Delivery
from onward.client.groups import as_names, make_wish
from onward.delivery.record import Mode
from onward.delivery.retry import RetryPolicy
from onward.durations import Duration
from onward.errors import InvalidRequest
from onward.message.names import check_group_name, check_member_name, check_topic_name
from onward.protocol.deliveries import Consume

FETCHERS_MAX = 1_000


class Consumers:
    """The consumers of one client."""

    def __init__(self) -> None:
        self.count = 0
        # A dictionary for its order: the simulator replays a run from its seed.
        self.all: weakref.WeakKeyDictionary[Consumer, None] = weakref.WeakKeyDictionary()
        self.fetchers: dict[tuple[tuple[str, ...], str], Consumer] = {}

    async def close(self) -> None:
        """Let all of them leave their groups."""
        self.fetchers.clear()
        await asyncio.gather(*[consumer.aclose() for consumer in list(self.all)])


class ConsumeCalls(Asking):
    """The calls of a client that make it a member of groups."""

    _name: str
    _producer_id: int

    @cached_property
    def _consumers(self) -> Consumers:
        return Consumers()

    def consume(
        self,
        topics: str | Sequence[str] | None = None,
        *,
        group: str,
        mode: Mode | None = None,
        start: str | int | datetime | timedelta | None = None,
        member: str | None = None,
        credit: int | None = None,
        lease: Duration | None = None,
        lease_ms: int | None = None,
        retry: RetryPolicy | str | None = None,
        tags: str | Sequence[str] | None = None,
        all_tags: str | Sequence[str] | None = None,
        headers: Mapping[str, str] | None = None,
        at_most_once: bool | None = None,
        priorities: bool | None = None,
        tenants: Mapping[str, float] | None = None,
        key_rate: float | None = None,
        key_concurrency: int | None = None,
        expires_idle: Duration | None = None,
        expires_idle_ms: int | None = None,
        refuse: bool = False,
        apply: bool = False,
        position: str | os.PathLike[str] | None = None,
    ) -> Consumer:
        """Return a member of a group, for `async for`: each message goes to one of the members.

        The group is created by its first member. What is given here besides `member`, `credit`,
        `refuse`, `apply` and `position` are settings of the group: a group that has other ones
        refuses the member (`Conflict`), or gets these with `apply`; a member that says nothing
        joins it as it is. `mode` is `"shared"`,
        `"exclusive"` (one active member; with `refuse` another one is refused instead of standing
        by), `"ordered"` (by key) or `"broadcast"` (each member gets everything; `position` names a
        file that keeps how far this one is, else its broker keeps it under the name `member`).

        Without `topics` it joins a group that exists, gets all topics of it, and follows when
        some are added; in a broadcast it keeps to those of when it joined.

        Nothing is acked by itself, and leaving the loop leaves the group: see `onward.Delivery`.

        >>> from onward import connect
        >>> async def main() -> list[str]:
        ...     async with connect("memory:") as mq:
        ...         await mq.publish_many("orders", ["a", "b", "c"])
        ...         done = []
        ...         async for delivery in mq.consume("orders", group="billing", retry="fixed:1s:3"):
        ...             done.append(delivery.text)
        ...             await delivery.ack()
        ...             if len(done) == 3:
        ...                 break
        ...         return done
        >>> asyncio.run(main())
        ['a', 'b', 'c']
        """
        wish = make_wish(
            mode=mode, start=start, retry=retry, lease=lease,
            lease_ms=lease_ms, at_most_once=at_most_once, tags=tags, all_tags=all_tags,
            headers=headers, priorities=priorities, tenants=tenants, key_rate=key_rate,
            key_concurrency=key_concurrency, expires_idle=expires_idle,
            expires_idle_ms=expires_idle_ms,
        )  # fmt: skip
        names = () if topics is None else tuple(as_names(topics))
        check_group_name(group)
        for name in names:
            check_topic_name(name, system=True)
        if len(set(names)) < len(names):
            raise InvalidRequest(f"group {group!r}: a topic is named twice")
        if position is not None and mode not in (None, "broadcast"):
            raise InvalidRequest("a position is kept only by members of a broadcast")
        consume = Consume(
            group, names, self._new_member() if member is None else check_member_name(member),
            wish=msgspec.to_builtins(wish) or None, refuse=refuse,
            if_differs="apply" if apply else "refuse",
        )  # fmt: skip
        consumer = Consumer(
            self._keeper(), consume, timeout_s=self._timeout_s, credit=credit,
            clock=self._clock, is_named=member is not None,
            position=None if position is None else os.fspath(position),
        )  # fmt: skip
        self._consumers.all[consumer] = None
        return consumer

    async def fetch(
        self, topics: str | Sequence[str], *, group: str, n: int = 1,
        wait: Duration | None = None, wait_ms: int | None = None,
    ) -> list[Delivery]:  # fmt: skip
        """Return up to `n` messages for a group: as soon as there is one, none if none comes.

        It waits for a second unless told otherwise. The client stays a member of the group between
        the calls. Ack what you get.

        >>> from onward import connect
        >>> async def main() -> list[str]:
        ...     async with connect("memory:") as mq:
        ...         await mq.publish_many("orders", ["a", "b", "c"])
        ...         found = await mq.fetch("orders", group="billing", n=2)
        ...         for delivery in found:
        ...             await delivery.ack()
        ...         return [delivery.text for delivery in found]
        >>> asyncio.run(main())
        ['a', 'b']
        """
        key = tuple(as_names(topics)), check_group_name(group)
        fetchers = self._consumers.fetchers
        consumer = fetchers.get(key)
        if consumer is None:
            if len(fetchers) >= FETCHERS_MAX:
                raise InvalidRequest(f"a client fetches for at most {FETCHERS_MAX} groups")
            consumer = fetchers[key] = self.consume(list(key[0]), group=group)
        try:
            return await consumer.fetch(n, wait=wait, wait_ms=wait_ms)
        except BaseException:
            # Perhaps it can never join, or its membership has ended: the next one begins anew.
            if not consumer.is_joined and fetchers.get(key) is consumer:
                del fetchers[key]
            raise

    def _new_member(self) -> str:
        """Return a name that no other member has, in this process or elsewhere."""
        self._consumers.count += 1
        return f"{self._name[:80]}-{self._producer_id & 0xFFFF_FFFF:08x}-{self._consumers.count}"
