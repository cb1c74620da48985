"""What the simulator found, in its smallest form."""

import errno
from random import Random

import pytest

from onward.errors import DiskFull
from onward.log.log import DiskFailed, Log, LogLimits, Write
from onward.log.recovery import Apply, open_log
from onward.message.entry import Draft, Kind
from onward.testing.disk import Faults, FaultyDisk

LIMITS = LogLimits(preallocate_bytes=0, disk_reserve_bytes=0)
SEEDS = pytest.mark.parametrize("seed", range(20))


def opened(disk: FaultyDisk) -> tuple[Log, list[int]]:
    """Open the log; return it with the indexes of all its entries."""
    found: list[int] = []

    def load(saved: bytes) -> Apply:
        return lambda entry, body: found.append(entry.index)

    return open_log(disk, "log", limits=LIMITS, load=load).log, found


def staged(log: Log, count: int) -> Write:
    return log.stage([Draft(Kind.MESSAGES, 1, 1, n, 1, [b"x" * 96]) for n in range(count)])


@SEEDS
def test_what_was_refused_for_a_full_disk_does_not_come_back_after_a_power_cut(seed: int) -> None:
    disk = FaultyDisk(Random(seed))
    log, _ = opened(disk)
    disk.faults = Faults(short_write=1.0)
    disk.fail("write", after=1, error=errno.ENOSPC)
    with pytest.raises(DiskFull):
        log.perform(staged(log, 6), sync=True)
    disk.faults = Faults()
    disk.crash()
    assert opened(disk)[1] == []


@SEEDS
def test_what_a_start_found_after_a_failed_sync_survives_the_next_power_cut(seed: int) -> None:
    disk = FaultyDisk(Random(seed))
    log, _ = opened(disk)
    disk.fail("sync")
    with pytest.raises(DiskFailed):
        log.perform(staged(log, 3), sync=True)
    disk.kill()
    _, found = opened(disk)
    disk.crash()
    assert opened(disk)[1] == found == [1, 2, 3]
