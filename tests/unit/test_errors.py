"""Errors: one tree, one stable code each, the same after a journey over the wire."""

import pickle

import pytest

from onward import errors
from onward.errors import (
    Conflict,
    InvalidRequest,
    LeaseLost,
    NotLeader,
    OnwardError,
    Overloaded,
    Unavailable,
    UnknownTopic,
    all_errors,
    from_wire,
    to_wire,
)

EVERY = pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.__name__)


def test_no_two_errors_share_a_code():
    codes = [kind.code for kind in all_errors()]
    assert len(set(codes)) == len(codes)


def test_codes_are_stable():
    assert sorted(kind.code for kind in all_errors()) == [
        "already_exists",
        "conflict",
        "corruption",
        "disk_full",
        "error",
        "forbidden",
        "invalid_name",
        "invalid_request",
        "lease_lost",
        "message_too_large",
        "not_connected",
        "not_installed",
        "not_leader",
        "offset_out_of_range",
        "outcome_unknown",
        "overloaded",
        "protocol_error",
        "stopping",
        "topic_ended",
        "unauthenticated",
        "unavailable",
        "unknown_group",
        "unknown_topic",
    ]


@EVERY
def test_every_error_is_the_same_after_a_journey_over_the_wire(kind: type[OnwardError]):
    arrived = from_wire(to_wire(kind("topic 'orders' does not exist")))
    assert type(arrived) is kind
    assert str(arrived) == "topic 'orders' does not exist"


@EVERY
def test_every_error_is_the_same_after_a_journey_between_processes(kind: type[OnwardError]):
    arrived = pickle.loads(pickle.dumps(kind("why")))
    assert (type(arrived), str(arrived)) == (kind, "why")


@EVERY
def test_every_error_is_drawn_in_the_tree_of_the_module(kind: type[OnwardError]):
    assert errors.__doc__ is not None
    assert kind.__name__ in errors.__doc__


def test_the_fields_of_an_error_travel_with_it():
    leader = from_wire(to_wire(NotLeader("this node follows", leader="b:7700")))
    busy = from_wire(to_wire(Overloaded("try later", retry_after_ms=50)))
    assert isinstance(leader, NotLeader)
    assert leader.leader == "b:7700"
    assert isinstance(busy, Overloaded)
    assert busy.retry_after_ms == 50


def test_fields_of_a_wrong_type_from_a_peer_are_left_out():
    leader = from_wire({"code": "not_leader", "message": "no", "leader": 7})
    busy = from_wire({"code": "overloaded", "message": "no", "retry_after_ms": "soon"})
    assert isinstance(leader, NotLeader)
    assert leader.leader is None
    assert isinstance(busy, Overloaded)
    assert busy.retry_after_ms == 0


@pytest.mark.parametrize(
    "wire",
    [
        {"code": "from_the_future", "message": "new"},
        {"code": 7},
        {"code": ["x"]},
        {"code": None, "message": None},
        {},
    ],
)
def test_what_we_do_not_know_is_an_onward_error(wire: dict[str, object]):
    assert type(from_wire(wire)) is OnwardError


def test_the_code_of_a_later_version_is_still_told():
    assert "from_the_future" in str(from_wire({"code": "from_the_future", "message": "new"}))


def test_an_error_without_a_sentence_says_its_code_in_words():
    assert str(LeaseLost()) == "lease lost"


def test_an_error_that_a_user_derives_travels_as_its_parent():
    class OutOfStock(Conflict):
        pass

    assert type(from_wire(to_wire(OutOfStock("none left")))) is Conflict
    assert OutOfStock not in all_errors()


def test_families_say_who_must_act():
    assert issubclass(UnknownTopic, InvalidRequest)
    assert issubclass(LeaseLost, Conflict)
    assert issubclass(Overloaded, Unavailable)
