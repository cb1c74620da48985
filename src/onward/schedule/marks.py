"""Numbers that will not fire any more: cancelled, replaced or fired before their time.

A growing set of schedule ids, kept as one bitmap per 65,536 numbers: a mark costs a bit, asking
costs a look, and a block in which everything is marked costs nothing. What lies below everything
that still waits is dropped. Saved, a block takes the smaller of its bitmap and its list:

    {block: ""}                    full
    {block: u16[count]}            sparse: the numbers in the block, ascending
    {block: 8192 bytes}            a bitmap: number n is bit n % 8 of byte n // 8
"""

import sys
from array import array
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from onward.errors import Corruption

BLOCK_NUMBERS: Final = 65_536
NUMBER_MAX: Final = 2**63 - 1

_BLOCK_BYTES: Final = BLOCK_NUMBERS // 8
_SPARSE_MAX: Final = _BLOCK_BYTES // 2 - 1
# Up to so many numbers are cheaper one by one than as a change of the whole bitmap.
_SHORT_MAX: Final = 16
_BITS: Final = tuple(tuple(bit for bit in range(8) if byte >> bit & 1) for byte in range(256))

assert sys.byteorder == "little", "saved lists are used in place, not swapped"


class Marks:
    """A set of schedule ids.

    >>> marks = Marks()
    >>> marks.add(70_000), marks.add(70_000), 70_000 in marks, 7 in marks, marks.count
    (True, False, True, False, 1)
    """

    def __init__(self) -> None:
        self.count = 0
        # A block that is full has no bitmap.
        self._bitmaps: dict[int, bytearray | None] = {}
        self._counts: dict[int, int] = {}

    def add(self, number: int) -> bool:
        """Mark a number; tell whether it was not marked before."""
        assert 0 <= number <= NUMBER_MAX, "schedule ids are offsets"
        block, place = divmod(number, BLOCK_NUMBERS)
        bitmap = self._bitmap(block)
        if bitmap is None or bitmap[place >> 3] >> (place & 7) & 1:
            return False
        bitmap[place >> 3] |= 1 << (place & 7)
        self._count(block, 1)
        return True

    def add_many(self, numbers: Iterable[int]) -> int:
        """Mark numbers; return how many of them were not marked before."""
        before = self.count
        for number in numbers:
            self.add(number)
        return self.count - before

    def add_range(self, start: int, end: int) -> int:
        """Mark all numbers of [start, end); return how many of them were not marked before.

        >>> marks = Marks()
        >>> marks.add_range(10, 1_000_000), marks.add_range(0, 20), marks.count
        (999990, 10, 1000000)
        """
        assert 0 <= start <= end <= NUMBER_MAX + 1, "schedule ids are offsets"
        if end - start <= _SHORT_MAX:
            return self.add_many(range(start, end))
        before = self.count
        while start < end:
            block, place = divmod(start, BLOCK_NUMBERS)
            stop = min(end - start + place, BLOCK_NUMBERS)
            bitmap = self._bitmap(block)
            if bitmap is not None:
                self._fill(block, bitmap, place, stop)
            start += stop - place
        return self.count - before

    def drop_below(self, number: int) -> int:
        """Forget everything below a number; return how many marks that were."""
        before = self.count
        border, place = divmod(number, BLOCK_NUMBERS)
        for block in [block for block in self._counts if block < border]:
            self._count(block, -self._counts[block])
        if place and border in self._counts:
            bits = int.from_bytes(self._bytes(border), "little") >> place << place
            self._replace(border, bytearray(bits.to_bytes(_BLOCK_BYTES, "little")))
        return before - self.count

    def save(self) -> bytes:
        """Return everything as bytes, for `load`."""
        return msgspec.msgpack.encode({block: self._saved(block) for block in sorted(self._counts)})

    @classmethod
    def load(cls, saved: bytes) -> "Marks":
        """Return the marks that were saved; `Corruption` when these bytes never were.

        >>> marks = Marks()
        >>> marks.add_many([1, 5])
        2
        >>> list(Marks.load(marks.save()))
        [1, 5]
        """
        marks = cls()
        try:
            for block, content in msgspec.msgpack.decode(saved, type=dict[int, bytes]).items():
                if not 0 <= block <= NUMBER_MAX // BLOCK_NUMBERS:
                    raise ValueError(f"there is no block {block}")
                marks._load_block(block, content)
        except (msgspec.DecodeError, ValueError) as error:
            raise Corruption(f"saved marks cannot be read: {error}") from None
        return marks

    def __contains__(self, number: int) -> bool:
        block, place = divmod(number, BLOCK_NUMBERS)
        if block not in self._counts:
            return False
        bitmap = self._bitmaps[block]
        return bitmap is None or bool(bitmap[place >> 3] >> (place & 7) & 1)

    def __iter__(self) -> Iterator[int]:
        for block in sorted(self._counts):
            first = block * BLOCK_NUMBERS
            yield from (first + place for place in _places(self._bytes(block)))

    def __len__(self) -> int:
        return self.count

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Marks):
            return NotImplemented
        return self._counts == other._counts and self._bitmaps == other._bitmaps

    __hash__ = None  # type: ignore[assignment]

    def _bitmap(self, block: int) -> bytearray | None:
        """Return the bitmap of a block, a new one when it has none; None: the block is full."""
        if block not in self._counts:
            self._counts[block] = 0
            self._bitmaps[block] = bytearray(_BLOCK_BYTES)
        return self._bitmaps[block]

    def _bytes(self, block: int) -> bytes | bytearray:
        bitmap = self._bitmaps[block]
        return b"\xff" * _BLOCK_BYTES if bitmap is None else bitmap

    def _fill(self, block: int, bitmap: bytearray, start: int, end: int) -> None:
        """Set the bits from start up to end, as one number: no loop over them."""
        bits = int.from_bytes(bitmap, "little") | ((1 << (end - start)) - 1) << start
        self._replace(block, bytearray(bits.to_bytes(_BLOCK_BYTES, "little")))

    def _replace(self, block: int, bitmap: bytearray) -> None:
        self._bitmaps[block] = bitmap
        self._count(block, int.from_bytes(bitmap, "little").bit_count() - self._counts[block])

    def _count(self, block: int, more: int) -> None:
        count = self._counts[block] + more
        self.count += more
        self._counts[block] = count
        if count == BLOCK_NUMBERS:
            self._bitmaps[block] = None
        elif not count:
            del self._counts[block], self._bitmaps[block]

    def _saved(self, block: int) -> bytes:
        bitmap = self._bitmaps[block]
        if bitmap is None:
            return b""
        if self._counts[block] > _SPARSE_MAX:
            return bytes(bitmap)
        return array("H", _places(bitmap)).tobytes()

    def _load_block(self, block: int, content: bytes) -> None:
        first = block * BLOCK_NUMBERS
        if not content:
            self.add_range(first, first + BLOCK_NUMBERS)
        elif len(content) == _BLOCK_BYTES:
            self._bitmap(block)
            self._replace(block, bytearray(content))
        else:
            places = array("H")
            places.frombytes(content)
            self.add_many(first + place for place in places)


def _places(bitmap: bytes | bytearray) -> Iterator[int]:
    """Go over the bits that are set; bytes without any are skipped at the speed of a search."""
    rest = bitmap.lstrip(b"\0")
    at = len(bitmap) - len(rest)
    for byte in rest.rstrip(b"\0"):
        if byte:
            first = 8 * at
            for bit in _BITS[byte]:
                yield first + bit
        at += 1
