"""The checker of groups, on histories that are made by hand: each broken promise is noticed."""

import pytest

from onward.delivery.retry import RetryPolicy
from onward.errors import LeaseLost
from onward.message.message import Message
from onward.testing.group_checker import check_groups
from onward.testing.group_history import (
    Act,
    ActKind,
    Buried,
    Do,
    GroupHistory,
    GroupPlan,
    Handed,
    Stint,
    Verb,
)

TOPIC = "kept-0"
S = 1_000_000


class Told:
    """A history of one group, told in seconds."""

    def __init__(self, **settings: object) -> None:
        retry = RetryPolicy(kind="fixed", delay_ms=1_000, attempts_max=3)
        self.plan = GroupPlan("g", (TOPIC,), **{"retry": retry} | settings)  # type: ignore[arg-type]
        self.history = GroupHistory(plans={"g": self.plan}, dead={"g": {}})
        self.stored = 0
        self.keys: dict[int, str] = {}

    def stint(self, machine: str = "ann", joined: float = 0) -> Stint:
        stint = Stint(self.plan, machine, round(joined * S))
        self.history.stints.append(stint)
        return stint

    def message(self, offset: int) -> Message:
        self.stored = max(self.stored, offset + 1)
        tag = "even" if offset % 2 == 0 else "odd"
        return Message(TOPIC, offset, b"", key=self.keys.get(offset), tag=tag)

    def hand(self, stint: Stint, offset: int, at: float, *, attempt: int = 1) -> Handed:
        handed = Handed(stint, self.message(offset), attempt, 1, round(at * S))
        self.history.handed.append(handed)
        return handed

    def settle(
        self, handed: Handed, do: Do, at: float, *, error: Exception | None = None,
        counts: bool = True,
    ) -> None:  # fmt: skip
        verb = Verb(do, round(at * S), counts)
        verb.settle(error, round((at + 0.1) * S))
        handed.verbs.append(verb)

    def act(self, kind: ActKind, asked: float, answered: float, ended: float = 999) -> None:
        act = Act(kind, "g", round(asked * S), answered_us=round(answered * S))
        act.ended_us = round(ended * S)
        self.history.acts.append(act)

    def bury(self, offset: int, attempts: int) -> None:
        self.message(offset)
        self.history.dead["g"][TOPIC, offset] = Buried(attempts, "", "")

    def found(self) -> list[str]:
        drains = {TOPIC: [self.message(offset) for offset in range(self.stored)]}
        return [one[:2] for one in check_groups(self.history, drains)]


@pytest.fixture
def told() -> Told:
    return Told()


def test_a_message_that_was_acked_once_is_fine(told: Told) -> None:
    told.settle(told.hand(told.stint(), 0, 1), "ack", 2)
    assert told.found() == []


def test_a_message_that_nobody_finished_is_noticed(told: Told) -> None:
    told.message(0)
    assert told.found() == ["G1"]


def test_an_ack_that_was_refused_finishes_nothing(told: Told) -> None:
    told.settle(told.hand(told.stint(), 0, 1), "ack", 2, error=LeaseLost())
    assert told.found() == ["G1"]


def test_what_an_operator_skipped_is_finished(told: Told) -> None:
    told.message(0)
    told.act("skip", 1, 2)
    assert told.found() == []


def test_a_dead_letter_that_vanished_is_noticed(told: Told) -> None:
    told.settle(told.hand(told.stint(), 0, 1), "reject", 2)
    assert told.found() == ["G1"]
    told.bury(0, 1)
    assert told.found() == []


def test_what_comes_again_after_a_confirmed_ack_is_noticed(told: Told) -> None:
    told.settle(told.hand(told.stint(), 0, 1), "ack", 2)
    told.history.deaths_us = [3 * S]
    told.settle(told.hand(told.stint("bob", 5), 0, 6), "ack", 7)
    assert told.found() == ["G2"]
    told.act("replay", 3, 4)
    assert told.found() == []


def test_what_was_on_its_way_before_the_ack_is_no_violation(told: Told) -> None:
    told.history.late_us = 30 * S
    ann, bob = told.stint("ann"), told.stint("bob")
    told.settle(told.hand(bob, 0, 9, attempt=2), "ack", 10)
    told.hand(ann, 0, 12)
    assert told.found() == []


def test_a_repeat_without_a_reason_is_noticed(told: Told) -> None:
    ann, bob = told.stint("ann"), told.stint("bob")
    first = told.hand(ann, 0, 10)
    told.settle(told.hand(bob, 0, 12), "ack", 13)
    assert told.found() == ["G3"]
    told.settle(first, "release", 11)
    assert told.found() == []


