"""Operations on the schedule: cancel, move, show, list, calendar, recurring schedules.

A scheduled message has an id before it has an offset: its number in the schedule. Its state is one
of these words, and exact: it is determined between two firings.

    waiting     it fires at `at_ms`                cancelled   it never fires
    fired       it is in its topic, at `offset`    replaced    another one, or a later time, took
    not_found   there never was such a one                     its place
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from onward.message.recurring import RecurringFields
from onward.message.relative import Relative
from onward.protocol.operations.operation import Request, operation, read_topic, write_topic

SCHEDULE_TOPIC = "@schedule"
CANCELLED_MAX = 10_000
LIST_PAGE_MAX = 1_000
BODY_BYTES_SHOWN = 4_096
"""Descriptions have this much of a body."""
SCANS_MAX = 20
"""So many lists and as many calendars run at the same time: each may read 500,000 rows."""
DECISIONS_MAX = 10_000
"""So many cancels and as many moves run at the same time: rounds decide 1,000 of them at once."""

State = Literal["waiting", "fired", "cancelled", "replaced", "not_found"]
Id = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Ids = Annotated[list[Id], msgspec.Meta(max_length=CANCELLED_MAX)]
Uniques = Annotated[list[str], msgspec.Meta(max_length=CANCELLED_MAX)]
Instant = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]


# --- replies ----------------------------------------------------------------------------------


class CancelResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of a message that was to be cancelled.

    >>> CancelResult(id=17, state="fired", topic="orders", offset=3).message_id
    'orders/3'
    """

    id: int
    """The schedule id; -1 when nothing waits under a business key."""
    state: Literal["cancelled", "fired", "replaced", "not_found"]
    topic: str = ""
    at_ms: int = 0
    offset: int | None = None
    """Where it is in its topic, when it has fired and is still there."""
    unique: str | None = None
    """The business key by which a client named it; the broker does not send it."""

    @property
    def message_id(self) -> str | None:
        """The id of the message that it has become, for people."""
        return None if self.offset is None else f"{self.topic}/{self.offset}"


class CancelResults(msgspec.Struct, frozen=True):
    """A result for each id and then each business key, in their order and each once."""

    results: list[CancelResult]


class MoveResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of a message that was to fire at another time.

    >>> MoveResult(id=18, state="moved", topic="orders", at_ms=60_000).is_moved
    True
    """

    id: int
    """The new schedule id when it was moved, else the one that was asked for (or -1)."""
    state: Literal["moved", "cancelled", "fired", "replaced", "not_found"]
    topic: str = ""
    at_ms: int = 0
    offset: int | None = None

    @property
    def is_moved(self) -> bool:
        """Tell whether it fires at the new time."""
        return self.state == "moved"


class MoveResults(msgspec.Struct, frozen=True):
    """One result."""

    results: list[MoveResult]


class ScheduledDescription(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A scheduled message, as its broker describes it.

    >>> ScheduledDescription(id=17, state="waiting", topic="orders", at_ms=60_000).name
    '@schedule/17'
    """

    id: int
    # A factory, because a plain default would be left out of the reply.
    state: State = msgspec.field(default_factory=lambda: "waiting")
    topic: str = ""
    at_ms: int = 0
    """When it fires, or was to: its time, or when it was published if that was later."""
    due_at_ms: int = 0
    """The time that was asked for."""
    offset: int | None = None
    key: str | None = None
    unique: str | None = None
    tag: str | None = None
    trace_id: str | None = None
    tenant: str | None = None
    priority: int | None = None
    body_bytes: int = msgspec.field(default=0, name="bytes")
    body: bytes = b""
    """The first 4,096 bytes of it while it waits; empty in lists."""

    @property
    def name(self) -> str:
        """The id for people."""
        return f"{SCHEDULE_TOPIC}/{self.id}"


class ScheduledPage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A page of the messages that wait, in the order in which they fire."""

    scheduled: list[ScheduledDescription]
    next: tuple[int, int] | None
    """Ask for the next page with this as `after`; null: this is the last page."""
    from_ms: int | None = None
    """The `from_ms` of the request as an absolute time, if it has one."""
    until_ms: int | None = None


class CalendarBar(msgspec.Struct, frozen=True):
    """How many messages fire from `at_ms` on, for one step of the calendar."""

    at_ms: int
    count: int


class CalendarCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How many messages fire in each step of time in which some do, and of each topic."""

    bars: list[CalendarBar]
    topics: dict[str, int] = {}
    is_exact: bool = True
    """False when so much waits that its later part was counted by the hour."""

    @property
    def count(self) -> int:
        """How many messages fire in all of it."""
        return sum(bar.count for bar in self.bars)


