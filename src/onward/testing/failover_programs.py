"""Programs for a run in which a follower takes over: what `workload` and `members` do not have.

Planner           schedules messages, and cancels some of them
FollowerReader    reads topics of the follower, before and after it leads
"""

from __future__ import annotations

import asyncio

from onward.client.client import Client
from onward.errors import OnwardError, OutcomeUnknown
from onward.testing.failover_checker import Plan
from onward.testing.history import Reading, is_definite
from onward.testing.schedule_history import TOPICS
from onward.testing.workload import World

DUE_MS_MAX = 15_000
PLANS_MAX = 400


class Planner:
    """Schedules one message after another until told to end."""

    def __init__(self, world: World, plans: list[Plan], name: str) -> None:
        self.name = name
        self._world = world
        self._plans = plans
        self._random = world.chance()

    async def run(self, ends: asyncio.Event) -> None:
        """Work until `ends`."""
        client, _ = await self._world.opened(self.name)
        while not ends.is_set():
            if len(self._plans) < PLANS_MAX:
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(self._random.randint(1, 5)):
                        tasks.create_task(self._schedule(client))
            await asyncio.sleep(self._random.randint(0, 500) / 1000)
        await client.close()

    async def _schedule(self, client: Client) -> None:
        due_at_ms = self._world.clock.now_ms() + self._random.choice(
            (0, self._random.randint(0, 2_000), self._random.randint(0, DUE_MS_MAX))
        )
        plan = Plan(f"{self.name}-{len(self._plans)}", self._random.choice(TOPICS), due_at_ms)
        self._plans.append(plan)
        try:
            receipt = await client.publish(plan.topic, plan.body, at=due_at_ms)
        except OnwardError as error:
            plan.outcome = "refused" if is_definite(error) else "unknown"
            return
        plan.outcome, plan.answered_us = "acked", self._world.now_us()
        if self._random.random() < 0.3:
            await asyncio.sleep(self._random.randint(0, 1_000) / 1000)
            await self._cancel(client, plan, receipt.schedule_id)

    async def _cancel(self, client: Client, plan: Plan, number: int) -> None:
        plan.cancel = "unknown"
        try:
            (result,) = await client.cancel_scheduled(number)
        except OutcomeUnknown:
            return
        except OnwardError:
            plan.cancel = "none"
            return
        if result.state == "cancelled":
            plan.cancel, plan.cancelled_us = "cancelled", self._world.now_us()
        elif result.state == "fired":
            plan.cancel = "none"


class FollowerReader:
    """Reads the topics of the follower from their beginning, again and again."""

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self._world = world
        self._random = world.chance()

    async def run(self, ends: asyncio.Event) -> None:
        """Read until `ends`."""
        client, _ = await self._world.opened(self.name)
        while not ends.is_set():
            topic = self._random.choice(self._world.topics)
            reading = Reading(self.name, topic, "earliest")
            self._world.history.readings.append(reading)
            try:
                async with asyncio.timeout(self._random.choice((1, 5))):
                    async for message in client.read(topic, follow=self._random.random() < 0.5):
                        reading.messages.append(message)
            except TimeoutError:
                reading.error = "enough"
            except OnwardError as error:
                # The topic may not have been copied yet, and the follower may be dead.
                reading.error = f"{type(error).__name__}: {error}"
            await asyncio.sleep(self._random.randint(0, 2_000) / 1000)
        await client.close(drain=False)
