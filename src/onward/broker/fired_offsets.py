"""Which offsets fired messages got: from schedule ids to places in their topics.

A topic's fired batches stand in the order of (at_ms, number), as their rows do. So the entry of a
row is found by a search through the topic: the index by time tells where to begin, then steps that
double, then halves. Rows are looked for in their order, and an entry is read once for all rows in
it. Of an entry only the heads of its batches and their columns of ids are read: what a row costs
depends neither on the size of the topic nor on that of the messages.

Reads come from the page cache, or else from a thread; others have their turn of the loop in
between. Checksums are over whole entries, so none is verified: damage costs an answer its offset.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from onward.errors import Corruption, ProtocolError
from onward.message.batch import column_place, read_header
from onward.message.columns import Column
from onward.message.entry import HEADER_BYTES
from onward.schedule.order import BEFORE_ALL, Moment
from onward.schedule.state import FIRED

if TYPE_CHECKING:
    from onward.broker.broker import Broker
    from onward.broker.catalogue import Topic
    from onward.broker.deciding import Found
    from onward.log.segment import Segment
    from onward.log.span import Span

HEAD_BYTES = 4_096
"""So much is read at a time; the head of a batch has less."""
BATCH_HEAD_BYTES = 256
LOOKS_PER_TURN = 32
ROWS_PER_LOOK = 512
"""To go through so many ids takes about as long as to look at an entry."""
LOOKS_MAX = 100_000
"""So many entries are looked at for one question; what is not found by then has no offset."""


class _Batch(NamedTuple):
    offset: int
    last: Moment
    ids: memoryview


class _Entry(NamedTuple):
    """An entry, and the fired batches in it."""

    start: int
    end: int
    segment: Segment
    batches: list[_Batch]

    @property
    def last(self) -> Moment:
        """Return up to where the topic has fired with this entry."""
        return self.batches[-1].last if self.batches else BEFORE_ALL


class FiredOffsets:
    """One question: the offsets of some messages that have fired."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._looks = 0
        self._turn = 0
        """What was done since others had their turn of the loop, in looks."""
        self._offsets: dict[int, int] = {}

    async def find(self, found: Iterable[Found]) -> dict[int, int]:
        """Return the offset of each number that has fired, as far as its topic has it."""
        moments: dict[str, list[Moment]] = {}
        for one in found:
            if one.state == "fired" and one.topic:
                moments.setdefault(one.topic, []).append((one.at_ms, one.number))
        for name, some in moments.items():
            topic = self._broker.catalogue.by_name.get(name)
            if topic is not None:
                await self._find_in(topic, sorted(some))
        return self._offsets

    async def _find_in(self, topic: Topic, moments: list[Moment]) -> None:
        """Look for rows of one topic, which ascend."""
        offset, hint, done = topic.first_offset, None, 0
        while done < len(moments) and self._looks < LOOKS_MAX:
            at_ms = moments[done][0]
            from_time = self._broker.log.offset_from_time(topic.number, at_ms, hint=hint)
            if from_time is None:
                return
            entry = await self._search(topic, max(offset, from_time), moments[done], hint)
            if entry is None:
                return
            done = self._take(entry, moments, done)
            await self._yield(sum(len(batch.ids) for batch in entry.batches) // ROWS_PER_LOOK)
            offset, hint = entry.end, entry.segment

    def _take(self, entry: _Entry, moments: list[Moment], done: int) -> int:
        """Note the rows that are in an entry; return how many moments are settled."""
        for batch in entry.batches:
            rows: dict[int, int] | None = None
            while done < len(moments) and moments[done] <= batch.last:
                if rows is None:
                    rows = dict(zip(batch.ids.tolist(), range(len(batch.ids)), strict=True))
                number = moments[done][1]
                if number in rows:
                    self._offsets[number] = batch.offset + rows[number]
                done += 1
        return done

    async def _search(
        self, topic: Topic, low: int, moment: Moment, hint: Segment | None
    ) -> _Entry | None:
        """Return the first entry from `low` on in which rows up to `moment` or later fired."""
        best, high, step = None, topic.next_offset, 1
        is_near = True
        while low < high and self._looks < LOOKS_MAX:
            middle = min(low + step, high) - 1 if is_near else (low + high) // 2
            entry = await self._next_fired(topic, middle, high, hint)
            if entry is None:
                high, is_near = middle, False
            elif entry.last >= moment:
                best, high, is_near = entry, min(middle, entry.start), False
            else:
                low, hint, step = entry.end, entry.segment, max(step * 2, entry.end - entry.start)
        return best

    async def _next_fired(
        self, topic: Topic, offset: int, end: int, hint: Segment | None
    ) -> _Entry | None:
        """Return the first entry with fired batches from `offset` on that begins before `end`."""
        log = self._broker.log
        while offset < end and self._looks < LOOKS_MAX:
            span = log.plan(topic.number, offset, bytes_max=0, hint=hint)
            if span is None or span.first_offset >= end:
                return None
            self._looks += 1
            await self._yield(1)
            try:
                batches = await _Reader(self._broker, span).batches()
            except (OSError, Corruption, ProtocolError):
                batches = []
            if batches:
                return _Entry(span.first_offset, span.end_offset, span.segment, batches)
            offset, hint = span.end_offset, span.segment
        return None

    async def _yield(self, looks: int) -> None:
        """Let others have their turn when enough was done."""
        self._turn += looks
        if self._turn >= LOOKS_PER_TURN:
            self._turn = 0
            await asyncio.sleep(0)


class _Reader:
    """Reads what is wanted of one entry, a piece at a time."""

    def __init__(self, broker: Broker, span: Span) -> None:
        self._broker = broker
        self._span = span
        self._piece: bytes | bytearray = b""
        self._piece_start = 0

    async def batches(self) -> list[_Batch]:
        """Return the fired batches of the entry."""
        row, found = self._span.rows[0], []
        offset, position = row.base_offset, row.position + HEADER_BYTES
        while offset < row.end_offset:
            head = await self._read(position, BATCH_HEAD_BYTES)
            header = read_header(head, 0, row.length)
            place = None
            if header.producer_id == FIRED:
                place = column_place(head, 0, header, Column.SCHEDULE_IDS)
            if place is not None:
                ids = await self._read(position + place.start, place.stop - place.start)
                last = header.time_ms, ids.cast("q")[-1]
                found.append(_Batch(offset, last, ids.cast("q")))
            position += header.length
            offset += header.count
        return found

    async def _read(self, position: int, length: int) -> memoryview:
        """Return bytes of the entry, from the piece that was read last where it has them."""
        end = self._span.position + self._span.length
        length = min(length, end - position)
        start = position - self._piece_start
        if not 0 <= start <= len(self._piece) - length:
            wanted, file = min(max(length, HEAD_BYTES), end - position), self._span.segment.file
            piece = file.read_now(position, wanted)
            if piece is None:
                piece = await self._broker.in_thread(lambda: file.read(position, wanted))
            self._piece, self._piece_start, start = piece, position, 0
        return memoryview(self._piece)[start : start + length]
