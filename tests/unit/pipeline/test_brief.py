"""Errors of ours come without the way they came; others are defects, and keep it."""

from collections.abc import Iterator
from traceback import extract_tb

import pytest

from onward.errors import OnwardError, UnknownTopic
from onward.pipeline.brief import brief


def deeper() -> None:
    try:
        raise KeyError("orders")
    except KeyError:
        raise UnknownTopic("topic 'orders' does not exist")  # noqa: B904 - as it happens


class Reader:
    @brief
    def plan(self, *, is_ours: bool) -> str:
        """Plan."""
        deeper() if is_ours else [].pop()
        return "planned"

    @brief
    def read(self, count: int) -> Iterator[int]:
        yield from range(count)
        deeper()


def frames(error: BaseException) -> set[str]:
    return {frame.name for frame in extract_tb(error.__traceback__)}


def test_an_error_of_ours_leaves_a_method_without_what_is_below():
    with pytest.raises(UnknownTopic, match="topic 'orders' does not exist") as caught:
        Reader().plan(is_ours=True)
    assert not frames(caught.value) & {"plan", "deeper"}
    assert caught.value.__suppress_context__


def test_an_error_of_ours_leaves_a_generator_after_what_it_gave():
    found = Reader().read(3)
    assert [next(found), next(found), next(found)] == [0, 1, 2]
    with pytest.raises(OnwardError) as caught:
        next(found)
    assert not frames(caught.value) & {"read", "deeper"}


def test_a_defect_keeps_its_traceback():
    with pytest.raises(IndexError) as caught:
        Reader().plan(is_ours=False)
    assert "plan" in frames(caught.value)
    assert Reader.plan.__doc__ == "Plan."
