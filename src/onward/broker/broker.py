"""A broker: all stations together, on one event loop. No sockets here: see `serve`.

    open ──▶ running ──▶ stopping (answers what it took, takes nothing new) ──▶ stopped
                └──────▶ failed: the disk refused; nothing is answered any more

A broker is used through sessions, whatever carries their bytes: a socket (`serve`), or a pipe in
the same process (`file:` and `memory:` of the client, and the simulator).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from itertools import chain
from operator import itemgetter
from random import Random
from typing import Literal, TypeVar

import msgspec

from onward.broker.catalogue import Catalogue, Topic, TopicEnding
from onward.broker.commit import Commit, InlineCommit, LocalCommit
from onward.broker.consume import Consuming
from onward.broker.deliver import Delivering
from onward.broker.event_limit import EventLimit
from onward.broker.group_holds import GroupHolds
from onward.broker.housekeeping import Housekeeping
from onward.broker.idle_topics import IdleTopics
from onward.broker.intake import Intake
from onward.broker.producers import WINDOW, Producers
from onward.broker.publish import TRACE_TOPIC, Publishing
from onward.broker.publishers import Publishers
from onward.broker.recurring_runs import PREFIX as RECURRING
from onward.broker.requests import Requests
from onward.broker.scheduling import Scheduling
from onward.broker.session import Session
from onward.broker.topic_copies import TopicCopies
from onward.broker.topic_waits import TopicWaits
from onward.broker.undelivered import Undelivered
from onward.clock import Clock, SystemClock
from onward.delivery.group import Groups
from onward.delivery.record import GroupRecord
from onward.delivery.trace import decode_row
from onward.errors import (
    Corruption,
    DiskFull,
    InvalidRequest,
    OnwardError,
    Overloaded,
    Stopping,
)
from onward.log.disk import Disk, OsDisk
from onward.log.index import ROW, Row, Rows, RowsFile
from onward.log.log import DiskFailed, FolderLost, Log, LogLimits
from onward.log.recovery import Apply, Opened, open_log
from onward.message.batch import RAW_BYTES_MAX, batches_of, decode_batch
from onward.message.entry import CARRIED_TOPIC, Entry, Kind
from onward.protocol.receiver import SHARED_BYTES
from onward.schedule.recurring import Recurring
from onward.schedule.state import FIRED, SCHEDULE_TOPIC, ScheduleState
from onward.settings import Settings
from onward.version import __version__

logger = logging.getLogger("onward.broker")

FRAME_MARGIN_BYTES = 1 << 20
T = TypeVar("T")


class SavedState(msgspec.Struct, frozen=True):
    """Everything a broker folds from its log."""

    node: str
    catalogue: bytes
    producers: bytes
    groups: bytes = b""
    publishers: bytes = b""
    schedule: bytes = b""


class Broker:
    """One node.

    >>> async def main() -> int:
    ...     from onward.log.memory_disk import MemoryDisk
    ...     broker = await Broker.open(Settings(), disk=MemoryDisk())
    ...     await broker.stop()
    ...     return broker.log.next_index
    >>> asyncio.run(main())
    1
    """

    def __init__(
        self, settings: Settings, *, clock: Clock, opened: Opened, folded: _Folding,
        commit: Commit, executor: Executor | None, sync_executor: Executor | None,
        on_failure: Callable[[Exception], None], jitter: Random | None = None,
    ) -> None:  # fmt: skip
        self.settings = settings
        self.clock = clock
        self.log: Log = opened.log
        self.node = folded.node
        self.catalogue = folded.catalogue
        self.log.carried = folded.catalogue.carried
        self.log.forget_missing_carried()
        self.producers = folded.producers
        self.publishers = folded.publishers
        self.spread = (jitter or Random()).random
        """Gives a number from 0 to 1, by which pauses are spread."""
        # A dict for its order: the simulator replays a run from its seed.
        self.sessions: dict[Session, None] = {}
        self.session_events = EventLimit(logger, "sessions ended or dropped")
        self.shared_buffer = bytearray(SHARED_BYTES)
        self.frame_bytes_max = settings.topics.batch_bytes_max + FRAME_MARGIN_BYTES
        self.connection_bytes_max = settings.server.connection_bytes_max
        self.connections_max = settings.server.connections_max
        self.publishes_max = WINDOW
        self.now_monotonic_ms = clock.monotonic_ms()
        self.started_at_ms = clock.now_ms()
        self.dead_bytes = self._dead_bytes_at_start()
        """About how many bytes of the open segment belong to topics that have ended."""
        self._unlock = opened.unlock
        self._commit = commit
        self._executor = executor
        self._sync_executor = sync_executor
        self._on_failure = on_failure
        self.failure: Exception | None = None
        self.intake = Intake(self)
        self.publishing = Publishing(
            log=self.log, catalogue=self.catalogue, producers=self.producers, commit=commit,
            settings=settings, clock=clock, wake=self._wake, fail=self.fail,
            publishers=self.publishers,
        )  # fmt: skip
        self.delivering = Delivering(
            log=self.log, catalogue=self.catalogue, in_thread=self.in_thread,
            create_on_use=self.publishing.create_on_use, clock=clock,
        )  # fmt: skip
        folded.groups.restart()
        self.consuming = Consuming(self, folded.groups)
        self.scheduling = Scheduling(self, folded.schedule)
        self.publishing.scheduling = self.scheduling
        self.topic_waits = TopicWaits(self)
        self.topic_copies = TopicCopies(self)
        self.group_holds = GroupHolds(self)
        self.idle_topics = IdleTopics(self)
        self.requests = Requests(self)
        self.undelivered = Undelivered(self)
        self.housekeeping = Housekeeping(
            self, opened=opened, in_thread=self.in_thread, in_sync_thread=self._in_sync_thread
        )
        self._chores = asyncio.get_running_loop().create_task(self.housekeeping.run())
        self._chores.add_done_callback(self._chores_ended)

    @classmethod
    async def open(
        cls,
        settings: Settings,
        *,
        disk: Disk | None = None,
        clock: Clock | None = None,
        commit: Callable[[Log], Commit] | None = None,
        executor: Executor | None = None,
        on_failure: Callable[[Exception], None] | None = None,
        jitter: Random | None = None,
    ) -> Broker:
        """Open the folder of `settings`, fold its log, and be ready.

        Without `disk` it is the real one, with threads for all that waits. Raises `Corruption`
        when the log must not be used, `Unavailable` when another broker has it.
        """
        if settings.log.durability == "quorum":
            raise InvalidRequest("durability 'quorum' needs a cluster; this node stands alone")
        sync_executor = executor
        if disk is None:
            executor = ThreadPoolExecutor(3, "onward-files")
            # What `interval` promises does not wait behind reads and seals.
            sync_executor = ThreadPoolExecutor(1, "onward-sync")
        disk = disk or OsDisk()
        folding = _Folding()
        limits = LogLimits(
            segment_bytes_max=settings.log.segment_bytes_max,
            preallocate_bytes=settings.log.preallocate_bytes,
            disk_reserve_bytes=settings.log.disk_reserve_bytes,
        )
        opened = open_log(disk, settings.log.folder, limits=limits, load=folding.load)
        _report(opened, settings.log.folder, folding)
        make_commit = commit or (InlineCommit if executor is None else LocalCommit)
        return cls(
            settings, clock=clock or SystemClock(), opened=opened, folded=folding,
            commit=make_commit(opened.log), executor=executor, sync_executor=sync_executor,
            on_failure=on_failure or (lambda error: None), jitter=jitter,
        )  # fmt: skip

    # --- sessions ----------------------------------------------------------------------------

    def session(self) -> Session:
        """Return a new session; whatever carries its bytes calls it."""
        return Session(self)

    def opened(self, session: Session) -> None:
        """Take a session in, or turn it away."""
        self.sessions[session] = None
        if self.publishing.is_stopping:
            session.goodbye(Stopping("the broker is stopping"))
        elif len(self.sessions) > self.connections_max:
            said = f"there are {self.connections_max} connections already"
            session.goodbye(Overloaded(said, retry_after_ms=1_000))

    def closed(self, session: Session) -> None:
        """Forget a session."""
        self.sessions.pop(session, None)
        self.delivering.forget(session)
        self.consuming.forget(session)
        self.topic_waits.forget(session)
        self.topic_copies.forget(session)
        self.group_holds.forget(session)

    def _wake(self, topic: Topic) -> None:
        """New messages are there."""
        if topic.waiting:
            self.delivering.wake(topic)
        if topic.crews:
            self.consuming.wake(topic)
        if topic.watches:
            self.topic_waits.wake(topic)

    # --- topics ------------------------------------------------------------------------------

    def check_writable(self, *, even_when_full: bool = False) -> None:
        """Raise when nothing can be written now; ending a topic gives space back, so it may."""
        if self.publishing.is_stopping:
            raise Stopping("the broker is stopping")
        if self.publishing.disk_is_full and not even_when_full:
            raise DiskFull("the disk is nearly full")

    def end_topic(
        self,
        topic: Topic,
        reason: Literal["deleted", "expired"],
        *,
        done: Callable[[OnwardError | None], None],
    ) -> None:
        """End a topic; its readers are told, its name is free again, its space comes back."""

        def settle(error: OnwardError | None) -> None:
            if error is None:
                self.delivering.end_topic(topic, reason)
                self.consuming.end_topic(topic, reason)
                self.topic_waits.end_topic(topic, reason)
                self.dead_bytes += self._open_bytes_of(topic.number)
                self.housekeeping.retain_soon()
                logger.info("topic %s: %r", reason, topic.name)
            done(error)

        ending = TopicEnding(topic.number, topic.name, reason, self.clock.now_ms())
        self.publishing.end_topic(topic, ending, done=settle)

    def _open_bytes_of(self, number: int) -> int:
        numbers = (number, number + CARRIED_TOPIC)
        return sum(_bytes_of(source, one) for source in self.log.tail.sources() for one in numbers)

    def _dead_bytes_at_start(self) -> int:
        """A broker that ended right after a topic did has not given its space back."""
        pieces = [piece for source in self.log.tail.sources() for piece in source.pieces()]
        numbers = {number % CARRIED_TOPIC for number, _ in pieces}
        dead = numbers - {0} - self.catalogue.by_number.keys()
        return sum(map(self._open_bytes_of, dead))

    # --- all of it ---------------------------------------------------------------------------

    def status(self) -> dict[str, object]:
        """Return how the broker is, as numbers."""
        log = self.log
        return {
            "node": self.node,
            "version": __version__,
            "python": sys.version.split()[0],
            "started_at_ms": self.started_at_ms,
            "folder": log.folder,
            "durability": self.settings.log.durability,
            "topics": self.catalogue.user_count,
            "producers": len(self.producers),
            "connections": len(self.sessions),
            "next_event_id": log.next_index,
            "durable_event_id": log.synced_index,
            "log_bytes": log.bytes,
            "segments": len(log.segments),
            "disk_free_bytes": log.disk.free_bytes(log.folder),
            "disk_is_full": self.publishing.disk_is_full,
            "inflight_bytes": self.publishing.inflight_bytes,
            "published": self.publishing.published_count,
            "commits": self.publishing.commit_count,
            "delivered_bytes": self.delivering.delivered_bytes,
            "groups": len(self.consuming.groups.by_name),
            "members": sum(len(crew.members) for crew in self.consuming.crews.values()),
            "delivered": self.consuming.delivered_count,
            "expiring": self.undelivered.expiring_count,
            "dropped": self.undelivered.dropped_count,
            **self.scheduling.status(),
            "checkpoints": self.housekeeping.checkpoint_count,
        }

    def save(self) -> bytes:
        """Return the folded state, for a checkpoint."""
        return msgspec.msgpack.encode(
            SavedState(
                self.node, self.catalogue.save(), self.producers.save(),
                self.consuming.groups.save(), self.publishers.save(),
                self.scheduling.state.save(),
            )
        )  # fmt: skip

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run what may wait for the disk where it holds nobody up."""
        return await _run(self._executor, work)

    async def _in_sync_thread(self, work: Callable[[], T]) -> T:
        return await _run(self._sync_executor, work)

    def fail(self, error: Exception) -> None:
        """Stop at once and answer nothing: what the disk holds is unknown until it is verified."""
        if self.failure is not None:
            return
        self.failure = error
        if isinstance(error, FolderLost):
            logger.critical("what is stored is gone, nothing more is answered: %s", error)
        elif isinstance(error, DiskFailed):
            logger.critical("the disk failed, nothing more is answered: %s", error)
        elif isinstance(error, Corruption):
            logger.critical("what is stored is damaged, nothing more is answered: %s", error)
        else:
            logger.critical("this is a bug, nothing more is answered", exc_info=error)
        self.publishing.is_stopping = True
        # A checkpoint written now would vouch for pages that the disk may have forgotten.
        self._chores.cancel()
        self.consuming.stop()
        self.scheduling.abandon()
        for session in list(self.sessions):
            session.abort()
        self._on_failure(error)

    def _chores_ended(self, chores: asyncio.Task[None]) -> None:
        """A broker without housekeeping would fill its disk in silence: it fails instead."""
        if not chores.cancelled() and (error := chores.exception()) is not None:
            self.fail(error if isinstance(error, Exception) else RuntimeError(str(error)))

    async def stop(self) -> None:
        """Answer what was taken, say goodbye, leave a checkpoint, and close.

        Raises `FolderLost` or `OSError`, with all files closed, when no checkpoint could be left.
        """
        self.publishing.is_stopping = True
        if self.failure is None:
            await self._drain()
        await self.scheduling.stop()
        self.publishing.close()
        for session in list(self.sessions):
            session.goodbye(Stopping("the broker is stopping"))
        await self.topic_copies.stop()
        self.housekeeping.stop()
        await asyncio.wait([self._chores])
        try:
            if self.failure is None:
                self.housekeeping.check_folder()
                await self.housekeeping.checkpoint()
        finally:
            await self._close()

    async def _close(self) -> None:
        await self.in_thread(self._commit.close)
        for executor in (self._executor, self._sync_executor):
            if executor is not None:
                executor.shutdown()
        self.log.close()
        self._unlock()

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self.settings.server.stop_ms / 1000):
                await self.topic_copies.drain()
                await self.publishing.drain()
        except TimeoutError:
            logger.warning("stopping without waiting longer for the disk")


