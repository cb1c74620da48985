"""A group's settings: nonsense is refused by name, and a wish is compared with what is."""

import math
from typing import Any

import msgspec
import pytest

from onward.delivery.filter import Filter, FilterWish
from onward.delivery.record import GroupRecord, GroupWish, StartAt, check_member_name
from onward.delivery.retry import RetryPolicy
from onward.errors import InvalidName, InvalidRequest


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"lease_ms": 999}, "a lease is"),
        ({"lease_ms": 86_400_001}, "a lease is"),
        ({"lease_ms": "30s"}, "lease_ms"),
        ({"lease_ms": True}, "lease_ms"),
        ({"topics": tuple(f"t{i}" for i in range(1_001))}, "1000 topics"),
        ({"topics": ("t", "t")}, "named twice"),
        ({"topics": ("a b",)}, "topic name"),
        ({"topics": ("@trace",)}, "topic '@trace' of the system"),
        ({"mode": "private"}, "mode"),
        ({"start": "yesterday"}, "start"),
        ({"start": StartAt()}, "start"),
        ({"start": StartAt(offset=1, time_ms=1)}, "start"),
        ({"start": StartAt(offset=-1)}, "start"),
        ({"retry": RetryPolicy(kind="fixed", delay_ms=-1)}, "delay_ms"),
        ({"at_most_once": True}, "at most once"),
        ({"filter": Filter(tags_any=("",))}, "filter"),
        ({"tenants": {"a": 0.0}}, "weight of tenant 'a'"),
        ({"tenants": {"a": math.nan}}, "weight"),
        ({"tenants": {"a": math.inf}}, "weight"),
        ({"tenants": {"a": 1e7}}, "weight"),
        ({"tenants": {str(i): 1.0 for i in range(10_001)}}, "10000 tenants"),
        ({"key_rate": -1.0}, "key_rate"),
        ({"key_rate": math.nan}, "key_rate"),
        ({"key_concurrency": -1}, "key_concurrency"),
        ({"offline": ("",)}, "member name"),
        ({"offline": tuple(map(str, range(10_001)))}, "offline"),
        ({"mode": "broadcast", "priorities": True}, "broadcast"),
    ],
)
def test_a_record_with_nonsense_is_refused_by_name(settings: dict[str, Any], named: str):
    with pytest.raises(InvalidRequest, match=named):
        GroupRecord("billing", **settings).check()


@pytest.mark.parametrize("name", ["", "a b", "@x", "x" * 129, None, 7])
def test_a_group_needs_a_name_that_is_one(name: Any):
    with pytest.raises(InvalidRequest, match="group"):
        GroupRecord(name).check()


def test_the_name_of_a_group_is_checked_as_a_name():
    with pytest.raises(InvalidName):
        GroupRecord("a/b").check()


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "ordered"}, {"priorities": True}, {"tenants": {}}, {"key_rate": 0.5},
        {"key_concurrency": 1},
    ],
)  # fmt: skip
def test_a_group_that_looks_at_keys_is_choosy(settings: dict[str, Any]):
    assert GroupRecord("g", **settings).check().is_choosy


@pytest.mark.parametrize("mode", ["shared", "exclusive", "broadcast"])
def test_a_plain_group_is_not_choosy_and_pays_nothing(mode: Any):
    assert not GroupRecord("g", mode=mode).check().is_choosy


def test_a_record_is_the_same_after_a_journey_as_json():
    record = GroupRecord(
        "g", mode="ordered", topics=("a", "b"), start=StartAt(time_ms=5), tenants={"x": 2.0},
        retry=RetryPolicy(kind="fixed"), filter=Filter(tags_any=("x",)), offline=("ann",),
        created_at_ms=7,
    ).check()  # fmt: skip
    assert msgspec.json.decode(msgspec.json.encode(record), type=GroupRecord) == record
    assert msgspec.json.encode(GroupRecord("g")) == b'{"name":"g"}'


def test_a_topic_of_the_system_can_be_broadcast():
    record = GroupRecord("g", mode="broadcast", topics=("@trace",))
    assert record.check() is record


def test_an_empty_wish_is_content_with_any_group():
    record = GroupRecord("g", mode="ordered", lease_ms=5_000)
    assert GroupWish().differs(record) == ""
    assert GroupWish().changed(record) == record


def test_a_wish_makes_a_group_of_it():
    wish = GroupWish(mode="exclusive", start="latest", lease_ms=60_000, key_rate=0)
    record = wish.new_record("g", ("a", "b"), 7)
    assert record == GroupRecord(
        "g", mode="exclusive", start="latest", lease_ms=60_000, topics=("a", "b"), created_at_ms=7
    )
    assert wish.differs(record) == ""


def test_a_broadcast_begins_at_the_latest_unless_somebody_wishes_otherwise():
    assert GroupWish(mode="broadcast").new_record("g", ("a",), 0).start == "latest"
    early = GroupWish(mode="broadcast", start="earliest").new_record("g", ("a",), 0)
    assert early.start == "earliest"
    assert GroupWish().new_record("g", ("a",), 0).start == "earliest"


@pytest.mark.parametrize(
    ("settings", "what"),
    [({"mode": "ordered"}, "order by key"), ({"key_concurrency": 2}, "key_concurrency")],
)
def test_keys_cannot_be_kept_apart_at_most_once(settings: dict[str, Any], what: str):
    named = f"at most once and {what} exclude each other"
    with pytest.raises(InvalidRequest, match=named):
        GroupWish(at_most_once=True, **settings).new_record("g", ("a",), 0)
    with pytest.raises(InvalidRequest, match=named):
        GroupWish(at_most_once=True).changed(GroupRecord("g", **settings))
    once = GroupRecord("g", at_most_once=True, retry=RetryPolicy(kind="none"))
    with pytest.raises(InvalidRequest, match=named):
        GroupWish(**settings).changed(once)
    assert GroupWish(at_most_once=True, key_rate=5.0).new_record("g", ("a",), 0).key_rate == 5


def test_a_part_of_a_filter_that_a_wish_does_not_name_stays():
    record = GroupRecord("g", filter=Filter(("a",), ("b",), {"x": "1"}))
    by_tag = GroupWish(filter=FilterWish(tags_any=("c",)))
    assert by_tag.changed(record).filter == Filter(("c",), ("b",), {"x": "1"})
    assert by_tag.differs(by_tag.changed(record)) == ""
    assert GroupWish(filter=FilterWish(headers={})).changed(record).filter == Filter(("a",), ("b",))
    sent = msgspec.json.encode(GroupWish(filter=FilterWish(headers={})))
    assert sent == b'{"filter":{"headers":{}}}'


@pytest.mark.parametrize(
    ("wish", "sentence"),
    [
        (GroupWish(mode="ordered"), "group 'g' has mode shared, not ordered"),
        (GroupWish(lease_ms=1_000), "group 'g' has lease 30s, not 1s"),
        (GroupWish(priorities=True), "group 'g' has priorities False, not True"),
        (
            GroupWish(filter=FilterWish(("x",))),
            "group 'g' has filter {}, not {\"tags_any\":[\"x\"]}",
        ),
        (GroupWish(tenants={}), "group 'g' has tenants None, not {}"),
        (
            GroupWish(retry=RetryPolicy(kind="none")),
            "group 'g' has retry ladder, not none",
        ),
    ],
)  # fmt: skip
def test_a_wish_that_differs_is_told_by_its_setting(wish: GroupWish, sentence: str):
    assert wish.differs(GroupRecord("g")) == sentence


def test_the_start_of_a_group_never_differs():
    assert GroupWish(start="latest").differs(GroupRecord("g", start="earliest")) == ""


def test_a_wish_changes_only_what_it_names():
    record = GroupRecord("g", mode="ordered", paused=True, topics=("a",))
    changed = GroupWish(lease_ms=9_000).changed(record)
    assert changed == msgspec.structs.replace(record, lease_ms=9_000)


def test_at_most_once_means_no_retries():
    record = GroupWish(at_most_once=True).new_record("g", ("a",), 0)
    assert record.retry.limit == 1
    assert GroupWish(at_most_once=True).differs(record) == ""
    with pytest.raises(InvalidRequest, match="at most once"):
        GroupWish(at_most_once=True, retry=RetryPolicy()).new_record("g", ("a",), 0)


def test_a_group_becomes_no_broadcast_and_a_broadcast_no_other_group():
    for before, after in (("shared", "broadcast"), ("broadcast", "ordered")):
        with pytest.raises(InvalidRequest, match=f"is {before} and cannot become {after}"):
            GroupWish(mode=after).changed(GroupRecord("g", mode=before))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wish",
    [
        GroupWish(lease_ms=1),
        GroupWish(mode="x"),  # type: ignore[arg-type]
        GroupWish(retry="10s"),  # type: ignore[arg-type]
        GroupWish(filter=FilterWish(tags_any=("a",) * 101)),
        GroupWish(start=StartAt()),
    ],
)
def test_a_wish_with_nonsense_is_refused_before_it_travels(wish: GroupWish):
    with pytest.raises(InvalidRequest):
        wish.check()


def test_a_wish_that_is_for_no_group_yet_names_none():
    with pytest.raises(InvalidRequest, match="^group: a lease is 1s to 1d, not 1ms$"):
        GroupWish(lease_ms=1).check()


def test_a_wish_that_makes_sense_is_returned_by_its_check():
    wish = GroupWish(mode="broadcast", retry=RetryPolicy(kind="fixed"))
    assert wish.check() is wish


@pytest.mark.parametrize("name", ["", "x" * 257, "a\nb", "\x1b[0m"])
def test_a_member_needs_a_name_that_people_can_read(name: str):
    with pytest.raises(InvalidRequest, match="member name"):
        check_member_name(name)
