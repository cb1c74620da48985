"""A broker as a process: who may start it, who may speak to it, how it stops."""

import asyncio
import os
import signal
import stat
import sys
import threading
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

import onward
from onward.errors import NotConnected, Unauthenticated

from .conftest import MakeBroker
from .folders import embedded
from .history import History, read_all
from .wire import Peer

SECRET = "correct-horse-battery"


async def test_the_right_token_works_and_a_wrong_or_missing_one_is_refused(
    make_broker: MakeBroker,
) -> None:
    broker = make_broker(auth_tokens=f"billing:{SECRET},other:another-secret")
    await broker.start()
    async with broker.connect(token=SECRET) as mq:
        await mq.publish("orders", "0")
    for token in (None, "", "wrong", SECRET[:-1], SECRET + "x", f"billing:{SECRET}", "ü"):
        with pytest.raises(Unauthenticated, match="token"):
            async with broker.connect(token=token, timeout="5s"):
                pass
    async with broker.connect(token="another-secret") as mq:
        assert await read_all(mq) == {0: "0"}
    assert SECRET not in broker.output
    assert "another-secret" not in broker.output
    assert "wrong" not in broker.output


async def test_nothing_can_be_asked_before_the_token_was_given(make_broker: MakeBroker) -> None:
    broker = make_broker(auth_tokens=f"billing:{SECRET}")
    await broker.start()
    async with Peer(broker.port, hello=False) as peer:
        peer.write(b"ONWARD1\n" + b'\x1a\0\0\0\x14\0\0\0\1\0\0\0{"op":"topic.list"}')
        answer = await peer.everything()
    assert b"protocol_error" in answer
    assert b'"topics"' not in answer


async def test_a_broker_without_tokens_does_not_listen_beyond_this_machine(
    make_broker: MakeBroker,
) -> None:
    broker = make_broker(server_host="0.0.0.0")
    broker.launch()
    assert await broker.ended() != 0
    assert "auth.tokens" in broker.output
    assert "Traceback" not in broker.output


async def test_a_second_broker_on_the_same_folder_is_refused(make_broker: MakeBroker) -> None:
    first = make_broker()
    await first.start()
    second = make_broker(first.folder)
    second.launch()
    assert await second.ended() == 3
    assert "in use" in second.output
    async with first.connect() as mq:
        await mq.publish("orders", "0")
    with pytest.raises(onward.Unavailable, match="in use"):
        async with embedded(first.folder):
            pass


async def test_sigterm_answers_what_was_taken_and_the_next_start_reads_almost_nothing(
    make_broker: MakeBroker,
) -> None:
    broker = make_broker()
    await broker.start()
    history = History()
    async with broker.connect(timeout="10s") as mq:
        publishing = asyncio.ensure_future(history.publish_batches(mq, "a", filler="x" * 1_000))
        await asyncio.sleep(0.5)
        started = asyncio.get_running_loop().time()
        assert await broker.stop() == 0
        assert asyncio.get_running_loop().time() - started < 5
        await broker.start()
        history.is_over = True
        await publishing
        history.check(await read_all(mq))
    assert not history.errors
    assert "0 entries and 0 bytes read again" in broker.output.split("stopping")[-1]


async def test_sigint_stops_too_and_an_idle_connection_does_not_hold_it_up(
    make_broker: MakeBroker,
) -> None:
    broker = make_broker()
    await broker.start()
    async with Peer(broker.port), Peer(broker.port, hello=False):
        os.kill(broker.pid, signal.SIGINT)
        assert await broker.ended(within_s=5) == 0


async def test_a_unix_socket_works_and_its_file_goes_with_the_broker(
    make_broker: MakeBroker, tmp_path: Path
) -> None:
    path = tmp_path / "onward.sock"
    broker = make_broker(server_unix_socket=path)
    await broker.start()
    async with onward.connect(f"unix:{path}") as mq:
        await mq.publish("orders", "0")
        await broker.kill()
        assert stat.S_ISSOCK(path.stat().st_mode), "left over by the kill"
        await broker.start()
        await mq.publish("orders", "1")
        assert await read_all(mq) == {0: "0", 1: "1"}
    assert await broker.stop() == 0
    assert not path.exists()


