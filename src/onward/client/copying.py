"""Copies are asked for in the order of their calls, whatever has to be asked again.

    called ──▶ its turn: all that were called before it have asked ──▶ asked ──▶ answered
                  ▲                                                      │
                  └── refused for now, copied in part, or the connection was lost

Each producer id has a line of its own. A broker that refused a copy for now refuses those behind it
as well, until the first of them comes again; so who is in the line keeps its place until it has the
whole answer, and several may be under way without one overtaking another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile

from onward.errors import NotConnected, OnwardError

PAUSE_S_MIN = 0.02


class Place:
    """The place of one call in its line."""

    def __init__(self, line: CopyLine) -> None:
        self._line = line
        self.is_asked = False
        self.late: OnwardError = NotConnected("a copy found no broker in time")
        """What to say when the time is over."""

    @property
    def is_next(self) -> bool:
        """Tell whether all calls before this one have asked."""
        before = takewhile(lambda one: one is not self, self._line.places)
        return all(one.is_asked for one in before)

    async def turn(self) -> None:
        """Return when all calls before this one have asked."""
        while not self.is_next:
            self._line.moved.clear()
            await self._line.moved.wait()

    def ask(self) -> None:
        """Let those behind come: this one asks now."""
        self.is_asked = True
        self._line.moved.set()


class CopyLine:
    """The calls under one producer id."""

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.moved = asyncio.Event()


class CopyLines:
    """The lines of all producer ids under which a client copies."""

    def __init__(self) -> None:
        self._by_id: dict[int, CopyLine] = {}

    @contextmanager
    def place(self, producer_id: int) -> Iterator[Place]:
        """Stand in line until the end of the block."""
        line = self._by_id.setdefault(producer_id, CopyLine())
        place = Place(line)
        line.places.append(place)
        try:
            yield place
        except BaseException:
            # Who hears of it may want to end those behind as well: before they have their turn.
            asyncio.get_running_loop().call_soon(self._leave, producer_id, place)
            raise
        self._leave(producer_id, place)

    def _leave(self, producer_id: int, place: Place) -> None:
        line = self._by_id[producer_id]
        line.places.remove(place)
        line.moved.set()
        if not line.places:
            del self._by_id[producer_id]
