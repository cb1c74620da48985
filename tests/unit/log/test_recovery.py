"""Opening a log after anything: the end, a torn tail, or corruption, never mixed up."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.errors import Corruption, Unavailable
from onward.log.check import Check
from onward.log.memory_disk import MemoryDisk
from onward.log.recovery import open_log
from onward.log.retention import rewrite
from onward.testing.disk import Faults, FaultyDisk

from .writing import FOLDER, LIMITS, Writer


def test_a_new_folder_begins_at_index_one() -> None:
    writer = Writer(MemoryDisk())
    assert writer.log.next_index == 1
    assert writer.opened.cut_bytes == 0


def test_a_folder_in_use_is_refused_and_one_given_back_is_not() -> None:
    disk = MemoryDisk()
    writer = Writer(disk)
    with pytest.raises(Unavailable, match="in use"):
        Writer(disk)
    writer.close()
    Writer(disk)


def test_a_failed_opening_gives_the_lock_back() -> None:
    disk = MemoryDisk()
    Writer(disk).close()

    def load(state: bytes):  # type: ignore[no-untyped-def]
        raise RuntimeError("cannot")

    with pytest.raises(RuntimeError):
        open_log(disk, FOLDER, limits=LIMITS, load=load)
    Writer(disk)


def test_everything_is_folded_again_from_the_first_entry() -> None:
    disk = MemoryDisk()
    writer = Writer(disk)
    for _ in range(30):
        writer.append(1, 2)
    writer.close()
    again = Writer(disk)
    assert again.folded == list(range(1, 61))
    assert again.read(2) == writer.read(2)


def test_after_a_checkpoint_only_what_came_later_is_folded() -> None:
    disk = MemoryDisk()
    writer = Writer(disk)
    for _ in range(30):
        writer.append(1)
    writer.seal()
    writer.checkpoint()
    writer.append(2, 1)
    writer.close()
    again = Writer(disk)
    assert again.folded == [31, 32]
    assert again.next == {1: 31, 2: 1}
    assert again.read(1) == [(number, 1) for number in range(31)]


@pytest.mark.parametrize("kind", ["runs", "index", "checkpoint", "all"])
def test_derived_files_that_are_lost_are_built_again(kind: str) -> None:
    disk = MemoryDisk()
    writer = Writer(disk)
    for number in range(40):
        writer.append(1, 2)
        if number % 7 == 0:
            writer.checkpoint()
    writer.seal()
    writer.checkpoint()
    expected = writer.read(1), writer.read(2), dict(writer.next)
    writer.close()
    for name in disk.list_folder(FOLDER):
        lost = {"runs": ".run-", "index": ".idx", "checkpoint": "checkpoint-"}.get(kind, "")
        if lost in name and not name.endswith(".log"):
            disk.remove(f"{FOLDER}/{name}")
    again = Writer(disk)
    assert (again.read(1), again.read(2), again.next) == expected


def test_a_damaged_index_file_is_built_again() -> None:
    disk = FaultyDisk(Random(1))
    writer = Writer(disk)
    for _ in range(30):
        writer.append(1)
    writer.seal()
    writer.checkpoint()
    path = writer.log.segments[0].index_path
    writer.close()
    disk.flip_bit(path, 100)
    again = Writer(disk)
    assert again.read(1) == [(number, 1) for number in range(30)]
    assert again.log.segments[0].new.count == 0


def test_a_tail_torn_at_any_byte_is_saved_aside_and_cut() -> None:
    whole = MemoryDisk()
    writer = Writer(whole)
    writer.append(1, 2)
    (last,) = writer.append(1, sync=False)
    content = whole.open(writer.log.tail.path).map()
    for size in range(last.position + 1, last.end):
        disk = MemoryDisk()
        disk.make_folder(FOLDER)
        disk.open(writer.log.tail.path, create=True).write(0, [content[:size]])
        again = Writer(disk)
        assert again.folded == [1, 2]
        torn = content[last.position : size].rstrip(b"\0")
        assert again.opened.cut_bytes == len(torn)
        (aside,) = [name for name in disk.list_folder(FOLDER) if "broken" in name]
        assert disk.open(f"{FOLDER}/{aside}").map() == torn
        again.append(1)
        assert again.read(1) == [(0, 1), (1, 1)]


def test_space_taken_ahead_is_the_end_and_not_damage() -> None:
    disk = MemoryDisk()
    writer = Writer(disk)
    writer.append(1)
    writer.log.tail.file.reserve(50_000)
    writer.close()
    again = Writer(disk)
    assert (again.folded, again.opened.cut_bytes) == ([1], 0)


def test_an_entry_that_ends_in_zeros_is_whole() -> None:
    disk = MemoryDisk()
    writer = Writer(disk)
    draft = writer.draft(1)._replace(parts=[bytes(500)])
    write = writer.log.stage([draft])
    writer.log.perform(write, sync=True)
    writer.close()
    assert Writer(disk).folded == [1]


def test_damage_that_a_later_entry_proves_to_have_been_durable_is_corruption() -> None:
    disk = FaultyDisk(Random(1))
    writer = Writer(disk)
    (first,) = writer.append(1)
    writer.append(1)
    writer.close()
    path = writer.log.segments[0].path
    disk.flip_bit(path, first.position + 90)
    before = disk.open(path).map()
    with pytest.raises(Corruption, match="damaged at byte 0"):
        Writer(disk)
    assert disk.open(path).map() == before


def test_damage_before_entries_that_were_never_synced_is_a_torn_tail() -> None:
    disk = FaultyDisk(Random(1))
    writer = Writer(disk)
    writer.append(1)
    (second,) = writer.append(1, sync=False)
    writer.append(1, sync=False)
    writer.close()
    disk.flip_bit(writer.log.segments[0].path, second.position + 90)
    again = Writer(disk)
    assert again.folded == [1]
    assert again.opened.cut_bytes > 0


def test_damage_in_a_segment_that_others_follow_is_corruption() -> None:
    disk = FaultyDisk(Random(1))
    writer = Writer(disk)
    for _ in range(30):
        writer.append(1, sync=False)
    last = writer.log.segments[0].bytes - 8
    writer.close()
    disk.flip_bit(writer.log.segments[0].path, last)
    with pytest.raises(Corruption):
        Writer(disk)


def test_a_log_that_ends_before_its_checkpoint_is_corruption() -> None:
    disk = FaultyDisk(Random(1))
    writer = Writer(disk)
    writer.append(1)
    end = writer.log.tail.bytes
    writer.append(1)
    writer.checkpoint()
    writer.close()
    disk.cut(writer.log.tail.path, end)
    with pytest.raises(Corruption):
        Writer(disk)


def test_a_log_without_its_beginning_needs_a_checkpoint() -> None:
    disk = MemoryDisk()
    writer = Writer(disk)
    for _ in range(30):
        writer.append(1)
    writer.close()
    disk.remove(writer.log.segments[0].path)
    with pytest.raises(Corruption, match="no valid checkpoint"):
        Writer(disk)


def test_a_gap_of_retention_that_no_checkpoint_knows_is_corruption() -> None:
    disk = MemoryDisk()
    writer = Writer(disk)
    for _ in range(30):
        writer.append(1)
    writer.append(2)
    writer.roll()
    writer.seal()
    writer.checkpoint()
    first = writer.log.segments[0]
    writer.log.replace(first, rewrite(writer.log, first, is_dead=lambda one: one.topic == 1))
    writer.close()
    again = Writer(disk)
    assert again.next == {1: 30, 2: 1}, "the checkpoint knows"
    again.close()
    for name in disk.list_folder(FOLDER):
        if name.startswith("checkpoint"):
            disk.remove(f"{FOLDER}/{name}")
    with pytest.raises(Corruption, match="restore a checkpoint file"):
        Writer(disk)
    check = Check(disk, FOLDER)
    check.run()
    assert ["restore a checkpoint file" in problem for problem in check.problems] == [True]


def test_a_missing_segment_in_the_middle_is_corruption() -> None:
    disk = MemoryDisk()
    writer = Writer(disk)
    for _ in range(40):
        writer.append(1)
    writer.close()
    disk.remove(writer.log.segments[1].path)
    with pytest.raises(Corruption):
        Writer(disk)


def test_the_newest_checkpoint_may_be_damaged_when_the_one_before_is_not() -> None:
    disk = FaultyDisk(Random(1))
    writer = Writer(disk)
    for _ in range(3):
        writer.append(1, 2)
        writer.checkpoint()
    writer.close()
    newest = [name for name in disk.list_folder(FOLDER) if name.startswith("checkpoint")][-1]
    disk.flip_bit(f"{FOLDER}/{newest}", 20)
    again = Writer(disk)
    assert again.folded == [5, 6]
    assert again.next == writer.next
    assert again.read(1) == writer.read(1)


def test_an_empty_segment_at_the_end_is_used() -> None:
    disk = MemoryDisk()
    writer = Writer(disk)
    writer.append(1)
    writer.roll()
    writer.close()
    again = Writer(disk)
    assert len(again.log.segments) == 2
    again.append(1)
    assert again.read(1) == [(0, 1), (1, 1)]


def test_what_was_written_without_a_sync_is_synced_at_the_next_start() -> None:
    disk = FaultyDisk(Random(1))
    writer = Writer(disk)
    writer.append(1, sync=False)
    disk.kill()
    again = Writer(disk)
    assert again.log.synced_index == 1
    disk.crash(unsynced="lost")
    assert Writer(disk).folded == [1]


Step = tuple[str, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["sync", "memory", "many", "checkpoint", "seal", "roll", "crash", "kill"]),
        st.integers(1, 3),
    ),
    min_size=1,
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@given(STEPS, st.integers(0, 2**32))
def test_whatever_happens_nothing_synced_is_lost_and_offsets_stay_dense(
    steps: list[Step], seed: int
) -> None:
    disk = FaultyDisk(Random(seed), faults=Faults(short_write=0.2))
    writer = Writer(disk)
    synced: dict[int, int] = {}
    for step, topic in [*steps, ("crash", 0)]:
        if step in ("sync", "memory"):
            writer.append(topic, sync=step == "sync", count=topic)
        elif step == "many":
            writer.append(*[topic, 1] * 5, sync=False, size=300)
        elif step == "checkpoint":
            writer.checkpoint()
        elif step == "seal":
            writer.seal()
        elif step == "roll" and writer.log.tail.bytes:
            writer.roll()
        if step in ("sync", "checkpoint"):
            synced = dict(writer.next)
        if step not in ("crash", "kill"):
            continue
        written = dict(writer.next)
        if step == "crash":
            disk.crash()
        else:
            disk.kill()
            synced = written
        writer = Writer(disk)
        for one in written:
            reached = sum(count for _, count in writer.read(one))
            assert synced.get(one, 0) <= reached <= written[one]
            assert writer.next.get(one, 0) == reached
            spans = writer.read(one)
            assert [base for base, _ in spans] == [
                sum(count for _, count in spans[:number]) for number in range(len(spans))
            ]
        synced = dict(writer.next)


def test_a_log_without_the_segment_that_its_checkpoint_knows_is_never_opened() -> None:
    disk = FaultyDisk(Random(1))
    writer = Writer(disk)
    writer.append(1, sync=True)
    writer.checkpoint()
    (name,) = [name for name in disk.list_folder("log") if name.endswith(".log")]
    disk.kill()
    disk.remove(f"log/{name}")
    with pytest.raises(Corruption, match="is missing, but a checkpoint knows what it held"):
        Writer(disk)
