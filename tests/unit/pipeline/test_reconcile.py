"""What a reconciliation could not look at: found, dated by its neighbours, counted and said."""

import pytest

from onward.pipeline.jobs.reconcile import Pair, concerned
from onward.pipeline.lake_state import Gap, LakeCommit, LakeFile, LakeState, fold
from onward.pipeline.report import Gone, GroupLine, Report, Verdicts
from onward.pipeline.unchecked import GONE_SAID_MAX, gone_of, say_gone
from onward.pipeline.window import Window
from onward.protocol.operations.topics import TopicDescription

ALL = Window(None, 10_000)
LATE = Window(5_000, 10_000)


def topic(first: int, *, created_at_ms: int = 0) -> TopicDescription:
    return TopicDescription(
        topic="orders", number=1, state="active", first_offset=first, next_offset=100,
        created_at_ms=created_at_ms,
    )  # fmt: skip


def file(first: int, end: int, *, from_ms: int, to_ms: int) -> LakeFile:
    return LakeFile(
        path=f"{first}", topic="orders", first=first, end=end, bytes=9,
        first_published_at_ms=from_ms, last_published_at_ms=to_ms,
    )  # fmt: skip


def gone(
    log: TopicDescription, window: Window, *, state: LakeState | None = None, next_ms: int | None
) -> list[tuple[int, int]]:
    found = gone_of(log, state or LakeState(), window, time_of=lambda _offset: next_ms)
    return [(one.first, one.end) for one in found]


def test_what_retention_took_is_gone_and_what_is_in_the_lake_is_not():
    assert gone(topic(0), ALL, next_ms=0) == []
    assert gone(topic(65), ALL, next_ms=0) == [(0, 65)]
    archived = fold([LakeCommit(number=1, add=(file(0, 50, from_ms=0, to_ms=9),))])
    assert gone(topic(65), ALL, state=archived, next_ms=0) == [(50, 65)]
    assert gone(topic(50), ALL, state=archived, next_ms=0) == []


@pytest.mark.parametrize(
    ("next_ms", "found"),
    [(4_999, []), (5_000, [(0, 65)]), (None, [(0, 65)])],
    ids=["the next is before the window", "the next is in the window", "nothing came after it"],
)
def test_what_is_gone_counts_unless_its_neighbour_proves_that_it_is_older(
    next_ms: int | None, found: list[tuple[int, int]]
):
    assert gone(topic(65), LATE, next_ms=next_ms) == found


def test_what_is_gone_from_the_lake_is_dated_by_the_files_beside_it():
    files = (file(0, 10, from_ms=0, to_ms=3_000), file(20, 30, from_ms=4_000, to_ms=4_500))
    state = fold([LakeCommit(number=1, add=files, gaps=(Gap("orders", 10, 20),))])
    assert gone(topic(30), ALL, state=state, next_ms=6_000) == [(10, 20)]
    assert gone(topic(30), LATE, state=state, next_ms=6_000) == [], "the file after it is older"
    assert gone(topic(30), Window(None, 3_000), state=state, next_ms=6_000) == []
    assert gone(topic(30), Window(None, 3_001), state=state, next_ms=6_000) == [(10, 20)]


def test_a_gap_at_the_end_of_the_lake_is_dated_by_the_log():
    state = fold([LakeCommit(number=1, gaps=(Gap("orders", 0, 10),))])
    asked: list[int] = []

    def time_of(offset: int) -> int:
        asked.append(offset)
        return 4_999

    assert gone_of(topic(5), state, LATE, time_of=time_of) == []
    assert asked == [10]


def test_nothing_is_gone_from_a_window_before_the_topic_was_created():
    assert gone(topic(65, created_at_ms=10_000), ALL, next_ms=None) == []


def test_what_is_older_than_every_group_is_nobodys_business():
    lost = [Gone("orders", 0, 65), Gone("alone", 0, 9)]
    pairs = [Pair("orders", "a", 99), Pair("orders", "b", 99)]
    starts = {("orders", "a"): 70, ("orders", "b"): 40}
    assert concerned(lost, pairs, starts=starts, seen={}) == [Gone("orders", 40, 65)]
    assert concerned(lost, pairs[:1], starts=starts, seen={}) == []
    # Of a group whose start nobody knows all of it may be the business.
    assert concerned(lost, pairs, starts={("orders", "a"): 70}, seen={}) == lost[:1]


def test_what_was_read_before_retention_took_it_is_not_unchecked():
    lost, pairs = [Gone("orders", 0, 65)], [Pair("orders", "a", 99)]
    assert concerned(lost, pairs, starts={}, seen={"orders": (0, 100)}) == []
    assert concerned(lost, pairs, starts={}, seen={"orders": (50, 100)}) == [Gone("orders", 0, 50)]
    assert concerned(lost, pairs, starts={}, seen={"orders": (65, 100)}) == lost


def test_what_a_group_had_before_the_window_is_older_than_it():
    lost, pairs = [Gone("orders", 0, 65)], [Pair("orders", "a", 99)]
    found = [
        concerned(lost, pairs, starts={}, seen={}, older={"orders": end}) for end in (0, 40, 65)
    ]
    assert found == [lost, [Gone("orders", 40, 65)], []]


def test_every_stretch_that_is_gone_is_named_up_to_a_limit():
    assert say_gone([]) == []
    many = [Gone("orders", at * 10, at * 10 + 5) for at in range(GONE_SAID_MAX + 3)]
    said = say_gone(many)
    assert len(said) == GONE_SAID_MAX + 1
    assert said[0].startswith("5 messages of topic 'orders' are unchecked (offsets 0 to 4): ")
    assert said[-1] == "15 more messages are unchecked, in 3 more stretches"


def test_a_report_is_settled_only_when_everything_was_looked_at():
    line = GroupLine("orders", "billing", Verdicts(acked=35))
    report = Report("localhost:7700", None, 9, 9, 35, 60_000, lines=[line])
    assert report.is_settled
    lost = report._replace(gone=[Gone("orders", 0, 65)])
    assert (lost.unchecked, lost.is_settled) == (65, False)
