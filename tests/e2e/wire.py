"""A client that speaks the protocol by hand, so that it can also speak it badly."""

import asyncio
import json
import struct
from typing import Any, Self

from onward.message.batch import encode_batch
from onward.protocol.frames import HEADER, PREFACE, Kind, frame
from onward.protocol.payloads import (
    Durability,
    Published,
    decode_error,
    decode_published,
    publish_head,
)


class Peer:
    """One connection, opened with `async with Peer(port)`."""

    def __init__(self, port: int, *, hello: bool = True, token: str | None = None) -> None:
        self._port = port
        self._hello = hello
        self._token = token

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        if self._hello:
            self.write(PREFACE + hello_frame(token=self._token))
            kind, _, _ = await self.frame()
            assert kind == Kind.WELCOME
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.transport.abort()

    def write(self, unit: bytes) -> None:
        self.writer.write(unit)

    async def frame(self, *, within_s: float = 5.0) -> tuple[int, int, bytes]:
        """Return (kind, request id, payload) of the next frame."""
        async with asyncio.timeout(within_s):
            head = await self.reader.readexactly(12)
            length, kind, _, _, request_id = HEADER.unpack(head)
            return kind, request_id, await self.reader.readexactly(length - 8)

    async def everything(self, *, within_s: float = 10.0) -> bytes:
        """Return all that comes until the broker closes."""
        try:
            async with asyncio.timeout(within_s):
                return await self.reader.read()
        except ConnectionError:
            return b""

    async def publish(
        self, topic: str, *bodies: bytes, producer_id: int, sequence: int
    ) -> Published:
        """Publish one batch with an id and a sequence of our own."""
        self.write(publish_frame(topic, *bodies, producer_id=producer_id, sequence=sequence))
        kind, request_id, payload = await self.frame()
        assert request_id == 7
        if kind == Kind.ERROR:
            raise decode_error(payload)
        assert kind == Kind.PUBLISHED
        return decode_published(payload)


def hello_frame(*, version: int = 1, token: str | None = None) -> bytes:
    hello: dict[str, Any] = {"version": version, "client": "peer"}
    if token is not None:
        hello["token"] = token
    return frame(Kind.HELLO, 0, json.dumps(hello).encode())


def publish_frame(topic: str, *bodies: bytes, producer_id: int = 0, sequence: int = 0) -> bytes:
    batch = encode_batch(list(bodies), producer_id=producer_id, sequence=sequence, time_ms=1)
    head = publish_head(7, topic, durability=Durability.DEFAULT, batch_bytes=len(batch))
    return head + batch


def raw_frame(kind: int, payload: bytes, *, length: int | None = None, flags: int = 0) -> bytes:
    """A frame that may lie about itself."""
    stated = 8 + len(payload) if length is None else length
    return struct.pack("<IBBHI", stated, kind, flags, 0, 7) + payload
