"""Whatever is published to `@schedule`: it is taken or refused, and the broker goes on."""

from __future__ import annotations

import base64
import struct
from random import Random
from typing import Any

import pytest
from crc32c import crc32c

from onward.errors import MessageTooLarge
from onward.log.memory_disk import MemoryDisk
from onward.message.batch import encode_batch
from onward.protocol.payloads import Durability, publish_head
from onward.schedule.state import FIRED
from onward.testing.clock import START_MS, ManualClock

from .asking import until
from .speaking import open_broker, turns
from .waiting import DAY_MS, Schedule, small_parts

TEN_YEARS_MS = 10 * 366 * DAY_MS


@pytest.mark.parametrize(
    "due_at_ms", [START_MS + TEN_YEARS_MS, 253_402_300_800_000, 2**62, 2**63 - 1]
)
async def test_a_time_too_far_ahead_is_refused_and_never_clamped(due_at_ms: int) -> None:
    schedule = await Schedule.of(await open_broker())
    assert await schedule.refused(due_at_ms - START_MS) == "invalid_request"
    assert schedule.broker.status()["scheduled"] == 0
    await schedule.broker.stop()


@pytest.mark.parametrize("due_at_ms", [0, -1, -(2**62), -(2**63) + 1])
async def test_times_long_ago_fire_at_once(due_at_ms: int) -> None:
    schedule = await Schedule.of(await open_broker())
    await schedule.add(due_at_ms - START_MS)
    await schedule.settled()
    assert [(one.due_at_ms, one.time_ms) for one in schedule.fired()] == [(due_at_ms, START_MS)]
    await schedule.broker.stop()


@pytest.mark.parametrize(
    ("columns", "code"),
    [
        ({"due_at_ms": None}, "invalid_request"),
        ({"due_at_ms": [START_MS, None]}, "invalid_request"),
        ({"topics": None}, "invalid_request"),
        ({"topics": ["orders", None]}, "invalid_request"),
        ({"topics": ["orders", ""]}, "invalid_name"),
        ({"topics": ["orders", "@schedule"]}, "invalid_name"),
        ({"topics": ["orders", "@trace"]}, "invalid_name"),
        ({"topics": ["orders", "no spaces"]}, "invalid_name"),
        ({"topics": ["orders", "x" * 10_000]}, "invalid_name"),
        ({"uniques": ["k", "k"]}, "invalid_request"),
        ({"uniques": ["k", ""]}, "invalid_request"),
        ({"uniques": ["k", "x" * 513]}, "invalid_request"),
        ({"uniques": ["k", "@recurring/daily"]}, "invalid_name"),
        ({"uniques": ["k", None], "replaces": [-1, -1]}, "invalid_request"),
        ({"uniques": ["k", "l"], "replaces": [-1, 0]}, "invalid_request"),
        ({"uniques": ["k", "l"], "replaces": [-1, 7]}, "invalid_request"),
        ({"replaces": [-1, -1]}, "invalid_request"),
        ({"schedule_ids": [0, 1]}, "invalid_request"),
    ],
)
async def test_columns_that_make_no_sense_refuse_the_whole_batch(
    columns: dict[str, Any], code: str
) -> None:
    schedule = await Schedule.of(await open_broker())
    sane: dict[str, Any] = {"due_at_ms": [START_MS] * 2, "topics": ["orders"] * 2}
    asked = {name: one for name, one in (sane | columns).items() if one is not None}
    answer = await schedule.speaker.publish("@schedule", [b"a", b"b"], **asked)
    assert answer == code
    await schedule.settled()
    assert schedule.numbers() == []
    assert schedule.broker.status()["scheduled"] == 0
    assert await schedule.add(0) == 0
    await schedule.broker.stop()


async def test_a_batch_without_messages_is_refused() -> None:
    schedule = await Schedule.of(await open_broker())
    packed = bytearray(encode_batch([b"a"], due_at_ms=[START_MS], topics=["orders"]))
    struct.pack_into("<I", packed, 16, 0)
    assert await said(schedule, signed(packed)) != "published"
    assert await schedule.add(0) == 0
    await schedule.broker.stop()


def signed(packed: bytearray) -> bytes:
    """Return a batch with the checksum that it should have."""
    struct.pack_into("<I", packed, 8, crc32c(memoryview(packed)[12:]))
    return bytes(packed)


async def said(schedule: Schedule, batch: bytes) -> str:
    """Return what a batch to `@schedule` is answered with."""
    speaker = schedule.speaker
    request_id = speaker.new_id()
    head = publish_head(
        request_id, "@schedule", durability=Durability.DEFAULT, batch_bytes=len(batch)
    )
    speaker.transport.write(head + batch)
    await until(lambda: speaker.of(request_id) or speaker.is_lost)
    if speaker.is_lost:
        return "lost"
    answer = speaker.answer(request_id)
    return answer if isinstance(answer, str) else "published"


