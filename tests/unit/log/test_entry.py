"""Entries: the bytes of one change in the log."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.errors import Corruption
from onward.message.entry import (
    COPIED_BYTES_MAX,
    HEADER_BYTES,
    Draft,
    Kind,
    decode_gap,
    encode_entries,
    encode_entry,
    encode_gap,
    entry_heads,
    read_entry,
    read_header,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "log-entry.bin"
DRAFT = Draft(Kind.MESSAGES, 1_750_000_000_123, 7, 100, 3, [b"first, ", b"second"])


def encoded(draft: Draft = DRAFT, *, index: int = 42) -> bytes:
    buffers, length, _ = encode_entry(
        draft, index=index, term=2, previous_crc=0xDEADBEEF, synced_index=40
    )
    joined = b"".join(buffers)
    assert len(joined) == length
    return joined


def test_an_entry_reads_back_as_it_was_written() -> None:
    entry = read_entry(encoded(), 0, position=0)
    assert entry is not None
    assert (entry.index, entry.term, entry.previous_crc) == (42, 2, 0xDEADBEEF)
    assert (entry.topic, entry.base_offset, entry.count, entry.kind) == (7, 100, 3, Kind.MESSAGES)
    assert (entry.time_ms, entry.synced_index) == (1_750_000_000_123, 40)
    assert entry.body_bytes == len(b"first, second")


def test_an_entry_written_once_is_read_for_ever() -> None:
    assert GOLDEN.read_bytes() == encoded()


@given(st.binary(max_size=40))
def test_an_entry_is_always_a_multiple_of_eight_bytes(body: bytes) -> None:
    assert len(encoded(DRAFT._replace(parts=[body]))) % 8 == 0


SIZES = st.one_of(st.integers(0, 40), st.integers(COPIED_BYTES_MAX - 20, COPIED_BYTES_MAX + 20))


@given(st.lists(st.lists(SIZES, min_size=1, max_size=3), max_size=8))
def test_entries_of_one_commit_read_back_as_they_were_written(shape: list[list[int]]) -> None:
    drafts = [
        Draft(Kind.MESSAGES, 5, 1 + number, number, len(sizes), [bytes([7]) * n for n in sizes])
        for number, sizes in enumerate(shape)
    ]
    buffers, entries = encode_entries(
        drafts, position=800, index=10, term=1, previous_crc=3, synced_index=9
    )
    written, crc = b"".join(buffers), 3
    for number, (draft, entry) in enumerate(zip(drafts, entries, strict=True)):
        assert entry == read_entry(written, entry.position - 800, position=800)
        assert (entry.index, entry.previous_crc) == (10 + number, crc)
        alone, length, crc = encode_entry(
            draft, index=entry.index, term=1, previous_crc=crc, synced_index=9
        )
        assert (length, crc) == (entry.length, entry.crc)
        assert written[entry.position - 800 :].startswith(b"".join(alone))
    assert len(written) == (entries[-1].end - 800 if entries else 0)


def test_small_bodies_share_a_buffer_and_a_large_one_is_not_copied() -> None:
    large = bytes(100_001)
    drafts = [DRAFT._replace(parts=[body]) for body in (b"a", b"b", large, b"c", b"d")]
    buffers, _ = encode_entries(drafts, position=0, index=1, term=0, previous_crc=0, synced_index=0)
    assert len(buffers) == 3
    assert buffers[1] is large


def test_every_flipped_bit_of_an_entry_is_found() -> None:
    good = encoded()
    for place in range(len(good)):
        for bit in range(8):
            bad = bytearray(good)
            bad[place] ^= 1 << bit
            entry = read_entry(bad, 0, position=0)
            # The crc itself, the length and the magic are found by what they no longer fit.
            assert entry is None, f"bit {bit} of byte {place}"


def test_every_truncation_of_an_entry_is_refused() -> None:
    good = encoded()
    assert all(read_entry(good[:size], 0, position=0) is None for size in range(len(good)))


def test_an_entry_knows_where_it_lies_in_its_segment() -> None:
    two = encoded(index=1) + encoded(index=2)
    entry = read_entry(two, len(two) // 2, position=1_000)
    assert entry is not None
    assert (entry.position, entry.end) == (1_000 + len(two) // 2, 1_000 + len(two))
    assert entry.body_position == entry.position + HEADER_BYTES


def test_heads_of_entries_back_to_back_are_walked_without_their_bodies() -> None:
    three = b"".join(encoded(index=index) for index in (1, 2, 3))
    assert [entry.index for entry in entry_heads(three)] == [1, 2, 3]


def test_a_walk_over_entries_that_are_cut_off_says_so() -> None:
    with pytest.raises(Corruption, match="no valid entry at byte"):
        list(entry_heads(encoded() + encoded()[:-8]))


def test_what_is_no_header_is_none() -> None:
    assert read_header(bytes(HEADER_BYTES), 0, position=0) is None
    assert read_header(encoded()[: HEADER_BYTES - 1], 0, position=0) is None


def test_a_gap_with_a_short_body_is_corruption() -> None:
    assert decode_gap(encode_gap(last_index=2**40, last_crc=2**32 - 1)) == (2**40, 2**32 - 1)
    with pytest.raises(Corruption):
        decode_gap(b"short")
