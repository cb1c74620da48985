"""The whole of Onward in one seed: the real broker, log and clients in a world that fails.

    simulate(seed)
      ├─ Scenario     what this seed chooses: sizes, programs, and which faults there are
      ├─ trouble      crashes, cuts, partitions, full disks, failing syncs, clocks that jump
      ├─ peace        all is healed: every program ends, every topic is read to its end, twice
      └─ checker      what clients saw must be possible; else `SimulationFailed`, with a trace

The same seed gives the same run, to the microsecond of virtual time. A seed chooses only some of
the faults, so that each of them is also met without the others hiding it.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

from onward.client.client import Client
from onward.errors import Corruption, OnwardError
from onward.message.message import Message
from onward.settings import LogSettings, ServerSettings, Settings, TopicSettings
from onward.testing.checker import Drains, check
from onward.testing.commit import SimulatedCommit
from onward.testing.disk import Faults, FaultyDisk
from onward.testing.history import History, kind_of
from onward.testing.loop import VirtualClock, run, running_loop
from onward.testing.network import LossyNetwork
from onward.testing.node import NAME, Sabotage, SimulatedNode
from onward.testing.workload import Follower, Publisher, TopicKeeper, World

TRACE_LINES_MAX = 300
VIOLATIONS_SHOWN_MAX = 10
PEACE_MS_MAX = 30_000
CAPACITY_BYTES = 1 << 30
ROTTEN_READ_MAX = 300

TROUBLES = (
    "power", "power in mid-operation", "kill", "stop", "sync error", "cut", "half-open",
    "partition", "clock", "full disk", "short writes", "uncached reads", "slow network",
)  # fmt: skip


class SimulationFailed(AssertionError):
    """The run of a seed broke a promise; the text says which, how to replay it, and what led to it."""


@dataclass(frozen=True)
class Summary:
    """What a run was like."""

    seed: int
    simulated_ms: int
    counts: Counter[str]
    digest: int
    """The same for two runs if everything that clients saw was the same."""

    def __str__(self) -> str:
        counts = ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items()))
        return f"seed {self.seed}: {self.simulated_ms / 1000:.0f} s simulated; {counts}"


@dataclass(frozen=True)
class Scenario:
    """What a seed chooses before the run begins."""

    troubles: tuple[str, ...]
    settings: Settings
    publishers: int
    followers: int
    topics: tuple[str, ...]
    trouble_ms: int
    pause_ms_max: int
    executor_ms_max: int

    @classmethod
    def choose(cls, random: Random) -> Scenario:
        """Choose some of everything."""
        return cls(
            troubles=tuple(random.sample(TROUBLES, random.randint(1, 6))),
            settings=_settings(random),
            publishers=random.randint(1, 4),
            followers=random.randint(1, 4),
            topics=_topics(random),
            trouble_ms=random.choice((10_000, 30_000, 60_000)),
            pause_ms_max=random.choice((20, 200, 1_000)),
            executor_ms_max=random.choice((1, 5, 50, 300)),
        )


def simulate(
    seed: int,
    *,
    commit: type[SimulatedCommit] = SimulatedCommit,
    sabotage: Sabotage | None = None,
    troubles: tuple[str, ...] | None = None,
    rot: bool = False,
) -> Summary:
    """Run one seed to its end, or raise `SimulationFailed`.

    `commit` and `sabotage` are for brokers that are wrong on purpose, to see that it is noticed.
    `troubles` replaces those that the seed would choose; `rot` flips bits of the log at the end.
    """
    random = Random(seed)
    scenario = Scenario.choose(random)
    if troubles is not None:
        scenario = _replace(scenario, troubles=troubles)

    async def main() -> Summary:
        return await Simulation(seed, scenario, random, commit, sabotage, rot=rot).run()

    with _fixed_identity():
        return run(main(), seed=seed, executor_ms_max=scenario.executor_ms_max)


class Simulation:
    """One run."""

    def __init__(
        self, seed: int, scenario: Scenario, random: Random, commit: type[SimulatedCommit],
        sabotage: Sabotage | None, *, rot: bool,
    ) -> None:  # fmt: skip
        loop = running_loop()
        self._seed = seed
        self._scenario = scenario
        self._random = random
        self._rot = rot
        self._loop = loop
        self._lines: deque[str] = deque(maxlen=TRACE_LINES_MAX)
        self._clock = VirtualClock(loop)
        self._network = LossyNetwork(loop, Random(random.getrandbits(64)))
        self._disk = FaultyDisk(Random(random.getrandbits(64)), capacity_bytes=CAPACITY_BYTES)
        self._history = History()
        self._counts: Counter[str] = Counter()
        self._node = SimulatedNode(
            scenario.settings, disk=self._disk, clock=self._clock, network=self._network,
            random=Random(random.getrandbits(64)), trace=self._trace, commit=commit,
            sabotage=sabotage,
        )  # fmt: skip
        self._world = World(
            history=self._history, clock=self._clock, network=self._network,
            random=Random(random.getrandbits(64)), topics=list(scenario.topics), trace=self._trace,
        )  # fmt: skip
        self._world.pause_ms_max = scenario.pause_ms_max

    async def run(self) -> Summary:
        """Run to the end."""
        self._trace(f"troubles: {', '.join(self._scenario.troubles)}")
        node = self._loop.create_task(self._node.run(), name="node")
        work = self._loop.create_task(self._run_all(), name="work")
        try:
            await asyncio.wait([node, work], return_when=asyncio.FIRST_COMPLETED)
            if node.done():
                node.result()
            drains = await work
        except Exception as error:
            raise self._failure(
                [*self._violations(), f"{type(error).__name__}: {error}"]
            ) from error
        violations = [*self._violations(), *check(self._history, drains)]
        if violations:
            raise self._failure(violations)
        return self._summary(drains)

    async def _run_all(self) -> Drains:
        ends = asyncio.Event()
        programs = [
            self._loop.create_task(one.run(ends), name=one.name) for one in self._programs()
        ]
        await self._make_trouble()
        self._heal()
        ends.set()
        await asyncio.gather(*programs)
        return await self._drain_twice()

    def _programs(self) -> list[Publisher | Follower | TopicKeeper]:
        publishers = [Publisher(self._world, f"p{n}") for n in range(self._scenario.publishers)]
        followers = [Follower(self._world, f"f{n}") for n in range(self._scenario.followers)]
        return [*publishers, *followers, TopicKeeper(self._world, "topics")]

    # --- trouble -----------------------------------------------------------------------------

    async def _make_trouble(self) -> None:
        self._set_faults()
        await self._prepare_topics()
        lasting: list[asyncio.Task[None]] = []
        end_ms = self._clock.monotonic_ms() + self._scenario.trouble_ms
        while self._clock.monotonic_ms() < end_ms:
            await asyncio.sleep(self._random.randint(0, 3_000) / 1000)
            trouble = self._random.choice(self._scenario.troubles)
            self._counts[trouble] += 1
            # Some last: others come meanwhile.
            lasting.append(self._loop.create_task(self._trouble(trouble), name=trouble))
        for task in lasting:
            task.cancel()
        await asyncio.gather(*lasting, return_exceptions=True)

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

    async def _prepare_topics(self) -> None:
        client, _ = await self._world.opened("admin")
        for topic in self._world.topics:
            if kind_of(topic) == "trimmed":
                limits: dict[str, Any] = self._random.choice(
                    ({"retention_bytes": 20_000}, {"retention": 5_000})
                )
                try:
                    await client.create_topic(topic, exist_ok=True, **limits)
                except OnwardError as error:
                    self._trace(f"{topic} was perhaps not created: {error}")
        await client.close()

    async def _trouble(self, trouble: str) -> None:
        match trouble:
            case "power" | "kill":
                if self._node.broker is not None:
                    self._node.die(trouble, "trouble")
            case "power in mid-operation":
                self._node.cut_power_after(self._random.choice((0, 1, 2, 3, 5, 10, 50)))
            case "stop":
                await self._node.stop()
            case "sync error":
                self._trace("a sync will fail")
                self._disk.fail("sync", after=self._random.randint(0, 10))
            case "cut" | "half-open" | "partition":
                await self._trouble_network(trouble)
            case "clock":
                jump_ms = self._random.choice((-3_600_000, -5_000, 100, 5_000, 3_600_000))
                self._trace(f"the clock jumps by {jump_ms} ms")
                self._clock.jump(jump_ms)
            case "full disk":
                await self._fill_disk()

    async def _trouble_network(self, trouble: str) -> None:
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
        free = self._disk.free_bytes(".")
        left = self._random.choice((0, 4_096, 20_000, 60_000))
        self._disk.capacity_bytes -= max(0, free - left)
        self._trace(f"the disk has only {left} bytes left")
        # Others use the disk too: a write may meet a full disk that had space a moment before.
        self._disk.fail("write", after=self._random.randint(0, 5), error=errno.ENOSPC)
        await asyncio.sleep(self._random.randint(0, 10_000) / 1000)
        self._disk.capacity_bytes = CAPACITY_BYTES
        self._trace("the disk has space again")

    # --- peace -------------------------------------------------------------------------------

    def _heal(self) -> None:
        self._trace("all is healed")
        self._disk.faults = Faults(uncached_read=self._disk.faults.uncached_read)
        self._disk.capacity_bytes = CAPACITY_BYTES
        self._network.cut_chance = 0.0
        self._network.delay_ms_max = 20
        self._network.heal()
        self._node.pause_ms_max = 100
        # What was to fail and has not goes with the power.
        self._node.die("power", "the last time")

    async def _drain_twice(self) -> Drains:
        """Read everything to its end; again after another power cut."""
        client, producer = await self._within("open a client", self._world.opened("drain"))
        await self._publish_once_more(client, producer)
        drains = await self._within("drain", self._drain(client))
        self._node.die("power", "between two drains")
        again = await self._within("drain again", self._drain(client))
        for topic, messages in drains.items():
            if kind_of(topic) in ("kept", "volatile") and again.get(topic) != messages:
                self._world.violations.append(f"I1: {topic!r} changed by a restart in peace")
        if self._rot:
            await self._drain_rotten(client, again)
        await client.close()
        return again

    async def _publish_once_more(self, client: Client, producer: int) -> None:
        for number, topic in enumerate(self._world.topics, 1):
            if kind_of(topic) == "brief":
                continue
            attempt = self._history.attempt(topic, producer=producer, number=number, padding=9)
            publish = client.publish(topic, attempt.body, key=attempt.id, durability="disk")
            receipt = await self._within(f"publish to {topic!r}", publish)
            self._history.settle([attempt], receipt)

    async def _drain(self, client: Client) -> Drains:
        drains: Drains = {}
        for topic in await client.topics():
            if topic.rule in ("read-write", "read-only"):
                drains[topic.topic] = [message async for message in client.read(topic.topic)]
        return drains

    async def _within(self, what: str, work: Any) -> Any:
        """Peace is when everything works within 30 seconds."""
        try:
            async with asyncio.timeout(PEACE_MS_MAX / 1000):
                return await work
        except (TimeoutError, OnwardError) as error:
            raise SimulationFailed(f"I13: in peace, {what}: {error or 'not in time'}") from error

    # --- rot ---------------------------------------------------------------------------------

    async def _drain_rotten(self, client: Client, drains: Drains) -> None:
        """Flip bits: what is read then is what was stored, or it is refused."""
        names = [n for n in self._disk.list_folder(self._folder) if n.endswith(".log")]
        for name in self._random.choices(names, k=8):
            self._flip_bit(f"{self._folder}/{name}")
        messages = [message for drain in drains.values() for message in drain]
        for message in self._random.sample(messages, min(len(messages), ROTTEN_READ_MAX)):
            await self._compare_rotten(client, message)

    def _flip_bit(self, path: str) -> None:
        """Flip a bit anywhere, or in the header of an entry."""
        with self._disk.without_faults():
            stored = self._disk.open(path).map().rstrip(b"\0")
        if not stored:
            return
        places = [at for at in range(0, len(stored), 8) if stored.startswith(b"OENT", at)]
        anywhere = self._random.randrange(len(stored))
        header = self._random.choice(places) + self._random.randrange(16, 64) if places else 0
        position = self._random.choice((anywhere, header))
        self._trace(f"a bit of {path} flips at {position}")
        self._disk.flip_bit(path, position, self._random.randrange(8))

    async def _compare_rotten(self, client: Client, stored: Message) -> None:
        found: object
        try:
            found = await client.get(stored.topic, stored.offset)
        except Corruption:
            self._counts["refused as rotten"] += 1
            return
        except OnwardError as error:
            found = error
        if found != stored:
            self._world.violations.append(
                f"I2: {stored.id} rotted, and was served as {found!r:.80}"
            )

    # --- report ------------------------------------------------------------------------------

    @property
    def _folder(self) -> str:
        return self._scenario.settings.log.folder

    def _trace(self, line: str) -> None:
        self._lines.append(f"{self._loop.time():10.3f} {line}")

    def _violations(self) -> list[str]:
        return [*self._node.violations, *self._world.violations]

    def _failure(self, violations: list[str]) -> SimulationFailed:
        shown = violations[:VIOLATIONS_SHOWN_MAX]
        if len(violations) > len(shown):
            shown.append(f"... and {len(violations) - len(shown)} more")
        return SimulationFailed(
            "\n".join(
                [*shown, f"replay: make sim SEED={self._seed}", "what happened:", *self._lines]
            )
        )

    def _summary(self, drains: Drains) -> Summary:
        counts = self._counts + self._node.counts + self._history.count()
        seen = [
            (message.topic, message.offset, message.event_id, message.body)
            for reading in self._history.readings
            for message in reading.messages
        ]
        digest = hash_of((list(self._lines), seen, sorted(drains)))
        return Summary(self._seed, self._loop.now_us // 1000, counts, digest)


def hash_of(value: object) -> int:
    """Return a number that is the same in every Python for values that look the same."""
    from crc32c import crc32c

    return crc32c(repr(value).encode())


def _replace(scenario: Scenario, **changes: Any) -> Scenario:
    from dataclasses import replace

    return replace(scenario, **changes)


def _topics(random: Random) -> tuple[str, ...]:
    kept = [f"kept-{number}" for number in range(random.randint(1, 3))]
    others = random.sample(("trimmed-0", "brief-0", "brief-1", "volatile-0"), random.randint(1, 4))
    return (*kept, *others)


def _settings(random: Random) -> Settings:
    """Small sizes, so that rolls, runs, checkpoints and rewrites happen all the time.

    Some are smaller than a configuration file may say.
    """
    return Settings(
        server=ServerSettings(
            heartbeat_ms=random.choice((500, 5_000)),
            inflight_bytes_max=random.choice((20_000, 64 << 20)),
            connection_bytes_max=random.choice((10_000, 8 << 20)),
            stop_ms=random.choice((50, 10_000)),
        ),
        log=LogSettings(
            folder="log",
            segment_bytes_max=random.choice((8_192, 16_384, 65_536, 1 << 20)),
            checkpoint_rows=random.choice((5, 50, 1_000)),
            checkpoint_bytes=random.choice((8_192, 65_536, 1 << 20)),
            preallocate_bytes=random.choice((0, 4_096, 65_536)),
            disk_reserve_bytes=random.choice((0, 30_000)),
            retention_ms=0,
            interval_ms=random.choice((10, 1_000)),
        ),
        topics=TopicSettings(),
    )


@contextmanager
def _fixed_identity() -> Iterator[None]:
    """Give this machine one name and one number: both are in the first frame of a client."""
    names: tuple[tuple[Any, str, Callable[[], object]], ...] = (
        (os, "getpid", lambda: 1),
        (socket, "gethostname", lambda: "simulated"),
    )
    before = [getattr(module, name) for module, name, _ in names]
    for module, name, fixed in names:
        setattr(module, name, fixed)
    try:
        yield
    finally:
        for (module, name, _), real in zip(names, before, strict=True):
            setattr(module, name, real)
