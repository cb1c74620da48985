"""The streaming source: exactly once over restarts, progress on the broker, no silent surprises."""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows

from onward.client.sync import SyncClient
from onward.errors import Conflict, InvalidRequest, OffsetOutOfRange, UnknownGroup, UnknownTopic
from onward.pipeline import bounds, stream
from onward.pipeline.failure import plain
from onward.pipeline.options import source_options, spark_options
from onward.pipeline.place import Place, open_client
from onward.pipeline.progress import catch_up, positions
from onward.pipeline.runs import TOPIC as RUNS
from onward.pipeline.runs import JobRun, decode
from onward.pipeline.schema import message_schema
from onward.pipeline.stream import StreamReader, read_stream
from onward.protocol.operations.groups import ShareDescription

WAIT_S = 60.0


@pytest.fixture(scope="module")
def mq(place: Place) -> Iterator[SyncClient]:
    with open_client(place) as client:
        yield client


@pytest.fixture
def make(place: Place) -> Iterator[Callable[..., StreamReader]]:
    """Make readers as Spark would, to run without Spark; they are stopped at the end."""
    made: list[StreamReader] = []

    def one(**options: object) -> StreamReader:
        given = {"servers": place.servers, "timeout": place.timeout, **spark_options(options)}
        parsed = source_options(given)
        made.append(StreamReader(parsed, message_schema(parsed.columns)))
        return made[-1]

    yield one
    for reader in made:
        reader.stop()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def planned(reader: StreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[tuple]:
    return [tuple(one) for part in reader.partitions(start, end) for one in part.value]


# --- offsets, without Spark ------------------------------------------------------------------


def test_a_batch_goes_from_the_start_to_the_end_and_an_idle_one_nowhere(
    make: Callable[..., StreamReader], mq: SyncClient, topic: str
):
    mq.publish_many(topic, [b"x"] * 5)
    reader = make(topic=topic)
    start = reader.initialOffset()
    assert positions(start) == {topic: 0}
    end = reader.latestOffset(start, ReadAllAvailable())
    assert positions(end) == reader.reportLatestOffset() == {topic: 5}
    assert planned(reader, start, end) == [(topic, 0, 5)]
    assert reader.latestOffset(end, ReadAllAvailable()) is end
    mq.publish(topic, "more")
    assert positions(reader.latestOffset(end, ReadAllAvailable())) == {topic: 6}
    later = make(topic=topic, starting_offsets={topic: 3})
    assert positions(later.initialOffset()) == {topic: 3}


def test_a_restart_in_the_first_batch_begins_where_it_began(
    make: Callable[..., StreamReader], mq: SyncClient, place: Place, topic: str
):
    mq.publish_many(topic, [b"x"] * 5)
    options = {"topic": topic, "group": f"g-{topic}", "starting_offsets": "latest"}
    first = make(**options)
    start = first.initialOffset()
    assert start == {"@group": f"g-{topic}", "@servers": place.servers, topic: 5}
    mq.publish_many(topic, [b"x"] * 3)
    end = first.latestOffset(start, ReadAllAvailable())
    first.stop()
    mq.publish_many(topic, [b"x"] * 2)
    again = make(**options)
    assert again.initialOffset() == start
    assert planned(again, start, end) == [(topic, 5, 8)]
    assert json.dumps(start) == json.dumps(dict(sorted(start.items())))


@pytest.mark.parametrize(
    "options", [{"starting_offsets": "latest"}, {"starting_timestamp": "1h"},
                {"starting_offsets": -1}]
)  # fmt: skip
def test_a_start_that_moves_needs_a_group(
    make: Callable[..., StreamReader], topic: str, options: dict[str, object]
):
    with pytest.raises(InvalidRequest, match="needs the option 'group'"):
        make(topic=topic, **options)


def test_an_end_is_for_batches(make: Callable[..., StreamReader], topic: str):
    with pytest.raises(InvalidRequest, match="uses trigger.availableNow=True."):
        make(topic=topic, ending_offsets="latest")


def test_a_group_begins_where_the_options_say(
    make: Callable[..., StreamReader], mq: SyncClient, topic: str
):
    mq.publish_many(topic, [b"x"] * 5)
    mq.publish_many(f"{topic}.b", [b"x"] * 5)
    starts = {
        "earliest": ({}, [0, 0]),
        "offsets": ({"starting_offsets": {topic: 3, f"{topic}.b": "latest"}}, [3, 5]),
        "time": ({"starting_timestamp": "1d"}, [0, 0]),
        "now": ({"starting_timestamp": "2100-01-01T00:00:00Z"}, [5, 5]),
    }
    for name, (options, wanted) in starts.items():
        reader = make(topic=f"{topic},{topic}.b", group=f"{name}-{topic}", **options)
        offset = reader.initialOffset()
        assert [offset[topic], offset[f"{topic}.b"]] == wanted, name
    with pytest.raises(UnknownGroup, match="startingOffsets=group needs it"):
        make(topic=topic, group=f"none-{topic}", starting_offsets="group").initialOffset()


def test_limits_are_shared_by_the_topics_in_proportion(
    make: Callable[..., StreamReader], mq: SyncClient, topic: str
):
    quiet = f"{topic}.quiet"
    mq.publish_many(topic, [b"x" * 100] * 900)
    mq.publish_many(quiet, [b"x" * 100] * 100)
    rows = make(topic=f"{topic},{quiet}", max_rows_per_trigger=100)
    assert rows.getDefaultReadLimit() == ReadMaxRows(100)
    start = rows.initialOffset()
    some, all_ = (
        rows.latestOffset(start, limit) for limit in (ReadMaxRows(100), ReadAllAvailable())
    )
    assert (positions(some), positions(all_)) == (
        {topic: 90, quiet: 10}, {topic: 900, quiet: 100},
    )  # fmt: skip
    sized = make(topic=f"{topic},{quiet}", max_bytes_per_trigger=20_000)
    assert sized.getDefaultReadLimit() == ReadMaxBytes(20_000)
    end = sized.latestOffset(start, ReadMaxBytes(20_000))
    # A message has 100 bytes of body, a length, and its part of the head of its batch.
    assert 150 <= end[topic] + end[quiet] <= 200
    assert make(topic=topic).getDefaultReadLimit() == ReadAllAvailable()


def test_available_now_ends_at_what_was_there_when_it_began(
    make: Callable[..., StreamReader], mq: SyncClient, topic: str
):
    mq.publish_many(topic, [b"x"] * 5)
    reader = make(topic=topic)
    reader.prepareForTriggerAvailableNow()
    mq.publish_many(topic, [b"x"] * 5)
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadAllAvailable())
    assert positions(end) == {topic: 5}
    assert reader.latestOffset(end, ReadAllAvailable()) == end


