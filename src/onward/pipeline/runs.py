"""Runs of jobs: what they say of themselves while they work, for everybody to see.

    running(...) ──▶ "running"  ──▶ "running", more rows ──▶ "done" with a result, "failed",
                                                             or "stopped" by ctrl-C

Each line is one message of the topic '@pipeline', the whole state of its run: the newest one
counts. So a reader needs no beginning; `last_runs` looks from the end backwards.

    - A run speaks over a connection of its own, at most once a second and at least every ten:
      one that says that it runs, and has been silent for a minute, is lost.
    - It never fails its job: a broker that is away, or says no, is one warning in the log.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Literal

import msgspec

from onward.client.sync import SyncClient
from onward.clock import Clock, SystemClock
from onward.errors import OnwardError, OutcomeUnknown, Unavailable
from onward.pipeline.failure import is_interrupt, plain
from onward.pipeline.place import Place, open_client

if TYPE_CHECKING:
    from concurrent.futures import Future

    from onward.client.receipt import Receipt

TOPIC = "@pipeline"
STREAM = "stream"
"""The job of a query of a user's own."""
PATIENCE = "5s"
"""How long a run waits for its broker before it falls silent."""

BEAT_S = 10.0
"""How often a run says that it is still there."""
LOST_MS = 60_000
"""How long a run that runs may be silent."""

State = Literal["running", "done", "failed", "stopped"]
Scalar = str | int | float | bool | None

_log = logging.getLogger("onward.pipeline")

_SAY_EVERY_MS = 1_000
_KEPT = "90d"
_ERROR_CHARACTERS_MAX = 2_000
_RESULT_FIELDS_MAX = 100
_LOOK_BACK = 1_000
_LOOK_BACK_MAX = 50_000


