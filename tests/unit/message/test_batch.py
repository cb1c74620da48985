from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onward.errors import InvalidRequest, ProtocolError
from onward.message.batch import (
    batches_of,
    check_batch,
    decode_batch,
    encode_batch,
    largest_body_bytes,
    restamp,
)
from onward.message.columns import Column

MAX = 1 << 20
# How fast the machine makes examples is not what is tested here.
SLOWLY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
COLUMNS = (
    *("keys", "headers", "tags", "trace_ids", "due_at_ms", "priorities", "tenants"),
    *("topics", "uniques", "replaces", "schedule_ids"),
)

text = st.none() | st.text(st.characters(exclude_categories=("Cs",)), max_size=10)
header_maps = st.none() | st.dictionaries(st.text("ab", max_size=3), st.binary(max_size=5))
values = {
    "headers": header_maps,
    "due_at_ms": st.none() | st.integers(-(2**63) + 1, 2**63 - 1),
    "replaces": st.none() | st.integers(-1, 2**63 - 1),
    "schedule_ids": st.none() | st.integers(0, 2**63 - 1),
    "priorities": st.integers(0, 255),
}

times = st.integers(-(2**63), 2**63 - 1)


@st.composite
def batch_arguments(draw: st.DrawFn) -> dict[str, Any]:
    bodies = draw(st.lists(st.binary(max_size=40), min_size=1, max_size=12))
    arguments: dict[str, Any] = {"bodies": bodies}
    for name in draw(st.sets(st.sampled_from(COLUMNS))):
        size = len(bodies)
        arguments[name] = draw(st.lists(values.get(name, text), min_size=size, max_size=size))
    arguments["producer_id"] = draw(st.integers(0, 2**64 - 1))
    arguments["sequence"] = draw(st.integers(0, 2**64 - 1))
    arguments["time_ms"] = draw(times)
    arguments["compression"] = draw(st.sampled_from((None, "zstd", "lz4")))
    return arguments


@SLOWLY
@given(batch_arguments(), st.integers(0, 20))
def test_a_batch_comes_back_as_it_was_encoded(arguments: dict[str, Any], at: int) -> None:
    packed = encode_batch(**arguments)
    assert len(packed) % 8 == 0
    around = b"x" * at + packed + b"y" * 9
    header = check_batch(around, at)
    batch = decode_batch(around, at, raw_bytes_max=MAX)
    assert (batch.header, batch.count) == (header, len(arguments["bodies"]))
    assert batch.bodies == arguments["bodies"]
    assert batch.bodies is batch.bodies, "unpacked once"
    for name in COLUMNS:
        expected = arguments.get(name)
        if expected is not None and all(value is None for value in expected):
            expected = None
        assert getattr(batch, name) == expected
    for name in ("producer_id", "sequence", "time_ms"):
        assert getattr(header, name) == arguments[name]


@SLOWLY
@given(batch_arguments())
def test_the_largest_body_is_found_without_making_bodies(arguments: dict[str, Any]) -> None:
    packed = encode_batch(**arguments)
    header = check_batch(packed)
    largest = max(map(len, arguments["bodies"]))
    assert largest_body_bytes(packed, 0, header) == largest <= header.raw_bytes


@SLOWLY
@given(st.lists(batch_arguments(), max_size=4))
def test_batches_back_to_back_are_walked_one_by_one(many: list[dict[str, Any]]) -> None:
    packed = [encode_batch(**arguments) for arguments in many]
    joined = b"head" + b"".join(packed) + b"tail"
    walked = list(batches_of(joined, 4, len(joined) - 4))
    assert [joined[at : at + header.length] for at, header in walked] == packed


@settings(SLOWLY, max_examples=30)
@given(batch_arguments())
def test_every_flipped_byte_is_detected(arguments: dict[str, Any]) -> None:
    packed = bytearray(encode_batch(**arguments))
    for at in range(len(packed)):
        packed[at] ^= 1 << at % 8
        with pytest.raises(ProtocolError):
            check_batch(packed)
        packed[at] ^= 1 << at % 8
    check_batch(packed)


