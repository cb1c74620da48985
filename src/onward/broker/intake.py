"""The front door of the write path: single publishes of many connections, taken together.

Hundreds of connections that each send one small message are where a broker spends its time per
message. So what arrives in one turn of the loop is first only gathered, then gone through in one
loop with everything at hand: no objects, one struct for the front of the frame, and no calls but
for the directory of a batch with several columns.

It takes what is plain (one whole PUBLISH frame, not compressed, on a route that is known for its
principal, new) and hands everything else to its session unchanged, in its order: there, and only
there, is the full set of rules, every check of a permission, and every error. What is plain here is
exactly what those rules accept.

Frames so large that they come in many pieces hold memory before they can be taken or refused. All
together they have a limit: above it only the oldest is read on, so each comes to its end in turn.
"""

from __future__ import annotations

import asyncio
from struct import Struct
from typing import TYPE_CHECKING, Final

from crc32c import crc32c

from onward.broker.producers import SEQUENCE_MAX, UNDER_WAY, WINDOW, WINDOW_HEAD
from onward.message.batch import HEADER_BYTES, directory_fits
from onward.message.names import NAME_CHARACTERS_MAX
from onward.protocol.frames import Kind

if TYPE_CHECKING:
    from onward.broker.broker import Broker
    from onward.broker.catalogue import Topic
    from onward.broker.publish import Publish
    from onward.broker.session import Session

SMALL_BYTES_MAX: Final = 8 << 10

# For each length of a topic's name, what is before the bodies of a plain frame, in one struct:
# length and kind with flags and zero, request id; (durability, name bytes, zero, name); magic and
# length, crc, version with flags and columns, count, raw bytes, producer id, sequence, (time), kind
# of the column, its bytes. What is compared with one number stands in one.
_HEADS: Final = [
    Struct(f"<QI4x{name_bytes}xQIIIIQQ8xII").unpack_from
    for name_bytes in range(NAME_CHARACTERS_MAX + 2)  # with the "@" of what pipelines use
]
_NAME_START: Final = 12
_NAME_BYTES: Final = 13
_BATCH_START: Final = 16
_HEAD_BYTES: Final = 56
_FRAME_BYTES_MIN: Final = _BATCH_START + _HEAD_BYTES
_PUBLISH: Final = (int(Kind.PUBLISH) << 32) - 4
"""What stands before the request id of a PUBLISH, less the size of the whole frame."""
_MAGIC: Final = int.from_bytes(b"OBAT", "little")
_UNCOMPRESSED: Final = 1
"""Version 1, no compression; the number of columns stands above these 16 bits."""
_ONE_COLUMN: Final = _UNCOMPRESSED | 1 << 16
_BODIES: Final = 255


