"""Waiting for topics to have more messages: `topic.wait`.

    waiting ──▶ one of the topics has more than is known, or the time is over
       └──────▶ one of the topics ended

Nothing is polled: each topic has the futures of those who wait for it, and a commit that adds
messages looks at these only.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping

from onward.broker.catalogue import Topic
from onward.broker.requester import Requester
from onward.errors import Overloaded, TopicEnded

WAITS_PER_REQUESTER_MAX = 100


class TopicWaits:
    """Requests that wait for topics to have more."""

    def __init__(self) -> None:
        self._count_of: Counter[Requester] = Counter()

    async def wait(self, requester: Requester, ends: Mapping[Topic, int], *, wait_ms: int) -> None:
        """Return when a topic has more than its offset in `ends`, or after `wait_ms`."""
        if self._count_of[requester] >= WAITS_PER_REQUESTER_MAX:
            raise Overloaded(f"a connection waits {WAITS_PER_REQUESTER_MAX} times at once at most")
        loop = asyncio.get_running_loop()
        news: asyncio.Future[TopicEnded | None] = loop.create_future()
        timer = loop.call_later(wait_ms / 1000, _resolve, news)
        self._count_of[requester] += 1
        for topic, end in ends.items():
            if topic.watches is None:
                topic.watches = {}
            topic.watches[news] = end
        try:
            error = await news
        finally:
            timer.cancel()
            self._forget(requester, news, ends)
        if error is not None:
            raise error

    def _forget(
        self,
        requester: Requester,
        news: asyncio.Future[TopicEnded | None],
        ends: Mapping[Topic, int],
    ) -> None:
        for topic in ends:
            assert topic.watches is not None, "it holds this one at least"
            del topic.watches[news]
            topic.watches = topic.watches or None
        self._count_of[requester] -= 1
        if not self._count_of[requester]:
            del self._count_of[requester]

    def wake(self, topic: Topic) -> None:
        """Answer those who know less of a topic than it has now."""
        for news, end in (topic.watches or {}).items():
            if topic.next_offset > end:
                _resolve(news)

    def end_topic(self, topic: Topic, reason: str) -> None:
        """Tell those who wait for a topic that it has ended."""
        for news in topic.watches or ():
            _resolve(news, TopicEnded(f"topic {topic.name!r} was {reason}"))


def _resolve(news: asyncio.Future[TopicEnded | None], error: TopicEnded | None = None) -> None:
    if not news.done():
        news.set_result(error)
