"""A source and its replicas: what retention waits for, what is said of damage and a full disk."""

import logging
from random import Random

import msgspec
import pytest

from onward.broker.broker import Broker
from onward.cluster import replica as replica_module
from onward.errors import Corruption, Unavailable
from onward.log.marks import FOLLOWING, has_mark
from onward.log.memory_disk import MemoryDisk
from onward.protocol.operations.replicas import Promote, ReplicaDescription
from onward.settings import ReplicaSettings
from onward.testing.clock import ManualClock
from onward.testing.disk import FaultyDisk

from .nodes import (
    SETTINGS,
    Served,
    client_of,
    copy,
    expire,
    fill,
    keep_house,
    open_node,
    until,
    with_log,
)


def replica_of(broker: Broker, name: str = "copy-1") -> ReplicaDescription:
    return next(one for one in broker.describe_replication().replicas if one.name == name)


def is_level(source: Broker, replica: Broker) -> bool:
    return replica.log.next_index == source.log.next_index


# --- roles ----------------------------------------------------------------------------------------


OF_SOURCE = msgspec.structs.replace(SETTINGS, replica=ReplicaSettings(of="source:7700"))


async def promoted(disk: MemoryDisk) -> None:
    """Copy a log to a disk, and promote that node while the source does not answer."""
    source = await open_node()
    replica = await open_node(disk=disk, settings=OF_SOURCE, follows="source:7700")
    await fill(source, batches=2)
    await copy(source, replica)
    await source.stop()
    assert has_mark(disk, "log", FOLLOWING)
    replica.state.is_retired = True  # promoted by force, without a source
    await replica.operations.call(replica.scheduling.inside, Promote(force=True))
    assert not has_mark(disk, "log", FOLLOWING)
    await fill(replica, batches=1)
    await replica.stop()


