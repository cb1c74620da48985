"""Batches whose checksum is right but whose numbers lie: made by hand, as an attacker would."""

import contextlib
import struct
from collections.abc import Callable

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from onward.errors import ProtocolError
from onward.message.batch import Batch, check_batch, decode_batch, encode_batch, largest_body_bytes

MAX = 1 << 20
HUGE = 0xFFFF_FFFF


def signed(packed: bytes | bytearray) -> bytes:
    packed = bytearray(packed)
    struct.pack_into("<I", packed, 8, crc32c(bytes(packed[12:])))
    return bytes(packed)


def changed(packed: bytes, at: int, code: str, value: int) -> bytes:
    lie = bytearray(packed)
    struct.pack_into("<" + code, lie, at, value)
    return signed(lie)


PLAIN = encode_batch([b"hello", b"world"])
KEYED = encode_batch([b"hello", b"world"], keys=["a", None])


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (changed(PLAIN, 0, "I", 0), "begins with b'OBAT'"),
        (changed(PLAIN, 4, "I", HUGE), "is cut off after 80"),
        (changed(PLAIN, 4, "I", 79), "not multiples of 8"),
        (changed(PLAIN, 4, "I", 72), "does not fit 1 columns"),
        (changed(PLAIN, 4, "I", 0), "does not fit"),
        (changed(PLAIN, 12, "B", 2), "batch version 2 is not known here, only 1"),
        (changed(PLAIN, 13, "B", 3), "batch flags 0x03"),
        (changed(PLAIN, 13, "B", 4), "batch flags 0x04"),
        (changed(PLAIN, 14, "H", 0), "does not fit 0 columns"),
        (changed(PLAIN, 14, "H", 2), "does not fit 2 columns"),
        (changed(PLAIN, 14, "H", 0xFFFF), "does not fit 65535 columns"),
        (changed(PLAIN, 16, "I", 0), "at least one message, this one has none"),
        (changed(PLAIN, 16, "I", HUGE), "directory"),
        (changed(PLAIN, 20, "I", 32), "does not fit"),
        (changed(PLAIN, 48, "H", 1), "directory"),
        (changed(PLAIN, 50, "H", 1), "directory"),
        (changed(PLAIN, 52, "I", HUGE), "directory"),
        (changed(PLAIN, 52, "I", 7), "directory"),
        (changed(KEYED, 48, "H", 255), "ascending"),
        (changed(KEYED, 48, "H", 0), "ascending"),
        (changed(KEYED, 50, "H", 1), "ascending"),
        (changed(KEYED, 58, "H", 1), "directory"),
        (changed(KEYED, 56, "H", 254), "directory"),
        (changed(KEYED, 52, "I", HUGE), "directory"),
        (changed(KEYED, 60, "I", 0), "directory"),
    ],
)
def test_a_lie_in_header_or_directory_is_refused_and_named(lie: bytes, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        check_batch(lie)
    with pytest.raises(ProtocolError, match=why):
        decode_batch(lie, raw_bytes_max=MAX, verify=False)


def open_all(batch: Batch) -> None:
    _ = batch.bodies, batch.keys, batch.headers, batch.tags, batch.trace_ids
    _ = batch.due_at_ms, batch.priorities, batch.tenants
    _ = batch.topics, batch.uniques, batch.replaces, batch.schedule_ids
    _ = batch.body_lengths, batch.body_bytes


@pytest.mark.parametrize(
    "ask",
    [
        lambda batch: batch.bodies,
        lambda batch: batch.body_lengths,
        lambda batch: largest_body_bytes(batch._block.obj, 0, batch.header),
    ],
)
@pytest.mark.parametrize("length", [0, 4, 6, 0x7FFF_FFFF, HUGE])
def test_body_lengths_that_do_not_add_up_are_refused(
    ask: Callable[[Batch], object], length: int
) -> None:
    batch = decode_batch(changed(PLAIN, 56, "I", length), raw_bytes_max=MAX)
    with pytest.raises(ProtocolError, match="add up"):
        ask(batch)


def test_the_length_of_a_single_body_must_be_its_column() -> None:
    lie = changed(encode_batch([b"hello"]), 56, "I", 4)
    with pytest.raises(ProtocolError, match="add up"):
        _ = decode_batch(lie, raw_bytes_max=MAX).bodies


@pytest.mark.parametrize("kind", range(1, 12))
@pytest.mark.parametrize(
    "column", [b"", b"\xff", b"\xff" * 2, b"\x01" * 7, bytes(15), b"\x09" * 40]
)
def test_a_column_that_cannot_be_what_it_says_is_refused(kind: int, column: bytes) -> None:
    count = 3
    bodies = struct.pack("<3I", 0, 0, 0)
    block = b"".join(part + bytes(-len(part) % 8) for part in (column, bodies))
    directory = struct.pack("<HHIHHI", kind, 0, len(column), 255, 0, len(bodies))
    rest = struct.pack("<BBHIIQQq", 1, 0, 2, count, len(block), 0, 0, 0) + directory + block
    lie = signed(struct.pack("<4sII", b"OBAT", 12 + len(rest), 0) + rest)
    batch = decode_batch(lie, raw_bytes_max=MAX)
    with pytest.raises(ProtocolError):
        open_all(batch)


def test_a_column_of_a_later_version_is_skipped_and_can_be_had_raw() -> None:
    later = changed(encode_batch([b"hello"], tenants=["acme"]), 48, "H", 200)
    batch = decode_batch(later, raw_bytes_max=MAX)
    assert batch.bodies == [b"hello"]
    assert batch.tenants is None
    column = batch.column(200)
    assert column is not None
    assert bytes(column).endswith(b"acme")


@given(st.integers(0, 127), st.binary(min_size=1, max_size=8), st.booleans())
def test_a_signed_lie_anywhere_is_opened_or_refused_and_nothing_else(
    at: int, lie: bytes, compressed: bool
) -> None:
    packed = bytearray(
        encode_batch(
            [b"hello", b"world"],
            keys=["a", "b"],
            headers=[{"a": "b"}, None],
            due_at_ms=[1, None],
            compression="zstd" if compressed else None,
        )
    )
    packed[at : at + len(lie)] = lie
    with contextlib.suppress(ProtocolError):
        open_all(decode_batch(signed(packed), raw_bytes_max=MAX))


rows_of_directories = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 2, 3, 254, 255, 256, 511]),
        st.sampled_from([0, 0, 0, 0, 0, 1, 256]),
        st.integers(0, 20),
    ),
    max_size=4,
)


