"""The schedule in a thread: receipts whose verbs block, and the calls of `ScheduleCalls`.

    receipt = mq.publish("reminders", "pay", delay="45m")
    receipt.cancel()

What is written there is true here, without `await`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from onward.client.receipt import BatchReceipt, Receipt
from onward.client.schedule_times import At
from onward.client.scheduled import ScheduledBatchReceipt, ScheduledReceipt
from onward.durations import Duration
from onward.protocol.operations.schedule import CancelResult, MoveResult, ScheduledDescription

Run = Callable[[Coroutine[Any, Any, Any]], Any]


class SyncScheduledReceipt:
    """What a scheduled publish returns to a thread: the message waits, and can be cancelled.

    >>> from onward import connect_sync
    >>> with connect_sync("memory:") as mq:
    ...     receipt = mq.publish("reminders", "pay", delay="45m")
    ...     receipt.id, receipt.cancel().state
    ('@schedule/0', 'cancelled')
    """

    def __init__(self, receipt: ScheduledReceipt, run: Run) -> None:
        self._receipt = receipt
        self._run = run

    @property
    def topic(self) -> str:
        """Where the message fires."""
        return self._receipt.topic

    @property
    def schedule_id(self) -> int:
        """The number under which it waits."""
        return self._receipt.schedule_id

    @property
    def id(self) -> str:
        """The schedule id for people."""
        return self._receipt.id

    @property
    def due_at_ms(self) -> int:
        """The time that was asked for."""
        return self._receipt.due_at_ms

    @property
    def event_id(self) -> int:
        """The index of the log's entry that holds it."""
        return self._receipt.event_id

    @property
    def durability(self) -> str:
        """How safe it is."""
        return self._receipt.durability

    def cancel(self, *, cause: str = "") -> CancelResult:
        """Let it never fire; the result says whether that was in time."""
        result: CancelResult = self._run(self._receipt.cancel(cause=cause))
        return result

    def reschedule(
        self, *, at: At | None = None, delay: Duration | None = None, delay_ms: int | None = None
    ) -> MoveResult:
        """Let it fire at another time; when it was moved, this receipt has its new id."""
        result: MoveResult = self._run(
            self._receipt.reschedule(at=at, delay=delay, delay_ms=delay_ms)
        )
        return result

    def status(self) -> ScheduledDescription:
        """Return what became of it."""
        found: ScheduledDescription = self._run(self._receipt.status())
        return found

    def __repr__(self) -> str:
        return f"Sync{self._receipt!r}"


class SyncScheduledBatchReceipt:
    """What a scheduled `publish_many` returns to a thread.

    >>> from onward import connect_sync
    >>> with connect_sync("memory:") as mq:
    ...     receipt = mq.publish_many("reminders", ["a", "b"], delay="45m")
    ...     list(receipt.ids), [result.state for result in receipt.cancel()]
    ([0, 1], ['cancelled', 'cancelled'])
    """

    def __init__(self, receipt: ScheduledBatchReceipt, run: Run) -> None:
        self._receipt = receipt
        self._run = run

    @property
    def topic(self) -> str:
        """Where the messages fire."""
        return self._receipt.topic

    @property
    def first_id(self) -> int:
        """The number of the first message; the others follow."""
        return self._receipt.first_id

    @property
    def count(self) -> int:
        """How many there are."""
        return self._receipt.count

    @property
    def ids(self) -> range:
        """The schedule ids of all messages."""
        return self._receipt.ids

    @property
    def event_id(self) -> int:
        """The index of the log's entry that holds them."""
        return self._receipt.event_id

    @property
    def durability(self) -> str:
        """How safe they are."""
        return self._receipt.durability

    def cancel(self, *, cause: str = "") -> list[CancelResult]:
        """Let none of them fire; the results say for which that was in time."""
        results: list[CancelResult] = self._run(self._receipt.cancel(cause=cause))
        return results

    def __repr__(self) -> str:
        return f"Sync{self._receipt!r}"


def for_threads(
    receipt: Receipt | BatchReceipt | ScheduledReceipt | ScheduledBatchReceipt, run: Run
) -> Any:
    """Return a receipt whose verbs block; one without verbs stays as it is.

    >>> for_threads(Receipt("orders", 7, 12, "disk"), lambda work: None).id
    'orders/7'
    """
    if isinstance(receipt, ScheduledReceipt):
        return SyncScheduledReceipt(receipt, run)
    if isinstance(receipt, ScheduledBatchReceipt):
        return SyncScheduledBatchReceipt(receipt, run)
    return receipt
