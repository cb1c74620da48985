"""The life line of a message, from rows of the trace and what the broker says now."""

from __future__ import annotations

import pytest

from onward.client.explanation import Explanation, LifeStory, ScheduledOrigin, span
from onward.delivery.trace import Trace, encode_rows
from onward.message.message import Message
from onward.protocol.operations.messages import MessageInGroup, Publisher
from onward.protocol.operations.schedule import ScheduledDescription

SECOND = 1_000
AT_9_S = "1970-01-01T00:00:09.000Z"
BEYOND = "it was too much to find out whether it waits behind one of its key"


def story_of(*rows: Trace, topic: str = "orders", offset: int = 7) -> LifeStory:
    story = LifeStory(topic, offset)
    story.add(encode_rows(rows))
    return story


def row(did: str, at_ms: int, **fields: object) -> Trace:
    given: dict[str, object] = {"group": "billing", "topic": "orders", "ranges": ((5, 9),)}
    return Trace(did=did, at_ms=at_ms, **(given | fields))  # type: ignore[arg-type]


def in_group(**fields: object) -> MessageInGroup:
    given: dict[str, object] = {"group": "billing", "attempt": 1}
    return MessageInGroup(**(given | fields))  # type: ignore[arg-type]


def sentences(story: LifeStory, group: str = "billing", state: str = "finished") -> list[str]:
    states = [in_group(group=group, state=state)]
    (life,) = [one for one in story.lives(states) if one.group == group]
    return [event.sentence() for event in life.events]


def test_the_rows_of_other_messages_are_passed_over():
    story = story_of(
        row("acked", 1, ranges=((0, 7), (8, 20))),
        row("acked", 2, topic="refunds"),
        row("acked", 3, topic="orders-eu"),
        row("published_by", 4, ranges=(), producer_id=3, client="orders"),
    )
    assert sentences(story) == []


def test_each_row_that_holds_the_offset_is_told_in_order():
    story = story_of(
        row("retried", 10, member="ann", attempt=1, due_at_ms=10_010, cause="no luck"),
        row("expired", 20, member="bob", attempt=2, due_at_ms=20),
        row("lost", 30, member="cid", attempt=3),
        row("acked", 40, member="dan", ranges=((0, 1), (5, 9)), took_ms=(99, 12)),
    )
    assert sentences(story) == [
        "attempt 1 by ann failed, again in 10 s: no luck",
        "the lease of bob ran out in attempt 2, again at once",
        "cid was lost in attempt 3, again at once",
        "acked by dan after 12 ms",
    ]


def test_an_attempt_that_does_not_count_is_told_by_its_own_number():
    story = story_of(
        row("retried", 10, member="ann", attempt=0, counted=False, due_at_ms=10_010, cause="shut"),
        row("retried", 20, member="ann", attempt=1),
        row("retried", 30, member="ann", attempt=1, counted=False),
    )
    assert sentences(story) == [
        "attempt 1 by ann does not count, again in 10 s: shut",
        "attempt 1 by ann failed, again at once",
        "attempt 2 by ann does not count, again at once",
    ]


def test_dead_letters_tell_why_and_what_became_of_them():
    story = story_of(
        row("dead", 1, member="ann", attempt=3, cause="no such order"),
        row("redriven", 2),
        row("dead", 3, attempt=1, cause="still none"),
        row("purged", 4, cause="an operator"),
    )
    assert sentences(story) == [
        "dead by ann after 3 attempts: no such order",
        "redriven: to be delivered again",
        "dead after 1 attempt: still none",
        "purged: an operator",
    ]


def test_what_moves_a_whole_group_is_told_too():
    story = story_of(
        row("started", 1, ranges=(), offset=9),
        row("reset", 2, ranges=(), offset=0),
        row("replayed", 3),
        row("skipped", 4, cause="retention"),
        row("filtered", 5),
    )
    assert sentences(story) == [
        "the group began at offset 9",
        "the group was reset to offset 0",
        "replayed: to be delivered again",
        "skipped: retention",
        "filtered: the group does not want it",
    ]


