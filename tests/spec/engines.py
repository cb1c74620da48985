"""The engines that every promise is kept on: in memory, and in a folder of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from onward import Client, connect
from onward.settings import LogSettings, Settings

SMALL = LogSettings(segment_bytes_max=65_536, preallocate_bytes=0, disk_reserve_bytes=0)


class Engine:
    """Somewhere to connect to; a folder can be connected to again after everything was closed."""

    def __init__(self, address: str, *, is_kept: bool) -> None:
        self.address = address
        self.is_kept = is_kept

    def connect(self, settings: Settings | None = None, **options: str) -> Client:
        return connect(self.address, settings=settings or Settings(log=SMALL), **options)  # type: ignore[arg-type]


def memory_engine() -> Engine:
    return Engine("memory:", is_kept=False)


def file_engine(folder: Path) -> Engine:
    return Engine(f"file:{folder / 'log'}", is_kept=True)


BOTH = pytest.mark.parametrize("engine", ["memory", "file"], indirect=True)
KEPT = pytest.mark.parametrize("engine", ["file"], indirect=True)
