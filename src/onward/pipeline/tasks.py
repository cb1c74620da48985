"""Work for Spark's tasks that is no query: one piece for each task, its result to the driver.

Only DataFrames are used, so it runs through Spark Connect as well, where there is no context and
there are no RDDs.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from pyspark.sql import functions as F  # noqa: N812 - the name that everybody knows it by

from onward.pipeline.failure import plain

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_Piece = TypeVar("_Piece")
_Result = TypeVar("_Result")
_ENOUGH = 100_000
"""More rows than there are cores: Spark cuts a range into a partition for each of them."""


def run_tasks(
    spark: SparkSession, task: Callable[[_Piece], _Result], pieces: Sequence[_Piece]
) -> list[_Result]:
    """Call `task` with each piece, in a task of its own; return what they returned, in order.

    run_tasks(spark, len, ["orders", "refunds"])       # [6, 7]
    """
    if not pieces:
        return []
    held = list(pieces)

    def work(at: int) -> bytes:
        return pickle.dumps(task(held[at]))

    # Called once for each row, whatever the optimizer thinks of it. Not by Arrow: it wants pandas.
    called = F.udf(work, "binary", useArrow=False).asNondeterministic()
    rows = spark.range(0, len(held), 1, len(held)).select("id", called("id").alias("result"))
    try:
        found = {row["id"]: bytes(row["result"]) for row in rows.collect()}
    except Exception as error:
        raise plain(error) or error from error
    return [pickle.loads(found[at]) for at in range(len(held))]


def parallelism_of(spark: SparkSession) -> int:
    """Return how many tasks run at once."""
    if hasattr(spark, "sparkContext"):  # Not through Spark Connect.
        return int(spark.sparkContext.defaultParallelism)
    return spark.range(_ENOUGH).select(F.spark_partition_id()).distinct().count()