@settings(SLOWLY, max_examples=30)
@given(batch_arguments())
def test_every_truncation_is_refused(arguments: dict[str, Any]) -> None:
    packed = encode_batch(**arguments)
    for kept in range(len(packed)):
        with pytest.raises(ProtocolError):
            check_batch(packed[:kept])
        with pytest.raises(ProtocolError):
            check_batch(packed, 0, end=kept)


def test_columns_lie_where_arrow_can_use_them_in_place() -> None:
    packed = encode_batch([b"ab", b"", b"c"], keys=["k", None, "kk"])
    batch = decode_batch(packed, raw_bytes_max=0)
    assert batch.body_lengths.tolist() == [2, 0, 1]
    assert bytes(batch.body_bytes) == b"abc"
    lengths = batch.lengths(Column.KEYS)
    assert lengths is not None
    assert lengths.tolist() == [1, 0xFFFF_FFFF, 2]
    assert batch.column(Column.TAGS) is None
    assert batch.lengths(Column.TAGS) is None
    assert batch.body_bytes.obj is packed


def test_an_absent_column_costs_no_bytes() -> None:
    assert encode_batch([b"a"], keys=[None], headers=[None]) == encode_batch([b"a"])


def test_bytes_that_are_not_utf8_survive_in_a_text_column() -> None:
    key = b"\xff\xfe".decode("utf-8", "surrogateescape")
    batch = decode_batch(encode_batch([b""], keys=[key]), raw_bytes_max=0)
    assert batch.keys == [key]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"bodies": []}, "at least one message"),
        ({"bodies": [b"a"], "keys": ["k", "l"]}, "keys has 2 values for 1 messages"),
        ({"bodies": [b"a"], "due_at_ms": []}, "due_at_ms has 0 values for 1 messages"),
        ({"bodies": [b"a"], "priorities": [256]}, "a priority is a number from 0 to 255"),
        ({"bodies": [b"a"], "due_at_ms": [2**63]}, "does not fit into 64 bits"),
        ({"bodies": [b"a"], "schedule_ids": [2**63]}, "a schedule id does not fit into 64 bits"),
        ({"bodies": [b"a"], "topics": ["a", "b"]}, "topics has 2 values for 1 messages"),
        ({"bodies": [b"a"], "tags": ["\ud800"]}, "cannot be written as utf-8"),
        ({"bodies": [b"a"], "compression": "gzip"}, "unknown compression 'gzip'"),
    ],
)
def test_what_cannot_be_a_batch_is_refused_with_a_reason(
    arguments: dict[str, Any], why: str
) -> None:
    with pytest.raises(InvalidRequest, match=why):
        encode_batch(**arguments)


# --- under another number ----------------------------------------------------------------------


@SLOWLY
@given(batch_arguments(), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.none() | times)
def test_a_batch_under_another_number_is_as_if_it_was_encoded_with_it(
    arguments: dict[str, Any], producer_id: int, sequence: int, time_ms: int | None
) -> None:
    packed = encode_batch(**arguments)
    stamp: dict[str, Any] = {"producer_id": producer_id, "sequence": sequence}
    if time_ms is not None:
        stamp["time_ms"] = time_ms
    wanted = encode_batch(**arguments | stamp)
    for kind in (bytes, bytearray, memoryview):
        assert restamp(kind(packed), **stamp) == wanted
    assert restamp(wanted, **stamp) == wanted


def test_what_is_not_exactly_one_sound_batch_gets_no_other_number() -> None:
    packed = encode_batch([b"hello"])
    with pytest.raises(ProtocolError, match="8 bytes follow after a batch"):
        restamp(packed + bytes(8), producer_id=7, sequence=1)
    for broken in (packed[:-1], b"", packed[:-8] + b"\x01" + packed[-7:]):
        with pytest.raises(ProtocolError):
            restamp(broken, producer_id=7, sequence=1)
