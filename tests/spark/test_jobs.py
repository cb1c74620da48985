"""The jobs that write: replay, schedule, redrive; a user's own file; what runs tell."""

import json
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import onward
from onward.cli import run
from onward.errors import AlreadyExists, Conflict, InvalidRequest, UnknownGroup, UnknownTopic
from onward.pipeline import runs
from onward.pipeline.jobs.read import read_out, read_rows
from onward.pipeline.jobs.redrive import redrive
from onward.pipeline.jobs.replay import FROM_HEADER, Replayed, replay
from onward.pipeline.jobs.run import run_file
from onward.pipeline.jobs.schedule import schedule
from onward.pipeline.place import Place, open_client

NEXT_YEAR = datetime.now(UTC).replace(microsecond=0) + timedelta(days=365)


@pytest.fixture
def mq(place: Place) -> Iterator[onward.SyncClient]:
    with open_client(place, name="test") as client:
        yield client


@pytest.fixture
def orders(mq: onward.SyncClient, topic: str) -> str:
    """A topic of ten messages: bodies m0 to m9, keys even and odd."""
    for number in range(10):
        mq.publish(
            topic, f"m{number}", key=("even", "odd")[number % 2], trace_id=f"t{number}",
            tag="eu" if number < 5 else "us", headers={"number": str(number)},
        )  # fmt: skip
    return topic


def bodies(mq: onward.SyncClient, topic: str) -> list[str]:
    return [message.text for message in mq.read(topic)]


def headers(message: onward.Message) -> dict[str, str]:
    """Return the headers as text: in Spark all values are bytes."""
    found = message.headers or {}
    return {
        name: value.decode() if isinstance(value, bytes) else value for name, value in found.items()
    }


# --- replay to a topic ----------------------------------------------------------------------------


def test_a_replay_keeps_what_was_said_about_messages_and_says_where_they_come_from(
    spark: SparkSession, place: Place, mq: onward.SyncClient, orders: str
):
    again = f"{orders}-again"
    done = replay(spark, place=place, topic=orders, where="key = 'odd'", to_topic=again)
    assert done == Replayed(5)
    messages = list(mq.read(again))
    assert [message.text for message in messages] == ["m1", "m3", "m5", "m7", "m9"]
    third = messages[1]
    assert (third.key, third.tag, third.trace_id) == ("odd", "eu", "t3")
    assert headers(third) == {"number": "3", FROM_HEADER: f"{orders}/3"}
    # Of a chain of replays the last counts.
    replay(spark, place=place, topic=again, where="offset = 1", to_topic=f"{orders}-third")
    assert headers(mq.get(f"{orders}-third", 0))[FROM_HEADER] == f"{again}/1"


def test_a_run_that_is_repeated_stores_nothing_again(
    spark: SparkSession, place: Place, mq: onward.SyncClient, orders: str
):
    again = f"{orders}-again"
    first = replay(spark, place=place, topic=orders, to_topic=again, run_id=f"r-{orders}")
    mq.publish(orders, "came later")
    second = replay(spark, place=place, topic=orders, to_topic=again, run_id=f"r-{orders}")
    assert first == Replayed(10, run_id=f"r-{orders}")
    assert second == first._replace(is_repeat=True)
    assert bodies(mq, again) == [f"m{number}" for number in range(10)]
    with pytest.raises(Conflict, match="take another run id"):
        replay(spark, place=place, topic=orders, to_topic="elsewhere", run_id=f"r-{orders}")


def test_a_rate_cuts_a_replay_into_pieces_and_keeps_the_order(
    spark: SparkSession, place: Place, mq: onward.SyncClient, orders: str
):
    again = f"{orders}-again"
    # Each message is a piece of its own, and the second waits until the first is paid for.
    options: dict[str, Any] = {"topic": orders, "to_topic": again, "rate": 0.39}
    done = replay(spark, place=place, where="offset in (3, 7)", run_id=f"r-{orders}", **options)
    assert done.rows == 2
    assert bodies(mq, again) == ["m3", "m7"]


def test_a_dry_run_of_a_replay_only_counts(
    spark: SparkSession, place: Place, mq: onward.SyncClient, orders: str
):
    done = replay(
        spark, place=place, topic=orders, where="body_text in ('m1', 'm2')", to_topic="nowhere",
        dry_run=True,
    )  # fmt: skip
    assert done.rows == 2
    assert not mq.has_topic("nowhere")


