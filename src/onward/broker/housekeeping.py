"""What a broker does beside its work: one thing after another, never in anyone's way.

    tick    end topics whose lifetime is over, drop silent connections, look at the disk, sync what
            durability `interval` left: quick, and never late
    tidy    seal full segments, checkpoint, retention: may take long, one at a time

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
from typing import TYPE_CHECKING, TypeVar

from onward.errors import Corruption, OnwardError, Unavailable
from onward.log.checkpoint import Checkpoint, write_checkpoint
from onward.log.index import NewRows, RowsFile, TopicSummary, write_rows
from onward.log.log import DiskFailed
from onward.log.recovery import Opened
from onward.log.retention import REWRITE_BYTES_MIN, judge, rewrite
from onward.log.segment import Segment

if TYPE_CHECKING:
    from onward.broker.broker import Broker
    from onward.broker.catalogue import Topic
    from onward.broker.session import Session

logger = logging.getLogger("onward.housekeeping")

TICK_S = 0.25
RETENTION_EVERY_MS = 10_000
DISK_CHECK_EVERY_MS = 1_000
SILENT_HEARTBEATS_MAX = 4

T = TypeVar("T")


class Housekeeping:
    """Keeps one broker's house."""

    def __init__(
        self,
        broker: Broker,
        *,
        opened: Opened,
        in_thread: Callable[[Callable[[], T]], Awaitable[T]],
    ) -> None:
        self._broker = broker
        self._log = broker.log
        self._in_thread: Callable[[Callable[[], object]], Awaitable[object]] = in_thread  # type: ignore[assignment]
        self._checkpoint_bytes = broker.log.bytes - opened.scanned_bytes
        # A new node has a name to keep.
        self._wants_checkpoint = not opened.state
        self._synced_at_ms = 0
        self._disk_checked_at_ms = 0
        self._retained_at_ms = 0
        self._wants_retention = False
        self._said_full = False
        self._is_stopping = asyncio.Event()
        self.checkpoint_count = 0

    async def run(self) -> None:
        """Work until told to stop."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._repeat(self.tick))
            group.create_task(self._repeat(self.tidy))

    def stop(self) -> None:
        """Begin nothing more; `run` returns when what is under way is done."""
        self._is_stopping.set()

    async def _repeat(self, work: Callable[[], Awaitable[None]]) -> None:
        while not self._is_stopping.is_set():
            try:
                await work()
            except DiskFailed as error:
                self._broker.fail(error)
                return
            except (OSError, Unavailable, Corruption) as error:
                logger.warning("housekeeping could not finish and will try again: %s", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._is_stopping.wait()

    def retain_soon(self) -> None:
        """Look for space to give back at the next tick: a topic has ended."""
        self._wants_retention = True

    async def tick(self) -> None:
        """Do what must not be late."""
        now_ms = self._broker.clock.monotonic_ms()
        self._broker.now_monotonic_ms = now_ms
        self._end_expired()
        self._drop_silent(now_ms)
        if now_ms - self._disk_checked_at_ms >= DISK_CHECK_EVERY_MS:
            self._disk_checked_at_ms = now_ms
            await self._look_at_disk()
        await self._sync_when_due(now_ms)

    async def tidy(self) -> None:
        """Do what may take long."""
        now_ms = self._broker.clock.monotonic_ms()
        # The runs of a sealed segment are gone: a checkpoint that still names them makes the next
        # start read that segment again.
        if await self._seal() or self._checkpoint_is_due():
            await self.checkpoint()
        if self._wants_retention or now_ms - self._retained_at_ms >= RETENTION_EVERY_MS:
            self._retained_at_ms, self._wants_retention = now_ms, False
            await self._retain()

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

    def _drop_silent(self, now_ms: int) -> None:
        """Close connections that never said hello, stopped in mid-frame, or fell silent."""
        server = self._broker.settings.server
        for session in list(self._broker.sessions):
            silent_ms = now_ms - session.last_heard_ms
            if session.hello is None:
                if now_ms - session.opened_at_ms > server.hello_ms:
                    session.end(Unavailable("no HELLO came in time"))
            elif session.has_partial_frame and now_ms - session.last_frame_ms > server.frame_ms:
                session.end(Unavailable("the rest of a frame did not come in time"))
            elif silent_ms > SILENT_HEARTBEATS_MAX * server.heartbeat_ms:
                self._drop(session, silent_ms)

    def _drop(self, session: Session, silent_ms: int) -> None:
        logger.info("session dropped: nothing heard from %s for %d ms", session.peer, silent_ms)
        session.abort()

    async def _look_at_disk(self) -> None:
        free = self._log.disk.free_bytes(self._log.folder)
        kept = self._log.limits.disk_reserve_bytes
        publishing = self._broker.publishing
        self._say_full(publishing.disk_is_full, free)
        # Once full, it has space again when there is clearly more: else it would turn to and fro.
        full = free < kept + (max(kept // 8, 1 << 20) if publishing.disk_is_full else 0)
        publishing.disk_is_full = full
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

    async def _sync_when_due(self, now_ms: int) -> None:
        """Sync what `interval` and `memory` publishes left in the page cache."""
        log = self._log
        last = log.next_index - 1
        if last <= log.synced_index:
            self._synced_at_ms = now_ms
            return
        if now_ms - self._synced_at_ms >= self._broker.settings.log.interval_ms:
            self._synced_at_ms = now_ms
            await self._sync(log.tail)
            log.synced_index = max(log.synced_index, last)

    async def _sync(self, segment: Segment) -> None:
        def sync() -> None:
            try:
                segment.sync()
            except OSError as error:
                raise DiskFailed(f"{segment.path}: {error}") from error

        await self._in_thread(sync)

    async def _seal(self) -> bool:
        log = self._log
        has_sealed = False
        while (segment := log.unsealed()) is not None:
            rows = await self._in_thread(lambda: log.seal(segment))
            assert isinstance(rows, RowsFile)
            log.sealed(segment, rows)
            has_sealed = True
            logger.info("segment sealed: %s, %d bytes", segment.path, segment.bytes)
        if log.tail.bytes > log.limits.segment_bytes_max // 4 * 3:
            await self._in_thread(log.prepare_next)
        return has_sealed

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
        log, tail = self._log, self._log.tail
        if tail.new.count:
            tail.freeze_rows()
        runs = list(tail.runs)
        paths = [tail.run_path(number) for number in range(len(runs))]
        checkpoint = Checkpoint(
            last_index=log.next_index - 1, last_crc=log.last_crc, last_time_ms=tail.last_time_ms,
            term=log.term, segment=tail.first_index, position=tail.bytes,
            runs=[path.rsplit("/", 1)[-1] for path in paths], state=self._broker.save(),
        )  # fmt: skip
        await self._sync(tail)

        def write() -> list[RowsFile]:
            for path, run in zip(paths, runs, strict=True):
                if isinstance(run, NewRows):
                    write_rows(log.disk, path, first_index=tail.first_index, sources=[run])
            write_checkpoint(log.disk, log.folder, checkpoint, copies=copies)
            return [
                run if isinstance(run, RowsFile) else RowsFile.open(log.disk, path)
                for path, run in zip(paths, runs, strict=True)
            ]

        written = await self._in_thread(write)
        assert isinstance(written, list)
        tail.runs[: len(written)] = written
        log.synced_index = max(log.synced_index, checkpoint.last_index)
        self._wants_checkpoint = False
        self._checkpoint_bytes = log.bytes
        self.checkpoint_count += 1

    # --- retention ---------------------------------------------------------------------------

    async def _retain(self) -> None:
        """Give back the space of what nobody wants any more."""
        self._roll_when_dead()
        log = self._log
        sealed = [s for s in log.segments[:-1] if s.sealed is not None]
        if not sealed:
            return
        self._move_first_offsets(sealed)
        verdict = judge(
            sealed, is_dead=self._is_dead, total_bytes=log.bytes,
            bytes_max=self._broker.settings.log.retention_bytes,
            # Small segments are worth it too: their space would never come back otherwise.
            rewrite_bytes_min=min(REWRITE_BYTES_MIN, log.limits.segment_bytes_max // 8),
        )  # fmt: skip
        if not verdict.drop and not verdict.rewrite:
            return
        self._forget_rows(verdict.drop)
        # What is about to go must be known without it first.
        await self.checkpoint(copies=2)
        if verdict.drop:
            log.drop(verdict.drop)
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
        topic = self._broker.catalogue.by_number.get(summary.topic)
        return topic is None or summary.end_offset <= topic.first_offset

    def _move_first_offsets(self, sealed: list[Segment]) -> None:
        """Move each topic's first offset past what its retention does not keep."""
        now_ms = self._broker.clock.now_ms()
        kept_bytes: dict[int, int] = {}
        for segment in reversed(sealed):
            for summary in segment.summaries():
                topic = self._broker.catalogue.by_number.get(summary.topic)
                if topic is None or summary.end_offset <= topic.first_offset:
                    continue
                newer = kept_bytes.get(topic.number, 0)
                kept_bytes[topic.number] = newer + summary.bytes
                keep_ms = topic.record.retention_ms or self._broker.settings.log.retention_ms
                too_old = bool(keep_ms) and summary.last_time_ms < now_ms - keep_ms
                # Only what is not needed to have as much as the topic asks for may go.
                too_big = 0 < topic.record.retention_bytes <= newer
                if too_old or too_big:
                    topic.first_offset = summary.end_offset

    def _forget_rows(self, dropped: list[Segment]) -> None:
        for segment in dropped:
            for summary in segment.summaries():
                topic = self._broker.catalogue.by_number.get(summary.topic)
                if topic is not None:
                    topic.first_offset = max(topic.first_offset, summary.end_offset)

    def _roll_when_dead(self) -> None:
        """Begin a new segment when the open one holds mostly what nobody wants, or is too old.

        Only sealed segments give space back, and a quiet log would never fill this one.
        """
        tail = self._log.tail
        if not tail.bytes:
            return
        if self._broker.dead_bytes * 2 > tail.bytes or self._tail_is_old(tail):
            self._broker.publishing.roll(done=self._rolled)

    def _tail_is_old(self, tail: Segment) -> bool:
        keep_ms = self._broker.shortest_retention_ms()
        return bool(keep_ms) and tail.first_time_ms() < self._broker.clock.now_ms() - keep_ms

    def _rolled(self, error: Exception | None) -> None:
        if error is None:
            self._broker.dead_bytes = 0
            self._wants_retention = True
