"""Opening a log, after anything.

What is found decides, and the three answers are never mixed:

    zeros to the end                                 the end: space that was taken ahead
    damage in the last segment, and nothing valid
    after it proves that it had been durable         a torn tail: saved aside, then cut
    any other damage                                 corruption: never cut, never served

A torn tail was never acknowledged as durable. It may have valid entries behind it, because a disk
writes in any order when the power goes; but if one of those says, in its `synced index`, that the
damaged place had been on the disk, then it was damaged later, and cutting would destroy the rest.

On a follower the `synced index` tells what was durable at the leader, so nothing behind the
checkpoint is proven by it: damage there is a torn tail. What is cut is copied from the leader
again. The mark `following` in the folder says that this is a follower (`marks`).

Sealed segments below the checkpoint are not scanned: their entries are verified when they are read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from onward.errors import Corruption, Unavailable
from onward.log.checkpoint import Checkpoint, read_checkpoints
from onward.log.disk import Disk, FolderLocked, Unlock, write_all
from onward.log.index import NewRows, RowsFile
from onward.log.log import PREPARED_NAME, Log, LogLimits
from onward.log.marks import FOLLOWING, finish_replacement, has_mark
from onward.log.segment import Segment, segment_name
from onward.message.entry import (
    HEADER_BYTES,
    MAGIC,
    Entry,
    Kind,
    decode_gap,
    read_entry,
    read_header,
)

SCAN_BYTES = 4 << 20
_ZEROS = memoryview(bytes(SCAN_BYTES))
GIVEN_UP = (1).to_bytes(4, "little")
"""The last field of a gap's body when a repair wrote it, in the place of four zeros."""

Apply = Callable[[Entry, memoryview], None]
"""Called for each entry after the checkpoint, with its body."""


class Opened(NamedTuple):
    """A log that is ready, and what opening it found."""

    log: Log
    unlock: Unlock
    state: bytes
    """The state in the checkpoint that was used; empty when there was none."""
    cut_bytes: int
    """Bytes of a torn tail that were saved aside and cut; 0 when it was clean."""
    scanned_bytes: int


def open_log(
    disk: Disk, folder: str, *, limits: LogLimits, load: Callable[[bytes], Apply]
) -> Opened:
    """Open or create the log in `folder` and fold what the checkpoint does not know.

    `load` is given the checkpoint's state (empty bytes: none) and returns what to call for each
    entry after it. Raises `Corruption` when the log must not be used as it is.
    """
    disk.make_folder(folder)
    try:
        unlock = disk.lock(f"{folder}/lock")
    except FolderLocked:
        raise Unavailable(f"folder {folder!r} is in use by another broker") from None
    try:
        return _Opening(disk, folder, limits).run(load, unlock)
    except BaseException:
        unlock()
        raise


