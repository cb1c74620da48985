"""One read over lake and live log: below the lake's end from files, above it from the broker.

    offsets   0 ─────────── lake's end ─────────── topic's end
              files of the lake   │   the broker

The two parts meet at one offset, so nothing is missing and nothing is there twice. Files are left
out by their offsets and times before Spark sees them. A stretch that is in neither part, because
retention took it before the archive came, is an error that names it; `on_gap="skip"` reads over it.
A topic that was created anew is not the one of the lake: an error when it is asked for by name,
else its live log is all that is read of it, and a warning says so.

    start   None or "earliest", "latest", offsets {"orders": 120}, a time, or how long ago ("1h")
    end     None or "latest" (the ends as they are now), offsets, a time, or how long ago
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import reduce
from typing import TYPE_CHECKING, Literal, NamedTuple

from pyspark.sql import functions as F  # noqa: N812 - the name that everybody knows it by

from onward.client.sync import SyncClient
from onward.clock import SystemClock
from onward.durations import parse_instant_ms
from onward.errors import Corruption, InvalidRequest, OffsetOutOfRange, UnknownTopic
from onward.pipeline.bounds import ends_of, offset_at
from onward.pipeline.lake import Lake, open_lake
from onward.pipeline.lake_state import Gap, LakeFile, LakeState, check_same, is_same
from onward.pipeline.place import Place, open_client
from onward.pipeline.schema import MESSAGE_COLUMNS, message_schema
from onward.pipeline.window import choose_topics, first_ms
from onward.protocol.operations.topics import TopicDescription

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

Bound = str | int | datetime | timedelta | Mapping[str, int] | None
"""A place in topics: a word, one offset of one topic, offsets by topic, a time, how long ago."""
OnGap = Literal["fail", "skip"]
LOOKS_MAX = 10
TOLD_MAX = 20

_log = logging.getLogger("onward.pipeline")


class Side(NamedTuple):
    """Where a read begins or ends: at offsets, at a time, or (neither) at the topics' own end."""

    offsets: Mapping[str, int] | None = None
    time_ms: int | None = None
    is_latest: bool = False


class Part(NamedTuple):
    """What is read of one topic: these files from `first` to before `end`, then the log."""

    topic: str
    files: tuple[LakeFile, ...]
    first: int
    end: int
    live_first: int = 0
    live_end: int = 0
    is_alone: bool = False
    """The lake has another topic of this name: nothing of it may come from there."""


def read(
    spark: SparkSession,
    *,
    place: Place,
    topics: str | Sequence[str],
    lake: str | None = None,
    start: Bound = None,
    end: Bound = None,
    columns: Sequence[str] | None = None,
    on_gap: OnGap = "fail",
    named: Sequence[str] | None = None,
) -> DataFrame:
    """Return the messages of topics (names or patterns; none are all) as one DataFrame.

        read(spark, place=Place("localhost:7700"), topics="orders", lake="/data/lake", start="1d")

    Rows come in no order; their offsets say what it was. `named` are the topics that somebody asked
    for by name, when a job has made `topics` of patterns.
    """
    if end == "earliest":
        raise InvalidRequest("a read ends at 'latest', at offsets or at a time, not at 'earliest'")
    names = list(message_schema(columns).names)
    wanted = [topics] if isinstance(topics, str) else list(topics)
    opened = None if lake is None else open_lake(lake)
    with open_client(place, name="spark-read") as mq:
        state, live = look(mq, opened, wanted)
        chosen = choose_topics({*live, *state.files, *state.gaps}, wanted)
        now_ms = SystemClock().now_ms()
        begin = side_of(start, chosen, now_ms=now_ms)
        finish = side_of("latest" if end is None else end, chosen, now_ms=now_ms)
        alone = others_of(chosen, live, state, named=wanted if named is None else named)
        parts = []
        for topic in chosen:
            held = LakeState() if topic in alone else state
            since_ms = _live_since_ms(mq, live.get(topic), held, begin)
            part = part_of(
                topic, held, live.get(topic), begin, finish, on_gap=on_gap, live_since_ms=since_ms
            )
            parts.append(part._replace(is_alone=topic in alone))
        parts = within_times(mq, parts, begin, finish)
    if alone:
        _log.warning("%s", say_alone(alone))
    frames = _lake_frames(spark, opened, parts)
    frames += _live_frames(spark, place, opened, parts, names, on_gap)
    within = _between(begin, finish)
    if within is not None:
        frames = [frame.where(within) for frame in frames]
    if not frames:
        return spark.createDataFrame([], message_schema(names))
    return reduce(_union, [frame.select(*names) for frame in frames])


