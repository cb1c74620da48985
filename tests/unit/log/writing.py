"""A log that tests write to by hand: entries of a few topics, folded into their next offsets."""

from __future__ import annotations

from onward.log.checkpoint import Checkpoint, write_checkpoint
from onward.log.disk import Disk
from onward.log.log import Log, LogLimits
from onward.log.recovery import Opened, open_log
from onward.log.segment import Segment
from onward.message.entry import Draft, Entry, Kind, read_entry

FOLDER = "log"
LIMITS = LogLimits(segment_bytes_max=2_000, preallocate_bytes=0, disk_reserve_bytes=0)


class Writer:
    """An open log, and what was folded from it: topic -> next offset."""

    def __init__(self, disk: Disk, *, limits: LogLimits = LIMITS) -> None:
        self.disk = disk
        self.folded: list[int] = []
        self.next: dict[int, int] = {}
        self.opened: Opened = open_log(disk, FOLDER, limits=limits, load=self._load)
        self.log: Log = self.opened.log

    def _load(self, state: bytes):  # type: ignore[no-untyped-def]
        for pair in state.decode().split():
            topic, offset = pair.split(":")
            self.next[int(topic)] = int(offset)
        return self._apply

    def _apply(self, entry: Entry, body: memoryview) -> None:
        self.folded.append(entry.index)
        if entry.kind == Kind.MESSAGES:
            self.next[entry.topic] = entry.base_offset + entry.count

    def draft(self, topic: int, *, count: int = 1, size: int = 100, time_ms: int = 1_000) -> Draft:
        offset = self.next.get(topic, 0)
        self.next[topic] = offset + count
        body = bytes([1 + (topic * 7 + offset) % 255]) * size
        return Draft(Kind.MESSAGES, time_ms, topic, offset, count, [body])

    def append(self, *topics: int, sync: bool = True, **what: int) -> list[Entry]:
        """Write one entry for each topic, in one commit."""
        write = self.log.stage([self.draft(topic, **what) for topic in topics])
        self.log.perform(write, sync=sync)
        self.log.finish(write)
        if sync:
            self.log.synced_index = self.log.next_index - 1
        return write.entries

    def checkpoint(self) -> None:
        """Do what housekeeping does, on the spot."""
        tail = self.log.tail
        if tail.new.count:
            tail.freeze_rows()
        plan = tail.plan_runs()
        tail.sync()
        tail.runs = list(self.log.write_runs(tail, plan))
        state = " ".join(f"{topic}:{offset}" for topic, offset in self.next.items()).encode()
        log, names = self.log, [run.name for run in plan]
        write_checkpoint(
            self.disk, FOLDER,
            Checkpoint(
                log.next_index - 1, log.last_crc, tail.last_time_ms, log.term, tail.first_index,
                tail.bytes, names, state,
            ),
        )  # fmt: skip

    def seal(self) -> None:
        while (segment := self.log.unsealed()) is not None:
            self.log.sealed(segment, self.log.seal(segment))

    def roll(self) -> None:
        write = self.log.stage_roll()
        self.log.perform(write, sync=False)
        self.log.finish(write)

    def close(self) -> None:
        self.log.close()
        self.opened.unlock()

    def read(self, topic: int, offset: int = 0) -> list[tuple[int, int]]:
        """Read as a reader does, span by span; return (base offset, count) of each entry."""
        found: list[tuple[int, int]] = []
        hint: Segment | None = None
        while (span := self.log.plan(topic, offset, bytes_max=400, hint=hint)) is not None:
            entries = self.log.read(span, wait=True)
            assert entries is not None
            start = 0
            while start < len(entries):
                entry = read_entry(entries, start, position=0)
                assert entry is not None
                assert entry.topic == topic
                found.append((entry.base_offset, entry.count))
                start = entry.end
            offset, hint = span.end_offset, span.segment
        return found