def test_a_new_topic_of_a_pattern_is_read_from_its_beginning(
    make: Callable[..., StreamReader], mq: SyncClient, topic: str
):
    mq.publish_many(f"{topic}.a", [b"x"] * 2)
    reader = make(topic_pattern=rf"{topic}\..*", group=f"g-{topic}")
    start = reader.initialOffset()
    mq.publish_many(f"{topic}.b", [b"x"] * 3)
    found = reader.latestOffset(start, ReadAllAvailable())
    assert (found[f"{topic}.a"], found[f"{topic}.b"]) == (2, 0)
    assert planned(reader, start, found) == [(f"{topic}.a", 0, 2)]
    # One that has ended stays where it was.
    mq.delete_topic(f"{topic}.a")
    after = reader.latestOffset(found, ReadAllAvailable())
    assert (after[f"{topic}.a"], after[f"{topic}.b"]) == (2, 3)
    assert planned(reader, found, after) == [(f"{topic}.b", 0, 3)]
    again = reader.latestOffset(after, ReadAllAvailable())
    assert again is after
    assert mq.group(f"g-{topic}").backlog == 0
    mq.delete_topic(f"{topic}.b")
    assert reader.latestOffset(after, ReadAllAvailable()) is after


def test_a_group_is_used_by_one_query_at_a_time(
    make: Callable[..., StreamReader], mq: SyncClient, topic: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stream, "HOLD_S", 0.0)
    mq.publish(topic, "x")
    first = make(topic=topic, group=f"g-{topic}")
    first.initialOffset()
    with pytest.raises(Conflict, match=f"group 'g-{topic}' is used by a Spark query on "):
        make(topic=topic, group=f"g-{topic}").initialOffset()
    first.stop()
    monkeypatch.setattr(stream, "HOLD_S", WAIT_S)
    assert make(topic=topic, group=f"g-{topic}").initialOffset()[topic] == 0


def test_a_query_whose_group_another_has_taken_ends(
    make: Callable[..., StreamReader], mq: SyncClient, topic: str
):
    group = f"g-{topic}"
    mq.publish_many(topic, [b"x"] * 3)
    cut_off = make(topic=topic, group=group)
    start = cut_off.initialOffset()
    # As after a lost connection: the hold is gone, and somebody else is quicker.
    mq.delete_group(group)
    other = make(topic=topic, group=group)
    assert other.latestOffset(other.initialOffset(), ReadAllAvailable())[topic] == 3
    with pytest.raises(Conflict, match=f"group '{group}' is used by a Spark query on "):
        cut_off.latestOffset(start, ReadAllAvailable())


