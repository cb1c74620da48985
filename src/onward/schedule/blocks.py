"""Blocks: a sorted table on the disk that is searched with one read.

    block    up to 1,024 rows as columns: keys, then what belongs to them; zeros to 8
    fence    the first key of a block and its checksum; all fences of a table are in memory

Two tables of a run are built so: numbers (number, at_ms, topic) and uniques (hash, number, at_ms,
topic). Both say when a record is due and for which topic, so that a merge can tell which rows are
gone without reading a page. Keys may repeat in uniques: hashes of different texts may be the same,
and so may be business keys; rows of the same key are in the order of their numbers.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Final

from crc32c import crc32c

from onward.errors import Corruption
from onward.schedule.layout import BLOCK_ROWS

NUMBERS: Final = "QqI"
UNIQUES: Final = "QQqI"

Columns = list[memoryview]
_WIDTHS: Final = {"Q": 8, "q": 8, "I": 4}


def hashes_of(uniques: Iterable[bytes]) -> list[int]:
    """Return the 64 bits under which each business key is found.

    >>> hashes_of([b"order-7"]) == hashes_of([b"order-7"]) != hashes_of([b"order-8"])
    True
    """
    digests = [blake2b(unique, digest_size=8).digest() for unique in uniques]
    return array("Q", b"".join(digests)).tolist()


class BlockWriter:
    """Turns columns of sorted rows into blocks, and keeps their fences."""

    def __init__(self, codes: str) -> None:
        self.rows = 0
        self._codes = codes
        self._firsts = array("Q")
        self._crcs = array("I")
        self._pending: list[list[int]] = [[] for _ in codes]

    def add(self, columns: Sequence[Sequence[int]]) -> Iterator[bytes]:
        """Take rows, and return the blocks that are full now."""
        for pending, column in zip(self._pending, columns, strict=True):
            pending += column
        count = len(self._pending[0])
        for start in range(0, count - BLOCK_ROWS + 1, BLOCK_ROWS):
            yield self._block(start, start + BLOCK_ROWS)
        self._keep_from(count - count % BLOCK_ROWS)

    def finish(self) -> bytes:
        """Return the last block, perhaps empty."""
        last = self._block(0, len(self._pending[0])) if self._pending[0] else b""
        self._keep_from(len(self._pending[0]))
        return last

    def fences(self) -> bytes:
        """Return the section of fences."""
        return self._firsts.tobytes() + self._crcs.tobytes() + bytes(len(self._crcs) % 2 * 4)

    def _block(self, start: int, stop: int) -> bytes:
        block = b"".join(
            array(code, column[start:stop]).tobytes()
            for code, column in zip(self._codes, self._pending, strict=True)
        )
        block += bytes(-len(block) % 8)
        self._firsts.append(self._pending[0][start])
        self._crcs.append(crc32c(block))
        self.rows += stop - start
        return block

    def _keep_from(self, start: int) -> None:
        if start:
            self._pending = [column[start:] for column in self._pending]


class Blocks:
    """A table that is read block by block; `read(start, length)` reads within its section."""

    def __init__(
        self, codes: str, fences: bytes, *, rows: int, read: Callable[[int, int], bytes], path: str
    ) -> None:
        count = -(-rows // BLOCK_ROWS)
        if len(fences) != 12 * count + count % 2 * 4:
            raise Corruption(f"{path} has {len(fences)} bytes of fences for {count} blocks")
        self.count = count
        self._codes = codes
        self._row_bytes = sum(map(_WIDTHS.__getitem__, codes))
        self._rows = rows
        self._firsts = array("Q", fences[: 8 * count])
        self._crcs = array("I", fences[8 * count : 12 * count])
        self._read = read
        self._path = path
        # Questions come in the order of numbers, so the same block answers many of them.
        self._cached: tuple[int, Columns] = (-1, [])

    def block(self, number: int) -> Columns:
        """Return the columns of one block, verified, in place: a search touches a few rows."""
        if self._cached[0] == number:
            return self._cached[1]
        rows = min(BLOCK_ROWS, self._rows - number * BLOCK_ROWS)
        size = rows * self._row_bytes
        block = self._read(number * BLOCK_ROWS * self._row_bytes, size + -size % 8)
        if crc32c(block) != self._crcs[number] or len(block) != size + -size % 8:
            raise Corruption(f"block {number} of an index in {self._path} is damaged")
        columns: Columns = []
        view = memoryview(block)
        for code in self._codes:
            width = _WIDTHS[code] * rows
            columns.append(view[:width].cast(code))  # type: ignore[call-overload]
            view = view[width:]
        self._cached = number, columns
        return columns

    def find(self, key: int) -> Iterator[tuple[int, ...]]:
        """Walk over the rows of a key, the last one first."""
        number = bisect_right(self._firsts, key) - 1
        while number >= 0:
            columns = self.block(number)
            stop = bisect_right(columns[0], key)
            start = bisect_left(columns[0], key)
            for row in range(stop - 1, start - 1, -1):
                yield tuple(column[row] for column in columns)
            # Only when its rows begin with this block may there be more in the one before.
            if start or stop == 0:
                return
            number -= 1

    def walk(self) -> Iterator[list[list[int]]]:
        """Walk over the columns of all blocks, in order."""
        for number in range(self.count):
            yield [column.tolist() for column in self.block(number)]
