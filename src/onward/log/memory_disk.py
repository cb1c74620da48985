"""A disk in memory: what `memory:` stores its log on, and what the faulty disk of tests builds on.

A file is a list of chunks that never move and never change their size:

    chunks   [ 64 KiB ][ 64 KiB ][  None  ][  None  ]      None: reserved, reads as zeros
    size     ----------------------------->|               what a reader may see

Rules:
- Reserving takes space from the capacity, but no memory until something is written there.
- Bytes are in their chunk before `size` says so: the loop may read while the storage thread
  writes, and neither needs a lock.
- When the capacity is reached, writes become short and then fail with ENOSPC, as on a real disk.
- Nothing here is durable: `sync` and `sync_folder` have nothing to do.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from onward.log.disk import Buffer, FolderLocked, Unlock, Watch

CHUNK_BYTES = 64 * 1024
CAPACITY_BYTES = 1 << 40


class MemoryDisk:
    """Files in memory, with the rules of a file system.

    >>> disk = MemoryDisk()
    >>> disk.make_folder("log")
    >>> file = disk.open("log/a", create=True)
    >>> file.write(0, [b"on", b"ward"])
    6
    >>> disk.rename("log/a", "log/b")
    >>> disk.list_folder("log"), disk.open("log/b").read(2, 4)
    (['b'], b'ward')
    """

    def __init__(
        self, *, capacity_bytes: int = CAPACITY_BYTES, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self._space = Space(capacity_bytes, chunk_bytes)
        self._folders = {".", "/"}
        self._names: dict[str, Content] = {}
        self._locks: dict[str, object] = {}

    @property
    def capacity_bytes(self) -> int:
        """How much all files together may take; may be changed at any time."""
        return self._space.capacity_bytes

    @capacity_bytes.setter
    def capacity_bytes(self, capacity_bytes: int) -> None:
        self._space.capacity_bytes = capacity_bytes

    def make_folder(self, folder: str) -> None:
        """Create `folder` and its parents; it may exist."""
        path = PurePosixPath(folder)
        self._folders.update(map(str, (path, *path.parents)))

    def list_folder(self, folder: str) -> list[str]:
        """Return the names in `folder`, sorted."""
        parent = PurePosixPath(self._existing_folder(folder))
        paths = map(PurePosixPath, (*self._names, *self._folders))
        return sorted(path.name for path in paths if path.parent == parent and path != parent)

    def open(self, path: str, *, create: bool = False) -> MemoryFile:
        """Open for reading and writing; `create` makes the file when it is missing."""
        return MemoryFile(self._content(path, create=create))

    def remove(self, path: str) -> None:
        """Remove a file; a missing one is no error. Who has it open may go on reading."""
        name = _name(path)
        if name in self._names:
            self._change({name: None})

    def rename(self, old: str, new: str) -> None:
        """Put `old` in the place of `new`, atomically."""
        content = self._content(old)
        self._existing_folder(str(PurePosixPath(new).parent))
        if _name(old) != _name(new):
            self._change({_name(old): None, _name(new): content})

    def sync_folder(self, folder: str) -> None:
        """Do nothing: memory has no later."""
        self._existing_folder(folder)

    def free_bytes(self, folder: str) -> int:
        """Return how many bytes may still be written."""
        self._existing_folder(folder)
        return self._space.free_bytes

    def lock(self, path: str) -> Unlock:
        """Take the lock file at `path`, or raise `FolderLocked`."""
        name = _name(path)
        self._content(name, create=True)
        if name in self._locks:
            raise FolderLocked(path)
        owner = self._locks[name] = object()

        def unlock() -> None:
            if self._locks.get(name) is owner:
                del self._locks[name]

        return unlock

    def watch(self, path: str) -> Watch:
        """Return what tells whether `path` still leads to the file that is there now."""
        name = _name(path)
        content = self._names.get(name)
        return lambda: content is not None and self._names.get(name) is content

    def _content(self, path: str, *, create: bool = False) -> Content:
        name = _name(path)
        content = self._names.get(name)
        if content is None:
            if not create:
                raise _missing(path)
            self._existing_folder(str(PurePosixPath(name).parent))
            content = self._new_content(self._space)
            self._change({name: content})
        return content

    def _new_content(self, space: Space) -> Content:
        return Content(space)

    def _change(self, names: dict[str, Content | None]) -> None:
        """Give each name its new content, or none. All changes of names come through here."""
        for name, content in names.items():
            replaced = self._names.pop(name, None)
            if content is not None:
                self._names[name] = content
            if replaced is not None and replaced not in names.values():
                replaced.leave_space()

    def _existing_folder(self, folder: str) -> str:
        name = _name(folder)
        if name not in self._folders:
            raise _missing(folder)
        return name


class MemoryFile:
    """One open file of a `MemoryDisk`."""

    def __init__(self, content: Content) -> None:
        self._content: Content | None = content

    def read(self, position: int, length: int) -> bytes:
        """Return the bytes at `position`; fewer than `length` only at the end of the file."""
        return self._opened().read(position, length)

    def read_now(self, position: int, length: int) -> bytes | None:
        """Return the bytes, or None when the file ends before."""
        found = self._opened().read(position, length)
        return found if len(found) == length else None

    def write(self, position: int, buffers: Sequence[Buffer]) -> int:
        """Write the buffers one after another from `position`; return how many bytes were."""
        joined = buffers[0] if len(buffers) == 1 else b"".join(buffers)
        return self._opened().write(position, memoryview(joined).cast("B"))

    def sync(self) -> None:
        """Do nothing: memory has no later."""
        self._opened()

    def size(self) -> int:
        """Return the size in bytes."""
        return self._opened().size

    def truncate(self, size: int) -> None:
        """Cut (or extend with zeros) to `size`."""
        self._opened().resize(size)

    def reserve(self, size: int) -> None:
        """Take the space up to `size` now, so that later writes cannot meet a full disk."""
        content = self._opened()
        if size > content.size:
            content.resize(size)

    def map(self) -> bytes:
        """Return the whole file. Only for files that never change."""
        content = self._opened()
        return content.read(0, content.size)

    def close(self) -> None:
        """Close; a second call does nothing."""
        self._content = None

    def _opened(self) -> Content:
        if self._content is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self._content


class Space:
    """What the files of one disk take together, counted in chunks."""

    __slots__ = ("capacity_bytes", "chunk_bytes", "used_bytes")

    def __init__(self, capacity_bytes: int, chunk_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.chunk_bytes = chunk_bytes
        self.used_bytes = 0

    @property
    def free_bytes(self) -> int:
        """How many bytes are left, in whole chunks."""
        free_bytes = max(0, self.capacity_bytes - self.used_bytes)
        return free_bytes - free_bytes % self.chunk_bytes


class Content:
    """The bytes of one file: alive while it has a name or somebody has it open."""

    __slots__ = ("_chunks", "_space", "size")

    def __init__(self, space: Space) -> None:
        self._space = space
        self._chunks: list[memoryview | None] = []
        self.size = 0

    def read(self, position: int, length: int) -> bytes:
        """Return what is there between `position` and the end of the file."""
        end = min(position + length, self.size)
        return b"".join(self._views(position, end)) if position < end else b""

    def write(self, position: int, view: memoryview) -> int:
        """Write as much of `view` as there is space for, at least one byte of it."""
        if not view:
            return 0
        chunk_bytes = self._space.chunk_bytes
        end = min(position + len(view), self._reach())
        if end <= position:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._take_chunks(end)
        start = position
        while start < end:
            number, inside = divmod(start, chunk_bytes)
            count = min(chunk_bytes - inside, end - start)
            source = start - position
            self._chunk(number)[inside : inside + count] = view[source : source + count]
            start += count
        # Last, because another thread may read up to here as soon as it is said.
        self.size = max(self.size, end)
        return end - position

    def resize(self, size: int) -> None:
        """Cut to `size`, or extend with zeros; space is given back or taken."""
        if size > self._reach():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if size < self.size:
            self.size = size
            self._drop_chunks(size)
        self._take_chunks(size)
        self.size = size

    def leave_space(self) -> None:
        """Give all space back, because the last name is gone; who has it open may go on."""
        self._space.used_bytes -= self._taken_bytes()
        self._space = Space(CAPACITY_BYTES, self._space.chunk_bytes)

    def enter_space(self, space: Space) -> None:
        """Count this file in `space` from now on, full or not."""
        self._space = space
        space.used_bytes += self._taken_bytes()

    def copy_from(self, other: Content) -> None:
        """Have the bytes of `other`. Space is not counted: `enter_space` does that."""
        self._chunks = [chunk and memoryview(bytearray(chunk)) for chunk in other._chunks]
        self.size = other.size

    def _taken_bytes(self) -> int:
        return len(self._chunks) * self._space.chunk_bytes

    def _reach(self) -> int:
        """The largest size this file can have now."""
        return self._taken_bytes() + self._space.free_bytes

    def _chunk(self, number: int) -> memoryview:
        chunk = self._chunks[number]
        if chunk is None:
            chunk = self._chunks[number] = memoryview(bytearray(self._space.chunk_bytes))
        return chunk

    def _take_chunks(self, size: int) -> None:
        missing = -(-size // self._space.chunk_bytes) - len(self._chunks)
        if missing > 0:
            self._chunks.extend([None] * missing)
            self._space.used_bytes += missing * self._space.chunk_bytes

    def _drop_chunks(self, size: int) -> None:
        chunk_bytes = self._space.chunk_bytes
        kept = -(-size // chunk_bytes)
        self._space.used_bytes -= (len(self._chunks) - kept) * chunk_bytes
        del self._chunks[kept:]
        inside = size % chunk_bytes
        if inside and (last := self._chunks[-1]) is not None:
            # What was cut off must read as zeros when the file grows again.
            last[inside:] = bytes(chunk_bytes - inside)

    def _views(self, position: int, end: int) -> Iterator[Buffer]:
        chunk_bytes = self._space.chunk_bytes
        while position < end:
            number, inside = divmod(position, chunk_bytes)
            count = min(chunk_bytes - inside, end - position)
            chunk = self._chunks[number]
            yield bytes(count) if chunk is None else chunk[inside : inside + count]
            position += count


def _name(path: str) -> str:
    return str(PurePosixPath(path))


def _missing(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
