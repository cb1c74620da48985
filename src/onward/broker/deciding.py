"""Decisions about what waits: cancel, move, publish under a business key.

    asked ──▶ gathered ──▶ looked up (in a thread) ──▶ decided one by one ──▶ durable ──▶ answered

All that is asked while one round is under way is decided in the next, in the order in which it
came. A round holds the lock of the schedule until it is durable: nothing fires meanwhile, so the
answers are exact. What concerns something that the same round has changed waits for the next round.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

from onward.broker.joining import on_loop
from onward.broker.recurring_runs import CHANGED, RecurringRuns
from onward.errors import AlreadyExists, InvalidRequest, OnwardError, Stopping, Unavailable
from onward.log.disk import Buffer
from onward.message.batch import RAW_BYTES_MAX, Batch, decode_batch, encode_batch
from onward.schedule.record import Record
from onward.schedule.run import Waiting
from onward.schedule.state import SCHEDULE_TOPIC

if TYPE_CHECKING:
    from onward.broker.broker import Broker
    from onward.broker.publish import Publish
    from onward.broker.schedule_files import Places
    from onward.broker.schedule_intake import Accepted, ScheduleIntake
    from onward.broker.scheduling import Scheduling

logger = logging.getLogger("onward.schedule")

ROUND_MAX = 1_000
NAMES_MAX = 10_000
"""So many numbers and keys are decided in one round at most: nothing fires meanwhile."""
BOTH = (True, True)
State = Literal["waiting", "cancelled", "replaced", "fired", "unknown"]


class Found(NamedTuple):
    """What became of a number: waiting or fired with when and where, or gone."""

    state: State
    number: int
    at_ms: int = 0
    topic: str = ""


Answer = Callable[[list[Found], OnwardError | None], None]


class _Asked:
    """One thing to decide."""

    __slots__ = ("accepted", "answer", "at_ms", "cause", "numbers", "publish", "uniques")

    def __init__(
        self, *, numbers: list[int], uniques: list[str], answer: Answer, cause: str = "",
        at_ms: int | None = None, publish: Publish | None = None, accepted: Accepted | None = None,
    ) -> None:  # fmt: skip
        self.numbers = numbers
        self.uniques = uniques
        self.answer = answer
        self.cause = cause
        self.at_ms = at_ms
        self.publish = publish
        self.accepted = accepted


class Deciding:
    """Decides in rounds."""

    def __init__(self, broker: Broker, scheduling: Scheduling, intake: ScheduleIntake) -> None:
        self._broker = broker
        self._scheduling = scheduling
        self._intake = intake
        self._asked: list[_Asked] = []
        self._round: asyncio.Task[None] | None = None
        self.recurring = RecurringRuns(broker, scheduling, self)

    @property
    def is_busy(self) -> bool:
        """Tell whether something is being decided, or waits for that."""
        return self._round is not None

    # --- what is asked -----------------------------------------------------------------------

    def publish(self, publish: Publish, accepted: Accepted) -> None:
        """Store a batch with business keys, unless one of them waits already."""
        uniques = [one for one in accepted.uniques or () if one is not None]
        asked = _Asked(
            numbers=[], uniques=uniques, answer=lambda found, error: None, publish=publish,
            accepted=accepted,
        )  # fmt: skip
        self._ask(asked)

    def cancel(self, *, numbers: list[int], uniques: list[str], cause: str, answer: Answer) -> None:
        """Cancel what waits under numbers or business keys; the answer says what became of each."""
        self._ask(_Asked(numbers=numbers, uniques=uniques, answer=answer, cause=cause))

    def move(self, *, numbers: list[int], uniques: list[str], at_ms: int, answer: Answer) -> None:
        """Let something that waits fire at another time; it gets a new number."""
        self._ask(_Asked(numbers=numbers, uniques=uniques, answer=answer, at_ms=at_ms))

    def _ask(self, asked: _Asked) -> None:
        self._asked.append(asked)
        if self._round is None:
            self._round = asyncio.get_running_loop().create_task(self._run())
            self._round.add_done_callback(self._ended)

    # --- a round -----------------------------------------------------------------------------

    async def _run(self) -> None:
        while self._asked:
            async with self._scheduling.lock:
                self._scheduling.take_in()
                some = self._next_round()
                try:
                    await self._decide(some)
                except (OnwardError, OSError) as error:
                    for asked in some:
                        self._refuse(asked, _told(error))
                self._scheduling.take_in()

    def _next_round(self) -> list[_Asked]:
        """Take what can be decided together: nothing is named twice."""
        some: list[_Asked] = []
        named: set[object] = set()
        while self._asked and len(some) < ROUND_MAX:
            asked = self._asked[0]
            names: set[object] = {*asked.numbers, *asked.uniques}
            # A key may stand for a number that is named as well: those wait for each other.
            if some and (names & named or _kind(asked) != _kind(some[0]) or _kind(asked) == BOTH):
                break
            if some and len(named) + len(names) > NAMES_MAX:
                break
            named |= names
            some.append(self._asked.pop(0))
        return some

    async def _decide(self, some: list[_Asked]) -> None:
        numbers = [number for asked in some for number in asked.numbers]
        uniques = [unique for asked in some for unique in asked.uniques]
        places = await self._scheduling.files.look_up(numbers, uniques)
        waits: list[asyncio.Future[None]] = []
        for asked in some:
            # What one of them meets is told to that one: others may be on their way to the disk.
            try:
                waits.append(await self._decide_one(asked, places))
            except (OnwardError, OSError) as error:
                self._refuse(asked, _told(error))
        for wait in waits:
            await wait

    async def _decide_one(self, asked: _Asked, places: Places) -> asyncio.Future[None]:
        if asked.publish is not None:
            return self._decide_publish(asked, places.by_unique)
        found = self.found(asked.numbers, asked.uniques, places)
        if asked.at_ms is None:
            return self._cancel(asked, found)
        return await self._move(asked, found)

    def found(self, numbers: list[int], uniques: list[str], places: Places) -> list[Found]:
        """Return what became of numbers and business keys; who calls holds the lock."""
        # What is stored while these are looked up was not there when it was asked about.
        found = [
            self._found(number, places.by_number.get(number))
            if number < places.number_end
            else Found("unknown", number)
            for number in numbers
        ]
        return found + [self._found_unique(places.by_unique.get(one)) for one in uniques]

    def _found(self, number: int, place: Waiting | None) -> Found:
        state = self._scheduling.state
        if number in state.cancelled:
            return Found("cancelled", number)
        if number in state.replaced:
            return Found("replaced", number)
        topic = self._broker.catalogue.by_name.get(SCHEDULE_TOPIC)
        if topic is None or not 0 <= number < topic.next_offset:
            return Found("unknown", number)
        if place is None:
            # It is in no part any more: it has fired, and was left out since.
            return Found("fired", number)
        if state.has_fired(place.topic, place.at_ms, number):
            return Found("fired", number, place.at_ms, place.topic)
        return Found("waiting", number, place.at_ms, place.topic)

    def _found_unique(self, place: Waiting | None) -> Found:
        return Found("unknown", -1) if place is None else self._found(place.number, place)

    def _cancel(self, asked: _Asked, found: list[Found]) -> asyncio.Future[None]:
        waiting = [one.number for one in found if one.state == "waiting"]

        def done(error: OnwardError | None) -> None:
            asked.answer(found, error)

        if not waiting:
            done(None)
            return on_loop(lambda told: told(None))
        row = self._intake.cancelled_row(waiting, cause=asked.cause)

        def begin(told: Callable[[OnwardError | None], None]) -> None:
            def both(error: OnwardError | None) -> None:
                done(error)
                if error is None and asked.cause != CHANGED:
                    self.recurring.cancelled(waiting)
                told(None)

            self._broker.consuming.record([row], both)

        return on_loop(begin)

    async def _move(self, asked: _Asked, found: list[Found]) -> asyncio.Future[None]:
        (one,) = found
        if one.state != "waiting":
            asked.answer(found, None)
            return on_loop(lambda told: told(None))
        record = await self._scheduling.files.record(one.number)
        assert asked.at_ms is not None
        at_ms = asked.at_ms

        def begin(told: Callable[[OnwardError | None], None]) -> None:
            def stored(number: int, error: OnwardError | None) -> None:
                asked.answer([Found("waiting", number, at_ms, record.topic)], error)
                told(None)

            self.publish_inside(record, due_at_ms=at_ms, replaces=one.number, done=stored)

        return on_loop(begin)

    def publish_inside(
        self, record: Record, *, due_at_ms: int, replaces: int | None,
        done: Callable[[int, OnwardError | None], None],
    ) -> None:  # fmt: skip
        """Schedule a message of the broker itself: a moved one, or a run of a recurring one."""
        batch = encode_batch(
            [record.body], keys=[record.key], headers=[record.headers], tags=[record.tag],
            trace_ids=[record.trace_id], priorities=[record.priority], tenants=[record.tenant],
            due_at_ms=[due_at_ms], topics=[record.topic], uniques=[record.unique],
            replaces=[replaces], time_ms=self._broker.clock.now_ms(),
        )  # fmt: skip
        from onward.broker.schedule_intake import Accepted

        accepted = Accepted([due_at_ms], [record.topic], [record.unique], [replaces], len(batch))
        self._intake.expect(batch, accepted)

        def stored(number: int, error: OnwardError | None) -> None:
            if error is not None:
                self._intake.forget(batch)
            done(number, error)

        self._broker.publishing.publish_inside(
            self._scheduling.inside, self._intake.topic(), batch, count=1, done=stored
        )

    # --- publishes under business keys -------------------------------------------------------

    def _decide_publish(self, asked: _Asked, waiting: dict[str, Waiting]) -> asyncio.Future[None]:
        assert asked.publish is not None
        assert asked.accepted is not None
        accepted, publish = asked.accepted, asked.publish
        try:
            replaces = self._replaces(accepted, waiting)
        except OnwardError as error:
            self._refuse(asked, error)
            return on_loop(lambda told: told(None))
        batch = publish[2]
        if accepted.replaces is not None:
            accepted.replaces = replaces
            packed = _with_replaces(batch, replaces)
            publish[0].unanswered_bytes += len(packed) - len(batch)
            publish = asked.publish = (*publish[:2], packed, *publish[3:])
        self._intake.accept(publish, accepted)
        # What is stored is known when the commit is done: the round waits for a row of its own.
        return on_loop(lambda told: self._broker.publishing.record(list, done=lambda _: told(None)))

    def _replaces(self, accepted: Accepted, waiting: dict[str, Waiting]) -> list[int | None]:
        """Return what each row takes the place of; raise when a key waits and must not be."""
        replaces: list[int | None] = []
        asked = accepted.replaces or [None] * len(accepted.due_at_ms)
        for unique, wish in zip(accepted.uniques or (), asked, strict=True):
            place = waiting.get(unique) if unique is not None else None
            found = None if place is None else self._found(place.number, place)
            if found is None or found.state != "waiting":
                replaces.append(None)
            elif wish is None:
                raise AlreadyExists(
                    f"a message waits already under the unique key {unique!r} "
                    f"(schedule id {found.number}); replace=True takes its place"
                )
            else:
                replaces.append(found.number)
        return replaces

    def _refuse(self, asked: _Asked, error: OnwardError) -> None:
        if asked.publish is not None:
            self._broker.publishing.reject(asked.publish, error)
        else:
            asked.answer([], error)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._round = None
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            logger.error("deciding failed", exc_info=error)
            asked, self._asked = self._asked, []
            for one in asked:
                self._refuse(one, InvalidRequest(f"deciding failed: {error}"))
        elif self._asked:
            asked, self._asked = self._asked, []
            for one in asked:
                self._ask(one)

    def abandon(self) -> None:
        """Decide nothing more: the broker has failed."""
        if self._round is not None:
            self._round.cancel()

    async def stop(self) -> None:
        """Decide nothing more."""
        if self._round is not None:
            self._round.cancel()
            await asyncio.wait([self._round])
        asked, self._asked = self._asked, []
        for one in asked:
            self._refuse(one, Stopping("the broker is stopping"))


def _kind(asked: _Asked) -> tuple[bool, bool]:
    """Tell whether numbers are named, and whether business keys are."""
    return bool(asked.numbers), bool(asked.uniques)


def _told(error: OnwardError | OSError) -> OnwardError:
    return error if isinstance(error, OnwardError) else Unavailable(str(error))


def _with_replaces(packed: Buffer, replaces: list[int | None]) -> bytes:
    """Return a batch as it was, with what it really replaces."""
    batch: Batch = decode_batch(packed, raw_bytes_max=RAW_BYTES_MAX)
    header = batch.header
    return encode_batch(
        batch.bodies, keys=batch.keys, headers=batch.headers, tags=batch.tags,
        trace_ids=batch.trace_ids, due_at_ms=batch.due_at_ms, priorities=batch.priorities,
        tenants=batch.tenants, topics=batch.topics, uniques=batch.uniques, replaces=replaces,
        producer_id=header.producer_id, sequence=header.sequence, time_ms=header.time_ms,
    )  # fmt: skip
