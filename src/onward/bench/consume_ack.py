"""consume-ack: one program takes a whole topic as the only member of a group, and acks all of it.

The topic is filled before: 1 M messages of 200 bytes; a tenth of it for the peers, whose rate does
not depend on how many there are. Onward's client takes batches as they come; the ack of one is
awaited while the next is taken, and the time ends when the last ack is durable. Peers: redis-py,
which takes 1,000 with XREADGROUP and acks the 1,000 before in the same pipeline (`appendfsync
always`; with hiredis beside, not in the ratio), and nats-py, which pulls 1,000 and acks each. An
ack of nats-py is not confirmed, and its server syncs later: it has less to do.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import uvloop

import onward
from onward.bench.clients import GROUP, STREAM, nats_client, nats_group, redis_client
from onward.bench.peers import REDIS_PY, REDIS_PY_HIREDIS, Server, beside
from onward.bench.publish_bulk import BODY
from onward.bench.read import fill
from onward.bench.report import Options, Report, rounded, typical
from onward.bench.rounds import alternate

COUNT = 1_000_000
ROUNDS = 3
PEER_SHARE = 10
TAKEN_MESSAGES = 1_000
PUBLISHED_AT_ONCE = 500


def run(options: Options) -> Report:
    """Measure messages consumed and acked per second."""
    count = options.count or COUNT
    peer_count = max(1, count // PEER_SHARE)
    clients: dict[str, Callable[[Server], float]] = {
        "onward": partial(_onward, count=count),
        REDIS_PY: partial(_redis, count=peer_count, client=REDIS_PY),
        REDIS_PY_HIREDIS: partial(_redis, count=peer_count, client=REDIS_PY_HIREDIS),
        "nats-py": partial(_nats, count=peer_count),
    }
    compared = alternate(
        clients, options, rounds=ROUNDS, say=lambda rate: f"{rate:,.0f} messages/s"
    )
    figures = compared.figures(typical)
    ours = figures.pop("onward")
    not_in_ratio = beside(figures, onward=ours)
    return Report(
        name="consume-ack",
        unit="messages/s",
        onward=ours,
        peers=figures,
        missing=compared.missing,
        durability="disk",
        details={
            name: {"settings": one.settings, "rounds": [rounded(rate) for rate in one.rounds]}
            for name, one in compared.seen.items()
            if one.rounds
        }
        | {
            "beside": not_in_ratio,
            "messages": count,
            "peer_messages": peer_count,
            "servers": compared.versions(),
        },
    )


def _onward(server: Server, *, count: int) -> float:
    fill(server, count)
    return uvloop.run(_consume_onward(server))


async def _consume_onward(server: Server) -> float:
    async with onward.connect(f"127.0.0.1:{server.port}") as mq:
        stored = (await mq.topic("bench")).next_offset
        started_at = time.perf_counter()
        await ack_all(mq, stored)
        elapsed = time.perf_counter() - started_at
        left = (await mq.group(GROUP)).backlog
        assert not left, f"{left} of {stored} messages are not acked"
    return stored / elapsed


async def ack_all(mq: onward.Client, expected: int) -> None:
    """Take and ack so many messages; return when all acks are durable."""
    count = 0
    before: asyncio.Future[None] | None = None
    async with mq.consume(STREAM, group=GROUP) as consumer:
        async for batch in consumer.batches():
            count += len(batch.bodies)
            acked = batch.ack_soon()
            if before is not None:
                await before
            before = acked
            if count >= expected:
                await acked
                break


def _redis(server: Server, *, count: int, client: str) -> float:
    fill(server, count)
    return uvloop.run(_consume_redis(server, client))


async def _consume_redis(server: Server, client: str) -> float:
    async with redis_client(server, client) as redis:
        stored = await redis.xlen(STREAM)
        await redis.xgroup_create(STREAM, GROUP, id="0")
        started_at = time.perf_counter()
        count = await _take_redis(redis)
        elapsed = time.perf_counter() - started_at
        pending = (await redis.xpending(STREAM, GROUP))["pending"]
        assert count == stored and not pending, f"acked {count} of {stored}, {pending} pending"  # noqa: PT018
    return count / elapsed


async def _take_redis(redis: Any) -> int:
    count = 0
    ids: list[bytes] = []
    while True:
        pipeline = redis.pipeline(transaction=False)
        if ids:
            pipeline.xack(STREAM, GROUP, *ids)
        pipeline.xreadgroup(GROUP, "one", {STREAM: ">"}, count=TAKEN_MESSAGES)
        found = (await pipeline.execute())[-1]
        if not found:
            return count
        entries = found[0][1]
        ids = [one[0] for one in entries]
        count += len(entries)


def _nats(server: Server, *, count: int) -> float:
    return uvloop.run(_consume_nats(server, count))


async def _consume_nats(server: Server, expected: int) -> float:
    async with nats_client(server) as stream:
        for start in range(0, expected, PUBLISHED_AT_ONCE):
            some = min(PUBLISHED_AT_ONCE, expected - start)
            await asyncio.gather(*[stream.publish(STREAM, BODY, timeout=30) for _ in range(some)])
        group = await nats_group(stream, pending_max=20 * TAKEN_MESSAGES)
        started_at = time.perf_counter()
        count = 0
        while count < expected:
            messages = await group.fetch(TAKEN_MESSAGES, timeout=30)
            for message in messages:
                await message.ack()
            count += len(messages)
        elapsed = time.perf_counter() - started_at
    return count / elapsed
