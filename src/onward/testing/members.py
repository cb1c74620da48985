"""Programs that consume in groups: they work, fail, forget, leave, die, and come again.

    Member     joins, and settles what it gets: mostly an ack, by its own mood or the message's
    Sweeper    in peace: settles everything until its group has nothing left

Some messages are bad for everybody, so that what becomes of them is known: each message whose
number is a multiple of 17 always fails, each multiple of 23 is always rejected. A multiple of 29
kills the program of its member, a moment after it has started; only sweepers survive it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Literal

from onward.client.client import Client
from onward.client.consumer import Consumer
from onward.client.delivery import Delivery
from onward.errors import OnwardError, UnknownGroup
from onward.testing.group_history import DIED, GroupPlan, Handed, Stint, Verb
from onward.testing.history import id_of, kind_of
from onward.testing.workload import World

Mood = Literal["diligent", "forgetful", "slow", "moody"]
MOODS: tuple[Mood, ...] = ("diligent", "diligent", "forgetful", "slow", "moody")
SWEEP_S_MAX = 600


class Member:
    """One program that is a member of one group, again and again."""

    def __init__(self, world: World, plan: GroupPlan, name: str) -> None:
        self.name = name
        self._world = world
        self._plan = plan
        self._random = world.chance()
        self._member = name if self._random.random() < 0.5 else None
        self._topics = list(plan.topics)
        self._settling: set[asyncio.Task[None]] = set()

    async def run(self, ends: asyncio.Event) -> None:
        """Be a member for one stint after another until `ends`."""
        while not ends.is_set():
            client, _ = await self._world.opened(self.name)
            for _ in range(self._random.randint(1, 4)):
                if ends.is_set():
                    break
                stint = await self._stint(client)
                await asyncio.sleep(self._random.randint(0, 1_000) / 1000)
                if stint.end == DIED:
                    break
            if self._random.random() < 0.3:
                self._world.network.kill(self.name)
            await client.close(drain=False)

    async def _stint(self, client: Client) -> Stint:
        stint = self._world.begin_stint(self._plan, self.name)
        seconds = self._random.choice((1, 5, 20))
        try:
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as tasks:
                await self._try_to_work(client, stint, tasks)
        except TimeoutError:
            stint.end = "enough"
            stint.ended_us = min(stint.ended_us, stint.joined_us + seconds * 1_000_000)
        stint.ended_us = min(stint.ended_us, self._world.now_us())
        return stint

    async def _try_to_work(self, client: Client, stint: Stint, tasks: asyncio.TaskGroup) -> None:
        try:
            await self._work(client, stint, tasks)
        except OnwardError as error:
            stint.end = f"{type(error).__name__}: {error}"
            self._world.trace(f"{self.name} is no member any more: {stint.end}")

    async def _work(self, client: Client, stint: Stint, tasks: asyncio.TaskGroup) -> None:
        consumer = self._join(client)
        limit = self._random.choice((1, 10, 100, 500))
        mood = self._random.choice(MOODS)
        async with consumer, aclosing(self._deliveries(consumer)) as deliveries:
            try:
                async for delivery in deliveries:
                    handed = self._world.hand(stint, delivery)
                    settling = self._settle(handed, delivery, mood)
                    if is_deadly(delivery):
                        settling.close()
                        await self._die(stint)
                        return
                    if self._random.random() < 0.5:
                        self._settle_soon(settling, tasks)
                    else:
                        await settling
                    limit -= 1
                    if limit <= 0 or self._world.has_handed_enough:
                        return
            finally:
                # From here on what it holds goes back.
                stint.ended_us = self._world.now_us()

    def _join(self, client: Client) -> Consumer:
        return client.consume(
            self._topics, group=self._plan.name, member=self._member,
            credit=self._random.choice((1, 10, 100, 1_000)), **self._plan.options,
        )  # fmt: skip

    async def _deliveries(self, consumer: Consumer) -> AsyncGenerator[Delivery]:
        match self._random.choice(("each", "each", "batches", "fetch")):
            case "each":
                async for delivery in consumer:
                    yield delivery
            case "batches":
                async for batch in consumer.batches():
                    for delivery in batch.messages():
                        if not delivery.is_lost:
                            yield delivery
            case "fetch":
                while True:
                    wait_ms = self._random.choice((0, 100, 2_000))
                    for delivery in await consumer.fetch(
                        self._random.randint(1, 20), wait_ms=wait_ms
                    ):
                        if not delivery.is_lost:
                            yield delivery
                    await asyncio.sleep(0.01)

    async def _die(self, stint: Stint) -> None:
        """Kill this program: it settles nothing more, and the broker sees a reset."""
        await asyncio.sleep(self._random.choice((0, 50, 50, 2_000)) / 1000)
        self._world.trace(f"{self.name} dies")
        self._world.network.kill(self.name)
        stint.end = DIED
        for task in self._settling:
            task.cancel()

    # --- what becomes of a message -----------------------------------------------------------

    def _settle_soon(self, settling: Coroutine[None, None, None], tasks: asyncio.TaskGroup) -> None:
        task = tasks.create_task(settling)
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def _settle(self, handed: Handed, delivery: Delivery, mood: Mood) -> None:
        if self._plan.at_most_once:
            return
        if mood == "slow" and self._random.random() < 0.3:
            await asyncio.sleep(self._random.randint(0, 2 * self._plan.lease_ms) / 1000)
        if is_poison(delivery):
            await self._retry(handed, delivery)
        elif is_hopeless(delivery):
            await self._ask(handed, delivery, Verb("reject", self._world.now_us()))
        elif mood == "moody" and self._random.random() < 0.4:
            await self._retry(handed, delivery)
        elif mood == "moody" and self._random.random() < 0.2:
            await self._ask(handed, delivery, Verb("release", self._world.now_us()))
        elif mood != "forgetful" or self._random.random() < 0.7:
            await self._ask(handed, delivery, Verb("ack", self._world.now_us()))

    async def _retry(self, handed: Handed, delivery: Delivery) -> None:
        # What is bad for everybody counts, so that it comes to its end.
        counts = is_poison(delivery) or self._random.random() < 0.7
        await self._ask(handed, delivery, Verb("retry", self._world.now_us(), counts))

    async def _ask(self, handed: Handed, delivery: Delivery, verb: Verb) -> None:
        handed.verbs.append(verb)
        try:
            await self._say(delivery, verb)
        except OnwardError as error:
            verb.settle(error, self._world.now_us())
        except asyncio.CancelledError as error:
            verb.settle(error, self._world.now_us())
            raise
        else:
            verb.settle(None, self._world.now_us())

    async def _say(self, delivery: Delivery, verb: Verb) -> None:
        match verb.do:
            case "ack":
                await delivery.ack()
            case "retry":
                after_ms = self._random.choice((None, None, 0, 500))
                await delivery.retry(after_ms=after_ms, count=verb.counts, cause="a mood")
            case "reject":
                await delivery.reject("no good")
            case "release":
                await delivery.release()


class Sweeper(Member):
    """A member that works on until its group has nothing left."""

    def __init__(self, world: World, plan: GroupPlan, name: str) -> None:
        super().__init__(world, plan, name)
        # The others come and go, and may be closed.
        self._topics = [topic for topic in plan.topics if kind_of(topic) != "brief"]

    async def sweep(self, client: Client) -> None:
        """Settle everything there is; a violation when that takes too long."""
        if not self._topics:
            return
        try:
            async with asyncio.timeout(SWEEP_S_MAX), asyncio.TaskGroup() as tasks:
                working = tasks.create_task(self._work_on(client, tasks))
                await self._wait_until_done(client)
                working.cancel()
        except TimeoutError:
            left = await self._left(client)
            self._world.violations.append(
                f"G1: in peace, group {self._plan.name!r} is not done: {left}"
            )

    async def _work_on(self, client: Client, tasks: asyncio.TaskGroup) -> None:
        while True:
            stint = self._world.begin_stint(self._plan, self.name)
            try:
                async with self._join(client) as consumer:
                    async for delivery in consumer:
                        handed = self._world.hand(stint, delivery)
                        tasks.create_task(self._settle(handed, delivery, "diligent"))
            except OnwardError as error:
                self._world.trace(f"{self.name} is no member any more: {error}")
            finally:
                stint.ended_us = self._world.now_us()
            await asyncio.sleep(1)

    async def _wait_until_done(self, client: Client) -> None:
        left = await self._left(client)
        while left > 0:
            await asyncio.sleep(0.5)
            left = await self._left(client)

    def _join(self, client: Client) -> Consumer:
        return client.consume(self._topics, group=self._plan.name, credit=200, **self._plan.options)

    async def _left(self, client: Client) -> int:
        try:
            group = await client.group(self._plan.name)
        except UnknownGroup:
            return 1  # it was deleted; whoever joins creates it again
        left = {share.topic: share.backlog for share in group.topics}
        # What the group has not begun with is all left.
        return sum(left.get(topic, 1) for topic in self._topics)


def is_poison(message: Delivery) -> bool:
    """Tell whether a message fails for everybody."""
    return _number(message) % 17 == 0


def is_hopeless(message: Delivery) -> bool:
    """Tell whether everybody rejects a message."""
    return _number(message) % 23 == 0


def is_deadly(message: Delivery) -> bool:
    """Tell whether a message kills the program that starts it."""
    return _number(message) % 29 == 0


def _number(message: Delivery) -> int:
    return int(id_of(message).partition("-")[2])
