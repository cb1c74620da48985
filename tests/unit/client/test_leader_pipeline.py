"""Spark at a replica: rows come from it, progress goes to its leader, and waits for nobody."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from onward.errors import NotLeader
from onward.pipeline.options import source_options, spark_options
from onward.pipeline.progress import positions
from onward.pipeline.schema import message_schema
from onward.pipeline.stream import StreamReader

from .serving import Served, source_and_copy, until


def reader_at(node: Served, **options: object) -> StreamReader:
    given = spark_options({"topic": "orders", "timeout": "1s", **options})
    parsed = source_options({"servers": node.address, **given})
    return StreamReader(parsed, message_schema(parsed.columns))


async def run(call: Callable[..., Any], *given: object) -> Any:
    return await asyncio.to_thread(call, *given)


def cursor_at(node: Served) -> int:
    share = node.broker.state.groups.by_name["totals"].shares["orders"]
    return share.cursor


async def test_progress_goes_to_the_leader_that_the_replica_names() -> None:
    async with source_and_copy() as (source, copy):
        async with source.connect() as mq:
            await mq.publish_many("orders", ["a", "b", "c"])
        await copy.caught_up(source)
        reader = reader_at(copy, group="totals")
        start = await run(reader.initialOffset)
        assert source.broker.group_holds.holder_of("totals").startswith("a Spark query")
        end = await run(reader.latestOffset, start, ReadAllAvailable())
        assert positions(end) == {"orders": 3}
        await run(reader.commit, end)
        assert cursor_at(source) == 3
        await run(reader.stop)


async def test_without_a_leader_the_query_reads_on_and_says_once_that_no_progress_is_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with source_and_copy() as (source, copy):
        async with source.connect() as mq:
            await mq.publish_many("orders", ["a", "b"])
            await mq.create_group("totals", "orders")
            await mq.advance_group("totals", "orders", to=1, member="spark")
        await copy.caught_up(source)
        await source.kill()
        reader = reader_at(copy, group="totals")
        with caplog.at_level(logging.WARNING, logger="onward.pipeline"):
            start = await run(reader.initialOffset)
            assert positions(start) == {"orders": 1}
            began = asyncio.get_running_loop().time()
            end = await run(reader.latestOffset, start, ReadAllAvailable())
            await run(reader.commit, end)
            assert positions(end) == {"orders": 2}
            assert await run(reader.latestOffset, end, ReadAllAvailable()) is end
            assert asyncio.get_running_loop().time() - began < 1, "no leader is waited for again"
        warned = [one for one in caplog.records if "no progress of group" in one.getMessage()]
        assert len(warned) == 1
        await source.start()
        connected = reader._mq()
        await until(connected.has_leader)
        await run(reader.latestOffset, end, ReadAllAvailable())
        assert cursor_at(source) == 2
        assert source.broker.group_holds.holder_of("totals").startswith("a Spark query")
        await run(reader.stop)


async def test_a_group_that_cannot_be_created_matters_only_where_it_says_where_to_begin() -> None:
    async with source_and_copy() as (source, copy):
        async with source.connect() as mq:
            await mq.publish_many("orders", ["a", "b"])
        await copy.caught_up(source)
        await source.kill()
        reader = reader_at(copy, group="totals")
        assert positions(await run(reader.initialOffset)) == {"orders": 0}
        await run(reader.stop)
        reader = reader_at(copy, group="totals", starting_offsets="latest")
        with pytest.raises(NotLeader, match="group 'totals' does not exist"):
            await run(reader.initialOffset)
        await run(reader.stop)
