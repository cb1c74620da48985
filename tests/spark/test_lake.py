"""A lake has every message once, through crashes, compaction and retention."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import cast

import pytest
from pyspark.errors import PySparkAttributeError
from pyspark.sql import DataFrame, SparkSession

from onward.client.sync import SyncClient
from onward.errors import Conflict, InvalidRequest, OffsetOutOfRange, UnknownTopic
from onward.pipeline import runs
from onward.pipeline.jobs.archive import Archived, archive
from onward.pipeline.jobs.compact import compact
from onward.pipeline.jobs.reconcile import reconcile
from onward.pipeline.jobs.stats import stats
from onward.pipeline.lake import open_lake
from onward.pipeline.lake_files import read_files
from onward.pipeline.lake_read import is_cut, read
from onward.pipeline.lake_state import Gap, origin_of
from onward.pipeline.place import Place, open_client
from onward.pipeline.queries import sql
from onward.pipeline.schema import arrow_schema, message_schema

from ..e2e.running import BrokerProcess  # noqa: TID252

PROGRAM = Path(__file__).with_name("archive_program.py")


@pytest.fixture
def mq(place: Place) -> Iterator[SyncClient]:
    with open_client(place, name="test") as client:
        yield client


def publish(mq: SyncClient, topic: str, first: int, count: int) -> None:
    for start in range(first, first + count, 100):
        numbers = range(start, min(first + count, start + 100))
        mq.publish_many(topic, [f"m{n}".encode() for n in numbers], keys=[f"k{n}" for n in numbers])


def rows_of(frame: DataFrame) -> list[tuple[int, bytes]]:
    found = frame.select("offset", "body").toArrow().to_pydict()
    return sorted(zip(found["offset"], found["body"], strict=True))


def expected(first: int, end: int) -> list[tuple[int, bytes]]:
    return [(n, f"m{n}".encode()) for n in range(first, end)]


def until(condition: Callable[[], bool], *, within_s: float = 60) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.005)


def test_lake_and_log_are_read_as_one_without_gap_or_repeat(
    spark: SparkSession, place: Place, mq: SyncClient, topic: str, lake: Path
):
    publish(mq, topic, 0, 1_000)
    first = archive(
        spark, place=place, lake=str(lake), topics=[topic], group=topic, rows_per_file=400
    )
    assert (first.rows, first.gaps) == (1_000, ())
    assert first.files >= 3, "one more when it is midnight"
    assert first.topics == {topic: (0, 1_000)}
    assert mq.group(topic).backlog == 0
    files = open_lake(lake).state().files[topic]
    assert sorted(lake.glob(f"topic={topic}/date=*/*")) == sorted(lake / one.path for one in files)

    publish(mq, topic, 1_000, 500)
    both = read(spark, place=place, topics=topic, lake=str(lake))
    assert both.columns[:3] == ["topic", "offset", "event_id"]
    rows = sorted(both.collect(), key=lambda row: row["offset"])
    assert [(row["offset"], row["body"]) for row in rows] == expected(0, 1_500)
    live = sorted(read(spark, place=place, topics=topic).collect(), key=lambda row: row["offset"])
    assert rows == live, "a message is the same from a file and from the broker"

    some = read(
        spark, place=place, topics=topic, lake=str(lake), start={topic: 350}, end={topic: 1_200},
        columns=["body", "offset"],
    )  # fmt: skip
    assert some.columns == ["body", "offset"]
    assert rows_of(some) == expected(350, 1_200)
    at = rows[1_000]["published_at"].astimezone()
    recent = read(spark, place=place, topics=[topic], lake=str(lake), start=at)
    assert rows_of(recent) == expected(1_000, 1_500)

    second = archive(spark, place=place, lake=str(lake), topics=[topic], group=topic)
    assert second.topics == {topic: (1_000, 1_500)}
    third = archive(spark, place=place, lake=str(lake), topics=[topic], group=topic)
    assert (third.rows, third.files) == (0, 0)
    mq.delete_topic(topic)
    assert rows_of(read(spark, place=place, topics=topic, lake=str(lake))) == expected(0, 1_500)
    publish(mq, topic, 0, 2_000)
    for again in (
        lambda: archive(spark, place=place, lake=str(lake), topics=[topic], group=topic),
        lambda: read(spark, place=place, topics=topic, lake=str(lake)),
    ):
        with pytest.raises(Conflict, match="it was deleted and created again"):
            again()


def test_small_files_become_large_ones_and_nobody_notices(
    spark: SparkSession, place: Place, mq: SyncClient, topic: str, lake: Path
):
    publish(mq, topic, 0, 700)
    archive(spark, place=place, lake=str(lake), topics=[topic], group=topic, rows_per_file=100)
    before = read(spark, place=place, topics=topic, lake=str(lake))
    done = compact(spark, lake=str(lake), topics=[topic])
    days = len({file.folder for file in open_lake(lake).state().files[topic]})
    assert (done.files_after, done.rows) == (days, 700)
    assert done.files_before >= 7
    assert rows_of(before) == expected(0, 700), "who began before still finds its files"
    after = read(spark, place=place, topics=topic, lake=str(lake))
    assert rows_of(after) == expected(0, 700)
    again = compact(spark, lake=str(lake), topics=[topic], grace=0)
    assert (again.merged, again.deleted) == (0, done.merged)
    assert len(list(lake.glob("topic=*/date=*/*"))) == days
    assert rows_of(read(spark, place=place, topics=topic, lake=str(lake))) == expected(0, 700)


def test_the_systems_own_topics_are_archived_when_they_are_named(
    spark: SparkSession, place: Place, mq: SyncClient, topic: str, lake: Path
):
    publish(mq, topic, 0, 10)
    mq.create_group(topic, topic)
    mq.advance_group(topic, topic, to=10, member="test")
    done = archive(spark, place=place, lake=str(lake), topics=["@trace"], group=f"{topic}-copy")
    assert done.rows > 0
    mq.create_group(f"{topic}-other", topic)
    rows = read(spark, place=place, topics="@trace", lake=str(lake), columns=["offset"])
    offsets = sorted(row["offset"] for row in rows.collect())
    assert offsets == list(range(len(offsets)))
    assert len(offsets) >= done.rows


def test_an_archive_that_follows_takes_what_comes_until_it_is_told_to_stop(
    spark: SparkSession, place: Place, mq: SyncClient, topic: str, lake: Path
):
    publish(mq, topic, 0, 100)
    said: list[runs.JobRun] = []
    published = [100]

    def stop() -> bool:
        end = open_lake(lake).state().end_of(topic)
        if end == published[0] and end < 300:
            publish(mq, topic, end, 100)
            published[0] += 100
        return end == 300

    pattern = topic.replace("t", "[t]", 1)
    done = archive(
        spark, place=place, lake=str(lake), topics=[pattern], group=topic, follow=True,
        gather="1ms", stop=stop, run=runs.Run(job="archive", say=lambda _: None, watch=said.append),
    )  # fmt: skip
    assert (done.rows, done.topics) == (300, {topic: (0, 300)})
    assert open_lake(lake).state().number == 3
    assert (said[-1].rows, said[-1].lag, mq.group(topic).backlog) == (300, 0, 0)


def test_two_archives_of_one_group_do_not_run_at_once(
    spark: SparkSession, place: Place, mq: SyncClient, topic: str, lake: Path
):
    publish(mq, topic, 0, 10)
    mq.create_group(topic, topic)
    mq.hold_group(topic, holder="the other archive")
    with pytest.raises(Conflict, match=f"group '{topic}' is used by the other archive"):
        archive(spark, place=place, lake=str(lake), topics=[topic], group=topic)
    assert open_lake(lake).state().number == 0


def test_what_cannot_be_archived_or_read_gets_one_sentence(
    spark: SparkSession, place: Place, mq: SyncClient, topic: str, lake: Path
):
    with pytest.raises(UnknownTopic, match=f"topic '{topic}' does not exist"):
        archive(spark, place=place, lake=str(lake), topics=[topic], group=topic)
    assert not lake.exists(), "a name that is mistyped leaves no lake behind"
    open_lake(lake, create=True)
    with pytest.raises(UnknownTopic, match=f"topic '{topic}' does not exist"):
        read(spark, place=place, topics=topic, lake=str(lake))
    with pytest.raises(InvalidRequest, match="there is no lake"):
        read(spark, place=place, topics=topic, lake=str(lake / "none"))
    with pytest.raises(InvalidRequest, match="no column 'ofset'; did you mean 'offset'"):
        read(spark, place=place, topics=topic, columns=["ofset"])
    foreign = lake.parent / "foreign"
    foreign.mkdir()
    (foreign / "x.parquet").write_bytes(b"x")
    with pytest.raises(InvalidRequest, match="is not an onward lake and is not empty"):
        archive(spark, place=place, lake=str(foreign), topics=[topic], group=topic)


# --- topics that go and come again ---------------------------------------------------------------


class Disturbed:
    """A session of Spark; `between` comes after the tasks of a job, before the driver goes on."""

    def __init__(self, spark: object, between: Callable[[], object]) -> None:
        self._spark = spark
        self._between = between

    def __getattr__(self, name: str) -> object:
        return getattr(self._spark, name)

    def range(self, *given: int) -> "Disturbed":
        return Disturbed(self._spark.range(*given), self._between)  # type: ignore[attr-defined]

    def select(self, *columns: object) -> "Disturbed":
        return Disturbed(self._spark.select(*columns), self._between)  # type: ignore[attr-defined]

    def collect(self) -> list[object]:
        done: list[object] = self._spark.collect()  # type: ignore[attr-defined]
        self._between()
        return done


def once(act: Callable[[], object]) -> Callable[[], object]:
    left = [act]
    return lambda: left.pop()() if left else None


def disturbed(spark: SparkSession, between: Callable[[], object]) -> SparkSession:
    return cast(SparkSession, Disturbed(spark, between))


def begin_anew(mq: SyncClient, topic: str, *, count: int) -> None:
    mq.delete_topic(topic)
    mq.create_topic(topic)
    for _ in range(count):
        mq.publish(topic, b"new")


def test_a_topic_that_was_created_again_is_left_out_unless_it_is_named(
    spark: SparkSession,
    place: Place,
    mq: SyncClient,
    topic: str,
    lake: Path,
    caplog: pytest.LogCaptureFixture,
):
    names = [f"{topic}-a", f"{topic}-b"]
    for name in names:
        publish(mq, name, 0, 10)
    copy = partial(archive, spark, place=place, lake=str(lake), group=topic)
    assert copy(topics=[f"{topic}-*"]).topics == dict.fromkeys(names, (0, 10))
    begin_anew(mq, names[0], count=12)
    publish(mq, names[1], 10, 5)
    done = copy(topics=[f"{topic}-*"])
    assert (done.topics, done.left_out) == ({names[1]: (10, 15)}, (names[0],))
    assert f"topic '{names[0]}' is left out of the archive" in caplog.text
    with pytest.raises(Conflict, match=f"topic '{names[0]}' is not the one that the lake holds"):
        copy(topics=names)
    followed = copy(topics=[f"{topic}-*"], follow=True, stop=iter([False, True]).__next__)
    assert followed.left_out == (names[0],)


def test_questions_over_many_topics_take_one_that_was_created_again_from_its_live_log_alone(
    spark: SparkSession, place: Place, mq: SyncClient, topic: str, lake: Path,
    caplog: pytest.LogCaptureFixture,
):  # fmt: skip
    anew, kept = names = [f"{topic}-a", f"{topic}-b"]
    for name in names:
        publish(mq, name, 0, 10)
    archive(spark, place=place, lake=str(lake), topics=names, group=topic)
    begin_anew(mq, anew, count=12)
    publish(mq, kept, 10, 5)
    asked = {"place": place, "lake": str(lake), "topics": [f"{topic}-*"]}
    found = read(spark, **asked)  # type: ignore[arg-type]
    bodies = [(n, b"new") for n in range(12)]
    assert rows_of(found.where(f"topic = '{anew}'")) == bodies
    assert rows_of(found.where(f"topic = '{kept}'")) == expected(0, 15)
    warning = f"topic '{anew}' is not the one that the lake holds: only its live log is read"
    assert [record.getMessage() for record in caplog.records].count(warning) == 1

    counted = stats(spark, **asked)  # type: ignore[arg-type]
    assert (counted.messages, counted.acked) == (27, 10), "the acks of the old one are not of it"
    checked = reconcile(spark, **asked)  # type: ignore[arg-type]
    assert (checked.published, checked.unchecked) == (27, 0)
    query = f"select topic, count(*) from messages where topic like '{topic}-%' group by 1"
    counts = sql(spark, query, place=place, lake=str(lake)).collect()
    assert sorted(map(tuple, counts)) == [(anew, 12), (kept, 15)]
    for ask in (read, stats, reconcile):
        with pytest.raises(Conflict, match=f"topic '{anew}' is not the one that the lake holds"):
            ask(spark, place=place, lake=str(lake), topics=names)  # type: ignore[operator]


def test_what_is_read_of_a_topic_that_began_anew_meanwhile_is_not_taken_for_the_old_one(
    spark: SparkSession, place: Place, mq: SyncClient, topic: str, lake: Path
):
    publish(mq, topic, 0, 10)
    again = once(lambda: begin_anew(mq, topic, count=10))
    done = archive(
        disturbed(spark, again), place=place, lake=str(lake), topics=[topic], group=topic
    )
    # Nothing of the old one was in the lake yet: it has the new one now, under its own origin.
    assert done.rows == 10
    state = open_lake(lake).state()
    assert (state.number, state.origins[topic]) == (1, origin_of(mq.topic(topic)))
    found = list(read_files(str(lake), topic, 0, 10, arrow_schema(message_schema(["body"]))))
    assert [body for part in found for body in part.column("body").to_pylist()] == [b"new"] * 10
    assert mq.group(topic).backlog == 0


def test_a_topic_that_is_deleted_meanwhile_stops_no_other(
    spark: SparkSession, place: Place, mq: SyncClient, topic: str, lake: Path
):
    for name in (f"{topic}-a", f"{topic}-b"):
        publish(mq, name, 0, 10)
    gone = once(lambda: mq.delete_topic(f"{topic}-a"))
    done = archive(
        disturbed(spark, gone), place=place, lake=str(lake), topics=[f"{topic}-*"], group=topic
    )
    # What was read before it went is what it had.
    assert done.topics == {f"{topic}-a": (0, 10), f"{topic}-b": (0, 10)}
    assert mq.group(topic).backlog == 0


# --- crashes -----------------------------------------------------------------------------------


class Driver:
    """An archive in a process of its own, to be killed as soon as a file of its lake is there."""

    def __init__(self, place: Place, lake: Path, topic: str, *, kill_at: str) -> None:
        self.lake, self.topic, self._kill_at = lake, topic, kill_at
        self._output = lake.with_suffix(".txt")
        with self._output.open("wb") as said:
            self._process = subprocess.Popen(
                [sys.executable, str(PROGRAM), place.servers, str(lake), topic],
                stdout=said, stderr=said, start_new_session=True,
            )  # fmt: skip

    def is_over(self) -> bool:
        """Kill it when its moment is there, and tell whether it has ended."""
        if self._process.poll() is not None:
            # On a busy machine it may be done before anybody looks; it must not have failed.
            code, output = self._process.returncode, self._output.read_text()[-3_000:]
            assert code in (0, -signal.SIGKILL), output
            return True
        if any(self.lake.glob(self._kill_at)):
            self.kill()
        return False

    def kill(self) -> None:
        """kill -9, with its JVM and its workers."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def archive_when_free(spark: SparkSession, place: Place, driver: Driver) -> Archived:
    """Archive what a killed one has left; the broker may still be taking its group from it."""
    found: list[Archived] = []

    def is_archived() -> bool:
        with suppress(Conflict):
            found.append(
                archive(
                    spark, place=place, lake=str(driver.lake), topics=[driver.topic],
                    group=f"{driver.topic}-copy",
                )
            )  # fmt: skip
        return bool(found)

    until(is_archived)
    return found[0]


