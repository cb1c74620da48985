"""Filters of Spark: what they leave to read, and what Spark has to look at again."""

from datetime import UTC, datetime

import pytest
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)

from onward.pipeline.filters import OFFSET_MAX, Narrowing, narrow
from onward.pipeline.options import source_options
from onward.pipeline.schema import message_schema
from onward.pipeline.source import BatchReader

OFFSET, TOPIC, TIME = ("offset",), ("topic",), ("published_at",)
MOMENT = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("one", "first", "end"),
    [
        (EqualTo(OFFSET, 7), 7, 8),
        (EqualNullSafe(OFFSET, 7), 7, 8),
        (GreaterThan(OFFSET, 7), 8, OFFSET_MAX),
        (GreaterThanOrEqual(OFFSET, 7), 7, OFFSET_MAX),
        (LessThan(OFFSET, 7), 0, 7),
        (LessThanOrEqual(OFFSET, 7), 0, 8),
    ],
)
def test_a_filter_on_offsets_is_exact(one: Filter, first: int, end: int):
    assert narrow([one]) == (Narrowing(first=first, end=end), [])


def test_a_list_of_offsets_narrows_to_what_lies_between_and_is_looked_at_again():
    one = In(OFFSET, (9, 3, 5))
    assert narrow([one]) == (Narrowing(first=3, end=10), [one])


def test_topics_are_what_all_filters_allow():
    filters = [In(TOPIC, ("a", "b", None)), EqualTo(TOPIC, "b"), IsNotNull(TOPIC)]
    assert narrow(filters) == (Narrowing(topics=frozenset({"b"})), [])
    assert narrow([EqualTo(TOPIC, "a"), EqualTo(TOPIC, "b")])[0].topics == frozenset()


def test_times_narrow_a_little_less_than_asked_and_are_looked_at_again():
    moment = datetime(2026, 1, 1, 12, 0, 0, 1500, tzinfo=UTC)
    at_ms = int(moment.timestamp() * 1000)
    filters: list[Filter] = [GreaterThan(TIME, moment), LessThanOrEqual(TIME, moment)]
    found, rest = narrow(filters)
    assert rest == filters
    assert found.from_ms is not None
    assert found.to_ms is not None
    assert at_ms - 2 <= found.from_ms < at_ms < found.to_ms <= at_ms + 3


@pytest.mark.parametrize(
    "one",
    [
        EqualTo(("key",), "a"),
        IsNotNull(("key",)),
        IsNull(TOPIC),
        Not(EqualTo(TOPIC, "a")),
        StringStartsWith(TOPIC, "a"),
        EqualTo(("headers", "topic"), "a"),
        EqualTo(OFFSET, None),
        EqualTo(OFFSET, True),
    ],
)
def test_what_says_nothing_of_places_is_left_to_spark(one: Filter):
    assert narrow([one]) == (Narrowing(), [one])


@pytest.mark.parametrize(
    "one",
    [GreaterThan(OFFSET, 7), EqualTo(TOPIC, "a"), IsNotNull(TOPIC), EqualTo(TIME, MOMENT)],
)
def test_a_column_of_bodies_says_nothing_of_places_whatever_its_name_is(one: Filter):
    foreign = {"offset", "topic", "published_at"}
    assert narrow([one], foreign=foreign) == (Narrowing(), [one])
    found, rest = narrow([one, EqualTo(("key",), "k")], foreign={"key"})
    assert found == narrow([one])[0]
    assert rest[-1] == EqualTo(("key",), "k")


def test_a_reader_does_not_take_fields_of_bodies_for_columns_of_messages():
    options = source_options(
        {"topic": "orders", "columns": "topic,key", "bodySchema": "offset BIGINT, total DOUBLE"}
    )
    schema = message_schema(["topic", "key"]).add("offset", "long").add("total", "double")
    reader = BatchReader(options, schema)
    wanted = [GreaterThan(OFFSET, 1_000_000), EqualTo(TOPIC, "orders")]
    assert reader.pushFilters(wanted) == wanted[:1]
    assert reader._push.narrowing == Narrowing(topics=frozenset({"orders"}))
