"""A follower that takes over: what it copied is respected, and a wrong one is noticed."""

from collections import Counter
from collections.abc import Callable

import pytest

from onward.testing.failover import Fault, simulate_failover
from onward.testing.run import SimulationFailed

from . import broken_failover as broken

pytestmark = pytest.mark.sim

SEEDS = range(1, 13)


def assert_caught(run: Callable[[int], object], promise: str) -> None:
    """Run seeds until one says that this promise is broken."""
    failures = []
    for seed in SEEDS:
        try:
            run(seed)
        except SimulationFailed as failed:
            failures.append(str(failed).partition("replay:")[0])
            if promise in failures[-1]:
                return
    pytest.fail(f"{promise!r} was not noticed: {failures}")


def test_a_follower_that_acknowledges_before_the_sync_is_caught() -> None:
    fault = Fault(commit=broken.ApplyBeforeSync)
    assert_caught(
        lambda seed: simulate_failover(seed, troubles=("power",), fault=fault),
        "F1: the follower acknowledged",
    )


@pytest.mark.parametrize(
    ("sabotage", "promise"),
    [
        (broken.skip_entries, "F2: the follower differs from its log"),
        (broken.forget_producers, "I3: "),
        (broken.forget_cursors, "F4: "),
        (broken.forget_unfinished, "F5: "),
        (broken.fire_again, "F6: "),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_a_follower_that_breaks_a_promise_is_caught(
    sabotage: Callable[[object], None], promise: str
) -> None:
    fault = Fault(sabotage=sabotage)
    assert_caught(lambda seed: simulate_failover(seed, troubles=("cut",), fault=fault), promise)


def test_a_leader_that_sends_what_it_may_lose_is_caught() -> None:
    with broken.copying_what_is_not_synced():
        assert_caught(lambda seed: simulate_failover(seed, troubles=("power",)), "F1: ")


def test_all_that_a_promotion_is_about_is_met_in_a_few_seeds() -> None:
    counts: Counter[str] = Counter()
    for seed in SEEDS:
        counts += simulate_failover(seed).counts
    assert counts["promoted"] == len(SEEDS)
    for what in ("copied", "lost", "copied acks", "recognised repeats", "fired", "acked", "read"):
        assert counts[what] > 10, what
    for death in ("broker power", "follower power", "follower kill"):
        assert counts[death] > 3, death


@pytest.mark.parametrize("seed", [3, 8])
def test_the_same_seed_is_the_same_failover(seed: int) -> None:
    assert simulate_failover(seed) == simulate_failover(seed)
