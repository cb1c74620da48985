"""`onward sql` before Spark is there: what is wrong is said at once."""

from datetime import date, datetime, timedelta
from decimal import Decimal

import pytest

from onward import cli
from onward.cli.sql import distinct, named, queries_in


def test_rows_are_printed_in_one_way_only(capsys: pytest.CaptureFixture[str]):
    assert cli.run(["sql", "select 1", "--json", "--csv"]) == cli.ExitCode.USAGE
    assert "rows are printed as --json or as --csv, not as both" in capsys.readouterr().err


def test_a_broker_that_is_not_there_is_noticed_before_spark_starts(
    capsys: pytest.CaptureFixture[str],
):
    code = cli.run(["sql", "select 1", "--address", "127.0.0.1:1"])
    assert code == cli.ExitCode.UNAVAILABLE
    assert "no broker answers at 127.0.0.1:1" in capsys.readouterr().err


def test_columns_of_the_same_name_are_all_shown():
    assert distinct(["topic", "topic", "topic_2"]) == ["topic", "topic_2", "topic_2_2"]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (Decimal("7.00"), 7),
        (Decimal("0.5"), 0.5),
        (date(2026, 11, 16), "2026-11-16"),
        (timedelta(hours=1), "1:00:00"),
        (b"\xff", "\\xff"),
        ([Decimal(1), None], [1, None]),
        ({"a": b"b"}, {"a": "b"}),
        (datetime.fromisoformat("2026-11-16T10:00:00Z"), "2026-11-16T10:00:00.000Z"),
    ],
)
def test_every_value_of_spark_can_be_said_in_json(value: object, said: object):
    assert named(["it"], [value]) == {"it": said}


def test_queries_end_with_a_semicolon_that_is_in_no_text_or_comment():
    lines = ["select 1; select 'a;", "b' -- not; here", ", 2 /* nor; here */;;", "select 3\n"]
    wanted = ["select 1", "select 'a;\nb' -- not; here\n, 2 /* nor; here */", "select 3"]
    assert list(queries_in(lines)) == wanted
    assert list(queries_in(["", " ; ", ""])) == []


def test_at_a_prompt_an_empty_line_ends_a_query_and_a_word_leaves():
    lines = ["select 1", "from topics", "", "select 'exit'", "", "exit", "select 9;"]
    assert list(queries_in(lines, is_person=True)) == ["select 1\nfrom topics", "select 'exit'"]
    assert list(queries_in(["\\q", "select 9;"], is_person=True)) == []
