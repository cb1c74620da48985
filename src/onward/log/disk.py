"""The seam between the log and the operating system.

Everything the log does to files goes through `Disk` and `File`, so that the same code runs on a
real disk, in memory, and on a disk that fails on purpose (`onward.testing.disk`).

Rules:
- `File.write` may write less than asked: it says how much, the caller decides.
- `File.sync` is fdatasync; when it fails, nothing that was written since the last one may be
  trusted, and calling it again proves nothing: the kernel forgets the pages it could not write.
- A created, renamed or removed file is durable only after `Disk.sync_folder`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

Buffer = bytes | bytearray | memoryview

# The kernel takes at most 1,024 buffers in one call; joining many small ones is faster anyway.
BUFFERS_PER_WRITE_MAX = 64


class File(Protocol):
    """One open file, read and written at positions."""

    def read(self, position: int, length: int) -> bytes: ...
    def read_now(self, position: int, length: int) -> bytes | bytearray | None: ...
    def write(self, position: int, buffers: Sequence[Buffer]) -> int: ...
    def sync(self) -> None: ...
    def size(self) -> int: ...
    def truncate(self, size: int) -> None: ...
    def reserve(self, size: int) -> None: ...
    def map(self) -> bytes | mmap.mmap: ...
    def close(self) -> None: ...


class Disk(Protocol):
    """The few things a log asks of a file system."""

    def make_folder(self, folder: str) -> None: ...
    def list_folder(self, folder: str) -> list[str]: ...
    def open(self, path: str, *, create: bool = False) -> File: ...
    def remove(self, path: str) -> None: ...
    def rename(self, old: str, new: str) -> None: ...
    def sync_folder(self, folder: str) -> None: ...
    def free_bytes(self, folder: str) -> int: ...
    def lock(self, path: str) -> Unlock: ...
    def watch(self, path: str) -> Watch: ...


class Unlock(Protocol):
    """Gives a lock back."""

    def __call__(self) -> None: ...


class Watch(Protocol):
    """Tells whether a path still leads to the file that it led to at first."""

    def __call__(self) -> bool: ...


def write_all(file: File, position: int, unit: Buffer) -> None:
    """Write all of `unit` at `position`, however little the file takes at a time."""
    view = memoryview(unit)
    written = 0
    while written < len(view):
        written += file.write(position + written, [view[written:]])


class FolderLocked(Exception):
    """Another process holds the lock of this folder."""


class OsDisk:
    """The real disk.

    >>> import tempfile
    >>> disk = OsDisk()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = disk.open(f"{folder}/a", create=True)
    ...     written = file.write(0, [b"on", b"ward"])
    ...     file.sync()
    ...     (written, file.read(2, 4))
    (6, b'ward')
    """

    def make_folder(self, folder: str) -> None:
        """Create `folder` and its parents, durably; it may exist."""
        path = Path(folder)
        if not path.is_dir():
            self.make_folder(str(path.parent))
            path.mkdir(exist_ok=True)
            self.sync_folder(str(path.parent))

    def list_folder(self, folder: str) -> list[str]:
        """Return the names in `folder`, sorted."""
        return sorted(os.listdir(folder))

    def open(self, path: str, *, create: bool = False) -> OsFile:
        """Open for reading and writing; `create` makes the file when it is missing."""
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        return OsFile(os.open(path, flags, 0o640))

    def remove(self, path: str) -> None:
        """Remove a file; a missing one is no error."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def rename(self, old: str, new: str) -> None:
        """Put `old` in the place of `new`, atomically."""
        os.rename(old, new)

    def sync_folder(self, folder: str) -> None:
        """Make creations, renames and removals in `folder` durable."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def free_bytes(self, folder: str) -> int:
        """Return how many bytes may still be written there."""
        return shutil.disk_usage(folder).free

    def lock(self, path: str) -> Unlock:
        """Take the lock file at `path` for this process, or raise `FolderLocked`."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        return _flock(descriptor, path, fcntl.LOCK_EX)

    def watch(self, path: str) -> Watch:
        """Return what tells whether `path` still leads to the file that is there now.

        The number of a file that somebody has open is not given to another one.
        """
        absolute = os.path.abspath(path)
        file = _identity(absolute)
        return lambda: file is not None and _identity(absolute) == file


class ReadOnlyDisk(OsDisk):
    """The real disk, opened for reading only: also where its file system is mounted read-only.

    There the lock is a shared one of a lock file that exists: nobody writes through that mount,
    but a broker may through another one, and holds its lock exclusively.
    """

    def open(self, path: str, *, create: bool = False) -> OsFile:
        """Open for reading."""
        assert not create, f"{path}: nothing is created here"
        return OsFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC))

    def lock(self, path: str) -> Unlock:
        """Take the lock file at `path`; `FileNotFoundError` if it cannot be created here."""
        try:
            return super().lock(path)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return _flock(descriptor, path, fcntl.LOCK_SH)


def _flock(descriptor: int, path: str, kind: int) -> Unlock:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise FolderLocked(path) from error
    return lambda: os.close(descriptor)


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


class OsFile:
    """One real file."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __del__(self) -> None:
        # A segment that retention removed may still be read by a thread: the last one closes it.
        self.close()

    def read(self, position: int, length: int) -> bytes:
        """Return the bytes at `position`; fewer than `length` only at the end of the file."""
        data = os.pread(self._descriptor, length, position)
        if len(data) == length or not data:
            return data
        return data + self.read(position + len(data), length - len(data))

    def read_now(self, position: int, length: int) -> bytes | bytearray | None:
        """Return the bytes if that takes no waiting for the disk, else None."""
        buffer = bytearray(length)
        try:
            got = os.preadv(self._descriptor, [buffer], position, os.RWF_NOWAIT)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno == errno.EOPNOTSUPP:
                data = self.read(position, length)
                return data if len(data) == length else None
            raise
        return buffer if got == length else None

    def write(self, position: int, buffers: Sequence[Buffer]) -> int:
        """Write the buffers one after another from `position`; return how many bytes were."""
        if len(buffers) > BUFFERS_PER_WRITE_MAX:
            return os.pwrite(self._descriptor, b"".join(buffers), position)
        return os.pwritev(self._descriptor, buffers, position)

    def sync(self) -> None:
        """Return when all that was written is on the disk."""
        os.fdatasync(self._descriptor)

    def size(self) -> int:
        """Return the size in bytes."""
        return os.fstat(self._descriptor).st_size

    def truncate(self, size: int) -> None:
        """Cut (or extend with zeros) to `size`."""
        os.ftruncate(self._descriptor, size)

    def reserve(self, size: int) -> None:
        """Take the space up to `size` now: later writes are faster and cannot meet a full disk."""
        try:
            os.posix_fallocate(self._descriptor, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise

    def map(self) -> bytes | mmap.mmap:
        """Return the whole file as a buffer. Only for files that never change."""
        if self.size() == 0:
            return b""
        return mmap.mmap(self._descriptor, 0, prot=mmap.PROT_READ)

    def close(self) -> None:
        """Close; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
