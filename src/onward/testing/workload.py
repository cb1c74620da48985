"""Programs that use the broker: publishers, readers, and people who come and go with topics.

Each has its own client, its own machine name on the network and its own chance, and writes into the
history all that it does and sees. They go on through every failure, as programs do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from datetime import UTC, datetime
from random import Random
from typing import Any

from onward.broker.catalogue import Rule
from onward.client.address import Address
from onward.client.client import Client
from onward.client.delivery import Delivery
from onward.client.link import Link
from onward.client.receipt import BatchReceipt, DurabilityName, Receipt
from onward.delivery.trace import decode_row
from onward.errors import (
    NotConnected,
    OnwardError,
    OutcomeUnknown,
    Overloaded,
    Unavailable,
    UnknownTopic,
)
from onward.message.message import Message
from onward.protocol.payloads import Durability
from onward.testing.group_history import GroupPlan, Handed, Stint
from onward.testing.history import Attempt, History, Reading, kind_of
from onward.testing.loop import VirtualClock, running_loop
from onward.testing.network import LossyNetwork
from onward.testing.node import NAME, Trace
from onward.testing.schedule_history import is_scheduled

TIMEOUT_S = 10.0
UNANSWERED_MAX = 300
READ_MAX = 400
# A run is as long as its seed says, but has no more messages than are quick to check.
ATTEMPTS_MAX = 2_000
HANDED_MAX = 8_000


class World:
    """What all programs share."""

    def __init__(
        self, *, history: History, clock: VirtualClock, network: LossyNetwork, random: Random,
        topics: list[str], trace: Trace, pause_ms_max: int, address: str = NAME,
    ) -> None:  # fmt: skip
        self.address = address
        """Where programs find the broker."""
        self.history = history
        self.clock = clock
        self.network = network
        self.topics = topics
        self.trace = trace
        self.pause_ms_max = pause_ms_max
        self.violations: list[str] = []
        self._random = random
        self._producers = 0

    def now_us(self) -> int:
        """Return the time of the run."""
        return running_loop().now_us

    @property
    def has_handed_enough(self) -> bool:
        """Tell whether members have seen so much that checking more would take long."""
        return len(self.history.groups.handed) >= HANDED_MAX

    def begin_stint(self, plan: GroupPlan, machine: str) -> Stint:
        """Note that a program is about to join a group."""
        stint = Stint(plan, machine, self.now_us())
        self.history.groups.stints.append(stint)
        return stint

    def hand(self, stint: Stint, delivery: Delivery) -> Handed:
        """Note that a member got a message."""
        # A plain message: a delivery that is kept would keep its lease, too.
        message = Message(*(getattr(delivery, name) for name in Message.__struct_fields__))
        handed = Handed(stint, message, delivery.attempt, delivery.lease, self.now_us())
        self.history.groups.handed.append(handed)
        return handed

    def pause_ms(self) -> int:
        """Return the longest pause between two publishes: a long one once there is enough."""
        return self.pause_ms_max if len(self.history.attempts) < ATTEMPTS_MAX else 5_000

    def chance(self) -> Random:
        """Return a chance of its own for one program: programs do not disturb each other."""
        return Random(self._random.getrandbits(64))

    def client(self, name: str) -> tuple[Client, int]:
        """Return a client on the machine `name`, not yet open, and its producer id: a new one."""
        self._producers += 1
        producer = self._producers

        async def dial(make: Callable[[], Link]) -> Link:
            _, link = await self.network.connect(self.address, make, source=name)
            return link

        client = Client(
            [Address("tcp", NAME, 7700)], token=None, name=name, timeout_s=TIMEOUT_S,
            durability=Durability.DISK, dials=[dial], producer_id=producer,
            clock=self.clock, jitter=self.chance(),
        )  # fmt: skip
        return client, producer

    async def opened(self, name: str) -> tuple[Client, int]:
        """Return an open client and its producer id, however long that takes."""
        while True:
            client, producer = self.client(name)
            try:
                await client.open()
            except NotConnected:
                continue
            return client, producer

    async def prepare_topics(self) -> None:
        """Create the topics that keep only what is new; a fault may leave one without limits."""
        client, _ = await self.opened("admin")
        for topic in self.topics:
            if kind_of(topic) == "trimmed":
                try:
                    await self._create_trimmed(client, topic)
                except OnwardError as error:
                    self.trace(f"{topic} was perhaps not created: {error}")
        await client.close()

    async def _create_trimmed(self, client: Client, topic: str) -> None:
        if self._random.random() < 0.5:
            await client.create_topic(topic, exist_ok=True, retention_bytes=20_000)
        else:
            await client.create_topic(topic, exist_ok=True, retention="5s")


class Publisher:
    """Publishes single messages, bursts and batches until told to end."""

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self._world = world
        self._random = world.chance()
        self._number = 0
        self._producer = 0
        self._unanswered: dict[asyncio.Future[Any], None] = {}

    async def run(self, ends: asyncio.Event) -> None:
        """Work until `ends`, then wait for the last answers."""
        while not ends.is_set():
            client, self._producer = await self._world.opened(self.name)
            for _ in range(self._random.choice((20, 200, 1_000))):
                if ends.is_set():
                    break
                await self._publish(client)
                await asyncio.sleep(self._random.randint(0, self._world.pause_ms()) / 1000)
            await client.close(drain=ends.is_set() or self._random.random() < 0.7)
            await asyncio.sleep(0)

    async def _publish(self, client: Client) -> None:
        topic = self._random.choice(self._world.topics)
        match self._random.choice(("burst", "burst", "burst", "many", "one")):
            case "burst":
                for _ in range(self._random.randint(1, 20)):
                    self._soon(client, topic, [self._attempt(topic)])
            case "many":
                count = self._random.randint(1, 30)
                self._soon(client, topic, [self._attempt(topic) for _ in range(count)])
            case "one":
                self._soon(client, topic, [self._attempt(topic)])
                await asyncio.wait(self._unanswered) if self._unanswered else None
        while len(self._unanswered) > UNANSWERED_MAX:
            await asyncio.wait(self._unanswered, return_when=asyncio.FIRST_COMPLETED)

    def _attempt(self, topic: str) -> Attempt:
        self._number += 1
        padding = self._random.choice((0, 0, 40, 40, 200, 3_000))
        return self._world.history.attempt(
            topic, producer=self._producer, number=self._number, padding=padding
        )

    def _soon(self, client: Client, topic: str, attempts: list[Attempt]) -> None:
        durability = _durability(topic)
        future: asyncio.Future[Any]
        try:
            if len(attempts) == 1:
                one = attempts[0]
                future = client.publish_soon(
                    topic, one.body, key=one.key, tag=one.tag, priority=one.priority,
                    durability=durability,
                )  # fmt: skip
            else:
                future = asyncio.get_running_loop().create_task(self._many(client, topic, attempts))
        except OnwardError as error:
            self._world.history.settle(attempts, error)
            return
        self._unanswered[future] = None
        future.add_done_callback(lambda done: self._settle(attempts, done))

    async def _many(self, client: Client, topic: str, attempts: list[Attempt]) -> BatchReceipt:
        return await client.publish_many(
            topic, [one.body for one in attempts], keys=[one.key for one in attempts],
            tags=[one.tag for one in attempts], priorities=[one.priority for one in attempts],
            durability=_durability(topic),
            compression=self._random.choice((None, None, "zstd", "lz4")),
        )  # fmt: skip

    def _settle(
        self, attempts: list[Attempt], done: asyncio.Future[Receipt] | asyncio.Task[BatchReceipt]
    ) -> None:
        self._unanswered.pop(done, None)
        error = asyncio.CancelledError() if done.cancelled() else done.exception()
        if error is not None and not isinstance(error, OnwardError | asyncio.CancelledError):
            self._world.violations.append(f"a publish failed with {error!r}")
        self._world.history.settle(attempts, error or done.result())


class Follower:
    """Reads topics from anywhere, for a while or until told to end."""

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self._world = world
        self._random = world.chance()

    async def run(self, ends: asyncio.Event) -> None:
        """Read one stretch after another until `ends`."""
        client, _ = await self._world.opened(self.name)
        while not ends.is_set():
            reading, start = self._choose()
            reading.is_early = reading.topic not in self._world.history.acked_topics
            self._world.history.readings.append(reading)
            try:
                async with asyncio.timeout(self._random.choice((1, 5, 30))):
                    await self._read(client, reading, start)
            except TimeoutError:
                reading.error = "enough"
            except OnwardError as error:
                self._judge(reading, error)
            await asyncio.sleep(self._random.randint(0, 1_000) / 1000)
        await client.close(drain=False)

    async def _read(self, client: Client, reading: Reading, start: dict[str, Any]) -> None:
        follow = self._random.random() < 0.6
        limit = self._random.choice((5, 50, READ_MAX))
        # Slow readers run out of credit and make the broker wait.
        pause_s = self._random.choice((0, 0, 0, 0.01, 0.2))
        messages = client.read(reading.topic, follow=follow, **start).__aiter__()
        async with aclosing(messages):  # type: ignore[type-var]
            async for message in messages:
                reading.messages.append(message)
                if len(reading.messages) >= limit:
                    return
                if pause_s:
                    await asyncio.sleep(pause_s)

    def _choose(self) -> tuple[Reading, dict[str, Any]]:
        topic = self._random.choice(self._world.topics)
        acked = [one for one in self._recent() if one.topic == topic and one.outcome == "acked"]
        known = self._random.choice(acked) if acked else None
        match self._random.choice(("earliest", "latest", "offset", "time", "event_id")):
            case "latest":
                return Reading(self.name, topic, "latest"), {"start": "latest"}
            case "offset" if known is not None:
                return self._reading(topic, "offset", known.offset), {"start": known.offset}
            case "time":
                now_ms = self._world.clock.now_ms() - self._random.randint(-1_000, 60_000)
                at = datetime.fromtimestamp(now_ms / 1000, tz=UTC)
                return self._reading(topic, "time", round(at.timestamp() * 1000)), {"start": at}
            case "event_id" if known is not None:
                asked = {"after_event_id": known.event_id}
                return self._reading(topic, "event_id", known.event_id), asked
        return Reading(self.name, topic, "earliest"), {"start": "earliest"}

    def _recent(self) -> list[Attempt]:
        attempts = list(self._world.history.attempts.values())
        return attempts[-self._random.choice((50, 500, 5_000)) :]

    def _reading(self, topic: str, start: Any, value: int) -> Reading:
        return Reading(self.name, topic, start, value)

    def _judge(self, reading: Reading, error: OnwardError) -> None:
        """Nobody who reads what is kept may hear that it is gone."""
        reading.error = f"{type(error).__name__}: {error}"
        if kind_of(reading.topic) != "kept" or isinstance(error, NotConnected | OutcomeUnknown):
            return
        if isinstance(error, Overloaded):
            return
        if isinstance(error, UnknownTopic | Unavailable) and reading.is_early:
            return
        self._world.violations.append(
            f"I4: {reading.reader} reads {reading.topic!r} from {reading.start} {reading.value}, "
            f"has {len(reading.messages)} messages, and hears {reading.error}"
        )


class TopicKeeper:
    """Creates, changes and deletes topics."""

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self._world = world
        self._random = world.chance()

    async def run(self, ends: asyncio.Event) -> None:
        """Change something every few seconds until `ends`."""
        client, _ = await self._world.opened(self.name)
        brief = [topic for topic in self._world.topics if kind_of(topic) == "brief"]
        while brief and not ends.is_set():
            topic = self._random.choice(brief)
            try:
                await self._change(client, topic)
            except OnwardError as error:
                self._world.trace(f"{self.name}: {topic}: {type(error).__name__}")
            await asyncio.sleep(self._random.randint(0, 3_000) / 1000)
        await client.close()

    async def _change(self, client: Client, topic: str) -> None:
        action = self._random.choice(
            ("create", "lifetime", "delete", "delete", "delete", "rule", "list")
        )
        self._world.trace(f"{self.name}: {action} {topic}")
        match action:
            case "create":
                await client.create_topic(topic, exist_ok=True)
            case "lifetime":
                await client.create_topic(topic, lifetime_ms=self._random.randint(10_000, 20_000))
            case "delete":
                await client.delete_topic(topic)
            case "rule":
                rules: list[Rule] = ["read-write", "read-write", "read-only", "closed"]
                await client.change_topic(topic, rule=self._random.choice(rules))
            case "list":
                await client.topics(ended=True)


class Auditor:
    """Asks again and again where topics begin, and reads the trace as it grows."""

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self._world = world
        self._random = world.chance()

    async def run(self, ends: asyncio.Event) -> None:
        """Look every moment until `ends`."""
        client, _ = await self._world.opened(self.name)
        while not ends.is_set():
            try:
                await self.look(client)
            except OnwardError as error:
                self._world.trace(f"{self.name}: {type(error).__name__}")
            await asyncio.sleep(self._random.randint(0, 2_000) / 1000)
        await client.close()

    async def look(self, client: Client) -> None:
        """Note the first offsets of all topics, and the rows that are new in the trace."""
        history = self._world.history
        for topic in await client.topics():
            if not is_scheduled(topic.topic):
                history.first_offsets.append((topic.topic, topic.first_offset))
        if history.has_whole_trace:
            async for message in client.read("@trace", start=len(history.trace)):
                history.trace.append((decode_row(message.body), self._world.now_us()))


def _durability(topic: str) -> DurabilityName:
    return "memory" if kind_of(topic) == "volatile" else "disk"
