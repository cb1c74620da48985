"""The log: stage, perform, finish; find and read.

Writing is three steps, because only the middle one may wait for the disk:

    stage(drafts)    the loop's thread gives out indexes and builds the bytes     -> Write
    follow(entries)  the same for entries that another node has built             -> Write
    reserve(write)   the storage thread takes the disk space; `perform` does it if nobody has
    perform(write)   the storage thread writes, and syncs when asked
    finish(write)    the loop's thread makes the entries findable, once they are committed

`reserve` and `perform` raise `DiskFull`, or `Overloaded` when too many files are open, with the
files as they were. A cluster reserves before it proposes a write: after that it is too late.

Several writes may be staged and performed before the first is finished: each begins where the one
before it ends. When one fails, those behind it fail with the same error and with nothing done; then
`unstage` makes the log continue after what was written. Entries that were written or reserved and
will never be committed are removed by `cut`; a finished entry is never cut. A failed sync is never
tried again: `DiskFailed` ends the node.

Reading is two steps for the same reason: `plan` finds out what to read, `read` does it, and
every entry's checksum is verified before a byte of it leaves: damage is never served.
"""

from __future__ import annotations

import errno
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from onward.errors import Corruption, DiskFull, OnwardError, Overloaded
from onward.log.carried import Carried, CarriedRow
from onward.log.disk import Buffer, Disk
from onward.log.index import NewRows, RowsFile, write_rows
from onward.log.marks import FOLLOWING, clear_mark, set_mark
from onward.log.segment import Run, Segment
from onward.log.span import Span, carried_span, span_of, verified
from onward.message.entry import (
    CARRIED_TOPIC,
    HEADER_BYTES,
    Draft,
    Entry,
    Kind,
    encode_entries,
    read_entry,
)

PREPARED_NAME = "next.log"
TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
DESCRIPTOR_WAIT_S = 0.05


class DiskFailed(Exception):
    """The disk refused a write or a sync: what it holds is unknown until it is verified."""


class FolderLost(DiskFailed):
    """The folder was deleted or replaced: what is written goes into files without a name."""


@dataclass(slots=True)
class Write:
    """Entries that are staged: built, but not written."""

    segment: Segment
    position: int
    buffers: list[Buffer]
    entries: list[Entry]
    length: int
    sealed: tuple[Segment, int] | None = None
    """The segment before and where it ends, when these entries begin a new one."""
    number: int = 0
    """Writes are numbered in the order in which they are staged."""
    is_followed: bool = False
    """Another node has built the entries."""
    is_reserved: bool = False
    is_written: bool = False
    is_synced: bool = False

    @property
    def rolled(self) -> bool:
        """Return True if these entries begin a new segment."""
        return self.sealed is not None


class _End(NamedTuple):
    """Where the log ends, with what is staged."""

    segment: Segment
    position: int
    index: int  # type: ignore[assignment]
    crc: int


@dataclass(slots=True)
class LogLimits:
    """Sizes a log keeps to."""

    segment_bytes_max: int = 1 << 30
    preallocate_bytes: int = 64 << 20
    disk_reserve_bytes: int = 64 << 20


