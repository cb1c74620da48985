"""Snapshots: the files of a log as they are now, for a replica that lacks what was dropped.

    replica.snapshot ──▶ checkpoint ──▶ all files are opened ──▶ the list of their names and sizes
    FETCH ──▶ read and summed in a thread ──▶ FILE ... until the connection ends, or is idle

A snapshot is the checkpoint, the segments up to its position, their index files, and the files of
the schedule that it names. All are opened at once: retention, merges and later checkpoints may
remove them, and an open file can still be read. What comes after the snapshot is kept in the log as
long as the snapshot is open, so that the replica can follow from there (`followers`).

There are at most `SNAPSHOTS_MAX`, one for each connection, and each holds its descriptors until its
connection is closed or nothing was fetched for `IDLE_MS`.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from typing import TYPE_CHECKING, NamedTuple

from crc32c import crc32c

from onward.broker.state import schedule_runs_in
from onward.broker.tasks import Tasks
from onward.errors import Corruption, InvalidRequest, Overloaded, Unavailable
from onward.log.checkpoint import Checkpoint, checkpoint_name
from onward.log.disk import Disk, File
from onward.log.segment import Segment
from onward.protocol.frames import Kind, frame_head
from onward.protocol.operations.replicas import Fetch, Snapshot, SnapshotFile, file_head

if TYPE_CHECKING:
    from onward.broker.broker import Broker
    from onward.broker.requester import Requester
    from onward.broker.session import Session

logger = logging.getLogger("onward.replicas")

SNAPSHOTS_MAX = 2
FILES_MAX = 10_000
READS_MAX = 16
IDLE_MS = 60_000
RETRY_AFTER_MS = 5_000


class OpenFile(NamedTuple):
    """One file of a snapshot, open for reading."""

    name: str
    file: File
    bytes: int


class OpenSnapshot:
    """One snapshot whose files are open."""

    def __init__(self, number: int, checkpoint: Checkpoint, files: list[OpenFile]) -> None:
        self.number = number
        self.event_id = checkpoint.last_index
        self.files = files
        self.used_at_ms = 0
        self.reads = 0
        """How many reads are under way."""


class Snapshots:
    """All snapshots that replicas fetch from this node."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._tasks = Tasks(logger)
        self._by_requester: dict[Requester, OpenSnapshot] = {}
        self._opening = 0
        self._last_number = 0

    @property
    def event_ids(self) -> list[int]:
        """Return the last event of each open snapshot: what follows it is still needed."""
        return [snapshot.event_id for snapshot in self._by_requester.values()]

    # --- opening -----------------------------------------------------------------------------

    async def open(self, requester: Requester) -> Snapshot:
        """Write a checkpoint and open its files; a snapshot of the same connection is closed."""
        self._by_requester.pop(requester, None)
        if len(self._by_requester) + self._opening >= SNAPSHOTS_MAX:
            raise Overloaded(
                f"{SNAPSHOTS_MAX} snapshots are open already", retry_after_ms=RETRY_AFTER_MS
            )
        # A checkpoint must not be abandoned half-way, and the connection may be lost meanwhile.
        return await asyncio.shield(self._tasks.start(self._open(requester)))

    async def _open(self, requester: Requester) -> Snapshot:
        disk, folder = self._broker.log.disk, self._broker.log.folder
        self._opening += 1
        try:
            checkpoint, files = await self._broker.housekeeping.freeze(
                lambda checkpoint, segments: _open_files(disk, folder, checkpoint, segments)
            )
        finally:
            self._opening -= 1
        self._last_number += 1
        snapshot = OpenSnapshot(self._last_number, checkpoint, files)
        snapshot.used_at_ms = self._broker.clock.monotonic_ms()
        if not requester.is_closed:
            self._by_requester[requester] = snapshot
        total = sum(file.bytes for file in files)
        logger.info(
            "snapshot opened: up to event %d, %d files, %d bytes",
            snapshot.event_id, len(files), total,
        )  # fmt: skip
        return Snapshot(
            id=snapshot.number,
            event_id=snapshot.event_id,
            lineage=self._broker.state.lineage,
            files=[SnapshotFile(file.name, file.bytes) for file in files],
        )

    # --- reading -----------------------------------------------------------------------------

    def fetch(self, session: Session, request_id: int, fetch: Fetch) -> None:
        """Send a part of a file, with its checksum."""
        snapshot = self._by_requester.get(session)
        if snapshot is None or snapshot.number != fetch.snapshot:
            raise InvalidRequest(f"snapshot {fetch.snapshot} is not open on this connection")
        if fetch.file >= len(snapshot.files):
            raise InvalidRequest(f"the snapshot has {len(snapshot.files)} files, not {fetch.file}")
        file = snapshot.files[fetch.file]
        length = min(fetch.bytes, file.bytes - fetch.position)
        if length <= 0:
            raise InvalidRequest(f"{file.name} has {file.bytes} bytes, not {fetch.position}")
        if snapshot.reads >= READS_MAX:
            raise Overloaded(f"{READS_MAX} reads are under way", retry_after_ms=100)
        snapshot.used_at_ms = self._broker.clock.monotonic_ms()
        snapshot.reads += 1
        self._tasks.start(self._send(session, request_id, snapshot, file, fetch.position, length))

    async def _send(
        self, session: Session, request_id: int, snapshot: OpenSnapshot, file: OpenFile,
        position: int, length: int,
    ) -> None:  # fmt: skip
        def read() -> tuple[bytes, int]:
            part = file.file.read(position, length)
            return part, crc32c(part)

        try:
            part, crc = await self._broker.in_thread(read)
        except OSError as error:
            session.refuse(request_id, Unavailable(f"{file.name} cannot be read: {error}"))
            return
        finally:
            snapshot.reads -= 1
        if len(part) != length:
            session.refuse(request_id, Corruption(f"{file.name} is shorter than it was"))
            return
        head = file_head(crc)
        frame = frame_head(Kind.FILE, request_id, len(head) + length)
        session.send_parts([frame + head, part])

    # --- closing -----------------------------------------------------------------------------

    def tick(self, now_ms: int) -> None:
        """Close snapshots that nobody fetches any more."""
        for requester, snapshot in list(self._by_requester.items()):
            if now_ms - snapshot.used_at_ms > IDLE_MS:
                self.forget(requester)

    def forget(self, requester: Requester) -> None:
        """Close the snapshot of a connection, if there is one."""
        snapshot = self._by_requester.pop(requester, None)
        if snapshot is not None:
            # The last reference closes a file: a thread may be reading from it.
            logger.info("snapshot closed: up to event %d", snapshot.event_id)

    async def stop(self) -> None:
        """Close all snapshots, and wait for the checkpoint of one that is being opened."""
        await self._tasks.drain()
        self._by_requester.clear()

    def abandon(self) -> None:
        """Close all snapshots: the broker has failed."""
        self._tasks.cancel()
        self._by_requester.clear()


