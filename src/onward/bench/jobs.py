"""jobs: 64 handlers that work for 1 ms each, one ack per message, while others publish.

One program publishes (64 tasks that each await a durable publish, 500 to 1,000 jobs ahead) and
handles what comes; the figure is the jobs handled per second. Each system at its best: 64 handlers
work at a time, and an answer is awaited after that, outside of the 64.

    onward      an App with concurrency=64: return = ack, durable; the App publishes as well
    redis-py    XADD, XREADGROUP COUNT 64 and one XACK per job; acks and publishes share pipelines;
                with its own parser and with hiredis, the better counts
    postgresql  a table with SKIP LOCKED, through asyncpg. Two ways to write it, the better counts:
                one transaction around the work (DELETE ... RETURNING, work, COMMIT; 64
                connections), or rows claimed by 64 and deleted one by one (16 connections)
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, Protocol

import uvloop

import onward
from onward.bench.clients import GROUP, STREAM, Pipelined, postgresql_pool, redis_client
from onward.bench.peers import REDIS_PY, REDIS_PY_HIREDIS, Server
from onward.bench.report import Options, Report, rounded, typical
from onward.bench.rounds import alternate

HANDLERS = 64
PUBLISHERS = 64
AHEAD_MAX = 1_000
WORK_S = 0.001
SECONDS = 5.0
WARM_UP_S = 1.0
ROUNDS = 5
BODY = bytes(range(200))
POSTGRESQL_CONNECTIONS = 16
IDLE_S = 0.001


class System(Protocol):
    """One system under the same load."""

    async def publish(self) -> object:
        """Publish one job and wait until it is durable."""

    async def consume(self, load: "Load") -> None:
        """Handle jobs until it is over: at most 64 at a time do their work; ack each."""


class Load:
    """What is published and handled. It ends by being over: a cancelled client may hang."""

    def __init__(self) -> None:
        self.handled = 0
        self.over = asyncio.Event()
        self._ahead = 0
        self._has_room = asyncio.Event()
        self._has_room.set()

    async def work(self) -> None:
        """Do one job."""
        await asyncio.sleep(WORK_S)
        self.handled += 1
        self._ahead -= 1
        if self._ahead == AHEAD_MAX // 2:
            self._has_room.set()

    async def publish_on(self, publish: Callable[[], Awaitable[object]]) -> None:
        """Publish one job after another, not too far ahead."""
        while not self.over.is_set():
            if self._ahead >= AHEAD_MAX:
                # Until half of it is done: a wait for each job would cost more than the job.
                self._has_room.clear()
                await self._has_room.wait()
            else:
                self._ahead += 1
                await publish()

    def end(self) -> None:
        """Let everybody come to an end."""
        self.over.set()
        self._has_room.set()


Opened = Callable[[Server], AbstractAsyncContextManager[System]]


def run(options: Options) -> Report:
    """Measure jobs per second."""
    systems: dict[str, Opened] = {
        "onward": _onward,
        REDIS_PY: partial(_redis, client=REDIS_PY),
        REDIS_PY_HIREDIS: partial(_redis, client=REDIS_PY_HIREDIS),
        "postgresql": partial(_postgresql, is_claimed=False),
        "postgresql+claims": partial(_postgresql, is_claimed=True),
    }
    seconds = options.seconds or SECONDS
    clients = {name: partial(_measure, opened, seconds) for name, opened in systems.items()}
    compared = alternate(clients, options, rounds=ROUNDS, say=lambda rate: f"{rate:,.0f} jobs/s")
    figures = compared.figures(typical)
    ours = figures.pop("onward")
    return Report(
        name="jobs",
        unit="jobs/s",
        onward=ours,
        peers=figures,
        missing=compared.missing,
        durability="disk",
        details={
            name: {"settings": one.settings, "rounds": [rounded(rate) for rate in one.rounds]}
            for name, one in compared.seen.items()
            if one.rounds
        }
        | {"handlers": HANDLERS, "servers": compared.versions()},
    )


def _measure(opened: Opened, seconds: float, server: Server) -> float:
    return uvloop.run(_jobs_per_second(opened, server, seconds))


async def _jobs_per_second(opened: Opened, server: Server, seconds: float) -> float:
    load = Load()
    async with opened(server) as system, asyncio.TaskGroup() as group:
        group.create_task(system.consume(load))
        for _ in range(PUBLISHERS):
            group.create_task(load.publish_on(system.publish))
        await asyncio.sleep(WARM_UP_S)
        before, started_at = load.handled, time.perf_counter()
        await asyncio.sleep(seconds)
        rate = (load.handled - before) / (time.perf_counter() - started_at)
        load.end()
    return rate


async def each_in_a_slot(
    jobs: AsyncIterator[Any],
    work: Callable[[], Awaitable[None]],
    ack: Callable[[Any], Awaitable[object]],
) -> None:
    """Work on 64 jobs at a time; the answer to each is awaited outside of the 64.

    The next jobs are fetched meanwhile, as Onward's client does by itself.
    """
    slots = asyncio.Semaphore(HANDLERS)
    fetched: asyncio.Queue[Any] = asyncio.Queue(2 * HANDLERS)

    async def fetch() -> None:
        async for job in jobs:
            await fetched.put(job)
        await fetched.put(None)

    async def handle(job: Any) -> None:
        try:
            await work()
        finally:
            slots.release()
        await ack(job)

    async with asyncio.TaskGroup() as group:
        group.create_task(fetch())
        await slots.acquire()
        while (job := await fetched.get()) is not None:
            group.create_task(handle(job))
            await slots.acquire()


# --- onward ------------------------------------------------------------------------------------


class _OnwardSystem:
    def __init__(self, address: str) -> None:
        self._app = onward.App(address)
        self._has_begun = asyncio.Event()
        self._app.on_start(self._has_begun.set)

    async def publish(self) -> object:
        if not self._has_begun.is_set():
            await self._has_begun.wait()
        return await self._app.mq.publish(STREAM, BODY, durability="disk")

    async def consume(self, load: Load) -> None:
        work = load.work

        @self._app.consumer(STREAM, group=GROUP, concurrency=HANDLERS)
        async def handle(body: bytes) -> None:
            await work()

        async with asyncio.TaskGroup() as group:
            group.create_task(self._app.run(signals=False))
            await load.over.wait()
            self._app.stop()


@asynccontextmanager
async def _onward(server: Server) -> AsyncIterator[System]:
    yield _OnwardSystem(f"127.0.0.1:{server.port}")


# --- redis -------------------------------------------------------------------------------------


class _RedisSystem:
    def __init__(self, redis: Any, *, publishing: Pipelined, acking: Pipelined) -> None:
        self._redis = redis
        self._publishing = publishing
        self._acking = acking

    async def publish(self) -> object:
        return await self._publishing.call("XADD", STREAM, "*", "b", BODY)

    async def consume(self, load: Load) -> None:
        await self._redis.xgroup_create(STREAM, GROUP, id="0", mkstream=True)
        await each_in_a_slot(self._jobs(load), load.work, self._ack)

    async def _jobs(self, load: Load) -> AsyncIterator[bytes]:
        while not load.over.is_set():
            found = await self._redis.xreadgroup(
                GROUP, "one", {STREAM: ">"}, count=HANDLERS, block=1_000
            )
            for entry_id, _ in found[0][1] if found else ():
                yield entry_id

    async def _ack(self, entry_id: bytes) -> object:
        return await self._acking.call("XACK", STREAM, GROUP, entry_id)


@asynccontextmanager
async def _redis(server: Server, *, client: str) -> AsyncIterator[System]:
    async with redis_client(server, client) as redis, asyncio.TaskGroup() as group:
        publishing, acking = Pipelined(redis), Pipelined(redis)
        carrying = [group.create_task(line.run()) for line in (publishing, acking)]
        yield _RedisSystem(redis, publishing=publishing, acking=acking)
        for task in carrying:
            task.cancel()


# --- postgresql --------------------------------------------------------------------------------

TABLE = "CREATE TABLE jobs (id bigserial PRIMARY KEY, body bytea NOT NULL, claimed_at timestamptz)"
# Claimed rows are out of the index that is searched, so that it stays short.
INDEX = "CREATE INDEX free ON jobs (id) WHERE claimed_at IS NULL"
INSERT = "INSERT INTO jobs (body) VALUES ($1)"
TAKE = """
DELETE FROM jobs WHERE id = (SELECT id FROM jobs ORDER BY id FOR UPDATE SKIP LOCKED LIMIT 1)
RETURNING body"""
CLAIM = """
UPDATE jobs SET claimed_at = now() WHERE id IN (
    SELECT id FROM jobs WHERE claimed_at IS NULL ORDER BY id FOR UPDATE SKIP LOCKED LIMIT $1)
