"""What a reconciliation found, as plain values: what the job counts and the page shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

LISTED_MAX = 100
"""Messages, or ranges of them, in each list; the numbers above it count all."""


class Verdicts(NamedTuple):
    """How many messages ended how, each counted once per group."""

    acked: int = 0
    filtered: int = 0
    skipped: int = 0
    retrying: int = 0
    dead: int = 0
    undelivered: int = 0
    """Not finished, and nothing is told of it yet: it waits, or a member has it right now."""
    missing: int = 0
    """The group is past it, and nothing tells why: it is lost."""

    @property
    def settled(self) -> int:
        """How many are done with."""
        return self.acked + self.filtered + self.skipped

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


class GroupLine(NamedTuple):
    """How one group did with one topic."""

    topic: str
    group: str
    verdicts: Verdicts
    repeated: int = 0
    slow: int = 0
    p50_ms: int | None = None
    p95_ms: int | None = None
    p99_ms: int | None = None
    """From the publish to the ack."""


class Bar(NamedTuple):
    """The messages that were published in one step of time."""

    at_ms: int
    verdicts: Verdicts


class Found(NamedTuple):
    """A message that somebody should look at, or a range of them up to and with `last`."""

    topic: str
    offset: int
    group: str
    published_at_ms: int
    """Of the first one."""
    what: str = ""
    member: str = ""
    cause: str = ""
    took_ms: int | None = None
    """From the publish to the ack; of a range, of the slowest one, whose member it names."""
    last: int | None = None

    @property
    def messages(self) -> int:
        """How many they are."""
        return 1 if self.last is None else self.last - self.offset + 1


class Gone(NamedTuple):
    """Messages [first, end) that were removed before anybody held them against the groups."""

    topic: str
    first: int
    end: int

    @property
    def messages(self) -> int:
        """How many they are."""
        return self.end - self.first


class Report(NamedTuple):
    """Everything that the page shows."""

    servers: str
    since_ms: int | None
    until_ms: int
    made_at_ms: int
    published: int
    slow_ms: int
    lines: Sequence[GroupLine] = ()
    bars: Sequence[Bar] = ()
    bar_ms: int = 60_000
    undelivered: Sequence[Found] = ()
    missing: Sequence[Found] = ()
    retrying: Sequence[Found] = ()
    dead: Sequence[Found] = ()
    slow: Sequence[Found] = ()
    repeated: Sequence[Found] = ()
    gone: Sequence[Gone] = ()
    notes: Sequence[str] = ()
    node: str = ""
    """Which broker it was, whatever its address is."""
    version: str = ""
    options: str = ""
    """What was asked for, as on the command line."""

    @property
    def verdicts(self) -> Verdicts:
        """All groups together."""
        return add_all(line.verdicts for line in self.lines)

    @property
    def slow_total(self) -> int:
        """How many were slow, in all groups."""
        return sum(line.slow for line in self.lines)

    @property
    def repeated_total(self) -> int:
        """How many messages were acked again, in all groups."""
        return sum(line.repeated for line in self.lines)

    @property
    def unchecked(self) -> int:
        """How many messages may be of the window and could not be looked at."""
        return sum(gone.messages for gone in self.gone)

    @property
    def is_settled(self) -> bool:
        """Tell whether every message was looked at, and is done with in every group."""
        total = self.verdicts
        return total.settled == total.total and not self.unchecked


def add_all(verdicts: Iterable[Verdicts]) -> Verdicts:
    """Return the sum, kind by kind.

    >>> add_all([Verdicts(acked=1), Verdicts(acked=2, dead=1)])
    Verdicts(acked=3, filtered=0, skipped=0, retrying=0, dead=1, undelivered=0, missing=0)
    """
    sums = [0] * len(Verdicts._fields)
    for one in verdicts:
        sums = [total + part for total, part in zip(sums, one, strict=True)]
    return Verdicts(*sums)