def test_an_archive_killed_before_or_after_its_commit_loses_and_repeats_nothing(
    spark: SparkSession, place: Place, mq: SyncClient, tmp_path: Path, topic: str
):
    """Two drivers, killed at two moments: files without a commit, a commit without its group."""
    moments = {"files": "topic=*/date=*/[0-9]*.parquet", "commit": "_onward/commits/0*.json"}
    drivers: list[Driver] = []
    try:
        for name, pattern in moments.items():
            publish(mq, f"{topic}-{name}", 0, 8_000)
            drivers.append(
                Driver(place, tmp_path / name, f"{topic}-{name}", kill_at=pattern)
            )  # fmt: skip
        # All of them are asked each time: asking is what kills them.
        until(lambda: sum(driver.is_over() for driver in drivers) == len(drivers), within_s=180)
    finally:
        for driver in drivers:
            driver.kill()
    for driver in drivers:
        had = open_lake(driver.lake).state().end_of(driver.topic)
        assert archive_when_free(spark, place, driver).rows == 8_000 - had
        whole = read(spark, place=place, topics=driver.topic, lake=str(driver.lake))
        assert rows_of(whole) == expected(0, 8_000)
        assert mq.group(f"{driver.topic}-copy").backlog == 0


# --- retention ---------------------------------------------------------------------------------


