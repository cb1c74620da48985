"""Which frame is allowed when: the state of one connection, seen from either end.

    broker   HELLO ─preface, HELLO─▶ WELCOME ─welcome()─▶ OPEN ─goodbye()─▶ CLOSING
    client   PREFACE ─hello()─▶ WELCOME ─WELCOME─▶ OPEN ─bye() or GOODBYE─▶ CLOSING
    both     any ─BYE received, a fault, or close()─▶ CLOSED

HELLO: the client has the word. WELCOME: the broker has it, and the client sends nothing until it
has it back. CLOSING: no new requests, but answers to those under way still come. CLOSED: nothing
more is read, whatever may still be written.

The table `ALLOWED` is the whole truth about what the other side may send. A connection only looks
at kinds, and decodes HELLO, WELCOME and GOODBYE; the shell decodes everything else. It never does
I/O: the shell receives into `buffer`, calls `received`, and writes what the other calls return.
"""

from enum import Enum, auto
from typing import Final

from onward.errors import OnwardError, ProtocolError
from onward.protocol.frames import (
    FRAME_BYTES_MAX,
    HELLO_FRAME_BYTES_MAX,
    PREFACE,
    PROTOCOL_VERSION,
    Kind,
    frame,
    kind_name,
)
from onward.protocol.payloads import (
    Goodbye,
    Hello,
    Welcome,
    decode_goodbye,
    decode_hello,
    decode_welcome,
    encode_error,
    encode_json,
)
from onward.protocol.receiver import OWN_BYTES_FIRST, Frame, Receiver


class State(Enum):
    """How far a connection is."""

    PREFACE = auto()
    HELLO = auto()
    WELCOME = auto()
    OPEN = auto()
    CLOSING = auto()
    CLOSED = auto()


READ_BYTES_USUAL: Final = 1 << 20
"""What the broker sends at once of what is read, and somewhat more."""

_NOTHING: Final[frozenset[int]] = frozenset()
# What may come at any time while a connection is open, and changes nothing in its state.
_FROM_CLIENT: Final[frozenset[int]] = frozenset(
    (
        *(Kind.PING, Kind.PUBLISH, Kind.READ, Kind.CREDIT, Kind.CANCEL, Kind.REQUEST),
        *(Kind.CONSUME, Kind.ACK, Kind.SETTLE, Kind.MORE, Kind.STARTED),
        *(Kind.PROGRESS, Kind.FOLLOW, Kind.FOLLOWED, Kind.FETCH),
    )
)
_FROM_BROKER: Final[frozenset[int]] = frozenset(
    (
        *(Kind.PONG, Kind.PUBLISHED, Kind.ENTRIES, Kind.END, Kind.REPLY, Kind.ERROR),
        *(Kind.DELIVERY, Kind.SETTLED, Kind.COUNTED_FROM, Kind.RECALL),
        *(Kind.EVENTS, Kind.SOURCE, Kind.FILE),
    )
)

# ALLOWED[who sends][state of who receives]
ALLOWED: Final[dict[str, dict[State, frozenset[int]]]] = {
    "client": {
        State.PREFACE: _NOTHING,
        State.HELLO: frozenset((Kind.HELLO, Kind.BYE)),
        State.WELCOME: frozenset((Kind.BYE,)),
        State.OPEN: _FROM_CLIENT | {Kind.BYE},
        State.CLOSING: _FROM_CLIENT | {Kind.BYE},
        State.CLOSED: _NOTHING,
    },
    "broker": {
        State.PREFACE: _NOTHING,
        State.HELLO: _NOTHING,
        State.WELCOME: frozenset((Kind.WELCOME, Kind.ERROR, Kind.GOODBYE)),
        State.OPEN: _FROM_BROKER | {Kind.GOODBYE},
        State.CLOSING: _FROM_BROKER | {Kind.GOODBYE},
        State.CLOSED: _NOTHING,
    },
}

_WHEN: Final = {
    State.PREFACE: "before the hello",
    State.HELLO: "before HELLO",
    State.WELCOME: "before WELCOME",
    State.OPEN: "in an open connection",
    State.CLOSING: "in a connection that is closing",
    State.CLOSED: "after the end",
}


class Connection:
    """What both ends have: a receiver, a state, and the check of each frame against the table."""

    _peer: str
    _usual: frozenset[int]

    def __init__(self, *, preface: bytes, own_bytes_first: int = OWN_BYTES_FIRST) -> None:
        self.state = State.PREFACE
        self.receiver = Receiver(
            frame_bytes_max=HELLO_FRAME_BYTES_MAX, preface=preface, own_bytes_first=own_bytes_first
        )

    @property
    def pending_bytes(self) -> int:
        """How many bytes of a frame that is not complete have arrived."""
        return self.receiver.pending_bytes

    def buffer(self, shared: bytearray) -> memoryview:
        """Return where to receive next. Ask again before each receive."""
        return self.receiver.buffer(shared)

    def received(self, n: int) -> list[Frame]:
        """Take note that `n` bytes came into the last `buffer`; return the frames, all allowed.

        A `ProtocolError` is the end: send what `fault` returns for it, and close.
        """
        try:
            frames = self.receiver.received(n)
            if self.state is not State.OPEN:
                self._check_each(frames)
                return frames
            usual = self._usual
            for one in frames:
                if one[0] not in usual:
                    self._check_each(frames)
                    break
            return frames
        except ProtocolError:
            self.state = State.CLOSED
            raise

    def close(self) -> None:
        """Take note that the socket is gone, or will be at once."""
        self.state = State.CLOSED

    def _check_each(self, frames: list[Frame]) -> None:
        for kind, _, payload in frames:
            self.check(kind, payload)

    def check(self, kind: int, payload: bytes | bytearray) -> None:
        """Check one frame against the table, and change the state when it does.

        For a shell that takes frames from the receiver itself, because most need no check.
        """
        if kind not in ALLOWED[self._peer][self.state]:
            error = self._not_allowed(kind)
            self.state = State.CLOSED
            raise error
        if kind not in self._usual:
            self._moved(kind, payload)

    def _moved(self, kind: int, payload: bytes | bytearray) -> None:
        raise NotImplementedError

    def _not_allowed(self, kind: int) -> ProtocolError:
        if kind not in Kind.__members__.values():
            return ProtocolError(f"unknown {kind_name(kind)}")
        return ProtocolError(f"a {self._peer} sends no {kind_name(kind)} {_WHEN[self.state]}")