@given(rows_of_directories, st.booleans(), st.integers(0, 6), st.sampled_from([0, 0, 0, 8]))
def test_a_directory_is_accepted_exactly_when_it_keeps_the_rules_of_the_format(
    rows: list[tuple[int, int, int]], has_bodies: bool, count: int, raw_bytes_more: int
) -> None:
    if has_bodies:
        rows = [*sorted({row[0]: row for row in rows if row[0] < 255}.values()), (255, 0, 12)]
    raw_bytes = sum((size + 7) & ~7 for _, _, size in rows) + raw_bytes_more
    rest = struct.pack("<BBHIIQQq", 1, 0, len(rows), count, raw_bytes, 0, 0, 0)
    rest += b"".join(struct.pack("<HHI", *row) for row in rows) + bytes(raw_bytes)
    batch = signed(struct.pack("<4sII", b"OBAT", 12 + len(rest), 0) + rest)
    kinds = [kind for kind, _, _ in rows]
    is_valid = (
        kinds == sorted(set(kinds))
        and kinds[-1:] == [255]
        and kinds[0] > 0
        and not any(zero for _, zero, _ in rows)
        and rows[-1][2] >= 4 * count > 0
        and not raw_bytes_more
    )
    if is_valid:
        assert list(decode_batch(batch, raw_bytes_max=MAX).kinds) == kinds
    else:
        with pytest.raises(ProtocolError):
            check_batch(batch)