async def test_a_unix_socket_on_which_a_broker_answers_is_not_taken_from_it(
    make_broker: MakeBroker, tmp_path: Path
) -> None:
    path = tmp_path / "onward.sock"
    first, second = make_broker(server_unix_socket=path), make_broker(server_unix_socket=path)
    await first.start()
    second.launch()
    assert await second.ended() == 3
    assert "in use" in second.output
    assert "Traceback" not in second.output
    async with onward.connect(f"unix:{path}") as mq:
        await mq.publish("orders", "0")


async def test_connections_leave_the_log_the_files_that_it_needs(make_broker: MakeBroker) -> None:
    broker = make_broker(log_segment_bytes_max=65_536)
    await broker.start(wrapper=["sh", "-c", 'ulimit -n 100; exec "$@"', "sh"])
    assert "at most 36 connections" in broker.output
    async with AsyncExitStack() as stack:
        mq = await stack.enter_async_context(broker.connect())
        for _ in range(60):
            await stack.enter_async_context(Peer(broker.port, hello=False))
        for _ in range(10):
            await mq.publish("orders", "x" * 20_000)
        assert broker.is_running


async def test_the_sync_client_serves_many_threads_at_once(make_broker: MakeBroker) -> None:
    broker = make_broker()
    await broker.start()
    offsets: list[int] = []

    def work(mq: onward.SyncClient, name: str) -> None:
        bodies = [f"{name}:{number}" for number in range(50)]
        offsets.extend([mq.publish("orders", body).offset for body in bodies])
        mq.publish_many("batches", bodies[:10])

    def all_threads() -> list[str]:
        with onward.connect_sync(broker.address) as mq:
            threads = [threading.Thread(target=work, args=(mq, f"t{n}")) for n in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(list(mq.read("batches"))) == 80
            return [message.text for message in mq.read("orders")]

    bodies = await asyncio.to_thread(all_threads)
    assert sorted(offsets) == list(range(400))
    for name in {body.split(":")[0] for body in bodies}:
        numbers = [int(body.split(":")[1]) for body in bodies if body.startswith(f"{name}:")]
        assert numbers == list(range(50))


async def test_a_file_engine_keeps_what_a_broker_wrote_and_the_other_way_round(
    make_broker: MakeBroker,
) -> None:
    broker = make_broker()
    async with embedded(broker.folder) as mq:
        await mq.publish("orders", "embedded")
    await broker.start()
    async with broker.connect() as mq:
        assert (await mq.publish("orders", "served")).offset == 1
    assert await broker.stop() == 0
    async with onward.connect(f"file:{broker.folder}") as mq:
        assert await read_all(mq) == {0: "embedded", 1: "served"}


async def test_a_file_engine_that_is_killed_loses_nothing_acked(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    script = (
        "import asyncio, os, onward\n"
        "async def main():\n"
        f"    async with onward.connect('file:{folder}') as mq:\n"
        "        for n in range(20):\n"
        "            await mq.publish('orders', str(n))\n"
        "        os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
    assert await child.wait() == -signal.SIGKILL
    async with embedded(folder) as mq:
        assert await read_all(mq) == {n: str(n) for n in range(20)}


async def test_memory_engines_with_one_name_are_one_broker_and_without_a_name_apart() -> None:
    async with onward.connect("memory:shared") as one, onward.connect("memory:shared") as two:
        await one.publish("orders", "0")
        assert await read_all(two) == {0: "0"}
        async with onward.connect("memory:") as alone:
            assert not await alone.has_topic("orders")
    async with onward.connect("memory:shared") as later:
        assert not await later.has_topic("orders")


async def test_nobody_there_is_said_within_the_deadline() -> None:
    started = asyncio.get_running_loop().time()
    with pytest.raises(NotConnected, match="no broker could be reached"):
        async with onward.connect("127.0.0.1:1", timeout="500ms"):
            pass
    assert asyncio.get_running_loop().time() - started < 3
