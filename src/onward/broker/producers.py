"""Which publishes are stored already: so that a repeat is answered, not stored again.

Each producer has an id and numbers its batches. Of each producer the last `WINDOW` sequences are
remembered with the offset and event id they were given, as a ring in one packed array:

    | highest sequence | last used (index) | sequence+1, offset, event id | ... WINDOW times |

A client never has more than `WINDOW` unanswered sequences, so every repeat it can send is found.
Like the catalogue this is a fold of the log, and survives a restart. At most `PRODUCERS_MAX`
producers are remembered; the ones that were silent longest are forgotten first.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import msgspec

from onward.errors import Conflict
from onward.message.entry import Entry, Kind
from onward.message.batch import batches_of

WINDOW = 32
PRODUCERS_MAX = 16_384
_HEAD = 2
_EMPTY = array("Q", bytes(8 * (_HEAD + 3 * WINDOW)))


class Stored(NamedTuple):
    """Where an earlier publish went."""

    offset: int
    event_id: int


class Producers:
    """The windows of all producers."""

    def __init__(self) -> None:
        self._windows: dict[int, array[int]] = {}

    def __len__(self) -> int:
        return len(self._windows)

    def find(self, producer_id: int, sequence: int) -> Stored | None:
        """Return where this publish is stored, or None when it is new.

        Raises `Conflict` when it is older than what is remembered.
        """
        window = self._windows.get(producer_id)
        if window is None or sequence > window[0]:
            return None
        slot = _HEAD + sequence % WINDOW * 3
        if window[slot] == sequence + 1:
            return Stored(window[slot + 1], window[slot + 2])
        if sequence + WINDOW <= window[0]:
            raise Conflict(
                f"sequence {sequence} is older than the last {WINDOW} of its producer: "
                f"whether it was stored is no longer known"
            )
        return None

    def record(self, producer_id: int, sequence: int, offset: int, event_id: int) -> None:
        """Remember where a publish went."""
        window = self._windows.get(producer_id)
        if window is None:
            if len(self._windows) >= PRODUCERS_MAX:
                self._forget_silent()
            window = self._windows[producer_id] = _EMPTY[:]
        if sequence > window[0]:
            window[0] = sequence
        window[1] = event_id
        slot = _HEAD + sequence % WINDOW * 3
        window[slot] = sequence + 1
        window[slot + 1] = offset
        window[slot + 2] = event_id

    def apply(self, entry: Entry, body: memoryview) -> None:
        """Fold one entry."""
        if entry.kind != Kind.MESSAGES:
            return
        offset = entry.base_offset
        for _, header in batches_of(body, 0, entry.body_bytes):
            if header.producer_id:
                self.record(header.producer_id, header.sequence, offset, entry.index)
            offset += header.count

    def save(self) -> bytes:
        """Return all of it as bytes, for a checkpoint."""
        return msgspec.msgpack.encode({key: w.tobytes() for key, w in self._windows.items()})

    @classmethod
    def load(cls, saved: bytes) -> Producers:
        """Return what `save` saved; empty bytes give none."""
        producers = cls()
        if saved:
            for key, packed in msgspec.msgpack.decode(saved, type=dict[int, bytes]).items():
                window = array("Q")
                window.frombytes(packed)
                if len(window) == len(_EMPTY):
                    producers._windows[key] = window
        return producers

    def _forget_silent(self) -> None:
        """Forget the eighth that was silent longest: once in a while, not for each newcomer."""
        oldest = sorted(self._windows, key=lambda key: self._windows[key][1])
        for key in oldest[: PRODUCERS_MAX // 8]:
            del self._windows[key]
