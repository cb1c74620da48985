"""Who gets the next grant, and how much: members with credit wait in line.

Each grant goes to the first in line, who then stands at its end. It is sized by what is ready and
by how many wait, so that a hundred members on a thousand messages all get work, and one that is
alone gets as much as it has asked for. Members without credit are not in line: they cost nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Final, Generic, TypeVar

GRANT_MAX: Final = 10_000

Member = TypeVar("Member", bound=Hashable)


class Turns(Generic[Member]):
    """The members of a group, and whose turn it is.

    >>> turns = Turns[str]()
    >>> turns.add("ann", credit=100)
    >>> turns.add("bob", credit=3)
    >>> turns.next_grant(10)
    ('ann', 5)
    >>> turns.used("ann", 5)
    >>> turns.next_grant(5)
    ('bob', 3)
    """

    __slots__ = ("_credits", "_line")

    def __init__(self) -> None:
        self._credits: dict[Member, int] = {}
        # Not a dict: looking for the first of one that loses its first again and again is slow.
        self._line: OrderedDict[Member, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._credits)

    def __contains__(self, member: object) -> bool:
        return member in self._credits

    def __iter__(self) -> Iterator[Member]:
        return iter(self._credits)

    @property
    def waiting_count(self) -> int:
        """How many members have credit."""
        return len(self._line)

    def waiting(self) -> Iterator[Member]:
        """Yield the members with credit, the first in line first."""
        return iter(self._line)

    def add(self, member: Member, *, credit: int = 0) -> None:
        """Let a member join, at the end of the line."""
        assert member not in self._credits, f"{member!r} is a member already"
        self._credits[member] = 0
        self.set_credit(member, credit)

    def remove(self, member: Member) -> None:
        """Let a member leave; for one that has left this means nothing."""
        self._credits.pop(member, None)
        self._line.pop(member, None)

    def credit_of(self, member: Member) -> int:
        """Return how many messages a member may still get; none when it has left."""
        return self._credits.get(member, 0)

    def set_credit(self, member: Member, credit: int) -> None:
        """Set what a member may still get; who has some already keeps its place in line."""
        if member not in self._credits:
            return
        self._credits[member] = credit = max(0, credit)
        if not credit:
            self._line.pop(member, None)
        elif member not in self._line:
            self._line[member] = None

    def give(self, member: Member, credit: int) -> None:
        """Let a member get so many more; a negative number takes back, never below 0."""
        self.set_credit(member, self.credit_of(member) + credit)

    def used(self, member: Member, count: int) -> None:
        """Note that a member got so many."""
        self.give(member, -count)

    def next_grant(self, ready: int, *, beside: int = 0) -> tuple[Member, int] | None:
        """Return who is next and how many at most; None when nothing is ready or nobody waits.

        `beside` is how many wait for the same in other lines. Whoever is named goes to the end of
        the line; `used` then says how many it really got.
        """
        if ready <= 0 or not self._line:
            return None
        member = next(iter(self._line))
        self._line.move_to_end(member)
        waiting = len(self._line) + beside
        share = -(-ready // waiting) if waiting > 1 else GRANT_MAX
        return member, min(self._credits[member], GRANT_MAX, share)
