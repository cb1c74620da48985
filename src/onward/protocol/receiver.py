"""Bytes of a socket become frames, with as few copies and as little memory as possible.

Two ways in. A client receives into a buffer: the event loop asks where (`buffer`), receives, and
says how much came (`received`), with nothing in between. The broker is handed bytes (`feed`), and
cuts frames from where they lie; only the rest of a small frame goes through a scratch buffer.

    where the bytes of a frame go
    whole in what was received         copied out once, payload is `bytes`
    small and cut off at the end       the piece is kept, and put before what comes next
    large and cut off at the end       received straight into a bytearray of its own, no more copies

A connection without a partial frame holds no buffer at all. A length is checked against the limit
before anything is allocated; a large frame gets twice what has arrived, all of it once a quarter
is there, and grows only as its bytes really come, so who announces 17 MiB and sends nothing costs
little. After a `ProtocolError` the stream has no meaning any more: close it. What came before the
fault in one read is not delivered.
"""

from collections.abc import Iterator
from struct import Struct
from typing import Final

from onward.errors import ProtocolError
from onward.protocol.frames import HEADER_BYTES

Frame = tuple[int, int, bytes | bytearray]

SHARED_BYTES: Final = 256 * 1024

OWN_BYTES_FIRST: Final = 24 * 1024
# kind, flags and the zero field are read as one number: it is the kind when both others are 0.
_HEADER: Final = Struct("<III")
_unpack_header = _HEADER.unpack_from
_LENGTH: Final = Struct("<I")
_HTTP: Final = (b"GET ", b"POST ", b"PUT ", b"HEAD ", b"DELETE ", b"OPTIONS ", b"PATCH ", b"PRI * ")


