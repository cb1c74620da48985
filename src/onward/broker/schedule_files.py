"""Where scheduled messages wait: the newest in the log, with their times in memory; older in runs.

    @schedule ──▶ tail (rows in memory, messages in the log) ──▶ run ──▶ larger run ──▶ gone

When the tail is long, a child builds a run of it; runs of one size are merged, eight at a time, and
what has fired or was cancelled is left out. A run counts once a checkpoint names it; before that
the log still has its messages, so a crash at any moment loses nothing. Files of runs are read in
threads, and only by who holds the lock of the schedule. Merging waits while much is to be built.
When building cannot keep up, what is scheduled waits to be accepted: memory stays small, and so
does what a restart has to read again.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from onward.broker.schedule_log import READ_BYTES_MAX, ScheduleLog
from onward.errors import Corruption, OnwardError, Unavailable
from onward.log.disk import OsDisk
from onward.message.columns import Column
from onward.schedule.aside import NICE, Aside, BuildPlan, MergePlan, Plan, perform
from onward.schedule.ids import Ids
from onward.schedule.layout import ROWS_MAX
from onward.schedule.order import BEFORE_ALL, Moment, Part, Rows, TailPart, Taken, accepted_rows
from onward.schedule.record import Record, Records
from onward.schedule.run import Run, Waiting
from onward.schedule.state import SCHEDULE_TOPIC
from onward.schedule.writer import RunSummary

if TYPE_CHECKING:
    from onward.broker.broker import Broker
    from onward.broker.schedule_intake import Accepted
    from onward.broker.scheduling import Scheduling

logger = logging.getLogger("onward.schedule")

T = TypeVar("T")

TAIL_ROWS_MAX = 65_536
TAIL_BYTES_MAX = 32 << 20
FIRST_ROWS = 16
STEP_ROWS_MAX = 16_384
MERGED_RUNS = 8
TIER_ROWS = 65_536
BUILDS_PER_CHECKPOINT = 8
TAILS_PER_BUILD = 8
TAILS_MAX = 16
RUNS_MAX = 256
"""With so many tails or runs, nothing is accepted until there are fewer."""
FAILED_PAUSE_MS = 10_000
LOOK_EVERY_MS = 60_000


class TooLarge(Exception):
    """What was taken has too many bytes; `count` messages of it were enough."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} messages are enough")
        self.count = count


class Places(NamedTuple):
    """Where numbers and business keys are."""

    by_number: dict[int, Waiting]
    by_unique: dict[str, Waiting]
    number_end: int
    """All numbers that were looked through are below."""


