"""Reading a topic: a stream of entries with credit, decoded here and nowhere before.

    opened ──▶ receiving ──▶ ended: the end (without `follow`), the topic ended, or closed
                  └── connection lost: opened again at the next offset of the same topic

A replica that is promoted may lack the last messages of its source. A reader that has read such
messages goes on with the first one of the new history, and says so in the log.

The broker sends only as much as there is credit for, so a slow program costs memory nowhere.
Batches are decoded when they are asked for; `batches()` gives columns, iterating gives messages.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Literal

from msgspec import UNSET, UnsetType

from onward.client.keeper import Keeper
from onward.client.link import Link
from onward.errors import (
    Corruption,
    NotConnected,
    OnwardError,
    Overloaded,
    ProtocolError,
    Stopping,
    from_wire,
)
from onward.message.batch import Batch, batches_of, decode_batch, messages_of
from onward.message.entry import entry_heads
from onward.message.message import Message
from onward.protocol.frames import Kind
from onward.protocol.operations import decode_reply, encode_request
from onward.protocol.operations.topics import DescribeTopic
from onward.protocol.payloads import (
    Lineage,
    Read,
    Start,
    credit_frame,
    decode_end,
    decode_error,
    encode_json,
)

logger = logging.getLogger("onward.client")

CREDIT_BYTES = 4 << 20
RAW_BYTES_MAX = 64 << 20

ReadStart = Literal["earliest", "latest"] | Start


class ReadBatch:
    """Messages that were published together, as columns.

    `bodies` and the other columns begin at `first_offset`.
    """

    __slots__ = ("_batch", "_skip", "count", "event_id", "first_offset", "published_at_ms", "topic")

    def __init__(
        self, batch: Batch, *, topic: str, first_offset: int, event_id: int, published_at_ms: int,
        skip: int,
    ) -> None:  # fmt: skip
        self._batch = batch
        self._skip = skip
        self.topic = topic
        self.first_offset = first_offset + skip
        self.count = batch.count - skip
        self.event_id = event_id
        self.published_at_ms = published_at_ms

    @property
    def bodies(self) -> list[bytes]:
        """Return all bodies."""
        try:
            bodies = self._batch.bodies
        except (ProtocolError, Corruption) as error:
            raise self._unreadable(error) from error
        return bodies[self._skip :] if self._skip else bodies

    @property
    def columns(self) -> Batch:
        """Return the whole batch as it was published; it may begin before `first_offset`."""
        return self._batch

    def messages(self) -> list[Message]:
        """Return each message as an object."""
        try:
            messages = messages_of(
                self._batch,
                topic=self.topic,
                base_offset=self.first_offset - self._skip,
                published_at_ms=self.published_at_ms,
                event_id=self.event_id,
            )
        except (ProtocolError, Corruption) as error:
            raise self._unreadable(error) from error
        return messages[self._skip :] if self._skip else messages

    def _unreadable(self, error: OnwardError) -> OnwardError:
        return _unreadable(
            error, topic=self.topic, offset=self.first_offset - self._skip,
            event_id=self.event_id, after=self.first_offset + self.count,
        )  # fmt: skip


def _unreadable(
    error: OnwardError, *, topic: str, offset: int, event_id: int, after: int
) -> OnwardError:
    """Return an error that says which batch is wrong, and where a new reader goes on."""
    return type(error)(
        f"the batch at offset {offset} of topic {topic!r} (event id {event_id}) cannot be read: "
        f"{error}; read on with start={after}"
    )


class Reader:
    """A topic being read. Use it with `async for`, or its `batches()`, once."""

    def __init__(
        self, keeper: Keeper, topic: str, *, start: ReadStart, follow: bool, timeout_s: float,
        credit_bytes: int = CREDIT_BYTES, end: int | None = None, kept: bool = False,
    ) -> None:  # fmt: skip
        self._keeper = keeper
        self._kept: bool | UnsetType = kept or UNSET
        self._topic = topic
        self._start = start
        self._follow = follow
        self._timeout_s = timeout_s
        self._credit_bytes = credit_bytes
        self._end_offset = end
        self._link: Link | None = None
        self._request_id = 0
        self._was_open = False
        self._pause_s = 0.0
        self._received: deque[bytes | bytearray] = deque()
        self._arrived = asyncio.Event()
        self._end: OnwardError | Literal["end"] | None = None
        self._next_offset: int | None = None
        self._last_event_id = 0
        self._epoch = 0
        """Of the history that was read from."""
        self._number: int | UnsetType = UNSET
        """Which topic it is, once something of it is known: a new one may get its name."""
        self._first_wanted = start.offset or 0 if isinstance(start, Start) else 0

    def __aiter__(self) -> AsyncIterator[Message]:
        """Give each message."""
        return self._messages()

    async def _messages(self) -> AsyncGenerator[Message]:
        batches = self.batches()
        try:
            async for batch in batches:
                for message in self.wanted(batch):
                    yield message
        finally:
            await batches.aclose()

    def wanted(self, batch: ReadBatch) -> list[Message]:
        """Return the messages of a batch, without those behind the end of the read."""
        messages = batch.messages()
        if self._end_offset is None:
            return messages
        return messages[: max(0, self._end_offset - batch.first_offset)]

    async def batches(self) -> AsyncGenerator[ReadBatch]:
        """Give each batch as it was published; the last may reach over the end of the read."""
        self._keeper.check_here()
        try:
            while (entries := await self._next_entries()) is not None:
                for batch in self._decode(entries):
                    yield batch
        finally:
            self._cancel()

    # --- receiving ---------------------------------------------------------------------------

    async def _next_entries(self) -> bytes | bytearray | None:
        """Return the next entries; None at the end. Gives the credit of what was taken back."""
        while not self._received:
            if self._end == "end":
                return None
            if self._end is not None:
                raise self._end
            if self._link is None or not self._link.is_open:
                await self._open()
            self._arrived.clear()
            await self._wait()
        entries = self._received.popleft()
        if self._link is not None and self._link.is_open and self._end is None:
            self._link.write(credit_frame(self._request_id, len(entries)))
        return entries

    async def _wait(self) -> None:
        """Wait for something to arrive, or for the link to be lost."""
        link = self._link
        if self._received or self._end is not None or link is None or link.lost.done():
            return
        link.lost.add_done_callback(self._wake)
        try:
            if not await self._arrives():
                await self._hear_from(link)
        finally:
            link.lost.remove_done_callback(self._wake)

    async def _arrives(self) -> bool:
        """Wait until something has arrived; False when half of the time to wait is over."""
        # Who follows waits for what is not published yet; all else the broker has already.
        try:
            async with asyncio.timeout(None if self._follow else self._timeout_s / 2) as limit:
                await self._arrived.wait()
        except TimeoutError:
            if not limit.expired():
                raise
        # It may have arrived while the loop was blocked, beside the end of the time.
        return self._arrived.is_set()

    async def _hear_from(self, link: Link) -> None:
        """Ask for a sign of life: a broker that only lets us stand in line is waited for."""
        request_id = link.expect(lambda kind, payload: self._arrived.set())
        try:
            link.send(Kind.PING, request_id)
            if not await self._arrives():
                raise NotConnected(f"no answer in time for a read of topic {self._topic!r}")
        finally:
            link.forget(request_id)

    def _wake(self, _: object) -> None:
        self._arrived.set()

    async def _open(self) -> None:
        pause_s, self._pause_s = self._pause_s, 0.0
        await asyncio.sleep(pause_s)
        # Who follows waits for ever: only the first time the broker has to be there.
        is_patient = self._follow and self._was_open
        link = await self._keeper.connected(timeout_s=None if is_patient else self._timeout_s)
        self._link = link
        self._check_history(link.welcome.lineage)
        if self._start == "latest" and self._next_offset is None:
            self._note_latest(link)
        start = self._start if self._next_offset is None else Start(offset=self._next_offset)
        end = UNSET if self._end_offset is None else self._end_offset
        read = Read(
            self._topic, start, self._credit_bytes, self._follow, end, self._number, self._kept
        )
        self._request_id = link.expect(self._take)
        link.send(Kind.READ, self._request_id, encode_json(read))
        self._was_open = True

    def _check_history(self, lineage: Lineage) -> None:
        """Go back to where a new history begins, if more of the old one was read."""
        if self._last_event_id > lineage.since and lineage.epoch > self._epoch:
            logger.warning(
                "topic %r: messages were read up to offset %s that are lost with the node that was "
                "replaced; reading goes on behind event %d, where history %s begins",
                self._topic, self._next_offset, lineage.since, lineage,
            )  # fmt: skip
            self._start, self._next_offset = Start(event_id=lineage.since), None
            self._first_wanted = self._last_event_id = 0
        self._epoch = lineage.epoch

    def _note_latest(self, link: Link) -> None:
        """Ask where the topic ends, just before reading from there.

        Should the link be lost before anything arrives, the next one goes on from that place:
        "latest" would be a later one by then.
        """
        request = DescribeTopic(topic=self._topic)

        def take(kind: int, payload: bytes | bytearray) -> None:
            link.forget(request_id)
            if kind == Kind.REPLY and self._next_offset is None:
                topic = decode_reply(payload, request)
                self._next_offset, self._number = topic.next_offset, topic.number

        request_id = link.expect(take)
        link.send(Kind.REQUEST, request_id, encode_request(request))

    def _take(self, kind: int, payload: bytes | bytearray) -> None:
        if kind == Kind.ENTRIES:
            self._received.append(payload)
            self._note_offset(payload)
        elif kind == Kind.END:
            end = decode_end(payload)
            self._finish(from_wire({"code": end.code, "message": end.message}), end.code)
        else:
            error = decode_error(payload)
            self._finish(error, error.code)
        self._arrived.set()

    def _note_offset(self, entries: bytes | bytearray) -> None:
        """Remember where a new link would go on: after what has arrived."""
        for entry in entry_heads(entries):
            self._next_offset, self._number = entry.base_offset + entry.count, entry.topic
            self._last_event_id = entry.index

    def _finish(self, error: OnwardError, code: str) -> None:
        if self._link is not None:
            self._link.forget(self._request_id)
        if code in ("end", "cancelled"):
            self._end = "end"
        elif isinstance(error, Stopping | Overloaded):
            self._link = None
            self._pause_s = max(getattr(error, "retry_after_ms", 0), 20) / 1000
        else:
            self._end = error

    def _cancel(self) -> None:
        if self._link is not None and self._link.is_open and self._end is None:
            self._link.send(Kind.CANCEL, self._request_id)
            self._link.forget(self._request_id)
        self._end = self._end or "end"

    # --- decoding ----------------------------------------------------------------------------

    def _decode(self, entries: bytes | bytearray) -> Iterator[ReadBatch]:
        """Give the batches one by one: one that is wrong keeps back none of those before it."""
        for entry in entry_heads(entries):
            offset, after = entry.base_offset, entry.base_offset + entry.count
            start = entry.body_position
            try:
                for at, header in batches_of(entries, start, start + entry.body_bytes):
                    after = offset + header.count
                    if self._end_offset is not None and offset >= self._end_offset:
                        return
                    if after > self._first_wanted:
                        batch = decode_batch(entries, at, raw_bytes_max=RAW_BYTES_MAX)
                        yield ReadBatch(
                            batch, topic=self._topic, first_offset=offset,
                            event_id=entry.index, published_at_ms=entry.time_ms,
                            skip=max(0, self._first_wanted - offset),
                        )  # fmt: skip
                    offset = after
                    after = entry.base_offset + entry.count
            except (ProtocolError, Corruption) as error:
                raise _unreadable(
                    error, topic=self._topic, offset=offset, event_id=entry.index, after=after
                ) from error
            self._first_wanted = max(self._first_wanted, offset)
