"""Lanes: what a choosy group may hand out next, against a model that looks at everything."""

from __future__ import annotations

from fractions import Fraction
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onward.delivery import lanes as lanes_module
from onward.delivery.lanes import HELD_MAX, Lanes
from onward.delivery.record import GroupRecord

SETTINGS = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

# --- the model ---------------------------------------------------------------------------------


class Model:
    """A dict of offsets that is scanned for each choice; slow, and plain."""

    def __init__(self, record: GroupRecord) -> None:
        self.record = record
        self.states: dict[int, str] = {}
        self.messages: dict[int, tuple[str | None, str, int]] = {}
        self.turn_at: dict[str, Fraction] = {}
        self.present = Fraction(0)
        self.tokens: dict[str, tuple[Fraction, int]] = {}
        self.failed: set[int] = set()
        self.was_again: set[str] = set()
        """Tenants of whom one that had failed was taken last."""

    def add(self, offset: int, key: str | None, tenant: str | None, priority: int) -> None:
        self.messages[offset] = (key, tenant or "", priority)
        self.states[offset] = "ready"

    def take(self, limit: int, now_ms: int) -> list[int]:
        chosen: list[int] = []
        while len(chosen) < limit:
            may = [offset for offset in sorted(self.states) if self.may_be_taken(offset, now_ms)]
            if not may:
                break
            offset = self.choose(may)
            self.states[offset] = "taken"
            key = self.messages[offset][0]
            if key is not None and self.record.key_rate:
                self.tokens[key] = (self.tokens_of(key, now_ms) - 1, now_ms)
            chosen.append(offset)
        return chosen

    def choose(self, may: list[int]) -> int:
        tenants = {self.tenant_of(offset) for offset in may}
        prices = {name: max(self.turn_at.get(name, Fraction(0)), self.present) for name in tenants}
        tenant = min(tenants, key=lambda name: (prices[name], name))
        weight = Fraction((self.record.tenants or {}).get(tenant, 1.0))
        self.present = prices[tenant]
        self.turn_at[tenant] = self.present + 1 / weight
        ours = [offset for offset in may if self.tenant_of(offset) == tenant]
        highest = max(map(self.priority_of, ours))
        best = [offset for offset in ours if self.priority_of(offset) == highest]
        again = [offset for offset in best if offset in self.failed]
        fresh = [offset for offset in best if offset not in self.failed]
        if again and fresh:
            best = fresh if tenant in self.was_again else again
        chosen = min(best)
        (self.was_again.add if chosen in self.failed else self.was_again.discard)(tenant)
        return chosen

    def finish(self, offset: int) -> None:
        del self.states[offset]
        self.failed.discard(offset)
        if not any(self.tenant_of(one) == self.tenant_of(offset) for one in self.states):
            self.was_again.discard(self.tenant_of(offset))

    def tenant_of(self, offset: int) -> str:
        return "" if self.record.tenants is None else self.messages[offset][1]

    def priority_of(self, offset: int) -> int:
        return self.messages[offset][2] if self.record.priorities else 0

    def may_be_taken(self, offset: int, now_ms: int) -> bool:
        key = self.messages[offset][0]
        if self.states[offset] != "ready":
            return False
        if key is None:
            return True
        siblings = {o: state for o, state in self.states.items() if self.messages[o][0] == key}
        if self.record.mode == "ordered" and (
            "taken" in siblings.values() or min(siblings) != offset
        ):
            return False
        limit, taken = self.record.key_concurrency, list(siblings.values()).count("taken")
        if limit and taken >= limit:
            return False
        return not self.record.key_rate or self.tokens_of(key, now_ms) >= 1

    def tokens_of(self, key: str, now_ms: int) -> Fraction:
        rate = Fraction(self.record.key_rate)
        burst = max(Fraction(1), rate)
        tokens, at_ms = self.tokens.get(key, (burst, now_ms))
        return min(burst, tokens + rate * (now_ms - at_ms) / 1_000)


# --- random lives ------------------------------------------------------------------------------

# Numbers whose inverses are exact in nanoseconds, so that model and lanes agree to the millisecond.
RATES = [0.5, 1, 2, 4, 10]
WEIGHTS = [0.25, 0.5, 1.0, 2.0, 4.0]

