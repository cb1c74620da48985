"""A stream whose driver and workers are killed at bad moments: every row arrives once, in order.

A moment is something that is seen on the broker (so many rows have arrived, a task has staged, a
batch was decided), never a time. What is promised does not depend on whether a kill came in time.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from onward.client.sync import SyncClient
from onward.pipeline.place import Place, open_client

KILLS = int(os.environ.get("ONWARD_TORTURE_SPARK_KILLS", "3"))
SEED = int(os.environ.get("ONWARD_TORTURE_SEED", "1"))
ROWS_PER_BATCH = 400
PROGRAM = Path(__file__).with_name("sink_program.py")
TASKS = "pyspark.worker"
COMMITS = "pyspark.sql.worker.python_streaming_sink_runner"
RUN_S_MAX = 300.0

Moment = Callable[[], bool]


class Stream:
    """The program that is killed, and all processes that it has started."""

    def __init__(self, place: Place, folder: Path, *, source: str, target: str) -> None:
        self._log = folder / "program.txt"
        checkpoint = str(folder / "checkpoint")
        self._command = [
            *(sys.executable, str(PROGRAM), place.servers, source, target, checkpoint),
            str(ROWS_PER_BATCH),
        ]
        self._started: subprocess.Popen[bytes] | None = None

    def run_until(self, moment: Moment) -> int | None:
        """Return None when the moment has come, or else the exit code; start it when it is not."""
        if self._started is None:
            with self._log.open("ab") as log:
                # A session of its own: Spark's workers leave the group of their parent.
                self._started = subprocess.Popen(
                    self._command, stdout=log, stderr=log, start_new_session=True
                )
        deadline = time.monotonic() + RUN_S_MAX
        while time.monotonic() < deadline:
            if moment():
                return None
            if (code := self._started.poll()) is not None:
                self.kill()
                return code
            time.sleep(0.02)
        raise AssertionError(f"the stream came to nothing:\n{self.output}")

    def kill(self) -> None:
        """kill -9 for the driver, its Java and its workers; return when they are gone."""
        if self._started is None:
            return
        self._started.kill()
        deadline = time.monotonic() + 60
        while (members := members_of(self._started.pid)) and time.monotonic() < deadline:
            kill(list(members))
            time.sleep(0.01)
        self._started.wait(60)
        self._started = None
        assert not members

    def kill_workers(self, kind: str) -> None:
        """kill -9 for the Python workers of one kind."""
        if self._started is not None:
            members = members_of(self._started.pid)
            kill([pid for pid, command in members.items() if command.endswith(f"daemon {kind}")])

    @property
    def output(self) -> str:
        return self._log.read_text()[-4000:]


def members_of(session: int) -> dict[int, str]:
    """Return the processes of a session, with their command lines."""
    found: dict[int, str] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            state = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if int(state[3]) == session and state[0] != "Z":
            found[int(folder.name)] = command.strip()
    return found


def kill(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def fill(mq: SyncClient, topic: str, *, count: int, dice: random.Random) -> list[bytes]:
    """Publish what the stream is to carry: small rows, and stretches of large ones to be staged."""
    bodies = [
        f"{number}:".encode().ljust(2_000 if number // 600 % 2 else 20, b".")
        for number in range(count)
    ]
    at = 0
    while at < count:
        some = bodies[at : at + dice.randint(1, 300)]
        mq.publish_many(topic, some, keys=[f"k{dice.randrange(9)}" for _ in some])
        at += len(some)
    return bodies


def moments(mq: SyncClient, target: str, *, dice: random.Random) -> list[Moment]:
    """Return the kinds of moments: rows arrived, a task staged, the ledger moved."""
    goal = mq.topic(target).next_offset + dice.randint(1, 2 * ROWS_PER_BATCH)

    def sinks() -> dict[str, int]:
        return {one.topic: one.next_offset for one in mq.topics(prefix="@sink.")}

    known = sinks()
    ledgers = {topic: end for topic, end in known.items() if topic.count(".") == 1}
    return [
        lambda: mq.topic(target).next_offset >= goal,
        lambda: any(topic.count(".") == 2 and topic not in known for topic in sinks()),
        lambda: any(ledgers.get(topic, 0) < end and topic.count(".") == 1
                    for topic, end in sinks().items()),
    ]  # fmt: skip


def test_a_stream_that_is_killed_again_and_again_writes_every_row_once(
    place: Place, topic: str, tmp_path: Path
) -> None:
    dice = random.Random(SEED)
    source, target = f"{topic}-in", f"{topic}-out"
    with open_client(place, name="test") as mq:
        bodies = fill(mq, source, count=ROWS_PER_BATCH * (KILLS + 1) * 3, dice=dice)
        mq.create_topic(target)
        stream = Stream(place, tmp_path, source=source, target=target)
        try:
            for number in range(KILLS):
                moment = moments(mq, target, dice=dice)[number % 3]
                if stream.run_until(moment) is not None:
                    continue
                if number % 2:
                    # What they did is tried again; or the driver gives up, and is started again.
                    stream.kill_workers(TASKS if number % 4 == 1 else COMMITS)
                else:
                    stream.kill()
            # A driver whose workers were killed may end with an error: one more start is the last.
            if stream.run_until(lambda: False) != 0:
                assert stream.run_until(lambda: False) == 0, stream.output
        finally:
            stream.kill()
        assert [message.body for message in mq.read(target)] == bodies
