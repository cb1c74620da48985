"""A stream from one topic to another, to be killed: run by test_sink_kill.

    python sink_program.py SERVERS FROM TO CHECKPOINT ROWS_PER_BATCH

A task that dies is tried again, here as on a cluster.
"""

import sys

from onward.pipeline.place import Place
from onward.pipeline.sessions import session

SHORT = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}


def main(servers: str, source: str, target: str, checkpoint: str, rows: str) -> None:
    spark = session("local[2,4]", place=Place(servers), name="to be killed", config=SHORT)
    stream = spark.readStream.format("onward").option("servers", servers).option("topic", source)
    stream = stream.option("startingOffsets", "earliest").option("maxRowsPerTrigger", rows)
    # Several tasks of a batch, though it is small.
    stream = stream.option("minPartitions", "2").option("columns", "key,body")
    writer = stream.load().writeStream.format("onward").option("servers", servers)
    writer = writer.option("topic", target).option("checkpointLocation", checkpoint)
    writer.trigger(availableNow=True).start().awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
