"""Waiting for topics to have more: `topic.wait`.

    asked ──▶ answered at once, when one of the topics has more than was named, or nothing to wait
      └─────▶ waiting ──▶ answered: one has more, or the time is over
                  └─────▶ refused: one of the topics ended; forgotten: the session closed

Nothing is polled: each topic knows who waits for it, and a commit that brings more looks there
only. Who waits costs one small object, and a timer.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import msgspec

from onward.broker.catalogue import Topic
from onward.broker.replies import Operation, reply
from onward.errors import Overloaded, TopicEnded
from onward.protocol.payloads import decode_fields

if TYPE_CHECKING:
    from onward.broker.broker import Broker
    from onward.broker.session import Session

WAIT_MS_MAX = 60_000
TOPICS_MAX = 1_000
WAITS_PER_SESSION_MAX = 100

End = Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)]


class TopicWait(msgspec.Struct, frozen=True):
    """`topic.wait`: where topics begin and end, once one has more than its offset in `ends`."""

    ends: Annotated[dict[str, End], msgspec.Meta(max_length=TOPICS_MAX)]
    wait_ms: Annotated[int, msgspec.Meta(ge=0, le=WAIT_MS_MAX)] = 0


class Watch:
    """One `topic.wait` that has no answer yet."""

    __slots__ = ("ends", "request_id", "session", "timer")

    def __init__(self, session: Session, request_id: int, ends: dict[Topic, int]) -> None:
        self.session = session
        self.request_id = request_id
        self.ends = ends
        self.timer: asyncio.TimerHandle | None = None


class TopicWaits:
    """All who wait for topics to have more."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._loop = asyncio.get_running_loop()
        self._open: dict[Session, dict[Watch, None]] = {}
        self.operations: dict[str, Operation] = {"topic.wait": self._ask}

    def _ask(self, session: Session, request_id: int, payload: bytes | bytearray) -> None:
        wanted = decode_fields(payload, TopicWait)
        catalogue = self._broker.catalogue
        ends = {catalogue.find_readable(name): end for name, end in wanted.ends.items()}
        for topic in ends:
            topic.uses += 1
        watch = Watch(session, request_id, ends)
        if not wanted.wait_ms or any(topic.next_offset > end for topic, end in ends.items()):
            self._answer(watch)
            return
        watches = self._open.setdefault(session, {})
        if len(watches) >= WAITS_PER_SESSION_MAX:
            raise Overloaded(f"a connection waits {WAITS_PER_SESSION_MAX} times at once at most")
        watches[watch] = None
        for topic in ends:
            if topic.watches is None:
                topic.watches = {}
            topic.watches[watch] = None
        watch.timer = self._loop.call_later(wanted.wait_ms / 1000, self._finish, watch)

    def wake(self, topic: Topic) -> None:
        """New messages are there."""
        for watch in list(topic.watches or ()):
            if topic.next_offset > watch.ends[topic]:
                self._finish(watch)

    def end_topic(self, topic: Topic, reason: str) -> None:
        """Tell who waits for a topic that it is no more."""
        for watch in list(topic.watches or ()):
            self._forget(watch)
            error = TopicEnded(f"topic {topic.name!r} was {reason}")
            watch.session.refuse(watch.request_id, error)

    def forget(self, session: Session) -> None:
        """Drop everything a closed session waits for."""
        for watch in list(self._open.get(session, ())):
            self._forget(watch)

    def _finish(self, watch: Watch) -> None:
        self._forget(watch)
        self._answer(watch)

    def _answer(self, watch: Watch) -> None:
        topics = {one.name: [one.first_offset, one.next_offset] for one in watch.ends}
        reply(watch.session, watch.request_id, {"topics": topics})

    def _forget(self, watch: Watch) -> None:
        if watch.timer is not None:
            watch.timer.cancel()
        for topic in watch.ends:
            if topic.watches is not None:
                topic.watches.pop(watch, None)
                topic.watches = topic.watches or None
        watches = self._open.get(watch.session, {})
        watches.pop(watch, None)
        if not watches:
            self._open.pop(watch.session, None)
