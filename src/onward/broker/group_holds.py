"""Groups that one client keeps to itself: `group.hold`.

    free ──hold──▶ held ──▶ free: its connection closed, or the group was deleted

A pipeline keeps its progress in its own checkpoint, so two that use one group would finish what the
other has not done. Who holds a group is alone: nobody joins it, holds it or advances it, but for
those who speak for the member that the holder named: a pipeline has many processes. This is in
memory only and ends with the connection: a client that comes back over another one, before the
broker saw the old one end, is known by its id and takes the hold over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec

from onward.broker.group_moves import find_sharing
from onward.broker.replies import Operation, reply
from onward.errors import Conflict, InvalidRequest, Overloaded
from onward.protocol.payloads import Number, decode_fields

if TYPE_CHECKING:
    from onward.broker.broker import Broker
    from onward.broker.session import Session

HOLDER_CHARACTERS_MAX = 200
HOLDS_PER_SESSION_MAX = 1_000


class GroupHold(msgspec.Struct, frozen=True):
    """`group.hold`: keep a group to this connection; `holder` says to people who that is."""

    group: str
    holder: Annotated[str, msgspec.Meta(min_length=1, max_length=HOLDER_CHARACTERS_MAX)]
    id: Number = 0
    """Names the client, whatever connection it has; 0: only the connection counts."""
    member: Annotated[str, msgspec.Meta(max_length=HOLDER_CHARACTERS_MAX)] = ""
    """Who advances the group under this name speaks for the holder."""


class Hold(NamedTuple):
    """Who holds a group."""

    session: Session
    holder: str
    id: int
    member: str


class GroupHolds:
    """All groups of a broker that somebody holds."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._by_group: dict[str, Hold] = {}
        self.operations: dict[str, Operation] = {"group.hold": self._hold}

    def holder_of(self, group: str) -> str:
        """Return who holds a group, for people; empty when nobody does."""
        hold = self._by_group.get(group)
        return "" if hold is None else hold.holder

    def check_free(
        self, group: str, *, but_for: Session | None = None, member: str = ""
    ) -> None:  # fmt: skip
        """Raise `Conflict` when somebody else holds a group, and not for this member."""
        hold = self._by_group.get(group)
        if hold is None or hold.session is but_for:
            return
        if not member or hold.member != member:
            raise Conflict(f"group {group!r} is used by {hold.holder}")

    def forget(self, session: Session) -> None:
        """A connection is gone, and with it what it held."""
        for group in [name for name, hold in self._by_group.items() if hold.session is session]:
            del self._by_group[group]

    def forget_group(self, group: str) -> None:
        """A group was deleted."""
        self._by_group.pop(group, None)

    def _hold(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        wanted = decode_fields(payload, GroupHold)
        if not wanted.holder.isprintable():
            raise InvalidRequest("who holds a group is said in printable characters")
        group = find_sharing(self._broker, wanted.group).record.name
        hold = self._by_group.get(group)
        if hold is None or not wanted.id or hold.id != wanted.id:
            self.check_free(group, but_for=session)
        members = self._broker.consuming.members_of(group)
        if members:
            raise Conflict(
                f"group {group!r} has members, such as {members[0].name!r}: "
                f"it can be held when it has none"
            )
        held = self._by_group.items()
        others = sum(one.session is session for name, one in held if name != group)
        if others >= HOLDS_PER_SESSION_MAX:
            raise Overloaded(f"a connection holds at most {HOLDS_PER_SESSION_MAX} groups")
        self._by_group[group] = Hold(session, wanted.holder, wanted.id, wanted.member)
        reply(session, request_id, {"group": group})
