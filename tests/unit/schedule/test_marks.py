import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onward.errors import Corruption
from onward.schedule.marks import BLOCK_NUMBERS, NUMBER_MAX, Marks

SETTINGS = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

numbers = st.integers(0, 3 * BLOCK_NUMBERS) | st.integers(0, 40) | st.just(NUMBER_MAX)
ranges = st.tuples(st.integers(0, 3 * BLOCK_NUMBERS), st.integers(0, 2 * BLOCK_NUMBERS))
steps = st.one_of(
    st.tuples(st.just("add"), numbers),
    st.tuples(st.just("many"), st.lists(numbers, max_size=20)),
    st.tuples(st.just("range"), ranges.map(lambda one: (one[0], one[0] + one[1]))),
    st.tuples(st.just("drop"), st.integers(0, 3 * BLOCK_NUMBERS)),
    st.tuples(st.just("saved"), st.none()),
)


@settings(SETTINGS, max_examples=60)
@given(st.lists(steps, max_size=8), st.lists(numbers, max_size=20))
def test_marks_are_a_set_of_numbers(many: list, asked: list[int]) -> None:
    marks, model = Marks(), set()
    for what, value in many:
        if what == "add":
            assert marks.add(value) == (value not in model)
            model.add(value)
        elif what == "many":
            assert marks.add_many(value) == len(set(value) - model)
            model |= set(value)
        elif what == "range":
            assert marks.add_range(*value) == len(set(range(*value)) - model)
            model |= set(range(*value))
        elif what == "drop":
            assert marks.drop_below(value) == sum(number < value for number in model)
            model = {number for number in model if number >= value}
        else:
            marks = Marks.load(marks.save())
        assert marks.count == len(marks) == len(model)
    assert list(marks) == sorted(model)
    assert all((number in marks) == (number in model) for number in asked)
    assert Marks.load(marks.save()) == marks


def test_a_block_in_which_everything_is_marked_costs_nothing() -> None:
    marks = Marks()
    marks.add_range(0, 1000 * BLOCK_NUMBERS)
    assert len(marks.save()) < 6000
    assert 1000 * BLOCK_NUMBERS - 1 in marks
    assert 1000 * BLOCK_NUMBERS not in marks
    assert not marks.add(5)
    assert marks.add_range(0, 100) == 0


def test_a_block_that_becomes_full_one_by_one_is_like_any_full_block() -> None:
    one, other = Marks(), Marks()
    assert one.add_many(range(BLOCK_NUMBERS)) == BLOCK_NUMBERS
    other.add_range(0, BLOCK_NUMBERS)
    assert one == other
    assert one.save() == other.save()


def test_few_marks_are_saved_in_few_bytes() -> None:
    marks = Marks()
    marks.add_many(range(0, 100 * BLOCK_NUMBERS, 1000))
    assert len(marks.save()) < 3 * marks.count


@pytest.mark.parametrize("count", [4094, 4095, 4096, 4097, 65_535])
def test_a_block_is_saved_whole_however_many_marks_it_has(count: int) -> None:
    marks = Marks()
    marks.add_many(range(count))
    assert Marks.load(marks.save()) == marks


def test_what_was_dropped_can_be_marked_again() -> None:
    marks = Marks()
    marks.add_many([5, 6, BLOCK_NUMBERS])
    assert marks.drop_below(6) == 1
    assert list(marks) == [6, BLOCK_NUMBERS]
    assert marks.drop_below(NUMBER_MAX) == 2
    assert marks == Marks()
    assert marks.add(5)


def test_marks_are_equal_only_to_marks() -> None:
    assert Marks() != set()


@pytest.mark.parametrize(
    "saved",
    [
        b"",
        b"\xc1",
        b"nonsense",
        msgspec.msgpack.encode({"a": b""}),
        msgspec.msgpack.encode({0: "text"}),
        msgspec.msgpack.encode({0: b"odd"}),
        msgspec.msgpack.encode({-1: b""}),
        msgspec.msgpack.encode({2**62: b""}),
        msgspec.msgpack.encode([1, 2]),
    ],
)
def test_bytes_that_were_never_saved_are_corruption(saved: bytes) -> None:
    with pytest.raises(Corruption, match="saved marks cannot be read"):
        Marks.load(saved)
