"""The backlog that retention drops, or may drop soon: counted and reported before and after.

    by age     a tenth of the topic's retention before the end of it: 1 h at most, 20 s at least
    by size    from nine tenths of the topic's `retention_bytes` or of `log.retention_bytes` on

Only what nobody was given counts: retries and dead letters outlive retention (`carry_over`). After
each round of retention `look` finds, for the topics whose groups are behind, the offset below
which messages may go next; it asks the functions that decide what goes, with limits that are
closer, and reads nothing but the index. How many messages of a group that is, is counted when
somebody asks: what was delivered since then does not count.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from onward.delivery.ranges import count_of
from onward.durations import format_duration
from onward.log.index import ROW, NewRows, Rows, RowsFile, TopicRows
from onward.log.retention import IsDead, Keep, expired, judge
from onward.log.segment import Segment

if TYPE_CHECKING:
    from onward.broker.broker import Broker
    from onward.broker.catalogue import Topic
    from onward.delivery.group import Group
    from onward.delivery.share import Share

logger = logging.getLogger("onward.retention")

HORIZON_PART = 10
HORIZON_MS_MIN = 20_000
"""Two rounds of retention: with less, messages could go before anybody was told."""
HORIZON_MS_MAX = 3_600_000
WARN_EVERY_MS = 3_600_000
WARNINGS_MAX = 20

Place = tuple[str, str]
"""A group and one of its topics."""


class _OpenPart(NamedTuple):
    """What the open segment holds of one topic."""

    bytes: int
    end_offset: int
    last_time_ms: int


class Undelivered:
    """Watches the backlog of all groups for one broker.

    >>> horizon_ms(7 * 86_400_000), horizon_ms(60_000)
    (3600000, 20000)
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._below: dict[int, int] = {}
        """By topic number: the offset below which retention may drop messages soon."""
        self._warned: dict[Place, int] = {}
        """When each group was last warned of, on the monotonic clock."""
        self.expiring_count = 0
        """Messages that retention may drop soon, of all groups, when that was last looked at."""
        self.dropped_count = 0
        """Messages that retention dropped since the start before a group was done with them."""

    # --- what others ask ---------------------------------------------------------------------

    def is_expiring(self, topic: Topic, offset: int) -> bool:
        """Tell whether retention may drop a message soon."""
        return offset < self._below.get(topic.number, 0)

    def expiring(self, share: Share) -> tuple[int, int]:
        """Return how many messages a group was never given that retention may drop soon.

        The second number is from when on it may drop the oldest of them, see `expires_at_ms`.
        """
        topic = self._broker.catalogue.by_name.get(share.topic)
        if topic is None:
            return 0, 0
        ranges = share.fresh_below(self._below.get(topic.number, 0))
        return (count_of(ranges), self.expires_at_ms(topic, ranges[0][0])) if ranges else (0, 0)

    def expires_at_ms(self, topic: Topic, offset: int) -> int:
        """Return from when on a message may be dropped for its age; 0: only for the size of all.

        It goes with its segment, so the last message of its topic in there decides.
        """
        keep_ms = topic.record.retention_ms or self._broker.settings.log.retention_ms
        span = self._broker.log.plan(topic.number, offset, bytes_max=0)
        if not keep_ms or span is None:
            return 0
        *_, rows = span.segment.rows_of(topic.number)
        at_ms = rows.row(rows.count - 1).time_ms + keep_ms
        return at_ms if at_ms <= self._broker.clock.now_ms() + horizon_ms(keep_ms) else 0

    def add_dropped(self, share: Share, count: int) -> None:
        """Count messages that retention dropped before a group was done with them."""
        share.dropped += count
        self.dropped_count += count

    # --- after each round of retention -------------------------------------------------------

    async def look(
        self, sealed: list[Segment], keeps: Mapping[int, Keep], unfinished: Mapping[int, int],
        *, is_dead: IsDead, is_needed: IsDead,
    ) -> None:  # fmt: skip
        """Find what may go next, and warn of it."""
        log, now_ms = self._broker.log, self._broker.clock.now_ms()
        groups = list(self._broker.consuming.groups.by_name.values())
        by_name = self._broker.catalogue.by_name
        behind = await self._broker.in_thread(lambda: _behind(groups, by_name))
        # Copied on the loop: these rows grow. There are never many, see `checkpoint_rows`.
        newest = {number: list(map(_copied, log.tail.new.rows_of(number))) for number in behind}
        runs, total_bytes = list(log.tail.runs), log.bytes
        bytes_max = _nine_tenths(self._broker.settings.log.retention_bytes)

        def find() -> dict[int, int]:
            open_ = {number: _open_part(runs, newest[number], number) for number in behind}
            sooner = {
                number: _sooner(keeps[number], part)
                for number, part in open_.items()
                if number in keeps
            }
            below = expired(sealed, sooner, unfinished=unfinished, now_ms=now_ms)
            for number, keep in sooner.items():
                part = open_[number]
                # The open segment can be closed at any time, and then goes as a whole.
                if part.end_offset and keep.ms and part.last_time_ms < now_ms - keep.ms:
                    below[number] = min(part.end_offset, unfinished.get(number, part.end_offset))
            too_big = judge(
                sealed if bytes_max and behind else [], is_dead=is_dead, is_needed=is_needed,
                bytes_max=bytes_max, total_bytes=total_bytes,
            )  # fmt: skip
            for segment in too_big.drop:
                for one in segment.summaries():
                    if one.topic in behind:
                        below[one.topic] = max(below.get(one.topic, 0), one.end_offset)
            return below

        self._below = await self._broker.in_thread(find)
        self._warn()

    def _warn(self) -> None:
        now_ms, warned, lines = self._broker.clock.monotonic_ms(), self._warned, 0
        self._warned, self.expiring_count = {}, 0
        for group, topic, (count, expires_at_ms) in self._all_expiring():
            self.expiring_count += count
            place = group, topic.name
            self._warned[place] = warned.get(place, now_ms)
            if place in warned and now_ms - warned[place] < WARN_EVERY_MS:
                continue
            self._warned[place] = now_ms
            lines += 1
            if lines <= WARNINGS_MAX:
                self._warn_of(group, topic, count, by_age=expires_at_ms > 0)
        if lines > WARNINGS_MAX:
            logger.warning(
                "%d more backlogs may be dropped by retention soon: see `onward groups`",
                lines - WARNINGS_MAX,
            )  # fmt: skip

    def _warn_of(self, group: str, topic: Topic, count: int, *, by_age: bool) -> None:
        keep_ms = topic.record.retention_ms or self._broker.settings.log.retention_ms
        within = f"within {format_duration(horizon_ms(keep_ms))}"
        logger.warning(
            "group %r: %d messages of topic %r may be dropped by retention %s, before they were "
            "delivered; raise the retention or set keep_unfinished",
            group, count, topic.name, within if by_age else "soon, for the size of the log",
        )  # fmt: skip

    def _all_expiring(self) -> Iterator[tuple[str, Topic, tuple[int, int]]]:
        """Yield each group and topic of which something may go soon, and what `expiring` says."""
        for number in self._below:
            topic = self._broker.catalogue.by_number.get(number)
            if topic is None:
                continue
            for group in self._broker.consuming.groups.of_topic(topic.name):
                share = group.shares.get(topic.name)
                if share is not None and (found := self.expiring(share))[0]:
                    yield group.record.name, topic, found


