"""The streaming source: `spark.readStream.format("onward")`.

    initialOffset ──▶ latestOffset(start) ──▶ partitions(start, end) ──▶ tasks read ──▶ ...
                        └─ `start` is committed: the group is advanced to it

A stream's offset is JSON with sorted keys, {"@group": "g", "@servers": "...", "orders": 123}: all
below is done. It is compared as text, so an idle stream returns what it was given. Without a group
it has {"@origins": {"orders": "7@1763280000000"}, ...}: which topic of that name is meant. One that
was created anew is an error, or with onDataLoss=skip read from its beginning; an offset of an older
version has no origins, and is taken as it is.

    - With a group the first offset lies on the broker, so a restart in the first batch begins
      where it began, and the group is held: one query at a time. It is made when the
      checkpoint was looked at: a query that is refused leaves nothing behind. A query that was cut
      off while another took its group ends when it plans its next batch. Without a group only a
      start that does not move is taken.
    - At a replica the group is held and advanced at the leader. While that cannot be reached the
      query reads on without holding its group, and takes it again when there is a leader.
    - Asking for news is a long poll: an idle query costs a few requests a second.
    - A topic that is new (of a pattern, or in the option) first appears in the offset at its
      beginning, and is read from there in the next batch.
    - One process of the driver lives as long as the query and keeps the connection; tasks have
      their own. Making a reader opens nothing.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from onward.errors import (
    AlreadyExists,
    Conflict,
    InvalidRequest,
    NotLeader,
    OffsetOutOfRange,
    TopicEnded,
    UnknownGroup,
    UnknownTopic,
)
from onward.pipeline.bounds import (
    ASKED_MAX,
    cursors_of,
    ends_of,
    matching,
    offsets_of,
    topics_now,
)
from onward.pipeline.brief import brief
from onward.pipeline.lake_state import origin_of
from onward.pipeline.options import Bound, SourceOptions
from onward.pipeline.place import Place, open_client
from onward.pipeline.planning import Stretch, admit
from onward.pipeline.progress import (
    GROUP,
    MEMBER,
    ORIGINS,
    SERVERS,
    Leader,
    advance,
    listen,
    positions,
)
from onward.pipeline.source import known_losses, partitions_of, source_spellings
from onward.pipeline.topic_reads import check_schema, read_stretches

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from onward.client.sync import SyncClient
    from onward.protocol.operations.pipeline import TopicEnd

POLL_S = 0.5
HOLD_S = 3.0
"""How long to wait for a group: the process of a query that has just ended may still have it."""
SAMPLE_BYTES = 64 << 10
ASKED_ALONE_MAX = 8
"""Of more topics than this all are asked for at once."""

Origins = dict[str, str]
"""Topic to what tells it from another one of its name."""
Offset = dict[str, int | str | Origins]


def read_stream(
    spark: SparkSession,
    topic: str | Sequence[str] = "",
    *,
    place: Place | None = None,
    columns: Sequence[str] | None = None,
    **options: object,
) -> DataFrame:
    """Return a topic, or several, as a streaming DataFrame; its progress goes to its group.

    The options are those of the source, written `group="totals"`, `starting_offsets="latest"`,
    `max_rows_per_trigger=100_000`.
    """
    listen(spark, place)
    given = source_spellings(topic, place, columns, options)
    return spark.readStream.format("onward").options(**given).load()


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads topics as they grow."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        check_schema(schema, options)
        _check_options(options)
        self._options = options
        self._schema = schema
        self._connected: SyncClient | None = None
        self._initial: Offset | None = None
        self._target: dict[str, TopicEnd] | None = None
        self._ends: dict[str, TopicEnd] = {}
        self._advanced: dict[str, int] = {}
        self._consumed: set[str] = set()
        self._is_checked = False
        self._has_group = False
        self._leader = Leader()

    # --- offsets -----------------------------------------------------------------------------

    @brief
    def initialOffset(self) -> Offset:  # noqa: N802
        """Return where the first batch begins; Spark asks more than once."""
        if self._initial is None:
            mq, options = self._mq(), self._options
            ends = topics_now(mq, options)
            self._take(mq)
            self._join(mq, ends)
            if options.group is not None and self._is_kept(mq, options.group):
                first = cursors_of(mq, options.group, ends)
            else:
                start = options.start or Bound(word="earliest")
                first = offsets_of(mq, start, ends, group=None, missing="earliest")
            self._initial = self._offset(first, self._origins(mq, first))
        return self._initial

    @brief
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Fix the end: what is published from now on is for the next run."""
        self._target = topics_now(self._mq(), self._options)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return how much one batch takes."""
        if self._options.rows_per_trigger is not None:
            return ReadMaxRows(self._options.rows_per_trigger)
        if self._options.bytes_per_trigger is not None:
            return ReadMaxBytes(self._options.bytes_per_trigger)
        return ReadAllAvailable()

    @brief
    def latestOffset(  # noqa: N802
        self, start: Offset | None = None, limit: ReadLimit | None = None
    ) -> Offset:
        """Return where the next batch ends: `start` itself when there is nothing new."""
        mq = self._mq()
        start = self.initialOffset() if start is None else start
        first = positions(start)
        self._check_named(first)
        if not self._is_checked:
            # Before there is a group or it is told anything: the checkpoint may be another's.
            now = topics_now(mq, self._options)
            anew = self._anew(start, self._origins(mq, now))
            self._check_ends({topic: at for topic, at in first.items() if topic not in anew}, now)
        self._keep(mq)
        if not self._is_checked:
            self._check_consumed(mq, first)
            self._is_checked = True
        self._advance(mq, first)
        heads = self._heads(mq, first)
        origins = self._origins(mq, heads)
        anew = self._anew(start, origins)
        first |= {topic: heads[topic].first_offset for topic in anew}
        self._check_ends(first, heads)
        known = {topic: self._from(topic, at, heads) for topic, at in first.items()}
        # What is new to the query begins at its beginning, in the next batch.
        reached = {t: end.next_offset if t in known else end.first_offset
                   for t, end in heads.items()}  # fmt: skip
        rows_max = None if isinstance(limit, ReadAllAvailable) else self._rows_max(known, reached)
        ends = first | admit(known, reached, rows_max=rows_max)
        if ends == first and not anew:
            return start
        self._check_consumed(mq, [topic for topic, at in first.items() if ends[topic] > at])
        return self._offset(ends, origins_of(start) | origins)

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802
        """Return where the topics end, as last heard: with it Spark shows the lag."""
        if not self._ends:
            return None
        return self._offset({topic: end.next_offset for topic, end in self._ends.items()})

    # --- batches -----------------------------------------------------------------------------

    @brief
    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """Return the work of each task for one batch."""
        mq, first, stop = self._mq(), positions(start), positions(end)
        self._check_named(stop)
        began, meant = origins_of(start), origins_of(end)
        first |= {t: 0 for t, one in meant.items() if began.get(t, one) != one}
        for topic, at in stop.items():
            if first.get(topic, at) > at:
                raise OffsetOutOfRange(
                    f"{_FOREIGN}: a batch would begin at offset {first[topic]} of topic {topic!r} "
                    f"and end at {at}"
                )
        stretches = [Stretch(topic, first.get(topic, at), at) for topic, at in stop.items()]
        stretches = [stretch for stretch in stretches if stretch.rows]
        ends = self._ends_to_read(mq, [stretch.topic for stretch in stretches])
        anew = self._anew(end, self._origins(mq, ends))
        stretches = [one for one in stretches if one.topic in ends and one.topic not in anew]
        self._check_ends({topic: at for topic, _, at in stretches}, ends)
        self._take(mq)
        kept = [known_losses(self._options, one, ends[one.topic].first_offset) for one in stretches]
        return partitions_of(self._options, [stretch for some in kept for stretch in some])

    @brief
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Give the rows of one task; runs in a worker, in a copy of this reader."""
        return read_stretches(self._options, self._schema, partition.value or ())

    @brief
    def commit(self, end: Offset) -> None:
        """Advance the group; Spark calls this when the next batch is planned."""
        mq, reached = self._mq(), positions(end)
        self._check_named(reached)
        self._take(mq)
        self._advance(mq, reached)

    def stop(self) -> None:
        """Close the connection, which frees the group."""
        if self._connected is not None:
            connected, self._connected = self._connected, None
            self._has_group = False
            connected.close(drain=False)

    # --- the group ---------------------------------------------------------------------------

    def _mq(self) -> SyncClient:
        """Return the connection of this query."""
        if self._connected is None:
            mq = open_client(self._options.place, name="spark-stream")
            mq.open()
            self._connected = mq
        return self._connected

    def _take(self, mq: SyncClient) -> None:
        """Hold the group, a new one if there is none; by then the checkpoint was looked at."""
        group = self._options.group
        if group is not None and not self._has_group:
            self._has_group = self._leader.ask(mq, group, partial(self._claim, mq, group))

    def _claim(self, mq: SyncClient, group: str) -> None:
        self._consumed = ensure_group(mq, self._options, group)
        _hold(mq, group)

    def _keep(self, mq: SyncClient) -> None:
        """Hold the group, also when it was another's in between."""
        group = self._options.group
        if group is not None and self._has_group:
            # The connection was lost perhaps, or the group made anew.
            hold = partial(mq.hold_group, group, holder=_holder(), member=MEMBER)
            self._has_group = self._leader.ask(mq, group, hold)
        self._take(mq)

    def _is_kept(self, mq: SyncClient, group: str) -> bool:
        """Return True if the group exists; raise if a start that moves has nowhere to be kept."""
        if self._has_group:
            return True
        try:
            mq.group(group)
        except UnknownGroup:
            if _moves(self._options.start):
                raise NotLeader(
                    f"group {group!r} does not exist, and no leader can be reached to create it"
                ) from None
            return False
        return True

    def _join(self, mq: SyncClient, topics: Iterable[str]) -> None:
        """Let the group consume these topics too."""
        new = [topic for topic in topics if topic not in self._consumed]
        if new and self._has_group:
            assert self._options.group is not None
            mq.change_group(self._options.group, add_topics=new)
            self._consumed.update(new)

    def _advance(self, mq: SyncClient, to: Mapping[str, int]) -> None:
        """Tell the group what is new: an idle query has nothing to say."""
        group = self._options.group
        if group is not None and self._has_group:
            news = {topic: at for topic, at in to.items() if at > self._advanced.get(topic, 0)}
            if self._leader.ask(mq, group, partial(advance, mq, group, news)):
                self._advanced |= news

    # --- news --------------------------------------------------------------------------------

    def _heads(self, mq: SyncClient, first: Mapping[str, int]) -> dict[str, TopicEnd]:
        """Return where the topics end; wait a while when none has more than is known."""
        if self._target is not None:
            self._ends = self._target
            self._join(mq, self._target)
            return self._target
        named = matching(mq, self._options)
        if not named:
            time.sleep(POLL_S)  # all that matched have ended; others may come
            return {}
        try:
            if first.keys() >= set(named):
                self._ends = _news(mq, {topic: first[topic] for topic in named})
                return self._ends
        except (UnknownTopic, TopicEnded):
            if self._options.pattern is None:
                raise
        self._ends = topics_now(mq, self._options)
        self._join(mq, self._ends)
        return self._ends

    def _ends_to_read(self, mq: SyncClient, topics: Sequence[str]) -> dict[str, TopicEnd]:
        """Return where the topics of a batch end; one that was deleted is lost with all it had."""
        try:
            return ends_of(mq, topics)
        except UnknownTopic:
            if self._options.on_loss != "skip":
                raise
        return ends_of(mq, [topic for topic in topics if mq.has_topic(topic)])

    def _from(self, topic: str, at: int, heads: Mapping[str, TopicEnd]) -> int:
        """Return where reading goes on: what is skipped does not count as rows of a batch."""
        skips = self._options.on_loss == "skip" and topic in heads
        return max(at, heads[topic].first_offset) if skips else at

    def _rows_max(self, first: Mapping[str, int], reached: Mapping[str, int]) -> int | None:
        """Return how many rows one batch may have; bytes become rows by what a message has here."""
        options = self._options
        if options.bytes_per_trigger is None:
            return options.rows_per_trigger
        waiting = {t: end - first.get(t, end) for t, end in reached.items()}
        sizes = {t: self._bytes_per_row(t, first[t]) for t, rows in waiting.items() if rows}
        total = sum(sizes[t] * waiting[t] for t in sizes)
        if not total:
            return options.rows_per_trigger
        rows = sum(waiting[t] for t in sizes)
        rows_max = max(1, int(options.bytes_per_trigger * rows / total))
        return min(rows_max, options.rows_per_trigger or rows_max)

    def _bytes_per_row(self, topic: str, offset: int) -> float:
        """Return how large messages are at a place of a topic: those of the first batches there."""
        size = rows = 0
        start = max(offset, self._ends[topic].first_offset)
        batches = self._mq().read(topic, start=start).batches()
        try:
            for batch in batches:
                size += batch.columns.header.raw_bytes
                rows += batch.columns.count
                if size >= SAMPLE_BYTES:
                    break
        except OffsetOutOfRange:
            pass  # gone meanwhile: the read of it says so
        finally:
            batches.close()  # type: ignore[attr-defined]  # it is a generator
        return size / rows if rows else 1.0

    # --- checks ------------------------------------------------------------------------------

    def _offset(self, offsets: Mapping[str, int], origins: Origins | None = None) -> Offset:
        known: Offset = dict(offsets)
        if origins:
            known[ORIGINS] = dict(sorted(origins.items()))
        if self._options.group is not None:
            known |= {GROUP: self._options.group, SERVERS: self._options.place.servers}
        return dict(sorted(known.items()))

    def _origins(self, mq: SyncClient, topics: Iterable[str]) -> Origins:
        """Return which topics are meant by these names now; a group knows that by itself."""
        if self._options.group is not None:
            return {}
        names = set(topics)
        if len(names) > ASKED_ALONE_MAX:
            return {one.topic: origin_of(one) for one in mq.topics() if one.topic in names}
        found = {}
        for name in sorted(names):
            with suppress(UnknownTopic, TopicEnded):  # deleted meanwhile: who reads it hears of it
                found[name] = origin_of(mq.topic(name))
        return found

    def _anew(self, offset: Offset, now: Origins) -> list[str]:
        """Return the topics that are others than an offset means; raise unless they are skipped."""
        anew = [topic for topic, one in origins_of(offset).items() if now.get(topic, one) != one]
        if anew and self._options.on_loss != "skip":
            raise OffsetOutOfRange(
                f"topic {anew[0]!r} was created anew since this query read it: its offsets are of "
                "other messages; begin with a new checkpoint, or set onDataLoss=skip to read it "
                "from its beginning"
            )
        return anew

    def _check_named(self, offsets: Mapping[str, int]) -> None:
        """Refuse the offsets of a query that reads other topics."""
        for topic in offsets:
            if self._options.pattern is None:
                is_named = topic in self._options.topics
            else:
                is_named = re.fullmatch(self._options.pattern, topic) is not None
            if not is_named:
                raise InvalidRequest(f"{_FOREIGN}: it has topic {topic!r}, which is not read here")

    def _check_consumed(self, mq: SyncClient, topics: Iterable[str]) -> None:
        """Refuse topics that were created anew: their offsets are of other messages.

        A group is done with a topic when that ends. Without one the offset itself tells (`_anew`).
        """
        group = self._options.group
        if group is None or not self._has_group:
            return
        consumed = {share.topic for share in mq.group(group).topics}
        for topic in topics:
            if topic not in consumed and mq.has_topic(topic):
                raise OffsetOutOfRange(
                    f"group {group!r} does not consume topic {topic!r} any more: the topic was "
                    f"created anew, or taken from the group; begin with a new checkpoint"
                )

    def _check_ends(self, offsets: Mapping[str, int], ends: Mapping[str, TopicEnd]) -> None:
        """Refuse offsets that a topic never had."""
        for topic, at in offsets.items():
            if topic in ends and at > ends[topic].next_offset:
                raise OffsetOutOfRange(
                    f"{_FOREIGN}: it is at offset {at} of topic {topic!r}, which ends at "
                    f"{ends[topic].next_offset}"
                )


