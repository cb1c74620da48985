"""Test an App without a server: every message goes through the real broker, and time is yours.

    async with kit(app) as k:                      with kit(app) as k:       (no plugin, no async)
        outcome = await k.deliver("orders", body)      outcome = k.deliver("orders", body)
        assert outcome.did == "acked"                  assert outcome.did == "acked"

`deliver` publishes and returns when every group of the App that consumes the topic has answered:
acked, retried, dead or filtered, and why. The broker's clock stands still until `advance` moves it;
what comes due on the way (retries, scheduled messages, recurring runs) happens in its order, each
at its time. What is real: broker, protocol, client, middleware, threads. What is not: sockets, the
disk, and time, which begins with the year 2026.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from difflib import get_close_matches
from types import TracebackType
from typing import TypeVar

from onward.broker.broker import Broker
from onward.broker.catalogue import Topic
from onward.broker.choosing import Source
from onward.client.app import App
from onward.client.app_run import AppRun
from onward.client.client import Client
from onward.client.delivery import Delivery
from onward.client.embedded import Embedded
from onward.client.finding import parse_id
from onward.client.groups import DeadLetterDescription
from onward.client.message_parts import Tags
from onward.client.work import Work
from onward.config import check
from onward.delivery.trace import Trace, decode_row
from onward.durations import Duration, duration_ms
from onward.errors import InvalidRequest
from onward.log.memory_disk import MemoryDisk
from onward.protocol.payloads import Durability
from onward.settings import LogSettings, Settings
from onward.testing.clock import ManualClock
from onward.testing.kit_sync import LoopThread, SyncKit

T = TypeVar("T")

TIMEOUT: Duration = "30s"
LOOK_S = 0.001
STEPS_MAX = 100_000
SETTINGS = Settings(
    log=LogSettings(
        folder="memory", segment_bytes_max=16 << 20, preallocate_bytes=0, disk_reserve_bytes=0
    )
)

AGAIN = frozenset(("retried", "expired", "lost"))
ANSWERS = frozenset(("acked", "filtered", "retried", "expired", "lost", "dead", "skipped"))


class NotSettled(AssertionError):
    """A group did not answer in time: the message says which, and for what it waits."""


@dataclass(frozen=True)
class GroupOutcome:
    """How it went in one group."""

    did: str
    """`acked`, `retried`, `dead`, `filtered`, or what the trace says besides."""
    cause: str = ""
    attempt: int = 0
    """Which attempt it was; 0 where the message was not delivered."""
    due_at_ms: int = 0


@dataclass(frozen=True)
class Outcome:
    """How it went with one message, in every group of the App.

    >>> outcome = Outcome("orders/0", {"billing": GroupOutcome("retried", "bank is closed")})
    >>> outcome.did, outcome.cause, outcome["billing"].did
    ('retried', 'bank is closed', 'retried')
    """

    id: str
    groups: Mapping[str, GroupOutcome] = field(default_factory=dict)

    def __getitem__(self, group: str) -> GroupOutcome:
        return self.groups[group]

    @property
    def did(self) -> str:
        """What happened, when it was the same in all groups; else each of them, with commas."""
        return ", ".join(dict.fromkeys(one.did for one in self.groups.values()))

    @property
    def cause(self) -> str:
        """Why, in the first group that says so."""
        return next((one.cause for one in self.groups.values() if one.cause), "")


class Kit:
    """An App that runs on a broker of its own, with a clock that waits. Made by `kit`."""

    def __init__(self, broker: Broker, clock: ManualClock, client: Client) -> None:
        self.mq = client
        """The client of the App: for everything else that a test wants to do."""
        self.clock = clock
        self._broker = broker
        self._run: AppRun | None = None
        self._works: list[Work] = []
        self._outcomes: dict[tuple[str, int], dict[str, GroupOutcome]] = {}
        self._counted: dict[tuple[str, str, int], int] = {}
        """How many attempts of a message have failed, by group, topic and offset."""
        self._trace_offset = 0
        self._news = asyncio.Event()

    async def deliver(
        self,
        topic: str,
        body: object,
        *,
        key: str | None = None,
        headers: Mapping[str, str | bytes] | None = None,
        tag: Tags = None,
        trace_id: str | None = None,
        priority: int | None = None,
        tenant: str | None = None,
        timeout: Duration = TIMEOUT,
    ) -> Outcome:
        """Publish a message and return how it went, when every group has answered once.

        A topic that no function of the App consumes is an error: it is misspelt. To publish for
        others there is `mq.publish`.
        """
        self._check_consumed(topic)
        receipt = await self.mq.publish(
            topic, body, key=key, headers=headers, tag=tag, trace_id=trace_id, priority=priority,
            tenant=tenant,
        )  # fmt: skip
        wanted = {work.group for work in self._works if topic in work.topics}
        place = (topic, receipt.offset)
        try:
            async with asyncio.timeout(duration_ms(timeout, "timeout") / 1000):
                while not wanted <= self._outcomes.get(place, {}).keys():
                    await self._change()
        except TimeoutError:
            missing = sorted(wanted - self._outcomes.get(place, {}).keys())
            raise NotSettled(f"{receipt.id} was not settled by {', '.join(missing)}") from None
        return self._outcome_at(*place)

    async def outcome(self, message_id: str) -> Outcome:
        """Return how it went with a message lately: after `advance`, or when a function sent it."""
        topic, offset = parse_id(message_id)
        await self.idle()
        return self._outcome_at(topic, offset)

    def now(self) -> datetime:
        """Return what time it is here: 2026-01-01T00:00:00Z and what `advance` has added."""
        return datetime.fromtimestamp(self.clock.now_ms() / 1000, tz=UTC)

    async def advance(self, duration: Duration) -> None:
        """Let time pass. Retries and scheduled messages happen on the way, each at its time."""
        target_ms = self.clock.now_ms() + duration_ms(duration)
        await self.idle()
        for _ in range(STEPS_MAX):
            due_ms = self._next_due_ms()
            if due_ms is None or due_ms > target_ms:
                break
            await self._move(max(0, due_ms - self.clock.now_ms()))
            await self.idle()
        await self._move(target_ms - self.clock.now_ms())
        await self.idle()

    async def idle(self, *, timeout: Duration = TIMEOUT) -> None:
        """Wait until there is nothing to do before time moves."""
        try:
            async with asyncio.timeout(duration_ms(timeout, "timeout") / 1000):
                await _until(self._is_idle)
        except TimeoutError:
            raise NotSettled("some functions have not ended in time") from None

    async def dead(
        self, topic: str | None = None, *, group: str | None = None
    ) -> list[DeadLetterDescription]:
        """Return the dead letters of a group, or of all that can have some, with their messages.

        With a topic: of the groups that consume it.
        """
        if topic is not None and group is None:
            self._check_consumed(topic)
        await self.idle()
        names = self._with_dead_letters(topic) if group is None else [group]
        return [
            letter
            for name in names
            async for letter in self.mq.dead_letters(name, topic=topic, messages=True)
        ]

    # --- inside ------------------------------------------------------------------------------

    def _check_consumed(self, topic: str) -> None:
        """Raise `InvalidRequest` when no function of the App consumes the topic."""
        topics = sorted({one for work in self._works for one in work.topics})
        if topic not in topics:
            near = get_close_matches(topic, topics, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it consumes {', '.join(topics)}"
            raise InvalidRequest(f"no function of this app consumes topic {topic!r}; {hint}")

    def _with_dead_letters(self, topic: str | None) -> list[str]:
        """Return the groups of the App, or of a topic, that are no broadcasts.

        Members of broadcasts drop messages.
        """
        groups = self._broker.consuming.groups.by_name.values()
        broadcasts = {one.record.name for one in groups if one.record.mode == "broadcast"}
        works = [work for work in self._works if topic is None or topic in work.topics]
        names = dict.fromkeys(work.group for work in works)
        return [name for name in names if name not in broadcasts]

    def _outcome_at(self, topic: str, offset: int) -> Outcome:
        """Return what is known of a message, in the order in which the App names its groups."""
        found = self._outcomes.get((topic, offset), {})
        names = dict.fromkeys(work.group for work in self._works)
        return Outcome(f"{topic}/{offset}", {name: found[name] for name in names if name in found})

    async def _move(self, ms: int) -> None:
        self.clock.advance(ms)
        # Nobody was silent: no time has passed on the wire.
        await self._broker.housekeeping.tick(late_ms=ms)
        self._broker.scheduling.wake()
        for crew in list(self._broker.consuming.crews.values()):
            self._broker.consuming.serve_soon(crew)

    def _next_due_ms(self) -> int | None:
        """Return when a retry or the schedule is due, or a key's limit lets something through."""
        scheduled_ms = self._broker.scheduling.order.next_ms()
        dues: list[int] = [] if scheduled_ms is None else [scheduled_ms]
        for _, source in self._sources():
            if (due_ms := source.share.next_due_ms()) is not None:
                dues.append(due_ms)
            if (wait_ms := source.wait_ms()) is not None:
                dues.append(self.clock.now_ms() + max(1, wait_ms))
        return min(dues, default=None)

    def _sources(self) -> Iterator[tuple[Topic, Source]]:
        """Give all that messages come from now."""
        for crew in self._broker.consuming.crews.values():
            if not crew.group.record.paused:
                for name, source in crew.sources.items():
                    yield crew.topics[name], source

    def _is_idle(self) -> bool:
        crews = self._broker.consuming.crews.values()
        due_ms = self._next_due_ms()
        trace = self._broker.catalogue.by_name.get("@trace")
        return (
            (self._run is None or self._run.is_idle)
            and not self._broker.scheduling.is_busy
            and (due_ms is None or due_ms > self.clock.now_ms())
            and (trace is None or self._trace_offset >= trace.next_offset)
            and not any(crew.leases.count for crew in crews)
            and not any(_has_more(topic, source) for topic, source in self._sources())
        )

    async def _follow_trace(self) -> None:
        await _until(lambda: "@trace" in self._broker.catalogue.by_name)
        async for batch in self.mq.read("@trace", follow=True).batches():
            for row in map(decode_row, batch.bodies):
                self._note_row(row)
            self._trace_offset = batch.first_offset + batch.count
            self._news.set()

    def _note_row(self, row: Trace) -> None:
        if row.group in self._unsure:
            return
        for start, end in row.ranges:
            for offset in range(start, end):
                self._note_outcome(row, offset)

    def _note_outcome(self, row: Trace, offset: int) -> None:
        """Note one message of a row. An ack's row is without attempts: those before count."""
        outcomes = self._outcomes.setdefault((row.topic, offset), {})
        place = (row.group, row.topic, offset)
        attempt = row.attempt + (not row.counted)
        if row.did == "acked":
            attempt = 1 + self._counted.get(place, 0)
        if row.did in AGAIN:
            self._counted[place] = row.attempt
        else:
            self._counted.pop(place, None)
        if row.did in ANSWERS:
            outcomes[row.group] = GroupOutcome(row.did, row.cause, attempt, row.due_at_ms)

    def _note_settled(self, work: Work, delivery: Delivery, did: str, cause: str) -> None:
        if work.group in self._unsure:
            found = GroupOutcome("dead" if did == "rejected" else did, cause, delivery.attempt)
            place = (delivery.topic, delivery.offset)
            self._outcomes.setdefault(place, {})[work.group] = found
        self._news.set()

    @property
    def _unsure(self) -> set[str]:
        """Groups whose trace does not say how a function went: they finish before, or elsewhere."""
        return {
            work.group
            for work in self._works
            if work.options.get("mode") == "broadcast" or work.options.get("at_most_once")
        }

    async def _change(self) -> None:
        self._news.clear()
        await self._news.wait()

    @asynccontextmanager
    async def running(self, app: App) -> AsyncIterator[Kit]:
        """Run an App on this kit; what fails inside comes out as it is."""
        self._works = app.works
        try:
            async with (
                app.running(self.mq, on_settled=self._note_settled) as self._run,
                asyncio.TaskGroup() as tasks,
            ):
                following = tasks.create_task(self._follow_trace())
                running = tasks.create_task(self._run.run())
                await self._run.joined()
                try:
                    yield self
                finally:
                    self._run.stop()
                    await asyncio.wait([running])
                    following.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None


