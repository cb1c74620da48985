import random
import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from crc32c import crc32c
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onward.errors import Corruption
from onward.message.batch import batches_of, decode_batch, encode_batch, messages_of
from onward.message.cut import BATCH_BYTES_SMALL, ENTRY_BYTES_SMALL, Cutter, Range, cut_entries
from onward.message.entry import Buffer, Draft, Kind, encode_entry, entry_heads, read_entry
from onward.message.message import Message

# How fast the machine makes examples is not what is tested here.
SLOWLY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

TEXTS: dict[str, st.SearchStrategy[Any]] = {
    "keys": st.none() | st.text("ключab", max_size=5),
    "headers": st.none() | st.dictionaries(st.text("ab", max_size=3), st.binary(max_size=5)),
    "tags": st.none() | st.text("ab,", max_size=5),
    "trace_ids": st.none() | st.text("0123", max_size=5),
    "due_at_ms": st.none() | st.integers(-(2**63) + 1, 2**63 - 1),
    "priorities": st.integers(0, 255),
    "tenants": st.none() | st.text("xyz", max_size=5),
}


def entry_of(batches: Sequence[bytes], *, base_offset: int = 0, index: int = 7) -> bytes:
    count = sum(decode_batch(one, raw_bytes_max=1 << 26).count for one in batches)
    draft = Draft(Kind.MESSAGES, 1_750_000_000_000, 3, base_offset, count, batches)
    parts, _, _ = encode_entry(draft, index=index, term=2, previous_crc=9, synced_index=index - 1)
    return b"".join(parts)


def stamped_messages(entries: Buffer) -> dict[int, tuple[Message, tuple[int, ...]]]:
    """Return each message by its offset, with what its batch says; checksums are verified."""
    found: dict[int, tuple[Message, tuple[int, ...]]] = {}
    for entry in entry_heads(entries):
        assert read_entry(entries, entry.position, position=0) == entry, "its checksum is right"
        offset, at = entry.base_offset, entry.body_position
        for start, header in batches_of(entries, at, at + entry.body_bytes):
            batch = decode_batch(entries, start, raw_bytes_max=1 << 26)
            stamp = (header.producer_id, header.sequence, header.time_ms, entry.topic, entry.term)
            for message in messages_of(
                batch,
                topic="t",
                base_offset=offset,
                published_at_ms=entry.time_ms,
                event_id=entry.index,
            ):
                assert message.offset not in found
                found[message.offset] = (message, stamp)
            offset += batch.count
        assert offset == entry.base_offset + entry.count
    assert list(found) == sorted(found), "entries stay in order"
    return found


def offsets_of(ranges: Sequence[Range]) -> Iterator[int]:
    return (offset for start, end in ranges for offset in range(start, end))


@st.composite
def stored_batch(draw: st.DrawFn) -> bytes:
    count = draw(st.integers(1, 12))
    size = draw(st.sampled_from((0, 10, 300, 3000)))
    columns = {
        name: draw(st.lists(TEXTS[name], min_size=count, max_size=count))
        for name in draw(st.sets(st.sampled_from(sorted(TEXTS))))
    }
    return encode_batch(
        [bytes((number,)) * draw(st.integers(0, size)) for number in range(count)],
        producer_id=draw(st.integers(0, 2**64 - 1)),
        sequence=draw(st.integers(0, 2**64 - 1)),
        time_ms=draw(st.integers(-(2**63), 2**63 - 1)),
        compression=draw(st.sampled_from((None, None, "zstd", "lz4"))),
        **columns,
    )


@st.composite
def stored_entries(draw: st.DrawFn) -> tuple[bytes, int]:
    offset = draw(st.integers(0, 50))
    entries = []
    for index in range(draw(st.integers(1, 4))):
        entry = entry_of(
            draw(st.lists(stored_batch(), min_size=1, max_size=8)),
            base_offset=offset,
            index=index + 1,
        )
        [head] = entry_heads(entry)
        offset += head.count + draw(st.integers(0, 3))
        entries.append(entry)
    return b"".join(entries), offset


@st.composite
def wanted_ranges(draw: st.DrawFn, end: int) -> list[Range]:
    """Ranges in order, some of them outside of what is stored, some side by side."""
    cuts = sorted(draw(st.lists(st.integers(0, end + 5), max_size=12, unique=True)))
    pairs = list(pairwise(cuts))
    return pairs if draw(st.booleans()) else pairs[::2]


@pytest.mark.slow
@settings(SLOWLY, max_examples=100)
@given(st.data())
def test_a_cut_holds_every_wanted_message_as_it_was(data: st.DataObject) -> None:
    entries, end = data.draw(stored_entries())
    ranges = data.draw(wanted_ranges(end))
    before, after = stamped_messages(entries), stamped_messages(cut_entries(entries, ranges))
    wanted = [offset for offset in offsets_of(ranges) if offset in before]
    assert [after.get(offset) for offset in wanted] == [before[offset] for offset in wanted]
    assert all(before[offset] == one for offset, one in after.items()), "nothing is made up"


@pytest.mark.slow
@settings(SLOWLY, max_examples=40)
@given(st.data())
def test_one_cutter_for_many_cuts_gives_what_new_ones_give(data: st.DataObject) -> None:
    cutter = Cutter()
    stored = [data.draw(stored_entries()) for _ in range(2)]
    for number in data.draw(st.lists(st.integers(0, 1), max_size=5)):
        entries, end = stored[number]
        ranges = data.draw(wanted_ranges(end))
        assert cutter.cut(entries, ranges) == cut_entries(entries, ranges)


