"""Mending a log, with the folder locked. What goes is saved aside and durable before.

    without loss   index files that are wrong or missing are built again; bytes after the last
                   entry of a full segment, and a torn tail, are cut; a damaged checkpoint is put
                   away when the log can be opened without it
    with loss      a damaged stretch becomes one gap entry of the same length, in its place; a
                   newest segment that is missing is begun again, or the log ends before it

A gap keeps the indexes dense, the chain of checksums whole, and every position where it was, so
that index rows and checkpoints behind it stay true. Whatever is interrupted can be run again.
"""

from __future__ import annotations

from collections.abc import Sequence

from onward.errors import Corruption
from onward.log.check import Check, SegmentReport
from onward.log.disk import Disk, write_all
from onward.log.inspect import GAP_BYTES, Damage
from onward.log.log import LogLimits
from onward.log.recovery import GIVEN_UP, SCAN_BYTES, open_log
from onward.message.entry import HEADER_BYTES, Draft, Kind, encode_entry, encode_gap

_LENGTH_MAX = 2**32 - 8
_PREFIX = "broken-"


def needs_repair(check: Check) -> bool:
    """Tell whether `repair` would change anything."""
    return (
        check.is_damaged
        or bool(check.damages)
        or any(report.index == "missing" for report in check.reports)
    )


def losses(check: Check) -> list[Damage]:
    """Return what can be mended only by giving something up."""
    return [damage for report in check.reports for damage in losses_of(report)]


def losses_of(report: SegmentReport) -> list[Damage]:
    """Return the losses in one segment."""
    return [damage for damage in report.damages if damage.kind == "damaged"]


def require_repairable(check: Check) -> None:
    """Raise `Corruption` when a segment is missing without which the log cannot be opened."""
    if check.beyond_repair:
        raise Corruption(
            f"{', '.join(check.beyond_repair)} cannot be brought back, and no gap can stand for "
            f"it, because no checkpoint tells what came before: restore it from a copy"
        )


def repair(disk: Disk, check: Check, *, accept_loss: bool) -> list[str]:
    """Mend what a check found; return what was done, as sentences.

    Without `accept_loss` damaged stretches stay as they are, and so does what depends on them.
    Nothing is touched when a segment is missing without which the log cannot be opened.
    """
    require_repairable(check)
    if accept_loss and check.walk.missing is not None:
        # An empty one is as damaged as none, as far as anything was known of it: should this end
        # here, a start refuses it as before.
        disk.open(check.walk.missing.path, create=True).close()
        disk.sync_folder(check.folder)
    done: list[str] = []
    for report in check.reports:
        done += _repair_segment(disk, check.folder, report, accept_loss=accept_loss)
    if accept_loss:
        done += _put_endings_away(disk, check)
        _remove_orphans(disk, check)
        done += [f"given up: {name}, which is missing" for name in check.missing]
    for name in check.bad_checkpoints:
        aside = _free_name(disk, check.folder, _PREFIX + name)
        disk.rename(f"{check.folder}/{name}", f"{check.folder}/{aside}")
        done.append(f"put {name} away as {aside}")
    disk.sync_folder(check.folder)
    return done


def reopen(disk: Disk, folder: str) -> int:
    """Open the log as a broker would, build what is missing, and return its next index.

    The caller has given the lock back; raises what a broker would raise.
    """
    opened = open_log(
        disk,
        folder,
        limits=LogLimits(preallocate_bytes=0),
        load=lambda state: lambda entry, body: None,
    )
    try:
        while (segment := opened.log.unsealed()) is not None:
            opened.log.sealed(segment, opened.log.seal(segment))
        return opened.log.next_index
    finally:
        opened.log.close()
        opened.unlock()


def _repair_segment(
    disk: Disk, folder: str, report: SegmentReport, *, accept_loss: bool
) -> list[str]:
    done: list[str] = []
    # From the end: a cut must not take what a gap before it still refers to.
    for damage in reversed(report.damages):
        if damage.kind != "damaged" or accept_loss:
            aside = "" if report.is_missing else _save_aside(disk, folder, damage)
            verb = "replaced by a gap" if damage.kind == "damaged" else "cut"
            _mend(disk, damage)
            done.append(
                f"{verb}: bytes {damage.position} to {damage.end} of {_name(report.path)}"
                + (f", saved as {aside}" if aside else "")
            )
    if losses_of(report) and not accept_loss:
        return done
    if report.index == "wrong" or losses_of(report):
        _remove_rows(disk, folder, report)
        done.append(f"index of {_name(report.path)} is built again")
    elif report.index == "missing":
        done.append(f"index of {_name(report.path)} is built")
    return done


