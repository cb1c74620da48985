"""A disk that fails on purpose, the same way again from one seed.

Each file has two contents, and names are kept twice too:

    seen      what reads return: everything that was written      (the page cache)
    stored    what a power cut leaves: everything that was synced  (the platter)
    pending   the writes and changes of size between the two, in order

Rules:
- `crash` is a power cut and the restart after it. Each pending write is taken apart into sectors of
  512 bytes; each of them is kept, lost or torn by itself. Open files and locks die.
- Changes of names since `sync_folder` survive as a journal does: up to a random one, none after it.
  Syncing a new file does not make its name durable. Folders are durable at once.
- A failed sync forgets what was pending: reads still return it, a later sync succeeds, and
  after a power cut it is gone. That is what kernels do.
- A write that fails has written nothing; a short one has written what it says.
- `cut_power_after` lets the power go in the middle of whatever is done then: nothing works until
  `crash`, and what was not synced by then is at stake.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from random import Random
from typing import Literal

from onward.log.disk import Buffer
from onward.log.memory_disk import CAPACITY_BYTES, Content, MemoryDisk, MemoryFile, Space

__all__ = ["Faults", "FaultyDisk", "FaultyFile", "MemoryDisk"]

SECTOR_BYTES = 512
# A page of a real disk, so that a full disk is met within small tests.
PAGE_BYTES = 4096

Operation = Literal["read", "write", "sync", "truncate", "reserve", "sync_folder"]
Unsynced = Literal["random", "lost", "kept"]
# How many of so many survive a power cut: bytes of a sector, or changes of names.
Survive = Callable[[int], int]
Names = dict[str, Content | None]


class PowerCut(OSError):
    """The power is off: nothing works until `FaultyDisk.crash` starts the machine again."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """How likely each fault is, from 0 (never) to 1 (always)."""

    read_error: float = 0.0
    write_error: float = 0.0
    sync_error: float = 0.0
    short_write: float = 0.0
    uncached_read: float = 0.0  # `read_now` says that it would have to wait


class FaultyDisk(MemoryDisk):
    """A `Disk` that forgets what was not synced, and fails when told to.

    >>> disk = FaultyDisk(Random(7))
    >>> file = disk.open("a", create=True)
    >>> disk.sync_folder(".")
    >>> file.write(0, [b"safe"]), file.sync(), file.write(4, [b"gone"])
    (4, None, 4)
    >>> disk.crash(unsynced="lost")
    >>> disk.open("a").map()
    b'safe'
    """

    def __init__(
        self,
        random: Random,
        *,
        faults: Faults | None = None,
        capacity_bytes: int = CAPACITY_BYTES,
    ) -> None:
        super().__init__(capacity_bytes=capacity_bytes, chunk_bytes=PAGE_BYTES)
        self.faults = faults or Faults()
        self.starts = 1
        self._random = random
        self._stored_names: dict[str, Content] = {}
        self._pending_names: list[Names] = []
        self._to_fail: list[tuple[Operation, int, int]] = []
        # How many operations are left until the power goes, and who is told then.
        self._power: tuple[int, Callable[[], None]] | None = None

    def cut_power_after(self, operations: int, *, then: Callable[[], None]) -> None:
        """Cut the power after so many operations, and call `then` at that moment."""
        self._power = operations, then

    @contextmanager
    def without_faults(self) -> Iterator[None]:
        """Let nothing fail for a moment, and what was to fail afterwards fail as before."""
        before = self.faults, self._to_fail, self._power
        self.faults, self._to_fail, self._power = Faults(), [], None
        try:
            yield
        finally:
            self.faults, self._to_fail, self._power = before

    def fail(self, operation: Operation, *, after: int = 0, error: int = errno.EIO) -> None:
        """Let one coming `operation` fail: the next, or the one `after` so many that succeed.

        >>> disk = FaultyDisk(Random(7))
        >>> disk.fail("sync", after=1)
        >>> file = disk.open("a", create=True)
        >>> file.sync()
        >>> file.sync()
        Traceback (most recent call last):
        OSError: [Errno 5] Input/output error
        """
        self._to_fail.append((operation, after, error))

    def crash(self, *, unsynced: Unsynced = "random") -> None:
        """Cut the power and start again; `unsynced` says what becomes of what was not synced."""
        self.starts += 1
        self._locks.clear()
        self._to_fail.clear()
        self._power = None
        survive = self._survival(unsynced)
        for content in self._contents():
            content.lose_power(survive)
        for names in self._pending_names[: survive(len(self._pending_names))]:
            _apply(names, self._stored_names)
        self._pending_names.clear()
        self._show_stored()

    def kill(self) -> None:
        """Let the program die and the machine live: open files and locks die, no byte is lost."""
        self.starts += 1
        self._locks.clear()
        self._to_fail.clear()
        self._power = None

    def flip_bit(self, path: str, position: int, bit: int = 0) -> None:
        """Damage one bit of a file, in what is seen and in what is stored."""
        _faulty(self._content(path)).flip_bit(position, bit)

    def cut(self, path: str, size: int) -> None:
        """Cut a file to `size`, durably, as damage."""
        content = _faulty(self._content(path))
        content.resize(size)
        content.store()

    def open(self, path: str, *, create: bool = False) -> FaultyFile:
        """Open for reading and writing; `create` makes the file when it is missing."""
        return FaultyFile(self, _faulty(self._content(path, create=create)))

    def sync_folder(self, folder: str) -> None:
        """Make creations, renames and removals in `folder` durable."""
        self.step("sync_folder", self.faults.sync_error)
        parent = PurePosixPath(self._existing_folder(folder))
        for names in self._pending_names:
            if _touches(names, parent):
                _apply(names, self._stored_names)
        self._pending_names = [n for n in self._pending_names if not _touches(n, parent)]

    def step(self, operation: Operation, chance: float = 0.0) -> None:
        """Raise if this operation is to fail now. Files call it before all that they do."""
        self._use_power()
        for number, (failing, after, error) in enumerate(self._to_fail):
            if failing == operation and after == 0:
                del self._to_fail[number]
                raise OSError(error, os.strerror(error))
            if failing == operation:
                self._to_fail[number] = (failing, after - 1, error)
        if self.happens(chance):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def happens(self, chance: float) -> bool:
        """Decide by the seed whether something of this chance happens now."""
        return chance > 0 and self._random.random() < chance

    def shorten(self, length: int) -> int:
        """Return how much of a write of `length` is done: all of it, unless a fault says less."""
        if length > 1 and self.happens(self.faults.short_write):
            return self._random.randrange(1, length)
        return length

    def _new_content(self, space: Space) -> Content:
        return FaultyContent(space)

    def _use_power(self) -> None:
        if self._power is None:
            return
        left, then = self._power
        self._power = left - 1, then
        if left == 0:
            then()
        if left <= 0:
            raise PowerCut(errno.EIO, "the power was cut")

    def _change(self, names: Names) -> None:
        self._use_power()
        super()._change(names)
        self._pending_names.append(names)

    def _survival(self, unsynced: Unsynced) -> Survive:
        if unsynced == "random":
            choose, torn = self._random.choice, self._random.randint
            return lambda length: choose((0, torn(0, length), length))
        return (lambda _: 0) if unsynced == "lost" else (lambda length: length)

    def _contents(self) -> list[FaultyContent]:
        """All files that may have a name after a power cut, each once, in a fixed order."""
        found = [content for names in self._pending_names for content in names.values() if content]
        found += self._stored_names.values()
        return [_faulty(content) for content in dict.fromkeys(found)]

    def _show_stored(self) -> None:
        self._names = dict(self._stored_names)
        self._space.used_bytes = 0
        for content in self._names.values():
            content.enter_space(self._space)


class FaultyFile(MemoryFile):
    """One open file of a `FaultyDisk`. After a power cut it only fails: open it again."""

    def __init__(self, disk: FaultyDisk, content: FaultyContent) -> None:
        super().__init__(content)
        self._faulty = content
        self._disk = disk
        self._start = disk.starts

    def read(self, position: int, length: int) -> bytes:
        """Return the bytes at `position`, or fail."""
        self._step("read", self._disk.faults.read_error)
        return super().read(position, length)

    def read_now(self, position: int, length: int) -> bytes | None:
        """Return the bytes if no fault says that they are not at hand, or fail."""
        self._step("read", self._disk.faults.read_error)
        if self._disk.happens(self._disk.faults.uncached_read):
            return None
        return super().read_now(position, length)

    def write(self, position: int, buffers: Sequence[Buffer]) -> int:
        """Write all of the buffers, or less, or fail."""
        self._step("write", self._disk.faults.write_error)
        joined = b"".join(buffers)
        return super().write(position, [joined[: self._disk.shorten(len(joined))]])

    def sync(self) -> None:
        """Make what was written durable; or fail, and never make it durable."""
        try:
            self._step("sync", self._disk.faults.sync_error)
        except PowerCut:
            raise  # not refused, but never done: what is pending may survive all the same
        except OSError:
            self._faulty.forget()
            raise
        self._faulty.store()

    def truncate(self, size: int) -> None:
        """Cut (or extend with zeros) to `size`, or fail."""
        self._step("truncate", self._disk.faults.write_error)
        super().truncate(size)

    def reserve(self, size: int) -> None:
        """Take the space up to `size` now, or fail."""
        self._step("reserve", self._disk.faults.write_error)
        super().reserve(size)

    def map(self) -> bytes:
        """Return the whole file, or fail."""
        self._step("read", self._disk.faults.read_error)
        return super().map()

    def _step(self, operation: Operation, chance: float) -> None:
        self._opened()
        self._disk.step(operation, chance)

    def _opened(self) -> Content:
        if self._start != self._disk.starts:
            raise OSError(errno.EIO, "the power was cut since this file was opened")
        return super()._opened()


class FaultyContent(Content):
    """The bytes of one file as they are seen, beside those that are stored."""

    __slots__ = ("_pending", "_stored")

    def __init__(self, space: Space) -> None:
        super().__init__(space)
        self._stored = Content(Space(CAPACITY_BYTES, space.chunk_bytes))
        # (position, bytes written there), or (new size, None)
        self._pending: list[tuple[int, bytes | None]] = []

    def write(self, position: int, view: memoryview) -> int:
        """Write into what is seen, and remember it for a sync."""
        written = super().write(position, view)
        self._pending.append((position, bytes(view[:written])))
        return written

    def resize(self, size: int) -> None:
        """Change the size that is seen, and remember it for a sync."""
        super().resize(size)
        self._pending.append((size, None))

    def store(self) -> None:
        """Make everything durable, as a sync does."""
        for position, written in self._pending:
            if written is None:
                self._stored.resize(position)
            else:
                self._stored.write(position, memoryview(written))
        self._pending.clear()

    def forget(self) -> None:
        """Never store what is pending now, as a sync that failed does."""
        self._pending.clear()

    def lose_power(self, survive: Survive) -> None:
        """Store what `survive` leaves of what is pending, and see only what is stored."""
        grown = bool(self._pending) and self.size > self._stored.size
        self._settle(survive)
        if grown and survive(1):
            # The new size reached the disk, though not all the bytes: the rest reads as zeros.
            self._stored.resize(max(self.size, self._stored.size))
        self.copy_from(self._stored)

    def flip_bit(self, position: int, bit: int) -> None:
        """Change one bit of what is seen and of what is stored."""
        super().write(position, memoryview(_flipped(self, position, bit)))
        if position < self._stored.size:
            self._stored.write(position, memoryview(_flipped(self._stored, position, bit)))

    def _settle(self, survive: Survive) -> None:
        for position, written in self._pending:
            if written is not None:
                self._settle_write(position, memoryview(written), survive)
            elif survive(1):
                self._stored.resize(position)
        self._pending.clear()

    def _settle_write(self, position: int, view: memoryview, survive: Survive) -> None:
        while view:
            sector, view = _split(view, SECTOR_BYTES - position % SECTOR_BYTES)
            self._stored.write(position, sector[: survive(len(sector))])
            position += len(sector)


def _faulty(content: Content) -> FaultyContent:
    assert isinstance(content, FaultyContent)
    return content


def _split(view: memoryview, length: int) -> tuple[memoryview, memoryview]:
    return view[:length], view[length:]


def _flipped(content: Content, position: int, bit: int) -> bytes:
    return bytes([content.read(position, 1)[0] ^ (1 << bit)])


def _apply(names: Names, stored: dict[str, Content]) -> None:
    for name, content in names.items():
        stored.pop(name, None)
        if content is not None:
            stored[name] = content


def _touches(names: Names, folder: PurePosixPath) -> bool:
    return any(PurePosixPath(name).parent == folder for name in names)