@pytest.mark.slow
@pytest.mark.parametrize("compression", [None, "zstd"])
async def test_lies_in_a_batch_are_taken_or_refused_and_the_broker_goes_on(
    compression: Any,
) -> None:
    random = Random(7)
    broker = await open_broker()
    schedule = await Schedule.of(broker)
    answers: dict[str, int] = {}
    for _ in range(1_500):
        packed = bytearray(
            encode_batch(
                [b"hello", b"world"], keys=["a", None], headers=[{"a": "b"}, None],
                due_at_ms=[START_MS + 5, START_MS + 50], topics=["orders", "others"],
                uniques=["u", None], replaces=[-1, None], compression=compression,
            )
        )  # fmt: skip
        for _ in range(random.randint(1, 3)):
            at = random.randrange(12, len(packed))
            packed[at] = random.choice((0, 1, 0x7F, 0xFF, random.randrange(256)))
        answer = await said(schedule, signed(packed))
        answers[answer] = answers.get(answer, 0) + 1
        assert broker.failure is None
        if schedule.speaker.is_lost:
            schedule = await Schedule.of(broker)
    assert answers["published"]
    assert answers["invalid_request"]
    await schedule.passes(DAY_MS)
    await turns()
    assert broker.failure is None
    first = await schedule.add(10, topic="after")
    await schedule.passes(10)
    assert schedule.numbers("after") == [first]
    await broker.stop()


@pytest.mark.parametrize(
    "asked",
    [
        {"op": "schedule.cancel"},
        {"op": "schedule.cancel", "ids": [-1]},
        {"op": "schedule.cancel", "ids": [2**63]},
        {"op": "schedule.cancel", "ids": ["1"]},
        {"op": "schedule.cancel", "ids": [1.5]},
        {"op": "schedule.cancel", "ids": list(range(10_001))},
        {"op": "schedule.move", "id": 0},
        {"op": "schedule.move", "at_ms": 5},
        {"op": "schedule.move", "id": 0, "unique": "k", "at_ms": 5},
        {"op": "schedule.move", "id": 0, "at_ms": 2**62},
        {"op": "schedule.move", "id": 0, "at_ms": 1e300},
        {"op": "schedule.move", "id": 0, "at_ms": "tomorrow"},
        {"op": "schedule.show"},
        {"op": "schedule.show", "id": None},
        {"op": "schedule.list", "limit": 0},
        {"op": "schedule.list", "limit": 10**9},
        {"op": "schedule.list", "after": [1]},
        {"op": "schedule.calendar", "from_ms": 5, "until_ms": 5, "step_ms": 1_000},
        {"op": "schedule.calendar", "from_ms": 0, "until_ms": 2**60, "step_ms": 1_000},
        {"op": "schedule.calendar", "from_ms": 0, "until_ms": 5_000, "step_ms": 0},
        {"op": "recurring.set", "name": "r", "topic": "t", "body": "", "every_ms": 1},
        {"op": "recurring.set", "name": "r", "topic": "t", "body": "", "cron": "x", "zone": "UTC"},
        {"op": "recurring.set", "name": "r", "topic": "@trace", "body": "", "every_ms": 60_000},
        {"op": "recurring.set", "name": "", "topic": "t", "body": "", "every_ms": 60_000},
        {"op": "recurring.pause", "name": "nobody"},
    ],
)
async def test_questions_that_make_no_sense_are_refused(asked: dict[str, Any]) -> None:
    schedule = await Schedule.of(await open_broker())
    await schedule.add(1_000)
    op = asked.pop("op")
    answer = await schedule.speaker.request(op, **asked)
    assert answer in ("invalid_request", "invalid_name", "protocol_error")
    await schedule.passes(1_000)
    assert schedule.numbers() == [0]
    await schedule.broker.stop()


@pytest.mark.parametrize("unique", ["", "nobody", "x" * 100_000, "\udcff", "@recurring/r"])
async def test_keys_of_any_kind_are_simply_not_found(unique: str) -> None:
    schedule = await Schedule.of(await open_broker())
    if unique == "\udcff":
        unique = "\ufffd"
    shown = await schedule.ask("schedule.show", unique=unique)
    assert shown["state"] == "not_found"
    await schedule.broker.stop()


