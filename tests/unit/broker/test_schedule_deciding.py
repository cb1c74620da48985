"""Cancel, move, replace: the answers are exact, and what they say is what happens."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from onward.broker.commit import InlineCommit
from onward.errors import AlreadyExists, Overloaded, Unavailable
from onward.testing.clock import ManualClock
from onward.testing.disk import FaultyDisk

from .asking import Operator, until
from .speaking import HeldCommit, SlowDisk, open_broker, turns
from .waiting import DAY_MS, HOUR_MS, Schedule, small_parts


@pytest.fixture(params=["in the tail", "in runs"])
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What is asked about waits in memory, or in files."""
    if request.param == "in runs":
        small_parts(monkeypatch, tail=1)
    return str(request.param)


async def opened(**options: Any) -> Schedule:
    return await Schedule.of(await open_broker(**options))


@pytest.mark.usefixtures("parts")
async def test_what_was_cancelled_never_fires_and_the_answers_say_what_became_of_each() -> None:
    schedule = await opened()
    await schedule.add(10, 1_000, 2_000)
    await schedule.settled()
    await schedule.passes(10)
    assert await schedule.cancel(0, 1, 99) == ["fired", "cancelled", "not_found"]
    assert await schedule.cancel(1) == ["cancelled"]
    await schedule.passes(HOUR_MS)
    assert schedule.numbers() == [0, 2]
    assert [(await schedule.show(one))["state"] for one in range(4)] == [
        "fired", "cancelled", "fired", "not_found",
    ]  # fmt: skip
    await schedule.broker.stop()


@pytest.mark.usefixtures("parts")
async def test_an_answer_that_says_fired_says_where() -> None:
    schedule = await opened()
    await schedule.speaker.publish("orders", [b"before"])
    await schedule.add(10, 20, 2_000)
    await schedule.settled()
    await schedule.passes(15)
    answer = await schedule.ask("schedule.cancel", ids=[0, 1])
    fired, cancelled = answer["results"]
    assert (fired["state"], fired["topic"], fired["offset"]) == ("fired", "orders", 1)
    assert cancelled["state"] == "cancelled"
    await schedule.broker.stop()


@pytest.mark.usefixtures("parts")
async def test_what_was_moved_fires_once_at_its_new_time_with_a_new_id() -> None:
    schedule = await opened()
    await schedule.add(1_000, 2_000)
    await schedule.settled()
    later = await schedule.move(0, HOUR_MS)
    sooner = await schedule.move(1, 10)
    assert [later["state"], sooner["state"]] == ["moved", "moved"]
    assert [later["id"], sooner["id"]] == [2, 3]
    assert (await schedule.move(0, 5))["state"] == "replaced"
    await schedule.passes(10)
    assert schedule.numbers() == [3]
    await schedule.passes(HOUR_MS)
    assert schedule.numbers() == [3, 2]
    assert [one.body for one in schedule.fired()] == [b"2000", b"1000"]
    await schedule.broker.stop()


@pytest.mark.usefixtures("parts")
async def test_a_key_that_waits_is_refused_until_it_has_fired_or_was_cancelled() -> None:
    schedule = await opened()
    await schedule.add(1_000, uniques=["order-7"])
    await schedule.settled()
    with pytest.raises(AlreadyExists, match="schedule id 0"):
        await schedule.add(5, uniques=["order-7"])
    await schedule.passes(1_000)
    assert await schedule.add(1_000, uniques=["order-7"]) == 1
    await schedule.settled()
    answer = await schedule.ask("schedule.cancel", uniques=["order-7", "other"])
    assert [(one["id"], one["state"]) for one in answer["results"]] == [
        (1, "cancelled"), (-1, "not_found"),
    ]  # fmt: skip
    assert await schedule.add(1_000, uniques=["order-7"]) == 2
    await schedule.passes(HOUR_MS)
    assert schedule.numbers() == [0, 2]
    await schedule.broker.stop()


@pytest.mark.usefixtures("parts")
async def test_a_later_publish_takes_the_place_of_what_waits_under_its_key() -> None:
    schedule = await opened()
    for number in range(5):
        assert await schedule.add(100, uniques=["k"], replaces=[-1]) == number
        await schedule.passes(50)
    assert schedule.numbers() == []
    await schedule.passes(50)
    assert schedule.numbers() == [4]
    states = [(await schedule.show(number))["state"] for number in range(5)]
    assert states == ["replaced"] * 4 + ["fired"]
    await schedule.broker.stop()


