"""Says what is wrong with a follower that took the place of its leader.

The leader answered before its entries were copied: what it answered last may be lost. Everything up
to the last entry that the follower had at its promotion is history, and must be respected:

    F1   the follower has what it acknowledged, unchanged: its log is the beginning of the leader's
    F2   its state is the fold of its log, and stays so
    F3   the log that it continues still has what it copied, as far as it is stored
    F4   what was acked in a group, and copied, is never delivered by the new leader
    F5   what was unfinished in a group when it was promoted is finished in the end
    F6   what was scheduled, and copied, fires exactly once; what was cancelled, and copied, never;
         nothing fires twice, or before its time
    F7   what members got of that history is what is stored

What clients published is held to the rules of `checker`, without the answers that were lost.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from onward.broker.state import State, open_state
from onward.log.disk import Disk
from onward.log.log import LogLimits
from onward.log.recovery import scan
from onward.message.entry import Kind
from onward.message.message import Message
from onward.testing.fold import copy_folder
from onward.testing.group_history import GroupHistory, GroupPlan
from onward.testing.history import History, id_of, kind_of
from onward.testing.wire_history import WireEvent

Drains = dict[str, list[Message]]
Checksums = dict[int, int]
"""Of entries that are stored, by index. Each covers the whole entry and the chain before it."""
NEVER = 1 << 62


@dataclass(slots=True)
class Plan:
    """One message that somebody scheduled."""

    id: str
    topic: str
    due_at_ms: int
    outcome: Literal["pending", "acked", "refused", "unknown"] = "pending"
    answered_us: int = NEVER
    cancel: Literal["none", "cancelled", "unknown"] = "none"
    cancelled_us: int = NEVER

    @property
    def body(self) -> bytes:
        """The body by which it is known."""
        return f"{self.id} {self.topic}".encode()


@dataclass(slots=True)
class Timeline:
    """How far the log of the leader was, and when."""

    at_us: list[int] = field(default_factory=list)
    last_index: list[int] = field(default_factory=list)

    def note(self, now_us: int, last_index: int) -> None:
        """Note the index of the last entry."""
        self.at_us.append(now_us)
        self.last_index.append(last_index)

    def index_at(self, at_us: int) -> int:
        """Return an index up to which everything stands that was answered by then."""
        place = bisect_left(self.at_us, at_us)
        return self.last_index[place] if place < len(self.at_us) else NEVER


@dataclass(frozen=True)
class Promotion:
    """What was known when the follower took over."""

    at_us: int
    last_index: int
    acknowledged_index: int
    copied: Checksums
    """The entries of the follower."""
    state: State
    """The fold of them."""
    timeline: Timeline

    def is_copied(self, answered_us: int) -> bool:
        """Tell whether what was answered then must be known: copied, or of the new leader."""
        return answered_us > self.at_us or self.timeline.index_at(answered_us) <= self.last_index


def entries_on(disk: Disk, folder: str) -> tuple[Checksums, State]:
    """Return the entries in a folder, as a start would find them, and the state they make."""
    opened, state = open_state(copy_folder(disk, folder), folder, limits=LogLimits())
    entries = (entry for segment in opened.log.segments for entry, _ in scan(segment, 0))
    return {entry.index: entry.crc for entry in entries if entry.kind != Kind.GAP}, state


def differing(copied: Checksums, others: Checksums) -> list[int]:
    """Return the indexes of entries that are not the same in both; one may have lost its oldest.

    >>> differing({1: 5, 2: 6, 3: 7}, {2: 6, 3: 8, 4: 9})
    [3]
    """
    return [index for index, crc in copied.items() if others.get(index, crc) != crc]


def check_promotion(promotion: Promotion, leader: Checksums) -> Iterator[str]:
    """Yield what is wrong with the follower when it takes over, beside entries of the leader."""
    if promotion.last_index < promotion.acknowledged_index:
        yield (
            f"F1: the follower acknowledged {promotion.acknowledged_index} entries and has "
            f"{promotion.last_index}"
        )
    if promotion.last_index > max(leader, default=0):
        yield f"F1: the follower has entry {promotion.last_index}, which the leader has not"
    if others := differing(promotion.copied, leader):
        yield f"F1: entries {others[:5]} of the follower are not those of the leader"


def forget_lost(history: History, promotion: Promotion) -> int:
    """Forget the receipts of what was not copied; return how many there were."""
    lost = [
        attempt
        for attempt in history.attempts.values()
        if attempt.outcome == "acked" and attempt.event_id > promotion.last_index
    ]
    for attempt in lost:
        attempt.outcome = "unknown"
    return len(lost)


def check_groups_after(
    groups: GroupHistory, drains: Drains, promotion: Promotion, delivered: list[WireEvent]
) -> Iterator[str]:
    """Yield what is wrong with the groups; `delivered` is what the new leader sent."""
    for plan in groups.plans.values():
        yield from _acked_is_the_end(groups, plan, promotion, delivered)
        yield from _nothing_is_forgotten(groups, plan, promotion, drains)
    for handed in groups.handed:
        message = handed.message
        stored = drains.get(message.topic, [])
        is_old = message.event_id <= promotion.last_index and kind_of(message.topic) == "kept"
        if is_old and (
            message.offset >= len(stored) or id_of(stored[message.offset]) != id_of(message)
        ):
            yield f"F7: {handed.stint.machine} got {message.id} {message.body[:20]!r}: it is lost"


def copied_acks(
    groups: GroupHistory, plan: GroupPlan, promotion: Promotion
) -> set[tuple[str, int]]:
    """Return the places that were acked, confirmed and copied before the promotion."""
    return {
        handed.place
        for handed in groups.of_group(plan.name)
        for verb in handed.verbs
        if verb.do == "ack" and verb.answer == "done" and verb.answered_us < promotion.at_us
        if promotion.is_copied(verb.answered_us)
    }


def _acked_is_the_end(
    groups: GroupHistory, plan: GroupPlan, promotion: Promotion, delivered: list[WireEvent]
) -> Iterator[str]:
    acked = copied_acks(groups, plan, promotion)
    for event in delivered:
        if event.kind != "delivered" or event.seat.group != plan.name:
            continue
        for start, end, _ in event.grants:
            for offset in range(start, end):
                if (event.topic, offset) in acked:
                    yield f"F4: {event.topic}/{offset} was acked in {plan.name!r} and came again"


def _nothing_is_forgotten(
    groups: GroupHistory, plan: GroupPlan, promotion: Promotion, drains: Drains
) -> Iterator[str]:
    group = promotion.state.groups.by_name.get(plan.name)
    settled = {
        handed.place
        for handed in groups.of_group(plan.name)
        for verb in handed.verbs
        if verb.do in ("ack", "reject") and verb.answer != "lost"
        if verb.answered_us > promotion.at_us
    }
    for topic in plan.topics:
        share = None if group is None else group.shares.get(topic)
        for message in drains.get(topic, []):
            place = topic, message.offset
            was_done = share is not None and share.state_of(message.offset) in ("finished", "dead")
            is_done = place in settled or place in groups.dead.get(plan.name, {})
            if plan.wants(message) and not was_done and not is_done:
                yield f"F5: {message.id} is finished in {plan.name!r}, but nobody acked it"


def check_plans(plans: list[Plan], drains: Drains, promotion: Promotion) -> Iterator[str]:
    """Yield what is wrong with what was scheduled."""
    fired = [message for drain in drains.values() for message in drain]
    times = Counter(id_of(message) for message in fired)
    for plan in plans:
        count = times[plan.id]
        is_kept = plan.outcome == "acked" and promotion.is_copied(plan.answered_us)
        is_gone = plan.cancel == "cancelled" and promotion.is_copied(plan.cancelled_us)
        if plan.outcome == "pending":
            yield f"I13: the schedule of {plan.id} was never answered"
        if count > 1:
            yield f"F6: {plan.id} fired {count} times"
        if count and (is_gone or plan.outcome == "refused"):
            yield f"F6: {plan.id} fired, but it was {'cancelled' if is_gone else 'refused'}"
        if not count and is_kept and plan.cancel == "none":
            yield f"F6: {plan.id} never fired"
    known = {plan.id: plan for plan in plans}
    for message in fired:
        found = known.get(id_of(message))
        if found is None or message.published_at_ms < found.due_at_ms:
            yield f"F6: {message.id} was not scheduled, or fired before its time"
