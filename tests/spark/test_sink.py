"""The sink: every row arrives once, with all that it says, or one sentence says why not."""

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, DataFrameWriter, SparkSession
from pyspark.sql.functions import lit
from pyspark.sql.types import StructType

from onward.client.sync import SyncClient
from onward.errors import InvalidRequest, OnwardError
from onward.message.batch import encode_batch
from onward.pipeline import sink
from onward.pipeline.columns import EncodedPiece
from onward.pipeline.failure import plain
from onward.pipeline.ledger import Ledger, finish, query_name
from onward.pipeline.place import Place, open_client
from onward.pipeline.sink import batch_writer, check_columns, sink_options, stream_writer
from onward.pipeline.staging import open_place, stage

LATER = datetime(2031, 5, 17, 8, 30, 0, 123456, tzinfo=UTC)

ALL_COLUMNS = (
    "topic string, key string, body binary, headers map<string,binary>, tag string, "
    "trace_id string, due_at timestamp, priority int, tenant string, unique string"
)


@pytest.fixture
def mq(place: Place) -> Iterator[SyncClient]:
    with open_client(place, name="test") as client:
        yield client


def onto(frame: DataFrame, place: Place, **options: str) -> DataFrameWriter:
    writer = frame.write.format("onward").mode("append").option("servers", place.servers)
    return writer.options(**options)


def bodies(mq: SyncClient, topic: str) -> list[bytes]:
    return [message.body for message in mq.read(topic)]


def sink_topics(mq: SyncClient) -> set[str]:
    return {one.topic for one in mq.topics(prefix="@sink.")}


def refusal(frame: DataFrame, place: Place, **options: str) -> str:
    """Return the sentence with which a write is refused."""
    with pytest.raises(PySparkException) as failed:
        onto(frame, place, **options).save()
    error = plain(failed.value)
    assert isinstance(error, OnwardError), failed.value
    return str(error)


# --- what is written -------------------------------------------------------------------------


def test_all_columns_arrive(spark: SparkSession, place: Place, mq: SyncClient, topic: str) -> None:
    rows = [
        (topic, "k1", b"one", {"a": b"1", "b": b"\xff"}, "vip", "t-1", None, 7, "acme", None),
        (topic, None, b"two", None, None, None, None, None, None, None),
        (topic, "k3", b"", {}, "a,b", "t-3", None, 0, "bob", None),
    ]
    onto(spark.createDataFrame(rows, ALL_COLUMNS).coalesce(1), place).save()
    first, second, third = mq.read(topic)
    assert (first.body, first.key, first.tag, first.trace_id) == (b"one", "k1", "vip", "t-1")
    assert first.headers == {"a": b"1", "b": b"\xff"} or first.headers == {"a": "1", "b": b"\xff"}
    assert (first.priority, first.tenant) == (7, "acme")
    assert (second.body, second.key, second.headers, second.tag) == (b"two", None, None, None)
    assert (second.trace_id, second.priority, second.tenant) == (None, 0, None)
    assert (third.body, third.key, third.tag, third.tenant) == (b"", "k3", "a,b", "bob")
    assert [one.offset for one in (first, second, third)] == [0, 1, 2]


def test_rows_with_a_time_wait_for_it(
    spark: SparkSession, place: Place, mq: SyncClient, topic: str
) -> None:
    rows = [
        ("now", "a", None, None),
        ("later", "b", LATER, f"{topic}-b"),
        ("last", "c", LATER, None),
        ("other", "d", LATER, f"{topic}-d"),
    ]
    frame = spark.createDataFrame(rows, "body string, key string, due_at timestamp, unique string")
    onto(frame.coalesce(1), place, topic=topic).save()
    assert bodies(mq, topic) == [b"now"]
    waiting = list(mq.list_scheduled(topic=topic))
    assert sorted(one.key or "" for one in waiting) == ["b", "c", "d"]
    # Never early: up to the next millisecond.
    assert {one.due_at_ms for one in waiting} == {int(LATER.timestamp()) * 1000 + 124}
    later = mq.scheduled(unique=f"{topic}-b")
    assert (later.state, later.body) == ("waiting", b"later")


def test_a_row_takes_the_place_of_what_waits_under_its_unique_key(
    spark: SparkSession, place: Place, mq: SyncClient, topic: str
) -> None:
    mq.publish(topic, "first", at=LATER, unique=f"{topic}-a")
    rows = [("second", f"{topic}-a"), ("b", f"{topic}-b"), ("third", f"{topic}-a"), ("c", None)]
    frame = spark.createDataFrame(rows, "body string, unique string").coalesce(1)
    onto(frame.withColumn("due_at", lit(LATER)), place, topic=topic).save()
    assert mq.scheduled(unique=f"{topic}-a").body == b"third"
    assert mq.scheduled(unique=f"{topic}-b").body == b"b"
    assert len(list(mq.list_scheduled(topic=topic))) == 3
    wrong = frame.selectExpr("body", "'@mine' as unique").withColumn("due_at", lit(LATER))
    assert refusal(wrong, place, topic=topic).startswith("column 'unique' has '@mine'")


