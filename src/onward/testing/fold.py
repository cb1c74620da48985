"""Does a log mean the same without what is kept beside it?

Index files, runs and checkpoints only save time: the log is the only truth. `compare_folds` opens
two copies of a folder, one as it is and one without these files, and says what differs. What
retention gave up lives only in checkpoints, so they stay where the log no longer begins at index 1
or has gaps.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import msgspec

from onward.broker.catalogue import Topic
from onward.broker.producers import WINDOW
from onward.broker.state import State, open_state
from onward.delivery.group import Group, Groups
from onward.delivery.share import Share
from onward.log.check import Check
from onward.log.disk import Disk
from onward.log.log import Log, LogLimits
from onward.log.memory_disk import MemoryDisk
from onward.log.recovery import list_segments, scan
from onward.message.entry import Kind
from onward.schedule.state import ScheduleState

Windows = dict[int, dict[int, tuple[int, int]]]
"""Producer id -> sequence -> (offset, event id)."""
_NOT_STORED = (-1, -1)


def copy_folder(disk: Disk, folder: str) -> MemoryDisk:
    """Return a disk with a copy of all files of `folder`, as they can be read now."""
    copy = MemoryDisk(chunk_bytes=4096)
    copy.make_folder(folder)
    for name in disk.list_folder(folder):
        file = disk.open(f"{folder}/{name}")
        copy.open(f"{folder}/{name}", create=True).write(0, [memoryview(file.map())])
        file.close()
    return copy


def compare_folds(disk: Disk, folder: str) -> list[str]:
    """Return what a folder means with its derived files and does not mean without them.

    `onward log check` must find nothing either: no crash is damage.
    """
    checked = copy_folder(disk, folder)
    with_files = _Fold(copy_folder(disk, folder), folder)
    bare = copy_folder(disk, folder)
    _remove_derived(bare, folder)
    without = _Fold(bare, folder)
    return [
        *_compare_state(with_files, without),
        *_compare_messages(with_files, without),
        *_check(checked, folder),
    ]


def compare_to_fold(state: State, disk: Disk, folder: str) -> list[str]:
    """Return where the state of a running broker differs from the fold of its log."""
    return list(compare_states(state, _Fold(copy_folder(disk, folder), folder).state))


def compare_states(one: State, other: State) -> Iterator[str]:
    """Yield where two states differ in what is durable. `one` may be that of a running leader.

    A leader knows more: what it took from the schedule and fired nowhere, and which messages
    that outlive retention nobody needs any more. What is on its way to the disk does not count.
    """
    if _records(one) != _records(other):
        yield f"topics are {_records(one)}, or {_records(other)}"
    yield from _compare_windows(_windows(one), _windows(other))
    yield from compare_groups(one.groups, other.groups)
    yield from _compare_schedules(one.schedule, other.schedule)
    if one.publishers.by_id != other.publishers.by_id:
        yield f"publishers are {one.publishers.by_id}, or {other.publishers.by_id}"


def compare_groups(groups: Groups, others: Groups) -> Iterator[str]:
    """Say where two groups of the same name differ in what is durable."""
    for name in sorted({*groups.by_name, *others.by_name}):
        one, other = groups.by_name.get(name), others.by_name.get(name)
        if one is None or other is None:
            yield f"group {name!r} exists, or does not"
            continue
        if (one.record, one.positions) != (other.record, other.positions):
            yield f"group {name!r} is {one.record} {one.positions}, or {other.record}"
        yield from _compare_shares(name, one, other)


def _compare_shares(name: str, one: Group, other: Group) -> Iterator[str]:
    for topic in sorted({*one.shares, *other.shares}):
        share, also = one.shares.get(topic), other.shares.get(topic)
        if share is None or also is None:
            yield f"group {name!r} has begun with {topic!r}, or has not"
        elif _durable(share) != _durable(also):
            yield f"group {name!r} has {_durable(share)} of {topic!r}, or {_durable(also)}"
        else:
            # Who was woken waits no more: that is not written, because time says it again.
            both = share.retries.keys() & also.retries.keys()
            if any(share.retries[offset] != also.retries[offset] for offset in both):
                yield f"group {name!r} waits for {share.retries} of {topic!r}, or {also.retries}"


def _durable(share: Share) -> tuple[object, ...]:
    # Two ways to write the same: the mark may stand anywhere behind what is finished.
    mark = share.mark
    unfinished = list(share.open)
    if unfinished and unfinished[-1][1] == mark:
        mark = unfinished.pop()[0]
    return mark, unfinished, share.attempts, share.alone, share.dead


def _check(disk: Disk, folder: str) -> Iterator[str]:
    if list_segments(disk, folder):
        check = Check(disk, folder)
        check.run()
        if check.is_damaged:
            yield f"a check finds {check.problems} and {check.damages}"


class _Fold:
    """A log that was opened, and what it means."""

    def __init__(self, disk: Disk, folder: str) -> None:
        opened, state = open_state(disk, folder, limits=LogLimits())
        self.log: Log = opened.log
        self.state = state

    def entries_of(self, topic: Topic, first_offset: int) -> bytes:
        """Return all entries of a topic from `first_offset` on."""
        found, offset = bytearray(), first_offset
        while (span := self.log.plan(topic.number, offset, bytes_max=1 << 20)) is not None:
            found += self.log.read(span, wait=True) or b""
            offset = span.end_offset
        return bytes(found)


def _remove_derived(disk: Disk, folder: str) -> None:
    is_whole = _is_whole(disk, folder)
    for name in disk.list_folder(folder):
        is_index = ".idx" in name
        if is_index or (is_whole and name.startswith("checkpoint-")):
            disk.remove(f"{folder}/{name}")


def _is_whole(disk: Disk, folder: str) -> bool:
    """Tell whether the log still has all entries that were ever written."""
    segments = list_segments(disk, folder)
    if not segments or segments[0].first_index != 1:
        return False
    return not any(e.kind == Kind.GAP for segment in segments for e, _ in scan(segment, 0))


def _compare_state(one: _Fold, other: _Fold) -> Iterator[str]:
    if one.log.next_index != other.log.next_index or one.log.last_crc != other.log.last_crc:
        yield f"the log ends at index {one.log.next_index}, or at {other.log.next_index}"
    yield from compare_states(one.state, other.state)


def _compare_schedules(one: ScheduleState, other: ScheduleState) -> Iterator[str]:
    """Say where two schedules differ: `one` may know more of what was taken and fired nowhere."""
    for name in ("cancelled", "replaced"):
        marks, others = getattr(one, name), getattr(other, name)
        if list(marks) != list(others):
            yield f"{name} in the schedule are {list(marks)}, or {list(others)}"
    if one.waiting != other.waiting:
        yield f"{one.waiting} messages wait in the schedule, or {other.waiting}"
    if (one.recurring, one.last_runs) != (other.recurring, other.last_runs):
        yield f"recurring are {one.recurring} {one.last_runs}, or {other.last_runs}"
    for topic in sorted({*one.cursors, *other.cursors}):
        if one.cursor_of(topic) < other.cursor_of(topic):
            yield f"{topic!r} has fired up to {one.cursor_of(topic)}, or {other.cursor_of(topic)}"


def _compare_windows(one: Windows, other: Windows) -> Iterator[str]:
    """Compare what a producer may still repeat: the last `WINDOW` sequences up to its highest."""
    for producer_id in sorted({*one, *other}):
        known, also = one.get(producer_id, {}), other.get(producer_id, {})
        # The highest one may have been refused; what lies a window before it was answered by then.
        oldest = max([*known, *also]) - WINDOW
        for sequence in sorted({*known, *also}):
            place, other_place = known.get(sequence, _NOT_STORED), also.get(sequence, _NOT_STORED)
            if sequence > oldest and place != other_place:
                yield f"{sequence} of producer {producer_id} is at {place}, or at {other_place}"


def _compare_messages(one: _Fold, other: _Fold) -> Iterator[str]:
    for number, topic in one.state.catalogue.by_number.items():
        also = other.state.catalogue.by_number.get(number)
        if also is not None:
            first = max(topic.first_offset, also.first_offset)
            if one.entries_of(topic, first) != other.entries_of(also, first):
                yield f"topic {topic.name!r} has other messages"


def _records(state: State) -> dict[int, tuple[object, int]]:
    topics = state.catalogue.by_number.items()
    return {
        number: (topic.record, topic.next_offset)
        for number, topic in sorted(topics)
        if topic.is_durable
    }


def _windows(state: State) -> Windows:
    saved = msgspec.msgpack.decode(state.producers.save(), type=dict[int, bytes])
    return {producer_id: _window(array("Q", packed)) for producer_id, packed in saved.items()}


def _window(packed: array[int]) -> dict[int, tuple[int, int]]:
    slots = range(2, len(packed), 3)
    found = {packed[at] - 1: (packed[at + 1], packed[at + 2]) for at in slots if packed[at]}
    return {packed[0]: _NOT_STORED} | found
