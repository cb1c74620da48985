"""Whoever sends requests to a broker: a connection, the broker itself, a copy between topics.

Handlers of operations and the write path know a requester by this protocol only, so HTTP and gRPC
can be requesters, too.
"""

from __future__ import annotations

from typing import Protocol

from onward.errors import OnwardError
from onward.protocol.payloads import Hello


class Requester(Protocol):
    """Sends requests and publishes, and receives their answers."""

    principal: str
    """Whose token it authenticated with; empty where no tokens are configured; or `BROKER`."""
    hello: Hello | None
    """How the program introduced itself; None inside the broker."""
    unanswered_bytes: int
    """The size of its publishes that have no receipt yet."""
    repeats_waiting: int
    """How many batches it sent again that wait for the commit of the first."""
    held_sequences: dict[int, int]
    """By producer id the last sequence that was refused for now: later ones wait for it."""

    @property
    def is_paused(self) -> bool:
        """True while nothing is read from it because too much is unanswered."""

    @property
    def is_closed(self) -> bool:
        """True once nobody is left to receive an answer."""

    def write(self, frames: bytes, /) -> None:
        """Send whole frames: receipts of publishes."""

    def refuse(self, request_id: int, error: OnwardError) -> None:
        """Answer a request or a publish with an error."""

    def keep_reading(self) -> None:
        """Read on, or stop reading, as the size of what is unanswered demands."""

    def note_plain(self) -> None:
        """Decide anew whether its publishes may take the fast path."""