def test_one_frame_writes_to_several_topics(
    spark: SparkSession, place: Place, mq: SyncClient, topic: str
) -> None:
    rows = [(f"{topic}-{number % 3}" if number % 4 else None, f"{number}") for number in range(12)]
    frame = spark.createDataFrame(rows, "topic string, body string").coalesce(1)
    onto(frame, place, topic=f"{topic}-else").save()
    expected: dict[str, list[bytes]] = {}
    for target, body in rows:
        expected.setdefault(target or f"{topic}-else", []).append(body.encode())
    assert {target: bodies(mq, target) for target in expected} == expected


def test_a_large_frame_goes_through_staging_and_leaves_nothing_there(
    spark: SparkSession, place: Place, mq: SyncClient, topic: str
) -> None:
    before = sink_topics(mq)
    frame = spark.range(0, 200_000, 1, 4).selectExpr(
        "cast(id as string) body", "concat('k', id % 7) key"
    )
    onto(frame, place, topic=topic).save()
    found = [(message.key, int(message.body)) for message in mq.read(topic)]
    assert sorted(number for _, number in found) == list(range(200_000))
    assert all(key == f"k{number % 7}" for key, number in found)
    # Partitions one after another, each in its order: here the order of the frame.
    assert [number for _, number in found] == list(range(200_000))
    assert sink_topics(mq) == before


def test_rows_one_by_one_arrive_like_columns(
    spark: SparkSession, place: Place, mq: SyncClient, topic: str
) -> None:
    rows = [("k", b"one", {"a": b"1"}, 7), (None, b"two", None, None)]
    schema = "key string, body binary, headers map<string,binary>, priority int"
    for arrow in ("true", "false"):
        frame = spark.createDataFrame(rows, schema).coalesce(1)
        onto(frame, place, topic=f"{topic}-{arrow}", arrow=arrow).save()
    one, other = (
        [(m.key, m.body, m.headers, m.priority) for m in mq.read(f"{topic}-{arrow}")]
        for arrow in ("true", "false")
    )
    assert one == other
    assert len(one) == 2


def test_a_write_with_an_id_is_stored_once(
    spark: SparkSession, place: Place, mq: SyncClient, topic: str
) -> None:
    frame = spark.range(5).selectExpr("cast(id as string) body")
    for _ in range(2):
        onto(frame, place, topic=topic, writeId=f"load of {topic}").save()
    onto(frame, place, topic=topic, writeId=f"another load of {topic}").save()
    onto(frame, place, topic=topic).save()
    assert len(bodies(mq, topic)) == 15
    ours = {f"@sink.{query_name('write', f'{a} of {topic}')}" for a in ("load", "another load")}
    assert ours <= sink_topics(mq)


def test_a_write_that_was_decided_and_interrupted_is_finished_and_not_repeated(
    spark: SparkSession, place: Place, mq: SyncClient, topic: str
) -> None:
    write_id = f"interrupted load of {topic}"
    query = query_name("write", write_id)
    piece = EncodedPiece(topic, 2, encode_batch([b"0", b"1"]))

    async def die_after_deciding() -> None:
        async with open_place(place) as client:
            ledger = Ledger(client, query)
            await ledger.open()
            await ledger.decide(0, [stage(place, query, [[piece]], partition=0)])

    asyncio.run(die_after_deciding())
    assert not mq.has_topic(topic)
    assert finish(place, write_id)
    assert not finish(place, write_id)
    frame = spark.range(2).selectExpr("cast(id as string) body")
    onto(frame, place, topic=topic, writeId=write_id).save()
    assert bodies(mq, topic) == [b"0", b"1"]


def test_an_empty_frame_writes_nothing(
    spark: SparkSession, place: Place, mq: SyncClient, topic: str
) -> None:
    before = sink_topics(mq)
    frame = spark.createDataFrame([], "body string")
    onto(frame, place, topic=topic).save()
    onto(frame.repartition(3), place, topic=topic).save()
    assert not mq.has_topic(topic)
    assert sink_topics(mq) == before


# --- streams ---------------------------------------------------------------------------------


