"""Recurring schedules: each has at most one run that waits, and gets the next when that has fired.

    created, resumed ──▶ its next run is scheduled ──▶ fires ──▶ its next run is scheduled ...
    paused, deleted  ──▶ the run that waits is cancelled

A run is an ordinary scheduled message under a business key of the system, so a crash neither loses
nor doubles it. Runs that were missed while the broker stood still are one, late, or none, as the
schedule says.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from onward.errors import OnwardError
from onward.schedule.record import Record
from onward.schedule.recurring import LATE_MS_MAX, Recurring

if TYPE_CHECKING:
    from onward.broker.broker import Broker
    from onward.broker.deciding import Deciding, Found
    from onward.broker.replies import Done
    from onward.broker.schedule_intake import Accepted
    from onward.broker.scheduling import Scheduling

logger = logging.getLogger("onward.schedule")

PREFIX = "@recurring/"
AGAIN_S = 5.0
CHANGED = "the recurring schedule was changed"


class RecurringRuns:
    """Keeps one run of each recurring schedule waiting."""

    def __init__(self, broker: Broker, scheduling: Scheduling, deciding: Deciding) -> None:
        self._broker = broker
        self._scheduling = scheduling
        self._deciding = deciding
        self._loop = asyncio.get_running_loop()
        self._planned: dict[str, int] = {}
        """Those whose next run waits or is on its way, and its number, if that is known."""
        self._past_ms: dict[str, int] = {}
        """Of each the latest run that has fired, or that somebody cancelled: the next is later."""
        self._on_the_way: dict[str, list[Callable[[], None]]] = {}
        """Those whose next run is being stored, and who waits for that."""
        self._stored: Counter[str] = Counter()

    def begin(self) -> None:
        """At a start: look which runs wait, and schedule those that do not."""
        for record in list(self._scheduling.state.recurring.values()):
            self._look(record)

    def change(self, record: Recurring, done: Done) -> None:
        """Create, change, pause, resume or delete a recurring schedule."""

        def applied(error: OnwardError | None) -> None:
            if error is None:
                self._scheduling.state.change_recurring(record)
                self._cancel(record, then=lambda: self._plan(record.name))
            done(error)

        self._broker.publishing.change_recurring(record, done=applied)

    def stored(self, accepted: Accepted) -> None:
        """Take note of runs among what was stored."""
        for row, unique in enumerate(accepted.uniques or ()):
            if unique is not None and unique.startswith(PREFIX):
                self._scheduling.state.last_runs[unique[len(PREFIX) :]] = accepted.due_at_ms[row]

    def fired(self, uniques: Iterable[bytes | None]) -> None:
        """Schedule the next runs of those that have just fired."""
        prefix = PREFIX.encode()
        for unique in uniques:
            if unique is not None and unique.startswith(prefix):
                name = unique[len(prefix) :].decode("utf-8", "surrogateescape")
                self._pass(name)

    def cancelled(self, numbers: Iterable[int]) -> None:
        """Schedule the next runs of those that somebody has cancelled."""
        if self._planned:
            gone = set(numbers)
            for name in [one for one, number in self._planned.items() if number in gone]:
                self._pass(name)

    def _pass(self, name: str) -> None:
        """A run is over: the next one is later."""
        self._past_ms[name] = self._scheduling.state.last_runs.get(name, 0)
        self._planned.pop(name, None)
        self._plan(name)

    def _look(self, record: Recurring) -> None:
        """Find out whether a run waits; one that is too late may be dropped."""

        def answered(found: list[Found], error: OnwardError | None) -> None:
            if error is not None:
                self._loop.call_later(AGAIN_S, self._look, record)
                return
            self._plan(record.name)

        now_ms = self._broker.clock.now_ms()
        last_ms = self._scheduling.state.last_runs.get(record.name)
        # The run that waits is judged, not a later one that was missed as well.
        is_late = last_ms is not None and now_ms - last_ms > LATE_MS_MAX
        is_stale = is_late and record.catch_up == "none"
        if last_ms is None:
            self._plan(record.name)
        elif is_stale or record.paused:
            self._cancel(record, then=lambda: self._plan(record.name))
        else:
            self._ask_whether_waiting(record, answered)

    def _ask_whether_waiting(self, record: Recurring, answered: object) -> None:
        async def look() -> None:
            async with self._scheduling.lock:
                self._scheduling.take_in()
                places = await self._scheduling.files.look_up([], [PREFIX + record.name])
            place = places.by_unique.get(PREFIX + record.name)
            state = self._scheduling.state
            if place is None or state.is_gone(place.number):
                self._plan(record.name)
            elif state.has_fired(place.topic, place.at_ms, place.number):
                self._pass(record.name)
            else:
                self._planned[record.name] = place.number

        task = self._loop.create_task(look())
        task.add_done_callback(self._looked)

    def _looked(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("looking for a recurring run failed", exc_info=error)

    def _plan(self, name: str) -> None:
        """Schedule the next run, unless one waits."""
        record = self._scheduling.state.recurring.get(name)
        if record is None or record.paused or name in self._planned:
            return
        if self._broker.publishing.is_stopping:
            return
        after_ms = max(self._scheduling.now_ms(), self._past_ms.get(name, 0), record.start_ms)
        run = Record(
            number=0, at_ms=0, due_at_ms=0, topic=record.topic, body=record.body,
            key=record.key, headers=dict(record.headers) if record.headers else None,
            tag=record.tag, trace_id=record.trace_id, priority=record.priority,
            tenant=record.tenant, unique=PREFIX + name,
        )  # fmt: skip
        self._planned[name] = -1
        self._on_the_way[name] = []

        def stored(number: int, error: OnwardError | None) -> None:
            self._stored[name] += 1
            self._planned[name] = number
            if error is not None:
                del self._planned[name]
                self._loop.call_later(AGAIN_S, self._plan, name)
            for go_on in self._on_the_way.pop(name):
                go_on()

        due_at_ms = record.next_run(after_ms)
        self._deciding.publish_inside(run, due_at_ms=due_at_ms, replaces=None, done=stored)

    def _cancel(self, record: Recurring, *, then: Callable[[], None]) -> None:
        """Cancel the run that waits; one that was stored meanwhile was not seen: so once more."""
        name, stored = record.name, self._stored[record.name]

        def again() -> None:
            self._cancel(record, then=then)

        def answered(found: list[Found], error: OnwardError | None) -> None:
            if error is not None:
                self._loop.call_later(AGAIN_S, again)
            elif name in self._on_the_way:
                self._on_the_way[name].append(again)
            elif self._stored[name] != stored:
                again()
            else:
                self._planned.pop(name, None)
                then()

        self._deciding.cancel(
            numbers=[], uniques=[PREFIX + record.name], answer=answered,
            cause=CHANGED,
        )  # fmt: skip
