import heapq
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onward.schedule.order import (
    BEFORE_ALL,
    Moment,
    Order,
    Part,
    Rows,
    TailPart,
    Taken,
    accepted_rows,
    sorted_rows,
)

YEAR_MS = 365 * 86_400_000
END_MS = 2**62
SETTINGS = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

moments = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), unique_by=lambda one: one[1])


def rows_of(some: list[Moment]) -> Rows:
    return Rows([at for at, _ in some], [number for _, number in some])


def tail_of(some: list[Moment]) -> TailPart:
    tail = TailPart(number_start=min((number for _, number in some), default=0))
    tail.add(rows_of(sorted(some, key=lambda one: one[1])))
    return tail


def order_of(parts: list[list[Moment]], *, last: Moment = BEFORE_ALL) -> Order:
    order = Order(last=last)
    for some in parts:
        order.add(tail_of(some))
    return order


def drained(order: Order, *, now_ms: int = END_MS, limit: int = 7) -> list[Moment]:
    found: list[Moment] = []
    while len(taken := order.take(now_ms=now_ms, limit=limit)):
        assert len(taken) <= limit
        found += taken.rows.moments()
    return found


def test_a_past_time_fires_at_the_time_of_its_entry() -> None:
    rows = accepted_rows([-5, 100, 101, -(2**63)], first_number=7, time_ms=100)
    assert rows.moments() == [(100, 7), (100, 8), (101, 9), (100, 10)]


def test_future_times_stay_as_they_are() -> None:
    rows = accepted_rows([2**63 - 1, 101], first_number=0, time_ms=100)
    assert rows.moments() == [(2**63 - 1, 0), (101, 1)]
    assert len(accepted_rows([], first_number=0, time_ms=100)) == 0


@SETTINGS
@given(moments)
def test_rows_are_sorted_by_time_and_then_by_number(some: list[Moment]) -> None:
    assert sorted_rows(rows_of(some)).moments() == sorted(some)


@SETTINGS
@given(moments, st.tuples(st.integers(-1, 41), st.integers(-1, 61)))
def test_rows_are_counted_up_to_a_moment(some: list[Moment], moment: Moment) -> None:
    rows = rows_of(sorted(some))
    assert rows.count_to(moment) == sum(one <= moment for one in some)
    assert rows.count_due(moment[0]) == sum(at <= moment[0] for at, _ in some)


def test_columns_of_different_lengths_are_no_rows() -> None:
    with pytest.raises(AssertionError, match="one length"):
        Rows([1, 2], [1])


def test_rows_show_themselves_in_few_words() -> None:
    assert repr(Rows()) == "<Rows: none>"
    assert repr(Rows([5, 6], [1, 0])) == "<Rows 2: (5, 1) to (6, 0)>"
    assert Rows([5], [1]) == Rows([5], [1])
    assert Rows([5], [1]) != Rows([5], [2])
    assert Rows() != []


@SETTINGS
@given(st.lists(moments, max_size=5), st.integers(0, 45), st.integers(1, 50))
def test_rows_of_all_parts_are_taken_in_order(
    parts: list[list[Moment]], now_ms: int, limit: int
) -> None:
    # The same row in two parts would be a broken promise of who adds parts.
    seen: set[int] = set()
    own = [[one for one in some if not (one[1] in seen or seen.add(one[1]))] for some in parts]
    order = order_of([some for some in own if some])
    expected = sorted(one for some in own for one in some if one[0] <= now_ms)
    assert order.count_due(now_ms) == len(expected)
    assert drained(order, now_ms=now_ms, limit=limit) == expected
    assert order.count_due(now_ms) == 0
    assert order.waiting == sum(map(len, own)) - len(expected)
    assert order.last == (expected[-1] if expected else BEFORE_ALL)


def test_nothing_is_taken_before_its_time() -> None:
    order = order_of([[(1000, 0), (2000, 1)]])
    assert not len(order.take(now_ms=999, limit=10))
    assert order.next_ms() == 1000
    assert order.take(now_ms=1000, limit=10).rows.moments() == [(1000, 0)]
    assert order.next_ms() == 2000
    assert order.take(now_ms=1999, limit=10).rows.moments() == []
    assert order.last == (1000, 0)


def test_an_order_without_parts_has_nothing_to_fire() -> None:
    order = Order()
    assert (order.next_ms(), order.waiting, order.last) == (None, 0, BEFORE_ALL)
    taken = order.take(now_ms=END_MS, limit=1)
    assert (len(taken), list(taken), taken.last) == (0, [], BEFORE_ALL)
    order.give_back(taken)


def test_what_was_taken_says_which_part_gave_what_and_in_which_order() -> None:
    order = order_of([[(1, 0), (4, 1), (6, 2)], [(2, 10), (3, 11), (5, 12)]])
    first, second = order.parts
    taken = order.take(now_ms=END_MS, limit=5)
    assert [(part, rows.moments()) for part, rows in taken.slices] == [
        (first, [(1, 0), (4, 1)]),
        (second, [(2, 10), (3, 11), (5, 12)]),
    ]
    joined = [one for _, rows in taken.slices for one in rows.moments()]
    assert [joined[place] for place in taken.places] == taken.rows.moments()
    assert [(part, rows.moments()) for part, rows in taken] == [
        (first, [(1, 0)]),
        (second, [(2, 10), (3, 11)]),
        (first, [(4, 1)]),
        (second, [(5, 12)]),
    ]