def test_a_replay_that_cannot_be_is_refused_before_anything_is_written(
    spark: SparkSession, place: Place, mq: onward.SyncClient, orders: str
):
    def refused(kind: type[Exception], text: str, **options: Any) -> None:
        given: dict[str, Any] = {"topic": orders, "to_topic": f"{orders}-no"} | options
        with pytest.raises(kind, match=text):
            replay(spark, place=place, **given)

    refused(InvalidRequest, "to_topic or to_group", to_group="billing")
    refused(InvalidRequest, "to_topic or to_group", to_topic=None)
    refused(InvalidRequest, "'nosuch'|`nosuch`", where="nosuch = 1")
    refused(InvalidRequest, "is not understood", where="key = = 1")
    refused(InvalidRequest, "not understood.*boolean", where="offset + 1")
    refused(InvalidRequest, "is empty", where=" ")
    refused(InvalidRequest, "rate is more than 0", rate=0.0)
    refused(InvalidRequest, "a run id has", run_id="")
    refused(UnknownTopic, "does not exist", topic="no-such-topic")
    refused(UnknownGroup, "does not exist", to_topic=None, to_group="no-such-group")
    assert not mq.has_topic(f"{orders}-no")


# --- replay to a group ----------------------------------------------------------------------------


def test_a_replay_to_a_group_delivers_again_what_matches_and_to_nobody_else(
    spark: SparkSession, place: Place, mq: onward.SyncClient, orders: str
):
    for group in ("billing", "audit"):
        mq.create_group(f"{group}-{orders}", orders, start="latest")
    done = replay(
        spark, place=place, topic=orders, where="tag = 'eu' and key = 'even'",
        to_group=f"billing-{orders}", dry_run=True,
    )  # fmt: skip
    assert (done, mq.group(f"billing-{orders}").backlog) == (Replayed(3), 0)
    replay(
        spark, place=place, topic=orders, where="tag = 'eu' and key = 'even'",
        to_group=f"billing-{orders}",
    )  # fmt: skip
    waiting = mq.peek(f"billing-{orders}", orders)
    assert [message.text for message in waiting] == ["m0", "m2", "m4"]
    assert mq.group(f"audit-{orders}").backlog == 0


# --- schedule -------------------------------------------------------------------------------------


def source_of(spark: SparkSession, folder: Path, kind: str) -> str:
    rows = [
        (number, NEXT_YEAR + timedelta(minutes=number), f"text {number}") for number in range(4)
    ]
    frame = spark.createDataFrame(rows, "id BIGINT, due TIMESTAMP, text STRING")
    path = str(folder / f"source.{kind}")
    frame.coalesce(1).write.format(kind).option("header", "true").save(path)
    return path


@pytest.mark.parametrize("kind", ["parquet", "csv", "json"])
def test_a_source_becomes_messages_that_wait_for_their_time(
    spark: SparkSession, place: Place, mq: onward.SyncClient, topic: str, tmp_path: Path, kind: str
):
    path = source_of(spark, tmp_path, kind)
    for is_repeat in (False, True):  # A repeat under the same id stores nothing again.
        done = schedule(
            spark, place=place, source=path, format=kind, topic=topic, at="due",
            body="struct(id, text)", key="concat('user-', id)", unique=f"concat('{topic}-', id)",
            run_id=f"load-{topic}",
        )  # fmt: skip
        assert done.is_repeat == is_repeat
    assert (done.rows, done.overdue) == (4, 0)
    assert (done.first_due, done.last_due) == (NEXT_YEAR, NEXT_YEAR + timedelta(minutes=3))
    waiting = list(mq.list_scheduled(topic=topic))
    assert len(waiting) == 4
    first = mq.scheduled(unique=f"{topic}-0")
    assert (first.state, first.at_ms) == ("waiting", int(NEXT_YEAR.timestamp() * 1000))


def test_messages_that_are_due_come_with_key_and_body(
    spark: SparkSession, place: Place, mq: onward.SyncClient, topic: str, tmp_path: Path
):
    (tmp_path / "due.jsonl").write_text(
        json.dumps({"topic": topic, "ms": 1_000, "n": 7, "key": "k"}) + "\n"
    )
    done = schedule(
        spark, place=place, source=str(tmp_path / "due.jsonl"), format="json", at="ms", body="n",
        key="key",
    )  # fmt: skip
    assert (done.rows, done.overdue) == (1, 1)
    message = next(iter(mq.read(topic, follow=True)))
    assert (message.text, message.key, message.due_at_ms) == ("7", "k", 1_000)


