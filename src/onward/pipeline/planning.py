"""Which offsets go where: pure arithmetic over half-open ranges.

split    the ranges of a batch, over tasks: about equal in rows, each task a few stretches
admit    how far a stream goes in one batch: every topic in proportion to what it has waiting,
         and never none of it, so a busy topic does not starve a quiet one
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

ROWS_MIN = 10_000


class Stretch(NamedTuple):
    """Neighbouring messages of one topic: from `first` to before `end`.

    >>> Stretch("orders", 3, 10).rows
    7
    """

    topic: str
    first: int
    end: int

    @property
    def rows(self) -> int:
        """How many offsets it has."""
        return self.end - self.first


def split(
    stretches: Sequence[Stretch], *, parts: int, rows_min: int = ROWS_MIN
) -> list[list[Stretch]]:
    """Return about `parts` lists of stretches with about as many rows each, in the same order.

    Nothing is cut into pieces of fewer than `rows_min` rows.

    >>> split([Stretch("a", 0, 10), Stretch("b", 5, 7)], parts=3, rows_min=1)
    [[Stretch(topic='a', first=0, end=4)], [Stretch(topic='a', first=4, end=8)], \
[Stretch(topic='a', first=8, end=10), Stretch(topic='b', first=5, end=7)]]
    """
    total = sum(stretch.rows for stretch in stretches)
    room = max(-(-total // max(parts, 1)), rows_min, 1)
    found: list[list[Stretch]] = []
    left = 0
    for topic, first, end in stretches:
        while first < end:
            if not left:
                found.append([])
                left = room
            cut = min(end, first + left)
            found[-1].append(Stretch(topic, first, cut))
            left -= cut - first
            first = cut
    return found


def admit(
    start: Mapping[str, int], head: Mapping[str, int], *, rows_max: int | None
) -> dict[str, int]:
    """Return where each topic stands after a batch of about `rows_max` rows.

    >>> admit({"a": 0, "b": 0}, {"a": 900, "b": 100}, rows_max=100)
    {'a': 90, 'b': 10}
    """
    waiting = {topic: max(0, end - start.get(topic, end)) for topic, end in head.items()}
    total = sum(waiting.values())
    if rows_max is None or total <= rows_max:
        return {topic: max(end, start.get(topic, end)) for topic, end in head.items()}
    return {
        topic: start.get(topic, end) + _part(waiting[topic], total, rows_max)
        for topic, end in head.items()
    }


def _part(waiting: int, total: int, rows_max: int) -> int:
    return max(1, rows_max * waiting // total) if waiting else 0
