"""A data folder that is deleted, moved or replaced while a broker uses it."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import onward
from onward.errors import NotConnected, OnwardError, Unavailable

from .conftest import MakeBroker
from .running import until

EXIT_FOLDER_LOST = 73
NOTICED_S_MAX = 5.0


def delete(folder: Path) -> None:
    # Moved aside first: the broker may write a checkpoint while the files are being unlinked.
    doomed = folder.rename(folder.with_name("doomed"))
    shutil.rmtree(doomed, ignore_errors=True)


def move(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))


def replace(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))
    shutil.copytree(folder.with_name("moved"), folder)


def delete_segments(folder: Path) -> None:
    for path in folder.glob("*.log"):
        path.unlink()


@pytest.mark.parametrize("lose", [delete, move, replace, delete_segments])
async def test_a_broker_whose_folder_is_gone_ends_with_its_own_exit_code(
    make_broker: MakeBroker, lose: Callable[[Path], None]
) -> None:
    broker = make_broker()
    await broker.start()
    async with broker.connect(timeout="2s") as mq:
        await mq.publish("orders", "stored")
        lose(broker.folder)
        assert await broker.ended(within_s=NOTICED_S_MAX) == EXIT_FOLDER_LOST
        with pytest.raises(OnwardError):
            await mq.publish("orders", "not stored")
    assert "were deleted, moved or replaced" in broker.output


async def test_a_broker_that_is_told_to_stop_says_that_its_folder_is_gone(
    make_broker: MakeBroker,
) -> None:
    broker = make_broker()
    await broker.start()
    async with broker.connect() as mq:
        await mq.publish("orders", "stored")
    delete(broker.folder)
    assert await broker.stop() == EXIT_FOLDER_LOST


async def test_an_embedded_client_whose_folder_is_gone_raises_and_goes_on_living(
    tmp_path: Path,
) -> None:
    mq = onward.connect(f"file:{tmp_path / 'data'}", timeout="20s")
    await mq.open()
    await mq.publish("orders", "stored")
    delete(tmp_path / "data")

    async def is_refused() -> bool:
        try:
            await mq.publish("orders", "not stored")
        except OnwardError:
            return True
        return False

    await until(is_refused, within_s=NOTICED_S_MAX)
    async with asyncio.timeout(2):
        with pytest.raises(NotConnected, match="deleted, moved or replaced"):
            await mq.publish("orders", "not stored either")
    await mq.close(drain=False)


async def test_an_embedded_client_that_is_closed_says_that_its_folder_is_gone(
    tmp_path: Path,
) -> None:
    mq = onward.connect(f"file:{tmp_path / 'data'}")
    await mq.open()
    await mq.publish("orders", "stored")
    delete(tmp_path / "data")
    with pytest.raises(Unavailable, match="deleted, moved or replaced"):
        await mq.close()
