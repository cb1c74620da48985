"""A person who looks after groups, and does everything to them that one can do.

Acts come one after another, each noted before it is asked for: see `group_history.Act`. A pause is
ended before the next act. What is refused did not happen; what has no answer perhaps did.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from onward.client.client import Client
from onward.errors import OnwardError, Unavailable
from onward.testing.group_history import Act, ActKind, GroupPlan, is_refused
from onward.testing.workload import World

ACTS: tuple[ActKind, ...] = (
    "pause", "pause", "reset", "replay", "redrive", "redrive", "purge", "skip", "fork", "offline",
    "delete",
)  # fmt: skip


class Operator:
    """Does something to one of the groups every few seconds."""

    def __init__(self, world: World, plans: list[GroupPlan], name: str) -> None:
        self.name = name
        self._world = world
        self._plans = plans
        self._random = world.chance()
        self._forked: set[str] = set()

    async def run(self, ends: asyncio.Event) -> None:
        """Work until `ends`; no group stays paused, and nobody offline."""
        client, _ = await self._world.opened(self.name)
        while self._plans and not ends.is_set():
            await asyncio.sleep(self._random.randint(0, 8_000) / 1000)
            plan = self._random.choice(self._plans)
            await self._do(client, plan, self._random.choice(ACTS))
        await client.close()

    async def _do(self, client: Client, plan: GroupPlan, kind: ActKind) -> None:
        match kind:
            case "pause":
                await self._pause(client, plan)
            case "offline":
                await self._take_offline(client, plan)
            case "fork":
                await self._fork(client, plan)
            case "delete":
                await self._act(self._new(plan, kind), client.delete_group(plan.name))
            case "reset":
                to: Any = self._random.choice(("earliest", "latest"))
                topic = self._random.choice(plan.topics)
                act = self._new(plan, kind, topic=topic)
                await self._act(act, client.reset_group(plan.name, to=to, topic=topic))
            case "redrive":
                await self._act(self._new(plan, kind), client.redrive(plan.name))
            case "purge":
                await self._act(self._new(plan, kind), client.purge(plan.name))
            case "skip" | "replay":
                topic, start = self._random.choice(plan.topics), self._random.randint(0, 200)
                ranges = ((start, start + self._random.randint(1, 50)),)
                act = self._new(plan, kind, topic=topic, ranges=ranges)
                call = client.skip if kind == "skip" else client.replay
                await self._act(act, call(plan.name, topic, range(*ranges[0])))

    async def _pause(self, client: Client, plan: GroupPlan) -> None:
        act = self._new(plan, "pause")
        await self._act(act, client.pause_group(plan.name))
        await asyncio.sleep(self._random.randint(0, 5_000) / 1000)
        act.ended_us = self._world.now_us()
        await self._surely(lambda: client.resume_group(plan.name))

    async def _take_offline(self, client: Client, plan: GroupPlan) -> None:
        member = f"{plan.name}-m{self._random.randrange(plan.members)}"
        act = self._new(plan, "offline")
        await self._act(act, client.set_member(plan.name, member, offline=True))
        await asyncio.sleep(self._random.randint(0, 5_000) / 1000)
        await self._surely(lambda: client.set_member(plan.name, member, offline=False))

    async def _fork(self, client: Client, plan: GroupPlan) -> None:
        if plan.name in self._forked:
            return
        self._forked.add(plan.name)
        act = self._new(plan, "fork")
        fork = replace(plan, name=f"{plan.name}-fork", source=plan.name, is_operated=False)
        if await self._act(act, client.fork_group(plan.name, fork.name)):
            self._world.history.groups.plans[fork.name] = fork

    def _new(
        self, plan: GroupPlan, kind: ActKind, *, topic: str = "",
        ranges: tuple[tuple[int, int], ...] = (),
    ) -> Act:  # fmt: skip
        return Act(kind, plan.name, self._world.now_us(), topic=topic, ranges=ranges)

    async def _act(self, act: Act, call: Awaitable[object]) -> bool:
        """Do it and note it; tell whether it was done or perhaps done."""
        history = self._world.history.groups
        history.acts.append(act)
        self._world.trace(f"{self.name}: {act.kind} {act.group} {act.topic} {act.ranges or ''}")
        try:
            await call
        except OnwardError as error:
            self._world.trace(f"{self.name}: {act.kind} {act.group}: {error}")
            if is_refused(error):
                history.acts.remove(act)
                act.answered_us = self._world.now_us()
                history.refused.append(act)
                return False
            return True
        act.answered_us = self._world.now_us()
        return True

    async def _surely(self, call: Callable[[], Awaitable[object]]) -> None:
        """Repeat what does no harm twice until it has worked, or can not."""
        while True:
            try:
                await call()
            except OnwardError as error:
                if is_refused(error) and not isinstance(error, Unavailable):
                    return
                await asyncio.sleep(0.5)
            else:
                return
