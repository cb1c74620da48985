"""Everything that goes wrong during a run, and the end of it.

make    one trouble after another, those that the scenario names; some last while others come
heal    no fault is left, and the broker is started again a last time
"""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from random import Random

from onward.testing.disk import Faults
from onward.testing.loop import VirtualClock, running_loop
from onward.testing.network import LossyNetwork
from onward.testing.node import SimulatedNode, Trace
from onward.testing.scenario import Scenario

CAPACITY_BYTES = 1 << 30


class Trouble:
    """Makes trouble for one node and its network."""

    def __init__(
        self, scenario: Scenario, *, node: SimulatedNode, network: LossyNetwork,
        clock: VirtualClock, random: Random, trace: Trace,
    ) -> None:  # fmt: skip
        self.counts: Counter[str] = Counter()
        self._scenario = scenario
        self._node = node
        self._disk = node.disk
        self._network = network
        self._clock = clock
        self._random = random
        self._trace = trace
        self._clock_ahead_ms = 0

    async def make(self) -> None:
        """Make trouble for as long as the scenario says."""
        self._set_faults()
        loop = running_loop()
        lasting: list[asyncio.Task[None]] = []
        end_ms = self._clock.monotonic_ms() + self._scenario.trouble_ms
        while self._clock.monotonic_ms() < end_ms:
            await asyncio.sleep(self._random.randint(0, 3_000) / 1000)
            trouble = self._random.choice(self._scenario.troubles)
            self.counts[trouble] += 1
            lasting.append(loop.create_task(self._make_one(trouble), name=trouble))
        for task in lasting:
            task.cancel()
        await asyncio.gather(*lasting, return_exceptions=True)

    def heal(self) -> None:
        """End all trouble; what was to fail and has not goes with the power."""
        self._trace("all is healed")
        self._disk.faults = Faults(uncached_read=self._disk.faults.uncached_read)
        self._disk.capacity_bytes = CAPACITY_BYTES
        self._network.cut_chance = 0.0
        self._network.delay_ms_max = 20
        self._network.heal()
        # What is due at a time that the clock showed before must not wait for hours.
        self._clock.jump(self._clock_ahead_ms)
        self._node.pause_ms_max = 100
        self._node.die("power", "the last time")

    def _set_faults(self) -> None:
        troubles = self._scenario.troubles
        self._disk.faults = Faults(
            short_write=0.2 if "short writes" in troubles else 0.0,
            uncached_read=0.3 if "uncached reads" in troubles else 0.0,
        )
        if "slow network" in troubles:
            self._network.delay_ms_max = 400
        if "cut" in troubles:
            self._network.cut_chance = 0.005

    async def _make_one(self, trouble: str) -> None:
        match trouble:
            case "power" | "kill":
                if self._node.broker is not None:
                    self._node.die("power" if trouble == "power" else "kill", "trouble")
            case "power in mid-operation":
                self._node.cut_power_after(self._random.choice((0, 1, 2, 3, 5, 10, 50)))
            case "stop":
                await self._node.stop()
            case "sync error":
                self._trace("a sync will fail")
                self._disk.fail("sync", after=self._random.randint(0, 10))
            case "cut" | "half-open" | "partition":
                await self._disturb_network(trouble)
            case "clock":
                jump_ms = self._random.choice((-3_600_000, -5_000, 100, 5_000, 3_600_000))
                self._trace(f"the clock jumps by {jump_ms} ms")
                self._clock.jump(jump_ms)
                self._clock_ahead_ms = max(0, self._clock_ahead_ms - jump_ms)
            case "full disk":
                await self._fill_disk()

    async def _disturb_network(self, trouble: str) -> None:
        ends = self._network.connections()
        if not ends:
            return
        end = self._random.choice(ends)
        self._trace(f"{trouble}: {end.name} to {end.peer_name}")
        if trouble == "cut":
            self._network.cut(end)
        elif trouble == "half-open":
            self._network.half_open(end)
        else:
            self._network.partition(end.name, end.peer_name)
            await asyncio.sleep(self._random.choice((0.1, 2, 20)))
            self._network.heal()

    async def _fill_disk(self) -> None:
        left = self._random.choice((0, 4_096, 20_000, 60_000))
        self._disk.capacity_bytes -= max(0, self._disk.free_bytes(".") - left)
        self._trace(f"the disk has only {left} bytes left")
        # Others use the disk too: a write may meet a full disk that had space a moment before.
        self._disk.fail("write", after=self._random.randint(0, 5), error=errno.ENOSPC)
        await asyncio.sleep(self._random.randint(0, 10_000) / 1000)
        self._disk.capacity_bytes = CAPACITY_BYTES
        self._trace("the disk has space again")