@pytest.fixture
def small_broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    """A broker of small segments, in which retention has something to take."""
    made = BrokerProcess(
        tmp_path / "log", log_path=tmp_path / "broker.txt", log_segment_bytes_max=1 << 16,
        log_preallocate_bytes=1 << 14,
    )  # fmt: skip
    try:
        asyncio.run(made.start())
        yield made
    finally:
        made.end()


def look_for_space(mq: SyncClient) -> None:
    """Let the broker do now what it does every 10 s: the end of a topic is a reason to look."""
    mq.create_topic("short")
    mq.delete_topic("short")


def test_retention_waits_for_the_archive_and_what_it_takes_is_in_the_lake(
    spark: SparkSession, small_broker: BrokerProcess, lake: Path
):
    place = Place(servers=small_broker.address, token=None, timeout="30s")
    with open_client(place, name="test") as mq:
        mq.create_topic("kept", retention_bytes=1 << 17, retention_group="archive")
        mq.create_topic("taken", retention_bytes=1 << 17)
        mq.create_group("archive", "kept")
        for n in range(40):
            for topic in ("kept", "taken"):
                mq.publish_many(topic, [b"%d " % (n * 10 + at) + b"x" * 1_000 for at in range(10)])
        look_for_space(mq)
        until(lambda: mq.topic("taken").first_offset > 0)
        assert mq.topic("kept").first_offset == 0, "the archive has not been there yet"

        done = archive(spark, place=place, lake=str(lake))
        gone = done.gaps[0].end
        assert done.gaps == (Gap("taken", 0, gone),)
        assert done.topics == {"kept": (0, 400), "taken": (gone, 400)}
        look_for_space(mq)
        until(lambda: mq.topic("kept").first_offset > 0)
        mq.publish_many("kept", [b"%d " % n for n in range(400, 410)])

        both = read(spark, place=place, topics="kept", lake=str(lake))
        numbers = both.selectExpr("offset", "substring_index(CAST(body AS STRING), ' ', 1) AS n")
        assert sorted(numbers.collect()) == [(n, str(n)) for n in range(410)]
        with pytest.raises(OffsetOutOfRange, match=f"offsets 0 to {gone - 1} of topic 'taken'"):
            read(spark, place=place, topics="taken", lake=str(lake), start={"taken": 0})
        rest = read(spark, place=place, topics="taken", lake=str(lake), columns=["offset"])
        assert rest.count() == 400 - gone
        begun_at_ms = mq.get("taken", mq.topic("taken").first_offset).published_at_ms
        assert is_cut(place, "taken", since_ms=None)
        assert is_cut(place, "taken", since_ms=begun_at_ms), "one of the same moment may be gone"
        assert not is_cut(place, "taken", since_ms=begun_at_ms + 1)
        assert is_cut(place, "taken", lake=str(lake), since_ms=None), "the lake has a gap as well"
        assert is_cut(place, "kept", since_ms=None)
        assert not is_cut(place, "kept", lake=str(lake), since_ms=None)
    assert open_lake(lake).state().gaps["taken"] == done.gaps, "it is never forgotten"


class Remote:
    """A session as Spark Connect has it: DataFrames, but neither a context nor RDDs."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def __getattr__(self, name: str) -> object:
        if name in ("sparkContext", "_jsparkSession", "_jvm", "_sc"):
            raise PySparkAttributeError(
                errorClass="JVM_ATTRIBUTE_NOT_SUPPORTED", messageParameters={"attr_name": name}
            )
        return getattr(self._spark, name)


def test_archive_and_compact_need_no_context_so_they_run_through_spark_connect(
    spark: SparkSession, place: Place, mq: SyncClient, topic: str, lake: Path
):
    publish(mq, topic, 0, 300)
    remote = cast("SparkSession", Remote(spark))
    done = archive(
        remote, place=place, lake=str(lake), topics=[topic], group=f"{topic}-copy",
        rows_per_file=100,
    )  # fmt: skip
    assert (done.rows, done.files) == (300, 3)
    assert compact(remote, lake=str(lake), grace="0s").files_after == 1
    found = read(spark, place=place, topics=[topic], lake=str(lake))
    assert rows_of(found) == expected(0, 300)
