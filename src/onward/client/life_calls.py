"""Asking about messages: `find` them, and `explain` what happened to one.

Both only look. `find` reads the topic, so it costs what reading costs; `explain` reads the trace
from the message's event on, because nothing that concerns it can stand before it in the log. Of a
message that is gone it is read from when the topic was created on: rows before that are about
another topic, which had its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from onward.client.asking import Asking
from onward.client.explanation import Explanation, LifeStory, ScheduledOrigin
from onward.client.finding import (
    FIND_MAX,
    Moment,
    Wanted,
    check_wanted,
    collect,
    find_messages,
    parse_id,
    read_end,
)
from onward.client.topics import read_start
from onward.errors import Forbidden, InvalidRequest, OffsetOutOfRange, UnknownTopic
from onward.message.message import Message
from onward.message.names import check_topic_name
from onward.protocol.operations.messages import DescribeMessage
from onward.protocol.operations.schedule import SCHEDULE_TOPIC, ScheduledDescription, ShowScheduled
from onward.protocol.operations.status import ShowStatus
from onward.protocol.payloads import Start

TRACE = "@trace"

RECURRING = "@recurring/"
"""What the business keys of runs of recurring schedules begin with."""


class LifeCalls(Asking):
    """The calls of a client that ask about messages."""

    async def find(
        self,
        topic: str,
        *,
        key: str | None = None,
        trace_id: str | None = None,
        headers: Mapping[str, str | bytes] | None = None,
        text: str | bytes | None = None,
        start: Moment = "earliest",
        end: Moment | None = None,
        limit: int = 100,
    ) -> list[Message]:
        """Return the first messages of a topic that have all that is asked for.

        `text` is looked for in the body; `start` and `end` are offsets, times, or how long ago, and
        `end` itself is left out. Without anything to look for it browses. In place of a topic the
        id of one message (`"orders/7"`) gives that one.

        >>> import asyncio, onward
        >>> async def main() -> list[str]:
        ...     async with onward.connect("memory:") as mq:
        ...         await mq.publish_many("orders", ["red", "green", "red"], keys=["a", "b", "c"])
        ...         return [message.id for message in await mq.find("orders", text="red", key="c")]
        >>> asyncio.run(main())
        ['orders/2']
        """
        if "/" in topic:
            return [await self.get(*parse_id(topic))]
        check_topic_name(topic, system=True)
        if type(limit) is not int or not 1 <= limit <= FIND_MAX:
            raise InvalidRequest(f"find returns 1 to {FIND_MAX} messages, not {limit!r}")
        wanted = Wanted(key, trace_id, headers or None, text or None)
        check_wanted(wanted)
        until, begins = read_end(end), read_start(start)
        self._check_relative(begins)
        return await find_messages(
            self._reader(topic, begins), wanted, end=until, limit=limit,
            now_ms=self._clock.now_ms(),
        )  # fmt: skip

    async def explain(self, message_id: str) -> Explanation:
        """Return the life line of a message: published, stored, and how it went in every group.

        It can be told of messages that retention has taken away as well, as far as the trace
        reaches; of a message that was scheduled also who did that, and of an id of the schedule
        (`"@schedule/17"`) what became of it. `OffsetOutOfRange` when there never was such a
        message.

        >>> import asyncio, onward
        >>> async def main() -> str:
        ...     async with onward.connect("memory:") as mq:
        ...         await mq.publish("orders", "hello")
        ...         async for delivery in mq.consume("orders", group="billing", member="ann"):
        ...             await delivery.ack()
        ...             break
        ...         return (await mq.explain("orders/0")).group("billing").sentence()
        >>> asyncio.run(main())
        'acked by ann after ... ms'
        """
        topic, offset = parse_id(message_id)
        try:
            described = await self.topic(topic)
        except UnknownTopic:
            if topic != SCHEDULE_TOPIC:
                raise
            # The topic of the schedule exists from the first scheduled message on.
            raise OffsetOutOfRange(f"no message was ever scheduled as {message_id!r}") from None
        if offset >= described.next_offset:
            raise OffsetOutOfRange(
                f"there is no message {message_id!r}: the next offset of topic {topic!r} is "
                f"{described.next_offset}"
            )
        state = await self._call(DescribeMessage(topic=topic, offset=offset))
        message: Message | None = None
        try:
            message = await self.get(topic, offset)
        except OffsetOutOfRange:
            # Retention has dropped it; a group may still have it.
            if state.carried:
                message = await self._kept_message(topic, offset)
        status = await self._call(ShowStatus())
        story = LifeStory(topic, offset)
        created = Start(time_ms=described.created_at_ms)
        born = created if message is None else Start(event_id=message.event_id)
        is_complete = await self._read_trace(story, born, is_stored=message is not None)
        return Explanation(
            topic=topic, offset=offset, asked_at_ms=self._clock.now_ms(), message=message,
            node=status.node, durability=_durability(message, status.durable_event_id),
            published_by=state.published_by,
            producer_id=state.producer_id,
            groups=story.lives(
                state.groups, is_complete=is_complete, is_stored=message is not None
            ),
            is_complete=is_complete,
            scheduled=await self._scheduled_origin(message),
            became=await self._became(topic, offset),
        )  # fmt: skip

    async def _kept_message(self, topic: str, offset: int) -> Message | None:
        """Return a message that outlives retention for a group; None when it is gone."""
        found = collect(self._reader_at, topic, [(offset, offset + 1)], first_offset=0)
        return next(iter([message async for message in found]), None)

    async def _scheduled_origin(self, message: Message | None) -> ScheduledOrigin | None:
        """Return how a message came into the schedule; None when it never was there."""
        if message is None or message.schedule_id is None or message.due_at_ms is None:
            return None
        origin = ScheduledOrigin(
            schedule_id=message.schedule_id, due_at_ms=message.due_at_ms,
            fired_at_ms=message.published_at_ms,
        )  # fmt: skip
        request = DescribeMessage(topic=SCHEDULE_TOPIC, offset=origin.schedule_id)
        try:
            entry, unique = await self._schedule_entry(origin.schedule_id)
            state = await self._call(request)
        except (Forbidden, OffsetOutOfRange, UnknownTopic):
            return origin  # the schedule keeps its entries in the log only as long as it must
        return msgspec.structs.replace(
            origin, scheduled_at_ms=entry.published_at_ms, scheduled_by=state.published_by,
            recurring=unique.removeprefix(RECURRING) if unique.startswith(RECURRING) else "",
        )  # fmt: skip

    async def _schedule_entry(self, number: int) -> tuple[Message, str]:
        """Return a message as it was scheduled, and its business key."""
        batches = self._reader_at(SCHEDULE_TOPIC, number, 1).batches()
        try:
            async for batch in batches:
                if batch.first_offset == number:
                    uniques = batch.columns.uniques
                    unique = None if uniques is None else uniques[-batch.count]
                    return batch.messages()[0], unique or ""
                break
        finally:
            await batches.aclose()
        raise OffsetOutOfRange(f"entry {number} of the schedule is no longer stored")

    async def _became(self, topic: str, number: int) -> ScheduledDescription | None:
        if topic != SCHEDULE_TOPIC:
            return None
        return await self._call(ShowScheduled(id=number))

    async def _read_trace(self, story: LifeStory, start: Start, *, is_stored: bool) -> bool:
        """Take all rows since the message; tell whether they reach back to it."""
        try:
            first_offset = (await self.topic(TRACE)).first_offset
        except UnknownTopic:
            return True
        batches = self._reader(TRACE, start).batches()
        is_complete = is_stored or not first_offset
        try:
            async for batch in batches:
                if 0 < batch.first_offset == first_offset:
                    is_complete = False
                story.add(batch.bodies)
        finally:
            await batches.aclose()
        return is_complete


def _durability(message: Message | None, durable_event_id: int) -> Literal["disk", "memory", ""]:
    if message is None:
        return ""
    return "disk" if message.event_id <= durable_event_id else "memory"