class _Opening:
    """One attempt to open a folder."""

    def __init__(self, disk: Disk, folder: str, limits: LogLimits) -> None:
        self.disk = disk
        self.folder = folder
        self.log = Log(disk, folder, limits)
        self.cut_bytes = 0
        self.scanned_bytes = 0
        self._unproven: deque[Entry] = deque()
        """The entries of the tail that no later one proves to have been durable."""

    def run(self, load: Callable[[bytes], Apply], unlock: Unlock) -> Opened:
        finish_replacement(self.disk, self.folder)
        self.log.is_followed = has_mark(self.disk, self.folder, FOLLOWING)
        self._remove_leftovers()
        segments = self._without_unused(list_segments(self.disk, self.folder))
        checkpoint = self._usable_checkpoint(segments)
        apply = load(checkpoint.state if checkpoint else b"")
        if not segments:
            segments = [self._first_segment()]
        self.log.segments = segments
        start = self._open_below(segments, checkpoint)
        self._scan(segments[start:], apply)
        self._make_durable(self.log.tail)
        self.log.synced_index = self.log.next_index - 1
        return Opened(
            self.log, unlock, checkpoint.state if checkpoint else b"", self.cut_bytes,
            self.scanned_bytes,
        )  # fmt: skip

    def _without_unused(self, segments: list[Segment]) -> list[Segment]:
        """Remove files that a roll created and never used, except an aligned one at the end.

        What has an index file was used: if it is empty now, it is damaged, and its readers are
        told.
        """
        names = self.disk.list_folder(self.folder)
        self._require_sealed(names)
        unused = unused_segments(segments, names)
        for segment in unused:
            self.disk.remove(segment.path)
        return [segment for segment in segments if segment not in unused]

    def _require_sealed(self, names: list[str]) -> None:
        """Raise when a segment that has an index file is not there."""
        missing = missing_segments(names)
        if missing:
            raise Corruption(
                f"{self.folder}/{missing[0]} is missing, but its index file is there; nothing will "
                f"be served: restore it from a copy, or run 'onward log check {self.folder}'"
            )

    def _remove_leftovers(self) -> None:
        for name in self.disk.list_folder(self.folder):
            if name.endswith(".tmp") or name == PREPARED_NAME:
                self.disk.remove(f"{self.folder}/{name}")

    def _first_segment(self) -> Segment:
        segment = Segment(self.disk, self.folder, first_index=1)
        segment.create(prepared_path=None)
        self.disk.sync_folder(self.folder)
        return segment

    def _usable_checkpoint(self, segments: list[Segment]) -> Checkpoint | None:
        """Return the newest valid checkpoint; the segment that was open then must be there."""
        firsts = {segment.first_index for segment in segments}
        for checkpoint in read_checkpoints(self.disk, self.folder)[:1]:
            if checkpoint.segment in firsts:
                return checkpoint
            if is_needed(checkpoint):
                raise Corruption(
                    f"{self.folder}/{segment_name(checkpoint.segment)} is missing, but a "
                    f"checkpoint knows what it held, up to index {checkpoint.last_index}; "
                    f"nothing will be served: restore it from a copy, or run 'onward log check "
                    f"{self.folder}'"
                )
        if segments and segments[0].first_index != 1:
            raise Corruption(
                f"the log in {self.folder} begins at index {segments[0].first_index} and no valid "
                f"checkpoint tells what came before: restore a checkpoint file from a copy"
            )
        return None

    def _open_below(self, segments: list[Segment], checkpoint: Checkpoint | None) -> int:
        """Open the segments the checkpoint covers; return the number of the first to scan."""
        if checkpoint is None:
            return 0
        for number, segment in enumerate(segments):
            if segment.first_index == checkpoint.segment:
                self._open_partly(segment, checkpoint)
                return number
            self._open_sealed(segment, segments[number + 1].first_index)
        raise AssertionError("the checkpoint's segment is among the segments")

    def _open_sealed(self, segment: Segment, next_index: int) -> None:
        segment.bytes = segment.file.size()
        segment.next_index = next_index
        try:
            rows = RowsFile.open(self.disk, segment.index_path)
        except (OSError, ValueError):
            rows = self._rebuild(segment)
        if segment.first_index + rows.index_count != next_index:
            raise Corruption(
                f"the segment after {segment.path} is missing: it begins at index "
                f"{segment.first_index + rows.index_count}, the next one there is at {next_index}; "
                f"restore it from a copy, or run 'onward log check {self.folder}'"
            )
        segment.sealed = rows
        segment.last_time_ms = max((s.last_time_ms for s in rows.summaries()), default=0)
        segment.close()

    def _rebuild(self, segment: Segment) -> RowsFile:
        """Build the index file of a sealed segment again."""
        size, index = segment.bytes, segment.next_index
        # What it has to reach is not where it is: an empty file holds none of its entries.
        segment.next_index = segment.first_index
        end = 0
        for entry, body in scan(segment, 0):
            _take(segment, entry, body)
            end = entry.end
        if end != size or segment.next_index != index:
            raise self._corruption(segment, end)
        self.scanned_bytes += size
        segment.bytes, segment.next_index = size, index
        rows = self.log.seal(segment)
        segment.new = NewRows(segment.first_index)
        return rows

    def _open_partly(self, segment: Segment, checkpoint: Checkpoint) -> None:
        """Use the runs that the checkpoint names, or read that part of the segment again."""
        if segment.file.size() < checkpoint.position:
            # What a checkpoint knows was on the disk before it: this is no torn tail.
            raise self._corruption(segment, segment.file.size())
        segment.use_run_numbers_after(checkpoint.runs)
        try:
            runs = [RowsFile.open(self.disk, f"{self.folder}/{n}") for n in checkpoint.runs]
            segment.runs = list(runs)
        except (OSError, ValueError):
            segment.runs = []
            self._rescan(segment, checkpoint)
        segment.bytes = checkpoint.position
        segment.next_index = checkpoint.last_index + 1
        segment.last_time_ms = checkpoint.last_time_ms
        self.log.last_crc = checkpoint.last_crc
        self.log.term = checkpoint.term

    def _rescan(self, segment: Segment, checkpoint: Checkpoint) -> None:
        end = 0
        for entry, body in scan(segment, 0):
            if entry.position >= checkpoint.position:
                break
            _take(segment, entry, body)
            end = entry.end
        if end != checkpoint.position:
            raise self._corruption(segment, end)

    def _scan(self, segments: list[Segment], apply: Apply) -> None:
        """Fold all that came after the checkpoint, and settle how the log ends."""
        for number, segment in enumerate(segments):
            if segment not in self.log.segments:
                continue
            last_time_ms = segments[number - 1].last_time_ms if number else 0
            segment.last_time_ms = max(segment.last_time_ms, last_time_ms)
            self._fold(segment, apply)
            later = segments[number + 1 :]
            self._settle(segment, later)
            if later and later[0].first_index != segment.next_index:
                self._drop_misaligned(segment, later[0])

    def _drop_misaligned(self, segment: Segment, following: Segment) -> None:
        """Forget the empty file of a roll that was given up; anything else is corruption."""
        if used_bytes(following):
            raise self._corruption(segment, segment.bytes)
        self.disk.remove(following.path)
        self.log.segments.remove(following)

    def _fold(self, segment: Segment, apply: Apply) -> None:
        begin = segment.bytes
        self._unproven.clear()
        for entry, body in scan(segment, begin):
            if entry.index != segment.next_index or entry.previous_crc != self.log.last_crc:
                break
            if entry.kind == Kind.GAP and not is_given_up(body):
                raise self._unknown_gap(segment, entry)
            self._note_unproven(entry)
            self.log.last_crc = _take(segment, entry, body)
            self.log.term = entry.term
            apply(entry, body)
        self.scanned_bytes += segment.bytes - begin

    def _note_unproven(self, entry: Entry) -> None:
        if self.log.is_followed:
            # No entry proves anything here, so the first one is all that has to be known.
            if not self._unproven:
                self._unproven.append(entry)
            return
        self._unproven.append(entry)
        while self._unproven[0].index <= entry.synced_index:
            self._unproven.popleft()

    def _settle(self, segment: Segment, later: list[Segment]) -> None:
        """Decide what stands after the last good entry of this segment."""
        rest_bytes = used_bytes(segment) - segment.bytes
        if rest_bytes <= 0:
            return
        is_proven = not self.log.is_followed and _proof_of_damage(segment, segment.bytes)
        if is_proven or any(used_bytes(one) for one in later):
            raise self._corruption(segment, segment.bytes)
        self._cut(segment, rest_bytes)

    def _cut(self, segment: Segment, rest_bytes: int) -> None:
        """Save the torn tail aside, durably, then cut it off."""
        aside = self.disk.open(f"{segment.path}.broken-{segment.bytes}", create=True)
        try:
            for start in range(0, rest_bytes, SCAN_BYTES):
                length = min(SCAN_BYTES, rest_bytes - start)
                write_all(aside, start, segment.file.read(segment.bytes + start, length))
            aside.sync()
        finally:
            aside.close()
        self.disk.sync_folder(self.folder)
        segment.cut(segment.bytes)
        segment.sync()
        self.cut_bytes += rest_bytes

    def _make_durable(self, tail: Segment) -> None:
        """Write the unproven end again, and sync.

        What a killed broker wrote may be in the page cache only. If a sync of it had failed, the
        kernel takes the pages for stored though they are not: a sync alone would prove nothing.
        """
        if self._unproven:
            for start in range(self._unproven[0].position, tail.bytes, SCAN_BYTES):
                length = min(SCAN_BYTES, tail.bytes - start)
                write_all(tail.file, start, tail.file.read(start, length))
        tail.sync()

    def _unknown_gap(self, segment: Segment, entry: Entry) -> Corruption:
        """What retention took is in every checkpoint of its time: only those are missing."""
        return Corruption(
            f"{segment.path} has a gap that retention left, at byte {entry.position} (index "
            f"{entry.index}), and no valid checkpoint tells what stood there; nothing will be "
            f"served, for offsets would be given twice: restore a checkpoint file from a copy"
        )

    def _corruption(self, segment: Segment, position: int) -> Corruption:
        return Corruption(
            f"{segment.path} is damaged at byte {position} (index {segment.next_index}); nothing "
            f"was cut and nothing will be served: run 'onward log check {self.folder}'"
        )


