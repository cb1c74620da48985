"""Handlers of the operations on recurring schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from onward.broker.futures import future_of
from onward.broker.operations.dispatch import answers
from onward.errors import Conflict, InvalidRequest
from onward.protocol.operations.schedule import (
    BODY_BYTES_SHOWN,
    DeleteRecurring,
    ListRecurring,
    PauseRecurring,
    RecurringDescription,
    RecurringList,
    ResumeRecurring,
    SetRecurring,
)
from onward.schedule.recurring import Recurring

if TYPE_CHECKING:
    from onward.broker.broker import Broker

RECURRING_MAX = 1_000


class RecurringOperations:
    """Sets, lists, pauses, resumes and deletes recurring schedules.

    A change is answered when it is durable, the old run is cancelled and the next one is stored.
    """

    def __init__(self, broker: Broker) -> None:
        self._publishing = broker.publishing
        self._state = broker.scheduling.state
        self._runs = broker.scheduling.intake.deciding.recurring

    @answers(SetRecurring)
    async def set(self, request: SetRecurring) -> RecurringDescription:
        """Create or replace a recurring schedule."""
        record = Recurring(**msgspec.structs.asdict(request)).check()
        if record.name not in self._state.recurring and len(self._state.recurring) >= RECURRING_MAX:
            raise Conflict(f"there are {RECURRING_MAX} recurring schedules already")
        self._publishing.check_body(record.topic, len(record.body))
        return await self._store(record)

    @answers(ListRecurring)
    async def list(self, request: ListRecurring) -> RecurringList:
        """Return all recurring schedules in the order of their names."""
        recurring = self._state.recurring
        return RecurringList([self._describe(recurring[name]) for name in sorted(recurring)])

    @answers(DeleteRecurring)
    async def delete(self, request: DeleteRecurring) -> RecurringDescription:
        """Delete a recurring schedule."""
        return await self._store(replace(self._find(request.name), deleted=True))

    @answers(PauseRecurring)
    async def pause(self, request: PauseRecurring) -> RecurringDescription:
        """Plan no runs until the schedule is resumed."""
        return await self._store(replace(self._find(request.name), paused=True))

    @answers(ResumeRecurring)
    async def resume(self, request: ResumeRecurring) -> RecurringDescription:
        """Plan runs again."""
        return await self._store(replace(self._find(request.name), paused=False))

    def _find(self, name: str) -> Recurring:
        record = self._state.recurring.get(name)
        if record is None:
            raise InvalidRequest(f"recurring schedule {name!r} does not exist")
        return record

    async def _store(self, record: Recurring) -> RecurringDescription:
        await future_of(lambda done: self._runs.change(record, done))
        return self._describe(record)

    def _describe(self, record: Recurring) -> RecurringDescription:
        description = msgspec.convert(record, RecurringDescription, from_attributes=True)
        return replace(
            description,
            body=record.body[:BODY_BYTES_SHOWN],
            next_at_ms=0 if record.paused else self._runs.next_ms(record),
        )