def _open_files(
    disk: Disk, folder: str, checkpoint: Checkpoint, segments: list[Segment]
) -> tuple[Checkpoint, list[OpenFile]]:
    """Open the files of a checkpoint. In a thread, while none of them can be removed."""
    sizes = {_name(segment.path): segment.bytes for segment in segments}
    sizes[_name(segments[-1].path)] = checkpoint.position
    names = disk.list_folder(folder)
    needed = [checkpoint_name(checkpoint.last_index), *schedule_runs_in(checkpoint.state), *sizes]
    # Without these a start reads the log again, or an answer has no offset: see `schedule.ids`.
    derived = [_name(segment.index_path) for segment in segments[:-1]] + checkpoint.runs
    derived += [one for one in names if one.startswith("scheduled-") and one.endswith(".ids")]
    chosen = needed + [name for name in derived if name in names]
    if len(chosen) > FILES_MAX:
        raise Unavailable(
            f"the log has {len(chosen)} files, and a snapshot has {FILES_MAX} at most: "
            f"use larger segments (log.segment_bytes_max)"
        )
    try:
        return checkpoint, [_open(disk, folder, name, sizes.get(name)) for name in chosen]
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise Overloaded("too many files are open", retry_after_ms=RETRY_AFTER_MS) from None
        raise


def _open(disk: Disk, folder: str, name: str, size: int | None) -> OpenFile:
    file = disk.open(f"{folder}/{name}")
    return OpenFile(name, file, file.size() if size is None else size)


def _name(path: str) -> str:
    return path.rsplit("/", 1)[-1]
