"""The benchmarks of the schedule measure what they say: small runs of them, and their counting."""

from pathlib import Path

import pytest

from onward.bench import delay_burst, delay_cancel, delay_lateness, delay_load
from onward.bench.report import Options
from onward.message.batch import decode_batch
from onward.protocol.operations.schedule import CancelResult


def few(
    folder: Path,
    *,
    count: int | None = None,
    seconds: float | None = None,
    busy: str | None = None,
) -> Options:
    return Options(folder=folder, count=count, seconds=seconds, busy=busy, repeat=1)


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a slow machine schedule messages after they are due: then they fire at once."""
    for module in (delay_burst, delay_cancel, delay_lateness):
        monkeypatch.setattr(module, "check_in_time", lambda server, start_ms: None)


@pytest.mark.e2e
def test_delay_load_finds_every_scheduled_message_again_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(delay_load, "FIRST_COUNT", 100_000)
    report = delay_load.run(few(tmp_path, count=200_000))
    assert set(report.peers) == {"plain publishing"}
    stages = report.details["stages"]
    assert isinstance(stages, list)
    assert [stage["messages"] for stage in stages] == [100_000, 100_000]
    assert not list(tmp_path.iterdir())


@pytest.mark.e2e
def test_delay_lateness_finds_no_message_early(
    unhurried: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    contenders = delay_lateness._contenders
    monkeypatch.setattr(delay_lateness, "PER_SECOND", 1_000)
    monkeypatch.setattr(
        delay_lateness, "_contenders", lambda seconds: {"onward": contenders(seconds)["onward"]}
    )
    report = delay_lateness.run(few(tmp_path, seconds=0.5, busy="cpu"))
    assert report.details["busy"] == "cpu"
    found = report.details["onward"]
    assert isinstance(found, dict)
    assert (found["messages"], found["early"]) == (500, 0)


@pytest.mark.e2e
def test_delay_burst_takes_each_message_once(unhurried: None, tmp_path: Path):
    report = delay_burst.run(few(tmp_path, count=5_000))
    assert (report.details["messages"], report.details["early"]) == (5_000, 0)


@pytest.mark.e2e
def test_delay_cancel_finds_every_answer_right(
    unhurried: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(delay_cancel, "CANCELLING_S", 2)
    monkeypatch.setattr(delay_cancel, "SINGLY_S", 0.3)
    monkeypatch.setattr(delay_cancel, "DUE_WITHIN_MS", 500)
    report = delay_cancel.run(few(tmp_path, count=5_000))
    assert report.details["wrong"] == 0


def test_a_schedule_speaker_sends_other_times_each_time_within_two_years():
    speaker = delay_load.ScheduleSpeaker([b"a", b"b"], seed=1)
    times = []
    for _ in range(2):
        frame = bytes(speaker.request())
        batch = decode_batch(frame, frame.index(b"OBAT"), raw_bytes_max=1_000)
        assert batch.topics == ["bench", "bench"]
        times += [at for at in batch.due_at_ms or [] if at is not None]
    assert len(set(times)) == 4
    assert max(times) - min(times) < 2**delay_load.SPAN_BITS


def test_a_message_before_its_time_counts_as_early():
    lateness = delay_lateness.Lateness(expected=3)
    bodies = [delay_lateness.MOMENTS.pack(due, due, number) for number, due in enumerate((5, 9))]
    assert lateness.note(bodies, now_ns=7_000_000)
    assert not lateness.note(bodies[:1], now_ns=7_000_000)
    assert lateness.early == 1
    assert list(lateness.late_ns) == [2_000_000, -2_000_000, 2_000_000]


def test_a_burst_is_over_with_its_last_message():
    burst = delay_burst.Burst(due_at_ms=1_000, expected=3)
    assert burst.take([b"", b""], now_ns=1_500_000_000)
    assert not burst.take([b""], now_ns=3_000_000_000)
    assert (burst.seconds, burst.early) == (2.0, 0)


@pytest.mark.parametrize(
    ("delivered", "wrong"),
    [
        ([0, 1], 0),
        ([0, 1, 2], 1),  # 2 was cancelled, and fired
        ([0], 1),  # 1 is lost
        ([0, 1, 1], 1),  # twice
        ([1, 0], 1),  # 0 is not where the answer says
    ],
)
def test_answers_are_compared_with_what_was_delivered(delivered: list[int], wrong: int):
    answers = delay_cancel.Answers()
    answers.note(
        [CancelResult(id=2, state="cancelled"), CancelResult(id=0, state="fired", offset=0)]
    )
    assert answers.wrong(delivered, scheduled=3) == wrong


@pytest.mark.parametrize(
    "second",
    [
        CancelResult(id=2, state="fired", offset=1),
        CancelResult(id=3, state="not_found"),
        CancelResult(id=3, state="replaced"),
    ],
)
def test_an_answer_that_cannot_be_is_wrong(second: CancelResult):
    answers = delay_cancel.Answers()
    answers.note([CancelResult(id=2, state="cancelled"), second])
    assert answers.odd == 1
