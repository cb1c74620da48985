"""Looking for messages: ids, ends, and what has to be read for scattered offsets."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from onward.client.finding import End, parse_id, read_end, stretches
from onward.client.groups import as_names, as_ranges, make_wish, start_of
from onward.delivery.record import StartAt
from onward.errors import InvalidName, InvalidRequest
from onward.message.relative import Relative


def test_an_id_is_a_topic_and_an_offset():
    assert parse_id("orders.eu/12") == ("orders.eu", 12)
    assert parse_id("@trace/0") == ("@trace", 0)


@pytest.mark.parametrize(
    "text",
    ["orders", "orders/", "orders/x", "orders/-1", "/7x", "orders/\u0661", "orders/" + "9" * 30],
)
def test_what_is_no_id_is_refused_with_how_to_write_one(text: str):
    with pytest.raises(InvalidRequest, match="topic/offset"):
        parse_id(text)


def test_an_id_of_an_impossible_topic_is_refused():
    with pytest.raises(InvalidName):
        parse_id("no topic/7")


@pytest.mark.parametrize(
    ("end", "wanted"),
    [
        (None, End()),
        (7, End(offset=7)),
        ("10s", End(time_ms=Relative(-10_000))),
        (timedelta(seconds=10), End(time_ms=Relative(-10_000))),
        (datetime(1970, 1, 1, 0, 0, 5, tzinfo=UTC), End(time_ms=5_000)),
    ],
)
def test_a_search_ends_where_it_was_said(end: object, wanted: End):
    assert read_end(end) == wanted  # type: ignore[arg-type]


def test_what_is_no_end_is_refused():
    with pytest.raises(InvalidRequest):
        read_end(True)


def test_near_offsets_are_read_together_and_far_ones_apart():
    assert stretches([(0, 1), (1_001, 1_002), (5_000, 6_000)]) == [
        [(0, 1), (1_001, 1_002)],
        [(5_000, 6_000)],
    ]
    assert stretches([]) == []


@pytest.mark.parametrize("offsets", [[], -1, [3, -1], ["7"], [True], range(5, 5), [1.5]])
def test_what_are_no_offsets_is_refused(offsets: object):
    with pytest.raises(InvalidRequest):
        as_ranges(offsets)  # type: ignore[arg-type]


def test_offsets_become_ranges_however_they_are_given():
    assert as_ranges(7) == [(7, 8)]
    assert as_ranges(range(10, 0, -2)) == [(n, n + 1) for n in range(2, 11, 2)]
    assert as_ranges(iter([2, 1, 9])) == [(1, 3), (9, 10)]


def test_a_group_has_at_least_one_topic():
    with pytest.raises(InvalidRequest):
        as_names([])


@pytest.mark.parametrize("topics", [5, None, [5], [["orders"]], b"orders"])
def test_topics_are_named_by_texts(topics: Any):
    with pytest.raises(InvalidRequest, match="topics is a text or several"):
        as_names(topics)


def test_a_group_starts_where_it_was_said():
    assert start_of("latest") == "latest"
    assert start_of(7) == StartAt(offset=7)
    assert start_of("10s") == StartAt(time_ms=Relative(-10_000))


def test_a_wish_has_only_what_was_asked_for():
    wish = make_wish(retry="fixed:10s:5", tags="a,b", tenants={"acme": 2})
    assert wish.retry is not None
    assert wish.retry.limit == 5
    assert wish.filter is not None
    assert wish.filter.tags_any == ("a", "b")
    assert wish.tenants == {"acme": 2}
    assert (wish.mode, wish.start, wish.lease_ms, wish.priorities) == (None,) * 4


@pytest.mark.parametrize("asked", [{"retry": "sometimes"}, {"lease": "long"}, {"start": -1}])
def test_a_wish_of_nonsense_is_refused_before_it_is_sent(asked: dict[str, object]):
    with pytest.raises(InvalidRequest):
        make_wish(**asked)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "choices"),
    [
        ({"mode": "sharde"}, "mode is shared, exclusive, ordered or broadcast, not 'sharde'"),
        ({"mode": ["shared"]}, "mode is shared, exclusive, ordered or broadcast"),
        ({"headers": {"sig": b"x"}}, "a filter compares headers as text: 'sig' has bytes"),
        ({"headers": {b"sig": "x"}}, "a filter compares headers as text: b'sig' has bytes"),
        ({"headers": "abc"}, "headers is a dict of texts by name, not 'abc'"),
        ({"tenants": ["a"]}, "tenants is a dict of weights by name, not .'a'"),
        ({"tags": 5}, "tags is a text or several, not 5"),
        ({"all_tags": [5]}, "all_tags is a text or several: 5 is none"),
        ({"retry": 5}, "retry is a RetryPolicy or a text, not 5: write ladder, none, fixed:10s"),
    ],
)
def test_a_wish_of_a_wrong_kind_is_told_the_choices(asked: dict[str, object], choices: str):
    with pytest.raises(InvalidRequest, match=choices):
        make_wish(**asked)  # type: ignore[arg-type]
