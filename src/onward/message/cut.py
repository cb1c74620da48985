"""Entries with only what is wanted of them: few messages out of much that was stored together.

    entry wanted by half or more, or small     kept as it is
    else, of its batches
        not wanted at all                      left out: only headers are looked at
        wanted by half or more, or small       kept as it is
        wanted in part                         only the wanted messages, as a batch of their own

What remains is again whole entries, in order: where something is left out between two messages,
one entry becomes two. A cut entry keeps its index, time and topic, a cut batch its producer,
sequence and time. So the result may hold more messages than are wanted, never fewer, and is not
much larger than they are. A batch whose inside is wrong is kept: its reader says what is wrong.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from operator import itemgetter
from struct import Struct
from typing import Final, NamedTuple

from onward.errors import Corruption, OnwardError
from onward.message.batch import (
    BATCH_BYTES_MIN,
    RAW_BYTES_MAX,
    Batch,
    decode_batch,
    join_columns,
)
from onward.message.columns import ABSENT, Column, lengths_of
from onward.message.entry import Buffer, Draft, Entry, Kind, encode_entry, entry_heads

Range = tuple[int, int]

ENTRY_BYTES_SMALL: Final = 16 * 1024
BATCH_BYTES_SMALL: Final = 1024

_WIDTHS: Final = {
    Column.DUE_AT_MS: 8, Column.PRIORITIES: 1, Column.REPLACES: 8, Column.SCHEDULE_IDS: 8,
}  # fmt: skip
_KINDS: Final = frozenset(Column)
# Length, count and raw bytes of a batch: it was checked when it came, and walking must be fast.
_unpack_sizes = Struct("<4xI8xII").unpack_from
_end_of = itemgetter(1)


def cut_entries(entries: Buffer, ranges: Sequence[Range]) -> Buffer:
    """Return the entries with only what the ranges need; they are in order and do not overlap.

    >>> from onward.message.batch import encode_batch
    >>> body = b"".join(encode_batch([b"x" * 2000]) for _ in range(100))
    >>> draft = Draft(Kind.MESSAGES, 0, 7, 500, 100, [body])
    >>> parts, length, _ = encode_entry(draft, index=1, term=0, previous_crc=0, synced_index=0)
    >>> cut = cut_entries(b"".join(parts), [(503, 505)])
    >>> length, len(cut), [(entry.base_offset, entry.count) for entry in entry_heads(cut)]
    (206472, 4200, [(503, 2)])
    """
    return Cutter().cut(entries, ranges)


class Cutter:
    """Cuts entries, and remembers the last one, for who asks for one message after another.

    One that `is_exact` leaves out whatever is not wanted, also where that is not worth it.
    """

    def __init__(self, *, is_exact: bool = False) -> None:
        self._is_exact = is_exact
        self._walked: tuple[Entry, list[_Place]] | None = None
        self._opened: tuple[Entry, int, _Columns] | None = None

    def cut(self, entries: Buffer, ranges: Sequence[Range]) -> Buffer:
        """Return the entries with only what the ranges need."""
        view = memoryview(entries)
        kept: list[Buffer] = []
        kept_bytes = 0
        for entry in entry_heads(entries):
            wanted = _overlap(ranges, entry.base_offset, entry.base_offset + entry.count)
            if not wanted:
                continue
            is_small = entry.length < ENTRY_BYTES_SMALL and not self._is_exact
            if is_small or _count(wanted) == entry.count:
                pieces: list[Buffer] = [view[entry.position : entry.end]]
            else:
                pieces = self._cut_entry(view, entry, wanted)
            kept += pieces
            kept_bytes += sum(map(len, pieces))
        return entries if kept_bytes == len(entries) else b"".join(kept)

    def _cut_entry(self, view: memoryview, entry: Entry, wanted: list[Range]) -> list[Buffer]:
        places = self._places(view, entry)
        touched = _touched(places, wanted)
        needed = sum(_bytes_of(place, part) for place, part in touched)
        if 2 * needed >= entry.length and not self._is_exact:
            return [view[entry.position : entry.end]]
        runs: list[_Run] = []
        for place, part in touched:
            for start, count, batch in self._cut_batch(view, entry, place, part):
                if not runs or runs[-1].end != start:
                    runs.append(_Run(start))
                runs[-1].end = start + count
                runs[-1].batches.append(batch)
        return [part for run in runs for part in _entry_of(run, entry)]

    def _cut_batch(
        self, view: memoryview, entry: Entry, place: "_Place", wanted: list[Range]
    ) -> list[tuple[int, int, Buffer]]:
        """Return (first offset, count, batch) of each batch that a batch becomes."""
        at = entry.position + place.position
        whole: list[tuple[int, int, Buffer]] = [
            (place.offset, place.count, view[at : at + place.length])
        ]
        is_small = place.length < BATCH_BYTES_SMALL
        is_worthless = is_small or 2 * _bytes_of(place, wanted) >= place.length
        if _count(wanted) == place.count or (is_worthless and not self._is_exact):
            return whole
        try:
            columns = self._columns(view, entry, place)
            return [
                (start, end - start, columns.cut(start - place.offset, end - place.offset))
                for start, end in wanted
            ]
        except OnwardError:
            return whole

    def _places(self, view: memoryview, entry: Entry) -> list["_Place"]:
        if self._walked is None or not _is_same(self._walked[0], entry):
            self._walked = (entry, _walk(view, entry))
        return self._walked[1]

    def _columns(self, view: memoryview, entry: Entry, place: "_Place") -> "_Columns":
        opened = self._opened
        if opened is None or opened[1] != place.offset or not _is_same(opened[0], entry):
            at = entry.position + place.position
            batch = decode_batch(view, at, raw_bytes_max=RAW_BYTES_MAX, verify=False)
            opened = self._opened = (entry, place.offset, _Columns(batch))
        return opened[2]


class _Place(NamedTuple):
    """Where a batch lies in its entry."""

    offset: int
    count: int  # type: ignore[assignment]
    position: int
    length: int
    bytes_each: float  # what one message costs when it is cut out


class _Run:
    """Batches whose offsets follow each other without a gap."""

    __slots__ = ("batches", "end", "start")

    def __init__(self, start: int) -> None:
        self.start = self.end = start
        self.batches: list[Buffer] = []


class _Columns:
    """The columns of a batch, ready to be cut: where each value begins is counted once."""

    def __init__(self, batch: Batch) -> None:
        self._header = batch.header
        self._fixed: dict[int, memoryview] = {}
        self._varied: dict[int, tuple[memoryview, list[int]]] = {}
        # Kinds that we do not know cannot be cut; who reads a batch skips them, too.
        for kind in _KINDS.intersection(batch.kinds):
            column = batch.column(kind)
            assert column is not None
            if kind in _WIDTHS:
                if len(column) != _WIDTHS[kind] * batch.count:
                    raise Corruption("the size of a column does not fit its count")
                self._fixed[kind] = column
                continue
            lengths = lengths_of(column, count=batch.count).tolist()
            sizes = [0 if size == ABSENT else size for size in lengths]
            starts = list(accumulate(sizes, initial=4 * batch.count))
            if starts[-1] != len(column):
                raise Corruption("the lengths of a column do not add up to its bytes")
            self._varied[kind] = column, starts

    def cut(self, start: int, end: int) -> bytes:
        """Return a batch with only the messages from `start` up to `end`."""
        packed = [(kind, self._cut_column(kind, start, end)) for kind in self._kinds()]
        header = self._header
        stamp = (header.producer_id, header.sequence, header.time_ms)
        return join_columns(packed, 0, end - start, *stamp)

    def _kinds(self) -> list[int]:
        return sorted((*self._fixed, *self._varied))

    def _cut_column(self, kind: int, start: int, end: int) -> tuple[bytes, ...]:
        if kind in self._fixed:
            width = _WIDTHS[Column(kind)]
            return (bytes(self._fixed[kind][width * start : width * end]),)
        column, starts = self._varied[kind]
        return bytes(column[4 * start : 4 * end]), bytes(column[starts[start] : starts[end]])


def _walk(view: memoryview, entry: Entry) -> list[_Place]:
    """Return where each batch of an entry lies."""
    places: list[_Place] = []
    offset, at = entry.base_offset, entry.body_position
    end = entry.body_position + entry.body_bytes
    while at < end:
        if end - at < BATCH_BYTES_MIN:
            raise Corruption(f"the batches of event id {entry.index} do not fill it")
        length, count, raw_bytes = _unpack_sizes(view, at)
        if length < BATCH_BYTES_MIN or at + length > end or not count:
            raise Corruption(f"no batch at byte {at - entry.position} of event id {entry.index}")
        position = at - entry.position
        places.append(_Place(offset, count, position, length, max(raw_bytes, length) / count))
        offset += count
        at += length
    if offset != entry.base_offset + entry.count:
        raise Corruption(f"event id {entry.index} has not as many messages as it says")
    return places


def _touched(places: list[_Place], wanted: list[Range]) -> list[tuple[_Place, list[Range]]]:
    """Return the batches of which something is wanted, with the ranges inside each."""
    touched: list[tuple[_Place, list[Range]]] = []
    for start, end in wanted:
        number = bisect_right(places, start, key=itemgetter(0)) - 1
        while number < len(places) and (place := places[number]).offset < end:
            part = (max(start, place.offset), min(end, place.offset + place.count))
            if touched and touched[-1][0] is place:
                touched[-1][1].append(part)
            else:
                touched.append((place, [part]))
            number += 1
    return touched


def _bytes_of(place: _Place, wanted: list[Range]) -> float:
    """Return about how many bytes the wanted part of a batch has, whole or cut out."""
    return min(place.length, _count(wanted) * place.bytes_each)


def _entry_of(run: _Run, entry: Entry) -> list[Buffer]:
    kind, count = Kind(entry.kind), run.end - run.start
    draft = Draft(kind, entry.time_ms, entry.topic, run.start, count, run.batches)
    parts, _, _ = encode_entry(
        draft,
        index=entry.index,
        term=entry.term,
        previous_crc=entry.previous_crc,
        synced_index=entry.synced_index,
    )
    return parts


def _overlap(ranges: Sequence[Range], start: int, end: int) -> list[Range]:
    found: list[Range] = []
    number = bisect_right(ranges, start, key=_end_of)
    while number < len(ranges) and ranges[number][0] < end:
        found.append((max(start, ranges[number][0]), min(end, ranges[number][1])))
        number += 1
    return found


def _count(ranges: list[Range]) -> int:
    return sum(end - start for start, end in ranges)


def _is_same(one: Entry, other: Entry) -> bool:
    """Whether two headers are of one entry, wherever it was read to."""
    return one[1:] == other[1:]
