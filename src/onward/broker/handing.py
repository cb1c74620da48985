"""Handing over: ranges that were granted become a lease and a DELIVERY, now or from the disk.

    granted ──▶ leased ──▶ packed (at once, or in a thread) ──▶ sent
                               └─ too much, gone, damaged: no longer leased

A group that delivers at most once has finished what it sends, durably, before it is sent.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from onward.broker.choosing import Source
from onward.broker.crew import Crew, Member
from onward.broker.handover import DELIVERY_BYTES_MAX, NeedsDisk, Packing, Parcel
from onward.delivery.lease import Lease
from onward.delivery.ranges import Range, count_of
from onward.errors import OnwardError
from onward.protocol.deliveries import delivery_head

if TYPE_CHECKING:
    from onward.broker.broker import Broker
    from onward.broker.catalogue import Topic
    from onward.broker.consume import Consuming
    from onward.delivery.share import Grant

logger = logging.getLogger("onward.consume")

NOT_LEASED = 0
"""The delivery of a group that delivers at most once: it was finished before it was sent."""
UNREADABLE_S = 1.0


class Handing:
    """Hands over what was granted."""

    def __init__(self, broker: Broker, consuming: Consuming) -> None:
        self._broker = broker
        self._consuming = consuming
        self._loop = asyncio.get_running_loop()
        self._packing = Packing(broker.log)
        self._cold_count = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def cold_bytes(self) -> int:
        """Return about how much is being read from the disk now."""
        return self._cold_count * DELIVERY_BYTES_MAX

    def stop(self) -> None:
        """Read nothing more."""
        for task in list(self._tasks):
            task.cancel()

    def deliver(
        self, crew: Crew, member: Member, source: Source, topic: Topic, ranges: list[Range],
        *, bytes_max: int,
    ) -> None:  # fmt: skip
        """Lease ranges to a member and send them: now, or when the disk has given them."""
        record = crew.group.record
        lease = crew.leases.grant(
            member.name, source.share, source.share.grants(ranges),
            now_ms=self._broker.clock.monotonic_ms(), lease_ms=record.lease_ms,
            reports=member.starts,
        )  # fmt: skip
        try:
            parcel = self._packing.pack(topic, ranges, wait=False, bytes_max=bytes_max)
        except (NeedsDisk, OSError):
            self._deliver_from_disk(crew, member, source, topic, ranges, lease)
            return
        self._hand(crew, member, source, topic, parcel, lease)

    def _deliver_from_disk(
        self, crew: Crew, member: Member, source: Source, topic: Topic, ranges: list[Range],
        lease: Lease,
    ) -> None:  # fmt: skip
        async def read() -> None:
            packing = Packing(self._broker.log)
            try:
                parcel = await self._broker.in_thread(
                    lambda: packing.pack(topic, ranges, wait=True)
                )
            except OSError as error:
                logger.warning("topic %r cannot be read now: %s", topic.name, error)
                await asyncio.sleep(UNREADABLE_S)
                parcel = Parcel()
                parcel.rest = ranges
            self._hand(crew, member, source, topic, parcel, lease)

        self._cold_count += 1
        crew.reads += 1
        task = self._loop.create_task(read())
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._read_from_disk(crew, task))

    def _read_from_disk(self, crew: Crew, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._cold_count -= 1
        crew.reads -= 1
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broker.fail(error if isinstance(error, Exception) else RuntimeError(str(error)))
        self._consuming.serve_soon(crew)

    def _hand(
        self, crew: Crew, member: Member, source: Source, topic: Topic, parcel: Parcel, lease: Lease
    ) -> None:
        """Send what was found; what did not fit or cannot be delivered is no longer leased."""
        if crew.leases.find(lease.id) is not lease:
            # The member has gone meanwhile, or its lease has: then all of it is settled.
            if crew.members.get(member.name) is member:
                crew.give(member, sum(end - start for start, end, _, _ in lease.grants))
            return
        # Where nothing could be read it may be so for long: then it takes turns with what is fresh.
        take_back = source.put_back if parcel.ranges else source.give_back
        for start, end in parcel.rest:
            if back := crew.leases.settle(lease.id, start, end, member=member.name):
                take_back(back)
                crew.give(member, count_of(back))
        now_ms = self._broker.clock.now_ms()
        rows = parcel.rows(crew.group.record.name, topic.name, member.name, now_ms=now_ms)
        for row in rows:
            for start, end in row.ranges:
                crew.leases.settle(lease.id, start, end, member=member.name)
            crew.give(member, count_of(row.ranges))
        if rows:
            self._consuming.outcomes.add(rows)
        for (start, _), cause in parcel.damaged:
            self._broker.delivering.note_damage(topic, start, cause)
        if parcel.ranges:
            self._send(crew, member, source, topic, parcel, lease)
        elif member in crew.apart:
            self._consuming.go_on(member)

    def _send(
        self, crew: Crew, member: Member, source: Source, topic: Topic, parcel: Parcel, lease: Lease
    ) -> None:
        grants = source.share.grants(parcel.ranges)
        record = crew.group.record
        if record.at_most_once:
            self._finish_then_send(crew, member, topic, parcel, lease, grants)
            return
        self._write(member, topic, grants, parcel, delivery=lease.id, lease_ms=record.lease_ms)

    def _finish_then_send(
        self, crew: Crew, member: Member, topic: Topic, parcel: Parcel, lease: Lease,
        grants: list[Grant],
    ) -> None:  # fmt: skip
        """At most once: it is finished, and durably so, before anybody has it."""
        timed = []
        for start, end in parcel.ranges:
            settled = crew.leases.settle(lease.id, start, end, member=member.name)
            timed += [(first, last, 0, 0) for first, last in settled]
        self._consuming.outcomes.ack(crew.group.record.name, topic.name, member.name, timed)

        def done(error: OnwardError | None) -> None:
            if error is None:
                member.acked += count_of(parcel.ranges)
                self._write(member, topic, grants, parcel, delivery=NOT_LEASED, lease_ms=0)
            else:
                crew.give(member, count_of(parcel.ranges))

        self._consuming.outcomes.when_durable(done)

    def _write(
        self, member: Member, topic: Topic, grants: list[Grant], parcel: Parcel,
        *, delivery: int, lease_ms: int,
    ) -> None:  # fmt: skip
        head = delivery_head(
            member.consumer_id, topic.name, grants, delivery=delivery, lease_ms=lease_ms,
            entries_bytes=parcel.bytes,
        )  # fmt: skip
        count = count_of(parcel.ranges)
        member.crew.note_size(topic.name, parcel.bytes, count)
        member.delivered += count
        self._consuming.delivered_count += count
        unsent_bytes = member.session.send_parts([head, *parcel.entries])
        self._broker.delivering.note_unsent(member.session, unsent_bytes)
        if not member.session.writable and member.crew.members.get(member.name) is member:
            member.crew.pause(member)
