"""Looking at a log without using it: every byte of every segment, and what is wrong with it.

`Walk` goes over the entries in order and carries the chain from one segment to the next. Where it
breaks, it says what it found instead, and goes on behind it:

    damaged    what stands there is not what was written, and it had been durable: loss
    trailing   bytes after the last entry of a full segment: nothing is lost with them
    torn       the end of the last segment, never confirmed: the next start saves and cuts it

These are the answers of `recovery`, for the whole log and not only for what a start reads again.
A segment that is missing, though the newest checkpoint stands in it, is walked like an empty one.
`check` adds what is beside the entries, `repair` mends. Nothing here writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from onward.errors import InvalidRequest, Unavailable
from onward.log.checkpoint import Checkpoint, checkpoint_names, read_checkpoints
from onward.log.disk import Disk, File, FolderLocked, Unlock
from onward.log.marks import FOLLOWING, REPLACING, has_mark
from onward.log.memory_disk import MemoryDisk
from onward.log.recovery import (
    find_entries,
    is_needed,
    list_segments,
    scan,
    unused_segments,
    used_bytes,
)
from onward.log.segment import Segment
from onward.message.entry import HEADER_BYTES, Entry, Kind, decode_gap, encode_gap, read_header

GAP_BYTES = HEADER_BYTES + len(encode_gap(last_index=0, last_crc=0))
_ENTRY_BYTES_MIN = HEADER_BYTES + 8
_INDEX_MAX = 2**63


@dataclass(frozen=True, slots=True)
class Lost:
    """Offsets of a topic that are in no entry any more."""

    topic: int
    first_offset: int
    end_offset: int


@dataclass(slots=True)
class Damage:
    """A stretch of a segment that holds no usable entry, and what would stand in its place."""

    kind: Literal["damaged", "trailing", "torn"]
    path: str
    position: int
    end: int
    first_index: int
    next_index: int
    """The index after the last lost one; equal to `first_index` when none is lost."""
    previous_crc: int
    last_crc: int
    """What the entry after the damage refers to."""
    term: int = 0
    time_ms: int = 0
    lost: list[Lost] = field(default_factory=list)
    has_rows: bool = False
    """Whether `lost` is complete, because an index file told it."""

    @property
    def entries(self) -> int:
        """Return how many entries are lost."""
        return self.next_index - self.first_index


Step = tuple[Entry, memoryview] | Damage
"""What a walk finds: an entry with its body, or damage."""


def lock_folder(disk: Disk, folder: str) -> Unlock:
    """Take the lock of a folder with a log in it, so that nobody changes it meanwhile."""
    require_log(disk, folder)
    try:
        return disk.lock(f"{folder}/lock")
    except FolderLocked:
        raise Unavailable(f"folder {folder!r} is in use by a broker: stop it first") from None


def require_log(disk: Disk, folder: str) -> None:
    """Raise `InvalidRequest` when there is no log in `folder`."""
    try:
        found = bool(list_segments(disk, folder) or checkpoint_names(disk, folder))
    except (FileNotFoundError, NotADirectoryError):
        found = False
    if not found:
        raise InvalidRequest(f"there is no log in {folder!r}")
    if has_mark(disk, folder, REPLACING):
        raise Unavailable(
            f"the log in {folder!r} is being replaced by a snapshot: start its broker, which "
            f"finishes that"
        )


class MissingSegment(Segment):
    """A segment that is not there; it is read as if it were empty."""

    @property
    def file(self) -> File:
        """Return a file without bytes."""
        return MemoryDisk().open("empty", create=True)


class Walk:
    """Goes over the entries of a log, from the segment that holds `from_index`."""

    def __init__(self, disk: Disk, folder: str, *, from_index: int = 0) -> None:
        # The checkpoint first: a broker may be at work, and its newest segment only comes later.
        newest = next(iter(read_checkpoints(disk, folder)), None)
        self._is_followed = has_mark(disk, folder, FOLLOWING)
        segments = list_segments(disk, folder)
        self.checkpoint = self._usable(newest, segments)
        self.missing = self._missing(disk, folder, segments)
        """The segment in which the newest checkpoint stands, when it is not there."""
        if self.missing is not None:
            segments = sorted([*segments, self.missing], key=lambda one: one.first_index)
        self._used_bytes = {s.first_index: used_bytes(s) for s in segments}
        self.segments = self._used(segments, disk.list_folder(folder))
        while len(self.segments) > 1 and self.segments[1].first_index <= from_index:
            self.segments.pop(0)
        self.next_index = self.segments[0].first_index if self.segments else 1
        self.last_crc: int | None = 0 if self.next_index == 1 else None
        self.is_mark_true = self.checkpoint is None
        """Whether the log was what the checkpoint says, where it says so."""
        self._term = self._time_ms = 0

    def _usable(self, newest: Checkpoint | None, segments: list[Segment]) -> Checkpoint | None:
        if newest is None or is_needed(newest):
            return newest
        return newest if newest.segment in {one.first_index for one in segments} else None

    def _missing(self, disk: Disk, folder: str, segments: list[Segment]) -> MissingSegment | None:
        if self.checkpoint is None or any(map(self._is_marked, segments)):
            return None
        return MissingSegment(disk, folder, first_index=self.checkpoint.segment)

    def _used(self, segments: list[Segment], names: list[str]) -> list[Segment]:
        """Return the segments that hold something, or should: the same rules as in `recovery`."""
        unused = unused_segments(segments, names)
        if len(segments) > 1 and not self._used_bytes[segments[-1].first_index]:
            unused.append(segments[-1])
        return [one for one in segments if self._is_marked(one) or one not in unused]

    def steps(self, segment: Segment) -> Iterator[Step]:
        """Walk over one segment; the segments must be walked in their order."""
        number = self.segments.index(segment)
        following = self.segments[number + 1] if number + 1 < len(self.segments) else None
        limit = following.first_index if following else _INDEX_MAX
        self.next_index = segment.first_index
        position = 0
        mark = self.mark_in(segment)
        marked_at = mark.position if mark else -1
        if position == marked_at:
            self._compare_mark()
        while True:
            for entry, body in scan(segment, position):
                if entry.index >= limit or not self._fits(entry):
                    break
                yield entry, body
                self._follow(entry, body)
                position = entry.end
                if position == marked_at:
                    self._compare_mark()
            damage = self._damage(segment, position, following)
            if damage is None:
                return
            yield damage
            self.next_index, self.last_crc = damage.next_index, damage.last_crc
            # Behind a gap without bytes it is where it was, and the checkpoint was compared.
            is_new = position < damage.end == marked_at
            position = damage.end
            if is_new:
                self._compare_mark()

    def mark_in(self, segment: Segment) -> Checkpoint | None:
        """Return the checkpoint when it stands in this segment: all before it was durable."""
        return self.checkpoint if self._is_marked(segment) else None

    def _compare_mark(self) -> None:
        mark = self.checkpoint
        assert mark is not None
        chained = self.last_crc is None or self.last_crc == mark.last_crc
        self.is_mark_true = chained and self.next_index == mark.last_index + 1

    def _is_marked(self, segment: Segment) -> bool:
        return self.checkpoint is not None and self.checkpoint.segment == segment.first_index

    def _fits(self, entry: Entry) -> bool:
        chained = self.last_crc is None or entry.previous_crc == self.last_crc
        return chained and entry.index == self.next_index

    def _follow(self, entry: Entry, body: memoryview) -> None:
        self.next_index, self.last_crc = entry.index + 1, entry.crc
        self._term, self._time_ms = entry.term, entry.time_ms
        if entry.kind == Kind.GAP:
            last_index, self.last_crc = decode_gap(body)
            self.next_index = last_index + 1

    def _damage(self, segment: Segment, position: int, following: Segment | None) -> Damage | None:
        """Say what stands at `position`, where no entry fits; None: nothing, as it should be."""
        size, used = segment.file.size(), self._used_bytes[segment.first_index]
        mark = self.mark_in(segment)
        if following is not None:
            if position >= size and self.next_index == following.first_index:
                return None
            return self._next_good(segment, position, following) or self._to_end(
                segment, position, max(size, position), following
            )
        if used <= position and (mark is None or mark.position <= position):
            return None
        if not self._was_durable(segment, position):
            return self._found("torn", segment, position, used, self.next_index, 0)
        return self._next_good(segment, position, None) or self._to_end(
            segment, position, used, None
        )

    def _was_durable(self, segment: Segment, position: int) -> bool:
        mark = self.mark_in(segment)
        if mark is not None and position < mark.position:
            return True
        if self._is_followed:
            # The claims of a follower's entries are those of its leader: see `recovery`.
            return False
        return any(e.synced_index >= self.next_index for e in find_entries(segment, position))

    def _next_good(
        self, segment: Segment, position: int, following: Segment | None
    ) -> Damage | None:
        """Return the damage up to where the log goes on in this segment, if it does."""
        entry = self._next_entry(segment, position, following)
        mark = self.mark_in(segment)
        if mark is not None and self._can_end_at(mark, position, entry):
            end, next_index = mark.position, mark.last_index + 1
            return self._found("damaged", segment, position, end, next_index, mark.last_crc)
        if entry is None:
            return None
        end, index, crc = entry.position, entry.index, entry.previous_crc
        return self._found("damaged", segment, position, end, index, crc)

    def _can_end_at(self, mark: Checkpoint, position: int, entry: Entry | None) -> bool:
        """Tell whether the checkpoint stands inside the damage: what it says must stay true."""
        comes_first = entry is None or mark.position < entry.position
        has_room = mark.position - position >= GAP_BYTES and mark.last_index >= self.next_index
        return comes_first and has_room

    def _next_entry(self, segment: Segment, start: int, following: Segment | None) -> Entry | None:
        """Return the next entry that can be kept: a gap must fit before it, in bytes and indexes.

        A body may hold the bytes of an entry. So where the damaged header says that its entry
        ends is looked at first, and an index that could not be reached in so few bytes last.
        """
        head = read_header(segment.file.read(start, HEADER_BYTES), 0, position=start)
        if head is not None and head.length >= GAP_BYTES:
            after = next(scan(segment, head.end), None)
            if after is not None and after[0].index == self.next_index + 1:
                return after[0]
        limit = following.first_index if following else _INDEX_MAX
        far: Entry | None = None
        for entry in find_entries(segment, start):
            room = entry.position - start
            if room < GAP_BYTES or not self.next_index < entry.index < limit:
                continue
            if entry.index - self.next_index <= room // _ENTRY_BYTES_MIN:
                return entry
            far = far or entry
        return far

    def _to_end(
        self, segment: Segment, position: int, end: int, following: Segment | None
    ) -> Damage:
        """Return the damage up to the end of the segment."""
        if following is None:
            # What proved the damage is too near to be kept: it goes with it.
            proof = [e for e in find_entries(segment, position) if e.index >= self.next_index]
            index, crc = (proof[-1].index + 1, proof[-1].crc) if proof else (self.next_index, 0)
            return self._found("damaged", segment, position, end, index, crc)
        crc = self.last_crc or 0
        if following.first_index > self.next_index:
            crc = self._crc_before(following)
            return self._found("damaged", segment, position, end, following.first_index, crc)
        return self._found("trailing", segment, position, end, self.next_index, crc)

    def _crc_before(self, segment: Segment) -> int:
        """Return the checksum that a segment goes on from; 0 when nothing knows it any more."""
        first = next(scan(segment, 0), None)
        if first is not None:
            return first[0].previous_crc
        # A tail without entries: what is appended next refers to what its checkpoint says.
        mark = self.mark_in(segment)
        return mark.last_crc if mark is not None and mark.position == 0 else 0

    def _found(
        self, kind: Literal["damaged", "trailing", "torn"], segment: Segment, position: int,
        end: int, next_index: int, last_crc: int,
    ) -> Damage:  # fmt: skip
        return Damage(
            kind, segment.path, position, end, self.next_index, next_index,
            self.last_crc or 0, last_crc, self._term, self._time_ms,
        )  # fmt: skip