@dataclass(slots=True)
class Log:
    """All segments of a node. Made by `recovery.open_log`."""

    disk: Disk
    folder: str
    limits: LogLimits
    segments: list[Segment] = field(default_factory=list)
    last_crc: int = 0
    synced_index: int = 0
    term: int = 0
    system_topics: set[int] = field(default_factory=set)
    """Topics of the broker itself: they may use half of what is kept of the disk."""
    carried: Carried = field(default_factory=Carried)
    """Messages that outlive retention: found by `plan_carried` only."""
    is_followed: bool = False
    """Entries behind the last checkpoint may come from another node: the folder is marked so."""
    _staged: deque[Write] = field(default_factory=deque)
    """Writes that are staged or performed and not finished, in order."""
    _failure: tuple[int, OnwardError] | None = None
    """The number of a write that failed with nothing done, and why: those behind it fail, too."""
    _staged_count: int = 0
    _performed_number: int = 0

    @property
    def tail(self) -> Segment:
        """Return the open segment."""
        return self.segments[-1]

    @property
    def next_index(self) -> int:
        """Return the index after the last finished entry."""
        return self.tail.next_index

    @property
    def staged_index(self) -> int:
        """Return the index that the next staged entry gets."""
        return self._end().index

    @property
    def bytes(self) -> int:
        """Return the size of all segments."""
        return sum(segment.bytes for segment in self.segments)

    # --- writing -----------------------------------------------------------------------------

    def stage(self, drafts: Sequence[Draft]) -> Write:
        """Give the drafts their indexes and build their bytes. Nothing is written yet."""
        length = (HEADER_BYTES + 8) * len(drafts)
        length += sum([len(part) for draft in drafts for part in draft.parts])
        end = self._end()
        segment, position, sealed = self._place_for(length, end)
        buffers, entries = encode_entries(
            drafts, position=position, index=end.index, term=self.term, previous_crc=end.crc,
            synced_index=self.synced_index,
        )  # fmt: skip
        length = entries[-1].end - position if entries else 0
        return self._add(Write(segment, position, buffers, entries, length, sealed))

    def follow(self, entries: Buffer) -> Write:
        """Stage entries that another node has built, at least one, unchanged.

        Raises `Corruption`, with nothing staged, when one is damaged or incomplete, does not
        continue the chain of this log, or is a gap, which only its own log can have.
        """
        end = self._end()
        segment, position, sealed = self._place_for(len(entries), end)
        index, crc = end.index, end.crc
        headers: list[Entry] = []
        start = 0
        while start < len(entries) or not headers:
            entry = read_entry(entries, start, position=position)
            if entry is None or not _continues(entry, index=index, crc=crc):
                raise Corruption(
                    f"entry {index} does not continue the log: it is damaged, foreign or a gap"
                )
            headers.append(entry)
            start, index, crc = start + entry.length, index + 1, entry.crc
        return self._add(
            Write(segment, position, [entries], headers, len(entries), sealed, is_followed=True)
        )

    def stage_roll(self) -> Write:
        """Stage the beginning of a new segment, without entries; nothing else may be staged."""
        assert self.tail.bytes, "two segments would have one name"
        assert not self._staged, "a segment begins between two writes"
        segment = Segment(self.disk, self.folder, first_index=self.next_index)
        return self._add(Write(segment, 0, [], [], 0, sealed=(self.tail, self.tail.bytes)))

    def _add(self, write: Write) -> Write:
        self._staged_count += 1
        write.number = self._staged_count
        self._staged.append(write)
        return write

    def reserve(self, write: Write) -> None:
        """Take the disk space of a staged write, in the order of writes. In the storage thread.

        Raises DiskFull or Overloaded with nothing done, or DiskFailed. A write that is reserved and
        will not be performed is removed by `cut`.
        """
        self._refuse_behind_failure(write)
        try:
            if write.rolled:
                self._create_segment(write)
            self._take_room(write, is_kept=True)
        except (DiskFull, Overloaded) as error:
            self._fail(write, error)
            raise
        except OSError as error:
            raise DiskFailed(f"{write.segment.path}: {error}") from error
        write.is_reserved = True

    def perform(self, write: Write, *, sync: bool) -> None:
        """Write and, when asked, sync. In the storage thread.

        Raises DiskFull or Overloaded with nothing done, or DiskFailed.
        """
        if write.is_written:
            raise RuntimeError("no place of the log is ever written twice")
        if write.number <= self._performed_number:
            raise RuntimeError("writes are performed in the order in which they were staged")
        self._refuse_behind_failure(write)
        self._performed_number = write.number
        try:
            if write.is_followed and not self.is_followed:
                self._begin_following()
            if write.rolled:
                self._roll(write)
            self._write(write)
            if sync:
                write.segment.sync()
                write.is_synced = True
        except (DiskFull, Overloaded) as error:
            self._fail(write, error)
            raise
        except OSError as error:
            raise DiskFailed(f"{write.segment.path}: {error}") from error
        write.is_written = True

    def _refuse_behind_failure(self, write: Write) -> None:
        """Raise the error of a write that failed in front of this one."""
        if self._failure is None or write.number < self._failure[0]:
            return
        if write.is_reserved and write.rolled:
            try:
                self._remove_new_segment(write)
            except OSError as error:
                raise DiskFailed(f"{write.segment.path}: {error}") from error
        raise self._failure[1]

    def _fail(self, write: Write, error: OnwardError) -> None:
        """Let those behind a write fail with it, and make durable that nothing of it is there."""
        self._failure = write.number, error
        self._take_back(write)

    def unstage(self) -> None:
        """Forget the writes that failed with nothing done.

        `perform`, or `reserve` when that failed, was called for all of them.
        """
        first = 0 if self._failure is None else self._failure[0]
        while self._staged and not self._staged[-1].is_written:
            if self._staged[-1].number < first:
                break
            self._staged.pop()
        self._failure = None

    def cut(self, *, after: int) -> None:
        """Remove staged entries above index `after` that will never be committed, durably.

        In the storage thread, with no write under way. A finished entry is never cut. A write that
        was not performed is removed as a whole if any of its entries is above `after`.
        """
        assert after >= self.next_index - 1, "a finished entry is never cut"
        try:
            while self._staged and self._cut_last(self._staged[-1], after=after):
                self._staged.pop()
        except OSError as error:
            raise DiskFailed(f"{self.folder}: {error}") from error

    def _cut_last(self, write: Write, *, after: int) -> bool:
        """Cut the last write; return True when nothing of it is left."""
        kept = [entry for entry in write.entries if entry.index <= after]
        if len(kept) == len(write.entries):
            return False
        if not write.is_written:
            kept = []
            if not write.is_reserved:
                return True
        if not kept and write.rolled:
            self._remove_new_segment(write)
            return True
        end = kept[-1].end if kept else write.position
        write.segment.cut(end)
        write.segment.sync()
        write.entries, write.length = kept, end - write.position
        return not kept

    def finish(self, write: Write) -> None:
        """Make written entries findable: they are committed."""
        assert self._staged[0] is write, "entries are committed in their order"
        assert write.is_written, "only what was written is committed"
        self._staged.popleft()
        if write.rolled:
            # Time never goes back, also while the new segment has no entry.
            write.segment.last_time_ms = self.tail.last_time_ms
            self.segments.append(write.segment)
        if write.entries:
            write.segment.add_all(write.entries)
            self.last_crc = write.entries[-1].crc
            if write.is_synced:
                self.synced_index = write.entries[-1].index

    def _end(self) -> _End:
        """Return where the next entry is staged: behind all that are staged already."""
        for write in reversed(self._staged):
            if write.entries:
                last = write.entries[-1]
                return _End(write.segment, last.end, last.index + 1, last.crc)
            if write.rolled:
                # It begins a segment without entries: `stage_roll` has seen that it is the first.
                return _End(write.segment, 0, write.segment.first_index, self.last_crc)
        return _End(self.tail, self.tail.bytes, self.next_index, self.last_crc)

    def _place_for(self, length: int, end: _End) -> tuple[Segment, int, tuple[Segment, int] | None]:
        """Return segment and position for the next entries, and what a new segment seals."""
        fits = end.position + length <= self.limits.segment_bytes_max
        if fits or not end.position or not length:
            return end.segment, end.position, None
        segment = Segment(self.disk, self.folder, first_index=end.index)
        return segment, 0, (end.segment, end.position)

    def _begin_following(self) -> None:
        """Mark the folder, before the first entry is in it whose claims are of another disk."""
        try:
            set_mark(self.disk, self.folder, FOLLOWING)
        except OSError as error:
            raise self._as_full(error) from error
        self.is_followed = True

    def end_following(self) -> None:
        """Remove the mark of a follower. In a thread, after a checkpoint of all that it copied."""
        clear_mark(self.disk, self.folder, FOLLOWING)
        self.is_followed = False

    def _roll(self, write: Write) -> None:
        """Seal the segment before and create the next file, both durable before the first entry."""
        assert write.sealed is not None, "a write that begins a segment seals the one before"
        before, end = write.sealed
        before.cut(end)
        before.sync()
        if not write.is_reserved:
            self._create_segment(write)

    def _create_segment(self, write: Write) -> None:
        """Create the file of the segment that a write begins."""
        try:
            prepared = PREPARED_NAME in self.disk.list_folder(self.folder)
            prepared_path = f"{self.folder}/{PREPARED_NAME}" if prepared else None
            write.segment.create(prepared_path=prepared_path)
            self.disk.sync_folder(self.folder)
        except OSError as error:
            raise self._as_full(error) from error

    def _write(self, write: Write) -> None:
        if not write.length:
            return
        self._take_room(write, is_kept=False)
        try:
            write.segment.write(write.position, write.buffers, write.length)
        except OSError as error:
            raise self._as_full(error) from error

    def _take_room(self, write: Write, *, is_kept: bool) -> None:
        """Take space ahead; messages may not take the reserve, however fast they come.

        Giving space back needs some itself: what ends a topic is written as long as anything is.
        Where no space is taken ahead, `is_kept` takes that of this write.
        """
        end = write.position + write.length
        if not write.segment.needs_reserve(end):
            return
        try:
            if self._has_room_ahead():
                write.segment.reserve(end, step=self.limits.preallocate_bytes)
                return
            if self._would_use_reserve(write):
                raise DiskFull(f"the disk of {self.folder} is nearly full")
            if is_kept:
                write.segment.reserve(end, step=1)
        except OSError as error:
            raise self._as_full(error) from error

    def _would_use_reserve(self, write: Write) -> bool:
        """Return True if the messages of a write would take space that is kept for other uses."""
        kept = self.limits.disk_reserve_bytes
        topics = {entry.topic for entry in write.entries if entry.kind == Kind.MESSAGES}
        if topics and topics <= self.system_topics:
            # Acks go on when the disk is full: for them the half of it is enough.
            kept //= 2
        return bool(topics) and self.disk.free_bytes(self.folder) < kept + write.length

    def _take_back(self, write: Write) -> None:
        """Make it durable that a write came to nothing: its file was cut, or is removed if new.

        Whoever published is about to hear that nothing was stored, and the indexes will be given to
        others: after a power cut what was written would contradict both.
        """
        try:
            if write.rolled:
                self._remove_new_segment(write)
            else:
                write.segment.cut(write.position)
                write.segment.sync()
        except OSError as error:
            raise DiskFailed(f"{write.segment.path}: {error}") from error

    def _remove_new_segment(self, write: Write) -> None:
        """Remove, durably, the file of the segment that a write began."""
        write.segment.close()
        self.disk.remove(write.segment.path)
        self._sync_folder_patiently()

    def _sync_folder_patiently(self) -> None:
        """Sync the folder, however long it takes until a file may be opened for that."""
        while True:
            try:
                return self.disk.sync_folder(self.folder)
            except OSError as error:
                if error.errno not in TOO_MANY_FILES:
                    raise
            time.sleep(DESCRIPTOR_WAIT_S)

    def _has_room_ahead(self) -> bool:
        """Tell whether space may be taken ahead: never that which is kept for checkpoints."""
        step, kept = self.limits.preallocate_bytes, self.limits.disk_reserve_bytes
        return step > 0 and self.disk.free_bytes(self.folder) >= step + kept

    def _as_full(self, error: OSError) -> Exception:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return DiskFull(f"the disk of {self.folder} is full")
        if error.errno in TOO_MANY_FILES:
            return Overloaded("too many files are open for a new segment", retry_after_ms=1_000)
        return error

    def prepare_next(self) -> None:
        """Create the next segment's file ahead, so that rolling costs one rename."""
        path = f"{self.folder}/{PREPARED_NAME}"
        if PREPARED_NAME in self.disk.list_folder(self.folder) or not self._has_room_ahead():
            return
        file = self.disk.open(path, create=True)
        try:
            file.reserve(self.limits.preallocate_bytes)
            file.sync()
        except OSError:
            self.disk.remove(path)
        finally:
            file.close()

    # --- finding and reading -----------------------------------------------------------------

    def plan(
        self, topic: int, offset: int, *, bytes_max: int, hint: Segment | None = None,
        end_offset: int | None = None,
    ) -> Span | None:  # fmt: skip
        """Return the span that holds `offset` of `topic`, or what follows it; None at the end.

        `hint` is the segment of the reader's last span: where to begin to look. No entry is in it
        that begins at `end_offset` or after it, unless it is the first.
        """
        for segment in self._segments_from(topic, offset, hint):
            for rows in segment.rows_of(topic):
                number = rows.first_after_offset(offset)
                if number < rows.count:
                    return span_of(segment, rows, number, bytes_max, end_offset)
        return None

    def plan_carried(
        self, topic: int, offset: int, *, end_offset: int, bytes_max: int
    ) -> Span | None:
        """Return the span of carried messages that holds `offset`, or what follows it.

        For what is below the first offset of a topic. There may be holes between its rows; no
        row of it begins at `end_offset` or after it.
        """
        rows = self.carried.rows_from(topic, offset)
        for row in rows:
            if row.base_offset >= end_offset:
                return None
            if (body := self._carried_body(topic, row)) is not None:
                return carried_span(
                    topic, row, rows, body, bytes_max=bytes_max, end_offset=end_offset
                )
        return None

    def forget_missing_carried(self) -> None:
        """Forget the carried messages whose entry a repair has given up."""
        for number, carried in list(self.carried.by_topic.items()):
            one_of = {row.index: row for row in carried}
            missing = {
                index for index, row in one_of.items() if self._carried_body(number, row) is None
            }
            if missing:
                self.carried.remove(number, [row for row in carried if row.index in missing])

    def _carried_body(self, topic: int, row: CarriedRow) -> tuple[Segment, int] | None:
        """Return where the body of a CARRIED entry is; None when a repair gave it up."""
        number = bisect_right(self.segments, row.index, key=lambda s: s.first_index) - 1
        if number < 0:
            return None
        segment = self.segments[number]
        delta = row.index - segment.first_index
        for rows in segment.rows_of(topic + CARRIED_TOPIC):
            at = rows.first_after_index(delta - 1)
            if at < rows.count and rows.row(at).index_delta == delta:
                return segment, rows.row(at).position + HEADER_BYTES
        return None

    def entries(
        self, topic: int, offset: int, *, end_offset: int, limit: int
    ) -> list[tuple[int, int, int, int, int]]:  # fmt: skip
        """Return (base offset, count, index, time, bytes) of entries, from the one with `offset`.

        At most `limit`, and none that begins at `end_offset` or after it. Nothing is read but rows.
        """
        found: list[tuple[int, int, int, int, int]] = []
        for segment in self._segments_from(topic, offset, None):
            for rows in segment.rows_of(topic):
                for number in range(rows.first_after_offset(offset), rows.count):
                    row = rows.row(number)
                    if row.base_offset >= end_offset or len(found) >= limit:
                        return found
                    index = segment.first_index + row.index_delta
                    found.append((row.base_offset, row.count, index, row.time_ms, row.length))
        return found

    def read(self, span: Span, *, wait: bool) -> Buffer | None:
        """Return the span's entries, verified; None when that needs the disk and not `wait`."""
        file = span.segment.file
        read = file.read if wait else file.read_now
        buffer = read(span.position, span.length)
        return None if buffer is None else verified(span, buffer)

    def offset_from_time(
        self, topic: int, time_ms: int, *, hint: Segment | None = None
    ) -> int | None:
        """Return the offset of the first message published at or after `time_ms`.

        `hint`: a segment before which it is not, where to begin to look.
        """
        segments = self.segments if hint is None else self._segments_from(topic, 0, hint)
        for segment in segments:
            for rows in segment.rows_of(topic):
                number = rows.first_from_time(time_ms)
                if number < rows.count:
                    return rows.row(number).base_offset
        return None

    def offset_after_index(self, topic: int, index: int) -> int | None:
        """Return the offset of the first message whose event id is greater than `index`."""
        for segment in self.segments:
            if segment.next_index <= index + 1:
                continue
            for rows in segment.rows_of(topic):
                number = rows.first_after_index(index - segment.first_index)
                if number < rows.count:
                    return rows.row(number).base_offset
        return None

    def _segments_from(self, topic: int, offset: int, hint: Segment | None) -> Sequence[Segment]:
        if hint is not None:
            start = bisect_right(self.segments, hint.first_index, key=lambda s: s.first_index) - 1
            return self.segments[max(start, 0) :]
        first = len(self.segments)
        for number in range(len(self.segments) - 1, -1, -1):
            rows = next(self.segments[number].rows_of(topic), None)
            if rows is not None:
                first = number
                if rows.row(0).base_offset <= offset:
                    break
        return self.segments[first:]

    # --- keeping house -----------------------------------------------------------------------

    def unsealed(self) -> Segment | None:
        """Return the oldest segment that is no longer written and has no index file yet."""
        return next((s for s in self.segments[:-1] if s.sealed is None), None)

    def seal(self, segment: Segment) -> RowsFile:
        """Build the index file of a segment that is full. In a thread; then call `sealed`."""
        write_rows(
            self.disk,
            segment.index_path,
            first_index=segment.first_index,
            sources=segment.sources(),
            index_count=segment.next_index - segment.first_index,
        )
        self.disk.sync_folder(self.folder)
        return RowsFile.open(self.disk, segment.index_path)

    def sealed(self, segment: Segment, rows: RowsFile) -> None:
        """Use the index file from now on."""
        segment.sealed = rows
        segment.runs = []
        segment.new = NewRows(segment.first_index)
        self.remove_runs(segment, kept=())

    def write_runs(self, segment: Segment, plan: Sequence[Run]) -> list[RowsFile]:
        """Write the runs that are not files yet, or are to be merged. In a thread."""
        for run in plan:
            if not run.is_written:
                write_rows(
                    self.disk, run.path, first_index=segment.first_index, sources=run.sources
                )
        files = [RowsFile.open(self.disk, run.path) for run in plan if not run.is_written]
        kept = [one for run in plan if run.is_written for one in run.sources]
        return [*cast(list[RowsFile], kept), *files]

    def remove_runs(self, segment: Segment, *, kept: Sequence[str]) -> None:
        """Remove the runs of a segment except those that the newest checkpoint names (`kept`).

        All others: a life that ended before its checkpoint may have left some that nobody knows.
        """
        runs = segment.index_path.rsplit("/", 1)[-1] + ".run-"
        for name in self.disk.list_folder(self.folder):
            if name.startswith(runs) and name not in kept:
                self.disk.remove(f"{self.folder}/{name}")

    def drop(self, segments: Sequence[Segment]) -> None:
        """Forget whole segments, oldest first: nothing finds them any more."""
        for segment in segments:
            self.segments.remove(segment)

    def remove_files(self, segments: Sequence[Segment]) -> None:
        """Remove dropped segments, oldest first. In a thread, with a checkpoint made before."""
        for segment in segments:
            self.disk.remove(segment.index_path)
            self.disk.remove(segment.path)
        self.disk.sync_folder(self.folder)

    def replace(self, old: Segment, new: Segment) -> None:
        """Use a segment that was written again with less in it."""
        self.segments[self.segments.index(old)] = new

    def close(self) -> None:
        """Close all files: no descriptor and no mapping is left."""
        for segment in self.segments:
            segment.close()
            segment.close_rows()


def _continues(entry: Entry, *, index: int, crc: int) -> bool:
    """Return True if an entry can stand after the one before `index`, whose checksum is `crc`."""
    return (
        entry.index == index
        and entry.previous_crc == crc
        and entry.kind != Kind.GAP
        # Nothing vouches for itself: recovery could not believe it.
        and entry.synced_index < index
    )