@pytest.mark.parametrize("compression", [None, "zstd", "lz4"])
@pytest.mark.parametrize("with_columns", [False, True])
def test_of_a_large_batch_only_the_wanted_messages_remain(
    compression: str | None, *, with_columns: bool
) -> None:
    chance = random.Random(7)
    bodies = [chance.randbytes(200) for _ in range(10_000)]
    columns: dict[str, Any] = {}
    if with_columns:
        columns = {
            "keys": [None if number % 3 else f"key {number}" for number in range(10_000)],
            "headers": [{"n": str(number)} for number in range(10_000)],
            "tags": ["a,b"] * 10_000,
            "trace_ids": [None] * 9_000 + ["t"] * 1_000,
            "due_at_ms": list(range(10_000)),
            "priorities": [number % 256 for number in range(10_000)],
            "tenants": ["x"] * 10_000,
        }
    entry = entry_of([encode_batch(bodies, sequence=5, compression=compression, **columns)])
    ranges = [(10, 60), (9_000, 9_050)]
    cut = cut_entries(entry, ranges)
    after = stamped_messages(cut)
    assert list(after) == list(offsets_of(ranges))
    before = stamped_messages(entry)
    assert after == {offset: before[offset] for offset in after}
    assert len(cut) < 100 * 300


def test_one_message_of_many_batches_is_found_without_opening_any() -> None:
    batches = [encode_batch([b"x" * 200], sequence=number) for number in range(2_000)]
    # Bodies that lie: who opened one would notice.
    broken = bytearray(entry_of(batches))
    at = broken.index(b"x" * 200)
    broken[at - 4 : at] = b"\xff\xff\xff\x7f"
    cut = cut_entries(broken, [(1_234, 1_235)])
    assert len(cut) == 72 + len(batches[0])
    [(offset, (message, stamp))] = stamped_messages(cut).items()
    assert (offset, message.body, stamp[1]) == (1_234, b"x" * 200, 1_234)


def test_what_is_left_out_between_two_messages_makes_two_entries() -> None:
    entry = entry_of([encode_batch([bytes((number,)) * 2_000]) for number in range(50)])
    cut = cut_entries(entry, [(3, 5), (5, 6), (9, 10)])
    heads = [(head.base_offset, head.count, head.index) for head in entry_heads(cut)]
    assert heads == [(3, 3, 7), (9, 1, 7)]


def test_entries_that_are_wanted_whole_are_not_copied() -> None:
    entries = entry_of([encode_batch([b"x" * 50_000] * 4)])
    assert cut_entries(entries, [(0, 4)]) is entries
    assert cut_entries(entries, [(0, 2), (2, 4)]) is entries
    assert cut_entries(entries, [(0, 3)]) is entries, "three of four are more than half"
    small = entry_of([encode_batch([b"x"] * 100)])
    assert len(small) < ENTRY_BYTES_SMALL
    assert cut_entries(small, [(50, 51)]) is small


def test_entries_of_which_nothing_is_wanted_are_left_out() -> None:
    one, two = [entry_of([encode_batch([b"x"] * 5)], base_offset=base) for base in (0, 5)]
    assert cut_entries(one + two, [(7, 8)]) == two
    assert cut_entries(one + two, [(20, 30)]) == b""
    assert cut_entries(one + two, []) == b""
    assert cut_entries(b"", [(0, 9)]) == b""


def test_a_compressed_batch_is_kept_when_its_wanted_part_would_be_larger() -> None:
    batch = encode_batch([bytes(range(256)) * 4] * 10_000, compression="zstd")
    filler = encode_batch([bytes(range(256)) * 200])
    entry = entry_of([batch, filler])
    assert BATCH_BYTES_SMALL <= len(batch) < 300_000
    cut = cut_entries(entry, [(100, 400)])
    assert len(cut) == 72 + len(batch)
    assert set(range(100, 400)) <= set(stamped_messages(cut))


def test_a_batch_whose_inside_is_wrong_is_left_for_its_reader() -> None:
    batch = bytearray(encode_batch([b"x" * 100] * 1_000))
    struct.pack_into("<I", batch, 56, 2**31)  # the length of the first body
    struct.pack_into("<I", batch, 8, crc32c(bytes(batch[12:])))
    good = encode_batch([b"y" * 100_000])
    draft = Draft(Kind.MESSAGES, 0, 3, 0, 1_001, [bytes(batch), good])
    parts, _, _ = encode_entry(draft, index=1, term=0, previous_crc=0, synced_index=0)
    cut = cut_entries(b"".join(parts), [(500, 501)])
    assert len(cut) == 72 + len(batch)
    assert bytes(batch) in bytes(cut)


@pytest.mark.parametrize(
    ("at", "value"),
    [(4, 0), (4, 8), (4, 2**32 - 1), (16, 0), (16, 77)],
    ids=["no length", "short", "too long", "no count", "another count"],
)
def test_an_entry_that_is_not_batches_is_corruption(at: int, value: int) -> None:
    entry = bytearray(entry_of([encode_batch([b"x" * 100] * 10) for _ in range(100)]))
    struct.pack_into("<I", entry, 72 + at, value)
    with pytest.raises(Corruption):
        cut_entries(entry, [(500, 501)])


def test_an_entry_without_the_batches_that_it_counts_is_corruption() -> None:
    draft = Draft(Kind.MESSAGES, 0, 3, 0, 5, [bytes(20_000)])
    parts, _, _ = encode_entry(draft, index=1, term=0, previous_crc=0, synced_index=0)
    with pytest.raises(Corruption):
        cut_entries(b"".join(parts), [(2, 3)])
    with pytest.raises(Corruption):
        cut_entries(b"".join(parts)[:-8], [(2, 3)])
