"""Handlers of the operations on copies of a node."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Protocol

from onward.broker.futures import future_of
from onward.broker.operations.dispatch import answers
from onward.broker.requester import Requester
from onward.broker.state import LineageRecord
from onward.errors import InvalidRequest, Stopping
from onward.protocol.operations.replicas import (
    OpenSnapshot,
    Promote,
    Promoted,
    ReplicationStatus,
    ShowReplication,
    Snapshot,
    StepDown,
    SteppedDown,
)

if TYPE_CHECKING:
    from onward.broker.broker import Broker


class ReplicaControl(Protocol):
    """What follows a source for this node: see `onward.cluster.replica`."""

    def describe(self) -> ReplicationStatus:
        """Return the source, the lag and the state of the connection."""

    async def prepare_promotion(self, *, force: bool) -> bool:
        """Have the source step down and apply all it has; return True if it has confirmed that.

        Raises `Conflict` when the source answers and does not step down, unless forced.
        """

    async def close(self) -> None:
        """Follow no longer."""


class ReplicaOperations:
    """Describes, promotes and retires nodes."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    @answers(ShowReplication)
    async def status(self, request: ShowReplication) -> ReplicationStatus:
        """Return the role of the node, its lag and its replicas."""
        return self._broker.describe_replication()

    @answers(Promote)
    async def promote(self, request: Promote) -> Promoted:
        """Make this replica the leader of a new history."""
        # What follows uses timeouts, which need the task that a handler gets when it waits.
        await asyncio.sleep(0)
        broker = self._broker
        if broker.gate.is_stopping:
            raise Stopping("the broker is stopping")
        control = broker.replica
        if control is None and not broker.state.is_retired:
            raise InvalidRequest(f"node {broker.node} leads already: there is nothing to promote")
        stepped_down = False
        if control is not None:
            stepped_down = await control.prepare_promotion(force=request.force)
        elif not request.force:
            raise InvalidRequest(
                f"node {broker.node} has stepped down for another node; with force it leads again, "
                f"and the two histories part"
            )
        await broker.publishing.drain()
        record = LineageRecord(
            epoch=broker.state.lineage.epoch + 1,
            id=secrets.token_hex(6),
            node=broker.node,
            at_ms=broker.clock.now_ms(),
            source=broker.settings.replica.of,
        )
        # Before anything else is accepted: what this node writes belongs to the new history.
        await future_of(lambda done: broker.publishing.change_lineage(record, done=done))
        broker.replica = None
        await broker.lead()
        return Promoted(
            node=broker.node,
            lineage=broker.state.lineage,
            event_id=broker.state.lineage.since,
            source_stepped_down=stepped_down,
        )

    @answers(OpenSnapshot)
    async def open_snapshot(self, request: OpenSnapshot, requester: Requester) -> Snapshot:
        """Return the files of the log, which can be fetched on this connection."""
        return await self._broker.snapshots.open(requester)

    @answers(StepDown)
    async def step_down(self, request: StepDown) -> SteppedDown:
        """Retire this leader, durably; a node that has retired already replies the same."""
        broker = self._broker
        if broker.replica is not None or not broker.state.is_retired:
            broker.gate.check(even_when_full=True)
        await broker.retire(successor=request.successor)
        return SteppedDown(event_id=broker.log.next_index - 1)
