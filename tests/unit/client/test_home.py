"""A client in a forked child or in a second event loop: refused before anything is sent."""

from __future__ import annotations

import asyncio
import os
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

import onward
from onward.broker.broker import Broker
from onward.errors import InvalidRequest, NotConnected
from onward.log.memory_disk import MemoryDisk
from onward.settings import LogSettings, Settings

Use = Callable[[onward.Client, Any], Awaitable[object]]


async def publish_soon(mq: onward.Client, _: Any) -> object:
    return await mq.publish_soon("orders", "x")


async def read(mq: onward.Client, _: Any) -> object:
    return [one async for one in mq.read("orders")]


async def consume(mq: onward.Client, _: Any) -> object:
    async for _delivery in mq.consume("orders", group="other"):
        break
    return None


USES: dict[str, Use] = {
    "publish": lambda mq, _: mq.publish("orders", "x"),
    "publish_soon": publish_soon,
    "publish_many": lambda mq, _: mq.publish_many("orders", ["x"]),
    "delayed": lambda mq, _: mq.publish("orders", "x", delay="1h"),
    "delete_topic": lambda mq, _: mq.delete_topic("orders"),
    "topics": lambda mq, _: mq.topics(),
    "get": lambda mq, _: mq.get("orders", 0),
    "read": read,
    "consume": consume,
    "fetch": lambda mq, _: mq.fetch("orders", group="other", wait="1s"),
    "take": lambda _, consumer: consumer[0].take(),
    "ack": lambda _, consumer: consumer[1].ack(),
    "retry": lambda _, consumer: consumer[1].retry(),
    "release": lambda _, consumer: consumer[1].release(),
}


async def with_broker(work: Callable[[onward.Client, Any], Awaitable[None]]) -> None:
    """Serve a broker on a real socket, and give `work` a client and what it consumed."""
    settings = Settings(log=LogSettings(folder="log", preallocate_bytes=0, disk_reserve_bytes=0))
    broker = await Broker.open(settings, disk=MemoryDisk())
    loop = asyncio.get_running_loop()
    server = await loop.create_server(broker.session, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        async with onward.connect(f"127.0.0.1:{port}", timeout="5s") as mq:
            await mq.publish("orders", "first")
            async with mq.consume("orders", group="billing", credit=1) as consumer:
                (delivery,) = await consumer.take()
                await work(mq, (consumer, delivery))
                await delivery.ack()
            # The connection still works, and nothing came that nobody here sent.
            assert [one.text async for one in mq.read("orders")] == ["first"]
            assert not [one async for one in mq.list_scheduled()]
    finally:
        server.close()
        await broker.stop()


def in_other_loop(make: Callable[[], Coroutine[Any, Any, object]]) -> BaseException | None:
    """Run a coroutine in a loop of its own in another thread; return what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(make())
        except BaseException as error:  # noqa: BLE001
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "it hangs"
    return raised[0] if raised else None


def in_child(make: Callable[[], Coroutine[Any, Any, object]]) -> str:
    """Run a coroutine in a forked child; return what it raised, as text."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        told = "nothing"
        try:
            loop = asyncio.new_event_loop()
            loop.run_until_complete(asyncio.wait_for(make(), 10))
        except BaseException as error:  # noqa: BLE001
            told = f"{type(error).__name__}: {error}"
            if not isinstance(error, onward.OnwardError):
                told += traceback.format_exc()
        os.write(writing, told.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        return pipe.read()


@pytest.mark.parametrize("use", USES)
async def test_a_second_event_loop_is_refused(use: str) -> None:
    async def work(mq: onward.Client, consumed: Any) -> None:
        async def call() -> object:
            return await USES[use](mq, consumed)

        raised = await asyncio.to_thread(in_other_loop, call)
        assert isinstance(raised, InvalidRequest), raised
        assert "another event loop" in str(raised)

    await with_broker(work)


@pytest.mark.parametrize("use", USES)
async def test_a_forked_child_is_refused(use: str) -> None:
    async def work(mq: onward.Client, consumed: Any) -> None:
        async def call() -> object:
            return await USES[use](mq, consumed)

        told = await asyncio.to_thread(in_child, call)
        assert told.startswith("NotConnected: this client was opened before a fork"), told

    await with_broker(work)


async def test_closing_in_a_child_leaves_the_connection_of_the_parent_alone() -> None:
    async def work(mq: onward.Client, _: Any) -> None:
        assert await asyncio.to_thread(in_child, mq.close) == "nothing"
        assert await mq.has_topic("orders")

    await with_broker(work)


async def test_a_child_that_opens_the_client_has_a_connection_of_its_own() -> None:
    async def work(mq: onward.Client, _: Any) -> None:
        async def call() -> None:
            await mq.open()
            assert (await mq.publish("child", "x")).offset == 0
            await mq.close()

        assert await asyncio.to_thread(in_child, call) == "nothing"
        assert (await mq.publish("child", "y")).offset == 1

    await with_broker(work)


def test_a_reader_may_be_made_before_the_loop_runs() -> None:
    async def texts(reader: Any) -> list[str]:
        return [message.text async for message in reader]

    with asyncio.Runner() as runner:
        mq = onward.connect("memory:")
        runner.run(mq.open())
        runner.run(mq.publish("orders", "x"))
        assert runner.run(texts(mq.read("orders"))) == ["x"]
        with pytest.raises(InvalidRequest, match="another event loop"):
            mq.publish_soon("orders", "y")
        runner.run(mq.close())


# --- open --------------------------------------------------------------------------------------


async def test_an_open_client_may_be_opened_again_also_at_the_same_time() -> None:
    mq = onward.connect("memory:")
    await asyncio.gather(*[mq.open() for _ in range(20)])
    await mq.open()
    async with mq:
        assert (await mq.publish("orders", "x")).offset == 0
    with pytest.raises(NotConnected):
        await mq.publish("orders", "x")


def test_threads_may_open_one_client_at_the_same_time() -> None:
    mq = onward.connect_sync("memory:")
    before = threading.active_count()
    threads = [threading.Thread(target=mq.open) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert threading.active_count() <= before + 2  # one loop, and one thread of its broker
    mq.open()
    assert mq.publish("orders", "x").offset == 0
    mq.close()


async def test_what_a_client_publishes_after_it_was_opened_again_is_stored() -> None:
    async with onward.connect("memory:kept") as other:
        mq = onward.connect("memory:kept")
        for number in range(3):
            await mq.open()
            await mq.publish("orders", str(number))
            await mq.close()
        assert [one.text async for one in other.read("orders")] == ["0", "1", "2"]


def test_with_says_what_to_use_instead() -> None:
    told = r"async with onward\.connect.*connect_sync"
    with pytest.raises(TypeError, match=told), onward.connect("memory:"):
        pass


async def test_an_app_that_does_not_run_says_how_to_publish_from_elsewhere() -> None:
    with pytest.raises(NotConnected, match=r"does not run in this process.*onward\.connect"):
        await onward.App().publish("orders", "x")