def test_rows_of_one_part_are_one_slice() -> None:
    order = order_of([[(2, 0), (1, 1)]])
    taken = order.take(now_ms=5, limit=5)
    assert [(part, rows.moments()) for part, rows in taken] == [(order.parts[0], [(1, 1), (2, 0)])]
    assert list(taken.places) == [0, 1]


def test_a_firing_that_failed_is_taken_again() -> None:
    order = order_of([[(1, 0), (4, 1), (6, 2)], [(2, 10), (3, 11), (5, 12)]])
    one = order.take(now_ms=END_MS, limit=2)
    two = order.take(now_ms=END_MS, limit=2)
    assert order.waiting == 2
    order.give_back(two)
    assert (order.last, order.waiting, order.next_ms()) == ((2, 10), 4, 3)
    order.give_back(one)
    assert (order.last, order.waiting, order.next_ms()) == (BEFORE_ALL, 6, 1)
    assert drained(order) == [(1, 0), (2, 10), (3, 11), (4, 1), (5, 12), (6, 2)]


def test_what_was_taken_first_cannot_be_given_back_before_what_came_after_it() -> None:
    order = order_of([[(1, 0), (4, 1)]])
    one = order.take(now_ms=END_MS, limit=1)
    order.take(now_ms=END_MS, limit=1)
    with pytest.raises(AssertionError, match="given back before"):
        order.give_back(one)


def test_a_part_that_takes_the_place_of_another_goes_on_where_that_stood() -> None:
    order = order_of([[(1, 0), (4, 1), (6, 2)]])
    (old,) = order.parts
    taken = order.take(now_ms=4, limit=1)
    order.add(tail_of([(1, 0), (4, 1), (6, 2)]))
    order.remove(old)
    assert order.waiting == 2
    order.give_back(taken)
    assert drained(order) == [(1, 0), (4, 1), (6, 2)]


def test_an_order_that_begins_at_a_cursor_skips_what_has_fired() -> None:
    order = order_of([[(1, 0), (4, 1), (4, 3)], [(4, 2), (0, 4)]], last=(4, 1))
    assert order.waiting == 2
    assert drained(order) == [(4, 2), (4, 3)]


def test_parts_below_a_number_are_left_out_and_the_new_tail_stays() -> None:
    order = order_of([[(1, 0), (1, 1)], [(1, 2), (1, 3)], [(1, 4), (1, 6)]])
    fresh = TailPart(number_start=4)
    order.add(fresh)
    first, second, third, _ = order.parts
    assert order.remove_below(4, number_start=2) == [second]
    assert order.parts == [first, third, fresh]
    assert order.remove_below(4) == [first]
    assert order.remove_below(5) == [fresh], "empty, and it begins below"
    assert order.remove_below(7) == [third]
    assert order.waiting == 0


def test_peeking_takes_nothing() -> None:
    order = order_of([[(1, 0), (4, 1)], [(2, 10), (3, 11)]])
    order.take(now_ms=1, limit=9)
    seen = order.peek(after=(2, 10), until_ms=4, limit=5)
    assert seen.rows.moments() == [(3, 11), (4, 1)]
    assert order.peek(after=BEFORE_ALL, until_ms=2, limit=5).rows.moments() == [(2, 10)]
    assert (order.last, order.waiting) == ((1, 0), 3)
    assert drained(order) == [(2, 10), (3, 11), (4, 1)]


def test_a_row_that_comes_in_before_what_was_taken_is_noticed() -> None:
    order = order_of([[(10, 0)], [(20, 1)]])
    order.take(now_ms=10, limit=1)
    first, second = order.parts
    assert isinstance(first, TailPart)
    assert isinstance(second, TailPart)
    with pytest.raises(AssertionError, match="before what was taken"):
        first.add(Rows([9], [2]))
    second.add(Rows([9], [3]))
    with pytest.raises(AssertionError, match="before what was taken"):
        order.take(now_ms=30, limit=1)


class CountingPart(TailPart):
    """A tail that remembers how much was asked of it."""

    def __init__(self, *, number_start: int) -> None:
        super().__init__(number_start=number_start)
        self.given = 0

    def take_until(self, now_ms: int, limit: int) -> Rows:
        rows = super().take_until(now_ms, limit)
        self.given += len(rows)
        return rows


def test_a_crowded_second_is_taken_in_slices_of_hardly_more_than_the_limit() -> None:
    order = Order()
    parts = [CountingPart(number_start=65_536 * number) for number in range(8)]
    for part in parts:
        start = part.number_start
        at_ms = [5_000 + (number * 7919) % 1000 for number in range(16_384)]
        part.add(Rows(at_ms, range(start, start + len(at_ms))))
        order.add(part)
    found: list[Moment] = []
    while len(taken := order.take(now_ms=6_000, limit=10_000)):
        assert sum(part.given for part in parts) <= 2 * 10_000
        for part in parts:
            part.given = 0
        found += taken.rows.moments()
    assert len(found) == 8 * 16_384
    assert found == sorted(found)


