"""The log of a follower: a power cut never looks like corruption, and a snapshot replaces it whole.

The entries that a follower stores claim what was durable at its leader, not on its own disk.
"""

import errno
from random import Random

import pytest

from onward.errors import Corruption, DiskFull, Unavailable
from onward.log.check import Check
from onward.log.inspect import require_log
from onward.log.log import DiskFailed, Log, LogLimits
from onward.log.marks import (
    FOLLOWING,
    INCOMING,
    REPLACING,
    begin_replacement,
    clear_incoming,
    has_mark,
)
from onward.log.memory_disk import MemoryDisk
from onward.log.stream import EntryStream
from onward.testing.disk import FaultyDisk, PowerCut

from .writing import FOLDER, Writer

LARGE = LogLimits(segment_bytes_max=20_000, preallocate_bytes=0, disk_reserve_bytes=0)


def leader_with(random: Random, *, commits: int) -> Writer:
    """Return a log of several commits, each of which claims that those before it are durable."""
    leader = Writer(MemoryDisk(), limits=LARGE)
    for _ in range(commits):
        leader.append(*[1] * random.randint(1, 4), size=random.choice((10, 300, 2_000)))
    return leader


def store(log: Log, entries: bytes) -> None:
    write = log.follow(entries)
    log.perform(write, sync=True)
    log.finish(write)


def follow(leader: Log, log: Log, *, bytes_max: int, limit: int = 1 << 30) -> None:
    """Store what a follower lacks, several commits with one sync."""
    stream = EntryStream(leader, log.next_index)
    while stream.has_more and limit > 0:
        entries = stream.read(bytes_max=bytes_max)
        assert entries
        store(log, bytes(entries))
        limit -= 1


def entries_of(log: Log) -> bytes:
    stream, found = EntryStream(log, log.segments[0].first_index), b""
    while stream.has_more:
        found += bytes(stream.read(bytes_max=1 << 20) or b"")
    return found


@pytest.mark.parametrize("seed", range(150))
def test_a_power_cut_leaves_a_follower_with_a_prefix_and_never_with_corruption(seed: int) -> None:
    random = Random(seed)
    leader = leader_with(random, commits=random.randint(5, 60))
    everything = entries_of(leader.log)
    disk = FaultyDisk(Random(seed))
    for _ in range(4):
        follower = Writer(disk, limits=LARGE)
        assert everything.startswith(entries_of(follower.log))
        durable = follower.log.synced_index
        disk.cut_power_after(random.randint(0, 40), then=lambda: None)
        try:
            while follower.log.next_index < leader.log.next_index:
                follow(leader.log, follower.log, bytes_max=random.choice((1, 4_000, 40_000)))
                durable = follower.log.synced_index
                if random.random() < 0.3:
                    follower.seal()
                    follower.checkpoint()
        except (PowerCut, DiskFailed):
            durable = max(durable, follower.log.synced_index)
        disk.crash()
        check = Check(disk, FOLDER)
        check.run()
        assert not check.is_damaged, check.problems or check.damages
        again = Writer(disk, limits=LARGE)
        assert again.log.next_index > durable
        assert everything.startswith(entries_of(again.log))
        again.close()
    follower = Writer(disk, limits=LARGE)
    follow(leader.log, follower.log, bytes_max=40_000)
    assert entries_of(follower.log) == everything


def test_without_the_mark_the_same_tear_would_be_corruption() -> None:
    disk = FaultyDisk(Random(1))
    leader = leader_with(Random(1), commits=10)
    follower = Writer(disk, limits=LARGE)
    follow(leader.log, follower.log, bytes_max=1 << 20)
    follower.close()
    disk.flip_bit(follower.log.tail.path, 100)
    disk.remove(f"{FOLDER}/{FOLLOWING}")
    with pytest.raises(Corruption, match="onward log check"):
        Writer(disk, limits=LARGE)


def test_damage_behind_the_checkpoint_of_a_follower_is_saved_aside_cut_and_copied_again() -> None:
    disk = FaultyDisk(Random(1))
    leader = leader_with(Random(1), commits=10)
    everything = entries_of(leader.log)
    follower = Writer(disk, limits=LARGE)
    follow(leader.log, follower.log, bytes_max=1 << 20)
    follower.close()
    disk.flip_bit(follower.log.tail.path, 100)
    again = Writer(disk, limits=LARGE)
    assert again.opened.cut_bytes
    assert any(".broken-" in name for name in disk.list_folder(FOLDER))
    follow(leader.log, again.log, bytes_max=1 << 20)
    assert entries_of(again.log) == everything


