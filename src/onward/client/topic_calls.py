"""What a program can ask about topics: create, change, delete, describe, list.

What changes something returns when it is durable. Publishing creates a topic by itself.
"""

from __future__ import annotations

from datetime import datetime

from onward.client.asking import Asking
from onward.client.topics import instant_ms
from onward.durations import Duration, either_ms
from onward.errors import UnknownTopic
from onward.protocol.operations.topics import (
    LIST_LIMIT_MAX,
    ChangeTopic,
    CreateTopic,
    DeleteTopic,
    DescribeTopic,
    ListTopics,
    Rule,
    TopicDescription,
)


class TopicCalls(Asking):
    """The calls of a client that are about topics."""

    async def create_topic(
        self,
        topic: str,
        *,
        lifetime: Duration | None = None,
        lifetime_ms: int | None = None,
        expires_at: datetime | int | None = None,
        rule: Rule = "read-write",
        message_bytes_max: int = 0,
        retention: Duration | None = None,
        retention_ms: int | None = None,
        retention_bytes: int = 0,
        retention_group: str = "",
        keep_unfinished: bool = False,
        expires_idle: Duration | None = None,
        expires_idle_ms: int | None = None,
        exist_ok: bool = False,
    ) -> TopicDescription:
        """Create a topic. Publishing creates one by itself; this sets how it is to be.

        It lives for ever, or for a `lifetime`, or until `expires_at`. What `retention_group` has
        not finished is never removed, even before that group exists; with `keep_unfinished`, what
        any group has not finished. With `expires_idle` it ends when nobody has used it for so long
        and nothing in it is unread or scheduled.

        >>> import asyncio
        >>> from onward import connect
        >>> async def main() -> str:
        ...     async with connect("memory:") as mq:
        ...         return (await mq.create_topic("orders", lifetime="1h")).state
        >>> asyncio.run(main())
        'active'
        """
        return await self._call(
            CreateTopic(
                topic=topic,
                exist_ok=exist_ok,
                expires_at_ms=None if expires_at is None else instant_ms(expires_at),
                lifetime_ms=either_ms("lifetime", lifetime, lifetime_ms),
                rule=rule,
                message_bytes_max=message_bytes_max,
                retention_ms=either_ms("retention", retention, retention_ms, default=0),
                retention_bytes=retention_bytes,
                retention_group=retention_group,
                keep_unfinished=keep_unfinished,
                expires_idle_ms=either_ms("expires_idle", expires_idle, expires_idle_ms, default=0),
            )
        )

    async def change_topic(
        self,
        topic: str,
        *,
        lifetime: Duration | None = None,
        lifetime_ms: int | None = None,
        expires_at: datetime | int | None = None,
        rule: Rule | None = None,
        message_bytes_max: int | None = None,
        retention: Duration | None = None,
        retention_ms: int | None = None,
        retention_bytes: int | None = None,
        retention_group: str | None = None,
        keep_unfinished: bool | None = None,
        expires_idle: Duration | None = None,
        expires_idle_ms: int | None = None,
    ) -> TopicDescription:
        """Change what is given, leave the rest.

        `expires_at=0` lets a topic live for ever, `retention_group=""` waits for no group.

        >>> import asyncio
        >>> from onward import connect
        >>> async def main() -> str:
        ...     async with connect("memory:") as mq:
        ...         await mq.create_topic("orders")
        ...         return (await mq.change_topic("orders", rule="read-only")).rule
        >>> asyncio.run(main())
        'read-only'
        """
        return await self._call(
            ChangeTopic(
                topic=topic,
                expires_at_ms=None if expires_at is None else instant_ms(expires_at),
                lifetime_ms=either_ms("lifetime", lifetime, lifetime_ms),
                rule=rule,
                message_bytes_max=message_bytes_max,
                retention_ms=either_ms("retention", retention, retention_ms),
                retention_bytes=retention_bytes,
                retention_group=retention_group,
                keep_unfinished=keep_unfinished,
                expires_idle_ms=either_ms("expires_idle", expires_idle, expires_idle_ms),
            )
        )

    async def delete_topic(self, topic: str) -> None:
        """End a topic now: its readers are told, its name is free, its space comes back.

        >>> import asyncio
        >>> from onward import connect
        >>> async def main() -> list[str]:
        ...     async with connect("memory:") as mq:
        ...         await mq.create_topic("orders")
        ...         await mq.delete_topic("orders")
        ...         return [one.topic for one in await mq.topics()]
        >>> asyncio.run(main())
        []
        """
        await self._call(DeleteTopic(topic=topic))

    async def topic(self, topic: str) -> TopicDescription:
        """Return what there is to know of one topic; `UnknownTopic` when there is none.

        >>> import asyncio
        >>> from onward import connect
        >>> async def main() -> int:
        ...     async with connect("memory:") as mq:
        ...         await mq.publish_many("orders", [b"a", b"b"])
        ...         return (await mq.topic("orders")).messages
        >>> asyncio.run(main())
        2
        """
        return await self._call(DescribeTopic(topic=topic))

    async def has_topic(self, topic: str) -> bool:
        """Tell whether a topic exists.

        >>> import asyncio
        >>> from onward import connect
        >>> async def main() -> bool:
        ...     async with connect("memory:") as mq:
        ...         return await mq.has_topic("orders")
        >>> asyncio.run(main())
        False
        """
        try:
            await self.topic(topic)
        except UnknownTopic:
            return False
        return True

    async def topics(self, *, prefix: str = "", ended: bool = False) -> list[TopicDescription]:
        """Return all topics in the order of their names; `ended` adds behind them what is no more.

        >>> import asyncio
        >>> from onward import connect
        >>> async def main() -> list[str]:
        ...     async with connect("memory:") as mq:
        ...         await mq.create_topic("orders.paid")
        ...         await mq.create_topic("orders.new")
        ...         return [one.topic for one in await mq.topics(prefix="orders.")]
        >>> asyncio.run(main())
        ['orders.new', 'orders.paid']
        """
        active: list[TopicDescription] = []
        gone: list[TopicDescription] = []
        after = ""
        while True:
            page = await self._call(
                ListTopics(prefix=prefix, after=after, limit=LIST_LIMIT_MAX, all=ended)
            )
            active += page.topics
            gone += page.ended
            after = page.next
            if not after:
                return active + sorted(gone, key=lambda topic: (topic.topic, topic.number))