def test_a_fork_inherits_what_happened_to_its_source():
    story = story_of(
        row("acked", 1, member="ann", took_ms=(3,)),
        Trace(did="forked", at_ms=2, group="trial", source="billing"),
        Trace(did="forked", at_ms=2, group="other", source="unrelated"),
        row("replayed", 3, group="trial"),
    )
    assert sentences(story, "trial") == [
        "acked by ann after 3 ms",
        "the group was forked from billing",
        "replayed: to be delivered again",
    ]
    assert sentences(story) == ["acked by ann after 3 ms"]


def test_a_position_of_a_broadcast_is_told_whenever_it_crosses_the_message():
    moves = [row("moved", at, ranges=(), member="ann", offset=at) for at in (7, 8, 9, 6, 5, 20)]
    story = story_of(*moves, row("moved", 10, ranges=(), member="bob", offset=100))
    assert sentences(story, state="broadcast") == [
        "the position of ann is past it",
        "the position of ann is before it again",
        "the position of ann is past it",
        "the position of bob is past it",
    ]


def test_a_fork_of_a_broadcast_knows_the_positions_of_its_source():
    story = story_of(
        row("moved", 1, ranges=(), member="ann", offset=8),
        Trace(did="forked", at_ms=2, group="trial", source="billing"),
        row("moved", 3, group="trial", ranges=(), member="ann", offset=9),
    )
    assert sentences(story, "trial", state="broadcast") == [
        "the position of ann is past it",
        "the group was forked from billing",
    ]
    state = in_group(group="trial", state="broadcast", passed=1, positions=1)
    (_, life) = story.lives([state])
    assert life.sentence() == "each member reads by itself: 1 of 1 stored position is past it"


def test_a_group_that_is_no_more_is_still_told_about():
    (life,) = story_of(row("acked", 1)).lives([])
    assert (life.group, life.state) == ("billing", "gone")
    assert life.sentence() == "the group is no more"


def test_rows_that_nobody_can_read_tell_nothing():
    story = LifeStory("orders", 7)
    story.add([b'"orders"', b'{"topic":"orders"}', b'\xff "orders"'])
    assert story.lives([]) == ()


def test_a_life_line_that_never_ends_is_bounded():
    rows = [row("retried", at, attempt=at) for at in range(5_000)]
    (life,) = story_of(*rows).lives([in_group(state="ready")])
    assert [event.attempt for event in life.events] == list(range(4_000, 5_000))


def test_how_it_is_now_is_a_sentence_for_every_state():
    now = 1_000_000
    states: list[tuple[dict[str, object], str]] = [
        ({"state": "leased", "member": "ann", "lease_ms_left": 12_340, "attempt": 2},
         "leased by ann for another 12.3 s, attempt 2"),
        ({"state": "taken", "attempt": 2},
         "on its way to a member, or its outcome to the disk, attempt 2"),
        ({"state": "waiting", "attempt": 4, "due_at_ms": now + 90_000},
         "retry 3 due in 1m30s (1970-01-01T00:18:10.000Z)"),
        ({"state": "ready", "attempt": 2}, "ready to be delivered, attempt 2"),
        ({"state": "fresh", "attempt": 0}, "not delivered yet"),
        ({"state": "dead", "cause": "why", "died_at_ms": 5}, "dead: why"),
        ({"state": "broadcast"}, "each member reads by itself: none has stored a position"),
        ({"state": "broadcast", "passed": 2, "positions": 3},
         "each member reads by itself: 2 of 3 stored positions are past it"),
        ({"state": "missed", "attempt": 2}, "it was gone before it was consumed"),
        ({"state": "missed", "member": "ann", "lease_ms_left": 9_000},
         "it was gone before it was consumed; ann still has it, for another 9 s"),
        ({"state": "finished"}, "finished"),
    ]  # fmt: skip
    for state, wanted in states:
        (life,) = LifeStory("orders", 7).lives([in_group(**state)])
        assert life.sentence(now_ms=now) == wanted


