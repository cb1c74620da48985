import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from onward.testing.loop import run, running_loop
from onward.testing.network import LossyNetwork, LossyTransport

from .recording import Buffered, Plain

T = TypeVar("T")
Kind = type[Plain] | type[Buffered]
End = Plain | Buffered
Play = Callable[[LossyNetwork, End, End], Coroutine[Any, Any, T]]


def play(scene: Play[T], *, seed: int = 1, kind: Kind = Plain, cut_chance: float = 0.0) -> T:
    """Connect a client to a broker over a network of this seed, and let `scene` play with them."""

    async def main() -> T:
        loop = running_loop()
        network = LossyNetwork(loop, loop.random)
        server = kind()
        network.listen("broker", lambda: server)
        _, client = await network.connect("broker", kind)
        network.cut_chance = cut_chance
        return await scene(network, client, server)

    return run(main(), seed=seed)


def lossy(end: End) -> LossyTransport:
    assert isinstance(end.transport, LossyTransport)
    return end.transport


def test_bytes_arrive_complete_in_order_and_in_random_pieces(kind: Kind) -> None:
    sent = bytes(range(256)) * 8

    async def scene(network: LossyNetwork, client: End, server: End) -> int:
        for start in range(0, len(sent), 64):
            client.transport.write(sent[start : start + 64])
            server.transport.write(sent[start : start + 64])
            await asyncio.sleep(0.01)
        await asyncio.sleep(1)
        client.transport.close()
        await asyncio.gather(client.over, server.over)
        assert client.received == server.received == sent
        assert (client.error, server.error) == (None, None)
        assert network.connections() == []
        return server.pieces

    pieces = {play(scene, seed=seed, kind=kind) for seed in range(10)}
    assert len(pieces) > 3


def test_the_same_seed_gives_the_same_pieces_at_the_same_times() -> None:
    async def scene(network: LossyNetwork, client: End, server: End) -> tuple[int, int]:
        client.transport.write(b"x" * 10_000)
        client.transport.close()
        await server.over
        return server.pieces, running_loop().now_us

    assert play(scene, seed=5) == play(scene, seed=5)
    assert len({play(scene, seed=seed) for seed in range(10)}) > 5


def test_a_close_lets_the_last_bytes_arrive(kind: Kind) -> None:
    async def scene(network: LossyNetwork, client: End, server: End) -> None:
        client.transport.write(b"x" * 5_000)
        client.transport.close()
        await asyncio.gather(client.over, server.over)
        assert server.received == b"x" * 5_000
        assert server.calls[-2:] == ["eof", "lost"]

    for seed in range(20):
        play(scene, seed=seed, kind=kind)


def test_a_cut_is_learned_by_both_ends_and_loses_what_was_on_its_way(kind: Kind) -> None:
    async def scene(network: LossyNetwork, client: End, server: End) -> int:
        client.transport.write(b"x" * 1_000)
        await asyncio.sleep(0.02)
        network.cut(lossy(client))
        client.transport.write(b"y" * 1_000)
        await asyncio.gather(client.over, server.over)
        assert isinstance(client.error, ConnectionResetError)
        assert isinstance(server.error, ConnectionResetError)
        assert client.calls.count("lost") == server.calls.count("lost") == 1
        assert b"y" not in server.received
        return len(server.received)

    arrived = {play(scene, seed=seed, kind=kind) for seed in range(40)}
    assert any(0 < count < 1_000 for count in arrived)


def test_connections_are_cut_by_chance_in_mid_frame() -> None:
    async def scene(network: LossyNetwork, client: End, server: End) -> int:
        while not client.over.done():
            client.transport.write(b"x" * 100)
            await asyncio.sleep(0.01)
        await server.over
        return len(server.received)

    assert len({play(scene, seed=seed, cut_chance=0.1) for seed in range(10)}) > 5


def test_a_half_open_connection_is_never_noticed_by_one_end() -> None:
    async def scene(network: LossyNetwork, client: End, server: End) -> None:
        network.half_open(lossy(client))
        await server.over
        client.transport.write(b"into the void")
        await asyncio.sleep(3_600)
        assert client.calls == ["made"]
        client.transport.abort()
        await client.over
        assert server.received == b""

    play(scene)


