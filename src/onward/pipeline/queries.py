"""SQL over everything: the live log, the lake, and what became of messages.

    sql(spark, "select topic, count(*) from messages group by 1", place=place, since="1h")

    view        one row for each
    messages    message: all its columns, and body_text
    settled     message and group that is done with it: did, settled_at, member, took_ms ...
    retrying    message and group that will get it again: did, due_at, attempts, cause ...
    dead        message and group that gave up on it: cause, attempts, member, died_at
    scheduled   message that waits for its time
    groups      group and topic: cursor, backlog, ready, waiting, leased, dead, members
    topics      topic

Rules:
    - Only the views that a query names are made, and of messages only the columns that it names:
      bodies are not read where nobody looks at them.
    - `since` and `until` choose messages by the time they were published, before anything is read:
      in messages, settled, retrying and dead. Conditions in the query are applied by Spark.
    - A query asks. What would change something is refused before it runs.
    - Times are UTC. What Spark does not understand is an InvalidRequest with its own first words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Final

from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name that everybody knows it by

from onward.client.sync import SyncClient
from onward.clock import SystemClock
from onward.errors import InvalidRequest
from onward.pipeline import views
from onward.pipeline.expressions import first_sentence, quietly
from onward.pipeline.lake_read import read
from onward.pipeline.place import Place, open_client
from onward.pipeline.schema import MESSAGE_COLUMNS
from onward.pipeline.window import Moment, Window, window_of
from onward.protocol.operations.groups import GroupDescription
from onward.protocol.operations.schedule import ScheduledDescription
from onward.protocol.operations.topics import TopicDescription

VIEWS: Final = ("messages", "settled", "retrying", "dead", "scheduled", "groups", "topics")
SCHEDULED_MAX: Final = 1_000_000
QUERY_CHARACTERS_MAX: Final = 100_000

# What is no name: texts, comments. Names in backticks are names.
_TEXTS = re.compile(
    r"`(?:[^`]|``)*`|\b[rR]'[^']*'|\b[rR]\"[^\"]*\""
    r"|'(?:[^'\\]|\\.|'')*'|\"(?:[^\"\\]|\\.|\"\")*\"|--[^\r\n]*|/\*.*?\*/",
    re.DOTALL,
)
_NAMES = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# A star that is neither a product nor that of count(*): all columns, whatever is done with them.
_STAR = re.compile(r"(?:\b(?:select|distinct|all)\s*|[,.(]\s*)\*", re.IGNORECASE)
_COUNT = re.compile(r"\bcount\s*\(\s*\*\s*\)", re.IGNORECASE)
_ASKING = re.compile(r"[\s(]*(select|with|from|values|table|describe|desc|explain|show)\b", re.I)
# The only ways to change something in a statement that begins like a question.
_CHANGING = re.compile(
    r"\b(?:insert\s+(?:into|overwrite)|delete\s+from|merge\s+(?:with\s+\w+\s+\w+\s+)?into"
    r"|update\s+[\w.`]+\s+(?:as\s+)?(?:\w+\s+)?set)\b",
    re.IGNORECASE,
)


def sql(
    spark: SparkSession,
    query: str,
    *,
    place: Place,
    lake: str | None = None,
    since: Moment | None = None,
    until: Moment | None = None,
) -> DataFrame:
    """Return the rows of a query over the views of this broker and its lake.

    `since` and `until` bound the publishing time of the messages that the views are about.

    >>> from onward.pipeline.sessions import session                           # doctest: +SKIP
    >>> sql(session(), "select count(*) from dead", place=place_of()).first()  # doctest: +SKIP
    Row(count(1)=0)
    """
    bare = checked(query)
    window = None
    if since is not None or until is not None:
        window = window_of(since, until, now_ms=SystemClock().now_ms())
    try:
        with quietly():
            for name in names_in(bare, VIEWS):
                _view(spark, name, bare, place, lake, window).createOrReplaceTempView(name)
            return spark.sql(query)
    except (AnalysisException, ParseException) as error:
        raise InvalidRequest(f"the query is not understood: {_said(error)}") from None


def _said(error: AnalysisException | ParseException) -> str:
    """Return the first line of what Spark says; of a view that is not there, which ones are."""
    if error.getCondition() == "TABLE_OR_VIEW_NOT_FOUND":
        name = (error.getMessageParameters() or {}).get("relationName", "of that name")
        return f"there is no view {name}; there are: {', '.join(VIEWS)}"
    return first_sentence(ValueError(str(error).strip().split("\n")[0]))


def checked(query: str) -> str:
    """Return a query without its texts and comments; one that does not only ask is refused.

    >>> checked("select 'drop' from messages -- all")
    "select '' from messages  "
    """
    if len(query) > QUERY_CHARACTERS_MAX:
        raise InvalidRequest(f"the query has more than {QUERY_CHARACTERS_MAX:,} characters")
    bare = _TEXTS.sub(_without_text, query)
    if not bare.strip():
        raise InvalidRequest("the query is empty: write select ... from messages")
    if not _ASKING.match(bare) or _CHANGING.search(bare):
        raise InvalidRequest("a query only asks: begin it with select or with")
    return bare


def _without_text(found: re.Match[str]) -> str:
    first = found[0][0]
    if first == "`":
        return found[0]
    return " " if first in "-/" else "''"


def end_of_statement(text: str) -> int | None:
    """Return the place of the first semicolon that is in no text or comment; None without one.

    >>> end_of_statement("select ';' from topics; select"), end_of_statement("select 'a;")
    (22, None)
    """
    bare = _TEXTS.sub(lambda found: " " * len(found[0]), text)
    end = bare.find(";")
    # A quote that is left has no end yet: what follows it is text.
    is_open = end < 0 or any(mark in bare[:end] for mark in ("'", '"', "`", "/*"))
    return None if is_open else end


def names_in(query: str, known: Iterable[str]) -> list[str]:
    """Return those of the known names that occur in a query, in their own order.

    >>> names_in("select * from Messages m join `dead` d using (topic, offset)", VIEWS)
    ['messages', 'dead']
    """
    words = {word.lower() for word in _NAMES.findall(query)}
    return [name for name in known if name in words]


def columns_in(query: str) -> list[str]:
    """Return the columns of messages that a query needs: all of them when it says `*`.

    >>> columns_in("select topic, count(*) from messages where key = '' group by 1")
    ['topic', 'offset', 'key']
    """
    if _STAR.search(_COUNT.sub("count()", query)) or not names_in(query, ("select",)):
        return list(MESSAGE_COLUMNS)
    # What all columns of a view take part in, without naming one.
    if "|>" in query or names_in(query, ("natural", "table")):
        return list(MESSAGE_COLUMNS)
    named = names_in(query, MESSAGE_COLUMNS)
    if names_in(query, ("body_text",)) and "body" not in named:
        named.append("body")
    # Never none: rows are counted by their offsets.
    return [name for name in MESSAGE_COLUMNS if name in named or name == "offset"]


# --- the views -----------------------------------------------------------------------------------


def _view(
    spark: SparkSession, name: str, query: str, place: Place, lake: str | None,
    window: Window | None,
) -> DataFrame:  # fmt: skip
    match name:
        case "messages":
            return _messages(spark, query, place, lake, window)
        case "settled" | "retrying" | "dead":
            rows = views.lives(views.trace_frame(spark, place, window=window, lake=lake))
            bounds = None if window is None else _offsets_in(spark, place, lake, window)
            found = state_view(views.outcomes(rows, bounds=bounds), name)
            return found if name == "settled" else _of_living(spark, found, place)
        case "scheduled":
            return _scheduled(spark, place)
    with open_client(place, name="spark-sql") as mq:
        return _groups(spark, mq) if name == "groups" else _topics(spark, mq)


def _offsets_in(
    spark: SparkSession, place: Place, lake: str | None, window: Window
) -> views.Bounds:  # fmt: skip
    """Return the offsets of each topic's messages that were published in a window."""
    found = read(
        spark, place=place, topics=(), lake=lake, start=window.since, end=window.until,
        columns=["topic", "offset"], on_gap="skip",
    )  # fmt: skip
    ends = found.groupBy("topic").agg(F.min("offset"), F.max("offset")).collect()
    return {topic: (first, last + 1) for topic, first, last in ends}


