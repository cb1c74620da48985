"""What nobody can look at any more: stretches of offsets that neither the log nor a lake has.

A reconciliation proves something about messages it has seen. What retention took before any lake
had it was not seen: it is named, with its offsets, unless its neighbours show that it was published
at another time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from onward.client.sync import SyncClient
from onward.errors import OffsetOutOfRange
from onward.pipeline.lake import open_lake
from onward.pipeline.lake_read import look, others_of
from onward.pipeline.lake_state import Gap, LakeState
from onward.pipeline.place import Place, open_client
from onward.pipeline.report import Gone
from onward.pipeline.window import Window
from onward.protocol.operations.topics import TopicDescription

GONE_SAID_MAX = 20


def find_gone(place: Place, topics: Sequence[str], window: Window, lake: str | None) -> list[Gone]:
    """Return what may be of the window and is neither in the lake nor in the log."""
    opened = None if lake is None else open_lake(lake)
    with open_client(place, name="spark-reconcile") as mq:
        state, live = look(mq, opened, topics)
        alone = others_of(topics, live, state)
        return [
            gone
            for topic in topics
            if topic in live
            for gone in gone_of(
                live[topic], LakeState() if topic in alone else state, window,
                time_of=partial(_time_of, mq, topic),
            )
        ]  # fmt: skip


def _time_of(mq: SyncClient, topic: str, offset: int) -> int | None:
    try:
        return mq.get(topic, offset).published_at_ms
    except OffsetOutOfRange:
        return None


def gone_of(
    topic: TopicDescription,
    state: LakeState,
    window: Window,
    *,
    time_of: Callable[[int], int | None],
) -> list[Gone]:
    """Return the stretches of a topic that are gone, but for those of another time.

    When they were published is known only by their neighbours; where these leave it open, a
    stretch counts as one of the window. `time_of` tells when a message of the log was published.

    >>> orders = TopicDescription(topic="orders", number=1, state="active", first_offset=7)
    >>> gone_of(orders, LakeState(), Window(None, 9_000), time_of=lambda offset: None)
    [Gone(topic='orders', first=0, end=7)]
    """
    gaps, end = list(state.gaps.get(topic.topic, ())), state.end_of(topic.topic)
    if topic.first_offset > end:
        gaps.append(Gap(topic.topic, end, topic.first_offset))
    return [
        Gone(gap.topic, gap.first, gap.end)
        for gap in gaps
        if not _is_later(gap, topic, state, window)
        and not _is_earlier(gap, topic, state, window, time_of)
    ]


def _is_later(gap: Gap, topic: TopicDescription, state: LakeState, window: Window) -> bool:
    files = state.files.get(gap.topic, ())
    before = [file.last_published_at_ms for file in files if file.end <= gap.first]
    return max([topic.created_at_ms, *before[-1:]]) >= window.until_ms


def _is_earlier(
    gap: Gap,
    topic: TopicDescription,
    state: LakeState,
    window: Window,
    time_of: Callable[[int], int | None],
) -> bool:
    if window.since_ms is None:
        return False
    files = state.files.get(gap.topic, ())
    after = [file.first_published_at_ms for file in files if file.first >= gap.end]
    next_ms = after[0] if after else time_of(max(gap.end, topic.first_offset))
    return next_ms is not None and next_ms < window.since_ms


def say_gone(gone: Sequence[Gone]) -> list[str]:
    """Return a sentence for each stretch that is gone.

    >>> say_gone([Gone("orders", 0, 650_000)])[0].partition(":")[0]
    "650,000 messages of topic 'orders' are unchecked (offsets 0 to 649999)"
    """
    said = [
        f"{one.messages:,} message{'' if one.messages == 1 else 's'} of topic {one.topic!r} "
        f"{'is' if one.messages == 1 else 'are'} unchecked (offsets {one.first} to {one.end - 1}): "
        "removed by retention, in no lake that was asked, perhaps of the window"
        for one in gone[:GONE_SAID_MAX]
    ]
    rest = gone[GONE_SAID_MAX:]
    if rest:
        said.append(
            f"{sum(one.messages for one in rest):,} more messages are unchecked, in "
            f"{len(rest):,} more stretches"
        )
    return said
