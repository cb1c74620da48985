"""ordered: 100,000 keys, 64 members, each key in its order, beside a shared group.

The bodies carry numbers that grow. When a member gets a message, an inversion is one whose number
is lower than one that its key had before, and an overlap is one that comes before the ack of the
key's last one was asked for. An ordered group must have none of either. The shared group of the
same size takes the same messages without looking at keys; it stands as the peer, so the ratio is
what order leaves of the speed.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import Literal

import uvloop

import onward
from onward.bench.peers import started
from onward.bench.report import Options, Report, rounded, typical

COUNT = 500_000
KEYS = 100_000
MEMBERS = 64
CREDIT = 256
CONNECTIONS = 4
ROUNDS = 3
PUBLISHED_AT_ONCE = 1_000
SEED = 1
BODY = bytes(192)
NUMBER: Struct = Struct("<Q")

Mode = Literal["ordered", "shared"]


@dataclass
class Order:
    """What was handled so far, key by key."""

    expected: int
    count: int = 0
    inversions: int = 0
    overlaps: int = 0
    last: dict[str, int] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, keys: Sequence[str | None], bodies: Sequence[bytes]) -> None:
        """Take note of messages that a member has got."""
        last, held = self.last, self.held
        for key, body in zip(keys, bodies, strict=True):
            assert key is not None
            number = NUMBER.unpack_from(body)[0]
            self.inversions += number < last.get(key, 0)
            self.overlaps += key in held
            last[key] = number
            held.add(key)

    def acking(self, keys: Sequence[str | None]) -> None:
        """Take note that their acks are sent now."""
        self.held.difference_update(keys)

    def acked(self, count: int) -> None:
        """Take note that so many acks are durable."""
        self.count += count
        if self.count >= self.expected:
            self.done.set()


@dataclass(frozen=True)
class Outcome:
    """What one group reached."""

    per_second: float
    inversions: int
    overlaps: int


def run(options: Options) -> Report:
    """Measure messages per second in order."""
    count = options.count or COUNT
    seen: dict[Mode, list[Outcome]] = {"ordered": [], "shared": []}
    with started("onward", folder=options.folder, keep=options.keep) as server:
        address = f"127.0.0.1:{server.port}"
        options.say(f"publishing {count:,} messages")
        uvloop.run(_publish(address, count))
        for number in range(options.repeat or ROUNDS):
            for mode, outcomes in seen.items():
                group = f"{mode}-{number}"
                outcomes.append(uvloop.run(_consume(address, group, mode, count)))
                options.say(f"{mode}: {outcomes[-1]}")
    return Report(
        name="ordered",
        unit="messages/s",
        onward=typical([one.per_second for one in seen["ordered"]]),
        peers={"shared group": typical([one.per_second for one in seen["shared"]])},
        durability="disk",
        details={
            "inversions": sum(one.inversions for one in seen["ordered"]),
            "overlaps": sum(one.overlaps for one in seen["ordered"]),
            "shared_inversions": sum(one.inversions for one in seen["shared"]),
            "rounds": {
                mode: [rounded(one.per_second) for one in outcomes]
                for mode, outcomes in seen.items()
            },
            "messages": count,
            "keys": KEYS,
            "members": MEMBERS,
        },
    )


async def _publish(address: str, count: int) -> None:
    chosen = random.Random(SEED)  # the same keys in every run
    async with onward.connect(address) as mq:
        for start in range(0, count, PUBLISHED_AT_ONCE):
            numbers = range(start + 1, min(start + PUBLISHED_AT_ONCE, count) + 1)
            keys = [f"key-{chosen.randrange(KEYS)}" for _ in numbers]
            bodies = [NUMBER.pack(number) + BODY for number in numbers]
            await mq.publish_many("bench", bodies, keys=keys)


async def _consume(address: str, group: str, mode: Mode, expected: int) -> Outcome:
    order = Order(expected)
    clients = [onward.connect(address) for _ in range(CONNECTIONS)]
    for client in clients:
        await client.open()
    try:
        started_at = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            members = [
                tasks.create_task(_member(clients[number % CONNECTIONS], group, mode, order))
                for number in range(MEMBERS)
            ]
            await order.done.wait()
            elapsed = time.perf_counter() - started_at
            for member in members:
                member.cancel()
    finally:
        for client in clients:
            await client.close()
    return Outcome(expected / elapsed, order.inversions, order.overlaps)


async def _member(mq: onward.Client, group: str, mode: Mode, order: Order) -> None:
    async with mq.consume("bench", group=group, mode=mode, credit=CREDIT) as consumer:
        async for batch in consumer.batches():
            keys = batch.keys
            order.take(keys, batch.bodies)
            await asyncio.sleep(0)  # the others get what they may get meanwhile
            order.acking(keys)
            await batch.ack()
            order.acked(batch.count)
