import asyncio

import pytest

from onward.client.pipe import PipeTransport, connect_pipe
from onward.testing.loop import run, running_loop

from .recording import Buffered, Plain

Kind = type[Plain] | type[Buffered]
Pair = tuple[Plain | Buffered, Plain | Buffered, PipeTransport, PipeTransport]


def connected(kind: Kind) -> Pair:
    client, server = kind(), kind()
    return client, server, *connect_pipe(client, server, asyncio.get_running_loop())


async def some_turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_bytes_of_any_kind_arrive_in_order(kind: Kind) -> None:
    client, server, transport, _ = connected(kind)
    changing = bytearray(b"three ")
    transport.write(b"one ")
    transport.writelines([b"two ", memoryview(b"and ")])
    transport.write(changing)
    changing[:] = b"xxxxxx"
    transport.write(b"")
    transport.write(b"z" * 1_000)
    assert server.received == b""
    transport.close()
    await asyncio.gather(client.over, server.over)
    assert server.received == b"one two and three " + b"z" * 1_000
    assert client.calls == ["made", "lost"]
    assert server.calls == ["made", "eof", "lost"]
    assert (client.error, server.error) == (None, None)


async def test_both_directions_work_at_once(kind: Kind) -> None:
    client, server, here, there = connected(kind)
    here.write(b"ping")
    there.write(b"pong")
    await asyncio.sleep(0)
    assert (client.received, server.received) == (b"pong", b"ping")
    here.abort()
    await asyncio.gather(client.over, server.over)


async def test_many_writes_of_one_turn_are_read_together(kind: Kind) -> None:
    _, server, transport, _ = connected(kind)
    for _ in range(50):
        transport.write(b"x")
    await asyncio.sleep(0)
    assert (server.received, server.pieces) == (b"x" * 50, 1)
    transport.abort()
    await server.over


async def test_a_reader_that_pauses_makes_the_writer_pause(kind: Kind) -> None:
    client, server, transport, reading = connected(kind)
    transport.set_write_buffer_limits(high=100, low=10)
    reading.pause_reading()
    transport.write(b"x" * 100)
    assert client.calls == ["made"]
    transport.write(b"x")
    assert client.calls == ["made", "pause"]
    assert transport.get_write_buffer_size() == 101
    await some_turns()
    assert server.received == b""
    reading.resume_reading()
    await some_turns()
    assert client.calls == ["made", "pause", "resume"]
    assert server.received == b"x" * 101
    assert transport.get_write_buffer_size() == 0
    transport.abort()
    await asyncio.gather(client.over, server.over)


async def test_a_paused_reader_gets_nothing_between_two_pieces() -> None:
    class PausesAtOnce(Buffered):
        def buffer_updated(self, nbytes: int) -> None:
            super().buffer_updated(nbytes)
            self.transport.pause_reading()

    server = PausesAtOnce()
    transport, reading = connect_pipe(Plain(), server, asyncio.get_running_loop())
    transport.write(b"x" * 250)
    await some_turns()
    assert server.received == b"x" * 100
    reading.resume_reading()
    await some_turns()
    assert server.pieces == 2
    transport.abort()
    await server.over


async def test_an_abort_is_seen_as_a_reset(kind: Kind) -> None:
    client, server, transport, _ = connected(kind)
    transport.abort()
    transport.abort()
    await asyncio.gather(client.over, server.over)
    assert client.error is None
    assert isinstance(server.error, ConnectionResetError)


async def test_writing_to_a_closed_end_resets_the_connection(kind: Kind) -> None:
    client, server, here, there = connected(kind)
    here.close()
    there.write(b"too late")
    await asyncio.gather(client.over, server.over)
    assert client.received == b""
    assert isinstance(server.error, ConnectionResetError)
    there.write(b"dropped")
    assert there.is_closing()


async def test_a_paused_end_learns_that_its_bytes_will_never_be_read(kind: Kind) -> None:
    client, server, here, there = connected(kind)
    there.pause_reading()
    here.pause_reading()
    there.write(b"unread")
    here.close()
    await asyncio.gather(client.over, server.over)
    assert isinstance(server.error, ConnectionResetError)


async def test_half_of_a_connection_can_be_ended() -> None:
    class KeepsOpen(Plain):
        def eof_received(self) -> bool:
            self.transport.write(b"answer")
            return True

    client, server = Plain(), KeepsOpen()
    transport, _ = connect_pipe(client, server, asyncio.get_running_loop())
    transport.write_eof()
    with pytest.raises(RuntimeError, match="after write_eof"):
        transport.write(b"more")
    await some_turns()
    assert client.received == b"answer"
    server.transport.close()
    await asyncio.gather(client.over, server.over)


def test_a_protocol_that_fails_loses_its_connection_and_is_reported() -> None:
    seen: list[Exception | None] = []

    class Broken(Plain):
        def data_received(self, data: bytes) -> None:
            raise ValueError("cannot read this")

    async def main() -> None:
        client, server = Plain(), Broken()
        transport, _ = connect_pipe(client, server, running_loop())
        transport.write(b"x")
        await asyncio.gather(client.over, server.over)
        seen.extend([client.error, server.error])

    with pytest.raises(ValueError, match="cannot read this"):
        run(main(), seed=1)
    assert isinstance(seen[0], ConnectionResetError)
    assert isinstance(seen[1], ValueError)


async def test_a_stream_reader_and_writer_work_on_it() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    server = asyncio.StreamReaderProtocol(reader)
    client = asyncio.StreamReaderProtocol(asyncio.StreamReader())
    transport, _ = connect_pipe(client, server, loop)
    writer = asyncio.StreamWriter(transport, client, None, loop)
    for _ in range(20):
        writer.write(b"x" * 10_000)
        await asyncio.gather(writer.drain(), reader.readexactly(10_000))
    writer.close()
    await writer.wait_closed()
    assert await reader.read() == b""


async def test_wrong_limits_are_refused() -> None:
    _, server, transport, _ = connected(Plain)
    with pytest.raises(ValueError, match="at least"):
        transport.set_write_buffer_limits(high=1, low=2)
    transport.set_write_buffer_limits(low=100)
    assert transport.get_write_buffer_limits() == (100, 400)
    transport.abort()
    await server.over
