"""A sink for Spark as one writes it by hand: what `spark-write` compares with.

It is what Spark's guide shows with a client library in it: rows come one by one and are published,
each by itself or in lists. Nothing is staged: a task that is tried again publishes twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceWriter, WriterCommitMessage

import onward

if TYPE_CHECKING:
    from pyspark.sql import Row
    from pyspark.sql.types import StructType

UNDER_WAY_MAX = 1_000


class ByHand(DataSource):
    """A sink as one writes it with Spark's guide and a client library."""

    @classmethod
    def name(cls) -> str:
        """Return the name of its format."""
        return "onward-by-hand"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return what tasks write with."""
        return RowWriter(dict(self.options))


class RowWriter(DataSourceWriter):
    """Publishes row by row, or in lists."""

    def __init__(self, options: dict[str, str]) -> None:
        self._servers = options["servers"]
        self._topic = options["topic"]
        self._in_lists = "lists" in options

    def write(self, iterator: Iterator[Row]) -> WriterCommitMessage:
        """Publish the rows of one task."""
        if self._in_lists:
            self._publish_lists(iterator)
        else:
            asyncio.run(self._publish_each(iterator))
        return WriterCommitMessage()

    async def _publish_each(self, rows: Iterator[Row]) -> None:
        under_way: list[asyncio.Future[Any]] = []
        async with onward.connect(self._servers) as mq:
            for row in rows:
                under_way.append(mq.publish_soon(self._topic, row.body, durability="disk"))
                if len(under_way) == UNDER_WAY_MAX:
                    await asyncio.gather(*under_way)
                    under_way.clear()
            await asyncio.gather(*under_way)

    def _publish_lists(self, rows: Iterator[Row]) -> None:
        bodies: list[bytes] = []
        with onward.connect_sync(self._servers) as mq:
            for row in rows:
                bodies.append(row.body)
                if len(bodies) == UNDER_WAY_MAX:
                    mq.publish_many(self._topic, bodies, durability="disk")
                    bodies.clear()
            if bodies:
                mq.publish_many(self._topic, bodies, durability="disk")
