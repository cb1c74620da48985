"""Which offsets fired messages got: exact, at a cost that does not grow with the topic."""

from __future__ import annotations

from random import Random

import pytest

from onward.broker.deciding import Found
from onward.broker.fired_offsets import FiredOffsets
from onward.log.memory_disk import MemoryDisk
from onward.testing.clock import ManualClock

from .speaking import open_broker
from .waiting import DAY_MS, Schedule, small_parts

TOPICS = ("orders", "mails")


async def with_plain(schedule: Schedule, topic: str) -> None:
    """Publish a message that never waited: fired ones stand between such."""
    request_id = schedule.speaker.say_publish(topic, [b"plain"])
    await schedule.receipt(request_id)


async def check_all(schedule: Schedule, count: int) -> None:
    """Compare what is answered for each id with what the topics hold."""
    expected = {
        one.number: (topic, one.offset)
        for topic in TOPICS
        for one in schedule.fired(topic)
        if one.body != b"plain"
    }
    assert len(expected) == count
    reply = await schedule.ask("schedule.cancel", ids=list(range(count)))
    told = {one["id"]: (one["topic"], one["offset"]) for one in reply["results"]}
    assert told == expected
    for number in range(0, count, 17):
        shown = await schedule.show(number)
        assert (shown["state"], shown["topic"], shown["offset"]) == ("fired", *expected[number])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("tail", [4, 1_000])
async def test_every_fired_message_is_told_with_its_topic_and_offset(
    monkeypatch: pytest.MonkeyPatch, seed: int, tail: int
) -> None:
    small_parts(monkeypatch, tail=tail)
    random, disk, clock = Random(seed), MemoryDisk(), ManualClock()
    schedule = await Schedule.of(await open_broker(disk, clock=clock))
    count = 0
    for _ in range(30):
        size = random.randrange(1, 8)
        delays = [random.choice((0, 500, 500, random.randrange(5_000))) for _ in range(size)]
        await schedule.add(*delays, topic=[random.choice(TOPICS) for _ in delays])
        count += size
        if random.random() < 0.5:
            await with_plain(schedule, random.choice(TOPICS))
        if random.random() < 0.3:
            await schedule.passes(random.randrange(1_000))
    await schedule.passes(10_000)
    await check_all(schedule, count)
    await schedule.broker.stop()
    # A restart forgets nothing of it: neither what was built nor what is in the log only.
    schedule = await Schedule.of(await open_broker(disk, clock=clock))
    await schedule.settled()
    await check_all(schedule, count)
    await schedule.broker.stop()


@pytest.mark.parametrize("is_late", [False, True])
async def test_what_a_look_costs_does_not_grow_with_the_topic(*, is_late: bool) -> None:
    """Each message is an entry of its own: of 2,000 entries few are looked at for one id."""
    schedule = await Schedule.of(await open_broker())
    schedule.broker.scheduling._step_rows = 1
    setattr(schedule.broker.scheduling, "_pace", lambda size, count: None)  # noqa: B010
    step_ms = 0 if is_late else 10
    for start in range(0, 2_000, 100):
        await schedule.add(*(number * step_ms for number in range(start, start + 100)))
    for _ in range(100):
        await schedule.passes(20_000 // 100)
    fired = schedule.fired()
    assert len(fired) == 2_000
    assert schedule.broker.log.entries(
        schedule.broker.catalogue.by_name["orders"].number, 1_999, end_offset=2_000, limit=1
    )[0][:2] == (1_999, 1), "each is an entry of its own"
    for one in Random(1).sample(fired, 20):
        question = FiredOffsets(schedule.broker)
        found = Found("fired", one.number, one.due_at_ms, "orders")
        assert await question.find([found]) == {one.number: one.offset}
        assert question._looks <= 30
    everything = [Found("fired", one.number, one.due_at_ms, "orders") for one in fired]
    question = FiredOffsets(schedule.broker)
    assert len(await question.find(everything)) == 2_000
    assert question._looks == 2_000
    await schedule.broker.stop()


async def test_a_topic_that_is_gone_and_an_id_that_it_never_had_have_no_offset() -> None:
    schedule = await Schedule.of(await open_broker())
    await schedule.add(1_000, 1_000, topic=["orders", "mails"])
    await schedule.passes(1_000)
    await schedule.ask("topic.delete", topic="orders")
    await schedule.settled()
    shown = await schedule.show(0)
    assert (shown["state"], shown.get("offset")) == ("fired", None)
    at_ms = schedule.clock.now_ms()
    others = [Found("fired", number, at_ms, "mails") for number in (0, 1, 7)]
    assert await FiredOffsets(schedule.broker).find(others) == {1: 0}
    await schedule.broker.stop()


async def test_damage_costs_an_answer_its_offset_and_nothing_else() -> None:
    disk = MemoryDisk()
    schedule = await Schedule.of(await open_broker(disk))
    await schedule.add(1_000)
    await schedule.passes(1_000)
    topic = schedule.broker.catalogue.by_name["orders"]
    span = schedule.broker.log.plan(topic.number, 0, bytes_max=0)
    assert span is not None
    span.segment.file.write(span.position + 64, [bytes(64)])
    (result,) = (await schedule.ask("schedule.cancel", ids=[0]))["results"]
    assert (result["state"], result["topic"]) == ("fired", "orders")
    assert "offset" not in result
    await schedule.broker.stop()


def ids_files(disk: MemoryDisk) -> list[str]:
    return [one for one in disk.list_folder("log") if ".ids" in one]


async def test_files_of_ids_go_with_the_log_and_come_only_with_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_parts(monkeypatch, tail=4)
    disk, clock = MemoryDisk(), ManualClock()
    schedule = await Schedule.of(await open_broker(disk, clock=clock))
    for _ in range(4):
        await schedule.add(1_000, 2_000)
    await schedule.passes(10_000)
    assert len(ids_files(disk)) >= 1
    await schedule.broker.stop()
    # What was built after the last checkpoint, or is half written, is built again.
    built_end = schedule.broker.scheduling.state.built_end
    for name in (f"scheduled-{built_end}-{built_end + 9}-5.ids", "scheduled-0.ids.tmp"):
        disk.open(f"log/{name}", create=True).close()
    kept = len(ids_files(disk)) - 2
    schedule = await Schedule.of(await open_broker(disk, clock=clock))
    assert len(ids_files(disk)) == kept
    ids = schedule.broker.scheduling.files._ids
    ids.forget(oldest_ms=clock.now_ms() - DAY_MS)
    assert len(ids_files(disk)) == kept
    ids.forget(oldest_ms=clock.now_ms())
    assert ids_files(disk) == []
    # Without them the decision is the same; only where it went is not known any more.
    assert (await schedule.cancel(0, 1)) == ["fired", "fired"]
    await schedule.broker.stop()


async def test_a_damaged_file_of_ids_costs_an_answer_its_offset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_parts(monkeypatch, tail=4)
    disk = MemoryDisk()
    schedule = await Schedule.of(await open_broker(disk))
    for _ in range(4):
        await schedule.add(1_000, 2_000)
    await schedule.passes(10_000)
    assert "offset" in await schedule.show(0)
    for name in ids_files(disk):
        disk.open(f"log/{name}").write(0, [bytes(400)])
    assert (await schedule.show(0))["state"] == "fired"
    assert "offset" not in await schedule.show(0)
    await schedule.broker.stop()
