"""The benchmarks of delivery measure what they say: small runs of them, and their own counting."""

import asyncio
from pathlib import Path

import pytest

from onward.bench import backlog, consume_ack, fair, jobs, latency, members, ordered
from onward.bench.report import Options, Report


def few(folder: Path, *, count: int | None = None, seconds: float | None = None) -> Options:
    return Options(folder=folder, count=count, seconds=seconds, repeat=1)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure Onward alone: a test must not depend on what else is installed."""
    from onward.bench import rounds

    only_onward = rounds.alternate

    def alternate(clients, options, **more):
        return only_onward({"onward": clients["onward"]}, options, **more)

    for module in (consume_ack, jobs, latency):
        monkeypatch.setattr(module, "alternate", alternate)


@pytest.mark.e2e
def test_consume_ack_acks_everything_and_reports_a_rate(alone: None, tmp_path: Path):
    report = consume_ack.run(few(tmp_path, count=20_000))
    assert report.onward > 0
    assert report.unit == "messages/s"
    assert not list(tmp_path.iterdir())


@pytest.mark.e2e
def test_jobs_handles_what_is_published_meanwhile(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(jobs, "WARM_UP_S", 0.2)
    assert jobs.run(few(tmp_path, seconds=0.5)).unit == "jobs/s"


@pytest.mark.e2e
def test_members_are_measured_beside_the_handlers_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(members, "WARM_UP_S", 1.5)
    monkeypatch.setattr(members, "KINDS", ("alone", "app", "await_ack"))
    report = members.run(few(tmp_path, seconds=0.5))
    assert set(report.peers) == {"handlers alone"}
    awaited = report.details["await_ack"]
    assert isinstance(awaited, dict)
    assert awaited["broker_us"] > 0


@pytest.mark.e2e
def test_latency_takes_the_time_of_every_message(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(latency, "WARM_UP_S", 0.1)
    monkeypatch.setattr(latency, "PER_SECOND", 1_000)
    report = latency.run(few(tmp_path, seconds=0.3))
    assert report.less_is_better
    assert report.onward > 0


@pytest.mark.e2e
def test_backlog_is_drained_to_the_last_message_while_members_come_and_go(tmp_path: Path):
    report = backlog.run(few(tmp_path, count=50_000))
    assert set(report.peers) == {"steady group"}
    changing = report.details["changing"]
    assert isinstance(changing, list)
    assert changing[0]["highest_mb"] > 0


@pytest.mark.e2e
def test_an_ordered_group_shows_no_inversion_and_no_overlap(tmp_path: Path):
    report = ordered.run(few(tmp_path, count=5_000))
    assert (report.details["inversions"], report.details["overlaps"]) == (0, 0)


@pytest.mark.e2e
def test_fair_takes_the_waits_of_the_others_with_and_without_the_flood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fair, "WARM_UP_S", 0.0)
    monkeypatch.setattr(fair, "FLOOD", 20)
    report: Report = fair.run(few(tmp_path, seconds=0.5))
    assert report.less_is_better
    for name in ("with flood", "without flood"):
        rounds = report.details[name]
        assert isinstance(rounds, list)
        assert rounds[0]["messages"] > 0


def test_an_inversion_is_a_lower_number_after_a_higher_one_of_the_same_key():
    order = ordered.Order(expected=3)
    bodies = [ordered.NUMBER.pack(number) for number in (2, 5, 1)]
    order.take(["a", "b"], bodies[:2])
    order.acking(["a", "b"])
    assert (order.inversions, order.overlaps) == (0, 0)
    order.take(["a"], bodies[2:])
    assert (order.inversions, order.overlaps) == (1, 0)


def test_an_overlap_is_a_key_that_comes_again_before_it_is_acked():
    order = ordered.Order(expected=3)
    order.take(["a", "a"], [ordered.NUMBER.pack(1), ordered.NUMBER.pack(2)])
    assert (order.inversions, order.overlaps) == (0, 1)


async def test_the_last_durable_ack_ends_a_drain_and_refused_acks_do_not_count():
    drain = backlog.Drain(expected=10)
    refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    refused.set_exception(RuntimeError("lost"))
    drain.note(10, refused)
    assert (drain.acked, drain.done.is_set()) == (0, False)
    acked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    acked.set_result(None)
    drain.note(10, acked)
    assert drain.done.is_set()


async def test_an_open_load_publishes_exactly_as_many_as_asked_for(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(latency, "TICK_S", 0.001)
    bodies: list[bytes] = []

    async def publish(body: bytes) -> None:
        bodies.append(body)

    await latency.publish_on_time(publish, 12)
    due_at_ns = [latency.DUE_AT.unpack_from(body)[0] for body in bodies]
    assert len(bodies) == 12
    assert due_at_ns == sorted(due_at_ns)
    assert len(set(due_at_ns)) == 3
