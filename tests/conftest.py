"""What holds for all tests: a slow machine and an unlucky number fail nothing.

Hypothesis takes the same examples in every run, and none of its limits of time: a test that fails
here fails again. Who hunts for new examples gives another seed: pytest --hypothesis-seed=7.
"""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")
