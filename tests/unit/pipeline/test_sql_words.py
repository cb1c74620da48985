"""What a query says, before Spark sees it: which views, which columns, and that it only asks."""

import pytest

from onward.errors import InvalidRequest
from onward.pipeline.queries import VIEWS, checked, columns_in, names_in
from onward.pipeline.schema import MESSAGE_COLUMNS
from onward.pipeline.views import inherited


@pytest.mark.parametrize(
    "query",
    [
        "insert into messages values (1)",
        "with a as (select 1) insert into b select * from a",
        "from a insert overwrite b select *",
        "WITH a AS (select 1) DELETE FROM b",
        "with a as (select 1) merge into b using a on true when matched then delete",
        "with a as (select 1) update b set x = 1",
        "drop table messages",
        "create view v as select 1",
        "set spark.sql.shuffle.partitions=1",
        "add jar 'x.jar'",
        "begin select 1; end",
        "execute immediate 'drop table x'",
        "with `it's` as (select 1) insert into t select 'x'",
        r"with a as (select r'\') insert into t select 'x'",
        "with a as (select 1) --\rinsert into t select 1",
        "from messages insert/**/overwrite directory 'x' select *",
    ],
)
def test_a_query_that_would_change_something_is_refused(query: str):
    with pytest.raises(InvalidRequest, match="a query only asks"):
        checked(query)


@pytest.mark.parametrize(
    "query",
    [
        "select 'insert into x' from messages",
        "SELECT * FROM messages -- delete from messages",
        "(select 1) union (select 2)",
        "with a as (select 1) select * from a",
        "from messages select topic",
        "describe messages",
        "explain select 1",
        "select update, `set`, call from topics",
    ],
)
def test_a_query_that_asks_is_let_through(query: str):
    assert checked(query)


@pytest.mark.parametrize("query", ["", "  ", "-- nothing"])
def test_an_empty_query_is_refused(query: str):
    with pytest.raises(InvalidRequest, match="the query is empty"):
        checked(query)


def test_only_the_views_that_a_query_names_are_made():
    bare = checked("select 'dead' from Messages m join `groups` -- topics\n where x = 'settled'")
    assert names_in(bare, VIEWS) == ["messages", "groups"]


@pytest.mark.parametrize("query", ["select * from messages", "select m.* from messages m",
                                   "select 1, * from messages", "from messages", "table messages",
                                   "select distinct * from messages",
                                   "select to_json(struct(*)) from messages",
                                   "select count(*) from messages natural join dead",
                                   "select count(*) from (table messages)",
                                   "select 1 from (from messages |> drop body)"])  # fmt: skip
def test_a_star_reads_every_column(query: str):
    assert columns_in(query) == list(MESSAGE_COLUMNS)


def test_bodies_are_not_read_where_nobody_names_them():
    assert columns_in("select topic, count(*), 2 * 3 from messages") == ["topic", "offset"]
    assert columns_in("select body_text from messages") == ["offset", "body"]
    assert columns_in("select count( * ) from messages") == ["offset"]


def test_a_copy_of_a_copy_has_the_rows_of_both():
    assert inherited([(5, "b", "a"), (9, "c", "b")]) == [
        ("a", "b", -1, 5), ("b", "c", 5, 9), ("a", "c", -1, 5),
    ]  # fmt: skip


def test_a_name_that_is_copied_to_again_is_the_newest_copy():
    assert inherited([(5, "b", "a"), (9, "b", "c")]) == [("c", "b", -1, 9)]
