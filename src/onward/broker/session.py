"""One connection of a client: bytes in, frames to the stations, answers out.

    hello ──▶ open ──▶ closing ──▶ closed

Bytes come in through the `intake`, which takes plain publishes of all connections together; all
else comes to `receive`. An idle connection costs a few hundred bytes. What a client may cost is
bounded on both sides: too many unanswered bytes stop the reading; a full send buffer stops the
reading, the taking of what was read already, and the readers of this session. Whatever is wrong
with what a client sends ends that client's connection and nobody else's; what it sent after the
fault is not looked at.
"""

from __future__ import annotations

import asyncio
import hmac
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, cast

from onward.broker.routes import NO_ROUTES
from onward.errors import Conflict, InvalidRequest, OnwardError, ProtocolError, Unauthenticated
from onward.protocol.connection import ServerConnection
from onward.protocol.deliveries import decode_consume, decode_more
from onward.protocol.frames import REVISION, Kind, frame, frame_head
from onward.protocol.operations import operation_of
from onward.protocol.operations.replicas import Fetch, Follow
from onward.protocol.payloads import (
    Hello,
    Welcome,
    decode_credit,
    decode_hello,
    decode_json,
    decode_read,
    encode_error,
)
from onward.protocol.receiver import Frame
from onward.settings import Token

if TYPE_CHECKING:
    from onward.broker.broker import Broker


# A reader that has this much unsent gets nothing more: so it holds one stretch of the log at most.
SEND_BUFFER_BYTES = 64 << 10
UNREAD_BYTES = 256 << 10
PUBLISH = int(Kind.PUBLISH)
FOLLOW = operation_of(Follow)
FETCH = operation_of(Fetch)


