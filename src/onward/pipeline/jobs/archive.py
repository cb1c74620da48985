"""archive: copy topics into the lake, every message once, and go on where the last run ended.

    onward pipeline archive --lake /data/lake 'orders*' --follow

    plan ──▶ tasks write files ──▶ ONE commit ──▶ the group advances ──▶ plan ...

The lake says how far it is; the group on the broker follows it, so that lag is visible and
retention can wait (`retention_group`). A crash before the commit leaves files that nothing names
and that the same work writes again; after it the next run only advances the group. What retention
took before the archive came is a gap: said in the result and recorded in the lake, never silent.
A topic that was deleted and created again is not the one that the lake holds: an error when it was
named, else it is left out, and the result says so. One archive works under a group at a time.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from onward.client.sync import SyncClient
from onward.clock import SystemClock
from onward.durations import Duration, duration_ms
from onward.errors import (
    AlreadyExists,
    Conflict,
    InvalidRequest,
    OffsetOutOfRange,
    TopicEnded,
    UnknownTopic,
)
from onward.pipeline import runs
from onward.pipeline.lake import Lake, check_lake, lake_folder, open_lake
from onward.pipeline.lake_files import archive_stretch, check_there
from onward.pipeline.lake_state import Gap, LakeFile, LakeState, check_same, origin_of
from onward.pipeline.place import Place, open_client
from onward.pipeline.planning import Stretch, admit
from onward.pipeline.tasks import parallelism_of, run_tasks
from onward.pipeline.window import choose_topics
from onward.protocol.operations.topics import TopicDescription

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS_PER_FILE = 1_000_000
ROWS_PER_TASK_MIN = 100_000
"""Work is cut finer than files need, so that all cores have some, but not below this."""
FILES_PER_CORE = 2
"""What a round may write: a crash repeats at most one round."""
TRIES = 10
"""How often a round is planned again because retention took its beginning."""
LOOK_EVERY_MS = 1_000
WAITED_FOR_MAX = 1_000
LEFT_OUT_TOLD_MAX = 20

_log = logging.getLogger("onward.pipeline")


@dataclass(frozen=True)
class Archived:
    """What a run of `archive` has written."""

    rows: int = 0
    files: int = 0
    bytes: int = 0
    topics: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Topic to the offsets that were added: from the first to before the second."""
    gaps: tuple[Gap, ...] = ()
    """What retention took before it could be archived."""
    left_out: tuple[str, ...] = ()
    """Topics that are not those that the lake holds under their names."""


@dataclass(frozen=True)
class Plan:
    """What one round does: stretches for tasks, gaps that it finds."""

    stretches: tuple[Stretch, ...] = ()
    gaps: tuple[Gap, ...] = ()
    origins: Mapping[str, str] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """How many messages it copies."""
        return sum(stretch.rows for stretch in self.stretches)


def archive(
    spark: SparkSession,
    *,
    place: Place,
    lake: str,
    topics: Sequence[str] = (),
    group: str = "archive",
    follow: bool = False,
    gather: Duration = "10s",
    rows_per_file: int = ROWS_PER_FILE,
    rows_max: int | None = None,
    stop: Callable[[], bool] | None = None,
    run: runs.Run | None = None,
) -> Archived:
    """Copy what the lake does not have yet of these topics, all of them when none is named.

    Ends where the topics end as it begins; with `follow` it goes on, a round whenever a file is
    full or messages have waited for `gather`, until `stop()` is true. `rows_max` ends it earlier.

        archive(spark, place=Place("localhost:7700"), lake="/data/lake", topics=["orders"])
    """
    if rows_per_file < 1 or (rows_max is not None and rows_max < 1):
        raise InvalidRequest("rows_per_file and rows_max are numbers from 1 on")
    check_lake(lake)
    with (
        runs.using(run, place, job="archive", lake=str(lake_folder(lake)), group=group) as told,
        open_client(place, name="archive") as mq,
    ):
        find_topics(mq, topics)  # a name that is mistyped leaves no lake behind
        job = _Archive(
            spark, mq, open_lake(lake, create=True), place=place, wanted=tuple(topics), group=group,
            rows_per_file=rows_per_file, rows_max=rows_max, run=told,
        )  # fmt: skip
        job.begin()
        if follow:
            job.follow(gather_ms=duration_ms(gather, "gather"), stop=stop or _never)
        else:
            job.finish(stop=stop or _never)
        done = job.done()
        told.result(rows=done.rows, files=done.files, bytes=done.bytes, gaps=len(done.gaps),
                    left_out=", ".join(done.left_out[:LEFT_OUT_TOLD_MAX]))  # fmt: skip
        return done


