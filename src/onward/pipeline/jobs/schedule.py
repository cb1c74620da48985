"""`schedule`: many messages that wait for their time, loaded from files or a database.

    schedule(spark, place=place, source="/in/due.parquet", format="parquet", topic="reminders",
             at="due", body="to_json(struct(user_id, text))", unique="concat('reminder-', id)")

`at`, `body`, `key` and `unique` are columns of the source or any SQL over them:

    at      a timestamp, a date, text that reads as one (UTC), or milliseconds since 1970
    body    text or bytes; a struct, map or array becomes JSON, anything else its text
    unique  a business key; each may stand in the source once

All rows are looked at before the first is written: a row without a time, beyond what the broker
takes, without a body or with a key that is there twice is an error that says how many there are,
and shows the first. A load that is repeated under its `run_id` stores nothing again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException
from pyspark.sql import functions as sql

from onward.clock import SystemClock
from onward.durations import format_duration
from onward.errors import InvalidRequest, UnknownTopic
from onward.message.names import check_topic_name
from onward.message.texts import UNIQUE_CHARACTERS_MAX
from onward.pipeline import runs
from onward.pipeline.append import append
from onward.pipeline.expressions import column, first_sentence, quietly, type_of
from onward.pipeline.ledger import Ledger, query_name
from onward.pipeline.place import Place, open_client
from onward.pipeline.plans import check_run_id
from onward.pipeline.staging import open_place
from onward.settings import ScheduleSettings

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row, SparkSession

FORMATS = ("parquet", "csv", "json", "orc", "jdbc")
_DEFAULTS = {"csv": {"header": "true", "inferSchema": "true"}}
_WHOLE = ("tinyint", "smallint", "int", "bigint")
_NESTED = ("struct", "map", "array", "variant")
_FAR_MS = 253_402_300_799_999
_SYSTEM = "@"
_NO_DRIVER = "no suitable driver"
_GIVEN = "_given"
_SHOWN_VALUES = 8
_SHOWN_CHARACTERS = 40


class Scheduled(NamedTuple):
    """What a load did, or with `dry_run` would do."""

    rows: int
    first_due: datetime | None = None
    last_due: datetime | None = None
    overdue: int = 0
    """Rows whose time is past: they come at once."""
    run_id: str = ""
    is_repeat: bool = False
    """The run was done already: nothing was stored again."""


def schedule(
    spark: SparkSession,
    *,
    place: Place,
    source: str,
    format: str,  # noqa: A002 - the word that Spark has for it
    topic: str | None = None,
    at: str,
    body: str,
    key: str | None = None,
    unique: str | None = None,
    options: Mapping[str, str] | None = None,
    run_id: str | None = None,
    dry_run: bool = False,
    run: runs.Run | None = None,
) -> Scheduled:
    """Load messages that wait; without `topic` the source has a column of that name."""
    if topic is not None:
        check_topic_name(topic)
    check_run_id(run_id)
    with runs.using(run, place, job="schedule", topic=topic, source=_shown(source)) as run:
        given = _load(spark, source, format, options or {})
        columns = _columns(given, topic=topic, at=at, body=body, key=key, unique=unique)
        rows = given.select(*columns)
        # Beside what is made of it each row as it came: to show one that is wrong.
        found = _check(given.select(sql.struct("*").alias(_GIVEN), *columns), place)
        done = Scheduled(
            found["rows"], _aware(found["first_due"]), _aware(found["last_due"]),
            overdue=found["overdue"], run_id=run_id or "",
            is_repeat=not dry_run and run_id is not None and _is_done(place, run_id),
        )  # fmt: skip
        if not dry_run and done.rows and not done.is_repeat:
            append(rows, place, write_id=run_id)
            run.progress(rows=done.rows, lag=0)
        run.result(**done._asdict(), dry_run=dry_run)
        return done


def _is_done(place: Place, run_id: str) -> bool:
    """Return whether all that a run is to write was written, by an earlier one of that name."""

    async def look() -> bool:
        async with open_place(place) as mq:
            last = await Ledger(mq, query_name("write", run_id)).last()
            return last is not None and last.decision.is_done

    try:
        return asyncio.run(look())
    except UnknownTopic:
        return False


def _load(spark: SparkSession, source: str, kind: str, options: Mapping[str, str]) -> DataFrame:
    if kind not in FORMATS:
        raise InvalidRequest(f"{kind!r} is no format that can be loaded: {', '.join(FORMATS)}")
    reader = spark.read.format(kind).options(**(_DEFAULTS.get(kind, {}) | dict(options)))
    if kind == "jdbc":
        if not {"dbtable", "query"} & {name.lower() for name in options}:
            raise InvalidRequest(
                "a database is told what to read: give the option dbtable or query"
            )
        return _loaded(lambda: reader.option("url", source).load(), source)
    return _loaded(lambda: reader.load(source), source)


def _loaded(load: Any, source: str) -> DataFrame:
    shown = _shown(source)
    try:
        with quietly():
            frame: DataFrame = load()
    except AnalysisException as error:
        raise InvalidRequest(f"{shown!r} cannot be read: {first_sentence(error)}") from None
    except Py4JJavaError as error:
        # What a database says, or that nobody here speaks its language.
        words = first_sentence(error.java_exception.getMessage())
        if _NO_DRIVER in words:
            words = "there is no driver for it, name its jar (--jar, or spark.jars)"
        raise InvalidRequest(f"{shown!r} cannot be read: {words}") from None
    return frame


def _shown(source: str) -> str:
    """Return a source as it may be shown: what follows the ? of a database can be a secret."""
    return source.partition("?")[0] if source.startswith("jdbc:") else source


def _columns(
    given: DataFrame, *, topic: str | None, at: str, body: str, key: str | None, unique: str | None
) -> list[Column]:
    """Return what the sink takes, made of the columns of the source."""
    columns = {
        "topic": column(given, "topic", option="topic") if topic is None else sql.lit(topic),
        "due_at": _time(given, column(given, at, option="at"), at),
        "body": _body(given, column(given, body, option="body")),
    }
    if key is not None:
        columns["key"] = column(given, key, option="key").cast("string")
    if unique is not None:
        columns["unique"] = column(given, unique, option="unique").cast("string")
    return [made.alias(name) for name, made in columns.items()]


def _time(given: DataFrame, made: Column, text: str) -> Column:
    kind = type_of(given, made)
    if kind in _WHOLE:
        # What is too much for a timestamp is too far ahead, or long past: said below, not by Java.
        within = sql.least(sql.greatest(made, sql.lit(0)), sql.lit(_FAR_MS))
        return sql.timestamp_millis(sql.when(made.isNotNull(), within))
    if kind in ("string", "date", "timestamp", "timestamp_ntz"):
        return made.try_cast("timestamp")
    raise InvalidRequest(
        f"at {text!r} is of type {kind}: a time is a timestamp, a date, text or milliseconds"
    )


def _body(given: DataFrame, made: Column) -> Column:
    kind = type_of(given, made)
    if kind.startswith(_NESTED):
        return sql.to_json(made)
    return made if kind in ("string", "binary") else made.cast("string")


# --- looking at all rows first --------------------------------------------------------------------


def _check(rows: DataFrame, place: Place) -> Row:
    """Return count and times of the rows, or raise what is wrong with them."""
    now_ms = SystemClock().now_ms()
    ahead_ms = _ahead_ms_max(place)
    due_ms = sql.unix_millis("due_at")
    far = f"are due more than {format_duration(ahead_ms)} ahead (schedule.ahead_ms_max)"
    wrong = {
        "have no time: 'at' gives null, or text that is none": sql.col("due_at").isNull(),
        far: due_ms > now_ms + ahead_ms,
        "have no body: 'body' gives null": sql.col("body").isNull(),
        "have no topic": sql.col("topic").isNull(),
    }
    if "unique" in rows.columns:
        limit = f"1 to {UNIQUE_CHARACTERS_MAX} characters and no {_SYSTEM!r} in front"
        wrong[f"have a unique key that is none: it has {limit}"] = ~sql.length("unique").between(
            1, UNIQUE_CHARACTERS_MAX
        ) | sql.col("unique").startswith(_SYSTEM)
    counts = {
        "rows": sql.count(sql.lit(1)),
        "first_due": sql.min("due_at"),
        "last_due": sql.max("due_at"),
        "overdue": sql.count_if(due_ms <= now_ms),
    } | {what: sql.count_if(is_wrong) for what, is_wrong in wrong.items()}
    found = rows.agg(*[made.alias(name) for name, made in counts.items()]).first()
    assert found is not None
    for what, is_wrong in wrong.items():
        if found[what]:
            _refuse(f"{found[what]:,} of {found['rows']:,} rows {what}", rows.where(is_wrong))
    if "unique" in rows.columns:
        _refuse_repeats(rows)
    return found


def _refuse(what: str, wrong: DataFrame) -> None:
    first = wrong.select(_GIVEN).first()
    shown = "" if first is None else f"; the first has {shown_row(first[_GIVEN].asDict())}"
    raise InvalidRequest(f"{what}{shown}; nothing is loaded")


def shown_row(values: Mapping[str, object]) -> str:
    """Return the values of a row for people: as many as fit, each as far as it fits.

    >>> shown_row({"id": 7, "due": "soon", "text": "x" * 100})
    "id 7, due 'soon', text 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx..."
    """
    shown = [f"{name} {_short(repr(value))}" for name, value in values.items()]
    more = [] if len(shown) <= _SHOWN_VALUES else [f"and {len(shown) - _SHOWN_VALUES} more"]
    return ", ".join(shown[:_SHOWN_VALUES] + more)


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 1]}..."


def _refuse_repeats(rows: DataFrame) -> None:
    keys = rows.where(sql.col("unique").isNotNull()).groupBy("unique").count()
    repeated = keys.where("count > 1").agg(sql.count(sql.lit(1)), sql.min("unique")).first()
    if repeated is not None and repeated[0]:
        raise InvalidRequest(
            f"{repeated[0]:,} unique keys stand in the source more than once, for example "
            f"{repeated[1]!r}; nothing is loaded"
        )


def _ahead_ms_max(place: Place) -> int:
    with open_client(place, name="schedule") as mq:
        said = mq.status().get("schedule_ahead_ms_max")
    return int(said) if said else ScheduleSettings().ahead_ms_max


def _aware(moment: datetime | None) -> datetime | None:
    """Return a time as UTC: Spark hands them out in the zone of this machine, without saying so."""
    return None if moment is None else moment.astimezone(UTC)
