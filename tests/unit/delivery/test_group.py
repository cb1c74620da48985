"""All groups: a fold that a checkpoint saves and loads."""

import msgspec
import pytest

from onward.delivery import group as group_module
from onward.delivery.filter import Filter
from onward.delivery.group import Group, Groups
from onward.delivery.position import Position
from onward.delivery.ranges import Range
from onward.delivery.record import GroupRecord
from onward.delivery.trace import Trace
from onward.errors import Corruption


def row(did: str, group: str, topic: str, *ranges: Range, **more: object) -> Trace:
    return msgspec.convert(
        {"did": did, "at_ms": 0, "group": group, "topic": topic, "ranges": ranges, **more}, Trace
    )


def some_groups() -> Groups:
    groups = Groups()
    groups.change(GroupRecord("g1", topics=("a", "b"), filter=Filter(headers={"x": "1"})))
    groups.change(GroupRecord("g2", topics=("a",)))
    for one in (
        row("started", "g1", "a", offset=0),
        row("started", "g1", "b", offset=5),
        row("started", "g2", "a", offset=2),
        row("acked", "g1", "a", (0, 3), (7, 9)),
        row("retried", "g1", "a", (3, 5), attempt=2, due_at_ms=99),
        row("dead", "g1", "b", (6, 8), cause="bad", attempt=17, member="ann"),
        row("moved", "g2", "a", member="ann", offset=7),
    ):
        groups.apply(one)
    return groups


def names(groups: list[Group]) -> list[str]:
    return [group.record.name for group in groups]


def test_rows_reach_the_share_they_are_about():
    groups = some_groups()
    g1, g2 = groups.by_name["g1"], groups.by_name["g2"]
    assert (g1.shares["a"].cursor, g1.shares["b"].cursor, g2.shares["a"].cursor) == (3, 5, 2)
    assert (g1.shares["a"].retries, list(g1.shares["b"].dead)) == ({3: 99, 4: 99}, [6, 7])
    assert g2.positions == {"ann": {"a": Position(7)}}


def test_rows_of_unknown_groups_and_topics_are_ignored():
    groups = some_groups()
    before = groups.save()
    for one in (
        row("acked", "nobody", "a", (0, 9)),
        row("acked", "g2", "b", (0, 9)),
        row("forked", "nobody", "", source="g1"),
        row("forked", "g1", "", source="nobody"),
        row("forked", "g1", "", source="g1"),
        row("published_by", "", "", producer_id=7, client="c", host="h", pid=1),
        row("started", "g1", "a", offset=99),
        row("praised", "g1", "a", (0, 9)),
    ):
        groups.apply(one)
    assert groups.save() == before


def test_saved_groups_are_the_same_after_loading():
    groups, loaded = some_groups(), Groups()
    loaded.load(groups.save())
    assert loaded.save() == groups.save()
    assert names(loaded.of_topic("a")) == names(groups.of_topic("a")) == ["g1", "g2"]
    share = loaded.by_name["g1"].shares["a"]
    assert share.take(99, end_offset=12) == [(5, 7), (9, 12)]
    assert share.next_due_ms() == 99


def test_no_groups_are_saved_and_loaded_too():
    groups = Groups()
    groups.load(Groups().save())
    assert groups.by_name == {}


@pytest.mark.parametrize("saved", [b"", b"\x00", b"\xff" * 9, b"[]", b"\x91\x91\x01"])
def test_bytes_that_were_not_saved_are_told_as_corruption(saved: bytes):
    with pytest.raises(Corruption, match="saved groups"):
        Groups().load(saved)


def test_a_fork_is_a_deep_copy():
    groups = some_groups()
    groups.change(GroupRecord("trial", topics=("a", "b")))
    groups.apply(row("started", "trial", "a", offset=9))
    groups.apply(row("forked", "trial", "", source="g1"))
    source, copy = groups.by_name["g1"], groups.by_name["trial"]
    assert [share.save() for share in copy.shares.values()] == [
        share.save() for share in source.shares.values()
    ]
    groups.apply(row("acked", "trial", "a", (0, 100)))
    groups.apply(row("purged", "trial", "b", (0, 100)))
    assert (source.shares["a"].cursor, list(source.shares["b"].dead)) == (3, [6, 7])
    groups.change(GroupRecord("listeners", mode="broadcast", topics=("a",)))
    groups.apply(row("forked", "listeners", "", source="g2"))
    groups.apply(row("moved", "listeners", "a", member="ann", offset=50))
    assert groups.by_name["g2"].positions == {"ann": {"a": Position(7)}}