def test_more_topics_than_one_request_takes_are_followed(
    make: Callable[..., StreamReader], mq: SyncClient, topic: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stream, "ASKED_MAX", 2)
    monkeypatch.setattr(bounds, "ASKED_MAX", 2)
    names = [f"{topic}.{number}" for number in range(5)]
    for name in names:
        mq.publish(name, "x")
    reader = make(topic_pattern=f"{topic}[.].*")
    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    assert positions(end) == dict.fromkeys(names, 1)
    assert reader.latestOffset(end, ReadAllAvailable()) is end
    mq.publish(names[4], "y")
    assert reader.latestOffset(end, ReadAllAvailable()) == end | {names[4]: 2}


def test_a_topic_of_a_pattern_may_end_while_it_is_waited_for(
    make: Callable[..., StreamReader], mq: SyncClient, topic: str
):
    mq.publish(f"{topic}.a", "x")
    mq.publish(f"{topic}.b", "x")
    reader = make(topic_pattern=f"{topic}[.].*")
    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(reader.latestOffset, end, ReadAllAvailable())
        mq.delete_topic(f"{topic}.b")
        assert waiting.result(WAIT_S) is end


def test_a_planned_batch_of_a_deleted_topic_is_an_error_or_skipped_as_asked_for(
    make: Callable[..., StreamReader], mq: SyncClient, topic: str
):
    names = {f"{topic}.a": 2, f"{topic}.b": 2}
    for name in names:
        mq.publish_many(name, [b"x"] * 2)
    mq.delete_topic(f"{topic}.b")
    begin = dict.fromkeys(names, 0)
    with pytest.raises(UnknownTopic, match=f"topic '{topic}.b' does not exist"):
        make(topic_pattern=f"{topic}[.].*").partitions(begin, names)
    skipping = make(topic_pattern=f"{topic}[.].*", on_data_loss="skip")
    assert planned(skipping, begin, names) == [(f"{topic}.a", 0, 2)]


def test_a_topic_that_was_created_anew_is_not_read_on_in_the_middle(
    make: Callable[..., StreamReader], mq: SyncClient, topic: str
):
    mq.publish_many(topic, [b"old"] * 3)
    reader = make(topic=topic, group=f"g-{topic}")
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadAllAvailable())
    assert reader.latestOffset(end, ReadAllAvailable()) is end
    mq.delete_topic(topic)
    mq.publish_many(topic, [b"new"] * 5)
    anew = f"group 'g-{topic}' does not consume topic '{topic}' any more: .* created anew"
    with pytest.raises(OffsetOutOfRange, match=anew):
        reader.latestOffset(end, ReadAllAvailable())
    reader.stop()
    with pytest.raises(OffsetOutOfRange, match=anew):
        make(topic=topic, group=f"g-{topic}").latestOffset(end, ReadAllAvailable())


def test_without_a_group_a_topic_that_was_created_anew_is_an_error_or_begins_at_its_beginning(
    make: Callable[..., StreamReader], mq: SyncClient, topic: str
):
    mq.publish_many(topic, [b"old"] * 3)
    reader = make(topic=topic)
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadAllAvailable())
    mq.delete_topic(topic)
    mq.publish_many(topic, [b"new"] * 5)
    anew = f"topic '{topic}' was created anew since this query read it"
    for one in (reader, make(topic=topic)):
        with pytest.raises(OffsetOutOfRange, match=anew):
            one.latestOffset(end, ReadAllAvailable())
        with pytest.raises(OffsetOutOfRange, match=anew):
            one.partitions(start, end)
    skipping = make(topic=topic, on_data_loss="skip")
    assert planned(skipping, start, end) == [], "what was planned of the old one is gone with it"
    after = skipping.latestOffset(end, ReadAllAvailable())
    assert planned(skipping, end, after) == [(topic, 0, 5)]
    assert skipping.latestOffset(after, ReadAllAvailable()) is after


