"""How far streams are, told to the broker: lag is seen there like any consumer's.

    listen(spark)        once per session: after every batch the query's group is advanced, and a
                         line goes to '@pipeline'; one that fails before its first batch has
                         a line too, when the session knows its broker
    catch_up(query)      when a query has ended: returns once its last batch counts too

A query holds its group and advances it itself whenever it plans its next batch; the listener does
so as soon as a batch is done, the last one too. Progress is a courtesy: what must not be lost is in
the checkpoint of the query, so a broker that is away costs a line in the log and never the query.
A replica keeps no progress: it goes to the leader, and while there is none, one line says so.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from pyspark.sql.streaming.listener import StreamingQueryListener

from onward.clock import SystemClock
from onward.errors import Conflict, NotLeader, OnwardError, UnknownTopic
from onward.pipeline.failure import plain
from onward.pipeline.place import Place, open_client
from onward.pipeline.runs import TOPIC, JobRun, encode

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
        SourceProgress,
        StreamingQueryProgress,
    )
    from pyspark.sql.streaming.query import StreamingQuery

    from onward.client.sync import SyncClient

GROUP, SERVERS, ORIGINS = "@group", "@servers", "@origins"
"""What a stream's offset says beside where it is in each topic."""
MEMBER = "spark"

FREE_S = 5.0
"""How long a group may stay held after its query has ended: its process needs a moment to go."""
_PATIENCE = "5s"
_TOPICS_SHOWN = 50
_ERROR_CHARACTERS_MAX = 500
_OURS = "onward.errors."
_log = logging.getLogger("onward.pipeline")
_listeners: dict[str, ProgressListener] = {}


def positions(offset: Mapping[str, object]) -> dict[str, int]:
    """Return the topics of a stream's offset.

    >>> positions({"@group": "totals", "orders": 12})
    {'orders': 12}
    """
    beside = (GROUP, SERVERS, ORIGINS)
    return {topic: int(str(at)) for topic, at in offset.items() if topic not in beside}


def advance(mq: SyncClient, group: str, to: Mapping[str, int]) -> None:
    """Let a group be finished with all below these offsets; a topic that is no more is left out."""
    for topic, offset in to.items():
        if offset > 0:
            with suppress(UnknownTopic):
                mq.advance_group(group, topic, to=offset, member=MEMBER)


class Leader:
    """Does for a group what only a leader does; while none is known, reading goes on without it."""

    def __init__(self) -> None:
        self._is_missing = False

    def ask(self, mq: SyncClient, group: str, call: Callable[[], None]) -> bool:
        """Call; return False when there is no leader. A search takes its time only once."""
        if self._is_missing and not mq.has_leader():
            return False
        try:
            call()
        except NotLeader as error:
            if not self._is_missing:
                _log.warning(
                    "no progress of group %r is kept until its leader can be reached; reading goes "
                    "on: %s", group, error,
                )  # fmt: skip
            self._is_missing = True
            return False
        self._is_missing = False
        return True


def listen(spark: SparkSession, place: Place | None = None) -> None:
    """Tell the broker of every batch of this session's streams that have a group.

    `place` is for those that fail before it is seen whose they are; else the session's counts.
    """
    application = spark.sparkContext.applicationId
    if application not in _listeners:
        _listeners[application] = ProgressListener(_token(spark), servers=_servers(spark))
        spark.streams.addListener(_listeners[application])
    if place is not None:
        _listeners[application].servers = place.servers


def catch_up(query: StreamingQuery, *, token: str | None = None) -> None:
    """Return when the groups of a query that has ended are finished with its last batch."""
    progress = query.lastProgress
    for reached in () if progress is None else reached_by(progress.sources):
        place = Place(reached.servers, token or os.environ.get("ONWARD_TOKEN"))
        with open_client(place, name="spark-progress") as mq:
            Leader().ask(mq, reached.group, partial(advance_when_free, mq, reached))


def lag(progress: StreamingQueryProgress | None) -> dict[str, int]:
    """Return how many messages each topic of a query had beyond a batch.

        lag(query.lastProgress)        # {"orders": 120}

    Spark has no place for metrics of a source in Python, so this is computed from the offsets of
    the progress; sources of other systems are left out. None is the progress of no batch yet.
    """
    found: dict[str, int] = {}
    for source in () if progress is None else progress.sources:
        offset, ends = _parsed(source.endOffset), _parsed(source.latestOffset)
        if ORIGINS in offset or GROUP in offset:  # It is a source of ours.
            at = positions(offset)
            for topic, end in positions(ends).items():
                found[topic] = max(found.get(topic, 0), end - at.get(topic, end), 0)
    return found


class Reached(NamedTuple):
    """Where one source of a query stands after a batch, and where its topics end."""

    servers: str
    group: str
    offsets: dict[str, int]
    ends: dict[str, int]

    @property
    def lags(self) -> dict[str, int]:
        """How much is left of each topic."""
        return {
            topic: max(0, end - self.offsets.get(topic, end)) for topic, end in self.ends.items()
        }


def reached_by(sources: Sequence[SourceProgress]) -> list[Reached]:
    """Return where sources stand; those of other systems and those without a group are left out."""
    found = []
    for source in sources:
        offset = _parsed(source.endOffset)
        if GROUP in offset and SERVERS in offset:
            ends = positions(_parsed(source.latestOffset))
            found.append(Reached(str(offset[SERVERS]), str(offset[GROUP]), positions(offset), ends))
    return found


def advance_when_free(mq: SyncClient, reached: Reached) -> None:
    """Advance the group of a query that has ended: its process may still let go of it."""
    deadline = time.monotonic() + FREE_S
    while True:
        try:
            advance(mq, reached.group, reached.offsets)
        except Conflict:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.05)
        else:
            return


