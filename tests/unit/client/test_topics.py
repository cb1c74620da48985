"""Words for topics: durations, instants, and where to start reading."""

from datetime import UTC, datetime, timedelta

import pytest

from onward.client.topics import instant_ms, read_start
from onward.errors import InvalidRequest
from onward.message.relative import Relative
from onward.protocol.payloads import Start

FIRST_DAY = datetime(1, 1, 1, tzinfo=UTC).replace(tzinfo=None)


def test_instants_are_milliseconds_or_a_datetime() -> None:
    assert instant_ms(datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)) == instant_ms(1_000) == 1_000


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ("earliest", "earliest"),
        ("latest", "latest"),
        (0, Start(offset=0)),
        (7, Start(offset=7)),
        ("10s", Start(time_ms=Relative(-10_000))),
        (timedelta(seconds=10), Start(time_ms=Relative(-10_000))),
        (datetime(1970, 1, 1, 0, 0, 5, tzinfo=UTC), Start(time_ms=5_000)),
    ],
)
def test_a_read_starts_where_it_was_said(start: object, expected: object) -> None:
    assert read_start(start, None) == expected  # type: ignore[arg-type]


def test_an_event_id_goes_before_everything_else() -> None:
    assert read_start("earliest", 5) == Start(event_id=5)


@pytest.mark.parametrize("start", [-1, True, "yesterday", FIRST_DAY])
def test_what_is_no_start_is_refused(start: object) -> None:
    with pytest.raises(InvalidRequest):
        read_start(start, None)  # type: ignore[arg-type]