def test_what_holds_a_message_back_is_said():
    states: list[tuple[dict[str, object], str]] = [
        ({"state": "ready", "attempt": 2, "paused": True},
         "waits because the group is paused, attempt 2"),
        ({"state": "fresh", "paused": True},
         "not delivered yet: waits because the group is paused"),
        ({"state": "behind", "behind": 5}, "waits behind orders/5 of its key"),
        ({"state": "behind", "behind": 5, "paused": True},
         "waits behind orders/5 of its key; the group is paused"),
        ({"state": "waiting", "attempt": 2, "due_at_ms": 9_000, "behind": 5, "paused": True},
         f"retry 1 due in 9 s ({AT_9_S}); waits behind orders/5 of its key; the group is paused"),
        ({"state": "fresh", "beyond": True},
         f"not delivered yet; {BEYOND}"),
    ]  # fmt: skip
    for state, wanted in states:
        (life,) = LifeStory("orders", 7).lives([in_group(**state)])
        assert life.sentence() == wanted


def test_the_text_for_people_counts_from_the_publish():
    story = story_of(
        row("retried", 1_500, member="ann", attempt=1, due_at_ms=11_500),
        row("acked", 12_000, member="bob", took_ms=(20,)),
    )
    life = Explanation(
        topic="orders", offset=7, asked_at_ms=61_000,
        message=Message("orders", 7, b"hello", published_at_ms=SECOND, event_id=12),
        node="n1", durability="disk", published_by=Publisher("shop", "web-1", 4711),
        groups=story.lives([in_group(state="finished")]), is_complete=False,
    )  # fmt: skip
    assert life.lines() == [
        "orders/7",
        "  published by shop on web-1, pid 4711 at 1970-01-01T00:00:01.000Z, 1m ago",
        "  stored as event 12, 5 bytes, on disk, node n1",
        "  group billing: acked by bob after 20 ms",
        "       +500 ms  attempt 1 by ann failed, again in 10 s",
        "         +11 s  acked by bob after 20 ms",
        "  the oldest part of the trace is gone: more may have happened before",
    ]
    assert life.group("billing") == life.groups[0]
    assert life.group("audit") is None


def test_a_message_that_retention_took_is_told_from_its_first_row_on():
    story = story_of(row("acked", 5_000), row("skipped", 4_000))
    lives = story.lives([in_group(state="finished")])
    life = Explanation(topic="orders", offset=7, asked_at_ms=9_000, groups=lives)
    assert (
        life.lines()[1]
        == "  published, no longer stored: retention took it away, or a repair gave it up"
    )
    assert life.lines()[3].split() == ["+1", "s", "acked"]


def test_durations_for_people_have_two_units_at_most():
    shown = [span(one) for one in (0, 999, 1_000, 59_940, 61_000, 3_600_000, 90_061_000)]
    assert shown == ["0 ms", "999 ms", "1 s", "59.9 s", "1m1s", "1h", "1d1h"]


def test_what_is_only_in_memory_is_not_said_to_be_on_disk():
    message = Message("orders", 7, b"x", published_at_ms=SECOND, event_id=12)
    life = Explanation(
        topic="orders", offset=7, asked_at_ms=SECOND, message=message, durability="memory"
    )
    assert life.lines()[2] == "  stored as event 12, 1 byte, in memory and not yet on disk"


def test_a_retry_that_waits_tells_why_it_failed():
    story = story_of(row("retried", 0, attempt=1, due_at_ms=60_000, cause="no luck"))
    (life,) = story.lives([in_group(state="waiting", due_at_ms=60_000)])
    assert life.sentence(now_ms=0).endswith(": no luck")


# --- the schedule ------------------------------------------------------------------------------