class ProgressListener(StreamingQueryListener):
    """Hears of every batch, in the driver, one event after another."""

    def __init__(self, token: str | None, *, servers: str | None = None) -> None:
        self.servers = servers
        self._token = token
        self._started: dict[str, JobRun] = {}
        self._clients: dict[str, SyncClient] = {}
        self._leaders: dict[str, Leader] = {}
        self._queries: dict[str, tuple[list[Reached], JobRun]] = {}

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802
        """A query has begun; which group it has is seen after its first batch."""
        self._started[str(event.runId)] = _first_line(event)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802
        """A query had nothing to do."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        """A batch is done: advance its groups, and say so."""
        progress = event.progress
        found = reached_by(progress.sources)
        if not found:
            return
        run = str(progress.runId)
        was = self._queries.get(run)
        line = _line(progress, found, was[1] if was else None)
        self._queries[run] = found, line
        for reached in found:
            self._tell(reached, line)

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        """A query is over: its group is free, and its last batch counts too."""
        started = self._started.pop(str(event.runId), None)
        found, line = self._queries.pop(str(event.runId), ([], None))
        for reached in found:
            assert line is not None, "a query that has reached something has said so"
            self._tell(reached, _last_line(line, event.exception))
        # Queries of other systems are heard of as well: only by our own error one is ours.
        if not found and started is not None and _OURS in (event.exception or ""):
            self._tell_failed(_last_line(started, event.exception))
        if not self._queries:
            self._close()

    def _tell(self, reached: Reached, line: JobRun) -> None:
        try:
            mq = self._client(reached.servers)
            leader = self._leaders.setdefault(reached.servers, Leader())
            leader.ask(mq, reached.group, partial(_tell_batch, mq, reached, line))
        except Exception as error:  # noqa: BLE001 - whatever it is, the query must not end by it
            _log.warning("the progress of group %r was not told: %s", reached.group, error)
            self._drop(reached.servers)

    def _tell_failed(self, line: JobRun) -> None:
        if self.servers is None:
            return
        try:
            self._client(self.servers).publish_soon(TOPIC, encode(line), key=line.run).result()
        except Exception as error:  # noqa: BLE001 - it has failed already, for a reason of its own
            _log.warning("the failure of a query was not told: %s", error)
            self._drop(self.servers)

    def _client(self, servers: str) -> SyncClient:
        if servers not in self._clients:
            made = open_client(Place(servers, self._token, _PATIENCE), name="spark-progress")
            made.open()
            self._clients[servers] = made
        return self._clients[servers]

    def _drop(self, servers: str) -> None:
        if (client := self._clients.pop(servers, None)) is not None:
            with suppress(OnwardError):
                client.close(drain=False)

    def _close(self) -> None:
        while self._clients:
            with suppress(OnwardError):
                self._clients.popitem()[1].close()


def _tell_batch(mq: SyncClient, reached: Reached, line: JobRun) -> None:
    mq.publish_soon(TOPIC, encode(line), key=line.run)
    # Another pipeline may hold the group by now: then that is how it stands.
    with suppress(Conflict):
        if line.state == "running":
            advance(mq, reached.group, reached.offsets)
        else:
            advance_when_free(mq, reached)


def _first_line(event: QueryStartedEvent) -> JobRun:
    now_ms = SystemClock().now_ms()
    return JobRun(
        run=str(event.runId)[:12],
        job="stream",
        state="running",
        started_at_ms=now_ms,
        at_ms=now_ms,
        about={"query": event.name or str(event.id)},
    )


def _line(progress: StreamingQueryProgress, found: Sequence[Reached], was: JobRun | None) -> JobRun:
    lags = {topic: lag for reached in found for topic, lag in reached.lags.items()}
    now_ms = SystemClock().now_ms()
    took_ms = int(progress.durationMs.get("triggerExecution", 0))
    return JobRun(
        run=str(progress.runId)[:12],
        job="stream",
        state="running",
        started_at_ms=was.started_at_ms if was else now_ms - took_ms,
        at_ms=now_ms,
        rows=(was.rows if was else 0) + progress.numInputRows,
        rows_per_s=round(float(progress.processedRowsPerSecond), 1),
        lag=sum(lags.values()),
        about={
            "query": progress.name or str(progress.id),
            "group": ", ".join(reached.group for reached in found),
            "topics": sorted(lags)[:_TOPICS_SHOWN],
        },
        result={
            "batch": progress.batchId,
            "batch_ms": took_ms,
            **{f"lag {topic}": lags[topic] for topic in sorted(lags)[:_TOPICS_SHOWN]},
        },
    )


def _last_line(line: JobRun, error: str | None) -> JobRun:
    now_ms = SystemClock().now_ms()
    if error is None:
        return msgspec.structs.replace(line, state="done", at_ms=now_ms)
    sentence = plain(RuntimeError(error)) or error[-_ERROR_CHARACTERS_MAX:]
    return msgspec.structs.replace(line, state="failed", at_ms=now_ms, error=str(sentence))


def _parsed(text: str | None) -> dict[str, int | str]:
    with suppress(ValueError, TypeError):
        found = json.loads(text or "{}")
        if isinstance(found, dict):
            return found
    return {}


def _servers(spark: SparkSession) -> str | None:
    return spark.conf.get("spark.onward.servers", None) or os.environ.get("ONWARD_ADDRESS")


def _token(spark: SparkSession) -> str | None:
    return spark.conf.get("spark.onward.token", None) or os.environ.get("ONWARD_TOKEN")
