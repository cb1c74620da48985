"""Marks in the folder of a log: files that a start reads before it opens any segment.

    following    the newest entries were copied from another node, several of its commits with one
                 sync: what they claim to be durable was durable there, not here
    replacing    the files in `incoming/` are a whole log, verified and synced, and take the place
                 of this one; the mark lists their names

A log is replaced by renames, each of which a crash may interrupt. The mark makes it one step: with
the mark, the next start finishes what is left; without it, `incoming/` is not complete and its
files are removed. The folder is inside that of the log, so both are on one file system.
"""

from __future__ import annotations

import re

from onward.log.disk import Disk, write_all

FOLLOWING = "following"
REPLACING = "replacing"
INCOMING = "incoming"

_FILE_OF_A_LOG = re.compile(
    r"\d{20}\.(log|idx)|\d{20}\.idx\.run-\d+|checkpoint-\d{20}-\d|schedule-\d+\.run"
    r"|scheduled-\d+-\d+--?\d+\.ids",
    re.ASCII,
)


def is_file_of_a_log(name: str) -> bool:
    """Return True if a file of this name belongs to a log, and to nothing else.

    >>> is_file_of_a_log("00000000000000000001.log"), is_file_of_a_log("../lock")
    (True, False)
    """
    return _FILE_OF_A_LOG.fullmatch(name) is not None


def set_mark(disk: Disk, folder: str, name: str, content: bytes = b"") -> None:
    """Create a mark durably, whole or not at all."""
    path = f"{folder}/{name}"
    file = disk.open(f"{path}.tmp", create=True)
    try:
        file.truncate(0)
        write_all(file, 0, content)
        file.sync()
    finally:
        file.close()
    disk.rename(f"{path}.tmp", path)
    disk.sync_folder(folder)


def clear_mark(disk: Disk, folder: str, name: str) -> None:
    """Remove a mark durably."""
    disk.remove(f"{folder}/{name}")
    disk.sync_folder(folder)


def has_mark(disk: Disk, folder: str, name: str) -> bool:
    """Return True if a folder has a mark."""
    return name in disk.list_folder(folder)


def clear_incoming(disk: Disk, folder: str) -> str:
    """Return the folder for incoming files, which exists and is empty now."""
    incoming = f"{folder}/{INCOMING}"
    disk.make_folder(incoming)
    for name in disk.list_folder(incoming):
        disk.remove(f"{incoming}/{name}")
    disk.sync_folder(incoming)
    return incoming


def begin_replacement(disk: Disk, folder: str) -> None:
    """Decide that the log in `incoming/` takes the place of the one in `folder`.

    The next start carries it out. All incoming files are synced, and so is their folder.
    """
    names = disk.list_folder(f"{folder}/{INCOMING}")
    set_mark(disk, folder, REPLACING, "\n".join(names).encode())


def finish_replacement(disk: Disk, folder: str) -> None:
    """Carry out a replacement that was decided; else forget incoming files of an unfinished one.

    May be interrupted at any point and called again.
    """
    names = disk.list_folder(folder)
    if REPLACING in names:
        _replace(disk, folder, names)
    elif INCOMING in names:
        clear_incoming(disk, folder)


def _replace(disk: Disk, folder: str, names: list[str]) -> None:
    incoming = f"{folder}/{INCOMING}"
    file = disk.open(f"{folder}/{REPLACING}")
    try:
        new = file.read(0, file.size()).decode().split("\n")
    finally:
        file.close()
    for name in disk.list_folder(incoming):
        disk.rename(f"{incoming}/{name}", f"{folder}/{name}")
    for name in names:
        if is_file_of_a_log(name) and name not in new:
            disk.remove(f"{folder}/{name}")
    disk.sync_folder(incoming)
    # What was fetched was copied from another node, like all that will follow it.
    set_mark(disk, folder, FOLLOWING)
    clear_mark(disk, folder, REPLACING)
