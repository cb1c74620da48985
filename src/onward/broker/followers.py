"""Replicas of this node: each follows the log from an event id on.

    FOLLOW ──▶ one history? ──▶ EVENTS, EVENTS ... as the replica gives credit, then as entries come
                   │              ▲ FOLLOWED: the replica has them on its disk
                   └──▶ refused: another history, events that are gone, a name in use

Entries are sent as they are stored, all topics and kinds together, once they are synced here. A
replica that reads slowly costs one read of the log at a time and no memory. What replicas have is
known by name, so that retention can wait for those that the settings name; it is saved with each
checkpoint, because a replica may be away when this node starts. So much of the log waits for a
replica at most; one that is further behind needs a snapshot.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

from onward.broker.tasks import Tasks
from onward.errors import (
    Conflict,
    Corruption,
    InvalidRequest,
    OffsetOutOfRange,
    OnwardError,
    Unavailable,
)
from onward.log.disk import Buffer
from onward.log.stream import EntryStream
from onward.message.entry import read_header
from onward.protocol.frames import Kind, frame_head
from onward.protocol.operations.replicas import (
    Follow,
    ReplicaDescription,
    SourceState,
    decode_followed,
    encode_source,
)

if TYPE_CHECKING:
    from onward.broker.session import Session
    from onward.broker.state import State
    from onward.clock import Clock
    from onward.log.log import Log
    from onward.settings import LogSettings

logger = logging.getLogger("onward.replicas")

READ_BYTES_MAX = 1 << 20
STATE_EVERY_MS = 1_000
STEP_MS = 100
STEPS_MAX = 2_048

InThread = Callable[[Callable[[], Buffer | None]], Awaitable[Buffer | None]]


class Follower:
    """One replica that is connected."""

    def __init__(self, session: Session, request_id: int, follow: Follow, log: Log) -> None:
        self.session = session
        self.request_id = request_id
        self.name = follow.name
        self.node = follow.node
        self.stream = EntryStream(log, follow.next_event_id)
        self.credit_bytes = follow.credit_bytes
        self.is_reading = False
        """A read from the disk is under way."""


class Times:
    """When entries were written, in steps of a tenth of a second; older steps are longer.

    >>> times = Times()
    >>> times.note(7, 1_000), times.note(8, 1_010), times.note(9, 2_000)
    (None, None, None)
    >>> times.after(6), times.after(7), times.after(8), times.after(9)
    (1000, 1000, 2000, None)
    """

    def __init__(self) -> None:
        self._ends: list[int] = []
        """The last index of each step."""
        self._begins_ms: list[int] = []

    def note(self, index: int, time_ms: int) -> None:
        """Take note that entries up to `index` were written at a time, which never goes back."""
        if self._ends and time_ms < self._begins_ms[-1] + STEP_MS:
            self._ends[-1] = index
            return
        if len(self._ends) >= STEPS_MAX:
            half = STEPS_MAX // 2
            self._ends[:half] = self._ends[1:half:2]
            self._begins_ms[:half] = self._begins_ms[:half:2]
        self._ends.append(index)
        self._begins_ms.append(time_ms)

    @property
    def first_index(self) -> int:
        """Return the index from which on the times are known."""
        return self._ends[0]

    def after(self, index: int) -> int | None:
        """Return about when the entry after `index` was written; None if there is none."""
        at = bisect_right(self._ends, index)
        return self._begins_ms[at] if at < len(self._ends) else None


class Followers:
    """All replicas that follow this node."""

    def __init__(
        self, *, log: Log, state: State, clock: Clock, in_thread: InThread,
        outdated: Callable[[], None], settings: LogSettings,
        leader: Callable[[], str | None],
    ) -> None:  # fmt: skip
        self._log = log
        self._state = state
        self._clock = clock
        self._awaited = frozenset(settings.retention_replicas)
        self._wait_bytes_max = settings.replica_wait_bytes_max
        self._left_behind: set[str] = set()
        """Awaited replicas for which too much of the log waits: retention goes on."""
        self._times = Times()
        self._times.note(log.next_index - 1, log.tail.last_time_ms)
        self._in_thread = in_thread
        self._outdated = outdated
        """Called when a replica proves that another node continues this history."""
        self._leader = leader
        self._by_name: dict[str, Follower] = {}
        self._tasks = Tasks(logger)
        self._state_sent_at_ms = 0

    # --- what replicas send ------------------------------------------------------------------

    def open(self, session: Session, request_id: int, follow: Follow) -> None:
        """Begin to send entries, once it is certain that both nodes have one history."""
        if follow.node == self._state.node:
            raise InvalidRequest("a node cannot follow itself: replica.of names another node")
        other = self._by_name.get(follow.name)
        if other is not None and other.node != follow.node:
            raise Conflict(
                f"replica {follow.name!r} follows already, as node {other.node}: "
                f"give this one another replica.name"
            )
        follower = Follower(session, request_id, follow, self._log)
        self._tasks.start(self._begin(follower, follow))

    async def _begin(self, follower: Follower, follow: Follow) -> None:
        try:
            await self._check_history(follow)
        except OnwardError as error:
            follower.session.refuse(follower.request_id, error)
            return
        except OSError as error:
            refusal = Unavailable(f"the log cannot be read: {error}")
            follower.session.refuse(follower.request_id, refusal)
            return
        if follower.session.is_closed:
            return
        self._by_name[follower.name] = follower
        # Not the highest ever: a replica that lost its tail needs what it once had.
        self._state.replicas[follower.name] = follow.next_event_id - 1
        logger.info(
            "replica %r follows from event %d on (%s)",
            follower.name, follow.next_event_id, follower.session.peer,
        )  # fmt: skip
        self._send_state(follower)
        self._step(follower)

    async def _check_history(self, follow: Follow) -> None:
        """Raise when the log of a replica is not the beginning of this one."""
        ours, last = self._state.lineage, follow.next_event_id - 1
        if follow.lineage.epoch > ours.epoch:
            self._outdated()
            raise Conflict(
                f"this node has history {ours}, the replica has {follow.lineage}, which is newer: "
                f"another node was promoted"
            )
        if follow.lineage.epoch == ours.epoch and follow.lineage.id != ours.id:
            raise Conflict(
                f"the replica has history {follow.lineage}, this node has {ours}: they have "
                f"nothing to do with each other"
            )
        if last >= self._log.next_index:
            raise self._diverged(last, f"this node ends at event {self._log.next_index - 1}")
        if last and await self._crc_of(last) != follow.last_crc:
            raise self._diverged(last, "the two nodes have different entries there")

    def _diverged(self, event_id: int, why: str) -> Conflict:
        return Conflict(
            f"the history of the replica differs at event {event_id}: {why}. What it has was "
            f"never replicated, or belongs to another node. Move its folder away and start it empty"
        )

    async def _crc_of(self, index: int) -> int:
        if index == self._log.next_index - 1:
            return self._log.last_crc
        stream = EntryStream(self._log, index)
        entries = await self._in_thread(lambda: stream.read(bytes_max=1))
        entry = read_header(entries or b"", 0, position=0)
        if entry is None:
            raise OffsetOutOfRange(f"event {index} is not durable yet")
        return entry.crc

    def credit(self, session: Session, request_id: int, credit_bytes: int) -> bool:
        """Let a replica be sent more; return True if the request id is that of a replica."""
        follower = self._of(session, request_id)
        if follower is None:
            return False
        follower.credit_bytes += credit_bytes
        self._step(follower)
        return True

    def acknowledge(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        """Take note of what a replica has on its disk."""
        event_id = decode_followed(payload)
        follower = self._of(session, request_id)
        if follower is not None:
            if event_id >= follower.stream.next_index:
                raise InvalidRequest(f"event {event_id} was not sent yet")
            known = self._state.replicas.get(follower.name, 0)
            self._state.replicas[follower.name] = max(event_id, known)

    def cancel(self, session: Session, request_id: int) -> bool:
        """End a FOLLOW; return True if there was one."""
        follower = self._of(session, request_id)
        if follower is None:
            return False
        self._end(follower)
        return True

    def _of(self, session: Session, request_id: int) -> Follower | None:
        for follower in self._by_name.values():
            if follower.session is session and follower.request_id == request_id:
                return follower
        return None

    # --- what the broker tells ---------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Return True if no replica is connected."""
        return not self._by_name

    def has(self, session: Session) -> bool:
        """Return True if a replica follows over this session."""
        return any(follower.session is session for follower in self._by_name.values())

    def wake(self) -> None:
        """Send new entries to the replicas that wait for them."""
        self._times.note(self._log.next_index - 1, self._log.tail.last_time_ms)
        for follower in list(self._by_name.values()):
            self._step(follower)

    def tick(self) -> None:
        """Tell replicas how far this node is, also while nothing happens."""
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._state_sent_at_ms >= STATE_EVERY_MS:
            self._state_sent_at_ms = now_ms
            for follower in list(self._by_name.values()):
                self._step(follower)
                self._send_state(follower)

    def resume(self, session: Session) -> None:
        """The socket of this session takes bytes again."""
        for follower in list(self._by_name.values()):
            if follower.session is session:
                self._step(follower)

    def forget(self, session: Session) -> None:
        """A connection is gone."""
        for follower in list(self._by_name.values()):
            if follower.session is session:
                self._end(follower)

    def _end(self, follower: Follower) -> None:
        if self._by_name.get(follower.name) is follower:
            del self._by_name[follower.name]
            if follower.name not in self._awaited:
                self._state.replicas.pop(follower.name, None)
            logger.info("replica %r follows no longer", follower.name)

    # --- retention ---------------------------------------------------------------------------

    def dropped_up_to(self, event_ids: Iterable[int]) -> int:
        """Return the last event that retention may drop: it waits for replicas, up to a limit.

        `event_ids`: where others will begin to follow, who fetch a snapshot now.
        """
        waiting = {name: self._state.replicas.get(name, 0) for name in self._awaited}
        far = {name for name, event_id in waiting.items() if self._is_too_far(event_id)}
        for name in far - self._left_behind:
            logger.warning(
                "replica %r: more than %d bytes of the log wait for it "
                "(log.replica_wait_bytes_max): retention goes on, and the replica will need a "
                "snapshot",
                name, self._wait_bytes_max,
            )  # fmt: skip
        self._left_behind = far
        ends = [event_id for name, event_id in waiting.items() if name not in far]
        ends += [event_id for event_id in event_ids if not self._is_too_far(event_id)]
        return min(ends, default=self._log.next_index)

    def _is_too_far(self, event_id: int) -> bool:
        return 0 < self._wait_bytes_max < self._bytes_after(event_id)

    def _bytes_after(self, event_id: int) -> int:
        """Return about how many bytes of the log come after an event."""
        total = 0
        for segment in reversed(self._log.segments):
            if segment.next_index <= event_id + 1:
                break
            count = segment.next_index - segment.first_index
            missing = segment.next_index - max(segment.first_index, event_id + 1)
            total += segment.bytes * missing // max(count, 1)
        return total

    # --- descriptions ------------------------------------------------------------------------

    def describe(self) -> list[ReplicaDescription]:
        """Return all replicas that are connected or awaited."""
        return [self._describe(name) for name in sorted({*self._by_name, *self._awaited})]

    def _lag_ms(self, event_id: int) -> int:
        """Return how much older than the newest entry the first one after `event_id` is, about."""
        if event_id >= self._log.synced_index:
            return 0
        newest_ms = self._log.tail.last_time_ms
        if event_id + 1 >= self._times.first_index:
            return max(0, newest_ms - (self._times.after(event_id) or newest_ms))
        # From before this start, or never seen: no older than what its segment begins with.
        segments = self._log.segments
        at = bisect_right(segments, event_id + 1, key=lambda one: one.first_index) - 1
        return max(0, newest_ms - segments[max(at, 0)].first_time_ms())

    def _describe(self, name: str) -> ReplicaDescription:
        follower = self._by_name.get(name)
        durable = self._state.replicas.get(name, 0)
        lag_events = max(0, self._log.synced_index - durable)
        return ReplicaDescription(
            name=name,
            node="" if follower is None else follower.node,
            connected=follower is not None,
            durable_event_id=durable,
            lag_events=lag_events,
            lag_ms=self._lag_ms(durable),
            is_awaited=name in self._awaited,
        )

    # --- sending -----------------------------------------------------------------------------

    def _step(self, follower: Follower) -> None:
        """Send entries as long as there are some and the replica takes them."""
        while self._can_send(follower):
            try:
                entries = follower.stream.read(bytes_max=READ_BYTES_MAX, wait=False)
            except (OnwardError, OSError) as error:
                self._fail(follower, error)
                return
            if entries is None:
                self._read_from_disk(follower)
                return
            self._send(follower, entries)

    def _can_send(self, follower: Follower) -> bool:
        is_free = not follower.is_reading and follower.session.writable
        return is_free and follower.credit_bytes > 0 and follower.stream.has_more

    def _read_from_disk(self, follower: Follower) -> None:
        follower.is_reading = True
        self._tasks.start(self._read(follower))

    async def _read(self, follower: Follower) -> None:
        try:
            entries = await self._in_thread(lambda: follower.stream.read(bytes_max=READ_BYTES_MAX))
        except (OnwardError, OSError) as error:
            self._fail(follower, error)
            return
        finally:
            follower.is_reading = False
        if entries and self._by_name.get(follower.name) is follower:
            self._send(follower, entries)
            self._step(follower)

    def _send(self, follower: Follower, entries: Buffer) -> None:
        follower.credit_bytes -= len(entries)
        head = frame_head(Kind.EVENTS, follower.request_id, len(entries))
        follower.session.send_parts([head, entries])

    def _send_state(self, follower: Follower) -> None:
        state = SourceState(
            self._log.synced_index, self._log.tail.last_time_ms, self._state.lineage.epoch,
            self._leader() or "",
        )  # fmt: skip
        follower.session.send(Kind.SOURCE, follower.request_id, encode_source(state))

    def _fail(self, follower: Follower, error: OnwardError | OSError) -> None:
        """End a FOLLOW that cannot go on: the replica decides what to do about it."""
        self._end(follower)
        if isinstance(error, OSError):
            error = Unavailable(f"the log cannot be read: {error}")
        level = logging.ERROR if isinstance(error, Corruption) else logging.WARNING
        logger.log(level, "replica %r cannot be served: %s", follower.name, error)
        follower.session.refuse(follower.request_id, error)

    def stop(self) -> None:
        """End everything: the node stops, or has failed."""
        self._tasks.cancel()
        self._by_name.clear()
