"""What all commands on Spark share: options, the session, a bar while they work, plain errors.

`spark_options` gives a command --address, --token, --timeout, --master, --memory and --conf, and
calls it with `spark`, a Start. Nothing of Spark is imported before a command begins its job:

    with spark.job("archive", lake=lake) as work:
        from onward.pipeline.jobs.archive import archive
        done = archive(work.session, place=work.place, lake=lake, run=work.run)

The bar on stderr shows what the job tells its run. Spark's pages of error become our one sentence,
and what can be seen to be wrong without Spark is said before it starts. Ctrl-C and SIGTERM end a
job with one line (pipeline_stop.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, is_dataclass
from datetime import UTC, datetime, timedelta
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from onward.cli.output import is_terminal, printable
from onward.cli.params import DURATION, INSTANT, PAIR, refuse_at_once
from onward.cli.pipeline_stop import LINE, Stop
from onward.client.address import parse_addresses
from onward.client.finding import parse_id
from onward.errors import InvalidRequest, NotConnected, NotInstalled, OnwardError

if TYPE_CHECKING:
    from onward.pipeline.place import Place
    from onward.pipeline.runs import JobRun, Run

TIMEOUT = "30s"
_NOT_OURS = {"pyspark", "pyarrow", "py4j"}
_REMOTE = ("tcp", "unix")


class Work(NamedTuple):
    """What a job is given."""

    session: Any
    """A SparkSession: only the pipeline knows pyspark."""
    place: Place
    run: Run
    stop: Stop
    """Whether somebody wants it to end, for a job that is asked to."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where the broker is and how Spark is to run: enough to begin a job."""

    address: str
    token: str | None
    timeout_ms: int
    master: str | None
    memory: str
    config: Mapping[str, str]
    is_debug: bool = False
    """Whether all that Spark says is to be seen."""

    @contextmanager
    def job(
        self,
        name: str,
        *,
        needs_broker: bool = True,
        is_own: bool = True,
        check: Callable[[], object] | None = None,
        is_asked_to_end: bool = False,
        has_bar: bool = True,
        stopped: str = LINE,
        **about: Any,
    ) -> Iterator[Work]:
        """Start Spark and run a job in this block; with `is_own` its errors are told in one line.

        Spark takes a while to start. What is wrong without it is noticed before: a broker that is
        not there, a topic or a lake that does not exist, what `check` raises. With
        `is_asked_to_end` the first ctrl-C only makes `work.stop()` true; `stopped` is what is said
        when one has ended it.
        """
        stop = Stop(stopped)
        with stop.in_one_line(), in_one_line(is_own=is_own), ExitStack() as stack:
            is_there = self._is_there(needs_broker=needs_broker)
            from onward.pipeline.place import Place
            from onward.pipeline.runs import Run, running

            place = Place(self.address, self.token, f"{self.timeout_ms}ms")
            if check is not None:
                check()
            check_named(place if is_there else None, name, about)
            watch = stack.enter_context(_bar(name) if has_bar else nullcontext())
            spark = self._session(place, name, is_quiet=is_own and not self.is_debug)
            stop.listen(is_gentle=is_asked_to_end)
            if is_there:
                run = stack.enter_context(running(place, job=name, watch=watch, **about))
            else:
                run = Run(job=name, say=lambda _: None, watch=watch)
            yield Work(spark, place, run, stop)

    def _session(self, place: Place, name: str, *, is_quiet: bool) -> Any:
        from onward.pipeline.quiet import kept_quiet
        from onward.pipeline.sessions import session

        with kept_quiet() if is_quiet else nullcontext():
            return session(
                self.master, place=place, name=f"onward {name}", config=dict(self.config),
                memory=self.memory,
            )  # fmt: skip

    def with_config(self, **config: str) -> Start:
        """Return a start with more options of Spark, with underscores for dots."""
        more = {name.replace("_", "."): value for name, value in config.items()}
        return Start(**{**vars(self), "config": {**self.config, **more}})

    def _is_there(self, *, needs_broker: bool) -> bool:
        try:
            refuse_at_once(self.address)
        except NotConnected:
            if needs_broker:
                raise
            return False
        return True


