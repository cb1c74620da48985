"""A stretch of one segment that is fetched with one read, and how it is checked.

rows of a topic ──▶ span_of, carried_span ──▶ Span ──▶ read ──▶ verified ──▶ entries
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from onward.errors import Corruption
from onward.log.carried import CarriedRow
from onward.log.disk import Buffer
from onward.log.index import Row, TopicRows
from onward.log.segment import Segment
from onward.message.entry import Kind, read_entry

# Neighbours this far apart are fetched with one read: copying a little more is cheaper than
# another system call.
GAP_BYTES_MAX = 64 << 10


class Span(NamedTuple):
    """A stretch of one segment that holds the next entries of a topic."""

    segment: Segment
    position: int
    length: int
    rows: list[Row]

    def without_last(self) -> Span:
        """Return the span without its last entry; it has several."""
        last = self.rows[-2]
        return Span(
            self.segment, self.position, last.position + last.length - self.position, self.rows[:-1]
        )

    @property
    def first_offset(self) -> int:
        """Return the offset of the first message of the span."""
        return self.rows[0].base_offset

    @property
    def end_offset(self) -> int:
        """Return the offset after the last message of the span."""
        return self.rows[-1].end_offset


def span_of(
    segment: Segment, rows: TopicRows, number: int, bytes_max: int, end_offset: int | None
) -> Span:
    """Gather neighbouring rows until `bytes_max`; always at least one."""
    first = rows.row(number)
    chosen, end = [first], first.position + first.length
    for later in range(number + 1, rows.count):
        row = rows.row(later)
        new_end = row.position + row.length
        if row.position - end > GAP_BYTES_MAX or new_end - first.position > bytes_max:
            break
        if end_offset is not None and row.base_offset >= end_offset:
            break
        chosen.append(row)
        end = new_end
    return Span(segment, first.position, end - first.position, chosen)


def carried_span(
    topic: int, first: CarriedRow, following: Iterator[CarriedRow], body: tuple[Segment, int],
    *, bytes_max: int, end_offset: int,
) -> Span:  # fmt: skip
    """Gather neighbours inside one CARRIED entry until `bytes_max`; always at least one."""
    segment, start = body
    chosen = [first]
    for row in following:
        last = chosen[-1]
        if (row.index, row.start) != (first.index, last.start + last.length):
            break
        if row.start + row.length - first.start > bytes_max or row.base_offset >= end_offset:
            break
        chosen.append(row)
    delta = first.index - segment.first_index
    rows = [
        Row(
            topic, row.count, row.base_offset, row.time_ms, delta, start + row.start, row.length
        )
        for row in chosen
    ]  # fmt: skip
    position = rows[0].position
    return Span(segment, position, rows[-1].position + rows[-1].length - position, rows)


def verified(span: Span, buffer: bytes | bytearray) -> Buffer:
    """Return just the entries of the topic, each with its checksum verified."""
    wanted = 0
    for row in span.rows:
        _check_entry(span, row, buffer)
        wanted += row.length
    if wanted == span.length:
        return buffer
    view = memoryview(buffer)
    starts = [row.position - span.position for row in span.rows]
    return b"".join(
        view[start : start + row.length] for start, row in zip(starts, span.rows, strict=True)
    )


def _check_entry(span: Span, row: Row, buffer: bytes | bytearray) -> None:
    entry = read_entry(buffer, row.position - span.position, position=span.position)
    if entry is None or entry.topic != row.topic or entry.kind != Kind.MESSAGES:
        index = span.segment.first_index + row.index_delta
        raise Corruption(
            f"entry {index} at byte {row.position} of {span.segment.path} is damaged: "
            f"run 'onward log check' on this folder"
        )
