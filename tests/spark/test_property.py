"""What a frame holds depends on its `load()` only: whatever else was asked of it before.

`make spark-property` runs many more sequences: SPARK_PROPERTY=N, from SEED on.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from pyspark.sql import SparkSession

from onward.pipeline.java import find_java
from onward.pipeline.jobs.archive import archive
from onward.pipeline.place import Place, open_client
from onward.pipeline.source import read_topic

from ..e2e.running import BrokerProcess  # noqa: TID252
from .sequences import (
    ARCHIVED,
    FLAG,
    HALF,
    Data,
    plain_answer,
    plain_view,
    published,
    question,
    run_seed,
    setting,
)

COUNT = int(os.environ.get("SPARK_PROPERTY", "28"))
SEED = int(os.environ.get("SEED", "1"))
PROGRAM = Path(__file__).with_name("sequences.py")
PROGRAM_S_MAX = 240 + 5 * COUNT


@pytest.fixture(scope="module")
def data(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Data]:
    """A broker of its own, for `onward sql` is about all topics; the lake has a part of them."""
    folder = tmp_path_factory.mktemp("property")
    broker = BrokerProcess(folder / "log", log_path=folder / "broker.txt")
    try:
        asyncio.run(broker.start())
        place, lake = Place(broker.address), str(folder / "lake")
        publish(place, ARCHIVED, 300)
        publish(place, HALF, 200)
        archive(spark, place=place, lake=lake)
        publish(place, HALF, 250)
        yield Data(place, lake, published(place))
    finally:
        broker.end()


def publish(place: Place, topic: str, count: int) -> None:
    """Publish so many messages, in batches that have different times."""
    with open_client(place) as mq:
        for first in range(0, count, 50):
            keys = [None if n % 7 == 0 else f"k{n % 5}" for n in range(first, first + 50)]
            mq.publish_many(topic, [f"m{n}" for n in range(50)], keys=keys)
            time.sleep(0.003)


def test_counts_of_one_frame_are_those_of_its_load(spark: SparkSession, data: Data):
    with setting(spark, FLAG, is_on=True):
        frame = read_topic(spark, [ARCHIVED, HALF], place=data.place)
        assert frame.count() == len(data.rows)
        assert frame.where("offset between 10 and 12").count() == 6
        assert frame.count() == len(data.rows)
        few = frame.where("offset < 10").union(frame.where("offset >= 295"))
        assert few.count() == 20 + 5 + 155


@pytest.mark.parametrize("seed", range(SEED, SEED + COUNT * 3 // 4))
def test_a_sequence_of_queries_has_the_answers_of_plain_rows(
    spark: SparkSession, data: Data, seed: int
):
    run_seed(spark, data, seed)


def test_sequences_in_a_session_of_spark_alone_have_the_answers_of_plain_rows(data: Data):
    seeds = f"{SEED + COUNT * 3 // 4}-{SEED + COUNT}"
    environ = os.environ | {"JAVA_HOME": find_java(), "PYSPARK_PYTHON": sys.executable}
    program = subprocess.run(
        [sys.executable, str(PROGRAM), data.place.servers, data.lake, seeds],
        capture_output=True, text=True, env=environ, timeout=PROGRAM_S_MAX, check=False,
    )  # fmt: skip
    assert program.returncode == 0, program.stderr[-5_000:]
    assert program.stdout.strip() == f"{COUNT - COUNT * 3 // 4} sequences"


def test_the_command_answers_queries_from_a_pipe_one_by_one_in_one_session(
    spark: SparkSession, data: Data
):
    rng = Random(SEED)
    asked = [question(rng, data.rows) for _ in range(max(4, COUNT // 10))]
    lines = ";\n".join([*asked[:2], "select nothing from messages", *asked[2:]])
    command = "from onward.cli import main; main()"
    given = ["sql", "--json", "--address", data.place.servers, "--lake", data.lake]
    program = subprocess.run(
        [sys.executable, "-c", command, *given, "--conf", f"{FLAG}=true"], input=lines,
        capture_output=True, text=True, timeout=PROGRAM_S_MAX, check=False,
    )  # fmt: skip
    assert program.stderr.count("error: the query is not understood") == 1, program.stderr[-5_000:]
    assert program.returncode == 1, program.stderr[-5_000:]
    plain_view(spark, data)
    wanted = [row for query in asked for row in plain_answer(spark, query)]
    assert [tuple(json.loads(line).values()) for line in program.stdout.splitlines()] == wanted