def spark_options(command: Callable[..., object]) -> Callable[..., object]:
    """Add the options of a job on Spark to a command that takes `spark`.

    @click.command()
    @spark_options
    def command(*, spark: Start) -> None:
        with spark.job("archive") as work: ...
    """

    @wraps(command)
    def with_start(
        *, address: str, token: str | None, timeout_ms: int, master: str | None, memory: str,
        conf: Sequence[tuple[str, str]], **options: Any,
    ) -> object:  # fmt: skip
        _check_address(address)
        for one in options.get("ids") or ():
            parse_id(one)
        start = Start(
            address=address, token=token, timeout_ms=timeout_ms, master=master, memory=memory,
            config=dict(conf), is_debug=_is_debug(),
        )  # fmt: skip
        return command(spark=start, **options)

    decorated: Callable[..., object] = with_start
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated


_OPTIONS = (
    click.option(
        "--master", envvar="ONWARD_SPARK_MASTER", metavar="URL",
        help="Where Spark runs: local[N], spark://HOST:PORT. "
        "[default: ONWARD_SPARK_MASTER or local[*]]",
    ),
    click.option(
        "--memory", default="1g", metavar="SIZE",
        help="Memory of Spark's driver and of each executor, as 4g. [default: 1g]",
    ),
    click.option(
        "--conf", type=PAIR, multiple=True, metavar="NAME=VALUE",
        help="A setting of Spark; may be given often.",
    ),
    click.option(
        "--address", envvar="ONWARD_ADDRESS", default="localhost:7700", metavar="ADDRESS",
        help="Where the broker is: host:port, several with commas, or unix:PATH. "
        "[default: ONWARD_ADDRESS or localhost:7700]",
    ),
    click.option(
        "--token", envvar="ONWARD_TOKEN", metavar="SECRET",
        help="Proof of who you are; better in ONWARD_TOKEN than here.",
    ),
    click.option(
        "--timeout", "timeout_ms", type=DURATION, default=TIMEOUT, metavar="DURATION",
        help=f"How long to wait for an answer. [default: {TIMEOUT}]",
    ),
)  # fmt: skip

lake_option = click.option(
    "--lake", envvar="ONWARD_LAKE", metavar="FOLDER",
    help="The lake that holds the past. [default: ONWARD_LAKE or none]",
)  # fmt: skip

needed_lake_option = click.option(
    "--lake", envvar="ONWARD_LAKE", required=True, metavar="FOLDER",
    help="The folder of the lake; on a cluster all machines see it. [default: ONWARD_LAKE]",
)  # fmt: skip


class _Moment(click.ParamType):  # type: ignore[type-arg]  # not generic in older releases
    """A time, or how long ago."""

    name = "time"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> object:
        """Read a time."""
        if not isinstance(value, str):
            return value
        instant_ms = INSTANT.convert(value, param, ctx)
        assert isinstance(instant_ms, int)
        try:
            return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=instant_ms)
        except OverflowError:
            self.fail(f"{value!r} lies after the year 9999", param, ctx)


def window_options(command: Callable[..., object]) -> Callable[..., object]:
    """Add --since and --until."""
    moment = _Moment()
    decorated = click.option(
        "--until", type=moment, metavar="TIME", help="The end of it. [default: now]"
    )(command)
    return click.option(
        "--since", type=moment, metavar="TIME",
        help="From this time of publishing on: 2h (ago) or 2026-11-16T10:00Z. "
        "[default: the beginning]",
    )(decorated)  # fmt: skip


def record_of(result: object) -> dict[str, object]:
    """Return what a job returned, by name, as JSON can say it.

    >>> class Counted(NamedTuple):
    ...     rows: int
    >>> record_of(Counted(7))
    {'rows': 7}
    """
    fields: Mapping[str, object]
    if isinstance(result, tuple) and hasattr(result, "_asdict"):
        fields = result._asdict()
    elif is_dataclass(result) and not isinstance(result, type):
        fields = asdict(result)
    else:
        assert isinstance(result, Mapping), f"{type(result).__name__} has no names"
        fields = result
    return {name: _plain(value) for name, value in fields.items()}