def look(
    mq: SyncClient, lake: Lake | None, wanted: Sequence[str]
) -> tuple[LakeState, dict[str, TopicDescription]]:
    """Return lake and topics as they fit together, while an archive and retention go on.

    The lake is looked at first, so the topics have what it has. Where a topic begins later than the
    lake ends, that may be because both went on in between: then they are looked at again.
    """
    state = LakeState() if lake is None else lake.state()
    for _ in range(LOOKS_MAX):
        live = _live_topics(mq, wanted)
        ends = ((topic.first_offset, state.end_of(name)) for name, topic in live.items())
        if lake is None or all(first <= end for first, end in ends):
            return state, live
        newer = lake.state()
        if newer.number == state.number:
            return state, live
        state = newer
    return state, _live_topics(mq, wanted)


def others_of(
    topics: Iterable[str], live: Mapping[str, TopicDescription], state: LakeState, *,
    named: Sequence[str] = (),
) -> list[str]:  # fmt: skip
    """Return the topics that are not those of the lake, though they have their names.

    One that is `named` is not among them: who asks for it by name hears of it as an error.

    >>> orders = TopicDescription(topic="orders", number=2, state="active", created_at_ms=9)
    >>> others_of(["orders"], {"orders": orders}, LakeState(origins={"orders": "1@5"}))
    ['orders']
    """
    return [
        topic
        for topic in topics
        if topic in live and topic not in named and not is_same(live[topic], state)
    ]


def say_alone(topics: Sequence[str]) -> str:
    """Return the sentence about topics of which only the live log is read.

    >>> say_alone(["orders"])
    "topic 'orders' is not the one that the lake holds: only its live log is read"
    """
    if len(topics) == 1:
        return f"topic {topics[0]!r} is not the one that the lake holds: only its live log is read"
    some = ", ".join(repr(topic) for topic in topics[:TOLD_MAX])
    more = f" and {len(topics) - TOLD_MAX:,} more" if len(topics) > TOLD_MAX else ""
    return f"topics {some}{more} are not those that the lake holds: only their live log is read"


def is_cut(place: Place, topic: str, *, lake: str | None = None, since_ms: int | None) -> bool:
    """Tell whether messages of a topic from that time on are neither in the lake nor in the log."""
    opened = None if lake is None else open_lake(lake)
    begin = Side(time_ms=since_ms)
    with open_client(place, name="spark-read") as mq:
        state, live = look(mq, opened, [topic])
        found = live.get(topic)
        live_since_ms = _live_since_ms(mq, found, state, begin)
    return any(
        _matters(gap, state.files.get(topic, ()), begin, Side(), live_since_ms)
        for gap in _gaps(topic, state, found)
    )


