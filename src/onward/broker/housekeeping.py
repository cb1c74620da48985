"""What a broker does beside its work: one thing after another, never in anyone's way.

    tick    end topics whose lifetime is over, drop silent connections, look at the disk: quick, and
            never late
    sync    sync what durability `interval` left, in a thread of its own
    tidy    seal full segments, checkpoint, retention: may take long, one at a time; one that fails
            waits a while, longer each time, and holds up none of the others

Files are written in a thread; what they are made from is prepared and taken over on the loop's
thread, so no lock is needed. A failed sync is fatal like any other; a full disk is not: what could
not be written is tried again. A broker that stops lets the work under way end: a file that two
write at once would be lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, TypeVar, cast

from onward.broker.broadcast import offsets_in
from onward.broker.carry_over import CarryOver, resolve
from onward.broker.catalogue import TopicsRetained
from onward.errors import Corruption, OnwardError, Unavailable
from onward.log.checkpoint import Checkpoint, write_checkpoint
from onward.log.index import RowsFile, TopicSummary
from onward.log.log import DiskFailed, FolderLost
from onward.log.recovery import Opened
from onward.log.retention import (
    REWRITE_BYTES_MIN,
    Keep,
    Verdict,
    expired,
    judge,
    old_bytes,
    rewrite,
)
from onward.log.segment import Segment
from onward.message.entry import CARRIED_TOPIC
from onward.schedule.state import SCHEDULE_TOPIC

if TYPE_CHECKING:
    from onward.broker.broker import Broker
    from onward.broker.catalogue import Topic
    from onward.broker.session import Session
    from onward.delivery.group import Group

logger = logging.getLogger("onward.housekeeping")

TICK_S = 0.25
PAUSE_S_MIN = 0.001
LATE_MS_MIN = 100
RETENTION_EVERY_MS = 10_000
DISK_CHECK_EVERY_MS = 1_000
SILENT_HEARTBEATS_MAX = 3
RETRY_MS_MIN = 250
RETRY_MS_MAX = 10_000
RETAINED_PER_ENTRY = 10_000

T = TypeVar("T")


class Housekeeping:
    """Keeps one broker's house."""

    def __init__(
        self,
        broker: Broker,
        *,
        opened: Opened,
        in_thread: Callable[[Callable[[], T]], Awaitable[T]],
        in_sync_thread: Callable[[Callable[[], T]], Awaitable[T]],
    ) -> None:
        self._broker = broker
        self._log = broker.log
        self._in_thread: Callable[[Callable[[], object]], Awaitable[object]] = in_thread  # type: ignore[assignment]
        self._in_sync_thread: Callable[[Callable[[], object]], Awaitable[object]] = in_sync_thread  # type: ignore[assignment]
        self._checkpoint_bytes = broker.log.bytes - opened.scanned_bytes
        # A new node has a name to keep.
        self._wants_checkpoint = not opened.state
        self._watch_lock = self._log.disk.watch(f"{self._log.folder}/lock")
        self._watch_tail = (self._log.tail, self._log.disk.watch(self._log.tail.path))
        self._disk_checked_at_ms = 0
        self._retained_at_ms = 0
        self._wants_retention = False
        self._carry_over = CarryOver(broker)
        self._judged: list[Segment] = []
        """The sealed segments that were found to hold nothing that may go."""
        self._unfinished: dict[int, int] = {}
        """Of topics that wait for a group: the offset from which on it has not finished them."""
        self._retries: dict[str, tuple[int, int]] = {}
        """Of each step of `tidy` that failed: when it is tried again, and after what pause."""
        self._ended: set[Session] = set()
        self._said_full = False
        self._checkpointing = asyncio.Lock()
        self._retaining = asyncio.Lock()
        self._is_stopping = asyncio.Event()
        self.checkpoint_count = 0

    async def run(self) -> None:
        """Work until told to stop."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._repeat(self.tick, every_s=TICK_S))
            group.create_task(self._repeat(lambda late_ms: self.tidy(), every_s=TICK_S))
            interval_s = self._broker.settings.log.interval_ms / 1000
            group.create_task(self._repeat(lambda late_ms: self.sync(), every_s=interval_s))

    def stop(self) -> None:
        """Begin nothing more; `run` returns when what is under way is done."""
        self._is_stopping.set()

    async def _repeat(self, work: Callable[[int], Awaitable[None]], *, every_s: float) -> None:
        """Work now and again, and tell `work` by how many milliseconds it comes too late."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while not self._is_stopping.is_set():
            late_s, due = loop.time() - due, loop.time() + every_s
            try:
                await work(int(late_s * 1000))
            except DiskFailed as error:
                self._broker.fail(error)
                return
            except (OSError, Unavailable, Corruption) as error:
                logger.warning("housekeeping could not finish and will try again: %s", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(max(due, loop.time() + PAUSE_S_MIN)):
                    await self._is_stopping.wait()

    def retain_soon(self) -> None:
        """Look for space to give back at the next tick: a topic has ended."""
        self._wants_retention = True

    async def tick(self, late_ms: int = 0) -> None:
        """Do what must not be late; `late_ms` is by how much it is all the same."""
        now_ms = self._broker.clock.monotonic_ms()
        self._broker.now_monotonic_ms = now_ms
        if self._broker.gate.is_leading:
            self._end_expired()
            self._broker.consuming.tick()
            is_late = late_ms >= LATE_MS_MIN
            self._broker.consuming.idle_groups.tick(now_ms, late_ms=late_ms if is_late else 0)
        self._broker.session_events.tick(now_ms=now_ms)
        self._broker.followers.tick()
        self._broker.snapshots.tick(now_ms)
        if late_ms >= LATE_MS_MIN:
            self._forgive(late_ms, now_ms)
        self._drop_silent(now_ms)
        if now_ms - self._disk_checked_at_ms >= DISK_CHECK_EVERY_MS:
            self._disk_checked_at_ms = now_ms
            await self._look_at_disk()

    async def tidy(self) -> None:
        """Do what may take long."""
        now_ms = self._broker.clock.monotonic_ms()
        await self._try("sealing segments", self._seal)
        await self._try("preparing a segment", self._prepare)
        if self._broker.gate.is_leading:
            await self._try("ending idle topics", self._broker.idle_topics.tidy)
            await self._try("ending the mark of a follower", self.end_following)
        if self._checkpoint_is_due():
            await self._try("a checkpoint", self.checkpoint)
        if self._wants_retention or now_ms - self._retained_at_ms >= RETENTION_EVERY_MS:
            await self._try("retention", self._retain)

    async def _try(self, name: str, step: Callable[[], Awaitable[None]]) -> None:
        """Do one step, unless it failed a moment ago; say when that begins, and when it is over."""
        now_ms = self._broker.clock.monotonic_ms()
        again_at_ms, pause_ms = self._retries.get(name, (now_ms, 0))
        if now_ms < again_at_ms:
            return
        try:
            await step()
        except (OSError, Unavailable, Corruption) as error:
            if not pause_ms:
                logger.warning("%s failed and will be tried again: %s", name, error)
            pause_ms = min(max(pause_ms * 2, RETRY_MS_MIN), RETRY_MS_MAX)
            self._retries[name] = now_ms + pause_ms, pause_ms
        else:
            if self._retries.pop(name, None):
                logger.info("%s works again", name)

    # --- each tick ---------------------------------------------------------------------------

    def _end_expired(self) -> None:
        broker = self._broker
        for topic in broker.catalogue.take_expired(now_ms=broker.clock.now_ms()):
            if not topic.ending:
                self._expire(topic)

    def _expire(self, topic: Topic) -> None:
        def done(error: OnwardError | None) -> None:
            if error is not None:
                self._broker.catalogue.note_lifetime(topic.record)

        self._broker.end_topic(topic, "expired", done=done)

    def _forgive(self, late_ms: int, now_ms: int) -> None:
        """Nobody was silent while this broker did not listen."""
        for session in self._broker.sessions:
            session.opened_at_ms = min(session.opened_at_ms + late_ms, now_ms)
            session.last_heard_ms = min(session.last_heard_ms + late_ms, now_ms)
            session.last_frame_ms = min(session.last_frame_ms + late_ms, now_ms)

    def _drop_silent(self, now_ms: int) -> None:
        """Close connections that never said hello, stopped in mid-frame, or fell silent."""
        server = self._broker.settings.server
        ended, self._ended = self._ended, set()
        for session in list(self._broker.sessions):
            silent_ms = now_ms - session.last_heard_ms
            if session in ended:
                # It was told a tick ago and does not even take that.
                session.abort()
            elif session.hello is None:
                if now_ms - session.opened_at_ms > server.hello_ms:
                    self._end(session, "no HELLO came in time")
            elif session.has_partial_frame and now_ms - session.last_frame_ms > server.frame_ms:
                self._end(session, "the rest of a frame did not come in time")
            elif silent_ms > SILENT_HEARTBEATS_MAX * server.heartbeat_ms:
                self._drop(session, silent_ms)

    def _end(self, session: Session, why: str) -> None:
        self._ended.add(session)
        session.end(Unavailable(why))

    def _drop(self, session: Session, silent_ms: int) -> None:
        self._broker.session_events.write(
            "session dropped: nothing heard from %s for %d ms", session.peer, silent_ms,
            now_ms=self._broker.now_monotonic_ms,
        )  # fmt: skip
        session.abort()

    def check_folder(self) -> None:
        """Raise `FolderLost` when the files that are written cannot be found any more."""
        log = self._log
        if self._watch_tail[0] is not log.tail:
            self._watch_tail = (log.tail, log.disk.watch(log.tail.path))
        if not self._watch_lock() or not self._watch_tail[1]():
            raise FolderLost(
                f"folder {log.folder!r}, or files in it, were deleted, moved or replaced while "
                f"the broker used them"
            )

    async def _look_at_disk(self) -> None:
        self.check_folder()
        free = self._log.disk.free_bytes(self._log.folder)
        kept = self._log.limits.disk_reserve_bytes
        gate = self._broker.gate
        self._say_full(gate.disk_is_full, free)
        # Once full, it has space again when there is clearly more: else it would turn to and fro.
        full = free < kept + (max(kept // 8, 1 << 20) if gate.disk_is_full else 0)
        gate.disk_is_full = full
        self._say_full(full, free)
        if full:
            self._wants_retention = True

    def _say_full(self, full: bool, free: int) -> None:
        if full != self._said_full:
            self._said_full = full
            logger.warning(
                "disk %s: %d bytes free", "is nearly full" if full else "has space", free
            )

    # --- when due ----------------------------------------------------------------------------

    async def sync(self) -> None:
        """Sync what `interval` and `memory` publishes left in the page cache."""
        log, last = self._log, self._log.next_index - 1
        if last > log.synced_index:
            tail = log.tail
            await self._in_sync_thread(lambda: _sync(tail))
            log.synced_index = max(log.synced_index, last)

    async def _seal(self) -> None:
        log = self._log
        while (segment := log.unsealed()) is not None:
            rows = await self._in_thread(lambda: log.seal(segment))
            assert isinstance(rows, RowsFile)
            log.sealed(segment, rows)
            # Its runs are gone: with a checkpoint that names them the next start reads it again.
            self._wants_checkpoint = True
            logger.info("segment sealed: %s, %d bytes", segment.path, segment.bytes)

    async def _prepare(self) -> None:
        log = self._log
        if log.tail.bytes > log.limits.segment_bytes_max // 4 * 3:
            await self._in_thread(log.prepare_next)

    def _checkpoint_is_due(self) -> bool:
        settings = self._broker.settings.log
        # Retention makes the log smaller: what comes after it is counted from there.
        self._checkpoint_bytes = min(self._checkpoint_bytes, self._log.bytes)
        return (
            self._wants_checkpoint
            or self._log.tail.new.count >= settings.checkpoint_rows
            or self._log.bytes - self._checkpoint_bytes >= settings.checkpoint_bytes
        )

    async def checkpoint(self, *, copies: int = 1) -> None:
        """Write the fold of the log up to now, and the rows that are only in memory."""
        async with self._checkpointing:
            await self._checkpoint(copies=copies)

    async def freeze(self, open_files: Callable[[Checkpoint, list[Segment]], T]) -> T:
        """Write a checkpoint and open its files in a thread, before any of them can be removed."""
        async with self._retaining, self._checkpointing:
            checkpoint = await self._checkpoint(copies=1)
            segments = [one for one in self._log.segments if one.first_index <= checkpoint.segment]
            files = await self._in_thread(lambda: open_files(checkpoint, segments))
            return cast(T, files)

    async def end_following(self) -> None:
        """Write a checkpoint and forget that entries were copied from another node.

        What they claim about another disk does not matter below a checkpoint.
        """
        if self._log.is_followed:
            await self.checkpoint()
            await self._in_thread(self._log.end_following)

    async def _checkpoint(self, *, copies: int) -> Checkpoint:
        log, tail = self._log, self._log.tail
        if tail.new.count:
            tail.freeze_rows()
        count, plan = len(tail.runs), tail.plan_runs()
        names = [run.name for run in plan]
        checkpoint = Checkpoint(
            last_index=log.next_index - 1, last_crc=log.last_crc, last_time_ms=tail.last_time_ms,
            term=log.term, segment=tail.first_index, position=tail.bytes,
            runs=names, state=self._broker.state.save(),
        )  # fmt: skip
        await self._in_thread(lambda: _sync(tail))
        if self._broker.failure is not None:
            # It would vouch for pages that the disk may have forgotten.
            raise Unavailable("the broker has failed")

        def write() -> list[RowsFile]:
            files = log.write_runs(tail, plan)
            write_checkpoint(log.disk, log.folder, checkpoint, copies=copies)
            if any(len(run.sources) > 1 for run in plan):
                log.remove_runs(tail, kept=names)
            return files

        written = await self._in_thread(write)
        assert isinstance(written, list)
        tail.runs[:count] = written
        log.synced_index = max(log.synced_index, checkpoint.last_index)
        self._wants_checkpoint = False
        self._checkpoint_bytes = log.bytes
        self.checkpoint_count += 1
        return checkpoint

    # --- retention ---------------------------------------------------------------------------

    async def _retain(self) -> None:
        """Give back the space of what nobody wants any more, one round at a time."""
        async with self._retaining:
            await self._retain_once()

    async def _retain_once(self) -> None:
        is_wanted, self._wants_retention = self._wants_retention, False
        try:
            if self._broker.gate.is_leading:
                await self._retain_as_leader(is_wanted=is_wanted)
            else:
                await self._drop_dead()
        except BaseException:
            self._wants_retention = True
            raise
        self._retained_at_ms = self._broker.clock.monotonic_ms()

    async def _retain_as_leader(self, *, is_wanted: bool) -> None:
        keeps = await self._keeps()
        await self._give_back(keeps, is_wanted=is_wanted)
        await self._broker.undelivered.look(
            self._sealed(), keeps, self._unfinished,
            is_dead=self._is_dead, is_needed=self._is_needed,
        )  # fmt: skip

    async def _drop_dead(self) -> None:
        """Drop the oldest segments of a follower that hold nothing any more.

        What may go is decided by the leader: its entries have moved the first offsets, and carried
        on what groups still need.
        """
        dead = list(takewhile(self._is_all_dead, self._sealed()))
        if dead:
            await self.checkpoint(copies=2)
            self._log.drop(dead)
            await self._in_thread(lambda: self._log.remove_files(dead))
            logger.info("segments dropped: %d", len(dead))

    def _is_all_dead(self, segment: Segment) -> bool:
        carried = self._log.carried.by_topic.values()
        holds_carried = any(
            segment.first_index <= row.index < segment.next_index
            for rows in carried
            for row in rows
        )
        own = (one for one in segment.summaries() if one.topic < CARRIED_TOPIC)
        return not holds_carried and all(map(self._is_dead, own))

    def _sealed(self) -> list[Segment]:
        """Return the segments that retention may look at.

        Up to one that could not be sealed, as a log never has a hole; and only what the replicas
        have that retention waits for.
        """
        last = self._broker.followers.dropped_up_to(self._broker.snapshots.event_ids)
        return list(
            takewhile(
                lambda segment: segment.sealed is not None and segment.next_index - 1 <= last,
                self._log.segments[:-1],
            )
        )

    async def _give_back(self, keeps: dict[int, Keep], *, is_wanted: bool) -> None:
        log, sealed = self._log, self._sealed()
        self._carry_over.purge_old()
        await self._roll_when_dead(keeps)
        has_moved = await self._move_first_offsets(sealed, keeps)
        bytes_max = self._broker.settings.log.retention_bytes
        is_too_big = bool(bytes_max) and log.bytes > bytes_max
        if not (is_wanted or has_moved or is_too_big) and sealed == self._judged:
            return
        self._judged = []
        verdict = await self._judge(sealed)
        if verdict.held is not None and self._holds_schedule(verdict.held):
            self._broker.scheduling.files.make_way()
        if not verdict.drop and not verdict.rewrite:
            self._judged = sealed
            return
        await self._forget_rows(verdict.drop)
        if verdict.drop:
            await self._carry_over.carry_on(verdict.drop)
        # What is about to go must be known without it first.
        await self.checkpoint(copies=2)
        if verdict.drop:
            log.drop(verdict.drop)
            self._carry_over.dropped()
            await self._in_thread(lambda: log.remove_files(verdict.drop))
            logger.info("segments dropped: %d", len(verdict.drop))
        for segment in verdict.rewrite:
            if self._is_stopping.is_set():
                return
            smaller = await self._in_thread(
                lambda: rewrite(log, segment, is_dead=self._is_dead)  # noqa: B023
            )
            assert isinstance(smaller, Segment)
            log.replace(segment, smaller)
            logger.info("segment rewritten: %d bytes to %d", segment.bytes, smaller.bytes)

    def _is_dead(self, summary: TopicSummary) -> bool:
        if summary.topic >= CARRIED_TOPIC:
            return summary.topic - CARRIED_TOPIC not in self._log.carried.by_topic
        topic = self._broker.catalogue.by_number.get(summary.topic)
        return topic is None or summary.end_offset <= topic.first_offset

    def _is_needed(self, summary: TopicSummary) -> bool:
        """Tell whether something waits in it, for its time or for a group, and is nowhere else."""
        topic = self._broker.catalogue.by_number.get(summary.topic)
        if topic is None or summary.end_offset <= topic.first_offset:
            return False
        unfinished = self._unfinished.get(summary.topic, summary.end_offset)
        return topic.name == SCHEDULE_TOPIC or summary.end_offset > unfinished

    def _holds_schedule(self, segment: Segment) -> bool:
        """Tell whether a segment has scheduled messages that are in no run yet."""
        topic = self._broker.catalogue.by_name.get(SCHEDULE_TOPIC)
        if topic is None or segment.sealed is None:
            return False
        summary = segment.sealed.summary_of(topic.number)
        return summary is not None and summary.end_offset > topic.first_offset

    async def _keeps(self) -> dict[int, Keep]:
        """Return what each topic keeps. Of a million topics: so the loop only copies the dict."""
        topics = self._broker.catalogue.by_number.copy()
        otherwise_ms = self._broker.settings.log.retention_ms

        def keeps() -> tuple[dict[int, Keep], list[Topic]]:
            found = {
                number: Keep(
                    topic.record.retention_ms or otherwise_ms,
                    topic.record.retention_bytes,
                    topic.first_offset,
                )
                for number, topic in topics.items()
            }
            records = ((topic, topic.record) for topic in topics.values())
            return found, [
                topic
                for topic, record in records
                if record.retention_group or record.keep_unfinished
            ]

        both = await self._in_thread(keeps)
        assert isinstance(both, tuple)
        found: dict[int, Keep] = both[0]
        waiting: list[Topic] = both[1]
        self._unfinished = {topic.number: self._unfinished_from(topic) for topic in waiting}
        schedule = self._broker.catalogue.by_name.get(SCHEDULE_TOPIC)
        if schedule is not None:
            # What waits is kept until it is in a run: then its first offset moves.
            found[schedule.number] = Keep(0, 0, schedule.first_offset)
        return found

    def _unfinished_from(self, topic: Topic) -> int:
        """Return the offset from which on groups that retention waits for need a topic."""
        groups = self._broker.consuming.groups
        record, ends = topic.record, [topic.next_offset]
        if record.retention_group:
            ends.append(_unfinished_in(groups.by_name.get(record.retention_group), topic))
        if record.keep_unfinished:
            shares = (group.shares.get(topic.name) for group in groups.of_topic(topic.name))
            ends += [share.cursor for share in shares if share is not None]
        return min(ends)

    async def _move_first_offsets(self, sealed: list[Segment], keeps: dict[int, Keep]) -> bool:
        """Move each topic's first offset past what its retention does not keep."""
        now_ms = self._broker.clock.now_ms()
        unfinished = self._unfinished
        moved = await self._in_thread(
            lambda: expired(sealed, keeps, unfinished=unfinished, now_ms=now_ms)
        )
        assert isinstance(moved, dict)
        await self._begin_at(moved)
        return bool(moved)

    async def _begin_at(self, offsets: dict[int, int]) -> None:
        """Move first offsets by an entry of the log: what was told once holds after any crash."""
        by_number = self._broker.catalogue.by_number
        moved = [
            (number, offset)
            for number, offset in offsets.items()
            if (topic := by_number.get(number)) is not None and offset > topic.first_offset
        ]
        for at in range(0, len(moved), RETAINED_PER_ENTRY):
            part = moved[at : at + RETAINED_PER_ENTRY]
            lost = await self._carry_over.carry(part)
            try:
                durable: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._broker.publishing.retain_topics(
                    TopicsRetained(part), done=partial(resolve, durable)
                )
                await durable
            except BaseException:
                self._carry_over.give_back(lost)
                raise
            self._carry_over.lose(lost)

    async def _judge(self, sealed: list[Segment]) -> Verdict:
        log = self._log
        total_bytes = log.bytes
        verdict = await self._in_thread(
            lambda: judge(
                sealed, is_dead=self._is_dead, total_bytes=total_bytes,
                bytes_max=self._broker.settings.log.retention_bytes,
                # Small segments are worth it too: their space would never come back otherwise.
                rewrite_bytes_min=min(REWRITE_BYTES_MIN, log.limits.segment_bytes_max // 8),
                is_needed=self._is_needed,
            )
        )  # fmt: skip
        assert isinstance(verdict, Verdict)
        return verdict

    async def _forget_rows(self, dropped: list[Segment]) -> None:
        def ends() -> dict[int, int]:
            return {s.topic: s.end_offset for segment in dropped for s in segment.summaries()}

        found = await self._in_thread(ends)
        assert isinstance(found, dict)
        await self._begin_at(found)

    async def _roll_when_dead(self, keeps: dict[int, Keep]) -> None:
        """Begin a new segment when the open one holds mostly what nobody wants, or is too old.

        Only sealed segments give space back, and a quiet log would never fill this one.
        """
        tail = self._log.tail
        if not tail.bytes:
            return
        is_dead = self._broker.dead_bytes * 2 > tail.bytes
        if (is_dead or await self._tail_is_old(tail, keeps)) and tail is self._log.tail:
            self._broker.publishing.roll(done=self._rolled)

    async def _tail_is_old(self, tail: Segment, keeps: dict[int, Keep]) -> bool:
        """Tell whether it began before what the log keeps, or half of it is not kept any more.

        The half: one topic that keeps little must not cut the log into crumbs.
        """
        now_ms, keep_ms = self._broker.clock.now_ms(), self._broker.settings.log.retention_ms
        first_ms = tail.first_time_ms()
        if keep_ms and first_ms < now_ms - keep_ms:
            return True
        runs = list(tail.runs)

        def in_runs() -> tuple[int, int]:
            shortest_ms = min((keep.ms for keep in keeps.values() if keep.ms), default=0)
            if not shortest_ms or first_ms >= now_ms - shortest_ms:
                return 0, 0
            return shortest_ms, sum(old_bytes(run, keeps, now_ms=now_ms) for run in runs)

        found = await self._in_thread(in_runs)
        assert isinstance(found, tuple)
        shortest_ms, old = found
        if shortest_ms:
            # On the loop: these rows grow. There are never many, see `checkpoint_rows`.
            old += old_bytes(tail.new, keeps, now_ms=now_ms)
        return bool(shortest_ms) and old * 2 >= tail.bytes

    def _rolled(self, error: Exception | None) -> None:
        if error is None:
            self._broker.dead_bytes = 0
            self._wants_retention = True


def _unfinished_in(group: Group | None, topic: Topic) -> int:
    """Return the offset from which on its retention group has not finished a topic.

    A group that does not exist, or has not begun with the topic, will come: all is for it.
    """
    if group is None:
        return 0
    if group.record.mode == "broadcast":
        return min(offsets_in(group, topic), default=0)
    share = group.shares.get(topic.name)
    return 0 if share is None else share.cursor


def _sync(segment: Segment) -> None:
    try:
        segment.sync()
    except OSError as error:
        raise DiskFailed(f"{segment.path}: {error}") from error
