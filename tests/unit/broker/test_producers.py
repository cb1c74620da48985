"""Windows of producers: every repeat that a client may send is known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.broker.producers import PRODUCERS_MAX, SEQUENCE_MAX, UNDER_WAY, WINDOW, Producers
from onward.errors import Conflict, InvalidRequest
from onward.message.batch import encode_batch
from onward.message.entry import Draft, Kind, encode_entry, read_entry


def test_a_new_sequence_is_not_known() -> None:
    assert Producers().find(7, 1) is None


@given(st.integers(0, 100), st.permutations(range(WINDOW)))
def test_all_sequences_of_the_window_are_found_in_whatever_order_they_came(
    first: int, order: list[int]
) -> None:
    producers = Producers()
    for number in order:
        producers.record(7, first + number, 10 * number, 100 + number)
    for number in range(WINDOW):
        assert producers.find(7, first + number) == (10 * number, 100 + number)


def test_a_sequence_that_was_skipped_is_new_while_it_is_in_the_window() -> None:
    producers = Producers()
    producers.record(7, 1, 0, 1)
    producers.record(7, 3, 1, 2)
    assert producers.find(7, 2) is None
    producers.record(7, 2 + WINDOW, 2, 3)
    with pytest.raises(Conflict, match="no longer known"):
        producers.find(7, 2)


def test_only_what_has_begun_is_remembered_and_giving_up_leaves_no_trace() -> None:
    producers = Producers()
    assert producers.find(7, 1) is None
    assert len(producers) == 0
    producers.begin(7, 1)
    producers.begin(7, 2)
    assert producers.find(7, 1) == (UNDER_WAY, 0)
    producers.give_up(7, 1)
    assert producers.find(7, 1) is None
    assert producers.find(7, 2) == (UNDER_WAY, 0)
    producers.give_up(7, 2)
    assert len(producers) == 0


def test_giving_up_keeps_what_is_stored() -> None:
    producers = Producers()
    producers.record(7, 1, 10, 100)
    producers.begin(7, 2)
    producers.give_up(7, 2)
    assert producers.find(7, 1) == (10, 100)


def a_producer_with_more_refused_than_its_window_holds(*, saved: bool = False) -> Producers:
    """Of producer 7 the first is stored; what came after it was begun and not stored."""
    producers = Producers()
    producers.record(7, 1, 10, 5)
    later = range(2, WINDOW + 3)
    for sequence in later:
        producers.begin(7, sequence)
    if saved:
        producers = Producers.load(producers.save())
        producers.begin(7, later[-1])
    for sequence in later:
        producers.give_up(7, sequence)
    return producers


@pytest.mark.parametrize("saved", [False, True])
def test_what_is_stored_is_never_new_again_however_many_are_given_up_after_it(saved: bool) -> None:
    producers = a_producer_with_more_refused_than_its_window_holds(saved=saved)
    with pytest.raises(Conflict, match="older than the last"):
        producers.find(7, 1)
    assert producers.find(7, WINDOW + 2) is None


def test_a_sequence_that_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="too large"):
        Producers().find(7, SEQUENCE_MAX + 1)


def test_producers_do_not_know_each_other() -> None:
    producers = Producers()
    producers.record(7, 1, 0, 1)
    assert producers.find(8, 1) is None


def test_what_is_saved_loads_again() -> None:
    producers = Producers()
    for sequence in range(1, 50):
        producers.record(sequence % 3 + 1, sequence, sequence, sequence)
    again = Producers.load(producers.save())
    assert again.save() == producers.save()
    assert again.find(2, 49) == (49, 49)
    assert len(Producers.load(b"")) == 0


def test_recovery_learns_each_batch_of_an_entry() -> None:
    batches = [
        encode_batch([b"a", b"b"], producer_id=7, sequence=1),
        encode_batch([b"c"]),
        encode_batch([b"d"], producer_id=8, sequence=5),
    ]
    draft = Draft(Kind.MESSAGES, 0, 1, 100, 4, batches)
    buffers, _, _ = encode_entry(draft, index=9, term=0, previous_crc=0, synced_index=0)
    joined = b"".join(buffers)
    entry = read_entry(joined, 0, position=0)
    assert entry is not None
    producers = Producers()
    producers.apply(entry, memoryview(joined)[72 : 72 + entry.body_bytes])
    assert producers.find(7, 1) == (100, 9)
    assert producers.find(8, 5) == (103, 9)
    assert len(producers) == 2


def test_only_so_many_producers_are_remembered_and_the_silent_are_forgotten_first() -> None:
    producers = Producers()
    for producer_id in range(1, PRODUCERS_MAX + 1):
        producers.record(producer_id, 1, 0, producer_id)
    producers.record(1, 2, 0, PRODUCERS_MAX + 1)
    producers.record(PRODUCERS_MAX + 1, 1, 0, PRODUCERS_MAX + 2)
    assert len(producers) <= PRODUCERS_MAX
    assert producers.find(1, 2) is not None
    assert producers.find(2, 1) is None
    assert producers.find(PRODUCERS_MAX, 1) is not None
