"""How many messages wait, as `status` counts them: exactly those that will fire."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from onward.broker.schedule_scan import ScheduleScan
from onward.log.memory_disk import MemoryDisk
from onward.schedule.state import ScheduleState
from onward.testing.clock import ManualClock
from onward.testing.disk import FaultyDisk

from .speaking import open_broker, settings_with
from .waiting import HOUR_MS, Schedule, small_parts

SETTINGS = settings_with(log={"segment_bytes_max": 8_192, "checkpoint_rows": 20})


def scheduled(schedule: Schedule) -> int:
    """Return the count that people see, which must be what the parts hold."""
    scheduling = schedule.broker.scheduling
    assert scheduling.waiting_count == ScheduleScan(scheduling).recount()
    count = scheduling.status()["scheduled"]
    assert isinstance(count, int)
    return count


async def test_a_cancelled_message_is_not_counted_as_scheduled() -> None:
    schedule = await Schedule.of(await open_broker())
    first = await schedule.add(*[HOUR_MS] * 4)
    await schedule.cancel(first, first + 2)
    assert scheduled(schedule) == 2
    await schedule.cancel(first, first + 2)
    assert scheduled(schedule) == 2
    assert len((await schedule.ask("schedule.list"))["scheduled"]) == 2
    await schedule.broker.stop()


async def test_a_replaced_or_moved_message_is_counted_once() -> None:
    schedule = await Schedule.of(await open_broker())
    first = await schedule.add(HOUR_MS, uniques=["k"])
    await schedule.add(2 * HOUR_MS, uniques=["k"], replaces=[-1])
    assert scheduled(schedule) == 1
    other = await schedule.add(HOUR_MS)
    await schedule.move(other, 2 * HOUR_MS)
    assert scheduled(schedule) == 2
    assert (await schedule.move(first, HOUR_MS))["state"] == "replaced"
    assert scheduled(schedule) == 2
    await schedule.passes(HOUR_MS)
    assert (scheduled(schedule), schedule.numbers()) == (2, [])
    await schedule.passes(HOUR_MS)
    assert scheduled(schedule) == 0
    await schedule.broker.stop()


async def test_where_only_cancelled_messages_are_left_nothing_is_scheduled_or_due() -> None:
    schedule = await Schedule.of(await open_broker())
    first = await schedule.add(HOUR_MS, HOUR_MS)
    await schedule.cancel(first, first + 1)
    status = schedule.broker.scheduling.status()
    assert (status["scheduled"], status["next_due_at_ms"], status["due_now"]) == (0, 0, 0)
    await schedule.broker.stop()


async def test_a_checkpoint_of_a_version_that_did_not_count_is_counted_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_parts(monkeypatch)
    disk, clock = MemoryDisk(), ManualClock()
    schedule = await Schedule.of(await open_broker(disk, clock=clock, settings=SETTINGS))
    first = await schedule.add(*[HOUR_MS] * 4, 10, 20)
    await schedule.settled()
    await schedule.cancel(first, first + 4)
    await schedule.add(HOUR_MS, HOUR_MS)
    await schedule.passes(30)
    save = ScheduleState.save

    def save_without(state: ScheduleState) -> bytes:
        return msgspec.msgpack.encode(msgspec.msgpack.decode(save(state)) | {"waiting": None})

    monkeypatch.setattr(ScheduleState, "save", save_without)
    await schedule.broker.stop()
    monkeypatch.undo()
    broker = await open_broker(disk, clock=clock, settings=SETTINGS)
    assert scheduled(await Schedule.of(broker)) == 5
    await broker.stop()


class Model:
    """The ids that wait, and the time when each is due."""

    def __init__(self) -> None:
        self.due_at_ms: dict[int, int] = {}
        self.by_key: dict[str, int] = {}

    def add(self, first: int, *due_at_ms: int) -> None:
        self.due_at_ms |= dict(enumerate(due_at_ms, first))

    def fire(self, now_ms: int) -> None:
        self.due_at_ms = {one: at for one, at in self.due_at_ms.items() if at > now_ms}

    def some(self, random: Random) -> int | None:
        """Return an id, which waits or does not."""
        highest = max(self.due_at_ms, default=-1)
        return None if highest < 0 else random.randrange(highest + 1)


async def _act(schedule: Schedule, model: Model, random: Random) -> None:
    """Do one thing, and say the same to the model."""
    now_ms, delay_ms = schedule.clock.now_ms(), random.randrange(1, 60)
    what = random.choice(["add", "add", "cancel", "cancel", "replace", "move", "pass"])
    if what == "add":
        delays_ms = [random.randrange(1, 60) for _ in range(random.randint(1, 6))]
        topics = [random.choice(["orders", "others"]) for _ in delays_ms]
        first = await schedule.add(*delays_ms, topic=topics)
        model.add(first, *(now_ms + one for one in delays_ms))
    elif what == "replace":
        key = random.choice("abc")
        number = await schedule.add(delay_ms, uniques=[key], replaces=[-1])
        model.due_at_ms.pop(model.by_key.get(key, -1), None)
        model.by_key[key] = number
        model.add(number, now_ms + delay_ms)
    elif what == "pass":
        await schedule.passes(random.randrange(20))
        model.fire(schedule.clock.now_ms())
    elif (number := model.some(random) or 0) in model.due_at_ms and what == "move":
        moved = await schedule.move(number, delay_ms)
        assert moved["state"] == "moved"
        del model.due_at_ms[number]
        model.by_key |= {key: moved["id"] for key, one in model.by_key.items() if one == number}
        model.add(moved["id"], now_ms + delay_ms)
    else:
        ids = range(number, number + 3)
        await schedule.cancel(*ids)
        for one in ids:
            model.due_at_ms.pop(one, None)


@pytest.mark.parametrize("seed", range(12))
async def test_the_count_is_that_of_a_model_through_merges_and_restarts(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    small_parts(monkeypatch)
    random = Random(seed)
    disk, clock, model = FaultyDisk(Random(seed)), ManualClock(), Model()
    schedule = await Schedule.of(await open_broker(disk, clock=clock, settings=SETTINGS))
    for _ in range(60):
        await _act(schedule, model, random)
        assert scheduled(schedule) == len(model.due_at_ms)
        if random.random() < 0.1:
            await schedule.settled()
            if random.random() < 0.5:
                await schedule.broker.stop()
            else:
                schedule.broker.fail(RuntimeError("the power went"))
                disk.crash(unsynced="lost")
            schedule = await Schedule.of(await open_broker(disk, clock=clock, settings=SETTINGS))
            assert scheduled(schedule) == len(model.due_at_ms)
    await schedule.passes(HOUR_MS)
    assert scheduled(schedule) == 0
    assert schedule.broker.scheduling.state.serial > 4, "runs are built and merged meanwhile"
    await schedule.broker.stop()
