"""Giving back messages that a member has received and its program has not started.

    received (not opened) ── rest (opened, taken one by one) ── unstarted (taken for a later call)
    the last to be worked on: it is given back first                                       the first

A release counts as no attempt. Whatever was finished before it was sent stays: nobody else gets it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, MutableSequence

from onward.client.credit import Credit
from onward.client.delivery import Delivery
from onward.client.delivery_batch import NOT_LEASED, DeliveryBatch
from onward.delivery.ranges import ranges_of


def batch_of(delivery: Delivery) -> DeliveryBatch:
    """Return the batch that a message came with."""
    assert delivery.batch is not None, "a delivery is made by its batch"
    return delivery.batch


def still_ours(deliveries: list[Delivery], *, now_ms: int) -> list[Delivery]:
    """Return those that can be handed out; give back those whose lease may be over."""
    late = [one for one in deliveries if batch_of(one).expires_at_ms <= now_ms]
    if late:
        _release(late)
        deliveries = [one for one in deliveries if batch_of(one).expires_at_ms > now_ms]
    return [one for one in deliveries if not one.is_lost]


def release_all(received: deque[DeliveryBatch], rest: deque[Delivery], credit: Credit) -> None:
    """Give back whatever waits to be taken."""
    _release(rest)
    rest.clear()
    while received:
        _release_received(received.popleft(), credit)
    credit.waiting = 0


def release_last(
    count: int, received: deque[DeliveryBatch], rest: deque[Delivery], unstarted: list[Delivery],
    unreported: int, credit: Credit,
) -> int:  # fmt: skip
    """Give back up to `count` messages, the last ones first; return how many.

    Of `rest` only the last `unreported` can go: the others were reported as started.
    """
    released = _pop_received(received, count, credit)
    released += _pop(rest, min(count - released, unreported))
    credit.waiting = max(0, credit.waiting - released)
    return released + _pop(unstarted, count - released)


def _pop_received(received: deque[DeliveryBatch], count: int, credit: Credit) -> int:
    """Give back up to `count` messages of batches that nobody has opened; return how many."""
    left = count
    while left and received and received[-1].lease != NOT_LEASED:
        if received[-1].granted > left:
            received[-1].release_last_soon(left)
            return count
        left -= received[-1].granted
        _release_received(received.pop(), credit)
    return count - left


def _pop(deliveries: MutableSequence[Delivery], count: int) -> int:
    released = [deliveries.pop() for _ in range(min(count, len(deliveries)))]
    _release(released)
    return len(released)


def _release_received(batch: DeliveryBatch, credit: Credit) -> None:
    credit.opened(batch.entries_bytes)
    batch.taken()
    batch.give_back_soon()


def _release(deliveries: Iterable[Delivery]) -> None:
    offsets: dict[DeliveryBatch, list[int]] = {}
    for delivery in deliveries:
        offsets.setdefault(batch_of(delivery), []).append(delivery.offset)
    for batch, some in offsets.items():
        batch.release_ranges_soon(ranges_of(some))
