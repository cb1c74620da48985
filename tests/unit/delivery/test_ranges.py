"""Ranges are a set of offsets: whatever a plain set says, they say."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onward.delivery.ranges import (
    Range,
    Ranges,
    count_of,
    merged,
    offsets_of,
    ranges_of,
    without,
)

SETTINGS = settings(
    max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
END = 60
RANGE = st.tuples(st.integers(0, END), st.integers(0, END))
STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "remove", "discard", "take", "update", "clear"]), RANGE),
    max_size=40,
)


def as_set(ranges: list[Range]) -> set[int]:
    return {offset for start, end in ranges for offset in range(start, end)}


def assert_same(ranges: Ranges, plain: set[int]) -> None:
    assert list(ranges) == ranges_of(plain)
    assert (ranges.count, len(ranges), bool(ranges)) == (
        len(plain), len(ranges_of(plain)), bool(plain),
    )  # fmt: skip
    assert ranges.first == min(plain, default=None)
    assert ranges.end == (max(plain) + 1 if plain else None)
    assert [offset in ranges for offset in range(-1, END + 1)] == [
        offset in plain for offset in range(-1, END + 1)
    ]


@SETTINGS
@given(STEPS)
def test_ranges_hold_what_a_plain_set_holds(steps: list[tuple[str, Range]]):
    ranges, plain = Ranges(), set[int]()
    for step, (start, end) in steps:
        match step:
            case "add":
                ranges.add(start, end)
                plain |= set(range(start, end))
            case "discard":
                assert ranges.discard(start) == (start in plain)
                plain.discard(start)
            case "remove":
                ranges.remove(start, end)
                plain -= set(range(start, end))
            case "take":
                lowest = sorted(plain)[:start]
                assert ranges.take(start) == ranges_of(lowest)
                plain -= set(lowest)
            case "update":
                many = [(at, at + 1) for at in range(start, end, 2)]
                ranges.update(many)
                plain |= as_set(many)
            case "clear":
                if start < 5:
                    ranges.clear()
                    plain.clear()
        assert_same(ranges, plain)


@SETTINGS
@given(st.lists(RANGE, max_size=15), RANGE)
def test_questions_about_a_stretch_are_answered_as_a_plain_set_would(
    given_ranges: list[Range], stretch: Range
):
    ranges, plain = Ranges(given_ranges), as_set(given_ranges)
    asked = set(range(*stretch))
    assert ranges.overlap(*stretch) == ranges_of(plain & asked)
    assert ranges.gaps(*stretch) == ranges_of(asked - plain)
    assert ranges.covers(*stretch) == (asked <= plain)
    assert without([stretch], ranges) == ranges_of(asked - plain)


@SETTINGS
@given(st.lists(RANGE, max_size=15), st.lists(st.integers(0, END), max_size=40))
def test_ranges_and_offsets_turn_into_each_other(given_ranges: list[Range], offsets: list[int]):
    assert merged(given_ranges) == ranges_of(as_set(given_ranges))
    assert list(offsets_of(merged(given_ranges))) == sorted(as_set(given_ranges))
    assert count_of(merged(given_ranges)) == len(as_set(given_ranges))
    assert list(offsets_of(ranges_of(offsets))) == sorted(set(offsets))


def test_many_ranges_at_once_are_the_same_as_one_by_one():
    many = [(at, at + 2) for at in range(0, 3_000, 3)]
    one_by_one, at_once = Ranges([(1_000, 1_500)]), Ranges([(1_000, 1_500)])
    at_once.update(many)
    for start, end in many:
        one_by_one.add(start, end)
    assert at_once == one_by_one
    assert at_once.count == one_by_one.count


def test_a_copy_lives_its_own_life():
    ranges = Ranges([(0, 5)])
    other = ranges.copy()
    assert other == ranges
    other.remove(0, 1)
    assert (list(ranges), list(other)) == ([(0, 5)], [(1, 5)])
    assert ranges != other
    assert ranges != [(0, 5)]


def test_a_range_of_a_quadrillion_offsets_costs_as_little_as_one():
    huge = 10**15
    ranges = Ranges([(0, huge)])
    ranges.remove(7, 8)
    assert ranges.take(huge // 2) == [(0, 7), (8, huge // 2 + 1)]
    assert (ranges.count, len(ranges)) == (huge // 2 - 1, 1)
    assert ranges.overlap(0, huge) == [(huge // 2 + 1, huge)]
    assert ranges.gaps(0, huge) == [(0, huge // 2 + 1)]


def test_empty_and_reversed_ranges_hold_nothing():
    ranges = Ranges([(5, 5), (9, 3)])
    ranges.add(7, 7)
    ranges.remove(9, 1)
    assert (list(ranges), ranges.count, ranges.first, ranges.end) == ([], 0, None, None)
    assert (ranges.gaps(3, 3), ranges.overlap(3, 1), ranges.covers(4, 4)) == ([], [], True)
    assert merged([(3, 3), (5, 2)]) == []
