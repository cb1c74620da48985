"""The calendar: how many messages fire when, by minute, hour and day, and by topic. For people.

    now ─── minutes ───┤─── hours ───┤─── days ───┤─── later
                 the nearer the finer; a limit of cells moves the borders towards now

Whoever asks fills one from the rows and counts at hand and reads bars from it. A cell is (topic,
where it begins) and a count; its length follows from where it begins. When there are too many, the
farther half of the finest kind is added up to the next coarser kind. Topics are numbers that the
caller chose; those beyond the limit are counted together, as `OTHERS`. Days are days of UTC.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Final, NamedTuple

from onward.errors import InvalidRequest
from onward.schedule.order import Rows

MINUTE_MS: Final = 60_000
HOUR_MS: Final = 60 * MINUTE_MS
DAY_MS: Final = 24 * HOUR_MS
CELLS_MAX: Final = 65_536
TOPICS_MAX: Final = 10_000
BARS_MAX: Final = 10_000
OTHERS: Final = -1

_LATER: Final = 2**62  # where the cell begins that has no end
_STEPS_MS: Final = (MINUTE_MS, HOUR_MS, DAY_MS)


class Bar(NamedTuple):
    """How many fire from `start_ms` on, until the next bar begins."""

    start_ms: int
    messages: int


class Calendar:
    """Counts of messages by the time at which they fire.

    >>> calendar = Calendar()
    >>> calendar.add(Rows([0, 59_999, 60_000, 130_000], range(4)), 7)
    >>> [bar.messages for bar in calendar.histogram(0, 180_000, step_ms=60_000)]
    [2, 1, 1]
    """

    def __init__(self, *, cells_max: int = CELLS_MAX, topics_max: int = TOPICS_MAX) -> None:
        assert 0 < 4 * topics_max <= cells_max, "each topic must find room"
        self.count = 0
        self._cells: dict[int, Counter[int]] = {}
        self._cells_max = cells_max
        self._cells_total = 0
        self._topics_max = topics_max
        # Where minutes, hours and days end; each border lies where the coarser ones begin.
        self._ends = (_LATER, _LATER, _LATER)

    def add(self, rows: Rows, topics: int | Sequence[int]) -> None:
        """Count rows of one topic, or of a topic for each row."""
        self._add(self._tally(rows, topics).items())

    def add_counts(self, counts: Iterable[tuple[int, int, int]]) -> None:
        """Count what was counted already: (where its step begins, topic, count)."""
        for at_ms, topic, count in counts:
            (start_ms,) = self._starts((at_ms,))
            self._add((((start_ms, topic), count),))

    def remove(self, rows: Rows, topics: int | Sequence[int]) -> None:
        """Count rows no longer; those that were never counted are not missed."""
        for (start_ms, topic), count in self._tally(rows, topics).items():
            name = topic if topic in self._cells else OTHERS
            cells = self._cells.get(name, Counter())
            there = cells.get(start_ms, 0)
            self.count -= min(there, count)
            if there > count:
                cells[start_ms] = there - count
            elif there:
                self._drop_cell(name, start_ms)

    def histogram(
        self, start_ms: int, end_ms: int, *, step_ms: int, topic: int | None = None
    ) -> list[Bar]:
        """Return the bars from the one that holds `start_ms` up to `end_ms`, empty ones too.

        A cell that is longer than a bar counts where it begins.
        """
        if step_ms < MINUTE_MS or step_ms % MINUTE_MS:
            raise InvalidRequest(f"a bar of the calendar is whole minutes long, not {step_ms} ms")
        first_ms = start_ms - start_ms % step_ms
        bars = -(-(end_ms - first_ms) // step_ms)
        if not 0 <= bars <= BARS_MAX:
            raise InvalidRequest(f"the calendar shows 0 to {BARS_MAX} bars, not {bars}")
        counts = [0] * bars
        for _, at_ms, count in self._between(first_ms, first_ms + bars * step_ms, topic):
            counts[(at_ms - first_ms) // step_ms] += count
        return [Bar(first_ms + at * step_ms, count) for at, count in enumerate(counts)]

    def by_topic(self, start_ms: int, end_ms: int) -> dict[int, int]:
        """Return how many fire in [start_ms, end_ms) for each topic, the most first."""
        counts: Counter[int] = Counter()
        for topic, _, count in self._between(start_ms, end_ms, None):
            counts[topic] += count
        return dict(counts.most_common())

    def later(self, topic: int | None = None) -> int:
        """Return how many fire so far from now that they are only counted together."""
        return sum(cells.get(_LATER, 0) for cells in self._chosen(topic).values())

    def _between(
        self, start_ms: int, end_ms: int, topic: int | None
    ) -> Iterator[tuple[int, int, int]]:
        """Go over (topic, at_ms, count) of the cells that begin in a span or reach into it."""
        for one, cells in self._chosen(topic).items():
            for cell_ms, count in cells.items():
                # What fires is never in the past: what a cell holds of it lies in the span.
                at_ms = max(cell_ms, start_ms)
                if at_ms < min(end_ms, _LATER) and at_ms < cell_ms + self._step_ms(cell_ms):
                    yield one, at_ms, count

    def _chosen(self, topic: int | None) -> dict[int, Counter[int]]:
        """Return the cells of one topic, or of all."""
        if topic is None:
            return self._cells
        return {topic: self._cells[topic]} if topic in self._cells else {}

    def _tally(self, rows: Rows, topics: int | Sequence[int]) -> Counter[tuple[int, int]]:
        """Count rows by (where their cell begins, topic)."""
        each = repeat(topics) if isinstance(topics, int) else topics
        assert isinstance(topics, int) or len(topics) == len(rows), "a topic for each row"
        return Counter(zip(self._starts(rows.at_ms), each, strict=False))

    def _starts(self, at_ms: Iterable[int]) -> list[int]:
        """Return where the cell of each moment begins."""
        minutes_end, hours_end, days_end = self._ends
        return [
            at - at % MINUTE_MS
            if at < minutes_end
            else at - at % HOUR_MS
            if at < hours_end
            else at - at % DAY_MS
            if at < days_end
            else _LATER
            for at in at_ms
        ]

    def _step_ms(self, start_ms: int) -> int:
        steps = (step for step, end in zip(_STEPS_MS, self._ends, strict=True) if start_ms < end)
        return next(steps, _LATER)

    def _add(self, tally: Iterable[tuple[tuple[int, int], int]]) -> None:
        for (start_ms, topic), count in tally:
            cells = self._cells_of(topic)
            before = len(cells)
            cells[start_ms] += count
            self._cells_total += len(cells) - before
            self.count += count
        if self._cells_total > self._cells_max:
            # Well below the limit, so that not every later one has to do it again.
            while self._cells_total > self._cells_max * 3 // 4:
                self._coarsen()

    def _cells_of(self, topic: int) -> Counter[int]:
        if topic not in self._cells and len(self._cells) >= self._topics_max:
            topic = OTHERS
        return self._cells.setdefault(topic, Counter())

    def _drop_cell(self, topic: int, start_ms: int) -> None:
        del self._cells[topic][start_ms]
        self._cells_total -= 1
        if not self._cells[topic]:
            del self._cells[topic]

    def _coarsen(self) -> None:
        """Add the farther half of the kind that has the most cells up to the next coarser kind."""
        kinds: tuple[list[int], ...] = ([], [], [], [])
        for start_ms in (start for cells in self._cells.values() for start in cells):
            kinds[sum(start_ms >= end_ms for end_ms in self._ends)].append(start_ms)
        kind = max(range(3), key=lambda one: len(kinds[one]))
        starts_ms = sorted(kinds[kind])
        middle_ms = starts_ms[len(starts_ms) // 2]
        # A border lies where a coarser cell begins, and a finer kind ends before a coarser one.
        end_ms = middle_ms - middle_ms % (DAY_MS if kind else HOUR_MS)
        minutes_end, hours_end, days_end = self._ends
        self._ends = (
            min(minutes_end, end_ms),
            min(hours_end, end_ms) if kind >= 1 else hours_end,
            min(days_end, end_ms) if kind >= 2 else days_end,
        )
        self._refold()

    def _refold(self) -> None:
        for topic, old in self._cells.items():
            cells: Counter[int] = Counter()
            for start_ms, count in zip(self._starts(old), old.values(), strict=True):
                cells[start_ms] += count
            self._cells[topic] = cells
        self._cells_total = sum(map(len, self._cells.values()))
