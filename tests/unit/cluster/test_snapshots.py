"""Snapshots: the files of a running log, fetched by a replica that lacks what was dropped."""

import asyncio
import logging
from random import Random

import pytest

from onward.broker import snapshots
from onward.broker.broker import Broker
from onward.broker.state import State
from onward.client.link import Link
from onward.cluster import replica as replica_module
from onward.cluster.snapshot import SnapshotFetch, ask
from onward.errors import (
    Corruption,
    DiskFull,
    InvalidRequest,
    NotConnected,
    Overloaded,
    ProtocolError,
)
from onward.log.check import Check
from onward.log.checkpoint import read_checkpoints
from onward.log.marks import INCOMING, begin_replacement
from onward.log.memory_disk import MemoryDisk
from onward.protocol.frames import Kind
from onward.protocol.operations import decode_reply, encode_request
from onward.protocol.operations.replicas import Fetch, OpenSnapshot, Snapshot, SnapshotFile
from onward.protocol.payloads import encode_json
from onward.testing.clock import ManualClock
from onward.testing.disk import FaultyDisk
from onward.testing.fold import compare_states

from .nodes import (
    Served,
    client_of,
    copy,
    drop_first_segments,
    expire,
    fill,
    keep_house,
    link_to,
    open_node,
    until,
)


async def open_snapshot(link: Link) -> Snapshot:
    request = OpenSnapshot()
    return decode_reply(
        await ask(link, Kind.REQUEST, encode_request(request), timeout_s=5), request
    )


async def fetch_part(link: Link, opened: Snapshot, **what: int) -> bytes:
    fetch = Fetch(**{"snapshot": opened.id, "file": 0, "position": 0, "bytes": 100, **what})
    return bytes(await ask(link, Kind.FETCH, encode_json(fetch), timeout_s=5))


def fetch_into(replica: Broker, link: Link, *, reserve_bytes: int = 0) -> SnapshotFetch:
    return SnapshotFetch(
        link, disk=replica.log.disk, folder=replica.log.folder, reserve_bytes=reserve_bytes,
        in_thread=replica.in_thread,
    )  # fmt: skip


async def exchange(replica: Broker, source: Broker) -> Broker:
    """Fetch a snapshot of the source, put it in the place of the replica's log, open that."""
    fetch = fetch_into(replica, await link_to(source))
    await fetch.run(node=replica.node, replicas=replica.state.replicas)
    await replica.stop()
    begin_replacement(replica.log.disk, replica.log.folder)
    return await open_node(disk=replica.log.disk, clock=replica.clock, follows="source:7700")


async def do_everything(broker: Broker, clock: ManualClock) -> None:
    """Leave something of each kind in the state, the schedule's files included."""
    async with client_of(broker) as mq:
        await mq.create_group("billing", "orders", retry="1s,2s")
        async with mq.consume("orders", group="billing") as consumer:
            first, second, third = await consumer.fetch(3, wait="1s")
            await first.ack()
            await second.retry(cause="again")
            await third.reject("no")
        await mq.publish("orders", "soon", delay="1s")
        await mq.publish_many("orders", ["later"] * 50, delay="30d")
        broker.scheduling.files.make_way()
        clock.advance(2_000)
        await until(lambda: bool(broker.state.schedule.runs))


async def test_an_empty_replica_gets_a_log_that_does_not_begin_at_event_one() -> None:
    clock = ManualClock()
    source, empty = await open_node(clock=clock), await open_node(clock=clock, follows="")
    await drop_first_segments(source)
    await fill(source)
    await do_everything(source, clock)
    own_node = empty.node
    replica = await exchange(empty, source)
    assert replica.node == own_node != source.node
    await copy(source, replica)
    assert replica.log.last_crc == source.log.last_crc
    assert list(compare_states(source.state, replica.state)) == []
    check = Check(replica.log.disk, "log")
    check.run()
    assert not check.is_damaged, check.problems
    await source.stop()
    clock.advance(31 * 86_400_000)
    await replica.lead()
    await until(lambda: replica.state.schedule.waiting == 0)
    assert replica.catalogue.by_name["orders"].next_offset == 2_000 + 1 + 50
    await replica.stop()


