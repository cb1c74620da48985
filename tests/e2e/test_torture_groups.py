"""Two producers, three groups, and a kill -9 every little while: of a consumer, of the broker.

`make torture` runs it at full size, `make test` at a tenth of it. Kills come by the count of what
was consumed, so a slow machine is hit as often as a fast one.
"""

import asyncio
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onward
from onward.delivery.trace import Trace

from .conftest import MakeBroker
from .history import read_all
from .members import MemberProcess, check_member, rows_about, trace_rows
from .running import BrokerProcess, until

MESSAGES = int(os.environ.get("ONWARD_TORTURE_MESSAGES", "5000"))
SEED = int(os.environ.get("ONWARD_TORTURE_SEED", "1"))
KILLS = 8
DELIVERIES = 4 * MESSAGES
"""When nobody dies: A has two producers and one group, B one producer and two groups."""
PATIENCE_S = 120 + MESSAGES / 100
PLACES = (("G1", "A", "batches"), ("G2", "B", "each"), ("G3", "B", "batches"))
SLICES = 20
BATCH = 50
EXPLAINED = 4
"""So many messages of each group are looked at with `explain`."""


@contextmanager
def at_work(members: list[MemberProcess]) -> Iterator[None]:
    """Start all of them, and leave none behind."""
    try:
        for member in members:
            member.start()
        yield
    finally:
        for member in members:
            member.end()


async def until_consumed(members: list[MemberProcess], count: int) -> None:
    await until(lambda: sum(one.got_count() for one in members) >= count, within_s=PATIENCE_S)


async def publish(
    mq: onward.Client, producer: str, topics: list[str], members: list[MemberProcess]
) -> None:
    """Publish in slices, not far ahead of those who consume: the kills then hit both."""
    for number in range(SLICES):
        await until_consumed(members, DELIVERIES * max(0, number - 2) // SLICES // 2)
        start, end = MESSAGES * number // SLICES, MESSAGES * (number + 1) // SLICES
        for first in range(start, end, BATCH):
            bodies = [f"{producer}:{n}" for n in range(first, min(first + BATCH, end))]
            for topic in topics:
                await mq.publish_many(topic, bodies)


async def kill_again_and_again(
    broker: BrokerProcess, members: list[MemberProcess], chance: random.Random
) -> None:
    """Kill a random member each time, and the broker once, in the middle."""
    counts = sorted(chance.sample(range(DELIVERIES // 20, DELIVERIES * 9 // 10), KILLS))
    for number, count in enumerate(counts):
        await until_consumed(members, count)
        member = chance.choice(members)
        member.check_alive()
        member.kill()
        if number == KILLS // 2:
            await broker.restart()
        member.start()


async def until_finished(mq: onward.Client, members: list[MemberProcess]) -> None:
    async def is_finished() -> bool:
        for member in members:
            member.check_alive()
        return all(group.backlog == 0 for group in await mq.groups())

    await until(is_finished, within_s=PATIENCE_S)


async def check_explained(mq: onward.Client, member: MemberProcess, rows: list[Trace]) -> None:
    """Raise unless `explain` says of some messages what the rows say."""
    repeated = sorted(member.repeats())[:EXPLAINED]
    for offset in [0, *repeated]:
        life = await mq.explain(f"{member.topic}/{offset}")
        assert life.published_by is not None
        assert life.message is not None
        assert life.published_by.client == life.message.text.split(":")[0]
        assert life.published_by.pid == os.getpid()
        told = life.group(member.group)
        assert told is not None
        assert told.state == "finished"
        true = rows_about(rows, group=member.group, topic=member.topic, offset=offset)
        events = [event for event in told.events if event.did != "started"]
        assert [(event.did, event.member, event.attempt) for event in events] == [
            (row.did, row.member, row.attempt) for row in true
        ]
        assert events[-1].did == "acked"


async def test_no_message_is_lost_and_every_repeat_is_explained_while_consumers_are_killed(
    make_broker: MakeBroker, tmp_path: Path
) -> None:
    chance = random.Random(SEED)
    broker = make_broker(log_segment_bytes_max=1 << 20, log_checkpoint_rows=500)
    await broker.start()
    members = [
        MemberProcess(
            broker, group=group, topic=topic, member=f"of-{group}", folder=tmp_path, way=way
        )
        for group, topic, way in PLACES
    ]
    async with (
        broker.connect(name="p1", timeout="60s") as one,
        broker.connect(name="p2", timeout="60s") as two,
    ):
        for topic in ("A", "B"):
            await one.create_topic(topic)
        for member in members:
            await one.create_group(member.group, member.topic)
        with at_work(members):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(publish(one, "p1", ["A"], members))
                tasks.create_task(publish(two, "p2", ["A", "B"], members))
                tasks.create_task(kill_again_and_again(broker, members, chance))
            await until_finished(one, members)
        rows = await trace_rows(one)
        stored = {topic: list((await read_all(one, topic)).values()) for topic in ("A", "B")}
        expected = {name: [f"{name}:{n}" for n in range(MESSAGES)] for name in ("p1", "p2")}
        assert sorted(stored["A"]) == sorted(expected["p1"] + expected["p2"])
        assert stored["B"] == expected["p2"]
        for name, bodies in expected.items():
            assert [body for body in stored["A"] if body.startswith(f"{name}:")] == bodies
        for member in members:
            check_member(member, rows, stored=len(stored[member.topic]), broker_kills=1)
            await check_explained(one, member, rows)
    assert sum(member.kills for member in members) == KILLS
