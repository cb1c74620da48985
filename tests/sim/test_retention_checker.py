"""The checker of retention, on histories that are made by hand: each broken promise is noticed."""

from typing import Any

import pytest

from onward.delivery.trace import Trace
from onward.message.message import Message
from onward.testing.group_history import Act, Buried, GroupPlan
from onward.testing.history import Attempt, History
from onward.testing.retention_checker import check_retention
from onward.testing.wire_history import Seat, WireEvent

TOPIC = "trimmed-9"
S = 1_000_000


class Told:
    """The history of one group that consumes a topic with retention; times are in seconds."""

    def __init__(self) -> None:
        self.history = History(has_whole_trace=True)
        self.history.groups.plans = {"g": GroupPlan("g", (TOPIC,))}
        self.history.groups.dead = {"g": {}}
        self.row("started", offset=0)

    def publish(self, *offsets: int) -> None:
        for offset in offsets:
            name = f"1-{offset}"
            attempt = Attempt(name, TOPIC, 1, offset, b"", outcome="acked", offset=offset)
            self.history.attempts[name] = attempt

    def row(self, did: str, *offsets: int, at: float = 1, **fields: Any) -> None:
        ranges = tuple((offset, offset + 1) for offset in offsets)
        row = Trace(did=did, at_ms=0, group="g", topic=TOPIC, ranges=ranges, **fields)
        self.history.trace.append((row, round(at * S)))

    def deliver(self, offset: int, *, at: float) -> None:
        grants = ((offset, offset + 1, 1),)
        event = WireEvent("delivered", Seat("g", 1), round(at * S), 1, TOPIC, grants)
        self.history.groups.wire.append(event)

    def bury(self, offset: int, message: Message | None) -> None:
        self.history.groups.dead["g"][TOPIC, offset] = Buried(1, "no good", "ann", message)

    def found(self) -> list[str]:
        return [one[:2] for one in check_retention(self.history, {})]


@pytest.fixture
def told() -> Told:
    return Told()


def test_a_first_offset_that_goes_back_is_noticed(told: Told) -> None:
    told.history.first_offsets = [(TOPIC, 0), (TOPIC, 7), ("brief-0", 3), ("brief-0", 0)]
    assert told.found() == []
    told.history.first_offsets.append((TOPIC, 6))
    assert told.found() == ["R1"]


def test_a_message_that_vanished_is_noticed(told: Told) -> None:
    told.publish(0, 1, 2, 3)
    told.row("acked", 0)
    told.row("skipped", 1)
    told.bury(2, Message(TOPIC, 2, b""))
    assert told.found() == ["R2"]
    told.row("acked", 3)
    assert told.found() == []


def test_what_was_published_before_the_group_began_is_not_missed(told: Told) -> None:
    told.publish(0)
    told.row("started", offset=1)
    assert told.found() == []


@pytest.mark.parametrize("did", ["retried", "expired", "lost"])
def test_a_failed_message_that_is_dropped_is_noticed(told: Told, did: str) -> None:
    told.publish(0)
    told.row(did, 0, attempt=1)
    told.row("skipped", 0)
    assert told.found() == ["R3"]


def test_a_dead_letter_without_its_message_is_noticed(told: Told) -> None:
    told.bury(0, None)
    assert told.found() == ["R3"]


def test_a_delivery_of_what_was_reported_as_dropped_is_noticed(told: Told) -> None:
    told.row("skipped", 0, at=5)
    told.deliver(0, at=4)
    assert told.found() == []
    told.deliver(0, at=6)
    assert told.found() == ["R4"]


@pytest.mark.parametrize("excuse", ["bounded", "operator"])
def test_a_trace_that_is_not_whole_or_was_moved_proves_nothing(told: Told, excuse: str) -> None:
    told.publish(0)
    assert told.found() == ["R2"]
    if excuse == "bounded":
        told.history.has_whole_trace = False
    else:
        told.history.groups.acts.append(Act("replay", "g", 0))
    assert told.found() == []
