"""publish-await: 256 tasks of one program that each await publish() before they go on.

This measures client library and server together, as a program meets them. Peers: redis-py (XADD,
`appendfsync always`, as pip installs it; beside it, not in the ratio, with its C parser hiredis)
and nats-py (JetStream in files). All of them run on uvloop, one after another, in alternating
rounds.
"""

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import uvloop

import onward
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
from onward.bench.report import Options, Report, percentiles_ms, typical

TASKS = 256
SECONDS = 2.0
ROUNDS = 5
WARM_UP_S = 0.5
REDIS_CONNECTIONS = 64
BODY = bytes(range(200))

Publish = Callable[[], Awaitable[object]]
Connected = Callable[[Server], AbstractAsyncContextManager[Publish]]


@dataclass(kw_only=True)
class Awaited:
    """What one client reached, round by round."""

    settings: str = ""
    per_second: list[float] = field(default_factory=list)
    latency_ms: dict[str, float] = field(default_factory=dict)


def run(options: Options) -> Report:
    """Measure awaited publishes per second."""
    clients: dict[str, Connected] = {
        "onward": _onward,
        REDIS_PY: partial(_redis, client=REDIS_PY),
        REDIS_PY_HIREDIS: partial(_redis, client=REDIS_PY_HIREDIS),
        "nats-py": _nats,
    }
    seen = {name: Awaited() for name in clients}
    missing: dict[str, str] = {}
    for _ in range(options.repeat or ROUNDS):
        for name, connected in clients.items():
            if name in missing:
                continue
            try:
                _round(name, connected, seen[name], options)
            except PeerMissing as error:
                missing[name] = str(error)
                options.say(f"missing: {error}")
    figures = {name: typical(one.per_second) for name, one in seen.items() if one.per_second}
    ours = figures.pop("onward")
    not_in_ratio = beside(figures, onward=ours)
    return Report(
        name="publish-await",
        unit="messages/s",
        onward=ours,
        peers=figures,
        missing=missing,
        durability="disk",
        details={name: _details(one) for name, one in seen.items() if one.per_second}
        | {"beside": not_in_ratio, "tasks": TASKS, "servers": _versions(figures)},
    )


def _round(name: str, connected: Connected, seen: Awaited, options: Options) -> None:
    server_name = name.partition("-")[0]
    with started(server_name, folder=options.folder, keep=options.keep) as server:
        latencies, seconds = uvloop.run(
            _load(connected(server), seconds=options.seconds or SECONDS)
        )
    seen.settings = server.settings
    seen.per_second.append(len(latencies) / seconds)
    seen.latency_ms = percentiles_ms(latencies)
    options.say(f"{name}: {seen.per_second[-1]:,.0f} messages/s")


async def _load(
    client: AbstractAsyncContextManager[Publish], *, seconds: float
) -> tuple[Sequence[int], float]:
    async with client as publish:
        await publish_all(publish, seconds=WARM_UP_S)
        started_at = time.perf_counter()
        latencies = await publish_all(publish, seconds=seconds)
        return latencies, time.perf_counter() - started_at


async def publish_all(publish: Publish, *, seconds: float, tasks: int = TASKS) -> Sequence[int]:
    """Let many tasks await one publish after another; return the latencies."""
    latencies = array("Q")
    stop_at_ns = time.perf_counter_ns() + int(seconds * 1e9)

    async def publish_on() -> None:
        clock, took = time.perf_counter_ns, latencies.append
        now_ns = clock()
        while now_ns < stop_at_ns:
            sent_at_ns = now_ns
            await publish()
            now_ns = clock()
            took(now_ns - sent_at_ns)

    async with asyncio.TaskGroup() as group:
        for _ in range(tasks):
            group.create_task(publish_on())
    return latencies


@asynccontextmanager
async def _onward(server: Server) -> AsyncIterator[Publish]:
    async with onward.connect(f"127.0.0.1:{server.port}") as mq:
        yield lambda: mq.publish("bench", BODY, durability="disk")


@asynccontextmanager
async def _redis(server: Server, *, client: str) -> AsyncIterator[Publish]:
    parser = redis_parser(client)
    from redis.asyncio import BlockingConnectionPool, Redis

    pool = BlockingConnectionPool(
        host="127.0.0.1", port=server.port, max_connections=REDIS_CONNECTIONS, timeout=30,
        parser_class=parser,
    )  # fmt: skip
    async with Redis(connection_pool=pool) as redis:
        yield lambda: redis.xadd("bench", {"b": BODY})
    await pool.aclose()


@asynccontextmanager
async def _nats(server: Server) -> AsyncIterator[Publish]:
    try:
        import nats
    except ImportError:
        raise PeerMissing("nats-py is not installed (make setup-bench)") from None
    connection = await nats.connect(f"nats://127.0.0.1:{server.port}")
    stream = connection.jetstream()
    await stream.add_stream(name="bench", subjects=["bench"])
    yield lambda: stream.publish("bench", BODY, timeout=30)
    await connection.close()


def _details(seen: Awaited) -> dict[str, object]:
    return {
        "settings": seen.settings,
        "rounds": [round(figure) for figure in seen.per_second],
        "latency_ms": seen.latency_ms,
    }


def _versions(figures: dict[str, float]) -> dict[str, str]:
    servers = [f"{name.removesuffix('-py')}-server" for name in figures]
    return {server: program_version(server) for server in servers}
