"""memory: how much the broker really holds, in MB (VmRSS), and whether it stays so.

    idle            a broker that just started
    paced           5,000 single-message publishes/s and one reader that follows, for a minute
    many            during 1 M single-message publishes from 256 connections, as fast as it
                    goes, and after them

The figure is the highest value seen. It must be flat: `slope_mb_per_minute` is the trend over the
second half of the paced minute, when everything that is filled once is filled.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import linear_regression

import uvloop

import onward
from onward.bench.load import run_load
from onward.bench.peers import Server, started
from onward.bench.publish_sync import BODY, onward_speakers
from onward.bench.report import Options, Report, rounded

SECONDS = 60.0
COUNT = 1_000_000
PUBLISHES_PER_SECOND = 5_000
CLIENTS = 50
SAMPLE_S = 0.5


@dataclass(kw_only=True)
class Paced:
    """What the paced minute saw."""

    samples: list[tuple[float, float]] = field(default_factory=list)
    published: int = 0
    read: int = 0


def run(options: Options) -> Report:
    """Measure resident memory."""
    seconds, count = options.seconds or SECONDS, options.count or COUNT
    with started("onward", folder=options.folder, keep=options.keep) as server:
        time.sleep(SAMPLE_S)
        idle = server.resident_mb()
        options.say(f"idle: {idle:.1f} MB")
        paced = Paced()
        uvloop.run(_pace(server, paced, seconds))
        highest = max(megabytes for _, megabytes in paced.samples)
        options.say(f"paced: {highest:.1f} MB, {paced.published / seconds:,.0f} publishes/s")
        with sampled(server.resident_mb) as during:
            run_load(server.port, onward_speakers(), requests=count, warm_up_s=0)
        after = server.resident_mb()
        many = max(*during, after)
        options.say(f"{count:,} more publishes: {many:.1f} MB, after them {after:.1f} MB")
    return Report(
        name="memory",
        unit="MB",
        onward=max(idle, highest, many),
        durability="disk",
        details={
            "idle_mb": rounded(idle),
            "paced_mb": rounded(highest),
            "paced_publishes_per_second": rounded(paced.published / seconds),
            "paced_read_per_second": rounded(paced.read / seconds),
            "slope_mb_per_minute": rounded(slope_per_minute(paced.samples)),
            "many_mb": rounded(many),
            "after_many_mb": rounded(after),
            "many": count,
            "samples_mb": [round(megabytes, 2) for _, megabytes in paced.samples],
        },
    )


def slope_per_minute(samples: Sequence[tuple[float, float]]) -> float:
    """Return the trend of the second half of the samples (seconds, MB), in MB per minute.

    >>> slope_per_minute([(0, 20), (1, 30), (2, 40), (3, 41), (4, 42), (5, 43)])
    60.0
    """
    later = samples[len(samples) // 2 :]
    if len(later) < 2:
        return 0.0
    return linear_regression(*zip(*later, strict=True)).slope * 60


@contextmanager
def sampled(look: Callable[[], float]) -> Iterator[list[float]]:
    """Look at something, now and again, in a thread beside what happens meanwhile.

    >>> with sampled(lambda: 1.0) as samples:
    ...     pass
    >>> samples
    [1.0]
    """
    is_over = threading.Event()
    samples = [look()]

    def look_again() -> None:
        while not is_over.wait(SAMPLE_S):
            samples.append(look())

    thread = threading.Thread(target=look_again, name="samples")
    thread.start()
    try:
        yield samples
    finally:
        is_over.set()
        thread.join()


async def _pace(server: Server, paced: Paced, seconds: float) -> None:
    address = f"127.0.0.1:{server.port}"
    stop_at = time.monotonic() + seconds
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_publish_paced(address, paced, stop_at)) for _ in range(CLIENTS)]
        reader = group.create_task(_follow(address, paced))
        started_at = time.monotonic()
        while (now := time.monotonic()) < stop_at:
            paced.samples.append((now - started_at, server.resident_mb()))
            await asyncio.sleep(SAMPLE_S)
        await asyncio.wait(tasks)
        reader.cancel()


async def _publish_paced(address: str, paced: Paced, stop_at: float) -> None:
    """Publish one message at a time at fixed times; who is late does not wait for the next."""
    pause_s = CLIENTS / PUBLISHES_PER_SECOND
    async with onward.connect(address) as mq:
        due_at = time.monotonic()
        while due_at < stop_at:
            await mq.publish("bench", BODY, durability="disk")
            paced.published += 1
            due_at += pause_s
            await asyncio.sleep(max(0.0, due_at - time.monotonic()))


async def _follow(address: str, paced: Paced) -> None:
    async with onward.connect(address) as mq:
        await mq.create_topic("bench", exist_ok=True)
        async for batch in mq.read("bench", follow=True).batches():
            paced.read += batch.count
