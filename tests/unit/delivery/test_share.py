"""A share does what a slow, obvious model does; and rows alone rebuild what is durable."""

from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onward.delivery import share as share_module
from onward.delivery.ranges import Range, count_of, offsets_of, ranges_of
from onward.delivery.share import SavedShare, Share
from onward.delivery.trace import Trace, decode_row, encode_rows

SETTINGS = settings(
    max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
END = 40


@dataclass
class Model:
    """One fact for each offset, looked at one by one."""

    end: int = END
    head: int = 0
    mark: int = 0
    finished: set[int] = field(default_factory=set)
    waiting: dict[int, int] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    uncounted: dict[int, int] = field(default_factory=dict)
    dead: dict[int, str] = field(default_factory=dict)
    ready: set[int] = field(default_factory=set)
    odd_takes: int = 0

    def state(self, offset: int) -> str:
        if offset in self.dead:
            return "dead"
        if offset in self.finished:
            return "finished"
        if offset in self.waiting:
            return "waiting"
        if offset >= self.head:
            return "fresh"
        return "ready" if offset in self.ready else "taken"

    def all_in(self, *states: str) -> list[int]:
        return [offset for offset in range(self.end) if self.state(offset) in states]

    def take(self, limit: int, *, fresh: bool) -> list[int]:
        ready, new = self.all_in("ready"), self.all_in("fresh") if fresh else []
        again = 0
        if fresh and ready:
            rounded_up = self.odd_takes % 2 == 0
            again = min(len(ready), (limit + 1) // 2 if rounded_up else limit // 2)
            self.odd_takes += limit % 2
        new = new[: limit - again]
        if fresh and limit - again > 0:
            self.head = new[-1] + 1 if len(new) == limit - again else max(self.head, self.end)
        again_taken = ready[: limit - len(new)]
        self.ready -= set(again_taken)
        return again_taken + new

    def apply(self, row: Trace) -> None:
        offsets = list(offsets_of(row.ranges))
        unfinished = [one for one in offsets if one not in self.finished]
        moves_mark = row.did in (
            "acked", "filtered", "skipped", "retried", "expired", "lost", "dead",
        )  # fmt: skip
        if moves_mark:
            self.mark = max([self.mark, *(offset + 1 for offset in offsets)])
        match row.did:
            case "acked" | "filtered" | "skipped":
                self.finish(offsets)
            case "dead":
                self.finish(unfinished)
                self.dead |= dict.fromkeys(unfinished, row.cause)
            case "retried" | "expired" | "lost":
                for offset in unfinished:
                    self.fail(offset, row)
                    self.uncounted[offset] = self.uncounted.get(offset, 0) + (not row.counted)
            case "released":
                for offset in unfinished:
                    self.uncounted[offset] = self.uncounted.get(offset, 0) + 1
                self.give_back(unfinished)
            case "redriven":
                self.begin_again([offset for offset in offsets if offset in self.dead])
            case "purged":
                for offset in offsets:
                    self.dead.pop(offset, None)
            case "replayed":
                self.begin_again([offset for offset in offsets if offset in self.finished])
            case "reset":
                self.mark = self.head = row.offset
                self.ready, self.waiting, self.attempts, self.uncounted = set(), {}, {}, {}
                self.finished = set(range(row.offset))
                self.dead = {one: why for one, why in self.dead.items() if one < row.offset}

    def finish(self, offsets: list[int]) -> None:
        self.finished |= set(offsets)
        self.ready -= set(offsets)
        for offset in offsets:
            self.waiting.pop(offset, None)
            self.attempts.pop(offset, None)
            self.uncounted.pop(offset, None)

    def fail(self, offset: int, row: Trace) -> None:
        self.attempts.pop(offset, None)
        self.waiting.pop(offset, None)
        self.ready.discard(offset)
        if row.attempt:
            self.attempts[offset] = row.attempt
        if row.due_at_ms > row.at_ms:
            self.waiting[offset] = row.due_at_ms
        else:
            self.make_ready(offset)

    def begin_again(self, offsets: list[int]) -> None:
        for offset in offsets:
            self.dead.pop(offset, None)
            self.finished.discard(offset)
            self.make_ready(offset)

    def make_ready(self, offset: int) -> None:
        if offset < self.head:
            self.ready.add(offset)

    def give_back(self, offsets: list[int]) -> None:
        for offset in offsets:
            if self.state(offset) in ("taken", "ready"):
                self.ready.add(offset)

    def wake(self, now_ms: int) -> int:
        due = [offset for offset, due_at_ms in self.waiting.items() if due_at_ms <= now_ms]
        for offset in due:
            del self.waiting[offset]
            self.make_ready(offset)
        return len(due)

    def forget_below(self, first_offset: int) -> list[int]:
        found = [one for one in self.all_in("fresh") if one < first_offset]
        self.head = max(self.head, first_offset)
        return found

    def restart(self) -> None:
        self.head = self.mark
        self.ready = {
            offset
            for offset in range(self.mark)
            if offset not in self.finished and offset not in self.waiting
        }
        self.odd_takes = 0


def assert_same(share: Share, model: Model) -> None:
    for offset in range(model.end + 2):
        if offset < model.end:
            assert share.state_of(offset) == model.state(offset), offset
        attempt = 1 + model.attempts.get(offset, 0)
        assert share.attempt_of(offset) == attempt
        deliveries = attempt + model.uncounted.get(offset, 0)
        assert share.grants([(offset, offset + 1)]) == [(offset, offset + 1, attempt, deliveries)]
    unfinished = model.all_in("ready", "waiting", "fresh", "taken")
    assert share.backlog(model.end) == len(unfinished)
    assert share.cursor == min([*unfinished, max(model.mark, model.end)]) or not unfinished
    assert share.mark == model.mark
    assert share.retries == model.waiting
    assert share.attempts == model.attempts
    assert {one: letter.cause for one, letter in share.dead.items()} == model.dead
    assert (share.waiting_count, share.dead_count) == (len(model.waiting), len(model.dead))
    assert set(offsets_of(share.ready)) == model.ready
    assert share.next_due_ms() == min(model.waiting.values(), default=None)


def assert_rows_rebuild(rows: list[Trace], share: Share, *, now_ms: int) -> None:
    folded = Share("t", start=0)
    for body in encode_rows(rows):
        folded.apply(decode_row(body))
    folded.restart()
    # A running share has woken what is due: that is no row, for the clock says it again.
    folded.wake(now_ms)
    share.wake(now_ms)
    assert durable(folded) == durable(share)


def durable(share: Share) -> SavedShare:
    saved = share.save()
    return msgspec.structs.replace(saved, dead=sorted(saved.dead, key=lambda one: one.offset))


def stored(share: Share) -> SavedShare:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(share.save()), type=SavedShare)


OFFSET = st.integers(0, END)
RANGES = st.lists(st.tuples(OFFSET, OFFSET), min_size=1, max_size=3).map(
    lambda pairs: tuple((min(pair), max(pair)) for pair in pairs)
)
ENDINGS = ["acked", "filtered", "skipped", "dead", "redriven", "purged", "replayed", "released"]
FAILURES = ["retried", "expired", "lost"]
STEPS = st.one_of(
    st.tuples(st.just("take"), st.integers(0, 15), st.booleans()),
    st.tuples(st.sampled_from(ENDINGS), RANGES, st.just(0)),
    st.tuples(st.sampled_from(FAILURES), RANGES, st.tuples(st.integers(0, 3), st.integers(0, 20))),
    st.tuples(st.just("give_back"), RANGES, st.just(0)),
    st.tuples(st.just("wake"), st.integers(0, 8), st.just(0)),
    st.tuples(st.just("publish"), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("forget"), OFFSET, st.just(0)),
    st.tuples(st.just("reset"), OFFSET, st.just(0)),
    st.tuples(st.just("restart"), st.just(0), st.just(0)),
    st.tuples(st.just("reload"), st.just(0), st.just(0)),
)


@pytest.mark.slow
@SETTINGS
@given(st.lists(STEPS, min_size=5, max_size=40))
def test_a_share_does_what_the_obvious_model_does(steps: list):
    share, model = Share("t", start=0), Model()
    rows: list[Trace] = []
    now_ms = 0

    def tell(row: Trace) -> None:
        rows.append(row)
        share.apply(row)
        model.apply(row)

    for number, (step, what, extra) in enumerate(steps):
        match step:
            case "take":
                taken = share.take(what, end_offset=model.end, fresh=extra)
                assert list(offsets_of(taken)) == model.take(what, fresh=extra)
                assert taken == ranges_of(offsets_of(taken))
            case "give_back":
                share.give_back(what)
                model.give_back(list(offsets_of(what)))
            case "wake":
                now_ms += what
                assert share.wake(now_ms) == model.wake(now_ms)
            case "publish":
                model.end += what
            case "forget":
                forgotten = share.forget_below(what)
                assert forgotten == ranges_of(model.forget_below(what))
                assert share.forget_below(what) == []
                assert_same(share, model)
                tell(Trace(did="skipped", at_ms=now_ms, ranges=tuple(forgotten)))
            case "reset":
                tell(Trace(did="reset", at_ms=now_ms, offset=what))
            case "restart":
                share.restart()
                model.restart()
            case "reload":
                share = Share.load(stored(share))
                model.restart()
            case _ if step in FAILURES:
                attempt, delay_ms = extra
                due_at_ms = now_ms + delay_ms if delay_ms else 0
                tell(
                    Trace(
                        did=step, at_ms=now_ms, ranges=what, attempt=attempt,
                        due_at_ms=due_at_ms, counted=delay_ms % 3 > 0,
                    )
                )  # fmt: skip
            case _:
                tell(Trace(did=step, at_ms=now_ms, ranges=what, cause=f"step {number}"))
        assert_same(share, model)
    assert_rows_rebuild(rows, share, now_ms=now_ms)


def running(*, taken: int, end_offset: int = 1_000) -> Share:
    share = Share("t", start=0)
    share.take(taken, end_offset=end_offset)
    return share


def row(did: str, *ranges: Range, at_ms: int = 0, attempt: int = 0, due_at_ms: int = 0) -> Trace:
    return Trace(did=did, at_ms=at_ms, ranges=ranges, attempt=attempt, due_at_ms=due_at_ms)


@SETTINGS
@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=40))
def test_no_offset_is_given_twice_while_it_is_taken(steps: list[tuple[int, bool]]):
    share, held = Share("t", start=3), set[int]()
    for limit, goes_back in steps:
        taken = share.take(limit, end_offset=100)
        offsets = set(offsets_of(taken))
        assert len(offsets) == count_of(taken) <= limit
        assert not held & offsets
        held |= offsets
        if goes_back:
            back = set(sorted(held)[::2])
            share.give_back(ranges_of(back))
            held -= back


