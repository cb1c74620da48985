"""What may go: whole segments at the old end, and what is dead inside the others.

    keep       something in it is still wanted
    drop       the oldest segments, when nothing in them is wanted any more, or the log is too big
    rewrite    a later segment that is mostly dead: live entries are copied, each stretch of dead
               ones becomes one gap entry, so indexes stay dense and the chain of checksums holds

Only sealed segments are looked at, and only those below the last checkpoint: what a segment says
about topics is then known without it. This module decides and copies; when is up to its caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from onward.errors import Corruption
from onward.log.disk import Disk, write_all
from onward.log.index import TopicSummary
from onward.log.log import Log
from onward.log.recovery import scan
from onward.log.segment import Segment
from onward.message.entry import Draft, Entry, Kind, decode_gap, encode_entry, encode_gap

REWRITE_BYTES_MIN = 1 << 20

IsDead = Callable[[TopicSummary], bool]
"""Tells whether nothing that a segment holds of a topic is wanted any more."""


class Verdict(NamedTuple):
    """What retention found."""

    drop: list[Segment]
    rewrite: list[Segment]


def judge(
    segments: Sequence[Segment], *, is_dead: IsDead, bytes_max: int, total_bytes: int,
    rewrite_bytes_min: int = REWRITE_BYTES_MIN,
) -> Verdict:  # fmt: skip
    """Say which of the sealed `segments`, oldest first, to drop and which to write again."""
    drop: list[Segment] = []
    for segment in segments:
        too_big = bool(bytes_max) and total_bytes > bytes_max
        if not too_big and not all(is_dead(s) for s in segment.summaries() if s.topic):
            break
        drop.append(segment)
        total_bytes -= segment.bytes
    rewrite = [
        segment
        for segment in segments[len(drop) :]
        if _dead_bytes(segment, is_dead) >= max(rewrite_bytes_min, segment.bytes // 2)
    ]
    return Verdict(drop, rewrite)


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
