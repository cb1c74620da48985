"""Folders of a log, looked at and damaged from outside, while no broker runs on them."""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import onward
from onward.log.disk import OsDisk
from onward.log.log import LogLimits
from onward.log.recovery import list_segments, open_log, scan
from onward.message.entry import Entry
from onward.settings import LogSettings, Settings

from .running import until


class Found(NamedTuple):
    """What opening a folder gave."""

    indexes: list[int]
    next_index: int
    cut_bytes: int
    scanned_bytes: int


def copied(folder: Path, name: str) -> Path:
    """Return a fresh copy of a folder, beside it."""
    copy = folder.parent / name
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    return copy


def opened(folder: Path) -> Found:
    """Open a folder as a broker would, and close it again."""
    indexes: list[int] = []
    found = open_log(
        OsDisk(), str(folder), limits=LogLimits(preallocate_bytes=0),
        load=lambda state: lambda entry, body: indexes.append(entry.index),
    )  # fmt: skip
    next_index = found.log.next_index
    found.log.close()
    found.unlock()
    return Found(indexes, next_index, found.cut_bytes, found.scanned_bytes)


def entries_of(path: Path) -> list[Entry]:
    """Return the entries of one segment."""
    segments = list_segments(OsDisk(), str(path.parent))
    segment = next(one for one in segments if Path(one.path) == path)
    entries = [entry for entry, _ in scan(segment, 0)]
    segment.close()
    return entries


def files_of(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern))


def segments_of(folder: Path) -> list[Path]:
    """Return the segments; not the file that a broker has prepared for the next one."""
    return [path for path in files_of(folder, "*.log") if path.stem.isdigit()]


def flip(path: Path, position: int, *, bit: int = 0) -> None:
    """Turn one bit over."""
    with path.open("r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))


def used_bytes(folder: Path) -> int:
    """Return the disk space that a folder takes, as du does."""
    used = 0
    for path in folder.rglob("*"):
        # A broker that runs removes files at any time.
        with suppress(FileNotFoundError):
            used += path.stat().st_blocks * 512
    return used


async def until_the_folder_is_smaller(folder: Path, size: int) -> None:
    """Wait until space has come back."""
    await until(lambda: used_bytes(folder) <= size, within_s=20)


def embedded(folder: Path, **log: object) -> onward.Client:
    """Return a client with a broker inside this process, on that folder."""
    settings = LogSettings(folder=str(folder), disk_reserve_bytes=0, preallocate_bytes=0, **log)  # type: ignore[arg-type]
    return onward.connect(f"file:{folder}", settings=Settings(log=settings))
