"""All that a program can ask of a broker.

    connect("localhost:7700") ── Client ─┬─ publish, publish_soon, publish_many   (producer)
                                         ├─ read, get                             (reader)
                                         ├─ groups, dead letters, find, explain   (group_calls)
                                         ├─ cancel, reschedule, calendar, ...     (schedule_calls)
                                         ├─ topic_ends, publish_encoded, ...      (pipeline_calls)
                                         ├─ replication, promote, step_down       (replica_calls)
                                         └─ topics, create_topic, ...             (topic_calls)

Every call has a deadline. An error says who must act: see `onward.errors`. What only asks is asked
again by itself when the connection is lost; what changes something is not, except publishes, which
are safe to repeat.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from random import Random
from types import TracebackType
from typing import Any, Literal, NoReturn, Self, TypeVar, Unpack, overload

import msgspec

from onward.client import scheduled as when_of
from onward.client.address import Address, parse_addresses
from onward.client.backlog_calls import BacklogCalls
from onward.client.bodies import encode_bodies, encode_body
from onward.client.consume_calls import ConsumeCalls
from onward.client.keeper import Keeper
from onward.client.link import Link
from onward.client.message_parts import Tags, check_column, joined_tags, optional_parts
from onward.client.nodes import Dial, socket_dial
from onward.client.pipeline_calls import PipelineCalls
from onward.client.producer import Producer
from onward.client.reader import Reader
from onward.client.receipt import BatchReceipt, DurabilityName, Receipt
from onward.client.replica_calls import ReplicaCalls
from onward.client.schedule_times import NOW, At, Delays, Times, When
from onward.client.scheduled import ScheduledBatchReceipt, ScheduledReceipt
from onward.client.topic_calls import TopicCalls
from onward.client.topics import (
    after_start,
    check_end,
    read_start,
    timeout_seconds,
)
from onward.clock import Clock, SystemClock
from onward.durations import Duration
from onward.errors import (
    InvalidRequest,
    MessageTooLarge,
    NotConnected,
    NotLeader,
    OffsetOutOfRange,
    OutcomeUnknown,
)
from onward.message.message import Message
from onward.message.names import check_topic_name
from onward.message.texts import check_text
from onward.protocol.frames import Kind
from onward.protocol.operations import Request, decode_reply, encode_request, operation_of
from onward.protocol.operations.schedule import SCHEDULE_TOPIC
from onward.protocol.operations.status import ShowStatus
from onward.protocol.payloads import Durability, decode_error
from onward.settings import Settings

Reply = TypeVar("Reply")
TIMEOUT_S = 30.0
_DURABILITIES = {one.name.lower(): int(one) for one in Durability}


def connect(
    address: str = "localhost:7700",
    *,
    token: str | None = None,
    name: str | None = None,
    timeout: Duration | None = None,
    timeout_ms: int | None = None,
    connect_timeout: Duration | None = None,
    connect_timeout_ms: int | None = None,
    fail_fast: bool = False,
    wait_for_broker: bool = True,
    durability: DurabilityName | None = None,
    settings: Settings | None = None,
    create: bool = True,
) -> Client:
    """Return a client to use with `async with`.

    `address` names one or more brokers, a Unix socket, or a broker inside this process: see
    `onward.client.address`. `timeout` is the deadline of each call, 30 s unless given.
    `durability` is what publishes ask for unless they say otherwise; without it the broker
    decides. `settings` is for a broker inside this process; without `create` the folder of a
    `file:` address must hold a log already.

    Opening tries until `connect_timeout` (without it, `timeout`) to reach a broker; with
    `fail_fast` it raises at once when nobody listens at any of the addresses. Without
    `wait_for_broker` opening returns at once: calls wait for a broker until their own deadline.

    >>> async def main() -> str:
    ...     async with connect("memory:") as mq:
    ...         receipt = await mq.publish("orders", {"id": 7}, key="7")
    ...         return receipt.id
    >>> asyncio.run(main())
    'orders/0'
    """
    for field, text in (("name", name), ("token", token)):
        if text is not None:
            check_text(field, text)
    timeout_s = timeout_seconds("timeout", timeout, timeout_ms)
    return Client(
        parse_addresses(address), token=token, name=name or f"python-{os.getpid()}",
        timeout_s=TIMEOUT_S if timeout_s is None else timeout_s,
        durability=_durability(durability), settings=settings,
        connect_timeout_s=timeout_seconds("connect_timeout", connect_timeout, connect_timeout_ms),
        fail_fast=fail_fast, wait_for_broker=wait_for_broker, create=create,
    )  # fmt: skip


class Client(TopicCalls, ConsumeCalls, BacklogCalls, PipelineCalls, ReplicaCalls):
    """A connection to Onward that mends itself. Made by `connect`."""

    def __init__(
        self, addresses: list[Address], *, token: str | None, name: str, timeout_s: float,
        durability: int, settings: Settings | None = None, dials: list[Dial] | None = None,
        producer_id: int | None = None, clock: Clock | None = None, jitter: Random | None = None,
        connect_timeout_s: float | None = None, fail_fast: bool = False, create: bool = True,
        wait_for_broker: bool = True,
    ) -> None:  # fmt: skip
        self._addresses = addresses
        self._token = token
        self._name = name
        self._timeout_s = timeout_s
        self._connect_timeout_s = timeout_s if connect_timeout_s is None else connect_timeout_s
        self._fails_fast = fail_fast
        self._waits = wait_for_broker
        self._creates = create
        self._durability = durability
        self._settings = settings
        self._dials = dials
        self._given_producer_id = producer_id
        self._producer_id = producer_id or secrets.randbits(63) | 1
        self._embedded: Any = None
        self._opened: tuple[Keeper, Producer] | None = None
        self._opening = asyncio.Lock()
        self._clock = clock or SystemClock()
        self._jitter = jitter

    async def __aenter__(self) -> Self:
        """Connect, or raise why that is not possible."""
        await self.open()
        return self

    def __enter__(self) -> NoReturn:
        """Refuse `with`, which this client cannot be used with."""
        raise TypeError("use 'async with onward.connect(...)', or 'with onward.connect_sync(...)'")

    def __exit__(self, *_: object) -> None: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait for what was published, then close."""
        await self.close(drain=error is None)

    async def open(self) -> None:
        """Connect; `async with` does it by itself. An open client stays as it is.

        In a forked child this opens a connection of its own.
        """
        if self._opened is not None and self._opened[0].is_forked:
            self._forget()
        async with self._opening:
            if self._opened is None:
                await self._open()
            else:
                self._opened[0].check_here()

    async def _open(self) -> None:
        # A new producer for each connection that is opened: its sequences begin at 1.
        self._producer_id = self._given_producer_id or secrets.randbits(63) | 1
        keeper = Keeper(
            await self._make_dials(), name=self._name, token=self._token, jitter=self._jitter,
            addresses=[str(address) for address in self._addresses],
            probe=None if self._dials is not None else self._speaks_tls,
            learns=self._dials is None and self._embedded is None,
        )  # fmt: skip
        producer = Producer(
            producer_id=self._producer_id, timeout_s=self._timeout_s, clock=self._clock,
            keeper=keeper,
        )  # fmt: skip
        keeper.listen(producer.use)
        keeper.listen_final(producer.close)
        keeper.listen(self._use_in_pipeline)
        try:
            timeout_s = self._connect_timeout_s if self._waits else None
            await keeper.open(timeout_s=timeout_s, fail_fast=self._fails_fast)
        except BaseException:
            await self._close_embedded()
            raise
        self._opened = keeper, producer

    async def close(self, *, drain: bool = True) -> None:
        """Close; with `drain` only after what was published has its answer or its deadline."""
        if self._opened is None:
            return
        keeper, producer = self._opened
        if keeper.is_forked:
            self._forget()
            return
        keeper.check_here()
        await self._consumers.close()
        await self._end_pipeline(drain=drain)
        if drain:
            await producer.drain()
        self._opened = None
        producer.close(NotConnected("the client is closed"))
        await keeper.close()
        await self._close_embedded()

    def _forget(self) -> None:
        """Forget a connection of the parent process, which goes on with it."""
        self._opened = self._embedded = None
        self._opening = asyncio.Lock()
        self._forget_pipeline()
        self.__dict__.pop("_consumers", None)

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
        delay: Duration | None = None,
        delay_ms: int | None = None,
        at: At | None = None,
        unique: str | None = None,
        replace: bool = False,
        durability: DurabilityName | None = None,
        timeout: Duration | None = None,
        timeout_ms: int | None = None,
    ) -> Receipt | ScheduledReceipt:
        """Publish one message and return when it is as safe as asked for.

        `body` is bytes, text, or anything JSON can say. Many calls at the same time share batches
        by themselves. Raises `OutcomeUnknown` only when it may have been stored or not; what was
        not sent by its deadline is taken back, and raises `NotConnected`. With `delay` or `at` it
        waits for its time; under a business key (`unique`) one waits at a time, which a later one
        may `replace`: see `ScheduledReceipt`. A duration is text with a unit (`delay="45m"`), a
        timedelta, or a number under the name that says so (`delay_ms=500`).

        >>> async def main() -> Receipt:
        ...     async with connect("memory:") as mq:
        ...         return await mq.publish("orders", "hello", key="7", tag="vip")
        >>> asyncio.run(main())
        Receipt(topic='orders', offset=0, event_id=2, durability='disk')
        """
        producer = self._producer()
        deadline = None
        if timeout is not None or timeout_ms is not None or not producer.has_space:
            deadline = self._deadline(timeout, timeout_ms)
            await producer.space(deadline=deadline)
        future = self._publish(
            producer, topic, body, durability, (delay, delay_ms, at, unique, replace), key=key,
            headers=headers, tag=tag, trace_id=trace_id, priority=priority, tenant=tenant,
        )  # fmt: skip
        if deadline is None:
            return await future  # type: ignore[no-any-return]  # its kind follows from the time
        sent_to = topic if delay is None and delay_ms is None and at is None else SCHEDULE_TOPIC
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
        delay: Duration | None = None,
        delay_ms: int | None = None,
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
            producer, topic, body, durability, (delay, delay_ms, at, unique, replace), key=key,
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
        delay_ms: int | Sequence[int] | None = None,
        at: Times | None = None,
        uniques: Sequence[str | None] | None = None,
        replace: bool = False,
        durability: DurabilityName | None = None,
        compression: Literal["zstd", "lz4"] | None = None,
        timeout: Duration | None = None,
        timeout_ms: int | None = None,
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
            topic, delay, delay_ms, at, uniques, replace=replace, count=len(encoded)
        )
        deadline = self._deadline(timeout, timeout_ms)
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

    def _deadline(self, timeout: Duration | None, timeout_ms: int | None) -> float:
        given_s = timeout_seconds("timeout", timeout, timeout_ms)
        timeout_s = self._timeout_s if given_s is None else given_s
        return asyncio.get_running_loop().time() + timeout_s

    # --- read --------------------------------------------------------------------------------

    def read(
        self,
        topic: str,
        *,
        start: str | int | datetime | timedelta = "earliest",
        end: int | None = None,
        after: Message | None = None,
        after_event_id: int | None = None,
        follow: bool = False,
    ) -> Reader:
        """Return a reader of a topic, for `async for`.

        `start` is `"earliest"`, `"latest"`, an offset, a time, or how long ago (`"10m"`); `after`
        is the last message that was read: the one behind it is the first. It ends before the offset
        `end`, or at the end of the topic; with `follow` it waits there for new messages. Any number
        of readers may read a topic; they change nothing.

        >>> async def main() -> list[bytes]:
        ...     async with connect("memory:") as mq:
        ...         await mq.publish_many("orders", [b"a", b"b", b"c"])
        ...         return [message.body async for message in mq.read("orders", start=1)]
        >>> asyncio.run(main())
        [b'b', b'c']
        """
        check_topic_name(topic, system=True)
        check_end(end)
        start = after_start(topic, after, start, after_event_id)
        begins = read_start(start, after_event_id)
        self._check_relative(begins)
        return Reader(
            self._keeper(), topic, follow=follow, timeout_s=self._timeout_s, end=end,
            start=begins,
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
            start=read_start(offset),
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

    # --- the broker -------------------------------------------------------------------------------

    async def status(self) -> dict[str, Any]:
        """Return how the broker is: version, log, disk, connections, counts.

        >>> async def main() -> int:
        ...     async with connect("memory:") as mq:
        ...         await mq.publish("orders", "hello")
        ...         return (await mq.status())["published"]
        >>> asyncio.run(main())
        1
        """
        return msgspec.structs.asdict(await self._call(ShowStatus()))

    def has_leader(self) -> bool:
        """Return True while the client is connected to a node that takes writes.

        Otherwise it is connected to a replica, which serves reads, or not connected.
        """
        return self._opened is not None and self._opened[0].has_leader

    # --- inside ------------------------------------------------------------------------------

    async def _call(self, request: Request[Reply], *, wait_s: float = 0) -> Reply:
        """Return the reply to a request; repeat a repeatable one when the connection is lost."""
        operation = operation_of(request)
        return await self._until_answered(
            operation.name, partial(self._call_once, request=request), wait_s=wait_s,
            is_repeatable=operation.is_repeatable,
            is_for_leader=all(one.resource != "node" for one in operation.needs),
        )  # fmt: skip

    async def _until_answered(
        self, name: str, ask: Callable[[Link], Awaitable[Reply | None]], *, wait_s: float,
        is_repeatable: bool, is_for_leader: bool = True,
    ) -> Reply:  # fmt: skip
        """Ask until there is an answer; a node that does not lead refers to the one that does.

        What is about the node itself is never asked of another one.
        """
        may_be_done, refusal = False, None
        try:
            async with asyncio.timeout(self._timeout_s + wait_s):
                while True:
                    keeper = self._keeper()
                    wait = keeper.connected if refusal is None else keeper.leader
                    link = await wait(timeout_s=self._timeout_s)
                    may_be_done = not is_repeatable
                    try:
                        reply = await ask(link)
                    except NotLeader as error:
                        if not is_for_leader:
                            raise
                        may_be_done, refusal = False, error
                        keeper.need_leader(link, error)
                        continue
                    if reply is not None:
                        return reply
                    if may_be_done:
                        raise OutcomeUnknown(f"the connection was lost during {name}")
        except TimeoutError:
            if may_be_done:
                raise OutcomeUnknown(f"no answer in time for {name}") from None
            raise (
                self._keeper().unreachable
                or refusal
                or NotConnected(f"no answer in time for {name}")
            ) from None

    async def _call_once(self, link: Link, request: Request[Reply]) -> Reply | None:
        """Return the reply, or None when the connection was lost before it came."""
        payload = await self._ask(link, encode_request(request))
        return None if payload is None else decode_reply(payload, request)

    async def _ask(self, link: Link, encoded: bytes) -> bytes | bytearray | None:
        """Return the payload of the reply, or None when the connection was lost before it came."""
        answer: asyncio.Future[tuple[int, bytes | bytearray]] = (
            asyncio.get_running_loop().create_future()
        )

        def take(kind: int, payload: bytes | bytearray) -> None:
            if not answer.done():
                answer.set_result((kind, payload))

        request_id = link.expect(take)
        try:
            link.send(Kind.REQUEST, request_id, encoded)
            waited: list[asyncio.Future[Any]] = [answer, link.lost]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            link.forget(request_id)
        if not answer.done():
            return None
        kind, reply = answer.result()
        if kind == Kind.ERROR:
            raise decode_error(reply)
        return reply

    async def _speaks_tls(self, number: int) -> bool:
        from onward.client.probing import speaks_tls  # it imports ssl, which is seldom needed

        return await speaks_tls(self._addresses[number])

    async def _make_dials(self) -> list[Dial]:
        if self._dials is not None:
            return self._dials
        if self._addresses[0].scheme in ("file", "memory"):
            # The broker is imported only where one runs: most programs never need it.
            from onward.client.embedded import Embedded

            self._embedded = await Embedded.open(
                self._addresses[0], settings=self._settings, create=self._creates
            )
            return [self._embedded.dial]
        return [socket_dial(address) for address in self._addresses]

    async def _close_embedded(self) -> None:
        if self._embedded is not None:
            embedded, self._embedded = self._embedded, None
            await embedded.close()

    def _keeper(self) -> Keeper:
        if self._opened is None:
            raise NotConnected("this client is not open: use 'async with connect(...) as mq'")
        keeper = self._opened[0]
        keeper.check_here(may_be_idle=True)
        return keeper

    def _producer(self) -> Producer:
        if self._opened is None:
            raise NotConnected("this client is not open: use 'async with connect(...) as mq'")
        keeper, producer = self._opened
        keeper.check_here()
        if producer.is_closed and keeper.final is not None:
            raise keeper.final
        return producer

    def _asked(self, durability: str | None) -> int:
        return self._durability if durability is None else _durability(durability)

    def _check_size(self, size: int) -> None:
        """Refuse here what the broker would refuse: others may share the batch."""
        link = self._keeper().link
        limit = link.welcome.batch_bytes_max - 1024 if link is not None else 0
        if limit and size > limit:
            raise MessageTooLarge(f"a message of {size} bytes is too large: the limit is {limit}")


def _durability(name: str | None) -> int:
    if name is None:
        return Durability.DEFAULT
    try:
        return _DURABILITIES.get(name) or Durability[name.upper()]
    except (KeyError, AttributeError, TypeError):
        raise InvalidRequest(
            f"durability is 'memory', 'interval', 'disk' or 'quorum', not {name!r}"
        ) from None
