"""The checker of start reports, on events that are made by hand: each broken promise is noticed."""

from typing import Any

import pytest

from onward.delivery.retry import RetryPolicy
from onward.testing.group_history import Act, Buried, GroupHistory, GroupPlan
from onward.testing.start_checker import check_starts
from onward.testing.wire_history import EventKind, Seat, WireEvent

TOPIC = "kept-0"
S = 1_000_000
DEATH = "member 'ann' died with it alone, attempt 3 of 3"


class Wire:
    """The frames of one group, one after another; times are in seconds."""

    def __init__(self, *, limit: int = 3, lease_ms: int = 30_000) -> None:
        retry = RetryPolicy(kind="fixed", delay_ms=0, attempts_max=limit)
        self.plan = GroupPlan("g", (TOPIC,), retry=retry, lease_ms=lease_ms)
        self.history = GroupHistory(plans={"g": self.plan}, dead={"g": {}})
        self.now = 0.0
        self.leases = 0

    def join(self, *, life: int = 1) -> Seat:
        seat = Seat("g", life)
        self.note("joined", seat)
        return seat

    def deliver(self, seat: Seat, *offsets: int, attempt: int = 1) -> int:
        """Deliver these offsets together; return the lease."""
        self.leases += 1
        self.note("delivered", seat, *offsets, lease=self.leases, attempt=attempt)
        return self.leases

    def note(
        self, kind: EventKind, seat: Seat, *offsets: int, lease: int = 0, attempt: int = 0,
        counts: bool = True,
    ) -> None:  # fmt: skip
        self.now += 0.1
        grants = tuple((offset, offset + 1, attempt) for offset in offsets)
        topic = TOPIC if kind == "delivered" else ""
        event = WireEvent(kind, seat, round(self.now * S), lease, topic, grants, counts)
        self.history.wire.append(event)

    def die_with(self, *offsets: int, started: tuple[int, ...], attempt: int = 1) -> None:
        """Let a member get these offsets, start some of them and die."""
        seat = self.join()
        lease = self.deliver(seat, *offsets, attempt=attempt)
        self.note("started", seat, *started, lease=lease)
        self.note("lost", seat)

    def bury(self, offset: int, cause: str = DEATH) -> None:
        self.history.dead["g"][TOPIC, offset] = Buried(3, cause, "ann")

    def found(self) -> list[str]:
        return [one.partition(":")[0] for one in check_starts(self.history, self.plan)]


@pytest.fixture
def wire() -> Wire:
    return Wire()


def test_an_attempt_of_a_message_that_was_started_is_fine(wire: Wire) -> None:
    wire.die_with(0, 1, started=(0,))
    wire.deliver(wire.join(), 0, attempt=2)
    wire.deliver(wire.join(), 1, attempt=1)
    assert wire.found() == []


def test_an_attempt_that_was_lost_by_a_message_that_was_only_fetched_is_noticed(wire: Wire) -> None:
    wire.die_with(0, 1, started=(0,))
    wire.deliver(wire.join(), 1, attempt=2)
    assert wire.found() == ["G10"]


@pytest.mark.parametrize(("is_started", "found"), [(True, []), (False, ["G10"])])
def test_only_what_was_started_loses_an_attempt_when_a_lease_expires(
    wire: Wire, is_started: bool, found: list[str]
) -> None:
    ann = wire.join()
    lease = wire.deliver(ann, 0)
    if is_started:
        wire.note("started", ann, 0, lease=lease)
    wire.now += 31
    wire.deliver(wire.join(), 0, attempt=2)
    assert wire.found() == found


@pytest.mark.parametrize("end", ["release", "left", "restart"])
def test_an_attempt_that_nobody_failed_is_noticed(wire: Wire, end: str) -> None:
    ann = wire.join()
    lease = wire.deliver(ann, 0)
    wire.note("started", ann, 0, lease=lease)
    match end:
        case "release":
            wire.note("release", ann, 0, lease=lease)
        case "left":
            wire.note("left", ann)
    wire.deliver(wire.join(life=2 if end == "restart" else 1), 0, attempt=2)
    assert wire.found() == ["G10"]


