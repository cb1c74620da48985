"""What fires next: the rows of all parts, in the order of (at_ms, number).

    part ─ rows waiting, sorted ─┐
    part ─ rows waiting, sorted ─┼─▶ take(now_ms, limit) ─▶ fired ─▶ last: all up to here is done
    tail ─ rows as they came ────┘                └─ failed ─▶ give_back

A row is (at_ms, number): when it fires, and its offset in `@schedule`. Both are columns of numbers,
never objects: nothing here loops over what waits, and a crowded second is taken in slices. Every
row up to `last` was taken, every row after it waits. So where a part stands follows from `last`
alone: parts may be exchanged for others with the same rows (a tail for a run, runs for a merged
one) at any moment between two calls. It holds because a row that comes in is after `last`:
`accepted_rows` never puts it before the time of its entry, nothing is taken beyond the time of the
newest entry, and the log's times never go back.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Final, Protocol

Moment = tuple[int, int]
"""A row as a pair: (at_ms, number)."""

BEFORE_ALL: Final[Moment] = (-(2**63), -1)

# Rows are sorted in stretches of about this many, and only when one of them is due.
_STRETCH_ROWS: Final = 1024
# So many of the rows that are due are put in order at once: a crowded second delays nothing else.
_READY_ROWS_MAX: Final = 8192
# Asking a part for fewer rows than this costs more than the rows.
_STEP_ROWS_MIN: Final = 256


class Rows:
    """Rows as two columns of the same length.

    >>> rows = Rows([5000, 9000], [1, 0])
    >>> len(rows), rows.first, rows[1:].moments()
    (2, (5000, 1), [(9000, 0)])
    """

    __slots__ = ("at_ms", "numbers")

    def __init__(self, at_ms: Sequence[int] = (), numbers: Sequence[int] = ()) -> None:
        self.at_ms = at_ms if isinstance(at_ms, array) else array("q", at_ms)
        self.numbers = numbers if isinstance(numbers, array) else array("Q", numbers)
        assert len(self.at_ms) == len(self.numbers), "columns of one length"

    @property
    def first(self) -> Moment:
        """The first row; there must be one."""
        return self.at_ms[0], self.numbers[0]

    @property
    def last(self) -> Moment:
        """The last row; there must be one."""
        return self.at_ms[-1], self.numbers[-1]

    def extend(self, rows: "Rows") -> None:
        """Put the rows of another behind these."""
        self.at_ms.extend(rows.at_ms)
        self.numbers.extend(rows.numbers)

    def picked(self, places: Sequence[int]) -> "Rows":
        """Return the rows at these places, in the order of the places."""
        return Rows(
            array("q", map(self.at_ms.__getitem__, places)),
            array("Q", map(self.numbers.__getitem__, places)),
        )

    def count_to(self, moment: Moment) -> int:
        """Return how many rows are not after a moment; the rows are sorted."""
        at_ms, number = moment
        low = bisect_left(self.at_ms, at_ms)
        high = bisect_right(self.at_ms, at_ms, lo=low)
        return bisect_right(self.numbers, number, lo=low, hi=high)

    def count_due(self, now_ms: int) -> int:
        """Return how many rows fire at or before a time; the rows are sorted."""
        return bisect_right(self.at_ms, now_ms)

    def moments(self) -> list[Moment]:
        """Return the rows as pairs: for tests and for people."""
        return list(zip(self.at_ms, self.numbers, strict=True))

    def __len__(self) -> int:
        return len(self.at_ms)

    def __getitem__(self, some: slice) -> "Rows":
        return Rows(self.at_ms[some], self.numbers[some])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rows):
            return NotImplemented
        return self.at_ms == other.at_ms and self.numbers == other.numbers

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<Rows {len(self)}: {self.first} to {self.last}>" if self.at_ms else "<Rows: none>"


def accepted_rows(due_at_ms: Sequence[int], *, first_number: int, time_ms: int) -> Rows:
    """Return the rows of a batch that was accepted at `time_ms`: past times fire at once.

    >>> accepted_rows([90, 500], first_number=7, time_ms=100).moments()
    [(100, 7), (500, 8)]
    """
    at_ms = array("q", due_at_ms)
    if at_ms and min(at_ms) < time_ms:
        at_ms = array("q", [at if at > time_ms else time_ms for at in at_ms])
    return Rows(at_ms, array("Q", range(first_number, first_number + len(at_ms))))


def sorted_rows(rows: Rows) -> Rows:
    """Return the rows in the order of (at_ms, number).

    >>> sorted_rows(Rows([9, 5, 5], [0, 2, 1])).moments()
    [(5, 1), (5, 2), (9, 0)]
    """
    # Sorting is stable: by number first, which costs next to nothing when they ascend already.
    places = sorted(range(len(rows)), key=rows.numbers.__getitem__)
    places.sort(key=rows.at_ms.__getitem__)
    return rows.picked(places)


class Part(Protocol):
    """Some of the rows that wait: the tail in memory, or a run on disk."""

    @property
    def number_start(self) -> int:
        """No number of this part is below."""

    @property
    def number_end(self) -> int:
        """All numbers of this part are below."""

    @property
    def count(self) -> int:
        """How many rows wait."""

    def head(self) -> Moment | None:
        """Return the row that fires next; None when none waits. Often asked: it must be cheap."""

    def take_until(self, now_ms: int, limit: int) -> Rows:
        """Return the next rows that fire at or before `now_ms`, in order; they wait no longer."""

    def is_in_memory(self, now_ms: int) -> bool:
        """Return True if taking the rows up to `now_ms` reads no file."""

    def seek(self, after: Moment) -> None:
        """Go to the first row after this one, forward or back: from there on all rows wait."""

    def count_due(self, now_ms: int) -> int:
        """Return how many rows wait that fire at or before `now_ms`."""


class Taken:
    """Rows that were taken together, of one or several parts.

    `slices` has what each part gave, in the part's order and without gaps, so that a part reads
    its bodies in one go. `rows` are all of them in the order in which they fire, and `places` says
    where each of these stands in the slices laid back to back. Going over it yields (part, rows)
    in the order in which they fire: one part several times, when parts alternate.
    """

    def __init__(self, slices: list[tuple[Part, Rows]], *, before: Moment) -> None:
        self.slices = slices
        self.before = before
        self.places: Sequence[int]
        self.rows, self.places = _merged(slices)

    @property
    def last(self) -> Moment:
        """The row that fires last, or the one before all of these when there are none."""
        return self.rows.last if self.slices else self.before

    def __len__(self) -> int:
        return len(self.places)

    def __iter__(self) -> Iterator[tuple[Part, Rows]]:
        if len(self.slices) <= 1:
            yield from self.slices
            return
        source = [at for at, (_, rows) in enumerate(self.slices) for _ in range(len(rows))]
        done = 0
        for at, same in groupby(map(source.__getitem__, self.places)):
            end = done + sum(1 for _ in same)
            yield self.slices[at][0], self.rows[done:end]
            done = end


class Order:
    """The rows of all parts as if they were one, and the place up to which they were taken.

    >>> tail = TailPart(number_start=0)
    >>> tail.add(Rows([5000, 1000], [0, 1]))
    >>> order = Order()
    >>> order.add(tail)
    >>> order.next_ms(), order.take(now_ms=1000, limit=10).rows.moments(), order.last
    (1000, [(1000, 1)], (1000, 1))
    """

    def __init__(self, *, last: Moment = BEFORE_ALL) -> None:
        self.last = last
        self.parts: list[Part] = []
        self._is_unsure = False
        """A part could not go where it should be: it goes there before anything else is done."""

    @property
    def waiting(self) -> int:
        """How many rows wait."""
        return sum(part.count for part in self.parts)

    def add(self, part: Part) -> None:
        """Take a part in; of its rows those up to `last` were taken."""
        part.seek(self.last)
        self.parts.append(part)

    def exchange(self, old: Sequence[Part], new: Sequence[Part]) -> None:
        """Put parts in the place of others with the same rows; the new ones stand after `last`."""
        kept = [part for part in self.parts if not any(part is other for other in old)]
        self.parts = [*kept, *new]

    def remove(self, part: Part) -> None:
        """Leave a part out; it must be there."""
        self.parts = [other for other in self.parts if other is not part]

    def remove_below(self, number_end: int, *, number_start: int = 0) -> list[Part]:
        """Leave out and return the parts whose numbers lie in [number_start, number_end).

        A part that begins at `number_end` and is empty yet stays.
        """
        gone = [
            part
            for part in self.parts
            if number_start <= part.number_start < number_end and part.number_end <= number_end
        ]
        self.parts = [part for part in self.parts if not any(part is other for other in gone)]
        return gone

    def next_ms(self) -> int | None:
        """Return when the next row fires; None when none waits."""
        return min((head[0] for part in self.parts if (head := part.head())), default=None)

    def is_in_memory(self, now_ms: int) -> bool:
        """Return True if taking the rows up to `now_ms` reads no file."""
        return all(part.is_in_memory(now_ms) for part in self.parts)

    def count_due(self, now_ms: int) -> int:
        """Return how many rows wait that fire at or before `now_ms`; they go on waiting."""
        return sum(part.count_due(now_ms) for part in self.parts)

    def take(self, *, now_ms: int, limit: int) -> Taken:
        """Return the next rows that fire at or before `now_ms`, at most `limit`."""
        assert limit > 0, "who takes wants something"
        if self._is_unsure:
            self._go_to(self.last)
        try:
            taken = self._take(now_ms, limit)
        except BaseException:
            # What some have given is not taken: all of them go back, now or before the next take.
            self._is_unsure = True
            self._go_to(self.last)
            raise
        assert not len(taken) or taken.rows.first > self.last, "a row came in before what was taken"
        self.last = taken.last
        return taken

    def _take(self, now_ms: int, limit: int) -> Taken:
        sources = [
            part for part in self.parts if (head := part.head()) is not None and head[0] <= now_ms
        ]
        # Where two rows fire at the same time, the one in the part with lower numbers goes first.
        sources.sort(key=_number_start)
        slices = self._slices(sources, now_ms, limit)
        return Taken([(part, rows) for part, rows in slices if len(rows)], before=self.last)

    def peek(self, *, after: Moment, until_ms: int, limit: int) -> Taken:
        """Return the next waiting rows after a moment and up to a time, which go on waiting."""
        last = self.last
        try:
            self._go_to(max(after, last))
            return self.take(now_ms=until_ms, limit=limit)
        finally:
            self._go_to(last)

    def skip(self, upto: Moment) -> None:
        """Leave out the rows up to a moment: another node has fired them."""
        if upto > self.last:
            self._go_to(upto)

    def give_back(self, taken: Taken) -> None:
        """Let rows wait again that could not be fired; of several, the ones taken last go first."""
        assert taken.last == self.last, "what was taken after them is given back before them"
        self._go_to(taken.before)

    def _slices(self, sources: list[Part], now_ms: int, limit: int) -> list[tuple[Part, Rows]]:
        """Take from each part what belongs to the first `limit` rows of all."""
        if len(sources) <= 1:
            return [(part, part.take_until(now_ms, limit)) for part in sources]
        # Each gives a share. Then whoever is behind gives more, until the rows that no part can
        # come before are enough: so a part reads hardly more than what it fires.
        step = min(limit, max(_STEP_ROWS_MIN, limit // len(sources)))
        slices = [(part, part.take_until(now_ms, step)) for part in sources]
        while (behind := _behind(slices, now_ms)) is not None:
            sure = sum(rows.count_to(behind[0]) for _, rows in slices)
            if sure >= limit:
                break
            part, rows = behind[1]
            more = part.take_until(now_ms, step)
            assert len(more), "a part gives what it says is next"
            rows.extend(more)
        return self._cut(slices, behind[0] if behind else None, limit)

    def _cut(
        self, slices: list[tuple[Part, Rows]], bound: Moment | None, limit: int
    ) -> list[tuple[Part, Rows]]:
        """Keep the first `limit` rows before `bound`, and let the others wait again."""
        if bound is None and sum(len(rows) for _, rows in slices) <= limit:
            return slices
        if bound is not None:
            slices = [(part, rows[: rows.count_to(bound)]) for part, rows in slices]
        kept = _end_of_first([rows for _, rows in slices if len(rows)], limit)
        for part, _ in slices:
            part.seek(kept)
        return [(part, rows[: rows.count_to(kept)]) for part, rows in slices]

    def _go_to(self, last: Moment) -> None:
        """Let every part stand after a moment; one that cannot now must before the next take."""
        self.last = last
        failed: Exception | None = None
        for part in self.parts:
            try:
                part.seek(last)
            except Exception as error:  # noqa: BLE001  (raised when all have been asked)
                failed = error
        self._is_unsure = failed is not None
        if failed is not None:
            raise failed


class TailPart:
    """The newest rows, in memory, as they came; what is due is sorted and made ready once.

    >>> tail = TailPart(number_start=7)
    >>> tail.add(accepted_rows([900, 300], first_number=7, time_ms=100))
    >>> tail.head(), tail.take_until(500, 10).moments(), tail.count
    ((300, 8), [(300, 8)], 1)
    """

    def __init__(self, *, number_start: int) -> None:
        self.number_start = number_start
        self.number_end = number_start
        self.count = 0
        self.rows_total = 0
        self._stretches: list[_Stretch] = []
        self._head: Moment | None = None
        self._after = BEFORE_ALL
        # The next rows after `_ready_after`, without gaps; those before `_place` were taken.
        self._ready = Rows()
        self._ready_after = BEFORE_ALL
        self._place = 0

    def add(self, rows: Rows) -> None:
        """Take rows in; their numbers ascend, and they are after everything that was taken."""
        if not len(rows):
            return
        if not self._stretches or len(self._stretches[-1].rows) >= _STRETCH_ROWS:
            self._stretches.append(_Stretch())
        head = self._stretches[-1].add(rows)
        assert head > self._after, "a row came in before what was taken"
        if len(self._ready) and head < self._ready.last:
            self._unready()
        if self._head is None or head < self._head:
            self._head = head
        self.count += len(rows)
        self.rows_total += len(rows)
        self.number_end = rows.numbers[-1] + 1

    def head(self) -> Moment | None:
        """Return the row that fires next; None when none waits."""
        return self._head

    def take_until(self, now_ms: int, limit: int) -> Rows:
        """Return the next rows that fire at or before `now_ms`, in order; they wait no longer."""
        taken = Rows()
        while self._head is not None and self._head[0] <= now_ms and len(taken) < limit:
            if self._place == len(self._ready):
                self._make_ready(now_ms)
            end = min(self._place + limit - len(taken), self._ready.count_due(now_ms))
            taken.extend(self._ready[self._place : end])
            self.count -= end - self._place
            self._after = taken.last
            self._place = end
            self._head = self._find_head()
        return taken

    def is_in_memory(self, now_ms: int) -> bool:
        """Return True: a tail is."""
        return True

    def seek(self, after: Moment) -> None:
        """Go to the first row after this one, forward or back: from there on all rows wait."""
        self._after = after
        if len(self._ready) and self._ready_after <= after <= self._ready.last:
            place = self._ready.count_to(after)
            self.count += self._place - place
            self._place = place
        else:
            self._unready()
            self.count = sum(stretch.count_after(after) for stretch in self._stretches)
        self._head = self._find_head()

    def count_due(self, now_ms: int) -> int:
        """Return how many rows wait that fire at or before `now_ms`.

        >>> tail = TailPart(number_start=0)
        >>> tail.add(Rows([5, 1, 3], [0, 1, 2]))
        >>> tail.count_due(3), tail.count
        (2, 3)
        """
        return sum(len(stretch.due(self._after, now_ms)) for stretch in self._stretches)

    def _make_ready(self, now_ms: int) -> None:
        due = [stretch.due(self._after, now_ms) for stretch in self._stretches]
        end = _end_of_first([rows for rows in due if len(rows)], _READY_ROWS_MAX)
        ready = Rows()
        for rows in due:
            ready.extend(rows[: rows.count_to(end)])
        self._ready, self._place, self._ready_after = sorted_rows(ready), 0, self._after

    def _unready(self) -> None:
        self._ready, self._place = Rows(), 0

    def _find_head(self) -> Moment | None:
        if self._place < len(self._ready):
            return self._ready.at_ms[self._place], self._ready.numbers[self._place]
        heads = (stretch.head_after(self._after) for stretch in self._stretches)
        return min((head for head in heads if head is not None), default=None)


class _Stretch:
    """Some rows of a tail: as they came at first, sorted once one of them is due."""

    __slots__ = ("first", "is_sorted", "rows")

    def __init__(self) -> None:
        self.rows = Rows()
        self.first: Moment | None = None
        self.is_sorted = True

    def add(self, rows: Rows) -> Moment:
        """Take rows in and return the one of them that fires first."""
        at_ms = min(rows.at_ms)
        head = (at_ms, rows.numbers[rows.at_ms.index(at_ms)])
        self.rows.extend(rows)
        self.is_sorted = False
        if self.first is None or head < self.first:
            self.first = head
        return head

    def due(self, after: Moment, now_ms: int) -> Rows:
        """Return the rows after a moment that fire at or before `now_ms`."""
        assert self.first is not None
        if self.first[0] > now_ms:
            return Rows()
        self._sort()
        return self.rows[self.rows.count_to(after) : self.rows.count_due(now_ms)]

    def count_after(self, after: Moment) -> int:
        return len(self.rows) - self._place_after(after)

    def head_after(self, after: Moment) -> Moment | None:
        assert self.first is not None
        if self.first > after:
            return self.first
        start = self._place_after(after)
        return None if start == len(self.rows) else self.rows[start : start + 1].first

    def _place_after(self, after: Moment) -> int:
        assert self.first is not None
        if self.first > after:
            # Nothing of it was taken, sorted or not: most become a run before anything is.
            return 0
        self._sort()
        return self.rows.count_to(after)

    def _sort(self) -> None:
        if not self.is_sorted:
            self.rows = sorted_rows(self.rows)
            self.is_sorted = True


def _behind(
    slices: list[tuple[Part, Rows]], now_ms: int
) -> tuple[Moment, tuple[Part, Rows]] | None:
    """Return the first row that is due and was not taken, and whose it is."""
    heads = ((one[0].head(), one) for one in slices)
    due = [(head, one) for head, one in heads if head is not None and head[0] <= now_ms]
    return min(due, key=itemgetter(0), default=None)


def _end_of_first(columns: list[Rows], limit: int) -> Moment:
    """Return the last of the first `limit` rows of several columns, without sorting them together.

    >>> _end_of_first([Rows([1, 5], [0, 1]), Rows([2, 5, 9], [2, 3, 4])], 3)
    (5, 1)
    """
    ends = [rows.last for rows in columns]
    if sum(map(len, columns)) <= limit:
        return max(ends)
    times = range(min(rows.first for rows in columns)[0], max(ends)[0])
    at_ms = times.start + bisect_left(
        times, limit, key=lambda at: sum(rows.count_due(at) for rows in columns)
    )
    # Of those that fire in this very millisecond the number decides.
    same = [rows[rows.count_due(at_ms - 1) : rows.count_due(at_ms)].numbers for rows in columns]
    before = sum(rows.count_due(at_ms - 1) for rows in columns)
    numbers = sorted(number for some in same for number in some[: limit - before])
    return at_ms, numbers[limit - before - 1]


def _merged(slices: list[tuple[Part, Rows]]) -> tuple[Rows, Sequence[int]]:
    """Return the rows of all slices in order, and where each stood in the slices back to back."""
    if len(slices) == 1:
        return slices[0][1], range(len(slices[0][1]))
    joined = Rows()
    for _, rows in slices:
        joined.extend(rows)
    places = list(range(len(joined)))
    if any(one.number_end > other.number_start for (one, _), (other, _) in pairwise(slices)):
        places.sort(key=joined.numbers.__getitem__)
    # Merging what is sorted in parts is what this sort is best at.
    places.sort(key=joined.at_ms.tolist().__getitem__)
    return joined.picked(places), places


def _number_start(part: Part) -> int:
    return part.number_start
