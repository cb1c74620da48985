"""Telling a member that nothing more is ready for it: `member.served`.

    asked ──▶ the group is served ──▶ looks into the log and reads from the disk end ──▶ answered

Frames keep their order, so the answer stands behind every message that was ready: a member that
gave credit, asked and got nothing knows that there was nothing. A group that delivers at most once
sends a message when it is durably finished; the answer waits for that, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from onward.broker.crew import Crew, Member
from onward.broker.replies import Operation, reply_when_done
from onward.errors import Overloaded
from onward.protocol.payloads import decode_fields

if TYPE_CHECKING:
    from onward.broker.consume import Consuming
    from onward.broker.session import Session

SERVED_WAITS_MAX = 1_000
"""How many questions of one group may wait for their answer."""


class MemberServed(msgspec.Struct, frozen=True):
    """`member.served`: answered when all that is ready for a consumer of this connection is sent.

    The consumer must have credit for it.
    """

    consumer: int


class Served:
    """Answers `member.served`."""

    def __init__(self, consuming: Consuming) -> None:
        self._consuming = consuming
        self.operations: dict[str, Operation] = {"member.served": self._ask}

    def _ask(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        consumer_id = decode_fields(payload, MemberServed).consumer
        member = self._consuming.members_on(session).get(consumer_id)
        done = reply_when_done(session, request_id, dict)
        if member is None:
            done(None)  # a membership that has just ended gets nothing more
            return
        waits = member.crew.served_waits
        if len(waits) >= SERVED_WAITS_MAX:
            name = member.crew.group.record.name
            raise Overloaded(f"group {name!r} has {SERVED_WAITS_MAX} such questions under way")
        waits.append((member, done))
        self._consuming.serve_soon(member.crew)

    def answer(self, crew: Crew) -> None:
        """Answer after a group was served, unless a look or a read that is under way brings more.

        The end of either serves the group again.
        """
        if crew.reads or any(source.is_looking for source in crew.sources.values()):
            return
        waits, crew.served_waits = crew.served_waits, []
        for _, done in waits:
            if crew.group.record.at_most_once:
                self._consuming.outcomes.when_durable(done)
            else:
                done(None)

    def forget(self, member: Member) -> None:
        """Answer a member that leaves."""
        crew = member.crew
        waits, crew.served_waits = crew.served_waits, []
        for waiting in waits:
            if waiting[0] is member:
                waiting[1](None)
            else:
                crew.served_waits.append(waiting)
