"""A load generator that is as light as Python allows: one thread, one epoll, prepared requests.

It shares the machine with the server it loads, so each answer costs it one receive, one send and
little more. It counts its own processor time: `ceiling` is how many requests per second it could
do at most with a core of its own, `busy` its share of a core in this run. When `busy` is near 1,
the figure says more about the generator than about the server. On a machine that others use as
well, the processor time that the server took per request is the steadiest figure of all.

    open all connections ──▶ warm up ──▶ count for `seconds` ──▶ stop sending, take what is due
"""

import math
import select
import socket
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from onward.bench.report import percentiles_ms
from onward.bench.speakers import Buffer, Refused, Speaker
from onward.errors import Unavailable

WARM_UP_S = 0.5
SILENCE_S_MAX = 10.0
# Small: a large buffer would be mapped anew by the kernel for each receive.
_RECEIVE_BYTES = 8 * 1024


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a run of the generator saw."""

    requests: int
    seconds: float
    cpu_seconds: float
    server_cpu_seconds: float
    latencies_ns: Sequence[int] = field(repr=False)

    @property
    def per_second(self) -> float:
        """Answered requests per second."""
        return self.requests / self.seconds

    @property
    def ceiling(self) -> float:
        """Requests per second that the generator could do with a core of its own."""
        return self.requests / self.cpu_seconds

    def details(self) -> dict[str, object]:
        """Return what goes into the report."""
        return {
            "requests": self.requests,
            "seconds": round(self.seconds, 3),
            "latency_ms": percentiles_ms(self.latencies_ns),
            "generator_busy": round(self.cpu_seconds / self.seconds, 3),
            "generator_ceiling": round(self.ceiling),
            "server_busy": round(self.server_cpu_seconds / self.seconds, 3),
            "server_cpu_us_per_request": round(self.server_cpu_seconds / self.requests * 1e6, 2),
        }


def run_load(
    port: int,
    speakers: Sequence[Speaker],
    *,
    in_flight: int = 1,
    seconds: float = math.inf,
    requests: float = math.inf,
    warm_up_s: float = WARM_UP_S,
    server_cpu: Callable[[], float] = lambda: 0.0,
) -> Load:
    """Keep `in_flight` requests under way on one connection per speaker.

    It ends after `seconds` or after so many answered `requests`, whichever comes first.
    `server_cpu` tells how many seconds of processor time the server has taken so far.
    """
    poll = select.epoll()
    lanes = [_Lane(_connect(port, speaker), speaker, poll) for speaker in speakers]
    try:
        for lane in lanes:
            for _ in range(in_flight):
                lane.send_next(time.perf_counter_ns())
        by_number = {lane.number: lane for lane in lanes}
        _exchange(poll, by_number, seconds=warm_up_s, requests=requests)
        server_s, cpu, started_at = server_cpu(), time.process_time(), time.perf_counter()
        latencies = _exchange(poll, by_number, seconds=seconds, requests=requests)
        elapsed, cpu_seconds = time.perf_counter() - started_at, time.process_time() - cpu
        server_s_after = server_cpu()
        _drain(poll, by_number)
        return Load(
            requests=len(latencies), seconds=elapsed, cpu_seconds=cpu_seconds,
            server_cpu_seconds=server_s_after - server_s, latencies_ns=latencies,
        )  # fmt: skip
    finally:
        for lane in lanes:
            lane.socket.close()
        poll.close()


class _Lane:
    """One connection with its speaker."""

    def __init__(self, connection: socket.socket, speaker: Speaker, poll: select.epoll) -> None:
        self.socket = connection
        self.number = connection.fileno()
        self.receive = connection.recv
        self.answers = speaker.answers
        self._request = speaker.request
        self._send = connection.send
        self._poll = poll
        self._unsent: deque[memoryview] = deque()
        self.sent_at_ns: deque[int] = deque()
        poll.register(self.number, select.EPOLLIN)

    def send_next(self, now_ns: int) -> None:
        request = self._request()
        self.sent_at_ns.append(now_ns)
        if self._unsent:
            self._unsent.append(memoryview(request))
            return
        sent = self._try_send(request)
        if sent < len(request):
            self._unsent.append(memoryview(request)[sent:])
            self._poll.modify(self.number, select.EPOLLIN | select.EPOLLOUT)

    def send_rest(self) -> None:
        """The socket takes bytes again."""
        while self._unsent:
            rest = self._unsent[0]
            sent = self._try_send(rest)
            if sent < len(rest):
                self._unsent[0] = rest[sent:]
                return
            self._unsent.popleft()
        self._poll.modify(self.number, select.EPOLLIN)

    def _try_send(self, request: Buffer | memoryview) -> int:
        try:
            return self._send(request)
        except BlockingIOError:
            return 0


def _exchange(
    poll: select.epoll, lanes: dict[int, _Lane], *, seconds: float, requests: float
) -> Sequence[int]:
    """Answer every answer with the next request; return the latencies."""
    latencies = array("Q")
    took = latencies.append
    clock = time.perf_counter_ns
    stop_at = clock() + seconds * 1e9
    while clock() < stop_at and len(latencies) < requests:
        for lane, answers in _answers(poll, lanes):
            for _ in range(answers):
                now_ns = clock()
                took(now_ns - lane.sent_at_ns.popleft())
                lane.send_next(now_ns)
    return latencies


def _drain(poll: select.epoll, lanes: dict[int, _Lane]) -> None:
    """Take the answers that are due, so that nothing happens in the server after the run."""
    while any(lane.sent_at_ns for lane in lanes.values()):
        for lane, answers in _answers(poll, lanes):
            for _ in range(answers):
                lane.sent_at_ns.popleft()


def _answers(poll: select.epoll, lanes: dict[int, _Lane]) -> Iterator[tuple[_Lane, int]]:
    """Wait for the server; yield each lane that got something, with the answers in it."""
    events = poll.poll(SILENCE_S_MAX)
    if not events:
        raise Unavailable(f"the server was silent for {SILENCE_S_MAX:g} s")
    for number, event in events:
        lane = lanes[number]
        if event & select.EPOLLOUT:
            lane.send_rest()
            if event == select.EPOLLOUT:
                continue
        received = lane.receive(_RECEIVE_BYTES)
        if not received:
            raise Refused("the server closed a connection")
        yield lane, lane.answers(received)


def _connect(port: int, speaker: Speaker) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=SILENCE_S_MAX)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(speaker.greeting())
    received = b""
    while not speaker.is_greeted(received):
        more = connection.recv(_RECEIVE_BYTES)
        if not more:
            raise Refused("the server closed a connection")
        received += more
    connection.setblocking(False)
    return connection