def side_of(bound: Bound, topics: Sequence[str], *, now_ms: int) -> Side:
    """Return where a read begins or ends, from all the ways to say it.

    >>> side_of({"orders": 7}, ["orders"], now_ms=0)
    Side(offsets={'orders': 7}, time_ms=None, is_latest=False)
    >>> side_of("10m", ["orders"], now_ms=700_000).time_ms
    100000
    """
    if bound is None or isinstance(bound, str):
        return _word(bound, now_ms=now_ms)
    if isinstance(bound, Mapping):
        return Side(offsets=_checked(bound, topics))
    if isinstance(bound, datetime):
        return Side(time_ms=first_ms(bound))
    if isinstance(bound, timedelta):
        return Side(time_ms=now_ms - bound // timedelta(milliseconds=1))
    if isinstance(bound, bool) or not isinstance(bound, int):
        raise InvalidRequest(
            "a start or an end is a word, offsets by topic, a time, or how long ago ('10m'), "
            f"not {bound!r:.40}"
        )
    if len(topics) != 1:
        raise InvalidRequest(f"offset {bound} is of one topic: write {{'orders': {bound}}}")
    return Side(offsets=_checked({topics[0]: bound}, topics))


def _word(word: str | None, *, now_ms: int) -> Side:
    if word is None or word == "earliest":
        return Side()
    if word == "latest":
        return Side(is_latest=True)
    return Side(time_ms=parse_instant_ms(word, now_ms=now_ms))


def _checked(offsets: Mapping[str, int], topics: Sequence[str]) -> dict[str, int]:
    for topic, offset in offsets.items():
        if topic not in topics:
            raise InvalidRequest(f"an offset is given for topic {topic!r}, which is not read")
        if type(offset) is not int or offset < 0:
            raise InvalidRequest(f"an offset of topic {topic!r} is a number from 0, not {offset!r}")
    return dict(offsets)


# --- which offsets: from files, from the log ---------------------------------------------------


def part_of(
    topic: str, state: LakeState, live: TopicDescription | None, begin: Side, finish: Side, *,
    on_gap: OnGap = "fail", live_since_ms: int | None = None,
) -> Part:  # fmt: skip
    """Return which files of the lake and which offsets of the log hold what is asked for.

    `live` is None when the broker does not have the topic any more; `live_since_ms` is the time
    of its first message, when that is known.

    >>> orders = TopicDescription(topic="orders", number=1, state="active", next_offset=9)
    >>> part_of("orders", LakeState(), orders, Side(), Side(offsets={"orders": 5}))[2:6]
    (0, 0, 0, 5)
    """
    if live is None and not state.end_of(topic):
        raise UnknownTopic(f"topic {topic!r} does not exist")
    if live is not None:
        check_same(live, state)
    lake_end = state.end_of(topic)
    log_first = lake_end if live is None else max(lake_end, live.first_offset)
    log_end = log_first if live is None else max(log_first, live.next_offset)
    gaps = _gaps(topic, state, live)
    first = _first(topic, begin, gaps, log_end)
    end = _end(topic, finish, log_end)
    files = state.files.get(topic, ())
    if on_gap == "fail":
        lost = [gap for gap in gaps if gap.first < end and gap.end > first]
        _check_gaps(
            [gap for gap in lost if _matters(gap, files, begin, finish, live_since_ms)], first, end
        )
    files = tuple(
        file for file in state.files_between(topic, first, end) if _is_in_time(file, begin, finish)
    )
    return Part(topic, files, first, min(end, lake_end), max(first, log_first), end)


def _gaps(topic: str, state: LakeState, live: TopicDescription | None) -> list[Gap]:
    """Return what is neither in the lake nor in the log, in order."""
    gaps, end = list(state.gaps.get(topic, ())), state.end_of(topic)
    if live is not None and live.first_offset > end:
        gaps.append(Gap(topic, end, live.first_offset))
    return gaps


def _first(topic: str, begin: Side, gaps: Sequence[Gap], log_end: int) -> int:
    if begin.is_latest:
        return log_end
    if begin.offsets is not None and topic in begin.offsets:
        return _reachable(topic, begin.offsets[topic], log_end)
    first = 0
    for gap in gaps:  # what is gone at the very beginning is before "earliest"
        if gap.first == first:
            first = gap.end
    return first


def _end(topic: str, finish: Side, log_end: int) -> int:
    if finish.offsets is None or topic not in finish.offsets:
        return log_end
    return _reachable(topic, finish.offsets[topic], log_end)


def _reachable(topic: str, offset: int, log_end: int) -> int:
    if offset > log_end:
        raise OffsetOutOfRange(
            f"offset {offset} of topic {topic!r} does not exist yet: it ends before {log_end}"
        )
    return offset


def _matters(
    gap: Gap, files: Sequence[LakeFile], begin: Side, finish: Side, live_since_ms: int | None
) -> bool:
    """Tell whether messages in a gap may be of the time that is asked for."""
    before = [file.last_published_at_ms for file in files if file.end <= gap.first]
    after = [file.first_published_at_ms for file in files if file.first >= gap.end]
    next_ms = after[0] if after else live_since_ms
    is_earlier = begin.time_ms is not None and next_ms is not None and next_ms < begin.time_ms
    is_later = finish.time_ms is not None and bool(before) and before[-1] >= finish.time_ms
    return not (is_earlier or is_later)


def _check_gaps(gaps: Sequence[Gap], first: int, end: int) -> None:
    for gap in gaps:
        raise OffsetOutOfRange(
            f"offsets {max(first, gap.first)} to {min(end, gap.end) - 1} of topic {gap.topic!r} "
            "are neither in the lake nor in the log: retention took them before they were archived"
        )


def _is_in_time(file: LakeFile, begin: Side, finish: Side) -> bool:
    if begin.time_ms is not None and file.last_published_at_ms < begin.time_ms:
        return False
    return finish.time_ms is None or file.first_published_at_ms < finish.time_ms


def _live_topics(mq: SyncClient, wanted: Sequence[str]) -> dict[str, TopicDescription]:
    """Return the topics that the broker has, and of the system's own those that are named."""
    live = {topic.topic: topic for topic in mq.topics()}
    for name in wanted:
        if name.startswith("@") and mq.has_topic(name):
            live[name] = mq.topic(name)
    return live


def _live_since_ms(
    mq: SyncClient, live: TopicDescription | None, state: LakeState, begin: Side
) -> int | None:
    """Return the time of the first message in the log, where a gap before it depends on it."""
    if live is None or begin.time_ms is None or live.first_offset <= state.end_of(live.topic):
        return None
    try:
        return mq.get(live.topic, live.first_offset).published_at_ms
    except OffsetOutOfRange:
        return None


def within_times(
    mq: SyncClient, parts: Sequence[Part], begin: Side, finish: Side
) -> list[Part]:  # fmt: skip
    """Return the parts with their ranges of the log cut to the times that are asked for.

    Times in a log never go back, so that a time is an offset. Rows still have to be compared with
    the times themselves: an offset that retention overtook stays as it was.
    """
    if begin.time_ms is None and finish.time_ms is None:
        return list(parts)
    live = [part.topic for part in parts if part.live_first < part.live_end]
    ends = ends_of(mq, live)
    since, until = (
        {} if time_ms is None else {name: offset_at(mq, name, max(0, time_ms), end)
                                    for name, end in ends.items()}
        for time_ms in (begin.time_ms, finish.time_ms)
    )  # fmt: skip
    # An offset that was found at the very beginning says nothing of what was there before it.
    firsts = {name: end.first_offset for name, end in ends_of(mq, live).items()}
    since = {name: offset for name, offset in since.items() if offset > firsts[name]}
    return [_cut(part, since.get(part.topic, 0), until.get(part.topic)) for part in parts]


def _cut(part: Part, since: int, until: int | None) -> Part:
    first = max(part.live_first, since)
    end = part.live_end if until is None else min(part.live_end, until)
    return part._replace(live_first=first, live_end=max(first, end))


# --- frames ------------------------------------------------------------------------------------


def _lake_frames(
    spark: SparkSession, lake: Lake | None, parts: Sequence[Part]
) -> list[DataFrame]:  # fmt: skip
    """Return up to two frames: files that are read whole, and those that are read in part."""
    if lake is None:
        return []
    inside, across, ranges = [], [], None
    for part in parts:
        cut = [file for file in part.files if file.first < part.first or file.end > part.end]
        inside += [file for file in part.files if file not in cut]
        across += cut
        if cut:
            own = F.col("topic") == part.topic
            own &= (F.col("offset") >= part.first) & (F.col("offset") < part.end)
            ranges = own if ranges is None else ranges | own
    frames = [_parquet(spark, lake, inside)] if inside else []
    return frames + ([_parquet(spark, lake, across).where(ranges)] if ranges is not None else [])


def _parquet(spark: SparkSession, lake: Lake, files: Iterable[LakeFile]) -> DataFrame:
    paths = []
    for file in files:
        path = lake.path(file)
        if not path.is_file() or path.stat().st_size != file.bytes:
            raise Corruption(
                f"file {str(path)!r} of the lake is not there or is not whole: it has "
                f"{file.bytes} bytes when it is"
            )
        paths.append(spark_path(str(path)))
    return spark.read.schema(message_schema()).parquet(*paths)


def spark_path(path: str) -> str:
    r"""Return a path of this file system as Spark takes it literally.

    >>> spark_path("/data/[1]/lake")
    'file:///data/\\[1\\]/lake'
    """
    return "file://" + re.sub(r"([\\{}\[\]*?])", r"\\\1", path)


def _live_frames(
    spark: SparkSession, place: Place, lake: Lake | None, parts: Sequence[Part],
    names: Sequence[str], on_gap: OnGap,
) -> list[DataFrame]:  # fmt: skip
    live = [part for part in parts if part.live_first < part.live_end]
    # What retention takes meanwhile is looked for in the lake, where another topic may be.
    alone = [part for part in live if part.is_alone]
    stitched = [part for part in live if not part.is_alone]
    return [
        _live_frame(spark, place, held, some, names, on_gap)
        for some, held in ((stitched, lake), (alone, None))
        if some
    ]


def _live_frame(
    spark: SparkSession, place: Place, lake: Lake | None, live: Sequence[Part],
    names: Sequence[str], on_gap: OnGap,
) -> DataFrame:  # fmt: skip
    options = {
        "servers": place.servers, "token": place.token, "timeout": place.timeout,
        "topic": ",".join(part.topic for part in live),
        "startingOffsets": json.dumps({part.topic: part.live_first for part in live}),
        "endingOffsets": json.dumps({part.topic: part.live_end for part in live}),
        "columns": ",".join(name for name in MESSAGE_COLUMNS if name in {*names, "published_at"}),
        # Should retention go on meanwhile, then only because the archive has gone on as well.
        "lake": None if lake is None else str(lake.folder),
        "onDataLoss": "skip" if on_gap == "skip" and lake is None else None,
    }  # fmt: skip
    given = {name: value for name, value in options.items() if value is not None}
    return spark.read.format("onward").options(**given).load()


def _between(begin: Side, finish: Side) -> Column | None:
    """Return the condition that times make, None when they make none."""
    conditions = []
    if begin.time_ms is not None:
        conditions.append(F.col("published_at") >= F.lit(_moment(begin.time_ms)))
    if finish.time_ms is not None:
        conditions.append(F.col("published_at") < F.lit(_moment(finish.time_ms)))
    return reduce(lambda one, other: one & other, conditions) if conditions else None


def _moment(at_ms: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=at_ms)


def _union(one: DataFrame, other: DataFrame) -> DataFrame:
    return one.union(other)
