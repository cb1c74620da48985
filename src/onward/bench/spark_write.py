"""spark-write: 2 M messages of 200 bytes from Spark into a broker, exactly once, on disk.

The figure is the sink with Arrow: staged, decided and copied, so that every message is stored once
whatever dies meanwhile. The peer is a writer of rows:

    row-wise writer          by hand with Spark's guide: each row is published with the client
                             library, 1,000 at a time under way; a repeated task writes twice

Beside it, not in the ratio, stand two that take rows one by one and send them in batches:

    lists of 1,000 rows      the same by hand, with one publish for a list of rows
    the same sink, fed rows  our own sink without Arrow: it gathers the rows into columns

All are durable on disk, and what each has stored is counted.
"""

from __future__ import annotations

from functools import partial

from onward.bench.peers import beside
from onward.bench.report import Options, Report, rounded
from onward.bench.spark import in_rounds, medians, spark_beside
from onward.pipeline.place import open_client

COUNT = 2_000_000
ARROW = "arrow"
ROW_WISE = "row-wise writer"
LISTS = "lists of 1,000 rows"
FED_ROWS = "the same sink, fed rows"


def run(options: Options) -> Report:
    """Measure rows per second."""
    count = options.count or COUNT
    with spark_beside(options) as (spark, _, place), open_client(place, name="bench") as mq:
        from onward.bench.spark_by_hand import ByHand  # it needs Spark to be there

        spark.dataSource.register(ByHand)
        rows = spark.range(count).selectExpr("cast(rpad(string(id), 200, 'x') as binary) as body")
        rows = rows.persist()
        rows.count()
        stored: dict[str, int] = {}

        def write(topic: str, form: str, **chosen: str) -> int:
            sink = rows.write.format(form).mode("append").options(**chosen)
            sink.option("servers", place.servers).option("topic", topic).save()
            stored[topic] = stored.get(topic, 0) + count
            found = mq.topic(topic).messages
            assert found == stored[topic], f"{found} messages are stored, not {stored[topic]}"
            return count

        rates = in_rounds(
            {
                ARROW: partial(write, "arrow", "onward"),
                ROW_WISE: partial(write, "row-wise", ByHand.name()),
                LISTS: partial(write, "lists", ByHand.name(), lists="yes"),
                FED_ROWS: partial(write, "rows", "onward", arrow="false"),
            },
            options,
        )
    figures = medians(rates)
    ours = figures.pop(ARROW)
    not_in_ratio = beside(figures, onward=ours, names=(LISTS, FED_ROWS))
    return Report(
        name="spark-write",
        unit="rows/s",
        onward=ours,
        peers=figures,
        durability="disk",
        details={
            "rows": count,
            "rates": {name: [rounded(one) for one in each] for name, each in rates.items()},
            "beside": not_in_ratio,
        },
    )
