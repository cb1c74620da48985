"""What is in a lake is a fold of its commits, and the fold refuses what cannot be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.errors import Conflict
from onward.pipeline.lake_state import (
    Gap,
    LakeCommit,
    LakeFile,
    LakeState,
    apply,
    check_same,
    fold,
    origin_of,
)
from onward.protocol.operations.topics import TopicDescription


def file(first: int, end: int, *, topic: str = "orders") -> LakeFile:
    path = f"topic={topic}/date=2026-11-16/{first:020}-{end:020}.parquet"
    return LakeFile(path=path, topic=topic, first=first, end=end, bytes=100 * (end - first))


def commit(state: LakeState, **change: object) -> LakeState:
    return apply(state, LakeCommit(number=state.number + 1, at_ms=7, **change))  # type: ignore[arg-type]


def test_files_that_lie_side_by_side_are_one_history():
    state = fold(
        [
            LakeCommit(number=1, add=(file(0, 10), file(0, 3, topic="refunds"))),
            LakeCommit(number=2, add=(file(15, 20), file(10, 15))),
        ]
    )
    assert [one.first for one in state.files["orders"]] == [0, 10, 15]
    assert (state.end_of("orders"), state.end_of("refunds"), state.end_of("none")) == (20, 3, 0)
    assert [one.first for one in state.files_between("orders", 9, 11)] == [0, 10]
    assert state.files_between("orders", 20, 99) == []


def test_messages_that_are_there_already_do_not_come_in_again():
    state = commit(LakeState(), add=(file(0, 10),))
    for again in (file(0, 10), file(5, 15), file(9, 11), file(0, 20)):
        with pytest.raises(Conflict, match=r"has offset \d+ of topic 'orders' already"):
            commit(state, add=(again,))


def test_a_hole_is_refused_unless_it_is_said_to_be_a_gap():
    with pytest.raises(Conflict, match="has no offset 0 of topic 'orders'"):
        commit(LakeState(), add=(file(5, 10),))
    state = commit(LakeState(), add=(file(5, 10),), gaps=(Gap("orders", 0, 5),))
    with pytest.raises(Conflict, match="has no offset 10"):
        commit(state, add=(file(12, 15),))
    state = commit(state, add=(file(12, 15),), gaps=(Gap("orders", 10, 12),))
    assert state.gaps_between("orders", 0, 99) == [Gap("orders", 0, 5), Gap("orders", 10, 12)]
    assert state.gaps_between("orders", 5, 10) == []
    assert state.first_of("orders") == 5


def test_a_part_without_messages_is_refused():
    with pytest.raises(Conflict, match="at least one offset"):
        commit(LakeState(), add=(file(0, 0),))


def test_larger_files_take_the_place_of_small_ones():
    small = [file(0, 10), file(10, 20), file(20, 30)]
    state = commit(LakeState(), add=tuple(small))
    state = commit(state, add=(file(0, 20),), remove=(small[0].path, small[1].path))
    assert [(one.first, one.end) for one in state.files["orders"]] == [(0, 20), (20, 30)]
    assert state.removed == {small[0].path: 7, small[1].path: 7}
    with pytest.raises(Conflict, match="not in the lake any more"):
        commit(state, add=(file(0, 30),), remove=(small[0].path, small[2].path))
    assert commit(state, forget=(small[0].path,)).removed == {small[1].path: 7}


def test_files_are_not_removed_without_something_in_their_place():
    last, first = file(10, 20), file(0, 10)
    state = commit(LakeState(), add=(first, last))
    for gone in (first, last):
        with pytest.raises(Conflict, match="has no offset"):
            commit(state, remove=(gone.path,))


def test_commits_come_one_after_the_other():
    with pytest.raises(Conflict, match="does not follow"):
        apply(LakeState(), LakeCommit(number=2))


def test_a_topic_that_was_created_again_is_another_one():
    first = TopicDescription(topic="orders", number=1, state="active", next_offset=10)
    again = TopicDescription(topic="orders", number=2, state="active", next_offset=99)
    state = commit(LakeState(), add=(file(0, 10),), origins={"orders": origin_of(first)})
    check_same(first, state)
    with pytest.raises(Conflict, match="deleted and created again"):
        check_same(again, state)
    with pytest.raises(Conflict, match="not the one that the lake holds"):
        commit(state, add=(file(10, 20),), origins={"orders": origin_of(again)})
    shorter = TopicDescription(topic="orders", number=1, state="active", next_offset=9)
    with pytest.raises(Conflict, match="not the one that the lake holds to offset 10"):
        check_same(shorter, state)


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=20))
def test_files_and_gaps_always_cover_all_offsets_once(steps: list[tuple[int, bool]]):
    state = LakeState()
    for size, is_gap in steps:
        end = state.end_of("orders")
        more = {"gaps": (Gap("orders", end, end + size),)} if is_gap else {}
        state = commit(state, add=() if is_gap else (file(end, end + size),), **more)
    spans = [(one.first, one.end) for one in state.files.get("orders", ())]
    spans += [(gap.first, gap.end) for gap in state.gaps.get("orders", ())]
    covered = [offset for first, end in sorted(spans) for offset in range(first, end)]
    assert covered == list(range(state.end_of("orders")))
