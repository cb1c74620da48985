"""Looking ahead: what a group that filters or chooses must know of messages before it grants them.

    ranges ──▶ plan, read ──▶ walk over batches ──▶ wanted    the group gets them
                                                ├─▶ unwanted  its filter does not let them through
                                                └─▶ gone      they are not stored any more

Only the columns that the group's record asks for are unpacked; bodies never are. A look is bounded
in messages, in bytes read and in bytes unpacked: what it did not come to is in `next_ranges`. What
cannot be read or decoded must not stop the group: it counts as wanted, with no key, tenant or
priority, and whoever delivers or receives it finds out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from itertools import groupby, repeat
from typing import Final, NamedTuple

from onward.broker.catalogue import Topic
from onward.broker.deliver import InThread
from onward.delivery.ranges import Range, merged
from onward.delivery.record import GroupRecord
from onward.errors import Corruption, ProtocolError
from onward.log.disk import Buffer
from onward.log.index import Row
from onward.log.log import Log
from onward.log.segment import Segment
from onward.log.span import Span
from onward.message.batch import RAW_BYTES_MAX, Batch, batches_of, decode_batch
from onward.message.entry import Entry, entry_heads

OFFSETS_MAX: Final = 4_096
LOOKS_MAX: Final = 64
"""So many looks one answer is worth, when somebody asks what a group will do."""
ANSWERS_MAX: Final = 2
"""So many answers are looked for at the same time, others wait: members come first, and what was
seen for an answer costs memory until it is given."""
BYTES_MAX: Final = 1 << 20
UNPACKED_BYTES_MAX: Final = 16 << 20
"""A compressed batch is small to read, and may be large to unpack."""
STRETCH_BYTES_MAX: Final = 64 << 10
"""After a stretch of this size others have their turn of the loop."""

_MESSAGE_BYTES: Final = 1_024
_FIRST_BYTES: Final = 4_096
_NOTHING: Final[Range] = (1 << 64, 1 << 64)


class Looked:
    """What a look found. Ranges are in order; the columns stand beside `offsets`.

    A column that the group does not ask for is None; `offsets` is empty when it does not choose.
    """

    __slots__ = (
        "gone", "keys", "next_ranges", "offsets", "priorities", "ranges", "tenants", "unwanted",
    )  # fmt: skip

    def __init__(self, record: GroupRecord) -> None:
        self.ranges: list[Range] = []
        """What the group wants."""
        self.unwanted: list[Range] = []
        """What its filter does not let through."""
        self.gone: list[Range] = []
        """What is not stored any more."""
        self.next_ranges: list[Range] = []
        """What was not looked at."""
        has_keys = record.mode == "ordered" or record.key_rate or record.key_concurrency
        self.offsets: list[int] = []
        self.keys: list[str | None] | None = [] if has_keys else None
        self.tenants: list[str | None] | None = None if record.tenants is None else []
        self.priorities: list[int] | None = [] if record.priorities else None

    def keep(self, rows: list[int]) -> None:
        """Keep only some of what the columns hold."""
        self.offsets = [self.offsets[row] for row in rows]
        if self.keys is not None:
            self.keys = [self.keys[row] for row in rows]
        if self.tenants is not None:
            self.tenants = [self.tenants[row] for row in rows]
        if self.priorities is not None:
            self.priorities = [self.priorities[row] for row in rows]


class LookAhead:
    """Looks into the log for groups that filter or choose."""

    def __init__(self, log: Log, in_thread: InThread) -> None:
        self._log = log
        self._in_thread = in_thread
        self.answers = asyncio.Semaphore(ANSWERS_MAX)
        """To be held by who looks through many messages for somebody who asks."""

    async def look_through(
        self, topic: Topic, ranges: Sequence[Range], record: GroupRecord, *, limit: int
    ) -> AsyncGenerator[Looked]:
        """Look at all of `ranges`, or at what `limit` looks reach; hold `answers` meanwhile."""
        for _ in range(limit):
            if not ranges:
                return
            looked = await self.look(topic, ranges, record)
            yield looked
            ranges = looked.next_ranges

    async def look(self, topic: Topic, ranges: Sequence[Range], record: GroupRecord) -> Looked:
        """Look at messages of a topic: as many of `ranges` as one look may, the lowest first."""
        look = _Look(topic, ranges, record)
        while (span := look.plan(self._log)) is not None:
            try:
                entries = self._log.read(span, wait=False)
                if entries is None:
                    entries = await self._read_from_disk(span)
            except (OSError, Corruption):
                self._note_damage(look, span)
            else:
                look.walk(entries)
            await asyncio.sleep(0)
        return look.end()

    async def _read_from_disk(self, span: Span) -> Buffer:
        entries = await self._in_thread(lambda: self._log.read(span, wait=True))
        assert entries is not None, "a read that may wait returns something, or raises"
        return entries

    def _note_damage(self, look: _Look, span: Span) -> None:
        """Go on entry by entry, so that only what is damaged is wanted without being looked at."""
        if span.segment not in self._log.segments:
            # Retention took the segment away meanwhile: the next plan finds what is left.
            look.hint = None
        elif len(span.rows) > 1:
            look.is_careful = True
        else:
            look.keep_unseen(span.end_offset)


class _Look:
    """One look under way: what is still asked for, and what was found."""

    def __init__(self, topic: Topic, ranges: Sequence[Range], record: GroupRecord) -> None:
        self.hint: Segment | None = None
        self.is_careful = False
        """Something is damaged: one entry at a time."""
        self._topic = topic
        self._filter = record.filter
        self._is_choosy = record.is_choosy
        self._found = Looked(record)
        self._asked = deque(merged(ranges))
        self._later = self._put_off()
        self._bytes_left = BYTES_MAX
        self._unpacked_bytes_left = UNPACKED_BYTES_MAX

    def end(self) -> Looked:
        """Return what was found."""
        self._found.next_ranges = merged((*self._asked, *self._later))
        return self._found

    def plan(self, log: Log) -> Span | None:
        """Return the next stretch to read; None at the end of the look."""
        while self._asked and self._bytes_left > 0 and self._unpacked_bytes_left > 0:
            first = self._asked[0][0]
            if first < self._topic.first_offset:
                span = log.plan_carried(
                    self._topic.number, first, end_offset=self._topic.first_offset,
                    bytes_max=self._bytes_max,
                )  # fmt: skip
                if span is None:
                    self._pass_gone(self._topic.first_offset)
                    continue
            else:
                span = log.plan(
                    self._topic.number, first, bytes_max=self._bytes_max, hint=self.hint
                )
            if span is None:
                # Nothing is stored from here on: it was retained away or removed.
                self._pass_gone(self._asked[-1][1])
                break
            self._pass_gone(span.rows[0].base_offset)
            if rows := self._rows_asked(span):
                if first >= self._topic.first_offset:
                    self.hint = span.segment
                length = rows[-1].position + rows[-1].length - span.position
                self._bytes_left -= length
                return Span(span.segment, span.position, length, rows)
        return None

    @property
    def _bytes_max(self) -> int:
        """A few messages are not worth planning a long stretch for."""
        start, end = self._asked[0]
        wished = _FIRST_BYTES + _MESSAGE_BYTES * (end - start)
        return 0 if self.is_careful else min(self._bytes_left, STRETCH_BYTES_MAX, wished)

    def _rows_asked(self, span: Span) -> list[Row]:
        """Return the first rows of a span, as long as each holds something that is asked for."""
        rows: list[Row] = []
        asked = iter(self._asked)
        start, end = next(asked, _NOTHING)
        for row in span.rows:
            while end <= row.base_offset:
                start, end = next(asked, _NOTHING)
            if start >= row.end_offset:
                break
            rows.append(row)
        return rows

    # --- walking -----------------------------------------------------------------------------

    def walk(self, entries: Buffer) -> None:
        """Look at what is asked for of these entries."""
        for entry in entry_heads(entries):
            self._pass_gone(entry.base_offset)
            end = entry.base_offset + entry.count
            try:
                self._walk_batches(entries, entry, end)
            except ProtocolError:
                self.keep_unseen(end)
            if self._unpacked_bytes_left <= 0:
                return

    def keep_unseen(self, end: int) -> None:
        """Count what is asked for below `end` as wanted, without knowing anything of it."""
        for start, stop in self._take(end):
            self._keep(start, stop, _NO_COLUMNS)

    def _walk_batches(self, entries: Buffer, entry: Entry, end: int) -> None:
        base = entry.base_offset
        first_byte = entry.body_position
        for start, header in batches_of(entries, first_byte, first_byte + entry.body_bytes):
            if not self._asked or self._asked[0][0] >= end or self._unpacked_bytes_left <= 0:
                return
            if self._asked[0][0] < base + header.count:
                self._unpacked_bytes_left -= header.raw_bytes
                self._look_into(entries, start, base=base, end=min(base + header.count, end))
            base += header.count
        # An entry that says it has more messages than its batches hold.
        self.keep_unseen(end)

    def _look_into(self, entries: Buffer, start: int, *, base: int, end: int) -> None:
        """Sort the messages of one batch into wanted and unwanted."""
        try:
            batch = decode_batch(entries, start, raw_bytes_max=RAW_BYTES_MAX, verify=False)
            columns = self._columns(batch)
        except ProtocolError:
            self.keep_unseen(end)
            return
        for first, stop in self._take(end):
            is_whole = stop - first == batch.count
            part = columns if is_whole else columns.cut(first - base, stop - base)
            if self._filter:
                self._sift(first, stop, part)
            else:
                self._keep(first, stop, part)

    def _sift(self, start: int, end: int, part: _Columns) -> None:
        matches = self._filter.matches(part.tags, part.headers, count=end - start)
        if all(matches):
            self._keep(start, end, part)
            return
        at = 0
        for is_wanted, run in groupby(matches):
            stop = at + sum(1 for _ in run)
            if is_wanted:
                self._keep(start + at, start + stop, part.cut(at, stop))
            else:
                _append(self._found.unwanted, start + at, start + stop)
            at = stop

    def _columns(self, batch: Batch) -> _Columns:
        """Unpack the columns that the group asks for, and no others."""
        found, wanted = self._found, self._filter
        return _Columns(
            batch.keys if found.keys is not None else None,
            batch.tenants if found.tenants is not None else None,
            batch.priorities if found.priorities is not None else None,
            batch.tags if wanted.needs_tags else None,
            batch.headers if wanted.needs_headers else None,
        )

    def _keep(self, start: int, end: int, part: _Columns) -> None:
        found, count = self._found, end - start
        _append(found.ranges, start, end)
        if not self._is_choosy:
            return
        found.offsets.extend(range(start, end))
        if found.keys is not None:
            found.keys.extend(part.keys or repeat(None, count))
        if found.tenants is not None:
            found.tenants.extend(part.tenants or repeat(None, count))
        if found.priorities is not None:
            found.priorities.extend(part.priorities or repeat(0, count))

    # --- what is asked for -------------------------------------------------------------------

    def _pass_gone(self, offset: int) -> None:
        """What is asked for before the next thing that is stored is not stored any more."""
        for start, end in self._take(offset):
            _append(self._found.gone, start, end)

    def _take(self, end: int) -> list[Range]:
        """Remove and return what is asked for below `end`."""
        taken: list[Range] = []
        while self._asked and self._asked[0][0] < end:
            start, stop = self._asked.popleft()
            if stop > end:
                self._asked.appendleft((end, stop))
            taken.append((start, min(stop, end)))
        return taken

    def _put_off(self) -> list[Range]:
        """Remove and return what is too much for one look."""
        room = OFFSETS_MAX
        for start, end in self._asked:
            if end - start >= room:
                now = self._take(start + room)
                later, self._asked = list(self._asked), deque(now)
                return later
            room -= end - start
        return []


class _Columns(NamedTuple):
    """The columns of some messages; one that is absent or of no interest is None."""

    keys: list[str | None] | None = None
    tenants: list[str | None] | None = None
    priorities: list[int] | None = None
    tags: list[str | None] | None = None
    headers: list[dict[str, str | bytes] | None] | None = None

    def cut(self, start: int, end: int) -> _Columns:
        """Return the columns of a part of the messages."""
        return _Columns(
            self.keys and self.keys[start:end],
            self.tenants and self.tenants[start:end],
            self.priorities and self.priorities[start:end],
            self.tags and self.tags[start:end],
            self.headers and self.headers[start:end],
        )


_NO_COLUMNS: Final = _Columns()


def _append(ranges: list[Range], start: int, end: int) -> None:
    """Add what follows the last range, as a part of it when they touch."""
    if ranges and ranges[-1][1] == start:
        ranges[-1] = (ranges[-1][0], end)
    else:
        ranges.append((start, end))
