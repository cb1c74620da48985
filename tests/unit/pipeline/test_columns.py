"""Between batches and Arrow: the same messages on both sides, whatever is absent."""

import random
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from onward.client.reader import ReadBatch
from onward.errors import InvalidName, InvalidRequest, ProtocolError
from onward.message.batch import decode_batch, encode_batch, join_columns
from onward.message.columns import Column
from onward.pipeline.columns import encode_messages, record_batch, record_batches
from onward.pipeline.schema import arrow_schema, message_schema

ALL = arrow_schema(message_schema())


def batch_of(encoded: bytes, *, first_offset: int = 0, skip: int = 0, event_id: int = 5):
    return ReadBatch(
        decode_batch(encoded, raw_bytes_max=1 << 20),
        topic="orders",
        first_offset=first_offset,
        event_id=event_id,
        published_at_ms=1_700_000_000_000 + event_id,
        skip=skip,
    )


def full_batch() -> bytes:
    return encode_batch(
        [b"a", b"", b"ccc"],
        producer_id=77,
        keys=["k", None, "ü"],
        headers=[{"h": "text", "b": b"\x00"}, None, {}],
        tags=["x,y", None, "z"],
        trace_ids=[None, "t", None],
        due_at_ms=[1_700_000_000_123, None, None],
        priorities=[1, None, 255],
        tenants=["eu", None, None],
        schedule_ids=[9, None, None],
    )


def test_every_column_of_a_batch_is_a_column_of_arrow():
    rows = record_batch([batch_of(full_batch(), first_offset=10)], ALL).to_pylist()
    assert rows[0] == {
        "topic": "orders",
        "offset": 10,
        "event_id": 5,
        "key": "k",
        "body": b"a",
        "headers": [("h", b"text"), ("b", b"\x00")],
        "tag": "x,y",
        "trace_id": None,
        "published_at": datetime.fromtimestamp(1_700_000_000.005, tz=UTC),
        "due_at": datetime.fromtimestamp(1_700_000_000.123, tz=UTC),
        "producer": 77,
        "priority": 1,
        "tenant": "eu",
        "schedule_id": 9,
    }
    assert [row["key"] for row in rows] == ["k", None, "ü"]
    assert [row["headers"] for row in rows][1:] == [None, []]
    assert [row["priority"] for row in rows] == [1, 0, 255]


def test_batches_with_and_without_columns_stand_together_in_one_record_batch():
    plain = encode_batch([b"p1", b"p2"], producer_id=1)
    rows = record_batch(
        [batch_of(plain), batch_of(full_batch(), first_offset=2), batch_of(plain, first_offset=5)],
        ALL,
    )
    rows.validate(full=True)
    assert rows.column("offset").to_pylist() == list(range(7))
    assert rows.column("body").to_pylist() == [b"p1", b"p2", b"a", b"", b"ccc", b"p1", b"p2"]
    assert rows.column("key").to_pylist() == [None, None, "k", None, "ü", None, None]
    assert rows.column("due_at").null_count == 6


def test_what_the_schedule_fired_has_no_producer():
    fired = encode_batch([b"f"], producer_id=1 << 63, schedule_ids=[4], due_at_ms=[7])
    plain = encode_batch([b"p"], producer_id=3)
    rows = record_batch([batch_of(fired), batch_of(plain, first_offset=1)], ALL)
    assert rows.column("producer").to_pylist() == [None, 3]


@pytest.mark.parametrize("seed", range(20))
def test_a_range_has_exactly_its_messages_wherever_it_begins_and_ends(seed: int):
    chance = random.Random(seed)
    batches, offset = [], 0
    while offset < 200:
        count = chance.choice([1, 1, 2, 7, 40])
        bodies = [b"%d" % number for number in range(offset, offset + count)]
        batches.append((offset, count, encode_batch(bodies)))
        offset += count
    first = chance.randrange(offset)
    end = chance.randrange(first + 1, offset + 1)
    stretches, stretch = [], []
    for base, count, encoded in batches:
        if base + count > first and base < end:
            stretch.append(
                batch_of(
                    encoded,
                    first_offset=base,
                    skip=max(0, first - base) if not stretches and not stretch else 0,
                )
            )
            if chance.random() < 0.3:
                stretches.append(stretch)
                stretch = []
    stretches += [stretch] if stretch else []
    found = list(record_batches(iter(stretches), ALL, first=first, end=end))
    bodies = [body for rows in found for body in rows.column("body").to_pylist()]
    offsets = [number for rows in found for number in rows.column("offset").to_pylist()]
    assert offsets == list(range(first, end))
    assert bodies == [b"%d" % number for number in range(first, end)]


def test_lengths_that_lie_are_refused_and_the_batch_is_named():
    bad = join_columns([(255, (b"\x05\0\0\0\0\0\0\0", b"abc"))], 0, 2, 0, 0, 0)
    good = encode_batch([b"ok"])
    with pytest.raises(ProtocolError, match="offset 1 of topic 'orders'"):
        record_batch([batch_of(good), batch_of(bad, first_offset=1)], ALL)


def test_chosen_columns_come_in_the_order_they_were_asked_for():
    schema = arrow_schema(message_schema(["body", "offset"]))
    rows = record_batch([batch_of(full_batch())], schema)
    assert rows.schema == schema
    assert rows.to_pydict() == {"body": [b"a", b"", b"ccc"], "offset": [0, 1, 2]}


