"""What groups still need of messages that retention drops: written again, before they go.

    dead, waits for a retry, leased, ready again    carried: written to the end of the log
    never taken by anybody (the backlog)            lost, with a row and a warning; see
                                                    `keep_unfinished` of a topic

One entry per topic and half a mebibyte holds the messages as entries of their own, with their
offsets (`log.carried`). When the segment of such an entry goes in turn, what is still needed of it
is written again. A topic carries `log.carry_bytes_max` at most: beyond that the oldest messages
are given up, retries and dead letters last, each with a row of the trace and a warning.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from onward.broker.choosing import gone_row
from onward.broker.collected import ENTRY_BYTES_MAX
from onward.delivery.ranges import Range, Ranges, count_of, merged, ranges_of, without
from onward.delivery.share import Share
from onward.delivery.trace import Trace
from onward.errors import Corruption, OnwardError
from onward.log.carried import CarriedRow
from onward.log.disk import Buffer
from onward.log.segment import Segment
from onward.log.span import Span
from onward.message.cut import Cutter
from onward.message.entry import entry_heads

if TYPE_CHECKING:
    from onward.broker.broker import Broker
    from onward.broker.catalogue import Topic

logger = logging.getLogger("onward.retention")

READ_BYTES_MAX = 4 << 20
OFFSETS_PER_READ = 1_000
UNDER_WAY_MAX = 8
WARN_PART = 0.8
OVER_BOUND = "given up by retention: log.carry_bytes_max was reached"
NEVER_DELIVERED = "it was gone before it was delivered: dropped by retention"
TOO_OLD = "older than log.dead_retention_ms"


class Lost(NamedTuple):
    """The backlog of one group that goes with a move of its topic's first offset."""

    group: str
    share: Share
    topic: Topic
    ranges: list[Range]


