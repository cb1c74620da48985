"""SQL over the views of a broker: every state, and clear words for what cannot be asked."""

import json
from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from onward import cli
from onward.errors import InvalidRequest
from onward.pipeline.place import Place, open_client
from onward.pipeline.queries import VIEWS, sql

from .test_questions import lived  # noqa: F401 - the fixture


@pytest.fixture(autouse=True)
def forgotten(spark: SparkSession) -> Iterator[None]:
    yield
    for name in VIEWS:
        spark.catalog.dropTempView(name)


def rows(spark: SparkSession, place: Place, query: str) -> list[tuple[object, ...]]:
    return [tuple(one) for one in sql(spark, query, place=place).collect()]


def test_every_state_of_a_message_can_be_asked_for(
    spark: SparkSession,
    place: Place,
    topic: str,
    lived: str,  # noqa: F811
):
    of = f"topic = '{topic}'"
    with open_client(place) as mq:
        mq.publish(topic, "later", delay="10h", key="k")
    recent = f"{of} and published_at > now() - interval 1 hour"
    counted = f"select count(*), min(body_text) from messages where {recent}"
    assert rows(spark, place, counted) == [(10, "body 0")]
    assert rows(spark, place, f"select did, count(*) from settled where {of} group by 1") == [
        ("acked", 8)
    ]
    assert rows(spark, place, f"select offset, cause, attempts from dead where {of}") == [
        (1, "no <such> order", 1)
    ]
    assert rows(spark, place, f"select offset, due_at > now() from retrying where {of}") == [
        (3, True)
    ]
    assert rows(spark, place, f"select key, due_at > now() from scheduled where {of}") == [
        ("k", True)
    ]
    assert rows(spark, place, f"select group, backlog, dead from groups where {of}") == [
        (lived, 1, 1)
    ]
    assert rows(spark, place, f"select next_offset from topics where {of}") == [(10,)]
    joined = f"select m.body_text from dead d join messages m using (topic, offset) where {of}"
    assert rows(spark, place, joined) == [("body 1",)]
    with open_client(place) as mq:
        mq.delete_group(lived)
    counted = f"select 1 from dead where {of} union all select 2 from retrying where {of}"
    assert rows(spark, place, counted) == [], "nobody gets them again, nobody can redrive them"


def test_only_the_views_that_are_named_are_registered(spark: SparkSession, place: Place):
    sql(spark, "select count(*) from topics", place=place)
    assert [name for name in VIEWS if spark.catalog.tableExists(name)] == ["topics"]


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("select nope from topics", "the query is not understood: a column.* with name `nope`"),
        ("select * from nowhere", "there is no view `nowhere`; there are: messages, settled"),
        ("select (1 from topics", "the query is not understood: syntax error"),
        ("drop table topics", "a query only asks"),
    ],
)
def test_a_wrong_query_gets_one_clear_sentence(
    spark: SparkSession, place: Place, query: str, said: str
):
    with pytest.raises(InvalidRequest, match=said):
        sql(spark, query, place=place)


def test_the_command_prints_a_table_or_json_or_csv(
    spark: SparkSession, place: Place, topic: str, capsys: pytest.CaptureFixture[str]
):
    with open_client(place) as mq:
        mq.publish_many(topic, ["a", "b"])
    query = f"select topic, messages, messages / 4 part from topics where topic = '{topic}'"
    where = ["--address", place.servers, "--master", "local[2]"]
    assert cli.run(["sql", query, *where]) == 0
    assert capsys.readouterr().out.split() == ["TOPIC", "MESSAGES", "PART", topic, "2", "0.5"]
    assert cli.run(["sql", query, "--json", *where]) == 0
    assert json.loads(capsys.readouterr().out) == {"topic": topic, "messages": 2, "part": 0.5}
    assert cli.run(["sql", query, "--csv", *where]) == 0
    assert capsys.readouterr().out == f"topic,messages,part\n{topic},2,0.5\n"
    assert cli.run(["sql", "select * from nowhere", *where]) == 1
    assert capsys.readouterr().err.startswith("error: the query is not understood: there is no")
