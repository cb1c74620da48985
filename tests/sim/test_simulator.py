"""The simulator itself: the same seed is the same run, and a wrong broker does not get away."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from onward.testing.simulator import SimulationFailed, simulate

from .broken import AckBeforeSync, forget_order, forget_repeats, without_checksums

pytestmark = pytest.mark.sim

FEW_SEEDS = range(1, 6)
SEEDS = range(1, 13)


def first_failure(run: Callable[[int], object]) -> str:
    for seed in SEEDS:
        try:
            run(seed)
        except SimulationFailed as failed:
            return str(failed)
    pytest.fail("nothing was noticed")


def test_a_broker_that_acks_before_the_sync_is_caught() -> None:
    failure = first_failure(lambda seed: simulate(seed, commit=AckBeforeSync, troubles=("power",)))
    assert "I1: " in failure or "refuses its log" in failure


def test_a_broker_that_stores_repeats_is_caught() -> None:
    failure = first_failure(
        lambda seed: simulate(seed, sabotage=forget_repeats, troubles=("kill", "cut"))
    )
    assert "I3: " in failure
    assert "times in" in failure


def test_a_broker_that_lets_later_batches_overtake_is_caught() -> None:
    failure = first_failure(
        lambda seed: simulate(seed, sabotage=forget_order, troubles=("slow network",))
    )
    assert "I5: " in failure


def test_a_broker_that_skips_checksums_is_caught() -> None:
    with without_checksums():
        failure = first_failure(
            lambda seed: simulate(seed, troubles=("clock",), groups=(), rot=True)
        )
    assert "rotted, and was served" in failure


@pytest.mark.parametrize("seed", FEW_SEEDS)
def test_what_rots_on_the_disk_is_refused_and_never_served(seed: int) -> None:
    summary = simulate(seed, troubles=("clock",), groups=(), rot=True)
    assert summary.counts["refused as rotten"]


def test_a_failure_says_how_to_replay_it_and_what_led_to_it() -> None:
    failure = first_failure(lambda seed: simulate(seed, commit=AckBeforeSync, troubles=("power",)))
    assert "replay: make sim SEED=" in failure
    assert "troubles: power" in failure
    assert len(failure.splitlines()) < 330


@pytest.mark.parametrize("seed", [3, 8])
def test_the_same_seed_is_the_same_run(seed: int) -> None:
    assert simulate(seed) == simulate(seed)


def test_a_run_depends_on_its_seed_and_on_nothing_of_the_interpreter() -> None:
    digests = {digest_with(hash_seed) for hash_seed in ("1", "2")}
    assert len(digests) == 1


def digest_with(hash_seed: str) -> str:
    code = "from onward.testing.simulator import simulate; print(simulate(4).digest)"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout
