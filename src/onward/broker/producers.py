"""Which publishes are stored already: so that a repeat is answered, not stored again.

Each producer has an id and numbers its batches. Of each producer the last `WINDOW` sequences are
remembered with the offset and event id they were given, as a ring in one packed array:

    | highest sequence | last used (index) | sequence+1, offset, event id | ... WINDOW times |

`last used` is that of its first moment while nothing of it is stored, and is brought up to date
only for a checkpoint: what else it would be stands in the ring.

While a batch is on its way to the disk, its offset is `UNDER_WAY`: a repeat then waits for it. Its
event id is that of the one before it in its place: so a ring tells whether it ever held something.

A client never has more than `WINDOW` unanswered sequences, so every repeat it can send is found.
Like the catalogue this is a fold of the log, and survives a restart. At most `PRODUCERS_MAX`
producers are remembered; the ones that were silent longest are forgotten first.
"""

from __future__ import annotations

from array import array

import msgspec

from onward.errors import Conflict, InvalidRequest
from onward.message.batch import batches_of
from onward.message.entry import Entry, Kind
from onward.schedule.state import FIRED

WINDOW = 32
PRODUCERS_MAX = 16_384
SEQUENCE_MAX = 1 << 62
UNDER_WAY = 2**64 - 1
"""Instead of an offset: begun, and not stored yet."""
WINDOW_HEAD = 2
_EMPTY = array("Q", bytes(8 * (WINDOW_HEAD + 3 * WINDOW)))


class Producers:
    """The windows of all producers."""

    def __init__(self) -> None:
        self.windows: dict[int, array[int]] = {}
        self.last_event_id = 0

    def __len__(self) -> int:
        return len(self.windows)

    def find(self, producer_id: int, sequence: int) -> tuple[int, int] | None:
        """Return where a publish is stored, offset and event id; None when it is new.

        The offset is `UNDER_WAY` when it has no answer yet. Raises `Conflict` when it is older than
        what is remembered. Nothing is taken note of: what is new may still be refused.
        """
        if sequence > SEQUENCE_MAX:
            raise InvalidRequest(f"sequence {sequence} is too large")
        window = self.windows.get(producer_id)
        if window is None:
            return None
        slot = WINDOW_HEAD + sequence % WINDOW * 3
        if window[slot] == sequence + 1:
            return window[slot + 1], window[slot + 2]
        if sequence + WINDOW <= window[0]:
            raise Conflict(
                f"sequence {sequence} is older than the last {WINDOW} of its producer: "
                f"whether it was stored is no longer known"
            )
        return None

    def begin(self, producer_id: int, sequence: int) -> None:
        """Take note that a publish, which `find` did not find, is on its way to the disk."""
        window = self.windows.get(producer_id) or self._new_window(producer_id)
        if sequence > window[0]:
            window[0] = sequence
        slot = WINDOW_HEAD + sequence % WINDOW * 3
        window[slot] = sequence + 1
        window[slot + 1] = UNDER_WAY

    def give_up(self, producer_id: int, sequence: int) -> None:
        """Take back `begin`: it was not stored. A producer who never stored anything is forgotten.

        One who did is not, even when nothing is left in the ring: that its old ones are old, and
        not new, is known by its highest sequence alone.
        """
        window = self.windows.get(producer_id)
        slot = WINDOW_HEAD + sequence % WINDOW * 3
        if window is not None and window[slot] == sequence + 1 and window[slot + 1] == UNDER_WAY:
            window[slot] = window[slot + 1] = 0
            if not any(window[WINDOW_HEAD::3]) and not any(window[WINDOW_HEAD + 2 :: 3]):
                del self.windows[producer_id]

    def record(self, producer_id: int, sequence: int, offset: int, event_id: int) -> None:
        """Remember where a publish went."""
        window = self.windows.get(producer_id) or self._new_window(producer_id)
        if sequence > window[0]:
            window[0] = sequence
        self.last_event_id = event_id
        slot = WINDOW_HEAD + sequence % WINDOW * 3
        window[slot] = sequence + 1
        window[slot + 1] = offset
        window[slot + 2] = event_id

    def apply(self, entry: Entry, body: memoryview | bytes) -> None:
        """Fold one entry."""
        if entry.kind != Kind.MESSAGES:
            return
        offset = entry.base_offset
        for _, header in batches_of(body, 0, entry.body_bytes):
            if header.producer_id and header.producer_id != FIRED:
                self.record(header.producer_id, header.sequence, offset, entry.index)
            offset += header.count

    def save(self) -> bytes:
        """Return all of it as bytes, for a checkpoint."""
        return msgspec.msgpack.encode(
            {key: _without_begun(window).tobytes() for key, window in self.windows.items()}
        )

    @classmethod
    def load(cls, saved: bytes) -> Producers:
        """Return what `save` saved; empty bytes give none."""
        producers = cls()
        if saved:
            for key, packed in msgspec.msgpack.decode(saved, type=dict[int, bytes]).items():
                window = array("Q")
                window.frombytes(packed)
                if len(window) == len(_EMPTY):
                    producers.windows[key] = window
                    producers.last_event_id = max(producers.last_event_id, _last_used(window))
        return producers

    def _new_window(self, producer_id: int) -> array[int]:
        if len(self.windows) >= PRODUCERS_MAX:
            self._forget_silent()
        window = self.windows[producer_id] = _EMPTY[:]
        window[1] = self.last_event_id
        return window

    def _forget_silent(self) -> None:
        """Forget the eighth that was silent longest: once in a while, not for each newcomer."""
        oldest = sorted(self.windows, key=lambda key: _last_used(self.windows[key]))
        for key in oldest[: PRODUCERS_MAX // 8]:
            del self.windows[key]


def _last_used(window: array[int]) -> int:
    """Return the event id of the last that a producer stored, or that came before its first."""
    return max(window[1], *window[WINDOW_HEAD + 2 :: 3])


def _without_begun(window: array[int]) -> array[int]:
    """Return the window without what is under way: a checkpoint holds only what is stored."""
    window = window[:]
    window[1] = _last_used(window)
    if UNDER_WAY in window:
        for slot in range(WINDOW_HEAD, len(window), 3):
            if window[slot + 1] == UNDER_WAY:
                # The event id stays: it tells that something was stored.
                window[slot] = window[slot + 1] = 0
    return window
