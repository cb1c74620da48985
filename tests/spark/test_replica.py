"""Spark reads from a replica what it reads from the source."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from onward.client.sync import connect_sync

from ..e2e.copies import caught_up  # noqa: TID252
from ..e2e.running import BrokerProcess  # noqa: TID252


@pytest.fixture
def replica(broker: BrokerProcess, tmp_path: Path) -> Iterator[BrokerProcess]:
    made = BrokerProcess(
        tmp_path / "log", log_path=tmp_path / "replica.txt", replica_of=broker.address,
        replica_name="for-spark",
    )  # fmt: skip
    try:
        asyncio.run(made.start())
        yield made
    finally:
        made.end()


def rows_at(spark: SparkSession, broker: BrokerProcess, topic: str) -> list[tuple[int, int, str]]:
    frame = spark.read.format("onward").option("servers", broker.address).option("topic", topic)
    columns = ("offset", "event_id", "body")
    rows = frame.load().select(*columns).orderBy("offset").collect()
    return [(row.offset, row.event_id, bytes(row.body).decode()) for row in rows]


def test_spark_reads_from_a_replica_what_it_reads_from_the_source(
    spark: SparkSession, broker: BrokerProcess, replica: BrokerProcess, topic: str
) -> None:
    with connect_sync(broker.address) as mq:
        mq.publish_many(topic, [str(number) for number in range(1_000)])
    asyncio.run(caught_up(broker, replica))
    rows = rows_at(spark, replica, topic)
    assert [body for _, _, body in rows] == [str(number) for number in range(1_000)]
    assert rows == rows_at(spark, broker, topic)