def horizon_ms(keep_ms: int) -> int:
    """Return how long before the end of a retention time messages count as expiring."""
    return min(max(keep_ms // HORIZON_PART, HORIZON_MS_MIN), HORIZON_MS_MAX)


def _behind(groups: list[Group], by_name: Mapping[str, Topic]) -> set[int]:
    """Return the topics that have messages which a group was never given. In a thread."""
    shares = (share for group in groups for share in list(group.shares.values()))
    return {
        topic.number
        for share in shares
        if (topic := by_name.get(share.topic)) is not None and share.head < topic.next_offset
    }


def _copied(rows: TopicRows) -> TopicRows:
    return rows._replace(buffer=bytes(rows.buffer))


def _open_part(runs: Sequence[Rows], newest: list[TopicRows], topic: int) -> _OpenPart:
    """Return what the open segment holds of a topic. In a thread."""
    size = end_offset = last_time_ms = 0
    for run in runs:
        summary = run.summary_of(topic) if isinstance(run, RowsFile) else None
        if summary is not None:
            size, end_offset = size + summary.bytes, summary.end_offset
            last_time_ms = summary.last_time_ms
    frozen = (rows for run in runs if isinstance(run, NewRows) for rows in run.rows_of(topic))
    for rows in (*frozen, *newest):
        last = rows.row(rows.count - 1)
        size += sum(row[6] for row in ROW.iter_unpack(rows.buffer))
        end_offset, last_time_ms = last.end_offset, last.time_ms
    return _OpenPart(size, end_offset, last_time_ms)


def _sooner(keep: Keep, open_: _OpenPart) -> Keep:
    """Return limits that are reached before those of a topic are."""
    # At least 1, for 0 is no limit. What is open counts when it is closed: that comes next.
    keep_ms = keep.ms and max(1, keep.ms - horizon_ms(keep.ms))
    keep_bytes = keep.bytes and max(1, _nine_tenths(keep.bytes) - open_.bytes)
    return keep._replace(ms=keep_ms, bytes=keep_bytes)


def _nine_tenths(size_bytes: int) -> int:
    return size_bytes and max(1, size_bytes // 10 * 9)
