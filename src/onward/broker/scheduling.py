"""THE SCHEDULE: from a message that waits to the moment when it becomes visible.

    accept   a batch of `@schedule`: checked, stored, its rows wait          `schedule_intake`
    wait     the newest in memory, the others in sorted runs on disk          `schedule_files`
    fire     what is due, in order: ordinary messages, one commit a step      here
    decide   cancel, move, replace: between two steps, so that the answer is exact   `deciding`

A step takes what is due, and the lock is held until it is durable; decisions hold it too. So
whatever is asked about a message is asked before or after it fired, never meanwhile. Steps overlap:
while one is being written, the next ones are read and join the next commit, in order.

    commit 7   ├──── step 3 ────┤
    commit 8   · take · take ·  ├──── step 4 ────┤      one commit, one step

A commit may be torn by a crash, and within it the order is by topic. So what shares a commit has
one step number, and a new number means that everything of the one before is in the log. Nothing
fires early: no entry gets an earlier time than what was taken as due, and the clock is believed
only as far as time has really passed (`onward.schedule.time`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

from onward.broker.futures import future_of
from onward.broker.inside import Inside
from onward.broker.outcomes import Done
from onward.broker.schedule_files import ScheduleFiles, TooLarge
from onward.broker.schedule_intake import Accepted, ScheduleIntake, accepted_of
from onward.broker.schedule_scan import ScheduleScan
from onward.durations import format_duration, format_instant
from onward.errors import Corruption, InvalidRequest, OnwardError
from onward.log.disk import Buffer
from onward.message.batch import RAW_BYTES_MAX, batches_of, decode_batch
from onward.schedule.order import Order, Taken
from onward.schedule.record import Records, encode_fired
from onward.schedule.state import FIRED, SCHEDULE_TOPIC, ScheduleState
from onward.schedule.time import JUMP_MS_MIN, SteadyTime

if TYPE_CHECKING:
    from onward.broker.broker import Broker
    from onward.broker.catalogue import Topic
    from onward.broker.collected import Staged
    from onward.message.entry import Entry

logger = logging.getLogger("onward.schedule")

STEP_ROWS_MIN = 16
STEP_ROWS_MAX = 16_384
STEP_BYTES_MAX = 4 << 20
BATCH_BYTES_MAX = 512 << 10
LOOK_AGAIN_S = 1.0
"""The clock is looked at so often at least: it may have jumped."""
FAILED_PAUSE_S = 1.0
STEP_PAUSE_S = 0.003
"""From the beginning of a step that took everything due to the next: a step in each millisecond
would keep a core busy, and everything late where cores are scarce."""
OVERLAP_MAX = 16
DUE_COUNT_MS = 1_000


class Turns(asyncio.Lock):
    """A lock whose holder can see that others wait for it, and end what it could go on with."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting_count = 0

    @property
    def is_wanted(self) -> bool:
        """Return True if somebody waits for the lock."""
        return self._waiting_count > 0

    async def acquire(self) -> Literal[True]:
        """Wait for the lock, as others can see."""
        self._waiting_count += 1
        try:
            return await super().acquire()
        finally:
            self._waiting_count -= 1


class Step:
    """Rows that were taken and are on their way to the disk."""

    __slots__ = ("_waits", "commit", "is_plain", "late_ms", "size", "stored", "taken")

    def __init__(
        self, taken: Taken, waits: list[asyncio.Future[None]], *, commit: int, size: int,
        late_ms: int, is_plain: bool,
    ) -> None:  # fmt: skip
        self.taken = taken
        self._waits = waits
        # All of them, so that no error is left behind: they share one commit and its end.
        self.stored = asyncio.gather(*waits, return_exceptions=True)
        self.commit = commit
        self.size = size
        self.late_ms = late_ms
        self.is_plain = is_plain
        """Nothing was cancelled: all of the step is in one commit, and fails with it or not."""

    def check(self) -> None:
        """Raise why the step was not stored, if that is known."""
        for wait in self._waits:
            if wait.done() and (error := wait.exception()) is not None:
                raise error


