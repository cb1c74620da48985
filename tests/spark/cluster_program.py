"""A driver on a cluster, as a program of its own: it writes, reads, runs jobs and is disturbed.

    python cluster_program.py MASTER SERVERS FOLDER

What it finds is printed as one JSON object. In its last job each task leaves a file `started-*` in
FOLDER when it has begun to read, and waits there for the file `go`: whoever looks can kill a worker
in between, and be sure that the job was in its middle.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col, count, countDistinct, udf

from onward.errors import Unavailable
from onward.pipeline.jobs.archive import archive
from onward.pipeline.jobs.reconcile import reconcile
from onward.pipeline.jobs.replay import replay
from onward.pipeline.jobs.stats import stats
from onward.pipeline.place import Place
from onward.pipeline.sessions import session

ROWS = 2_000
WAIT_S_MAX = 120.0
# Short programs: the JVM need not compile them well.
CONFIG = {
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.onward.executorWait": "180s",
}


def where_the_code_is(spark: SparkSession) -> list[str]:
    def look(_rows: Iterator[int]) -> Iterator[str]:
        import onward

        yield str(onward.__file__)

    return sorted({*spark.sparkContext.parallelize(range(2), 2).mapPartitions(look).collect()})


def write(frame: DataFrame, place: Place, topic: str) -> None:
    options = {"servers": place.servers, "topic": topic}
    frame.write.format("onward").options(**options).mode("append").save()


def read(spark: SparkSession, place: Place, topic: str) -> DataFrame:
    options = {"servers": place.servers, "topic": topic, "minPartitions": "2"}
    options["maxRowsPerPartition"] = str(ROWS // 2)
    return spark.read.format("onward").options(**options).load()


def tally(frame: DataFrame) -> list[int]:
    """Return how many rows there are, and how many that differ."""
    row = frame.agg(count("*"), countDistinct("body")).collect()[0]
    return [row[0], row[1]]


def copy_with_a_pause(spark: SparkSession, place: Place, folder: Path) -> None:
    @udf("binary")
    def pause(body: bytes) -> bytes:
        context = TaskContext.get()
        assert context is not None
        (folder / f"started-{context.partitionId()}-{context.attemptNumber()}").touch()
        end = time.monotonic() + WAIT_S_MAX
        while not (folder / "go").exists():
            assert time.monotonic() < end, "nobody said go"
            time.sleep(0.02)
        return body

    write(
        read(spark, place, "cluster-in").select(pause("body").alias("body")), place, "cluster-copy"
    )


def ask(spark: SparkSession, place: Place, lake: str) -> dict[str, list[int]]:
    """Let the jobs that shuffle, and the one that writes, run on the workers."""
    of_all = {"place": place, "lake": lake, "topics": ["cluster-in"]}
    counted = stats(spark, **of_all)  # type: ignore[arg-type]
    checked = reconcile(spark, groups=["archive"], **of_all)  # type: ignore[arg-type]
    again = {"topic": "cluster-in", "to_topic": "cluster-again", "run_id": "cluster"}
    where = f"offset < {ROWS // 2}"
    done = replay(spark, place=place, lake=lake, where=where, **again)
    return {
        "stats": [counted.messages, counted.acked],
        "reconciled": [checked.due, checked.settled, checked.unchecked],
        "replayed": [done.rows, *tally(read(spark, place, "cluster-again"))],
    }


def session_that_fits_nowhere(master: str) -> str:
    """Ask for more than any worker has; return what is said about it."""
    greedy = {"spark.executor.memory": "64g", "spark.onward.executorWait": "2s"}
    try:
        session(master, memory="512m", config=CONFIG | greedy)
    except Unavailable as error:
        return str(error)
    return "it fitted"


def main(master: str, servers: str, folder: Path) -> None:
    place = Place(servers)
    refused = session_that_fits_nowhere(master)
    spark = session(master, place=place, memory="512m", config=CONFIG)
    numbers = spark.range(ROWS).select(col("id").cast("string").alias("body"))
    write(numbers.repartition(2), place, "cluster-in")
    archived = archive(spark, place=place, lake=str(folder / "lake"), topics=["cluster-in"])
    found = {
        "refused": refused,
        "code": where_the_code_is(spark),
        "read": tally(read(spark, place, "cluster-in")),
        "archived": archived.rows,
        "lake": tally(
            spark.read.option("recursiveFileLookup", "true").parquet(str(folder / "lake"))
        ),
    }
    found |= ask(spark, place, str(folder / "lake"))
    copy_with_a_pause(spark, place, folder)
    found["copied"] = tally(read(spark, place, "cluster-copy"))
    print(json.dumps(found))
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
