"""Handlers of the operations on dead letters: list, redrive to their own group, purge.

A redriven dead letter is delivered again to its group only, and its attempts start again; a purged
one is forgotten. Offsets of a range that are not dead are left alone.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import partial
from heapq import nsmallest
from itertools import islice
from typing import TYPE_CHECKING, Literal

from onward.broker.futures import future_of
from onward.broker.group_ranges import rows_of
from onward.broker.operations.dispatch import answers
from onward.broker.operations.group_moves import find_sharing, find_topic
from onward.delivery.ranges import merged, ranges_of
from onward.delivery.share import DeadLetter, Share
from onward.errors import InvalidRequest
from onward.protocol.operations.dead_letters import (
    DeadLetterChoice,
    DeadLetterCount,
    DeadLetterPage,
    ListDeadLetters,
    ListedDeadLetter,
    PurgeDeadLetters,
    RedriveDeadLetters,
)
from onward.protocol.operations.topics import LIST_PAGE_MAX

if TYPE_CHECKING:
    from onward.broker.broker import Broker


class DeadLetterOperations:
    """Lists, redrives and purges dead letters."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    @answers(ListDeadLetters)
    async def list_letters(self, request: ListDeadLetters) -> DeadLetterPage:
        """Return a page of dead letters in the order of topic and offset."""
        shares = self._shares(request.group, request.topic)
        limit = min(request.limit, LIST_PAGE_MAX)
        after = request.after or ("", -1)
        letters = (
            _listed(share.topic, letter)
            for share in shares
            for letter in _letters_after(share, after, limit + 1)
        )
        page = list(islice(letters, limit))
        # One more than the page: it tells whether there is a next one.
        has_more = next(letters, None) is not None
        return DeadLetterPage(
            dead=page,
            next=(page[-1].topic, page[-1].offset) if has_more else None,
            count=sum(share.dead_count for share in shares),
        )

    @answers(RedriveDeadLetters)
    async def redrive(self, request: RedriveDeadLetters) -> DeadLetterCount:
        """Deliver dead letters again whose messages are still stored."""
        return await self._settle(request, did="redriven")

    @answers(PurgeDeadLetters)
    async def purge(self, request: PurgeDeadLetters) -> DeadLetterCount:
        """Forget dead letters."""
        return await self._settle(request, did="purged")

    async def _settle(
        self, request: DeadLetterChoice, *, did: Literal["redriven", "purged"]
    ) -> DeadLetterCount:
        if (request.ranges is not None) == request.all:
            raise InvalidRequest("say which dead letters: either ranges, or all")
        if request.ranges is not None and not request.topic:
            raise InvalidRequest("ranges of dead letters need a topic")
        chosen = {
            share.topic: _chosen(share, request)
            for share in self._shares(request.group, request.topic)
        }
        chosen_count = sum(map(len, chosen.values()))
        if did == "redriven":
            chosen = {topic: self._stored(topic, offsets) for topic, offsets in chosen.items()}
        count = sum(map(len, chosen.values()))
        if count and not request.dry_run:
            now_ms = self._broker.clock.now_ms()
            rows = [
                row
                for topic, offsets in chosen.items()
                for row in rows_of(did, request.group, topic, ranges_of(offsets), at_ms=now_ms)
            ]
            await future_of(partial(self._broker.consuming.record, rows))
        return DeadLetterCount(count, chosen_count - count)

    def _shares(self, name: str, topic: str) -> list[Share]:
        """Return the shares of one topic or of all of them, in the order of their topics."""
        group = find_sharing(self._broker, name)
        if topic:
            find_topic(self._broker, group, topic)
            return [group.shares[topic]] if topic in group.shares else []
        return [share for _, share in sorted(group.shares.items())]

    def _stored(self, name: str, offsets: list[int]) -> list[int]:
        """Return the offsets whose messages can still be read."""
        topic = self._broker.catalogue.by_name.get(name)
        if topic is None:
            return offsets
        first = bisect_left(offsets, topic.first_offset)
        carried = self._broker.log.carried
        return [one for one in offsets[:first] if carried.has(topic.number, one)] + offsets[first:]


def _chosen(share: Share, request: DeadLetterChoice) -> list[int]:
    """Return the dead offsets of a share that a request chooses."""
    offsets = sorted(share.dead)
    if request.ranges is None:
        return offsets
    return [
        offset
        for start, end in merged(request.ranges)
        for offset in offsets[bisect_left(offsets, start) : bisect_left(offsets, end)]
    ]


def _letters_after(share: Share, after: tuple[str, int], limit: int) -> list[DeadLetter]:
    topic, offset = after
    if share.topic < topic:
        return []
    first = offset if share.topic == topic else -1
    later = (one for one in share.dead if one > first)
    return [share.dead[one] for one in nsmallest(limit, later)]


def _listed(topic: str, letter: DeadLetter) -> ListedDeadLetter:
    return ListedDeadLetter(
        topic=topic,
        offset=letter.offset,
        cause=letter.cause,
        attempts=letter.attempts,
        member=letter.member,
        died_at_ms=letter.died_at_ms,
    )