def missing_segments(names: Iterable[str]) -> list[str]:
    """Return the segments in a folder of these names that must be there and are not.

    Retention removes the index file before its segment: the other way round is a loss.

    >>> missing_segments(["1.idx", "2.idx", "2.log"])
    ['1.log']
    """
    there = set(names)
    sealed = {f"{name[:-4]}.log" for name in there if name.endswith(".idx")}
    return sorted(sealed - there)


def unused_segments(segments: list[Segment], names: Iterable[str]) -> list[Segment]:
    """Return the files that a roll created and never used: between others, empty, not sealed."""
    there = set(names)
    return [
        segment
        for segment in segments[1:-1]
        if segment.index_path.rsplit("/", 1)[-1] not in there and used_bytes(segment) == 0
    ]


def is_needed(checkpoint: Checkpoint) -> bool:
    """Tell whether the segment that was open then must be there: it held something before it."""
    return checkpoint.last_index > 0


def list_segments(disk: Disk, folder: str) -> list[Segment]:
    """Return the segments in `folder`, oldest first, without reading them."""
    names = [n for n in disk.list_folder(folder) if n.endswith(".log") and n[:-4].isdigit()]
    return [Segment(disk, folder, first_index=int(name[:-4])) for name in names]


def scan(segment: Segment, start: int) -> Iterator[tuple[Entry, memoryview]]:
    """Walk over valid entries from `start` until there is none; each with its body."""
    position, size = start, segment.file.size()
    buffer = b""
    base = start
    while True:
        entry = read_entry(buffer, position - base, position=base)
        if entry is None:
            wanted = _entry_bytes(segment, position, size)
            if wanted == 0 or (position == base and len(buffer) >= wanted):
                return
            base, buffer = position, segment.file.read(position, max(wanted, SCAN_BYTES))
            entry = read_entry(buffer, 0, position=base)
            if entry is None:
                return
        begin = entry.body_position - base
        yield entry, memoryview(buffer)[begin : begin + entry.body_bytes]
        position = entry.end


