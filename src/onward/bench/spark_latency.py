"""spark-latency: from publish to the sink's commit, through a query that runs all the time.

    publish ──▶ topic ──▶ source ──▶ query ──▶ sink ──▶ topic ──▶ a reader that follows

One message each half second or so, at moments that fall anywhere in a trigger; the median is the
figure. Details have how long a batch of a windowed count takes with the session's own settings.
Spark offers no peer here: its real-time mode is closed to sources in Python.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from shutil import rmtree
from statistics import median
from tempfile import mkdtemp
from typing import TYPE_CHECKING

from onward.bench.report import Options, Report, percentiles_ms, rounded
from onward.bench.spark import spark_beside
from onward.pipeline.place import Place, open_client

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from onward.client.sync import SyncClient

COUNT = 40
WARM_UP = 5
PAUSE_S = (0.3, 0.8)
BATCHES = 10


def run(options: Options) -> Report:
    """Measure milliseconds."""
    scratch = Path(mkdtemp(prefix="onward-bench-stream-", dir=options.folder))
    try:
        with spark_beside(options) as (spark, _, place), open_client(place, name="bench") as mq:
            mq.create_topic("in")
            mq.create_topic("out")
            latencies = _through(spark, place, mq, scratch / "through", options)
            batches_ms = _windowed(spark, place, mq, scratch / "windowed")
    finally:
        rmtree(scratch, ignore_errors=True)
    options.say(f"a windowed count takes {median(batches_ms):,.0f} ms per batch")
    return Report(
        name="spark-latency",
        unit="ms",
        onward=median(latencies) / 1e6,
        less_is_better=True,
        durability="disk",
        details={
            "messages": len(latencies),
            "latency_ms": percentiles_ms(latencies),
            "windowed_batch_ms": rounded(median(batches_ms)),
            "windowed_batches_ms": batches_ms,
        },
    )


def _stream(spark: SparkSession, place: Place, group: str) -> DataFrame:
    reader = spark.readStream.format("onward").option("servers", place.servers)
    return reader.option("topic", "in").option("group", group).load()


def _through(
    spark: SparkSession, place: Place, mq: SyncClient, checkpoint: Path, options: Options
) -> list[int]:
    """Return how long messages took from their publish to their commit, in nanoseconds."""
    chance = random.Random(7)  # a seed, so that every run is alike
    sink = _stream(spark, place, "through").select("body").writeStream.format("onward")
    query = (
        sink.option("servers", place.servers).option("topic", "out")
        .option("checkpointLocation", str(checkpoint)).start()
    )  # fmt: skip
    latencies: list[int] = []
    arrived = iter(mq.read("out", follow=True))
    for number in range(WARM_UP + (options.count or COUNT)):
        published_ns = time.perf_counter_ns()
        mq.publish("in", str(number))
        assert next(arrived).body == str(number).encode()
        if number >= WARM_UP:
            latencies.append(time.perf_counter_ns() - published_ns)
        time.sleep(chance.uniform(*PAUSE_S))
    query.stop()
    return latencies


def _windowed(spark: SparkSession, place: Place, mq: SyncClient, checkpoint: Path) -> list[int]:
    """Return how long the batches of a count per minute took, in milliseconds."""
    frame = _stream(spark, place, "windowed").withWatermark("published_at", "1 minute")
    frame.createOrReplaceTempView("arriving")
    counts = spark.sql(
        "select window(published_at, '1 minute') as minute, count(*) as messages "
        "from arriving group by window(published_at, '1 minute')"
    )
    query = (
        counts.writeStream.format("noop").outputMode("update")
        .option("checkpointLocation", str(checkpoint)).start()
    )  # fmt: skip
    took: dict[int, int] = {}
    while len(took) < BATCHES + 2:
        mq.publish("in", "tick")
        time.sleep(0.5)
        for one in query.recentProgress:
            if one["numInputRows"]:
                took[one["batchId"]] = one["durationMs"]["triggerExecution"]
    query.stop()
    return [took[number] for number in sorted(took)[2:]]
