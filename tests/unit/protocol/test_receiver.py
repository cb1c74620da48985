import contextlib
import tracemalloc
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.errors import ProtocolError
from onward.protocol.frames import PREFACE, frame
from onward.protocol.receiver import Frame, Receiver

MIB = 1 << 20

frames = st.tuples(
    st.integers(0, 255),
    st.integers(0, 2**32 - 1),
    st.binary(max_size=60) | st.integers(0, 3000).map(bytes),
)


def feed(receiver: Receiver, shared: bytearray, stream: bytes, sizes: Iterable[int]) -> list[Frame]:
    """Receive a stream in pieces, as an event loop would."""
    got: list[Frame] = []
    pieces = iter(sizes)
    while stream:
        buffer = receiver.buffer(shared)
        n = min(len(buffer), len(stream), next(pieces, len(stream)))
        buffer[:n] = stream[:n]
        stream = stream[n:]
        got += receiver.received(n)
        shared[:] = b"\xee" * len(shared)  # the next one who uses the shared buffer
    return got


@given(
    st.lists(frames, max_size=12),
    st.lists(st.integers(1, 400), max_size=100),
    st.integers(64, 2048),
    st.booleans(),
)
def test_a_stream_in_any_pieces_gives_the_same_frames(
    sent: list[Frame], sizes: list[int], shared_bytes: int, preface: bool
) -> None:
    stream = (PREFACE if preface else b"") + b"".join(frame(*one) for one in sent)
    receiver = Receiver(frame_bytes_max=5000, preface=PREFACE if preface else b"")
    assert feed(receiver, bytearray(shared_bytes), stream, sizes) == sent
    assert receiver.pending_bytes == 0


@given(st.lists(frames, max_size=6), st.integers(1, 11), st.integers(64, 2048))
def test_what_is_there_of_an_incomplete_frame_is_counted(
    sent: list[Frame], cut: int, shared_bytes: int
) -> None:
    last = frame(1, 1, bytes(900))
    stream = b"".join(frame(*one) for one in sent) + last[:-cut]
    receiver = Receiver(frame_bytes_max=5000)
    assert feed(receiver, bytearray(shared_bytes), stream, []) == sent
    assert receiver.pending_bytes == len(last) - cut


def test_a_large_frame_is_received_straight_into_its_own_bytes() -> None:
    shared = bytearray(4096)
    receiver = Receiver(frame_bytes_max=MIB)
    stream = frame(75, 1, bytes(20_000))
    receiver.buffer(shared)[:4096] = stream[:4096]
    assert receiver.received(4096) == []
    own = receiver.buffer(shared)
    assert own.obj is not shared
    assert len(own) == len(stream) - 4096, "exactly what is missing"
    [(_, _, payload)] = feed(receiver, shared, stream[4096:], [])
    assert payload is own.obj
    assert receiver.buffer(shared).obj is shared


def test_a_receive_that_brought_nothing_changes_nothing() -> None:
    one = frame(10, 7, b"x" * 30)
    shared, receiver = bytearray(1024), Receiver(frame_bytes_max=1000)
    receiver.buffer(shared)[:20] = one[:20]
    assert receiver.received(20) == []
    receiver.buffer(shared)  # the socket had nothing, and the loop said nothing
    shared[:] = b"\xee" * 1024
    receiver.buffer(shared)[: len(one) - 20] = one[20:]
    assert receiver.received(len(one) - 20) == [(10, 7, b"x" * 30)]


def test_who_announces_much_and_sends_nothing_costs_nothing() -> None:
    receiver, shared = Receiver(frame_bytes_max=17 * MIB), bytearray(4096)
    tracemalloc.start()
    try:
        feed(receiver, shared, frame(10, 1, bytes(16 * MIB))[:5000], [])
        assert tracemalloc.get_traced_memory()[0] < MIB
    finally:
        tracemalloc.stop()


def test_a_frame_of_many_megabytes_grows_as_it_arrives() -> None:
    payload = bytes(range(256)) * (3 * 4096)
    receiver, shared = Receiver(frame_bytes_max=4 * MIB), bytearray(256 * 1024)
    assert feed(receiver, shared, frame(10, 1, payload), []) == [(10, 1, payload)]


