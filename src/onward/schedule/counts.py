"""Counts: how many records of a run fall into each step of time, by topic. For the calendar.

Steps are hours. A table that grows over its limit is made coarser: the step doubles, and neighbours
are added up. Records come in the order of time, so only the newest step is still counted; those
before it are rows of three arrays.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from typing import Final

from onward.errors import Corruption
from onward.log.disk import Buffer

HOUR_MS: Final = 3_600_000
COUNTS_MAX: Final = 131_072
_STEP_MS_MAX: Final = 2**50


class Counts:
    """A table of (step, topic, count); the moment of a step is `step * step_ms`.

    >>> counts = Counts()
    >>> counts.add([10, 20, 3_600_000], [0, 0, 1])
    >>> list(counts)
    [(0, 0, 2), (3600000, 1, 1)]
    """

    def __init__(self, *, step_ms: int = HOUR_MS, rows_max: int = COUNTS_MAX) -> None:
        self.step_ms = step_ms
        self._rows_max = rows_max
        self._steps = array("q")
        self._topics = array("I")
        self._counts = array("I")
        self._newest: Counter[tuple[int, int]] = Counter()

    def add(self, at_ms: Sequence[int], topics: Sequence[int]) -> None:
        """Count records; they are sorted by time, and not before those that came already."""
        step_ms = self.step_ms
        newest = self._newest
        steps = [at // step_ms for at in at_ms]
        newest.update(zip(steps, topics, strict=True))
        last = steps[-1]
        # Keys of a counter stay in the order in which they came: the oldest step is first.
        if next(iter(newest))[0] != last:
            self._keep([(step, topic, n) for (step, topic), n in newest.items() if step != last])
            self._newest = Counter({key: n for key, n in newest.items() if key[0] == last})
        while len(self._steps) > self._rows_max and self.step_ms < _STEP_MS_MAX:
            self._coarsen()

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """Walk over (at_ms of the step, topic, count), in the order of time."""
        for step, topic, count in zip(self._steps, self._topics, self._counts, strict=True):
            yield step * self.step_ms, topic, count
        for (step, topic), count in self._newest.items():
            yield step * self.step_ms, topic, count

    def pack(self) -> bytes:
        """Return the section of a run file."""
        self._close()
        return self._steps.tobytes() + self._topics.tobytes() + self._counts.tobytes()

    @classmethod
    def unpack(cls, section: Buffer, *, step_ms: int) -> Counts:
        """Return the table that `pack` packed."""
        rows, rest = divmod(len(section), 16)
        if rest or step_ms < 1:
            raise Corruption(f"{len(section)} bytes are not a table of counts")
        counts = cls(step_ms=step_ms)
        view = memoryview(section)
        counts._steps.frombytes(view[: 8 * rows])
        counts._topics.frombytes(view[8 * rows : 12 * rows])
        counts._counts.frombytes(view[12 * rows :])
        return counts

    def _keep(self, rows: list[tuple[int, int, int]]) -> None:
        if rows:
            steps, topics, counts = zip(*rows, strict=True)
            self._steps.extend(steps)
            self._topics.extend(topics)
            self._counts.extend(counts)

    def _close(self) -> None:
        """Make rows of what is counted."""
        self._keep([(step, topic, count) for (step, topic), count in self._newest.items()])
        self._newest = Counter()

    def _coarsen(self) -> None:
        """Double the step."""
        old = zip(self._steps, self._topics, self._counts, strict=True)
        newest = [(step, topic, count) for (step, topic), count in self._newest.items()]
        self.step_ms *= 2
        self._steps, self._topics, self._counts = array("q"), array("I"), array("I")
        self._newest = Counter()
        for step, rows in groupby(chain(old, newest), key=lambda row: row[0] >> 1):
            self._close()
            for _, topic, count in rows:
                self._newest[(step, topic)] += count
