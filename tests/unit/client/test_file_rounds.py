"""A folder that is opened and closed many times: few files, no descriptors left."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import onward
from onward.settings import LogSettings, Settings

ROUNDS = int(os.environ.get("ONWARD_TEST_ROUNDS", "300"))
FILES_MAX = 8
SMALL = Settings(log=LogSettings(preallocate_bytes=0, disk_reserve_bytes=0))


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Leave what is not closed open: the cyclic collector would close it at some time."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_opening_and_closing_leaves_no_descriptor_and_no_file_more(
    tmp_path: Path, no_collector: None
) -> None:
    before, most = descriptors(), 0
    for number in range(ROUNDS):
        async with onward.connect(f"file:{tmp_path}/log", settings=SMALL) as mq:
            assert (await mq.publish("orders", str(number))).offset == number
        assert descriptors() <= before + 1  # asyncio may keep one for its own
        most = max(most, len(list((tmp_path / "log").rglob("*"))))
    assert most <= FILES_MAX
    async with onward.connect(f"file:{tmp_path}/log", settings=SMALL) as mq:
        found = [message.text async for message in mq.read("orders")]
    assert found == [str(number) for number in range(ROUNDS)]


def test_threads_open_and_close_without_leaving_a_descriptor(
    tmp_path: Path, no_collector: None
) -> None:
    before = descriptors()
    for _ in range(10):
        with onward.connect_sync(f"file:{tmp_path}/log", settings=SMALL) as mq:
            mq.publish("orders", "x", delay="1h")
    assert descriptors() <= before
