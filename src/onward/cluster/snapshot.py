"""Fetching a snapshot: the files of the source's log, beside one's own until they are whole.

    replica.snapshot ──▶ enough space? ──▶ FETCH ... into incoming/ ──▶ synced, checked ──▶ ready
                                                │
                         anything fails ◀───────┘   the log of this node stays as it is

Several parts are on their way at a time, and the checksum of each is verified. The fetched log is
then checked as `onward log check` does it, and made this node's own: its checkpoint gets the id of
this node. What follows is up to the caller: `marks.begin_replacement`, and a new start.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec
from crc32c import crc32c

from onward.broker.state import adopt_state
from onward.client.link import Link
from onward.errors import Corruption, DiskFull, OnwardError, ProtocolError, Unavailable
from onward.log.check import Check
from onward.log.checkpoint import read_checkpoints, write_checkpoint
from onward.log.disk import Disk, File, write_all
from onward.log.marks import clear_incoming, is_file_of_a_log
from onward.protocol.frames import Kind
from onward.protocol.operations import decode_reply, encode_request
from onward.protocol.operations.replicas import (
    FILE_BYTES_MAX,
    Fetch,
    OpenSnapshot,
    Snapshot,
    split_file,
)
from onward.protocol.payloads import decode_error, encode_json

logger = logging.getLogger("onward.replica")

PARTS_IN_FLIGHT: Final = 8
OPEN_S: Final = 600.0
"""A snapshot waits for the retention that is under way at the source."""
PART_S: Final = 60.0
TOUCH_S: Final = 15.0
"""While files are checked here, the source hears that they are still wanted."""

Payload = bytes | bytearray


async def ask(link: Link, kind: Kind, payload: bytes, *, timeout_s: float) -> Payload:
    """Send one frame and return the payload of its answer; raise the error that it is."""
    answer: asyncio.Future[tuple[int, Payload]] = link.loop.create_future()

    def receive(kind: int, payload: Payload) -> None:
        if not answer.done():
            answer.set_result((kind, payload))

    request_id = link.expect(receive)
    try:
        link.send(kind, request_id, payload)
        ends: list[asyncio.Future[Any]] = [answer, link.lost]
        await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        link.forget(request_id)
    if not answer.done():
        raise link.lost.result() if link.lost.done() else Unavailable("no answer in time")
    answer_kind, answer_payload = answer.result()
    if answer_kind == Kind.ERROR:
        raise decode_error(answer_payload)
    return answer_payload


class Part(NamedTuple):
    """A part of a file to fetch."""

    file: int
    position: int
    bytes: int


class SnapshotFetch:
    """One attempt to fetch a snapshot."""

    def __init__(
        self, link: Link, *, disk: Disk, folder: str, reserve_bytes: int,
        in_thread: Callable[[Callable[[], object]], Awaitable[object]],
    ) -> None:  # fmt: skip
        self._link = link
        self._disk = disk
        self._folder = folder
        self._reserve_bytes = reserve_bytes
        self._in_thread = in_thread
        self._incoming = ""
        self._files: dict[int, File] = {}
        self._left: dict[int, int] = {}
        """Of each file that has begun: how many bytes are missing."""

    async def run(self, *, node: str, replicas: dict[str, int]) -> Snapshot:
        """Fetch a snapshot, verify it, and give it the id of this node; it is durable then."""
        began = time.monotonic()
        snapshot = await self._open()
        self._incoming = clear_incoming(self._disk, self._folder)
        self._check_space(snapshot)
        try:
            await self._fetch(snapshot)
            await self._check(snapshot, node=node, replicas=replicas)
        except OSError as error:
            raise self._as_full(error) from error
        finally:
            for file in self._files.values():
                file.close()
        logger.info(
            "snapshot fetched and checked: up to event %d, in %.1f s",
            snapshot.event_id, time.monotonic() - began,
        )  # fmt: skip
        return snapshot

    async def _open(self) -> Snapshot:
        request = OpenSnapshot()
        payload = encode_request(request)
        snapshot = decode_reply(
            await ask(self._link, Kind.REQUEST, payload, timeout_s=OPEN_S), request
        )
        names = [file.name for file in snapshot.files]
        # The source is trusted with what the log says, not with paths of this machine.
        wrong = [name for name in names if not is_file_of_a_log(name)]
        if wrong or len({*names}) != len(names):
            raise ProtocolError(f"the source sent a list of files that is no log: {wrong[:3]}")
        return snapshot

    def _check_space(self, snapshot: Snapshot) -> None:
        total = sum(file.bytes for file in snapshot.files)
        free = self._disk.free_bytes(self._folder)
        if free < total + self._reserve_bytes:
            raise DiskFull(
                f"a snapshot of {total} bytes does not fit beside the log in {self._folder}: "
                f"{free} bytes are free, {self._reserve_bytes} of them are kept"
            )
        logger.info(
            "fetching a snapshot: up to event %d, %d files, %d bytes",
            snapshot.event_id, len(snapshot.files), total,
        )  # fmt: skip

    # --- files -------------------------------------------------------------------------------

    async def _fetch(self, snapshot: Snapshot) -> None:
        parts = self._parts(snapshot)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(PARTS_IN_FLIGHT):
                    group.create_task(self._fetch_parts(snapshot, parts))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        await self._in_thread(lambda: self._disk.sync_folder(self._incoming))

    def _parts(self, snapshot: Snapshot) -> Iterator[Part]:
        """Walk over all parts, file after file; a file is created when its first part is next."""
        for number, file in enumerate(snapshot.files):
            self._files[number] = self._disk.open(f"{self._incoming}/{file.name}", create=True)
            self._left[number] = file.bytes
            for position in range(0, file.bytes, FILE_BYTES_MAX):
                yield Part(number, position, min(FILE_BYTES_MAX, file.bytes - position))

    async def _fetch_parts(self, snapshot: Snapshot, parts: Iterator[Part]) -> None:
        for part in parts:
            fetch = Fetch(
                snapshot=snapshot.id, file=part.file, position=part.position, bytes=part.bytes
            )
            payload = await ask(self._link, Kind.FETCH, encode_json(fetch), timeout_s=PART_S)
            crc, content = split_file(payload)
            if len(content) != part.bytes or crc32c(content) != crc:
                name = snapshot.files[part.file].name
                raise Corruption(f"{name} was damaged on its way, at byte {part.position}")
            file = self._files[part.file]
            await self._in_thread(partial(write_all, file, part.position, content))
            self._left[part.file] -= part.bytes
            if not self._left[part.file]:
                await self._in_thread(file.sync)
                file.close()

    # --- the log in them ---------------------------------------------------------------------

    async def _check(self, snapshot: Snapshot, *, node: str, replicas: dict[str, int]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                touching = group.create_task(self._touch(snapshot))
                await self._in_thread(
                    lambda: verify(self._disk, self._incoming, node=node, replicas=replicas)
                )
                touching.cancel()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _touch(self, snapshot: Snapshot) -> None:
        """Keep the snapshot open, so that the source keeps what follows it."""
        fetch = Fetch(snapshot=snapshot.id, file=0, position=0, bytes=1)
        with contextlib.suppress(OnwardError):
            while True:
                await asyncio.sleep(TOUCH_S)
                await ask(self._link, Kind.FETCH, encode_json(fetch), timeout_s=PART_S)

    def _as_full(self, error: OSError) -> Exception:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return DiskFull(f"the disk of {self._folder} is full: the snapshot does not fit")
        return error


def verify(disk: Disk, incoming: str, *, node: str, replicas: dict[str, int]) -> None:
    """Check a fetched log, and give its checkpoint the id of this node. In a thread."""
    check = Check(disk, incoming)
    check.run()
    if check.is_damaged:
        found = [*check.problems, *(f"{one.path}: {one.kind}" for one in check.damages)]
        raise Corruption(
            f"the log of the source is damaged ({found[0] if found else 'its index is wrong'}): "
            f"run 'onward log check' there"
        )
    [checkpoint] = read_checkpoints(disk, incoming)
    state = adopt_state(checkpoint.state, node=node, replicas=replicas)
    # Two copies, as always where the log does not hold what came before its first segment.
    write_checkpoint(disk, incoming, msgspec.structs.replace(checkpoint, state=state), copies=2)
