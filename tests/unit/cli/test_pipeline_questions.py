"""What the jobs that only look say to people: minutes, verdicts, and where to ask faster."""

import pytest

from onward.cli.pipeline_questions import _to_the_minute, _verdict, trace
from onward.pipeline.jobs.reconcile import Reconciled


def reconciled(*, due: int, settled: int, unchecked: int) -> Reconciled:
    return Reconciled(
        is_settled=due == settled and not unchecked, published=due, due=due, settled=settled,
        missing=due - settled, retrying=0, dead=0, slow=0, repeated=0, unchecked=unchecked,
    )  # fmt: skip


def test_a_minute_is_shown_without_what_is_smaller():
    row: dict[str, object] = {"minute": "2026-11-16T10:07:00.000Z", "topic": "orders"}
    assert _to_the_minute(row) == {"minute": "2026-11-16T10:07Z", "topic": "orders"}


@pytest.mark.parametrize(
    ("due", "settled", "unchecked", "said"),
    [
        (10, 10, 0, "all is settled"),
        (10, 9, 0, "not all is settled"),
        (10, 9, 5, "not all is settled"),
        (10, 10, 5, "not proven, not all was checked"),
        (0, 0, 5, "not proven, not all was checked"),
    ],
)
def test_settled_is_said_only_when_all_was_checked(
    due: int, settled: int, unchecked: int, said: str
):
    assert _verdict(reconciled(due=due, settled=settled, unchecked=unchecked)) == said


def test_the_help_of_trace_says_what_answers_faster_for_one_message():
    assert "For one message `onward explain` answers faster" in (trace.help or "")