async def test_a_replica_that_fell_behind_keeps_its_node_its_replicas_and_nothing_else() -> None:
    source, replica = await open_node(), await open_node(follows="")
    await fill(source, "kept", batches=2)
    await copy(source, replica)
    replica.state.replicas = {"chained": 7}
    source.state.replicas = {"other": 9}
    await drop_first_segments(source)
    replica = await exchange(replica, source)
    assert replica.state.replicas == {"chained": 7}
    assert "source" not in replica.log.disk.list_folder("log")
    assert replica.log.disk.list_folder(f"log/{INCOMING}") == []
    assert replica.log.is_followed
    await copy(source, replica)
    assert list(compare_states(source.state, replica.state)) == []
    await source.stop()
    await replica.stop()


async def test_the_files_of_a_snapshot_can_be_read_though_they_were_removed() -> None:
    source = await open_node()
    await fill(source, "old")
    await keep_house(source)
    link = await link_to(source)
    snapshot = await open_snapshot(link)
    names = [file.name for file in snapshot.files]
    source.snapshots._by_requester[next(iter(source.snapshots._by_requester))].event_id = 10**9
    await expire(source)
    gone = {*names} - {*source.log.disk.list_folder("log")}
    assert any(name.endswith(".log") for name in gone)
    for name in gone:
        number = names.index(name)
        size = min(snapshot.files[number].bytes, 1 << 20)
        part = await fetch_part(link, snapshot, file=number, bytes=size)
        assert len(part) == size + 8
    await source.stop()


async def test_what_follows_a_snapshot_is_kept_as_long_as_it_is_open() -> None:
    source = await open_node()
    await fill(source, "old", batches=3)
    link = await link_to(source)
    snapshot = await open_snapshot(link)
    await fill(source, "old")
    await expire(source)
    assert source.log.segments[0].first_index <= snapshot.event_id + 1
    await link.close()
    await until(lambda: not source.snapshots.event_ids)
    await keep_house(source, rounds=5)
    assert source.log.segments[0].first_index > snapshot.event_id + 1
    await source.stop()


async def test_two_snapshots_are_open_at_a_time_one_for_each_connection() -> None:
    source = await open_node()
    first, second, third = [await link_to(source) for _ in range(3)]
    await open_snapshot(first)
    old = await open_snapshot(second)
    with pytest.raises(Overloaded):
        await open_snapshot(third)
    new = await open_snapshot(second)
    with pytest.raises(InvalidRequest, match="not open"):
        await fetch_part(second, old)
    await fetch_part(second, new)
    await first.close()
    await until(lambda: len(source.snapshots.event_ids) == 1)
    await open_snapshot(third)
    await source.stop()


async def test_a_snapshot_that_is_not_fetched_for_a_minute_is_closed() -> None:
    clock = ManualClock()
    source = await open_node(clock=clock)
    link = await link_to(source)
    snapshot = await open_snapshot(link)
    clock.advance(snapshots.IDLE_MS - 1_000)
    await fetch_part(link, snapshot)
    clock.advance(snapshots.IDLE_MS - 1_000)
    source.snapshots.tick(clock.monotonic_ms())
    await fetch_part(link, snapshot)
    clock.advance(snapshots.IDLE_MS + 1_000)
    source.snapshots.tick(clock.monotonic_ms())
    with pytest.raises(InvalidRequest, match="not open"):
        await fetch_part(link, snapshot)
    await source.stop()


@pytest.mark.parametrize(
    "what", [{"snapshot": 9}, {"file": 999}, {"position": 1 << 40}, {"bytes": 2 << 20}]
)
async def test_a_wrong_fetch_is_refused(what: dict[str, int]) -> None:
    source = await open_node()
    link = await link_to(source)
    snapshot = await open_snapshot(link)
    with pytest.raises(InvalidRequest):
        await fetch_part(link, snapshot, **what)
    await fetch_part(link, snapshot)
    await source.stop()


