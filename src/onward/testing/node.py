"""A machine with the real broker on a faulty disk: it dies in all the ways machines do.

    starting ──▶ running ──▶ dead ──▶ starting ...

    power cut    at once, or in the middle of a disk operation: what was not synced is at stake
    kill         the program dies, the machine lives: nothing that was written is lost
    failure      the disk refused; the broker ends itself, and the machine may go down too
    stop         the broker is asked to stop, and does

A dead broker's commits, files and connections are dead with it: nothing it still holds reaches the
network or the disk. Before each start a copy of the disk is opened without its derived files
(`fold`), to see that they say nothing that the log does not.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from random import Random
from typing import Literal

from onward.broker.broker import Broker
from onward.errors import Corruption, OnwardError
from onward.log.log import DiskFailed, Log
from onward.settings import Settings
from onward.testing.commit import SimulatedCommit
from onward.testing.disk import FaultyDisk
from onward.testing.fold import compare_folds
from onward.testing.loop import VirtualClock, running_loop
from onward.testing.network import LossyNetwork
from onward.testing.wire_history import RecordedSession, WireEvent

NAME = "broker"

Death = Literal["power", "kill"]
Trace = Callable[[str], None]
Sabotage = Callable[[Broker], None]
Door = Callable[[Broker], asyncio.BaseProtocol]


class SimulatedNode:
    """One broker that is started again whenever it is dead."""

    def __init__(
        self, settings: Settings, *, disk: FaultyDisk, clock: VirtualClock, network: LossyNetwork,
        random: Random, trace: Trace, commit: type[SimulatedCommit] = SimulatedCommit,
        sabotage: Sabotage | None = None, name: str = NAME, follows: str | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.follows = follows
        """The leader, while this node is to follow one."""
        self.disk = disk
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []
        self.deaths_us: list[int] = []
        self.starts_us: list[int] = []
        self.wire: list[WireEvent] = []
        self.pause_ms_max = 2_000
        self.broker: Broker | None = None
        self.doors: dict[str, Door] = {}
        """What else listens while the broker runs, by address."""
        self.is_retired = False
        """It is not started again."""
        self._settings = settings
        self._clock = clock
        self._network = network
        self._random = random
        self._trace = trace
        self._make_commit = commit
        self._sabotage = sabotage
        self._commit: SimulatedCommit | None = None
        self._is_dead = asyncio.Event()
        self._is_running = asyncio.Event()

    async def run(self) -> None:
        """Start the broker, and start it again after each death, until cancelled or retired."""
        while not self.is_retired:
            self._is_dead.clear()
            if await self._start():
                self._is_running.set()
                await self._is_dead.wait()
                self._is_running.clear()
            await asyncio.sleep(self._random.randint(0, self.pause_ms_max) / 1000)

    async def running(self) -> Broker:
        """Return the broker when there is one that runs."""
        while self.broker is None:
            await self._is_running.wait()
            await asyncio.sleep(0.001)
        return self.broker

    # --- deaths ------------------------------------------------------------------------------

    def die(self, death: Death, why: str) -> None:
        """Die now."""
        broker, self.broker = self.broker, None
        self._cut_off()
        if self._commit is not None:
            self._commit.is_dead = True
        if death == "power":
            self.disk.crash()
        else:
            self.disk.kill()
        self.counts[death] += 1
        self.deaths_us.append(running_loop().now_us)
        self._trace(f"{self.name} died: {why} ({death})")
        if broker is not None:
            broker.fail(RuntimeError(why))
        self._is_dead.set()

    def cut_power_after(self, operations: int) -> None:
        """Die in the middle of what the disk will be doing then."""
        self.disk.cut_power_after(operations, then=self._lose_power)

    async def stop(self) -> None:
        """Stop the broker as an operator does; it is started again like after any death."""
        broker = self.broker
        if broker is None:
            return
        self._trace(f"{self.name} is asked to stop")
        for address in (self.name, *self.doors):
            self._network.refuse(address)
        try:
            await broker.stop()
        except (OSError, DiskFailed, OnwardError) as error:
            self._trace(f"stopping did not work: {error}")
        if self.broker is broker:
            self.counts["stop"] += 1
            self.die("kill", "stopped")

    def _lose_power(self) -> None:
        # The network first: no answer that the disk's refusals cause may leave a dead machine.
        self._cut_off()
        asyncio.get_running_loop().call_soon(self._lost_power)

    def _cut_off(self) -> None:
        for address in (self.name, *self.doors):
            self._network.kill(address)

    def _lost_power(self) -> None:
        self.die("power", "in the middle of a disk operation")

    def _failed(self, error: Exception) -> None:
        if self.broker is not None and self.broker.failure is error:
            self.broker = None
            self.counts["failure"] += 1
            self.die(self._random.choice(("power", "kill")), f"broker failed: {error}")

    # --- starts ------------------------------------------------------------------------------

    async def _start(self) -> bool:
        self._compare_folds()
        try:
            broker = await Broker.open(
                self._settings, disk=self.disk, clock=self._clock, commit=self._new_commit,
                executor=Executor(), on_failure=self._failed,
                jitter=Random(self._random.getrandbits(64)), follows=self.follows,
            )  # fmt: skip
        except Corruption as error:
            self.violations.append(f"the broker refuses its log: {error}")
            raise
        except (OSError, OnwardError) as error:
            self._trace(f"{self.name} could not start: {error}")
            if not self._is_dead.is_set():
                self.disk.kill()
            return False
        if self._is_dead.is_set():
            broker.fail(RuntimeError("died while starting"))
            return False
        if self._sabotage is not None:
            self._sabotage(broker)
        self.broker = broker
        self.counts["start"] += 1
        self.starts_us.append(running_loop().now_us)
        self._network.listen(self.name, lambda: self._session(broker))
        for address, door in self.doors.items():
            self._network.listen(address, partial(door, broker))
        self._trace(f"{self.name} started: next event id {broker.log.next_index}")
        return True

    def _session(self, broker: Broker) -> RecordedSession:
        life = len(self.starts_us)
        return RecordedSession(broker, self.wire, life=life, now_us=lambda: running_loop().now_us)

    def _new_commit(self, log: Log) -> SimulatedCommit:
        self._commit = self._make_commit(log)
        return self._commit

    def _compare_folds(self) -> None:
        folder = self._settings.log.folder
        try:
            with self.disk.without_faults():
                self.disk.make_folder(folder)
                differences = compare_folds(self.disk, folder)
        except Corruption as error:
            differences = [f"it is refused: {error}"]
        self.violations += [f"a fold without derived files differs: {one}" for one in differences]
