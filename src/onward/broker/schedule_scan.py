"""Going through what waits in the schedule, a bounded number of rows and bytes at a time.

    page     what waits after a moment, in the order in which it fires; between two firings
    waits    whether a row of a page will fire: not cancelled, replaced, or fired before a crash
    count    how many messages of some topics wait at the moment when it returns
    recount  how many messages wait in all, from the indexes: where the state has no count yet

A schedule that fits into one page is counted between two firings. A larger one is counted page by
page, and again when it changed meanwhile: only a count during which nothing changed is exact.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING, Final

from onward.broker.schedule_files import TooLarge
from onward.schedule.order import BEFORE_ALL, Moment
from onward.schedule.record import Records

if TYPE_CHECKING:
    from onward.broker.scheduling import Scheduling

SCANNED_MAX: Final = 500_000
"""So many rows at most are gone through for one answer."""
SCAN_STEP: Final = 8_192
SCAN_BYTES_MAX: Final = 8 << 20
FOREVER_MS: Final = 2**62
TRIES_MAX: Final = 3


class ScheduleScan:
    """Reads what waits, for answers."""

    def __init__(self, scheduling: Scheduling) -> None:
        self._scheduling = scheduling
        self._scan_rows = 64

    async def page(self, after: Moment, until_ms: int) -> Records:
        """Return the rows that wait after a moment and up to a time; none when that was all."""
        async with self._scheduling.lock:
            self._scheduling.take_in()
            peek = partial(
                self._scheduling.files.peek, after=after, until_ms=until_ms,
                bytes_max=SCAN_BYTES_MAX,
            )  # fmt: skip
            try:
                records = await peek(limit=self._scan_rows)
            except TooLarge as enough:
                records = await peek(limit=enough.count)
        # So many the next time that a look holds a bounded number of bytes.
        fitting = SCAN_BYTES_MAX * records.count // max(1, sum(records.sizes()))
        self._scan_rows = max(16, min(fitting, self._scan_rows * 4, SCAN_STEP))
        return records

    def waits(self, topic: str, at_ms: int, number: int) -> bool:
        """Return True if a row will fire."""
        state = self._scheduling.state
        # A start at an earlier time finds what has fired among what is not due yet.
        return not state.is_gone(number) and not state.has_fired(topic, at_ms, number)

    async def count(self, topics: Collection[str]) -> tuple[int, bool]:
        """Return how many messages of these topics wait now, and whether that is exact."""
        # All rows that must be read count here, cancelled ones too.
        if self._scheduling.order.waiting <= SCAN_STEP:
            found = await self._count_at_once(topics)
            if found is not None:
                return found, True
        count, is_whole = 0, False
        for _ in range(TRIES_MAX):
            changes = self._scheduling.changes
            count, is_whole = await self._count_pages(topics)
            if changes == self._scheduling.changes:
                return count, is_whole
        return count, False

    def recount(self) -> int:
        """Return how many messages wait, by reading the index of each run; between two firings."""
        files = self._scheduling.files
        in_runs = (row for run in files.runs for block in run.number_rows() for row in block)
        count = sum(self.waits(topic, at_ms, number) for number, at_ms, topic in in_runs)
        for tail in files.tails:
            rows = enumerate(tail.rows(), tail.part.number_start)
            count += sum(self.waits(topic, at_ms, number) for number, (at_ms, topic) in rows)
        return count

    async def _count_at_once(self, topics: Collection[str]) -> int | None:
        """Return the count of one page that holds all that waits; None if it does not fit."""
        scheduling = self._scheduling
        async with scheduling.lock:
            scheduling.take_in()
            try:
                records = await scheduling.files.peek(
                    after=BEFORE_ALL, until_ms=FOREVER_MS, limit=SCAN_STEP + 1,
                    bytes_max=SCAN_BYTES_MAX,
                )  # fmt: skip
            except TooLarge:
                return None
        # The lock is free again, but nothing else has run since the page was read.
        if records.count > SCAN_STEP:
            return None
        return self._count_rows(records, topics) + scheduling.arrived_count(topics)

    async def _count_pages(self, topics: Collection[str]) -> tuple[int, bool]:
        after, count, scanned = BEFORE_ALL, 0, 0
        while scanned < SCANNED_MAX:
            records = await self.page(after, FOREVER_MS)
            if not records.count:
                return count, True
            count += self._count_rows(records, topics)
            after = (records.at_ms[-1], records.numbers[-1])
            scanned += records.count
        return count, False

    def _count_rows(self, records: Records, topics: Collection[str]) -> int:
        rows = zip(records.topics, records.at_ms, records.numbers, strict=True)
        return sum(topic in topics and self.waits(topic, at, number) for topic, at, number in rows)