class Scheduling:
    """All that waits for its time."""

    def __init__(self, broker: Broker, state: ScheduleState) -> None:
        self._broker = broker
        self._loop = asyncio.get_running_loop()
        self.state = state
        self.time = SteadyTime(
            wall_ms=broker.clock.now_ms(), steady_ms=broker.clock.monotonic_ms(),
            hold_ms_max=broker.settings.schedule.jump_hold_ms,
        )  # fmt: skip
        self.lock = Turns()
        self.inside = Inside()
        self.order = Order(last=state.last)
        # Whatever the clock says: what is scheduled from now on comes after what has been taken.
        broker.publishing.time_ms_min = max(0, state.last[0])
        self.files = ScheduleFiles(broker, self)
        self.intake: ScheduleIntake = ScheduleIntake(broker, self)
        self._arrived: list[Accepted] = []
        self._is_stopped = False
        self._alarm = asyncio.Event()
        self._step_rows = STEP_ROWS_MIN
        self._next_step_at = 0.0
        """When the next step may begin, by the loop's clock."""
        self._step_number = state.step
        self._step_commit = -1
        """The commit that the newest step joined: what joins the same one is a part of it."""
        self.fired_count = 0
        self._stored_count = 0
        self.due_count = 0
        """How many are due and have not fired: in a crowd about, counted once a second."""
        self._due_counted_ms = 0
        self._firing_count = 0
        """How many were taken and are being fired: they wait until that is durable."""
        self.late_ms_last = 0
        self.late_ms_max = 0
        self._check_clock()
        self.files.open()
        if not state.is_counted:
            state.waiting, state.is_counted = ScheduleScan(self).recount(), True
        if broker.gate.is_leading:
            self.intake.deciding.recurring.begin()
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(self._ended)

    def _check_clock(self) -> None:
        """Warn when the log has later times than the clock: no entry gets an earlier time."""
        newest_ms = max(self._broker.log.tail.last_time_ms, self.state.last[0])
        behind_ms = newest_ms - self._broker.clock.now_ms()
        if behind_ms > JUMP_MS_MIN:
            logger.warning(
                "the clock is %s behind the newest entry of the log (%s): what is scheduled now, "
                "even with a delay of a second, fires when the clock has reached that time. "
                "Set the clock and restart the broker",
                format_duration(behind_ms), format_instant(newest_ms),
            )  # fmt: skip

    # --- what is stored ----------------------------------------------------------------------

    def stored(self, staged: Sequence[Staged], entries: Sequence[Entry]) -> None:
        """Take in the scheduled batches of a commit, which are durable now."""
        for (topic, publishes), entry in zip(staged, entries, strict=True):
            if topic.name != SCHEDULE_TOPIC:
                continue
            number = entry.base_offset
            for publish in publishes:
                accepted = self.intake.take_accepted(publish[2])
                if accepted is not None:
                    accepted.first_number, accepted.time_ms = number, entry.time_ms
                    # At once: a checkpoint that is made now is that of its log.
                    self._broker.state.apply_scheduled(
                        count=len(accepted.due_at_ms), replaces=accepted.replaces,
                        uniques=accepted.uniques, due_at_ms=accepted.due_at_ms,
                    )  # fmt: skip
                    self._arrived.append(accepted)
                    self._stored_count += 1
                number += publish[3]
        if self._arrived and not self.lock.locked():
            self.take_in()

    def follow(self, entry: Entry, body: Buffer) -> None:
        """Let the messages of an entry of `@schedule` wait that another node has accepted."""
        number = entry.base_offset
        for start, header in batches_of(body, 0, len(body)):
            batch = decode_batch(body, start, raw_bytes_max=RAW_BYTES_MAX)
            accepted = accepted_of(batch, memoryview(body)[start : start + header.length])
            accepted.first_number, accepted.time_ms = number, entry.time_ms
            self._arrived.append(accepted)
            number += header.count
        if not self.lock.locked():
            self.take_in()

    def take_in(self) -> None:
        """Let what has arrived wait with the others; never while the order is being used."""
        arrived, self._arrived = self._arrived, []
        for accepted in arrived:
            self.files.add(accepted)
        if arrived:
            # Something new waits: it may be due before what was waited for.
            self.wake()

    # --- fire --------------------------------------------------------------------------------

    async def _run(self) -> None:
        while self._broker.failure is None and not self._is_stopped:
            await self._until_due()
            async with self.lock:
                self.take_in()
                try:
                    if self._broker.gate.is_leading:
                        await self._fire_due()
                    else:
                        await self._skip_fired()
                except (OnwardError, OSError) as error:
                    logger.warning("firing failed and will be tried again: %s", error)
                    if isinstance(error, Corruption):
                        raise
                    await asyncio.sleep(FAILED_PAUSE_S)
                self.take_in()
            self.files.tend()
        self.abandon()

    async def _skip_fired(self) -> None:
        """Leave out of the order what the leader has fired."""
        await self._broker.in_thread(lambda: self.order.skip(self.state.last))

    async def lead(self) -> None:
        """Begin to fire: this node was a follower until now."""
        async with self.lock:
            self.take_in()
            await self._skip_fired()
            self._step_number, self._step_commit = self.state.step, -1
            publishing = self._broker.publishing
            publishing.time_ms_min = max(publishing.time_ms_min, self.state.last[0])
        self.intake.deciding.recurring.begin()
        self.wake()

    def now_ms(self) -> int:
        """Return the time up to which messages are due."""
        clock = self._broker.clock
        jump_ms = self.time.jump_ms(clock.now_ms(), clock.monotonic_ms())
        if jump_ms:
            logger.warning(_jump_text(jump_ms, hold_ms_max=self.time.hold_ms_max))
        return self.time.now_ms(clock.now_ms(), clock.monotonic_ms())

    async def _until_due(self) -> None:
        """Wait until something is due, or for a moment: the clock may jump."""
        head_ms = self.order.next_ms()
        wait_s = LOOK_AGAIN_S
        if head_ms is not None and self._broker.gate.is_leading:
            wait_s = min(wait_s, (head_ms - self.now_ms()) / 1000)
        is_running = self._broker.failure is None and not self._broker.gate.is_stopping
        if wait_s <= 0 and is_running:
            # Others have their turn of the loop, also when much is due.
            await asyncio.sleep(self._pause_s())
            return
        self._alarm.clear()
        try:
            async with asyncio.timeout(max(wait_s, self._pause_s(), 0.001)):
                await self._alarm.wait()
        except TimeoutError:
            pass

    def _pause_s(self) -> float:
        """Return how long it is until the next step may begin; timers have whole milliseconds."""
        pause_s = self._next_step_at - self._loop.time()
        return pause_s if pause_s >= 0.001 else 0.0

    def wake(self) -> None:
        """Look at once whether something is due: what waits, or the clock, has changed."""
        self._alarm.set()

    @property
    def is_busy(self) -> bool:
        """Tell whether something is due, on its way, being decided, or being built or merged."""
        head_ms = self.order.next_ms()
        is_due = head_ms is not None and head_ms <= self.now_ms()
        is_coming = bool(self._arrived) or self.intake.is_busy
        return is_due or is_coming or self.lock.locked() or self.files.is_at_work

    async def _fire_due(self) -> None:
        """Fire what is due in overlapping steps, until nothing is left or others want the lock."""
        in_flight: deque[Step] = deque()
        try:
            step = await self._begin_step(in_flight)
            while step is not None:
                in_flight.append(step)
                step = await self._next_step(in_flight)
        except asyncio.CancelledError:
            # The broker ends: a commit that is not done by now may never be.
            raise
        except BaseException:
            await self._settle(in_flight)
            raise
        await self._settle(in_flight)

    async def _next_step(self, in_flight: deque[Step]) -> Step | None:
        """Begin a step while others are being written; None when these must be settled first."""
        while True:
            await asyncio.sleep(0)  # a commit that can begin now has begun after this
            await self._finish_stored(in_flight, wait_s=self._pause_s())
            while in_flight and (pause_s := self._pause_s()):
                await self._finish_stored(in_flight, wait_s=pause_s)
            if not self._may_overlap(in_flight):
                return None
            if _has_room(in_flight):
                self.take_in()
                self.files.tend()
                step = await self._begin_step(in_flight)
                if step is not None:
                    return step
            await self._finish_stored(in_flight, wait_s=0.001)
            if not in_flight:
                return None

    def _may_overlap(self, in_flight: deque[Step]) -> bool:
        is_running = self._broker.failure is None and not self._is_stopped
        is_free = is_running and not self.lock.is_wanted
        return is_free and bool(in_flight) and all(step.is_plain for step in in_flight)

    async def _finish_stored(self, in_flight: deque[Step], *, wait_s: float) -> None:
        """Wait a moment for the first step, and finish those that are durable."""
        if in_flight:
            await asyncio.wait([in_flight[0].stored], timeout=wait_s)
        while in_flight and in_flight[0].stored.done():
            await self._finish_first(in_flight)

    async def _settle(self, in_flight: deque[Step]) -> None:
        """Wait until every step is durable."""
        while in_flight:
            await asyncio.wait([in_flight[0].stored])
            await self._finish_first(in_flight)

    async def _finish_first(self, in_flight: deque[Step]) -> None:
        """Finish the first step. If it failed, those after it did too: their rows wait again."""
        try:
            self._finish(in_flight[0])
        except Exception:
            await asyncio.wait([step.stored for step in in_flight])
            while in_flight:
                await self._give_back(in_flight.pop().taken)
            raise
        in_flight.popleft()

    async def _begin_step(self, in_flight: deque[Step]) -> Step | None:
        """Take what is due and hand it to the next commit; None when there is nothing now."""
        publishing = self._broker.publishing
        if not self._broker.gate.is_leading or self._broker.gate.is_stopping:
            return None
        if self._broker.failure is not None:
            return None
        bound_ms = self.now_ms()
        head_ms = self.order.next_ms()
        if head_ms is None or head_ms > bound_ms:
            return None
        if (scheduled_ms := publishing.scheduled_under_way_ms) is not None:
            # What is just being written may be due as well: it must not come after its time.
            bound_ms = min(bound_ms, scheduled_ms - 1)
        publishing.time_ms_min = max(publishing.time_ms_min, bound_ms)
        began_at = self._loop.time()
        try:
            taken, records = await self._take(bound_ms, limit=self._step_rows)
        except TooLarge as enough:
            self._step_rows = max(1, enough.count)
            return None
        if not len(taken):
            await asyncio.sleep(0.001)
            return None
        if len(taken) < self._step_rows:
            self._next_step_at = began_at + STEP_PAUSE_S
        try:
            await self._count_due(bound_ms, is_all=len(taken) < self._step_rows)
            # Without any wait in between: nothing may be stored behind a step that was not.
            for step in in_flight:
                step.check()
            return self._fire(taken, records)
        except BaseException:
            await self._give_back(taken)
            raise

    async def _take(self, bound_ms: int, *, limit: int) -> tuple[Taken, Records]:
        """Take the rows that are due, and read their messages; on an error they wait again."""
        bytes_max = STEP_BYTES_MAX * 4

        def take() -> tuple[Taken, Records | None]:
            taken = self.order.take(now_ms=bound_ms, limit=limit)
            self._firing_count += len(taken)
            try:
                return taken, self.files.records_of_runs(taken, bytes_max=bytes_max)
            except BaseException:
                self._put_back(taken)
                raise

        if self.order.is_in_memory(bound_ms):
            taken, records = take()
        else:
            taken, records = await self._broker.in_thread(take)
        if records is None:
            try:
                records = await self.files.records(taken, bytes_max=bytes_max)
            except BaseException:
                await self._give_back(taken)
                raise
        return taken, records

    async def _give_back(self, taken: Taken) -> None:
        await self._broker.in_thread(lambda: self._put_back(taken))

    def _put_back(self, taken: Taken) -> None:
        self._firing_count -= len(taken)
        self.order.give_back(taken)

    async def _count_due(self, now_ms: int, *, is_all: bool) -> None:
        """Know how many are due with those being fired; where more are left, look seldom."""
        firing = self._firing_count
        if is_all:
            self.due_count = firing
        elif self.due_count <= firing or now_ms - self._due_counted_ms >= DUE_COUNT_MS:
            self._due_counted_ms = now_ms
            left = await self._broker.in_thread(lambda: self.order.count_due(now_ms))
            self.due_count = firing + left

    def _fire(self, taken: Taken, records: Records) -> Step:
        """Hand the messages of a step to the next commit."""
        size = sum(records.sizes())
        self._pace(size, len(taken))
        late_ms = self._broker.clock.now_ms() - taken.rows.at_ms[0]
        commit = self._broker.publishing.commit_count
        if taken.before >= self.state.step_last and commit != self._step_commit:
            # Not before: what a torn step has left is a part of that step still.
            self._step_number += 1
        self._step_commit = commit
        pieces, waits = self._kept(records)
        is_plain = not waits
        waits += [future_of(partial(self._publish, topic, some)) for topic, some in pieces]
        return Step(taken, waits, commit=commit, size=size, late_ms=late_ms, is_plain=is_plain)

    def _finish(self, step: Step) -> None:
        """Take note that a step is durable; raise what became of it otherwise."""
        step.check()
        self.state.finish_step(step.taken.last)
        self._firing_count -= len(step.taken)
        self.due_count = max(0, self.due_count - len(step.taken))
        self.late_ms_last = step.late_ms
        self.late_ms_max = max(self.late_ms_max, step.late_ms)

    def _pace(self, size: int, count: int) -> None:
        """Take so many the next time that a step has about the size that it should have."""
        fitting = STEP_BYTES_MAX * count // max(size, 1)
        self._step_rows = max(STEP_ROWS_MIN, min(fitting, count * 4, STEP_ROWS_MAX))
        self._step_rows = max(self._step_rows, min(self._step_rows * 4, STEP_ROWS_MAX, fitting))

    def _kept(
        self, records: Records
    ) -> tuple[list[tuple[Topic, Records]], list[asyncio.Future[None]]]:
        """Return what really fires, by topic, in pieces of the size of an entry.

        What cannot be delivered anywhere is cancelled, and said: that must be durable as well.
        """
        pieces: list[tuple[Topic, Records]] = []
        cancels: list[asyncio.Future[None]] = []
        for name, some in records.by_topic().items():
            kept = self._waiting(name, some)
            if not kept.count:
                continue
            try:
                topic = self._topic(name)
            except InvalidRequest as error:
                logger.warning("%d messages cannot fire: %s", kept.count, error)
                cause = f"it could not fire: {error}"
                cancels.append(self.intake.cancel_numbers(kept.numbers, cause=cause))
                self.intake.deciding.recurring.cancelled(kept.numbers)
            else:
                pieces += [(topic, piece) for piece in _in_pieces(kept)]
        return pieces, cancels

    def _waiting(self, topic: str, records: Records) -> Records:
        """Leave out what was cancelled or replaced, and what fired before a crash."""
        state, cursor = self.state, self.state.cursor_of(topic)
        numbers = records.numbers
        has_gone = len(state.cancelled) or len(state.replaced)
        if not has_gone and (records.at_ms[0], numbers[0]) > cursor:
            return records
        rows = [
            row
            for row, (at_ms, number) in enumerate(zip(records.at_ms, numbers, strict=True))
            if (at_ms, number) > cursor and not state.is_gone(number)
        ]
        return records if len(rows) == records.count else records.select(rows)

    def _topic(self, name: str) -> Topic:
        """Return the topic to fire to. One that is just ending is waited for: it begins again."""
        topic = self._broker.catalogue.by_name.get(name)
        if topic is not None and not topic.ending:
            return topic
        return self._broker.publishing.create_on_use(
            name, lambda error: None, even_beyond_count=True
        )

    def _publish(self, topic: Topic, records: Records, done: Done) -> None:
        step, last = self._step_number, (records.at_ms[-1], records.numbers[-1])
        batch = encode_fired(records, producer_id=FIRED, sequence=step, time_ms=last[0])

        def stored(offset: int, error: OnwardError | None) -> None:
            if error is None:
                self.state.fired(
                    topic.name, step=step, at_ms=last[0], number=last[1], count=records.count
                )
                self.fired_count += records.count
                self.intake.fired(records)
            done(error)

        self._broker.publishing.publish_inside(
            self.inside, topic, batch, count=records.count, done=stored
        )

    # --- all of it ---------------------------------------------------------------------------

    @property
    def waiting_count(self) -> int:
        """Return how many messages wait and will fire: no cancelled or replaced ones."""
        return self.state.waiting

    @property
    def changes(self) -> tuple[int, int, int, int]:
        """Return numbers of which one is different when what waits has changed."""
        gone = self.state.cancelled.count, self.state.replaced.count
        return self.fired_count, self._stored_count, *gone

    def arrived_count(self, topics: Collection[str]) -> int:
        """Return how many messages of these topics have arrived and are not in the order yet."""
        return sum(
            topic in topics and not self.state.is_gone(number)
            for accepted in self._arrived
            for number, topic in enumerate(accepted.topics, accepted.first_number)
        )

    def status(self) -> dict[str, object]:
        """Return how the schedule is, as numbers."""
        # The order still holds cancelled rows, until their time or a merge: alone they are nothing.
        head_ms = self.order.next_ms() if self.waiting_count else None
        now_ms = self._broker.clock.now_ms()
        return {
            "scheduled": self.waiting_count,
            "due_now": min(self.due_count, self.waiting_count),
            "next_due_at_ms": head_ms or 0,
            "fired": self.fired_count,
            "late_ms": self.late_ms_last if head_ms is None else max(0, now_ms - head_ms),
            "late_ms_max": self.late_ms_max,
            "schedule_runs": len(self.state.runs),
            "schedule_ahead_ms_max": self._broker.settings.schedule.ahead_ms_max,
        }

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broker.fail(error if isinstance(error, Exception) else RuntimeError(str(error)))

    def abandon(self) -> None:
        """Do nothing more at all: the broker has failed."""
        self._task.cancel()
        self.files.abandon()
        self.intake.deciding.abandon()

    async def stop(self) -> None:
        """Fire nothing more, and close the files.

        A step or a decision that is on its way to the disk comes to its end first: what is decided
        after it must know how it ended.
        """
        self._is_stopped = True
        try:
            async with asyncio.timeout(self._broker.settings.server.stop_ms / 1000), self.lock:
                self._task.cancel()
                self.intake.deciding.abandon()
        except TimeoutError:
            logger.warning("stopping without waiting longer for what fires")
            self._task.cancel()
        await asyncio.wait([self._task])
        await self.intake.deciding.stop()
        await self.files.close()


