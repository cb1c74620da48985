"""Leases: only the holder settles, only what it holds, and each ends once."""

from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onward.delivery.lease import Lease, Leases
from onward.delivery.ranges import offsets_of, ranges_of
from onward.delivery.share import Share

SETTINGS = settings(
    max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
SHARES = {topic: Share(topic, start=0) for topic in ("a", "b")}


@dataclass
class Held:
    member: str
    topic: str
    offsets: set[int]
    expires_at_ms: int


MEMBER = st.sampled_from(["ann", "bob"])
TOPIC = st.sampled_from(["a", "b"])
NUMBER = st.integers(1, 12)
STEPS = st.one_of(
    st.tuples(st.just("grant"), MEMBER, TOPIC, NUMBER),
    st.tuples(st.just("settle"), MEMBER, NUMBER, st.tuples(NUMBER, NUMBER)),
    st.tuples(st.just("renew"), MEMBER, NUMBER, NUMBER),
    st.tuples(st.just("expire"), st.none(), st.none(), NUMBER),
    st.tuples(st.just("drop_member"), MEMBER, st.none(), st.none()),
    st.tuples(st.just("drop_topic"), st.none(), TOPIC, st.none()),
)


def ids(leases: list[Lease]) -> list[int]:
    return [lease.id for lease in leases]


@SETTINGS
@given(st.lists(STEPS, max_size=40))
def test_leases_are_what_a_plain_table_of_them_would_be(steps: list):
    leases = Leases()
    table: dict[int, Held] = {}
    now_ms, next_id = 0, 1
    for step, member, what, number in steps:
        match step:
            case "grant":
                grants = [(0, number, 1, 1), (20, 20 + number, 2, 2)]
                lease = leases.grant(member, SHARES[what], grants, now_ms=now_ms, lease_ms=10)
                assert (lease.id, lease.leased_at_ms) == (next_id, now_ms)
                offsets = {*range(number), *range(20, 20 + number)}
                table[next_id] = Held(member, what, offsets, now_ms + 10)
                next_id += 1
            case "settle":
                held = table.get(what)
                mine = held.offsets if held and held.member == member else set()
                asked = set(range(*number))
                settled = leases.settle(what, *number, member=member)
                assert list(offsets_of(settled)) == sorted(mine & asked)
                mine -= asked
            case "renew":
                held = table.get(what)
                is_mine = held is not None and held.member == member
                assert is_mine == leases.renew(what, member=member, now_ms=now_ms, lease_ms=number)
                if held is not None and is_mine:
                    held.expires_at_ms = now_ms + number
            case "expire":
                now_ms += number
                due = [key for key, held in table.items() if held.expires_at_ms <= now_ms]
                ended = leases.expire(now_ms)
                assert sorted(ids(ended)) == due
                assert [one.expires_at_ms for one in ended] == sorted(
                    table[key].expires_at_ms for key in due
                )
                for lease in ended:
                    assert set(offsets_of(lease.ranges)) == table.pop(lease.id).offsets
            case "drop_member":
                found = [key for key, held in table.items() if held.member == member]
                assert ids(leases.of_member(member)) == found
                assert ids(leases.drop_member(member)) == found
                table = {key: held for key, held in table.items() if held.member != member}
            case "drop_topic":
                found = [key for key, held in table.items() if held.topic == what]
                assert ids(leases.drop_topic(what)) == found
                table = {key: held for key, held in table.items() if held.topic != what}
        table = {key: held for key, held in table.items() if held.offsets}
        assert_same(leases, table)


def assert_same(leases: Leases, table: dict[int, Held]) -> None:
    assert len(leases) == len(table)
    assert leases.count == sum(len(held.offsets) for held in table.values())
    for topic in SHARES:
        of_topic = [held for held in table.values() if held.topic == topic]
        assert leases.count_in(topic) == sum(len(held.offsets) for held in of_topic)
        holders = [key for key, held in table.items() if held.topic == topic and 2 in held.offsets]
        holder = leases.holder_of(topic, 2)
        assert (holder.id if holder else None) == (holders[0] if holders else None)
    for key, held in table.items():
        lease = leases.find(key)
        assert lease is not None
        assert list(lease.ranges) == ranges_of(held.offsets)
        assert lease.expires_at_ms == held.expires_at_ms
    ends = [held.expires_at_ms for held in table.values()]
    assert leases.next_expiry_ms() == min(ends, default=None)


def test_the_end_of_a_lease_that_is_renewed_moves_on():
    leases = Leases()
    lease = leases.grant("ann", SHARES["a"], [(0, 5, 1, 1)], now_ms=0, lease_ms=100)
    for now_ms in range(50, 1_000, 50):
        assert leases.expire(now_ms) == []
        assert leases.renew(lease.id, member="ann", now_ms=now_ms, lease_ms=100)
    assert leases.next_expiry_ms() == 1_050
    assert leases.expire(1_050) == [lease]
    assert not leases.renew(lease.id, member="ann", now_ms=1_050, lease_ms=100)
    assert leases.settle(lease.id, 0, 5, member="ann") == []


def test_a_range_is_settled_once_and_the_second_time_is_refused():
    leases = Leases()
    lease = leases.grant("ann", SHARES["a"], [(0, 5, 1, 1)], now_ms=0, lease_ms=100)
    assert leases.settle(lease.id, 0, 3, member="ann") == [(0, 3)]
    assert leases.settle(lease.id, 0, 5, member="ann") == [(3, 5)]
    assert leases.settle(lease.id, 0, 5, member="ann") == []
    assert (len(leases), leases.count, leases.next_expiry_ms()) == (0, 0, None)


def test_ids_begin_where_the_owner_says():
    leases = Leases(first_id=500)
    assert leases.grant("ann", SHARES["a"], [(0, 5, 1, 1)], now_ms=0, lease_ms=100).id == 500


def test_settled_leases_do_not_fill_the_heap():
    leases = Leases()
    for number in range(20_000):
        lease = leases.grant("ann", SHARES["a"], [(0, 5, 1, 1)], now_ms=number, lease_ms=10**9)
        leases.settle(lease.id, 0, 5, member="ann")
    assert len(leases._heap) <= 1_003


def test_a_lease_of_a_quadrillion_messages_costs_as_little_as_one():
    huge = 10**15
    leases = Leases()
    lease = leases.grant("ann", SHARES["a"], [(0, huge, 1, 1)], now_ms=0, lease_ms=100)
    assert leases.settle(lease.id, 5, huge, member="ann") == [(5, huge)]
    assert leases.count == 5


def test_what_was_started_is_told_from_what_was_only_delivered() -> None:
    leases = Leases()
    share = Share("orders", start=0)
    lease = leases.grant("ann", share, [(0, 10, 1, 1)], now_ms=0, lease_ms=100, reports=True)
    assert (lease.started, lease.unstarted) == ([], [(0, 10)])
    lease.start(2, 4, now_ms=1)
    lease.start(6, 7, now_ms=2)
    leases.settle(lease.id, 0, 3, member="ann")
    assert (lease.started, lease.unstarted) == ([(3, 4), (6, 7)], [(4, 6), (7, 10)])
    lease.start(0, 10, now_ms=3)
    assert (lease.started, lease.unstarted) == ([(3, 10)], [])


def test_all_that_a_member_holds_counts_as_started_that_never_reports() -> None:
    lease = Leases().grant("ann", Share("orders", start=0), [(0, 9, 1, 1)], now_ms=0, lease_ms=100)
    lease.start(2, 4, now_ms=1)
    assert (lease.started, lease.unstarted) == ([(0, 9)], [])


def test_a_lease_is_dated_back_by_a_day_at_most_and_its_starts_not_before_it():
    lease = Lease(1, "ann", "t", [(0, 9, 1, 1)], now_ms=7, lease_ms=5, reports=True)
    lease.date_back(held_ms=90_000_000, starts=[(0, 2, 95_000_000), (4, 6, 3)])
    assert (lease.leased_at_ms, lease.expires_at_ms) == (7 - 86_400_000, 12)
    assert (lease.started_at_ms(1), lease.started_at_ms(5)) == (7 - 86_400_000, 4)
    assert lease.unstarted == [(0, 9)], "a date is no report"


def test_a_start_that_is_reported_again_keeps_its_date():
    lease = Lease(1, "ann", "t", [(0, 9, 1, 1)], now_ms=50, lease_ms=5, reports=True)
    lease.date_back(held_ms=40, starts=[(4, 6, 30)])
    lease.start(0, 9, now_ms=60)
    assert [lease.started_at_ms(offset) for offset in (0, 3, 4, 5, 6, 8)] == [
        60, 60, 20, 20, 60, 60,
    ]  # fmt: skip
    assert lease.unstarted == []
