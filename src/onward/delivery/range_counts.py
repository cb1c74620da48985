"""A number for each offset, kept as ranges: how often messages were delivered uncounted.

    [0, 1000) 1              a batch of a thousand messages was released once
    [0, 40) 1 [40, 60) 2     twenty of them twice

Neighbours with the same number are one range. Offsets without a range have the number 0. Nothing
here loops over offsets.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

Counted = tuple[int, int, int]
"""A range and its number: start, end, count."""


class RangeCounts:
    """Numbers of offsets, as sorted ranges that do not overlap.

    >>> counts = RangeCounts()
    >>> counts.add(0, 10)
    >>> counts.add(4, 6)
    >>> list(counts)
    [(0, 4, 1), (4, 6, 2), (6, 10, 1)]
    """

    __slots__ = ("_rows", "_starts")

    def __init__(self, rows: Iterable[Counted] = ()) -> None:
        self._rows: list[Counted] = sorted(rows)
        self._starts = [row[0] for row in self._rows]

    def __iter__(self) -> Iterator[Counted]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, start: int, end: int) -> None:
        """Add 1 to each offset of [start, end)."""
        if start < end:
            raised = [(low, high, count + 1) for low, high, count in self.spans(start, end)]
            self._replace(start, end, raised)

    def remove(self, start: int, end: int) -> None:
        """Set each offset of [start, end) to 0."""
        if self._rows and start < end:
            self._replace(start, end, [])

    def clear(self) -> None:
        """Set all offsets to 0."""
        self._rows, self._starts = [], []

    def spans(self, start: int, end: int) -> list[Counted]:
        """Return [start, end) without gaps, split where the number changes.

        >>> RangeCounts([(2, 4, 1)]).spans(0, 5)
        [(0, 2, 0), (2, 4, 1), (4, 5, 0)]
        """
        spans: list[Counted] = []
        for low, high, count in self._rows[self._first(start) : bisect_left(self._starts, end)]:
            if start < low:
                spans.append((start, low, 0))
            spans.append((max(start, low), min(end, high), count))
            start = min(end, high)
        if start < end:
            spans.append((start, end, 0))
        return spans

    def _first(self, start: int) -> int:
        """Return the number of the first row that ends after `start`."""
        at = max(0, bisect_right(self._starts, start) - 1)
        return at + (at < len(self._rows) and self._rows[at][1] <= start)

    def _replace(self, start: int, end: int, rows: list[Counted]) -> None:
        """Put rows in the place of [start, end), and merge neighbours with the same number."""
        low, high = self._first(start), bisect_left(self._starts, end)
        replaced = self._rows[low:high]
        if replaced and replaced[0][0] < start:
            rows = [(replaced[0][0], start, replaced[0][2]), *rows]
        if replaced and replaced[-1][1] > end:
            rows = [*rows, (end, replaced[-1][1], replaced[-1][2])]
        # The neighbours outside may continue the first or the last row.
        if low > 0:
            low -= 1
            rows = [self._rows[low], *rows]
        if high < len(self._rows):
            rows = [*rows, self._rows[high]]
            high += 1
        merged: list[Counted] = []
        for row in rows:
            if merged and merged[-1][1:] == (row[0], row[2]):
                merged[-1] = (merged[-1][0], row[1], row[2])
            else:
                merged.append(row)
        self._rows[low:high] = merged
        self._starts[low:high] = [row[0] for row in merged]


def ranges_of_offsets(counts: dict[int, int]) -> list[Counted]:
    """Return numbers by offset as rows: checkpoints of older versions have them so.

    >>> ranges_of_offsets({4: 1, 5: 1, 7: 2})
    [(4, 6, 1), (7, 8, 2)]
    """
    rows: list[Counted] = []
    for offset, count in sorted(counts.items()):
        if rows and rows[-1][1:] == (offset, count):
            rows[-1] = (rows[-1][0], offset + 1, count)
        else:
            rows.append((offset, offset + 1, count))
    return rows