@pytest.mark.parametrize("reason", ["left", "lost", "died", "expired"])
def test_a_repeat_with_a_reason_is_fine(told: Told, reason: str) -> None:
    ann, bob = told.stint("ann"), told.stint("bob")
    told.hand(ann, 0, 10)
    again = told.hand(bob, 0, 12, attempt=2)
    told.settle(again, "ack", 50)
    match reason:
        case "left":
            ann.ended_us = 11 * S
            again.attempt = 1
        case "lost":
            told.history.losses_us["ann"] = [11 * S]
        case "died":
            told.history.deaths_us = [11 * S]
        case "expired":
            again.at_us = 45 * S
    assert told.found() == []


def test_attempts_that_are_not_counted_are_noticed(told: Told) -> None:
    told.settle(told.hand(told.stint(), 0, 1), "retry", 2)
    told.settle(told.hand(told.stint("bob", 3), 0, 4, attempt=1), "ack", 5)
    assert "G4" in told.found()


def test_attempts_that_are_counted_too_often_are_noticed(told: Told) -> None:
    told.settle(told.hand(told.stint(), 0, 1), "retry", 2, counts=False)
    told.settle(told.hand(told.stint("bob", 3), 0, 4, attempt=2), "ack", 5)
    assert told.found() == ["G4"]


def test_more_attempts_than_the_policy_allows_are_noticed(told: Told) -> None:
    told.history.deaths_us = [1]
    told.settle(told.hand(told.stint(), 0, 1, attempt=6), "ack", 2)
    assert told.found() == ["G4"]


def test_a_dead_letter_that_still_had_attempts_is_noticed(told: Told) -> None:
    told.bury(0, 2)
    assert told.found() == ["G4"]
    told.bury(0, 3)
    assert told.found() == []


def test_a_dead_letter_that_was_acked_is_noticed(told: Told) -> None:
    told.settle(told.hand(told.stint(), 0, 1), "ack", 2)
    told.bury(0, 3)
    assert told.found() == ["G2"]


def test_an_inversion_of_a_key_is_noticed() -> None:
    told = Told(mode="ordered")
    told.keys = {0: "a", 1: "b", 2: "a"}
    ann = told.stint()
    first = told.hand(ann, 0, 1)
    told.settle(told.hand(ann, 1, 1), "ack", 2)
    told.settle(told.hand(ann, 2, 3), "ack", 4)
    told.settle(first, "ack", 5)
    assert told.found() == ["G5"]
    first.verbs[0].asked_us = 2 * S
    assert told.found() == []


def test_what_comes_to_another_though_it_was_claimed_after_a_restart_is_noticed(
    told: Told,
) -> None:
    told.history.deaths_us, told.history.starts_us = [5 * S], [0, 6 * S]
    held = told.hand(told.stint("ann"), 0, 1)
    told.hand(told.stint("bob"), 0, 7)
    told.settle(held, "ack", 4)
    assert told.found() == [], "the ack was asked for before: bob has it from the time after it"
    held.verbs.clear()
    told.settle(held, "ack", 8)
    assert told.found() == ["G9"]
    told.act("replay", 2, 3)
    assert told.found() == []


def test_two_active_members_of_an_exclusive_group_are_noticed() -> None:
    told = Told(mode="exclusive")
    ann, bob = told.stint("ann"), told.stint("bob")
    for offset, (stint, at) in enumerate([(ann, 10), (bob, 11), (ann, 12)]):
        told.settle(told.hand(stint, offset, at), "ack", at + 0.1)
    assert told.found() == ["G6"]
    told.history.losses_us["ann"] = [11 * S - 1]
    assert told.found() == []


def test_a_second_delivery_of_what_comes_at_most_once_is_noticed() -> None:
    told = Told(at_most_once=True)
    told.hand(told.stint(), 0, 1)
    assert told.found() == []
    told.history.deaths_us = [2 * S]
    told.hand(told.stint("bob", 3), 0, 4)
    assert told.found() == ["G7"]


def test_what_the_filter_keeps_out_is_neither_delivered_nor_missed() -> None:
    told = Told(tag="even")
    told.settle(told.hand(told.stint(), 0, 1), "ack", 2)
    told.message(1)
    assert told.found() == []
    told.hand(told.stint(), 1, 1)
    assert told.found() == ["G8"]


def test_a_delivery_to_who_joined_a_paused_group_is_noticed(told: Told) -> None:
    told.act("pause", 1, 2, ended=10)
    told.settle(told.hand(told.stint("ann", 3), 0, 4), "ack", 5)
    assert told.found() == ["G8"]
    told.history.acts[0].ended_us = round(3.5 * S)
    assert told.found() == []