async def test_what_was_decided_holds_after_a_restart_from_a_checkpoint_and_from_the_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_parts(monkeypatch)
    disk, clock = FaultyDisk(Random(1)), ManualClock()
    for life in range(6):
        broker = await open_broker(disk, clock=clock)
        schedule = await Schedule.of(broker)
        first = await schedule.add(HOUR_MS, HOUR_MS, HOUR_MS, topic=f"topic-{life}")
        await schedule.add(HOUR_MS, topic=f"topic-{life}", uniques=["k"], replaces=[-1])
        assert await schedule.cancel(first) == ["cancelled"]
        assert (await schedule.move(first + 1, 2 * HOUR_MS))["state"] == "moved"
        if life % 2:
            await broker.housekeeping.checkpoint()
        broker.fail(RuntimeError("the power was cut"))
        disk.crash(unsynced="lost")
    broker = await open_broker(disk, clock=clock)
    schedule = await Schedule.of(broker)
    await schedule.passes(3 * HOUR_MS)
    for life in range(6):
        first = 5 * life
        keyed = [first + 3] if life == 5 else []
        assert schedule.numbers(f"topic-{life}") == [first + 2, *keyed, first + 4]
    await broker.stop()


async def test_a_checkpoint_between_the_commit_and_its_answer_forgets_no_replacement() -> None:
    """The fold of a checkpoint is that of its log, also while a round of decisions is under way."""
    disk, clock = FaultyDisk(Random(1)), ManualClock()
    commits: list[HeldCommit] = []

    def held(log: Any) -> HeldCommit:
        commits.append(HeldCommit(log))
        return commits[-1]

    async def release_all() -> None:
        for _ in range(20):
            await turns(5)
            while commits[-1].held:
                commits[-1].release()

    broker = await open_broker(disk, clock=clock, commit=held)
    schedule = await Schedule.of(broker)
    first = schedule.say([HOUR_MS], uniques=["k"])
    await release_all()
    assert await schedule.receipt(first) == 0
    schedule.say([HOUR_MS], uniques=["k"], replaces=[-1])
    await turns(20)
    commits[-1].release()
    # Right now the batch is durable, and whoever decided has not heard of it.
    saved = broker.state.save()
    assert broker.scheduling.state.is_gone(0)
    assert saved == broker.state.save()
    broker.fail(RuntimeError("the power was cut"))
    disk.crash(unsynced="lost")


async def test_an_answer_is_for_what_its_round_saw_also_by_id_and_by_key_at_once() -> None:
    schedule = await opened()
    await schedule.add(HOUR_MS, uniques=["k"])
    await schedule.add(HOUR_MS, uniques=["z"])
    move = schedule._operator.say(
        "schedule.move", unique="k", at_ms=schedule.clock.now_ms() + 2 * HOUR_MS
    )
    cancel = schedule._operator.say("schedule.cancel", ids=[0], uniques=["z"])
    moved = (await schedule._operator.answer(move))["results"][0]
    cancelled = (await schedule._operator.answer(cancel))["results"]
    await schedule.passes(3 * HOUR_MS)
    assert (moved["id"], moved["state"]) == (2, "moved")
    assert [one["state"] for one in cancelled] == ["replaced", "cancelled"]
    assert schedule.numbers() == [2]
    await schedule.broker.stop()


async def test_many_decisions_at_once_are_decided_one_after_another() -> None:
    schedule = await opened()
    now_ms = schedule.clock.now_ms()
    asked = [schedule.say([HOUR_MS], uniques=["k"], replaces=[-1]) for _ in range(20)]
    asked += [schedule.say([HOUR_MS], uniques=[f"k-{number}"]) for number in range(20)]
    cancel = schedule._operator.say("schedule.cancel", uniques=["k", "k-3"])
    move = schedule._operator.say("schedule.move", unique="k-4", at_ms=now_ms + 5)
    again = schedule._operator.say("schedule.cancel", uniques=["k", "k-4"])
    numbers = [await schedule.receipt(one) for one in asked]
    assert numbers == list(range(40))
    answers = [(await schedule._operator.answer(one))["results"] for one in (cancel, move, again)]
    assert [[one["state"] for one in answer] for answer in answers] == [
        ["cancelled", "cancelled"], ["moved"], ["cancelled", "cancelled"],
    ]  # fmt: skip
    await schedule.passes(2 * HOUR_MS)
    assert schedule.numbers() == [number for number in range(20, 40) if number not in (23, 24)]
    await schedule.broker.stop()


