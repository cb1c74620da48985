"""Credit: few frames, never more than can be held."""

import pytest

from onward.client.credit import AHEAD_MAX, BUFFERED_BYTES_MAX, TAKE_ALL_BACK, Credit


def test_credit_is_given_when_half_of_it_is_used() -> None:
    credit = Credit(wanted=100)
    assert credit.more(now=0) == 100
    given = []
    for _ in range(100):
        credit.arrived(1, size=100)
        credit.took(1)
        given.append(credit.more(now=0))
    assert [number for number, count in enumerate(given) if count] == [49, 99]
    assert sum(given) == 100


def test_what_waits_here_counts_as_much_as_what_is_with_the_broker() -> None:
    credit = Credit(wanted=100)
    credit.more(now=0)
    credit.arrived(100, size=100)
    assert credit.more(now=0) == 0
    credit.took(50)
    assert credit.more(now=0) == 50


def test_large_messages_get_little_credit() -> None:
    credit = Credit(wanted=10_000)
    credit.more(now=0)
    credit.arrived(1, size=1 << 20)
    credit.took(1)
    credit.opened(1 << 20)
    assert credit.take_back() == TAKE_ALL_BACK
    assert credit.more(now=0) == BUFFERED_BYTES_MAX // 2 >> 20


def test_credit_is_taken_back_when_too_many_bytes_wait() -> None:
    credit = Credit(wanted=10_000)
    credit.more(now=0)
    assert credit.arrived(8, size=BUFFERED_BYTES_MAX) == 0
    assert credit.arrived(1, size=1) == TAKE_ALL_BACK
    assert credit.more(now=0) == 0
    assert credit.arrived(1, size=1) == 0, "nothing is left to be taken back"
    credit.took(10)
    credit.opened(BUFFERED_BYTES_MAX + 2)
    assert credit.more(now=0) > 0


def test_a_message_larger_than_the_buffer_can_still_come() -> None:
    credit = Credit(wanted=10)
    credit.more(now=0)
    credit.arrived(10, size=100 * BUFFERED_BYTES_MAX)
    credit.took(10)
    credit.opened(100 * BUFFERED_BYTES_MAX)
    assert credit.more(now=0) == 1


def test_what_was_on_its_way_when_credit_was_taken_back_does_not_count_twice() -> None:
    credit = Credit(wanted=10)
    credit.more(now=0)
    credit.take_back()
    credit.arrived(10, size=10)
    credit.took(10)
    assert credit.out == 0
    assert credit.more(now=0) == 10


def worked(credit: Credit, now: float, *, each_s: float, rounds: int = 10) -> float:
    """Work on all that comes, one after the other, and wait for more; return what time it is."""
    for _ in range(rounds):
        credit.more(now=now, room=1)
        credit.arrived(credit.out, size=1)
        credit.resumed(now=now)
        for _ in range(credit.waiting):
            credit.took(1)
            now += each_s
    credit.more(now=now, room=1)
    return now


def test_a_program_begins_with_one_message_and_none_ahead() -> None:
    credit = Credit(is_fixed=False)
    assert credit.more(now=1.0) == 0, "nobody waits"
    assert credit.more(now=1.0, room=1) == 1
    credit.arrived(1, size=1)
    credit.resumed(now=1.0)
    credit.took(1)
    assert credit.more(now=1.0) == 0, "it is being worked on: how long is not known"


def test_as_much_is_fetched_ahead_as_is_done_in_half_a_second() -> None:
    credit = Credit(is_fixed=False)
    now = worked(credit, 1.0, each_s=3.0)
    assert credit.wanted == 0, "messages of seconds are left to others"
    now = worked(credit, now, each_s=0.005)
    assert 90 <= credit.wanted <= 100
    now = worked(credit, now, each_s=0.000_001)
    assert credit.wanted == AHEAD_MAX
    worked(credit, now, each_s=3.0, rounds=1)
    assert credit.wanted == 0, "it shrinks at once"


def test_what_is_fetched_ahead_grows_step_by_step() -> None:
    credit = Credit(is_fixed=False)
    now = worked(credit, 1.0, each_s=0.000_001, rounds=1)
    assert credit.wanted <= 4
    now = worked(credit, now, each_s=0.000_001, rounds=1)
    assert credit.wanted <= 20


def test_several_at_a_time_get_what_they_have_room_for() -> None:
    credit = Credit(is_fixed=False)
    credit.work_s = 3.0
    assert credit.more(now=1.0, room=10) == 10
    credit.arrived(10, size=10)
    credit.took(10)
    assert credit.more(now=2.0) == 0
    assert credit.more(now=3.0, room=1) == 1
    assert credit.more(now=3.0, room=2) == 1, "one is on its way"


@pytest.mark.parametrize("wanted", [1, 2, 3])
def test_the_smallest_credit_never_runs_dry(wanted: int) -> None:
    credit = Credit(wanted=wanted)
    for _ in range(100):
        credit.more(now=0)
        assert credit.out >= 1
        credit.arrived(1, size=1)
        credit.took(1)


def test_a_member_that_reads_by_itself_gives_no_credit() -> None:
    credit = Credit(wanted=100)
    credit.is_off = True
    assert credit.more(now=0) == credit.give(7) == credit.out == 0
