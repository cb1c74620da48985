"""Verifying a log: every entry of every segment, and all that is kept beside them.

    entries       checksum, chain, index without holes         (inspect.Walk)
    offsets       without holes in each topic, except behind a gap, where they are gone on purpose
    index files   the rows that the segment's entries give, byte by byte
    checkpoint    readable, and true where it stands in the log
    segments      all there that an index file or the newest checkpoint knows

Whatever a start of the broker would refuse is found, and more: a start does not read everything. A
torn tail and an index file that is not there are not damage: the next start mends them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from onward.log.checkpoint import checkpoint_names, read_checkpoint, read_checkpoints
from onward.log.disk import Disk
from onward.log.index import ROW, NewRows, Piece, Row, RowsFile
from onward.log.inspect import Damage, Lost, Walk
from onward.log.recovery import SCAN_BYTES, is_given_up, is_needed, missing_segments
from onward.log.segment import Segment, segment_name
from onward.message.entry import Entry, Kind


class _Named(msgspec.Struct, frozen=True):
    """What a check wants to know of the body of a created topic."""

    number: int
    name: str


IndexState = Literal["ok", "open", "missing", "wrong", "unchecked"]
"""How an index file is; `unchecked`: it is there, and its segment too damaged to compare."""


@dataclass(slots=True)
class SegmentReport:
    """What a check found in one segment."""

    path: str
    first_index: int
    size: int = 0
    """How long the file is."""
    bytes: int = 0
    """How far it was made sense of."""
    entries: int = 0
    messages: int = 0
    gaps: int = 0
    index: IndexState = "open"
    damages: list[Damage] = field(default_factory=list)
    is_missing: bool = False
    """Whether there is no such file, though the newest checkpoint stands in it."""

    @property
    def is_damaged(self) -> bool:
        """Tell whether something durable is wrong; a torn tail and a missing index are not."""
        is_wrong = self.is_missing or self.index == "wrong"
        return is_wrong or any(d.kind != "torn" for d in self.damages)


@dataclass(frozen=True, slots=True)
class Ending:
    """A newest segment that is missing or cut short: where the log would end without it."""

    name: str
    last_index: int
    """The last index that would be known; whatever came after it would be given again."""
    lost: list[Lost]
    """The offsets after it that its index file knows, if there is one."""


class Check:
    """Verifies a folder. Hold its lock meanwhile, or expect its end to be on the move."""

    def __init__(self, disk: Disk, folder: str) -> None:
        self.folder = folder
        self.walk = Walk(disk, folder)
        self.reports: list[SegmentReport] = []
        self.bad_checkpoints = [
            name
            for name in checkpoint_names(disk, folder)
            if read_checkpoint(disk, f"{folder}/{name}") is None
        ]
        self.problems = [f"{name} is damaged" for name in self.bad_checkpoints]
        """What is wrong beside the segments."""
        self.names: dict[int, str] = {}
        """The names of the topics that were created in this log, by number."""
        self.missing: list[str] = []
        """The names of segments that something knows and that hold nothing any more."""
        self._disk = disk
        self._find_missing()
        self._has_unknown_gap = False
        self._offsets = _Offsets(self.walk.next_index)

    @property
    def beyond_repair(self) -> list[str]:
        """Return the missing segments that cannot be given up.

        Only a checkpoint knows what came before the beginning of what is there.
        """
        if self.walk.checkpoint is not None:
            return []
        names = [_name(segment.path) for segment in self.walk.segments]
        return [one for one in self.missing if not names or one < names[0]]

    @property
    def endings(self) -> list[Ending]:
        """Return what is missing at the end, after a run: nothing tells how far it reached."""
        if not self.walk.segments:
            return []
        newest = self.walk.segments[-1]
        mark = self.walk.mark_in(newest)
        found: list[Ending] = []
        if mark and (newest is self.walk.missing or self.reports[-1].size < mark.position):
            found.append(Ending(_name(newest.path), mark.last_index, []))
        end = self.walk.next_index - 1
        later = [name for name in self.missing if name > _name(newest.path)]
        return found + [Ending(name, end, self._rows_known(name)) for name in later]

    @property
    def bytes(self) -> int:
        """Return how much there is to read."""
        return sum(segment.file.size() for segment in self.walk.segments)

    @property
    def damages(self) -> list[Damage]:
        """Return all that was found in the segments, in the order of the log."""
        return [damage for report in self.reports for damage in report.damages]

    @property
    def topics(self) -> set[int]:
        """Return the numbers of the topics that have messages here."""
        return self._offsets.topics

    @property
    def is_damaged(self) -> bool:
        """Tell whether anything was found that a start of the broker does not mend by itself."""
        return bool(self.problems) or any(report.is_damaged for report in self.reports)

    def run(self, *, advance: Callable[[int], None] = lambda count: None) -> None:
        """Read everything; `advance` is told how many bytes were read."""
        first_index = self.walk.next_index
        for segment in self.walk.segments:
            self.reports.append(self._check_segment(segment, advance))
            segment.new = NewRows(segment.first_index)
            segment.close()
        if first_index > 1 and self.walk.checkpoint is None:
            self.problems.append(
                f"the log begins at index {first_index} and no valid checkpoint tells what came "
                f"before: restore a checkpoint file from a copy"
            )
        elif not self.walk.is_mark_true:
            self.problems.append("the newest checkpoint does not fit the log")
        self.problems += self._offsets.problems

    def _find_missing(self) -> None:
        """Note what a start of the broker would miss: the same rules as in `recovery`."""
        newest = read_checkpoints(self._disk, self.folder)[:1]
        # One look at the folder: a broker may be at work in it.
        names = self._disk.list_folder(self.folder)
        for name in missing_segments(names):
            self.missing.append(name)
            self.problems.append(f"{name} is missing, but its index file is there")
        for checkpoint in newest:
            name = segment_name(checkpoint.segment)
            if is_needed(checkpoint) and name not in names:
                self.missing += [name] if name not in self.missing else []
                self.problems.append(
                    f"{name} is missing, but the newest checkpoint knows what it held, up to index "
                    f"{checkpoint.last_index}"
                )

    def _check_segment(self, segment: Segment, advance: Callable[[int], None]) -> SegmentReport:
        is_missing = segment is self.walk.missing
        report = SegmentReport(
            segment.path, segment.first_index, segment.file.size(), is_missing=is_missing
        )
        files = self._index_files(segment, report)
        told = 0
        for step in self.walk.steps(segment):
            if isinstance(step, Damage):
                self._take_damage(report, step, files)
            else:
                self._take_entry(report, segment, step[0])
                self._take_gap(*step)
                if step[0].kind == Kind.TOPIC_CREATED:
                    named = msgspec.json.decode(step[1], type=_Named)
                    self.names[named.number] = named.name
            if report.bytes - told >= SCAN_BYTES:
                advance(report.bytes - told)
                told = report.bytes
        advance(max(0, segment.file.size() - told))
        if files and not report.damages:
            report.index = "ok" if self._rows_match(segment, files) else "wrong"
        return report

    def _take_entry(self, report: SegmentReport, segment: Segment, entry: Entry) -> None:
        segment.add(entry)
        self._offsets.take(entry)
        report.bytes = entry.end
        report.entries += 1
        report.gaps += entry.kind == Kind.GAP
        report.messages += entry.count if entry.kind == Kind.MESSAGES else 0

    def _take_gap(self, entry: Entry, body: memoryview) -> None:
        if entry.kind != Kind.GAP or is_given_up(body) or self._has_unknown_gap:
            return
        mark = self.walk.checkpoint
        if entry.index > (mark.last_index if mark else 0):
            self._has_unknown_gap = True
            self.problems.append(
                f"a gap that retention left, at index {entry.index}, is after the newest valid "
                f"checkpoint, or there is none: restore a checkpoint file from a copy"
            )

    def _take_damage(
        self, report: SegmentReport, damage: Damage, files: Sequence[RowsFile]
    ) -> None:
        report.damages.append(damage)
        report.bytes = damage.end
        if damage.kind != "damaged":
            return
        sealed = bool(files) and report.index != "open"
        damage.has_rows = sealed or (bool(files) and self._is_below_mark(damage))
        damage.lost = _lost_rows(files, damage)
        self._offsets.take_damage(damage)

    def _is_below_mark(self, damage: Damage) -> bool:
        mark = self.walk.checkpoint
        return mark is not None and damage.end <= mark.position

    # --- index files -------------------------------------------------------------------------

    def _index_files(self, segment: Segment, report: SegmentReport) -> list[RowsFile]:
        """Open what should know the rows: one file of a full segment, the runs of an open one."""
        mark = self.walk.mark_in(segment)
        paths = [segment.index_path]
        if segment is self.walk.segments[-1]:
            paths = [f"{self.folder}/{name}" for name in mark.runs] if mark else []
        else:
            report.index = "missing"
        names = set(self._disk.list_folder(self.folder))
        if not paths or any(_name(path) not in names for path in paths):
            return []
        try:
            files = [RowsFile.open(self._disk, path) for path in paths]
        except (OSError, ValueError):
            report.index = "wrong"
            return []
        if report.index == "missing":
            report.index = "unchecked"
        return files

    def _rows_known(self, name: str) -> list[Lost]:
        """Return the offsets that the index file of a missing segment knows."""
        path = f"{self.folder}/{name.removesuffix('.log')}.idx"
        try:
            file = RowsFile.open(self._disk, path)
        except (OSError, ValueError):
            return []
        pieces = [map(Row._make, ROW.iter_unpack(piece)) for _, piece in file.pieces()]
        with_messages = [[row for row in rows if row.count] for rows in pieces]
        return [_span(rows) for rows in with_messages if rows]

    def _rows_match(self, segment: Segment, files: Sequence[RowsFile]) -> bool:
        """Compare files with the rows of the walk; runs know those below the checkpoint."""
        if segment is not self.walk.segments[-1]:
            expected = {topic: bytes(rows) for topic, rows in segment.new.pieces()}
            return {topic: bytes(rows) for topic, rows in files[0].pieces()} == expected
        mark = self.walk.mark_in(segment)
        end = mark.position if mark else 0
        found: dict[int, bytes] = {}
        for file in files:
            for topic, rows in file.pieces():
                found[topic] = found.get(topic, b"") + bytes(rows)
        below = ((topic, _rows_below(rows, end)) for topic, rows in segment.new.pieces())
        return found == {topic: rows for topic, rows in below if rows}


class _Offsets:
    """Follows the offsets of every topic."""

    def __init__(self, first_index: int) -> None:
        self.problems: list[str] = []
        self._next: dict[int, tuple[int, int]] = {}
        """Topic -> (next offset, index of its last entry)."""
        # What retention dropped before the first index is a gap like any other.
        self._gap_index = first_index - 1
        self._damage: Damage | None = None

    @property
    def topics(self) -> set[int]:
        """Return the numbers of all topics that were seen."""
        return set(self._next)

    def take(self, entry: Entry) -> None:
        """Compare the entry's offsets with those of the entries before."""
        if entry.kind == Kind.GAP:
            self._gap_index = entry.index
        if entry.kind != Kind.MESSAGES:
            return
        expected, last_index = self._next.get(entry.topic, (0, 0))
        self._next[entry.topic] = (entry.base_offset + entry.count, entry.index)
        if entry.base_offset == expected:
            return
        if entry.base_offset < expected or self._gap_index <= last_index:
            self.problems.append(
                f"offsets of topic {entry.topic} jump from {expected} to {entry.base_offset} at "
                f"index {entry.index}"
            )
        elif self._damage and self._damage.first_index > last_index:
            self._damage.lost.append(Lost(entry.topic, expected, entry.base_offset))

    def take_damage(self, damage: Damage) -> None:
        """Holes from here on are explained by the damage, and tell what it took."""
        self._gap_index = damage.next_index - 1
        self._damage = None if damage.has_rows else damage


def _rows_below(rows: Piece, end: int) -> bytes:
    """Return the rows of entries before position `end`; rows are in the order of positions."""
    count = sum(1 for row in ROW.iter_unpack(rows) if row[5] < end)
    return bytes(rows[: count * ROW.size])


def _lost_rows(files: Sequence[RowsFile], damage: Damage) -> list[Lost]:
    """Return the offsets that index files know to lie inside the damage."""
    lost: list[Lost] = []
    for file in files:
        for _, piece in file.pieces():
            rows = map(Row._make, ROW.iter_unpack(piece))
            # By index: of a file that was cut short the bytes do not reach as far as the loss.
            first, end = damage.first_index - file.first_index, damage.next_index - file.first_index
            inside = [row for row in rows if first <= row.index_delta < end and row.count]
            if inside:
                lost.append(_span(inside))
    return lost


def _span(rows: Sequence[Row]) -> Lost:
    return Lost(rows[0].topic, rows[0].base_offset, rows[-1].end_offset)


def _name(path: str) -> str:
    return path.rsplit("/", 1)[-1]