class Session(asyncio.Protocol):
    """Who speaks on one connection."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._connection = ServerConnection()
        # Called for everything that is received: straight to where it goes.
        self.data_received = partial(broker.intake.arrived, self)  # type: ignore[method-assign]
        self.routes = NO_ROUTES
        """The routes of its principal while a PUBLISH may take the fast path: the session is open,
        with no partial frame and nothing refused. Else there are none."""
        self._is_open = False
        self._is_closing = False
        self._transport: asyncio.Transport | None = None
        self.write: Callable[[bytes], None] = _into_nothing
        """Sends bytes: what belongs together is better sent with one call."""
        self.unanswered_bytes = 0
        self.is_paused = False
        self.writable = True
        self.has_large_frame = False
        """The intake counts the memory of a large frame that has begun."""
        self.waits_for_room = False
        """Its large frame is not read on until there is room for it."""
        self._rest: Iterator[Frame] | None = None
        """What was received and is not taken, because the answers would find no room."""
        self.held_sequences: dict[int, int] = {}
        """Of each producer the last sequence that was refused for now: later ones wait until one
        came again."""
        self.repeats_waiting = 0
        """How many batches it sent again that wait for the commit of the first."""
        self.hello: Hello | None = None
        self.principal = ""
        self._principal_routes = NO_ROUTES
        self.last_heard_ms = broker.clock.monotonic_ms()
        self.last_frame_ms = self.last_heard_ms
        self.opened_at_ms = self.last_heard_ms

    # --- what the event loop calls -----------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin; a connection above the limit is told so and closed."""
        self._transport = cast(asyncio.Transport, transport)
        self.write = self._transport.write
        self._transport.set_write_buffer_limits(high=SEND_BUFFER_BYTES)
        self._broker.opened(self)

    def eof_received(self) -> bool:
        """Close when the client has closed its side."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget everything that this connection had open."""
        transport, self._transport = self._transport, None
        self.write = _into_nothing
        if isinstance(exc, ConnectionError) and transport is not None:
            self._take_unread(transport)
        self.writable = False
        self._rest = None
        self._broker.intake.note_large(self, 0)
        self._broker.closed(self)

    def _take_unread(self, transport: asyncio.Transport) -> None:
        """Take what the client had sent before it was killed, and the kernel still has.

        A write to a process that is gone fails at once, whatever it sent before. That may be the
        start of the message that killed it.
        """
        connected = transport.get_extra_info("socket")
        if connected is None or self.is_paused or self._rest is not None:
            return
        self._broker.intake.take()
        with suppress(OSError):
            while received := os.read(connected.fileno(), UNREAD_BYTES):
                self.receive(received)

    def pause_writing(self) -> None:
        """The client does not read: send and take nothing more until it does."""
        self.writable = False
        self.keep_reading()

    def resume_writing(self) -> None:
        """The client reads again."""
        self.writable = True
        if self._rest is not None:
            rest, self._rest = self._rest, None
            self._take_all(rest)
        self.keep_reading()
        self._broker.delivering.resume(self)
        self._broker.consuming.resume(self)
        self._broker.followers.resume(self)

    # --- frames ------------------------------------------------------------------------------

    def receive(self, received: bytes) -> None:
        """Take bytes by all the rules; after the end they mean nothing."""
        if self._is_closing:
            return
        self.last_heard_ms = self._broker.now_monotonic_ms
        frames = self._frames(received)
        if self._rest is not None:
            # The reading is paused: little comes after this, and it must wait for its turn.
            self._rest = chain(self._rest, frames)
            return
        self._take_all(frames)

    def _frames(self, received: bytes) -> Iterator[Frame]:
        for frames in self._connection.receiver.feed(received, self._broker.shared_buffer):
            self.last_frame_ms = self._broker.now_monotonic_ms
            if self.has_large_frame:
                # It is complete. The next one stands behind those of others.
                self._broker.intake.note_large(self, 0)
            yield from frames

    def _take_all(self, frames: Iterator[Frame]) -> None:
        """Take frames, as long as the client takes the answers; the rest when it does again."""
        try:
            for kind, request_id, payload in frames:
                if kind == PUBLISH and self._is_open:
                    self._broker.publishing.publish(self, request_id, payload)
                elif not self._is_closing:
                    self._connection.check(kind, payload)
                    self._take(kind, request_id, payload)
                if not self.writable and self._transport is not None:
                    self._rest = frames
                    break
        except ProtocolError as error:
            if not self._is_closing:
                self.end(error)
        own_bytes = self._connection.receiver.own_bytes
        if own_bytes or self.has_large_frame:
            self._broker.intake.note_large(self, own_bytes)
        self.note_plain()

    def note_plain(self) -> None:
        """Decide anew whether the next frame may take the fast path."""
        is_plain = (
            self._is_open
            and not self.held_sequences
            and not self._connection.pending_bytes
            and self._rest is None
        )
        self.routes = self._principal_routes if is_plain else NO_ROUTES

    def _take(self, kind: int, request_id: int, payload: bytes | bytearray) -> None:
        try:
            match kind:
                case Kind.READ:
                    read = decode_read(payload)
                    self._broker.policy.check(self.principal, operation_of(read), read)
                    self._broker.delivering.open(self, request_id, read)
                case Kind.CREDIT:
                    self._credit(request_id, decode_credit(payload))
                case Kind.CANCEL:
                    self._cancel(request_id)
                case Kind.ACK:
                    self._broker.consuming.settling.ack(self, request_id, payload)
                case Kind.SETTLE:
                    self._broker.consuming.settling.settle(self, request_id, payload)
                case Kind.MORE:
                    self._broker.consuming.give(self, request_id, decode_more(payload))
                case Kind.STARTED:
                    self._broker.consuming.start(self, request_id, payload)
                case Kind.PROGRESS:
                    self._broker.consuming.settling.progress(self, request_id, payload)
                case Kind.CONSUME:
                    consume = decode_consume(payload)
                    self._broker.policy.check(self.principal, operation_of(consume), consume)
                    self._broker.consuming.joining.open(self, request_id, consume)
                case Kind.FOLLOW:
                    self._follow(request_id, payload)
                case Kind.FOLLOWED:
                    self._broker.followers.acknowledge(self, request_id, payload)
                case Kind.FETCH:
                    self._fetch(request_id, payload)
                case Kind.REQUEST:
                    self._broker.operations.receive(self, request_id, payload)
                case Kind.PING:
                    self.send(Kind.PONG, request_id)
                case Kind.HELLO:
                    self._greet(decode_hello(payload))
                case Kind.BYE:
                    self.close()
        except (ProtocolError, Unauthenticated) as error:
            self.end(error)
        except OnwardError as error:
            self.refuse(request_id, error)

    def _credit(self, request_id: int, credit_bytes: int) -> None:
        if not self._broker.followers.credit(self, request_id, credit_bytes):
            self._broker.delivering.credit(self, request_id, credit_bytes)

    def _cancel(self, request_id: int) -> None:
        is_ended = self._broker.consuming.cancel(self, request_id) or (
            self._broker.followers.cancel(self, request_id)
        )
        if not is_ended:
            self._broker.delivering.cancel(self, request_id)

    def _follow(self, request_id: int, payload: bytes | bytearray) -> None:
        follow = decode_json(payload, Follow, "FOLLOW", InvalidRequest)
        self._broker.policy.check(self.principal, FOLLOW, follow)
        self._broker.followers.open(self, request_id, follow)

    def _fetch(self, request_id: int, payload: bytes | bytearray) -> None:
        fetch = decode_json(payload, Fetch, "FETCH", InvalidRequest)
        self._broker.policy.check(self.principal, FETCH, fetch)
        self._broker.snapshots.fetch(self, request_id, fetch)

    def _greet(self, hello: Hello) -> None:
        tokens = self._broker.settings.auth.tokens
        if tokens:
            self.principal = _principal(hello.token, tokens)
        self._principal_routes = self._broker.publishing.routes.of(self.principal)
        self.hello = hello
        if self._is_outdated_for(hello):
            return
        self._is_open = True
        settings = self._broker.settings
        welcome = Welcome(
            version=1,
            node=self._broker.node,
            heartbeat_ms=settings.server.heartbeat_ms,
            frame_bytes_max=self._broker.frame_bytes_max,
            batch_bytes_max=settings.topics.batch_bytes_max,
            message_bytes_max=settings.topics.message_bytes_max,
            publishes_max=self._broker.publishes_max,
            revision=REVISION,
            lineage=self._broker.state.lineage,
            is_leader=self._broker.gate.is_leading,
            leader=self._broker.leader,
        )
        self.write(self._connection.welcome(welcome))

    def _is_outdated_for(self, hello: Hello) -> bool:
        """End the session of a client that has seen a newer history: it must not get an old one."""
        ours = self._broker.state.lineage
        if hello.lineage is None or hello.lineage.epoch <= ours.epoch:
            return False
        self._broker.outdated()
        self.end(
            Conflict(
                f"this node has history {ours}, the client has seen {hello.lineage}: another node "
                f"was promoted"
            )
        )
        return True

    # --- answers -----------------------------------------------------------------------------

    def send(self, kind: int, request_id: int, payload: bytes = b"") -> None:
        """Send one frame."""
        self.write(frame(kind, request_id, payload))

    def send_entries(self, request_id: int, entries: bytes | bytearray | memoryview) -> int:
        """Send entries from where they lie, without copying them into a frame.

        Returns how many bytes the socket has not taken yet.
        """
        return self.send_parts([frame_head(Kind.ENTRIES, request_id, len(entries)), entries])

    def send_parts(self, parts: list[bytes | bytearray | memoryview]) -> int:
        """Send the parts of one frame from where they lie.

        Returns how many bytes the socket has not taken yet.
        """
        if self._transport is None:
            return 0
        self._transport.writelines(parts)
        return self._transport.get_write_buffer_size()

    @property
    def unsent_bytes(self) -> int:
        """Return how many bytes the socket has not taken yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def refuse(self, request_id: int, error: OnwardError) -> None:
        """Answer a request with an error."""
        self.send(Kind.ERROR, request_id, encode_error(error))

    def end(self, error: OnwardError) -> None:
        """Say why, and close. After a fault in the stream nothing it carries has a meaning."""
        self._broker.session_events.write(
            "session ended: %s (%s)", error, self.peer, now_ms=self._broker.now_monotonic_ms
        )
        self.write(self._connection.fault(error))
        self.close()

    def goodbye(self, error: OnwardError) -> None:
        """Tell the client that the broker closes this connection, and close it."""
        self.write(self._connection.goodbye(code=error.code, message=str(error)))
        self.close()

    def close(self) -> None:
        """Close after what was sent is out."""
        self._take_no_more()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close now."""
        self._take_no_more()
        if self._transport is not None:
            self._transport.abort()

    def _take_no_more(self) -> None:
        """What the intake has gathered, or the rest of a piece, may still come after this."""
        self._is_closing = True
        self._is_open = False
        self.routes = NO_ROUTES

    @property
    def is_closed(self) -> bool:
        """True once nobody is left to receive an answer."""
        return self._transport is None

    # --- limits ------------------------------------------------------------------------------

    @property
    def peer(self) -> str:
        """Return where the client is, for people."""
        address = self._transport and self._transport.get_extra_info("peername")
        if isinstance(address, tuple):
            return f"{address[0]}:{address[1]}"
        return "local"

    @property
    def client_name(self) -> str:
        """Return what the client calls itself."""
        return (self.hello.client if self.hello is not None else "")[:100] or "member"

    @property
    def has_partial_frame(self) -> bool:
        """Tell whether a frame has begun and is not complete, though it was read on."""
        return self._connection.pending_bytes > 0 and not self.waits_for_room

    def wait_for_room(self, *, waits: bool) -> None:
        """Do not read on in a large frame, or do so again: from now on its time counts."""
        self.waits_for_room = waits
        self.last_heard_ms = self.last_frame_ms = self._broker.now_monotonic_ms
        self.keep_reading()

    def keep_reading(self) -> None:
        """Read on, or stop reading, as the limits say."""
        limit = self._broker.connection_bytes_max >> self.is_paused
        paused = not self.writable or self.unanswered_bytes > limit or self.waits_for_room
        if paused == self.is_paused or self._transport is None:
            return
        self.is_paused = paused
        if paused:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()


def _into_nothing(output: bytes) -> None:
    """Nobody is there any more."""


def _why_unknown(given: bytes, tokens: tuple[Token, ...]) -> str:
    """Return the error for a token; a hint only for those who hold a whole one, name included."""
    for known in tokens:
        if hmac.compare_digest(given, f"{known.name}:{known.secret}".encode()):
            return "the token is not known: send only its secret, the part after the colon"
    return "the token is missing or not known"


def _principal(token: str | None, tokens: tuple[Token, ...]) -> str:
    """Return whose token this is, in a time that says nothing about the tokens."""
    found = ""
    given = (token or "").encode()
    for known in tokens:
        if hmac.compare_digest(given, known.secret.encode()):
            found = known.name
    if not found:
        raise Unauthenticated(_why_unknown(given, tokens))
    return found
