import pytest

from onward.errors import ProtocolError, Unauthenticated
from onward.protocol.connection import (
    ALLOWED,
    ClientConnection,
    Connection,
    ServerConnection,
    State,
)
from onward.protocol.frames import PREFACE, Kind, frame
from onward.protocol.payloads import Goodbye, Hello, Welcome, decode_error, encode_json
from onward.protocol.receiver import Frame

HELLO = Hello(version=1, client="test", token="t")
WELCOME = Welcome(
    version=1,
    node="n1",
    heartbeat_ms=5000,
    frame_bytes_max=100_000,
    batch_bytes_max=90_000,
    message_bytes_max=80_000,
    publishes_max=16,
)


def give(connection: Connection, stream: bytes) -> list[Frame]:
    shared, got = bytearray(4096), []
    while stream:
        buffer = connection.buffer(shared)
        n = min(len(buffer), len(stream))
        buffer[:n] = stream[:n]
        stream = stream[n:]
        got += connection.received(n)
    return got


def open_pair() -> tuple[ServerConnection, ClientConnection]:
    server, client = ServerConnection(), ClientConnection(frame_bytes_max=200_000)
    give(server, client.hello(HELLO))
    give(client, server.welcome(WELCOME))
    return server, client


def in_state(peer: str, state: State) -> Connection:
    connection: Connection = ServerConnection() if peer == "client" else ClientConnection()
    if state is not State.PREFACE:
        server, client = open_pair()
        connection = server if peer == "client" else client
    if isinstance(connection, ServerConnection) and state in (State.HELLO, State.WELCOME):
        connection = ServerConnection()
        give(connection, PREFACE)
        if state is State.WELCOME:
            give(connection, frame(Kind.HELLO, 0, encode_json(HELLO)))
    if isinstance(connection, ClientConnection) and state is State.WELCOME:
        connection = ClientConnection()
        connection.hello(HELLO)
    if state is State.CLOSING:
        if isinstance(connection, ServerConnection):
            connection.goodbye(code="stopping", message="")
        elif isinstance(connection, ClientConnection):
            connection.bye()
    if state is State.CLOSED:
        connection.close()
    assert connection.state is state
    return connection


def payload_of(kind: int) -> bytes:
    if kind == Kind.HELLO:
        return encode_json(HELLO)
    if kind == Kind.WELCOME:
        return encode_json(WELCOME)
    return encode_json(Goodbye("stopping", "")) if kind == Kind.GOODBYE else b""


REACHABLE = [
    (peer, state)
    for peer in ALLOWED
    for state in State
    if (peer, state) not in {("broker", State.HELLO), ("client", State.PREFACE)}
]


@pytest.mark.parametrize(("peer", "state"), REACHABLE)
@pytest.mark.parametrize("kind", [*Kind, 0, 99, 255])
def test_a_frame_is_taken_exactly_when_the_table_allows_it(
    peer: str, state: State, kind: int
) -> None:
    connection = in_state(peer, state)
    sent = frame(kind, 5, payload_of(kind))
    if kind in ALLOWED[peer][state]:
        assert give(connection, sent) == [(kind, 5, payload_of(kind))]
    else:
        with pytest.raises(ProtocolError):
            give(connection, sent)
        assert connection.state is State.CLOSED


def test_the_hello_opens_a_connection_on_both_sides() -> None:
    server, client = open_pair()
    assert server.state is client.state is State.OPEN
    assert server.hello == HELLO
    assert client.welcome == WELCOME


def test_the_frame_limit_is_small_until_the_welcome_and_then_as_agreed() -> None:
    big = frame(Kind.PUBLISH, 1, bytes(90_000))
    with pytest.raises(ProtocolError, match="over the limit of 65536"):
        give(ServerConnection(), PREFACE + big)
    server, client = open_pair()
    assert len(give(server, big)) == 1
    with pytest.raises(ProtocolError, match="over the limit of 100000"):
        give(server, frame(Kind.PUBLISH, 1, bytes(100_000)))
    assert len(give(client, frame(Kind.ENTRIES, 1, bytes(150_000)))) == 1


def test_nothing_may_follow_the_hello_before_the_welcome() -> None:
    server = ServerConnection()
    with pytest.raises(ProtocolError, match="a client sends no PUBLISH before WELCOME"):
        give(server, ClientConnection().hello(HELLO) + frame(Kind.PUBLISH, 1))


def test_frames_that_arrive_together_with_the_welcome_are_taken() -> None:
    server, client = ServerConnection(), ClientConnection()
    give(server, client.hello(HELLO))
    got = give(client, server.welcome(WELCOME) + frame(Kind.PONG, 1))
    assert [kind for kind, _, _ in got] == [Kind.WELCOME, Kind.PONG]


@pytest.mark.parametrize("version", [0, 2, 2**40])
def test_another_version_is_refused_with_the_one_that_is_spoken(version: int) -> None:
    why = f"protocol version {version} is not spoken here; spoken is 1"
    with pytest.raises(ProtocolError, match=why):
        give(ServerConnection(), ClientConnection().hello(Hello(version=version)))
    client = ClientConnection()
    client.hello(HELLO)
    with pytest.raises(ProtocolError, match=why):
        give(client, frame(Kind.WELCOME, 0, encode_json(WELCOME).replace(b"1", b"%d" % version, 1)))


def test_an_unknown_kind_is_named() -> None:
    server, _ = open_pair()
    with pytest.raises(ProtocolError, match="unknown frame kind 99"):
        give(server, frame(99, 1))


def test_a_client_that_says_bye_may_say_no_more() -> None:
    server, client = open_pair()
    assert give(server, client.bye()) == [(Kind.BYE, 0, b"")]
    assert server.state is State.CLOSED
    with pytest.raises(ProtocolError, match="a client sends no PING after the end"):
        give(server, frame(Kind.PING, 1))


def test_answers_still_come_after_bye_and_after_goodbye() -> None:
    server, client = open_pair()
    client.bye()
    give(client, frame(Kind.PUBLISHED, 1) + server.goodbye(code="bye", message="as you wish"))
    give(client, frame(Kind.PUBLISHED, 2))
    assert client.goodbye == Goodbye("bye", "as you wish")
    assert client.state is State.CLOSING


def test_requests_that_crossed_a_goodbye_are_still_taken() -> None:
    server, _ = open_pair()
    server.goodbye(code="stopping", message="the broker stops")
    assert len(give(server, frame(Kind.PUBLISH, 1) + frame(Kind.PING, 2))) == 2


def test_a_refused_client_gets_the_error_before_the_end() -> None:
    server, client = ServerConnection(), ClientConnection()
    give(server, client.hello(HELLO))
    [(kind, request_id, payload)] = give(client, server.fault(Unauthenticated("wrong token")))
    assert (kind, request_id) == (Kind.ERROR, 0)
    assert isinstance(decode_error(payload), Unauthenticated)
    assert server.state is State.CLOSED


def test_a_hello_that_is_not_json_is_a_protocol_error() -> None:
    for payload in (b"", b"{", b"[]", b'{"version": "1"}', b"[" * 50_000):
        with pytest.raises(ProtocolError, match="HELLO"):
            give(ServerConnection(), PREFACE + frame(Kind.HELLO, 0, payload))


def test_the_bytes_of_an_incomplete_frame_are_counted_for_the_deadline() -> None:
    server, _ = open_pair()
    give(server, frame(Kind.PUBLISH, 1, bytes(50_000))[:30_000])
    assert server.pending_bytes == 30_000
