"""What the benchmarks of the pipeline share: a session, a broker with messages in it, rounds.

Spark and the broker share this machine's cores, as they would on a small one. The first query of a
session pays for starting Python and for compiling, so everything is run once before it is measured.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from onward.bench.peers import Server, started
from onward.bench.report import Options, typical
from onward.pipeline.place import Place, open_client
from onward.pipeline.sessions import session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROUNDS = 3
MESSAGES = 1_000
IN_FLIGHT = 4
MEMORY = "2g"


@contextmanager
def spark_beside(options: Options) -> Iterator[tuple[SparkSession, Server, Place]]:
    """Give a session on all cores and a running broker."""
    with started("onward", folder=options.folder, keep=options.keep) as server:
        place = Place(f"127.0.0.1:{server.port}")
        options.say("starting Spark")
        spark = session(place=place, name="onward-bench", memory=MEMORY)
        try:
            yield spark, server, place
        finally:
            spark.stop()


def in_rounds(
    works: Mapping[str, Callable[[], int]], options: Options, *, warm_up: bool = True
) -> dict[str, list[float]]:
    """Return the rates of each work, measured in turn; a work returns how many rows it did."""
    rates: dict[str, list[float]] = {name: [] for name in works}
    for number in range(-1 if warm_up else 0, options.repeat or ROUNDS):
        for name, work in works.items():
            started_at = time.perf_counter()
            rows = work()
            rate = rows / (time.perf_counter() - started_at)
            if number >= 0:
                rates[name].append(rate)
            options.say(f"{name}: {rate:,.0f} rows/s{'' if number >= 0 else ' (warm-up)'}")
    return rates


def medians(rates: Mapping[str, list[float]]) -> dict[str, float]:
    """Return one figure for each.

    >>> medians({"a": [1.0, 3.0, 2.0]})
    {'a': 2.0}
    """
    return {name: typical(each) for name, each in rates.items()}


def fill_orders(place: Place, count: int) -> None:
    """Publish JSON of 200 bytes, no two alike, in batches of 1,000: what Parquet cannot fold."""
    chance = random.Random(7)  # a seed, so that every run is alike
    with open_client(place, name="bench") as mq:
        waiting: deque[Future[object]] = deque()
        with ThreadPoolExecutor(max_workers=IN_FLIGHT) as threads:
            for first in range(0, count, MESSAGES):
                bodies = [_order(number, chance) for number in range(first, first + MESSAGES)]
                waiting.append(threads.submit(mq.publish_many, "bench", bodies))
                while len(waiting) > IN_FLIGHT:
                    waiting.popleft().result()
            for one in waiting:
                one.result()


def _order(number: int, chance: random.Random) -> bytes:
    text = b'{"order": %d, "customer": "%x", "amount": %d, "currency": "EUR", "note": "%x"}'
    numbers = number, chance.getrandbits(64), chance.getrandbits(16), chance.getrandbits(360)
    return (text % numbers).ljust(200)


def topic_frame(spark: SparkSession, place: Place, **options: str) -> DataFrame:
    """Return the topic of the benchmarks as a frame."""
    reader = spark.read.format("onward").option("servers", place.servers)
    return reader.option("topic", "bench").options(**options).load()


def to_nowhere(frame: DataFrame) -> None:
    """Have Spark make every row with every column, and do nothing with them."""
    frame.write.format("noop").mode("overwrite").save()