def _entry_bytes(segment: Segment, position: int, size: int) -> int:
    """Return the length the header at `position` claims, or 0 when it cannot be one."""
    header = read_header(segment.file.read(position, HEADER_BYTES), 0, position=position)
    return header.length if header is not None and header.end <= size else 0


def _take(segment: Segment, entry: Entry, body: memoryview) -> int:
    """Add a scanned entry to its segment; return the crc that the next one must refer to."""
    segment.add(entry)
    if entry.kind != Kind.GAP:
        return entry.crc
    last_index, last_crc = decode_gap(body)
    segment.next_index = last_index + 1
    return last_crc


def is_given_up(gap: memoryview) -> bool:
    """Tell whether the body of a gap was written by a repair, with consent; else by retention.

    >>> is_given_up(memoryview(bytes(12) + GIVEN_UP)), is_given_up(memoryview(bytes(16)))
    (True, False)
    """
    return gap[12:16] == GIVEN_UP


def used_bytes(segment: Segment) -> int:
    """Return the size without the zeros at its end."""
    end = segment.file.size()
    while end > 0:
        start = max(0, end - SCAN_BYTES)
        unit = segment.file.read(start, end - start)
        # Space that was taken ahead is long: comparing is much faster than searching.
        if unit != _ZEROS[: len(unit)]:
            return start + len(unit.rstrip(b"\0"))
        end = start
    return 0


def _proof_of_damage(segment: Segment, position: int) -> bool:
    """Tell whether a valid entry further on says that `position` had been durable."""
    return any(
        entry.synced_index >= segment.next_index for entry in find_entries(segment, position)
    )


def find_entries(segment: Segment, position: int) -> Iterator[Entry]:
    """Search for valid entries from `position` on, at every place where one could begin."""
    size = segment.file.size()
    start = position
    while start < size:
        unit = segment.file.read(start, SCAN_BYTES)
        at = unit.find(MAGIC)
        while at >= 0:
            place = start + at
            length = 0 if place % 8 else _entry_bytes(segment, place, size)
            if length:
                entry = read_entry(segment.file.read(place, length), 0, position=place)
                if entry is not None:
                    yield entry
            at = unit.find(MAGIC, at + 1)
        start += max(len(unit) - len(MAGIC) + 1, 1) if len(unit) == SCAN_BYTES else len(unit)
        if not unit:
            return