def origins_of(offset: Offset) -> Origins:
    """Return which topics an offset means, as far as it says so.

    >>> origins_of({"@origins": {"orders": "7@99"}, "orders": 12}), origins_of({"orders": 12})
    ({'orders': '7@99'}, {})
    """
    found = offset.get(ORIGINS)
    return dict(found) if isinstance(found, dict) else {}


_FOREIGN = "this checkpoint is of another query, topic or broker"


def ensure_group(mq: SyncClient, options: SourceOptions, group: str) -> set[str]:
    """Let the group exist, a new one where the options say; return the topics it consumes."""
    ends = topics_now(mq, options)
    try:
        mq.group(group)
    except UnknownGroup:
        # Who was quicker with it will hold it.
        with suppress(AlreadyExists):
            _create_group(mq, options, group, ends)
    return {share.topic for share in mq.group(group).topics}


def _create_group(
    mq: SyncClient, options: SourceOptions, group: str, ends: Mapping[str, TopicEnd]
) -> None:
    start = options.start or Bound(word="earliest")
    if start.word == "group":
        raise UnknownGroup(f"group {group!r} does not exist: startingOffsets=group needs it")
    begin: str | datetime = start.word or "earliest"
    if start.time_ms is not None:
        begin = datetime.fromtimestamp(start.time_ms / 1000, tz=UTC)
    mq.create_group(group, list(ends), start=begin)
    if start.offsets:
        # Should this end half way, the next run begins too early, never too late.
        advance(mq, group, offsets_of(mq, start, ends, group=None, missing="earliest"))


