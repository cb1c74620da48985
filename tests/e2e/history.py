"""What clients did, and what must be true of it afterwards.

A body names its publisher and its number: `publisher:number`. The checker knows only what clients
saw: which publishes were acknowledged, which are unknown, and what a final read returns.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import onward
from onward.errors import DiskFull, NotConnected, OnwardError, OutcomeUnknown

from .running import until


@dataclass
class History:
    """All that publishers know."""

    topic: str = "orders"
    attempted: set[str] = field(default_factory=set)
    acked: dict[str, int] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    errors: Counter[str] = field(default_factory=Counter)
    is_over: bool = False

    def ack(self, body: str, offset: int) -> None:
        assert body not in self.acked, f"{body} was acknowledged twice"
        self.acked[body] = offset

    def failed(self, bodies: Iterable[str], error: OnwardError) -> None:
        self.errors[error.code] += 1
        (self.unknown if isinstance(error, OutcomeUnknown) else self.refused).update(bodies)

    async def publish_singles(
        self,
        mq: onward.Client,
        publisher: str,
        *,
        in_flight: int = 8,
        durability: str | None = None,
    ) -> None:
        """Publish one message at a time, a few in flight, until it is over."""
        number = 0
        while not self.is_over:
            bodies = [f"{publisher}:{number + n}" for n in range(in_flight)]
            self.attempted.update(bodies)
            futures = [mq.publish_soon(self.topic, one, durability=durability) for one in bodies]
            results = await asyncio.gather(*futures, return_exceptions=True)
            for body, result in zip(bodies, results, strict=True):
                if isinstance(result, onward.Receipt):
                    self.ack(body, result.offset)
                elif isinstance(result, OnwardError):
                    self.failed([body], result)
                    await _pause(result)
                else:
                    raise result
            number += in_flight

    async def publish_batches(
        self, mq: onward.Client, publisher: str, *, size: int = 50, filler: str = "",
        durability: str | None = None,
    ) -> None:  # fmt: skip
        """Publish batches until it is over."""
        number = 0
        while not self.is_over:
            bodies = [f"{publisher}:{number + n}" for n in range(size)]
            self.attempted.update(bodies)
            texts = [f"{body}{filler and ' '}{filler}" for body in bodies]
            try:
                receipt = await mq.publish_many(self.topic, texts, durability=durability)
                for n, body in enumerate(bodies):
                    self.ack(body, receipt.first_offset + n)
            except OnwardError as error:
                self.failed(bodies, error)
                await _pause(error)
            number += size

    def check(self, stored: dict[int, str]) -> None:
        """Raise unless `stored` (offset -> body) keeps all promises."""
        offsets = sorted(stored)
        assert offsets == list(range(len(offsets))), "offsets are not dense"
        times = Counter(stored.values())
        twice = [body for body, count in times.items() if count > 1]
        assert not twice, f"{len(twice)} stored twice: {twice[:5]}"
        lost = [body for body in self.acked if body not in times]
        assert not lost, f"{len(lost)} of {len(self.acked)} acknowledged are lost: {lost[:5]}"
        moved = [body for body, offset in self.acked.items() if stored[offset] != body]
        assert not moved, f"{len(moved)} are not where their receipt says: {moved[:5]}"
        invented = times.keys() - self.attempted
        assert not invented, f"{len(invented)} were never published: {sorted(invented)[:5]}"
        false = times.keys() & (self.refused - self.unknown)
        assert not false, f"{len(false)} were said not to be stored, but are: {sorted(false)[:5]}"
        self._check_order([stored[offset] for offset in offsets])

    def _check_order(self, bodies: list[str]) -> None:
        by_publisher: dict[str, list[int]] = {}
        for body in bodies:
            publisher, number = body.split(":")
            by_publisher.setdefault(publisher, []).append(int(number))
        for publisher, numbers in by_publisher.items():
            wrong = [(a, b) for a, b in pairwise(numbers) if b <= a]
            assert not wrong, f"publisher {publisher} is out of order: {wrong[:5]}"


class Follower:
    """A reader that follows, and remembers what it saw."""

    def __init__(self, mq: onward.Client, topic: str = "orders") -> None:
        self._mq = mq
        self._topic = topic
        self.seen: list[tuple[int, str]] = []

    async def run(self) -> None:
        async for message in self._mq.read(self._topic, follow=True):
            self.seen.append((message.offset, message.text.split(" ")[0]))

    async def caught_up(self, next_offset: int, *, within_s: float = 15.0) -> None:
        await until(
            lambda: bool(self.seen) and self.seen[-1][0] >= next_offset - 1, within_s=within_s
        )

    def check(self, stored: dict[int, str]) -> None:
        """Raise unless each message was seen once, in order, as it is stored."""
        assert self.seen == sorted(stored.items())


async def read_all(mq: onward.Client, topic: str = "orders") -> dict[int, str]:
    """Return everything a topic holds: offset -> body (up to its first space)."""
    stored: dict[int, str] = {}
    async for message in mq.read(topic):
        assert message.offset not in stored, f"offset {message.offset} was read twice"
        stored[message.offset] = message.text.split(" ")[0]
    return stored


async def _pause(error: OnwardError) -> None:
    # Who is told to come later comes later; the others go on at once.
    if isinstance(error, DiskFull | NotConnected):
        await asyncio.sleep(0.05)
