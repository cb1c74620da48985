"""The protocols that the load generator speaks: one speaker for each connection.

A speaker says what to send next and counts the answers in what came; it does no I/O. The requests
are prepared before the clock runs, so that the generator costs the same for every server: Redis
gets the same bytes again and again, Onward a real producer id and the next sequence. So of small
requests many are made ahead, each with its own checksum; in a large one, two numbers and the
checksum are written when it is sent.
"""

from collections.abc import Iterator
from itertools import chain
from struct import Struct
from typing import Final, Protocol

from crc32c import crc32c

from onward.errors import OnwardError
from onward.message.batch import encode_batch
from onward.protocol.frames import PREFACE, Kind, frame
from onward.protocol.payloads import Durability, Hello, encode_json, publish_head

Buffer = bytes | bytearray

_PUBLISHED_BYTES: Final = 29
_FRAME_REQUEST_ID: Final = Struct("<I")
_CRC: Final = Struct("<I")
_SEQUENCE: Final = Struct("<Q")
_CRC_AT: Final = 8
_SEQUENCE_AT: Final = 32


class Refused(OnwardError):
    """A server under load answered with an error."""


class Speaker(Protocol):
    """One connection's protocol."""

    def greeting(self) -> bytes:
        """Return what is sent first; nothing is sent again before `is_greeted`."""

    def is_greeted(self, received: bytes) -> bool:
        """Tell whether the answer to the greeting is complete."""

    def request(self) -> Buffer:
        """Return the next request; its bytes stay as they are until it is answered."""

    def answers(self, received: bytes) -> int:
        """Return how many requests are completely answered by what came now."""


class OnwardSpeaker:
    """Publishes the same bodies again and again, each time with the next sequence."""

    def __init__(
        self, topic: str, bodies: list[bytes], *, producer_id: int, in_flight: int = 1,
        ahead: int = 0,
    ) -> None:  # fmt: skip
        batch = self.batch(bodies, producer_id)
        head = publish_head(1, topic, durability=Durability.DISK, batch_bytes=len(batch))
        self._start = len(head)
        self._frames = [bytearray(head + batch) for _ in range(in_flight)]
        self._views = [memoryview(one)[self._start + 12 :] for one in self._frames]
        self._in_flight = in_flight
        self._sequence = 0
        self._rest = b""
        if ahead:
            made: list[Buffer] = [bytes(self.request()) for _ in range(ahead)]
            # When those are used up, the next ones are written as they are sent.
            all_of_them: Iterator[Buffer] = chain(made, iter(self.request, None))
            self.request = all_of_them.__next__  # type: ignore[method-assign]

    def batch(self, bodies: list[bytes], producer_id: int) -> bytes:
        """Return the batch that is sent again and again."""
        return encode_batch(bodies, producer_id=producer_id)

    def prepare(self, prepared: bytearray) -> None:
        """Write into a frame what is new each time; the checksum is written after it."""

    def greeting(self) -> bytes:
        """Return the preface and a HELLO."""
        return PREFACE + frame(Kind.HELLO, 0, encode_json(Hello(version=1, client="bench")))

    def is_greeted(self, received: bytes) -> bool:
        """Wait for a whole WELCOME."""
        if len(received) < 12 or len(received) < 4 + _FRAME_REQUEST_ID.unpack_from(received)[0]:
            return False
        if received[4] != Kind.WELCOME:
            raise _refused(received)
        return True

    def request(self) -> Buffer:
        """Return the prepared frame with the next sequence in it."""
        self._sequence = sequence = self._sequence + 1
        # Answers come in order: the frame before `in_flight` requests is no longer being sent.
        slot = sequence % self._in_flight
        prepared = self._frames[slot]
        _SEQUENCE.pack_into(prepared, self._start + _SEQUENCE_AT, sequence)
        self.prepare(prepared)
        _CRC.pack_into(prepared, self._start + _CRC_AT, crc32c(self._views[slot]))
        return prepared

    def answers(self, received: bytes) -> int:
        """Count PUBLISHED frames: all have one size."""
        size = len(received)
        if size == _PUBLISHED_BYTES and received[4] == 74 and not self._rest:
            return 1
        if self._rest:
            received = self._rest + received
            size = len(received)
            self._rest = b""
        if size > 4 and received[4] != 74:
            raise _refused(received)
        count, rest = divmod(size, _PUBLISHED_BYTES)
        self._rest = received[size - rest :]
        return count


class TopicsSpeaker(OnwardSpeaker):
    """Publishes each time to another topic; their names have the same length."""

    def __init__(self, topics: Iterator[str], bodies: list[bytes], *, producer_id: int) -> None:
        first = next(topics)
        super().__init__(first, bodies, producer_id=producer_id)
        self._topics = topics
        self._name_at = self._start - len(first)

    def request(self) -> Buffer:
        """Return the prepared frame with the next sequence and the next topic in it."""
        prepared = super().request()
        assert isinstance(prepared, bytearray)
        prepared[self._name_at : self._start] = next(self._topics).encode()
        return prepared


class RedisSpeaker:
    """Adds the same bodies to a stream again and again, as one pipeline per request."""

    def __init__(self, stream: str, bodies: list[bytes]) -> None:
        self._request = b"".join(
            _redis_command(b"XADD", stream.encode(), b"*", b"b", body) for body in bodies
        )
        # An answer is a length and an id, each with a line end.
        self._lines_each = 2 * len(bodies)
        self._lines = 0

    def greeting(self) -> bytes:
        """Return a PING: the server is ready when it answers."""
        return _redis_command(b"PING")

    def is_greeted(self, received: bytes) -> bool:
        """Wait for the PONG."""
        return received == b"+PONG\r\n"

    def request(self) -> Buffer:
        """Return the pipeline."""
        return self._request

    def answers(self, received: bytes) -> int:
        """Count lines."""
        # An error is a line that begins with "-"; within an id it stands in every second line.
        if b"\n-" in received or (received[0] == 45 and not self._lines % 2):
            raise _refused(received)
        self._lines += received.count(b"\n")
        count, self._lines = divmod(self._lines, self._lines_each)
        return count


def _redis_command(*words: bytes) -> bytes:
    parts = [b"$%d\r\n%s\r\n" % (len(word), word) for word in words]
    return b"*%d\r\n" % len(words) + b"".join(parts)


def _refused(received: bytes) -> Refused:
    return Refused(f"the server answered {received[:200]!r}")