def test_a_stream_writes_each_batch_once(
    spark: SparkSession, place: Place, mq: SyncClient, topic: str, tmp_path: Path
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()

    def drop(name: str, numbers: range) -> None:
        (tmp_path / name).write_text("".join(f"{number}\n" for number in numbers))
        (tmp_path / name).rename(folder / name)

    def drain() -> None:
        lines = spark.readStream.option("maxFilesPerTrigger", 1).text(str(folder))
        writer = lines.withColumnRenamed("value", "body").writeStream.format("onward")
        writer = writer.option("servers", place.servers).option("topic", topic)
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = writer.trigger(availableNow=True).start()
        assert query.awaitTermination(120)

    drop("a.txt", range(10))
    drop("b.txt", range(10, 60_000))
    drain()
    drop("c.txt", range(60_000, 60_010))
    drain()
    # The driver "dies" before Spark takes note that the last batch is done.
    commits = tmp_path / "checkpoint" / "commits"
    for path in commits.glob("*2*"):
        path.unlink()
    assert not (commits / "2").exists()
    drain()
    assert (commits / "2").exists()
    assert sorted(map(int, bodies(mq, topic))) == list(range(60_010))
    query_id = onward_query(tmp_path / "checkpoint")
    assert [one for one in sink_topics(mq) if query_id in one] == [f"@sink.{query_id}"]


def onward_query(checkpoint: Path) -> str:
    """Return the name under which the query of a checkpoint decides."""
    return query_name("query", json.loads((checkpoint / "metadata").read_text())["id"])


# --- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        ("bdoy string", "cannot write: there is no column 'bdoy'; did you mean 'body'?"),
        (
            "body string, offset bigint",
            "cannot write: there is no column 'offset'; there are: body",
        ),
        ("body double", "column 'body' is double; it must be binary or string"),
        ("body string, key int", "column 'key' is int; it must be string"),
        (
            "body string, headers map<string,int>",
            "column 'headers' is map<string,int>; it must be map<string,binary> or map<string,str",
        ),
        ("body string, due_at bigint", "column 'due_at' is bigint; it must be timestamp"),
        ("body string, priority string", "column 'priority' is string; it must be int or"),
        ("key string", "there is no column 'body'"),
        ("body string, body string", "there are 2 columns 'body'"),
        ("body string, unique string", "column 'unique' names what waits"),
    ],
)
def test_a_wrong_schema_is_named_by_its_column(schema: str, sentence: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_columns(StructType.fromDDL(schema), topic="orders")
    assert str(refused.value).startswith(sentence)


def test_texts_of_any_kind_and_small_numbers_are_taken() -> None:
    schema = "body string, topic string collate UTF8_LCASE, priority smallint"
    check_columns(StructType.fromDDL(schema), topic=None)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"write_id": "7"}, "there is no option 'write_id'; did you mean 'writeId'?"),
        ({"durability": "maybe"}, "option 'durability' is one of memory, interval, disk, quorum"),
        ({"arrow": "perhaps"}, "option 'arrow' is true or false, not 'perhaps'"),
        ({"topic": "a b"}, "topic name 'a b'"),
        ({"topic": "@trace"}, "topic name '@trace'"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, str], sentence: str) -> None:
    with pytest.raises(OnwardError) as refused:
        sink_options(options)
    assert str(refused.value).startswith(sentence)


def test_a_topic_is_never_overwritten() -> None:
    schema = StructType.fromDDL("body string")
    with pytest.raises(InvalidRequest, match="write with mode"):
        batch_writer({"topic": "orders"}, schema, overwrite=True)
    with pytest.raises(InvalidRequest, match="use outputMode"):
        stream_writer({"topic": "orders"}, schema, overwrite=True)
    with pytest.raises(InvalidRequest, match="a stream has its checkpoint"):
        stream_writer({"topic": "orders", "writeId": "7"}, schema, overwrite=False)


def test_a_time_that_no_schedule_takes_is_refused_before_anything_is_decided(place: Place) -> None:
    schema = pa.schema([("body", pa.binary()), ("due_at", pa.timestamp("us", "UTC"))])
    never = datetime(9999, 12, 31, tzinfo=UTC)
    rows = pa.RecordBatch.from_pylist([{"body": b"a", "due_at": never}], schema)
    with pytest.raises(InvalidRequest, match="column 'due_at' has a time more than 3653d ahead"):
        list(sink._encoded(iter([rows]), "orders", place))
    dues = [None, LATER, None]
    rows = pa.RecordBatch.from_pylist([{"body": b"a", "due_at": due} for due in dues], schema)
    [pieces] = sink._encoded(iter([rows]), "orders", place)
    assert [(one.topic, one.count) for one in pieces] == [("orders", 2), ("@schedule", 1)]


def test_refusals_come_out_of_spark_as_one_sentence(
    spark: SparkSession, place: Place, mq: SyncClient, topic: str
) -> None:
    before = sink_topics(mq)
    frame = spark.range(3).selectExpr("id", "cast(id as string) body")
    assert "there is no column 'id'" in refusal(frame, place, topic=topic)
    assert refusal(frame.select("body"), place).startswith("there is neither a column 'topic'")
    nulls = frame.selectExpr("if(id = 1, null, body) body")
    assert refusal(nulls, place, topic=topic) == "column 'body' is null in at least 1 row"
    mq.create_topic(topic, rule="read-only")
    assert refusal(frame.select("body"), place, topic=topic).startswith(
        f"topic '{topic}' is read-only"
    )
    assert bodies(mq, topic) == []
    # What was decided stays for a day, in case somebody finishes it.
    assert len(sink_topics(mq) - before) <= 1
