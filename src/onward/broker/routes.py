"""Where publishes go: the front of a PUBLISH frame, and what was found out about it.

The front (durability and name) is the same for each publish to a topic. So it is looked at once,
and what it means is kept, until any topic changes or ends, or a commit is refused. Kept are only
topics that can be written: whatever else a name means is found out each time.
"""

from __future__ import annotations

from typing import Final

from onward.broker.catalogue import Catalogue, Topic, TopicRecord
from onward.errors import InvalidName, InvalidRequest
from onward.message.names import is_system_name
from onward.protocol.payloads import Durability, decode_publish
from onward.schedule.state import SCHEDULE_TOPIC

# About 200 bytes each; with fewer than topics in use most publishes would go the long way.
ROUTES_MAX: Final = 131_072

Route = tuple[Topic, int, int]
"""The topic, the durability, and where the batch begins."""


class Routes:
    """What the fronts of publishes mean."""

    def __init__(self, catalogue: Catalogue, *, default: Durability) -> None:
        self.known: dict[bytes, Route] = {}
        self._catalogue = catalogue
        self._default = default

    def find(self, payload: bytes | bytearray) -> Route:
        """Return where a publish goes. A topic that cannot be written now has number 0."""
        front = payload[: 4 + payload[1]] if len(payload) > 4 else b""
        route = self.known.get(front if type(front) is bytes else bytes(front))
        if route is not None:
            return route
        asked, name, start = decode_publish(payload)
        if is_system_name(name) and name != SCHEDULE_TOPIC:
            raise InvalidName(f"topic {name!r} belongs to the system: nobody publishes to it")
        durability = self._durability(asked)
        topic = self._catalogue.by_name.get(name)
        if name == SCHEDULE_TOPIC:
            # Not kept: each batch to it is looked at.
            return topic or _unwritten(name), durability, start
        if topic is None or not topic.is_open:
            # Nothing is created or refused before it is known that this is no repeat.
            return _unwritten(name), durability, start
        route = topic, durability, start
        self.keep(payload, route)
        return route

    def keep(self, payload: bytes | bytearray, route: Route) -> None:
        """Remember where publishes go that begin as this one."""
        if len(self.known) >= ROUTES_MAX:
            self.known.clear()
        self.known[bytes(payload[: route[2]])] = route

    def forget(self) -> None:
        """Find everything out anew: something has changed."""
        self.known.clear()

    def _durability(self, asked: int) -> int:
        if asked <= Durability.DISK:
            return asked
        if asked == Durability.DEFAULT:
            return self._default
        if asked == Durability.QUORUM:
            raise InvalidRequest("durability 'quorum' needs a cluster; this node stands alone")
        raise InvalidRequest(f"durability {asked} does not exist")


def _unwritten(name: str) -> Topic:
    return Topic(TopicRecord(number=0, name=name))