def _plain(value: object) -> object:
    if isinstance(value, datetime):
        moment = value.astimezone(UTC)
        return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode(errors="backslashreplace")
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if (isinstance(value, tuple) and hasattr(value, "_asdict")) or is_dataclass(value):
        return record_of(value)
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(one) for one in value]
    return value


def check_named(place: Place | None, job: str, about: Mapping[str, Any]) -> None:
    """Raise when the lake or a topic that a job is about does not exist; no Spark is needed."""
    from onward.pipeline.lake import check_lake, open_lake
    from onward.pipeline.place import open_client
    from onward.pipeline.window import choose_topics

    held: set[str] = set()
    if about.get("lake") is not None:
        if job == "archive":
            check_lake(about["lake"])
        else:
            state = open_lake(about["lake"]).state()
            held = {*state.files, *state.gaps}
    wanted = list(about.get("topics") or ())
    if job == "replay":
        wanted.append(about["topic"])
    # A topic of the past may be in the lake only; system topics are not in the list.
    open_ones = [one for one in wanted if one not in held and not one.startswith("@")]
    if place is None or job == "compact" or not open_ones:
        return
    with open_client(place, name="onward-cli") as mq:
        choose_topics({*held, *(one.topic for one in mq.topics())}, open_ones)


def _is_debug() -> bool:
    found = click.get_current_context().find_root().obj
    return isinstance(found, dict) and bool(found.get("debug"))


def _check_address(address: str) -> None:
    try:
        places = parse_addresses(address)
    except InvalidRequest as error:
        raise click.UsageError(str(error), click.get_current_context()) from None
    if any(place.scheme not in _REMOTE for place in places):
        raise click.UsageError(
            f"spark needs a broker that many programs can reach, not {address!r}: "
            "start one with 'onward serve'",
            click.get_current_context(),
        )


@contextmanager
def in_one_line(*, is_own: bool = True) -> Iterator[None]:
    """Raise the sentence at the bottom of what Spark says, as an error of ours."""
    try:
        yield
    except OnwardError as error:
        _tell_heard(error)
        raise
    except ModuleNotFoundError as error:
        if not is_own or str(error.name).partition(".")[0] not in _NOT_OURS:
            raise
        raise NotInstalled(
            f"{error.name} is not installed: run pip install 'onward[spark]'"
        ) from error
    except Exception as error:
        if not is_own:
            raise
        from onward.pipeline.failure import plain

        found = plain(error) or _wrong_query(error)
        if found is None:
            raise
        _tell_heard(found)
        raise found from error


def _tell_heard(error: OnwardError) -> None:
    """Show what Java said last, where our sentence speaks of it."""
    if "is on stderr" not in str(error):
        return
    from onward.pipeline.quiet import heard

    for line in heard():
        click.echo(printable(line), err=True)


def _wrong_query(error: Exception) -> InvalidRequest | None:
    """Return what Spark found wrong with a user's SQL when it met the rows."""
    condition = getattr(error, "getCondition", lambda: None)()
    if condition is None or condition.startswith("INTERNAL"):
        return None
    from onward.pipeline.expressions import first_sentence

    return InvalidRequest(first_sentence(error))


@contextmanager
def _bar(name: str) -> Iterator[Callable[[JobRun], None] | None]:
    """Show on stderr what a run tells, while the block runs; only to people."""
    if not is_terminal(sys.stderr):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task("starting Spark", total=None)

        def watch(run: JobRun) -> None:
            total = None if run.lag is None else run.rows + run.lag
            bar.update(task, description=printable(said(run)), completed=run.rows, total=total)

        yield watch


def said(run: JobRun) -> str:
    """Return how far a run is, in a few words.

    >>> from onward.pipeline.runs import JobRun
    >>> said(JobRun(run="7f", job="archive", state="running", rows=1_000, rows_per_s=250.0, lag=7))
    'archive: 1,000 rows, 250/s, lag 7'
    """
    words = [f"{run.job}: {run.rows:,} rows", f"{run.rows_per_s:,.0f}/s"]
    if run.lag is not None:
        words.append(f"lag {run.lag:,}")
    if run.files is not None:
        words.append(f"{run.files:,} files")
    return ", ".join(words)
