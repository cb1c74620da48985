"""A leader, a follower, and the death of the leader: one run from one seed.

    simulate_failover(seed)
      ├─ leader, follower     two brokers on disks of their own; entries travel by `replication`
      ├─ programs             publishers, members of groups, planners; readers of the follower
      ├─ trouble              for both; then the leader dies for good, at any moment
      ├─ promotion            the follower leads, and the programs continue with it; more trouble
      └─ failover_checker     what was copied is respected; else `SimulationFailed`

The programs know nothing of it: they lose their connections and find the other broker at the next
try. The same seed gives the same run.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random

import msgspec
from crc32c import crc32c

from onward.client.client import Client
from onward.message.message import Message
from onward.settings import Settings
from onward.testing.checker import check
from onward.testing.commit import OverlappingCommit, SimulatedCommit
from onward.testing.disk import FaultyDisk
from onward.testing.failover_checker import (
    Drains,
    Plan,
    Promotion,
    Timeline,
    check_groups_after,
    check_plans,
    check_promotion,
    copied_acks,
    differing,
    entries_on,
    forget_lost,
)
from onward.testing.failover_programs import DUE_MS_MAX, FollowerReader, Planner
from onward.testing.fold import compare_folds, compare_to_fold
from onward.testing.group_history import Buried, GroupPlan
from onward.testing.history import History, id_of
from onward.testing.loop import VirtualClock, run, running_loop
from onward.testing.members import Member, Sweeper
from onward.testing.network import LossyNetwork
from onward.testing.node import Sabotage, SimulatedNode
from onward.testing.replication import ENTRIES, Copier, EntrySender
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
from onward.testing.schedule_history import TOPICS as LATER_TOPICS
from onward.testing.trouble import CAPACITY_BYTES, Trouble
from onward.testing.workload import Publisher, World

TROUBLES = (
    "power", "power in mid-operation", "kill", "stop", "sync error", "cut", "half-open",
    "partition", "full disk", "short writes", "uncached reads", "slow network",
)  # fmt: skip
FOLLOWER = "follower"
KEPT_TOPICS = ("kept-0", "kept-1")
SAMPLE_S = 0.005
PROMOTION_S_MAX = 60


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is wrong on purpose with the follower, to see that it is noticed."""

    commit: type[SimulatedCommit] | None = None
    sabotage: Sabotage | None = None


def simulate_failover(
    seed: int, *, troubles: tuple[str, ...] | None = None, fault: Fault | None = None
) -> Summary:
    """Run one seed to its end, or raise `SimulationFailed`.

    >>> simulate_failover(7, troubles=("kill",)).counts["promoted"]
    1
    """
    random = Random(seed)
    chosen = tuple(random.sample(TROUBLES, random.randint(1, 5)))
    scenario = Scenario.choose(random, troubles=chosen if troubles is None else troubles, groups=())
    scenario = replace(scenario, settings=_without_retention(scenario.settings))

    async def main() -> Summary:
        return await Failover(seed, scenario, random, fault or Fault()).run()

    with fixed_identity(), without_collector():
        return run(main(), seed=seed, executor_ms_max=scenario.executor_ms_max)


def _without_retention(settings: Settings) -> Settings:
    log = msgspec.structs.replace(settings.log, retention_bytes=0)
    return msgspec.structs.replace(settings, log=log)


