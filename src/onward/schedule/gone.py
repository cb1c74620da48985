"""Gone: which scheduled messages need not be kept any more.

A message is gone when it has fired (its (at_ms, number) is not after the cursor of its topic) or
when it was cancelled, replaced or moved. It is a fact of one moment: a build or a merge asks the
same `Gone` from beginning to end, and what goes meanwhile is left for the next merge. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from onward.schedule.layout import Key


class Numbers(Protocol):
    """A set of numbers: a `set`, or `Marks` where they are many."""

    def __contains__(self, number: int, /) -> bool: ...
    def __len__(self) -> int: ...


class Gone:
    """Cursors by topic, and the numbers that were cancelled.

    >>> gone = Gone({"orders": (100, 7)}, {9})
    >>> [gone.has(number, 100, "orders") for number in (7, 8, 9)]
    [True, False, True]
    """

    def __init__(self, cursors: Mapping[str, Key] | None = None, cancelled: Numbers = ()) -> None:
        self.cursors = dict(cursors or {})
        self.cancelled = cancelled
        self._latest_ms = max((at_ms for at_ms, _ in self.cursors.values()), default=None)
        self._any_cancelled = len(cancelled) > 0

    def __bool__(self) -> bool:
        return self._any_cancelled or bool(self.cursors)

    def has(self, number: int, at_ms: int, topic: str) -> bool:
        """Say whether this one is gone."""
        cursor = self.cursors.get(topic)
        return (cursor is not None and (at_ms, number) <= cursor) or number in self.cancelled

    def kept(
        self, numbers: Sequence[int], at_ms: Sequence[int], topics: Sequence[str]
    ) -> list[int] | None:
        """Return which rows are not gone, or None when none is.

        >>> Gone({"a": (100, 7)}).kept([6, 7, 8], [100, 100, 100], ["a", "a", "a"])
        [2]
        """
        gone: list[bool] | None = None
        if self._latest_ms is not None and min(at_ms, default=0) <= self._latest_ms:
            gone = list(map(self.has, numbers, at_ms, topics))
        elif self._any_cancelled:
            gone = list(map(self.cancelled.__contains__, numbers))
        if gone is None or True not in gone:
            return None
        return [row for row, is_gone in enumerate(gone) if not is_gone]

    def fired_up_to(self, topics: Sequence[str]) -> Key | None:
        """Return up to where all of these topics have fired; None: one has not at all."""
        cursors = [self.cursors.get(topic) for topic in topics]
        known = [cursor for cursor in cursors if cursor is not None]
        return min(known) if known and len(known) == len(cursors) else None