class CalendarDescription(CalendarCounts, frozen=True, kw_only=True):
    """What fires when: a bar for each step of time in which something does.

    >>> calendar = CalendarDescription(
    ...     start_ms=0, end_ms=120_000, step_ms=60_000, bars=[CalendarBar(60_000, 7)]
    ... )
    >>> calendar.count, [bar.count for bar in calendar.all_bars()]
    (7, [0, 7])
    """

    start_ms: int
    end_ms: int
    step_ms: int

    def all_bars(self) -> list[CalendarBar]:
        """Return a bar for every step, empty ones too."""
        counts = {bar.at_ms: bar.count for bar in self.bars}
        steps = range(self.start_ms, self.end_ms, self.step_ms)
        return [CalendarBar(at_ms, counts.get(at_ms, 0)) for at_ms in steps]


class RecurringDescription(RecurringFields, frozen=True, kw_only=True):
    """A schedule that comes again, and the message that each run is.

    >>> RecurringDescription(name="report", topic="reports", every_ms=60_000).zone
    'UTC'
    """

    # A factory, because a plain default would be left out of the reply.
    next_at_ms: int = msgspec.field(default_factory=int)
    """When the next run is; 0 while it is paused."""


class RecurringList(msgspec.Struct, frozen=True):
    """All recurring schedules in the order of their names."""

    recurring: list[RecurringDescription]


# --- scheduled messages -----------------------------------------------------------------------


@operation(needs=write_topic(), changes=True, running_max=DECISIONS_MAX, example={"ids": [17, 18]})
class CancelScheduled(Request[CancelResults], frozen=True, tag="schedule.cancel"):
    """Cancel scheduled messages by their ids or business keys: they never fire."""

    ids: Ids = msgspec.field(default_factory=list)
    uniques: Uniques = msgspec.field(default_factory=list)
    cause: str = ""
    """Why, for people."""


@operation(
    needs=write_topic(),
    changes=True,
    while_full=False,
    running_max=DECISIONS_MAX,
    example={"id": 17, "at_ms": 1_800_000_000_000},
)
class MoveScheduled(Request[MoveResults], frozen=True, tag="schedule.move"):
    """Change the time at which a scheduled message fires; it gets a new id."""

    at_ms: Instant | Relative
    id: Id | None = None
    unique: str | None = None
    """The business key; either this or `id`."""


@operation(needs=read_topic(), example={"id": 17})
class ShowScheduled(Request[ScheduledDescription], frozen=True, tag="schedule.show"):
    """Return the state of a scheduled message and, while it waits, what it holds."""

    id: Id | None = None
    unique: str | None = None
    """The business key; either this or `id`."""


@operation(
    needs=read_topic("topic"), running_max=SCANS_MAX, example={"topic": "orders", "limit": 100}
)
class ListScheduled(Request[ScheduledPage], frozen=True, tag="schedule.list"):
    """Return a page of the messages that wait, in the order in which they fire."""

    topic: str = ""
    """Only messages for this topic; empty: for any."""
    key: str = ""
    """Only messages with this key; empty: with any, or none."""
    from_ms: Instant | Relative | None = None
    """Only messages that fire at this time or later."""
    until_ms: Instant | Relative | None = None
    """Only messages that fire before this time."""
    after: tuple[Instant, Id] | None = None
    """The `next` of the page before."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=LIST_PAGE_MAX)] = 100


@operation(
    needs=read_topic("topic"),
    running_max=SCANS_MAX,
    example={"from_ms": 1_800_000_000_000, "until_ms": 1_800_086_400_000, "step_ms": 3_600_000},
)
class ShowCalendar(Request[CalendarCounts], frozen=True, tag="schedule.calendar"):
    """Return how many messages fire in each step of time."""

    from_ms: Instant
    until_ms: Instant
    step_ms: Annotated[int, msgspec.Meta(ge=1_000, le=2**53)]
    topic: str = ""
    """Only messages for this topic; empty: for any."""


# --- recurring schedules ----------------------------------------------------------------------


@operation(
    needs=write_topic("topic"),
    changes=True,
    while_full=False,
    example={"name": "report", "topic": "reports", "body": "ZGFpbHk=", "cron": "0 9 * * MON-FRI"},
)
class SetRecurring(
    RecurringFields, Request[RecurringDescription], frozen=True, tag="recurring.set"
):
    """Create or replace a recurring schedule: by cron in a time zone, or every so often."""


@operation(needs=read_topic(), example={})
class ListRecurring(Request[RecurringList], frozen=True, tag="recurring.list"):
    """Return all recurring schedules in the order of their names."""


@operation(needs=write_topic(), changes=True, example={"name": "report"})
class DeleteRecurring(Request[RecurringDescription], frozen=True, tag="recurring.delete"):
    """Delete a recurring schedule and cancel its run that waits; return it as it was."""

    name: str


@operation(needs=write_topic(), changes=True, example={"name": "report"})
class PauseRecurring(Request[RecurringDescription], frozen=True, tag="recurring.pause"):
    """Cancel the run of a recurring schedule that waits, and plan none until it is resumed."""

    name: str


@operation(needs=write_topic(), changes=True, example={"name": "report"})
class ResumeRecurring(Request[RecurringDescription], frozen=True, tag="recurring.resume"):
    """Plan the runs of a paused recurring schedule again."""

    name: str
