"""What may go: whole segments at the old end, and what is dead inside the others.

    keep       something in it is still wanted
    drop       the oldest segments, when nothing in them is wanted any more, or the log is too big
    rewrite    a later segment that is mostly dead: live entries are copied, each stretch of dead
               ones becomes one gap entry, so indexes stay dense and the chain of checksums holds

Only sealed segments are looked at, and only those below the last checkpoint: what a segment says
about topics is then known without it. This module decides and copies; when is up to its caller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from onward.errors import Corruption
from onward.log.disk import Disk, write_all
from onward.log.index import ROW, Rows, RowsFile, TopicRows, TopicSummary
from onward.log.log import Log
from onward.log.recovery import scan
from onward.log.segment import Segment
from onward.message.entry import (
    CARRIED_TOPIC,
    Draft,
    Entry,
    Kind,
    decode_gap,
    encode_entry,
    encode_gap,
)

REWRITE_BYTES_MIN = 1 << 20

IsDead = Callable[[TopicSummary], bool]
"""Tells whether nothing that a segment holds of a topic is wanted any more."""


class Keep(NamedTuple):
    """How much of a topic is kept: for how long and how many bytes, 0 for all, and from where."""

    ms: int
    bytes: int
    first_offset: int


class Verdict(NamedTuple):
    """What retention found."""

    drop: list[Segment]
    rewrite: list[Segment]
    held: Segment | None = None
    """The oldest segment that stays, if it would go but for something in it that is needed."""


def judge(
    segments: Sequence[Segment], *, is_dead: IsDead, bytes_max: int, total_bytes: int,
    rewrite_bytes_min: int = REWRITE_BYTES_MIN, is_needed: IsDead = lambda summary: False,
) -> Verdict:  # fmt: skip
    """Say which of the sealed `segments`, oldest first, to drop and which to write again.

    What `is_needed` is never dropped, however big the log is.
    """
    drop: list[Segment] = []
    held: Segment | None = None
    for segment in segments:
        too_big = bool(bytes_max) and total_bytes > bytes_max
        # What is carried holds nothing up: it is carried on.
        topics = [summary for summary in segment.summaries() if 0 < summary.topic < CARRIED_TOPIC]
        needed = {summary.topic for summary in topics if is_needed(summary)}
        if not too_big and not all(s.topic in needed or is_dead(s) for s in topics):
            break
        if needed:
            held = segment
            break
        drop.append(segment)
        total_bytes -= segment.bytes
    rewrite = [
        segment
        for segment in segments[len(drop) :]
        if _dead_bytes(segment, is_dead) >= max(rewrite_bytes_min, segment.bytes // 2)
    ]
    return Verdict(drop, rewrite, held)


def expired(
    segments: Sequence[Segment], keeps: Mapping[int, Keep], *, unfinished: Mapping[int, int],
    now_ms: int,
) -> dict[int, int]:  # fmt: skip
    """Return, by topic, the offset below which its retention keeps nothing. In a thread.

    Only what moves is returned. Of a topic in `unfinished` everything from that offset on stays.
    """
    moved = _too_old_or_large(segments, keeps, now_ms=now_ms)
    for number in moved.keys() & unfinished.keys():
        moved[number] = _end_below(segments, number, min(moved[number], unfinished[number]))
        if moved[number] <= keeps[number].first_offset:
            del moved[number]
    return moved


def _too_old_or_large(
    segments: Sequence[Segment], keeps: Mapping[int, Keep], *, now_ms: int
) -> dict[int, int]:
    """Return the offsets by age and size alone.

    Segments that hold nothing older than the shortest retention are not looked at, unless a topic
    is limited by its size.
    """
    shortest_ms = min((keep.ms for keep in keeps.values() if keep.ms), default=0)
    by_size = any(keep.bytes for keep in keeps.values())
    moved: dict[int, int] = {}
    newer_bytes: dict[int, int] = {}
    # Time never goes back: what a segment holds is no older than the end of the one before it.
    begins_ms = [0, *(segment.last_time_ms for segment in segments)]
    for segment, begin_ms in reversed(list(zip(segments, begins_ms, strict=False))):
        if not by_size and (not shortest_ms or begin_ms >= now_ms - shortest_ms):
            continue
        for summary in segment.summaries():
            keep = keeps.get(summary.topic)
            if keep is None or summary.end_offset <= keep.first_offset:
                continue
            newer = newer_bytes.get(summary.topic, 0)
            newer_bytes[summary.topic] = newer + summary.bytes
            too_old = keep.ms > 0 and summary.last_time_ms < now_ms - keep.ms
            # Only what is not needed to have as much as the topic asks for may go.
            if too_old or 0 < keep.bytes <= newer:
                moved[summary.topic] = max(moved.get(summary.topic, 0), summary.end_offset)
    return moved


def _end_below(segments: Sequence[Segment], topic: int, offset: int) -> int:
    """Return where a segment ends with a topic, at `offset` or before: only whole ones go."""
    found = [one.sealed.summary_of(topic) for one in segments if one.sealed is not None]
    ends = [summary.end_offset for summary in found if summary is not None]
    return max((end for end in ends if end <= offset), default=0)


def old_bytes(source: Rows, keeps: Mapping[int, Keep], *, now_ms: int) -> int:
    """Return about how many bytes of an open segment's rows their topics no longer keep."""
    total = 0
    for topic, piece in source.pieces():
        keep = keeps.get(topic)
        if keep is None or not keep.ms:
            continue
        rows = TopicRows(piece, 0, len(piece) // ROW.size)
        count = rows.first_from_time(now_ms - keep.ms)
        if count:
            # About: neighbours of one topic are about as long as each other.
            summary = source.summary_of(topic) if isinstance(source, RowsFile) else None
            size = summary.bytes if summary else sum(row[6] for row in ROW.iter_unpack(piece))
            total += size * count // rows.count
    return total


def _dead_bytes(segment: Segment, is_dead: IsDead) -> int:
    return sum(s.bytes for s in segment.summaries() if s.topic and is_dead(s))


def rewrite(log: Log, segment: Segment, *, is_dead: IsDead) -> Segment:
    """Write a sealed segment again without its dead entries. In a thread.

    The copy is read back before it takes the segment's place. The index file goes first and comes
    last: a crash in between leaves a segment without one, which is built again at the next start.
    """
    dead = {s.topic for s in segment.summaries() if s.topic and is_dead(s)}
    new = Segment(log.disk, log.folder, first_index=segment.first_index)
    path, new.path = new.path, f"{new.path}.tmp"
    try:
        _copy(log.disk, segment, dead, new.path)
        _read_back(new, segment)
    except BaseException:
        log.disk.remove(new.path)
        raise
    log.disk.remove(segment.index_path)
    log.disk.sync_folder(log.folder)
    log.disk.rename(new.path, path)
    log.disk.sync_folder(log.folder)
    new.path = path
    log.sealed(new, log.seal(new))
    return new


def _copy(disk: Disk, segment: Segment, dead: set[int], path: str) -> None:
    """Write what is alive to `path`, and a gap for each stretch of what is not."""
    disk.remove(path)
    file = disk.open(path, create=True)
    position = end = 0
    first: Entry | None = None
    last = (0, 0)
    try:
        for entry, body in scan(segment, 0):
            end = entry.end
            if entry.topic in dead or entry.kind == Kind.GAP:
                first = first or entry
                last = decode_gap(body) if entry.kind == Kind.GAP else (entry.index, entry.crc)
                continue
            unit = segment.file.read(entry.position, entry.length)
            if first is not None:
                unit, first = _gap(first, *last) + unit, None
            write_all(file, position, unit)
            position += len(unit)
        if end != segment.bytes:
            raise Corruption(f"{segment.path} is damaged at byte {end}: it is kept as it is")
        if first is not None:
            write_all(file, position, _gap(first, *last))
        file.sync()
    finally:
        file.close()


def _read_back(new: Segment, segment: Segment) -> None:
    """Take the entries of the copy; what it does not hold as it should is not given up for it."""
    for entry, body in scan(new, 0):
        new.add(entry)
        new.next_index = decode_gap(body)[0] + 1 if entry.kind == Kind.GAP else entry.index + 1
    if new.next_index != segment.next_index or new.bytes != new.file.size():
        raise Corruption(f"{new.path} is no true copy of {segment.path}, which is kept")
    new.last_time_ms = segment.last_time_ms


def _gap(first: Entry, last_index: int, last_crc: int) -> bytes:
    body = encode_gap(last_index=last_index, last_crc=last_crc)
    draft = Draft(Kind.GAP, first.time_ms, 0, 0, 0, [body])
    buffers, _, _ = encode_entry(
        draft, index=first.index, term=first.term, previous_crc=first.previous_crc,
        synced_index=first.synced_index,
    )  # fmt: skip
    return b"".join(buffers)