class CarryOver:
    """Carries over what groups need, for the retention of one broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._warned: set[int] = set()
        """The topics that were said to come near their bound."""

    # --- when first offsets move -------------------------------------------------------------

    async def carry(self, moved: Iterable[tuple[int, int]]) -> list[Lost]:
        """Write again what groups need below the new first offsets; return what they lose.

        Nobody is granted from that backlog any more. The caller tells `lose` once the first
        offsets are moved, or `give_back` when they are not.
        """
        lost: list[Lost] = []
        try:
            for number, offset in moved:
                topic = self._broker.catalogue.by_number.get(number)
                if topic is not None and (shares := self._shares(topic)):
                    # Before the backlog is forgotten: it counts as taken until its row is durable.
                    failed, taken = _needed(topic, shares, offset)
                    lost += self._forget(topic, shares, offset)
                    await self._carry(topic, shares, failed, taken)
        except BaseException:
            self.give_back(lost)
            raise
        return lost

    def lose(self, lost: list[Lost]) -> None:
        """Say of each group what retention dropped before it was delivered."""
        now_ms = self._broker.clock.now_ms()
        for group, share, topic, ranges in lost:
            self._broker.undelivered.add_dropped(share, count_of(ranges))
            logger.warning(
                "group %r: %d messages of topic %r were dropped by retention before they were "
                "delivered; raise the retention or set keep_unfinished",
                group, count_of(ranges), topic.name,
            )  # fmt: skip
            row = gone_row(group, topic.name, ranges, now_ms=now_ms, cause=NEVER_DELIVERED)
            self._broker.consuming.outcomes.add([row])

    def give_back(self, lost: list[Lost]) -> None:
        """Let groups have their backlog after all: the first offsets stay."""
        for one in lost:
            one.share.give_back(one.ranges)

    def _shares(self, topic: Topic) -> dict[str, Share]:
        groups = self._broker.consuming.groups.of_topic(topic.name)
        return {
            group.record.name: group.shares[topic.name]
            for group in groups
            if topic.name in group.shares
        }

    def _forget(self, topic: Topic, shares: dict[str, Share], offset: int) -> list[Lost]:
        found = [
            Lost(name, share, topic, share.forget_below(offset)) for name, share in shares.items()
        ]
        return [one for one in found if one.ranges]

    async def _carry(
        self, topic: Topic, shares: dict[str, Share], failed: list[Range], taken: list[Range]
    ) -> None:
        if not failed and not taken:
            return
        self._prune(topic, shares)
        bytes_max = self._bytes_max()
        entries, beyond = await self._read(topic, failed, room=bytes_max)
        self._make_room(topic, shares, bytes_max - sum(map(len, entries)))
        used = self._bytes_of(topic) + sum(map(len, entries))
        others = without(taken, Ranges(failed))
        more, too_much = await self._read(topic, others, room=bytes_max - used)
        self._give_up(topic, shares, merged([*beyond, *too_much]))
        await self._write(topic, sorted([*entries, *more], key=_first_offset))
        self._warn(topic, bytes_max)

    def _bytes_max(self) -> int:
        log = self._broker.settings.log
        # A log with a limit must be able to become smaller than it.
        limits = [log.carry_bytes_max, log.retention_bytes // 4]
        return min(limits) if log.retention_bytes else limits[0]

    def _bytes_of(self, topic: Topic) -> int:
        carried = self._broker.log.carried.by_topic.get(topic.number)
        return 0 if carried is None else carried.bytes

    def _prune(self, topic: Topic, shares: dict[str, Share]) -> None:
        """Forget what is carried and no group needs any more."""
        rows = self._broker.log.carried.by_topic.get(topic.number, ())
        unused = [row for row in rows if not _is_needed(row, shares)]
        self._broker.log.carried.remove(topic.number, unused)

    # --- the bound ---------------------------------------------------------------------------

    def _make_room(self, topic: Topic, shares: dict[str, Share], bytes_max: int) -> None:
        """Give up the oldest that is carried, until the rest has `bytes_max` at most."""
        excess = self._bytes_of(topic) - bytes_max
        rows: list[CarriedRow] = []
        for row in self._broker.log.carried.by_topic.get(topic.number, ()):
            if excess <= 0:
                break
            rows.append(row)
            excess -= row.length
        self._give_up(topic, shares, merged((row.base_offset, row.end_offset) for row in rows))
        self._broker.log.carried.remove(topic.number, rows)

    def _give_up(self, topic: Topic, shares: dict[str, Share], ranges: list[Range]) -> None:
        """Purge dead letters and skip retries for which there is no room."""
        if not ranges:
            return
        now_ms = self._broker.clock.now_ms()
        for name, share in shares.items():
            unfinished = [part for one in ranges for part in share.unfinished(*one)]
            dead = Ranges(ranges_of(share.dead))
            letters = [part for one in ranges for part in dead.overlap(*one)]
            if unfinished:
                self._broker.undelivered.add_dropped(share, count_of(unfinished))
                row = gone_row(name, topic.name, unfinished, now_ms=now_ms)
                self._broker.consuming.outcomes.add([row])
            if letters:
                self._purge(name, topic.name, letters, OVER_BOUND)
            if unfinished or letters:
                logger.warning(
                    "group %r: %d retries and %d dead letters of topic %r were given up by "
                    "retention: log.carry_bytes_max is reached; raise it, or purge dead letters",
                    name, count_of(unfinished), count_of(letters), topic.name,
                )  # fmt: skip

    def _purge(self, group: str, topic: str, ranges: list[Range], cause: str) -> None:
        row = Trace(
            did="purged", at_ms=self._broker.clock.now_ms(), group=group, topic=topic,
            ranges=tuple(ranges), cause=cause,
        )  # fmt: skip
        self._broker.consuming.outcomes.add([row])

    def _warn(self, topic: Topic, bytes_max: int) -> None:
        used = self._bytes_of(topic)
        if used < bytes_max * WARN_PART:
            self._warned.discard(topic.number)
        elif topic.number not in self._warned:
            self._warned.add(topic.number)
            logger.warning(
                "topic %r: %d bytes of retries and dead letters outlive retention, of %d "
                "(log.carry_bytes_max): beyond that the oldest are given up",
                topic.name, used, bytes_max,
            )  # fmt: skip

    def purge_old(self) -> None:
        """Purge the dead letters that are older than the settings keep them."""
        keep_ms = self._broker.settings.log.dead_retention_ms
        if not keep_ms:
            return
        limit_ms = self._broker.clock.now_ms() - keep_ms
        for group in self._broker.consuming.groups.by_name.values():
            for share in group.shares.values():
                # They stand in the order in which they died.
                letters = takewhile(lambda one: one.died_at_ms < limit_ms, share.dead.values())
                if old := ranges_of(letter.offset for letter in letters):
                    self._purge(group.record.name, share.topic, old, TOO_OLD)
                    logger.info(
                        "group %r: %d dead letters of topic %r were purged: older than "
                        "log.dead_retention_ms", group.record.name, count_of(old), share.topic,
                    )  # fmt: skip

    # --- when segments go --------------------------------------------------------------------

    async def carry_on(self, dropped: list[Segment]) -> None:
        """Write again what is carried in segments that are about to go."""
        carried = self._broker.log.carried
        first, end = dropped[0].first_index, dropped[-1].next_index
        for number, rows in carried.in_indexes(first, end).items():
            topic = self._broker.catalogue.by_number.get(number)
            shares = {} if topic is None else self._shares(topic)
            needed = [row for row in rows if _is_needed(row, shares)]
            if topic is not None and needed:
                await self._write(topic, await self._copies(topic, needed))

    def dropped(self) -> None:
        """Forget what was carried in segments that are gone."""
        carried = self._broker.log.carried
        for number, rows in carried.in_indexes(0, self._broker.log.segments[0].first_index).items():
            carried.remove(number, rows)

    async def _copies(self, topic: Topic, rows: list[CarriedRow]) -> list[Buffer]:
        """Return carried entries as they are."""
        log = self._broker.log
        spans: list[Span] = []
        for row in rows:
            span = log.plan_carried(
                topic.number, row.base_offset, end_offset=row.end_offset, bytes_max=0
            )
            if span is not None:
                spans.append(span)
        return await self._broker.in_thread(
            lambda: [part for span in spans for part in self._cut(span, [])]
        )

    # --- reading and writing -----------------------------------------------------------------

    async def _read(
        self, topic: Topic, ranges: list[Range], *, room: int
    ) -> tuple[list[Buffer], list[Range]]:
        """Return entries with just these messages, and the oldest ranges that found no room."""
        entries: list[Buffer] = []
        left = list(_pieces(ranges))
        while left:
            part = left.pop()
            found = await self._entries(topic, part)
            if sum(map(len, entries)) + sum(map(len, found)) > room:
                return entries, merged([*left, part])
            entries += found
        return entries, []

    async def _entries(self, topic: Topic, part: Range) -> list[Buffer]:
        log, (start, end) = self._broker.log, part
        spans: list[Span] = []
        while start < end:
            span = log.plan(topic.number, start, bytes_max=READ_BYTES_MAX, end_offset=end)
            if span is None or span.first_offset >= end:
                break
            spans.append(span)
            start = span.end_offset
        return await self._broker.in_thread(
            lambda: [entry for span in spans for entry in self._cut(span, [part])]
        )

    def _cut(self, span: Span, wanted: list[Range]) -> list[Buffer]:
        """Read a span and return its entries one by one, cut down to `wanted`. In a thread."""
        try:
            entries = self._broker.log.read(span, wait=True)
        except Corruption as error:
            logger.warning("what groups need of it cannot be carried over: %s", error)
            return []
        assert entries is not None
        if wanted:
            entries = Cutter(is_exact=True).cut(entries, wanted)
        view = memoryview(entries)
        return [view[head.position : head.end] for head in entry_heads(entries)]

    async def _write(self, topic: Topic, entries: list[Buffer]) -> None:
        """Write entries as few CARRIED ones, durably."""
        waiting: list[asyncio.Future[None]] = []
        for body in _bodies(entries):
            heads = list(entry_heads(body))
            durable: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._broker.publishing.carry(
                topic.number, body, base_offset=heads[0].base_offset,
                count=sum(head.count for head in heads), done=partial(resolve, durable),
            )  # fmt: skip
            waiting.append(durable)
            if len(waiting) >= UNDER_WAY_MAX:
                await waiting.pop(0)
        for durable in waiting:
            await durable


def resolve(durable: asyncio.Future[None], error: OnwardError | None) -> None:
    """Tell who waits for a change how it ended."""
    if durable.done():
        return  # the broker stops, and nobody waits for it any more
    if error is None:
        durable.set_result(None)
    else:
        durable.set_exception(error)


def _is_needed(row: CarriedRow, shares: dict[str, Share]) -> bool:
    return any(share.needs(row.base_offset, row.end_offset) for share in shares.values())


def _needed(topic: Topic, shares: dict[str, Share], offset: int) -> tuple[list[Range], list[Range]]:
    """Return what has failed and what was taken, from the first offset up to the new one."""
    failed = merged(one for share in shares.values() for one in share.failed_below(offset))
    taken = merged(one for share in shares.values() for one in share.taken_below(offset))
    first = topic.first_offset
    return Ranges(failed).overlap(first, offset), Ranges(taken).overlap(first, offset)


def _pieces(ranges: list[Range]) -> Iterator[Range]:
    """Split long ranges.

    >>> list(_pieces([(0, 1_500), (2_000, 2_001)]))
    [(0, 1000), (1000, 1500), (2000, 2001)]
    """
    for start, end in ranges:
        for at in range(start, end, OFFSETS_PER_READ):
            yield at, min(at + OFFSETS_PER_READ, end)


def _first_offset(entry: Buffer) -> int:
    return next(entry_heads(entry)).base_offset


def _bodies(entries: list[Buffer]) -> Iterator[bytes]:
    """Join entries to bodies of the usual size."""
    body: list[Buffer] = []
    size = 0
    for entry in entries:
        if body and size + len(entry) > ENTRY_BYTES_MAX:
            yield b"".join(body)
            body, size = [], 0
        body.append(entry)
        size += len(entry)
    if body:
        yield b"".join(body)
