"""Entries of another node: stored unchanged, and refused when they do not continue the log."""

import contextlib
import errno
from random import Random

import pytest

from onward.errors import Corruption, DiskFull
from onward.log.check import Check
from onward.log.log import DiskFailed, Log, LogLimits
from onward.log.memory_disk import MemoryDisk
from onward.log.stream import EntryStream
from onward.message.entry import Draft, Kind, encode_entry, encode_gap
from onward.testing.disk import Faults, FaultyDisk

from .writing import FOLDER, LIMITS, Writer

SMALL = LogLimits(segment_bytes_max=900, preallocate_bytes=0, disk_reserve_bytes=0)


def source(*, commits: int = 20) -> Writer:
    writer = Writer(MemoryDisk())
    for number in range(commits):
        writer.append(*range(1, 2 + number % 3), size=50 + 90 * (number % 4))
    return writer


def entries_of(log: Log, first_index: int = 1) -> bytes:
    """Return all entries of a log from one on, back to back."""
    stream, parts = EntryStream(log, first_index), list[bytes]()
    while stream.has_more:
        parts.append(bytes(stream.read(bytes_max=1 << 20) or b""))
    return b"".join(parts)


def follow(writer: Writer, entries: bytes, *, sync: bool = True) -> None:
    write = writer.log.follow(entries)
    writer.log.perform(write, sync=sync)
    writer.log.finish(write)


def follow_all(leader: Log, follower: Writer, *, bytes_max: int) -> None:
    stream = EntryStream(leader, follower.log.next_index)
    while stream.has_more:
        follow(follower, bytes(stream.read(bytes_max=bytes_max) or b""))


@pytest.mark.parametrize("limits", [LIMITS, SMALL, LogLimits(preallocate_bytes=4_096)])
@pytest.mark.parametrize("bytes_max", [1, 500, 3_000, 1 << 20])
def test_stored_bytes_are_those_of_the_source(bytes_max: int, limits: LogLimits) -> None:
    leader, disk = source(), MemoryDisk()
    follower = Writer(disk, limits=limits)
    follow_all(leader.log, follower, bytes_max=bytes_max)
    assert follower.log.last_crc == leader.log.last_crc
    assert entries_of(follower.log) == entries_of(leader.log)
    follower.close()
    again = Writer(disk, limits=limits)
    assert again.next == leader.next
    assert entries_of(again.log) == entries_of(leader.log)


def test_a_follower_that_leads_continues_the_chain() -> None:
    leader, disk = source(), MemoryDisk()
    follower = Writer(disk)
    follow(follower, entries_of(leader.log))
    follower.next |= leader.next
    follower.append(1, 2)
    follower.close()
    assert Writer(disk).folded == list(range(1, leader.log.next_index + 2))


def test_followed_writes_are_staged_one_behind_another() -> None:
    leader, follower = source(), Writer(MemoryDisk())
    stream, writes = EntryStream(leader.log, 1), []
    while stream.has_more:
        writes.append(follower.log.follow(bytes(stream.read(bytes_max=600) or b"")))
    assert sum(write.rolled for write in writes) > 1
    for write in writes:
        follower.log.perform(write, sync=False)
    for write in writes:
        follower.log.finish(write)
    assert entries_of_unsynced(follower) == entries_of(leader.log)


def entries_of_unsynced(writer: Writer) -> bytes:
    writer.log.synced_index = writer.log.next_index - 1
    return entries_of(writer.log)


def gap(*, index: int, previous_crc: int) -> bytes:
    draft = Draft(Kind.GAP, 1_000, 0, 0, 0, [encode_gap(last_index=index + 3, last_crc=7)])
    buffers, _, _ = encode_entry(
        draft, index=index, term=0, previous_crc=previous_crc, synced_index=0
    )
    return b"".join(buffers)


def self_vouching(*, index: int, previous_crc: int) -> bytes:
    draft = Draft(Kind.MESSAGES, 1_000, 1, 0, 1, [b"x"])
    buffers, _, _ = encode_entry(
        draft, index=index, term=0, previous_crc=previous_crc, synced_index=index
    )
    return b"".join(buffers)


def flipped(entries: bytes, position: int) -> bytes:
    return entries[:position] + bytes([entries[position] ^ 1]) + entries[position + 1 :]


