"""The promises of Onward, held to in worlds that fail. One seed, one world, the same again.

`make sim SEED=7` runs one seed; `make sim-long` runs thousands and stops at the first that fails.
"""

import os

import pytest

from onward.testing.commit import OverlappingCommit
from onward.testing.failover import simulate_failover
from onward.testing.simulator import simulate

SEEDS_IN_EVERY_RUN = range(1, 41)
FAILOVERS_IN_EVERY_RUN = range(1, 21)
OVERLAPS_IN_EVERY_RUN = range(1, 13)


def seeds(in_every_run: range = SEEDS_IN_EVERY_RUN) -> range:
    """One seed (`7`), or all from one to another (`1-1000`), as the environment says."""
    asked = os.environ.get("ONWARD_SIM_SEED", "")
    if not asked:
        return in_every_run
    first, _, last = asked.partition("-")
    return range(int(first), int(last or first) + 1)  # none at all fails: see pyproject.toml


@pytest.mark.sim
@pytest.mark.parametrize("seed", seeds())
def test_whatever_happens_every_promise_is_kept(seed: int) -> None:
    print(simulate(seed))


@pytest.mark.sim
@pytest.mark.parametrize("seed", seeds(OVERLAPS_IN_EVERY_RUN))
def test_every_promise_is_kept_with_several_commits_in_flight(seed: int) -> None:
    print(simulate(seed, commit=OverlappingCommit))


@pytest.mark.sim
@pytest.mark.parametrize("seed", seeds(FAILOVERS_IN_EVERY_RUN))
def test_whatever_happens_a_promoted_follower_respects_what_it_copied(seed: int) -> None:
    print(simulate_failover(seed))
