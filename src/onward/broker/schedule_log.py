"""Scheduled messages that wait in the log only, because no run has them yet.

    numbers ──▶ spans of the log ──▶ in the page cache and small: decoded at once
                                └──▶ else: read and decoded in a thread

Neighbouring steps fire from the same entries, so the batches that were decoded last are kept.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from onward.errors import Corruption
from onward.log.log import Log
from onward.log.span import Span
from onward.message.batch import RAW_BYTES_MAX, batches_of, decode_batch
from onward.message.entry import entry_heads
from onward.schedule.record import Records, records_of
from onward.schedule.state import SCHEDULE_TOPIC

if TYPE_CHECKING:
    from onward.broker.catalogue import Catalogue

READ_BYTES_MAX = 512 << 10
READ_NOW_BYTES_MAX = 256 << 10
"""More than that is decoded in a thread: the loop has others to serve."""


InThread = Callable[[Callable[[], list[Records]]], Awaitable[list[Records]]]
"""Runs work that may wait for the disk where it delays nobody."""


class ScheduleLog:
    """Reads the topic `@schedule`."""

    def __init__(self, log: Log, catalogue: Catalogue, in_thread: InThread) -> None:
        self._log = log
        self._catalogue = catalogue
        self._in_thread = in_thread
        self._decoded: tuple[object, list[Records]] = (), []
        """The spans that were decoded last, and their batches."""

    def spans(self, start: int, end: int) -> Iterator[Span]:
        """Walk over the spans of the log that hold the numbers from `start` to before `end`."""
        topic = self._catalogue.by_name.get(SCHEDULE_TOPIC)
        while topic is not None and start < end:
            span = self._log.plan(topic.number, start, bytes_max=READ_BYTES_MAX, end_offset=end)
            if span is None:
                return
            yield span
            start = span.end_offset

    def read(self, spans: Sequence[Span]) -> list[Records]:
        """Return the batches of spans. This may wait for the disk."""
        return [records for span in spans for records in self._batches(span, wait=True) or ()]

    async def records(self, numbers: Sequence[int]) -> Records:
        """Return the messages with these numbers, in their order."""
        wanted = sorted(numbers)
        spans = list(self._spans_of(wanted))
        batches = self._read_now(spans)
        if batches is None:
            batches = await self._in_thread(lambda: self.read(spans))
        found = _selected(batches, set(wanted))
        if found.count != len(numbers):
            raise Corruption(
                f"{len(numbers) - found.count} scheduled messages are not in the log: "
                f"run 'onward log check' on this folder"
            )
        if found.numbers == numbers:
            return found
        place = {number: row for row, number in enumerate(found.numbers)}
        return found.select([place[number] for number in numbers])

    def _read_now(self, spans: list[Span]) -> list[Records] | None:
        """Return the batches of spans that are small and need no disk, else None."""
        key = [(span.segment.first_index, span.position, span.length) for span in spans]
        if self._decoded[0] == key:
            return self._decoded[1]
        if sum(span.length for span in spans) > READ_NOW_BYTES_MAX:
            return None
        decoded: list[Records] = []
        for span in spans:
            batches = self._batches(span, wait=False)
            if batches is None:
                return None
            decoded += batches
        self._decoded = key, decoded
        return decoded

    def _batches(self, span: Span, *, wait: bool) -> list[Records] | None:
        """Return the batches of a span; None if that needs the disk or much time and not `wait`."""
        entries = self._log.read(span, wait=wait)
        if entries is None:
            return None
        decoded: list[Records] = []
        for entry in entry_heads(entries):
            number, start = entry.base_offset, entry.body_position
            for at, header in batches_of(entries, start, start + entry.body_bytes):
                if not wait and header.raw_bytes > READ_NOW_BYTES_MAX:
                    return None  # it is compressed
                batch = decode_batch(entries, at, raw_bytes_max=RAW_BYTES_MAX)
                decoded.append(records_of(batch, first_number=number, time_ms=entry.time_ms))
                number += header.count
        return decoded

    def _spans_of(self, numbers: Sequence[int]) -> Iterator[Span]:
        """Walk over the spans of the log that hold the numbers, which ascend."""
        at = 0
        while at < len(numbers):
            span = next(self.spans(numbers[at], numbers[-1] + 1), None)
            if span is None:
                return
            yield span
            end = span.end_offset
            while at < len(numbers) and numbers[at] < end:
                at += 1


def _selected(batches: Sequence[Records], numbers: set[int]) -> Records:
    """Return the rows with these numbers."""
    found = Records.empty()
    for records in batches:
        rows = [row for row, number in enumerate(records.numbers) if number in numbers]
        if rows:
            found.extend(records if len(rows) == records.count else records.select(rows))
    return found