class Intake:
    """Gathers what arrives, and takes it once per turn of the loop."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._loop = asyncio.get_running_loop()
        self._arrived: list[tuple[Session, bytes]] = []
        self._large: dict[Session, int] = {}
        """Large frames that are not complete, the oldest first: the memory of each."""
        self._large_bytes = 0
        self._large_bytes_max = broker.settings.server.inflight_bytes_max

    def arrived(self, session: Session, received: bytes) -> None:
        """Take bytes of a connection: the small ones a little later, together with others'."""
        if len(received) > SMALL_BYTES_MAX:
            self.take()
            session.receive(received)
            return
        if not self._arrived:
            self._loop.call_soon(self.take)
        self._arrived.append((session, received))

    def note_large(self, session: Session, own_bytes: int) -> None:
        """Keep count of the memory of a session's large frame; 0: it has none any more."""
        before = self._large.get(session, 0)
        self._large_bytes += own_bytes - before
        session.has_large_frame = own_bytes > 0
        if own_bytes:
            self._large[session] = own_bytes
            is_oldest = next(iter(self._large)) is session
            if self._large_bytes > self._large_bytes_max and not is_oldest:
                session.wait_for_room(waits=True)
        elif before:
            del self._large[session]
            if session.waits_for_room:
                session.wait_for_room(waits=False)
            self._read_on()

    def _read_on(self) -> None:
        """Let the oldest large frames come, as many as have room even when they double."""
        room_bytes = self._large_bytes_max - self._large_bytes
        for number, (session, own_bytes) in enumerate(self._large.items()):
            if session.waits_for_room:
                room_bytes -= own_bytes
                if number and room_bytes < 0:
                    break
                session.wait_for_room(waits=False)

    def take(self) -> None:
        """Go through everything that was gathered."""
        if not self._arrived:
            return
        arrived, self._arrived = self._arrived, []
        publishing = self._broker.publishing
        bytes_max = len(arrived) * SMALL_BYTES_MAX
        if bytes_max > publishing.room_bytes:
            bytes_max = sum([len(received) for _, received in arrived])
        if bytes_max <= publishing.room_bytes:
            self._take_plain(arrived, bytes_max)
        else:
            for session, received in arrived:
                session.receive(received)
        publishing.commit_when_due()

    def _take_plain(self, arrived: list[tuple[Session, bytes]], bytes_max: int) -> None:
        """Take the plain ones; hand the others on. There is room for all, at most `bytes_max`.

        One long function on purpose: with its parts as calls it takes 5.7 us in place of 2.8 us
        per message.
        """
        publishing, now_ms = self._broker.publishing, self._broker.now_monotonic_ms
        windows, limit = self._broker.producers.windows, publishing.message_bytes_max
        connection_limit = publishing.connection_bytes_max
        topic: Topic | None = None
        taken: list[Publish] = []
        taken_bytes, durability = 0, 0
        rest = iter(arrived)
        for session, received in rest:
            size = len(received)
            if size >= _FRAME_BYTES_MIN:
                name_bytes = received[_NAME_BYTES]
                start = _BATCH_START + name_bytes
                route = session.routes.get(received[_NAME_START:start])
                if route is not None and size - start >= _HEAD_BYTES:
                    (
                        frame_front, request_id, batch_front, crc, shape, count, raw_bytes,
                        producer_id, sequence, column, column_bytes,
                    ) = _HEADS[name_bytes](received)  # fmt: skip
                    batch_bytes = size - start
                    window = windows.get(producer_id)
                    # Bodies alone are checked in place: a call would cost them a third more.
                    if (
                        frame_front == size + _PUBLISH
                        and batch_front == batch_bytes << 32 | _MAGIC
                        and (
                            (
                                shape == _ONE_COLUMN
                                and column == _BODIES
                                and raw_bytes == batch_bytes - _HEAD_BYTES
                                and raw_bytes == (column_bytes + 7) & -8
                                and 0 < 4 * count <= column_bytes
                            )
                            or (
                                shape & 0xFFFF == _UNCOMPRESSED
                                and count
                                and raw_bytes == batch_bytes - HEADER_BYTES - 8 * (shape >> 16)
                                and directory_fits(
                                    received, start + HEADER_BYTES, shape >> 16, count, raw_bytes
                                )
                            )
                        )
                        and raw_bytes <= (route[0].message_bytes_max or limit)
                        and window is not None
                        and window[0] < sequence < SEQUENCE_MAX
                        and crc32c(received[start + 12 :]) == crc
                    ):
                        # The next sequence of a known producer is new: what `Producers.begin` does.
                        window[0] = sequence
                        slot = WINDOW_HEAD + sequence % WINDOW * 3
                        window[slot] = sequence + 1
                        window[slot + 1] = UNDER_WAY
                        if route[0] is not topic:
                            if topic is not None:
                                publishing.collect(topic, taken, taken_bytes, durability)
                            topic, taken, taken_bytes, durability = route[0], [], 0, 0
                        asked = route[1]
                        taken.append(
                            (
                                session, request_id, received[start:], count, producer_id,
                                sequence, asked,
                            )
                        )  # fmt: skip
                        taken_bytes += batch_bytes
                        if asked > durability:
                            durability = asked
                        if session.last_frame_ms != now_ms:
                            session.last_frame_ms = session.last_heard_ms = now_ms
                        session.unanswered_bytes += batch_bytes
                        if session.unanswered_bytes > connection_limit:
                            session.keep_reading()
                        continue
            if topic is not None:
                # What comes now may concern what was taken: it must be known first.
                publishing.collect(topic, taken, taken_bytes, durability)
                topic, taken, taken_bytes, durability = None, [], 0, 0
            session.receive(received)
            if publishing.room_bytes < bytes_max:
                # It completed something large: now each must be asked whether it has room.
                for session, received in rest:
                    session.receive(received)
        if topic is not None:
            publishing.collect(topic, taken, taken_bytes, durability)
