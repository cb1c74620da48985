"""Whatever comes to the port costs only the one who sent it."""

import asyncio
import json
import random
import re
import resource
from collections.abc import Awaitable, Callable

import pytest

import onward
from onward.errors import ProtocolError
from onward.protocol.frames import PREFACE, Kind, frame
from onward.protocol.payloads import decode_error

from .conftest import MakeBroker
from .history import History, read_all
from .running import BrokerProcess, until
from .wire import Peer, hello_frame, publish_frame, raw_frame

TLS_HELLO = bytes.fromhex("16030100f8010000f40303") + bytes(range(200))
HTTP = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
OPEN = PREFACE + hello_frame()

GARBAGE: dict[str, tuple[bytes, str]] = {
    "http": (HTTP, "not HTTP"),
    "tls": (TLS_HELLO, "preface"),
    "zeros": (bytes(64), "preface"),
    "another version of the preface": (b"ONWARD9\n" + hello_frame(), "preface"),
    "wrong version": (PREFACE + hello_frame(version=99), "version 99"),
    "huge length": (PREFACE + raw_frame(1, b"", length=0xFFFFFFFF), "limit"),
    "large hello": (PREFACE + raw_frame(1, b"", length=1 << 20), "limit"),
    "length of nothing": (PREFACE + raw_frame(1, b"", length=3), "length"),
    "hello that is no json": (PREFACE + frame(Kind.HELLO, 0, b"\xff\xfe{"), "JSON"),
    "hello of a wrong shape": (PREFACE + frame(Kind.HELLO, 0, b'{"version":"x"}'), "HELLO"),
    "hello with half a character": (
        PREFACE + frame(Kind.HELLO, 0, b'{"version":1,"token":"\\ud800"}'), ""
    ),
    "no hello": (PREFACE + frame(Kind.PING, 1), "before HELLO"),
}  # fmt: skip

GARBAGE_IN_AN_OPEN_CONNECTION: dict[str, tuple[bytes, str]] = {
    "second hello": (hello_frame(), "HELLO"),
    "unknown kind": (raw_frame(99, b""), "99"),
    "kind of a broker": (raw_frame(Kind.PUBLISHED, bytes(17)), "PUBLISHED"),
    "reserved flags": (raw_frame(Kind.PING, b"", flags=1), "reserved"),
    "huge length after hello": (raw_frame(Kind.PUBLISH, b"", length=1 << 31), "limit"),
    "request that is no json": (frame(Kind.REQUEST, 1, b"nonsense"), "JSON"),
    "nested request": (frame(Kind.REQUEST, 1, b'{"a":' + b"[" * 60_000), "nested"),
    "short credit": (frame(Kind.CREDIT, 1, b"\1"), "CREDIT"),
}  # fmt: skip


def sentence(answer: bytes) -> str:
    """Return the text of the last ERROR or GOODBYE in what a broker sent."""
    found = re.findall(rb'"message":"((?:[^"\\]|\\.)*)"', answer)
    return json.loads(b'"' + found[-1] + b'"') if found else ""


async def test_garbage_is_answered_with_a_clear_error_and_the_end_of_its_connection(
    make_broker: MakeBroker,
) -> None:
    broker = make_broker()
    await broker.start()
    async with broker.connect() as honest:
        for name, (garbage, expected) in (GARBAGE | GARBAGE_IN_AN_OPEN_CONNECTION).items():
            hello = name in GARBAGE_IN_AN_OPEN_CONNECTION
            async with Peer(broker.port, hello=hello) as peer:
                peer.write(garbage)
                answer = await peer.everything()
            assert sentence(answer), name
            assert expected in sentence(answer), f"{name}: {sentence(answer)!r}"
        await honest.publish("orders", "0")
        assert await read_all(honest) == {0: "0"}
    assert "Traceback" not in broker.output
    assert await broker.stop() == 0


BAD_REQUESTS: dict[str, tuple[bytes, str]] = {
    "no topic": (frame(Kind.READ, 7, b"{}"), "invalid_request"),
    "unknown topic": (
        frame(Kind.READ, 7, b'{"topic":"x","from":"earliest","credit_bytes":1}'), "unknown_topic"
    ),
    "negative credit": (
        frame(Kind.READ, 7, b'{"topic":"x","from":"latest","credit_bytes":-1}'), "invalid_request"
    ),
    "two starts": (
        frame(Kind.READ, 7, b'{"topic":"x","from":{"offset":1,"time_ms":2},"credit_bytes":1}'),
        "invalid_request",
    ),
    "unknown operation": (frame(Kind.REQUEST, 7, b'{"op":"rm -rf"}'), "invalid_request"),
    "no operation": (frame(Kind.REQUEST, 7, b"[1]"), "invalid_request"),
    "bad name": (frame(Kind.REQUEST, 7, b'{"op":"topic.create","topic":"a/b"}'), "invalid_name"),
    "path as a name": (publish_frame("../../etc", b"x"), "invalid_name"),
    "system topic": (publish_frame("@orders", b"x"), "invalid_name"),
    "short life": (
        frame(Kind.REQUEST, 7, b'{"op":"topic.create","topic":"a","lifetime_ms":5}'),
        "invalid_request",
    ),
    "damaged batch": (publish_frame("orders", b"x" * 40)[:-3] + b"abc", "protocol_error"),
    "quorum": (
        publish_frame("orders", b"x").replace(b"\xff\x06\0\0", b"\x03\x06\0\0"), "invalid_request"
    ),
}  # fmt: skip


