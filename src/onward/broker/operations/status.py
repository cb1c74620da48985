"""Handlers of the operations on the node itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from onward.broker.operations.dispatch import answers
from onward.protocol.operations.status import NodeStatus, ShowStatus

if TYPE_CHECKING:
    from onward.broker.broker import Broker


class StatusOperations:
    """Describes the node."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    @answers(ShowStatus)
    async def status(self, request: ShowStatus) -> NodeStatus:
        """Return the state of the node in numbers."""
        return msgspec.convert(self._broker.status(), NodeStatus)
