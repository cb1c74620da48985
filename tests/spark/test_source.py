"""The batch source: every message exactly once at any split, every option, every mishap."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import Row, SparkSession
from pyspark.sql.datasource import EqualTo, GreaterThanOrEqual, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from onward.client.sync import SyncClient
from onward.errors import (
    InvalidRequest,
    NotConnected,
    OffsetOutOfRange,
    OnwardError,
    UnknownGroup,
    UnknownTopic,
)
from onward.pipeline.bodies import typed
from onward.pipeline.failure import plain
from onward.pipeline.lake import open_lake
from onward.pipeline.lake_files import archive_stretch
from onward.pipeline.options import source_options, spark_options
from onward.pipeline.place import Place, open_client
from onward.pipeline.planning import Stretch
from onward.pipeline.schema import message_schema
from onward.pipeline.source import BatchReader, read_topic
from onward.pipeline.stream import StreamReader

from ..e2e.running import BrokerProcess  # noqa: TID252

WAIT_S = 60.0


@pytest.fixture(scope="module")
def mq(place: Place) -> Iterator[SyncClient]:
    with open_client(place) as client:
        yield client


def reader(place: Place, **options: object) -> BatchReader:
    """Return the reader that Spark would make, to run without Spark."""
    given = {"servers": place.servers, "timeout": place.timeout, **spark_options(options)}
    parsed = source_options(given)
    return BatchReader(parsed, message_schema(parsed.columns))


def rows_of(made: BatchReader) -> list[dict[str, Any]]:
    parts = [pickled(part) for part in made.partitions()]
    return [row for part in parts for rows in made.read(part) for row in rows.to_pylist()]


def pickled(part: InputPartition) -> InputPartition:
    """Return a partition as it is after its way to a task."""
    import pickle

    found = pickle.loads(pickle.dumps(part))
    assert isinstance(found, InputPartition)
    return found


def offsets(place: Place, topic: str, **options: object) -> list[int]:
    return [row["offset"] for row in rows_of(reader(place, topic=topic, **options))]


@contextmanager
def sentence(kind: type[OnwardError], *parts: str) -> Iterator[None]:
    """Expect a failure of Spark that has one clear sentence of ours in it."""
    with pytest.raises(PySparkException) as caught:
        yield
    found = plain(caught.value)
    assert isinstance(found, kind), str(caught.value)[-2000:]
    assert all(part in str(found) for part in parts), str(found)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# --- what is read ----------------------------------------------------------------------------


def test_every_column_has_what_was_published(
    spark: SparkSession, place: Place, mq: SyncClient, topic: str
):
    mq.publish(
        topic, b"\x00\xff", key="k", headers={"a": "1", "b": b"\xfe"}, tag=["x", "y"],
        trace_id="t-1", priority=200, tenant="acme",
    )  # fmt: skip
    mq.publish(topic, b"")
    waits = mq.publish(topic, "later", delay="1ms", key="late")
    until(lambda: mq.topic(topic).next_offset == 3)
    mq.publish_many(topic, [b"c"] * 3, compression="zstd", keys=["a", None, ""])
    rows = read_topic(spark, topic, place=place).orderBy("offset").collect()
    messages = list(mq.read(topic))
    assert len(rows) == len(messages) == 6
    for row, message in zip(rows, messages, strict=True):
        assert (row.topic, row.offset, row.event_id) == (topic, message.offset, message.event_id)
        assert (row.key, bytes(row.body), row.tag) == (message.key, message.body, message.tag)
        assert (row.trace_id, row.tenant) == (message.trace_id, message.tenant)
        assert in_ms(row.published_at) == message.published_at_ms
    first, empty, late = rows[:3]
    assert dict(first.headers) == {"a": b"1", "b": b"\xfe"}
    assert (first.priority, first.tag, first.due_at, first.schedule_id) == (200, "x,y", None, None)
    assert first.producer is not None
    assert (empty.headers, empty.key, empty.tag, empty.tenant) == (None, None, None, None)
    assert (late.schedule_id, late.producer) == (waits.schedule_id, None)
    assert in_ms(late.due_at) == messages[2].due_at_ms
    assert [row.key for row in rows[3:]] == ["a", None, ""]


def in_ms(moment: datetime) -> int:
    return round(moment.replace(tzinfo=UTC).timestamp() * 1000)


def test_no_split_loses_or_repeats_a_message(place: Place, mq: SyncClient, topic: str):
    for size in (1, 2, 3, 500, 1, 1, 1_000, 7):
        mq.publish_many(topic, [b"x"] * size)
    futures = [mq.publish_soon(topic, "tiny") for _ in range(300)]
    count = [future.result() for future in futures][-1].offset + 1
    every = list(range(mq.topic(topic).next_offset))
    assert len(every) == count == 1815
    for parts in (1, 2, 3, 7, 100, 3_000):
        assert offsets(place, topic, min_partitions=parts, columns=["offset"]) == every
    for rows in (1_000, 333, 50):
        made = reader(place, topic=topic, max_rows_per_partition=rows, columns=["offset"])
        assert len(made.partitions()) >= len(every) / rows
        assert [row["offset"] for row in rows_of(made)] == every
    for first, end in ((0, 1), (1, 2), (505, 507), (1514, 1815), (700, 700)):
        found = offsets(
            place, topic, starting_offsets={topic: first}, ending_offsets={topic: end}
        )  # fmt: skip
        assert found == list(range(first, end))


def test_topics_are_named_by_list_by_pattern_and_by_path(
    spark: SparkSession, place: Place, mq: SyncClient, topic: str
):
    for suffix, count in (("a", 2), ("b", 3), ("ab", 4)):
        mq.publish_many(f"{topic}.{suffix}", [b"x"] * count)
    listed = rows_of(reader(place, topic=f"{topic}.a,{topic}.b"))
    assert {(row["topic"], row["offset"]) for row in listed} == {
        *((f"{topic}.a", n) for n in range(2)), *((f"{topic}.b", n) for n in range(3)),
    }  # fmt: skip
    matched = rows_of(reader(place, topic_pattern=rf"{topic}\.[ab]"))
    assert matched == listed
    frame = spark.read.format("onward").option("servers", place.servers).load(f"{topic}.ab")
    assert frame.count() == 4


def test_starts_and_ends_are_words_offsets_and_times(place: Place, mq: SyncClient, topic: str):
    mq.publish_many(topic, [b"x"] * 5)
    second = mq.get(topic, 0).published_at_ms + 1
    # A message of a later millisecond: the broker's clock never stands still for long.
    until(lambda: mq.publish(topic, "probe") and newest_ms(mq, topic) > second)
    last = newest_ms(mq, topic)
    end = mq.topic(topic).next_offset
    from_last = next(m.offset for m in mq.read(topic) if m.published_at_ms >= last)
    assert offsets(place, topic, starting_offsets="latest") == []
    assert offsets(place, topic, starting_offsets="3") == list(range(3, end))
    assert offsets(place, topic, starting_offsets={topic: "earliest"}) == list(range(end))
    assert offsets(place, topic, ending_offsets={topic: 4}) == [0, 1, 2, 3]
    assert offsets(place, topic, ending_offsets={topic: -1}) == list(range(end))
    assert offsets(place, topic, starting_timestamp=str(last)) == list(range(from_last, end))
    assert offsets(place, topic, ending_timestamp=str(last)) == list(range(from_last))
    assert offsets(place, topic, ending_timestamp="1970-01-01T00:00:00Z") == []
    assert offsets(place, topic, starting_timestamp="9999-01-01T00:00:00Z") == []
    with pytest.raises(InvalidRequest, match="from offset 4 to 2: the start is behind the end"):
        offsets(place, topic, starting_offsets={topic: 4}, ending_offsets={topic: 2})
    with pytest.raises(OffsetOutOfRange, match=f"offset {end + 1} of topic.*ends at {end}"):
        offsets(place, topic, starting_offsets={topic: end + 1})


def newest_ms(mq: SyncClient, topic: str) -> int:
    return mq.get(topic, mq.topic(topic).next_offset - 1).published_at_ms


def test_a_batch_read_begins_at_the_cursor_of_its_group_and_does_not_move_it(
    place: Place, mq: SyncClient, topic: str
):
    mq.publish_many(topic, [b"x"] * 5)
    mq.create_group(f"g-{topic}", topic, start=3)
    for options in ({}, {"starting_offsets": "group"}):
        assert offsets(place, topic, group=f"g-{topic}", **options) == [3, 4]
    assert offsets(place, topic, group=f"g-{topic}", starting_offsets="earliest") == [0, 1, 2, 3, 4]
    assert offsets(
        place, topic, group=f"g-{topic}", starting_offsets="earliest", ending_offsets="group"
    ) == [0, 1, 2]
    assert mq.group(f"g-{topic}").backlog == 2
    with pytest.raises(UnknownGroup, match="nobody"):
        offsets(place, topic, group="nobody")
    mq.create_topic(f"{topic}.other")
    with pytest.raises(InvalidRequest, match=f"does not consume topic '{topic}.other'"):
        offsets(place, f"{topic}.other", group=f"g-{topic}")


def test_columns_are_chosen_by_option_and_by_schema(
    spark: SparkSession, place: Place, mq: SyncClient, topic: str
):
    mq.publish_many(topic, [b"a", b"b"], keys=["x", "y"])
    frame = read_topic(spark, topic, place=place, columns=["key", "offset"])
    assert frame.columns == ["key", "offset"]
    assert sorted(frame.collect()) == [Row(key="x", offset=0), Row(key="y", offset=1)]
    given = spark.read.format("onward").option("servers", place.servers).schema("offset BIGINT")
    assert sorted(row.offset for row in given.load(topic).collect()) == [0, 1]
    with sentence(InvalidRequest, "there is no column 'ofset'; did you mean 'offset'?"):
        read_topic(spark, topic, place=place, columns=["ofset"])
    wrong = spark.read.format("onward").option("servers", place.servers).schema("offset STRING")
    with sentence(InvalidRequest, "column 'offset' is bigint, not string"):
        wrong.load(topic).collect()


def test_a_reader_plans_by_its_options_whatever_filters_spark_offers(
    place: Place, mq: SyncClient, topic: str
):
    mq.publish_many(topic, [b"x"] * 100)
    made = reader(place, topic=topic)
    offered = [EqualTo(("topic",), "other"), GreaterThanOrEqual(("offset",), 90)]
    assert list(made.pushFilters(list(offered))) == offered
    assert [part.value for part in made.partitions()] == [[(topic, 0, 100)]]


def test_a_table_of_a_catalog_is_the_topic_of_its_options(
    spark: SparkSession, place: Place, mq: SyncClient, topic: str
):
    mq.publish_many(
        topic, [f'{{"id": {n}}}' for n in range(10)], keys=[f"it's {n}" for n in range(10)]
    )
    options = f"servers '{place.servers}', topic '{topic}', startingOffsets '{{\"{topic}\": 2}}'"
    made = "USING onward COMMENT 'ours' TBLPROPERTIES ('a.b' = 'c') OPTIONS"
    spark.sql(f"CREATE TABLE of_topic {made} ({options})")
    spark.sql(f"CREATE TABLE typed {made} ({options}, columns 'key', bodySchema 'id INT')")
    spark.sql(f"CREATE TABLE to_topic {made} ({options}, columns 'key,body')")
    try:
        assert spark.sql("SELECT count(*), max(offset) FROM of_topic").first() == (8, 9)
        less = f"""WITH (`startingOffsets` = '{{"{topic}": 7}}')"""
        assert spark.sql(f"SELECT count(*) FROM of_topic {less}").first() == (3,)
        assert spark.sql("SELECT sum(id), max(key) FROM typed").first() == (44, "it's 9")
        spark.sql("INSERT INTO to_topic VALUES ('new', X'37')")
        assert mq.get(topic, 10).body == b"7"
    finally:
        for name in ("of_topic", "typed", "to_topic"):
            spark.sql(f"DROP TABLE IF EXISTS {name}")


def test_an_empty_topic_is_an_empty_frame(spark: SparkSession, place: Place, mq: SyncClient,
                                          topic: str):  # fmt: skip
    mq.create_topic(topic)
    assert read_topic(spark, topic, place=place).collect() == []


# --- bodies ----------------------------------------------------------------------------------


def test_a_body_schema_gives_typed_columns(
    spark: SparkSession, place: Place, mq: SyncClient, topic: str
):
    mq.publish_many(topic, [{"id": n, "name": f"n{n}", "key": "k"} for n in range(50)])
    mq.publish(topic, '{\n  "id": 50\n}')
    schema = "id BIGINT, name STRING, at TIMESTAMP"
    wanted = {"columns": ["offset"], "body_schema": schema}
    good = read_topic(spark, topic, place=place, **wanted)
    found = good.orderBy("offset").collect()
    assert good.columns == ["offset", "id", "name", "at"]
    assert [tuple(row) for row in found[:50]] == [(n, n, f"n{n}", None) for n in range(50)]
    assert tuple(found[50]) == (50, 50, None, None)
    mq.publish(topic, "no JSON")
    with sentence(InvalidRequest, f"message {topic}/51 is not JSON", "badBodies=null"):
        read_topic(spark, topic, place=place, **wanted).collect()
    lenient = read_topic(spark, topic, place=place, bad_bodies="null", **wanted)
    assert lenient.where("id is null").collect() == [Row(offset=51, id=None, name=None, at=None)]
    with sentence(InvalidRequest, "'key' of bodySchema has the name of a column of messages"):
        read_topic(spark, topic, place=place, body_schema="key STRING").collect()


def test_bodies_of_a_frame_become_columns(
    spark: SparkSession, place: Place, mq: SyncClient, topic: str
):
    mq.publish_many(topic, [b'{"id": 1}', b"bad", b'{"id": "x"}'])
    frame = read_topic(spark, topic, place=place, columns=["offset", "body"])
    assert typed(frame, "id BIGINT").orderBy("offset").collect() == [
        Row(offset=0, id=1), Row(offset=1, id=None), Row(offset=2, id=None),
    ]  # fmt: skip
    kept = typed(frame, "id BIGINT", bad="keep").where("bad_body is not null")
    assert [row.bad_body for row in kept.orderBy("offset").collect()] == ["bad", '{"id": "x"}']
    with sentence(InvalidRequest, "body of message 1 is not JSON of the schema: 'bad'"):
        typed(frame.where("offset < 2"), "id BIGINT", bad="fail").collect()
    with sentence(InvalidRequest, "a body is not JSON of the schema: 'bad'"):
        typed(frame.where("offset < 2").select("body"), "id BIGINT", bad="fail").collect()
    whole = read_topic(spark, topic, place=place).where("offset < 2")
    with sentence(InvalidRequest, f"body of message {topic}/1 is not JSON of the schema: 'bad'"):
        typed(whole, "id BIGINT", bad="fail").collect()


# --- mishaps ---------------------------------------------------------------------------------


def test_a_missing_topic_is_one_sentence(spark: SparkSession, place: Place, topic: str):
    with sentence(UnknownTopic, f"topic '{topic}' does not exist"):
        read_topic(spark, topic, place=place).count()
    with sentence(UnknownTopic, f"no topic matches the pattern '{topic}.*'"):
        read_topic(spark, place=place, topic_pattern=f"{topic}.*").count()


def test_a_wrong_option_is_one_sentence(spark: SparkSession, place: Place):
    with sentence(InvalidRequest, "did you mean 'startingOffsets'?"):
        spark.read.format("onward").options(topic="orders", startOffsets="latest").load()
    # Python has it as it was written, and asks nobody.
    with pytest.raises(InvalidRequest, match="no option 'start_offsets'; .* 'starting_offsets'"):
        read_topic(spark, "orders", place=place, start_offsets="latest")


def test_a_broker_that_goes_away_is_one_sentence(spark: SparkSession, tmp_path: Path):
    own = BrokerProcess(tmp_path / "log", log_path=tmp_path / "broker.txt")
    asyncio.run(own.start())
    try:
        with open_client(Place(own.address)) as client:
            client.publish_many("orders", [b"x"] * 100)
        parts = reader(Place(own.address), topic="orders").partitions()
    finally:
        own.end()
    gone = Place(own.address, timeout="500ms")
    with pytest.raises(NotConnected, match=own.address):
        list(reader(gone, topic="orders").read(parts[0]))
    with sentence(NotConnected, own.address):
        read_topic(spark, "orders", place=gone).count()


class Aged(NamedTuple):
    """A topic of 2,560 messages whose beginning is gone, and a lake that has the first 2,500."""

    place: Place
    topic: str
    lake: str


@pytest.fixture(scope="module")
def aged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Aged]:
    folder = tmp_path_factory.mktemp("aged")
    own = BrokerProcess(
        folder / "log", log_path=folder / "broker.txt", log_segment_bytes_max=1 << 18,
        log_preallocate_bytes=1 << 16,
    )  # fmt: skip
    made = Aged(Place(own.address), "orders", str(folder / "lake"))
    try:
        asyncio.run(own.start())
        with open_client(made.place) as mq:
            for _ in range(40):
                mq.publish_many("orders", [b"x" * 1_000] * 64)
            lake = open_lake(made.lake, create=True)
            lake.commit(add=archive_stretch(made.place, made.lake, Stretch("orders", 0, 2_500)))
            mq.change_topic("orders", retention_bytes=1 << 19)
            until(lambda: mq.topic("orders").first_offset > 0)
        yield made
    finally:
        own.end()


PLANNED = InputPartition([Stretch("orders", 0, 2_560)])
"""What was planned before retention came."""


def aged_reader(aged: Aged, **options: object) -> BatchReader:
    return reader(aged.place, topic=aged.topic, starting_offsets={aged.topic: 0}, **options)


def test_lost_messages_are_named(aged: Aged):
    strict = aged_reader(aged)
    lost = r"messages 0 to \d+ of topic 'orders' are gone: retention .* onDataLoss=skip"
    with pytest.raises(OffsetOutOfRange, match=lost):
        strict.partitions()
    with pytest.raises(OffsetOutOfRange, match=lost):
        list(strict.read(PLANNED))


def test_lost_messages_are_skipped_when_asked_for(aged: Aged):
    lenient = aged_reader(aged, on_data_loss="skip", min_partitions=3)
    check_rest(aged, [row["offset"] for row in rows_of(lenient)])
    check_rest(aged, [row["offset"] for row in rows_in(lenient.read(PLANNED))])
    check_rest(aged, offsets(aged.place, aged.topic))


def test_lost_messages_come_from_the_lake(aged: Aged):
    whole = aged_reader(aged, lake=aged.lake, min_partitions=3)
    assert [row["offset"] for row in rows_of(whole)] == list(range(2_560))
    rows = rows_in(whole.read(PLANNED))
    assert [row["offset"] for row in rows] == list(range(2_560))
    assert {row["body"] for row in rows} == {b"x" * 1_000}


def rows_in(found: Iterator[pa.RecordBatch]) -> list[dict[str, Any]]:
    return [row for rows in found for row in rows.to_pylist()]


def check_rest(aged: Aged, found: list[int]) -> None:
    """All is there from where the topic began when it was read; retention goes on meanwhile."""
    with open_client(aged.place) as mq:
        assert 0 < found[0] <= mq.topic(aged.topic).first_offset
    assert found == list(range(found[0], 2_560))


@pytest.mark.parametrize("policy", ["fail", "skip", "lake"])
def test_a_stream_whose_checkpoint_is_too_old_does_what_it_is_told(aged: Aged, policy: str):
    given = {"servers": aged.place.servers, "topic": aged.topic, "onDataLoss": policy,
             "lake": aged.lake, "maxRowsPerTrigger": "100"}  # fmt: skip
    made = StreamReader(source_options(given), message_schema())
    start = {aged.topic: 0}
    try:
        if policy == "fail":
            with pytest.raises(OffsetOutOfRange, match="are gone"):
                made.partitions(start, made.latestOffset(start, ReadMaxRows(100)))
        elif policy == "skip":
            parts = made.partitions(start, made.latestOffset(start, ReadAllAvailable()))
            check_rest(aged, [row["offset"] for p in parts for row in rows_in(made.read(p))])
        else:
            parts = made.partitions(start, made.latestOffset(start, ReadMaxRows(100)))
            found = [row["offset"] for part in parts for row in rows_in(made.read(part))]
            assert found == list(range(100))
    finally:
        made.stop()


def test_options_can_be_given_as_json_by_hand(place: Place, mq: SyncClient, topic: str):
    mq.publish_many(topic, [b"x"] * 3)
    assert offsets(place, topic, starting_offsets=json.dumps({topic: 2})) == [2]
