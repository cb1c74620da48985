"""Reports of what a member starts: they leave the process before the program has the messages.

    batches(), fetch(), take(), a batch of an App     one report for all that is handed out
    one message after the other                       one report for the next few of them
    calls of an App                                   one report for those of an iteration

When a process dies, only what it had reported counts as an attempt. A report costs a system call,
so where messages are taken in quick succession one report is about all that will be taken in the
next millisecond or so. Where each of them takes longer, each has its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final

from onward.client.delivery import Delivery
from onward.client.delivery_batch import NOT_LEASED, DeliveryBatch
from onward.client.seat import Seat
from onward.delivery.ranges import Ranges, ranges_of
from onward.protocol.deliveries import Row, started_frame

AHEAD_MAX: Final = 1_024
_QUICK_S: Final = 0.001
_SLOW_S: Final = 0.002


class Starts:
    """What one member reports, on whatever connection it has."""

    def __init__(self, monotonic_ms: Callable[[], int]) -> None:
        self._monotonic_ms = monotonic_ms
        self.seat: Seat | None = None
        """Where to report; None: nowhere, or the broker does not count starts."""
        self.ahead = 0
        """How many of those that are taken next were reported already."""
        self.is_unsent = False
        """A report waits for the loop's next turn: it has not left this process."""
        self._count = 1
        self._reported_at = 0.0
        self._soon: list[Delivery] = []

    def begin(self, seat: Seat | None) -> None:
        """Report on a new connection, or nowhere."""
        self.seat = seat
        self.ahead = 0
        self.is_unsent = False
        self._count = 1
        self._soon.clear()

    def next_of(self, waiting: deque[Delivery], *, now: float) -> None:
        """Report the first of those that wait, and as many behind it as are taken at once."""
        since_s, self._reported_at = now - self._reported_at, now
        if since_s < _QUICK_S:
            self._count = min(2 * self._count, AHEAD_MAX)
        elif since_s > _SLOW_S:
            # What the last report was about took longer than it should have: report less at once.
            self._count = max(1, int(self._count * _QUICK_S / since_s))
        self.ahead = min(self._count, len(waiting))
        if self.seat is None:
            return
        if self.ahead == 1:
            self._delivery(waiting[0])
        else:
            self.deliveries(islice(waiting, self.ahead))

    def _delivery(self, delivery: Delivery) -> None:
        """Report one message: what `deliveries` does, for programs with many slow members."""
        batch, offset = delivery.batch, delivery.offset
        assert batch is not None, "a delivery is made by its batch"
        if batch.lease != NOT_LEASED:
            batch.starts.append((offset, offset + 1, self._monotonic_ms()))
            self._report([(batch.lease, offset, offset + 1)])

    def deliveries(self, deliveries: Iterable[Delivery]) -> None:
        """Report messages that are about to be handed out."""
        if self.seat is None:
            return
        offsets: dict[DeliveryBatch, list[int]] = {}
        for delivery in deliveries:
            assert delivery.batch is not None, "a delivery is made by its batch"
            offsets.setdefault(delivery.batch, []).append(delivery.offset)
        rows: list[Row] = []
        now_ms = self._monotonic_ms()
        for batch, some in offsets.items():
            if batch.lease != NOT_LEASED:
                ranges = ranges_of(some)
                batch.starts += [(start, end, now_ms) for start, end in ranges]
                rows += [(batch.lease, start, end) for start, end in ranges]
        self._report(rows)

    def soon(self, delivery: Delivery) -> None:
        """Report a message in the next iteration of the loop, together with others.

        That is before tasks that are created from now on begin.
        """
        if self.seat is not None:
            if not self._soon:
                self.seat.link.before_flush(self._report_soon)
            self._soon.append(delivery)

    def _report_soon(self) -> None:
        deliveries, self._soon = self._soon, []
        self.deliveries(deliveries)
        self.send_now()

    def batch(self, batch: DeliveryBatch) -> None:
        """Report a whole batch that is about to be handed out."""
        if self.seat is not None and batch.lease != NOT_LEASED:
            first, end = batch.held.first, batch.held.end
            if first is not None and end is not None:
                # What lies between and is of another delivery is none of this lease.
                batch.starts.append((first, end, self._monotonic_ms()))
                self._report([(batch.lease, first, end)])

    def again(
        self, batches: list[DeliveryBatch], *, received: Iterable[DeliveryBatch],
        rest: Iterable[Delivery],
    ) -> None:  # fmt: skip
        """Report what of batches that were re-claimed is held and does not wait here."""
        waiting: dict[DeliveryBatch | None, list[int]] = {}
        for delivery in rest:
            waiting.setdefault(delivery.batch, []).append(delivery.offset)
        unopened = set(received)
        self._report(
            [
                (batch.lease, first, last)
                for batch in batches
                if batch not in unopened
                for start, end in batch.held
                for first, last in Ranges(ranges_of(waiting.get(batch, []))).gaps(start, end)
            ]
        )

    def _report(self, rows: list[Row]) -> None:
        if rows and self.seat is not None and self.seat.is_taken:
            link = self.seat.link
            if link.progress.is_shared:
                link.progress.started(self.seat.id, rows)
                self.is_unsent = True
            else:
                link.write_soon(started_frame(self.seat.id, rows))
                self.is_unsent = link.has_unsent

    def send_now(self) -> None:
        """Send reports at once, for a program that does not wait for the loop."""
        if self.is_unsent and self.seat is not None and self.seat.is_taken:
            self.seat.link.write()
            self.is_unsent = self.seat.link.has_unsent
