"""What one delivery brought: the right messages, in the right order, whatever lies around them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.client.delivery_batch import DeliveryBatch, Verb
from onward.delivery.filter import Filter
from onward.delivery.ranges import Range, ranges_of
from onward.errors import LeaseLost
from onward.message.batch import encode_batch
from onward.message.entry import Draft, Kind, encode_entry

Grants = list[tuple[int, int, int, int]]


class Ledger:
    """Settles by writing down."""

    group, member = "g", "m"

    def __init__(self) -> None:
        self.is_lost = False
        self.said: list[tuple[str, list[Range], str]] = []

    def ack(self, batch: DeliveryBatch, ranges: Sequence[Range]) -> asyncio.Future[None]:
        return self._note("ack", ranges, "")

    def settle(
        self, batch: DeliveryBatch, ranges: Sequence[Range], *, do: Verb,
        after_ms: int | None = None, at_ms: int | None = None, count: bool = True, cause: str = "",
    ) -> asyncio.Future[None]:  # fmt: skip
        return self._note(do, ranges, cause)

    def _note(self, do: str, ranges: Sequence[Range], cause: str) -> asyncio.Future[None]:
        self.said.append((do, list(ranges), cause))
        future: asyncio.Future[None] = asyncio.Future(loop=_LOOP)
        future.set_result(None)
        return future


_LOOP = asyncio.new_event_loop()
_LOOP.close()


def entry(base_offset: int, batches: list[bytes], counts: list[int]) -> bytes:
    draft = Draft(Kind.MESSAGES, 1_000 + base_offset, 1, base_offset, sum(counts), batches)
    buffers, _, _ = encode_entry(
        draft, index=base_offset + 1, term=0, previous_crc=0, synced_index=0
    )
    return b"".join(buffers)


def entries_of(counts: list[list[int]], *, first: int = 0) -> bytes:
    """Return entries of batches of so many messages; each body is its offset."""
    offset, found = first, []
    for inner in counts:
        base, batches = offset, []
        for count in inner:
            bodies = [b"%d" % number for number in range(offset, offset + count)]
            tags = ["even" if number % 2 == 0 else None for number in range(offset, offset + count)]
            batches.append(encode_batch(bodies, tags=tags))
            offset += count
        found.append(entry(base, batches, inner))
    return b"".join(found)


def opened(entries: bytes, grants: Grants) -> tuple[DeliveryBatch, Ledger]:
    ledger = Ledger()
    batch = DeliveryBatch(ledger, entries, topic="orders", grants=grants, lease=7)
    batch.open()
    return batch, ledger


@settings(deadline=None, max_examples=60)
@given(
    counts=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4),
    chosen=st.sets(st.integers(0, 79), min_size=1),
    first=st.integers(0, 1000),
)
def test_exactly_what_was_granted_is_found(
    counts: list[list[int]], chosen: set[int], first: int
) -> None:
    total = sum(map(sum, counts))
    offsets = sorted(first + number for number in chosen if number < total)
    grants = [(start, end, 1 + start % 3, 1 + start % 3) for start, end in ranges_of(offsets)]
    if not grants:
        return
    batch, ledger = opened(entries_of(counts, first=first), grants)
    assert batch.offsets == offsets
    assert batch.bodies == [b"%d" % offset for offset in offsets]
    assert batch.count == batch.granted == len(offsets)
    attempts = {n: attempt for start, end, attempt, _ in grants for n in range(start, end)}
    for one in batch.messages():
        assert one.body == b"%d" % one.offset
        assert one.attempt == attempts[one.offset]
        assert one.tag == ("even" if one.offset % 2 == 0 else None)
        assert one.batch is batch
    assert not ledger.said


def test_a_group_that_chooses_hands_out_in_the_order_of_its_choice() -> None:
    entries = entries_of([[3, 3], [4]])
    batch, _ = opened(entries, [(8, 9, 1, 1), (2, 5, 1, 1), (0, 1, 2, 2), (9, 10, 1, 1)])
    assert batch.offsets == [8, 2, 3, 4, 0, 9]
    assert [one.offset for one in batch.messages()] == [8, 2, 3, 4, 0, 9]
    assert [one.attempt for one in batch.messages()] == [1, 1, 1, 1, 2, 1]
    assert batch.bodies == [b"8", b"2", b"3", b"4", b"0", b"9"]


def test_what_was_granted_but_not_sent_is_not_made_up() -> None:
    batch, ledger = opened(entries_of([[3]], first=10), [(5, 8, 1, 1), (11, 20, 1, 1)])
    assert batch.offsets == [11, 12]
    assert (batch.count, batch.granted) == (2, 12)
    assert not ledger.said


def test_a_batch_that_is_damaged_is_rejected_and_its_neighbours_are_not() -> None:
    good, wrong = encode_batch([b"a", b"b"]), bytearray(encode_batch([b"c", b"d"]))
    wrong[-8] ^= 1
    entries = entry(0, [good, bytes(wrong), good], [2, 2, 2])
    batch, ledger = opened(entries, [(1, 5, 1, 1)])
    assert batch.offsets == [1, 4]
    assert batch.bodies == [b"b", b"a"]
    ((do, ranges, cause),) = ledger.said
    assert (do, ranges) == ("reject", [(2, 4)])
    assert "checksum" in cause
    assert list(batch.held) == [(1, 2), (4, 5)]


def test_after_a_header_that_is_damaged_the_rest_of_its_entry_is_rejected() -> None:
    good = encode_batch([b"a", b"b"])
    wrong = b"XXXX" + good[4:]
    entries = entry(0, [good, wrong, good], [2, 2, 2]) + entry(6, [good], [2])
    batch, ledger = opened(entries, [(0, 8, 1, 1)])
    assert batch.offsets == [0, 1, 6, 7]
    assert [(do, ranges) for do, ranges, _ in ledger.said] == [("reject", [(2, 6)])]


def test_again_gives_a_part_of_a_batch_once_more() -> None:
    batch, _ = opened(entries_of([[3, 3], [4]]), [(0, 10, 1, 1)])
    part = batch.again([(1, 4), (7, 8)], attempt=2, deliveries=3)
    assert part.offsets == [1, 2, 3, 7]
    assert {(one.attempt, one.deliveries) for one in part.messages()} == {(2, 3)}
    assert (part.count, list(part.held)) == (4, [(1, 4), (7, 8)])


def test_a_filter_finds_what_it_wants_in_a_batch() -> None:
    batch, _ = opened(entries_of([[3, 3], [4]]), [(1, 9, 1, 1)])
    assert batch.wanted_by(Filter(tags_any=("even",))) == [(2, 3), (4, 5), (6, 7), (8, 9)]


async def test_each_part_of_a_batch_is_settled_once() -> None:
    batch, ledger = opened(entries_of([[10]]), [(0, 10, 1, 1)])
    await batch.ack_range(2, 5)
    await batch.settle_range("reject", 4, 6, cause="x")
    await batch.ack()
    await batch.ack()
    assert ledger.said[:3] == [
        ("ack", [(2, 5)], ""), ("reject", [(5, 6)], "x"), ("ack", [(0, 2), (6, 10)], ""),
    ]  # fmt: skip
    with pytest.raises(LeaseLost, match="orders/3 was settled already"):
        await batch.ack_range(3, 4)


async def test_nothing_can_be_said_of_a_lease_that_is_lost() -> None:
    batch, ledger = opened(entries_of([[10]]), [(0, 10, 1, 1)])
    ledger.is_lost = True
    for verb in (batch.ack, batch.retry, batch.reject, batch.release, batch.renew):
        with pytest.raises(LeaseLost, match="lease 7 of group 'g' on orders/0 was lost"):
            await verb()
    with pytest.raises(LeaseLost):
        await batch.ack_soon()
    batch.give_back_soon()
    assert not ledger.said
