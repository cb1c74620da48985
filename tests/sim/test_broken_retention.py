"""A broker whose retention is wrong does not get away with it."""

from random import Random

import pytest

from onward.testing.scenario import Scenario
from onward.testing.simulator import SimulationFailed, simulate

from .broken_retention import carry_nothing

pytestmark = pytest.mark.sim


def is_trimmed(seed: int) -> bool:
    """Tell whether a seed has a group that nobody operates, and whose topic loses old messages."""
    scenario = Scenario.choose(Random(seed))
    return not scenario.is_bounded and any(
        plan.topics == ("trimmed-9",) and not plan.is_operated and not plan.at_most_once
        for plan in scenario.groups
    )


SEEDS = [seed for seed in range(1, 100) if is_trimmed(seed)]


def test_a_broker_that_drops_retries_and_dead_letters_is_caught() -> None:
    """Other promises may be broken first, seed by seed: this one is in the end."""
    for seed in SEEDS:
        try:
            simulate(seed, sabotage=carry_nothing, troubles=("kill",))
        except SimulationFailed as failed:
            if "R3: " in str(failed):
                return
    pytest.fail("nothing was noticed")
