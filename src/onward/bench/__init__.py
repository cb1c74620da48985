"""Benchmarks: Onward beside its neighbours, on this machine, in the same minutes.

A benchmark is one module here with one function, `run(options) -> Report`, and one line in
BENCHES. Reading order: `report` (what comes out), `peers` (the servers, as child programs), `load`
(a light load generator) with `speakers` (the protocols it speaks), `rounds` and `clients` (client
libraries in alternating rounds), then one file per benchmark.

Every server of a comparison runs on the same disk, in the same minutes, under the same load. Only
a ratio within one run means something. A peer that is missing is said, never skipped in silence.
"""

from typing import Final

BENCHES: Final = {
    "publish-sync": "256 connections, one 200-byte message in flight each, on disk before the ack",
    "publish-bulk": "batches of 1,000 messages of 200 bytes, on disk before the ack",
    "publish-await": "256 tasks that await publish() through the client library",
    "read": "5 M messages of 200 bytes through the client library, hot and cold",
    "memory": "resident memory of the broker: idle, at 5,000 publishes/s, after 1 M publishes",
    "recovery": "from the start after kill -9 to the first accepted publish, with 2 GiB of log",
    "topics": "single messages to random ones of 100,000 topics, and to one topic",
    "consume-ack": "1 M messages of 200 bytes consumed by a group, every ack on disk",
    "jobs": "64 handlers of 1 ms each, one ack per message, publishing at the same time",
    "members": "300 handlers of 5 ms in three programs, beside the handlers without a broker",
    "latency": "from publish to handler at 5,000 messages/s, on disk before the delivery",
    "backlog": "20 M messages behind: 50 members that join and leave, and a steady group",
    "ordered": "100,000 keys, 64 members, each key in order, beside a shared group",
    "fair": "how long tenants wait while another floods 1,000 times as much, and without it",
    "delay-load": "10 M messages scheduled over two years: accepted/s, memory, restart",
    "delay-lateness": "how late messages are in a consumer's hands, 10,000 due per second",
    "delay-burst": "500,000 due in one millisecond: until the last is in a consumer's hands",
    "delay-cancel": "cancels with 1 M messages waiting, every answer checked against the topic",
    "replica-lag": "from publish at a source to a reader of its replica; its cost, and catch-up",
    "spark-read": "5 M messages of 200 bytes from a running broker into Spark, beside Parquet",
    "spark-write": "2 M messages of 200 bytes from Spark, exactly once, with Arrow and by row",
    "spark-archive": "2 M messages into the lake, beside Spark rewriting the same Parquet",
    "spark-latency": "from publish to the sink's commit through a query that runs all the time",
}
"""Name and one line about every benchmark; `publish-sync` is the module `publish_sync`."""
