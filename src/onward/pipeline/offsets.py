"""Offsets of many messages as ranges: what a job finds in Spark, and asks the broker to do.

A frame of offsets becomes half-open ranges in its tasks, so the driver gets few rows where the
messages stand together, however many they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from onward.errors import Overloaded

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

Range = tuple[int, int]

RANGES_MAX = 10_000_000
_ROWS_AT_ONCE = 65_536


def ranges_of_frame(offsets: DataFrame) -> list[Range]:
    """Return the offsets of a frame with that one column, as ranges in order."""
    # Not mapInArrow: it wants pandas.
    rows = offsets.rdd.mapPartitions(_ranges_of_task).take(RANGES_MAX + 1)
    if len(rows) > RANGES_MAX:
        raise Overloaded(
            f"more than {RANGES_MAX:,} separate messages are too many at once: take a part of them"
        )
    return merged(rows)


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Return ranges in order, with those in one that touch or overlap.

    >>> merged([(5, 7), (0, 2), (2, 3), (6, 9)])
    [(0, 3), (5, 9)]
    """
    found: list[Range] = []
    for first, end in sorted(ranges):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((first, end))
    return found


def parts_of(ranges: Sequence[Range], *, rows_max: int) -> Iterator[list[Range]]:
    """Give the ranges in parts of at most so many offsets; a long one is cut.

    >>> list(parts_of([(0, 5), (7, 8)], rows_max=3))
    [[(0, 3)], [(3, 5), (7, 8)]]
    """
    part: list[Range] = []
    room = rows_max
    for first, end in ranges:
        while first < end:
            cut = min(end, first + room)
            part.append((first, cut))
            room -= cut - first
            first = cut
            if not room:
                yield part
                part, room = [], rows_max
    if part:
        yield part


def ranges_of(offsets: Sequence[int]) -> list[Range]:
    """Return offsets, in any order, as ranges.

    >>> ranges_of([3, 1, 2, 7])
    [(1, 4), (7, 8)]
    """
    if not offsets:
        return []
    ordered = sorted(set(offsets))
    if ordered[-1] - ordered[0] == len(ordered) - 1:
        return [(ordered[0], ordered[-1] + 1)]
    return merged((one, one + 1) for one in ordered)


def _ranges_of_task(rows: Iterable[Row]) -> Iterator[Range]:
    left = iter(rows)
    while some := [row[0] for row in islice(left, _ROWS_AT_ONCE)]:
        yield from ranges_of(some)
