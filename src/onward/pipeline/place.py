"""Where the broker is, for programs that run on many machines.

A `Place` is three words that fit into an option of Spark, a pickle and an environment: the
addresses, the token, the patience. Whoever gets one opens a client of its own; connections are
never shipped.

`read_range` is how tasks read: in their own thread, with a loop of their own, so that no message
changes threads on its way from the socket to Arrow.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import NamedTuple

from onward.client.client import connect
from onward.client.reader import ReadBatch
from onward.client.sync import SyncClient, connect_sync
from onward.durations import duration_ms
from onward.loops import loop_factory

STRETCH_ROWS = 32_768
STRETCH_BYTES = 8 << 20


class Place(NamedTuple):
    """The addresses of a broker, and how to speak to it.

    >>> Place("localhost:7700").timeout
    '30s'
    """

    servers: str
    token: str | None = None
    timeout: str = "30s"


def place_of(options: Mapping[str, str] | None = None) -> Place:
    """Return the place that options name, or else the environment, or else this machine.

    >>> place_of({"servers": "a:7700,b:7700"}).servers
    'a:7700,b:7700'
    """
    given = options or {}
    timeout = given.get("timeout") or "30s"
    duration_ms(timeout, "timeout")  # here, where the option is: not when a client is made of it
    return Place(
        servers=given.get("servers") or os.environ.get("ONWARD_ADDRESS") or "localhost:7700",
        token=given.get("token") or os.environ.get("ONWARD_TOKEN"),
        timeout=timeout,
    )


def open_client(place: Place, *, name: str = "spark") -> SyncClient:
    """Return a blocking client of that broker, to use with `with`.

    >>> with open_client(Place("memory:")) as mq:
    ...     mq.publish("orders", "hello").offset
    0
    """
    return connect_sync(
        place.servers, token=place.token, name=f"{name}-{os.getpid()}", timeout=place.timeout
    )


def read_range(place: Place, topic: str, first: int, end: int) -> Iterator[list[ReadBatch]]:
    """Give the batches that hold the messages from `first` to before `end`, many at a time.

    The first and the last batch may reach over the range: whoever asks for a part of a batch gets
    all of it. Nothing is left out: what cannot be read raises.
    """
    if first >= end:
        return
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        stretches = _stretches(place, topic, first, end)
        try:
            while (stretch := runner.run(_next(stretches))) is not None:
                yield stretch
        finally:
            runner.run(stretches.aclose())


async def _next(stretches: AsyncGenerator[list[ReadBatch]]) -> list[ReadBatch] | None:
    return await anext(stretches, None)


async def _stretches(
    place: Place, topic: str, first: int, end: int
) -> AsyncGenerator[list[ReadBatch]]:
    client = connect(
        place.servers, token=place.token, name=f"spark-{os.getpid()}", timeout=place.timeout
    )
    async with client as mq:
        batches = mq.read(topic, start=first, end=end).batches()
        try:
            stretch: list[ReadBatch] = []
            rows = size = 0
            async for batch in batches:
                stretch.append(batch)
                rows += batch.count
                size += batch.columns.header.raw_bytes
                if rows >= STRETCH_ROWS or size >= STRETCH_BYTES:
                    yield stretch
                    stretch, rows, size = [], 0, 0
            if stretch:
                yield stretch
        finally:
            await batches.aclose()