async def test_a_promoted_node_leads_though_its_settings_still_name_a_source(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = MemoryDisk()
    await promoted(disk)
    again = await open_node(disk=disk, follows="source:7700")
    assert again.gate.is_leading
    assert caplog.text.count("remove replica.of from its settings") == 1
    await fill(again, batches=1)
    await again.retire()
    await again.stop()
    retired = await open_node(disk=disk, follows="source:7700")
    assert not retired.gate.is_leading
    await retired.stop()


async def test_a_promoted_node_follows_another_source_than_the_one_it_was_promoted_over() -> None:
    disk = MemoryDisk()
    await promoted(disk)
    again = await open_node(disk=disk, follows="third:7700")
    assert not again.gate.is_leading
    await again.stop()


async def test_a_crash_right_after_a_promotion_leaves_a_leader() -> None:
    disk = FaultyDisk(Random(1))
    source = await open_node()
    replica = await open_node(disk=disk, settings=OF_SOURCE, follows="source:7700")
    await fill(source, batches=2)
    await copy(source, replica)

    async def fail() -> None:
        raise OSError("no space for a checkpoint")

    replica.housekeeping.end_following = fail  # type: ignore[method-assign]
    replica.state.is_retired = True
    await replica.operations.call(replica.scheduling.inside, Promote(force=True))
    replica.fail(RuntimeError("killed by the test"))
    disk.crash(unsynced="lost")
    assert has_mark(disk, "log", FOLLOWING)
    again = await open_node(disk=disk, follows="source:7700")
    assert again.gate.is_leading
    await until(lambda: not has_mark(disk, "log", FOLLOWING))
    assert again.housekeeping.checkpoint_count >= 1
    await again.stop()
    await source.stop()


async def test_a_copy_that_is_started_as_a_leader_says_what_that_means(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source, replica = await open_node(), await open_node(follows="")
    await fill(source, batches=2)
    await copy(source, replica)
    await replica.stop()
    again = await open_node(disk=replica.log.disk)  # type: ignore[arg-type]
    assert "copied from another node" in caplog.text
    await until(lambda: not again.log.is_followed)
    await again.stop()
    await source.stop()


# --- retention ------------------------------------------------------------------------------------


AWAITED = with_log(retention_replicas=("copy-1",), replica_wait_bytes_max=400_000)


async def test_retention_waits_for_a_named_replica_that_was_never_seen() -> None:
    clock = ManualClock()
    source = await open_node(settings=AWAITED, clock=clock)
    await fill(source, batches=10)
    clock.advance(1_000)
    await fill(source, batches=5)
    await expire(source)
    assert source.log.segments[0].first_index == 1
    shown = replica_of(source)
    assert (shown.connected, shown.is_awaited, shown.durable_event_id) == (False, True, 0)
    assert shown.lag_events == source.log.synced_index
    assert shown.lag_ms == 1_000
    await source.stop()


async def test_retention_goes_on_once_the_replica_has_the_events_also_after_a_restart() -> None:
    disk, clock = MemoryDisk(), ManualClock()
    source = await Served.open(await open_node(settings=AWAITED, disk=disk, clock=clock))
    await fill(source.broker, batches=15)
    replica = await source.replica()
    await until(lambda: replica_of(source.broker).lag_events == 0)
    await replica.stop()
    await until(lambda: not replica_of(source.broker).connected)
    durable = replica_of(source.broker).durable_event_id
    await fill(source.broker, batches=5)
    await source.stop()
    again = await open_node(settings=AWAITED, disk=disk, clock=clock)
    assert replica_of(again).durable_event_id == durable
    await expire(again)
    assert 1 < again.log.segments[0].first_index <= durable + 1
    await again.stop()


async def test_retention_goes_on_when_too_much_waits_for_a_replica_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = await open_node(settings=AWAITED)
    await fill(source, batches=80)
    await expire(source)
    assert source.log.segments[0].first_index > 1
    await keep_house(source, rounds=5)
    assert caplog.text.count("log.replica_wait_bytes_max") == 1
    await source.stop()


async def test_a_replica_that_lost_its_tail_is_waited_for_from_where_it_is() -> None:
    source = await Served.open(await open_node(settings=AWAITED))
    await fill(source.broker, batches=5)
    source.broker.state.replicas["copy-1"] = source.broker.log.next_index - 1
    source.broker.log.synced_index -= 2  # so that it does not get all at once
    replica = await source.replica()
    await until(lambda: replica_of(source.broker).connected)
    assert replica_of(source.broker).durable_event_id < source.broker.log.next_index - 1
    await replica.stop()
    await source.stop()


async def test_the_lag_of_a_replica_is_the_age_of_what_it_lacks() -> None:
    clock = ManualClock()
    source = await open_node(settings=AWAITED, clock=clock)
    for _ in range(10):
        await fill(source, batches=1)
        clock.advance(1_000)
    last = source.log.synced_index
    source.state.replicas["copy-1"] = last
    assert replica_of(source).lag_ms == 0
    source.state.replicas["copy-1"] = last - 1
    assert replica_of(source).lag_ms < 1_000
    source.state.replicas["copy-1"] = last - 5
    assert 2_000 <= replica_of(source).lag_ms <= 6_000
    await source.stop()


async def test_names_of_replicas_that_are_gone_are_forgotten() -> None:
    source = await Served.open(await open_node())
    await fill(source.broker, batches=1)
    replica = await source.replica(name="passing")
    await until(lambda: is_level(source.broker, replica))
    assert list(source.broker.state.replicas) == ["passing"]
    await replica.stop()
    await until(lambda: not source.broker.state.replicas)
    await source.stop()


# --- damage ---------------------------------------------------------------------------------------


async def test_damage_at_the_source_is_told_to_the_replica_and_nobody_else_is_hurt(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replica_module, "AGAIN_S", 0.02)
    monkeypatch.setattr(replica_module, "AGAIN_S_MAX", 0.02)
    disk = FaultyDisk(Random(1))
    source = await Served.open(await open_node(disk=disk))
    await fill(source.broker)
    await keep_house(source.broker)
    segment = source.broker.log.segments[1]
    disk.flip_bit(segment.path, 30_000)
    replica = await source.replica()
    refused = "cannot be followed now"
    await until(lambda: caplog.text.count("cannot be served: no entry") >= 3)
    assert caplog.text.count(refused) == 1
    assert replica.describe_replication().state.startswith("the source cannot be followed now")
    assert "onward log check" in replica.describe_replication().state
    assert not source.final
    # What stands before the damage was copied, and is served; so is what stands behind it.
    assert segment.first_index <= replica.log.next_index < source.broker.log.next_index
    assert source.broker.log.segments[0].next_index <= replica.log.next_index
    async with client_of(source.broker) as mq, client_of(replica) as copy_mq:
        read = [message async for message in mq.read("orders", start=1_500)]
        assert read[-1].offset == 1_999
        assert (await anext(aiter(copy_mq.read("orders")))).offset == 0
    disk.flip_bit(segment.path, 30_000)
    await until(lambda: is_level(source.broker, replica))
    assert replica.describe_replication().state == "following"
    assert caplog.text.count(refused) == 1
    await replica.stop()
    await source.stop()


async def test_damage_in_a_sealed_segment_of_a_replica_names_the_command() -> None:
    disk = FaultyDisk(Random(1))
    source = await Served.open(await open_node())
    await fill(source.broker)
    replica = await source.replica(disk=disk)
    await until(lambda: is_level(source.broker, replica))
    await keep_house(replica)
    disk.flip_bit(replica.log.segments[0].path, 5_000)
    async with client_of(replica) as mq:
        with pytest.raises(Corruption, match="onward log check"):
            async for _ in mq.read("orders"):
                pass
    await replica.stop()
    await source.stop()


async def test_a_damaged_tail_of_a_replica_is_copied_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = FaultyDisk(Random(1))
    source = await Served.open(await open_node(settings=with_log(segment_bytes_max=1 << 30)))
    large = with_log(segment_bytes_max=1 << 30, checkpoint_bytes=1 << 30)
    await fill(source.broker)
    replica = await source.replica(disk=disk, settings=large)
    await until(lambda: is_level(source.broker, replica))
    replica.fail(RuntimeError("killed by the test"))
    await replica.replica.close()  # type: ignore[union-attr]
    disk.crash(unsynced="lost")
    disk.flip_bit(replica.log.tail.path, 100_000)
    again = await source.replica(disk=disk, settings=large)
    assert "torn tail" in caplog.text
    await until(lambda: is_level(source.broker, again))
    assert again.log.last_crc == source.broker.log.last_crc
    await again.stop()
    await source.stop()


async def test_a_full_disk_holds_a_replica_up_until_there_is_space_and_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replica_module, "AGAIN_S", 0.02)
    caplog.set_level(logging.INFO)
    disk = MemoryDisk(capacity_bytes=256 << 10)
    source = await Served.open(await open_node())
    await fill(source.broker, batches=5)
    replica = await source.replica(disk=disk)
    await until(lambda: is_level(source.broker, replica))
    await fill(source.broker, batches=40)
    await until(lambda: "events cannot be stored now" in caplog.text)
    held = replica.log.next_index
    async with client_of(replica) as mq:
        assert (await anext(aiter(mq.read("orders")))).offset == 0
    assert "cannot be stored" in replica.describe_replication().state
    assert replica_of(source.broker).durable_event_id == held - 1
    disk.capacity_bytes = 1 << 30
    await until(lambda: is_level(source.broker, replica))
    assert caplog.text.count("events cannot be stored now") == 1
    assert caplog.text.count("able to copy events again") == 1
    assert caplog.text.count("follows no longer") == 0
    await replica.stop()
    await source.stop()


async def test_a_replica_that_stops_while_it_fetches_leaves_its_log_as_it_was() -> None:
    source = await Served.open(await open_node())

    async def never(requester: object) -> object:
        raise Unavailable("not now")

    source.broker.snapshots.open = never  # type: ignore[method-assign, assignment]
    await fill(source.broker)
    await expire(source.broker)
    disk = MemoryDisk()
    replica = await source.replica(disk=disk)
    await until(lambda: "not now" in replica.describe_replication().state)
    await replica.stop()
    again = await open_node(disk=disk, follows=source.address)
    assert again.log.next_index == 1
    await again.stop()
    await source.stop()