def follower_of_five() -> Writer:
    """Return a follower that has the first five entries of `source`."""
    leader, follower = source(), Writer(MemoryDisk())
    follow(follower, entries_of(leader.log)[: _end_of(leader.log, 5)])
    assert follower.log.next_index == 6
    return follower


def _end_of(log: Log, index: int) -> int:
    return len(entries_of(log)) - len(entries_of(log, index + 1))


def refused_entries() -> dict[str, bytes]:
    """Return what must not be stored behind the first five entries of `source`."""
    leader, other = source(), Writer(MemoryDisk())
    good = entries_of(leader.log, 6)
    for _ in range(10):
        other.append(3, size=60)
    crc = follower_of_five().log.last_crc
    return {
        "damaged body": flipped(good, 80),
        "damaged header": flipped(good, 20),
        "damaged at the end": flipped(good, len(good) - 9),
        "incomplete": good[:-8],
        "a header and no more": good[:72],
        "trailing bytes": good + b"\0" * 8,
        "no entry": b"",
        "zeros": bytes(200),
        "foreign": entries_of(other.log, 6),
        "out of order": entries_of(leader.log, 7),
        "stored already": entries_of(leader.log, 5),
        "a gap": gap(index=6, previous_crc=crc),
        "an entry that vouches for itself": self_vouching(index=6, previous_crc=crc),
    }


@pytest.mark.parametrize("what", refused_entries())
def test_what_does_not_continue_the_log_is_refused_and_nothing_is_staged(what: str) -> None:
    leader, follower = source(), follower_of_five()
    with pytest.raises(Corruption, match=r"entry \d+ does not continue the log"):
        follower.log.follow(refused_entries()[what])
    assert follower.log.staged_index == 6
    follow(follower, entries_of(leader.log, 6))
    assert entries_of(follower.log) == entries_of(leader.log)


@pytest.mark.parametrize("bytes_max", [1, 700, 1 << 20])
def test_a_power_cut_at_any_point_leaves_a_prefix_of_the_source(bytes_max: int) -> None:
    """A torn tail is never taken for corruption, whatever the entries of the leader vouch for."""
    leader = source()
    expected = entries_of(leader.log)
    for seed in range(150):
        disk = FaultyDisk(Random(seed))
        follower = Writer(disk)
        disk.cut_power_after(seed % 75, then=lambda: None)
        with contextlib.suppress(DiskFailed):
            follow_all(leader.log, follower, bytes_max=bytes_max)
        durable = follower.log.synced_index
        disk.crash()
        again = Writer(disk)
        assert again.log.next_index > durable
        assert expected.startswith(entries_of(again.log))
        follow_all(leader.log, again, bytes_max=bytes_max)
        assert entries_of(again.log) == expected
        check = Check(disk, FOLDER)
        check.run()
        assert not check.is_damaged


@pytest.mark.parametrize("seed", range(30))
def test_unsynced_entries_of_a_leader_are_a_prefix_after_a_power_cut(seed: int) -> None:
    leader, disk = source(), FaultyDisk(Random(seed))
    follower = Writer(disk)
    follow(follower, entries_of(leader.log), sync=False)
    disk.crash()
    assert entries_of(leader.log).startswith(entries_of(Writer(disk).log))


@pytest.mark.parametrize("failing", range(2))
def test_a_full_disk_in_the_middle_of_followed_entries_leaves_nothing_of_them(failing: int) -> None:
    leader, disk = source(), FaultyDisk(Random(failing))
    follower = Writer(disk)
    entries = entries_of(leader.log)
    first = _end_of(leader.log, 5)
    follow(follower, entries[:first])
    # Short writes: the entries need many calls, of which one in the middle fails.
    disk.faults = Faults(short_write=1.0)
    disk.fail("write", after=failing, error=errno.ENOSPC)
    with pytest.raises(DiskFull):
        follower.log.perform(follower.log.follow(entries[first:]), sync=True)
    disk.faults = Faults()
    follower.log.unstage()
    disk.crash()
    again = Writer(disk)
    assert entries_of(again.log) == entries[:first]
    follow(again, entries[first:])
    assert entries_of(again.log) == entries
