"""Connecting: how long it is tried, and what is said of what is no broker."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

import onward
from onward.errors import InvalidRequest, NotConnected, ProtocolError


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[str]:
    """Listen at an address, and answer whoever says something with the same bytes."""

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    ("answer", "spoken"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "HTTP"),
        (b"<!DOCTYPE HTML>\n<html>", "HTTP"),
        (b"\x15\x03\x01\x00\x02\x02\x46", "TLS"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "SSH"),
    ],
)
async def test_a_server_that_is_no_broker_is_named_at_once(answer: bytes, spoken: str) -> None:
    async with answering(answer) as address:
        begun = time.monotonic()
        told = f"what listens at {address} is not an Onward broker: it speaks {spoken}"
        with pytest.raises(ProtocolError, match=told):
            await onward.connect(address, timeout="20s").open()
        assert time.monotonic() - begun < 10


async def test_a_real_http_server_is_named() -> None:
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    BaseHTTPRequestHandler.log_message = lambda *_: None  # type: ignore[assignment, method-assign]
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        with pytest.raises(ProtocolError, match="it speaks HTTP"):
            await onward.connect(f"127.0.0.1:{server.server_port}", timeout="20s").open()
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        thread.join()


async def test_a_tls_server_that_closes_without_a_word_is_named() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # no certificate: it refuses every handshake
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(ssl.SSLError, ConnectionError):
                    context.wrap_socket(connection, server_side=True)

    thread = Thread(target=serve)
    thread.start()
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    try:
        told = f"what listens at {address} is not an Onward broker: it speaks TLS"
        with pytest.raises(ProtocolError, match=told):
            await onward.connect(address, timeout="20s").open()
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


async def test_what_closes_without_a_word_and_is_no_tls_server_is_tried_again() -> None:
    async with answering(b"") as address:
        with pytest.raises(NotConnected, match="no broker could be reached"):
            await onward.connect(address, timeout="1s").open()


def refused_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"127.0.0.1:{taken.getsockname()[1]}"


async def test_a_refused_connection_fails_at_once_when_asked() -> None:
    address = f"{refused_address()},{refused_address()},unix:/nowhere/onward.sock"
    begun = time.monotonic()
    with pytest.raises(NotConnected, match="no broker could be reached at 127"):
        await onward.connect(address, timeout="30s", fail_fast=True).open()
    assert time.monotonic() - begun < 10
    with pytest.raises(NotConnected, match="no broker could be reached at 127"):
        onward.connect_sync(address, timeout="30s", fail_fast=True).open()


async def test_connecting_has_a_timeout_of_its_own() -> None:
    begun = time.monotonic()
    with pytest.raises(NotConnected, match="no broker could be reached"):
        await onward.connect(refused_address(), timeout="60s", connect_timeout="300ms").open()
    assert 0.2 < time.monotonic() - begun < 30


@pytest.mark.parametrize("option", ["timeout", "connect_timeout"])
def test_a_timeout_of_nothing_is_refused(option: str) -> None:
    for connect in (onward.connect, onward.connect_sync):
        with pytest.raises(InvalidRequest, match=f"{option} is more than 0"):
            connect("memory:", **{option: 0})  # type: ignore[arg-type]


async def test_a_publish_with_a_timeout_of_nothing_is_refused() -> None:
    async with onward.connect("memory:") as mq:
        with pytest.raises(InvalidRequest, match="timeout is more than 0"):
            await mq.publish("orders", "x", timeout=0)


@pytest.mark.parametrize("address", ["http://localhost:7700", "https://a", "redis://h:1/0"])
def test_an_address_with_a_scheme_is_refused_at_once(address: str) -> None:
    scheme, _, rest = address.partition("://")
    with pytest.raises(InvalidRequest, match=f"no scheme '{scheme}'; write it as '{rest}'"):
        onward.connect(address)
    with pytest.raises(InvalidRequest, match="no scheme"):
        onward.connect_sync(address)


def test_memory_without_its_colon_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="did you mean 'memory:'"):
        onward.connect("memory")


async def test_a_client_that_only_looks_creates_nothing(tmp_path: Path) -> None:
    missing = tmp_path / "none" / "x"
    with pytest.raises(InvalidRequest, match=f"there is no log in '{missing}'"):
        await onward.connect(f"file:{missing}", create=False).open()
    assert not missing.exists()
    async with onward.connect(f"file:{missing}") as mq:
        await mq.publish("orders", "x")
    async with onward.connect(f"file:{missing}", create=False) as mq:
        assert await mq.has_topic("orders")
