"""One file of the log, and the rows that say what is in it.

    open     entries are appended; rows in runs: files, frozen (being written), new (in memory)
    sealed   never written again; all rows in one `.idx` file beside it

A segment is written by one thread only. Its rows are touched by the loop's thread only. Two threads
may sync it (a commit, and housekeeping): one at a time, and after one failed the other fails too,
because the kernel tells of lost pages only once.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from onward.log.disk import Buffer, Disk, File
from onward.log.index import NewRows, Rows, RowsFile, TopicRows, TopicSummary
from onward.message.entry import HEADER_BYTES, Entry, read_header

MERGED_ROWS_MAX = 65_536
"""Runs that have so many rows together become one file at the next checkpoint: 2.5 MiB."""


class Run(NamedTuple):
    """One file with rows of an open segment, and what it is made from."""

    path: str
    sources: list[Rows]
    is_written: bool

    @property
    def name(self) -> str:
        """Return the name of the file, as a checkpoint has it."""
        return self.path.rsplit("/", 1)[-1]


def segment_name(first_index: int) -> str:
    """Return the file name of the segment that begins with `first_index`.

    >>> segment_name(1)
    '00000000000000000001.log'
    """
    return f"{first_index:020d}.log"


class Segment:
    """One file of the log."""

    def __init__(self, disk: Disk, folder: str, *, first_index: int) -> None:
        self.first_index = first_index
        self.next_index = first_index
        self.bytes = 0
        self.last_time_ms = 0
        self.sealed: RowsFile | None = None
        self.runs: list[Rows] = []
        self.new = NewRows(first_index)
        self._next_run = 0
        self.path = f"{folder}/{segment_name(first_index)}"
        self.index_path = self.path.removesuffix(".log") + ".idx"
        self._disk = disk
        self._file: File | None = None
        self._reserved_bytes = 0
        self._first_time_ms = 0
        self._sync_lock = threading.Lock()
        self._has_failed = False

    @property
    def file(self) -> File:
        """Return the open file, opening it at first use."""
        if self._file is None:
            self._file = self._disk.open(self.path)
        return self._file

    def create(self, *, prepared_path: str | None) -> None:
        """Bring the file into being, from one prepared ahead if there is one."""
        if prepared_path is not None:
            self._disk.rename(prepared_path, self.path)
        self._file = self._disk.open(self.path, create=True)
        self._reserved_bytes = self._file.size()

    def needs_reserve(self, upto: int) -> bool:
        """Tell whether writing up to there goes beyond the space that was taken ahead."""
        return upto > self._reserved_bytes

    def reserve(self, upto: int, *, step: int) -> None:
        """Take disk space ahead, in steps: a commit then changes no metadata and is faster."""
        size = upto + step - upto % step if step > 1 else upto
        self.file.reserve(size)
        self._reserved_bytes = size

    def write(self, position: int, buffers: list[Buffer], length: int) -> None:
        """Write all of it, or raise OSError with the file cut back to where it was."""
        try:
            written = self.file.write(position, buffers)
            if written < length:
                rest = memoryview(b"".join(buffers))
                while written < length:
                    written += self.file.write(position + written, [rest[written:]])
        except OSError:
            self.cut(position)
            raise

    def sync(self) -> None:
        """Return when all that was written is on the disk; after a failure it fails for ever."""
        with self._sync_lock:
            if self._has_failed:
                raise OSError(errno.EIO, "an earlier sync of this file failed")
            try:
                self.file.sync()
            except OSError:
                self._has_failed = True
                raise

    def cut(self, position: int) -> None:
        """Remove everything from `position` on."""
        self.file.truncate(position)
        self._reserved_bytes = position

    def run_path(self, number: int) -> str:
        """Return the path of run `number` of this segment."""
        return f"{self.index_path}.run-{number:04d}"

    def use_run_numbers_after(self, names: Sequence[str]) -> None:
        """Give new runs higher numbers than those that a checkpoint names."""
        ends = [name.rpartition("-")[2] for name in names]
        self._next_run = max([int(end) + 1 for end in ends if end.isdecimal()], default=0)

    def plan_runs(self) -> list[Run]:
        """Return the files that the runs are to be, oldest first.

        The newest runs that are small together become one file, so that a log that is opened and
        closed many times has a few of them, and a checkpoint never writes much more than is new.
        """
        small: list[Rows] = []
        while len(small) < len(self.runs):
            run = self.runs[-1 - len(small)]
            if run.count + sum([one.count for one in small]) > MERGED_ROWS_MAX:
                break
            small.insert(0, run)
        groups = [[run] for run in self.runs[: len(self.runs) - len(small)]]
        return [self._plan_run(group) for group in (*groups, small) if group]

    def _plan_run(self, sources: list[Rows]) -> Run:
        first = sources[0]
        if len(sources) == 1 and isinstance(first, RowsFile):
            return Run(first.path, sources, is_written=True)
        # No number is used twice: a checkpoint may name the first file that had it.
        self._next_run += 1
        return Run(self.run_path(self._next_run - 1), sources, is_written=False)

    def add(self, entry: Entry) -> None:
        """Take over a written entry: from now on it can be found."""
        self.add_all([entry])

    def add_all(self, entries: Sequence[Entry]) -> None:
        """Take over written entries, at least one, that follow each other."""
        self.new.add_all(entries)
        last = entries[-1]
        self.bytes = last.end
        self.next_index = last.index + 1
        self.last_time_ms = last.time_ms

    def first_time_ms(self) -> int:
        """Return when its first entry was written; of an empty one, when the last one was."""
        if not self._first_time_ms and self.bytes:
            header = read_header(self.file.read(0, HEADER_BYTES), 0, position=0)
            self._first_time_ms = self.last_time_ms if header is None else header.time_ms
        return self._first_time_ms or self.last_time_ms

    def sources(self) -> list[Rows]:
        """Return all that knows rows of this segment, oldest first."""
        return [self.sealed] if self.sealed is not None else [*self.runs, self.new]

    def rows_of(self, topic: int) -> Iterator[TopicRows]:
        """Walk over the rows of `topic`, oldest first."""
        for source in self.sources():
            yield from source.rows_of(topic)

    def summaries(self) -> Iterator[TopicSummary]:
        """Walk over the topics of a sealed segment."""
        return iter(()) if self.sealed is None else self.sealed.summaries()

    def freeze_rows(self) -> Rows:
        """Set the new rows aside for a run; they can be found until it is there."""
        frozen = self.new
        self.runs.append(frozen)
        self.new = NewRows(self.first_index)
        return frozen

    def close_rows(self) -> None:
        """Close the files of rows, for good."""
        for source in self.sources():
            if isinstance(source, RowsFile):
                source.close()

    def close(self) -> None:
        """Close the file; it opens again when it is needed."""
        if self._file is not None:
            self._file.close()
            self._file = None
