"""The checker of the schedule on histories made by hand: each broken promise is noticed."""

import pytest

from onward.message.message import Message
from onward.testing.schedule_history import (
    Planned,
    ScheduleHistory,
    Sight,
    State,
    Verdict,
    check_schedule,
)

TOPIC = "later-0"


class Told:
    """A history of one topic; times are milliseconds."""

    def __init__(self) -> None:
        self.history = ScheduleHistory()
        self.drain: list[Message] = []

    def plan(self, name: str, due_at_ms: int, *, number: int, shown_ms: int = 1) -> Planned:
        one = Planned(name, TOPIC, [due_at_ms], outcome="acked", number=number)
        one.numbers, one.shown_ms = {number}, shown_ms
        self.history.planned[name] = one
        return one

    def fire(self, one: Planned, *, at_ms: int | None = None) -> Message:
        due_at_ms = one.due_at_ms[-1]
        message = Message(
            TOPIC, len(self.drain), one.body, due_at_ms=due_at_ms, schedule_id=one.number,
            published_at_ms=due_at_ms if at_ms is None else at_ms,
        )  # fmt: skip
        self.drain.append(message)
        return message

    def answer(self, one: Planned, state: State, offset: int | None = None) -> None:
        one.verdicts.append(Verdict(state, one.number, offset))

    def found(self) -> list[str]:
        return [one[:2] for one in check_schedule(self.history, {TOPIC: self.drain})]


@pytest.fixture
def told() -> Told:
    return Told()


def test_a_message_that_fired_once_in_time_is_fine(told: Told) -> None:
    one = told.plan("a-0", 100, number=0)
    told.history.sights.append(Sight(told.fire(one), 100))
    told.answer(one, "fired", 0)
    assert told.found() == []


def test_a_message_that_never_fired_is_noticed(told: Told) -> None:
    one = told.plan("a-0", 100, number=0)
    assert told.found() == ["S1"]
    one.may_be_gone = True
    assert told.found() == []


@pytest.mark.parametrize("state", ["cancelled", "replaced"])
def test_a_message_that_was_cancelled_or_replaced_and_fired_is_noticed(
    told: Told, state: State
) -> None:
    one = told.plan("a-0", 100, number=0)
    told.answer(one, state)
    assert told.found() == []
    told.fire(one)
    assert told.found() == ["S2"]


def test_a_message_that_was_refused_or_never_scheduled_and_fired_is_noticed(told: Told) -> None:
    one = told.plan("a-0", 100, number=0)
    told.fire(one)
    one.outcome = "refused"
    assert told.found() == ["S2"]
    del told.history.planned["a-0"]
    assert told.found() == ["S2"]


def test_a_message_that_fired_twice_is_noticed(told: Told) -> None:
    one = told.plan("a-0", 100, number=0)
    told.fire(one)
    told.fire(one)
    assert told.found() == ["S3"]


def test_a_message_that_was_stored_or_seen_early_is_noticed(told: Told) -> None:
    one = told.plan("a-0", 100, number=0)
    told.fire(one, at_ms=99)
    assert told.found() == ["S4"]
    told.drain.clear()
    told.history.sights.append(Sight(told.fire(one), 99))
    assert told.found() == ["S4"]


def test_a_message_with_another_time_than_it_was_given_is_noticed(told: Told) -> None:
    one = told.plan("a-0", 100, number=0)
    told.fire(one)
    one.due_at_ms = [90]
    assert told.found() == ["S4"]


def test_messages_in_the_wrong_order_are_noticed(told: Told) -> None:
    told.fire(told.plan("a-0", 200, number=0))
    told.fire(told.plan("a-1", 100, number=1))
    assert told.found() == ["S5"]


def test_a_message_whose_time_was_past_when_it_came_may_stand_behind_later_ones(
    told: Told,
) -> None:
    told.fire(told.plan("a-0", 200, number=0))
    told.fire(told.plan("a-1", 100, number=1, shown_ms=250), at_ms=250)
    assert told.found() == []


def test_an_answer_that_names_another_place_is_noticed(told: Told) -> None:
    one, other = told.plan("a-0", 100, number=0), told.plan("a-1", 100, number=1)
    told.fire(one)
    told.fire(other)
    told.answer(one, "fired", 1)
    assert told.found() == ["S6"]


def test_an_id_that_was_given_twice_or_is_not_known_is_noticed(told: Told) -> None:
    one, other = told.plan("a-0", 100, number=0), told.plan("a-1", 100, number=0)
    told.fire(one)
    told.fire(other)
    assert "S6" in told.found()
    other.number, other.numbers = 1, {1}
    told.drain.pop()
    told.fire(other)
    told.answer(other, "not_found")
    assert told.found() == ["S6"]


def test_a_message_that_was_said_to_have_fired_and_is_not_there_is_noticed(told: Told) -> None:
    one = told.plan("a-0", 100, number=0)
    one.may_be_gone = True
    told.answer(one, "fired")
    assert told.found() == ["S1"]


def test_somebody_who_never_got_an_answer_is_noticed(told: Told) -> None:
    told.plan("a-0", 100, number=0).outcome = "pending"
    assert told.found() == ["I1"]
