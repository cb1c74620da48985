"""What the members of one connection have finished and start, sent together.

    member 1: finished, starts ──┐
    member 2: finished, starts ──┼──next write──▶ PROGRESS ──SETTLED──▶ each member is told
    member 3: starts           ──┘

With many members on one connection, frames for each of their messages cost more than the messages.
So all that they report in one iteration of the loop is one frame, with one answer. A connection
with one member, or with a broker that does not know PROGRESS, uses ACK and STARTED.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from onward.delivery.ranges import Ranges
from onward.errors import OnwardError
from onward.protocol.deliveries import (
    FINISHED,
    PROGRESS_SINCE_REVISION,
    STARTS,
    Row,
    Step,
    decode_settled,
    decode_settled_steps,
    progress_frame,
)
from onward.protocol.frames import Kind
from onward.protocol.payloads import decode_error

if TYPE_CHECKING:
    from onward.client.link import Link

ROWS_MAX = 10_000

Refused = dict[int, Ranges]
"""What the broker refused, by lease."""


class Settles(Protocol):
    """A member that waits for the answer to a frame."""

    def settled(self, sent: Sent, refused: Refused) -> None:
        """Take the answer: all is done, except what was refused."""

    def failed(self, sent: Sent, error: OnwardError) -> None:
        """Take an error as the answer."""


class Sent:
    """A frame that has no answer yet, and the members that wait for it."""

    __slots__ = ("_is_shared", "_link", "_members", "request_id", "sent_at")

    def __init__(self, link: Link, *, is_shared: bool = False) -> None:
        self._link = link
        self._is_shared = is_shared
        self._members: dict[Settles, int] = {}
        self.sent_at = link.loop.time()
        self.request_id = link.expect(self._answered)

    def add(self, member: Settles, consumer_id: int) -> None:
        """Let a member have its part of the answer."""
        self._members[member] = consumer_id

    def forget(self, member: Settles) -> None:
        """Let a member have no answer."""
        self._members.pop(member, None)
        if not self._members:
            self._link.forget(self.request_id)

    def _answered(self, kind: int, payload: bytes | bytearray) -> None:
        self._link.forget(self.request_id)
        if kind != Kind.SETTLED:
            error = decode_error(payload)
            for member in list(self._members):
                member.failed(self, error)
        elif not payload:
            for member in list(self._members):
                member.settled(self, {})
        else:
            refused = self._refused(payload)
            for member, consumer_id in list(self._members.items()):
                member.settled(self, refused.get(consumer_id, {}))

    def _refused(self, payload: bytes | bytearray) -> dict[int, Refused]:
        if self._is_shared:
            steps = decode_settled_steps(payload)
            rows = [(consumer_id, *row) for consumer_id, _, *row in steps]
        else:
            (consumer_id,) = self._members.values()
            rows = [(consumer_id, *row) for row in decode_settled(payload)]
        refused: dict[int, Refused] = {}
        for consumer_id, lease, start, end in rows:
            refused.setdefault(consumer_id, {}).setdefault(lease, Ranges()).add(start, end)
        return refused


class Progress:
    """Rows of the next PROGRESS of one connection."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._rows: list[Step] = []
        self._sent: Sent | None = None

    @property
    def has_rows(self) -> bool:
        """Return True if rows wait for the next write."""
        return bool(self._rows)

    @property
    def is_shared(self) -> bool:
        """Return True if members of this connection report together."""
        link = self._link
        return link.member_count > 1 and link.welcome.revision >= PROGRESS_SINCE_REVISION

    def finished(self, member: Settles, consumer_id: int, rows: list[Row]) -> Sent:
        """Add what a member has finished; return the frame that brings it its answer."""
        if len(self._rows) + len(rows) > ROWS_MAX:
            self.close()
        if self._sent is None:
            self._sent = Sent(self._link, is_shared=True)
        self._sent.add(member, consumer_id)
        self._rows += [(consumer_id, FINISHED, *row) for row in rows]
        self._link.flush_soon()
        return self._sent

    def started(self, consumer_id: int, rows: list[Row]) -> None:
        """Add what a member starts."""
        if len(self._rows) + len(rows) > ROWS_MAX:
            self.close()
        self._rows += [(consumer_id, STARTS, *row) for row in rows]
        self._link.flush_soon()

    def close(self) -> None:
        """Make a frame of all rows; it leaves with the next write."""
        rows, self._rows = self._rows, []
        sent, self._sent = self._sent, None
        if rows:
            self._link.collect(progress_frame(0 if sent is None else sent.request_id, rows))
