"""The calls of a client about copies of a node: how they are, and who leads.

They are about the node that the client is connected to, so connect to one address: that of the
replica to promote, or of the leader that is to retire.
"""

from __future__ import annotations

from onward.client.asking import Asking
from onward.protocol.operations.replicas import (
    Promote,
    Promoted,
    ReplicationStatus,
    ShowReplication,
    StepDown,
    SteppedDown,
)

PROMOTION_WAIT_S = 90.0
"""A promotion waits for the source to step down, and for the events that are missing."""


class ReplicaCalls(Asking):
    """The calls of a client that are about replicas."""

    async def replication(self) -> ReplicationStatus:
        """Return the role of the node, its history, its lag and its replicas.

        >>> import asyncio
        >>> from onward import connect
        >>> async def main() -> str:
        ...     async with connect("memory:") as mq:
        ...         return (await mq.replication()).role
        >>> asyncio.run(main())
        'leader'
        """
        return await self._call(ShowReplication())

    async def promote(self, *, force: bool = False) -> Promoted:
        """Make the replica a leader, with a history of its own.

        Its source is asked to step down first; what the source has accepted until then is
        replicated before the replica leads. Raises `Conflict` when the source answers and does not
        step down, unless `force` is given: then what the source accepts from then on is lost. A
        source that does not answer counts as dead; what it had accepted and not yet replicated is
        lost. A node that has stepped down leads again with `force`.

        >>> import asyncio
        >>> from onward import connect
        >>> async def main() -> int:
        ...     async with connect("memory:") as mq:
        ...         await mq.step_down()
        ...         return (await mq.promote(force=True)).lineage.epoch
        >>> asyncio.run(main())
        1
        """
        return await self._call(Promote(force=force), wait_s=PROMOTION_WAIT_S)

    async def step_down(self) -> SteppedDown:
        """Retire the leader for good: it accepts no writes any more, also after a restart.

        A promotion does it by itself. Do it by hand before a planned move, or when another node
        was promoted while this one could not be reached.

        >>> import asyncio
        >>> from onward import connect
        >>> async def main() -> str:
        ...     async with connect("memory:") as mq:
        ...         await mq.step_down()
        ...         return (await mq.replication()).role
        >>> asyncio.run(main())
        'retired'
        """
        return await self._call(StepDown())
