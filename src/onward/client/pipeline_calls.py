"""What a pipeline asks of a broker: how far topics reach, a group's place, batches once and whole.

    look      topic_ends          where topics begin and end now, or as soon as one has more
              topic_entries       how many messages came when, without reading them
    progress  advance_group       a group is finished with all below an offset
              hold_group          nobody else uses a group while this client is connected
    publish   publish_encoded     an encoded batch under a number of the caller: stored once
              copy_batches        batches of one topic to another, without carrying them

A pipeline keeps its progress by itself (in a checkpoint) and repeats what it did after a crash. So
each of these may be repeated: the second time changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from onward.client.asking import Asking
from onward.client.copying import PAUSE_S_MIN, CopyLines, Place
from onward.client.encoded import EncodedProducers, check_stamp
from onward.client.link import Link
from onward.client.receipt import BatchReceipt
from onward.durations import Duration, either_ms, format_duration
from onward.errors import (
    InvalidRequest,
    NotConnected,
    NotLeader,
    OutcomeUnknown,
    Overloaded,
    Stopping,
)
from onward.message.batch import Buffer
from onward.message.names import check_topic_name
from onward.protocol.frames import Kind
from onward.protocol.operations import encode_request
from onward.protocol.operations.group_moves import AdvanceGroup
from onward.protocol.operations.groups import HoldGroup
from onward.protocol.operations.pipeline import (
    COPY_BATCHES_MAX,
    WAIT_MS_MAX,
    WAIT_TOPICS_MAX,
    CopiedBatches,
    CopyBatches,
    ListEntries,
    TopicEnd,
    TopicEntry,
    WaitForTopics,
)
from onward.protocol.operations.schedule import SCHEDULE_TOPIC
from onward.protocol.payloads import decode_error

logger = logging.getLogger("onward.client")

"""Operations that are asked again when the connection is lost: twice is the same as once."""


class PipelineCalls(Asking):
    """The calls of a client that pipelines are made of."""

    _producer_id: int
    _encoded: EncodedProducers | None = None
    _copies: CopyLines | None = None
    _holds: dict[str, HoldGroup] | None = None

    async def topic_ends(
        self, ends: Mapping[str, int], *, wait: Duration | None = None, wait_ms: int | None = None
    ) -> dict[str, TopicEnd]:
        """Return where topics begin and end, as soon as one of them has more than its offset here.

        When none has, the answer comes after `wait`, at most a minute. -1 never waits.

        >>> import asyncio, onward
        >>> async def main() -> dict[str, TopicEnd]:
        ...     async with onward.connect("memory:") as mq:
        ...         await mq.publish_many("orders", [b"a", b"b"])
        ...         return await mq.topic_ends({"orders": 1}, wait="30s")
        >>> asyncio.run(main())
        {'orders': TopicEnd(first_offset=0, next_offset=2)}
        """
        wait_ms = either_ms("wait", wait, wait_ms, default=0)
        if wait_ms > WAIT_MS_MAX:
            raise InvalidRequest(f"wait is at most a minute, not {format_duration(wait_ms)}")
        if len(ends) > WAIT_TOPICS_MAX:
            raise InvalidRequest(
                f"{WAIT_TOPICS_MAX} topics are the most to wait for, not {len(ends)}"
            )
        request = WaitForTopics(ends=dict(ends), wait_ms=wait_ms)
        return (await self._call(request, wait_s=wait_ms / 1000)).topics

    async def topic_entries(self, topic: str, *, start: int, end: int) -> list[TopicEntry]:
        """Return the entries that hold the offsets from `start` to before `end`, a page of them.

        The first and the last may reach over the range. Where the page ends before `end`, ask again
        from its last `end_offset`. No message is read, so this costs next to nothing.

        >>> import asyncio, onward
        >>> async def main() -> list[tuple[int, int]]:
        ...     async with onward.connect("memory:") as mq:
        ...         await mq.publish_many("orders", [b"a", b"b"])
        ...         await mq.publish("orders", b"c")
        ...         entries = await mq.topic_entries("orders", start=0, end=3)
        ...         return [(entry.base_offset, entry.messages) for entry in entries]
        >>> asyncio.run(main())
        [(0, 2), (2, 1)]
        """
        check_topic_name(topic, system=True)
        return (await self._call(ListEntries(topic=topic, start=start, end=end))).entries

    async def advance_group(self, group: str, topic: str, *, to: int, member: str) -> int:
        """Let a group be finished with all messages of a topic below `to`; return how many.

        They count as acked by `member`, whoever held them. A group never moves back by this, and
        one that somebody else holds (`hold_group`) raises `Conflict`.

        >>> import asyncio, onward
        >>> async def main() -> list[int]:
        ...     async with onward.connect("memory:") as mq:
        ...         await mq.publish_many("orders", [b"a", b"b", b"c"])
        ...         await mq.create_group("totals", "orders")
        ...         return [await mq.advance_group("totals", "orders", to=2, member="spark")
        ...                 for _ in range(2)]
        >>> asyncio.run(main())
        [2, 0]
        """
        reply = await self._call(AdvanceGroup(group=group, topic=topic, to=to, member=member))
        return reply.count

    async def hold_group(self, group: str, *, holder: str, member: str = "") -> None:
        """Keep a group to this client: nobody joins it and nobody else holds or advances it.

        `holder` says to people who that is; other clients may still advance it as `member`, when
        that is given. A group with members, or that another client holds,
        raises `Conflict`. It is free again when this client closes or is gone; one that only lost
        its connection takes the group again when it is back.

        >>> import asyncio, onward
        >>> async def main() -> str:
        ...     async with onward.connect("memory:") as mq:
        ...         await mq.create_topic("orders")
        ...         await mq.create_group("totals", "orders")
        ...         await mq.hold_group("totals", holder="the nightly totals")
        ...         try:
        ...             await mq.fetch("orders", group="totals")
        ...         except onward.Conflict as error:
        ...             return str(error)
        >>> asyncio.run(main())
        "group 'totals' is used by the nightly totals"
        """
        request = HoldGroup(group=group, holder=holder, id=self._producer_id, member=member)
        await self._call(request)
        if self._holds is None:
            self._holds = {}
        self._holds[group] = request

    async def publish_encoded(
        self,
        topic: str,
        packed: Buffer,
        *,
        producer_id: int,
        sequence: int,
        durability: str | None = None,
        timeout: Duration | None = None,
        timeout_ms: int | None = None,
    ) -> BatchReceipt:
        """Publish an encoded batch under a producer id and a sequence of the caller, once.

        `packed` is what `onward.message.batch.encode_batch` returns. A repeat, of whoever, gets the
        receipt of the first time; one that is older than the last 32 sequences of its producer id
        raises `Conflict`. Calls under one id keep their order. A batch for `"@schedule"` has the
        columns `topics` and `due_at_ms`.

        >>> import asyncio, onward
        >>> from onward.message.batch import encode_batch
        >>> async def main() -> list[int]:
        ...     async with onward.connect("memory:") as mq:
        ...         packed = encode_batch([b"a", b"b"])
        ...         again = [await mq.publish_encoded("orders", packed, producer_id=7, sequence=n)
        ...                  for n in (1, 2, 1)]
        ...         return [receipt.first_offset for receipt in again]
        >>> asyncio.run(main())
        [0, 2, 0]
        """
        check_topic_name(topic, system=topic == SCHEDULE_TOPIC)
        check_stamp(producer_id, sequence)
        if self._encoded is None:
            self._encoded = EncodedProducers(
                timeout_s=self._timeout_s, clock=self._clock, keeper=self._keeper()
            )
            self._encoded.use(self._keeper().link)
        return await self._encoded.of(producer_id).publish_encoded(
            topic, packed, sequence=sequence, durability=self._asked(durability),
            deadline=self._deadline(timeout, timeout_ms),
        )  # fmt: skip

    async def copy_batches(
        self,
        source: str,
        target: str,
        *,
        offset: int,
        batches: int,
        producer_id: int,
        sequence: int,
        durability: str | None = None,
    ) -> CopiedBatches:
        """Let the broker publish batches of one topic to another, each as it is and once.

        They are the `batches` (at most 16) that follow each other in `source` from `offset` on,
        which is the first offset of a batch, as `publish_encoded` and `publish_many` returned it.
        They get the sequences from `sequence` on, and what was published or copied under these
        before is not stored again, as with `publish_encoded`. Calls under one id keep their order.

        >>> import asyncio, onward
        >>> async def main() -> tuple[CopiedBatches, list[bytes]]:
        ...     async with onward.connect("memory:") as mq:
        ...         for body in (b"a", b"b", b"c"):
        ...             await mq.publish("drafts", body)
        ...         for _ in range(2):
        ...             copied = await mq.copy_batches(
        ...                 "drafts", "orders", offset=1, batches=2, producer_id=7, sequence=1)
        ...         return copied, [message.body async for message in mq.read("orders")]
        >>> asyncio.run(main())
        (CopiedBatches(next_offset=3, batches=2, messages=2, bytes=128), [b'b', b'c'])
        """
        check_topic_name(source, system=True)
        check_topic_name(target, system=target == SCHEDULE_TOPIC)
        check_stamp(producer_id, sequence)
        if type(batches) is not int or not 1 <= batches <= COPY_BATCHES_MAX:
            raise InvalidRequest(f"1 to {COPY_BATCHES_MAX} batches are copied, not {batches!r}")
        if self._copies is None:
            self._copies = CopyLines()
        copied = CopiedBatches(offset, 0, 0, 0)
        with self._copies.place(producer_id) as place:
            # Of a stretch that is too large for one request the broker copies a part.
            while copied.batches < batches:
                request = CopyBatches(
                    source=source,
                    offset=copied.next_offset,
                    batches=batches - copied.batches,
                    target=target,
                    producer_id=producer_id,
                    sequence=sequence + copied.batches,
                    durability=self._asked(durability),
                )
                part = await self._copy_in_turn(place, request)
                copied = CopiedBatches(
                    part.next_offset, copied.batches + part.batches,
                    copied.messages + part.messages, copied.bytes + part.bytes,
                )  # fmt: skip
        return copied

    # --- inside ------------------------------------------------------------------------------

    async def _copy_in_turn(self, place: Place, request: CopyBatches) -> CopiedBatches:
        """Repeat a request until the broker has answered, or the time is over."""
        place.late = NotConnected(f"a copy to {request.target!r} found no broker in time")
        try:
            async with asyncio.timeout(self._timeout_s):
                while (copied := await self._copy_once(place, request)) is None:
                    pass
                return copied
        except TimeoutError:
            raise place.late from None

    async def _copy_once(self, place: Place, request: CopyBatches) -> CopiedBatches | None:
        """Send a request when it is its turn; return None when it must be repeated."""
        await place.turn()
        keeper = self._keeper()
        link = await keeper.connected(timeout_s=self._timeout_s)
        if not place.is_next:
            return None
        place.ask()
        place.late = OutcomeUnknown(f"no answer in time for a copy to {request.target!r}")
        try:
            return await self._call_once(link, request)
        except NotLeader as error:
            place.late, place.is_asked = error, False
            keeper.need_leader(link, error)
            await keeper.leader(timeout_s=self._timeout_s)
            return None
        except (Overloaded, Stopping) as error:
            place.late, place.is_asked = error, False
            pause_s = getattr(error, "retry_after_ms", 0) / 1000
            await asyncio.sleep(max(pause_s, PAUSE_S_MIN))
            return None
        finally:
            place.is_asked = False

    def _use_in_pipeline(self, link: Link | None) -> None:
        """Go on with a new link: take what was held before anything else is asked."""
        if self._encoded is not None:
            self._encoded.use(link)
        if link is not None and self._holds:
            for request in self._holds.values():
                self._hold_again(link, request)

    def _hold_again(self, link: Link, request: HoldGroup) -> None:
        def take(kind: int, payload: bytes | bytearray) -> None:
            link.forget(request_id)
            if kind != Kind.ERROR or self._holds is None:
                return
            error = decode_error(payload)
            if isinstance(error, NotLeader):
                self._keeper().need_leader(link, error)  # over the link to it they are held again
            else:
                # The next call that needs it says so to the program.
                logger.warning("group %r is no longer held: %s", request.group, error)
                self._holds.pop(request.group, None)

        request_id = link.expect(take)
        link.send(Kind.REQUEST, request_id, encode_request(request))

    async def _end_pipeline(self, *, drain: bool) -> None:
        if self._encoded is not None:
            if drain:
                await self._encoded.drain()
            self._encoded.close(NotConnected("the client is closed"))
        self._forget_pipeline()

    def _forget_pipeline(self) -> None:
        self._encoded = self._holds = None
