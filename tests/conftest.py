"""Settings for all tests: no test depends on a fast machine or on a random number.

Hypothesis runs the same examples each time and without deadlines, so a failure here repeats.
To search for new examples, pass another seed: pytest --hypothesis-seed=7.

`make test` runs two processes side by side (pytest-xdist). A file runs as a whole in one of them.
All tests that share the Spark session run in the same process, first, because they take longest.

The summary names every skipped test with its reason: a missing program must not hide tests.
"""

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling

SPARK = Path(__file__).parent / "spark"

settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: SPARK not in item.path.parents)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: "Producer") -> "LoadScopeScheduling":
    from xdist.scheduler import LoadScopeScheduling

    # A scheduler of our own instead of the mark `xdist_group`: with pytest 9.2, xdist 3.8 ignores
    # that mark without a warning, and two Spark sessions would run at once.
    class FilesAndSpark(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "spark" if "spark" in Path(file).parent.parts else file

    return FilesAndSpark(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    by_reason = defaultdict(list)
    for report in terminalreporter.stats.get("skipped", []):
        by_reason[report.longrepr[2].removeprefix("Skipped: ")].append(report.nodeid)
    if by_reason:
        terminalreporter.section(f"{sum(map(len, by_reason.values()))} tests were skipped")
    for reason, names in sorted(by_reason.items()):
        terminalreporter.write_line(f"{len(names)} because {reason}:")
        for name in names:
            terminalreporter.write_line(f"  {name}")
