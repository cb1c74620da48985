"""Programs that schedule: they publish for later, cancel, move, replace, ask, and look what fires.

    Scheduler    schedules, and changes its mind about what it scheduled, one thing after another
    Watcher      follows the topics, and notes the latest time that the clock had shown by then

They go on through every failure. Nobody else publishes to their topics. The sizes at which the
broker builds and merges runs are small here, so that both happen all the time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

from onward.broker import schedule_files
from onward.client.client import Client
from onward.errors import AlreadyExists, InvalidRequest, OnwardError, OutcomeUnknown
from onward.testing.history import is_definite
from onward.testing.loop import VirtualClock, VirtualLoop
from onward.testing.schedule_history import TOPICS, Planned, ScheduleHistory, Sight, Verdict
from onward.testing.workload import World

NEAR_MS_MAX = 15_000
FAR_MS = 5 * 365 * 86_400_000
PLANNED_MAX = 600


class PeakClock(VirtualClock):
    """A clock that knows the latest time that it ever showed."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__(loop)
        self._peak_ms = 0

    def jump(self, ms: int) -> None:
        """Set the clock forwards or backwards."""
        self._peak_ms = self.peak_ms()
        super().jump(ms)

    def peak_ms(self) -> int:
        """Return the latest time that this clock has shown."""
        return max(self._peak_ms, self.now_ms())