def test_retries_get_at_most_half_while_fresh_ones_wait():
    share = running(taken=100)
    share.give_back([(0, 100)])
    assert share.take(10, end_offset=1_000) == [(0, 5), (100, 105)]
    assert share.take(10, end_offset=1_000, fresh=False) == [(5, 15)]


def test_ready_and_fresh_ones_take_turns_when_one_is_taken_at_a_time():
    share = running(taken=100)
    share.give_back([(0, 100)])
    taken = [share.take(1, end_offset=1_000) for _ in range(4)]
    assert taken == [[(0, 1)], [(100, 101)], [(1, 2)], [(101, 102)]]


def test_ready_ones_fill_what_fresh_ones_leave():
    share = running(taken=100, end_offset=102)
    share.give_back([(0, 100)])
    assert share.take(10, end_offset=102) == [(0, 8), (100, 102)]
    assert share.take(1, end_offset=102) == [(8, 9)]


def test_a_share_that_is_full_takes_only_what_is_ready(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(share_module, "RETRIES_MAX", 10)
    share = running(taken=20)
    share.apply(row("retried", (0, 10), due_at_ms=5, attempt=1))
    assert share.is_full
    assert share.take(5, end_offset=1_000) == []
    share.wake(5)
    assert share.take(20, end_offset=1_000) == [(0, 10)]
    share.apply(row("acked", (0, 1)))
    assert not share.is_full
    assert share.take(1, end_offset=1_000) == [(20, 21)]


def test_too_many_dead_letters_stop_fresh_ones(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(share_module, "DEAD_MAX", 3)
    share = running(taken=3)
    share.apply(row("dead", (0, 3)))
    assert share.is_full
    assert share.take(5, end_offset=1_000) == []
    share.apply(row("purged", (0, 1)))
    assert share.take(5, end_offset=1_000) == [(3, 8)]


def test_a_group_far_behind_costs_two_numbers_and_whole_ranges_are_one_step():
    huge = 10**15
    share = Share("t", start=0)
    for start in range(0, 1_000 * huge, huge):
        assert share.take(huge, end_offset=10**18) == [(start, start + huge)]
        assert share.grants([(start, start + huge)]) == [(start, start + huge, 1, 1)]
        share.apply(row("acked", (start, start + huge)))
    share.apply(row("skipped", (10**18 + huge, 10**18 + 2 * huge)))
    assert share.backlog(10**18 + 3 * huge) == 2 * huge
    assert share.take(2 * huge, end_offset=10**18 + 3 * huge) == [
        (10**18, 10**18 + huge), (10**18 + 2 * huge, 10**18 + 3 * huge),
    ]  # fmt: skip
    assert len(share.open) == 1
    share.give_back([(10**18, 10**18 + huge)])
    share.apply(row("replayed", (0, huge)))
    share.apply(row("reset", (0, 0)))
    assert share.ready.count == 0


def test_a_few_failed_ones_do_not_make_a_whole_range_slow():
    huge = 10**15
    share = running(taken=huge, end_offset=huge)
    share.apply(row("lost", (7, 9), attempt=2))
    assert share.grants([(0, huge)]) == [(0, 7, 1, 1), (7, 9, 3, 3), (9, huge, 1, 1)]
    share.apply(row("retried", (100, 101), attempt=1, due_at_ms=50))
    share.give_back([(0, huge)])
    assert list(share.ready) == [(0, 100), (101, huge)]
    share.apply(row("acked", (0, huge)))
    assert (share.attempts, share.retries, share.backlog(huge)) == ({}, {}, 0)


def test_attempts_that_differ_split_a_grant():
    share = running(taken=10)
    share.apply(row("lost", (0, 2), attempt=1))
    share.apply(row("lost", (2, 3), attempt=4))
    share.apply(row("lost", (3, 4), attempt=1))
    assert share.grants([(0, 6), (8, 9)]) == [
        (0, 2, 2, 2), (2, 3, 5, 5), (3, 4, 2, 2), (4, 6, 1, 1), (8, 9, 1, 1),
    ]  # fmt: skip


def test_a_release_counts_as_a_delivery_and_not_as_an_attempt():
    share = running(taken=4)
    share.apply(row("released", (0, 2)))
    share.apply(row("released", (0, 1)))
    share.apply(row("lost", (0, 1), attempt=1))
    expected = [(0, 1, 2, 4), (1, 2, 1, 2), (2, 4, 1, 1)]
    assert share.grants([(0, 4)]) == expected
    assert Share.load(stored(share)).grants([(0, 4)]) == expected
    assert [share.state_of(offset) for offset in (0, 1, 2)] == ["ready", "ready", "taken"]


def test_deliveries_are_counted_in_a_limited_number_of_ranges(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(share_module, "RETRIES_MAX", 2)
    share = running(taken=9)
    for start in (0, 2, 4):
        share.apply(row("released", (start, start + 1)))
    assert share.grants([(0, 6)]) == [(0, 1, 1, 2), (1, 2, 1, 1), (2, 3, 1, 2), (3, 6, 1, 1)]
    assert not share.is_full


def test_a_release_of_a_million_messages_costs_one_range():
    share = running(taken=1_000_000)
    share.apply(row("released", (0, 1_000_000)))
    assert share.grants([(0, 1_000_000)]) == [(0, 1_000_000, 1, 2)]
    assert len(share.uncounted) == 1


def test_an_uncounted_retry_keeps_the_count_as_it_was():
    share = running(taken=2)
    share.apply(row("retried", (0, 1), attempt=3))
    share.apply(row("retried", (0, 1), attempt=3, due_at_ms=9))
    share.apply(row("retried", (1, 2), attempt=0, due_at_ms=9))
    assert [share.attempt_of(offset) for offset in (0, 1)] == [4, 1]


def test_a_redriven_dead_letter_starts_its_attempts_again():
    share = running(taken=5)
    share.apply(row("lost", (2, 3), attempt=6))
    share.apply(Trace(did="dead", at_ms=70, ranges=((2, 4),), cause="bad", attempt=7, member="ann"))
    letter = share.dead[2]
    assert (letter.cause, letter.attempts, letter.member, letter.died_at_ms) == (
        "bad",
        7,
        "ann",
        70,
    )
    share.apply(row("redriven", (0, 3), (2, 3)))
    assert (share.state_of(2), share.attempt_of(2), share.state_of(3)) == ("ready", 1, "dead")
    assert share.take(9, end_offset=5) == [(2, 3)]


def test_a_dead_letter_that_is_replayed_is_dead_no_longer():
    share = running(taken=5)
    share.apply(row("dead", (2, 4)))
    share.apply(row("replayed", (3, 5)))
    assert [share.state_of(offset) for offset in (2, 3, 4)] == ["dead", "ready", "taken"]
    assert list(share.dead) == [2]


def test_rows_for_what_is_finished_already_change_nothing():
    share = running(taken=5)
    share.apply(row("acked", (0, 5)))
    before = share.save()
    for did in ("retried", "expired", "lost", "dead", "redriven", "purged", "acked", "praised"):
        share.apply(row(did, (0, 5), attempt=1, due_at_ms=99))
    assert share.save() == before


def test_a_reset_finishes_what_is_before_it_and_begins_again_from_there():
    share = running(taken=10)
    share.apply(row("dead", (1, 2), (6, 7)))
    share.apply(row("retried", (2, 3), (7, 8), attempt=1, due_at_ms=50))
    share.apply(Trace(did="reset", at_ms=0, offset=5))
    assert (share.cursor, share.backlog(10), list(share.dead)) == (5, 5, [1])
    assert (share.retries, share.attempts, share.next_due_ms()) == ({}, {}, None)
    assert share.take(99, end_offset=10) == [(5, 10)]


def test_only_what_nobody_took_yet_is_forgotten_with_the_beginning_of_the_topic():
    share = running(taken=4)
    share.apply(row("retried", (1, 2), attempt=1, due_at_ms=50))
    share.apply(row("dead", (2, 3)))
    share.give_back([(0, 1)])
    assert (share.taken_below(8), share.failed_below(8)) == ([(0, 2), (3, 4)], [(1, 3)])
    assert share.forget_below(8) == [(4, 8)]
    assert share.take(3, end_offset=20) == [(0, 1), (8, 10)]
    assert share.forget_below(8) == []
    assert [share.needs(one, one + 1) for one in range(5)] == [True, True, True, True, True]
    share.apply(row("acked", (3, 4)))
    share.apply(row("purged", (2, 3)))
    assert [share.needs(one, one + 1) for one in range(4)] == [True, True, False, False]


def test_what_is_forgotten_is_named_once_and_can_be_given_back():
    share = running(taken=4)
    forgotten = share.forget_below(6)
    assert (forgotten, share.forget_below(6)) == ([(4, 6)], [])
    assert share.take(2, end_offset=20) == [(6, 8)]
    share.give_back(forgotten)
    assert share.take(2, end_offset=20, fresh=False) == forgotten
    share.apply(row("skipped", *forgotten))
    assert share.unfinished(4, 6) == []


def test_retries_that_come_again_and_again_do_not_fill_the_heap():
    share = running(taken=1)
    for due_at_ms in range(1, 10_000):
        share.apply(row("retried", (0, 1), attempt=1, due_at_ms=due_at_ms + 1_000_000))
    assert len(share._heap) <= 1_003
    assert share.next_due_ms() == 1_000_000 + 9_999


def test_a_copy_shares_nothing_with_the_share_it_was_made_of():
    share = running(taken=10)
    share.apply(row("dead", (1, 2)))
    share.apply(row("retried", (2, 3), attempt=1, due_at_ms=50))
    before = share.save()
    copy = share.copy()
    assert copy.save() == before
    copy.apply(row("acked", (0, 10)))
    copy.apply(row("purged", (0, 10)))
    assert share.save() == before


def test_what_died_with_its_member_is_alone_until_it_ends_otherwise() -> None:
    share = Share("orders", start=0)
    share.take(10, end_offset=10)
    share.apply(Trace(did="lost", at_ms=0, ranges=((2, 5),), attempt=1, due_at_ms=500, alone=1))
    assert share.alone == {2: 1, 3: 1, 4: 1}
    share.apply(Trace(did="acked", at_ms=0, ranges=((2, 3),)))
    share.apply(Trace(did="retried", at_ms=0, ranges=((3, 4),), attempt=2))
    assert share.alone == {4: 1}
    assert Share.load(share.save()).alone == {4: 1}
    share.apply(Trace(did="reset", at_ms=0, offset=0))
    assert share.alone == {}


def test_a_share_that_was_saved_before_there_was_alone_is_read() -> None:
    saved = msgspec.msgpack.encode(("orders", 7, [(1, 2)], {}, {1: 3}, []))
    share = Share.load(msgspec.msgpack.decode(saved, type=SavedShare))
    assert (share.attempts, share.alone) == ({1: 3}, {})
