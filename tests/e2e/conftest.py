"""Brokers for end-to-end tests: each test names the settings it needs."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .running import BrokerProcess
from .volume import Volume, make_volume

MakeBroker = Callable[..., BrokerProcess]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture
def make_broker(tmp_path: Path) -> Iterator[MakeBroker]:
    """Make brokers that are not started yet; what still runs at the end of a test is ended."""
    made: list[BrokerProcess] = []

    def make(folder: Path | None = None, **settings: object) -> BrokerProcess:
        number = len(made)
        broker = BrokerProcess(
            folder or tmp_path / f"log-{number}",
            log_path=tmp_path / f"broker-{number}.txt",
            **settings,
        )
        made.append(broker)
        return broker

    yield make
    for broker in made:
        broker.end()


MakeVolume = Callable[..., Volume]


@pytest.fixture
def mount_volume(tmp_path: Path) -> Iterator[MakeVolume]:
    """Mount a small file system; ask for it before `make_broker`, which must end first."""
    made: list[Volume] = []

    def make(*, megabytes: int) -> Volume:
        made.append(make_volume(tmp_path, megabytes=megabytes))
        return made[-1]

    yield make
    for volume in made:
        volume.end()