def test_a_source_with_wrong_rows_loads_nothing_and_says_how_many_are_wrong(
    spark: SparkSession, place: Place, mq: onward.SyncClient, topic: str, tmp_path: Path
):
    lines = [
        {"at": "2099-01-01T00:00:00Z", "body": "a", "u": "x"},
        {"at": "soon", "body": None, "u": "x"},
        {"at": None, "body": "c", "u": ""},
    ]
    path = tmp_path / "wrong.json"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def refused(text: str, **options: Any) -> None:
        given = {"source": str(path), "format": "json", "topic": topic, "at": "at", "body": "body"}
        with pytest.raises(InvalidRequest, match=text):
            schedule(spark, place=place, **{**given, **options})

    soon = "timestamp_millis(0)"
    refused("2 of 3 rows have no time: .*; the first has at 'soon', body None, u 'x'; nothing is")
    refused("3 of 3 rows are due more than 3653d ahead", at="timestamp '2099-01-01'")
    refused("3 of 3 rows are due more than 3653d ahead", at="9223372036854775807L")
    refused("3 of 3 rows have no time", at="CAST(NULL AS BIGINT)")
    refused("a run id has 1 to 128 characters", at=soon, run_id="")
    refused("1 of 3 rows have no body: 'body' gives null; the first has at 'soon'", at=soon)
    refused("1 of 3 rows have a unique key that is none", at=soon, body="'b'", unique="u")
    refused("1 unique keys stand .* 'x'", at=soon, body="'b'", unique="nullif(u, '')")
    refused("a time is a timestamp", at="array(1)")
    refused("`nosuch`", body="nosuch")
    refused("`topic`", topic=None)
    refused("no format", format="excel")
    refused("cannot be read.*does not exist|path", source=str(tmp_path / "missing"))
    refused("dbtable or query", format="jdbc", source="jdbc:postgresql://nowhere/x")
    assert not mq.has_topic(topic)
    assert not list(mq.list_scheduled(topic=topic))


# --- redrive --------------------------------------------------------------------------------------


@pytest.fixture
def dead(mq: onward.SyncClient, orders: str) -> str:
    """A group that gave up on all ten messages: even ones timed out, odd ones were wrong."""
    group = f"group-{orders}"
    left = 10
    for delivery in mq.consume(orders, group=group):
        delivery.reject("timeout after 5 s" if delivery.key == "even" else "no such order")
        left -= 1
        if not left:
            break
    return group


def test_dead_letters_that_a_predicate_picks_are_delivered_again_and_no_others(
    spark: SparkSession, place: Place, mq: onward.SyncClient, orders: str, dead: str
):
    where = "cause like 'timeout%' and tag = 'eu' and cast(headers['number'] as string) > '0'"
    look = redrive(spark, place=place, group=dead, topic=orders, where=where, dry_run=True)
    assert (look.matched, look.redriven) == (2, 0)
    assert [one.id for one in look.examples] == [f"{orders}/2", f"{orders}/4"]
    assert mq.group(dead).dead == 10
    done = redrive(spark, place=place, group=dead, where=where)
    assert (done.matched, done.redriven) == (2, 2)
    assert mq.group(dead).dead == 8
    assert [message.text for message in mq.peek(dead, orders)] == ["m2", "m4"]


def test_a_redrive_that_cannot_be_is_refused(spark: SparkSession, place: Place, dead: str):
    with pytest.raises(InvalidRequest, match="`nosuch`"):
        redrive(spark, place=place, group=dead, where="nosuch = 1")
    with pytest.raises(UnknownGroup, match="does not exist"):
        redrive(spark, place=place, group="no-such-group", where="attempts > 0")
    nothing = redrive(spark, place=place, group=dead, where="attempts > 1000")
    assert (nothing.matched, nothing.redriven) == (0, 0)


# --- read, run, runs ------------------------------------------------------------------------------


def test_rows_are_read_in_order_or_written_to_a_new_folder(
    spark: SparkSession, place: Place, orders: str, tmp_path: Path
):
    rows = read_rows(
        spark,
        place=place,
        topics=[orders],
        where="key = 'odd'",
        columns=["offset", "body"],
        limit=2,
    )
    assert [(row["offset"], bytes(row["body"])) for row in rows] == [(1, b"m1"), (3, b"m3")]
    out = str(tmp_path / "out")
    assert read_out(spark, place=place, topics=[orders], where="offset > 3", out=out) == 6
    assert spark.read.parquet(out).count() == 6
    with pytest.raises(AlreadyExists, match="exists already"):
        read_out(spark, place=place, topics=[orders], out=out)


def test_a_file_of_a_user_finds_session_place_and_its_arguments(
    spark: SparkSession, place: Place, orders: str, tmp_path: Path
):
    (tmp_path / "beside.py").write_text("WORD = 'found'\n")
    program = tmp_path / "count.py"
    program.write_text(
        "import sys\nfrom beside import WORD\n"
        "frame = spark.read.format('onward').option('servers', place.servers)\n"
        "counted = frame.option('topic', sys.argv[1]).load().count()\n"
    )
    before = sys.argv, list(sys.path)
    left = run_file(spark, place=place, file=str(program), arguments=[orders])
    assert (left["counted"], left["WORD"]) == (10, "found")
    assert (sys.argv, list(sys.path)) == before
    with pytest.raises(InvalidRequest, match="there is no file"):
        run_file(spark, place=place, file=str(tmp_path / "missing.py"))