def test_a_view_that_the_event_loop_still_holds_does_not_stop_a_frame_from_growing() -> None:
    receiver, shared, views = Receiver(frame_bytes_max=2 * MIB), bytearray(1024), []
    stream = frame(10, 1, bytes(MIB))
    while stream:
        views.append(receiver.buffer(shared))
        n = min(len(views[-1]), len(stream))
        views[-1][:n] = stream[:n]
        stream = stream[n:]
        got = receiver.received(n)
    assert got == [(10, 1, bytes(MIB))]


@pytest.mark.parametrize("length", [0, 1, 7, 997, 2**31, 2**32 - 1])
@pytest.mark.parametrize("kept", [4, 11, 12])
def test_a_length_beyond_the_limits_is_refused_as_soon_as_it_is_read(
    length: int, kept: int
) -> None:
    stream = length.to_bytes(4, "little") + bytes(8)
    with pytest.raises(ProtocolError, match="over the limit of 1000|the least is 8"):
        feed(Receiver(frame_bytes_max=1000), bytearray(64), stream[:kept], [])


def test_a_frame_of_exactly_the_limit_is_taken() -> None:
    payload = bytes(1000 - 12)
    receiver = Receiver(frame_bytes_max=1000)
    assert feed(receiver, bytearray(64), frame(1, 2, payload), []) == [(1, 2, payload)]


def test_the_limit_can_be_raised_after_the_hello() -> None:
    receiver, shared, big = Receiver(frame_bytes_max=100), bytearray(64), frame(1, 2, bytes(200))
    assert feed(receiver, shared, frame(1, 1), []) == [(1, 1, b"")]
    receiver.frame_bytes_max = 1000
    assert feed(receiver, shared, big, []) == [(1, 2, bytes(200))]


@pytest.mark.parametrize(("first", "expected"), [(24_000, 24_000), (1_000_000, 500_000)])
def test_a_frame_that_was_asked_for_has_its_memory_at_once(first: int, expected: int) -> None:
    stream = frame(75, 7, bytes(range(250)) * 2_000)
    shared = bytearray(4_096)
    receiver = Receiver(frame_bytes_max=1 << 20, own_bytes_first=first)
    memory: list[int] = []
    payloads: list[bytes | bytearray] = []
    while stream:
        place = receiver.buffer(shared)
        n = min(len(place), len(stream))
        place[:n], stream = stream[:n], stream[n:]
        payloads += [payload for _, _, payload in receiver.received(n)]
        memory.append(receiver.own_bytes)
    assert memory[0] == expected
    assert payloads == [bytes(range(250)) * 2_000]


def test_the_memory_of_a_large_frame_is_known_until_it_is_complete() -> None:
    receiver, shared = Receiver(frame_bytes_max=100_000), bytearray(64)
    stream = frame(1, 2, bytes(50_000))
    assert feed(receiver, shared, stream[:30_000], []) == []
    assert 30_000 <= receiver.own_bytes + 12 <= 60_000
    assert feed(receiver, shared, stream[30_000:], []) == [(1, 2, bytes(50_000))]
    assert receiver.own_bytes == 0


@pytest.mark.parametrize("at", [5, 6, 7])
def test_reserved_bytes_that_are_not_zero_are_refused(at: int) -> None:
    stream = bytearray(frame(1, 2, b"abc"))
    stream[at] = 1
    with pytest.raises(ProtocolError, match="reserved bytes"):
        feed(Receiver(frame_bytes_max=1000), bytearray(64), bytes(stream), [])


@pytest.mark.parametrize("start", [b"GET / HTTP/1.1\r\n", b"POST /x", b"G", b"PUT", b"OPTIONS *"])
def test_a_browser_is_told_that_this_is_not_the_http_port(start: bytes) -> None:
    with pytest.raises(ProtocolError, match="not HTTP"):
        feed(Receiver(frame_bytes_max=1000, preface=PREFACE), bytearray(64), start, [])


@pytest.mark.parametrize("start", [b"ONWARD2\n", b"\x16\x03\x01", b"SSH-2.0-x", b"OX"])
def test_any_other_preface_is_refused_at_its_first_wrong_byte(start: bytes) -> None:
    with pytest.raises(ProtocolError, match="preface"):
        feed(Receiver(frame_bytes_max=1000, preface=PREFACE), bytearray(64), start, [])


@given(st.binary(max_size=300), st.lists(st.integers(1, 50), max_size=20))
def test_garbage_is_frames_or_a_protocol_error_and_nothing_else(
    garbage: bytes, sizes: list[int]
) -> None:
    with contextlib.suppress(ProtocolError):
        feed(Receiver(frame_bytes_max=1000), bytearray(64), garbage, sizes)
