"""Handlers of the operations on scheduled messages: cancel, move, show, list, calendar.

Answers are exact: they are determined between two firings, and a change is durable when it is
answered. A list or calendar reads a bounded number of rows and gives up the lock between pages.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from onward.broker.fired_offsets import FiredOffsets
from onward.broker.operations.dispatch import answers
from onward.broker.requester import Requester
from onward.broker.schedule_scan import FOREVER_MS, SCANNED_MAX, ScheduleScan
from onward.errors import InvalidRequest
from onward.message.columns import Column
from onward.message.relative import Relative, resolve_ms
from onward.protocol.operations.schedule import (
    BODY_BYTES_SHOWN,
    CalendarBar,
    CalendarCounts,
    CancelResult,
    CancelResults,
    CancelScheduled,
    ListScheduled,
    MoveResult,
    MoveResults,
    MoveScheduled,
    ScheduledDescription,
    ScheduledPage,
    ShowCalendar,
    ShowScheduled,
)
from onward.schedule.order import BEFORE_ALL, Moment
from onward.schedule.record import Record, Records

if TYPE_CHECKING:
    from onward.broker.broker import Broker
    from onward.broker.deciding import Found

STEPS_MAX = 10_000
CALENDAR_TOPICS_MAX = 100


class ScheduleOperations:
    """Cancels, moves, shows, lists and counts scheduled messages."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._scheduling = broker.scheduling
        self._deciding = broker.scheduling.intake.deciding
        self._scan = ScheduleScan(broker.scheduling)

    # --- cancel and move ---------------------------------------------------------------------

    @answers(CancelScheduled)
    async def cancel(self, request: CancelScheduled) -> CancelResults:
        """Cancel messages and return what became of each, once that is durable."""
        if not request.ids and not request.uniques:
            raise InvalidRequest("name an id or a unique key")
        found = await self._deciding.cancel(
            numbers=list(dict.fromkeys(request.ids)),
            uniques=list(dict.fromkeys(request.uniques)),
            cause=request.cause,
        )
        offsets = await FiredOffsets(self._broker).find(found)
        return CancelResults([_cancel_result(one, offsets.get(one.number)) for one in found])

    @answers(MoveScheduled)
    async def move(self, request: MoveScheduled, requester: Requester) -> MoveResults:
        """Move a message to another time and return its new id, once that is durable."""
        numbers, uniques = _named(request)
        now_ms = self._broker.clock.now_ms()
        at_ms = resolve_ms(request.at_ms, now_ms=now_ms)
        if at_ms > now_ms + self._broker.settings.schedule.ahead_ms_max:
            raise InvalidRequest("this is farther ahead than schedule.ahead_ms_max allows")
        found = await self._deciding.move(
            numbers=numbers, uniques=uniques, at_ms=at_ms, principal=requester.principal
        )
        offsets = await FiredOffsets(self._broker).find(found)
        return MoveResults([_move_result(one, offsets.get(one.number)) for one in found])

    # --- show and list -----------------------------------------------------------------------

    @answers(ShowScheduled)
    async def show(self, request: ShowScheduled) -> ScheduledDescription:
        """Return the state of a message; while it waits also its parts."""
        numbers, uniques = _named(request)
        files = self._scheduling.files
        async with self._scheduling.lock:
            self._scheduling.take_in()
            places = await files.look_up(numbers, uniques)
            (found,) = self._deciding.found(numbers, uniques, places)
            if found.state == "waiting":
                return _described(found, await files.record(found.number))
        # Without the lock: a message that has fired stays where it is.
        offsets = await FiredOffsets(self._broker).find([found])
        return ScheduledDescription(
            id=found.number,
            state=found.state,
            topic=found.topic,
            at_ms=found.at_ms,
            offset=offsets.get(found.number),
        )

    @answers(ListScheduled)
    async def list(self, request: ListScheduled) -> ScheduledPage:
        """Return a page of messages that wait; with few that match it has fewer than `limit`."""
        from_ms, until_ms = self._resolve(request.from_ms), self._resolve(request.until_ms)
        after = BEFORE_ALL if from_ms is None else (from_ms - 1, 2**62)
        if request.after is not None:
            after = max(after, request.after)
        last_ms = FOREVER_MS if until_ms is None else until_ms - 1
        page: list[ScheduledDescription] = []
        scanned, is_end = 0, False
        while len(page) < request.limit and scanned < SCANNED_MAX and not is_end:
            records = await self._scan.page(after, last_ms)
            is_end = records.count == 0
            for row in range(records.count):
                after = (records.at_ms[row], records.numbers[row])
                scanned += 1
                if self._matches(records, row, request):
                    page.append(_listed(records, row))
                    if len(page) == request.limit:
                        break
        return ScheduledPage(
            scheduled=page, next=None if is_end else after, from_ms=from_ms, until_ms=until_ms
        )

    def _resolve(self, time_ms: int | Relative | None) -> int | None:
        if time_ms is None:
            return None
        return resolve_ms(time_ms, now_ms=self._broker.clock.now_ms())

    def _matches(self, records: Records, row: int, request: ListScheduled) -> bool:
        topic = records.topics[row]
        if not self._scan.waits(topic, records.at_ms[row], records.numbers[row]):
            return False
        key = _text(records, Column.KEYS, row)
        return request.topic in ("", topic) and request.key in ("", key)

    # --- the calendar ------------------------------------------------------------------------

    @answers(ShowCalendar)
    async def calendar(self, request: ShowCalendar) -> CalendarCounts:
        """Count row by row as far as that is cheap, then by the hours that runs have counted."""
        if request.until_ms <= request.from_ms:
            raise InvalidRequest("a calendar ends after it begins")
        if (request.until_ms - request.from_ms) // request.step_ms > STEPS_MAX:
            raise InvalidRequest(f"a calendar has at most {STEPS_MAX} steps")
        counts = _Counts(request)
        after: Moment = (request.from_ms - 1, 2**62)
        scanned = 0
        while scanned < SCANNED_MAX:
            records = await self._scan.page(after, request.until_ms - 1)
            if not records.count:
                return counts.reply(is_exact=True)
            rows = zip(records.at_ms, records.numbers, records.topics, strict=True)
            for at_ms, number, topic in rows:
                if self._scan.waits(topic, at_ms, number):
                    counts.add(at_ms, topic)
            after = (records.at_ms[-1], records.numbers[-1])
            scanned += records.count
        async with self._scheduling.lock:
            self._scheduling.take_in()
            await self._count_hours(counts, after_ms=after[0])
        return counts.reply(is_exact=False)

    async def _count_hours(self, counts: _Counts, *, after_ms: int) -> None:
        """Add everything after a time, cancelled messages too; the caller holds the lock."""
        files = self._scheduling.files
        for run in files.runs:
            for at_ms, topic, count in await files.read(run.counts):
                if at_ms > after_ms:
                    counts.add(at_ms, run.topics[topic], count)
        for tail in files.tails:
            for at_ms, name in tail.rows():
                if at_ms > after_ms:
                    counts.add(at_ms, name)