def test_a_delivery_of_a_message_that_another_member_holds_is_noticed(wire: Wire) -> None:
    wire.deliver(wire.join(), 0)
    wire.deliver(wire.join(), 0)
    assert wire.found() == ["G9"]
    wire.history.acts.append(Act("skip", "g", 0))
    assert wire.found() == []


@pytest.mark.parametrize(("counts", "found"), [(True, []), (False, ["G10"])])
def test_a_retry_costs_an_attempt_only_if_it_counts(
    wire: Wire, counts: bool, found: list[str]
) -> None:
    ann = wire.join()
    wire.note("retry", ann, lease=wire.deliver(ann, 0), counts=counts)
    wire.deliver(ann, 0, attempt=2)
    assert wire.found() == found


def test_a_message_that_died_with_its_member_and_comes_with_others_is_noticed(wire: Wire) -> None:
    wire.die_with(0, 1, started=(0,))
    wire.deliver(wire.join(), 0, 1, attempt=1)
    assert wire.found() == ["G11"]


def test_a_delivery_to_a_member_that_holds_a_message_alone_is_noticed(wire: Wire) -> None:
    wire.die_with(0, started=(0,))
    bob = wire.join()
    lease = wire.deliver(bob, 0, attempt=2)
    wire.note("ack", bob, 0, lease=lease)
    wire.deliver(bob, 1)
    assert wire.found() == []
    del wire.history.wire[-2]
    assert wire.found() == ["G11"]


@pytest.mark.parametrize("excuse", ["full disk", "restart", "operator", "expired"])
def test_a_message_comes_alone_only_if_its_death_was_written(wire: Wire, excuse: str) -> None:
    wire.die_with(0, started=(0,))
    match excuse:
        case "full disk":
            wire.history.may_refuse_rows = True
        case "restart":
            wire.history.deaths_us = [round(wire.now * S) + 1]
        case "operator":
            wire.history.acts.append(Act("skip", "g", 0))
        case "expired":
            wire.plan = GroupPlan("g", (TOPIC,), lease_ms=1_000)
    wire.deliver(wire.join(), 0, 1)
    assert wire.found() == []


def test_parts_of_many_messages_that_died_together_come_together(wire: Wire) -> None:
    offsets = tuple(range(160))
    wire.die_with(*offsets, started=offsets)
    wire.deliver(wire.join(), *offsets[:10], attempt=2)
    assert wire.found() == []
    wire.deliver(wire.join(), *offsets[10:21], attempt=2)
    assert wire.found() == ["G11"]


def test_a_message_that_was_re_claimed_after_a_restart_is_held(wire: Wire) -> None:
    wire.die_with(0, started=(0,))
    wire.now += 10
    lease = wire.deliver(wire.join(), 0, attempt=2)
    ann = wire.join(life=2)
    wire.note("joined", ann, 0, lease=lease)
    wire.deliver(ann, 1)
    assert wire.found() == ["G11"]


def test_a_dead_letter_of_a_message_that_died_in_company_is_noticed(wire: Wire) -> None:
    wire.bury(0)
    wire.die_with(0, 1, started=(0, 1))
    assert wire.found() == ["G12"]
    wire.die_with(0, 1, started=(0,), attempt=2)
    assert "G12" not in wire.found()


def test_a_dead_letter_that_was_rejected_needs_no_death(wire: Wire) -> None:
    wire.bury(0, cause="no good")
    assert wire.found() == []


def test_an_attempt_beyond_the_policy_is_noticed() -> None:
    wire = Wire(limit=1)
    wire.die_with(0, started=(0,))
    wire.deliver(wire.join(), 0, attempt=2)
    assert wire.found() == ["G13"]


def test_a_lease_that_ran_out_may_cost_more_attempts_than_the_policy() -> None:
    wire = Wire(limit=1)
    ann = wire.join()
    wire.note("started", ann, 0, lease=wire.deliver(ann, 0))
    wire.now += 31
    wire.deliver(wire.join(), 0, attempt=2)
    assert wire.found() == []


def test_events_of_other_groups_are_left_out(wire: Wire) -> None:
    other: Any = Seat("other", 1)
    wire.deliver(other, 0, attempt=7)
    assert wire.found() == []
