"""Two protocols that write down what happens to them: the plain kind and the buffered kind."""

from __future__ import annotations

import asyncio


class Record:
    """What both kinds have in common."""

    def __init__(self) -> None:
        self.received = b""
        self.pieces = 0
        self.calls: list[str] = []
        self.error: Exception | None = None
        self.over = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.calls.append("made")

    def connection_lost(self, error: Exception | None) -> None:
        self.calls.append("lost")
        self.error = error
        self.over.set_result(None)

    def pause_writing(self) -> None:
        self.calls.append("pause")

    def resume_writing(self) -> None:
        self.calls.append("resume")

    def eof_received(self) -> bool | None:
        self.calls.append("eof")
        return None

    def take(self, received: bytes) -> None:
        assert self.calls, "bytes came before the connection was made"
        assert "lost" not in self.calls, "bytes came after the connection was lost"
        self.received += received
        self.pieces += 1


class Plain(Record, asyncio.Protocol):
    """Gets bytes."""

    def data_received(self, data: bytes) -> None:
        self.take(data)


class Buffered(Record, asyncio.BufferedProtocol):
    """Gets its own small buffer filled."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = bytearray(100)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.take(bytes(self.buffer[:nbytes]))
        # Allowed, because nobody may hold on to the buffer now.
        self.buffer.append(0)
