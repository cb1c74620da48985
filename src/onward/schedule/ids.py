"""Where ids are found that wait no longer: when each was due, and for which topic.

    scheduled-START-END-LAST.ids    numbers START to END, all due at or before LAST (milliseconds)

Such a file is written with the runs of the same numbers, and has the layout of a run without pages:
its table of numbers holds every message of the stretch, also those that had fired already. Runs
forget what has fired; these files remember it until the log has nothing of that time any more.

A file is complete under its name, and it follows from the log. One that reaches beyond what the
checkpoint names as built is removed at a start: its numbers are built again.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from onward.errors import Corruption
from onward.log.disk import Disk
from onward.schedule.run import Run, Waiting
from onward.schedule.writer import RunWriter

_NAME: Final = re.compile(r"scheduled-(\d+)-(\d+)-(-?\d+)\.ids\Z", re.ASCII)
SUFFIXES: Final = (".ids", ".ids.tmp")


class IdsFile(NamedTuple):
    """What the name of a file says."""

    start: int
    end: int
    last_ms: int
    name: str


class IdsWriter:
    """Writes the file of a stretch of numbers, in bounded memory."""

    def __init__(self, disk: Disk, folder: str) -> None:
        self._disk = disk
        self._folder = folder
        self._writer: RunWriter | None = None
        self._start = self._last_ms = 0

    def add(self, numbers: Sequence[int], at_ms: Sequence[int], topics: Sequence[str]) -> None:
        """Take columns of messages, in the order of their numbers."""
        if not numbers:
            return
        if self._writer is None:
            self._start, self._last_ms = numbers[0], max(at_ms)
            self._writer = RunWriter(self._disk, f"{self._folder}/scheduled-{self._start}.ids")
        self._last_ms = max(self._last_ms, max(at_ms))
        self._writer.add_numbers(numbers, at_ms, topics)

    def finish(self, *, end: int) -> str:
        """Make the file complete and durable; return its name, or nothing without a message."""
        if self._writer is None:
            return ""
        name = f"scheduled-{self._start}-{end}-{self._last_ms}.ids"
        self._writer.path = f"{self._folder}/{name}"
        self._writer.finish(start=self._start, end=end)
        return name

    def abandon(self) -> None:
        """Remove what was written; after `finish` this does nothing."""
        if self._writer is not None:
            self._writer.abandon()


class Ids:
    """All such files of a folder. They are opened for each question: there may be many."""

    def __init__(self, disk: Disk, folder: str) -> None:
        self._disk = disk
        self._folder = folder
        self._files: list[IdsFile] = []

    def open(self, names: Iterable[str], *, built_end: int) -> None:
        """Take the files of a folder; remove those that no checkpoint stands for."""
        for name in names:
            file = _file_of(name)
            if file is not None and file.end <= built_end:
                self._files.append(file)
            elif name.startswith("scheduled-") and name.endswith(SUFFIXES):
                self._disk.remove(f"{self._folder}/{name}")

    def add(self, name: str) -> None:
        """Take a file that was just written."""
        if (file := _file_of(name)) is not None:
            self._files.append(file)

    def forget(self, *, oldest_ms: int) -> None:
        """Remove what was due before the log begins: nothing of it is in a topic any more."""
        for file in [one for one in self._files if one.last_ms < oldest_ms]:
            self._files.remove(file)
            self._disk.remove(f"{self._folder}/{file.name}")

    def places(self, numbers: Sequence[int]) -> dict[int, Waiting]:
        """Return when and where to each number was due, as far as that is known; they ascend.

        >>> from onward.log.memory_disk import MemoryDisk
        >>> disk, ids = MemoryDisk(), Ids(MemoryDisk(), "log")
        >>> ids.places([7])
        {}
        """
        places: dict[int, Waiting] = {}
        for file in self._files:
            wanted = numbers[bisect_left(numbers, file.start) : bisect_left(numbers, file.end)]
            if wanted:
                places |= self._places_in(file, wanted)
        return places

    def _places_in(self, file: IdsFile, numbers: Sequence[int]) -> dict[int, Waiting]:
        try:
            run = Run.open(self._disk, f"{self._folder}/{file.name}")
        except (FileNotFoundError, Corruption):
            # It says where to look, nothing else: without it the answer has no offset.
            return {}
        try:
            found = map(run.place_of, numbers)
            return {place.number: place for place in found if place is not None}
        except Corruption:
            return {}
        finally:
            run.close()


def _file_of(name: str) -> IdsFile | None:
    match = _NAME.match(name)
    if match is None:
        return None
    start, end, last_ms = map(int, match.groups())
    return IdsFile(start, end, last_ms, name)
