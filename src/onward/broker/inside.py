"""The broker as a client of itself: who publishes from inside, and gets the receipt as a call.

It stands where a session stands in the write path: what it publishes is collected, committed and
answered like everything else.
"""

from __future__ import annotations

from collections.abc import Callable

from onward.broker.permissions import BROKER
from onward.errors import OnwardError
from onward.protocol.payloads import RECEIPT, Hello

Receipt = Callable[[int, OnwardError | None], None]
"""Called once: with the first offset, or with why nothing was stored."""


class Inside:
    """Takes the receipts of publishes that come from inside."""

    is_paused = False
    is_closed = False
    principal = BROKER
    hello: Hello | None = None

    def __init__(self) -> None:
        self.unanswered_bytes = 0
        self.repeats_waiting = 0
        self.held_sequences: dict[int, int] = {}
        self._waiting: dict[int, Receipt] = {}
        self._next_id = 1

    def expect(self, done: Receipt) -> int:
        """Return a request id whose receipt goes to `done`."""
        request_id = self._next_id
        self._next_id = request_id % 0xFFFF_FFFF + 1
        self._waiting[request_id] = done
        return request_id

    def write(self, receipts: bytes) -> None:
        """Take receipts, as a session would send them."""
        for _, request_id, offset, _, _ in RECEIPT.iter_unpack(receipts):
            self._waiting.pop(request_id)(offset, None)

    def refuse(self, request_id: int, error: OnwardError) -> None:
        """Take the news that nothing was stored."""
        self._waiting.pop(request_id)(0, error)

    def keep_reading(self) -> None:
        """Nothing is read from here."""

    def note_plain(self) -> None:
        """Nothing of this takes the fast path."""