def _jump_text(jump_ms: int, *, hold_ms_max: int) -> str:
    """Return what a jump of the clock means for the schedule."""
    if jump_ms < 0:
        return (
            f"the clock went back by {format_duration(-jump_ms)}: waiting messages fire when the "
            f"clock reaches their time again, and what is scheduled meanwhile fires when the clock "
            f"has reached the newest time of the log"
        )
    return (
        f"the clock jumped forward by {format_duration(jump_ms)}: messages fire by the time that "
        f"really passes until the new time is believed, "
        f"in {format_duration(min(jump_ms, hold_ms_max))}"
    )


def _has_room(in_flight: deque[Step]) -> bool:
    """Return True if another step may be read: memory stays bounded."""
    size = sum(step.size for step in in_flight)
    return len(in_flight) < OVERLAP_MAX and size < STEP_BYTES_MAX


def _in_pieces(records: Records) -> list[Records]:
    """Split records of one topic so that each piece becomes an entry of the usual size."""
    sizes = records.sizes()
    if sum(sizes) <= BATCH_BYTES_MAX:
        return [records]
    pieces, start, size = [], 0, 0
    for row, one in enumerate(sizes):
        if row > start and size + one > BATCH_BYTES_MAX:
            pieces.append(records.slice(start, row))
            start, size = row, 0
        size += one
    pieces.append(records.slice(start, records.count))
    return pieces
