import socket
import threading
from collections.abc import Iterator

import pytest

from onward.bench.load import run_load
from onward.bench.speakers import Buffer, Refused

REQUEST, ANSWER = b"x" * 100_000, b"yes\n"


class LineSpeaker:
    """Sends large requests and counts lines."""

    def greeting(self) -> bytes:
        return b"hello\n"

    def is_greeted(self, received: bytes) -> bool:
        return received == b"welcome\n"

    def request(self) -> Buffer:
        return REQUEST

    def answers(self, received: bytes) -> int:
        return received.count(b"\n")


class CountingServer:
    """Answers every whole request with a line; can hang up after some of them."""

    def __init__(self, *, hang_up_after: int | None = None) -> None:
        self.hang_up_after = hang_up_after
        self.requests = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads: list[threading.Thread] = []

    def accept(self, count: int) -> None:
        accepting = threading.Thread(target=self._accept, args=(count,))
        accepting.start()
        self._threads.append(accepting)

    def _accept(self, count: int) -> None:
        for _ in range(count):
            connection, _ = self._listener.accept()
            serving = threading.Thread(target=self._serve, args=(connection,))
            serving.start()
            self._threads.append(serving)

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            assert connection.recv(6, socket.MSG_WAITALL) == b"hello\n"
            connection.sendall(b"welcome\n")
            while connection.recv(len(REQUEST), socket.MSG_WAITALL):
                if self.requests == self.hang_up_after:
                    return
                self.requests += 1
                connection.sendall(ANSWER)

    def close(self) -> None:
        for thread in self._threads:
            thread.join(10)
        self._listener.close()


@pytest.fixture
def server() -> Iterator[CountingServer]:
    server = CountingServer()
    yield server
    server.close()


def test_the_generator_counts_what_was_answered_and_leaves_nothing_behind(server: CountingServer):
    server.accept(1)
    load = run_load(server.port, [LineSpeaker()], in_flight=3, requests=50, warm_up_s=0)
    assert load.requests >= 50
    assert server.requests == load.requests + 3
    assert len(load.latencies_ns) == load.requests


def test_the_generator_keeps_several_connections_busy(server: CountingServer):
    server.accept(4)
    load = run_load(server.port, [LineSpeaker() for _ in range(4)], requests=40, warm_up_s=0)
    assert server.requests == load.requests + 4
    assert set(load.details()) >= {"latency_ms", "generator_busy", "generator_ceiling"}


def test_a_server_that_hangs_up_is_no_result():
    server = CountingServer(hang_up_after=5)
    server.accept(1)
    with pytest.raises((Refused, ConnectionError)):
        run_load(server.port, [LineSpeaker()], requests=50, warm_up_s=0)
    server.close()
