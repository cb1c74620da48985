"""Runs of jobs: what they say, how often, and what is left of it; without Spark."""

import logging
import threading
from pathlib import Path

import pytest

import onward
from onward.errors import InvalidRequest, OnwardError
from onward.pipeline import runs
from onward.pipeline.place import Place
from onward.pipeline.runs import TOPIC, JobRun, Run, decode, encode, last_runs, running, using
from onward.testing.clock import ManualClock


def make_run(clock: ManualClock, **options: object) -> tuple[Run, list[JobRun]]:
    said: list[JobRun] = []
    return Run(job="archive", say=said.append, clock=clock, **options), said  # type: ignore[arg-type]


def test_a_run_speaks_at_most_once_a_second_and_always_at_its_end():
    clock = ManualClock()
    run, said = make_run(clock)
    for step in range(1, 31):
        clock.advance(100)
        run.progress(rows=step * 10, lag=300 - step * 10)
    run.end()
    # The first word, one per second, and the last one.
    assert [one.rows for one in said] == [0, 100, 200, 300, 300]
    assert [one.state for one in said] == ["running"] * 4 + ["done"]
    assert (said[-1].rows_per_s, said[-1].lag, said[-1].took_ms) == (100.0, 0, 3_000)


def test_a_run_that_is_busy_is_heard_of_until_it_ends():
    clock = ManualClock()
    run, said = make_run(clock)
    run.progress(rows=5)
    for _ in range(2):
        clock.advance(10_000)
        run.beat()
    run.end()
    run.beat()
    assert [(one.state, one.took_ms) for one in said] == [
        ("running", 0),
        ("running", 10_000),
        ("running", 20_000),
        ("done", 20_000),
    ]
    assert said[-1].rows == 5


def test_a_job_need_not_tell_anything_to_be_heard_of(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runs, "BEAT_S", 0.01)
    has_beaten = threading.Event()
    monkeypatch.setattr(Run, "beat", lambda run: has_beaten.set())
    with running(Place("memory:"), job="archive"):
        assert has_beaten.wait(60)


def test_a_run_that_is_silent_for_a_minute_is_lost():
    def is_lost(state: str, *, job: str = "archive", silent_ms: int) -> bool:
        run = JobRun(run="a", job=job, state=state, at_ms=1_000)  # type: ignore[arg-type]
        return run.is_lost(now_ms=1_000 + silent_ms)

    assert is_lost("running", silent_ms=60_001)
    assert not is_lost("running", silent_ms=60_000)
    assert not is_lost("done", silent_ms=10_000_000)
    assert not is_lost("stopped", silent_ms=10_000_000)
    # A stream speaks when it has done something.
    assert not is_lost("running", job="stream", silent_ms=10_000_000)


@pytest.mark.parametrize("is_covered", [False, True])
def test_a_run_that_was_interrupted_is_stopped_and_has_not_failed(place: Place, is_covered: bool):
    def work() -> None:
        try:
            raise KeyboardInterrupt
        finally:
            if is_covered:  # As when what is left cannot be cleaned up any more.
                raise ValueError("java is gone")

    with pytest.raises((KeyboardInterrupt, ValueError)), running(place, job="replay") as run:
        work()
    assert (run.state.state, run.state.error) == ("stopped", "")


def test_who_watches_sees_every_step():
    seen: list[JobRun] = []
    run, said = make_run(ManualClock(), watch=seen.append)
    run.progress(rows=1)
    run.progress(rows=2, files=1)
    assert [one.rows for one in seen] == [0, 1, 2]
    assert len(said) == 1


def test_what_is_not_told_again_stays():
    run, _ = make_run(ManualClock())
    run.progress(rows=5, lag=7, files=1)
    run.progress()
    assert (run.state.rows, run.state.lag, run.state.files) == (5, 7, 1)
    run.result(rows=5, path=Path("/lake"))
    run.result(files=1)
    assert run.state.result == {"rows": 5, "path": "/lake", "files": 1}


def test_a_result_and_an_error_have_a_limit():
    run, said = make_run(ManualClock())
    run.result(**{f"field{number}": number for number in range(1_000)})
    run.end(ValueError("x" * 100_000))
    assert len(said[-1].result) == 100
    assert len(said[-1].error) == 2_000


