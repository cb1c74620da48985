"""What a named replay is to write is decided once; offsets are cut into parts and pieces."""

from itertools import pairwise
from pathlib import Path

import pytest

import onward
from onward.errors import Conflict
from onward.pipeline.jobs.replay import pieces_of
from onward.pipeline.ledger import query_name
from onward.pipeline.offsets import merged, parts_of, ranges_of
from onward.pipeline.plans import Book, Plan

WANTED = Plan(topic="orders", to_topic="again", where="offset > 7")


def test_the_first_plan_counts_for_every_try(tmp_path: Path):
    with onward.connect_sync(f"file:{tmp_path / 'log'}") as mq:
        first = Book(mq, "fix-17").decide(WANTED, lambda: [(0, 5), (5, 9)])
        again = Book(mq, "fix-17").decide(WANTED, lambda: [(0, 100)])
        other = Book(mq, "fix-18").decide(WANTED, lambda: [(0, 100)])
        with pytest.raises(Conflict, match="was a replay of 'orders' where offset > 7 to 'again'"):
            Book(mq, "fix-17").decide(Plan(topic="orders", to_topic="else"), lambda: [(0, 1)])
    assert first.pieces == again.pieces == [(0, 5), (5, 9)]
    assert other.pieces == [(0, 100)]


def test_what_is_written_is_known_to_the_next_try(tmp_path: Path):
    with onward.connect_sync(f"file:{tmp_path / 'log'}") as mq:
        book = Book(mq, "fix-17")
        book.decide(WANTED, lambda: [(0, 5), (5, 9)])
        assert book.written() == {}
        book.note((0, 5), rows=3)
        assert Book(mq, "fix-17").written() == {(0, 5): 3}


def test_the_sink_knows_a_piece_for_a_while_after_it_is_noted(tmp_path: Path):
    with onward.connect_sync(f"file:{tmp_path / 'log'}") as mq:
        mine, other = Book(mq, "fix-17"), Book(mq, "fix-17")
        mine.decide(WANTED, lambda: [(0, 5), (5, 9)])
        assert other.written() == {}
        ledger = f"@sink.{query_name('write', mine.write_id((0, 5)))}"
        mq.create_topic(ledger)
        mine.note((0, 5), rows=3)
        assert other.written() == {(0, 5): 3}, "what another try has done since is known"
        assert mq.topic(ledger).expires_at_ms > 0, "who is late at this piece still finds it"


def test_a_run_with_nothing_to_do_leaves_no_plan(tmp_path: Path):
    with onward.connect_sync(f"file:{tmp_path / 'log'}") as mq:
        assert Book(mq, "fix-17").decide(WANTED, list).pieces == []
        assert Book(mq, "fix-17").decide(WANTED, lambda: [(0, 5)]).pieces == [(0, 5)]


@pytest.mark.parametrize("rows_max", [1, 2, 3, 7, 1_000])
def test_pieces_cover_the_range_and_none_is_too_large(rows_max: int):
    sizes = {number: number % 3 for number in range(0, 50, 2)}
    pieces = pieces_of(sizes, first=1_000, end=1_500, width=10, rows_max=rows_max)
    assert pieces[0][0] == 1_000
    assert pieces[-1][1] == 1_500
    assert all(left[1] == right[0] for left, right in pairwise(pieces))
    for first, end in pieces:
        within = [sizes.get((offset - 1_000) // 10, 0) for offset in range(first, end, 10)]
        # A bucket is not cut, however many rows it has.
        assert sum(within) <= max(rows_max, max(within))


def test_parts_hold_every_offset_once_and_no_more_than_allowed():
    ranges = [(0, 10), (12, 13), (20, 45)]
    parts = list(parts_of(ranges, rows_max=7))
    offsets = [one for part in parts for first, end in part for one in range(first, end)]
    assert offsets == [one for first, end in ranges for one in range(first, end)]
    assert all(sum(end - first for first, end in part) <= 7 for part in parts)
    assert list(parts_of([], rows_max=7)) == []


def test_offsets_in_any_order_become_ranges():
    assert ranges_of([]) == []
    assert ranges_of([9, 7, 8, 3, 3]) == [(3, 4), (7, 10)]
    assert merged([(5, 9), (0, 5), (20, 21)]) == [(0, 9), (20, 21)]