class ScheduleFiles:
    """The parts of the schedule, and how they become others."""

    def __init__(self, broker: Broker, scheduling: Scheduling) -> None:
        self._broker = broker
        self._log = broker.log
        self._scheduling = scheduling
        self._in_log = ScheduleLog(broker.log, broker.catalogue, broker.in_thread)
        self._tails: list[_Tail] = []
        self._runs: dict[str, Run] = {}
        self._building: asyncio.Task[None] | None = None
        self._merging: asyncio.Task[None] | None = None
        self._children: set[Aside] = set()
        self._noting = asyncio.Lock()
        self._builds = 0
        self._again_at_ms = 0
        self._looked_at_ms = self._noted_at_ms = 0
        self._is_in_the_way = False
        """Retention waits for segments that hold scheduled messages: they go to a run at once."""
        self._ids = Ids(self._log.disk, self._log.folder)
        self._garbage: list[str] = []
        """Files that no checkpoint will name any more."""

    # --- opening -----------------------------------------------------------------------------

    def open(self) -> None:
        """Open the runs, and read again what waits in the log only."""
        state, disk, folder = self._scheduling.state, self._log.disk, self._log.folder
        known, names = {*state.runs}, disk.list_folder(folder)
        self._ids.open(names, built_end=state.built_end)
        unknown = {one for one in names if one.startswith("schedule-")} - known
        if unknown:
            self._check_log()
        for name in sorted(unknown):
            disk.remove(f"{folder}/{name}")
        for name in state.runs:
            try:
                self._add_run(name, Run.open(disk, f"{folder}/{name}"))
            except FileNotFoundError:
                raise Corruption(
                    f"{folder}/{name} is missing: scheduled messages wait in it"
                ) from None
        tail = _Tail(state.built_end)
        topic = self._broker.catalogue.by_name.get(SCHEDULE_TOPIC)
        if topic is not None:
            for records in self._read_all(state.built_end, topic.next_offset):
                tail.take_back(records)
        # Not before it is whole: some of its rows have fired, and nothing comes in behind those.
        self._add_tail(tail)

    def _check_log(self) -> None:
        """Raise when what waits is neither in a run that is known nor in the log.

        Only then may files go that nobody knows: they were built from what the log still has.
        """
        topic = self._broker.catalogue.by_name.get(SCHEDULE_TOPIC)
        start = self._scheduling.state.built_end
        if topic is None or topic.next_offset <= start:
            return
        span = next(self._in_log.spans(start, topic.next_offset), None)
        if span is None or span.first_offset > start:
            raise Corruption(
                f"scheduled messages from number {start} on are not in the log, and no checkpoint "
                f"names a run that holds them: restore the checkpoints of {self._log.folder}"
            )

    def _read_all(self, start: int, end: int) -> Iterator[Records]:
        for span in self._in_log.spans(start, end):
            for records in self._in_log.read([span]):
                if records.count and records.numbers[-1] >= start:
                    first = max(0, start - records.numbers[0])
                    yield records.slice(first, records.count) if first else records

    # --- what comes in -----------------------------------------------------------------------

    def add(self, accepted: Accepted) -> None:
        """Let a stored batch wait."""
        if not self._tails[-1].has_room(accepted):
            self._add_tail(_Tail(self._tails[-1].part.number_end))
        self._tails[-1].add(accepted)

    # --- what fires --------------------------------------------------------------------------

    async def records(self, taken: Taken, *, bytes_max: int | None = None) -> Records:
        """Return the messages of rows that were taken, in the order in which they fire.

        Raises `TooLarge` when they have more than `bytes_max` bytes: they are not all read then.
        """
        gathering = _Gathering(taken, bytes_max)
        for part, rows in gathering.pieces(self._first_rows):
            gathering.add(await self._records_of(part, rows))
        return gathering.in_order()

    def records_of_runs(self, taken: Taken, *, bytes_max: int) -> Records | None:
        """Return what `records` does, read in this thread; None if some rows are in the log only.

        Planning a read of the log belongs to the loop's thread; a run can be read in any.
        """
        gathering = _Gathering(taken, bytes_max)
        if not all(isinstance(part, Run) for part, _ in taken.slices):
            return None
        for part, rows in gathering.pieces(self._first_rows):
            assert isinstance(part, Run)
            gathering.add(part.records_of(rows))
        return gathering.in_order()

    def _first_rows(self, part: Part) -> int:
        """Return how many rows of a part to read first: a tail knows how large its messages are.

        A tail has a limit of bytes, so a wrong guess is bounded. A run has none: few rows first.
        """
        for tail in self._tails:
            if tail.part is part:
                return max(FIRST_ROWS, READ_BYTES_MAX * part.rows_total // max(tail.bytes, 1))
        return FIRST_ROWS

    async def _records_of(self, part: Part, rows: Rows) -> Records:
        if isinstance(part, Run):
            return await self.read(lambda: part.records_of(rows))
        return await self._in_log.records(list(rows.numbers))

    # --- what is asked -----------------------------------------------------------------------

    async def read(self, work: Callable[[], T]) -> T:
        """Read files of runs in a thread; the caller holds the lock.

        A caller that is cancelled, because its connection is lost, keeps the lock until the thread
        has ended: a merge would close the files that it reads.
        """
        return await self._broker.in_thread(work, to_the_end=True)

    async def look_up(self, numbers: Sequence[int], uniques: Sequence[str]) -> Places:
        """Find numbers and business keys; who calls holds the lock.

        A number that is in no part any more has fired: of it only what its file of ids says.
        """
        by_number: dict[int, Waiting] = {}
        by_unique: dict[str, Waiting] = {}
        number_end = self._tails[-1].part.number_end
        for unique in uniques:
            for tail in reversed(self._tails):
                if (number := tail.uniques.get(unique)) is not None:
                    by_unique[unique] = tail.place_of(number)
                    break
        for number in numbers:
            for tail in self._tails:
                if tail.holds(number):
                    by_number[number] = tail.place_of(number)
        runs = list(self._runs.values())
        # In order: then each block of an index is read once, however many rows are asked for.
        missing = sorted(one for one in numbers if one not in by_number)
        unseen = [one for one in uniques if one not in by_unique]

        def read() -> None:
            for run in runs:
                start = bisect_left(missing, run.number_start)
                for number in missing[start : bisect_left(missing, run.number_end)]:
                    place = run.place_of(number)
                    if place is not None:
                        by_number[number] = place
                for unique in unseen:
                    place = next(iter(run.find_unique(unique)), None)
                    known = by_unique.get(unique)
                    if place is not None and (known is None or place.number > known.number):
                        by_unique[unique] = place
            by_number.update(self._ids.places([one for one in missing if one not in by_number]))

        if missing or (runs and unseen):
            await self.read(read)
        return Places(by_number, by_unique, number_end)

    async def record(self, number: int) -> Record:
        """Return the message with this number, which waits; who calls holds the lock."""
        if any(tail.holds(number) for tail in self._tails):
            return (await self._in_log.records([number])).record(0)
        runs = [run for run in self._runs.values() if run.number_start <= number < run.number_end]

        def read() -> Record | None:
            return next((found for run in runs if (found := run.find(number)) is not None), None)

        record = await self.read(read)
        if record is None:
            raise Corruption(f"scheduled message {number} is not in its run")
        return record

    async def peek(self, *, after: Moment, until_ms: int, limit: int, bytes_max: int) -> Records:
        """Return what waits after a moment and up to a time; who calls holds the lock.

        Raises `TooLarge` when so many have more than `bytes_max` bytes.
        """
        order = self._scheduling.order
        taken = await self.read(lambda: order.peek(after=after, until_ms=until_ms, limit=limit))
        if not len(taken):
            return Records.empty()
        return await self.records(taken, bytes_max=bytes_max)

    @property
    def runs(self) -> list[Run]:
        """Return the runs, to be read by who holds the lock."""
        return list(self._runs.values())

    @property
    def tails(self) -> list[_Tail]:
        """Return the tails, the oldest first."""
        return self._tails

    @property
    def is_at_work(self) -> bool:
        """Tell whether a run is being built or merged."""
        return self._building is not None or self._merging is not None

    @property
    def is_behind(self) -> bool:
        """Tell whether so much waits to be built or merged that no more is accepted."""
        return len(self._tails) > TAILS_MAX or len(self._runs) > RUNS_MAX

    # --- tending -----------------------------------------------------------------------------

    def tend(self) -> None:
        """Build and merge when it is time; one of each at a time, aside."""
        if self._broker.gate.is_stopping or self._broker.failure is not None:
            return
        if self._broker.clock.monotonic_ms() < self._again_at_ms:
            return
        loop = asyncio.get_running_loop()
        if self._building is None:
            tail = self._tails[-1]
            is_wanted = self._is_in_the_way and bool(tail.part.rows_total)
            if tail.is_full or is_wanted or self._holds_up_retention(tail):
                self._add_tail(_Tail(tail.part.number_end))
            if len(self._tails) > 1 or self._is_in_the_way:
                self._building = loop.create_task(self._build())
                self._building.add_done_callback(self._built)
        is_pressed = len(self._tails) > TAILS_PER_BUILD and len(self._runs) <= RUNS_MAX // 2
        if self._merging is None and not is_pressed and (runs := self._to_merge()):
            self._merging = loop.create_task(self._merge(runs))
            self._merging.add_done_callback(self._merged)

    def make_way(self) -> None:
        """Move scheduled messages from the log to a run now: retention needs their segment."""
        if not self._is_in_the_way:
            logger.info("retention waits for scheduled messages: they are moved to a run first")
            self._is_in_the_way = True
            self.tend()

    def _holds_up_retention(self, tail: _Tail) -> bool:
        """Tell whether the tail begins in an old segment, which could go without it."""
        now_ms = self._broker.clock.monotonic_ms()
        if not tail.part.rows_total or now_ms < self._looked_at_ms + LOOK_EVERY_MS:
            return False
        self._looked_at_ms = now_ms
        span = next(self._in_log.spans(tail.part.number_start, tail.part.number_end), None)
        return span is not None and span.segment is not self._log.tail

    def _add_tail(self, tail: _Tail) -> None:
        self._tails.append(tail)
        self._scheduling.order.add(tail.part)

    def _built(self, task: asyncio.Task[None]) -> None:
        self._building = None
        self._worked(task)

    def _merged(self, task: asyncio.Task[None]) -> None:
        self._merging = None
        self._worked(task)

    def _worked(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._scheduling.intake.go_on()
            self.tend()
        elif isinstance(error, OnwardError | OSError):
            logger.warning("tending the schedule failed and will be tried again: %s", error)
            self._again_at_ms = self._broker.clock.monotonic_ms() + FAILED_PAUSE_MS
            self._scheduling.intake.refuse_held(error)
        else:
            self._broker.fail(error if isinstance(error, Exception) else RuntimeError(str(error)))

    async def _build(self) -> None:
        """Make runs of the oldest tails, never of the newest; a checkpoint names them in time."""
        if len(self._tails) > 1:
            await self._build_runs(self._tails[:-1][:TAILS_PER_BUILD])
        now_ms = self._broker.clock.monotonic_ms()
        is_late = now_ms >= self._noted_at_ms + LOOK_EVERY_MS
        if self._builds >= BUILDS_PER_CHECKPOINT or is_late or self._is_in_the_way:
            await self._note()
            self._is_in_the_way = False

    async def _build_runs(self, tails: list[_Tail]) -> None:
        start, end = tails[0].part.number_start, tails[-1].part.number_end
        topic = self._broker.catalogue.by_name[SCHEDULE_TOPIC]
        files: list[str] = []
        pieces: list[tuple[int, int, int]] = []
        for span in self._in_log.spans(start, end):
            if span.segment.path not in files:
                files.append(span.segment.path)
            pieces.append((files.index(span.segment.path), span.position, span.length))
        state = self._scheduling.state
        plan = BuildPlan(
            path=self._new_path(), topic=topic.number, files=tuple(files), pieces=tuple(pieces),
            start=start, end=end, cursors=self._cursors(), cancelled=self._gone(),
            ids_folder=self._log.folder,
        )  # fmt: skip
        summary = await self._perform(plan, is_urgent=len(self._tails) > TAILS_PER_BUILD)
        async with self._scheduling.lock:
            self._scheduling.take_in()
            opened = await self._open_runs(summary)
            # Together: neither a checkpoint nor the order may see one without the other.
            self._scheduling.order.exchange([tail.part for tail in tails], list(opened.values()))
            for tail in tails:
                self._tails.remove(tail)
            self._runs |= opened
            state.runs = [*state.runs, *opened]
            state.built_end = end
            self._ids.add(summary.ids)
            self._ids.forget(oldest_ms=self._log.segments[0].first_time_ms())
        self._builds += 1

    def _to_merge(self) -> list[str]:
        """Return the runs to merge next: eight of one size; those that have fired go alone."""
        last = self._scheduling.state.last
        fired = [name for name, run in self._runs.items() if run.last <= last]
        if fired:
            return fired[:MERGED_RUNS]
        tiers: dict[int, list[str]] = {}
        for name, run in self._runs.items():
            if run.rows_total >= ROWS_MAX // 2:
                # As large as one becomes: it is written again when most of it has fired.
                if run.count * 2 < run.rows_total:
                    return [name]
                continue
            tier = (max(run.rows_total, 1) // TIER_ROWS).bit_length() // 3
            tiers.setdefault(tier, []).append(name)
        for names in tiers.values():
            if len(names) >= MERGED_RUNS:
                return names[:MERGED_RUNS]
        return []

    async def _merge(self, names: list[str]) -> None:
        state, last = self._scheduling.state, self._scheduling.state.last
        folder = self._log.folder
        runs = [self._runs[name] for name in names]
        summary = RunSummary(0, 0)
        if any(run.last > last for run in runs):
            plan = MergePlan(
                path=self._new_path(), runs=tuple(f"{folder}/{name}" for name in names),
                cursors=self._cursors(), cancelled=self._gone(),
            )  # fmt: skip
            summary = await self._perform(plan, is_urgent=len(self._runs) > RUNS_MAX // 2)
        async with self._scheduling.lock:
            self._scheduling.take_in()
            opened = await self._open_runs(summary)
            self._scheduling.order.exchange(runs, list(opened.values()))
            for name in names:
                self._runs.pop(name).close()
            self._runs |= opened
            state.runs = [*(one for one in state.runs if one not in names), *opened]
            self._garbage += names
        await self._note()

    async def _perform(self, plan: Plan, *, is_urgent: bool) -> RunSummary:
        """Let a child work where one can see the disk; else work here."""
        if not isinstance(self._log.disk, OsDisk):
            return await self._broker.in_thread(lambda: self._perform_here(plan))
        child = Aside(plan, nice=0 if is_urgent else NICE)
        self._children.add(child)
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(child.fileno(), ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(child.fileno())
        self._children.discard(child)
        return await self._broker.in_thread(child.wait)

    def _perform_here(self, plan: Plan) -> RunSummary:
        if self._broker.failure is not None:
            raise Unavailable("the broker has failed")
        return perform(plan, self._log.disk)

    async def _open_runs(self, summary: RunSummary) -> dict[str, Run]:
        """Open runs, each standing where the order is; who calls holds the lock."""
        disk, last = self._log.disk, self._scheduling.order.last

        def open_all() -> dict[str, Run]:
            opened = {}
            for path in summary.paths:
                run = opened[path.rsplit("/", 1)[-1]] = Run.open(disk, path)
                run.seek(last)
            return opened

        return await self._broker.in_thread(open_all)

    def _add_run(self, name: str, run: Run) -> None:
        self._runs[name] = run
        self._scheduling.order.add(run)

    async def _note(self) -> None:
        """Let a checkpoint name the runs; then what they replace may go."""
        async with self._noting:
            await self._checkpoint()

    async def _checkpoint(self) -> None:
        self._builds, self._noted_at_ms = 0, self._broker.clock.monotonic_ms()
        if self._broker.failure is not None:
            return
        garbage = list(self._garbage)
        built_end = self._scheduling.state.built_end
        await self._broker.housekeeping.checkpoint(copies=2)
        for name in garbage:
            self._log.disk.remove(f"{self._log.folder}/{name}")
            self._garbage.remove(name)
        topic = self._broker.catalogue.by_name.get(SCHEDULE_TOPIC)
        if topic is not None and built_end > topic.first_offset:
            topic.first_offset = built_end
            self._broker.housekeeping.retain_soon()

    def _new_path(self) -> str:
        state = self._scheduling.state
        state.serial += 1
        return f"{self._log.folder}/schedule-{state.serial:08d}.run"

    def _cursors(self) -> dict[str, Moment]:
        """Return up to where each topic has fired, as a build or a merge must know it."""
        state = self._scheduling.state
        if state.last == BEFORE_ALL and not state.cursors:
            return {}
        topics = {*state.cursors}
        for run in self._runs.values():
            topics.update(run.topics)
        for tail in self._tails:
            topics.update(tail.topics)
        return {topic: state.cursor_of(topic) for topic in topics}

    def _gone(self) -> bytes:
        state = self._scheduling.state
        if not len(state.replaced):
            return state.cancelled.save() if len(state.cancelled) else b""
        both = type(state.cancelled).load(state.cancelled.save())
        both.add_many(state.replaced)
        return both.save()

    def abandon(self) -> None:
        """End the work under way: the broker has failed."""
        for task in (self._building, self._merging):
            if task is not None:
                task.cancel()

    async def close(self) -> None:
        """End the work under way, and close the files."""
        tasks = [task for task in (self._building, self._merging) if task is not None]
        async with self._noting:
            # A checkpoint that is being written is written to its end.
            for task in tasks:
                task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for child in self._children:
            await self._broker.in_thread(child.kill)
        for run in self._runs.values():
            run.close()


class _Gathering:
    """Reads the messages of taken rows in pieces, each as large as the ones before allow."""

    def __init__(self, taken: Taken, bytes_max: int | None) -> None:
        self._taken = taken
        self._bytes_max = bytes_max
        self._records = Records.empty()
        self._size = 0

    def pieces(self, first_rows: Callable[[Part], int]) -> Iterator[tuple[Part, Rows]]:
        """Walk over the rows to read next; the messages of each piece are added before the next."""
        step = 0
        for part, rows in self._taken.slices:
            start, step = 0, max(step, first_rows(part))
            while start < len(rows):
                yield part, rows[start : start + step]
                start += step
                # Few at first: nobody knows how large they are. Then more, while they are small.
                step = min(step * 4, STEP_ROWS_MAX) if self._size < READ_BYTES_MAX else step

    def add(self, records: Records) -> None:
        """Add the messages of a piece; raise `TooLarge` when these are enough."""
        self._records.extend(records)
        self._size += sum(records.sizes())
        is_over = self._bytes_max is not None and self._size > self._bytes_max
        if is_over and self._records.count < len(self._taken):
            raise TooLarge(self._records.count)

    def in_order(self) -> Records:
        """Return all messages, in the order in which they fire."""
        taken = self._taken
        return self._records.select(list(taken.places)) if len(taken.slices) > 1 else self._records


class _Tail:
    """What waits in the log only: its rows, its topics, its business keys."""

    __slots__ = ("_at_ms", "_topics", "bytes", "part", "topics", "uniques")

    def __init__(self, number: int) -> None:
        self.part = TailPart(number_start=number)
        self.bytes = 0
        self.uniques: dict[str, int] = {}
        self.topics: dict[str, str] = {}
        """One text for each topic, however many messages go there."""
        self._topics: list[str] = []
        self._at_ms = array("q")

    def add(self, accepted: Accepted) -> None:
        """Take in a batch that was stored."""
        rows = accepted_rows(
            accepted.due_at_ms, first_number=accepted.first_number, time_ms=accepted.time_ms
        )
        self.part.add(rows)
        self.bytes += accepted.bytes
        self._at_ms += rows.at_ms
        self._note(accepted.topics, accepted.uniques, accepted.first_number)

    def take_back(self, records: Records) -> None:
        """Take in messages that were read again from the log, at a start."""
        self.part.add(Rows(array("q", records.at_ms), array("Q", records.numbers)))
        self.bytes += sum(records.sizes())
        self._at_ms.extend(records.at_ms)
        packed = records.optional.get(Column.UNIQUES)
        uniques = None
        if packed is not None:
            uniques = [
                None if one is None else one.decode("utf-8", "surrogateescape") for one in packed
            ]
        self._note(records.topics, uniques, records.numbers[0])

    def _note(self, topics: list[str], uniques: list[str | None] | None, number: int) -> None:
        known = self.topics
        self._topics += [known.setdefault(topic, topic) for topic in topics]
        for row, unique in enumerate(uniques or ()):
            if unique is not None:
                self.uniques[unique] = number + row

    @property
    def is_full(self) -> bool:
        """Tell whether it is time for a next one."""
        return self.part.rows_total >= TAIL_ROWS_MAX or self.bytes >= TAIL_BYTES_MAX

    def has_room(self, accepted: Accepted) -> bool:
        """Tell whether a batch fits: what is longer than a stretch would become two runs."""
        rows = self.part.rows_total + len(accepted.due_at_ms)
        return not self.is_full and (rows <= TAIL_ROWS_MAX or not self.part.rows_total)

    def holds(self, number: int) -> bool:
        """Tell whether a number waits here."""
        return self.part.number_start <= number < self.part.number_end

    def place_of(self, number: int) -> Waiting:
        """Return when a number fires, and where to."""
        row = number - self.part.number_start
        return Waiting(number, self._at_ms[row], self._topics[row])

    def rows(self) -> Iterator[tuple[int, str]]:
        """Walk over (at_ms, topic) of everything that came here."""
        return zip(self._at_ms, self._topics, strict=True)
