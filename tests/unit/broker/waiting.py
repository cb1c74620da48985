"""A schedule in a broker whose time a test decides: schedule, let time pass, see what has fired.

Nothing here waits for a duration: time passes when a test says so, and then whatever is due fires.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from onward.broker import schedule_files
from onward.broker.broker import Broker
from onward.errors import OnwardError
from onward.message.batch import batches_of, decode_batch
from onward.message.entry import entry_heads
from onward.protocol.frames import Kind
from onward.protocol.payloads import decode_error, decode_published
from onward.testing.clock import ManualClock

from .asking import DEADLINE_S, Operator, until
from .speaking import Speaker, turns

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


class Fired(tuple[int, int, int, int, bytes]):
    """What a topic holds of a scheduled message: its id, due time, time, offset and body."""

    __slots__ = ()

    number = property(lambda self: self[0])
    due_at_ms = property(lambda self: self[1])
    time_ms = property(lambda self: self[2])
    offset = property(lambda self: self[3])
    body = property(lambda self: self[4])


class Schedule:
    """A client of a broker's schedule, and the hand on its clock."""

    def __init__(self, broker: Broker, clock: ManualClock, speaker: Speaker) -> None:
        self.broker = broker
        self.clock = clock
        self.speaker = speaker
        self._operator = Operator(speaker)

    @classmethod
    async def of(cls, broker: Broker) -> Schedule:
        assert isinstance(broker.clock, ManualClock)
        return cls(broker, broker.clock, await Speaker.to(broker))

    # --- asking ------------------------------------------------------------------------------

    def say(
        self, delays_ms: Sequence[int], topic: str | Sequence[str] = "orders", *,
        bodies: Sequence[bytes] | None = None, **columns: Any,
    ) -> int:  # fmt: skip
        """Publish messages that are due so long after now; return the id of the request."""
        now_ms = self.clock.now_ms()
        topics = [topic] * len(delays_ms) if isinstance(topic, str) else list(topic)
        return self.speaker.say_publish(
            "@schedule", bodies or [b"%d" % delay_ms for delay_ms in delays_ms],
            due_at_ms=[now_ms + delay_ms for delay_ms in delays_ms], topics=topics, **columns,
        )  # fmt: skip

    async def receipt(self, request_id: int) -> int:
        """Return the first schedule id that a publish got, or raise what came instead."""
        await until(lambda: self.speaker.of(request_id))
        ((kind, payload),) = self.speaker.of(request_id)
        if kind == Kind.ERROR:
            raise decode_error(payload)
        return decode_published(payload).base_offset

    async def add(
        self, *delays_ms: int, topic: str | Sequence[str] = "orders", **others: Any
    ) -> int:
        """Schedule messages; return the first schedule id."""
        return await self.receipt(self.say(delays_ms, topic, **others))

    async def refused(self, *delays_ms: int, **others: Any) -> str:
        """Return the code of the error that a publish gets."""
        try:
            await self.add(*delays_ms, **others)
        except OnwardError as error:
            return error.code
        return ""

    async def ask(self, op: str, **fields: Any) -> Any:
        return await self._operator.ask(op, **fields)

    async def cancel(self, *ids: int) -> list[str]:
        """Cancel; return what became of each."""
        return [one["state"] for one in (await self.ask("schedule.cancel", ids=ids))["results"]]

    async def move(self, number: int, delay_ms: int) -> dict[str, Any]:
        at_ms = self.clock.now_ms() + delay_ms
        (result,) = (await self.ask("schedule.move", id=number, at_ms=at_ms))["results"]
        assert isinstance(result, dict)
        return result

    async def show(self, number: int) -> dict[str, Any]:
        shown = await self.ask("schedule.show", id=number)
        assert isinstance(shown, dict)
        return shown

    # --- time --------------------------------------------------------------------------------

    async def passes(self, ms: int) -> None:
        """Let time pass, and everything happen that is due then."""
        self.advance(ms)
        await self.settled()

    def advance(self, ms: int) -> None:
        """Move the clock. Nobody fell silent meanwhile: a day has no length here."""
        self.clock.advance(ms)
        # What a session sends is dated by the last tick, which may be as old as the whole test.
        self.broker.now_monotonic_ms = self.clock.monotonic_ms()
        for session in self.broker.sessions:
            session.last_heard_ms = session.last_frame_ms = self.clock.monotonic_ms()

    async def settled(self) -> None:
        """Return when nothing is due that has not fired, and nothing is left to build or merge."""
        scheduling, quiet = self.broker.scheduling, 0
        async with asyncio.timeout(DEADLINE_S):
            while quiet < 3:
                # What one round has done may be what the next one needs.
                scheduling.wake()
                await turns(40)
                quiet = 0 if scheduling.is_busy else quiet + 1
                if not quiet:
                    await asyncio.sleep(0.001)

    # --- looking -----------------------------------------------------------------------------

    def fired(self, topic: str = "orders") -> list[Fired]:
        """Return what a topic holds."""
        return fired_in(self.broker, topic)

    def numbers(self, topic: str = "orders") -> list[int]:
        """Return the schedule ids of what a topic holds, in its order."""
        return [one.number for one in self.fired(topic)]


def fired_in(broker: Broker, topic_name: str) -> list[Fired]:
    """Return what a topic of a broker holds, read from its log."""
    topic = broker.catalogue.by_name.get(topic_name)
    found: list[Fired] = []
    offset = 0 if topic is None else topic.first_offset
    while topic is not None:
        span = broker.log.plan(topic.number, offset, bytes_max=1 << 20)
        if span is None:
            break
        found += _fired(broker.log.read(span, wait=True) or b"")
        offset = span.end_offset
    return found


def _fired(entries: bytes | bytearray | memoryview) -> Iterator[Fired]:
    for entry in entry_heads(entries):
        offset, start = entry.base_offset, entry.body_position
        for at, _ in batches_of(entries, start, start + entry.body_bytes):
            batch = decode_batch(entries, at, raw_bytes_max=1 << 24)
            nothing = [None] * batch.count
            for number, due_at_ms, body in zip(
                batch.schedule_ids or nothing, batch.due_at_ms or nothing, batch.bodies,
                strict=True,
            ):  # fmt: skip
                yield Fired((number or 0, due_at_ms or 0, entry.time_ms, offset, body))
                offset += 1


def small_parts(
    patch: pytest.MonkeyPatch, *, tail: int = 4, merged: int = 2, builds: int = 1
) -> None:
    """Let builds and merges come after few messages."""
    patch.setattr(schedule_files, "TAIL_ROWS_MAX", tail)
    patch.setattr(schedule_files, "MERGED_RUNS", merged)
    patch.setattr(schedule_files, "BUILDS_PER_CHECKPOINT", builds)
    patch.setattr(schedule_files, "FAILED_PAUSE_MS", 0)
