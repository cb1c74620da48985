"""A connection inside one process: client and broker on one loop, with no socket between them.

    client protocol ── PipeTransport ═══════ PipeTransport ── server protocol
                         write() ──▶ inbox of the other end ──▶ one delivery per turn of the loop

Both ends see what they would see on a socket: bytes come in order but in other pieces than they
were written, nobody is called from inside its own `write`, a reader that pauses makes the writer
pause, and `connection_lost` comes exactly once.

Rules:
- A `bytes` object is handed over as it is; what could still change is copied.
- All that waits is given at once: as much as fits into the receiver's buffer, in one call.
- An end that closed reads no more: writing to it resets the connection, as TCP does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import cast

Buffer = bytes | bytearray | memoryview

# How many bytes may wait for a reader before its writer is asked to pause.
HIGH_WATER_BYTES = 64 * 1024


def connect_pipe(
    client_protocol: asyncio.BaseProtocol,
    server_protocol: asyncio.BaseProtocol,
    loop: asyncio.AbstractEventLoop,
) -> tuple[PipeTransport, PipeTransport]:
    """Connect two protocols and return their transports, the client's first.

    Both have got `connection_made` when this returns, the server first.

    >>> async def main() -> None:
    ...     loop = asyncio.get_running_loop()
    ...     reader = asyncio.StreamReader()
    ...     receiving = asyncio.StreamReaderProtocol(reader)
    ...     client, server = connect_pipe(asyncio.Protocol(), receiving, loop)
    ...     client.write(b"onward")
    ...     client.close()
    ...     print(await reader.read())
    >>> asyncio.run(main())
    b'onward'
    """
    client = PipeTransport(loop, client_protocol)
    server = PipeTransport(loop, server_protocol)
    client.join(server)
    server.join(client)
    server_protocol.connection_made(server)
    client_protocol.connection_made(client)
    return client, server


class PipeTransport(asyncio.Transport):
    """One end of a connection inside this process.

    What travels goes through `_send` and `_send_end`: a transport that delays or loses bytes
    overrides these two and calls `arrive` and `arrive_end` of the other end when it likes.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        protocol: asyncio.BaseProtocol,
        *,
        name: str = "pipe",
        peer_name: str = "pipe",
    ) -> None:
        super().__init__({"sockname": name, "peername": peer_name})
        self._loop = loop
        self.set_protocol(protocol)
        self._peer: PipeTransport = self
        # What we have received: not yet given to our protocol.
        self._inbox: deque[bytes | memoryview] = deque()
        self._ended = False
        self._end_error: Exception | None = None
        self._reading = True
        self._delivering = False
        # What we have sent: how much of it the other end has not read yet.
        self._unread_bytes = 0
        self._writing = True
        self._eof_sent = False
        self.set_write_buffer_limits()
        self._closing = False
        self._lost = False

    def join(self, peer: PipeTransport) -> None:
        """Say which transport is the other end. Both ends do this before they are used."""
        self._peer = peer

    def write(self, data: Buffer) -> None:
        """Send bytes. After `close` or a loss they are dropped, as sockets do."""
        if self._eof_sent:
            raise RuntimeError("cannot write after write_eof")
        if self._closing or not data:
            return
        sent = data if isinstance(data, bytes) else bytes(data)
        self._unread_bytes += len(sent)
        self._send(sent)
        self._pause_writer()

    def writelines(self, list_of_data: Iterable[Buffer]) -> None:
        """Send many buffers as one."""
        self.write(b"".join(list_of_data))

    def write_eof(self) -> None:
        """Say that nothing more will be sent; reading goes on."""
        if not self._eof_sent and not self._closing:
            self._eof_sent = True
            self._send_end(None)

    def can_write_eof(self) -> bool:
        """Say that `write_eof` works."""
        return True

    def close(self) -> None:
        """Stop reading, let the other end read what was sent, and end the connection."""
        # Bytes that nobody will read any more reset the connection, as in TCP.
        self._close(ConnectionResetError("closed with unread bytes") if self._inbox else None)

    def abort(self) -> None:
        """End the connection at once; the other end sees a reset."""
        self._close(ConnectionResetError("reset by the other end"))

    def is_closing(self) -> bool:
        """Say whether this end is closed or closing."""
        return self._closing

    def pause_reading(self) -> None:
        """Give the protocol nothing until `resume_reading`."""
        self._reading = False

    def resume_reading(self) -> None:
        """Go on giving the protocol what arrived."""
        self._reading = True
        self._wake()

    def is_reading(self) -> bool:
        """Say whether the protocol gets what arrives."""
        return self._reading and not self._closing

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Give everything that comes to another protocol from now on."""
        self._protocol = protocol
        self._buffered = isinstance(protocol, asyncio.BufferedProtocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return who gets what arrives."""
        return self._protocol

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set when the protocol is asked to pause writing (`high`) and to go on (`low`)."""
        if high is None:
            high = HIGH_WATER_BYTES if low is None else 4 * low
        self._high_bytes = high
        self._low_bytes = high // 4 if low is None else low
        if not self._high_bytes >= self._low_bytes >= 0:
            raise ValueError(f"high ({high}) must be at least low ({low}), and low at least 0")

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Return the limits, the low one first."""
        return self._low_bytes, self._high_bytes

    def get_write_buffer_size(self) -> int:
        """Return how many bytes the other end has not read yet."""
        return self._unread_bytes

    def arrive(self, received: bytes) -> None:
        """Take bytes that came from the other end."""
        if self._closing:
            self._send_end(ConnectionResetError("reset by the other end"))
        else:
            self._inbox.append(received)
            self._wake()

    def arrive_end(self, error: Exception | None) -> None:
        """Take the news that nothing more will come, and why if it is an error."""
        self._ended, self._end_error = True, error
        if error is not None and not self._reading:
            # Whoever pauses until it can write again would wait for ever.
            self._loop.call_soon(self._lose, error)
        self._wake()

    def were_read(self, count: int) -> None:
        """Take the news that the other end has read `count` of our bytes."""
        self._unread_bytes -= count
        if not self._writing and self._unread_bytes <= self._low_bytes and not self._lost:
            self._writing = True
            self._protocol.resume_writing()

    def _send(self, sent: bytes) -> None:
        self._peer.arrive(sent)

    def _send_end(self, error: Exception | None) -> None:
        self._peer.arrive_end(error)

    def _close(self, error: Exception | None) -> None:
        if self._closing:
            return
        self._closing = True
        self._inbox.clear()
        if error is not None or not self._eof_sent:
            self._send_end(error)
        self._loop.call_soon(self._lose, None)

    def _lose(self, error: Exception | None) -> None:
        """Tell the protocol that it is over: once, whatever happened how often."""
        self._closing = True
        self._inbox.clear()
        if not self._lost:
            self._lost = True
            self._protocol.connection_lost(error)

    def _pause_writer(self) -> None:
        if self._writing and self._unread_bytes > self._high_bytes:
            self._writing = False
            self._protocol.pause_writing()

    def _wake(self) -> None:
        if not self._delivering and self._reading and not self._closing:
            self._delivering = True
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        """Give the protocol what arrived, once; the rest has its turn later, as with sockets."""
        self._delivering = False
        if not self.is_reading():
            return
        try:
            if self._inbox:
                self._peer.were_read(self._feed_buffer() if self._buffered else self._feed())
            elif self._ended:
                self._end()
        except Exception as error:
            # A protocol that fails loses its connection; the loop reports the error itself.
            self._send_end(ConnectionResetError("the other end failed"))
            self._lose(error)
            raise
        if self._inbox or self._ended:
            self._wake()

    def _feed(self) -> int:
        received = b"".join(self._inbox) if len(self._inbox) > 1 else bytes(self._inbox[0])
        self._inbox.clear()
        cast(asyncio.Protocol, self._protocol).data_received(received)
        return len(received)

    def _feed_buffer(self) -> int:
        protocol = cast(asyncio.BufferedProtocol, self._protocol)
        # Released before the protocol is called: it may want to resize what it gave us.
        with memoryview(protocol.get_buffer(-1)) as buffer:
            filled = self._fill(buffer)
        if not filled:
            raise RuntimeError("get_buffer() returned an empty buffer")
        protocol.buffer_updated(filled)
        return filled

    def _fill(self, buffer: memoryview) -> int:
        """Move as much as fits from the inbox into `buffer`."""
        filled, room = 0, len(buffer)
        while self._inbox and filled < room:
            piece = self._inbox.popleft()
            if len(piece) > room - filled:
                rest = memoryview(piece)
                piece, rest = rest[: room - filled], rest[room - filled :]
                self._inbox.appendleft(rest)
            buffer[filled : filled + len(piece)] = piece
            filled += len(piece)
        return filled

    def _end(self) -> None:
        self._ended = False
        if self._end_error is not None:
            self._lose(self._end_error)
            return
        protocol = cast(asyncio.Protocol | asyncio.BufferedProtocol, self._protocol)
        if not protocol.eof_received():
            self.close()
