"""Merging runs: many sorted files become one, without what is gone. Streaming, in bounded memory.

    pages     of each run one page is in memory. All rows up to the first page end of any run can be
              sorted together: no other page can hold one before them. So work is done in slices of
              pages and by `sorted`, which is best at merging what is sorted in parts.
    indexes   the same with blocks; their rows say themselves whether they are gone

A page of one row is perhaps a large message: it is read when it is its turn, so that of all runs
only one such message is in memory. A result of more than about 5 Mi rows goes on in a next file:
`path`, `path.1`, `path.2` ... ascending in time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Final, TypeVar

from onward.errors import InvalidRequest
from onward.log.disk import Disk
from onward.schedule.gone import Gone
from onward.schedule.layout import ROWS_MAX, Key
from onward.schedule.record import Records
from onward.schedule.run import Run
from onward.schedule.writer import RunSummary, RunWriter

RUNS_MAX: Final = 64

NumberRow = tuple[int, int, str]
UniqueRow = tuple[int, int, int, str]
_Row = TypeVar("_Row", NumberRow, UniqueRow)


def merge_runs(
    disk: Disk, path: str, runs: Sequence[Run], *, gone: Gone, rows_max: int = ROWS_MAX
) -> RunSummary:
    """Write all rows of `runs` that are not gone to `path`; the runs stay as they are."""
    if not 1 <= len(runs) <= RUNS_MAX:
        raise InvalidRequest(f"a merge takes 1 to {RUNS_MAX} runs, not {len(runs)}")
    merge = _Merge(disk, path, rows_max)
    try:
        for records in _merged_records([_Cursor(run, gone) for run in runs]):
            merge.add(records)
        merge.add_indexes(runs, gone)
        return merge.finish(runs)
    finally:
        merge.abandon()


class _Merge:
    """The files that a merge writes."""

    def __init__(self, disk: Disk, path: str, rows_max: int) -> None:
        self._disk = disk
        self._path = path
        self._rows_max = rows_max
        self._writers: list[RunWriter] = []
        self._ends: list[Key] = []
        self._room = 0

    def add(self, records: Records) -> None:
        """Write records to the newest file, and begin a next one when that is full."""
        start = 0
        while start < records.count:
            if not self._room:
                number = len(self._writers)
                path = f"{self._path}.{number}" if number else self._path
                self._writers.append(RunWriter(self._disk, path))
                self._ends.append((0, 0))
                self._room = self._rows_max
            stop = min(records.count, start + self._room)
            some = records if stop - start == records.count else records.slice(start, stop)
            self._writers[-1].add(some)
            self._ends[-1] = some.at_ms[-1], some.numbers[-1]
            self._room -= some.count
            start = stop

    def add_indexes(self, runs: Sequence[Run], gone: Gone) -> None:
        """Write the indexes of all files; they come from those of the runs."""
        for numbers in _merged_rows([run.number_rows() for run in runs]):
            kept = _kept(numbers, numbers, gone)
            for writer, some in self._shared_out(kept, _key_of_number):
                writer.add_numbers(*zip(*some, strict=True))
        for uniques in _merged_rows([run.unique_rows() for run in runs]):
            kept_uniques = _kept(uniques, [row[1:] for row in uniques], gone)
            for writer, some_uniques in self._shared_out(kept_uniques, _key_of_unique):
                writer.add_uniques(*zip(*some_uniques, strict=True))

    def finish(self, runs: Sequence[Run]) -> RunSummary:
        """Make all files durable under their names."""
        start = min(run.number_start for run in runs)
        end = max(run.number_end for run in runs)
        size = sum(writer.finish(start=start, end=end) for writer in self._writers)
        rows = sum(writer.rows for writer in self._writers)
        paths = tuple(writer.path for writer in self._writers)
        gone_count = sum(run.rows_total for run in runs) - rows
        return RunSummary(start, end, paths, rows, size, gone_count)

    def abandon(self) -> None:
        for writer in self._writers:
            writer.abandon()

    def _shared_out(
        self, rows: list[_Row], key_of: Callable[[_Row], Key]
    ) -> Iterator[tuple[RunWriter, list[_Row]]]:
        """Walk over the files and the rows that belong to them."""
        if not rows:
            return
        if len(self._writers) == 1:
            yield self._writers[0], rows
            return
        shares: dict[int, list[_Row]] = {}
        for row in rows:
            shares.setdefault(bisect_left(self._ends, key_of(row)), []).append(row)
        for number, share in shares.items():
            yield self._writers[number], share


class _Cursor:
    """One run that is being merged: the rows of one page that are not taken yet."""

    def __init__(self, run: Run, gone: Gone) -> None:
        self.keys: list[Key] = []
        self._run = run
        self._gone = gone
        self._start = 0
        self._records: Records | None = None
        self._next_page = 0
        # Pages that have fired altogether are not read.
        fired = gone.fired_up_to(run.topics)
        if fired is not None:
            self._next_page = run.page_at(run.first_after(*fired))
        self._load()

    @property
    def head(self) -> Key:
        return self.keys[self._start]

    def take(self, bound: Key) -> Records:
        """Return the rows up to `bound`, of which there is at least one."""
        stop = bisect_right(self.keys, bound, lo=self._start)
        start, self._start = self._start, stop
        if self._records is None:
            records = self._kept(self._run.page_records(self._next_page - 1))
        else:
            records = self._records.slice(start, stop)
        if stop == len(self.keys):
            self._load()
        return records

    def _load(self) -> None:
        """Go to the next page that has something; without one there are no keys."""
        self._start, self.keys, self._records = 0, [], None
        while not self.keys and self._next_page < self._run.page_count:
            page = self._next_page
            self._next_page += 1
            if self._run.page_rows(page) == 1:
                self.keys = [self._run.page_key(page)]
            else:
                self._records = self._kept(self._run.page_records(page))
                self.keys = list(zip(self._records.at_ms, self._records.numbers, strict=True))

    def _kept(self, records: Records) -> Records:
        kept = self._gone.kept(records.numbers, records.at_ms, records.topics)
        return records if kept is None else records.select(kept)


def _merged_records(cursors: list[_Cursor]) -> Iterator[Records]:
    """Walk over the records of all cursors in the order of (at_ms, number)."""
    while cursors := [cursor for cursor in cursors if cursor.keys]:
        bound = min(cursor.keys[-1] for cursor in cursors)
        parts = [cursor.take(bound) for cursor in cursors if cursor.head <= bound]
        if len(parts) == 1:
            yield parts[0]
            continue
        records = Records.empty()
        for part in parts:
            records.extend(part)
        yield records.in_order()


def _merged_rows(walks: Sequence[Iterator[list[_Row]]]) -> Iterator[list[_Row]]:
    """Walk over the rows of sorted walks in their order, in lists of many."""
    pending = [(next(walk, []), walk) for walk in walks]
    while pending := [(rows, walk) for rows, walk in pending if rows]:
        bound = min(rows[-1] for rows, _ in pending)
        taken: list[list[_Row]] = []
        for place, (rows, walk) in enumerate(pending):
            stop = bisect_right(rows, bound)
            taken.append(rows[:stop])
            pending[place] = (rows[stop:] or next(walk, []), walk)
        yield sorted(chain.from_iterable(taken))


def _kept(rows: list[_Row], facts: Sequence[NumberRow], gone: Gone) -> list[_Row]:
    """Return the rows that are not gone; `facts` are their (number, at_ms, topic)."""
    kept = gone.kept(*zip(*facts, strict=True)) if gone else None
    return rows if kept is None else list(map(rows.__getitem__, kept))


def _key_of_number(row: NumberRow) -> Key:
    return row[1], row[0]


def _key_of_unique(row: UniqueRow) -> Key:
    return row[2], row[1]