class _Folding:
    """The state while the log is being opened."""

    def __init__(self) -> None:
        self.node = secrets.token_hex(6)
        self.catalogue = Catalogue()
        self.producers = Producers()
        self.groups = Groups()
        self.publishers = Publishers()
        self.schedule = ScheduleState()
        self.entry_count = 0

    def load(self, saved: bytes) -> Apply:
        """Start from a checkpoint's state; return what folds one more entry."""
        if saved:
            state = msgspec.msgpack.decode(saved, type=SavedState)
            self.node = state.node
            self.catalogue = Catalogue.load(state.catalogue)
            self.producers = Producers.load(state.producers)
            if state.groups:
                self.groups.load(state.groups)
            self.publishers = Publishers.load(state.publishers)
            self.schedule = ScheduleState.load(state.schedule)
        return self._apply

    def _apply(self, entry: Entry, body: memoryview) -> None:
        self.entry_count += 1
        self.catalogue.apply(entry, body)
        self.producers.apply(entry, body)
        if entry.kind == Kind.GROUP_CHANGED:
            self.groups.change(msgspec.json.decode(body, type=GroupRecord))
        elif entry.kind == Kind.TOPIC_DELETED:
            self.groups.drop_topic(msgspec.json.decode(body, type=TopicEnding).name)
        elif entry.kind == Kind.RECURRING_CHANGED:
            self.schedule.change_recurring(msgspec.json.decode(body, type=Recurring))
        elif entry.kind == Kind.MESSAGES:
            topic = self.catalogue.by_number.get(entry.topic)
            name = "" if topic is None else topic.name
            if name == TRACE_TOPIC:
                self._apply_rows(body)
            elif name == SCHEDULE_TOPIC:
                self._apply_scheduled(body)
            elif topic is not None:
                self._apply_fired(name, body)

    def _apply_scheduled(self, body: memoryview) -> None:
        for start, _ in batches_of(body, 0, len(body)):
            batch = decode_batch(body, start, raw_bytes_max=RAW_BYTES_MAX)
            self.schedule.schedule(count=batch.count)
            self.schedule.replace([one for one in batch.replaces or () if one is not None])
            for unique, due_at_ms in zip(batch.uniques or (), batch.due_at_ms or (), strict=False):
                if unique is not None and unique.startswith(RECURRING) and due_at_ms is not None:
                    self.schedule.last_runs[unique[len(RECURRING) :]] = due_at_ms

    def _apply_fired(self, topic: str, body: memoryview) -> None:
        for start, header in batches_of(body, 0, len(body)):
            if header.producer_id == FIRED:
                ids = decode_batch(body, start, raw_bytes_max=RAW_BYTES_MAX).schedule_ids
                number = ids[-1] if ids else None
                if number is not None:
                    self.schedule.fired(
                        topic, step=header.sequence, at_ms=header.time_ms, number=number,
                        count=header.count,
                    )  # fmt: skip

    def _apply_rows(self, body: memoryview) -> None:
        for start, _ in batches_of(body, 0, len(body)):
            for one in decode_batch(body, start, raw_bytes_max=RAW_BYTES_MAX).bodies:
                row = decode_row(one)
                self.groups.apply(row)
                self.publishers.apply(row)
                if row.did == "cancelled":
                    self.schedule.cancel(row.ranges)


async def _run(executor: Executor | None, work: Callable[[], T]) -> T:
    if executor is None:
        return work()
    return await asyncio.get_running_loop().run_in_executor(executor, work)


def _bytes_of(source: Rows, topic: int) -> int:
    """Return the bytes of a topic's entries. A file of rows knows; those in memory are not many."""
    if isinstance(source, RowsFile):
        summary = source.summary_of(topic)
        return 0 if summary is None else summary.bytes
    rows = chain.from_iterable(ROW.iter_unpack(one.buffer) for one in source.rows_of(topic))
    return sum(map(itemgetter(Row._fields.index("length")), rows))


def _report(opened: Opened, folder: str, folding: _Folding) -> None:
    if opened.cut_bytes:
        logger.warning(
            "torn tail: the last %d bytes were no whole entry; they are saved aside in %s",
            opened.cut_bytes,
            folder,
        )
    logger.info(
        "log opened: %s, next event id %d, %d topics, %d entries and %d bytes read again",
        folder, opened.log.next_index, len(folding.catalogue), folding.entry_count,
        opened.scanned_bytes,
    )  # fmt: skip