RETURNING id, body"""
DELETE = "DELETE FROM jobs WHERE id = $1"


class _Transactions:
    """The work is done inside the transaction that removes its row."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    async def publish(self) -> object:
        return await self._pool.execute(INSERT, BODY)

    async def consume(self, load: Load) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(HANDLERS):
                group.create_task(self._handle_on(load))

    async def _handle_on(self, load: Load) -> None:
        async with self._pool.acquire() as connection:
            while not load.over.is_set():
                async with connection.transaction():
                    found = await connection.fetchval(TAKE)
                    if found is not None:
                        await load.work()
                if found is None:
                    await asyncio.sleep(IDLE_S)


class _Claims(_Transactions):
    """Many rows are claimed at once; each is deleted, and that committed, when its job is done."""

    async def consume(self, load: Load) -> None:
        await each_in_a_slot(self._jobs(load), load.work, self._ack)

    async def _jobs(self, load: Load) -> AsyncIterator[int]:
        while not load.over.is_set():
            found = await self._pool.fetch(CLAIM, HANDLERS)
            for row in found:
                yield row["id"]
            if not found:
                await asyncio.sleep(IDLE_S)

    async def _ack(self, job_id: int) -> object:
        return await self._pool.execute(DELETE, job_id)


@asynccontextmanager
async def _postgresql(server: Server, *, is_claimed: bool) -> AsyncIterator[System]:
    connections = POSTGRESQL_CONNECTIONS + (0 if is_claimed else HANDLERS)
    async with postgresql_pool(server, connections=connections) as pool:
        await pool.execute(TABLE)
        if is_claimed:
            await pool.execute(INDEX)
        yield (_Claims if is_claimed else _Transactions)(pool)