class JobRun(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state of one run, as it stands in '@pipeline'.

    >>> run = JobRun(run="7f", job="archive", state="done", started_at_ms=1_000, at_ms=3_000)
    >>> decode(encode(run)).took_ms
    2000
    """

    run: str
    job: str
    state: State
    started_at_ms: int = 0
    at_ms: int = 0
    """When this was said: the end of a run that has ended."""
    rows: int = 0
    rows_per_s: float = 0.0
    lag: int | None = None
    """Messages that are still to come, where the job knows."""
    files: int | None = None
    error: str = ""
    about: dict[str, Scalar | list[str]] = {}
    """What it works on: topic, group, lake."""
    result: dict[str, Scalar] = {}

    @property
    def took_ms(self) -> int:
        """How long it has run, as far as it has said."""
        return max(0, self.at_ms - self.started_at_ms)

    def is_lost(self, *, now_ms: int) -> bool:
        """Whether it should have been heard of since: whoever ran it is gone.

        >>> JobRun(run="7f", job="archive", state="running", at_ms=1_000).is_lost(now_ms=90_000)
        True
        """
        # A stream that has nothing to do says nothing.
        speaks = self.state == "running" and self.job != STREAM
        return speaks and now_ms - self.at_ms > LOST_MS


def encode(run: JobRun) -> bytes:
    """Return a run as the body of a message.

    >>> encode(JobRun(run="7f", job="archive", state="running"))
    b'{"run":"7f","job":"archive","state":"running"}'
    """
    try:
        return msgspec.json.encode(run)
    except UnicodeEncodeError:
        # A path or an argument that is not UTF-8: half a surrogate pair is text for Python only.
        return msgspec.json.encode(_encodable(msgspec.to_builtins(run)))


def decode(body: bytes) -> JobRun | None:
    """Return the run that a message tells of; None for what is none.

    >>> decode(b'hello') is None
    True
    """
    try:
        return msgspec.json.decode(body, type=JobRun)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


class Run:
    """One run of a job, as the job sees it: tell it how far you are, and what came of it.

    >>> said = []
    >>> run = Run(job="archive", say=said.append)
    >>> run.progress(rows=1_000)
    >>> said[0].state, run.state.rows
    ('running', 1000)
    """

    def __init__(
        self,
        *,
        job: str,
        say: Callable[[JobRun], None],
        watch: Callable[[JobRun], None] | None = None,
        about: Mapping[str, Scalar | list[str]] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._say = say
        self._watch = watch
        self._clock = clock or SystemClock()
        self._lock = threading.RLock()
        self._began_ms = self._said_ms = self._clock.monotonic_ms()
        now_ms = self._clock.now_ms()
        self.state = JobRun(
            run=uuid.uuid4().hex[:12], job=job, state="running", started_at_ms=now_ms,
            at_ms=now_ms, about=dict(about or {}),
        )  # fmt: skip
        self._say(self.state)
        if watch is not None:
            watch(self.state)

    def progress(
        self, *, rows: int | None = None, lag: int | None = None, files: int | None = None
    ) -> None:
        """Tell how far the job is: all rows so far, what is left, the files so far."""
        with self._lock:
            self._change(rows=rows, lag=lag, files=files)
            self._perhaps_say()

    def beat(self) -> None:
        """Say that it is still there, as far as it was; nothing after its end."""
        with self._lock:
            if self.state.state == "running":
                self.state = msgspec.structs.replace(self.state, at_ms=self._clock.now_ms())
                self._perhaps_say()

    def result(self, **fields: object) -> None:
        """Tell what came of it; values that are neither text nor number are written as text."""
        plain = {name: _plain(value) for name, value in fields.items()}
        with self._lock:
            kept = dict(list((self.state.result | plain).items())[:_RESULT_FIELDS_MAX])
            self.state = msgspec.structs.replace(self.state, result=kept)

    def end(self, error: BaseException | None = None) -> None:
        """Say the last word. `running` does so by itself."""
        state, text = _ending(error)
        with self._lock:
            self._change()
            self.state = msgspec.structs.replace(
                self.state, state=state, error=text[:_ERROR_CHARACTERS_MAX]
            )
            self._say(self.state)

    def _perhaps_say(self) -> None:
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._said_ms >= _SAY_EVERY_MS:
            self._said_ms = now_ms
            self._say(self.state)

    def _change(
        self, *, rows: int | None = None, lag: int | None = None, files: int | None = None
    ) -> None:
        was = self.state
        rows = was.rows if rows is None else rows
        took_ms = self._clock.monotonic_ms() - self._began_ms
        self.state = msgspec.structs.replace(
            was, rows=rows, at_ms=self._clock.now_ms(),
            rows_per_s=round(rows * 1_000 / took_ms, 1) if took_ms > 0 else 0.0,
            lag=was.lag if lag is None else lag, files=was.files if files is None else files,
        )  # fmt: skip
        if self._watch is not None:
            self._watch(self.state)


@contextmanager
def running(
    place: Place,
    *,
    job: str,
    watch: Callable[[JobRun], None] | None = None,
    **about: Scalar | list[str],
) -> Iterator[Run]:
    """Run a job in this block, and let '@pipeline' know how it goes.

    >>> with running(Place("memory:"), job="archive", topic="orders") as run:
    ...     run.progress(rows=1_000, lag=0)
    ...     run.result(files=1)
    >>> run.state.state, run.state.result
    ('done', {'files': 1})
    """
    with _Voice(place) as voice:
        run = Run(job=job, say=voice.say, watch=watch, about=about)
        try:
            with _beating(run):
                yield run
        except BaseException as error:
            run.end(error)
            raise
        run.end()


@contextmanager
def _beating(run: Run) -> Iterator[None]:
    """Let a run be heard of while the block works, however long it is busy with one thing."""
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(BEAT_S):
            run.beat()

    thread = threading.Thread(target=beat, name="onward-run", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _ending(error: BaseException | None) -> tuple[State, str]:
    """Return how a run ended, and what went wrong."""
    if error is None:
        return "done", ""
    if is_interrupt(error):
        return "stopped", ""
    said = plain(error) or error
    return "failed", str(said) or type(said).__name__


@contextmanager
def using(run: Run | None, place: Place, *, job: str, **about: Scalar | list[str]) -> Iterator[Run]:
    """Give the run of the caller, who ends it, or one of the block's own.

    >>> mine = Run(job="replay", say=lambda state: None)
    >>> with using(mine, Place("memory:"), job="replay") as run:
    ...     run is mine
    True
    """
    if run is not None:
        yield run
        return
    with running(place, job=job, watch=None, **about) as own:
        yield own


def last_runs(mq: SyncClient, *, job: str | None = None, limit: int = 20) -> list[JobRun]:
    """Return the newest runs, each as it was last heard of, the one that began last first.

    >>> from onward import connect_sync
    >>> with connect_sync("memory:") as mq:
    ...     last_runs(mq)
    []
    """
    if not mq.has_topic(TOPIC):
        return []
    found: dict[str, JobRun] = {}
    topic = mq.topic(TOPIC)
    end = topic.next_offset
    floor = max(topic.first_offset, end - _LOOK_BACK_MAX)
    while end > floor and len(found) < limit:
        first = max(floor, end - _LOOK_BACK)
        for run in reversed(_stretch(mq, first, end)):
            if job is None or run.job == job:
                found.setdefault(run.run, run)
        end = first
    newest = sorted(found.values(), key=lambda run: (run.started_at_ms, run.at_ms), reverse=True)
    return newest[:limit]


def _stretch(mq: SyncClient, first: int, end: int) -> list[JobRun]:
    """Return what was said from one offset to before another, in order."""
    told: list[JobRun | None] = []
    for batch in mq.read(TOPIC, start=first, end=end).batches():
        wanted = max(0, end - batch.first_offset)
        told += map(decode, batch.bodies[:wanted])
    return [run for run in told if run is not None]


class _Voice:
    """The connection of a run: speaks without waiting, and falls silent after one failure."""

    def __init__(self, place: Place) -> None:
        self._place = place._replace(timeout=PATIENCE)
        self._mq: SyncClient | None = None
        self._last: Future[Receipt] | None = None

    def __enter__(self) -> _Voice:
        try:
            mq = open_client(self._place, name="pipeline-run")
            mq.open()
        except OnwardError as error:
            self._give_up(error)
            return self
        self._mq = mq
        try:
            if not mq.has_topic(TOPIC):
                mq.create_topic(TOPIC, retention=_KEPT, exist_ok=True)
        except OnwardError as error:
            self._give_up(error)
        return self

    def say(self, run: JobRun) -> None:
        """Publish a state, unless nobody listens."""
        if self._mq is None:
            return
        try:
            self._check()
            self._last = self._mq.publish_soon(TOPIC, encode(run), key=run.run)
        except OnwardError as error:
            self._give_up(error)

    def __exit__(self, *_: object) -> None:
        if self._mq is None:
            return
        try:
            if self._last is not None:
                self._last.result()
        except OnwardError as error:
            self._give_up(error)
        else:
            self._close()

    def _check(self) -> None:
        """Raise what became of the last one; what still waits is no failure."""
        if self._last is not None and self._last.done():
            self._last.result()

    def _give_up(self, error: OnwardError) -> None:
        why = "is away" if isinstance(error, Unavailable | OutcomeUnknown) else "says no"
        _log.warning("progress is not shown: the broker %s (%s)", why, error)
        self._close()

    def _close(self) -> None:
        mq, self._mq = self._mq, None
        if mq is not None:
            with suppress(OnwardError):
                mq.close(drain=False)


def _encodable(value: object) -> object:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_encodable(name): _encodable(one) for name, one in value.items()}
    return [_encodable(one) for one in value] if isinstance(value, list) else value


def _plain(value: object) -> Scalar:
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value)
