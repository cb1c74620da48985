"""Clients over restarts, kills and pauses of their broker."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import onward
from onward.errors import NotConnected, OnwardError, OutcomeUnknown

from .conftest import MakeBroker
from .history import Follower, read_all
from .running import BrokerProcess, until
from .wire import Peer


@contextmanager
def paused(broker: BrokerProcess) -> Iterator[None]:
    """A broker that hangs: it answers nothing, and its connections stay."""
    os.kill(broker.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(broker.pid, signal.SIGCONT)


async def test_a_repeat_after_a_restart_is_stored_once(make_broker: MakeBroker) -> None:
    broker = make_broker()
    await broker.start()
    async with Peer(broker.port) as peer:
        first = await peer.publish("orders", b"a", b"b", producer_id=11, sequence=1)
        again = await peer.publish("orders", b"a", b"b", producer_id=11, sequence=1)
        assert not first.repeat
        assert again.repeat
    for restart in (broker.kill, broker.stop):
        await restart()
        await broker.start()
        async with Peer(broker.port) as peer:
            again = await peer.publish("orders", b"a", b"b", producer_id=11, sequence=1)
            assert again.repeat
            assert (again.base_offset, again.event_id) == (first.base_offset, first.event_id)
    async with Peer(broker.port) as peer:
        new = await peer.publish("orders", b"c", producer_id=11, sequence=2)
        assert (new.base_offset, new.repeat) == (2, False)
    async with broker.connect() as mq:
        assert await read_all(mq) == {0: "a", 1: "b", 2: "c"}


async def test_a_repeat_is_answered_even_when_its_topic_takes_nothing_more(
    make_broker: MakeBroker,
) -> None:
    broker = make_broker()
    await broker.start()
    async with Peer(broker.port) as peer, broker.connect() as mq:
        first = await peer.publish("orders", b"a", producer_id=11, sequence=1)
        await mq.change_topic("orders", rule="read-only")
        again = await peer.publish("orders", b"a", producer_id=11, sequence=1)
        assert (again.base_offset, again.repeat) == (first.base_offset, True)
        await mq.delete_topic("orders")
        again = await peer.publish("orders", b"a", producer_id=11, sequence=1)
        assert (again.base_offset, again.repeat) == (first.base_offset, True)
        assert not await mq.has_topic("orders"), "a repeat creates nothing"


async def test_reader_and_producer_survive_restarts_without_hearing_of_them(
    make_broker: MakeBroker,
) -> None:
    broker = make_broker()
    await broker.start()
    async with broker.connect() as mq:
        await mq.publish("orders", "0")
        follower = Follower(mq)
        following = asyncio.ensure_future(follower.run())
        await follower.caught_up(1)
        for number, end in enumerate((broker.kill, broker.stop, broker.kill), start=1):
            await end()
            waiting = mq.publish_soon("orders", str(number))
            await broker.start()
            assert (await waiting).offset == number
            await follower.caught_up(number + 1)
        assert [body for _, body in follower.seen] == ["0", "1", "2", "3"]
        following.cancel()
        await asyncio.wait([following])


async def test_a_reader_of_what_is_latest_misses_nothing_during_a_restart(
    make_broker: MakeBroker, tmp_path: Path
) -> None:
    broker = make_broker(server_unix_socket=tmp_path / "onward.sock")
    door = tmp_path / "door.sock"
    door.symlink_to("onward.sock")
    await broker.start()
    seen: list[str] = []

    async def follow(mq: onward.Client) -> None:
        async for message in mq.read("orders", start="latest", follow=True):
            seen.extend([message.text])

    async def is_read() -> bool:
        return (await other.topic("orders")).readers > 0

    async with onward.connect(f"unix:{door}") as mq, broker.connect() as other:
        await other.publish("orders", "before")
        following = asyncio.ensure_future(follow(mq))
        await until(is_read)
        door.unlink()
        await broker.restart()
        await other.publish("orders", "while the reader was away")
        door.symlink_to("onward.sock")
        await until(is_read)
        await other.publish("orders", "after")
        await until(lambda: "after" in seen)
        following.cancel()
        await asyncio.wait([following])
    assert seen == ["while the reader was away", "after"]


async def test_a_publish_that_was_never_sent_is_not_unknown(make_broker: MakeBroker) -> None:
    broker = make_broker()
    await broker.start()
    async with broker.connect(timeout="700ms") as mq:
        await mq.publish("orders", "0")
        await broker.kill()
        await asyncio.sleep(0.1)
        with pytest.raises(NotConnected):
            await mq.publish("orders", "1")
        with pytest.raises(NotConnected):
            await mq.publish_many("orders", ["2", "3"])
        with pytest.raises(NotConnected):
            await mq.topics()
        await broker.start()
        async with asyncio.timeout(10):
            while True:
                try:
                    await mq.publish("orders", "4")
                    break
                except NotConnected:
                    continue
        assert await read_all(mq) == {0: "0", 1: "4"}


async def test_every_call_keeps_its_deadline_when_the_broker_hangs(
    make_broker: MakeBroker,
) -> None:
    broker = make_broker()
    await broker.start()
    loop = asyncio.get_running_loop()
    async with broker.connect(timeout="1s") as mq:
        await mq.publish("orders", "0")
        calls = {
            "publish": lambda: mq.publish("orders", "1"),
            "publish with its own deadline": lambda: mq.publish("orders", "2", timeout="500ms"),
            "publish_many": lambda: mq.publish_many("orders", ["3"]),
            "create_topic": lambda: mq.create_topic("another"),
            "topics": lambda: mq.topics(),
            "status": lambda: mq.status(),
            "get": lambda: mq.get("orders", 0),
        }
        unknown = {"publish", "publish with its own deadline", "publish_many", "create_topic"}
        with paused(broker):
            for name, call in calls.items():
                started = loop.time()
                with pytest.raises(OnwardError) as caught:
                    await call()
                assert loop.time() - started < 2.5, name
                if name in unknown:
                    assert isinstance(caught.value, OutcomeUnknown), name

        async def has_more() -> bool:
            return (await mq.topic("orders")).next_offset > 1

        await until(has_more)
        stored = list((await read_all(mq)).values())
        assert stored[0] == "0"
        assert len(stored) == len(set(stored)), "nothing is stored twice"


async def test_a_broker_that_hangs_for_long_is_left_and_found_again(
    make_broker: MakeBroker,
) -> None:
    broker = make_broker(server_heartbeat_ms=200)
    await broker.start()
    async with broker.connect(timeout="10s") as mq:
        await mq.publish("orders", "0")
        with paused(broker):
            waiting = mq.publish_soon("orders", "1")
            await asyncio.sleep(1.5)
        assert (await waiting).offset == 1
        assert await read_all(mq) == {0: "0", 1: "1"}


async def test_the_second_address_is_used_when_the_first_does_not_answer(
    make_broker: MakeBroker,
) -> None:
    first, second = make_broker(), make_broker()
    await second.start()
    async with onward.connect(f"{first.address},{second.address}") as mq:
        await mq.publish("orders", "0")
    async with second.connect() as mq:
        assert await read_all(mq) == {0: "0"}