def _news(mq: SyncClient, known: Mapping[str, int]) -> dict[str, TopicEnd]:
    """Return where topics end, as soon as one has more than is known, or after a while."""
    wait_ms = int(POLL_S * 1000)
    if len(known) <= ASKED_MAX:
        return mq.topic_ends(known, wait_ms=wait_ms)
    ends = ends_of(mq, known)
    if any(end.next_offset > known[topic] for topic, end in ends.items()):
        return ends
    mq.topic_ends(dict(islice(known.items(), ASKED_MAX)), wait_ms=wait_ms)
    return ends_of(mq, known)


def _holder() -> str:
    return f"a Spark query on {socket.gethostname()} (process {os.getpid()})"


def _hold(mq: SyncClient, group: str) -> None:
    """Take the group for this query; one that has just ended may need a moment to let go."""
    deadline = time.monotonic() + HOLD_S
    while True:
        try:
            mq.hold_group(group, holder=_holder(), member=MEMBER)
        except Conflict:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.1)
        else:
            return


def _check_options(options: SourceOptions) -> None:
    """Refuse what a stream cannot do."""
    if options.end is not None:
        raise InvalidRequest(
            "endingOffsets and endingTimestamp are for batch reads; a stream that is to end uses "
            "trigger(availableNow=True)"
        )
    start = options.start
    if options.group is not None or start is None:
        return
    if _moves(start):
        raise InvalidRequest(
            "a stream that begins at 'latest' or at a time needs the option 'group': the broker "
            "keeps there where it began, so that a restart in its first batch loses nothing"
        )


def _moves(start: Bound | None) -> bool:
    """Return True if a start means another offset when it is looked up later."""
    if start is None:
        return False
    is_relative = start.word in ("latest", "group") or start.time_ms is not None
    return is_relative or any(offset < 0 for offset in start.offsets.values())
