"""A client of few words for tests of the broker: it speaks frames, and nothing by itself.

`HeldCommit` is a commit whose time a test decides, `SlowDisk` are such threads: what arrives
meanwhile can be seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import msgspec

from onward.broker.broker import Broker
from onward.broker.commit import Commit, Done
from onward.client.pipe import PipeTransport, connect_pipe
from onward.log.disk import Disk
from onward.log.log import Log, Write
from onward.log.memory_disk import MemoryDisk
from onward.message.batch import batches_of, decode_batch, encode_batch
from onward.message.entry import entry_heads
from onward.protocol.connection import ClientConnection
from onward.protocol.frames import Kind, frame
from onward.protocol.payloads import (
    Durability,
    Hello,
    Published,
    Read,
    Start,
    credit_frame,
    decode_end,
    decode_error,
    decode_published,
    encode_json,
    publish_head,
)
from onward.settings import GroupSettings, LogSettings, ServerSettings, Settings, TopicSettings
from onward.testing.clock import ManualClock

LOG: dict[str, Any] = {
    "folder": "log", "segment_bytes_max": 65_536, "preallocate_bytes": 0, "disk_reserve_bytes": 0,
}  # fmt: skip


def settings_with(
    *, log: dict[str, Any] | None = None, server: dict[str, Any] | None = None,
    topics: dict[str, Any] | None = None, **others: Any,
) -> Settings:  # fmt: skip
    return Settings(
        log=LogSettings(**(LOG | (log or {}))), server=ServerSettings(**(server or {})),
        topics=TopicSettings(**(topics or {})), **{"groups": GroupSettings(reclaim_ms=0), **others},
    )  # fmt: skip


async def open_broker(
    disk: Disk | None = None, *, settings: Settings | None = None, clock: ManualClock | None = None,
    **others: Any,
) -> Broker:  # fmt: skip
    return await Broker.open(
        settings or settings_with(), disk=disk or MemoryDisk(), clock=clock or ManualClock(),
        **others,
    )  # fmt: skip


async def turns(count: int = 30) -> None:
    """Let everything happen that is ready to happen."""
    for _ in range(count):
        await asyncio.sleep(0)


class HeldCommit(Commit):
    """A `Commit` that writes when it is told to."""

    def __init__(self, log: Log) -> None:
        super().__init__(log)
        self.held: list[tuple[Write, bool, Done]] = []

    def append(self, write: Write, *, sync: bool, done: Done) -> None:
        self.held.append((write, sync, done))

    def release(self) -> None:
        """Perform the commit that is under way."""
        write, sync, done = self.held.pop(0)
        try:
            self._log.perform(write, sync=sync)
        except Exception as error:  # noqa: BLE001
            done(error)
        else:
            done(None)

    def close(self) -> None:
        while self.held:
            self.release()


class SlowDisk(Executor):
    """Threads that work when they are told to, while they are held; all else is done at once."""

    def __init__(self, *, holds: Callable[[object], bool] = lambda work: True) -> None:
        self.is_held = False
        self._holds = holds
        self._held: list[Callable[[], None]] = []

    @property
    def waiting(self) -> int:
        return len(self._held)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **options))
                except BaseException as error:  # noqa: BLE001
                    future.set_exception(error)

        if self.is_held and self._holds(fn):
            self._held.append(run)
        else:
            run()
        return future

    def release(self) -> None:
        self.is_held = False
        while self._held:
            self._held.pop(0)()


class Speaker(asyncio.BufferedProtocol):
    """One connection to a broker."""

    def __init__(self, token: str | None = None) -> None:
        self.connection = ClientConnection()
        self.frames: list[tuple[int, int, bytes | bytearray]] = []
        self.is_lost = False
        self.transport: PipeTransport
        self._hello = Hello(1, client="test", token=token)
        self._buffer = bytearray(65_536)
        self._next_id = 0

    @classmethod
    async def to(cls, broker: Broker, *, token: str | None = None, greet: bool = True) -> Speaker:
        speaker = cls(token)
        speaker.transport, _ = connect_pipe(speaker, broker.session(), asyncio.get_running_loop())
        if greet:
            speaker.transport.write(speaker.connection.hello(speaker._hello))
        await turns()
        return speaker

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.connection.buffer(self._buffer)

    def buffer_updated(self, nbytes: int) -> None:
        self.frames += self.connection.received(nbytes)

    def new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    # --- saying ------------------------------------------------------------------------------

    def say_publish(
        self, topic: str, bodies: Sequence[bytes] = (b"body",), *, producer_id: int = 0,
        sequence: int = 0, durability: int = Durability.DEFAULT, **columns: Any,
    ) -> int:  # fmt: skip
        batch = encode_batch(bodies, producer_id=producer_id, sequence=sequence, **columns)
        request_id = self.new_id()
        head = publish_head(request_id, topic, durability=durability, batch_bytes=len(batch))
        self.transport.write(head + batch)
        return request_id

    def say_read(
        self, topic: str, start: Any = "earliest", *, credit: int = 1 << 20, follow: bool = False,
        end: int | None = None,
    ) -> int:  # fmt: skip
        request_id = self.new_id()
        if not isinstance(start, str | Start):
            start = Start(offset=start)
        read = Read(topic, start, credit, follow, msgspec.UNSET if end is None else end)
        self.transport.write(frame(Kind.READ, request_id, encode_json(read)))
        return request_id

    def say_credit(self, request_id: int, credit: int) -> None:
        self.transport.write(credit_frame(request_id, credit))

    def say(self, kind: int, request_id: int = 0, payload: bytes = b"") -> None:
        self.transport.write(frame(kind, request_id, payload))

    # --- hearing -----------------------------------------------------------------------------

    def of(self, request_id: int) -> list[tuple[int, bytes | bytearray]]:
        return [(kind, payload) for kind, id_, payload in self.frames if id_ == request_id]

    def answer(self, request_id: int) -> Published | str:
        """Return the receipt, or the code of the error."""
        ((kind, payload),) = self.of(request_id)
        if kind == Kind.ERROR:
            return decode_error(payload).code
        assert kind == Kind.PUBLISHED
        return decode_published(payload)

    async def publish(self, topic: str, *args: Any, **options: Any) -> Published | str:
        request_id = self.say_publish(topic, *args, **options)
        await turns()
        return self.answer(request_id)

    async def request(self, op: str, **fields: Any) -> dict[str, Any] | str:
        """Return the reply, or the code of the error."""
        request_id = self.new_id()
        self.say(Kind.REQUEST, request_id, msgspec.json.encode({"op": op, **fields}))
        await turns()
        ((kind, payload),) = self.of(request_id)
        if kind == Kind.ERROR:
            return decode_error(payload).code
        reply: dict[str, Any] = msgspec.json.decode(payload)
        return reply

    def bodies(self, request_id: int) -> list[bytes]:
        """Return all bodies that a READ has sent so far."""
        found: list[bytes] = []
        for kind, payload in self.of(request_id):
            if kind == Kind.ENTRIES:
                for entry in entry_heads(payload):
                    start = entry.body_position
                    for at, _ in batches_of(payload, start, start + entry.body_bytes):
                        found += decode_batch(payload, at, raw_bytes_max=1 << 20).bodies
        return found

    def end(self, request_id: int) -> str | None:
        """Return the code with which a READ ended, if it has."""
        for kind, payload in self.of(request_id):
            if kind == Kind.END:
                return decode_end(payload).code
            if kind == Kind.ERROR:
                return decode_error(payload).code
        return None

    async def read(self, topic: str, start: Any = "earliest") -> list[bytes]:
        request_id = self.say_read(topic, start)
        await turns(100)
        assert self.end(request_id) == "end"
        return self.bodies(request_id)