def _remove_rows(disk: Disk, folder: str, report: SegmentReport) -> None:
    """Remove the index file and all runs: opening the log builds what it needs of them."""
    prefix = _name(report.path).removesuffix(".log") + ".idx"
    for name in disk.list_folder(folder):
        if name.startswith(prefix):
            disk.remove(f"{folder}/{name}")


def _put_endings_away(disk: Disk, check: Check) -> list[str]:
    """Keep what is known of segments after the end, under names that claim nothing."""
    done: list[str] = []
    for ending in check.endings:
        name = ending.name.removesuffix(".log") + ".idx"
        if ending.name != _missing_name(check) and name in disk.list_folder(check.folder):
            aside = _free_name(disk, check.folder, f"{name}.broken")
            disk.rename(f"{check.folder}/{name}", f"{check.folder}/{aside}")
            done.append(f"put {name} away as {aside}")
    return done


def _missing_name(check: Check) -> str:
    return "" if check.walk.missing is None else _name(check.walk.missing.path)


def _remove_orphans(disk: Disk, check: Check) -> None:
    """Remove the index files of segments that are gone or empty: a gap stands for them now."""
    there = {_name(report.path).removesuffix(".log") for report in check.reports}
    for name in disk.list_folder(check.folder):
        if name.endswith(".idx") and name.removesuffix(".idx") not in there:
            disk.remove(f"{check.folder}/{name}")


def _mend(disk: Disk, damage: Damage) -> None:
    file = disk.open(damage.path)
    try:
        if damage.kind == "damaged" and damage.entries > 0:
            write_all(file, damage.position, gap_for(damage))
        else:
            file.truncate(damage.position)
        file.sync()
    finally:
        file.close()


def gap_for(damage: Damage) -> bytes:
    """Return the gap entry that fills the damaged stretch; at the end of a file it may be longer.

    >>> damage = Damage("damaged", "1.log", 0, 160, 1, 3, previous_crc=0, last_crc=7)
    >>> len(gap_for(damage))
    160
    """
    length = max(damage.end - damage.position, GAP_BYTES)
    length += -length % 8
    if length > _LENGTH_MAX:
        raise Corruption(f"{damage.path}: {length} damaged bytes are too many for one gap")
    body = encode_gap(last_index=damage.next_index - 1, last_crc=damage.last_crc)
    body = body[: -len(GIVEN_UP)] + GIVEN_UP
    padded = body + bytes(length - HEADER_BYTES - len(body))
    draft = Draft(Kind.GAP, damage.time_ms, 0, 0, 0, [padded])
    buffers, _, _ = encode_entry(
        draft, index=damage.first_index, term=damage.term, previous_crc=damage.previous_crc,
        synced_index=damage.first_index - 1,
    )  # fmt: skip
    return b"".join(buffers)


def _save_aside(disk: Disk, folder: str, damage: Damage) -> str:
    """Copy the damaged bytes into a file of their own, durably; return its name."""
    name = _free_name(disk, folder, f"{_name(damage.path)}.{_PREFIX}{damage.position}")
    source, aside = disk.open(damage.path), disk.open(f"{folder}/{name}", create=True)
    try:
        for start in range(damage.position, damage.end, SCAN_BYTES):
            unit = source.read(start, min(SCAN_BYTES, damage.end - start))
            write_all(aside, start - damage.position, unit)
        aside.sync()
    finally:
        source.close()
        aside.close()
    disk.sync_folder(folder)
    return name


def _free_name(disk: Disk, folder: str, name: str) -> str:
    """Return `name`, or with a number after it when that is taken: nothing is overwritten."""
    taken: Sequence[str] = disk.list_folder(folder)
    number = 1
    free = name
    while free in taken:
        number += 1
        free = f"{name}.{number}"
    return free


def _name(path: str) -> str:
    return path.rsplit("/", 1)[-1]