@pytest.mark.parametrize("body", [b"", b"hello", b"[]", b'{"run":"a"}', b"\xff", b'{"run":1}'])
def test_what_is_no_run_is_none(body: bytes):
    assert decode(body) is None


def test_a_field_of_a_later_version_is_ignored():
    later = encode(JobRun(run="a", job="b", state="done"))[:-1] + b',"colour":"red"}'
    assert decode(later) == JobRun(run="a", job="b", state="done")


def test_what_is_not_utf_8_is_told_as_well_as_it_can_be():
    told = encode(JobRun(run="a", job="b", state="failed", about={"topics": ["\udcff"]}))
    assert decode(told) == JobRun(run="a", job="b", state="failed", about={"topics": ["?"]})


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(f"file:{tmp_path / 'log'}")


def test_a_job_that_ends_well_and_one_that_fails_are_both_there_to_be_seen(place: Place):
    with running(place, job="archive", topic="orders") as run:
        run.progress(rows=7)
        run.result(files=2)
    with pytest.raises(InvalidRequest), running(place, job="compact"):
        raise InvalidRequest("this is no lake")
    with onward.connect_sync(place.servers) as mq:
        newest, oldest = last_runs(mq)
        assert (newest.job, newest.state, newest.error) == ("compact", "failed", "this is no lake")
        assert (oldest.state, oldest.rows, oldest.result) == ("done", 7, {"files": 2})
        assert oldest.about == {"topic": "orders"}
        assert last_runs(mq, job="archive") == [oldest]
        assert last_runs(mq, limit=1) == [newest]
        assert last_runs(mq, job="stats") == []


def test_the_error_of_a_spark_job_is_its_last_sentence(place: Place):
    pages = "at org.apache\nonward.errors.UnknownTopic: topic 'x' does not exist\n at java"
    with pytest.raises(RuntimeError), running(place, job="archive") as run:
        raise RuntimeError(pages)
    assert run.state.error == "topic 'x' does not exist"


def test_a_run_of_the_caller_is_used_and_not_ended(place: Place):
    with running(place, job="replay") as mine:
        with using(mine, place, job="replay") as run:
            assert run is mine
        assert run.state.state == "running"
    with using(None, place, job="replay") as own:
        pass
    assert own.state.state == "done"


@pytest.mark.parametrize("servers", ["unix:/nowhere/at/all.sock", "nowhere:not-a-port"])
def test_a_broker_that_is_away_is_a_warning_and_no_failure(
    servers: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(runs, "PATIENCE", "10ms")
    with (
        caplog.at_level(logging.WARNING, "onward.pipeline"),
        running(Place(servers), job="archive") as run,
    ):
        run.progress(rows=1)
        run.result(files=1)
    assert run.state.state == "done"
    assert len(caplog.records) == 1


def test_the_newest_state_of_many_runs_is_found_from_the_end(place: Place):
    with onward.connect_sync(place.servers) as mq:
        mq.create_topic(TOPIC)
        bodies = []
        for number in range(60):
            first = JobRun(run=f"r{number}", job="stream", state="running", started_at_ms=number)
            bodies += [encode(first)] * 49
            bodies.append(encode(JobRun(**{**_fields(first), "state": "done", "rows": number})))
        for at in range(0, len(bodies), 500):
            mq.publish_many(TOPIC, bodies[at : at + 500])
        mq.publish(TOPIC, "not a run")
        found = last_runs(mq, limit=25)
    assert [run.run for run in found] == [f"r{number}" for number in range(59, 34, -1)]
    assert all(run.state == "done" and run.rows == run.started_at_ms for run in found)


def _fields(run: JobRun) -> dict[str, object]:
    return {name: getattr(run, name) for name in JobRun.__struct_fields__}


def test_no_error_but_ours_is_hidden(place: Place):
    with pytest.raises(ZeroDivisionError), running(place, job="run") as run:
        raise ZeroDivisionError
    assert (run.state.state, run.state.error) == ("failed", "ZeroDivisionError")
    assert not issubclass(ZeroDivisionError, OnwardError)