async def test_a_bad_request_gets_its_error_and_the_connection_goes_on(
    make_broker: MakeBroker,
) -> None:
    broker = make_broker()
    await broker.start()
    async with Peer(broker.port) as peer:
        for name, (request, code) in BAD_REQUESTS.items():
            peer.write(request)
            kind, request_id, payload = await peer.frame()
            assert (kind, request_id) == (Kind.ERROR, 7), name
            assert decode_error(payload).code == code, name
        receipt = await peer.publish("orders", b"x", producer_id=1, sequence=1)
        assert receipt.base_offset == 0
    assert "Traceback" not in broker.output


async def test_random_bytes_never_hurt_the_broker(make_broker: MakeBroker) -> None:
    broker = make_broker()
    await broker.start()
    chance = random.Random(7)
    good = publish_frame("orders", b"x" * 50, producer_id=3, sequence=1)
    async with broker.connect() as honest:
        await honest.publish("honest", "0")
        for number in range(300):
            noise = chance.randbytes(chance.randrange(1, 400))
            if number % 3 == 2:
                wrong = bytearray(good)
                for _ in range(chance.randrange(1, 4)):
                    wrong[chance.randrange(len(wrong))] = chance.randrange(256)
                noise = bytes(wrong)
            async with Peer(broker.port, hello=number % 3 > 0) as peer:
                peer.write(noise)
                await peer.writer.drain()
                if number % 20 == 0:
                    await asyncio.sleep(0.01)
        await honest.publish("honest", "1")
        assert await read_all(honest, "honest") == {0: "0", 1: "1"}
    assert "Traceback" not in broker.output
    await broker.restart()
    async with broker.connect() as honest:
        assert await read_all(honest, "honest") == {0: "0", 1: "1"}


async def test_a_client_that_dies_in_mid_frame_stores_nothing_of_it(
    make_broker: MakeBroker,
) -> None:
    broker = make_broker()
    await broker.start()
    whole = publish_frame("orders", *[b"x" * 1_000] * 100, producer_id=5, sequence=1)
    for size in (1, 11, 12, 20, 5_000, len(whole) - 1):
        async with Peer(broker.port) as peer:
            peer.write(whole[:size])
            await peer.writer.drain()
    async with broker.connect() as mq:
        assert not await mq.has_topic("orders")
        assert (await mq.status())["inflight_bytes"] == 0
    async with Peer(broker.port) as peer:
        receipt = await peer.publish("orders", b"x", producer_id=5, sequence=1)
        assert (receipt.base_offset, receipt.repeat) == (0, False)


async def trickle(port: int, *, hello: bool, over: asyncio.Event) -> None:
    """Send a byte now and then: of a hello, or of a frame that claims to be very large."""
    unit = raw_frame(Kind.PUBLISH, b"x" * 100, length=16 << 20) if hello else OPEN
    try:
        async with Peer(port, hello=hello) as peer:
            for start in range(0, len(unit), 15):
                peer.write(unit[start : start + (15 if hello else 1)])
                try:
                    async with asyncio.timeout(1.0):
                        await over.wait()
                    return
                except TimeoutError:
                    continue
    except (OSError, EOFError):
        return


async def test_two_thousand_slow_connections_do_not_slow_down_an_honest_client(
    make_broker: MakeBroker,
) -> None:
    count = 2_000
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * count:
        pytest.skip(f"only {hard} open files are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        await _slow_connections(make_broker(server_hello_ms=4_000), count)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def has_connections(
    mq: onward.Client, *, at_least: int = 0, at_most: int = 10_000
) -> Callable[[], Awaitable[bool]]:
    async def has() -> bool:
        return at_least <= (await mq.status())["connections"] <= at_most

    return has


async def _slow_connections(broker: BrokerProcess, count: int) -> None:
    await broker.start()
    over = asyncio.Event()
    history = History()
    async with broker.connect() as mq:
        await mq.publish("orders", "warm:0")
        history.attempted.add("warm:0")
        before = broker.resident_bytes()
        async with asyncio.TaskGroup() as group:
            for number in range(count):
                group.create_task(trickle(broker.port, hello=number % 2 > 0, over=over))
            await until(has_connections(mq, at_least=count // 2))
            publishing = group.create_task(history.publish_singles(mq, "a", in_flight=4))
            await asyncio.sleep(6)
            history.is_over = True
            await publishing
            after = broker.resident_bytes()
            over.set()
        history.check(await read_all(mq))
        await until(has_connections(mq, at_most=1))
    assert not history.errors
    assert len(history.acked) > 500
    assert after - before < 64 << 20, f"memory grew by {(after - before) >> 20} MiB"


async def test_connections_above_the_limit_are_told_so(make_broker: MakeBroker) -> None:
    broker = make_broker(server_connections_max=3)
    await broker.start()
    async with (
        Peer(broker.port),
        Peer(broker.port),
        Peer(broker.port),
        Peer(broker.port, hello=False) as fourth,
    ):
        answer = await fourth.everything()
    assert "3 connections" in sentence(answer)
    async with broker.connect() as mq:
        await mq.publish("orders", "0")


async def test_a_client_that_speaks_to_something_else_is_told_so() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ProtocolError):
            async with onward.connect(f"127.0.0.1:{port}", timeout="5s"):
                pass
