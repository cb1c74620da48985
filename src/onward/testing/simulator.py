"""The whole of Onward in one seed: the real broker, log and clients in a world that fails.

    simulate(seed)
      ├─ scenario     what this seed chooses: sizes, programs, and which faults there are
      ├─ workload     publishers, readers, topics that come and go       ─┐
      ├─ members      groups: who consumes, dies, leaves; operators       │
      ├─ schedulers   who publish for later, and change their mind        │ write a history of
      ├─ trouble      crashes, cuts, full disks, clocks that jump         │ all they do and see
      ├─ peace        all is healed; topics are read, groups swept       ─┘
      └─ checker      the history must be possible; else `SimulationFailed`, with a trace

The same seed gives the same run, to the microsecond of virtual time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from random import Random

from crc32c import crc32c

from onward.client.client import Client
from onward.errors import (
    Corruption,
    OffsetOutOfRange,
    OnwardError,
    TopicEnded,
    UnknownGroup,
    UnknownTopic,
)
from onward.message.entry import read_header
from onward.message.message import Message
from onward.testing.checker import Drains, check
from onward.testing.commit import SimulatedCommit
from onward.testing.disk import FaultyDisk
from onward.testing.fold import compare_to_fold
from onward.testing.group_history import Buried, GroupPlan
from onward.testing.history import History, kind_of
from onward.testing.loop import run, running_loop
from onward.testing.members import Member, Sweeper
from onward.testing.network import LossyNetwork
from onward.testing.node import NAME, Sabotage, SimulatedNode
from onward.testing.operator import Operator
from onward.testing.run import (
    TRACE_LINES_MAX,
    SimulationFailed,
    Summary,
    failure_text,
    fixed_identity,
    within,
    without_collector,
)
from onward.testing.scenario import Scenario
from onward.testing.schedule_history import TOPICS, ScheduleHistory, check_schedule, is_scheduled
from onward.testing.schedulers import NEAR_MS_MAX, PeakClock, SchedulePlan, Scheduler, Watcher
from onward.testing.trouble import CAPACITY_BYTES, Trouble
from onward.testing.workload import Auditor, Follower, Publisher, TopicKeeper, World

Graves = dict[str, dict[tuple[str, int], Buried]]
Program = Publisher | Follower | TopicKeeper | Auditor | Member | Operator | Scheduler | Watcher

ROTTEN_READ_MAX = 300


def simulate(
    seed: int,
    *,
    troubles: tuple[str, ...] | None = None,
    groups: tuple[GroupPlan, ...] | None = None,
    schedule: SchedulePlan | None = None,
    rot: bool = False,
    commit: type[SimulatedCommit] = SimulatedCommit,
    sabotage: Sabotage | None = None,
) -> Summary:
    """Run one seed to its end, or raise `SimulationFailed`.

    `troubles`, `groups` and `schedule` replace those that the seed would choose (a group without
    topics gets the first of them); `rot` flips bits of the log at the end.
    `commit` and `sabotage` are for brokers that are wrong on purpose, to see that it is noticed.

    >>> simulate(7, troubles=("clock",)).counts["acked"] > 0
    True
    """
    random = Random(seed)
    scenario = Scenario.choose(random, troubles=troubles, groups=groups)

    plan = schedule or SchedulePlan.choose(Random(seed))

    async def main() -> Summary:
        return await Simulation(seed, scenario, plan, random, commit, sabotage, rot=rot).run()

    with fixed_identity(), without_collector(), plan.in_use():
        return run(main(), seed=seed, executor_ms_max=scenario.executor_ms_max)


class Simulation:
    """One run."""

    def __init__(
        self, seed: int, scenario: Scenario, schedule: SchedulePlan, random: Random,
        commit: type[SimulatedCommit], sabotage: Sabotage | None, *, rot: bool,
    ) -> None:  # fmt: skip
        def chance() -> Random:
            return Random(random.getrandbits(64))

        self._seed = seed
        self._scenario = scenario
        self._random = random
        self._rot = rot
        self._loop = running_loop()
        self._lines: deque[str] = deque(maxlen=TRACE_LINES_MAX)
        self._history = History()
        self._history.groups.late_us = scenario.late_us
        self._history.groups.may_refuse_rows = "full disk" in scenario.troubles
        self._history.groups.plans = {plan.name: plan for plan in scenario.groups}
        self._history.has_whole_trace = not scenario.is_bounded
        self._rotten = 0
        self._schedule = ScheduleHistory(loses_old=scenario.is_bounded)
        clock = PeakClock(self._loop)
        network = LossyNetwork(self._loop, chance())
        self._disk = FaultyDisk(chance(), capacity_bytes=CAPACITY_BYTES)
        network.on_end = self._note_end
        self._node = SimulatedNode(
            scenario.settings, disk=self._disk, clock=clock, network=network, random=chance(),
            trace=self._trace, commit=commit, sabotage=sabotage,
        )  # fmt: skip
        self._trouble = Trouble(
            scenario, node=self._node, network=network, clock=clock, random=chance(),
            trace=self._trace,
        )  # fmt: skip
        self._world = World(
            history=self._history, clock=clock, network=network, random=chance(),
            topics=list(scenario.topics), trace=self._trace, pause_ms_max=scenario.pause_ms_max,
        )  # fmt: skip
        self._schedulers = [
            Scheduler(self._world, self._schedule, clock, f"s{number}")
            for number in range(schedule.schedulers)
        ]
        self._watchers = [
            Watcher(self._world, self._schedule, clock, topic)
            for topic in (TOPICS if self._schedulers else ())
        ]
        self._auditor = Auditor(self._world, "auditor")

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
        self._history.groups.deaths_us = self._node.deaths_us
        self._history.groups.starts_us = self._node.starts_us
        self._history.groups.wire = self._node.wire
        waited = {topic: drains.pop(topic) for topic in TOPICS if topic in drains}
        violations = [
            *self._violations(),
            *check(self._history, drains),
            *check_schedule(self._schedule, waited),
        ]
        if violations:
            raise self._failure(violations)
        return self._summary(drains)

    async def _run_all(self) -> Drains:
        ends = asyncio.Event()
        # First, for whoever publishes to a topic creates it, without limits.
        await self._world.prepare_topics()
        programs = [
            self._loop.create_task(program.run(ends), name=program.name)
            for program in self._programs()
        ]
        await self._trouble.make()
        self._trouble.heal()
        ends.set()
        await asyncio.gather(*programs)
        return await self._drain_twice()

    def _programs(self) -> list[Program]:
        publishers = [Publisher(self._world, f"p{n}") for n in range(self._scenario.publishers)]
        followers = [Follower(self._world, f"f{n}") for n in range(self._scenario.followers)]
        plans = self._scenario.groups
        members = [
            Member(self._world, plan, f"{plan.name}-m{number}")
            for plan in plans
            for number in range(plan.members)
        ]
        operator = Operator(self._world, [one for one in plans if one.is_operated], "operator")
        topics = TopicKeeper(self._world, "topics")
        schedulers = self._schedulers
        watchers = self._watchers
        return [
            *publishers, *followers, topics, self._auditor, *members, operator, *schedulers,
            *watchers,
        ]  # fmt: skip

    def _note_end(self, name: str, peer_name: str) -> None:
        machine = peer_name if name == NAME else name
        self._history.groups.losses_us.setdefault(machine, []).append(self._loop.now_us)

    # --- peace -------------------------------------------------------------------------------

    async def _drain_twice(self) -> Drains:
        """Read everything to its end; again after another power cut."""
        client, producer = await within("open a client", self._world.opened("drain"))
        await self._publish_once_more(client, producer)
        await self._wait_for_the_schedule(client)
        drains = await within("drain", self._drain(client))
        dead = await self._sweep(client)
        self._node.die("power", "between two drains")
        again = await within("drain again", self._drain(client))
        if dead != await self._sweep(client):
            self._world.violations.append("G1: dead letters changed by a restart in peace")
        is_bounded = self._scenario.is_bounded
        for topic, messages in drains.items():
            is_kept = is_scheduled(topic) or kind_of(topic) not in ("trimmed", "brief")
            may_change = is_bounded or not is_kept
            if not may_change and again.get(topic) != messages:
                self._world.violations.append(f"I1: {topic!r} changed by a restart in peace")
        await within("read the trace", self._auditor.look(client))
        if self._rot:
            await self._read_rotten(client, again)
        await client.close()
        return again

    async def _wait_for_the_schedule(self, client: Client) -> None:
        """Let fire what is due soon; ask about everything, and cancel what is far ahead."""
        if self._schedulers:
            await asyncio.sleep(2 * NEAR_MS_MAX / 1000)
        for scheduler in self._schedulers:
            await scheduler.finish(client)

    async def _publish_once_more(self, client: Client, producer: int) -> None:
        for number, topic in enumerate(self._world.topics, 1):
            if kind_of(topic) == "brief":
                continue
            attempt = self._history.attempt(topic, producer=producer, number=number, padding=9)
            publish = client.publish(
                topic,
                attempt.body,
                key=attempt.key,
                tag=attempt.tag,
                priority=attempt.priority,
                durability="disk",
            )
            receipt = await within(f"publish to {topic!r}", publish)
            self._history.settle([attempt], receipt)

    async def _drain(self, client: Client) -> Drains:
        drains: Drains = {}
        for topic in await client.topics():
            if topic.rule in ("read-write", "read-only"):
                drains[topic.topic] = await self._read_all(client, topic.topic)
        return drains

    async def _read_all(self, client: Client, topic: str) -> list[Message]:
        while True:
            try:
                return [message async for message in client.read(topic)]
            except OffsetOutOfRange:
                # Retention was faster than we were: what is left begins further on.
                if not is_scheduled(topic) and kind_of(topic) == "kept":
                    raise
            except (UnknownTopic, TopicEnded):
                if kind_of(topic) != "brief":
                    raise
                return []

    async def _sweep(self, client: Client) -> Graves:
        """Let each group finish all that it has; return its dead letters."""
        graves = self._history.groups.dead
        graves.clear()
        for plan in list(self._history.groups.plans.values()):
            sweeper = Sweeper(self._world, plan, f"{plan.name}-sweeper")
            await sweeper.sweep(client)
            graves[plan.name] = await within("list the dead", self._dead_letters(client, plan))
        await self._compare_groups()
        return {
            name: {place: one for place, one in dead.items() if self._is_lasting(place[0])}
            for name, dead in graves.items()
        }

    def _is_lasting(self, topic: str) -> bool:
        """Tell whether what groups need of a topic outlives its retention."""
        return kind_of(topic) in ("kept", *(() if self._scenario.is_bounded else ("trimmed",)))

    async def _dead_letters(self, client: Client, plan: GroupPlan) -> dict[tuple[str, int], Buried]:
        """Return the dead letters of a group, with messages unless their topic may be closed."""
        letters: dict[tuple[str, int], Buried] = {}
        for topic in plan.topics:
            messages = kind_of(topic) != "brief"
            try:
                async for one in client.dead_letters(plan.name, topic=topic, messages=messages):
                    buried = Buried(one.attempts, one.cause, one.member, one.message)
                    letters[one.topic, one.offset] = buried
            except (UnknownGroup, UnknownTopic):
                continue
        return letters

    async def _compare_groups(self) -> None:
        """What the running broker believes of its groups is what its log says."""
        await asyncio.sleep(5)  # what is on its way to the disk arrives
        broker = await self._node.running()
        with self._disk.without_faults():
            differences = compare_to_fold(
                broker.state, self._disk, self._scenario.settings.log.folder
            )
        self._world.violations += [f"a running broker differs: {one}" for one in differences]

    # --- rot ---------------------------------------------------------------------------------

    async def _read_rotten(self, client: Client, drains: Drains) -> None:
        """Flip bits: what is read then is what was stored, or it is refused."""
        folder = self._scenario.settings.log.folder
        names = [name for name in self._disk.list_folder(folder) if name.endswith(".log")]
        by_name = (await self._node.running()).catalogue.by_name
        numbers = {by_name[topic].number for topic in drains if topic in by_name}
        for name in names:
            self._flip_bits(f"{folder}/{name}", numbers, count=1 + 40 // len(names))
        messages = [message for drain in drains.values() for message in drain]
        for message in self._random.sample(messages, min(len(messages), ROTTEN_READ_MAX)):
            await self._compare_rotten(client, message)

    def _flip_bits(self, path: str, numbers: set[int], *, count: int) -> None:
        """Flip a bit anywhere in a segment, and some in entries of these topics."""
        with self._disk.without_faults():
            stored = self._disk.open(path).map().rstrip(b"\0")
        heads = (read_header(stored, at, position=0) for at in range(0, len(stored), 8))
        entries = [one for one in heads if one is not None and one.topic in numbers]
        positions = [self._random.randrange(len(stored))] if stored else []
        positions += [
            self._random.randrange(entry.position + 16, entry.end - 8)
            for entry in self._random.sample(entries, min(count, len(entries)))
        ]
        for position in positions:
            self._trace(f"a bit of {path} flips at {position}")
            self._disk.flip_bit(path, position, self._random.randrange(8))

    async def _compare_rotten(self, client: Client, stored: Message) -> None:
        found: object
        try:
            found = await client.get(stored.topic, stored.offset)
        except Corruption:
            self._rotten += 1
            return
        except OnwardError as error:
            if isinstance(error, OffsetOutOfRange) and kind_of(stored.topic) != "kept":
                return
            found = error
        if found != stored:
            self._world.violations.append(
                f"I2: {stored.id} rotted, and was served as {found!r:.80}"
            )

    # --- report ------------------------------------------------------------------------------

    def _trace(self, line: str) -> None:
        self._lines.append(f"{self._loop.time():10.3f} {line}")

    def _violations(self) -> list[str]:
        return [*self._node.violations, *self._world.violations]

    def _failure(self, violations: list[str]) -> SimulationFailed:
        return SimulationFailed(failure_text(violations, seed=self._seed, lines=self._lines))

    def _summary(self, drains: Drains) -> Summary:
        counts = self._trouble.counts + self._node.counts + self._history.count()
        counts += self._schedule.count()
        counts["refused as rotten"] = self._rotten
        seen = [
            (message.topic, message.offset, message.event_id, message.body)
            for reading in self._history.readings
            for message in reading.messages
        ]
        handed = [
            (one.stint.machine, one.place, one.attempt, one.at_us, one.verbs)
            for one in self._history.groups.handed
        ]
        digest = crc32c(repr((list(self._lines), seen, handed, sorted(drains))).encode())
        return Summary(self._seed, self._loop.now_us // 1000, counts, digest)