class ServerConnection(Connection):
    """The broker's end.

    >>> connection, shared = ServerConnection(), bytearray(1024)
    >>> first = ClientConnection().hello(Hello(version=1, client="doc"))
    >>> connection.buffer(shared)[: len(first)] = first
    >>> [kind_name(kind) for kind, _, _ in connection.received(len(first))]
    ['HELLO']
    >>> connection.state, connection.hello.client
    (<State.WELCOME: 3>, 'doc')
    """

    _peer = "client"
    _usual = _FROM_CLIENT

    def __init__(self) -> None:
        super().__init__(preface=PREFACE)
        # The receiver holds every frame back until the preface is there.
        self.state = State.HELLO
        self.hello: Hello | None = None

    def welcome(self, welcome: Welcome) -> bytes:
        """Accept the client: return the WELCOME to send; its limits hold from here on."""
        assert self.state is State.WELCOME, f"welcome() {_WHEN[self.state]}"
        self.state = State.OPEN
        self.receiver.frame_bytes_max = welcome.frame_bytes_max
        return frame(Kind.WELCOME, 0, encode_json(welcome))

    def goodbye(self, *, code: str, message: str) -> bytes:
        """Take no more requests: return the GOODBYE to send; answers may still follow it."""
        if self.state is not State.CLOSED:
            self.state = State.CLOSING
        return frame(Kind.GOODBYE, 0, encode_json(Goodbye(code, message)))

    def fault(self, error: OnwardError) -> bytes:
        """Give up on the client: return the ERROR to send before closing."""
        self.state = State.CLOSED
        return frame(Kind.ERROR, 0, encode_error(error))

    def _moved(self, kind: int, payload: bytes | bytearray) -> None:
        if kind == Kind.BYE:
            self.state = State.CLOSED
            return
        self.hello = decode_hello(payload)
        _check_version(self.hello.version)
        self.state = State.WELCOME


class ClientConnection(Connection):
    r"""The client's end.

    >>> connection = ClientConnection()
    >>> connection.hello(Hello(version=1))
    b'ONWARD1\n\x15\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00{"version":1}'
    >>> connection.state
    <State.WELCOME: 3>
    """

    _peer = "broker"
    _usual = _FROM_BROKER

    def __init__(self, *, frame_bytes_max: int = FRAME_BYTES_MAX, place: str = "there") -> None:
        # What it reads it has asked for: memory for a frame of the usual size is there at once.
        super().__init__(preface=b"", own_bytes_first=READ_BYTES_USUAL)
        self.welcome: Welcome | None = None
        self.goodbye: Goodbye | None = None
        self._frame_bytes_max = frame_bytes_max
        self._place = place

    def received(self, n: int) -> list[Frame]:
        """Take note of `n` bytes as `Connection` does; say so when no broker sent the first."""
        if self.state is State.WELCOME and (spoken := _foreign(self.receiver.first_bytes(n))):
            self.state = State.CLOSED
            raise ProtocolError(
                f"what listens {self._place} is not an Onward broker: it speaks {spoken}"
            )
        return super().received(n)

    def hello(self, hello: Hello) -> bytes:
        """Return preface and HELLO, the first bytes to send; then wait for WELCOME."""
        assert self.state is State.PREFACE, f"hello() {_WHEN[self.state]}"
        self.state = State.WELCOME
        return PREFACE + frame(Kind.HELLO, 0, encode_json(hello))

    def bye(self) -> bytes:
        """Ask for nothing more: return the BYE to send; answers still come, then the end."""
        if self.state is not State.CLOSED:
            self.state = State.CLOSING
        return frame(Kind.BYE, 0)

    def _moved(self, kind: int, payload: bytes | bytearray) -> None:
        if kind == Kind.GOODBYE:
            self.goodbye = decode_goodbye(payload)
            self.state = State.CLOSING
            return
        self.welcome = decode_welcome(payload)
        _check_version(self.welcome.version)
        self.receiver.frame_bytes_max = max(self._frame_bytes_max, self.welcome.frame_bytes_max)
        self.state = State.OPEN


def _foreign(first: bytes) -> str:
    """Return the name of another protocol that an answer begins with; "" when it is none."""
    # Servers answer what is no request of theirs; some send only the page, without a status line.
    if first.startswith((b"HTTP", b"<!DO", b"<!do", b"<htm", b"<HTM")):
        return "HTTP"
    # An alert or a handshake record of SSL 3.0 or any TLS.
    if len(first) > 1 and first[0] in (0x15, 0x16) and first[1] == 3:
        return "TLS"
    return "SSH" if first.startswith(b"SSH-") else ""


def _check_version(version: int) -> None:
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"protocol version {version} is not spoken here; spoken is {PROTOCOL_VERSION}"
        )
