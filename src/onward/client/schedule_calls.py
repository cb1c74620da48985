"""What a program can ask of the schedule: cancel, move, look, list, the calendar, recurring ones.

    one message   cancel_scheduled, reschedule, scheduled      by its id or its business key
    many          list_scheduled, calendar                     by topic, key and time
    recurring     set_recurring, recurring, pause_recurring, resume_recurring, delete_recurring

What changes something returns when it is durable. Answers are exact: `cancelled` never fires, and
`fired` is in its topic. Cancelling by id may be repeated: it answers the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from msgspec.structs import replace

from onward.client.asking import Asking
from onward.client.bodies import encode_body
from onward.client.message_parts import joined_tags, optional_parts
from onward.client.schedule_times import (
    DAY_MS,
    Ahead,
    At,
    Delays,
    Times,
    When,
    ahead_ms,
    check_replace,
    check_unique,
    due_each,
    due_ms,
    due_of,
    moment_ms,
    step_for,
)
from onward.client.scheduled import REPLACE_WAITING, ScheduledReceipt, schedule_id
from onward.durations import Duration, either_ms
from onward.errors import InvalidRequest, ProtocolError
from onward.message.names import check_topic_name
from onward.message.relative import Relative, resolve_ms
from onward.message.texts import check_text
from onward.protocol.operations.schedule import (
    CANCELLED_MAX,
    LIST_PAGE_MAX,
    CalendarDescription,
    CancelResult,
    CancelScheduled,
    DeleteRecurring,
    ListRecurring,
    ListScheduled,
    MoveResult,
    MoveScheduled,
    PauseRecurring,
    RecurringDescription,
    ResumeRecurring,
    ScheduledDescription,
    SetRecurring,
    ShowCalendar,
    ShowScheduled,
)

if TYPE_CHECKING:
    from onward.client.producer import Producer

ScheduleId = int | str | ScheduledReceipt

_UNIQUES_MAX = 4_000
"""Business keys are longer than numbers: fewer of them fit into a frame."""


class ScheduleCalls(Asking):
    """The calls of a client that are about the schedule."""

    async def cancel_scheduled(
        self,
        ids: ScheduleId | Iterable[ScheduleId] | None = None,
        *,
        unique: str | Iterable[str] | None = None,
        cause: str = "",
    ) -> list[CancelResult]:
        """Let messages never fire; return for each one whether that was in time.

        The results have the order of what was named; what is named twice counts once.

        >>> import asyncio, onward
        >>> async def main() -> list[str]:
        ...     async with onward.connect("memory:") as mq:
        ...         await mq.publish("reminders", "pay", delay="45m", unique="order-7")
        ...         results = await mq.cancel_scheduled(unique=["order-7", "order-8"])
        ...         return [result.state for result in results]
        >>> asyncio.run(main())
        ['cancelled', 'not_found']
        """
        if (ids is None) == (unique is None):
            raise InvalidRequest("say what to cancel: either ids or unique")
        if ids is not None:
            numbers = list(dict.fromkeys(map(schedule_id, _several(ids))))
            return await self._cancel(
                CancelScheduled(ids=numbers[first : first + CANCELLED_MAX], cause=cause)
                for first in range(0, len(numbers), CANCELLED_MAX)
            )
        uniques = list(dict.fromkeys(_several(unique)))
        for one in uniques:
            check_unique(one)
        results = await self._cancel(
            CancelScheduled(uniques=uniques[first : first + _UNIQUES_MAX], cause=cause)
            for first in range(0, len(uniques), _UNIQUES_MAX)
        )
        return [replace(one, unique=name) for one, name in zip(results, uniques, strict=True)]

    async def reschedule(
        self,
        id: ScheduleId | None = None,  # noqa: A002  # it is what people call it
        *,
        unique: str | None = None,
        at: At | None = None,
        delay: Duration | None = None,
        delay_ms: int | None = None,
    ) -> MoveResult:
        """Let a message fire at another time; it gets a new id, which the result names.

        >>> import asyncio, onward
        >>> async def main() -> str:
        ...     async with onward.connect("memory:") as mq:
        ...         await mq.publish("reminders", "pay", delay="45m", unique="order-7")
        ...         return (await mq.reschedule(unique="order-7", delay="2h")).state
        >>> asyncio.run(main())
        'moved'
        """
        at_ms = due_ms(delay, delay_ms, at)
        self._check_relative(at_ms)
        number = _named(id, unique)
        reply = await self._call(MoveScheduled(at_ms=at_ms, id=number, unique=unique))
        (result,) = reply.results
        return result

    async def scheduled(
        self,
        id: ScheduleId | None = None,  # noqa: A002  # it is what people call it
        *,
        unique: str | None = None,
    ) -> ScheduledDescription:
        """Return what became of a scheduled message; its state may be `not_found`.

        >>> import asyncio, onward
        >>> async def main() -> tuple[str, bytes]:
        ...     async with onward.connect("memory:") as mq:
        ...         await mq.publish("reminders", "pay", delay="45m", unique="order-7")
        ...         found = await mq.scheduled(unique="order-7")
        ...         return found.state, found.body
        >>> asyncio.run(main())
        ('waiting', b'pay')
        """
        return await self._call(ShowScheduled(id=_named(id, unique), unique=unique))

    async def list_scheduled(
        self,
        *,
        topic: str | None = None,
        key: str | None = None,
        start: Ahead | None = None,
        end: Ahead | None = None,
    ) -> AsyncGenerator[ScheduledDescription]:
        """Give what waits, for `async for`, in the order in which it fires.

        `start` and `end` are times, or how far from now: `end="1h"` is what fires within an hour.

        >>> import asyncio, onward
        >>> async def main() -> list[str | None]:
        ...     async with onward.connect("memory:") as mq:
        ...         await mq.publish("reminders", "later", delay="2h", key="a")
        ...         await mq.publish("reminders", "sooner", delay="1h", key="b")
        ...         return [one.key async for one in mq.list_scheduled(topic="reminders")]
        >>> asyncio.run(main())
        ['b', 'a']
        """
        request = ListScheduled(
            topic=topic or "",
            key=key or "",
            from_ms=None if start is None else ahead_ms(start),
            until_ms=None if end is None else ahead_ms(end),
            limit=LIST_PAGE_MAX,
        )
        self._check_relative(request.from_ms, request.until_ms)
        while True:
            page = await self._call(request)
            for scheduled in page.scheduled:
                yield scheduled
            if page.next is None:
                return
            # The first page has resolved the times that are relative to now; the others keep them.
            request = replace(
                request,
                after=page.next,
                from_ms=request.from_ms if page.from_ms is None else page.from_ms,
                until_ms=request.until_ms if page.until_ms is None else page.until_ms,
            )

    async def calendar(
        self,
        *,
        start: Ahead | None = None,
        end: Ahead | None = None,
        step: Duration | None = None,
        step_ms: int | None = None,
        topic: str | None = None,
    ) -> CalendarDescription:
        """Return how many messages fire when: from now for a day, in steps that fit.

        `start` and `end` are times, or how far from now. The first bar begins at a whole step.

        >>> import asyncio, onward
        >>> async def main() -> tuple[int, dict[str, int]]:
        ...     async with onward.connect("memory:") as mq:
        ...         await mq.publish_many("reminders", ["a", "b"], delay=["1h", "5h"])
        ...         calendar = await mq.calendar(end="6h")
        ...         return len(calendar.bars), calendar.topics
        >>> asyncio.run(main())
        (2, {'reminders': 2})
        """
        now_ms = self._clock.now_ms()
        # A person looks at it, beside a clock of their own: it is drawn by this machine's.
        start_ms = resolve_ms(ahead_ms("now" if start is None else start), now_ms=now_ms)
        end_ms = start_ms + DAY_MS if end is None else resolve_ms(ahead_ms(end), now_ms=now_ms)
        if end_ms <= start_ms:
            raise InvalidRequest("a calendar ends after it begins")
        step_ms = either_ms("step", step, step_ms)
        if step_ms is None:
            step_ms = step_for(end_ms - start_ms)
        if step_ms < 1_000:
            raise InvalidRequest("a step of the calendar is at least a second")
        start_ms -= start_ms % step_ms
        counts = await self._call(
            ShowCalendar(from_ms=start_ms, until_ms=end_ms, step_ms=step_ms, topic=topic or "")
        )
        return CalendarDescription(
            start_ms=start_ms,
            end_ms=end_ms,
            step_ms=step_ms,
            bars=counts.bars,
            topics=counts.topics,
            is_exact=counts.is_exact,
        )

    # --- recurring ---------------------------------------------------------------------------

    async def set_recurring(
        self,
        name: str,
        topic: str,
        body: object,
        *,
        cron: str | None = None,
        zone: str = "UTC",
        every: Duration | None = None,
        every_ms: int | None = None,
        catch_up: Literal["one", "none"] = "one",
        start: At | None = None,
        paused: bool = False,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        tag: str | Sequence[str] | None = None,
        trace_id: str | None = None,
        priority: int = 0,
        tenant: str | None = None,
    ) -> RecurringDescription:
        """Publish a message again and again: by cron in a time zone, or every so often.

        A schedule of the same name is replaced. Of the runs that a broker missed the latest is made
        up for (`catch_up="one"`), or none.

        >>> import asyncio, onward
        >>> async def main() -> str:
        ...     async with onward.connect("memory:") as mq:
        ...         await mq.set_recurring(
        ...             "report", "reports", "daily", cron="0 9 * * MON-FRI", zone="Europe/Berlin"
        ...         )
        ...         return (await mq.recurring())[0].cron
        >>> asyncio.run(main())
        '0 9 * * MON-FRI'
        """
        every_ms = either_ms("every", every, every_ms)
        if (cron is None) == (every_ms is None):
            raise InvalidRequest("say when it comes again: either cron or every")
        if catch_up not in ("one", "none"):
            raise InvalidRequest(f"catch_up is one or none, not {str(catch_up)[:40]!r}")
        check_topic_name(topic)
        check_text("name", name)
        optional_parts(key, headers, tag, trace_id, priority, tenant)
        if not all(isinstance(value, str) for value in (headers or {}).values()):
            raise InvalidRequest("headers of a recurring schedule are text")
        return await self._call(
            SetRecurring(
                name=name,
                topic=topic,
                body=encode_body(body),
                key=key,
                headers=None if headers is None else dict(headers),
                tag=joined_tags(tag),
                trace_id=trace_id,
                priority=priority,
                tenant=tenant,
                cron=cron or "",
                zone=zone,
                every_ms=every_ms or 0,
                catch_up=catch_up,
                start_ms=0 if start is None else moment_ms(start),
                paused=paused,
            )
        )

    async def recurring(self) -> list[RecurringDescription]:
        """Return all recurring schedules in the order of their names.

        >>> import asyncio, onward
        >>> async def main() -> list[str]:
        ...     async with onward.connect("memory:") as mq:
        ...         await mq.set_recurring("tick", "ticks", "", every="1h")
        ...         return [one.name for one in await mq.recurring()]
        >>> asyncio.run(main())
        ['tick']
        """
        return (await self._call(ListRecurring())).recurring

    async def pause_recurring(self, name: str) -> RecurringDescription:
        """Let a recurring schedule have no runs until it is resumed.

        >>> import asyncio, onward
        >>> async def main() -> bool:
        ...     async with onward.connect("memory:") as mq:
        ...         await mq.set_recurring("tick", "ticks", "", every="1h")
        ...         return (await mq.pause_recurring("tick")).paused
        >>> asyncio.run(main())
        True
        """
        return await self._call(PauseRecurring(name=name))

    async def resume_recurring(self, name: str) -> RecurringDescription:
        """Let a paused recurring schedule have runs again.

        >>> import asyncio, onward
        >>> async def main() -> bool:
        ...     async with onward.connect("memory:") as mq:
        ...         await mq.set_recurring("tick", "ticks", "", every="1h", paused=True)
        ...         return (await mq.resume_recurring("tick")).paused
        >>> asyncio.run(main())
        False
        """
        return await self._call(ResumeRecurring(name=name))

    async def delete_recurring(self, name: str) -> None:
        """Let a recurring schedule have no runs any more, and forget it.

        >>> import asyncio, onward
        >>> async def main() -> int:
        ...     async with onward.connect("memory:") as mq:
        ...         await mq.set_recurring("tick", "ticks", "", every="1h")
        ...         await mq.delete_recurring("tick")
        ...         return len(await mq.recurring())
        >>> asyncio.run(main())
        0
        """
        await self._call(DeleteRecurring(name=name))

    # --- inside ------------------------------------------------------------------------------

    def _schedule(
        self, producer: Producer, topic: str, body: bytes, durability: int,
        optional: dict[str, object] | None, when: When,
    ) -> asyncio.Future[ScheduledReceipt]:  # fmt: skip
        """Hand one message that is to wait to the producer."""
        due = due_of(when)
        check_topic_name(topic)
        self._check_relative(due.at_ms)
        columns = (optional or {}) | {"topics": topic}
        if isinstance(due.at_ms, Relative):
            columns["delays_ms"] = due.at_ms.in_ms
        else:
            columns["due_at_ms"] = due.at_ms
        if due.unique is not None:
            columns["uniques"] = due.unique
        if due.replace:
            columns["replaces"] = REPLACE_WAITING
        return producer.schedule(body, durability=durability, optional=columns, calls=self)

    def _schedule_columns(
        self, topic: str, delay: Delays | None, delay_ms: int | Sequence[int] | None,
        at: Times | None, uniques: Sequence[str | None] | None, *, replace: bool, count: int,
    ) -> dict[str, Sequence[object]]:  # fmt: skip
        """Return what a batch says of its messages when they are to wait; else nothing."""
        if delay is None and delay_ms is None and at is None:
            if uniques is not None or replace:
                raise InvalidRequest("uniques and replace need a time: say delay or at")
            return {}
        check_replace(replace, has_unique=uniques is not None)
        column, times_ms = due_each(delay, delay_ms, at, count=count)
        if column == "delays_ms":
            self._check_relative(Relative(0))
        columns: dict[str, Sequence[object]] = {"topics": [topic] * count, column: times_ms}
        if replace and uniques is not None:
            columns["replaces"] = [None if one is None else REPLACE_WAITING for one in uniques]
        return columns

    async def _cancel(self, pages: Iterable[CancelScheduled]) -> list[CancelResult]:
        """Cancel page by page; a later error leaves the pages before it cancelled."""
        results: list[CancelResult] = []
        for page in pages:
            reply = await self._call(page)
            count = len(page.ids) + len(page.uniques)
            if len(reply.results) != count:
                raise ProtocolError(f"{len(reply.results)} answers to {count} cancels")
            results += reply.results
        return results


def _several(given: Any) -> Iterable[Any]:
    """Return one, or several, as several."""
    if isinstance(given, str | ScheduledReceipt) or not isinstance(given, Iterable):
        return (given,)
    return given


def _named(given: ScheduleId | None, unique: str | None) -> int | None:
    """Return the number of a message, or None if its business key is given instead."""
    if (given is None) == (unique is None):
        raise InvalidRequest("name either an id or a unique key")
    check_unique(unique)
    return None if given is None else schedule_id(given)