async def test_nobody_else_can_say_that_something_has_fired() -> None:
    """A batch that looks like a fired one, under the id of the broker itself, changes nothing."""
    disk, clock = MemoryDisk(), ManualClock()
    broker = await open_broker(disk, clock=clock)
    schedule = await Schedule.of(broker)
    await schedule.add(1_000)
    await schedule.speaker.publish(
        "orders", [b"forged"], producer_id=FIRED, sequence=9, schedule_ids=[10**6],
        time_ms=clock.now_ms() + DAY_MS,
    )  # fmt: skip
    await broker.stop()
    broker = await open_broker(disk, clock=clock)
    schedule = await Schedule.of(broker)
    assert (await schedule.show(0))["state"] == "waiting"
    await schedule.passes(1_000)
    assert schedule.fired()[-1].body == b"1000"
    await broker.stop()


# --- how large a body may be ---------------------------------------------------------------------

MIB = 1 << 20


async def limited(**limits: int) -> Schedule:
    """Return a schedule with topics that take bodies of so many bytes."""
    schedule = await Schedule.of(await open_broker())
    for name, limit in limits.items():
        await schedule.ask("topic.create", topic=name, message_bytes_max=limit)
    return schedule


@pytest.mark.parametrize("compression", [None, "zstd"])
async def test_the_limit_of_the_target_holds_and_is_named(compression: str | None) -> None:
    schedule = await limited(small=10, large=8 * MIB)
    packed = {"compression": compression}
    with pytest.raises(MessageTooLarge, match="of 11 bytes is too large: topic 'small' takes 10"):
        await schedule.add(1_000, topic="small", bodies=[b"x" * 11], **packed)
    with pytest.raises(MessageTooLarge, match="of 11 bytes is too large: topic 'small' takes 10"):
        await schedule.add(
            1_000, 1_000, topic=["large", "small"], bodies=[b"x" * 100, b"x" * 11], **packed
        )
    with pytest.raises(MessageTooLarge, match=f"topic 'large' takes {8 * MIB}"):
        await schedule.add(1_000, topic="large", bodies=[b"x" * (8 * MIB + 1)], **packed)
    with pytest.raises(MessageTooLarge, match=f"topic 'new' takes {4 * MIB}"):
        await schedule.add(1_000, topic="new", bodies=[b"x" * (4 * MIB + 1)], **packed)
    assert schedule.broker.status()["scheduled"] == 0
    assert "new" not in schedule.broker.catalogue.by_name
    await schedule.add(
        1_000, 1_000, topic=["large", "small"], bodies=[b"x" * 11, b"x" * 10], **packed
    )
    await schedule.passes(1_000)
    assert [len(one.body) for one in schedule.fired("small")] == [10]
    await schedule.broker.stop()


async def test_a_raised_limit_holds_for_what_is_scheduled_from_the_log_and_from_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_parts(monkeypatch, tail=2)
    schedule = await limited(large=8 * MIB)
    bodies = [bytes([number]) * (8 * MIB) for number in range(3)]
    for body in bodies:
        await schedule.add(DAY_MS, topic="large", bodies=[body])
    await schedule.settled()
    assert schedule.broker.status()["schedule_runs"]
    await schedule.passes(DAY_MS)
    assert [one.body for one in schedule.fired("large")] == bodies
    await schedule.broker.stop()


async def test_the_limit_of_the_target_holds_for_a_recurring_message() -> None:
    schedule = await limited(small=10)
    fields = {"name": "tick", "topic": "small", "every_ms": 1_000}
    with pytest.raises(MessageTooLarge, match="of 11 bytes is too large: topic 'small' takes 10"):
        await schedule.ask("recurring.set", body=base64.b64encode(b"x" * 11).decode(), **fields)
    assert (await schedule.ask("recurring.list"))["recurring"] == []
    await schedule.ask("recurring.set", body=base64.b64encode(b"x" * 10).decode(), **fields)
    await schedule.broker.stop()


async def test_what_was_accepted_fires_after_its_topic_got_a_lower_limit() -> None:
    schedule = await limited(orders=100)
    number = await schedule.add(1_000, bodies=[b"x" * 100])
    moved = await schedule.add(1_000, bodies=[b"y" * 100])
    body = base64.b64encode(b"z" * 100).decode()
    await schedule.ask("recurring.set", name="tick", topic="orders", every_ms=1_000, body=body)
    await schedule.ask("topic.change", topic="orders", message_bytes_max=10)
    assert (await schedule.move(moved, 500))["state"] == "moved"
    for _ in range(2):
        await schedule.passes(1_000)
    assert [one.body[:1] for one in schedule.fired()] == [b"y", b"x", b"z", b"z"]
    assert number in schedule.numbers()
    assert await schedule.refused(1_000, bodies=[b"x" * 11]) == "message_too_large"
    await schedule.broker.stop()
