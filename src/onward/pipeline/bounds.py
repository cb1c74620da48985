"""From what options say to offsets: which topics, from where, to where. Asked of the broker.

    topic | topicPattern ──▶ names ──▶ ends of each ──▶ offsets of a bound

A time is the offset of the first message published at or after it, or the topic's end when there
is none. An offset that a topic does not have any more is not an error here: what to do about lost
messages is decided where they are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from onward.errors import InvalidRequest, OffsetOutOfRange, UnknownTopic
from onward.pipeline.options import EARLIEST, LATEST, Bound, SourceOptions

if TYPE_CHECKING:
    from onward.client.sync import SyncClient
    from onward.protocol.operations.pipeline import TopicEnd

TOPICS_MAX = 10_000
"""A read of more topics would not fit into the offsets that Spark keeps."""
ASKED_MAX = 1_000
"""Topics that one request asks for."""
_TRIES = 10


def topics_of(mq: SyncClient, options: SourceOptions) -> list[str]:
    """Return the names of the topics to read; there is at least one."""
    found = matching(mq, options)
    if not found:
        raise UnknownTopic(f"no topic matches the pattern {options.pattern!r}")
    return found


def matching(mq: SyncClient, options: SourceOptions) -> list[str]:
    """Return the names of the topics to read, of a pattern perhaps none.

    A pattern finds the topics of users; system topics are read by their names.
    """
    if options.pattern is None:
        return list(options.topics)
    pattern = re.compile(options.pattern)
    found = [one.topic for one in mq.topics() if pattern.fullmatch(one.topic)]
    if len(found) > TOPICS_MAX:
        raise InvalidRequest(
            f"{len(found)} topics match the pattern {options.pattern!r}; {TOPICS_MAX} are the most"
        )
    return found


def ends_of(mq: SyncClient, topics: Iterable[str]) -> dict[str, TopicEnd]:
    """Return where topics begin and end now."""
    names = list(topics)
    found: dict[str, TopicEnd] = {}
    for at in range(0, len(names), ASKED_MAX):
        found |= mq.topic_ends(dict.fromkeys(names[at : at + ASKED_MAX], -1))
    return found


def topics_now(mq: SyncClient, options: SourceOptions) -> dict[str, TopicEnd]:
    """Return the topics to read and where they are; one of a pattern may end at any moment."""
    for _ in range(_TRIES):
        names = topics_of(mq, options)
        try:
            return ends_of(mq, names)
        except UnknownTopic:
            if options.pattern is None:
                raise
    raise UnknownTopic(f"topics of the pattern {options.pattern!r} end faster than they are found")


def cursors_of(mq: SyncClient, group: str, topics: Iterable[str]) -> dict[str, int]:
    """Return how far a group is with each of the topics, all of which it must consume."""
    cursors = {share.topic: share.cursor for share in mq.group(group).topics}
    for topic in topics:
        if topic not in cursors:
            raise InvalidRequest(f"group {group!r} does not consume topic {topic!r}")
    return {topic: cursors[topic] for topic in topics}


def offsets_of(
    mq: SyncClient, bound: Bound, ends: Mapping[str, TopicEnd], *, group: str | None, missing: str
) -> dict[str, int]:
    """Return a bound as an offset of each topic; `missing` is for topics it says nothing of."""
    if bound.word == "group":
        assert group is not None, "options without a group have no bound of that name"
        return cursors_of(mq, group, ends)
    if bound.time_ms is not None:
        return {topic: offset_at(mq, topic, bound.time_ms, end) for topic, end in ends.items()}
    named = {"earliest": EARLIEST, "latest": LATEST}
    word = bound.word or missing
    return {
        topic: _checked(topic, bound.offsets.get(topic, named[word]), end)
        for topic, end in ends.items()
    }


def offset_at(mq: SyncClient, topic: str, time_ms: int, end: TopicEnd) -> int:
    """Return the offset of the first message published at or after a time."""
    if end.first_offset >= end.next_offset:
        return end.next_offset
    try:
        moment = datetime.fromtimestamp(time_ms / 1000, tz=UTC)
    except (OverflowError, ValueError, OSError):
        return end.next_offset
    reader = mq.read(topic, start=moment)
    batches = reader.batches()
    try:
        batch = next(batches, None)
    finally:
        batches.close()  # type: ignore[attr-defined]  # it is a generator
    return end.next_offset if batch is None else min(batch.first_offset, end.next_offset)


def _checked(topic: str, offset: int, end: TopicEnd) -> int:
    if offset == EARLIEST:
        return end.first_offset
    if offset == LATEST:
        return end.next_offset
    if offset > end.next_offset:
        raise OffsetOutOfRange(
            f"offset {offset} of topic {topic!r} does not exist: it ends at {end.next_offset}"
        )
    return offset
