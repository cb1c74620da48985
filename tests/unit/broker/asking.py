"""Members and operators of groups for tests of the broker: they speak frames and wait for answers.

Whatever is waited for is a condition, never a time: the limit is only there so that a test that
would wait for ever fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from onward.broker.broker import Broker
from onward.errors import OnwardError
from onward.protocol.deliveries import ack_frame, decode_delivery, decode_settled
from onward.protocol.frames import Kind
from onward.protocol.payloads import decode_end, decode_error

from .speaking import Speaker, turns

DEADLINE_S = 60

Row = tuple[int, int, int]


async def until(condition: Callable[[], object]) -> None:
    """Wait until something holds."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


class Operator:
    """Asks for operations, and gets what is replied."""

    def __init__(self, speaker: Speaker) -> None:
        self.speaker = speaker

    @classmethod
    async def of(cls, broker: Broker) -> Operator:
        return cls(await Speaker.to(broker))

    def say(self, op: str, **fields: Any) -> int:
        request_id = self.speaker.new_id()
        self.speaker.say(Kind.REQUEST, request_id, msgspec.json.encode({"op": op, **fields}))
        return request_id

    async def answer(self, request_id: int) -> Any:
        """Return a reply, or raise the error that came instead."""
        await until(lambda: self.speaker.of(request_id))
        ((kind, payload),) = self.speaker.of(request_id)
        if kind == Kind.ERROR:
            raise decode_error(payload)
        return msgspec.json.decode(payload)

    async def ask(self, op: str, **fields: Any) -> Any:
        return await self.answer(self.say(op, **fields))

    async def code(self, op: str, **fields: Any) -> str:
        """Return the code of the error that an operation gets."""
        try:
            await self.ask(op, **fields)
        except OnwardError as error:
            return error.code
        return ""

    async def publish(self, topic: str, count: int = 10, **options: Any) -> None:
        """Publish `count` messages in one batch, each with its number as body."""
        bodies = [str(number).encode() for number in range(count)]
        request_id = self.speaker.say_publish(topic, bodies, **options)
        await until(lambda: self.speaker.of(request_id))


class Consumer:
    """A member of a group on a connection of its own."""

    def __init__(self, speaker: Speaker, consumer_id: int) -> None:
        self.speaker = speaker
        self.id = consumer_id

    @classmethod
    async def of(
        cls, broker: Broker, group: str, *topics: str, member: str = "ann", credit: int = 1_000,
        **fields: Any,
    ) -> Consumer:  # fmt: skip
        speaker = await Speaker.to(broker)
        consumer = cls(speaker, speaker.new_id())
        asked = {"group": group, "topics": topics or ("orders",), "member": member}
        payload = msgspec.json.encode(asked | {"credit": credit} | fields)
        speaker.say(Kind.CONSUME, consumer.id, payload)
        await until(lambda: speaker.of(consumer.id))
        return consumer

    @property
    def rows(self) -> list[Row]:
        """Return what was delivered so far: delivery, start, end."""
        found: list[Row] = []
        for kind, payload in self.speaker.of(self.id):
            if kind == Kind.DELIVERY:
                delivered = decode_delivery(payload)
                found += [(delivered.delivery, start, end) for start, end, *_ in delivered.grants]
        return found

    @property
    def offsets(self) -> list[int]:
        return [offset for _, start, end in self.rows for offset in range(start, end)]

    @property
    def end(self) -> str:
        """Return the code with which the membership ended, or nothing."""
        codes = [decode_end(p).code for kind, p in self.speaker.of(self.id) if kind == Kind.END]
        return codes[0] if codes else ""

    async def got(self, count: int) -> list[int]:
        """Wait until `count` messages were delivered; return their offsets, in order of arrival."""
        await until(lambda: len(self.offsets) >= count)
        return self.offsets

    async def ack(self, rows: list[Row] | None = None) -> list[Row]:
        """Ack rows, or all that was delivered; return what was refused."""
        request_id = self.speaker.new_id()
        self.speaker.transport.write(ack_frame(request_id, self.id, rows or self.rows))
        return await self._settled(request_id)

    async def ack_offsets(self, *offsets: int) -> list[Row]:
        """Ack single messages."""
        rows = [
            (delivery, one, one + 1)
            for one in offsets
            for delivery, start, end in self.rows
            if start <= one < end
        ]
        return await self.ack(rows)

    async def settle(self, do: str, *offsets: int, **fields: Any) -> list[Row]:
        rows = [
            {"do": do, "delivery": delivery, "ranges": [[one, one + 1]], **fields}
            for one in offsets
            for delivery, start, end in self.rows
            if start <= one < end
        ]
        request_id = self.speaker.new_id()
        payload = msgspec.json.encode({"consumer": self.id, "rows": rows})
        self.speaker.say(Kind.SETTLE, request_id, payload)
        return await self._settled(request_id)

    async def leave(self) -> None:
        self.speaker.say(Kind.CANCEL, self.id)
        await until(lambda: self.end)
        await turns()

    async def _settled(self, request_id: int) -> list[Row]:
        await until(lambda: self.speaker.of(request_id))
        ((kind, payload),) = self.speaker.of(request_id)
        if kind == Kind.ERROR:
            raise decode_error(payload)
        return decode_settled(payload)
