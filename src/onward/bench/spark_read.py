"""spark-read: 5 M messages of 200 bytes from a running broker into Spark, beside Parquet.

    all columns, Arrow  ──┐
    all columns, tuples ──┼── the same source, the same broker     Parquet: the same rows, by Spark
    offsets only        ──┘

The figure is all columns as record batches; the peer is `spark.read.parquet` (snappy, all columns)
of the same rows. Details have the ratios that matter: offsets only against the same Parquet, and
record batches against the same source yielding tuples. Offsets of Parquet alone are there as well:
it can leave out columns without being asked.
"""

from __future__ import annotations

from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

from onward.bench.report import Options, Report, rounded
from onward.bench.spark import (
    fill_orders,
    in_rounds,
    medians,
    spark_beside,
    to_nowhere,
    topic_frame,
)

COUNT = 5_000_000


def run(options: Options) -> Report:
    """Measure rows per second."""
    count = options.count or COUNT
    scratch = Path(mkdtemp(prefix="onward-bench-spark-", dir=options.folder))
    try:
        with spark_beside(options) as (spark, _, place):
            options.say(f"publishing {count:,} messages")
            fill_orders(place, count)
            frame = topic_frame(spark, place)
            rows = frame.count()
            assert rows >= count, f"Spark sees {rows} of {count} messages"
            parquet = str(scratch / "parquet")
            frame.write.parquet(parquet)

            def all_of(**given: str) -> int:
                to_nowhere(topic_frame(spark, place, **given))
                return rows

            def offsets() -> int:
                found = topic_frame(spark, place, columns="offset").selectExpr("sum(offset)")
                assert found.collect()[0][0] == rows * (rows - 1) // 2
                return rows

            def parquet_all() -> int:
                to_nowhere(spark.read.parquet(parquet))
                return rows

            def parquet_offsets() -> int:
                spark.read.parquet(parquet).selectExpr("sum(offset)").first()
                return rows

            rates = in_rounds(
                {
                    "record batches": all_of,
                    "parquet": parquet_all,
                    "offsets only": offsets,
                    "parquet offsets": parquet_offsets,
                    "tuples": lambda: all_of(arrow="false"),
                },
                options,
            )
    finally:
        rmtree(scratch, ignore_errors=True)
    figures = medians(rates)
    ours = figures["record batches"]
    return Report(
        name="spark-read",
        unit="rows/s",
        onward=ours,
        peers={"parquet": figures["parquet"]},
        durability="disk",
        details={
            "rows": rows,
            "rates": {name: [rounded(one) for one in each] for name, each in rates.items()},
            "offsets_to_parquet": rounded(figures["offsets only"] / figures["parquet"]),
            "offsets_to_parquet_offsets": rounded(
                figures["offsets only"] / figures["parquet offsets"]
            ),
            "record_batches_to_tuples": rounded(ours / figures["tuples"]),
        },
    )
