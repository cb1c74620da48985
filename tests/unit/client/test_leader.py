"""Clients find the leader, follow it when another node is promoted, and refuse an old history."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

import pytest

import onward
from onward.broker.futures import future_of
from onward.broker.state import LineageRecord
from onward.client.address import parse_addresses
from onward.client.client import Client
from onward.client.link import Link
from onward.client.nodes import LEARNED_MAX, Node, Nodes, socket_dial
from onward.errors import (
    NotConnected,
    NotLeader,
    UnknownTopic,
)
from onward.protocol.operations.replicas import StepDown

from .serving import Served, serving, source_and_copy, until


def both(first: Served, second: Served, **options: object) -> Client:
    address = f"{first.address},{second.address}"
    return onward.connect(address, **options)  # type: ignore[arg-type]


def node_of(mq: Client) -> str:
    link = mq._keeper().link
    assert link is not None
    return link.welcome.node


async def begin_history(node: Served, epoch: int, id_: str) -> None:
    """Let a node have a history of its own, as if it had been promoted."""
    record = LineageRecord(epoch=epoch, id=id_, node=node.broker.node)
    await future_of(lambda done: node.broker.publishing.change_lineage(record, done=done))


# --- where a client connects to ------------------------------------------------------------------


async def test_the_leader_is_used_whatever_its_place_in_the_list() -> None:
    async with (
        source_and_copy() as (source, copy),
        both(copy, source) as mq,
        both(source, copy) as other,
    ):
        assert node_of(mq) == node_of(other) == source.broker.node


async def test_a_client_of_a_replica_reads_there_and_stays_there() -> None:
    async with source_and_copy() as (source, copy):
        async with source.connect() as mq:
            await mq.publish_many("orders", ["a", "b"])
        await copy.caught_up(source)
        async with copy.connect() as mq:
            assert [message.text async for message in mq.read("orders")] == ["a", "b"]
            assert (await mq.topic("orders")).next_offset == 2
            assert node_of(mq) == copy.broker.node


async def test_a_follower_is_used_while_nobody_leads_and_the_leader_when_it_is_back() -> None:
    async with source_and_copy() as (source, copy):
        async with source.connect() as mq:
            await mq.publish("orders", "a")
        await copy.caught_up(source)
        async with both(source, copy) as mq:
            await source.kill()
            assert [message.text async for message in mq.read("orders")] == ["a"]
            assert node_of(mq) == copy.broker.node
            await source.start()
            await until(lambda: node_of(mq) == source.broker.node)
            assert (await mq.publish("orders", "b")).offset == 1


async def test_a_node_that_does_not_answer_delays_nobody_for_long() -> None:
    node = Served()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with serving(node):
            port = silent.getsockname()[1]
            began = asyncio.get_running_loop().time()
            async with onward.connect(f"127.0.0.1:{port},{node.address}") as mq:
                await mq.publish("orders", "a")
            assert asyncio.get_running_loop().time() - began < 3


# --- writes --------------------------------------------------------------------------------------


async def test_a_write_goes_to_the_leader_that_a_replica_names() -> None:
    async with source_and_copy() as (source, copy), copy.connect() as mq:
        assert (await mq.publish("orders", "a")).offset == 0
        assert node_of(mq) == source.broker.node
    async with source_and_copy() as (source, copy), copy.connect() as mq:
        await mq.create_topic("orders")
        await mq.create_group("billing", "orders")
        assert node_of(mq) == source.broker.node
    async with (
        source_and_copy() as (source, copy),
        copy.connect() as mq,
        mq.consume("orders", group="billing"),
    ):
        assert node_of(mq) == source.broker.node


async def test_a_search_for_the_leader_that_is_cancelled_leaves_no_connection() -> None:
    async with source_and_copy() as (_, copy):
        links: list[Link] = []
        is_waiting = asyncio.Event()

        async def dial_copy(make: Callable[[], Link]) -> Link:
            links.append(await socket_dial(parse_addresses(copy.address)[0])(make))
            return links[-1]

        async def dial_nobody(make: Callable[[], Link]) -> Link:
            is_waiting.set()
            await asyncio.Event().wait()
            raise AssertionError("never reached")

        nodes = Nodes(
            [dial_copy], name="test", token=None, addresses=(), probe=None, learns=False,
            checks_history=True,
        )  # fmt: skip
        nodes._learned["elsewhere:7700"] = Node("elsewhere:7700", dial_nobody)
        search = asyncio.ensure_future(nodes.connect(also_learned=True))
        await is_waiting.wait()
        assert links[0].is_open
        search.cancel()
        await asyncio.wait([search])
        await asyncio.wait_for(links[0].lost, timeout=5)


async def test_a_leader_is_named_by_what_it_advertises() -> None:
    source = Served(advertise="broker-1.example:7700")
    copy = Served(of=source.address)
    last = Served(of=copy.address, name="copy of the copy")
    async with serving(source, copy, last):
        async with source.connect() as mq:
            link = mq._keeper().link
            assert link is not None
            assert (link.welcome.is_leader, link.welcome.leader) == (True, "broker-1.example:7700")
        for node in (last, copy):
            await until(lambda: node.broker.gate.leader == "broker-1.example:7700")  # noqa: B023
            async with node.connect(timeout="300ms") as mq:
                with pytest.raises(NotLeader) as refused:
                    await mq.publish("orders", "a")
                assert refused.value.leader == "broker-1.example:7700"


@pytest.mark.parametrize("has_others", [False, True])
async def test_without_a_leader_a_write_raises_not_leader_with_its_address(
    has_others: bool,
) -> None:
    async with source_and_copy() as (source, copy):
        async with source.connect() as mq:
            await mq.publish("orders", "a")
        await copy.caught_up(source)
        address = f"{source.address},{copy.address}" if has_others else copy.address
        await source.kill()
        async with onward.connect(address, timeout="400ms") as mq:
            for call in (
                lambda: mq.publish("orders", "b"),
                lambda: mq.publish("orders", "c", timeout="200ms"),
                lambda: mq.publish_many("orders", ["d", "e"]),
                lambda: mq.create_topic("events"),
                lambda: mq.set_recurring("tick", "ticks", "t", every="5s"),
                lambda: mq.consume("orders", group="billing").join(),
            ):
                with pytest.raises(NotLeader) as refused:
                    await call()
                assert refused.value.leader == source.address
            assert [message.text async for message in mq.read("orders")] == ["a"]


async def test_what_concerns_a_node_is_not_asked_of_another_one() -> None:
    async with source_and_copy() as (source, copy):
        for mq in (copy.connect(), both(source, copy)):
            async with mq:
                await mq.publish("orders", "a")
        async with copy.connect() as mq:
            with pytest.raises(NotLeader):
                await mq._call(StepDown())
        assert source.broker.gate.is_leading


async def test_a_replica_refuses_to_hold_a_group_and_the_client_holds_it_at_the_leader() -> None:
    async with source_and_copy() as (source, copy), copy.connect() as mq:
        async with source.connect() as other:
            await other.create_group("totals", "orders")
        await copy.caught_up(source)
        await mq.hold_group("totals", holder="a test")
        assert node_of(mq) == source.broker.node
        assert source.broker.group_holds.holder_of("totals") == "a test"
        assert copy.broker.group_holds.holder_of("totals") == ""


async def test_a_replica_creates_no_topic_for_a_reader() -> None:
    async with source_and_copy() as (source, copy), copy.connect() as mq:
        for follow in (False, True):
            with pytest.raises(UnknownTopic):
                await anext(aiter(mq.read("orders", follow=follow)))
        assert node_of(mq) == copy.broker.node
        assert source.broker.catalogue.user_count == 0


# --- after a promotion ---------------------------------------------------------------------------


@pytest.mark.parametrize("is_dead", [True, False])
async def test_everybody_goes_on_after_a_promotion(is_dead: bool) -> None:
    async with source_and_copy() as (source, copy), both(source, copy, timeout="15s") as mq:
        seen: list[str] = []
        done: list[str] = []

        async def read() -> None:
            async for message in mq.read("orders", follow=True):
                seen.append(message.text)  # noqa: PERF401  # one by one, as they come

        async def consume() -> None:
            async for delivery in mq.consume("orders", group="billing"):
                done.append(delivery.text)
                await delivery.ack()

        await mq.publish("orders", "0")
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(read()), group.create_task(consume())]
            await until(lambda: seen == done == ["0"])
            await copy.caught_up(source)
            if is_dead:
                await source.kill()
                waiting = mq.publish_soon("orders", "1")
                creating = group.create_task(mq.create_topic("events"))
                await asyncio.sleep(0.1)
                promoted = await copy.promote()
            else:
                promoted = await copy.promote()
                waiting = mq.publish_soon("orders", "1")
                creating = group.create_task(mq.create_topic("events"))
            assert (await waiting).offset == 1
            await creating
            assert promoted.source_stepped_down != is_dead
            await until(lambda: seen == done == ["0", "1"])
            assert node_of(mq) == copy.broker.node
            assert mq._keeper()._nodes.lineage == promoted.lineage
            for task in tasks:
                task.cancel()


async def test_a_source_that_has_stepped_down_says_so_again() -> None:
    async with source_and_copy() as (source, copy):
        async with source.connect() as mq:
            await mq.publish("orders", "0")
            stepped_down = await mq._call(StepDown(successor="another"))
            assert await mq._call(StepDown(successor="another")) == stepped_down
        promoted = await copy.promote()
        assert promoted.source_stepped_down
        assert promoted.event_id == stepped_down.event_id


async def test_a_reader_alone_leaves_a_source_that_has_stepped_down() -> None:
    async with source_and_copy() as (source, copy), both(source, copy) as mq:
        async with source.connect() as other:
            await other.publish("orders", "0")
        await copy.caught_up(source)
        reader = aiter(mq.read("orders", follow=True))
        assert (await anext(reader)).text == "0"
        await copy.promote()
        async with copy.connect() as other:
            await other.publish("orders", "1")
        assert (await asyncio.wait_for(anext(reader), 15)).text == "1"
        assert node_of(mq) == copy.broker.node


async def test_a_client_of_the_replica_alone_writes_to_it_once_it_is_promoted() -> None:
    async with source_and_copy() as (source, copy), copy.connect(timeout="15s") as mq:
        await source.kill()
        waiting = [mq.publish_soon("orders", str(number)) for number in range(3)]
        link = mq._keeper().link
        await asyncio.sleep(0.2)
        await copy.promote()
        assert [receipt.offset for receipt in await asyncio.gather(*waiting)] == [0, 1, 2]
        assert mq._keeper().link is link, "the connection to the node is kept"


async def test_a_blocking_client_goes_on_after_a_promotion() -> None:
    async with source_and_copy() as (source, copy):
        mq = onward.connect_sync(f"{source.address},{copy.address}", timeout="15s")
        await asyncio.to_thread(mq.open)
        await asyncio.to_thread(mq.publish, "orders", "0")
        await copy.caught_up(source)
        await source.kill()
        waiting = asyncio.create_task(asyncio.to_thread(mq.publish, "orders", "1"))
        await asyncio.sleep(0.1)
        await copy.promote()
        assert (await waiting).offset == 1
        await asyncio.to_thread(mq.close)


async def test_a_publish_that_both_nodes_have_is_stored_once() -> None:
    async with source_and_copy() as (source, copy), both(source, copy, timeout="15s") as mq:
        producer = mq._producer()
        await mq.publish("orders", "0")
        receipt = mq.publish_soon("orders", "1")
        await until(lambda: len(producer._sent) == 1 or receipt.done())
        link = mq._keeper().link
        assert link is not None
        # The answer is lost: nobody expects it any more.
        link._waiting.clear()
        await until(lambda: source.broker.catalogue.by_name["orders"].next_offset == 2)
        await copy.caught_up(source)
        await source.kill()
        await copy.promote()
        assert (await receipt).offset == 1
        assert [message.text async for message in mq.read("orders")] == ["0", "1"]


async def test_a_reader_that_is_ahead_of_a_replica_waits_for_it() -> None:
    async with source_and_copy() as (source, copy), both(source, copy) as mq:
        await mq.publish("orders", "0")
        await copy.caught_up(source)
        replica = copy.broker.replica
        assert replica is not None
        await replica.close()
        reader = aiter(mq.read("orders", follow=True))
        await mq.publish("orders", "1")
        assert [(await anext(reader)).text for _ in range(2)] == ["0", "1"]
        await source.kill()
        waiting = asyncio.ensure_future(anext(reader))
        await until(lambda: bool(copy.broker.delivering._open))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await source.start()
        async with source.connect() as other:
            await other.publish("orders", "2")
        assert (await asyncio.wait_for(waiting, 15)).text == "2"


@pytest.mark.parametrize("is_connected", [True, False])
async def test_a_reader_of_what_is_lost_goes_on_where_the_new_history_begins(
    is_connected: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with source_and_copy() as (source, copy), both(source, copy) as mq:
        await mq.publish("orders", "0")
        await copy.caught_up(source)
        replica = copy.broker.replica
        assert replica is not None
        await replica.close()
        reader = aiter(mq.read("orders", follow=True))
        await mq.publish_many("orders", ["lost", "lost, too"])
        assert [(await anext(reader)).text for _ in range(3)] == ["0", "lost", "lost, too"]
        await source.kill()
        waiting = asyncio.ensure_future(anext(reader))
        if is_connected:
            await until(lambda: bool(copy.broker.delivering._open))
        promoted = await copy.promote()
        assert promoted.event_id == promoted.lineage.since
        async with copy.connect() as other:
            await other.publish_many("orders", ["1", "2", "3"])
        found = [await asyncio.wait_for(waiting, 15), *[await anext(reader) for _ in range(2)]]
        assert [(one.offset, one.text) for one in found] == [(1, "1"), (2, "2"), (3, "3")]
        assert "are lost with the node that was replaced" in caplog.text


# --- histories -----------------------------------------------------------------------------------


async def test_an_old_leader_is_refused_and_hears_that_it_is_old() -> None:
    async with source_and_copy() as (source, copy), both(source, copy, timeout="1s") as mq:
        await mq.publish("orders", "0")
        await copy.caught_up(source)
        await source.kill()
        await copy.promote()
        await mq.publish("orders", "1")
        await until(lambda: mq._keeper()._nodes.lineage == copy.broker.state.lineage)
        await copy.kill()
        await source.start()
        with pytest.raises(NotConnected, match=r"history 0.*seen 1-.*was promoted"):
            await mq.publish("orders", "2")
        with pytest.raises(NotConnected, match="was promoted"):
            await mq.topics()
        assert not source.broker.gate.is_leading
        await copy.start(of="")
        assert (await mq.publish("orders", "3", timeout="15s")).offset == 2


async def test_of_two_that_lead_a_new_client_takes_the_newer_history(
    caplog: pytest.LogCaptureFixture,
) -> None:
    old, new = Served(), Served()
    async with serving(old, new):
        await begin_history(new, 1, "abc")
        with caplog.at_level(logging.ERROR, logger="onward.client"):
            async with both(old, new) as mq:
                assert node_of(mq) == new.broker.node
                await mq.publish("orders", "0")
        assert len([one for one in caplog.records if "it has history 0" in one.getMessage()]) == 1
        await until(lambda: not old.broker.gate.is_leading)
        assert old.broker.catalogue.user_count == 0


async def test_a_foreign_history_of_the_same_age_is_refused() -> None:
    ours, foreign = Served(), Served()
    async with serving(ours, foreign):
        await begin_history(ours, 1, "abc")
        await begin_history(foreign, 1, "def")
        async with both(ours, foreign, timeout="1s") as mq:
            await mq.publish("orders", "0")
            await ours.kill()
            with pytest.raises(NotConnected, match="nothing to do with each other"):
                await mq.topics()
            assert foreign.broker.gate.is_leading, "it is not older"


# --- addresses that are learned ------------------------------------------------------------------


def nodes_at(address: str) -> Nodes:
    dial = socket_dial(parse_addresses(address)[0])
    return Nodes(
        [dial], name="test", token=None, addresses=[address], probe=None, learns=True,
        checks_history=True,
    )  # fmt: skip


def told(nodes: Nodes, leader: str | None) -> list[str]:
    nodes.learn(leader, told_by=nodes.listed[0])
    return list(nodes._learned)


def test_only_a_host_and_port_are_learned() -> None:
    nodes = nodes_at("a:7700")
    for text in (None, "", "unix:/run/x.sock", "file:./x", "memory:", "http://b", "b:x", "a:7700"):
        assert told(nodes, text) == []
    assert told(nodes, "b:7700") == ["b:7700"]
    assert told(nodes, "b:7700,c:1") == ["b:7700", "c:1"]
    for number in range(20):
        told(nodes, f"d{number}:7700")
    assert len(nodes._learned) == LEARNED_MAX


def test_a_loopback_address_is_learned_only_on_the_same_machine() -> None:
    assert told(nodes_at("10.0.0.1:7700"), "127.0.0.1:7701") == []
    assert told(nodes_at("10.0.0.1:7700"), "localhost:7701") == []
    assert told(nodes_at("localhost:7700"), "127.0.0.1:7701") == ["127.0.0.1:7701"]
    assert told(nodes_at("unix:/run/onward.sock"), "127.0.0.1:7701") == ["127.0.0.1:7701"]


async def test_a_broker_inside_the_process_learns_nothing() -> None:
    async with onward.connect("memory:") as mq:
        mq._keeper()._nodes.learn("b:7700", told_by=None)
        assert mq._keeper()._nodes._learned == {}
