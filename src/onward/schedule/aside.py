"""Building and merging runs aside: in a child, so that the broker's loop stays free.

    broker ── plan (JSON, stdin) ──▶ child ── summary or error (JSON, stdout) ──▶ broker
       └──── a pipe that nobody writes to: when the broker is gone it ends, and so does the child

A child is a child of one plan. It is nice, unless somebody waits for it, and its memory does not
grow with the plan. However it ends, a file under its name is complete; what it leaves besides ends
in `.tmp`. `perform` does the same work here, for disks that a child cannot see, and for tests.
"""

from __future__ import annotations

import errno
import gc
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from threading import Thread
from typing import Final

import msgspec

from onward.errors import (
    Corruption,
    DiskFull,
    OnwardError,
    ProtocolError,
    Unavailable,
    from_wire,
    to_wire,
)
from onward.log.disk import Disk, File, OsDisk
from onward.message.batch import batches_of
from onward.message.entry import Kind, read_entry
from onward.schedule.build import ScheduledBatch, build_run
from onward.schedule.gone import Gone
from onward.schedule.layout import Key
from onward.schedule.marks import Marks
from onward.schedule.merge import merge_runs
from onward.schedule.run import Run
from onward.schedule.writer import RunSummary

NICE: Final = 10


class BuildPlan(msgspec.Struct, frozen=True, tag="build"):
    """Build a run from entries of the log."""

    path: str
    topic: int
    """The number of `@schedule`: entries of others in the pieces are passed over."""
    files: tuple[str, ...]
    """The segments that the pieces are in."""
    pieces: tuple[tuple[int, int, int], ...]
    """(place in `files`, position, length) of whole entries, in the order of their offsets."""
    cursors: dict[str, Key] = {}
    cancelled: bytes = b""
    """Saved `Marks`."""
    start: int = 0
    end: int = 2**62
    """Which numbers the runs are to hold: an entry may have batches before and behind them."""
    ids_folder: str = ""
    """Where to remember all of these numbers; empty: nowhere."""


class MergePlan(msgspec.Struct, frozen=True, tag="merge"):
    """Merge runs into one."""

    path: str
    runs: tuple[str, ...]
    cursors: dict[str, Key] = {}
    cancelled: bytes = b""


Plan = BuildPlan | MergePlan


class _Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    summary: RunSummary | None = None
    error: dict[str, object] | None = None


def perform(plan: Plan, disk: Disk) -> RunSummary:
    """Do what a plan says, here and now."""
    gone = Gone(plan.cursors, Marks.load(plan.cancelled) if plan.cancelled else ())
    if isinstance(plan, BuildPlan):
        with ExitStack() as stack:
            files = [disk.open(path) for path in plan.files]
            for file in files:
                stack.callback(file.close)
            batches = _batches(plan, files)
            return build_run(disk, plan.path, batches, gone=gone, ids_folder=plan.ids_folder)
    with ExitStack() as stack:
        runs: list[Run] = []
        for path in plan.runs:
            runs.append(Run.open(disk, path))
            stack.callback(runs[-1].close)
        return merge_runs(disk, plan.path, runs, gone=gone)


class Aside:
    """A child at work on one plan. Starting it takes a millisecond or two."""

    def __init__(self, plan: Plan, *, nice: int = NICE) -> None:
        self.plan = plan
        self._outcome: _Outcome | None = None
        plan_file = os.memfd_create("plan")
        alive, self._lifeline = os.pipe()
        try:
            with open(plan_file, "wb", closefd=False) as file:
                file.write(msgspec.json.encode(plan))
            os.lseek(plan_file, 0, os.SEEK_SET)
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", "onward.schedule.aside", str(alive), str(nice)],
                stdin=plan_file,
                stdout=subprocess.PIPE,
                pass_fds=(alive,),
                # An interrupt from the keyboard is for the broker, which then ends its child.
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(plan_file)
            os.close(alive)

    def fileno(self) -> int:
        """Return what becomes readable when the child has done its work or is gone."""
        assert self._child.stdout is not None
        return self._child.stdout.fileno()

    def poll(self) -> RunSummary | None:
        """Return the summary, or None while the child is at work; raise what it failed with."""
        if self._outcome is None and not self._has_ended():
            return None
        return self.wait()

    def wait(self) -> RunSummary:
        """Wait until the child has done its work; return its summary or raise its error."""
        if self._outcome is None:
            self._outcome = self._collect()
        if self._outcome.summary is None:
            raise from_wire(self._outcome.error or {})
        return self._outcome.summary

    def kill(self) -> None:
        """End the child at once, whatever it is doing; its plan is not carried out."""
        self._child.kill()
        if self._outcome is None:
            self._outcome = self._collect()

    @property
    def pid(self) -> int:
        """The child's number."""
        return self._child.pid

    def _has_ended(self) -> bool:
        # Not `select`, which knows no file above the 1,024th.
        poller = select.poll()
        poller.register(self, select.POLLIN)
        return bool(poller.poll(0))

    def _collect(self) -> _Outcome:
        written, _ = self._child.communicate()
        os.close(self._lifeline)
        try:
            return msgspec.json.decode(written, type=_Outcome)
        except msgspec.DecodeError:
            text = f"the work on {self.plan.path} aside ended with {self._child.returncode}"
            return _Outcome(error=to_wire(Unavailable(text)))


def main() -> None:
    """Be the child: read the plan, carry it out, write the summary."""
    Thread(target=_end_with_the_broker, args=(int(sys.argv[1]),), daemon=True).start()
    os.nice(int(sys.argv[2]))
    # Columns are lists of numbers and bytes: there are no cycles to look for among millions.
    gc.disable()
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=Plan)
    sys.stdout.buffer.write(msgspec.json.encode(_carried_out(plan)))


def _carried_out(plan: Plan) -> _Outcome:
    try:
        return _Outcome(summary=perform(plan, OsDisk()))
    except OnwardError as error:
        return _Outcome(error=to_wire(error))
    except OSError as error:
        kind = DiskFull if error.errno == errno.ENOSPC else Unavailable
        return _Outcome(error=to_wire(kind(f"cannot write {plan.path}: {error}")))


def _end_with_the_broker(alive: int) -> None:
    os.read(alive, 1)
    os._exit(1)


def _batches(plan: BuildPlan, files: list[File]) -> Iterator[ScheduledBatch]:
    """Walk over the batches of `@schedule` in the pieces of a plan."""
    for place, position, length in plan.pieces:
        piece = files[place].read(position, length)
        start = 0
        while start < length:
            entry = read_entry(piece, start, position=0)
            if entry is None:
                raise Corruption(f"no valid entry at {position + start} of {plan.files[place]}")
            if entry.kind == Kind.MESSAGES and entry.topic == plan.topic:
                number = entry.base_offset
                body_end = entry.body_position + entry.body_bytes
                try:
                    for at, header in batches_of(piece, entry.body_position, body_end):
                        if plan.start <= number < plan.end:
                            yield number, entry.time_ms, memoryview(piece)[at : at + header.length]
                        number += header.count
                except ProtocolError as error:
                    raise Corruption(f"entry {entry.index} has no whole batches: {error}") from None
            start = entry.end


if __name__ == "__main__":
    main()