def test_a_message_that_was_scheduled_tells_by_whom_when_and_how_late_it_fired():
    origin = ScheduledOrigin(
        schedule_id=17, due_at_ms=60_000, fired_at_ms=60_004, scheduled_at_ms=SECOND,
        scheduled_by=Publisher("shop", "web-1", 4711),
    )  # fmt: skip
    life = Explanation(
        topic="orders", offset=7, asked_at_ms=61_004, scheduled=origin,
        message=Message("orders", 7, b"x", published_at_ms=60_004, event_id=12),
    )  # fmt: skip
    scheduled, published = life.lines()[1:3]
    assert scheduled == (
        "  scheduled by shop on web-1, pid 4711 at 1970-01-01T00:00:01.000Z for "
        "1970-01-01T00:01:00.000Z (schedule id 17), fired 4 ms after its time"
    )
    assert published == "  published at 1970-01-01T00:01:00.004Z, 1 s ago"


def test_a_time_that_was_past_is_not_told_as_lateness():
    origin = ScheduledOrigin(
        schedule_id=17, due_at_ms=0, fired_at_ms=60_004, scheduled_at_ms=60_000
    )
    assert origin.sentence().endswith("(schedule id 17), which was past: fired 4 ms later")


def test_who_scheduled_a_message_may_be_forgotten_and_that_is_said():
    origin = ScheduledOrigin(schedule_id=17, due_at_ms=60_000, fired_at_ms=60_004)
    assert origin.sentence() == (
        "scheduled for 1970-01-01T00:01:00.000Z (schedule id 17), fired 4 ms after its time; "
        "who scheduled it is no longer stored"
    )


@pytest.mark.parametrize(
    ("is_stored", "sentence"),
    [
        (True, "finished: acked or left out; the trace no longer reaches back"),
        (
            False,
            (
                "finished: acked, left out, or dropped by retention before it was delivered; "
                "the trace no longer reaches back"
            ),
        ),
    ],
)
def test_how_a_message_ended_before_the_oldest_row_is_said_to_be_unknown(
    is_stored: bool, sentence: str
):
    states = [in_group(state="finished")]
    (life,) = story_of().lives(states, is_complete=False, is_stored=is_stored)
    assert life.sentence() == sentence
    (life,) = story_of().lives(states)
    assert life.sentence() == "finished"


@pytest.mark.parametrize(
    ("last", "sentence"),
    [
        (row("acked", 40, member="ann", took_ms=(12,)), "acked by ann after 12 ms"),
        (row("skipped", 40, cause="dropped by retention"), "skipped: dropped by retention"),
    ],
)
def test_an_end_that_the_trace_still_tells_is_told_though_its_oldest_part_is_gone(
    last: Trace, sentence: str
):
    states = [in_group(state="finished"), in_group(group="mail", state="fresh")]
    billing, mail = story_of(last).lives(states, is_complete=False, is_stored=False)
    assert billing.sentence() == sentence
    assert (mail.cause, mail.sentence()) == ("", "not delivered yet")


@pytest.mark.parametrize(
    ("became", "line"),
    [
        (
            ScheduledDescription(id=5, state="waiting", topic="orders", at_ms=60_000),
            "waits until 1970-01-01T00:01:00.000Z, another 50 s, for topic orders",
        ),
        (ScheduledDescription(id=5, state="fired", topic="orders", offset=3), "fired as orders/3"),
        (
            ScheduledDescription(id=5, state="fired", topic="orders"),
            "fired to topic orders; at which offset is no longer known",
        ),
        (
            ScheduledDescription(id=5, state="fired"),
            "fired; at which offset is no longer known",
        ),
        (ScheduledDescription(id=5, state="cancelled"), "cancelled: it never fires"),
        (
            ScheduledDescription(id=5, state="replaced"),
            "replaced: another message, or another time, has its place",
        ),
        (ScheduledDescription(id=5, state="not_found"), "nothing is known of it"),
    ],
)
def test_an_id_of_the_schedule_tells_what_became_of_it(became: ScheduledDescription, line: str):
    life = Explanation(topic="@schedule", offset=5, asked_at_ms=10_000, became=became)
    assert life.lines() == [
        "@schedule/5", "  scheduled; who did it is no longer stored", f"  {line}",
    ]  # fmt: skip
