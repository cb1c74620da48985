from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onward.errors import InvalidName, InvalidRequest
from onward.schedule.recurring import (
    BODY_BYTES_MAX,
    EVERY_MS_MAX,
    EVERY_MS_MIN,
    LATE_MS_MAX,
    Recurring,
)

SETTINGS = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
BERLIN, NEW_YORK = "Europe/Berlin", "America/New_York"
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


def ms(text: str, zone: str = "UTC", *, fold: int = 0) -> int:
    moment = datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone), fold=fold)
    return round(moment.timestamp() * 1000)


def shown(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


def cron(expression: str, zone: str = "UTC", **more: Any) -> Recurring:
    return Recurring("r", "t", cron=expression, zone=zone, **more).check()


def every(every_ms: int, **more: Any) -> Recurring:
    return Recurring("r", "t", every_ms=every_ms, **more).check()


def runs(one: Recurring, start_ms: int, end_ms: int) -> list[int]:
    found: list[int] = []
    while (start_ms := one.next_run(start_ms)) <= end_ms:
        found.append(start_ms)
    return found


# Spring: 2027-03-28 02:00 becomes 03:00 in Berlin, 2027-03-14 02:00 becomes 03:00 in New York.
# Autumn: 2027-10-31 03:00 becomes 02:00 in Berlin, 2027-11-07 02:00 becomes 01:00 in New York.
SPRING = [
    (BERLIN, "2027-03-28", "2027-03-28 01:00:00"),
    (NEW_YORK, "2027-03-14", "2027-03-14 07:00:00"),
]
AUTUMN = [
    (BERLIN, "2027-10-31", "30 2 * * *", "2027-10-31 00:30:00"),
    (NEW_YORK, "2027-11-07", "30 1 * * *", "2027-11-07 05:30:00"),
]


@pytest.mark.parametrize(("zone", "day", "right_after"), SPRING)
def test_a_run_in_the_skipped_hour_comes_right_after_it(
    zone: str, day: str, right_after: str
) -> None:
    start_ms = ms(day, zone)
    found = runs(cron("30 2 * * *", zone), start_ms, start_ms + 40 * HOUR_MS)
    assert shown(found[0]) == right_after
    assert len(found) == 2
    assert found[1] == found[0] + 23 * HOUR_MS + HOUR_MS // 2


@pytest.mark.parametrize(("zone", "day", "right_after"), SPRING)
def test_several_runs_in_the_skipped_hour_come_once(zone: str, day: str, right_after: str) -> None:
    start_ms = ms(day, zone)
    found = runs(cron("0,20,40 2 * * *", zone), start_ms, start_ms + 20 * HOUR_MS)
    assert [shown(at) for at in found] == [right_after]


@pytest.mark.parametrize(("zone", "day", "expression", "first_time"), AUTUMN)
def test_a_run_in_the_hour_that_comes_twice_comes_once(
    zone: str, day: str, expression: str, first_time: str
) -> None:
    start_ms = ms(day, zone)
    found = runs(cron(expression, zone), start_ms, start_ms + 20 * HOUR_MS)
    assert [shown(at) for at in found] == [first_time]


@pytest.mark.parametrize(("zone", "day", "expression", "first_time"), AUTUMN)
def test_seen_from_the_second_time_of_an_hour_its_runs_are_over(
    zone: str, day: str, expression: str, first_time: str
) -> None:
    hour = expression.split()[1]
    within_ms = ms(f"{day} 0{hour}:10", zone, fold=1)
    following_ms = cron(expression, zone).next_run(within_ms)
    assert following_ms == ms(f"{day} 0{hour}:30", zone, fold=1) + DAY_MS
    assert cron(expression, zone).runs_due(within_ms - 1, within_ms) == []


@pytest.mark.parametrize(("zone", "day", "expected"), [
    (BERLIN, "2027-03-28", 23), (NEW_YORK, "2027-03-14", 23),
    (BERLIN, "2027-10-31", 25), (NEW_YORK, "2027-11-07", 25),
])  # fmt: skip
def test_every_hour_goes_on_with_real_time_when_clocks_change(
    zone: str, day: str, expected: int
) -> None:
    start_ms = ms(day, zone)
    found = runs(cron("30 * * * *", zone), start_ms, start_ms + expected * HOUR_MS)
    assert found == [start_ms + hour * HOUR_MS + HOUR_MS // 2 for hour in range(expected)]


def test_the_same_time_of_day_stays_the_same_through_the_year() -> None:
    found = runs(cron("0 9 * * *", BERLIN), ms("2027-01-01"), ms("2028-01-01"))
    assert len(found) == 365
    clocks = {datetime.fromtimestamp(at / 1000, ZoneInfo(BERLIN)).strftime("%H:%M") for at in found}
    assert clocks == {"09:00"}


def test_a_cron_of_four_years_finds_its_next_leap_day() -> None:
    assert shown(cron("0 0 29 2 *").next_run(ms("2096-02-29"))) == "2104-02-29 00:00:00"


@pytest.mark.parametrize(
    ("alias", "expression"),
    [("@hourly", "0 * * * *"), ("@daily", "0 0 * * *"), ("@weekly", "0 0 * * SUN"),
     ("@monthly", "0 0 1 * *"), ("@yearly", "0 0 1 1 *")],
)  # fmt: skip
def test_an_alias_is_the_expression_that_it_stands_for(alias: str, expression: str) -> None:
    now_ms = ms("2027-05-05 05:05")
    one, other = cron(alias, BERLIN), cron(expression, BERLIN)
    assert runs(one, now_ms, now_ms + 1000 * HOUR_MS) == runs(
        other, now_ms, now_ms + 1000 * HOUR_MS
    )


@pytest.mark.parametrize("zone", [
    "UTC", BERLIN, NEW_YORK, "Australia/Lord_Howe", "Africa/Cairo", "Asia/Kolkata", "Pacific/Apia",
    "America/Sao_Paulo", "Asia/Kathmandu",
])  # fmt: skip
@settings(SETTINGS, max_examples=60)
@given(data=st.data())
def test_the_next_run_is_the_same_from_wherever_one_asks_before_it(
    zone: str, data: st.DataObject
) -> None:
    expression = data.draw(
        st.sampled_from([
            "* * * * *", "*/15 * * * *", "30 * * * *", "0 0 * * *", "30 0 * * *", "30 1 * * *",
            "15,45 2 * * *", "0 2-3 * * *", "0 */3 * * *", "7 3 1 * *", "0 0 * * 5", "* 2 * * SUN",
            "0 9 L * *", "0 12 29 2 *", "0 9 * * MON#1",
        ])
    )  # fmt: skip
    one = cron(expression, zone)
    at_ms = ms("2026-11-01") + data.draw(st.integers(0, 800 * DAY_MS))
    run_ms = one.next_run(at_ms)
    assert run_ms > at_ms
    between_ms = data.draw(st.integers(at_ms, run_ms - 1))
    assert one.next_run(between_ms) == run_ms
    assert one.runs_due(at_ms, run_ms - 1) == []
    assert one.runs_due(at_ms, run_ms) == [run_ms]


@SETTINGS
@given(st.integers(1_000, 10**9), st.integers(0, 10**12), st.integers(0, 2 * 10**12))
def test_an_interval_has_runs_at_its_multiples_after_its_start(
    every_ms: int, start_ms: int, after_ms: int
) -> None:
    run_ms = every(every_ms, start_ms=start_ms).next_run(after_ms)
    assert run_ms > max(after_ms, start_ms)
    assert (run_ms - start_ms) % every_ms == 0
    assert run_ms - every_ms <= max(after_ms, start_ms)


def test_no_run_is_before_the_start() -> None:
    start_ms = ms("2027-06-01 12:00")
    assert cron("0 12 * * *", start_ms=start_ms).next_run(0) == start_ms + DAY_MS
    assert every(DAY_MS, start_ms=start_ms).next_run(0) == start_ms + DAY_MS
    assert every(DAY_MS, start_ms=start_ms).runs_due(0, start_ms + DAY_MS - 1) == []


@pytest.mark.parametrize("make", [cron("0 * * * *"), every(HOUR_MS)], ids=["cron", "every"])
def test_after_a_stop_only_the_latest_of_the_missed_runs_is_made_up_for(make: Recurring) -> None:
    stop_ms = ms("2027-01-01 00:30")
    assert make.runs_due(stop_ms, stop_ms + 100 * HOUR_MS) == [ms("2027-01-05 04:00")]
    again = ms("2027-01-05 04:00")
    assert make.runs_due(again, stop_ms + 100 * HOUR_MS) == []


@pytest.mark.parametrize("expression", ["0 * * * *", "every"])
def test_without_catching_up_a_missed_run_is_left_out_and_one_on_time_is_not(
    expression: str,
) -> None:
    make = (
        every(HOUR_MS, catch_up="none")
        if expression == "every"
        else cron(expression, catch_up="none")
    )
    hour = ms("2027-01-01 05:00")
    assert make.runs_due(hour - 100 * HOUR_MS, hour + LATE_MS_MAX + 1) == []
    assert make.runs_due(hour - 100 * HOUR_MS, hour + LATE_MS_MAX) == [hour]
    assert make.runs_due(hour - 1, hour) == [hour]


class Counted(Recurring, frozen=True):
    """A schedule that remembers from where it was asked for its next run."""

    asked: list[int] = msgspec.field(default_factory=list)

    def next_run(self, after_ms: int) -> int:
        self.asked.append(after_ms)
        return super().next_run(after_ms)


@pytest.mark.parametrize("expression", ["* * * * *", "* * * 1 *", "* 9 * * 1", "0 0 29 2 *"])
def test_decades_of_missed_runs_are_not_walked_through(expression: str) -> None:
    one = Counted("r", "t", cron=expression, zone=BERLIN)
    now_ms = ms("2056-12-24 12:34:56")
    (run_ms,) = one.runs_due(ms("2027-01-01"), now_ms)
    assert len(one.asked) < 150
    assert run_ms <= now_ms < one.next_run(run_ms)


def test_a_paused_or_deleted_schedule_has_no_run_to_make() -> None:
    assert every(1_000, paused=True).runs_due(0, 10_000) == []
    assert every(1_000, deleted=True).runs_due(0, 10_000) == []


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, "either a cron expression or an interval"),
        ({"cron": "* * * * *", "every_ms": 5000}, "either a cron expression or an interval"),
        ({"every_ms": EVERY_MS_MIN - 1}, "every_ms is 1000"),
        ({"every_ms": -5}, "every_ms is 1000"),
        ({"every_ms": EVERY_MS_MAX + 1}, "ten years"),
        ({"every_ms": float("nan")}, "Expected `int`"),
        ({"every_ms": "10s"}, "Expected `int`"),
        ({"cron": "61 * * * *"}, "cron '61 .*' has a bad minute"),
        ({"cron": "* * * *"}, "is not five fields"),
        ({"cron": "0 0 0 * * *"}, "is not five fields"),
        ({"cron": "@often"}, "is not five fields"),
        ({"cron": "* " * 2000}, "is not five fields"),
        ({"cron": "0 0 30 2 *"}, "bad day-of-month"),
        ({"cron": "0 0 */31 2 1#5"}, "never comes"),
        ({"cron": "0 9 * * *", "zone": "Europe/Atlantis"}, "time zone 'Europe/Atlantis' is not"),
        ({"cron": "0 9 * * *", "zone": "../../etc/passwd"}, "time zone"),
        ({"cron": "0 9 * * *", "zone": "/etc/localtime"}, "time zone"),
        ({"cron": "0 9 * * *", "zone": "Europe"}, "time zone"),
        ({"cron": "0 9 * * *", "zone": ""}, "time zone"),
        ({"cron": "0 9 * * *", "zone": "a\0b"}, "time zone"),
        ({"cron": "0 9 * * *", "zone": "x" * 10_000}, "time zone"),
        ({"cron": "0 9 * * *", "start_ms": -1}, "start_ms"),
        ({"cron": "0 9 * * *", "start_ms": 2**62}, "start_ms"),
        ({"every_ms": 5000, "catch_up": "all"}, "catch_up"),
        ({"every_ms": 5000, "priority": 256}, "priority"),
        ({"every_ms": 5000, "body": bytes(BODY_BYTES_MAX + 1)}, "body"),
        ({"every_ms": 5000, "body": "text"}, "Expected `bytes`"),
        ({"every_ms": 5000, "key": "k" * 1001}, "1000 characters"),
        ({"every_ms": 5000, "headers": {"k": "v" * 1001}}, "1000 characters"),
        ({"every_ms": 5000, "headers": {str(n): "" for n in range(101)}}, "at most 100 headers"),
        ({"every_ms": 5000, "headers": {"k": 5}}, "Expected `str"),
        ({"name": 7, "every_ms": 5000}, "Expected `str`"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_with_a_reason(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        Recurring(**{"name": "r", "topic": "t"} | fields).check()


@pytest.mark.parametrize("name", ["", ".", "a b", "x" * 129, "ä"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(InvalidName, match="name"):
        Recurring(name, "t", every_ms=5000).check()
    with pytest.raises(InvalidName, match="topic name"):
        Recurring("r", name, every_ms=5000).check()


def test_a_run_for_a_topic_of_the_system_is_refused() -> None:
    with pytest.raises(InvalidName, match="system"):
        Recurring("r", "@schedule", every_ms=5000).check()


@settings(SETTINGS, max_examples=400)
@given(st.text("0123456789*/-,#LW @SUNMO", max_size=24) | st.text(max_size=12))
def test_any_text_is_a_cron_expression_or_refused(text: str) -> None:
    try:
        one = Recurring("r", "t", cron=text, zone=BERLIN).check()
    except InvalidRequest:
        return
    assert one.next_run(ms("2027-01-01")) > ms("2027-01-01")


@settings(SETTINGS, max_examples=300)
@given(st.tuples(*[st.text("0123456789*/-,#L", min_size=1, max_size=5)] * 5).map(" ".join))
def test_any_five_fields_are_a_cron_expression_or_refused(text: str) -> None:
    try:
        one = Recurring("r", "t", cron=text, zone=NEW_YORK).check()
    except InvalidRequest:
        return
    assert one.next_run(ms("2027-01-01")) > ms("2027-01-01")


def test_a_moment_after_all_calendars_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no run after"):
        cron("0 9 * * *", BERLIN).next_run(2**62)


def test_a_schedule_goes_through_json_unchanged() -> None:
    one = cron(
        "0 9 * * *",
        BERLIN,
        body=b"\x00\xff",
        headers={"a": "b"},
        tag="x,y",
        priority=3,
        paused=True,
    )
    packed = msgspec.json.encode(one)
    assert msgspec.json.decode(packed, type=Recurring) == one
    assert msgspec.json.encode(every(5000)) == b'{"name":"r","topic":"t","every_ms":5000}'
