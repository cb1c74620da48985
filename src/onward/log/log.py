"""The log: stage, perform, finish; find and read.

Writing is three steps, because only the middle one may wait for the disk:

    stage(drafts)    the loop's thread gives out indexes and builds the bytes     -> Write
    perform(write)   the storage thread writes, and syncs when asked; or raises `DiskFull`, or
                     `Overloaded` when too many files are open, with the files as they were, and
                     the write is forgotten
    finish(write)    the loop's thread makes the entries findable

One write is under way at a time. A failed sync is never tried again: `DiskFailed` ends the node.
Reading is two steps for the same reason: `plan` finds out what to read, `read` does it, and
every entry's checksum is verified before a byte of it leaves: damage is never served.
"""

from __future__ import annotations

import errno
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from onward.errors import Corruption, DiskFull, Overloaded
from onward.log.carried import Carried, CarriedRow
from onward.log.disk import Buffer, Disk
from onward.log.index import NewRows, Row, RowsFile, TopicRows, write_rows
from onward.log.segment import Run, Segment
from onward.message.entry import (
    CARRIED_TOPIC,
    HEADER_BYTES,
    Draft,
    Entry,
    Kind,
    encode_entries,
    read_entry,
)

# Neighbours this far apart are fetched with one read: copying a little more is cheaper than
# another system call.
GAP_BYTES_MAX = 64 << 10
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
    rolled: bool


