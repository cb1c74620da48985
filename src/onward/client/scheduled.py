"""Receipts of scheduled publishes, and the options that make a publish a scheduled one.

A scheduled message has an id before it has an offset: its number in the schedule, for people
`@schedule/17`. `protocol/operations/schedule.py` lists the states that it can have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Self, TypedDict

from onward.client.message_parts import Tags
from onward.client.receipt import BatchReceipt, DurabilityName
from onward.client.schedule_times import At, Delays, Times
from onward.durations import Duration
from onward.errors import InvalidRequest
from onward.protocol.operations.schedule import (
    SCHEDULE_TOPIC,
    CancelResult,
    MoveResult,
    ScheduledDescription,
)

REPLACE_WAITING = -1
"""In the column `replaces`: take the place of whatever waits under the same business key."""


def schedule_id(given: object) -> int:
    """Return the number of a scheduled message, from its id for people or as it is.

    >>> schedule_id("@schedule/17"), schedule_id("17"), schedule_id(17)
    (17, 17, 17)
    """
    given = getattr(given, "schedule_id", given)  # a receipt stands for its message
    if isinstance(given, str):
        digits = given.removeprefix(f"{SCHEDULE_TOPIC}/")
        if digits.isascii() and digits.isdecimal() and len(digits) <= 18:
            return int(digits)
    elif isinstance(given, int) and not isinstance(given, bool) and 0 <= given < 10**18:
        return given
    raise InvalidRequest(f"{given!r} is no schedule id: write @schedule/17, or its number")


class ScheduledReceipt:
    """What a scheduled publish returns: the message waits, and can be cancelled and moved.

    >>> import asyncio, onward
    >>> async def main() -> str:
    ...     async with onward.connect("memory:") as mq:
    ...         receipt = await mq.publish("reminders", "pay", delay="45m")
    ...         return f"{receipt.id}: {(await receipt.cancel()).state}"
    >>> asyncio.run(main())
    '@schedule/0: cancelled'
    """

    __slots__ = ("_calls", "due_at_ms", "durability", "event_id", "schedule_id", "topic")

    def __init__(
        self, topic: str, schedule_id: int, *, due_at_ms: int, event_id: int, durability: str,
        calls: schedule_calls.ScheduleCalls,
    ) -> None:  # fmt: skip
        self.topic = topic
        self.schedule_id = schedule_id
        self.due_at_ms = due_at_ms
        self.event_id = event_id
        self.durability = durability
        self._calls = calls

    @property
    def id(self) -> str:
        """The schedule id for people."""
        return f"{SCHEDULE_TOPIC}/{self.schedule_id}"

    async def cancel(self, *, cause: str = "") -> CancelResult:
        """Let it never fire; the result says whether that was in time."""
        (result,) = await self._calls.cancel_scheduled(self.schedule_id, cause=cause)
        return result

    async def reschedule(
        self, *, at: At | None = None, delay: Duration | None = None, delay_ms: int | None = None
    ) -> MoveResult:
        """Let it fire at another time; when it was moved, this receipt has its new id."""
        result = await self._calls.reschedule(
            self.schedule_id, at=at, delay=delay, delay_ms=delay_ms
        )
        if result.is_moved:
            self.schedule_id, self.due_at_ms = result.id, result.at_ms
        return result

    async def status(self) -> ScheduledDescription:
        """Return what became of it."""
        return await self._calls.scheduled(self.schedule_id)

    def __repr__(self) -> str:
        return (
            f"ScheduledReceipt({self.id!r}, topic={self.topic!r}, due_at_ms={self.due_at_ms}, "
            f"durability={self.durability!r})"
        )


class ScheduledBatchReceipt:
    """What a scheduled `publish_many` returns: the ids of its messages, in their order.

    >>> import asyncio, onward
    >>> async def main() -> list[str]:
    ...     async with onward.connect("memory:") as mq:
    ...         receipt = await mq.publish_many("reminders", ["a", "b"], delay=["1h", "2h"])
    ...         return [result.state for result in await receipt.cancel()]
    >>> asyncio.run(main())
    ['cancelled', 'cancelled']
    """

    __slots__ = ("_calls", "count", "durability", "event_id", "first_id", "topic")

    def __init__(
        self, topic: str, first_id: int, count: int, *, event_id: int, durability: str,
        calls: schedule_calls.ScheduleCalls,
    ) -> None:  # fmt: skip
        self.topic = topic
        self.first_id = first_id
        self.count = count
        self.event_id = event_id
        self.durability = durability
        self._calls = calls

    @classmethod
    def of(cls, stored: BatchReceipt, topic: str, *, calls: schedule_calls.ScheduleCalls) -> Self:
        """Return the receipt for what was stored in the schedule."""
        return cls(
            topic, stored.first_offset, stored.count, event_id=stored.event_id,
            durability=stored.durability, calls=calls,
        )  # fmt: skip

    @property
    def ids(self) -> range:
        """The schedule ids of all messages."""
        return range(self.first_id, self.first_id + self.count)

    async def cancel(self, *, cause: str = "") -> list[CancelResult]:
        """Let none of them fire; the results say for which that was in time."""
        return await self._calls.cancel_scheduled(self.ids, cause=cause)

    def __repr__(self) -> str:
        return (
            f"ScheduledBatchReceipt(topic={self.topic!r}, first_id={self.first_id}, "
            f"count={self.count}, durability={self.durability!r})"
        )


# --- what publishing takes: the type of the receipt follows from whether there is a time -------


class Soon(TypedDict, total=False):
    """What one message has beside its body."""

    key: str | None
    headers: Mapping[str, str | bytes] | None
    tag: Tags
    trace_id: str | None
    priority: int | None
    tenant: str | None
    durability: DurabilityName | None


class One(Soon, total=False):
    """The same, where the receipt is waited for."""

    timeout: Duration | None
    timeout_ms: int | None


class Many(TypedDict, total=False):
    """What the messages of a batch have beside their bodies, and how they travel."""

    keys: Sequence[str | None] | None
    headers: Sequence[Mapping[str, str | bytes] | None] | None
    tags: Sequence[Tags] | None
    trace_ids: Sequence[str | None] | None
    priorities: Sequence[int | None] | None
    tenants: Sequence[str | None] | None
    durability: DurabilityName | None
    compression: Literal["zstd", "lz4"] | None
    timeout: Duration | None
    timeout_ms: int | None


class _Now(TypedDict, total=False):
    delay: None
    delay_ms: None
    at: None
    unique: None
    replace: Literal[False]


class _NowMany(TypedDict, total=False):
    delay: None
    delay_ms: None
    at: None
    uniques: None
    replace: Literal[False]


class _Later(TypedDict, total=False):
    delay: Duration
    delay_ms: int
    at: At
    unique: str | None
    replace: bool


class _LaterMany(TypedDict, total=False):
    delay: Delays
    delay_ms: int | Sequence[int]
    at: Times
    uniques: Sequence[str | None] | None
    replace: bool


class NowSoon(Soon, _Now):
    """`publish_soon` without a time."""


class LaterSoon(Soon, _Later):
    """`publish_soon` with a time."""


class NowOne(One, _Now):
    """`publish` without a time."""


class LaterOne(One, _Later):
    """`publish` with a time."""


class NowMany(Many, _NowMany):
    """`publish_many` without a time."""


class LaterMany(Many, _LaterMany):
    """`publish_many` with a time, or one for each message."""


# The annotations above name it, and `help` reads them. At the end, because the module makes
# receipts: each of the two modules may be imported first.
from onward.client import schedule_calls  # noqa: E402
