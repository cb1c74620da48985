"""`onward sql` before Spark is there: what is wrong is said at once."""

from datetime import date, datetime, timedelta
from decimal import Decimal

import pytest

from onward import cli
from onward.cli.sql import distinct, named


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
