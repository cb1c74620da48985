"""Where messages are that outlive the retention of their topic: a fold of entries of kind CARRIED.

    topic dropped up to 1,000    offset 17 is a dead letter, 940 waits for a retry
    CARRIED entry                header, topic + 2**31 | entry with 17 | entry with 940 |

The body of such an entry is whole MESSAGES entries, back to back, cut down to the messages that
some group still needs. Each is a valid entry at an aligned position of the segment, so it is read,
verified and delivered like any other. Only this fold knows where they are: for readers the topic
begins at its first offset. A later CARRIED entry with the same offsets takes the place of an
earlier one: that is how they outlive the segment that they were carried into.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator

import msgspec

from onward.message.entry import CARRIED_TOPIC, Entry, entry_heads

Range = tuple[int, int]


class CarriedRow(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One MESSAGES entry inside the body of a CARRIED entry."""

    base_offset: int
    count: int
    time_ms: int
    index: int
    """The index of the CARRIED entry."""
    start: int
    """Where it begins in that entry's body."""
    length: int

    @property
    def end_offset(self) -> int:
        """Return the offset after the last message of the entry."""
        return self.base_offset + self.count


class TopicCarried:
    """The carried messages of one topic, in the order of their offsets."""

    __slots__ = ("_bases", "_rows", "bytes")

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._rows: dict[int, CarriedRow] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._bases)

    def __iter__(self) -> Iterator[CarriedRow]:
        return map(self._rows.__getitem__, self._bases)

    @property
    def count(self) -> int:
        """Return how many messages are carried."""
        return sum(row.count for row in self._rows.values())

    def add(self, row: CarriedRow) -> None:
        """Add a row; older ones that begin inside it are replaced."""
        first = bisect_left(self._bases, row.base_offset)
        last = bisect_left(self._bases, row.end_offset)
        self.remove([self._rows[base] for base in self._bases[first:last]])
        insort(self._bases, row.base_offset)
        self._rows[row.base_offset] = row
        self.bytes += row.length

    def remove(self, rows: Iterable[CarriedRow]) -> None:
        """Forget rows; those that were replaced meanwhile stay."""
        gone = [row for row in rows if self._rows.get(row.base_offset) is row]
        for row in gone:
            del self._rows[row.base_offset]
            self.bytes -= row.length
        if len(gone) == 1:
            del self._bases[bisect_left(self._bases, gone[0].base_offset)]
        elif gone:
            self._bases = sorted(self._rows)

    def find(self, offset: int) -> CarriedRow | None:
        """Return the row that holds `offset`."""
        row = next(self.rows_from(offset), None)
        return row if row is not None and row.base_offset <= offset else None

    def rows_from(self, offset: int) -> Iterator[CarriedRow]:
        """Walk over the rows from the one that holds `offset`, or from the next one."""
        bases = self._bases
        for number in range(max(0, bisect_right(bases, offset) - 1), len(bases)):
            # A thread may walk here while a row is removed.
            row = self._rows.get(bases[number]) if number < len(bases) else None
            if row is not None and row.end_offset > offset:
                yield row


class Carried:
    """The carried messages of all topics, by topic number.

    >>> carried = Carried()
    >>> carried.has(1, 17)
    False
    """

    def __init__(self) -> None:
        self.by_topic: dict[int, TopicCarried] = {}

    def apply(self, entry: Entry, body: memoryview | bytes) -> None:
        """Fold one CARRIED entry."""
        topic = self.by_topic.setdefault(entry.topic - CARRIED_TOPIC, TopicCarried())
        for head in entry_heads(body):
            topic.add(
                CarriedRow(
                    head.base_offset, head.count, head.time_ms, entry.index, head.position,
                    head.length,
                )
            )  # fmt: skip

    def has(self, topic: int, offset: int) -> bool:
        """Tell whether a message is carried."""
        carried = self.by_topic.get(topic)
        return carried is not None and carried.find(offset) is not None

    def missing(self, topic: int, ranges: Iterable[Range]) -> list[Range]:
        """Return what of `ranges` is not carried.

        >>> Carried().missing(1, [(3, 5)])
        [(3, 5)]
        """
        found: list[Range] = []
        for start, end in ranges:
            for row in self.rows_from(topic, start):
                if row.base_offset >= end:
                    break
                if start < row.base_offset:
                    found.append((start, row.base_offset))
                start = row.end_offset
            if start < end:
                found.append((start, end))
        return found

    def rows_from(self, topic: int, offset: int) -> Iterator[CarriedRow]:
        """Walk over the rows of a topic from `offset` on."""
        carried = self.by_topic.get(topic)
        return iter(()) if carried is None else carried.rows_from(offset)

    def count_of(self, topic: int) -> int:
        """Return how many messages of a topic are carried."""
        carried = self.by_topic.get(topic)
        return 0 if carried is None else carried.count

    @property
    def bytes(self) -> int:
        """Return the size of all that is carried."""
        return sum(carried.bytes for carried in self.by_topic.values())

    def remove(self, topic: int, rows: list[CarriedRow]) -> None:
        """Forget rows that nobody needs, or whose segment is gone."""
        if (carried := self.by_topic.get(topic)) is not None:
            carried.remove(rows)
            if not len(carried):
                del self.by_topic[topic]

    def forget_topic(self, topic: int) -> None:
        """Forget a topic that ended."""
        self.by_topic.pop(topic, None)

    def in_indexes(self, first: int, end: int) -> dict[int, list[CarriedRow]]:
        """Return, by topic, the rows that lie in entries with an index in [first, end)."""
        found = {
            topic: [row for row in carried if first <= row.index < end]
            for topic, carried in self.by_topic.items()
        }
        return {topic: rows for topic, rows in found.items() if rows}

    def save(self) -> dict[int, list[CarriedRow]]:
        """Return what a checkpoint keeps."""
        return {topic: list(carried) for topic, carried in self.by_topic.items()}

    @classmethod
    def load(cls, saved: dict[int, list[CarriedRow]]) -> Carried:
        """Return what `save` saved."""
        carried = cls()
        for topic, rows in saved.items():
            of_topic = carried.by_topic[topic] = TopicCarried()
            for row in rows:
                of_topic.add(row)
        return carried
