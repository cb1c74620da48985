"""What became of messages: the fold of the trace in Spark, and the jobs that ask it."""

import json
import random
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, Row, SparkSession

import onward
from onward.clock import SystemClock
from onward.delivery.group import Groups
from onward.delivery.record import GroupRecord
from onward.delivery.share import Share
from onward.delivery.trace import Trace, decode_row, encode_rows
from onward.errors import AlreadyExists, UnknownGroup, UnknownTopic
from onward.pipeline import views
from onward.pipeline.jobs.reconcile import Buried, Pair, _ranges, _slow, judge, reconcile
from onward.pipeline.jobs.stats import published, settled, stats
from onward.pipeline.jobs.trace import life_lines, trace
from onward.pipeline.lake import open_lake
from onward.pipeline.lake_state import Gap
from onward.pipeline.place import Place, open_client
from onward.pipeline.report import Found

OFFSETS = 40
SEEDS = 60


def frame_of(spark: SparkSession, rows: Sequence[Trace]) -> DataFrame:
    """Return rows as Spark reads them from '@trace'."""
    bodies = [(seq, bytearray(body)) for seq, body in enumerate(encode_rows(rows))]
    return views.trace_rows(spark.createDataFrame(bodies, "offset BIGINT, body BINARY"))


def row(did: str, *ranges: tuple[int, int], group: str = "g", **fields: object) -> Trace:
    return Trace(did=did, group=group, ranges=ranges, **{"topic": "t", "at_ms": 1_000} | fields)  # type: ignore[arg-type]


# --- the fold ------------------------------------------------------------------------------------


def random_rows(seed: int) -> Iterator[Trace]:
    """Give what may be told of a group, in any order that chance finds."""
    dice = random.Random(seed)
    dids = [*views.RANGED, "acked", "acked", "retried", "dead"]
    if dice.random() < 0.8:
        yield row("started", group=f"g{seed}", offset=dice.randrange(10))
    for _ in range(dice.randrange(1, 30)):
        if dice.random() < 0.08:
            yield row("reset", group=f"g{seed}", offset=dice.randrange(OFFSETS))
            continue
        ranges = [(first, first + dice.randrange(1, 9)) for first in
                  [dice.randrange(OFFSETS - 9) for _ in range(dice.randrange(1, 3))]]  # fmt: skip
        yield row(dice.choice(dids), *ranges, group=f"g{seed}", attempt=1)


def stands(share: Share, offset: int) -> str:
    """Return how a message stands by the broker's own fold."""
    if offset in share.dead:
        return "dead"
    return "settled" if offset < share.mark and offset not in share.open else "open"


def test_outcomes_are_what_the_broker_itself_folds_from_the_same_rows(spark: SparkSession):
    told = [one for seed in range(SEEDS) for one in random_rows(seed)]
    groups = Groups()
    for seed in range(SEEDS):
        groups.change(GroupRecord(f"g{seed}", topics=("t",)))
        begins = next(
            (one.offset for one in told if one.group == f"g{seed}" and one.did == "started"), 0
        )
        groups.apply(row("started", group=f"g{seed}", offset=begins))
    for one in told:
        groups.apply(one)
    expected = {
        (name, offset): stands(group.shares["t"], offset)
        for name, group in groups.by_name.items()
        for offset in range(OFFSETS)
    }
    rows = frame_of(spark, told)
    messages = spark.range(OFFSETS).selectExpr("'t' topic", "id offset", "0L published_ms")
    pairs = [Pair("t", f"g{seed}", 0) for seed in range(SEEDS)]
    judged = judge(messages, rows, pairs, bounds={"t": (0, OFFSETS)}).collect()
    found = {(one["group"], one["offset"]): one["verdict"] for one in judged}
    seen = {"settled": "settled", "dead": "dead", "retrying": "open", "undelivered": "open"}
    # What is before a group's start is not judged; the broker calls it finished.
    answers = {key: seen[found[key]] if key in found else "settled" for key in expected}
    assert answers == expected


# Each story has a group of its own; all are folded by one job.
STORIES = [
    row("started", group="source", offset=0),
    row("acked", (0, 2), group="source"),
    row("forked", group="copy", source="source", topic=""),
    row("acked", (2, 3), group="source"),
    row("dead", (2, 3), group="copy", cause="no"),
    row("started", group="anew", offset=0),
    row("acked", (0, 5), group="anew"),
    row("started", group="anew", offset=0),
    row("acked", (0, 1), group="anew"),
    row("acked", (0, 3), group="twice"),
    row("acked", (0, 1), group="twice"),
    row("replayed", (1, 2), group="twice"),
    row("acked", (1, 2), group="twice"),
    row("acked", (0, 1), (5, 6), group="timed", took_ms=(7, 9)),
    row("acked", (0, 10_000_000_000), group="wide"),
]


