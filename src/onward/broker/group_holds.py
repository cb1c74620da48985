"""Groups that one connection reserves for itself: `group.hold`.

    free ──hold──▶ held ──▶ free: its connection closed, or the group was deleted

A pipeline keeps its progress in its own checkpoint, so two that use one group would finish what the
other has not done. While a group is held, nobody else joins it, holds it or advances it, except in
the name of the member that the holder named: a pipeline has many processes. Holds are kept in
memory only and end with the connection. A client that reconnects before the broker saw the old
connection end is recognised by its id and takes the hold over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from onward.errors import Conflict, Overloaded

if TYPE_CHECKING:
    from onward.broker.broker import Broker
    from onward.broker.requester import Requester
    from onward.protocol.operations.groups import HoldGroup

HOLDS_PER_SESSION_MAX = 1_000


class Hold(NamedTuple):
    """Who holds a group."""

    requester: Requester
    holder: str
    id: int
    member: str


class GroupHolds:
    """All groups of a broker that somebody holds."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._by_group: dict[str, Hold] = {}

    def holder_of(self, group: str) -> str:
        """Return who holds a group, for people; empty when nobody does."""
        hold = self._by_group.get(group)
        return "" if hold is None else hold.holder

    def check_free(self, group: str, *, but_for: Requester | None = None, member: str = "") -> None:
        """Raise `Conflict` if another requester holds a group, and not for this member."""
        hold = self._by_group.get(group)
        if hold is None or hold.requester is but_for:
            return
        if not member or hold.member != member:
            raise Conflict(f"group {group!r} is used by {hold.holder}")

    def hold(self, request: HoldGroup, requester: Requester) -> None:
        """Reserve a group for a requester; raise `Conflict` if it is held or has members."""
        group = request.group
        hold = self._by_group.get(group)
        if hold is None or not request.id or hold.id != request.id:
            self.check_free(group, but_for=requester)
        members = self._broker.consuming.members_of(group)
        if members:
            raise Conflict(
                f"group {group!r} has members, such as {members[0].name!r}: "
                f"it can be held when it has none"
            )
        others = sum(
            hold.requester is requester for name, hold in self._by_group.items() if name != group
        )
        if others >= HOLDS_PER_SESSION_MAX:
            raise Overloaded(f"a connection holds at most {HOLDS_PER_SESSION_MAX} groups")
        self._by_group[group] = Hold(requester, request.holder, request.id, request.member)

    def forget(self, requester: Requester) -> None:
        """Release the groups that a closed connection held."""
        for group in [name for name, hold in self._by_group.items() if hold.requester is requester]:
            del self._by_group[group]

    def forget_group(self, group: str) -> None:
        """Release a group that was deleted."""
        self._by_group.pop(group, None)
