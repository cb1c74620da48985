"""`onward top`: what two samples show, and the screen of a real broker."""

import json
import re
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from onward.cli.top import Sample, make_view
from onward.protocol.operations.groups import (
    GroupDescription,
    MemberDescription,
    PositionDescription,
    ShareDescription,
)
from onward.protocol.operations.topics import TopicDescription

Onward = Callable[..., subprocess.CompletedProcess[bytes]]


def sample(at_s: float, **counts: int) -> Sample:
    published, finished = counts.get("published", 0), counts.get("finished", 0)
    share = ShareDescription(
        topic="orders", end=published, backlog=published - finished, oldest_at_ms=1_000
    )
    member = MemberDescription(member="ann", state="active", acked=finished, leased=3)
    busy = GroupDescription(
        group="billing", topics=(share,), members=(member,), member_count=1,
        backlog=share.backlog, expired_leases=counts.get("expired", 0),
    )  # fmt: skip
    topics = [
        TopicDescription(topic="idle", number=1, state="active", messages=10**6, next_offset=10**6),
        TopicDescription(
            topic="orders", number=2, state="active", messages=published, next_offset=published
        ),
    ]
    return Sample(at_s, {"node": "here"}, topics, [GroupDescription(group="audit"), busy])


def test_rates_are_what_changed_between_two_samples():
    before, now = sample(10.0), sample(12.0, published=100, finished=40)
    view = make_view(before, now, now_ms=61_000, rows_max=10)
    assert [(row["topic"], row["published/s"]) for row in view.topics] == [
        ("orders", 50.0),
        ("idle", 0.0),
    ]
    first, second = view.groups
    assert (first["group"], first["backlog"], first["done/s"]) == ("billing", 60, 20.0)
    assert (first["oldest"], first["members"]) == ("1m", 1)
    assert second["group"] == "audit"
    assert view.members[0]["acked/s"] == 20.0


def test_the_first_line_sums_up_the_broker(onward: Onward):
    onward("publish", "orders", "x", "--delay", "1h")
    said = onward("top", "--once", "--interval", "100ms").stdout.decode()
    assert re.search(r"published \S+/s   done \S+/s   backlog \d+   dead \d+   scheduled", said)
    assert "disk free" in said


def test_leases_that_ran_out_are_a_warning():
    before, now = sample(0.0, expired=2), sample(1.0, expired=5)
    view = make_view(before, now, now_ms=0, rows_max=10)
    assert view.warnings == ["group billing: 3 leases ran out"]
    assert make_view(now, now, now_ms=0, rows_max=10).warnings == []


def test_a_group_that_was_reset_has_no_negative_rate():
    before, now = sample(0.0, published=100, finished=100), sample(1.0, published=100)
    view = make_view(before, now, now_ms=0, rows_max=10)
    assert view.groups[0]["done/s"] == 0.0


def test_each_table_has_at_most_so_many_rows():
    view = make_view(sample(0.0), sample(1.0), now_ms=0, rows_max=1)
    assert (len(view.topics), len(view.groups), len(view.members)) == (1, 1, 1)


def standing(at_s: float, *positions: PositionDescription) -> Sample:
    group = GroupDescription(group="screens", mode="broadcast", positions=positions)
    return Sample(at_s, {"node": "here"}, [], [group])


def position(member: str, offset: int | None, **fields: Any) -> PositionDescription:
    backlog = None if offset is None else 100 - offset
    return PositionDescription(
        member=member, topic="prices", offset=offset, end=100, backlog=backlog, **fields
    )


def test_members_of_broadcasts_are_ranked_by_what_is_left_for_them():
    before = standing(0.0, position("north", 10), position("south", 90))
    now = standing(
        2.0, position("file", None, connected=True), position("south", 100, connected=True),
        position("north", 30, oldest_at_ms=1_000), position("new", 50),
    )  # fmt: skip
    view = make_view(before, now, now_ms=61_000, rows_max=10)
    columns = ("member", "group", "state", "offset", "backlog", "oldest", "done/s")
    assert [tuple(row[name] for name in columns) for row in view.positions] == [
        ("north", "screens", "away", 30, 70, "1m", 10.0),
        ("new", "screens", "away", 50, 50, None, 0.0),
        ("south", "screens", "connected", 100, 0, None, 5.0),
        ("file", "screens", "connected", "unknown", None, None, None),
    ]


def test_a_position_that_was_unknown_has_no_rate():
    before = standing(0.0, position("named", None), position("filed", 90), position("first", 0))
    now = standing(1.0, position("named", 90), position("filed", None), position("first", 40))
    view = make_view(before, now, now_ms=0, rows_max=10)
    rates = {row["member"]: row["done/s"] for row in view.positions}
    assert rates == {"named": None, "filed": None, "first": 40.0}


def test_the_screen_shows_where_members_of_a_broadcast_are(onward: Onward):
    onward("publish", "topcast", "0", "1")
    joining = ("--group", "screens", "--mode", "broadcast", "--start", "earliest")
    onward("consume", "topcast", *joining, "--member", "north", "--count", "1")
    shown = onward("top", "--once", "--interval", "10ms").stdout.decode()
    row = next(line for line in shown.splitlines() if line.startswith("north"))
    assert row.split()[:6] == ["north", "screens", "away", "topcast", "1", "1"]


def test_one_screen_of_a_real_broker_is_plain_text_in_a_pipe(onward: Onward):
    onward("publish", "topped", "0", "1")
    onward("group", "create", "topping", "topped")
    shown = onward("top", "--once", "--interval", "10ms").stdout.decode()
    assert "\x1b" not in shown
    assert "PUBLISHED/S" in shown
    row = next(line for line in shown.splitlines() if line.startswith("topping"))
    assert row.split()[:4] == ["topping", "idle", "0", "2"]


def test_one_screen_clears_nothing_on_a_terminal(onward: Onward, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("onward.cli.top.is_terminal", lambda: True)
    assert b"\x1b" not in onward("top", "--once", "--interval", "10ms").stdout


def test_one_screen_for_machines_is_one_line_of_json(onward: Onward):
    onward("publish", "topped", "0")
    (line,) = onward("top", "--once", "--interval", "10ms", "--json").stdout.splitlines()
    assert "topped" in [row["topic"] for row in json.loads(line)["topics"]]