def test_nothing_passes_a_partition_and_nothing_is_lost_by_it(kind: Kind) -> None:
    async def scene(network: LossyNetwork, client: End, server: End) -> None:
        network.partition("client", "broker")
        client.transport.write(b"held")
        client.transport.close()
        await asyncio.sleep(60)
        assert (server.received, server.calls) == (b"", ["made"])
        with pytest.raises(TimeoutError):
            await network.connect("broker", Plain)
        await network.connect("broker", Plain, source="another machine")
        network.heal()
        await server.over
        assert server.received == b"held"

    async def main() -> None:
        loop = running_loop()
        network = LossyNetwork(loop, loop.random)
        accepted: list[End] = []
        network.listen("broker", lambda: accepted.append(kind()) or accepted[-1])
        _, client = await network.connect("broker", kind)
        await scene(network, client, accepted[0])

    run(main(), seed=1)


def test_a_connection_to_where_nobody_listens_is_refused() -> None:
    async def scene(network: LossyNetwork, client: End, server: End) -> None:
        network.refuse("broker")
        with pytest.raises(ConnectionRefusedError, match="nobody listens at 'broker'"):
            await network.connect("broker", Plain)
        client.transport.write(b"still open")
        await asyncio.sleep(1)
        assert server.received == b"still open"

    play(scene)


def test_a_killed_machine_hears_nothing_and_the_others_see_a_reset() -> None:
    async def scene(network: LossyNetwork, client: End, server: End) -> None:
        client.transport.write(b"x")
        network.kill("broker")
        server.transport.write(b"from the dead")
        await client.over
        await asyncio.sleep(10)
        assert isinstance(client.error, ConnectionResetError)
        assert (server.calls, server.received, client.received) == (["made"], b"", b"")
        with pytest.raises(ConnectionRefusedError):
            await network.connect("broker", Plain)

    play(scene)


def test_a_slow_reader_makes_the_writer_pause(kind: Kind) -> None:
    async def scene(network: LossyNetwork, client: End, server: End) -> None:
        server.transport.pause_reading()
        client.transport.write(b"x" * 100_000)
        assert client.calls == ["made", "pause"]
        await asyncio.sleep(5)
        assert server.received == b""
        server.transport.resume_reading()
        await asyncio.sleep(60)
        assert client.calls == ["made", "pause", "resume"]
        assert len(server.received) == 100_000

    play(scene, kind=kind)


def test_a_server_that_speaks_first_is_heard_after_the_connection_was_made(kind: Kind) -> None:
    class Greets(Plain):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self.transport.write(b"hello")

    async def main() -> None:
        loop = running_loop()
        network = LossyNetwork(loop, loop.random)
        network.listen("broker", Greets)
        _, client = await network.connect("broker", kind)
        await asyncio.sleep(1)
        assert client.received == b"hello"

    for seed in range(20):
        run(main(), seed=seed)


def test_a_server_that_hangs_up_at_once_is_an_error_or_a_lost_connection() -> None:
    class HangsUp(Plain):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self.transport.abort()

    async def main() -> str:
        loop = running_loop()
        network = LossyNetwork(loop, loop.random)
        network.listen("broker", HangsUp)
        try:
            _, client = await network.connect("broker", Plain)
        except ConnectionResetError:
            return "error"
        await client.over
        assert client.calls == ["made", "lost"]
        return "lost"

    assert {run(main(), seed=seed) for seed in range(20)} == {"error", "lost"}


def test_who_gives_up_connecting_leaves_no_connection_behind() -> None:
    async def scene(network: LossyNetwork, client: End, server: End) -> None:
        accepted: asyncio.Queue[Plain] = asyncio.Queue()

        class Accepted(Plain):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                super().connection_made(transport)
                accepted.put_nowait(self)

        network.listen("slow", Accepted)
        task = asyncio.create_task(network.connect("slow", Plain))
        left = await accepted.get()
        task.cancel()
        await left.over
        assert isinstance(left.error, ConnectionResetError)
        assert len(network.connections("slow")) == 0

    play(scene, seed=2)
