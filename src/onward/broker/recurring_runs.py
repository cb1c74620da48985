"""Recurring schedules: each has at most one run that waits, and gets the next when that has fired.

    created, resumed ──▶ its next run is scheduled ──▶ fires ──▶ its next run is scheduled ...
    paused, deleted  ──▶ the run that waits is cancelled

A run is an ordinary scheduled message under a business key of the system, so a crash neither loses
nor doubles it. Of the runs that were missed while the broker was down, the latest is made up for or
none, as the schedule says. A change is answered when the run of the schedule as it was is cancelled
and the next run is durable: a crash after the answer never fires what was replaced.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from onward.broker.futures import Done, future_of
from onward.errors import OnwardError
from onward.schedule.record import Record
from onward.schedule.recurring import LATE_MS_MAX, Recurring

if TYPE_CHECKING:
    from onward.broker.broker import Broker
    from onward.broker.deciding import Deciding, Found
    from onward.broker.scheduling import Scheduling
    from onward.schedule.run import Waiting

logger = logging.getLogger("onward.schedule")

PREFIX = "@recurring/"
AGAIN_S = 5.0
CHANGED = "the recurring schedule was changed"


def _nobody() -> None:
    """Nobody waits for this."""


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
        self._changing: Counter[str] = Counter()
        """Those that were changed, and whose next run is not stored yet."""

    def begin(self) -> None:
        """Find the runs that wait, and schedule those that do not: this node begins to lead."""
        self._planned.clear()
        self._past_ms.clear()
        state, now_ms = self._scheduling.state, self._broker.clock.now_ms()
        kept: list[Recurring] = []
        for record in list(state.recurring.values()):
            last_ms = state.last_runs.get(record.name)
            # The run that waits is judged, not a later one that was missed as well.
            is_late = last_ms is not None and now_ms - last_ms > LATE_MS_MAX
            if record.paused or (is_late and record.catch_up == "none"):
                self._replan(record.name)
            else:
                kept.append(record)
        if kept:
            self._find_soon(kept)

    def change(self, record: Recurring, done: Done) -> None:
        """Create, change, pause, resume or delete a recurring schedule."""

        def applied(error: OnwardError | None) -> None:
            if error is not None:
                done(error)
                return
            self._changing[record.name] += 1
            self._replan(record.name, told=changed)

        def changed() -> None:
            self._changing -= Counter([record.name])
            done(None)

        self._broker.publishing.change_recurring(record, done=applied)

    def next_ms(self, record: Recurring) -> int:
        """Return when the next run of a schedule is."""
        now_ms = self._scheduling.now_ms()
        last_ms = self._scheduling.state.last_runs.get(record.name, 0)
        if last_ms > now_ms and record.name not in self._changing:
            return last_ms
        return record.next_run(max(now_ms, self._past_ms.get(record.name, 0)))

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

    def _find_soon(self, records: list[Recurring]) -> None:
        """Find the runs of these schedules before anything fires: this task has the lock first."""
        if self._broker.gate.is_stopping:
            return
        task = self._loop.create_task(self._find(records))

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.error("finding recurring runs failed, will be tried again", exc_info=error)
                self._loop.call_later(AGAIN_S, self._find_soon, records)

        task.add_done_callback(ended)

    async def _find(self, records: list[Recurring]) -> None:
        async with self._scheduling.lock:
            self._scheduling.take_in()
            uniques = [PREFIX + record.name for record in records]
            places = (await self._scheduling.files.look_up([], uniques)).by_unique
            # All of them share one commit; nothing fires before it is durable.
            waits = [
                future_of(partial(self._go_on, record, places.get(unique)))
                for record, unique in zip(records, uniques, strict=True)
            ]
            for wait in waits:
                await wait

    def _go_on(self, record: Recurring, place: Waiting | None, told: Done) -> None:
        """Keep the run that waits, or replace it by the latest of those that were missed."""
        state, name = self._scheduling.state, record.name

        def done() -> None:
            told(None)

        if place is None or state.is_gone(place.number):
            self._plan(name, told=done)
            return
        last_ms = state.last_runs.get(name, place.at_ms)
        missed_ms = next(iter(record.runs_due(last_ms, self._broker.clock.now_ms())), None)
        if state.has_fired(place.topic, place.at_ms, place.number):
            self._past_ms[name] = last_ms
            self._plan(name, due_at_ms=missed_ms, told=done)
        elif missed_ms is None:
            self._planned[name] = place.number
            done()
        else:
            self._plan(name, due_at_ms=missed_ms, replaces=place.number, told=done)

    def _plan(
        self, name: str, *, due_at_ms: int | None = None, replaces: int | None = None,
        told: Callable[[], None] = _nobody,
    ) -> None:  # fmt: skip
        """Schedule the next run, unless one waits; `told` is called when that is durable or failed.

        `due_at_ms`: not the next run, but this one, in place of what waits as `replaces`.
        """
        record = self._scheduling.state.recurring.get(name)
        is_stopping = self._broker.gate.is_stopping
        if record is None or record.paused or name in self._planned or is_stopping:
            told()
            return
        if due_at_ms is None:
            due_at_ms = record.next_run(max(self._scheduling.now_ms(), self._past_ms.get(name, 0)))
        self._planned[name] = -1
        self._on_the_way[name] = [told]

        def stored(number: int, error: OnwardError | None) -> None:
            self._stored[name] += 1
            self._planned[name] = number
            if error is None:
                # As `stored` does in the same turn, but before anybody is answered.
                self._scheduling.state.last_runs[name] = due_at_ms
            else:
                del self._planned[name]
                again = partial(self._plan, name, due_at_ms=due_at_ms, replaces=replaces)
                self._loop.call_later(AGAIN_S, again)
            for go_on in self._on_the_way.pop(name):
                go_on()

        run = _run_of(record)
        self._deciding.publish_inside(run, due_at_ms=due_at_ms, replaces=replaces, done=stored)

    def _replan(self, name: str, *, told: Callable[[], None] = _nobody) -> None:
        """Cancel the run that waits and schedule the next one.

        A run that was stored meanwhile was not seen by the cancellation: that one is cancelled too.
        """
        stored = self._stored[name]

        def cancelled(outcome: asyncio.Future[list[Found]]) -> None:
            if outcome.exception() is not None:
                self._loop.call_later(AGAIN_S, self._replan, name)
                told()
            elif name in self._on_the_way:
                self._on_the_way[name].append(partial(self._replan, name, told=told))
            elif self._stored[name] != stored:
                self._replan(name, told=told)
            else:
                self._planned.pop(name, None)
                self._plan(name, told=told)

        outcome = self._deciding.cancel(numbers=[], uniques=[PREFIX + name], cause=CHANGED)
        outcome.add_done_callback(cancelled)


def _run_of(record: Recurring) -> Record:
    """Return the message that each run of a schedule is."""
    return Record(
        number=0, at_ms=0, due_at_ms=0, topic=record.topic, body=record.body,
        key=record.key, headers=dict(record.headers) if record.headers else None,
        tag=record.tag, trace_id=record.trace_id, priority=record.priority,
        tenant=record.tenant, unique=PREFIX + record.name,
    )  # fmt: skip
