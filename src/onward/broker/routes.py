"""Where publishes go: the front of a PUBLISH frame, and the topic and durability that it names.

The front (durability and name) is the same for each publish of a principal to a topic. So it is
resolved and its permission is checked once, and the route is kept until any topic changes or ends,
or a commit is refused. A route belongs to one principal: it says nothing about what others may do.
Only routes to topics that can be written are kept; a refused publish is checked again each time.
"""

from __future__ import annotations

from typing import Final

from onward.broker.catalogue import Catalogue, Topic, TopicRecord
from onward.broker.permissions import Policy
from onward.errors import InvalidName, InvalidRequest
from onward.message.names import is_system_name
from onward.protocol.operations import operation_of
from onward.protocol.payloads import Durability, decode_publish
from onward.schedule.state import SCHEDULE_TOPIC

# Of all principals together, about 200 bytes each. With fewer routes than topics in use, most
# publishes would be resolved anew.
ROUTES_MAX: Final = 131_072

Route = tuple[Topic, int, int]
"""The topic, the durability, and where the batch begins."""
RoutesByFront = dict[bytes, Route]
NO_ROUTES: Final[RoutesByFront] = {}
"""No routes are known, or none may be used for the fast path; nothing is ever added here."""


class Routes:
    """The routes of all principals."""

    def __init__(self, catalogue: Catalogue, *, default: Durability, policy: Policy) -> None:
        self._catalogue = catalogue
        self._default = default
        self._policy = policy
        self._by_principal: dict[str, RoutesByFront] = {}
        """One for each principal that has connected: no more than there are tokens."""
        self._count = 0

    def of(self, principal: str) -> RoutesByFront:
        """Return the known routes of a principal: the same object for as long as the node runs."""
        return self._by_principal.setdefault(principal, {})

    def find(self, principal: str, payload: bytes | bytearray) -> Route:
        """Return the route of a publish; raise `Forbidden` if the principal may not write there.

        A topic that cannot be written now has the number 0.
        """
        front = payload[: 4 + payload[1]] if len(payload) > 4 else b""
        known = self._by_principal.get(principal, NO_ROUTES)
        route = known.get(front if type(front) is bytes else bytes(front))
        if route is not None:
            return route
        publish = decode_publish(payload)
        name, start = publish.topic, publish.batch_at
        if name == SCHEDULE_TOPIC:
            # Not kept: each batch is checked for the topics that its messages are for.
            return self._schedule_topic(), self._durability(publish.durability), start
        if is_system_name(name):
            raise InvalidName(f"topic {name!r} belongs to the system: nobody publishes to it")
        self._policy.check(principal, operation_of(publish), publish)
        durability = self._durability(publish.durability)
        topic = self._catalogue.by_name.get(name)
        if topic is None or not topic.is_open:
            # Nothing is created or refused before it is known that this is no repeat.
            return _unwritten(name), durability, start
        route = topic, durability, start
        self.keep(principal, payload, route)
        return route

    def keep(self, principal: str, payload: bytes | bytearray, route: Route) -> None:
        """Keep a route that `find` has permitted, for publishes that begin in the same way."""
        if self._count >= ROUTES_MAX:
            self.forget()
        self._count += 1
        self.of(principal)[bytes(payload[: route[2]])] = route

    def forget(self) -> None:
        """Forget the routes of all principals, because a topic or a permission has changed."""
        # Sessions hold these dicts: they are emptied, never replaced.
        for known in self._by_principal.values():
            known.clear()
        self._count = 0

    def _schedule_topic(self) -> Topic:
        return self._catalogue.by_name.get(SCHEDULE_TOPIC) or _unwritten(SCHEDULE_TOPIC)

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