async def test_a_file_that_cannot_be_read_refuses_its_question_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_parts(monkeypatch, tail=1)
    disk = FaultyDisk(Random(1))
    schedule = await opened(disk=disk)
    await schedule.add(HOUR_MS, uniques=["a"])
    await schedule.settled()
    record = schedule.broker.scheduling.files.record

    async def fails(number: int) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(schedule.broker.scheduling.files, "record", fails)
    publish = schedule.say([HOUR_MS], uniques=["b"])
    move = schedule._operator.say(
        "schedule.move", unique="a", at_ms=schedule.clock.now_ms() + 2 * HOUR_MS
    )
    assert await schedule.receipt(publish) == 1
    with pytest.raises(Exception, match="Input/output"):
        await schedule._operator.answer(move)
    assert len(schedule.speaker.of(publish)) == 1
    monkeypatch.setattr(schedule.broker.scheduling.files, "record", record)
    assert (await schedule.move(0, 10))["state"] == "moved"
    await schedule.passes(HOUR_MS)
    assert schedule.numbers() == [2, 1]
    assert schedule.broker.publishing.inflight_bytes == 0
    await schedule.broker.stop()


async def test_pages_of_a_list_hold_what_waits_in_the_order_in_which_it_fires(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_parts(monkeypatch)
    schedule = await opened()
    delays = [(number * 7919) % 5_000 + 1 for number in range(30)]
    for number, delay_ms in enumerate(delays):
        await schedule.add(delay_ms, topic="even" if number % 2 == 0 else "odd")
        await schedule.settled()
    await schedule.cancel(3, 4)
    found: list[int] = []
    after = None
    while True:
        page = await schedule.ask("schedule.list", limit=4, after=after)
        found += [one["id"] for one in page["scheduled"]]
        after = page["next"]
        if after is None:
            break
    expected = sorted(set(range(30)) - {3, 4}, key=lambda number: (delays[number], number))
    assert found == expected
    odd = await schedule.ask("schedule.list", limit=100, topic="odd")
    assert [one["id"] for one in odd["scheduled"]] == [one for one in expected if one % 2]
    now_ms = schedule.clock.now_ms()
    calendar = await schedule.ask(
        "schedule.calendar", from_ms=now_ms, until_ms=now_ms + 6_000, step_ms=1_000
    )
    assert calendar["is_exact"]
    assert sum(bar["count"] for bar in calendar["bars"]) == 28
    assert calendar["topics"] == {"even": 14, "odd": 14}
    await schedule.broker.stop()


async def test_the_status_counts_what_the_list_has() -> None:
    schedule = await Schedule.of(await open_broker())
    await schedule.add(HOUR_MS, 2 * HOUR_MS, 3 * HOUR_MS)
    assert await schedule.cancel(0) == ["cancelled"]
    assert schedule.broker.status()["scheduled"] == 2
    listed = (await schedule.ask("schedule.list"))["scheduled"]
    assert [one["id"] for one in listed] == [1, 2]
    await schedule.passes(HOUR_MS)
    assert schedule.broker.status()["scheduled"] == 2
    assert schedule.fired() == []
    await schedule.broker.stop()


async def test_what_is_stored_while_it_is_looked_up_is_not_said_to_have_fired() -> None:
    schedule = await opened()
    await schedule.add(HOUR_MS)
    scheduling = schedule.broker.scheduling
    async with scheduling.lock:
        places = await scheduling.files.look_up([1], [])
        # Somebody guessed the id that the next one gets, before that has its receipt.
        await schedule.add(HOUR_MS)
        (found,) = scheduling.intake.deciding.found([1], [], places)
    assert found.state == "not_found"
    assert (await schedule.show(1))["state"] == "waiting"
    await schedule.broker.stop()


# --- failures --------------------------------------------------------------------------------


async def test_a_round_that_fails_unexpectedly_answers_all_of_it_and_all_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schedule = await opened()
    await schedule.add(HOUR_MS, HOUR_MS)
    await schedule.add(HOUR_MS, uniques=["k"])
    scheduling, operator = schedule.broker.scheduling, schedule._operator

    async def look_up(*_: object) -> None:
        raise RuntimeError("a bug")

    async with scheduling.lock:
        requests = [
            operator.say("schedule.cancel", ids=[0]),
            operator.say("schedule.cancel", ids=[1]),
            # It names the same, so it is decided in the next round.
            operator.say("schedule.cancel", ids=[0]),
            operator.say("schedule.move", unique="k", at_ms=schedule.clock.now_ms() + DAY_MS),
        ]
        publishes = [schedule.say([HOUR_MS], uniques=[key]) for key in ("k", "other")]
        await turns()
        monkeypatch.setattr(scheduling.files, "look_up", look_up)
    for request_id in requests:
        with pytest.raises(Unavailable, match="a bug") as refused:
            await operator.answer(request_id)
        assert refused.value.code == "unavailable"
    for request_id in publishes:
        with pytest.raises(Unavailable, match="a bug") as refused:
            await schedule.receipt(request_id)
        assert refused.value.code == "unavailable"
    monkeypatch.undo()
    assert await schedule.cancel(0, 1, 2) == ["cancelled", "cancelled", "cancelled"]
    assert not any(session.unanswered_bytes for session in schedule.broker.sessions)
    await schedule.broker.stop()


async def test_what_a_failing_round_has_begun_is_answered_as_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schedule = await opened()
    await schedule.add(HOUR_MS, HOUR_MS, HOUR_MS)
    intake, operator = schedule.broker.scheduling.intake, schedule._operator
    cancelled_row = intake.cancelled_row

    def fail_at_one(numbers: list[int], *, cause: str = "") -> Any:
        if numbers == [1]:
            raise RuntimeError("a bug")
        return cancelled_row(numbers, cause=cause)

    monkeypatch.setattr(intake, "cancelled_row", fail_at_one)
    async with schedule.broker.scheduling.lock:
        requests = [operator.say("schedule.cancel", ids=[number]) for number in range(3)]
        await turns()
    (result,) = (await operator.answer(requests[0]))["results"]
    assert result["state"] == "cancelled"
    for request_id in requests[1:]:
        with pytest.raises(Unavailable, match="a bug"):
            await operator.answer(request_id)
    assert [(await schedule.show(number))["state"] for number in range(3)] == [
        "cancelled", "waiting", "waiting",
    ]  # fmt: skip
    await schedule.broker.stop()


# --- limits ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "fields", "limit"),
    [
        ("schedule.list", {}, 20),
        ("schedule.calendar", {"from_ms": 0, "until_ms": 10_000, "step_ms": 1_000}, 20),
        ("schedule.show", {"id": 0}, 1_000),
    ],
)
async def test_a_limited_number_of_looks_at_the_schedule_run_at_once(
    op: str, fields: dict[str, Any], limit: int
) -> None:
    schedule = await opened()
    await schedule.add(HOUR_MS)
    operators = [await Operator.of(schedule.broker) for _ in range(2)]
    async with schedule.broker.scheduling.lock:
        running = [
            (operators[number % 2], operators[number % 2].say(op, **fields))
            for number in range(limit)
        ]
        await turns()
        with pytest.raises(Overloaded, match=f"{limit} requests '{op}' are under way") as refused:
            await operators[0].ask(op, **fields)
        assert refused.value.retry_after_ms > 0
    for operator, request_id in running:
        await operator.answer(request_id)
    await operators[0].ask(op, **fields)
    await schedule.broker.stop()


async def test_a_list_whose_connection_is_lost_keeps_the_lock_until_its_thread_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_parts(monkeypatch)
    threads = SlowDisk()
    schedule = await opened(executor=threads, commit=InlineCommit)
    await schedule.add(*[HOUR_MS] * 20)
    await schedule.settled()
    lock = schedule.broker.scheduling.lock
    assert schedule.broker.scheduling.files.runs
    other = await Operator.of(schedule.broker)
    threads.is_held = True
    other.say("schedule.list")
    await until(lambda: threads.waiting)
    other.speaker.transport.abort()
    await turns()
    # A merge would close files that the thread reads.
    assert lock.locked()
    threads.release()
    await until(lambda: not lock.locked())
    assert len((await schedule.ask("schedule.list"))["scheduled"]) == 20
    await schedule.broker.stop()
