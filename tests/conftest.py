"""What holds for all tests: a slow machine and an unlucky number fail nothing.

Hypothesis takes the same examples in every run, and none of its limits of time: a test that fails
here fails again. Who hunts for new examples gives another seed: pytest --hypothesis-seed=7.

`make test` runs two processes beside each other (pytest-xdist): a file as a whole is in one of
them, and so is all that shares the one Spark session, which begins first because it takes longest.
"""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

SPARK = Path(__file__).parent / "spark"

settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: SPARK not in item.path.parents)
    for item in items:
        group = "spark" if SPARK in item.path.parents else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))