async def test_a_damaged_log_of_the_source_never_takes_the_place_of_the_replicas() -> None:
    disk = FaultyDisk(Random(1))
    source, replica = await open_node(disk=disk), await open_node(follows="")
    await fill(source)
    await keep_house(source)
    disk.flip_bit(source.log.segments[1].path, 5_000)
    fetch = fetch_into(replica, await link_to(source))
    with pytest.raises(Corruption, match="'onward log check' there"):
        await fetch.run(node=replica.node, replicas={})
    await replica.stop()
    again = await open_node(disk=replica.log.disk, follows="")  # type: ignore[arg-type]
    assert again.log.next_index == 1
    assert again.log.disk.list_folder(f"log/{INCOMING}") == []
    await again.stop()
    await source.stop()


async def test_a_part_that_is_damaged_on_its_way_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, replica = await open_node(), await open_node(follows="")
    await fill(source, batches=3)
    monkeypatch.setattr(snapshots, "crc32c", lambda part: 7)
    fetch = fetch_into(replica, await link_to(source))
    with pytest.raises(Corruption, match="damaged on its way"):
        await fetch.run(node=replica.node, replicas={})
    await source.stop()
    await replica.stop()


async def test_a_snapshot_that_does_not_fit_is_not_begun() -> None:
    source = await open_node()
    replica = await open_node(disk=MemoryDisk(capacity_bytes=1 << 20), follows="")
    await fill(source)
    fetch = fetch_into(replica, await link_to(source), reserve_bytes=1 << 20)
    with pytest.raises(DiskFull, match="does not fit beside the log"):
        await fetch.run(node=replica.node, replicas={})
    assert replica.log.disk.list_folder(f"log/{INCOMING}") == []
    await source.stop()
    await replica.stop()


async def test_a_source_cannot_write_outside_the_folder_of_the_log() -> None:
    source, replica = await open_node(), await open_node(follows="")

    async def hostile(requester: object) -> Snapshot:
        files = [SnapshotFile("../../etc/passwd", 10)]
        return Snapshot(id=1, event_id=1, lineage=source.state.lineage, files=files)

    source.snapshots.open = hostile  # type: ignore[method-assign, assignment]
    with pytest.raises(ProtocolError, match="no log"):
        await fetch_into(replica, await link_to(source)).run(node="", replicas={})
    await source.stop()
    await replica.stop()


async def test_a_connection_that_is_lost_in_a_snapshot_ends_it_with_an_error() -> None:
    source, replica = await open_node(), await open_node(follows="")
    await fill(source)
    link = await link_to(source)
    asyncio.get_running_loop().call_later(0, link.abort, NotConnected("cut"))
    with pytest.raises(NotConnected):
        await fetch_into(replica, link).run(node=replica.node, replicas={})
    await until(lambda: not source.snapshots.event_ids)
    await source.stop()
    await replica.stop()


async def test_a_replica_needs_a_snapshot_when_the_source_has_dropped_its_events() -> None:
    source = await Served.open(await open_node())
    await drop_first_segments(source.broker)
    replica = await source.replica()
    await until(lambda: source.snapshots == 1)
    [checkpoint, _] = read_checkpoints(replica.log.disk, f"log/{INCOMING}")
    assert checkpoint.last_index == source.broker.log.next_index - 1
    assert State.load(checkpoint.state).node == replica.node
    await replica.stop()
    await source.stop()


async def test_a_log_that_was_not_copied_is_never_replaced() -> None:
    source = await Served.open(await open_node())
    await drop_first_segments(source.broker)
    disk = MemoryDisk()
    leader = await open_node(disk=disk)
    await fill(leader, batches=1)
    await leader.stop()
    replica = await source.replica(disk=disk)
    await until(lambda: bool(source.final))
    assert "has a log of its own" in str(source.final[0])
    assert source.snapshots == 0
    await replica.stop()
    await source.stop()


async def test_a_snapshot_that_fails_is_tried_again_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replica_module, "AGAIN_S", 0.02)
    monkeypatch.setattr(replica_module, "AGAIN_S_MAX", 0.02)
    source = await Served.open(await open_node())
    await drop_first_segments(source.broker)
    await fill(source.broker)
    disk = MemoryDisk(capacity_bytes=256 << 10)
    with caplog.at_level(logging.INFO):
        replica = await source.replica(disk=disk)
        await until(lambda: caplog.text.count("snapshot opened") >= 3)
        disk.capacity_bytes = 1 << 30
        await until(lambda: source.snapshots == 1)
    assert caplog.text.count("does not fit beside the log") == 1
    await replica.stop()
    await source.stop()
