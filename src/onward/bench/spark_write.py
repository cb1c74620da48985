"""spark-write: 2 M messages of 200 bytes from Spark into a broker, exactly once, on disk.

The figure is the sink with Arrow; the peer is the same sink fed row by row. Both stage, decide and
copy, so both store every message once whatever dies meanwhile; the rows are counted afterwards.
"""

from __future__ import annotations

from onward.bench.report import Options, Report, rounded
from onward.bench.spark import in_rounds, medians, spark_beside
from onward.pipeline.place import open_client

COUNT = 2_000_000


def run(options: Options) -> Report:
    """Measure rows per second."""
    count = options.count or COUNT
    with spark_beside(options) as (spark, _, place), open_client(place, name="bench") as mq:
        rows = spark.range(count).selectExpr("cast(rpad(string(id), 200, 'x') as binary) as body")
        rows = rows.persist()
        rows.count()
        stored = {"true": 0, "false": 0}

        def write(arrow: str) -> int:
            topic = f"bench-{arrow}"
            sink = rows.write.format("onward").mode("append").option("servers", place.servers)
            sink.option("topic", topic).option("arrow", arrow).save()
            stored[arrow] += count
            found = mq.topic(topic).messages
            assert found == stored[arrow], f"{found} messages are stored, not {stored[arrow]}"
            return count

        rates = in_rounds(
            {"arrow": lambda: write("true"), "row by row": lambda: write("false")}, options
        )
    figures = medians(rates)
    return Report(
        name="spark-write",
        unit="rows/s",
        onward=figures["arrow"],
        peers={"row by row": figures["row by row"]},
        durability="disk",
        details={
            "rows": count,
            "rates": {name: [rounded(one) for one in each] for name, each in rates.items()},
        },
    )
