"""The schedule for people and programs: cancel, move, look, list, the calendar, recurring ones.

    cancel, move ──▶ cancelled / moved · fired (topic, offset) · replaced · not_found

Answers are exact: they are given between two firings, and what changes something answers when it is
durable. What lists something answers in pages.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from onward.broker.fired_offsets import FiredOffsets
from onward.broker.replies import Operation, reply, reply_when_done
from onward.broker.schedule_scan import FOREVER_MS, SCANNED_MAX, ScheduleScan
from onward.errors import Conflict, InvalidRequest, OnwardError, Unavailable
from onward.message.columns import Column
from onward.message.relative import Relative, resolve_ms
from onward.protocol.payloads import decode_fields
from onward.schedule.order import BEFORE_ALL, Moment
from onward.schedule.record import Records
from onward.schedule.recurring import Recurring

if TYPE_CHECKING:
    from onward.broker.broker import Broker
    from onward.broker.deciding import Found
    from onward.broker.session import Session

IDS_MAX = 10_000
LIMIT_MAX = 1_000
RECURRING_MAX = 1_000
BODY_BYTES_SHOWN = 4_096
STEPS_MAX = 10_000

Id = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Ids = Annotated[list[Id], msgspec.Meta(max_length=IDS_MAX)]
Uniques = Annotated[list[str], msgspec.Meta(max_length=IDS_MAX)]
Instant = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]


class Cancel(msgspec.Struct, frozen=True):
    """`schedule.cancel`: what must not fire, by ids or by unique keys."""

    ids: Ids = []
    uniques: Uniques = []
    cause: str = ""


class Move(msgspec.Struct, frozen=True):
    """`schedule.move`: fire something at another time."""

    at_ms: Instant | Relative
    id: Id | None = None
    unique: str | None = None


class Show(msgspec.Struct, frozen=True):
    """`schedule.show`: what became of a scheduled message."""

    id: Id | None = None
    unique: str | None = None


class List(msgspec.Struct, frozen=True):
    """`schedule.list`: what waits, in the order in which it fires."""

    topic: str = ""
    key: str = ""
    from_ms: Instant | Relative | None = None
    until_ms: Instant | Relative | None = None
    after: tuple[Instant, Id] | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=LIMIT_MAX)] = 100


class CalendarAsked(msgspec.Struct, frozen=True):
    """`schedule.calendar`: how many fire in each step of time."""

    from_ms: Instant
    until_ms: Instant
    step_ms: Annotated[int, msgspec.Meta(ge=1_000, le=2**53)]
    topic: str = ""


class RecurringName(msgspec.Struct, frozen=True):
    """`recurring.delete`, `recurring.pause`, `recurring.resume`: which one."""

    name: str


class ScheduleRequests:
    """Answers what is asked of the schedule."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._scheduling = broker.scheduling
        self._tasks: set[asyncio.Task[None]] = set()
        self._scan = ScheduleScan(broker.scheduling)
        self.operations: dict[str, Operation] = {
            "schedule.cancel": self._cancel,
            "schedule.move": self._move,
            "schedule.show": self._show,
            "schedule.list": self._list,
            "schedule.calendar": self._calendar,
            "recurring.set": self._set_recurring,
            "recurring.list": self._list_recurring,
            "recurring.delete": self._change_recurring(deleted=True),
            "recurring.pause": self._change_recurring(paused=True),
            "recurring.resume": self._change_recurring(paused=False),
        }

    # --- cancel and move ---------------------------------------------------------------------

    def _cancel(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        wanted = decode_fields(payload, Cancel)
        if not wanted.ids and not wanted.uniques:
            raise InvalidRequest("name an id or a unique key")
        self._broker.check_writable(even_when_full=True)

        def answer(found: list[Found], error: OnwardError | None) -> None:
            if error is not None:
                session.refuse(request_id, error)
                return
            self._task(session, request_id, self._tell(session, request_id, found, "cancelled"))

        self._scheduling.intake.deciding.cancel(
            numbers=list(dict.fromkeys(wanted.ids)), uniques=list(dict.fromkeys(wanted.uniques)),
            cause=wanted.cause, answer=answer,
        )  # fmt: skip

    def _move(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        wanted = decode_fields(payload, Move)
        numbers, uniques = _one(wanted.id, wanted.unique)
        self._broker.check_writable()
        ahead_ms = self._broker.settings.schedule.ahead_ms_max
        now_ms = self._broker.clock.now_ms()
        at_ms = resolve_ms(wanted.at_ms, now_ms=now_ms)
        if at_ms > now_ms + ahead_ms:
            raise InvalidRequest("this is farther ahead than schedule.ahead_ms_max allows")

        def answer(found: list[Found], error: OnwardError | None) -> None:
            if error is not None:
                session.refuse(request_id, error)
                return
            self._task(session, request_id, self._tell(session, request_id, found, "moved"))

        self._scheduling.intake.deciding.move(
            numbers=numbers, uniques=uniques, at_ms=at_ms, answer=answer
        )

    async def _tell(self, session: Session, request_id: int, found: list[Found], done: str) -> None:
        offsets = await FiredOffsets(self._broker).find(found)
        results = [_told(one, done, offsets.get(one.number)) for one in found]
        reply(session, request_id, {"results": results})

    # --- look --------------------------------------------------------------------------------

    def _show(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        wanted = decode_fields(payload, Show)
        numbers, uniques = _one(wanted.id, wanted.unique)
        self._task(session, request_id, self._look(session, request_id, numbers, uniques))

    async def _look(
        self, session: Session, request_id: int, numbers: list[int], uniques: list[str]
    ) -> None:
        async with self._scheduling.lock:
            self._scheduling.take_in()
            places = await self._scheduling.files.look_up(numbers, uniques)
            deciding = self._scheduling.intake.deciding
            found = deciding.found(numbers, uniques, places)[0]
            record = None
            if found.state == "waiting":
                record = await self._scheduling.files.record(found.number)
        # Not under the lock: what has fired stays where it is.
        offsets = await FiredOffsets(self._broker).find([found])
        told = _told(found, "waiting", offsets.get(found.number))
        if record is not None:
            told |= {
                "due_at_ms": record.due_at_ms, "key": record.key, "unique": record.unique,
                "tag": record.tag, "trace_id": record.trace_id, "tenant": record.tenant,
                "priority": record.priority, "bytes": len(record.body),
                "body": record.body[:4096],
            }  # fmt: skip
        reply(session, request_id, told)

    def _list(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        wanted = decode_fields(payload, List)
        self._task(session, request_id, self._page(session, request_id, wanted))

    async def _page(self, session: Session, request_id: int, wanted: List) -> None:
        now_ms, window = self._broker.clock.now_ms(), {}
        after, until_ms = BEFORE_ALL, FOREVER_MS
        if wanted.until_ms is not None:
            window["until_ms"] = resolve_ms(wanted.until_ms, now_ms=now_ms)
            until_ms = window["until_ms"] - 1
        if wanted.from_ms is not None:
            window["from_ms"] = resolve_ms(wanted.from_ms, now_ms=now_ms)
            after = (window["from_ms"] - 1, 2**62)
        if wanted.after is not None:
            after = max(after, wanted.after)
        found: list[dict[str, object]] = []
        scanned, is_end = 0, False
        while len(found) < wanted.limit and scanned < SCANNED_MAX and not is_end:
            records = await self._scan.page(after, until_ms)
            is_end = records.count == 0
            for row in range(records.count):
                after = (records.at_ms[row], records.numbers[row])
                scanned += 1
                if self._is_wanted(records, row, wanted):
                    found.append(_listed(records, row))
                    if len(found) == wanted.limit:
                        break
        reply(
            session,
            request_id,
            {"scheduled": found, "next": None if is_end else list(after), **window},
        )

    def _is_wanted(self, records: Records, row: int, wanted: List) -> bool:
        topic = records.topics[row]
        if not self._scan.waits(topic, records.at_ms[row], records.numbers[row]):
            return False
        key = _text(records, Column.KEYS, row)
        return wanted.topic in ("", topic) and wanted.key in ("", key)

    # --- the calendar ------------------------------------------------------------------------

    def _calendar(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        wanted = decode_fields(payload, CalendarAsked)
        if wanted.until_ms <= wanted.from_ms:
            raise InvalidRequest("a calendar ends after it begins")
        if (wanted.until_ms - wanted.from_ms) // wanted.step_ms > STEPS_MAX:
            raise InvalidRequest(f"a calendar has at most {STEPS_MAX} steps")
        self._task(session, request_id, self._histogram(session, request_id, wanted))

    async def _histogram(self, session: Session, request_id: int, wanted: CalendarAsked) -> None:
        """Count exactly as far as that is cheap, then by the hours that runs have counted."""
        steps: Counter[int] = Counter()
        topics: Counter[str] = Counter()
        after: Moment = (wanted.from_ms - 1, 2**62)
        scanned = 0
        while scanned < SCANNED_MAX:
            records = await self._scan.page(after, wanted.until_ms - 1)
            if not records.count:
                break
            for at_ms, number, topic in zip(
                records.at_ms, records.numbers, records.topics, strict=True
            ):
                if wanted.topic in ("", topic) and self._scan.waits(topic, at_ms, number):
                    steps[(at_ms - wanted.from_ms) // wanted.step_ms] += 1
                    topics[topic] += 1
            after = (records.at_ms[-1], records.numbers[-1])
            scanned += records.count
        is_exact = scanned < SCANNED_MAX
        if not is_exact:
            async with self._scheduling.lock:
                self._scheduling.take_in()
                await self._count_hours(wanted, after, steps, topics)
        bars = [
            {"at_ms": wanted.from_ms + step * wanted.step_ms, "count": count}
            for step, count in sorted(steps.items())
        ]
        most = dict(topics.most_common(100))
        reply(session, request_id, {"bars": bars, "topics": most, "is_exact": is_exact})

    async def _count_hours(
        self, wanted: CalendarAsked, after: Moment, steps: Counter[int], topics: Counter[str]
    ) -> None:
        files = self._scheduling.files
        for run in files.runs:
            names = run.topics
            counts = await self._broker.in_thread(run.counts)
            for at_ms, topic, count in counts:
                name = names[topic]
                if after[0] < at_ms < wanted.until_ms and wanted.topic in ("", name):
                    steps[(at_ms - wanted.from_ms) // wanted.step_ms] += count
                    topics[name] += count
        for tail in files.tails:
            for at_ms, name in tail.rows():
                if after[0] < at_ms < wanted.until_ms and wanted.topic in ("", name):
                    steps[(at_ms - wanted.from_ms) // wanted.step_ms] += 1
                    topics[name] += 1

    # --- recurring ---------------------------------------------------------------------------

    def _set_recurring(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        record = decode_fields(payload, Recurring).check()
        state = self._scheduling.state
        if record.deleted:
            raise InvalidRequest("a recurring schedule is deleted by recurring.delete")
        if record.name not in state.recurring and len(state.recurring) >= RECURRING_MAX:
            raise Conflict(f"there are {RECURRING_MAX} recurring schedules already")
        self._broker.publishing.check_body(record.topic, len(record.body))
        self._broker.check_writable()
        self._store(session, request_id, record)

    def _list_recurring(
        self, session: Session, request_id: int, payload: bytes | bytearray
    ) -> None:
        state = self._scheduling.state
        records = [self._described(state.recurring[name]) for name in sorted(state.recurring)]
        reply(session, request_id, {"recurring": records})

    def _described(self, record: Recurring) -> dict[str, object]:
        next_ms = self._scheduling.intake.deciding.recurring.next_ms(record)
        if len(record.body) > BODY_BYTES_SHOWN:
            record = msgspec.structs.replace(record, body=record.body[:BODY_BYTES_SHOWN])
        told: dict[str, object] = msgspec.to_builtins(record)
        return told | {"next_at_ms": 0 if record.paused else next_ms}

    def _change_recurring(self, **changes: bool) -> Operation:
        def change(session: Session, request_id: int, payload: bytes | bytearray) -> None:
            name = decode_fields(payload, RecurringName).name
            record = self._scheduling.state.recurring.get(name)
            if record is None:
                raise InvalidRequest(f"recurring schedule {name!r} does not exist")
            self._broker.check_writable(even_when_full=True)
            self._store(session, request_id, msgspec.structs.replace(record, **changes))

        return change

    def _store(self, session: Session, request_id: int, record: Recurring) -> None:
        done = reply_when_done(session, request_id, lambda: self._described(record))
        self._scheduling.intake.deciding.recurring.change(record, done)

    # --- inside ------------------------------------------------------------------------------

    def _task(self, session: Session, request_id: int, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if task.cancelled() or (error := task.exception()) is None:
                return
            if not isinstance(error, OnwardError):
                error = Unavailable(f"the schedule cannot be read now: {error}")
            session.refuse(request_id, error)

        task.add_done_callback(ended)


def _text(records: Records, kind: int, row: int) -> str | None:
    """Return one text of a column, as far as it is text: any bytes may have been published."""
    values = records.optional.get(kind)
    value = None if values is None else values[row]
    return None if value is None else value.decode("utf-8", "replace")


def _listed(records: Records, row: int) -> dict[str, object]:
    return {
        "id": records.numbers[row],
        "at_ms": records.at_ms[row],
        "topic": records.topics[row],
        "due_at_ms": records.due_at_ms[row],
        "key": _text(records, Column.KEYS, row),
        "unique": _text(records, Column.UNIQUES, row),
        "bytes": len(records.bodies[row]),
    }


def _told(found: Found, done: str, offset: int | None) -> dict[str, object]:
    """Return what is answered for one id or key; `done` is the word for what waited."""
    states = {"waiting": done, "unknown": "not_found"}
    told: dict[str, object] = {"id": found.number, "state": states.get(found.state, found.state)}
    if found.topic:
        told |= {"topic": found.topic, "at_ms": found.at_ms}
    if offset is not None:
        told["offset"] = offset
    return told


def _one(number: int | None, unique: str | None) -> tuple[list[int], list[str]]:
    if (number is None) == (unique is None):
        raise InvalidRequest("name either an id or a unique key")
    return ([] if number is None else [number]), ([] if unique is None else [unique])
