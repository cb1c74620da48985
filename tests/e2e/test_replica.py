"""A replica and its source as real processes: killed, cut off, misdirected, promoted."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal

import pytest

import onward
from onward.errors import Conflict, InvalidRequest, NotLeader, OnwardError
from onward.protocol.frames import PREFACE, Kind, frame
from onward.protocol.payloads import decode_error

from .conftest import MakeBroker
from .copies import (
    Proxy,
    caught_up,
    check_same_logs,
    entries_in,
    make_replica,
    reads_the_same,
    replication,
    said,
)
from .history import Follower, History, read_all
from .running import BrokerProcess, until
from .wire import Peer

KILLS = int(os.environ.get("ONWARD_TORTURE_REPLICA_KILLS", "2"))
SMALL = {"log_segment_bytes_max": 1 << 20, "log_checkpoint_rows": 300}
"""So small that segments roll and checkpoints are written while the kills come."""


async def start_pair(
    make_broker: MakeBroker, **settings: object
) -> tuple[BrokerProcess, BrokerProcess]:
    source = make_broker(**settings)
    await source.start()
    replica = make_replica(make_broker, source, **settings)
    await replica.start()
    return source, replica


# --- copying -----------------------------------------------------------------------------------


async def test_what_is_published_at_the_source_is_read_at_the_replica_while_it_comes(
    make_broker: MakeBroker,
) -> None:
    source, replica = await start_pair(make_broker)
    history = History()
    async with source.connect() as mq, replica.connect() as copy:
        await mq.create_topic("orders")
        await caught_up(source, replica)
        follower = Follower(copy)
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(follower.run())
            publishing = group.create_task(history.publish_batches(mq, "a"))
            await until(lambda: len(history.acked) > 2_000, within_s=30)
            history.is_over = True
            await publishing
            stored = await read_all(mq)
            await follower.caught_up(len(stored))
            reading.cancel()
        follower.check(stored)
        assert (await copy.find("orders", text="a:7"))[0].offset == (
            await mq.find("orders", text="a:7")
        )[0].offset
        status = await caught_up(source, replica)
        assert (status.role, status.source, status.lag_events) == ("replica", source.address, 0)
        [described] = (await mq.replication()).replicas
        assert (described.name, described.connected) == ("copy-1", True)
    await check_same_logs(source, replica)


async def test_a_source_and_a_replica_that_are_killed_under_load_have_one_log_in_the_end(
    make_broker: MakeBroker,
) -> None:
    source, replica = await start_pair(make_broker, **SMALL)
    moments = random.Random(16)
    history = History()
    async with source.connect() as one, source.connect() as two:
        await one.create_topic("orders")
        async with asyncio.TaskGroup() as group:
            publishing = [
                group.create_task(history.publish_singles(one, "a")),
                group.create_task(history.publish_batches(two, "b", size=200)),
            ]
            for _ in range(KILLS):
                for victim in (source, replica):
                    await asyncio.sleep(moments.uniform(0.1, 0.6))
                    await victim.restart()
            await until(lambda: len(history.acked) > 1_000, within_s=60)
            history.is_over = True
            await asyncio.wait(publishing)
        history.check(await read_all(one))
    await caught_up(source, replica, within_s=60)
    await reads_the_same(source, replica)
    await check_same_logs(source, replica)


async def test_a_connection_that_is_torn_again_and_again_loses_nothing(
    make_broker: MakeBroker,
) -> None:
    source = make_broker(**SMALL)
    await source.start()
    history = History()
    async with Proxy(source.port) as proxy, source.connect() as mq:
        replica = make_replica(make_broker, proxy.address)
        await replica.start()
        publishing = asyncio.ensure_future(history.publish_batches(mq, "a", size=200))
        for _ in range(5):
            await asyncio.sleep(0.3)
            proxy.tear()
        history.is_over = True
        await publishing
        await caught_up(source, replica)
        await check_same_logs(source, replica)


@pytest.mark.slow
async def test_a_source_that_is_silent_is_noticed_within_15_s(make_broker: MakeBroker) -> None:
    source = make_broker()
    await source.start()
    async with Proxy(source.port) as proxy, source.connect() as mq:
        replica = make_replica(make_broker, proxy.address)
        await replica.start()
        await mq.publish("orders", "a")
        await caught_up(source, replica)
        proxy.silence()
        await mq.publish("orders", "b")

        async def is_lost() -> bool:
            return (await replication(replica)).state == "connecting"

        await until(is_lost, within_s=15)
        proxy.resume()
        await caught_up(source, replica, within_s=45)
        async with replica.connect() as copy:
            assert await read_all(copy) == {0: "a", 1: "b"}


@pytest.mark.slow
async def test_a_source_that_hangs_goes_on_with_its_replica_when_it_wakes_up(
    make_broker: MakeBroker,
) -> None:
    source, replica = await start_pair(make_broker)
    async with source.connect() as mq:
        await mq.publish("orders", "a")
        await caught_up(source, replica)
        os.kill(source.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(16)
            assert (await replication(replica)).state == "connecting"
        finally:
            os.kill(source.pid, signal.SIGCONT)
        await mq.publish("orders", "b")
    await caught_up(source, replica, within_s=60)
    await check_same_logs(source, replica)


async def test_a_replica_of_a_replica_has_the_same_log_and_follows_its_promotion(
    make_broker: MakeBroker,
) -> None:
    first, second = await start_pair(make_broker)
    third = make_replica(make_broker, second, "copy-2")
    await third.start()
    async with first.connect() as mq:
        await mq.publish_many("orders", [str(n) for n in range(1_000)])
    await caught_up(first, second)
    await caught_up(second, third)
    await reads_the_same(first, third)
    async with second.connect() as mq:
        promoted = await mq.promote()
        assert promoted.source_stepped_down
        await mq.publish("orders", "of the new history")
    assert (await caught_up(second, third)).lineage == promoted.lineage
    await reads_the_same(second, third)
    await check_same_logs(second, third)


# --- wrong settings: one clear error -----------------------------------------------------------


async def test_a_wrong_token_is_one_error_and_no_loop(make_broker: MakeBroker) -> None:
    source = make_broker(auth_tokens="ops:right")
    await source.start()
    refused = make_replica(make_broker, source, replica_token="s3cret-of-nobody")
    refused.launch()
    assert await refused.ended() == 2
    assert refused.output.count("follows no longer") == 1
    assert "the token is missing or not known" in refused.output
    assert "s3cret" not in refused.output
    accepted = make_replica(make_broker, source, replica_token="right")
    await accepted.start()
    await said(source, "replica 'copy-1' follows")


async def test_a_replica_of_itself_is_refused(make_broker: MakeBroker) -> None:
    broker = make_broker(replica_name="copy-1")
    broker.settings["replica_of"] = broker.address
    broker.launch()
    assert await broker.ended() == 2
    assert "a node cannot follow itself" in broker.output


async def test_a_replica_with_a_foreign_log_is_refused_and_keeps_it(
    make_broker: MakeBroker,
) -> None:
    source, foreign = make_broker(), make_broker()
    for broker in (source, foreign):
        await broker.start()
        async with broker.connect() as mq:
            await mq.publish_many("orders", [f"{broker.port}:{n}" for n in range(10)])
    await foreign.stop()
    before = entries_in(foreign.folder)
    foreign.settings |= {"replica_of": source.address, "replica_name": "copy-1"}
    foreign.launch()
    assert await foreign.ended() == 1
    assert "the history of the replica differs at event" in foreign.output
    assert "Move its folder away" in foreign.output
    assert entries_in(foreign.folder) == before
    assert (await replication(source)).replicas == []


async def test_a_second_replica_with_the_same_name_is_refused_and_the_first_goes_on(
    make_broker: MakeBroker,
) -> None:
    source, first = await start_pair(make_broker)
    await caught_up(source, first)
    second = make_replica(make_broker, source)
    second.launch()
    assert await second.ended() == 1
    assert "replica 'copy-1' follows already" in second.output
    async with source.connect() as mq:
        await mq.publish("orders", "a")
    await caught_up(source, first)


# --- promotion ---------------------------------------------------------------------------------


async def test_nothing_acknowledged_is_lost_when_a_replica_is_promoted_under_load(
    make_broker: MakeBroker,
) -> None:
    source, replica = await start_pair(make_broker)
    history = History()
    async with source.connect(timeout="3s") as mq:
        await mq.create_topic("orders")
        async with asyncio.TaskGroup() as group:
            publishing = [
                group.create_task(publish_until_refused(mq, history, f"p{n}")) for n in range(4)
            ]
            await until(lambda: len(history.acked) > 500, within_s=30)
            async with replica.connect() as copy:
                promoted = await copy.promote()
            await asyncio.wait(publishing, timeout=20)
    assert promoted.source_stepped_down
    assert history.refused | history.unknown, "the load went on until the source stepped down"
    async with replica.connect() as mq:
        stored = await read_all(mq)
        history.check(stored)
        await mq.publish("orders", "after:0")
    # What the source had accepted is a prefix of the new history.
    await source.stop()
    await replica.stop()
    theirs, ours = entries_in(source.folder), entries_in(replica.folder)
    assert ours[: len(theirs)] == theirs


async def test_what_was_replicated_before_the_source_died_is_there_after_the_promotion(
    make_broker: MakeBroker,
) -> None:
    source, replica = await start_pair(make_broker)
    receipts: list[onward.Receipt] = []

    async def publish(mq: onward.Client) -> None:
        while True:
            futures = [mq.publish_soon("orders", f"a:{n}") for n in range(16)]
            results = await asyncio.gather(*futures, return_exceptions=True)
            receipts.extend(one for one in results if isinstance(one, onward.Receipt))
            if any(isinstance(one, OnwardError) for one in results):
                return

    async with source.connect(timeout="2s") as mq:
        publishing = asyncio.ensure_future(publish(mq))
        await until(lambda: len(receipts) > 1_000, within_s=30)
        await source.kill()
        async with replica.connect(timeout="20s") as copy:
            promoted = await copy.promote()
            stored = {message.offset: message async for message in copy.read("orders")}
            await copy.publish("orders", "after:0")
        await publishing
    assert not promoted.source_stepped_down
    for receipt in receipts:
        if receipt.event_id <= promoted.event_id:
            assert stored[receipt.offset].event_id == receipt.event_id
    lost = [receipt for receipt in receipts if receipt.offset not in stored]
    assert all(receipt.event_id > promoted.event_id for receipt in lost)


async def test_a_source_with_entries_that_nobody_else_has_cannot_follow_its_successor(
    make_broker: MakeBroker,
) -> None:
    source, replica = await start_pair(make_broker)
    async with source.connect() as mq:
        await mq.publish("orders", "a")
        await caught_up(source, replica)
        await replica.stop()
        await mq.publish("orders", "never replicated")
    await source.kill()
    await replica.start()
    async with replica.connect() as mq:
        await mq.promote()
        await mq.publish("orders", "b")
    before = entries_in(source.folder)
    source.settings |= {"replica_of": replica.address, "replica_name": "copy-2"}
    source.launch()
    assert await source.ended() == 1
    assert "the history of the replica differs at event" in source.output
    assert entries_in(source.folder) == before


async def test_groups_schedules_and_repeats_go_on_after_a_promotion(
    make_broker: MakeBroker,
) -> None:
    source, replica = await start_pair(make_broker)
    async with Peer(source.port) as peer, source.connect() as mq:
        first = await peer.publish("orders", b"0", b"1", producer_id=11, sequence=1)
        await mq.publish_many("orders", ["2", "3"])
        for delivery in await mq.fetch("orders", group="billing", n=2):
            await delivery.ack()
        await mq.publish("orders", "later", delay="4s")
    async with replica.connect() as mq:
        await caught_up(source, replica)
        assert (await mq.group("billing")).topics[0].cursor == 2
        await mq.promote()
        async with Peer(replica.port) as peer:
            again = await peer.publish("orders", b"0", b"1", producer_id=11, sequence=1)
        assert (again.repeat, again.base_offset) == (True, first.base_offset)
        bodies: list[str] = []
        async with asyncio.timeout(20):
            while len(bodies) < 3:
                for delivery in await mq.fetch("orders", group="billing", n=5, wait="5s"):
                    bodies.append(delivery.text)
                    await delivery.ack()
        assert bodies == ["2", "3", "later"]


async def test_a_promotion_is_refused_while_the_source_answers_and_does_not_step_down(
    make_broker: MakeBroker,
) -> None:
    first, second = await start_pair(make_broker)
    third = make_replica(make_broker, second, "copy-2")
    await third.start()
    await caught_up(second, third)
    async with third.connect() as mq:
        with pytest.raises(Conflict, match="answers and does not step down") as caught:
            await mq.promote()
        assert caught.value.command == "onward promote --force"
        # Nothing has changed: it still follows.
        async with first.connect() as source:
            await source.publish("orders", "a")
        await caught_up(first, second)
        assert (await caught_up(second, third)).role == "replica"
        promoted = await mq.promote(force=True)
        assert (promoted.lineage.epoch, promoted.source_stepped_down) == (1, False)
        await mq.publish("orders", "b")
    assert (await replication(first)).role == "leader"
    with pytest.raises(InvalidRequest, match="leads already"):
        async with third.connect() as mq:
            await mq.promote()


async def test_an_old_source_refuses_clients_that_have_seen_the_new_history_and_retires(
    make_broker: MakeBroker,
) -> None:
    source, replica = await start_pair(make_broker)
    async with source.connect() as mq:
        await mq.publish("orders", "a")
    await caught_up(source, replica)
    await source.kill()
    async with replica.connect() as mq:
        lineage = (await mq.promote()).lineage
    await source.start()
    assert (await replication(source)).role == "leader", "nobody has told it yet"
    async with Peer(source.port, hello=False) as peer:
        known = {"epoch": lineage.epoch, "id": lineage.id}
        hello = json.dumps({"version": 1, "lineage": known}).encode()
        peer.write(PREFACE + frame(Kind.HELLO, 0, hello))
        kind, _, payload = await peer.frame()
        assert (kind, decode_error(payload).code) == (Kind.ERROR, "conflict")
    await said(source, "another node was promoted: this node takes no writes any more")

    async def is_retired() -> bool:
        return (await replication(source)).role == "retired"

    await until(is_retired)
    await source.restart()
    async with Peer(source.port) as peer:
        with pytest.raises(NotLeader, match="has stepped down"):
            await peer.publish("orders", b"b", producer_id=11, sequence=1)


async def publish_until_refused(mq: onward.Client, history: History, publisher: str) -> None:
    """Publish a few at a time until the node takes no more."""
    number = 0
    while not history.is_over:
        bodies = [f"{publisher}:{number + n}" for n in range(8)]
        history.attempted.update(bodies)
        futures = [mq.publish_soon(history.topic, body) for body in bodies]
        results = await asyncio.gather(*futures, return_exceptions=True)
        for body, result in zip(bodies, results, strict=True):
            if isinstance(result, onward.Receipt):
                history.ack(body, result.offset)
            else:
                assert isinstance(result, OnwardError)
                history.failed([body], result)
                history.is_over = True
        number += 8
