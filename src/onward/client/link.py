"""One connection to a broker: frames out, answers matched to their requests.

    connecting ──▶ open ──▶ lost: whoever still waits for an answer is told so, once

A link never comes back; `keeper` makes a new one. It knows nothing of batches or offsets: a
request is a request id and somebody to call with the answer.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from typing import cast

from onward.client.home import Home
from onward.client.progress import Progress
from onward.errors import NotConnected, OnwardError, ProtocolError, from_wire
from onward.protocol.connection import ClientConnection, State
from onward.protocol.frames import PROTOCOL_VERSION, Kind, frame
from onward.protocol.payloads import Hello, Lineage, Welcome, decode_error
from onward.protocol.receiver import SHARED_BYTES

OnFrame = Callable[[int, bytes | bytearray], None]
"""Called with (kind, payload) for each frame that carries the request's id."""

SILENT_HEARTBEATS_MAX = 3


class _Shared(threading.local):
    """What all links of one thread receive into, one after another: none keeps anything in it."""

    def __init__(self) -> None:
        self.buffer = bytearray(SHARED_BYTES)


_shared = _Shared()


class Link(asyncio.BufferedProtocol):
    """One connection."""

    def __init__(
        self, *, name: str, token: str | None, place: str = "there", lineage: Lineage | None = None
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._home = Home()
        self._connection = ClientConnection(place=place)
        self._hello = Hello(
            PROTOCOL_VERSION, client=name, host=socket.gethostname(), pid=os.getpid(), token=token,
            lineage=lineage,
        )  # fmt: skip
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[int, OnFrame] = {}
        self._next_id = 1
        self._heard_at = 0.0
        self._beat: asyncio.TimerHandle | None = None
        self._error: OnwardError | None = None
        self.ready: asyncio.Future[Welcome] = self.loop.create_future()
        self.lost: asyncio.Future[OnwardError] = self.loop.create_future()
        self.was_answered = False
        """Whether the other side has sent anything."""
        self.writable = asyncio.Event()
        self.writable.set()
        self.member_count = 0
        """How many members of groups share this connection."""
        self._unsent: list[bytes] = []
        """Frames that leave with the next write, or in the next iteration of the loop."""
        self._due: list[Callable[[], None]] = []
        self._is_flush_due = False
        self.progress = Progress(self)

    @property
    def is_open(self) -> bool:
        """Tell whether requests can be sent."""
        return self._connection.state is State.OPEN and self._transport is not None

    @property
    def welcome(self) -> Welcome:
        """Return the broker's limits."""
        assert self._connection.welcome is not None, "before WELCOME"
        return self._connection.welcome

    def check_here(self) -> None:
        """Raise when the caller is in another event loop or process than the connection."""
        self._home.check()

    # --- asking ------------------------------------------------------------------------------

    def expect(self, on_frame: OnFrame) -> int:
        """Return a new request id; its answers go to `on_frame` until `forget`."""
        request_id = self._next_id
        self._next_id = request_id % 0xFFFF_FFFF + 1
        self._waiting[request_id] = on_frame
        return request_id

    def forget(self, request_id: int) -> None:
        """Expect nothing more for this id."""
        self._waiting.pop(request_id, None)

    def write(self, *parts: bytes) -> None:
        """Send bytes that are frames already."""
        self._home.check()
        if self._transport is None:
            raise NotConnected("the connection is lost")
        if self._unsent or self.progress.has_rows:
            self.progress.close()
            parts, self._unsent = (*self._unsent, *parts), []
        self._transport.writelines(parts)

    def write_soon(self, frame: bytes) -> None:
        """Send a frame together with those of other members that share this connection.

        Each write is a system call. With one member it happens at once, as there is nothing to
        share it with; else in the next iteration of the loop, before tasks that wait for it with
        `asyncio.sleep(0)` go on.
        """
        if self.member_count <= 1 or self._transport is None:
            self.write(frame)
            return
        self._home.check()
        self._unsent.append(frame)
        self.flush_soon()

    def flush_soon(self) -> None:
        """Write what waits in the next iteration of the loop."""
        if not self._is_flush_due:
            self._is_flush_due = True
            self.loop.call_soon(self._flush)

    def before_flush(self, callback: Callable[[], None]) -> None:
        """Call `callback` in the next iteration of the loop, right before what waits is written."""
        self._due.append(callback)
        self.flush_soon()

    def _flush(self) -> None:
        self._is_flush_due = False
        due, self._due = self._due, []
        for callback in due:
            callback()
        if self.has_collected and self._transport is not None:
            self.write()

    @property
    def has_collected(self) -> bool:
        """Return True if frames or rows wait for the next iteration of the loop."""
        return bool(self._unsent) or self.progress.has_rows

    def collect(self, frame: bytes) -> None:
        """Let a frame leave with the next write."""
        self._unsent.append(frame)

    @property
    def has_unsent(self) -> bool:
        """Return True if bytes wait in this process: for the next iteration, or for the socket."""
        if self._transport is None:
            return False
        return self.has_collected or self._transport.get_write_buffer_size() > 0

    def send(self, kind: int, request_id: int, payload: bytes = b"") -> None:
        """Send one frame."""
        self.write(frame(kind, request_id, payload))

    async def close(self) -> None:
        """Say goodbye and close."""
        if self._transport is not None:
            if self.is_open:
                self.write(self._connection.bye())
            self._transport.close()
            await asyncio.wait([self.lost], timeout=1)

    def abort(self, error: OnwardError) -> None:
        """Close now, for this reason."""
        self._error = self._error or error
        if self._transport is not None:
            self._transport.abort()

    # --- what the event loop calls -----------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Introduce ourselves."""
        self._transport = cast(asyncio.Transport, transport)
        self._heard_at = self.loop.time()
        self._transport.write(self._connection.hello(self._hello))

    def get_buffer(self, sizehint: int) -> memoryview:
        """Say where to receive."""
        return self._connection.buffer(_shared.buffer)

    def buffer_updated(self, nbytes: int) -> None:
        """Take what was received."""
        self._heard_at = self.loop.time()
        self.was_answered = True
        try:
            frames = self._connection.received(nbytes)
        except ProtocolError as error:
            self.abort(error)
            return
        waiting = self._waiting
        for kind, request_id, payload in frames:
            on_frame = waiting.get(request_id)
            if on_frame is not None:
                on_frame(kind, payload)
            elif kind == Kind.WELCOME:
                self._welcomed()
            elif request_id == 0:
                self._told(kind, payload)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell everyone who waits."""
        self._transport = None
        self._connection.close()
        if self._beat is not None:
            self._beat.cancel()
        error = self._error or NotConnected(f"the connection was lost: {exc or 'closed'}")
        self.writable.set()
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # whoever waited for it may have given up
        if not self.lost.done():
            self.lost.set_result(error)
        self._waiting.clear()

    def pause_writing(self) -> None:
        """The broker does not read for now."""
        self.writable.clear()

    def resume_writing(self) -> None:
        """The broker reads again."""
        self.writable.set()

    # --- inside ------------------------------------------------------------------------------

    def _welcomed(self) -> None:
        if not self.ready.done():
            self.ready.set_result(self.welcome)
        self._schedule_beat()

    def _told(self, kind: int, payload: bytes | bytearray) -> None:
        """The broker speaks of the connection as a whole: it will close it."""
        if kind == Kind.ERROR:
            self._error = decode_error(payload)
        elif kind == Kind.GOODBYE and self._connection.goodbye is not None:
            goodbye = self._connection.goodbye
            self._error = from_wire({"code": goodbye.code, "message": goodbye.message})

    def _schedule_beat(self) -> None:
        self._beat = self.loop.call_later(self.welcome.heartbeat_ms / 1000, self._on_beat)

    def _on_beat(self) -> None:
        """Ask for a sign of life; a broker that was silent for too long is given up."""
        silent_s = self.loop.time() - self._heard_at
        if silent_s * 1000 > SILENT_HEARTBEATS_MAX * self.welcome.heartbeat_ms:
            self.abort(NotConnected(f"nothing was heard from the broker for {silent_s:.0f} s"))
        elif self._transport is not None:
            if self.is_open:
                self._transport.write(frame(Kind.PING, 0))
            self._schedule_beat()
