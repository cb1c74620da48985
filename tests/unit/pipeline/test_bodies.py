"""Bodies that are JSON become columns; those that are not are found, whatever they contain."""

from datetime import UTC, date, datetime
from decimal import Decimal

import pyarrow as pa
import pytest

from onward.errors import InvalidRequest
from onward.pipeline.bodies import BodyColumns

OFFSETS = pa.field("offset", pa.int64())
BODY = pa.field("body", pa.binary())
ID = pa.field("id", pa.int64())
NAME = pa.field("name", pa.string())


def parse(bodies: list[bytes], *fields: pa.Field, bad: str = "null") -> list[dict[str, object]]:
    schema = pa.schema([OFFSETS, *fields])
    columns = BodyColumns(schema, width=len(fields), bad=bad)  # type: ignore[arg-type]
    assert columns.read_schema == pa.schema([OFFSETS, BODY])
    rows = pa.RecordBatch.from_arrays(
        [pa.array(range(len(bodies)), pa.int64()), pa.array(bodies, pa.binary())],
        schema=columns.read_schema,
    )
    found = columns.parse(rows, topic="orders", first_offset=100)
    assert found.schema == schema
    assert found.column("offset").to_pylist() == list(range(len(bodies)))
    return [{k: v for k, v in row.items() if k != "offset"} for row in found.to_pylist()]


def test_fields_become_columns_and_missing_ones_are_null():
    found = parse([b'{"id": 1, "name": "a", "more": [1]}', b'{\n "id": 2\n}', b"{}"], ID, NAME)
    assert found == [
        {"id": 1, "name": "a"}, {"id": 2, "name": None}, {"id": None, "name": None},
    ]  # fmt: skip


def test_all_types_that_json_can_say_are_read():
    body = (
        b'{"at": "2026-01-01T00:00:00Z", "day": "2026-01-02", "price": "1.25", "many": [1, 2],'
        b' "deep": {"x": 1}, "ok": true, "f": 1}'
    )
    fields = [
        pa.field("at", pa.timestamp("us", "UTC")), pa.field("day", pa.date32()),
        pa.field("price", pa.decimal128(10, 2)), pa.field("many", pa.list_(pa.int32())),
        pa.field("deep", pa.struct([pa.field("x", pa.int64())])), pa.field("ok", pa.bool_()),
        pa.field("f", pa.float64()),
    ]  # fmt: skip
    assert parse([body], *fields) == [
        {
            "at": datetime(2026, 1, 1, tzinfo=UTC), "day": date(2026, 1, 2),
            "price": Decimal("1.25"), "many": [1, 2], "deep": {"x": 1}, "ok": True, "f": 1.0,
        }
    ]  # fmt: skip


BAD = [
    b"", b"hello", b"{", b"}", b"[1]", b"3", b'"x', b'{"id": "7"}', b'{"id": 1.5}',
    b'{"id": 1}{"id": 2}', b'{"id": 1}}\n{"b":{"id": 2}', b'{"id": 1}\n{"id": 2}', b"\xff",
    b'{"id": 1, "id": 2}',
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_body_is_null_and_its_neighbours_are_not(bad: bytes):
    found = parse([b'{"id": 1}', bad, b'{"id": 3}'], ID)
    assert found == [{"id": 1}, {"id": None}, {"id": 3}]


def test_bad_bodies_are_found_wherever_they_are():
    bodies = [b'{"id": %d}' % number for number in range(200)]
    for place, bad in zip(range(3, 200, 14), BAD * 2, strict=False):
        bodies[place] = bad
    found = [row["id"] for row in parse(bodies, ID)]
    wanted = [number if bodies[number] == b'{"id": %d}' % number else None for number in range(200)]
    assert found == wanted


def test_a_bad_body_is_an_error_that_names_its_message():
    with pytest.raises(InvalidRequest, match="message orders/102 is not JSON of the schema: b'x'"):
        parse([b"{}", b"{}", b"x", b"{}"], ID, bad="fail")


def test_a_type_that_cannot_be_read_is_refused():
    with pytest.raises(InvalidRequest, match="bodySchema.*map"):
        parse([b'{"m": {"a": 1}}'], pa.field("m", pa.map_(pa.string(), pa.int64())))


def test_no_rows_are_no_rows():
    assert parse([], ID) == []
