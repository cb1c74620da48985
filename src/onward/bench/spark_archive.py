"""spark-archive: 2 M messages of 200 bytes from a running broker into the lake, zstd Parquet.

The peer is Spark itself rewriting the same Parquet files as zstd Parquet: no broker, no Python. The
rows of every lake are counted afterwards.
"""

from __future__ import annotations

from itertools import count as numbers
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

from onward.bench.report import Options, Report, rounded
from onward.bench.spark import fill_orders, in_rounds, medians, spark_beside
from onward.pipeline.jobs.archive import archive
from onward.pipeline.place import open_client

COUNT = 2_000_000
ROWS_PER_FILE = 500_000


def run(options: Options) -> Report:
    """Measure rows per second."""
    count = options.count or COUNT
    scratch = Path(mkdtemp(prefix="onward-bench-lake-", dir=options.folder))
    name = numbers()
    try:
        with spark_beside(options) as (spark, _, place):
            options.say(f"publishing {count:,} messages")
            fill_orders(place, count)
            with open_client(place, name="bench") as mq:
                rows = mq.topic("bench").messages
            lakes: list[Path] = []

            def onward() -> int:
                lake = scratch / f"lake-{next(name)}"
                done = archive(
                    spark, place=place, lake=str(lake), topics=["bench"], group=lake.name,
                    rows_per_file=min(ROWS_PER_FILE, -(-rows // 2)), run=None,
                )  # fmt: skip
                assert done.rows == rows, f"{done.rows} rows of {rows} are in the lake"
                lakes.append(lake)
                return rows

            def rewrite() -> int:
                files = [str(path) for path in lakes[0].rglob("*.parquet")]
                out = str(scratch / f"parquet-{next(name)}")
                spark.read.parquet(*files).write.option("compression", "zstd").parquet(out)
                return rows

            rates = in_rounds({"archive": onward, "spark rewriting parquet": rewrite}, options)
            size = sum(path.stat().st_size for path in lakes[0].rglob("*.parquet"))
    finally:
        rmtree(scratch, ignore_errors=True)
    figures = medians(rates)
    return Report(
        name="spark-archive",
        unit="rows/s",
        onward=figures["archive"],
        peers={"spark rewriting parquet": figures["spark rewriting parquet"]},
        durability="disk",
        details={
            "rows": rows,
            "lake_bytes": size,
            "rates": {name: [rounded(one) for one in each] for name, each in rates.items()},
        },
    )