def test_what_a_fork_has_taken_over_is_ready_in_it():
    groups = some_groups()
    groups.by_name["g1"].shares["a"].take(2, end_offset=12)
    groups.change(GroupRecord("trial", topics=("a",)))
    groups.apply(row("forked", "trial", "", source="g1"))
    assert groups.by_name["trial"].shares["a"].take(9, end_offset=12) == [(5, 7), (9, 12)]


def test_a_changed_record_keeps_what_the_group_has_done():
    groups = some_groups()
    groups.change(GroupRecord("g1", topics=("a", "b", "c"), paused=True))
    group = groups.by_name["g1"]
    assert (group.record.paused, group.shares["a"].cursor) == (True, 3)
    assert names(groups.of_topic("c")) == ["g1"]
    assert names(groups.of_topic("b")) == ["g1"]


def test_a_record_without_a_topic_removes_what_the_group_had_of_it():
    groups = some_groups()
    groups.change(GroupRecord("g1", topics=("a", "c")))
    group = groups.by_name["g1"]
    assert (list(group.shares), group.shares["a"].cursor) == (["a"], 3)
    assert names(groups.of_topic("b")) == []
    groups.apply(row("acked", "g1", "b", (0, 100)))
    assert list(group.shares) == ["a"]


def test_a_deleted_group_is_gone_and_its_name_is_free_again():
    groups = some_groups()
    groups.change(GroupRecord("g1", deleted=True))
    assert list(groups.by_name) == ["g2"]
    assert (names(groups.of_topic("a")), names(groups.of_topic("b"))) == (["g2"], [])
    groups.change(GroupRecord("g1", topics=("a",)))
    assert groups.by_name["g1"].shares == {}
    groups.change(GroupRecord("nobody", deleted=True))
    assert "nobody" not in groups.by_name


def test_a_topic_that_ended_takes_shares_and_positions_with_it():
    groups = some_groups()
    groups.apply(row("moved", "g2", "b", member="bob", offset=1))
    groups.apply(row("moved", "g2", "a", member="bob", offset=1))
    groups.drop_topic("a")
    assert list(groups.by_name["g1"].shares) == ["b"]
    assert groups.by_name["g2"].positions == {"bob": {"b": Position(1)}}
    assert groups.by_name["g1"].record.topics == ("a", "b")
    assert names(groups.of_topic("a")) == ["g1", "g2"]
    groups.apply(row("acked", "g1", "a", (0, 50)))
    assert "a" not in groups.by_name["g1"].shares


def test_a_share_of_a_topic_that_no_record_names_is_found_until_it_ends():
    groups = some_groups()
    groups.apply(row("started", "g2", "z", offset=0))
    assert names(groups.of_topic("z")) == ["g2"]
    groups.drop_topic("z")
    assert groups.of_topic("z") == []


def test_after_a_restart_nothing_is_taken():
    groups = some_groups()
    share = groups.by_name["g2"].shares["a"]
    assert share.take(5, end_offset=9) == [(2, 7)]
    groups.restart()
    assert share.take(9, end_offset=9) == [(2, 9)]


def test_the_position_that_moved_longest_ago_goes_when_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(group_module, "POSITIONS_MAX", 2)
    groups = some_groups()
    for member in ("bob", "ann", "eve"):
        groups.apply(row("moved", "g2", "a", member=member, offset=9))
    assert list(groups.by_name["g2"].positions) == ["ann", "eve"]


def test_a_position_keeps_the_number_of_its_topic():
    groups, loaded = some_groups(), Groups()
    groups.apply(row("moved", "g2", "a", member="bob", offset=9, number=5))
    loaded.load(groups.save())
    assert loaded.by_name["g2"].positions == {
        "ann": {"a": Position(7)},
        "bob": {"a": Position(9, number=5)},
    }


def test_positions_that_were_saved_without_numbers_are_read():
    record = GroupRecord("g", mode="broadcast", topics=("a",))
    groups = Groups()
    groups.load(msgspec.msgpack.encode([[record, [], {"ann": {"a": 7}}]]))
    assert groups.by_name["g"].positions == {"ann": {"a": Position(7)}}