def test_damage_below_the_checkpoint_of_a_follower_is_corruption() -> None:
    disk = FaultyDisk(Random(1))
    leader = leader_with(Random(1), commits=10)
    follower = Writer(disk, limits=LARGE)
    follow(leader.log, follower.log, bytes_max=1 << 20)
    follower.checkpoint()
    follower.close()
    disk.cut(follower.log.tail.path, 200)
    with pytest.raises(Corruption, match="onward log check"):
        Writer(disk, limits=LARGE)


def test_the_mark_is_durable_before_the_first_entry_of_another_node() -> None:
    disk = FaultyDisk(Random(1))
    leader = leader_with(Random(1), commits=3)
    follower = Writer(disk, limits=LARGE)
    assert not follower.log.is_followed
    follow(leader.log, follower.log, bytes_max=1 << 20)
    disk.crash(unsynced="lost")
    assert has_mark(disk, FOLDER, FOLLOWING)
    assert Writer(disk, limits=LARGE).log.is_followed


def test_a_full_disk_refuses_followed_entries_with_nothing_done() -> None:
    disk = FaultyDisk(Random(1))
    leader = leader_with(Random(1), commits=3)
    follower = Writer(disk, limits=LARGE)
    disk.fail("write", error=errno.ENOSPC)
    with pytest.raises(DiskFull):
        follow(leader.log, follower.log, bytes_max=1 << 20)
    follower.log.unstage()
    follow(leader.log, follower.log, bytes_max=1 << 20)
    assert entries_of(follower.log) == entries_of(leader.log)


# --- a snapshot takes the place of a log ----------------------------------------------------------


def folder_with_incoming(disk: FaultyDisk, seed: int) -> tuple[bytes, bytes]:
    """Fill a folder, and its `incoming/` with a longer log; return the entries of both."""
    new = leader_with(Random(seed), commits=60)
    old = Writer(disk, limits=LARGE)
    follow(new.log, old.log, bytes_max=4_000, limit=5)
    old.checkpoint()
    before = entries_of(old.log)
    old.close()
    new.seal()
    new.checkpoint()
    incoming = clear_incoming(disk, FOLDER)
    for name in new.disk.list_folder(FOLDER):
        if name != "lock":
            source, copy = (
                new.disk.open(f"{FOLDER}/{name}"),
                disk.open(f"{incoming}/{name}", create=True),
            )
            copy.write(0, [source.read(0, source.size())])
            copy.sync()
    disk.sync_folder(incoming)
    return before, entries_of(new.log)


def assert_clean(disk: FaultyDisk) -> None:
    names = disk.list_folder(FOLDER)
    assert REPLACING not in names
    assert not [name for name in names if name.endswith(".tmp")]
    assert disk.list_folder(f"{FOLDER}/{INCOMING}") == []
    check = Check(disk, FOLDER)
    check.run()
    assert not check.is_damaged, check.problems


@pytest.mark.parametrize("seed", range(5))
def test_a_replacement_that_is_interrupted_anywhere_leaves_the_old_or_the_new_log(
    seed: int,
) -> None:
    outcomes = set()
    for step in range(60):
        for crash in ("power", "kill"):
            disk = FaultyDisk(Random(seed * 1_000 + step))
            before, after = folder_with_incoming(disk, seed)
            disk.cut_power_after(step, then=lambda: None)
            try:
                begin_replacement(disk, FOLDER)
                Writer(disk, limits=LARGE)
                ended = True
            except PowerCut:
                ended = False
            disk.crash() if crash == "power" else disk.kill()
            again = Writer(disk, limits=LARGE)
            found = entries_of(again.log)
            assert found in (before, after)
            assert again.log.is_followed
            again.close()
            assert_clean(disk)
            outcomes.add((found == after, ended))
    assert {(False, False), (True, False), (True, True)} <= outcomes


def test_incoming_files_without_a_decision_are_removed() -> None:
    disk = FaultyDisk(Random(1))
    before, _ = folder_with_incoming(disk, 1)
    again = Writer(disk, limits=LARGE)
    assert entries_of(again.log) == before
    assert disk.list_folder(f"{FOLDER}/{INCOMING}") == []


def test_a_log_that_is_being_replaced_is_not_checked() -> None:
    disk = FaultyDisk(Random(1))
    folder_with_incoming(disk, 1)
    begin_replacement(disk, FOLDER)
    with pytest.raises(Unavailable, match="start its broker"):
        require_log(disk, FOLDER)
