"""The simulator and the schedule: a broker that breaks a promise does not get away with it."""

from collections import Counter
from collections.abc import Callable

import pytest

from onward.broker.broker import Broker
from onward.testing.schedulers import SchedulePlan
from onward.testing.simulator import SimulationFailed, simulate

from . import broken_schedule as broken

pytestmark = pytest.mark.sim

SEEDS = range(1, 11)
PLAN = SchedulePlan(schedulers=2, tail_rows=5, merged_runs=2, builds_per_checkpoint=1)


def first_failure(run: Callable[[int], object]) -> str:
    for seed in SEEDS:
        try:
            run(seed)
        except SimulationFailed as failed:
            return str(failed)
    pytest.fail("nothing was noticed")


@pytest.mark.parametrize(
    ("sabotage", "promise"),
    [
        (broken.fire_early, "S4: "),
        (broken.fire_what_is_gone, "S2: "),
        (broken.fire_again, "S3: "),
        (broken.lose_some, "S1: "),
        (broken.fire_backwards, "S5: "),
        (broken.forget_replacements, "replaced in the schedule"),
        (broken.confirm_cancels_without_writing, "S2: "),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_a_broker_that_breaks_a_promise_of_the_schedule_is_caught(
    sabotage: Callable[[Broker], None], promise: str
) -> None:
    failure = first_failure(
        lambda seed: simulate(seed, sabotage=sabotage, schedule=PLAN, groups=(), troubles=("kill",))
    )
    assert promise in failure.partition("replay:")[0]


def test_all_kinds_of_answers_are_met_in_a_few_seeds() -> None:
    counts: Counter[str] = Counter()
    for seed in range(1, 10):
        counts += simulate(seed, schedule=PLAN, groups=()).counts
    for state in ("acked", "refused", "fired", "cancelled", "replaced"):
        assert counts[f"schedule {state}"] > 10


@pytest.mark.parametrize("seed", [3, 8])
def test_the_same_seed_is_the_same_run_with_a_schedule(seed: int) -> None:
    assert simulate(seed, schedule=PLAN) == simulate(seed, schedule=PLAN)
