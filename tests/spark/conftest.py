"""One Spark session and one real broker for all Spark tests; each test has its own topic."""

import asyncio
import gc
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from onward.pipeline.place import Place
from onward.pipeline.sessions import end_java, session

from ..e2e.running import BrokerProcess  # noqa: TID252

# pyspark leaves what py4j opened to the garbage collector.
PYSPARK_OWN = ("ignore:unclosed.*socket:ResourceWarning",)

# Tests are short: a JVM that compiles less is twice as fast at them.
SHORT = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}

_numbers = itertools.count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.spark)
            for quiet in PYSPARK_OWN:
                item.add_marker(pytest.mark.filterwarnings(quiet))


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """One broker process for the whole run. A test that kills or stops one makes its own."""
    folder = tmp_path_factory.mktemp("broker")
    made = BrokerProcess(folder / "log", log_path=folder / "broker.txt")
    try:
        asyncio.run(made.start())
        yield made
    finally:
        made.end()


@pytest.fixture(scope="session")
def place(broker: BrokerProcess) -> Place:
    return Place(servers=broker.address, token=None, timeout="30s")


@pytest.fixture(scope="session")
def spark(place: Place) -> SparkSession:
    """One session for the whole run: local[2], little memory. `pytest_runtest_teardown` ends it."""
    return session("local[2]", place=place, name="onward tests", memory="1g", config=SHORT)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """End Spark after the last test here: what it leaves is not to fail tests of other folders."""
    yield
    here = Path(__file__).parent
    if nextitem is None or here not in nextitem.path.parents:
        end_spark()


def end_spark() -> None:
    """Stop the session and end its Java."""
    running = SparkSession.getActiveSession()
    if running is not None:
        running.stop()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        end_java()
        gc.collect()


@pytest.fixture
def topic() -> str:
    """Return the name of a topic that no other test uses; it is not created."""
    return f"topic-{next(_numbers)}"


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    """Return the path of a lake that does not exist yet."""
    return tmp_path / "lake"
