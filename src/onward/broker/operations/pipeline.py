"""Handlers of the operations of pipelines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onward.broker.group_ranges import outside
from onward.broker.operations.dispatch import answers
from onward.broker.requester import Requester
from onward.broker.topic_copies import TopicCopies
from onward.protocol.operations.pipeline import (
    CopiedBatches,
    CopyBatches,
    EntryPage,
    ListEntries,
    TopicEnd,
    TopicEnds,
    TopicEntry,
    WaitForTopics,
)

if TYPE_CHECKING:
    from onward.broker.broker import Broker


class PipelineOperations:
    """Waits for topics, lists entries and copies batches."""

    def __init__(self, broker: Broker) -> None:
        self._catalogue = broker.catalogue
        self._log = broker.log
        self._waits = broker.topic_waits
        self._copies = TopicCopies(broker)

    @answers(WaitForTopics)
    async def wait(self, request: WaitForTopics, requester: Requester) -> TopicEnds:
        """Return where topics begin and end; first wait until one has more than is known."""
        ends = {self._catalogue.find_readable(name): end for name, end in request.ends.items()}
        for topic in ends:
            topic.uses += 1
        if request.wait_ms and all(topic.next_offset <= end for topic, end in ends.items()):
            await self._waits.wait(requester, ends, wait_ms=request.wait_ms)
        return TopicEnds({one.name: TopicEnd(one.first_offset, one.next_offset) for one in ends})

    @answers(ListEntries)
    async def entries(self, request: ListEntries) -> EntryPage:
        """Return a page of entries from the index; no message is read."""
        topic = self._catalogue.find_readable(request.topic)
        if not topic.first_offset <= request.start <= topic.next_offset:
            raise outside(topic, request.start)
        end = min(request.end, topic.next_offset)
        rows = self._log.entries(topic.number, request.start, end_offset=end, limit=request.limit)
        return EntryPage([TopicEntry(*row) for row in rows])

    @answers(CopyBatches)
    async def copy(self, request: CopyBatches, requester: Requester) -> CopiedBatches:
        """Publish batches of one topic to another and return when they are durable."""
        return await self._copies.copy(request, requester)