class kit:  # noqa: N801  # it is used like a function
    """Run an App for a test: with `async with`, or with `with` where there is no loop.

    >>> app = App()
    >>> @app.consumer("orders", group="billing")
    ... async def charge(order: dict[str, int]) -> None:
    ...     if order["amount"] < 0:
    ...         raise ValueError("a negative amount")
    >>> with kit(app) as k:
    ...     k.deliver("orders", {"amount": 7}).did
    ...     k.deliver("orders", {"amount": -7}).cause
    'acked'
    'ValueError: a negative amount'
    """

    def __init__(self, app: App, *, settings: Settings | None = None) -> None:
        if settings is not None:
            check(settings, listens=False)
        self._app = app
        self._settings = settings or SETTINGS
        self._opened: AsyncExitStack | None = None
        self._thread: LoopThread | None = None

    async def __aenter__(self) -> Kit:
        async with AsyncExitStack() as opening:
            clock = ManualClock()
            broker = await Broker.open(self._settings, disk=MemoryDisk(), clock=clock)
            opening.push_async_callback(broker.stop)
            client = Client(
                [], token=None, name="kit", timeout_s=duration_ms(TIMEOUT) / 1000,
                durability=Durability.DEFAULT, dials=[Embedded(broker, None).dial], clock=clock,
            )  # fmt: skip
            await opening.enter_async_context(client)
            running = Kit(broker, clock, client).running(self._app)
            opened = await opening.enter_async_context(running)
            self._opened = opening.pop_all()
            return opened

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._opened is not None
        await self._opened.__aexit__(kind, error, traceback)

    def __enter__(self) -> SyncKit:
        self._thread = LoopThread(self)
        return self._thread.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._thread is not None
        self._thread.close()


def _has_more(topic: Topic, source: Source) -> bool:
    """Tell whether something could be granted now, or is being looked at."""
    is_looking = source.is_looking
    return is_looking or source.available() > 0 or source.share.head < topic.next_offset


async def _until(is_so: Callable[[], bool]) -> None:
    """Wait for something that nobody tells."""
    while not is_so():  # noqa: ASYNC110  # the broker has no event for it, and needs none
        await asyncio.sleep(LOOK_S)
