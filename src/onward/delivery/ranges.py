"""Sets of offsets as ranges: what delivery is made of.

    [0, 1000)              one range stands for a thousand offsets
    [0, 40) [41, 1000)     one offset of them is missing

A range is half-open. `Ranges` keeps its ranges sorted, apart from each other and merged where they
touch, in two parallel lists: searching is a bisection, and what is whole stays one pair of numbers
however long it is. A range that is empty or reversed holds nothing and is ignored.

Nothing here loops over offsets, except where it says so.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import Final

Range = tuple[int, int]

# From this many ranges on, merging two sorted lists is cheaper than inserting one by one.
_REBUILD_FROM: Final = 64


class Ranges:
    """A set of offsets, kept as sorted ranges that do not touch.

    >>> ranges = Ranges([(0, 10), (20, 30)])
    >>> ranges.add(10, 20)
    >>> ranges.remove(4, 5)
    >>> ranges, ranges.count
    (Ranges([(0, 4), (5, 30)]), 29)
    """

    __slots__ = ("count", "ends", "starts")

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.count = 0
        for start, end in ranges:
            self.add(start, end)

    @property
    def first(self) -> int | None:
        """The lowest offset, or None when there is none."""
        return self.starts[0] if self.starts else None

    @property
    def end(self) -> int | None:
        """The highest offset + 1, or None when there is none."""
        return self.ends[-1] if self.ends else None

    def add(self, start: int, end: int) -> None:
        """Put [start, end) in."""
        if start >= end:
            return
        starts, ends = self.starts, self.ends
        if not ends or start > ends[-1]:
            starts.append(start)
            ends.append(end)
            self.count += end - start
            return
        low = bisect_left(ends, start)
        high = bisect_right(starts, end, lo=low)
        # What it overlaps or touches becomes one range with it.
        if low < high:
            start, end = min(start, starts[low]), max(end, ends[high - 1])
        self._replace(low, high, [start], [end])

    def remove(self, start: int, end: int) -> None:
        """Take [start, end) out; what is not in is not missed."""
        starts, ends = self.starts, self.ends
        if start >= end or not starts:
            return
        low = bisect_right(ends, start)
        high = bisect_left(starts, end, lo=low)
        if low == high:
            return
        kept_starts, kept_ends = [], []
        if starts[low] < start:
            kept_starts.append(starts[low])
            kept_ends.append(start)
        if end < ends[high - 1]:
            kept_starts.append(end)
            kept_ends.append(ends[high - 1])
        self._replace(low, high, kept_starts, kept_ends)

    def discard(self, offset: int) -> bool:
        """Take one offset out; tell whether it was in.

        >>> ranges = Ranges([(0, 3)])
        >>> ranges.discard(1), ranges.discard(1), ranges
        (True, False, Ranges([(0, 1), (2, 3)]))
        """
        starts, ends = self.starts, self.ends
        at = bisect_right(starts, offset) - 1
        if at < 0 or offset >= ends[at]:
            return False
        self.count -= 1
        if starts[at] == offset:
            starts[at] = offset + 1
            if ends[at] == offset + 1:
                del starts[at], ends[at]
        elif ends[at] == offset + 1:
            ends[at] = offset
        else:
            starts.insert(at + 1, offset + 1)
            ends.insert(at, offset)
        return True

    def update(self, ranges: list[Range]) -> None:
        """Put many ranges in; many at once are merged in one walk."""
        if len(ranges) < _REBUILD_FROM or len(ranges) * _REBUILD_FROM < len(self):
            for start, end in ranges:
                self.add(start, end)
            return
        whole = merged([*self, *ranges])
        self.starts = [start for start, _ in whole]
        self.ends = [end for _, end in whole]
        self.count = count_of(whole)

    def take(self, limit: int) -> list[Range]:
        """Remove and return the lowest `limit` offsets.

        >>> Ranges([(0, 4), (10, 20)]).take(6)
        [(0, 4), (10, 12)]
        """
        starts, ends = self.starts, self.ends
        taken: list[Range] = []
        left = min(limit, self.count)
        whole = 0
        while left > 0:
            start, end = starts[whole], ends[whole]
            if end - start > left:
                end = starts[whole] = start + left
            else:
                whole += 1
            taken.append((start, end))
            self.count -= end - start
            left -= end - start
        del starts[:whole], ends[:whole]
        return taken

    def overlap(self, start: int, end: int) -> list[Range]:
        """Return what of [start, end) is in."""
        return list(self.walk(start, end))

    def walk(self, start: int, end: int) -> Iterator[Range]:
        """Go over what of [start, end) is in; nothing may change meanwhile."""
        starts, ends = self.starts, self.ends
        if start >= end:
            return
        for at in range(bisect_right(ends, start), len(starts)):
            if starts[at] >= end:
                return
            yield max(start, starts[at]), min(end, ends[at])

    def gaps(self, start: int, end: int) -> list[Range]:
        """Return what of [start, end) is not in.

        >>> Ranges([(2, 4)]).gaps(0, 6)
        [(0, 2), (4, 6)]
        """
        found: list[Range] = []
        for inner_start, inner_end in self.walk(start, end):
            if start < inner_start:
                found.append((start, inner_start))
            start = inner_end
        if start < end:
            found.append((start, end))
        return found

    def covers(self, start: int, end: int) -> bool:
        """Tell whether all of [start, end) is in; nothing at all always is."""
        if start >= end:
            return True
        at = bisect_right(self.starts, start) - 1
        return at >= 0 and end <= self.ends[at]

    def copy(self) -> Ranges:
        """Return another set with the same offsets."""
        other = Ranges()
        other.starts, other.ends, other.count = self.starts.copy(), self.ends.copy(), self.count
        return other

    def clear(self) -> None:
        """Take everything out."""
        self.starts.clear()
        self.ends.clear()
        self.count = 0

    def _replace(self, low: int, high: int, starts: list[int], ends: list[int]) -> None:
        old_starts, old_ends = self.starts, self.ends
        if high - low == 1:
            self.count -= old_ends[low] - old_starts[low]
        elif low < high:
            self.count -= sum(old_ends[low:high]) - sum(old_starts[low:high])
        self.count += sum(ends) - sum(starts)
        old_starts[low:high] = starts
        old_ends[low:high] = ends

    def __contains__(self, offset: int) -> bool:
        at = bisect_right(self.starts, offset) - 1
        return at >= 0 and offset < self.ends[at]

    def __iter__(self) -> Iterator[Range]:
        return zip(self.starts, self.ends, strict=True)

    def __bool__(self) -> bool:
        return bool(self.starts)

    def __len__(self) -> int:
        return len(self.starts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ranges):
            return NotImplemented
        return self.starts == other.starts and self.ends == other.ends

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Ranges({list(self)})"


def ranges_of(offsets: Iterable[int]) -> list[Range]:
    """Return offsets, in any order and perhaps repeated, as ranges in order; loops over them.

    >>> ranges_of([7, 3, 4, 5, 4])
    [(3, 6), (7, 8)]
    """
    found: list[Range] = []
    start = end = -1
    for offset in sorted(offsets):
        if offset == end:
            end += 1
        elif offset > end:
            if start < end:
                found.append((start, end))
            start, end = offset, offset + 1
    if start < end:
        found.append((start, end))
    return found


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Return ranges, in any order and perhaps overlapping, as few ranges in order.

    >>> merged([(5, 9), (0, 3), (3, 6)])
    [(0, 9)]
    """
    found: list[Range] = []
    for start, end in sorted(ranges):
        if start >= end:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def offsets_of(ranges: Iterable[Range]) -> Iterator[int]:
    """Go over the offsets of ranges, one by one.

    >>> list(offsets_of([(0, 2), (5, 6)]))
    [0, 1, 5]
    """
    for start, end in ranges:
        yield from range(start, end)


def count_of(ranges: Iterable[Range]) -> int:
    """Return how many offsets ranges hold that do not overlap.

    >>> count_of([(0, 2), (5, 6)])
    3
    """
    return sum(max(0, end - start) for start, end in ranges)


def without(ranges: Iterable[Range], holes: Ranges) -> list[Range]:
    """Return ranges without what is in `holes`.

    >>> without([(0, 4), (6, 8)], Ranges([(1, 2), (6, 8)]))
    [(0, 1), (2, 4)]
    """
    if not holes:
        return [(start, end) for start, end in ranges if start < end]
    return [gap for start, end in ranges for gap in holes.gaps(start, end)]
