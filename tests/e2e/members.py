"""Members of groups as processes that are killed, and what must be true of all they did.

The checker knows what members noted (`member_program`), how often the broker was killed, and the
rows of `@trace`. Each message is taken once, and once more for each row and each kill of the broker
that explains it; after a confirmed ack it is never seen again.
"""

import os
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import onward
from onward.delivery.trace import Trace, decode_row

from .running import BrokerProcess, until

PATIENCE_S = 120.0
PROGRAM = Path(__file__).parent / "member_program.py"
COMES_AGAIN = ("retried", "expired", "lost")
"""Rows after which a message is delivered once more, and the attempt has counted."""


class Got(NamedTuple):
    """One delivery, as a member noted it."""

    offset: int
    attempt: int


class MemberProcess:
    """One name in one group; the process behind it comes and goes, its notes stay."""

    def __init__(
        self, broker: BrokerProcess, *, group: str, topic: str, member: str, folder: Path,
        way: str = "batches",
    ) -> None:  # fmt: skip
        self.group = group
        self.topic = topic
        self.member = member
        self.notes = folder / f"{member}.notes"
        self.output = folder / f"{member}.txt"
        self.kills = 0
        self._way = way
        self._broker = broker
        self._process: subprocess.Popen[bytes] | None = None
        self._got_count = 0
        self._counted_bytes = 0

    def start(self) -> None:
        command = [
            sys.executable, str(PROGRAM), self._broker.address, self.group, self.member,
            self.topic, str(self.notes), self._way,
        ]  # fmt: skip
        environ = {k: v for k, v in os.environ.items() if not k.startswith("ONWARD_")}
        with self.output.open("ab") as output:
            self._process = subprocess.Popen(command, env=environ, stdout=output, stderr=output)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self._end(signal.SIGKILL)
        self.kills += 1

    def pause(self) -> None:
        """Let it hang: it says nothing more, and its connection stays."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def end(self) -> None:
        """Leave nothing behind, whatever the test did."""
        if self._process is not None:
            self._end(signal.SIGKILL)

    def check_alive(self) -> None:
        assert self._process is not None
        assert self._process.poll() is None, f"it ended:\n{self.output.read_text()[-2000:]}"

    def _end(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait(PATIENCE_S)
        self._process = None

    # --- what it noted -----------------------------------------------------------------------

    def lines(self) -> list[list[str]]:
        """Return what was noted; without a last line that a kill cut short."""
        if not self.notes.exists():
            return []
        return [line.split() for line in _whole_lines(self.notes.read_text())]

    def states(self) -> list[str]:
        """Return as what it joined, each time."""
        return [rest[0] for word, *rest in self.lines() if word == "joined"]

    def got(self) -> list[Got]:
        return [Got(int(rest[0]), int(rest[1])) for word, *rest in self.lines() if word == "got"]

    def done(self) -> set[int]:
        return {int(rest[0]) for word, *rest in self.lines() if word == "done"}

    def got_count(self) -> int:
        """Return how many deliveries were noted so far; reads only what is new."""
        if self.notes.exists():
            with self.notes.open("rb") as file:
                file.seek(self._counted_bytes)
                new = file.read()
            new = new[: new.rfind(b"\n") + 1]
            self._counted_bytes += len(new)
            self._got_count += new.count(b"got ")
        return self._got_count

    def repeats(self) -> Counter[int]:
        """Return how often each message was seen that was seen more than once."""
        times = Counter(one.offset for one in self.got())
        return Counter({offset: count for offset, count in times.items() if count > 1})

    async def until_joined(self, *, times: int = 1) -> None:
        await until(lambda: len(self.states()) >= times, within_s=PATIENCE_S)

    async def until_done(self, count: int) -> None:
        await until(lambda: len(self.done()) >= count, within_s=PATIENCE_S)


def _whole_lines(text: str) -> list[str]:
    """Return the lines that have an end; a kill cuts at most the last one of a process.

    What the next process writes then stands behind it on the same line.
    """
    found: list[str] = []
    for line in text.split("\n")[:-1]:
        # "got 12got 12 1": the cut part was never acted upon.
        starts = [line.rfind(word) for word in ("joined ", "got ", "done ")]
        found.append(line[max(starts) :])
    return found


async def trace_rows(mq: onward.Client) -> list[Trace]:
    """Return all rows of the trace, in their order."""
    return [decode_row(message.body) async for message in mq.read("@trace")]


def rows_about(
    rows: Iterable[Trace], *, group: str, topic: str, offset: int, dids: Iterable[str] = ()
) -> list[Trace]:
    """Return the rows that name one message of one group."""
    wanted = set(dids)
    return [
        row for row in rows
        if row.group == group and row.topic == topic and (not wanted or row.did in wanted)
        and any(start <= offset < end for start, end in row.ranges)
    ]  # fmt: skip


def times_by_offset(rows: Iterable[Trace], *, group: str, topic: str) -> dict[str, Counter[int]]:
    """Return for each thing that was done how often it was done to each message."""
    times: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for row in rows:
        if row.group == group and row.topic == topic:
            for start, end in row.ranges:
                times[row.did].update(range(start, end))
    return times


def check_member(
    member: MemberProcess, rows: list[Trace], *, stored: int, broker_kills: int
) -> None:
    """Raise unless the only member of its group kept all promises of delivery."""
    got, times = member.got(), times_by_offset(rows, group=member.group, topic=member.topic)
    everything = set(range(stored))
    seen = Counter(one.offset for one in got)
    assert set(seen) == everything, f"{member.group}: {len(everything - set(seen))} are lost"
    unfinished = everything - set(times["acked"])
    assert not unfinished, f"{member.group}: {len(unfinished)} are not finished"
    twice = [offset for offset, count in times["acked"].items() if count > 1]
    assert not twice, f"{member.group}: finished twice: {twice[:5]}"
    for did in ("dead", "skipped", "filtered"):
        assert not times[did], f"{member.group}: {did}: {sorted(times[did])[:5]}"
    for offset, count in seen.items():
        explained = sum(times[did][offset] for did in COMES_AGAIN) + broker_kills
        assert count <= 1 + explained, f"{member.group}: {offset} came {count} times"
    for one in got:
        counted = sum(times[did][one.offset] for did in COMES_AGAIN)
        assert 1 <= one.attempt <= 1 + counted, f"{member.group}: {one} of {counted} counted"
    check_nothing_after_its_ack(member)


def check_nothing_after_its_ack(member: MemberProcess) -> None:
    """Raise if a message was seen again after its ack was confirmed."""
    done: set[str] = set()
    for word, *rest in member.lines():
        if word == "done":
            done.add(rest[0])
        elif word == "got":
            assert rest[0] not in done, f"{member.group}: {rest[0]} came again after its ack"
