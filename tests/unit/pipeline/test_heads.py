"""Rows without messages: the same as with them, for the columns that an entry knows."""

import random

import pyarrow as pa
import pytest

from onward.errors import OffsetOutOfRange
from onward.pipeline import heads
from onward.pipeline.columns import record_batches
from onward.pipeline.heads import head_batch, is_enough, read_heads
from onward.pipeline.place import Place, open_client, read_range
from onward.pipeline.schema import arrow_schema, message_schema
from onward.protocol.operations.pipeline import TopicEntry

SCHEMA = arrow_schema(message_schema(["published_at", "topic", "offset", "event_id"]))


def test_only_what_an_entry_knows_is_read_without_messages():
    assert is_enough(SCHEMA)
    assert not is_enough(arrow_schema(message_schema(["offset", "producer"])))
    assert not is_enough(pa.schema([]))


@pytest.mark.parametrize("seed", range(6))
def test_rows_are_the_same_as_those_of_the_messages(
    seed: int, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(heads, "ROWS_MAX", 7)
    chance = random.Random(seed)
    place = Place(f"file:{tmp_path}")
    with open_client(place) as mq:
        for _ in range(12):
            mq.publish_many("orders", [b"x"] * chance.choice([1, 1, 3, 20]))
        end = mq.topic("orders").next_offset
    first = chance.randrange(end)
    stop = chance.randrange(first + 1, end + 1)
    found = list(read_heads(place, "orders", first, stop, SCHEMA))
    wanted = record_batches(read_range(place, "orders", first, stop), SCHEMA, first=first, end=stop)
    assert pa.Table.from_batches(found) == pa.Table.from_batches(list(wanted))
    assert all(rows.num_rows <= 7 for rows in found)


def test_a_hole_is_no_row():
    page = [TopicEntry(0, 5, 1, 0, 9), TopicEntry(7, 5, 2, 0, 9)]
    with pytest.raises(OffsetOutOfRange, match="has no message 5"):
        heads._check_dense("orders", page, 0)
    with pytest.raises(OffsetOutOfRange, match="has no message 3"):
        heads._check_dense("orders", [], 3)
    heads._check_dense("orders", page[:1], 2)


def test_a_part_of_an_entry_begins_where_it_is_asked_for():
    entry = TopicEntry(100, 50, 7, 1_000, 9)
    rows = head_batch("orders", [(3, entry._replace(base_offset=120))], SCHEMA)
    assert rows.column("offset").to_pylist() == [120, 121, 122]
    assert rows.column("event_id").to_pylist() == [7] * 3
