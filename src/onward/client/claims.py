"""What a member re-claims over a new connection: the leases of the one before.

A claim names a delivery, its topic and the ranges that are unsettled, or whose outcome has no
answer, each with its attempt; how old the delivery is, and how long ago its messages were started.
The broker decides (`broker.reclaim`).
"""

from __future__ import annotations

from collections.abc import Iterable

from onward.client.delivery_batch import DeliveryBatch
from onward.client.settling import Settling
from onward.delivery.ranges import Ranges
from onward.protocol.deliveries import CLAIMED_STARTS_MAX, CLAIMS_MAX, ROWS_MAX, Claim, Row


def claims_of(
    batches: Iterable[DeliveryBatch], settling: Settling, *, now_ms: int
) -> tuple[Claim, ...]:
    """Return the claims for what is held, and for what outcomes wait for an answer."""
    wanted = {batch: Ranges(batch.held) for batch in batches}
    for waiting in settling.unanswered():
        if not waiting.is_renewal:
            wanted.setdefault(waiting.batch, Ranges()).update(list(waiting.ranges))
    claims: list[Claim] = []
    room, starts_room = ROWS_MAX, CLAIMED_STARTS_MAX
    for batch, ranges in wanted.items():
        rows = tuple(
            (first, last, attempt)
            for start, end, attempt, _ in batch.grants
            for first, last in ranges.overlap(start, end)
        )
        room -= len(rows)
        if room < 0 or len(claims) == CLAIMS_MAX:
            break  # more than a frame takes: the broker delivers the rest again
        if not rows:
            continue
        starts = _starts(batch, ranges, now_ms)[:starts_room]
        starts_room -= len(starts)
        number, held_ms = batch.topic_number(), max(0, now_ms - batch.arrived_at_ms)
        claims.append(Claim(batch.lease, batch.topic, number, rows, held_ms, starts))
    return tuple(claims)


def _starts(batch: DeliveryBatch, ranges: Ranges, now_ms: int) -> tuple[Row, ...]:
    return tuple(
        (first, last, max(0, now_ms - at_ms))
        for start, end, at_ms in batch.starts
        for first, last in ranges.overlap(start, end)
    )


def by_lease(rows: Iterable[Row]) -> dict[int, Ranges]:
    """Return ranges by the delivery that they are of.

    >>> {lease: list(ranges) for lease, ranges in by_lease([(1, 0, 4), (1, 4, 6)]).items()}
    {1: [(0, 6)]}
    """
    found: dict[int, Ranges] = {}
    for lease, start, end in rows:
        found.setdefault(lease, Ranges()).add(start, end)
    return found
