"""Who may do what. The dispatcher asks before each operation, sessions before READ and CONSUME.

The permission of a PUBLISH is checked when its route is resolved (`routes`), and kept for publishes
of the same principal that begin in the same way. A batch of scheduled messages is checked for each
topic that a message is for. What the broker does by itself (`BROKER`) is never refused.

Tokens carry no scopes yet, so every principal that is known may do everything. Whoever adds scopes
changes `Policy.allows` alone: nothing else decides about permissions. A policy whose answers change
while the broker runs must have the routes forgotten (`Routes.forget`).
"""

from __future__ import annotations

from typing import Final

from onward.errors import Forbidden
from onward.message.names import NAME_CHARACTERS_MAX
from onward.protocol.operations import Operation
from onward.protocol.operations.operation import EVERYTHING, Action, Resource

BROKER: Final = "@broker"
"""The principal of the broker itself. No token has a name that begins with `@`."""


class Policy:
    """Decides which principal may do what to which topic or group."""

    def allows(self, principal: str, action: Action, resource: Resource, name: str) -> bool:
        """Return True if `principal` may do `action` to the topic or group `name` (`*`: to all).

        >>> Policy().allows("ann", "write", "topic", "orders")
        True
        """
        return True

    def check(self, principal: str, operation: Operation, request: object) -> None:
        """Raise `Forbidden` for the first permission that an operation needs and does not have."""
        for action, resource, name in operation.resources(request):
            self.require(principal, action, resource, name)

    def require(self, principal: str, action: Action, resource: Resource, name: str) -> None:
        """Raise `Forbidden` unless `principal` may do `action` to the topic or group `name`."""
        if principal != BROKER and not self.allows(principal, action, resource, name):
            raise Forbidden(_refusal(principal, action, resource, name))


def _refusal(principal: str, action: Action, resource: Resource, name: str) -> str:
    whom = repr(principal) if principal else "an anonymous client"
    if resource == "node":
        return f"{whom} has no permission to administer this node"
    # The name was not checked yet: it may be of any length.
    shown = name[:NAME_CHARACTERS_MAX]
    what = f"all {resource}s" if name == EVERYTHING else f"{resource} {shown!r}"
    return f"{whom} has no permission to {action} {what}"