class Receiver:
    """Cuts the stream of one peer into frames.

    >>> shared, receiver = bytearray(1024), Receiver(frame_bytes_max=1000)
    >>> receiver.buffer(shared)[:12] = bytes.fromhex("08000000 02000000 07000000")
    >>> receiver.received(12)
    [(2, 7, b'')]
    """

    __slots__ = (
        "_filled",
        "_kind",
        "_own",
        "_own_bytes_first",
        "_preface",
        "_request_id",
        "_size",
        "_tail",
        "_view",
        "frame_bytes_max",
    )

    def __init__(
        self, *, frame_bytes_max: int, preface: bytes = b"",
        own_bytes_first: int = OWN_BYTES_FIRST,
    ) -> None:  # fmt: skip
        self.frame_bytes_max = frame_bytes_max
        self._own_bytes_first = own_bytes_first
        self._preface = preface
        self._view: memoryview | None = None  # the shared buffer, from buffer() to received()
        self._tail = b""  # the beginning of a small frame
        self._own: bytearray | None = None  # the payload of a large frame, as far as it has come
        self._filled = self._size = self._kind = self._request_id = 0

    @property
    def pending_bytes(self) -> int:
        """How many bytes of a frame that is not complete have arrived."""
        return len(self._tail) if self._own is None else HEADER_BYTES + self._filled

    @property
    def own_bytes(self) -> int:
        """How many bytes of memory a large frame that is not complete holds."""
        return 0 if self._own is None else len(self._own)

    def buffer(self, shared: bytearray) -> memoryview:
        """Return where to receive next. Ask again before each receive."""
        if self._own is not None:
            return memoryview(self._own)[self._filled :]
        view = self._view = memoryview(shared)
        if not self._tail:
            return view
        # Put back each time: between two receives other connections wrote over it.
        view[: len(self._tail)] = self._tail
        return view[len(self._tail) :]

    def received(self, n: int) -> list[Frame]:
        """Take note that `n` bytes came into the last `buffer`; return the complete frames."""
        if self._own is not None:
            return self._received_own(n)
        view = self._view
        assert view is not None, "received() without buffer()"
        self._view = None
        if n >= 12 and not self._tail and not self._preface:
            # Mostly it is one whole frame: nothing to cut, nothing left over.
            length, kind, request_id = _unpack_header(view, 0)
            if length + 4 == n <= self.frame_bytes_max and kind < 256:
                return [(kind, request_id, bytes(view[12:n]))]
        end = len(self._tail) + n
        if self._preface:
            return self._cut_preface(view, end)
        return self._cut(view, 0, end)

    def first_bytes(self, n: int) -> bytes:
        """Return the first four bytes that are not cut yet, with the `n` that came just now."""
        return b"" if self._view is None else bytes(self._view[: min(len(self._tail) + n, 4)])

    def feed(self, received: bytes, shared: bytearray) -> Iterator[list[Frame]]:
        """Take bytes that were received elsewhere; give the frames that they complete.

        >>> shared, receiver = bytearray(64), Receiver(frame_bytes_max=1000)
        >>> list(receiver.feed(bytes.fromhex("08000000 02000000 07000000"), shared))
        [[(2, 7, b'')]]
        """
        rest = memoryview(received)
        while rest:
            if self._own is None and not self._tail and not self._preface:
                # Nothing is begun: frames are cut from where they lie.
                if frames := self._cut(rest, 0, len(rest)):
                    yield frames
                return
            buffer = self.buffer(shared)
            count = min(len(buffer), len(rest))
            buffer[:count] = rest[:count]
            rest = rest[count:]
            if frames := self.received(count):
                yield frames

    def _cut(self, view: memoryview, start: int, end: int) -> list[Frame]:
        frames: list[Frame] = []
        limit = self.frame_bytes_max - 4
        while end - start >= 12:
            length, kind, request_id = _unpack_header(view, start)
            if not 8 <= length <= limit or kind > 255:
                raise self._fault(length, kind)
            stop = start + 4 + length
            if stop > end:
                if 4 * length > len(view):
                    self._begin_own(view[start + HEADER_BYTES : end], length - 8, kind, request_id)
                    return frames
                break
            frames.append((kind, request_id, bytes(view[start + 12 : stop])))
            start = stop
        if start == end:
            self._tail = b""
            return frames
        self._tail = bytes(view[start:end])
        if 4 <= end - start < HEADER_BYTES:
            (length,) = _LENGTH.unpack_from(view, start)
            if not 8 <= length <= limit:
                raise self._fault(length, 0)
        return frames

    def _begin_own(self, begun: memoryview, size: int, kind: int, request_id: int) -> None:
        room = size if size <= 4 * len(begun) else max(self._own_bytes_first, 2 * len(begun))
        own = bytearray(min(size, room))
        own[: len(begun)] = begun
        self._own, self._filled, self._tail = own, len(begun), b""
        self._size, self._kind, self._request_id = size, kind, request_id
        self._grow(own)

    def _received_own(self, n: int) -> list[Frame]:
        own = self._own
        assert own is not None
        self._filled += n
        if self._filled < self._size:
            self._grow(own)
            return []
        self._own = None
        return [(self._kind, self._request_id, own)]

    def _grow(self, own: bytearray) -> None:
        """Double a full buffer. It is a new one: the event loop may hold a view of the old."""
        if self._filled == len(own):
            larger = bytearray(min(self._size, 2 * len(own)))
            larger[: self._filled] = own
            self._own = larger

    def _cut_preface(self, view: memoryview, end: int) -> list[Frame]:
        preface, got = self._preface, bytes(view[: min(end, len(self._preface))])
        if not preface.startswith(got):
            raise ProtocolError(_preface_fault(got))
        if len(got) < len(preface):
            self._tail = got
            return []
        self._preface = b""
        return self._cut(view, len(preface), end)

    def _fault(self, length: int, kind: int) -> ProtocolError:
        if length < 8:
            return ProtocolError(f"a frame states a length of {length}; the least is 8")
        if length > self.frame_bytes_max - 4:
            return ProtocolError(
                f"a frame of {length + 4} bytes is over the limit of {self.frame_bytes_max}"
            )
        return ProtocolError(f"the reserved bytes of a frame are {kind >> 8:#x}, not 0")


def _preface_fault(got: bytes) -> str:
    if any(got.startswith(method) or method.startswith(got) for method in _HTTP):
        return "this is the port for Onward clients, not HTTP"
    return f"a client begins with the preface 'ONWARD1\\n', not {got!r}"