class _Counts:
    """Counts messages by steps of time and by topics."""

    def __init__(self, request: ShowCalendar) -> None:
        self._request = request
        self._steps: Counter[int] = Counter()
        self._topics: Counter[str] = Counter()

    def add(self, at_ms: int, topic: str, count: int = 1) -> None:
        """Count messages that fire at a time, if they are in the calendar."""
        request = self._request
        if at_ms < request.until_ms and request.topic in ("", topic):
            self._steps[(at_ms - request.from_ms) // request.step_ms] += count
            self._topics[topic] += count

    def reply(self, *, is_exact: bool) -> CalendarCounts:
        """Return the counts, without empty steps."""
        begin_ms, step_ms = self._request.from_ms, self._request.step_ms
        return CalendarCounts(
            bars=[
                CalendarBar(begin_ms + step * step_ms, count)
                for step, count in sorted(self._steps.items())
            ],
            topics=dict(self._topics.most_common(CALENDAR_TOPICS_MAX)),
            is_exact=is_exact,
        )


def _named(request: MoveScheduled | ShowScheduled) -> tuple[list[int], list[str]]:
    """Return the one id or the one business key that a request names."""
    if (request.id is None) == (request.unique is None):
        raise InvalidRequest("name either an id or a unique key")
    numbers = [] if request.id is None else [request.id]
    return numbers, [] if request.unique is None else [request.unique]


def _cancel_result(found: Found, offset: int | None) -> CancelResult:
    state = "cancelled" if found.state == "waiting" else found.state
    return CancelResult(
        id=found.number, state=state, topic=found.topic, at_ms=found.at_ms, offset=offset
    )


def _move_result(found: Found, offset: int | None) -> MoveResult:
    state = "moved" if found.state == "waiting" else found.state
    return MoveResult(
        id=found.number, state=state, topic=found.topic, at_ms=found.at_ms, offset=offset
    )


def _described(found: Found, record: Record) -> ScheduledDescription:
    return ScheduledDescription(
        id=found.number,
        topic=found.topic,
        at_ms=found.at_ms,
        due_at_ms=record.due_at_ms,
        key=record.key,
        unique=record.unique,
        tag=record.tag,
        trace_id=record.trace_id,
        tenant=record.tenant,
        priority=record.priority,
        body_bytes=len(record.body),
        body=record.body[:BODY_BYTES_SHOWN],
    )


def _listed(records: Records, row: int) -> ScheduledDescription:
    return ScheduledDescription(
        id=records.numbers[row],
        at_ms=records.at_ms[row],
        topic=records.topics[row],
        due_at_ms=records.due_at_ms[row],
        key=_text(records, Column.KEYS, row),
        unique=_text(records, Column.UNIQUES, row),
        body_bytes=len(records.bodies[row]),
    )


def _text(records: Records, kind: int, row: int) -> str | None:
    """Return one value of a column as text: any bytes may have been published."""
    values = records.optional.get(kind)
    value = None if values is None else values[row]
    return None if value is None else value.decode("utf-8", "replace")
