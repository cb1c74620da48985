"""Check, walk and repair: damage is found wherever it is, and repaired only by what it costs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from onward.errors import Corruption, InvalidRequest, Unavailable
from onward.log.check import Check
from onward.log.checkpoint import Checkpoint, write_checkpoint
from onward.log.index import write_rows
from onward.log.inspect import Damage, Lost, Walk, lock_folder, require_log
from onward.log.log import Log, LogLimits
from onward.log.memory_disk import MemoryDisk
from onward.log.recovery import open_log
from onward.log.repair import losses, needs_repair, reopen, repair
from onward.message.entry import Draft, Entry, Kind

FOLDER = "log"
LIMITS = LogLimits(segment_bytes_max=2_000, preallocate_bytes=0)


@dataclass
class Folder:
    """A closed log, its entries in order, and what a test does to it."""

    disk: MemoryDisk
    entries: list[tuple[str, Entry]]
    """(path of its segment, entry) of each."""

    def flip(self, index: int, at: int = 80) -> None:
        """Change one byte of an entry."""
        path, entry = self.entries[index - 1]
        file = self.disk.open(path)
        byte = file.read(entry.position + at, 1)[0]
        file.write(entry.position + at, [bytes([byte ^ 1])])

    def write(self, path: str, position: int, content: bytes) -> None:
        self.disk.open(path).write(position, [content])

    def cut(self, path: str, size: int) -> None:
        self.disk.open(path).truncate(size)

    def check(self) -> Check:
        check = Check(self.disk, FOLDER)
        check.run()
        return check

    def indexes(self) -> list[int]:
        """Open the log as a broker would and return the indexes that it folds."""
        seen: list[int] = []
        opened = open_log(
            self.disk, FOLDER, limits=LIMITS, load=lambda _: lambda e, _: seen.append(e.index)
        )
        opened.log.close()
        opened.unlock()
        return seen

    def repair(self) -> list[str]:
        """Repair everything, and let the log be opened as a broker does it."""
        done = repair(self.disk, self.check(), accept_loss=True)
        reopen(self.disk, FOLDER)
        return done

    @property
    def names(self) -> list[str]:
        return [path.removeprefix(f"{FOLDER}/") for path in self.paths]

    @property
    def paths(self) -> list[str]:
        return sorted({path for path, _ in self.entries})


def make(count: int = 30, *, checkpoint_at: int = 0, seal: bool = True) -> Folder:
    """Write `count` entries, to topics 1 and 2 in turn, four messages each."""
    disk = MemoryDisk()
    opened = open_log(disk, FOLDER, limits=LIMITS, load=lambda _: lambda e, b: None)
    log, entries = opened.log, []
    for number in range(count):
        body = bytes([number]) * 128
        draft = Draft(Kind.MESSAGES, 1_000 + number, 1 + number % 2, number // 2 * 4, 4, [body])
        write = log.stage([draft])
        log.perform(write, sync=True)
        log.finish(write)
        log.synced_index = log.next_index - 1
        entries.append((log.tail.path, write.entries[0]))
        if number + 1 == checkpoint_at:
            save(disk, log)
    while seal and (segment := log.unsealed()) is not None:
        log.sealed(segment, log.seal(segment))
    log.close()
    opened.unlock()
    return Folder(disk, entries)


def save(disk: MemoryDisk, log: Log) -> None:
    """Leave a checkpoint, with a run of the rows so far."""
    tail = log.tail
    write_rows(disk, tail.run_path(0), first_index=tail.first_index, sources=[tail.freeze_rows()])
    runs = [tail.run_path(0).rsplit("/", 1)[-1]]
    write_checkpoint(
        disk, FOLDER,
        Checkpoint(log.next_index - 1, log.last_crc, 0, 0, tail.first_index, tail.bytes, runs, b""),
    )  # fmt: skip


def test_a_sound_log_is_found_sound():
    folder = make(checkpoint_at=28)
    check = folder.check()
    assert not check.is_damaged
    assert not needs_repair(check)
    assert sum(report.entries for report in check.reports) == 30
    assert [report.index for report in check.reports] == ["ok"] * len(check.reports)
    assert check.bytes == sum(report.bytes for report in check.reports)


@pytest.mark.parametrize("index", range(1, 30))
@pytest.mark.parametrize("at", [0, 5, 9, 14, 20, 50, 70, 199])
def test_a_flipped_bit_is_found_in_every_entry_but_the_last(index: int, at: int):
    folder = make()
    folder.flip(index, at)
    check = folder.check()
    (damage,) = check.damages
    assert check.is_damaged
    assert (damage.kind, damage.first_index, damage.next_index) == ("damaged", index, index + 1)
    assert (damage.position, damage.end) == span(folder, index)
    offset = (index - 1) // 2 * 4
    if index <= 28:
        assert damage.lost == [Lost(1 + (index - 1) % 2, offset, offset + 4)]


def span(folder: Folder, index: int) -> tuple[int, int]:
    entry = folder.entries[index - 1][1]
    return entry.position, entry.end


@pytest.mark.parametrize("index", range(1, 30))
@pytest.mark.parametrize("checkpoint_at", [0, 12, 25, 30])
def test_a_repaired_log_is_sound_opens_and_has_all_the_rest(index: int, checkpoint_at: int):
    folder = make(checkpoint_at=checkpoint_at)
    folder.flip(index)
    assert folder.repair()
    check = folder.check()
    assert not check.is_damaged, (check.problems, check.damages)
    assert not needs_repair(check)
    walked = [step[0].index for step in walk(folder) if not isinstance(step, Damage)]
    assert walked == list(range(1, 31))
    assert folder.indexes() == list(range(checkpoint_at + 1, 31))


def walk(folder: Folder, *, from_index: int = 0) -> Iterator[tuple[Entry, memoryview] | Damage]:
    walking = Walk(folder.disk, FOLDER, from_index=from_index)
    for segment in walking.segments:
        yield from walking.steps(segment)


def test_the_damaged_bytes_are_saved_aside():
    folder = make()
    folder.flip(3)
    path, entry = folder.entries[2]
    before = folder.disk.open(path).read(entry.position, entry.length)
    folder.repair()
    aside = folder.disk.open(f"{path}.broken-{entry.position}")
    assert aside.read(0, aside.size()) == before


def test_without_consent_nothing_that_costs_is_done():
    folder = make()
    folder.flip(3)
    path, _ = folder.entries[2]
    size = folder.disk.open(path).size()
    before = folder.disk.open(path).read(0, size)
    assert repair(folder.disk, folder.check(), accept_loss=False) == []
    assert folder.disk.open(path).read(0, size) == before
    assert len(losses(folder.check())) == 1
    with pytest.raises(Corruption):
        reopen(folder.disk, FOLDER)


def test_damage_over_several_entries_is_one_gap():
    folder = make()
    path, first = folder.entries[1]
    folder.write(path, first.position, bytes(range(256)) * 2)
    (damage,) = folder.check().damages
    assert damage.entries == 3
    folder.repair()
    assert not folder.check().is_damaged
    assert folder.indexes() == [1, 2, *range(5, 31)]


def test_damage_across_the_checkpoint_leaves_the_checkpoint_true():
    folder = make(checkpoint_at=28)
    path, before = folder.entries[27]
    folder.write(path, before.position, b"x" * (before.length + 100))
    assert [damage.entries for damage in folder.check().damages] == [1, 1]
    folder.repair()
    assert not folder.check().is_damaged
    assert folder.indexes() == [29, 30]


def test_damage_to_the_end_of_a_full_segment_costs_only_that_segment():
    folder = make()
    path = folder.paths[1]
    last = [entry for at, entry in folder.entries if at == path]
    folder.write(path, last[-2].position, b"\xff" * 400)
    (damage,) = folder.check().damages
    assert (damage.first_index, damage.entries) == (last[-2].index, 2)
    folder.repair()
    assert not folder.check().is_damaged
    assert folder.indexes() == [i for i in range(1, 31) if i != last[-1].index]


@pytest.mark.parametrize("bytes_left", [0, 40, 200, 250, 1_000])
def test_a_full_segment_that_was_cut_short_is_closed_with_a_gap(bytes_left: int):
    folder = make(checkpoint_at=30)
    folder.cut(folder.paths[1], bytes_left)
    check = folder.check()
    assert check.is_damaged
    folder.repair()
    after = folder.check()
    assert not after.is_damaged, after.damages


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_gap_before_an_empty_segment_goes_on_from_what_its_checkpoint_says(is_cut: bool):
    folder = make(5)
    roll(folder)
    path, last = folder.entries[-1]
    if is_cut:
        folder.cut(path, last.position)
    else:
        folder.flip(5)
    assert folder.check().problems == []
    folder.repair()
    assert not needs_repair(folder.check())
    append(folder, 4)
    assert not folder.check().is_damaged, "what is appended fits to the gap"
    assert folder.indexes() == [6, 7, 8, 9]


def roll(folder: Folder) -> None:
    """Begin another segment, and leave a checkpoint in it."""
    opened = open_log(folder.disk, FOLDER, limits=LIMITS, load=lambda _: lambda e, b: None)
    log = opened.log
    write = log.stage_roll()
    log.perform(write, sync=True)
    log.finish(write)
    while (segment := log.unsealed()) is not None:
        log.sealed(segment, log.seal(segment))
    begun = Checkpoint(log.next_index - 1, log.last_crc, 0, 0, log.tail.first_index, 0, [], b"")
    write_checkpoint(folder.disk, FOLDER, begun)
    log.close()
    opened.unlock()


def append(folder: Folder, count: int) -> None:
    """Write more entries, as a broker does that is started again."""
    opened = open_log(folder.disk, FOLDER, limits=LIMITS, load=lambda _: lambda e, b: None)
    for number in range(count):
        draft = Draft(Kind.MESSAGES, 2_000 + number, 1, 100 + number, 1, [b"more" * 32])
        write = opened.log.stage([draft])
        opened.log.perform(write, sync=True)
        opened.log.finish(write)
    opened.log.close()
    opened.unlock()


def test_bytes_after_the_last_entry_of_a_full_segment_cost_nothing():
    folder = make(checkpoint_at=30)
    path = folder.paths[1]
    size = folder.disk.open(path).size()
    folder.write(path, size, b"\0" * 64 + b"rest")
    check = folder.check()
    assert [damage.kind for damage in check.damages] == ["trailing"]
    assert check.is_damaged
    assert losses(check) == []
    folder.repair()
    assert folder.disk.open(path).size() == size
    assert not folder.check().is_damaged


def test_a_torn_tail_is_no_damage_and_is_cut():
    folder = make()
    path, last = folder.entries[-1]
    folder.cut(path, last.end - 16)
    check = folder.check()
    assert [damage.kind for damage in check.damages] == ["torn"]
    assert not check.is_damaged
    repair(folder.disk, check, accept_loss=False)
    assert folder.disk.open(path).size() == last.position
    assert folder.check().damages == []


def test_what_the_checkpoint_says_was_durable_is_no_torn_tail():
    folder = make(checkpoint_at=30)
    path, last = folder.entries[-1]
    folder.cut(path, last.end - 16)
    (damage,) = folder.check().damages
    assert (damage.kind, damage.first_index, damage.entries) == ("damaged", 30, 1)
    assert damage.lost == [Lost(2, 56, 60)]
    folder.repair()
    assert not folder.check().is_damaged


def test_space_taken_ahead_is_the_end_of_the_log():
    folder = make()
    path, last = folder.entries[-1]
    folder.write(path, last.end, bytes(4_096))
    assert folder.check().damages == []


def test_a_message_that_holds_an_entry_does_not_mislead():
    disk = MemoryDisk()
    opened = open_log(disk, FOLDER, limits=LogLimits(), load=lambda _: lambda e, b: None)
    entries: list[tuple[str, Entry]] = []
    other = make()
    path, inner = other.entries[20]
    bodies = [b"a" * 64, other.disk.open(path).read(inner.position, inner.length), b"c" * 64]
    for number, body in enumerate(bodies):
        write = opened.log.stage([Draft(Kind.MESSAGES, 0, 1, number, 1, [body])])
        opened.log.perform(write, sync=True)
        opened.log.finish(write)
        opened.log.synced_index += 1
        entries.append((opened.log.tail.path, write.entries[0]))
    opened.log.close()
    opened.unlock()
    folder = Folder(disk, entries)
    folder.flip(2, at=0)
    (damage,) = folder.check().damages
    assert (damage.first_index, damage.next_index) == (2, 3)


def test_a_wrong_index_file_is_found_and_built_again():
    folder = make(checkpoint_at=30)
    idx = folder.paths[0].replace(".log", ".idx")
    file = folder.disk.open(idx)
    file.write(100, [b"\xff"])
    assert folder.check().reports[0].index == "wrong"
    folder.repair()
    assert folder.check().reports[0].index == "ok"


def test_an_index_file_of_another_segment_is_found():
    folder = make(checkpoint_at=30)
    first, second = (path.replace(".log", ".idx") for path in folder.paths[:2])
    source = folder.disk.open(second)
    content = source.read(0, source.size())
    target = folder.disk.open(first)
    target.truncate(0)
    target.write(0, [content])
    assert folder.check().reports[0].index == "wrong"
    folder.repair()
    assert not needs_repair(folder.check())


def test_a_missing_index_file_is_no_damage_and_is_built():
    folder = make(checkpoint_at=30)
    folder.disk.remove(folder.paths[0].replace(".log", ".idx"))
    check = folder.check()
    assert check.reports[0].index == "missing"
    assert not check.is_damaged
    folder.repair()
    assert folder.check().reports[0].index == "ok"


def test_a_damaged_checkpoint_is_put_away_when_the_log_opens_without_it():
    folder = make(checkpoint_at=30)
    (name,) = [n for n in folder.disk.list_folder(FOLDER) if n.startswith("checkpoint-")]
    folder.write(f"{FOLDER}/{name}", 30, b"\xff\xff")
    assert folder.check().problems == [f"{name} is damaged"]
    folder.repair()
    assert not folder.check().is_damaged
    assert folder.indexes() == list(range(1, 31))


def test_a_log_without_its_beginning_needs_a_checkpoint():
    folder = make()
    folder.disk.remove(folder.paths[0])
    missing, problem = folder.check().problems
    assert missing == f"{folder.names[0]} is missing, but its index file is there"
    assert "restore a checkpoint file" in problem
    with pytest.raises(Corruption, match=f"{folder.names[0]} cannot be brought back"):
        folder.repair()


def test_a_missing_first_segment_is_found_and_can_be_given_up_beside_a_checkpoint():
    folder = make(checkpoint_at=30)
    folder.disk.remove(folder.paths[0])
    with pytest.raises(Corruption, match=f"{folder.names[0]} is missing"):
        folder.indexes()
    check = folder.check()
    assert check.problems == [f"{folder.names[0]} is missing, but its index file is there"]
    assert check.is_damaged
    assert folder.repair() == [f"given up: {folder.names[0]}, which is missing"]
    assert not needs_repair(folder.check())
    assert folder.indexes() == []


def test_a_missing_newest_segment_is_given_up_only_with_consent():
    folder = make(checkpoint_at=30)
    folder.disk.remove(folder.paths[-1])
    with pytest.raises(Corruption, match=f"{folder.names[-1]} is missing"):
        folder.indexes()
    check = folder.check()
    assert check.is_damaged
    assert f"{folder.names[-1]} is missing, but the newest checkpoint" in check.problems[0]
    assert check.reports[-1].is_missing
    (damage,) = check.damages
    assert (damage.first_index, damage.next_index, damage.has_rows) == (28, 31, True)
    assert damage.lost == [Lost(1, 56, 60), Lost(2, 52, 60)]
    assert [(one.name, one.last_index) for one in check.endings] == [(folder.names[-1], 30)]
    before = folder.disk.list_folder(FOLDER)
    assert repair(folder.disk, check, accept_loss=False) == []
    assert folder.disk.list_folder(FOLDER) == before


def test_after_a_missing_newest_segment_the_log_goes_on_where_its_checkpoint_was():
    folder = make(checkpoint_at=30)
    folder.disk.remove(folder.paths[-1])
    done = folder.repair()
    assert f"given up: {folder.names[-1]}, which is missing" in done
    assert not needs_repair(folder.check())
    assert folder.indexes() == []
    assert reopen(folder.disk, FOLDER) == 31
    walked = [step[0] for step in walk(folder) if not isinstance(step, Damage)]
    assert [entry.index for entry in walked] == list(range(1, 29))
    assert walked[-1].kind == Kind.GAP


def test_a_newest_segment_that_was_just_begun_is_given_up_as_an_empty_one():
    folder = make(27, checkpoint_at=27)
    begun = Checkpoint(27, folder.entries[-1][1].crc, 0, 0, 28, 0, [], b"")
    write_checkpoint(folder.disk, FOLDER, begun)
    with pytest.raises(Corruption, match=r"0028\.log is missing"):
        folder.indexes()
    check = folder.check()
    assert (check.is_damaged, check.damages) == (True, [])
    assert [one.last_index for one in check.endings] == [27]
    folder.repair()
    assert not needs_repair(folder.check())
    assert reopen(folder.disk, FOLDER) == 28


def test_a_newest_segment_that_was_cut_below_its_checkpoint_ends_the_log_there():
    folder = make(checkpoint_at=30)
    folder.cut(folder.paths[-1], 100)
    assert [one.last_index for one in folder.check().endings] == [30]
    intact = make(checkpoint_at=30)
    intact.flip(30)
    assert intact.check().endings == []


def test_an_index_file_after_the_end_is_put_away_and_tells_what_is_given_again():
    folder = make(checkpoint_at=12)
    for path in folder.paths[2:]:
        folder.disk.remove(path)
    with pytest.raises(Corruption, match=f"{folder.names[2]} is missing"):
        folder.indexes()
    (ending,) = folder.check().endings
    assert (ending.name, ending.last_index) == (folder.names[2], 18)
    assert ending.lost == [Lost(1, 36, 56), Lost(2, 36, 52)]
    aside = folder.names[2].replace(".log", ".idx.broken")
    assert f"put {aside.removesuffix('.broken')} away as {aside}" in folder.repair()
    assert aside in folder.disk.list_folder(FOLDER)
    assert not needs_repair(folder.check())
    assert folder.indexes() == list(range(13, 19))


def test_an_index_file_of_no_segment_is_found():
    folder = make(checkpoint_at=30)
    folder.disk.open(f"{FOLDER}/00000000000000000099.idx", create=True)
    with pytest.raises(Corruption, match=r"0099\.log is missing"):
        folder.indexes()
    check = folder.check()
    assert check.problems == ["00000000000000000099.log is missing, but its index file is there"]
    assert [(one.last_index, one.lost) for one in check.endings] == [(30, [])]
    folder.repair()
    assert not needs_repair(folder.check())
    assert folder.indexes() == []


def test_a_first_segment_without_bytes_is_found_and_never_taken_for_an_unused_one():
    for checkpoint_at in (0, 12, 30):
        for empty in (0, 1_800):
            folder = make(checkpoint_at=checkpoint_at)
            folder.cut(folder.paths[0], 0)
            folder.cut(folder.paths[0], empty)
            check = folder.check()
            assert check.is_damaged
            (damage,) = check.damages
            assert (damage.first_index, damage.next_index) == (1, 10)
            assert damage.lost == [Lost(1, 0, 20), Lost(2, 0, 16)]


def test_a_start_does_not_build_an_index_of_nothing_for_a_segment_without_bytes():
    folder = make(checkpoint_at=30, seal=False)
    folder.cut(folder.paths[0], 0)
    with pytest.raises(Corruption, match=f"{folder.names[0]} is damaged at byte 0"):
        folder.indexes()


def test_a_log_of_one_empty_segment_that_is_not_the_first_needs_a_checkpoint():
    folder = make()
    for path in folder.paths[:-1]:
        folder.disk.remove(path)
        folder.disk.remove(path.replace(".log", ".idx"))
    folder.cut(folder.paths[-1], 0)
    with pytest.raises(Corruption, match="no valid checkpoint"):
        folder.indexes()
    (problem,) = folder.check().problems
    assert "restore a checkpoint file" in problem


def remove(folder: Folder, path: str) -> None:
    folder.disk.remove(path)


def remove_with_index(folder: Folder, path: str) -> None:
    folder.disk.remove(path)
    remove_index(folder, path)


def empty(folder: Folder, path: str) -> None:
    folder.cut(path, 0)


def empty_without_index(folder: Folder, path: str) -> None:
    folder.cut(path, 0)
    remove_index(folder, path)


def fill_with_zeros(folder: Folder, path: str) -> None:
    folder.write(path, 0, bytes(folder.disk.open(path).size()))


def halve(folder: Folder, path: str) -> None:
    folder.cut(path, folder.disk.open(path).size() // 2 + 3)


def remove_index(folder: Folder, path: str) -> None:
    index = path.replace(".log", ".idx")
    if index.removeprefix(f"{FOLDER}/") in folder.disk.list_folder(FOLDER):
        folder.disk.remove(index)


HARMS = [remove, remove_with_index, empty, empty_without_index, fill_with_zeros, halve]


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
@pytest.mark.parametrize("segment", range(4))
@pytest.mark.parametrize("seal", [True, False], ids=["sealed", "unsealed"])
@pytest.mark.parametrize("checkpoint_at", [0, 1, 12, 25, 30])
def test_what_a_start_refuses_a_check_finds_and_a_repair_mends_if_anything_can(
    checkpoint_at: int, *, seal: bool, segment: int, harm: Callable[[Folder, str], None]
):
    started, folder = (make(checkpoint_at=checkpoint_at, seal=seal) for _ in range(2))
    harm(started, started.paths[segment])
    harm(folder, folder.paths[segment])
    try:
        started.indexes()
    except Corruption:
        assert folder.check().is_damaged
    try:
        folder.repair()
    except Corruption:
        # Nobody knows what came before the beginning.
        assert (checkpoint_at, segment, harm in (remove, remove_with_index)) == (0, 0, True)
    else:
        assert not folder.check().is_damaged
        assert folder.indexes() is not None


def test_the_index_file_of_a_damaged_segment_is_not_called_missing():
    folder = make(checkpoint_at=30)
    folder.flip(2)
    assert folder.check().reports[0].index == "unchecked"


def test_a_checkpoint_that_does_not_fit_the_log_is_found():
    folder = make()
    path, last = folder.entries[-1]
    first_index = int(path.removeprefix(f"{FOLDER}/").removesuffix(".log"))
    wrong = Checkpoint(30, last.crc ^ 1, 0, 0, first_index, last.end, [], b"")
    write_checkpoint(folder.disk, FOLDER, wrong)
    assert folder.check().problems == ["the newest checkpoint does not fit the log"]


def test_a_walk_can_begin_in_the_middle():
    folder = make()
    steps = list(walk(folder, from_index=15))
    indexes = [step[0].index for step in steps if not isinstance(step, Damage)]
    assert len(indexes) == len(steps)
    assert indexes[0] <= 15
    assert indexes[-1] == 30


def test_a_repair_that_was_interrupted_can_be_run_again():
    folder = make()
    folder.flip(3)
    folder.flip(9)
    check = folder.check()
    check.reports[0].damages.clear()
    check.reports[0].index = "ok"
    repair(folder.disk, check, accept_loss=True)
    assert folder.check().is_damaged
    folder.repair()
    assert not folder.check().is_damaged


def test_a_folder_in_use_is_left_alone():
    folder = make()
    unlock = lock_folder(folder.disk, FOLDER)
    with pytest.raises(Unavailable, match="in use"):
        lock_folder(folder.disk, FOLDER)
    unlock()
    lock_folder(folder.disk, FOLDER)()


def test_a_folder_without_a_log_is_said_and_not_touched():
    disk = MemoryDisk()
    disk.make_folder("other")
    for name in ("other", "nowhere"):
        with pytest.raises(InvalidRequest, match="there is no log"):
            require_log(disk, name)
    assert disk.list_folder("other") == []