class Failover:
    """One run."""

    def __init__(self, seed: int, scenario: Scenario, random: Random, fault: Fault) -> None:
        self._seed = seed
        self._scenario = scenario
        self._random = random
        self._loop = running_loop()
        self._clock = VirtualClock(self._loop)
        self._network = LossyNetwork(self._loop, self._chance())
        self._lines: deque[str] = deque(maxlen=TRACE_LINES_MAX)
        self._history = History()
        self._plans: list[Plan] = []
        self._timeline = Timeline()
        self._counts: Counter[str] = Counter()
        self._violations: list[str] = []
        self._unanswered: set[str] = set()
        """What was published and had no answer when the follower took over."""
        self._leader = self._node("broker", None, Fault(commit=self._leader_commit()))
        self._leader.doors[ENTRIES] = lambda broker: EntrySender(broker, self._chance())
        self._follower = self._node(FOLLOWER, "broker", fault)
        self._copier = Copier(self._follower, self._network, self._chance())
        self._world = self._new_world("broker")
        self._follower_world = self._new_world(FOLLOWER)
        self._groups = [self._group(f"g{number}") for number in range(random.randint(1, 2))]
        self._history.groups.plans = {plan.name: plan for plan in self._groups}
        self._programs = self._new_programs()

    def _chance(self) -> Random:
        return Random(self._random.getrandbits(64))

    def _leader_commit(self) -> type[SimulatedCommit]:
        return self._random.choice((SimulatedCommit, OverlappingCommit))

    def _node(self, name: str, follows: str | None, fault: Fault) -> SimulatedNode:
        return SimulatedNode(
            self._scenario.settings, name=name, follows=follows, clock=self._clock,
            disk=FaultyDisk(self._chance(), capacity_bytes=CAPACITY_BYTES), network=self._network,
            random=self._chance(), trace=self._trace, commit=fault.commit or SimulatedCommit,
            sabotage=fault.sabotage,
        )  # fmt: skip

    def _new_world(self, address: str) -> World:
        return World(
            history=self._history, clock=self._clock, network=self._network,
            random=self._chance(), topics=[*KEPT_TOPICS, "volatile-0"], trace=self._trace,
            pause_ms_max=self._scenario.pause_ms_max, address=address,
        )  # fmt: skip

    def _group(self, name: str) -> GroupPlan:
        plan = GroupPlan.choose(self._random, name, KEPT_TOPICS)
        return replace(plan, at_most_once=False, is_operated=False, members=2)

    # --- the run -----------------------------------------------------------------------------

    async def run(self) -> Summary:
        """Run to the end."""
        self._trace(f"troubles: {', '.join(self._scenario.troubles)}")
        try:
            async with asyncio.TaskGroup() as machines:
                nodes = (self._leader.run(), self._follower.run(), self._copier.run())
                tasks = [machines.create_task(one) for one in (*nodes, self._watch_leader())]
                drains, promotion = await self._live()
                for task in tasks:
                    task.cancel()
        except* Exception as errors:  # noqa: BLE001  (whatever it is, the run has failed)
            self._violations += [f"{type(one).__name__}: {one}" for one in errors.exceptions]
        if violations := self._all_violations():
            raise SimulationFailed(
                failure_text(violations, seed=self._seed, lines=self._lines)
            ) from None
        return self._summary(drains, promotion)

    async def _live(self) -> tuple[Drains, Promotion]:
        ends = asyncio.Event()
        async with asyncio.TaskGroup() as programs:
            for program in self._programs:
                programs.create_task(program.run(ends), name=program.name)
            await self._make_trouble_for_both()
            promotion = await self._promote()
            await self._trouble(self._follower, self._random.choice((1, 10_000))).make()
            self._heal()
            ends.set()
        drains = await self._drain()
        self._judge(drains, promotion)
        return drains, promotion

    def _new_programs(self) -> list[Publisher | Member | Planner | FollowerReader]:
        members = [
            Member(self._world, plan, f"{plan.name}-m{number}")
            for plan in self._groups
            for number in range(plan.members)
        ]
        publishers = [Publisher(self._world, f"p{number}") for number in range(2)]
        planner = Planner(self._world, self._plans, "planner")
        return [*publishers, *members, planner, FollowerReader(self._follower_world, "reader")]

    async def _watch_leader(self) -> None:
        """Note how far the leader is, so that it is known what has been copied."""
        while not self._leader.is_retired:
            if self._leader.broker is not None:
                last_index = self._leader.broker.log.next_index - 1
                self._timeline.note(self._loop.now_us, last_index)
            await asyncio.sleep(SAMPLE_S)

    def _trouble(self, node: SimulatedNode, trouble_ms: int) -> Trouble:
        return Trouble(
            replace(self._scenario, trouble_ms=trouble_ms), node=node, network=self._network,
            clock=self._clock, random=self._chance(), trace=self._trace,
        )  # fmt: skip

    async def _make_trouble_for_both(self) -> None:
        """Make trouble until the leader dies, for good; sometimes the follower has more of it."""
        life_ms = self._random.choice((2_000, 10_000, 30_000))
        async with asyncio.TaskGroup() as troubles:
            follower_ms = life_ms + self._random.choice((-1_000, 0, 3_000))
            troubles.create_task(self._trouble(self._follower, follower_ms).make())
            await self._trouble(self._leader, life_ms).make()
            if self._random.random() < 0.5:
                await self._silence_leader()
            self._leader.is_retired = True
            self._leader.die(self._random.choice(("power", "kill")), "for good")

    async def _silence_leader(self) -> None:
        """Let the leader store and send to the follower what it gets, but answer nobody."""
        self._trace("the answers of the leader are lost")
        for program in self._programs:
            self._network.mute(self._leader.name, program.name)
        await asyncio.sleep(self._random.randint(100, 2_000) / 1000)

    async def _promote(self) -> Promotion:
        """Make the follower the leader, after a while."""
        await asyncio.sleep(self._random.randint(0, 5_000) / 1000)
        broker = await self._copier.stop()
        promotion = self._look_at_follower()
        self._trace(f"promotion: {promotion.last_index} entries were copied")
        # Whoever dies while it is promoted is the leader when it starts again.
        self._follower.follows = None
        try:
            async with asyncio.timeout(PROMOTION_S_MAX):
                await broker.lead()
        except (OSError, TimeoutError) as error:
            self._trace(f"promotion failed: {error}")
            if self._follower.broker is broker:
                self._violations.append(f"F2: the promotion failed: {error!r}")
        self._world.address = FOLLOWER
        self._counts["promoted"] += 1
        self._counts["lost"] += forget_lost(self._history, promotion)
        attempts = self._history.attempts.values()
        self._unanswered = {one.id for one in attempts if one.outcome == "pending"}
        return promotion

    def _look_at_follower(self) -> Promotion:
        """Note what the follower has, and whether that is right."""
        folder = self._scenario.settings.log.folder
        broker = self._follower.broker
        assert broker is not None
        with self._without_faults():
            copied, state = entries_on(self._follower.disk, folder)
            leader, _ = entries_on(self._leader.disk, folder)
            differences = compare_to_fold(broker.state, self._follower.disk, folder)
        promotion = Promotion(
            self._loop.now_us, broker.log.next_index - 1, self._copier.acknowledged_index, copied,
            state, self._timeline,
        )  # fmt: skip
        self._violations += check_promotion(promotion, leader)
        self._violations += [f"F2: the follower differs from its log: {one}" for one in differences]
        return promotion

    @contextmanager
    def _without_faults(self) -> Iterator[None]:
        with self._leader.disk.without_faults(), self._follower.disk.without_faults():
            yield

    def _heal(self) -> None:
        self._trouble(self._follower, 0).heal()

    # --- the end -----------------------------------------------------------------------------

    async def _drain(self) -> Drains:
        """Let groups finish and schedules fire, and read everything."""
        client, _ = await within("open a client", self._world.opened("drain"))
        for plan in self._groups:
            await Sweeper(self._world, plan, f"{plan.name}-sweeper").sweep(client)
            self._history.groups.dead[plan.name] = await within(
                "list the dead", self._dead_letters(client, plan)
            )
        await asyncio.sleep(DUE_MS_MAX / 1000)
        drains: Drains = {}
        for topic in await within("list topics", client.topics()):
            if not topic.topic.startswith("@"):
                read = self._read_all(client, topic.topic)
                drains[topic.topic] = await within("drain", read)
        await client.close()
        return drains

    async def _read_all(self, client: Client, topic: str) -> list[Message]:
        return [message async for message in client.read(topic)]

    async def _dead_letters(self, client: Client, plan: GroupPlan) -> dict[tuple[str, int], Buried]:
        return {
            (one.topic, one.offset): Buried(one.attempts, one.cause, one.member)
            async for one in client.dead_letters(plan.name, messages=False)
        }

    def _judge(self, drains: Drains, promotion: Promotion) -> None:
        folder, disk, broker = (
            self._scenario.settings.log.folder, self._follower.disk, self._follower.broker,
        )  # fmt: skip
        assert broker is not None
        with self._without_faults():
            entries, _ = entries_on(disk, folder)
            differences = [
                *compare_to_fold(broker.state, disk, folder), *compare_folds(disk, folder)
            ]  # fmt: skip
        self._violations += [f"F2: the new leader differs: {one}" for one in differences]
        if others := differing(promotion.copied, entries):
            self._violations.append(f"F3: entries {others[:5]} are not what was copied")
        later = {topic: drains[topic] for topic in LATER_TOPICS if topic in drains}
        published = {topic: drains[topic] for topic in drains if topic not in later}
        told = History(attempts=self._history.attempts, readings=self._history.readings)
        groups, delivered = self._history.groups, self._follower.wire
        self._violations += check(told, published)
        self._violations += check_groups_after(groups, published, promotion, delivered)
        self._violations += check_plans(self._plans, later, promotion)

    # --- report ------------------------------------------------------------------------------

    def _trace(self, line: str) -> None:
        self._lines.append(f"{self._loop.time():10.3f} {line}")

    def _all_violations(self) -> list[str]:
        nodes = [*self._leader.violations, *self._follower.violations]
        worlds = [*self._world.violations, *self._follower_world.violations]
        return [*self._violations, *self._copier.violations, *nodes, *worlds]

    def _summary(self, drains: Drains, promotion: Promotion) -> Summary:
        counts = self._counts + self._history.count()
        for node in (self._leader, self._follower):
            counts.update({f"{node.name} {death}": n for death, n in node.counts.items()})
        counts["copied"] = promotion.last_index
        counts["copied acks"] = sum(
            len(copied_acks(self._history.groups, plan, promotion)) for plan in self._groups
        )
        counts["planned"] = len(self._plans)
        counts["fired"] = sum(len(drains.get(topic, [])) for topic in LATER_TOPICS)
        counts["recognised repeats"] = self._recognised(drains, promotion)
        stored = [(topic, [id_of(one) for one in drain]) for topic, drain in drains.items()]
        digest = crc32c(repr((list(self._lines), stored, promotion.last_index)).encode())
        return Summary(self._seed, self._loop.now_us // 1000, counts, digest)

    def _recognised(self, drains: Drains, promotion: Promotion) -> int:
        """Return how many messages had been copied without an answer, and were sent again."""
        attempts = self._history.attempts
        return sum(
            message.event_id <= promotion.last_index
            and id_of(message) in self._unanswered
            and attempts[id_of(message)].outcome == "acked"
            for topic in KEPT_TOPICS
            for message in drains.get(topic, [])
        )
