"""Which messages of raw entries were delivered: a walk over batches and grants at once.

    entries   | batch | batch | batch | batch |      as they lie in the log
    grants        [----)  [-)             [--)       what of them is ours, and at which attempt
    pieces        [---|-) [-)             [--)       batch by batch

Batches that nobody wants stay closed. What cannot be decoded is told as an error in its place: the
messages around it are as good as ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

from onward.errors import Corruption, OnwardError, ProtocolError
from onward.message.batch import Batch, batches_of, decode_batch
from onward.message.entry import Entry, entry_heads
from onward.protocol.deliveries import Grant

RAW_BYTES_MAX = 64 << 20

Buffer = bytes | bytearray | memoryview

T = TypeVar("T")


class Piece(NamedTuple):
    """The delivered part of one published batch: the offsets from `start` to `end`."""

    batch: Batch
    entry: Entry
    base_offset: int
    start: int
    end: int
    attempt: int
    deliveries: int

    def cut(self, column: list[T]) -> list[T]:
        """Return the delivered part of a column."""
        if self.end - self.start == self.batch.count:
            return column
        return column[self.start - self.base_offset : self.end - self.base_offset]


def pieces_of(
    entries: Buffer, grants: Sequence[Grant]
) -> Iterator[tuple[int, int, Piece | OnwardError]]:
    """Walk over batches and grants (in order) at once; batches that nobody wants stay closed."""
    wanted = iter(grants)
    start, end, attempt, deliveries = next(wanted, _NO_GRANT)
    for entry in entry_heads(entries):
        offset, entry_end = entry.base_offset, entry.base_offset + entry.count
        batches = batches_of(entries, entry.body_position, entry.body_position + entry.body_bytes)
        while offset < entry_end and start < entry_end:
            opened: Batch | OnwardError | None = None
            try:
                at, header = next(batches)
                after = offset + header.count
            except (ProtocolError, StopIteration) as error:
                # Nobody knows where the next batch would begin: the rest of the entry is lost.
                after, opened = entry_end, _fault(error)
            while start < after:
                low, high = max(start, offset), min(end, after)
                if low < high:
                    opened = _open(entries, at) if opened is None else opened
                    if isinstance(opened, Batch):
                        piece = Piece(opened, entry, offset, low, high, attempt, deliveries)
                        yield low, high, piece
                    else:
                        yield low, high, opened
                if end > after:
                    break
                start, end, attempt, deliveries = next(wanted, _NO_GRANT)
            offset = after


_NO_GRANT: Grant = (2**64, 2**64, 0, 0)


def _open(entries: Buffer, at: int) -> Batch | OnwardError:
    try:
        batch = decode_batch(entries, at, raw_bytes_max=RAW_BYTES_MAX)
        batch.bodies  # noqa: B018  # unpacked here, where an error has a consequence
    except (ProtocolError, Corruption) as error:
        return error
    return batch


def _fault(error: Exception) -> OnwardError:
    return error if isinstance(error, OnwardError) else ProtocolError("an entry lacks batches")
