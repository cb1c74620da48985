"""A replica: a node that copies another one, entry by entry, and can take its place.

    connecting ──FOLLOW──▶ following ──▶ EVENTS: stored unchanged, synced, applied, acknowledged
        ▲                      │
        ├──── lost, silent ◀───┤
        │                      ├──▶ fetching: the source has dropped events that are missing here;
        └──── anything fails ◀─┤      its log is fetched as files and takes the place of this one
                               └──▶ ended: another history, no permission, a name in use; promoted

A full disk holds the storing up; it is tried again until there is space. So is a source whose log
is damaged, because this node still serves what it has.
What arrives while a write is under way goes into the next one: one write, one sync. Credit bounds
what is on its way. The replica never decides anything about the log: it stores what the source has
committed, and applies it by the same fold as the source. A source that is silent for `SILENT_S` is
taken for lost.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from onward.client.address import parse_addresses
from onward.client.keeper import Keeper
from onward.client.link import Link
from onward.client.nodes import socket_dial
from onward.cluster.snapshot import SnapshotFetch, ask
from onward.durations import format_duration
from onward.errors import (
    Conflict,
    Corruption,
    InvalidRequest,
    NotConnected,
    OffsetOutOfRange,
    OnwardError,
    ProtocolError,
)
from onward.log.disk import Buffer
from onward.protocol.frames import Kind
from onward.protocol.operations import decode_reply, encode_request
from onward.protocol.operations.replicas import (
    Follow,
    ReplicationStatus,
    SourceState,
    StepDown,
    SteppedDown,
    decode_source,
    encode_followed,
)
from onward.protocol.payloads import credit_frame, decode_error, encode_json

if TYPE_CHECKING:
    from onward.broker.broker import Broker

logger = logging.getLogger("onward.replica")

CREDIT_BYTES = 32 << 20
WRITE_BYTES_MAX = 8 << 20
SYNC_BYTES = 64 << 20
SILENT_S = 12.0
WATCH_S = 1.0
AGAIN_S = 1.0
AGAIN_S_MAX = 30.0
DAMAGED_S = 600.0
"""The pause after a snapshot of a damaged log: all of it would have to be fetched again."""
STEP_DOWN_S = 15.0
REACH_S = 3.0
CATCH_UP_S = 60.0
FORCE_COMMAND = "onward promote --force"

FINAL = (Conflict, InvalidRequest, ProtocolError)
"""Refusals that a second try would meet again: an operator must act."""


class Replica:
    """Follows one source for one broker."""

    def __init__(
        self,
        broker: Broker,
        *,
        on_final: Callable[[OnwardError], None],
        on_snapshot: Callable[[], None],
    ) -> None:
        """Prepare to follow.

        `on_final` is called when an operator must act; `on_snapshot` when a snapshot lies beside
        the log and must take its place, for which the broker has to be opened again.
        """
        self._broker = broker
        self._settings = broker.settings.replica
        self._on_final = on_final
        self._on_snapshot = on_snapshot
        self._loop = asyncio.get_running_loop()
        self._addresses = parse_addresses(self._settings.of)
        self._keeper = Keeper(
            [socket_dial(address) for address in self._addresses],
            name=f"replica-{self.name}",
            token=self._settings.token or None,
            addresses=[str(address) for address in self._addresses],
            follows_leader=False,
        )
        self._keeper.listen(self._use)
        self._keeper.listen_final(self._end)
        self._link: Link | None = None
        self._request_id = 0
        self._received: list[Buffer] = []
        self._is_writing = False
        self._unsynced_bytes = 0
        self._is_followed = False
        """A FOLLOW is open: the source says something every second."""
        self._is_paused = False
        """Nothing is stored for a moment: the disk is full."""
        self._obstacle = ""
        """Why nothing can be copied now, if so."""
        self._fetching: asyncio.Task[None] | None = None
        self._source = SourceState(0, 0, 0)
        self._heard_at = self._loop.time()
        self._again_s = AGAIN_S
        self._watch: asyncio.TimerHandle | None = None
        self._progress = asyncio.Event()
        self._is_lagging = False
        self._is_closed = False
        self.state = "connecting"

    @property
    def name(self) -> str:
        """Return the name of this replica at its source."""
        return self._settings.name or socket.gethostname()

    async def open(self) -> None:
        """Begin to follow, and go on until `close`."""
        self._watch = self._loop.call_later(WATCH_S, self._look)
        await self._keeper.open(timeout_s=None)

    async def close(self) -> None:
        """Follow no longer; what was received is stored to its end."""
        self._is_closed = True
        if self._watch is not None:
            self._watch.cancel()
        self._link = None
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.wait([self._fetching])
        await self._keeper.close()
        await self._broker.publishing.drain()

    # --- the connection ----------------------------------------------------------------------

    def _use(self, link: Link | None) -> None:
        """Follow over a new connection, from where this node stands."""
        self._link = link
        self._received, self._is_followed = [], False
        if link is None:
            self.state = "connecting"
        elif not self._is_writing:
            self._follow(link)
        # Else the end of the write under way begins: only then is it known where to go on.

    def _follow(self, link: Link) -> None:
        log = self._broker.log
        self._received, self._is_followed = [], True
        self._heard_at = self._loop.time()
        self._note_leader(link.welcome.leader)
        follow = Follow(
            name=self.name, node=self._broker.node, next_event_id=log.next_index,
            last_crc=log.last_crc, lineage=self._broker.state.lineage, credit_bytes=CREDIT_BYTES,
        )  # fmt: skip
        self._request_id = link.expect(partial(self._receive, link))
        link.send(Kind.FOLLOW, self._request_id, encode_json(follow))

    def _note_leader(self, leader: str | None) -> None:
        """Name the leader to whoever wants to write: the source, or the node that it names."""
        leader = leader or self._keeper.address
        if leader != self._broker.gate.leader:
            self._broker.gate.follow(leader)

    def _receive(self, link: Link, kind: int, payload: bytes | bytearray) -> None:
        if link is not self._link:
            return
        self._heard_at = self._loop.time()
        if kind == Kind.EVENTS:
            self._received.append(payload)
            self._write()
        elif kind == Kind.SOURCE:
            self._source = decode_source(payload)
            self._note_leader(self._source.leader)
            self.state = "following"
            if self._broker.log.next_index > self._source.durable_event_id:
                self._clear_obstacle()
            self._progress.set()
        elif kind == Kind.ERROR:
            self._refused(link, decode_error(payload))

    def _refused(self, link: Link, error: OnwardError) -> None:
        """The source sends nothing more: try again, fetch a snapshot, or give up."""
        link.forget(self._request_id)
        self._is_followed = False
        if isinstance(error, OffsetOutOfRange):
            self._begin_fetching(link, error)
        elif isinstance(error, FINAL):
            self._end(error)
        else:
            self._meet_obstacle(f"the source cannot be followed now: {error}")
            self._try_again()

    def _try_again(self, *, pause_s: float = 0.0) -> None:
        """Follow anew after a pause that grows."""
        self._loop.call_later(max(self._again_s, pause_s), self._follow_again, self._link)
        self._again_s = min(self._again_s * 2, AGAIN_S_MAX)

    def _follow_again(self, link: Link | None) -> None:
        if link is None or link is not self._link or not link.is_open:
            return
        if self._is_writing:
            # Only after it is it known where to go on.
            self._loop.call_later(AGAIN_S, self._follow_again, link)
        elif not self._is_followed and self._fetching is None:
            self._follow(link)

    def _meet_obstacle(self, text: str) -> None:
        """Warn about what holds the copying up, once, however often it is met."""
        if text != self._obstacle:
            self._obstacle = text
            logger.warning("%s", text)

    def _clear_obstacle(self) -> None:
        """Take note that events are copied. A source that answers alone proves nothing."""
        self._again_s = AGAIN_S
        if self._obstacle:
            self._obstacle = ""
            logger.info("the replica is able to copy events again")

    def _end(self, error: OnwardError) -> None:
        """Follow no longer: an operator must act."""
        if not self._is_closed:
            self._is_closed = True
            self.state = f"ended: {error}"
            self._link = None
            logger.critical("replica %r follows no longer: %s", self.name, error)
            self._on_final(error)

    def _look(self) -> None:
        """Notice a silent source, and a lag that grows."""
        self._watch = self._loop.call_later(WATCH_S, self._look)
        silent_s = self._loop.time() - self._heard_at
        if self._link is not None and self._is_followed and silent_s > SILENT_S:
            self._link.abort(NotConnected(f"the source was silent for {silent_s:.0f} s"))
        lag_ms, limit_ms = self._lag_ms(), self._settings.lag_warn_ms
        if limit_ms and lag_ms > limit_ms and not self._is_lagging:
            self._is_lagging = True
            logger.warning("the replica is %s behind its source", format_duration(lag_ms))
        elif self._is_lagging and lag_ms < limit_ms // 2:
            self._is_lagging = False
            logger.info("the replica has caught up with its source")

    # --- snapshots ---------------------------------------------------------------------------

    def _begin_fetching(self, link: Link, error: OffsetOutOfRange) -> None:
        """Fetch the source's log as files: it has dropped what comes next here."""
        log = self._broker.log
        if log.next_index > 1 and not log.is_followed:
            # It may hold events that no other node has, and nothing can be compared any more.
            self._end(
                Conflict(
                    f"this node has a log of its own, and the source no longer has event "
                    f"{log.next_index - 1} to compare it with ({error}): move the folder "
                    f"{log.folder} away and start the replica empty"
                )
            )
            return
        self.state = "fetching"
        if self._fetching is None:
            self._fetching = self._loop.create_task(self._fetch(link))
            self._fetching.add_done_callback(self._fetched)

    async def _fetch(self, link: Link) -> None:
        broker = self._broker
        fetch = SnapshotFetch(
            link, disk=broker.log.disk, folder=broker.log.folder,
            reserve_bytes=broker.settings.log.disk_reserve_bytes, in_thread=broker.in_thread,
        )  # fmt: skip
        try:
            await fetch.run(node=broker.node, replicas=dict(broker.state.replicas))
        except (OnwardError, OSError) as error:
            self._meet_obstacle(f"no snapshot of the source can be fetched now: {error}")
            self._try_again(pause_s=DAMAGED_S if isinstance(error, Corruption) else 0.0)
        else:
            self._on_snapshot()

    def _fetched(self, task: asyncio.Task[None]) -> None:
        self._fetching = None
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broker.fail(error if isinstance(error, Exception) else RuntimeError(str(error)))

    # --- storing -----------------------------------------------------------------------------

    def _write(self) -> None:
        """Store what has arrived, unless a write is under way."""
        if self._is_writing or self._is_paused or not self._received or self._link is None:
            return
        parts: list[Buffer] = []
        size = 0
        while self._received and size < WRITE_BYTES_MAX:
            size += len(self._received[0])
            parts.append(self._received.pop(0))
        entries = parts[0] if len(parts) == 1 else b"".join(parts)
        self._is_writing = True
        # A replica that is far behind syncs now and then: what it loses in a power cut, it gets
        # again. Only what is synced is acknowledged to the source.
        self._unsynced_bytes += size
        is_synced = not self._received or self._unsynced_bytes >= SYNC_BYTES
        if is_synced:
            self._unsynced_bytes = 0
        try:
            self._broker.publishing.follow(
                entries, sync=is_synced, done=partial(self._written, self._link, entries)
            )
        except Corruption as error:
            self._is_writing = self._is_followed = False
            self._received = []
            self._link.forget(self._request_id)
            self._meet_obstacle(f"what the source sent cannot be stored: {error}")
            self._try_again()

    def _written(self, link: Link, entries: Buffer, error: Exception | None) -> None:
        self._is_writing = False
        if self._is_closed:
            return
        if link is not self._link:
            if self._link is not None:
                self._follow(self._link)
        elif error is not None:
            # The disk is full, or no file can be opened: nothing was stored. Credit bounds what
            # waits here.
            self._received.insert(0, entries)
            self._is_paused = True
            self._meet_obstacle(f"events cannot be stored now: {error}")
            self._loop.call_later(AGAIN_S, self._resume)
        elif link.is_open:
            durable = encode_followed(self._broker.log.synced_index)
            link.send(Kind.FOLLOWED, self._request_id, durable)
            link.write(credit_frame(self._request_id, len(entries)))
            if self._is_followed:
                self._clear_obstacle()
            self._write()
        self._progress.set()

    def _resume(self) -> None:
        self._is_paused = False
        self._write()

    # --- what people ask ---------------------------------------------------------------------

    def _lag_ms(self) -> int:
        log = self._broker.log
        if log.next_index > self._source.durable_event_id:
            return 0
        return max(0, self._source.time_ms - log.tail.last_time_ms)

    def describe(self) -> ReplicationStatus:
        """Return the source, the lag and the state of the connection."""
        event_id = self._broker.log.next_index - 1
        return ReplicationStatus(
            node=self._broker.node,
            role="replica",
            lineage=self._broker.state.lineage,
            source=self._settings.of,
            state=self._obstacle or self.state,
            event_id=event_id,
            source_event_id=max(event_id, self._source.durable_event_id),
            lag_events=max(0, self._source.durable_event_id - event_id),
            lag_ms=self._lag_ms(),
            heard_ms_ago=round((self._loop.time() - self._heard_at) * 1000),
        )

    # --- promotion ---------------------------------------------------------------------------

    async def prepare_promotion(self, *, force: bool) -> bool:
        """Have the source step down and apply all it has; return True if it has confirmed that.

        Raises `Conflict` when the source answers and does not step down, unless forced. A source
        that does not answer is taken for dead.
        """
        stepped_down = await self._step_down_source(force=force)
        if stepped_down is not None:
            await self._reach(stepped_down.event_id, force=force)
        await self.close()
        return stepped_down is not None

    async def _step_down_source(self, *, force: bool) -> SteppedDown | None:
        try:
            link = await self._keeper.connected(timeout_s=REACH_S)
        except NotConnected:
            logger.warning("the source does not answer: it is taken for dead")
            return None
        try:
            return await self._ask_to_step_down(link)
        except OnwardError as error:
            if force:
                logger.warning("promoted by force: the source did not step down: %s", error)
                return None
            raise Conflict(
                f"the source answers and does not step down: {error}; "
                f"with force this node is promoted all the same, and what the source accepts from "
                f"now on is lost",
                command=FORCE_COMMAND,
            ) from None

    async def _ask_to_step_down(self, link: Link) -> SteppedDown:
        request = StepDown(successor=self._broker.node)
        payload = encode_request(request)
        return decode_reply(await ask(link, Kind.REQUEST, payload, timeout_s=STEP_DOWN_S), request)

    async def _reach(self, event_id: int, *, force: bool) -> None:
        """Wait until this node has everything up to an event."""
        try:
            async with asyncio.timeout(CATCH_UP_S):
                while self._broker.log.next_index <= event_id:
                    self._progress.clear()
                    await self._progress.wait()
        except TimeoutError:
            if not force:
                raise Conflict(
                    f"the source stepped down at event {event_id}, and this node has only "
                    f"{self._broker.log.next_index - 1} after {CATCH_UP_S:.0f} s: try again, or "
                    f"use force and lose the rest",
                    command=FORCE_COMMAND,
                ) from None
