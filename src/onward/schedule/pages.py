"""A page: records that lie next to each other in time, as one batch.

Pages are read whole: about 64 KiB, a checksum, columns. A page is written as an ordinary batch, so
what encodes, decodes and distrusts batches serves here too. It has two columns more, `AT_MS` and
`TOPIC_NUMBERS` (into the run's table of topics), and its sequence is the number of its first row in
the run: a page that stands where another belongs is noticed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from onward.errors import Corruption, ProtocolError
from onward.log.disk import Buffer
from onward.message.batch import Batch, decode_batch, join_columns
from onward.message.columns import Column, unpack_optional
from onward.schedule.layout import AT_MS, TOPIC_NUMBERS
from onward.schedule.record import OPTIONAL, Records, pack_columns


def encode_page(records: Records, *, topics: Sequence[int], first_row: int) -> bytes:
    """Return the bytes of a page; `topics` are the numbers of the records' topics."""
    packed = pack_columns(records)
    # The bodies stay last; the two columns of pages are of higher kinds than all others.
    packed[-1:-1] = [
        (AT_MS, (array("q", records.at_ms).tobytes(),)),
        (TOPIC_NUMBERS, (array("I", topics).tobytes(),)),
    ]
    return join_columns(packed, 0, records.count, 0, first_row, records.at_ms[0])


class Page:
    """A page that was read and verified; columns are unpacked when they are asked for."""

    def __init__(self, buffer: Buffer, *, first_row: int, count: int) -> None:
        self._batch: Batch = decode_batch(buffer, raw_bytes_max=len(buffer))
        self.count = count
        if (self._batch.count, self._batch.header.sequence) != (count, first_row):
            raise ProtocolError(f"this is not the page of row {first_row}")
        self.at_ms = self._integers(AT_MS, "q", 8)
        self.numbers = self._integers(Column.SCHEDULE_IDS, "q", 8)

    def records(self, topics: Sequence[str]) -> Records:
        """Return all records of the page; `topics` is the run's table."""
        batch = self._batch
        optional = {
            int(kind): unpack_optional(column, count=self.count)
            for kind in OPTIONAL
            if (column := batch.column(kind)) is not None
        }
        numbers = self._integers(TOPIC_NUMBERS, "I", 4)
        try:
            names = list(map(topics.__getitem__, numbers))
        except IndexError:
            raise ProtocolError("a record of the page has a topic that the run does not") from None
        return Records(
            self.numbers.copy(),
            self.at_ms.copy(),
            self._integers(Column.DUE_AT_MS, "q", 8),
            names,
            batch.bodies.copy(),
            optional,
            batch.priorities,
        )

    def _integers(self, kind: int, code: str, width: int) -> list[int]:
        column = self._batch.column(kind)
        if column is None or len(column) != width * self.count:
            raise ProtocolError(f"the page has no column {kind} for {self.count} records")
        integers: list[int] = column.cast(code).tolist()  # type: ignore[call-overload]
        return integers


def read_page(buffer: Buffer, *, first_row: int, count: int, path: str) -> Page:
    """Return a page, or say where it is damaged: `Corruption`."""
    try:
        return Page(buffer, first_row=first_row, count=count)
    except ProtocolError as error:
        raise Corruption(f"the page of row {first_row} in {path} is damaged: {error}") from error
