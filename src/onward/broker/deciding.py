"""Decisions about what waits: cancel, move, publish under a business key.

    queued ──▶ a round: looked up (in a thread) ──▶ decided one by one ──▶ durable ──▶ answered

Requests that arrive during a round are decided in the next one, in their order. A round holds the
lock of the schedule until its changes are durable: nothing fires meanwhile, so answers are exact. A
request about a message that the same round has changed waits for the next round. When a round fails
unexpectedly, everybody in it and behind it gets `Unavailable`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from onward.broker.futures import Done, future_of
from onward.broker.recurring_runs import CHANGED, RecurringRuns
from onward.errors import AlreadyExists, OnwardError, Stopping, Unavailable
from onward.log.disk import Buffer
from onward.message.batch import RAW_BYTES_MAX, Batch, decode_batch, encode_batch
from onward.protocol.operations.schedule import State
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


class Found(NamedTuple):
    """What became of a number: waiting or fired with when and where, or gone."""

    state: State
    number: int
    at_ms: int = 0
    topic: str = ""


class _Decision:
    """A cancel, a move (`at_ms`) or a publish that is to be decided."""

    __slots__ = (
        "accepted",
        "at_ms",
        "cause",
        "numbers",
        "outcome",
        "principal",
        "publish",
        "uniques",
    )

    def __init__(
        self, *, numbers: list[int], uniques: list[str], cause: str = "", at_ms: int | None = None,
        publish: Publish | None = None, accepted: Accepted | None = None,
        principal: str = "",
    ) -> None:  # fmt: skip
        self.numbers = numbers
        self.uniques = uniques
        self.outcome: asyncio.Future[list[Found]] = asyncio.get_running_loop().create_future()
        """What became of each number and key. Done once the write path has a publish."""
        self.cause = cause
        self.at_ms = at_ms
        self.publish = publish
        self.accepted = accepted
        self.principal = principal
        """Who moves messages, or replaces them by a publish: it must be allowed to write them."""

    def end(self, found: list[Found], error: OnwardError | None = None) -> None:
        """Answer, unless that was done, or the caller has given up."""
        if self.outcome.done():
            return
        if error is None:
            self.outcome.set_result(found)
        else:
            self.outcome.set_exception(error)


class Deciding:
    """Decides in rounds."""

    def __init__(self, broker: Broker, scheduling: Scheduling, intake: ScheduleIntake) -> None:
        self._broker = broker
        self._scheduling = scheduling
        self._intake = intake
        self._queue: list[_Decision] = []
        self._in_round: list[_Decision] = []
        self._round: asyncio.Task[None] | None = None
        self.recurring = RecurringRuns(broker, scheduling, self)

    @property
    def is_busy(self) -> bool:
        """Tell whether something is being decided, or waits for that."""
        return self._round is not None

    # --- requests ----------------------------------------------------------------------------

    def publish(self, publish: Publish, accepted: Accepted) -> None:
        """Store a batch with business keys, unless one of them waits already."""
        uniques = [one for one in accepted.uniques or () if one is not None]
        decision = _Decision(
            numbers=[], uniques=uniques, publish=publish, accepted=accepted,
            principal=publish[0].principal,
        )  # fmt: skip
        self._add(decision)

    def cancel(
        self, *, numbers: list[int], uniques: list[str], cause: str
    ) -> asyncio.Future[list[Found]]:
        """Cancel messages by number or business key; the future says what became of each."""
        return self._add(_Decision(numbers=numbers, uniques=uniques, cause=cause))

    def move(
        self, *, numbers: list[int], uniques: list[str], at_ms: int, principal: str
    ) -> asyncio.Future[list[Found]]:
        """Schedule one message for another time; the future has its new number.

        It fails with `Forbidden` if the principal may not write the topic of the message.
        """
        decision = _Decision(numbers=numbers, uniques=uniques, at_ms=at_ms, principal=principal)
        return self._add(decision)

    def _add(self, decision: _Decision) -> asyncio.Future[list[Found]]:
        self._queue.append(decision)
        if self._round is None:
            self._round = asyncio.get_running_loop().create_task(self._run())
            self._round.add_done_callback(self._ended)
        return decision.outcome

    # --- a round -----------------------------------------------------------------------------

    async def _run(self) -> None:
        while self._queue:
            async with self._scheduling.lock:
                self._scheduling.take_in()
                self._in_round = self._next_round()
                try:
                    await self._decide(self._in_round)
                except (OnwardError, OSError) as error:
                    for decision in self._in_round:
                        self._refuse(decision, error)
                self._in_round = []
                self._scheduling.take_in()

    def _next_round(self) -> list[_Decision]:
        """Remove decisions from the queue that can be made together: nothing is named twice."""
        decisions: list[_Decision] = []
        named: set[object] = set()
        while self._queue and len(decisions) < ROUND_MAX:
            decision = self._queue[0]
            names: set[object] = {*decision.numbers, *decision.uniques}
            kind = _kind(decision)
            # A key may stand for a number that is named as well: those wait for each other.
            if decisions and (names & named or kind != _kind(decisions[0]) or kind == BOTH):
                break
            if decisions and len(named) + len(names) > NAMES_MAX:
                break
            named |= names
            decisions.append(self._queue.pop(0))
        return decisions

    async def _decide(self, decisions: list[_Decision]) -> None:
        numbers = [number for decision in decisions for number in decision.numbers]
        uniques = [unique for decision in decisions for unique in decision.uniques]
        places = await self._scheduling.files.look_up(numbers, uniques)
        commits: list[asyncio.Future[None]] = []
        failure: Exception | None = None
        for decision in decisions:
            try:
                commits.append(await self._decide_one(decision, places))
            except (OnwardError, OSError) as error:
                # It concerns this decision only: others may be on their way to the disk.
                self._refuse(decision, error)
            except Exception as error:  # noqa: BLE001  (raised again below)
                failure = error
                break
        # Also after a failure: the lock is held until everything that was begun is durable.
        for commit in commits:
            await commit
        if failure is not None:
            raise failure

    async def _decide_one(self, decision: _Decision, places: Places) -> asyncio.Future[None]:
        if decision.publish is not None:
            return self._decide_publish(decision, places.by_unique)
        found = self.found(decision.numbers, decision.uniques, places)
        if decision.at_ms is None:
            return self._cancel(decision, found)
        return await self._move(decision, found)

    def found(self, numbers: list[int], uniques: list[str], places: Places) -> list[Found]:
        """Return what became of numbers and business keys; who calls holds the lock."""
        # What is stored while these are looked up was not there when it was asked about.
        found = [
            self._found(number, places.by_number.get(number))
            if number < places.number_end
            else Found("not_found", number)
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
            return Found("not_found", number)
        if place is None:
            # It is in no part any more: it has fired, and was left out since.
            return Found("fired", number)
        if state.has_fired(place.topic, place.at_ms, number):
            return Found("fired", number, place.at_ms, place.topic)
        return Found("waiting", number, place.at_ms, place.topic)

    def _found_unique(self, place: Waiting | None) -> Found:
        return Found("not_found", -1) if place is None else self._found(place.number, place)

    def _cancel(self, decision: _Decision, found: list[Found]) -> asyncio.Future[None]:
        waiting = [one.number for one in found if one.state == "waiting"]
        if not waiting:
            decision.end(found)
            return future_of(lambda done: done(None))
        row = self._intake.cancelled_row(waiting, cause=decision.cause)

        def begin(done: Done) -> None:
            def stored(error: OnwardError | None) -> None:
                decision.end(found, error)
                if error is None and decision.cause != CHANGED:
                    self.recurring.cancelled(waiting)
                done(None)

            self._broker.consuming.record([row], stored)

        return future_of(begin)

    async def _move(self, decision: _Decision, found: list[Found]) -> asyncio.Future[None]:
        (one,) = found
        if one.state != "waiting":
            decision.end(found)
            return future_of(lambda done: done(None))
        self._broker.policy.require(decision.principal, "write", "topic", one.topic)
        record = await self._scheduling.files.record(one.number)
        assert decision.at_ms is not None
        at_ms = decision.at_ms

        def begin(done: Done) -> None:
            def stored(number: int, error: OnwardError | None) -> None:
                decision.end([Found("waiting", number, at_ms, record.topic)], error)
                done(None)

            self.publish_inside(record, due_at_ms=at_ms, replaces=one.number, done=stored)

        return future_of(begin)

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

    def _decide_publish(
        self, decision: _Decision, waiting: dict[str, Waiting]
    ) -> asyncio.Future[None]:
        assert decision.publish is not None
        assert decision.accepted is not None
        accepted, publish = decision.accepted, decision.publish
        replaces = self._replaces(accepted, waiting, decision.principal)
        batch = publish[2]
        if accepted.replaces is not None:
            accepted.replaces = replaces
            packed = _with_replaces(batch, replaces)
            publish[0].unanswered_bytes += len(packed) - len(batch)
            publish = decision.publish = (*publish[:2], packed, *publish[3:])
        self._intake.accept(publish, accepted)
        decision.end([])
        # The rows wait once the commit is done: the round waits for an empty record of that commit.
        return future_of(
            lambda done: self._broker.publishing.record(list, done=lambda _: done(None))
        )

    def _replaces(
        self, accepted: Accepted, waiting: dict[str, Waiting], principal: str
    ) -> list[int | None]:
        """Return the number that each row replaces; raise if a key waits and is not replaced.

        A message is replaced only by a principal that may write the topic of that message, too.
        """
        replaces: list[int | None] = []
        wishes = accepted.replaces or [None] * len(accepted.due_at_ms)
        for unique, wish in zip(accepted.uniques or (), wishes, strict=True):
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
                self._broker.policy.require(principal, "write", "topic", found.topic)
                replaces.append(found.number)
        return replaces

    def _refuse(self, decision: _Decision, error: Exception) -> None:
        """Answer with an error, unless that was answered before."""
        refusal = error if isinstance(error, OnwardError) else Unavailable(str(error))
        if decision.publish is None:
            decision.end([], refusal)
        elif not decision.outcome.done():
            decision.end([])
            self._broker.publishing.reject(decision.publish, refusal)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._round = None
        if task.cancelled():
            return
        decisions = [*self._in_round, *self._queue]
        self._in_round, self._queue = [], []
        error = task.exception()
        if error is not None:
            logger.error("deciding failed", exc_info=error)
        for decision in decisions:
            if error is None:
                self._add(decision)
            else:
                self._refuse(decision, Unavailable(f"deciding failed: {error}"))

    def abandon(self) -> None:
        """Decide nothing more: the broker has failed."""
        if self._round is not None:
            self._round.cancel()

    async def stop(self) -> None:
        """Decide nothing more."""
        if self._round is not None:
            self._round.cancel()
            await asyncio.wait([self._round])
        decisions, self._queue = self._queue, []
        for decision in decisions:
            self._refuse(decision, Stopping("the broker is stopping"))


def _kind(decision: _Decision) -> tuple[bool, bool]:
    """Return whether numbers are named, and whether business keys are."""
    return bool(decision.numbers), bool(decision.uniques)


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
