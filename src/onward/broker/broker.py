"""A broker: all stations together, on one event loop. No sockets here: see `serve`.

    open ──▶ running ──▶ stopping (answers what it took, takes nothing new) ──▶ stopped
                └──────▶ failed: the disk refused; nothing is answered any more

A broker is used through sessions, whatever carries their bytes: a socket (`serve`), or a pipe in
the same process (`file:` and `memory:` of the client, and the simulator).
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from itertools import chain
from operator import itemgetter
from random import Random
from typing import Literal, TypeVar

import msgspec

from onward.broker.catalogue import Topic, TopicEnding
from onward.broker.commit import Commit, InlineCommit, LocalCommit
from onward.broker.consume import Consuming
from onward.broker.deliver import Delivering
from onward.broker.event_limit import EventLimit
from onward.broker.followers import Followers
from onward.broker.futures import future_of
from onward.broker.group_holds import GroupHolds
from onward.broker.housekeeping import Housekeeping
from onward.broker.idle_topics import IdleTopics
from onward.broker.intake import Intake
from onward.broker.operations.dead_letters import DeadLetterOperations
from onward.broker.operations.dispatch import Dispatcher
from onward.broker.operations.group_moves import GroupMoveOperations
from onward.broker.operations.groups import GroupOperations
from onward.broker.operations.messages import MessageOperations
from onward.broker.operations.pipeline import PipelineOperations
from onward.broker.operations.recurring import RecurringOperations
from onward.broker.operations.replicas import ReplicaControl, ReplicaOperations
from onward.broker.operations.schedule import ScheduleOperations
from onward.broker.operations.status import StatusOperations
from onward.broker.operations.topics import TopicOperations
from onward.broker.permissions import Policy
from onward.broker.producers import WINDOW
from onward.broker.publish import Publishing
from onward.broker.scheduling import Scheduling
from onward.broker.session import Session
from onward.broker.snapshots import Snapshots
from onward.broker.state import LineageRecord, State, open_state
from onward.broker.topic_waits import TopicWaits
from onward.broker.undelivered import Undelivered
from onward.broker.write_gate import WriteGate
from onward.clock import Clock, SystemClock
from onward.delivery.record import GroupRecord
from onward.delivery.trace import Trace
from onward.errors import (
    Corruption,
    InvalidRequest,
    NotLeader,
    OnwardError,
    Overloaded,
    Stopping,
)
from onward.log.disk import Buffer, Disk, OsDisk
from onward.log.index import ROW, Row, Rows, RowsFile
from onward.log.log import DiskFailed, FolderLost, Log, LogLimits
from onward.log.recovery import Opened
from onward.message.entry import CARRIED_TOPIC, Entry
from onward.message.names import SCHEDULE_TOPIC
from onward.protocol.operations.replicas import ReplicationStatus
from onward.protocol.receiver import SHARED_BYTES
from onward.settings import Settings
from onward.version import __version__

logger = logging.getLogger("onward.broker")

FRAME_MARGIN_BYTES = 1 << 20
SEND_AWAY_S = 1.0
"""How long a node that has stepped down leaves clients connected: for answers on their way."""
RETIRED = "this node has stepped down: another node continues its history"
T = TypeVar("T")


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
        self, settings: Settings, *, clock: Clock, opened: Opened, state: State,
        commit: Commit, executor: Executor | None, sync_executor: Executor | None,
        on_failure: Callable[[Exception], None], jitter: Random | None = None,
        policy: Policy | None = None, follows: str | None = None,
    ) -> None:  # fmt: skip
        self.settings = settings
        self.clock = clock
        self.log: Log = opened.log
        self.state = state
        self.node = state.node
        self.catalogue = state.catalogue
        self.log.carried = state.catalogue.carried
        self.log.forget_missing_carried()
        self.producers = state.producers
        self.publishers = state.publishers
        self.gate = WriteGate()
        if follows is not None:
            self.gate.follow(follows or None)
        elif state.is_retired:
            self.gate.follow(None, why=RETIRED)
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
        self._retirement: asyncio.Task[None] | None = None
        self.policy = policy or Policy()
        self.intake = Intake(self)
        self.publishing = Publishing(
            log=self.log, state=state, commit=commit, gate=self.gate, settings=settings,
            clock=clock, wake=self._wake, fail=self.fail, policy=self.policy,
        )  # fmt: skip
        self.delivering = Delivering(
            log=self.log, catalogue=self.catalogue, gate=self.gate, in_thread=self.in_thread,
            create_on_use=self.publishing.create_on_use, clock=clock,
        )  # fmt: skip
        state.groups.restart()
        self.consuming = Consuming(self, state.groups)
        self.scheduling = Scheduling(self, state.schedule)
        self.publishing.scheduling = self.scheduling
        self.topic_waits = TopicWaits()
        self.group_holds = GroupHolds(self)
        self.idle_topics = IdleTopics(self)
        self.operations = Dispatcher(
            [
                TopicOperations(self), GroupOperations(self), GroupMoveOperations(self),
                DeadLetterOperations(self), MessageOperations(self), ScheduleOperations(self),
                RecurringOperations(self), PipelineOperations(self), ReplicaOperations(self),
                StatusOperations(self),
            ],
            policy=self.policy, check_writable=self.gate.check,
        )  # fmt: skip
        self.undelivered = Undelivered(self)
        self.housekeeping = Housekeeping(
            self, opened=opened, in_thread=self.in_thread, in_sync_thread=self._in_sync_thread
        )
        self.followers = Followers(
            log=self.log, state=state, clock=clock, in_thread=self.in_thread,
            outdated=self.outdated, settings=settings.log, leader=lambda: self.leader,
        )  # fmt: skip
        self.snapshots = Snapshots(self)
        self.publishing.on_committed = self.followers.wake
        self.replica: ReplicaControl | None = None
        """What follows a source for this node, if it is a replica."""
        state.observer = self
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
        policy: Policy | None = None,
        follows: str | None = None,
    ) -> Broker:
        """Open the folder of `settings`, fold its log, and be ready.

        With `follows`, the address of a leader or empty, the node writes nothing of its own until
        `lead` is called; except that a node that was promoted leads.

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
        limits = LogLimits(
            segment_bytes_max=settings.log.segment_bytes_max,
            preallocate_bytes=settings.log.preallocate_bytes,
            disk_reserve_bytes=settings.log.disk_reserve_bytes,
        )
        opened, state = open_state(disk, settings.log.folder, limits=limits)
        _report(opened, settings.log.folder, state)
        if follows is not None and state.was_promoted and follows == state.lineage_source:
            logger.warning(
                "this node was promoted and leads history %s: it does not follow %s; remove "
                "replica.of from its settings",
                state.lineage, follows or "another node",
            )  # fmt: skip
            follows = None
        elif follows is None and opened.log.is_followed and not state.was_promoted:
            logger.warning(
                "the log was copied from another node and this node leads now, without a new "
                "history: if the other node still takes writes, start this one with replica.of"
            )
        make_commit = commit or (InlineCommit if executor is None else LocalCommit)
        return cls(
            settings, clock=clock or SystemClock(), opened=opened, state=state,
            commit=make_commit(opened.log), executor=executor, sync_executor=sync_executor,
            on_failure=on_failure or (lambda error: None), jitter=jitter, policy=policy,
            follows=follows,
        )  # fmt: skip

    # --- sessions ----------------------------------------------------------------------------

    def session(self) -> Session:
        """Return a new session; whatever carries its bytes calls it."""
        return Session(self)

    def opened(self, session: Session) -> None:
        """Take a session in, or turn it away."""
        self.sessions[session] = None
        if self.gate.is_stopping:
            session.goodbye(Stopping("the broker is stopping"))
        elif len(self.sessions) > self.connections_max:
            said = f"there are {self.connections_max} connections already"
            session.goodbye(Overloaded(said, retry_after_ms=1_000))

    def closed(self, session: Session) -> None:
        """Forget a session."""
        self.sessions.pop(session, None)
        self.operations.forget(session)
        self.followers.forget(session)
        self.snapshots.forget(session)
        self.delivering.forget(session)
        self.consuming.forget(session)
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

    def end_topic(
        self,
        topic: Topic,
        reason: Literal["deleted", "expired"],
        *,
        done: Callable[[OnwardError | None], None],
    ) -> None:
        """End a topic; its readers are told, its name is free again, its space comes back."""
        ending = TopicEnding(topic.number, topic.name, reason, self.clock.now_ms())
        self.publishing.end_topic(topic, ending, done=done)

    # --- roles -------------------------------------------------------------------------------

    @property
    def leader(self) -> str | None:
        """Return the address of the node that takes writes, as far as it is known."""
        if self.gate.is_leading:
            return self.settings.server.advertise or None
        return self.gate.leader

    async def lead(self) -> None:
        """Begin to accept writes, grant leases, fire schedules and expire: this node followed."""
        await self.publishing.drain()
        try:
            await self.housekeeping.end_following()
        except OSError as error:
            # Housekeeping tries again. Until then a damaged tail is cut at a start, not reported.
            logger.warning("a checkpoint at the promotion failed: %s", error)
        self.gate.lead()
        self.delivering.lead()
        self.consuming.lead()
        await self.scheduling.lead()

    async def retire(self, *, successor: str = "") -> None:
        """Stop taking writes for ever, durably: another node continues this history."""
        await self.follow(None, why=RETIRED)
        # Those that connect from now on are told at once that this node does not lead.
        sessions = set(self.sessions)
        if not self.state.is_retired:
            lineage = self.state.lineage
            record = LineageRecord(
                epoch=lineage.epoch, id=lineage.id, node=self.node, at_ms=self.clock.now_ms(),
                is_retired=True, successor=successor,
            )  # fmt: skip
            await future_of(lambda done: self.publishing.change_lineage(record, done=done))
        asyncio.get_running_loop().call_later(SEND_AWAY_S, self._send_away, sessions)

    def _send_away(self, sessions: set[Session]) -> None:
        """End these sessions of clients, so that they look for the leader; replicas stay."""
        for session in sessions & set(self.sessions):
            if not self.followers.has(session):
                session.goodbye(NotLeader(RETIRED))

    def outdated(self) -> None:
        """Stop serving: a client or a replica has seen a newer history of this node's log."""
        if self.gate.is_leading:
            logger.critical(
                "another node was promoted: this node takes no writes any more. Start it as a "
                "replica of that node, or move its folder away"
            )
            self._retirement = asyncio.get_running_loop().create_task(self.retire())

    def describe_replication(self) -> ReplicationStatus:
        """Return the role of this node, its lag and its replicas."""
        replicas = self.followers.describe()
        if self.replica is not None:
            return msgspec.structs.replace(self.replica.describe(), replicas=replicas)
        event_id = self.log.next_index - 1
        return ReplicationStatus(
            node=self.node, role="retired" if self.state.is_retired else "leader",
            lineage=self.state.lineage, event_id=event_id, source_event_id=event_id,
            replicas=replicas,
        )  # fmt: skip

    async def follow(
        self, leader: str | None, *, why: str = "this node is a read-only copy"
    ) -> None:
        """Stop all that only a leader does; what was accepted is finished first."""
        self.gate.follow(leader, why=why)
        error = self.gate.refusal()
        assert error is not None, "who follows writes nothing"
        self.consuming.follow(error)
        await self.publishing.drain()

    # --- what was applied --------------------------------------------------------------------

    def topic_changed(self, topic: Topic) -> None:
        """End the readers of a topic that may not be read any more."""
        if not topic.readable:
            self.delivering.end_readers(topic)

    def topic_ended(self, topic: Topic, ending: TopicEnding) -> None:
        """Tell whoever reads, waits for or consumes a topic that it has ended."""
        topic.end(ending=True)
        self.delivering.end_topic(topic, ending.reason)
        self.consuming.end_topic(topic, ending.reason)
        self.topic_waits.end_topic(topic, ending.reason)
        self.dead_bytes += self._open_bytes_of(topic.number)
        self.housekeeping.retain_soon()
        logger.info("topic %s: %r", ending.reason, topic.name)

    def group_changed(self, before: GroupRecord | None, record: GroupRecord) -> None:
        """Let the live part of a group follow its settings."""
        self.consuming.group_changed(before, record)

    def row_applied(self, row: Trace, *, was_blocked: bool) -> None:
        """Let the live part of a group follow a row of the trace."""
        self.consuming.row_applied(row, was_blocked=was_blocked)

    def lineage_changed(self) -> None:
        """Say which history this node has now."""
        state = "has ended here" if self.state.is_retired else "begins"
        logger.info("history %s %s", self.state.lineage, state)

    def messages_followed(self, topic: Topic, entry: Entry, body: Buffer) -> None:
        """Let scheduled messages wait, and wake whoever waits for messages of a topic."""
        if topic.name == SCHEDULE_TOPIC:
            self.scheduling.follow(entry, body)
        self._wake(topic)

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
        replication = self.describe_replication()
        return {
            "node": self.node,
            "role": replication.role,
            "lineage": str(replication.lineage),
            "lag_events": replication.lag_events,
            "lag_ms": replication.lag_ms,
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
            "disk_is_full": self.gate.disk_is_full,
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

    async def in_thread(self, work: Callable[[], T], *, to_the_end: bool = False) -> T:
        """Run `work`, which may wait for the disk, in a thread.

        With `to_the_end`, a caller that is cancelled returns when the thread has ended.
        """
        return await _run(self._executor, work, to_the_end=to_the_end)

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
        self.gate.is_stopping = True
        # A checkpoint written now would vouch for pages that the disk may have forgotten.
        self._chores.cancel()
        self.consuming.stop()
        self.scheduling.abandon()
        self.operations.stop()
        self.followers.stop()
        self.snapshots.abandon()
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
        self.gate.is_stopping = True
        if self.replica is not None:
            await self.replica.close()
        if self.failure is None:
            await self._drain()
        await self.scheduling.stop()
        self.publishing.close()
        for session in list(self.sessions):
            session.goodbye(Stopping("the broker is stopping"))
        self.operations.stop()
        self.followers.stop()
        await self.snapshots.stop()
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
                await self.publishing.drain()
                await self.operations.drain()
        except TimeoutError:
            logger.warning("stopping without waiting longer for the disk")


async def _run(executor: Executor | None, work: Callable[[], T], *, to_the_end: bool = False) -> T:
    if executor is None:
        return work()
    running = asyncio.get_running_loop().run_in_executor(executor, work)
    if not to_the_end:
        return await running
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


def _bytes_of(source: Rows, topic: int) -> int:
    """Return the bytes of a topic's entries. A file of rows knows; those in memory are not many."""
    if isinstance(source, RowsFile):
        summary = source.summary_of(topic)
        return 0 if summary is None else summary.bytes
    rows = chain.from_iterable(ROW.iter_unpack(one.buffer) for one in source.rows_of(topic))
    return sum(map(itemgetter(Row._fields.index("length")), rows))


def _report(opened: Opened, folder: str, state: State) -> None:
    if opened.cut_bytes:
        logger.warning(
            "torn tail: the last %d bytes were no whole entry; they are saved aside in %s",
            opened.cut_bytes,
            folder,
        )
    logger.info(
        "log opened: %s, next event id %d, %d topics, %d entries and %d bytes read again",
        folder, opened.log.next_index, len(state.catalogue), state.entry_count,
        opened.scanned_bytes,
    )  # fmt: skip