def test_a_job_says_how_it_went_and_a_failed_one_why(
    spark: SparkSession, place: Place, mq: onward.SyncClient, orders: str
):
    replay(spark, place=place, topic=orders, to_topic=f"{orders}-again")
    with pytest.raises(InvalidRequest):
        replay(spark, place=place, topic=orders, to_topic=f"{orders}-again", where="nosuch")
    mine = [one for one in runs.last_runs(mq, job="replay") if one.about["topic"] == orders]
    failed, done = mine
    assert (done.state, done.rows, done.result["rows"]) == ("done", 10, 10)
    assert failed.state == "failed"
    assert "nosuch" in failed.error


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def onward_pipeline(
    spark: SparkSession,
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Callable[..., tuple[int, str, str]]:
    """Run `onward pipeline` here, in the session that is there already."""
    monkeypatch.setenv("ONWARD_ADDRESS", place.servers)
    monkeypatch.delenv("ONWARD_SPARK_MASTER", raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run(["pipeline", *arguments])
        out, err = capfd.readouterr()
        return code, out, err

    return call


def test_the_past_of_a_lake_is_replayed_from_the_command_line(
    onward_pipeline: Callable[..., tuple[int, str, str]],
    mq: onward.SyncClient,
    orders: str,
    lake: Path,
):
    code, out, _ = onward_pipeline("archive", orders, "--lake", str(lake), "--group", orders)
    assert (code, out.splitlines()[-1].partition(",")[0]) == (0, "archived 10 messages in 1 file")
    mq.publish(orders, "live", key="odd")
    again = (
        "replay", orders, "--lake", str(lake), "--to-topic", f"{orders}-again", "--where",
        "key = 'odd'", "--run-id", f"r-{orders}",
    )  # fmt: skip
    code, out, _ = onward_pipeline(*again, "--json")
    assert (code, json.loads(out)["rows"]) == (0, 6)
    code, out, _ = onward_pipeline(*again)
    said = f"run 'r-{orders}' was done already: nothing was stored again"
    assert (code, out.splitlines()[-1]) == (0, said)
    assert bodies(mq, f"{orders}-again") == ["m1", "m3", "m5", "m7", "m9", "live"]
    code, out, _ = onward_pipeline("runs", "--job", "replay", "--limit", "1", "--json")
    assert json.loads(out)["about"]["topic"] == orders


def test_reconcile_ends_with_6_and_a_report_when_something_is_missing(
    onward_pipeline: Callable[..., tuple[int, str, str]],
    mq: onward.SyncClient,
    orders: str,
    tmp_path: Path,
):
    mq.create_group(f"group-{orders}", orders)
    report = tmp_path / "report.html"
    code, out, _ = onward_pipeline(
        "reconcile", orders, "--group", f"group-{orders}", "--report", str(report), "--json"
    )  # fmt: skip
    found = json.loads(out)
    assert (code, found["undelivered"], found["missing"], found["unchecked"]) == (6, 10, 0, 0)
    assert report.read_text().startswith("<!doctype html>")
    _, out, _ = onward_pipeline("runs", "--job", "reconcile", "--limit", "1", "--json")
    result = json.loads(out)["result"]
    assert (result["is_settled"], result["undelivered"], result["unchecked"]) == (False, 10, 0)


def test_what_is_wrong_with_a_query_is_one_line(
    onward_pipeline: Callable[..., tuple[int, str, str]], orders: str
):
    for where in ("nosuch = 1", "cast(body_text as int) > 1"):
        code, out, err = onward_pipeline("read", orders, "--where", where)
        assert (code, out) == (1, "")
        assert err.rstrip().splitlines()[-1].startswith("error: ")
        assert err.rstrip().endswith("(invalid_request)")
        assert "unexpected" not in err


def test_the_traceback_of_a_file_is_the_users_own(
    onward_pipeline: Callable[..., tuple[int, str, str]], tmp_path: Path
):
    program = tmp_path / "wrong.py"
    program.write_text("import sys\nprint(sys.argv[1:])\nspark.nosuch\n")
    code, out, err = onward_pipeline("run", str(program), "--limit", "7")
    assert (code, out) == (1, "['--limit', '7']\n")
    assert err.startswith("Traceback")
    assert "wrong.py" in err.splitlines()[1]
    assert "AttributeError" in err.splitlines()[-1]
    program.write_text("import sys\nsys.exit(0)\n")
    assert onward_pipeline("run", str(program))[0] == 0