def find_topics(mq: SyncClient, wanted: Sequence[str]) -> list[TopicDescription]:
    """Return the topics that are to be archived, as they are now.

    >>> with open_client(Place("memory:")) as mq:
    ...     receipt = mq.publish("orders", "hello")
    ...     [topic.topic for topic in find_topics(mq, ["ord*"])]
    ['orders']
    """
    known = _known_topics(mq, wanted)
    return [known[name] for name in choose_topics(known, wanted)]


def _known_topics(mq: SyncClient, wanted: Sequence[str]) -> dict[str, TopicDescription]:
    """Return all topics of users, and of the system's own those that are named."""
    system = {name: mq.topic(name) for name in wanted if name.startswith("@")}
    return {topic.topic: topic for topic in mq.topics()} | system


def fitting(
    topics: Sequence[TopicDescription], state: LakeState, *, wanted: Sequence[str]
) -> tuple[list[TopicDescription], dict[str, Conflict]]:
    """Return the topics that the lake can take, and why not the others; a named one raises.

    >>> orders = TopicDescription(topic="orders", number=1, state="active")
    >>> fitting([orders], LakeState(), wanted=["ord*"]) == ([orders], {})
    True
    """
    fit, others = [], {}
    for topic in topics:
        try:
            check_same(topic, state)
        except Conflict as error:
            if topic.topic in wanted:
                raise
            others[topic.topic] = error
        else:
            fit.append(topic)
    return fit, others


def plan(
    topics: Sequence[TopicDescription], state: LakeState, *, rows_per_file: int, cores: int,
    rows_max: int | None = None,
) -> Plan:  # fmt: skip
    """Return the next round: from the lake's end of each topic to the topic's, cut into files.

    >>> orders = TopicDescription(topic="orders", number=1, state="active", next_offset=5)
    >>> plan([orders], LakeState(), rows_per_file=3, cores=1).stretches
    (Stretch(topic='orders', first=0, end=3), Stretch(topic='orders', first=3, end=5))
    """
    for topic in topics:
        check_same(topic, state)
    ends = {topic.topic: state.end_of(topic.topic) for topic in topics}
    gaps = [
        Gap(topic.topic, ends[topic.topic], topic.first_offset)
        for topic in topics
        if topic.first_offset > ends[topic.topic]
    ]
    starts = ends | {gap.topic: gap.end for gap in gaps}
    heads = {topic.topic: max(topic.next_offset, starts[topic.topic]) for topic in topics}
    room = rows_per_file * FILES_PER_CORE * cores
    goals = admit(starts, heads, rows_max=room if rows_max is None else min(room, rows_max))
    return Plan(
        tuple(
            part
            for topic, first in starts.items()
            for part in _cut(Stretch(topic, first, goals[topic]), rows_per_file, cores)
        ),
        tuple(gaps),
        {one.topic: origin_of(one) for one in topics if goals[one.topic] > ends[one.topic]},
    )