@dataclass(frozen=True)
class SchedulePlan:
    """What a seed chooses for the schedule."""

    schedulers: int
    tail_rows: int = 65_536
    merged_runs: int = 8
    builds_per_checkpoint: int = 8

    @classmethod
    def choose(cls, random: Random) -> SchedulePlan:
        """Choose some of everything.

        >>> SchedulePlan.choose(Random(7)).schedulers in (0, 1, 2)
        True
        """
        return cls(
            schedulers=random.choice((0, 1, 1, 2)),
            tail_rows=random.choice((1, 5, 30, 65_536)),
            merged_runs=random.choice((2, 3, 8)),
            builds_per_checkpoint=random.choice((1, 3, 8)),
        )

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let brokers use these sizes."""
        sizes: dict[str, Any] = {
            "TAIL_ROWS_MAX": self.tail_rows,
            "MERGED_RUNS": self.merged_runs,
            "BUILDS_PER_CHECKPOINT": self.builds_per_checkpoint,
        }
        before = {name: getattr(schedule_files, name) for name in sizes}
        for name, size in sizes.items():
            setattr(schedule_files, name, size)
        try:
            yield
        finally:
            for name, size in before.items():
                setattr(schedule_files, name, size)


class Scheduler:
    """Schedules, and changes its mind, until told to end."""

    def __init__(self, world: World, history: ScheduleHistory, clock: PeakClock, name: str) -> None:
        self.name = name
        self._world = world
        self._history = history
        self._clock = clock
        self._random = world.chance()
        self._mine: list[Planned] = []
        self._by_key: dict[str, Planned] = {}

    async def run(self, ends: asyncio.Event) -> None:
        """Work until `ends`."""
        client, _ = await self._world.opened(self.name)
        while not ends.is_set():
            await self._do_something(client)
            pause_ms = 400 if len(self._mine) < PLANNED_MAX else 5_000
            await asyncio.sleep(self._random.randint(0, pause_ms) / 1000)
        await client.close()

    async def finish(self, client: Client) -> None:
        """In peace: ask about everything; what still waits is far ahead, and is cancelled."""
        for one in self._mine:
            if one.is_open and await self._show(client, one) == "waiting":
                shown = await client.scheduled(one.number)
                if shown.at_ms < self._clock.peak_ms() - NEAR_MS_MAX:
                    self._world.violations.append(f"S1: {one.id} waits, due since {shown.at_ms}")
                await self._cancel(client, one)

    # --- one thing ---------------------------------------------------------------------------

    async def _do_something(self, client: Client) -> None:
        known = [one for one in self._mine[-60:] if one.is_open]
        asked = self._random.choice(
            ("one", "many", "keyed", "keyed", "replace", "cancel", "move", "show")
        )
        if asked in ("cancel", "move", "show") and known:
            one = self._random.choice(known)
            if asked == "cancel":
                await self._cancel(client, one)
            elif asked == "move":
                await self._move(client, one)
            else:
                await self._show(client, one)
        elif asked == "many":
            topic = self._random.choice(TOPICS)
            await self._many(
                client, [self._plan(topic) for _ in range(self._random.randint(1, 20))]
            )
        elif asked in ("keyed", "replace"):
            await self._keyed(client, f"{self.name}-k{self._random.randrange(3)}", asked)
        else:
            await self._one(client, self._plan(self._random.choice(TOPICS)))

    def _plan(self, topic: str, unique: str | None = None) -> Planned:
        name = f"{self.name}-{len(self._mine)}"
        one = Planned(name, topic, [self._due_at_ms()], unique)
        self._mine.append(one)
        self._history.planned[name] = one
        return one

    def _due_at_ms(self) -> int:
        choices = (
            -5_000,
            0,
            1,
            self._random.randint(0, 2_000),
            self._random.randint(0, NEAR_MS_MAX),
        )
        delay_ms = self._random.choice((*choices, *choices, self._random.randint(10**6, FAR_MS)))
        return self._clock.now_ms() + delay_ms

    async def _one(self, client: Client, one: Planned, **options: Any) -> None:
        try:
            receipt = await client.publish(
                one.topic, one.body, at=one.due_at_ms[0], unique=one.unique, **options
            )
        except OnwardError as error:
            self._failed([one], error)
        else:
            self._acked(one, receipt.schedule_id)

    async def _many(self, client: Client, some: list[Planned]) -> None:
        try:
            receipt = await client.publish_many(
                some[0].topic, [one.body for one in some], at=[one.due_at_ms[0] for one in some],
                compression=self._random.choice((None, "zstd")),
            )  # fmt: skip
        except OnwardError as error:
            self._failed(some, error)
        else:
            for number, one in zip(receipt.ids, some, strict=True):
                self._acked(one, number)

    async def _keyed(self, client: Client, key: str, asked: str) -> None:
        before = self._by_key.get(key)
        one = self._plan(self._random.choice(TOPICS), key)
        replaces = asked == "replace"
        await self._one(client, one, replace=replaces)
        if one.outcome == "refused":
            return
        self._by_key[key] = one
        if before is None or before.is_gone or before.has_fired:
            return
        # Replaced, or it had fired: the broker is asked which.
        before.may_be_gone = before.may_be_gone or replaces
        if before.outcome == one.outcome == "acked" and not before.is_astray:
            state = await self._show(client, before)
            if state == "waiting":
                self._world.violations.append(f"S6: {before.id} and {one.id} both wait as {key}")

    def _acked(self, one: Planned, number: int) -> None:
        one.outcome, one.number = "acked", number
        one.numbers.add(number)
        one.shown_ms = self._clock.peak_ms()

    def _failed(self, some: list[Planned], error: OnwardError) -> None:
        if isinstance(error, InvalidRequest):
            self._world.violations.append(f"S6: {some[0].id} was refused: {error}")
        is_refused = is_definite(error) or isinstance(error, AlreadyExists)
        for one in some:
            one.outcome = "refused" if is_refused else "unknown"
            one.error = f"{type(error).__name__}: {error}"

    # --- changes of mind ---------------------------------------------------------------------

    async def _cancel(self, client: Client, one: Planned) -> None:
        try:
            (result,) = await client.cancel_scheduled(one.number)
        except OnwardError as error:
            one.may_be_gone = one.may_be_gone or _may_have_happened(error)
            return
        self._note(one, result.state, result.id, result.offset)

    async def _move(self, client: Client, one: Planned) -> None:
        due_at_ms = self._due_at_ms()
        one.due_at_ms.append(due_at_ms)
        try:
            result = await client.reschedule(one.number, at=due_at_ms)
        except OnwardError as error:
            one.is_astray = one.is_astray or _may_have_happened(error)
            one.may_be_gone = one.may_be_gone or one.is_astray
            return
        if result.state == "moved":
            self._acked(one, result.id)
        else:
            self._note(one, result.state, result.id, result.offset)

    async def _show(self, client: Client, one: Planned) -> str:
        try:
            shown = await client.scheduled(one.number)
        except OnwardError:
            return ""
        self._note(one, shown.state, one.number, shown.offset)
        return shown.state

    def _note(self, one: Planned, state: Any, number: int, offset: int | None) -> None:
        if state != "waiting":
            self._world.trace(f"{self.name}: {one.id} ({number}) is {state} {offset}")
            one.verdicts.append(Verdict(state, number, offset))
            if state in ("cancelled", "replaced", "fired"):
                one.may_be_gone = one.may_be_gone and state != "fired"


class Watcher:
    """Follows one topic of what was scheduled."""

    def __init__(
        self, world: World, history: ScheduleHistory, clock: PeakClock, topic: str
    ) -> None:
        self.name = f"watcher-{topic}"
        self._topic = topic
        self._world = world
        self._history = history
        self._clock = clock

    async def run(self, ends: asyncio.Event) -> None:
        """Read until `ends`."""
        client, _ = await self._world.opened(self.name)
        offset = 0
        while not ends.is_set():
            try:
                async with asyncio.timeout(5):
                    messages = client.read(self._topic, start=offset, follow=True).__aiter__()
                    async with aclosing(messages):  # type: ignore[type-var]
                        async for message in messages:
                            offset = message.offset + 1
                            self._history.sights.append(Sight(message, self._clock.peak_ms()))
            except (TimeoutError, OnwardError):
                await asyncio.sleep(0.1)
        await client.close(drain=False)


def _may_have_happened(error: OnwardError) -> bool:
    return isinstance(error, OutcomeUnknown) or not is_definite(error)