class Span(NamedTuple):
    """A stretch of one segment that holds the next entries of a topic."""

    segment: Segment
    position: int
    length: int
    rows: list[Row]

    def without_last(self) -> Span:
        """Return the span without its last entry; it has several."""
        last = self.rows[-2]
        return Span(
            self.segment, self.position, last.position + last.length - self.position, self.rows[:-1]
        )

    @property
    def first_offset(self) -> int:
        """Return the offset of the first message of the span."""
        return self.rows[0].base_offset

    @property
    def end_offset(self) -> int:
        """Return the offset after the last message of the span."""
        return self.rows[-1].end_offset


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
    _written_index: int = 0
    """The last entry that was written: no place of the log is ever written twice."""

    @property
    def tail(self) -> Segment:
        """Return the open segment."""
        return self.segments[-1]

    @property
    def next_index(self) -> int:
        """Return the index that the next entry gets."""
        return self.tail.next_index

    @property
    def bytes(self) -> int:
        """Return the size of all segments."""
        return sum(segment.bytes for segment in self.segments)

    # --- writing -----------------------------------------------------------------------------

    def stage(self, drafts: Sequence[Draft]) -> Write:
        """Give the drafts their indexes and build their bytes. Nothing is written yet."""
        segment, rolled = self._segment_for(drafts)
        position = segment.bytes
        buffers, entries = encode_entries(
            drafts, position=position, index=self.next_index, term=self.term,
            previous_crc=self.last_crc, synced_index=self.synced_index,
        )  # fmt: skip
        length = entries[-1].end - position if entries else 0
        return Write(segment, position, buffers, entries, length, rolled)

    def stage_roll(self) -> Write:
        """Stage the beginning of a new segment, without entries."""
        assert self.tail.bytes, "two segments would have one name"
        segment = Segment(self.disk, self.folder, first_index=self.next_index)
        return Write(segment, 0, [], [], 0, rolled=True)

    def perform(self, write: Write, *, sync: bool) -> None:
        """Write and, when asked, sync. In the storage thread.

        Raises DiskFull or Overloaded with nothing done, or DiskFailed.
        """
        if write.entries and write.entries[0].index <= self._written_index:
            raise RuntimeError("a write was staged before the one in its place was finished")
        try:
            if write.rolled:
                self._roll(write.segment)
            self._write(write)
            if sync:
                write.segment.sync()
        except (DiskFull, Overloaded):
            self._take_back(write)
            raise
        except OSError as error:
            raise DiskFailed(f"{write.segment.path}: {error}") from error
        if write.entries:
            self._written_index = write.entries[-1].index

    def finish(self, write: Write) -> None:
        """Make written entries findable."""
        if write.rolled:
            # Time never goes back, also while the new segment has no entry.
            write.segment.last_time_ms = self.tail.last_time_ms
            self.segments.append(write.segment)
        if write.entries:
            write.segment.add_all(write.entries)
            self.last_crc = write.entries[-1].crc

    def _segment_for(self, drafts: Sequence[Draft]) -> tuple[Segment, bool]:
        length = (HEADER_BYTES + 8) * len(drafts)
        length += sum([len(part) for draft in drafts for part in draft.parts])
        tail = self.tail
        if not tail.bytes or tail.bytes + length <= self.limits.segment_bytes_max:
            return tail, False
        return Segment(self.disk, self.folder, first_index=self.next_index), True

    def _roll(self, segment: Segment) -> None:
        """Seal the tail's bytes and create the next file, both durable before the first entry."""
        tail = self.tail
        tail.cut(tail.bytes)
        tail.sync()
        try:
            prepared = PREPARED_NAME in self.disk.list_folder(self.folder)
            segment.create(prepared_path=f"{self.folder}/{PREPARED_NAME}" if prepared else None)
            self.disk.sync_folder(self.folder)
        except OSError as error:
            raise self._as_full(error) from error

    def _write(self, write: Write) -> None:
        if not write.length:
            return
        end = write.position + write.length
        try:
            if write.segment.needs_reserve(end):
                self._take_room(write, end)
            write.segment.write(write.position, write.buffers, write.length)
        except OSError as error:
            raise self._as_full(error) from error

    def _take_room(self, write: Write, end: int) -> None:
        """Take space ahead; messages may not take the reserve, however fast they come.

        Giving space back needs some itself: what ends a topic is written as long as anything is.
        """
        if self._has_room_ahead():
            write.segment.reserve(end, step=self.limits.preallocate_bytes)
            return
        kept = self.limits.disk_reserve_bytes
        topics = {entry.topic for entry in write.entries if entry.kind == Kind.MESSAGES}
        if topics and topics <= self.system_topics:
            # Acks go on when the disk is full: for them the half of it is enough.
            kept //= 2
        if topics and self.disk.free_bytes(self.folder) < kept + write.length:
            raise DiskFull(f"the disk of {self.folder} is nearly full")

    def _take_back(self, write: Write) -> None:
        """Make it durable that a write came to nothing: its file was cut, or is removed if new.

        Whoever published is about to hear that nothing was stored, and the indexes will be given to
        others: after a power cut what was written would contradict both.
        """
        try:
            if write.rolled:
                write.segment.close()
                self.disk.remove(write.segment.path)
                self._sync_folder_patiently()
            else:
                write.segment.sync()
        except OSError as error:
            raise DiskFailed(f"{write.segment.path}: {error}") from error

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
                    return _span(segment, rows, number, bytes_max, end_offset)
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
                return _carried_span(
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
        return None if buffer is None else _verified(span, buffer)

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


def _span(
    segment: Segment, rows: TopicRows, number: int, bytes_max: int, end_offset: int | None
) -> Span:
    """Gather neighbouring rows until `bytes_max`; always at least one."""
    first = rows.row(number)
    chosen, end = [first], first.position + first.length
    for later in range(number + 1, rows.count):
        row = rows.row(later)
        new_end = row.position + row.length
        if row.position - end > GAP_BYTES_MAX or new_end - first.position > bytes_max:
            break
        if end_offset is not None and row.base_offset >= end_offset:
            break
        chosen.append(row)
        end = new_end
    return Span(segment, first.position, end - first.position, chosen)


def _carried_span(
    topic: int, first: CarriedRow, following: Iterator[CarriedRow], body: tuple[Segment, int],
    *, bytes_max: int, end_offset: int,
) -> Span:  # fmt: skip
    """Gather neighbours inside one CARRIED entry until `bytes_max`; always at least one."""
    segment, start = body
    chosen = [first]
    for row in following:
        last = chosen[-1]
        if (row.index, row.start) != (first.index, last.start + last.length):
            break
        if row.start + row.length - first.start > bytes_max or row.base_offset >= end_offset:
            break
        chosen.append(row)
    delta = first.index - segment.first_index
    rows = [
        Row(
            topic, row.count, row.base_offset, row.time_ms, delta, start + row.start, row.length
        )
        for row in chosen
    ]  # fmt: skip
    position = rows[0].position
    return Span(segment, position, rows[-1].position + rows[-1].length - position, rows)


def _verified(span: Span, buffer: bytes | bytearray) -> Buffer:
    """Return just the entries of the topic, each with its checksum verified."""
    wanted = 0
    for row in span.rows:
        _check_entry(span, row, buffer)
        wanted += row.length
    if wanted == span.length:
        return buffer
    view = memoryview(buffer)
    starts = [row.position - span.position for row in span.rows]
    return b"".join(
        view[start : start + row.length] for start, row in zip(starts, span.rows, strict=True)
    )


def _check_entry(span: Span, row: Row, buffer: bytes | bytearray) -> None:
    entry = read_entry(buffer, row.position - span.position, position=span.position)
    if entry is None or entry.topic != row.topic or entry.kind != Kind.MESSAGES:
        index = span.segment.first_index + row.index_delta
        raise Corruption(
            f"entry {index} at byte {row.position} of {span.segment.path} is damaged: "
            f"run 'onward log check' on this folder"
        )
