"""Turns: everybody gets work, in turn, and nobody more than its credit."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onward.delivery.turns import GRANT_MAX, Turns

SETTINGS = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def hand_out(turns: Turns[str], ready: int) -> Counter[str]:
    """Grant until nothing is ready or nobody wants more."""
    got: Counter[str] = Counter()
    while (grant := turns.next_grant(ready)) is not None:
        member, limit = grant
        count = min(limit, ready)
        turns.used(member, count)
        got[member] += count
        ready -= count
    return got


def test_a_hundred_members_on_a_thousand_messages_all_get_work() -> None:
    turns = Turns[str]()
    for number in range(100):
        turns.add(f"member-{number}", credit=1_000)
    got = hand_out(turns, 1_000)
    assert len(got) == 100
    assert max(got.values()) <= 2 * 10
    assert sum(got.values()) == 1_000


def test_a_member_that_is_alone_gets_all_of_its_credit() -> None:
    turns = Turns[str]()
    turns.add("ann", credit=700)
    turns.add("bob")
    assert turns.next_grant(5_000) == ("ann", 700)


def test_a_grant_is_never_larger_than_the_limit() -> None:
    turns = Turns[str]()
    turns.add("ann", credit=10 * GRANT_MAX)
    assert turns.next_grant(10 * GRANT_MAX) == ("ann", GRANT_MAX)
    turns.add("bob", credit=10 * GRANT_MAX)
    assert turns.next_grant(10 * GRANT_MAX) == ("ann", GRANT_MAX)


def test_members_take_turns_in_the_order_they_came() -> None:
    turns = Turns[str]()
    for name in ("ann", "bob", "eve"):
        turns.add(name, credit=9)
    named = []
    while (grant := turns.next_grant(1)) is not None and len(named) < 7:
        named.append(grant[0])
    assert named == ["ann", "bob", "eve", "ann", "bob", "eve", "ann"]


def test_who_has_no_credit_gets_nothing_until_it_has_some() -> None:
    turns = Turns[str]()
    turns.add("ann", credit=2)
    turns.add("bob", credit=5)
    turns.used("ann", 2)
    assert [turns.next_grant(1) for _ in range(2)] == [("bob", 5), ("bob", 5)]
    turns.give("ann", 1)
    assert turns.next_grant(1) == ("bob", 1)
    assert turns.next_grant(1) == ("ann", 1)


def test_credit_that_is_taken_back_ends_at_zero() -> None:
    turns = Turns[str]()
    turns.add("ann", credit=5)
    turns.give("ann", -3)
    assert turns.credit_of("ann") == 2
    turns.give("ann", -3)
    assert turns.credit_of("ann") == 0
    assert turns.next_grant(10) is None


def test_more_credit_does_not_change_the_place_in_line() -> None:
    turns = Turns[str]()
    turns.add("ann", credit=1)
    turns.add("bob", credit=1)
    turns.give("ann", 10)
    assert turns.next_grant(1) == ("ann", 1)
    turns.set_credit("bob", 3)
    assert turns.next_grant(1) == ("bob", 1)


def test_a_member_that_left_gets_nothing_and_may_be_told_of_in_vain() -> None:
    turns = Turns[str]()
    turns.add("ann", credit=1)
    turns.remove("ann")
    turns.remove("ann")
    turns.give("ann", 5)
    turns.used("ann", 5)
    assert turns.next_grant(1) is None
    assert "ann" not in turns
    assert turns.credit_of("ann") == 0
    assert turns.waiting_count == len(turns) == 0


def test_nothing_is_granted_when_nothing_is_ready() -> None:
    turns = Turns[str]()
    turns.add("ann", credit=1)
    assert turns.next_grant(0) is None


def test_a_member_joins_only_once() -> None:
    turns = Turns[str]()
    turns.add("ann")
    with pytest.raises(AssertionError, match="ann"):
        turns.add("ann")


@SETTINGS
@given(given_credits=st.lists(st.integers(0, 50), max_size=20), ready=st.integers(0, 600))
def test_all_that_is_ready_is_handed_out_while_there_is_credit(
    given_credits: list[int], ready: int
) -> None:
    turns = Turns[str]()
    for number, credit in enumerate(given_credits):
        turns.add(str(number), credit=credit)
    got = hand_out(turns, ready)
    assert sum(got.values()) == min(ready, sum(given_credits))
    assert all(got[str(number)] <= credit for number, credit in enumerate(given_credits))
    assert set(turns) == {str(number) for number in range(len(given_credits))}


@SETTINGS
@given(members=st.integers(2, 30), ready=st.integers(1, 300))
def test_members_with_enough_credit_all_get_work_and_none_gets_far_more(
    members: int, ready: int
) -> None:
    turns = Turns[str]()
    for number in range(members):
        turns.add(str(number), credit=1_000)
    got = hand_out(turns, ready)
    assert len(got) == min(members, ready)
    assert max(got.values()) <= 2 * -(-ready // members)