def _messages(
    spark: SparkSession, query: str, place: Place, lake: str | None, window: Window | None
) -> DataFrame:
    columns = columns_in(query)
    found = read(
        spark, place=place, topics=(), lake=lake, columns=columns,
        start=None if window is None else window.since,
        end=None if window is None else window.until,
    )  # fmt: skip
    if "body" in columns:
        found = found.withColumn("body_text", F.expr("make_valid_utf8(CAST(body AS STRING))"))
    return found


def _of_living(spark: SparkSession, found: DataFrame, place: Place) -> DataFrame:
    """Return what groups have to do with topics that are there: of others nothing comes again."""
    with open_client(place, name="spark-sql") as mq:
        pairs = [(share.topic, one.group) for one in mq.groups() for share in one.topics]
    living = spark.createDataFrame(pairs, "topic STRING, `group` STRING")
    return found.join(F.broadcast(living), ["topic", "group"], "left_semi")


def state_view(outcomes: DataFrame, state: str) -> DataFrame:
    """Return the view of one state: what became of messages, with the names that people expect."""
    last = outcomes.where(F.col("state") == state)
    said: list[str | Column]
    at = F.timestamp_millis("at_ms")
    due = F.when(F.expr("due_at_ms > 0"), F.timestamp_millis("due_at_ms"))
    attempts = F.coalesce("attempt", F.expr("failures + 1")).alias("attempts")
    match state:
        case "settled":
            tries = F.expr("failures + 1").alias("attempts")
            said = ["did", at.alias("settled_at"), "member", tries, "took_ms", "cause"]
        case "retrying":
            said = ["did", at.alias("failed_at"), due.alias("due_at"), "member", attempts, "cause"]
        case _:
            said = ["cause", attempts, "member", at.alias("died_at")]
    return last.select("topic", "group", "offset", *said)


