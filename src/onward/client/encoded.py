"""Publishing batches that are encoded already, under producer ids and sequences of the caller.

    publish(packed, producer_id=7, sequence=1) ──▶ stamped ──▶ sent ──▶ answered
                                                      └── connection lost: sent again

Who can say again what it published, and under which number (a sink that copies what was decided),
gets each batch stored once, whoever repeats it and from wherever: the broker knows the last
sequences of each producer id. All rules of `producer` hold for each id by itself: the order of the
calls is kept, and no two unanswered sequences are further apart than what the broker remembers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from onward.client.keeper import Keeper
from onward.client.link import Link
from onward.client.producer import OpenBatch, Producer, WholeBatch
from onward.client.receipt import BatchReceipt
from onward.clock import Clock
from onward.errors import InvalidRequest, OnwardError, Overloaded, ProtocolError
from onward.message.batch import BatchHeader, Buffer, check_batch, restamp

PRODUCERS_MAX = 32
"""So many producer ids may have something under way at a time."""
PRODUCER_ID_MAX = 2**64 - 1
SEQUENCE_MAX = 1 << 62


class EncodedBatch(WholeBatch):
    """A batch that has its sequence from the caller."""

    __slots__ = ("sequence",)

    def __init__(
        self, topic: str, durability: int, deadline: float, *, sequence: int, size: int,
        bytes_: int, encoded: Callable[[int, int], bytes], future: asyncio.Future[BatchReceipt],
    ) -> None:  # fmt: skip
        super().__init__(
            topic, durability, deadline, size=size, bytes_=bytes_, encoded=encoded, future=future
        )
        self.sequence = sequence


class EncodedProducer(Producer):
    """Publishes under one producer id of the caller."""

    users = 0
    """How many calls are under way."""

    async def publish_encoded(
        self, topic: str, packed: Buffer, *, sequence: int, durability: int, deadline: float
    ) -> BatchReceipt:
        """Send a batch in its turn; return where it is, also when it was there before."""
        self.users += 1
        try:
            await self.space(deadline=deadline)
            return await self._publish_encoded(topic, packed, sequence, durability, deadline)
        finally:
            self.users -= 1

    def _publish_encoded(
        self, topic: str, packed: Buffer, sequence: int, durability: int, deadline: float
    ) -> asyncio.Future[BatchReceipt]:
        header = check_packed(packed)
        time_ms = None if header.time_ms else self._clock.now_ms()

        def encoded(producer_id: int, sequence: int) -> bytes:
            return restamp(packed, producer_id=producer_id, sequence=sequence, time_ms=time_ms)

        future: asyncio.Future[BatchReceipt] = self._loop.create_future()
        self._add(
            EncodedBatch(
                topic, durability, deadline, sequence=sequence, size=header.count,
                bytes_=len(packed), encoded=encoded, future=future,
            )
        )  # fmt: skip
        return future

    def _is_full(self, window: int) -> bool:
        """Tell whether the next one has to wait: for room in the window, or for itself."""
        if not self._sent:
            return False
        batch = self._waiting[0]
        assert isinstance(batch, EncodedBatch)
        # Sequences come as the caller likes; there are never more than the window has.
        first, last = min(self._sent), max(self._sent)
        too_far = max(last, batch.sequence) - min(first, batch.sequence) >= window
        return too_far or batch.sequence in self._sent

    def _seal(self, link: Link, batch: OpenBatch | WholeBatch) -> None:
        assert isinstance(batch, EncodedBatch)
        self._next_sequence = batch.sequence
        super()._seal(link, batch)


class EncodedProducers:
    """The producers of one client that publish under ids of its callers."""

    def __init__(self, *, timeout_s: float, clock: Clock, keeper: Keeper) -> None:
        self._keeper = keeper
        self._timeout_s = timeout_s
        self._clock = clock
        self._link: Link | None = None
        self._by_id: dict[int, EncodedProducer] = {}

    def of(self, producer_id: int) -> EncodedProducer:
        """Return the producer with this id; those that have nothing to do are forgotten."""
        producer = self._by_id.get(producer_id)
        if producer is None:
            if len(self._by_id) >= PRODUCERS_MAX:
                self._forget_idle()
            producer = EncodedProducer(
                producer_id=producer_id, timeout_s=self._timeout_s, clock=self._clock,
                keeper=self._keeper,
            )  # fmt: skip
            producer.use(self._link)
            self._by_id[producer_id] = producer
        return producer

    def _forget_idle(self) -> None:
        busy = {key: one for key, one in self._by_id.items() if one.users or not one.is_idle}
        if len(busy) >= PRODUCERS_MAX:
            raise Overloaded(
                f"{PRODUCERS_MAX} producer ids have something under way", retry_after_ms=100
            )
        self._by_id = busy

    def use(self, link: Link | None) -> None:
        """Go on with a new link."""
        self._link = link
        for producer in self._by_id.values():
            producer.use(link)

    async def drain(self) -> None:
        """Return when everything has its answer or its deadline."""
        for producer in list(self._by_id.values()):
            await producer.drain()

    def close(self, error: OnwardError) -> None:
        """Fail everything that is still waiting."""
        for producer in self._by_id.values():
            producer.close(error)
        self._by_id.clear()


def check_stamp(producer_id: int, sequence: int) -> None:
    """Raise `InvalidRequest` when a batch cannot have this producer id and sequence.

    >>> check_stamp(0, 1)
    Traceback (most recent call last):
    onward.errors.InvalidRequest: a producer id is a number from 1 to 2**64 - 1, not 0
    """
    if type(producer_id) is not int or not 1 <= producer_id <= PRODUCER_ID_MAX:
        raise InvalidRequest(f"a producer id is a number from 1 to 2**64 - 1, not {producer_id!r}")
    if type(sequence) is not int or not 0 <= sequence <= SEQUENCE_MAX:
        raise InvalidRequest(f"a sequence is a number from 0 to 2**62, not {sequence!r}")


def check_packed(packed: Buffer) -> BatchHeader:
    """Return what the header of a batch says, or raise `InvalidRequest` when it is not one.

    >>> from onward.message.batch import encode_batch
    >>> check_packed(encode_batch([b"hello", b"world"])).count
    2
    """
    try:
        header = check_batch(packed)
    except (ProtocolError, TypeError) as error:
        raise InvalidRequest(f"this is no encoded batch: {error}") from None
    if header.length != len(packed):
        raise InvalidRequest(f"{len(packed) - header.length} bytes follow after the encoded batch")
    return header