@pytest.mark.parametrize("count", [0, 2, 3])
def test_a_topic_that_was_created_anew_and_is_no_longer_than_before_is_noticed_too(
    make: Callable[..., StreamReader], mq: SyncClient, topic: str, count: int
):
    mq.publish_many(topic, [b"old"] * 3)
    reader = make(topic=topic)
    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    mq.delete_topic(topic)
    mq.create_topic(topic)
    for _ in range(count):
        mq.publish(topic, b"new")
    with pytest.raises(OffsetOutOfRange, match=f"topic '{topic}' was created anew"):
        make(topic=topic).latestOffset(end, ReadAllAvailable())
    skipping = make(topic=topic, on_data_loss="skip")
    after = skipping.latestOffset(end, ReadAllAvailable())
    assert positions(after) == {topic: count}
    assert planned(skipping, end, after) == ([(topic, 0, count)] if count else [])


def test_a_checkpoint_that_does_not_say_which_topics_it_means_goes_on(
    make: Callable[..., StreamReader], mq: SyncClient, topic: str
):
    mq.publish_many(topic, [b"x"] * 3)
    reader = make(topic=topic)
    assert planned(reader, {topic: 0}, {topic: 2}) == [(topic, 0, 2)]
    end = reader.latestOffset({topic: 2}, ReadAllAvailable())
    assert positions(end) == {topic: 3}
    idle = {topic: 3}
    assert reader.latestOffset(idle, ReadAllAvailable()) is idle
    assert list(stream.origins_of(end)) == [topic], "from now on it does"


def test_a_checkpoint_of_another_query_is_refused(
    make: Callable[..., StreamReader], mq: SyncClient, topic: str
):
    mq.publish_many(topic, [b"x"] * 5)
    reader = make(topic=topic)
    foreign = "this checkpoint is of another query, topic or broker"
    with pytest.raises(InvalidRequest, match=f"{foreign}: it has topic 'other'"):
        reader.latestOffset({"other": 3, topic: 1}, ReadAllAvailable())
    with pytest.raises(InvalidRequest, match=f"{foreign}: it has topic 'other'"):
        reader.partitions({"other": 1}, {"other": 3})
    with pytest.raises(OffsetOutOfRange, match=f"{foreign}: it is at offset 9 of .* ends at 5"):
        reader.latestOffset({topic: 9}, ReadAllAvailable())
    with pytest.raises(OffsetOutOfRange, match=f"{foreign}: it is at offset 9 of .* ends at 5"):
        reader.partitions({topic: 1}, {topic: 9})
    with pytest.raises(OffsetOutOfRange, match=f"{foreign}: a batch would begin at offset 4"):
        reader.partitions({topic: 4}, {topic: 2})
    other = make(topic=topic, group=f"g-{topic}")
    with pytest.raises(OffsetOutOfRange, match=f"{foreign}: it is at offset 9"):
        other.latestOffset({topic: 9}, ReadAllAvailable())
    with pytest.raises(OffsetOutOfRange, match=f"{foreign}: it is at offset 9"):
        other.partitions({topic: 1}, {topic: 9})
    with pytest.raises(InvalidRequest, match=f"{foreign}: it has topic 'other'"):
        other.commit({"other": 3})
    other.prepareForTriggerAvailableNow()
    # Who is refused leaves no group behind.
    with pytest.raises(UnknownGroup):
        mq.group(f"g-{topic}")
    assert planned(other, {topic: 1}, {topic: 5}) == [(topic, 1, 5)]
    assert mq.group(f"g-{topic}").backlog == 5


def test_a_missing_topic_is_refused(make: Callable[..., StreamReader], topic: str):
    with pytest.raises(UnknownTopic, match=f"topic '{topic}' does not exist"):
        make(topic=topic).initialOffset()
    with pytest.raises(UnknownTopic, match=f"topic '{topic}' does not exist"):
        make(topic=topic, group=f"g-{topic}").initialOffset()


def test_what_is_committed_is_finished_in_the_group(
    make: Callable[..., StreamReader], mq: SyncClient, topic: str
):
    mq.publish_many(topic, [b"x"] * 5)
    reader = make(topic=topic, group=f"g-{topic}", max_rows_per_trigger=2)
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadMaxRows(2))
    assert mq.group(f"g-{topic}").backlog == 5
    reader.latestOffset(end, ReadMaxRows(2))
    assert mq.group(f"g-{topic}").backlog == 3
    reader.commit({**end, topic: 4})
    assert mq.group(f"g-{topic}").backlog == 1


# --- queries ---------------------------------------------------------------------------------


def run(frame: DataFrame, name: str, folder: Path) -> Any:
    """Run a query over all that is there, into Parquet; return it when it has ended."""
    query = (
        frame.writeStream.format("parquet").queryName(name)
        .option("checkpointLocation", str(folder / "checkpoint"))
        .option("path", str(folder / "rows")).trigger(availableNow=True).start()
    )  # fmt: skip
    query.awaitTermination()
    return query


