"""The peers' client libraries, connected as their own guides recommend, and no slower than that.

`Pipelined` does for redis-py what Onward's client does by itself: commands that are given while
one pipeline is under way share the next. Each has its own answer. A peer is compared at its best.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from onward.bench.peers import PeerMissing, Server, redis_parser

STREAM = "bench"
GROUP = "bench"
_PIPELINE_MAX = 1_000
_START_S_MAX = 30.0


@asynccontextmanager
async def redis_client(server: Server, client: str) -> AsyncIterator[Any]:
    """Connect redis-py, as `redis-py` or `redis-py+hiredis`."""
    parser = redis_parser(client)
    from redis.asyncio import ConnectionPool, Redis

    pool = ConnectionPool(host="127.0.0.1", port=server.port, parser_class=parser)
    async with Redis(connection_pool=pool) as redis:
        yield redis
    await pool.aclose()


@asynccontextmanager
async def nats_client(server: Server) -> AsyncIterator[Any]:
    """Connect nats-py and create the stream; yields its JetStream context."""
    try:
        import nats
    except ImportError:
        raise PeerMissing("nats-py is not installed (make setup-bench)") from None
    connection = await nats.connect(f"nats://127.0.0.1:{server.port}")
    try:
        stream = connection.jetstream()
        await stream.add_stream(name=STREAM, subjects=[STREAM])
        yield stream
    finally:
        await connection.close()


async def nats_group(stream: Any, *, pending_max: int) -> Any:
    """Return a durable pull subscription that may have so many messages unacked."""
    from nats.js.api import ConsumerConfig

    return await stream.pull_subscribe(
        STREAM, durable=GROUP, config=ConsumerConfig(max_ack_pending=pending_max)
    )


@asynccontextmanager
async def postgresql_pool(server: Server, *, connections: int) -> AsyncIterator[Any]:
    """Connect asyncpg: a pool with all its connections open."""
    try:
        import asyncpg
    except ImportError:
        raise PeerMissing("asyncpg is not installed (make setup-bench)") from None
    pool = await _when_started(asyncpg, server, connections)
    try:
        yield pool
    finally:
        pool.terminate()


async def _when_started(asyncpg: Any, server: Server, connections: int) -> Any:
    # It takes connections, and refuses them, while it still starts.
    async with asyncio.timeout(_START_S_MAX):
        while True:
            try:
                return await asyncpg.create_pool(
                    host="127.0.0.1", port=server.port, user="postgres", database="postgres",
                    min_size=connections, max_size=connections,
                )  # fmt: skip
            except asyncpg.CannotConnectNowError:
                await asyncio.sleep(0.02)


class Pipelined:
    """Commands to Redis that share pipelines on one connection; `run` carries them."""

    def __init__(self, redis: Any) -> None:
        self._redis = redis
        self._waiting: list[tuple[tuple[object, ...], asyncio.Future[Any]]] = []
        self._has_some = asyncio.Event()

    def call(self, *words: object) -> "asyncio.Future[Any]":
        """Send a command with the next pipeline; the future is its answer."""
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append((words, answer))
        self._has_some.set()
        return answer

    async def run(self) -> None:
        """Carry commands until cancelled."""
        while True:
            await self._has_some.wait()
            taken, self._waiting = self._waiting[:_PIPELINE_MAX], self._waiting[_PIPELINE_MAX:]
            if not self._waiting:
                self._has_some.clear()
            pipeline = self._redis.pipeline(transaction=False)
            for words, _ in taken:
                pipeline.execute_command(*words)
            for (_, answer), found in zip(taken, await pipeline.execute(), strict=True):
                if not answer.done():
                    answer.set_result(found)
