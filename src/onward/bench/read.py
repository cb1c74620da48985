"""read: a whole topic through the client library, from the page cache (hot) and the disk (cold).

The figure is the hot read as batches, every body in the hands of the program; details have the
cold read and the read message by message. Peer: redis-py, XRANGE with COUNT 1,000, with a tenth of
the messages (its rate does not depend on how many there are, but its loading takes minutes).
For the cold read the log is dropped from the page cache; the disk's own cache stays.
"""

import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop

import onward
from onward.bench.load import run_load
from onward.bench.peers import (
    REDIS_PY,
    REDIS_PY_HIREDIS,
    PeerMissing,
    Server,
    beside,
    program_version,
    redis_parser,
    started,
)
from onward.bench.publish_bulk import MESSAGES, onward_speakers, redis_speakers
from onward.bench.report import Options, Report, rounded, typical

COUNT = 5_000_000
ROUNDS = 2
PEER_SHARE = 10
RANGE_MESSAGES = 1_000

Rates = dict[str, list[float]]


def run(options: Options) -> Report:
    """Measure messages read per second."""
    count = options.count or COUNT
    with started("onward", folder=options.folder, keep=options.keep) as server:
        options.say(f"publishing {count:,} messages")
        fill(server, count)
        rates = uvloop.run(_read_onward(server, count, options))
    peers, missing = _peer(count // PEER_SHARE, options)
    ours = typical(rates["hot batches"])
    figures = {name: typical(each) for name, each in peers.items()}
    not_in_ratio = beside(figures, onward=ours)
    return Report(
        name="read",
        unit="messages/s",
        onward=ours,
        peers=figures,
        missing=missing,
        durability="disk",
        details={
            "onward": {name: [rounded(one) for one in each] for name, each in rates.items()},
            "peers": {name: [rounded(one) for one in each] for name, each in peers.items()},
            "beside": not_in_ratio,
            "messages": count,
            "peer_messages": count // PEER_SHARE,
            "servers": {"redis-server": program_version("redis-server")} if peers else {},
        },
    )


def fill(server: Server, count: int) -> None:
    """Publish `count` messages in batches of 1,000, and some more that were in flight then."""
    speakers = onward_speakers() if server.name == "onward" else redis_speakers()
    run_load(server.port, speakers, in_flight=4, requests=-(-count // MESSAGES), warm_up_s=0)


async def _read_onward(server: Server, count: int, options: Options) -> Rates:
    rates: Rates = {"cold batches": [], "hot batches": [], "hot messages": []}
    async with onward.connect(f"127.0.0.1:{server.port}") as mq:
        stored = (await mq.topic("bench")).next_offset
        assert stored >= count, f"only {stored} of {count} messages are stored"
        for _ in range(options.repeat or ROUNDS):
            for name, figures in rates.items():
                if name.startswith("cold"):
                    drop_from_cache(server.folder)
                read = _messages if name.endswith("messages") else _batches
                figures.append(await _rate(lambda: read(mq), stored))  # noqa: B023  # awaited here
                options.say(f"{name}: {figures[-1]:,.0f} messages/s")
    return rates


async def _rate(read: Callable[[], Awaitable[int]], expected: int) -> float:
    started_at = time.perf_counter()
    count = await read()
    elapsed = time.perf_counter() - started_at
    assert count == expected, f"read {count} messages of {expected}"
    return count / elapsed


async def _batches(mq: onward.Client) -> int:
    count = 0
    async for batch in mq.read("bench").batches():
        count += len(batch.bodies)
    return count


async def _messages(mq: onward.Client) -> int:
    count = 0
    async for _ in mq.read("bench"):
        count += 1
    return count


def drop_from_cache(folder: Path) -> None:
    """Let the kernel forget the pages of all files in a folder; what is dirty is written first."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def _peer(count: int, options: Options) -> tuple[Rates, dict[str, str]]:
    try:
        # Loading is not what is measured: let it be quick.
        quick = {"appendonly": "no"}
        with started("redis", folder=options.folder, keep=options.keep, options=quick) as server:
            fill(server, count)
            return _read_as_each(server, options)
    except PeerMissing as error:
        options.say(f"missing: {error}")
        return {}, {REDIS_PY: str(error)}


def _read_as_each(server: Server, options: Options) -> tuple[Rates, dict[str, str]]:
    rates: Rates = {}
    missing: dict[str, str] = {}
    for client in (REDIS_PY, REDIS_PY_HIREDIS):
        try:
            rates[client] = uvloop.run(_read_redis(server, client, options))
        except PeerMissing as error:
            missing[client] = str(error)
            options.say(f"missing: {error}")
    return rates, missing


async def _read_redis(server: Server, client: str, options: Options) -> list[float]:
    parser = redis_parser(client)
    from redis.asyncio import ConnectionPool, Redis

    rates: list[float] = []
    pool = ConnectionPool(host="127.0.0.1", port=server.port, parser_class=parser)
    async with Redis(connection_pool=pool) as redis:
        expected = await redis.xlen("bench")
        for _ in range(options.repeat or ROUNDS):
            rates.append(await _rate(lambda: _ranges(redis), expected))
            options.say(f"{client}: {rates[-1]:,.0f} messages/s")
    await pool.aclose()
    return rates


async def _ranges(redis: "object") -> int:
    count, after = 0, "-"
    while found := await redis.xrange("bench", min=after, count=RANGE_MESSAGES):  # type: ignore[attr-defined]
        count += len(found)
        after = f"({found[-1][0].decode()}"
    return count