_SCHEDULED = (
    "id BIGINT, topic STRING, due_at TIMESTAMP, fires_at TIMESTAMP, key STRING, `unique` STRING,"
    " tag STRING, trace_id STRING, tenant STRING, priority INT, bytes BIGINT"
)
_GROUPS = (
    "`group` STRING, topic STRING, mode STRING, paused BOOLEAN, cursor BIGINT, end_offset BIGINT,"
    " backlog BIGINT, ready BIGINT, waiting BIGINT, leased BIGINT, dead BIGINT,"
    " oldest_at TIMESTAMP, members BIGINT, created_at TIMESTAMP"
)
_TOPICS = (
    "topic STRING, state STRING, first_offset BIGINT, next_offset BIGINT, messages BIGINT,"
    " created_at TIMESTAMP, expires_at TIMESTAMP, retention_ms BIGINT, retention_bytes BIGINT,"
    " readers BIGINT"
)


def _scheduled(spark: SparkSession, place: Place) -> DataFrame:
    with open_client(place, name="spark-sql") as mq:
        rows = [_scheduled_row(one) for one in islice(mq.list_scheduled(), SCHEDULED_MAX + 1)]
    if len(rows) > SCHEDULED_MAX:
        raise InvalidRequest(
            f"more than {SCHEDULED_MAX:,} messages wait for their time: "
            "ask 'onward schedule calendar', or read the topic '@schedule'"
        )
    return spark.createDataFrame(rows, _SCHEDULED)


def _scheduled_row(one: ScheduledDescription) -> tuple[object, ...]:
    return (
        one.id, one.topic, _moment(one.due_at_ms), _moment(one.at_ms), one.key, one.unique, one.tag,
        one.trace_id, one.tenant, one.priority, one.body_bytes,
    )  # fmt: skip


def _groups(spark: SparkSession, mq: SyncClient) -> DataFrame:
    rows = [row for one in mq.groups() for row in _group_rows(one)]
    return spark.createDataFrame(rows, _GROUPS)


def _group_rows(one: GroupDescription) -> Iterator[tuple[object, ...]]:
    for share in one.topics:
        yield (
            one.group, share.topic, one.mode, one.paused, share.cursor, share.end, share.backlog,
            share.ready, share.waiting, share.leased, share.dead, _moment(share.oldest_at_ms),
            one.member_count, _moment(one.created_at_ms),
        )  # fmt: skip


def _topics(spark: SparkSession, mq: SyncClient) -> DataFrame:
    return spark.createDataFrame([_topic_row(one) for one in mq.topics()], _TOPICS)


def _topic_row(one: TopicDescription) -> tuple[object, ...]:
    return (
        one.topic, one.state, one.first_offset, one.next_offset, one.messages,
        _moment(one.created_at_ms), _moment(one.expires_at_ms), one.retention_ms,
        one.retention_bytes, one.readers,
    )  # fmt: skip


def _moment(at_ms: int) -> datetime | None:
    # A time of 0 says that there is none.
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=at_ms) if at_ms else None