def test_a_query_reads_each_message_once_over_restarts_and_its_group_shows_it(
    spark: SparkSession, place: Place, mq: SyncClient, topic: str, tmp_path: Path
):
    other, group = f"{topic}.other", f"g-{topic}"
    mq.publish_many(topic, [b"x"] * 250)
    mq.publish_many(other, [b"x"] * 50)

    def frame() -> DataFrame:
        return read_stream(
            spark, [topic, other], place=place, group=group, columns=["topic", "offset"],
            max_rows_per_trigger=120,
        )  # fmt: skip

    first = run(frame(), f"first-{topic}", tmp_path)
    counts = [progress.numInputRows for progress in first.recentProgress]
    assert [count for count in counts if count] == [120, 120, 60]
    catch_up(first)
    assert mq.group(group).backlog == 0
    mq.publish_many(topic, [b"x"] * 30)
    second = run(frame(), f"second-{topic}", tmp_path)
    # The listener tells the broker of the last batch by itself.
    until(lambda: mq.group(group).backlog == 0)
    catch_up(second)
    rows = spark.read.parquet(str(tmp_path / "rows")).collect()
    assert sorted((row.topic, row.offset) for row in rows) == [
        *((topic, n) for n in range(280)), *((other, n) for n in range(50)),
    ]  # fmt: skip
    until(lambda: has_ended(mq, f"first-{topic}"))
    lines = told(mq, f"first-{topic}")
    assert [(line.rows, line.lag) for line in lines[:3]] == [(120, 180), (240, 60), (300, 0)]
    assert {line.about["group"] for line in lines} == {group}
    assert lines[2].result[f"lag {other}"] == 0


def told(mq: SyncClient, query: str) -> list[JobRun]:
    if not mq.has_topic(RUNS):
        return []
    runs = [decode(message.body) for message in mq.read(RUNS)]
    return [run for run in runs if run is not None and run.about.get("query") == query]


def has_ended(mq: SyncClient, query: str) -> bool:
    return any(line.state == "done" for line in told(mq, query))


def test_a_query_that_cannot_go_on_says_why_in_one_sentence(
    spark: SparkSession, place: Place, mq: SyncClient, topic: str, tmp_path: Path
):
    mq.publish_many(topic, [b"x"] * 5)
    options = {"place": place, "columns": ["offset"]}
    run(read_stream(spark, topic, **options), f"good-{topic}", tmp_path)
    mq.publish(f"{topic}.other", "x")
    refused = read_stream(spark, f"{topic}.other", group=f"g-{topic}", **options)
    with pytest.raises(StreamingQueryException) as caught:
        run(refused, f"other-{topic}", tmp_path)
    found = plain(caught.value)
    with pytest.raises(UnknownGroup):
        mq.group(f"g-{topic}")
    assert isinstance(found, InvalidRequest)
    assert f"of another query, topic or broker: it has topic '{topic}'" in str(found)
    with pytest.raises(PySparkException) as missing:
        run(read_stream(spark, "nobody-knows", **options), f"none-{topic}", tmp_path / "none")
    assert isinstance(plain(missing.value), UnknownTopic)
    # Neither had a batch, and both are told of.
    sentences = {f"other-{topic}": str(found), f"none-{topic}": "topic 'nobody-knows' does not"}
    for name, sentence in sentences.items():
        until(lambda name=name: bool(told(mq, name)))
        (line,) = told(mq, name)
        assert (line.job, line.state) == ("stream", "failed")
        assert line.error.startswith(sentence)


def test_a_continuous_query_follows_its_topic_until_it_is_stopped(
    spark: SparkSession, place: Place, mq: SyncClient, topic: str, tmp_path: Path
):
    group = f"g-{topic}"
    mq.publish_many(topic, [b"x"] * 5)
    frame = read_stream(
        spark, topic, place=place, group=group, starting_offsets="latest", columns=["offset"]
    )
    query = (
        frame.writeStream.format("memory").queryName("followed").trigger(processingTime="0 seconds")
        .option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    )  # fmt: skip
    try:
        until(lambda: [share.cursor for share in shares(mq, group)] == [5])
        for count in (3, 4):
            mq.publish_many(topic, [b"x"] * count)
            # The query itself advances its group, before it waits for more.
            until(lambda: mq.group(group).backlog == 0)
        assert sorted(row.offset for row in spark.table("followed").collect()) == [*range(5, 12)]
    finally:
        query.stop()


def shares(mq: SyncClient, group: str) -> tuple[ShareDescription, ...]:
    found = [one.topics for one in mq.groups() if one.group == group]
    return found[0] if found else ()
