from onward.bench.memory import slope_per_minute


def test_memory_that_stays_has_no_slope():
    assert slope_per_minute([(float(second), 34.0) for second in range(60)]) == 0


def test_what_is_filled_once_in_the_first_half_is_no_slope():
    samples = [(float(second), min(34.0, 20.0 + second)) for second in range(60)]
    assert abs(slope_per_minute(samples)) < 0.001


def test_a_leak_of_a_megabyte_per_second_is_seen():
    samples = [(float(second), 20.0 + second) for second in range(60)]
    assert round(slope_per_minute(samples), 6) == 60
