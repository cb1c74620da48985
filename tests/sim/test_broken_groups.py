"""A broker that serves groups wrongly does not get away with it."""

from collections.abc import Callable
from typing import Any

import pytest

from onward.broker.broker import Broker
from onward.delivery.retry import RetryPolicy
from onward.testing.group_history import GroupPlan
from onward.testing.simulator import SimulationFailed, simulate

from . import broken_groups as broken

pytestmark = pytest.mark.sim

SEEDS = range(1, 13)
FIXED = RetryPolicy(kind="fixed", delay_ms=50, attempts_max=4)
NONE = RetryPolicy(kind="none")


def plan(**settings: Any) -> GroupPlan:
    return GroupPlan("g0", (), **{"retry": FIXED, "members": 3, "lease_ms": 30_000} | settings)


def first_failure(run: Callable[[int], object]) -> str:
    for seed in SEEDS:
        try:
            run(seed)
        except SimulationFailed as failed:
            return str(failed)
    pytest.fail("nothing was noticed")


@pytest.mark.parametrize(
    ("sabotage", "group", "troubles", "promise"),
    [
        (broken.confirm_too_early, plan(), ("power",), "G2: "),
        (broken.confirm_what_was_refused, plan(lease_ms=1_000), ("slow network",), "G2: "),
        (broken.count_badly, plan(), ("kill",), "G4: "),
        (broken.look_at_nothing, plan(mode="ordered"), ("clock",), "G5: "),
        (broken.look_at_nothing, plan(tag="even"), ("clock",), "G8: "),
        (broken.hand_out_twice, plan(), ("clock",), "G3: "),
        (broken.finish_for_the_dead, plan(), ("cut",), "G1: "),
        (broken.count_what_was_fetched, plan(), ("clock",), "G10: "),
        (broken.deliver_suspects_with_others, plan(), ("clock",), "G11: "),
        (broken.blame_the_company, plan(retry=NONE), ("clock",), "G12: "),
        (broken.count_past_the_policy, plan(retry=NONE), ("clock",), "G13: "),
        (
            broken.send_before_it_is_finished,
            plan(at_most_once=True, retry=NONE),
            ("power",),
            "G7: ",
        ),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_a_broker_that_breaks_a_promise_of_groups_is_caught(
    sabotage: Callable[[Broker], None], group: GroupPlan, troubles: tuple[str, ...], promise: str
) -> None:
    failure = first_failure(
        lambda seed: simulate(seed, sabotage=sabotage, groups=(group,), troubles=troubles)
    )
    assert promise in failure


def test_a_broker_that_gives_away_what_is_claimed_after_a_restart_is_caught() -> None:
    """Other promises may be broken first, seed by seed: this one is in the end."""
    group = plan(lease_ms=5_000)
    for seed in SEEDS:
        try:
            simulate(
                seed, sabotage=broken.give_away_what_is_claimed, groups=(group,), troubles=("kill",)
            )
        except SimulationFailed as failed:
            if "G9: " in str(failed):
                return
    pytest.fail("nothing was noticed")


def test_a_broker_with_two_active_members_of_an_exclusive_group_is_caught() -> None:
    group = plan(mode="exclusive")
    with broken.everybody_active():
        failure = first_failure(
            lambda seed: simulate(seed, groups=(group,), troubles=("slow network",))
        )
    assert "G6: " in failure


def test_a_broker_whose_checkpoints_forget_attempts_is_caught() -> None:
    with broken.forgetful_checkpoints():
        failure = first_failure(lambda seed: simulate(seed, groups=(plan(),), troubles=("stop",)))
    assert "differs" in failure or "G4: " in failure
