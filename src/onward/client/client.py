"""All that a program can ask of a broker.

    connect("localhost:7700") ── Client ─┬─ publish, publish_soon, publish_many   (producer)
                                         ├─ read, get                             (reader)
                                         ├─ groups, dead letters, find, explain   (group_calls)
                                         ├─ cancel, reschedule, calendar, ...     (schedule_calls)
                                         ├─ topic_ends, publish_encoded, ...      (pipeline_calls)
                                         └─ topics, create_topic, ... status      (requests)

Every call has a deadline. An error says who must act: see `onward.errors`. What only asks is asked
again by itself when the connection is lost; what changes something is not, except publishes, which
are safe to repeat.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from random import Random
from types import TracebackType
from typing import Any, Literal, Self, Unpack, cast, overload

import msgspec

from onward.client import scheduled as when_of
from onward.client.address import Address, parse_addresses
from onward.client.bodies import encode_bodies, encode_body
from onward.client.consume_calls import ConsumeCalls
from onward.client.group_calls import GROUP_ASKS, GroupCalls
from onward.client.keeper import Dial, Keeper
from onward.client.link import Link
from onward.client.message_parts import Tags, check_column, joined_tags, optional_parts
from onward.client.pipeline_calls import PIPELINE_ASKS, PipelineCalls
from onward.client.producer import Producer
from onward.client.reader import Reader, ReadStart
from onward.client.receipt import BatchReceipt, Receipt
from onward.client.schedule_calls import SCHEDULE_ASKS, ScheduleCalls
from onward.client.schedule_times import NOW, At, Delay, Delays, Times, When
from onward.client.scheduled import SCHEDULE_TOPIC, ScheduledBatchReceipt, ScheduledReceipt
from onward.client.topics import (
    Duration,
    TopicDescription,
    check_end,
    duration_ms,
    instant_ms,
    read_start,
)
from onward.clock import Clock, SystemClock
from onward.errors import (
    InvalidRequest,
    MessageTooLarge,
    NotConnected,
    OffsetOutOfRange,
    OutcomeUnknown,
    UnknownTopic,
)
from onward.message.message import Message
from onward.message.names import check_topic_name
from onward.protocol.frames import Kind
from onward.protocol.payloads import Durability, decode_error, decode_reply
from onward.settings import Settings

DurabilityName = Literal["memory", "interval", "disk", "quorum"]

_ASKS_ONLY = (
    frozenset({"topic.list", "topic.describe", "status"})
    | GROUP_ASKS | SCHEDULE_ASKS | PIPELINE_ASKS
)  # fmt: skip
_PAGE = 5_000
_DURABILITIES = {one.name.lower(): int(one) for one in Durability}


def connect(
    address: str = "localhost:7700",
    *,
    token: str | None = None,
    name: str | None = None,
    timeout: Duration = "30s",
    durability: DurabilityName | None = None,
    settings: Settings | None = None,
) -> Client:
    """Return a client to use with `async with`.

    `address` names one or more brokers, a Unix socket, or a broker inside this process: see
    `onward.client.address`. `durability` is what publishes ask for unless they say otherwise;
    without it the broker decides. `settings` is for a broker inside this process.

    >>> async def main() -> str:
    ...     async with connect("memory:") as mq:
    ...         receipt = await mq.publish("orders", {"id": 7}, key="7")
    ...         return receipt.id
    >>> asyncio.run(main())
    'orders/0'
    """
    return Client(
        parse_addresses(address), token=token, name=name or f"python-{os.getpid()}",
        timeout_s=duration_ms(timeout) / 1000, durability=_durability(durability),
        settings=settings,
    )  # fmt: skip


class Client(ConsumeCalls, GroupCalls, ScheduleCalls, PipelineCalls):
    """A connection to Onward that mends itself. Made by `connect`."""

    def __init__(
        self, addresses: list[Address], *, token: str | None, name: str, timeout_s: float,
        durability: int, settings: Settings | None = None, dials: list[Dial] | None = None,
        producer_id: int | None = None, clock: Clock | None = None, jitter: Random | None = None,
    ) -> None:  # fmt: skip
        self._addresses = addresses
        self._token = token
        self._name = name
        self._timeout_s = timeout_s
        self._durability = durability
        self._settings = settings
        self._dials = dials
        self._producer_id = producer_id or secrets.randbits(63) | 1
        self._embedded: Any = None
        self._opened: tuple[Keeper, Producer] | None = None
        self._clock = clock or SystemClock()
        self._jitter = jitter

    async def __aenter__(self) -> Self:
        """Connect, or raise why that is not possible."""
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait for what was published, then close."""
        await self.close(drain=error is None)

    async def open(self) -> None:
        """Connect; `async with` does it by itself."""
        if self._opened is not None:
            raise InvalidRequest("this client is open already")
        keeper = Keeper(
            await self._make_dials(), name=self._name, token=self._token, jitter=self._jitter,
            addresses=[str(address) for address in self._addresses],
        )  # fmt: skip
        producer = Producer(
            producer_id=self._producer_id, timeout_s=self._timeout_s, clock=self._clock
        )
        keeper.listen(producer.use)
        keeper.listen(self._use_in_pipeline)
        try:
            await keeper.open(timeout_s=self._timeout_s)
        except BaseException:
            await self._close_embedded()
            raise
        self._opened = keeper, producer

    async def close(self, *, drain: bool = True) -> None:
        """Close; with `drain` only after what was published has its answer or its deadline."""
        if self._opened is None:
            return
        keeper, producer = self._opened
        await self._consumers.close()
        await self._end_pipeline(drain=drain)
        if drain:
            await producer.drain()
        self._opened = None
        producer.close(NotConnected("the client is closed"))
        await keeper.close()
        await self._close_embedded()

    # --- publish -----------------------------------------------------------------------------

    @overload
    async def publish(
        self, topic: str, body: object, **options: Unpack[when_of.NowOne]
    ) -> Receipt: ...
    @overload
    async def publish(
        self, topic: str, body: object, **options: Unpack[when_of.LaterOne]
    ) -> ScheduledReceipt: ...

    async def publish(
        self,
        topic: str,
        body: object,
        *,
        key: str | None = None,
        headers: Mapping[str, str | bytes] | None = None,
        tag: Tags = None,
        trace_id: str | None = None,
        priority: int | None = None,
        tenant: str | None = None,
        delay: Delay | None = None,
        at: At | None = None,
        unique: str | None = None,
        replace: bool = False,
        durability: DurabilityName | None = None,
        timeout: Duration | None = None,
    ) -> Receipt | ScheduledReceipt:
        """Publish one message and return when it is as safe as asked for.

        `body` is bytes, text, or anything JSON can say. Many calls at the same time share batches
        by themselves. Raises `OutcomeUnknown` only when it may have been stored or not; what was
        not sent by its deadline is taken back, and raises `NotConnected`. With `delay` or `at` it
        waits for its time; under a business key (`unique`) one waits at a time, which a later one
        may `replace`: see `ScheduledReceipt`.

        >>> async def main() -> Receipt:
        ...     async with connect("memory:") as mq:
        ...         return await mq.publish("orders", "hello", key="7", tag="vip")
        >>> asyncio.run(main())
        Receipt(topic='orders', offset=0, event_id=2, durability='disk')
        """
        producer = self._producer()
        deadline = None
        if timeout is not None or not producer.has_space:
            deadline = self._deadline(timeout)
            await producer.space(deadline=deadline)
        future = self._publish(
            producer, topic, body, durability, (delay, at, unique, replace), key=key,
            headers=headers, tag=tag, trace_id=trace_id, priority=priority, tenant=tenant,
        )  # fmt: skip
        if deadline is None:
            return await future  # type: ignore[no-any-return]  # its kind follows from the time
        sent_to = topic if delay is None and at is None else SCHEDULE_TOPIC
        return await producer.answer(future, sent_to, deadline=deadline)

    @overload
    def publish_soon(
        self, topic: str, body: object, **options: Unpack[when_of.NowSoon]
    ) -> asyncio.Future[Receipt]: ...
    @overload
    def publish_soon(
        self, topic: str, body: object, **options: Unpack[when_of.LaterSoon]
    ) -> asyncio.Future[ScheduledReceipt]: ...

    def publish_soon(
        self,
        topic: str,
        body: object,
        *,
        key: str | None = None,
        headers: Mapping[str, str | bytes] | None = None,
        tag: Tags = None,
        trace_id: str | None = None,
        priority: int | None = None,
        tenant: str | None = None,
        delay: Delay | None = None,
        at: At | None = None,
        unique: str | None = None,
        replace: bool = False,
        durability: DurabilityName | None = None,
    ) -> asyncio.Future[Receipt] | asyncio.Future[ScheduledReceipt]:
        """Publish one message without waiting; the future gives the receipt or the error.

        Raises `Overloaded` when too many wait already.

        >>> async def main() -> list[int]:
        ...     async with connect("memory:") as mq:
        ...         futures = [mq.publish_soon("orders", str(n)) for n in range(3)]
        ...         return [receipt.offset for receipt in await asyncio.gather(*futures)]
        >>> asyncio.run(main())
        [0, 1, 2]
        """
        producer = self._producer()
        producer.check_space()
        return self._publish(
            producer, topic, body, durability, (delay, at, unique, replace), key=key,
            headers=headers, tag=tag, trace_id=trace_id, priority=priority, tenant=tenant,
        )  # fmt: skip

    @overload
    async def publish_many(
        self, topic: str, bodies: Iterable[object], **options: Unpack[when_of.NowMany]
    ) -> BatchReceipt: ...
    @overload
    async def publish_many(
        self, topic: str, bodies: Iterable[object], **options: Unpack[when_of.LaterMany]
    ) -> ScheduledBatchReceipt: ...

    async def publish_many(
        self,
        topic: str,
        bodies: Iterable[object],
        *,
        keys: Sequence[str | None] | None = None,
        headers: Sequence[Mapping[str, str | bytes] | None] | None = None,
        tags: Sequence[Tags] | None = None,
        trace_ids: Sequence[str | None] | None = None,
        priorities: Sequence[int | None] | None = None,
        tenants: Sequence[str | None] | None = None,
        delay: Delays | None = None,
        at: Times | None = None,
        uniques: Sequence[str | None] | None = None,
        replace: bool = False,
        durability: DurabilityName | None = None,
        compression: Literal["zstd", "lz4"] | None = None,
        timeout: Duration | None = None,
    ) -> BatchReceipt | ScheduledBatchReceipt:
        """Publish many as one batch, all or none; `delay` and `at` are for all, or one for each.

        >>> async def main() -> int:
        ...     async with connect("memory:") as mq:
        ...         return (await mq.publish_many("orders", [b"a", b"b"])).count
        >>> asyncio.run(main())
        2
        """
        producer = self._producer()
        check_topic_name(topic)
        encoded = encode_bodies(bodies)
        if not encoded:
            raise InvalidRequest("publish_many needs at least one body")
        self._check_size(max(map(len, encoded)))
        columns: dict[str, Sequence[object]] = {
            name: column
            for name, column in (
                ("keys", keys), ("headers", headers),
                ("tags", tags and [joined_tags(tag) for tag in tags]),
                ("trace_ids", trace_ids), ("priorities", priorities), ("tenants", tenants),
                ("uniques", uniques),
            )
            if column is not None
        }  # fmt: skip
        for name, column in columns.items():
            check_column(name, column, count=len(encoded))
        waits = self._schedule_columns(
            topic, delay, at, uniques, replace=replace, count=len(encoded)
        )
        deadline = self._deadline(timeout)
        await producer.space(deadline=deadline)
        receipt = await producer.publish_many(
            SCHEDULE_TOPIC if waits else topic, encoded, durability=self._asked(durability),
            columns=columns | waits, compression=compression, deadline=deadline,
        )  # fmt: skip
        return ScheduledBatchReceipt.of(receipt, topic, calls=self) if waits else receipt

    def _publish(
        self, producer: Producer, topic: str, body: object, durability: DurabilityName | None,
        when: When, *, key: str | None, headers: Mapping[str, str | bytes] | None, tag: Tags,
        trace_id: str | None, priority: int | None, tenant: str | None,
    ) -> asyncio.Future[Any]:  # fmt: skip
        encoded = encode_body(body)
        if len(encoded) > 65_536:
            self._check_size(len(encoded))
        optional = None
        if key is not None or headers or tag or trace_id or priority is not None or tenant:
            optional = optional_parts(key, headers, tag, trace_id, priority, tenant)
        asked = self._durability if durability is None else _durability(durability)
        if when != NOW:
            return self._schedule(producer, topic, encoded, asked, optional, when)
        if topic == SCHEDULE_TOPIC:
            check_topic_name(topic)  # its open batch, which is the schedule's own, would not do it
        return producer.publish(topic, encoded, durability=asked, optional=optional)

    def _deadline(self, timeout: Duration | None) -> float:
        timeout_s = self._timeout_s if timeout is None else duration_ms(timeout) / 1000
        return asyncio.get_running_loop().time() + timeout_s

    # --- read --------------------------------------------------------------------------------

    def read(
        self,
        topic: str,
        *,
        start: str | int | datetime | timedelta = "earliest",
        end: int | None = None,
        after_event_id: int | None = None,
        follow: bool = False,
    ) -> Reader:
        """Return a reader of a topic, for `async for`.

        `start` is `"earliest"`, `"latest"`, an offset, a time, or how long ago (`"10m"`). It ends
        before the offset `end`, or at the end of the topic; with `follow` it waits there for new
        messages. Any number of readers may read a topic; they change nothing.

        >>> async def main() -> list[bytes]:
        ...     async with connect("memory:") as mq:
        ...         await mq.publish_many("orders", [b"a", b"b", b"c"])
        ...         return [message.body async for message in mq.read("orders", start=1)]
        >>> asyncio.run(main())
        [b'b', b'c']
        """
        check_topic_name(topic, system=True)
        check_end(end)
        return Reader(
            self._keeper(), topic, follow=follow, timeout_s=self._timeout_s, end=end,
            start=cast(ReadStart, read_start(start, after_event_id, now_ms=self._clock.now_ms())),
        )  # fmt: skip

    async def get(self, topic: str, offset: int) -> Message:
        """Return one message by its offset.

        >>> async def main() -> bytes:
        ...     async with connect("memory:") as mq:
        ...         await mq.publish_many("orders", [b"a", b"b", b"c"])
        ...         return (await mq.get("orders", 1)).body
        >>> asyncio.run(main())
        b'b'
        """
        check_topic_name(topic, system=True)
        reader = Reader(
            self._keeper(), topic, follow=False, timeout_s=self._timeout_s, credit_bytes=1,
            start=cast(ReadStart, read_start(offset, None, now_ms=0)),
        )  # fmt: skip
        batches = reader.batches()
        try:
            async with asyncio.timeout(self._timeout_s):
                async for batch in batches:
                    if batch.first_offset == offset:
                        return batch.messages()[0]
                    break
        except TimeoutError:
            raise NotConnected(f"no answer in time for message {offset} of {topic!r}") from None
        finally:
            await batches.aclose()
        raise OffsetOutOfRange(f"topic {topic!r} holds no message {offset}")

    # --- topics ------------------------------------------------------------------------------

    async def create_topic(
        self,
        topic: str,
        *,
        lifetime: Duration | None = None,
        expires_at: datetime | int | None = None,
        rule: Literal["read-write", "write-only", "read-only", "closed"] = "read-write",
        message_bytes_max: int = 0,
        retention: Duration | None = None,
        retention_bytes: int = 0,
        retention_group: str = "",
        exist_ok: bool = False,
    ) -> TopicDescription:
        """Create a topic. Publishing creates one by itself; this sets how it is to be.

        It lives for ever, or for a `lifetime`, or until `expires_at`. What `retention_group` has
        not finished is never removed, even before that group exists.

        >>> async def main() -> str:
        ...     async with connect("memory:") as mq:
        ...         return (await mq.create_topic("orders", lifetime="1h")).state
        >>> asyncio.run(main())
        'active'
        """
        ends: dict[str, object] = {}
        if lifetime is not None:
            ends["lifetime_ms"] = duration_ms(lifetime)
        if expires_at is not None:
            ends["expires_at_ms"] = instant_ms(expires_at)
        reply = await self._request(
            {
                "op": "topic.create", "topic": topic, "exist_ok": exist_ok, "rule": rule, **ends,
                "retention_ms": 0 if retention is None else duration_ms(retention),
                "retention_bytes": retention_bytes, "message_bytes_max": message_bytes_max,
                "retention_group": retention_group,
            }
        )  # fmt: skip
        return msgspec.convert(reply, TopicDescription)

    async def change_topic(
        self,
        topic: str,
        *,
        lifetime: Duration | None = None,
        expires_at: datetime | int | None = None,
        rule: Literal["read-write", "write-only", "read-only", "closed"] | None = None,
        message_bytes_max: int | None = None,
        retention: Duration | None = None,
        retention_bytes: int | None = None,
        retention_group: str | None = None,
    ) -> TopicDescription:
        """Change what is given, leave the rest.

        `expires_at=0` lets a topic live for ever, `retention_group=""` waits for no group.

        >>> async def main() -> str:
        ...     async with connect("memory:") as mq:
        ...         await mq.create_topic("orders")
        ...         return (await mq.change_topic("orders", rule="read-only")).rule
        >>> asyncio.run(main())
        'read-only'
        """
        changes: dict[str, object] = {
            "rule": rule,
            "message_bytes_max": message_bytes_max,
            "retention_bytes": retention_bytes,
            "retention_group": retention_group,
            "lifetime_ms": None if lifetime is None else duration_ms(lifetime),
            "expires_at_ms": None if expires_at is None else instant_ms(expires_at),
            "retention_ms": None if retention is None else duration_ms(retention),
        }
        given = {name: value for name, value in changes.items() if value is not None}
        reply = await self._request({"op": "topic.change", "topic": topic, **given})
        return msgspec.convert(reply, TopicDescription)

    async def delete_topic(self, topic: str) -> None:
        """End a topic now: its readers are told, its name is free, its space comes back.

        >>> async def main() -> list[str]:
        ...     async with connect("memory:") as mq:
        ...         await mq.create_topic("orders")
        ...         await mq.delete_topic("orders")
        ...         return [one.topic for one in await mq.topics()]
        >>> asyncio.run(main())
        []
        """
        await self._request({"op": "topic.delete", "topic": topic})

    async def topic(self, topic: str) -> TopicDescription:
        """Return what there is to know of one topic; `UnknownTopic` when there is none.

        >>> async def main() -> int:
        ...     async with connect("memory:") as mq:
        ...         await mq.publish_many("orders", [b"a", b"b"])
        ...         return (await mq.topic("orders")).messages
        >>> asyncio.run(main())
        2
        """
        return msgspec.convert(
            await self._request({"op": "topic.describe", "topic": topic}), TopicDescription
        )

    async def has_topic(self, topic: str) -> bool:
        """Tell whether a topic exists.

        >>> async def main() -> bool:
        ...     async with connect("memory:") as mq:
        ...         return await mq.has_topic("orders")
        >>> asyncio.run(main())
        False
        """
        try:
            await self.topic(topic)
        except UnknownTopic:
            return False
        return True

    async def topics(self, *, prefix: str = "", ended: bool = False) -> list[TopicDescription]:
        """Return all topics in the order of their names; `ended` adds behind them what is no more.

        >>> async def main() -> list[str]:
        ...     async with connect("memory:") as mq:
        ...         await mq.create_topic("orders.paid")
        ...         await mq.create_topic("orders.new")
        ...         return [one.topic for one in await mq.topics(prefix="orders.")]
        >>> asyncio.run(main())
        ['orders.new', 'orders.paid']
        """
        found: list[TopicDescription] = []
        gone: list[TopicDescription] = []
        after = ""
        while True:
            reply = await self._request(
                {"op": "topic.list", "prefix": prefix, "after": after, "limit": _PAGE, "all": ended}
            )
            found += msgspec.convert(reply["topics"], list[TopicDescription])
            gone += msgspec.convert(reply.get("ended", []), list[TopicDescription])
            after = reply["next"]
            if not after:
                return found + sorted(gone, key=lambda one: (one.topic, one.number))

    async def status(self) -> dict[str, Any]:
        """Return how the broker is: version, log, disk, connections, counts.

        >>> async def main() -> int:
        ...     async with connect("memory:") as mq:
        ...         await mq.publish("orders", "hello")
        ...         return (await mq.status())["published"]
        >>> asyncio.run(main())
        1
        """
        return await self._request({"op": "status"})

    # --- inside ------------------------------------------------------------------------------

    async def _request(self, request: dict[str, object], *, wait_s: float = 0) -> dict[str, Any]:
        """Ask once; what only asks is asked again when the connection is lost."""
        may_be_done = False
        try:
            async with asyncio.timeout(self._timeout_s + wait_s):
                while True:
                    link = await self._keeper().connected(timeout_s=self._timeout_s)
                    may_be_done = request["op"] not in _ASKS_ONLY
                    reply = await self._ask(link, request)
                    if reply is not None:
                        return reply
                    if may_be_done:
                        raise OutcomeUnknown(f"the connection was lost during {request['op']}")
        except TimeoutError:
            kind = OutcomeUnknown if may_be_done else NotConnected
            raise kind(f"no answer in time for {request['op']}") from None

    async def _ask(self, link: Link, request: dict[str, object]) -> dict[str, Any] | None:
        """Return the reply, or None when the connection was lost before it came."""
        answer: asyncio.Future[tuple[int, bytes | bytearray]] = (
            asyncio.get_running_loop().create_future()
        )

        def take(kind: int, payload: bytes | bytearray) -> None:
            if not answer.done():
                answer.set_result((kind, payload))

        request_id = link.expect(take)
        try:
            link.send(Kind.REQUEST, request_id, msgspec.json.encode(request))
            waited: list[asyncio.Future[Any]] = [answer, link.lost]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            link.forget(request_id)
        if not answer.done():
            return None
        kind, payload = answer.result()
        if kind == Kind.ERROR:
            raise decode_error(payload)
        return decode_reply(payload)

    async def _make_dials(self) -> list[Dial]:
        if self._dials is not None:
            return self._dials
        if self._addresses[0].scheme in ("file", "memory"):
            # The broker is imported only where one runs: most programs never need it.
            from onward.client.embedded import Embedded

            self._embedded = await Embedded.open(self._addresses[0], settings=self._settings)
            return [self._embedded.dial]
        return [_socket_dial(address) for address in self._addresses]

    async def _close_embedded(self) -> None:
        if self._embedded is not None:
            embedded, self._embedded = self._embedded, None
            await embedded.close()

    def _keeper(self) -> Keeper:
        if self._opened is None:
            raise NotConnected("this client is not open: use 'async with connect(...) as mq'")
        return self._opened[0]

    def _producer(self) -> Producer:
        if self._opened is None:
            raise NotConnected("this client is not open: use 'async with connect(...) as mq'")
        return self._opened[1]

    def _asked(self, durability: str | None) -> int:
        return self._durability if durability is None else _durability(durability)

    def _check_size(self, size: int) -> None:
        """Refuse here what the broker would refuse: others may share the batch."""
        link = self._keeper().link
        limit = link.welcome.batch_bytes_max - 1024 if link is not None else 0
        if limit and size > limit:
            raise MessageTooLarge(f"a message of {size} bytes is too large: the limit is {limit}")


def _socket_dial(address: Address) -> Dial:
    async def dial(make: Any) -> Link:
        loop = asyncio.get_running_loop()
        if address.scheme == "unix":
            _, link = await loop.create_unix_connection(make, address.place)
        else:
            _, link = await loop.create_connection(make, address.place, address.port)
        return cast(Link, link)

    return dial


def _durability(name: str | None) -> int:
    if name is None:
        return Durability.DEFAULT
    try:
        return _DURABILITIES.get(name) or Durability[name.upper()]
    except (KeyError, AttributeError, TypeError):
        raise InvalidRequest(
            f"durability is 'memory', 'interval', 'disk' or 'quorum', not {name!r}"
        ) from None
