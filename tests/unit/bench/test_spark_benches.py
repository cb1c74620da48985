"""What the benchmarks of the pipeline share: messages that Parquet cannot fold, and fair turns."""

import json
import random
from pathlib import Path

from onward.bench import spark
from onward.bench.peers import started
from onward.bench.report import Options
from onward.pipeline.place import Place, open_client


def test_orders_are_json_of_200_bytes_and_no_two_alike():
    chance = random.Random(1)
    bodies = [spark._order(number, chance) for number in (0, 7, 4_999_999)]
    assert {len(body) for body in bodies} == {200}
    assert json.loads(bodies[1])["order"] == 7
    assert len(set(bodies)) == 3


def test_works_take_turns_and_the_warm_up_does_not_count(tmp_path: Path):
    turns: list[str] = []

    def work(name: str) -> int:
        turns.append(name)
        return 10

    rates = spark.in_rounds(
        {"a": lambda: work("a"), "b": lambda: work("b")}, Options(folder=tmp_path, repeat=2)
    )
    assert turns == ["a", "b"] * 3
    assert [len(each) for each in rates.values()] == [2, 2]


def test_a_topic_is_filled_with_as_many_as_asked_for(tmp_path: Path):
    with started("onward", folder=tmp_path) as server:
        place = Place(f"127.0.0.1:{server.port}")
        spark.fill_orders(place, 3_000)
        with open_client(place) as mq:
            orders = sorted(json.loads(message.body)["order"] for message in mq.read("bench"))
    assert orders == list(range(3_000))
