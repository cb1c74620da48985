"""Filters: columns of tags and headers in, one answer for each message out."""

from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onward.delivery.filter import Filter
from onward.errors import InvalidRequest

SETTINGS = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
TAGS = st.lists(st.sampled_from("abcd"), max_size=3, unique=True)
HEADERS = st.dictionaries(st.sampled_from("xyz"), st.sampled_from(["1", "2", b"1", b"\xff"]))


def wants(wish: Filter, tags: list[str] | None, headers: dict[str, str | bytes] | None) -> bool:
    """Look at one message, as one would explain it."""
    has = set(tags or ())
    if wish.tags_any and not has & set(wish.tags_any):
        return False
    if not set(wish.tags_all) <= has:
        return False
    for name, text in wish.headers.items():
        if (headers or {}).get(name) not in (text, text.encode()):
            return False
    return True


@SETTINGS
@given(
    TAGS, TAGS, st.dictionaries(st.sampled_from("xyz"), st.sampled_from("12"), max_size=2),
    st.lists(st.tuples(st.none() | TAGS, st.none() | HEADERS), max_size=8),
)  # fmt: skip
def test_a_column_is_answered_as_each_message_by_itself(
    tags_any: list[str], tags_all: list[str], equal: dict[str, str], messages: list
):
    wish = Filter(tuple(tags_any), tuple(tags_all), equal).check()
    tags = [",".join(tags) if tags else None for tags, _ in messages]
    headers = [headers for _, headers in messages]
    expected = [wants(wish, tags, headers) for tags, headers in messages]
    assert wish.matches(tags, headers, count=len(messages)) == expected


def test_an_empty_filter_wants_everything_and_looks_at_nothing():
    wish = Filter()
    assert (bool(wish), wish.needs_tags, wish.needs_headers) == (False, False, False)
    assert wish.matches(None, None, count=3) == [True] * 3


def test_a_filter_by_tag_wants_nothing_of_a_batch_without_tags():
    assert Filter(tags_any=("a",)).matches(None, None, count=2) == [False] * 2
    assert Filter(tags_all=("a",)).matches([None, ""], None, count=2) == [False] * 2


def test_a_filter_by_header_wants_nothing_of_a_batch_without_headers():
    wish = Filter(headers={"x": "1"})
    assert wish.matches(None, None, count=2) == [False] * 2
    assert (wish.needs_tags, wish.needs_headers, bool(wish)) == (False, True, True)


def test_a_tag_is_a_whole_tag_and_not_a_part_of_one():
    assert Filter(tags_any=("pay",)).matches(["paid", "pay,x", "repay"], None, count=3) == [
        False, True, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("nonsense", "named"),
    [
        (Filter(tags_any=tuple(map(str, range(101)))), "100 tags"),
        (Filter(tags_any=("a",) * 60, tags_all=("b",) * 60), "100 tags"),
        (Filter(headers={str(i): "" for i in range(21)}), "20 headers"),
        (Filter(tags_any=("x" * 257,)), "256 characters"),
        (Filter(headers={"x": "y" * 257}), "256 characters"),
        (Filter(headers={"x" * 257: "y"}), "256 characters"),
        (Filter(tags_all=("",)), "at least one"),
        (Filter(tags_all=("a,b",)), "comma"),
        (Filter(tags_any="eu"), "tags_any"),  # type: ignore[arg-type]
        (Filter(headers={"x": 1}), "headers"),  # type: ignore[dict-item]
        (Filter(headers={"x": b"1"}), "headers"),  # type: ignore[dict-item]
        (Filter(headers={"x": UUID(int=1)}), "headers"),  # type: ignore[dict-item]
    ],
)
def test_a_filter_that_is_too_big_or_nonsense_is_refused_by_name(nonsense: Filter, named: str):
    with pytest.raises(InvalidRequest, match=f"filter: .*{named}"):
        nonsense.check()
