"""A follower applies the entries of its leader, unchanged, and can take its place."""

import asyncio
from random import Random

import pytest

import onward
from onward.broker.broker import Broker
from onward.client.client import Client
from onward.client.pipe import connect_pipe
from onward.errors import NotLeader
from onward.log.memory_disk import MemoryDisk
from onward.log.stream import EntryStream
from onward.settings import GroupSettings, LogSettings, ServerSettings, Settings
from onward.testing.clock import ManualClock
from onward.testing.fold import compare_states

LOG = LogSettings(
    folder="log", preallocate_bytes=0, disk_reserve_bytes=0, segment_bytes_max=64 << 10
)
# The clock of the tests runs ahead: nobody is to be dropped as silent for that.
SERVER = ServerSettings(heartbeat_ms=3_600_000)
SETTINGS = Settings(log=LOG, server=SERVER, groups=GroupSettings(reclaim_ms=0))


async def open_node(clock: ManualClock, *, follows: str | None = None) -> Broker:
    return await Broker.open(SETTINGS, disk=MemoryDisk(), clock=clock, follows=follows)


def client_of(broker: Broker, *, timeout_s: float = 5) -> Client:
    async def dial(make):  # type: ignore[no-untyped-def]
        link = make()
        connect_pipe(link, broker.session(), asyncio.get_running_loop())
        return link

    return Client([], token=None, name="test", timeout_s=timeout_s, durability=255, dials=[dial])


async def copy(leader: Broker, follower: Broker, *, bytes_max: int = 1 << 20) -> None:
    """Apply what the follower lacks, as a replica does."""
    stream = EntryStream(leader.log, follower.log.next_index)
    while stream.has_more:
        entries = stream.read(bytes_max=bytes_max)
        assert entries
        done = asyncio.get_running_loop().create_future()
        follower.publishing.follow(bytes(entries), sync=True, done=done.set_result)
        assert await done is None


async def work(mq: Client, clock: ManualClock, random: Random, round_number: int) -> None:
    """Do a little of everything that changes the state."""
    topic = random.choice(("orders", "events", "jobs"))
    await mq.publish_many(topic, [f"{round_number}-{n}" for n in range(random.randint(1, 20))])
    unique = f"u{random.randint(0, 3)}"
    await mq.publish(topic, "later", delay_ms=random.randint(1, 3_000), unique=unique, replace=True)
    match random.randint(0, 7):
        case 0:
            await mq.create_group(
                f"{topic}-{random.randint(0, 3)}", topic, retry="1s,2s", exist_ok=True
            )
        case 1:
            await mq.cancel_scheduled(unique=unique)
        case 2:
            await mq.set_recurring("tick", "ticks", "t", every="5s")
        case 3:
            await mq.change_topic(topic, retention="7d")
        case 4 if "jobs" in [one.topic for one in await mq.topics()]:
            await mq.delete_topic("jobs")
        case _:
            await consume_some(mq, topic, random)
    clock.advance(random.randint(0, 2_000))
    await asyncio.sleep(0.01)


async def consume_some(mq: Client, topic: str, random: Random) -> None:
    async with mq.consume(topic, group="workers", retry="1s,2s") as consumer:
        for delivery in await consumer.fetch(random.randint(1, 10), wait=0):
            if random.random() < 0.7:
                await delivery.ack()
            elif random.random() < 0.5:
                await delivery.retry(cause="again")
            else:
                await delivery.reject("no")


@pytest.mark.parametrize("seed", range(12))
async def test_a_promoted_follower_has_the_state_of_its_leader(seed: int) -> None:
    random, clock = Random(seed), ManualClock()
    leader, follower = await open_node(clock), await open_node(clock, follows="leader:7700")
    async with client_of(leader) as mq:
        for number in range(random.randint(5, 25)):
            await work(mq, clock, random, number)
            if random.random() < 0.5:
                await copy(leader, follower, bytes_max=random.choice((1, 4_096, 1 << 20)))
        await copy(leader, follower)
    assert follower.log.last_crc == leader.log.last_crc
    assert list(compare_states(leader.state, follower.state)) == []
    leader.fail(RuntimeError("killed by the test"))
    ends = {one.name: one.next_offset for one in leader.catalogue.by_name.values()}
    await follower.lead()
    async with client_of(follower) as mq:
        receipt = await mq.publish("orders", "the first of the new leader")
        assert receipt.offset >= ends.get("orders", 0)
        clock.advance(60_000)
        await until(lambda: has_fired(follower))
    await follower.stop()


def has_fired(broker: Broker) -> bool:
    """Return True if nothing waits but the next runs of recurring schedules."""
    return broker.state.schedule.waiting <= len(broker.state.schedule.recurring)


async def until(condition, *, turns: int = 500) -> None:  # type: ignore[no-untyped-def]
    for _ in range(turns):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came to be")


async def test_a_follower_refuses_every_write_with_the_address_of_its_leader() -> None:
    follower = await open_node(ManualClock(), follows="leader:7700")
    async with client_of(follower, timeout_s=0.2) as mq:
        for call in (
            mq.publish("orders", "x"),
            mq.create_topic("orders"),
            mq.create_group("billing", "orders"),
            mq.set_recurring("tick", "ticks", "t", every="5s"),
            mq.cancel_scheduled("@schedule/1"),
        ):
            with pytest.raises(NotLeader) as refused:
                await call
            assert refused.value.leader == "leader:7700"
        assert await mq.topics() == []
    assert follower.log.next_index == 1
    await follower.stop()


async def test_a_follower_serves_readers_and_wakes_them() -> None:
    clock = ManualClock()
    leader, follower = await open_node(clock), await open_node(clock, follows="")
    async with client_of(leader) as mq, client_of(follower) as copy_mq:
        await mq.publish("orders", "first")
        await copy(leader, follower)
        reader = aiter(copy_mq.read("orders", follow=True))
        assert (await anext(reader)).text == "first"
        await mq.publish("orders", "second")
        await copy(leader, follower)
        assert (await anext(reader)).text == "second"
        await mq.delete_topic("orders")
        await copy(leader, follower)
        with pytest.raises(onward.Conflict, match="deleted"):
            await anext(reader)
    await leader.stop()
    await follower.stop()


async def test_a_leader_that_follows_ends_its_members_and_fires_nothing() -> None:
    clock = ManualClock()
    node = await open_node(clock)
    async with client_of(node) as mq:
        await mq.publish("orders", "now")
        await mq.publish("orders", "later", delay="1s")
        await mq.create_group("billing", "orders")
        await node.follow("other:7700")
        clock.advance(5_000)
        await asyncio.sleep(0.05)
        assert (await mq.topic("orders")).next_offset == 1
        await node.lead()
        await until(lambda: node.catalogue.by_name["orders"].next_offset == 2)
    await node.stop()
