"""From granted ranges to a DELIVERY: read the log, cut what is not wanted, send.

What lies in the page cache is read at once, what needs the disk in a thread. A delivery has about
half a mebibyte at most: what does not fit goes back and comes with the next one. What is not stored
any more is skipped, with a row that says so; what is damaged becomes a dead letter, so that it can
be seen and holds nobody up.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from onward.broker.choosing import gone_row
from onward.delivery.ranges import Range, Ranges, count_of, without
from onward.delivery.trace import Trace, short_cause
from onward.errors import Corruption, OnwardError
from onward.log.disk import Buffer
from onward.log.log import Log
from onward.log.segment import Segment
from onward.log.span import Span
from onward.message.cut import Cutter

if TYPE_CHECKING:
    from onward.broker.catalogue import Topic

DELIVERY_BYTES_MAX = 512 << 10
READ_BYTES_MAX = 4 << 20
"""So much is read for one delivery at most, also when little of it is wanted."""
KEPT_BYTES_MAX = 16 << 20
CUT_BYTES_MIN = 16 << 10
RANGES_MAX = 10_000


class Parcel:
    """What was found for some ranges."""

    __slots__ = (
        "bytes", "bytes_max", "damaged", "entries", "gone", "ranges", "read_bytes", "rest",
    )  # fmt: skip

    def __init__(self, bytes_max: int = DELIVERY_BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self.read_bytes = 0
        self.entries: list[Buffer] = []
        self.ranges: list[Range] = []
        self.rest: list[Range] = []
        """What did not fit: for the next delivery."""
        self.gone: list[Range] = []
        self.damaged: list[tuple[Range, str]] = []
        self.bytes = 0

    def rows(self, group: str, topic: str, member: str, *, now_ms: int) -> list[Trace]:
        """Return the rows for what cannot be delivered."""
        rows = [
            Trace(
                did="dead", at_ms=now_ms, group=group, topic=topic, member=member, ranges=(bad,),
                cause=short_cause(cause), attempt=1,
            )
            for bad, cause in self.damaged
        ]  # fmt: skip
        if self.gone:
            rows.append(gone_row(group, topic, self.gone, now_ms=now_ms))
        return rows


class NeedsDisk(Exception):
    """It does not lie in the page cache: ask again where waiting holds nobody up."""


class Packing:
    """Reads ranges of topics as parcels."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._kept: OrderedDict[tuple[Segment, int, int], tuple[Buffer, Cutter]] = OrderedDict()
        """Entries of which little was wanted lately: more of them will be."""
        self._kept_bytes = 0

    def pack(
        self, topic: Topic, ranges: list[Range], *, wait: bool, bytes_max: int = DELIVERY_BYTES_MAX
    ) -> Parcel:
        """Return what is stored of `ranges`; raises `NeedsDisk` unless it may `wait`."""
        parcel = Parcel(bytes_max)
        left = list(reversed(ranges))
        while left:
            if parcel.rest or parcel.bytes >= bytes_max or parcel.read_bytes >= READ_BYTES_MAX:
                parcel.rest += left[::-1]
                break
            self._pack_next(topic, left, parcel, wait=wait)
        return parcel

    def _pack_next(self, topic: Topic, left: list[Range], parcel: Parcel, *, wait: bool) -> None:
        """Read the stretch of the log where the next range begins, for all ranges that it holds."""
        start, end = left.pop()
        room = parcel.bytes_max - parcel.bytes
        is_carried = start < topic.first_offset
        if is_carried:
            if end > topic.first_offset:
                left.append((topic.first_offset, end))
                end = topic.first_offset
            span = self._log.plan_carried(topic.number, start, end_offset=end, bytes_max=room)
        else:
            span = self._log.plan(topic.number, start, bytes_max=room, end_offset=end)
        if span is None or span.first_offset >= end:
            parcel.gone.append((start, end))
            return
        if span.first_offset > start:
            parcel.gone.append((start, span.first_offset))
            start = span.first_offset
        left.append((start, end))
        if len(span.rows) > 1 and end < span.end_offset and span.rows[-1].length > CUT_BYTES_MIN:
            # The last entry would have to be cut: it comes whole with the next delivery.
            span = span.without_last()
            left[-1] = (start, span.end_offset)
            parcel.rest.append((span.end_offset, end))
        wanted = _held(left, span.end_offset)
        if is_carried:
            # What is carried has holes: rows that follow each other need not be neighbours.
            rows = Ranges((row.base_offset, row.end_offset) for row in span.rows)
            parcel.gone += without(wanted, rows)
            wanted = [part for one in wanted for part in rows.overlap(*one)]
        key = (span.segment, span.position, span.length)
        if (kept := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            self._add(parcel, kept[1].cut(kept[0], wanted), wanted)
            return
        try:
            entries = self._log.read(span, wait=wait)
        except Corruption as error:
            self._note_damage(span, wanted, left, parcel, error)
            return
        if entries is None:
            raise NeedsDisk
        parcel.read_bytes += span.length
        self._add(parcel, self._cut(entries, wanted, span), wanted)

    def _add(self, parcel: Parcel, entries: Buffer, wanted: list[Range]) -> None:
        parcel.entries.append(entries)
        parcel.bytes += len(entries)
        parcel.ranges += wanted

    def _cut(self, entries: Buffer, wanted: list[Range], span: Span) -> Buffer:
        """Leave out what is not wanted, where that is worth it."""
        held = span.end_offset - span.first_offset
        if len(entries) < CUT_BYTES_MIN or count_of(wanted) * 2 >= held:
            return entries
        cutter = Cutter()
        self._kept[span.segment, span.position, span.length] = entries, cutter
        self._kept_bytes += len(entries)
        while self._kept_bytes > KEPT_BYTES_MAX:
            _, (oldest, _) = self._kept.popitem(last=False)
            self._kept_bytes -= len(oldest)
        return cutter.cut(entries, wanted)

    def _note_damage(
        self, span: Span, wanted: list[Range], left: list[Range], parcel: Parcel, error: OnwardError
    ) -> None:
        """One damaged entry makes its own messages dead letters; of more, look at each alone."""
        if len(span.rows) == 1:
            parcel.damaged += [(one, str(error)) for one in wanted]
            return
        first_end = span.rows[0].end_offset
        ordered = [piece for one in wanted for piece in _split(one, first_end)]
        alone = [one for one in ordered if one[0] < first_end]
        left += reversed(ordered[len(alone) :])
        careful = Span(span.segment, span.position, span.rows[0].length, span.rows[:1])
        try:
            entries = self._log.read(careful, wait=True)
            assert entries is not None
            parcel.entries.append(entries)
            parcel.bytes += len(entries)
            parcel.ranges += alone
        except Corruption as damage:
            parcel.damaged += [(one, str(damage)) for one in alone]


def _held(left: list[Range], end_offset: int) -> list[Range]:
    """Take from `left` (the next last) what ends below `end_offset`."""
    held: list[Range] = []
    while left and left[-1][0] < end_offset and len(held) < RANGES_MAX:
        start, end = left.pop()
        held.append((start, min(end, end_offset)))
        if end > end_offset:
            left.append((end_offset, end))
    return held


def _split(one: Range, at: int) -> list[Range]:
    start, end = one
    return [one] if end <= at or start >= at else [(start, at), (at, end)]