record_settings = st.fixed_dictionaries(
    {},
    optional={
        "mode": st.just("ordered"),
        "priorities": st.just(True),
        "tenants": st.dictionaries(st.sampled_from(["", "x", "y"]), st.sampled_from(WEIGHTS)),
        "key_rate": st.sampled_from(RATES),
        "key_concurrency": st.integers(1, 3),
    },
)
messages = st.tuples(
    st.sampled_from([None, "a", "b", "c"]), st.sampled_from([None, "x", "y", "z"]),
    st.integers(0, 3),
)  # fmt: skip
steps = st.one_of(
    st.tuples(st.just("add"), st.lists(messages, min_size=1, max_size=8)),
    st.tuples(st.just("take"), st.integers(0, 6)),
    st.tuples(st.sampled_from(["finish", "park", "again"]), st.integers(0, 2**32)),
    st.tuples(st.sampled_from(["skip", "replay"]), st.integers(0, 2**32)),
    st.tuples(st.just("pass"), st.sampled_from([1, 100, 250, 1_000, 5_000])),
)


class Life:
    """Lanes and their model, living through the same steps."""

    def __init__(self, record: GroupRecord) -> None:
        self.lanes = Lanes(record)
        self.model = Model(record)
        self.now_ms = 1_000
        self.next_offset = 0

    def live(self, step: tuple[str, object]) -> None:
        what, how = step
        if what == "add":
            assert isinstance(how, list)
            self.add(how)
        else:
            assert isinstance(how, int)
            if what == "pass":
                self.now_ms += how
            elif what == "take":
                self.take(how)
            elif what == "replay":
                self.replay(how)
            else:
                self.settle(what, how)
        self.compare()

    def add(self, new: list[tuple[str | None, str | None, int]]) -> None:
        offsets = list(range(self.next_offset, self.next_offset + len(new)))
        self.next_offset += len(new)
        self.put(offsets, new)

    def replay(self, pick: int) -> None:
        """Add an offset again that was finished."""
        finished = sorted(self.model.messages.keys() - self.model.states.keys())
        if finished:
            offset = finished[pick % len(finished)]
            self.put([offset], [self.model.messages[offset]])

    def put(self, offsets: list[int], new: list[tuple[str | None, str | None, int]]) -> None:
        self.lanes.add(
            offsets,
            keys=[key for key, _, _ in new],
            tenants=[tenant for _, tenant, _ in new],
            priorities=[priority for _, _, priority in new],
        )
        for offset, message in zip(offsets, new, strict=True):
            self.model.add(offset, *message)

    def take(self, limit: int) -> list[int]:
        upper = self.lanes.wake(self.now_ms)
        expected = self.model.take(limit, self.now_ms)
        assert self.lanes.take(limit, now_ms=self.now_ms) == expected
        assert bool(expected) <= bool(upper)
        if len(expected) < limit:
            assert self.lanes.ready_count == 0
            self.check_next_time()
        return expected

    def check_next_time(self) -> None:
        """Nothing comes before the time that was told, unless something changes."""
        at_ms = self.lanes.next_ready_ms(self.now_ms)
        last_ms = self.now_ms + 10_000 if at_ms is None else at_ms - 1
        early = [o for o in self.model.states if self.model.may_be_taken(o, last_ms)]
        assert not early, f"{early} may be taken before {at_ms}"

    def settle(self, what: str, pick: int) -> None:
        """Do something to one or a few offsets that are in a state for it."""
        states = {"park": ("taken", "ready"), "skip": ("ready",)}.get(what, ("taken", "parked"))
        able = [o for o, state in sorted(self.model.states.items()) if state in states]
        if not able:
            return
        start = pick % len(able)
        offsets = able[start : start + 1 + pick // 1_000 % 3]
        for offset in offsets:
            if what in ("finish", "skip"):
                self.model.finish(offset)
                continue
            if what == "park":
                self.model.failed.add(offset)
            self.model.states[offset] = {"park": "parked", "again": "ready"}[what]
        if what == "again" and pick % 2:
            self.put(offsets, [self.model.messages[offset] for offset in offsets])
        elif what in ("finish", "skip"):
            self.lanes.finish(offsets)
        elif what == "park":
            self.lanes.park(offsets)
        else:
            self.lanes.again(offsets)

    def compare(self) -> None:
        assert self.lanes.count == len(self.model.states)
        assert all(self.lanes.knows(offset) for offset in self.model.states)
        assert self.lanes.room == HELD_MAX - self.lanes.count

    def end(self) -> None:
        """Everything that is held can be taken and finished in the end."""
        for _ in range(10_000):
            if not self.model.states:
                break
            away = [o for o, state in self.model.states.items() if state != "ready"]
            for offset in away:
                self.model.states[offset] = "ready"
            self.lanes.again(away)
            taken = self.take(5)
            for offset in taken:
                self.model.finish(offset)
            self.lanes.finish(taken)
            self.now_ms += 0 if taken else 1_000
        assert self.lanes.count == self.lanes.ready_count == 0
        assert not self.lanes._keys
        assert self.lanes.take(10, now_ms=self.now_ms) == []
        assert not self.lanes._tenants


def live(asked: dict[str, object], life_steps: list[tuple[str, object]]) -> None:
    life = Life(GroupRecord("g", **asked).check())  # type: ignore[arg-type]
    for step in life_steps:
        life.live(step)
    life.end()


@pytest.mark.slow
@settings(SETTINGS, max_examples=300)
@given(record_settings, st.lists(steps, min_size=12, max_size=60))
def test_any_combination_chooses_what_the_model_chooses(
    asked: dict[str, object], life_steps: list[tuple[str, object]]
) -> None:
    live(asked, life_steps)


@pytest.mark.slow
@settings(SETTINGS, max_examples=150)
@given(record_settings, st.lists(steps, min_size=12, max_size=60))
def test_sweeping_at_every_chance_changes_no_choice(
    asked: dict[str, object], life_steps: list[tuple[str, object]]
) -> None:
    with patch.object(lanes_module, "_STALE_MIN", -HELD_MAX):
        live(asked, life_steps)


EVERY_FEATURE = [
    {"mode": "ordered"},
    {"priorities": True},
    {"tenants": {"x": 4.0}},
    {"key_rate": 2},
    {"key_concurrency": 2},
    {"mode": "ordered", "priorities": True, "tenants": {}, "key_rate": 0.5, "key_concurrency": 1},
]


@pytest.mark.parametrize("asked", EVERY_FEATURE, ids=lambda asked: "-".join(asked))
@settings(SETTINGS, max_examples=60)
@given(life_steps=st.lists(steps, min_size=12, max_size=60))
def test_each_feature_chooses_what_the_model_chooses(
    asked: dict[str, object], life_steps: list[tuple[str, object]]
) -> None:
    live(asked, life_steps)


# --- each promise, by example ------------------------------------------------------------------


def lanes_with(**asked: object) -> Lanes:
    return Lanes(GroupRecord("g", **asked).check())  # type: ignore[arg-type]


def add(
    lanes: Lanes, *offsets: int, keys: str = "", tenants: str = "", priorities: str = ""
) -> None:
    """Add offsets; a dash is a message without one."""
    lanes.add(
        offsets,
        keys=[None if key == "-" else key for key in keys] or None,
        tenants=[None if tenant == "-" else tenant for tenant in tenants] or None,
        priorities=[int(priority) for priority in priorities] or None,
    )


def test_a_key_that_failed_parks_alone_while_others_go_on() -> None:
    lanes = lanes_with(mode="ordered")
    add(lanes, 0, 1, 2, 3, 4, keys="aabb-")
    assert lanes.take(10, now_ms=0) == [0, 2, 4]
    lanes.park([0])
    lanes.finish([2])
    assert lanes.take(10, now_ms=0) == [3]
    lanes.again([0])
    assert lanes.take(10, now_ms=0) == [0]
    lanes.finish([0])
    assert lanes.take(10, now_ms=0) == [1]


def test_messages_without_a_key_are_not_held_back_by_anything() -> None:
    lanes = lanes_with(mode="ordered", key_rate=1, key_concurrency=1)
    add(lanes, *range(100), keys="-" * 100)
    assert lanes.take(1_000, now_ms=0) == list(range(100))


def test_a_message_that_comes_again_goes_before_later_ones_of_its_key() -> None:
    lanes = lanes_with(mode="ordered")
    add(lanes, 5, 6, keys="aa")
    assert lanes.take(1, now_ms=0) == [5]
    add(lanes, 7, keys="a")
    add(lanes, 5, keys="a")
    assert lanes.take(9, now_ms=0) == [5]


def test_an_earlier_message_that_is_replayed_goes_before_one_that_nobody_took() -> None:
    lanes = lanes_with(mode="ordered")
    add(lanes, 5, keys="a")
    add(lanes, 3, keys="a")
    assert lanes.ready_count == 1
    assert lanes.take(9, now_ms=0) == [3]
    lanes.finish([3])
    assert lanes.take(9, now_ms=0) == [5]


def test_an_earlier_message_that_is_replayed_waits_for_the_one_that_is_taken() -> None:
    lanes = lanes_with(mode="ordered")
    add(lanes, 5, keys="a")
    assert lanes.take(9, now_ms=0) == [5]
    add(lanes, 3, keys="a")
    assert lanes.take(9, now_ms=0) == []
    lanes.park([5])
    assert lanes.take(9, now_ms=0) == [3]
    lanes.again([5])
    assert lanes.take(9, now_ms=0) == []
    lanes.finish([3])
    assert lanes.take(9, now_ms=0) == [5]


def test_what_waits_for_a_retry_when_it_is_read_keeps_its_key_waiting() -> None:
    lanes = lanes_with(mode="ordered")
    add(lanes, 3, 5, keys="aa")
    lanes.park([3, 5])
    add(lanes, 4, 6, 7, keys="aab")
    assert lanes.take(9, now_ms=0) == [7]
    lanes.again([3])
    assert lanes.take(9, now_ms=0) == [3]
    lanes.finish([3])
    assert lanes.take(9, now_ms=0) == [4]
    lanes.finish([4])
    assert lanes.take(9, now_ms=0) == []
    lanes.again([5])
    assert lanes.take(9, now_ms=0) == [5]


def test_dropping_all_tells_what_nobody_had_taken_and_no_retry_waits_for() -> None:
    lanes = lanes_with(mode="ordered")
    add(lanes, *range(5), keys="aabbc")
    assert lanes.take(2, now_ms=0) == [0, 2]
    lanes.park([2])
    assert lanes.drop_all() == [1, 3, 4]
    assert lanes.count == lanes.ready_count == 0


def test_higher_priorities_come_first_and_equal_ones_in_order() -> None:
    lanes = lanes_with(priorities=True)
    add(lanes, *range(6), priorities="019019")
    assert lanes.take(6, now_ms=0) == [2, 5, 1, 4, 0, 3]


EVERY_RULE = [
    {"mode": "ordered"}, {"priorities": True}, {"tenants": {}}, {"key_rate": 9.0},
    {"key_concurrency": 1},
]  # fmt: skip


@pytest.mark.parametrize("rule", EVERY_RULE, ids=lambda rule: next(iter(rule)))
def test_fresh_messages_take_turns_with_those_that_failed(rule: dict[str, object]) -> None:
    lanes = lanes_with(**rule)
    add(lanes, *range(6), keys="abcdef")
    failed = lanes.take(6, now_ms=0)
    lanes.park(failed)
    add(lanes, 6, 7, 8, keys="ghi")
    lanes.again(failed)
    assert lanes.take(9, now_ms=2_000) == [0, 6, 1, 7, 2, 8, 3, 4, 5]


def test_what_failed_before_it_was_read_takes_turns_as_well() -> None:
    lanes = lanes_with(tenants={})
    lanes.add([0, 1, 2, 3], keys=None, tenants=None, priorities=None, failed=[0, 1])
    assert lanes.take(4, now_ms=0) == [0, 2, 1, 3]


def test_a_higher_priority_comes_first_whether_it_failed_or_not() -> None:
    lanes = lanes_with(priorities=True)
    add(lanes, 0, 1, priorities="15")
    lanes.take(2, now_ms=0)
    lanes.park([0, 1])
    add(lanes, 2, 3, priorities="91")
    lanes.again([0, 1])
    assert lanes.take(4, now_ms=0) == [2, 1, 3, 0]


@pytest.mark.parametrize(
    ("priorities", "taken", "readable"),
    [("111", [0, 2, 1], 3), ("191", [1, 0, 2], 1), ("119", [2, 0, 1], 1), ("911", [0, 2, 1], 3)],
)
def test_what_comes_after_a_higher_priority_is_not_read_before_it(
    priorities: str, taken: list[int], readable: int
) -> None:
    lanes = lanes_with(priorities=True)
    add(lanes, 0, 1, 2, priorities=priorities)
    lanes.take(3, now_ms=0)
    assert lanes.in_order_of_offsets(taken) == readable


def test_a_lower_one_in_the_middle_does_not_hide_a_higher_one_before_it() -> None:
    lanes = lanes_with(priorities=True)
    add(lanes, 1, 2, 5, priorities="191")
    lanes.take(3, now_ms=0)
    assert lanes.in_order_of_offsets([2, 5, 1]) == 2


def test_what_somebody_has_already_counts_for_its_key() -> None:
    lanes = lanes_with(key_concurrency=1)
    add(lanes, 0, keys="a")
    lanes.take_over([0])
    add(lanes, 1, keys="a")
    assert lanes.take(9, now_ms=0) == []
    lanes.finish([0])
    assert lanes.take(9, now_ms=0) == [1]


def test_what_keys_used_of_their_rates_outlives_the_lanes_where_it_is_kept() -> None:
    buckets: dict[str, int] = {}
    record = GroupRecord("g", key_rate=0.5)
    for expected, now_ms in [([0], 1_000), ([], 2_000), ([0], 3_000)]:
        lanes = Lanes(record, buckets=buckets)
        add(lanes, 0, keys="a")
        assert lanes.take(1, now_ms=now_ms) == expected
        lanes.drop_all()


def test_a_tenant_that_floods_does_not_delay_the_others() -> None:
    lanes = lanes_with(tenants={})
    add(lanes, *range(1_000), tenants="x" * 1_000)
    assert len(lanes.take(500, now_ms=0)) == 500
    add(lanes, 1_000, 1_001, tenants="yz")
    assert {1_000, 1_001} <= set(lanes.take(3, now_ms=0))


def test_tenants_share_by_their_weights() -> None:
    lanes = lanes_with(tenants={"x": 3.0, "y": 1.0})
    add(lanes, *range(800), tenants="xy" * 400)
    chosen = lanes.take(400, now_ms=0)
    assert sum(offset % 2 == 0 for offset in chosen) == 300


def test_a_tenant_that_was_away_gets_no_credit_for_the_past() -> None:
    lanes = lanes_with(tenants={})
    add(lanes, 0, *range(10, 110), tenants="y" + "x" * 100)
    assert len(lanes.take(51, now_ms=0)) == 51
    lanes.finish([0])
    add(lanes, *range(200, 250), tenants="y" * 50)
    chosen = lanes.take(20, now_ms=0)
    assert sum(offset >= 200 for offset in chosen) == 10


def test_a_tenant_of_small_weight_gains_nothing_by_coming_and_going() -> None:
    lanes = lanes_with(tenants={"y": 0.01})
    add(lanes, *range(1_000), tenants="x" * 1_000)
    turns_of_y = 0
    for offset in range(1_000, 1_100):
        add(lanes, offset, tenants="y") if not turns_of_y or offset % 2 else None
        chosen = lanes.take(2, now_ms=0)
        turns_of_y += sum(one >= 1_000 for one in chosen)
        lanes.finish(chosen)
    assert turns_of_y <= 3


@pytest.mark.parametrize("weight", [1e-300, 5e-324, 1e6])
def test_the_strangest_weights_and_rates_still_let_everything_through(weight: float) -> None:
    lanes = lanes_with(tenants={"x": weight}, key_rate=weight)
    add(lanes, 0, 1, keys="ab", tenants="xy")
    assert sorted(lanes.take(9, now_ms=0)) == [0, 1]


def test_a_key_has_no_more_taken_than_its_limit() -> None:
    lanes = lanes_with(key_concurrency=2)
    add(lanes, *range(5), keys="aaaab")
    assert lanes.take(9, now_ms=0) == [0, 1, 4]
    assert lanes.ready_count == 0
    lanes.finish([1])
    assert lanes.take(9, now_ms=0) == [2]
    lanes.park([0])
    assert lanes.take(9, now_ms=0) == [3]
    lanes.again([0])
    assert lanes.take(9, now_ms=0) == []
    lanes.finish([2])
    assert lanes.take(9, now_ms=0) == [0]


def test_a_key_that_opens_is_offered_to_all_tenants_that_wait_for_it() -> None:
    lanes = lanes_with(tenants={}, key_concurrency=1)
    add(lanes, 0, 1, keys="a-", tenants="xy")
    assert lanes.take(9, now_ms=0) == [0, 1]
    add(lanes, 2, 3, keys="aa", tenants="yz")
    assert lanes.take(9, now_ms=0) == []
    lanes.finish([0])
    # It is the turn of z, although y has waited longer: y had one of another key.
    assert lanes.take(9, now_ms=0) == [3]


def test_an_open_key_goes_on_with_the_tenant_whose_turn_it_is() -> None:
    lanes = lanes_with(tenants={"x": 4.0}, key_rate=2)
    add(lanes, 0, 1, keys="aa", tenants="yy")
    assert lanes.take(2, now_ms=0) == [0, 1]
    for offset, tenant in enumerate("yyxx", start=2):
        add(lanes, offset, keys="a", tenants=tenant)
        assert lanes.take(9, now_ms=0) == []
    assert lanes.take(9, now_ms=1_000) == [4, 5]


def test_a_key_goes_no_faster_than_its_rate_after_a_burst() -> None:
    lanes = lanes_with(key_rate=2)
    add(lanes, *range(6), keys="aaaaab")
    assert lanes.take(9, now_ms=0) == [0, 1, 5]
    assert lanes.next_ready_ms(0) == 500
    assert lanes.take(9, now_ms=499) == []
    assert lanes.wake(500) == 1
    assert lanes.take(9, now_ms=500) == [2]
    assert lanes.take(9, now_ms=60_000) == [3, 4]
    assert lanes.next_ready_ms(60_000) is None


def test_a_key_that_was_finished_has_not_its_bucket_full_again() -> None:
    lanes = lanes_with(key_rate=1)
    add(lanes, 0, keys="a")
    assert lanes.take(9, now_ms=0) == [0]
    lanes.finish([0])
    add(lanes, 1, keys="a")
    assert lanes.take(9, now_ms=999) == []
    assert lanes.next_ready_ms(999) == 1_000
    lanes.drop_all()
    assert (lanes.count, lanes.next_ready_ms(999)) == (0, None)
    add(lanes, 1, keys="a")
    assert lanes.take(9, now_ms=999) == []
    assert lanes.take(9, now_ms=1_000) == [1]


def test_a_clock_that_is_set_back_does_not_make_keys_wait_for_it() -> None:
    lanes = lanes_with(key_rate=1)
    add(lanes, 0, 1, 2, keys="aab")
    assert lanes.take(9, now_ms=3_600_000) == [0, 2]
    lanes.finish([2])
    assert lanes.next_ready_ms(500) == 1_500
    add(lanes, 3, keys="b")
    assert lanes.take(9, now_ms=1_499) == []
    assert lanes.take(9, now_ms=1_500) == [1, 3]


def test_what_a_rate_lets_through_now_is_ready_when_the_time_is_asked_for() -> None:
    lanes = lanes_with(key_rate=1)
    add(lanes, 0, 1, keys="aa")
    assert lanes.take(9, now_ms=0) == [0]
    assert lanes.ready_count == 0
    assert lanes.next_ready_ms(1_000) == 1_000
    assert lanes.ready_count == 1
    assert lanes.next_ready_ms(1_000) is None


def test_the_held_offsets_of_ranges_are_found_however_long_the_ranges_are() -> None:
    lanes = lanes_with(mode="ordered")
    add(lanes, 3, 5, 8, keys="abc")
    assert lanes.held_in([(0, 4), (5, 6)]) == [3, 5]
    assert sorted(lanes.held_in([(4, 1_000_000_000)])) == [5, 8]
    assert lanes.held_in([(9, 20)]) == lanes.held_in([]) == []


def test_what_is_not_held_may_be_told_of_in_vain() -> None:
    lanes = lanes_with(mode="ordered")
    add(lanes, 0, keys="a")
    for tell in (lanes.finish, lanes.park, lanes.again):
        tell([7])
    lanes.again([0])
    assert lanes.ready_count == 1
    assert lanes.take(9, now_ms=0) == [0]


def test_columns_that_the_group_did_not_ask_for_are_not_looked_at() -> None:
    lanes = lanes_with(priorities=True)
    add(lanes, 0, 1, keys="aa", tenants="xy", priorities="01")
    assert lanes.take(9, now_ms=0) == [1, 0]


# --- bounds ------------------------------------------------------------------------------------


def test_idle_tenants_and_keys_are_forgotten_beyond_a_limit() -> None:
    lanes = lanes_with(tenants={}, key_rate=0.001)
    with patch.object(lanes_module, "REMEMBERED_MAX", 100):
        for offset in range(1_000):
            name = str(offset)
            lanes.add([offset], keys=[name], tenants=[name], priorities=None)
            assert lanes.take(1, now_ms=offset) == [offset]
            lanes.finish([offset])
    assert len(lanes._idle_turns) <= 100
    assert len(lanes._idle_buckets) <= 100
    # The last key is among those whose bucket is emptiest.
    assert "999" in lanes._idle_buckets


def test_a_line_whose_messages_are_skipped_for_ever_does_not_grow() -> None:
    lanes = lanes_with(priorities=True)
    add(lanes, 0, priorities="9")
    for offset in range(1, 20_000):
        add(lanes, offset, priorities="0")
        lanes.finish([offset])
    assert sum(len(tenant.fresh) for tenant in lanes._tenants.values()) < 5_000
    assert lanes.take(9, now_ms=0) == [0]


def test_a_key_of_more_tenants_than_are_offered_it_at_once_is_still_emptied() -> None:
    lanes = lanes_with(tenants={}, key_concurrency=3)
    tenants = [str(number % 50) for number in range(500)]
    with patch.object(lanes_module, "RELEASED_MAX", 2):
        lanes.add(range(500), keys=["a"] * 500, tenants=tenants, priorities=None)
        got: list[int] = []
        while chosen := lanes.take(10, now_ms=0):
            assert len(chosen) == min(3, 500 - len(got))
            got += chosen
            lanes.finish(chosen)
    assert sorted(got) == list(range(500))


def test_a_full_house_of_one_key_is_worked_off_one_by_one() -> None:
    lanes = lanes_with(mode="ordered")
    lanes.add(range(HELD_MAX), keys=["a"] * HELD_MAX, tenants=None, priorities=None)
    assert lanes.room == 0
    for offset in range(1_000):
        assert lanes.take(100, now_ms=0) == [offset]
        lanes.finish([offset])
    assert lanes.room == 1_000


# --- who comes first of a key --------------------------------------------------------------------


def firsts(lanes: Lanes, count: int) -> list[int | None]:
    return [lanes.first_of_key(offset) for offset in range(count)]


def test_all_of_an_ordered_key_wait_for_the_one_in_line_taken_or_parked() -> None:
    lanes = lanes_with(mode="ordered")
    lanes.add(range(5), keys=["a", "b", "a", "a", None], tenants=None, priorities=None)
    assert firsts(lanes, 6) == [0, 1, 0, 0, 4, None]
    lanes.take(10, now_ms=0)
    lanes.park([0])
    assert firsts(lanes, 4) == [0, 1, 0, 0]
    lanes.finish([0])
    assert firsts(lanes, 4) == [None, 1, 2, 2]


def test_one_that_comes_back_waits_for_a_later_one_that_is_taken() -> None:
    lanes = lanes_with(mode="ordered")
    lanes.add([5], keys=["a"], tenants=None, priorities=None)
    lanes.take(1, now_ms=0)
    lanes.add([3], keys=["a"], tenants=None, priorities=None)
    assert lanes.first_of_key(3) == 5


def test_the_lowest_comes_first_of_a_key_that_waits_for_its_rate() -> None:
    lanes = lanes_with(mode="ordered", key_rate=1)
    lanes.add(range(4), keys=["a"] * 4, tenants=None, priorities=None)
    lanes.finish(lanes.take(1, now_ms=0))
    assert lanes.take(1, now_ms=0) == []
    assert firsts(lanes, 4) == [None, 1, 1, 1]
    lanes.finish([1])
    assert firsts(lanes, 4) == [None, None, 2, 2]


def test_without_order_nothing_waits_for_another_one_of_its_key() -> None:
    lanes = lanes_with(key_concurrency=1)
    lanes.add(range(2), keys=["a", "a"], tenants=None, priorities=None)
    lanes.take(2, now_ms=0)
    assert firsts(lanes, 2) == [0, 1]
