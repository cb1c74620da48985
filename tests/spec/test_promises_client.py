"""Promises of the client."""

import asyncio
import threading

import pytest

import onward
from onward.errors import NotConnected

from .engines import BOTH, Engine


@BOTH
async def test_opening_again_changes_nothing_or_opens_a_closed_client(
    engine: Engine,
) -> None:
    mq = engine.connect()
    for _ in range(2):
        async with mq:
            await mq.publish("orders", b"x")
            await mq.open()
            await mq.publish("orders", b"y")
        with pytest.raises(NotConnected):
            await mq.publish("orders", b"x")


async def test_clients_of_one_memory_share_it_and_those_of_another_do_not() -> None:
    async with onward.connect("memory:shared") as one, onward.connect("memory:shared") as two:
        await one.publish("orders", b"x")
        assert (await two.topic("orders")).messages == 1
        async with onward.connect("memory:") as other:
            assert not await other.has_topic("orders")
    async with onward.connect("memory:shared") as later:
        assert not await later.has_topic("orders")


async def test_nobody_there_is_an_error_within_the_deadline() -> None:
    with pytest.raises(NotConnected):
        async with onward.connect("127.0.0.1:1", timeout="200ms"):
            pass


@BOTH
async def test_an_exception_closes_the_client_and_comes_out(engine: Engine) -> None:
    async def main() -> None:
        async with engine.connect() as mq:
            await mq.publish("orders", b"x")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await main()


@BOTH
async def test_a_task_that_is_cancelled_while_it_publishes_disturbs_nobody(engine: Engine) -> None:
    async with engine.connect() as mq:
        tasks = [asyncio.ensure_future(mq.publish("orders", str(n))) for n in range(20)]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        kept = [one for one in results if isinstance(one, onward.Receipt)]
        assert len(kept) >= 10
        found = {message.text for message in [m async for m in mq.read("orders")]}
        assert found >= {str(number) for number in range(1, 20, 2)}


def test_the_blocking_client_works_inside_a_program_that_has_a_loop() -> None:
    async def main() -> list[bytes]:
        with onward.connect_sync("memory:") as mq:
            mq.publish("orders", b"x")
            return [message.body for message in mq.read("orders")]

    # Other tests of this process may keep a client open: a Spark session does for its progress.
    threads_before = set(threading.enumerate())
    assert asyncio.run(main()) == [b"x"]
    assert (
        not {one for one in threading.enumerate() if one.name == "onward-client"} - threads_before
    )
