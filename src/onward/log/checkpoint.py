"""What is kept beside the log: the fold of everything up to an index.

    0      4         8        12    16
    | OCHK | version | length | crc | MessagePack ... |

A checkpoint is written aside, synced and renamed, and the last two are kept: what retention has cut
from the log lives only here. It also says where the tail's rows are, so that opening a log reads
only what came after it.
"""

from __future__ import annotations

from struct import Struct

import msgspec
from crc32c import crc32c

from onward.log.disk import Disk, write_all

HEADER = Struct("<4sIII")
MAGIC = b"OCHK"
VERSION = 1
KEPT = 2
_PREFIX = "checkpoint-"


class Checkpoint(msgspec.Struct, frozen=True):
    """A moment of the log, and the state folded up to it."""

    last_index: int
    last_crc: int
    last_time_ms: int
    term: int
    segment: int
    """First index of the segment that was open."""
    position: int
    """Where its next entry begins."""
    runs: list[str]
    """The names of the files with the rows of that segment up to `position`."""
    state: bytes
    """Whatever the owner of the log folds; opaque here."""


def checkpoint_name(last_index: int, *, copy: int = 0) -> str:
    """Return the file name of the checkpoint of everything up to `last_index`.

    >>> checkpoint_name(7)
    'checkpoint-00000000000000000007-0'
    """
    return f"{_PREFIX}{last_index:020d}-{copy}"


def write_checkpoint(disk: Disk, folder: str, checkpoint: Checkpoint, *, copies: int = 1) -> None:
    """Write durably, then forget all but the last two.

    Before something is removed from the log, `copies` is 2: the checkpoint before this one would
    not be enough any more.
    """
    for copy in range(copies):
        _write(disk, folder, checkpoint, checkpoint_name(checkpoint.last_index, copy=copy))
    for name in checkpoint_names(disk, folder)[:-KEPT]:
        disk.remove(f"{folder}/{name}")


def _write(disk: Disk, folder: str, checkpoint: Checkpoint, name: str) -> None:
    body = msgspec.msgpack.encode(checkpoint)
    path = f"{folder}/{name}"
    file = disk.open(f"{path}.tmp", create=True)
    try:
        file.truncate(0)
        unit = HEADER.pack(MAGIC, VERSION, len(body), crc32c(body)) + body
        write_all(file, 0, unit)
        file.sync()
    finally:
        file.close()
    disk.rename(f"{path}.tmp", path)
    disk.sync_folder(folder)


def read_checkpoints(disk: Disk, folder: str) -> list[Checkpoint]:
    """Return the valid checkpoints, newest first."""
    found = [read_checkpoint(disk, f"{folder}/{name}") for name in checkpoint_names(disk, folder)]
    return [checkpoint for checkpoint in reversed(found) if checkpoint is not None]


def checkpoint_names(disk: Disk, folder: str) -> list[str]:
    """Return the names of the checkpoints, oldest first."""
    return [
        name
        for name in disk.list_folder(folder)
        if name.startswith(_PREFIX) and not name.endswith(".tmp")
    ]


def read_checkpoint(disk: Disk, path: str) -> Checkpoint | None:
    """Return the checkpoint at `path`, or None when it is damaged."""
    file = disk.open(path)
    try:
        unit = file.read(0, file.size())
    finally:
        file.close()
    if len(unit) < HEADER.size:
        return None
    magic, version, length, crc = HEADER.unpack_from(unit)
    body = memoryview(unit)[HEADER.size :]
    if magic != MAGIC or version != VERSION or len(body) != length or crc32c(body) != crc:
        return None
    try:
        return msgspec.msgpack.decode(body, type=Checkpoint)
    except msgspec.DecodeError:
        return None
