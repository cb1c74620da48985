"""Reading a log entry by entry, of all topics and kinds, from an event id on: for followers.

    EntryStream(log, index) ──▶ read ──▶ whole entries, back to back ──▶ read ...

Only entries that are finished, and synced on this disk, are read: what a follower has is never lost
here by a power cut. Bytes are read as they are stored, and the checksum of each entry is verified:
damage is found here, where it can be repaired, and not at a follower. A stream that meets it raises
`Corruption`.

Retention leaves gaps: entries behind which nobody can follow without a copy of the checkpoint. A
stream that meets one raises `OffsetOutOfRange`.
"""

from __future__ import annotations

from bisect import bisect_right

from onward.errors import Corruption, OffsetOutOfRange
from onward.log.disk import Buffer
from onward.log.log import Log
from onward.log.segment import Segment
from onward.message.entry import HEADER_BYTES, Kind, read_entry, read_header

SEARCH_BYTES = 4 << 20


class EntryStream:
    """Reads entries one after another, beginning with the one at `index`."""

    def __init__(self, log: Log, index: int) -> None:
        self._log = log
        self.next_index = index
        """The index of the entry that is read next."""
        self._segment: Segment | None = None
        self._position = 0

    @property
    def has_more(self) -> bool:
        """Return True if an entry can be read now."""
        return self.next_index <= self._last_index

    @property
    def _last_index(self) -> int:
        return min(self._log.next_index - 1, self._log.synced_index)

    def read(self, *, bytes_max: int, wait: bool = True) -> Buffer | None:
        """Return the next entries, at least one; None when that needs the disk and not `wait`.

        Empty at the end of the log. Raises `OffsetOutOfRange` when the entry is not stored any
        more.
        """
        if not self.has_more:
            return b""
        segment = self._find(wait=wait)
        if segment is None:
            return None
        buffer = self._read_from(segment, bytes_max, wait=wait)
        if buffer is None:
            return None
        length = self._whole(buffer, segment)
        return buffer if length == len(buffer) else memoryview(buffer)[:length]

    def _find(self, *, wait: bool) -> Segment | None:
        """Return the segment that holds the next entry, and stand at that entry."""
        segments = self._log.segments
        at = bisect_right(segments, self.next_index, key=lambda one: one.first_index) - 1
        if at < 0:
            raise self._gone()
        segment = segments[at]
        if segment is not self._segment:
            is_first = segment.first_index == self.next_index
            if not is_first and not wait:
                return None
            self._position = 0 if is_first else self._search(segment)
            self._segment = segment
        return segment

    def _search(self, segment: Segment) -> int:
        """Return the position of the next entry in a segment, by walking over the entries."""
        position = 0
        while position < segment.bytes:
            buffer = segment.file.read(position, min(SEARCH_BYTES, segment.bytes - position))
            start = 0
            while (entry := read_header(buffer, start, position=position)) is not None:
                if entry.index == self.next_index:
                    return entry.position
                if entry.index > self.next_index:
                    raise self._gone()
                start += entry.length
            if not start:
                raise self._damaged(segment, position)
            position += start
        # It is in the segment by its index, and behind the last entry: in a gap at the end.
        raise self._gone()

    def _read_from(self, segment: Segment, bytes_max: int, *, wait: bool) -> Buffer | None:
        """Read from where the stream stands, at least one whole entry."""
        read = segment.file.read if wait else segment.file.read_now
        length = min(max(bytes_max, HEADER_BYTES), segment.bytes - self._position)
        buffer = read(self._position, length)
        if buffer is None:
            return None
        head = read_header(buffer, 0, position=self._position)
        if head is None:
            raise self._damaged(segment, self._position)
        return buffer if head.length <= len(buffer) else read(self._position, head.length)

    def _whole(self, buffer: Buffer, segment: Segment) -> int:
        """Return how many bytes of a buffer are whole entries that may be read, and go on there."""
        start, last_index = 0, self._last_index
        while start < len(buffer) and self.next_index <= last_index:
            entry = read_entry(buffer, start, position=self._position)
            if entry is None:
                break
            is_next = entry.index == self.next_index and entry.kind != Kind.GAP
            if not is_next and start:
                break  # told by the next read: what stands before it can be read
            if entry.kind == Kind.GAP:
                raise self._gone()
            if not is_next:
                raise self._damaged(segment, self._position)
            start += entry.length
            self.next_index += 1
        if not start:
            raise self._damaged(segment, self._position)
        self._position += start
        return start

    def _gone(self) -> OffsetOutOfRange:
        return OffsetOutOfRange(f"event {self.next_index} is no longer stored")

    def _damaged(self, segment: Segment, position: int) -> Corruption:
        return Corruption(
            f"no entry {self.next_index} at byte {position} of {segment.path}: "
            f"run 'onward log check' on this folder"
        )
