"""The machine's clock: integers in milliseconds."""

import time

from onward.clock import Clock, SystemClock


def test_the_wall_clock_is_the_time_of_the_machine_in_milliseconds():
    before, now, after = time.time() * 1000, SystemClock().now_ms(), time.time() * 1000
    assert before - 1 <= now <= after


def test_the_monotonic_clock_does_not_go_back():
    clock: Clock = SystemClock()
    readings = [clock.monotonic_ms() for _ in range(1000)]
    assert readings == sorted(readings)