@pytest.fixture(scope="module")
def outcomes(spark: SparkSession) -> dict[tuple[str, int], Row]:
    rows = views.lives(frame_of(spark, STORIES))
    found = views.outcomes(rows, bounds={"t": (0, 7)}).collect()
    return {(one["group"], one["offset"]): one for one in found}


Outcomes = dict[tuple[str, int], Row]


def states(outcomes: Outcomes, group: str) -> dict[int, str]:
    return {offset: one["state"] for (of, offset), one in outcomes.items() if of == group}


def test_a_copy_of_a_group_has_the_outcomes_of_its_source_until_the_copy(outcomes: Outcomes):
    assert states(outcomes, "source") == {0: "settled", 1: "settled", 2: "settled"}
    assert states(outcomes, "copy") == {0: "settled", 1: "settled", 2: "dead"}


def test_a_group_that_began_anew_has_only_its_last_life(outcomes: Outcomes):
    assert states(outcomes, "anew") == {0: "settled"}


def test_acks_are_repeated_only_when_nothing_opened_the_message_again(outcomes: Outcomes):
    assert [outcomes["twice", offset]["repeats"] for offset in range(3)] == [1, 0, 0]


def test_the_time_in_the_member_is_that_of_its_own_range(outcomes: Outcomes):
    assert (outcomes["timed", 0]["took_ms"], outcomes["timed", 5]["took_ms"]) == (7, 9)


def test_only_what_is_within_bounds_is_looked_at(outcomes: Outcomes):
    assert states(outcomes, "wide") == dict.fromkeys(range(7), "settled")


def test_a_body_that_is_no_row_of_the_trace_is_left_out(spark: SparkSession):
    bodies = [(0, bytearray(b"\xff{")), (1, bytearray(b"[]")), (2, bytearray(b'{"later": 1}'))]
    frame = spark.createDataFrame(bodies, "offset BIGINT, body BINARY")
    assert views.trace_rows(frame).count() == 0


# --- the jobs, over frames that are made by hand -------------------------------------------------


def test_every_verdict_is_found_and_what_came_before_the_start_is_not_counted(spark: SparkSession):
    rows = frame_of(
        spark,
        [
            row("started", offset=1),
            row("acked", (1, 3), at_ms=5_000),
            row("filtered", (3, 4)),
            row("dead", (4, 5), cause="<b>"),
            row("retried", (5, 6), due_at_ms=9_000),
        ],
    )
    messages = spark.range(7).selectExpr("'t' topic", "id offset", "1000L published_ms")
    # Of the second group the trace tells nothing: it is cut, and only the cursor is known.
    pairs = [Pair("t", "g", 0), Pair("t", "old", 5)]
    buried = [Buried("t", "old", 2, "long ago")]
    judged = judge(
        messages, rows, pairs, bounds={"t": (0, 7)}, trust_cursor=True, buried=buried
    ).collect()
    found = {
        one["offset"]: (one["verdict"], one["did"], one["took_ms"])
        for one in judged
        if one["group"] == "g"
    }
    assert found == {
        1: ("settled", "acked", 4_000), 2: ("settled", "acked", 4_000),
        3: ("settled", "filtered", None), 4: ("dead", "dead", None),
        5: ("retrying", "retried", None), 6: ("undelivered", None, None),
    }  # fmt: skip
    old = {one["offset"]: one["verdict"] for one in judged if one["group"] == "old"}
    open_ones = {5: "undelivered", 6: "undelivered"}
    assert old == {**dict.fromkeys(range(5), "settled"), 2: "dead", **open_ones}
    assert {one["cause"] for one in judged if one["verdict"] == "dead"} == {"<b>", "long ago"}


def test_minutes_count_ranges_and_times_look_at_messages(spark: SparkSession):
    messages = spark.range(100).selectExpr(
        "'t' topic", "id offset", "60000L + id published_ms", "10L bytes"
    )
    rows = frame_of(
        spark,
        [
            row("acked", (0, 50), at_ms=60_100),
            row("acked", (50, 100), at_ms=120_050),
            row("retried", (7, 9), at_ms=60_050),
            row("dead", (500, 900), at_ms=120_100),
        ],
    )
    first = published(messages).first()
    assert first is not None
    assert first.asDict() == {"minute_ms": 60_000, "topic": "t", "messages": 100, "bytes": 1_000}
    found = {one["minute_ms"]: one.asDict() for one in settled(messages, rows).collect()}
    assert (found[60_000]["acked"], found[60_000]["retried"], found[60_000]["dead"]) == (50, 2, 0)
    assert (found[120_000]["acked"], found[120_000]["dead"]) == (50, 400)
    assert found[60_000]["p50_ms"] in (75, 76)
    assert found[120_000]["p99_ms"] in (59_999, 60_000)