def _cut(whole: Stretch, rows_per_file: int, cores: int) -> list[Stretch]:
    """Cut a stretch into about equal parts: few enough for files, enough for all cores."""
    wanted = max(1, min(cores, whole.rows // ROWS_PER_TASK_MIN))
    parts = max(-(-whole.rows // rows_per_file), wanted)
    size = max(1, -(-whole.rows // parts))
    return [
        Stretch(whole.topic, first, min(whole.end, first + size))
        for first in range(whole.first, whole.end, size)
    ]


def _never() -> bool:
    return False


class _Archive:
    """One run: rounds until the end, or until it is told to stop."""

    def __init__(
        self, spark: SparkSession, mq: SyncClient, lake: Lake, *, place: Place,
        wanted: Sequence[str], group: str, rows_per_file: int, rows_max: int | None, run: runs.Run,
    ) -> None:  # fmt: skip
        self._spark = spark
        self._cores = parallelism_of(spark)
        self._mq = mq
        self._lake = lake
        self._place = place
        self._wanted = wanted
        self._group = group
        self._rows_per_file = rows_per_file
        self._rows_max = rows_max
        self._run = run
        self._member = f"archive {socket.gethostname()} {os.getpid()}"
        self._rows = self._files = self._bytes = 0
        self._topics: dict[str, tuple[int, int]] = {}
        self._gaps: list[Gap] = []
        self._known: dict[str, str] = {}
        """Topics of the group, and which ones they are."""
        self._left_out: dict[str, Conflict] = {}
        self._is_held = False
        self._clock = SystemClock()

    def begin(self) -> None:
        """Take the group, and bring it to where the lake is: a run may have died in between."""
        topics = self._look(is_first=True)
        self._join(topics)
        state = self._lake.state()
        for topic in topics:
            if end := state.end_of(topic.topic):
                self._advance(topic.topic, end)

    def finish(self, *, stop: Callable[[], bool]) -> None:
        """Archive to where the topics end now."""
        ends = {topic.topic: topic.next_offset for topic in self._look(is_first=True)}
        while not stop() and not self._is_full and self._round(ends):
            pass

    def follow(self, *, gather_ms: int, stop: Callable[[], bool]) -> None:
        """Archive what comes, until told to stop."""
        waiting_since_ms: int | None = None
        while not stop() and not self._is_full:
            topics = self._look()
            self._join(topics)
            lag = self._lag(topics)
            now_ms = self._clock.monotonic_ms()
            waiting_since_ms = None if not lag else waiting_since_ms or now_ms
            left_ms = gather_ms - (now_ms - waiting_since_ms) if waiting_since_ms else gather_ms
            if lag and (lag >= self._rows_per_file or left_ms <= 0):
                with suppress(UnknownTopic, TopicEnded):  # deleted meanwhile: look again
                    self._round(None)
                waiting_since_ms = None
            else:
                self._wait(topics, min(left_ms, LOOK_EVERY_MS))

    def done(self) -> Archived:
        """Return what was written."""
        return Archived(
            rows=self._rows, files=self._files, bytes=self._bytes, topics=dict(self._topics),
            gaps=tuple(self._gaps), left_out=tuple(sorted(self._left_out)),
        )  # fmt: skip

    @property
    def _is_full(self) -> bool:
        return self._rows_max is not None and self._rows >= self._rows_max

    # --- one round -----------------------------------------------------------------------------

    def _round(self, ends: Mapping[str, int] | None) -> bool:
        """Plan, write, commit, advance; tell whether there was anything to do."""
        for tries_left in reversed(range(TRIES)):
            work = self._plan(ends)
            if not work.stretches and not work.gaps:
                return False
            try:
                files = self._write(work)
                self._check_origins(work)
            except (OffsetOutOfRange, UnknownTopic, TopicEnded):
                # Retention was quicker, or a topic is gone: the next plan knows of it.
                if not tries_left:
                    raise
            else:
                self._commit(work, files)
                break
        return True

    def _plan(self, ends: Mapping[str, int] | None) -> Plan:
        # The lake first: what it has by then, the topics have as well.
        state = self._lake.state()
        topics = self._look()
        if ends is not None:
            topics = [
                _until(topic, max(ends[topic.topic], state.end_of(topic.topic)))
                for topic in topics
                if topic.topic in ends
            ]
        return plan(
            topics, state, rows_per_file=self._rows_per_file,
            cores=self._cores,
            rows_max=None if self._rows_max is None else self._rows_max - self._rows,
        )  # fmt: skip

    def _write(self, work: Plan) -> list[LakeFile]:
        """Let tasks write the files of a plan; none of them counts yet."""
        if not work.stretches:
            return []
        task = partial(archive_stretch, self._place, str(self._lake.folder))
        files = [file for some in run_tasks(self._spark, task, work.stretches) for file in some]
        check_there(self._lake, files)
        return files

    def _commit(self, work: Plan, files: Sequence[LakeFile]) -> None:
        state = self._lake.commit(add=files, gaps=work.gaps, origins=work.origins)
        for gap in work.gaps:
            _log.warning(
                "offsets %d to %d of topic %r were gone before they could be archived",
                gap.first, gap.end - 1, gap.topic,
            )  # fmt: skip
        self._gaps += work.gaps
        self._files += len(files)
        self._rows += sum(file.rows for file in files)
        self._bytes += sum(file.bytes for file in files)
        for stretch in work.stretches:
            first, _ = self._topics.get(stretch.topic, (stretch.first, 0))
            self._topics[stretch.topic] = first, stretch.end
        for topic in work.origins:
            with suppress(UnknownTopic, TopicEnded):  # it is in the lake, and nowhere else now
                self._advance(topic, state.end_of(topic))
        lag = self._lag(self._look())
        self._run.progress(rows=self._rows, files=self._files, lag=lag)

    # --- the broker ----------------------------------------------------------------------------

    def _check_origins(self, work: Plan) -> None:
        """Raise when a topic is another one than at the plan: whose messages are these?"""
        now = _known_topics(self._mq, self._wanted)
        for topic, origin in work.origins.items():
            if topic in now and origin_of(now[topic]) != origin:
                raise TopicEnded(f"topic {topic!r} was deleted and created again while it was read")

    def _look(self, *, is_first: bool = False) -> list[TopicDescription]:
        """Return the topics that are to be archived and can be, as they are now."""
        state = self._lake.state()
        try:
            topics = find_topics(self._mq, self._wanted)
        except UnknownTopic:
            # Who follows a pattern goes on when the last topic of it is gone.
            if is_first:
                raise
            known = _known_topics(self._mq, self._wanted)
            topics = [topic for name, topic in known.items() if name in self._known]
        topics, others = fitting(topics, state, wanted=self._wanted)
        for name in sorted(others.keys() - self._left_out.keys()):
            _log.warning("topic %r is left out of the archive: %s", name, others[name])
        self._left_out |= others
        return topics

    def _join(self, topics: Sequence[TopicDescription]) -> None:
        """Let the group consume these topics from their beginning, and keep it to this run."""
        ours = {one.topic: origin_of(one) for one in topics if not one.topic.startswith("@")}
        if ours.items() <= self._known.items():
            return
        try:
            self._mq.create_group(self._group, sorted(ours), start="earliest")
        except AlreadyExists:
            has = {share.topic for share in self._mq.group(self._group).topics}
            if more := sorted(ours.keys() - has):
                self._mq.change_group(self._group, add_topics=more)
        if not self._is_held:
            self._mq.hold_group(self._group, holder=f"the {self._member}")
            self._is_held = True
        self._known |= ours

    def _advance(self, topic: str, end: int) -> None:
        # The system's own topics have no groups; nothing waits for them.
        if not topic.startswith("@"):
            self._mq.advance_group(self._group, topic, to=end, member=self._member)

    def _lag(self, topics: Sequence[TopicDescription]) -> int:
        state = self._lake.state()
        return sum(max(0, topic.next_offset - state.end_of(topic.topic)) for topic in topics)

    def _wait(self, topics: Sequence[TopicDescription], wait_ms: int) -> None:
        """Return when a topic has more than it had, or when the time is over."""
        ends = {topic.topic: topic.next_offset for topic in topics[:WAITED_FOR_MAX]}
        if not ends:
            time.sleep(wait_ms / 1000)
            return
        try:
            self._mq.topic_ends(ends, wait_ms=wait_ms)
        except (UnknownTopic, TopicEnded):
            return  # the next look is at those that are still there


def _until(topic: TopicDescription, end: int) -> TopicDescription:
    """Return a topic as if it ended there."""
    return msgspec.structs.replace(topic, next_offset=max(min(end, topic.next_offset), 0))