def test_all_rows_of_one_millisecond_are_split_by_their_numbers() -> None:
    order = order_of([[(5, number) for number in range(part, 3000, 3)] for part in range(3)])
    assert drained(order, limit=999) == [(5, number) for number in range(3000)]


def test_an_empty_tail_takes_rows_from_its_first_number_on() -> None:
    tail = TailPart(number_start=9)
    assert (tail.number_end, tail.head(), tail.count) == (9, None, 0)
    assert not len(tail.take_until(END_MS, 5))
    tail.add(Rows())
    tail.seek((5, 5))
    assert tail.head() is None
    tail.add(Rows([8], [9]))
    assert (tail.number_end, tail.head(), tail.rows_total) == (10, (8, 9), 1)


def test_a_tail_goes_back_and_forth() -> None:
    tail = tail_of([(5, 0), (3, 1), (9, 2)])
    assert tail.take_until(9, 2).moments() == [(3, 1), (5, 0)]
    tail.seek((3, 1))
    assert (tail.head(), tail.count) == ((5, 0), 2)
    tail.seek(BEFORE_ALL)
    assert (tail.head(), tail.count) == ((3, 1), 3)
    tail.seek((9, 2))
    assert (tail.head(), tail.count, len(tail.take_until(END_MS, 9))) == (None, 0, 0)


@pytest.mark.slow
@settings(SETTINGS, max_examples=15)
@given(st.integers(0, 2**32))
def test_decades_fire_as_a_heap_would_fire_them(seed: int) -> None:
    """Batches come in, parts are exchanged, firings fail, years pass: against a plain heap."""
    Decades(random.Random(seed)).run()


class Decades:
    """An order and the heap that it must agree with, driven by one seed and a clock of its own."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now_ms = 1_800_000_000_000
        self.number = 0
        self.heap: list[Moment] = []
        self.order = Order()
        self.tail = self.new_tail()

    def run(self) -> None:
        begin_ms = self.now_ms
        for _ in range(120):
            self.rng.choice((self.publish, self.publish, self.fire, self.roll, self.merge))()
            assert self.order.waiting == len(self.heap)
            assert self.order.next_ms() == (self.heap[0][0] if self.heap else None)
            self.now_ms += int(10 ** self.rng.uniform(0, 10.5))
        assert self.now_ms > begin_ms
        self.now_ms += 30 * YEAR_MS
        while self.heap:
            self.fire()
        assert self.order.next_ms() is None

    def publish(self) -> None:
        count = self.rng.choice((1, 3, 50, 1500))
        far = self.rng.choice((0, 1, 1000, 3_600_000, YEAR_MS, 10 * YEAR_MS))
        due = [self.now_ms + self.rng.randint(-far // 10, far) for _ in range(count)]
        rows = accepted_rows(due, first_number=self.number, time_ms=self.now_ms)
        self.number += count
        self.tail.add(rows)
        for one in rows.moments():
            heapq.heappush(self.heap, one)

    def fire(self) -> None:
        limit = self.rng.choice((1, 10, 1000, 100_000))
        taken = self.order.take(now_ms=self.now_ms, limit=limit)
        if self.rng.random() < 0.2:
            self.order.give_back(taken)
            return
        assert taken.rows.moments() == self.due(limit)
        self.check_parts(taken)

    def due(self, limit: int) -> list[Moment]:
        found: list[Moment] = []
        while self.heap and self.heap[0][0] <= self.now_ms and len(found) < limit:
            found.append(heapq.heappop(self.heap))
        return found

    def check_parts(self, taken: Taken) -> None:
        stretches = [one for _, rows in taken for one in rows.moments()]
        assert stretches == taken.rows.moments()

    def roll(self) -> None:
        """The tail is full: it stands still, and a new one begins."""
        self.tail = self.new_tail()

    def merge(self) -> None:
        """Some parts that lie beside each other become one, as runs do."""
        old = self.order.parts[:-1][self.rng.randint(0, 3) :][: self.rng.randint(1, 4)]
        if not old:
            return
        merged = TailPart(number_start=old[0].number_start)
        for part in old:
            merged.add(self.all_rows(part))
        self.order.remove_below(old[-1].number_end, number_start=old[0].number_start)
        self.order.parts.insert(0, merged)
        merged.seek(self.order.last)
        self.order.parts.sort(key=lambda part: (part.number_start, part is self.tail))

    def all_rows(self, part: Part) -> Rows:
        part.seek(BEFORE_ALL)
        rows = part.take_until(END_MS, 10**9)
        return rows_of(sorted(rows.moments(), key=lambda one: one[1]))

    def new_tail(self) -> TailPart:
        tail = TailPart(number_start=self.number)
        self.order.add(tail)
        return tail
