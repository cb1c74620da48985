import pytest

from onward.clock import Clock
from onward.testing.clock import ManualClock


def test_time_stands_still_until_it_is_moved() -> None:
    clock: Clock = ManualClock(now_ms=5_000)
    assert (clock.now_ms(), clock.monotonic_ms()) == (5_000, 0)
    assert (clock.now_ms(), clock.monotonic_ms()) == (5_000, 0)


def test_passing_time_moves_both_clocks() -> None:
    clock = ManualClock(now_ms=5_000)
    clock.advance(250)
    assert (clock.now_ms(), clock.monotonic_ms()) == (5_250, 250)


@pytest.mark.parametrize("ms", [3_600_000, -3_600_000])
def test_setting_the_wall_clock_leaves_the_monotonic_one_alone(ms: int) -> None:
    clock = ManualClock(now_ms=5_000)
    clock.jump(ms)
    assert (clock.now_ms(), clock.monotonic_ms()) == (5_000 + ms, 0)


def test_time_never_passes_backwards() -> None:
    with pytest.raises(ValueError, match="backwards"):
        ManualClock().advance(-1)