def test_a_life_line_has_all_steps_in_their_order(spark: SparkSession):
    rows = frame_of(
        spark,
        [
            row("retried", (0, 2), at_ms=1_500, due_at_ms=2_000, attempt=1, cause="busy"),
            row("acked", (0, 1), at_ms=2_500, took_ms=(4,)),
            row("acked", (0, 1), group="h", at_ms=2_600),
        ],
    )
    messages = spark.sql(
        "SELECT 't' topic, 0L offset, timestamp_millis(1000) published_at, 'k' key, 'x' trace_id"
    )
    lines = [one.asDict() for one in life_lines(messages, rows).collect()]
    steps = [(one["step"], one["group"], one["did"], one["after_ms"]) for one in lines]
    assert steps == [
        (0, None, "published", None), (1, "g", "retried", 500), (2, "g", "acked", 1_500),
        (3, "h", "acked", 1_600),
    ]  # fmt: skip
    assert lines[0]["id"] == "t/0"
    assert lines[1]["cause"] == "busy"
    # A topic that was created again has only what was done since.
    alive = [one["at_ms"] for one in views.since_birth(rows, {"t": 2_500}).collect()]
    assert sorted(alive) == [2_500, 2_600]


# --- all of it, with a broker --------------------------------------------------------------------


def consume_some(mq: onward.SyncClient, topic: str, group: str) -> None:
    """Ack what is even, reject 1, retry 3 for a long time, leave the rest alone."""
    with mq.consume(topic, group=group) as consumer:
        for delivery in consumer:
            offset = delivery.offset
            if offset == 1:
                delivery.reject("no <such> order")
            elif offset == 3:
                delivery.retry(after="10h")
            else:
                delivery.ack()
            if offset == 9:
                return


def settled_up_to(mq: onward.SyncClient, group: str, backlog: int) -> None:
    deadline = time.monotonic() + 60
    while mq.group(group).backlog != backlog:
        assert time.monotonic() < deadline, mq.group(group)
        time.sleep(0.02)


@pytest.fixture
def lived(place: Place, topic: str) -> str:
    """Ten messages, and a group that acked eight, gave up on one and will see one again."""
    group = f"{topic}-billing"
    with open_client(place) as mq:
        mq.publish_many(topic, [f"body {number}" for number in range(10)])
        consume_some(mq, topic, group)
        settled_up_to(mq, group, 1)
    return group


def test_what_a_group_passed_over_without_an_outcome_is_missing(spark: SparkSession):
    messages = spark.range(5).selectExpr("'t' topic", "id offset", "0L published_ms")
    rows = frame_of(spark, [row("acked", (0, 2))])
    judged = judge(messages, rows, [Pair("t", "g", 3)], bounds={"t": (0, 5)}).collect()
    assert [one["verdict"] for one in sorted(judged, key=lambda one: one["offset"])] == [
        "settled", "settled", "missing", "undelivered", "undelivered",
    ]  # fmt: skip


def test_what_a_batch_reader_acked_late_is_not_slow(spark: SparkSession):
    acked = "'t' topic, 'g' AS `group`, 90000L took_ms, 0 repeats"
    members = ["spark", "archive host 7", "ann", None]
    found = spark.createDataFrame([(one,) for one in members], "member STRING").selectExpr(
        "member", *acked.split(", ")
    )
    assert [row["member"] for row in found.where(_slow(60_000)).collect()] == ["ann", None]


def test_adjacent_slow_messages_are_one_range_with_the_slowest_time_and_its_member(
    spark: SparkSession,
):
    rows = [
        (offset, group, 90_000 + offset, member)
        for group, offset, member in [
            ("g", 0, "ann"), ("g", 1, "bob"), ("g", 2, "ann"), ("g", 9, "eve"), ("h", 2, "ann"),
            ("h", 3, "spark"),
        ]
    ]  # fmt: skip
    columns = "offset BIGINT, `group` STRING, took_ms BIGINT, member STRING"
    judged = spark.createDataFrame(rows, columns).selectExpr(
        "*", "'t' topic", "'settled' verdict", "offset * 10 AS published_ms"
    )
    found = _ranges(judged, slow_ms=60_000)
    assert list(found["slow"]) == [
        Found("t", 0, "g", 0, member="ann", took_ms=90_002, last=2),
        Found("t", 2, "h", 20, member="ann", took_ms=90_002, last=2),
        Found("t", 9, "g", 90, member="eve", took_ms=90_009, last=9),
    ]
    assert (found["missing"], found["undelivered"]) == ((), ())


def test_a_reconciliation_tells_what_is_settled_and_writes_its_page(
    spark: SparkSession, place: Place, topic: str, lived: str, tmp_path: Path
):
    with open_client(place) as mq:
        mq.create_group(f"{topic}-late", topic, start="latest")
        mq.create_group(f"{topic}-idle", topic, start="earliest")
    page = tmp_path / "report.html"
    found = reconcile(spark, place=place, topics=[topic], since="1h", report=str(page), slow="1d")
    assert not found.is_settled
    assert (found.published, found.due, found.settled, found.undelivered) == (10, 20, 8, 10)
    assert found.missing == 0, "a backlog is not lost"
    assert (found.dead, found.retrying, found.slow, found.repeated) == (1, 1, 0, 0)
    assert {line.group: line.verdicts.undelivered for line in found.lines} == {
        f"{topic}-idle": 10, lived: 0,
    }  # fmt: skip
    assert found.report is not None
    assert [(one.offset, one.last, one.group) for one in found.report.undelivered] == [
        (0, 9, f"{topic}-idle")
    ]
    assert found.report.node
    assert found.report.options.startswith(f"{topic} --since 1h --slow 1d")
    assert [one.cause for one in found.report.dead] == ["no <such> order"]
    assert "no &lt;such&gt; order" in page.read_text(encoding="utf-8")


def test_nothing_is_proven_while_messages_of_the_window_are_gone_unchecked(
    spark: SparkSession, place: Place, topic: str, lived: str, lake: Path
):
    # As an archive leaves it that came after retention.
    open_lake(lake, create=True).commit(gaps=[Gap(topic, 0, 5)])
    found = reconcile(spark, place=place, topics=[topic], groups=[lived], lake=str(lake))
    assert (found.published, found.due, found.settled, found.unchecked) == (5, 5, 5, 5)
    assert not found.is_settled
    assert found.report is not None
    assert any("(offsets 0 to 4)" in note for note in found.report.notes)


def test_what_the_trace_shows_to_be_older_than_the_window_is_not_unchecked(
    spark: SparkSession, place: Place, topic: str, lived: str, lake: Path
):
    # Nothing is left of the topic, so no message tells when it was published.
    open_lake(lake, create=True).commit(gaps=[Gap(topic, 0, 10)])
    ask = partial(reconcile, spark, place=place, topics=[topic], groups=[lived], lake=str(lake))
    hour_ms = 3_600_000
    now_ms = SystemClock().now_ms()
    later = ask(since=now_ms + hour_ms, until=now_ms + 2 * hour_ms)
    assert (later.published, later.unchecked, later.is_settled) == (0, 0, True)
    assert ask(since=now_ms - hour_ms).unchecked == 10


def test_a_question_about_what_does_not_exist_is_refused_by_name(
    spark: SparkSession, place: Place, topic: str
):
    with pytest.raises(UnknownTopic, match="topic 'nowhere' does not exist"):
        reconcile(spark, place=place, topics=["nowhere"])
    with pytest.raises(UnknownGroup, match="group 'nobody' does not exist"):
        reconcile(spark, place=place, groups=["nobody"])
    with pytest.raises(UnknownTopic, match="topic 'nowhere' does not exist"):
        trace(spark, place=place, ids=["nowhere/7"])


def test_stats_and_life_lines_agree_with_what_was_done(
    spark: SparkSession, place: Place, topic: str, lived: str, tmp_path: Path
):
    with open_client(place) as mq:
        mq.fork_group(lived, f"{lived}-copy")  # which has done nothing by itself
    counted = stats(spark, place=place, topics=[topic])
    assert (counted.messages, counted.bytes) == (10, 60)
    assert (counted.acked, counted.retried, counted.dead) == (8, 1, 1)
    ofgroup = [one for one in counted.rows if one.group is not None]
    assert {one.group for one in ofgroup} == {lived}
    assert all(one.p50_ms is not None for one in ofgroup if one.acked)

    one = trace(spark, place=place, ids=[f"{topic}/1"], groups=[lived])
    assert [(line["did"], line["cause"]) for line in one.frame.collect()] == [
        ("published", None), ("dead", "no <such> order"),
    ]  # fmt: skip
    out = tmp_path / "lines.jsonl"
    written = trace(spark, place=place, topics=[topic], groups=[lived], out=str(out))
    texts = [file.read_text(encoding="utf-8") for file in out.glob("part-*")]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    assert written.rows == len(lines) == 20
    with pytest.raises(AlreadyExists, match="exists already"):
        trace(spark, place=place, topics=[topic], out=str(out))


def test_the_rows_of_a_real_broker_are_understood(spark: SparkSession, place: Place, lived: str):
    """The JSON that Spark reads is the one that `delivery/trace.py` writes."""
    with open_client(place) as mq:
        bodies = [bytes(message.body) for message in mq.read("@trace")]
    expected = [(seq, one.did, one.group) for seq, one in enumerate(map(decode_row, bodies))]
    found = views.trace_frame(spark, place).orderBy("seq").collect()
    assert [(one["seq"], one["did"], one["group"] or "") for one in found][
        : len(expected)
    ] == expected