def test_rows_become_the_batch_that_a_client_would_have_made():
    rows = pa.RecordBatch.from_pydict(
        {
            "body": [b"a", b"", b"ccc"],
            "key": ["k", None, "ü"],
            "headers": pa.array(
                [[("h", b"text"), ("b", b"\xff")], None, []], pa.map_(pa.string(), pa.binary())
            ),
            "tag": ["x", None, None],
            "trace_id": pa.nulls(3, pa.string()),
            "priority": pa.array([1, None, 255], pa.int32()),
            "tenant": ["eu", "us", None],
        }
    )
    (piece,) = encode_messages(rows, topic="orders")
    assert (piece.topic, piece.count) == ("orders", 3)
    assert piece.packed == encode_batch(
        [b"a", b"", b"ccc"],
        keys=["k", None, "ü"],
        headers=[{"h": "text", "b": b"\xff"}, None, {}],
        tags=["x", None, None],
        priorities=[1, None, 255],
        tenants=["eu", "us", None],
    )


def test_a_slice_of_rows_is_encoded_without_its_neighbours():
    rows = pa.RecordBatch.from_pydict(
        {"body": ["a", "bb", "ccc", "d"], "key": [None, "1", None, "2"]}
    )
    (piece,) = encode_messages(rows.slice(1, 2), topic="orders")
    assert piece.packed == encode_batch([b"bb", b"ccc"], keys=["1", None])


def test_rows_with_a_time_go_to_the_schedule_and_the_others_to_their_topic():
    due = datetime(2030, 1, 1, 0, 0, 0, 1500, tzinfo=UTC)
    rows = pa.RecordBatch.from_pydict(
        {
            "body": [b"now", b"later"],
            "topic": ["orders", "orders"],
            "due_at": pa.array([None, due], pa.timestamp("us", "UTC")),
            "unique": [None, "order-7"],
        }
    )
    now, later = encode_messages(rows)
    assert (now.topic, later.topic) == ("orders", "@schedule")
    waiting = decode_batch(later.packed, raw_bytes_max=1000)
    assert waiting.topics == ["orders"]
    assert waiting.uniques == ["order-7"]
    assert waiting.due_at_ms == [int(due.timestamp()) * 1000 + 2]  # never early
    assert Column.UNIQUES not in decode_batch(now.packed, raw_bytes_max=1000).kinds


def test_large_rows_are_cut_into_pieces_and_keep_their_order():
    bodies = [bytes([number]) * 1000 for number in range(100)]
    rows = pa.RecordBatch.from_pydict({"body": bodies})
    pieces = encode_messages(rows, topic="orders", bytes_max=10_000)
    assert len(pieces) > 5
    found = [
        b for piece in pieces for b in decode_batch(piece.packed, raw_bytes_max=1 << 20).bodies
    ]
    assert found == bodies


def test_many_topics_in_one_frame_are_told_apart():
    rows = pa.RecordBatch.from_pydict({"body": [b"1", b"2", b"3"], "topic": ["a", "b", "a"]})
    pieces = encode_messages(rows)
    assert [(piece.topic, piece.count) for piece in pieces] == [("a", 2), ("b", 1)]


@pytest.mark.parametrize(
    ("columns", "topic", "error", "words"),
    [
        ({"body": [b"a", None]}, "t", InvalidRequest, "'body' is null in 1 rows"),
        ({"body": [b"a"]}, None, InvalidRequest, "'topic' is null"),
        ({"body": [b"a", b"b"], "topic": ["x", None]}, None, InvalidRequest, "null in 1 rows"),
        ({"body": [b"a"], "topic": ["@trace"]}, None, InvalidName, "system's own"),
        ({"body": [b"a"], "priority": [256]}, "t", InvalidRequest, "0 to 255"),
    ],
)
def test_rows_that_make_no_message_are_refused(columns, topic, error, words):
    with pytest.raises(error, match=words):
        encode_messages(pa.RecordBatch.from_pydict(columns), topic=topic)


def test_no_rows_make_no_batch():
    rows = pa.RecordBatch.from_pydict({"body": pa.array([], pa.binary())})
    assert encode_messages(rows, topic="t") == []


def test_rows_that_are_large_by_their_headers_and_keys_are_cut_into_pieces_too():
    headers = pa.array([[("h", bytes(1000))]] * 100, pa.map_(pa.string(), pa.binary()))
    rows = pa.RecordBatch.from_arrays(
        [pa.array([b"%d" % n for n in range(100)]), headers, pa.array(["k" * 500] * 100)],
        names=["body", "headers", "key"],
    )
    pieces = encode_messages(rows, topic="orders", bytes_max=20_000)
    assert max(len(piece.packed) for piece in pieces) < 25_000
    bodies = [b for p in pieces for b in decode_batch(p.packed, raw_bytes_max=1 << 20).bodies]
    assert bodies == [b"%d" % n for n in range(100)]


def test_a_header_whose_name_is_no_utf8_makes_nothing_unreadable():
    headers = [{"a\udcff": "v"}, None, {}, {"k": b"\x00"}]
    packed = encode_batch([b"a", b"b", b"c", b"d"], headers=headers)
    rows = record_batch([batch_of(packed)], arrow_schema(message_schema(["headers"])))
    found = rows.column("headers")
    assert found.keys.view(pa.binary()).to_pylist() == [b"a\xff", b"k"]
    assert found.slice(1).to_pylist() == [None, [], [("k", b"\x00")]]
