"""The promises of Onward, held to in worlds that fail. One seed, one world, the same again.

`make sim SEED=7` runs one seed; `make sim-long` runs thousands and stops at the first that fails.
"""

import os

import pytest

from onward.testing.simulator import simulate

SEEDS_IN_EVERY_RUN = range(1, 41)


def seeds() -> range:
    """One seed (`7`), or all from one to another (`1-1000`), as the environment says."""
    asked = os.environ.get("ONWARD_SIM_SEED", "")
    if not asked:
        return SEEDS_IN_EVERY_RUN
    first, _, last = asked.partition("-")
    return range(int(first), int(last or first) + 1)  # none at all fails: see pyproject.toml


@pytest.mark.sim
@pytest.mark.parametrize("seed", seeds())
def test_whatever_happens_every_promise_is_kept(seed: int) -> None:
    print(simulate(seed))
